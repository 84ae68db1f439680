"""From a planned tensor to its record and streams: all candidates of one tensor, and which of them is stored.

    delta      the difference from the base's tensor, where that takes less than the tensor alone
    ternary    codes and scales, where a rule says so, or where the values are ternary and that takes less
    rounded    fewer mantissa bits, where a rule says so
    lossless   exponents through rANS
    raw        the bytes themselves, where nothing takes less

Nothing is written here, and nothing of one tensor is remembered for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from neuzip.formats.container import Stream
from neuzip.formats.manifest import TensorRecord
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat

from . import lossless, truncated
from .delta_base import DeltaBase
from .device import CPU, Device
from .lossless import PIECE, Map, NotWorthwhile, Read
from .plan import PlannedTensor, bitnet_converts, try_ternary
from .scheme import Scheme
from .source import Bytes, SourceTensor, TensorSource, digest

if TYPE_CHECKING:
    from . import ternary
    from .gpu import Gpu

SMALL = PIECE
"""Weights up to which a tensor is one job and read at once; larger ones are split among the workers."""


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor's record and streams. `note` says why it is stored otherwise than planned, or is empty.

    There are no streams for a tensor that is stored raw, or that is the base's.
    """

    record: TensorRecord
    streams: Mapping[str, Stream]
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all streams."""
        return sum(stream.nbytes for stream in self.streams.values())


class _Declined(Exception):
    """A scheme cannot store the tensor, for the reason given, or does not change it: keep it lossless."""


@dataclass(frozen=True)
class _Floats:
    """A tensor to be coded: its dtype, its bit patterns by range, and who computes."""

    tensor: SourceTensor
    fmt: FloatFormat
    read: Read
    parallel: Map
    gpu: Gpu | None

    @property
    def numel(self) -> int:
        """Number of weights."""
        return self.tensor.info.numel


class TensorEncoder:
    """Codes tensors of `source`, as differences from a `base` if there is one. For several threads.

    `online` is the quantization_config of a checkpoint that transformers makes ternary in every forward
    pass, if it is one. The bytes are the same on any `device`.
    """

    def __init__(
        self,
        source: TensorSource,
        device: Device = CPU,
        base: DeltaBase | None = None,
        online: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._base = base
        self._online = online

    def encode(self, planned: PlannedTensor, parallel: Map = map) -> EncodedTensor:
        """Record and streams of a tensor that is no alias: the smallest of its candidates.

        `parallel` computes the pieces of a large one. Raises NeuzipError where the source cannot be read.
        """
        if self._base is None or planned.is_adapter:
            return self._encode_alone(planned, parallel)
        difference = self._base.encode(
            self._source, planned.tensor, parallel, code=planned.scheme.kind != "raw"
        )
        if difference is None:
            return self._encode_alone(planned, parallel)
        if difference.nbytes > difference.least:
            alone = self._encode_alone(planned, parallel)
            if alone.streams and alone.nbytes < difference.nbytes:
                return alone
        return EncodedTensor(difference.record, difference.streams)

    def _encode_alone(self, planned: PlannedTensor, parallel: Map) -> EncodedTensor:
        """The smallest candidate that needs no base."""
        tensor, scheme = planned.tensor, planned.scheme
        reader = self._source.reader(tensor)
        if scheme.kind == "raw":
            return _raw(tensor, reader)
        if tensor.info.numel <= SMALL:
            data = reader(0, tensor.info.nbytes)
            reader = lambda start, stop: data[start:stop]  # noqa: E731
        gpu, note = self._gpu_for(tensor)
        fmt = FORMATS[tensor.info.dtype]
        floats = _Floats(tensor, fmt, _patterns(reader, fmt), parallel, gpu)
        try:
            return _with_note(self._as_planned(floats, scheme), note)
        except _Declined as reason:
            note = _joined(note, str(reason))
        except NotWorthwhile:
            return _with_note(_raw(tensor, reader), note)
        smallest = min(_exact_candidates(floats, scheme), key=lambda c: c.nbytes, default=None)
        return _with_note(smallest or _raw(tensor, reader), note)

    def _gpu_for(self, tensor: SourceTensor) -> tuple[Gpu | None, str]:
        """The GPU that codes a tensor, and a note if it is too large for the one that would."""
        gpu = self._device.gpu_for(tensor.info.numel)
        if gpu is None or gpu.has_room_for(tensor.info.nbytes):
            return gpu, ""
        return None, f"too large for the memory of {self._device.name}: coded on the CPU"

    def _as_planned(self, floats: _Floats, scheme: Scheme) -> EncodedTensor:
        """A tensor by a scheme that rounds. Raises _Declined for any other scheme, or NotWorthwhile."""
        if scheme.kind == "ternary":
            return _ternary(floats, scheme, self._is_online(floats.tensor))
        if scheme.mantissa_bits is not None:
            return _rounded(floats, truncated.Rounding(floats.fmt, scheme.mantissa_bits, scheme.block_size))
        raise _Declined

    def _is_online(self, tensor: SourceTensor) -> bool:
        return self._online is not None and bitnet_converts(tensor.name, self._online)


def _exact_candidates(floats: _Floats, scheme: Scheme) -> Iterator[EncodedTensor]:
    """What stores every bit of a tensor in fewer bytes than the tensor has."""
    with suppress(NotWorthwhile):
        yield _lossless(floats)
    if try_ternary(floats.tensor, scheme, floats.read):
        with suppress(_Declined):
            yield _ternary_exact(floats)


def _raw(tensor: SourceTensor, reader: Callable[[int, int], Bytes]) -> EncodedTensor:
    return EncodedTensor(TensorRecord("raw", digest(reader, tensor.info.nbytes)), {})


def _lossless(floats: _Floats) -> EncodedTensor:
    """Every bit kept. Raises NotWorthwhile."""
    whole = xxhash.xxh3_64()
    mantissa_bits, streams = lossless.encode(
        floats.read,
        floats.numel,
        floats.fmt,
        floats.parallel,
        lambda bits: whole.update(bits.data),
        floats.gpu,
    )
    return EncodedTensor(
        TensorRecord("lossless", whole.hexdigest(), mantissa_bits, streams=checksums(streams)), streams
    )


def _rounded(floats: _Floats, rounding: truncated.Rounding) -> EncodedTensor:
    """Fewer mantissa bits. Raises _Declined for weights that do not round or need not, or NotWorthwhile."""
    whole = xxhash.xxh3_64()
    try:
        mantissa_bits, streams, loss, restored = truncated.encode(
            floats.read,
            floats.numel,
            rounding,
            floats.parallel,
            lambda bits: whole.update(bits.data),
            floats.gpu,
        )
    except truncated.NonFinite as error:
        raise _Declined("holds infinities or NaNs: kept lossless") from error
    original = whole.hexdigest()
    if restored == original:
        raise _Declined
    record = TensorRecord(
        "truncated", restored, mantissa_bits, rounding.block_size, original, loss, checksums(streams)
    )
    return EncodedTensor(record, streams)


def _ternary(floats: _Floats, scheme: Scheme, for_absmean: bool) -> EncodedTensor:
    """Codes and scales by a scheme. Raises _Declined for weights that are better, or have to be, kept."""
    from . import ternary  # loads torch

    bits = floats.read(0, floats.numel)
    weight = ternary.as_tensor(bits, floats.fmt, floats.tensor.info.shape)
    try:
        coded = ternary.encode(weight, scheme, for_absmean=for_absmean)
    except ternary.NoTernaryForm as reason:
        raise _Declined(f"{reason}: kept lossless") from reason
    except NotWorthwhile as error:
        raise _Declined("takes no less as codes and scales: kept lossless") from error
    return _of_codes(coded, bits, floats.fmt)


def _ternary_exact(floats: _Floats) -> EncodedTensor:
    """Codes and scales that give every bit back. Raises _Declined for weights that have none."""
    from . import ternary  # loads torch

    bits = floats.read(0, floats.numel)
    try:
        coded = ternary.encode_exact(ternary.as_tensor(bits, floats.fmt, floats.tensor.info.shape))
    except (ternary.NoTernaryForm, NotWorthwhile) as error:
        raise _Declined from error
    encoded = _of_codes(coded, bits, floats.fmt)
    if not encoded.record.lossless:  # zeros have signs
        raise _Declined
    return encoded


def _of_codes(coded: ternary.Encoded, bits: Bits, fmt: FloatFormat) -> EncodedTensor:
    """The record of a ternary tensor, whose original has these bits."""
    from . import ternary  # loads torch

    original = xxhash.xxh3_64_hexdigest(bits.data)
    restored, loss = ternary.restored(coded, bits, fmt)
    lossy, layout = restored != original, coded.layout
    record = TensorRecord(
        "ternary", restored, original=original if lossy else None, loss=loss if lossy else None,
        streams=checksums(coded.streams), quantizer=coded.quantizer, packing=layout.packing,
        scale_dtype=layout.scale_dtype, group=layout.group,
    )  # fmt: skip
    return EncodedTensor(record, coded.streams, "all its weights are 0" if coded.is_zero else "")


def checksums(streams: Mapping[str, Stream]) -> dict[str, str]:
    """The checksum of every stream."""
    return {name: stream.checksum for name, stream in streams.items()}


def _patterns(reader: Callable[[int, int], Bytes], fmt: FloatFormat) -> Read:
    size = fmt.bits // 8
    return lambda start, stop: reader(start * size, stop * size).view(fmt.dtype)


def _with_note(encoded: EncodedTensor, note: str) -> EncodedTensor:
    """A tensor with a further note, which goes before its own."""
    return replace(encoded, note=_joined(note, encoded.note))


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
