"""Products of many rows with packed weights, on Hopper, in Gluon: Triton that says who has what.

    loader, 1 warp          x [256 rows, 64 columns] and words of 128 rows, 128 columns --> shared memory
    2 warp groups           words of 64 rows --> registers, unpacked --> warp-group instructions with x
                            [64, 256] sums --> shared memory --> y

What cuBLAS does, with weights from registers: a thread has the words of what it gives to the instruction, so
nothing is written or moved for that. A group unpacks the next 64 columns while those before are multiplied,
and the other group does the same beside it. No dense weight is ever in memory.

What is prefetched early enough costs nothing. Words come by way of shared memory, as loads to registers share
a few counters, on which whatever is used first waits for all. Far words and escapes are loaded two turns
ahead, where their records say, which are loaded one more turn before.

The compiler has to be held back in two places. Waiting is a branch, which nothing is moved across: it stands
where products are to be asked for before anything is unpacked. And registers of a product under way must not
be written: the last step of unpacking is made when the products before have ended.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from neuzip.kernels.device.barriers import barriers
from neuzip.kernels.device.launch import launch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.packed_linear.form import TILE_ROWS, TURN, PackedLayout
from neuzip.kernels.packed_linear.tensor import PackedTensor, format_of
from neuzip.kernels.packed_linear.triton.slots import high_bytes, low_bytes
from neuzip.kernels.tuning import launch_for

ROWS, OUT = 256, 128
"""Rows of x, and rows of the weights, that a program multiplies."""

SWIZZLED, PLAIN = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(0, 32, 3)
"""How x and y, and words, lie in shared memory."""


def pays(x: torch.Tensor, packed: PackedTensor) -> bool:
    """Whether this can be done and decoding first would take longer, for x [..., in], on a Hopper GPU."""
    out, columns = packed.shape
    rows = x.numel() // columns
    return (
        packed.turn_index.numel() > 0
        and out % 8 == 0  # rows of y begin at multiples of 16 bytes
        and seconds(rows, out, columns, x.device) < seconds_decoded(rows, out, columns, x.device)
    )


def seconds(rows: int, out: int, columns: int, device: torch.device) -> float:
    """About how long a product takes here: all programs at once, a turn after the other."""
    programs = -(-rows // ROWS) * -(-out // OUT)
    turn = launch_for("packed_linear.many_rows_time", device)["seconds_a_turn"]
    return float(-(-programs // multiprocessors(device)) * columns / TURN * turn)


def seconds_decoded(rows: int, out: int, columns: int, device: torch.device) -> float:
    """About how long it takes to decode the weights and multiply with them."""
    time, weights = launch_for("packed_linear.many_rows_time", device), out * columns
    product = max(2 * weights / time["bytes_a_second"], rows * weights / time["products_a_second"])
    return float(time["launch_seconds"] + weights / time["decoded_a_second"] + product)


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weights.T + bias with fp32 sums: x [..., in], bias [out], to [..., out].

    x, bias and the weights have one dtype and are contiguous, and `pays` holds but for the time.
    """
    out, columns = packed.shape
    rows = x.numel() // columns
    y = torch.empty(*x.shape[:-1], out, dtype=x.dtype, device=x.device)
    if x.data_ptr() % 16:
        x = x.clone()
    blocks = -(-out // OUT), -(-rows // ROWS)
    arrays, constants = packed.once("many rows", _of_weights)
    launch(
        _many_rows, (min(multiprocessors(x.device), blocks[0] * blocks[1]),),
        TensorDescriptor(x, [rows, columns], [columns, 1], [ROWS, 64], SWIZZLED),
        TensorDescriptor(y, [rows, out], [out, 1], [ROWS // 2, 64], SWIZZLED),
        *arrays, bias, packed.base, 2.0**packed.shift, *blocks, packed.words.shape[0], out, **constants,
        device=x.device,
    )  # fmt: skip
    return y


def _of_weights(packed: PackedTensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a launch is given of weights, and what it is compiled for."""
    tiles, planes, lanes = packed.words.shape[:3]
    first, other = planes_of_halves(packed.layout)
    arrays = (
        TensorDescriptor.from_tensor(packed.words.view(tiles, planes, lanes * 16), [8, 1, 64], PLAIN),
        packed.far_index.view(torch.int64), packed.far_words, packed.turn_index.view(torch.int64),
        packed.turn_escapes,
    )  # fmt: skip
    config = launch_for("packed_linear.many_rows", packed.device)
    constants = {
        "TURNS": packed.shape[1] // TURN, "LOW": packed.low_bits, "HALF": packed.dtype == torch.float16,
        "FIRST_HALF": first, "OTHER_HALF": other, "STAGES": config["x_stages"],
        "WORD_STAGES": config["word_stages"], "REGISTERS": config["registers"], "num_warps": 4,
    }  # fmt: skip
    return arrays, constants


@functools.cache
def planes_of_halves(layout: PackedLayout) -> tuple[int, int]:
    """The planes that have something of the first half of the slots, and of the other: a bit each."""
    return _planes_of(layout, range(4)), _planes_of(layout, range(4, 8))


def _planes_of(layout: PackedLayout, groups: range) -> int:
    """The planes that have something of the slots 4 g to 4 g + 3, for the g of `groups`: a bit each."""
    return sum(1 << plane for plane in {p.place(g)[0] for p in layout.groups for g in groups})


_HIGH_PLANES_F16 = gl.constexpr(PackedLayout(format_of(torch.float16), 8).planes - 8)
_HIGH_PLANES_BF16 = gl.constexpr(PackedLayout(format_of(torch.bfloat16), 8).planes - 8)
_WORD_BYTES = gl.constexpr(OUT // TILE_ROWS * 64 * 4)
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Rows r and r + 8 of word q of a tile: a warp has the tile, a thread (r, q) both.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1]], [[0, 0, 16], [0, 0, 32], [0, 0, 2], [0, 0, 4], [0, 0, 8]], [[1, 0, 0], [2, 0, 0]], [],
        [4, 1, 64],
    )
)  # fmt: skip
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 2))


def _others_escapes() -> str:
    """PTX: turn high bytes where a thread has several escapes in a turn.

    $0 to $7 are high bytes, $8 to $15 the same before; $16 the thread's first escape, $17 where those behind
    the first ones of all threads begin, $18 the number of $0, $19 the escapes, $20 the thread.
    """
    lines = [
        "{ .reg .pred p, mine, here; .reg .b32 e, number, shift, bits; .reg .b64 at;",
        "mov.b32 e, $16; mad.wide.s32 at, $17, 4, $19;",
        "NEXT_${:uid}: and.b32 bits, e, 0x8000; setp.eq.u32 p, bits, 0; @p bra DONE_${:uid};",
        "ld.global.b32 e, [at]; add.s64 at, at, 4;",
        "bfe.u32 bits, e, 16, 5; setp.eq.u32 mine, bits, $20;",
        "bfe.u32 number, e, 9, 5; sub.u32 number, number, $18;",
        "bfe.u32 shift, e, 7, 2; shl.b32 shift, shift, 3; and.b32 bits, e, 0x7f; shl.b32 bits, bits, shift;",
        "@!mine mov.b32 bits, 0;",
        *(f"setp.eq.u32 here, number, {i}; @here xor.b32 ${i}, ${i}, bits;" for i in range(8)),
        "bra NEXT_${:uid}; DONE_${:uid}: }",
    ]
    return "\n".join(lines)


_OTHERS = gl.constexpr(_others_escapes())
_OTHERS_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + [str(i) for i in range(8)] + ["r", "r", "r", "l", "r"]))


@gluon.jit
def _set_bits(word):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _record(record):
    """A mask, and where what it speaks of begins."""
    return record.to(gl.int32), (record >> 32).to(gl.int32)


@gluon.jit
def _load_far(far, record, bit):
    """The far words of rows r and r + 8, 0 where there is none."""
    mask, start = _record(record)
    at = far + start + _set_bits(mask & ~((gl.zeros_like(mask) - 1) << bit))
    own, next_own = (mask >> bit) & 1, (mask >> (bit + 1)) & 1
    return gl.load(at, mask=own != 0, other=0), gl.load(at + own, mask=next_own != 0, other=0)


@gluon.jit
def _load_escape(escapes, record, lane):
    """A thread's first escape in a turn, or one that is nowhere; where those behind all first ones begin."""
    mask, start = _record(record)
    at = start + _set_bits(mask & ((1 << lane) - 1))
    return gl.load(escapes + at, mask=((mask >> lane) & 1) != 0, other=31 << 9), start + _set_bits(mask)


@gluon.jit
def _by_thread(words):
    return gl.convert_layout(gl.reshape(gl.permute(words, (0, 2, 1)), [128]), _THREADS, assert_trivial=True)


@gluon.jit
def _plane(words, number, GROUP: gl.constexpr):
    """A word of rows r, and one of rows r + 8, of a plane in shared memory."""
    tiles = words.index(number).slice(4 * GROUP, 4, dim=0).load(_WORDS)
    a, b = gl.split(gl.reshape(tiles, [4, 4, 8, 2]))
    return _by_thread(a), _by_thread(b)


@gluon.jit
def _planes(words, turn, other, P: gl.constexpr, WANTED: gl.constexpr, GROUP: gl.constexpr):
    """Words of all planes of a turn, of rows r, and of rows r + 8; of planes that are not WANTED another."""
    a = ()
    b = ()
    for p in gl.static_range(P):
        if (WANTED >> p) & 1:
            of_a, of_b = _plane(words, turn + p, GROUP)
            a += (of_a,)
            b += (of_b,)
        else:
            a += (other,)
            b += (other,)
    return a, b


@gluon.jit
def _bytes(
    words, turn, fars, escape, others, escapes, lane, base4,
    P: gl.constexpr, LOW: gl.constexpr, HALF: gl.constexpr, H: gl.constexpr, WANTED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The low and the high bytes of half of the slots: for each 4 those of row r, then of row r + 8.

    Escapes differ in up to 7 bits of their high bytes.
    """
    planes = _planes(words, turn, escape, P, WANTED, GROUP)
    differing = (escape & 0x7F) << (((escape >> 7) & 3) << 3)
    number = (escape >> 9) & 31
    lows = ()
    highs = ()
    for g in gl.static_range(4 * H, 4 * H + 4):
        for row in gl.static_range(2):
            lows += (low_bytes(planes[row], LOW, g),)
            high = high_bytes(planes[row], fars[row], base4, LOW, HALF, g)
            highs += (high ^ gl.where(number == 2 * g + row, differing, 0),)
    return lows, _turn_others(highs, escape, others, escapes, lane, 8 * H)


@gluon.jit
def _turn_others(h, escape, others, escapes, lane, FIRST: gl.constexpr):
    """High bytes with the other escapes of a thread that has several in a turn. Not pure: see `_pairs`."""
    return gl.inline_asm_elementwise(
        _OTHERS, _OTHERS_OPERANDS,
        [h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7], escape, others, FIRST, escapes, lane],
        dtype=(gl.int32,) * 8, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pairs(low, high):
    """Two pairs of weights from the bytes of four. Not pure: the compiler leaves it where it stands."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;", "=&r,=r,r,r", [low, high],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _numbers(pair, HALF: gl.constexpr):
    low, high = (pair & 0xFFFF).to(gl.uint16), ((pair >> 16) & 0xFFFF).to(gl.uint16)
    both = gl.join(low, high)
    return both.to(gl.float16, bitcast=True) if HALF else both.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _weights(lows, highs, HALF: gl.constexpr):
    """[64, 64] weights, each thread's as the instruction wants them of it."""
    groups = ()
    for g in gl.static_range(4):
        a0, a2 = _pairs(lows[2 * g], highs[2 * g])
        a1, a3 = _pairs(lows[2 * g + 1], highs[2 * g + 1])
        first = gl.join(_numbers(a0, HALF), _numbers(a1, HALF))
        groups += (gl.join(first, gl.join(_numbers(a2, HALF), _numbers(a3, HALF))),)
    # warp, r, q, of a pair, row r or r + 8, half of an instruction, g
    tile = gl.permute(gl.reshape(_all_four(groups), [4, 8, 4, 2, 2, 2, 4]), (0, 4, 1, 6, 5, 2, 3))
    return gl.convert_layout(gl.reshape(tile, [64, 64]), _WEIGHTS, assert_trivial=True)


@gluon.jit
def _all_four(groups):
    """Four arrays as one, with two last axes of 2: the bits of their numbers."""
    return gl.join(gl.join(groups[0], groups[2]), gl.join(groups[1], groups[3]))


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, shared, far_index, far, turn_index, escapes, bias, y, base, scale, blocks, rounds,
    tiles, N, TURNS: gl.constexpr, LOW: gl.constexpr, HALF: gl.constexpr, FIRST_HALF: gl.constexpr,
    OTHER_HALF: gl.constexpr, STAGES: gl.constexpr, WORD_STAGES: gl.constexpr,
):  # fmt: skip
    """64 rows of the weights of every block of a program."""
    P: gl.constexpr = LOW + (_HIGH_PLANES_F16 if HALF else _HIGH_PLANES_BF16)
    xs, words, outs, x_there, x_free, words_there, words_free = shared
    t = gl.arange(0, 128, layout=_THREADS)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    bit = q % 2 * 16 + 2 * r
    base4 = base * 0x01010101
    SECOND: gl.constexpr = min(1, TURNS - 1)
    THIRD: gl.constexpr = min(2, TURNS - 1)
    x_number, turn_number = 0, 0
    for block in range(gl.program_id(0), blocks * rounds, gl.num_programs(0)):
        n, m = block // rounds, block % rounds
        tile = gl.minimum(n * 8 + GROUP * 4 + warp, tiles - 1)
        far_records = far_index + tile.to(gl.int64) * (2 * TURNS) + q // 2
        records = turn_index + tile.to(gl.int64) * TURNS
        fars = _load_far(far, gl.load(far_records), bit)
        escape, others = _load_escape(escapes, gl.load(records), lane)
        next_fars = _load_far(far, gl.load(far_records + 2 * SECOND), bit)
        next_escape, next_others = _load_escape(escapes, gl.load(records + SECOND), lane)
        far_record, record = gl.load(far_records + 2 * THIRD), gl.load(records + THIRD)

        stage = turn_number % WORD_STAGES
        mbarrier.wait(words_there.index(stage), (turn_number // WORD_STAGES) & 1)
        lows, highs = _bytes(
            words, stage * P, fars, escape, others, escapes, lane, base4, P, LOW, HALF, 0, FIRST_HALF, GROUP
        )
        sums = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, _SUMS))
        mbarrier.wait(x_there.index(x_number % STAGES), (x_number // STAGES) & 1)
        for turn in range(TURNS):
            first = x_number % STAGES
            weights = _weights(lows, highs, HALF)
            sums = warpgroup_mma(weights, xs.index(first).permute((1, 0)), sums, is_async=True)
            x_number += 1

            # The other half of the turn.
            second = x_number % STAGES
            mbarrier.wait(x_there.index(second), (x_number // STAGES) & 1)
            lows, highs = _bytes(
                words, stage * P, fars, escape, others, escapes, lane, base4, P, LOW, HALF, 1, OTHER_HALF,
                GROUP,
            )  # fmt: skip
            mbarrier.arrive(words_free.index(stage), count=1)
            fars, escape, others = next_fars, next_escape, next_others
            next_fars = _load_far(far, far_record, bit)
            next_escape, next_others = _load_escape(escapes, record, lane)
            later = gl.minimum(turn + 3, TURNS - 1)
            far_record, record = gl.load(far_records + 2 * later), gl.load(records + later)
            weights = _weights(lows, highs, HALF)
            sums = warpgroup_mma(weights, xs.index(second).permute((1, 0)), sums, is_async=True)
            x_number += 1

            # The first half of the next turn; behind the last one, of whatever is there.
            turn_number += 1
            stage = turn_number % WORD_STAGES
            goes_on = turn + 1 < TURNS
            mbarrier.wait(x_there.index(x_number % STAGES), (x_number // STAGES) & 1, pred=goes_on)
            mbarrier.wait(words_there.index(stage), (turn_number // WORD_STAGES) & 1, pred=goes_on)
            lows, highs = _bytes(
                words, stage * P, fars, escape, others, escapes, lane, base4, P, LOW, HALF, 0, FIRST_HALF,
                GROUP,
            )  # fmt: skip
            sums = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[sums]))
            mbarrier.arrive(x_free.index(first), count=1)
            mbarrier.arrive(x_free.index(second), count=1)
        result = warpgroup_mma_wait(0, deps=[sums]) * scale
        if bias is not None:
            row = n * 128 + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _SUMS))
            result += gl.load(bias + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
        result = gl.permute(gl.reshape(result.to(y.dtype), [64, 2, 128]), (0, 2, 1))
        halves = gl.split(result)
        for half in gl.static_range(2):
            tma.store_wait(0)
            outs.index(GROUP).store(gl.permute(halves[half], (1, 0)))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                y, [m * 256 + half * 128, n * 128 + GROUP * 64], outs.index(GROUP)
            )
    tma.store_wait(0)


@gluon.jit
def _load(
    shared, x, words, blocks, rounds, TURNS: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
    WORD_STAGES: gl.constexpr,
):  # fmt: skip
    """Everything that is multiplied, as soon as there is room for it."""
    to_x, to_words, _, x_there, x_free, words_there, words_free = shared
    x_number, turn_number = 0, 0
    for block in range(gl.program_id(0), blocks * rounds, gl.num_programs(0)):
        n, m = block // rounds, block % rounds
        for turn in range(TURNS):
            stage = turn_number % WORD_STAGES
            mbarrier.wait(words_free.index(stage), ((turn_number // WORD_STAGES) & 1) ^ 1)
            mbarrier.expect(words_there.index(stage), P * _WORD_BYTES)
            for plane in gl.static_range(P):
                tma.async_copy_global_to_shared(
                    words, [n * 8, plane, turn * 64], words_there.index(stage),
                    to_words.index(stage * P + plane),
                )  # fmt: skip
            turn_number += 1
            for half in gl.static_range(2):
                stage = x_number % STAGES
                mbarrier.wait(x_free.index(stage), ((x_number // STAGES) & 1) ^ 1)
                mbarrier.expect(x_there.index(stage), x.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    x, [m * 256, turn * 128 + half * 64], x_there.index(stage), to_x.index(stage)
                )
                x_number += 1


@gluon.jit(do_not_specialize=["base", "blocks", "rounds", "tiles", "N"])
def _many_rows(
    x, y, words, far_index, far, turn_index, escapes, bias, base, scale, blocks, rounds, tiles, N,
    TURNS: gl.constexpr, LOW: gl.constexpr, HALF: gl.constexpr, FIRST_HALF: gl.constexpr,
    OTHER_HALF: gl.constexpr, STAGES: gl.constexpr, WORD_STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Blocks of 128 columns and 256 rows of y: those that share weights run at the same time."""
    P: gl.constexpr = LOW + (_HIGH_PLANES_F16 if HALF else _HIGH_PLANES_BF16)
    shared = (
        gl.allocate_shared_memory(x.dtype, [STAGES, 256, 64], x.layout),
        gl.allocate_shared_memory(gl.int32, [WORD_STAGES * P, 8, 1, 64], words.layout),
        gl.allocate_shared_memory(y.dtype, [2, 128, 64], y.layout),
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(WORD_STAGES, 1), barriers(WORD_STAGES, 2),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, shared, far_index, far, turn_index, escapes, bias, y, base, scale, blocks, rounds,
                tiles, N, TURNS, LOW, HALF, FIRST_HALF, OTHER_HALF, STAGES, WORD_STAGES,
            )),
            (_multiply, (
                1, shared, far_index, far, turn_index, escapes, bias, y, base, scale, blocks, rounds,
                tiles, N, TURNS, LOW, HALF, FIRST_HALF, OTHER_HALF, STAGES, WORD_STAGES,
            )),
            (_load, (shared, x, words, blocks, rounds, TURNS, P, STAGES, WORD_STAGES)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
