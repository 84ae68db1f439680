"""A decoder without its layers: its own forward pass, in which functions replace the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuzip.errors import NeuzipError
from neuzip.runtime.hf.decoder import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerArguments:
    """Arguments of a layer beside the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class _Reached(Exception):
    """The first layer was reached."""


class ModelShell:
    """A decoder without its layers: embeddings, masks, rotary angles, final norm and head.

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
        """Raise NeuzipError unless layer after layer, and then the head, compute the logits of the model."""
        tuples: list[bool] = []
        hook = self.layers[0].register_forward_hook(
            lambda layer, inputs, out: tuples.append(isinstance(out, tuple))
        )
        training = self.model.training
        self.model.eval()  # type: ignore[no-untyped-call]
        try:
            ids = torch.arange(8, device=self.embedding.weight.device)[None] % self.embedding.num_embeddings
            logits = self.model(ids, use_cache=False).logits.float()
            if not tuples:
                raise NeuzipError(problem, hint)
            self._tuples = tuples[0]
            x, calls = self.begin(ids, None)
            for layer, call in zip(self.layers, calls, strict=True):
                out = layer(x, *call.arguments, **call.keywords)
                x = out[0] if isinstance(out, tuple) else out
            recomputed = F.linear(self.end(ids, None, x), self.head.weight, self.head.bias).float()
            if self.softcap is not None:
                recomputed = torch.tanh(recomputed / self.softcap) * self.softcap
        finally:
            hook.remove()
            self.model.train(training)
        if recomputed.shape != logits.shape or not torch.allclose(
            recomputed, logits, rtol=2e-2, atol=2e-2 * _largest(logits)
        ):
            raise NeuzipError(problem, hint)

    def begin(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, list[LayerArguments]]:
        """Input of the first layer, and the other arguments of each layer, from one pass without layers.

        ids, mask  int64 [B, T]
        """
        calls: dict[int, LayerArguments] = {}
        first: list[Tensor] = []

        def record(number: int, x: Tensor, call: LayerArguments) -> Tensor:
            if not first:
                first.append(x)
            calls[number] = call
            return x

        with torch.no_grad(), self._replaced(record):
            self.base(input_ids=ids, attention_mask=mask, use_cache=False)
        return first[0], [calls[number] for number in range(len(self.layers))]

    def embed(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Input of the first layer, [B, T, D], with its graph."""
        inputs: list[Tensor] = []

        def stop(number: int, x: Tensor, call: LayerArguments) -> Tensor:
            inputs.append(x)
            raise _Reached

        with self._replaced(stop):
            try:
                self.base(input_ids=ids, attention_mask=mask, use_cache=False)
            except _Reached:
                return inputs[0]
        raise AssertionError("no layer was reached")

    def end(self, ids: Tensor, mask: Tensor | None, x: Tensor) -> Tensor:
        """Input of the head, with its graph, from the output `x` of the last layer."""
        last = len(self.layers) - 1
        with self._replaced(lambda number, y, call: x if number == last else y):
            out = self.base(input_ids=ids, attention_mask=mask, use_cache=False)
        states = out[0]
        assert isinstance(states, Tensor)
        return states

    @contextmanager
    def _replaced(self, function: Callable[[int, Tensor, LayerArguments], Tensor]) -> Iterator[None]:
        """Context in which a function runs in place of every layer."""

        def forward(number: int) -> Callable[..., Any]:
            def run(*arguments: Any, **keywords: Any) -> Any:
                x = arguments[0] if arguments else keywords.pop("hidden_states")
                out = function(number, x, LayerArguments(arguments[1:], keywords))
                return (out,) if self._tuples else out

            return run

        earlier = [layer.__dict__.get("forward") for layer in self.layers]
        for number, layer in enumerate(self.layers):
            layer.forward = forward(number)
        try:
            yield
        finally:
            for layer, before in zip(self.layers, earlier, strict=True):
                del layer.forward
                if before is not None:  # a caller has replaced it too
                    layer.forward = before

    @contextmanager
    def rows(self, rows: nn.Parameter) -> Iterator[None]:
        """Context in which the embedding has only these rows, [U, D], and ids are row numbers."""
        padding = self.embedding.padding_idx
        before = self.embedding._parameters["weight"]
        self.embedding._parameters["weight"], self.embedding.padding_idx = rows, None
        try:
            yield
        finally:
            self.embedding._parameters["weight"], self.embedding.padding_idx = before, padding


def _largest(logits: Tensor) -> float:
    return float(logits.abs().amax().clamp(min=1e-3))
