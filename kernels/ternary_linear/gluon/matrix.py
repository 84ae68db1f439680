"""Products of many tokens with ternary weights, on Hopper, in Gluon: Triton that says who has what.

    loader, 1 warp      codes of 128 tokens, words of 256 or 128 rows, 128 columns --> shared memory
    2 warp groups       words of half of the rows --> registers, a byte a weight --> warp-group instructions
                        with codes --> their sums --> scaled --> shared memory --> y

Weights go to the tensor cores from registers, so they are never unpacked in memory: an instruction takes of
thread (r, q) what it has masked of its own words. That needs codes in another order, `interleaved`, in which
the quantiser writes them. What is multiplied are c + 1, 0 to 2 for codes c of weights, and the sum of a
token's codes is taken off in the end: to multiply c takes more instructions, and more power.

Words are next to nothing, so what a block reads is mostly codes, and it has twice as many rows of weights as
tokens: the second-level cache would not keep up with a square one. Where that leaves multiprocessors without
work, blocks have half of the rows.

While a group waits for its products to end, before it writes their registers again, the tensor cores are
busy with those of the other.
"""

from __future__ import annotations

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
from triton.language.extra import cuda

from neuzip.kernels.device.barriers import barriers
from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.ternary_linear.triton.quantize import quantize
from neuzip.kernels.ternary_linear.weight import TILE, TernaryWeight

OUT, TOKENS, COLUMNS = 256, 128, 128
"""Rows of the weights, or half of them, and tokens of a block; columns of a turn."""

STAGES = 6
"""Turns whose codes and words are in shared memory."""

BAND = 16
"""Blocks of tokens whose codes stay in the second-level cache while they are multiplied with all rows."""

REGISTERS = 240
"""Of a thread that multiplies."""

OF_CODES, OF_WORDS = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(32, 32, 3)
OF_Y = gl.NVMMASharedLayout(128, 16, 2)
"""How codes, words and y lie in shared memory."""


def possible(x: torch.Tensor, weight: TernaryWeight) -> bool:
    """Whether `many_tokens` can multiply these, on a Hopper GPU: 16 bits, a scale or one a row.

    The copy engine wants rows of y and words to begin at multiples of 16 bytes.
    """
    aligned = weight.shape[0] % 8 == 0 and weight.words.data_ptr() % 16 == 0
    return x.element_size() == 2 and not weight.grouped and aligned


def many_tokens(
    x: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    activation: str,
    clamped: bool,
    kept: int = 0,
) -> torch.Tensor:
    """The product of x [tokens, in] with weights: [tokens, out], if possible; all arrays are contiguous."""
    tokens, out = x.shape[0], weight.shape[0]
    y = torch.empty(tokens, out, dtype=x.dtype, device=x.device)
    rows = rows_of_block(out, tokens, multiprocessors(x.device))
    blocks = -(-out // rows), -(-tokens // TOKENS)
    tiles, steps = weight.words.shape[:2]
    words = weight.words.view(tiles, steps * TILE, TILE)
    with torch.cuda.device_of(x), LAUNCHING:
        codes, token_scale, total = quantize(x, activation, kept, clamped, interleaved=True)
        _many_tokens[(min(multiprocessors(x.device), blocks[0] * blocks[1]),)](
            TensorDescriptor.from_tensor(codes, [TOKENS, COLUMNS], OF_CODES),
            TensorDescriptor.from_tensor(words, [rows // TILE, TILE, COLUMNS // TILE], OF_WORDS),
            TensorDescriptor.from_tensor(y, [TOKENS, rows // 2], OF_Y),
            token_scale, total, weight.scale, bias, *blocks, 2 * steps, tokens, out, R=rows // 2,
            ROWS=weight.scale.dim() > 0, STAGES=STAGES, BAND=BAND, REGISTERS=REGISTERS, num_warps=4,
            launch_pdl=True, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def rows_of_block(out: int, tokens: int, processors: int) -> int:
    """All, or half of them if each multiprocessor multiplies less then."""
    most = [-(-(-(-out // rows) * -(-tokens // TOKENS)) // processors) * rows for rows in (OUT, OUT // 2)]
    return OUT if most[0] <= most[1] else OUT // 2


@gluon.constexpr_function
def _one(axis, number):
    """What adds a number to an axis."""
    return [number if i == axis else 0 for i in range(5)]


@gluon.constexpr_function
def _layout(rows, axes):
    """Of a group's rows and 128 columns: tile, row, word, quarter of a word, code; the first `axes` of these.

    Thread (r, q) has words 2 q and 2 q + 1 of rows r and r + 8.
    """
    own = [
        _one(4, 1),
        _one(4, 2),
        _one(3, 1),
        _one(3, 2),
        _one(2, 1),
        _one(1, 8),
        *([_one(0, 4)] * (rows == 128)),
    ]
    lanes = [_one(2, 2), _one(2, 4), _one(1, 1), _one(1, 2), _one(1, 4)]
    layout = gl.DistributedLinearLayout(own, lanes, [_one(0, 1), _one(0, 2)], [], [rows // 16, 16, 8, 4, 4])
    for axis in range(4, axes - 1, -1):
        layout = gl.SliceLayout(axis, layout)
    return layout


@gluon.constexpr_function
def _of_quarters(rows):
    """The layout of numbers of quarters."""
    return gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, _layout(rows, 4))))


_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_OF_ROWS = gl.constexpr(gl.SliceLayout(1, _SUMS.value))
_OF_TOKENS = gl.constexpr(gl.SliceLayout(0, _SUMS.value))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 4))
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _weights(words, R: gl.constexpr):
    """[R, 128] c + 1, each thread's as the instruction wants them. Not pure: masks stay where they stand."""
    shifts = 2 * gl.arange(0, 4, layout=_of_quarters(R))
    shifts = gl.expand_dims(gl.expand_dims(gl.expand_dims(shifts, 0), 0), 0)
    quarters = gl.expand_dims(gl.expand_dims(words, 3) >> shifts, 4)
    four, _ = gl.broadcast(quarters, gl.zeros([R // 16, 16, 8, 4, 4], gl.int32, _layout(R, 5)))
    weights = gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x03030303;", "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=False, pack=4
    )
    # tile, row, q, word of two, quarter, code --> columns as `interleaved` says
    weights = gl.permute(gl.reshape(weights, [R // 16, 16, 4, 2, 4, 4]), (0, 1, 4, 3, 2, 5))
    return gl.convert_layout(gl.reshape(weights, [R, 128]), _WEIGHTS, assert_trivial=True)


@gluon.jit
def _place(block, blocks, rounds, BAND: gl.constexpr):
    """Which rows and tokens a block has: some blocks of tokens with all rows, then the next ones."""
    band = block // (BAND * blocks)
    height = gl.minimum(rounds - band * BAND, BAND)
    inside = block - band * (BAND * blocks)
    return inside // height, band * BAND + inside % height


@gluon.jit
def _take(GROUP: gl.constexpr, shared, number, goes_on, R: gl.constexpr, STAGES: gl.constexpr):
    """A turn's words of a group's rows, when its codes are there, too.

    Unless it `goes_on`, they are anything, and nobody uses them: the loader may be writing there. Waiting is
    a branch, which the compiler moves nothing across.
    """
    words, codes_there, words_there = shared[1], shared[3], shared[4]
    stage, phase = number % STAGES, (number // STAGES) & 1
    mbarrier.wait(words_there.index(stage), phase, pred=goes_on)
    taken = words.index(stage).slice(R // 16 * GROUP, R // 16, dim=0).load(_layout(R, 3))
    mbarrier.wait(codes_there.index(stage), phase, pred=goes_on)
    return taken


@gluon.jit
def _scales(scales, bias, token_scale, total, n, m, M, N, R: gl.constexpr, ROWS: gl.constexpr):
    """What the sums of a block are scaled by: of rows, and of a token a thread; asked for before the sums."""
    row, token = n + gl.arange(0, R, layout=_OF_ROWS), m + gl.arange(0, 128, layout=_THREADS)
    if ROWS:
        of_rows = gl.load(scales + row, mask=row < N, other=0.0)
    else:
        of_rows = gl.load(scales)
    added = of_rows
    if bias is not None:
        added = gl.load(bias + row, mask=row < N, other=0.0).to(gl.float32)
    own = gl.load(token_scale + token, mask=token < M, other=0.0)
    return of_rows, added, own, gl.load(total + token, mask=token < M, other=0)


@gluon.jit
def _scaled(sums, scales, bias, ROWS: gl.constexpr):
    """[R, 128] of y, fp32."""
    of_rows, added, own, taken_off = scales
    own = gl.convert_layout(own, _OF_TOKENS)[None, :]
    taken_off = gl.convert_layout(taken_off, _OF_TOKENS)[None, :]
    if ROWS:
        result = (sums - taken_off).to(gl.float32) * (own * of_rows[:, None])
    else:
        result = (sums - taken_off).to(gl.float32) * (own * of_rows)
    if bias is not None:
        result += added[:, None]
    return result


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, shared, y, token_scale, total, scales, bias, blocks, rounds, turns, M, N,
    R: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """R rows of the weights of every block of a program, two turns at a time."""
    codes, outs, free = shared[0], shared[2], shared[5]
    cuda.gdc_wait()
    number = 0
    for block in range(gl.program_id(0), blocks * rounds, gl.num_programs(0)):
        n, m = _place(block, blocks, rounds, BAND)
        n, m = n * (2 * R) + GROUP * R, m * 128
        of_block = _scales(scales, bias, token_scale, total, n, m, M, N, R, ROWS)
        words = _take(GROUP, shared, number, True, R, STAGES)
        sums = warpgroup_mma_init(gl.zeros([R, 128], gl.int32, _SUMS))
        for turn in range(0, turns, 2):
            first, second = number % STAGES, (number + 1) % STAGES
            weights = _weights(words, R)
            sums = warpgroup_mma(weights, codes.index(first).permute((1, 0)), sums, is_async=True)
            words = _take(GROUP, shared, number + 1, True, R, STAGES)
            weights = _weights(words, R)
            sums = warpgroup_mma(weights, codes.index(second).permute((1, 0)), sums, is_async=True)
            number += 2
            words = _take(GROUP, shared, number, turn + 2 < turns, R, STAGES)
            # Registers of products under way must not be written: what comes next is masked behind this.
            sums = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[sums]))
            mbarrier.arrive(free.index(first), count=1)
            mbarrier.arrive(free.index(second), count=1)
        result = _scaled(warpgroup_mma_wait(0, deps=[sums]), of_block, bias, ROWS)
        tma.store_wait(0)
        outs.index(GROUP).store(gl.permute(result.to(y.dtype), (1, 0)))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [m, n], outs.index(GROUP))
    tma.store_wait(0)


@gluon.jit
def _load(
    shared, codes, words, blocks, rounds, turns, R: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr
):
    """Everything that is multiplied, as soon as there is room for it."""
    to_codes, to_words, _, codes_there, words_there, free = shared
    cuda.gdc_wait()
    number = 0
    for block in range(gl.program_id(0), blocks * rounds, gl.num_programs(0)):
        n, m = _place(block, blocks, rounds, BAND)
        for turn in range(turns):
            stage = number % STAGES
            mbarrier.wait(free.index(stage), ((number // STAGES) & 1) ^ 1)
            mbarrier.expect(words_there.index(stage), words.block_type.nbytes)
            tma.async_copy_global_to_shared(
                words, [n * (R // 8), turn // 2 * 16, turn % 2 * 8], words_there.index(stage),
                to_words.index(stage),
            )  # fmt: skip
            mbarrier.expect(codes_there.index(stage), codes.block_type.nbytes)
            tma.async_copy_global_to_shared(
                codes, [m * 128, turn * 128], codes_there.index(stage), to_codes.index(stage)
            )
            number += 1


@gluon.jit(do_not_specialize=["blocks", "rounds", "turns", "M", "N"])
def _many_tokens(
    codes, words, y, token_scale, total, scales, bias, blocks, rounds, turns, M, N,
    R: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Blocks of 2 R columns of y and 128 tokens, of those of a program one after the other."""
    shared = (
        gl.allocate_shared_memory(gl.int8, [STAGES, 128, 128], codes.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES, R // 8, 16, 8], words.layout),
        gl.allocate_shared_memory(y.dtype, [2, 128, R], y.layout),
        barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, shared, y, token_scale, total, scales, bias, blocks, rounds, turns, M, N, R, ROWS, STAGES,
                BAND,
            )),
            (_multiply, (
                1, shared, y, token_scale, total, scales, bias, blocks, rounds, turns, M, N, R, ROWS, STAGES,
                BAND,
            )),
            (_load, (shared, codes, words, blocks, rounds, turns, R, STAGES, BAND)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
