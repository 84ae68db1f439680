"""The containers of a run, shared out among ranks.

Every rank makes some files alone. Where there are fewer of them than ranks, or one too many, all ranks code a
part of its tensors into scratch files of their own, one puts the container together, and all check a part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neuzip.errors import NeuzipError
from neuzip.formats.container import Stream
from neuzip.formats.records import Record

from .container_job import ContainerJob
from .encode_ahead import PlannedAndEncoded
from .plan import Plan, PlannedTensor
from .ranks import ALONE, Ranks
from .results import TensorKey, TensorResults
from .resume import ContainerState, container_state
from .schemes import EncodedTensor
from .shares import share_out, split
from .workspace import make_folder, partial_name, scratch_folder, writing

SHARED_FILES = "`source` and `destination` must lie on a file system that all ranks share"
"""Hint for files that ranks do not see alike."""

OnFile = Callable[[str, Path], None]
"""on_file(file, path): a container of the checkpoint is at `path`, in the workspace."""


@dataclass(frozen=True)
class _ParkedTensor:
    """A tensor's record, and where in a scratch file its streams are: start and length in bytes."""

    record: Record
    path: Path
    streams: Mapping[str, tuple[int, int]]

    def load(self) -> EncodedTensor:
        """The record and the streams themselves. Raises NeuzipError when the file is not all there."""
        streams = {}
        for name, (start, nbytes) in self.streams.items():
            dtype = np.uint16 if self.record.stream_dtypes[name] == "U16" else np.uint8
            part = np.fromfile(self.path, dtype, nbytes // dtype().itemsize, offset=start)
            if part.nbytes != nbytes:
                raise NeuzipError(f"{self.path}: is not what another rank wrote", SHARED_FILES)
            streams[name] = Stream([part])
        return EncodedTensor(self.record, streams)


@dataclass(frozen=True)
class RankJob:
    """This rank's part in making the containers of a checkpoint. All ranks make the same calls.

    `on_file` is told of each container that gets its final name; it needs one process.
    """

    container: ContainerJob
    plan: Plan
    ranks: Ranks = ALONE
    on_file: OnFile | None = None

    def scratch(self, path: Path) -> Path:
        """Where ranks write what has not its final name yet: a new folder for every run.

        Ranks of an earlier run that are slow to end cannot get between those of this one.
        """
        return scratch_folder(path) if self.ranks.world > 1 else path

    def share(self, results: TensorResults) -> None:
        """Add to `results` what the other ranks have found out."""
        for other in self.ranks.all_gather(results):
            results.update(other)

    def states(self, files: Sequence[str], folder: Path, results: TensorResults) -> dict[str, ContainerState]:
        """The states of some containers below `folder`; every rank looks at a part of them."""
        ranks = self.ranks
        own = files[ranks.rank :: ranks.world]
        states = {f: container_state(self.container, f, folder / f, results) for f in own}
        return {file: state for part in ranks.all_gather(states) for file, state in part.items()}

    def make(self, targets: Mapping[str, Path], scratch: Path, results: TensorResults) -> None:
        """Make the containers of some files, under their final names."""
        ranks, source = self.ranks, self.container.source
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
                self.container.make(file, self.plan.of_file(file), temporary[file], results)
                os.replace(temporary[file], targets[file])
            if self.on_file is not None:
                self.on_file(file, targets[file])
        if together:
            keys = {(f, t.name): t.info.nbytes for f in together for t in source.tensors(f)}
            own = split(keys, [sum(sizes[f] for f in part) for part in alone])[ranks.rank]
            shared = {file: targets[file] for file in together}
            self._make_together(shared, temporary, own, scratch / f"rank-{ranks.rank}", results)

    def _make_folder_of(self, file: str, target: Path) -> None:
        make_folder(target.parent, (self.container.source.checkpoint.root / file).parent)

    def _make_together(
        self,
        targets: Mapping[str, Path],
        temporary: Mapping[str, Path],
        own: AbstractSet[TensorKey],
        scratch: Path,
        results: TensorResults,
    ) -> None:
        """Make files of which each rank codes and checks a part: this one its `own` tensors in `scratch`."""
        ranks, container, files = self.ranks, self.container, list(targets)
        owned = files[ranks.rank :: ranks.world]
        planned = [t for f in files for t in self.plan.of_file(f) if (f, t.tensor.name) in own]
        parked: dict[TensorKey, _ParkedTensor] = {}
        for part in ranks.all_gather(self._park(planned, scratch, results)):
            parked |= part
        results.records.update({key: p.record for key, p in parked.items()})
        for file in owned:
            of_file = self.plan.of_file(file)
            with writing(targets[file]):
                container.write(file, of_file, temporary[file], _fetched(of_file, parked), results)
        ranks.barrier()
        if container.verify:
            for file in files:
                names = {name for f, name in own if f == file}
                container.check(file, temporary[file], container.on_bytes, names)
        ranks.barrier()
        for file in owned:
            with writing(targets[file]):
                self._make_folder_of(file, targets[file])
                os.replace(temporary[file], targets[file])

    def _park(
        self, planned: Sequence[PlannedTensor], path: Path, results: TensorResults
    ) -> dict[TensorKey, _ParkedTensor]:
        """Code this rank's part of the files that all ranks make, into a scratch file of its own."""
        parked: dict[TensorKey, _ParkedTensor] = {}
        with writing(path), open(path, "wb") as out:
            for planned_tensor, encoded in self.container.encode(planned):
                tensor = planned_tensor.tensor
                results.add(tensor, encoded)
                places: dict[str, tuple[int, int]] = {}
                for name, stream in encoded.streams.items():
                    places[name] = out.tell(), stream.nbytes
                    for part in stream.parts:
                        out.write(part.data)
                parked[tensor.file, tensor.name] = _ParkedTensor(encoded.record, path, places)
        return parked


def _fetched(
    planned: Sequence[PlannedTensor], parked: Mapping[TensorKey, _ParkedTensor]
) -> Iterator[PlannedAndEncoded]:
    """The tensors of a file, as all ranks have coded them."""
    for tensor in planned:
        if tensor.alias_of is None:
            yield tensor, parked[tensor.tensor.file, tensor.tensor.name].load()
