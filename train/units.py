"""A decoder taken apart: its layers, its tables of tokens, and the shell around them.

    shell    | the model's own forward pass, its layers hollow: embeddings, masks, rotary angles; final norm
    layers   | each with its matrices in one array, held plain or compressed, and opened when it is needed
    tables   | embedding and head, in chunks of rows

Between uses a layer's matrices are parameters without memory (device meta), of the right shape and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuzip.errors import NeuzipError
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.train.compressed_array import StoredArray, aligned_bytes

from .states import StatePieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALIGN = 128
"""Weights begin at multiples of so many elements of their array: products are as fast as from memory of their
own."""

ROWS = 256
"""Chunks of a table have a multiple of so many rows: whole blocks of an optimizer's states."""

Place = tuple[nn.Module, str]
Code = Callable[[Tensor], StoredArray]


@dataclass(eq=False)
class ParameterSlot:
    """A parameter: its name, its number among all, where modules have it, and where it lies in its array."""

    name: str
    number: int
    places: list[Place]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    start: int = 0
    states: StatePieces = field(default_factory=list)
    hollow: nn.Parameter | None = None
    """A parameter without memory, once there is one."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    @property
    def decays(self) -> bool:
        """Whether weight decay is for it: matrices, not norms and biases."""
        return len(self.shape) >= 2

    def put(self, parameter: nn.Parameter) -> None:
        """Make modules use it."""
        for module, name in self.places:
            module._parameters[name] = parameter

    def empty(self) -> None:
        """Make modules use a parameter without memory."""
        if self.hollow is None:
            nothing = torch.empty(self.shape, dtype=self.dtype, device="meta")
            self.hollow = nn.Parameter(nothing, self.trainable)
        self.put(self.hollow)

    @property
    def parameter(self) -> nn.Parameter:
        """What modules use now."""
        module, name = self.places[0]
        found = module._parameters[name]
        assert isinstance(found, nn.Parameter)
        return found


def slots_of(model: nn.Module) -> dict[str, ParameterSlot]:
    """All parameters by name, those that are tied once."""
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
    """A decoder layer whose matrices lie in one array a dtype; `plain` are its norms and biases."""

    def __init__(
        self, module: nn.Module, slots: Sequence[ParameterSlot], code: Code, device: torch.device
    ) -> None:
        self.module = module
        self.coded = [slot for slot in slots if len(slot.shape) >= 2]
        self.plain = [slot for slot in slots if len(slot.shape) < 2]
        self.arrays: list[tuple[list[ParameterSlot], StoredArray]] = []
        self._parameters: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for dtype in dict.fromkeys(slot.dtype for slot in self.coded):
            own = [slot for slot in self.coded if slot.dtype == dtype]
            end = 0
            for slot in own:
                slot.start = end
                end = -(-(end + slot.numel) // ALIGN) * ALIGN
            flat = torch.zeros(end, dtype=dtype, device=device)
            for slot in own:
                flat[slot.start : slot.start + slot.numel] = slot.parameter.detach().reshape(-1).to(device)
                slot.empty()
            self.arrays.append((own, code(flat)))

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices take while it is closed."""
        return sum(held.nbytes for _, held in self.arrays)

    @property
    def room(self) -> int:
        """Bytes of a buffer in which it can be opened."""
        return sum(aligned_bytes(held.numel * held.dtype.itemsize) for _, held in self.arrays)

    @property
    def trained(self) -> list[ParameterSlot]:
        """Parameters that have gradients, matrices first."""
        return [slot for slot in (*self.coded, *self.plain) if slot.trainable]

    def decode(self, buffer: Tensor) -> list[Tensor]:
        """Its arrays, dense, in `buffer` or where they always are."""
        flats, at = [], 0
        for _, held in self.arrays:
            flats.append(held.open(buffer[at:]))
            at += aligned_bytes(held.numel * held.dtype.itemsize)
        return flats

    def code(self, flats: list[Tensor]) -> None:
        """Keep what the arrays have become."""
        for (_, held), flat in zip(self.arrays, flats, strict=True):
            held.close(flat)

    @contextmanager
    def placed(self, flats: list[Tensor]) -> Iterator[None]:
        """With the arrays as its weights. Parameters at a place are made once, and hold its memory until
        `forget`."""
        place = tuple(flat.data_ptr() for flat in flats)
        parameters = self._parameters.get(place) or self._made_of(flats)
        if not torch.is_inference_mode_enabled():  # those that are made there cannot be trained
            self._parameters[place] = parameters
        for slot, parameter in zip(self._slots(), parameters, strict=True):
            slot.put(parameter)
        try:
            yield
        finally:
            for slot in self.coded:
                slot.empty()

    def forget(self) -> None:
        """Drop the parameters of all places."""
        self._parameters.clear()

    def _slots(self) -> Iterator[ParameterSlot]:
        """`coded`, as they lie in the arrays."""
        return (slot for slots, _ in self.arrays for slot in slots)

    def _made_of(self, flats: list[Tensor]) -> list[nn.Parameter]:
        made = []
        for (slots, _), flat in zip(self.arrays, flats, strict=True):
            for slot in slots:
                view = flat[slot.start : slot.start + slot.numel].view(slot.shape)
                made.append(nn.Parameter(view, requires_grad=slot.trainable))
        return made

    def __call__(self, x: Tensor, call: LayerArguments) -> Tensor:
        """The hidden states that it makes of hidden states."""
        out = self.module(x, *call.arguments, **call.keywords)
        found = out[0] if isinstance(out, tuple) else out
        assert isinstance(found, Tensor)
        return found


class TokenTable:
    """A matrix with a row a token, held in chunks of rows."""

    def __init__(self, slot: ParameterSlot, rows: int, code: Code, device: torch.device) -> None:
        self.slot, self.columns = slot, math.prod(slot.shape[1:])
        total = slot.shape[0]
        weight = slot.parameter.detach()
        self.chunks = [
            (
                slice(start, min(start + rows, total)),
                code(weight[start : start + rows].reshape(-1).to(device)),
            )
            for start in range(0, total, rows)
        ]
        self.states: list[StatePieces] = [[] for _ in self.chunks]
        slot.empty()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes between uses."""
        return sum(held.nbytes for _, held in self.chunks)

    @property
    def room(self) -> int:
        """Bytes of a buffer in which a chunk can be opened."""
        return max(aligned_bytes(held.numel * held.dtype.itemsize) for _, held in self.chunks)

    def open(self, number: int, buffer: Tensor) -> Tensor:
        """The rows of a chunk, [rows, columns]."""
        return self.chunks[number][1].open(buffer).view(-1, self.columns)

    def close(self, number: int, rows: Tensor) -> None:
        """Keep what the rows of a chunk have become."""
        self.chunks[number][1].close(rows.view(-1))

    def look_up(self, ids: Tensor, buffer: Tensor) -> Tensor:
        """Rows of `ids` [n], [n, columns], in memory of their own."""
        found = torch.empty(ids.numel(), self.columns, dtype=self.slot.dtype, device=ids.device)
        for number, (rows, _) in enumerate(self.chunks):
            at, own = rows_inside(ids, rows)
            found[at] = self.open(number, buffer)[own]
        return found


def rows_inside(ids: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Which of `ids` [n] are among some rows, as positions, and their places from the first row on."""
    at = torch.nonzero((ids >= rows.start) & (ids < rows.stop)).flatten()
    return at, ids[at] - rows.start


def rows_of_chunk(shape: Sequence[int], itemsize: int, nbytes: int) -> int:
    """Rows of a table that make chunks of about so many bytes, as equal as multiples of ROWS are."""
    size = math.prod(shape[1:]) * itemsize
    chunks = max(1, round(shape[0] * size / nbytes))
    return -(-shape[0] // (chunks * ROWS)) * ROWS


@dataclass(frozen=True)
class LayerArguments:
    """What a layer is given beside hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class _Reached(Exception):
    """The first layer was reached."""


class ModelShell:
    """A decoder without its layers, run by its own forward pass.

    Raises NeuzipError for a model that is not one of layers in a row with a linear head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.base = model, model.base_model
        self.layers = list(decoder_layers(model))
        self.head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        name = type(model).__name__
        if not self.layers:
            raise NeuzipError(f"{name}: has no layers", "give it one and more")
        hint = "models such as Llama, Qwen, Mistral and GPT-NeoX can be trained so"
        embedding = model.get_input_embeddings()
        if not isinstance(embedding, nn.Embedding):
            raise NeuzipError(f"{name}: its token embedding is no table", hint)
        self.embedding: nn.Embedding = embedding
        if not isinstance(self.head, nn.Linear) or self.base is model:
            raise NeuzipError(f"{name}: has no linear head over a base model", hint)
        self.softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._tuples = False
        self._probe(f"{name}: its layers and head do not follow each other in the usual way", hint)

    @torch.no_grad()
    def _probe(self, problem: str, hint: str) -> None:
        """See whether layer after layer, and the head after that, give the model's own logits."""
        told: list[bool] = []
        hook = self.layers[0].register_forward_hook(lambda *given: told.append(isinstance(given[2], tuple)))
        training = self.model.training
        self.model.eval()  # type: ignore[no-untyped-call]
        try:
            ids = torch.arange(8, device=self.embedding.weight.device)[None] % self.embedding.num_embeddings
            logits = self.model(ids, use_cache=False).logits.float()
            if not told:
                raise NeuzipError(problem, hint)
            self._tuples = told[0]
            x, calls = self.begin(ids, None)
            for layer, call in zip(self.layers, calls, strict=True):
                out = layer(x, *call.arguments, **call.keywords)
                x = out[0] if isinstance(out, tuple) else out
            own = F.linear(self.end(ids, None, x), self.head.weight, self.head.bias).float()
            if self.softcap is not None:
                own = torch.tanh(own / self.softcap) * self.softcap
        finally:
            hook.remove()
            self.model.train(training)
        if own.shape != logits.shape or not torch.allclose(own, logits, rtol=2e-2, atol=2e-2 * _size(logits)):
            raise NeuzipError(problem, hint)

    def begin(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, list[LayerArguments]]:
        """What the first layer is given, and what each is given beside: from one pass without layers."""
        calls: dict[int, LayerArguments] = {}
        first: list[Tensor] = []

        def note(number: int, x: Tensor, call: LayerArguments) -> Tensor:
            if not first:
                first.append(x)
            calls[number] = call
            return x

        with torch.no_grad(), self._hollow(note):
            self.base(input_ids=ids, attention_mask=mask, use_cache=False)
        return first[0], [calls[number] for number in range(len(self.layers))]

    def embed(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """What the first layer is given, with its graph."""
        found: list[Tensor] = []

        def stop(number: int, x: Tensor, call: LayerArguments) -> Tensor:
            found.append(x)
            raise _Reached

        with self._hollow(stop):
            try:
                self.base(input_ids=ids, attention_mask=mask, use_cache=False)
            except _Reached:
                return found[0]
        raise AssertionError("no layer was reached")

    def end(self, ids: Tensor, mask: Tensor | None, x: Tensor) -> Tensor:
        """What the head is given, from what the last layer gives; with its graph."""
        last = len(self.layers) - 1
        with self._hollow(lambda number, y, call: x if number == last else y):
            out = self.base(input_ids=ids, attention_mask=mask, use_cache=False)
        found = out[0]
        assert isinstance(found, Tensor)
        return found

    @contextmanager
    def _hollow(self, stand_in: Callable[[int, Tensor, LayerArguments], Tensor]) -> Iterator[None]:
        """With a function in place of all layers."""

        def forward(number: int) -> Callable[..., Any]:
            def run(*arguments: Any, **keywords: Any) -> Any:
                x = arguments[0] if arguments else keywords.pop("hidden_states")
                found = stand_in(number, x, LayerArguments(arguments[1:], keywords))
                return (found,) if self._tuples else found

            return run

        own = [layer.__dict__.get("forward") for layer in self.layers]
        for number, layer in enumerate(self.layers):
            layer.forward = forward(number)
        try:
            yield
        finally:
            for layer, before in zip(self.layers, own, strict=True):
                del layer.forward
                if before is not None:  # somebody has put one there
                    layer.forward = before

    @contextmanager
    def rows(self, rows: nn.Parameter) -> Iterator[None]:
        """With an embedding of the tokens of a batch alone, which ids then number."""
        padding = self.embedding.padding_idx
        before = self.embedding._parameters["weight"]
        self.embedding._parameters["weight"], self.embedding.padding_idx = rows, None
        try:
            yield
        finally:
            self.embedding._parameters["weight"], self.embedding.padding_idx = before, padding


def _size(logits: Tensor) -> float:
    return float(logits.abs().amax().clamp(min=1e-3))
