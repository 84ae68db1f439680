"""What a checkpoint would take and lose at some numbers of bits a weight, predicted from a sample of it.

Matrices are quantised on uniform grids, one step a tensor, and their codes entropy-coded. All steps are the
same multiple of sigma, the root mean square of the tensor's weights: without a text no tensor is known to be
more sensitive than another. Everything else stays lossless.

    bytes          of everything: quantised matrices, other tensors, headers
    step           in units of sigma
    relative_l2    the error of the quantised matrices, in the Euclidean norm

These follow from the weights alone. How far predictions move only a text can tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from neuzip.compress.schemes.code_tables import choose_coding, code_bits
from neuzip.compress.schemes.codec import TensorInput
from neuzip.compress.schemes.raw import without_coding
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.formats.checkpoint import adapter_files
from neuzip.kernels.float_fields import Census, FloatFormat, non_finite
from neuzip.kernels.float_fields.values import to_float64

RATES = (8.0, 6.0, 5.0, 4.0, 3.5, 3.0, 2.5)
"""Bits a weight that are predicted."""

POWERS = (-7, -6, -5.75, -5.5, -5.25, -5, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 2)

STEPS = tuple(2.0**power for power in POWERS)
"""Steps at which size and error are computed, in units of sigma, rising; between them they are interpolated.

The size is about linear in the logarithm, but for the largest steps, and for those at which a table has no
room for all codes.
"""

MAX_CODE = (1 << 15) - 1
"""The largest code; the least is one below its negative."""

GRID_BYTES = 16
"""Bytes of the step of a tensor, padded."""

RECORD_BYTES = 100
"""Bytes of the record of a quantized tensor beyond those of a lossless one: code bits, checksum, loss."""


@dataclass(frozen=True)
class RatePrediction:
    """A checkpoint at a number of bits a weight: its size in bytes, the step, and the error.

    `step` is in units of sigma and `relative_l2` a share of the weights' norm. Both are None for sizes that
    no step reaches, as the tensors that are not quantised take too much.
    """

    bits_per_weight: float
    nbytes: int
    step: float | None
    relative_l2: float | None

    def to_json(self, original_bytes: int) -> dict[str, Any]:
        """The fields, and the size as a share of the original's."""
        return {
            "bits_per_weight": self.bits_per_weight,
            "stored_bytes": self.nbytes,
            "ratio": self.nbytes / original_bytes if original_bytes else None,
            "step": self.step,
            "relative_l2": self.relative_l2,
        }


@dataclass(frozen=True)
class RateCurve:
    """What some tensors take and lose at each of STEPS.

    nbytes          bytes of all of them, [steps]
    squared_errors  summed over all of them, [steps]
    squares         sum of the squared weights
    """

    nbytes: npt.NDArray[np.float64]
    squared_errors: npt.NDArray[np.float64]
    squares: float

    def __add__(self, other: RateCurve) -> RateCurve:
        return RateCurve(
            self.nbytes + other.nbytes,
            self.squared_errors + other.squared_errors,
            self.squares + other.squares,
        )

    def at(self, nbytes: float) -> tuple[float, float] | None:
        """Step and relative error at a size, at most those of the finest step; None below the coarsest."""
        if not self.squares or nbytes < self.nbytes[-1]:
            return None
        larger = np.flatnonzero(self.nbytes > nbytes)
        if not larger.size:
            return STEPS[0], self._error(STEPS[0])
        place = int(larger[-1])
        before, after = map(float, self.nbytes[place : place + 2])
        step = STEPS[place] * (STEPS[place + 1] / STEPS[place]) ** ((before - nbytes) / (before - after))
        return step, self._error(step)

    def _error(self, step: float) -> float:
        """The relative error at a step, to which it is about proportional."""
        return float(np.interp(step, STEPS, np.sqrt(self.squared_errors / self.squares)))


def predict_rates(
    curve: RateCurve, lossless_bytes: int, whole_bytes: int, weights: int, rates: Sequence[float] = RATES
) -> tuple[RatePrediction, ...]:
    """Step and error at each rate below the lossless size.

    curve           of the tensors that are quantised
    lossless_bytes  what these tensors take without loss
    whole_bytes     what everything takes without loss, these tensors among it
    weights         elements of everything, by which bits are divided
    """
    rest = whole_bytes - lossless_bytes
    predictions = []
    for rate in rates:
        nbytes = math.floor(rate * weights / 8)
        if nbytes >= whole_bytes:
            continue
        step, error = curve.at(nbytes - rest) or (None, None)
        predictions.append(RatePrediction(rate, nbytes, step, error))
    return tuple(predictions)


@dataclass(frozen=True, eq=False)
class WeightSample:
    """Some weights of a matrix: different values, fp64 [n], and how often each occurs, int64 [n]."""

    values: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    fmt: FloatFormat
    numel: int
    lossless_bytes: int

    @classmethod
    def of(cls, tensor: TensorInput, lossless_bytes: int) -> WeightSample | None:
        """The sample from which other sizes are predicted too; None for one with infinities or NaNs."""
        bits, fmt = tensor.sample, tensor.fmt
        if non_finite(bits, fmt).any():
            return None
        if fmt.bits <= 16:
            every = np.bincount(bits, minlength=1 << fmt.bits)
            patterns = np.flatnonzero(every)
            values, counts = to_float64(patterns.astype(fmt.dtype), fmt), every[patterns]
        else:
            values, counts = to_float64(bits, fmt), np.ones(bits.size, np.int64)
        return cls(values, counts, fmt, tensor.numel, lossless_bytes)

    @property
    def squares(self) -> float:
        """The sum of the squares of the sampled weights."""
        return float((self.counts * self.values * self.values).sum())

    def curve(self) -> RateCurve:
        """Size and error of the whole tensor at each of STEPS.

        The tensor is lossless where codes would take more than that, or do not fit into 16 bits.
        """
        sampled = int(self.counts.sum())
        scale, sigma = self.numel / sampled, math.sqrt(self.squares / sampled)
        nbytes = np.full(len(STEPS), float(self.lossless_bytes))
        errors = np.zeros(len(STEPS))
        for place, relative in enumerate(STEPS if sigma else ()):
            exact = np.rint(self.values / (relative * sigma))
            if abs(exact).max() > MAX_CODE:
                continue
            codes = exact.astype(np.int64)
            coded = self._coded_bytes(codes)
            if coded < self.lossless_bytes:
                nbytes[place] = coded
                levels = rounded(np.arange(codes.min(), codes.max() + 1) * (relative * sigma), self.fmt)
                difference = self.values - levels[codes - codes.min()]
                errors[place] = scale * float((self.counts * difference * difference).sum())
        return RateCurve(nbytes, errors, scale * self.squares)

    def _coded_bytes(self, codes: npt.NDArray[np.int64]) -> int:
        """About the bytes of the streams of all codes, as if neighbours were independent."""
        bits = code_bits(int(codes.min()), int(codes.max()))
        counts = np.bincount(codes + (1 << (bits - 1)), self.counts, 1 << bits).astype(np.int64)
        return choose_coding(Census(None, counts, 0), self.numel).nbytes + GRID_BYTES + RECORD_BYTES


def rounded(numbers: npt.NDArray[np.float64], fmt: FloatFormat) -> npt.NDArray[np.float64]:
    """Rising numbers, rounded to a format of up to 16 bits; as they are for a wider one."""
    if fmt.bits > 16:
        return numbers
    known = _finite_values(fmt)
    above = np.clip(np.searchsorted(known, numbers), 1, known.size - 1)
    below = above - 1
    return np.where(numbers - known[below] < known[above] - numbers, known[below], known[above])


@cache
def _finite_values(fmt: FloatFormat) -> npt.NDArray[np.float64]:
    """The finite numbers of a format of up to 16 bits, rising."""
    patterns = np.arange(1 << fmt.bits, dtype=fmt.dtype)
    return np.unique(to_float64(patterns[~non_finite(patterns, fmt)], fmt))


def rates_of(
    source: FolderSource,
    tensors: Sequence[SourceTensor],
    stored: Mapping[tuple[str, str], int],
    whole_bytes: int,
    workers: Workers,
) -> tuple[RatePrediction, ...]:
    """Predict what some tensors of a plain checkpoint take and lose at each of RATES below the lossless size.

    `stored` are the bytes that each takes without loss, by file and name, `whole_bytes` those of all, headers
    included.
    """
    adapters = frozenset(adapter_files(source.checkpoint))
    matrices = [
        t for t in tensors
        if len(t.info.shape) > 1 and stored[t.file, t.name]
        and t.file not in adapters and not without_coding(t.info)
    ]  # fmt: skip

    def sampled(tensor: SourceTensor) -> tuple[RateCurve | None, int]:
        lossless = stored[tensor.file, tensor.name]
        sample = WeightSample.of(TensorInput(tensor.info, source.reader(tensor)), lossless)
        return (None if sample is None else sample.curve()), lossless

    known = [(curve, size) for curve, size in workers.map(sampled, matrices) if curve is not None]
    if not known:
        return ()
    curve = reduce(add, (one for one, _ in known))
    weights = sum(t.info.numel for t in tensors)
    return predict_rates(curve, sum(size for _, size in known), whole_bytes, weights)
