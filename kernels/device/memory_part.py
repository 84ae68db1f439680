"""Parts of an allocation, which launches take in place of tensors.

A tensor of its own, or a view of one, costs the host some microseconds each, and a part less than one. So
what kernels alone read and write is allocated at once and cut into parts.
"""

from __future__ import annotations

import torch

ALIGNMENT = 256
"""Bytes: parts of an allocation begin at multiples of it."""


class MemoryPart:
    """`numel` elements of a dtype in the memory of a tensor, `offset` bytes after it begins.

    The tensor is contiguous, and on the device that a kernel runs on. `address` is where the
    part begins there. `kinds` is what Triton specialises on: see `start.argument_kinds`.
    """

    __slots__ = ("address", "dtype", "kinds", "memory", "numel", "offset")

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype, offset: int, numel: int) -> None:
        self.memory, self.dtype, self.offset, self.numel = memory, dtype, offset, numel
        self.address = memory.data_ptr() + offset
        self.kinds = dtype, not self.address & 15

    def tensor(self) -> torch.Tensor:
        """The part as a tensor that shares its memory."""
        end = self.offset + self.numel * self.dtype.itemsize
        return self.memory.view(-1).view(torch.uint8)[self.offset : end].view(self.dtype)

    def of(self, dtype: torch.dtype) -> MemoryPart:
        """The part with elements of another dtype."""
        return MemoryPart(self.memory, dtype, self.offset, self.numel * self.dtype.itemsize // dtype.itemsize)

    def rows(self, first: int, last: int, width: int) -> MemoryPart:
        """Rows `first` to `last` - 1 of a part that is made of rows of `width` elements."""
        offset = self.offset + first * width * self.dtype.itemsize
        return MemoryPart(self.memory, self.dtype, offset, (last - first) * width)


def allocate(device: torch.device, *pieces: tuple[torch.dtype, int], zero: bool = False) -> list[MemoryPart]:
    """Parts for pieces of a dtype and a number of elements each, in one allocation, set to 0 if asked for.

    >>> facts, symbols = allocate(torch.device("cpu"), (torch.int64, 3), (torch.int16, 5), zero=True)
    >>> facts.tensor().tolist(), symbols.offset
    ([0, 0, 0], 256)
    """
    offsets, end = [], 0
    for dtype, numel in pieces:
        offsets.append(end)
        end += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    if zero:
        memory.zero_()
    return [MemoryPart(memory, dtype, at, n) for (dtype, n), at in zip(pieces, offsets, strict=True)]
