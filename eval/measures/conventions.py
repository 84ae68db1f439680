"""Which token is predicted from what: the conventions under which perplexities are told.

| convention | windows                                                          | scored                  |
|------------|------------------------------------------------------------------|-------------------------|
| bos        | as token, but BOS in front of each window takes the place of its | all, a window's first   |
|            | first token; only if the tokenizer puts BOS in front of a text   | token too               |
| token      | 1,024 predictions each, without overlap, over all documents      | all                     |
| strided    | 1,024 tokens, one every 512, as in the guide of transformers     | what was not before     |
| llama.cpp  | 512 tokens without overlap; a last one that is shorter is left   | the last 255: of the    |
|            | out; the first token is BOS if the tokenizer adds one            | second half, but one    |
| lm-eval    | each document, behind BOS (or else EOS), in windows as long as   | all, the document's     |
|            | the model can; the last one is moved back to its full length     | first token too         |

token and strided put no special tokens in, whatever the tokenizer does by itself. The last follows the task
`wikitext` of lm-evaluation-harness 0.4.13: articles of WikiText are detokenised, other texts are not;
perplexities are those a word and a byte, and these are counted before. The guide:
huggingface.co/docs/transformers/perplexity; llama.cpp: tools/perplexity.

A convention becomes tokens in a row and windows over them, whatever they stand for.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.measures.convention_names import BOS, Name, special_text
from neuzip.eval.measures.estimates import Blocks, Values
from neuzip.eval.measures.text_units import Units, detokenised, ends_of, units_of, units_of_page
from neuzip.eval.measures.texts import Text
from neuzip.eval.measures.windows import TokenWindow, blocks_of, cut, rolling, scored_places, strided
from neuzip.runtime.hf.bos import IN_FRONT_OF_EACH, bos_in_front, rows_behind
from neuzip.runtime.hf.messages import quiet_transformers
from neuzip.runtime.hf.tokenizer import naming_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 1024
"""Tokens predicted in a window by default, or the model's positions if they are fewer."""

STRIDE = 512
"""Tokens between the beginnings of strided windows, or half a window if that is less."""

LLAMA_CPP_WINDOW = 512
"""Tokens of a window of llama.cpp, or the model's positions if they are fewer."""

UNKNOWN_POSITIONS = 2048
"""Positions that lm-evaluation-harness assumes for a model that does not state them."""


@dataclass(frozen=True)
class Convention:
    """The convention under which a perplexity was measured. `tokens` is the number of predicted ones.

    `words` and `bytes` are what perplexities a word and a byte are of, None where there are none of these, or
    where not all of the text is predicted. A word belongs to the token with which it begins. `special_tokens`
    says what stands in front of windows, "none" if nothing does and the tokenizer would put nothing there.
    """

    name: Name
    window: int
    stride: int | None
    windows: int
    tokens: int
    documents: int
    words: int | None
    bytes: int | None
    special_tokens: str

    @property
    def rule(self) -> str:
        """The windows, in words."""
        size = f"{self.window:,}"
        return {
            "bos": f"windows of {size} predictions, no overlap",
            "token": f"windows of {size} predictions, no overlap",
            "strided": f"windows of {size} tokens, stride {self.stride or 0:,}",
            "llama.cpp": f"windows of {size} tokens, their second halves",
            "lm-eval": f"documents in windows of up to {size}",
        }[self.name] + special_text(self.special_tokens)


@dataclass(frozen=True, eq=False)
class Reading:
    """A text under a convention: `ids` int64 [n], windows over them, and the blocks of what is scored.

    `words` and `bytes` are those of each block, None where that is not known. `front` is the token with which
    every window begins, which is not of the text; None if there is none.
    """

    convention: Convention
    ids: torch.Tensor
    windows: tuple[TokenWindow, ...]
    blocks: Blocks
    words: Values | None = None
    bytes: Values | None = None
    front: int | None = None

    @property
    def text(self) -> torch.Tensor:
        """The tokens of the text, int64 [n], without those in front of windows."""
        if self.front is None:
            return self.ids
        return torch.cat([self.ids[w.start + 1 : w.stop + 1] for w in self.windows])

    def rows(self, width: int, tokens: int) -> torch.Tensor:
        """The first `tokens` of the text in rows that a model reads, [n, width], each behind `front`."""
        return rows_behind(self.front, self.text[:tokens], width)


class TooShort(NeuzipError):
    """A text that is too short for a convention."""


class Tokenised:
    """A text as one tokenizer cuts it, up to the token with which `max_tokens` predictions are made.

    `positions` is how many tokens the model was made for, None if it does not tell.
    """

    def __init__(
        self,
        text: Text,
        tokenizer: PreTrainedTokenizerBase,
        positions: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.text, self._tokenizer = text, tokenizer
        self.positions = positions
        self.max_tokens: int | None = None
        content = text.content
        # transformers would say that the text is longer than the model's context.
        with quiet_transformers(), naming_tokenizer(tokenizer):
            encoded = tokenizer(
                content, add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast)
            )
        self.ids: list[int] = encoded["input_ids"]
        self._offsets: list[tuple[int, int]] | None = encoded.get("offset_mapping")
        self._ends = None if self._offsets is None else ends_of(self._offsets, content)
        self._end_after(max_tokens)

    def first(self, max_tokens: int) -> Tokenised:
        """The beginning of the text, up to the token with which `max_tokens` predictions are made."""
        part = copy.copy(self)
        vars(part).pop("_documents", None)  # those of all tokens
        part._end_after(max_tokens)
        return part

    def _end_after(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        if max_tokens is not None and max_tokens + 1 < len(self.ids):
            self.ids = self.ids[: max_tokens + 1]
            self._ends = None if self._ends is None else self._ends[: max_tokens + 1]

    def read(self, name: Name, window: int | None = None, stride: int | None = None) -> Reading:
        """The text under a convention. Raises TooShort, and UsageError for windows that cannot be."""
        if name == "lm-eval":
            return self._rolling()
        if name == "llama.cpp":
            return self._second_halves()
        if name == "bos":
            return self._behind_bos(self._window_and_stride(window, None)[0])
        window, stride = self._window_and_stride(window, stride)
        if name == "token":
            return self._stream(name, window, None, tuple(cut(len(self.ids), window)))
        return self._stream(name, window, stride, tuple(strided(len(self.ids), window, stride)))

    def read_for_comparison(self, window: int | None = None) -> Reading:
        """The text as models are compared and calibrated on it: behind BOS where the tokenizer puts it there.

        Raises as `read`.
        """
        return self.read("token" if self.bos is None else BOS, window)

    def _window_and_stride(self, window: int | None, stride: int | None) -> tuple[int, int]:
        limit = self.positions
        if window is None:
            window = WINDOW if limit is None else min(WINDOW, limit)
        elif limit is not None and window > limit:
            raise UsageError(
                f"`window={window}`: the model was made for {limit} tokens", "choose a smaller one"
            )
        if stride is None:
            return window, min(STRIDE, max(1, window // 2))
        if stride > window:
            raise UsageError(
                f"`stride={stride}` is larger than the window, {window}: tokens would be left out",
                "choose a smaller stride or a larger window",
            )
        return window, stride

    def _stream(
        self, name: Name, window: int, stride: int | None, windows: tuple[TokenWindow, ...]
    ) -> Reading:
        """A reading of all documents in a row, without special tokens."""
        if not windows:
            raise TooShort(
                f"{self.text.name}: is too short: of {len(self.ids)} tokens none can be predicted in windows "
                f"of {window}"
            )
        units = None
        if self._ends is not None and sum(w.scored for w in windows) == len(self.ids) - 1:
            first = int(self._ends[0])  # nothing predicts the first token
            units = units_of(self.text.content[first:], self._ends - first)
        special = "none" if self.bos is None else "without the BOS that the tokenizer adds"
        return self._made(name, self.ids, windows, self._documents, window, stride, units, special)

    def _behind_bos(self, window: int) -> Reading:
        """A reading of all documents in a row, cut into windows that each begin with BOS."""
        bos = self.bos
        if bos is None:
            raise UsageError(
                "`conventions='bos'`: the tokenizer puts no BOS in front of a text",
                "choose token: it has none",
            )
        count = len(self.ids) if self.max_tokens is None else min(len(self.ids), self.max_tokens)
        if not count:
            raise TooShort(f"{self.text.name}: holds no token to predict")
        ids, windows, of = list[int](), list[TokenWindow](), list[int]()
        for start in range(0, count, window):
            stop = min(start + window, count)
            windows.append(TokenWindow(len(ids), len(ids) + stop - start, stop - start))
            ids += [bos, *self.ids[start:stop]]
            of += [start, *range(start, stop)]  # to which token each belongs: BOS to the one behind it
        documents = self._documents
        units = None
        if self._ends is not None:
            per_token = units_of(self.text.content, self._ends[:count])
            units = Units(per_token.words[of], per_token.bytes[of])
        return self._made(
            BOS, ids, tuple(windows), None if documents is None else documents[of], window, None, units,
            IN_FRONT_OF_EACH, bos,
        )  # fmt: skip

    def _second_halves(self) -> Reading:
        ids, documents = self.ids, self._documents
        window = LLAMA_CPP_WINDOW if self.positions is None else min(LLAMA_CPP_WINDOW, self.positions)
        bos = self.bos
        if bos is not None:
            ids = [bos, *ids]
            documents = None if documents is None else np.concatenate([documents[:1], documents])
        count = len(ids) // window
        if not count or window < 3:
            raise TooShort(f"{self.text.name}: has {len(ids)} tokens, and a window of llama.cpp {window}")
        if bos is not None:  # the firsts of windows are never scored
            ids = [bos if at % window == 0 else token for at, token in enumerate(ids)]
        scored = window - window // 2 - 1
        windows = tuple(TokenWindow(at, at + window - 1, scored) for at in range(0, count * window, window))
        special = "none" if bos is None else "the first one BOS"
        return self._made("llama.cpp", ids, windows, documents, window, None, None, special, bos)

    def _rolling(self) -> Reading:
        prefix = self._tokenizer.bos_token_id
        if prefix is None:
            prefix = self._tokenizer.eos_token_id
        if not isinstance(prefix, int):
            raise TooShort(f"{self.text.name}: the tokenizer has neither BOS nor EOS to put in front of it")
        length = self.positions or UNKNOWN_POSITIONS
        ids: list[int] = []
        windows: list[TokenWindow] = []
        documents: list[int] = []
        units: list[Units] = []
        taken = 0
        for number, document in enumerate(d for d in self.text.documents if d.content.strip()):
            whole = document.content if document.page is None else document.page
            page, tokens, ends = self._within(
                whole, None if self.max_tokens is None else self.max_tokens - taken
            )
            if tokens:
                windows += rolling(len(ids), len(tokens), length)
                ids += [prefix, *tokens]
                documents += [number] * (len(tokens) + 1)
                taken += len(tokens)
                units.append(units_of_page(page, len(tokens), ends))
            if page != whole:
                break
        if not windows:
            raise TooShort(f"{self.text.name}: holds no token to predict")
        front = "BOS" if self._tokenizer.bos_token_id is not None else "EOS"
        special = f"{front} in front"
        together = Units(
            np.concatenate([one.words for one in units]),
            np.concatenate([one.bytes for one in units]),
            all(one.exact for one in units),
        )
        return self._made(
            "lm-eval", ids, tuple(windows), np.array(documents), length, None, together, special
        )

    def _within(self, page: str, room: int | None) -> tuple[str, list[int], Values | None]:
        """A page, its tokens and their ends, or of as many words of its beginning as `room` tokens allow."""
        tokens, ends = self._page_tokens(page)
        if room is None or len(tokens) <= room:
            return page, tokens, ends
        words = [match.end() for match in re.finditer(r"\S+", page)]
        fitting = bisect_right(words, room, key=lambda end: len(self._page_tokens(page[:end])[0]))
        page = page[: words[fitting - 1]] if fitting else ""
        return page, *(self._page_tokens(page) if page else ([], None))

    def _page_tokens(self, page: str) -> tuple[list[int], Values | None]:
        """Tokens and where they end in the page: None if it is detokenised, or the tokenizer a slow one."""
        known = bool(self._tokenizer.is_fast) and not self.text.wikitext
        with quiet_transformers(), naming_tokenizer(self._tokenizer):
            encoded = self._tokenizer(
                detokenised(page) if self.text.wikitext else page, return_offsets_mapping=known
            )
        ids: list[int] = encoded["input_ids"]
        return ids, ends_of(encoded["offset_mapping"], page) if known and ids else None

    @cached_property
    def bos(self) -> int | None:
        """The BOS that the tokenizer puts in front of a text by itself, or None."""
        return bos_in_front(self._tokenizer)

    @cached_property
    def _documents(self) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """The document of each token, where the tokenizer tells. Blank ones belong to the one before."""
        if self._offsets is None:
            return None
        starts = [
            at
            for at, document in zip(self.text.starts(), self.text.documents, strict=True)
            if document.content.strip()
        ]
        begins = np.array([begin for begin, _ in self._offsets[: len(self.ids)]], dtype=np.int64)
        return np.maximum(np.searchsorted(starts, begins, side="right") - 1, 0)

    def _made(
        self,
        name: Name,
        ids: Sequence[int],
        windows: tuple[TokenWindow, ...],
        documents: np.ndarray[tuple[int], np.dtype[np.int64]] | None,
        window: int,
        stride: int | None,
        units: Units | None,
        special_tokens: str,
        front: int | None = None,
    ) -> Reading:
        blocks = blocks_of(windows, documents)
        places = scored_places(windows)
        words, size = (None, None) if units is None else (units.words[places], units.bytes[places])
        convention = Convention(
            name=name,
            window=window,
            stride=stride,
            windows=len(windows),
            tokens=len(places),
            documents=1 if documents is None else len(np.unique(documents[places])),
            words=None if words is None else int(words.sum()),
            bytes=None if size is None else int(size.sum()),
            special_tokens=special_tokens,
        )
        if units is not None and not units.exact and blocks.kind == "window":
            words = size = None
        return Reading(
            convention,
            torch.tensor(ids),
            windows,
            blocks,
            None if words is None else blocks.count_of(words),
            None if size is None else blocks.count_of(size),
            front,
        )
