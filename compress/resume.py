"""What an earlier run has left: whose a workspace is, and what each container in it, or in a result, is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from neuzip.errors import FormatError, NeuzipError, VerificationError
from neuzip.formats.checkpoint import OWN_FOLDER
from neuzip.formats.container import Container, is_container
from neuzip.formats.safetensors_file import TensorFile

from .container_job import ContainerJob
from .pieces import digest
from .progress import OnBytes
from .results import TensorResults
from .run_identity import RUN_ID_PATH, is_of_run
from .workspace import files_in, partial_name, remove, remove_scratch, write_file, writing

SCRATCH_PATH = f"{OWN_FOLDER}/scratch"
"""Where in a workspace the ranks put what has not its final name yet."""

ContainerState = Literal["whole", "damaged", "other"]
"""State of a container of an earlier run: what this run would make, damaged, or made from another source."""


def claim_workspace(work: Path, identity: bytes, weights: Sequence[str], overwrite: bool) -> list[str]:
    """Begin a run in `work`, or go on with one: which of its `weights` are there. Raises NeuzipError."""
    path = work / RUN_ID_PATH
    if path.exists() and not is_of_run(work, identity):
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
            write_file(path, identity)
    with writing(work):
        remove_scratch(work / SCRATCH_PATH)
        for file in weights:
            partial_name(work / file).unlink(missing_ok=True)
        present = {p.relative_to(work).as_posix() for p in files_in(work)}
        return [file for file in weights if file in present]


def container_state(job: ContainerJob, file: str, path: Path, results: TensorResults) -> ContainerState:
    """What the container of a weight file at `path` is. Its records go into `results`.

    The job's `on_bytes` is told of it as of one that was made; of one that is made again, that is taken back.
    """
    counted = 0

    def count(nbytes: int) -> None:
        nonlocal counted
        counted += nbytes
        job.on_bytes(nbytes)

    state = _compared(job, file, path, results, count)
    if state != "whole":
        job.on_bytes(-counted)
    return state


def _compared(
    job: ContainerJob, file: str, path: Path, results: TensorResults, on_bytes: OnBytes
) -> ContainerState:
    """The state of a container, by its records first and then by all its tensors."""
    source = job.source
    try:
        with Container(path, delta=job.is_delta) as container:
            if container.original.raw != source.header(file).raw:
                return "other"
            records = container.manifest.tensors
    except FormatError:
        return "other" if _is_plain(path) else "damaged"
    for tensor in source.tensors(file):
        record = results.records[file, tensor.name] = records[tensor.name]
        if digest(source.reader(tensor), tensor.info.nbytes) != (record.original or record.checksum):
            return "other"
        on_bytes(job.coded_part(tensor))
    return "whole" if passes_check(job, file, path, on_bytes) else "damaged"


def passes_check(job: ContainerJob, file: str, path: Path, on_bytes: OnBytes) -> bool:
    """Whether a container decodes to the weight file that it was made of."""
    try:
        job.check(file, path, on_bytes)
    except (FormatError, VerificationError):
        return False
    return True


def _is_plain(path: Path) -> bool:
    """Whether a file is one of safetensors that is no container: no damage makes that of one."""
    try:
        with TensorFile(path) as file:
            return not is_container(file)
    except FormatError:
        return False
