"""Texts in windows of tokens for training, in an order that is a function of a seed.

Documents follow each other with the tokenizer's end token between them, or two line ends if it has none. The
tokens are cut into windows without overlap; window w has the tokens w * length to (w + 1) * length, and one
more, which its last one predicts. What does not fill a window is left out.

Where the tokenizer puts BOS in front of a text every window begins with it, as the model is fed when it is
used: window w is BOS and the tokens w * length to (w + 1) * length, all of them predicted.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.hf.bos import IN_FRONT_OF_EACH, behind, bos_in_front, rows_behind
from neuzip.runtime.hf.tokenizer import naming_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JOINT = "\n\n"
"""Text between documents if the tokenizer has no end token."""

JSON_LINES = (".jsonl", ".jsonl.gz")


@dataclass(eq=False)
class TrainingWindows:
    """Windows of a text, `batch` of them a step, every epoch all of them in another order.

    ids     int64 [n], the tokens of all documents
    length  tokens of a window that are read; as many are predicted
    front   the token with which every window begins, which is not of the text; None: there is none
    """

    ids: Tensor
    length: int
    per_batch: int
    seed: int
    front: int | None = None
    _orders: dict[int, npt.NDArray[np.int64]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.length < 1 or self.per_batch < 1:
            raise UsageError(f"windows of {self.length} tokens, {self.per_batch} a batch: give 1 and more")
        if not self.windows:
            raise UsageError(
                f"the text has {self.tokens} tokens, too few for {self.length} and one to predict",
                "give more text or a smaller length",
            )

    @classmethod
    def of(
        cls,
        tokens: PreTrainedTokenizerBase | Tensor,
        sources: Sequence[Path] = (),
        *,
        length: int,
        batch: int,
        seed: int = 0,
        front: int | None = None,
    ) -> TrainingWindows:
        """Windows of files that a tokenizer reads, or of ids, int64 [n]; each begins with `front`.

        A tokenizer that puts BOS in front of a text says itself what `front` is. Raises NeuzipError for files
        that are no text, UsageError for a text that is too short.
        """
        if isinstance(tokens, Tensor):
            return cls(tokens.to(torch.int64), length, batch, seed, front)
        documents = (document for path in sources for document in read_documents(path))
        return cls(tokenise(tokens, documents), length, batch, seed, bos_in_front(tokens))

    @property
    def tokens(self) -> int:
        """Tokens of the text."""
        return self.ids.numel()

    def checksum(self) -> str:
        """Tells tokens apart: XXH3 of the ids as they lie in memory, and of what is in front of windows."""
        front = b"" if self.front is None else f"front {self.front}".encode()
        return xxhash.xxh3_64_hexdigest(self.ids.numpy().tobytes() + front)

    @property
    def special_tokens(self) -> str:
        """The special tokens before each window, in words: "none" or BOS."""
        return "none" if self.front is None else IN_FRONT_OF_EACH

    @property
    def windows(self) -> int:
        """Windows of an epoch."""
        return (self.tokens if self.front is not None else max(0, self.tokens - 1)) // self.length

    def batch(self, step: int) -> Tensor:
        """The windows of a step, int64 [batch, length + 1], a function of its number."""
        rows = [self._window(number) for number in range(step * self.per_batch, (step + 1) * self.per_batch)]
        if self.front is None:
            return torch.stack([self.ids[row * self.length : (row + 1) * self.length + 1] for row in rows])
        text = torch.stack([self.ids[row * self.length : (row + 1) * self.length] for row in rows])
        return behind(self.front, text)

    def first(self, width: int, tokens: int) -> Tensor:
        """The first `tokens` of the text in rows that a model reads, [n, width], each behind `front`."""
        return rows_behind(self.front, self.ids[:tokens], width)

    def epoch(self, step: int) -> float:
        """Number of times that all windows were read before a step."""
        return step * self.per_batch / self.windows

    def _window(self, number: int) -> int:
        epoch, place = divmod(number, self.windows)
        if epoch not in self._orders:
            for old in [known for known in self._orders if known != epoch - 1]:
                del self._orders[old]
            chance = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._orders[epoch] = chance.permutation(self.windows)
        return int(self._orders[epoch][place])


def tokenise(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Tensor:
    """The tokens of documents, int64 [n], with what stands between them."""
    end = tokenizer.eos_token_id
    if end is None:
        return _ids(tokenizer, JOINT.join(documents))
    parts: list[Tensor] = []
    for document in documents:
        if parts:
            parts.append(torch.tensor([end]))
        parts.append(_ids(tokenizer, document))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    with naming_tokenizer(tokenizer):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a UTF-8 text (one), or of a .jsonl or .jsonl.gz file with a field "text" in each line.

    Raises NeuzipError that names file and line.
    """
    lines = path.name.endswith(JSON_LINES)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise NeuzipError(f"{path}: is not UTF-8, at byte {error.start}", "convert it first") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise NeuzipError(f"{path}: is not a gzip file: {error}") from error
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}") from error
    if not lines:
        yield text.removeprefix("\ufeff")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _field(path, number, line)


def _field(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise NeuzipError(f"{path}: line {number} is not JSON: {error.msg}") from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise NeuzipError(f'{path}: line {number} has no field "text" that is a string')
    return text
