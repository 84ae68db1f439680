"""Micro-batches: the rows of a batch that pass through a layer at once, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from neuzip.errors import NeuzipError, UsageError
from neuzip.train.model_shell import LayerArguments
from neuzip.train.model_weights import ModelWeights

IGNORED = -100
"""Target of a token that is not predicted, as in transformers."""


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch between forward and backward pass: B rows of T tokens, U of them different.

    row_numbers  int64 [B, T], where each token's row is among `rows`
    mask         [B, T], the attention mask, or None
    targets      int64 [B * T], IGNORED where nothing is predicted
    tokens       int64 [U], the different tokens
    rows         [U, D], the embeddings of `tokens`
    arguments    of each layer, beside the hidden states
    states       [B, T, D], the input of each layer, and the output of the last
    rng_states   random generator states before the embedding and before each layer
    gradient     [B, T, D], of the hidden states that the backward pass has reached
    """

    row_numbers: Tensor
    mask: Tensor | None
    targets: Tensor
    tokens: Tensor
    rows: nn.Parameter
    arguments: list[LayerArguments] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    rng_states: list[list[Tensor]] = field(default_factory=list)
    gradient: Tensor | None = None


def micro_batches(
    batch: Tensor | Mapping[str, Tensor], size: int | None, weights: ModelWeights
) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches of `size` rows, None for one, with their embeddings.

    Raises UsageError for a batch of another form, NeuzipError for tokens outside the vocabulary.
    """
    ids, labels, mask = ids_targets_mask(batch)
    embedding, device = weights.embedding, weights.device
    if int(ids.min()) < 0 or int(ids.max()) >= embedding.slot.shape[0]:
        raise NeuzipError(
            f"a batch has tokens from {int(ids.min())} to {int(ids.max())}, the model has "
            f"{embedding.slot.shape[0]}",
            "use the tokenizer that belongs to it",
        )
    size = size or ids.shape[0]
    for start in range(0, ids.shape[0], size):
        part = slice(start, start + size)
        tokens, row_numbers = torch.unique(ids[part].to(device), return_inverse=True)
        rows = nn.Parameter(embedding.look_up(tokens, weights.buffers.buffer()))
        part_mask = None if mask is None else mask[part].to(device)
        yield MicroBatch(row_numbers, part_mask, labels[part].to(device).reshape(-1), tokens, rows)


def ids_targets_mask(batch: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids and targets [B, T], and a mask, of a batch as `Trainer.step` takes it. Raises UsageError."""
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.shape[1] < 2 or not batch.shape[0]:
            raise UsageError(
                f"a batch of the shape {tuple(batch.shape)}", "give windows [B, T + 1] of tokens"
            )
        return batch[:, :-1], batch[:, 1:], None
    if "input_ids" not in batch:
        raise UsageError("a batch without input_ids", 'give windows [B, T + 1], or {"input_ids": ..., ...}')
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = batch.get("labels", ids)
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORED)
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return ids, targets, mask
