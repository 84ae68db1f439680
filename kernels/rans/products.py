"""Matrices of coded items that a GPU multiplies with vectors while it decodes them: no weight is stored.

    sums[slot, row]    two numbers, fp32: the first is of the row's weights in the block that it begins in,
                       the second, if there is one, of those in the next block
    corrections        weights that the decoder gets only at the end of a block. What it multiplies in their
                       place is known, so whoever reads the sums adds  (weight - other) * x  for them

`row_sums` in plain torch says how a row's product is made of these. Blocks, rows and runs have to fit to each
other: `can_multiply`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neuzip.kernels.rans.chosen import ChunkOf, chosen_launches
from neuzip.kernels.rans.coded import ChosenLaunch
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.kernels.tuning import launch_for

RUN_WEIGHTS = LANES * RUN


@dataclass(frozen=True)
class Corrections:
    """Weights of all items that are multiplied wrong, row after row.

    row_start  int32 [items * rows + 1]: the first correction of each row
    columns    int32: where in their row they are
    values     int32: the weight's bits in the upper half, those of what is multiplied in the lower half
    """

    row_start: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class CodedMatrices:
    """A matrix [rows, columns] of each item, coded on one device."""

    rows: int
    columns: int
    launch: ChosenLaunch
    corrections: Corrections
    sources: tuple[torch.Tensor, ...]
    """All that launches read: of codes they know only where they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        launch, wrong = self.launch, self.corrections
        tables = launch.rows, launch.places, launch.programs, wrong.row_start, wrong.columns, wrong.values
        return sum(table.nbytes for table in tables)

    def multiply(self, chosen: torch.Tensor, x: torch.Tensor, together: int) -> torch.Tensor:
        """Sums of the matrix of item `chosen[s]` times x[s // together]: fp32 [slots, rows, 2].

        chosen: int64 or int32 [slots]; sums of numbers that name no item are undefined. x: bf16.
        """
        from neuzip.kernels.rans.triton.multiply import multiply_chosen

        return multiply_chosen(self.launch, chosen, x.contiguous(), together, self.rows)


def can_multiply(items: Sequence[Sequence[ChunkOf]], columns: int) -> bool:
    """Whether `coded_matrices` takes these: whole blocks of bf16, and rows of whole runs in one block or two.

    Nothing may be in host memory.
    """
    from neuzip.kernels.rans.triton.decode import streams

    chunks = [
        (tensor, tensor.chunk(number), tensor.part(number)) for item in items for tensor, number in item
    ]
    return (
        columns % RUN_WEIGHTS == 0
        and columns <= BLOCK
        and all(streams(part.kind) and not part.ragged for _, _, part in chunks)
        and all(chunk.start % BLOCK == 0 and chunk.stop % BLOCK == 0 for _, chunk, _ in chunks)
        and all(tensor.host is None for tensor, _, _ in chunks)
    )


def coded_matrices(items: Sequence[Sequence[ChunkOf]], rows: int, columns: int) -> CodedMatrices:
    """Tables for matrices [rows, columns] of items that have these chunks: `items[item][part]`.

    The host waits for the device, which decodes all of them twice.
    """
    parts = [list(chunks) for chunks in zip(*items, strict=True)]
    firsts = [0]
    for chunks in parts[:-1]:
        tensor, number = chunks[0]
        firsts.append(firsts[-1] + (tensor.chunk(number).stop - tensor.chunk(number).start) // columns)
    use = launch_for("rans.multiply", parts[0][0][0].memory.device, blocks=rows * columns // BLOCK)
    (launch,) = chosen_launches(parts, firsts, use["num_warps"])
    corrections = _corrections(items, rows, columns)
    memories = {id(t.memory): t.memory for item in items for t, _ in item}
    tables = launch.rows, launch.places, launch.programs
    wrong = corrections.row_start, corrections.columns, corrections.values
    return CodedMatrices(rows, columns, launch, corrections, (*memories.values(), *tables, *wrong))


def _corrections(items: Sequence[Sequence[ChunkOf]], rows: int, columns: int) -> Corrections:
    """What is multiplied wrong, by decoding everything with and without escapes."""
    plain: dict[int, ResidentTensor] = {}
    numbers, values = [], []
    for item, chunks in enumerate(items):
        before = item * rows * columns
        for tensor, number in chunks:
            if id(tensor) not in plain:
                plain = {id(tensor): tensor.without_escapes()}  # one at a time: it is a copy
            right, wrong = (one.decode(number)[0] for one in (tensor, plain[id(tensor)]))
            where = torch.nonzero(right != wrong)[:, 0]
            numbers.append(where + before)
            values.append(right[where].int() << 16 | wrong[where].int() & 0xFFFF)
            before += right.numel()
    all_numbers = torch.cat(numbers)
    edges = torch.arange(len(items) * rows + 1, device=all_numbers.device) * columns
    return Corrections(
        torch.searchsorted(all_numbers, edges).int(), (all_numbers % columns).int(), torch.cat(values)
    )


def row_sums(
    matrices: CodedMatrices, sums: torch.Tensor, chosen: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Products [slots, rows] of matrices with x [slots, columns], fp32, of their sums and corrections."""
    first = torch.arange(matrices.rows, device=x.device) * matrices.columns
    is_split = first // BLOCK != (first + matrices.columns - 1) // BLOCK
    products = sums[..., 0] + torch.where(is_split, sums[..., 1], 0.0)
    wrong = matrices.corrections
    for slot, item in enumerate(chosen.tolist()):
        for row in range(matrices.rows):
            at = item * matrices.rows + row
            for i in range(int(wrong.row_start[at]), int(wrong.row_start[at + 1])):
                bits = torch.stack([wrong.values[i] >> 16, wrong.values[i] << 16 >> 16]).short()
                weight, other = bits.view(torch.bfloat16).float()
                products[slot, row] += (weight - other) * x[slot, wrong.columns[i]].float()
    return products
