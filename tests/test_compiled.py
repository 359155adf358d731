"""compiled.py against the model's own steps: first its formula, operation by operation, then what the compiler makes of
it. Compiling takes half a minute, so the tests that do are marked slow."""
import dataclasses
import io
import random
import sys
import warnings
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config

import attention
import batching
import compiled
import generate
import packed
import sampling
from compiled import Compiled, DecodeStep
from kvcache import PagedKVCache
from model import Config, Llama

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = Config(n_layer=2, n_head=6, n_kv_head=2, head_dim=8, hidden_size=32, intermediate_size=48, vocab_size=60,
              max_seq_len=200)
BLOCK = 4


def new_model(dtype=torch.float64, **changes) -> Llama:
    torch.manual_seed(0)
    return Llama(dataclasses.replace(TINY, **changes)).to(dtype).eval().fuse_(pack=False)


def new_cache(model: Llama, n_blocks: int = 60, window: int | None = None) -> PagedKVCache:
    """Full of NaN, and of free blocks in no order."""
    c = model.config
    cache = PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, n_blocks, BLOCK, dtype=model.model["norm"].weight.dtype,
                         window=window, attention=attention.paged_attention)
    cache.pool.fill_(torch.nan)
    blocks = list(range(n_blocks))
    random.Random(1).shuffle(blocks)
    cache._free = type(cache._free).fromkeys(blocks)
    return cache


def extend(cache, plan, forward) -> torch.Tensor:
    step = cache.extend(plan)
    with torch.inference_mode():
        logits = forward(step)
    cache.commit(step)
    return logits


def eager(model):
    return lambda step: model(step.tokens, step.positions, step.attend, step.rows)


@pytest.fixture
def as_formula(monkeypatch):
    """In place of the compiler: the library is an empty archive, and what is loaded from it is the formula itself."""
    made = []
    monkeypatch.setattr(compiled, "compile_step",
                        lambda step, pool, path: (made.append(path), zipfile.ZipFile(path, "w").close()))
    monkeypatch.setattr(compiled, "load_step", lambda step, path: lambda *a: list(step(*a)))
    return made


# ------------------------------------------------------------------ the formula


@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("lengths", [[1], [2], [BLOCK - 1], [BLOCK], [BLOCK + 1], [3 * BLOCK], [70], [1, 2, 3],
                                     [BLOCK, 1, 5 * BLOCK + 1], [30] * 5], ids=str)
def test_a_step_is_the_models(tmp_path, as_formula, lengths, window):
    """Logits, and keys and values in the cache, as attention.py and the model give them, in float64; pools full of NaN
    but for what was written, blocks in any order."""
    model = new_model(sliding_window=window)
    ids = [[(7 * i + 11 * b) % 60 for i in range(n)] for b, n in enumerate(lengths)]
    logits, pools = [], []
    for which in ("eager", "compiled"):
        cache = new_cache(model, window=window)
        run = Compiled(model, cache, str(tmp_path), most=8) if which == "compiled" else eager(model)
        for b, prompt in enumerate(ids):
            cache.add(b, prompt)
        extend(cache, dict(enumerate(ids)), eager(model))
        logits += [extend(cache, {b: [t + b] for b in range(len(ids))}, run) for t in (5, 9, 2)]
        pools.append(cache.pool)
        if which == "compiled":
            assert (run.compiled, run.eager) == (3, 0)
    for a, b in zip(logits[:3], logits[3:]):
        assert torch.allclose(a, b, rtol=0, atol=1e-10) and a.isfinite().all()
    assert torch.allclose(*pools, rtol=0, atol=1e-10, equal_nan=True)


def test_a_sequence_of_no_keys_and_rows_that_are_asked_for(tmp_path, as_formula):
    model = new_model()
    cache = new_cache(model)
    run = Compiled(model, cache, str(tmp_path), most=4)
    for b in range(3):
        cache.add(b)
    step = cache.extend({b: [b + 1] for b in range(3)})  # each one's first token
    expected = model(step.tokens, step.positions, step.attend, step.rows)
    assert torch.allclose(run(step), expected, rtol=0, atol=1e-10)
    assert torch.allclose(run(step, torch.tensor([2, 0])), expected[[2, 0]], rtol=0, atol=1e-10)
    assert run(step, torch.tensor([], dtype=torch.int64)).shape == (0, 60)


def test_other_steps_run_eagerly(tmp_path, as_formula):
    """A prompt, a draft to verify, and more than one sequence where only one was provided for."""
    model = new_model()
    cache = new_cache(model)
    run = Compiled(model, cache, str(tmp_path), most=1)
    assert len(as_formula) == 1
    cache.add("a")
    cache.add("b")
    extend(cache, {"a": [1, 2, 3]}, run)
    extend(cache, {"a": [4, 5]}, run)
    extend(cache, {"a": [6], "b": [7]}, run)
    assert (run.compiled, run.eager) == (0, 3)
    extend(cache, {"a": [6]}, run)
    assert (run.compiled, run.eager) == (1, 3)


def test_trying_a_function_out_leaves_the_cache_as_it_was(tmp_path, as_formula):
    model = new_model()
    cache = new_cache(model)
    cache.add("a")
    extend(cache, {"a": list(range(30))}, eager(model))
    before = cache.pool.clone()
    Compiled(model, cache, str(tmp_path), most=2)
    assert torch.equal(before.nan_to_num(7), cache.pool.nan_to_num(7))
    cache.check()


def test_a_function_that_computes_something_else_is_not_used(tmp_path, as_formula, monkeypatch):
    model = new_model()
    monkeypatch.setattr(compiled, "load_step", lambda step, path: lambda *a: [x.flip(-1) for x in step(*a)])
    with pytest.raises(RuntimeError, match="differs from the model by"):
        Compiled(model, new_cache(model), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_kept_library_is_used_again_and_only_for_what_it_was_made_for(tmp_path, as_formula):
    model, told = new_model(), []
    for n_blocks in (60, 9):  # the number of blocks may differ
        Compiled(model, new_cache(model, n_blocks), str(tmp_path), most=2, tell=told.append)
        assert len(as_formula) == len(told) == 2
    others = [new_model(norm_eps=1e-3), new_model(n_layer=1), new_model(torch.float32), new_model(tie_embeddings=True)]
    for i, other in enumerate(others):
        Compiled(other, new_cache(other), str(tmp_path), tell=told.append)
        assert len(as_formula) == len(told) == 3 + i
    assert len(set(as_formula)) == 6
    one, two = (DecodeStep(model, scale, None, True) for scale in (1.0, 0.5))
    pool = new_cache(model).pool
    keys = {compiled.library_key(step, pool) for step in (one, two, DecodeStep(model, 1.0, 7, True),
                                                          DecodeStep(model, 1.0, None, False))}
    assert len(keys) == 4
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert compiled.library_key(one, pool) not in keys
    finally:
        torch.set_num_threads(threads)


def test_a_cache_that_is_quantized_is_refused(tmp_path):
    model = new_model()
    cache = PagedKVCache(2, 2, 8, 4, BLOCK, dtype="int8")
    with pytest.raises(ValueError, match="quantized or on cpu"):
        Compiled(model, cache, str(tmp_path))
    with pytest.raises(ValueError, match="leave out --compile"):
        generate.load(compile=1, kv_dtype="int8")


def test_the_batcher_gives_the_same_answers(tmp_path, as_formula):
    """Random traffic, greedy and drawn, prompts of all lengths beside decoding: token for token."""
    model, answers = new_model(), []
    for which in ("eager", "compiled"):
        cache, draw = new_cache(model), random.Random(3)
        forward = {"forward": Compiled(model, cache, str(tmp_path), most=4)} if which == "compiled" else {}
        batcher = batching.Batcher(model, cache, sampling, 60, max_batch=4, chunk=3, **forward)
        prompts = [[draw.randrange(60) for _ in range(draw.randrange(1, 20))] for _ in range(7)]
        requests = [batching.Request(prompt, max_tokens=9, n=1 + i % 2, sampling={"temperature": i % 2}, seed=i)
                    for i, prompt in enumerate(prompts)]
        for request in requests:
            batcher.add(request)
        while batcher.live:
            batcher.step()
        answers.append([s.ids for r in requests for s in r.samples])
        cache.check()
    assert answers[0] == answers[1] and forward["forward"].compiled > 5


# ------------------------------------------------------------------ what the compiler gets, and what becomes of it


@pytest.fixture
def compiler(monkeypatch):
    """In place of the compiler: keeps what it is given, and writes a file as the compiler does."""
    seen = SimpleNamespace(graph=None, configs={}, fails=None)

    def compile_and_package(graph, package_path, inductor_configs):
        seen.graph, seen.configs = graph, inductor_configs
        Path(package_path).write_bytes(b"half" if seen.fails else b"whole")
        print("warnings by the thousand", file=sys.stderr)
        if seen.fails:
            raise seen.fails
        return package_path

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_and_package)
    return seen


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("alone", [True, False])
def test_the_step_written_down_from_one_example_is_right_for_others(tmp_path, compiler, capsys, alone, window):
    """Other numbers of blocks, of columns of the table and of sequences than those that it was written down with."""
    model, path = new_model(sliding_window=window), tmp_path / "new" / "step.pt2"
    step, draw = DecodeStep(model, 8 ** -0.5, window, alone), torch.Generator().manual_seed(1)
    compiled.compile_step(step, torch.zeros(2, 2, 2, 60, BLOCK, 8, dtype=torch.float64), str(path))
    assert path.read_bytes() == b"whole" and list(path.parent.iterdir()) == [path]
    assert capsys.readouterr().err == "" and compiler.configs["aot_inductor.package_constants_in_so"] is False
    graph = compiler.graph.module()
    for B, J, n_blocks in ((1, 2, 9), (1, 11, 200)) if alone else ((2, 2, 9), (3, 3, 60), (7, 5, 100)):
        pool = torch.randn(2, 2, 2, n_blocks, BLOCK, 8, generator=draw, dtype=torch.float64)
        table = torch.randint(n_blocks, (B, J), generator=draw)
        seen = torch.randint(J * BLOCK + 1, (B,), generator=draw)
        arguments = torch.arange(B) + 3, seen, pool, table, seen
        for a, b in zip(graph(*arguments), step(*arguments), strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("error, reason", [
    (RuntimeError("\n  cc1plus: out of memory\nmore lines\n"), r"RuntimeError: cc1plus: out of memory\)"),
    (AssertionError(), r"AssertionError: no reason given\)"), (OSError("x" * 900), f"OSError: {'x' * 200}\\)")])
def test_a_compiler_that_fails_leaves_one_line_and_no_file(tmp_path, compiler, capsys, error, reason):
    compiler.fails, model = error, new_model(n_layer=1)
    with pytest.raises(RuntimeError, match=f"could not be compiled \\({reason}; compiling needs a C") as caught:
        Compiled(model, new_cache(model), str(tmp_path / "kept"))
    assert "\n" not in str(caught.value) and capsys.readouterr().err == ""
    assert list((tmp_path / "kept").iterdir()) == []
    compiler.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        Compiled(model, new_cache(model), str(tmp_path / "kept"))
    assert list((tmp_path / "kept").iterdir()) == []


def packed_model() -> Llama:
    """Every matrix in 4 bits, in groups of 32; the embedding, which is the head too, stays as it is."""
    model = new_model(torch.bfloat16, n_head=8, intermediate_size=64)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, packed.QuantLinear(packed.repack(child.weight.data, 4)[0]))
    return model


@pytest.mark.parametrize("weights, alone, tried", [
    ("packed", True, True), ("packed", False, False), ("bfloat16", True, False)])
def test_products_are_tried_out_for_one_row_of_packed_weights_only(tmp_path, compiler, weights, alone, tried):
    """Of matrices in floating point Inductor's own product would put packed copies into the library."""
    model = packed_model() if weights == "packed" else new_model(torch.bfloat16)
    step = DecodeStep(model, 1.0, None, alone)
    compiled.compile_step(step, torch.zeros(2, 2, 2, 9, BLOCK, 8, dtype=torch.bfloat16), str(tmp_path / "step.pt2"))
    assert compiler.configs.get("max_autotune", False) == tried


def test_a_library_uses_the_models_own_weights_where_they_lie(monkeypatch):
    """Parameters and buffers under their names, the rotary frequencies, which are neither, and the one group size."""
    model, given = packed_model(), {}
    names = [name for name, _ in (*model.named_parameters(prefix="model"), *model.named_buffers(prefix="model"))]

    def load_constants(weights, use_inactive, check_full_update, user_managed):
        given.update(weights)
        assert (use_inactive, check_full_update, user_managed) == (False, True, True)

    def library(path, name, *more):
        assert (path, name) == ("a.pt2", "model")
        return SimpleNamespace(get_constant_fqns=lambda: [*names, "_tensor_constant0", "_weight_int4pack_mm_group"],
                               load_constants=load_constants, run=lambda arguments: [sum(arguments), len(arguments)])

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", library)
    run = compiled.load_step(DecodeStep(model, 1.0, None, True), "a.pt2")
    own = dict((*model.named_parameters(prefix="model"), *model.named_buffers(prefix="model")))
    assert len(names) > 10 and all(given[name].data_ptr() == own[name].data_ptr() for name in names)
    assert not any(tensor.requires_grad for tensor in given.values())
    assert given["_tensor_constant0"] is model.rotary.inv_freq
    assert int(given["_weight_int4pack_mm_group"]) == 32 and len(given) == len(names) + 2
    assert run(*map(torch.tensor, (1, 2, 3))) == [6, 3] and run.weights == given, "what the library points to lives on"


def test_a_library_is_of_one_kind_of_processor(monkeypatch):
    """Another machine's, and one's own where the system does not say, are other libraries."""
    step, pool = DecodeStep(new_model(), 1.0, None, True), torch.zeros(2, 2, 2, 9, BLOCK, 8)
    keys = set()
    for text in (None, "model name\t: x\nflags\t\t: fpu avx2\n", "flags\t\t: fpu avx2 avx512f\n"):
        def cpuinfo(path, text=text):
            if text is None:
                raise FileNotFoundError(path)
            return io.StringIO(text)

        monkeypatch.setattr(compiled, "open", cpuinfo, raising=False)
        keys.add(compiled.library_key(step, pool))
        assert compiled.library_key(step, pool) in keys, "the same again"
    assert len(keys) == 3


# ------------------------------------------------------------------ compiled


@pytest.mark.slow
def test_compiled_functions_compute_what_the_model_does(tmp_path):
    """Both functions, behind 1 to 70 keys, from a pool of NaN; loaded again they need no compiler."""
    model, told = new_model(), []
    for _ in range(2):
        cache, other = new_cache(model), new_cache(model)
        run = Compiled(model, cache, str(tmp_path), most=8, tell=told.append)
        for lengths in ([1], [4], [69], [1, 70, 16], [5, 5]):
            ids = [[(7 * i + 11 * b) % 60 for i in range(n)] for b, n in enumerate(lengths)]
            pair = []
            for c, forward in ((cache, run), (other, eager(model))):
                for b in range(8):
                    c.free(b)
                for b in range(len(ids)):
                    c.add(b)
                extend(c, dict(enumerate(ids)), eager(model))
                pair += [extend(c, {b: [t + b] for b in range(len(ids))}, forward) for t in (5, 9, 2)]
            for a, b in zip(pair[:3], pair[3:]):
                assert torch.allclose(a, b, rtol=0, atol=1e-10)
        assert run.compiled == 15 and len(told) == 2, "the second time both are there"


@pytest.mark.slow
def test_without_a_compiler_there_is_one_clear_error_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = new_model(torch.float32, n_layer=1, vocab_size=61)
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/no-such-compiler",)}), \
            pytest.raises(RuntimeError, match="needs a C\\+\\+ compiler such as g\\+\\+") as caught:
        Compiled(model, new_cache(model), str(tmp_path / "folder"))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_damaged_library_is_made_again(tmp_path, as_formula):
    model = new_model()
    for _ in range(2):
        Compiled(model, new_cache(model), str(tmp_path))
        path, = tmp_path.iterdir()
        path.write_bytes(b"PK damaged")
    assert as_formula == [str(path)] * 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    model, file = new_model(), tmp_path / "file"
    file.touch()
    with pytest.raises(RuntimeError, match=r"cannot be kept in .*file.inside \(Not a directory\); name a folder"):
        Compiled(model, new_cache(model), str(file / "inside"))


def test_packed_layers_of_unlike_groups_are_refused(tmp_path):
    model = new_model()
    for block, group in zip(model.model["layers"], (32, 64)):
        block.mlp.kind, block.mlp.group = "int4", group
    with pytest.raises(ValueError, match="groups of 32 and of 64 cannot be compiled into one step"):
        Compiled(model, new_cache(model), str(tmp_path))


@pytest.fixture(scope="module")
def pair(default_gguf):
    """The default model packed, compiled for 4 sequences (kept in the cache folder), and as it is."""
    if packed._int4_block() is None:
        pytest.skip("nothing stays packed on this machine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return generate.load(compile=4, max_batch=4, context=1024), generate.load(max_batch=4, context=1024)


@pytest.mark.slow
def test_the_default_model_compiled_says_what_it_says(pair, default_gguf):
    """Along the golden answer: near to float32, and each id the likeliest, but where two are a rounding apart."""
    from test_golden import ANSWER, PROMPT

    llm, exact = pair[0], generate.load(default_gguf, dtype="float32", context=128, max_batch=1)
    divergence, others = [], 0
    for one in (llm, exact):
        one.cache.add("a")
        extend(one.cache, {"a": PROMPT}, eager(one.model))
    for last, now in pairwise(ANSWER):
        logits, right = (extend(one.cache, {"a": [last]}, forward)[0].float()
                         for one, forward in ((llm, llm.compiled), (exact, eager(exact.model))))
        assert logits.max() - logits[now] <= 0.25  # bfloat16 near 20: two steps of rounding
        others += int(logits.argmax()) != now
        divergence.append((right.softmax(-1) * (right.log_softmax(-1) - logits.log_softmax(-1))).sum())
    llm.cache.free("a")
    assert others <= 3 and sum(divergence) / len(divergence) < 0.005


@pytest.mark.slow
def test_a_compiled_request_does_not_depend_on_its_batch_mates(pair):
    """Bits of the logits: the same sequence beside one, two and three others of any length, in any place."""
    llm, prompt = pair[0], [5 + 7 * i for i in range(37)]
    seen = []
    for mates, place in (([3], 0), ([100], 1), ([9, 64], 1), ([300, 1, 17], 3)):
        prompts = [[9 + 3 * i for i in range(n)] for n in mates]
        prompts.insert(place, prompt)
        for b, ids in enumerate(prompts):
            llm.cache.add(b)
            extend(llm.cache, {b: ids}, eager(llm.model))
        rows = [extend(llm.cache, {b: [11 + t] for b in range(len(prompts))}, llm.compiled)[place] for t in range(3)]
        seen.append(torch.stack(rows))
        for b in range(len(prompts)):
            llm.cache.free(b)
    assert all(torch.equal(seen[0], other) for other in seen[1:])
