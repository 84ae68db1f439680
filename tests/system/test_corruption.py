"""Thousands of damaged containers: each is refused, or restored to what it was. None crashes, hangs or lies.

Two families. *Accidents* change bytes and leave the checksums alone: what comes back is the original or
nothing. *Attacks* change streams, tables, records and headers and make every checksum right again, so that
the decoders see the damage: what comes back has the length that it claims, and nothing outside the buffers is
touched. The generators are seeded by the numbers that a failure names.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from neuzip.compress import decompress, verify
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import NeuzipError
from neuzip.formats.container import Container
from neuzip.kernels import rans
from neuzip.kernels.rans.intrinsics import SUPPORTED

GUARDED = Path(__file__).resolve().parents[1] / "fuzz" / "guarded.py"
Rng = np.random.Generator

ACCIDENTS = range(10)
ATTACKS = range(10)
BATCH = 110
"""20 batches of 110 files in each family: 4,400 files."""


def load(path: Path) -> ModuleType:
    """A module beside this one, which is not in a package."""
    spec = importlib.util.spec_from_file_location(f"corruption_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bad = load(Path(__file__).resolve().parents[1] / "golden" / "bad" / "make.py")


# Good containers to damage


def merged(*many: Any) -> Any:
    """One container with the tensors of several, as `a`, `b`, ..."""
    at, header, whole = 0, {"__metadata__": {"format": "pt"}}, bad.empty()
    for letter, parts in zip("abcdefghij", many, strict=False):
        size = parts.original["w"]["data_offsets"][1]
        header[letter] = parts.original["w"] | {"data_offsets": [at, at + size]}
        at += size
        whole.manifest["tensors"][letter] = parts.record("w")
        whole.entries |= {letter + name[1:]: entry for name, entry in parts.entries.items()}
    whole.set_original(header)
    return whole.seal()


def with_alias(parts: Any, target: str, file: str | None = None) -> Any:
    original = parts.original
    size = original[target]["data_offsets"][1] - original[target]["data_offsets"][0]
    end = max(t["data_offsets"][1] for name, t in original.items() if name != "__metadata__")
    parts.set_original(original | {"z": original[target] | {"data_offsets": [end, end + size]}})
    record = parts.record(target)
    parts.manifest["tensors"]["z"] = {"scheme": "alias", "checksum": record["checksum"], "of": target}
    if "original" in record:
        parts.record("z")["original"] = record["original"]
    return parts.seal()


def normalised(dtype: str, block_size: int) -> Any:
    """A truncated tensor whose normalisers are not all 1, with the checksum that this gives."""
    parts = bad.truncated(dtype, block_size)
    data = bytes(range(7, 7 + -(-300 // block_size)))
    parts.put("w:normaliser", bad.pad(data))
    return with_right_checksums(parts.seal())


def with_right_checksums(parts: Any) -> Any:
    """The same container with checksums of what its tensors decode to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        path.write_bytes(bad.put_together(parts))
        with FolderSource(path) as source:
            for tensor in source.tensors():
                parts.record(tensor.name)["checksum"] = bad.checksum(source.read(tensor).tobytes())
    return parts


def few(n: int, low: int, many: int) -> np.ndarray:
    """n exponents of which the lowest is by far the most frequent."""
    return low + np.minimum(np.arange(n) * 2654435761 % 65536 >> 12, many - 1) * (np.arange(n) % 5 == 0)


def escapes() -> Any:
    """Two blocks of single exponents, each with escapes."""
    exponents = few(16384 + 700, 100, 4)
    exponents[::2000] = 250
    table = rans.Table(1, np.array([100, 101], np.uint16), np.array([3000, 1096], np.uint16))
    return bad.lossless("BF16", exponents, table)


def wide() -> Any:
    """Exponents of eleven bits, more than a palette holds."""
    return bad.lossless("F64", 700 + np.arange(600) * 7919 % 420)


GOOD: dict[str, Callable[[], Any]] = {
    "smallest": bad.empty,
    "raw": lambda: bad.raw("v", "u"),
    "unknown dtype": bad.of_unknown_dtype,
    "pairs": lambda: bad.lossless("BF16", few(3000, 115, 9)),
    "two blocks": lambda: bad.lossless("F8_E5M2", few(16384 + 300, 10, 3)),
    "escapes": escapes,
    "wide": wide,
    "normalised": lambda: normalised("F32", 8),
    "ternary": lambda: bad.ternary("trits", 30),
    "ternary words": lambda: bad.ternary("2bit", None, "F16"),
    "quantized": lambda: bad.quantized(columns=True),
    "quantized escapes": bad.quantized_escaping,
    "quantized low bits": bad.quantized_low,
    "all schemes": lambda: with_alias(
        merged(
            bad.lossless("BF16"),
            bad.truncated("F16"),
            normalised("BF16", 16),
            bad.raw(),
            bad.lossless("F8_E4M3FNUZ"),
            bad.lossless("F32", few(400, 100, 20)),
            normalised("F64", 64),
            bad.ternary("2bit", 16),
        ),
        "c",
    ),
}


@cache
def good(name: str) -> bytes:
    data = bad.put_together(GOOD[name]())
    assert isinstance(data, bytes)
    return data


@cache
def restored(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        result = outcome(good(name), Path(folder))
    assert result is not None
    return result


# What happens to them


def outcome(container: bytes, folder: Path) -> bytes | None:
    """Open, verify and restore: the restored file, or None where a NeuzipError said why not."""
    path, target = folder / "w.safetensors", folder / "out.safetensors"
    path.write_bytes(container)
    with mock.patch("os.fsync"):  # thousands of files: the disk is not what is tested
        refusals = []
        for act in (lambda: verify(path, jobs=1), lambda: decompress(path, target, jobs=1)):
            try:
                act()
            except NeuzipError as error:
                refusals.append(error.message)
    if refusals:
        assert len(refusals) == 2, "what does not verify is not restored, and the other way round"
        assert str(path) in refusals[0], "the error names the file"
        assert os.listdir(folder) == [path.name], "nothing half-written is left"
        return None
    data = target.read_bytes()
    target.unlink()
    return data


def decode_unchecked(container: bytes, folder: Path, rng: Rng) -> int:
    """Decode all tensors, whole and in part, whatever their own checksums say; how many there were."""
    path = folder / "w.safetensors"
    path.write_bytes(container)
    done = 0
    with contextlib.suppress(NeuzipError), FolderSource(path) as source:
        for tensor in source.tensors():
            with contextlib.suppress(NeuzipError):
                read, size = source.reader(tensor), tensor.info.nbytes
                data = b"".join(read(*piece).tobytes() for piece in tensor.pieces())
                assert len(data) == size
                if tensor.info.numel:
                    width = size // tensor.info.numel
                    start, stop = sorted(int(i) * width for i in rng.integers(0, tensor.info.numel + 1, 2))
                    assert read(start, stop).tobytes() == data[start:stop]
                done += 1
    return done


# Accidents


def flip_bits(data: bytearray, rng: Rng) -> None:
    for at in rng.integers(0, len(data), int(rng.choice([1, 1, 1, 2, 8]))):
        data[at] ^= 1 << int(rng.integers(8))


def set_bytes(data: bytearray, rng: Rng) -> None:
    for at in rng.integers(0, len(data), int(rng.integers(1, 9))):
        data[at] = int(rng.choice([0, 1, 127, 128, 255, int(rng.integers(256))]))


def cut(data: bytearray, rng: Rng) -> None:
    del data[int(rng.integers(len(data))) :]


def extend(data: bytearray, rng: Rng) -> None:
    data += bytes(int(rng.integers(1, 40))) if rng.random() < 0.5 else rng.bytes(int(rng.integers(1, 40)))


def span(data: bytearray, rng: Rng) -> tuple[int, int]:
    start = int(rng.integers(len(data)))
    return start, min(len(data), start + int(rng.integers(1, 200)))


def swap(data: bytearray, rng: Rng) -> None:
    length = int(rng.integers(1, min(100, len(data) // 2)))
    a, b = (int(i) for i in rng.integers(0, len(data) - length, 2))
    data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]


def zero(data: bytearray, rng: Rng) -> None:
    start, stop = span(data, rng)
    data[start:stop] = bytes(stop - start)


def repeat(data: bytearray, rng: Rng) -> None:
    start, stop = span(data, rng)
    data[stop:stop] = data[start:stop]


def remove(data: bytearray, rng: Rng) -> None:
    start, stop = span(data, rng)
    del data[start:stop]


def edit_header_text(data: bytearray, rng: Rng) -> None:
    """Change a number or a name in the header's JSON, and its length field accordingly."""
    length = int.from_bytes(data[:8], "little")
    text = edit_text(bytes(data[8 : 8 + length]), rng)
    data[: 8 + length] = bad.with_length(text)


TOKEN = re.compile(rb'-?\d+|"[^"]*"|[\[\]{},:]')
NUMBERS = b"0 1 2 16 -1 1.0 1e3 true null 65535 4294967296 4611686018427387904 1e999 NaN".split()
TEXTS = (
    b'"" "w" "U8" "U16" "BF16" "F64" "X1" "raw" "lossless" "truncated" "alias" "../w" "neuzip:header"'
    b' "ternary" "2bit" "F16"'
).split()


def edit_text(text: bytes, rng: Rng) -> bytes:
    """Replace one token of a JSON text."""
    tokens = list(TOKEN.finditer(text))
    if not tokens:
        return text
    token = tokens[int(rng.integers(len(tokens)))]
    old = token.group()
    if old[:1] in b"-0123456789":
        by = int(rng.integers(-20, 20))
        new = str(int(old) + by).encode() if rng.random() < 0.6 else bytes(rng.choice(NUMBERS))
    elif old[:1] == b'"':
        new = bytes(rng.choice(TEXTS)) if rng.random() < 0.6 else bytes(rng.choice(tokens).group())
    else:
        new = bytes(rng.choice([b"", old + old, b",", b"[", b"}"]))
    return text[: token.start()] + new + text[token.end() :]


ACCIDENT_KINDS = [
    flip_bits, flip_bits, flip_bits, set_bytes, cut, extend, swap, zero, repeat, remove, edit_header_text,
]  # fmt: skip


def accident(rng: Rng) -> tuple[str, bytes]:
    """A good container's name, and the container after one or two accidents."""
    name = str(rng.choice(list(GOOD)))
    data = bytearray(good(name))
    for _ in range(int(rng.integers(1, 3))):
        if len(data) > 16:
            ACCIDENT_KINDS[int(rng.integers(len(ACCIDENT_KINDS)))](data, rng)
    return name, bytes(data)


@pytest.mark.parametrize("batch", ACCIDENTS)
def test_accidents_are_noticed(batch: int, tmp_path: Path) -> None:
    refused = 0
    for number in range(BATCH):
        name, data = accident(np.random.default_rng([1, batch, number]))
        result = outcome(data, tmp_path)
        assert result is None or result == restored(name), (batch, number, name)
        refused += result is None
    assert refused > 0.8 * BATCH, "these accidents do no harm"


@pytest.mark.parametrize("name", ["pairs", "normalised", "raw", "ternary", "ternary words", "quantized"])
def test_every_byte_is_guarded(name: str, tmp_path: Path) -> None:
    """One bit of every byte of a container, one after the other."""
    data = good(name)
    for at in range(0, len(data), max(1, len(data) // 100)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        assert outcome(bytes(damaged), tmp_path) in (None, restored(name)), at


# Attacks


def choose(parts: Any, rng: Rng, *streams: str) -> str | None:
    """The name of an entry that is one of these streams."""
    names = [name for name in parts.entries if name.rpartition(":")[2] in streams]
    return str(rng.choice(names)) if names else None


def attack_words(parts: Any, rng: Rng) -> None:
    """Change words: the counts of escapes, states, refill words and escapes."""
    entry = choose(parts, rng, "words")
    if entry is not None:
        words = parts.words(entry)
        near = rng.random() < 0.5
        for at in rng.integers(0, min(len(words), 70) if near else len(words), int(rng.integers(1, 6))):
            words[at] = rng.choice([0, 1, 2, 255, 300, 32768, 65535, words[at] ^ 1, rng.integers(65536)])
        parts.put(entry, words)


def attack_end_of_words(parts: Any, rng: Rng) -> None:
    """Change the last words of a block, where escapes stand, and perhaps their number."""
    entry = choose(parts, rng, "words")
    if entry is not None:
        words, index = parts.words(entry), parts.words(entry.replace("words", "index"))
        ends = np.minimum(np.cumsum(index, dtype=np.int64), len(words))[: max(1, np.count_nonzero(index))]
        block = int(rng.integers(len(ends)))
        words[max(0, ends[block] - int(index[block]))] = rng.integers(0, 20)
        for at in ends[block] - 1 - rng.integers(0, 12, int(rng.integers(0, 6))):
            words[at] = rng.choice([0, 5, 255, 256, 2047, 16383, 16384, 65535])
        parts.put(entry, words)


def attack_index(parts: Any, rng: Rng) -> None:
    """Change the counts of the blocks, most often so that the sum stays, or so that the words follow."""
    entry = choose(parts, rng, "index")
    if entry is not None:
        index, kind = parts.words(entry), rng.random()
        if kind < 0.4 and len(index) > 1:
            by = np.uint16(rng.choice([1, 2, 64, 100, index[0], 65535]))
            index[0] -= by
            index[1] += by
        elif kind < 0.8:
            first = int(index[0])
            index[0] = rng.choice([0, 1, 64, 65, 66, min(first + 2, 65535), max(first - 1, 0), 65535])
            total = min(int(index.sum()), 200_000)
            words = np.resize(parts.words(entry.replace("index", "words")), total)
            parts.put(entry.replace("index", "words"), bad.pad(words.astype("<u2").tobytes()))
        else:
            index[int(rng.integers(len(index)))] = rng.integers(65536)
        parts.put(entry, index)


def attack_table(parts: Any, rng: Rng) -> None:
    """Change the table: anything, or the frequencies so that their sum stays."""
    entry = choose(parts, rng, "table")
    if entry is None:
        return
    words = parts.words(entry)
    group, p, f = (int(w) for w in words[:3])
    kind = rng.random()
    if kind < 0.4:
        a, b = (3 + p + int(i) for i in rng.integers(0, f, 2))
        by = np.uint16(rng.integers(0, int(words[a]) + 1))
        words[a] -= by
        words[b] += by
    elif kind < 0.6:
        words[3 : 3 + p] = np.sort(rng.choice(256, p, replace=False))
    elif kind < 0.8:
        words[0] = {1: 2, 2: 1}.get(group, 0)
    else:
        words[int(rng.integers(len(words)))] = rng.choice([0, 1, 2, 16, 17, 255, 256, 2047, 4096, 65535])
    parts.put(entry, words)


def attack_bytes(parts: Any, rng: Rng) -> None:
    """Change, shorten or lengthen any entry; a raw tensor too."""
    if not parts.entries:
        return
    name = str(rng.choice(list(parts.entries)))
    dtype, shape, old = parts.entries[name]
    data = bytearray(old)
    kinds = [flip_bits, set_bytes, zero, swap] if len(data) > 4 else [extend]
    kinds[int(rng.integers(len(kinds)))](data, rng)
    parts.entries[name] = (dtype, shape, bytes(data[: len(old)]))
    if rng.random() < 0.2 and len(shape) == 1 and dtype in ("U8", "U16"):
        parts.put(name, bad.pad(bytes(data))[: int(rng.integers(len(data) + 17)) // 16 * 16])


def attack_planes(parts: Any, rng: Rng) -> None:
    """Change signs, mantissas, normalisers, and the codes and scales of ternary weights."""
    entry = choose(parts, rng, "sign_mantissa", "normaliser", "codes", "codes", "scale")
    if entry is not None:
        data = bytearray(parts.entries[entry][2])
        set_bytes(data, rng)
        parts.put(entry, bytes(data))


def attack_exchange(parts: Any, rng: Rng) -> None:
    """Give a tensor the streams of another."""
    if len(parts.entries) > 1:
        a, b = (str(name) for name in rng.choice(list(parts.entries), 2, replace=False))
        parts.entries[a], parts.entries[b] = parts.entries[b], parts.entries[a]


def attack_record(parts: Any, rng: Rng) -> None:
    """Change a value of a record to one that is at least thinkable."""
    records = parts.manifest["tensors"]
    if not records:
        return
    names = list(records)
    record = records[str(rng.choice(names))]
    key, values = [
        ("scheme", ["raw", "lossless", "truncated", "ternary", "alias"]),
        ("packing", ["trits", "2bit", "3bit", None]),
        ("scale_dtype", ["F32", "F16", "F64"]),
        ("group", [None, 1, 15, 30, 33, 100, 101, 300, 1 << 40, -1, True]),
        ("mantissa_bits", [0, 1, 2, 3, 7, 10, 23, 52, 53, -1, True, 1.0]),
        ("block_size", [8, 16, 64, 16384, 4, 32768, 0, None, True]),
        ("of", [*names, "w", ""]),
        ("file", ["w.safetensors", "./w.safetensors", "../w.safetensors", None, "out.safetensors"]),
        ("checksum", ["0" * 16, None, 1]),
        ("loss", [{"max_relative": 0, "rms_relative": 0}, {}, None, {"max_relative": 1e308}]),
        ("original", ["0" * 16, None]),
    ][int(rng.integers(11))]
    record[key] = values[int(rng.integers(len(values)))]


def attack_original(parts: Any, rng: Rng) -> None:
    """Change the dtype or the shape that a tensor had, and the offsets so that they fit again."""
    original = parts.original
    names = [name for name in original if name != "__metadata__"]
    if not names:
        return
    entry = original[str(rng.choice(names))]
    if rng.random() < 0.5:
        entry["dtype"] = str(
            rng.choice(["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "U8", "I64", "F4", "X1"])
        )
    if rng.random() < 0.6:
        n = int(np.prod(entry["shape"]))
        entry["shape"] = [
            int(rng.choice([n + 1, n - 1, 0, 1, 16384, 16385, n // 2, 1 << 20, 1 << 40])) % (1 << 62)
        ]
    bits, at = {"F4": 4, "F32": 32, "F64": 64, "I64": 64, "BF16": 16, "F16": 16}, 0
    for name in names:
        size = (
            int(np.prod([1, *original[name]["shape"]], dtype=object))
            * bits.get(original[name]["dtype"], 8)
            // 8
        )
        original[name]["data_offsets"] = [at, at + size]
        at += size
    parts.set_original(original)


ATTACK_KINDS = [
    attack_words, attack_words, attack_end_of_words, attack_end_of_words, attack_index, attack_index,
    attack_table, attack_table, attack_bytes, attack_planes, attack_exchange, attack_record, attack_original,
]  # fmt: skip


def attack(rng: Rng) -> bytes:
    """A container with one to three faults and right checksums."""
    parts = bad.take_apart(good(str(rng.choice(list(GOOD)))))
    ATTACK_KINDS[int(rng.integers(len(ATTACK_KINDS)))](parts, rng)
    for _ in range(int(rng.choice([0, 0, 0, 1, 2]))):
        with contextlib.suppress(IndexError, ValueError):  # the one before may leave nothing to attack
            ATTACK_KINDS[int(rng.integers(len(ATTACK_KINDS)))](parts, rng)
    parts.seal()
    manifest = bad.dumps(parts.manifest)
    if rng.random() < 0.15:
        manifest = edit_text(manifest, rng)
    if rng.random() < 0.1:
        parts.header = bad.with_length(edit_text(parts.header[8:], rng))
        with contextlib.suppress(ValueError, AttributeError):
            manifest = bad.dumps(json.loads(manifest) | {"header": bad.checksum(parts.header)})
    container = bad.put_together(parts, manifest)
    if rng.random() < 0.1:
        data = bytearray(container)
        edit_header_text(data, rng)
        return bytes(data)
    return bytes(container)


def claimed_length(container: bytes, folder: Path) -> int:
    path = folder / "w.safetensors"
    path.write_bytes(container)
    with Container(path) as opened:
        return len(opened.original.raw) + opened.original.data_bytes


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of overflows, where weights became infinite
@pytest.mark.parametrize("batch", ATTACKS)
@pytest.mark.slow
def test_attacks_are_survived(batch: int, tmp_path: Path) -> None:
    decoded = 0
    for number in range(BATCH):
        rng = np.random.default_rng([2, batch, number])
        data = attack(rng)
        result = outcome(data, tmp_path)
        assert result is None or len(result) == claimed_length(data, tmp_path), (batch, number)
        decoded += decode_unchecked(data, tmp_path, rng) > 0
    assert decoded > 0.1 * BATCH, "these attacks do not reach the decoders"


def main(folder: Path) -> None:
    """Decode attacks in a process of its own, where indices are checked; a loop without end would kill it."""
    resource.setrlimit(resource.RLIMIT_CPU, (1200, 1200))
    from neuzip.kernels.device.compiled import read_only
    from neuzip.kernels.rans import cpu

    table = rans.Table(1, np.array([1], np.uint16), np.array([2048, 2048], np.uint16))
    out = np.empty(256, np.uint8)
    try:  # that they are: this count is a lie
        cpu.decode(
            read_only(np.zeros(10, np.uint16)), np.array([0]), np.array([100]), 256, 8, 1, table.decoder,
            table.exponents, out, out, (out[:0], out[:0]), None,
        )  # fmt: skip
    except IndexError:
        pass
    else:
        raise AssertionError("an index out of bounds went unnoticed")
    decoded = 0
    with tempfile.TemporaryDirectory() as scratch:
        for path in folder.iterdir():
            rng = np.random.default_rng([4, int(path.name)])
            decoded += decode_unchecked(path.read_bytes(), Path(scratch), rng)
    print(decoded)


@pytest.mark.slow
def test_attacks_stay_within_bounds(tmp_path: Path, kernel_cache: Path, root: Path) -> None:
    """The decoders compiled with NUMBA_BOUNDSCHECK: an index out of bounds raises IndexError.

    Attacks are made here, so that nothing but decoders is compiled there. What is compiled is kept for these
    sources: numba itself looks only at the file of a function, not at those of the functions that it calls.
    """
    for number in range(600):
        (tmp_path / str(number)).write_bytes(attack(np.random.default_rng([3, number])))
    sources = hashlib.sha256()
    for path in sorted((root / "kernels").rglob("*.py")):
        sources.update(path.read_bytes())
    cache = kernel_cache / f"bounds-{sources.hexdigest()[:16]}"
    # Most of the time is the compiler's, and an index is checked without optimisation too.
    environment = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(cache)}
    ran = subprocess.run(
        [sys.executable, "-I", __file__, tmp_path],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 120


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        "scalar",
        pytest.param("vector", marks=pytest.mark.skipif(not SUPPORTED, reason="no AVX-512 VBMI2 here")),
    ],
)
def test_the_coder_stays_between_guard_pages(form: str) -> None:
    """All arrays end, then begin, at memory that nobody may touch; a process of its own would be killed."""
    ran = subprocess.run([sys.executable, "-I", GUARDED, form], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 100, "streams that were refused"


@pytest.mark.parametrize("side", ["begin", "end"])
def test_guard_pages_kill_what_touches_them(side: str) -> None:
    ran = subprocess.run([sys.executable, "-I", GUARDED, "beyond", side], capture_output=True, text=True)
    assert ran.returncode == -signal.SIGSEGV


def windows() -> Iterator[tuple[int, int]]:
    for start in (0, 1, 255, 256, 16383, 16384, 16385):
        yield start, 17084


@pytest.mark.parametrize("name", ["escapes", "two blocks", "wide", "normalised"])
def test_words_are_read_exactly(name: str, tmp_path: Path) -> None:
    """A block at the very end of its buffer decodes, and so does one that another follows."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(good(name))
    with FolderSource(path) as source:
        (tensor,) = source.tensors()
        width = tensor.info.nbytes // tensor.info.numel
        whole, read = source.read(tensor), source.reader(tensor)
        for start, stop in windows():
            start, stop = min(start, tensor.info.numel) * width, min(stop, tensor.info.numel) * width
            assert (read(start, stop) == whole[start:stop]).all()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
