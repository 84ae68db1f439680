"""What a container says of its tensors. SPEC.md, section "Manifest", is the authority."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from neuzip.errors import FormatError
from neuzip.formats.safetensors_file import parse_json

VERSION = 1
SCHEMES = ("raw", "lossless", "truncated", "ternary", "alias", "base", "delta")
OF_BASE = ("base", "delta")
"""Schemes of tensors that cannot be restored without the base of a delta."""

PACKINGS = ("trits", "2bit")
SCALE_DTYPES = ("F32", "F16")
QUANTIZERS = ("absmean", "absmean-clamped", "least-squares", "exact")
"""What ternary weights may come from. "exact": their values were ternary already."""

DELTA = "delta"
"""The feature that a manifest requires of its reader where another checkpoint is needed to restore it."""

POOL = "pool"
"""The feature that a manifest requires of its reader where small tensors have no records."""

KNOWN_REQUIREMENTS = frozenset({DELTA, POOL})
"""Features that a manifest may require of its reader."""

_HEX = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True)
class Loss:
    """What rounding did to a tensor: errors relative to each non-zero weight.

    `max_relative` is the largest |restored - original| / |original|, `rms_relative` its root mean square.
    `relative_l2` is |restored - original| / |original| of the whole tensor in the Euclidean norm, which only
    ternary tensors have.
    """

    max_relative: float
    rms_relative: float
    relative_l2: float | None = None

    def to_json(self) -> dict[str, float]:
        """The figures that there are."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TensorRecord:
    """How one tensor is stored.

    `checksum` is the xxh3-64 of the tensor's bytes as they are restored, `original` of the bytes that were
    compressed, where rounding made them differ. `streams` maps the names of the streams to their xxh3-64.
    `alias_of` names the tensor that holds the bytes, or that of the base, `alias_file` its file if it is
    another one. Four are of ternary tensors; a `group` of None is one scale for the tensor. The last four are
    of deltas: `base` is the checksum of the base's tensor, for the others see kernels/delta.
    """

    scheme: str
    checksum: str
    mantissa_bits: int = 0
    block_size: int | None = None
    original: str | None = None
    loss: Loss | None = None
    streams: Mapping[str, str] = field(default_factory=dict)
    alias_of: str | None = None
    alias_file: str | None = None
    quantizer: str | None = None
    packing: str | None = None
    scale_dtype: str | None = None
    group: int | None = None
    base: str | None = None
    shift: int = 0
    low_bits: int = 0
    digits: int = 0

    @property
    def needs_base(self) -> bool:
        """Whether another checkpoint has a part of what it restores to."""
        return self.scheme in OF_BASE

    @property
    def lossless(self) -> bool:
        """Whether the restored bytes are the original's."""
        return self.original is None

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in the manifest, without fields that do not apply."""
        entry: dict[str, Any] = {"scheme": self.scheme, "checksum": self.checksum}
        if self.scheme == "alias" or self.needs_base:
            entry["of"] = self.alias_of
            if self.alias_file is not None:
                entry["file"] = self.alias_file
        if self.scheme in ("lossless", "truncated"):
            entry["mantissa_bits"] = self.mantissa_bits
        if self.scheme == "ternary":
            entry["quantizer"] = self.quantizer
            entry["packing"] = self.packing
            entry["scale_dtype"] = self.scale_dtype
        if self.scheme == "delta":
            entry |= {key: getattr(self, key) for key in ("base", "shift", "low_bits", "digits")}
        if self.group is not None:
            entry["group"] = self.group
        if self.streams:
            entry["streams"] = dict(self.streams)
        if self.block_size is not None:
            entry["block_size"] = self.block_size
        if self.original is not None:
            entry["original"] = self.original
        if self.loss is not None:
            entry["loss"] = self.loss.to_json()
        return entry


@dataclass(frozen=True)
class Manifest:
    """The index of a container file. `header` is the xxh3-64 of the original file's header.

    With `has_pool` those of its tensors that `tensors` lacks are in the container's pool. `requires_base`
    says that the file is a delta, even if no tensor needs the base.
    """

    header: str
    tensors: Mapping[str, TensorRecord]
    has_pool: bool = False
    requires_base: bool = False

    @property
    def needs_base(self) -> bool:
        """Whether another checkpoint is needed to restore the file."""
        return self.requires_base or any(record.needs_base for record in self.tensors.values())

    def to_bytes(self) -> bytes:
        """The manifest's JSON: keys in a fixed order, no white space."""
        requires = [*([DELTA] if self.needs_base else []), *([POOL] if self.has_pool else [])]
        document = {
            "version": VERSION,
            **({"requires": requires} if requires else {}),
            "header": self.header,
            "tensors": {name: record.to_json() for name, record in self.tensors.items()},
        }
        return json.dumps(document, separators=(",", ":")).encode()


def parse_manifest(text: bytes, file: str | os.PathLike[str], *, delta: bool = False) -> Manifest:
    """Parse and check a manifest. Raises FormatError, for a delta too unless `delta` says that it may be one.

    Keys that it does not know are ignored.
    """
    document = parse_json(text, file)
    if not isinstance(document, dict):
        raise FormatError(file, "the manifest is not a JSON object")
    version = document.get("version")
    if version != VERSION or type(version) is not int:
        raise FormatError(
            file, f"format version {version!r}; this neuzip reads version {VERSION}", field="version",
            hint="update neuzip to read it",
        )  # fmt: skip
    requires = check_requirements(document, file, delta=delta)
    is_delta = DELTA in requires
    header = document.get("header")
    if not isinstance(header, str) or not is_checksum(header):
        raise FormatError(file, f"{header!r} is not a checksum", field="header")
    tensors = document.get("tensors")
    if not isinstance(tensors, dict):
        raise FormatError(file, "not an object", field="tensors")
    records = {name: _record(name, entry, file) for name, entry in tensors.items()}
    manifest = Manifest(header, records, POOL in requires, is_delta)
    for name, record in manifest.tensors.items():
        if record.needs_base and not is_delta:
            raise FormatError(
                file, f"the manifest does not require {DELTA!r}, as the scheme {record.scheme!r} does",
                tensor=name, field="requires",
            )  # fmt: skip
    return manifest


def check_requirements(
    document: dict[str, Any], file: str | os.PathLike[str], *, delta: bool = False
) -> list[str]:
    """What a file requires of its reader. Raises FormatError, by name, for what this one does not know.

    And for a delta, unless `delta` says that the base will be at hand.
    """
    requires = document.get("requires")
    if requires is None:
        return []
    if not isinstance(requires, list) or not all(isinstance(name, str) for name in requires):
        raise FormatError(file, "not a list of names", field="requires")
    for name in requires:
        if name not in KNOWN_REQUIREMENTS:
            raise FormatError(
                file, f"requires {name!r}, which this neuzip does not know", field="requires",
                hint="update neuzip to read it",
            )  # fmt: skip
    if DELTA in requires and not delta:
        raise FormatError(
            file, f"is a delta: it requires {DELTA!r}, the checkpoint that it was made against",
            field="requires", hint="restore it first: neuzip apply DELTA --base BASE DST",
        )  # fmt: skip
    return requires


def _record(name: str, entry: Any, file: str | os.PathLike[str]) -> TensorRecord:
    def bad(field: str) -> FormatError:
        return FormatError(file, f"{entry.get(field)!r} is not valid here", tensor=name, field=field)

    if not isinstance(entry, dict):
        raise FormatError(file, "the record is not an object", tensor=name)
    scheme = entry.get("scheme")
    if scheme not in SCHEMES:
        raise FormatError(
            file, f"unknown scheme {scheme!r}", tensor=name, field="scheme",
            hint="update neuzip to read it",
        )  # fmt: skip
    if not is_checksum(entry.get("checksum")):
        raise bad("checksum")
    alias_file = entry.get("file")
    if scheme in ("alias", *OF_BASE):
        if not isinstance(entry.get("of"), str):
            raise bad("of")
        if alias_file is not None and not is_safe_path(alias_file):
            raise bad("file")
    if scheme == "base":
        return TensorRecord(
            scheme, entry["checksum"], alias_of=entry["of"], alias_file=alias_file, base=entry["checksum"]
        )
    if scheme == "alias":
        original = entry.get("original")
        if original is not None and not is_checksum(original):
            raise bad("original")
        return TensorRecord(
            scheme, entry["checksum"], original=original, alias_of=entry["of"], alias_file=alias_file
        )
    if scheme == "raw":
        return TensorRecord(scheme, entry["checksum"])
    mantissa_bits, streams = entry.get("mantissa_bits"), entry.get("streams")
    if not isinstance(streams, dict) or not all(is_checksum(c) for c in streams.values()):
        raise bad("streams")
    if scheme == "delta":
        if not is_checksum(entry.get("base")):
            raise bad("base")
        for key, least, most in (("shift", 0, 63), ("low_bits", 0, 63), ("digits", 1, 4)):
            if type(entry.get(key)) is not int or not least <= entry[key] <= most:
                raise bad(key)
        return TensorRecord(
            scheme, entry["checksum"], streams=streams, alias_of=entry["of"], alias_file=alias_file,
            base=entry["base"], shift=entry["shift"], low_bits=entry["low_bits"], digits=entry["digits"],
        )  # fmt: skip
    if scheme == "ternary":
        for key, choices in (
            ("quantizer", QUANTIZERS), ("packing", PACKINGS), ("scale_dtype", SCALE_DTYPES),
        ):  # fmt: skip
            if entry.get(key) not in choices:
                raise bad(key)
        group = entry.get("group")
        if group is not None and (type(group) is not int or group < 1):
            raise bad("group")
        # Without `original` the weights had this form already, and nothing is lost.
        original, loss = (None, None) if entry.get("original") is None else _loss_of(entry, bad)
        return TensorRecord(
            scheme, entry["checksum"], original=original, loss=loss, streams=streams,
            quantizer=entry["quantizer"], packing=entry["packing"], scale_dtype=entry["scale_dtype"],
            group=group,
        )  # fmt: skip
    if type(mantissa_bits) is not int or not 0 <= mantissa_bits <= 52:
        raise bad("mantissa_bits")
    if scheme == "lossless":
        return TensorRecord(scheme, entry["checksum"], mantissa_bits, streams=streams)
    block_size = entry.get("block_size")
    if block_size is not None and (type(block_size) is not int or not is_block_size(block_size)):
        raise bad("block_size")
    return TensorRecord(scheme, entry["checksum"], mantissa_bits, block_size, *_loss_of(entry, bad), streams)


def _loss_of(entry: dict[str, Any], bad: Callable[[str], FormatError]) -> tuple[str, Loss]:
    """The original's checksum, and the loss."""
    original, loss = entry.get("original"), entry.get("loss")
    if not isinstance(original, str) or not is_checksum(original):
        raise bad("original")
    if not isinstance(loss, dict) or not all(
        _is_figure(loss.get(key)) for key in ("max_relative", "rms_relative")
    ):
        raise bad("loss")
    relative_l2 = loss.get("relative_l2")
    if relative_l2 is not None and not _is_figure(relative_l2):
        raise bad("loss")
    return original, Loss(
        float(loss["max_relative"]),
        float(loss["rms_relative"]),
        float(relative_l2) if relative_l2 is not None else None,
    )


def _is_figure(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max  # type: ignore[operator]


def is_block_size(n: int) -> bool:
    """Block sizes of the normaliser: powers of two from 8 to 16,384."""
    return 8 <= n <= 16_384 and n & (n - 1) == 0


def is_safe_path(path: object) -> bool:
    """Whether `path` is a relative path with forward slashes that stays inside its folder."""
    if not isinstance(path, str) or not path or "\\" in path or "\0" in path or path.startswith("/"):
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def is_checksum(value: object) -> bool:
    """Whether `value` is an xxh3-64 as 16 lower-case hexadecimal digits."""
    return isinstance(value, str) and _HEX.match(value) is not None
