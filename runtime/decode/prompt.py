"""Prompts as tokens, checked before the weights of a model are read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.safetensors_file import parse_json
from neuzip.runtime.hf.config import GENERATION_CONFIG, MOVE_AWAY, load_config
from neuzip.runtime.hf.decoder import positions
from neuzip.runtime.hf.messages import quiet_transformers
from neuzip.runtime.hf.tokenizer import load_tokenizer, naming_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model takes it: `ids` is int64 [1, tokens]. `max_new_tokens` fit behind it."""

    text: str
    ids: torch.Tensor
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int


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
    _require_positions(config, ids.numel(), max_new_tokens)
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
    document = parse_json(path.read_bytes(), path)
    if not isinstance(document, dict):
        raise FormatError(path, "not an object", hint=MOVE_AWAY)
    for name in (*NUMBERS, *TOKENS):
        value = document.get(name)
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


def _require_positions(config: PreTrainedConfig, tokens: int, max_new_tokens: int) -> None:
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
