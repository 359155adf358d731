"""calibrate.py with the methods of quantize.py, on our Llama, on transformers' and on small models made up here."""
import copy
import functools
import math
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import calibrate
import layouts
import packed
from calibrate import LLAMA_FOLDS, Statistics, fold_, quantize_
from model import Config, Llama, RMSNorm, causal_attention
from quantize import Int8Linear, NF4Linear, awq_scales, dequantize, gptq, method

pytestmark = pytest.mark.usefixtures("one_thread")
F64 = torch.float64


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def correlated(rows, K, seed=0):
    """Inputs in which every column goes along with all others."""
    return randn(rows, K, seed=seed) @ (torch.eye(K, dtype=F64) + 0.8 * torch.ones(K, K, dtype=F64))


def stats_of(x):
    s = Statistics()
    s.add(x)
    return s


# ------------------------------------------------------------------ averages


def test_sums_in_float32():
    """GQ-16, TICO #704: 1,024 ones in bfloat16 are 1024, not 256; 300 squared is 90000, in float16 infinite."""
    s = stats_of(torch.ones(1024, 1, dtype=torch.bfloat16))
    assert (s.H * s.n).item() == 1024 and s.H.dtype == torch.float32
    assert stats_of(torch.full((1, 1), 300.0, dtype=torch.float16)).H.item() == 90000


def test_running_averages():
    x = correlated(50, 6)
    s = Statistics()
    for part in x.split([1, 0, 17, 32]):
        s.add(part.view(1, -1, 6))
    assert s.n == 50
    torch.testing.assert_close(s.H, x.t() @ x / 50)
    torch.testing.assert_close(s.mean_abs, x.abs().mean(0))
    assert torch.equal(s.max_abs, x.abs().amax(0))


def test_the_mean_is_of_absolute_values():
    """AW-09, llm-compressor #1788: without the absolute value one channel's mean was -2, and its power NaN."""
    stats = stats_of(torch.tensor([[-1.0, 2], [-3, 2]]))
    assert stats.mean_abs.tolist() == [2, 2]
    s, _ = awq_scales(torch.tensor([[0.3, 0.9]]), stats.H, stats.mean_abs, 4)
    assert torch.equal(s, torch.ones(2))


def test_one_outlier_is_not_the_statistic():
    """AW-11, keras #23478: the mean, not the maximum."""
    stats = stats_of(torch.cat((torch.ones(100, 2), torch.tensor([[100.0, 1]]))))
    torch.testing.assert_close(stats.mean_abs, torch.tensor([200 / 101, 1.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_activations_that_are_not_finite(bad):
    """GQ-10, llm-compressor #2952, GPTQModel #1469: one NaN poisoned the average."""
    x = randn(10, 4)
    x[3, 2] = bad
    with pytest.raises(ValueError, match=r"up_proj, batch 2: 1 of 10 tokens"):
        Statistics().add(x, "up_proj, batch 2")


# ------------------------------------------------------------------ walking a model


def tiny(tie=True, dtype=F64, **changes):
    torch.manual_seed(0)
    config = dict(n_layer=2, n_head=4, n_kv_head=2, head_dim=8, hidden_size=32, intermediate_size=64, vocab_size=50,
                  max_seq_len=64, tie_embeddings=tie)
    net = Llama(Config(**config | changes)).to(dtype).eval().requires_grad_(False)
    for p in net.parameters():
        if p.dim() == 1:
            p.add_(0.3 * torch.rand_like(p))  # norms that do something
    return net


def stages_of(net):
    """As in the docstring of calibrate.py."""
    def block(x, layer, module):
        cos, sin = net.rotary(torch.arange(x.shape[1]), x.dtype)
        return module(x, cos, sin, functools.partial(causal_attention, layer, window=net.config.sliding_window))

    return [functools.partial(block, layer=i, module=m) for i, m in enumerate(net.model["layers"])]


def ids(batches=3, size=2, T=24, V=50):
    return torch.randint(V, (batches, size, T), generator=torch.Generator().manual_seed(1))


def quantized(net, name, *args, batches=3, replace=None, skip=("lm_head",), **options):
    states, how = [net.model["embed_tokens"](x).detach() for x in ids(batches)], method(name, *args, **options)
    return quantize_(net, how, stages_of(net), states, folds=LLAMA_FOLDS, replace=replace, skip=skip)


LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("name, kw", [("rtn", {}), ("gptq", {}), ("gptq", {"act_order": True}), ("fp8", {}),
                                      ("nf4", {}), ("awq", {}), ("smoothquant", {})])
def test_every_method_on_our_llama(name, kw):
    net = tiny(dtype=torch.float32)
    before, x = net(ids()[0]), ids()[0]
    embedding = net.model["embed_tokens"].weight.clone()
    weights, report = quantized(net, name, 4, 16, replace=packed.QuantLinear, **kw)
    names = [f"model.layers.{i}.{n}" for i in range(2) for n in LINEARS]
    assert list(weights) == list(report) == names
    assert not any(isinstance(m, nn.Linear) for m in net.modules())
    kind = {"smoothquant": Int8Linear, "nf4": NF4Linear}.get(name, packed.QuantLinear)
    assert all(isinstance(net.get_submodule(n), kind) for n in names)
    off = float((net(x) - before).norm() / before.norm())
    assert 0 < off < 0.12, off
    assert torch.equal(net.model["embed_tokens"].weight, embedding)
    assert all(0 < r.error < 0.2 and math.isfinite(r.error) for r in report.values())
    if name in ("gptq", "awq", "smoothquant"):
        assert all(r.tokens == 3 * 2 * 24 for r in report.values())
    assert (report[names[0]].damp == 0.01) == (name == "gptq")
    with pytest.raises(ValueError, match="quantized already"):
        quantized(net, name, 4, 16, **kw)
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_twice():
    """RT-20, OneTrainer #1634: a quantized model has nothing left to quantize, and says so; rounding once more what was
    rounded changes nothing, as scales are those of the grid."""
    net = tiny()
    quantized(net, "rtn", 8, replace=packed.QuantLinear)
    codes = [b.clone() for b in net.buffers()]
    with pytest.raises(ValueError, match="quantized already"):
        quantized(net, "rtn", 8, replace=packed.QuantLinear)
    assert all(torch.equal(a, b) for a, b in zip(codes, net.buffers()))


@pytest.mark.parametrize("sym", [True, False])
def test_gptq_and_awq_of_a_model_are_closer_than_rtn(sym):
    off = {}
    for name in ("rtn", "gptq", "awq"):
        net = tiny()
        with torch.no_grad():
            for block in net.model["layers"]:
                for norm in (block.input_layernorm, block.post_attention_layernorm):
                    norm.weight[::8] *= 8  # inputs with outliers
        unseen = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(9))
        was = net(unseen)
        quantized(net, name, 3, 16, sym, batches=20)
        off[name] = float((net(unseen) - was).norm())
    assert off["gptq"] < 0.9 * off["rtn"] and off["awq"] < 0.98 * off["rtn"], off


def test_groups_and_their_order():
    net = tiny()
    groups = calibrate._trace(stages_of(net)[1], net.model["embed_tokens"](ids()[0]), calibrate.find_linears(net, ()))
    cut = len("model.layers.1.")
    assert [[n[cut:] for n in g.names] for g in groups] == [LINEARS[:3], LINEARS[3:4], LINEARS[4:6], LINEARS[6:]]
    assert all(g.calls == 1 for g in groups)


class Twice(nn.Module):
    """A Linear that is called twice, two that share one input in other clothes, one that sees it changed in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        y = self.a(x) + self.b(x.view(-1, 8)).view(x.shape)
        z = self.c(input=y)
        y.mul_(2)
        return self.d(y) + self.c(z)


def test_shared_repeated_and_changed_inputs():
    torch.manual_seed(0)
    net = Twice().double().requires_grad_(False)
    groups = calibrate._trace(net, randn(2, 3, 8), calibrate.find_linears(net, ()))
    assert [(g.names, g.calls) for g in groups] == [(["a", "b"], 1), (["c"], 2), (["d"], 1)]
    _, report = quantize_(net, method("gptq"), [net], [randn(2, 3, 8)])
    assert report["c"].tokens == 12 and report["d"].tokens == 6


def test_a_linear_that_calibration_never_reaches():
    """GQ-08, keras #23512, GPTQModel #1376, #2293: hooks that never fired left H zero, and the result was plain
    rounding under the name of GPTQ."""
    net = tiny()
    net.extra = nn.Linear(32, 32)
    for name in ("gptq", "awq"):
        with pytest.raises(ValueError, match=r"never reached 1 of 15 Linears, first extra"):
            quantized(copy.deepcopy(net), name)
    weights, _ = quantized(net, "gptq", skip=("extra",))
    assert len(weights) == 14 and isinstance(net.extra, nn.Linear)
    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="with no token"):
        quantize_(net, method("gptq"), [net], [torch.zeros(0, 4)])


def test_nan_activations_in_a_model():
    """GQ-10, llm-compressor #2952, GPTQModel #1469: the error names layer and batch, and no hook stays behind."""
    net = tiny()
    states = [net.model["embed_tokens"](x).detach().clone() for x in ids()]
    states[1][0, 5, 3] = math.nan
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj, calibration batch 1"):
        quantize_(net, method("gptq"), stages_of(net), states)
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_later_layers_see_the_quantized_earlier_ones():
    """GQ-17, keras #23512: all statistics were collected before any layer was replaced. In one stage and in two."""
    x = correlated(64, 16)
    for staged in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False)).double()
        first, last = net[0].weight.detach().clone(), net[2].weight.detach().clone()
        stages = [net[:2], net[2:]] if staged else [net]
        weights, _ = quantize_(net, method("gptq", 2, scale_dtype=F64), stages, [x[:40], x[40:]])
        codes = gptq(first, stats_of(x).H, 2, scale_dtype=F64)
        assert torch.equal(weights["0"]["codes"], codes["codes"])
        after = (x @ dequantize(codes, F64).t()).tanh()
        assert torch.equal(weights["2"]["codes"], gptq(last, stats_of(after).H, 2, scale_dtype=F64)["codes"])
        unquantized = gptq(last, stats_of((x @ first.t()).tanh()).H, 2, scale_dtype=F64)
        assert not torch.equal(weights["2"]["codes"], unquantized["codes"])


def test_a_tied_embedding_never_changes():
    """GQ-12, transformers #37905, GPTQModel #1550, AngelSlim #319: also when the head is quantized on purpose."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mid, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
            self.lm_head.weight = self.embed.weight

        def forward(self, tokens):
            return self.lm_head(self.mid(self.embed(tokens)))

    for name in ("rtn", "gptq", "fp8", "nf4"):
        for skip in ((), ("lm_head",)):
            net = Tied()
            before = net.embed.weight.detach().clone()
            weights, _ = quantize_(net, method(name), [net], [torch.arange(8)], skip=skip)
            assert torch.equal(net.embed.weight, before) and ("lm_head" in weights) == (skip == ())
            unchanged = isinstance(net.lm_head, nn.Linear) and torch.equal(net.lm_head.weight, before)
            assert unchanged == (skip != ())


@pytest.mark.parametrize("call, message", [
    (lambda: quantized(tiny(), "rtn", 4, 24),
     r"groups of 24 do not divide the 32 columns of \S*q_proj; what divides .* is 8, 16, 32, and -1"),
    (lambda: quantize_(nn.Linear(6, 6), method("rtn", 4, 4)), "nothing from 8 on"),
    (lambda: quantize_(tiny(), method("gptq")), "needs calibration"),
    (lambda: quantized(tiny(), "gptq", skip=("model",)), r"no nn\.Linear"),
])
def test_a_plan_that_cannot_work_is_refused(call, message):
    """GQ-19, GPTQModel #328, gpt-fast #100: a group size that does not divide is refused with those that do; and RT-20:
    nothing to quantize is an error."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["awq", "smoothquant"])
@pytest.mark.parametrize("heads", [2, 4])
def test_folds_leave_the_float_model_as_it_was(monkeypatch, name, heads):
    """In float64 to 1e-10, when nothing is rounded. With grouped queries v_proj has fewer rows than o_proj columns and
    is passed over; with equal heads it is folded."""
    net = tiny(n_kv_head=heads)
    x, before, old = ids()[0], tiny(n_kv_head=heads)(ids()[0]), copy.deepcopy(net.state_dict())
    monkeypatch.setattr(calibrate, "_choose", lambda method, names, inputs, linears, made, report:
                        made.update({name: {} for name in names}))
    monkeypatch.setattr(calibrate, "_swap", lambda *a: None)
    quantized(net, name, 3, 16)
    torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-10)
    same = {n.removeprefix("model.layers.0.") for n, p in net.state_dict().items() if torch.equal(p, old[n])}
    assert not same & {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.up_proj.weight",
                       "mlp.down_proj.weight", "self_attn.q_proj.weight"}
    assert ("self_attn.o_proj.weight" in same) == (heads == 2)


def test_fold_of_a_norm_with_a_bias():
    torch.manual_seed(0)
    norm, linear, x = nn.LayerNorm(8), nn.Linear(8, 3), torch.randn(5, 8)
    nn.init.normal_(norm.bias)
    before = linear(norm(x)).detach()
    fold_(norm, [linear], torch.rand(8) + 0.5)
    torch.testing.assert_close(linear(norm(x)), before, atol=1e-5, rtol=1e-5)


class OnePlus(RMSNorm):
    """Gemma's: x times (1 + weight)."""

    def forward(self, x):
        return super().forward(x) + x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def test_norms_that_add_one_are_refused():
    """AW-04, llm-compressor #2500, #2522: dividing the weight of a norm that computes 1 + weight changes the model. The
    stage is run before and after the fold, and the difference is an error. So is a second user of the norm."""
    net = tiny()
    for block in net.model["layers"]:
        block.input_layernorm.__class__ = OnePlus
    with pytest.raises(ValueError, match=r"folds change what the stage of model\.layers\.0"):
        quantized(net, "smoothquant")
    net = nn.ModuleDict({"norm": nn.LayerNorm(16), "a": nn.Linear(16, 16)}).double()
    with pytest.raises(ValueError, match="used by none but"):
        quantize_(net, method("smoothquant"), [lambda x: net["a"](net["norm"](x)) + net["norm"](x)],
                  [correlated(30, 16)], folds=[("norm", ["a"])])


def test_how_often_the_stages_run():
    """Of gptq the groups' passes leave early: 1 trace, 4 passes and 1 to move on for each state, of which only the last
    is complete. The last stage need not move on."""
    net, runs = tiny(), {"begun": 0, "complete": 0}

    def counting(stage):
        def run(x):
            runs["begun"] += 1
            out = stage(x)
            runs["complete"] += 1
            return out
        return run

    downs = []
    for block in net.model["layers"]:
        block.mlp.down_proj.register_forward_hook(lambda *a: downs.append(1))
    states = [net.model["embed_tokens"](x).detach() for x in ids(5)]
    quantize_(net, method("gptq"), [counting(s) for s in stages_of(net)], states)
    assert runs == {"begun": 2 * (1 + 4 * 5) + 5, "complete": 2 + 5} and len(downs) == 2 + 5


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_memory_is_that_of_one_stage(name):
    """States are replaced one by one: at no time are more alive than there are batches, and one in the making."""
    net, alive, most = tiny(n_layer=5), [], 0

    def watched(stage):
        def run(x):
            nonlocal most
            out = stage(x)
            alive.append(weakref.ref(out))
            most = max(most, sum(r() is not None for r in alive))
            return out
        return run

    states = (net.model["embed_tokens"](x).detach() for x in ids(4))
    quantize_(net, method(name), [watched(s) for s in stages_of(net)], states, folds=LLAMA_FOLDS)
    assert most <= 4 + 3  # before and after a fold, one each


def test_an_interrupt_leaves_no_hook():
    net = tiny()
    calls = 0

    def stage(x):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return stages_of(net)[0](x)

    with pytest.raises(KeyboardInterrupt):
        quantize_(net, method("gptq"), [stage], [net.model["embed_tokens"](x).detach() for x in ids()])
    assert not any(m._forward_pre_hooks for m in net.modules())


def hugging_face(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=50, max_position_embeddings=64, **changes)
    return transformers.LlamaForCausalLM(config).double().eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_foreign_model_layer_by_layer_and_as_a_whole(name):
    """transformers' Llama through its own forward; by layers and as one stage the codes of gptq are the same."""
    results = []
    for staged in (True, False):
        net = hugging_face()
        before = net(ids()[0]).logits
        if staged:
            rotary = net.model.rotary_emb(torch.zeros(1, dtype=F64), torch.arange(24)[None])
            mask = torch.full((24, 24), -math.inf, dtype=F64).triu(1)[None, None]

            def stage(x, layer, rotary=rotary, mask=mask):
                return layer(x, position_embeddings=rotary, attention_mask=mask)

            stages = [functools.partial(stage, layer=m) for m in net.model.layers]
            states = [net.model.embed_tokens(x) for x in ids()]
        else:
            stages, states = [net], list(ids())
        how = method(name, 4, 16, scale_dtype=torch.bfloat16)
        weights, _ = quantize_(net, how, stages, states, folds=LLAMA_FOLDS, replace=packed.QuantLinear)
        results.append(weights)
        assert len(weights) == 14 and isinstance(net.lm_head, nn.Linear)
        assert float((net(ids()[0]).logits - before).norm() / before.norm()) < 0.1
        assert all(w["scales"].dtype == torch.bfloat16 for w in weights.values())
    if name == "gptq":
        assert all(torch.equal(results[0][n]["codes"], results[1][n]["codes"]) for n in results[0])


def test_what_is_exported_is_what_ran():
    """The weights that come back, written in a layout and read again, are those of the model."""
    net = tiny(dtype=torch.float32)
    weights, _ = quantized(net, "gptq", 4, 16, scale_dtype=torch.float16)
    for layout in ("gptq", "compressed-tensors"):
        config = {"quantization_config": layouts.quantization_config(layout, 4, 16)}
        stored = {}
        for name, weight in weights.items():
            if layout == "gptq":  # which has no signed codes
                weight = {**weight, "codes": (weight["codes"].int() + 8).to(torch.uint8),
                          "zeros": torch.full_like(weight["scales"], 8, dtype=torch.int32)}
            stored |= layouts.write(layout, name, weight)
        back = layouts.read(config, stored)
        for name in weights:
            assert torch.equal(layouts.dequantize(back[f"{name}.weight"]), net.get_submodule(name).weight)
