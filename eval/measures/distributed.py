"""Windows fed to models in batches, which the processes of a run share out.

A batch is the same whoever works on it, and results are put together in the order of windows: figures do not
depend on how many processes there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from neuzip.compress.ranks import ALONE, Ranks
from neuzip.compress.torchrun import started_by_torchrun
from neuzip.eval.measures.estimates import Values
from neuzip.eval.measures.windows import TokenWindow

ROWS = {"cpu": 1024, "cuda": 8192}
"""Tokens fed at a time, or those of one window: a GPU is not busy with fewer."""

OnTokens = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Windows of one length side by side: `ids` int64 [B, T] are fed.

    `rows` are those of the B * T predictions that count, `targets` int64 [N] the tokens that come there.
    """

    ids: torch.Tensor
    rows: torch.Tensor | slice
    targets: torch.Tensor


def batches(ids: torch.Tensor, windows: Sequence[TokenWindow], rows: int) -> Iterator[WindowBatch]:
    """Windows in order, as many of one length side by side as `rows` allow."""
    together: list[TokenWindow] = []
    for w in windows:
        length = w.stop - w.start
        if together and (
            length != together[0].stop - together[0].start or (len(together) + 1) * length > rows
        ):
            yield _batch(ids, together)
            together = []
        together.append(w)
    if together:
        yield _batch(ids, together)


def _batch(ids: torch.Tensor, windows: Sequence[TokenWindow]) -> WindowBatch:
    length = windows[0].stop - windows[0].start
    rows: torch.Tensor | slice = slice(None)
    if any(w.scored < length for w in windows):
        parts = [torch.arange(length - w.scored, length) + i * length for i, w in enumerate(windows)]
        rows = torch.cat(parts)
    return WindowBatch(
        torch.stack([ids[w.start : w.stop] for w in windows]),
        rows,
        torch.cat([ids[w.stop - w.scored + 1 : w.stop + 1] for w in windows]),
    )


def over_windows(
    measure: Callable[[WindowBatch], Mapping[str, torch.Tensor]],
    ids: torch.Tensor,
    windows: Sequence[TokenWindow],
    rows: int,
    *,
    ranks: Ranks = ALONE,
    on_tokens: OnTokens = lambda count: None,
) -> dict[str, Values]:
    """The results of `measure` for the scored tokens of all batches, [tokens], in order.

    Each rank measures some of the batches; all get everything. `on_tokens` is told of predictions made here.
    """
    mine: list[dict[str, Values]] = []
    total = 0
    for number, batch in enumerate(batches(ids, windows, rows)):
        total += 1
        if number % ranks.world == ranks.rank:
            mine.append({name: values.cpu().numpy() for name, values in measure(batch).items()})
            on_tokens(batch.targets.numel())
    of_all = ranks.all_gather(mine)
    in_order = [of_all[number % ranks.world][number // ranks.world] for number in range(total)]
    return {name: np.concatenate([part[name] for part in in_order]) for name in in_order[0]}


def take_a_gpu() -> None:
    """Under torchrun every process of a machine gets a card of its own, as far as there are any."""
    rank = os.environ.get("LOCAL_RANK", "")
    if started_by_torchrun() and rank.isdecimal() and torch.cuda.is_available():
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
