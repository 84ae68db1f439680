"""Codes with error feedback: what the kernel of a GPU gives, and what the codes do to products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neuzip.kernels.grid import Grid
from neuzip.kernels.quantizers import ErrorSpread, grid_feedback
from neuzip.kernels.quantizers.grid_feedback import codes_by_column, codes_of_all_rows

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 0.3
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def inputs(columns: int, seed: int = 0) -> Tensor:
    """Inputs that go together, fp32 [600, columns]."""
    rng = torch.Generator().manual_seed(columns + seed)
    mixed = torch.randn(columns, columns, generator=rng) * torch.logspace(0, -2, columns)[:, None]
    return torch.randn(600, columns, generator=rng) @ mixed


def weights(rows: int, columns: int) -> Tensor:
    """Weights fp32 [rows, columns]; among the first are zeros, a denormal, and some too large for a code."""
    rng = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=rng)
    odd = torch.tensor([0.0, -0.0, 1e-40, 1e6, -1e6, STEP / 2])[:columns]
    weight[0, : len(odd)] = odd
    return weight


def grid_of(rows: int, columns: int, *, of_rows: bool, of_columns: bool) -> Grid:
    rng = torch.Generator().manual_seed(rows * columns)
    of = [torch.randint(112, 144, (n,), generator=rng, dtype=torch.uint8) for n in (rows, columns)]
    return Grid(STEP, of[0] if of_rows else None, of[1] if of_columns else None)


CASES = [
    (9, 1, torch.float32, False, False),
    (1, 31, torch.float32, True, False),
    (9, 130, torch.bfloat16, True, False),
    (3, 40, torch.float16, False, True),
    (7, 5, torch.float64, True, True),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here")
@pytest.mark.parametrize(("rows", "columns", "dtype", "of_rows", "of_columns"), CASES)
def test_the_kernel_gives_the_codes_of_torch(rows, columns, dtype, of_rows, of_columns):
    grid = grid_of(rows, columns, of_rows=of_rows, of_columns=of_columns)
    errors = ErrorSpread.of((x := inputs(columns)).T @ x)
    weight = weights(rows, columns)
    expected = codes_by_column(weight, grid, errors, dtype)
    assert torch.equal(codes_of_all_rows(weight, grid, errors, dtype), expected)
    assert torch.equal(grid_feedback(weight, grid, errors, dtype)[:, errors.order].T, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, *FP8], ids=str
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 129), (5000, 576), (257, 1536)])
def test_on_a_gpu_the_kernel_gives_the_codes_of_torch(rows: int, columns: int, dtype: torch.dtype):
    grid = grid_of(rows, columns, of_rows=rows < 5000, of_columns=columns == 129).to("cuda")
    errors = ErrorSpread.of((x := inputs(columns)).T @ x).to(torch.device("cuda"))
    weight = weights(rows, columns).clamp(-40, 40).cuda()
    strided = torch.cat([weight, weight], 1)[:, :columns]
    expected = codes_by_column(weight, grid, errors, dtype)
    for given in (weight, strided):
        codes = grid_feedback(given, grid, errors, dtype)
        assert codes.is_contiguous() and torch.equal(codes[:, errors.order].T, expected)


@pytest.mark.gpu
def test_codes_of_a_gpu_cost_as_little_as_those_of_a_cpu():
    weight, grid = weights(700, 576).clamp(-40, 40), Grid(STEP)
    x = inputs(576).double()
    errors = ErrorSpread.of((x.T @ x).float())
    here = grid_feedback(weight, grid, errors, torch.bfloat16)
    there = grid_feedback(weight.cuda(), grid, errors.to(torch.device("cuda")), torch.bfloat16).cpu()
    lost, of_gpu = ((x @ (grid.values(c, torch.bfloat16) - weight).double().T).norm() for c in (here, there))
    assert of_gpu == pytest.approx(lost, rel=0.01)
    assert (here == there).float().mean() > 0.9


@pytest.mark.parametrize("columns", [1, 31, 129])
def test_feedback_keeps_products(columns: int):
    g = torch.Generator().manual_seed(columns)
    x, weight = inputs(columns), torch.randn(40, columns, generator=g)
    grid = Grid(STEP, rows=torch.arange(120, 160, dtype=torch.uint8) // 8 + 112)
    codes = grid_feedback(weight, grid, ErrorSpread.of(x.T @ x), torch.float32)
    lost, of_nearest = (
        float((x @ (grid.values(c, torch.float32) - weight).T).norm()) for c in (codes, grid.codes(weight))
    )
    assert lost <= of_nearest if columns == 1 else lost < 0.7 * of_nearest


def test_without_correlation_codes_are_the_nearest():
    weight = torch.randn(30, 24, generator=torch.Generator().manual_seed(2))
    grid = Grid(0.1)
    codes = grid_feedback(weight, grid, ErrorSpread.of(7.0 * torch.eye(24)), torch.bfloat16)
    assert torch.equal(codes, grid.codes(weight))


def test_a_matrix_without_rows_or_columns_has_no_codes():
    for shape in ((0, 3), (3, 0)):
        errors = ErrorSpread.of(torch.eye(shape[1]))
        assert grid_feedback(torch.ones(shape), Grid(1.0), errors, torch.float32).shape == shape
