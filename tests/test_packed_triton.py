"""packed.py's Triton kernel without a GPU: its numbers in Triton's interpreter, its machine code from the compiler.

Whether a kernel is interpreted is settled when triton and the kernel's module are imported, so both are imported in
processes of their own and nothing leaks into other tests: this file, run as a script, is the worker. It prints one JSON
object of outcomes, which the tests below look into.
"""
import ast
import functools
import importlib.util
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


# ------------------------------------------------------------------ products, against float64


class Case(NamedTuple):
    M: int
    N: int
    K: int
    group: int
    bits: int
    mins: bool
    dtype: str  # of x and y
    stored: str  # of scales and mins

    def __str__(self):
        return "-".join(map(str, self))


ROWS, OUT = (0, 1, 2, 3, 15, 16, 17, 33), (1, 7, 64, 65)
GROUPS = [(32, 32), (64, 32), (64, 64), (96, 32), (96, 96), (576, 16), (576, 32), (576, 96), (576, 576), (80, 80)]
LONG = [(1536, 64), (1536, 1536), (2112, 96)]  # several turns of the loop over K in both forms; 2112 leaves a rest


def fast_cases() -> list[Case]:
    """Every M with every N and width; every group with every width, with and without mins, in both forms."""
    turn = itertools.count()

    def kind():  # 3 dtypes of x, 3 of the scales: all 9 pairs come round
        i = next(turn)
        return list(DTYPES)[i % 3], list(DTYPES)[i // 3 % 3]

    cases = [Case(M, N, *GROUPS[i % len(GROUPS)], bits, i % 3 > 0, *kind())
             for i, (M, N, bits) in enumerate(itertools.product(ROWS, OUT, (4, 8)))]
    cases += [Case(M, 7, K, group, bits, mins, *kind())
              for (K, group), M, bits, mins in itertools.product(GROUPS + LONG, (1, 5), (4, 8), (False, True))]
    return sorted(set(cases))


def slow_cases() -> list[Case]:
    """All of the product but the dtypes, which go round."""
    kinds = itertools.cycle(itertools.product(DTYPES, DTYPES))
    cases = [Case(M, N, K, group, bits, mins, *next(kinds)) for M, N, (K, group), bits, mins in itertools.product(
        ROWS, OUT, GROUPS, (4, 8), (False, True))]
    cases += [Case(130, 130, K, group, bits, True, dtype, dtype)  # more rows than the largest tile
              for (K, group), bits, dtype in itertools.product(LONG, (4, 8), DTYPES)]
    return sorted(set(cases) - set(fast_cases()))[::2]  # every second one, to spare CI a minute


def inputs(case: Case, device="cpu"):
    """The kernel's arguments, and W in float64. Around x lie NaNs: one read outside poisons the sum. Scales and
    minimums differ from group to group, codes are random: a number from a wrong place shows."""
    g = torch.Generator().manual_seed(sum(case[:5]))
    M, N, K, group, bits = case[:5]
    codes = torch.randint(0, 2**bits, (N, K), generator=g, dtype=torch.uint8)
    scales = ((1 + torch.rand(N, K // group, generator=g)) / 2**bits).to(DTYPES[case.stored])
    mins = torch.randn(N, K // group, generator=g).to(DTYPES[case.stored]) if case.mins else None
    W = scales.double().repeat_interleave(group, 1) * codes.double()
    if case.mins:
        W += mins.double().repeat_interleave(group, 1)
    around = torch.full((M + 2, K + 24), math.nan, dtype=DTYPES[case.dtype])
    around[1:-1, 8:-16] = torch.randn(M, K, generator=g)
    x = around.to(device)[1:-1, 8:-16]
    packed_codes = codes if bits == 8 else codes[:, ::2] + 16 * codes[:, 1::2]
    surrounded = torch.full((N + 2, packed_codes.shape[1]), 255, dtype=torch.uint8)
    surrounded[1:-1] = packed_codes
    bordered = [None if t is None else torch.cat([t.new_full((1, K // group), math.nan), t,
                                                  t.new_full((1, K // group), math.nan)]).to(device)[1:-1]
                for t in (scales, mins)]
    return (x, surrounded.to(device)[1:-1], *bordered, bits, group), W


def excess(y: torch.Tensor, x: torch.Tensor, W: torch.Tensor, rounded_weights: bool) -> float:
    """The largest error of y in units of what is allowed: one rounding of y (the interpreter cuts bits off, which is
    up to a whole unit), float32 sums, and on a GPU W's rounding to x's dtype. At most 1 is right; NaN counts as inf."""
    unit = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}[y.dtype]
    x, y = x.double().cpu(), y.double().cpu()
    exact, size = x @ W.t(), x.abs() @ W.t().abs()  # size: what the sums run through
    allowed = unit * exact.abs() + (2**-20 + (unit if rounded_weights else 0)) * size + 1e-30
    ratio = ((y - exact).abs() / allowed).nan_to_num(nan=math.inf)
    return ratio.max().item() if ratio.numel() else 0.0


@needs_triton
@pytest.mark.parametrize("case", fast_cases(), ids=str)
def test_product(case):
    check_product(outcomes("interpret")[str(case)], case)


@pytest.mark.slow
@needs_triton
def test_product_everywhere():
    found = outcomes("interpret-slow")
    assert len(found) == len(slow_cases())
    for case in slow_cases():
        check_product(found[str(case)], case)


def check_product(found, case):
    assert found["shape"] == [case.M, case.N] and found["dtype"] == str(DTYPES[case.dtype])
    assert found["kernel"] <= 1
    # The plain version is held to the same numbers; in bfloat16 it rounds better than the interpreter.
    assert found["reference"] <= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_product_on_a_gpu():
    from packed import quant_matmul

    large = [Case(M, 4096, 4096, 128, bits, True, dtype, dtype)
             for M, bits, dtype in itertools.product((1, 16, 64, 300), (4, 8), DTYPES)]
    for case in fast_cases() + large:
        arguments, W = inputs(case, "cuda")
        y = quant_matmul(*arguments)
        assert y.dtype == DTYPES[case.dtype] and y.shape == (case.M, case.N), case
        assert excess(y, arguments[0], W, rounded_weights=True) <= 1, case
        assert torch.equal(y, quant_matmul(*arguments)), f"{case}: the same call gave other bits"


@needs_triton
def test_bfloat16_in_the_interpreter():
    """FA-12, triton #4972, #10945, #11584: tl.dot multiplies the bit patterns of bfloat16 operands there. Sums of small
    integers must come out exactly, so the operands were widened first."""
    found = outcomes("interpret")["FA-12"]
    assert found["y"] == found["exact"]
    assert any(map(any, found["exact"]))


@needs_triton
@pytest.mark.parametrize("form", ["GEMV", "GEMM"])
def test_nothing_is_written_outside_y(form):
    found = outcomes("interpret")[f"{form} writes"]
    assert found["inside"] <= 1
    assert found["outside untouched"]


class Fault(NamedTuple):
    old: str
    new: str
    rows: tuple = (1, 5)  # the form for one row and the other


# A twin is packed.py with one fault; the comparison above must notice it. One row has no row stride.
TWINS = {
    "nibbles swapped": Fault("tl.interleave(code & 15, code >> 4)", "tl.interleave(code >> 4, code & 15)"),
    "the group before": Fault("first // GROUP", "tl.maximum(first // GROUP - 1, 0)"),
    "x read as if contiguous": Fault("m * x_stride", "m * K", (5,)),
    "x not masked along K": Fault("mask=(m < M) & (k < K)", "mask=(m < M)"),
    "scales of the first row": Fault("group = n * (K // GROUP)", "group = 0 * n"),
    "minimums subtracted": Fault("w += low", "w -= low"),
    "one turn of K too few": Fault("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)"),
    "y as if transposed": Fault("tl.trans(m) * N + n", "n * M + tl.trans(m)", (5,)),
}


@needs_triton
@pytest.mark.parametrize("twin, M", [(twin, M) for twin, fault in TWINS.items() for M in fault.rows])
def test_a_sabotaged_kernel_is_noticed(twin, M):
    assert outcomes("interpret")["the kernel itself"][str(M)] <= 1
    assert outcomes("interpret")[twin][str(M)] > 2


# ------------------------------------------------------------------ source and machine code


def loads_without_fill(source: str) -> list[int]:
    """Lines of the calls of tl.load that have a mask and no other."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "tl.load"]
    assert len(loads) >= 4, "the kernel was not found"
    arguments = [(call.lineno, len(call.args), {keyword.arg for keyword in call.keywords}) for call in loads]
    return [line for line, positional, named in arguments
            if ("mask" in named or positional > 1) and not ("other" in named or positional > 2)]


def test_every_masked_load_has_a_fill_value():
    """FA-13, triton #737, #9917; vllm #9014; sglang #27074: without `other` a masked element is undefined on a GPU and
    0 in the interpreter, so only the source can tell."""
    source = (ROOT / "packed.py").read_text()
    assert loads_without_fill(source) == []
    assert len(loads_without_fill(source.replace(", other=0", ""))) >= 4  # the check can fail


class Compiled(NamedTuple):
    cc: int
    dtype: str
    bits: int
    M: int
    group: int = 32
    mins: bool = True
    width: int = 4096  # N and K

    def __str__(self):
        return "-".join(map(str, self))


GPUS = (80, 90, 100, 120)
SHARED = {80: 163, 90: 227, 100: 227, 120: 99}  # KiB of shared memory that one block may use
QUICK = [Compiled(90, "bf16", 4, 1), Compiled(120, "fp16", 8, 1), Compiled(80, "fp16", 8, 16),
         Compiled(90, "bf16", 4, 512), Compiled(100, "bf16", 4, 64), Compiled(120, "bf16", 4, 512)]
# All four tiles on all GPUs, then what strains registers most: many scales a tile, odd groups, small matrices, float32.
REST = [Compiled(*c) for c in itertools.product(GPUS, ("bf16", "fp16"), (4, 8), (1, 16, 32, 64, 512))]
REST += [Compiled(cc, "fp16", bits, M, group, mins, 576) for cc, bits, M, (group, mins) in itertools.product(
    GPUS, (4, 8), (1, 16, 512), ((16, True), (576, False)))]
REST += [Compiled(cc, "fp32", bits, M) for cc, bits, M in itertools.product(GPUS, (4, 8), (1, 16, 512))]
REST = [c for c in REST if c not in QUICK][::2]


@needs_triton
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_compiles(case):
    check_compiled(outcomes("compile")[str(case)], case)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("case", REST, ids=str)
def test_compiles_everywhere(case):
    check_compiled(outcomes("compile-slow")[str(case)], case)


def check_compiled(found, case):
    assert found["shared"] <= SHARED[case.cc] * 1024
    pointers = {"x_ptr", "codes_ptr", "scales_ptr", "y_ptr"} | ({"mins_ptr"} if case.mins else set())
    assert found["offsets"] == dict.fromkeys(pointers, "i64"), "32 bits overflow in a matrix of 2 ** 31 codes"
    if case.M > 1 and case.dtype != "fp32":
        assert found["tensor cores"] > 0
        if case.M > 16 and case.cc in (90, 100):  # not through the older chips' instruction
            assert found["newest tensor cores"] > 0
    if case.M == 1:
        assert found["tensor cores"] == 0
    if "spilled" not in found:
        pytest.skip("no cuobjdump in this triton")
    assert found["spilled"] == {"STACK": 0, "LOCAL": 0}


@needs_triton
def test_offsets_of_32_bits_are_noticed():
    assert outcomes("compile")["offsets of 32 bits"]["codes_ptr"] == "i32"


# ------------------------------------------------------------------ the door


def call(x=(2, 64), codes=(3, 32), scales=(3, 2), mins=(3, 2), bits=4, group=32, dtype=torch.uint8):
    return (torch.zeros(x), torch.zeros(codes, dtype=dtype), torch.zeros(scales),
            None if mins is None else torch.zeros(mins), bits, group)


WRONG = {
    "the rank of x": (dict(x=(2, 1, 64)), r"\(2, 1, 64\)"),
    "bits": (dict(bits=3), "3 bits"),
    "a group that K is no multiple of": (dict(group=48), "group 48, K 64"),
    "a group of no 16s": (dict(group=8), "group 8"),
    "a negative group": (dict(group=-32), "group -32"),
    "codes not packed": (dict(codes=(3, 64)), r"\(3, 32\).*\(3, 64\)"),
    "signed codes": (dict(dtype=torch.int8), "uint8.*int8"),
    "scales": (dict(scales=(3, 1)), r"\(3, 2\).*\(3, 1\)"),
    "mins": (dict(mins=(2, 2)), r"\(3, 2\).*\(2, 2\)"),
}


@needs_triton
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    found = outcomes("interpret")[f"wrong {name}"]
    assert found[0] == "ValueError"
    assert re.search(WRONG[name][1], found[1])


@needs_triton
def test_codes_with_gaps_are_refused():
    assert outcomes("interpret")["wrong stride"][0] == "ValueError"


def test_on_a_cpu_the_remedy_is_named():
    """Neither without triton nor with it does the kernel run on a CPU; importing packed.py works either way."""
    code = ("import sys; sys.path.insert(0, {!r}); {}\nimport packed, torch\nx = torch.zeros(1, 32)\n"
            "weight = torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), None, 4, 32\n"
            "assert packed.quant_matmul_reference(x, *weight).shape == (1, 2)\n"
            "try: packed.quant_matmul(x, *weight)\nexcept ValueError as error: print(error)")
    for before in ("", "sys.modules['triton'] = None"):
        out = worker("-c", code.format(str(ROOT), before), interpret=False)
        assert "quant_matmul_reference" in out


@needs_triton
def test_quant_linear_takes_the_kernel():
    """What a layer on a GPU hands to the kernel, here in the interpreter: nibbles or bytes, scales, minimums, columns
    in act-order; the bias comes after it, and join puts rows behind each other."""
    code = """
import sys, torch
sys.path[:0] = [{!r}, {!r}]
import packed
from test_packed import close, definition, random_weight
packed._plan = lambda weight, device: ("triton", weight["codes"].shape[1] // weight["scales"].shape[1])
for bits, kind, order in ((4, "signed", False), (4, "both", True), (8, "signed", False), (5, "mins", False)):
    w = random_weight(24, 96, 3, bits, kind, act_order=order)
    layer, W, b = packed.QuantLinear(w), definition(w), torch.randn(24)
    assert layer.kind == "triton" and layer.packed.shape == (24, 48 if bits == 4 else 96)
    for rows in (0, 1, 3):
        x = torch.randn(rows, 96)
        assert close(layer(x), x, W, torch.bfloat16), (bits, kind, rows)
        assert torch.allclose(packed.QuantLinear(w, b)(x), layer(x) + b)
        assert torch.allclose(packed.QuantLinear.join([layer, layer])(x), torch.cat([layer(x)] * 2, 1), atol=1e-6)
print("right")
"""
    assert worker("-c", code.format(str(ROOT), str(ROOT / "tests")), interpret=True).strip() == "right"


# ------------------------------------------------------------------ the workers


@functools.cache
def outcomes(mode: str) -> dict:
    return json.loads(worker(__file__, mode, interpret=mode.startswith("interpret")))


def worker(*command: str, interpret: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, TRITON_INTERPRET=str(int(interpret)), TRITON_CACHE_DIR=folder)
        done = subprocess.run([sys.executable, "-B", *command], env=environment, text=True, capture_output=True,
                              timeout=1800)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


def load_twin(folder: str, old: str, new: str):
    """packed.py with one piece of its text replaced, as a module of its own (triton reads the file)."""
    source = (ROOT / "packed.py").read_text()
    assert old in source, f"the twin's text is gone from packed.py: {old}"
    path = Path(folder, f"twin{len(os.listdir(folder))}.py")
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpret(cases: list[Case]) -> dict:
    import packed

    found = {}
    for case in cases:
        arguments, W = inputs(case)
        y, plain = packed.quant_matmul(*arguments), packed.quant_matmul_reference(*arguments)
        assert plain.dtype == y.dtype and plain.shape == y.shape
        found[str(case)] = {"shape": list(y.shape), "dtype": str(y.dtype), "kernel": excess(y, arguments[0], W, False),
                            "reference": excess(plain, arguments[0], W, False)}
    return found


def interpret_specials() -> dict:
    import packed

    found = {}
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (16, 16), generator=g).to(torch.bfloat16)
    codes = torch.randint(0, 5, (16, 16), generator=g, dtype=torch.uint8)
    y = packed.quant_matmul(x, codes, torch.ones(16, 1), torch.full((16, 1), -2.0), 8, 16)
    found["FA-12"] = {"y": y.tolist(), "exact": (x.double() @ (codes.double() - 2).t()).tolist()}

    for form, M in (("GEMV", 1), ("GEMM", 5)):
        case = Case(M, 7, 96, 32, 4, True, "fp32", "fp32")
        (x, codes, scales, mins, bits, group), W = inputs(case)
        around = torch.full((3 * M * 7,), math.nan)
        y = around[M * 7: 2 * M * 7].view(M, 7)
        config = packed.quant_config(M, 7, 96, bits, group, x.dtype)
        assert config["GEMV"] == (form == "GEMV")
        packed.quant_kernel[(math.ceil(7 / config["BLOCK_N"]),)](
            x, codes, scales, mins, y, M, 7, 48, x.stride(0), BITS=bits, GROUP=group, HAS_MINS=True,
            DOT=packed.tl.float32, **config)
        outside = torch.cat([around[: M * 7], around[2 * M * 7:]])
        found[f"{form} writes"] = {"inside": excess(y, x, W, False), "outside untouched": outside.isnan().all().item()}

    with tempfile.TemporaryDirectory() as folder:
        for twin, (old, new, _) in {"the kernel itself": ("", "", ()), **TWINS}.items():
            module, found[twin] = load_twin(folder, old, new), {}
            for M in (1, 5):
                arguments, W = inputs(Case(M, 7, 480, 96, 4, True, "fp32", "fp32"))  # 480: not whole tiles
                found[twin][M] = min(excess(module.quant_matmul(*arguments), arguments[0], W, False), 1e9)

    for name, (change, _) in WRONG.items():
        found[f"wrong {name}"] = error_of(packed.quant_matmul, *call(**change))
    x, codes, *rest = call(codes=(3, 64))
    found["wrong stride"] = error_of(packed.quant_matmul, x, codes[:, ::2], *rest)
    return found


def error_of(function, *arguments) -> list[str]:
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def compiled(case: Compiled, module) -> dict:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    config = module.quant_config(case.M, case.width, case.width, case.bits, case.group, DTYPES[case.dtype])
    options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
    dot = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[case.dtype]
    constants = dict(config, BITS=case.bits, GROUP=case.group, HAS_MINS=case.mins, DOT=dot)
    if not case.mins:
        constants["mins_ptr"] = None
    kernel, pointer = module.quant_kernel, "*" + case.dtype
    types = dict(x_ptr=pointer, codes_ptr="*u8", scales_ptr=pointer, mins_ptr=pointer, y_ptr=pointer, M="i32", N="i32",
                 row_bytes="i32", x_stride="i32")
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    # What a launch would find out: pointers and lengths are multiples of 16; M is declared as never looked at.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
               if signature[name] != "constexpr" and name != "M"}
    binary = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
                            target=GPUTarget("cuda", case.cc, 32), options=options)
    ptx = binary.asm["ptx"]
    newest = len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx))
    # What is first added to each pointer, the one with a row's number in it: {"x_ptr": "i64", ...}.
    ttir = binary.asm["ttir"]
    bases = {name: name for name in re.findall(r"%(\w+_ptr)", ttir)}
    bases |= dict(re.findall(r"%(\w+) = tt\.splat %(\w+_ptr)", ttir))
    added = re.findall(r"tt\.addptr %(\w+), .*(i\d+)>? loc", ttir)
    offsets = {bases[base]: kind for base, kind in added if base in bases}
    found = {"shared": binary.metadata.shared, "newest tensor cores": newest, "offsets": offsets,
             "tensor cores": newest + len(re.findall(r"mma\.sync", ptx))}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if tool.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "-res-usage", file.name], text=True, capture_output=True, check=True)
        numbers = dict(re.findall(r"(STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
        found["spilled"] = {name: int(numbers[name]) for name in ("STACK", "LOCAL")}
    return found


def main(mode: str) -> dict:
    if mode == "interpret":
        return interpret(fast_cases()) | interpret_specials()
    if mode == "interpret-slow":
        return interpret(slow_cases())
    import packed

    found = {str(case): compiled(case, packed) for case in (QUICK if mode == "compile" else REST)}
    if mode == "compile":
        with tempfile.TemporaryDirectory() as folder:
            twin = load_twin(folder, ".to(tl.int64)", "")
            found["offsets of 32 bits"] = compiled(QUICK[0], twin)["offsets"]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1])))
