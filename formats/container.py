"""Container files: safetensors files that hold the streams of compressed tensors. See SPEC.md.

Writer and reader face each other. The writer takes tensors one at a time and needs no memory for those it has
written; the reader hands out streams by range and loads nothing it was not asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.safetensors_file import (
    DTYPE_BITS,
    MAX_HEADER,
    NEW_FILE,
    Header,
    TensorFile,
    TensorInfo,
    opener,
    parse_header,
)

from .manifest import VERSION, Manifest, parse_manifest
from .records import RawRecord, Record, stream_name

ALIGNMENT = 16
"""Streams begin and end at multiples of 16 bytes: one vector load of a GPU."""

MOVED = 1 << 24
"""Bytes that move at a time where a header outgrows the space that was left for it."""

POOL_ENTRY = "neuzip:pool"
POOL_CHECKSUMS_ENTRY = "neuzip:pool_checksums"
HEADER_ENTRY = "neuzip:header"
MANIFEST_ENTRY = "neuzip:manifest"


def checksum(data: npt.NDArray[np.generic] | bytes) -> str:
    """xxh3-64 of some bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data if isinstance(data, bytes) else np.ascontiguousarray(data).data)


@dataclass(frozen=True)
class Stream:
    """A stream to be written, in parts, so that a long one need never be put together in memory."""

    parts: Sequence[npt.NDArray[np.uint8] | npt.NDArray[np.uint16]]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def checksum(self) -> str:
        """xxh3-64 of all parts."""
        running = xxhash.xxh3_64()
        for part in self.parts:
            running.update(part.data)
        return running.hexdigest()


def padded_stream(parts: Sequence[npt.NDArray[np.generic]]) -> Stream:
    """A stream of these parts, uint8 or uint16, filled up with zeros to a multiple of 16 bytes."""
    short = -sum(part.nbytes for part in parts) % ALIGNMENT
    return Stream([*parts, np.zeros(short // parts[0].itemsize, parts[0].dtype)])  # type: ignore[list-item]


class ContainerWriter:
    """Writes one container file: coded tensors first, raw ones after them, the manifest last.

    The header stands at the front but is known at the end: room for it is left and filled up with spaces, as
    safetensors allows. Nothing is flushed to disk before `close`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        original: Header,
        streams: Mapping[str, Sequence[Sequence[str]]],
        mode: int = NEW_FILE,
        pooled: AbstractSet[str] = frozenset(),
    ) -> None:
        """Open `path` for the tensors of `original`. `streams[name]` are the streams of all its forms.

        `mode` are the file's permission bits, less the umask. Of `pooled` tensors only `begin_pool` is told.
        Raises NeuzipError when there are too many tensors for the header of one safetensors file.
        """
        self.path = Path(path)
        self._original = original
        self._entries: dict[str, TensorInfo] = {}
        self._records: dict[str, Record] = {}
        self._pooled = [t for t in original.in_file_order if t.name in pooled]
        self._room = header_room(original, streams, pooled)
        self._require_short_header(self._room)
        self._offset = 0
        self._file: BinaryIO = open(self.path, "w+b", opener=opener(mode))
        self._file.seek(self._room)

    def add(self, name: str, record: Record, streams: Mapping[str, Stream]) -> None:
        """Write a coded tensor, whose `streams` have the names and dtypes of its record. None may be raw."""
        assert streams.keys() == record.stream_dtypes.keys()
        self._record(name, record)
        for stream, dtype in record.stream_dtypes.items():
            data, size = streams[stream], 2 if dtype == "U16" else 1
            assert all(part.itemsize == size for part in data.parts) and data.nbytes % ALIGNMENT == 0
            self._entry(stream_name(name, stream), dtype, (data.nbytes // size,), data.nbytes)
            for part in data.parts:
                self._file.write(part.data)

    def add_alias(self, name: str, record: Record) -> None:
        """Record a tensor whose bytes another one holds, in this checkpoint or in the base of a delta."""
        self._record(name, record)

    def begin_raw(self, name: str, record: Record) -> None:
        """Announce a tensor stored as it is; `write` its bytes next. No coded tensor may follow."""
        self._record(name, record)
        info = self._original.tensors[name]
        self._entry(name, info.dtype, info.shape, info.nbytes)

    def begin_pool(self, records: Mapping[str, Record]) -> None:
        """Announce the pooled tensors: `write` gets their bytes next, in the order of the original file."""
        for info in self._pooled:
            self._record(info.name, records[info.name])
        nbytes = sum(info.nbytes for info in self._pooled)
        self._entry(POOL_ENTRY, "U8", (nbytes,), nbytes)

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        """Write a piece of the raw tensor that was announced last, or of the pool."""
        self._file.write(data.data)

    def close(self) -> None:
        """Write manifest and header, and flush everything to disk."""
        header = np.frombuffer(self._original.raw, np.uint8)
        self._append(HEADER_ENTRY, "U8", (header.size,), header)
        if self._pooled:
            sums = b"".join(
                int(self._records[info.name].checksum, 16).to_bytes(8, "little") for info in self._pooled
            )
            self._append(POOL_CHECKSUMS_ENTRY, "U8", (len(sums),), np.frombuffer(sums, np.uint8))
        pooled = {info.name for info in self._pooled}
        in_order = {name: self._records[name] for name in self._original.tensors if name not in pooled}
        manifest = np.frombuffer(Manifest(checksum(header), in_order, bool(pooled)).to_bytes(), np.uint8)
        self._append(MANIFEST_ENTRY, "U8", (manifest.size,), manifest)
        text = _json(
            {"__metadata__": _metadata(checksum(manifest))}
            | {
                t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.stop]}
                for t in self._entries.values()
            }
        )
        self._fit(8 + len(text))
        self._file.seek(0)
        self._file.write((self._room - 8).to_bytes(8, "little") + text.ljust(self._room - 8))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _fit(self, nbytes: int) -> None:
        """Have space for a header of `nbytes`: where it outgrew what was left for it, all data move back."""
        if nbytes <= self._room:
            return
        room = _aligned(nbytes)
        self._require_short_header(room)
        end = self._room + self._offset
        for start in reversed(range(self._room, end, MOVED)):
            self._file.seek(start)
            data = self._file.read(min(MOVED, end - start))
            self._file.seek(start + room - self._room)
            self._file.write(data)
        self._room = room

    def _require_short_header(self, room: int) -> None:
        if room - 8 > MAX_HEADER:
            raise NeuzipError(
                f"{self.path}: the names of its streams take more than safetensors' {MAX_HEADER} bytes",
                "give `exclude` for many of the smaller tensors, or split the file",
            )

    def abandon(self) -> None:
        """Close and delete the unfinished file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _record(self, name: str, record: Record) -> None:
        if name not in self._original.tensors or name in self._records:
            raise ValueError(f"{name!r} is not in the original's header, or was written already")
        self._records[name] = record

    def _append(self, name: str, dtype: str, shape: tuple[int, ...], data: npt.NDArray[np.generic]) -> None:
        self._entry(name, dtype, shape, data.nbytes)
        self._file.write(np.ascontiguousarray(data).data)

    def _entry(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        if name in self._entries:
            raise FormatError(
                self.path, "has the name that neuzip gives to a stream of another tensor", tensor=name,
                hint="give `exclude` with the shorter name: a raw tensor has no streams",
            )  # fmt: skip
        self._entries[name] = TensorInfo(name, dtype, shape, self._offset, self._offset + nbytes)
        self._offset += nbytes


def header_room(
    original: Header, streams: Mapping[str, Sequence[Sequence[str]]], pooled: AbstractSet[str] = frozenset()
) -> int:
    """An upper bound on the header of a container, its length field included.

    `streams[name]` are the streams of all forms of a tensor, which may still turn out raw. `pooled` ones have
    no entry.
    """
    limit = 2 * original.data_bytes + (1 << 30)
    widest: dict[str, tuple[str, list[int]]] = {}
    for t in original.tensors.values():
        if t.name in pooled:
            continue
        forms: list[dict[str, tuple[str, list[int]]]] = [
            {stream_name(t.name, s): ("U16", [limit]) for s in names} for names in streams.get(t.name, ())
        ]
        widest |= max((*forms, {t.name: (t.dtype, list(t.shape))}), key=lambda entries: len(_json(entries)))
    own = [HEADER_ENTRY, MANIFEST_ENTRY, *([POOL_ENTRY, POOL_CHECKSUMS_ENTRY] if pooled else [])]
    widest |= dict.fromkeys(own, ("U8", [limit]))
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [limit, limit]}
        for name, (dtype, shape) in widest.items()
    }
    return _aligned(8 + len(_json({"__metadata__": _metadata("0" * 16), **entries})))


class Container:
    """A container file open for reading: the original's header, the records, and streams by range.

    `file` is its path, or the open safetensors file, which the container closes. One that needs the base of a
    delta is refused, unless `delta` says that it may be one.
    """

    def __init__(self, file: str | os.PathLike[str] | TensorFile, *, delta: bool = False) -> None:
        self._file = file if isinstance(file, TensorFile) else TensorFile(file)
        self._delta = delta
        self.path = self._file.path
        try:
            self.manifest = self._read_manifest()
            self.original = self._read_original()
            self._pool = self._read_pool() if self.manifest.has_pool else {}
            self._check_entries()
        except BaseException:
            self._file.close()
            raise

    def _read_manifest(self) -> Manifest:
        metadata = self._file.header.metadata
        if "neuzip" not in metadata:
            raise FormatError(
                self.path, "not a neuzip container", hint="compress it first: neuzip compress SRC DST"
            )
        if metadata["neuzip"] != str(VERSION):
            raise FormatError(
                self.path, f"format version {metadata['neuzip']!r}; this neuzip reads version {VERSION}",
                field="neuzip", hint="update neuzip to read it",
            )  # fmt: skip
        text = self._entry_bytes(MANIFEST_ENTRY)
        if checksum(text) != metadata.get("neuzip_manifest"):
            raise FormatError(self.path, "does not have the checksum in the metadata", field=MANIFEST_ENTRY)
        return parse_manifest(text, self.path, delta=self._delta)

    def _read_original(self) -> Header:
        raw = self._entry_bytes(HEADER_ENTRY)
        if checksum(raw) != self.manifest.header:
            raise FormatError(self.path, "does not have the checksum in the manifest", field=HEADER_ENTRY)
        if len(raw) < 8 or int.from_bytes(raw[:8], "little") != len(raw) - 8:
            raise FormatError(self.path, "the original's header has the wrong length", field=HEADER_ENTRY)
        return parse_header(raw, self.path)

    def _read_pool(self) -> dict[str, int]:
        """Where in the pool each tensor without a record begins; records that they have from now on."""
        records = self.manifest.tensors
        pooled = [t for t in self.original.in_file_order if t.name not in records]
        if not pooled:
            raise FormatError(self.path, "requires 'pool', and every tensor has a record", field="requires")
        total, sums = sum(t.nbytes for t in pooled), self._entry_bytes(POOL_CHECKSUMS_ENTRY)
        pool = self._file.header.tensors.get(POOL_ENTRY)
        if pool is None or pool.dtype != "U8" or pool.shape != (total,):
            raise FormatError(self.path, f"is missing, or not {total} bytes of U8", field=POOL_ENTRY)
        if len(sums) != 8 * len(pooled):
            raise FormatError(
                self.path, f"{len(sums)} bytes are not 8 for each of {len(pooled)} tensors",
                field=POOL_CHECKSUMS_ENTRY,
            )  # fmt: skip
        values = np.frombuffer(sums, "<u8").tolist()
        in_pool = {t.name: RawRecord(f"{value:016x}") for t, value in zip(pooled, values, strict=True)}
        merged = {**records, **in_pool}
        in_order = {name: merged[name] for name in self.original.tensors}
        self.manifest = replace(self.manifest, tensors=in_order | merged)
        ends = accumulate(t.nbytes for t in pooled)
        return {t.name: end - t.nbytes for t, end in zip(pooled, ends, strict=True)}

    def _entry_bytes(self, name: str) -> bytes:
        info = self._file.header.tensors.get(name)
        if info is None or info.dtype != "U8" or len(info.shape) != 1:
            raise FormatError(self.path, "is missing, or no array of U8", field=name)
        if info.nbytes > 8 + MAX_HEADER:
            raise FormatError(self.path, f"{info.nbytes} bytes are too many", field=name)
        return self._file.read(info).tobytes()

    def _check_entries(self) -> None:
        """Every tensor has a record, every record its entries, and there are no others."""
        if set(self.manifest.tensors) != set(self.original.tensors):
            raise FormatError(self.path, "the manifest and the original's header list different tensors")
        expected = {HEADER_ENTRY, MANIFEST_ENTRY}
        if self.manifest.has_pool:
            expected |= {POOL_ENTRY, POOL_CHECKSUMS_ENTRY}

        def expect(entry: str, tensor: str) -> None:
            if entry in expected:
                raise FormatError(self.path, "belongs to something else already", tensor=tensor, field=entry)
            expected.add(entry)

        for name, record in self.manifest.tensors.items():
            info = self.original.tensors[name]
            if name in self._pool:
                continue
            if record.holder is not None:
                self._check_holder(info, *record.holder)
            if record.stream_dtypes:
                self._check_coded(info, record, expect)
            elif record.entries(name):
                expect(name, name)
                self._check_raw(info)
        for extra in sorted(set(self._file.header.tensors) - expected):
            raise FormatError(self.path, "belongs to no tensor of the manifest", field=extra)

    def _check_entry(self, entry: str, tensor: str, dtype: str, shape: tuple[int, ...] | None) -> None:
        info = self._file.header.tensors.get(entry)
        if info is None:
            raise FormatError(self.path, "is missing", tensor=tensor, field=entry)
        if info.dtype != dtype or (len(info.shape) != 1 if shape is None else info.shape != shape):
            raise FormatError(
                self.path, f"has dtype {info.dtype} and shape {list(info.shape)}", tensor=tensor, field=entry
            )
        if shape is None and info.nbytes % ALIGNMENT:
            raise FormatError(
                self.path, f"{info.nbytes} bytes are no multiple of {ALIGNMENT}", tensor=tensor, field=entry
            )

    def _check_holder(self, info: TensorInfo, file: str | None, name: str) -> None:
        """An alias of this file has a holder of its kind. Holders elsewhere are checked on reading."""
        if file is None:
            target = self.original.tensors.get(name)
            if target is None or not target.same_kind(info):
                raise FormatError(self.path, "no tensor of this kind", tensor=info.name, field="of")
            if self.manifest.tensors[target.name].holder is not None:
                raise FormatError(self.path, "an alias of an alias", tensor=info.name, field="of")

    def _check_coded(self, info: TensorInfo, record: Record, expect: Callable[[str, str], None]) -> None:
        """A tensor with streams has those of its record, each of its dtype; `expect` notes whose they are."""
        if info.numel == 0 or info.dtype not in DTYPE_BITS:
            problem = "no weights" if info.numel == 0 else f"the unknown dtype {info.dtype!r}"
            raise FormatError(
                self.path, f"{problem}, so it cannot be {record.scheme}", tensor=info.name, field="scheme"
            )
        expected = record.stream_dtypes
        if record.streams.keys() != expected.keys():
            raise FormatError(
                self.path, f"has not exactly {list(expected)}", tensor=info.name, field="streams"
            )
        for stream, dtype in expected.items():
            entry = stream_name(info.name, stream)
            expect(entry, info.name)
            self._check_entry(entry, info.name, dtype, None)

    def _check_raw(self, info: TensorInfo) -> None:
        """A tensor that is stored as it is has the kind and the bytes of the original."""
        self._check_entry(info.name, info.name, info.dtype, info.shape)
        if self._file.header.tensors[info.name].nbytes != info.nbytes:
            raise FormatError(self.path, f"has not the {info.nbytes} bytes of the original", tensor=info.name)

    def stored_bytes(self, name: str) -> int:
        """Bytes that a tensor takes in the file, its names and records not counted."""
        record = self.manifest.tensors[name]
        if name in self._pool:
            return self.original.tensors[name].nbytes
        return sum(self._file.header.tensors[entry].nbytes for entry in record.entries(name))

    def stream_bytes(self, name: str, stream: str) -> int:
        """Length of a stream in bytes."""
        return self._file.header.tensors[stream_name(name, stream)].nbytes

    @property
    def file(self) -> TensorFile:
        """The safetensors file that the container is."""
        return self._file

    def read_stream(
        self, name: str, stream: str, start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.uint8]:
        """Bytes `start` to `stop` of a stream (all of it by default)."""
        return self._file.read(self._file.header.tensors[stream_name(name, stream)], start, stop)

    def read_raw(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes `start` to `stop` of a raw tensor."""
        if name not in self._pool:
            return self._file.read(self._file.header.tensors[name], start, stop)
        begin, stop = self._pool[name], self.original.tensors[name].nbytes if stop is None else stop
        return self._file.read(self._file.header.tensors[POOL_ENTRY], begin + start, begin + stop)

    def raw_start(self, name: str) -> int:
        """The first byte of a raw tensor in the data of the file."""
        entries = self._file.header.tensors
        return entries[POOL_ENTRY].start + self._pool[name] if name in self._pool else entries[name].start

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_container(file: TensorFile) -> bool:
    """Whether a safetensors file calls itself a neuzip container."""
    return is_container_metadata(file.header.metadata)


def is_container_metadata(metadata: Mapping[str, str]) -> bool:
    """Whether the metadata of a safetensors header are those of a neuzip container."""
    return "neuzip" in metadata


def _metadata(manifest_checksum: str) -> dict[str, str]:
    return {"format": "neuzip", "neuzip": str(VERSION), "neuzip_manifest": manifest_checksum}


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
