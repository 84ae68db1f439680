"""What the packed form means, in numpy and fp64: obvious rather than fast, and what runs without a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from neuzip.kernels import float_fields
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.float_fields.values import to_float64

from .form import FARTHEST, MAX_COLUMNS, PLANES, SLOTS, Packed, Window, best_window, lane_words

BF16 = FORMATS["BF16"]
AT_A_TIME = 1 << 22  # weights: keeps the intermediate arrays small

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]


def pack(bits: npt.NDArray[np.unsignedinteger], window: Window | None = None) -> Packed:
    """Pack bf16 patterns, uint16 [out, in], in the given window or the best one.

    Raises ValueError for other arrays, and for more than 65,536 columns.
    """
    if bits.ndim != 2 or bits.dtype != BF16.dtype:
        raise ValueError(f"pack takes a two-dimensional uint16 array, not {bits.ndim}-d {bits.dtype}")
    out, columns = bits.shape
    if columns > MAX_COLUMNS:
        raise ValueError(f"a packed row has at most {MAX_COLUMNS} weights, not {columns}")
    if window is None:
        window = best_window(float_fields.census(bits.reshape(-1), BF16).exponents)
    words = np.empty((out, PLANES, lane_words(columns)), np.uint32)
    counts = np.zeros(out + 1, np.int64)
    escape_columns, escape_highs = [np.empty(0, np.uint16)], [np.empty(0, np.uint8)]
    for rows in _blocks(out, columns):
        shifted = bits[rows] - np.uint16(window.shift)
        high, low = (shifted >> 8).astype(np.uint8), shifted.astype(np.uint8)
        distance = np.uint8(window.base) - (high & 0x7F)  # below zero it wraps to a large one
        row, column = np.nonzero(distance > FARTHEST)
        words[rows] = _to_words(low, np.minimum(distance, np.uint8(FARTHEST)), high >> 7)
        counts[1:][rows] = np.bincount(row, minlength=len(shifted))
        escape_columns.append(column.astype(np.uint16))
        escape_highs.append(high[row, column])
    row_start = np.cumsum(counts)
    if row_start[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"a packed tensor has at most 2**31 - 1 escapes, not {row_start[-1]}")
    return Packed(
        (out, columns), window, words, row_start.astype(np.int32),
        np.concatenate(escape_columns), np.concatenate(escape_highs),
    )  # fmt: skip


def decode(packed: Packed) -> Bits:
    """The patterns that were packed, uint16 [out, in], bit for bit."""
    bits = np.empty(packed.shape, np.uint16)
    for rows in _blocks(*packed.shape):
        bits[rows] = _slots(packed.words[rows], packed.window, packed.shape[1])
    row, column = _escaped(packed)
    high = packed.escape_highs.astype(np.uint16)
    bits[row, column] = (high << 8) | (bits[row, column] & 0xFF)
    bits += np.uint16(packed.window.shift)
    return bits


def matmul(x: npt.ArrayLike, packed: Packed) -> Floats:
    """x @ weights.T in fp64, of exactly the weights that were packed: [..., in] to [..., out]."""
    weights = to_float64(decode(packed).reshape(-1), BF16).reshape(packed.shape)
    return np.asarray(np.asarray(x, np.float64) @ weights.T)


def matmul_in_parts(x: npt.ArrayLike, packed: Packed) -> Floats:
    """The same as a kernel does it: the slots as they are, then for every escape what its slot is off by."""
    x = np.asarray(x, np.float64)
    slots = _slots(packed.words, packed.window, packed.shape[1])
    scale = 2.0**packed.window.parity
    y = x @ (scale * to_float64(slots.reshape(-1), BF16).reshape(packed.shape)).T
    row, column = _escaped(packed)
    stand_in = slots[row, column]
    shifted = (packed.escape_highs.astype(np.uint16) << 8) | (stand_in & 0xFF)
    weight = shifted + np.uint16(packed.window.shift)
    off = to_float64(weight, BF16) - scale * to_float64(stand_in, BF16)
    np.add.at(y.T, row, (off * x[..., column]).T)
    return np.asarray(y)


def _blocks(out: int, columns: int) -> list[slice]:
    """The rows in blocks of some million weights."""
    step = max(1, AT_A_TIME // max(1, columns))
    return [slice(start, min(out, start + step)) for start in range(0, out, step)]


def _escaped(packed: Packed) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
    """Row and column of every escape."""
    return np.repeat(np.arange(packed.shape[0]), np.diff(packed.row_start)), packed.escape_columns


def _to_words(low: Bytes, codes: Bytes, signs: Bytes) -> npt.NDArray[np.uint32]:
    """The words of rows from the fields of their weights, each [rows, columns]."""
    rows, columns = low.shape
    lane = lane_words(columns)
    spare = ((0, 0), (0, SLOTS * lane - columns))
    planes = np.zeros((rows, PLANES, lane, 4), np.uint8)  # byte b of word c of a plane
    # Slot q = 4 g + b is the columns q lane to (q + 1) lane: byte b of words of plane g.
    by_slot = (rows, 8, 4, lane)
    planes[:, :8] = np.pad(low, spare).reshape(by_slot).swapaxes(2, 3)
    codes = np.pad(codes, spare, constant_values=FARTHEST).reshape(by_slot)
    signs = np.pad(signs, spare).reshape(by_slot)
    for g in range(8):
        planes[:, 8 + g // 4] |= codes[:, g].swapaxes(1, 2) << (2 * (g % 4))
        planes[:, 10] |= signs[:, g].swapaxes(1, 2) << g
    return planes.view("<u4").reshape(rows, PLANES, lane)


def _slots(words: npt.NDArray[np.uint32], window: Window, columns: int) -> Bits:
    """The shifted patterns that the slots of rows are worth without the escapes, as a kernel finds them."""
    rows, _, lane = words.shape
    slots = np.empty((rows, 8, 4, lane), np.uint16)
    for g in range(8):
        low, codes, signs = words[:, g], words[:, 8 + g // 4], words[:, 10]
        high = np.uint32(window.base * 0x01010101) - ((codes >> (2 * (g % 4))) & 0x03030303)
        high |= (signs << (7 - g)) & 0x80808080
        for b in range(4):
            slots[:, g, b] = (((high >> (8 * b)) & 0xFF) << 8) | ((low >> (8 * b)) & 0xFF)
    return slots.reshape(rows, SLOTS * lane)[:, :columns]
