"""New tokens to text while they come: whole characters, and nothing from a stop string on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transformers.generation.streamers import BaseStreamer

from neuzip.runtime.requirements import require_stop

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

OnText = Callable[[str], None]

CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new one, whose text may depend on them."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer gives for bytes that begin a character."""


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces.

    `found` is the string that ended the text, None until then. Raises UsageError for an empty string.

    >>> stop = StopStrings(["END"])
    >>> stop.add("some E"), stop.add("N"), stop.add("D and more"), stop.found
    ('some ', '', '', 'END')
    """

    def __init__(self, strings: Sequence[str]) -> None:
        require_stop(strings)
        self._strings = tuple(strings)
        self._pending = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is certain to come before any stop string, now that `piece` has arrived."""
        if self.found is not None:
            return ""
        text = self._pending + piece
        places = [(at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if places:
            end, self.found = min(places, key=lambda place: (place[0], -len(place[1])))
            self._pending = ""
            return text[:end]
        keep = max((_overlap(text, s) for s in self._strings), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def cut(self, string: str) -> str:
        """The text that was held back, as the text ends with `string`, which is a token and no text."""
        held, self.found = self.end(), string
        return held

    def end(self) -> str:
        """The text that was held back as it might have begun a stop string."""
        held, self._pending = self._pending, ""
        return held


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of a text begin `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class TextStream(BaseStreamer):
    """Tokens to text in pieces: none changes afterwards, each ends with a whole character.

    `ids` int64 [1, tokens] is the prompt. The text ends before the first of the `stop` strings, and
    `stopped_after` is then the number of new tokens up to it, else None. Special tokens such as <|im_end|>
    are not part of a text; as stop strings they end it nevertheless. `parts` are pieces for `on_text`,
    `first` the time at which the first token came.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, on_text: OnText, stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._ids: list[int] = ids[0, -CONTEXT:].tolist()
        self._begin, self._told = 0, len(self._ids)
        self._prompt_follows = True
        self._stop = StopStrings(stop)
        self._stop_tokens = _special_tokens(tokenizer, stop)
        self._prompt_tokens = len(self._ids)
        self.stopped_after: int | None = None
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
        is_stop = self._ids[-1] in self._stop_tokens and self.stopped_after is None
        if text and (is_stop or not text.endswith(INCOMPLETE)):
            self._take(text)
        if is_stop and self.stopped_after is None:
            self._tell(self._stop.cut(self._stop_tokens[self._ids[-1]]))
            self.stopped_after = len(self._ids) - self._prompt_tokens

    def end(self) -> None:
        if text := self._new_text():
            self._take(text)
        self._tell(self._stop.end())

    def _new_text(self) -> str:
        """What the tokens after the last piece add to the text."""
        return self._decoded(len(self._ids))[len(self._decoded(self._told)) :]

    def _take(self, text: str) -> None:
        self._begin, self._told = self._told, len(self._ids)
        self._tell(self._stop.add(text))
        if self._stop.found is not None and self.stopped_after is None:
            self.stopped_after = self._told - self._prompt_tokens

    def _tell(self, text: str) -> None:
        if text:
            self.parts.append(text)
            self._on_text(text)

    def _decoded(self, stop: int) -> str:
        text = self._tokenizer.decode(
            self._ids[self._begin : stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _special_tokens(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> dict[int, str]:
    """Those of some strings that are special tokens, by their ids: decoding leaves such tokens out."""
    special = {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {special[string]: string for string in strings if string in special}
