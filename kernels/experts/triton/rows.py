"""What is computed of rows beside products, in Triton: the activation of gate and up, and the weighted sum.

Results are rounded after every operation, as torch rounds them. Nothing may be fused to more exact
arithmetic: launch with enable_fp_fusion=False.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda, libdevice

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.routing import Routing
from neuzip.kernels.tuning import launch_for

GATED_ROWS = 16
"""Rows of a tile that a program activates."""


def apply_gate(rows: Tensor, routing: Routing, gate: Gate) -> Tensor:
    """The activation of the rows in use: [rows, 2 * inner], contiguous, to [rows, inner]."""
    inner = rows.shape[1] // 2
    y = torch.empty(len(rows), inner, dtype=rows.dtype, device=rows.device)
    if y.numel() == 0:
        return y
    config = launch_for("experts.gate", rows.device)
    parts = routing.tile // GATED_ROWS
    launch(
        _gate, (len(routing.tiles) * parts, triton.cdiv(inner, config["block"])),
        y, rows, routing.tiles, routing.count, inner, parts,
        0.0 if gate.limit is None else float(gate.limit), 0.0 if gate.alpha is None else float(gate.alpha),
        LIMITED=gate.limit is not None, ALPHA=gate.alpha is not None, INTERLEAVED=gate.interleaved,
        ROWS=GATED_ROWS, BLOCK=config["block"], COMPILED=is_compiled(_gate),
        num_warps=config["num_warps"], pdl=True, enable_fp_fusion=False, device=rows.device,
    )  # fmt: skip
    return y


def weighted_sum(rows: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """The sum over the slots of each token of weight * row: rows [n, columns], weights [tokens, k].

    All are contiguous. Slots whose position is -1 add nothing.
    """
    (tokens, k), columns = weights.shape, rows.shape[1]
    y = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
    if y.numel() == 0:
        return y
    if weights.dtype == torch.float64:
        weights = weights.float()
    config = launch_for("experts.sum", rows.device, tokens=tokens)
    launch(
        _sum, (tokens, triton.cdiv(columns, config["block"])),
        y, rows, position, weights, columns, SLOTS=k, ROUNDED=weights.dtype == rows.dtype,
        BLOCK=config["block"], COMPILED=is_compiled(_sum),
        num_warps=config["num_warps"], pdl=True, enable_fp_fusion=False, device=rows.device,
    )  # fmt: skip
    return y


@triton.jit
def _sigmoid_terms(x, COMPILED: tl.constexpr):
    """1 + exp(-x), of which torch makes silu and sigmoid."""
    if COMPILED:
        power = libdevice.exp(-x)  # exact to the last bits, as CUDA's: tl.exp is not
    else:
        power = tl.exp(-x)
    return 1.0 + power


@triton.jit
def activated(
    gate, up, limit, alpha,
    LIMITED: tl.constexpr, ALPHA: tl.constexpr, DTYPE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """What a Gate makes of gate and up, fp32 numbers that DTYPE has, in that."""
    if LIMITED:  # of a limit that the dtype does not have, the nearest; NaNs stay, as in torch
        most = widened(rounded(tl.full([1], 1.0, tl.float32) * limit, DTYPE, COMPILED))
        gate = tl.where(gate > most, most, gate)
        up = tl.where(up > most, most, tl.where(up < -most, -most, up))
    if ALPHA:
        sloped = widened(rounded(gate * alpha, DTYPE, COMPILED))
        opened = widened(rounded(tl.div_rn(1.0, _sigmoid_terms(sloped, COMPILED)), DTYPE, COMPILED))
        gate = widened(rounded(gate * opened, DTYPE, COMPILED))
        up = widened(rounded(up + 1.0, DTYPE, COMPILED))
    else:
        gate = widened(rounded(tl.div_rn(gate, _sigmoid_terms(gate, COMPILED)), DTYPE, COMPILED))
    return rounded(gate * up, DTYPE, COMPILED)


@triton.jit(do_not_specialize=["parts", "limit", "alpha"])
def _gate(
    y, rows, tiles, count, inner, parts, limit, alpha,
    LIMITED: tl.constexpr, ALPHA: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of ROWS rows of a tile."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    own = tl.program_id(0)
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    number = own // parts
    if number >= tl.load(count):
        return
    used = tl.load(tiles + number * 4 + 3) - own % parts * ROWS
    i, c = tl.arange(0, ROWS)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (i < used) & (c < inner)
    row = own.to(tl.int64) * ROWS + i
    if INTERLEAVED:
        both = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)[None, :]
        loaded = tl.load(rows + row * (2 * inner) + both, mask=(i < used) & (both < 2 * inner), other=0.0)
        first, second = tl.split(tl.reshape(loaded, [ROWS, BLOCK, 2]))
        gate, up = widened(first), widened(second)
    else:
        gate = widened(tl.load(rows + row * (2 * inner) + c, mask=there, other=0.0))
        up = widened(tl.load(rows + row * (2 * inner) + inner + c, mask=there, other=0.0))
    tl.store(
        y + row * inner + c, activated(gate, up, limit, alpha, LIMITED, ALPHA, DTYPE, COMPILED), mask=there
    )


@triton.jit
def _sum(
    y, rows, position, weights, columns,
    SLOTS: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr, COMPILED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the result of a token."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    sums = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(position + token * SLOTS + slot).to(tl.int64)
        weight = widened(tl.load(weights + token * SLOTS + slot))
        loaded = tl.load(rows + row * columns + c, mask=(c < columns) & (row >= 0), other=0.0)
        product = weight * widened(loaded)
        if ROUNDED:
            product = widened(rounded(product, y.dtype.element_ty, COMPILED))
        sums += tl.where(row >= 0, product, 0.0)
    tl.store(y + token * columns + c, rounded(sums, y.dtype.element_ty, COMPILED), mask=c < columns)
