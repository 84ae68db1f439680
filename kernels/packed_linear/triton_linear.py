"""Products of a few rows with packed weights, in Triton, by matrix instructions.

A warp takes tiles of 16 rows of the weights, 4 words of every plane at a time. Its thread (r, q) loads the
words of rows r and r + 8 in word q: unpacked, they are what it has to give to m16n8k16, with no thread asking
another. Which weights share an instruction is free, as long as x comes in the same order:

    instruction g of a word takes the slots 4 g to 4 g + 3 of 4 words: k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9

One row of x (`_one_row`) is one column of the 8 that an instruction multiplies with. So thread (r, q) loads x
only for the slots 4 r to 4 r + 3, and keeps to itself that they stand in column r: instruction g leaves in
its own sums, column g, what is asked for, and nonsense in the others. Up to 8 rows (`_few_rows`) are put in
the order of the instructions beforehand (`_reorder`). Several warps share the columns of a tile and add their
sums in the end. The escapes of a row are corrected meanwhile, by the same threads: their list is in the order
of the words, so that their x is in the cache.

More rows (`_some_rows`) are too many bytes for every warp to load. Warps with tiles of their own go through
the same columns together, which lie in shared memory; what they have unpacked stays where the warp group's
instruction wants it. Several programs share the columns, and others see to the escapes alone: x of an escape
is a line of its own for each, so it is neighbouring threads that load it. Who comes last adds all up, in an
order that never changes.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.gpu import early_launches, multiprocessors
from neuzip.kernels.rans.triton_decode import LAUNCHING

from .form import SLOTS, Layout, Window
from .torch_ops import PackedTensor, format_of
from .triton_slots import as_start, side_by_side

TILES = 4
"""Of a program for more than 8 rows of x: a warp for each, as many as a warp group's instruction takes."""

WEIGHTS_AN_ESCAPE = 2.2e6
"""So many weights are multiplied while a thread takes one escape, 0.7 us on an H200."""

MOST_PORTIONS = 16
"""Of the escapes of a row. Each has a part to be added up; who has so many escapes should not be packed."""

STEP = 256
"""Elements that a program of `_reorder` takes."""


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weights.T + bias with fp32 sums: x [rows, in], 1 to 32 rows, bias [out], to [rows, out].

    x, bias and the weights have one dtype and are contiguous.
    """
    rows, columns = x.shape
    out = packed.shape[0]
    compiled = isinstance(_one_row, triton.JITFunction)
    # The interpreter would cut off what bf16 cannot hold instead of rounding.
    y = torch.empty(rows, out, dtype=x.dtype if compiled else torch.float32, device=x.device)
    tiles, lanes = packed.words.shape[0], packed.words.shape[2]
    weights = packed.words, packed.row_start, packed.escapes
    stand_in = _stand_in(packed.base, packed.parity, packed.dtype)
    numbers = packed.base, 2.0**packed.parity, stand_in, out, rows, columns
    half = packed.dtype == torch.float16
    form = {"C": lanes, "LOW": packed.low_bits, "HALF": half, "BIAS": bias is not None, "ASM": compiled}
    with torch.cuda.device_of(x), LAUNCHING:
        if rows == 1:
            # By the registers that it takes, so many warps are on a multiprocessor.
            warps = _warps(tiles, lanes, 28 if packed.low_bits <= 4 else 20, x.device)
            even = columns == SLOTS * lanes and lanes % (4 * warps) == 0
            _one_row[(tiles,)](
                y, x, *weights, bias, *numbers, W=warps, EVEN=even, **form, num_warps=warps
            )  # fmt: skip
            return y.to(x.dtype)
        early = compiled and early_launches(x.device)
        wide = 8 if rows <= 8 else max(16, triton.next_power_of_2(rows))
        turns, blocks = triton.cdiv(lanes, 4), triton.cdiv(tiles, TILES)
        ordered, transposed = (x.new_empty(turns * 4 * SLOTS * wide) for _ in range(2))
        counters = torch.empty(blocks, dtype=torch.int32, device=x.device)
        _reorder[(triton.cdiv(max(ordered.numel(), blocks), STEP),)](
            ordered, transposed, counters, x, rows, columns, blocks,
            C=lanes, BM=wide, STEP=STEP, EARLY=early, num_warps=2,
        )  # fmt: skip
        if rows <= 8:
            warps = _warps(tiles, lanes, 32, x.device)
            _few_rows[(tiles,)](
                y, ordered.view(torch.int32), transposed, *weights, bias, *numbers, W=warps,
                EVEN=lanes % (4 * warps) == 0, EARLY=early, **form, num_warps=warps, launch_pdl=early,
            )  # fmt: skip
            return y.to(x.dtype)
        shares = _shares(blocks, turns, x.device)
        parted, portions = _escape_programs(_own_escapes(packed), out, columns)
        parts = torch.empty(portions + shares, rows, out, dtype=torch.float32, device=x.device)
        _some_rows[(blocks, parted * portions + shares)](
            y, parts, counters, ordered, transposed, *weights, bias, *numbers, BM=wide, W=TILES,
            SHARES=shares, PARTED=parted, PORTIONS=portions, EVEN=lanes % 4 == 0, EARLY=early, **form,
            num_warps=TILES, launch_pdl=early,
        )  # fmt: skip
    return y.to(x.dtype)


@functools.cache
def _warps(tiles: int, lanes: int, resident: int, device: torch.device) -> int:
    """Warps that share a tile: as many as let all tiles run at once, `resident` on a multiprocessor.

    Where that is not possible, 4; and 16 only if every tile has a multiprocessor to itself.
    """
    there = multiprocessors(device)
    fitting = [warps for warps in (8, 4, 2) if tiles * warps <= resident * there]
    most = 16 if tiles <= there else fitting[0] if fitting else 4
    return int(min(most, triton.next_power_of_2(triton.cdiv(lanes, 4))))


@functools.cache
def _shares(blocks: int, turns: int, device: torch.device) -> int:
    """In how many shares the columns of x are cut: 3 to 6, for four programs on every multiprocessor.

    None has less than 4 turns. Fewer than 3 were slower even for many blocks.
    """
    wanted = triton.cdiv(4 * multiprocessors(device), blocks)
    return int(max(1, min(max(3, wanted), 6, turns // 4)))


def _own_escapes(packed: PackedTensor) -> int:
    """About how many are of its rows: experts share a list of them, and their words are views."""
    return packed.escapes.numel() * packed.words.nbytes // packed.words.untyped_storage().nbytes()


@functools.cache
def _escape_programs(escapes: int, out: int, columns: int) -> tuple[int, int]:
    """For the escapes of a block: in how many parts its rows are cut, and in how many those of a row.

    A thread takes one after the other, and should have done when the products are.
    """
    one_by_one = escapes / out / 2
    programs = one_by_one / max(4.0, out * columns / WEIGHTS_AN_ESCAPE)
    parted = min(TILES, triton.next_power_of_2(max(1, math.ceil(programs))))
    portions = triton.next_power_of_2(max(1, math.ceil(programs / parted)))
    return int(parted), int(min(MOST_PORTIONS, portions))


@functools.cache
def _stand_in(base: int, parity: int, dtype: torch.dtype) -> float:
    """What stands in the slot of an escape."""
    pattern = Window(base, parity, format_of(dtype)).stand_in
    return float(torch.tensor([pattern]).to(torch.uint16).view(dtype).item())


_F16 = Layout(format_of(torch.float16), 8)
_BF16 = Layout(format_of(torch.bfloat16), 8)
_HIGH_PLANES_F16 = tl.constexpr(_F16.planes - 8)
_HIGH_PLANES_BF16 = tl.constexpr(_BF16.planes - 8)


@triton.jit
def _plane(words, at, inside, P: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """A word of rows r and r + 8."""
    two = words + (at + P * C * 16)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(two) if EVEN else tl.load(two, mask=inside[:, None], other=0))


@triton.jit
def _load_words(words, at, inside, P: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """A word of each of P planes: those of row r, and those of row r + 8."""
    a = ()
    b = ()
    for p in tl.static_range(P):
        one, other = _plane(words, at, inside, p, C, EVEN)
        a += (one,)
        b += (other,)
    return a, b


@triton.jit
def _field(words, FIRST: tl.constexpr, WIDTH: tl.constexpr, G: tl.constexpr):
    """A field of 4 slots, a byte each, from planes of a width that begin with FIRST."""
    word = words[FIRST + G * WIDTH // 8]
    return (word >> (G * WIDTH % 8)) & (((1 << WIDTH) - 1) * 0x01010101)


@triton.jit
def _low_bytes(words, LOW: tl.constexpr, G: tl.constexpr):
    """The low bytes of 4 slots."""
    if LOW == 8:
        low = words[G]
    else:
        low = words[0] & 0
        if LOW & 4:
            low = _field(words, 0, 4, G)
        if LOW & 2:
            low = (low << 2) | _field(words, LOW & 4, 2, G)
        if LOW & 1:
            low = (low << 1) | _field(words, LOW & 6, 1, G)
        low = low << (8 - LOW)
    return low


@triton.jit
def _high_bytes(words, base4, LOW: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr):
    """The high bytes of 4 slots."""
    if HALF:
        code = _field(words, LOW + 2, 2, G) | (_field(words, LOW + 4, 1, G) << 2)
        high = ((base4 - code) << 2) | _field(words, LOW, 2, G)
        sign = words[LOW + 5]
    else:
        high = base4 - _field(words, LOW, 2, G)
        sign = words[LOW + 2]
    return high | ((sign << (7 - G)) & -0x7F7F7F80)


@triton.jit
def _weights(words, base4, LOW: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr):
    """Slots 4 G and 4 G + 1, and the next two, of a row."""
    low = _low_bytes(words, LOW, G)
    high = _high_bytes(words, base4, LOW, HALF, G)
    return side_by_side(low, high, ASM)


@triton.jit
def _float(pattern, HALF: tl.constexpr):
    """What 16 bits in the lower half of an int32 are worth."""
    bits = (pattern & 0xFFFF).to(tl.uint16)
    return (bits.to(tl.float16, bitcast=True) if HALF else bits.to(tl.bfloat16, bitcast=True)).to(tl.float32)


@triton.jit
def _multiply_pairs(a, b, W: tl.constexpr, HALF: tl.constexpr):
    """For the interpreter: what 8 rows and 8 columns, 8 products each, add to two sums of every thread."""
    a0 = tl.reshape(_float(a, HALF), [W, 8, 1, 4])
    a1 = tl.reshape(_float(a >> 16, HALF), [W, 8, 1, 4])
    b0 = tl.reshape(_float(b, HALF), [W, 1, 8, 4])
    b1 = tl.reshape(_float(b >> 16, HALF), [W, 1, 8, 4])
    sums = tl.sum(a0 * b0 + a1 * b1, 3)
    left, right = tl.split(tl.reshape(sums, [W, 8, 4, 2]))
    return tl.reshape(left, [32 * W]), tl.reshape(right, [32 * W])


@triton.jit
def _mma(a, b, sums, W: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """m16n8k16: a are 4 pairs of weights of this thread, b two of x; returns its 4 sums."""
    if ASM:
        KIND: tl.constexpr = "f16" if HALF else "bf16"
        result = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32." + KIND + "." + KIND
            + ".f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        l0, r0 = _multiply_pairs(a[0], b[0], W, HALF)
        l1, r1 = _multiply_pairs(a[1], b[0], W, HALF)
        l2, r2 = _multiply_pairs(a[2], b[1], W, HALF)
        l3, r3 = _multiply_pairs(a[3], b[1], W, HALF)
        result = (sums[0] + l0 + l2, sums[1] + r0 + r2, sums[2] + l1 + l3, sums[3] + r1 + r3)
    return result


@triton.jit
def _escape(escapes, at, stop, stand_in, HALF: tl.constexpr):
    """How far a weight is from what stands in its slot, its position, and whether there is one."""
    there = at < stop
    entry = tl.load(escapes + at, mask=there, other=0)
    return tl.where(there, _float(entry >> 16, HALF) - stand_in, 0.0), entry & 0xFFFF, there


@triton.jit
def _bits(x):
    return x.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _load_x(x, at, inside, K: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """x for 4 slots of one word, from column `at` on: two pairs."""
    if EVEN:
        x0, x1, x2, x3 = (
            tl.load(x + at),
            tl.load(x + at + C),
            tl.load(x + at + 2 * C),
            tl.load(x + at + 3 * C),
        )
    else:
        x0 = tl.load(x + at, mask=inside & (at < K), other=0.0)
        x1 = tl.load(x + at + C, mask=inside & (at + C < K), other=0.0)
        x2 = tl.load(x + at + 2 * C, mask=inside & (at + 2 * C < K), other=0.0)
        x3 = tl.load(x + at + 3 * C, mask=inside & (at + 3 * C < K), other=0.0)
    first, second = _bits(x0) | (_bits(x1) << 16), _bits(x2) | (_bits(x3) << 16)
    return first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)


@triton.jit
def _one_row(
    y, x, words, row_start, escapes, bias, base, scale, stand_in, N, M, K,
    C: tl.constexpr, LOW: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """16 values of y for one row of x: W warps share the columns, 4 words each in turn."""
    T: tl.constexpr = 32 * W
    EL: tl.constexpr = 2 * W
    P: tl.constexpr = LOW + (_HIGH_PLANES_F16 if HALF else _HIGH_PLANES_BF16)
    TURNS: tl.constexpr = (C + 4 * W - 1) // (4 * W)
    t = tl.arange(0, T)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    tile = tl.program_id(0)
    words += tile.to(tl.int64) * (P * C * 16)
    c = warp * 4 + q
    base4 = base * 0x01010101
    row = tl.minimum(tile * 16 + t // EL, N - 1)
    first = as_start(tl.load(row_start + row)) + t % EL
    stop = as_start(tl.load(row_start + row + 1))

    a, b = _load_words(words, c * 16 + r * 2, c < C, P, C, EVEN)
    pairs = _load_x(x, 4 * r * C + c, c < C, K, C, EVEN)
    off, position, there = _escape(escapes, first, stop, stand_in, HALF)
    zero = tl.zeros([T], tl.float32)
    fix, x_now, off_now = zero, zero, zero
    sums = ()
    for _ in tl.static_range(8):
        sums += ((zero, zero, zero, zero),)
    for turn in range(TURNS):
        # The next words, x of the escapes at hand, and the next escapes are under way meanwhile.
        ahead = tl.minimum(turn + 1, TURNS - 1) * (4 * W) + c
        next_a, next_b = _load_words(words, ahead * 16 + r * 2, ahead < C, P, C, EVEN)
        next_pairs = _load_x(x, 4 * r * C + ahead, ahead < C, K, C, EVEN)
        fix += off_now * x_now
        x_now = tl.load(x + (position & 31) * C + (position >> 5), mask=there, other=0.0).to(tl.float32)
        off_now = off
        off, position, there = _escape(escapes, first + (turn + 1) * EL, stop, stand_in, HALF)
        added = ()
        for g in tl.static_range(8):
            a0, a2 = _weights(a, base4, LOW, HALF, g, ASM)
            a1, a3 = _weights(b, base4, LOW, HALF, g, ASM)
            added += (_mma((a0, a1, a2, a3), pairs, sums[g], W, HALF, ASM),)
        sums = added
        a, b, pairs = next_a, next_b, next_pairs
    fix += off_now * x_now
    for step in range(TURNS, tl.cdiv(tl.max(stop - first, 0) + EL, EL)):
        off, position, there = _escape(escapes, first + step * EL, stop, stand_in, HALF)
        fix += off * tl.load(x + (position & 31) * C + (position >> 5), mask=there, other=0.0).to(tl.float32)

    # Thread q has columns 2 q and 2 q + 1 of all sums; of sums g, column g counts.
    top, bottom = zero, zero
    for i in tl.static_range(4):
        top = tl.where(q == i, sums[2 * i][0] + sums[2 * i + 1][1], top)
        bottom = tl.where(q == i, sums[2 * i][2] + sums[2 * i + 1][3], bottom)
    both = tl.join(_sum_of_row(top, W), _sum_of_row(bottom, W))
    n = tile * 16 + tl.arange(0, 16)
    result = tl.reshape(tl.trans(both), [16]) * scale + tl.sum(tl.reshape(fix, [16, EL]), 1)
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _sum_of_row(sums, W: tl.constexpr):
    """The sums of all threads of a row, in all warps: [8]."""
    return tl.sum(tl.sum(tl.reshape(sums, [W, 8, 4]), 2), 0)


@triton.jit
def _reorder(
    ordered, transposed, counters, x, M, K, blocks,
    C: tl.constexpr, BM: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [M, K] in the order of the instructions, and for escapes as [C, 32 slots, BM].

    That order is [C, 4, 8, 8 slots] for up to 8 rows, and for more [BM, turns, 128], as tiles have them. Sets
    the counters of all blocks to 0.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
    e = tl.program_id(0) * STEP + tl.arange(0, STEP)
    tl.store(counters + e, 0, mask=e < blocks)
    WIDTH: tl.constexpr = (C + 3) // 4 * 4 * _SLOTS
    if BM == 8:
        m, slot, c = e // 8 % BM, e // (8 * BM) % 4 * 8 + e % 8, e // (_SLOTS * BM)
    else:
        m, k = e // WIDTH, e % WIDTH
        slot, c = k // 16 % 8 * 4 + k // 8 % 2 * 2 + k % 2, k // 128 * 4 + k // 2 % 4
    _copy(ordered, e, x, m, slot, c, M, K, C, WIDTH * BM)
    _copy(transposed, e, x, e % BM, e // BM % _SLOTS, e // (_SLOTS * BM), M, K, C, WIDTH * BM)


@triton.jit
def _copy(to, e, x, m, slot, c, M, K, C: tl.constexpr, SIZE: tl.constexpr):
    """Element e of an array of SIZE: x of row m and of a word's slot, or 0 where there is none."""
    k = slot * C + c
    value = tl.load(x + m * K + k, mask=(e < SIZE) & (m < M) & (c < C) & (k < K), other=0.0)
    tl.store(to + e, value, mask=e < SIZE)


_SLOTS = tl.constexpr(SLOTS)


@triton.jit
def _load_fragments(
    fragments, c, r, PAIR: tl.constexpr, C: tl.constexpr, T: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """x for the instructions 2 PAIR and 2 PAIR + 1, two pairs each."""
    where = fragments + (((c * 4 + PAIR) * 8 + r) * 4)[:, None] + tl.arange(0, 4)[None, :]
    four = tl.load(where) if EVEN else tl.load(where, mask=(c < C)[:, None], other=0)
    even, odd = tl.split(tl.reshape(four, [T, 2, 2]))
    first0, second0 = tl.split(even)
    first1, second1 = tl.split(odd)
    return (first0, first1), (second0, second1)


@triton.jit
def _gather(transposed, position, there, BM: tl.constexpr):
    """x of the escape of each thread: [T, BM]."""
    at = (position * BM)[:, None] + tl.arange(0, BM)[None, :]
    return tl.load(transposed + at, mask=there[:, None], other=0.0)


@triton.jit
def _few_rows(
    y, fragments, transposed, words, row_start, escapes, bias, base, scale, stand_in, N, M, K,
    C: tl.constexpr, LOW: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """16 columns of y for up to 8 rows of x: W warps share the columns of x, 4 words each in turn."""
    T: tl.constexpr = 32 * W
    EL: tl.constexpr = 2 * W  # escapes of a row at a time
    P: tl.constexpr = LOW + (_HIGH_PLANES_F16 if HALF else _HIGH_PLANES_BF16)
    TURNS: tl.constexpr = (C + 4 * W - 1) // (4 * W)
    t = tl.arange(0, T)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    tile = tl.program_id(0)
    words += tile.to(tl.int64) * (P * C * 16)
    base4 = base * 0x01010101
    row = tl.minimum(tile * 16 + t // EL, N - 1)
    first = as_start(tl.load(row_start + row)) + t % EL
    stop = as_start(tl.load(row_start + row + 1))

    zero = tl.zeros([T], tl.float32)
    sums = (zero, zero, zero, zero)
    fix = tl.zeros([T, 8], tl.float32)
    off, position, there = _escape(escapes, first, stop, stand_in, HALF)
    if EARLY:
        cuda.gdc_wait()
    for turn in range(TURNS):
        c = turn * (4 * W) + warp * 4 + q
        a, b = _load_words(words, c * 16 + r * 2, c < C, P, C, EVEN)
        found = _gather(transposed, position, there, 8)
        off_now = off
        off, position, there = _escape(escapes, first + (turn + 1) * EL, stop, stand_in, HALF)
        for pair in tl.static_range(4):
            xs = _load_fragments(fragments, c, r, pair, C, T, EVEN)
            for h in tl.static_range(2):
                a0, a2 = _weights(a, base4, LOW, HALF, 2 * pair + h, ASM)
                a1, a3 = _weights(b, base4, LOW, HALF, 2 * pair + h, ASM)
                sums = _mma((a0, a1, a2, a3), xs[h], sums, W, HALF, ASM)
        fix += off_now[:, None] * found.to(tl.float32)
    for step in range(TURNS, tl.cdiv(tl.max(stop - first, 0) + EL, EL)):
        off, position, there = _escape(escapes, first + step * EL, stop, stand_in, HALF)
        fix += off[:, None] * _gather(transposed, position, there, 8).to(tl.float32)

    n, m = (tile * 16 + tl.arange(0, 16))[:, None], tl.arange(0, 8)[None, :]
    four = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    added = tl.sum(tl.reshape(four, [W, 128]), 0)  # r, q, row r or r + 8, column 2 q or 2 q + 1
    result = tl.reshape(tl.permute(tl.reshape(added, [8, 4, 2, 2]), (2, 0, 1, 3)), [16, 8])
    result = result * scale + tl.sum(tl.reshape(fix, [16, EL, 8]), 1)
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + m.to(tl.int64) * N + n, result.to(y.dtype.element_ty), mask=(n < N) & (m < M))


@triton.jit
def _some_rows(
    y, parts, counters, ordered, transposed, words, row_start, escapes, bias, base, scale, stand_in, N, M, K,
    C: tl.constexpr, LOW: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, SHARES: tl.constexpr, PARTED: tl.constexpr, PORTIONS: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part of 16 W columns of y for up to BM rows of x: of the escapes first, then a share of the products.

    parts: fp32 [PORTIONS + SHARES, M, N]
    """
    block, number = tl.program_id(0), tl.program_id(1)
    begin = block * (16 * W)
    if number < PARTED * PORTIONS:
        own, portion = begin + number % PARTED * (16 * W // PARTED), number // PARTED
        fixed = _of_escapes(
            transposed, row_start, escapes, stand_in, own, portion, N, HALF, BM, W, PARTED, PORTIONS, EARLY
        )  # fmt: skip
        _keep(parts, portion, fixed, own, M, N, 16 * W // PARTED, BM)
    else:
        share = number - PARTED * PORTIONS
        sums = _of_share(ordered, words, block, share, base, N, C, LOW, HALF, ASM, BM, W, SHARES, EVEN, EARLY)
        _keep(parts, PORTIONS + share, sums * scale, begin, M, N, 16 * W, BM)
    tl.debug_barrier()
    if tl.atomic_add(counters + block, 1, sem="acq_rel") == PARTED * PORTIONS + SHARES - 1:
        n, m = (begin + tl.arange(0, 16 * W))[:, None], tl.arange(0, BM)[None, :]
        at, inside = m.to(tl.int64) * N + n, (n < N) & (m < M)
        result = tl.zeros([16 * W, BM], tl.float32)
        for part in tl.static_range(PORTIONS + SHARES):
            here = parts + part * M.to(tl.int64) * N + at
            result += tl.load(here, mask=inside, other=0.0, cache_modifier=".cg")
        if BIAS:
            result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _keep(parts, part, values, begin, M, N, COLUMNS: tl.constexpr, BM: tl.constexpr):
    """Store what columns of y from `begin` on have of a part: [COLUMNS, BM]."""
    n, m = (begin + tl.arange(0, COLUMNS))[:, None], tl.arange(0, BM)[None, :]
    at = parts + (part * M.to(tl.int64) + m) * N + n
    tl.store(at, values, mask=(n < N) & (m < M))


@triton.jit
def _of_escapes(
    transposed, row_start, escapes, stand_in, begin, portion, N, HALF: tl.constexpr, BM: tl.constexpr,
    W: tl.constexpr, PARTED: tl.constexpr, PORTIONS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What a portion of the escapes of rows from `begin` on adds: [16 W // PARTED, BM]."""
    EL: tl.constexpr = 2 * PARTED  # escapes of a row at a time
    t = tl.arange(0, 32 * W)
    row = tl.minimum(begin + t // EL, N - 1)
    first, stop = as_start(tl.load(row_start + row)), as_start(tl.load(row_start + row + 1))
    each = (stop - first + PORTIONS - 1) // PORTIONS
    first = tl.minimum(first + portion * each, stop)
    stop = tl.minimum(first + each, stop)
    first += t % EL
    fix = tl.zeros([32 * W, BM], tl.float32)
    off, position, there = _escape(escapes, first, stop, stand_in, HALF)
    if EARLY:
        cuda.gdc_wait()
    for step in range(tl.cdiv(tl.max(stop - first, 0) + EL - 1, EL)):
        next_off, next_position, next_there = _escape(escapes, first + (step + 1) * EL, stop, stand_in, HALF)
        fix += off[:, None] * _gather(transposed, position, there, BM).to(tl.float32)
        off, position, there = next_off, next_position, next_there
    return tl.sum(tl.reshape(fix, [16 * W // PARTED, EL, BM]), 1)


@triton.jit
def _of_share(
    ordered, words, block, share, base, N, C: tl.constexpr, LOW: tl.constexpr, HALF: tl.constexpr,
    ASM: tl.constexpr, BM: tl.constexpr, W: tl.constexpr, SHARES: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The products of W tiles with a share of the columns of x: [16 W, BM].

    Words and x of the next turn are under way meanwhile. The loop is not left to the compiler to overlap: it
    would cut the instruction in eight that wait for each other.
    """
    P: tl.constexpr = LOW + (_HIGH_PLANES_F16 if HALF else _HIGH_PLANES_BF16)
    TURNS: tl.constexpr = (C + 3) // 4
    SHARE: tl.constexpr = (TURNS + SHARES - 1) // SHARES
    t = tl.arange(0, 32 * W)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    tile = tl.minimum(block * W + warp, (N + 15) // 16 - 1)
    own = tile.to(tl.int64) * (P * C * 16) + r * 2
    base4 = base * 0x01010101
    at_x = tl.arange(0, BM)[None, :] * (TURNS * 128) + tl.arange(0, 128)[:, None]
    turn = tl.minimum(share * SHARE, TURNS)
    stop = tl.minimum(turn + SHARE, TURNS)
    c = tl.minimum(turn, TURNS - 1) * 4 + q
    a, b = _load_words(words, own + c * 16, c < C, P, C, EVEN)
    if EARLY:
        cuda.gdc_wait()
    x = tl.load(ordered + at_x + tl.minimum(turn, TURNS - 1) * 128)
    sums = tl.zeros([16 * W, BM], tl.float32)
    for following in tl.range(turn + 1, stop + 1, num_stages=1):
        weights, at_hand = _tile(a, b, base4, LOW, HALF, W, ASM), x
        following = tl.minimum(following, TURNS - 1)
        c = following * 4 + q
        a, b = _load_words(words, own + c * 16, c < C, P, C, EVEN)
        x = tl.load(ordered + at_x + following * 128)
        if ASM:
            sums = tl.dot(weights, at_hand, sums)
        else:
            sums = tl.dot(weights.to(tl.float32), at_hand.to(tl.float32), sums, input_precision="ieee")
    return sums


@triton.jit
def _tile(a, b, base4, LOW: tl.constexpr, HALF: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """The weights of W tiles, [16 W, 128], from the words of rows r and r + 8.

    Each thread has what the instruction wants of it, so nothing moves between threads.
    """
    groups = ()
    for g in tl.static_range(8):
        a0, a2 = _weights(a, base4, LOW, HALF, g, ASM)
        a1, a3 = _weights(b, base4, LOW, HALF, g, ASM)
        first = tl.join(_pair(a0, HALF), _pair(a1, HALF))
        groups += (tl.join(first, tl.join(_pair(a2, HALF), _pair(a3, HALF))),)
    # warp, r, q, of a pair, row r or r + 8, half of an instruction, g
    tile = tl.reshape(_all_eight(groups), [W, 8, 4, 2, 2, 2, 8])
    return tl.reshape(tl.permute(tile, (0, 4, 1, 6, 5, 2, 3)), [16 * W, 128])


@triton.jit
def _all_eight(groups):
    """As one array, with three axes of 2 after the others that are the bits of their numbers."""
    even = tl.join(tl.join(groups[0], groups[4]), tl.join(groups[2], groups[6]))
    odd = tl.join(tl.join(groups[1], groups[5]), tl.join(groups[3], groups[7]))
    return tl.join(even, odd)


@triton.jit
def _pair(pattern, HALF: tl.constexpr):
    """The two weights in an int32: [T, 2]."""
    low, high = (pattern & 0xFFFF).to(tl.uint16), ((pattern >> 16) & 0xFFFF).to(tl.uint16)
    both = tl.join(low, high)
    return both.to(tl.float16, bitcast=True) if HALF else both.to(tl.bfloat16, bitcast=True)
