"""How far tokens of one form of a model are those that another would choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from neuzip.runtime.hf.decoder import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TIE = 4
"""Roundings that two logits may be apart to be a tie: sums in another order move each by two, about."""


@dataclass(frozen=True)
class Agreement:
    """How many of `tokens` are a model's own choice, and how many others are tied with it."""

    tokens: int
    chosen: int
    tied: int


@torch.no_grad()
def agreement(model: PreTrainedModel, ids: torch.Tensor, tokens: torch.Tensor) -> Agreement:
    """What a model makes of `tokens` [batch, n] that another form of it took after `ids` [batch, m].

    It reads the texts as they are, and makes its own choice for each place: see `agreement_of_logits`.
    """
    device = input_device(model)
    ids, tokens = ids.to(device), tokens.to(device)
    logits: torch.Tensor = model(torch.cat([ids, tokens[:, :-1]], dim=1)).logits[:, ids.shape[1] - 1 :]
    return agreement_of_logits(logits, tokens)


def agreement_of_logits(logits: torch.Tensor, tokens: torch.Tensor) -> Agreement:
    """How many of `tokens` [batch, n] have the largest logit of their place in `logits` [batch, n, words].

    A token is tied if its logit is at most TIE roundings to the dtype of `logits` below the largest.
    """
    own = logits.argmax(dim=-1)
    best, other = (logits.gather(-1, t.to(logits.device)[..., None])[..., 0].float() for t in (own, tokens))
    others = own != tokens.to(own.device)
    rounding = best.abs() * torch.finfo(logits.dtype).eps / 2
    tied = others & (best - other <= TIE * rounding)
    return Agreement(tokens.numel(), int((~others).sum()), int(tied.sum()))
