"""bench.py: what it measures is what it says, on a tiny model; no test here looks at a speed."""
import hashlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_folder

import bench
import generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def run(capsys, *argv) -> tuple[int, str, dict]:
    code = bench.main(argv)
    out, err = capsys.readouterr()
    return code, out, json.loads(out.splitlines()[-1]) if code == 0 else err


def test_the_card_names_the_machine(capsys):
    card = bench.card()
    assert card["cores"] >= 1 and card["read_GB_per_s"] > 0.1 and card["torch"] == torch.__version__ and card["cpu"]


def test_latency_beside_transformers(capsys, folder):
    code, out, result = run(capsys, "latency", "--model", folder, "--dtype", "float32", "--peer", "transformers",
                            "--prompts", "20", "--contexts", "4", "20", "--tokens", "3", "--rounds", "2")
    assert code == 0 and "| engine" in out and "torch" in out
    ours, theirs = result["tokens_per_s"]
    assert ours == "nanoinfer float32" and theirs.startswith("transformers")
    columns = ["prefill 20", "decode at 4", "decode at 20"]
    for row in (*result["tokens_per_s"].values(), result["ratios"][theirs]):
        assert [c for c in row if c in columns] == columns and all(v > 0 for v in row.values())
    assert "matmuls alone" in result["tokens_per_s"][ours] and "matmuls alone" not in result["tokens_per_s"][theirs]
    assert result["command"] == "latency" and result["card"]["threads"] == torch.get_num_threads()


def test_the_engines_compute_the_same_tokens(folder):
    """A peer that computed something else would make the comparison worthless."""
    engines = [bench.Ours(generate.load(folder, dtype="float32")), bench.Transformers(folder, torch.float32)]
    answers = []
    for engine in engines:
        prompts = [list(range(5, 25)), list(range(105, 125))]
        tokens = [engine.prefill(prompts)]
        for _ in range(10):
            tokens.append(engine.decode(tokens[-1]))
        answers.append(tokens)
        assert engine.prefill(prompts) == tokens[0], "prefill forgets what was before"
        assert engine.prefill(prompts[1:]) == tokens[0][1:], "a batch of one says the same"
    assert answers[0] == answers[1]


def test_llama_cpp_continues_with_our_tokens(default_gguf):
    pytest.importorskip("llama_cpp")
    ours = bench.Ours(generate.load(default_gguf, dtype="float32"))
    ids = ours.llm.encode("The capital of France is", raw=True)
    prompts = [ids, ids[::-1], ids]
    for requantize, share in ((None, 0.9), ("Q4_0", 0.6)):  # it rounds activations to 8 bits; Q4_0 the weights as well
        peer = bench.LlamaCpp(default_gguf, False, 64, batch=3, requantize=requantize)
        tokens, theirs = [ours.prefill(prompts)], [peer.prefill(prompts)]
        for _ in range(8):
            theirs.append(peer.decode(tokens[-1]))  # fed with our tokens
            tokens.append(ours.decode(tokens[-1]))
        alike = [a == b for mine, yours in zip(tokens, theirs) for a, b in zip(mine, yours)]
        assert sum(alike) >= share * len(alike)


def test_perplexity_is_the_exponential_of_the_mean_loss(capsys, folder, tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 4
    (tmp_path / "text.txt").write_text(text)
    _, _, result = run(capsys, "perplexity", str(tmp_path / "text.txt"), "--model", folder, "--dtype", "float64",
                       "--window", "32", "--windows", "3")
    model, ids, losses = generate.load(folder, dtype="float64").model, list(text.encode()), []
    for begin in (0, 32, 64):
        window = torch.tensor([ids[begin: begin + 32]])
        with torch.inference_mode():
            logp = model(window)[0].log_softmax(-1)
        losses += [-logp[i, window[0, i + 1]].item() for i in range(31)]
    assert result["windows"] == 3 and abs(result["perplexity"]["float64"] - math.exp(sum(losses) / 93)) < 1e-3


def test_several_types_are_compared_in_one_run(capsys, folder, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    flags = ["--model", folder, "--dtype", "float64", "--dtype", "bfloat16"]
    _, out, result = run(capsys, "perplexity", str(tmp_path / "text.txt"), *flags, "--window", "32")
    wide, narrow = result["perplexity"]["float64"], result["perplexity"]["bfloat16"]
    assert 0 < abs(wide - narrow) < 0.05 * wide and "% beside float64" in out
    _, _, result = run(capsys, "latency", *flags, "--prompts", "8", "--contexts", "4", "--batches", "1",
                       "--tokens", "2", "--rounds", "1")
    assert list(result["tokens_per_s"]) == ["nanoinfer float64", "nanoinfer bfloat16"]
    assert list(result["ratios"]["nanoinfer bfloat16"]) == ["prefill 8", "decode at 4", "matmuls alone"]
    alike = str(generate.load(folder).dtype).removeprefix("torch.")  # what auto is for an unquantized model
    for command in (["latency"], ["perplexity", str(tmp_path / "text.txt"), "--window", "32"]):
        code, _, err = run(capsys, *command, "--model", folder, "--dtype", "auto", "--dtype", alike)
        assert code == 2 and f"--dtype {alike} runs model in {alike}, as another --dtype does" in err


def test_quantize_keeps_its_cells(capsys, folder, tmp_path, monkeypatch):
    """Each cell once: a second run measures nothing again; and nothing is judged by the text it was calibrated on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    kept = tmp_path / "cells.json"
    command = ["quantize", str(text), "--model", folder, "--window", "32", "--windows", "2", "--divergence", "1",
               "--sequences", "4", "--length", "16", "--rounds", "1", "--tokens", "2", "--results", str(kept),
               "--methods", "rtn 4 bits a row", "gptq 4 bits a row", "int8", "nf4"]
    code, out, result = run(capsys, *command)
    assert code == 0 and set(result["rows"]) == {"float32", "rtn 4 bits a row", "gptq 4 bits a row", "int8", "nf4"}
    rows = result["rows"]
    assert rows["float32"]["bits"] == 32 and 4 < rows["nf4"]["bits"] < 5 < 8 < rows["int8"]["bits"] < 9
    assert rows["int8"]["text.txt KL"] < rows["rtn 4 bits a row"]["text.txt KL"]
    assert "tokens/s" in rows["int8"] and "tokens/s" not in rows["nf4"]
    monkeypatch.setattr(bench.quality.Bench, "_quantized", lambda *_: pytest.fail("measured again"))
    assert run(capsys, *command)[2]["rows"] == rows
    code, _, err = run(capsys, *command, "--calibration", str(text))
    assert code == 2 and "calibrated on the text that it is judged by" in err


def test_matmuls_are_those_of_a_step(folder, default_gguf):
    """Every matrix once, the head included; of a tied model that is the embedding."""
    for model, n in ((folder, 2 * 4 + 1), (default_gguf, 30 * 4 + 1)):
        engine = bench.Ours(generate.load(model, dtype="bfloat16"))
        engine.matmuls()
        assert len(engine.matrices) == n
    packed = bench.Ours(generate.load(default_gguf))
    packed.matmuls()
    assert len(packed.matrices) == 30 * 4 + 1 and packed.name == "nanoinfer packed"
    for one, low, high in ((engine, 15, 17), (packed, 5, 8)):  # as roofline.py counts them: all but the norms
        shape = bench._shape(one)
        assert shape.n_params == 134_515_008 - 61 * 576 and low < shape.weight_bits < high


@pytest.mark.parametrize("kv, window", [("auto", None), ("auto", 5), ("int8", None)])
def test_ceilings_are_those_of_roofline(tmp_path, kv, window, monkeypatch):
    """A step reads every matrix once, and K and V of the tokens that it sees; the share is of the card's bandwidth."""
    kind = {"model_type": "mistral", "sliding_window": window} if window else {}
    engine = bench.Ours(generate.load(tiny_folder(tmp_path / "m", **kind), dtype="float32", kv_dtype=kv))
    c, args = engine.llm.model.config, SimpleNamespace(bandwidth=2.0, tokens=3)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    matrices, row = 4 * (2 * layer + 32 * 270), 2 * 2 * 2 * (8 * 4 if kv == "auto" else 8 + 4)
    shape = bench._shape(engine)
    assert shape.weight_bytes == matrices and shape.n_params == matrices / 4 and shape.kv_bytes == row
    assert bench.roofline.flops_per_token(shape) == 2 * (2 * layer + 32 * 270) and (c.n_head, shape.n_head) == (4, 4)
    points, medians = [(1, 4), (3, 20)], {engine.name: {"a": 100.0, "b": 600.0}}
    found = bench._ceilings([engine], points, ["a", "b"], medians, args)
    for (b, context), column in zip(points, "ab"):
        n_bytes = matrices + b * min(context + 2, window or 99) * row
        cell = found[f"{engine.name}, {column}"]
        assert list(cell) == ["MB a step", "share"] and cell["MB a step"] == round(n_bytes / 1e6, 1)
        assert cell["share"] == round(medians[engine.name][column] / b * n_bytes / 2e9, 3)
    right = bench.roofline.decode_bytes
    monkeypatch.setattr(bench.roofline, "decode_bytes", lambda *a: 10 * right(*a))
    again = bench._ceilings([engine], points, ["a", "b"], medians, args)
    assert all(again[name]["share"] > 9 * cell["share"] > 0 for name, cell in found.items())


@pytest.mark.parametrize("argv, mentions", [
    (["perplexity", "nowhere.txt"], "nowhere.txt"), (["perplexity", "pydoc", "--window", "0"], "--window"),
    (["latency", "--rounds", "0"], "--rounds"),
    (["prefix", "--dtype", "float32", "--dtype", "auto"], "prefix measures one --dtype"),
    (["latency", "--peer", "llama.cpp", "--prompts", "8", "--contexts", "4"], ".gguf"),
    (["latency", "--prompts", "1000", "--contexts", "4"], "1000"),
])
def test_wrong_input_is_one_line_and_exit_code_2(capsys, folder, argv, mentions):
    code, _, err = run(capsys, *argv, "--model", folder)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and mentions in err


def test_prefix_finds_the_shared_blocks_and_the_same_answer(capsys, folder):
    code, out, result = run(capsys, "prefix", "--model", folder, "--dtype", "float64", "--prompt", "33", "--tokens",
                            "3", "--rounds", "2")
    assert code == 0 and result["cached"] == 32 and result["equal"] == result["rounds"] == 2 and result["ratio"] > 0
    code, _, err = run(capsys, "prefix", "--model", folder, "--prompt", "60")
    assert code == 2 and "60 + 20 + 16 tokens exceed the model's context of 64" in err


def test_attention_is_compared_before_it_is_timed(capsys, monkeypatch):
    sizes = ["attention", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--contexts", "5", "33",
             "--prompts", "7"]
    code, out, result = run(capsys, *sizes)
    assert code == 0 and list(result["us"]) == ["1 rows, 5 keys", "1 rows, 33 keys", "7 rows, 7 keys"]
    assert all(v > 0 for row in result["us"].values() for v in (row["paged us"], row["dense us"]))
    if torch.cuda.is_available():
        return
    assert "no GPU here: flash.py was not timed" in out
    right = bench.attention.paged_attention
    monkeypatch.setattr(bench.attention, "paged_attention", lambda q, *a, **k: right(q, *a, **k).roll(1, 1))
    code, _, err = run(capsys, *sizes)
    assert code == 2 and "paged and dense attention differ by" in err


@pytest.mark.slow
def test_perplexity_of_the_default_model(default_gguf, capsys):
    """12.88 on Python's own help topics, measured with transformers on the dequantized weights; packed weights are
    within half a percent of the same weights in float32."""
    if hashlib.sha256(bench.read_text("pydoc").encode()).hexdigest()[:16] != "71f2ff5d99bdc1f9":
        pytest.skip("another Python has another text")
    _, _, result = run(capsys, "perplexity", "pydoc")
    assert abs(result["perplexity"]["packed"] / 12.88 - 1) < 0.01
    _, _, result = run(capsys, "perplexity", "pydoc", "--dtype", "float32", "--dtype", "auto", "--windows", "4")
    assert abs(result["perplexity"]["packed"] / result["perplexity"]["float32"] - 1) < 0.005


def test_serve_measures_what_it_says(capsys, tmp_path):
    """Every part runs, every request gets its tokens, and the counted figures agree; no speed is looked at."""
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=512)
    flags = ["--model", folder, "--dtype", "float32", "--requests", "6", "--slots", "3", "--prompt", "8",
             "--output", "4", "--streams", "2", "--long", "40", "--rate", "50", "--shared", "16", "--rounds", "2"]
    code, out, result = run(capsys, "serve", *flags)
    assert code == 0 and "continuous is faster by" in out and "goodput" in out and "E2E" in out
    assert [len(result[part]) for part in ("mix", "spike", "arrivals")] == [2, 2, 2]
    assert list(result["mix"][0]) == ["static, padded", "static, ended rows dropped", "continuous"]
    on, off = result["medians"]["arrivals"]["prefix cache"], result["medians"]["arrivals"]["without"]
    assert on["requests"] == on["answered"] == off["requests"] == 6 and on["tokens"] == off["tokens"]
    assert on["cached"] > 0.2 and off["cached"] == 0 and on["ttft_s"]["p50"] > 0
    assert result["medians"]["spike"]["chunked"].keys() == result["medians"]["spike"]["whole"].keys()
    code, _, err = run(capsys, "serve", *flags, "--long", "600")
    assert code == 2 and "spike needs 601 tokens" in err and "context is 512" in err


def test_speculate_measures_what_it_says(capsys, tmp_path, monkeypatch):
    """The same tokens with drafts and without, and figures that belong together; a constant text is all copies."""
    from benchmarks import speculate

    items = [{"kind": kind, "task": kind, "prompt": "abc" * 5} for kind in ("copy", "prose")]
    monkeypatch.setattr(speculate, "prompts", lambda kinds: [i for i in items if i["kind"] in kinds])
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=512)
    code, out, result = run(capsys, "speculate", "--model", folder, "--dtype", "float64", "--tokens", "60",
                            "--rounds", "1")
    assert code == 0 and "wasted rows" in out
    for row in result["prompts"]:
        assert row["first difference"] is None and row["tokens"] == 60
        assert row["passes"] + sum(a for _, a in row["drafts"]) == 60, "a pass gives one token and those accepted"
    figures = speculate.figures([{"passes": 10, "tokens": 20, "ratio": 1.5, "drafts": [[2, 2], [3, 1], [4, 4]]}])
    assert figures["alpha"] == round(7 / 8, 3) and figures["wasted rows"] == round(2 / 19, 4)
    assert figures["closed form"] == round((7 + sum(1 + 7 / 8 * (1 - (7 / 8) ** k) * 8 for k in (2, 3, 4))) / 10, 3)


def test_static_batching_computes_for_nobody(folder):
    """Padded static batching takes as many steps as its longest answers; continuous as many as there is work."""
    from benchmarks import serve

    llm, steps = generate.load(folder, dtype="float32"), {}
    for static in ("pad", "drop", None):
        batcher = llm.new_batcher(max_batch=2, static=static)
        asked = [(0.0, serve.request([5] * n, n, f"{static}{i}")) for i, n in enumerate((2, 9, 3, 12))]
        found = serve.drive(batcher, asked)
        assert [len(t.times) for t in found["timelines"]] == [2, 9, 3, 12]
        steps[static] = (batcher.stats.steps, batcher.stats.computed)
    assert steps["pad"][0] == steps["drop"][0] == 9 + 12 and steps[None][0] < 9 + 12
    assert steps["pad"][1] > steps["drop"][1] == steps[None][1]
