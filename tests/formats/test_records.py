"""Records of a manifest: what msgspec cannot convert is a FormatError of the field, whatever it is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from neuzip.errors import FormatError
from neuzip.formats.records import RECORDS, parse_record

CHECKSUM = "0" * 16
GOOD: dict[str, dict[str, Any]] = {
    "lossless": {"checksum": CHECKSUM, "mantissa_bits": 3, "streams": {}},
    "truncated": {
        "checksum": CHECKSUM, "mantissa_bits": 3, "block_size": 64, "original": CHECKSUM,
        "loss": {"max_relative": 0.5, "rms_relative": 0.25}, "streams": {},
    },
    "ternary": {
        "checksum": CHECKSUM, "quantizer": "absmean", "packing": "trits", "scale_dtype": "F32", "group": 64,
        "streams": {},
    },
    "delta": {
        "checksum": CHECKSUM, "of": "w", "base": CHECKSUM, "shift": 0, "low_bits": 0, "digits": 1,
        "streams": {},
    },
}  # fmt: skip
BAD = ("\ud800", "x\udfff3", None, [], {}, True, 1e400, float("nan"), -1, -(1 << 200), "5", b"3")


@pytest.mark.parametrize("scheme", GOOD)
def test_good_records_are_read(scheme: str) -> None:
    record = parse_record("w", {"scheme": scheme, **GOOD[scheme]}, "file")
    assert type(record) is RECORDS[scheme]


@pytest.mark.parametrize("value", BAD, ids=ascii)
@pytest.mark.parametrize(
    ("scheme", "field"),
    [(s, f) for s, fields in GOOD.items() for f, value in fields.items() if type(value) is int],
)
def test_what_is_no_number_names_its_field(scheme: str, field: str, value: Any) -> None:
    """Found by changing stored manifests at random: half of a surrogate pair in the place of a number."""
    if value is None and field in ("block_size", "group"):
        return  # they may be missing
    with pytest.raises(FormatError, match=re.escape(f"field {field!r}: ")):
        parse_record("w", {"scheme": scheme, **GOOD[scheme], field: value}, "file")


def test_numbers_in_a_loss_are_checked_too() -> None:
    entry = {
        "scheme": "truncated",
        **GOOD["truncated"],
        "loss": {"max_relative": "\ud800", "rms_relative": 0},
    }
    with pytest.raises(FormatError, match="field 'loss'"):
        parse_record("w", entry, "file")


def test_unknown_keys_are_ignored_whatever_they_are() -> None:
    loss = {**GOOD["truncated"]["loss"], "\ud800": 1}
    entry = {"scheme": "truncated", **GOOD["truncated"], "loss": loss, "\udfff": 2}
    assert parse_record("w", entry, "file") == parse_record(
        "w", {"scheme": "truncated", **GOOD["truncated"]}, "file"
    )
    with pytest.raises(FormatError, match="field 'loss'"):
        parse_record("w", {**entry, "loss": {"\ud800": 1, "rms_relative": 0.5}}, "file")
