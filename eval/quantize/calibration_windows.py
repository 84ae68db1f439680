"""Windows of calibration text, and the tokens that follow in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from neuzip.runtime.hf.bos import behind

BATCH = 1024
"""Tokens fed at a time by default."""


@dataclass(frozen=True, eq=False)
class CalibrationWindows:
    """Calibration text: `fed` int64 [windows, T], and the token after each of them, `targets`."""

    fed: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, width: int, front: int | None = None) -> CalibrationWindows:
        """Cut tokens, int64 [n], into windows that do not overlap; what fills no window is left out.

        Windows begin with `front`, which is not of `ids`, if there is one.
        """
        if front is not None:
            width = min(width, len(ids))
            targets = ids[: len(ids) // width * width].view(-1, width)
            return cls(behind(front, targets[:, :-1]), targets)
        width = min(width, len(ids) - 1)
        count = (len(ids) - 1) // width
        used = count * width
        return cls(ids[:used].view(count, width), ids[1 : used + 1].view(count, width))

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return self.targets.numel()

    def divided(self, least: int, share: int) -> tuple[CalibrationWindows, CalibrationWindows]:
        """One of `share` windows, but windows of `least` tokens if there are as many; and the others."""
        count = len(self.fed)
        wanted = min(count, max(-(-count // share), -(-least // max(1, self.fed.shape[1]))))
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[torch.arange(wanted) * count // max(1, wanted)] = True  # evenly, as topics change
        return (
            CalibrationWindows(self.fed[chosen], self.targets[chosen]),
            CalibrationWindows(self.fed[~chosen], self.targets[~chosen]),
        )

    def batches(self, tokens: int = BATCH) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Windows of `tokens` at a time, at least one, with their targets in one row."""
        rows = max(1, tokens // self.fed.shape[1])
        for fed, targets in zip(torch.split(self.fed, rows), torch.split(self.targets, rows), strict=True):
            if len(fed):  # torch splits no windows into one part
                yield fed, targets.flatten()
