"""From the Hub to a compressed checkpoint, and perhaps back to the Hub, on a disk that holds neither whole.

A weight file is downloaded while the one before it is compressed, and deleted as soon as its container is
verified: at most two of the source are there at a time. The result is byte by byte what `compress` makes of
the downloaded folder. Schemes follow from the headers, which can be had without the files, and a tensor is
stored as equal only to one of the same or an earlier file (equal_tensors.py).

With a draft (formats/hub/draft.py) every container is uploaded, and a husk takes its place (husk.py). Index,
report and card need no more than its header and records.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from neuzip.errors import FormatError
from neuzip.formats.checkpoint import OWN_FOLDER, Checkpoint
from neuzip.formats.container import Container
from neuzip.formats.hub.connection import Note, bars
from neuzip.formats.hub.draft import Draft
from neuzip.formats.hub.listing import HubFile
from neuzip.formats.hub.notes import pass_over
from neuzip.formats.hub.private_files import private_files, refuse_private
from neuzip.formats.hub.push import Pushed
from neuzip.formats.hub.push_plan import plan_push
from neuzip.formats.hub.stream import RemoteCheckpoint, download, find_remote, read_headers
from neuzip.formats.safetensors_file import Header

from .bitnet import online_config
from .checkpoint_job import DEFAULT_RULES
from .container_job import ContainerJob
from .device import CPU, Device
from .draft_job import files_to_upload
from .encode_tensor import TensorEncoder
from .entry_checks import require_config, require_plain
from .equal_tensors import EqualTensors
from .hub_result import is_made_of
from .hub_state import STATE_PATH, HubState, begin_or_resume, load_state, new_state
from .husk import put_husk
from .overwrite_guard import refuse_existing
from .plan import Plan, PlannedTensor, choose_schemes, refuse_destruction
from .progress import OnBytes, ignore
from .ranks import ALONE
from .reports import CompressionReport, compression_report
from .results import RunOutcome, TensorResults
from .resume import claim_workspace
from .rules import Rule
from .run_identity import is_of_run, run_identity
from .side_files import SideFiles
from .sources.folder import FolderSource
from .sources.hub import HubSource
from .tensor_checks import check_tensors
from .workers import Workers
from .workspace import files_in, partial_name, publish, recover, remove, sync_folder, workspace, writing

SOURCE_FOLDER = f"{OWN_FOLDER}/source"
"""Where downloads lie in the workspace."""


@dataclass(frozen=True)
class StreamPlan:
    """What a stream will do, as far as it can be known without the files."""

    remote: RemoteCheckpoint
    headers: dict[str, Header]
    source: HubSource
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

    def whole(self, rules: Sequence[Rule]) -> Plan:
        """The plan of the whole checkpoint, without the aliases."""
        return Plan(tuple(rules), self.tensors, self.original_bytes, self.weight_file_bytes)

    @property
    def most_of_source(self) -> int:
        """The most bytes of the source's weight files that are on the disk at a time."""
        sizes = [self.remote.files[file].nbytes for file in self.remote.weights]
        return max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))

    def at(self, folder: Path) -> StreamPlan:
        """The plan of the checkpoint as it is when everything is in `folder`."""
        return replace(self, source=HubSource(self.remote, folder, self.headers))


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
    source = HubSource(remote, partial_name(dst) / SOURCE_FOLDER, headers)
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
    dst, began, remote, source = Path(dst), time.monotonic(), plan.remote, plan.source
    if draft is not None:
        refuse_private(private_files(source.checkpoint), str(draft.target), allow_private_files)
        note(files_to_upload(source.checkpoint, draft))
    require_config(source, activations)
    state = new_state(remote, rules, activations, draft)
    identity = run_identity(rules, source.checkpoint, source.file_bytes, activations)
    recover(dst)
    with bars(False), source, Workers(jobs or device.jobs(ALONE.jobs)) as workers:
        if draft is not None:
            earlier = load_state(partial_name(dst))
            draft.begin(private=private, overwrite=overwrite or (earlier == state and bool(earlier.sent)))
        else:
            if dst.is_dir() and not overwrite:
                has_state = load_state(dst) == state
                if (has_state or is_of_run(dst, identity)) and is_made_of(
                    remote, dst, device, workers, on_bytes, has_state=has_state
                ):
                    outcome = RunOutcome(TensorResults(), len(remote.weights))
                    return _finish(plan.at(dst), dst, rules, outcome, device, began)
            refuse_existing(dst, overwrite)
        with workspace(dst) as work:
            state = begin_or_resume(work, state, overwrite)
            source.download_others()
            encoder = TensorEncoder(source, device, online=online_config(source))
            job = HubJob(
                plan.whole(rules),
                source,
                ContainerJob(source, encoder, workers, device, on_bytes=on_bytes),
                EqualTensors(source, plan.tensors, workers),
                note,
                allow_destructive,
            )
            present = claim_workspace(work, identity, remote.weights, overwrite=False)
            outcome, sent = job.make_containers(work, present, state, draft)
            job.make_side_files(work, outcome.results, activations)
            if draft is not None:
                return _push(plan, work, rules, outcome, device, draft, sent, overwrite, began)
            publish(work, dst)
            return _finish(plan, dst, rules, outcome, device, began)


def _finish(
    plan: StreamPlan, dst: Path, rules: Sequence[Rule], outcome: RunOutcome, device: Device, began: float
) -> StreamReport:
    """Take the last trace of the run from a result that has its name."""
    with writing(dst):
        (dst / STATE_PATH).unlink(missing_ok=True)
        sync_folder(dst / OWN_FOLDER)
    seconds = time.monotonic() - began
    report = compression_report(plan.source, plan.whole(rules), dst, outcome, device.name, seconds)
    return StreamReport(report, plan.remote.commit)


def _push(
    plan: StreamPlan,
    work: Path,
    rules: Sequence[Rule],
    outcome: RunOutcome,
    device: Device,
    draft: Draft,
    sent: Mapping[str, HubFile],
    overwrite: bool,
    began: float,
) -> StreamReport:
    """Make visible what was sent, and delete the workspace."""
    target = draft.target
    upload = plan_push(work, target.repo_id, revision=target.revision)
    upload = replace(upload, files=tuple(file for file in upload.files if file.path != STATE_PATH))
    pushed = draft.publish(upload, sent, overwrite=overwrite)
    seconds = time.monotonic() - began
    report = compression_report(plan.source, plan.whole(rules), work, outcome, device.name, seconds)
    stored = report.stored_bytes - (work / STATE_PATH).stat().st_size
    with writing(work):
        for path in sorted(files_in(work), key=lambda p: p == work / STATE_PATH):
            path.unlink()  # the state last: by it a run that is killed here is known
        remove(work)
    return StreamReport(replace(report, stored_bytes=stored), plan.remote.commit, pushed)


@dataclass(frozen=True)
class HubJob:
    """The containers of a checkpoint whose weight files are downloaded one ahead, and what lies beside them.

    `plan` has no aliases: `equal` finds them when the files come. `note` is told of each file.
    """

    plan: Plan
    source: HubSource
    container: ContainerJob
    equal: EqualTensors
    note: Note
    allow_destructive: bool = False

    def make_containers(
        self, work: Path, present: Sequence[str], state: HubState, draft: Draft | None
    ) -> tuple[RunOutcome, dict[str, HubFile]]:
        """Make the containers that are missing, and send them to the draft. What it then has of them.

        `present` are the weight files that an earlier run has left in `work`.
        """
        results = TensorResults()
        files = self.source.checkpoint.weights
        there = {} if draft is None else draft.files()
        sent = {file: f for file, f in state.sent.items() if there.get(file) == f}
        ready = [f for f in files if f in present and self._is_ready(f, work / f, state, sent, results)]
        coming = iter([file for file in files if file not in ready])
        arriving = self._fetch(next(coming, None))
        for file in files:
            if file not in ready:
                if not arriving.done():
                    self.note(f"{file}: waiting for its {self.source.file_bytes(file):,} bytes")
                arriving.result()
                arriving = self._fetch(next(coming, None))
                self._make(file, work / file, results)
            self.equal.remember(self.plan.of_file(file), results.records)
            if draft is not None:
                if file not in sent:
                    sent[file] = draft.add(file, work / file)
                    replace(state, sent=dict(sent)).save(work)
                put_husk(work / file)
        return RunOutcome(results, len(ready)), sent

    def make_side_files(self, work: Path, results: TensorResults, activations: str | None) -> None:
        """Write everything that is no weight file, and delete what was downloaded."""
        checkpoint = self.source.checkpoint
        with writing(work):
            downloaded = {p.relative_to(work).as_posix() for p in files_in(checkpoint.root)}
            files = SideFiles(checkpoint, results.by_file(checkpoint.weights), activations)
            files.write(work, {STATE_PATH, *downloaded})
            remove(checkpoint.root)

    def _is_ready(
        self, file: str, path: Path, state: HubState, sent: Mapping[str, HubFile], results: TensorResults
    ) -> bool:
        """Whether a container is intact, or on the draft and here as a husk. If not, it is deleted."""
        with writing(path):
            if file in sent or (file not in state.sent and self._is_intact(file, path)):
                with Container(path) as container:
                    records = container.manifest.tensors
                results.records.update({(file, name): record for name, record in records.items()})
                (self.source.checkpoint.root / file).unlink(missing_ok=True)
                self.container.on_bytes(sum(t.info.nbytes for t in self.source.tensors(file)))
                return True
            path.unlink()
        self.note(f"{file}: is damaged or no longer in the draft, and is made again")
        return False

    def _is_intact(self, file: str, path: Path) -> bool:
        """Whether the container of an earlier run decodes to what its checksums say."""
        container = Checkpoint(path, path.parent, (path.name,), ())
        try:
            with FolderSource(container, self.container.device) as written:
                if written.header(path.name).raw != self.source.header(file).raw:
                    return False
                here = [t for t in written.tensors() if t.record is None or not t.record.in_other_file]
                for _ in check_tensors(written, here, self.container.workers):
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
                    download(self.source.remote, file, self.source.checkpoint.root)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="neuzip-download", daemon=True).start()
        return future

    def _make(self, file: str, target: Path, results: TensorResults) -> None:
        """Compress a weight file that has come, and delete it when its container is verified."""
        self.source.arrive(file)
        planned = self.plan.of_file(file)
        if not self.allow_destructive:
            refuse_destruction(self.source, planned, self.container.workers)
        planned = self.equal.with_aliases(planned)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            self.container.make(file, planned, partial_name(target), results)
            os.replace(partial_name(target), target)
            sync_folder(target.parent)
            self.source.leave(file)
        before, after = self.source.file_bytes(file), target.stat().st_size
        self.note(f"{file}: {before:,} bytes, compressed {after:,}")
