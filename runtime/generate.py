"""Text from a live model, as it comes, and greedy decoding as fast as a GPU allows.

`generate` is transformers' own `generate` with a prompt, a streamer and few knobs. `GreedyDecoder` is another
loop: a static key-value cache, and every step after the prompt the same launches on the same memory, which on
a GPU are captured once in a CUDA graph and replayed. It is the same for all residencies, so that their speeds
can be compared.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer

from neuzip.errors import NeuzipError, UsageError

from . import buffers
from .kv_cache import KVCache, StaticKVLayer
from .load import load_config, load_tokenizer, quiet_transformers
from .residency import has_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OnText = Callable[[str], None]

WARM_UPS = 2
"""Steps before the capture: kernels are compiled, libraries choose theirs and allocate what they keep."""

CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new one, whose text may depend on them."""

TIE = 4
"""Roundings that two logits may be apart to be a tie: sums in another order move each by two, about."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer gives for bytes that begin a character."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model takes it: `ids` is int64 [1, tokens]. `max_new_tokens` fit behind it."""

    text: str
    ids: torch.Tensor
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int


@dataclass(frozen=True)
class Generation:
    """What a model said. `text` is the sum of what was streamed; times are from the start of the call.

    Of a cache in few bits, `cache_bytes` is what it took in the end, `attention` how it was read.
    """

    text: str
    tokens: tuple[int, ...]
    seconds: float
    first_token_seconds: float
    cache_bytes: int | None = None
    attention: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Without the first token, in whose time the prompt is read; None if there is no other."""
        more, seconds = len(self.tokens) - 1, self.seconds - self.first_token_seconds
        return more / seconds if more > 0 and seconds > 0 else None


@dataclass(frozen=True)
class Agreement:
    """Of `tokens`, how many are a model's own choice, and how many others are tied with it."""

    tokens: int
    chosen: int
    tied: int


def choose_device(option: str) -> torch.device:
    """Where a model shall run: "auto" is a GPU if torch finds one. Raises UsageError if "cuda" finds none."""
    found = torch.cuda.is_available()
    if option == "cuda" and not found:
        raise UsageError("--device cuda: torch finds no CUDA device", "use --device cpu")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if found and option != "cpu"
        else torch.device("cpu")
    )


def positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a model was made for, prompt and all; None if it does not say."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def prepare(
    path: str | os.PathLike[str], text: str, *, max_new_tokens: int = 128, chat: bool = False
) -> Prompt:
    """Tokenise a prompt for a checkpoint folder, before its weights are read.

    With `chat` the text becomes a user's message in the tokenizer's chat template. Raises UsageError for a
    prompt that is empty, too long or no Unicode, and NeuzipError where there is no tokenizer or template.
    """
    if not text:
        raise UsageError("--prompt: is empty", "give some text for the model to go on with")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"--prompt: is not Unicode at position {error.start}", "give it as UTF-8") from error
    config = load_config(path)  # first: it says what is wrong with a path
    tokenizer = load_tokenizer(path)
    if chat and not tokenizer.chat_template:
        raise NeuzipError(f"{path}: its tokenizer has no chat template", "leave out --chat")
    with quiet_transformers():
        if chat:
            encoded = _in_template(path, tokenizer, text)
        else:
            encoded = tokenizer(text, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"].to(torch.int64)
    if not ids.numel():
        raise UsageError(
            "--prompt: the tokenizer makes no token of it", "give some text for the model to go on with"
        )
    _require_known_tokens(path, config, int(ids.max()))
    _require_room(config, ids.numel(), max_new_tokens)
    return Prompt(text, ids, tokenizer, max_new_tokens)


def _in_template(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """A user's message in the chat template, as tokens. Raises NeuzipError where the template fails."""
    message = [{"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # a template is a program of the checkpoint's author, and may raise anything
        raise NeuzipError(
            f"{os.fspath(path)}: its chat template fails: {type(error).__name__}: {error}", "leave out --chat"
        ) from error


def _require_known_tokens(path: str | os.PathLike[str], config: PreTrainedConfig, largest: int) -> None:
    known = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(known, int) and largest >= known:
        raise NeuzipError(
            f"{os.fspath(path)}: the tokenizer makes token {largest}, the model knows {known}",
            "the two do not belong together",
        )


def _require_room(config: PreTrainedConfig, tokens: int, max_new_tokens: int) -> None:
    limit = positions(config)
    if limit is None or tokens + max_new_tokens <= limit:
        return
    if tokens >= limit:
        raise UsageError(
            f"--prompt: has {tokens} tokens, and the model was made for {limit} with those it adds",
            "give a shorter one",
        )
    raise UsageError(
        f"--max-new-tokens {max_new_tokens}: behind {tokens} of prompt, and the model was made for {limit}",
        f"give --max-new-tokens {limit - tokens} or fewer, or a shorter prompt",
    )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: the first of its devices if it has several."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.device


def generate(
    model: PreTrainedModel,
    prompt: Prompt,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    kv_bits: int | None = None,
    on_text: OnText = lambda text: None,
) -> Generation:
    """Go on with a prompt until the model ends its text, or for `max_new_tokens`. `on_text` is told at once.

    `kv_bits` are those that keys and values are kept in, None as they are: see `kv_cache`.

    `temperature` 0 takes the likeliest token each time. Otherwise tokens are drawn, from the likeliest that
    together have the probability `top_p`; the same `seed` draws the same ones, and nothing else is seeded.
    """
    stream = _TextStream(prompt, on_text)
    drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    device = input_device(model)
    ids = prompt.ids.to(device)
    ends = model.generation_config.eos_token_id
    padding = model.generation_config.pad_token_id
    if padding is None and ends is not None:  # or transformers says that it takes this
        padding = ends[0] if isinstance(ends, list) else ends
    cache = None if kv_bits is None else KVCache(model.config, kv_bits)
    attention = nullcontext() if cache is None else cache.attention(model)
    began = time.perf_counter()
    with quiet_transformers(), _seeded(seed, device), attention:
        whole = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.max_new_tokens,
            num_beams=1,
            pad_token_id=padding,
            streamer=stream,
            **drawn,
            **({} if cache is None else {"past_key_values": cache}),
        )
    tokens = tuple(whole[0, ids.shape[1] :].tolist())
    seconds = time.perf_counter() - began
    text, first = "".join(stream.parts), (stream.first or began + seconds) - began
    if cache is None:
        return Generation(text, tokens, seconds, first)
    cache.require_use(type(model).__name__)
    return Generation(text, tokens, seconds, first, cache.nbytes, cache.how)


@torch.no_grad()
def agreement(model: PreTrainedModel, ids: torch.Tensor, tokens: torch.Tensor) -> Agreement:
    """What a model makes of `tokens` [batch, n] that another form of it took after `ids` [batch, m].

    It reads the texts as they are, and makes its own choice for each place. A token is tied if its logit is
    at most TIE roundings to the model's dtype below that of the choice.
    """
    device = input_device(model)
    ids, tokens = ids.to(device), tokens.to(device)
    logits: torch.Tensor = model(torch.cat([ids, tokens[:, :-1]], dim=1)).logits[:, ids.shape[1] - 1 :]
    own = logits.argmax(dim=-1)
    best, found = (logits.gather(-1, t.to(logits.device)[..., None])[..., 0].float() for t in (own, tokens))
    others = own != tokens.to(own.device)
    rounding = best.abs() * torch.finfo(logits.dtype).eps / 2
    tied = others & (best - found <= TIE * rounding)
    return Agreement(tokens.numel(), int((~others).sum()), int(tied.sum()))


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(list(range(torch.cuda.device_count())) if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _TextStream(BaseStreamer):
    """Tokens to text, told in pieces: none of them changes afterwards, each ends with a whole character."""

    def __init__(self, prompt: Prompt, on_text: OnText) -> None:
        self._tokenizer, self._on_text = prompt.tokenizer, on_text
        self._ids: list[int] = prompt.ids[0, -CONTEXT:].tolist()
        self._begin, self._told = 0, len(self._ids)
        self._prompt_follows = True
        self.parts: list[str] = []
        self.first: float | None = None

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_follows:
            self._prompt_follows = False
            return
        self._ids += value.reshape(-1).tolist()
        if self.first is None:
            self.first = time.perf_counter()
        text = self._new_text()
        if text and not text.endswith(INCOMPLETE):
            self._tell(text)

    def end(self) -> None:
        if text := self._new_text():
            self._tell(text)

    def _new_text(self) -> str:
        """What the tokens not told yet add to those before."""
        return self._decoded(len(self._ids))[len(self._decoded(self._told)) :]

    def _tell(self, text: str) -> None:
        self._begin, self._told = self._told, len(self._ids)
        self.parts.append(text)
        self._on_text(text)

    def _decoded(self, stop: int) -> str:
        text = self._tokenizer.decode(
            self._ids[self._begin : stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


EXPERTS_ASKED_FOR = "its experts are computed one by one, and the host is asked each time which are needed"
"""Why a model whose experts are compressed cannot be captured."""


def has_single_experts(model: PreTrainedModel) -> bool:
    """Whether a model computes its experts one by one, each when a token needs it."""
    config = model.config.get_text_config()
    return getattr(config, "_experts_implementation", None) == "eager" and has_experts(model)


def not_graphable(model: PreTrainedModel, reason: str) -> NeuzipError:
    """What is said of a model whose steps cannot be replayed."""
    return NeuzipError(
        f"{type(model).__name__}: its steps cannot be captured in a CUDA graph: {reason}",
        "decode without one (--no-graph)",
    )


def static_cache(config: PreTrainedConfig, max_length: int) -> StaticCache:
    """A cache whose keys and values stay where they are, all layers as long as the text.

    One with a sliding window would count its tokens in Python, which a CUDA graph does not repeat. The window
    is in the mask as well, so that the result is the same.
    """
    cache = StaticCache(config=config, max_cache_len=max_length)
    cache.layers = [
        StaticLayer(max_length) if isinstance(layer, StaticSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    return cache


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of all decoders on a GPU: for each stream that decodes, `ans` has buffers of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GreedyDecoder:
    """Greedy decoding of `batch` prompts of one length, at most `max_length` tokens each with what is added.

    `graphed` says whether a step is a CUDA graph. It is one unless `graph` is False, the model lies elsewhere
    than on one GPU, or it keeps something else than keys and values. Raises NeuzipError if it cannot be one.
    With `kv_bits` keys and values are kept in as many bits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        max_length: int,
        *,
        graph: bool = True,
        kv_bits: int | None = None,
    ) -> None:
        self.model, self.batch, self.max_length = model, batch, max_length
        self.device = input_device(model)
        self._cache = (
            static_cache(model.config, max_length)
            if kv_bits is None
            else KVCache(model.config, kv_bits, max_length=max_length)
        )
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._known = frozenset(inspect.signature(model.forward).parameters)
        self._length = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = _stream_of(self.device)
            if graph and self._steps_are_alike():
                if has_single_experts(model):
                    raise not_graphable(model, EXPERTS_ASKED_FOR)
                self._capture()

    @property
    def graphed(self) -> bool:
        """Whether steps replay a CUDA graph."""
        return self._graph is not None

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
        # The graph has buffers of its own: one beside them is enough.
        with self._running(), buffers.prefetching(not self.graphed):
            self._reset()
            where = torch.arange(tokens, device=self.device)
            self._token.copy_(self._next(ids.to(self.device), where))
            self._position.fill_(tokens)
        self._length = tokens
        return self._token[:, 0]

    def step(self) -> torch.Tensor:
        """The next token of each text, [batch]: the same memory each time, so keep a clone."""
        if not 0 < self._length < self.max_length:
            raise ValueError(f"no step from {self._length} of {self.max_length} tokens")
        self._length += 1
        with self._running():
            if self._graph is not None:
                self._graph.replay()
            else:
                self._advance()
        return self._token[:, 0]

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The `new_tokens` after each prompt, [batch, new_tokens]. No token ends a text."""
        found = [self.prefill(ids).clone()]
        found += [self.step().clone() for _ in range(new_tokens - 1)]
        return torch.stack(found, dim=1)

    def _advance(self) -> None:
        """One step. All that changes from step to step lies in tensors: the graph holds nothing else."""
        self._token.copy_(self._next(self._token, self._position))
        self._position.add_(1)

    def _next(self, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """The likeliest token after `ids` [batch, n], which are at the positions `where` [n]: [batch, 1]."""
        options = {
            "position_ids": where.expand(self.batch, -1),
            "cache_position": where,  # version 4.57; a later one asks the cache
            "logits_to_keep": 1,
        }
        logits = self.model(
            input_ids=ids,
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in options.items() if name in self._known},
        ).logits
        chosen: torch.Tensor = logits[:, -1:].argmax(dim=-1)
        return chosen

    def _steps_are_alike(self) -> bool:
        places = {parameter.device for parameter in self.model.parameters()}
        return len(places) == 1 and all(
            type(layer) in (StaticLayer, StaticKVLayer) for layer in self._cache.layers
        )

    def _capture(self) -> None:
        with self._running():
            for _ in range(WARM_UPS):
                self._reset()
                self._advance()
            self._reset()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.no_grad(),
                self._cache.attention(self.model) if isinstance(self._cache, KVCache) else nullcontext(),
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, stream=self._stream),
            ):
                self._advance()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise not_graphable(self.model, str(error).strip().splitlines()[0]) from error
        self._graph = graph

    def _reset(self) -> None:
        self._cache.reset()  # type: ignore[no-untyped-call]
        self._position.zero_()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """On the stream of the graph, between what was asked for before and what is asked for next."""
        packed = self._cache.attention(self.model) if isinstance(self._cache, KVCache) else nullcontext()
        with torch.no_grad(), packed:
            if self._stream is None:
                yield
                return
            caller = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                yield
            caller.wait_stream(self._stream)
