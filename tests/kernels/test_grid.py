"""Uniform grids: factor bytes, codes and values to the bit, against fp64 with explicit roundings."""

from __future__ import annotations

import doctest
import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from neuzip.errors import NeuzipError
from neuzip.kernels import grid as package
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.float_fields.values import to_float64
from neuzip.kernels.grid import Grid, factor_bytes, factors, reference

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
devices = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fp32(exact: np.ndarray) -> np.ndarray:
    """Numbers of fp64 that are products of two of fp32, so exact, rounded once to fp32."""
    return exact.astype(np.float32).astype(np.float64)


def expected_steps(grid: Grid, rows: int, columns: int) -> np.ndarray:
    """The steps [rows, columns] as fp64 numbers, by the two roundings of the definition."""
    row, column = (
        np.ones(n) if t is None else np.array([(16 + (b & 15)) * 2.0 ** ((b >> 4) - 12) for b in t.tolist()])
        for t, n in ((grid.rows, rows), (grid.columns, columns))
    )
    return fp32(fp32(grid.step * row[:, None]) * column)


def nearest_even(values: np.ndarray, name: str) -> np.ndarray:
    """Numbers rounded to a dtype with all patterns listed: the nearest, and of two the even pattern."""
    fmt = FORMATS[name]
    patterns = np.arange(1 << (fmt.bits - 1)).astype(fmt.dtype)
    known = to_float64(patterns, fmt)
    patterns, known = patterns[np.isfinite(known)], known[np.isfinite(known)]
    magnitude = np.abs(values)
    at = np.searchsorted(known, magnitude)
    low, high = known[np.maximum(at - 1, 0)], known[np.minimum(at, known.size - 1)]
    is_high = (high - magnitude < magnitude - low) | (
        (high - magnitude == magnitude - low) & (patterns[np.minimum(at, known.size - 1)] % 2 == 0)
    )
    return np.copysign(np.where(is_high, high, low), values)


def test_doctests() -> None:
    assert doctest.testmod(reference).failed == 0
    assert factor_bytes(torch.ones(1)).item() == package.ONE


def test_all_factor_bytes() -> None:
    expected = [(16 + (b & 15)) * 2.0 ** ((b >> 4) - 12) for b in range(256)]
    assert factors(ALL_BYTES).tolist() == expected
    assert torch.equal(factor_bytes(factors(ALL_BYTES)), ALL_BYTES)


def test_factor_bytes_are_the_nearest_in_logarithm() -> None:
    numbers = torch.from_numpy(np.geomspace(2.0**-9, 300, 1001))
    known = np.log([(16 + (b & 15)) * 2.0 ** ((b >> 4) - 12) for b in range(256)])
    nearest = np.abs(np.log(numbers.numpy())[:, None] - known).argmin(1)
    assert factor_bytes(numbers).tolist() == nearest.tolist()
    assert factor_bytes(torch.tensor([0.0, -1.0, math.inf])).tolist() == [0, 0, 255]


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("name", DTYPES)
def test_values_have_the_roundings_of_the_definition(name: str, device: str) -> None:
    rng = np.random.default_rng(1)
    rows, columns = (torch.from_numpy(rng.integers(60, 170, n, np.uint8)) for n in (37, 23))
    codes = torch.from_numpy(rng.integers(-40, 41, (37, 23)).astype(np.int16))
    for step in (0.1, 0.0037, 1e-6) if name[:2] == "F8" else (0.1, 1e-7, 1e-9):
        grid = Grid(step, rows, columns)
        steps = expected_steps(grid, 37, 23)
        exact = fp32(codes.numpy() * steps)
        values = grid.to(device).values(codes.to(device), DTYPES[name]).cpu()
        assert np.array_equal(grid.to(device).steps((37, 23)).cpu().double().numpy(), steps)
        if name in ("F32", "F64"):
            expected = exact
        elif name == "BF16":
            expected = fp32(exact).astype(np.float32).view(np.uint32)
            expected = (((expected + 0x7FFF + (expected >> 16 & 1)) >> 16) << 16).view(np.float32)
        else:
            limit = to_float64(
                np.arange(1 << FORMATS[name].bits - 1).astype(FORMATS[name].dtype), FORMATS[name]
            )
            exact = np.where(np.abs(exact) <= np.nanmax(limit[np.isfinite(limit)]), exact, 0)
            values = torch.where(torch.from_numpy(exact) == 0, 0, values.double())
            expected = nearest_even(exact, name)
        assert np.array_equal(values.double().numpy(), expected)


@pytest.mark.parametrize("device", devices)
def test_denormals_are_kept(device: str) -> None:
    least = Grid(2.0**-126, torch.tensor([0], dtype=torch.uint8), torch.tensor([0, 15], dtype=torch.uint8))
    grid = least.to(device)
    assert (grid.steps((1, 2)).cpu().double() * 2.0**149).tolist() == [[128, 248]]
    codes = torch.tensor([[1, -3]], dtype=torch.int16, device=device)
    values = grid.values(codes, torch.float32)
    assert (values.cpu().double() * 2.0**149).tolist() == [[128, -744]]
    assert torch.equal(grid.codes(values), codes)
    half = Grid(2.0**-26).to(device).values(torch.tensor([1, 2, 3, -6], device=device), torch.float16)
    assert (half.cpu().double() * 2.0**24).tolist() == [0, 0, 1, -2]  # halves to even


def test_a_code_of_0_is_positive_zero_and_negative_zero_gets_it() -> None:
    codes = Grid(0.5).codes(torch.tensor([-0.0, 0.0, -0.2, 0.25, 0.75, -0.75]))
    assert codes.tolist() == [0, 0, 0, 0, 2, -2]
    values = Grid(0.5).values(codes, torch.bfloat16)
    assert values.view(torch.int16).tolist()[:4] == [0, 0, 0, 0]
    assert values.tolist()[4:] == [1.0, -1.0]


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("name", [name for name in DTYPES if name[0] == "F" and FORMATS[name].bits < 32])
def test_a_negative_code_that_rounds_to_zero_keeps_its_sign_where_the_dtype_has_one(
    name: str, device: str
) -> None:
    codes = torch.tensor([-1, 0, 1], dtype=torch.int16, device=device)
    values = Grid(2.0**-126).values(codes, DTYPES[name]).cpu()
    pattern = values.view(torch.uint8 if values.element_size() == 1 else torch.int16).numpy()
    has_sign = not name.endswith("FNUZ")  # their pattern of -0 is NaN
    sign = 1 << FORMATS[name].bits - 1 if has_sign else 0
    assert pattern.view(FORMATS[name].dtype).tolist() == [sign, 0, 0]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0), (0, 3), (3, 5), (2, 2, 4), (6, 1)])
@pytest.mark.parametrize("factored", ["", "r", "c", "rc"])
@pytest.mark.parametrize("at_a_time", [3, 1000])
def test_shapes_and_ranges(
    shape: tuple[int, ...], factored: str, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "AT_A_TIME", at_a_time)
    count = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    rng = np.random.default_rng(len(shape))

    def some(n: int) -> Tensor:
        return torch.from_numpy(rng.integers(100, 150, n, np.uint8))

    grid = Grid(0.01, some(rows) if "r" in factored else None, some(count) if "c" in factored else None)
    weight = torch.from_numpy(rng.standard_normal(shape)).float()
    codes = grid.codes(weight)
    steps = grid.steps(shape)
    assert (codes.dtype, codes.shape, tuple(steps.shape)) == (torch.int16, weight.shape, (rows, count))
    assert torch.equal(codes, (weight.reshape(rows, count) / steps).round().to(torch.int16).reshape(shape))
    values = grid.values(codes, torch.float32)
    assert values.shape == weight.shape
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1, 1 + start % 3):
            part = grid.values_between(codes.flatten()[start:stop], start, shape, torch.float32)
            assert torch.equal(part, values.flatten()[start:stop])


def test_what_is_no_grid_is_refused() -> None:
    for step in (0.0, -1.0, math.nan, math.inf, 1e-39, 1e39):
        with pytest.raises(
            NeuzipError, match=re.escape(f"the step {step!r} is no positive, normal number of fp32")
        ):
            Grid(step)
    assert Grid(0.1).step == float(np.float32(0.1))
    for weight in (torch.tensor([1.0, 40000.0]), torch.tensor([math.nan]), torch.tensor([-math.inf])):
        with pytest.raises(NeuzipError, match="codes beyond -32768 to 32767 with the step 1"):
            Grid(1.0).codes(weight)
    with pytest.raises(ValueError, match="takes 2 row factors"):
        Grid(1.0, torch.zeros(3, dtype=torch.uint8)).steps((2, 3))
    with pytest.raises(ValueError, match="takes 3 column factors"):
        Grid(1.0, None, torch.zeros(3, dtype=torch.int16)).steps((2, 3))
