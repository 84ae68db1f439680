"""From checkpoint to compressed checkpoint, file by file, never more than a tensor in memory.

A killed run resumes with the files that are not finished. What was finished is compared with the source
again before it is believed, and so is a result that is there already: weights decoded, all other files by
their bytes. What is damaged or missing in it is made again; what people may have edited is refused.

Under torchrun the ranks share the files out. Where there are fewer of them than ranks, or one too many, all
ranks code a part of its tensors into a scratch file, one puts the container together, and all check a part.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from neuzip.errors import BUG_OR_MEMORY, FormatError, NeuzipError, VerificationError, WouldOverwrite
from neuzip.formats.checkpoint import (
    MANIFEST_PATH,
    ORIGINAL_FOLDER,
    OWN_FOLDER,
    WEIGHTS_KEY,
    Checkpoint,
    StoredFile,
    config_files,
    file_checksum,
    index_files,
    read_lenient,
    read_stored_files,
    rewritten_config,
    rewritten_index,
    stored_files_to_json,
    to_json,
)
from neuzip.formats.config_section import SECTION, own_section
from neuzip.formats.container import STREAM_DTYPES, Container, ContainerWriter, Stream, is_container
from neuzip.formats.hub.push import HUB_FILES
from neuzip.formats.manifest import TensorRecord
from neuzip.formats.safetensors_file import DTYPE_BITS, TensorFile

from .delta_base import DeltaBase
from .device import CPU, Device
from .encode_tensor import SMALL, EncodedTensor, TensorEncoder
from .entry_checks import refuse_other, require_plain
from .lossless import Map
from .overwrite_guard import refuse_existing
from .plan import (
    Plan,
    PlannedTensor,
    coded_streams,
    make_plan,
    online_config,
    pooled_tensors,
)
from .ranks import ALONE, Ranks, share_out, split
from .reports import CompressionReport, Key, compression_report
from .run_identity import RUN_ID_PATH, is_of_run, run_identity
from .scheme import LOSSLESS, Rule
from .source import SourceTensor, TensorSource, digest
from .verify import OnBytes, check_tensors, ignore
from .workers import Workers, ahead
from .workspace import (
    copy_file,
    file_workspace,
    files_in,
    make_folder,
    partial_name,
    permissions,
    publish,
    publish_file,
    reading,
    recover,
    refuse_strangers,
    remove,
    remove_scratch,
    scratch_folder,
    sync_folder,
    workspace,
    write_file,
    writing,
)

SCRATCH = f"{OWN_FOLDER}/scratch"
LARGE_AT_ONCE = 2
"""Large tensors on the way to a GPU, on it, or on their way back."""

_SHARE = "`source` and `destination` must lie on a file system that all ranks share"

DEFAULT_RULES = (Rule("*", LOSSLESS),)

OnFile = Callable[[str, Path], None]
"""on_file(file, path): a container of the checkpoint is at `path`, in the workspace."""

State = Literal["whole", "damaged", "other"]
"""What a file of an earlier run is: what this run would make, or damaged, or made from another source."""

_Beside = tuple[Path | bytes, Path | None]
"""A file beside containers: the file that it copies, or its content, and the file whose mode it gets."""

Coded = tuple[PlannedTensor, EncodedTensor]
"""A tensor with its record and streams."""


def compress(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    rules: Sequence[Rule] = DEFAULT_RULES,
    *,
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
    device: Device = CPU,
    on_bytes: OnBytes = ignore,
    ranks: Ranks = ALONE,
    allow_destructive: bool = False,
    activations: str | None = None,
    on_file: OnFile | None = None,
    base: DeltaBase | None = None,
) -> CompressionReport:
    """Compress a checkpoint: a folder, or a single .safetensors file.

    Files and folders get the permission bits of those of `src`, as far as the umask leaves them. With
    `verify` every file is read back, decoded and compared before it gets its final name. `on_bytes` is
    told of weights done, as bytes of the original; with `verify` of half of a tensor when it is coded, and of
    the rest when it was compared. All `ranks` of a `distributed.joined()` make the same call; rank 0's
    `on_bytes` is told for all, `jobs` are the threads of each. The bytes are the same on any `device`.
    `allow_destructive` lets ternary schemes round weights that are not ternary; `activations` is the mode
    that config.json says for ternary weights (runtime/activations.py). `on_file` is told of each container
    that gets its final name; it needs one process. With a `base` what is stored is a delta: of
    every tensor the lesser of its difference from the base's and of what it takes alone. Raises NeuzipError.
    """
    assert on_file is None or ranks.world == 1
    began = time.monotonic()
    dst = Path(dst)
    with TensorSource(src) as source, Workers(jobs or device.jobs(ranks.jobs)) as workers:
        require_plain(source, dst)
        if activations is not None and "config.json" not in source.checkpoint.others:
            raise NeuzipError(f"{source.checkpoint.path}: has no config.json", "leave out `activations`")
        identity = identity_of(source, rules, activations, base)
        ranks.on_first(lambda: refuse_other(source, dst, overwrite, identity))
        plan = ranks.on_first(lambda: make_plan(source, rules, workers, allow_destructive=allow_destructive))
        job = Compression(
            source, plan, workers, verify, device, ranks.counting(on_bytes), ranks, activations, on_file, base
        )
        job.require_shared_source()
        if source.checkpoint.is_file:
            job.file(dst, overwrite)
        else:
            job.folder(dst, overwrite)
        return ranks.on_first(lambda: job.report(dst, time.monotonic() - began))


def identity_of(
    source: TensorSource, rules: Sequence[Rule], activations: str | None, base: DeltaBase | None
) -> bytes:
    """The identity of a compression of `source`."""
    checkpoint = source.checkpoint
    sizes = {file: source.file_bytes(file) for file in (*checkpoint.weights, *checkpoint.others)}
    return run_identity(rules, sizes, activations, base.sizes() if base is not None else None)


@dataclass(frozen=True)
class _Parked:
    """A tensor's record, and where in a scratch file its streams are: start and length in bytes."""

    record: TensorRecord
    path: Path
    streams: Mapping[str, tuple[int, int]]

    def load(self) -> EncodedTensor:
        """The record and the streams themselves. Raises NeuzipError when the file is not all there."""
        streams = {}
        for name, (start, nbytes) in self.streams.items():
            dtype = np.uint16 if STREAM_DTYPES[name] == "U16" else np.uint8
            part = np.fromfile(self.path, dtype, nbytes // dtype().itemsize, offset=start)
            if part.nbytes != nbytes:
                raise NeuzipError(f"{self.path}: is not what another rank wrote", _SHARE)
            streams[name] = Stream([part])
        return EncodedTensor(self.record, streams)


class Compression:
    """One run of `compress`, or the part of one rank in it."""

    def __init__(
        self,
        source: TensorSource,
        plan: Plan,
        workers: Workers,
        verify: bool,
        device: Device,
        on_bytes: OnBytes,
        ranks: Ranks,
        activations: str | None,
        on_file: OnFile | None = None,
        base: DeltaBase | None = None,
    ) -> None:
        self._base = base
        self._on_file = on_file
        self._activations = activations
        self._encoder = TensorEncoder(source, device, base, online_config(source))
        self._source = source
        self._plan = plan
        self._workers = workers
        self._verify = verify
        self._device = device
        self._on_bytes = on_bytes
        self._ranks = ranks
        self._notes: dict[Key, str] = {}
        self._records: dict[Key, TensorRecord] = {}
        self._resumed = 0
        self._mended: tuple[str, ...] = ()

    def require_shared_source(self) -> None:
        """Raise NeuzipError if rank 0 has another source than this one."""
        mine = self._plan_json()
        if self._ranks.on_first(lambda: mine) != mine:
            raise NeuzipError(
                f"{self._source.checkpoint.path}: rank {self._ranks.rank} has not the same files as rank 0",
                _SHARE,
            )

    def file(self, dst: Path, overwrite: bool) -> None:
        """Compress a single file."""
        ranks, partial = self._ranks, partial_name(dst)

        def begin() -> Path | None:
            with writing(dst):
                remove_scratch(partial)
            if dst.exists() and not overwrite and self._is_made(dst):
                return None
            refuse_existing(dst, overwrite, file=True)
            with writing(dst):
                return self._scratch(partial)

        # Rank 0 holds the lock for all.
        with file_workspace(dst, overwrite) if ranks.is_first else nullcontext(partial) as work:
            scratch = ranks.on_first(begin)
            if scratch is None:
                self._resumed = 1
                return
            self._code({self._source.checkpoint.weights[0]: work / dst.name}, scratch)
            ranks.barrier()
            if ranks.is_first:
                publish_file(work, dst)
                with writing(dst):
                    remove_scratch(partial)

    def folder(self, dst: Path, overwrite: bool) -> None:
        """Compress a folder: weights, then everything else, then the name."""
        ranks, files = self._ranks, self._source.checkpoint.weights

        def is_begun() -> bool:
            recover(dst)
            return dst.exists() and not overwrite and self._is_ours(dst)

        if ranks.on_first(is_begun) and self._is_mended(dst):
            return
        ranks.on_first(lambda: refuse_existing(dst, overwrite))
        # Rank 0 holds the lock for all.
        like = self._source.checkpoint.root
        with workspace(dst, like) if ranks.is_first else nullcontext(partial_name(dst)) as work:
            scratch, present = ranks.on_first(lambda: self._claim(work, overwrite))
            if not self._is_ours(work):
                raise NeuzipError(f"{work}: rank {ranks.rank} does not find there what rank 0 wrote", _SHARE)
            states = self._states(present, work)
            for file, state in states.items():
                if state == "other" and not overwrite:
                    original = self._source.checkpoint.root / file
                    raise NeuzipError(
                        f"{work / file}: was made from another {original}",
                        "if the source has changed, give `overwrite=True` to begin anew",
                    )
            finished = {file for file, state in states.items() if state == "whole"}
            self._resumed = len(finished)
            self._code({file: work / file for file in files if file not in finished}, scratch)
            self._share_records()
            if ranks.is_first:
                with writing(work):
                    remove_scratch(work / SCRATCH)
                    self._other_files(work)
                publish(work, dst)

    def _is_mended(self, dst: Path) -> bool:
        """Whether `dst` is what this run would make: whatever of it is damaged or missing is made again.

        False if it was made from a source with other contents; then nothing in it is touched. Raises
        WouldOverwrite, and touches nothing either, if people may have edited files beside the containers.
        """
        ranks, files = self._ranks, self._source.checkpoint.weights
        states = self._states(files, dst)
        if "other" in states.values() or not ranks.on_first(lambda: self._is_of_source(dst)):
            return False
        self._share_records()
        ranks.on_first(lambda: self._refuse_edited(dst))
        broken = [file for file in files if states[file] == "damaged"]
        self._resumed = len(files) - len(broken)
        if broken or ranks.on_first(lambda: sorted(self._amiss(dst))):
            self._mend(dst, broken)
        return True

    def _mend(self, dst: Path, broken: Sequence[str]) -> None:
        """Make some containers of a result again, and all that is amiss beside them, each in one step."""
        ranks = self._ranks

        def begin() -> Path:
            with writing(dst):
                remove_scratch(dst / SCRATCH)
                return self._scratch(dst / SCRATCH)

        # The workspace is there for its lock alone.
        with workspace(dst) if ranks.is_first else nullcontext(partial_name(dst)) as work:
            scratch = ranks.on_first(begin)
            self._code({file: dst / file for file in broken}, scratch)
            self._share_records()
            if ranks.is_first:
                with writing(dst):
                    remove_scratch(dst / SCRATCH)
                    amiss = self._amiss(dst)
                    for place, (content, like) in amiss.items():
                        _put(content, like, dst / place)
                    for folder in {(dst / place).parent for place in (*broken, *amiss)}:
                        sync_folder(folder)
                self._mended = tuple(sorted({*broken, *amiss}))
                with suppress(OSError):  # it is not empty where a run with --overwrite was killed
                    work.rmdir()

    def _share_records(self) -> None:
        for records, notes in self._ranks.all_gather((self._records, self._notes)):
            self._records |= records
            self._notes |= notes

    def _scratch(self, path: Path) -> Path:
        """Where ranks write what has not its final name yet: a new folder for every run.

        Ranks of an earlier run that are slow to end cannot get between those of this one.
        """
        return scratch_folder(path) if self._ranks.world > 1 else path

    def _plan_json(self) -> bytes:
        return identity_of(self._source, self._plan.rules, self._activations, self._base)

    def _is_ours(self, folder: Path) -> bool:
        """Whether a folder was made by the same command from a source with the same files."""
        return is_of_run(folder, self._plan_json())

    def _claim(self, work: Path, overwrite: bool) -> tuple[Path, list[str]]:
        """Begin a run in `work`, or go on with one: where its scratch is, and the weight files there."""
        path = work / RUN_ID_PATH
        if path.exists() and not self._is_ours(work):
            if not overwrite:
                raise NeuzipError(
                    f"{work}: was begun with other options or from another source",
                    "repeat the command that began it, or give `overwrite=True` to begin anew",
                )
            for entry in work.iterdir():
                remove(entry)
        if not path.exists():
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, self._plan_json())
        weights = self._source.checkpoint.weights
        with writing(work):
            remove_scratch(work / SCRATCH)
            for file in weights:
                partial_name(work / file).unlink(missing_ok=True)
            there = {p.relative_to(work).as_posix() for p in files_in(work)}
            return self._scratch(work / SCRATCH), [file for file in weights if file in there]

    def _is_of_source(self, dst: Path) -> bool:
        """Whether the files beside weights are those of SRC, as far as the result's manifest can tell.

        Without a manifest they all have to be there as they should: one that is not may be of another SRC.
        """
        checkpoint = self._source.checkpoint
        try:
            stored = read_stored_files(dst, delta=self._base is not None)
        except FormatError:
            return all(
                place == MANIFEST_PATH or not isinstance(content, Path)
                for place, (content, _) in self._amiss(dst).items()
            )
        return set(stored) == {*checkpoint.weights, *checkpoint.others} and all(
            stored[f].checksum == file_checksum(checkpoint.root / f) for f in checkpoint.others
        )

    def _moved(self, dst: Path) -> set[str]:
        """The files that stand below neuzip/original in a result that was on the Hub: that is no damage."""
        try:
            found = read_stored_files(dst, delta=self._base is not None)
        except FormatError:
            return set()
        return {name for name in HUB_FILES if name in found and found[name].kind == "rewritten"}

    def _amiss(self, dst: Path) -> dict[str, _Beside]:
        """What a result lacks beside its containers, or has otherwise than it should, by its place."""
        moved = self._moved(dst)
        wanted = self._beside(moved) | {MANIFEST_PATH: (self._manifest(self._stored_files(moved)), None)}
        for file in config_files(self._source.checkpoint):
            content, like = wanted[file]
            assert isinstance(content, bytes)
            wanted[file] = _with_further_entries(content, dst / file, self._activations), like
        return {
            place: (content, like)
            for place, (content, like) in wanted.items()
            if not _is_at(content, dst / place)
        }

    def _refuse_edited(self, dst: Path) -> None:
        """Raise WouldOverwrite for a file that is there, but not as in SRC: it may be edited, not damaged.

        What neuzip alone writes, and a config.json that is none, nobody has edited.
        """
        for place, (content, _) in self._beside(self._moved(dst)).items():
            path = dst / place
            if isinstance(content, Path):
                own = place.startswith(f"{OWN_FOLDER}/") or not path.is_file()
                edited = not own and not _is_at(content, path)
            else:
                edited = place in config_files(self._source.checkpoint) and _has_other_values(content, path)
            if edited:
                raise WouldOverwrite(
                    f"{path}: is not that of `source`: it is damaged, or was edited",
                    "move it away and repeat the command, which makes it again; or give `overwrite=True` to"
                    " make all of `destination` again",
                )

    def _is_made(self, dst: Path) -> bool:
        """Whether the file `dst` is intact, and has the checksums that this run would write."""
        (file,) = self._source.checkpoint.weights
        try:
            with Container(dst, delta=self._base is not None) as container:
                records = container.manifest.tensors
        except FormatError:
            return False
        planned = self._plan.of_file(file)
        for t, encoded in self._coded(planned):
            if records.get(t.tensor.name) != encoded.record:
                return False
            self._records[file, t.tensor.name] = encoded.record
        for t in planned:
            if t.alias_of is not None and records.get(t.tensor.name) != self._alias(t.tensor, t.alias_of):
                return False
        try:
            self._check_written(file, dst, self._on_bytes)
        except (FormatError, VerificationError):
            return False
        return True

    def _states(self, files: Sequence[str], folder: Path) -> dict[str, State]:
        """What each of some containers is; every rank looks at a part of them."""
        ranks = self._ranks
        mine = {f: self._state(f, folder) for f in files[ranks.rank :: ranks.world]}
        return {file: state for part in ranks.all_gather(mine) for file, state in part.items()}

    def _state(self, file: str, folder: Path) -> State:
        """What a container is. Of one that is made again, what `on_bytes` was told is taken back."""
        told = 0

        def tell(nbytes: int) -> None:
            nonlocal told
            told += nbytes
            self._on_bytes(nbytes)

        state = self._compared(file, folder / file, tell)
        if state != "whole":
            self._on_bytes(-told)
        return state

    def _compared(self, file: str, path: Path, on_bytes: OnBytes) -> State:
        """What a container is, after a look at its records and then at all its tensors."""
        source = self._source
        try:
            with Container(path, delta=self._base is not None) as container:
                if container.original.raw != source.header(file).raw:
                    return "other"
                records = container.manifest.tensors
        except FormatError:
            return "other" if _is_plain(path) else "damaged"
        for tensor in source.tensors(file):
            record = self._records[file, tensor.name] = records[tensor.name]
            if digest(source.reader(tensor), tensor.info.nbytes) != (record.original or record.checksum):
                return "other"
            on_bytes(self._coded_part(tensor))
        try:
            self._check_written(file, path, on_bytes)
        except (FormatError, VerificationError):
            return "damaged"
        return "whole"

    def _code(self, targets: Mapping[str, Path], scratch: Path) -> None:
        """Make the containers of some files, under their final names."""
        ranks, source = self._ranks, self._source
        sizes = {f: sum(t.info.nbytes for t in source.tensors(f)) for f in targets}
        alone, together = share_out(sizes, ranks.world)
        numbers = {file: i for i, file in enumerate(source.checkpoint.weights)}
        temporary = {
            file: partial_name(target) if ranks.world == 1 else scratch / str(numbers[file])
            for file, target in targets.items()
        }
        for file in alone[ranks.rank]:
            with writing(targets[file]):
                self._make_folder_of(file, targets[file])
                self.container(file, temporary[file])
                os.replace(temporary[file], targets[file])
            if self._on_file is not None:
                self._on_file(file, targets[file])
        if together:
            keys = {(f, t.name): t.info.nbytes for f in together for t in source.tensors(f)}
            mine = split(keys, [sum(sizes[f] for f in part) for part in alone])[ranks.rank]
            self._code_together(
                {file: targets[file] for file in together},
                temporary,
                mine,
                scratch / f"rank-{ranks.rank}",
            )

    def _make_folder_of(self, file: str, target: Path) -> None:
        make_folder(target.parent, (self._source.checkpoint.root / file).parent)

    def _code_together(
        self,
        targets: Mapping[str, Path],
        temporary: Mapping[str, Path],
        mine: AbstractSet[Key],
        scratch: Path,
    ) -> None:
        """Make files of which each rank codes and checks a part: this one the tensors `mine` in `scratch`."""
        ranks, files = self._ranks, list(targets)
        owned = files[ranks.rank :: ranks.world]
        planned = [t for f in files for t in self._plan.of_file(f) if (f, t.tensor.name) in mine]
        parked: dict[Key, _Parked] = {}
        for part in ranks.all_gather(self._park(planned, scratch)):
            parked |= part
        self._records |= {key: p.record for key, p in parked.items()}
        for file in owned:
            with writing(targets[file]):
                self._write(file, temporary[file], self._fetched(file, parked))
        ranks.barrier()
        if self._verify:
            for file in files:
                self._check_written(file, temporary[file], self._on_bytes, mine)
        ranks.barrier()
        for file in owned:
            with writing(targets[file]):
                self._make_folder_of(file, targets[file])
                os.replace(temporary[file], targets[file])

    def _park(self, planned: list[PlannedTensor], path: Path) -> dict[Key, _Parked]:
        """Code this rank's part of the files that all ranks make, into a scratch file of its own."""
        parked: dict[Key, _Parked] = {}
        with writing(path), open(path, "wb") as out:
            for t, encoded in self._coded(planned):
                places: dict[str, tuple[int, int]] = {}
                for name, stream in encoded.streams.items():
                    places[name] = out.tell(), stream.nbytes
                    for part in stream.parts:
                        out.write(part.data)
                parked[t.tensor.file, t.tensor.name] = _Parked(encoded.record, path, places)
        return parked

    def _fetched(self, file: str, parked: Mapping[Key, _Parked]) -> Iterator[Coded]:
        """The tensors of a file, as all ranks have coded them."""
        for t in self._plan.of_file(file):
            if t.alias_of is None:
                yield t, parked[file, t.tensor.name].load()

    def container(self, file: str, path: Path) -> None:
        """Write the container of one weight file to `path`, and check it."""
        self._write(file, path, self._coded(self._plan.of_file(file)))
        if self._verify:
            try:
                with _computing(file):
                    self._check_written(file, path, self._on_bytes)
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def _write(self, file: str, path: Path, coded: Iterable[Coded]) -> None:
        """Write the container of one weight file, whose tensors come in order, without the aliases."""
        planned = self._plan.of_file(file)
        mode = permissions(self._source.checkpoint.root / file)
        pooled = pooled_tensors(planned, delta=self._base is not None)
        header = self._source.header(file)
        writer = ContainerWriter(path, header, coded_streams(planned), mode, pooled)
        try:
            raw: list[tuple[PlannedTensor, TensorRecord]] = []
            for t, encoded in coded:
                record = self._records[file, t.tensor.name] = encoded.record
                if encoded.streams:
                    writer.add(t.tensor.name, record, encoded.streams)
                elif record.needs_base:
                    writer.add_alias(t.tensor.name, record)
                else:
                    raw.append((t, record))
            for t in planned:
                if t.alias_of is not None:
                    record = self._records[file, t.tensor.name] = self._alias(t.tensor, t.alias_of)
                    writer.add_alias(t.tensor.name, record)
                    self._on_bytes(self._coded_part(t.tensor))
            # The widest first, so that every raw tensor is aligned to its own elements.
            for t, record in sorted(raw, key=lambda r: -DTYPE_BITS.get(r[0].tensor.info.dtype, 0)):
                if t.tensor.name not in pooled:
                    writer.begin_raw(t.tensor.name, record)
                    self._write_raw(writer, t.tensor)
            if pooled:
                writer.begin_pool({t.tensor.name: record for t, record in raw})
                for tensor in self._source.tensors(file):  # in the order of the file, as the pool is
                    if tensor.name in pooled:
                        self._write_raw(writer, tensor)
            writer.close()
        except BaseException:
            writer.abandon()
            raise

    def _write_raw(self, writer: ContainerWriter, tensor: SourceTensor) -> None:
        read = self._source.reader(tensor)
        for piece in tensor.pieces():
            writer.write(read(*piece))

    def _check_written(
        self, file: str, path: Path, on_bytes: OnBytes, part: AbstractSet[Key] | None = None
    ) -> None:
        """Read a container back, and compare every tensor, or those of `part`, with the source."""
        originals = {t.name: t for t in self._source.tensors(file)}
        alone = Checkpoint(path, path.parent, (path.name,), ())
        base = self._base.source if self._base is not None else None
        with TensorSource(alone, self._device, base=base) as written:
            mine = [t for t in written.tensors() if part is None or (file, t.name) in part]
            # Tensors that live in another file were compared byte by byte when the plan was made.
            here = [t for t in mine if t.record is not None and t.record.alias_file is None]
            on_bytes(sum(map(self._checked_part, mine)) - sum(map(self._checked_part, here)))
            for tensor, verdict in zip(
                here,
                check_tensors(
                    written, here, self._workers, original=lambda t: self._source.reader(originals[t.name])
                ),
                strict=True,
            ):
                on_bytes(self._checked_part(tensor))
                if not verdict.identical and verdict.lossless:
                    raise VerificationError(
                        f"{path}: tensor {verdict.name!r} does not decode to the original",
                        BUG_OR_MEMORY,
                    )

    def _alias(self, tensor: SourceTensor, target: SourceTensor) -> TensorRecord:
        folder = target.file[: target.file.rfind("/") + 1]
        other = None if target.file == tensor.file else target.file[len(folder) :]
        of = self._records.get((target.file, target.name))
        if of is None:  # another rank's: its record is needed now, and is the same here
            (planned,) = [t for t in self._plan.of_file(target.file) if t.tensor.name == target.name]
            of = self._records[target.file, target.name] = self._encode(planned, self._workers.map).record
        return TensorRecord(
            "alias", of.checksum, original=of.original, alias_of=target.name, alias_file=other
        )

    def _checked_part(self, tensor: SourceTensor) -> int:
        """The bytes of a tensor that `on_bytes` is told of when it was read back and compared."""
        return tensor.info.nbytes // 2 if self._verify else 0

    def _coded_part(self, tensor: SourceTensor) -> int:
        """The bytes of a tensor that `on_bytes` is told of when it is coded."""
        return tensor.info.nbytes - self._checked_part(tensor)

    def _coded(self, planned: list[PlannedTensor]) -> Iterator[Coded]:
        """Code the tensors that are no aliases, one ahead of where the result is used."""
        for coded in ahead(self._encoded([t for t in planned if t.alias_of is None])):
            yield coded
            self._on_bytes(self._coded_part(coded[0].tensor))

    def _encoded(self, planned: list[PlannedTensor]) -> Iterator[Coded]:
        """Records and streams in order: small tensors side by side, a large one split among the workers.

        A GPU gets a large one while the one before it is coded and comes back.
        """
        at_once = 1 if self._device.gpu is None else LARGE_AT_ONCE
        pending: deque[tuple[bool, Future[Coded]]] = deque()
        with ThreadPoolExecutor(at_once, thread_name_prefix="neuzip-large") as leaders:
            try:
                for t in planned:
                    large = t.tensor.info.numel > SMALL
                    begin = leaders.submit if large else self._workers.submit
                    pending.append((large, begin(self._encode_large if large else self._encode_small, t)))
                    while (
                        sum(is_large for is_large, _ in pending) == at_once
                        or len(pending) > self._workers.waiting
                    ):
                        yield pending.popleft()[1].result()
                while pending:
                    yield pending.popleft()[1].result()
            finally:
                for _, future in pending:
                    future.cancel()

    def _encode_large(self, planned: PlannedTensor) -> Coded:
        with _computing(planned.tensor.name):
            return planned, self._encode(planned, self._workers.map)

    def _encode_small(self, planned: PlannedTensor) -> Coded:
        with _computing(planned.tensor.name):
            return planned, self._encode(planned, map)

    def _encode(self, planned: PlannedTensor, parallel: Map) -> EncodedTensor:
        encoded = self._encoder.encode(planned, parallel)
        if encoded.note:
            self._notes[planned.tensor.file, planned.tensor.name] = encoded.note
        return encoded

    def _other_files(self, work: Path, also: AbstractSet[str] = frozenset()) -> None:
        """Carry the files that are not weights, rewrite those that name weights, and list them all.

        `also` are files that may be in `work` beside them.
        """
        wanted = self._beside()
        for place, (content, like) in wanted.items():
            _put(content, like, work / place)
        # Of the copies, not of what SRC has now: it may have changed since.
        write_file(work / MANIFEST_PATH, self._manifest(self._stored_files(copied_to=work)))
        weights = self._source.checkpoint.weights
        refuse_strangers(work, {*weights, *wanted, MANIFEST_PATH, RUN_ID_PATH, *also})

    def _beside(self, moved: AbstractSet[str] = frozenset()) -> dict[str, _Beside]:
        """What lies beside the containers of a result, by its place, but for the manifest.

        The records of all tensors must be there. Files that are `moved` stand below neuzip/original.
        """
        checkpoint = self._source.checkpoint
        records: dict[str, dict[str, TensorRecord]] = {file: {} for file in checkpoint.weights}
        for (file, name), record in self._records.items():
            records[file][name] = record
        lossless_only = all(r.lossless for r in self._records.values())
        wanted: dict[str, _Beside] = {
            place: (checkpoint.root / file, checkpoint.root / file)
            for file, (_, place) in self._places(moved).items()
        }
        for file in index_files(checkpoint):
            wanted[file] = rewritten_index(checkpoint, file, records), checkpoint.root / file
        for file in config_files(checkpoint):
            content = rewritten_config(checkpoint, file, lossless_only, self._activations)
            wanted[file] = content, checkpoint.root / file
        return wanted

    def _places(self, moved: AbstractSet[str] = frozenset()) -> dict[str, tuple[str, str]]:
        """Of each file that is not weights how it is stored, and where its bytes stand in a result."""
        checkpoint = self._source.checkpoint
        rewritten = {*index_files(checkpoint), *config_files(checkpoint), *moved}
        return {
            f: ("rewritten", f"{ORIGINAL_FOLDER}/{f}") if f in rewritten else ("carried", f)
            for f in checkpoint.others
        }

    def _stored_files(
        self, moved: AbstractSet[str] = frozenset(), copied_to: Path | None = None
    ) -> dict[str, StoredFile]:
        """What the manifest of a result says: of the files of SRC, or of their copies in a folder."""
        checkpoint = self._source.checkpoint
        stored = {file: StoredFile("container") for file in checkpoint.weights}
        for file, (kind, place) in self._places(moved).items():
            path = checkpoint.root / file if copied_to is None else copied_to / place
            with reading(path):
                stored[file] = StoredFile(kind, path.stat().st_size, file_checksum(path))
        return stored

    def _manifest(self, stored: dict[str, StoredFile]) -> bytes:
        return stored_files_to_json(stored, self._base.name if self._base is not None else None)

    def report(self, dst: Path, seconds: float) -> CompressionReport:
        """Read what was written, and sum it up."""
        return compression_report(
            self._source, self._plan, dst, self._notes, seconds=seconds, device=self._device.name,
            is_delta=self._base is not None, resumed=self._resumed, made_again=self._mended,
        )  # fmt: skip


@contextmanager
def _computing(what: str) -> Iterator[None]:
    """Tell what the operating system refuses a coder as that: no file that is being written is to blame.

    Files of checkpoints have errors of their own, so it is a cache of compiled kernels.
    """
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename}"
        raise NeuzipError(
            f"{what}: cannot be coded{where}: {error.strerror or error}",
            "where the folder of compiled kernels is full, TRITON_CACHE_DIR and NUMBA_CACHE_DIR name another",
        ) from error


def _put(content: Path | bytes, like: Path | None, target: Path) -> None:
    """Copy a file to its place, or write it there."""
    if isinstance(content, Path):
        copy_file(content, target)
    else:
        write_file(target, content, like)


def _is_at(content: Path | bytes, path: Path) -> bool:
    """Whether a file is there and has this content."""
    if not path.is_file():
        return False
    wanted = file_checksum(content) if isinstance(content, Path) else xxhash.xxh3_64_hexdigest(content)
    return file_checksum(path) == wanted


def _with_further_entries(content: bytes, path: Path, activations: str | None) -> bytes:
    """A config.json as it should be, with what the one at `path` has beside that: how the model is to run.

    `activations` are those that were asked for, if they were.
    """
    try:
        found = read_lenient(path)
        section = dict(own_section(found, path))
    except FormatError:  # missing, or damaged
        return content
    document = json.loads(content)
    own = {**own_section(document, path), **section}
    if activations is not None:
        own["activations"] = activations
    further = {key: value for key, value in found.items() if key not in document}
    return to_json(document | further | ({SECTION: own} if own else {}), path)


def _has_other_values(content: bytes, path: Path) -> bool:
    """Whether there is a config.json that says something else of the model than `content` does."""
    try:
        found = read_lenient(path)
    except FormatError:
        return False
    ours = (SECTION, WEIGHTS_KEY, "quantization_config")
    return any(
        key in found and key not in ours and to_json(found[key], path) != to_json(value, path)
        for key, value in json.loads(content).items()
    )


def _is_plain(path: Path) -> bool:
    """Whether a file is one of safetensors that is no container: no damage makes that of one."""
    try:
        with TensorFile(path) as file:
            return not is_container(file)
    except FormatError:
        return False
