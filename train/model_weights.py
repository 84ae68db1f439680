"""All weights of a model in training: where they are stored, and dense copies of them.

weights = ModelWeights(shell, slots, device, compressed=True, prefetch=False, triton=None)
with weights.opened(layer): ...              a layer's matrices, dense
for slot, weight in weights.each(): ...      all parameters, one after another
weights.set({name: tensor, ...})             other values for all
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neuzip.errors import NeuzipError
from neuzip.train.compressed_array import StoredArray, store_array
from neuzip.train.layer_prefetch import LayerBuffers
from neuzip.train.model_shell import ModelShell
from neuzip.train.states import StatePieces
from neuzip.train.units import DecoderLayer, ParameterSlot, TokenTable, rows_of_chunk
from neuzip.train.weight_checksum import checksum

SMALLEST_CHUNK = 64 << 20
"""Bytes of a chunk of a table of tokens, or those of the largest layer if that takes more."""


class ModelWeights:
    """The weights of a model: layers, tables of tokens, and `others` such as the final norm.

    `compressed` stores matrices losslessly compressed; `prefetch` takes a second buffer for layers. Takes the
    matrices away from the model's modules, and moves everything else to `device`.

    Raises NeuzipError for a parameter that layers share.
    """

    def __init__(
        self,
        shell: ModelShell,
        slots: Mapping[str, ParameterSlot],
        device: torch.device,
        *,
        compressed: bool,
        prefetch: bool,
        triton: bool | None,
    ) -> None:
        self.model, self.device = shell.model, device
        buffers = self.buffers = LayerBuffers(device, prefetch)

        def store(flat: Tensor) -> StoredArray:
            with buffers.on_side_stream():
                return store_array(flat, compressed, triton=triton)

        self.layers = [DecoderLayer(m, _slots_within(m, slots), store, device) for m in shell.layers]
        largest = max(SMALLEST_CHUNK, *(layer.buffer_bytes for layer in self.layers))

        def table(module: nn.Module) -> TokenTable:
            slot = _slot_of_weight(slots, module)
            return TokenTable(slot, rows_of_chunk(slot.shape, slot.dtype.itemsize, largest), store, device)

        self.embedding = table(shell.embedding)
        tied = (shell.head, "weight") in self.embedding.slot.places
        self.head = self.embedding if tied else table(shell.head)
        stored = {slot.name for layer in self.layers for slot in (*layer.coded, *layer.plain)}
        stored |= {self.embedding.slot.name, self.head.slot.name}
        self.others = [slot for name, slot in slots.items() if name not in stored]
        _move(self.model, device)
        nbytes = max([x.buffer_bytes for x in self.layers] + [x.buffer_bytes for x in self.tables])
        buffers.reserve(nbytes if compressed else 0)

    @property
    def tied(self) -> bool:
        """Whether the embedding and the output head share their weights."""
        return self.head is self.embedding

    @property
    def tables(self) -> list[TokenTable]:
        """The embedding, and the head unless it is tied."""
        return [self.embedding] if self.tied else [self.embedding, self.head]

    @property
    def trained_others(self) -> list[ParameterSlot]:
        """Parameters outside layers and tables that have gradients."""
        return [slot for slot in self.others if slot.trainable]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all matrices between steps."""
        return sum(layer.nbytes for layer in self.layers) + sum(table.nbytes for table in self.tables)

    @property
    def dense_bytes(self) -> int:
        """Bytes that all matrices take uncompressed."""
        slots = [slot for layer in self.layers for slot in layer.coded] + [t.slot for t in self.tables]
        return sum(slot.numel * slot.dtype.itemsize for slot in slots)

    @property
    def largest_update(self) -> int:
        """Elements of the largest array that an optimizer updates at once."""
        sizes = [array.numel for table in self.tables for _, array in table.chunks]
        sizes += [slot.numel for layer in self.layers for slot in layer.trained]
        return max(sizes + [slot.numel for slot in self.others])

    def slots(self) -> Iterator[ParameterSlot]:
        """All parameters."""
        for layer in self.layers:
            yield from (*layer.coded, *layer.plain)
        yield from (table.slot for table in self.tables)
        yield from self.others

    def arrays(self) -> Iterator[StoredArray]:
        """The stored arrays of all layers and tables."""
        for layer in self.layers:
            yield from (array for _, array in layer.arrays)
        for table in self.tables:
            yield from (array for _, array in table.chunks)

    def states(self) -> Iterator[tuple[ParameterSlot, list[StatePieces], list[int]]]:
        """All parameters with their optimizer states, in chunks, and the elements of each chunk."""
        tables = {table.slot: table for table in self.tables}
        for slot in self.slots():
            if slot in tables:
                yield slot, tables[slot].states, [array.numel for _, array in tables[slot].chunks]
            else:
                yield slot, [slot.states], [slot.numel]

    @contextmanager
    def opened(
        self, layer: DecoderLayer, *, changes: bool = False, next_layer: DecoderLayer | None = None
    ) -> Iterator[None]:
        """Context in which a layer has dense weights.

        changes     stores them afterwards
        next_layer  is prefetched
        """
        with (
            self.buffers.opened(layer, changes=changes, next_unit=next_layer) as flats,
            layer.placed(flats),
        ):
            yield

    def each(self) -> Iterator[tuple[ParameterSlot, Tensor]]:
        """All parameters, dense, one after another. A tensor is valid until the next one is taken."""
        for layer in self.layers:
            with self.opened(layer):
                dense = [(slot, slot.parameter.detach()) for slot in (*layer.coded, *layer.plain)]
            yield from dense
        for table in self.tables:
            chunks = [table.open(n, self.buffers.buffer()).clone() for n in range(len(table.chunks))]
            yield table.slot, torch.cat(chunks).view(table.slot.shape)
        for slot in self.others:
            yield slot, slot.parameter.detach()

    def set(self, weights: Mapping[str, Tensor]) -> None:
        """Give all parameters other values, by name."""
        for layer in self.layers:
            with self.opened(layer, changes=True):
                for slot in (*layer.coded, *layer.plain):
                    slot.parameter.data.copy_(weights[slot.name])
        self.buffers.wait()
        for table in self.tables:
            rows = weights[table.slot.name].reshape(-1, table.columns)
            for number, (chunk_rows, _) in enumerate(table.chunks):
                chunk = table.open(number, self.buffers.buffer())
                chunk.copy_(rows[chunk_rows])
                table.close(number, chunk)
        for slot in self.others:
            slot.parameter.data.copy_(weights[slot.name])

    @contextmanager
    def dense(self, device: torch.device | str) -> Iterator[None]:
        """Context in which the model has dense copies of all weights on `device`, in evaluation mode."""
        placed = [(slot, slot.parameter) for slot in self.slots()]
        for slot, weight in self.each():
            slot.put(nn.Parameter(weight.to(device, copy=True), slot.trainable))
        buffers = [
            (m, name, b) for m in self.model.modules() for name, b in m._buffers.items() if b is not None
        ]
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(device)
        self.model.eval()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.model.train()
            for slot, parameter in placed:
                slot.put(parameter)
            for module, name, buffer in buffers:
                module._buffers[name] = buffer

    def release(self) -> None:
        """Give the model ordinary dense weights, in evaluation mode. Nothing else can be done afterwards."""
        for slot, weight in self.each():
            slot.put(nn.Parameter(weight.clone(), slot.trainable))
        for layer in self.layers:
            layer.forget()
        self.buffers.wait()
        self.model.eval()  # type: ignore[no-untyped-call]

    def require_equal_in_processes(self) -> None:
        """Raise NeuzipError unless all processes have the same weights."""
        own = torch.stack([checksum(weight) for _, weight in self.each()])
        least, most = own.clone(), own.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise NeuzipError(
                "the processes begin with different weights", "load the same checkpoint, or seed them alike"
            )


def _slots_within(module: nn.Module, slots: Mapping[str, ParameterSlot]) -> list[ParameterSlot]:
    """The parameters of a layer. Raises NeuzipError if a module outside the layer shares one."""
    modules = set(module.modules())
    within = [slot for slot in slots.values() if any(place[0] in modules for place in slot.places)]
    for slot in within:
        if not all(place[0] in modules for place in slot.places):
            raise NeuzipError(f"{slot.name} is shared between layers", "such models are not trained so")
    return within


def _slot_of_weight(slots: Mapping[str, ParameterSlot], module: nn.Module) -> ParameterSlot:
    return next(slot for slot in slots.values() if (module, "weight") in slot.places)


def _move(model: nn.Module, device: torch.device) -> None:
    """Move buffers, and parameters that have memory, to a device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(
                    parameter.detach().to(device), parameter.requires_grad
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
