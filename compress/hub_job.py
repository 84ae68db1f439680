"""From the Hub to a compressed checkpoint, and perhaps back to the Hub, on a disk that holds neither whole.

A weight file is downloaded while the one before it is compressed, and deleted as soon as its container is
verified: at most two of the source are there at a time. The result is byte by byte what `compress` makes of
the downloaded folder. Schemes follow from the headers, which can be had without the files, and a tensor is
stored as equal only to one of the same or an earlier file. What is left of an earlier one is its digest;
where it is the same, the bytes are asked for once more and compared.

With a draft (formats/hub/draft.py) every container is uploaded, and a husk takes its place: a file of its
size with a hole where the streams were. Index, report and card need no more than its header and records.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from neuzip.errors import FormatError, NeuzipError, VerificationError
from neuzip.formats.checkpoint import (
    ORIGINAL_FOLDER,
    OWN_FOLDER,
    Checkpoint,
    find_checkpoint,
    read_stored_files,
    with_indices,
)
from neuzip.formats.container import HEADER_ENTRY, Container, is_container_metadata
from neuzip.formats.hub.connection import Note, bars
from neuzip.formats.hub.draft import Draft
from neuzip.formats.hub.private_files import private_files, refuse_private
from neuzip.formats.hub.pull import remove_unfinished
from neuzip.formats.hub.push import HubFile, Pushed, plan_push
from neuzip.formats.hub.push import ignore as pass_over
from neuzip.formats.hub.stream import RemoteCheckpoint, download, find_remote, read_headers, read_range
from neuzip.formats.safetensors_file import Header, TensorFile

from .device import CPU, Device
from .entry_checks import refuse_unless_made, require_plain
from .overwrite_guard import refuse_existing
from .pipeline import DEFAULT_RULES, Compression, compress
from .plan import ALIAS_MINIMUM, Plan, PlannedTensor, choose_schemes, refuse_destruction
from .ranks import ALONE
from .reports import CompressionReport
from .scheme import Rule
from .source import Bytes, SourceTensor, TensorSource, digest
from .verify import OnBytes, check_rewritten, check_tensors, ignore
from .workers import Workers
from .workspace import (
    files_in,
    partial_name,
    publish,
    recover,
    remove,
    sync_folder,
    workspace,
    write_file,
    writing,
)

STATE_PATH = f"{OWN_FOLDER}/stream.json"
"""What tells a later run where a workspace comes from, where it goes, and what has gone there already."""

SOURCE_FOLDER = f"{OWN_FOLDER}/source"
"""Where downloads lie in the workspace."""

COMPARED = 1 << 25
"""Bytes that are asked for at a time where tensors are compared."""


class StreamedSource(TensorSource):
    """A checkpoint of the Hub whose weight files come and go; their headers are known throughout.

    The other files have to be in `folder` before they are read. What is read of a weight file that is not
    there is asked for.
    """

    def __init__(self, remote: RemoteCheckpoint, folder: Path, headers: Mapping[str, Header]) -> None:
        super().__init__(replace(remote.at(folder), weights=()))
        self.checkpoint = remote.at(folder)
        self.remote = remote
        self._headers = headers

    @property
    def is_compressed(self) -> bool:
        """Whether any of its files is a container."""
        return any(is_container_metadata(h.metadata) for h in self._headers.values())

    def header(self, file: str) -> Header:
        """The header of a weight file."""
        return self._headers[file]

    def file_bytes(self, file: str) -> int:
        """Size of any file of the checkpoint."""
        return self.remote.files[file].nbytes

    def tensors(self, file: str | None = None) -> Iterator[SourceTensor]:
        """The tensors of one file, or of all, in the order of the files."""
        for name in [file] if file is not None else self.checkpoint.weights:
            for info in self._headers[name].in_file_order:
                yield SourceTensor(name, info)

    def reader(self, tensor: SourceTensor, *, check: bool = False) -> Callable[[int, int], Bytes]:
        """read(start, stop) for a tensor's bytes."""
        if tensor.file in self._files:
            return super().reader(tensor, check=check)
        begin = len(self._headers[tensor.file].raw) + tensor.info.start

        def read(start: int, stop: int) -> Bytes:
            return np.frombuffer(read_range(self.remote, tensor.file, begin + start, begin + stop), np.uint8)

        return read

    def arrive(self, file: str) -> None:
        """Read a weight file from its place from now on. Raises FormatError."""
        path = self.checkpoint.root / file
        opened = self._files[file] = TensorFile(path)
        if opened.header.raw != self._headers[file].raw:
            raise FormatError(path, "has another header than the Hub gave for it")

    def leave(self, file: str) -> None:
        """Delete a weight file."""
        self._files.pop(file).close()
        (self.checkpoint.root / file).unlink()


@dataclass(frozen=True)
class _State:
    """What a workspace is for: it goes on only with the same. `sent` are the files that the draft holds."""

    repo_id: str
    commit: str
    rules: list[dict[str, Any]]
    activations: str | None
    push_to: str | None
    sent: dict[str, HubFile] = field(default_factory=dict, compare=False)

    def save(self, work: Path) -> None:
        write_file(work / STATE_PATH, (json.dumps(asdict(self), indent=2) + "\n").encode())


def _load_state(folder: Path) -> _State | None:
    """The state in a workspace, or in a result that a killed run had just published."""
    path = folder / STATE_PATH
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        sent = {name: HubFile(**file) for name, file in document.pop("sent").items()}
        return _State(**document, sent=sent)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(path, "is not what this neuzip writes", hint=f"remove {folder}") from error


@dataclass(frozen=True)
class StreamPlan:
    """What a stream will do, as far as it can be known without the files."""

    remote: RemoteCheckpoint
    headers: dict[str, Header]
    source: StreamedSource
    tensors: tuple[PlannedTensor, ...]

    @property
    def original_bytes(self) -> int:
        """Size of all files of the source."""
        return sum(file.nbytes for file in self.remote.files.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.tensor.info.nbytes for t in self.tensors)

    @property
    def weight_file_bytes(self) -> int:
        """Size of the weight files of the source."""
        return sum(self.remote.files[file].nbytes for file in self.remote.weights)

    @property
    def most_of_source(self) -> int:
        """The most bytes of the source's weight files that are on the disk at a time."""
        sizes = [self.remote.files[file].nbytes for file in self.remote.weights]
        return max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))


@dataclass(frozen=True)
class StreamReport:
    """What a stream did: the commit it read, and what was pushed if anything."""

    compression: CompressionReport
    commit: str
    pushed: Pushed | None = None


def plan_stream(
    src: str, dst: str | os.PathLike[str], rules: Sequence[Rule] = DEFAULT_RULES, *, note: Note = pass_over
) -> StreamPlan:
    """Look at a checkpoint of the Hub and choose schemes, without downloading a weight file.

    Which tensors are equal is found out later. Raises NeuzipError.
    """
    dst = Path(dst)
    remote = find_remote(src, note)
    headers = read_headers(remote)
    source = StreamedSource(remote, partial_name(dst) / SOURCE_FOLDER, headers)
    require_plain(source, dst)
    return StreamPlan(remote, headers, source, tuple(choose_schemes(source, rules)))


def compress_stream(
    plan: StreamPlan,
    dst: str | os.PathLike[str],
    rules: Sequence[Rule] = DEFAULT_RULES,
    *,
    draft: Draft | None = None,
    private: bool = False,
    allow_private_files: bool = False,
    jobs: int | None = None,
    overwrite: bool = False,
    device: Device = CPU,
    on_bytes: OnBytes = ignore,
    allow_destructive: bool = False,
    activations: str | None = None,
    note: Note = pass_over,
) -> StreamReport:
    """Download, compress, verify and delete shard by shard; a killed run goes on where it stopped.

    With a `draft` the result goes to the Hub and nothing stays: `dst` only says where the work is done. It is
    made `private` if it is new there; files that look private are refused then, unless
    `allow_private_files`. `note` is told of each file. Raises NeuzipError.
    """
    dst, began, remote = Path(dst), time.monotonic(), plan.remote
    if draft is not None:
        refuse_private(private_files(plan.source.checkpoint), str(draft.target), allow_private_files)
        note(going(plan.source.checkpoint, draft))
    if activations is not None and "config.json" not in remote.others:
        raise NeuzipError(f"{remote.src}: has no config.json", "leave out `activations`")
    wanted = _State(
        remote.repo_id, remote.commit, json.loads(json.dumps([r.to_json() for r in rules])), activations,
        None if draft is None else str(draft.target),
    )  # fmt: skip
    recover(dst)
    source = plan.source
    with bars(False), source, Workers(jobs or device.jobs(ALONE.jobs)) as workers:

        def job(source: StreamedSource) -> _Stream:
            whole = Plan(tuple(rules), plan.tensors, plan.original_bytes, plan.weight_file_bytes)
            return _Stream(source, whole, workers, device, on_bytes, activations, allow_destructive, note)

        if draft is not None:
            begun = _load_state(partial_name(dst))
            draft.begin(private=private, overwrite=overwrite or (begun == wanted and bool(begun.sent)))
        elif dst.is_dir() and not overwrite:
            finished = job(StreamedSource(remote, dst, plan.headers))
            if finished.is_made(dst, ours=_load_state(dst) == wanted):
                return _finish(finished, dst, began)
        if draft is None:
            refuse_existing(dst, overwrite)
        with workspace(dst) as work:
            state = _begin(work, wanted, overwrite)
            _download_others(source)
            stream = job(source)
            sent = stream.shards(work, state, draft)
            stream.other_files(work)
            if draft is not None:
                return _push(stream, work, draft, sent, overwrite, began)
            publish(work, dst)
            return _finish(stream, dst, began)


def _begin(work: Path, wanted: _State, overwrite: bool) -> _State:
    """The state of the run that was begun in `work`, if it was this one, or a new one."""
    found = _load_state(work)
    if found == wanted:
        return found
    entries = list(work.iterdir())
    if entries and not overwrite:
        if found is not None and replace(found, commit=wanted.commit) == wanted:
            raise NeuzipError(
                f"{work}: was begun with commit {found.commit} of {found.repo_id}, which has changed since",
                f"{found.repo_id}@{found.commit} as `source` goes on with that, `overwrite=True` begins anew",
            )
        raise NeuzipError(
            f"{work}: was begun with other options or from another source",
            "repeat the command that began it, or give `overwrite=True` to begin anew",
        )
    with writing(work):
        for entry in entries:
            remove(entry)
        wanted.save(work)
    return wanted


def _download_others(source: StreamedSource) -> None:
    """Bring everything that is no weight file, and check what the index says."""
    root = source.checkpoint.root
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_unfinished(root)
    for file in source.checkpoint.others:
        download(source.remote, file, root)
    source.checkpoint = with_indices(source.checkpoint)


def _finish(stream: _Stream, dst: Path, began: float) -> StreamReport:
    """Take the last trace of the run from a result that has its name."""
    with writing(dst):
        (dst / STATE_PATH).unlink(missing_ok=True)
        sync_folder(dst / OWN_FOLDER)
    return StreamReport(stream.report(dst, time.monotonic() - began), stream.remote.commit)


def _push(
    stream: _Stream, work: Path, draft: Draft, sent: Mapping[str, HubFile], overwrite: bool, began: float
) -> StreamReport:
    """Make visible what was sent, and delete the workspace."""
    target = draft.target
    plan = plan_push(work, target.repo_id, revision=target.revision)
    plan = replace(plan, files=tuple(file for file in plan.files if file.path != STATE_PATH))
    pushed = draft.publish(plan, sent, overwrite=overwrite)
    report = stream.report(work, time.monotonic() - began)
    stored = report.stored_bytes - (work / STATE_PATH).stat().st_size
    with writing(work):
        for path in sorted(files_in(work), key=lambda p: p == work / STATE_PATH):
            path.unlink()  # the state last: by it a run that is killed here is known
        remove(work)
    return StreamReport(replace(report, stored_bytes=stored), stream.remote.commit, pushed)


class _Stream(Compression):
    """One run of `compress_stream`: a compression whose plan is completed as the files come."""

    def __init__(
        self,
        source: StreamedSource,
        plan: Plan,
        workers: Workers,
        device: Device,
        on_bytes: OnBytes,
        activations: str | None,
        allow_destructive: bool,
        note: Note,
    ) -> None:
        super().__init__(source, plan, workers, True, device, on_bytes, ALONE, activations)
        self._streamed = source
        self._allow_destructive = allow_destructive
        self._tell = note
        self._alike = Counter(_kind(t) for t in plan.tensors)
        self._firsts: dict[tuple[object, ...], SourceTensor] = {}

    @property
    def remote(self) -> RemoteCheckpoint:
        """Where the files come from."""
        return self._streamed.remote

    def shards(self, work: Path, state: _State, draft: Draft | None) -> dict[str, HubFile]:
        """Make the containers that are missing, and send them to the draft. What it then has of them."""
        files = self._source.checkpoint.weights
        _, present = self._claim(work, overwrite=False)
        there = {} if draft is None else draft.files()
        sent = {file: f for file, f in state.sent.items() if there.get(file) == f}
        ready = [file for file in files if self._is_ready(file, work / file, file in present, state, sent)]
        self._resumed = len(ready)
        coming = iter([file for file in files if file not in ready])
        arriving = self._fetch(next(coming, None))
        for file in files:
            if file not in ready:
                if not arriving.done():
                    self._tell(f"{file}: waiting for its {self._source.file_bytes(file):,} bytes")
                arriving.result()
                arriving = self._fetch(next(coming, None))
                self._shard(file, work / file)
            self._learn(file)
            if draft is not None:
                if file not in sent:
                    sent[file] = draft.add(file, work / file)
                    replace(state, sent=dict(sent)).save(work)
                hollow(work / file)
        return sent

    def is_made(self, dst: Path, *, ours: bool) -> bool:
        """Whether `dst` is what this run would make, and intact.

        A lossless result tells: its files are restored in memory, and have to have the digests that the Hub
        names. Any other is known only as `ours`, by a state that names the same commit.
        """
        if not ours and not self._is_ours(dst):
            return False
        try:
            return self._is_intact_folder(dst, ours)
        except (FormatError, VerificationError):
            return False

    def _is_intact_folder(self, dst: Path, ours: bool) -> bool:
        stored, files = read_stored_files(dst), self.remote.files
        with TensorSource(dst, self._device) as made:
            if made.checkpoint.weights != self.remote.weights:
                return False
            check_rewritten(made)
            for file in self.remote.weights:
                here = list(made.tensors(file))
                if ours and not all(t.record is None or t.record.lossless for t in here):
                    for _ in check_tensors(made, here, self._workers, on_bytes=self._on_bytes):
                        pass
                elif not files[file].matches_pieces(_restored(made, file, self._on_bytes)):
                    return False
                for tensor in here:
                    made.check_streams(tensor)
        self._resumed = len(self.remote.weights)
        return all(
            file in stored
            and files[file].matches(
                dst / (f"{ORIGINAL_FOLDER}/{file}" if stored[file].kind == "rewritten" else file)
            )
            for file in self.remote.others
        )

    def other_files(self, work: Path) -> None:
        """Write everything that is no weight file, and delete what was downloaded."""
        root = self._source.checkpoint.root
        with writing(work):
            downloaded = {p.relative_to(work).as_posix() for p in files_in(root)}
            self._other_files(work, {STATE_PATH, *downloaded})
            remove(root)

    def _is_ready(
        self, file: str, path: Path, is_present: bool, state: _State, sent: Mapping[str, HubFile]
    ) -> bool:
        """Whether a container is there, or on the draft and here as a husk. If not, what is there goes."""
        if not is_present:
            return False
        with writing(path):
            if file in sent or (file not in state.sent and self._is_intact(file, path)):
                with Container(path) as container:
                    self._records |= {(file, name): r for name, r in container.manifest.tensors.items()}
                (self._source.checkpoint.root / file).unlink(missing_ok=True)
                self._on_bytes(sum(t.info.nbytes for t in self._source.tensors(file)))
                return True
            path.unlink()
        self._tell(f"{file}: is damaged or no longer in the draft, and is made again")
        return False

    def _is_intact(self, file: str, path: Path) -> bool:
        """Whether the container of an earlier run decodes to what its checksums say."""
        try:
            with TensorSource(Checkpoint(path, path.parent, (path.name,), ()), self._device) as written:
                if written.header(path.name).raw != self._source.header(file).raw:
                    return False
                here = [t for t in written.tensors() if t.record is None or t.record.alias_file is None]
                for _ in check_tensors(written, here, self._workers):
                    pass
        except FormatError:
            return False
        return True

    def _fetch(self, file: str | None) -> Future[None]:
        """Begin to download a weight file. The thread ends with the process, however long it would take."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                if file is not None:
                    download(self._streamed.remote, file, self._source.checkpoint.root)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="neuzip-download", daemon=True).start()
        return future

    def _shard(self, file: str, target: Path) -> None:
        """Compress a weight file that has come, and delete it when its container is verified."""
        self._streamed.arrive(file)
        self._find_aliases(file)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            self.container(file, partial_name(target))
            os.replace(partial_name(target), target)
            sync_folder(target.parent)
            self._streamed.leave(file)
        before, after = self._source.file_bytes(file), target.stat().st_size
        self._tell(f"{file}: {before:,} bytes, compressed {after:,}")

    def _find_aliases(self, file: str) -> None:
        """Complete the plan for a file that is here: which tensors are ternary, and which equal to others."""
        planned = self._plan.of_file(file)
        if not self._allow_destructive:
            refuse_destruction(self._source, planned, self._workers)
        large = [t for t in planned if t.tensor.info.nbytes >= ALIAS_MINIMUM and self._alike[_kind(t)] > 1]
        large = [t for t in large if not t.is_adapter]
        firsts = dict(self._firsts)
        aliases: dict[str, SourceTensor] = {}
        for t, found in zip(large, self._workers.map(self._digest, large), strict=True):
            first = firsts.setdefault((_kind(t), found), t.tensor)
            if first is not t.tensor and self._equal(t.tensor, first):
                aliases[t.tensor.name] = first
        self._plan = replace(
            self._plan,
            tensors=tuple(
                replace(t, alias_of=aliases.get(t.tensor.name)) if t.tensor.file == file else t
                for t in self._plan.tensors
            ),
        )

    def _learn(self, file: str) -> None:
        """Remember the digests of a file's tensors, to which later ones may be equal."""
        for t in self._plan.of_file(file):
            record = self._records[file, t.tensor.name]
            if record.scheme != "alias" and t.tensor.info.nbytes >= ALIAS_MINIMUM and not t.is_adapter:
                self._firsts.setdefault((_kind(t), record.original or record.checksum), t.tensor)

    def _digest(self, planned: PlannedTensor) -> str:
        return digest(self._source.reader(planned.tensor), planned.tensor.info.nbytes)

    def _equal(self, a: SourceTensor, b: SourceTensor) -> bool:
        read_a, read_b, total = self._source.reader(a), self._source.reader(b), a.info.nbytes
        return all(
            np.array_equal(read_a(at, stop), read_b(at, stop))
            for at in range(0, total, COMPARED)
            for stop in [min(at + COMPARED, total)]
        )


def _restored(made: TensorSource, file: str, on_bytes: OnBytes) -> Iterator[bytes | memoryview]:
    """A file as it was before compression, in pieces."""
    yield made.header(file).raw
    for tensor in made.tensors(file):
        read = made.reader(tensor)
        for start, stop in tensor.pieces():
            yield read(start, stop).data
            on_bytes(stop - start)


def _kind(planned: PlannedTensor) -> tuple[object, ...]:
    """What two tensors must have in common for one to be stored as equal to the other."""
    file, info = planned.tensor.file, planned.tensor.info
    return file[: file.rfind("/") + 1], info.dtype, info.shape, planned.scheme


def hollow(path: Path) -> None:
    """Put a husk in the place of a container: a file of its size, without the streams and their blocks."""
    with Container(path) as container:
        file = container.file
        size = path.stat().st_size
        start = file.data_start + file.header.tensors[HEADER_ENTRY].start
        front, back = np.empty(file.data_start, np.uint8), np.empty(size - start, np.uint8)
        file.read_at(0, front)
        file.read_at(start, back)
    with writing(path):
        with open(partial_name(path), "wb") as husk:
            husk.write(front.data)
            husk.seek(start)
            husk.write(back.data)
        os.replace(partial_name(path), path)


def going(checkpoint: Checkpoint, draft: Draft) -> str:
    """Which files of a checkpoint an upload has."""
    return f"these files go to {draft.target}: {', '.join((*checkpoint.weights, *checkpoint.others))}"


def compress_and_push(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    rules: Sequence[Rule] = DEFAULT_RULES,
    *,
    draft: Draft,
    private: bool = False,
    overwrite: bool = False,
    allow_private_files: bool = False,
    note: Note = pass_over,
    **options: Any,
) -> tuple[CompressionReport, Pushed]:
    """Compress a folder as `compress`, which gets the `options`, and upload each container when it is ready.

    The repository is made `private` if it is new. With `overwrite` both results may replace older ones.
    Files that look private are refused unless `allow_private_files`. `note` is told what is uploaded. Raises
    NeuzipError.
    """
    if Path(src).is_file():
        raise NeuzipError(f"{src}: is a file, and repositories hold folders", "give its folder")
    with TensorSource(src) as source:
        require_plain(source, Path(dst))
        refuse_private(private_files(source.checkpoint), str(draft.target), allow_private_files)
        note(going(source.checkpoint, draft))
    refuse_unless_made(Path(dst), overwrite)
    draft.begin(private=private, overwrite=overwrite)
    sent: dict[str, HubFile] = {}
    report = compress(
        src,
        dst,
        rules,
        overwrite=overwrite,
        on_file=lambda f, p: sent.update({f: draft.add(f, p)}),
        **options,
    )
    target = draft.target
    plan = plan_push(dst, target.repo_id, revision=target.revision)
    there = draft.files()
    for file in set(find_checkpoint(dst).weights) - set(sent):
        path = Path(dst) / file
        sent[file] = there[file] if file in there and there[file].matches(path) else draft.add(file, path)
    return report, draft.publish(plan, sent, overwrite=overwrite)
