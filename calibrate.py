"""calibrate.py - walking a model to quantize it: what inputs does each layer meet, and what becomes of it.

    how = quantize.method("gptq", bits=4, group_size=64)
    weights, report = quantize_(model, how, stages, states, replace=packed.QuantLinear)

The one idea: a layer must be quantized for the inputs that it will really get, and those come from the layers before
it, quantized themselves. So the model is walked once, piece by piece. Each piece, a stage, is run on all of the
calibration text, its layers are quantized in the order in which they are called, and what the finished stage puts out
is where the next one starts. At any time there are the activations of one stage in memory, not of all.

    state --> [ stage 1: quantized ] --> state --> [ stage 2: at work ] --> [ stage 3: as it was ]
                                                   q,k,v | o | gate,up | down     groups, each by its inputs

Nothing here knows an architecture or a method. Layers are found as `nn.Linear` by isinstance, hooks tell which of them
are given the very same input and when, and a pass that is only to show a group's inputs is left as soon as it has: for
a Llama's block with its four groups the passes come to about 2.5 forwards. The method comes as data, quantize.Method:
`choose` makes codes of the matrices of a group, `scales` may want its inputs multiplied beforehand.

The stages are functions state -> state that run the model one after the other; the caller writes them, and a state is
whatever they pass on. Of model.py's Llama, before fuse_, in float32, with a state for each batch of ids (B, T):

    def block(x, layer, module):
        cos, sin = model.rotary(torch.arange(x.shape[1], device=x.device), x.dtype)
        return module(x, cos, sin, functools.partial(causal_attention, layer, window=model.config.sliding_window))

    stages = [functools.partial(block, layer=i, module=m) for i, m in enumerate(model.model["layers"])]
    states = [model.model["embed_tokens"](ids) for ids in batches]

Of any model `stages = [model]` does too, its inputs the states; but then each group is one more run from the start.

Papers: running a block at a time on quantized predecessors, Frantar et al. 2022 (arXiv 2210.17323); folding scales into
the layer before, Xiao et al. 2022 (2211.10438) and Lin et al. 2023 (2306.00978).
Left out on purpose: choosing codes (quantize.py), the calibration text, files (layouts.py), mixture of experts (a
Linear that the first state does not reach is an error), embeddings and whatever is not an nn.Linear.
Shapes: N out_features, K in_features, "*" any leading dimensions.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

# ------------------------------------------------------------------ what calibration learns about a layer's inputs


class Statistics:
    """Running averages over the inputs x (*, K) of a layer, in float32 (float64 for float64 inputs).

    H (K, K) is the mean of x^T x, mean_abs (K,) of |x|, max_abs (K,) the greatest |x|; n tokens so far.

    >>> s = Statistics()
    >>> s.add(torch.tensor([[-1.0, 2.0], [-3.0, 2.0]]))
    >>> s.n, s.mean_abs.tolist(), s.H.tolist()
    (2, [2.0, 2.0], [[5.0, -4.0], [-4.0, 4.0]])
    """

    def __init__(self, hessian: bool = True):
        self.n, self.hessian = 0, hessian
        self.H = self.mean_abs = self.max_abs = None  # type: Tensor

    def add(self, x: Tensor, where: str = "the input") -> None:
        """ValueError, naming `where`, if x holds NaN or infinity: no damping repairs a poisoned average."""
        x = x.detach().reshape(-1, x.shape[-1])
        x = x if x.dtype == torch.float64 else x.float()
        if not x.isfinite().all():
            bad = int((~x.isfinite()).any(1).sum())
            raise ValueError(f"{where}: {bad} of {len(x)} tokens have NaN or infinite activations; calibrate with text "
                             "and a dtype in which the model itself computes finite numbers")
        if self.H is None:
            K = x.shape[1]
            self.H, self.mean_abs, self.max_abs = x.new_zeros(K, K), x.new_zeros(K), x.new_zeros(K)
        if not len(x):
            return
        before, self.n = self.n, self.n + len(x)
        size = x.abs()
        self.mean_abs.mul_(before / self.n).add_(size.sum(0), alpha=1 / self.n)
        torch.maximum(self.max_abs, size.amax(0), out=self.max_abs)
        if self.hessian:
            self.H.addmm_(x.t(), x, beta=before / self.n, alpha=1 / self.n)

    def divide(self, s: Tensor) -> None:
        """As if every x had been x / s."""
        self.H, self.mean_abs, self.max_abs = self.H / (s * s[:, None]), self.mean_abs / s, self.max_abs / s


def output_error(w: Tensor, q: Tensor, H: Tensor | None = None) -> float:
    """|x (w - q)^T| / |x w^T| in Frobenius norms over the inputs that made H; H None: |w - q| / |w|.

    >>> w, q = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]])
    >>> output_error(w, q), output_error(w, q, torch.diag(torch.tensor([1.0, 0.0])))
    (0.2, 0.0)
    """
    def size(d: Tensor) -> float:
        return float((d * (d if H is None else d @ H)).sum(dtype=torch.float64).clamp(min=0))

    w, q = (t.float() if H is None else t.to(H.dtype) for t in (w, q))
    whole = size(w)
    return math.sqrt(size(w - q) / whole) if whole else 0.0


# ------------------------------------------------------------------ a whole model


class Layer(NamedTuple):
    """What `quantize_` reports of one Linear."""
    error: float        # |x (w - q)^T| / |x w^T| over the calibration; |w - q| / |w| where the method keeps no H
    tokens: int         # that its inputs were seen with
    damp: float | None  # gptq: the damping that was used


LLAMA_FOLDS = (  # (whose outputs can be divided, for whose inputs to be multiplied), by name within a block
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)


@torch.no_grad()
def quantize_(model: nn.Module, method, stages: Sequence[Callable] = (), states: Iterable = (), *,
              folds: Sequence = (), replace: Callable | None = None, skip: Sequence[str] = ("lm_head",),
              progress: bool = False) -> tuple[dict[str, dict], dict[str, Layer]]:
    """Quantize every nn.Linear of a float model, in place; returns (weights, report), both by module name.

    method    quantize.method(..), or anything with the attributes of quantize.Method
    stages, states    see the file's docstring; only methods that are calibrated need them. With one that goes in order
              (gptq) a stage runs about 2.5 times on every state, with the others twice
    folds     for methods that scale inputs, as LLAMA_FOLDS; a pair whose shapes differ is passed over (v_proj to o_proj
              with grouped queries)
    replace   replace(weight, bias) -> the module that takes a Linear's place, such as packed.QuantLinear, unless the
              method brings its own; None leaves nn.Linear, with the rounded weights as floats
    skip      Linears that stay as they are: full names, or whole parts at their beginning or end. The head by default

    New weights are new tensors, nothing is written in place: what shares memory with a Linear, such as the embedding
    that a head is tied to, stays. Norms and others into which something was folded have their new parameters.
    Raises ValueError for group sizes that do not divide, before anything changed; later for a Linear that is not
    reached or meets NaN, and for folds that change what the model computes. When it raises or is interrupted the model
    is half done and of no use: load it again. Hooks are gone in any case.
    """
    linears, stages, states = find_linears(model, skip), list(stages), list(states)
    check_groups(linears, method.group_size)
    made, report = dict.fromkeys(linears), dict.fromkeys(linears)  # both in the model's order
    if method.calibrated and not (stages and states):
        raise ValueError(f"{method.name} needs calibration: at least one stage and one state, not {len(stages)} and "
                         f"{len(states)}")
    for name in _bar(linears, progress) if not method.calibrated else ():
        _choose(method, [name], None, linears, made, report)
        _swap(model, linears[name], made[name], method.module or replace)
    for number, stage in enumerate(_bar(stages, progress) if method.calibrated else ()):
        groups = [g for g in _trace(stage, states[0], linears) if made[g.names[0]] is None]
        # in order: one group a pass; else all in one, since the scales change a layer for the sake of the next one
        for some in [[g] for g in groups] if method.in_order else [groups] if groups else []:
            found = _collect(stage, states, some, linears, method.hessian)
            if method.scales is not None and folds:
                _fold_all(stage, states[0], method, some, found, linears, folds, model)
            for group, inputs in zip(some, found):
                _choose(method, group.names, inputs, linears, made, report)
        if number + 1 < len(stages):  # nobody starts from what the last one puts out
            for i in range(len(states)):
                states[i] = stage(states[i])
        for name in (name for group in groups for name in group.names):
            _swap(model, linears[name], made[name], method.module or replace)
    if missed := [name for name in linears if made[name] is None]:
        raise ValueError(f"calibration never reached {len(missed)} of {len(linears)} Linears, first {missed[0]}: let "
                         "the stages use it on the first state, or skip it")
    return made, report


def find_linears(model: nn.Module, skip: Sequence[str] = ("lm_head",)) -> dict[str, nn.Linear]:
    """What `quantize_` would quantize, by name. ValueError if that is nothing."""
    def stays(name: str) -> bool:
        return any(f".{name}.".endswith(f".{s}.") or f"{name}.".startswith(f"{s}.") for s in skip)

    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not stays(name)}
    if not found:
        raise ValueError("there is no nn.Linear to quantize in this model: is it quantized already, or all to skip?")
    return found


def check_groups(linears: Mapping[str, nn.Linear], size: int) -> None:
    """ValueError if groups of `size` do not divide the columns of each: to be asked before a text is made."""
    for name, linear in linears.items():
        if size > 0 and linear.in_features % size:
            common = math.gcd(*(x.in_features for x in linears.values()))
            fit = ", ".join(str(d) for d in range(8, common + 1) if common % d == 0)
            raise ValueError(f"groups of {size} do not divide the {linear.in_features} columns of {name}; what divides "
                             f"those of all layers is {fit or 'nothing from 8 on'}, and -1 is one group a row")


def _bar(items: Iterable, progress: bool) -> Iterable:
    if not progress:
        return items
    from tqdm import tqdm

    return tqdm(items)


def _choose(method, names: Sequence[str], inputs: Statistics | None, linears: Mapping[str, nn.Linear], made: dict,
            report: dict) -> None:
    """Codes for Linears that share their inputs. Until their stage is through they go on in floats, which is faster."""
    if inputs is not None and not inputs.n:
        raise ValueError(f"calibration reached {names[0]} with no token: use longer text")
    H = inputs.H if method.hessian else None
    for name, choice in zip(names, method.choose(names, [linears[name].weight for name in names], inputs)):
        error = output_error(linears[name].weight, choice.dense, H)
        made[name], report[name] = choice.weight, Layer(error, inputs.n if inputs else 0, choice.damp)
        linears[name].weight = nn.Parameter(choice.dense, requires_grad=False)


def _swap(model: nn.Module, old: nn.Linear, weight: Mapping, replace: Callable | None) -> None:
    if replace is None:
        return
    new = replace(weight, None if old.bias is None else old.bias.detach())
    for parent in list(model.modules()):  # it may hang in the model in more than one place
        for key in [key for key, child in parent._modules.items() if child is old]:
            setattr(parent, key, new)


# ------------------------------------------------------------------ hooks: who gets what, and when


class Group(NamedTuple):
    """Linears that are given the very same inputs, and how often in one run of their stage."""
    names: list[str]
    calls: int


class _Enough(Exception):
    """Raised by a hook to leave a stage that has shown what was wanted."""


@contextmanager
def _watching(linears: Mapping[str, nn.Linear], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """see(name, x) before each call of one of these Linears; it may raise _Enough. The hooks go in any case."""
    def hook(name: str) -> Callable:
        return lambda module, args, kwargs: see(name, args[0] if args else kwargs["input"])

    handles = [m.register_forward_pre_hook(hook(name), with_kwargs=True) for name, m in linears.items()]
    try:
        yield
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _trace(stage: Callable, state, linears: Mapping[str, nn.Linear]) -> list[Group]:
    """The groups of a stage, in the order of their first calls."""
    inputs: dict[str, list] = {}
    held = []  # subtle: as long as these are alive, no other tensor can have their addresses

    def see(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])  # the same memory in another shape is the same input
        held.append(rows)
        version = 0 if x.is_inference() else x._version  # counts changes in place
        inputs.setdefault(name, []).append((rows.data_ptr(), rows.shape, rows.stride(), version))

    with _watching(linears, see):
        stage(state)
    groups: dict[tuple, list] = {}
    for name, keys in inputs.items():
        groups.setdefault(tuple(keys), []).append(name)
    return [Group(names, len(keys)) for keys, names in groups.items()]


def _collect(stage: Callable, states: Sequence, groups: Sequence[Group], linears: Mapping[str, nn.Linear],
             hessian: bool) -> list[Statistics]:
    """Statistics of each group's inputs over all states. One of a group is watched, its first, and the stage is left at
    the last call that counts: the first group of an attention block costs no more than a norm."""
    found = {group.names[0]: Statistics(hessian) for group in groups}
    for batch, state in enumerate(states):
        left = sum(group.calls for group in groups)

        def see(name: str, x: Tensor, batch: int = batch) -> None:
            nonlocal left
            found[name].add(x, f"{name}, calibration batch {batch}")
            left -= 1
            if not left:
                raise _Enough

        with _watching({name: linears[name] for name in found}, see):
            stage(state)
    return list(found.values())


# ------------------------------------------------------------------ folding scales into the layer before


def fold_(before: nn.Module, after: Iterable[nn.Linear], s: Tensor) -> None:
    """Divide what `before` (a norm or a Linear) puts out by s (K,) and multiply the columns of `after` by it, in new
    tensors: what they compute together stays, up to rounding."""
    for key in ("weight", "bias"):
        if (p := getattr(before, key, None)) is not None:
            p = p / (s[:, None] if p.dim() == 2 else s).to(p.dtype)
            setattr(before, key, nn.Parameter(p, requires_grad=False))
    for linear in after:
        linear.weight = nn.Parameter(linear.weight * s.to(linear.weight.dtype), requires_grad=False)


def _fold_all(stage: Callable, state, method, groups: Sequence[Group], found: Sequence[Statistics],
              linears: Mapping[str, nn.Linear], folds: Sequence, model: nn.Module) -> None:
    """Scale the inputs of each group that the folds name; then try out that the stage still computes the same."""
    was = _tensors(stage(state))
    for group, inputs in zip(groups, found):
        before, w = _before(group.names, folds, model), torch.cat([linears[name].weight for name in group.names])
        if before is not None and len(before.weight) == w.shape[1]:
            s = method.scales(w, inputs)
            fold_(before, [linears[name] for name in group.names], s)
            inputs.divide(s)
    for a, b in zip(was, _tensors(stage(state))):
        off = float((a - b).double().norm() / a.double().norm().clamp(min=1e-30))
        if not off <= math.sqrt(torch.finfo(a.dtype).eps):
            raise ValueError(f"the folds change what the stage of {groups[0].names[0]} computes, by {off:.1e}: is each "
                             "layer before linear in its weight (norms that compute 1 + weight are not), and used by "
                             "none but the layers after?")


def _before(names: Sequence[str], folds: Sequence, model: nn.Module) -> nn.Module | None:
    """The layer before the Linears `names`, if a fold is for just these."""
    for before, after in folds:
        prefix = next((names[0].removesuffix(a) for a in after if f".{names[0]}".endswith(f".{a}")), None)
        if prefix is not None and sorted(names) == sorted(prefix + a for a in after):
            return model.get_submodule(prefix + before)
    return None


def _tensors(state) -> list[Tensor]:
    """The floating-point tensors in what a stage returned."""
    if isinstance(state, Tensor):
        return [state] if state.is_floating_point() else []
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return [t for part in parts for t in _tensors(part)]


# ------------------------------------------------------------------ demo


def demo() -> None:
    """Two blocks of a made-up model: which layers share an input, what each pass costs, and how a rounding in the first
    block changes what the second one is told."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, (self.gate, self.up, self.down) = nn.LayerNorm(32), (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            h = self.norm(x)
            return x + self.down(torch.relu(self.gate(h)) * self.up(h))

    class Rounding(NamedTuple):  # what quantize.method makes, in short: the nearest of few steps
        name: str = "rounding"
        group_size: int = -1
        calibrated: bool = True
        hessian: bool = True
        in_order: bool = True
        scales: Callable | None = None
        module: Callable | None = None

        def choose(self, names, ws, inputs):
            class Choice(NamedTuple):
                weight: dict
                dense: Tensor
                damp: float | None = None

            steps = [w.abs().amax(1, keepdim=True) / 3.5 for w in ws]
            codes = [(w / s).round().clamp(-4, 3) for w, s in zip(ws, steps)]
            print(f"    {' and '.join(names):20} {inputs.n} tokens, mean square of an input "
                  f"{float(inputs.H.diagonal().mean()):.4f}")
            return [Choice({"codes": c.to(torch.int8), "scales": s}, c * s) for c, s in zip(codes, steps)]

    model = nn.Sequential(Block(), Block()).requires_grad_(False)
    ran = []
    for name, m in model.named_modules():
        if isinstance(m, nn.Linear):
            m.register_forward_hook(lambda *a, name=name: ran.append(name))
    states = [torch.randn(4, 8, 32) for _ in range(5)]
    was = [model(x) for x in states]
    print("Which layers are given the same input, and in which order:")
    for i, stage in enumerate(model):
        groups = _trace(stage, states[0], find_linears(model, ()))
        print(f"    stage {i}: " + ", then ".join(" and ".join(group.names) for group in groups))
    ran.clear()
    print("\nCodes of 3 bits, in the order in which they are chosen:")
    _, report = quantize_(model, Rounding(), list(model), states)
    print("\nWhat it took, and what it cost:")
    for name, layer in report.items():
        print(f"    {name:8} ran {ran.count(name):2} times on {len(states)} batches; relative error of its output "
              f"{layer.error:.3f}")
    off = sum(float((model(x) - y).square().sum()) for x, y in zip(states, was)) ** 0.5
    print(f"    the model as a whole: relative error {off / sum(float(y.square().sum()) for y in was) ** 0.5:.3f}")


if __name__ == "__main__":
    demo()
