"""Ternary codes five a byte, 1.6 bits each: the densest form that is decoded without a table.

Five codes c + 1 are the digits of v = 81 c0 + 27 c1 + 9 c2 + 3 c3 + c4 < 243, and the byte is the fraction
v / 243 of 256, rounded up. To decode, multiply by 3: what overflows 8 bits is the next digit, what does not
is multiplied again. 13 of the 256 bytes are never written. (GGUF's TQ1_0 has such bytes, in another order.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .planes import unsigned_ternary

DIGITS = 5
VALUES = 3**DIGITS


def pack_trits(codes: Tensor) -> Tensor:
    """Bytes of ternary codes, int8 of any shape in their order in memory: uint8 [ceil(n / 5)].

    The last byte is filled up with zero weights. Raises ValueError for codes other than -1, 0 and 1.
    """
    digits = torch.ones(-(-codes.numel() // DIGITS), DIGITS, dtype=torch.uint8, device=codes.device)
    digits.view(-1)[: codes.numel()] = unsigned_ternary(codes).reshape(-1)
    value = torch.zeros_like(digits[:, 0], dtype=torch.int32)
    for digit in digits.unbind(-1):
        value = value * 3 + digit
    return _fraction(value).to(torch.uint8)


def unpack_trits(packed: Tensor, n: int) -> Tensor:
    """Ternary codes of bytes that `pack_trits` made: int8 [n].

    Raises ValueError for bytes that it does not write, and for another number of them.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise TypeError(f"packed trits are a row of uint8, not {packed.dim()}-d {packed.dtype}")
    if packed.numel() != -(-n // DIGITS):
        raise ValueError(f"{n} trits take {-(-n // DIGITS)} bytes, not {packed.numel()}")
    value = (packed.to(torch.int32) * VALUES) >> 8
    if bool((_fraction(value) != packed).any()):
        raise ValueError("a byte of packed trits stands for no five trits")
    digits, rest = [], packed.to(torch.int16)
    for _ in range(DIGITS):
        rest = 3 * rest
        digits.append((rest >> 8).to(torch.int8) - 1)
        rest = rest & 0xFF
    codes = torch.stack(digits, -1).reshape(-1)
    if bool((codes[n:] != 0).any()):
        raise ValueError("packed trits are not filled up with zeros")
    return codes[:n]


def _fraction(value: Tensor) -> Tensor:
    """value / 243 of 256, rounded up: int32."""
    return torch.div(256 * value + VALUES - 1, VALUES, rounding_mode="floor")
