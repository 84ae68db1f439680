"""Predicted bytes of the tensors of a group in every scheme, and the squared error of rounding them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neuzip.compress.pieces import Map, pieces
from neuzip.compress.rules import LOSSLESS
from neuzip.compress.scheme import Scheme
from neuzip.compress.schemes import lossless, truncated
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.eval.measures.histograms import TOP_BITS, Counts
from neuzip.eval.plans.tensor_groups import TensorGroup
from neuzip.eval.quantize.checkpoint_parameters import read_bits
from neuzip.kernels.float_fields import FORMATS, Bits, Census, FloatFormat, census, non_finite
from neuzip.kernels.float_fields.values import to_float64

FINEST = 15
"""Largest number of mantissa bits of a rounding scheme; with more a tensor is lossless."""

OnWork = Callable[[int], None]


def ignore_progress(_: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class SchemeChoice:
    """One scheme for some tensors: their bytes when stored, and what rounding does to them.

    `squares` is the sum of the squared errors, `original_squares` that of the weights that have errors.
    """

    scheme: Scheme
    nbytes: int
    squares: float
    original_squares: float = 1.0

    @property
    def relative_error(self) -> float:
        """The squared error as a share of the squares."""
        return self.squares / (self.original_squares or 1.0)


@dataclass(frozen=True)
class GroupCandidates:
    """A group and its choices, the lossless one first, then ever fewer mantissa bits.

    `of_tensors` are the choices of each of its tensors, of which those of the group are the sums.
    """

    group: TensorGroup
    choices: tuple[SchemeChoice, ...]
    of_tensors: tuple[tuple[SchemeChoice, ...], ...] = ()

    @classmethod
    def of(cls, group: TensorGroup, of_tensors: Sequence[tuple[SchemeChoice, ...]]) -> GroupCandidates:
        """The candidates of a group, from the choices of its tensors, which have the same schemes."""
        choices = [
            SchemeChoice(
                same[0].scheme,
                sum(choice.nbytes for choice in same),
                sum(choice.squares for choice in same),
                sum(choice.original_squares for choice in same),
            )
            for same in zip(*of_tensors, strict=True)
        ]
        return cls(group, tuple(choices), tuple(of_tensors))


def predict_candidates(
    source: FolderSource,
    groups: Sequence[TensorGroup],
    block_size: int | None,
    workers: Workers,
    on_bytes: OnWork = ignore_progress,
) -> list[GroupCandidates]:
    """Predict the bytes of every group in every scheme, and the squared error.

    Nothing is coded: `lossless.expected_bytes`. `on_bytes` is told of bytes done.
    """
    candidates = []
    for group in groups:
        schemes, of_tensors = schemes_of(group, block_size), []
        for tensor in group.tensors:
            bits, stored = read_bits(source, tensor), tensor.name not in group.aliases
            of_tensors.append(
                tuple(
                    SchemeChoice(
                        scheme,
                        _expected_bytes(tensor, bits, scheme, workers.map) if stored else 0,
                        squares,
                        original,
                    )
                    for scheme, squares, original in _squares(tensor, bits, schemes, workers.map)
                )
            )
            on_bytes(tensor.info.nbytes)
        candidates.append(GroupCandidates.of(group, of_tensors))
    return candidates


def schemes_of(group: TensorGroup, block_size: int | None) -> list[Scheme]:
    """The schemes for a group: lossless, then ever fewer mantissa bits."""
    formats = [FORMATS[t.info.dtype] for t in group.tensors]
    if not all(truncated.normalisable(fmt) for fmt in formats):
        block_size = None
    most = min(FINEST, max(fmt.mantissa_bits for fmt in formats) - 1)
    return [LOSSLESS, *(Scheme("truncated", k, block_size) for k in range(most, -1, -1))]


def restore_rounded(tensor: SourceTensor, bits: Bits, scheme: Scheme, parallel: Map = map) -> Bits:
    """The bit patterns that a tensor has after it was stored in a scheme."""
    rounding = _rounding(tensor, bits, scheme)
    if rounding is None:
        return bits
    parts = parallel(lambda piece: rounding.restore(*rounding.apply(bits[slice(*piece)])), pieces(bits.size))
    return np.concatenate(list(parts))


def _rounding(tensor: SourceTensor, bits: Bits, scheme: Scheme) -> truncated.Rounding | None:
    """The rounding of a tensor by a scheme; None if it changes nothing."""
    fmt = FORMATS[tensor.info.dtype]
    k = scheme.mantissa_bits
    if k is None or k >= fmt.mantissa_bits or non_finite(bits, fmt).any():
        return None
    return truncated.Rounding(fmt, k, scheme.block_size)


def _expected_bytes(tensor: SourceTensor, bits: Bits, scheme: Scheme, parallel: Map) -> int:
    """About the bytes of a tensor's streams, or of the tensor where it would not shrink."""
    fmt, rounding = FORMATS[tensor.info.dtype], _rounding(tensor, bits, scheme)

    def count(piece: tuple[int, int]) -> Census:
        part = bits[slice(*piece)]
        return census(part if rounding is None else rounding.apply(part)[0], fmt)

    counted = functools.reduce(operator.add, parallel(count, pieces(bits.size)))
    expected = lossless.expected_bytes(counted, bits.size, fmt)
    if rounding is not None:
        expected += truncated.normaliser_bytes(bits.size, rounding.block_size)
    return min(expected, tensor.info.nbytes)


def _squares(
    tensor: SourceTensor, bits: Bits, schemes: Sequence[Scheme], parallel: Map
) -> Iterator[tuple[Scheme, float, float]]:
    """The squared error of a tensor in each scheme, and the sum of its squares; 0 and 0 where it is exact.

    Of formats of up to 16 bits every pattern is rounded once, however many weights have it.
    """
    fmt, counts = FORMATS[tensor.info.dtype], None
    if fmt.bits <= TOP_BITS and all(scheme.block_size is None for scheme in schemes):
        parts = parallel(lambda piece: Counts.of(bits[slice(*piece)], fmt), pieces(bits.size))
        counted = functools.reduce(operator.add, parts).top
        patterns = np.flatnonzero(counted)
        bits, counts = patterns.astype(fmt.dtype), counted[patterns]
    for scheme in schemes:
        restored = restore_rounded(tensor, bits, scheme, parallel)
        if restored is bits:
            yield scheme, 0.0, 0.0
        elif counts is not None:
            before, after = to_float64(bits, fmt), to_float64(restored, fmt)
            yield scheme, float(counts @ (after - before) ** 2), float(counts @ before**2)
        else:
            error = _error(bits, restored, fmt, parallel)
            yield scheme, error.squares, error.original_squares


def _error(bits: Bits, restored: Bits, fmt: FloatFormat, parallel: Map) -> truncated.ErrorSums:
    parts = parallel(
        lambda piece: truncated.ErrorSums.between(bits[slice(*piece)], restored[slice(*piece)], fmt),
        pieces(bits.size),
    )
    return sum(parts, truncated.ErrorSums())
