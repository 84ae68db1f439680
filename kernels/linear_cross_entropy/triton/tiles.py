"""Tiles of logits: how they are launched, what their kernels are given, what a program computes of one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.device.launch import is_compiled
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.dtypes import dtype_name
from neuzip.kernels.linear_cross_entropy.head import Head
from neuzip.kernels.packed_linear import ops as packed_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class TileLaunch:
    """A tile, the step of its sums over D, and how its kernel is launched. All widths are powers of two."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int
    group: int
    """Columns of tiles that are worked through together, for the second-level cache."""
    programs: int
    """Programs of a multiprocessor."""
    flatten: bool
    """Whether tiles and steps are one loop: the next tile is being loaded while this one ends."""


@functools.cache
def statistics_launch(
    dtype: torch.dtype, tokens: int, described: bool, extras: bool, device: torch.device
) -> TileLaunch:
    """The launch for the statistics of one head. `extras`: entropy, rank and argmax are computed too."""
    return TileLaunch(
        **launch_for(
            "linear_cross_entropy.statistics", device,
            dtype=dtype_name(dtype), tokens=tokens, described=described, extras=extras,
        )
    )  # fmt: skip


def tiles_at_once(tiles: int, fitting: int, head: Head, columns: int, workspace: int) -> int:
    """Columns of tiles in a chunk, at least one: chunks are as large as fits, and of about the same size."""
    if isinstance(head.weight, PackedTensor):
        row_bytes = head.weight.shape[1] * head.hidden.element_size()
        fitting = min(fitting, workspace // max(1, row_bytes * columns))
    number = triton.cdiv(tiles, max(1, fitting))
    return int(triton.cdiv(tiles, number))


def chunks(head: Head, columns: int) -> Iterator[tuple[int, Tensor]]:
    """Rows of the weights, so many at a time, with the first one's number. Decoded into the same memory."""
    weight, (v, d) = head.weight, head.weight.shape
    packed = isinstance(weight, PackedTensor)
    buffer = torch.empty(min(v, columns), d, dtype=weight.dtype, device=weight.device) if packed else None
    for start in range(0, v, columns):
        rows = slice(start, min(start + columns, v))
        if isinstance(weight, PackedTensor):
            assert buffer is not None
            yield start, packed_linear.decode(weight, rows, out=buffer[: rows.stop - start])
        else:
            yield start, weight[rows]


def operands(
    hidden: Tensor, weight: Tensor, config: TileLaunch, described: bool
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor, tuple[int, ...]]:
    """Hidden states and weights as a kernel takes them, as descriptors or as they are, and their strides."""
    hidden, weight = multipliable(hidden), multipliable(weight)
    strides = *hidden.stride(), *weight.stride()
    if not described:
        return hidden, weight, strides
    return (
        TensorDescriptor.from_tensor(hidden, [config.rows, config.step]),
        TensorDescriptor.from_tensor(weight, [config.columns, config.step]),
        strides,
    )


def multipliable(matrix: Tensor) -> Tensor:
    """A matrix as products take it: in fp32 for the interpreter, which would multiply the bits of bf16."""
    return matrix if is_compiled(products) or matrix.dtype != torch.bfloat16 else matrix.float()


def describable(head: Head) -> bool:
    """Whether the tensor memory accelerator can read hidden states and weights, as they are or decoded.

    It takes rows of neighbours that begin at multiples of 16 bytes.
    """
    hidden, weight = head.hidden, head.weight
    if isinstance(weight, PackedTensor):
        right = weight.shape[1] * hidden.element_size() % 16 == 0 and weight.shape[1] > 0
    else:
        right = aligned(weight)
    return right and aligned(hidden) and has_accelerator(hidden.device)


def aligned(matrix: Tensor) -> bool:
    """Whether rows of neighbours begin at multiples of 16 bytes."""
    row, column = matrix.stride()
    fitting = row * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return column == 1 and row >= matrix.shape[1] > 0 and fitting


@functools.cache
def has_accelerator(device: torch.device) -> bool:
    """And shared memory for the tiles that go with it: Hopper, Blackwell of data centers, the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def flags(head: Head) -> dict[str, bool]:
    """What turns products into logits, as the kernels are told."""
    return {"BIAS": head.bias is not None, "SCALE": head.scale != 1.0, "SOFTCAP": head.softcap is not None}


def bias_of(head: Head) -> Tensor | None:
    """The bias as the kernels take it: without strides."""
    return None if head.bias is None else head.bias.contiguous()


def programs(config: TileLaunch, tiles: int, device: torch.device) -> int:
    """Programs of a launch: those that run at once, or one a tile."""
    return min(tiles, config.programs * multiprocessors(device))


@triton.jit
def tile_of(i, down, across, GROUP: tl.constexpr):
    """Row and column of the i-th tile: in groups of GROUP columns, all rows of a group before the next."""
    group = i // (GROUP * down)
    within = i % (GROUP * down)
    width = tl.minimum(across - group * GROUP, GROUP)
    return within // width, group * GROUP + within % width


@triton.jit
def multiplied(a, b, acc):
    """acc + a @ b.T. fp32 step by step: thousands of products added one by one lose more than torch's do."""
    if a.dtype == tl.float32:
        part = tl.dot(a, b.T, input_precision="ieee")
        # A plain sum would be made part of the product again.
        return tl.fma(part, tl.full(part.shape, 1.0, tl.float32), acc)
    else:
        return tl.dot(a, b.T, acc, input_precision="ieee")


@triton.jit
def products(
    hidden, weight, row, column, N, C, h_row, h_col, w_row, w_col,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """hidden[row :] @ weight[column :].T, fp32 [BM, BN]; zeros where there are no rows."""
    acc = tl.zeros((BM, BN), tl.float32)
    if TMA:
        for k in range(0, D, BK):
            a = hidden.load([row, k])
            b = weight.load([column, k])
            acc = multiplied(a, b, acc)
    else:
        m = row + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        k = tl.arange(0, BK)
        p_a = hidden + m.to(tl.int64)[:, None] * h_row + k.to(tl.int64)[None, :] * h_col
        p_b = weight + n.to(tl.int64)[:, None] * w_row + k.to(tl.int64)[None, :] * w_col
        for k0 in range(0, D, BK):
            inside = (k0 + k < D)[None, :]
            a = tl.load(p_a, mask=(m < N)[:, None] & inside, other=0.0)
            b = tl.load(p_b, mask=(n < C)[:, None] & inside, other=0.0)
            acc = multiplied(a, b, acc)
            p_a += BK * h_col
            p_b += BK * w_col
    return acc


@triton.jit
def transformed(z, bias, scale, softcap, BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """From products to logits; `bias` has the shape of z or broadcasts to it."""
    if BIAS:
        z = z + bias
    if SCALE:
        z = z * scale
    if SOFTCAP:  # tanh through an exponential: its error is smallest where z is large
        z = softcap - 2 * softcap / (1.0 + tl.exp2(z * (2 * LOG2E / softcap)))
    return z


@triton.jit
def tile_logits(
    acc, bias, column, start, C, scale, softcap,
    BN: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Logits of a tile; minus infinity beyond the C columns of the chunk."""
    n = column + tl.arange(0, BN)
    b = 0.0
    if BIAS:
        b = tl.load(bias + start + n, mask=n < C, other=0.0).to(tl.float32)[None, :]
    z = transformed(acc, b, scale, softcap, BIAS, SCALE, SOFTCAP)
    if not EVEN:
        z = tl.where((n < C)[None, :], z, float("-inf"))
    return z


@triton.jit
def finite(maximum):
    """A maximum as something to subtract: minus infinity less itself would be NaN, less 0 it stays."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
