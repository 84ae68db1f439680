"""Gradients of the linear cross-entropy on a GPU, in Triton: only those tiles of logits that matter.

With p the softmax of a token's logits z, and a and b the gradients of its two results added up for them,

    dz = a p - b [column = target]        (times the derivative of the softcap)
    d hidden = scale dz @ weight          d weight = scale dz.T @ hidden          d bias = scale sum of dz

Logits are divided into tiles of ROWS tokens times COLUMNS of the vocabulary. Gradient filtering (Wijmans et
al. 2024, section 4.3) leaves out tiles in which no |p - [column = target]| reaches `filter_eps`. Here those
are known before anything is computed again: the forward pass keeps the largest logit of each token in each
tile, and the log-sum-exp says the rest (`candidates`). Without a filter every tile is a candidate.

Candidates are worked through in rounds, as many tiles at once as the workspace has slots (`plan`); a round
is a run of whole columns of tiles. It has three steps, and nobody waits for the host:

    _logit_gradients    dz of each tile into its slot, in the dtype of the weights
    _weight_gradients   a column of tiles at a time: complete, so that it is rounded once
    _hidden_gradients   a row of tiles at a time: added to what earlier rounds left

What earlier rounds left is fp32 in two halves: the upper 16 bits lie where the gradient will be, the lower 16
in the workspace. All sums are fp32 and in a fixed order: no atomics, no locks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.device.floats import rounded
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.dtypes import dtype_name
from neuzip.kernels.linear_cross_entropy.triton.candidates import COLUMNS, ROWS, RoundPlan, plan_rounds, tiles
from neuzip.kernels.linear_cross_entropy.triton.tiles import aligned, has_accelerator
from neuzip.kernels.linear_cross_entropy.triton.vocabulary import Vocabulary
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for

LEAST_COLUMNS = 8
"""Columns of tiles that a round has room for, whatever the workspace. With one, a head of 128,256 for 8,192
tokens takes 26,000 rounds and 6 seconds on an H200."""


@dataclass(frozen=True)
class GradientLaunch:
    """How one kernel is launched: the step of its sums, and the columns of D that it has at once."""

    step: int
    width: int
    num_warps: int
    num_stages: int
    programs: int
    """Programs of a multiprocessor."""


@functools.cache
def gradient_launch(kernel: str, dtype: torch.dtype, described: bool, device: torch.device) -> GradientLaunch:
    """The launch of `kernel`: logit_gradients, weight_gradients or hidden_gradients.

    `described`: it loads tiles through descriptors. Others need registers for addresses, and may be for a
    card with less memory.
    """
    name = f"linear_cross_entropy.{kernel}"
    return GradientLaunch(**launch_for(name, device, dtype=dtype_name(dtype), described=described))


@dataclass(frozen=True)
class Gradients:
    """Gradients of hidden states [N, D], weights [V, D] and bias [V], in their dtypes; None if not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class TokenGradients:
    """What the gradients of a token are made of: softmax * `softmax` - `target` at the target's column.

    lse       fp32 [N]
    softmax   fp32 [N]. 0 with a target's 0: the token has no gradients, whatever its logits are
    target    fp32 [N]
    position  int32 [N], the columns of the targets
    unit      fp32 [], by which everything has been divided
    """

    lse: Tensor
    softmax: Tensor
    target: Tensor
    position: Tensor
    unit: Tensor

    @classmethod
    def of(
        cls, lse: Tensor, target: Tensor, ignored: Tensor, vocabulary: Vocabulary,
        grad_nll: Tensor, grad_lse: Tensor | None, dtype: torch.dtype,
    ) -> TokenGradients:  # fmt: skip
        """From the gradients of nll and lse, [N]. NaN for targets outside the vocabulary."""
        outside = ((target < 0) | (target >= vocabulary.size)) & ~ignored
        weight = grad_nll.float().masked_fill(ignored, 0.0).masked_fill(outside, torch.nan)
        softmax = weight if grad_lse is None else weight + grad_lse.float()
        largest = torch.cat([softmax.abs(), weight.abs(), weight.new_zeros(1)]).amax()
        unit = torch.where(largest == 0, 1.0, largest)
        if dtype == torch.float16:  # small probabilities would vanish, and 2**14 is not yet too large
            unit = unit * 2.0**-14
        return cls(lse, softmax / unit, weight / unit, vocabulary.positions(target), unit)


def gradients(
    hidden: Tensor,
    vocabulary: Vocabulary,
    tokens: TokenGradients,
    flags: Tensor | None,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    workspace: int = 64 << 20,
) -> Gradients:
    """The gradients of hidden states [N, D], weights and bias that are `wanted`.

    `flags` are the candidates among the tiles; None is all of them. Beyond the gradients the workspace is
    what is allocated, in bytes, or as little as N and D allow: 8 slots for every row of tiles and, of 16-bit
    dtypes, 2 bytes for each number of `hidden`. Rows whose numbers are not neighbours are copied first.
    Raises ValueError for gradients of packed weights, which have none.
    """
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    if isinstance(vocabulary.weight, Tensor) and vocabulary.weight.stride(1) != 1:
        vocabulary = replace(vocabulary, weight=vocabulary.weight.contiguous())
    out = _outputs(hidden, vocabulary, wanted)
    if hidden.shape[0] == 0:
        return out
    across, down = tiles(hidden.shape[0], vocabulary.size)
    slots = _slots(hidden, vocabulary, workspace)
    if flags is None:
        flags = torch.ones(across, down, dtype=torch.int8, device=hidden.device)
    rounds = plan_rounds(flags, slots, -(-vocabulary.segment // COLUMNS))
    work = _Work(hidden, vocabulary, tokens, rounds, slots, softcap, scale, out)
    for number, (first, weight, bias) in enumerate(vocabulary.segments()):
        work.segment(number, first // COLUMNS, weight, bias)
    return out


def _outputs(hidden: Tensor, vocabulary: Vocabulary, wanted: tuple[bool, bool, bool]) -> Gradients:
    weight, bias, device = vocabulary.weight, vocabulary.bias, hidden.device
    if wanted[1] and isinstance(weight, PackedTensor):
        raise ValueError("packed weights have no gradients")
    make = torch.empty if hidden.shape[0] else torch.zeros
    return Gradients(
        make(hidden.shape, dtype=hidden.dtype, device=device) if wanted[0] else None,
        make(weight.shape, dtype=weight.dtype, device=device) if wanted[1] else None,
        make(bias.shape, dtype=bias.dtype, device=device) if wanted[2] and bias is not None else None,
    )


def _slots(hidden: Tensor, vocabulary: Vocabulary, workspace: int) -> int:
    """Tiles that the workspace has room for, after everything else that is in it."""
    (n, d), size = hidden.shape, hidden.element_size()
    across, down = tiles(n, vocabulary.size)
    slot = ROWS * COLUMNS * size + 4 * COLUMNS
    used = 4 * 4 * across * down  # the lists of the plan
    if not vocabulary.in_place:
        used += vocabulary.segment * d * size
    if vocabulary.segment == vocabulary.size and used + across * down * slot <= workspace:
        return across * down
    if size == 2:
        used += n * d * 2  # lower halves
    return min(across * down, max(LEAST_COLUMNS * down, (workspace - used) // slot))


class _Work:
    """One backward pass: what all its rounds share."""

    def __init__(
        self, hidden: Tensor, vocabulary: Vocabulary, tokens: TokenGradients, rounds: RoundPlan, slots: int,
        softcap: float | None, scale: float, out: Gradients,
    ) -> None:  # fmt: skip
        dtype, device = hidden.dtype, hidden.device
        self.hidden, self.tokens, self.plan, self.out = hidden, tokens, rounds, out
        self.order, self.size, self.down = vocabulary.order, vocabulary.size, tiles(hidden.shape[0], 1)[1]
        self.softcap, self.scale, self.unit = softcap, scale, tokens.unit * scale
        self.slots = torch.empty(slots * ROWS, COLUMNS, dtype=dtype, device=device)
        self.column_sums = torch.empty(
            slots if out.bias is not None else 0, COLUMNS, device=device, dtype=torch.float32
        )
        halves = dtype != torch.float32 and rounds.rounds > 1 and out.hidden is not None
        self.lower = torch.empty(hidden.shape if halves else 0, dtype=torch.int16, device=device)

    def segment(self, number: int, first: int, weight: Tensor, bias: Tensor | None) -> None:
        """All rounds for weights [rows, D] that begin with column `first` of tiles."""
        described = _describable(self.hidden) and _describable(weight)
        dtype, device = self.hidden.dtype, self.hidden.device
        logit, weights, states = (
            gradient_launch(f"{name}_gradients", dtype, described, device)
            for name in ("logit", "weight", "hidden")
        )
        steps = [self._logit_gradients(logit, described, first, weight, bias)]
        if self.out.weight is not None:
            steps.append(self._weight_gradients(weights, described, self.out.weight))
        if self.out.bias is not None:
            steps.append(self._bias_gradients(self.out.bias))
        if self.out.hidden is not None:
            steps.append(self._hidden_gradients(states, described, first, weight, self.out.hidden))
        begin = number * self.plan.rounds_a_segment
        for i in range(begin, begin + self.plan.rounds_a_segment):
            for step in steps:
                step(i)

    def _logit_gradients(
        self, config: GradientLaunch, described: bool, first: int, weight: Tensor, bias: Tensor | None
    ) -> Callable[[int], object]:
        hidden, tokens, plan = self.hidden, self.tokens, self.plan
        operands = (
            _operand(hidden, (ROWS, config.step), described),
            _operand(weight, (COLUMNS, config.step), described),
        )
        return lambda number: launch(
            _logit_gradients, self._grid(config),
            self.slots, self.column_sums, *operands, bias, tokens.lse, tokens.softmax, tokens.target,
            tokens.position, plan.entries, plan.row_start, number, first, self.down, self.softcap or 1.0,
            self.scale, hidden.shape[0], self.size, weight.shape[0], hidden.stride(0), weight.stride(0),
            D=hidden.shape[1], HAS_BIAS=bias is not None, SUMS=self.out.bias is not None,
            SOFTCAP=self.softcap is not None, ROWS=ROWS, COLUMNS=COLUMNS, **_common(config, described),
            device=hidden.device,
        )  # fmt: skip

    def _weight_gradients(
        self, config: GradientLaunch, described: bool, grad: Tensor
    ) -> Callable[[int], object]:
        hidden, plan = self.hidden, self.plan
        operands = (
            _operand(self.slots, (config.step, COLUMNS), described),
            _operand(hidden, (config.step, config.width), described),
        )
        return lambda number: launch(
            _weight_gradients, self._grid(config),
            grad, *operands, self.order, self.unit, plan.column_start, plan.column_slot, plan.column_row,
            plan.round_column, number, hidden.shape[0], self.size, hidden.stride(0), D=hidden.shape[1],
            ORDERED=self.order is not None, ROWS=ROWS, COLUMNS=COLUMNS, WIDTH=config.width,
            **_common(config, described),
            device=hidden.device,
        )  # fmt: skip

    def _bias_gradients(self, grad: Tensor) -> Callable[[int], object]:
        plan = self.plan
        return lambda number: launch(
            _bias_gradients, (multiprocessors(grad.device),),
            grad, self.column_sums, self.order, self.unit, plan.column_start, plan.column_slot,
            plan.round_column, number, self.size, ORDERED=self.order is not None, COLUMNS=COLUMNS,
            COMPILED=is_compiled(_logit_gradients), num_warps=4, device=grad.device,
        )  # fmt: skip

    def _hidden_gradients(
        self, config: GradientLaunch, described: bool, first: int, weight: Tensor, grad: Tensor
    ) -> Callable[[int], object]:
        plan, halves = self.plan, self.lower.numel() > 0
        upper = grad.view(torch.int16) if halves else grad
        operands = (
            _operand(self.slots, (ROWS, config.step), described),
            _operand(weight, (config.step, config.width), described),
        )
        return lambda number: launch(
            _hidden_gradients, self._grid(config),
            grad, upper, self.lower, *operands, self.unit, plan.entries, plan.row_start, number, first,
            self.down, int(number == 0), int(number == plan.rounds - 1), grad.shape[0], weight.shape[0],
            weight.stride(0), D=grad.shape[1], HALVES=halves, ROWS=ROWS, COLUMNS=COLUMNS,
            WIDTH=config.width, **_common(config, described),
            device=grad.device,
        )  # fmt: skip

    def _grid(self, config: GradientLaunch) -> tuple[int]:
        return (multiprocessors(self.hidden.device) * config.programs,)


def _common(config: GradientLaunch, described: bool) -> dict[str, Any]:
    return {
        "STEP": config.step, "DESCRIBED": described, "COMPILED": is_compiled(_logit_gradients),
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def _describable(matrix: Tensor) -> bool:
    """Whether kernels load a matrix through a descriptor: 16 bits, all at multiples of 16 bytes, sm_90."""
    return matrix.element_size() == 2 and aligned(matrix) and has_accelerator(matrix.device)


def _operand(matrix: Tensor, block: tuple[int, int], described: bool) -> Tensor | TensorDescriptor:
    """What a kernel loads blocks of: through a descriptor where all its operands have one."""
    return TensorDescriptor.from_tensor(matrix, list(block)) if described else matrix


# Kernels. A column or row of tiles is `column` or `row`, and `down` how many rows there are.

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block(
    matrix, row, column, rows, stride,
    WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """[R, C] of a matrix of `rows` rows and WIDTH columns, zeros outside."""
    if DESCRIBED:
        block = matrix.load([row, column])
    else:
        i, j = row + tl.arange(0, R), column + tl.arange(0, C)
        inside = (i < rows)[:, None] & (j < WIDTH)[None, :]
        block = tl.load(matrix + i.to(tl.int64)[:, None] * stride + j[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def _add_product(a, b, sums, COMPILED: tl.constexpr):
    """sums + a @ b, in fp32. The interpreter cannot multiply bf16."""
    if COMPILED:
        sums = tl.dot(a, b, sums, input_precision="ieee")
    else:
        sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["number", "first"])
def _logit_gradients(
    slots, column_sums, hidden, weight, bias, lse, softmax, target, position, entries, row_start,
    number, first, down, softcap, scale, N, V, rows, hidden_stride, weight_stride,
    D: tl.constexpr, HAS_BIAS: tl.constexpr, SUMS: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    DESCRIBED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Tiles of dz, in turn: those of one row follow each other, and the weights stay in the cache."""
    start = tl.load(row_start + number * down)
    stop = tl.load(row_start + (number + 1) * down)
    for e in range(start + tl.program_id(0), stop, tl.num_programs(0)):
        entry = tl.load(entries + e)
        row, column = entry % down, entry // down
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, D, STEP):
            h = _block(hidden, row * ROWS, k, N, hidden_stride, D, ROWS, STEP, DESCRIBED)
            w = _block(
                weight, (column - first) * COLUMNS, k, rows, weight_stride, D, COLUMNS, STEP, DESCRIBED
            )
            sums = _add_product(h, w.T, sums, COMPILED)
        i = row * ROWS + tl.arange(0, ROWS)
        inside = tl.arange(0, COLUMNS) < V - column * COLUMNS
        if HAS_BIAS:
            own = (column - first) * COLUMNS + tl.arange(0, COLUMNS)
            sums += tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)[None, :]
        sums *= scale
        if SOFTCAP:
            capped = 1 - 2 / (1 + tl.exp2(sums * (2 * LOG2E / softcap)))  # tanh
            z = softcap * capped
        else:
            z = sums
        a = tl.load(softmax + i, mask=i < N, other=0.0)
        b = tl.load(target + i, mask=i < N, other=0.0)
        total = tl.load(lse + i, mask=i < N, other=0.0)
        own_target = tl.load(position + i, mask=i < N, other=-1) - column * COLUMNS
        dz = a[:, None] * tl.exp2((z - total[:, None]) * LOG2E)
        dz -= tl.where(tl.arange(0, COLUMNS)[None, :] == own_target[:, None], b[:, None], 0.0)
        if SOFTCAP:
            dz *= 1 - capped * capped
        dz = tl.where(((a != 0) | (b != 0))[:, None] & inside[None, :], dz, 0.0)
        slot = (e - start).to(tl.int64)
        at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(slots + slot * (ROWS * COLUMNS) + at, rounded(dz, slots.dtype.element_ty, COMPILED))
        if SUMS:
            tl.store(column_sums + slot * COLUMNS + tl.arange(0, COLUMNS), tl.sum(dz, 0))


@triton.jit(do_not_specialize=["number"])
def _weight_gradients(
    grad, slots, hidden, order, unit, column_start, column_slot, column_row, round_column,
    number, N, V, hidden_stride,
    D: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, DESCRIBED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """COLUMNS rows of the gradient times WIDTH of D, in turn: one loop over the tokens of all their tiles."""
    left = tl.load(round_column + number)
    across = tl.load(round_column + number + 1) - left
    factor = tl.load(unit)
    STEPS: tl.constexpr = ROWS // STEP
    for t in range(tl.program_id(0), across * tl.cdiv(D, WIDTH), tl.num_programs(0)):
        column, d = left + t % across, t // across * WIDTH
        start = tl.load(column_start + column)
        steps = (tl.load(column_start + column + 1) - start) * STEPS
        sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
        for s in range(steps):
            e, k = start + s // STEPS, s % STEPS * STEP
            slot = tl.load(column_slot + e)
            row = tl.load(column_row + e)
            dz = _block(
                slots, slot * ROWS + k, 0, (slot + 1) * ROWS, COLUMNS, COLUMNS, STEP, COLUMNS, DESCRIBED
            )
            h = _block(hidden, row * ROWS + k, d, N, hidden_stride, D, STEP, WIDTH, DESCRIBED)
            sums = _add_product(dz.T, h, sums, COMPILED)
        v, j = column * COLUMNS + tl.arange(0, COLUMNS), d + tl.arange(0, WIDTH)
        inside = (v < V)[:, None] & (j < D)[None, :]
        v = tl.load(order + v, mask=v < V, other=0) if ORDERED else v.to(tl.int64)
        tl.store(
            grad + v[:, None] * D + j[None, :],
            rounded(sums * factor, grad.dtype.element_ty, COMPILED),
            mask=inside,
        )


@triton.jit(do_not_specialize=["number"])
def _bias_gradients(
    grad, column_sums, order, unit, column_start, column_slot, round_column, number, V,
    ORDERED: tl.constexpr, COLUMNS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """COLUMNS values, in turn."""
    left, right = tl.load(round_column + number), tl.load(round_column + number + 1)
    factor = tl.load(unit)
    for column in range(left + tl.program_id(0), right, tl.num_programs(0)):
        sums = tl.zeros([COLUMNS], tl.float32)
        for e in range(tl.load(column_start + column), tl.load(column_start + column + 1)):
            sums += tl.load(column_sums + tl.load(column_slot + e) * COLUMNS + tl.arange(0, COLUMNS))
        v = column * COLUMNS + tl.arange(0, COLUMNS)
        inside = v < V
        v = tl.load(order + v, mask=inside, other=0) if ORDERED else v.to(tl.int64)
        tl.store(grad + v, rounded(sums * factor, grad.dtype.element_ty, COMPILED), mask=inside)


@triton.jit(do_not_specialize=["number", "first", "is_first", "is_last"])
def _hidden_gradients(
    grad, upper, lower, slots, weight, unit, entries, row_start,
    number, first, down, is_first, is_last, N, rows, weight_stride,
    D: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, DESCRIBED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the gradient times WIDTH of D, in turn: what the tiles of this round add to it."""
    start = tl.load(row_start + number * down)
    STEPS: tl.constexpr = COLUMNS // STEP
    across = tl.cdiv(D, WIDTH)
    for t in range(tl.program_id(0), down * across, tl.num_programs(0)):
        row, d = t // across, t % across * WIDTH
        begin = tl.load(row_start + number * down + row)
        steps = (tl.load(row_start + number * down + row + 1) - begin) * STEPS
        if (steps > 0) | (is_first != 0) | (is_last != 0):
            i, j = tl.arange(0, ROWS), tl.arange(0, WIDTH)
            corner = (row * ROWS).to(tl.int64) * D + d
            at = i[:, None] * D + j[None, :]
            inside = (i < N - row * ROWS)[:, None] & (j < D - d)[None, :]
            sums = tl.zeros([ROWS, WIDTH], tl.float32)
            if is_first == 0:
                if HALVES:
                    high = tl.load(upper + corner + at, mask=inside, other=0).to(tl.int32) << 16
                    low = tl.load(lower + corner + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
                    sums = (high | low).to(tl.float32, bitcast=True)
                else:
                    sums = tl.load(grad + corner + at, mask=inside, other=0.0).to(tl.float32)
            for s in range(steps):
                e, k = begin + s // STEPS, s % STEPS * STEP
                column, slot = tl.load(entries + e) // down - first, e - start
                dz = _block(
                    slots, slot * ROWS, k, (slot + 1) * ROWS, COLUMNS, COLUMNS, ROWS, STEP, DESCRIBED
                )  # fmt: skip
                w = _block(weight, column * COLUMNS + k, d, rows, weight_stride, D, STEP, WIDTH, DESCRIBED)
                sums = _add_product(dz, w, sums, COMPILED)
            if is_last != 0:
                result = rounded(sums * tl.load(unit), grad.dtype.element_ty, COMPILED)
                tl.store(grad + corner + at, result, mask=inside)
            elif HALVES:
                bits = sums.to(tl.int32, bitcast=True)
                tl.store(upper + corner + at, (bits >> 16).to(tl.int16), mask=inside)
                tl.store(lower + corner + at, bits.to(tl.int16), mask=inside)
            else:
                tl.store(grad + corner + at, sums.to(grad.dtype.element_ty), mask=inside)
