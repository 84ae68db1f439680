"""formats/SPEC.md is the authority: a decoder written from it alone reads what neuzip writes."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import independent_decoder as decoder
import numpy as np
import pytest
import xxhash
from golden import make as golden
from safetensors import safe_open

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.errors import NeuzipError
from neuzip.formats import manifest
from neuzip.formats import safetensors_file as tensor_file
from neuzip.formats.container import (
    HEADER_ENTRY,
    MANIFEST_ENTRY,
    POOL_CHECKSUMS_ENTRY,
    POOL_ENTRY,
    Container,
    stream_name,
)
from neuzip.formats.records import RECORDS, is_block_size
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans import model, numbers

ROOT = Path(__file__).resolve().parents[2]
SPEC = (ROOT / "formats" / "SPEC.md").read_text(encoding="utf-8")


GOLDEN_FOLDERS = (golden.V1, golden.WRITTEN, golden.LATER_WRITTEN)
GOLDEN_FILES = sorted(path for folder in GOLDEN_FOLDERS for path in folder.glob("*.safetensors"))


def base_of(path: Path) -> Path | None:
    """The base of a golden delta."""
    base = golden.BASES / path.name
    return base if base.exists() else None


def section(number: int) -> str:
    """The text of one section of the specification."""
    return re.split(rf"^## {number}\. .*$|^## {number + 1}\. .*$", SPEC, flags=re.MULTILINE)[1]


def tables(number: int) -> list[list[list[str]]]:
    """The cells of the tables of a section, by table and row, without the titles."""
    found = []
    for lines in re.findall(r"((?:^\|.*\n)+)", section(number), re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines.splitlines()]
        found.append([[cell.strip() for cell in row] for row in rows[2:]])
    return found


def names(cell: str) -> list[str]:
    """What stands in backticks."""
    return [name.strip('"') for name in re.findall(r"`([^`]+)`", cell)]


def states(number: int, pattern: str) -> tuple[int, ...]:
    """The numbers that a sentence of a section has where the pattern has groups."""
    match = re.search(pattern, " ".join(section(number).split()))
    assert match is not None, f"section {number} no longer says {pattern!r}"
    return tuple(int(number.replace(",", "")) for number in match.groups())


# The example of section 12

LINE = re.compile(r"^    ([0-9a-f]{4})  (.{47})  (.*)$", re.MULTILINE)


def hex_dump() -> bytes:
    data = b""
    for offset, digits, _ in LINE.findall(section(12)):
        assert int(offset, 16) == len(data), f"the offset {offset} of the hex dump is wrong"
        data += bytes.fromhex(digits)
    return data


def test_hex_dump_restores_to_a_file_without_tensors(tmp_path: Path):
    path = tmp_path / "smallest.safetensors"
    path.write_bytes(hex_dump())
    original = (2).to_bytes(8, "little") + b"{}"
    assert decoder.restore_file(path) == original
    with Container(path) as container:
        assert container.original.raw == original
        assert not container.manifest.tensors


def test_hex_dump_is_what_neuzip_writes(tmp_path: Path):
    assert golden.make(golden.GOLDEN["smallest"], tmp_path).container == hex_dump()


def test_hex_dump_has_the_text_and_lengths_beside_its_bytes():
    for _, digits, text in LINE.findall(section(12)):
        letters = "".join(chr(b) if 32 <= b < 127 else "." for b in bytes.fromhex(digits))
        assert text.rstrip() == letters.rstrip()
    parts = re.findall(r"\((\d+) bytes\):\n\n((?:    .*\n)+)", section(12))
    assert parts
    for length, lines in parts:
        assert sum(len(bytes.fromhex(digits)) for _, digits, _ in LINE.findall(lines)) == int(length)


# Constants that the code repeats


def test_dtypes_are_those_of_section_4():
    written = {
        dtype.strip(): tuple(int(number) for number in fields)
        for dtypes, *fields in tables(4)[0]
        for dtype in dtypes.split(",")
    }
    assert written == {f.name: (f.exponent_bits, f.mantissa_bits, f.bits) for f in FORMATS.values()}
    assert written == {name: (E, M, 1 + E + M) for name, (E, M) in decoder.FLOATS.items()}
    assert written == {name: (E, M, 1 + E + M) for name, (E, M) in golden.FIELDS.items()}


def test_streams_are_those_of_section_5():
    written = [(names(stream)[0], dtype) for stream, dtype, _ in tables(5)[0]]
    streams = {stream: dtype for record in RECORDS.values() for stream, dtype in record.STREAMS.items()}
    assert written == list(streams.items())
    assert written == list(decoder.STREAMS.items())


@pytest.mark.parametrize(
    "header",
    [
        '{"__metadata__":null,"w":{"dtype":"BF16","shape":[20000],"data_offsets":[0,40000]}}',
        '{"w":{"dtype":"BF16","x":{"y":[1,null]},"shape":[20000],"data_offsets":[0,40000]}}  ',
    ],
)
def test_headers_that_safetensors_reads_come_back(header: str, tmp_path: Path):
    """By the reader, and by the other decoder; safetensors itself reads them, too."""
    data = (np.random.default_rng(0).standard_normal(20_000).astype(np.float32).view(np.uint32) >> 16).astype(
        "<u2"
    )
    text = header.encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
    with safe_open(path, "np") as read:
        assert list(read.keys()) == ["w"]
    compress(path, tmp_path / "small.safetensors")
    decompress(tmp_path / "small.safetensors", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == path.read_bytes()
    assert decoder.restore_file(tmp_path / "small.safetensors") == path.read_bytes()


def test_entries_and_metadata_are_those_of_section_2():
    _, metadata, entries, sizes = tables(2)
    assert [names(entry)[0] for entry, _, _ in entries] == [
        stream_name("T", "S"), "T", POOL_ENTRY, HEADER_ENTRY, POOL_CHECKSUMS_ENTRY, MANIFEST_ENTRY,
    ]  # fmt: skip
    listed = {
        dtype: int(bits)
        for widths, dtypes in sizes
        for bits, group in zip(widths.split(", "), dtypes.split("; "), strict=True)
        for dtype in group.split(", ")
    }
    assert listed == tensor_file.DTYPE_BITS
    found = decoder.Header(hex_dump(), "the hex dump").metadata
    assert set(found) == {names(key)[0] for key, _ in metadata}
    assert found["neuzip"] == str(manifest.VERSION) == names(metadata[0][1])[0]
    assert found["format"] == names(metadata[2][1])[0]
    assert states(2, r"at most ([\d,]+)") == (tensor_file.MAX_HEADER,)


def test_schemes_are_those_of_sections_3_and_4():
    schemes = next(value for key, value, _ in tables(3)[1] if names(key) == ["scheme"])
    assert tuple(names(schemes)) == tuple(RECORDS)
    assert set(re.findall(r"^\* \*\*(\w+)\*\*", section(4), re.MULTILINE)) == set(RECORDS)
    least, most = states(3, r"a power of two from (\d+) to ([\d,]+)")
    assert [n for n in range(1, 40000) if is_block_size(n)] == [
        n for n in (1 << bit for bit in range(20)) if least <= n <= most
    ]


UNRELEASED: dict[str, Callable[[], golden.Input]] = {}
"""What makes a file of each scheme that no release has written yet, so that no golden file has it."""


def test_records_have_the_keys_of_section_3(tmp_path: Path):
    keys = defaultdict(set)
    required = defaultdict(set)
    for key, value, in_schemes in tables(3)[1]:
        for scheme in RECORDS:
            if in_schemes == "all" or scheme in re.findall(r"\w+", in_schemes.split(", and ")[0]):
                keys[scheme] |= set(names(key))
                required[scheme] |= set(names(key)) if not value.startswith("optional") else set()
    keys["alias"].add("original")
    seen = set()
    written = [tmp_path / f"{scheme}.safetensors" for scheme in UNRELEASED]
    for path, recipe in zip(written, UNRELEASED.values(), strict=True):
        path.write_bytes(golden.make(recipe, tmp_path).container)
    for path in (*GOLDEN_FILES, *written):
        for record in read_manifest(path)["tensors"].values():
            seen.add(record["scheme"])
            assert required[record["scheme"]] <= set(record) <= keys[record["scheme"]]
    assert seen == set(RECORDS)


def read_manifest(path: Path) -> dict[str, Any]:
    value = json.loads(decoder.Container(path, {}).entry(MANIFEST_ENTRY))
    assert isinstance(value, dict)
    return value


def test_numbers_are_those_of_sections_5_to_7():
    assert states(7, r"(\d+) \*lanes\*") == (numbers.LANES,)
    assert states(7, r"lane l has the (\d+) exponents (\d+) r \+ (\d+) l to \d+ r \+ \d+ l \+ (\d+)") == (
        numbers.RUN, numbers.LANES * numbers.RUN, numbers.RUN, numbers.RUN - 1,
    )  # fmt: skip
    assert states(7, r"exponents of weights (\d+) b") == (numbers.BLOCK,)
    assert states(5, r"ceil\(n / (\d+)\) words") == (numbers.BLOCK,)
    assert numbers.BLOCK == numbers.LANES * numbers.RUN * numbers.RUNS
    assert states(6, r"their sum MUST be (\d+), and none may be (\d+)") == (numbers.SCALE, numbers.SCALE)
    assert states(7, r"slot = x\[l\] & (\d+)") == (numbers.SCALE - 1,)
    assert states(7, r"\(x\[l\] >> (\d+)\)") == (numbers.SCALE_BITS,)
    assert states(7, r"if x\[l\] < (\d+)") == (numbers.LOWER,)
    assert states(7, r"for t from 0 to T - (\d+)") == (numbers.RAW_STEPS + 1,)
    fixed = [int(words) for words, _ in tables(7)[0] if words.isdecimal()]
    assert sum(fixed) == numbers.HEADER_WORDS
    assert states(6, r"<= p <= (\d+) for g = 1, 1 <= p <= (\d+) for g = 2") == tuple(model.PALETTE.values())


# Everything neuzip writes


def normal(name: str, n: int) -> np.ndarray:
    """Patterns of `n` weights as models have them."""
    random = np.random.default_rng(n)
    E, M = decoder.FLOATS[name]
    values = random.standard_normal(n)
    if name in NATIVE:
        return values.astype(NATIVE[name]).view(f"<u{(1 + E + M) // 8}")
    if name == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    sign, exponent = (values < 0).astype(np.uint8), np.maximum(np.frexp(values)[1] + (1 << E - 1), 1)
    return sign << (E + M) | exponent.astype(np.uint8) << M | random.integers(0, 1 << M, n, dtype=np.uint8)


NATIVE = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def weights_of_every_kind(name: str) -> dict[str, np.ndarray]:
    """Patterns of one dtype by a name that says what is special about them."""
    E, M = decoder.FLOATS[name]
    dtype, bits = np.dtype(f"<u{(1 + E + M) // 8}"), 1 + E + M
    random = np.random.default_rng(0)
    if bits <= 16:
        patterns = np.arange(1 << bits).astype(dtype)
    else:
        patterns = random.integers(0, 1 << bits, 20000, dtype=np.uint64).astype(dtype)
    exponents = patterns >> np.array(M, dtype) & np.array((1 << E) - 1, dtype)
    cases = {
        "all patterns": random.permutation(patterns),
        "all finite patterns": random.permutation(patterns[exponents < (1 << E) - 1]),
        "many exponents": random.permutation(patterns[exponents < (1 << E) - 1])[:5000]
        & np.array((1 << E + M + 1) - (1 << M), dtype),
        "constant": np.full(1000, normal(name, 1)[0]),
        "zeros": np.zeros(3000, dtype),
        "empty": np.empty(0, dtype),
    }
    cases |= {f"{n} normal": normal(name, n) for n in (1, 2, 255, 256, 257, 5000, 16383, 16384, 16385)}
    if name == "F32":
        cases["that was bf16"] = normal("BF16", 3000).astype("<u4") << np.uint32(16)
        cases["that was fp16"] = normal("F16", 3000).view("<f2").astype("<f4").view("<u4")
    return cases


SCHEMES = {
    "lossless": Scheme(),
    "k=1": Scheme("truncated", 1),
    "k=0 block=8": Scheme("truncated", 0, 8),
    "k=6 block=512": Scheme("truncated", 6, 512),
    "ternary": Scheme("ternary"),
    "ternary 2bit": Scheme("ternary", quantizer="least-squares", packing="2bit"),
    "ternary group=100": Scheme("ternary", group=100),
    "quantized": Scheme("quantized", step=0.1, row_factors=True, column_factors=True),
    "ternary 2bit group=64": Scheme("ternary", group=64, packing="2bit", scale_dtype="F16"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", decoder.FLOATS)
def test_decoder_restores_what_neuzip_writes(
    dtype: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("neuzip.compress.pieces.OVERHEAD", -(10**9))  # code even what does not shrink
    monkeypatch.setattr("neuzip.compress.schemes.raw.CODED_MINIMUM", 0)
    cases = weights_of_every_kind(dtype)
    tensors = {name: golden.Tensor(dtype, [len(p)], p.tobytes()) for name, p in cases.items()}
    source, packed, back = (tmp_path / f"{step}.safetensors" for step in ("source", "packed", "back"))
    source.write_bytes(golden.Input(tensors).to_bytes())
    compress(source, packed, [Rule("*", SCHEMES[scheme])], verify=False, allow_destructive=True)
    decompress(packed, back)

    container = decoder.Container(packed, {})
    assert container.records["empty"]["scheme"] == "raw"
    assert "raw" not in {record["scheme"] for name, record in container.records.items() if name != "empty"}
    assert decoder.restore_file(packed) == back.read_bytes()
    for name, patterns in cases.items():
        record = container.records[name]
        if "original" not in record:
            assert container.tensor(name) == patterns.tobytes(), name
        else:
            assert record["original"] == xxhash.xxh3_64_hexdigest(patterns.tobytes()), name
            if dtype in NATIVE:
                assert_loss(record["loss"], patterns.view(NATIVE[dtype]), container.tensor(name))


def test_ternary_weights_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows that fill no words, and groups that fill no rows."""
    monkeypatch.setattr("neuzip.compress.pieces.OVERHEAD", -(10**9))
    monkeypatch.setattr("neuzip.compress.schemes.raw.CODED_MINIMUM", 0)
    shapes = [[5, 16], [7, 33], [3, 2, 45], [40, 1], [1, 100], [150], [2, 1, 31]]
    schemes = [
        Scheme("ternary", group=group, packing=packing, scale_dtype=scale_dtype)
        for group in (None, "row", 1, 7, 16, 32)
        for packing in ("trits", "2bit")
        for scale_dtype in ("F32", "F16")
    ]
    tensors, rules = {}, []
    for number, scheme in enumerate(schemes):
        for shape in shapes:
            name = f"{number} {shape}".replace("[", "(")
            tensors[name] = golden.normal("BF16", math.prod(shape), seed=name)._replace(shape=shape)
        rules.append(Rule(f"{number} *", scheme))
    source, packed, back = (tmp_path / f"{step}.safetensors" for step in ("source", "packed", "back"))
    source.write_bytes(golden.Input(tensors).to_bytes())
    compress(source, packed, rules, verify=False, allow_destructive=True)
    decompress(packed, back)
    container = decoder.Container(packed, {})
    assert {record["scheme"] for record in container.records.values()} == {"ternary"}
    assert decoder.restore_file(packed) == back.read_bytes()


def assert_loss(loss: dict[str, float], original: np.ndarray, data: bytes) -> None:
    """The two figures are those of section 3."""
    a, b = original.astype(np.float64), np.frombuffer(data, original.dtype).astype(np.float64)
    relative = np.abs(b[a != 0] - a[a != 0]) / np.abs(a[a != 0])
    assert loss["max_relative"] == pytest.approx(relative.max(), rel=1e-5)
    assert loss["rms_relative"] == pytest.approx(math.sqrt(np.square(relative).mean()), rel=1e-5)
    if "relative_l2" in loss:
        l2 = np.linalg.norm(b - a) / np.linalg.norm(a)
        assert loss["relative_l2"] == pytest.approx(l2, rel=1e-5)


def checkpoint(folder: Path) -> dict[str, bytes]:
    """A folder with shards, tied weights in two of them, a subfolder, and JSON files that are rewritten."""
    w, v = golden.normal("BF16", 4000), golden.normal("F32", 2000)
    shards = {
        "model-1.safetensors": {"a": w, "b": v},
        "model-2.safetensors": {"tied a": w, "tied b": v, "c": golden.normal("F16", 3000)},
        "unet/diffusion.safetensors": {"a": w},
    }
    index = {"weight_map": dict.fromkeys("ab", "model-1.safetensors")}
    files = {name: golden.Input(tensors).to_bytes() for name, tensors in shards.items()} | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": b'{"model_type": "llama"}',
        "unet/config.json": b'{"quantization_config": {"bits": 4}}\n',
        "tokenizer/vocab.txt": b"\x00\xff",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return files


def test_decoder_restores_a_folder(tmp_path: Path):
    files = checkpoint(tmp_path / "source")
    compress(tmp_path / "source", tmp_path / "packed")
    shard = read_manifest(tmp_path / "packed" / "model-2.safetensors")
    assert shard["tensors"]["tied a"]["file"] == "model-1.safetensors"
    assert decoder.restore_folder(tmp_path / "packed") == files


def test_decoder_restores_a_folder_that_lost_something(tmp_path: Path):
    files = checkpoint(tmp_path / "source")
    compress(tmp_path / "source", tmp_path / "packed", [Rule("*", Scheme("truncated", 3, 64))])
    decompress(tmp_path / "packed", tmp_path / "back")
    restored = decoder.restore_folder(tmp_path / "packed")
    assert restored == {name: (tmp_path / "back" / name).read_bytes() for name in files}
    assert restored != files


# Golden files


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_golden_container_is_read_as_ever(path: Path, tmp_path: Path):
    expected = json.loads((path.parent / golden.EXPECTED).read_text())[path.stem]
    decompress(path, tmp_path / "back.safetensors", base=base_of(path))
    assert hashlib.sha256((tmp_path / "back.safetensors").read_bytes()).hexdigest() == expected
    assert hashlib.sha256(decoder.restore_file(path, base_of(path))).hexdigest() == expected


RECIPES = golden.GOLDEN | golden.LATER


@pytest.mark.parametrize("name", RECIPES)
def test_golden_container_is_written_as_ever(name: str, tmp_path: Path):
    made = golden.make(RECIPES[name], tmp_path)
    folder = golden.LATER_WRITTEN if name in golden.LATER else golden.WRITTEN
    same = made.container == (folder / f"{name}.safetensors").read_bytes()
    assert same, "neuzip writes other bytes than before; if that is wanted, see tests/golden/make.py"
    lossy = "original" in {
        key for record in read_manifest(tmp_path / "packed.safetensors")["tensors"].values() for key in record
    }
    assert (made.restored == made.original) is not lossy


@pytest.mark.parametrize("folder", [golden.V1, golden.WRITTEN], ids=lambda folder: folder.name)
def test_golden_folder_is_complete_and_small(folder: Path):
    assert {path.stem for path in folder.glob("*.safetensors")} == set(golden.GOLDEN)
    expected = json.loads((folder / golden.EXPECTED).read_text())
    assert expected == json.loads((golden.V1 / golden.EXPECTED).read_text())
    assert set(expected) == set(golden.GOLDEN)
    assert {path.stem for path in golden.BASES.iterdir()} == {"delta"}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
    assert sum(path.stat().st_size for path in golden.BASES.iterdir()) < 300_000


def test_later_golden_folder_is_complete_and_small():
    folder = golden.LATER_WRITTEN
    assert {path.stem for path in folder.glob("*.safetensors")} == set(golden.LATER)
    assert set(json.loads((folder / golden.EXPECTED).read_text())) == set(golden.LATER)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 100_000


@pytest.mark.parametrize("name", RECIPES | golden.WATCHED)
def test_sizes_are_as_ever(name: str, tmp_path: Path):
    with open(golden.SIZES, encoding="utf-8", newline="") as file:
        sizes = {
            row["name"]: (int(row["original_bytes"]), int(row["compressed_bytes"]))
            for row in csv.DictReader(file)
        }
    assert set(sizes) == set(RECIPES | golden.WATCHED)
    made = golden.make((RECIPES | golden.WATCHED)[name], tmp_path)
    assert (len(made.original), len(made.container)) == sizes[name]


# What a reader has to refuse


class Opened:
    """A golden container taken apart, to be changed in one place and put together with right checksums."""

    def __init__(self, name: str) -> None:
        folder = golden.LATER_WRITTEN if name in golden.LATER else golden.V1
        container = decoder.Container(folder / f"{name}.safetensors", {})
        entries = container.header.entries
        self.metadata = dict(container.header.metadata)
        self.entries = {n: [dtype, shape, container.entry(n)] for n, (dtype, shape, _, _) in entries.items()}
        self.manifest = json.loads(self.entries.pop(MANIFEST_ENTRY)[2])
        self.records = self.manifest["tensors"]

    def to_bytes(self) -> bytes:
        self.manifest["header"] = xxhash.xxh3_64_hexdigest(self.entries[HEADER_ENTRY][2])
        text = json.dumps(self.manifest).encode()
        self.metadata["neuzip_manifest"] = xxhash.xxh3_64_hexdigest(text)
        entries = self.entries | {MANIFEST_ENTRY: ["U8", [len(text)], text]}
        tensors = {name: golden.Tensor(*entry) for name, entry in entries.items()}
        whole = golden.Input(tensors, (), self.metadata)
        end = 8 + int.from_bytes(whole.to_bytes()[:8], "little")
        return bytes(whole._replace(padding=-end % 16).to_bytes())

    def stream(self, name: str, data: bytes) -> None:
        """Give a stream other bytes, of the right checksum."""
        self.entries[name][1:] = [len(data) // (2 if self.entries[name][0] == "U16" else 1)], data
        tensor, stream = name.split(":")
        self.records[tensor]["streams"][stream] = xxhash.xxh3_64_hexdigest(data)

    def word(self, name: str, at: int, value: int) -> None:
        """Change one word of a stream."""
        words = np.frombuffer(self.entries[name][2], "<u2").copy()
        words[at] = value
        self.stream(name, words.tobytes())

    def byte(self, name: str, at: int, *values: int) -> None:
        """Change bytes of a stream."""
        data = bytearray(self.entries[name][2])
        data[at : at + len(values)] = values
        self.stream(name, bytes(data))

    def index(self, tensor: str, block: int) -> int:
        """Words of a block."""
        return int(np.frombuffer(self.entries[f"{tensor}:index"][2], "<u2")[block])

    def first_block(self) -> int:
        """Words of the first block of `pairs`, which ends with escapes."""
        return int(np.frombuffer(self.entries["pairs:index"][2], "<u2")[0])


CHANGES: dict[str, tuple[str, Callable[[Opened], object]]] = {
    "2 unknown version": ("truncated", lambda c: c.metadata.update(neuzip="2")),
    "2 no container": ("truncated", lambda c: c.metadata.pop("neuzip")),
    "2 unwanted entry": ("truncated", lambda c: c.entries.update(x=["U8", [1], b"x"])),
    "2 entry is missing": ("truncated", lambda c: c.entries.pop("BF16:words")),
    "3 unknown version": ("truncated", lambda c: c.manifest.update(version=2)),
    "3 version is no number": ("truncated", lambda c: c.manifest.update(version=True)),
    "3 unknown feature": ("truncated", lambda c: c.manifest.update(requires=["speed"])),
    "3 record is missing": ("truncated", lambda c: c.records.pop("BF16")),
    "3 unknown scheme": ("truncated", lambda c: c.records["BF16"].update(scheme="best")),
    "3 checksum of tensor": ("truncated", lambda c: c.records["BF16"].update(checksum="0" * 16)),
    "3 checksum of stream": ("truncated", lambda c: c.records["BF16"]["streams"].update(words="0" * 16)),
    "3 other mantissa_bits": ("truncated", lambda c: c.records["BF16"].update(mantissa_bits=2)),
    "3 too many mantissa_bits": ("truncated", lambda c: c.records["BF16"].update(mantissa_bits=8)),
    "3 odd block_size": ("truncated_normaliser", lambda c: c.records["BF16"].update(block_size=63)),
    "3 other block_size": ("truncated_normaliser", lambda c: c.records["BF16"].update(block_size=8)),
    "3 no original": ("truncated", lambda c: c.records["BF16"].pop("original")),
    "3 original is no checksum": ("truncated", lambda c: c.records["BF16"].update(original="0" * 15 + "G")),
    "3 checksum is a number": ("truncated", lambda c: c.records["BF16"]["streams"].update(words=7)),
    "3 negative loss": ("truncated", lambda c: c.records["BF16"]["loss"].update(max_relative=-1)),
    "3 infinite loss": ("truncated", lambda c: c.records["BF16"]["loss"].update(rms_relative=1e999)),
    "3 relative_l2 is no number": ("ternary", lambda c: c.records["row"]["loss"].update(relative_l2="1")),
    "3 file with a backslash": ("alias_raw_metadata", lambda c: c.records["tied weight"].update(file="a\\b")),
    "3 long number": ("truncated", lambda c: c.manifest.update(unknown=10**20)),
    "3 needs a base, and has no difference": ("truncated", lambda c: c.manifest.update(requires=["delta"])),
    "3 file above": ("alias_raw_metadata", lambda c: c.records["tied weight"].update(file="../x")),
    "3 absolute file": ("alias_raw_metadata", lambda c: c.records["tied weight"].update(file="/x")),
    "3 no such file": ("alias_raw_metadata", lambda c: c.records["tied weight"].update(file="x")),
    "4 alias of nothing": ("alias_raw_metadata", lambda c: c.records["tied weight"].update(of="x")),
    "4 alias of itself": ("alias_raw_metadata", lambda c: c.records["tied weight"].update(of="tied weight")),
    "4 alias of another shape": ("alias_raw_metadata", lambda c: c.records["tied weight"].update(of="odd")),
    "5 long index": ("truncated", lambda c: c.stream("BF16:index", bytes(32))),
    "5 long words": ("truncated", lambda c: c.stream("BF16:words", c.entries["BF16:words"][2] + bytes(16))),
    "6 group": ("lossless_escapes", lambda c: c.word("pairs:table", 0, 3)),
    "6 pairs of F64": ("lossless_escapes", lambda c: c.word("more than 256 exponents:table", 0, 2)),
    "6 palette falls": ("lossless_escapes", lambda c: c.word("pairs:table", 4, 0)),
    "6 palette beyond the dtype": ("lossless_escapes", lambda c: c.word("pairs:table", 3 + 15, 256)),
    "6 sum of frequencies": ("lossless_escapes", lambda c: c.word("pairs:table", 3 + 16, 4000)),
    "9 unknown packing": ("ternary", lambda c: c.records["row"].update(packing="bits")),
    "9 unknown scale_dtype": ("ternary", lambda c: c.records["row"].update(scale_dtype="BF16")),
    "9 no group": ("ternary", lambda c: c.records["row"].pop("group")),
    "9 long group": ("ternary", lambda c: c.records["row"].update(group=94)),
    "9 other packing": ("ternary", lambda c: c.records["2bit"].update(packing="trits")),
    "9 no loss": ("ternary", lambda c: c.records["row"].pop("loss")),
    "9 long codes": ("ternary", lambda c: c.stream("row:codes", c.entries["row:codes"][2] + bytes(16))),
    "9 byte of no codes": ("ternary", lambda c: c.byte("tensor:codes", 8, 1)),
    "9 codes after the last": ("ternary", lambda c: c.byte("tensor:codes", 1004, 255)),
    "9 code of 2": ("ternary", lambda c: c.byte("2bit:codes", 8, 0xFF)),
    "9 codes after a row": ("ternary", lambda c: c.byte("2bit:codes", 23, 0)),
    "9 infinite scale": ("ternary", lambda c: c.byte("tensor:scale", 2, 0x80, 0x7F)),
    "9 negative scale": ("ternary", lambda c: c.byte("row:scale", 1, 0xB8)),
    "13 no requirement": ("delta", lambda c: c.manifest.pop("requires")),
    "13 tensor of the base": ("delta", lambda c: c.records["coded"].update(of="fp16")),
    "13 no tensor of the base": ("delta", lambda c: c.records["unchanged"].update(of="x")),
    "13 checksum of the base": ("delta", lambda c: c.records["coded"].update(base="0" * 16)),
    "13 checksum of what is the base": ("delta", lambda c: c.records["unchanged"].update(checksum="0" * 16)),
    "13 other shift": ("delta", lambda c: c.records["shift"].update(shift=15)),
    "13 shift of all bits": ("delta", lambda c: c.records["coded"].update(shift=16)),
    "13 more digits": ("delta", lambda c: c.records["coded"].update(digits=2)),
    "13 no digits": ("delta", lambda c: c.records["coded"].update(digits=0)),
    "13 fewer low bits": ("delta", lambda c: c.records["raw bits"].update(low_bits=1)),
    "13 long low": ("delta", lambda c: c.stream("raw bits:low", c.entries["raw bits:low"][2] + bytes(16))),
    "13 group": ("delta", lambda c: c.word("coded:table", 1, 2)),
    "13 no table": ("delta", lambda c: c.stream("coded:table", bytes(16))),
    "13 another table": ("delta", lambda c: c.byte("coded:choice", 0, 1)),
    "13 table of a list": ("delta", lambda c: c.byte("lists:choice", 0, 1)),
    "13 long choice": ("delta", lambda c: c.stream("coded:choice", bytes(32))),
    "13 tables cut off": ("delta", lambda c: c.stream("two digits:table", bytes(0))),
    "13 half an entry": ("delta", lambda c: c.word("lists:index", 0, c.index("lists", 0) - 1)),
    "13 list falls": ("delta", lambda c: c.word("lists:words", 0, 16383)),
    "13 list outside": ("delta", lambda c: c.word("lists:words", c.index("lists", 0) - 2, 16384)),
    "13 digit of 0": ("delta", lambda c: c.word("lists:words", 1, 0)),
    "13 coded block": ("delta", lambda c: c.word("coded:words", 33, 0)),
    "14 no requirement": ("quantized", lambda c: c.manifest.pop("requires")),
    "14 other code_bits": ("quantized", lambda c: c.records["both"].update(code_bits=16)),
    "14 no code_bits": ("quantized", lambda c: c.records["both"].pop("code_bits")),
    "14 code_bits of 17": ("quantized", lambda c: c.records["both"].update(code_bits=17)),
    "14 factors are no bool": ("quantized", lambda c: c.records["both"].update(row_factors=1)),
    "14 no row factors": ("quantized", lambda c: c.records["both"].pop("row_factors")),
    "14 low bits of 3": ("quantized", lambda c: c.records["low bits"].update(low_bits=3)),
    "14 low bits of nothing": ("quantized", lambda c: c.records["both"].update(low_bits=1)),
    "14 no low bits": ("quantized", lambda c: c.records["low bits"].pop("low_bits")),
    "14 long low": ("quantized", lambda c: c.stream(
        "low bits:low", c.entries["low bits:low"][2] + bytes(16))),
    "14 form 0": ("quantized", lambda c: c.byte("BF16:grid", 4, 0)),
    "14 form 4": ("quantized", lambda c: c.byte("BF16:grid", 4, 4)),
    "14 pairs of many": ("quantized", lambda c: c.byte("BF16:grid", 4, 2)),
    "14 one number": ("quantized", lambda c: c.byte("BF16:grid", 7, 0)),
    "14 numbers beyond the bits": ("quantized", lambda c: c.byte("BF16:grid", 6, 1)),
    "14 no shares": ("quantized", lambda c: c.byte("BF16:grid", 8, *bytes(80))),
    "14 no loss": ("quantized", lambda c: c.records["both"].pop("loss")),
    "14 long grid": ("quantized", lambda c: c.stream("both:grid", c.entries["both:grid"][2] + bytes(16))),
    "14 step is NaN": ("quantized", lambda c: c.byte("both:grid", 2, 0xC0, 0x7F)),
    "14 step is infinite": ("quantized", lambda c: c.byte("both:grid", 0, 0, 0, 0x80, 0x7F)),
    "14 step of 0": ("quantized", lambda c: c.byte("both:grid", 0, 0, 0, 0, 0)),
    "14 negative step": ("quantized", lambda c: c.byte("both:grid", 3, 0xBD)),
    "14 subnormal step": ("quantized", lambda c: c.byte("both:grid", 2, 0x40, 0)),
    "14 step beyond the dtype": ("quantized", lambda c: c.byte("F16:grid", 0, 0, 0, 0, 0x45)),
    "14 step beyond fp32": ("quantized", lambda c: c.byte("F64:grid", 0, 0, 0, 0x80, 0x7E)),
    "14 step beyond fp8": ("quantized", lambda c: c.byte("F8_E4M3:grid", 0, 0, 0, 0x80, 0x43)),
    "14 factor too large": ("quantized", lambda c: c.byte("both:grid", 0, 0, 0, 0, 0x78, 255)),
    "14 escape beyond the bits": ("quantized", lambda c: c.word(
        "escapes:words", c.index("escapes", 0) - 1, 1 << c.records["escapes"]["code_bits"])),
    "7 too many escapes": ("lossless_escapes", lambda c: c.word("pairs:words", 0, 65535)),
    "7 words left": ("lossless_escapes", lambda c: c.word("pairs:words", 0, 0)),
    "7 final state": ("lossless_escapes", lambda c: c.word("pairs:words", 33, 0)),
    "7 escape outside": ("lossless_escapes", lambda c: c.word("pairs:words", c.first_block() - 2, 16384)),
}  # fmt: skip


@functools.cache
def require_readable(name: str) -> None:
    """A container put together again without a change is read, so the change is what is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "same.safetensors"
        path.write_bytes(Opened(name).to_bytes())
        decoder.restore_file(path, base_of(Path(f"{name}.safetensors")))


@pytest.mark.parametrize("rule", CHANGES)
def test_both_readers_refuse_what_breaks_a_rule(rule: str, tmp_path: Path):
    name, change = CHANGES[rule]
    container, path = Opened(name), tmp_path / "changed.safetensors"
    base = base_of(Path(f"{name}.safetensors"))
    require_readable(name)
    change(container)
    path.write_bytes(container.to_bytes())
    with pytest.raises(decoder.SpecViolation):
        decoder.restore_file(path, base)
    with pytest.raises(NeuzipError):
        decompress(path, tmp_path / "back.safetensors", base=base)
    assert not (tmp_path / "back.safetensors").exists()


# What a reader has to accept


def other_dtype(container: Opened) -> None:
    """A dtype that no list has, of a raw tensor."""
    name = next(name for name in container.entries if name in container.records)
    container.entries[name][0] = "X7"
    header = json.loads(container.entries[HEADER_ENTRY][2][8:])
    header[name]["dtype"] = "X7"
    text = json.dumps(header).encode()
    container.entries[HEADER_ENTRY][1:] = [8 + len(text)], len(text).to_bytes(8, "little") + text


def first(container: Opened) -> dict[str, Any]:
    return next(iter(container.records.values()))


ALLOWED: dict[str, tuple[str, Callable[[Opened], object]]] = {
    "2 no format": ("truncated", lambda c: c.metadata.pop("format")),
    "2 other metadata": ("truncated", lambda c: c.metadata.update(format="x", more="y")),
    "2 unknown dtype": ("alias_raw_metadata", other_dtype),
    "3 key of another scheme": ("lossless_pairs", lambda c: first(c).update(block_size=8, of=1, group="x")),
    "3 null": ("lossless_pairs", lambda c: first(c).update(file=None) or c.manifest.update(requires=None)),
    "14 factors are false": (
        "quantized", lambda c: c.records["BF16"].update(row_factors=False, column_factors=None),
    ),
    "14 loss of what lost nothing": ("quantized", lambda c: c.records["on the grid"].update(loss="none")),
    "3 a feature twice": ("delta", lambda c: c.manifest.update(requires=["delta", "delta"])),
}  # fmt: skip
"""What was refused once by one of the readers, and what the specification says to ignore."""


@pytest.mark.parametrize("rule", ALLOWED)
def test_both_readers_accept_what_breaks_no_rule(rule: str, tmp_path: Path):
    name, change = ALLOWED[rule]
    container, path = Opened(name), tmp_path / "changed.safetensors"
    change(container)
    path.write_bytes(container.to_bytes())
    base = base_of(Path(f"{name}.safetensors"))
    verify(path, base=base)
    decompress(path, tmp_path / "back.safetensors", base=base)
    assert (tmp_path / "back.safetensors").read_bytes() == decoder.restore_file(path, base)


def test_data_may_start_anywhere(tmp_path: Path):
    """A writer makes it a multiple of 16; a reader does not depend on it."""
    data = GOLDEN_FILES[0].read_bytes()
    length = int.from_bytes(data[:8], "little")
    path = tmp_path / "moved.safetensors"
    path.write_bytes((length + 3).to_bytes(8, "little") + data[8 : 8 + length] + b"   " + data[8 + length :])
    decompress(path, tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == decoder.restore_file(path)


def test_a_delta_without_a_difference_is_a_delta(tmp_path: Path):
    """It can be verified alone, as any delta, and restored with its base."""
    container, path = Opened("alias_raw_metadata"), tmp_path / "delta.safetensors"
    container.manifest["requires"] = ["delta"]
    path.write_bytes(container.to_bytes())
    verify(path)
    with pytest.raises(NeuzipError, match="is a delta"):
        decompress(path, tmp_path / "back.safetensors")
    with pytest.raises(decoder.SpecViolation, match="needs its base"):
        decoder.restore_file(path)
    base = golden.BASES / "delta.safetensors"
    decompress(path, tmp_path / "back.safetensors", base=base)
    assert (tmp_path / "back.safetensors").read_bytes() == decoder.restore_file(path, base)


# The decoder itself


def test_decoder_runs_alone_and_without_checksums(tmp_path: Path):
    (tmp_path / "numpy_only").mkdir()
    (tmp_path / "numpy_only" / "xxhash.py").write_text("raise ImportError")
    out = tmp_path / "out.safetensors"
    command = [sys.executable, ROOT / "tests" / "support" / "independent_decoder.py", GOLDEN_FILES[0], out]
    subprocess.run(command, check=True, env={"PYTHONPATH": str(tmp_path / "numpy_only")})
    assert out.read_bytes() == decoder.restore_file(GOLDEN_FILES[0])


def test_decoder_shares_no_code_with_neuzip():
    source = (ROOT / "tests" / "support" / "independent_decoder.py").read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) neuzip", source, re.MULTILINE)
