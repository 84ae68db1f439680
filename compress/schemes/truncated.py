"""Fewer mantissa bits, as in NeuZip (arXiv 2410.20650, section 2.2): round, then code the rest losslessly.

With a block normaliser every block of B weights is divided by n = 1 + q/256, the fraction of its largest
weight, before rounding, and multiplied by the same n after it. The largest weight then has an empty mantissa
and survives the rounding; q is one byte a block.

    bf16               n holds a weight's whole fraction: a block's largest weight comes back exactly
    fp16, fp32, fp64   n holds the first 8 bits of it, rounded up

Encoder and decoder use the same quantised n. Rounding is to nearest even, carries into the exponent and never
reaches infinity. A tensor with an infinity or a NaN is not rounded at all: it is kept lossless.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from neuzip.compress.pieces import Map, Observe, Read, ReadStream, expect_length, ignore, padded, pieces
from neuzip.compress.scheme import Scheme, require_own_keys
from neuzip.errors import NeuzipError, UsageError
from neuzip.formats.container import Stream, padded_stream
from neuzip.formats.records import CODED_FLOATS, Loss, TruncatedRecord, is_block_size
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels.float_fields import (
    FORMATS,
    Bits,
    FloatFormat,
    census,
    non_finite,
    round_mantissa,
)
from neuzip.kernels.float_fields.values import error_sums, scale, to_float64

from . import lossless
from .codec import (
    Codec,
    Declined,
    EncodedTensor,
    FloatCoding,
    StoredTensor,
    TensorInput,
    checksums,
    register,
)
from .lossless import LOSSLESS, LosslessDecoder, OnGpu, on_gpu
from .raw import RAW, without_coding

if TYPE_CHECKING:
    from neuzip.compress.gpu import Gpu

KEEP_ALL = "keep them all"
"""How a note ends that says why a tensor is not rounded although a rule rounds it."""

BLOCK_SIZES = "a power of two from 8 to 16384"


WIDENED = 1 << 16
"""Weights whose errors are summed at once: as fp64 they fit into a cache of the second level."""


class NonFinite(Exception):
    """The tensor holds an infinity or a NaN."""


def normalisable(fmt: FloatFormat) -> bool:
    """Whether a block normaliser makes sense: fp8 is too coarse for one."""
    return fmt.bits >= 16


def normaliser_bytes(numel: int, block_size: int | None) -> int:
    """What the normalisers of a tensor take: one byte a block, none without blocks."""
    return 0 if block_size is None else padded(-(-numel // block_size))


@dataclass(frozen=True)
class Rounding:
    """Rounding to `mantissa_bits`, normalised by blocks of `block_size` weights, or not (None)."""

    fmt: FloatFormat
    mantissa_bits: int
    block_size: int | None = None

    def apply(self, bits: Bits) -> tuple[Bits, npt.NDArray[np.uint8]]:
        """Round whole blocks: the patterns to store, and the blocks' normalisers (none without blocks)."""
        if self.block_size is None:
            return round_mantissa(bits, self.fmt, self.mantissa_bits), np.empty(0, np.uint8)
        normaliser = self._normalisers(bits)
        divided = scale(bits, self._factors(normaliser, bits.size), self.fmt, divide=True)
        stored = round_mantissa(divided, self.fmt, self.mantissa_bits)
        # A weight near the largest finite one may round up past it: then take the step below.
        overflow = non_finite(self.restore(stored, normaliser), self.fmt)
        stored[overflow] -= self.fmt.dtype.type(1 << (self.fmt.mantissa_bits - self.mantissa_bits))
        return stored, normaliser

    def restore(self, stored: Bits, normaliser: npt.NDArray[np.uint8]) -> Bits:
        """The weights that stored patterns stand for: the inverse of `apply`, up to the rounding."""
        if self.block_size is None:
            return stored
        return scale(stored, self._factors(normaliser, stored.size), self.fmt)

    def _normalisers(self, bits: Bits) -> npt.NDArray[np.uint8]:
        """q of every block: the first 8 bits of the fraction of its largest magnitude, rounded up."""
        assert self.block_size is not None
        magnitudes = bits & self.fmt.dtype.type((1 << (self.fmt.bits - 1)) - 1)
        largest = to_float64(
            np.maximum.reduceat(magnitudes, np.arange(0, bits.size, self.block_size)), self.fmt
        )
        mantissa, _ = np.frexp(largest)  # in [0.5, 1), or 0 for a block of zeros
        fraction = np.where(largest > 0, 2 * mantissa - 1, 0.0)
        return np.asarray(np.minimum(np.ceil(fraction * 256), 255), np.uint8)

    def _factors(self, normaliser: npt.NDArray[np.uint8], numel: int) -> npt.NDArray[np.float64]:
        return np.repeat(1 + normaliser / 256, self.block_size or 1)[:numel]


def encode(
    read: Read,
    numel: int,
    rounding: Rounding,
    parallel: Map = map,
    observe: Observe = ignore,
    gpu: Gpu | None = None,
) -> tuple[int, dict[str, Stream], Loss, str]:
    """Round and code a tensor: the mantissa bits stored, the streams, the loss, and the restored checksum.

    `observe` is shown all pieces in order, once, before they are rounded. They are coded on `gpu`, if that is
    given, but rounded here. Raises NonFinite, or NotWorthwhile when the streams would be no smaller than the
    tensor.
    """
    fmt = rounding.fmt
    coder = gpu.coder(numel, fmt) if gpu is not None and numel else None

    def check(piece: tuple[int, int]) -> tuple[Bits, Bits, npt.NDArray[np.uint8], ErrorSums]:
        bits = read(*piece)
        if non_finite(bits, fmt).any():
            raise NonFinite
        stored, normaliser = rounding.apply(bits)
        if coder is not None:
            coder.put(piece[0], stored)
        restored = rounding.restore(stored, normaliser)
        return bits, restored, normaliser, ErrorSums.between(bits, restored, fmt)

    normalisers, error, running = [np.empty(0, np.uint8)], ErrorSums(), xxhash.xxh3_64()
    for bits, restored, normaliser, part in parallel(check, pieces(numel)):
        observe(bits)
        normalisers.append(normaliser)
        error += part
        running.update(restored.data)
    if coder is not None:
        kept_bits, streams = lossless.finish(coder, numel, fmt)
    else:
        kept_bits, streams = lossless.encode(
            lambda start, stop: rounding.apply(read(start, stop))[0], numel, fmt, parallel
        )
    if rounding.block_size is not None:
        streams["normaliser"] = padded_stream(normalisers)
    return kept_bits, streams, error.loss, running.hexdigest()


class TruncatedDecoder:
    """Decodes ranges of one rounded tensor: the inverse of `encode`."""

    def __init__(
        self,
        read_stream: ReadStream,
        length: Callable[[str], int],
        numel: int,
        rounding: Rounding,
        on_gpu: OnGpu | None = None,
    ) -> None:
        self.inner = LosslessDecoder(
            read_stream, length, numel, rounding.fmt, rounding.mantissa_bits, on_gpu, rounding.block_size
        )
        self._on_gpu = on_gpu
        self._read_stream = read_stream
        self._rounding = rounding
        if rounding.block_size is not None:
            if not normalisable(rounding.fmt):
                raise NeuzipError(f"{rounding.fmt.name} takes no normaliser, so no block_size")
            expected = normaliser_bytes(numel, rounding.block_size)
            expect_length("normaliser", length("normaliser"), expected)

    def read(self, start: int, stop: int) -> Bits:
        """The restored patterns of weights `start` to `stop`."""
        size = self._rounding.block_size
        if size is None or start == stop or self._on_gpu is not None:
            return self.inner.read(start, stop)
        first, last = start // size, -(-stop // size)
        begin = first * size
        normaliser = self._read_stream("normaliser", first, last)
        stored = self.inner.read(begin, stop)
        return self._rounding.restore(stored, normaliser)[start - begin :]


@dataclass(frozen=True)
class ErrorSums:
    """Sums from which a tensor's errors follow; those of its pieces add up, always in the same order."""

    max_relative: float = 0.0
    relative_squares: float = 0.0
    nonzero: int = 0
    squares: float = 0.0
    original_squares: float = 0.0

    @classmethod
    def between(cls, original: Bits, restored: Bits, fmt: FloatFormat) -> ErrorSums:
        """Errors of `restored` against `original`, both finite. In fp64, summed in a fixed order."""
        sums = cls()
        for start in range(0, original.size, WIDENED):
            part = slice(start, start + WIDENED)
            numbers = to_float64(original[part], fmt), to_float64(restored[part], fmt)
            sums = cls(*error_sums(*numbers, astuple(sums)))
        return sums

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            max(self.max_relative, other.max_relative),
            self.relative_squares + other.relative_squares,
            self.nonzero + other.nonzero,
            self.squares + other.squares,
            self.original_squares + other.original_squares,
        )

    @property
    def loss(self) -> Loss:
        """The two figures of the manifest, to 6 digits."""
        rms = math.sqrt(self.relative_squares / self.nonzero) if self.nonzero else 0.0
        return Loss(_six_digits(self.max_relative), _six_digits(rms))

    @property
    def ternary_loss(self) -> Loss:
        """The figures with the error of the whole tensor: a weight that becomes 0 is off by 1."""
        l2 = self.relative_l2
        return replace(self.loss, relative_l2=_six_digits(l2) if math.isfinite(l2) else None)

    @property
    def relative_l2(self) -> float:
        """|restored - original| / |original| in the Euclidean norm."""
        if math.isinf(self.squares) or math.isinf(self.original_squares):
            return math.nan  # weights above 1e154, whose squares fp64 cannot hold
        if self.original_squares == 0:
            return math.inf if self.squares else 0.0
        return math.sqrt(self.squares / self.original_squares)


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


class TruncatedCodec(Codec[TruncatedRecord]):
    """Rounded to fewer mantissa bits, and coded as lossless tensors are."""

    record = TruncatedRecord
    kind = "truncated"
    keys = ("mantissa_bits", "block_size")
    rounds = True
    coding_streams = ("table", "index")

    def check(self, scheme: Scheme) -> None:
        """Raise UsageError for numbers of bits or block sizes that do not exist."""
        require_own_keys(scheme)
        if scheme.mantissa_bits is None:
            raise UsageError(f"the scheme {scheme.kind!r} with mantissa bits {scheme.mantissa_bits}")
        for name in self.keys:
            if type(getattr(scheme, name)) not in (int, type(None)):
                raise UsageError(f"`{name}={getattr(scheme, name)!r}` is no whole number")
        if not 0 <= scheme.mantissa_bits <= 51:
            raise UsageError(
                f"{scheme.mantissa_bits} mantissa bits are not 0 to 51, which formats can be rounded to",
                "give 0 to 6 for bf16; 7 is lossless",
            )
        if scheme.block_size is not None and not is_block_size(scheme.block_size):
            raise UsageError(f"the block size {scheme.block_size} is not {BLOCK_SIZES}")

    def words(self, scheme: Scheme) -> str:
        """The scheme in a few words."""
        return f"k={scheme.mantissa_bits}" + (f" block={scheme.block_size}" if scheme.block_size else "")

    def applies(self, info: TensorInfo, scheme: Scheme) -> tuple[Scheme, str]:
        """The scheme, LOSSLESS for dtypes with no more bits than it keeps, or no blocks for coarse dtypes."""
        note = without_coding(info)
        if note:
            return RAW, note
        fmt, bits = FORMATS[info.dtype], _bits(scheme)
        if bits >= fmt.mantissa_bits:
            return LOSSLESS, f"{fmt.name} has {fmt.mantissa_bits} mantissa bits, and {bits} {KEEP_ALL}"
        if scheme.block_size is not None and not normalisable(fmt):
            return replace(scheme, block_size=None), f"{fmt.name} takes no normaliser"
        return scheme, ""

    def streams(self, scheme: Scheme) -> tuple[str, ...]:
        """The streams that a tensor of this scheme gets."""
        return tuple(CODED_FLOATS if scheme.block_size is None else TruncatedRecord.STREAMS)

    def predict(self, tensor: TensorInput, scheme: Scheme) -> int:
        """The stored bytes of a tensor, extrapolated from a sample that is rounded."""
        sample, fmt = tensor.sample, tensor.fmt
        normalisers = 0
        if not non_finite(sample, fmt).any():
            sample, _ = Rounding(fmt, _bits(scheme), scheme.block_size).apply(sample)
            normalisers = normaliser_bytes(tensor.numel, scheme.block_size)
        return lossless.expected_bytes(census(sample, fmt), tensor.numel, fmt) + normalisers

    def encode(self, tensor: TensorInput, scheme: Scheme) -> EncodedTensor:
        """Record and streams. Raises Declined for weights that do not round or need not, or NotWorthwhile."""
        whole = xxhash.xxh3_64()
        try:
            mantissa_bits, streams, loss, restored = encode(
                tensor.read, tensor.numel, Rounding(tensor.fmt, _bits(scheme), scheme.block_size),
                tensor.parallel, lambda bits: whole.update(bits.data), tensor.gpu,
            )  # fmt: skip
        except NonFinite as error:
            raise Declined("holds infinities or NaNs: kept lossless") from error
        original = whole.hexdigest()
        if restored == original:
            raise Declined
        record = TruncatedRecord(
            restored, mantissa_bits=mantissa_bits, streams=checksums(streams),
            block_size=scheme.block_size, original=original, loss=loss,
        )  # fmt: skip
        return EncodedTensor(record, streams)

    def bound(self, record: TruncatedRecord) -> Literal["fields", "codes"] | None:
        """What entropy bounds the stored bytes: none where weights were divided by a normaliser."""
        return "fields" if record.block_size is None else None

    def decoder(self, stored: StoredTensor[TruncatedRecord]) -> TruncatedDecoder:
        """What decodes ranges of a tensor."""
        record = stored.record
        rounding = Rounding(stored.fmt, record.mantissa_bits, record.block_size)
        return TruncatedDecoder(
            stored.read_stream, stored.length, stored.info.numel, rounding, on_gpu(stored)
        )

    def coding(self, stored: StoredTensor[TruncatedRecord]) -> FloatCoding:
        """How the decoder of floats on a GPU reads the streams."""
        return self.decoder(stored).inner.coding


def _bits(scheme: Scheme) -> int:
    """The mantissa bits of a scheme that rounds."""
    assert scheme.mantissa_bits is not None
    return scheme.mantissa_bits


register(TruncatedCodec())
