"""parallel.py - one model on several devices: Megatron-style tensor parallelism, who holds what and when they speak.

The one idea (Shoeybi et al. 2019, "Megatron-LM"): cut the first matrix of a pair by its outputs and the second one by
its inputs. Each rank then computes from end to end with its share of the heads, or of the MLP's units, and the ranks
speak once a pair, to add up what comes out:

            x (whole) --> q k v of my heads --> attention over my KV heads --> o: my columns --> partial sum --+
                                                                                                       all_reduce
            x (whole) <----------------------------------------------------------------------------------------+

    rank 0   q0 q1 q2  k0 v0     gate, up: units 0..511         down: columns 0..511         vocabulary 0..16383
    rank 1   q3 q4 q5  k1 v1     gate, up: units 512..1023      down: columns 512..1023      vocabulary 16384..32767

That is two all_reduce a layer, and one for the embedding, whose rows lie on the rank that has the id. The head's rows
are cut like the embedding's, and each rank's logits are those of its part of the vocabulary. Norms are on every rank.
Fewer KV heads than ranks are replicated: with 2 of them on 4 ranks, ranks 0 and 1 hold the first. The bias behind a sum
is rank 0's alone, or it would be added once a rank.

Nothing of this is in the model or in the cache. A rank's model is an ordinary one of fewer heads, made of slices, with
three kinds of layers wrapped; its cache is an ordinary one of fewer heads.

    config = shard_config(whole, group.rank, group.size)
    model  = Llama.from_tensors(config, Shards(tensors, whole, group.rank, group.size))
    parallelize_(model, whole, group).fuse_()

A group is anything with `rank`, `size` and `sum(x)`, the sum of all ranks' x on every rank: torch.distributed's
all_reduce in a few lines, or threads with a barrier (the demo).

Why not DTensor and `parallelize_module`: it has no rule for the operations on packed 4-bit weights, and it cannot
replicate single KV heads (Shard cuts evenly, Replicate copies all of them).

Left out on purpose: pipeline, sequence and expert parallelism, overlap of communication and computation.

Shapes: R rows of logits, H query heads, G key/value heads, D head_dim, V vocabulary, C hidden_size; a matrix is (N, K),
outputs by inputs.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn as nn

# ------------------------------------------------------------------ who holds what


def share(n: int, rank: int, size: int) -> tuple[int, int]:
    """The run [begin, end) of n things that a rank holds.

    >>> [share(49152, r, 3) for r in range(3)], [share(10, r, 3) for r in range(3)]
    ([(0, 16384), (16384, 32768), (32768, 49152)], [(0, 3), (3, 6), (6, 10)])
    """
    return n * rank // size, n * (rank + 1) // size


def kv_heads(n_kv_head: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads [begin, end) that a rank holds: its share, or the one that its query heads need.

    >>> [kv_heads(2, r, 4) for r in range(4)], [kv_heads(8, r, 2) for r in range(2)]
    ([(0, 1), (0, 1), (1, 2), (1, 2)], [(0, 4), (4, 8)])
    """
    if n_kv_head >= size:
        return share(n_kv_head, rank, size)
    return rank * n_kv_head // size, rank * n_kv_head // size + 1


def check_ranks(config, size: int) -> None:
    """ValueError, with the counts that would work, unless `size` ranks can share this model."""
    H, G, units, V = config.n_head, config.n_kv_head, config.intermediate_size, config.vocab_size

    def works(n: int) -> bool:
        return H % n == 0 and units % n == 0 and (G % n == 0 or n % G == 0) and n <= V

    if not works(size):
        counts = ", ".join(str(n) for n in range(1, H + 1) if works(n))
        raise ValueError(f"{H} query heads, {G} key/value heads and {units} units of the MLP cannot be shared out by "
                         f"{size} ranks; the numbers of ranks that work for this model are {counts}")


def shard_config(config, rank: int, size: int):
    """The config of a rank's own, smaller model."""
    check_ranks(config, size)
    begin, end = share(config.vocab_size, rank, size)
    return replace(config, n_head=config.n_head // size, n_kv_head=max(1, config.n_kv_head // size),
                   intermediate_size=config.intermediate_size // size, vocab_size=end - begin)


class Shards(Mapping):
    """Name -> this rank's slice of a tensor, or of a packed weight (codes, scales, ...: see packed.py).

    Slices are copies. Of a memory-mapped tensor nothing else is read, and of one that is decoded when it is asked for,
    nothing else stays in memory. `sizes` counts the weights of what was asked for, before it was cut.
    """

    def __init__(self, tensors: Mapping, config, rank: int, size: int):
        check_ranks(config, size)
        self.tensors, self.rank, self.sizes = tensors, rank, {}
        H, G, D, units = config.n_head, config.n_kv_head, config.head_dim, config.intermediate_size
        q, kv = ((n * D, *(D * i for i in cut)) for n, cut in ((H, share(H, rank, size)), (G, kv_heads(G, rank, size))))
        mlp, vocab = ((n, *share(n, rank, size)) for n in (units, config.vocab_size))
        self.rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": mlp, "up_proj": mlp, "embed_tokens": vocab,
                     "lm_head": vocab}  # layer -> rows in all, first, end
        self.columns = {"o_proj": q, "down_proj": mlp}

    def __getitem__(self, name: str) -> torch.Tensor | dict:
        weight, (owner, _, leaf) = self.tensors[name], name.rpartition(".")
        shape, layer = (weight["codes"] if isinstance(weight, Mapping) else weight).shape, owner.rpartition(".")[2]
        self.sizes[name] = shape.numel()
        if layer in self.columns and leaf == "bias":
            return weight if self.rank == 0 else torch.zeros_like(weight)
        for dim, cuts, what in ((0, self.rows, "rows"), (1, self.columns, "columns")):
            if layer in cuts:
                total, begin, end = cuts[layer]
                if len(shape) <= dim or shape[dim] != total:  # a slice might fit by chance
                    raise ValueError(f"{name} has shape {tuple(shape)}, but the config asks for {total} {what}")
                return (_rows if dim == 0 else _columns)(weight, begin, end)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name) -> bool:
        return name in self.tensors


def _rows(weight: torch.Tensor | Mapping, begin: int, end: int) -> torch.Tensor | dict:
    if isinstance(weight, torch.Tensor):
        return weight[begin:end].clone()
    parts = ("codes", "scales", "zeros", "mins")
    return {**weight, **{k: weight[k][begin:end].clone() for k in parts if weight[k] is not None}}


def _columns(weight: torch.Tensor | Mapping, begin: int, end: int) -> torch.Tensor | dict:
    if isinstance(weight, torch.Tensor):
        return weight[:, begin:end].clone(memory_format=torch.contiguous_format)
    K, groups, g_idx = weight["codes"].shape[1], weight["scales"].shape[1], weight["g_idx"]
    if g_idx is not None:  # act-order: columns of any group may be here; the groups that are, in order
        used, mine = torch.unique(g_idx[begin:end], return_inverse=True)
        g_idx = mine.to(g_idx.dtype)
    else:  # subtle: a cut may go through a group. Then groups become as short as they must be, with equal scales.
        run = math.gcd(K // groups, end - begin)
        used = torch.arange(begin // run, end // run, device=weight["scales"].device) * run // (K // groups)
    parts = {k: weight[k][:, used] for k in ("scales", "zeros", "mins") if weight[k] is not None}
    return {**weight, **parts, "codes": _columns(weight["codes"], begin, end), "g_idx": g_idx}


# ------------------------------------------------------------------ layers that speak


class RowParallel(nn.Module):
    """A linear layer of which every rank has some of the inputs: x (*, my inputs) -> (*, all outputs), on all ranks."""

    def __init__(self, inner: nn.Module, group):
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.sum(self.inner(x))


class VocabEmbedding(nn.Module):
    """An embedding of which every rank has the ids [begin, end): ids (*) -> (*, C), on all ranks."""

    def __init__(self, inner: nn.Module, begin: int, end: int, group):
        super().__init__()
        self.inner, self.begin, self.end, self.group = inner, begin, end, group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        others = (ids < self.begin) | (ids >= self.end)
        x = self.inner((ids - self.begin).clamp(0, self.end - self.begin - 1))
        return self.group.sum(x.masked_fill(others[..., None], 0))

    @property
    def weight(self) -> torch.Tensor:  # of a tied head
        return self.inner.weight


def parallelize_(model: nn.Module, config, group) -> nn.Module:
    """Make of a rank's own model, a Llama of slices, its part of the whole one, whose config this is. In place.

    Its logits are (R, my share of V): those of all ranks side by side are the whole model's.
    """
    for block in model.model["layers"]:
        block.self_attn.o_proj = RowParallel(block.self_attn.o_proj, group)
        block.mlp.down_proj = RowParallel(block.mlp.down_proj, group)
    mine = share(config.vocab_size, group.rank, group.size)
    model.model["embed_tokens"] = VocabEmbedding(model.model["embed_tokens"], *mine, group)
    model.config = config  # what others ask of a model is the whole one's
    return model


# ------------------------------------------------------------------ demo


def _demo() -> None:
    from threading import Barrier, Thread
    from types import SimpleNamespace

    size, parts, lines = 2, {}, []
    barrier = Barrier(size)

    class Threads:  # a group of threads: ranks that share a memory
        def __init__(self, rank: int):
            self.rank, self.size, self.sums = rank, size, 0

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            parts[self.rank] = x
            barrier.wait()
            total = torch.stack([parts[r] for r in range(size)]).sum(0)
            barrier.wait()
            self.sums += 1
            return total

    def layer(weight) -> nn.Module:
        made = nn.Linear(*weight.shape[::-1], bias=False, device="meta").requires_grad_(False)
        made.weight = nn.Parameter(weight, requires_grad=False)
        return made

    torch.manual_seed(0)
    whole = SimpleNamespace(n_head=4, n_kv_head=2, head_dim=8, intermediate_size=96, vocab_size=51)
    tensors = {"embed_tokens.weight": torch.randn(51, 32), "up_proj.weight": torch.randn(96, 32) / 6,
               "down_proj.weight": torch.randn(32, 96) / 10, "norm.weight": torch.ones(32)}
    ids = torch.tensor([3, 50, 20])

    def rank_of(group: Threads) -> None:
        mine = Shards(tensors, whole, group.rank, group.size)
        embed = nn.Embedding.from_pretrained(mine["embed_tokens.weight"])
        embed = VocabEmbedding(embed, *share(51, group.rank, group.size), group)
        up, down = layer(mine["up_proj.weight"]), RowParallel(layer(mine["down_proj.weight"]), group)
        x = embed(ids)
        logits[group.rank] = (x + down(up(x).relu())) @ embed.weight.T
        if group.rank == 0:
            lines.extend(f"  {n:20} {tuple(tensors[n].shape)!s:9} rank 0: {tuple(w.shape)}" for n, w in mine.items())
            lines.append(f"{group.sums} sums, one for the embedding and one for the MLP")

    print("The KV heads [begin, end) of each rank:")
    for n, ranks in ((3, 3), (8, 2), (2, 4)):
        print(f"  {n} heads on {ranks} ranks: {', '.join(str(list(kv_heads(n, r, ranks))) for r in range(ranks))}")
    logits: dict[int, torch.Tensor] = {}
    threads = [Thread(target=rank_of, args=[Threads(r)]) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\nTwo ranks share an embedding, an MLP and a head:", *lines, sep="\n")
    x = tensors["embed_tokens.weight"][ids]
    x = x + (x @ tensors["up_proj.weight"].T).relu() @ tensors["down_proj.weight"].T
    found, wanted = torch.cat([logits[r] for r in range(size)], -1), x @ tensors["embed_tokens.weight"].T
    print(f"The logits {tuple(found.shape)} of both, side by side, differ from one process's by "
          f"{(found - wanted).abs().max():.0e}")


if __name__ == "__main__":
    _demo()
