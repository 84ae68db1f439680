"""Text from a live model, as it comes, and decoding as fast as a GPU allows.

`GreedyDecoder` has a static key-value cache, and every step after the prompt is the same launches on the same
memory, which on a GPU are captured once in a CUDA graph and replayed. It is the same for all residencies, so
that their speeds can be compared. `generate` takes it on one GPU, and transformers' own `generate` elsewhere
and for what cannot be captured; both with a prompt, a streamer and few knobs.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from transformers import GenerationMixin, StoppingCriteria, StoppingCriteriaList

from neuzip.compress.device import AnyDevice, named
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.safetensors_file import parse_json
from neuzip.kernels.step import can_find
from neuzip.runtime import buffers
from neuzip.runtime.decode.sampling import Sampling, draw
from neuzip.runtime.decode.text_stream import OnText, TextStream
from neuzip.runtime.hf.fused_step import FusedStep, same_bits
from neuzip.runtime.hf.kv_cache import KVCache, StaticKVLayer
from neuzip.runtime.hf.load import (
    GENERATION_CONFIG,
    MOVE_AWAY,
    load_config,
    load_tokenizer,
    naming_tokenizer,
    quiet_transformers,
    reason_of,
)
from neuzip.runtime.hf.residency import has_experts
from neuzip.runtime.hf.static_cache import FixedLayer, Places, can_pad, static_cache
from neuzip.runtime.read import require_place

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

Loop = Literal["auto", "static", "transformers"]
Finish = Literal["stop", "length"]

WARM_UPS = 6
"""Steps before the capture: kernels are compiled, libraries choose theirs and allocate what they keep."""

FIRST_TOKEN = 3
"""Of those steps; the ones before it are special in many vocabularies."""

TIE = 4
"""Roundings that two logits may be apart to be a tie: sums in another order move each by two, about."""

SETTLED = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "num_beams",
    "early_stopping", "length_penalty", "eos_token_id", "pad_token_id", "bos_token_id",
    "decoder_start_token_id", "cache_implementation", "cache_config", "compile_config",
    "disable_compile", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "max_matching_ngram_size", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "transformers_version", "_from_model_config",
}  # fmt: skip
"""Of a generation config what `generate` says itself, and what changes no token of one text without beams."""

NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("num_return_sequences", "num_beam_groups", "use_cache"), 1),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id")),
}
"""Values of others that ask for nothing, where that is neither 0 nor False."""

NUMBERS = (
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_beam_groups",
    "num_return_sequences", "top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "temperature",
    "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "length_penalty", "diversity_penalty", "guidance_scale", "max_time",
    "penalty_alpha", "prompt_lookup_num_tokens",
)  # fmt: skip
"""Fields of a generation config that are numbers."""

TOKENS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id",
)  # fmt: skip
"""Fields of a generation config that are a token, or a list of tokens."""

OWN_WAYS = ("generate", "_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods of transformers' loop: a model that has its own is given that loop."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model takes it: `ids` is int64 [1, tokens]. `max_new_tokens` fit behind it."""

    text: str
    ids: torch.Tensor
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int


@dataclass(frozen=True)
class Generation:
    """The text that a model generated, and how. `text` equals all pieces given to `on_text` together.

    `tokens` are all new tokens, including those of a stop string. `seconds` and `first_token_seconds` count
    from the start of the call. `finish_reason` is "length" if the limit of new tokens ended the text, else
    "stop". For a quantised KV cache, `cache_bytes` is its final size, and `attention` says how attention read
    it. `graphed` says whether steps ran as a CUDA graph; if not, `not_graphed` says why.
    """

    text: str
    tokens: tuple[int, ...]
    seconds: float
    first_token_seconds: float
    finish_reason: Finish = "stop"
    cache_bytes: int | None = None
    attention: str | None = None
    graphed: bool = False
    not_graphed: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, so without the prompt. None if the text has only one token."""
        more, seconds = len(self.tokens) - 1, self.seconds - self.first_token_seconds
        return more / seconds if more > 0 and seconds > 0 else None


@dataclass(frozen=True)
class Agreement:
    """Of `tokens`, how many are a model's own choice, and how many others are tied with it."""

    tokens: int
    chosen: int
    tied: int


def choose_device(device: AnyDevice) -> torch.device:
    """Where a model shall run: "auto" is a GPU if torch finds one. Raises UsageError for one that is not."""
    option, found = named(device), torch.cuda.is_available()
    if option == "cpu" or (option == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise UsageError(f"`device={option!r}`: torch finds no CUDA device", "use `device='cpu'`")
    from neuzip.kernels.device.release import require_triton

    require_triton()
    from neuzip.kernels.device.triton_cache import make_optional

    make_optional()
    if option.startswith("cuda:"):
        place = torch.device(option)
        require_place(place)
        return place
    return torch.device("cuda", torch.cuda.current_device())


def positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a model was made for, prompt and all; None if it does not say."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def prepare(
    path: str | os.PathLike[str],
    text: str,
    *,
    max_new_tokens: int = 128,
    chat: bool = False,
    system: str | None = None,
) -> Prompt:
    """Tokenise a prompt for a checkpoint folder, before its weights are read.

    With `chat` the text becomes a user's message in the tokenizer's chat template. A `system` prompt comes
    first there, and implies `chat`. Raises UsageError for a prompt that is empty, too long or no Unicode,
    NeuzipError where there is no tokenizer or template, and FormatError for a generation_config.json with
    something else than numbers where numbers belong.
    """
    if not text:
        raise UsageError("`prompt`: is empty", "give some text to continue")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"`prompt`: is not Unicode at position {error.start}", "give it as UTF-8") from error
    chat = chat or system is not None
    config = load_config(path)  # first: it says what is wrong with a path
    tokenizer = load_tokenizer(path)
    _require_numbers(Path(path) / GENERATION_CONFIG)
    if chat and not tokenizer.chat_template:
        raise NeuzipError(f"{path}: its tokenizer has no chat template", "leave out `chat` and `system`")
    with quiet_transformers():
        if chat:
            encoded = _in_template(path, tokenizer, text, system)
        else:
            with naming_tokenizer(tokenizer):
                encoded = tokenizer(text, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"].to(torch.int64)
    if not ids.numel():
        raise UsageError("`prompt`: the tokenizer makes no token of it", "give some text to continue")
    _require_known_tokens(path, config, int(ids.max()))
    _require_room(config, ids.numel(), max_new_tokens)
    return Prompt(text, ids, tokenizer, max_new_tokens)


def _in_template(
    path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, text: str, system: str | None
) -> Any:
    """The tokens of a user's message in the chat template. Raises NeuzipError where the template fails."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # a template is a program of the checkpoint's author, and may raise anything
        raise NeuzipError(
            f"{os.fspath(path)}: its chat template fails: {type(error).__name__}: {error}",
            "leave out `chat`" if system is None else "leave out `system`: not every template takes one",
        ) from error


def _require_numbers(path: Path) -> None:
    """Raise FormatError for a generation_config.json that transformers reads and then stumbles over."""
    if not path.is_file():
        return
    found = parse_json(path.read_bytes(), path)
    if not isinstance(found, dict):
        raise FormatError(path, "not an object", hint=MOVE_AWAY)
    for name in (*NUMBERS, *TOKENS):
        value = found.get(name)
        values = value if name in TOKENS and isinstance(value, list) else [value]
        kinds = (int,) if name in TOKENS else (int, float)
        fits = bool(values) and all(type(one) in kinds for one in values)  # true is an int to isinstance
        if value is not None and not fits:
            what = "no token" if name in TOKENS else "no number"
            raise FormatError(path, f"{json.dumps(value)} is {what}", field=name, hint=MOVE_AWAY)


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
            f"`prompt`: has {tokens} tokens, and the model was made for {limit} with those it adds",
            "give a shorter one",
        )
    raise UsageError(
        f"`max_new_tokens={max_new_tokens}`: behind {tokens} of prompt, and the model was made for {limit}",
        f"give `max_new_tokens={limit - tokens}` or fewer, or a shorter prompt",
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
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    kv_bits: int | None = None,
    on_text: OnText = lambda text: None,
    loop: Loop = "auto",
) -> Generation:
    """Generate text after a prompt, at most `max_new_tokens` tokens. `on_text` is given each piece at once.

    The text ends where the model ends it, or before the first of the strings `stop`.

    `sampling` says how tokens are chosen: greedily without it. The same `seed` draws the same tokens, and no
    other random number generator is seeded. `kv_bits` are the bits of the KV cache, None for the model's own.

    `loop` "transformers" is that of transformers, "static" a `GreedyDecoder`, on a GPU with its steps in a
    CUDA graph, and with memory for all tokens from the start. "auto" is the latter on one GPU, but for models
    that cannot be captured or whose generation config asks for more: `not_static`. On a CPU "auto" is the
    former. Both choose alike, but add in another order: nearly tied tokens may come out otherwise.

    Raises NeuzipError for "static" where `not_static` gives a reason or a GPU cannot capture, and for both if
    memory for the KV cache runs out; UsageError for an empty string in `stop`.
    """
    sampling = Sampling() if sampling is None else sampling
    stream = TextStream(prompt.tokenizer, prompt.ids, on_text, stop)
    began = time.perf_counter()
    with quiet_transformers(), naming_tokenizer(prompt.tokenizer):
        decoder, reason = _decoder(model, prompt, kv_bits, loop)
        with _seeded(seed, input_device(model)):
            if decoder is not None:
                tokens = _decode(decoder, prompt, sampling, stream)
                kept = None if kv_bits is None else (decoder.cache_bytes, decoder.attention)
            else:
                tokens, kept = _by_transformers(model, prompt, sampling, kv_bits, stream)
    seconds = time.perf_counter() - began
    finish: Finish
    text, first = "".join(stream.parts), (stream.first or began + seconds) - began
    cache_bytes, attention = kept or (None, None)
    graphed = decoder is not None and decoder.graphed
    if stream.stopped_after is not None:
        tokens, finish = tokens[: stream.stopped_after], "stop"
    else:
        finish = _finish(tokens, prompt, model.generation_config)
    return Generation(text, tuple(tokens), seconds, first, finish, cache_bytes, attention, graphed, reason)


def _finish(tokens: Sequence[int], prompt: Prompt, config: GenerationConfig) -> Finish:
    """Whether the model ended its text itself."""
    return "stop" if len(tokens) < prompt.max_new_tokens or tokens[-1] in _ends(config) else "length"


def not_static(model: PreTrainedModel) -> str | None:
    """Why only transformers' loop gives a model's text, in words; None if `GreedyDecoder` does, too."""
    name = type(model).__name__
    for method in OWN_WAYS:
        if getattr(type(model), method, None) is not getattr(GenerationMixin, method):
            return f"{name} has a {method} of its own"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no cache of keys and values"
    if (reason := not_fixed(model)) is not None:
        return reason
    asked = _asked_for(model.generation_config)
    return None if asked is None else f"the generation config asks for {asked}"


def not_fixed(model: PreTrainedModel) -> str | None:
    """Why a model is not run with a cache of fixed size, in words; None if it is.

    Windows of some are not in their masks, but in how long the cache is. transformers knows which it runs so.
    """
    if getattr(type(model), "_can_compile_fullgraph", False):
        return None
    return f"{type(model).__name__} wants a cache that grows"


def _asked_for(config: GenerationConfig) -> str | None:
    """The first thing that a generation config wants of transformers' loop."""
    for name, value in config.to_dict().items():
        if name not in SETTLED and value not in (None, [], {}, NEUTRAL.get(name, 0)):
            return name
    return None


def _decoder(
    model: PreTrainedModel, prompt: Prompt, kv_bits: int | None, loop: Loop
) -> tuple[GreedyDecoder | None, str | None]:
    """The decoder of a prompt, None for transformers' loop; and why its steps are no graph."""
    if loop not in get_args(Loop):
        raise UsageError(
            f"loop={loop!r}: there is no such loop", f"what there is: {', '.join(get_args(Loop))}"
        )
    if loop == "transformers":
        return None, "transformers' loop was asked for"
    if loop == "auto" and input_device(model).type != "cuda":
        return None, "it is not on a GPU"
    reason = not_static(model)
    if reason is not None and loop == "static":
        raise NeuzipError(f"the static loop: {reason}", 'leave out loop="static"')
    if reason is not None:
        return None, reason
    room = prompt.ids.shape[1] + prompt.max_new_tokens
    try:
        decoder = GreedyDecoder(model, 1, room, kv_bits=kv_bits)
    except NotGraphable as error:
        if loop == "static":
            raise
        return None, error.reason
    except torch.cuda.OutOfMemoryError as error:
        raise NeuzipError(
            f"{type(model).__name__}: no memory for keys and values of {room:,} tokens at once",
            "give a smaller `max_new_tokens`, or `graph=False`, which takes memory as the text grows",
        ) from error
    if decoder.graphed:
        return decoder, None
    reason = "it is not on one GPU alone, or keeps something else than keys and values"
    return (decoder if loop == "static" else None), reason


def _decode(decoder: GreedyDecoder, prompt: Prompt, sampling: Sampling, stream: TextStream) -> list[int]:
    """The new tokens, told as they come.

    A step is launched before the token it goes on with is read, so that a GPU does not wait for the host: one
    step is in vain where a text ends early.
    """
    ends, warpers = _ends(decoder.model.generation_config), sampling.warpers()
    tokens: list[int] = []
    stream.put(prompt.ids)
    chosen = decoder.prefill(prompt.ids)
    for left in reversed(range(prompt.max_new_tokens)):
        if warpers is not None:
            chosen = draw(decoder.logits, warpers)
            decoder.take(chosen)
        arriving = _Arriving(chosen)
        if left:
            chosen = decoder.step()
        tokens.append(arriving.token())
        stream.put(torch.tensor(tokens[-1:]))
        if tokens[-1] in ends or stream.stopped_after is not None:
            break
    stream.end()
    return tokens


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """The token of the largest logit of each row of [batch, words]: of equal ones the first."""
    if logits.is_cuda and can_find(logits):
        from neuzip.kernels.step.triton import step as triton_step

        return triton_step.largest(logits)  # torch has a row in one block, which takes 35 us
    return logits.argmax(dim=-1)


class _Arriving:
    """A token [1] on its way to the host, as it is now: its memory may be written to by what comes next."""

    def __init__(self, token: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if token.is_cuda else None  # type: ignore[no-untyped-call]
        self._token = token.to("cpu", non_blocking=True, copy=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(token.device))

    def token(self) -> int:
        """Wait for it, and for nothing that was launched later."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._token)


def _ends(config: GenerationConfig) -> Container[int]:
    """The tokens that end a text."""
    ends: Any = config.eos_token_id
    if ends is None:
        return ()
    return ends if isinstance(ends, list) else (ends,)


def _by_transformers(
    model: PreTrainedModel,
    prompt: Prompt,
    sampling: Sampling,
    kv_bits: int | None,
    stream: TextStream,
) -> tuple[list[int], tuple[int, str] | None]:
    """The new tokens, told as they come; of a cache in few bits its bytes, and how it was read."""
    ids = prompt.ids.to(input_device(model))
    ends = model.generation_config.eos_token_id
    padding = model.generation_config.pad_token_id
    if padding is None and ends not in (None, []):  # or transformers says that it takes this
        padding = ends[0] if isinstance(ends, list) else ends
    cache = None if kv_bits is None else KVCache(model.config, kv_bits)
    stops = getattr(model.generation_config, "stop_strings", None)
    with nullcontext() if cache is None else cache.attention(model), _naming_what_is_asked(model):
        whole = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.max_new_tokens,
            num_beams=1,
            pad_token_id=padding,
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([_StreamStopped(stream)]),
            **sampling.options(),
            **({} if cache is None else {"past_key_values": cache}),
            **({"tokenizer": prompt.tokenizer} if stops else {}),
        )
    tokens: list[int] = whole[0, ids.shape[1] :].tolist()
    if cache is None:
        return tokens, None
    cache.require_use(type(model).__name__)
    return tokens, (cache.nbytes, cache.how)


class _StreamStopped(StoppingCriteria):
    """Ends transformers' loop when a stop string has ended the text.

    transformers 5 gives a streamer each token one step late, so that the loop makes one token too many.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
        stopped = self._stream.stopped_after is not None
        return torch.full((len(input_ids),), stopped, device=input_ids.device)


@contextmanager
def _naming_what_is_asked(model: PreTrainedModel) -> Iterator[None]:
    """Raise FormatError where transformers fails at what a generation config asks for and few do."""
    try:
        yield
    except (ImportError, TypeError, ValueError) as error:
        config = model.generation_config
        asked = [name for name in (_asked_for(config), "cache_implementation") if name]
        values = {name: value for name in asked if (value := getattr(config, name, None)) is not None}
        if not values:
            raise
        said = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        raise FormatError(
            Path(model.config.name_or_path or "") / GENERATION_CONFIG,
            f"transformers cannot do what it asks for, {said}: {reason_of(error)}",
            hint="take that out of the file",
        ) from error


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


EXPERTS_ASKED_FOR = "its experts are computed one by one, and the host is asked each time which are needed"
"""Why a model whose experts are compressed cannot be captured."""


def has_single_experts(model: PreTrainedModel) -> bool:
    """Whether a model computes its experts one by one, each when a token needs it."""
    config = model.config.get_text_config()
    return getattr(config, "_experts_implementation", None) == "eager" and has_experts(model)


class NotGraphable(NeuzipError):
    """A model's steps cannot be captured in a CUDA graph, for this `reason`."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        super().__init__(
            f"{type(model).__name__}: its steps cannot be captured in a CUDA graph: {reason}",
            "decode without one (`graph=False`)",
        )
        self.reason = reason


_TURNS = threading.RLock()
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
        found: torch.Tensor = model(**options).logits
        return found

    # What torch compiles hangs on the code object, of which there would be one for all models: they would
    # exceed torch's limit together, and none of them would ever be freed.
    logits.__code__ = logits.__code__.replace()
    return torch.compile(logits, dynamic=False, fullgraph=True, options={"triton.cudagraphs": False})


class GreedyDecoder:
    """Greedy decoding of `batch` prompts of one length, at most `max_length` tokens each with what is added.

    `graphed` says whether a step is a CUDA graph. It is one unless `graph` is False, the model lies elsewhere
    than on one GPU, or it keeps something else than keys and values. Raises NotGraphable if it cannot be one.
    With `kv_bits` keys and values are kept in as many bits. Without `fuse` a graph has the kernels that the
    model's own code launches: see `fused_step`, and `static_cache` of heads that no fused attention takes.

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
        compiled: bool = False,
        fuse: bool = True,
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
        self._places = Places(self._position)
        self._fuse = fuse and not compiled
        self._cache = (
            static_cache(model.config, max_length, self._places, padded=self._fuse and can_pad(model))
            if kv_bits is None
            else KVCache(model.config, kv_bits, max_length=max_length, places=self._places)
        )
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._known = frozenset(inspect.signature(model.forward).parameters)
        self._length = 0
        self._logits = torch.empty(0)
        self._compiled: Callable[..., torch.Tensor] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_logits = self._logits
        self._room: buffers.Room | None = None
        self.fused = FusedStep(())
        """What is one kernel in a graph, where a model's own code has many. The bits are the same."""

        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = _stream_of(self.device)
        wants_graph = graph and self.device.type == "cuda" and self._steps_are_alike()
        if wants_graph and has_single_experts(model):
            raise NotGraphable(model, EXPERTS_ASKED_FOR)
        if compiled:
            self._compile()
        if wants_graph:
            self._capture()

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
        with self._running(), buffers.within(self._room):
            self._reset()
            where = torch.arange(tokens, device=self.device)
            logits = self._read(self._eager, ids.to(self.device), where)
            self._logits = logits[:, -1].clone()  # a model may give those of the whole prompt
            self._token[:, 0].copy_(_largest(logits[:, -1]))
            self._position.fill_(tokens)
        self._length = tokens
        return self._token[:, 0]

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
        found = [self.prefill(ids).clone()]
        found += [self.step().clone() for _ in range(new_tokens - 1)]
        return torch.stack(found, dim=1)

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
        self._places.tokens = where
        self._places.end = where[-1] + 1 if isinstance(self._cache, KVCache) else None
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
        with _TURNS:  # to make way would take the memory of a capture beside it
            self._capture_alone()

    def _capture_alone(self) -> None:
        self.fused = fused = self._fused_step()
        if not any(getattr(layer, "is_initialized", False) for layer in self._cache.layers):
            raise NotGraphable(self.model, "it keeps nothing in the cache that it is given")
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
                self._room = buffers.room_of_capture(self.device)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _set_generator(self.device, drawn)
            raise NotGraphable(self.model, reason_of(error)) from error
        finally:
            buffers.make_way(self.device)  # of a capture that failed
        self._graph = graph

    def _fused_step(self) -> FusedStep:
        """What is captured in place of a model's small operations. The bits of a step are the same.

        A model that cannot do with it, such as one that turns its masks round, is left as it is.
        """
        with self._running():
            fused = FusedStep(self.model.modules() if self._fuse else ())
            expected = self._step_with(fused.listening())
            try:
                fused.choose()
                found = self._step_with(fused.in_place())
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # of the model's own code, of Triton's compiler, of a driver
                warnings.warn(f"steps are not fused: {reason_of(error)}", RuntimeWarning, stacklevel=2)
                self._reset()
                return FusedStep(())
            return fused if same_bits(expected, found) else FusedStep(())

    def _step_with(self, last: AbstractContextManager[object]) -> torch.Tensor:
        """The logits of a step behind some others, of made-up tokens, with `last` only in the last one.

        Of other tokens each: attention to tokens that are all alike gives the same whatever it does.
        """
        self._reset()
        steps = min(WARM_UPS, self.max_length)
        embeddings: Any = self.model.get_input_embeddings()
        words = len(embeddings.weight)
        for number in range(steps):
            self._token.fill_((FIRST_TOKEN + number) % words)
            with last if number == steps - 1 else nullcontext():
                logits = self._advance().clone()
        self._reset()
        return logits

    def _reset(self) -> None:
        self._cache.reset()  # type: ignore[no-untyped-call]
        self._position.zero_()
        self._token.zero_()

    def _attention(self) -> AbstractContextManager[None]:
        """Within which a model attends to what is in the cache."""
        cache = self._cache
        return cache.attention(self.model) if isinstance(cache, KVCache) else cache.attention()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """On the stream of the graph, between what was asked for before and what is asked for next."""
        with _TURNS, torch.no_grad(), self._attention():
            if self._stream is None:
                yield
                return
            caller = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                yield
            caller.wait_stream(self._stream)
