"""What a recovery was: how far from the original before and after, and how training went."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from neuzip.cli.output import Output
from neuzip.cli.text import count_text, seconds_text
from neuzip.errors import NeuzipError, shell

if TYPE_CHECKING:
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.train.recovery.run import Recovered
    from neuzip.train.text import TrainingWindows

LAST = 20
"""Steps, at most, whose mean loss is told."""


def show_comparison(out: Output, when: str, comparison: Comparison) -> None:
    """A line of how far a model is from the original."""
    ratio, kld = comparison.perplexity_ratio, comparison.kld.mean
    out.text(
        f"{when:6}  perplexity {ratio.value:.4f} times the original's, KLD {kld.value:.4f} nats per token,"
        f" top-1 agreement {comparison.top_1.value:.1%}"
    )


def warn_if_worse(out: Output, before: Comparison, after: Comparison) -> None:
    """Say so if training has moved a model away from the original."""
    if after.kld.mean.value > before.kld.mean.value:
        out.warning(
            "training moved the model away from the original", "train for more steps, or with a lower --lr"
        )


def losses_text(losses: list[float]) -> str:
    """What training began and ended with, each a mean of some steps: single ones differ by their windows.

    >>> losses_text([3.0, 2.0, 1.5, 1.0])
    'training loss 2.5000 at the start, 1.2500 at the end (means of 2 steps)'
    """
    count = max(1, min(LAST, len(losses) // 2))
    first, last = fmean(losses[:count]), fmean(losses[-count:])
    of = "" if count == 1 else f" (means of {count} steps)"
    return f"training loss {first:.4f} at the start, {last:.4f} at the end{of}"


def show_recovery(out: Output, dst: Path, result: Recovered, windows: TrainingWindows) -> dict[str, Any]:
    """Say what was done, and give it as figures."""
    from neuzip.train.recovery.run import LOG, PICTURE

    figures = result.figures
    if not figures:
        raise NeuzipError("the budget was too short for a single step", "give more time")
    seconds = sum(one["seconds"] for one in figures)
    tokens = int(sum(one["tokens"] for one in figures))
    weights = sum(one.codes.numel() for one in result.ternary.values())
    if not result.is_complete:
        out.warning(f"the budget ended after {len(figures)} of {result.steps} steps")
    out.text(
        f"{count_text(len(figures), 'step')}, {tokens:,} tokens"
        f" ({tokens / windows.tokens:.1f} times the text)"
        f" in {seconds_text(seconds)}, {tokens / seconds:,.0f} tokens/s"
    )
    out.text(losses_text([one["loss"] for one in figures]))
    out.text(f"{dst}: {len(result.ternary)} tensors with {weights:,} weights are ternary")
    out.text(f"losses: {dst / PICTURE}, and by step in {dst / LOG}")
    out.status(f"to compress it: {shell('neuzip', 'compress', dst, f'{dst}.nz', '--ternary')}")
    return {
        "steps": len(figures), "planned_steps": result.steps, "resumed_at": result.resumed_at,
        "tokens": tokens, "text_tokens": windows.tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds, "tensors": sorted(result.ternary), "weights": weights,
        "last": figures[-1],
    }  # fmt: skip
