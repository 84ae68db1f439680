"""Records: how each tensor of a container is stored. SPEC.md, section "Manifest", is the authority.

A type of record has only the fields of its scheme, in the order of its JSON object. `register` makes a
further type known, so that manifests may hold it.

    RawRecord        the tensor's bytes, under its own name
    LosslessRecord   exponents through rANS, sign and mantissa as they are
    TruncatedRecord  fewer mantissa bits, coded in the same way
    TernaryRecord    codes of -1, 0 and 1, and scales
    QuantizedRecord  whole numbers times a step, coded as exponents are
    AliasRecord      the bytes of another tensor of the checkpoint
    BaseRecord       the bytes of a tensor of another checkpoint, the base of a delta
    DeltaRecord      the difference from a tensor of the base
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from neuzip.errors import FormatError

PACKINGS = ("trits", "2bit")
SCALE_DTYPES = ("F32", "F16")
QUANTIZERS = ("absmean", "absmean-clamped", "least-squares", "exact")
"""What ternary weights may come from. "exact": their values were ternary already."""

DELTA = "delta"
"""The feature that a manifest requires of its reader where another checkpoint is needed to restore it."""

QUANTIZED = "quantized"
"""The feature that a manifest requires of its reader where weights are whole numbers times a step."""

CODED_FLOATS = {"table": "U16", "index": "U16", "words": "U16", "sign_mantissa": "U8"}
"""The streams of floats whose exponents are coded, and their dtypes."""

Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""An xxh3-64 as 16 lower-case hexadecimal digits."""

MantissaBits = Annotated[int, Meta(ge=0, le=52)]
BlockSize = Annotated[int, Meta(ge=8, le=16384)]
"""Weights that share a normaliser."""


def one_of(choices: Sequence[str]) -> Meta:
    """The constraint that a string is one of `choices`. Literal, of msgspec, fails for a lone surrogate."""
    return Meta(pattern=rf"^(?:{'|'.join(map(re.escape, choices))})\Z")


FieldBits = Annotated[int, Meta(ge=0, le=63)]
DigitCount = Annotated[int, Meta(ge=1, le=4)]
GroupSize = Annotated[int, Meta(ge=1)]
CodeBits = Annotated[int, Meta(ge=2, le=16)]
LowBits = Annotated[int, Meta(ge=1, le=8)]
Figure = Annotated[float, Meta(ge=0, le=sys.float_info.max)]

_HEX = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True)
class Loss:
    """What rounding did to a tensor: errors relative to each non-zero weight.

    `max_relative` is the largest |restored - original| / |original|, `rms_relative` its root mean square.
    `relative_l2` is |restored - original| / |original| of the whole tensor in the Euclidean norm, which only
    ternary and quantized tensors have.
    """

    max_relative: Figure
    rms_relative: Figure
    relative_l2: Figure | None = None

    def to_json(self) -> dict[str, float]:
        """The figures that there are."""
        return {key: value for key, value in vars(self).items() if value is not None}


class Record(Struct, frozen=True):
    """How one tensor is stored. `checksum` is the xxh3-64 of the tensor's bytes as they are restored.

    A subclass names its `scheme`, as it stands in the manifest, and its `STREAMS`: the names and dtypes (U8
    or U16) of all streams that its tensors may have, in the order in which they are written.
    """

    scheme: ClassVar[str]
    STREAMS: ClassVar[Mapping[str, str]] = {}
    needs_base: ClassVar[bool] = False
    """Whether another checkpoint, the base, has a part of what the tensor restores to."""
    feature: ClassVar[str | None] = None
    """What a manifest with such a record requires of its reader, who may not know it; None for nothing."""

    checksum: Checksum

    @property
    def streams(self) -> Mapping[str, str]:
        """The tensor's streams by name, each with its xxh3-64."""
        return {}

    @property
    def original(self) -> str | None:
        """The xxh3-64 of the bytes that were compressed, where rounding made the restored ones differ."""
        return None

    @property
    def loss(self) -> Loss | None:
        """What rounding did to the tensor, where it was rounded and has bytes of its own."""
        return None

    @property
    def base_checksum(self) -> str | None:
        """The xxh3-64 of the base's tensor that this one is restored with, if it is."""
        return None

    @property
    def lossless(self) -> bool:
        """Whether the restored bytes are the original's."""
        return self.original is None

    @property
    def holder(self) -> tuple[str | None, str] | None:
        """The tensor of the same checkpoint that has the bytes: its file, None for this one, and its name."""
        return None

    @property
    def in_other_file(self) -> bool:
        """Whether another file of the checkpoint has the bytes."""
        return self.holder is not None and self.holder[0] is not None

    @property
    def stream_dtypes(self) -> Mapping[str, str]:
        """Names and dtypes of the streams that a tensor with these fields has, in the order of the file."""
        return self.STREAMS

    @property
    def text(self) -> str:
        """The scheme in a few words, as reports and `neuzip inspect` have it."""
        return self.scheme

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        return self.text

    def entries(self, name: str) -> list[str]:
        """The entries of a container that hold a tensor of this `name`."""
        return [stream_name(name, stream) for stream in self.streams]

    def invalid_field(self) -> str | None:
        """The name of a field whose value contradicts another one, or None."""
        return None

    @classmethod
    def readable(cls, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys of a record's JSON object that are read, those of the fields."""
        return {key: entry[key] for key in cls.__struct_fields__ if key in entry}

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in the manifest, without fields that do not apply."""
        entry: dict[str, Any] = {"scheme": self.scheme}
        for key in self.__struct_fields__:
            value = getattr(self, key)
            if value is not None:
                entry[key] = value.to_json() if isinstance(value, Loss) else value
        return entry


def _missing_loss(record: Record) -> str | None:
    """The name of the loss of a tensor that lost something, where the record has none."""
    return "loss" if record.original is not None and record.loss is None else None


def _without_idle_loss(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a record, less the loss of a tensor that lost nothing."""
    if fields.get("original") is not None:
        return fields
    return {key: value for key, value in fields.items() if key != "loss"}


class RawRecord(Record, frozen=True):
    """A tensor whose bytes stand in the container as they are."""

    scheme = "raw"

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        return "stored unchanged"

    def entries(self, name: str) -> list[str]:
        """The one entry of a container that holds a tensor of this `name`."""
        return [name]


class LosslessRecord(Record, frozen=True, kw_only=True):
    """Floats whose exponents are coded. `mantissa_bits` of every weight are stored; all others are 0."""

    scheme = "lossless"
    STREAMS = CODED_FLOATS

    mantissa_bits: MantissaBits
    streams: dict[str, Checksum]


class TruncatedRecord(Record, frozen=True, kw_only=True):
    """Floats rounded to `mantissa_bits`, normalised by blocks of `block_size` weights if there is one."""

    scheme = "truncated"
    STREAMS = {**CODED_FLOATS, "normaliser": "U8"}

    mantissa_bits: MantissaBits
    streams: dict[str, Checksum]
    block_size: BlockSize | None = None
    original: Checksum
    loss: Loss

    def invalid_field(self) -> str | None:
        """The block size, where it is no power of two."""
        return None if self.block_size is None or is_block_size(self.block_size) else "block_size"

    @property
    def stream_dtypes(self) -> Mapping[str, str]:
        """Names and dtypes of the streams: there is a normaliser for blocks only."""
        return CODED_FLOATS if self.block_size is None else self.STREAMS

    @property
    def text(self) -> str:
        """The scheme in a few words."""
        return f"k={self.mantissa_bits}" + (f" block={self.block_size}" if self.block_size else "")

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        bits = "1 mantissa bit" if self.mantissa_bits == 1 else f"{self.mantissa_bits} mantissa bits"
        return bits + (f" in blocks of {self.block_size}" if self.block_size is not None else "")


class TernaryRecord(Record, frozen=True, kw_only=True):
    """Weights of -1, 0 and 1 times a scale, one for `group` weights of a row, or one for the tensor (None).

    Without `original` the weights had this form already, and nothing is lost.
    """

    scheme = "ternary"
    STREAMS = {"codes": "U8", "scale": "U8"}

    quantizer: Annotated[str, one_of(QUANTIZERS)]
    packing: Annotated[str, one_of(PACKINGS)]
    scale_dtype: Annotated[str, one_of(SCALE_DTYPES)]
    group: GroupSize | None = None
    streams: dict[str, Checksum]
    original: Checksum | None = None
    loss: Loss | None = None

    @property
    def text(self) -> str:
        """The scheme in a few words."""
        group = "" if self.group is None else f" group={self.group}"
        return f"ternary {self.quantizer}{group}" + (", lossless" if self.lossless else "")

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        scales = "tensor" if self.group is None else f"{self.group} weights of a row"
        how = "exact" if self.lossless else f"rounded by {self.quantizer}"
        return f"ternary, {how}, one scale per {scales}"

    def invalid_field(self) -> str | None:
        """The loss, where it is missing although something was lost."""
        return _missing_loss(self)

    @classmethod
    def readable(cls, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys of a record's JSON object that are read: no loss of a tensor that lost nothing."""
        return _without_idle_loss(super().readable(entry))


class QuantizedRecord(Record, frozen=True, kw_only=True):
    """Weights that are whole numbers of `code_bits` bits times a step, and factors of rows and columns.

    `low_bits` of a code are raw. Without `original` the weights had this form already, and nothing is lost.
    """

    scheme = "quantized"
    STREAMS = {"index": "U16", "words": "U16", "grid": "U8", "low": "U8"}
    feature = QUANTIZED

    code_bits: CodeBits
    low_bits: LowBits | None = None
    row_factors: bool | None = None
    column_factors: bool | None = None
    streams: dict[str, Checksum]
    original: Checksum | None = None
    loss: Loss | None = None

    @property
    def stream_dtypes(self) -> Mapping[str, str]:
        """Names and dtypes of the streams: codes have low bits only where there are `low_bits`."""
        return {name: dtype for name, dtype in self.STREAMS.items() if self.low_bits or name != "low"}

    @property
    def text(self) -> str:
        """The scheme in a few words."""
        rows, columns = bool(self.row_factors), bool(self.column_factors)
        factors = ", row factors" * rows + ", column factors" * columns
        return f"quantized {self.code_bits}-bit codes{factors}" + (", lossless" if self.lossless else "")

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        return f"quantized, entropy-coded integers of up to {self.code_bits} bits"

    def invalid_field(self) -> str | None:
        """The low bits, where a code cannot have them, or the loss, if it is missing."""
        low = self.low_bits or 0
        return "low_bits" if low & (low - 1) or self.code_bits - low < 2 else _missing_loss(self)

    @classmethod
    def readable(cls, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys of a record's JSON object that are read: no loss of a tensor that lost nothing."""
        return _without_idle_loss(super().readable(entry))


class AliasRecord(Record, frozen=True, kw_only=True):
    """A tensor with the bytes of the tensor `of`, in this file or in another `file` of the same folder."""

    scheme = "alias"

    of: str
    file: str | None = None
    original: Checksum | None = None

    @property
    def holder(self) -> tuple[str | None, str]:
        """The tensor that has the bytes: its file, None for this one, and its name."""
        return self.file, self.of

    @property
    def text(self) -> str:
        """The scheme in a few words."""
        return f"same as {self.of}"

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        return "shared with another tensor"

    def invalid_field(self) -> str | None:
        """The file, where its path leaves the folder."""
        return None if self.file is None or is_safe_path(self.file) else "file"


class OfBaseRecord(Record, frozen=True, kw_only=True):
    """A tensor that is restored with the tensor `of` of a base, which was in `file` of a folder."""

    needs_base = True
    feature = DELTA

    of: str
    file: str | None = None

    @property
    def base_checksum(self) -> str:
        """The xxh3-64 of the base's tensor."""
        return self.checksum

    def invalid_field(self) -> str | None:
        """The file, where its path leaves the folder."""
        return None if self.file is None or is_safe_path(self.file) else "file"


class BaseRecord(OfBaseRecord, frozen=True, kw_only=True):
    """A tensor that is the same in the base."""

    scheme = "base"

    @property
    def text(self) -> str:
        """The scheme in a few words."""
        return "as in the base"

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        return "same as in the base"


class DeltaRecord(OfBaseRecord, frozen=True, kw_only=True):
    """A tensor as its difference from the base's, whose xxh3-64 is `base`. kernels/delta has the numbers."""

    scheme = "delta"
    STREAMS = {"table": "U16", "index": "U16", "words": "U16", "choice": "U8", "low": "U8"}

    base: Checksum
    shift: FieldBits
    low_bits: FieldBits
    digits: DigitCount
    streams: dict[str, Checksum]

    @property
    def base_checksum(self) -> str:
        """The xxh3-64 of the base's tensor."""
        return self.base

    @property
    def stream_dtypes(self) -> Mapping[str, str]:
        """Names and dtypes of the streams: bits stand below the digits only where there are `low_bits`."""
        return {name: dtype for name, dtype in self.STREAMS.items() if self.low_bits or name != "low"}

    @property
    def card_text(self) -> str:
        """The scheme in the words of a model card."""
        return "difference from the base"


RECORDS: dict[str, type[Record]] = {}
"""Types of records by the scheme that the manifest names."""


def register(record: type[Record]) -> None:
    """Make a type of record known to all readers. Raises ValueError for a scheme that is known already."""
    if RECORDS.setdefault(record.scheme, record) is not record:
        raise ValueError(f"the scheme {record.scheme!r} has a type of record already")


for _type in (
    RawRecord, LosslessRecord, TruncatedRecord, TernaryRecord, QuantizedRecord, AliasRecord, BaseRecord,
    DeltaRecord,
):  # fmt: skip
    register(_type)


def parse_record(name: str, entry: object, file: str | os.PathLike[str]) -> Record:
    """The record of the tensor `name` from its JSON object, whose other keys are ignored, or FormatError."""
    if not isinstance(entry, dict):
        raise FormatError(file, "the record is not an object", tensor=name)
    scheme = entry.get("scheme")
    kind = RECORDS.get(scheme) if isinstance(scheme, str) else None
    if kind is None:
        raise FormatError(
            file, f"unknown scheme {scheme!r}", tensor=name, field="scheme",
            hint="update neuzip to read it",
        )  # fmt: skip
    try:
        record = _converted(kind.readable(entry), kind)
        field = record.invalid_field()
    except msgspec.ValidationError as error:
        field = _field_of(str(error))
    if field is not None:
        raise FormatError(file, f"{entry.get(field)!r} is not valid here", tensor=name, field=field)
    return record


def _converted(fields: Mapping[str, Any], kind: type[Record]) -> Record:
    """The record with these fields. Raises ValidationError, also for a lone surrogate where a number belongs.

    msgspec encodes keys to look them up, and text to see whether it stands for a number: both fail then.
    """
    try:
        return msgspec.convert(fields, kind)
    except UnicodeEncodeError:
        return msgspec.convert(_encodable(fields), kind)


def _encodable(value: Any) -> Any:
    """A JSON value with question marks in place of lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    return [_encodable(inner) for inner in value] if isinstance(value, list) else value


def _field_of(message: str) -> str:
    """The key of a record that an error of msgspec is about.

    >>> _field_of("Expected `int` <= 52 - at `$.mantissa_bits`")
    'mantissa_bits'
    >>> _field_of("Object missing required field `rms_relative` - at `$.loss`")
    'loss'
    >>> _field_of("Object missing required field `checksum`")
    'checksum'
    """
    match = re.search(r" - at `\$\.(\w+)", message) or re.search(r"missing required field `(\w+)`", message)
    assert match is not None, message
    return match[1]


def stream_name(tensor: str, stream: str) -> str:
    """Name of a tensor's stream in the container.

    >>> stream_name("lm_head.weight", "words")
    'lm_head.weight:words'
    """
    return f"{tensor}:{stream}"


def is_block_size(n: int) -> bool:
    """Whether the normaliser has blocks of `n` weights: powers of two from 8 to 16,384."""
    return 8 <= n <= 16_384 and n & (n - 1) == 0


def is_safe_path(path: object) -> bool:
    """Whether `path` is a relative path with forward slashes that stays inside its folder."""
    if not isinstance(path, str) or not path or "\\" in path or "\0" in path or path.startswith("/"):
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def is_checksum(value: object) -> bool:
    """Whether `value` is an xxh3-64 as 16 lower-case hexadecimal digits."""
    return isinstance(value, str) and _HEX.match(value) is not None
