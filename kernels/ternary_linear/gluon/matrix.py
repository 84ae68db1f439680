"""Products of many tokens with ternary weights, on Hopper, in Gluon: which is Triton with explicit layouts.

A program has three partitions of warps, and works on one block of y after the other:

    loader, 1 warp       copies the codes of 128 tokens and the words of 256 or 128 rows, 128 columns a step,
                         to shared memory (TMA), STAGES steps ahead
    2 warp groups        each: words of half of the rows -> registers, a byte a weight -> warp-group
                         instructions with the codes -> int32 sums -> scaled -> shared memory -> y (TMA)

Weights go to the tensor cores from registers, so they are never unpacked in memory: an instruction takes of
thread (r, q) what that masked of its own words. This needs codes in another order, `interleaved`, in which
`quantize` writes them. What is multiplied is c + 1, 0 to 2 for the codes c of weights, and the sum of a
token's codes is subtracted at the end: multiplying c would take more instructions and more power.

Words are few bytes, so what a block reads is mostly codes. A block therefore has twice as many rows of
weights as tokens: the L2 cache would not keep up with a square one. Where that leaves multiprocessors without
work, blocks have half of the rows.

While one group waits for its products to end, before it writes their registers again, the tensor cores are
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
from neuzip.kernels.device.launch import launching
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.ternary_linear.triton.quantize import quantize
from neuzip.kernels.ternary_linear.weight import TILE, TernaryWeight
from neuzip.kernels.tuning import launch_for

OUT, TOKENS, COLUMNS = 256, 128, 128
"""Rows of the weights (or half of them) and tokens of a block of y; columns of a step."""

LOADER_REGISTERS = 24
"""Registers of a thread of the loader, the fewest that a partition can have."""

OF_CODES, OF_WORDS = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(32, 32, 3)
OF_Y = gl.NVMMASharedLayout(128, 16, 2)
"""Layouts of codes, words and y in shared memory."""


def possible(x: torch.Tensor, weight: TernaryWeight) -> bool:
    """Whether `many_tokens` can multiply these on a Hopper GPU: x of 16 bits, one scale or one a row.

    TMA wants rows of y, and words, to begin at multiples of 16 bytes.
    """
    aligned = weight.shape[0] % 8 == 0 and weight.words.data_ptr() % 16 == 0
    return x.element_size() == 2 and not weight.grouped and aligned


def many_tokens(
    x: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    activation: str,
    clamped: bool,
    top_k: int = 0,
) -> torch.Tensor:
    """The product of x [tokens, in] with weights for which it is `possible`: [tokens, out]. Arrays are
    contiguous.

    The table of launches says: stages, steps whose codes and words are in shared memory; band, blocks of
    tokens whose codes stay in the L2 cache while they are multiplied with all rows; registers of a
    multiplying thread.
    """
    tokens, out = x.shape[0], weight.shape[0]
    y = torch.empty(tokens, out, dtype=x.dtype, device=x.device)
    rows = rows_of_block(out, tokens, multiprocessors(x.device))
    blocks = -(-out // rows), -(-tokens // TOKENS)
    launch = launch_for("ternary_linear.many_tokens_hopper", x.device)
    tiles, k_blocks = weight.words.shape[:2]
    words = weight.words.view(tiles, k_blocks * TILE, TILE)
    with launching(x.device):
        codes, token_scale, total = quantize(x, activation, top_k, clamped, interleaved=True)
        _many_tokens[(min(multiprocessors(x.device), blocks[0] * blocks[1]),)](
            TensorDescriptor.from_tensor(codes, [TOKENS, COLUMNS], OF_CODES),
            TensorDescriptor.from_tensor(words, [rows // TILE, TILE, COLUMNS // TILE], OF_WORDS),
            TensorDescriptor.from_tensor(y, [TOKENS, rows // 2], OF_Y),
            token_scale, total, weight.scale, bias, *blocks, 2 * k_blocks, tokens, out, R=rows // 2,
            ROW_SCALES=weight.scale.dim() > 0, STAGES=launch["stages"], BAND=launch["band"],
            REGISTERS=launch["registers"], LOADER_REGISTERS=LOADER_REGISTERS, num_warps=4,
            launch_pdl=True, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def rows_of_block(out: int, tokens: int, processors: int) -> int:
    """Rows of a block: OUT, or half of it if the busiest multiprocessor then multiplies fewer rows."""
    most = [-(-(-(-out // rows) * -(-tokens // TOKENS)) // processors) * rows for rows in (OUT, OUT // 2)]
    return OUT if most[0] <= most[1] else OUT // 2


@gluon.constexpr_function
def _one(axis, number):
    """A basis vector of a layout: adds a number to one axis."""
    return [number if i == axis else 0 for i in range(5)]


@gluon.constexpr_function
def _layout(rows, axes):
    """The layout of a group's words for 128 columns: tile, row, word, quarter of a word, code; the first
    `axes` axes.

    Thread (r, q) has words 2 q and 2 q + 1 of rows r and r + 8.
    """
    registers = [
        _one(4, 1),
        _one(4, 2),
        _one(3, 1),
        _one(3, 2),
        _one(2, 1),
        _one(1, 8),
        *([_one(0, 4)] * (rows == 128)),
    ]
    lanes = [_one(2, 2), _one(2, 4), _one(1, 1), _one(1, 2), _one(1, 4)]
    layout = gl.DistributedLinearLayout(
        registers, lanes, [_one(0, 1), _one(0, 2)], [], [rows // 16, 16, 8, 4, 4]
    )
    for axis in range(4, axes - 1, -1):
        layout = gl.SliceLayout(axis, layout)
    return layout


@gluon.constexpr_function
def _of_quarters(rows):
    """The layout of the numbers 0 to 3 of a word's quarters."""
    return gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, _layout(rows, 4))))


_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_OF_ROWS = gl.constexpr(gl.SliceLayout(1, _SUMS.value))
_OF_TOKENS = gl.constexpr(gl.SliceLayout(0, _SUMS.value))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 4))
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _weights(words, R: gl.constexpr):
    """Weights c + 1, int8 [R, 128], in the registers where the instruction takes them, from words [R / 16,
    16, 8].

    The masks are not pure, so that the compiler does not move them behind the start of a product, which would
    wait.
    """
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
    """Row and token numbers of a block: BAND blocks of tokens with all rows, then the next ones."""
    band = block // (BAND * blocks)
    height = gl.minimum(rounds - band * BAND, BAND)
    inside = block - band * (BAND * blocks)
    return inside // height, band * BAND + inside % height


@gluon.jit
def _take(GROUP: gl.constexpr, shared, number, more, R: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the words and the codes of step `number`, and load the words of a group's rows.

    Unless there is `more`, the words are anything and nobody uses them: the loader may be writing there.
    """
    words, codes_ready, words_ready = shared[1], shared[3], shared[4]
    stage, phase = number % STAGES, (number // STAGES) & 1
    mbarrier.wait(words_ready.index(stage), phase, pred=more)
    loaded = words.index(stage).slice(R // 16 * GROUP, R // 16, dim=0).load(_layout(R, 3))
    mbarrier.wait(codes_ready.index(stage), phase, pred=more)
    return loaded


@gluon.jit
def _scales(scales, bias, token_scale, total, n, m, M, N, R: gl.constexpr, ROW_SCALES: gl.constexpr):
    """A block's scales and biases of rows; for each thread the scale and the sum of codes of a token."""
    row, token = n + gl.arange(0, R, layout=_OF_ROWS), m + gl.arange(0, 128, layout=_THREADS)
    if ROW_SCALES:
        of_rows = gl.load(scales + row, mask=row < N, other=0.0)
    else:
        of_rows = gl.load(scales)
    added = of_rows
    if bias is not None:
        added = gl.load(bias + row, mask=row < N, other=0.0).to(gl.float32)
    of_tokens = gl.load(token_scale + token, mask=token < M, other=0.0)
    return of_rows, added, of_tokens, gl.load(total + token, mask=token < M, other=0)


@gluon.jit
def _scaled(sums, scales, bias, ROW_SCALES: gl.constexpr):
    """The sums of a block, scaled and with the bias: fp32 [R, 128]."""
    of_rows, added, of_tokens, code_sum = scales
    of_tokens = gl.convert_layout(of_tokens, _OF_TOKENS)[None, :]
    code_sum = gl.convert_layout(code_sum, _OF_TOKENS)[None, :]
    if ROW_SCALES:
        result = (sums - code_sum).to(gl.float32) * (of_tokens * of_rows[:, None])
    else:
        result = (sums - code_sum).to(gl.float32) * (of_tokens * of_rows)
    if bias is not None:
        result += added[:, None]
    return result


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, shared, y, token_scale, total, scales, bias, blocks, rounds, steps, M, N,
    R: gl.constexpr, ROW_SCALES: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Multiply R rows of the weights of every block of a program, two steps at a time."""
    codes, outs, free = shared[0], shared[2], shared[5]
    cuda.gdc_wait()
    number = 0
    for block in range(gl.program_id(0), blocks * rounds, gl.num_programs(0)):
        n, m = _place(block, blocks, rounds, BAND)
        n, m = n * (2 * R) + GROUP * R, m * 128
        of_block = _scales(scales, bias, token_scale, total, n, m, M, N, R, ROW_SCALES)
        words = _take(GROUP, shared, number, True, R, STAGES)
        sums = warpgroup_mma_init(gl.zeros([R, 128], gl.int32, _SUMS))
        for step in range(0, steps, 2):
            first, second = number % STAGES, (number + 1) % STAGES
            weights = _weights(words, R)
            sums = warpgroup_mma(weights, codes.index(first).permute((1, 0)), sums, is_async=True)
            words = _take(GROUP, shared, number + 1, True, R, STAGES)
            weights = _weights(words, R)
            sums = warpgroup_mma(weights, codes.index(second).permute((1, 0)), sums, is_async=True)
            number += 2
            words = _take(GROUP, shared, number, step + 2 < steps, R, STAGES)
            # Registers of products in flight must not be written: the next words are masked behind this.
            sums = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[sums]))
            mbarrier.arrive(free.index(first), count=1)
            mbarrier.arrive(free.index(second), count=1)
        result = _scaled(warpgroup_mma_wait(0, deps=[sums]), of_block, bias, ROW_SCALES)
        tma.store_wait(0)
        outs.index(GROUP).store(gl.permute(result.to(y.dtype), (1, 0)))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [m, n], outs.index(GROUP))
    tma.store_wait(0)


@gluon.jit
def _load(
    shared, codes, words, blocks, rounds, steps, R: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr
):
    """Copy all codes and words that the groups multiply, as soon as a stage is free."""
    to_codes, to_words, _, codes_ready, words_ready, free = shared
    cuda.gdc_wait()
    number = 0
    for block in range(gl.program_id(0), blocks * rounds, gl.num_programs(0)):
        n, m = _place(block, blocks, rounds, BAND)
        for step in range(steps):
            stage = number % STAGES
            mbarrier.wait(free.index(stage), ((number // STAGES) & 1) ^ 1)
            mbarrier.expect(words_ready.index(stage), words.block_type.nbytes)
            tma.async_copy_global_to_shared(
                words, [n * (R // 8), step // 2 * 16, step % 2 * 8], words_ready.index(stage),
                to_words.index(stage),
            )  # fmt: skip
            mbarrier.expect(codes_ready.index(stage), codes.block_type.nbytes)
            tma.async_copy_global_to_shared(
                codes, [m * 128, step * 128], codes_ready.index(stage), to_codes.index(stage)
            )
            number += 1


@gluon.jit(do_not_specialize=["blocks", "rounds", "steps", "M", "N"])
def _many_tokens(
    codes, words, y, token_scale, total, scales, bias, blocks, rounds, steps, M, N,
    R: gl.constexpr, ROW_SCALES: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Blocks of 2 R columns of y and 128 tokens: those of a program, one after the other."""
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
                0, shared, y, token_scale, total, scales, bias, blocks, rounds, steps, M, N, R, ROW_SCALES,
                STAGES, BAND,
            )),
            (_multiply, (
                1, shared, y, token_scale, total, scales, bias, blocks, rounds, steps, M, N, R, ROW_SCALES,
                STAGES, BAND,
            )),
            (_load, (shared, codes, words, blocks, rounds, steps, R, STAGES, BAND)),
        ],
        [4, 1], [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
