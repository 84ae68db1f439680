"""What a container says of its tensors. SPEC.md, section "Manifest", is the authority."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuzip.errors import FormatError
from neuzip.formats.records import DELTA, QUANTIZED, Record, is_checksum, parse_record
from neuzip.formats.safetensors_file import parse_json

VERSION = 1
POOL = "pool"
"""The feature that a manifest requires of its reader where small tensors have no records."""

KNOWN_REQUIREMENTS = frozenset({DELTA, POOL, QUANTIZED})
"""Features that a manifest may require of its reader."""


@dataclass(frozen=True)
class Manifest:
    """The index of a container file. `header` is the xxh3-64 of the original file's header.

    With `has_pool` those of its tensors that `tensors` lacks are in the container's pool. `requires_base`
    says that the file is a delta, even if no tensor needs the base.
    """

    header: str
    tensors: Mapping[str, Record]
    has_pool: bool = False
    requires_base: bool = False

    @property
    def needs_base(self) -> bool:
        """Whether another checkpoint is needed to restore the file."""
        return self.requires_base or any(record.needs_base for record in self.tensors.values())

    def to_bytes(self) -> bytes:
        """The manifest's JSON: keys in a fixed order, no white space."""
        features = {record.feature for record in self.tensors.values()}
        features |= {DELTA if self.requires_base else None, POOL if self.has_pool else None}
        requires = [name for name in (DELTA, POOL, QUANTIZED) if name in features]
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
    header = document.get("header")
    if not isinstance(header, str) or not is_checksum(header):
        raise FormatError(file, f"{header!r} is not a checksum", field="header")
    tensors = document.get("tensors")
    if not isinstance(tensors, dict):
        raise FormatError(file, "not an object", field="tensors")
    records = {name: parse_record(name, entry, file) for name, entry in tensors.items()}
    manifest = Manifest(header, records, POOL in requires, DELTA in requires)
    for name, record in manifest.tensors.items():
        feature = record.feature
        if feature is not None and feature not in requires:
            raise FormatError(
                file, f"the manifest does not require {feature!r}, as the scheme {record.scheme!r} does",
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
