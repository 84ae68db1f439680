"""The quantisers: the printed equations to the last code, the best scale, storage that loses nothing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensors import gaussian
from torch import Tensor

from neuzip.kernels import quantizers as q
from neuzip.kernels.quantizers import magnitudes

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "quantizers"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKEN_QUANTIZERS = [
    q.int8_absmax, q.int4_absmean, q.int4_absmax, q.fp4_e2m1, q.fp4_e1m2, q.top_k_int8,
]  # fmt: skip
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12]

floats = st.floats(-1e4, 1e4, width=32)
devices = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cases(name: str) -> list[Any]:
    """The cases of a golden file, named by what they show."""
    loaded = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return [
        pytest.param(one, id=f"{one.get('function', one.get('form'))}: {one.get('name', len(one['codes']))}")
        for one in loaded
    ]


def from_patterns(patterns: list[Any], dtype: str) -> Tensor:
    kind = np.uint32 if dtype == "fp32" else np.uint16
    signed = np.int32 if dtype == "fp32" else np.int16
    return torch.from_numpy(np.array(patterns, kind).view(signed)).view(DTYPES[dtype])


def to_patterns(x: Tensor) -> list[Any]:
    """The bit patterns of fp32, as nested lists."""
    assert x.dtype == torch.float32
    return x.cpu().contiguous().numpy().view(np.uint32).tolist()


@pytest.fixture(scope="module")
def maker(root: Path) -> ModuleType:
    """The script that writes the golden files."""
    path = root / "tests" / "golden" / "make_quantizers.py"
    spec = importlib.util.spec_from_file_location("make_quantizers", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Golden vectors: exact rational numbers from the printed equations.


def test_golden_files_are_what_their_script_writes(maker: ModuleType):
    for name, text in maker.files().items():
        assert (GOLDEN / name).read_text(encoding="utf-8") == text, name


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("case", cases("ternary"))
def test_ternary_weights_are_those_of_the_equation(case: dict[str, Any], device: str):
    weight = from_patterns(case["input"], case["dtype"]).to(device)
    ternary = getattr(q, case["function"])(weight, **case["options"])
    assert ternary.codes.dtype == torch.int8 and ternary.scale.dtype == torch.float32
    assert ternary.codes.tolist() == case["codes"]
    assert to_patterns(ternary.scale) == case["scale"]


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("case", cases("activations"))
def test_activations_are_those_of_the_equation(case: dict[str, Any], device: str):
    x = from_patterns(case["input"], case["dtype"]).to(device)
    tokens = getattr(q, case["function"])(x, **case["options"])
    assert tokens.codes.dtype == torch.int8 and tokens.scale.dtype == torch.float32
    assert tokens.codes.tolist() == case["codes"]
    # sqrt(7) is not a number of fp32: both it and the quotient are rounded.
    units = 2 if case["function"] == "int4_absmean" else 0
    assert np.abs(np.subtract(to_patterns(tokens.scale), case["scale"])).max() <= units


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("case", cases("heads"))
def test_heads_are_those_of_the_equation(case: dict[str, Any], device: str):
    x = from_patterns(case["input"], case["dtype"]).to(device)
    bits = case["options"]["bits"]
    bits = torch.tensor(bits, device=device) if isinstance(bits, list) else bits
    heads = q.quantize_heads(x, bits, span=case["options"]["span"])
    assert heads.codes.dtype == torch.uint8
    assert heads.codes.tolist() == case["codes"]
    assert to_patterns(heads.scale) == case["scale"]
    assert (None if heads.low is None else to_patterns(heads.low)) == case["low"]


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("case", cases("packed"))
def test_packed_codes_lie_where_they_are_said_to(case: dict[str, Any], device: str):
    codes, packed, n = case["codes"], case["packed"], len(case["codes"])
    if case["form"] == "trits":
        made = q.pack_trits(torch.tensor(codes, dtype=torch.int8, device=device))
        assert made.tolist() == packed
        assert q.unpack_trits(made, n).tolist() == codes
        return
    if case["form"] == "ternary":
        made = q.pack_ternary(torch.tensor(codes, dtype=torch.int8, device=device))
        back = q.unpack_ternary(made, n)
    else:
        bits = int(case["form"][0])
        made = q.pack(torch.tensor(codes, dtype=torch.uint8, device=device), bits)
        back = q.unpack(made, bits, n)
    assert made.cpu().numpy().view(np.uint32).tolist() == packed
    assert back.tolist() == codes


# What they all promise.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_gpu_gives_the_same_bits(dtype: torch.dtype):
    x = gaussian(7, 4099, dtype=dtype) * torch.logspace(-3, 3, 7)[:, None].to(dtype)
    for quantizer in TOKEN_QUANTIZERS:
        here, there = quantizer(x), quantizer(x.cuda())
        assert same_bits(here.codes, there.codes.cpu()) and same_bits(here.scale, there.scale.cpu())
    for group in (None, 128, 4099):
        for quantizer in (q.absmean, q.least_squares):
            here, there = quantizer(x, group=group), quantizer(x.cuda(), group=group)
            assert same_bits(here.codes, there.codes.cpu()) and same_bits(here.scale, there.scale.cpu())
    for span in ("absmax", "minmax"):
        here, there = q.quantize_heads(x, 3, span=span), q.quantize_heads(x.cuda(), 3, span=span)
        assert same_bits(here.codes, there.codes.cpu()) and same_bits(here.scale, there.scale.cpu())


@pytest.mark.parametrize(
    "quantizer", [q.absmean, q.least_squares, *TOKEN_QUANTIZERS, lambda x: q.quantize_heads(x, 3)]
)
def test_other_dtypes_and_numbers_without_axes_are_refused(quantizer: Callable[[Tensor], Any]):
    with pytest.raises(TypeError, match=r"bf16, fp16 or fp32, not torch\.float64"):
        quantizer(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"not torch\.int8"):
        quantizer(torch.zeros(3, dtype=torch.int8))
    with pytest.raises(ValueError, match="at least one axis"):
        quantizer(torch.tensor(1.0))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_strides_make_no_difference(dtype: torch.dtype):
    x = gaussian(24, 3, 40, dtype=dtype)
    for strided in (x.transpose(0, 2), x[::2, :, ::3], x[:, :1].expand(24, 3, 40)):
        for quantizer in TOKEN_QUANTIZERS:
            one, other = quantizer(strided), quantizer(strided.contiguous())
            assert same_bits(one.codes, other.codes) and same_bits(one.scale, other.scale)
        for group in (None, 7):
            for weights in (q.absmean, q.least_squares):
                first, second = weights(strided, group=group), weights(strided.contiguous(), group=group)
                assert same_bits(first.codes, second.codes) and same_bits(first.scale, second.scale)
        heads, others = q.quantize_heads(strided, 4), q.quantize_heads(strided.contiguous(), 4)
        assert same_bits(heads.codes, others.codes) and same_bits(heads.scale, others.scale)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_mean_is_exact_and_has_no_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    x = gaussian(3, 1001, dtype=dtype) * 10
    mean = magnitudes.mean(x)
    for row, found in zip(x.double().tolist(), mean[:, 0], strict=True):
        exact = sum(map(Fraction, map(abs, row)), Fraction(0)) / len(row)
        assert found == torch.tensor(float(exact), dtype=torch.float64).float()
    assert same_bits(mean, magnitudes.mean(x[:, torch.randperm(1001)]))
    monkeypatch.setattr(magnitudes, "AT_A_TIME", 10)
    assert same_bits(mean, magnitudes.mean(x))


@pytest.mark.parametrize(("peak", "above"), [(0.75, 0), (0.5, 0), (127.0, 7), (128.0, 8), (0.49, -1)])
def test_the_mean_is_cut_off_40_bits_below_a_power_of_two_above_the_largest(peak: float, above: int):
    unit = 2.0 ** (above - 40)
    for small, counted in ((unit, unit), (1.75 * unit, unit), (0.75 * unit, 0)):
        alone = torch.tensor([[peak, *[small] * 4095]])
        exact = (alone[0, 0].item() + 4095 * counted) / 4096
        assert magnitudes.mean(alone).item() == torch.tensor(exact, dtype=torch.float64).float().item()


@pytest.mark.parametrize(
    ("n", "bits"), [(1, 40), (1 << 14, 40), (1 << 15, 39), (1 << 17, 37), (1 << 25, 37), ((1 << 25) + 1, 36)]
)
def test_of_more_magnitudes_fewer_bits_are_added(n: int, bits: int):
    assert magnitudes.sum_bits(n) == bits
    assert magnitudes.unit(torch.ones(1), n).item() == 2.0 ** (bits - 1)


@given(st.floats(2**-149, 2.0**127, width=32), st.integers(1, 1 << 26))
def test_magnitudes_have_as_many_bits_as_they_may(peak: float, n: int):
    unit = magnitudes.unit(torch.tensor([peak]), n).item()
    bits = magnitudes.sum_bits(n)
    assert 2.0 ** (bits - 1) <= peak * unit < 2.0**bits


@pytest.mark.parametrize("peak", [1e-45, 1.2e-38, 1.0, 65504.0, 3e38])
def test_the_mean_of_equal_numbers_is_that_number(peak: float):
    x = torch.full((2, 77), peak)
    assert same_bits(magnitudes.mean(x), x[:, :1])


def test_a_mean_of_nothing_is_zero_and_of_anything_not_finite_is_nan():
    assert magnitudes.mean(torch.ones(2, 0)).tolist() == [[0], [0]]
    assert magnitudes.mean(torch.ones(0, 3)).shape == (0, 1)
    bad = torch.tensor([[1, torch.nan], [torch.inf, 1], [1, 3]])
    for mean in (magnitudes.mean, magnitudes.mean_by_fours):
        assert mean(torch.ones(2, 0)).tolist() == [[0], [0]]
        assert mean(torch.ones(0, 3)).shape == (0, 1)
        assert mean(bad).isnan()[:, 0].tolist() == [True, True, False]


def mean_by_fours(row: np.ndarray) -> np.float32:
    """Step by step, as a kernel goes: from one unit to the next, until the total is small enough."""
    size = np.abs(np.concatenate([row, np.zeros(-len(row) % 4)]).astype(np.float32)).reshape(-1, 4)
    with np.errstate(over="ignore", under="ignore"):
        runs = ((size[:, 0] + size[:, 1]) + (size[:, 2] + size[:, 3])).tolist()
        if not all(map(math.isfinite, runs)):
            return np.float32(math.nan)
        unit = (len(row) - 1).bit_length() - 41
        while (total := sum(int(Fraction(run) / Fraction(2) ** unit) for run in runs)) >= 1 << 44:
            if unit >= 72:
                return np.float32(math.nan)
            unit += 11
        return np.float32(total) * np.float32(1 / len(row)) * np.float32(2.0**unit)


@given(
    x=hnp.arrays(np.float32, st.integers(1, 40), elements=floats), power=st.integers(-140, 130),
    dtype=st.sampled_from(list(DTYPES.values())),
)  # fmt: skip
def test_means_by_fours_are_those_of_their_steps(x: np.ndarray, power: int, dtype: torch.dtype):
    row = torch.from_numpy(x).mul(2.0**power).to(dtype)
    found = magnitudes.mean_by_fours(row)
    assert same_bits(found, torch.tensor([mean_by_fours(row.float().numpy())]))


def below_the_limit_once_cut(n: int, part: float) -> list[float]:
    """More than 2**44 units, but for what is cut off: of most fours a part of one; of the next unit, all."""
    unit, count = 2.0 ** magnitudes.first_unit(n), n // 4 - 96
    large = (1 << 44) + int(count * part * 0.75) - int(count * (2000 + part))
    rest = large % (1 << 20)  # both have 24 bits
    runs = [*[2000 + part] * count, large - rest, rest, *[0.0] * 94]
    return [number * unit for run in runs for number in (run, 0, 0, 0)]


@pytest.mark.parametrize(
    ("row", "mean"),
    [
        ([32.0, 0, 0, 0], 8), ([32 - 2.0**-19, 0, 0, 0], 8 - 2.0**-21), ([2.0**118], 2.0**118),
        ([2.0**123], 2.0**123), ([2.0**124], math.nan), (below_the_limit_once_cut(1 << 14, 0.5), 8),
        (below_the_limit_once_cut(1 << 17, 1 - 2.0**-10), 8),
    ],
    ids=["at the limit", "below it", "large", "the largest", "too large", "below it once cut", "far below"],
)  # fmt: skip
def test_the_unit_is_the_first_that_does(row: list[float], mean: float):
    found = magnitudes.mean_by_fours(torch.tensor([row, row]))
    assert same_bits(found, torch.tensor([[mean], [mean]], dtype=torch.float32))
    assert np.array_equal(mean_by_fours(np.array(row)), np.float32(mean), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_mean_by_fours_is_nearly_exact_and_runs_have_no_order(dtype: torch.dtype, monkeypatch):
    x = gaussian(3, 1004, dtype=dtype) * 10
    mean = magnitudes.mean_by_fours(x)
    exact = x.double().abs().mean(-1, keepdim=True)
    assert ((mean / exact - 1).abs() < 2.0**-22).all()
    turned = x.unflatten(-1, (-1, 4))[:, torch.randperm(251)].flatten(-2)
    assert same_bits(mean, magnitudes.mean_by_fours(turned))
    monkeypatch.setattr(magnitudes, "AT_A_TIME", 10)
    assert same_bits(mean, magnitudes.mean_by_fours(x))


# Ternary weights.


def error(weight: Tensor, ternary: q.Ternary) -> Fraction:
    """The exact sum of squares of what a scale and codes leave."""
    values = (ternary.codes.double() * ternary.spread().double()).flatten().tolist()
    pairs = zip(weight.double().flatten().tolist(), values, strict=True)
    return sum(((Fraction(w) - Fraction(v)) ** 2 for w, v in pairs), Fraction(0))


def best_error(weights: list[float]) -> Fraction:
    """Over all codes, each with the scale that is best for it."""
    exact = [Fraction(w) for w in weights]
    total, least = sum(w * w for w in exact), None
    for codes in itertools.product((-1, 0, 1), repeat=len(weights)):
        along, size = sum(c * w for c, w in zip(codes, exact, strict=True)), sum(map(abs, codes))
        left = total - (along**2 / size if size else 0)
        least = left if least is None else min(least, left)
    return Fraction(least or 0)


@pytest.mark.slow
@given(hnp.arrays(np.float32, st.integers(1, 6), elements=st.floats(-4, 4, width=16)))
def test_no_codes_and_scale_leave_less_than_least_squares(weights: np.ndarray):
    for dtype in DTYPES.values():
        weight = torch.from_numpy(weights).to(dtype)
        total = sum((Fraction(w) ** 2 for w in weight.double().tolist()), Fraction(0))
        left = error(weight, q.least_squares(weight))
        assert left <= best_error(weight.double().tolist()) + total * Fraction(1, 1 << 40)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=floats))
def test_least_squares_stays_where_alternation_stays(weights: np.ndarray):
    ternary = q.least_squares(torch.from_numpy(weights))
    exact, codes = [Fraction(w) for w in weights.tolist()], ternary.codes.tolist()
    number = sum(map(abs, codes))
    if number == 0:
        assert not weights.any() and ternary.scale == 0
        return
    scale = sum(c * w for c, w in zip(codes, exact, strict=True)) / number
    assert float(ternary.scale) == pytest.approx(float(scale), rel=2**-23, abs=2**-149)
    for code, w in zip(codes, exact, strict=True):
        assert (abs(w) > scale / 2) == (code != 0) or abs(abs(w) * 2 / scale - 1) < Fraction(1, 10**9)
        assert code * w >= 0


@pytest.mark.parametrize("start", [0.3, 1.0, 1.6, 2.5])
def test_alternation_from_anywhere_is_no_better(start: float):
    weight = gaussian(1, 400, seed=3).pow(3)  # heavy tails have more than one place to stop
    scale = start * weight.abs().mean()
    for _ in range(100):
        codes = (weight / scale).round().clamp(-1, 1)
        scale = (weight * codes).sum() / codes.abs().sum()
    left = (weight - scale * codes).double().square().sum()
    assert float(error(weight, q.least_squares(weight))) <= left * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 7, 2000])
def test_least_squares_counts_and_sorts_to_the_same(
    n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    from neuzip.kernels.quantizers import ternary

    weight = gaussian(n, seed=4, dtype=dtype) * 0.02
    sorted_ = q.least_squares(weight)
    monkeypatch.setattr(ternary, "COUNTED", 0)
    counted = q.least_squares(weight)
    assert same_bits(counted.codes, sorted_.codes) and same_bits(counted.scale, sorted_.scale)


def test_least_squares_leaves_what_theory_says_of_gaussian_weights():
    weight = gaussian(200, 500, seed=5)
    norm = weight.square().sum()
    absmean, least = (f(weight).dequantize() for f in (q.absmean, q.least_squares))
    assert ((weight - absmean).square().sum() / norm).item() == pytest.approx(0.2636, abs=0.003)
    assert ((weight - least).square().sum() / norm).item() == pytest.approx(0.1902, abs=0.003)


@pytest.mark.parametrize("quantizer", [q.absmean, q.least_squares])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(6, 40), (1, 1), (3, 1), (2, 3, 17), (13,), (0, 5), (5, 0), (0,)], ids=str)
def test_groups_are_quantised_alone(
    quantizer: Callable[..., q.Ternary], dtype: torch.dtype, shape: tuple[int, ...]
):
    weight = gaussian(*shape, seed=6, dtype=dtype)
    whole = quantizer(weight)
    assert whole.codes.shape == shape and whole.scale.shape == ()
    for group in (1, 8, 40, 64):
        ternary = quantizer(weight, group=group)
        assert ternary.codes.shape == shape
        assert ternary.scale.shape == (*shape[:-1], -(-shape[-1] // group))
        assert ternary.dequantize().shape == shape
        for i, start in enumerate(range(0, shape[-1], group)):
            for row in np.ndindex(shape[:-1]):
                alone = quantizer(weight[row][start : start + group])
                assert same_bits(ternary.codes[row][start : start + group], alone.codes)
                assert ternary.scale[row][i] == alone.scale


def test_blocks_do_not_change_what_is_found(monkeypatch: pytest.MonkeyPatch):
    from neuzip.kernels.quantizers import ternary

    weight = gaussian(9, 33, seed=7, dtype=torch.bfloat16)
    before = [f(weight, group=g) for f in (q.absmean, q.least_squares) for g in (None, 8)]
    for module in (magnitudes, ternary):
        monkeypatch.setattr(module, "AT_A_TIME", 10)
    after = [f(weight, group=g) for f in (q.absmean, q.least_squares) for g in (None, 8)]
    assert all(
        same_bits(a.codes, b.codes) and same_bits(a.scale, b.scale)
        for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantizer", [q.absmean, q.least_squares])
def test_weights_that_are_not_finite_are_refused(quantizer: Callable[..., q.Ternary], bad: float):
    for group in (None, 2):
        with pytest.raises(ValueError, match="the weights hold NaN or infinity"):
            quantizer(torch.tensor([[1.0, bad, 2.0]]), group=group)


def test_senseless_options_are_refused():
    with pytest.raises(ValueError, match="at least one weight, not 0"):
        q.absmean(torch.ones(2), group=0)
    for quantizer in (q.absmean, q.int8_absmax, q.int4_absmean, q.int4_absmax, q.top_k_int8):
        for epsilon in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="has to be above 0"):
                quantizer(torch.ones(2), epsilon=epsilon)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e20, 3e38])
def test_least_squares_knows_no_size(size: float):
    signs = torch.tensor([[1.0, -1, 0, 1], [0, 0, 1, -1]])
    ternary = q.least_squares(signs * size)
    assert torch.equal(ternary.codes, signs.to(torch.int8))
    assert ternary.scale == torch.tensor(size)


def test_absmean_of_huge_weights_does_not_overflow_and_epsilon_hides_denormal_ones():
    assert q.absmean(torch.tensor([3e38, -3e38, 1e38])).codes.tolist() == [1, -1, 0]
    denormal = torch.tensor([1e-40, -1e-40, 2e-41])
    assert q.absmean(denormal).codes.tolist() == [0, 0, 0]
    assert q.absmean(denormal, epsilon=1e-60).codes.tolist() == [1, -1, 0]


@pytest.mark.parametrize("group", [None, 16, 50])
def test_quantising_again_finds_the_codes_but_for_absmean_a_smaller_scale(group: int | None):
    weight = gaussian(20, 50, seed=8) * 0.02
    once = q.absmean(weight, group=group)
    twice = q.absmean(once.dequantize(), group=group)
    assert torch.equal(once.codes, twice.codes)
    if group is None:
        density = (once.codes != 0).double().mean()
        assert twice.scale.item() == pytest.approx((once.scale * density).item(), rel=1e-6) and density < 0.75
    least = q.least_squares(weight, group=group)
    again = q.least_squares(least.dequantize(), group=group)
    assert same_bits(least.codes, again.codes) and same_bits(least.scale, again.scale)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("group", [None, 16, 50])
@pytest.mark.parametrize("quantizer", [q.absmean, q.least_squares])
def test_an_absmean_reader_finds_the_scale_that_was_meant(
    quantizer: Callable[..., q.Ternary], group: int | None, dtype: torch.dtype
):
    ternary = quantizer(gaussian(20, 50, seed=9) * 0.02, group=group)
    stored = q.scale_for_absmean_reader(ternary, dtype)
    assert stored.dtype == dtype and stored.shape == ternary.scale.shape
    written = q.Ternary(ternary.codes, stored.float(), group).dequantize(dtype)
    for clamped in (False, True):
        read = q.absmean(written, group=group, clamped=clamped)
        assert torch.equal(read.codes, ternary.codes)
        tolerance = torch.finfo(dtype).eps / 2 + 2**-23
        assert ((read.scale / ternary.scale - 1).abs() <= tolerance).all()
    if dtype != torch.float32:  # what is written once is written again
        assert torch.equal(q.scale_for_absmean_reader(read, dtype), stored)


@pytest.mark.parametrize("group", [None, 2])
def test_zeros_stay_zeros(group: int | None):
    for quantizer in (q.absmean, q.least_squares):
        ternary = quantizer(torch.zeros(3, 5), group=group)
        assert not ternary.codes.any() and not ternary.scale.any()
        assert not ternary.dequantize().any()
        assert not q.scale_for_absmean_reader(ternary).any()
    mixed = q.least_squares(torch.tensor([[0.0, 0, 1, -1]]), group=2)
    assert mixed.scale.tolist() == [[0, 1]]
    assert q.scale_for_absmean_reader(mixed).tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_weights_that_are_ternary_already_are_recognised_bit_for_bit(dtype: torch.dtype):
    codes = torch.tensor([[1, 0, -1, -1], [0, 0, 1, 0]], dtype=torch.int8)
    weight = (codes * torch.tensor(0.0123)).to(dtype)
    found = q.exact(weight)
    assert found is not None and torch.equal(found.codes, codes)
    assert found.dequantize(dtype).view(torch.uint8).tolist() == weight.view(torch.uint8).tolist()
    by_row = weight * torch.tensor([[1.0], [3.0]]).to(dtype)
    assert q.exact(by_row) is None
    rows = q.exact(by_row, group=4)
    assert rows is not None and torch.equal(rows.dequantize(dtype), by_row)
    assert q.exact(torch.zeros(2, 2, dtype=dtype)) is not None


@pytest.mark.parametrize("value", [-0.0, 0.5, torch.nan, torch.inf])
def test_weights_that_are_almost_ternary_are_not_exact(value: float):
    assert q.exact(torch.tensor([[1.0, -1.0, 0.0, value]])) is None


@pytest.mark.slow
def test_the_clamped_form_gives_the_integers_of_transformers():
    bitnet = pytest.importorskip("transformers.integrations.bitnet")
    weight, x = gaussian(40, 64, seed=10) * 0.02, gaussian(5, 64, seed=11)
    x[0] *= 1e-6
    layer = bitnet.BitLinear(64, 4, bias=False)
    with torch.compiler.set_stance("force_eager"):
        theirs = bitnet.WeightQuant.apply(weight)
        codes, inverse = layer.activation_quant(x)
    ours, tokens = q.absmean(weight, clamped=True), q.int8_absmax(x, clamped=True)
    assert torch.equal(theirs.sign().to(torch.int8), ours.codes)
    assert torch.allclose(theirs, ours.dequantize(), rtol=1e-6, atol=0)
    assert torch.equal(codes, tokens.codes)
    assert torch.allclose(1 / inverse, tokens.scale, rtol=1e-6, atol=0)


# Activations.


@pytest.mark.parametrize("quantizer", TOKEN_QUANTIZERS)
@given(x=hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=floats))
def test_tokens_are_quantised_alone_and_in_range(quantizer: Callable[..., q.QuantizedTokens], x: np.ndarray):
    tokens = quantizer(torch.from_numpy(x))
    assert tokens.codes.shape == x.shape and tokens.scale.shape == (*x.shape[:-1], 1)
    ranges = {
        q.int4_absmean: (-8, 7), q.fp4_e2m1: (-12, 12), q.int4_absmax: (-7, 7), q.fp4_e1m2: (-7, 7),
    }  # fmt: skip
    low, high = ranges.get(quantizer, (-127, 127))
    assert low <= tokens.codes.min() and tokens.codes.max() <= high
    assert tokens.scale.isfinite().all()
    for row in np.ndindex(x.shape[:-1]):
        alone = quantizer(torch.from_numpy(x[row].copy()))
        assert same_bits(alone.codes, tokens.codes[row]) and same_bits(alone.scale, tokens.scale[row])


@given(x=hnp.arrays(np.float32, st.integers(1, 40), elements=floats))
def test_int8_is_half_a_step_off_at_most(x: np.ndarray):
    row = torch.from_numpy(x)
    tokens = q.int8_absmax(row, clamped=True)
    assert ((tokens.dequantize() - row).abs() <= tokens.scale * (0.5 + 1e-4)).all()


@given(x=hnp.arrays(np.float16, st.integers(1, 40), elements=st.floats(-1e3, 1e3, width=16)))
def test_fp4_takes_the_nearest_of_its_numbers(x: np.ndarray):
    for dtype in (torch.float16, torch.bfloat16):
        row = torch.from_numpy(x).to(dtype)
        exact = [Fraction(v) for v in row.double().tolist()]
        peak = max(map(abs, exact))
        for v, code in zip(exact, q.fp4_e2m1(row).codes.tolist(), strict=True):
            y = abs(12 * v / peak) if peak else Fraction(0)
            off = {number: abs(number - y) for number in E2M1}
            nearest = [number for number in E2M1 if off[number] == min(off.values())]
            # Of two the one of an even mantissa, as numbers alternate.
            assert abs(code) == min(nearest, key=lambda number: E2M1.index(number) % 2)
            assert code * v >= 0


@pytest.mark.parametrize("device", devices)
def test_fp4_of_16_bits_is_right_to_the_last_half(device: str):
    mantissas = np.arange(128, 256)
    sizes = np.concatenate([mantissas << e for e in range(7)])  # bf16 holds them
    for peak in (mantissas << 6).tolist():
        row = sizes[sizes <= peak]
        y = 12 * row  # over the peak: compared in integers
        step = np.where(y < 4 * peak, 1, np.where(y < 8 * peak, 2, 4))
        down, rest = np.divmod(y, step * peak)
        wanted = (down + (2 * rest + down % 2 > step * peak)) * step
        x = torch.from_numpy(row).to(torch.bfloat16).to(device)
        assert torch.equal(x.long().cpu(), torch.from_numpy(row))
        x = torch.cat([x, torch.full_like(x[:1], peak)])
        assert q.fp4_e2m1(-x).codes.tolist() == [*(-wanted).tolist(), -12]


def test_fp4_numbers_times_two_are_what_bits_of_e2m1_stand_for():
    def number(bits: int) -> float:
        exponent, mantissa = bits >> 1 & 3, bits & 1
        return mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)

    row = torch.tensor([number(bits) for bits in range(8)])
    tokens = q.fp4_e2m1(row)
    assert tokens.codes.tolist() == [2 * n for n in row.tolist()] == E2M1
    assert tokens.scale.item() == 0.5
    assert torch.equal(tokens.dequantize(), row)


def test_gaussian_tokens_lose_what_was_found_for_each_form():
    x = gaussian(64, 4096, seed=12)
    lost = {
        f.__name__: ((f(x).dequantize() - x).square().sum() / x.square().sum()).item()
        for f in TOKEN_QUANTIZERS
    }
    assert lost["int8_absmax"] == pytest.approx(7.5e-5, rel=0.1)
    assert lost["int4_absmean"] == pytest.approx(0.0132, rel=0.05)
    assert lost["fp4_e2m1"] == pytest.approx(0.0142, rel=0.05)
    assert lost["int4_absmax"] == pytest.approx(0.0248, rel=0.05)
    assert lost["fp4_e1m2"] == pytest.approx(lost["int4_absmax"], rel=1e-3)
    assert lost["top_k_int8"] == pytest.approx(1 - 0.9283, rel=0.02)


@given(x=hnp.arrays(np.float16, st.integers(1, 40), elements=st.floats(-1e3, 1e3, width=16)))
def test_4_bit_forms_of_the_ablations_are_those_of_the_equations(x: np.ndarray):
    """Equations (8) and (9) in fp64, with E = 1 and M = 2, and (3) with 7 in place of 127."""
    row = torch.from_numpy(x).float()
    peak = float(np.abs(x).max(initial=0))
    if not peak:
        assert not q.fp4_e1m2(row).codes.any() and not q.int4_absmax(row).codes.any()
        return
    bias = math.log2((2 - 2**-2) / peak) + 2**1 - 1
    near_halves = np.abs(np.abs(7 * x.astype(np.float64) / peak) % 1 - 0.5) < 1e-3
    gammas = [2.0 ** max(math.floor(math.log2(abs(v)) + bias), 1) if v else 2.0 for v in row.tolist()]
    steps = np.array(gammas) / 2 ** (2 + bias)
    expected = np.round(x.astype(np.float64) / steps) * steps
    back = q.fp4_e1m2(row).dequantize(torch.float32).numpy()
    assert np.allclose(back[~near_halves], expected[~near_halves], rtol=1e-5, atol=1e-6 * peak)
    tokens = q.int4_absmax(row)
    codes = np.clip(np.round(7 / (peak + q.EPSILON) * x.astype(np.float64)), -8, 7)
    safe = ~near_halves & (np.abs(np.abs(7 / (peak + q.EPSILON) * x) % 1 - 0.5) > 1e-3)
    assert (tokens.codes.numpy() == codes)[safe].all()
    assert tokens.scale.item() == pytest.approx(peak / 7, rel=1e-6)


def test_e1m2_numbers_times_two_are_the_codes():
    row = torch.tensor([bits / 2 for bits in range(8)])
    tokens = q.fp4_e1m2(row)
    assert tokens.codes.tolist() == list(range(8)) and tokens.scale.item() == 0.5
    assert torch.equal(tokens.dequantize(), row)
    assert q.fp4_e1m2(torch.tensor([0.5, -1.5, 7.0])).codes.tolist() == [0, -2, 7]  # halves to even


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantizer", TOKEN_QUANTIZERS)
def test_a_token_that_is_not_finite_comes_back_as_nan_and_no_other_does(
    quantizer: Callable[..., q.QuantizedTokens], bad: float
):
    x = gaussian(3, 8, seed=13)
    x[1, 3] = bad
    tokens = quantizer(x)
    assert not tokens.codes[1].any()
    assert tokens.scale.isnan()[:, 0].tolist() == [False, True, False]
    assert tokens.dequantize().isnan().all(-1).tolist() == [False, True, False]
    assert tokens.dequantize()[[0, 2]].isfinite().all()


@pytest.mark.parametrize("quantizer", TOKEN_QUANTIZERS)
def test_empty_zero_denormal_and_huge_tokens(quantizer: Callable[..., q.QuantizedTokens]):
    assert quantizer(torch.zeros(0, 4)).codes.shape == (0, 4)
    assert quantizer(torch.zeros(2, 0)).scale.tolist() == [[0], [0]]
    zeros = quantizer(torch.tensor([[0.0, -0.0]], dtype=torch.bfloat16))
    assert zeros.codes.tolist() == [[0, 0]] and zeros.scale.item() == 0
    assert quantizer(torch.tensor([[1e-45, -1e-40, 1e-39]])).codes.tolist() == [[0, 0, 0]]
    most = 2e34 if quantizer is q.int4_absmean else 3.4e38
    huge = quantizer(torch.tensor([[most, -most, 0.0]]))
    assert huge.codes[0, 0] > 0 > huge.codes[0, 1] and huge.scale.isfinite().all()
    one = quantizer(torch.tensor([[2.5]]))
    assert one.dequantize().item() == pytest.approx(2.5, rel=0.25)


def test_int4_has_no_scale_for_what_it_cannot_add_up():
    huge = q.int4_absmean(torch.tensor([[3.4e38, 3.4e38, 0.0], [1e38, 1.0, 0.0]]))
    assert huge.codes.tolist() == [[0, 0, 0]] * 2 and huge.scale.isnan().all()


@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-3, 3, width=32)),
    st.sampled_from([1, 100.0]),
)
def test_int4_takes_the_nearest_code_but_for_those_next_to_the_middle(x: np.ndarray, factor: float):
    x[0] *= factor
    tokens = q.int4_absmean(torch.from_numpy(x))
    divisor = Fraction(tokens.scale.item()) + Fraction(q.EPSILON) / Fraction(7**0.5)
    for value, code in zip(x.tolist(), tokens.codes.tolist(), strict=True):
        exact = min(max(Fraction(value) / divisor, Fraction(-8)), Fraction(7))
        assert abs(exact - code) <= Fraction(1, 2) + Fraction(1, 1 << 19)


def test_fp4_works_down_to_the_smallest_peak_it_sees():
    peak = 2.0**-122
    row = torch.tensor([[peak, peak / 2, -peak / 12, peak / 30]])
    assert q.fp4_e2m1(row).codes.tolist() == [[12, 6, -1, 0]]
    assert q.fp4_e2m1(row / 2).codes.tolist() == [[0, 0, 0, 0]]


@given(
    x=hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.integers(-3, 3)),
    share=st.floats(0.01, 1),
)
def test_top_k_keeps_the_share_of_the_largest_and_the_first_of_equals(x: np.ndarray, share: float):
    mask = q.top_k_mask(torch.from_numpy(x), share)
    kept = max(1, int(share * x.shape[1] + 0.5))
    for row, found in zip(x, mask, strict=True):
        order = sorted(range(row.size), key=lambda i: (-abs(row[i]), i))
        assert sorted(order[:kept]) == found.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_top_k_of_a_senseless_share_is_refused(share: float):
    with pytest.raises(ValueError, match=r"above 0, at most 1"):
        q.top_k_mask(torch.ones(4), share)


def test_top_k_of_nothing_is_nothing():
    assert q.top_k_mask(torch.ones(2, 0)).shape == (2, 0)
    assert q.top_k_mask(torch.ones(0, 3)).shape == (0, 3)


def test_squared_relu():
    assert q.squared_relu(torch.tensor([-2.0, 0, 3])).tolist() == [0, 0, 9]


# Heads.


@pytest.mark.parametrize("span", ["absmax", "minmax"])
@pytest.mark.parametrize("scale_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_heads_are_half_a_step_off_at_most(bits: int, scale_dtype: torch.dtype, span: Any):
    x = gaussian(2, 3, 50, 64, seed=14)
    heads = q.quantize_heads(x, bits, span=span, scale_dtype=scale_dtype)
    assert heads.codes.max() == (1 << bits) - 1 and heads.codes.min() == 0
    assert heads.scale.dtype == scale_dtype and heads.scale.shape == (2, 3, 50, 1)
    off = (heads.dequantize() - x).abs() / heads.scale.float()
    # A scale that was rounded down cuts the ends of the range.
    assert off.max() <= 0.5 + torch.finfo(scale_dtype).eps * (1 << bits) + 1e-4


def test_gaussian_heads_lose_less_from_least_to_largest():
    x = gaussian(500, 64, seed=15)

    def lost(bits: int, span: Any) -> float:
        return (
            (q.quantize_heads(x, bits, span=span).dequantize() - x).square().sum() / x.square().sum()
        ).item()

    assert lost(3, "minmax") < 0.95 * lost(3, "absmax") < 0.05
    assert lost(4, "absmax") < lost(3, "absmax") / 4
    assert lost(8, "absmax") < 1e-4


@pytest.mark.parametrize("span", ["absmax", "minmax"])
def test_bits_may_differ_from_token_to_token(span: Any):
    x = gaussian(2, 3, 5, 16, seed=16)  # batch, heads, tokens, width
    bits = torch.tensor([4, 3, 3, 8, 1])
    mixed = q.quantize_heads(x, bits, span=span)
    for token, b in enumerate(bits.tolist()):
        alone = q.quantize_heads(x[:, :, token], b, span=span)
        assert same_bits(mixed.codes[:, :, token], alone.codes)
        assert same_bits(mixed.scale[:, :, token], alone.scale)
        assert same_bits(mixed.dequantize()[:, :, token], alone.dequantize())


def test_bits_that_there_are_not_are_refused():
    for bits in (0, 9, torch.tensor([3, 9]), torch.tensor([0])):
        with pytest.raises(ValueError, match=r"1 to 8 bits, not [09]"):
            q.quantize_heads(torch.ones(2, 4), bits)
    with pytest.raises(TypeError, match="bits are integers"):
        q.quantize_heads(torch.ones(2, 4), torch.tensor([3.0]))
    with pytest.raises(ValueError, match="'absmax' or 'minmax', not 'max'"):
        q.quantize_heads(torch.ones(2, 4), 3, span="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("span", ["absmax", "minmax"])
def test_odd_heads(span: Any):
    zeros = q.quantize_heads(torch.zeros(2, 4), 3, span=span)
    assert not zeros.codes.any() and not zeros.dequantize().any()
    assert q.quantize_heads(torch.zeros(0, 4), 3, span=span).codes.shape == (0, 4)
    assert q.quantize_heads(torch.zeros(2, 0), 3, span=span).codes.shape == (2, 0)
    constant = torch.full((1, 4), -2.5)
    assert torch.allclose(q.quantize_heads(constant, 3, span=span).dequantize(), constant)
    coarse = q.quantize_heads(torch.full((1, 4), 1.006), 3, span=span, scale_dtype=torch.bfloat16)
    assert coarse.scale >= 0 and torch.allclose(coarse.dequantize(), torch.tensor(1.006), rtol=2**-8)
    denormal = q.quantize_heads(torch.tensor([[1e-40, -1e-40]]), 3, span=span)
    assert denormal.dequantize().abs().max() <= 1e-40
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = gaussian(2, 4, seed=17)
        x[0, 1] = bad
        back = q.quantize_heads(x, 3, span=span).dequantize()
        assert back[0].isnan().all() and back[1].isfinite().all()


# Storage.


@given(
    bits=st.integers(1, 8),
    shape=hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=70),
    seed=st.integers(0, 99),
)
def test_codes_of_any_width_come_back(bits: int, shape: tuple[int, ...], seed: int):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    packed = q.pack(codes, bits)
    assert packed.dtype == torch.int32 and packed.shape == (*shape[:-1], q.words(shape[-1], bits))
    assert same_bits(q.unpack(packed, bits, shape[-1]), codes)


def test_whole_words_waste_nothing():
    assert [q.words(128, bits) * 32 / 128 for bits in range(1, 9)] == list(range(1, 9))


def test_masked_words_are_the_weights_of_four_activations():
    codes = torch.randint(-1, 2, (6, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    x = torch.randint(-127, 128, (64,), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    words = q.pack_ternary(codes).numpy().view(np.uint32)
    activations = x.numpy().view(np.uint32)  # four of them a word, as they lie in memory
    total = np.zeros(6, np.int64)
    for k in range(64 // 16):
        for j in range(4):
            four = (words[:, k] >> (2 * j)) & 0x03030303
            a = four[:, None].view(np.uint8).astype(np.int64)
            b = activations[4 * k + j : 4 * k + j + 1].view(np.int8).astype(np.int64)
            total += (a * b).sum(-1)
    assert (total - int(x.sum())).tolist() == (codes.long() @ x.long()).tolist()


@given(
    hnp.arrays(
        np.int8,
        hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=40),
        elements=st.integers(-1, 1),
    )
)
def test_ternary_codes_come_back_in_both_forms(array: np.ndarray):
    codes = torch.from_numpy(array)
    assert same_bits(q.unpack_ternary(q.pack_ternary(codes), codes.shape[-1]), codes)
    packed = q.pack_trits(codes)
    assert packed.shape == (-(-codes.numel() // 5),)
    assert same_bits(q.unpack_trits(packed, codes.numel()).reshape(codes.shape), codes)


def test_transposed_codes_are_packed_as_they_are_read():
    codes = torch.randint(-1, 2, (33, 21), dtype=torch.int8, generator=torch.Generator().manual_seed(3)).T
    assert same_bits(q.pack_trits(codes), q.pack_trits(codes.contiguous()))
    packed = q.pack_ternary(codes)
    assert same_bits(packed, q.pack_ternary(codes.contiguous()))
    assert same_bits(q.unpack_ternary(packed.T.contiguous().T, 33), codes.contiguous())


def test_all_quintets_have_a_byte_and_the_other_bytes_are_refused():
    quintets = torch.tensor(list(itertools.product((-1, 0, 1), repeat=5)), dtype=torch.int8)
    packed = q.pack_trits(quintets)
    assert len(set(packed.tolist())) == 243
    assert same_bits(q.unpack_trits(packed, 5 * 243), quintets.flatten())
    others = sorted(set(range(256)) - set(packed.tolist()))
    assert len(others) == 13
    for byte in others:
        with pytest.raises(ValueError, match="stands for no five trits"):
            q.unpack_trits(torch.tensor([0, byte], dtype=torch.uint8), 10)


def test_packed_codes_that_nobody_wrote_are_refused():
    one = torch.tensor([1, 1], dtype=torch.int8)
    with pytest.raises(ValueError, match="not filled up with zeros"):
        q.unpack_trits(q.pack_trits(one), 1)
    with pytest.raises(ValueError, match="not filled up with zeros"):
        q.unpack_ternary(q.pack_ternary(one), 1)
    with pytest.raises(ValueError, match="a code of 3"):
        q.unpack_ternary(torch.tensor([-1], dtype=torch.int32), 16)
    for n in (0, 17):
        with pytest.raises(ValueError, match=r"take \d words, not 1"):
            q.unpack_ternary(q.pack_ternary(one), n)
    with pytest.raises(ValueError, match="take 2 bytes, not 1"):
        q.unpack_trits(q.pack_trits(one), 6)
    with pytest.raises(ValueError, match="take 12 words, not 8"):
        q.unpack(torch.zeros(8, dtype=torch.int32), 3, 128)


def test_codes_that_cannot_be_packed_are_refused():
    for bad in (-2, 2, -128):
        codes = torch.tensor([0, bad], dtype=torch.int8)
        for pack in (q.pack_ternary, q.pack_trits):
            with pytest.raises(ValueError, match="ternary codes are -1, 0 and 1"):
                pack(codes)
    with pytest.raises(ValueError, match="a code is 8, which takes more than 3 bits"):
        q.pack(torch.tensor([8], dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="1 to 8 bits, not 9"):
        q.pack(torch.tensor([8], dtype=torch.uint8), 9)
    for pack in (q.pack_ternary, q.pack_trits):
        with pytest.raises(TypeError, match=r"ternary codes are int8, not torch\.int32"):
            pack(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(TypeError, match=r"uint8, not torch\.int8"):
        q.pack(torch.tensor([1], dtype=torch.int8), 3)
    with pytest.raises(TypeError, match=r"int32 words, not torch\.int64"):
        q.unpack(torch.tensor([1]), 2, 16)
