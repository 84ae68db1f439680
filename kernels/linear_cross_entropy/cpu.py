"""On a CPU: torch in fp32, in blocks of logits that stay in its caches, the weights read once.

A block is `ROWS` tokens times `COLUMNS` of the vocabulary. What it says of a token is folded into sums in
fp64 that are relative to the largest logit so far (online softmax, Milakov and Gimelshein 2018).

Weights are copied into a buffer of fp32, and so are hidden states: the library that multiplies may give
other last bits at other alignments, and equal models have to give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.kernels.packed_linear import ops as packed_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor

from . import sums
from .head import Divergence, Head, TokenStatistics

ROWS = 1024
COLUMNS = 2048

NOTHING = -200.0
"""exp of it is 0 in fp32, and 0 times it is 0, which 0 times minus infinity is not."""

NEAR = 1.0
"""For |u| below it expm1(-u) + u is what loses less, above it the difference of exponentials."""


def token_statistics(head: Head, target: Tensor, ignore_index: int) -> TokenStatistics:
    """The statistics of each token. Raises IndexError for a target outside the vocabulary."""
    stream = _Stream(head, target, ignore_index)
    for start, weight in _weights(head):
        for rows in _slices(head.tokens, ROWS):
            stream.add(stream.logits(rows, start, weight), rows, start)
    return stream.statistics()


def divergence(base: Head, other: Head, target: Tensor, ignore_index: int, top_k: int | None) -> Divergence:
    """Both heads in one pass. Raises IndexError for a target outside the vocabulary."""
    streams = [_Stream(head, target, ignore_index) for head in (base, other)]
    tops = [_Top(base.tokens, top_k) for _ in streams] if top_k else []
    difference = _Difference.zeros(base.tokens)
    for (start, weight), (_, other_weight) in zip(_weights(base), _weights(other), strict=True):
        for rows in _slices(base.tokens, ROWS):
            before = [stream.largest[rows].clone() for stream in streams]
            z = [
                stream.logits(rows, start, one)
                for stream, one in zip(streams, (weight, other_weight), strict=True)
            ]
            for top, one in zip(tops, z, strict=False):
                top.add(one, rows, start)
            mine, others = (stream.add(one, rows, start) for stream, one in zip(streams, z, strict=True))
            difference.add(mine, others, rows, before, [stream.largest[rows] for stream in streams])
    first, second = (stream.statistics() for stream in streams)
    kld = sums.kullback_leibler(streams[0].total, streams[1].total, difference.shift, difference.excess)
    kld = kld.masked_fill(first.lse.isnan() | second.lse.isnan(), torch.nan).float()
    return Divergence(first, second, kld, sums.overlap(tops[0].keys, tops[1].keys) if tops else None)


@dataclass(frozen=True)
class _Block:
    """A block of logits z: its largest ones [R]; y = z less these, and exp(y), [R, C]."""

    largest: Tensor
    y: Tensor
    exponentials: Tensor


class _Stream:
    """What the blocks so far say of each token: sums of exponentials e = exp(y), y relative to `largest`."""

    def __init__(self, head: Head, target: Tensor, ignore_index: int) -> None:
        n = head.tokens
        self.head, self.counted = head, target != ignore_index
        self.hidden = torch.empty(n, head.hidden.shape[1], dtype=torch.float32).copy_(head.hidden)
        self.bias = None if head.bias is None else head.bias.float()
        self.target = torch.where(self.counted, target, 0).long()
        _check_range(self.target, head.vocabulary)
        self.expected = self._transform(self._target_products(), self.target)
        self.target_logit = torch.full((n,), torch.nan)
        self.largest = torch.full((n,), -torch.inf)
        self.total, self.weighted = torch.zeros(2, n, dtype=torch.float64)
        self.rank = torch.zeros(n, dtype=torch.int64)
        self.argmax = torch.full((n,), -1)
        self._z, self._e = torch.empty(2, min(n, ROWS) * min(head.vocabulary, COLUMNS), dtype=torch.float32)

    def logits(self, rows: slice, start: int, weight: Tensor) -> Tensor:
        """Those of some tokens and of the vocabulary from `start` on; the next call uses their memory."""
        hidden = self.hidden[rows]
        z = self._z[: hidden.shape[0] * weight.shape[0]].view(hidden.shape[0], -1)
        torch.mm(hidden, weight.T, out=z)
        return self._transform(z, slice(start, start + weight.shape[0]))

    def add(self, z: Tensor, rows: slice, start: int) -> _Block:
        """Fold a block in. Its logits are overwritten."""
        self._add_target(z, rows, start)
        largest = z.amax(1)
        self._add_argmax(z, largest, rows, start)
        y = z.sub_(_finite(largest)[:, None])
        e = torch.exp(y, out=self._e[: y.numel()].view(y.shape))
        merged = torch.maximum(self.largest[rows], largest)
        old, new = (_scale(m, merged) for m in (self.largest[rows], largest))
        total, weighted = e.sum(1).double(), torch.linalg.vecdot(e, y.clamp(min=NOTHING)).double()
        # e^(y + d) (y + d) for all of one side, where d is how far its maximum lies below the new one.
        self.weighted[rows] = old.factor * (
            self.weighted[rows] + old.distance * self.total[rows]
        ) + new.factor * (weighted + new.distance * total)
        self.total[rows] = old.factor * self.total[rows] + new.factor * total
        self.largest[rows] = merged
        return _Block(largest, y, e)

    def statistics(self) -> TokenStatistics:
        """After the last block."""
        lse = (self.largest.double() + self.total.log()).where(self.total > 0, torch.nan).float()
        undefined = lse.isnan()
        entropy = sums.entropy(self.total, self.weighted).float().masked_fill(undefined, torch.nan)
        target_logit = self.target_logit.masked_fill(~self.counted, torch.nan)
        rank = self.rank.masked_fill(undefined | ~self.counted, -1)
        return TokenStatistics(lse, target_logit, self.argmax.masked_fill(undefined, -1), entropy, rank)

    def _transform(self, x: Tensor, columns: slice | Tensor) -> Tensor:
        """From products to logits, in place."""
        if self.bias is not None:
            x.add_(self.bias[columns])
        if self.head.scale != 1.0:
            x.mul_(self.head.scale)
        cap = self.head.softcap
        return x if cap is None else x.div_(cap).tanh_().mul_(cap)

    def _target_products(self) -> Tensor:
        """hidden * weight[target], summed: other last bits than a block's, but enough to count the larger."""
        weight, products = self.head.weight, torch.empty(self.head.tokens, dtype=torch.float32)
        for rows in _slices(self.head.tokens, ROWS):
            ids = self.target[rows]
            chosen = packed_linear.rows(weight, ids) if isinstance(weight, PackedTensor) else weight[ids]
            products[rows] = torch.linalg.vecdot(self.hidden[rows], chosen.float())
        return products

    def _add_target(self, z: Tensor, rows: slice, start: int) -> None:
        column = self.target[rows] - start
        inside = (column >= 0) & (column < z.shape[1])
        logit = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        self.target_logit[rows] = torch.where(inside, logit, self.target_logit[rows])
        expected = self.expected[rows]
        larger = torch.gt(z, expected[:, None], out=self._e[: z.numel()].view(z.shape)).sum(1)
        self.rank[rows] += larger.long() - (inside & (logit > expected)).long()

    def _add_argmax(self, z: Tensor, largest: Tensor, rows: slice, start: int) -> None:
        better = (largest > self.largest[rows]).nonzero()[:, 0]
        self.argmax[rows.start + better] = start + z[better].argmax(1)


@dataclass(frozen=True)
class _Difference:
    """Two of the sums of `sums.kullback_leibler`, fp64 [N], relative to the largest logits so far."""

    shift: Tensor
    excess: Tensor
    total: Tensor

    @classmethod
    def zeros(cls, tokens: int) -> _Difference:
        """Before the first block."""
        return cls(*torch.zeros(3, tokens, dtype=torch.float64))

    def add(
        self, base: _Block, other: _Block, rows: slice, before: list[Tensor], after: list[Tensor]
    ) -> None:
        """Fold in what a block says: `before` and `after` it are the largest logits of base and other."""
        e, f, u = base.exponentials, other.exponentials, base.y.sub_(other.y)
        product = torch.mul(e, u, out=other.y).nan_to_num_(0.0, torch.inf, -torch.inf)  # 0 * inf is nothing
        near = torch.expm1(-u).add_(u).mul_(e)
        excess = torch.where(u.abs_() < NEAR, near, f.sub_(e).add_(product)).sum(1)
        total = e.sum(1)
        sides = (
            (self.total[rows], self.shift[rows], self.excess[rows], before),
            (total.double(), product.sum(1).double(), excess.double(), [base.largest, other.largest]),
        )
        moved = [_moved(*side, after) for side in sides]
        for mine, parts in zip((self.total, self.shift, self.excess), zip(*moved, strict=True), strict=True):
            mine[rows] = parts[0] + parts[1]


def _moved(
    total: Tensor, shift: Tensor, excess: Tensor, at: list[Tensor], to: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums moved to other maxima: u grows by d, the difference of the two distances."""
    base, other = (_scale(one, another) for one, another in zip(at, to, strict=True))
    d = base.distance - other.distance
    moved_shift = (base.factor * (shift + d * total)).where(base.factor > 0, 0.0)
    growth = (other.factor - base.factor + base.factor * d) * total + (base.factor - other.factor) * shift
    moved_excess = other.factor * excess + growth
    return base.factor * total, moved_shift, moved_excess


@dataclass(frozen=True)
class _Scale:
    """How far a maximum lies below another, fp64 [R], and the exponential of that."""

    distance: Tensor
    factor: Tensor


def _scale(at: Tensor, to: Tensor) -> _Scale:
    """Where nothing was there before, minus infinity, the distance is one whose product with 0 is 0."""
    distance = (at.double() - _finite(to).double()).clamp(min=-1e9)
    return _Scale(distance, distance.exp())


class _Top:
    """The keys of the k largest logits so far, [N, k]: see `sums.ranking`."""

    def __init__(self, tokens: int, k: int) -> None:
        self.keys = torch.full((tokens, k), torch.iinfo(torch.int64).min)

    def add(self, z: Tensor, rows: slice, start: int) -> None:
        """Fold a block in. Only tokens with a logit above the last of their k need a look."""
        chosen = (~(z.amax(1) <= sums.logit_of(self.keys[rows].amin(1)))).nonzero()[:, 0]
        if not chosen.numel():
            return
        part, k = z[chosen], min(self.keys.shape[1], z.shape[1])
        logits, columns = part.topk(k)
        keys = sums.ranking(logits, columns + start)
        tied = ((part >= logits[:, -1:]).sum(1) != k).nonzero()[:, 0]  # topk takes any of those
        if tied.numel():
            every = sums.ranking(part[tied], torch.arange(start, start + z.shape[1]))
            keys[tied] = every.topk(k).values
        both = torch.cat([self.keys[rows.start + chosen], keys], 1)
        self.keys[rows.start + chosen] = both.topk(self.keys.shape[1], sorted=False).values


def _weights(head: Head) -> Iterator[tuple[int, Tensor]]:
    """Rows of the weights in fp32, `COLUMNS` at a time in the same memory, with the first one's number."""
    weight, (v, d) = head.weight, head.weight.shape
    buffer = torch.empty(min(v, COLUMNS), d, dtype=torch.float32)
    for rows in _slices(v, COLUMNS):
        part = packed_linear.decode(weight, rows) if isinstance(weight, PackedTensor) else weight[rows]
        yield rows.start, buffer[: part.shape[0]].copy_(part)


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _finite(largest: Tensor) -> Tensor:
    """Maxima as something to subtract: minus infinity less itself would be NaN, less 0 it stays."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _check_range(target: Tensor, vocabulary: int) -> None:
    if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < vocabulary:
        raise IndexError(
            f"targets go from {int(target.min())} to {int(target.max())}, in a vocabulary of {vocabulary}"
        )
