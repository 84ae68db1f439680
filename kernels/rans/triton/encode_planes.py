"""The planes of sign and mantissa bits, written on a GPU, in Triton: by whole runs of 8 weights."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import launch
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.numbers import RUN

INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Signed dtypes by their bits."""


def plane_views(planes: dict[int, torch.Tensor], first: int) -> dict[str, Any]:
    """The kernel's arguments for planes from weight `first` on, a multiple of whole runs."""
    views = {f"p{width}_ptr": next(iter(planes.values())) for width in (32, 16, 8, 4, 2, 1)}
    for width, plane in planes.items():
        # Narrow planes are written by the run: `width` bytes at once.
        number = INTEGERS[width if width >= 8 else 8 * width]
        views[f"p{width}_ptr"] = plane[first * width // 8 :].view(number)
    return views


def write_planes(
    bits: torch.Tensor, numel: int, views: dict[str, Any], fmt: FloatFormat, mantissa_bits: int
) -> None:
    """Write the fields of the first weights of `bits`, whole runs."""
    if not numel:
        return
    runs = numel // RUN
    launch(
        _planes_kernel, (triton.cdiv(runs, 256),),
        bits, runs=runs, **views,
        BITS=fmt.bits, MANTISSA=fmt.mantissa_bits, KEPT=mantissa_bits, RUN=RUN, TILE=256, num_warps=4,
        device=bits.device,
    )  # fmt: skip


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
    bits_ptr, p32_ptr, p16_ptr, p8_ptr, p4_ptr, p2_ptr, p1_ptr, runs,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, KEPT: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 1 + KEPT
    offs_r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    offs_in_run = tl.arange(0, RUN)[None, :]
    offs = offs_r[:, None] * RUN + offs_in_run  # [TILE, RUN]
    mask_r = offs_r < runs
    mask = mask_r[:, None]
    v = tl.load(bits_ptr + offs, mask=mask, other=0)
    if BITS < 64:
        v = v.to(tl.int32)
    sign = (v >> (BITS - 1)) & 1
    mantissa = (v >> (MANTISSA - KEPT)) & ((1 << KEPT) - 1)
    if WIDTH & 32:
        tl.store(p32_ptr + offs, _plane_part(mantissa, sign, 32, KEPT).to(tl.int32), mask=mask)
    if WIDTH & 16:
        tl.store(p16_ptr + offs, _plane_part(mantissa, sign, 16, KEPT).to(tl.int16), mask=mask)
    if WIDTH & 8:
        tl.store(p8_ptr + offs, _plane_part(mantissa, sign, 8, KEPT).to(tl.int8), mask=mask)
    if WIDTH & 4:
        part = _packed(_plane_part(mantissa, sign, 4, KEPT), offs_in_run, 4)
        tl.store(p4_ptr + offs_r, part, mask=mask_r)
    if WIDTH & 2:
        part = _packed(_plane_part(mantissa, sign, 2, KEPT), offs_in_run, 2)
        tl.store(p2_ptr + offs_r, part.to(tl.int16), mask=mask_r)
    if WIDTH & 1:
        part = _packed(_plane_part(mantissa, sign, 1, KEPT), offs_in_run, 1)
        tl.store(p1_ptr + offs_r, part.to(tl.int8), mask=mask_r)
