"""Attention in fp64, and the arithmetic of quantised attention in plain torch: to read, and to test against.

Queries are [B, Hq, Nq, D], keys and values [B, Hkv, Nk, D]; query head h reads key head h // (Hq // Hkv).
If `causal` query i sees the keys j <= i + Nk - Nq, and with a `window` w the last w of these. Logits are
`scale` q.k (1 / sqrt(D) if None), or with a `softcap` c, c tanh(logits / c). A query that sees no key gives
0, with a log-sum-exp of -inf.

SageAttention2 (arXiv 2411.10958): smoothing of K and Q (section 3.1), INT4 and INT8 codes with a scale for
each thread's share (3.2), P and V in E4M3 (3.3), the product of each block summed from zero (3.4).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from neuzip.kernels.attention.accumulator import accumulate

Granularity = Literal["token", "thread", "thread-hopper", "thread-ada", "warp", "block", "tensor"]
"""Which tokens of a head share a scale. Those of SageAttention2 (section 3.2) are named after its GPUs.

    token          none
    thread         queries: none; keys: of 128, the 32 whose index j has the same (j // 2) % 4
    thread-hopper  queries: of 16, the two i and i + 8; keys: as thread
    thread-ada     queries: of 32, the four i, i + 8, i + 16 and i + 24; keys: of 64, the 16 as thread
    warp           32 queries, 64 keys
    block          128 queries, 128 keys
    tensor         all

The kernels have "thread".
"""

Format = Literal["e4m3", "e5m2", "int8", "fp16", "fp32"]

Accumulator = Literal["fp32", "two levels", "22 bits"]
"""How products of P and V are summed (SageAttention2, section 3.4).

    fp32        in fp32
    two levels  those of a block of keys in 22 bits from zero, the sums of blocks in fp32
    22 bits     all in 22 bits; between blocks the sums are rescaled in fp32

The kernels have two levels; the tests compare them with fp32.
"""

Q_BLOCK = 64
"""Queries that are smoothed by one mean."""

K_BLOCK = 128
"""Keys whose logits are worked on at a time: after each of these blocks the running maximum may rise."""

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

LOGITS = 1 << 26
"""Logits of exact attention that are in memory at once, or those of 16 queries."""

EXACT_WIDTH = 1040
"""Up to here a sum of D products of two codes of 8 bits is below 2^24: exact in fp32."""


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: output [B, Hq, Nq, D] and log-sum-exp [B, Hq, Nq], both fp64."""
    heads = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(heads, 1) for x in (k, v))
    rows = []
    # Some queries at a time: the logits of all would be 8 Nq Nk bytes a head.
    step = max(16, min(1024, LOGITS // max(1, q.shape[0] * q.shape[1] * k.shape[2])))
    for first in range(0, q.shape[2], step):
        block = q[:, :, first : first + step].double()
        queries = torch.arange(first, first + block.shape[2], device=q.device) + k.shape[2] - q.shape[2]
        logits = _capped(block @ k.mT * _scale(q, scale), softcap)
        seen = visible(queries, torch.arange(k.shape[2], device=q.device), causal, window)
        logits = logits.masked_fill(~seen, -torch.inf)
        lse = logits.logsumexp(-1)
        p = (logits - torch.where(lse.isneginf(), 0, lse)[..., None]).exp()
        rows.append((p @ v, lse))
    if not rows:
        return q.double(), q.new_zeros(q.shape[:3], dtype=torch.float64)
    return torch.cat([out for out, _ in rows], 2), torch.cat([lse for _, lse in rows], 2)


def quantized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bits: int | None = 8,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool = False,
    smooth_k: bool = True,
    granularity: Granularity = "thread",
    p_format: Format = "e4m3",
    v_format: Format = "e4m3",
    accumulator: Accumulator = "fp32",
) -> tuple[Tensor, Tensor]:
    """What the kernels compute, in fp32: output in q's dtype [B, Hq, Nq, D], log-sum-exp fp32 [B, Hq, Nq].

    `bits` 8, 4, or None for queries and keys that are not quantised. `smooth_q` None: with 4 bits only.
    Raises ValueError for an `accumulator` of 22 bits without P and V in E4M3.
    """
    if accumulator != "fp32" and (p_format, v_format) != ("e4m3", "e4m3"):
        raise ValueError(f"accumulator is {accumulator!r}: it is that of products of E4M3, not of {p_format}")
    smooth_q = bits == 4 if smooth_q is None else smooth_q
    heads, scale, dtype = q.shape[1] // k.shape[1], _scale(q, scale), q.dtype
    q, k, v = (x.float() for x in (q, k, v))
    q_mean = query_means(q) if smooth_q else None
    q_rest = q if q_mean is None else q - q_mean
    k_mean = means(k) if smooth_k else torch.zeros_like(means(k))
    q_codes, q_scale = quantize(q_rest, bits, query_groups(q.shape[2], granularity, q.device))
    k_codes, k_scale = quantize(k - k_mean, bits, key_groups(k.shape[2], granularity, k.device))
    v_mean = means(v) if smooth_v else torch.zeros_like(means(v))
    v_codes, v_scale = quantize_values(v - v_mean, v_format)
    k, k_mean, k_codes, k_scale, v_codes, v_scale, v_mean = (
        x.repeat_interleave(heads, 1) for x in (k, k_mean, k_codes, k_scale, v_codes, v_scale, v_mean)
    )
    # What smoothing K takes from a row of logits: softmax does not see it, a soft cap and log-sum-exp do.
    row = q_rest @ k_mean.mT

    out = torch.zeros_like(q)
    largest = torch.full_like(row, -torch.inf)
    total = torch.zeros_like(row)
    queries = torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2]
    for first in range(0, k.shape[2], K_BLOCK):
        block = slice(first, first + K_BLOCK)
        # Queries before these see nothing of the block: without them the CPU has half to do.
        see = slice(max(0, first + q.shape[2] - k.shape[2]) if causal else 0, None)
        logits = _products(q_codes[:, :, see], k_codes[:, :, block]) * q_scale[:, :, see]
        logits = logits * k_scale[:, :, block].mT
        if q_mean is not None:
            logits = logits + q_mean[:, :, see] @ k[:, :, block].mT
        if softcap is not None:
            logits = logits + row[:, :, see]
        logits = _capped(logits * scale, softcap)
        keys = torch.arange(first, first + logits.shape[3], device=q.device)
        logits = logits.masked_fill(~visible(queries[see], keys, causal, window), -torch.inf)

        before = largest[:, :, see].clone()
        largest[:, :, see] = torch.maximum(before, logits.amax(-1, keepdim=True))
        # exp(-inf - -inf) is NaN; a row that has seen no key yet has nothing to rescale.
        finite = torch.where(largest[:, :, see].isneginf(), 0, largest[:, :, see])
        p, shrink = (logits - finite).exp(), (before - finite).exp()
        total[:, :, see] = total[:, :, see] * shrink + p.sum(-1, keepdim=True)
        out[:, :, see] = _weighted(out[:, :, see] * shrink, p, v_codes[:, :, block], p_format, accumulator)

    sees = total > 0
    if accumulator != "fp32":
        out = out / LARGEST[p_format]
    out = torch.where(sees, out / torch.where(sees, total, 1) * v_scale + v_mean, 0)
    lse = torch.where(sees, largest + total.log(), -torch.inf)
    if softcap is None:
        lse = torch.where(sees, lse + row * scale, lse)
    return out.to(dtype), lse[..., 0]


def visible(queries: Tensor, keys: Tensor, causal: bool, window: int | None) -> Tensor:
    """Which keys a query sees, bool [queries, keys]; `queries` int64 are numbered by their own keys.

    Raises ValueError for a window without `causal`.
    """
    if window is not None and not causal:
        raise ValueError("a window is of the keys before a query: it needs causal=True")
    distance = queries[:, None] - keys
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    return seen


def means(x: Tensor) -> Tensor:
    """The mean over all tokens, fp32 [B, H, 1, D]; 0 of no tokens."""
    return x.float().sum(2, keepdim=True) / max(1, x.shape[2])


def query_means(q: Tensor) -> Tensor:
    """For each query the mean of its block of 64, fp32 [B, H, N, D] but rounded to bf16.

    In bf16, because the kernel multiplies it with keys as they are; what rounding takes away stays in the
    queries.
    """
    blocks = [block.mean(2, keepdim=True).expand_as(block) for block in torch.split(q.float(), Q_BLOCK, 2)]
    return torch.cat(blocks, 2).to(torch.bfloat16).float()


def query_groups(tokens: int, granularity: Granularity, device: torch.device) -> Tensor:
    """The group of each query, int64 [tokens]: those of a group share a scale."""
    i = torch.arange(tokens, device=device)
    return {
        "token": i,
        "thread": i,
        "thread-hopper": i // 16 * 8 + i % 8,
        "thread-ada": i // 32 * 8 + i % 8,
        "warp": i // 32,
        "block": i // 128,
        "tensor": i * 0,
    }[granularity]


def key_groups(tokens: int, granularity: Granularity, device: torch.device) -> Tensor:
    """The group of each key, int64 [tokens]: those of a group share a scale."""
    j = torch.arange(tokens, device=device)
    thread = j // 128 * 4 + j // 2 % 4
    return {
        "token": j,
        "thread": thread,
        "thread-hopper": thread,
        "thread-ada": j // 64 * 4 + j // 2 % 4,
        "warp": j // 64,
        "block": j // 128,
        "tensor": j * 0,
    }[granularity]


def quantize(x: Tensor, bits: int | None, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [B, H, N, D], whole numbers in fp32, and the scale of each token, [B, H, N, 1].

    Symmetric, from the largest magnitude of a group; a group of zeros has scale 0.
    """
    if bits is None:
        return x, torch.ones_like(x[..., :1])
    levels = 2 ** (bits - 1) - 1
    groups = groups.expand(x.shape[:3])
    of_group = x.new_zeros(*x.shape[:2], int(groups.max()) + 1 if groups.numel() else 1)
    of_group.scatter_reduce_(2, groups, x.abs().amax(-1), "amax")
    scale = (of_group / levels).gather(2, groups)[..., None]
    codes = torch.where(scale > 0, x / scale, 0).round().clamp(-levels, levels)
    return codes, scale


def quantize_values(v: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """Values as their format holds them, fp32 [B, H, N, D], and a scale a channel, [B, H, 1, D]."""
    if kind not in LARGEST:
        return _rounded(v, kind), v.new_ones(*v.shape[:2], 1, v.shape[3])
    largest = v.abs().amax(2, keepdim=True) if v.shape[2] else v.new_zeros(*v.shape[:2], 1, v.shape[3])
    scale = largest / LARGEST[kind]
    codes = torch.where(scale > 0, v / scale, 0)
    return (codes.round() if kind == "int8" else codes.to(FLOAT8[kind]).float()), scale


def _weighted(before: Tensor, p: Tensor, v: Tensor, kind: Format, accumulator: Accumulator) -> Tensor:
    """The sums after a block of keys; with 22 bits in units of P's codes, as the instruction has them."""
    if accumulator == "fp32":
        return before + _rounded(p, kind) @ v
    codes = (p * LARGEST[kind]).to(FLOAT8[kind])
    if accumulator == "two levels":
        return before + accumulate(codes, v)
    return accumulate(codes, v, before)


def _rounded(p: Tensor, kind: Format) -> Tensor:
    """Numbers in 0..1 after a round trip through a format, scaled by the largest number that it has."""
    if kind == "fp32":
        return p
    if kind == "fp16":
        return p.half().float()
    scaled = p * LARGEST[kind]
    return (scaled.round() if kind == "int8" else scaled.to(FLOAT8[kind]).float()) / LARGEST[kind]


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Sums of products of whole numbers, without rounding."""
    if q.shape[-1] > EXACT_WIDTH:
        return (q.double() @ k.double().mT).float()
    return q @ k.mT


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
