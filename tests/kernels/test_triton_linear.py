"""The kernels that multiply with packed weights: on a GPU where there is one, else in Triton's interpreter.

Every number is judged by what its sum could lose in rounding: |x| @ |weights|.T, times a rounding of the
dtype. So a row that has no escapes counts as much as one that has many.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import compile_only
import pytest
import torch
import torch.nn.functional as F
from tensors import gaussian

from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.packed_linear.triton import linear as triton_linear
from neuzip.kernels.packed_linear.triton import some_rows

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
GUARD = 100


def made(out: int, columns: int, dtype: torch.dtype, drop: int = 0) -> torch.Tensor:
    """Weights with far ones everywhere, escapes below these, and some far above in a third of the rows."""
    weights = gaussian(out, columns, seed=0) * 0.016
    weights[:, ::7] *= 2.0**-4
    weights[:, 3::29] *= 2.0**-16
    weights[::3, ::11] *= 2.0**12
    return (weights.to(dtype).view(torch.int16) >> drop << drop).view(dtype)


def guarded(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values, contiguous, with NaNs before and after."""
    memory = torch.full((values.numel() + 2 * GUARD,), torch.nan, dtype=values.dtype, device=device)
    inside = memory[GUARD + 1 : GUARD + 1 + values.numel()]
    inside.copy_(values.flatten())
    return inside.view(values.shape)


def assert_product(
    y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
) -> None:
    x, weights = x.double().cpu(), weights.double().cpu()
    exact, scale = x @ weights.T, x.abs() @ weights.abs().T
    if bias is not None:
        exact, scale = exact + bias.double().cpu(), scale + bias.double().cpu().abs()
    off = (y.double().cpu() - exact).abs()
    assert (off <= ROUNDING[y.dtype] * scale + 1e-7).all()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Launch so, whatever the card.

    For one row warps that share a tile, and turns that it is loaded ahead and that the loop is written out
    for; for more rows 0, and turns of a program.
    """

    def force(warps: int, turns: int) -> None:
        launch = triton_linear.OneRowLaunch(warps, turns, turns)
        monkeypatch.setattr(triton_linear, "one_row_launch", lambda *_: launch)
        monkeypatch.setattr(some_rows, "programs_of", lambda units, *_: (-(-units // turns), turns))

    return force


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("out", "columns", "rows", "numbers", "drop"),
    [
        (16, 128, 1, (1, 1), 0), (17, 96, 1, (2, 2), 3), (50, 513, 1, (4, 2), 1), (33, 640, 1, (8, 1), 4),
        (40, 33, 1, (16, 1), 0), (1, 1, 1, (1, 1), 0), (17, 1100, 1, (1, 3), 4), (16, 1024, 1, (1, 2), 5),
        (16, 128, 2, (0, 1), 0), (31, 100, 8, (0, 5), 5),
        (150, 513, 7, (0, 3), 0), (40, 576, 8, (0, 2), 0), (15, 31, 3, (0, 4), 1),
        (48, 513, 9, (0, 1), 0), (130, 640, 16, (0, 7), 3), (200, 250, 17, (0, 9), 0),
        (33, 96, 32, (0, 1), 7), (15, 31, 25, (0, 2), 1), (64, 128, 12, (0, 1), 4), (70, 300, 50, (0, 2), 0),
        (70, 300, 64, (0, 4), 2),
    ],
)  # fmt: skip
def test_any_shape(
    out: int, columns: int, rows: int, numbers: tuple[int, ...], drop: int, dtype, launches, device, poison
):  # fmt: skip
    launches(*numbers)
    weights = made(out, columns, dtype, drop)
    bias = guarded(gaussian(out, seed=2).to(dtype), device) if rows % 2 else None
    x = guarded(gaussian(rows, columns, seed=1).to(dtype), device)
    y = triton_linear.linear(x, torch_ops.pack(weights.to(device)), bias)
    assert y.shape == (rows, out)
    assert y.dtype == dtype
    assert_product(y, x, weights, bias)


@pytest.mark.parametrize("rows", [1, 8, 20])
def test_the_same_bits_every_time(rows: int, device: torch.device):
    """Whichever program comes last."""
    packed = torch_ops.pack(made(80, 700, torch.bfloat16).to(device))
    x = gaussian(rows, 700, seed=1).bfloat16().to(device)
    first = triton_linear.linear(x, packed)
    for _ in range(50 if device.type == "cuda" else 1):
        assert torch.equal(triton_linear.linear(x, packed), first)


def test_programs_have_all_turns():
    for units in (1, 3, 4, 5, 100, 2048, 7168, 64_128):
        for device in (torch.device("cpu"), torch.device("cuda", 0))[: 1 + torch.cuda.is_available()]:
            programs, each = some_rows.programs_of(units, 4, device)
            assert (programs - 1) * each < units <= programs * each
            assert each >= min(4, units)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_rows_of_a_larger_tensor(rows: int, device: torch.device):
    """Experts: words and index that are views, starts that count from the first expert on."""
    weights = made(80, 96, torch.bfloat16)
    packed = torch_ops.pack(weights.to(device))
    for start, stop in ((16, 50), (48, 80), (0, 5)):
        part: PackedTensor = replace(
            packed,
            shape=(stop - start, 96),
            words=packed.words[start // 16 : -(-stop // 16)],
            far_index=packed.far_index[start // 16 : -(-stop // 16)],
            row_start=packed.row_start[start : stop + 1],
        )
        x = gaussian(rows, 96, seed=1).bfloat16().to(device)
        assert_product(triton_linear.linear(x, part), x, weights[start:stop], None)


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("kind", ["strided", "a column", "expanded"])
def test_bias_of_any_strides(kind: str, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_ops, "on_gpu", lambda _: True)  # the interpreter takes CPU tensors
    weights = made(48, 64, torch.bfloat16)
    numbers = gaussian(48, 2, seed=2).bfloat16().to(device)
    bias = {
        "strided": numbers.flatten()[::2],
        "a column": numbers[:, 1],
        "expanded": numbers[0, :1].expand(48),
    }
    x = gaussian(rows, 64, seed=1).bfloat16().to(device)
    packed = torch_ops.pack(weights.to(device))
    y = torch_ops.linear(x, packed, bias[kind])
    if rows > torch_ops.FEW_ROWS:  # the library's own product, which may round before it adds the bias
        assert torch.equal(y, F.linear(x, weights.to(device), bias[kind]))
    else:
        assert_product(y, x, weights, bias[kind])


def test_bias_elsewhere_is_refused(device: torch.device):
    packed = torch_ops.pack(made(16, 32, torch.bfloat16).to(device))
    with pytest.raises(ValueError, match="bias is on meta"):
        torch_ops.linear(
            torch.zeros(1, 32, dtype=torch.bfloat16, device=device),
            packed,
            torch.zeros(16, dtype=torch.bfloat16, device="meta"),
        )


@pytest.mark.parametrize("rows", [1, 9])
def test_infinite_x_spoils_only_its_row_and_only_where_the_weight_is_an_escape(rows: int, device):
    weights = made(32, 64, torch.bfloat16)
    x = gaussian(rows, 64, seed=1).bfloat16()
    x[0, 5] = torch.inf
    y = triton_linear.linear(x.to(device), torch_ops.pack(weights.to(device))).cpu()
    assert_product(y[1:], x[1:], weights, None)
    dense = x[:1].double() @ weights.double().T
    assert (y[0].isnan() | (y[0].double() == dense[0])).all()
    assert not y[0].isnan().all()


COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from neuzip.kernels.packed_linear.triton import linear as triton_linear
from neuzip.kernels.packed_linear.triton import some_rows

POINTERS = dict(words="*i32", index="*i32", far="*i32", row_start="*i16", escapes="*i32", pairs_of_x="*i32",
                parts="*fp32")
NUMBERS = dict(base="i32", shift="i32", scale="fp32", units="i32", N="i32", M="i32", turns="i32",
               each="i32", own_blocks="i32")

def layouts(kernel, **constants):
    float_pointer = "*fp16" if constants["HALF"] else "*bf16"
    types = {name: float_pointer for name in ("y", "x", "bias")} | POINTERS | NUMBERS
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=constants["W"]))
    if kernel is some_rows._some_rows:
        print(*re.findall(r"wgmma[.](\\w+)", code.asm["ptx"]))
        return
    text = code.asm["ttgir"]
    named = dict(re.findall(r"^(#\\w+) = (#ttg.*)$", text, re.M))
    lines = [line for line in text.splitlines() if "mma.sync" in line]
    found = {named[name] for line in lines for name in re.findall(r"tensor<[0-9]+x[a-z0-9]+, (#\\w+)>", line)}
    print(len(lines), *found, sep=" | ")

one, some = triton_linear._one_row, some_rows._some_rows
form = dict(LOW=8, HALF=False, BIAS=True, COMPILED=True, USE_PDL=True)
layouts(one, C=128, W=4, TURNS=8, AHEAD=1, UNROLLED=1, EVEN=True, **form)
layouts(one, C=125, W=16, TURNS=2, AHEAD=2, UNROLLED=2, EVEN=False, **form | dict(HALF=True, LOW=3))
layouts(some, C=128, BM=16, W=4, EVEN=True, **form)
layouts(some, C=125, BM=32, W=4, EVEN=False, **form | dict(HALF=True))
"""


@pytest.mark.slow
def test_element_i_is_in_thread_i(tmp_path: Path, kernel_cache: Path):
    """What the instructions rely on, and Triton does not promise: asked of the compiler, for an H100."""
    *threads, narrow, wide = compile_only.said_by(COMPILED, tmp_path, kernel_cache).splitlines()
    lines = [line.split(" | ") for line in threads]
    assert [int(count) for count, *_ in lines] == [8, 16]  # of a turn 8
    for _, *found in lines:
        assert len(found) == 1
        assert "sizePerThread = [1], threadsPerWarp = [32]" in found[0]
    # The eight instructions of a turn follow each other, and are waited for once.
    for line in (narrow, wide):
        assert line.split()[:10] == ["fence", *["mma_async"] * 8, "commit_group"]
        assert line.count("fence") == 1
