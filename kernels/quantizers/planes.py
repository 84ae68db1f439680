"""Codes of b bits in 32-bit words, laid out for kernels that multiply four bytes at once (`dp4a`).

The bits of a code go to planes of 8, 4, 2 and 1 bits, the binary digits of b, the leading ones to the widest:
3 bits are a plane of 2 and a plane of 1. A word of a plane of w bits holds 32 / w codes that follow each
other, code e from its bit 8 (e mod 4) + w (e div 4) on:

    w = 2    byte 0: codes 0 4 8 12     byte 1: 1 5 9 13     byte 2: 2 6 10 14     byte 3: 3 7 11 15
    w = 4    byte 0: codes 0 4          byte 1: 1 5          byte 2: 2 6           byte 3: 3 7

so (word >> w j) & (2**w - 1) * 0x01010101 is codes 4 j to 4 j + 3, one a byte: they meet the activations
4 j to 4 j + 3, a word of int8 as it lies in memory. Words are int32 and little-endian. A row fills whole
words of each plane; its planes lie one behind the other, the widest first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plane_widths(bits: int) -> tuple[int, ...]:
    """The widths of the planes of codes of `bits` bits, 1 to 8.

    >>> plane_widths(3), plane_widths(4)
    ((2, 1), (4,))
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def words(n: int, bits: int) -> int:
    """How many words n codes of a row take.

    >>> words(128, 3), words(128, 4), words(17, 2)
    (12, 16, 2)
    """
    return sum(-(-n * width // 32) for width in plane_widths(bits))


def pack(codes: Tensor, bits: int, *, fill: int = 0, check: bool = True) -> Tensor:
    """Words of codes, uint8 [..., n] below 2**bits: int32 [..., words(n, bits)].

    The last words are filled up with the code `fill`. Raises ValueError for codes that are too large, which
    waits for the device; without `check` the caller promises that there are none.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes to be packed are uint8, not {codes.dtype}")
    if check and codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"a code is {int(codes.max())}, which takes more than {bits} bits")
    left, planes = bits, []
    for width in plane_widths(bits):
        left -= width
        planes.append(_pack_plane(codes, left, width, fill))
    return torch.cat(planes, -1)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Codes of words that `pack` made: uint8 [..., n] of int32 [..., words(n, bits)].

    Raises ValueError for another number of words.
    """
    if packed.dtype != torch.int32:
        raise TypeError(f"packed codes are int32 words, not {packed.dtype}")
    if packed.shape[-1] != words(n, bits):
        raise ValueError(f"{n} codes of {bits} bits take {words(n, bits)} words, not {packed.shape[-1]}")
    codes = packed.new_zeros((*packed.shape[:-1], n), dtype=torch.uint8)
    widths = plane_widths(bits)
    for width, plane in zip(widths, torch.split(packed, [words(n, w) for w in widths], -1), strict=True):
        codes = codes << width | _unpack_plane(plane, width)[..., :n]
    return codes


def pack_ternary(codes: Tensor) -> Tensor:
    """Words of ternary codes, int8 [..., n] of -1, 0 and 1, as c + 1 in 2 bits: int32 [..., ceil(n / 16)].

    Rows are filled up with zero weights. Raises ValueError for other codes.
    """
    return pack(unsigned_ternary(codes), 2, fill=1)


def unpack_ternary(packed: Tensor, n: int) -> Tensor:
    """Ternary codes of words that `pack_ternary` made: int8 [..., n].

    Raises ValueError for words that it does not write: with a code of 3, or filled up with anything else.
    """
    columns = 16 * packed.shape[-1]
    if packed.shape[-1] != words(n, 2):
        raise ValueError(f"{n} ternary weights take {words(n, 2)} words, not {packed.shape[-1]}")
    codes = unpack(packed, 2, columns)
    if bool((codes == 3).any()):
        raise ValueError("packed ternary weights hold a code of 3")
    if bool((codes[..., n:] != 1).any()):
        raise ValueError("packed ternary weights are not filled up with zeros")
    return codes[..., :n].to(torch.int8) - 1


def unsigned_ternary(codes: Tensor) -> Tensor:
    """0, 1 and 2 for codes of -1, 0 and 1: uint8 for int8. Raises ValueError for other codes."""
    if codes.dtype != torch.int8:
        raise TypeError(f"ternary codes are int8, not {codes.dtype}")
    if bool(((codes < -1) | (codes > 1)).any()):
        raise ValueError("ternary codes are -1, 0 and 1")
    return (codes + 1).to(torch.uint8)


def _pack_plane(codes: Tensor, shift: int, width: int, fill: int) -> Tensor:
    """Words of `width` bits of each code, from bit `shift` on."""
    *outer, n = codes.shape
    count = words(n, width)
    field = torch.full((*outer, 32 // width * count), fill, dtype=torch.uint8, device=codes.device)
    field[..., :n] = codes
    field = (field >> shift) & ((1 << width) - 1)
    field = torch.unflatten(field, -1, (count, 8 // width, 4))
    packed = torch.zeros((*outer, count), dtype=torch.int32, device=codes.device)
    by_byte = torch.unflatten(packed.view(torch.uint8), -1, (count, 4))
    for j in range(8 // width):
        by_byte |= field[..., j, :] << (width * j)
    return packed


def _unpack_plane(packed: Tensor, width: int) -> Tensor:
    """All codes that the words of a plane can hold."""
    count = packed.shape[-1]
    by_byte = torch.unflatten(packed.contiguous().view(torch.uint8), -1, (count, 4))
    parts = [(by_byte >> (width * j)) & ((1 << width) - 1) for j in range(8 // width)]
    return torch.stack(parts, -2).flatten(-3)
