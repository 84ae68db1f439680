"""Differences of floats restored in torch, on any device.

Patterns are signed integers of the same bits: torch has few others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neuzip.kernels.delta import Digits
from neuzip.kernels.float_fields import FloatFormat


def ordered(x: torch.Tensor) -> torch.Tensor:
    """f, of patterns in int16, int32 or int64."""
    lowest = torch.iinfo(x.dtype).min
    return torch.where(x >= 0, x, torch.where(x == lowest, x, lowest - x))


def restore(
    base: torch.Tensor,
    digits: Sequence[torch.Tensor],
    low: torch.Tensor | None,
    cut: Digits,
    fmt: FloatFormat,
    region: int,
) -> torch.Tensor:
    """The patterns that differ from `base` by digits above raw bits, sorted by exponents in every `region`.

    base: uint8, int16, int32 or int64 [n]; digits: int32 [n] each, below 2^16, the lowest first; low: int64
    [n], or None for no raw bits. Returns the dtype of `base`.
    """
    low_bits, shift = cut.low, cut.shift
    bits = 8 * base.element_size()
    kind = torch.int32 if bits < 32 else torch.int64
    z = torch.zeros(base.numel(), dtype=kind, device=base.device) if low is None else low.to(kind)
    for number, digit in enumerate(digits):
        z |= digit.to(kind) << (low_bits + 16 * number)
    unsorted = torch.empty_like(z)
    unsorted[order(base, fmt, region)] = z
    z = unsorted
    # A shift to the right that takes in zeros: z has no sign, and at 64 bits its top bit may be set.
    v = ((z >> 1) & torch.iinfo(kind).max) ^ -(z & 1)
    if bits == 8:  # torch has an int8, whose view is free
        base = base.view(torch.int8)
    # A sum in a narrow type would be promoted or not as torch pleases; cut, it is the same modulo 2^bits.
    total = (ordered(base).to(kind) + (v << shift)).to(base.dtype)
    return ordered(total).view(torch.uint8) if bits == 8 else ordered(total)


def order(base: torch.Tensor, fmt: FloatFormat, region: int) -> torch.Tensor:
    """The numbers of the weights, int64 [n], in the order of regions and of exponents within."""
    exponents = (base >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    regions = torch.arange(base.numel(), dtype=torch.int32, device=base.device) // region
    return torch.sort(regions << fmt.exponent_bits | exponents.to(torch.int32), stable=True).indices


def unpack_fields(planes: dict[int, torch.Tensor], numel: int) -> torch.Tensor:
    """The raw bits of `numel` weights, int64 [numel], from their planes by width: uint8, the widest first."""
    fields = None
    for width, plane in planes.items():
        if width < 8:
            shifts = torch.arange(0, 8, width, device=plane.device)
            part = (plane[:, None].long() >> shifts & ((1 << width) - 1)).reshape(-1)[:numel]
        else:
            part = torch.zeros(numel, dtype=torch.int64, device=plane.device)
            for byte, digits in enumerate(plane.view(numel, width // 8).unbind(1)):
                part |= digits.long() << 8 * byte
        fields = part if fields is None else fields << width | part
    assert fields is not None
    return fields
