"""Windows of tokens: where they begin and end, which tokens of them count, and blocks for standard errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from neuzip.eval.measures.estimates import Blocks, effective

if TYPE_CHECKING:
    pass

DOCUMENTS = 8
"""Documents, by `effective`, that are enough to be the blocks of standard errors."""


@dataclass(frozen=True)
class TokenWindow:
    """Tokens `start` to `stop` (excluded) are fed; the last `scored` of the predictions count."""

    start: int
    stop: int
    scored: int


def scored_places(windows: Sequence[TokenWindow]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Positions of the predicted tokens that count, window by window."""
    parts = [np.arange(w.stop - w.scored + 1, w.stop + 1) for w in windows]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def blocks_of(
    windows: Sequence[TokenWindow], documents: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
) -> Blocks:
    """The blocks of what windows score: documents if they are enough, else what windows have of each.

    A few long documents among short ones are not enough: those alone would decide how sure a figure looks.
    """
    of_windows = np.repeat(np.arange(len(windows)), [w.scored for w in windows])
    if documents is None:
        return Blocks("window", of_windows, len(windows))
    known, of = np.unique(documents[scored_places(windows)], return_inverse=True)
    if len(known) == 1:
        return Blocks("window", of_windows, len(windows))
    parts, of_parts = np.unique(of * len(windows) + of_windows, return_inverse=True)
    if len(parts) == len(known) or effective(np.bincount(of).tolist()) >= DOCUMENTS:
        return Blocks("document", of.astype(np.int64), len(known))
    return Blocks("window", of_parts.astype(np.int64), len(parts), len(known))


def cut(tokens: int, window: int) -> Iterator[TokenWindow]:
    """Windows of `window` predictions that share one token, so that all tokens but the first are predicted.

    >>> [(w.start, w.stop, w.scored) for w in cut(tokens=10, window=4)]
    [(0, 4, 4), (4, 8, 4), (8, 9, 1)]
    """
    for start in range(0, tokens - 1, window):
        stop = min(start + window, tokens - 1)
        yield TokenWindow(start, stop, stop - start)


def strided(tokens: int, window: int, stride: int) -> Iterator[TokenWindow]:
    """Windows of `window` tokens, the last one among those predicted; what was scored before does not count.

    A window's own first token is never predicted: with `stride` = `window` every `window`-th is left out.

    >>> [(w.start, w.stop, w.scored) for w in strided(tokens=10, window=6, stride=2)]
    [(0, 5, 5), (2, 7, 2), (4, 9, 2)]
    """
    done = 0
    for start in range(0, tokens, stride):
        end = min(start + window, tokens)
        if scored := min(end - done, end - start - 1):
            yield TokenWindow(start, end - 1, scored)
        done = end
        if end == tokens:
            return


def rolling(start: int, tokens: int, length: int) -> Iterator[TokenWindow]:
    """Windows over a prefix at `start` and `tokens` behind it: all full but a first one, all tokens scored.

    >>> [(w.start, w.stop, w.scored) for w in rolling(0, tokens=9, length=4)]
    [(0, 4, 4), (4, 8, 4), (5, 9, 1)]
    """
    for done in range(0, tokens, length):
        end = min(done + length, tokens)
        yield TokenWindow(start + max(0, end - length), start + end, end - done)
