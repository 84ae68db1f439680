"""Matrices of chosen items times vectors, in Triton: weights are multiplied where they are decoded.

A warp decodes a block, as stream.py does, and never stores a weight. A run is part of one row, so a lane adds
up its products of a row, and the warp adds the lanes up where the row ends. A row that goes on in the next
block has two sums, and of escapes other weights are multiplied: `neuzip.kernels.rans.products` says what puts
that right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.rans.coded import (
    COUNTS,
    FIRST,
    LAST,
    PLANES,
    ROW,
    STARTS,
    TABLES,
    ChosenLaunch,
)
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN, RUNS, SCALE
from neuzip.kernels.rans.triton import stream as triton_stream
from neuzip.kernels.rans.triton.ring import to_shared
from neuzip.kernels.rans.triton.states import begin_blocks
from neuzip.kernels.tuning import launch_for

_LANES, _RUN, _RUNS, _SLOTS = (tl.constexpr(v) for v in (LANES, RUN, RUNS, SCALE))
_C_ROW, _C_STARTS, _C_COUNTS, _C_TABLES, _C_FIRST, _C_LAST, _C_PLANES = (
    tl.constexpr(v) for v in (ROW, STARTS, COUNTS, TABLES, FIRST, LAST, PLANES)
)


def multiply_chosen(
    one: ChosenLaunch, chosen: torch.Tensor, x: torch.Tensor, together: int, rows: int
) -> torch.Tensor:
    """The matrix of item `chosen[s]` times x[s // together], fp32 [slots, rows, 2]: see `products`.

    chosen: int64 or int32 [slots]. x: bf16 [.., columns], contiguous. Sums of numbers that name no item are
    undefined.
    """
    slots, columns, programs = chosen.numel(), x.shape[1], one.programs.shape[0]
    items, parts, _ = one.rows.shape
    sums = torch.empty(slots, rows, 2, dtype=torch.float32, device=x.device)
    compiled = is_compiled(multiply_chosen_kernel)
    use = launch_for("rans.multiply", x.device, blocks=rows * columns // BLOCK)
    launch(
        multiply_chosen_kernel, (slots * programs,),
        one.base, one.rows, one.places, one.programs, chosen, x, sums, together, items, parts, programs, rows,
        columns // (LANES * RUN), L=LANES * one.warps, M=one.kind.fmt.mantissa_bits, COMPILED=compiled,
        num_warps=one.warps, pdl=True, device=x.device, **({"maxnreg": use["registers"]} if compiled else {}),
    )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["together", "runs_of_row"])
def multiply_chosen_kernel(
    base, rows, places, programs, chosen, x, sums, together, items, parts, per_slot, n_rows, runs_of_row,
    L: tl.constexpr, M: tl.constexpr, COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiply L / 32 blocks of a part of the item of a slot. `places`: the first row of each part.

    `decode_chosen_kernel` explains the other tables.
    """
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slot = tl.program_id(0) // per_slot
    programs += 2 * (tl.program_id(0) - slot * per_slot)
    part, number = tl.load(programs), tl.load(programs + 1)
    item = tl.load(chosen + slot)
    rows += 2 * (item.to(tl.int64) * parts + part)
    row = tl.load(rows, mask=(item >= 0) & (item < items), other=0)
    if row != 0:
        own = (base + tl.multiple_of(row, 16)).to(tl.pointer_type(tl.int64))
        columns = runs_of_row.to(tl.int64) * (_LANES * _RUN)
        first_row = slot.to(tl.int64) * n_rows + tl.load(places + part)
        _multiply_blocks(
            own, number * (L // _LANES), x + slot // together * columns, sums + 2 * first_row, runs_of_row,
            L, M, COMPILED,
        )  # fmt: skip


@triton.jit
def _multiply_blocks(
    own, number, x, sums, runs_of_row, L: tl.constexpr, M: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Multiply L / 32 blocks of a part, from its block `number` on, with x; `sums` are those of its rows."""
    inp = own.to(tl.pointer_type(tl.uint8)) - tl.multiple_of(tl.load(own + _C_ROW), 16)
    starts = (inp + tl.load(own + _C_STARTS)).to(tl.pointer_type(tl.int64))
    counts = (inp + tl.load(own + _C_COUNTS)).to(tl.pointer_type(tl.int32))
    tables = (inp + tl.load(own + _C_TABLES)).to(tl.pointer_type(tl.int32))
    exponents = tables + _SLOTS
    first, last = tl.load(own + _C_FIRST), tl.load(own + _C_LAST)
    lane = tl.arange(0, L) % _LANES
    # Where blocks are left over, the last is multiplied by several warps: all write the same.
    block = tl.minimum(number + tl.arange(0, L) // _LANES, (last - first).to(tl.int32))
    words, _, _, limit, state, p = begin_blocks(inp, starts, counts, own, first + block, lane, L)
    planes8 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 2), 16)).to(tl.pointer_type(tl.uint64))
    planes8 += (first + block) * (_RUNS * _LANES) + lane
    run = block * _RUNS
    row = run // runs_of_row
    at = run - row * runs_of_row
    target = sums.to(tl.int64) + (row.to(tl.int64) * 2 + (at > 0).to(tl.int64)) * 4
    vector = x.to(tl.int64) + lane * (2 * _RUN)
    shared = to_shared(tables, triton_stream.WARP_BYTES, L, COMPILED)
    lowest = tl.load(exponents).to(tl.uint32, bitcast=True)
    highest = tl.load(exponents + 255).to(tl.uint32, bitcast=True)
    if highest - lowest == (15 << M) * 0x10001:  # a palette of 16 exponents in a row
        triton_stream.runs(
            state, p, words, limit, tables, exponents, lowest, planes8, target, lane, shared, vector, at,
            runs_of_row, True, True, M, L, COMPILED,
        )  # fmt: skip
    else:
        triton_stream.runs(
            state, p, words, limit, tables, exponents, lowest, planes8, target, lane, shared, vector, at,
            runs_of_row, True, False, M, L, COMPILED,
        )  # fmt: skip
