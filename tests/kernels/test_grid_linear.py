"""Weights of a uniform grid in a fixed width: on a GPU where there is one, else in Triton's interpreter.

Products are judged by what their sums could lose in rounding: |x| @ |weights|.T, times a rounding of the
dtype.
"""

from __future__ import annotations

import json
from pathlib import Path

import compile_only
import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from tensors import gaussian
from torch.library import opcheck

from neuzip.kernels import grid_linear
from neuzip.kernels.device import first_use as device_first_use
from neuzip.kernels.device import products
from neuzip.kernels.grid import Grid
from neuzip.kernels.grid_linear import GridTensor, escapes, first_use, ops, packing, terms
from neuzip.kernels.grid_linear.triton import decode as triton_decode
from neuzip.kernels.grid_linear.triton import one_row, some_rows
from neuzip.kernels.grid_linear.triton.linear import linear

BF16, F16 = torch.bfloat16, torch.float16
ONE_ROW = [{"one_row": one_row.GridRowLaunch(*of)} for of in ((1, 2), (8, 3))]
SOME_ROWS = [{"some_rows": some_rows.GridRowsLaunch(*of)} for of in ((4, 1, 2), (8, 2, 1))]
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-10}


def grid_of(out: int, columns: int, rows: bool, column_factors: bool) -> Grid:
    """A grid with factors from 2^-2 to 2^2."""
    generator = torch.Generator().manual_seed(out + columns)

    def some(count: int) -> torch.Tensor:
        return torch.randint(0x60, 0xA0, (count,), dtype=torch.uint8, generator=generator)

    return Grid(0.0037, some(out) if rows else None, some(columns) if column_factors else None)


def codes_of(out: int, columns: int, width: int) -> torch.Tensor:
    """Codes that fill a window, and a few far beyond it."""
    codes = (gaussian(out, columns, seed=width) * 2 ** (width - 2.5)).round()
    codes[::3, ::17] *= 40
    return codes.clamp(-(1 << 15), (1 << 15) - 1).to(torch.int16)


def packed_of(
    out: int, columns: int, width: int, dtype: torch.dtype, device: torch.device, factors: bool = True
) -> tuple[GridTensor, torch.Tensor]:
    grid = grid_of(out, columns, factors, factors)
    weights = grid.values(codes_of(out, columns, width), dtype)
    return grid_linear.pack(weights.to(device), grid, width), weights


def assert_product(
    y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
) -> None:
    x, weights = x.double().cpu(), weights.double()
    exact, scale = x @ weights.T, x.abs() @ weights.abs().T
    if bias is not None:
        exact, scale = exact + bias.double().cpu(), scale + bias.double().cpu().abs()
    assert ((y.double().cpu() - exact).abs() <= ROUNDING[y.dtype] * scale + 1e-7).all()


@pytest.mark.parametrize("width", grid_linear.WIDTHS)
@pytest.mark.parametrize(("out", "columns"), [(16, 128), (33, 101), (5, 1100), (40, 576), (1, 1)])
def test_decodes_to_the_grids_values(out: int, columns: int, width: int, device: torch.device):
    """By the reference and by the kernel: all rows, some, and a list of which some do not exist."""
    packed, weights = packed_of(out, columns, width, (BF16, F16)[width % 2], device, factors=out != 40)
    assert packed.width == width
    assert same_bits(grid_linear.decode(packed).cpu(), weights)
    start = out // 3
    dense = torch.full((out - start, columns), torch.nan, dtype=packed.dtype, device=device)
    triton_decode.decode(packed, start, dense)
    assert same_bits(dense.cpu(), weights[start:])
    ids = torch.tensor([out - 1, 0, -1, out], device=device)
    found = torch.zeros(4, columns, dtype=packed.dtype, device=device)
    triton_decode.rows(packed, ids, found)
    assert same_bits(found[:2].cpu(), weights[[out - 1, 0]])
    assert found[2:].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("factors", [False, True])
def test_rows_and_columns_have_factors_of_their_own(factors: bool, dtype: torch.dtype):
    """Row factors only, and column factors only."""
    grid = grid_of(17, 70, factors, not factors)
    weights = grid.values(codes_of(17, 70, 5), dtype)
    packed = grid_linear.pack(weights, grid)
    assert packed.width == 5
    assert packed.escapes.numel() == (codes_of(17, 70, 5).float() + 0.5).abs().gt(16).sum()
    assert same_bits(grid_linear.decode(packed), weights)


def test_the_width_is_that_of_the_least_bits():
    """Against packing in all widths; Gaussian codes of 4 bits of entropy have 5."""
    grid = Grid(0.01)
    for spread, expected in ((1, 4), (4, 5), (20, 7)):
        codes = (gaussian(256, 256, seed=1) * spread).round().to(torch.int16)
        weights = grid.values(codes, BF16)
        sizes = {w: grid_linear.pack(weights, grid, w).nbytes for w in grid_linear.WIDTHS}
        assert grid_linear.pack(weights, grid).width == min(sizes, key=sizes.__getitem__) == expected


def test_terms_make_the_weights_that_steps_make():
    """With random steps no code of a window is wrong; wrong ones are escapes, and too many forbid terms."""
    steps = torch.rand(500, generator=torch.Generator().manual_seed(1)) * 0.01 + 1e-4
    for width in (4, 7):
        codes = torch.arange(-(1 << width - 1), 1 << width - 1)
        assert not terms.terms_of(steps, codes, torch.ones(len(codes))).wrong.any()
    grid = grid_of(40, 300, True, False)
    weights = grid.values(codes_of(40, 300, 5), BF16)
    packed = grid_linear.pack(weights, grid)
    assert packed.has_terms and packed.row_terms.shape == (48, 2)
    for few in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(packing, "WRONG_SHARE", 1.0 if few else 0.0)
            monkeypatch.setattr(packing, "terms_of", wrong_terms)
            other = grid_linear.pack(weights, grid)
        assert other.has_terms is few
        assert (other.escapes.numel() > packed.escapes.numel()) is few
        dense = torch.zeros_like(weights)
        triton_decode.decode(other, 0, dense)
        assert same_bits(dense, weights)


def wrong_terms(steps: torch.Tensor, codes: torch.Tensor, counts: torch.Tensor) -> terms.StepTerms:
    """Terms of which the second is missing."""
    right = terms.terms_of(steps, codes, counts)
    first = (right.pairs[:, 0] >> 16).to(torch.int16).view(BF16)[:, None]
    wanted = (codes.float() * steps[:, None]).to(BF16).double()
    wrong = terms.product(codes, first, torch.zeros_like(first)) != wanted
    return terms.StepTerms(right.pairs * torch.tensor([1, 0], dtype=torch.int32), wrong)


def test_what_is_no_code_of_the_window_is_an_escape():
    """Codes beyond it, -0, what is on no grid, infinities and NaNs: all come back bit for bit."""
    numbers = [-16384.0, 16384.0, 0.0, 0.5, -0.5, 3.5, 4.0, -4.0, -4.5, -0.0, 0.3, torch.inf, torch.nan]
    weights = torch.tensor([numbers], dtype=BF16)
    packed = grid_linear.pack(weights, Grid(0.5), 4)
    rows, columns = escapes.places(packed.escapes, torch.zeros_like(packed.escapes), len(numbers))
    assert columns.tolist() == [0, 1, 6, 8, 9, 10, 11, 12] and not rows.any()
    assert same_bits(grid_linear.decode(packed), weights)


@pytest.mark.parametrize(
    ("out", "columns", "rows", "launch"),
    [
        (33, 101, 1, (1, 1)), (17, 1100, 1, (2, 2)), (40, 640, 1, (4, 1)), (16, 128, 1, (1, 1)),
        (70, 300, 2, None), (40, 576, 7, None), (15, 31, 17, None), (130, 640, 40, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("width", [5, 7])
def test_products(
    out: int, columns: int, rows: int, launch: tuple[int, int] | None, width: int, device: torch.device
):
    dtype = (BF16, F16)[(out + width) % 2]
    packed, weights = packed_of(out, columns, width, dtype, device, factors=rows % 2 == 0 or out > 20)
    x = gaussian(rows, columns, seed=1).to(dtype).to(device)
    bias = gaussian(out, seed=2).to(dtype).to(device) if columns % 2 else None
    y = linear(x, packed, bias, launch and one_row.GridRowLaunch(*launch))
    assert (y.shape, y.dtype) == ((rows, out), dtype)
    assert_product(y, x, weights, bias)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("out", "columns"), [(20, 140)])
def test_products_of_many_escapes(out: int, columns: int, dtype: torch.dtype, device: torch.device):
    """Up to all weights of a unit, of which a thread writes more than one: by all kinds of launches."""
    weights = gaussian(out, columns, seed=3).to(dtype)
    weights[::5, ::3] = -0.0
    packed = grid_linear.pack(weights.to(device), grid_of(out, columns, True, False), 5)
    assert packed.unit_start.diff().max() > 500
    dense = torch.full_like(weights, torch.nan, device=device)
    triton_decode.decode(packed, 0, dense)
    assert same_bits(dense.cpu(), weights)
    for rows, launches in ((1, ONE_ROW), (5, SOME_ROWS)):
        x = gaussian(rows, columns, seed=1).to(dtype).to(device)
        for launch in launches:
            assert_product(linear(x, packed, None, **launch), x, weights, None)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_escapes_are_multiplied_as_they_are(rows: int, dtype: torch.dtype, device: torch.device):
    """Infinities, NaNs, the smallest and the largest numbers, one in a row, with x of 0 and infinite."""
    numbers = torch.finfo(dtype)
    least = numbers.smallest_normal / (4 if dtype == F16 else 1)  # products of fp32 may have no denormals
    special = [torch.inf, -torch.inf, torch.nan, numbers.max, least, -0.0, 0.3]
    weights = torch.zeros(len(special) + 1, 130, dtype=dtype)
    weights[:-1, 129] = torch.tensor(special, dtype=dtype)
    weights[-1, 0] = 3.0
    packed = grid_linear.pack(weights.to(device), Grid(1.0), 4)
    x = torch.zeros(rows, 130, dtype=dtype, device=device)
    x[:, 129], x[:, 0] = 1.0, 0.5
    y = linear(x, packed).cpu()
    wanted = torch.tensor([*special[:5], 0.0, 0.3, 1.5], dtype=dtype)
    for row in y:
        assert torch.equal(row.nan_to_num(7.0, 8.0, -8.0), wanted.nan_to_num(7.0, 8.0, -8.0))
    x = torch.full((rows, 130), torch.inf, dtype=dtype, device=device)
    full = torch.full((3, 130), 0.3, dtype=dtype)  # all are escapes, and none adds 0 times infinity
    y = linear(x, grid_linear.pack(full.to(device), Grid(1.0), 4))
    assert torch.equal(y.cpu(), torch.full((rows, 3), torch.inf, dtype=dtype))


@pytest.mark.parametrize("width", [4, 6, 8])
def test_products_of_other_widths(width: int, device: torch.device):
    packed, weights = packed_of(16, 256, width, BF16, device)
    for rows in (1, 3):
        x = gaussian(rows, 256, seed=1).to(BF16).to(device)
        assert_product(linear(x, packed), x, weights, None)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_bits_every_time(rows: int, device: torch.device):
    packed, _ = packed_of(80, 300, 5, BF16, device)
    x = gaussian(rows, 300, seed=1).bfloat16().to(device)
    first = linear(x, packed)
    for _ in range(50 if device.type == "cuda" else 1):
        assert torch.equal(linear(x, packed), first)


@pytest.mark.parametrize("rows", [3, 70])
def test_the_operator_is_the_product(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """From the packed form, or decoded some rows at a time; on a CPU always decoded."""
    monkeypatch.setattr(products, "CHUNK", 16 * 300 * 2)
    monkeypatch.setattr(products, "RESULTS", 1)
    packed, weights = packed_of(40, 300, 5, BF16, device)
    x = gaussian(rows, 300, seed=1).bfloat16().to(device)
    bias = gaussian(40, seed=2).bfloat16().to(device)
    y = ops.linear(x[None], packed, bias)
    assert y.shape == (1, rows, 40)
    assert_product(y[0], x, weights, bias)


def test_operators_are_fit_for_compilation(device: torch.device):
    packed, weights = packed_of(18, 64, 5, BF16, device)
    x = gaussian(2, 64, seed=1).bfloat16().to(device).requires_grad_()
    bias = gaussian(18, seed=2).bfloat16().to(device).requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(torch.ops.neuzip.grid_linear.default, (x, bias, *packed.arguments), test_utils=tests)
    opcheck(torch.ops.neuzip.grid_decode.default, (2, 9, *packed.arguments), test_utils=tests[:2])
    ids = torch.tensor([3, 0], device=device)
    opcheck(torch.ops.neuzip.grid_rows.default, (ids, *packed.arguments), test_utils=tests[:2])
    ops.linear(x, packed, bias).sum().backward()
    assert x.grad is not None and bias.grad is not None
    assert_product(x.grad, torch.ones(2, 18), weights.T, None)
    assert torch.equal(bias.grad.cpu(), torch.full((18,), 2.0, dtype=BF16))


def test_look_ups(device: torch.device):
    packed, weights = packed_of(18, 64, 5, BF16, device)
    ids = torch.tensor([[3, 17], [0, 3]], dtype=torch.int32, device=device)
    assert same_bits(ops.rows(packed, ids).cpu(), F.embedding(ids.cpu(), weights))
    if device.type == "cpu":
        with pytest.raises(IndexError, match="18"):
            ops.rows(packed, torch.tensor([18]))
    with pytest.raises(TypeError, match="int32 or int64"):
        ops.rows(packed, torch.tensor([1.0], device=device))


def test_arguments_that_do_not_fit(device: torch.device):
    packed, _ = packed_of(18, 64, 5, BF16, device)
    with pytest.raises(ValueError, match="shapes"):
        ops.linear(torch.zeros(2, 63, dtype=BF16, device=device), packed)
    with pytest.raises(TypeError, match=r"not multiplied with torch\.float32"):
        ops.linear(torch.zeros(2, 64, device=device), packed)
    with pytest.raises(ValueError, match="out is"):
        ops.decode(packed, out=torch.zeros(18, 63, dtype=BF16, device=device))
    weights = torch.zeros(2, 2, dtype=BF16)
    with pytest.raises(TypeError, match="bfloat16 or float16"):
        grid_linear.pack(weights.float(), Grid(1.0))
    with pytest.raises(ValueError, match="not empty"):
        grid_linear.pack(weights[:0], Grid(1.0))
    with pytest.raises(ValueError, match="4 to 8 bits"):
        grid_linear.pack(weights, Grid(1.0), 3)


def test_a_card_that_computes_wrong_results_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_first_use, "DEVICE_TYPES", {"cuda", "cpu"})
    monkeypatch.setattr(device_first_use, "_passed", set())
    packed, weights = packed_of(18, 64, 5, BF16, torch.device("cpu"))
    x = torch.zeros(1, 64, dtype=BF16)
    first_use.check_decoding(weights, packed, 0)
    first_use.check_product(x, packed, None, lambda *of: F.linear(of[0], grid_linear.decode(of[1])))
    monkeypatch.setattr(device_first_use, "_passed", set())
    with pytest.raises(device_first_use.WrongResults, match="multiplying with packed codes"):
        first_use.check_product(x, packed, None, lambda *of: F.linear(of[0], 1.1 * grid_linear.decode(of[1])))
    with pytest.raises(device_first_use.WrongResults, match="decoding packed codes"):
        first_use.check_decoding(-weights, packed, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(("out", "columns"), [(4096, 4096), (14336, 4096), (4096, 14336), (1000, 1111)])
def test_products_of_real_shapes(out: int, columns: int, factors: bool):
    device = torch.device("cuda")
    packed, weights = packed_of(out, columns, 5, BF16, device, factors)
    weights = weights.to(device)
    assert same_bits(ops.decode(packed), weights)
    for rows in (1, 2, 16, 17, 64, 65):
        x = gaussian(rows, columns, seed=1).bfloat16().to(device)
        exact = x.double() @ weights.double().T
        scale = x.double().abs() @ weights.double().abs().T
        y = ops.linear(x, packed)
        assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-18 * scale).all()


COMPILED = r"""
import json, re, torch
import compile_only
from neuzip.kernels.device import launch

launch.has_pdl = lambda device: True
seen, hashes = {}, {}

def see(function, code, kwargs):
    name = function.__name__
    before, wait, _ = code.asm["ptx"].partition("griddepcontrol.wait")
    if name == "_one_row":
        assert wait and "ld.global" in before  # words are loaded before the kernel ahead has ended
    if name in ("_one_row", "_some_rows"):  # a thread has the element of its number in all arrays of threads
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", code.asm["ttgir"], re.M))
        lines = [line for line in code.asm["ttgir"].splitlines() if "elementwise_inline_asm" in line]
        assert any("ld.shared.v4" in line for line in lines)
        for of in set(re.findall(r"tensor<[^>]*, (#\w+)>", " ".join(lines))):
            assert "sizePerThread = [1], threadsPerWarp = [32]" in layouts[of], layouts[of]
    if name == "_some_rows":
        order = re.findall(r"wgmma[.](\w+)", code.asm["ptx"])[:10]
        assert order == ["fence", *["mma_async"] * 8, "commit_group"], order
    names = compile_only.instructions(code, r"LOP3|HFMA2|LDL|STL")
    hashes.setdefault(name, set()).add(code.hash)
    counts = {i: names.count(i) for i in set(names)} | {"shared": code.metadata.shared}
    seen.setdefault(name, counts)  # of _decode_rows that of a tile

compile_only.watch(see)
empty = torch.empty  # zeros, but where there are no values
torch.empty = lambda *a, **k: (empty if str(k.get("device")) == "meta" else torch.zeros)(*a, **k)
from neuzip.kernels.grid import Grid
from neuzip.kernels.grid_linear import GridTensor, ops, pack
from neuzip.kernels.grid_linear.triton import decode
from neuzip.kernels.grid_linear.triton.linear import linear

packed = pack(torch.zeros(64, 1024, dtype=torch.bfloat16), Grid(1.0), 5)
for rows in (1, 16):
    linear(torch.zeros(rows, 1024, dtype=torch.bfloat16), packed)
decode.decode(packed, 0, torch.zeros(64, 1024, dtype=torch.bfloat16))
ids = torch.zeros(3, dtype=torch.int64)
decode.rows(packed, ids, torch.zeros(3, 1024, dtype=torch.bfloat16))
launched = {name: set(of) for name, of in hashes.items()}
ahead = GridTensor.without_values(64, 1024, torch.bfloat16, 5, False)
for rows in (1, 16, 65):
    ops.compile_products(ahead, rows)
ops.compile_rows(ahead)
assert hashes == launched  # what is compiled ahead is what is launched
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_compiled_for_hopper(tmp_path: Path, kernel_cache: Path):
    """A thread has 64 weights a turn, in pairs: of each a field, a subtraction, two products with a patch."""
    seen = json.loads(compile_only.said_by(COMPILED, tmp_path, kernel_cache))
    assert set(seen) == {"_one_row", "_some_rows", "add_parts", "_decode_rows"}
    for name, turns in (("_one_row", 2), ("_some_rows", 1), ("_decode_rows", 1 / 2)):
        counts = seen[name]
        assert counts["shared"] <= 227 << 10
        assert "LDL" not in counts and "STL" not in counts  # no registers are spilled
        for instruction, a_turn in (("LOP3", 47), ("HFMA2", 96)):
            most = 1.3 * a_turn * turns + 32  # addresses, before the loop and of escapes
            assert 0.65 * a_turn * turns <= counts[instruction] <= most, (name, counts)
