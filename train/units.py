"""Parameters of a decoder in units that are stored, decoded and encoded together.

    layers   | the matrices of a layer in one array per dtype, decoded when the layer runs
    tables   | embedding and head, in chunks of rows

Between uses a layer's matrices are parameters without memory (device meta), of the right shape and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from neuzip.train.compressed_array import StoredArray, aligned_bytes

from .model_shell import LayerArguments
from .states import StatePieces

ALIGN = 128
"""Elements: the start of each weight in its array is a multiple, so that products run at full speed."""

ROWS = 256
"""Rows: the size of a chunk of a table is a multiple, so that it has whole blocks of optimizer states."""

Place = tuple[nn.Module, str]
Store = Callable[[Tensor], StoredArray]
"""store(flat) stores a dense array, [n]."""


@dataclass(eq=False)
class ParameterSlot:
    """A parameter of the model.

    number  its position among all parameters
    places  the modules that use it, with its name in each
    start   its first element in the array of its layer
    """

    name: str
    number: int
    places: list[Place]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    start: int = 0
    states: StatePieces = field(default_factory=list)
    hollow: nn.Parameter | None = None
    """A parameter without memory (device meta), once one was needed."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) >= 2

    def put(self, parameter: nn.Parameter) -> None:
        """Make all modules use `parameter`."""
        for module, name in self.places:
            module._parameters[name] = parameter

    def empty(self) -> None:
        """Make all modules use a parameter without memory."""
        if self.hollow is None:
            nothing = torch.empty(self.shape, dtype=self.dtype, device="meta")
            self.hollow = nn.Parameter(nothing, self.trainable)
        self.put(self.hollow)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that modules use now."""
        module, name = self.places[0]
        parameter = module._parameters[name]
        assert isinstance(parameter, nn.Parameter)
        return parameter


def slots_of(model: nn.Module) -> dict[str, ParameterSlot]:
    """All parameters by name; tied ones appear once."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return {
        name: ParameterSlot(name, number, places[id(p)], p.shape, p.dtype, p.requires_grad)
        for number, (name, p) in enumerate(model.named_parameters())
    }


class DecoderLayer:
    """A decoder layer whose matrices lie in one stored array per dtype; `plain` are its norms and biases."""

    def __init__(
        self, module: nn.Module, slots: Sequence[ParameterSlot], store: Store, device: torch.device
    ) -> None:
        self.module = module
        self.coded = [slot for slot in slots if len(slot.shape) >= 2]
        self.plain = [slot for slot in slots if len(slot.shape) < 2]
        self.arrays: list[tuple[list[ParameterSlot], StoredArray]] = []
        self._parameters: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for dtype in dict.fromkeys(slot.dtype for slot in self.coded):
            slots_of_dtype = [slot for slot in self.coded if slot.dtype == dtype]
            end = 0
            for slot in slots_of_dtype:
                slot.start = end
                end = -(-(end + slot.numel) // ALIGN) * ALIGN
            flat = torch.zeros(end, dtype=dtype, device=device)
            for slot in slots_of_dtype:
                flat[slot.start : slot.start + slot.numel] = slot.parameter.detach().reshape(-1).to(device)
                slot.empty()
            self.arrays.append((slots_of_dtype, store(flat)))

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices as stored."""
        return sum(array.nbytes for _, array in self.arrays)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer into which all its arrays can be decoded."""
        return sum(aligned_bytes(array.numel * array.dtype.itemsize) for _, array in self.arrays)

    @property
    def trained(self) -> list[ParameterSlot]:
        """Parameters that have gradients, matrices first."""
        return [slot for slot in (*self.coded, *self.plain) if slot.trainable]

    def decode(self, buffer: Tensor) -> list[Tensor]:
        """The dense arrays, in `buffer` or where they lie anyway."""
        flats, at = [], 0
        for _, array in self.arrays:
            flats.append(array.open(buffer[at:]))
            at += aligned_bytes(array.numel * array.dtype.itemsize)
        return flats

    def encode(self, flats: list[Tensor]) -> None:
        """Store the present values of the dense arrays."""
        for (_, array), flat in zip(self.arrays, flats, strict=True):
            array.close(flat)

    @contextmanager
    def placed(self, flats: list[Tensor]) -> Iterator[None]:
        """Context in which the dense arrays are the weights of the module.

        Parameters are made once for each place in memory, and hold this memory until `forget`.
        """
        place = tuple(flat.data_ptr() for flat in flats)
        parameters = self._parameters.get(place) or self._views_of(flats)
        if not torch.is_inference_mode_enabled():  # parameters made in this mode cannot be trained
            self._parameters[place] = parameters
        for slot, parameter in zip(self._slots(), parameters, strict=True):
            slot.put(parameter)
        try:
            yield
        finally:
            for slot in self.coded:
                slot.empty()

    def forget(self) -> None:
        """Drop the parameters of all places in memory."""
        self._parameters.clear()

    def _slots(self) -> Iterator[ParameterSlot]:
        """The slots of `coded` in the order of the arrays."""
        return (slot for slots, _ in self.arrays for slot in slots)

    def _views_of(self, flats: list[Tensor]) -> list[nn.Parameter]:
        parameters = []
        for (slots, _), flat in zip(self.arrays, flats, strict=True):
            for slot in slots:
                view = flat[slot.start : slot.start + slot.numel].view(slot.shape)
                parameters.append(nn.Parameter(view, requires_grad=slot.trainable))
        return parameters

    def __call__(self, x: Tensor, call: LayerArguments) -> Tensor:
        """The output of the layer for hidden states `x`, [B, T, D]."""
        out = self.module(x, *call.arguments, **call.keywords)
        states = out[0] if isinstance(out, tuple) else out
        assert isinstance(states, Tensor)
        return states


class TokenTable:
    """A matrix with a row per token of the vocabulary, stored in chunks of rows."""

    def __init__(self, slot: ParameterSlot, rows: int, store: Store, device: torch.device) -> None:
        self.slot, self.columns = slot, math.prod(slot.shape[1:])
        total = slot.shape[0]
        weight = slot.parameter.detach()
        self.chunks = [
            (
                slice(start, min(start + rows, total)),
                store(weight[start : start + rows].reshape(-1).to(device)),
            )
            for start in range(0, total, rows)
        ]
        self.states: list[StatePieces] = [[] for _ in self.chunks]
        slot.empty()

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks as stored."""
        return sum(array.nbytes for _, array in self.chunks)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer into which any chunk can be decoded."""
        return max(aligned_bytes(array.numel * array.dtype.itemsize) for _, array in self.chunks)

    def open(self, number: int, buffer: Tensor) -> Tensor:
        """The dense rows of a chunk, [rows, columns]."""
        return self.chunks[number][1].open(buffer).view(-1, self.columns)

    def close(self, number: int, rows: Tensor) -> None:
        """Store the present values of the rows of a chunk."""
        self.chunks[number][1].close(rows.view(-1))

    def look_up(self, ids: Tensor, buffer: Tensor) -> Tensor:
        """The rows of `ids` [n], [n, columns], in new memory."""
        result = torch.empty(ids.numel(), self.columns, dtype=self.slot.dtype, device=ids.device)
        for number, (rows, _) in enumerate(self.chunks):
            at, row = rows_inside(ids, rows)
            result[at] = self.open(number, buffer)[row]
        return result


def rows_inside(ids: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Positions in `ids` [n] of ids within `rows`, and their rows, counted from the first of `rows`."""
    at = torch.nonzero((ids >= rows.start) & (ids < rows.stop)).flatten()
    return at, ids[at] - rows.start


def rows_of_chunk(shape: Sequence[int], itemsize: int, nbytes: int) -> int:
    """Rows of a chunk of about `nbytes`, a multiple of ROWS; all chunks but the last are equal."""
    size = math.prod(shape[1:]) * itemsize
    chunks = max(1, round(shape[0] * size / nbytes))
    return -(-shape[0] // (chunks * ROWS)) * ROWS
