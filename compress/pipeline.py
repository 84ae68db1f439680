"""From checkpoint to compressed checkpoint and back, file by file, never more than a tensor in memory.

A run works in `DST.neuzip-partial`, a folder beside its destination, and renames it when everything is there
and checked. Files in it with their final names are complete, so a killed run resumes with the next one. What
was finished is compared with the source again before it is believed.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from neuzip.errors import FormatError, NeuzipError, VerificationError, WouldOverwrite
from neuzip.formats.checkpoint import (
    MANIFEST_PATH,
    ORIGINAL_FOLDER,
    OWN_FOLDER,
    PICKLES,
    Checkpoint,
    StoredFile,
    config_files,
    file_checksum,
    index_files,
    read_stored_files,
    rewritten_config,
    rewritten_index,
    stored_files_to_json,
)
from neuzip.formats.container import Container, ContainerWriter, Stream
from neuzip.formats.manifest import VERSION, Loss, TensorRecord
from neuzip.formats.tensor_file import DTYPE_BITS, TensorFile
from neuzip.kernels.float_fields import FORMATS, Bits

from . import lossless, truncated
from .lossless import PIECE, Map, Read
from .plan import Plan, PlannedTensor, coded_streams, make_plan
from .scheme import LOSSLESS, Rule
from .source import SourceTensor, TensorSource, digest
from .verify import OnBytes, check_tensors, ignore, verify_files
from .workers import Workers, ahead

PLAN_PATH = f"{OWN_FOLDER}/plan.json"
SMALL = 4 * PIECE
"""Weights up to which a tensor is one job; larger ones are split among the workers."""

DEFAULT_RULES = (Rule("*", LOSSLESS),)


@dataclass(frozen=True)
class TensorReport:
    """A tensor before and after. `scheme` is what became of it, `note` why, where that may surprise."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    scheme: str
    original_bytes: int
    stored_bytes: int
    loss: Loss | None = None
    note: str = ""


@dataclass(frozen=True)
class CompressionReport:
    """What a run did. Byte counts are of whole checkpoints, all files included; `seconds` is wall time."""

    src: Path
    dst: Path
    original_bytes: int
    stored_bytes: int
    weight_bytes: int
    stored_weight_bytes: int
    weights: int
    tensors: tuple[TensorReport, ...]
    seconds: float
    resumed_files: int = 0
    warnings: tuple[str, ...] = field(default=())

    @property
    def ratio(self) -> float:
        """Size of the weight files after, as a share of before."""
        return self.stored_weight_bytes / self.weight_bytes if self.weight_bytes else 1.0

    @property
    def bits_per_weight(self) -> float:
        """Bits of the stored weight files a weight."""
        return 8 * self.stored_weight_bytes / self.weights if self.weights else 0.0


def compress(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    rules: Sequence[Rule] = DEFAULT_RULES,
    *,
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
    on_bytes: OnBytes = ignore,
) -> CompressionReport:
    """Compress a checkpoint: a folder, or a single .safetensors file.

    With `verify` every file is read back, decoded and compared before it gets its final name. `on_bytes` is
    told of weights done, as bytes of the original. Raises NeuzipError.
    """
    began = time.monotonic()
    dst = Path(dst)
    with TensorSource(src) as source, Workers(jobs) as workers:
        require_plain(source, dst)
        checkpoint = source.checkpoint
        plan = make_plan(source, rules, workers)
        job = _Compression(source, plan, workers, verify, on_bytes)
        if checkpoint.is_file:
            _refuse_folder(dst)
            _refuse_existing(dst, overwrite)
            with writing(dst):
                dst.parent.mkdir(parents=True, exist_ok=True)
                temporary = _partial(dst)
                job.container(checkpoint.weights[0], temporary)
                os.replace(temporary, dst)
                _sync_folder(dst.parent)
        else:
            job.folder(dst, overwrite)
        return job.report(dst, time.monotonic() - began)


def require_plain(source: TensorSource, dst: Path) -> None:
    """Raise NeuzipError unless `source` is a checkpoint that can be compressed to `dst`."""
    path = source.checkpoint.path
    if source.is_compressed:
        raise NeuzipError(f"{path}: is compressed already", "to restore it: neuzip decompress SRC DST")
    _refuse_nesting(path, dst)
    _require_name(dst)
    if any(f.split("/")[0] == OWN_FOLDER for f in (*source.checkpoint.weights, *source.checkpoint.others)):
        raise NeuzipError(f"{path}: has something called {OWN_FOLDER!r} of its own", "rename it first")


class _Compression:
    """One run of `compress`."""

    def __init__(
        self, source: TensorSource, plan: Plan, workers: Workers, verify: bool, on_bytes: OnBytes
    ) -> None:
        self._source = source
        self._plan = plan
        self._workers = workers
        self._verify = verify
        self._on_bytes = on_bytes
        self._notes: dict[tuple[str, str], str] = {}
        self._records: dict[tuple[str, str], TensorRecord] = {}
        self._resumed = 0

    def folder(self, dst: Path, overwrite: bool) -> None:
        """Compress a folder: weights, then everything else, then the name."""
        recover(dst)
        if dst.exists() and not overwrite and self._is_done(dst):
            self._resumed = len(self._source.checkpoint.weights)
            return
        _refuse_existing(dst, overwrite)
        with workspace(dst) as work:
            self._claim(work, overwrite)
            for file in self._source.checkpoint.weights:
                target = work / file
                if target.exists():
                    if self._is_finished(file, work):
                        self._resumed += 1
                        continue
                    if not overwrite:
                        raise NeuzipError(
                            f"{target}: was made from another {self._source.checkpoint.root / file}",
                            "the source has changed; give --overwrite to begin anew",
                        )
                with writing(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    temporary = _partial(target)
                    self.container(file, temporary)
                    os.replace(temporary, target)
            with writing(work):
                self._other_files(work)
            publish(work, dst)

    def _plan_json(self) -> bytes:
        checkpoint = self._source.checkpoint
        document = {
            "version": VERSION,
            "rules": [rule.to_json() for rule in self._plan.rules],
            "source": {
                f: (checkpoint.root / f).stat().st_size for f in (*checkpoint.weights, *checkpoint.others)
            },
        }
        return (json.dumps(document, indent=2) + "\n").encode()

    def _is_ours(self, folder: Path) -> bool:
        """Whether a folder was made by the same command from a source with the same files."""
        path = folder / PLAN_PATH
        return path.is_file() and path.read_bytes() == self._plan_json()

    def _claim(self, work: Path, overwrite: bool) -> None:
        """Begin a run in `work`, or go on with the one that was begun there."""
        path = work / PLAN_PATH
        if path.exists() and not self._is_ours(work):
            if not overwrite:
                raise NeuzipError(
                    f"{work}: was begun with other options or from another source",
                    "repeat the command that began it, or give --overwrite to begin anew",
                )
            for entry in work.iterdir():
                _remove(entry)
        if not path.exists():
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, self._plan_json())

    def _is_done(self, dst: Path) -> bool:
        """Whether `dst` is what this run would make: a run killed in its last moment, or repeated."""
        checkpoint = self._source.checkpoint
        if not self._is_ours(dst) or not all(self._is_finished(file, dst) for file in checkpoint.weights):
            return False
        stored = read_stored_files(dst)
        return all(stored[f].checksum == file_checksum(checkpoint.root / f) for f in checkpoint.others)

    def _is_finished(self, file: str, folder: Path) -> bool:
        """Whether a finished container holds what the source still holds."""
        source = self._source
        with Container(folder / file) as container:
            if container.original.raw != source.header(file).raw:
                return False
            for tensor in source.tensors(file):
                record = container.manifest.tensors[tensor.name]
                if digest(source.reader(tensor), tensor.info.nbytes) != (record.original or record.checksum):
                    return False
                self._records[file, tensor.name] = record
                self._on_bytes(tensor.info.nbytes)
        return True

    def container(self, file: str, path: Path) -> None:
        """Write the container of one weight file to `path`, and check it."""
        planned = self._plan.of_file(file)
        writer = ContainerWriter(path, self._source.header(file), coded_streams(planned))
        try:
            raw: list[tuple[PlannedTensor, TensorRecord]] = []
            for t, (record, streams) in ahead(self._encoded([t for t in planned if t.alias_of is None])):
                self._records[file, t.tensor.name] = record
                if streams:
                    writer.add(t.tensor.name, record, streams)
                else:
                    raw.append((t, record))
                self._on_bytes(t.tensor.info.nbytes)
            for t in planned:
                if t.alias_of is not None:
                    record = self._records[file, t.tensor.name] = self._alias(t.tensor, t.alias_of)
                    writer.add_alias(t.tensor.name, record)
                    self._on_bytes(t.tensor.info.nbytes)
            # The widest first, so that every raw tensor is aligned to its own elements.
            for t, record in sorted(raw, key=lambda r: -DTYPE_BITS.get(r[0].tensor.info.dtype, 0)):
                writer.begin_raw(t.tensor.name, record)
                read = self._source.reader(t.tensor)
                for piece in t.tensor.pieces():
                    writer.write(read(*piece))
            writer.close()
            if self._verify:
                self._check_written(file, path)
        except BaseException:
            writer.abandon()
            raise

    def _check_written(self, file: str, path: Path) -> None:
        """Read a container back, and compare every tensor with the source."""
        originals = {t.name: t for t in self._source.tensors(file)}
        with TensorSource(Checkpoint(path, path.parent, (path.name,), ())) as written:
            # Tensors that live in another file were compared byte by byte when the plan was made.
            here = [t for t in written.tensors() if t.record is not None and t.record.alias_file is None]
            for verdict in check_tensors(
                written, here, self._workers, original=lambda t: self._source.reader(originals[t.name])
            ):
                if not verdict.identical and verdict.scheme != "truncated":
                    raise VerificationError(
                        f"{path}: tensor {verdict.name!r} does not decode to the original",
                        "this is a bug in neuzip, or faulty memory; please report it",
                    )

    def _alias(self, tensor: SourceTensor, target: SourceTensor) -> TensorRecord:
        folder = target.file[: target.file.rfind("/") + 1]
        other = None if target.file == tensor.file else target.file[len(folder) :]
        of = self._records[target.file, target.name]
        return TensorRecord(
            "alias", of.checksum, original=of.original, alias_of=target.name, alias_file=other
        )

    def _encoded(
        self, planned: list[PlannedTensor]
    ) -> Iterator[tuple[PlannedTensor, tuple[TensorRecord, dict[str, Stream]]]]:
        """Records and streams in order: small tensors side by side, a large one split among the workers."""
        for large, group in itertools.groupby(planned, key=lambda t: t.tensor.info.numel > SMALL):
            if large:
                for t in group:
                    yield t, self._encode(t, self._workers.map)
            else:
                yield from self._workers.map(lambda t: (t, self._encode(t, map)), group)

    def _encode(self, planned: PlannedTensor, parallel: Map) -> tuple[TensorRecord, dict[str, Stream]]:
        """The record and streams of one tensor; no streams for one that is stored raw."""
        tensor, scheme = planned.tensor, planned.scheme
        reader, nbytes = self._source.reader(tensor), tensor.info.nbytes
        if scheme.kind == "raw":
            return TensorRecord("raw", digest(reader, nbytes)), {}
        if tensor.info.numel <= SMALL:
            data = reader(0, nbytes)
            reader = lambda start, stop: data[start:stop]  # noqa: E731
        fmt, numel = FORMATS[tensor.info.dtype], tensor.info.numel
        size = fmt.bits // 8

        def read(start: int, stop: int) -> Bits:
            return reader(start * size, stop * size).view(fmt.dtype)

        try:
            if scheme.mantissa_bits is not None:
                rounding = truncated.Rounding(fmt, scheme.mantissa_bits, scheme.block_size)
                rounded = self._encode_rounded(tensor, read, rounding, parallel)
                if rounded is not None:
                    return rounded
            whole = xxhash.xxh3_64()
            kept, streams = lossless.encode(read, numel, fmt, parallel, lambda bits: whole.update(bits.data))
        except lossless.NotWorthwhile:
            return TensorRecord("raw", digest(reader, nbytes)), {}
        return TensorRecord("lossless", whole.hexdigest(), kept, streams=checksums(streams)), streams

    def _encode_rounded(
        self, tensor: SourceTensor, read: Read, rounding: truncated.Rounding, parallel: Map
    ) -> tuple[TensorRecord, dict[str, Stream]] | None:
        """The same for a rounded tensor; None for one that stays as it is."""
        whole = xxhash.xxh3_64()
        try:
            kept, streams, loss, restored = truncated.encode(
                read, tensor.info.numel, rounding, parallel, lambda bits: whole.update(bits.data)
            )
        except truncated.NonFinite:
            self._notes[tensor.file, tensor.name] = "holds infinities or NaNs: kept lossless"
            return None
        original = whole.hexdigest()
        if restored == original:
            return None
        return TensorRecord(
            "truncated", restored, kept, rounding.block_size, original, loss, checksums(streams)
        ), streams

    def _other_files(self, work: Path) -> None:
        """Carry the files that are not weights, rewrite those that name weights, and list them all."""
        checkpoint = self._source.checkpoint
        records: dict[str, dict[str, TensorRecord]] = {file: {} for file in checkpoint.weights}
        for (file, name), record in self._records.items():
            records[file][name] = record
        lossless_only = all(r.lossless for r in self._records.values())
        rewritten = {f: rewritten_index(checkpoint, f, records) for f in index_files(checkpoint)}
        rewritten |= {f: rewritten_config(checkpoint, f, lossless_only) for f in config_files(checkpoint)}
        stored = {file: StoredFile("container") for file in checkpoint.weights}
        for file in checkpoint.others:
            original = checkpoint.root / file
            copy = work / (f"{ORIGINAL_FOLDER}/{file}" if file in rewritten else file)
            copy_file(original, copy)
            kind = "rewritten" if file in rewritten else "carried"
            stored[file] = StoredFile(kind, copy.stat().st_size, file_checksum(copy))
            if file in rewritten:
                write_file(work / file, rewritten[file])
        write_file(work / MANIFEST_PATH, stored_files_to_json(stored))
        originals = {f"{ORIGINAL_FOLDER}/{file}" for file in rewritten}
        _refuse_strangers(work, {*stored, *originals, PLAN_PATH, MANIFEST_PATH})

    def report(self, dst: Path, seconds: float) -> CompressionReport:
        """Read what was written, and sum it up."""
        source, checkpoint = self._source, self._source.checkpoint
        tensors = []
        for file in checkpoint.weights:
            with Container(dst if checkpoint.is_file else dst / file) as container:
                for t in self._plan.of_file(file):
                    record = container.manifest.tensors[t.tensor.name]
                    note = self._notes.get((file, t.tensor.name), t.note)
                    if record.scheme == "raw" and t.scheme.kind != "raw":
                        note = "does not shrink"
                    info = t.tensor.info
                    tensors.append(
                        TensorReport(
                            file,
                            info.name,
                            info.dtype,
                            info.shape,
                            describe(record, info.dtype),
                            info.nbytes,
                            container.stored_bytes(info.name),
                            record.loss,
                            note,
                        )
                    )
        weight_paths = [dst] if checkpoint.is_file else [dst / file for file in checkpoint.weights]
        stored_weights = sum(p.stat().st_size for p in weight_paths)
        others = (
            [] if checkpoint.is_file else [p for p in dst.rglob("*") if p.is_file() and p not in weight_paths]
        )
        return CompressionReport(
            checkpoint.path, dst, self._plan.original_bytes,
            stored_weights + sum(p.stat().st_size for p in others),
            sum(p.stat().st_size for p in checkpoint.weight_paths()), stored_weights,
            sum(t.info.numel for t in source.tensors()), tuple(tensors), seconds, self._resumed,
            tuple(f"{f}: a pickle, carried along unopened" for f in checkpoint.others if f.endswith(PICKLES)),
        )  # fmt: skip


def checksums(streams: dict[str, Stream]) -> dict[str, str]:
    """The checksum of every stream."""
    return {name: stream.checksum for name, stream in streams.items()}


def describe(record: TensorRecord, dtype: str) -> str:
    """A record's scheme in a few words.

    >>> describe(TensorRecord("lossless", "0" * 16, 7), "F32")
    'lossless, 7 of 23 mantissa bits'
    """
    if record.scheme == "alias":
        return f"same as {record.alias_of}"
    if record.scheme == "truncated":
        return f"k={record.mantissa_bits}" + (f" block={record.block_size}" if record.block_size else "")
    fmt = FORMATS.get(dtype)
    if record.scheme == "lossless" and fmt is not None and record.mantissa_bits < fmt.mantissa_bits:
        return f"lossless, {record.mantissa_bits} of {fmt.mantissa_bits} mantissa bits"
    return record.scheme


@dataclass(frozen=True)
class DecompressionReport:
    """What `decompress` wrote. `lossless` says whether it is the original byte by byte."""

    src: Path
    dst: Path
    stored_bytes: int
    restored_bytes: int
    files: int
    lossless: bool
    seconds: float


def decompress(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    on_bytes: OnBytes = ignore,
) -> DecompressionReport:
    """Restore a compressed checkpoint: for a lossless one every file, byte by byte.

    Every tensor is compared with its checksum before its file gets its final name. Raises NeuzipError.
    """
    began = time.monotonic()
    dst = Path(dst)
    with TensorSource(src) as source, Workers(jobs) as workers:
        checkpoint = source.checkpoint
        if not source.is_compressed:
            raise NeuzipError(f"{src}: is not compressed", "there is nothing to restore")
        _refuse_nesting(checkpoint.path, dst)
        _require_name(dst)
        _require_space(dst, sum(t.info.nbytes for t in source.tensors()))
        if checkpoint.is_file:
            _refuse_folder(dst)
            _refuse_existing(dst, overwrite)
            with writing(dst):
                dst.parent.mkdir(parents=True, exist_ok=True)
                _restore(source, checkpoint.weights[0], dst, workers, on_bytes)
                _sync_folder(dst.parent)
            files = 1
        else:
            files = _restore_folder(source, dst, overwrite, workers, on_bytes)
        records = [t.record for t in source.tensors()]
        stored = sum(p.stat().st_size for p in _files(checkpoint.path))
        restored = sum(p.stat().st_size for p in _files(dst))
        lossless_only = all(r is None or r.lossless for r in records)
        seconds = time.monotonic() - began
        return DecompressionReport(checkpoint.path, dst, stored, restored, files, lossless_only, seconds)


def _restore_folder(
    source: TensorSource, dst: Path, overwrite: bool, workers: Workers, on_bytes: OnBytes
) -> int:
    checkpoint = source.checkpoint
    if not checkpoint.is_compressed_folder:
        raise NeuzipError(
            f"{checkpoint.root}: has containers but no {MANIFEST_PATH}",
            "restore its files one by one: neuzip decompress FILE.safetensors DST",
        )
    verify_files(source)
    stored = read_stored_files(checkpoint.root)
    recover(dst)
    if dst.exists() and not overwrite and _is_restored(source, stored, dst):
        return len(stored)
    _refuse_existing(dst, overwrite)
    with workspace(dst) as work:
        for name, file in stored.items():
            target = work / name
            with writing(target):
                if file.kind == "container":
                    if target.exists() and _is_restored_file(source, name, target):
                        continue
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _restore(source, name, target, workers, on_bytes)
                else:
                    folder = f"{ORIGINAL_FOLDER}/" if file.kind == "rewritten" else ""
                    copy_file(checkpoint.root / (folder + name), target)
        _refuse_strangers(work, set(stored))
        publish(work, dst)
    return len(stored)


def _restore(source: TensorSource, file: str, target: Path, workers: Workers, on_bytes: OnBytes) -> None:
    """Write one original weight file: its header as it was, and every tensor decoded and checked."""
    temporary = _partial(target)
    try:
        with open(temporary, "wb") as out:
            out.write(source.header(file).raw)

            def write(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
                out.write(data.data)
                on_bytes(data.size)

            for _ in check_tensors(source, list(source.tensors(file)), workers, on_data=write):
                pass
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _is_restored(source: TensorSource, stored: dict[str, StoredFile], folder: Path) -> bool:
    """Whether a folder holds all that `source` restores to, and nothing else."""
    if {p.relative_to(folder).as_posix() for p in _files(folder)} != set(stored):
        return False
    return all(
        _is_restored_file(source, name, folder / name)
        if file.kind == "container"
        else file_checksum(folder / name) == file.checksum
        for name, file in stored.items()
    )


def _is_restored_file(source: TensorSource, name: str, path: Path) -> bool:
    """Whether a weight file holds what its container says."""
    try:
        with TensorFile(path) as file:
            return file.header.raw == source.header(name).raw and all(
                t.record is not None
                and digest(lambda a, b, i=t.info: file.read(i, a, b), t.info.nbytes) == t.record.checksum  # type: ignore[misc]
                for t in source.tensors(name)
            )
    except FormatError:
        return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a failed write into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NeuzipError(
                f"{path}: no space left on the disk",
                "free some space and repeat the command: it goes on where it stopped",
            ) from error
        raise NeuzipError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
        ) from error


@contextmanager
def workspace(dst: Path) -> Iterator[Path]:
    """The folder in which `dst` is prepared, locked against other runs. It stays when the run fails."""
    work = _partial(dst)
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise NeuzipError(
            f"{work}: another run is writing there", "wait for it, or choose another DST"
        ) from error
    try:
        yield work
    finally:
        os.close(lock)


def publish(work: Path, dst: Path) -> None:
    """Give a complete folder its final name, in place of an older one if there is one."""
    with writing(dst):
        for folder in (work, *(p for p in work.rglob("*") if p.is_dir())):
            _sync_folder(folder)
        old = _old(dst)
        if os.path.lexists(dst):
            os.replace(dst, old)
        os.replace(work, dst)
        _sync_folder(dst.parent)
        if os.path.lexists(old):
            _remove(old)


def recover(dst: Path) -> None:
    """Undo a `publish` that was killed half-way: the older folder gets its name back."""
    old = _old(dst)
    if os.path.lexists(old):
        with writing(dst):
            if os.path.lexists(dst):
                _remove(old)
            else:
                os.replace(old, dst)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file under its final name in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _partial(path)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content under its final name in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _partial(target)
    shutil.copyfile(source, temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)


def _remove(path: Path) -> None:
    """Delete a file, a folder, or a link but not what it leads to."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _require_name(dst: Path) -> None:
    """Raise NeuzipError for a DST that nothing new can be called."""
    if dst.name in ("", ".."):
        raise NeuzipError(f"{dst}: has no name of its own", "end DST with the name of what is to be made")
    try:
        os.lstat(_partial(dst))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise NeuzipError(f"{dst}: cannot be written: {error}", "choose another DST") from error


def _refuse_folder(dst: Path) -> None:
    if dst.is_dir():
        raise NeuzipError(f"{dst}: is a folder", "end DST with the name of the file that is to be made")


def _refuse_strangers(work: Path, expected: set[str]) -> None:
    """Raise NeuzipError unless a finished workspace holds exactly the files that it should."""
    found = {p.relative_to(work).as_posix() for p in _files(work)}
    for name in sorted(found ^ expected):
        problem = (
            "is left from something else"
            if name in found
            else "was lost: are there names that differ in case?"
        )
        raise NeuzipError(f"{work / name}: {problem}", f"remove {work} and repeat the command")


def _refuse_existing(dst: Path, overwrite: bool) -> None:
    empty = dst.is_dir() and not dst.is_symlink() and not any(dst.iterdir())
    if os.path.lexists(dst) and not overwrite and not empty:
        raise WouldOverwrite(f"{dst}: exists already", "choose another DST, or give --overwrite")


def _refuse_nesting(src: Path, dst: Path) -> None:
    """Neither may contain the other: a run must not read what it writes, nor replace its source."""
    try:
        a, b = src.resolve(), dst.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no name that a file can have
        raise NeuzipError(f"{dst}: cannot be written: {error}", "choose another DST") from error
    if a == b or a in b.parents or b in a.parents:
        raise NeuzipError(f"{dst}: is, holds, or lies within {src}", "choose a DST beside it")


def _require_space(dst: Path, nbytes: int) -> None:
    """Refuse to restore more than the disk can take: aliases let a small file stand for a very large one."""
    folder = next(p for p in (dst, *dst.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise NeuzipError(
            f"{dst}: the restored weights take {nbytes:,} bytes, the disk has {free:,} left",
            "free some space, or choose a DST on another disk",
        )


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".neuzip-partial")


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".neuzip-old")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
