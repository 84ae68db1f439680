"""From checkpoint to compressed checkpoint, file by file, never more than a tensor in memory.

A killed run resumes with the first file that is not finished. What was finished is decoded and compared with
the source again before it is believed.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from neuzip.errors import FormatError, NeuzipError, VerificationError
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
from neuzip.formats.tensor_file import DTYPE_BITS
from neuzip.kernels.float_fields import FORMATS, Bits

from . import lossless, truncated
from .lossless import PIECE, Map, Read
from .plan import Plan, PlannedTensor, coded_streams, make_plan
from .scheme import LOSSLESS, Rule
from .source import SourceTensor, TensorSource, digest
from .verify import OnBytes, check_tensors, ignore
from .workers import Workers, ahead
from .workspace import (
    copy_file,
    partial_name,
    publish,
    recover,
    refuse_existing,
    refuse_folder,
    refuse_nesting,
    refuse_strangers,
    remove,
    require_name,
    sync_folder,
    workspace,
    write_file,
    writing,
)

PLAN_PATH = f"{OWN_FOLDER}/plan.json"
SMALL = PIECE
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
            refuse_folder(dst)
            refuse_existing(dst, overwrite)
            with writing(dst):
                dst.parent.mkdir(parents=True, exist_ok=True)
                temporary = partial_name(dst)
                job.container(checkpoint.weights[0], temporary)
                os.replace(temporary, dst)
                sync_folder(dst.parent)
        else:
            job.folder(dst, overwrite)
        return job.report(dst, time.monotonic() - began)


def require_plain(source: TensorSource, dst: Path) -> None:
    """Raise NeuzipError unless `source` is a checkpoint that can be compressed to `dst`."""
    path = source.checkpoint.path
    if source.is_compressed:
        raise NeuzipError(f"{path}: is compressed already", "to restore it: neuzip decompress SRC DST")
    refuse_nesting(path, dst)
    require_name(dst)
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
        refuse_existing(dst, overwrite)
        with workspace(dst) as work:
            self._claim(work, overwrite)
            for file in self._source.checkpoint.weights:
                target = work / file
                if target.exists():
                    if self._is_finished(file, work):
                        self._resumed += 1
                        continue
                    if not overwrite:
                        original = self._source.checkpoint.root / file
                        raise NeuzipError(
                            f"{target}: is damaged, or was made from another {original}",
                            "if the source has changed, give --overwrite to begin anew",
                        )
                with writing(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    temporary = partial_name(target)
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
                remove(entry)
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
        """Whether a container is intact, and holds what the source still holds."""
        source = self._source
        try:
            with Container(folder / file) as container:
                if container.original.raw != source.header(file).raw:
                    return False
                records = container.manifest.tensors
            for tensor in source.tensors(file):
                record = self._records[file, tensor.name] = records[tensor.name]
                if digest(source.reader(tensor), tensor.info.nbytes) != (record.original or record.checksum):
                    return False
                self._on_bytes(tensor.info.nbytes)
            self._check_written(file, folder / file)
        except (FormatError, VerificationError):
            return False
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
        refuse_strangers(work, {*stored, *originals, PLAN_PATH, MANIFEST_PATH})

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
