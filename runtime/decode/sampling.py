"""How the next token is chosen: greedily, or drawn from what the usual filters leave of the distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuzip.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import LogitsProcessorList

COLDEST = 1e-6
"""The least temperature: logits divided by much less are no longer finite."""


@dataclass(frozen=True)
class Sampling:
    """Temperature and filters of sampling, applied in the order of transformers: as the fields stand.

    `temperature` 0 is greedy: the most likely token. `top_k` keeps that many of the most likely tokens, 0
    keeps all. `top_p` keeps the most likely tokens whose probabilities add up to it (nucleus sampling), 1
    keeps all. `min_p` keeps the tokens at least that share as likely as the most likely one, 0 keeps all.

    Raises UsageError for a value out of range, and for a filter at temperature 0, where it has no effect.

    >>> Sampling(0.8, top_k=40, min_p=0.05)
    Sampling(temperature=0.8, top_k=40, top_p=1.0, min_p=0.05)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value):
                raise UsageError(f"`{name}={value!r}`: is no finite number", "leave it out for the default")
        if type(self.top_k) is not int:
            raise UsageError(f"`top_k={self.top_k!r}`: is no whole number", "0 keeps all tokens")
        if self.temperature < 0:
            raise UsageError(f"`temperature={self.temperature}`: is negative", "0 is greedy decoding")
        if 0 < self.temperature < COLDEST:
            raise UsageError(
                f"`temperature={self.temperature}`: is too small to divide by",
                f"give {COLDEST:g} or more, or 0 for greedy decoding",
            )
        if self.top_k < 0:
            raise UsageError(f"`top_k={self.top_k}`: is negative", "0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise UsageError(
                f"`top_p={self.top_p}`: is not above 0 and at most 1",
                "for greedy decoding give `temperature=0`",
            )
        if not 0 <= self.min_p < 1:
            raise UsageError(f"`min_p={self.min_p}`: is not from 0 to below 1", "0 keeps all tokens")
        if self.is_greedy:
            used = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
            for name in (name for name, is_used in used.items() if is_used):
                raise UsageError(
                    f"`{name}`: has no effect at temperature 0, which is greedy", "give a `temperature`"
                )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def warpers(self) -> LogitsProcessorList | None:
        """What is done to logits before a token is drawn; None if greedy."""
        if self.is_greedy:
            return None
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers = LogitsProcessorList()
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def options(self) -> dict[str, Any]:
        """Arguments of transformers' `generate` for this choice, which override a generation config."""
        if self.is_greedy:
            return {"do_sample": False} | dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }


def draw(logits: torch.Tensor, warpers: LogitsProcessorList) -> torch.Tensor:
    """A token for each row of logits [batch, vocabulary], drawn as transformers does: int64 [batch]."""
    import torch

    no_ids: Any = None  # the tokens so far, which these warpers do not read
    probabilities = torch.softmax(warpers(no_ids, logits.float()), dim=-1)
    return torch.multinomial(probabilities, 1)[:, 0]
