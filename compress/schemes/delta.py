"""Tensors of a delta: those of the base, and differences from them.

`difference` faces `DeltaCodec`, which restores it; the numbers in the streams are those of delta_coding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from neuzip.compress.pieces import PIECE, ReadBytes, digest, is_worthwhile
from neuzip.formats.records import BaseRecord, DeltaRecord
from neuzip.formats.safetensors_file import DTYPE_BITS
from neuzip.kernels.delta import Digits
from neuzip.kernels.float_fields import FORMATS, Bits, Census, plane_bytes

from .codec import Codec, EncodedTensor, StoredTensor, TensorInput, checksums, register
from .delta_coding import DeltaDecoder, encode

SMALLEST = 4096
"""Bytes of a changed tensor from which on its difference is coded; a smaller one is stored as it is."""


@dataclass(frozen=True)
class Difference(EncodedTensor):
    """A tensor as its difference from the base's. Coded alone it takes `least` bytes or more."""

    least: int = 0


def difference(new: TensorInput, old: TensorInput, file: str | None, *, code: bool) -> Difference | None:
    """The difference of a tensor from the base's, which is in `file` of a folder; None if it saves nothing.

    Without `code` it is only found out whether the two are the same.
    """
    info = new.info
    if info.dtype not in FORMATS or not code or info.nbytes < SMALLEST:
        return _same(new, old, file)
    fmt, hashes = new.fmt, (xxhash.xxh3_64(), xxhash.xxh3_64())

    def observe(*pair: Bits) -> None:
        for running, bits in zip(hashes, pair, strict=True):
            running.update(bits.data)

    coded = encode(new.read, old.read, info.numel, fmt, new.parallel, observe)
    checksum, base = (running.hexdigest() for running in hashes)
    if coded is None:
        return Difference(BaseRecord(checksum, of=old.info.name, file=file), {})
    if not is_worthwhile(coded.nbytes, info.nbytes):
        return None
    mantissas = Census(None, np.empty(0, np.int64), coded.union & ((1 << fmt.mantissa_bits) - 1))
    record = DeltaRecord(
        checksum, of=old.info.name, file=file, base=base, shift=coded.cut.shift, low_bits=coded.cut.low,
        digits=coded.digits, streams=checksums(coded.streams),
    )  # fmt: skip
    least = plane_bytes(1 + mantissas.kept_bits(fmt), info.numel)
    return Difference(record, coded.streams, least=least)


def _same(new: TensorInput, old: TensorInput, file: str | None) -> Difference | None:
    """A tensor that is the base's; None if it is not. Read in pieces of as many weights as coders take."""
    nbytes = new.info.nbytes
    step = PIECE * DTYPE_BITS.get(new.info.dtype, 8) // 8
    for at in range(0, nbytes, step):
        stop = min(at + step, nbytes)
        if not np.array_equal(new.read_bytes(at, stop), old.read_bytes(at, stop)):
            return None
    return Difference(BaseRecord(digest(new.read_bytes, nbytes), of=old.info.name, file=file), {})


class BaseCodec(Codec[BaseRecord]):
    """A tensor of the base, as it is there."""

    record = BaseRecord

    def reader(self, stored: StoredTensor[BaseRecord]) -> ReadBytes:
        """read(start, stop) for the bytes of the base's tensor."""
        return stored.base()


class DeltaCodec(Codec[DeltaRecord]):
    """A difference that is added to the base's tensor."""

    record = DeltaRecord

    def decoder(self, stored: StoredTensor[DeltaRecord]) -> _DeltaAndBase:
        """What decodes ranges of a tensor, and adds them to the base's. Raises NeuzipError without a base."""
        read_base = stored.base()
        return _DeltaAndBase(self.differences(stored), TensorInput(stored.info, read_base))

    def differences(self, stored: StoredTensor[DeltaRecord]) -> DeltaDecoder:
        """What decodes the differences alone. Raises NeuzipError where the streams break a rule."""
        fmt, record = stored.fmt, stored.record
        cut = Digits(fmt.bits, record.shift, record.low_bits)
        return DeltaDecoder(
            stored.read_stream, stored.length, stored.info.numel, fmt, cut, record.digits, stored.gpu
        )

    def check_without_base(self, stored: StoredTensor[DeltaRecord]) -> None:
        """Decode what the streams hold, which needs no base. Raises NeuzipError."""
        self.differences(stored).check()


@dataclass(frozen=True)
class _DeltaAndBase:
    """A difference and the base's tensor, which restore a tensor together."""

    differences: DeltaDecoder
    base: TensorInput

    def read(self, start: int, stop: int) -> Bits:
        """The bit patterns of weights `start` to `stop`."""
        return self.differences.read(start, stop, self.base.read)


register(BaseCodec())
register(DeltaCodec())
