"""Keys and values of a cache in groups of a rotated head: a scale and a zero point of a byte each.

Keys of trained models have channels far larger than the others, and one scale a head drowns the rest. The
Hadamard transform spreads such a channel over the head (QuaRot, arXiv 2404.00456, section 4), and a group of
its numbers gets a scale and a zero point of its own: value = scale * (code - zero point).

    scale   uint8, e = byte >> 3 and m = byte & 7: 2**(e - 20) * (1 + m / 8) where e is 1 to 30; 0 stands for
            0, and 255 for NaN. That is the fp16 number with the bits byte << 7, divided by 32
    zero    int8: the middle of the group in units of 2**bits / 128 steps, so that the zero point is
            (2**bits - 1) / 2 - zero * 2**(bits - 7)

A code less its zero point is exact in fp32, so a value is rounded once, whatever a compiler fuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import magnitudes
from .magnitudes import quotient

COVER = {1: 0.6, 2: 0.7, 3: 0.9, 4: 0.95, 5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}
"""By bits of a code: how much of the range of a group its codes cover. Numbers beyond get the last code."""

SCALE_NAN = 255
"""The scale byte of a group with NaN or infinity."""

LEAST_SCALE, MOST_SCALE = 1 << 3, (31 << 3) - 1
"""The bytes of the smallest and of the largest scale: 2**-19 and 1,920."""

SCALE_UNIT = 1 / 32
"""The number by which the fp16 number of a scale byte is multiplied."""

SCALE_OFFSET = (127 - 20) << 3
"""What a scale byte lacks to the first 12 bits of the fp32 number that it stands for."""


def group_count(width: int, group: int) -> int:
    """How many groups a head of `width` numbers has; the last may be shorter."""
    return -(-width // group)


@dataclass(frozen=True, eq=False)
class GroupedHeads:
    """Rotated keys or values as unsigned integers.

    codes  uint8 [..., width], 0 to 2**bits - 1
    scale  uint8 [..., groups], see the module
    zero   int8 [..., groups], see the module
    bits   of each code
    group  numbers that share a scale
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group: int

    def dequantize(self) -> Tensor:
        """The values of the codes, fp32 [..., width]: still rotated."""
        point = zero_points(self.zero, self.bits)[..., None]
        x = _in_groups(self.codes, self.group) - point
        return x.mul_(scales(self.scale)[..., None]).flatten(-2)[..., : self.codes.shape[-1]]


def scales(scale: Tensor) -> Tensor:
    """The numbers that scale bytes stand for, fp32."""
    return (scale.short() << 7).view(torch.float16).float() * SCALE_UNIT


def zero_points(zero: Tensor, bits: int) -> Tensor:
    """The code, not always a whole number, that stands for 0: fp32, exact."""
    return ((1 << bits) - 1) / 2 - zero.float() * 2.0 ** (bits - 7)


def quantize_groups(x: Tensor, bits: int, group: int) -> GroupedHeads:
    """Quantise each group of a head [..., width], bf16, fp16 or fp32, to unsigned integers of 1 to 8 bits.

    In fp32, one rounding an operation, with n = 2**bits - 1 and the least and largest number of a group:

        middle = (least + largest) * 0.5
        half   = max((largest - least) * 0.5, |middle| * 0.5)
        scale  = half * (2 COVER / n), rounded up to a scale byte
        zero   = round(middle / scale * 2**(7 - bits)), clipped to -128 to 127
        code   = round(x / scale + zero point), clipped to 0 to n

    A group with NaN or infinity, or too large for a scale byte, has the scale NaN and codes 0; where the
    scale is 0, codes and `zero` are so. Raises ValueError for other bits or groups, TypeError for other
    dtypes.
    """
    magnitudes.check_floats(x)
    if not 1 <= bits <= 8 or group < 1:
        raise ValueError(f"groups are of 1 or more numbers in 1 to 8 bits, not {group} in {bits}")
    width, n = x.shape[-1], (1 << bits) - 1
    x = _in_groups(x.float(), group)
    least, most = x.amin(-1), x.amax(-1)
    middle = (least + most) * 0.5
    half = torch.maximum((most - least) * 0.5, middle.abs() * 0.5)
    byte = _scale_bytes(half * (2 * COVER[bits] / n))
    usable = (byte != 0) & (byte != SCALE_NAN)
    divisor = torch.where(usable, scales(byte), 1)
    zero = (quotient(middle, divisor) * 2.0 ** (7 - bits)).round().clamp(-128, 127)
    zero = torch.where(usable, zero, 0).to(torch.int8)
    codes = (x / divisor[..., None]).add_(zero_points(zero, bits)[..., None]).round_().clamp_(0, n)
    codes = codes.masked_fill_(~usable[..., None], 0).to(torch.uint8)
    return GroupedHeads(codes.flatten(-2)[..., :width], byte, zero, bits, group)


def _in_groups(x: Tensor, group: int) -> Tensor:
    """[..., groups, group] for [..., width]: the last number again where the last group is short, which
    changes neither of its ends.
    """
    width = x.shape[-1]
    if missing := group_count(width, group) * group - width:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    return torch.unflatten(x, -1, (group_count(width, group), group))


def _scale_bytes(scale: Tensor) -> Tensor:
    """The scale bytes of fp32 numbers of 0 or more, rounded up."""
    byte = ((scale.view(torch.int32) + ((1 << 20) - 1)) >> 20) - SCALE_OFFSET
    usable = scale.isfinite() & (byte <= MOST_SCALE)
    byte = torch.where(usable, byte.clamp(min=LEAST_SCALE), SCALE_NAN)
    return torch.where(scale == 0, 0, byte).to(torch.uint8)
