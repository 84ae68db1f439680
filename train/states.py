"""An optimizer's states between steps: as they are, or coded losslessly like weights.

    store = StateStore(optimizer, device, coded=True)
    store.make_room(largest)
    store.update(states, part)      decodes a piece of the states, takes its step, codes it again

Moments of AdamW in fp32 are coded to about 83 % of their 8 bytes a weight: their exponents take 2.5 to 3 bits
instead of 8, their mantissas are noise. States in 8 bits take 2.03 bytes, but are not exact; what is coded
here is what was there, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from neuzip.errors import UsageError
from neuzip.train.compressed_array import PlainArray, StoredArray, aligned_bytes, store_array

from .optimizers import PIECE, Optimizer, ParameterUpdate

StateStorage = Literal["plain", "lossless"]
STATE_STORAGES: tuple[StateStorage, ...] = ("plain", "lossless")

StatePieces = list[dict[str, StoredArray]]
"""States of a part by their names: of PIECE elements after PIECE elements if they are coded, else of all."""


class StateStore:
    """How the states of a run are kept. Raises UsageError for an optimizer without states to be coded."""

    def __init__(
        self, optimizer: Optimizer, device: torch.device, *, coded: bool, triton: bool | None = None
    ) -> None:
        self.optimizer, self._device, self._coded, self._triton = optimizer, device, coded, triton
        self._sizes = {n: s.itemsize for n, s in optimizer.new_states(1, torch.device("cpu")).items()}
        self._room = torch.empty(0, dtype=torch.uint8, device=device)
        if coded and not _all_float(optimizer):
            raise UsageError(
                "this optimizer has no states that could be held losslessly compressed",
                "choose adamw, whose states are fp32, or states as they are",
            )

    def make_room(self, numel: int) -> None:
        """Take a buffer for the states of parts of up to so many elements."""
        if self._coded:
            nbytes = sum(aligned_bytes(min(numel, PIECE) * size) for size in self._sizes.values())
            self._room = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def update(self, states: StatePieces, part: ParameterUpdate) -> None:
        """Take a step; states that are not there yet begin as the optimizer has them."""
        if not states:
            states += self.fresh(part.weight.numel())
        for (own, _), piece in zip(self._cut(part.weight.numel()), states, strict=True):
            flats = self._opened(piece)
            self.optimizer.update(part if len(states) == 1 else _cut_out(part, own), flats)
            for name, flat in flats.items():
                piece[name].close(flat)

    def fresh(self, numel: int) -> StatePieces:
        """States of so many elements before the first step."""
        return [self._held(self.optimizer.new_states(size, self._device)) for _, size in self._cut(numel)]

    def whole(self, chunks: list[StatePieces]) -> dict[str, Tensor]:
        """The states of parts that follow each other, on the CPU; none if there are none."""
        found: dict[str, list[Tensor]] = {}
        for states in chunks:
            for piece in states:
                for name, flat in self._opened(piece).items():
                    found.setdefault(name, []).append(flat.to("cpu", copy=True))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def restore(self, chunks: list[StatePieces], sizes: list[int], whole: Mapping[str, Tensor]) -> None:
        """Take the states that `whole` gave for parts of so many elements.

        Raises KeyError with the name of a state that is missing, ValueError with one that does not fit.
        """
        parts: dict[str, Iterator[Tensor]] = {}
        for name in self._sizes:
            fresh = [states[name] for size in sizes for states in self._shapes(size)]
            lengths, given = [state.numel() for state in fresh], whole[name]
            if given.dim() != 1 or given.numel() != sum(lengths) or given.dtype != fresh[0].dtype:
                raise ValueError(name)
            parts[name] = iter(torch.split(given, lengths))
        for states, size in zip(chunks, sizes, strict=True):
            states[:] = [
                self._held({name: next(part).to(self._device, copy=True) for name, part in parts.items()})
                for _ in self._cut(size)
            ]

    def _shapes(self, numel: int) -> list[dict[str, Tensor]]:
        """States of each piece, without memory."""
        return [self.optimizer.new_states(size, torch.device("meta")) for _, size in self._cut(numel)]

    def _cut(self, numel: int) -> list[tuple[slice, int]]:
        size = PIECE if self._coded else max(1, numel)
        starts = range(0, numel, size)
        return [(slice(at, min(at + size, numel)), min(size, numel - at)) for at in starts]

    def _held(self, states: Mapping[str, Tensor]) -> dict[str, StoredArray]:
        if not self._coded:
            return {name: PlainArray(state) for name, state in states.items()}
        return {name: store_array(state, True, triton=self._triton) for name, state in states.items()}

    def _opened(self, piece: Mapping[str, StoredArray]) -> dict[str, Tensor]:
        """The states of a piece, dense; they are valid until the next one is opened."""
        flats, at = {}, 0
        for name, held in piece.items():
            flats[name] = held.open(self._room[at:])
            at += aligned_bytes(held.numel * held.dtype.itemsize)
        return flats


def nbytes(states: StatePieces) -> int:
    """Bytes that states take between steps."""
    return sum(held.nbytes for piece in states for held in piece.values())


def _all_float(optimizer: Optimizer) -> bool:
    states = optimizer.new_states(1, torch.device("cpu")).values()
    return bool(states) and all(state.is_floating_point() for state in states)


def _cut_out(part: ParameterUpdate, own: slice) -> ParameterUpdate:
    chance = replace(part.chance, element=part.chance.element + own.start)
    return replace(part, weight=part.weight[own], gradient=part.gradient[own], chance=chance)
