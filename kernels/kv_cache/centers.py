"""Centers of keys: the mean of a text's first tokens, turned on as the rotary embedding turns keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LEAST_BLOCK = 64
"""Tokens of a block at least: a program that stores, loads or attends meets two blocks at most at a time."""


@dataclass(frozen=True, eq=False)
class CenterPath:
    """Which channels of a head have a center, and how it turns on from one block of tokens to the next.

    still  bool [width]: the channels that have a center
    table  fp32 [blocks, 2, width]: cosine and sine of the angle in the middle of each block; the sine is
           negative for the first channel of a pair. Blocks behind the last are as the last
    block  tokens of a block, LEAST_BLOCK or more; the first block begins with the first token of a text
    begin  the first channel that positions turn
    pairs  how many pairs of channels turn
    apart  how far the two channels of a pair lie apart: `pairs`, or 1 for neighbours

    The center of block b is center * table[b, 0] + partner * table[b, 1], where `partner` is that of the
    other channel of a pair. A rotary embedding adds the angle rate * position to that of a key (arXiv
    2104.09864, equation 34), so a part that all keys had in common before goes on turning, and a mean of
    early tokens is far from it after half a turn.
    """

    still: Tensor
    table: Tensor
    block: int
    begin: int
    pairs: int
    apart: int

    @classmethod
    def of(
        cls,
        still: Tensor,
        *,
        rates: Tensor | None = None,
        begin: int = 0,
        apart: int | None = None,
        block: int = LEAST_BLOCK,
        tokens: int = 1,
        origin: float = 0.0,
        device: torch.device | None = None,
    ) -> CenterPath:
        """The path for texts of so many `tokens`, of a mean that was taken around position `origin`.

        `rates` fp64 [pairs] are radians a token, of the pairs from channel `begin` on; None: nothing turns.
        `apart` is how far the channels of a pair lie apart: None for as many as there are pairs, or 1.
        Raises ValueError for a smaller block than LEAST_BLOCK.
        """
        if block < LEAST_BLOCK:
            raise ValueError(f"`block={block}`: a block of a center has {LEAST_BLOCK} tokens or more")
        rates = torch.zeros(0, dtype=torch.float64) if rates is None else rates
        apart = max(len(rates), 1) if apart is None else apart
        signed = torch.zeros(len(still), dtype=torch.float64)
        signed[begin : begin + 2 * len(rates)] = in_pairs(-rates, rates, apart)
        middles = torch.arange(max(1, -(-tokens // block)), dtype=torch.float64) * block + (block - 1) / 2
        angles = (middles - origin)[:, None] * signed
        table = torch.stack([angles.cos(), angles.sin()], 1).float()
        return cls(still, table, block, begin, len(rates), apart).to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.still.nbytes + self.table.nbytes

    def to(self, device: torch.device | None) -> CenterPath:
        """This path on another device."""
        return replace(self, still=self.still.to(device), table=self.table.to(device))

    def at(self, center: Tensor, begin: int, end: int) -> Tensor:
        """The centers fp32 [H, blocks, width] of the blocks from `begin` to `end` - 1.

        `center` is the mean, fp32 [H, width]. An operation has one rounding.
        """
        angles = self.table[torch.arange(begin, end).clamp(max=len(self.table) - 1)]
        turned = slice(self.begin, self.begin + 2 * self.pairs)
        partner = center.clone()
        if self.pairs:
            one, other = torch.unflatten(center[:, turned], 1, (-1, 2, self.apart)).unbind(2)
            partner[:, turned] = torch.stack([other, one], 2).flatten(1)
        return center[:, None] * angles[:, 0] + partner[:, None] * angles[:, 1]

    def move(self, x: Tensor, center: Tensor, first: Tensor, whole: int, sign: int) -> None:
        """Add `sign` times the centers fp32 [B, H, width] to x fp32 [B, H, T, width], in place.

        Token first[b] of x is the first of text b. The `whole` tokens from there on, and those before, stay.
        """
        tokens = x.shape[2]
        for text, place in enumerate(first.tolist()):
            begin = max(place + whole, 0)
            if begin >= tokens:
                continue
            blocks = range((begin - place) // self.block, (tokens - 1 - place) // self.block + 1)
            centers = sign * self.at(center[text], blocks.start, blocks.stop)
            for block in blocks:
                end = min(place + (block + 1) * self.block, tokens)
                x[text, :, begin:end] += centers[:, block - blocks.start, None]
                begin = end


def in_pairs(first: Tensor, second: Tensor, apart: int) -> Tensor:
    """Numbers [pairs] of the first and of the second channels of pairs, in the order of channels."""
    return torch.stack([first.view(-1, apart), second.view(-1, apart)], 1).flatten()
