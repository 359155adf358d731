"""flash.py's Triton kernels without a GPU: numbers from Triton's interpreter, machine code from its compiler.

Whether a kernel is interpreted is settled when triton and the kernel's module are imported, so both are imported in
processes of their own: this file, run as a script, is the worker. It prints one JSON object of outcomes, which the
tests below look into. `python tests/test_flash.py table` prints registers, shared memory and instructions.
"""
import ast
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
FORMS = ("few", "many")  # all sequences through the form with pieces of the keys and a merge, or through the other
TILE, PIECE = 16, 32  # keys of a tile in the interpreter; SPLIT here, so that short sequences have several pieces

# ------------------------------------------------------------------ a pairwise cover, against float64


LENGTHS = {  # (new tokens, keys) of each sequence
    "decodes": [(1, 1), (1, 16), (1, 47)],
    "prompts": [(17, 17), (20, 20)],
    "mixed": [(1, 35), (18, 18), (3, 20), (0, 9)],
    "no keys": [(4, 2), (1, 0), (17, 3)],
    "chunk": [(18, 40)],
    "drafts": [(5, 33), (2, 64)],
    "one": [(1, 65)],
}
FACTORS = {
    "lengths": list(LENGTHS), "heads": [(1, 1), (4, 2), (6, 2), (4, 1), (8, 1), (20, 1)],
    "D": [16, 24, 64, 80, 96, 112, 128, 256],
    "dtype": list(DTYPES), "cache": ["as q", "int8", "fp8"], "block_size": [1, 4, 16, 64], "window": [None, 1, 7, 40],
    "layout": ["token", "head", "gaps"],
}
LENGTHS["unannounced"] = [(1, 40), (5, 40), (1, 37)]  # for a call that promises one token each
LENGTHS["long"] = [(1, 900), (2, 3)]  # more pieces than are merged at a time; for cases of its own


class Case(NamedTuple):
    lengths: str
    heads: tuple[int, int]  # H, G
    D: int
    dtype: str
    cache: str
    block_size: int
    window: int | None
    layout: str

    def __str__(self):
        return "-".join(str(x).replace(" ", "_") for x in self)


def pairwise(factors: dict) -> list[Case]:
    """Few cases that hold every pair of values of every two factors: each case is grown from a pair not met yet."""
    names = list(factors)
    left = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    cases = []
    while left:
        case = dict(min(left, key=repr))
        for name in names:
            if name not in case:
                def gain(value, name=name, case=case, left=left):
                    pairs = [((other, chosen), (name, value)) for other, chosen in case.items()]
                    return sum(pair in left or pair[::-1] in left for pair in pairs)

                turn = len(cases) % len(factors[name])
                case[name] = max(factors[name][turn:] + factors[name][:turn], key=gain)
        left -= set(itertools.combinations(((name, case[name]) for name in names), 2))
        cases.append(Case(**case))
    return cases


COVER = pairwise(FACTORS)
FAST = COVER[::4]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x with other strides: "head" has the last but one dimension outermost, "gaps" a NaN behind every number."""
    if layout == "head":
        order = [x.ndim - 2, *range(x.ndim - 2), x.ndim - 1]
        return x.permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])
    if layout == "gaps":
        gap = torch.full_like(x.float(), math.nan).to(x.dtype)
        return torch.stack((x, gap), -1).flatten(-2)[..., ::2]
    return x


def inputs(case: Case, device: str = "cpu") -> tuple[tuple, dict]:
    """paged_attention's arguments. What is not a key of some sequence is NaN: blocks, slots, scales."""
    g = torch.Generator().manual_seed(COVER.index(case) if case in COVER else 99)
    (H, G), D, size, dtype = case.heads, case.D, case.block_size, DTYPES[case.dtype]
    n, S = zip(*LENGTHS[case.lengths])
    blocks = [-(-s // size) for s in S]
    order = (1 + torch.randperm(sum(blocks), generator=g)).split(blocks)  # block 0 belongs to nobody
    table = torch.zeros(len(S), max(blocks) + 1, dtype=torch.int32)
    written = torch.zeros(sum(blocks) + 1, size, dtype=torch.bool)
    for b, mine in enumerate(order):
        table[b, : len(mine)] = mine
        written[mine[torch.arange(S[b]) // size], torch.arange(S[b]) % size] = True
    k, v = torch.randn(2, len(written), size, G, D, generator=g)
    options = dict(max_q=max(n), window=case.window, k_scale=None, v_scale=None)
    if case.cache == "as q":
        k, v = (x.masked_fill(~written[..., None, None], math.nan).to(dtype) for x in (k, v))
    else:
        top = 127 if case.cache == "int8" else 448
        for name, x in (("k_scale", k), ("v_scale", v)):
            scale = (x.abs().amax(-1) / top).masked_fill(~written[..., None], math.nan)
            options[name] = laid_out(scale, case.layout).to(device)
        k, v = ((x / options[name].cpu()[..., None]).nan_to_num(55) for name, x in (("k_scale", k), ("v_scale", v)))
        k, v = ((x.round() if top == 127 else x).to(torch.int8 if top == 127 else torch.float8_e4m3fn) for x in (k, v))
    q = (3 * torch.randn(sum(n), H, D, generator=g)).to(dtype)  # a few keys dominate, and the maximum moves
    q, k, v = (laid_out(x, case.layout).to(device) for x in (q, k, v))
    starts = torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
    return (q, k, v, table.to(device), torch.tensor(S, dtype=torch.int32, device=device), starts.to(device),
            D ** -0.5), options


def definition(q, k, v, table, kv_len, q_start, scale, *, max_q=0, window=None, k_scale=None, v_scale=None):
    """(out, lse, size), float64, row by row; size is what the sum of a row runs through, |v| weighted."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    if k_scale is not None:
        k, v = k * k_scale.double().cpu()[..., None], v * v_scale.double().cpu()[..., None]
    (N, H, D), (_, size, G, _) = q.shape, k.shape
    out, sizes = torch.zeros(2, N, H, D, dtype=torch.float64)
    lse = torch.full((N, H), -math.inf, dtype=torch.float64)
    for b, S in enumerate(kv_len.tolist()):
        start, end = q_start.tolist()[b: b + 2]
        for j in range(end - start):
            last = S - (end - start) + j
            if last < 0:
                continue
            keys = torch.arange(0 if window is None else max(0, last - window + 1), last + 1)
            at = table[b].cpu().long()[keys // size], keys % size
            mine = torch.arange(H) // (H // G)
            s = torch.einsum("hd,shd->hs", q[start + j], k[at][:, mine]) * scale
            p, values = s.softmax(1), v[at][:, mine]
            out[start + j] = torch.einsum("hs,shd->hd", p, values)
            sizes[start + j] = torch.einsum("hs,shd->hd", p, values.abs())
            lse[start + j] = s.logsumexp(1)
    return out, lse, sizes


def excess(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, slack: float = 2**-16) -> float:
    """The largest error in units of what is allowed: one rounding of the result (the interpreter cuts bits off, up to a
    whole unit) and `slack` of the sum. At most 1 is right; NaN or an infinity in the wrong place counts as inf."""
    unit, found = UNIT[found.dtype], found.double().cpu()
    same = found == exact  # -inf, too
    ratio = (found - exact).abs() / (unit * exact.abs() + slack * size + 1e-30)
    ratio = ratio.masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    return min(ratio.max().item(), 1e9) if ratio.numel() else 0.0


@needs_triton
@pytest.mark.parametrize("case", FAST, ids=str)
def test_attention(case):
    """FA-07, vllm #641, #936, #53856; flash-attention #1745; ROCm/aiter #5401; pytorch #101967: blocks and slots that
    no sequence has written hold NaN in every case of this cover, beside FA-17 (strides) and FA-24 (few rows)."""
    check_attention(outcomes("interpret")[str(case)], case)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("case", sorted(set(COVER) - set(FAST), key=str), ids=str)
def test_attention_everywhere(case):
    check_attention(outcomes("interpret-slow")[str(case)], case)


def check_attention(found, case):
    assert found["shape"] == [sum(n for n, _ in LENGTHS[case.lengths]), case.heads[0], case.D]
    assert found["dtype"] == str(DTYPES[case.dtype])
    assert found["out"] <= 1
    assert found["lse"] <= 1
    assert found["attention.py"] <= 1


def test_the_cover_holds_every_pair():
    for a, b in itertools.combinations(FACTORS, 2):
        pairs = {(getattr(case, a), getattr(case, b)) for case in COVER}
        assert pairs == set(itertools.product(FACTORS[a], FACTORS[b]))
    assert len(COVER) <= 70


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_attention_on_a_gpu():
    """FA-23, triton #1671, #5895, #8654, #10176 among others: in float32 no product is rounded to TF32."""
    import flash

    LENGTHS["longer"] = [(1, 9000), (300, 300), (40, 2100), (5, 1023), (1, 512)]
    cases = COVER + [Case("longer", heads, D, dtype, cache, 16, window, "token") for heads, D, dtype, cache, window in
                     itertools.product([(32, 8), (9, 3)], (64, 128), DTYPES, FACTORS["cache"], (None, 700))]
    for case in cases:
        arguments, options = inputs(case, "cuda")
        exact, lse, size = definition(*arguments, **options)
        out, found = flash.paged_attention(*arguments, **options, return_lse=True)
        slack = 2**-14 if case.dtype == "fp32" else 4 * UNIT[DTYPES[case.dtype]]
        assert excess(out, exact, size, slack) <= 1, case
        assert excess(found, lse, torch.ones_like(lse), 2**-12) <= 1, case
        assert torch.equal(out, flash.paged_attention(*arguments, **options)), f"{case}: other bits the second time"
        for b in range(len(arguments[4])):
            alone, rows = one_sequence(arguments, options, b)
            assert torch.equal(flash.paged_attention(*alone[0], **alone[1]), out[rows]), f"{case}: other bits alone"


def one_sequence(arguments: tuple, options: dict, b: int) -> tuple[tuple[tuple, dict], slice]:
    """The arguments of sequence b alone, in a table no wider than it needs, and its rows."""
    q, k, v, table, kv_len, q_start, scale = arguments
    rows = slice(*q_start.tolist()[b: b + 2])
    width = max(1, -(-int(kv_len[b]) // k.shape[1]))
    starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=q.device)
    return ((q[rows], k, v, table[b: b + 1, :width], kv_len[b: b + 1], starts, scale),
            dict(options, max_q=rows.stop - rows.start)), rows


@needs_triton
@pytest.mark.parametrize("name", ["alone", "others in the batch", "as a draft"])
def test_the_batch_does_not_decide_a_rows_bits(name):
    """A row has the same bits alone and in a mixed batch, with a narrow table and a wide one, and as a draft's last."""
    assert outcomes("interpret")["same bits"][name]


# ------------------------------------------------------------------ hand cases


def near(found, expected, tolerance=2e-6):
    assert len(found) == len(expected)
    for x, y in zip(found, expected):
        assert x == y or abs(x - y) <= tolerance, (found, expected)


def hand(name: str, form: str):
    return outcomes("interpret")[f"{name} {form}"]


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_rows_without_keys(form):
    """FA-01, flashinfer #4452; Dao-AILab/flash-attention #1778; tracel-ai/cubecl #1070: more new tokens than keys."""
    out, lse = hand("FA-01", form)
    near(out, [0, 0, 1, 1.5])
    near(lse, [-math.inf, -math.inf, 0, math.log(2)])


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_the_mask_is_aligned_to_the_bottom_right(form):
    """FA-02, flash-attention #282, #436, #466; pytorch #108108: top-left would give [1, 1.5]."""
    near(hand("FA-02", form)[0], [2.5, 3.0])


@needs_triton
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", ["5", "3+2", "1+1+1+1+1", "2+3"])
def test_chunks_of_a_prompt(chunks, form):
    """FA-03, hyprstream/hyprstream #1521; gittensor-ai-lab/sparkinfer #3; Mikyx-1/TinyLLM #17;
    huggingface/candle #3743; onnx/onnx #8054: neither is the history hidden nor the future visible."""
    near(hand(f"FA-03 {chunks}", form), [1, 1.5, 2, 2.5, 3])


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_a_visible_score_below_any_finite_constant(form):
    """FA-05, flashinfer #4267, #4450, #4451; ohdearquant/lattice #361: a mask of -1e4 gives 7."""
    near(hand("FA-05", form)[0][:1], [3.0], 0)


@needs_triton
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("score", [-50, 0])
def test_keys_that_fill_up_a_tile_do_not_count(score, block_size, form):
    """FA-06, 66RING/tiny-flash-attention #12; ELS-RD/kernl #73; triton #2059: 17 keys, all values 1."""
    near(hand(f"FA-06 {score} {block_size}", form)[0], [1.0], 0)


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_dirty_slots(form):
    """FA-07, vllm #641, #936: context 5 in blocks 2 and 6 of four tokens, everything else NaN."""
    near(hand("FA-07", form)[0], [3.0])


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_which_kv_head_a_query_head_reads(form):
    """FA-08, HazyResearch/HipKittens #22; onnx #7274; PSAL-POSTECH/ONNXim #34: h // 3, not h % 2."""
    near(hand("FA-08", form), [0, 0, 0, 1, 1, 1], 0)


@needs_triton
def test_pieces_without_keys():
    """FA-11, flashinfer #4401; aiter #4420: 5 keys and none, four pieces, scratch memory full of NaN."""
    found = outcomes("interpret")["FA-11"]
    near(found["split"][0], found["whole"][0], 1e-6)
    near(found["split"][1], found["whole"][1], 1e-6)
    assert found["split"][0][1] == 0 and found["split"][1][1] == -math.inf
    assert found["poisoned"] >= 2, "the scratch memory was not poisoned"


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_in_the_interpreter(form):
    """FA-12, triton #4972, #10945, #11584: tl.dot multiplies the bit patterns of bfloat16 operands there. Scores of
    small integers come out exactly, so the operands were widened first."""
    found = hand("FA-12", form)
    near(found["lse"], found["exact"], 1e-5)
    assert len({round(x) for x in found["exact"]}) > 4


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_a_padded_head_dim_does_not_scale(form):
    """FA-16, sglang #1281; triton #621: d = 80; with the sqrt of 128 it would be 0.587479."""
    near(hand("FA-16", form), [0.609977])


@needs_triton
def test_strides():
    """FA-17, FlagOpen/FlagGems #5235, #5896; flash-attention #2670; pytorch #187506: only v transposed, all from one
    packed qkv, last dimension with stride 2: the bits of contiguous copies."""
    assert all(outcomes("interpret")["FA-17"].values())
    assert len(outcomes("interpret")["FA-17"]) == 6


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_a_window_counts_the_token_itself(form):
    """FA-20, transformers #29623, #39408; vllm #3385: window 4, seven tokens."""
    near(hand("FA-20", form)[0], [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5])
    near([math.exp(x) for x in hand("FA-20", form)[1]], [1, 2, 3, 4, 4, 4, 4], 1e-5)


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_a_window_wider_than_any_sequence(form):
    """The first key of a row's window, the row's place less the window, must not leave 32 bits: three rows before the
    first key, and one that sees it."""
    near(hand("widest window", form)[0], [0, 0, 0, 5])


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_scores_beyond_float16(form):
    """FA-22, transformers #33317; QwenLM/Qwen3 #910; apache/tvm #16667: 300 * 300 * 128 / sqrt(128) is over 65504."""
    near(hand("FA-22", form)[0], [2.0], 0)
    assert abs(hand("FA-22", form)[1][0] - (300 * 300 * 128 / math.sqrt(128) + math.log(3))) < 1


@needs_triton
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_one_row_of_a_group(group):
    """FA-24, triton-lang/kernels #6; fla-org/flash-linear-attention #88: fewer rows than the 16 of a tile."""
    assert outcomes("interpret")[f"FA-24 {group}"] <= 1


@needs_triton
@pytest.mark.parametrize("window", [None, 570])
def test_more_pieces_than_are_merged_at_a_time(window):
    assert outcomes("interpret")[f"long {window}"] <= 1


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T, S", [(1, 40), (5, 20), (20, 37), (37, 20), (0, 3), (3, 0)])
def test_dense(T, S, causal):
    found = outcomes("interpret")[f"dense {T} {S} {causal}"]
    assert found["shape"] == [2, T, 3, 48]
    assert found["out"] <= 1 and found["lse"] <= 1


@needs_triton
def test_every_code_of_fp8():
    """All codes as values and as keys, against torch; NaN (0x7f and 0xff) stays NaN."""
    found = outcomes("interpret")["codes"]
    assert found["values"] == 0 and found["keys"] <= 1e-5 and found["nan"] == [127, 255]


@needs_triton
def test_a_pool_of_more_than_2_to_the_31_elements():
    assert outcomes("interpret")["large pool"] <= 1


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8"])
def test_the_cache_can_take_the_kernel(dtype):
    """Prompts, chunks and single tokens through kvcache.py's cache, whose window and scales reach the kernel."""
    assert outcomes("interpret")[f"cache {dtype}"] < 2e-6


@needs_triton
def test_rows_of_no_sequence():
    """TP-11, flash-attention #2470; gLLM #174: padded rows give 0 and -inf, and sequences of length 0 nothing else."""
    assert outcomes("interpret")["rows of no sequence"] == [0, 0, -math.inf, -math.inf]


@needs_triton
def test_more_tokens_than_max_q():
    """The scratch memory has room for max_q tokens of a sequence: one that has more gets no result, rather than to
    write into the next sequence's."""
    found = outcomes("interpret")["beyond max_q"]
    assert found["zeros"]
    assert found["others"] <= 1


# ------------------------------------------------------------------ sabotage


class Fault(NamedTuple):
    old: str
    new: str


# A twin is flash.py with one fault; the comparison with float64 must notice it. None reads beyond a tensor, which could
# end the process.
TWINS = {
    "aligned top left": Fault("pos = S - n + j ", "pos = j "),
    "a window too wide by one": Fault("pos[:, None] - window", "pos[:, None] - window - 1"),
    "the window's edge taken for open": Fault("tl.cdiv(every_low, BLOCK_N)", "(every_low // BLOCK_N)"),
    "the diagonal taken for open": Fault("tl.minimum(every_high, high), 0)", "tl.minimum(late + 1, high) + 15, 0)"),
    "old sums not mended": Fault("l = l * old + tl.sum(p, 1)", "l = l + tl.sum(p, 1)"),
    "old output not mended": Fault("acc * old[:, None], input", "acc, input"),
    "no guard for rows without a key": Fault(" if MASKED else m_new", " if BLOCK_D == 0 else m_new"),
    "query heads dealt out": Fault("g * GROUP + r % GROUP", "g + r % GROUP * G"),
    "garbage loaded": Fault("mask=inside[:, None] & (d < D), other", "mask=d < D, other"),
    "blocks in a row": Fault("tl.load(table_ptr + key // BLOCK_SIZE * table_i, mask=inside, other=0)",
                             "(key // BLOCK_SIZE + 1)"),
    "scale of the padded head": Fault("* math.log2(math.e),", "* math.log2(math.e) * (D / shape['BLOCK_D']) ** .5,"),
    "every piece weighs the same": Fault("tl.exp(x - m_new)  #", "(x > -1e30).to(tl.float32)  #"),
    "the first piece only": Fault("piece <= last // SPLIT", "piece <= low // SPLIT"),
    "the first pieces only": Fault("last // SPLIT + 1, CHUNK", "low // SPLIT + 1, CHUNK"),
    "old pieces not mended": Fault("acc = acc * old + tl.sum(w", "acc = acc + tl.sum(w"),
    "key scales forgotten": Fault("s *= k_scale[None, :]", "s *= unit"),
    "value scales of a neighbour": Fault("slot * vs_t, mask", "(slot + 1) % BLOCK_SIZE * vs_t, mask"),
    "lse in powers of two": Fault("m * 0.6931471805599453", "m"),
}
TWIN_CASES = [Case("mixed", (6, 2), 80, "fp32", cache, 4, window, "head") for cache, window in
              (("as q", None), ("as q", 7), ("int8", 40))]
TWIN_CASES += [Case("no keys", (4, 2), 16, "fp32", "as q", 4, None, "token"),
               Case("long", (8, 1), 16, "fp32", "as q", 16, None, "token")]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS)
def test_a_sabotaged_kernel_is_noticed(twin):
    found = outcomes("twins")
    assert found["the file itself"] <= 1
    assert found[twin] > 2


@needs_triton
def test_sabotage_is_noticed():
    """Some of the twins of the slow test, so that the fast run shows that its comparison can fail."""
    assert outcomes("interpret")["twin: old sums not mended"] > 2
    assert outcomes("interpret")["twin: aligned top left"] > 2


# ------------------------------------------------------------------ source


def calls_of(source: str, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == name]


def loads_without_fill(source: str) -> int:
    loads = [(len(call.args), {keyword.arg for keyword in call.keywords}) for call in calls_of(source, "tl.load")]
    return sum(("mask" in named or count > 1) and not ("other" in named or count > 2) for count, named in loads)


def test_every_masked_load_has_a_fill_value():
    """FA-13, triton #737, #9917; vllm #9014; sglang #27074: without `other` a masked element is undefined on a GPU and
    0 in the interpreter, so only the source can tell."""
    source = (ROOT / "flash.py").read_text()
    assert loads_without_fill(source) == 0
    assert loads_without_fill(source.replace(", other=0", "")) >= 5  # the check can fail


def test_no_product_is_rounded_to_tf32():
    """FA-23, triton #1671, #5895, #8654, #10176: the interpreter cannot show it; the source asks for exact products,
    and the compiled float32 kernels below hold no instruction of tensor cores."""
    dots = calls_of((ROOT / "flash.py").read_text(), "tl.dot")
    assert len(dots) == 2
    assert all("input_precision='ieee'" in ast.unparse(dot) for dot in dots)


@needs_triton
def test_nothing_waits_for_the_gpu():
    """Reading a number of a tensor makes the host wait, and cannot be captured in a CUDA graph. On the device "meta"
    tensors have shapes but no numbers: launches that come about there follow from shapes and the host's integers."""
    found = outcomes("interpret")["launches"]
    assert set(found["devices"]) == {"meta"}
    B, H, G, pieces = 4, 18, 3, 7  # in tiles of 16 rows a token has 6; SPLIT into 14 blocks of 16
    assert found["decode"] == [["attention_kernel", 1 * pieces * G * B], ["merge_kernel", B * 1 * H]]
    assert found["decode, one piece"] == [["attention_kernel", 1 * G * B]]
    assert found["mixed"] == [["attention_kernel", 3 * pieces * G * B], ["merge_kernel", B * 8 * H],
                              ["attention_kernel", 27 * G * B]]  # 8 tokens are 48 rows, 70 are 420
    assert found["dense"] == [["attention_kernel", rows * G * B] for rows in (3, 8)]  # 20 tokens are 120
    assert "meta" in found["twin"], "a launcher that reads the longest length was not noticed"


def test_the_signature_is_the_contracts():
    import flash

    assert str(inspect.signature(flash.paged_attention, eval_str=False)).split(" -> ")[0].replace("'", "") == (
        "(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, "
        "kv_len: torch.Tensor, q_start: torch.Tensor, scale: float, *, max_q: int, window: int | None = None, "
        "k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, return_lse: bool = False, "
        "memo: dict | None = None)")


def test_on_a_cpu_the_remedy_is_named():
    """Neither without triton nor with it do the kernels run on a CPU; importing flash.py works either way."""
    code = ("import sys; sys.path.insert(0, {!r}); {}\nimport flash, torch\n"
            "x, i = torch.zeros(1, 1, 1, 16), torch.zeros(2, dtype=torch.int32)\n"
            "for call in (lambda: flash.flash_attention(x, x, x),\n"
            "             lambda: flash.paged_attention(x[0], x, x, i[:1, None], i[:1], i, 1.0, max_q=1)):\n"
            "    try: call()\n    except ValueError as error: print(error)")
    code += "\nprint(sys.modules.get('triton') is not None)"
    rocm = "import torch; torch.version.cuda, torch.version.hip = None, '6.4'"  # the tiles are of NVIDIA's chips
    for before, interpret in (("", None), ("", "0"), ("sys.modules['triton'] = None", "0"), (rocm, None)):
        *out, imported = worker("-c", code.format(str(ROOT), before), interpret=interpret).splitlines()
        assert len(out) == 2
        assert all(re.search("needs triton.*GPU.*cpu.*attention.py", line) for line in out)
        if interpret is None and (before or not torch.version.cuda):  # then nobody pays for importing it
            assert imported == "False"


WRONG = {
    "heads": (dict(q=(2, 5, 16)), r"\(2, 5, 16\).*\(3, 4, 2, 16\)"),
    "head_dim": (dict(q=(2, 4, 300), k=(3, 4, 2, 300)), "300"),
    "unlike caches": (dict(v=(3, 4, 2, 8)), r"\(3, 4, 2, 8\)"),
    "the cache's type": (dict(kv=torch.float16), "float32.*float16"),
    "missing scales": (dict(kv=torch.int8), "int8.*k_scale"),
    "scales without codes": (dict(k_scale=(3, 4, 2)), "k_scale"),
    "the shape of scales": (dict(kv=torch.int8, k_scale=(3, 4, 1)), r"\(3, 4, 2\).*\(3, 4, 1\)"),
    "table": (dict(table=(2, 3)), r"\(2, 3\)"),
    "scale": (dict(scale=0.0), "scale"),
    "window": (dict(window=0), "window"),
    "int64": (dict(integers=torch.int64), "int32"),
    "lengths": (dict(kv_len=()), r"kv_len \(\)"),
}


def wrong_call(q=(2, 4, 16), k=(3, 4, 2, 16), v=None, kv=torch.float32, table=(1, 3), k_scale=None, scale=1.0,
               window=None, integers=torch.int32, kv_len=(1,)):
    scales = dict(k_scale=None if k_scale is None else torch.ones(k_scale), v_scale=None)
    return ((torch.zeros(q), torch.zeros(k, dtype=kv), torch.zeros(v or k, dtype=kv),
             torch.zeros(table, dtype=integers), torch.full(kv_len, 2, dtype=integers),
             torch.tensor([0, 2], dtype=integers), scale),
            dict(scales, max_q=2, window=window))


@needs_triton
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    kind, message = outcomes("interpret")[f"wrong {name}"]
    assert kind == "ValueError"
    assert re.search(WRONG[name][1], message)


@needs_triton
def test_what_dense_attention_does_not_take_is_said():
    """Codes, which have no scales here; a window without a diagonal to lie along; keys of another batch."""
    says = ("no quantized keys", "a window only if causal", r"\(1, 4, 2, 16\) and k \(2, 4, 2, 16\)")
    for (kind, message), words in zip(outcomes("interpret")["wrong dense"], says, strict=True):
        assert kind == "ValueError" and re.search(words, message)


# ------------------------------------------------------------------ machine code


class Compiled(NamedTuple):
    cc: int
    heads: tuple[int, int]
    D: int
    form: str  # "few", "many", "merge"
    dtype: str = "bf16"
    cache: str = "as q"
    window: bool = False

    def __str__(self):
        return "-".join(str(x).replace(" ", "_") for x in self)


GPUS = (80, 90, 100, 120)
SHARED = {80: 163, 90: 227, 100: 227, 120: 99}  # KiB of shared memory that one block may use
LLAMA, SMOL = ((32, 8), 128), ((9, 3), 64)  # Llama 3 8B and the default model
TABLE = [Compiled(cc, *model, form) for model in (LLAMA, SMOL) for cc in GPUS for form in ("few", "many", "merge")]
QUICK = [Compiled(90, *LLAMA, "many"), Compiled(90, *LLAMA, "few"), Compiled(100, *SMOL, "many"),
         Compiled(80, *SMOL, "few"), Compiled(120, *LLAMA, "many"), Compiled(120, *LLAMA, "merge")]
OPTIONS = (("fp16", "as q", True), ("bf16", "int8", False), ("fp16", "fp8", True))
REST = [c for c in TABLE if c not in QUICK]
# Every chip and form with every option; the two models take turns, and so do, below, chips whose tiles are the same.
REST += [Compiled(cc, *(LLAMA, SMOL)[(i + j + k) % 2], form, *option) for i, cc in enumerate(GPUS)
         for j, form in enumerate(("few", "many")) for k, option in enumerate(OPTIONS)]
WIDTHS = (((32, 1), 80), ((32, 32), 96), ((28, 4), 112), ((8, 4), 256))
OTHER = [Compiled(cc, *width, form) for i, width in enumerate(WIDTHS)
         for j, form in enumerate(("few", "many")) for cc in ((80, 90), (120, 100))[(i + j) % 2]]
OTHER += [Compiled(80, *LLAMA, "many", "fp32"), Compiled(90, *LLAMA, "few", "fp32")]


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("D", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("cc", SHARED)
def test_tiles_for_many_tokens_fit_the_chip(cc, D, codes):
    """Keys and values that are on their way at a time leave room in shared memory, a piece of keys is whole tiles, and
    float32, which tensor cores would round, gets no taller tiles than 16 bits do."""
    import flash

    width, rows = max(16, 1 << (D - 1).bit_length()), []
    for dtype, n_bytes in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        tile = flash.tile_config(cc, D, 3, dtype, codes, many=True, window=False)
        held = tile["num_stages"] * 2 * tile["BLOCK_N"] * width * (1 if codes else n_bytes)
        assert held < SHARED[cc] * 1024 and flash.SPLIT % tile["BLOCK_N"] == 0 and tile["BLOCK_M"] % 16 == 0
        rows.append(tile["BLOCK_M"])
    assert rows[0] == 16 < rows[1] == rows[2], "16 rows are the least that a product takes"
    few = flash.tile_config(cc, D, 3, torch.float32, codes, many=False, window=True)
    assert few["BLOCK_M"] == 16 and few["maxnreg"] == 255


@needs_triton
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_compiles(case):
    check_compiled(outcomes("compile")[str(case)], case)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("case", REST + OTHER, ids=str)
def test_compiles_everywhere(case):
    check_compiled(outcomes("compile-slow")[str(case)], case)


@pytest.mark.slow
@needs_triton
def test_table(capsys):
    lines = table(outcomes("compile") | outcomes("compile-slow"))
    assert len(lines) == len(TABLE) + 1
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def table(found: dict) -> list[str]:
    names = ("registers", "shared", "mma.sync", "wgmma", "tcgen05", "cp.async", "STACK", "LOCAL")
    lines = [f"{'chip, heads, head_dim, kernel':<30}" + "".join(f"{name:>10}" for name in names)]
    return lines + [f"sm_{c.cc:<4}{'{} / {}'.format(*c.heads):<8}{c.D:>4} {c.form:<12}" + "".join(
        f"{found[str(c)].get(name, '-'):>10}" for name in names) for c in TABLE]


def check_compiled(found, case):
    assert found["shared"] <= SHARED[case.cc] * 1024
    assert set(found["offsets"].values()) == {"i64"}, "32 bits overflow in a pool of 2 ** 31 elements"
    cores = {name: found[name] for name in ("mma.sync", "wgmma", "tcgen05")}
    if case.form == "merge" or case.dtype == "fp32":
        assert not any(cores.values())
    elif case.form == "many" and case.cc in (90, 100):  # not through the older chips' instruction
        assert cores["mma.sync"] == 0 and cores[{90: "wgmma", 100: "tcgen05"}[case.cc]] > 0
    else:
        assert cores["mma.sync"] > 0
    if case.form != "merge" and case.cache == "as q":
        assert found["cp.async"] > 0, "no tile is on its way while another is worked on"
    if "STACK" not in found:
        pytest.skip("no cuobjdump in this triton")
    assert found["STACK"] == found["LOCAL"] == 0


@needs_triton
def test_offsets_of_32_bits_are_noticed():
    assert outcomes("compile")["offsets of 32 bits"]["k_ptr"] == "i32"


# ------------------------------------------------------------------ the workers


@functools.cache
def outcomes(mode: str) -> dict:
    interpret = "0" if mode.startswith("compile") else "1"
    return json.loads(worker(__file__, mode, interpret=interpret).splitlines()[-1])


def worker(*command: str, interpret: str | None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": folder} | ({} if interpret is None else {"TRITON_INTERPRET": interpret})
        done = subprocess.run([sys.executable, "-B", *command], env=environment, text=True, capture_output=True,
                              timeout=1800)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


def load_twin(folder: str, old: str, new: str):
    """flash.py with one piece of its text replaced, as a module of its own (triton reads the file)."""
    source = (ROOT / "flash.py").read_text()
    assert old in source, f"the twin's text is gone from flash.py: {old}"
    path = Path(folder, f"twin{len(os.listdir(folder))}.py")
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SPLIT = PIECE
    return module


def worst(module, case: Case) -> float:
    arguments, options = inputs(case)
    exact, lse, size = definition(*arguments, **options)
    out, found = module.paged_attention(*arguments, **options, return_lse=True)
    return max(excess(out, exact, size), excess(found, lse, 1 + lse.abs()))


def cover(cases: list[Case]) -> dict:
    import attention
    import flash

    found = {}
    flash.SPLIT = PIECE
    for case in cases:
        arguments, options = inputs(case)
        exact, lse, size = definition(*arguments, **options)
        out, logs = flash.paged_attention(*arguments, **options, return_lse=True)
        other = attention.paged_attention(*arguments, **options)
        found[str(case)] = {
            "shape": list(out.shape), "dtype": str(out.dtype), "out": excess(out, exact, size),
            "lse": excess(logs, lse, 1 + lse.abs()),
            "attention.py": excess(out, other.double(), size, 2**-14 + (8 * UNIT[out.dtype] if out.dtype !=
                                                                         torch.float32 else 0))}
    return found


def simple(flash, q_len: int, kv_len: int, values, score=0.0, block_size=4, window=None, dtype=torch.float32):
    """One sequence, one head of 16: all scores of the given keys are `score`, v as given. (out, lse) as lists."""
    blocks = -(-kv_len // block_size)
    k, v = torch.full((2, blocks + 1, block_size, 1, 16), math.nan, dtype=dtype)
    k[1:].flatten(0, 1)[:kv_len] = 1
    v[1:].flatten(0, 1)[:kv_len] = torch.as_tensor(values, dtype=dtype)[:, None, None]
    q = torch.zeros(q_len, 1, 16, dtype=dtype)
    q[..., 0] = score
    out, lse = flash.paged_attention(q, k, v, torch.arange(1, blocks + 1, dtype=torch.int32)[None],
                                     torch.tensor([kv_len], dtype=torch.int32),
                                     torch.tensor([0, q_len], dtype=torch.int32), 1.0, max_q=q_len, window=window,
                                     return_lse=True)
    assert (out == out[..., :1]).all()
    return out[:, 0, 0].tolist(), lse[:, 0].tolist()


def hand_cases(flash) -> dict:
    found = {"FA-01": simple(flash, 4, 2, [1, 2]), "FA-02": simple(flash, 2, 5, [1, 2, 3, 4, 5]),
             "FA-05": simple(flash, 2, 2, [3, 7], score=-30000),
             "FA-20": simple(flash, 7, 7, range(7), window=4),
             "widest window": simple(flash, 4, 1, [5], window=2**31 - 1)}
    for chunks in ("5", "3+2", "1+1+1+1+1", "2+3"):
        sizes = list(map(int, chunks.split("+")))
        found[f"FA-03 {chunks}"] = [x for n, S in zip(sizes, itertools.accumulate(sizes))
                                    for x in simple(flash, n, S, range(1, S + 1))[0]]
    for score, block_size in itertools.product((-50, 0), (16, 32)):
        found[f"FA-06 {score} {block_size}"] = simple(flash, 1, 17, [1] * 17, score, block_size)

    k, v = torch.full((2, 8, 4, 1, 16), math.nan)
    k[2], k[6, :1], v[2, :, 0], v[6, :1] = 0, 0, torch.tensor([1.0, 2, 3, 4])[:, None], 5
    one, table = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[2, 6, 9999]], dtype=torch.int32)
    out = flash.paged_attention(torch.ones(1, 1, 16), k, v, table, one[1:] * 5, one, 1.0, max_q=1)
    found["FA-07"] = [out[0, 0, :1].tolist()]

    zeros = torch.zeros(1, 3, 2, 16)
    v = zeros.clone()
    v[:, :, 1] = 1
    found["FA-08"] = flash.flash_attention(torch.zeros(1, 1, 6, 16), zeros, v)[0, 0, :, 0].tolist()

    g = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-2, 3, (1, 16, 1, 16), generator=g).to(torch.bfloat16) for _ in range(2))
    q = q[:, :8]
    lse = flash.flash_attention(q, k, k, False, 1.0, return_lse=True)[1]
    exact = (q[0, :, 0].double() @ k[0, :, 0].double().t()).logsumexp(1)
    found["FA-12"] = {"lse": lse.flatten().tolist(), "exact": exact.tolist()}

    q, k, v = torch.zeros(1, 1, 1, 80), torch.zeros(1, 2, 1, 80), torch.zeros(1, 2, 1, 80)
    q[..., 0], k[0, 0, 0, 0], v[0, 0] = 2, 2, 1
    found["FA-16"] = flash.flash_attention(q, k, v, False)[0, 0, 0, :1].tolist()

    big = torch.full((1, 3, 1, 128), 300.0, dtype=torch.float16)
    v = torch.tensor([1.0, 2, 3], dtype=torch.float16)[None, :, None, None].expand(1, 3, 1, 128)
    out, lse = flash.flash_attention(big[:, :1], big, v, return_lse=True)
    found["FA-22"] = [out[0, 0, 0, :1].tolist(), lse.flatten().tolist()]
    return found


def poisoned(function):
    """What function() returns while fresh scratch memory is full of NaN, and how often that was asked for."""
    plain, count = torch.Tensor.new_empty, []

    def new_empty(x, *size, **options):
        fresh = plain(x, *size, **options)
        if fresh.is_floating_point() and fresh.numel():
            count.append(1)
            fresh.fill_(math.nan)
        return fresh

    torch.Tensor.new_empty = new_empty
    try:
        return function(), len(count)
    finally:
        torch.Tensor.new_empty = plain


def launches(flash) -> dict:
    """What paged_attention and flash_attention launch for tensors that hold no numbers, and where the tensors are."""
    found, recorded = {"devices": []}, []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **options: recorded.append((self.name, grid, arguments))

    def record(module, function, *arguments, **options):
        kernels = {name: getattr(module, name) for name in ("attention_kernel", "merge_kernel")}
        try:
            for name in kernels:
                setattr(module, name, Recorder(name))
            recorded.clear()
            getattr(module, function)(*arguments, **options)
        finally:
            for name, kernel in kernels.items():
                setattr(module, name, kernel)
        found["devices"] += [str(x.device) for _, _, sent in recorded for x in sent if isinstance(x, torch.Tensor)]
        return [[name, *grid] for name, grid, _ in recorded]

    def paged(module, width, max_q, dtype=torch.float32, cache=torch.float32):
        q, kv = (torch.empty(*size, device="meta", dtype=x) for size, x in
                 (((90, 18, 32), dtype), ((9, 16, 3, 32), cache)))
        scale = torch.empty(9, 16, 3, device="meta") if cache in module.CODES else None
        table, lengths, starts = (torch.empty(*size, dtype=torch.int32, device="meta")
                                  for size in ((4, width), (4,), (5,)))
        return record(module, "paged_attention", q, kv, kv, table, lengths, starts, 0.1, max_q=max_q, window=50,
                      k_scale=scale, v_scale=scale, return_lse=True)

    found |= {"decode": paged(flash, 14, 1), "decode, one piece": paged(flash, 2, 1, torch.float16, torch.int8),
              "mixed": paged(flash, 14, 70, torch.bfloat16, torch.float8_e4m3fn)}
    q, kv = torch.empty(4, 20, 18, 32, device="meta"), torch.empty(4, 30, 3, 32, device="meta")
    found["dense"] = record(flash, "flash_attention", q, kv, kv)
    with tempfile.TemporaryDirectory() as folder:
        twin = load_twin(folder, "max_q == 0 or", "kv_len.max() == 0 or")
        found["twin"] = error_of(paged, twin, 14, 1)[1]
    return found


def specials(flash) -> dict:
    import attention

    found = {}
    g = torch.Generator().manual_seed(1)

    def integers(*values):
        return torch.tensor(values, dtype=torch.int32)

    # FA-11: 64 slots of table, four pieces of 16 keys
    k, v = torch.full((2, 18, 4, 1, 16), math.nan)
    k[2:4], v[2:4] = torch.randn(2, 2, 4, 1, 16, generator=g)
    k[3, 1:], v[3, 1:] = math.nan, math.nan
    tables = torch.zeros(2, 16, dtype=torch.int32)
    tables[0, :2] = integers(2, 3)
    arguments = (torch.randn(2, 1, 16, generator=g), k, v, tables, integers(5, 0), integers(0, 1, 2), 0.25)
    flash.SPLIT, few, results = TILE, flash.FEW, {}
    split, results["poisoned"] = poisoned(lambda: flash.paged_attention(*arguments, max_q=1, return_lse=True))
    flash.FEW = 0
    whole = flash.paged_attention(*arguments, max_q=1, return_lse=True)
    flash.FEW, flash.SPLIT = few, PIECE
    for name, (out, lse) in (("split", split), ("whole", whole)):
        results[name] = [out[:, 0, 3].tolist(), lse[:, 0].tolist()]
    found["FA-11"] = results

    # FA-17
    same = {}
    for T in (3, 20):
        qkv = torch.randn(2, T, 10, 2, 16, generator=g)
        q, k, v = qkv.flatten(3)[:, :, :6], qkv.flatten(3)[:, :, 6:8], qkv.flatten(3)[:, :, 8:]  # of one packed tensor
        whole = flash.flash_attention(*(x.contiguous() for x in (q, k, v)))
        turned = v.transpose(1, 2).contiguous().transpose(1, 2)
        gaps = [laid_out(x, "gaps") for x in (q, k, v)]
        for name, triple in {"packed": (q, k, v), "v transposed": (q, k, turned), "stride 2": gaps}.items():
            same[f"{name} {T}"] = torch.equal(flash.flash_attention(*triple), whole)
    found["FA-17"] = same

    for group in (1, 2, 3, 4, 8):
        found[f"FA-24 {group}"] = worst(flash, Case("decodes", (group, 1), 16, "fp32", "as q", 4, None, "token"))

    for window in (None, 570):
        found[f"long {window}"] = worst(flash, Case("long", (8, 1), 16, "fp32", "as q", 16, window, "token"))

    for (T, S), causal in itertools.product([(1, 40), (5, 20), (20, 37), (37, 20), (0, 3), (3, 0)], (True, False)):
        q, k, v = (torch.randn(2, length, heads, 48, generator=g) for length, heads in ((T, 3), (S, 1), (S, 1)))
        out, lse = flash.flash_attention(q, k, v, causal, return_lse=True)
        s = torch.einsum("bthd,bshd->bths", q.double(), k.double().repeat_interleave(3, 2)) * 48 ** -0.5
        if causal:
            s = s.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(S - T)[:, None], -math.inf)
        exact, logs = s.softmax(-1).nan_to_num(0), s.logsumexp(-1)
        values = v.double().repeat_interleave(3, 2)
        found[f"dense {T} {S} {causal}"] = {
            "shape": list(out.shape), "lse": excess(lse, logs, 1 + logs.abs()),
            "out": excess(out, *(torch.einsum("bths,bshd->bthd", exact, x) for x in (values, values.abs())))}

    # All codes of fp8: as the value of one key; each as the only number that a query meets.
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    one = torch.ones(1, 1, 1)
    ignored = torch.zeros(1, 1, 1, 256, dtype=torch.float8_e4m3fn)
    options = dict(max_q=1, k_scale=one, v_scale=one * 0.5)
    out = flash.paged_attention(torch.ones(1, 1, 256), ignored, codes.view(1, 1, 1, 256), integers(0)[None],
                                integers(1), integers(0, 1), 1.0, **options).flatten()
    nan = out.isnan().nonzero().flatten().tolist()
    real = torch.tensor([i for i in range(256) if i not in (127, 255)])
    numbers = codes[real].view(1, 1, 1, 254)  # 0 * NaN would be NaN in every head's sum
    lse = flash.paged_attention(torch.eye(254)[None], numbers, numbers, integers(0)[None], integers(1), integers(0, 1),
                                0.5, **options, return_lse=True)[1].flatten()
    exact = codes.float()[real] / 2
    found["codes"] = {"values": (out[real] - exact).abs().max().item(), "nan": nan,
                      "keys": ((lse - exact).abs() / exact.abs().clamp(min=2**-9)).max().item()}

    q = torch.randn(4, 1, 16, generator=g)
    k, v = torch.randn(2, 1, 4, 1, 16, generator=g)
    out, lse = flash.paged_attention(q, k, v, torch.zeros(3, 1, dtype=torch.int32), integers(2, 0, 0),
                                     integers(0, 2, 2, 2), 1.0, max_q=2, return_lse=True)
    found["rows of no sequence"] = out[2:, 0].abs().amax(1).tolist() + lse[2:, 0].tolist()

    arguments, options = inputs(Case("unannounced", (4, 2), 16, "fp32", "as q", 4, None, "token"))
    exact, _, size = definition(*arguments, **options)
    out, lse = flash.paged_attention(*arguments, **dict(options, max_q=1), return_lse=True)
    found["beyond max_q"] = {"zeros": not out[1:6].any() and bool((lse[1:6] == -math.inf).all()),
                             "others": max(excess(out[i], exact[i], size[i]) for i in (0, 6))}
    found["large pool"] = large_pool(flash)
    found["launches"] = launches(flash)
    for dtype in ("float32", "int8", "fp8"):
        ours, plain = (through_the_cache(f, dtype) for f in (flash.paged_attention, attention.reference_attention))
        found[f"cache {dtype}"] = (ours - plain).abs().max().item()
    found["same bits"] = same_bits(flash)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("old sums not mended", "aligned top left"):
            found[f"twin: {name}"] = worst(load_twin(folder, *TWINS[name]), TWIN_CASES[0])
    for name, (change, _) in WRONG.items():
        arguments, options = wrong_call(**change)
        found[f"wrong {name}"] = error_of(flash.paged_attention, *arguments, **options)
    x, codes = torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2, 16, dtype=torch.int8)
    found["wrong dense"] = [error_of(flash.flash_attention, x, codes, codes),
                            error_of(flash.flash_attention, x, x, x, False, window=3),
                            error_of(flash.flash_attention, x, torch.cat((x, x)), torch.cat((x, x)))]
    return found


def through_the_cache(attend, dtype: str) -> torch.Tensor:
    import kvcache

    g = torch.Generator().manual_seed(2)
    cache, outs = kvcache.PagedKVCache(1, 2, 16, 12, 4, dtype=torch.float32 if dtype == "float32" else dtype, window=9,
                                       attention=attend), []
    for plan in ({"A": 14, "B": 3}, {"A": 1, "B": 11}, {"B": 1, "A": 1}):
        for name in plan:
            if name not in cache:
                cache.add(name)
        step = cache.extend({name: [7] * n for name, n in plan.items()})
        q, k, v = (torch.randn(sum(plan.values()), heads, 16, generator=g) for heads in (6, 2, 2))
        outs.append(step.attend(0, q, k, v))
        cache.commit(step)
    return torch.cat(outs)


def large_pool(flash) -> float:
    """Blocks 2 ** 30 elements apart in 4 GiB, of which only what is written takes memory."""
    from triton.runtime.interpreter import GridExecutor

    case = Case("decodes", (4, 2), 16, "fp32", "int8", 16, None, "token")
    (q, k, v, table, kv_len, q_start, scale), options = inputs(case)
    keep = [0, int(table[2, 0]), int(table[2, 1]), int(table[2, 2])]  # the sequence of 47 tokens
    pool, copies = torch.empty(2**32, dtype=torch.int8), []
    for i, x in enumerate((k, v)):
        copies.append(pool.as_strided((4, *x.shape[1:]), (2**30, *x.stride()[1:]), i * 2**20))
        copies[-1].copy_(x[keep])
    options |= {name: options[name][keep] for name in ("k_scale", "v_scale")} | {"max_q": 1}
    arguments = (q[2:], *copies, torch.tensor([[1, 2, 3]], dtype=torch.int32), kv_len[2:], q_start[:2], scale)
    exact, _, size = definition(*arguments, **options)
    restore, GridExecutor._restore_args_dev = GridExecutor._restore_args_dev, lambda *_: None  # it would copy the pool
    out = flash.paged_attention(*arguments, **options)
    GridExecutor._restore_args_dev = restore
    return excess(out, exact, size)


def same_bits(flash) -> dict:
    case = Case("mixed", (6, 2), 64, "bf16", "as q", 4, None, "token")
    arguments, options = inputs(case)
    out = flash.paged_attention(*arguments, **options)
    found = {"alone": True}
    for b in range(4):
        (alone, alone_options), rows = one_sequence(arguments, options, b)
        found["alone"] &= torch.equal(flash.paged_attention(*alone, **alone_options), out[rows])
    q, k, v, table, kv_len, q_start, scale = arguments
    pick = torch.tensor([2, 0, 2, 0])
    rows = torch.tensor([19, 20, 21, 0, 19, 20, 21, 0])  # without the prompt, some twice, in a table four times as wide
    again = flash.paged_attention(q[rows], k, v, torch.cat([table[pick]] * 4, 1), kv_len[pick],
                                  torch.tensor([0, 3, 4, 7, 8], dtype=torch.int32), scale, **dict(options, max_q=3))
    found["others in the batch"] = torch.equal(again, out[rows])
    single = flash.paged_attention(q[21:], k, v, table[2:3], kv_len[2:3], torch.tensor([0, 1], dtype=torch.int32),
                                   scale, **dict(options, max_q=1))
    found["as a draft"] = torch.equal(single[0], out[21])
    return found


def error_of(function, *arguments, **options) -> list[str]:
    try:
        function(*arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def interpret() -> dict:
    import flash

    found = cover(FAST)
    few = flash.FEW
    for form in FORMS:
        flash.FEW = {"few": few, "many": 0}[form]
        found |= {f"{name} {form}": result for name, result in hand_cases(flash).items()}
    flash.FEW = few
    return found | specials(flash)


def twins() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return {name: max(worst(load_twin(folder, *fault), case) for case in TWIN_CASES)
                for name, fault in {"the file itself": Fault("", ""), **TWINS}.items()}


def compiled(case: Compiled, flash) -> dict:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (H, G), D, pointer = case.heads, case.D, "*" + case.dtype
    constants = dict(H=H, D=D, BLOCK_D=triton.next_power_of_2(D), CAUSAL=True, WINDOW=case.window, SPLIT=flash.SPLIT)
    if case.form == "merge":
        kernel, options = flash.merge_kernel, dict(num_warps=4)
        constants |= dict(CHUNK=16)
        types = dict(part_ptr="*fp32", part_lse_ptr="*fp32", out_ptr=pointer, lse_ptr="*fp32", kv_len_ptr="*i32",
                     q_start_ptr="*i32")
    else:
        kernel, many, code = flash.attention_kernel, case.form == "many", "" if case.cache == "as q" else case.cache
        config = flash.tile_config(case.cc, D, H // G, DTYPES[case.dtype], bool(code), many, case.window)
        options = {key: config.pop(key) for key in ("num_warps", "num_stages", "maxnreg")}
        dot = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[case.dtype]
        constants |= dict(config, G=G, CODE=code, DOT=dot, MANY=many, FEW=flash.FEW, PARTS=not many, BLOCK_SIZE=16)
        constants |= dict.fromkeys(("q_d", "k_d", "v_d", "table_i"), 1)
        if not code:
            constants |= {"ks_ptr": None, "vs_ptr": None, **{f"{x}_{y}": 0 for x in ("ks", "vs") for y in "btg"}}
        cache = "*i8" if code else pointer
        types = dict(q_ptr=pointer, k_ptr=cache, v_ptr=cache, ks_ptr="*fp32", vs_ptr="*fp32", lse_ptr="*fp32",
                     out_ptr=pointer if many else "*fp32", table_ptr="*i32", kv_len_ptr="*i32", q_start_ptr="*i32",
                     c="fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    # What a launch would find out: pointers and strides are multiples of 16, but for those of the scales; counts are
    # declared as never looked at.
    plain = {"c", "window", "row_tiles", "n_splits", "few", "table_b"}
    plain |= {f"{x}_{y}" for x in ("ks", "vs") for y in "btg"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
               if signature[name] != "constexpr" and name not in plain}
    binary = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
                            target=GPUTarget("cuda", case.cc, 32), options=options)
    return {"shared": binary.metadata.shared, "offsets": offsets(binary.asm["ttir"]), **instructions(binary)}


def offsets(ttir: str) -> dict:
    """What is added to each pointer that has a row's, head's or block's number in its offset: {"k_ptr": "i64", ...}."""
    named = {name: name for name in re.findall(r"%(\w+_ptr)", ttir)}
    big = ("q_ptr", "k_ptr", "v_ptr", "ks_ptr", "vs_ptr", "out_ptr", "lse_ptr", "part_ptr", "part_lse_ptr")
    found = {}
    for line in ttir.splitlines():  # a pointer keeps its name through splat, addptr and the like
        match = re.match(r"\s*%(\w+) = tt\.(splat|addptr|expand_dims|broadcast) %(\w+)(?:, %\w+)?.*", line)
        if match and match[3] in named:
            named[match[1]] = named[match[3]]
            kind = re.search(r", (?:tensor<[\dx]*)?(i\d+)>? loc", line)
            if match[2] == "addptr" and named[match[3]] in big:
                assert kind, line
                found.setdefault(named[match[3]], set()).add(kind[1])
    return {name: "i32" if "i32" in kinds else "i64" for name, kinds in found.items()}


def instructions(binary) -> dict:
    import triton

    ptx = binary.asm["ptx"]
    patterns = {"mma.sync": r"mma\.sync", "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma",
                "cp.async": r"cp\.async\.c"}
    found = {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if tool.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "-res-usage", file.name], text=True, capture_output=True, check=True)
        numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
        found |= {"registers": int(numbers["REG"]), "STACK": int(numbers["STACK"]), "LOCAL": int(numbers["LOCAL"])}
    return found


def compile_all(cases: list[Compiled], twin: bool) -> dict:
    import flash

    found = {str(case): compiled(case, flash) for case in cases}
    if twin:
        with tempfile.TemporaryDirectory() as folder:
            module = load_twin(folder, ".to(tl.int64)", "")
            found["offsets of 32 bits"] = compiled(QUICK[3], module)["offsets"]
    return found


def main(mode: str) -> dict:
    if mode == "interpret":
        return interpret()
    if mode == "interpret-slow":
        return cover([case for case in COVER if case not in FAST])
    if mode == "twins":
        return twins()
    return compile_all(QUICK if mode == "compile" else REST + OTHER, twin=mode == "compile")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "table":
        os.environ["TRITON_INTERPRET"] = "0"
        print(*table(compile_all(TABLE, twin=False)), sep="\n")
    else:
        print(json.dumps(main(sys.argv[1])))
