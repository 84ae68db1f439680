"""Text from a live model, as it comes.

`generate` takes a `GreedyDecoder` on one GPU, and transformers' own `generate` elsewhere and for what cannot
be captured in a CUDA graph; both with a prompt, a streamer and few knobs.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from transformers import GenerationMixin, StoppingCriteria, StoppingCriteriaList

from neuzip.choices import KvForm
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.runtime.decode.greedy import GreedyDecoder, NotGraphable, not_fixed
from neuzip.runtime.decode.prompt import Prompt
from neuzip.runtime.decode.sampling import Sampling, draw
from neuzip.runtime.decode.text_stream import OnText, TextStream
from neuzip.runtime.hf.config import GENERATION_CONFIG
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.messages import quiet_transformers, reason_of
from neuzip.runtime.hf.tokenizer import naming_tokenizer
from neuzip.runtime.kv_bits import BitsArgument, Layers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

Loop = Literal["auto", "static", "transformers"]
Finish = Literal["stop", "length"]

SETTLED = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "num_beams",
    "early_stopping", "length_penalty", "eos_token_id", "pad_token_id", "bos_token_id",
    "decoder_start_token_id", "cache_implementation", "cache_config", "compile_config",
    "disable_compile", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "max_matching_ngram_size", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "transformers_version", "_from_model_config",
}  # fmt: skip
"""Fields of a generation config that `generate` sets, or that change no token of one text without beams."""

NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("num_return_sequences", "num_beam_groups", "use_cache"), 1),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id")),
}
"""Values of others that ask for nothing, where that is neither 0 nor False."""

ONE_TOKEN = "the text ended with its first token"
"""Why steps were not captured that would have been captured after that token."""

OWN_WAYS = ("generate", "_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods of transformers' loop: a model that has its own is given that loop."""


@dataclass(frozen=True)
class Generation:
    """The text that a model generated, and how. `text` equals all pieces given to `on_text` together.

    `tokens` are all new tokens, including those of a stop string. `seconds` and `first_token_seconds` count
    from the start of the call. `finish_reason` is "length" if the limit of new tokens ended the text, else
    "stop". For a quantised KV cache, `cache_bytes` is its final size, `attention` says how attention read it,
    and `kv_layers` has the bits of each layer. `graphed` says whether steps ran as a CUDA graph; if not,
    `not_graphed` says why. `capture_seconds` passed behind the first token until the steps were captured in
    that graph.
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
    capture_seconds: float = 0.0
    kv_layers: Layers | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, without prompt and capture. None if the text has only one token."""
        more = len(self.tokens) - 1
        seconds = self.seconds - self.first_token_seconds - self.capture_seconds
        return more / seconds if more > 0 and seconds > 0 else None


def generate(
    model: PreTrainedModel,
    prompt: Prompt,
    *,
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    kv_bits: BitsArgument | None = None,
    kv_form: KvForm = "rotated",
    on_text: OnText = lambda text: None,
    loop: Loop = "auto",
) -> Generation:
    """Generate text after a prompt, at most `max_new_tokens` tokens. `on_text` is given each piece at once.

    The text ends where the model ends it, or before the first of the strings `stop`.

    `sampling` says how tokens are chosen: greedily without it. The same `seed` draws the same tokens, and no
    other random number generator is seeded. `kv_bits` are the bits of the KV cache and `kv_form` its form, as
    `KVCache` takes them, None for the model's own.

    `loop` "transformers" is that of transformers, "static" a `GreedyDecoder`, on a GPU with its steps in a
    CUDA graph, and with memory for all tokens from the start. "auto" is the latter on one GPU, but for models
    whose generation config asks for more: `not_static`. It gives the first token before it captures the
    steps, and goes on without a graph if they cannot be captured. On a CPU "auto" is the former. Both choose
    alike, but add in another order: nearly tied tokens may come out otherwise.

    Raises NeuzipError for "static" where `not_static` gives a reason or a GPU cannot capture, and for both if
    memory for the KV cache runs out; UsageError for an empty string in `stop`.
    """
    sampling = Sampling() if sampling is None else sampling
    stream = TextStream(prompt.tokenizer, prompt.ids, on_text, stop)
    began = time.perf_counter()
    with quiet_transformers(), naming_tokenizer(prompt.tokenizer):
        decoder, reason = _decoder(model, prompt, kv_bits, kv_form, loop)
        capture = 0.0
        with _seeded(seed, input_device(model)):
            if decoder is not None:
                try:
                    with _naming_memory(model, prompt):
                        chosen = decoder.prefill(prompt.ids)
                except NotGraphable as error:
                    decoder, reason = None, error.reason
            if decoder is not None:
                tokens, failure, capture = _decode(decoder, chosen, prompt, sampling, stream)
                reason = ONE_TOKEN if decoder.waits else failure or reason
                cache = (
                    None if kv_bits is None else (decoder.cache_bytes, decoder.attention, decoder.kv_layers)
                )
            else:
                tokens, cache = _by_transformers(model, prompt, sampling, kv_bits, kv_form, stream)
    seconds = time.perf_counter() - began
    finish: Finish
    text, first = "".join(stream.parts), (stream.first or began + seconds) - began
    cache_bytes, attention, kv_layers = cache or (None, None, None)
    graphed = decoder is not None and decoder.graphed
    if stream.stopped_after is not None:
        tokens, finish = tokens[: stream.stopped_after], "stop"
    else:
        finish = _finish(tokens, prompt, model.generation_config)
    return Generation(
        text,
        tuple(tokens),
        seconds,
        first,
        finish,
        cache_bytes,
        attention,
        graphed,
        reason,
        capture,
        kv_layers,
    )


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
    field = _asked_for(model.generation_config)
    return None if field is None else f"the generation config asks for {field}"


def _asked_for(config: GenerationConfig) -> str | None:
    """The first thing that a generation config wants of transformers' loop."""
    for name, value in config.to_dict().items():
        if name not in SETTLED and value not in (None, [], {}, NEUTRAL.get(name, 0)):
            return name
    return None


def _decoder(
    model: PreTrainedModel, prompt: Prompt, kv_bits: BitsArgument | None, kv_form: KvForm, loop: Loop
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
    try:
        with _naming_memory(model, prompt):
            decoder = GreedyDecoder(
                model, 1, _capacity(prompt), kv_bits=kv_bits, kv_form=kv_form, later=loop == "auto"
            )
    except NotGraphable as error:
        if loop == "static":
            raise
        return None, error.reason
    if decoder.graphed or decoder.waits:
        return decoder, None
    reason = "it is not on one GPU alone, or keeps something else than keys and values"
    return (decoder if loop == "static" else None), reason


def _capacity(prompt: Prompt) -> int:
    """Tokens of a prompt, with those that may follow."""
    return prompt.ids.shape[1] + prompt.max_new_tokens


@contextmanager
def _naming_memory(model: PreTrainedModel, prompt: Prompt) -> Iterator[None]:
    """Raise NeuzipError where there is no memory for all keys and values of a text."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise NeuzipError(
            f"{type(model).__name__}: no memory for keys and values of {_capacity(prompt):,} tokens at once",
            "give a smaller `max_new_tokens`, or `graph=False`, which takes memory as the text grows",
        ) from error


def _decode(
    decoder: GreedyDecoder, chosen: torch.Tensor, prompt: Prompt, sampling: Sampling, stream: TextStream
) -> tuple[list[int], str | None, float]:
    """The new tokens, told as they come; why steps could not be captured, and seconds that the capture took.

    `chosen` follows the prompt.

    A step is launched before the token it goes on with is read, so that a GPU does not wait for the host: one
    step is in vain where a text ends early.
    """
    ends, warpers = _ends(decoder.model.generation_config), sampling.warpers()
    tokens: list[int] = []
    reason, seconds = None, 0.0
    stream.put(prompt.ids)
    for left in reversed(range(prompt.max_new_tokens)):
        if warpers is not None:
            chosen = draw(decoder.logits, warpers)
            decoder.take(chosen)
        arriving, waits = _Arriving(chosen), decoder.waits
        if left and not waits:
            chosen = decoder.step()
        tokens.append(arriving.token())
        stream.put(torch.tensor(tokens[-1:]))
        if tokens[-1] in ends or stream.stopped_after is not None:
            break
        if left and waits:  # nobody waits for the first token any longer
            began = time.perf_counter()
            try:
                with _naming_memory(decoder.model, prompt):
                    decoder.capture()
            except NotGraphable as error:
                reason = error.reason
            seconds = time.perf_counter() - began
            chosen = decoder.step()
    stream.end()
    return tokens, reason, seconds


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
    kv_bits: BitsArgument | None,
    kv_form: KvForm,
    stream: TextStream,
) -> tuple[list[int], tuple[int, str, Layers] | None]:
    """The new tokens, told as they come; of a cache in few bits its bytes, how it was read, and its bits."""
    ids = prompt.ids.to(input_device(model))
    ends = model.generation_config.eos_token_id
    padding = model.generation_config.pad_token_id
    if padding is None and ends not in (None, []):  # or transformers says that it takes this
        padding = ends[0] if isinstance(ends, list) else ends
    cache = None if kv_bits is None else KVCache(model.config, kv_bits, form=kv_form)
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
    return tokens, (cache.nbytes, cache.how, cache.bits)


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
        fields = [name for name in (_asked_for(config), "cache_implementation") if name]
        values = {name: value for name in fields if (value := getattr(config, name, None)) is not None}
        if not values:
            raise
        settings = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        raise FormatError(
            Path(model.config.name_or_path or "") / GENERATION_CONFIG,
            f"transformers cannot do what it asks for, {settings}: {reason_of(error)}",
            hint="take that out of the file",
        ) from error


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(list(range(torch.cuda.device_count())) if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
