"""What the packed form means, in numpy and fp64: obvious rather than fast, and what runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from neuzip.kernels import float_fields
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.float_fields.values import to_float64

from .form import (
    BF16,
    FEW_ESCAPES,
    SLOTS,
    TILE_ROWS,
    Bits,
    ExponentWindow,
    Packed,
    PackedLayout,
    Planes,
    best_window,
    check_columns,
    check_escapes,
    index_shape,
    low_bits,
    slot_columns,
    words_shape,
)

AT_A_TIME = 1 << 22  # weights: keeps the intermediate arrays small

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Rows = slice | npt.NDArray[np.integer]


def pack(
    bits: npt.NDArray[np.unsignedinteger], window: ExponentWindow | None = None, fmt: FloatFormat = BF16
) -> Packed:
    """Pack bf16 or fp16 patterns, uint16 [out, in], in the given window or the best one.

    Raises ValueError for other arrays, for a window of the other format, and for more than 65,536 columns.
    """
    if bits.ndim != 2 or bits.dtype != np.uint16:
        raise ValueError(f"pack takes a two-dimensional uint16 array, not {bits.ndim}-d {bits.dtype}")
    out, columns = bits.shape
    check_columns(columns)
    census = float_fields.census(bits.reshape(-1), fmt)
    if window is None:
        window = best_window(census.exponents, fmt)
    if window.fmt != fmt:
        raise ValueError(f"a window of {window.fmt.name} is not one for {fmt.name}")
    layout = PackedLayout(fmt, low_bits(census.mantissa_union))
    words = np.empty(words_shape(out, columns, layout), np.uint32)
    far = np.empty((words.shape[0], *words.shape[2:]), np.uint32)
    counts = np.zeros(out + 1, np.int64)
    escapes = [np.empty(0, np.uint32)]
    for rows in _blocks(out, columns):
        outside, fields = _slot_fields(bits[rows], window, layout)
        tiles = slice(rows.start // TILE_ROWS, -(-rows.stop // TILE_ROWS))
        words[tiles] = _to_words(fields, layout, layout.groups)
        far[tiles] = _to_words(fields, layout, (layout.far,))[:, 0]
        row, column = np.nonzero(outside)
        counts[1:][rows] = np.bincount(row, minlength=len(outside))
        escapes.append((column | bits[rows][row, column].astype(np.int64) << 16).astype(np.uint32))
    row_start = np.cumsum(counts)
    check_escapes(int(row_start[-1]))
    few = row_start[-1] <= FEW_ESCAPES
    return Packed(
        (out, columns), layout.low_bits, window, words, *_gathered(far, columns),
        row_start.astype(np.uint16 if few else np.int32), np.concatenate(escapes),
    )  # fmt: skip


def decode(packed: Packed, rows: Rows | None = None) -> Bits:
    """The patterns that were packed, bit for bit: of all rows, or of those that a slice or an array names.

    uint16 [rows, in]. Raises IndexError for rows that there are not.
    """
    numbers = np.arange(packed.shape[0])
    numbers = numbers if rows is None else numbers[rows]
    bits = np.empty((numbers.size, packed.shape[1]), np.uint16)
    for block in _blocks(*bits.shape):
        bits[block] = _slots(packed, numbers[block]) + np.uint16(packed.window.shifted)
        row, column, pattern = _escapes(packed, numbers[block])
        bits[block][row, column] = pattern
    return bits


def matmul(x: npt.ArrayLike, packed: Packed) -> Floats:
    """x @ weights.T in fp64, of exactly the weights that were packed: [..., in] to [..., out]."""
    return np.asarray(np.asarray(x, np.float64) @ _numbers(decode(packed), packed).T)


def _numbers(bits: Bits, packed: Packed) -> Floats:
    return to_float64(bits.reshape(-1), packed.window.fmt).reshape(bits.shape)


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    """The rows in blocks of some million weights, all but the last of whole tiles."""
    step = max(1, AT_A_TIME // max(1, TILE_ROWS * columns)) * TILE_ROWS
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _slot_fields(
    bits: Bits, window: ExponentWindow, layout: PackedLayout
) -> tuple[npt.NDArray[np.bool_], dict[str, Bytes]]:
    """Which of some patterns [rows, in] are escapes, and what the slots of all of them hold."""
    kinds = window.kinds[bits >> window.fmt.mantissa_bits & (1 << window.fmt.exponent_bits) - 1]
    packed, is_far = kinds != 0, kinds == 2
    shifted = np.where(packed, bits - np.uint16(window.shifted), window.slots_of_escapes(bits))
    low, high = shifted.astype(np.uint8), (shifted >> 8).astype(np.uint8)
    top = (high & 0x7F) >> layout.middle_bits ^ np.where(is_far, layout.far_bit, 0).astype(np.uint8)
    fields = {
        "low": low,
        "middle": high & ((1 << layout.middle_bits) - 1),
        "code": np.uint8(window.base) - top,
        "sign": high >> 7,
        "far": is_far.astype(np.uint8),
    }
    return ~packed, fields


def _escapes(
    packed: Packed, rows: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.integer], Bits]:
    """Every escape of some rows: its place in `rows`, its column, and its pattern."""
    start = packed.row_start[rows].astype(np.int64)
    counts = packed.row_start[rows + 1] - start
    row = np.repeat(np.arange(rows.size), counts)
    escapes = packed.escapes[np.arange(row.size) + np.repeat(start - (np.cumsum(counts) - counts), counts)]
    return row, (escapes & 0xFFFF).astype(np.int64), (escapes >> 16).astype(np.uint16)


def _to_words(
    fields: dict[str, Bytes], layout: PackedLayout, groups: tuple[Planes, ...]
) -> npt.NDArray[np.uint32]:
    """The words of tiles from the fields of their weights, each [rows, columns]: of all planes of groups."""
    rows, columns = fields["low"].shape
    tiles, _, lane, *_ = words_shape(rows, columns, layout)
    count, order = sum(group.width for group in groups), slot_columns(columns)
    planes = np.zeros((tiles * TILE_ROWS, count, lane, 4), np.uint8)  # byte b of word c of a plane
    for group in groups:
        no_weight = layout.farthest if group.field == "code" else 0
        filling = ((0, tiles * TILE_ROWS - rows), (0, SLOTS * lane - columns))
        field = np.pad(fields[group.field], filling, constant_values=no_weight)[:, order]
        bits = ((field >> group.shift) & ((1 << group.width) - 1)).reshape(len(planes), lane, 8, 4)
        for g in range(8):
            plane, bit = group.place(g)
            planes[:, plane] |= bits[:, :, g] << bit
    # Row r + 8 h of a tile stands at [r, h], behind the word's number.
    words = planes.view("<u4").reshape(tiles, 2, 8, count, lane)
    return np.asarray(words.transpose(0, 3, 4, 2, 1))


def _gathered(
    far: npt.NDArray[np.uint32], columns: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The index of a plane of far words [tiles, lane_words, 8, 2], and its words that are not zero."""
    tiles, lane, *_ = far.shape
    pairs = np.pad(far.reshape(tiles, lane, TILE_ROWS), ((0, 0), (0, lane % 2), (0, 0)))
    pairs = pairs.reshape(tiles, -(-lane // 2), 2 * TILE_ROWS)
    there = pairs != 0
    counts = there.sum(2)
    index = np.empty(index_shape(tiles * TILE_ROWS, columns), np.uint32)
    index[..., 0] = (there.astype(np.uint32) << np.arange(2 * TILE_ROWS, dtype=np.uint32)).sum(2)
    index[..., 1] = np.cumsum(counts).reshape(counts.shape) - counts
    return index, pairs[there]


def _far(packed: Packed, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """The far words of some rows, 0 where there is none: [rows, lane_words]."""
    index = packed.far_index[rows // TILE_ROWS]
    there = (index[..., :1] >> np.arange(2 * TILE_ROWS, dtype=np.uint32)) & 1
    number = index[..., 1:] + np.cumsum(there, 2) - there
    # A pair has the 16 rows of its first word, then those of the second.
    own = (rows % 8 * 2 + rows % TILE_ROWS // 8)[:, None, None] + [0, TILE_ROWS]
    there, number = (
        np.take_along_axis(a, own, 2).reshape(rows.size, -1)[:, : packed.lane_words] for a in (there, number)
    )
    words = np.zeros(there.shape, np.uint32)
    words[there != 0] = packed.far_words[number[there != 0]]
    return words


def _slots(packed: Packed, rows: npt.NDArray[np.integer]) -> Bits:
    """The shifted patterns that the slots of some rows are worth without escapes, as a kernel finds them."""
    layout, words = packed.layout, packed.words[rows // TILE_ROWS, :, :, rows % 8, rows % TILE_ROWS // 8]
    words = np.concatenate([words, _far(packed, rows)[:, None]], axis=1)
    groups = (*layout.groups, replace(layout.far, first=layout.planes))
    slots = np.empty((rows.size, packed.lane_words, 8, 4), np.uint16)
    for g in range(8):
        fields = {name: np.zeros_like(words[:, 0]) for name in ("low", "middle", "code", "sign", "far")}
        for group in groups:
            plane, bit = group.place(g)
            bits = (words[:, plane] >> bit) & np.uint32(((1 << group.width) - 1) * 0x01010101)
            fields[group.field] |= bits << group.shift
        # No byte borrows from the next: no code is above the base.
        top = np.uint32(packed.window.base * 0x01010101) - fields["code"] ^ fields["far"] * layout.far_bit
        high = (top << layout.middle_bits) | fields["middle"] | (fields["sign"] << 7)
        for b in range(4):
            slots[:, :, g, b] = (((high >> (8 * b)) & 0xFF) << 8) | ((fields["low"] >> (8 * b)) & 0xFF)
    patterns = np.empty((rows.size, SLOTS * packed.lane_words), np.uint16)
    patterns[:, slot_columns(packed.shape[1])] = slots.reshape(patterns.shape)
    return patterns[:, : packed.shape[1]]
