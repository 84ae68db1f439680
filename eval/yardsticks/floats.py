"""4-bit levels in blocks: NF4 of QLoRA, and e2m1 as MXFP4 and NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import cut, inverse, joined

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The 16 levels of NF4: quantiles of the normal distribution, scaled to -1 to 1 (arXiv 2305.14314)."""

NF4_BLOCK, NF4_SCALES = 64, 256
"""Weights that share a scale, and scales that share a second one."""

E2M1_LARGEST, E4M3_LARGEST = 6.0, 448.0


def nf4(weight: Tensor) -> Tensor:
    """An fp32 matrix in NF4 with double quantisation, as QLoRA and bitsandbytes define it.

    The scale of 64 weights is their largest magnitude. Scales are stored in 8 bits: less their mean, they are
    the nearest of the levels of `dynamic_levels`, times the largest magnitude of 256 of them.
    """
    blocks = cut(weight, NF4_BLOCK, across_rows=True)
    scale = blocks.abs().amax(1)
    nearest = _nearest(blocks * inverse(scale)[:, None], torch.tensor(NF4, device=weight.device))
    mean = scale.mean()
    offsets = cut((scale - mean)[None], NF4_SCALES)
    second = offsets.abs().amax(1, keepdim=True)
    levels = dynamic_levels().to(weight.device)
    stored = joined(_nearest(offsets * inverse(second), levels) * second, torch.Size((1, len(scale))))[0]
    return joined(nearest * (stored + mean)[:, None], weight.shape, across_rows=True)


def dynamic_levels() -> Tensor:
    """The 256 levels of the signed dynamic 8-bit type of bitsandbytes (arXiv 2110.02861), fp32, in order.

    A decade from 10^-7 to 1 has 2^i levels of each sign, evenly spaced: i is 0 for the smallest, 6 for the
    largest. 0 and 1 are levels too.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(values).sort().values


def _nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The nearest of the sorted levels to each of `x`, the lower of two that are as near."""
    return levels[torch.bucketize(x, (levels[:-1] + levels[1:]) / 2, out_int32=True)]


def mxfp4(weight: Tensor) -> Tensor:
    """An fp32 matrix in MXFP4 (OCP Microscaling 1.0): e2m1, and a power of two as the scale of 32 weights.

    The scale brings the largest magnitude to 4 or more but below 8; above 6 weights saturate.
    """
    blocks = cut(weight, 32)
    largest = blocks.abs().amax(1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 1 - 2).clamp(-127, 127)
    scale = torch.where(largest == 0, 0.0, torch.ldexp(torch.ones_like(largest), exponent))
    return joined(e2m1(blocks * inverse(scale)) * scale, weight.shape)


def nvfp4(weight: Tensor) -> Tensor:
    """An fp32 matrix in NVFP4: e2m1, an e4m3 scale per 16 weights, and an fp32 scale for all of these scales.

    The largest magnitude of a block becomes 6, the largest scale 448.
    """
    blocks = cut(weight, 16)
    of_tensor = weight.abs().amax() / (E2M1_LARGEST * E4M3_LARGEST)
    largest = blocks.abs().amax(1, keepdim=True) / E2M1_LARGEST
    stored = (largest * inverse(of_tensor)).clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).float()
    scale = stored * of_tensor
    return joined(e2m1(blocks * inverse(scale)) * scale, weight.shape)


def e2m1(x: Tensor) -> Tensor:
    """Numbers rounded to 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of either sign: to the nearest, ties to even codes.

    >>> e2m1(torch.tensor([0.25, 0.75, 2.5, 3.5, 5.0, -9.0])).tolist()
    [0.0, 1.0, 2.0, 4.0, 4.0, -6.0]
    """
    exponent = (torch.frexp(x).exponent - 1).clamp(0, 2)
    step = torch.ldexp(torch.full_like(x, 0.5), exponent)
    return ((x / step).round() * step).clamp(-E2M1_LARGEST, E2M1_LARGEST)
