"""The arithmetic of quantised attention: against loops over numbers, and against what it must not change."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from neuzip.kernels.attention.reference import (
    Format,
    Granularity,
    exact_attention,
    key_groups,
    quantize,
    quantized_attention,
    query_groups,
)
from neuzip.kernels.attention.similarity import similarity

pytestmark = pytest.mark.usefixtures("one_thread")

Array = NDArray[np.float64]

FULL_PRECISION: dict[str, Any] = {"bits": None, "p_format": "fp32", "v_format": "fp32"}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "window": {"causal": True, "window": 37},
    "all": {"causal": True, "window": 150, "softcap": 3.0, "scale": 0.2},
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def made(queries: int, keys: int, width: int = 16, heads: tuple[int, int] = (4, 2), seed: int = 0) -> Any:
    """Random q, k, v of two sequences, offset in some channels; the largest logits come late."""
    generator = torch.Generator().manual_seed(seed)
    of_q, of_kv = heads
    q = torch.randn(2, of_q, queries, width, generator=generator)
    k, v = (torch.randn(2, of_kv, keys, width, generator=generator) for _ in range(2))
    offset = torch.zeros(width)
    offset[[1, width - 2]] = torch.tensor([6.0, -4.0])
    k = k * torch.linspace(0.5, 1.5, keys)[:, None] + offset
    return q + 0.3 * offset, k, v + 0.5 * offset


# What is exact


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 7), (7, 1)])
@with_options
def test_exact_attention_is_the_formula(options: dict[str, Any], queries: int, keys: int) -> None:
    q, k, v = made(queries, keys)
    options = dict(options) | ({"window": 3} if "window" in options else {})
    out, lse = exact_attention(q, k, v, **options)
    for b, h, i in itertools.product(range(2), range(4), range(queries)):
        expected, expected_lse = _one_query(q[b, h, i], k[b, h // 2], v[b, h // 2], i, queries, options)
        assert out[b, h, i].tolist() == pytest.approx(expected, abs=1e-12)
        assert float(lse[b, h, i]) == pytest.approx(expected_lse, abs=1e-12)


def _one_query(
    q: Tensor, k: Tensor, v: Tensor, i: int, queries: int, options: dict[str, Any]
) -> tuple[list[float], float]:
    keys, width = k.shape
    weights = {}
    for j in range(keys):
        if options.get("causal") and j > i + keys - queries:
            continue
        if "window" in options and j <= i + keys - queries - options["window"]:
            continue
        logit = math.fsum(a * b for a, b in zip(q.tolist(), k[j].tolist(), strict=True))
        logit *= options.get("scale", 1 / math.sqrt(width))
        if (cap := options.get("softcap")) is not None:
            logit = cap * math.tanh(logit / cap)
        weights[j] = math.exp(logit)
    total = math.fsum(weights.values())
    if not weights:
        return [0.0] * width, -math.inf
    out = [math.fsum(w * float(v[j, d]) for j, w in weights.items()) / total for d in range(width)]
    return out, math.log(total)


def test_exact_attention_is_that_of_torch_in_more_than_one_block_of_queries() -> None:
    q, k, v = made(1100, 1100, 8, (2, 1))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out, _ = exact_attention(q, k, v, causal=True)
    assert torch.allclose(out.float(), expected, atol=1e-5)


def test_a_window_needs_causal() -> None:
    q, k, v = made(3, 3)
    for attention in (exact_attention, quantized_attention):
        with pytest.raises(ValueError, match="causal"):
            attention(q, k, v, window=2)


# What smoothing must not change


@pytest.mark.parametrize("queries", [200, 130, 1, 300])
@pytest.mark.parametrize(
    ("smooth_k", "smooth_q", "smooth_v"), list(itertools.product([False, True], repeat=3))
)
@with_options
def test_without_rounding_smoothing_changes_nothing(
    options: dict[str, Any], smooth_k: bool, smooth_q: bool, smooth_v: bool, queries: int
) -> None:
    q, k, v = made(queries, 200)
    exact, exact_lse = exact_attention(q, k, v, **options)
    out, lse = quantized_attention(
        q, k, v, **FULL_PRECISION, **options, smooth_k=smooth_k, smooth_q=smooth_q, smooth_v=smooth_v
    )
    assert torch.allclose(out.double(), exact, atol=5e-5)
    assert torch.allclose(lse.double(), exact_lse, atol=5e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_an_offset_of_all_keys_costs_nothing(bits: int) -> None:
    q, k, v = made(100, 200)
    far = k + torch.linspace(-64, 64, 16)
    formats: dict[str, Any] = {"p_format": "fp32", "v_format": "fp32"}
    one, _ = quantized_attention(q, k, v, bits=bits, **formats)
    other, _ = quantized_attention(q, far, v, bits=bits, **formats)
    unsmoothed, _ = quantized_attention(q, far, v, bits=bits, **formats, smooth_k=False)
    exact, _ = exact_attention(q, far, v)
    assert similarity(other, one).relative_l1 < 0.01
    assert similarity(unsmoothed, exact).rmse > 4 * similarity(other, exact).rmse


# Each rounding, in its place


@pytest.mark.parametrize("bits", [8, 4])
@with_options
def test_one_row_by_hand(options: dict[str, Any], bits: int) -> None:
    q, k, v = made(70, 300)
    out, lse = quantized_attention(q, k, v, bits=bits, **options)
    for b, h, i in [(0, 0, 0), (1, 3, 63), (0, 1, 64), (1, 2, 69)]:
        of_q, of_k, of_v = (x.double().numpy() for x in (q[b, h], k[b, h // 2], v[b, h // 2]))
        expected, expected_lse = _quantized_row(of_q, of_k, of_v, i, bits, options)
        assert out[b, h, i].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert float(lse[b, h, i]) == pytest.approx(expected_lse, abs=1e-5)


def _quantized_row(
    q: Array, k: Array, v: Array, i: int, bits: int, options: dict[str, Any]
) -> tuple[Array, float]:
    """One query of a head in fp64, key by key."""
    levels, keys = 2 ** (bits - 1) - 1, len(k)
    start = i // 64 * 64
    q_mean = np.zeros(q.shape[1])
    if bits == 4:
        q_mean = torch.tensor(q[start : start + 64].mean(0)).to(torch.bfloat16).double().numpy()
    k_mean = k.mean(0)
    rest, centred = q[i] - q_mean, k - k_mean
    q_scale = np.abs(rest).max() / levels
    q_codes = np.rint(rest / q_scale)
    scale, cap = options.get("scale", q.shape[1] ** -0.5), options.get("softcap")

    logits = np.full(keys, -np.inf)
    for j in range(keys):
        if options.get("causal") and j > i + keys - len(q):
            continue
        if "window" in options and j <= i + keys - len(q) - options["window"]:
            continue
        group = [
            other for other in range(j // 128 * 128, min(keys, j // 128 * 128 + 128))
            if other % 8 // 2 == j % 8 // 2
        ]  # fmt: skip
        k_scale = np.abs(centred[group]).max() / levels
        s = float(q_codes @ np.rint(centred[j] / k_scale)) * q_scale * k_scale + float(q_mean @ k[j])
        if cap is not None:
            s += float(rest @ k_mean)
            logits[j] = cap * np.tanh(s * scale / cap)
        else:
            logits[j] = s * scale

    v_scale = np.abs(v).max(0) / 448
    v_codes = _e4m3(v / v_scale)
    largest, total, out = -np.inf, 0.0, np.zeros(v.shape[1])
    for first in range(0, keys, 128):
        block = slice(first, first + 128)
        if np.isneginf(logits[block]).all():
            continue
        before, largest = largest, max(largest, logits[block].max())
        p = np.exp(logits[block] - largest)
        out = out * np.exp(before - largest) + _e4m3(p * 448) @ v_codes[block]
        total = total * np.exp(before - largest) + p.sum()
    lse = largest + math.log(total) + (0.0 if cap is not None else float(rest @ k_mean) * scale)
    return out / (448 * total) * v_scale, lse


def _e4m3(x: Array) -> Array:
    """The nearest of the 127 magnitudes of E4M3, of two the one with the even code."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    magnitudes = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = np.abs(x)
    code = np.searchsorted(middles, size, side="left")
    code = code + ((code % 2 == 1) & (size == middles[np.minimum(code, 125)]))
    rounded: Array = np.sign(x) * magnitudes[code]
    return rounded


def test_the_maximum_that_p_is_rounded_under_is_that_of_the_blocks_so_far() -> None:
    """The first block's logits are all 0, the last key's is log(1.5): 448 / 1.5 is not a number of E4M3."""
    keys = 256
    q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, keys, 2)
    q[..., 0] = math.log(1.5)
    k[..., -1, 0] = 1.0
    v = torch.zeros(1, 1, keys, 2)
    v[..., :128, 0] = 1.0
    v[..., 128:, 1] = 1.0
    out, _ = quantized_attention(q, k, v, bits=None, scale=1.0)
    rounded = float(torch.tensor(448 / 1.5).to(torch.float8_e4m3fn)) / 448
    assert rounded != pytest.approx(1 / 1.5, rel=1e-3)
    total = 255 / 1.5 + 1
    expected = [128 / 1.5 / total, (127 * rounded + 1) / total]
    assert out.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_groups_of_tokens() -> None:
    cpu = torch.device("cpu")
    assert key_groups(20, "thread", cpu).tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2 + [0, 0, 1, 1]
    assert key_groups(300, "thread", cpu)[[127, 128, 130, 299]].tolist() == [3, 4, 5, 9]
    assert key_groups(300, "block", cpu)[[127, 128, 299]].tolist() == [0, 1, 2]
    assert not key_groups(300, "tensor", cpu).any()
    assert query_groups(300, "thread", cpu).tolist() == list(range(300))
    assert query_groups(300, "block", cpu)[[127, 128, 299]].tolist() == [0, 1, 2]


def test_groups_are_those_of_the_paper() -> None:
    """Rows of a warp's tile that a thread holds, as SageAttention2 lists them."""
    cpu = torch.device("cpu")
    for name, rows, shared in (("thread-hopper", 16, (0, 8)), ("thread-ada", 32, (0, 8, 16, 24))):
        groups = query_groups(100, name, cpu)
        for tile in range(100 // rows):
            for i in range(8):
                members = [tile * rows + i + row for row in shared]
                assert torch.where(groups == groups[members[0]])[0].tolist() == members
    for name, block in (("thread-hopper", 128), ("thread-ada", 64)):
        groups = key_groups(300, name, cpu)
        for first in range(0, 300 - block, block):
            for j in range(4):
                members = sorted(first + 8 * k + 2 * j + odd for k in range(block // 8) for odd in (0, 1))
                assert torch.where(groups == groups[members[0]])[0].tolist() == members
    assert query_groups(70, "warp", cpu)[[31, 32, 63, 64]].tolist() == [0, 1, 1, 2]
    assert key_groups(70, "warp", cpu)[[63, 64]].tolist() == [0, 1]


def test_codes_round_half_to_even_and_a_group_of_zeros_has_scale_zero() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, -2.5])[None, None, None]
    codes, scale = quantize(x, 8, torch.zeros(1, dtype=torch.int64))
    assert codes.flatten().tolist() == [127, 0, 2, -2] and float(scale) == 1
    codes, scale = quantize(torch.zeros(1, 1, 3, 4), 4, torch.arange(3))
    assert not codes.any() and not scale.any()


# How good it is


def _gaussian(tokens: int = 384, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, tokens, width, generator=generator) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("bits", [8, 4])
def test_a_finer_granularity_is_nearer(bits: int) -> None:
    q, k, v = made(384, 384, 64)
    exact, _ = exact_attention(q, k, v)
    names: tuple[Granularity, ...] = (
        "token", "thread", "thread-hopper", "thread-ada", "warp", "block", "tensor",
    )  # fmt: skip
    errors = []
    for name in names:
        out, _ = quantized_attention(
            q, k, v, bits=bits, granularity=name, p_format="fp32", v_format="fp32"
        )  # fmt: skip
        errors.append(similarity(out, exact).rmse)
    assert errors == sorted(errors) and errors[0] < 0.9 * errors[-1]


def test_formats_of_p_and_v() -> None:
    q, k, v = _gaussian()
    exact, _ = exact_attention(q, k, v)
    names: tuple[Format, ...] = ("fp32", "fp16", "e4m3", "e5m2")
    errors = []
    for name in names:
        out, _ = quantized_attention(q, k, v, bits=None, p_format=name, v_format=name)
        errors.append(similarity(out, exact).relative_l1)
    assert errors[0] < 1e-5 < errors[1] < 1e-3 < errors[2] < 0.05 < errors[3] < 0.1


def test_eight_bit_integers_lose_the_many_small_probabilities() -> None:
    q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 400, 2), torch.ones(1, 1, 400, 2)
    q[..., 0], k[:, :, 0, 0] = 1.0, 6.0
    v[:, :, 0] = 0.0
    weight = 399 * math.exp(-6) / (399 * math.exp(-6) + 1)
    names: tuple[Format, ...] = ("e4m3", "int8")
    kept, lost = (
        quantized_attention(q, k, v, bits=None, scale=1.0, p_format=name)[0].flatten().tolist()
        for name in names
    )
    assert kept == pytest.approx([weight] * 2, rel=0.04) and lost == [0, 0]


def test_eight_bits_of_gaussian_numbers() -> None:
    q, k, v = _gaussian()
    exact, exact_lse = exact_attention(q, k, v)
    out, lse = quantized_attention(q, k, v, bits=8)
    assert similarity(out, exact).cosine > 0.999
    assert float((lse - exact_lse).abs().max()) < 0.02


def test_smoothing_is_what_four_bits_need() -> None:
    q, k, v = made(256, 256, 64)
    q = q + 10 * (torch.arange(64) == 5)
    exact, _ = exact_attention(q, k, v)
    scores = {}
    for smooth_k, smooth_q in itertools.product([False, True], repeat=2):
        out, _ = quantized_attention(q, k, v, bits=4, smooth_k=smooth_k, smooth_q=smooth_q)
        scores[smooth_k, smooth_q] = similarity(out, exact).score
    assert scores[False, False] < min(scores[True, False], scores[False, True])
    assert scores[True, True] > max(scores[True, False], scores[False, True])
    default, _ = quantized_attention(q, k, v, bits=4)
    assert similarity(default, exact).score == scores[True, True]


# Borders


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_queries_without_keys_give_zero(bits: int, smooth_v: bool) -> None:
    q, k, v = made(200, 60)
    out, lse = quantized_attention(q, k, v, bits=bits, causal=True, smooth_v=smooth_v)
    exact, exact_lse = exact_attention(q, k, v, causal=True)
    assert not out[:, :, :140].any() and lse[:, :, :140].isneginf().all()
    assert not exact[:, :, :140].any() and exact_lse[:, :, :140].isneginf().all()
    assert similarity(out, exact).cosine > (0.99 if bits == 8 else 0.95)
    nothing, lse = quantized_attention(q, k[:, :, :0], v[:, :, :0], bits=bits, smooth_v=smooth_v)
    assert nothing.shape == q.shape and not nothing.any() and lse.isneginf().all()
    nothing, lse = exact_attention(q, k[:, :, :0], v[:, :, :0])
    assert nothing.shape == q.shape and not nothing.any() and lse.isneginf().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_no_queries(bits: int) -> None:
    q, k, v = made(0, 60)
    for attention in (exact_attention, quantized_attention):
        out, lse = attention(q, k, v, causal=True)
        assert out.shape == q.shape and lse.shape == q.shape[:3]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_inputs_give_the_mean_value(bits: int, value: float) -> None:
    _, _, v = made(10, 150)
    q, k = torch.full((2, 4, 10, 16), value), torch.full((2, 2, 150, 16), value)
    out, lse = quantized_attention(q, k, v, bits=bits, v_format="fp32")
    expected = v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 10, 16)
    assert torch.allclose(out, expected, atol=1e-5)
    assert lse.flatten().tolist() == pytest.approx(
        [math.log(150) + value**2 * 16 / 4] * lse.numel(), rel=1e-5
    )
    zero, _ = quantized_attention(q, k, torch.zeros_like(v), bits=bits)
    assert not zero.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_output_has_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in made(30, 30))
    out, lse = quantized_attention(q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32


@with_options
def test_sequences_have_nothing_to_do_with_each_other(options: dict[str, Any]) -> None:
    q, k, v = made(140, 140)
    both, _ = quantized_attention(q, k, v, bits=4, **options)
    alone, _ = quantized_attention(q[1:], k[1:], v[1:], bits=4, **options)
    assert torch.allclose(both[1:], alone, atol=1e-6)


# Figures


def test_similarity_of_small_tensors() -> None:
    found = similarity(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]))
    assert found.cosine == pytest.approx(24 / 25)
    assert found.relative_l1 == pytest.approx(2 / 7)
    assert found.rmse == pytest.approx(1.0)
    assert found.score == pytest.approx(24 / 25 * 5 / 7)


def test_similarity_with_zeros() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert similarity(zero, zero).score == 1
    assert similarity(one, zero).cosine == 0 and similarity(one, zero).relative_l1 == math.inf
    assert similarity(zero, one).cosine == 0 and similarity(zero, one).relative_l1 == 1
