"""How close an attention's output is to the exact one, in the figures of SageAttention's tables."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Similarity:
    """Cosine similarity, sum |O - O'| / sum |O|, and the root of the mean square of O - O'."""

    cosine: float
    relative_l1: float
    rmse: float

    @property
    def score(self) -> float:
        """By this SageAttention2 ranks layers: higher is closer, 1 the same."""
        return self.cosine * (1 - self.relative_l1)


def similarity(out: Tensor, exact: Tensor) -> Similarity:
    """How alike two tensors of one shape are, over all numbers, in fp64; zeros are 1 with zeros, else 0.

    SageAttention2 (arXiv 2411.10958), section 4.1.
    """
    out, exact = out.double().flatten(), exact.double().flatten()
    error = out - exact
    norms = float(out.norm() * exact.norm())
    size, off = float(exact.abs().sum()), float(error.abs().sum())
    same = off == 0
    return Similarity(
        cosine=float(out @ exact) / norms if norms else float(same),
        relative_l1=off / size if size else (0.0 if same else float("inf")),
        rmse=float(error.square().mean().sqrt()) if error.numel() else 0.0,
    )
