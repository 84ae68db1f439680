"""Products of tiles of rows with dense weights of their expert, of some experts at a time, in Triton.

Packed weights are decoded for these where that pays: for gradients, and for so many rows that decoding takes
little beside the products. Programs whose expert is not among those that are decoded end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.experts.routing import Routing
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.packed_linear.triton import pack as triton_pack

DECODED = 256 << 20
"""Bytes of dense weights that are decoded at a time, at most, unless one expert takes more."""

WIDEST = 128
"""Rows that a program multiplies, at most."""

BLOCK, DEPTH = 128, 64
"""Columns of the result that a program has, and numbers of a sum that it multiplies at a time."""


def grouped_linear(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: Tensor | None = None
) -> Tensor:
    """rows @ weights.T + bias of the expert of each tile, with fp32 sums: [rows, in] to [rows, out].

    packed [experts * out, in], bias [experts, out]; all contiguous. Rows that no pair fills stay undefined.
    """
    y = _empty(rows, packed.shape[0] // experts)
    _multiply(y, rows, packed, experts, routing, bias, backwards=False)
    return y.to(rows.dtype)


def gradients(grad: Tensor, packed: PackedTensor, experts: int, routing: Routing) -> Tensor:
    """grad @ weights of the expert of each tile: [rows, out], contiguous, to [rows, in].

    Rows that no pair fills stay undefined.
    """
    y = _empty(grad, packed.shape[1])
    _multiply(y, grad, packed, experts, routing, None, backwards=True)
    return y.to(grad.dtype)


def _empty(rows: Tensor, columns: int) -> Tensor:
    """Results: the interpreter would cut off what bf16 cannot hold instead of rounding."""
    dtype = rows.dtype if is_compiled(_multiply_tiles) else torch.float32
    return torch.empty(len(rows), columns, dtype=dtype, device=rows.device)


def _multiply(
    y: Tensor, x: Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: Tensor | None,
    backwards: bool,
) -> None:  # fmt: skip
    """Write the products of all experts to y, decoding as many at a time as DECODED has room for."""
    out, columns = packed.shape[0] // experts, packed.shape[1]
    if y.numel() == 0:
        return
    together = min(experts, max(1, DECODED // max(1, out * columns * x.element_size())))
    dense = torch.empty(together * out, columns, dtype=packed.dtype, device=packed.device)
    depth, wide = x.shape[1], min(routing.tile, WIDEST)
    parts = routing.tile // wide
    for first in range(0, experts, together):
        stop = min(experts, first + together)
        triton_pack.decode(packed, first * out, stop * out, dense[: (stop - first) * out])
        launch(
            _multiply_tiles, (len(routing.tiles) * parts, triton.cdiv(y.shape[1], BLOCK)),
            y, x, dense, bias, routing.tiles, routing.count, first, stop, y.shape[1], depth, parts,
            BACKWARDS=backwards, BIAS=bias is not None, ROWS=wide, COLUMNS=BLOCK, DEPTH=DEPTH,
            COMPILED=is_compiled(_multiply_tiles), num_warps=8 if wide > 64 else 4, num_stages=3,
            device=x.device,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "stop", "parts"])
def _multiply_tiles(
    y, x, dense, bias, tiles, count, first, stop, columns, depth, parts,
    BACKWARDS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of ROWS rows of a tile whose expert is one of those from `first` to `stop`.

    dense: weights of these experts, [columns, depth] of each, or [depth, columns] where BACKWARDS.
    """
    own = tl.program_id(0)
    number = own // parts
    if number >= tl.load(count):
        return
    expert = tl.load(tiles + number * 4)
    used = tl.load(tiles + number * 4 + 3) - own % parts * ROWS
    if (expert < first) | (expert >= stop) | (used <= 0):
        return
    row = own.to(tl.int64) * ROWS
    m, n, k = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    dense += (expert - first).to(tl.int64) * columns * depth
    left = x + (row + m)[:, None] * depth + k[None, :]
    if BACKWARDS:
        right = dense + k[:, None] * columns + n[None, :]
    else:
        right = dense + n[None, :] * depth + k[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, depth, DEPTH):
        a = tl.load(left + at, mask=(m < used)[:, None] & (at + k < depth)[None, :], other=0.0)
        inside = (at + k < depth)[:, None] & (n < columns)[None, :]
        b = tl.load(right + (at * columns if BACKWARDS else at), mask=inside, other=0.0)
        if COMPILED:
            sums = tl.dot(a, b, sums)
        else:
            sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + expert * columns + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    target = y + (row + m)[:, None] * columns + n[None, :]
    tl.store(target, sums.to(y.dtype.element_ty), mask=(m < used)[:, None] & (n < columns)[None, :])
