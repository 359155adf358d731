"""compiled.py - decode steps without Python: model and attention as one function, compiled once and kept on disk.

    run = Compiled(model, cache, folder, most=16)     a minute at first, then milliseconds
    logits = run(step)                                (R, V), of the step's own rows; or run(step, rows)

The one idea: a decode step of a small model is a thousand small operations, and on a CPU half of its time is what lies
between the products: Python, PyTorch's dispatcher, results that go to memory and come back. `torch.export` writes the
step down as one graph, and AOTInductor turns that into C++: neighbouring operations become one loop, the products stay
calls of the same kernels. The library it makes is kept in `folder` and loaded the next time.

What can be written down once must not change from step to step, and must not write where it reads:

    attend      as a formula instead of a kernel: scores, softmax and sum over the blocks that the block table names.
                Gathered, converted and multiplied in one loop, keys are read once and copied nowhere
    shapes      numbers of blocks vary, so they are symbols, and so is the number of sequences from 2 on. One sequence,
                the usual case, has a function of its own
    new K/V     a compiled function that wrote into the pool would first copy it. So it reads the pool only, sees the
                keys of the new tokens beside it, and hands them back for all layers: one copy afterwards

            pool  k0 k1 k2 k3 | k4 k5  ?  ?      keys of the cache: where the table says, "?" is masked
            new                        k6        key of the token itself: its score joins the softmax

    weights     are not in the library but passed to it: they stay what they are in memory, once
    the head    of one sequence is part of the function. Several have another: 8 bits are two products for the kernel of
                few rows, and expanded to bfloat16 they are one that reads twice as much (`pack_`)

All else runs as if this file were not there: steps in which a sequence has more than one new token (prompts, drafts).
Before a function is used it computes a step that the model computes too; if these differ, it is not used.

Of the model: hidden(tokens, positions, attend) -> (B, C), head(x) -> logits, parameters and buffers that do not change,
`rotary.inv_freq`, `lm_head`; one whose fuse_ has not packed. Of the cache: pool (L, 2, G, blocks, block_size, D),
scale, window; of a step its index tensors. A C++ compiler is needed for compiling, and for nothing else.

Reference: Ansel et al. 2024, "PyTorch 2" (Inductor).

Shapes: B sequences of one new token each, J blocks of a table, R rows, H query heads, G key/value heads, D head_dim,
L layers, C hidden_size, V vocabulary.
"""
from __future__ import annotations

import copy
import hashlib
import inspect
import io
import os
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

# ------------------------------------------------------------------ the step as a formula


class DecodeStep(nn.Module):
    """(tokens (B,), positions (B,), pool, table (B, J), seen (B,)) -> (logits (B, V), new K and V (L, 2, B, G, D)).

    seen: keys of each sequence that are in the pool; a table's entries behind them are any block numbers.
    alone: for one sequence. If not, the first result is what the head is given, (B, C).
    """

    def __init__(self, model: nn.Module, scale: float, window: int | None, alone: bool):
        super().__init__()
        self.model, self.scale, self.window, self.alone = model, scale, window, alone

    def forward(self, tokens: Tensor, positions: Tensor, pool: Tensor, table: Tensor, seen: Tensor):
        (B, J), size, new = table.shape, pool.shape[4], []
        at = torch.arange(J * size, device=table.device).view(J, size)
        hidden = at >= seen[:, None, None]  # (B, J, size): slots that hold nothing of this sequence
        if self.window is not None:
            hidden = hidden | (at <= seen[:, None, None] - self.window)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new.append(torch.stack((k, v)))  # (2, B, G, D)
            wide = torch.promote_types(q.dtype, torch.float32)
            G, group = k.shape[1], q.shape[1] // k.shape[1]
            keys, values = (pool[layer, i][:, table] for i in (0, 1))  # (G, B, J, size, D), never made: part of a loop
            k, v = (x.transpose(0, 1)[:, :, None].to(wide) for x in (k, v))  # (G, B, 1, D)
            q_ = q.view(B, G, group, -1).permute(1, 0, 2, 3).to(wide) * self.scale  # (G, B, group, D)
            scores = (q_[:, :, :, None, None] * keys[:, :, None].to(wide)).sum(-1)  # (G, B, group, J, size)
            scores = scores.masked_fill(hidden[None, :, None], -torch.inf).flatten(-2)
            own = (q_ * k).sum(-1, keepdim=True)  # (G, B, group, 1)
            most = torch.maximum(scores.amax(-1, keepdim=True), own)
            weights, own = (scores - most).exp(), (own - most).exp()
            # subtle: what lies in slots that hold nothing may be NaN, and 0 * NaN is NaN
            values = values.masked_fill(hidden[None, ..., None], 0)
            out = (weights.view(G, B, group, J, size, 1) * values[:, :, None].to(wide)).sum((-2, -3))
            out = (out + own * v) / (weights.sum(-1, keepdim=True) + own)  # (G, B, group, D)
            return out.permute(1, 0, 2, 3).reshape(q.shape).to(q.dtype)

        x = self.model.hidden(tokens, positions, attend)
        return self.model.head(x) if self.alone else x, torch.stack(new)


# ------------------------------------------------------------------ compiled, kept, loaded


def library_key(step: DecodeStep, pool: Tensor) -> str:
    """What a library is right for: this code, the model's code and shapes, the pool's, torch, the machine."""
    files = {inspect.getsourcefile(type(m)) for m in step.modules()} | {__file__}
    code = [Path(f).read_bytes() for f in sorted(filter(None, files)) if not f.startswith(torch.__path__[0])]
    tensors = *step.named_parameters(), *step.named_buffers()
    parts: list = [(name, t.shape, t.dtype, t.stride()) for name, t in tensors]
    parts += [pool.dtype, *pool.shape[:3], *pool.shape[4:]]  # any number of blocks
    try:
        with open("/proc/cpuinfo") as f:
            flags = next((line for line in f if line.startswith("flags")), "")
    except OSError:
        flags = ""
    # subtle: what Python knows as numbers (eps, YaRN's factor) is in the code that is made, and in no tensor
    text = repr((parts, getattr(step.model, "config", None), step.alone, step.scale, step.window, str(step.model),
                 torch.__version__, flags, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(),
                 sys.platform))
    return hashlib.sha256(b"\0".join([text.encode(), *code])).hexdigest()[:24]


@torch.no_grad()
def compile_step(step: DecodeStep, pool: Tensor, path: str) -> None:
    """Write the library of the step, for one sequence or for any number from 2 on, to path: whole or not at all.

    Raises RuntimeError if there is no compiler, the folder cannot be written, or the model cannot be written down.
    """
    B, any_number = 1 if step.alone else 3, torch.export.Dim.DYNAMIC
    some = (torch.arange(B), torch.arange(B), pool, torch.zeros(B, 3, dtype=torch.int64), torch.arange(B))
    batch = {} if step.alone else {0: any_number}
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RuntimeError(f"a compiled step cannot be kept in {folder} ({error.strerror}); name a folder that can be "
                           "written ($XDG_CACHE_HOME), or leave out --compile") from None
    # One row of packed weights: Inductor tries its own product against torch's and takes the faster, its own by a
    # third. (Of matrices in floating point it would put packed copies into the library.) What it says is not for users.
    tried = step.alone and not any(isinstance(m, nn.Linear) for m in step.modules())
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"} if tried else {}
    with (tempfile.TemporaryDirectory(dir=folder) as partial, warnings.catch_warnings(),
          redirect_stderr(io.StringIO())):
        warnings.simplefilter("ignore")
        try:
            graph = torch.export.export(step, some, strict=False, dynamic_shapes=(
                batch or None, batch or None, {3: any_number}, {**batch, 1: any_number}, batch or None))
            made = torch._inductor.aoti_compile_and_package(
                graph, package_path=os.path.join(partial, "step.pt2"),
                inductor_configs={"aot_inductor.package_constants_in_so": False, **options})
        except Exception as error:  # whatever a compiler says
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise RuntimeError(f"the decode step could not be compiled ({type(error).__name__}: {reason:.200}); "
                               "compiling needs a C++ compiler such as g++, running needs no compiling") from None
        os.replace(made, path)


def load_step(step: DecodeStep, path: str) -> Callable:
    """The compiled function: takes DecodeStep's arguments and returns what it returns."""
    # torch._inductor.aoti_load_package does the same after importing the compiler, which takes 1.8 s
    library = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    known: dict[str, Tensor] = dict((*step.named_parameters(), *step.named_buffers()))
    weights = {}
    for name in library.get_constant_fqns():
        if name in known:
            weights[name] = known[name].detach()
        elif name.startswith("_tensor_constant"):  # the one tensor of the model that is neither parameter nor buffer
            weights[name] = step.model.rotary.inv_freq
        else:  # the group size of a packed product; that of all of them, which trying the function out makes sure of
            weights[name] = torch.tensor(next(m.group for m in step.modules() if getattr(m, "kind", "") == "int4"))
    library.load_constants(weights, False, True, True)  # user_managed: they are used where they lie

    def run(*arguments: Tensor) -> list[Tensor]:
        return library.run(list(arguments))

    run.weights = weights  # type: ignore[attr-defined]  # subtle: the library has addresses only
    return run


class Compiled:
    """run(step, rows) -> logits (R, V): a decode step by a compiled function, any other by the model itself.

    folder   where libraries are kept, some 5 MB each
    most     sequences of a step at most; above 1 there is a second function, which takes another minute to compile
    tell     called with a line of text before a compilation begins
    `compiled` and `eager` count the steps of each kind. ValueError for a cache that is quantized or not on a CPU,
    RuntimeError if compiling fails. One Compiled serves one thread.
    """

    def __init__(self, model: nn.Module, cache, folder: str, most: int = 1, tell: Callable[[str], None] | None = None):
        if cache.pool is None:
            raise ValueError("a compiled step reads a KV cache in floating point on a CPU; this one is quantized or on "
                             f"{cache.device}")
        groups = sorted({m.group for m in model.modules() if getattr(m, "kind", "") == "int4"})
        if len(groups) > 1:
            raise ValueError(f"layers packed in groups of {' and of '.join(map(str, groups))} cannot be compiled into "
                             "one step; leave out --compile")
        self.model, self.cache, self.compiled, self.eager = model, cache, 0, 0
        self.slots = cache.pool.flatten(3, 4)  # (L, 2, G, slots, D), a view
        self.head, self.functions = model.head, {}
        if most > 1 and hasattr(model.lm_head, "pack_"):  # a layer of its own, of the same tensors until it packs them
            self.head = copy.copy(model.lm_head)
            self.head.__dict__.update(_parameters=dict(self.head._parameters), _buffers=dict(self.head._buffers))
            self.head.pack_()
        for alone in (True, False)[: 1 if most == 1 else 2]:
            step = DecodeStep(model, cache.scale, cache.window, alone)
            path = os.path.join(folder, f"step-{library_key(step, cache.pool)}.pt2")
            if not zipfile.is_zipfile(path):  # not there, or damaged
                if tell:
                    tell(f"compiling the decode step of {'one sequence' if alone else 'several sequences'}, once; this "
                         "takes a minute or two")
                compile_step(step, cache.pool, path)
            self.functions[alone] = load_step(step, path)
            # A hundredth is rounding: bfloat16, 30 layers. Keys that are made up can make much of it, once a half, so
            # there are three tries. Wrong weights give 1 or more each time.
            for _ in range(3):
                off = self._off(step, self.functions[alone])
                if off < 0.5:
                    break
            else:
                os.remove(path)
                raise RuntimeError(f"the compiled decode step differs from the model by {off:.2%} and was removed: "
                                   f"{path}")

    @torch.inference_mode()
    def _off(self, step: DecodeStep, function: Callable) -> float:
        """By how much, relative, the two differ when they compute the same from the same; nothing is written."""
        B, pool, block = 1 if step.alone else 3, self.cache.pool, self.cache.pool.shape[4]
        held = pool[:, :, :, :2].clone()
        pool[:, :, :, :2].normal_(std=0.25)
        try:
            seen = torch.arange(B) + block + 1  # one block is full and one is not
            arguments = torch.arange(B), seen, pool, torch.tensor([[0, 1, 0]] * B), seen
            (x, new), (expected, kept) = function(*arguments), step(*arguments)
        finally:
            pool[:, :, :, :2] = held
        return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in ((x, expected), (new, kept)))

    @torch.inference_mode()
    def __call__(self, step, rows: Tensor | None = None) -> Tensor:
        """Logits (R, V) of these rows (R,) of the step, of step.rows if None."""
        rows, B = step.rows if rows is None else rows, len(step.kv_len)
        function = self.functions.get(B == 1) if step.max_q == 1 else None
        if function is None:
            self.eager += 1
            return self.model(step.tokens, step.positions, step.attend, rows)
        self.compiled += 1
        table = step.block_table.long()
        if table.shape[1] == 1:  # one column is a shape of its own to the compiler; what the second says is masked
            table = table.expand(-1, 2).contiguous()
        x, new = function(step.tokens, step.positions, self.cache.pool, table, step.kv_len.long() - 1)
        self.slots.index_copy_(3, step.slots, new.transpose(2, 3))
        return x[rows] if B == 1 else self.head(x[rows])


# ------------------------------------------------------------------ demo


def _demo() -> None:
    import time
    from types import SimpleNamespace

    torch.manual_seed(0)
    L, H, G, D, V, size = 4, 4, 2, 16, 64, 4

    class Model(nn.Module):  # attention and one matrix a layer
        def __init__(self):
            super().__init__()
            self.embedding = nn.Parameter(torch.randn(V, H * D))
            self.qkv = nn.ParameterList(torch.randn((H + 2 * G) * D, H * D) / (H * D) ** 0.5 for _ in range(L))
            self.lm_head, self.rotary = nn.Linear(H * D, V), SimpleNamespace(inv_freq=torch.zeros(1))

        def hidden(self, tokens, positions, attend):
            x = self.embedding[tokens] + positions[:, None] / 100
            for layer, weight in enumerate(self.qkv):
                q, k, v = (x @ weight.T).unflatten(-1, (-1, D)).split((H, G, G), -2)
                x = x + attend(layer, q, k, v).flatten(-2).tanh()
            return x

        def head(self, x):
            return self.lm_head(x)

    model, pool = Model(), torch.randn(L, 2, G, 9, size, D)
    step = DecodeStep(model, D ** -0.5, None, alone=True)
    # tokens 0..9 of a sequence lie in blocks 7, 2, 5; of the last one half is somebody's rubbish
    arguments = torch.tensor([3]), torch.tensor([10]), pool, torch.tensor([[7, 2, 5]]), torch.tensor([10])
    print("A decode step as one function of plain tensors, which is what can be compiled:")
    print(f"one sequence of 10 keys in blocks 7 2 5 of {size}; pool {tuple(pool.shape)}, key "
          f"{library_key(step, pool)}")
    print("what is computed: logits", *(tuple(t.shape) for t in step(*arguments)), "new K and V")
    pool[:, :, :, 5, 2:] = torch.nan
    print("NaN behind its end reaches it:", bool(step(*arguments)[0].isnan().any()))
    if sys.argv[1:] != ["compile"]:
        print("`python compiled.py compile` compiles this step, too, which takes half a minute")
        return
    with tempfile.TemporaryDirectory() as folder:
        path, begin = os.path.join(folder, "step.pt2"), time.perf_counter()
        try:
            compile_step(step, pool, path)
        except RuntimeError as error:
            print(error)
            return
        print(f"compiled in {time.perf_counter() - begin:.0f} s to {os.path.getsize(path):,} bytes", end="; ")
        begin = time.perf_counter()
        run = load_step(step, path)
        print(f"loaded in {1e3 * (time.perf_counter() - begin):.0f} ms")
    with torch.inference_mode():
        print(f"largest difference from the model: {(run(*arguments)[0] - step(*arguments)[0]).abs().max():.1e}")
        for name, function in (("the formula, operation by operation", step), ("compiled", run)):
            took = []
            for _ in range(50):
                begin = time.perf_counter()
                function(*arguments)
                took.append(time.perf_counter() - begin)
            print(f"  {name:37}{sorted(took)[25] * 1e6:7.0f} us")


if __name__ == "__main__":
    _demo()
