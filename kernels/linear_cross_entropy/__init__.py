"""A linear head's logits, worked with and never all in memory: statistics, divergences, the cross-entropy.

A head with a vocabulary of 256,000 gives 8,192 tokens 8 GB of logits, of which one number a token is wanted
(Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"). Here logits exist in tiles, in
fp32, and what a tile says of a token is folded into what the others said:

    token_statistics(head, target)        log-sum-exp, target's logit, argmax, entropy, rank of the target
    divergence(base, other, target)       the same of two heads, KL(base || other), overlap of their top k
    linear_cross_entropy(input, ...)      the loss, with gradients

On a GPU Triton does it (files in triton/), on a CPU torch (cpu.py,
gradients.py). reference.py says in fp64 what the first two mean. The same inputs give the same bits.
"""

from __future__ import annotations

from neuzip.kernels.linear_cross_entropy.ops import divergence, token_statistics

from .gradients import linear_cross_entropy
from .head import Divergence, Head, TokenStatistics

__all__ = ["Divergence", "Head", "TokenStatistics", "divergence", "linear_cross_entropy", "token_statistics"]
