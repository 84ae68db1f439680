"""The launches of the kernels: all tensors whose weights have equally many bits share one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from neuzip.kernels.device.launch import launch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.sparse_delta.blocks import BlockMap, CodedDelta, patterns
from neuzip.kernels.sparse_delta.numbers import BLOCK
from neuzip.kernels.sparse_delta.triton.kernels import (
    apply_kernel,
    changed_kernel,
    check_kernel,
    digest_kernel,
    encode_kernel,
    measure_kernel,
)
from neuzip.kernels.tuning import launch_for

Tensors = Sequence[torch.Tensor]


def digest(tensors: Tensors, blocks: BlockMap) -> torch.Tensor:
    """The digest of weights: int64 without dimensions."""
    sums = torch.empty(blocks.count, dtype=torch.int64, device=_device(tensors))
    use = launch_for("sparse_delta.digest", sums.device)
    for bits, base, tables, (rows,) in _groups(blocks, sums.device, tensors):
        launch(
            digest_kernel, (tables[0].numel(),), base[0], sums, *tables, rows, BITS=bits, TILE=use["tile"],
            BLOCK=BLOCK, num_warps=use["warps"], device=sums.device,
        )  # fmt: skip
    return sums.sum()


def measure(old: Tensors, new: Tensors, blocks: BlockMap, descriptors: torch.Tensor) -> None:
    """Write the descriptors of all blocks."""
    use = launch_for("sparse_delta.measure", descriptors.device)
    for bits, bases, tables, rows in _groups(blocks, descriptors.device, old, new):
        launch(
            measure_kernel, (tables[0].numel(),), *bases, descriptors, *tables, *rows, BITS=bits,
            WIDE=_wide(bits), num_warps=use["warps"], device=descriptors.device,
        )  # fmt: skip


def encode(
    old: Tensors,
    new: Tensors,
    blocks: BlockMap,
    descriptors: torch.Tensor,
    starts: torch.Tensor,
    words: torch.Tensor,
) -> None:
    """Write the words of all blocks, which are 0."""
    use = launch_for("sparse_delta.encode", words.device)
    most = use["programs"] * multiprocessors(words.device)
    places = torch.empty(min(most, blocks.count) * BLOCK, dtype=torch.int16, device=words.device)
    for bits, bases, tables, rows in _groups(blocks, words.device, old, new):
        count = tables[0].numel()
        launch(
            encode_kernel, (min(most, count),), *bases, descriptors, starts, words, places, *tables, *rows,
            count, BITS=bits, TILE=use["tile"], num_warps=use["warps"], device=words.device,
        )  # fmt: skip


def check(
    weights: Tensors, blocks: BlockMap, coded: CodedDelta, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a difference adds to the digest, int64, and whether it breaks a rule, bool; without dimensions."""
    device = coded.words.device
    use = launch_for("sparse_delta.check", device)
    changes = torch.empty(blocks.count, dtype=torch.int64, device=device)
    broken = torch.empty(blocks.count, dtype=torch.int32, device=device)
    for bits, bases, tables, rows in _groups(blocks, device, weights):
        launch(
            check_kernel, (tables[0].numel(),), *bases, changes, broken, coded.descriptors, starts,
            coded.words, coded.words.numel(), *tables, *rows, BITS=bits, TILE=use["tile"],
            WIDE=_wide(bits), MOST_REST=(1 << bits - 1) - 2, num_warps=use["warps"], device=device,
        )  # fmt: skip
    return changes.sum(), broken.any()


def apply(weights: Tensors, blocks: BlockMap, coded: CodedDelta, starts: torch.Tensor) -> None:
    """Add a difference that `check` has passed to weights in place."""
    device = coded.words.device
    use = launch_for("sparse_delta.apply", device)
    for bits, bases, tables, rows in _groups(blocks, device, weights):
        launch(
            apply_kernel, (tables[0].numel(),), *bases, coded.descriptors, starts, coded.words, *tables,
            *rows, BITS=bits, TILE=use["tile"], num_warps=use["warps"], device=device,
        )  # fmt: skip


def changed(
    blocks: BlockMap, coded: CodedDelta, starts: torch.Tensor, totals: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Write the numbers of changed weights; those of block b begin at numbers[totals[b]]."""
    device = coded.words.device
    use = launch_for("sparse_delta.apply", device)
    for bits, _, tables, rows in _groups(blocks, device):
        launch(
            changed_kernel, (tables[0].numel(),), numbers, totals, coded.descriptors, starts, coded.words,
            *tables, *rows, BITS=bits, TILE=use["tile"], num_warps=use["warps"], device=device,
        )  # fmt: skip


def _device(tensors: Tensors) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _wide(bits: int) -> int:
    """The bits of the integers in which kernels compute with patterns of `bits` bits."""
    return 32 if bits <= 16 else 64


def _groups(
    blocks: BlockMap, device: torch.device, *lists: Tensors
) -> Iterator[tuple[int, list[Any], tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]]:
    """The launches: bits of weights, a tensor of each list, the tables of blocks, and those of tensors.

    Offsets in a table of tensors count from the tensor of its list. Without lists there is one table, for
    what needs no weights.
    """
    for size in sorted({s for s, n in zip(blocks.itemsizes, blocks.numels, strict=True) if n}):
        bases, rows = [], []
        for tensors in lists:
            base = next(t for t in tensors if t.numel() and t.element_size() == size)
            bases.append(patterns(base))
            offsets = [
                (t.data_ptr() - base.data_ptr()) // size if t.element_size() == size and t.numel() else 0
                for t in tensors
            ]
            rows.append(blocks.rows(tuple(offsets), device))
        if not lists:
            rows.append(blocks.rows((0,) * len(blocks.numels), device))
        yield 8 * size, bases, blocks.tables(size, device), rows
