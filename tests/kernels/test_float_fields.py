"""Floats taken apart and put together: every pattern of every format, against plain integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuzip.kernels import float_fields as ff
from neuzip.kernels.float_fields import FORMATS, reference
from neuzip.kernels.float_fields.values import scale, to_float64

SIZES = [0, 1, 2, 7, 8, 9, 31, 255, 257, 4097]


def some_patterns(fmt: ff.FloatFormat, size: int, seed: int = 0) -> ff.Bits:
    """Random patterns, among them the special ones."""
    bits = np.random.default_rng(seed).integers(0, 1 << min(fmt.bits, 63), size, np.uint64).astype(fmt.dtype)
    special = [
        0,
        1 << (fmt.bits - 1),
        1,
        ff.largest_finite(fmt),
        (1 << fmt.bits) - 1,
        (1 << (fmt.bits - 1)) - 1,
    ]
    bits[: len(special)] = np.array(special, np.uint64).astype(fmt.dtype)[:size]
    return bits


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_split_and_merge_agree_with_the_reference_for_every_k(fmt: ff.FloatFormat) -> None:
    bits = some_patterns(fmt, 261)
    for kept in range(fmt.mantissa_bits + 1):
        exponents, planes = ff.split(bits, fmt, kept)
        expected_exponents, expected_planes = reference.split(bits.tolist(), fmt, kept)
        assert exponents.tolist() == expected_exponents
        assert {width: plane.tobytes() for width, plane in planes.items()} == expected_planes
        drop = fmt.mantissa_bits - kept
        assert (ff.merge(exponents, planes, fmt, kept) == bits >> drop << drop).all()


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_every_pattern_survives(name: str) -> None:
    fmt = FORMATS[name]
    bits = np.arange(1 << fmt.bits).astype(fmt.dtype)
    exponents, planes = ff.split(bits, fmt, fmt.mantissa_bits)
    assert ff.merge(exponents, planes, fmt, fmt.mantissa_bits).tobytes() == bits.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_ragged_sizes(size: int) -> None:
    for name, kept in (("BF16", 2), ("F16", 10), ("F32", 23), ("F64", 52)):
        fmt = FORMATS[name]
        bits = some_patterns(fmt, size) >> (fmt.mantissa_bits - kept) << (fmt.mantissa_bits - kept)
        exponents, planes = ff.split(bits, fmt, kept)
        assert sum(p.size for p in planes.values()) == sum(
            ff.plane_bytes(w, size) for w in ff.plane_widths(1 + kept)
        )
        assert ff.merge(exponents, planes, fmt, kept).tobytes() == bits.tobytes()


def test_a_strided_view_is_read_as_it_is_seen() -> None:
    fmt = FORMATS["BF16"]
    every_other = some_patterns(fmt, 512)[::2]
    exponents, planes = ff.split(every_other, fmt, 7)
    assert (ff.merge(exponents, planes, fmt, 7) == every_other).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_census_counts_exponents_pairs_and_used_bits(fmt: ff.FloatFormat) -> None:
    bits = some_patterns(fmt, 1001) >> 1 << 1
    counted = ff.census(bits, fmt)
    exponents = [(v >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1) for v in bits.tolist()]
    assert counted.exponents.tolist() == np.bincount(exponents, minlength=1 << fmt.exponent_bits).tolist()
    assert counted.kept_bits(fmt) == fmt.mantissa_bits - 1
    if counted.pairs is not None:
        for first, second in zip(exponents[0:1000:2], exponents[1:1000:2], strict=True):
            assert counted.pairs[first | second << 8] > 0
        assert int(counted.pairs.sum()) == 500
    halves = ff.census(bits[:500], fmt) + ff.census(bits[500:], fmt)
    assert (halves.exponents == counted.exponents).all()
    assert halves.mantissa_union == counted.mantissa_union


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_rounding_is_to_nearest_even_and_never_overflows(name: str) -> None:
    """Finite patterns against exact fractions: would catch round-half-up and a carry to infinity."""
    fmt = FORMATS[name]
    every = np.arange(1 << fmt.bits).astype(fmt.dtype)
    finite = every[~ff.non_finite(every, fmt)]
    chosen = finite if finite.size < 1000 else finite[:: finite.size // 997]
    chosen = np.concatenate([chosen, [ff.largest_finite(fmt)]]).astype(fmt.dtype)
    for kept in range(fmt.mantissa_bits + 1):
        rounded = ff.round_mantissa(chosen, fmt, kept)
        expected = [reference.round_mantissa(v, fmt, kept) for v in chosen.tolist()]
        if name.endswith("FNUZ"):
            expected = [0 if v == 1 << (fmt.bits - 1) else v for v in expected]
        assert rounded.tolist() == expected
        assert not ff.non_finite(rounded, fmt).any()


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.integers(0, 22))
@settings(max_examples=200, deadline=None)
def test_rounding_fp32_stays_within_half_a_step(patterns: list[int], kept: int) -> None:
    fmt = FORMATS["F32"]
    bits = np.array([p for p in patterns if (p >> 23) & 0xFF not in (0, 255)], np.uint32)
    rounded = ff.round_mantissa(bits, fmt, kept)
    before, after = to_float64(bits, fmt), to_float64(rounded, fmt)
    largest = to_float64(np.array([ff.largest_finite(fmt) >> (23 - kept) << (23 - kept)], np.uint32), fmt)
    inside = np.abs(before) <= largest
    assert (np.abs(after - before)[inside] <= np.abs(before[inside]) * 2.0 ** -(kept + 1)).all()
    assert (np.signbit(before) == np.signbit(after)).all()


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F64"])
def test_values_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    fmt = FORMATS[name]
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}[name]
    bits = some_patterns(fmt, 4096)
    expected = torch.from_numpy(bits.view(f"i{fmt.bits // 8}").copy()).view(dtype).double().numpy()
    assert np.array_equal(to_float64(bits, fmt), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_fp8_values_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, "float8_" + name[3:].lower() + ("fn" if name == "F8_E4M3" else ""))
    every = np.arange(256).astype(np.uint8)
    expected = torch.from_numpy(every.copy()).view(dtype).double().numpy()
    assert np.array_equal(to_float64(every, FORMATS[name]), expected, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_non_finite_patterns_are_those_without_a_finite_value(fmt: ff.FloatFormat) -> None:
    bits = np.arange(256).astype(np.uint8) if fmt.bits == 8 else some_patterns(fmt, 4096)
    assert (ff.non_finite(bits, fmt) == ~np.isfinite(to_float64(bits, fmt))).all()


def test_scaling_bf16_rounds_like_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(0x7F80).astype(np.uint16)
    factors = 1 + np.random.default_rng(1).integers(0, 256, bits.size) / 256
    wide = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    expected = (wide * torch.from_numpy(factors).float()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (scale(bits, factors, FORMATS["BF16"]) == expected).all()


def test_wrong_input_is_refused() -> None:
    fmt = FORMATS["BF16"]
    with pytest.raises(ValueError, match="uint16"):
        ff.split(np.zeros(4, np.uint32), fmt, 7)
    with pytest.raises(ValueError, match="mantissa bits"):
        ff.split(np.zeros(4, np.uint16), fmt, 8)
    exponents, planes = ff.split(np.zeros(4, np.uint16), fmt, 7)
    with pytest.raises(ValueError, match="plane"):
        ff.merge(exponents[:3], planes, fmt, 7)
