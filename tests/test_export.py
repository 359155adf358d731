"""export.py: a model to a quantized folder, whole or not at all, that transformers opens with our logits."""
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_folder

import checkpoint
import export
import generate
import layouts
import quantize

ROOT = Path(__file__).resolve().parent.parent
FEW = ["--sequences", "4", "--length", "32"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return tiny_folder(tmp_path / "source")


def quantized(source, out, *flags) -> int:
    return generate.main(["quantize", source, "--out", str(out), "--quiet", *FEW, *flags])


WAYS = [("rtn", "--bits", "8"), ("gptq",), ("gptq", "--layout", "gptq"), ("gptq", "--asym", "--no-act-order"),
        ("awq", "--layout", "awq", "--asym"), ("awq",), ("smoothquant",), ("fp8",), ("rtn", "--group-size", "-1")]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_a_folder_is_written_and_read(source, tmp_path, way):
    """Codes and scales come back bit for bit, norms and embeddings rounded once, and the folder answers."""
    out = tmp_path / "out"
    assert quantized(source, out, "--method", *way) == 0
    folder = checkpoint.load(str(out))
    weights = layouts.read(folder.config, folder.tensors)
    method = folder.config["quantization_config"]["quant_method"]
    assert method == (way[way.index("--layout") + 1] if "--layout" in way else "compressed-tensors")
    names = [n for n in weights if isinstance(weights[n], dict)]
    assert len(names) == 14 and not any("lm_head" in n or "embed" in n for n in names)
    llm = generate.load(str(out))
    answer, = llm.generate("hello", max_tokens=4, ignore_eos=True)
    assert len(answer.ids) == 4
    assert (out / "tokenizer.json").read_bytes() == Path(source, "tokenizer.json").read_bytes()
    assert folder.config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("way", [w for w in WAYS if w[0] in ("rtn", "gptq", "awq")
                                 and "--layout" not in w and "--asym" not in w], ids=" ".join)
def test_transformers_opens_the_folder_with_our_logits(source, tmp_path, way):
    """On the CPU, with compressed-tensors; both in float32. (With smoothquant and fp8
    transformers rounds activations too; of packed zero points transformers 5.24 takes the shape for a mismatch.)"""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    assert quantized(source, tmp_path / "out", "--method", *way) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = generate.load(str(tmp_path / "out"), dtype="float32")
    ids = torch.randint(5, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        a, b = ours.model(ids), theirs(ids).logits
    assert torch.allclose(a, b, rtol=0, atol=1e-4), (a - b).abs().max()


def test_gptq_is_nearer_to_the_model_than_rtn(source, tmp_path):
    """On text of the same kind that it was not calibrated on: which is what it is for."""
    ids = export.own_text(source, 16, 32)
    other = export.own_text(source, 8, 32, seed=1)
    found = {}
    for name, options in (("rtn", {}), ("gptq", {"act_order": True, "clip": True})):
        _, model = export.float_model(source)
        with torch.no_grad():
            was = model(other)
            export.quantize_model(model, quantize.method(name, 3, 32, **options), ids)
            found[name] = float((model(other) - was).norm() / was.norm())
    assert found["gptq"] < 0.96 * found["rtn"], found  # 0.85 to 0.92: the text that it writes depends on the machine


def test_the_text_is_seeded_and_kept(source, tmp_path, capsys):
    first = export.own_text(source, 3, 20)
    assert first.shape == (3, 20) and "writes its calibration text" in capsys.readouterr().err
    assert torch.equal(export.own_text(source, 3, 20), first) and capsys.readouterr().err == ""
    for kept in (tmp_path / "cache" / "nanoinfer").glob("calibration-*"):
        kept.write_text("damaged")
    assert torch.equal(export.own_text(source, 3, 20), first)  # written again, the same
    assert not torch.equal(export.own_text(source, 3, 20, seed=1), first)


def test_a_text_file(source, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 100)
    assert quantized(source, tmp_path / "out", "--calibration", str(text)) == 0
    text.write_text("too short")
    assert quantized(source, tmp_path / "other", "--calibration", str(text)) == 2
    assert "text.txt has 9 tokens, but one calibration sequence takes 32" in capsys.readouterr().err


@pytest.mark.parametrize("flags, message", [
    (["--group-size", "5"], "groups of 5 do not divide the 32 columns of"),
    (["--method", "fp8", "--bits", "4"], "fp8 has 8 bits"),
    (["--method", "fp8", "--layout", "gptq"], "fp8 is written as compressed-tensors, not as gptq"),
    (["--method", "rtn", "--layout", "awq", "--bits", "8"], "and 8 bits is not written"),
    (["--method", "rtn", "--damp", "1"], "--damp and --no-act-order are gptq's"),
    (["--length", "100"], "calibration sequences of 100 tokens exceed the model's context of 64"),
    (["--skip", "model", "lm_head"], "there is no nn.Linear to quantize"),
    (["--sequences", "0"], "--sequences is 0, but must be 1 or more"),
])
def test_mistakes(source, tmp_path, capsys, flags, message):
    try:
        assert quantized(source, tmp_path / "out", *flags) == 2
    except SystemExit as stop:
        assert stop.code == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_nothing_is_overwritten_without_force(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantized(source, out, "--method", "rtn") == 0
    before = (out / "config.json").read_text()
    assert quantized(source, out, "--method", "fp8") == 2
    assert "exists and is not empty" in capsys.readouterr().err and (out / "config.json").read_text() == before
    assert quantized(source, out, "--method", "fp8", "--force") == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "float-quantized"
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    assert quantized(source, tmp_path / "precious", "--force") == 2
    assert "is not a checkpoint" in capsys.readouterr().err and (tmp_path / "precious" / "thesis.txt").exists()


def test_killed_it_leaves_nothing_half_written(source, tmp_path):
    """SIGKILL when everything is written and only the rename is missing: there is no folder, and the next try works."""
    out = tmp_path / "out"
    code = ("import os, signal, sys, checkpoint, generate\n"
            "checkpoint._put_in_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "generate.main(sys.argv[1:])")
    flags = ["quantize", source, "--out", str(out), "--method", "rtn", "--quiet"]
    killed = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    assert list(tmp_path.glob(".out.*.partial")), "it was killed too early to show anything"
    assert generate.main(flags) == 0
    generate.load(str(out))


def test_quantized_while_it_is_loaded(source):
    """--quantize: the linear layers run packed, the rest as it was, and the answer stays near."""
    plain, ids = generate.load(source, dtype="float32"), torch.arange(5, 25)[None]
    with torch.inference_mode():
        was = plain.model(ids)
        for bits, limit in (("int8", 0.02), ("int4", 0.3)):
            llm = generate.load(source, quantize=bits)
            assert "quantized now to" in llm.about and llm.weights == "packed"
            off = float((llm.model(ids).float() - was).norm() / was.norm())
            assert off < limit, (bits, off)
    with pytest.raises(ValueError, match="quantize 'int4' must be int8 or int4, and goes with dtype auto only"):
        generate.load(source, quantize="int4", dtype="float32")


@pytest.mark.slow
def test_the_default_model_from_gguf_to_a_folder(default_gguf, tmp_path):
    """A GGUF file to a folder with a tokenizer of its own, which transformers opens with our logits."""
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert generate.main(["quantize", default_gguf, "--out", str(out), "--method", "rtn", "--quiet"]) == 0
    ours = generate.load(str(out), dtype="float32")
    prompt = "Why is the sky blue? 12345  naïve 漢字"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = ours.encode(prompt)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
                                         add_generation_prompt=True)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.inference_mode():
        a, b = ours.model(torch.tensor([ids])), theirs(torch.tensor([ids])).logits
    assert torch.allclose(a, b, rtol=0, atol=2e-3), (a - b).abs().max()
