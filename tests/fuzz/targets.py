"""What is fuzzed: functions of bytes that pass, or raise what is a bug.

A target gives some bytes to a reader and accepts NeuzipError alone; where there are two readers, they must
agree. Here nothing needs a fuzzer: tests/system/test_fuzz_seeds.py runs every seed, run.py drives the
targets with atheris.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from neuzip.compress import Rule, Scheme, decompress, verify
from neuzip.compress.delta_job import compress_delta
from neuzip.compress.rules_file import read_plan_file
from neuzip.compress.schemes import delta_coding, ternary_coding
from neuzip.compress.schemes.coded_blocks import parse_table
from neuzip.compress.schemes.lossless import LosslessDecoder
from neuzip.compress.schemes.ternary_layout import TernaryLayout
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError
from neuzip.formats import checkpoint
from neuzip.formats import config_section as own_section
from neuzip.formats.card import model_card
from neuzip.formats.export import gguf, gguf_model
from neuzip.formats.manifest import Manifest, parse_manifest
from neuzip.formats.records import AliasRecord, OfBaseRecord, TruncatedRecord, is_safe_path
from neuzip.formats.safetensors_file import parse_header, parse_json
from neuzip.kernels import rans
from neuzip.kernels.delta import Digits
from neuzip.kernels.float_fields import FORMATS, non_finite, plane_bytes, plane_widths

TESTS = Path(__file__).resolve().parent.parent
CORPUS = TESTS / "fuzz" / "corpus"
GOLDEN = TESTS / "golden"

Mutate = Callable[[bytes, int], bytes]
"""mutate(data, most): the same changed a little, of at most that many bytes."""


def load(path: Path) -> ModuleType:
    """A module of the tests, which are in no package."""
    name = f"fuzz_{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


bad = load(GOLDEN / "bad" / "make.py")
guarded = load(TESTS / "fuzz" / "guarded.py")
independent = load(TESTS / "support" / "independent_decoder.py")
independent.check_padding = lambda *_: None  # a reader may leave padding unread, and neuzip does


@cache
def scratch() -> Path:
    """A folder for the targets whose input is a file."""
    folder = tempfile.TemporaryDirectory(prefix=SCRATCH)
    _kept.append(folder)
    return Path(folder.name)


SCRATCH = "neuzip-fuzz-"
_kept: list[tempfile.TemporaryDirectory[str]] = []


# Headers and manifests


def run_header(data: bytes) -> None:
    """A header that is accepted covers its data without holes, and is the same when it is written anew."""
    raw = bad.with_length(data)
    try:
        header = parse_header(raw, "fuzz")
    except FormatError:
        return
    end = 0
    document: dict[str, Any] = {"__metadata__": header.metadata}
    for t in header.in_file_order:
        assert t.start == end
        end = t.stop
        document[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.start, t.stop]}
    assert header.data_bytes == end
    again = parse_header(bad.with_length(bad.dumps(document)), "fuzz", end)
    assert (again.tensors, again.metadata) == (header.tensors, header.metadata)


def run_manifest(data: bytes) -> None:
    """A manifest that is accepted says the same when it is written anew, and no path leaves the folder."""
    for may_be_delta in (False, True):
        try:
            manifest = parse_manifest(data, "fuzz", delta=may_be_delta)
        except FormatError:
            continue
        assert may_be_delta or not manifest.needs_base
        assert parse_manifest(manifest.to_bytes(), "fuzz", delta=may_be_delta) == manifest
        _require_paths_inside(manifest)


def _require_paths_inside(manifest: Manifest) -> None:
    for record in manifest.tensors.values():
        file = record.file if isinstance(record, (AliasRecord, OfBaseRecord)) else None
        if file is not None:
            assert ".." not in Path(file).parts
            assert not Path(file).is_absolute()


# Containers


def run_container(data: bytes) -> None:
    """Reader and independent decoder restore the same tensors and the same file, or refuse the same.

    A second time with the checksums of the tensors made right: else hardly a change would be restored.
    """
    path = _beside_others("w.safetensors")
    path.write_bytes(data)
    ours, theirs = _ours(path), _theirs(path)
    if ours is None or theirs is None:  # some faults are found in one of them before a tensor is decoded
        for decoded in (ours, theirs):
            assert decoded is None or None in decoded.values(), "one reader refuses it, the other does not"
        return
    for name in theirs:
        a, b = ours[name], theirs[name]
        assert (a is None) == (b is None), f"{name!r}: one decoder refuses, the other does not"
        assert a == b, name
    _require_same_file(path)
    right = _with_right_checksums(data, {name: b for name, b in ours.items() if b is not None})
    if right is not None and right != data:
        path.write_bytes(right)
        _require_same_file(path)


def _require_same_file(path: Path) -> None:
    """What decompression restores is what the independent decoder restores, and what verification accepts."""
    base = None
    with contextlib.suppress(independent.SpecViolation):
        if independent.Container(path, {}).is_delta:
            assert _restored(path, None) is _independently_restored(path, None) is None, "it has no base"
            base = _beside_others("base.safetensors")
    ours, theirs = _restored(path, base), _independently_restored(path, base)
    intact = False
    with contextlib.suppress(NeuzipError):
        verify(path, jobs=1, base=base)
        intact = True
    assert (ours is None) == (theirs is None), "one reader refuses the file, the other does not"
    assert ours == theirs, "the readers restore different files"
    assert intact == (ours is not None), "verified, and not restored, or the other way round"


def _restored(path: Path, base: Path | None) -> bytes | None:
    with contextlib.suppress(NeuzipError):
        decompress(path, path.with_name("restored"), jobs=1, base=base, overwrite=True)
        return path.with_name("restored").read_bytes()
    return None


def _independently_restored(path: Path, base: Path | None) -> bytes | None:
    with contextlib.suppress(independent.SpecViolation), np.errstate(all="ignore"):
        return bytes(independent.restore_file(path, base))
    return None


def _with_right_checksums(data: bytes, tensors: dict[str, bytes]) -> bytes | None:
    """The same container with the checksums of these tensors, and of the base's; None if it is too odd."""
    try:
        parts = bad.take_apart(data)
        records = parts.manifest["tensors"]
        for name, restored in tensors.items():
            records[name]["checksum"] = bad.checksum(restored)
        for record in records.values():
            base = _base_tensors().get(record.get("of"))
            if record["scheme"] == "delta" and base is not None:
                record["base"] = bad.checksum(base[2])
        return bytes(bad.put_together(parts.seal()))
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _base_tensors() -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of `base.safetensors`, from which containers may differ."""
    weights = np.sin(np.arange(1100, dtype=np.float32)) / 50
    return {
        "w": ("F32", [44, 25], weights.tobytes()),  # of fewer bytes no difference is taken
        "v": ("BF16", [300], (weights[:300].view(np.uint32) >> 16).astype("<u2").tobytes()),
        "u": ("U8", [8], bytes(range(8))),
    }


@cache
def _beside_others(name: str) -> Path:
    """A path in a folder with a base for deltas, and a container and a plain file for aliases."""
    folder = scratch() / "containers"
    if not folder.is_dir():
        folder.mkdir()
        (folder / "base.safetensors").write_bytes(bad.safetensors(_base_tensors()))
        (folder / "other.safetensors").write_bytes(bad.put_together(bad.raw("v")))
        (folder / "plain.safetensors").write_bytes(bad.safetensors({"w": ("U8", [8], bytes(range(8)))}))
    return folder / name


def _ours(path: Path) -> dict[str, bytes | None] | None:
    """The tensors of a container, whatever their checksums say; None for what does not decode."""
    decoded: dict[str, bytes | None] = {}
    try:
        with FolderSource(path, allow_delta=True) as source:
            if not source.is_compressed:
                return None
            for tensor in source.tensors():
                decoded[tensor.name] = None
                with contextlib.suppress(NeuzipError):
                    data = source.read(tensor)
                    assert data.size == tensor.info.nbytes
                    decoded[tensor.name] = _without_the_undefined(
                        data, tensor.info.dtype, source.resolve(tensor).record
                    )
        return decoded
    except NeuzipError:
        return None


def _without_the_undefined(data: np.ndarray, dtype: str, record: Any) -> bytes:
    """Weights that a normaliser made infinite, or found so, may be anything: SPEC.md, section 8."""
    if not isinstance(record, TruncatedRecord) or record.block_size is None:
        return bytes(data)
    fmt = FORMATS[dtype]
    bits = data.view(fmt.dtype).copy()
    bits[non_finite(bits, fmt)] = 0
    return bytes(bits)


def _theirs(path: Path) -> dict[str, bytes | None] | None:
    """The same by the decoder that was written from SPEC.md alone.

    It refuses more files as a whole.
    """
    try:
        container = independent.Container(path, {})
    except independent.SpecViolation:
        return None
    decoded: dict[str, bytes | None] = {}
    for name, record in container.records.items():
        if record["scheme"] not in ("raw", "alias", "ternary", "lossless", "truncated", "quantized"):
            continue  # it needs another checkpoint
        decoded[name] = None
        with contextlib.suppress(independent.SpecViolation):
            decoded[name] = _independently(container, name, record)
    return decoded


def _independently(container: Any, name: str, record: dict[str, Any]) -> bytes:
    if record["scheme"] == "raw":
        return bytes(container.entry(name))
    if record["scheme"] == "alias":
        of, file = record["of"], record.get("file", container.path.name)
        if file != container.path.name:
            raise independent.SpecViolation
        same = of in container.tensors and container.tensors[of] == container.tensors[name]
        if not same or container.records[of]["scheme"] == "alias":
            raise independent.SpecViolation
        return _independently(container, of, container.records[of])
    if record["scheme"] == "ternary":
        return bytes(container.decode_ternary(name).tobytes())
    if record["scheme"] == "quantized":
        return bytes(container.decode_quantized(name).tobytes())
    with np.errstate(all="ignore"):
        patterns = container.decode(name)
    if record.get("block_size") is not None:
        fmt = FORMATS[container.tensors[name][0]]
        patterns = np.array(patterns, fmt.dtype)
        patterns[non_finite(patterns, fmt)] = 0
    return bytes(patterns.tobytes())


# The coder itself

DTYPES = tuple(FORMATS)
WORDS_HEAD = struct.Struct("<BBHHH")
"""Of a `words` input: dtype, mantissa bits, weights, bytes of the table, words of the block."""


def run_words(data: bytes) -> None:
    """One block of floats: the compiled decoder, and those of the reference and of SPEC.md."""
    if len(data) < WORDS_HEAD.size:
        return
    dtype, kept, numel, table_bytes, n_words = WORDS_HEAD.unpack_from(data)
    fmt = FORMATS[DTYPES[dtype % len(DTYPES)]]
    kept, numel, rest = kept % (fmt.mantissa_bits + 1), 1 + numel % 1024, data[WORDS_HEAD.size :]
    table, rest = rest[: table_bytes % 1100 // 2 * 2], rest[table_bytes % 1100 // 2 * 2 :]
    words = np.frombuffer(rest[: len(rest) // 2 * 2], "<u2")[: n_words % 4096]
    streams = {
        "table": bad.pad(table),
        "index": bad.pad(struct.pack("<H", len(words))),
        "words": bad.pad(words.tobytes()),
        "sign_mantissa": _planes(rest[2 * len(words) :] or b"\x9c", numel, plane_widths(1 + kept)),
    }
    ours = None
    with contextlib.suppress(NeuzipError):
        decoder = LosslessDecoder(
            lambda name, start, stop: np.frombuffer(streams[name], np.uint8)[start:stop],
            lambda name: len(streams[name]), numel, fmt, kept,
        )  # fmt: skip
        ours = decoder.read(0, numel)
        part = decoder.read(numel // 3, numel - numel // 4)
        assert bytes(part) == bytes(ours[numel // 3 : numel - numel // 4])
    theirs = None
    with contextlib.suppress(independent.SpecViolation):
        theirs = _block_by_specification(streams, words, numel, fmt, kept)
    assert (ours is None) == (theirs is None), "one decoder refuses, the other does not"
    if ours is not None:
        assert bytes(ours) == bytes(theirs)


def run_guarded(data: bytes) -> None:
    """The same block in the scalar and in the vector form, between pages that nobody may touch.

    Its weights are also encoded, in both forms.
    """
    if len(data) < WORDS_HEAD.size:
        return
    dtype, _, numel, table_bytes, n_words = WORDS_HEAD.unpack_from(data)
    fmt, numel, rest = FORMATS[DTYPES[dtype % len(DTYPES)]], 1 + numel % 1024, data[WORDS_HEAD.size :]
    table_bytes = min(table_bytes % 1100, len(rest)) // 2 * 2
    stored, rest = np.frombuffer(rest[:table_bytes], "<u2"), rest[table_bytes:]
    words = np.frombuffer(rest[: len(rest) // 2 * 2], "<u2")[: n_words % 4096]
    try:
        table = parse_table(stored, fmt)
    except (NeuzipError, ValueError):
        return
    hostile = rans.RansEncoded(words, np.array([words.size], np.uint16))
    weights = np.resize(np.frombuffer(rest or b"\x78", np.uint8), numel).astype(fmt.exponent_dtype)
    wide = weights.dtype == np.uint16
    found = []
    for form, side in itertools.product(guarded.forms(), guarded.SIDES):
        decoded = guarded.decode(hostile, table, numel, form, side, wide)
        coded = guarded.encode(weights, table, form, side)
        again = guarded.decode(coded, table, numel, form, side, wide)
        assert again is not None
        assert again.tobytes() == weights.tobytes()
        found.append((decoded if decoded is None else decoded.tobytes(), coded.words.tobytes()))
    assert len(set(found)) == 1, "the forms differ"


def _planes(data: bytes, numel: int, widths: tuple[int, ...]) -> bytes:
    """Planes that hold these bytes again and again; what fills them up is zero."""
    planes = b""
    for width in widths:
        plane = bytearray((data * (1 + plane_bytes(width, numel) // len(data)))[: plane_bytes(width, numel)])
        unused = -numel * width % 8
        plane[-1] &= 0xFF >> unused
        planes += bad.pad(bytes(plane))
    return planes


def _block_by_specification(
    streams: dict[str, bytes], words: np.ndarray, numel: int, fmt: Any, kept: int
) -> np.ndarray:
    stored = np.frombuffer(streams["table"], "<u2").astype(np.int64)
    if len(stored) < 3 or independent.pad16(2 * int(3 + stored[1] + stored[2])) != 2 * len(stored):
        raise independent.SpecViolation
    exponent_bits, mantissa_bits = fmt.exponent_bits, fmt.mantissa_bits
    table = independent.Table(stored, exponent_bits)
    exponents = independent.decode_block(words.astype(np.int64), numel, table).astype(np.uint64)
    field = independent.join_planes(streams["sign_mantissa"], numel, 1 + kept)
    sign = field >> np.uint64(kept)
    mantissa = (field & np.uint64((1 << kept) - 1)) << np.uint64(mantissa_bits - kept)
    pattern = sign << np.uint64(exponent_bits + mantissa_bits) | exponents << np.uint64(mantissa_bits)
    return np.asarray(pattern | mantissa, fmt.dtype)


TERNARY_HEAD = struct.Struct("<BBBB")
"""Of a `ternary` input: dtype and forms, rows, columns, group."""


def run_ternary(data: bytes) -> None:
    """Codes and scales, whole and in part, against the decoder of SPEC.md."""
    if len(data) < TERNARY_HEAD.size:
        return
    form, rows, columns, group = TERNARY_HEAD.unpack_from(data)
    dtype = ("BF16", "F16", "F32")[form % 3]
    packing, scale_dtype = ("trits", "2bit")[form >> 2 & 1], ("F32", "F16")[form >> 3 & 1]
    shape = (1 + rows % 16, 1 + columns)
    layout = TernaryLayout(shape, group or None, packing, scale_dtype)
    n, rest = layout.numel, data[TERNARY_HEAD.size :]
    lengths, streams, at = layout.stream_bytes, {}, 0
    for name, nbytes in lengths.items():
        stored, filler = rest[at : at + nbytes], {"codes": b"\x80" if packing == "trits" else b"\x55"}
        streams[name] = stored.ljust(nbytes, filler.get(name, b"\x3c")) + bytes(-nbytes % 16)
        at += nbytes
    ours = None
    with contextlib.suppress(NeuzipError):
        decoder = ternary_coding.TernaryDecoder(
            lambda name, start, stop: torch.tensor(list(streams[name][start:stop]), dtype=torch.uint8),
            lambda name: len(streams[name]), ternary_coding.TORCH_DTYPES[dtype], layout,
        )  # fmt: skip
        ours = decoder.read(0, n)
        start, stop = n // 3, n - n // 4
        assert bytes(decoder.read(start, stop)) == bytes(ours[start:stop])
    theirs = None
    with contextlib.suppress(independent.SpecViolation):
        theirs = _ternary_by_specification(streams, layout, dtype)
    assert (ours is None) == (theirs is None), "one decoder refuses, the other does not"
    if ours is not None:
        assert bytes(ours) == bytes(theirs)


def _ternary_by_specification(streams: dict[str, bytes], layout: TernaryLayout, dtype: str) -> np.ndarray:
    n, c, group = layout.numel, layout.columns, layout.group
    independent.must(group is None or group <= c, "A group is longer than a row.")
    lengths = independent.ternary_bytes(n, c, group, layout.packing, layout.scale_dtype)
    assert lengths == layout.stream_bytes
    scale = np.frombuffer(
        streams["scale"][: lengths["scale"]], "<f2" if layout.scale_dtype == "F16" else "<f4"
    )
    independent.must(np.isfinite(scale).all() and not np.signbit(scale).any(), "A scale cannot be.")
    codes = independent.ternary_codes(streams["codes"][: lengths["codes"]], n, c, layout.packing)
    i, j = np.divmod(np.arange(n), c)
    number = np.zeros(n, int) if group is None else i * independent.ceil_div(c, group) + j // group
    return np.asarray(independent.ternary_patterns(codes, scale.astype("<f4")[number], dtype))


DELTA_HEAD = struct.Struct("<BBBBHH")
"""Of a `delta` input: dtype, shift, low bits, digits, weights, bytes of the tables."""


def run_delta(data: bytes) -> None:
    """Differences from a base of one block, against the decoder of SPEC.md: index, choice, tables, words."""
    if len(data) < DELTA_HEAD.size:
        return
    kind, shift, low, digits, numel, table_bytes = DELTA_HEAD.unpack_from(data)
    fmt = FORMATS[DTYPES[kind % len(DTYPES)]]
    shift, low, digits, numel = shift % 64, low % 64, 1 + digits % 4, 1 + numel % 1024
    rest = data[DELTA_HEAD.size :].ljust(3 * digits, b"\0")
    index, choice = np.frombuffer(rest[: 2 * digits], "<u2") % 3000, rest[2 * digits : 3 * digits]
    rest, at = rest[3 * digits :], table_bytes % 4000 // 2 * 2
    table, rest = rest[:at], rest[at:]
    stored = np.frombuffer(rest[: len(rest) // 2 * 2] or b"\0\0", "<u2")
    words = np.resize(stored, int(index.sum()))
    streams = {"table": bad.pad(table), "index": bad.pad(index.astype("<u2").tobytes())}
    streams |= {"words": bad.pad(words.astype("<u2").tobytes()), "choice": bad.pad(choice)}
    if low:
        streams["low"] = _planes(rest[-40:] or b"\x9c", numel, plane_widths(low))
    some = np.frombuffer(b"\x00\x80\x3f\xbc\xff\x7f\x01\x12\x80", np.uint8)
    base = np.resize(some, numel * fmt.bits // 8)
    ours = theirs = None
    with contextlib.suppress(NeuzipError):
        decoder = delta_coding.DeltaDecoder(
            lambda name, start, stop: np.frombuffer(streams[name], np.uint8)[start:stop],
            lambda name: len(streams[name]), numel, fmt, Digits(fmt.bits, shift, low), digits,
        )  # fmt: skip
        read = lambda start, stop: base.view(fmt.dtype)[start:stop]  # noqa: E731
        ours = decoder.read(0, numel, read)
        part = slice(numel // 3, numel - numel // 4)
        assert bytes(decoder.read(part.start, part.stop, read)) == bytes(ours[part])
    with contextlib.suppress(independent.SpecViolation):
        theirs = _delta_by_specification(streams, base, numel, fmt, (shift, low, digits))
    assert (ours is None) == (theirs is None), "one decoder refuses, the other does not"
    if ours is not None:
        assert bytes(ours) == theirs


def _delta_by_specification(
    streams: dict[str, bytes], base: np.ndarray, numel: int, fmt: Any, how: tuple[int, int, int]
) -> bytes:
    """What section 13 of SPEC.md says, of streams that are in no file."""
    record = dict(zip(("shift", "low_bits", "digits"), how, strict=True))
    record |= {"scheme": "delta", "of": "w", "base": bad.checksum(base.tobytes()), "streams": {}}
    words = {
        f"w:{stream}": np.frombuffer(data, "<u2").astype(np.int64)
        for stream, data in streams.items()
        if independent.STREAMS[stream] == "U16"
    }
    container = object.__new__(independent.Container)
    vars(container).update(
        records={"w": record | {"streams": dict.fromkeys(streams)}}, tensors={"w": (fmt.name, [numel])},
        words=words.__getitem__, entry=lambda name: streams[name.removeprefix("w:")],
        base=SimpleNamespace(tensor=lambda *_: base.tobytes()),
    )  # fmt: skip
    for entry, (dtype, (length,)) in container.expected_delta("w").items():
        stored = len(streams[entry.removeprefix("w:")])
        independent.must(stored == length * (2 if dtype == "U16" else 1), f"{entry} has another length.")
    container.records["w"] = record
    return bytes(container.from_base("w"))


# The other files of a folder

PLACES = {
    b"manifest": "neuzip/manifest.json",
    b"index": "model.safetensors.index.json",
    b"config": "config.json",
}


def run_folder(data: bytes) -> None:
    """A JSON file of a folder, named in its first line, read in all the ways there are."""
    place, _, text = data.partition(b"\n")
    root = _folder()
    path = root / PLACES.get(place, "neuzip/manifest.json")
    before = path.read_bytes()
    path.write_bytes(text)
    try:
        _read_folder(root)
    finally:
        path.write_bytes(before)


def _read_folder(root: Path) -> None:
    with contextlib.suppress(NeuzipError):
        for name, file in checkpoint.read_stored_files(root).items():
            assert is_safe_path(name)
            assert root in (root / name).resolve().parents
            assert file.nbytes is None or file.nbytes >= 0
    with contextlib.suppress(NeuzipError):
        found = checkpoint.find_checkpoint(root)
        for index in checkpoint.index_files(found):
            checkpoint.read_weight_map(found, index)
            json.loads(checkpoint.rewritten_index(found, index, {"model.safetensors": {}}))
        for config in checkpoint.config_files(found):
            json.loads(checkpoint.rewritten_config(found, config, True, "8bit"))
    with contextlib.suppress(NeuzipError):
        own_section.own_section(own_section.read_config(root / "config.json"), "config.json")
    with contextlib.suppress(NeuzipError):
        verify(root, jobs=1)


@cache
def _folder() -> Path:
    """A compressed folder with one container."""
    root = scratch() / "folder"
    (root / "neuzip" / "original").mkdir(parents=True)
    (root / "model.safetensors").write_bytes(bad.put_together(bad.raw("v")))
    index = {"weight_map": {"w": "model.safetensors", "v": "model.safetensors"}}
    texts = {"model.safetensors.index.json": index, "config.json": {"model_type": "llama", "neuzip": {}}}
    stored = {"model.safetensors": checkpoint.StoredFile("container")}
    for name, document in texts.items():
        text = json.dumps(document).encode()
        (root / name).write_bytes(text)
        (root / "neuzip" / "original" / name).write_bytes(text)
        stored[name] = checkpoint.StoredFile("rewritten", len(text), bad.checksum(text))
    (root / "neuzip" / "manifest.json").write_bytes(checkpoint.stored_files_to_json(stored))
    return root


def run_plan(data: bytes) -> None:
    """A plan file: every rule of it can be written down."""
    path = scratch() / "plan.toml"
    path.write_bytes(data)
    with contextlib.suppress(NeuzipError):
        for rule in read_plan_file(path):
            json.dumps(rule.to_json())
            str(rule.scheme)


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "eos_token_id": [2, 3], "hidden_size": 64,
    "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def run_tokenizer(data: bytes) -> None:
    """tokenizer.json, tokenizer_config.json and config.json between null bytes: GGUF of them, or an error."""
    with contextlib.suppress(NeuzipError):
        texts = [*data.split(b"\0"), b"", b""]
        tokenizer, about, config = (parse_json(text or b"{}", "fuzz") for text in texts[:3])
        if not (isinstance(tokenizer, dict) and isinstance(about, dict) and isinstance(config, dict)):
            return
        described = gguf_model.GgufModel.of(CONFIG | config)
        entries = described.metadata("fuzz", gguf.TERNARY["tq2_0"])
        described.rope_factors()
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
            rows = described.rows(name)
            if described.vocabulary > 4096 or (rows is not None and rows > 4096):
                return  # checkpoints of such sizes are not what is tested
            order = described.row_order(name)
            assert order is None or len(order) == rows
        entries |= gguf_model.tokenizer_metadata(tokenizer, about, described, None)
        with gguf.GgufWriter(scratch() / "model.gguf", entries, []):
            pass


def run_card(data: bytes) -> None:
    """A model card's metadata: strings, and lists of strings, that survive being written as YAML."""
    metadata, _ = model_card.split_card(data.decode("utf-8", "replace"))
    for value in metadata.values():
        assert isinstance(value, str) or all(isinstance(item, str) for item in value)


# How inputs are changed

TOKEN = re.compile(rb'-?\d+(?:\.\d+)?|"(?:[^"\\]|\\.)*"|true|false|null|[\[\]{},:]')
JUNK = (
    b'0 1 2 3 16 -1 1.0 1e3 true false null 65535 4294967296 4611686018427387904 1e999 NaN [] {} "" "w" "v" '
    b'"U8" "U16" "BF16" "F16" "F32" "F64" "F8_E5M2" "X1" "raw" "lossless" "truncated" "ternary" "alias" "of" '
    b'"file" "../w" "/etc/passwd" "w.safetensors" "neuzip:header" "2bit" "trits" "group" "block_size" '
    b'"original" "requires" "version" "\\u0000" "\\ud800" "\\u001b[2J" "exact" "absmean" "loss" "scheme"'
).split()


KEYS = [
    "requires", "scheme", "checksum", "mantissa_bits", "streams", "block_size", "original", "loss", "packing",
    "scale_dtype", "group", "quantizer", "of", "file", "base", "shift", "low_bits", "digits", "unknown",
]  # fmt: skip
VALUES = [
    None, 0, 1, 8, 16, -1, 1.5, 10**30, True, "", "w", "v", "raw", "lossless", "ternary", "alias", "base",
    "delta", [], ["delta"], ["delta", "delta"], {}, "2bit", "trits", "F16", "other.safetensors",
    "plain.safetensors", "w.safetensors", "a\\b", "0123456789abcdef", {"max_relative": 0, "rms_relative": 0},
    {"max_relative": -1, "rms_relative": 0},
]  # fmt: skip
"""Of records, each of them with each: what belongs to another scheme, and what is out of range."""


def edit_json(text: bytes, rng: random.Random) -> bytes:
    """Replace, repeat, remove or exchange tokens of a JSON text."""
    tokens = list(TOKEN.finditer(text))
    if not tokens:
        return text
    at = rng.choice(tokens)
    kind = rng.randrange(4)
    if kind == 0:
        new = rng.choice(JUNK)
    elif kind == 1:
        new = rng.choice(tokens).group()
    elif kind == 2:
        return text[: at.start()] + text[at.end() :]
    else:
        other = rng.choice(tokens)
        first, second = sorted((at, other), key=lambda token: token.start())
        new = text[first.start() : second.end()]
        return text[: first.start()] + new + b"," + new + text[second.end() :]
    return text[: at.start()] + new + text[at.end() :]


def mutate_json(data: bytes, most: int, rng: random.Random, mutate: Mutate) -> bytes:
    """Tokens of a JSON text most often, else bytes."""
    if rng.random() < 0.3:
        return mutate(data, most)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = edit_json(data, rng)
    return data[:most]


def mutate_container(data: bytes, most: int, rng: random.Random, mutate: Mutate) -> bytes:
    """A part of a container, with checksums that are right again: else nothing would reach the decoders."""
    if rng.random() < 0.1:
        return mutate(data, most)
    try:
        parts = bad.take_apart(data)
        for _ in range(rng.choice((1, 1, 2))):
            _mutate_part(parts, most, rng, mutate)
        changed = bytes(bad.put_together(parts.seal() if rng.random() < 0.95 else parts))
    except Exception:  # what was there before is no container any more, or this is none
        return mutate(data, most)
    return changed if len(changed) <= most else mutate(data, most)


def _mutate_part(parts: Any, most: int, rng: random.Random, mutate: Mutate) -> None:
    kind = rng.random()
    if kind < 0.05:
        record = rng.choice([parts.manifest, *parts.manifest["tensors"].values()])
        record[rng.choice(KEYS)] = rng.choice(VALUES)
    elif kind < 0.25:
        parts.manifest = json.loads(edit_json(bad.dumps(parts.manifest), rng))
    elif kind < 0.45:
        parts.header = bad.with_length(edit_json(parts.header[8:], rng))
    elif kind < 0.5:
        parts.metadata = json.loads(edit_json(bad.dumps(parts.metadata), rng))
    elif parts.entries:
        name = rng.choice(list(parts.entries))
        dtype, shape, old = parts.entries[name]
        new = mutate(old, len(old) + 16 * (rng.random() < 0.2))
        if len(shape) == 1 and dtype in ("U8", "U16"):
            parts.put(name, bad.pad(new))
        else:
            parts.entries[name] = (dtype, shape, new.ljust(len(old), b"\0")[: len(old)])


def mutate_bytes(data: bytes, most: int, rng: random.Random, mutate: Mutate) -> bytes:
    """As the fuzzer thinks best."""
    return mutate(data, most)


# Where it begins


def container_seeds() -> Iterator[bytes]:
    """Small containers of every scheme and dtype, the golden files that are small, and all the bad ones."""
    for _, data in bad.good():
        yield data
    yield from delta_container_seeds()
    for path in sorted((*GOLDEN.glob("v*/*.safetensors"), *(GOLDEN / "bad").glob("*.safetensors"))):
        if path.stat().st_size < 4096:
            yield path.read_bytes()


def delta_container_seeds() -> Iterator[bytes]:
    """Differences from the base: none, few, many, of all bits; and a delta without them."""
    base = _beside_others("base.safetensors")
    changed = scratch() / "changed.safetensors"
    for step, bits in ((2000, 1), (50, 3), (1, 1), (1, 0x7FFF)):
        tensors = {}
        for name, (dtype, shape, data) in _base_tensors().items():
            pattern = np.frombuffer(data, {"BF16": "<u2", "F32": "<u4", "U8": "u1"}[dtype]).copy()
            chosen = pattern[step - 1 :: step]
            chosen ^= (np.arange(chosen.size) & bits).astype(pattern.dtype)
            tensors[name] = (dtype, shape, pattern.tobytes())
        changed.write_bytes(bad.safetensors(tensors))
        rule = Rule("*", Scheme("lossless"))
        compress_delta(changed, base, scratch() / "delta", "base", [rule], overwrite=True)
        yield (scratch() / "delta").read_bytes()
    alone = bad.raw("v")
    alone.manifest["requires"] = ["delta"]
    yield bad.put_together(alone)


def _parts() -> Iterator[Any]:
    for data in container_seeds():
        with contextlib.suppress(Exception):  # most of the bad files cannot be taken apart
            yield bad.take_apart(data)


def header_seeds() -> Iterator[bytes]:
    """The headers of those."""
    for data in container_seeds():
        length = int.from_bytes(data[:8], "little")
        if length < 4096:
            yield data[8 : 8 + length]


def manifest_seeds() -> Iterator[bytes]:
    """The manifests of those, and of the larger golden files."""
    for parts in _parts():
        yield bad.dumps(parts.manifest)
    for path in sorted(GOLDEN.glob("v*/*.safetensors")):
        yield bad.dumps(bad.take_apart(path.read_bytes()).manifest)


def words_seeds() -> Iterator[bytes]:
    """Blocks of every dtype, and two that only one comparison refuses."""
    twice = bad.escaping()  # the same position twice
    words, used = twice.words("w:words"), int(twice.words("w:index")[0])
    words = np.concatenate([words[:used], words[used - 2 : used]])
    words[0] = 2
    twice.put("w:words", words)
    twice.put("w:index", np.array([used + 2], np.uint16))
    level = bad.lossless("BF16", np.full(300, 120) - np.arange(300) % 2)  # a palette that does not rise
    table = level.words("w:table")
    table[3] = table[4]
    level.put("w:table", table)
    for parts in (twice, level, *_parts()):
        for name, (dtype, shape) in _tensors(parts).items():
            record = parts.manifest["tensors"].get(name)
            n = int(np.prod(shape))
            if dtype not in FORMATS or not isinstance(record, dict) or not 0 < n < 1024:
                continue
            entries = [
                parts.entries.get(f"{name}:{stream}") for stream in ("table", "words", "sign_mantissa")
            ]
            if None in entries or type(record.get("mantissa_bits")) is not int:
                continue
            table, words, fields = (entry[2] for entry in entries)  # type: ignore[index]
            used = int.from_bytes(parts.entries[f"{name}:index"][2][:2], "little")
            head = (DTYPES.index(dtype), record["mantissa_bits"] % 256, n - 1, len(table), used)
            if used < 4096 and len(table) < 1100:
                yield WORDS_HEAD.pack(*head) + table + words[: 2 * used] + fields


def ternary_seeds() -> Iterator[bytes]:
    """Ternary tensors in every form."""
    for packing in (0, 1):
        for scale_dtype in (0, 1):
            for dtype in range(3):
                for group in (0, 1, 7, 16, 30):
                    form = dtype | packing << 2 | scale_dtype << 3
                    yield TERNARY_HEAD.pack(form, 2, 29, group)
    for parts in _parts():
        for name, (dtype, shape) in _tensors(parts).items():
            codes, scale = parts.entries.get(f"{name}:codes"), parts.entries.get(f"{name}:scale")
            if dtype == "BF16" and codes is not None and scale is not None and len(shape) == 2:
                record = parts.manifest["tensors"][name]
                form = 4 * (record.get("packing") == "2bit") + 8 * (record.get("scale_dtype") == "F16")
                group = record.get("group")
                group = group if type(group) is int and 0 < group < 256 else 0
                if shape[0] <= 16 and 0 < shape[1] <= 256:
                    yield TERNARY_HEAD.pack(form, shape[0] - 1, shape[1] - 1, group) + codes[2] + scale[2]


def delta_seeds() -> Iterator[bytes]:
    """Differences of every dtype, few and many, as the encoder codes them."""
    for kind, fmt in enumerate(FORMATS.values()):
        bits = np.arange(600, dtype=np.uint64) * np.uint64(2654435761)
        old = (bits % np.uint64(1 << fmt.bits - 1)).astype(fmt.dtype)
        for step in (1, 3, 100):
            new = old.copy()
            new[::step] += np.arange(len(new[::step])).astype(fmt.dtype) % fmt.dtype.type(7)
            coded = delta_coding.encode(
                lambda start, stop, new=new: new[start:stop], lambda start, stop, old=old: old[start:stop],
                600, fmt, map, lambda *_: None,
            )  # fmt: skip
            assert coded is not None
            streams = {name: b"".join(p.tobytes() for p in s.parts) for name, s in coded.streams.items()}
            index, low = streams["index"][: 2 * coded.digits], streams.get("low", b"")
            used = sum(np.frombuffer(index, "<u2").tolist())
            head = (kind, coded.cut.shift, coded.cut.low, coded.digits - 1, 599, len(streams["table"]))
            index += streams["choice"][: coded.digits]
            yield DELTA_HEAD.pack(*head) + index + streams["table"] + streams["words"][: 2 * used] + low


def _tensors(parts: Any) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor whose entry in the original's header has one."""
    try:
        original = parts.original
    except ValueError:
        return {}
    found = {}
    for name, entry in original.items():
        if isinstance(entry, dict) and isinstance(entry.get("dtype"), str):
            shape = entry.get("shape")
            if isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 20 for n in shape):
                found[name] = entry["dtype"], shape
    return found


def folder_seeds() -> Iterator[bytes]:
    """The three files as they are."""
    for place, path in PLACES.items():
        yield place + b"\n" + (_folder() / path).read_bytes()


def plan_seeds() -> Iterator[bytes]:
    """Rules with every key."""
    yield b'[[rule]]\nmatch = "*.norm"\nscheme = "raw"\n\n[[rule]]\nmatch = "*"\nmantissa_bits = 3\n'
    yield b'[[rule]]\nmatch = "*"\nmantissa_bits = 3\nblock_size = 512\nmin_dimensions = 2\n'
    yield (
        b'rule = [{match = "*", scheme = "ternary", group = "row", quantizer = "least-squares", '
        b'packing = "2bit", scale_dtype = "F16"}]\n'
    )


def tokenizer_seeds() -> Iterator[bytes]:
    """Byte-level BPE, and sentencepiece's."""
    common = {"added_tokens": [{"id": 4, "content": "</s>", "special": True}]}
    byte_level = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b", ["ab", "a"]]}
    pieces = byte_level | {"byte_fallback": True, "unk_token": "a"}
    outer = {"type": "Sequence", "processors": [{"single": [{"SpecialToken": {"id": "</s>"}}]}]}
    split = {"type": "Split", "pattern": {"Regex": gguf_model.LLAMA_3_SPLIT}}
    tokenizers: list[dict[str, Any]] = [
        {"model": byte_level, "pre_tokenizer": {"type": "ByteLevel"}, "post_processor": outer, **common},
        {
            "model": byte_level,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]},
            **common,
        },
        {"model": pieces, "normalizer": {"type": "Replace"}, **common},
        {"model": pieces, "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}},
    ]
    about = {"eos_token": "</s>", "bos_token": {"content": "a"}, "add_bos_token": True}
    llama_3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "rope_type": "llama3"}
    config = {"rope_parameters": llama_3 | {"original_max_position_embeddings": 64}, "head_dim": 16}
    for tokenizer in tokenizers:
        yield json.dumps(tokenizer).encode()
        yield b"\0".join(json.dumps(part).encode() for part in (tokenizer, about, config))


def card_seeds() -> Iterator[bytes]:
    """Metadata of every kind."""
    yield b"---\nlicense: mit\nlanguage: [no, en]\ntags:\n- a\n- 'b: c'\n---\n# Model\n"
    yield b'---\nbase_model: &a org/name\ndatasets: [*a, "\\u0041"]\nx: {y: z}\n? k\n: |\n  v\n---\n'


@dataclass(frozen=True)
class Target:
    """A property of bytes, inputs to begin with, how to change them, and the length of the longest.

    `share` is the percentage of the time: more for what has more code behind it.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    share: int
    mutate: Callable[[bytes, int, random.Random, Mutate], bytes] = mutate_bytes
    most: int = 4096


TARGETS = {
    "header": Target(run_header, header_seeds, 7, mutate_json),
    "manifest": Target(run_manifest, manifest_seeds, 9, mutate_json),
    "container": Target(run_container, container_seeds, 32, mutate_container, 8192),
    "words": Target(run_words, words_seeds, 12),
    "guarded": Target(run_guarded, words_seeds, 6),
    "ternary": Target(run_ternary, ternary_seeds, 7),
    "delta": Target(run_delta, delta_seeds, 9),
    "folder": Target(run_folder, folder_seeds, 8, mutate_json),
    "tokenizer": Target(run_tokenizer, tokenizer_seeds, 5, mutate_json),
    "plan": Target(run_plan, plan_seeds, 3),
    "card": Target(run_card, card_seeds, 2),
}


def kept_inputs(name: str) -> Iterator[tuple[str, bytes]]:
    """What earlier runs found worth keeping, by name; crash-... were bugs once."""
    path = CORPUS / f"{name}.zip"
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                yield entry, archive.read(entry)


def write_kept(name: str, inputs: dict[str, bytes]) -> None:
    """Keep these inputs: the same bytes whenever it is done."""
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in sorted(inputs):
            archive.writestr(zipfile.ZipInfo(entry), inputs[entry], zipfile.ZIP_DEFLATED)


def all_inputs(name: str) -> dict[str, bytes]:
    """Seeds and kept inputs of a target, by the name of a file."""
    return {seed_name(data): data for data in TARGETS[name].seeds()} | dict(kept_inputs(name))


def seed_name(data: bytes) -> str:
    """What a seed is called."""
    return f"seed-{hashlib.sha256(data).hexdigest()[:16]}"


if __name__ == "__main__":  # python tests/fuzz/targets.py TARGET FILE: what a saved input does
    TARGETS[sys.argv[1]].run(Path(sys.argv[2]).read_bytes())
    print(f"{os.fspath(sys.argv[2])}: no bug")
