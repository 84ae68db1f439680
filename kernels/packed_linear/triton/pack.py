"""Weights to the packed form and back on a GPU, in Triton: the bytes of the reference.

Packing reads the weights three times: the census; the words, with the number of escapes of every row, and all
far words, of which those that are not zero are then gathered; the escapes, when it is known where those of
each row begin. The host waits for the census, for the number of far words, for what `turns` asks, and in the
end.

A thread has one word of every plane of one row, which are 32 weights. 16 threads side by side
have the rows of a tile, so that words come and go in whole sectors. Rows are therefore *numbered* as their
words lie: 16 t + 2 r + h is the number of row 16 t + r + 8 h.

Decoding reads every word once. Then, behind a barrier, the same program writes the escapes of its rows and
columns. Nothing is read or written outside the arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.device.mma_fragments import side_by_side
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.packed_linear.form import (
    F16,
    FEW_ESCAPES,
    SLOTS,
    TILE_ROWS,
    TURN,
    PackedLayout,
    best_window,
    check_columns,
    check_escapes,
    index_shape,
    lane_words,
    low_bits,
    words_shape,
)
from neuzip.kernels.packed_linear.tensor import PackedTensor, format_of
from neuzip.kernels.packed_linear.triton.slots import (
    as_start,
    columns_of_word,
    count_below,
    differ,
    slot_of_escape,
)
from neuzip.kernels.packed_linear.turns import by_turn
from neuzip.kernels.tuning import launch_for

WORDS = 8
"""Words of each row that a program has, if it has the 16 rows of a tile."""

WORDS_OF_ONE = 32
"""If it has one row."""

INVALID = 0x7FFF7FFF  # two NaNs in both formats


def pack(weight: torch.Tensor) -> PackedTensor:
    """Pack bf16 or fp16 weights [out, in], contiguous: the arrays that the reference makes.

    Waits for the device. Raises ValueError for more than 65,536 columns.
    """
    fmt = format_of(weight.dtype)
    out, columns = weight.shape
    check_columns(columns)
    bits = weight.view(torch.int16)
    exponents, mantissas = _census(bits, fmt)
    window = best_window(exponents, fmt)
    layout = PackedLayout(fmt, low_bits(mantissas))
    escapes = int(exponents[window.kinds == 0].sum())
    check_escapes(escapes)
    device = weight.device
    words = torch.empty(words_shape(out, columns, layout), dtype=torch.int32, device=device)
    tiles, _, lane, *_ = words.shape
    far = torch.empty(tiles, lane + lane % 2, TILE_ROWS, dtype=torch.int32, device=device)
    starts = torch.zeros(out + 1, dtype=torch.int32, device=device)
    listed = torch.empty(escapes, dtype=torch.int32, device=device)
    if weight.numel():
        kinds = torch.from_numpy(window.kinds).to(device)
        _write_words(bits, kinds, words, far, starts[1:], layout, window.base, window.shift)
        starts = torch.cumsum(starts, 0, dtype=torch.int32)
        if escapes:
            _list_escapes(bits, kinds, starts, listed, fmt)
    row_start = starts.to(torch.int16) if escapes <= FEW_ESCAPES else starts  # in 16 bits, modulo 2**16
    packed = PackedTensor(
        (out, columns), weight.dtype, layout.low_bits, window.base, window.shift, words,
        *_gathered(far, columns), row_start, listed, *by_turn(listed, row_start, columns, window),
    )  # fmt: skip
    packed.wait()
    return packed


def compile_packing(out: int, columns: int, dtype: torch.dtype, low_bits: int) -> None:
    """Compile what `pack` launches for weights of a shape that hold `low_bits`, for the current GPU."""
    fmt = format_of(dtype)
    layout = PackedLayout(fmt, low_bits)
    with torch.device("meta"):
        bits, kinds = torch.empty(out, columns, dtype=torch.int16), torch.empty(256, dtype=torch.uint8)
        words = torch.empty(words_shape(out, columns, layout), dtype=torch.int32)
        starts, numbers = torch.empty(out + 1, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        counts = torch.empty(1, dtype=torch.int64)
    _count(bits, counts, fmt)
    _write_words(bits, kinds, words, words, starts[1:], layout, base=0, shift=0)
    _list_escapes(bits, kinds, starts, numbers, fmt)


def _write_words(
    bits: torch.Tensor, kinds: torch.Tensor, words: torch.Tensor, far: torch.Tensor, counts: torch.Tensor,
    layout: PackedLayout, base: int, shift: int,
) -> None:  # fmt: skip
    """Write words, all far words, and the escapes of each row to `counts`, which are 0 before."""
    (out, columns), (tiles, _, lane, *_) = bits.shape, words.shape
    launch(
        _words_kernel, (tiles * triton.cdiv(lane + lane % 2, WORDS),),
        bits, kinds, words, far, counts, out=out, columns=columns, lane=lane, base=base, shift=shift,
        F16=layout.fmt == F16, LOW_BITS=layout.low_bits, WORDS=WORDS, num_warps=WORDS * TILE_ROWS // 32,
        device=bits.device,
    )  # fmt: skip


def _list_escapes(
    bits: torch.Tensor, kinds: torch.Tensor, starts: torch.Tensor, listed: torch.Tensor, fmt: FloatFormat
) -> None:
    """Write the escapes of all rows, those of a row from its start on."""
    launch(
        _escapes_kernel, (bits.shape[0],),
        bits, kinds, starts, listed, bits.shape[1], F16=fmt == F16, TILE=1024, device=bits.device,
    )  # fmt: skip


def decode(packed: PackedTensor, start: int, stop: int, dense: torch.Tensor) -> None:
    """Write rows `start` to `stop`, which there are, to `dense`, contiguous [stop - start, in]."""
    _decode(packed, None, start, stop - start, dense)


def compile_rows(packed: PackedTensor) -> None:
    """Compile what `rows` launches for weights like `packed`, on the meta device, on the current GPU."""
    ids = torch.empty(1, dtype=torch.int64, device="meta")
    rows(packed, ids, torch.empty(1, packed.shape[1], dtype=packed.dtype, device="meta"))


def rows(packed: PackedTensor, ids: torch.Tensor, dense: torch.Tensor) -> None:
    """Write the rows that `ids` [n], int32 or int64, name to `dense`, contiguous [n, in], bit for bit.

    A row that there is not is written as NaNs.
    """
    _decode(packed, ids, 0, ids.numel(), dense)


def _decode(
    packed: PackedTensor, ids: torch.Tensor | None, start: int, count: int, dense: torch.Tensor
) -> None:
    out, columns = packed.shape
    if count == 0 or columns == 0:
        return
    lane = lane_words(columns)
    if ids is None:
        downs, together = -(-(start % TILE_ROWS + count) // TILE_ROWS), TILE_ROWS
        most = WORDS
    else:
        downs, together, most = count, 1, WORDS_OF_ONE
    wide = min(most, 1 << (lane - 1).bit_length())
    whole = columns == SLOTS * lane and dense.data_ptr() % 4 == 0
    turns = whole and columns % TURN == 0
    launch(
        _decode_kernel, (downs * -(-lane // wide),),
        packed.words, packed.far_index, packed.far_words, packed.row_start, packed.escapes, ids,
        dense.view(-1).view(torch.int32 if whole else torch.int16), start=start, count=count, out=out,
        columns=columns, lane=lane, base=packed.base, shift=packed.shift,
        F16=packed.dtype == torch.float16, LOW_BITS=packed.low_bits, WHOLE=whole, TURNS=turns,
        WORDS=wide, ROWS=together, COMPILED=is_compiled(_decode_kernel), INVALID=INVALID,
        num_warps=max(1, wide * together // 32), device=dense.device,
    )  # fmt: skip


def _census(bits: torch.Tensor, fmt: FloatFormat) -> tuple[npt.NDArray[np.int64], int]:
    """How often each exponent occurs, and bits of the mantissas among which is the lowest that any has."""
    counts = torch.zeros((1 << fmt.exponent_bits) + 1, dtype=torch.int64, device=bits.device)
    counted = _count(bits, counts, fmt) if bits.numel() else 0
    *exponents, mantissas = counts.tolist()
    exponents[0] -= counted - bits.numel()  # what the last tile has beyond the weights counts as 0
    return np.array(exponents), mantissas


def _count(bits: torch.Tensor, counts: torch.Tensor, fmt: FloatFormat) -> int:
    """Add to the counts of exponents, and unite mantissas behind them; how many weights whole tiles have."""
    config = launch_for("packed_linear.census", bits.device)
    tile = config["tile"]
    tiles = triton.cdiv(bits.numel(), tile)
    launch(
        _census_kernel, (min(tiles, config["programs"] * multiprocessors(bits.device)),),
        bits, counts, bits.numel(), EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits, TILE=tile,
        num_warps=config["num_warps"], device=bits.device,
    )  # fmt: skip
    return int(tiles * tile)


def _gathered(far: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of far words [tiles, an even number, 16], and those that are not zero, for which it waits."""
    pairs = far.view(far.shape[0], far.shape[1] // 2, 2 * TILE_ROWS)
    there = pairs != 0
    bits = torch.arange(2 * TILE_ROWS, device=far.device)
    masks = (there.to(torch.int64) << bits).sum(2)
    counts = there.sum(2)
    starts = counts.flatten().cumsum(0).view_as(counts) - counts
    index = torch.stack([masks, starts], dim=2).to(torch.int32)  # modulo 2**32
    return index.view(index_shape(TILE_ROWS * far.shape[0], columns)), pairs[there]


# Kernels. Bytes of the four slots of a group are handled together, in one int32.


@triton.jit
def _census_kernel(
    bits_ptr, counts_ptr, numel, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TILE: tl.constexpr
):
    """Add to the counts of exponents; unite, behind them, the lowest mantissa bits that programs have met."""
    NAMES: tl.constexpr = 1 << EXPONENT
    offs = tl.arange(0, TILE)
    counts = tl.zeros([NAMES], tl.int32)
    union = tl.zeros([TILE], tl.int32)
    pid, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for at in range(pid * TILE, numel, programs * TILE):
        v = tl.load(bits_ptr + at + offs, mask=at + offs < numel, other=0).to(tl.int32)
        union |= v
        counts += tl.histogram((v >> MANTISSA) & (NAMES - 1), NAMES)
    tl.atomic_add(counts_ptr + tl.arange(0, NAMES), counts.to(tl.int64), mask=counts != 0, sem="relaxed")
    union &= (1 << MANTISSA) - 1
    lowest = tl.min(tl.where(union != 0, union & -union, 1 << MANTISSA)) & ((1 << MANTISSA) - 1)
    tl.atomic_or(counts_ptr + NAMES, lowest.to(tl.int64), sem="relaxed")


@triton.jit
def _row_and_word(program, lane, WORDS: tl.constexpr, ROWS: tl.constexpr):
    """What a thread has: the number of its row among ROWS, where these begin, its word, the first of all."""
    across = tl.cdiv(lane, WORDS)
    t = tl.arange(0, WORDS * ROWS)
    first = program % across * WORDS
    return t % ROWS, program // across, first + t // ROWS, first


@triton.jit
def _put(words, field, g: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Add WIDTH bits of a field of group g, from bit SHIFT on, to the word of a plane; g counts within it."""
    return words | ((field >> SHIFT) & (((1 << WIDTH) - 1) * 0x01010101)) << (g * WIDTH % 8)


@triton.jit
def _take(words, g, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `_put`."""
    return ((words >> (g * WIDTH % 8)) & (((1 << WIDTH) - 1) * 0x01010101)) << SHIFT


@triton.jit
def _kind(kinds_ptr, v, there, F16: tl.constexpr):
    """Whether patterns in int32 are escapes, in the window, or far: see `ExponentWindow.kinds`."""
    exponent = (v >> 10) & 0x1F if F16 else (v >> 7) & 0xFF
    return tl.load(kinds_ptr + exponent, mask=there, other=0)


@triton.jit(do_not_specialize=["out", "columns", "lane", "base", "shift"])
def _words_kernel(
    bits_ptr, kinds_ptr, words_ptr, far_ptr, counts_ptr, out, columns, lane, base, shift,
    F16: tl.constexpr, LOW_BITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write words of a tile, its far words, also those that are 0, and add its escapes to those of rows."""
    PLANES: tl.constexpr = LOW_BITS + (6 if F16 else 3)
    SHIFT4: tl.constexpr = 4
    SHIFT2: tl.constexpr = 4 - (LOW_BITS & 4) + 2
    SHIFT1: tl.constexpr = 8 - LOW_BITS
    MIDDLES: tl.constexpr = LOW_BITS
    CODES: tl.constexpr = LOW_BITS + (2 if F16 else 0)
    even = lane + lane % 2
    number, tile, c, _ = _row_and_word(tl.program_id(0), even, WORDS, 16)
    tile = tile.to(tl.int64)
    row = tile * 16 + number // 2 + number % 2 * 8
    here = c < lane
    target = words_ptr + (tile * PLANES * lane + c) * 16 + number
    plane = lane * 16
    begin, whole = columns_of_word(c, lane)
    source = bits_ptr + row * columns
    zero = tl.zeros([WORDS * 16], tl.int32)
    low1, uppers, signs, fars, escapes = zero, zero, zero, zero, zero
    for half in tl.static_range(2):
        low4, low2, middles, codes = zero, zero, zero, zero
        for j in tl.static_range(4):
            low, high, code, far = zero, zero, zero, zero
            for b in tl.static_range(4):
                g = 4 * half + j
                k = begin + tl.where(whole, 16 * g + 8 * (b // 2) + b % 2, 4 * g + b)
                there = here & (row < out) & (k < columns)
                v = tl.load(source + k, mask=there, other=0).to(tl.int32) & 0xFFFF
                kind = _kind(kinds_ptr, v, there, F16)
                v = tl.where(
                    kind != 0,
                    (v - (shift << (10 if F16 else 7))) & 0xFFFF,
                    slot_of_escape(v, base, shift, F16),
                )
                top = (v & 0x7FFF) >> (10 if F16 else 8)
                distance = base - (top ^ tl.where(kind == 2, 8 if F16 else 4, 0))
                low |= (v & 0xFF) << 8 * b
                high |= (v >> 8) << 8 * b
                code |= distance << 8 * b
                far |= (kind == 2).to(tl.int32) << 8 * b
                escapes += (there & (kind == 0)).to(tl.int32)
            if LOW_BITS == 8:
                tl.store(target + (4 * half + j) * plane, low, mask=here)
            if LOW_BITS & 4:
                low4 = _put(low4, low, j, SHIFT4, 4)
                if j % 2 == 1:
                    tl.store(target + (2 * half + j // 2) * plane, low4, mask=here)
                    low4 = zero
            low2 = _put(low2, low, j, SHIFT2, 2)
            low1 |= _put(zero, low, j, SHIFT1, 1) << 4 * half
            middles = _put(middles, high, j, 0, 2)
            codes = _put(codes, code, j, 0, 2)
            uppers |= _put(zero, code, j, 2, 1) << 4 * half
            signs |= _put(zero, high, j, 7, 1) << 4 * half
            fars |= _put(zero, far, j, 0, 1) << 4 * half
        if LOW_BITS & 2:
            tl.store(target + ((LOW_BITS & 4) + half) * plane, low2, mask=here)
        if F16:
            tl.store(target + (MIDDLES + half) * plane, middles, mask=here)
        tl.store(target + (CODES + half) * plane, codes, mask=here)
    if LOW_BITS & 1:
        tl.store(target + (LOW_BITS - 1) * plane, low1, mask=here)
    if F16:
        tl.store(target + (PLANES - 2) * plane, uppers, mask=here)
    tl.store(target + (PLANES - 1) * plane, signs, mask=here)
    tl.store(far_ptr + (tile * even + c) * 16 + number, fars, mask=c < even)

    number = tl.arange(0, 16)
    row = tile * 16 + number // 2 + number % 2 * 8
    of_row = tl.sum(tl.reshape(escapes, [WORDS, 16]), 0)
    tl.atomic_add(counts_ptr + row, of_row, mask=(row < out) & (of_row != 0), sem="relaxed")


@triton.jit(do_not_specialize=["columns"])
def _escapes_kernel(
    bits_ptr, kinds_ptr, row_start_ptr, escapes_ptr, columns, F16: tl.constexpr, TILE: tl.constexpr
):
    """Write the escapes of a row in the order of its columns."""
    row = tl.program_id(0)
    at = tl.load(row_start_ptr + row)
    source = bits_ptr + row.to(tl.int64) * columns
    for first in range(0, columns, TILE):
        k = first + tl.arange(0, TILE)
        v = tl.load(source + k, mask=k < columns, other=0).to(tl.int32)
        escape = (k < columns) & (_kind(kinds_ptr, v, k < columns, F16) == 0)
        number = escape.to(tl.int32)
        tl.store(escapes_ptr + at + tl.cumsum(number) - number, k | v << 16, mask=escape)
        at += tl.sum(number)


@triton.jit
def _source_and_target(number, down, ids_ptr, start, count, out, ROWS: tl.constexpr):
    """Rows of a program: that of the weights, whether it is there, the dense row, whether it is wanted."""
    if ids_ptr is None:
        row = (start // 16 + down).to(tl.int64) * 16 + number // 2 + number % 2 * 8
        wanted = (row >= start) & (row < start + count)
        return row, wanted, row - start, wanted
    else:
        target = down * ROWS + number
        wanted = target < count
        row = tl.load(ids_ptr + target, mask=wanted, other=0).to(tl.int64)
        valid = wanted & (row >= 0) & (row < out)
        return tl.where(valid, row, 0), valid, target.to(tl.int64), wanted


@triton.jit
def _octet(words):
    """8 words [threads] side by side: [threads, 8]."""
    even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
    odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
    return tl.reshape(tl.join(even, odd), [words[0].shape[0], 8])


@triton.jit(do_not_specialize=["start", "count", "out", "columns", "base", "shift"])
def _decode_kernel(
    words_ptr, index_ptr, far_ptr, row_start_ptr, escapes_ptr, ids_ptr, dense_ptr,
    start, count, out, columns, lane, base, shift,
    F16: tl.constexpr, LOW_BITS: tl.constexpr, WHOLE: tl.constexpr, TURNS: tl.constexpr, WORDS: tl.constexpr,
    ROWS: tl.constexpr, COMPILED: tl.constexpr, INVALID: tl.constexpr,
):  # fmt: skip
    """Write a part of `count` dense rows: of those from `start` on, or of those that ids name.

    WHOLE: dense_ptr is of words of two weights, and no row ends within a word of a plane. TURNS: nor within
    a turn, of which a program has some.
    """
    PLANES: tl.constexpr = LOW_BITS + (6 if F16 else 3)
    CODES: tl.constexpr = LOW_BITS + (2 if F16 else 0)
    number, down, c, first = _row_and_word(tl.program_id(0), lane, WORDS, ROWS)
    row, valid, dense_row, wanted = _source_and_target(number, down, ids_ptr, start, count, out, ROWS)
    there = valid & (c < lane)
    tile, own = row // 16, (row % 8 * 2 + row % 16 // 8).to(tl.int32)
    source = words_ptr + (tile * PLANES * lane + c) * 16 + own
    plane = lane * 16
    record = index_ptr + (tile * ((lane + 1) // 2) + c // 2) * 2
    mask = tl.load(record, mask=there, other=0)
    bit = c % 2 * 16 + own
    at = tl.load(record + 1, mask=there, other=0) + count_below(mask, bit, COMPILED)
    far = tl.load(far_ptr + at, mask=there & ((mask >> bit) & 1 != 0), other=0)

    # The pattern less the shift's exponents, plus these: nothing is carried from one slot to the next, as no
    # window reaches so far.
    turn, base4 = shift * (0x04000400 if F16 else 0x00800080), base * 0x01010101
    sign = tl.load(source + (PLANES - 1) * plane, mask=there, other=0)
    zero = tl.zeros_like(sign)
    upper, low1, low2, low4, middle, code = zero, zero, zero, zero, zero, zero
    if F16:
        upper = tl.load(source + (PLANES - 2) * plane, mask=there, other=0)
    if LOW_BITS & 1:
        low1 = tl.load(source + (LOW_BITS - 1) * plane, mask=there, other=0)
    firsts = ()
    seconds = ()
    for g in tl.static_range(8):
        # A plane is loaded with the first group that it has something of.
        if g % 4 == 0:
            code = tl.load(source + (CODES + g // 4) * plane, mask=there, other=0)
            if F16:
                middle = tl.load(source + (LOW_BITS + g // 4) * plane, mask=there, other=0)
            if LOW_BITS & 2:
                low2 = tl.load(source + ((LOW_BITS & 4) + g // 4) * plane, mask=there, other=0)
        if (LOW_BITS & 4) and g % 2 == 0:
            low4 = tl.load(source + g // 2 * plane, mask=there, other=0)
        low = tl.load(source + g * plane, mask=there, other=0) if LOW_BITS == 8 else zero
        if LOW_BITS & 4:
            low |= _take(low4, g, 4, 4)
        if LOW_BITS & 2:
            low |= _take(low2, g, 4 - (LOW_BITS & 4) + 2, 2)
        if LOW_BITS & 1:
            low |= _take(low1, g, 8 - LOW_BITS, 1)
        high = base4 - _take(code, g, 0, 2)
        if F16:
            high = (high - _take(upper, g, 2, 1)) << 2 | _take(middle, g, 0, 2)
        high = differ(high, far, g, F16) | ((sign << (7 - g)) & -2139062144)
        a, b = side_by_side(low, high, COMPILED)
        firsts += (tl.where(valid, a + turn, INVALID),)
        seconds += (tl.where(valid, b + turn, INVALID),)

    both = tl.join(_octet(firsts), _octet(seconds))  # of a word, a group, a half
    number = tl.arange(0, ROWS)
    own_row, own_valid, own_dense_row, own_wanted = _source_and_target(
        number, down, ids_ptr, start, count, out, ROWS
    )
    if TURNS:
        # a turn, its group, half and word are pairs in the order of columns
        pairs = tl.permute(tl.reshape(both, [WORDS // 4, 4, ROWS, 8, 2]), (2, 0, 3, 4, 1))
        k = 16 * first + tl.arange(0, 16 * WORDS)[None, :]
        target = dense_ptr + own_dense_row[:, None] * (columns // 2) + k
        inside = own_wanted[:, None] & (k < columns // 2)
        tl.store(target, tl.reshape(pairs, [ROWS, 16 * WORDS]), mask=inside)
    else:
        begin, whole = columns_of_word(c, lane)
        i = tl.arange(0, 16)[None, :]
        k = begin[:, None] + tl.where(whole[:, None], 8 * i, 2 * i)
        inside = (wanted & (c < lane))[:, None]
        both = tl.reshape(both, [WORDS * ROWS, 16])
        if WHOLE:
            tl.store(dense_ptr + dense_row[:, None] * (columns // 2) + k // 2, both, mask=inside)
        else:
            target = dense_ptr + dense_row[:, None] * columns + k
            tl.store(target, both.to(tl.int16), mask=inside & (k < columns))
            tl.store(target + 1, (both >> 16).to(tl.int16), mask=inside & (k + 1 < columns))

    tl.debug_barrier()  # an escape's slot is another thread's
    dense = dense_ptr.to(tl.pointer_type(tl.int16), bitcast=True) if WHOLE else dense_ptr
    target = dense + own_dense_row * columns
    _patch(row_start_ptr, escapes_ptr, own_row, own_valid, target, 32 * first, 32 * WORDS)


@triton.jit
def _patch(row_start_ptr, escapes_ptr, row, valid, target, first, COLUMNS: tl.constexpr):
    """Write the escapes of rows, from column `first` on, to the dense rows at `target`."""
    AT_ONCE: tl.constexpr = 32
    begin = as_start(tl.load(row_start_ptr + row, mask=valid, other=0))
    stop = as_start(tl.load(row_start_ptr + row + 1, mask=valid, other=0))
    if tl.max(stop - begin) > AT_ONCE:
        begin = _first_at(escapes_ptr, begin, stop, first)
        stop = _first_at(escapes_ptr, begin, stop, first + COLUMNS)
    for i in range(0, tl.max(stop - begin), AT_ONCE):
        entry = begin[:, None] + i + tl.arange(0, AT_ONCE)[None, :]
        escape = tl.load(escapes_ptr + entry, mask=entry < stop[:, None], other=0)
        column = escape & 0xFFFF
        mine = (entry < stop[:, None]) & (column >= first) & (column < first + COLUMNS)
        tl.store(target[:, None] + column, (escape >> 16).to(tl.int16), mask=mine)


@triton.jit
def _first_at(escapes_ptr, begin, stop, column):
    """The first escape of each row that is at a column or behind it."""
    while tl.max(stop - begin) > 0:
        middle = (begin + stop) // 2
        before = (tl.load(escapes_ptr + middle, mask=begin < stop, other=0) & 0xFFFF) < column
        begin, stop = (
            tl.where((begin < stop) & before, middle + 1, begin),
            tl.where((begin < stop) & ~before, middle, stop),
        )
    return begin
