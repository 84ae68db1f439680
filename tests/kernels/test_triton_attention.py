"""The kernels of quantised attention: on a GPU where there is one, else in Triton's interpreter.

They agree with reference.py up to what rounding in fp32 can turn over. A product with the inverse of a scale
in place of a division, or an exponential that is off by 2^-22, moves a code or a weight in E4M3 to its
neighbour where it was about half way between two: some in 10,000. The root of the mean square of all that is
3e-4 of the output at most; the quantisation itself costs 100 times as much (kernels/test_attention.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from neuzip.kernels.attention import reference
from neuzip.kernels.attention.options import Options
from neuzip.kernels.attention.quantized import Quantized, stored_token
from neuzip.kernels.attention.triton import forward as triton_forward
from neuzip.kernels.attention.triton import quantize as triton_quantize

TURNED = 1e-3
"""Codes that may differ from the reference's, of all; and how far outputs may be, relative to their norm."""

CUT_OFF = 3e-3
"""The same on a GPU. Hopper's FP8 instructions keep 13 bits of a sum's fraction (SageAttention2, section 3.4)
and cut the rest off, towards 0: what they give is some 0.12 % too small."""

LSE = 0.1
"""How far a log-sum-exp may be off: what one code of a query changes, where its keys are largest."""

CAUSAL = {"causal": True}
WINDOW = {"causal": True, "window": 70}
SOFTCAP = {"softcap": 3.0}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(batch: int, count: int, tokens: int, width: int, seed: int, device: torch.device) -> Tensor:
    """Gaussian fp16 with channels that are far from 0, as keys have them."""
    x = normal(batch, count, tokens, width, seed=seed)
    x[..., ::16] += 4 * normal(width, seed=seed + 100)[::16]
    return x.half().to(device)


def qkv(
    device: torch.device,
    queries: int,
    keys: int,
    width: int = 64,
    count: int = 1,
    kv_count: int = 1,
    batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((count, queries), (kv_count, keys), (kv_count, keys))
    q, k, v = (heads(batch, *shape, width, i, device) for i, shape in enumerate(shapes))
    return q, k, v


def options(width: int = 64, bits: int = 8, smooth_v: bool = False, **more: Any) -> Options:
    names = ("causal", "scale", "window", "softcap", "smooth_q")
    given = [more.get(name, False if name == "causal" else None) for name in names]
    assert set(more) <= set(names)
    return Options.of(width, bits, *given, smooth_v)


def run(q: Tensor, k: Tensor, v: Tensor, asked: Options) -> tuple[Tensor, Tensor]:
    return triton_forward.attention(q, k, v, asked, True)


def run_packed(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int], asked: Options
) -> tuple[Tensor, Tensor]:
    starts = [
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(q.device)
        for lengths in (q_lengths, k_lengths)
    ]
    return triton_forward.attention_packed(
        q, k, v, starts[0], starts[1], max(q_lengths), max(k_lengths), asked, True
    )


def expected(q: Tensor, k: Tensor, v: Tensor, asked: Options) -> tuple[Tensor, Tensor]:
    """By the reference, on the CPU, in fp32."""
    return reference.quantized_attention(
        *(x.float().cpu() for x in (q, k, v)), bits=asked.bits, causal=asked.causal, scale=asked.scale,
        window=asked.window, softcap=asked.softcap, smooth_q=asked.smooth_q, smooth_v=asked.smooth_v,
    )  # fmt: skip


def assert_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    bound = CUT_OFF if found[0].is_cuda else TURNED
    out, lse = (x.float().cpu() for x in found)
    assert torch.isfinite(out).all()
    assert float((out - wanted[0]).norm()) <= bound * float(wanted[0].norm())
    seen = torch.isfinite(wanted[1])
    assert torch.equal(torch.isfinite(lse), seen)
    assert torch.equal(lse[~seen], wanted[1][~seen])
    if seen.any():
        off = (lse - wanted[1])[seen].abs()
        assert off.mean() <= TURNED and off.max() <= LSE
    assert not out[~seen].any()


def rows_of(made: Quantized, head: int, tokens: int) -> Tensor:
    """The values' codes of a head as tokens are numbered, fp32 [tokens, D]."""
    stored = made.v[0, head].float().cpu().T
    order = torch.tensor([block + stored_token(p) for block in range(0, len(stored), 16) for p in range(16)])
    rows = torch.empty_like(stored)
    rows[order] = stored
    return rows[:tokens]


# What is stored


@pytest.mark.parametrize("smooth_v", [False, True], ids=["", "smooth v"])
@pytest.mark.parametrize(
    ("tokens", "width", "bits"), [(1, 64, 8), (129, 80, 4), (300, 128, 8), (520, 96, 8), (128, 256, 8)]
)
def test_codes_are_those_of_the_reference(
    tokens: int, width: int, bits: int, smooth_v: bool, device: torch.device, poison: None
):
    _, k, v = qkv(device, 1, tokens, width, 2, 2)
    made = triton_quantize.quantize(k, v, bits, smooth_v)
    room = -(-tokens // 128) * 128
    assert made.k.shape == (1, 2, room, width) and made.v.shape == (1, 2, width, room)
    assert not made.k[:, :, tokens:].any()
    assert (
        not made.v.view(torch.uint8)
        .cpu()[0, :, :, -128:]
        .reshape(2 * width, 8, 16)
        .any(2)[:, (tokens + 127) % 128 // 16 + 1 :]
        .any()
    )

    k, v = k.float().cpu(), v.float().cpu()
    mean = reference.means(k)
    assert torch.allclose(made.k_mean.cpu()[:, :, None], mean, rtol=1e-5, atol=1e-6)
    groups = reference.key_groups(tokens, "thread", k.device)
    codes, scale = reference.quantize(k - mean, bits, groups)
    off = (made.k[:, :, :tokens].float().cpu() - codes).abs()
    assert off.max() <= 1 and off.mean() <= TURNED
    stored = made.k_scale.cpu().flatten(2)[:, :, groups]
    assert torch.allclose(stored[..., None], scale, rtol=1e-5, atol=1e-9)

    v_mean = reference.means(v) if smooth_v else torch.zeros(1, 2, 1, width)
    assert (made.v_mean is not None) == smooth_v
    if made.v_mean is not None:
        assert torch.allclose(made.v_mean.cpu()[:, :, None], v_mean, rtol=1e-5, atol=1e-6)
    codes, scale = reference.quantize_values(v - v_mean, "e4m3")
    assert torch.allclose(made.v_scale.cpu()[:, :, None], scale, rtol=1e-5, atol=1e-9)
    for head in range(2):
        found = rows_of(made, head, tokens)
        if tokens == 1 and smooth_v:  # the difference of a number and itself
            continue
        assert ((found - codes[0, head]).abs() <= codes[0, head].abs() / 8 + 2.0**-9).all()
        assert (found != codes[0, head]).float().mean() <= TURNED


def test_positions_of_values_are_those_of_the_products():
    """Of 16 columns a thread has 2 q, 2 q + 1, 2 q + 8 and 2 q + 9; in the operand it has 4 q to 4 q + 3."""
    assert [stored_token(p) for p in range(16)] == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


@pytest.mark.parametrize("smooth_v", [False, True], ids=["", "smooth v"])
def test_codes_of_a_pack_are_those_of_each_sequence(smooth_v: bool, device: torch.device, poison: None):
    lengths = [130, 0, 1, 300, 128]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    k, v = (heads(1, sum(lengths), 2, 64, i, device)[0] for i in (1, 2))
    pack = triton_quantize.quantize_packed(k, v, starts.to(device), 300, 8, smooth_v)
    for s, length in enumerate(lengths):
        if not length:
            continue
        mine = slice(int(starts[s]), int(starts[s + 1]))
        alone = triton_quantize.quantize(
            k[mine].transpose(0, 1)[None], v[mine].transpose(0, 1)[None], 8, smooth_v
        )
        first = int(starts[s]) // 128 + s
        blocks = slice(first, first + -(-length // 128))
        rows = slice(blocks.start * 128, blocks.stop * 128)
        assert torch.equal(pack.k[:, rows], alone.k[0])
        assert torch.equal(pack.k_scale[:, blocks], alone.k_scale[0])
        assert torch.equal(pack.v[:, :, rows].view(torch.uint8), alone.v[0].view(torch.uint8))
        assert torch.equal(pack.k_mean[s], alone.k_mean[0])
        assert torch.equal(pack.v_scale[s], alone.v_scale[0])
        if pack.v_mean is not None and alone.v_mean is not None:
            assert torch.equal(pack.v_mean[s], alone.v_mean[0])


# What comes out


@pytest.mark.parametrize(
    "asked",
    [
        {}, CAUSAL, WINDOW, SOFTCAP, {"smooth_v": True}, {"smooth_q": True}, {"scale": 0.7},
        {"bits": 4}, {"bits": 4, "smooth_q": False}, {"bits": 4, **CAUSAL},
        {"bits": 4, "smooth_v": True, **WINDOW, **SOFTCAP}, {**CAUSAL, **SOFTCAP},
    ],
    ids=lambda asked: " ".join(f"{k}={v}" for k, v in asked.items()) or "plain",
)  # fmt: skip
def test_agrees_with_the_reference(asked: dict[str, Any], device: torch.device, poison: None):
    q, k, v = qkv(device, 100, 270)
    wanted = options(**asked)
    assert_close(run(q, k, v, wanted), expected(q, k, v, wanted))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256])
def test_head_dims(width: int, bits: int, device: torch.device):
    q, k, v = qkv(device, 70, 140, width)
    wanted = options(width, bits, causal=True)
    assert_close(run(q, k, v, wanted), expected(q, k, v, wanted))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 129), (64, 128), (65, 127), (127, 255), (128, 256), (129, 257), (200, 60), (3, 2), (1, 400)],
)
@pytest.mark.parametrize(
    "asked",
    [{}, CAUSAL, pytest.param({"causal": True, "window": 1}, marks=pytest.mark.slow)],
    ids=["full", "causal", "one"],
)
def test_any_lengths(queries: int, keys: int, asked: dict[str, Any], device: torch.device):
    q, k, v = qkv(device, queries, keys)
    wanted = options(**asked)
    assert_close(run(q, k, v, wanted), expected(q, k, v, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 63, 64, 65, 128, 129, 200, 1000])
def test_windows_of_any_width(window: int, device: torch.device):
    q, k, v = qkv(device, 100, 333)
    wanted = options(causal=True, window=window)
    assert_close(run(q, k, v, wanted), expected(q, k, v, wanted))


@pytest.mark.parametrize(("count", "kv_count"), [(2, 2), (4, 2), (3, 1)])
def test_heads_share_keys(count: int, kv_count: int, device: torch.device):
    q, k, v = qkv(device, 40, 70, count=count, kv_count=kv_count, batch=2)
    found = run(q, k, v, options(causal=True))
    assert_close(found, expected(q, k, v, options(causal=True)))
    repeated = (x.repeat_interleave(count // kv_count, 1) for x in (k, v))
    assert torch.equal(found[0], run(q, *repeated, options(causal=True))[0])


def test_any_order_of_heads_gives_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    q, k, v = qkv(device, 80, 80, count=6, kv_count=3)
    found = []
    for cache in (1, 2 * 80 * 64 * 2, 1 << 30):
        monkeypatch.setattr(triton_forward, "CACHE", cache)
        found.append(run(q, k, v, options(causal=True)))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_strides_and_what_lies_around_do_not_matter(device: torch.device):
    q, k, v = qkv(device, 40, 70, count=2, kv_count=2, batch=2)
    asked = options(bits=4, causal=True)
    found = run(q, k, v, asked)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = []
    for x in (q, k, v):
        memory = torch.full((2, 4, x.shape[2] + 3, 80), torch.nan, dtype=x.dtype, device=device)
        inside = memory[:, 1:3, 2:-1, 8:72]
        inside.copy_(x)
        wide.append(inside)
    for others in (turned, wide):
        for x, y in zip(found, run(*others, asked), strict=True):
            assert torch.equal(x, y)
    assert run(*turned, asked)[0].transpose(1, 2).is_contiguous()
    assert found[0].is_contiguous()


@pytest.mark.parametrize(
    "asked",
    [{}, CAUSAL, {"bits": 4, **WINDOW, "smooth_v": True}, SOFTCAP],
    ids=["full", "causal", "all", "softcap"],
)
def test_a_pack_is_its_sequences_one_by_one(asked: dict[str, Any], device: torch.device):
    q_lengths, k_lengths = [70, 5, 0, 1, 3], [140, 0, 7, 129, 1]
    q = heads(1, sum(q_lengths), 2, 64, 0, device)[0]
    k, v = (heads(1, sum(k_lengths), 1, 64, i, device)[0] for i in (1, 2))
    wanted = options(**asked)
    out, lse = run_packed(q, k, v, q_lengths, k_lengths, wanted)
    pairs = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    alone = [run(*(x.transpose(0, 1)[None] for x in each), wanted) for each in pairs]
    assert torch.equal(out, torch.cat([one[0].transpose(0, 1) for one, _ in alone]))
    assert torch.equal(lse, torch.cat([one[0] for _, one in alone], 1))
    assert torch.isneginf(lse[:, 70:75]).all() and not out[70:75].any()


def test_wrong_starts_touch_nothing_else(device: torch.device):
    """Around the tokens lies NaN, and none of it comes in."""
    around = torch.full((3, 300, 1, 64), torch.nan, dtype=torch.float16, device=device)
    q, k, v = around[:, 100:200]
    for i, x in enumerate((q, k, v)):
        x.copy_(heads(1, 100, 1, 64, i, device)[0])
    for starts in ([0, 50, 1 << 30], [-(1 << 30), 40, 100], [90, 20, 100], [1 << 30, 1 << 30, 5]):
        wrong = torch.tensor(starts, dtype=torch.int32, device=device)
        made = triton_quantize.quantize_packed(k, v, wrong, 100, 8, False)
        _, lse = triton_forward.attention_packed(q, k, v, wrong, wrong, 100, 100, options(), True)
        ends = [min(max(s, 0), 100) for s in starts]
        for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
            if end > begin:
                assert torch.isfinite(made.k_mean[sequence]).all()
                assert torch.isfinite(lse[:, begin:end]).all()


@pytest.mark.parametrize("width", [16, 48, 112])
def test_nothing_behind_the_means_of_keys_is_read(
    width: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
):
    q, k, v = qkv(device, 5, 20, width, 2, 2)
    made = triton_quantize.quantize(k, v, 8, False)
    behind = torch.full((made.k_mean.numel() + 128,), torch.nan, device=device)
    behind[: made.k_mean.numel()] = made.k_mean.flatten()
    made = replace(made, k_mean=behind[: made.k_mean.numel()].view_as(made.k_mean))
    monkeypatch.setattr(triton_forward, "quantize", lambda *_: made)
    for asked in (options(width), options(width, softcap=5.0)):
        assert_close(run(q, k, v, asked), expected(q, k, v, asked))


@pytest.mark.parametrize("window", [19, 20, 2**31 - 30, 2**31 - 1, 2**31, 2**40])
def test_windows_wider_than_all_keys_hide_none(window: int, device: torch.device):
    q, k, v = qkv(device, 70, 20)
    asked = options(causal=True, window=window)
    assert_close(run(q, k, v, asked), expected(q, k, v, asked))


@pytest.mark.slow
def test_statistics_of_a_pack_take_as_much_memory_as_its_tokens(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
):
    lengths = [1000] + [1] * 60
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    k = normal(sum(lengths), 1, 16).half().to(device)
    made = []

    def empty(*shape: Any, **how: Any) -> Tensor:
        made.append(torch.zeros(*shape, **how))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    triton_quantize.quantize_packed(k, k, starts, 1000, 8, False)
    statistics = [x.numel() for x in made if x.dim() == 4]
    assert 0 < sum(statistics) <= 2 * 16 * (sum(lengths) // 256 + len(lengths))


def test_no_keys_and_no_queries(device: torch.device):
    q, k, v = qkv(device, 5, 0)
    out, lse = run(q, k, v, options())
    assert not out.any() and torch.isneginf(lse).all()
    q, k, v = qkv(device, 0, 5)
    out, lse = run(q, k, v, options())
    assert out.shape == (1, 1, 0, 64) and lse.shape == (1, 1, 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros(bits: int, device: torch.device, poison: None):
    q, k, v = qkv(device, 70, 130)
    zero = torch.zeros_like
    for one in (
        run(q, zero(k), v, options(bits=bits)),
        run(zero(q), k, v, options(bits=bits)),
        run(q, k[:, :, :1].expand_as(k), v, options(bits=bits)),
    ):
        mean = v.float().cpu().mean(2, keepdim=True)
        assert torch.allclose(one[0].float().cpu(), mean.expand_as(one[0]), atol=0.02 * float(v.abs().max()))
    assert not run(q, k, zero(v), options(bits=bits))[0].any()


def test_large_and_small_numbers(device: torch.device):
    """Logits of thousands, and values at either end of fp16."""
    q, k, v = qkv(device, 70, 130)
    for factor in (60.0, 1e-4):
        far = (q * 30, k, (v * factor).half())
        found, wanted = run(*far, options()), expected(*far, options())
        assert torch.isfinite(found[0]).all()
        assert torch.allclose(found[0].float().cpu(), wanted[0], atol=0.05 * float(wanted[0].abs().max()))
        assert torch.allclose(found[1].cpu(), wanted[1], rtol=1e-5)


def test_the_same_bits_each_time(device: torch.device):
    q, k, v = qkv(device, 66, 600, 128, 2)
    first = run(q, k, v, options(128))
    for _ in range(2):
        for x, y in zip(first, run(q, k, v, options(128)), strict=True):
            assert torch.equal(x, y)
