"""An optimizer's states between steps: dense, or losslessly compressed like weights.

    store = StateStore(optimizer, device, compressed=True)
    store.reserve(largest)
    store.update(states, update)    for each piece of the states: decode it, take the step, encode it

The moments of AdamW in fp32 are compressed to about 83 % of their 8 bytes a weight: their exponents take 2.5
to 3 bits instead of 8, and their mantissas are noise. States in 8 bits take 2.03 bytes, but are not exact.
Compression keeps every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from neuzip.errors import UsageError
from neuzip.train.compressed_array import PlainArray, StoredArray, aligned_bytes, store_array

from .optimizers import PIECE, Optimizer, ParameterUpdate

StateStorage = Literal["plain", "lossless"]
STATE_STORAGES: tuple[StateStorage, ...] = ("plain", "lossless")

StatePieces = list[dict[str, StoredArray]]
"""States of an array by their names: if compressed a piece for each PIECE elements, else one piece."""


class StateStore:
    """Stores the states of a run. Raises UsageError for an optimizer whose states cannot be compressed."""

    def __init__(
        self, optimizer: Optimizer, device: torch.device, *, compressed: bool, triton: bool | None = None
    ) -> None:
        self.optimizer, self._device, self._compressed, self._triton = optimizer, device, compressed, triton
        self._sizes = {n: s.itemsize for n, s in optimizer.new_states(1, torch.device("cpu")).items()}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        if compressed and not _all_float(optimizer):
            raise UsageError(
                "this optimizer has no states that could be held losslessly compressed",
                "choose adamw, whose states are fp32, or states as they are",
            )

    def reserve(self, numel: int) -> None:
        """Allocate a buffer for the states of arrays of up to `numel` elements."""
        if self._compressed:
            nbytes = sum(aligned_bytes(min(numel, PIECE) * size) for size in self._sizes.values())
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def update(self, states: StatePieces, update: ParameterUpdate) -> None:
        """Take a step with a whole array. Empty `states` are filled with the optimizer's first ones."""
        if not states:
            states += self.fresh(update.weight.numel())
        for (span, _), piece in zip(self._cut(update.weight.numel()), states, strict=True):
            flats = self._opened(piece)
            self.optimizer.update(update if len(states) == 1 else update.cut(span), flats)
            for name, flat in flats.items():
                piece[name].close(flat)

    def fresh(self, numel: int) -> StatePieces:
        """States of `numel` elements before the first step."""
        return [self._stored(self.optimizer.new_states(size, self._device)) for _, size in self._cut(numel)]

    def whole(self, chunks: list[StatePieces]) -> dict[str, Tensor]:
        """The states of consecutive arrays, joined by name, on the CPU; empty before the first step."""
        parts: dict[str, list[Tensor]] = {}
        for states in chunks:
            for piece in states:
                for name, flat in self._opened(piece).items():
                    parts.setdefault(name, []).append(flat.to("cpu", copy=True))
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    def restore(self, chunks: list[StatePieces], sizes: list[int], whole: Mapping[str, Tensor]) -> None:
        """Take the states that `whole` returned, for arrays of `sizes` elements.

        Raises KeyError with the name of a state that is missing, ValueError with one that does not fit.
        """
        parts: dict[str, Iterator[Tensor]] = {}
        for name in self._sizes:
            fresh = [states[name] for size in sizes for states in self._shapes(size)]
            lengths, tensor = [state.numel() for state in fresh], whole[name]
            if tensor.dim() != 1 or tensor.numel() != sum(lengths) or tensor.dtype != fresh[0].dtype:
                raise ValueError(name)
            parts[name] = iter(torch.split(tensor, lengths))
        for states, size in zip(chunks, sizes, strict=True):
            states[:] = [
                self._stored({name: next(part).to(self._device, copy=True) for name, part in parts.items()})
                for _ in self._cut(size)
            ]

    def _shapes(self, numel: int) -> list[dict[str, Tensor]]:
        """States of each piece, without memory."""
        return [self.optimizer.new_states(size, torch.device("meta")) for _, size in self._cut(numel)]

    def _cut(self, numel: int) -> list[tuple[slice, int]]:
        size = PIECE if self._compressed else max(1, numel)
        starts = range(0, numel, size)
        return [(slice(at, min(at + size, numel)), min(size, numel - at)) for at in starts]

    def _stored(self, states: Mapping[str, Tensor]) -> dict[str, StoredArray]:
        if not self._compressed:
            return {name: PlainArray(state) for name, state in states.items()}
        return {name: store_array(state, True, triton=self._triton) for name, state in states.items()}

    def _opened(self, piece: Mapping[str, StoredArray]) -> dict[str, Tensor]:
        """The dense states of a piece, valid until the next piece is opened."""
        flats, at = {}, 0
        for name, array in piece.items():
            flats[name] = array.open(self._buffer[at:])
            at += aligned_bytes(array.numel * array.dtype.itemsize)
        return flats


def nbytes(states: StatePieces) -> int:
    """Bytes of states as stored."""
    return sum(array.nbytes for piece in states for array in piece.values())


def _all_float(optimizer: Optimizer) -> bool:
    states = optimizer.new_states(1, torch.device("cpu")).values()
    return bool(states) and all(state.is_floating_point() for state in states)
