"""What a scheme is to the rest of the room: one codec, found by its records and by its name in rules.

    rules     `kind`, `keys` and `check`: how plan files name the scheme; `applies`: to which tensors
    sizes     `predict`: stored bytes, from a sample
    encode    a tensor to a record and streams
    decode    streams and a record to ranges of the tensor

A further scheme is one file: a subclass of Codec, one of neuzip.formats.records.Record, and a call of
`register`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from neuzip.compress.pieces import Fill, Map, ReadBytes, ReadStream
from neuzip.compress.scheme import KINDS, Scheme, require_own_keys
from neuzip.compress.sources.source import SourceTensor, TensorSource
from neuzip.errors import NeuzipError
from neuzip.formats import records
from neuzip.formats.container import Stream
from neuzip.formats.records import LosslessRecord, Record
from neuzip.formats.safetensors_file import DTYPE_BITS, TensorInfo
from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat

if TYPE_CHECKING:
    import torch

    from neuzip.compress.gpu import Gpu
    from neuzip.compress.prepared import Codes
    from neuzip.compress.workers import Workers
    from neuzip.kernels.grid import Grid

SAMPLED_BLOCKS = 12
"""Blocks of a tensor that a prediction looks at."""


RecordT = TypeVar("RecordT", bound=Record)


class Declined(Exception):
    """A scheme cannot store a tensor: keep it lossless. The text is a note that says why, or empty."""


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor's record and streams. `note` says why it is stored otherwise than planned, or is empty.

    There are no streams for a tensor that is stored raw, or that is the base's.
    """

    record: Record
    streams: Mapping[str, Stream]
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all streams."""
        return sum(stream.nbytes for stream in self.streams.values())

    def with_note(self, note: str) -> EncodedTensor:
        """The tensor with a further note, which goes before its own."""
        return replace(self, note="; ".join(text for text in (note, self.note) if text))


@dataclass(frozen=True)
class TensorInput:
    """A tensor to be coded: what it is, how its bytes are read, and who computes.

    `online` is the quantization_config of a checkpoint that transformers makes ternary in every forward
    pass, or None. `prepared` are codes and their grid for the scheme "quantized"; None rounds to nearest.
    """

    info: TensorInfo
    read_bytes: ReadBytes
    parallel: Map = map
    gpu: Gpu | None = None
    online: Mapping[str, Any] | None = None
    prepared: tuple[Codes, Grid] | None = None

    @property
    def numel(self) -> int:
        """Number of weights."""
        return self.info.numel

    @property
    def fmt(self) -> FloatFormat:
        """The float format of the dtype. Raises KeyError for other dtypes."""
        return FORMATS[self.info.dtype]

    def read(self, start: int, stop: int) -> Bits:
        """The bit patterns of weights `start` to `stop`."""
        size = self.fmt.bits // 8
        return self.read_bytes(start * size, stop * size).view(self.fmt.dtype)

    @cached_property
    def sample(self) -> Bits:
        """The bit patterns of a few blocks that are spread over the tensor."""
        blocks = -(-self.numel // rans.BLOCK)
        chosen = np.unique(np.linspace(0, blocks - 1, min(SAMPLED_BLOCKS, blocks)).astype(int))
        return np.concatenate(
            [self.read(b * rans.BLOCK, min((b + 1) * rans.BLOCK, self.numel)) for b in map(int, chosen)]
        )


class RangeDecoder(Protocol):
    """What decodes ranges of one tensor."""

    def read(self, start: int, stop: int, /) -> Bits:
        """The bit patterns of weights `start` to `stop`. Raises NeuzipError for corrupt streams."""


@dataclass(frozen=True)
class StoredTensor(Generic[RecordT]):
    """A tensor of a container: its record, and how its streams, its holder and its base are read.

    `length` gives the length of a stream in bytes. On `gpu`, if there is one, `fill` brings parts of streams.
    """

    info: TensorInfo
    record: RecordT
    read_stream: ReadStream
    length: Callable[[str], int]
    read_raw: ReadBytes
    holder: Callable[[], ReadBytes]
    base: Callable[[], ReadBytes]
    gpu: Gpu | None = None
    fill: Fill | None = None

    @property
    def fmt(self) -> FloatFormat:
        """The float format of the dtype. Raises KeyError for other dtypes."""
        return FORMATS[self.info.dtype]


@dataclass(frozen=True)
class FloatCoding:
    """How a tensor's floats are coded, for a decoder that gets the streams elsewhere. Their lengths agree.

    `planes` says by width where in `sign_mantissa` each plane begins.
    """

    fmt: FloatFormat
    mantissa_bits: int
    block_size: int | None
    table: rans.Table
    planes: dict[int, int]


@dataclass(frozen=True)
class GridCoding:
    """How a tensor's codes are coded, for a decoder that gets the streams elsewhere. Their lengths agree.

    The stream `grid` has the `step`, then a factor byte for each of `rows` and of `columns`: 0 without any.
    `code_bits` are those of a code that are coded, above the `low_bits`.
    """

    fmt: FloatFormat
    code_bits: int
    low_bits: int
    row_weights: int
    step: float
    rows: int
    columns: int
    table: rans.Table


class Codec(Generic[RecordT]):
    """One scheme. Subclasses name the type of their records, and `kind` if rules may name the scheme.

    `keys` are the keys that rules give to `scheme_type`, a dataclass that is Scheme or a subclass of it.
    `rounds` says whether tensors lose anything; None where only encoding tells. `coding_streams` are the
    streams, short ones, that `coding` reads.
    """

    record: type[RecordT]
    kind: ClassVar[str | None] = None
    keys: tuple[str, ...] = ()
    scheme_type: type[Scheme] = Scheme
    rounds: ClassVar[bool | None] = False
    coding_streams: ClassVar[tuple[str, ...]] = ()

    def check(self, scheme: Scheme) -> None:
        """Raise UsageError for values of a scheme that do not exist, or that it does not have."""
        require_own_keys(scheme)

    def words(self, scheme: Scheme) -> str:
        """The scheme in a few words."""
        return scheme.kind

    def applies(self, info: TensorInfo, scheme: Scheme) -> tuple[Scheme, str]:
        """What the scheme comes to for a tensor's name, dtype and shape, and why it is another one, or ""."""
        return scheme, ""

    def hint_without_match(self, glob: str) -> str | None:
        """What to do where no tensor's name matches a rule of this scheme; None for the usual hint."""
        return None

    def require_possible(self, source: TensorSource, tensors: Sequence[SourceTensor]) -> None:
        """Raise NeuzipError if the scheme makes no sense for some tensors that rules give it to."""

    def refuse_destruction(
        self, source: TensorSource, tensors: Sequence[tuple[SourceTensor, Scheme]], workers: Workers
    ) -> None:
        """Raise NeuzipError if the scheme would destroy the model that some tensors are part of."""

    def streams(self, scheme: Scheme) -> tuple[str, ...]:
        """The streams that a tensor of this scheme gets."""
        return tuple(self.record.STREAMS)

    def forms(self, info: TensorInfo, scheme: Scheme) -> list[Sequence[str]]:
        """The streams of forms that a tensor may get, for which a container's header leaves room."""
        return [tuple(LosslessRecord.STREAMS), self.streams(scheme)]

    def describe(self, record: RecordT, dtype: str) -> str:
        """The scheme of a stored tensor in a few words."""
        return record.text

    def bound(self, record: RecordT) -> Literal["fields", "codes"] | None:
        """What entropy bounds the stored bytes: of sign, exponent and mantissa, of whole weights, or none."""
        return "fields"

    def predict(self, tensor: TensorInput, scheme: Scheme) -> int:
        """The stored bytes of a tensor, extrapolated from a sample; by default of its smallest exact form."""
        return min(filter(None, (codec.predict_exact(tensor) for codec in CODECS.values())))

    def predict_exact(self, tensor: TensorInput) -> int | None:
        """The stored bytes of a tensor in a form that keeps every bit; None where this scheme has none."""
        return None

    def encode(self, tensor: TensorInput, scheme: Scheme) -> EncodedTensor:
        """Record and streams. Raises Declined for a tensor to be kept lossless, or NotWorthwhile for raw.

        By default a tensor gets its smallest exact form.
        """
        raise Declined

    def encode_exact(self, tensor: TensorInput) -> EncodedTensor | None:
        """Record and streams that keep every bit; None, Declined or NotWorthwhile where there are none."""
        return None

    def takes(self, dtype: str) -> bool:
        """Whether tensors of a dtype can have this scheme."""
        return dtype in FORMATS

    def decoder(self, stored: StoredTensor[RecordT]) -> RangeDecoder:
        """What decodes ranges of a tensor from its streams. Raises NeuzipError where they break a rule."""
        raise NotImplementedError

    def reader(self, stored: StoredTensor[RecordT]) -> ReadBytes:
        """read(start, stop) for the restored bytes of a tensor. It and this raise NeuzipError."""
        decoder, size = self.decoder(stored), DTYPE_BITS[stored.info.dtype] // 8
        return lambda start, stop: decoder.read(start // size, stop // size).view(np.uint8)

    def check_without_base(self, stored: StoredTensor[RecordT]) -> None:
        """Check what streams hold, as far as that goes without a base. Raises NeuzipError."""

    def coding(self, stored: StoredTensor[RecordT]) -> FloatCoding | GridCoding | None:
        """How the decoder on a GPU reads the streams; None for a tensor that it cannot decode."""
        return None

    def decode_on(
        self,
        info: TensorInfo,
        record: RecordT,
        streams: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> torch.Tensor:
        """The tensor's bytes (uint8) on `device`, from streams (uint8) there, where there is no `coding`.

        By default the CPU decodes. Raises NeuzipError before memory is taken that a wrong header may claim.
        """
        import torch

        here = {name: stream.cpu().numpy() for name, stream in streams.items()}

        def nothing() -> ReadBytes:
            raise NeuzipError(f"a tensor that is stored {record.scheme} has no bytes elsewhere")

        stored = StoredTensor(
            info, record, lambda name, start, stop: here[name][start:stop],
            lambda name: here[name].nbytes, lambda start, stop: nothing()(start, stop), nothing, nothing,
        )  # fmt: skip
        return torch.from_numpy(self.reader(stored)(0, info.nbytes).copy()).to(device)


CODECS: dict[type[Record], Codec[Any]] = {}
"""All codecs by the type of their records."""


def register(codec: Codec[Any]) -> None:
    """Make a scheme known: to rules and plan files by its `kind`, to readers by the type of its records.

    Raises ValueError for a scheme that is known already.
    """
    if codec.kind is not None and codec.kind in KINDS:
        raise ValueError(f"the scheme {codec.kind!r} is known already")
    records.register(codec.record)
    CODECS[codec.record] = codec
    if codec.kind is not None:
        KINDS[codec.kind] = codec


def codec_of(record: Record) -> Codec[Any]:
    """What decodes a stored tensor."""
    return CODECS[type(record)]


def codec_for(scheme: Scheme) -> Codec[Any]:
    """What encodes tensors of a scheme."""
    codec = KINDS[scheme.kind]
    assert isinstance(codec, Codec)
    return codec


def describe(record: Record, dtype: str) -> str:
    """The scheme of a stored tensor in a few words.

    >>> describe(records.LosslessRecord("0" * 16, mantissa_bits=7, streams={}), "F32")
    'lossless, 7 of 23 mantissa bits'
    """
    return codec_of(record).describe(record, dtype)


def checksums(streams: Mapping[str, Stream]) -> dict[str, str]:
    """The checksum of every stream."""
    return {name: stream.checksum for name, stream in streams.items()}
