"""The planes of sign and mantissa bits, written on a GPU, in Triton: by whole runs of 8 weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import launch
from neuzip.kernels.device.memory_part import MemoryPart
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN
from neuzip.kernels.rans.triton.batch import (
    ELEMENTS,
    PLANES_AT,
    Batch,
    array_of,
    numel_of,
    weights_of,
    whole_of,
    whole_runs,
)
from neuzip.kernels.rans.triton.lists import ENTRIES, on_device, row_of, starts_of

_TILE = 256
"""Runs of a program."""


def writes_planes(fmt: FloatFormat) -> bool:
    """Whether the kernel that codes writes the plane too, of all mantissa bits: where a field is a byte."""
    return (fmt.bits, fmt.mantissa_bits) == (16, 7)


def write_planes(
    batch: Batch,
    memory: torch.Tensor,
    columns: torch.Tensor | MemoryPart,
    chosen: npt.NDArray[np.bool_],
    mantissa_bits: int,
) -> None:
    """Write the planes of the chosen tensors of a batch to a memory, where its columns say.

    They have so many mantissa bits. Its tails have to be filled.
    """
    sizes = batch.sizes
    whole = sizes.whole * (BLOCK // RUN)
    tails = whole_runs(sizes.numels - sizes.whole * BLOCK) // RUN
    starts = [starts_of(np.where(chosen, -(-runs // _TILE), 0)) for runs in (whole, tails)]
    starts_there = on_device(np.stack(starts), batch.device)
    for is_tail, programs in enumerate(int(own[-1]) for own in starts):
        if not programs:
            continue
        fmt = batch.fmt
        launch(
            _planes_kernel, (programs,),
            batch.base, memory, columns, starts_there, batch.tails,
            BITS=fmt.bits, MANTISSA=fmt.mantissa_bits, KEPT=mantissa_bits, IS_TAIL=bool(is_tail),
            STRIDE=batch.tail_stride, ELEMENT=ELEMENTS[fmt.bits], BLOCK=BLOCK, LANES=LANES, RUN=RUN,
            TILE=_TILE, ENTRIES=ENTRIES, num_warps=4, device=batch.device,
        )  # fmt: skip


_PLANES_AT = tl.constexpr(PLANES_AT)


@triton.jit
def _plane_part(mantissa, sign, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """The bits of every field that go to the plane of a width."""
    BELOW: tl.constexpr = (1 + KEPT) & (WIDTH - 1)  # bits in narrower planes
    if (1 + KEPT) < 2 * WIDTH:
        return (sign << (KEPT - BELOW)) | (mantissa >> BELOW)
    return (mantissa >> BELOW) & ((1 << WIDTH) - 1)


@triton.jit
def _packed(part, offs_in_run, WIDTH: tl.constexpr):
    """The bits of a run of weights side by side, the first the lowest. part: [tile, run]."""
    return tl.sum(part.to(tl.int32) << (offs_in_run * WIDTH), 1)


@triton.jit
def _planes_kernel(
    base_ptr, planes_ptr, columns_ptr, starts_ptr, tails_ptr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, KEPT: tl.constexpr, IS_TAIL: tl.constexpr,
    STRIDE: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    RUN: tl.constexpr, TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the fields of a tile of a tensor's whole programs, or of its tail."""
    WIDTH: tl.constexpr = 1 + KEPT
    places_ptr = columns_ptr + _PLANES_AT * ENTRIES
    if IS_TAIL:
        starts_ptr += ENTRIES
    row = row_of(starts_ptr, tl.program_id(0), ENTRIES)
    number = tl.program_id(0) - tl.load(starts_ptr + row)
    offs_r = number * TILE + tl.arange(0, TILE)
    offs_in_run = tl.arange(0, RUN)[None, :]
    offs = offs_r[:, None] * RUN + offs_in_run  # [TILE, RUN]
    before = whole_of(columns_ptr, row, ENTRIES) * (BLOCK // RUN)
    if IS_TAIL:
        left = numel_of(columns_ptr, row, ENTRIES) - before * RUN
        mask_r = offs_r < (left + LANES * RUN - 1) // (LANES * RUN) * LANES
        bits_ptr = tails_ptr + row * STRIDE
        out_r = before + offs_r
    else:
        mask_r = offs_r < before
        bits_ptr = weights_of(base_ptr, columns_ptr, row, ELEMENT, ENTRIES)
        out_r = offs_r
    out = out_r[:, None] * RUN + offs_in_run
    mask = mask_r[:, None]
    v = tl.load(bits_ptr + offs, mask=mask, other=0)
    if BITS < 64:
        v = v.to(tl.int32)
    sign = (v >> (BITS - 1)) & 1
    mantissa = (v >> (MANTISSA - KEPT)) & ((1 << KEPT) - 1)
    if WIDTH & 32:
        part = _plane_part(mantissa, sign, 32, KEPT).to(tl.int32)
        tl.store(array_of(planes_ptr, places_ptr, row, tl.int32) + out, part, mask=mask)
    if WIDTH & 16:
        part = _plane_part(mantissa, sign, 16, KEPT).to(tl.int16)
        tl.store(array_of(planes_ptr, places_ptr + 1 * ENTRIES, row, tl.int16) + out, part, mask=mask)
    if WIDTH & 8:
        part = _plane_part(mantissa, sign, 8, KEPT).to(tl.int8)
        tl.store(array_of(planes_ptr, places_ptr + 2 * ENTRIES, row, tl.int8) + out, part, mask=mask)
    # Narrow planes are written by the run: as many bytes at once as a field has bits there.
    if WIDTH & 4:
        part = _packed(_plane_part(mantissa, sign, 4, KEPT), offs_in_run, 4)
        tl.store(array_of(planes_ptr, places_ptr + 3 * ENTRIES, row, tl.int32) + out_r, part, mask=mask_r)
    if WIDTH & 2:
        part = _packed(_plane_part(mantissa, sign, 2, KEPT), offs_in_run, 2)
        tl.store(
            array_of(planes_ptr, places_ptr + 4 * ENTRIES, row, tl.int16) + out_r,
            part.to(tl.int16),
            mask=mask_r,
        )
    if WIDTH & 1:
        part = _packed(_plane_part(mantissa, sign, 1, KEPT), offs_in_run, 1)
        tl.store(
            array_of(planes_ptr, places_ptr + 5 * ENTRIES, row, tl.int8) + out_r,
            part.to(tl.int8),
            mask=mask_r,
        )
