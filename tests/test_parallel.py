"""parallel.py and ranks.py: several ranks against one process. The ranks are processes of a fork server, which has
imported all before; their store lives in the test's own process, as torchrun's lives in its agent."""
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from multiprocessing import forkserver, get_context

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny import tiny_folder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import checkpoint
import generate
import layouts
import packed
import parallel
import ranks
import sampling
import speculative
from batching import Batcher, Request
from graphs import Graphs
from kvcache import PagedKVCache, reference_attention
from model import Config, Llama

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Config(n_layer=2, n_head=9, n_kv_head=3, head_dim=4, hidden_size=24, intermediate_size=36, vocab_size=101,
                max_seq_len=96, tie_embeddings=True)
SHAPES = {  # name: (ranks, config)
    "9/3 on 3, tied": (3, CONFIG),
    "8/2 on 4, KV heads replicated": (4, replace(CONFIG, n_head=8, n_kv_head=2, tie_embeddings=False)),
    "14/2 on 2, biases": (2, replace(CONFIG, n_head=14, n_kv_head=2, qkv_bias=True)),
    "4/1 on 2, all biases, q and k norms": (2, replace(CONFIG, n_head=4, n_kv_head=1, qkv_bias=True, o_bias=True,
                                                       mlp_bias=True, qk_norm=True, tie_embeddings=False)),
    "6/6 on 3, window": (3, replace(CONFIG, n_head=6, n_kv_head=6, sliding_window=5, vocab_size=3)),
}

# ------------------------------------------------------------------ ranks in processes of their own


def _rank(pipe, environment: dict, target, args) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        if target in (command, mortal, elsewhere, bytes_read):  # which join by themselves, if at all
            result = target(*args)
        else:
            group = ranks.join()
            result = target(group, *args)
            group.close()
    except BaseException:
        result = "error", traceback.format_exc()
    pipe.send(result)


def command(*argv: str) -> tuple[int, str, str]:
    """generate.py on one rank: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = generate.main(argv)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def start(size: int, target, *args, numbers: list | None = None, others: tuple | None = None, agent: bool = True,
          wait_s: int = 300):
    """Processes and pipes of the ranks of these numbers (else all of `size`), each of which runs target(group, *args),
    all but the first one with other arguments, if there are any. agent: the store that they meet in is not one of
    theirs."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["test_parallel"])
    with pytest.MonkeyPatch.context() as patch:
        here = os.path.dirname(os.path.abspath(__file__))  # where the server finds it
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.path.dirname(here)]))
        forkserver.ensure_running()
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    port, running = store.port, []
    if not agent:  # the same port, most likely free again; rank 0 hosts the store
        store = None
    for rank in range(size) if numbers is None else numbers:
        here, there = context.Pipe()
        own = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
               "TORCHELASTIC_USE_AGENT_STORE": str(agent), "JOIN_SECONDS": str(wait_s)}
        mine = others if rank and others is not None else args
        process = context.Process(target=_rank, args=(there, own, target, mine), daemon=True)
        process.start()
        there.close()
        running.append((process, here, store))
    return running


def finish(running, most_s: float = 600) -> list:
    """What each rank returned; None of one that died."""
    results = []
    try:
        for _, pipe, _ in running:
            try:
                assert pipe.poll(most_s), "a rank hangs"
                results.append(pipe.recv())
            except EOFError:
                results.append(None)
    finally:
        for process, _, _ in running:
            process.join(0 if len(results) < len(running) else 30)
            process.kill()
    return results


def together(size: int, target, *args, **options) -> list:
    results = finish(start(size, target, *args, **options))
    for result in results:
        assert not (isinstance(result, tuple) and result and result[0] == "error"), result[1]
    return results


# ------------------------------------------------------------------ a random model, whole and shared


def tensors_of(config: Config, bits: int | None = None, group: int = 16, act_order: bool = False) -> dict:
    """Random weights, the norms and biases too; of linear layers packed ones if there are bits."""
    g = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        wanted = dict(Llama(config).named_parameters())
    found = {}
    for name, p in wanted.items():
        found[name] = torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3 + (p.dim() == 1)
        if bits and name.endswith(("_proj.weight", "embed_tokens.weight")):
            N, K = p.shape
            groups = K // group
            g_idx = torch.arange(K) // group
            if act_order:
                g_idx = g_idx[torch.randperm(K, generator=g)]
            found[name] = {"codes": torch.randint(0, 2**bits, (N, K), generator=g, dtype=torch.uint8),
                           "scales": torch.rand(N, groups, generator=g) * 0.1 + 0.01, "bits": bits,
                           "zeros": torch.randint(0, 2**bits, (N, groups), generator=g, dtype=torch.uint8),
                           "mins": torch.randn(N, groups, generator=g) * 0.1, "g_idx": g_idx if act_order else None}
    return found


def cache_of(config: Config, n_blocks: int = 40, dtype=torch.float64, kernel=attention.paged_attention):
    return PagedKVCache(config.n_layer, config.n_kv_head, config.head_dim, n_blocks, 4, max_seq_len=config.max_seq_len,
                        dtype=dtype, window=config.sliding_window, attention=kernel)


def part_of(group: ranks.Group, config: Config, tensors: dict, **options) -> tuple[Llama, PagedKVCache]:
    mine = parallel.shard_config(config, group.rank, group.size)
    shards = parallel.Shards(tensors, config, group.rank, group.size)
    model = Llama.from_tensors(mine, shards, torch.float64, packed=packed)
    return parallel.parallelize_(model, config, group).fuse_(), cache_of(mine, **options)


def mixed_steps(forward, cache, vocab_size: int) -> list:
    """Logits of some steps of every kind: prompts in pieces, single tokens, several rows, a fork with its copy."""
    g, logits = torch.Generator().manual_seed(1), []

    def ids(n):
        return torch.randint(vocab_size, (n,), generator=g).tolist()

    def step(plan, rows=None):
        taken = cache.extend(plan, rows)
        with torch.inference_mode():
            logits.append(forward(taken).numpy().copy())
        cache.commit(taken)

    for name in "abc":
        cache.add(name)
    step({"a": ids(6)})
    step({"b": ids(3), "a": ids(1), "c": ids(9)}, rows=[0, 3, 11, 12])
    step({"c": ids(2)}, rows=[])
    cache.fork("a", "d")
    cache.fork("c", "e")
    step({"d": ids(1), "a": ids(1), "b": ids(1), "e": ids(3), "c": ids(2)})
    cache.free("a")
    step({"d": ids(4), "b": ids(5), "e": ids(1)}, rows=[1, 3, 8, 9])
    cache.check()
    return logits


def alone(config: Config, tensors: dict):
    model = Llama.from_tensors(config, tensors, torch.float64, packed=packed)
    return lambda step: model(step.tokens, step.positions, step.attend, step.rows)


def shared_steps(group, config, tensors, dtype):
    model, cache = part_of(group, config, tensors, dtype=dtype, kernel=attention.paged_attention)
    if group.rank:
        return ranks.follow(model, cache, group)
    logits = mixed_steps(ranks.Leader(model, cache, group), cache, config.vocab_size)
    return logits, dict(group.calls), dict(group.bytes)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_one_process(name):
    size, config = SHAPES[name]
    tensors = tensors_of(config)
    cache = cache_of(config, kernel=reference_attention)
    wanted = mixed_steps(alone(config, tensors), cache, config.vocab_size)
    found, calls, sent = together(size, shared_steps, config, tensors, torch.float64)[0]
    assert cache.stats.copied > 1
    for a, b in zip(wanted, found, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and (abs(a - b) < 1e-9).all()
    tokens = [6, 13, 2, 8, 10]
    assert calls["all_reduce"] == len(tokens) * (2 * config.n_layer + 1)
    assert sent["all_reduce"] == sum(tokens) * (2 * config.n_layer + 1) * config.hidden_size * 8
    rows = [len(x) for x in wanted]
    assert sent["gather"] == sum(rows) * -(-config.vocab_size // size) * 8


# ------------------------------------------------------------------ traffic through the batcher


def serve(batcher: Batcher, seed: int, sound: bool = True) -> list[list[int]]:
    """The ids of random requests: shared beginnings, n answers, drawn and greedy, aborted, in a pool that is short."""
    rng, requests = random.Random(seed), []
    common = [rng.randrange(101) for _ in range(17)]
    for i in range(12):
        prompt = common[: rng.choice((0, 5, 8, 16, 17))] + [rng.randrange(101) for _ in range(rng.randint(1, 20))]
        warm = rng.random() < 0.6
        requests.append(Request(prompt, id=i, max_tokens=rng.randint(1, 14), n=rng.choice((1, 1, 2, 3)), seed=i,
                                sampling={"temperature": 1.0 if warm else 0.0, "top_p": rng.choice((0.9, 1.0))}))
    waiting = list(requests)
    while waiting or batcher.live:
        for _ in range(rng.randint(0, 2)):
            if waiting:
                batcher.add(waiting.pop(0))
        batcher.step()
        if rng.random() < 0.05 and batcher.live:
            batcher.abort(rng.choice(list(batcher.live)))
        batcher.cache.check()
    errors = [s.error for r in requests for s in r.samples if s.error]
    assert not (errors and sound), errors
    return [s.ids for r in requests for s in r.samples]


def batcher_of(model, cache, drafts: int = 0, **options) -> Batcher:
    if drafts:
        options.update(drafter=speculative.NgramDrafter(longest=2, shortest=1), verify=speculative.verify,
                       drafts=drafts)
    return Batcher(model, cache, sampling, 101, eos_ids=[3], max_batch=5, token_budget=24, chunk=7, **options)


def shared_traffic(group, config, tensors, seeds, drafts, n_blocks, deaf=False):
    model, cache = part_of(group, config, tensors, n_blocks=n_blocks)
    if deaf:
        ranks._copy_blocks = lambda *_: None
    if group.rank:
        return ranks.follow(model, cache, group)
    leader = ranks.Leader(model, cache, group)
    said = [serve(batcher_of(model, cache, drafts, forward=leader), seed, not deaf) for seed in seeds]
    return said, cache.stats.copied


TRAFFIC = replace(CONFIG, n_head=4, n_kv_head=2, tie_embeddings=False)


@pytest.mark.parametrize("size, config, drafts, packed_bits", [
    (2, TRAFFIC, 0, None), (4, TRAFFIC, 3, None), (2, TRAFFIC, 2, 4), (3, CONFIG, 2, None), (3, CONFIG, 0, 4)])
def test_random_traffic_equals_one_process(size, config, drafts, packed_bits):
    tensors, seeds = tensors_of(config, packed_bits, group=4), range(3)
    model = Llama.from_tensors(config, tensors, torch.float64, packed=packed)
    cache = cache_of(config, 22)
    wanted = [serve(batcher_of(model, cache, drafts), seed) for seed in seeds]
    (found, copied), *_ = together(size, shared_traffic, config, tensors, seeds, drafts, 22)
    assert found == wanted and copied == cache.stats.copied > 5
    assert cache.stats.found > 50 and sum(map(len, wanted[0])) > 60


def test_ranks_that_copy_no_blocks_are_caught():
    """The sabotaged twin: followers that are deaf to what the cache copies on write say other things, or nothing
    where they read what was never written."""
    tensors, seeds = tensors_of(TRAFFIC), range(3)
    model = Llama.from_tensors(TRAFFIC, tensors, torch.float64)
    cache = cache_of(TRAFFIC, 22)
    wanted = [serve(batcher_of(model, cache), seed) for seed in seeds]
    assert together(2, shared_traffic, TRAFFIC, tensors, seeds, 0, 22, True)[0][0] != wanted


# ------------------------------------------------------------------ packed weights


@pytest.mark.parametrize("group, act_order", [(4, False), (12, False), (36, False), (3, True), (12, True)])
@pytest.mark.parametrize("size", [2, 3])
def test_slices_of_packed_weights_are_slices_of_what_they_stand_for(group, act_order, size):
    """Groups that a cut leaves whole, that it goes through, one group a row, and columns of groups out of order."""
    config = replace(CONFIG, n_head=6 * 3, n_kv_head=6, head_dim=2, hidden_size=36)
    tensors = tensors_of(config, 4, group, act_order)
    whole = {n: layouts.dequantize(w) if isinstance(w, dict) else w for n, w in tensors.items()}
    parts = []
    for rank in range(size):
        shards = parallel.Shards(tensors, config, rank, size)
        dense = parallel.Shards(whole, config, rank, size)
        for name in tensors:
            part = shards[name]
            if isinstance(part, dict):
                packed.check_weight(part)
                assert all(x is None or x.untyped_storage().nbytes() == x.nbytes for k, x in part.items()
                           if k in ("codes", "scales", "zeros", "mins"))
                part = layouts.dequantize(part)
            assert torch.equal(part, dense[name]), name
        parts.append(dense)
    for name in tensors:  # and these, side by side, are the whole
        if "o_proj" in name or "down_proj" in name:
            assert torch.equal(torch.cat([p[name] for p in parts], 1), whole[name])
        elif whole[name].dim() == 2:
            assert torch.equal(torch.cat([p[name] for p in parts]), whole[name])


@pytest.mark.parametrize("name", ["9/3 on 3, tied", "8/2 on 4, KV heads replicated", "14/2 on 2, biases"])
@pytest.mark.parametrize("bits, act_order", [(4, False), (8, True)])
def test_packed_weights_give_the_logits_of_one_process(name, bits, act_order):
    size, config = SHAPES[name]
    config = replace(config, hidden_size=24)
    tensors = tensors_of(config, bits, 4, act_order)
    wanted = mixed_steps(alone(config, tensors), cache_of(config), config.vocab_size)
    found, *_ = together(size, shared_steps, config, tensors, torch.float64)[0]
    for a, b in zip(wanted, found, strict=True):
        assert (abs(a - b) < 1e-9).all()


# ------------------------------------------------------------------ generate.py on several ranks


HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4, "intermediate_size": 66}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny"), scale=3.0, **HEADS)


ASK = ("--dtype", "float64", "--max-tokens", "12", "--ignore-eos", "--json", "hello, hello")


@pytest.mark.parametrize("flags", [
    ("--temperature", "0"), ("--temperature", "0", "--draft", "ngram", "--k", "3"),
    ("--temperature", "1", "--seed", "7", "--n", "3", "--kv-dtype", "int8"), ("--beams", "3", "--n", "2"),
    ("--temperature", "0", "--kv-dtype", "fp8", "--token-budget", "3"),
], ids=" ".join)
def test_the_command_line_says_the_same(folder, flags):
    said = []
    for results in ([command("--model", folder, *flags, *ASK)], together(2, command, "--model", folder, *flags, *ASK)):
        code, out, err = results[0]
        assert code == 0 and "error" not in err
        told = json.loads(out)
        said.append([s["ids"] for s in told.get("samples", [told])])
        assert results[1:] in ([], [(0, "", "")]), "only rank 0 speaks"
    assert said[0] == said[1] and len(said[0][0]) == 12


def test_a_file_of_prompts_is_answered_by_two_ranks_as_by_one(folder, tmp_path):
    lines = [{"prompt": "hello " * i, "n": 1 + i % 3, "seed": i, "temperature": i % 2, "max_tokens": 3 + i}
             for i in range(1, 6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    said = []
    for name in ("one", "two"):
        argv = ("--model", folder, "--dtype", "float64", "--prompts", str(tmp_path / "in.jsonl"), "--out",
                str(tmp_path / name), "--quiet", "--max-batch", "4", "--context", "64")
        assert (command(*argv) if name == "one" else together(2, command, *argv)[0])[0] == 0
        records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        said.append({r["id"]: [s["ids"] for s in r["samples"]] for r in records})
    assert said[0] == said[1] and len(said[0]) == 5


@pytest.mark.slow
def test_the_default_model_on_three_ranks_says_the_golden_ids(default_gguf):
    from test_golden import ANSWER, PROMPT

    (code, out, _), *others = together(3, command, "--dtype", "float32", "--temperature", "0", "--max-tokens", "60",
                                       "--context", "256", "--json", "Why is the sky blue?")
    told = json.loads(out)
    assert code == 0 and told["prompt_ids"] == PROMPT and told["ids"] == ANSWER
    assert others == [(0, "", "")] * 2


# ------------------------------------------------------------------ faults: every rank ends, and one says why


def ends(results, why: str, codes=(2,)) -> None:
    """All ranks that live have ended with one of these codes, and one of them has said why, in a line."""
    alive = [r for r in results if r is not None]
    assert alive and all(code in codes for code, _, _ in alive), alive
    said = "".join(err for _, _, err in alive)
    assert said.count("\n") == 1 and why in said, said


@pytest.mark.parametrize("numbers, why", [
    ([0, 1], "within 3 s only 2 of the 3 ranks that WORLD_SIZE speaks of have come, but not 2; start them too"),
    ([2], "only 1 of the 3 ranks that WORLD_SIZE speaks of have come, but not 0, 1; start them too, or wait longer for "
          "slow machines: JOIN_SECONDS=15"),
    ([0, 1, 1], "two processes have RANK 1; give each of the 3 a number of its own, from 0 to 2")], ids=str)
@pytest.mark.parametrize("agent", [True, False])
def test_ranks_that_are_missing_are_not_waited_for(folder, numbers, why, agent):
    """All that are there end, and in one line one of them says why. agent: torchrun's store, or rank 0's."""
    if not agent and 0 not in numbers:
        why = "has found no rank 0 at 127.0.0.1:"
    ends(finish(start(3, command, "--model", folder, *ASK, numbers=numbers, agent=agent, wait_s=3)), why)


def elsewhere(size: int, *argv: str):
    os.environ["WORLD_SIZE"] = str(size)
    return command(*argv)


def test_ranks_that_expect_different_numbers_are_told_so(folder):
    results = finish(start(2, elsewhere, 2, "--model", folder, *ASK, others=(3, "--model", folder, *ASK)))
    ends(results, "; start all ranks with the same number")


@pytest.mark.parametrize("name, value, why", [
    ("JOIN_SECONDS", "soon", "JOIN_SECONDS is 'soon', but must be a whole number from 1 to 86400"),
    ("JOIN_SECONDS", "0", "from 1 to 86400"), ("MASTER_PORT", "", "MASTER_ADDR is 'nowhere' and MASTER_PORT ''"),
    ("MASTER_PORT", "65536", "set them to where rank 0 can be reached"), ("MASTER_ADDR", "", "MASTER_ADDR is ''")])
def test_variables_that_cannot_be_meant_are_refused_at_once(monkeypatch, name, value, why):
    for key, usual in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "nowhere"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(key, usual)
    monkeypatch.setenv(name, value)
    assert ranks.launched(), "or each of them would run the whole model"
    with pytest.raises(ValueError, match=re.escape(why)):
        ranks.join()


def test_the_wait_is_short_and_can_be_lengthened(monkeypatch):
    """Every rank ends within seconds; whose machines start slowly finds in the message how to wait longer."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("JOIN_SECONDS", raising=False)
    assert ranks._numbers(None) == (1, 2, ranks.JOIN_S) and ranks.JOIN_S <= 30
    monkeypatch.setenv("JOIN_SECONDS", "100")
    assert ranks._numbers(None) == (1, 2, 100.0) and ranks._numbers(7.5) == (1, 2, 7.5)


@pytest.mark.parametrize("rank", [0, 1])
def test_several_ranks_do_not_write_one_folder(folder, tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SystemExit) as end:
        generate.main(["quantize", folder, "--method", "rtn", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert end.value.code == 2 and not (tmp_path / "out").exists()
    assert said.startswith("error: quantize is the work of one process") if rank == 0 else said == ""


@pytest.mark.parametrize("changes", [{"rope_theta": 20000.0}, {"num_hidden_layers": 1}])
def test_ranks_with_different_models_are_told_so(folder, tmp_path, changes):
    other = tiny_folder(tmp_path, scale=3.0, **HEADS, **changes)
    results = finish(start(2, command, "--model", folder, *ASK, others=("--model", other, *ASK)))
    ends(results, "error: rank 1 of 2 and rank 0 differ in the config; start all ranks with the same model and flags")


def test_ranks_with_different_flags_are_told_so(folder):
    results = finish(start(2, command, "--model", folder, *ASK, others=("--model", folder, "--kv-memory", "1", *ASK)))
    ends(results, "error: rank 1 of 2 and rank 0 differ in the flags")


def test_ranks_with_other_weights_of_the_same_shape_are_told_so(folder, tmp_path):
    other = tiny_folder(tmp_path, scale=2.0, **HEADS)
    results = finish(start(3, command, "--model", folder, *ASK, others=("--model", other, *ASK)))
    ends(results, "error: ranks 1, 2 of 3 and rank 0 differ in the weights")


def checks_or_dies(group, victim: int) -> str:
    if group.rank == victim:
        os._exit(9)
    try:
        group.check(a_fact=1)
    except ranks.RankLost as lost:
        return str(lost)
    return "they agreed with a dead one"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_before_they_have_compared_what_they_hold(victim):
    results = finish(start(3, checks_or_dies, victim))
    assert results.pop(victim) is None
    for said in results:
        assert "another of the 3 ranks has ended; start all of them again" in said and "gloo" not in said


def test_one_other_matrix_behind_the_same_norms_is_noticed(folder, tmp_path):
    """As a fine-tune with frozen norms leaves it, or a copy that was cut short: all matrices begin alike."""
    file = shutil.copytree(folder, tmp_path / "other") / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    torn = tensors[name].clone()
    torn.view(-1)[64:] *= -1.5
    save_file({**tensors, name: torn}, file)
    results = finish(start(2, command, "--model", folder, *ASK, others=("--model", str(file.parent), *ASK)))
    ends(results, "error: rank 1 of 2 and rank 0 differ in the weights")


@pytest.mark.parametrize("rank, size", [("5", "2"), ("-1", "2"), ("", "2"), ("0", "two")])
def test_a_rank_that_cannot_be_is_refused_at_once(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=f"RANK is '{rank}' and WORLD_SIZE '{size}'"):
        ranks.join()


@pytest.mark.parametrize("argv, why", [
    (("--model", "nowhere", "hello"), "nowhere"), (("--nonsense",), "--nonsense"), (("--raw", "",), "prompt is empty"),
    (("--max-tokens", "-1", "hello"), "max_tokens is -1"),
])
def test_a_mistake_is_told_once(folder, argv, why):
    results = together(2, command, "--model", folder, *argv)
    ends(results, why, codes=(0, 2))
    assert results[0][0] == 2


def test_a_damaged_checkpoint_is_told_once(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    bad = tiny_folder(tmp_path, **HEADS)
    tensors = load_file(os.path.join(bad, "model.safetensors"))
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name]])  # of which the first half would fit
    save_file(tensors, os.path.join(bad, "model.safetensors"))
    ends(together(2, command, "--model", bad, *ASK), f"{name} has shape (48, 32), but the config asks for 24 rows")


class Dies:
    """A model's run that ends its process, or fails, at a step."""

    def __init__(self, how: str, at: int, run):
        self.how, self.at, self.run = how, at, run

    def __call__(self, step, rows):
        self.at -= 1
        if self.at < 0:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "interrupted":
                raise KeyboardInterrupt
            raise RuntimeError("out of memory, say")
        return self.run(step, rows)


def mortal(victim: int, how: str, at: int, *argv: str):
    eagerly = ranks._eagerly
    if int(os.environ["RANK"]) == victim:
        ranks._eagerly = lambda model: Dies(how, at, eagerly(model))
    return command(*argv)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("how, why", [("killed", "another of the 3 ranks has ended"), ("fails", "out of memory, say")])
@pytest.mark.parametrize("at", [0, 5])
def test_a_rank_that_dies_ends_all_of_them(folder, victim, how, why, at):
    results = finish(start(3, mortal, victim, how, at, "--model", folder, "--temperature", "0", "--quiet", *ASK))
    assert (results[victim] is None) == (how == "killed")
    ends(results, why)


@pytest.mark.parametrize("victim", [0, 1])
def test_without_torchrun_too_one_rank_says_why(folder, victim):
    """Rank 0 hosts the store then, and takes it along when it dies."""
    ask = ("--model", folder, "--temperature", "0", "--quiet", *ASK)
    results = finish(start(3, mortal, victim, "killed", 3, *ask, agent=False))
    assert results[victim] is None
    ends(results, "another of the 3 ranks has ended")


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("at", [0, 3])
def test_ctrl_c_in_the_middle_of_a_step_is_no_error(folder, agent, at):
    """Rank 0 leaves the others in theirs, and they end without a word."""
    ask = ("--model", folder, "--temperature", "0", "--quiet", *ASK)
    (code, _, err), *others = finish(start(3, mortal, 0, "interrupted", at, *ask, agent=agent))
    assert (code, err) == (130, "") and all(said[1:] == ("", "") for said in others)


@pytest.mark.slow
def test_ctrl_c_under_torchrun(folder):
    """Torchrun's processes are a session of their own, so a terminal's Ctrl-C comes to torchrun, which hands it on,
    waits for them and reports it as a traceback. They do not let it wait, and say no word beside that."""
    pty = pytest.importorskip("pty")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(root)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execv(sys.executable, [*torchrun, "generate.py", "--model", folder, "--dtype", "float64", "--ignore-eos"])
    said, keys = "", [("> ", b"hello\n"), ("> hello\r\n", b"\x03")]
    while True:
        try:
            said += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the last process has ended
            break
        if keys and keys[0][0] in said:
            os.write(terminal, keys.pop(0)[1])
    assert os.waitpid(pid, 0)[1] != 0
    assert "Ctrl-C ends torchrun, with a traceback of its own" in said and not keys
    assert said.count("Traceback") == said.count("SignalException: ") == 1
    assert "forcefully" not in said and "KeyboardInterrupt" not in said and "error: " not in said


@pytest.mark.slow
@pytest.mark.parametrize("flags, why", [((), None), (("--max-tokens", "-1"), "error: max_tokens is -1")])
def test_under_torchrun(folder, flags, why):
    """As a user starts it; what he asked for on standard output, and of mistakes one line among torchrun's report."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "generate.py",
               "--model", folder, "--temperature", "0", *ASK, *flags]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    if why is None:
        alone = generate.load(folder, dtype="float64").generate("hello, hello", temperature=0, max_tokens=12,
                                                                ignore_eos=True)[0]
        assert done.returncode == 0 and json.loads(done.stdout)["ids"] == alone.ids
    else:
        assert done.returncode and done.stderr.count(why) == 1 and done.stdout == ""


def idle(group, seconds):
    """Rank 0 dies while the others wait for its next step."""
    if group.rank == 0:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.follow(lambda *_: None, cache_of(CONFIG), group)
    except ranks.RankLost as error:
        return str(error)


def test_those_who_wait_for_a_dead_rank_0_end():
    dead, *others = finish(start(3, idle, 0.5))
    assert dead is None and all("another of the 3 ranks has ended" in x for x in others)


# ------------------------------------------------------------------ what a rank holds, and what it reads


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bits", [None, 4])
def test_each_rank_holds_its_share_of_weights_and_cache(name, bits):
    """1/N within 5 %, storages counted and not views; norms, and KV heads where there are too few, stand apart."""
    size, config = SHAPES[name]
    config = replace(config, vocab_size=600, intermediate_size=48)
    tensors = tensors_of(config, bits, 4)

    def nbytes(weights, keep):
        parts = [t for n in tensors if keep(n) for t in (weights[n].values() if isinstance(weights[n], dict) else
                                                         [weights[n]]) if isinstance(t, torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in parts)

    def replicated(n):  # biases behind a sum are the whole output's
        few = config.n_kv_head < size and ("k_proj" in n or "v_proj" in n)
        return "norm" in n or few or n.endswith(("o_proj.bias", "down_proj.bias"))

    for rank in range(size):
        shards = parallel.Shards(tensors, config, rank, size)
        mine, whole = (nbytes(w, lambda n: not replicated(n)) for w in (shards, tensors))
        assert abs(mine * size / whole - 1) < 0.05
        assert nbytes(shards, lambda n: "norm" in n) == nbytes(tensors, lambda n: "norm" in n)
        if config.n_kv_head < size:
            kv = [nbytes(w, lambda n: "k_proj.weight" in n) for w in (shards, tensors)]
            assert kv[0] * config.n_kv_head == kv[1], "one KV head on each rank"
        pools = [sum(pool.nbytes for pool in cache_of(c)._pools())
                 for c in (parallel.shard_config(config, rank, size), config)]
        assert pools[0] * min(size, config.n_kv_head) == pools[1]


class Reads(TorchDispatchMode):
    """Counts the bytes of mapped tensors that operations read. A view reads nothing."""

    def __init__(self, mapped):
        super().__init__()
        self.mapped, self.bytes = {t.untyped_storage().data_ptr() for t in mapped}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = {x.untyped_storage().data_ptr() for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(args):
            if isinstance(x, torch.Tensor) and not x.is_meta and (at := x.untyped_storage().data_ptr()) in self.mapped:
                self.bytes += x.nbytes if at not in made else 0
        return out


def bytes_read(folder: str, size: int) -> tuple[int, int]:
    """Bytes of the model file that loading a rank's share reads; and those of all pages that were touched for it."""
    found, rank = checkpoint.load(folder), int(os.environ["RANK"])
    config = Config.from_dict(found.config)
    with Reads(found.tensors.values()) as reads:
        shards = parallel.Shards(found.tensors, config, rank, size)
        Llama.from_tensors(parallel.shard_config(config, rank, size), shards, torch.float32)
    touched, ours = 0, False
    if os.path.exists("/proc/self/smaps"):  # Linux
        with open("/proc/self/smaps") as file:
            for line in file:
                if "-" in line.split()[0]:
                    ours = line.rstrip().endswith("model.safetensors")
                elif ours and line.startswith("Rss:"):
                    touched += int(line.split()[1]) * 1024
    return reads.bytes, touched


def test_each_rank_reads_only_its_slices(tmp_path):
    """Of the memory-mapped file 1/N is read, beside norms (when they are used) and the byte of each tensor that
    safetensors looks at. Of the pages, those of matrices cut by columns may all be touched, as each holds columns of
    several ranks; those of other ranks' rows are not."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 1 << 15, "num_hidden_layers": 1,
              "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1 << 15, "max_position_embeddings": 64}
    with torch.device("meta"):
        wanted = dict(Llama(Config.from_dict(config)).named_parameters())
    checkpoint.save(tmp_path / "model", config, {n: torch.ones(p.shape) for n, p in wanted.items()})
    cut = sum(4 * p.numel() for n, p in wanted.items() if "norm" not in n)
    read, touched = finish(start(1, bytes_read, str(tmp_path / "model"), 1))[0]
    assert cut <= read <= cut + len(wanted) and (touched == 0 or touched > cut)
    for read, touched in finish(start(4, bytes_read, str(tmp_path / "model"), 4)):
        assert cut // 4 <= read <= cut // 4 + len(wanted) and touched < 0.8 * cut


# ------------------------------------------------------------------ the published cases


def biased_sum(group):
    tensors = {"x.o_proj.weight": torch.ones(1, 4), "x.o_proj.bias": torch.tensor([10.0])}
    shards = parallel.Shards(tensors, replace(CONFIG, n_head=4, n_kv_head=2, head_dim=1), group.rank, group.size)
    layer = torch.nn.Linear(2, 1).requires_grad_(False)
    layer.weight.copy_(shards["x.o_proj.weight"])
    layer.bias.copy_(shards["x.o_proj.bias"])
    return parallel.RowParallel(layer, group)(torch.ones(1, 2)).tolist()


def test_tp01_a_bias_behind_a_sum_is_added_once():
    """TP-01 (text-generation-inference #1036; MinivLLM #13, #80; slapo #10): four ones, and a bias of 10, on two ranks
    are 14, not 24; and the sum is what comes back, also where all_reduce works in place."""
    assert together(2, biased_sum) == [[[14.0]], [[14.0]]]


def test_tp02_fused_matrices_are_fused_of_slices():
    """TP-02 (nnsight #719; vllm #36242): 4 query heads and 2 KV heads of 32 on two ranks. Half of the fused matrix
    would be q0 to q3; a rank's is q0 q1 k0 v0, or q2 q3 k1 v1, in widths 64, 32 and 32. Gate and up likewise."""
    config = replace(CONFIG, n_layer=1, n_head=4, n_kv_head=2, head_dim=32, intermediate_size=8)
    tensors = tensors_of(config)
    for name, base in (("q", 0), ("k", 100), ("v", 200)):
        heads = torch.arange(4 if name == "q" else 2).repeat_interleave(32)[:, None]
        tensors[f"model.layers.0.self_attn.{name}_proj.weight"] = (base + heads).expand(-1, 24).double()
    for name, base in (("gate", 0), ("up", 100)):
        tensors[f"model.layers.0.mlp.{name}_proj.weight"] = (base + torch.arange(8)[:, None]).expand(-1, 24).double()
    for rank, heads in enumerate(([0, 1, 100, 200], [2, 3, 101, 201])):
        shards = parallel.Shards(tensors, config, rank, 2)
        model = Llama.from_tensors(parallel.shard_config(config, rank, 2), shards, torch.float64).fuse_()
        layer = model.model["layers"][0]
        assert layer.self_attn.qkv_proj.weight[:, 0].tolist() == [h for h in heads for _ in range(32)]
        units = [4 * rank + i for i in range(4)]
        assert layer.mlp.gate_up_proj.weight[:, 0].tolist() == units + [100 + u for u in units]


class Untouched(dict):
    def __getitem__(self, name):
        raise AssertionError("a tensor was read")


def test_tp03_head_counts_that_do_not_divide():
    """TP-03 (transformers #48307; torchtitan #2574, #2577; LLaMA-Factory #10794; aws-neuron-sdk #1289): 2 KV heads
    on 4 ranks are replicated, 28 heads on 8 ranks are refused before anything is read, 8 KV heads on 2 ranks are 4
    each."""
    assert [parallel.kv_heads(2, r, 4) for r in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [parallel.kv_heads(8, r, 2) for r in range(2)] == [(0, 4), (4, 8)]
    config = replace(CONFIG, n_head=28, n_kv_head=4, intermediate_size=18944)
    why = ("28 query heads, 4 key/value heads and 18944 units of the MLP cannot be shared out by 8 ranks; the numbers "
           "of ranks that work for this model are 1, 2, 4$")
    for refuse in (lambda: parallel.Shards(Untouched(), config, 0, 8), lambda: parallel.shard_config(config, 0, 8)):
        with pytest.raises(ValueError, match=why):
            refuse()
    eight = parallel.shard_config(replace(CONFIG, n_head=16, n_kv_head=8), 1, 2)
    assert (eight.n_head, eight.n_kv_head) == (8, 4)
    six = parallel.shard_config(replace(CONFIG, n_head=8, n_kv_head=2), 1, 4)
    assert (six.n_head, six.n_kv_head) == (2, 1)
    with pytest.raises(ValueError, match="3 ranks"):  # 3 query heads a KV head, of which a rank would need parts of two
        parallel.check_ranks(replace(CONFIG, n_head=12, n_kv_head=4), 3)


def test_tp03_it_is_refused_once_by_all_ranks(folder):
    """TP-03, from the command line: 12 heads on 5 ranks."""
    ends(together(5, command, "--model", folder, *ASK), "12 query heads, 6 key/value heads and 66 units")


def test_tp06_only_rank_0_samples(folder):
    """TP-06 (gpt-oss #270; transformers #36634): temperature 1 and another seed on each rank: what is said, and when
    it stops, is rank 0's choice."""
    ask = ("--model", folder, "--temperature", "1", "--dtype", "float64", "--json", "hello")
    code, out, _ = command(*ask, "--seed", "3")
    (shared, told, _), *others = finish(start(2, command, *ask, "--seed", "3", others=(*ask, "--seed", "4")))
    assert code == shared == 0 and json.loads(out)["ids"] == json.loads(told)["ids"] and others == [(0, "", "")]


def decoding(forward, cache) -> list:
    """Logits of two prompts' steps, then of three and five sequences that get a token each."""
    logits = []
    for name in "abcde":
        cache.add(name)
    for plan in ({"a": [1] * 5, "b": [2, 0]}, {"a": [1], "b": [2]}, {"c": [0]}, {"a": [2], "b": [1], "c": [1]},
                 {name: [1] for name in "abcde"}, {"e": [0], "b": [1], "d": [2], "c": [2]}):
        step = cache.extend(plan)
        with torch.inference_mode():
            logits.append(forward(step).numpy().copy())
        cache.commit(step)
    return logits


def padded_decoding(group, config, tensors):
    model, cache = part_of(group, config, tensors)
    run = Graphs(model, cache, 4, capture=lambda fn: fn)
    if group.rank:
        return ranks.follow(model, cache, group, run)
    return decoding(ranks.Leader(model, cache, group, run), cache), run.replayed, run.eager


@pytest.mark.parametrize("name", ["9/3 on 3, tied", "8/2 on 4, KV heads replicated"])
def test_tp11_graphs_with_padded_rows_on_every_rank(name):
    """TP-11 (flash-attention #2470; gLLM #174), on several ranks: with a stand-in for CUDA graphs, steps of one token a
    sequence run in padded buckets on all ranks alike, others eagerly, and the logits are those of one process."""
    size, config = SHAPES[name]
    tensors, cache = tensors_of(config), cache_of(config)
    wanted = decoding(alone(config, tensors), cache)
    found, replayed, eager = together(size, padded_decoding, config, tensors)[0]
    assert replayed == 4 and eager == 2
    for a, b in zip(wanted, found, strict=True):
        assert (abs(a - b) < 1e-9).all()


def sum_of_halves(group):
    x = torch.tensor([[256.0, 1.0, 1.0][group.rank]])
    return [group.sum(x.to(dtype)).item() for dtype in (torch.bfloat16, torch.float16, torch.float32)]


def test_tp12_16_bits_are_added_up_in_32():
    """TP-12 (RL-Kernel #313; TransformerEngine #1761, #3555; TensorRT-LLM #16753): 256 + 1 + 1 is 258 on every rank,
    where bfloat16 step by step would give 256."""
    assert together(3, sum_of_halves) == [[258.0] * 3] * 3


@pytest.mark.slow
def test_bytes_exchanged_are_those_of_the_formula(folder):
    """`bench.py parallel` on two and three ranks. What the system says was sent is more, by headers, but not by far;
    and of a ring's bytes nothing is missing."""
    from benchmarks import parallel as measured

    argv = ["--model", folder, "--dtype", "float64", "--batches", "1", "3", "--prompt", "8", "--rounds", "3"]
    for n in (2, 3):
        for name, x in measured.launch(n, argv)["steps"].items():
            tokens = {"decode 1": 1, "decode 3": 3, "prompt 8": 8}[name]
            assert x["all_reduce bytes"] == x["all_reduce formula"] == 5 * tokens * 32 * 8
            assert x["gather bytes"] == x["gather formula"]
            assert x["written"] is None or x["ring"] <= x["written"] < 2 * x["ring"] + 50_000
