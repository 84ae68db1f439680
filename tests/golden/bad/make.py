"""Files that neuzip has to refuse. Run it to write them anew, each with the error that it gives now:

    python tests/golden/bad/make.py

Every file is small, has exactly one fault, and right checksums unless those are the fault. `take_apart` and
`put_together` are how other tests damage a container and leave no trace.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from neuzip.compress import verify
from neuzip.compress.schemes.code_tables import CodeTable, share_bytes
from neuzip.errors import NeuzipError
from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, census, pack_low_bits, split

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"

HEADER, MANIFEST = "neuzip:header", "neuzip:manifest"
Entry = tuple[str, list[int], bytes]
"""dtype, shape, data"""


def checksum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def dumps(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def with_length(text: bytes) -> bytes:
    """A header: its length, and itself."""
    return len(text).to_bytes(8, "little") + text


def safetensors(entries: dict[str, Entry], metadata: dict[str, Any] | None = None, align: int = 1) -> bytes:
    """A safetensors file with these tensors in this order."""
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in entries.items():
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = dumps(document)
    text += b" " * (-(8 + len(text)) % align)
    return with_length(text) + b"".join(data for _, _, data in entries.values())


@dataclass
class Parts:
    """A container taken apart. `entries` holds streams and raw tensors, `header` the original's header."""

    header: bytes
    manifest: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=lambda: {"format": "pt", "neuzip": "1"})

    @property
    def original(self) -> dict[str, Any]:
        """The original's header, parsed: change it and give it to `set_original`."""
        return dict(json.loads(self.header[8:]))

    def set_original(self, document: object) -> None:
        self.header = with_length(dumps(document))

    def record(self, name: str) -> dict[str, Any]:
        return self.manifest["tensors"][name]  # type: ignore[no-any-return]

    def words(self, entry: str) -> np.ndarray:
        """A stream as a copy of its 16-bit words."""
        return np.frombuffer(self.entries[entry][2], "<u2").copy()

    def put(self, entry: str, data: bytes | np.ndarray) -> None:
        """Replace the data of a one-dimensional entry; its shape follows."""
        data = data if isinstance(data, bytes) else data.tobytes()
        dtype = self.entries[entry][0]
        self.entries[entry] = (dtype, [len(data) // (2 if dtype == "U16" else 1)], data)

    def seal(self) -> Parts:
        """Make the checksums of streams and header right."""
        self.manifest["header"] = checksum(self.header)
        for name, record in self.manifest["tensors"].items():
            streams = record.get("streams") if isinstance(record, dict) else None
            for stream in streams if isinstance(streams, dict) else ():
                if f"{name}:{stream}" in self.entries:
                    streams[stream] = checksum(self.entries[f"{name}:{stream}"][2])
        return self


def take_apart(container: bytes) -> Parts:
    """The inverse of `put_together`."""
    end = 8 + int.from_bytes(container[:8], "little")
    document = json.loads(container[8:end])
    metadata = document.pop("__metadata__")
    placed = sorted(document.items(), key=lambda item: item[1]["data_offsets"])
    entries = {
        name: (e["dtype"], e["shape"], container[end + e["data_offsets"][0] : end + e["data_offsets"][1]])
        for name, e in placed
    }
    header, manifest = entries.pop(HEADER)[2], json.loads(entries.pop(MANIFEST)[2])
    return Parts(header, manifest, entries, metadata)


def put_together(parts: Parts, manifest: bytes | None = None) -> bytes:
    """A container whose manifest has the right checksum; `manifest` replaces that of the parts."""
    text = dumps(parts.manifest) if manifest is None else manifest
    added: dict[str, Entry] = {
        HEADER: ("U8", [len(parts.header)], parts.header),
        MANIFEST: ("U8", [len(text)], text),
    }
    return safetensors(parts.entries | added, parts.metadata | {"neuzip_manifest": checksum(text)}, align=16)


# Parts to damage


def stream_table(table: rans.Table) -> bytes:
    head = [table.group, table.palette.size, table.frequencies.size]
    return pad(np.concatenate([head, table.palette, table.frequencies]).astype("<u2").tobytes())


def coded(
    dtype: str, exponents: np.ndarray, kept: int = 0, table: rans.Table | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """The bytes of a tensor with these exponents, and its streams."""
    fmt = FORMATS[dtype]
    n = len(exponents)
    fields = (np.arange(n) * 2654435761 >> 7 & ((1 << 1 + kept) - 1)).astype(np.uint64)
    E, M = np.uint64(fmt.exponent_bits), np.uint64(fmt.mantissa_bits)
    mantissas = (fields & np.uint64((1 << kept) - 1)) << np.uint64(fmt.mantissa_bits - kept)
    bits = (fields >> np.uint64(kept)) << (E + M) | exponents.astype(np.uint64) << M | mantissas
    patterns = bits.astype(fmt.dtype)
    counts = census(patterns, fmt)
    table = table or rans.build_table(counts.exponents, counts.pairs)
    parts, planes = split(patterns, fmt, kept)
    encoded = rans.encode(parts, table)
    streams = {
        "table": stream_table(table),
        "index": pad(encoded.index.tobytes()),
        "words": pad(encoded.words.tobytes()),
        "sign_mantissa": b"".join(pad(plane.tobytes()) for plane in planes.values()),
    }
    return patterns.tobytes(), {
        stream: ("U8", [len(data)], data) if stream == "sign_mantissa" else ("U16", [len(data) // 2], data)
        for stream, data in streams.items()
    }


def lossless(
    dtype: str = "BF16", exponents: np.ndarray | None = None, table: rans.Table | None = None
) -> Parts:
    """A container with one tensor, `w`, of 300 weights unless exponents are given."""
    if exponents is None:
        exponents = (
            (1 << FORMATS[dtype].exponent_bits - 1) - 1 - np.arange(300) % 7 * (np.arange(300) % 3 == 0)
        )
    data, streams = coded(dtype, exponents, table=table)
    header = safetensors({"w": (dtype, [len(exponents)], data)})[: -len(data)]
    record = {
        "scheme": "lossless",
        "checksum": checksum(data),
        "mantissa_bits": 0,
        "streams": dict.fromkeys(streams, ""),
    }
    manifest = {"version": 1, "header": "", "tensors": {"w": record}}
    return Parts(header, manifest, {f"w:{stream}": entry for stream, entry in streams.items()}).seal()


def truncated(dtype: str = "BF16", block_size: int | None = None) -> Parts:
    """The same, as if it had been rounded; every normaliser is 1."""
    parts = lossless(dtype)
    record = parts.record("w")
    record |= {
        "scheme": "truncated",
        "original": "0" * 16,
        "loss": {"max_relative": 0.5, "rms_relative": 0.25},
    }
    if block_size is not None:
        record["block_size"] = block_size
        record["streams"]["normaliser"] = ""
        blocks = -(-300 // block_size)
        parts.entries["w:normaliser"] = ("U8", [len(pad(bytes(blocks)))], pad(bytes(blocks)))
    return parts.seal()


TRITS, WORDS = "trits", "2bit"


def ternary(packing: str = TRITS, group: int | None = None, scale_dtype: str = "F32") -> Parts:
    """A container with one ternary tensor `w`, BF16 of 3 rows of 100 weights; every scale is 1."""
    codes = np.arange(300) * 2654435761 % 2**32 % 3  # one more than the codes
    if packing == TRITS:
        stored = -(-256 * (codes.reshape(60, 5) @ [81, 27, 9, 3, 1]) // 243)
        data = stored.astype(np.uint8).tobytes()
    else:
        columns = np.ones((3, 112), np.int64)
        columns[:, :100] = codes.reshape(3, 100)
        shifts = 8 * (np.arange(16) % 4) + 2 * (np.arange(16) // 4)
        data = (columns.reshape(21, 16) << shifts).sum(axis=1).astype("<u4").tobytes()
    scales = 1 if group is None else 3 * -(-100 // group)
    scale = np.ones(scales, "<f4" if scale_dtype == "F32" else "<f2").tobytes()
    patterns = np.array([0xBF80, 0, 0x3F80], "<u2")[codes].tobytes()
    header = safetensors({"w": ("BF16", [3, 100], patterns)})[: -len(patterns)]
    streams: dict[str, Entry] = {
        f"w:{name}": ("U8", [len(pad(part))], pad(part)) for name, part in (("codes", data), ("scale", scale))
    }
    record: dict[str, Any] = {
        "scheme": "ternary",
        "checksum": checksum(patterns),
        "quantizer": "absmean",
        "packing": packing,
        "scale_dtype": scale_dtype,
        "streams": {"codes": "", "scale": ""},
        "original": "0" * 16,
        "loss": {"max_relative": 1, "rms_relative": 0.5, "relative_l2": 0.5},
    }
    if group is not None:
        record["group"] = group
    return Parts(header, {"version": 1, "header": "", "tensors": {"w": record}}, streams).seal()


def pooled() -> Parts:
    """A container with a raw tensor `u`, and the pooled `v` and `w`."""
    u, v, w = (bytes(range(start, start + 8)) for start in (0, 8, 16))
    header = safetensors({"u": ("U8", [8], u), "v": ("U8", [8], v), "w": ("U16", [4], w)})[:-24]
    sums = b"".join(int(checksum(data), 16).to_bytes(8, "little") for data in (v, w))
    records = {"u": {"scheme": "raw", "checksum": checksum(u)}}
    manifest = {"version": 1, "requires": ["pool"], "header": "", "tensors": records}
    entries: dict[str, Entry] = {
        "u": ("U8", [8], u), "neuzip:pool": ("U8", [16], v + w), "neuzip:pool_checksums": ("U8", [16], sums),
    }  # fmt: skip
    return Parts(header, manifest, entries).seal()


def delta(dtype: str = "BF16") -> Parts:
    """A delta with one tensor `w` of two blocks: a coded one of many 1s, and one that lists two digits."""
    fmt = FORMATS[dtype]
    n, symbols = 16384 + 300, (np.arange(16384) % 3 == 0).astype(np.uint16)
    table = rans.build_table(np.bincount(symbols, minlength=1 << 16), None)
    encoded = rans.encode(symbols, table)
    listed = np.array([5, 7, 290, 200], np.uint16)
    index = np.array([encoded.index[0], listed.size], np.uint16)
    words = np.frombuffer(stream_table(table), "<u2")[: 3 + table.palette.size + table.frequencies.size]
    streams = {
        "table": pad(np.array([1, *words], "<u2").tobytes()),
        "index": pad(index.tobytes()),
        "words": pad(np.concatenate([encoded.words, listed]).tobytes()),
        "choice": pad(bytes(2)),
    }
    size = n * fmt.bits // 8
    record = {
        "scheme": "delta", "checksum": "0" * 16, "of": "w", "base": "0" * 16,
        "shift": 0, "low_bits": 0, "digits": 1, "streams": dict.fromkeys(streams, ""),
    }  # fmt: skip
    header = safetensors({"w": (dtype, [n], bytes(size))})[:-size]
    entries: dict[str, Entry] = {f"w:{s}": ("U16", [len(d) // 2], d) for s, d in streams.items()}
    entries["w:choice"] = ("U8", [16], streams["choice"])
    manifest = {"version": 1, "requires": ["delta"], "header": "", "tensors": {"w": record}}
    return Parts(header, manifest, entries).seal()


def quantized(
    codes: np.ndarray | None = None, table: CodeTable | None = None, columns: bool = False, low: int = 0
) -> Parts:
    """A container with one quantized tensor `w`, BF16 of 3 rows of 100 weights: codes of 5 bits from -4 to 4.

    The step is 1, and so are the factors of the rows and, if there are any, of the columns. The `low` bits of
    codes are raw.
    """
    codes = (np.arange(300) * 2654435761 >> 7) % 9 - 4 if codes is None else codes
    shifted = (codes + 16).astype(np.uint8)
    table = table or CodeTable(1, 12, share_bytes(np.bincount(shifted, minlength=21)[12:21]))
    encoded = rans.encode(shifted >> low, table.table)
    patterns = (codes.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    grid = np.array([1], "<f4").tobytes() + bytes([128] * (103 if columns else 3)) + table.stored.tobytes()
    data = {"index": pad(encoded.index.tobytes()), "words": pad(encoded.words.tobytes())}
    if low:
        data["low"] = pad(pack_low_bits(shifted & (1 << low) - 1, low).tobytes())
    data["grid"] = pad(grid)
    streams: dict[str, Entry] = {f"w:{s}": ("U16", [len(d) // 2], d) for s, d in data.items()}
    streams |= {f"w:{s}": ("U8", [len(data[s])], data[s]) for s in ("low", "grid") if s in data}
    record = {
        "scheme": "quantized", "checksum": checksum(patterns), "code_bits": 5, "row_factors": True,
        "streams": dict.fromkeys(data, ""), "original": "0" * 16,
        "loss": {"max_relative": 1, "rms_relative": 0.5, "relative_l2": 0.5},
    }  # fmt: skip
    if low:
        record["low_bits"] = low
    if columns:
        record["column_factors"] = True
    header = safetensors({"w": ("BF16", [3, 100], patterns)})[: -len(patterns)]
    manifest = {"version": 1, "requires": ["quantized"], "header": "", "tensors": {"w": record}}
    return Parts(header, manifest, streams).seal()


def quantized_escaping() -> Parts:
    """A quantized tensor whose one block has an escape at position 5: code 10."""
    codes = np.zeros(300, np.int64)
    codes[5] = 10
    return quantized(codes, CodeTable(1, 15, np.array([16, 128], np.uint8)))


def quantized_low() -> Parts:
    """A quantized tensor of which two of five bits of a code are raw."""
    return quantized(table=CodeTable(1, 3, np.array([200, 200, 200], np.uint8)), low=2)


def the_base() -> Parts:
    """A delta with one tensor `w` that is the base's."""
    parts = raw()
    parts.manifest["requires"] = ["delta"]
    parts.record("w").update(scheme="base", of="w")
    parts.entries.clear()
    return parts.seal()


def raw(*aliases: str) -> Parts:
    """A container with a raw tensor `w`, and with aliases of it."""
    data = bytes(range(8))
    header = safetensors({name: ("U8", [8], data) for name in ("w", *aliases)})[: -8 * (1 + len(aliases))]
    records: dict[str, Any] = {"w": {"scheme": "raw", "checksum": checksum(data)}}
    records |= {name: {"scheme": "alias", "checksum": checksum(data), "of": "w"} for name in aliases}
    return Parts(header, {"version": 1, "header": "", "tensors": records}, {"w": ("U8", [8], data)}).seal()


def empty() -> Parts:
    """The smallest container."""
    return Parts(with_length(b"{}"), {"version": 1, "header": "", "tensors": {}}).seal()


def escaping() -> Parts:
    """A container whose one block has an escape at position 5: exponent 200."""
    exponents = np.full(300, 120)
    exponents[5] = 200
    table = rans.Table(1, np.array([119, 120], np.uint16), np.array([96, 4000], np.uint16))
    return lossless("BF16", exponents, table)


# Damage. A function gets parts and changes them; what it returns, if anything, is the file.

Damage = Callable[[Parts], bytes | None]


def of(parts: Callable[[], Parts], damage: Damage, seal: bool = True) -> Callable[[], bytes]:
    def make() -> bytes:
        whole = parts()
        made = damage(whole)
        return made if made is not None else put_together(whole.seal() if seal else whole)

    return make


def plain(header: str | bytes, data: bytes = bytes(8)) -> Callable[[], bytes]:
    """A safetensors file with a header as it is written here."""
    text = header if isinstance(header, bytes) else header.encode()
    return lambda: with_length(text) + data


def entry(dtype: str = '"U8"', shape: str = "[8]", data_offsets: str = "[0,8]") -> Callable[[], bytes]:
    """A safetensors file with one entry as it is written here."""
    return plain(f'{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{data_offsets}}}}}')


def two(first: str, second: str) -> Callable[[], bytes]:
    """A safetensors file with two tensors at these offsets in 8 bytes."""
    a, b = json.loads(first), json.loads(second)
    return plain(
        f'{{"a":{{"dtype":"U8","shape":[{a[1] - a[0]}],"data_offsets":{first}}},'
        f'"b":{{"dtype":"U8","shape":[{b[1] - b[0]}],"data_offsets":{second}}}}}'
    )


def set_record(**fields: Any) -> Damage:
    """Change fields of the record of `w`; those set to `...` are removed."""

    def damage(parts: Parts) -> None:
        record = parts.record("w")
        for name, value in fields.items():
            if value is ...:
                del record[name]
            else:
                record[name] = value

    return damage


def set_alias(**fields: Any) -> Damage:
    """Change fields of the record of the alias `v`."""
    return lambda parts: parts.record("v").update(fields)


def set_manifest(**fields: Any) -> Damage:
    return lambda parts: parts.manifest.update(fields)


def set_original(**fields: Any) -> Damage:
    """Change the entry of `w` in the original's header."""

    def damage(parts: Parts) -> None:
        parts.set_original({"w": parts.original["w"] | fields})

    return damage


def manifest_text(change: Callable[[bytes], bytes]) -> Damage:
    return lambda parts: put_together(parts, change(dumps(parts.manifest)))


def set_words(stream: str, at: int, *values: int) -> Damage:
    """Overwrite words of a stream of `w`."""

    def damage(parts: Parts) -> None:
        words = parts.words(f"w:{stream}")
        words[at : at + len(values)] = values
        parts.put(f"w:{stream}", words)

    return damage


def set_bytes(stream: str, at: int, *values: int) -> Damage:
    """Overwrite bytes of a stream of `w`."""

    def damage(parts: Parts) -> None:
        data = bytearray(parts.entries[f"w:{stream}"][2])
        data[at : at + len(values)] = values
        parts.put(f"w:{stream}", bytes(data))

    return damage


def set_table(group: int, palette: list[int], frequencies: list[int]) -> Damage:
    words = np.array([group, len(palette), len(frequencies), *palette, *frequencies], "<u2")
    return lambda parts: parts.put("w:table", pad(words.tobytes()))


def resize(stream: str, by: int) -> Damage:
    """Append `by` zeros to a stream of `w`, or cut off as many bytes."""

    def damage(parts: Parts) -> None:
        data = parts.entries[f"w:{stream}"][2]
        parts.put(f"w:{stream}", data + bytes(by) if by > 0 else data[:by])

    return damage


def reshape(entry: str, dtype: str, shape: list[int]) -> Damage:
    return lambda parts: parts.entries.update({entry: (dtype, shape, parts.entries[entry][2])})


def set_header(header: Callable[[bytes], bytes]) -> Damage:
    return lambda parts: setattr(parts, "header", header(parts.header))


def remove_entry(parts: Parts) -> None:
    del parts.entries["w:words"]


def remove_checksum(parts: Parts) -> None:
    del parts.record("w")["streams"]["words"]


def alias_each_other(parts: Parts) -> None:
    parts.record("v").update(of="u")
    parts.record("u").update(of="v")


def bare_manifest(text: bytes, dtype: str = "U8", shape: list[int] | None = None) -> Callable[[], bytes]:
    """A container with nothing but a manifest."""
    metadata = {"neuzip": "1", "neuzip_manifest": checksum(text)}
    return lambda: safetensors({MANIFEST: (dtype, shape or [len(text)], text)}, metadata)


def set_metadata(**fields: str) -> Damage:
    return lambda parts: parts.metadata.update(fields)


def set_list(at: int, value: int) -> Damage:
    """Change one of the four words of a delta's list: two positions, each before its digit."""

    def damage(parts: Parts) -> None:
        set_words("words", int(parts.words("w:index")[0]) + at, value)(parts)

    return damage


def set_escape(at: int, value: int) -> Damage:
    """Change one of the last two words of the only block: the escape's position and exponent."""

    def damage(parts: Parts) -> None:
        words, used = parts.words("w:words"), int(parts.words("w:index")[0])
        words[used - 2 + at] = value
        parts.put("w:words", words)

    return damage


def collide(parts: Parts) -> bytes:
    """Add a raw tensor with the name of a stream."""
    dtype, shape, data = parts.entries["w:words"]
    original = parts.original
    end = original["w"]["data_offsets"][1]
    original["w:words"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
    parts.set_original(original)
    parts.manifest["tensors"]["w:words"] = {"scheme": "raw", "checksum": checksum(data)}
    return put_together(parts.seal())


def duplicate_record(parts: Parts) -> bytes:
    text = dumps(parts.manifest)
    record = text[text.index(b'"w":') : -2]
    return put_together(parts, text[:-2] + b"," + record + b"}}")


def self_referring_header(parts: Parts) -> bytes:
    """A raw tensor called like the entry that holds the original's header."""
    for length in range(40, 400):
        text = dumps({HEADER: {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}})
        if 8 + len(text) == length:
            parts.header = with_length(text)
    parts.manifest["tensors"] = {HEADER: {"scheme": "raw", "checksum": checksum(parts.header)}}
    return put_together(parts.seal())


def flip_last_byte(parts: Parts) -> bytes:
    made = bytearray(put_together(parts))
    made[-1] ^= 1
    return bytes(made)


def flip_stream_byte(parts: Parts) -> None:
    data = bytearray(parts.entries["w:sign_mantissa"][2])
    data[0] ^= 1
    parts.put("w:sign_mantissa", bytes(data))


def of_unknown_dtype() -> Parts:
    """A container with a raw tensor of a dtype that nobody knows, whose size its shape does not tell."""
    parts = raw()
    parts.entries["w"] = ("X1", [8], parts.entries["w"][2])
    parts.set_original({"w": parts.original["w"] | {"dtype": "X1"}})
    return parts.seal()


def reshaped(original: dict[str, Any]) -> dict[str, Any]:
    return original | {"v": original["v"] | {"shape": [2, 4]}}


def halve_block(parts: Parts) -> None:
    """Leave the only block fewer words than its states take."""
    parts.put("w:words", bytes(128))
    set_words("index", 0, 64)(parts)


def shorten_block(parts: Parts) -> None:
    """Take the last refill word from the only block."""
    words, count = parts.words("w:words"), int(parts.words("w:index")[0])
    parts.put("w:words", pad(words[: count - 1].tobytes()))
    set_words("index", 0, count - 1)(parts)


def without_weights(parts: Parts) -> None:
    set_original(shape=[0], data_offsets=[0, 0])(parts)
    set_record(checksum=checksum(b""))(parts)


def pairs_of_9_bits(parts: Parts) -> None:
    set_record(code_bits=9)(parts)
    set_bytes("grid", 7, 2)(parts)


TERNARY_FIELDS = {"scheme": "ternary", "quantizer": "exact", "packing": TRITS, "scale_dtype": "F32"}

BAD: dict[str, Callable[[], bytes]] = {
    # The file itself
    "nothing": lambda: b"",
    "pickle": lambda: b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01w\x94K\x01s.",
    "header_longer_than_the_file": lambda: (3).to_bytes(8, "little") + b"{}",
    "header_of_2_to_the_62": lambda: (1 << 62).to_bytes(8, "little") + b"{}",
    "header_of_2_to_the_64_less_1": lambda: b"\xff" * 8 + b"{}",
    # Its header
    "header_not_utf8": plain(b'{"\xff":1}'),
    "header_not_json": plain('{"w":'),
    "header_a_list": plain("[]"),
    "header_begins_with_a_space": plain(" {}", b""),
    "header_with_a_key_twice": plain('{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"w":{}}'),
    "header_with_nan": entry(shape="[NaN]"),
    "header_with_5000_digits": entry(shape="[" + "9" * 5000 + "]"),
    "metadata_a_list": plain('{"__metadata__":[]}', b""),
    "metadata_with_a_number": plain('{"__metadata__":{"a":1}}', b""),
    "entry_a_number": plain('{"w":1}'),
    "entry_without_dtype": plain('{"w":{"shape":[8],"data_offsets":[0,8]}}'),
    "entry_with_control_characters": plain('{"\\u001b[2J\\n\\ud800":1}'),
    "dtype_a_number": entry(dtype="8"),
    "shape_a_number": entry(shape="8"),
    "shape_with_a_float": entry(shape="[8.0]"),
    "shape_with_a_bool": entry(shape="[8,true]"),
    "shape_with_a_negative": entry(shape="[-8]"),
    "shape_with_2_to_the_62": entry(shape="[4611686018427387904]"),
    "shape_overflows_64_bits": entry(shape="[4294967296,4294967296,1]", data_offsets="[0,0]"),
    "shape_with_65_dimensions": entry(shape=str([1] * 65)),
    "shape_does_not_fill": entry(shape="[7]"),
    "shape_of_4_bits_does_not_fill": entry(dtype='"F4"', shape="[15]"),
    "offsets_three": entry(data_offsets="[0,8,16]"),
    "offsets_with_a_float": entry(data_offsets="[0.0,8]"),
    "offsets_with_a_bool": entry(data_offsets="[false,8]"),
    "offsets_backwards": entry(data_offsets="[8,0]"),
    "offsets_of_2_to_the_62": entry(data_offsets="[0,4611686018427387904]"),
    "offsets_overlap": two("[0,5]", "[4,8]"),
    "offsets_leave_a_hole": two("[0,3]", "[4,8]"),
    "offsets_do_not_begin_at_0": entry(shape="[7]", data_offsets="[1,8]"),
    "data_cut_short": lambda: entry()()[:-1],
    "data_left_over": lambda: entry()() + b"x",
    # What makes it a container
    "version_2": of(empty, set_metadata(neuzip="2")),
    "version_empty": of(empty, set_metadata(neuzip="")),
    "manifest_entry_missing": lambda: safetensors({}, {"neuzip": "1"}),
    "manifest_entry_of_words": bare_manifest(b"{}", "U16", [1]),
    "manifest_entry_of_two_dimensions": bare_manifest(b"{}", "U8", [1, 2]),
    "manifest_checksum_missing": lambda: safetensors({MANIFEST: ("U8", [2], b"{}")}, {"neuzip": "1"}),
    "manifest_damaged": of(empty, flip_last_byte),
    "header_entry_missing": bare_manifest(b'{"version":1,"header":"0000000000000000","tensors":{}}'),
    "header_entry_damaged": of(empty, set_manifest(header="0" * 16), seal=False),
    "header_entry_of_7_bytes": of(empty, set_header(lambda header: header[:7])),
    "header_entry_with_the_wrong_length": of(empty, set_header(lambda header: header[:8] + b"{ }")),
    "header_entry_with_a_hole": of(raw, set_original(data_offsets=[8, 16])),
    "header_entry_with_a_key_twice": of(
        raw, set_header(lambda header: with_length(header[8:-1] + b"," + header[9:]))
    ),
    "entry_of_nothing": of(raw, lambda p: p.entries.update(x=("U8", [1], b"x"))),
    # Its manifest
    "manifest_not_json": of(empty, manifest_text(lambda text: text[:-1])),
    "manifest_with_a_byte_order_mark": of(empty, manifest_text(lambda text: b"\xef\xbb\xbf" + text)),
    "manifest_a_list": of(empty, manifest_text(lambda text: b"[]")),
    "manifest_with_a_key_twice": of(raw, duplicate_record),
    "manifest_version_2": of(empty, set_manifest(version=2)),
    "manifest_version_true": of(empty, set_manifest(version=True)),
    "manifest_version_a_float": of(empty, set_manifest(version=1.0)),
    "manifest_requires_an_unknown_feature": of(empty, set_manifest(requires=["time travel"])),
    "manifest_requires_a_text": of(empty, set_manifest(requires="time travel")),
    "manifest_header_a_number": of(empty, set_manifest(header=0), seal=False),
    "manifest_header_in_capitals": of(empty, set_manifest(header="ABCDEF0123456789"), seal=False),
    "manifest_tensors_a_list": of(empty, manifest_text(lambda text: text.replace(b"{}", b"[]"))),
    "manifest_without_a_tensor": of(raw, lambda p: p.manifest["tensors"].clear()),
    "manifest_with_another_tensor": of(empty, lambda p: p.manifest["tensors"].update(w=raw().record("w"))),
    # Its records
    "record_a_list": of(raw, lambda p: p.manifest["tensors"].update(w=[])),
    "scheme_unknown": of(raw, set_record(scheme="quaternary")),
    "scheme_a_list": of(raw, set_record(scheme=["raw"])),
    "scheme_missing": of(raw, set_record(scheme=...)),
    "checksum_missing": of(raw, set_record(checksum=...)),
    "checksum_in_capitals": of(raw, set_record(checksum="ABCDEF0123456789")),
    "checksum_with_a_line_feed": of(raw, set_record(checksum="0123456789abcdef\n")),
    "mantissa_bits_missing": of(lossless, set_record(mantissa_bits=...)),
    "mantissa_bits_true": of(lossless, set_record(mantissa_bits=True)),
    "mantissa_bits_a_float": of(lossless, set_record(mantissa_bits=0.0)),
    "mantissa_bits_negative": of(lossless, set_record(mantissa_bits=-1)),
    "mantissa_bits_8_of_bf16": of(lossless, set_record(mantissa_bits=8)),
    "mantissa_bits_of_2_to_the_62": of(lossless, set_record(mantissa_bits=1 << 62)),
    "lossless_integers": of(lossless, set_original(dtype="U16")),
    "lossless_without_weights": of(lossless, without_weights),
    "lossless_of_2_to_the_60_weights": of(lossless, set_original(shape=[1 << 60], data_offsets=[0, 1 << 61])),
    "streams_a_list": of(lossless, set_record(streams=[])),
    "streams_without_words": of(lossless, remove_checksum),
    "streams_with_an_unknown_one": of(lossless, lambda p: p.record("w")["streams"].update(more="0" * 16)),
    "streams_checksum_a_number": of(lossless, lambda p: p.record("w")["streams"].update(words=0), seal=False),
    "truncated_without_original": of(truncated, set_record(original=...)),
    "truncated_without_loss": of(truncated, set_record(loss=...)),
    "loss_negative": of(truncated, set_record(loss={"max_relative": -1, "rms_relative": 0})),
    "loss_true": of(truncated, set_record(loss={"max_relative": True, "rms_relative": 0})),
    "loss_of_400_digits": of(truncated, set_record(loss={"max_relative": 10**400, "rms_relative": 0})),
    "loss_infinite": of(truncated, manifest_text(lambda text: text.replace(b"0.5", b"1e999"))),
    "block_size_without_normaliser": of(truncated, set_record(block_size=64)),
    "normaliser_without_block_size": of(lambda: truncated("BF16", 64), set_record(block_size=...)),
    "block_size_of_48": of(lambda: truncated("BF16", 64), set_record(block_size=48)),
    "block_size_of_2_to_the_62": of(lambda: truncated("BF16", 64), set_record(block_size=1 << 62)),
    "block_size_true": of(lambda: truncated("BF16", 64), set_record(block_size=True)),
    "block_size_of_fp8": lambda: put_together(truncated("F8_E4M3", 64)),
    "raw_of_another_dtype": of(raw, set_original(dtype="I8")),
    "raw_of_another_shape": of(raw, set_original(shape=[2, 4])),
    "raw_of_another_size": of(of_unknown_dtype, set_original(data_offsets=[0, 1 << 61])),
    # Ternary ones
    "ternary_of_fp8": of(ternary, set_original(dtype="F8_E4M3", shape=[6, 100])),
    "ternary_of_fp64": of(ternary, set_original(dtype="F64", shape=[3, 25])),
    "ternary_scalar": of(ternary, set_original(shape=[], data_offsets=[0, 2])),
    "ternary_without_weights": of(ternary, without_weights),
    "ternary_of_2_to_the_60_weights": of(ternary, set_original(shape=[1 << 60], data_offsets=[0, 1 << 61])),
    "ternary_with_streams_of_floats": of(lossless, set_record(**TERNARY_FIELDS)),
    "lossless_with_codes": of(ternary, set_record(scheme="lossless", mantissa_bits=0)),
    "packing_unknown": of(ternary, set_record(packing="3bit")),
    "packing_missing": of(ternary, set_record(packing=...)),
    "packing_the_other": of(ternary, set_record(packing=WORDS)),
    "quantizer_a_list": of(ternary, set_record(quantizer=["absmean"])),
    "scale_dtype_bf16": of(ternary, set_record(scale_dtype="BF16")),
    "group_0": of(ternary, set_record(group=0)),
    "group_true": of(ternary, set_record(group=True)),
    "group_of_text": of(ternary, set_record(group="row")),
    "group_longer_than_a_row": of(lambda: ternary(TRITS, 100), set_record(group=101)),
    "group_of_2_to_the_62": of(lambda: ternary(TRITS, 100), set_record(group=1 << 62)),
    "group_with_too_few_scales": of(ternary, set_record(group=10)),
    "ternary_with_original_without_loss": of(ternary, set_record(loss=...)),
    "relative_l2_negative": of(
        ternary, set_record(loss={"max_relative": 1, "rms_relative": 1, "relative_l2": -1})
    ),
    "trits_of_no_code": of(ternary, set_bytes("codes", 0, 1)),
    "trits_too_long": of(ternary, resize("codes", 16)),
    "trits_too_short": of(ternary, resize("codes", -16)),
    "words_with_code_3": of(lambda: ternary(WORDS), set_bytes("codes", 0, 3)),
    "words_filled_up_with_ones": of(lambda: ternary(WORDS), set_bytes("codes", 27, 0x95)),
    "words_too_long": of(lambda: ternary(WORDS), resize("codes", 16)),
    "scale_infinite": of(ternary, set_bytes("scale", 2, 0x80, 0x7F)),
    "scale_nan": of(lambda: ternary(WORDS, 50, "F16"), set_bytes("scale", 10, 1, 0x7C)),
    "scale_negative": of(ternary, set_bytes("scale", 3, 0xBF)),
    "scale_minus_zero": of(lambda: ternary(TRITS, 7), set_bytes("scale", 176, 0, 0, 0, 0x80)),
    "scale_too_long": of(ternary, resize("scale", 16)),
    "codes_damaged": of(ternary, set_bytes("codes", 59, 0x80)),
    "codes_damaged_with_old_checksum": of(ternary, set_bytes("codes", 59, 0x80), seal=False),
    # Aliases
    "alias_of_a_number": of(lambda: raw("v"), set_alias(of=1)),
    "alias_of_nothing": of(lambda: raw("v"), set_alias(of="x")),
    "alias_of_itself": of(lambda: raw("v"), set_alias(of="v")),
    "alias_of_each_other": of(lambda: raw("v", "u"), alias_each_other),
    "alias_of_an_alias": of(lambda: raw("v", "u"), set_alias(of="u")),
    "alias_of_another_shape": of(lambda: raw("v"), lambda p: p.set_original(reshaped(p.original))),
    "alias_file_missing": of(lambda: raw("v"), set_alias(file="x.safetensors")),
    "alias_file_above": of(lambda: raw("v"), set_alias(file="../x.safetensors")),
    "alias_file_absolute": of(lambda: raw("v"), set_alias(file="/etc/passwd")),
    "alias_file_with_a_backslash": of(lambda: raw("v"), set_alias(file="..\\x.safetensors")),
    "alias_file_with_a_lone_surrogate": of(lambda: raw("v"), set_alias(file="\ud800.safetensors")),
    "alias_with_another_checksum": of(lambda: raw("v"), set_alias(checksum="0" * 16)),
    # Entries
    "stream_missing": of(lossless, remove_entry),
    "stream_of_bytes": of(lossless, reshape("w:index", "U8", [16])),
    "stream_of_two_dimensions": of(lossless, reshape("w:index", "U16", [2, 4])),
    "stream_not_padded": of(lossless, resize("sign_mantissa", -1)),
    "stream_damaged": of(lossless, flip_stream_byte, seal=False),
    "stream_with_the_name_of_a_tensor": of(lossless, collide),
    "tensor_with_the_name_of_the_header": of(empty, self_referring_header),
    "tensor_damaged": of(lossless, flip_stream_byte),
    "raw_tensor_damaged": of(raw, lambda p: p.put("w", bytes(8))),
    # Tables
    "table_of_nothing": of(lossless, lambda p: p.put("w:table", b"")),
    "table_group_0": of(lossless, set_table(0, [120], [2048, 2048])),
    "table_group_3": of(lossless, set_table(3, [120], [2048, 2048])),
    "table_group_2_of_f64": of(lambda: lossless("F64"), set_table(2, [120], [2048, 2048])),
    "table_palette_empty": of(lossless, set_table(1, [], [2048, 2048])),
    "table_palette_of_17_pairs": of(lossless, set_table(2, list(range(17)), [2048, 2048])),
    "table_palette_of_257": of(lambda: lossless("F64"), set_table(1, list(range(257)), [2048, 2048])),
    "table_palette_falls": of(lossless, set_table(1, [121, 120], [2048, 2048])),
    "table_palette_repeats": of(lossless, set_table(1, [120, 120], [2048, 2048])),
    "table_palette_beyond_fp16": of(lambda: lossless("F16"), set_table(1, [32], [2048, 2048])),
    "table_palette_beyond_bf16": of(lossless, set_table(1, [256], [2048, 2048])),
    "table_palette_beyond_f64": of(lambda: lossless("F64"), set_table(1, [2048], [2048, 2048])),
    "table_frequencies_none": of(lossless, set_table(1, [120], [])),
    "table_frequencies_257": of(lossless, set_table(1, [120], [16] * 256 + [0])),
    "table_frequencies_of_4095": of(lossless, set_table(1, [120], [2048, 2047])),
    "table_frequencies_overflow_16_bits": of(lossless, set_table(1, [120], [65535, 4097])),
    "table_frequency_of_4096": of(lossless, set_table(1, [120], [4096])),
    "table_longer_than_it_says": of(lossless, resize("table", 16)),
    "table_of_2000_bytes": of(lossless, resize("table", 2000 - 240)),
    # Blocks
    "index_too_long": of(lossless, resize("index", 16)),
    "index_counts_too_many": of(lossless, set_words("index", 0, 65535)),
    "index_counts_too_few": of(lossless, set_words("index", 0, 0)),
    "block_without_states": of(lossless, halve_block),
    "block_with_too_many_escapes": of(lossless, set_words("words", 0, 65535)),
    "block_with_an_escape_too_many": of(escaping, set_words("words", 0, 2)),
    "block_with_a_wrong_state": of(escaping, set_words("words", 33, 60_000)),
    "block_with_too_few_words": of(lossless, shorten_block),
    "escape_behind_the_end": of(escaping, set_escape(0, 300)),
    "escape_behind_the_block": of(escaping, set_escape(0, 65535)),
    "escape_of_exponent_256": of(escaping, set_escape(1, 256)),
    # Planes and normalisers
    "planes_too_long": of(lossless, resize("sign_mantissa", 16)),
    "planes_too_short": of(lossless, resize("sign_mantissa", -16)),
    "normaliser_too_long": of(lambda: truncated("BF16", 8), resize("normaliser", 16)),
    "normaliser_too_short": of(lambda: truncated("BF16", 8), resize("normaliser", -16)),
    "delta_without_requirement": of(delta, set_manifest(requires=None)),
    "delta_that_requires_a_number": of(delta, set_manifest(requires=["delta", 1])),
    "delta_that_requires_more": of(delta, set_manifest(requires=["delta", "speed"])),
    "delta_of_a_number": of(delta, set_record(of=1)),
    "delta_of_a_file_above": of(delta, set_record(file="../w.safetensors")),
    "delta_without_base": of(delta, set_record(base=...)),
    "delta_with_a_short_base": of(delta, set_record(base="0" * 15)),
    "delta_shift_of_16": of(delta, set_record(shift=16)),
    "delta_shift_of_64": of(delta, set_record(shift=64)),
    "delta_shift_true": of(delta, set_record(shift=True)),
    "delta_low_bits_negative": of(delta, set_record(low_bits=-1)),
    "delta_low_bits_without_low": of(delta, set_record(low_bits=3)),
    "delta_digits_0": of(delta, set_record(digits=0)),
    "delta_digits_2": of(delta, set_record(digits=2)),
    "delta_digits_5": of(delta, set_record(digits=5)),
    "delta_digits_2_to_the_62": of(delta, set_record(digits=1 << 62)),
    "delta_of_integers": of(delta, set_original(dtype="I16")),
    "delta_of_nothing": of(delta, set_original(shape=[0], data_offsets=[0, 0])),
    "delta_of_too_many_weights": of(delta, set_original(shape=[1 << 40], data_offsets=[0, 1 << 41])),
    "delta_group_2": of(delta, set_words("table", 1, 2)),
    "delta_group_0": of(delta, set_words("table", 1, 0)),
    "delta_without_tables": of(delta, lambda p: p.put("w:table", bytes(16))),
    "delta_with_256_tables": of(delta, set_words("table", 0, 256)),
    "delta_with_a_table_too_many": of(delta, set_words("table", 0, 2)),
    "delta_table_cut_short": of(delta, set_words("table", 2, 2, 4000)),
    "delta_table_of_digit_256_of_8_bits": of(lambda: delta("F8_E4M3"), set_words("table", 5, 256)),
    "delta_choice_beyond_the_tables": of(delta, set_bytes("choice", 0, 1)),
    "delta_choice_of_a_list": of(delta, set_bytes("choice", 1, 1)),
    "delta_choice_too_long": of(delta, resize("choice", 16)),
    "delta_index_too_long": of(delta, resize("index", 16)),
    "delta_index_counts_too_many": of(delta, set_words("index", 1, 400)),
    "delta_words_damaged": of(delta, set_words("words", 40, 0), seal=False),
    "delta_block_with_a_wrong_state": of(delta, set_words("words", 33, 0)),
    "delta_list_with_half_an_entry": of(delta, set_words("index", 1, 3)),
    "delta_list_falls": of(delta, set_list(2, 5)),
    "delta_list_behind_the_end": of(delta, set_list(2, 300)),
    "delta_list_with_a_digit_of_0": of(delta, set_list(1, 0)),
    "delta_list_with_a_digit_too_large": of(lambda: delta("F8_E4M3"), set_list(3, 256)),
    # Quantized weights
    "quantized_without_requirement": of(quantized, set_manifest(requires=None)),
    "quantized_code_bits_missing": of(quantized, set_record(code_bits=...)),
    "quantized_code_bits_1": of(quantized, set_record(code_bits=1)),
    "quantized_code_bits_2": of(quantized, set_record(code_bits=2)),
    "quantized_code_bits_17": of(quantized, set_record(code_bits=17)),
    "quantized_code_bits_true": of(quantized, set_record(code_bits=True)),
    "quantized_row_factors_1": of(quantized, set_record(row_factors=1)),
    "quantized_column_factors_that_are_not_there": of(quantized, set_record(column_factors=True)),
    "quantized_loss_missing": of(quantized, set_record(loss=...)),
    "quantized_of_integers": of(quantized, set_original(dtype="I16")),
    "quantized_of_nothing": of(quantized, set_original(shape=[0], data_offsets=[0, 0])),
    "quantized_of_too_many_weights": of(
        quantized, set_original(shape=[1, 1 << 40], data_offsets=[0, 1 << 41])
    ),
    "quantized_of_too_many_rows": of(
        quantized, set_original(shape=[1 << 40, 1], data_offsets=[0, 1 << 41])
    ),
    "quantized_step_nan": of(quantized, set_bytes("grid", 0, 0, 0, 0xC0, 0x7F)),
    "quantized_step_infinite": of(quantized, set_bytes("grid", 0, 0, 0, 0x80, 0x7F)),
    "quantized_step_0": of(quantized, set_bytes("grid", 0, 0, 0, 0, 0)),
    "quantized_step_negative": of(quantized, set_bytes("grid", 0, 0, 0, 0x80, 0xBF)),
    "quantized_step_subnormal": of(quantized, set_bytes("grid", 0, 0xFF, 0xFF, 0x7F, 0)),
    "quantized_step_too_large": of(quantized, set_bytes("grid", 0, 0, 0, 0, 0x7E)),
    "quantized_step_times_factor_too_large": of(quantized, set_bytes("grid", 0, 0, 0, 0x80, 0x7B, 0xFF)),
    "quantized_grid_too_long": of(quantized, resize("grid", 16)),
    "quantized_grid_too_short": of(lambda: quantized(columns=True), resize("grid", -16)),
    "quantized_grid_damaged": of(quantized, set_bytes("grid", 2, 0x81), seal=False),
    "quantized_table_beyond_the_bits": of(quantized, set_bytes("grid", 8, 24)),
    "quantized_table_of_form_0": of(quantized, set_bytes("grid", 7, 0)),
    "quantized_table_of_form_4": of(quantized, set_bytes("grid", 7, 4)),
    "quantized_table_of_one_code": of(quantized, set_bytes("grid", 10, 0)),
    "quantized_table_of_17_codes_in_pairs": of(quantized, set_bytes("grid", 7, 2, 0, 0, 16)),
    "quantized_table_too_long": of(quantized, set_bytes("grid", 10, 30)),
    "quantized_table_of_other_pairs": of(quantized, set_bytes("grid", 7, 3)),
    "quantized_table_without_shares": of(quantized, set_bytes("grid", 11, *bytes(9))),
    "quantized_table_missing": of(lambda: quantized(columns=True), resize("grid", -32)),
    "quantized_pairs_of_9_bits": of(quantized, pairs_of_9_bits),
    "quantized_low_bits_0": of(quantized_low, set_record(low_bits=0)),
    "quantized_low_bits_1": of(quantized_low, set_record(low_bits=1)),
    "quantized_low_bits_3": of(quantized_low, set_record(low_bits=3)),
    "quantized_low_bits_4": of(quantized_low, set_record(low_bits=4)),
    "quantized_low_bits_missing": of(quantized_low, set_record(low_bits=...)),
    "quantized_low_bits_of_nothing": of(quantized, set_record(low_bits=2)),
    "quantized_low_too_short": of(quantized_low, resize("low", -16)),
    "quantized_low_too_long": of(quantized_low, resize("low", 16)),
    "quantized_low_damaged": of(quantized_low, set_bytes("low", 5, 0xFF), seal=False),
    "quantized_index_too_long": of(quantized, resize("index", 16)),
    "quantized_index_counts_too_many": of(quantized, set_words("index", 0, 40000)),
    "quantized_words_too_long": of(quantized, resize("words", 16)),
    "quantized_block_with_a_wrong_state": of(quantized, set_words("words", 33, 0)),
    "quantized_block_with_too_many_escapes": of(quantized, set_words("words", 0, 65535)),
    "quantized_escape_behind_the_end": of(quantized_escaping, set_escape(0, 300)),
    "quantized_escape_of_6_bits": of(quantized_escaping, set_escape(1, 32)),
    "pool_without_requirement": of(pooled, set_manifest(requires=None)),
    "pool_of_nothing": of(raw, set_manifest(requires=["pool"])),
    "pool_missing": of(pooled, lambda p: p.entries.pop("neuzip:pool") and None),
    "pool_too_short": of(pooled, lambda p: p.put("neuzip:pool", bytes(15))),
    "pool_of_words": of(pooled, lambda p: p.entries.update({"neuzip:pool": ("U16", [8], bytes(16))})),
    "pool_damaged": of(pooled, lambda p: p.put("neuzip:pool", bytes(16))),
    "pool_checksums_missing": of(pooled, lambda p: p.entries.pop("neuzip:pool_checksums") and None),
    "pool_checksums_too_short": of(pooled, lambda p: p.put("neuzip:pool_checksums", bytes(8))),
    "pool_beside_an_entry": of(pooled, lambda p: p.entries.update({"v": ("U8", [8], bytes(8))})),
    "pool_beside_a_record": of(
        pooled, lambda p: p.manifest["tensors"].update(v={"scheme": "raw", "checksum": "0" * 16})
    ),
    "base_without_requirement": of(the_base, set_manifest(requires=None)),
    "base_of_a_number": of(the_base, set_record(of=1)),
    "base_with_data": of(the_base, lambda p: p.entries.update({"w": ("U8", [1], b"x")})),
}  # fmt: skip


def refusal(path: Path) -> dict[str, str]:
    """The error that a file gives: its type, and its sentence with {file} for the path."""
    try:
        verify(path, jobs=1)
    except NeuzipError as error:
        message = error.message.replace(str(path), "{file}").replace(str(path.parent), "{folder}")
        return {"error": type(error).__name__, "message": message}
    raise AssertionError(f"{path.name} is not refused")


def good() -> Iterator[tuple[str, bytes]]:
    """What the damage is done to: all of these have to be read."""
    makers: dict[str, Callable[[], Parts]] = {
        "empty": empty,
        "raw": raw,
        "alias": lambda: raw("v", "u"),
        "pooled": pooled,
        "unknown dtype": of_unknown_dtype,
        "escaping": escaping,
        "truncated": truncated,
        "normalised": lambda: truncated("BF16", 8),
        "ternary": ternary,
        "ternary row": lambda: ternary(TRITS, 100, "F16"),
        "ternary words": lambda: ternary(WORDS),
        "ternary words group": lambda: ternary(WORDS, 7),
        "quantized": quantized,
        "quantized escaping": quantized_escaping,
        "quantized columns": lambda: quantized(columns=True),
        "quantized low bits": quantized_low,
    }
    makers |= {dtype: (lambda d=dtype: lossless(d)) for dtype in FORMATS}  # type: ignore[misc]
    for name, make in makers.items():
        yield name, put_together(make())


def write() -> None:
    """Write all files, and what each of them gives."""
    expected: dict[str, dict[str, str]] = {}
    for old in HERE.glob("*.safetensors"):
        old.unlink()
    for name, make in BAD.items():
        path = HERE / f"{name}.safetensors"
        path.write_bytes(make())
        expected[path.name] = refusal(path)
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for _, data in good():
            sound = Path(folder) / "good.safetensors"
            sound.write_bytes(data)
            verify(sound, jobs=1)
    write()
