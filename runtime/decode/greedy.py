"""Greedy decoding with a static key-value cache, each step the same launches on the same memory.

On a GPU the launches are captured once in a CUDA graph and replayed. They are the same for all residencies,
so that their speeds can be compared.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from neuzip.choices import KvForm
from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels.step import can_find
from neuzip.runtime import buffers
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.hf.experts import has_single_experts
from neuzip.runtime.hf.fused_step import FusedStep
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import StaticKVLayer
from neuzip.runtime.hf.messages import reason_of
from neuzip.runtime.hf.probes import same_bits
from neuzip.runtime.hf.static_cache import FixedLayer, TokenPositions, can_pad, static_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_UPS = 6
"""Steps before the capture: kernels are compiled, libraries choose theirs and allocate what they keep."""

FIRST_TOKEN = 3
"""The first token of those steps; the ones before it are special in many vocabularies."""


def not_fixed(model: PreTrainedModel) -> str | None:
    """Why a model is not run with a cache of fixed size, in words; None if it is.

    Windows of some are not in their masks, but in how long the cache is. transformers knows which it runs so.
    """
    if getattr(type(model), "_can_compile_fullgraph", False):
        return None
    return f"{type(model).__name__} wants a cache that grows"


SINGLE_EXPERTS = "its experts are computed one by one, and the host is asked each time which are needed"
"""Why a model of `has_single_experts` cannot be captured."""


class NotGraphable(NeuzipError):
    """A model's steps cannot be captured in a CUDA graph, for this `reason`."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        super().__init__(
            f"{type(model).__name__}: its steps cannot be captured in a CUDA graph: {reason}",
            "decode without one (`graph=False`)",
        )
        self.reason = reason


_LAUNCHING = threading.RLock()
"""Held by who launches or captures: what others put on the stream of a capture would be part of it."""


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of all decoders on a GPU: for each stream that decodes, `ans` has buffers of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _set_generator(device: torch.device, state: torch.Tensor) -> None:
    """Give torch's generator of a GPU a state of its own.

    Before torch 2.12, after a capture that failed, that which it has refuses to draw outside of a capture.
    """
    other = torch.Generator(device)
    other.set_state(state)
    torch.cuda.default_generators[device.index].graphsafe_set_state(other.graphsafe_get_state())


def not_compiled_together() -> UsageError:
    """What is said where steps are to be compiled, and keys and values kept in few bits."""
    return UsageError(
        "`compile`: steps are not compiled with keys and values in few bits",
        "leave out `compile` or `kv_bits`",
    )


def _compiled(model: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """A model's forward pass to logits, compiled with the first call, for the caller alone."""

    def logits(**options: Any) -> torch.Tensor:
        output: torch.Tensor = model(**options).logits
        return output

    # What torch compiles hangs on the code object, of which there would be one for all models: they would
    # exceed torch's limit together, and none of them would ever be freed.
    logits.__code__ = logits.__code__.replace()
    return torch.compile(logits, dynamic=False, fullgraph=True, options={"triton.cudagraphs": False})


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """The token of the largest logit of each row of [batch, words]: of equal ones the first."""
    if logits.is_cuda and can_find(logits):
        from neuzip.kernels.step.triton import step as triton_step

        return triton_step.largest(logits)  # torch has a row in one block, which takes 35 us
    return logits.argmax(dim=-1)


class GreedyDecoder:
    """Greedy decoding of `batch` prompts of one length, at most `max_length` tokens each with what is added.

    `graphed` says whether a step is a CUDA graph. It is one unless `graph` is False, the model lies elsewhere
    than on one GPU, or it keeps something else than keys and values. Raises NotGraphable if it cannot be one.
    With `later` the first prompt comes first, and `capture` captures: the first token need not wait for that.
    With `kv_bits` keys and values are kept in as many bits, in the form `kv_form`, and nothing is put off.
    Without `fuse` a graph has the kernels that the model's own code launches: see `fused_step`, and
    `static_cache` of heads that no fused attention takes.

    With `compiled` steps, not prompts, go through torch.compile, which fuses the small operations between the
    products. These leave out roundings that the model's own code makes, so that logits are not the same bits,
    and nearly tied tokens may come out otherwise; with quantised inputs of ternary layers some others, too.
    Raises NeuzipError where torch cannot compile a step, with `kv_bits`, and for models of `not_fixed`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        max_length: int,
        *,
        graph: bool = True,
        kv_bits: int | None = None,
        kv_form: KvForm = "rotated",
        compiled: bool = False,
        fuse: bool = True,
        later: bool = False,
    ) -> None:
        if compiled and kv_bits is not None:
            raise not_compiled_together()
        if kv_bits is None and (reason := not_fixed(model)) is not None:
            raise NeuzipError(
                f"{reason}: with one of fixed size its tokens would be others",
                "neuzip generate reads and writes text with it",
            )
        self.model, self.batch, self.max_length = model, batch, max_length
        self.device = input_device(model)
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._positions = TokenPositions(self._position)
        self._fuse = fuse and not compiled
        self._cache = (
            static_cache(model.config, max_length, self._positions, padded=self._fuse and can_pad(model))
            if kv_bits is None
            else KVCache(model.config, kv_bits, max_length=max_length, form=kv_form, places=self._positions)
        )
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._known = frozenset(inspect.signature(model.forward).parameters)
        self._length = 0
        self._logits = torch.empty(0)
        self._compiled: Callable[..., torch.Tensor] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_logits = self._logits
        self._memory: buffers.CaptureMemory | None = None
        self.fused = FusedStep(())
        """What is one kernel in a graph, where a model's own code has many. The bits are the same."""

        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = _stream_of(self.device)
        wants_graph = graph and self.device.type == "cuda" and self._steps_are_alike()
        if wants_graph and has_single_experts(model):
            raise NotGraphable(model, SINGLE_EXPERTS)
        if compiled:
            self._compile()
        self._waits = wants_graph and later and kv_bits is None
        if wants_graph and not self._waits:
            self._capture()

    @property
    def waits(self) -> bool:
        """Whether steps are to be captured, which `capture` does."""
        return self._waits

    @property
    def graphed(self) -> bool:
        """Whether steps replay a CUDA graph."""
        return self._graph is not None

    @property
    def compiled(self) -> bool:
        """Whether steps are compiled."""
        return self._compiled is not None

    @property
    def logits(self) -> torch.Tensor:
        """Those that the last tokens were chosen by, [batch, words]; of steps the same memory each time."""
        return self._logits

    @property
    def cache_bytes(self) -> int:
        """What keys and values take, for all of `max_length`; 0 before the first prompt."""
        if isinstance(self._cache, KVCache):
            return self._cache.nbytes
        states = [getattr(layer, name, None) for layer in self._cache.layers for name in ("keys", "values")]
        return sum(tensor.nbytes for tensor in states if isinstance(tensor, torch.Tensor))

    @property
    def attention(self) -> str | None:
        """How attention reads keys and values in few bits, in words; None if they are as they were."""
        return self._cache.how if isinstance(self._cache, KVCache) else None

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Begin anew with prompts, int64 [batch, tokens]: the token after each, [batch]."""
        batch, tokens = ids.shape
        if batch != self.batch or not 0 < tokens < self.max_length:
            raise ValueError(
                f"{batch} prompts of {tokens} tokens in a decoder of {self.batch} x {self.max_length}"
            )
        with self._running(), buffers.within(self._memory):
            self._reset()
            where = torch.arange(tokens, device=self.device)
            logits = self._read(self._eager, ids.to(self.device), where)
            self._logits = logits[:, -1].clone()  # a model may give those of the whole prompt
            self._token[:, 0].copy_(_largest(logits[:, -1]))
            self._position.fill_(tokens)
        if self._waits:
            self._require_cache()
        self._length = tokens
        return self._token[:, 0]

    def capture(self) -> None:
        """Capture steps in a CUDA graph, if that was put off until `later`. The text so far stays.

        Raises NotGraphable if they cannot be; they go on without one then.
        """
        if self._waits:
            self._waits = False
            self._capture()

    def take(self, tokens: torch.Tensor) -> None:
        """Go on with other tokens, int64 [batch], than those that were chosen last."""
        self._token[:, 0].copy_(tokens)

    def step(self) -> torch.Tensor:
        """The next token of each text, [batch]: the same memory each time, so keep a clone."""
        if not 0 < self._length < self.max_length:
            raise ValueError(f"no step from {self._length} of {self.max_length} tokens")
        self._length += 1
        with self._running():
            if self._graph is not None:
                self._graph.replay()
                self._logits = self._graph_logits
            else:
                self._logits = self._advance()
        return self._token[:, 0]

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The `new_tokens` after each prompt, [batch, new_tokens]. No token ends a text."""
        tokens = [self.prefill(ids).clone()]
        tokens += [self.step().clone() for _ in range(new_tokens - 1)]
        return torch.stack(tokens, dim=1)

    def _advance(self) -> torch.Tensor:
        """One step, and its logits [batch, words].

        All that changes from step to step lies in tensors: the graph holds nothing else.
        """
        logits = self._read(self._compiled or self._eager, self._token, self._position)
        self._token[:, 0].copy_(_largest(logits[:, -1]))
        self._position.add_(1)
        return logits[:, -1]

    def _eager(self, **options: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(**options).logits
        return logits

    def _read(
        self, forward: Callable[..., torch.Tensor], ids: torch.Tensor, where: torch.Tensor
    ) -> torch.Tensor:
        """Logits [batch, 1 to n, words] after `ids` [batch, n], which are at the positions `where` [n]."""
        self._positions.tokens = where
        self._positions.end = where[-1] + 1 if isinstance(self._cache, KVCache) else None
        options = {
            "position_ids": where.expand(self.batch, -1),
            "cache_position": where,  # version 4.57; a later one asks the cache
            "logits_to_keep": 1,
        }
        return forward(
            input_ids=ids,
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in options.items() if name in self._known},
        )

    def _steps_are_alike(self) -> bool:
        places = {parameter.device for parameter in self.model.parameters()}
        return len(places) == 1 and all(
            type(layer) in (FixedLayer, StaticKVLayer) for layer in self._cache.layers
        )

    def _compile(self) -> None:
        with self._running():
            self._reset()
            self._advance()  # as it is: layers of the cache take their memory, which is not to be compiled
            self._reset()
        self._compiled = _compiled(self.model)
        try:
            with self._running(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice on torch; the model's own came with the step before
                self._advance()
                self._reset()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # of dynamo, of inductor, of a C++ compiler: they share no class
            raise NeuzipError(
                f"{type(self.model).__name__}: torch.compile does not compile its steps: {reason_of(error)}",
                "decode without it (leave out `compile`)",
            ) from error

    def _capture(self) -> None:
        with _LAUNCHING:  # to make way would take the memory of a capture beside it
            self._capture_alone()

    def _capture_alone(self) -> None:
        self.fused = fused = self._fused_step()
        self._require_cache()
        torch.cuda.synchronize(self.device)
        buffers.make_way(self.device)
        graph, drawn = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state(self.device)
        try:
            with (
                torch.no_grad(),
                self._attention(),
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),  # that a failure leaves the other
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
                fused.in_place(),
            ):
                self._graph_logits = self._advance()
                self._memory = buffers.memory_of_capture(self.device)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _set_generator(self.device, drawn)
            raise NotGraphable(self.model, reason_of(error)) from error
        finally:
            buffers.make_way(self.device)  # of a capture that failed
        self._graph = graph

    def _require_cache(self) -> None:
        """Raise NotGraphable for a model that has run without keeping anything in the cache."""
        if not any(getattr(layer, "is_initialized", False) for layer in self._cache.layers):
            raise NotGraphable(self.model, "it keeps nothing in the cache that it is given")

    def _fused_step(self) -> FusedStep:
        """What is captured in place of a model's small operations. The bits of a step are the same.

        A model that cannot do with it, such as one that turns its masks round, is left as it is.
        """
        with self._running():
            token = self._token.clone()
            fused = FusedStep(self.model.modules() if self._fuse else ())
            expected = self._step_with(fused.recording())
            try:
                fused.choose()
                logits = self._step_with(fused.in_place())
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # of the model's own code, of Triton's compiler, of a driver
                warnings.warn(f"steps are not fused: {reason_of(error)}", RuntimeWarning, stacklevel=2)
                self._return_to(token)
                return FusedStep(())
            return fused if same_bits(expected, logits) else FusedStep(())

    def _step_with(self, last: AbstractContextManager[object]) -> torch.Tensor:
        """The logits of a step behind some others, of made-up tokens, with `last` only in the last one.

        Of other tokens each: attention to tokens that are all alike gives the same whatever it does. They
        follow the text so far, to which the decoder returns.
        """
        token = self._token.clone()
        self._return_to(token)
        steps = min(WARM_UPS, self.max_length - self._length)
        embeddings: Any = self.model.get_input_embeddings()
        words = len(embeddings.weight)
        for number in range(steps):
            self._token.fill_((FIRST_TOKEN + number) % words)
            with last if number == steps - 1 else nullcontext():
                logits = self._advance().clone()
        self._return_to(token)
        return logits

    def _return_to(self, token: torch.Tensor) -> None:
        """Forget all behind the text so far, which goes on with `token` [batch, 1]."""
        if not self._length:
            self._reset()
            return
        for layer in self._cache.layers:
            states = [getattr(layer, name, None) for name in ("keys", "values")]
            for memory in (one for one in states if isinstance(one, torch.Tensor)):
                memory[:, :, self._length :].zero_()
        self._position.fill_(self._length)
        self._token.copy_(token)

    def _reset(self) -> None:
        self._cache.reset()
        self._position.zero_()
        self._token.zero_()

    def _attention(self) -> AbstractContextManager[None]:
        """Within which a model attends to what is in the cache."""
        cache = self._cache
        return cache.attention(self.model) if isinstance(cache, KVCache) else cache.attention()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """On the stream of the graph, between what was asked for before and what is asked for next."""
        with _LAUNCHING, torch.no_grad(), self._attention():
            if self._stream is None:
                yield
                return
            caller = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                yield
            caller.wait_stream(self._stream)
