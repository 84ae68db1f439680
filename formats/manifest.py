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

from .tensor_file import parse_json

VERSION = 1
SCHEMES = ("raw", "lossless", "truncated", "ternary", "alias")
PACKINGS = ("trits", "2bit")
SCALE_DTYPES = ("F32", "F16")
QUANTIZERS = ("absmean", "absmean-clamped", "least-squares", "exact")
"""What ternary weights may come from. "exact": their values were ternary already."""

KNOWN_REQUIREMENTS: frozenset[str] = frozenset()
"""Features that a manifest may require of its reader. Version 1 has none."""

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
    `alias_of` names the tensor that holds the bytes, `alias_file` its file if it is another one. The last
    four are of ternary tensors; a `group` of None is one scale for the tensor.
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

    @property
    def lossless(self) -> bool:
        """Whether the restored bytes are the original's."""
        return self.original is None

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in the manifest, without fields that do not apply."""
        entry: dict[str, Any] = {"scheme": self.scheme, "checksum": self.checksum}
        if self.scheme == "alias":
            entry["of"] = self.alias_of
            if self.alias_file is not None:
                entry["file"] = self.alias_file
        if self.scheme in ("lossless", "truncated"):
            entry["mantissa_bits"] = self.mantissa_bits
        if self.scheme == "ternary":
            entry["quantizer"] = self.quantizer
            entry["packing"] = self.packing
            entry["scale_dtype"] = self.scale_dtype
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
    """The index of a container file. `header` is the xxh3-64 of the original file's header."""

    header: str
    tensors: Mapping[str, TensorRecord]

    def to_bytes(self) -> bytes:
        """The manifest's JSON: keys in a fixed order, no white space."""
        document = {
            "version": VERSION,
            "header": self.header,
            "tensors": {name: record.to_json() for name, record in self.tensors.items()},
        }
        return json.dumps(document, separators=(",", ":")).encode()


def parse_manifest(text: bytes, file: str | os.PathLike[str]) -> Manifest:
    """Parse and check a manifest. Raises FormatError; keys it does not know are ignored."""
    document = parse_json(text, file)
    if not isinstance(document, dict):
        raise FormatError(file, "the manifest is not a JSON object")
    version = document.get("version")
    if version != VERSION or type(version) is not int:
        raise FormatError(
            file, f"format version {version!r}; this neuzip reads version {VERSION}", field="version",
            hint="update neuzip to read it",
        )  # fmt: skip
    check_requirements(document, file)
    header = document.get("header")
    if not isinstance(header, str) or not is_checksum(header):
        raise FormatError(file, f"{header!r} is not a checksum", field="header")
    tensors = document.get("tensors")
    if not isinstance(tensors, dict):
        raise FormatError(file, "not an object", field="tensors")
    return Manifest(header, {name: _record(name, entry, file) for name, entry in tensors.items()})


def check_requirements(document: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Refuse, by name, what the file requires and this reader does not know."""
    requires = document.get("requires")
    if requires is None:
        return
    if not isinstance(requires, list) or not all(isinstance(name, str) for name in requires):
        raise FormatError(file, "not a list of names", field="requires")
    for name in requires:
        if name not in KNOWN_REQUIREMENTS:
            raise FormatError(
                file, f"requires {name!r}, which this neuzip does not know", field="requires",
                hint="update neuzip to read it",
            )  # fmt: skip


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
    if scheme == "alias":
        if not isinstance(entry.get("of"), str):
            raise bad("of")
        alias_file, original = entry.get("file"), entry.get("original")
        if alias_file is not None and not is_safe_path(alias_file):
            raise bad("file")
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
