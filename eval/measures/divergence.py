"""How far a model's predictions are from those of another, token by token, over the whole vocabulary.

Both read the same text in one pass. Of each token the Kullback-Leibler divergence KL(base || other) is
taken, the losses of both, whether they would choose the same token, and how much of their top ten they share.
Figures have standard errors over blocks of tokens; differences are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from neuzip.compress.ranks import ALONE, Ranks
from neuzip.errors import NeuzipError
from neuzip.eval.measures.distributed import ROWS, OnTokens, WindowBatch, over_windows
from neuzip.eval.measures.estimates import Blocks, Estimate, Values, exponential
from neuzip.eval.measures.head import HeadedModel, divergence
from neuzip.eval.measures.windows import TokenWindow, blocks_of

TOP_K = 10


@dataclass(frozen=True)
class KLDivergence:
    """KL(base || other) of tokens, in nats: their mean, and what they are spread over."""

    mean: Estimate
    median: float
    p999: float
    max: float


@dataclass(frozen=True)
class Comparison:
    """A model beside its base, on the same tokens.

    `nll_difference` is other minus base, in nats a token, and `perplexity_ratio` its exponential. `top_1` is
    the share of tokens for which both choose the same, `top_k` that of the `k` likeliest tokens which both
    have in common. `identical` is whether all losses of both have the same bits and no divergence is above 0.
    """

    tokens: int
    blocks: str
    base_nll: Estimate
    other_nll: Estimate
    nll_difference: Estimate
    perplexity_ratio: Estimate
    kld: KLDivergence
    top_1: Estimate
    top_k: Estimate
    k: int
    identical: bool


@dataclass(frozen=True, eq=False)
class Paired:
    """Measurements of each token, [tokens], in the order of windows.

    Losses and divergences are fp32, in nats; `agrees` is bool, `shared` how many of the top `k` both have.
    """

    base_nll: Values
    other_nll: Values
    kld: Values
    agrees: Values
    shared: Values
    k: int
    blocks: Blocks

    def summary(self) -> Comparison:
        """The figures with their standard errors."""
        b = self.blocks
        base, other = self.base_nll.astype(np.float64), self.other_nll.astype(np.float64)
        difference = b.mean(other - base)
        spread = np.quantile(self.kld, [0.5, 0.999])
        return Comparison(
            tokens=len(base),
            blocks=b.text,
            base_nll=b.mean(base),
            other_nll=b.mean(other),
            nll_difference=difference,
            perplexity_ratio=exponential(difference),
            kld=KLDivergence(b.mean(self.kld), float(spread[0]), float(spread[1]), float(self.kld.max())),
            top_1=b.mean(self.agrees),
            top_k=b.mean(self.shared).times(1 / self.k),
            k=self.k,
            identical=self.base_nll.tobytes() == self.other_nll.tobytes() and not self.kld.any(),
        )


def compare(
    base: HeadedModel,
    other: HeadedModel,
    ids: torch.Tensor,
    windows: Sequence[TokenWindow],
    blocks: Blocks | None = None,
    *,
    top_k: int = TOP_K,
    ranks: Ranks = ALONE,
    on_tokens: OnTokens = lambda count: None,
) -> Paired:
    """Measure two models on the same windows over `ids`, int64 [n]. `blocks` None: windows are independent.

    Raises NeuzipError for vocabularies of different sizes, for a token that a model does not have, and for
    losses that are not finite.
    """
    for model in (base, other):
        model.require_tokens(ids)
    if base.vocabulary != other.vocabulary:
        raise NeuzipError(
            f"{base.name} knows {base.vocabulary:,} tokens, {other.name} {other.vocabulary:,}",
            "only models with the same tokens can be compared",
        )
    for one, another in ((base, other), (other, base)):
        if another.formed is not None:
            one.form_logits(f"it is compared with {another.name}, of which {another.formed}")
    k = min(top_k, base.vocabulary)

    def measure(batch: WindowBatch) -> Mapping[str, torch.Tensor]:
        of_base, of_other = (model.predictions(batch.ids, batch.rows) for model in (base, other))
        step = divergence(of_base, of_other, batch.targets, top_k=k)
        assert step.overlap is not None
        for model, statistics in ((base, step.base), (other, step.other)):
            require_finite(model, statistics.nll)
        require_finite(other, step.kld, "divergence")
        return {
            "base_nll": step.base.nll,
            "other_nll": step.other.nll,
            "kld": step.kld,
            "agrees": step.base.argmax == step.other.argmax,
            "shared": step.overlap,
        }

    measured = over_windows(measure, ids, windows, ROWS[base.device.type], ranks=ranks, on_tokens=on_tokens)
    return Paired(**measured, k=k, blocks=blocks or blocks_of(windows))


def require_finite(model: HeadedModel, values: torch.Tensor, what: str = "loss") -> None:
    """Raise NeuzipError where a model gave NaN or infinity."""
    broken = ~values.isfinite()
    if bool(broken.any()):
        raise NeuzipError(
            f"{model.name}: the {what} of {int(broken.sum())} of {values.numel()} tokens is "
            f"{float(values[broken][0])}",
            "the weights may be broken, or `dtype` may be too narrow for them: try float32",
        )
