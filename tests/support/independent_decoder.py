"""A second decoder of the neuzip container format, written from formats/SPEC.md alone.

It shares no code with neuzip and is meant to be read beside the specification, section by section. Without
the package `xxhash` it leaves the checksums unchecked.

    python tests/support/independent_decoder.py CONTAINER_OR_FOLDER OUT [BASE_OF_A_DELTA]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

xxhash: Any
try:
    import xxhash
except ImportError:
    xxhash = None


class SpecViolation(ValueError):
    """The file breaks a rule of the specification."""


def must(condition: object, sentence: str) -> None:
    if not condition:
        raise SpecViolation(sentence)


# --- 1. Conventions -----------------------------------------------------------------------------------------


def check_form(checksum: Any, what: str) -> None:
    """16 lower-case hexadecimal digits."""
    digits = isinstance(checksum, str) and len(checksum) == 16 and set(checksum) <= set("0123456789abcdef")
    must(digits, f"The checksum of {what} is not 16 lower-case hexadecimal digits.")


def check(data: bytes, checksum: Any, what: str) -> None:
    """XXH3 of 64 bits, seed 0."""
    check_form(checksum, what)
    must(xxhash is None or xxhash.xxh3_64_hexdigest(data) == checksum, f"The checksum of {what} differs.")


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        must(len(dict(pairs)) == len(pairs), f"An object of {what} has duplicate keys.")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise SpecViolation(f"{what} has {constant}, which is not JSON.")

    def whole(digits: str) -> int:
        must(len(digits) <= 20, f"{what} has a number of {len(digits)} digits.")  # section 10 allows that
        return int(digits)

    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=without_duplicates, parse_constant=refuse, parse_int=whole)
    except SpecViolation:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecViolation(f"{what} is not JSON in UTF-8: {error}.") from error
    must(isinstance(value, dict), f"{what} is not an object.")
    return dict(value)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pad16(length: int) -> int:
    return 16 * ceil_div(length, 16)


def check_padding(filler: Any, what: str) -> None:
    """Whoever leaves padding unread, as section 1 allows, does without this function."""
    must(not any(filler), f"The padding of {what} is not zero.")


def check_path(path: Any, what: str) -> None:
    """Sections 3 and 11: relative, and no part is empty, `.` or `..`."""
    good = (
        isinstance(path, str) and not {"", ".", ".."} & set(path.split("/")) and not set("\\\0") & set(path)
    )
    must(good, f"{what} is not a relative path of plain parts.")


# --- 2. File structure --------------------------------------------------------------------------------------

DTYPES = {
    4: ["F4"],
    6: ["F6_E2M3", "F6_E3M2"],
    8: ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"],
    16: ["U16", "I16", "F16", "BF16"],
    32: ["U32", "I32", "F32"],
    64: ["U64", "I64", "F64", "C64"],
}
BITS = {dtype: bits for bits, dtypes in DTYPES.items() for dtype in dtypes}


class Header:
    """A safetensors header: metadata and, by offset, entries (dtype, shape, begin, end)."""

    def __init__(self, data: bytes, what: str) -> None:
        self.end = 8 + int.from_bytes(data[:8], "little")
        must(self.end <= 8 + 100_000_000, f"The header of {what} is too long.")
        must(8 <= self.end <= len(data), f"The header of {what} is cut off.")
        must(data[8:9] == b"{", f"The header of {what} does not begin with a brace.")
        fields = parse_json(data[8 : self.end], f"The header of {what}")
        self.metadata = without_nulls(fields).get("__metadata__", {})
        fields.pop("__metadata__", None)
        good = isinstance(self.metadata, dict) and all(isinstance(v, str) for v in self.metadata.values())
        must(good, f"The metadata of {what} are not an object of strings.")

        self.entries: dict[str, tuple[str, list[int], int, int]] = {}
        for name, field in fields.items():
            keys = {"dtype", "shape", "data_offsets"}
            must(isinstance(field, dict) and keys <= set(field), f"Entry {name!r} of {what} has not {keys}.")
            dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
            lists = all(isinstance(v, list) and all(map(is_count, v)) for v in (shape, offsets))
            must(lists and len(offsets) == 2, f"Entry {name!r} of {what} lacks a shape or offsets.")
            must(len(shape) <= 64, f"Entry {name!r} of {what} has more than 64 dimensions.")
            must(max(shape + offsets) < 1 << 62, f"A number of entry {name!r} of {what} is too large.")
            must(isinstance(dtype, str), f"Entry {name!r} of {what} has no dtype.")
            size = 8 * (offsets[1] - offsets[0])
            right = size >= 0 and (dtype not in BITS or size == math.prod(shape) * BITS[dtype])
            must(right, f"Offsets and shape of entry {name!r} disagree.")
            self.entries[name] = (dtype, shape, *offsets)
        self.entries = dict(sorted(self.entries.items(), key=lambda item: item[1][2:]))
        self.size = 0
        for name, (_, _, begin, end) in self.entries.items():
            must(begin == self.size, f"There is a hole or an overlap before entry {name!r} of {what}.")
            self.size = end


# --- 3. Manifest --------------------------------------------------------------------------------------------


def without_nulls(record: Any) -> Any:
    """An object without the keys that are `null`: they count as absent."""
    return {k: v for k, v in record.items() if v is not None} if isinstance(record, dict) else record


def check_version(manifest: dict[str, Any], what: str) -> bool:
    """Whether it is a delta's."""
    version, requires = manifest.get("version"), without_nulls(manifest).get("requires", [])
    must(type(version) is int and version == 1, f"The version {version!r} of {what} is not known.")
    known = isinstance(requires, list) and all(name in ("delta", "pool", "quantized") for name in requires)
    must(known, f"{what} requires {requires!r}, which is not known.")
    return "delta" in requires


def is_figure(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


KEYS = {  # of each scheme, beside `scheme` and `checksum`
    "raw": [],
    "lossless": ["mantissa_bits", "streams"],
    "truncated": ["mantissa_bits", "streams", "block_size", "original", "loss"],
    "ternary": ["streams", "packing", "scale_dtype", "group", "quantizer", "original", "loss"],
    "quantized": ["code_bits", "low_bits", "row_factors", "column_factors", "streams", "original", "loss"],
    "alias": ["of", "file", "original"],
    "base": ["of", "file"],
    "delta": ["of", "file", "base", "shift", "low_bits", "digits", "streams"],
}


def check_manifest(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The records, each of which has the keys of its scheme."""
    is_delta = check_version(manifest, "the manifest")
    records = manifest.get("tensors")
    must(isinstance(records, dict), "The manifest has no object `tensors`.")
    records = {name: without_nulls(record) for name, record in dict(records or {}).items()}
    for name, record in records.items():
        must(isinstance(record, dict), f"The record of {name!r} is not an object.")
        scheme = record.get("scheme")
        must(isinstance(scheme, str) and scheme in KEYS, f"The scheme {scheme!r} is not known.")
        records[name] = record = {k: record[k] for k in ("scheme", "checksum", *KEYS[scheme]) if k in record}
        B = record.get("block_size")
        needed = ["checksum"]
        if scheme == "alias":
            needed += ["of"]
            must(isinstance(record.get("of"), str), f"Alias {name!r} does not name its tensor.")
            check_path(record.get("file", "this"), f"`file` of alias {name!r}")
        if scheme in ("base", "delta"):
            must(is_delta, f"{name!r} needs a base, and the manifest does not require `delta`.")
            must(isinstance(record.get("of"), str), f"{name!r} does not name the base's tensor.")
            check_path(record.get("file", "the one"), f"`file` of {name!r}")
        if scheme == "delta":
            needed += ["base"]
            for key, least, most in (("shift", 0, 63), ("low_bits", 0, 63), ("digits", 1, 4)):
                must(is_count(record.get(key)), f"`{key}` of {name!r} is not a count.")
                must(least <= record[key] <= most, f"`{key}` of {name!r} is out of range.")
            streams = {"table", "index", "words", "choice"} | ({"low"} if record["low_bits"] else set())
            good = isinstance(record.get("streams"), dict) and set(record["streams"]) == streams
            must(good, f"{name!r} has not the streams of its scheme.")
        if scheme in ("lossless", "truncated"):
            must(is_count(record.get("mantissa_bits")), f"The mantissa_bits of {name!r} are not a count.")
            good = "block_size" not in record or (is_count(B) and B in [1 << bit for bit in range(3, 15)])
            must(good, f"{name!r} has the block_size {B!r}.")
            others = {"codes", "scale", "grid", "choice", "low"} | ({"normaliser"} if B is None else set())
            streams = set(STREAMS) - others
            needed += ["original"] * (scheme == "truncated")
            good = isinstance(record.get("streams"), dict) and set(record["streams"]) == streams
            must(good, f"{name!r} has not the streams of its scheme.")
        if scheme == "ternary":
            G = record.get("group")
            must(record.get("packing") in ["trits", "2bit"], f"The packing of {name!r} is not known.")
            must(record.get("scale_dtype") in ["F32", "F16"], f"The scale_dtype of {name!r} is not known.")
            sources = ["absmean", "absmean-clamped", "least-squares", "exact"]
            must(record.get("quantizer") in sources, f"The quantizer of {name!r} is not known.")
            must(G is None or (is_count(G) and G > 0), f"{name!r} has the group {G!r}.")
            good = isinstance(record.get("streams"), dict) and set(record["streams"]) == {"codes", "scale"}
            must(good, f"{name!r} has not the streams of its scheme.")
        if scheme == "quantized":
            requires = without_nulls(manifest).get("requires", [])
            must("quantized" in requires, f"The manifest does not require what {name!r} does.")
            E = record.get("code_bits")
            must(is_count(E) and 2 <= E <= 16, f"`code_bits` of {name!r} are {E!r}.")
            k = record.get("low_bits", 0)
            good = "low_bits" not in record or (is_count(k) and k in (1, 2, 4, 8))
            must(good and E - k >= 2, f"`low_bits` of {name!r} are {k!r}.")
            for key in ("row_factors", "column_factors"):
                must(type(record.get(key, False)) is bool, f"`{key}` of {name!r} is not true or false.")
            streams = {"index", "words", "grid"} | ({"low"} if k else set())
            good = isinstance(record.get("streams"), dict) and set(record["streams"]) == streams
            must(good, f"{name!r} has not the streams of its scheme.")
        if scheme == "truncated" or (
            scheme in ("ternary", "quantized") and record.get("original") is not None
        ):
            loss = record.get("loss")
            figures = loss if isinstance(loss, dict) else {}
            for figure in (figures.get("max_relative"), figures.get("rms_relative")):
                must(is_figure(figure), f"The loss of {name!r} is not two numbers.")
            relative = figures.get("relative_l2")
            must(
                relative is None or is_figure(relative), f"The loss of {name!r} has no number `relative_l2`."
            )
        for stream, checksum in record.get("streams", {}).items():
            check_form(checksum, f"{name}:{stream}")
        for key in {"checksum", "original", "base"} & set(record):
            check_form(record[key], f"{name!r}, `{key}`")
        must(set(needed) <= set(record), f"The record of {name!r} lacks one of {needed}.")
    return dict(records or {})


# --- 4. Schemes ---------------------------------------------------------------------------------------------

FLOATS = {  # exponent bits E, mantissa bits M
    "BF16": (8, 7),
    "F16": (5, 10),
    "F32": (8, 23),
    "F64": (11, 52),
    "F8_E4M3": (4, 3),
    "F8_E4M3FNUZ": (4, 3),
    "F8_E5M2": (5, 2),
    "F8_E5M2FNUZ": (5, 2),
}

# --- 5. Streams ---------------------------------------------------------------------------------------------

STREAMS = {
    "table": "U16", "index": "U16", "words": "U16", "sign_mantissa": "U8", "normaliser": "U8",
    "codes": "U8", "scale": "U8", "grid": "U8", "low": "U8", "choice": "U8",
}  # fmt: skip


def plane_widths(w: int) -> list[int]:
    return [width for width in (32, 16, 8, 4, 2, 1) if w & width]


def stream_bytes(n: int, k: int, B: int | None, table: np.ndarray, index: np.ndarray) -> dict[str, int]:
    """The lengths of the streams of a tensor, without their padding."""
    blocks = ceil_div(n, 16384)
    return {
        "table": 2 * (3 + int(table[1]) + int(table[2])),
        "index": 2 * blocks,
        "words": 2 * int(index[:blocks].sum()),
        "sign_mantissa": sum(pad16(ceil_div(n * width, 8)) for width in plane_widths(1 + k)),
        "normaliser": ceil_div(n, B or n),
    }


def join_planes(data: bytes, n: int, w: int) -> np.ndarray:
    """The fields of w bits of all weights."""
    fields = np.zeros(n, np.uint64)
    for width in plane_widths(w):
        length = ceil_div(n * width, 8)
        plane = np.frombuffer(data[:length], f"<u{max(width // 8, 1)}")
        if width < 8:
            shifts = np.arange(0, 8, width, dtype=np.uint8)
            plane = (plane[:, None] >> shifts & np.uint8((1 << width) - 1)).reshape(-1)
        check_padding(plane[n:], "a plane's last byte")
        check_padding(data[length : pad16(length)], "a plane")
        fields = fields << np.uint64(width) | plane[:n].astype(np.uint64)
        data = data[pad16(length) :]
    return fields


# --- 6. Table -----------------------------------------------------------------------------------------------


class Table:
    """What every symbol stands for, and the slots it owns."""

    def __init__(self, words: np.ndarray, E: int) -> None:
        self.g, p, f = (int(word) for word in words[:3])
        palette, F = words[3 : 3 + p], words[3 + p : 3 + p + f]
        must(self.g == 1 or (self.g == 2 and E <= 8), f"The group cannot be {self.g}.")
        must(1 <= p <= (256 if self.g == 1 else 16), f"The palette cannot have {p} exponents.")
        must(1 <= f <= 256, f"There cannot be {f} frequencies.")
        must((np.diff(palette) > 0).all(), "The palette is not in strictly rising order.")
        must(palette[-1] < 1 << E, "The palette has an exponent that the dtype does not have.")
        must(F.sum() == 4096 and F.max() < 4096, "The frequencies are not parts of 4096.")
        self.exponent = np.zeros(256, np.int64)
        self.exponent[:p] = palette
        self.F = np.zeros(256, np.int64)
        self.F[:f] = F
        self.C = np.cumsum(self.F) - self.F
        self.owner = np.repeat(np.arange(256), self.F)
        self.exponents = 1 << E


# --- 7. Blocks ----------------------------------------------------------------------------------------------


def decode_block(words: np.ndarray, m: int, table: Table) -> np.ndarray:
    """The m exponents of one block; all 32 lanes take a step at once."""
    g, R = table.g, ceil_div(m, 256)
    T = 8 * R // g
    e = int(words[0]) if len(words) else 0
    must(len(words) >= 65 + 2 * e, "A block is too short for its states and escapes.")
    x = words[33:65] << 16 | words[1:33]
    refill, escapes = np.split(words[65:], [len(words) - 65 - 2 * e])
    symbols, used = np.empty((T, 32), np.int64), 0
    for t in range(T - 2):
        slot = x & 4095
        symbols[t] = s = table.owner[slot]
        x = table.F[s] * (x >> 12) + slot - table.C[s]
        low = np.flatnonzero(x < 65536)
        must(used + len(low) <= len(refill), "A block has too few refill words.")
        x[low] = x[low] << 16 | refill[used : used + len(low)]
        used += len(low)
    symbols[T - 2], symbols[T - 1] = x & 255, x >> 8 & 255
    must(used == len(refill), "A block has refill words that are not used.")
    must((x >> 16 == 1).all(), "A lane does not end in the state it has to.")

    s = symbols.reshape(R, 8 // g, 32).transpose(0, 2, 1)
    exponents = table.exponent[s if g == 1 else np.stack([s & 15, s >> 4], axis=-1)].reshape(-1)[:m]
    before = -1
    for position, exponent in escapes.reshape(e, 2).tolist():
        must(position > before, "The positions of the escapes do not rise.")
        must(position < m, f"An escape is at {position}, outside its block.")
        must(exponent < table.exponents, f"An escape has the exponent {exponent}, which the dtype has not.")
        exponents[position] = exponent
        before = position
    return np.asarray(exponents)


# --- 8. Normaliser ------------------------------------------------------------------------------------------


def normalise(pattern: np.ndarray, dtype: str, q: np.ndarray) -> np.ndarray:
    """Every weight times 1 + q / 256."""
    with np.errstate(all="ignore"):
        factor = (1 + q / 256).astype("<f8" if dtype == "F64" else "<f4")
        if dtype == "BF16":
            product = ((pattern.astype("<u4") << np.uint32(16)).view("<f4") * factor).view("<u4")
            nearest = product + np.uint32(0x7FFF) + (product >> np.uint32(16) & np.uint32(1))  # ties to even
            return np.asarray(nearest >> np.uint32(16), "<u2")
        value = pattern.view({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype])
        return np.asarray((value.astype(factor.dtype) * factor).astype(value.dtype).view(pattern.dtype))


# --- 9. Ternary weights -------------------------------------------------------------------------------------

TERNARY = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}


def ternary_bytes(n: int, c: int, G: int | None, packing: str, scale_dtype: str) -> dict[str, int]:
    """The lengths of the streams of a ternary tensor, without their padding."""
    scales = 1 if G is None else n // c * ceil_div(c, G)
    codes = ceil_div(n, 5) if packing == "trits" else 4 * (n // c) * ceil_div(c, 16)
    return {"codes": codes, "scale": scales * {"F32": 4, "F16": 2}[scale_dtype]}


def ternary_codes(data: bytes, n: int, c: int, packing: str) -> np.ndarray:
    """The codes of all weights."""
    if packing == "trits":
        v = np.arange(243)
        five = np.full((256, 5), 3)  # by byte: the digits of v, or what no byte stands for
        five[-(-256 * v // 243)] = np.stack([v // 3**power % 3 for power in (4, 3, 2, 1, 0)], axis=1)
        codes = five[np.frombuffer(data, np.uint8)].reshape(-1)
        must((codes < 3).all(), "A byte stands for no five codes.")
        filler, codes = codes[n:], codes[:n]
    else:
        numbers, e = np.frombuffer(data, "<u4").reshape(n // c, -1), np.arange(16)
        rows = (numbers[:, :, None] >> (8 * (e % 4) + 2 * (e // 4)).astype("<u4") & np.uint32(3)).astype(int)
        must((rows < 3).all(), "A code is 2.")
        rows = rows.reshape(n // c, -1)
        filler, codes = rows[:, c:], rows[:, :c].reshape(-1)
    must((filler == 1).all(), "What fills up the codes is not 0.")
    return np.asarray(codes - 1)


def ternary_patterns(codes: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """The patterns of weights from their codes and their scales in binary32."""
    pattern = TERNARY[dtype]
    if dtype == "BF16":
        wide = scale.view("<u4").astype(np.uint64)
        rounded = wide + 0x7FFF + (wide >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)  # ties to even
    elif dtype == "F16":
        with np.errstate(all="ignore"):
            rounded = scale.astype("<f2").view("<u2")
    else:
        rounded = scale.view("<u4")
    sign = np.array(1 << 8 * np.dtype(pattern).itemsize - 1, pattern)
    rounded = rounded.astype(pattern)
    return np.where(codes == 0, np.array(0, pattern), np.where(codes < 0, rounded | sign, rounded))


# --- 10. What a reader checks -------------------------------------------------------------------------------


class Container:
    """A container whose structure is right (sections 2 to 5). `opened` has all that aliases led to."""

    def __init__(self, path: Path, opened: dict[Path, Container], base: Base | None = None) -> None:
        self.path, self.opened, self.base = path, opened, base
        opened[path] = self
        self.data = path.read_bytes()
        self.header = Header(self.data, "the container")
        metadata = self.header.metadata
        must("neuzip" in metadata, "This is not a container.")
        must(metadata["neuzip"] == "1", f"The format version {metadata['neuzip']!r} is not known.")
        text = self.data[: self.header.end]
        check_padding(text[text.rindex(b"}") + 1 :].strip(b" "), "the header")
        must(self.header.end + self.header.size == len(self.data), "The entries do not fill the file.")
        manifest_bytes, self.original_header = self.entry("neuzip:manifest"), self.entry("neuzip:header")
        check(manifest_bytes, metadata.get("neuzip_manifest"), "neuzip:manifest")
        manifest = parse_json(manifest_bytes, "The manifest")
        self.records = check_manifest(manifest)
        self.is_delta = check_version(manifest, "the manifest")
        check(self.original_header, manifest.get("header"), "neuzip:header")
        original = Header(self.original_header, "neuzip:header")
        must(original.end == len(self.original_header), "neuzip:header is longer than its header.")
        self.tensors = {name: (dtype, shape) for name, (dtype, shape, _, _) in original.entries.items()}
        entries = ["neuzip:header", "neuzip:manifest"]
        self.pool, self.pooled = b"", dict[str, tuple[int, int]]()
        if "pool" in without_nulls(manifest).get("requires", []):
            self.find_pooled(original)
            entries += ["neuzip:pool", "neuzip:pool_checksums"]
        must(set(self.records) == set(self.tensors), "The records are not those of the tensors.")
        own = len(entries)
        for name, record in self.records.items():
            if record["scheme"] == "raw":
                entries.append(name)
            elif record["scheme"] not in ("alias", "base", "pooled"):
                entries += [f"{name}:{stream}" for stream in record["streams"]]
        must(len(set(entries)) == len(entries), "Two entries have the same name.")
        must(set(entries) == set(self.header.entries), "The entries are not those of the manifest.")
        expected = {name: ("U8", [len(self.entry(name))]) for name in entries[:own]}
        for name, record in self.records.items():
            if record["scheme"] == "raw":
                expected[name] = self.tensors[name]
            elif record["scheme"] not in ("alias", "base", "pooled"):
                expected |= self.expected_streams(name)
        for name, value in expected.items():
            must(self.header.entries[name][:2] == value, f"Entry {name!r} is not {value[0]} {value[1]}.")
        for name, record in self.records.items():
            _, _, begin, end = original.entries[name]
            right = record["scheme"] != "raw" or len(self.entry(name)) == end - begin
            must(right, f"Entry {name!r} has not the length of the original.")

    def find_pooled(self, original: Header) -> None:
        """Section 4: records of the tensors that have none, and where they are in the pool."""
        self.pool, sums = self.entry("neuzip:pool"), self.entry("neuzip:pool_checksums")
        names, at = [name for name in original.entries if name not in self.records], 0
        must(bool(names) and len(sums) == 8 * len(names), "There are not 8 bytes for each pooled tensor.")
        for i, name in enumerate(names):
            self.records[name] = {"scheme": "pooled", "checksum": sums[8 * i : 8 * i + 8][::-1].hex()}
            begin, end = original.entries[name][2:]
            self.pooled[name] = at, at + end - begin
            at += end - begin
        must(at == len(self.pool), "The pool has not the length of its tensors.")

    def entry(self, name: str) -> bytes:
        must(name in self.header.entries, f"There is no entry {name!r}.")
        begin, end = self.header.entries[name][2:]
        return self.data[self.header.end + begin : self.header.end + end]

    def words(self, name: str) -> np.ndarray:
        must(self.header.entries[name][0] == "U16", f"Entry {name!r} is not U16.")
        return np.frombuffer(self.entry(name), "<u2").astype(np.int64)

    def expected_streams(self, name: str) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of every stream of a tensor."""
        record, (dtype, shape) = self.records[name], self.tensors[name]
        if record["scheme"] == "ternary":
            return self.expected_ternary(name)
        if record["scheme"] == "delta":
            return self.expected_delta(name)
        if record["scheme"] == "quantized":
            return self.expected_quantized(name)
        n, k, B = math.prod(shape), record["mantissa_bits"], record.get("block_size")
        must(dtype in FLOATS and n > 0, f"{name!r} cannot be {record['scheme']}: {dtype}, {n} weights.")
        must(k <= FLOATS[dtype][1], f"{name!r} cannot have {k} mantissa bits.")
        must(B is None or dtype in ("BF16", "F16", "F32", "F64"), f"{dtype} has no block_size.")
        table, index = self.words(f"{name}:table"), self.words(f"{name}:index")
        must(len(table) >= 3, f"The table of {name!r} is too short.")
        return self.padded(name, stream_bytes(n, k, B, table, index))

    def expected_ternary(self, name: str) -> dict[str, tuple[str, list[int]]]:
        record, (dtype, shape) = self.records[name], self.tensors[name]
        must(dtype in TERNARY and shape and math.prod(shape) > 0, f"{name!r} cannot be ternary.")
        G = record.get("group")
        must(G is None or shape[-1] >= G, f"A group of {name!r} is longer than a row.")
        lengths = ternary_bytes(math.prod(shape), shape[-1], G, record["packing"], record["scale_dtype"])
        return self.padded(name, lengths)

    def expected_delta(self, name: str) -> dict[str, tuple[str, list[int]]]:
        """Section 13."""
        record, (dtype, shape) = self.records[name], self.tensors[name]
        n, k, D = math.prod(shape), record["low_bits"], record["digits"]
        must(dtype in FLOATS and n > 0, f"{name!r} cannot be a delta: {dtype}, {n} weights.")
        must(digit_bits(dtype, record, D - 1) >= 1, f"{name!r} has more digits than {dtype} has bits.")
        blocks, index = D * ceil_div(n, 16384), self.words(f"{name}:index")
        _, used = delta_tables(self.words(f"{name}:table"), dtype, record)
        lengths = {"table": 2 * used, "index": 2 * blocks, "words": 2 * int(index[:blocks].sum())}
        lengths["choice"] = blocks
        lengths["low"] = sum(pad16(ceil_div(n * width, 8)) for width in plane_widths(k))
        return self.padded(name, lengths)

    def expected_quantized(self, name: str) -> dict[str, tuple[str, list[int]]]:
        """Section 14."""
        record, (dtype, shape) = self.records[name], self.tensors[name]
        n, c = math.prod(shape), shape[-1] if shape else 1
        must(dtype in FLOATS and n > 0, f"{name!r} cannot be quantized: {dtype}, {n} weights.")
        index, k, blocks = self.words(f"{name}:index"), record.get("low_bits", 0), ceil_div(n, 16384)
        lengths = {"index": 2 * blocks, "words": 2 * int(index[:blocks].sum()), "low": ceil_div(n * k, 8)}
        rows, columns = record.get("row_factors", False), record.get("column_factors", False)
        start = 4 + (n // c if rows else 0) + (c if columns else 0)
        head = self.entry(f"{name}:grid")[start : start + 4]
        must(len(head) == 4, f"The grid of {name!r} has no table.")
        p = head[3] + 1
        lengths["grid"] = start + 4 + (p * p if head[0] == 3 else p)
        return self.padded(name, lengths)

    def padded(self, name: str, lengths: dict[str, int]) -> dict[str, tuple[str, list[int]]]:
        """What streams of these lengths are, filled up with zeros."""
        expected = {}
        for stream in self.records[name]["streams"]:
            check_padding(self.entry(f"{name}:{stream}")[lengths[stream] :], f"{name}:{stream}")
            itemsize = 2 if STREAMS[stream] == "U16" else 1
            expected[f"{name}:{stream}"] = (STREAMS[stream], [pad16(lengths[stream]) // itemsize])
        return expected

    def tensor(self, name: str) -> bytes:
        """Section 4: the bytes of a tensor."""
        record = self.records[name]
        if record["scheme"] == "pooled":
            restored = self.pool[slice(*self.pooled[name])]
        elif record["scheme"] == "raw":
            restored = self.entry(name)
        elif record["scheme"] in ("base", "delta"):
            restored = self.from_base(name)
        elif record["scheme"] == "alias":
            path, of = self.path.parent / record.get("file", self.path.name), record["of"]
            must(path.is_file(), f"{name!r} is an alias into {path.name!r}, which is not there.")
            target = self.opened.get(path) or Container(path, self.opened)
            must(of in target.tensors, f"{name!r} is an alias of {of!r}, which is not there.")
            must(target.tensors[of] == self.tensors[name], f"{name!r} and {of!r} differ in dtype or shape.")
            stored = target.records[of]
            must(stored["scheme"] != "alias", f"{name!r} is an alias of the alias {of!r}.")
            lossy = stored["scheme"] in ("truncated", "ternary", "quantized") and "original" in stored
            must(("original" in record) == lossy, f"`original` of {name!r} is wrong.")
            restored = target.tensor(of)
        else:
            for stream, checksum in record["streams"].items():
                check(self.entry(f"{name}:{stream}"), checksum, f"stream {name}:{stream}")
            apart = {"ternary": self.decode_ternary, "quantized": self.decode_quantized}
            restored = apart.get(record["scheme"], self.decode)(name).tobytes()
        check(restored, record["checksum"], f"tensor {name!r}")
        return restored

    def decode(self, name: str) -> np.ndarray:
        """Sections 4 to 8: the patterns of a tensor that is lossless or truncated."""
        record, (dtype, shape) = self.records[name], self.tensors[name]
        (E, M), k, n = FLOATS[dtype], record["mantissa_bits"], math.prod(shape)
        exponent = self.blocks(name, n, Table(self.words(f"{name}:table"), E)).astype(np.uint64)
        field = join_planes(self.entry(f"{name}:sign_mantissa"), n, 1 + k)
        sign, mantissa = field >> np.uint64(k), (field & np.uint64((1 << k) - 1)) << np.uint64(M - k)
        pattern = sign << np.uint64(E + M) | exponent << np.uint64(M) | mantissa
        pattern = np.asarray(pattern, f"<u{(1 + E + M) // 8}")
        if "block_size" in record:
            q = np.frombuffer(self.entry(f"{name}:normaliser"), np.uint8)
            pattern = normalise(pattern, dtype, np.repeat(q, record["block_size"])[:n])
        return pattern

    def blocks(self, name: str, n: int, table: Table) -> np.ndarray:
        """Section 7: the exponents of all weights, or what takes their part."""
        index = self.words(f"{name}:index")
        words, blocks = self.words(f"{name}:words"), []
        for b in range(ceil_div(n, 16384)):
            blocks.append(decode_block(words[: index[b]], min(16384, n - 16384 * b), table))
            words = words[index[b] :]
        return np.concatenate(blocks)

    def from_base(self, name: str) -> bytes:
        """Section 13: the bytes of a tensor that needs the base."""
        record, (dtype, _) = self.records[name], self.tensors[name]
        must(self.base is not None, f"{name!r} needs a base.")
        assert self.base is not None
        base = self.base.tensor(record.get("file"), record["of"], self.tensors[name])
        unchanged = record["scheme"] == "base"
        check(base, record["checksum" if unchanged else "base"], f"the base's tensor {record['of']!r}")
        if unchanged:
            return base
        for stream, checksum in record["streams"].items():
            check(self.entry(f"{name}:{stream}"), checksum, f"stream {name}:{stream}")
        (E, M), z = FLOATS[dtype], self.differences(name)
        b = E + M + 1
        v = np.array([x // 2 if x % 2 == 0 else -(x + 1) // 2 for x in z.tolist()], object)
        pattern = np.frombuffer(base, f"<u{b // 8}").astype(object)
        exponent = (pattern >> M) % 2**E
        for start in range(0, len(v), 2097152):  # from places to weights
            region = slice(start, start + 2097152)
            weights = np.argsort(exponent[region].astype(int), kind="stable")
            v[region][weights] = v[region].copy()
        new = ordered((ordered(pattern, b) + v * 2 ** record["shift"]) % 2**b, b)
        return new.astype(f"<u{b // 8}").tobytes()

    def differences(self, name: str) -> np.ndarray:
        """The numbers z of all places."""
        record, (dtype, shape) = self.records[name], self.tensors[name]
        n, k = math.prod(shape), record["low_bits"]
        tables, _ = delta_tables(self.words(f"{name}:table"), dtype, record)
        words, index = self.words(f"{name}:words"), self.words(f"{name}:index").tolist()
        choice = list(self.entry(f"{name}:choice"))
        z = np.zeros(n, object)
        if k:
            z += join_planes(self.entry(f"{name}:low"), n, k).astype(object)
        for j, of_digit in enumerate(tables):
            for start in range(0, n, 16384):
                m, count, number = min(16384, n - start), index.pop(0), choice.pop(0)
                block, words = words[:count], words[count:]
                digit = np.zeros(m, np.int64)
                if count >= 65:
                    must(number < len(of_digit), "A block is coded, and its table is not there.")
                    digit = decode_block(block, m, of_digit[number])
                else:
                    must(number == 0, "A block that is not coded has a table.")
                    must(count % 2 == 0, "A list of digits has half an entry.")
                    before = -1
                    for position, value in block.reshape(-1, 2).tolist():
                        must(before < position < m, "The positions of a list do not rise, or are outside.")
                        must(0 < value < 1 << digit_bits(dtype, record, j), f"A digit cannot be {value}.")
                        digit[position] = value
                        before = position
                z[start : start + m] += digit.astype(object) * 2 ** (k + 16 * j)
        return z

    def decode_quantized(self, name: str) -> np.ndarray:
        """Section 14: the weights of a tensor from its codes and its grid."""
        record, (dtype, shape) = self.records[name], self.tensors[name]
        n, c, E = math.prod(shape), shape[-1] if shape else 1, record["code_bits"]
        rows, columns = record.get("row_factors", False), record.get("column_factors", False)
        step = steps(self.entry(f"{name}:grid"), n, c, rows, columns)
        must(float(step.max()) * 2 ** (E - 1) <= largest(dtype), f"Steps of {name!r} are too large.")
        k, start = record.get("low_bits", 0), 4 + (n // c if rows else 0) + (c if columns else 0)
        table = Table(code_table(self.entry(f"{name}:grid")[start:], E - k), E - k)
        numbers = self.blocks(name, n, table)
        if k:
            numbers = numbers << k | join_planes(self.entry(f"{name}:low"), n, k).astype(np.int64)
        with np.errstate(under="ignore"):
            values = (numbers - 2 ** (E - 1)).astype("<f4") * step.reshape(-1)
        return nearest(values, dtype)

    def decode_ternary(self, name: str) -> np.ndarray:
        """Section 9: the patterns of a ternary tensor."""
        record, (dtype, shape) = self.records[name], self.tensors[name]
        n, c, G = math.prod(shape), shape[-1], record.get("group")
        lengths = ternary_bytes(n, c, G, record["packing"], record["scale_dtype"])
        stored = self.entry(f"{name}:scale")[: lengths["scale"]]
        scale = np.frombuffer(stored, {"F32": "<f4", "F16": "<f2"}[record["scale_dtype"]])
        must(np.isfinite(scale).all() and not np.signbit(scale).any(), f"A scale of {name!r} cannot be.")
        codes = ternary_codes(self.entry(f"{name}:codes")[: lengths["codes"]], n, c, record["packing"])
        i, j = np.divmod(np.arange(n), c)
        number = np.zeros(n, int) if G is None else i * ceil_div(c, G) + j // G
        return ternary_patterns(codes, scale.astype("<f4")[number], dtype)


# --- 13. Deltas ---------------------------------------------------------------------------------------------


def ordered(x: np.ndarray, b: int) -> np.ndarray:
    """f, of Python's numbers, which do not overflow."""
    return np.where(x <= 2 ** (b - 1), x, (2 ** (b - 1) - x) % 2**b)


def digit_bits(dtype: str, record: dict[str, Any], j: int) -> int:
    """E of digit j."""
    b = sum(FLOATS[dtype]) + 1
    return int(min(16, b - record["shift"] - record["low_bits"] - 16 * j))


def delta_tables(words: np.ndarray, dtype: str, record: dict[str, Any]) -> tuple[list[list[Table]], int]:
    """The tables of all digits, and how many words they take."""
    tables: list[list[Table]] = []
    used = 0
    for j in range(record["digits"]):
        must(len(words) > used and words[used] <= 255, "A digit's number of tables is missing, or too large.")
        tables.append([])
        count, used = int(words[used]), used + 1
        for _ in range(count):
            must(len(words) >= used + 3, "The tables are cut off.")
            head = words[used : used + 3].tolist()
            end = used + 3 + head[1] + head[2]
            must(len(words) >= end, "A table is cut off.")
            must(head[0] == 1, "The group of a delta's table is not 1.")
            tables[-1].append(Table(words[used:end], digit_bits(dtype, record, j)))
            used = end
    return tables, used


class Base:
    """A checkpoint, plain or compressed: a file, or a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tensor(self, file: str | None, name: str, kind: tuple[str, list[int]]) -> bytes:
        """The bytes of a tensor of this dtype and shape, as they are restored."""
        path = self.path if self.path.is_file() or file is None else self.path / file
        must(path.is_file(), f"The base has no file {file!r}.")
        data = path.read_bytes()
        header = Header(data, "the base")
        if "neuzip" in header.metadata:
            container = Container(path, {})
            must(container.tensors.get(name) == kind, f"The base has no such tensor {name!r}.")
            return container.tensor(name)
        must(name in header.entries, f"The base has no tensor {name!r}.")
        dtype, shape, begin, end = header.entries[name]
        must((dtype, shape) == kind, f"The base's tensor {name!r} is of another kind.")
        return data[header.end + begin : header.end + end]


def restore_file(path: Path, base: Path | None = None) -> bytes:
    """The bytes of the original file."""
    container = Container(Path(path), {}, None if base is None else Base(Path(base)))
    must(base is not None or not container.is_delta, "This is a delta, and needs its base.")
    return container.original_header + b"".join(container.tensor(name) for name in container.tensors)


# --- 14. Quantized weights ----------------------------------------------------------------------------------


def code_table(data: bytes, E: int) -> np.ndarray:
    """The words of section 6 for a table of section 14."""
    form, a, p = data[0], data[1] | data[2] << 8, data[3] + 1
    must(form in (1, 2, 3), f"There is no form {form} of tables.")
    must(2 <= p <= (256 if form == 1 else 16), f"A table of form {form} cannot have {p} numbers.")
    must(a + p <= 1 << E, "A table has numbers of too many bits.")
    W = [0 if b == 0 else (16 + b % 16) * 2 ** (b // 16) for b in data[4:]]
    if form == 1:
        w = W[:p]
    else:
        w = [0] * 256
        for j in range(p):
            for i in range(p):
                w[i + 16 * j] = W[i] * W[j] if form == 2 else W[i + p * j]
    must(sum(w) > 0, "All shares of a table are 0.")
    w = [x if 65536 * x >= sum(w) else 0 for x in w]
    total = sum(w)
    F = [max(1, 4096 * x // total) if x else 0 for x in w]
    while sum(F) < 4096:
        short = [4096 * x - f * total for x, f in zip(w, F, strict=True)]
        F[short.index(max(short))] += 1
    while sum(F) > 4096:
        over = [f * total - 4096 * x if f > 1 else -math.inf for x, f in zip(w, F, strict=True)]
        F[over.index(max(over))] -= 1
    if max(F) == 4096:
        only = F.index(4096)
        F[only] = 4095
        F[1 if only == 0 else 0] = 1
    head = [1 if form == 1 else 2, p, len(F)]
    return np.array([*head, *range(a, a + p), *F], np.int64)


def steps(data: bytes, n: int, c: int, rows: bool, columns: bool) -> np.ndarray:
    """The steps of all weights, binary32 [n / c, c], from the stream `grid`."""
    step = np.frombuffer(data[:4], "<f4")[0]
    must(np.finfo("<f4").tiny <= step < np.inf, f"The step is {step}.")
    b = np.frombuffer(data[4:], np.uint8).astype(np.int64)
    factors = np.ldexp(16.0 + (b & 15), (b >> 4) - 12).astype("<f4")
    row = factors[: n // c] if rows else np.ones(n // c, "<f4")
    column = factors[n // c if rows else 0 :][:c] if columns else np.ones(c, "<f4")
    return (step * row)[:, None] * column


def positive_numbers(dtype: str) -> np.ndarray:
    """The finite numbers of a dtype of 8 bits from 0 up: pattern p stands for number p."""
    E, M = FLOATS[dtype]
    bias = 2 ** (E - 1) - (0 if dtype.endswith("FNUZ") else 1)
    p = np.arange(128)
    e, m = p >> M, p & (1 << M) - 1
    numbers = np.where(e == 0, np.ldexp(m, 1 - bias - M), np.ldexp(m + (1 << M), e - bias - M))
    return numbers[: {"F8_E4M3": 127, "F8_E5M2": 124}.get(dtype, 128)]  # infinities and NaNs end them


def largest(dtype: str) -> float:
    """The largest finite number of a dtype, and of binary32."""
    native = {"F16": "<f2", "F32": "<f4", "F64": "<f4"}
    if dtype in native:
        return float(np.finfo(native[dtype]).max)
    return float((2 - 2.0**-7) * 2.0**127) if dtype == "BF16" else float(positive_numbers(dtype)[-1])


def nearest(values: np.ndarray, dtype: str) -> np.ndarray:
    """The patterns of binary32 numbers that are rounded to a dtype: to nearest, ties to even."""
    native = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if dtype in native:
        return np.asarray(values.astype(native[dtype]).view(native[dtype].replace("f", "u")))
    if dtype == "BF16":
        wide = values.view("<u4").astype(np.uint64)
        return (wide + 0x7FFF + (wide >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)).astype("<u2")
    numbers, magnitude = positive_numbers(dtype), np.abs(values.astype(np.float64))
    above = np.minimum(np.searchsorted(numbers, magnitude), len(numbers) - 1)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - magnitude, magnitude - numbers[below]
    p = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    sign = (values < 0) & ((p > 0) | (not dtype.endswith("FNUZ")))
    return (p | sign.astype(np.int64) << 7).astype(np.uint8)


# --- 11. Folders --------------------------------------------------------------------------------------------


def restore_folder(path: Path, base: Path | None = None) -> dict[str, bytes]:
    """The files of the original folder, by their paths in it."""
    folder, restored = Path(path), {}
    manifest = parse_json((folder / "neuzip/manifest.json").read_bytes(), "neuzip/manifest.json")
    is_delta = check_version(manifest, "neuzip/manifest.json")
    must(base is not None or not is_delta, "This is a delta, and needs its base.")
    files = manifest.get("files")
    must(isinstance(files, dict), "neuzip/manifest.json has no object `files`.")
    for name, entry in dict(files or {}).items():
        check_path(name, f"The path {name!r}")
        kind = entry.get("kind") if isinstance(entry, dict) else None
        must(kind in ["container", "carried", "rewritten"], f"{name!r} has the kind {kind!r}.")
        stored = folder / ("neuzip/original" if kind == "rewritten" else "") / name
        must(stored.is_file(), f"{name!r} is not there.")
        if kind == "container":
            restored[name] = restore_file(stored, base)
            continue
        data = stored.read_bytes()
        must(entry.get("bytes") == len(data), f"{name!r} has not the length of the original.")
        check(data, entry.get("checksum"), name)
        restored[name] = data
    return restored


if __name__ == "__main__":
    source, out, base = (*map(Path, sys.argv[1:]), None)[:3]
    assert source is not None
    assert out is not None
    if source.is_dir():
        for name, data in restore_folder(source, base).items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
    else:
        out.write_bytes(restore_file(source, base))
