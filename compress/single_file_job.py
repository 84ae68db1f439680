"""From one .safetensors file to one container; a finished one is recognised by coding it again."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from neuzip.errors import FormatError
from neuzip.formats.container import Container

from .overwrite_guard import refuse_existing
from .rank_job import RankJob
from .results import RunOutcome, TensorResults
from .resume import passes_check
from .workspace import file_workspace, partial_name, publish_file, remove_scratch, writing


def compress_file(job: RankJob, dst: Path, overwrite: bool) -> RunOutcome:
    """Compress the one file of a source to the file `dst`. Raises NeuzipError."""
    ranks, partial = job.ranks, partial_name(dst)
    (file,) = job.container.source.checkpoint.weights
    results = TensorResults()

    def begin() -> Path | None:
        with writing(dst):
            remove_scratch(partial)
        if dst.exists() and not overwrite and _is_made(job, file, dst, results):
            return None
        refuse_existing(dst, overwrite, file=True)
        with writing(dst):
            return job.scratch(partial)

    # Rank 0 holds the lock for all.
    with file_workspace(dst, overwrite) if ranks.is_first else nullcontext(partial) as work:
        scratch = ranks.on_first(begin)
        if scratch is None:
            return RunOutcome(results, resumed_files=1)
        job.make({file: work / dst.name}, scratch, results)
        ranks.barrier()
        if ranks.is_first:
            publish_file(work, dst)
            with writing(dst):
                remove_scratch(partial)
    return RunOutcome(results)


def _is_made(job: RankJob, file: str, dst: Path, results: TensorResults) -> bool:
    """Whether the file `dst` is intact, and has the checksums that this run would write."""
    container = job.container
    try:
        with Container(dst, delta=container.is_delta) as existing:
            records = existing.manifest.tensors
    except FormatError:
        return False
    planned = job.plan.of_file(file)
    for tensor, encoded in container.encode(planned):
        if records.get(tensor.tensor.name) != encoded.record:
            return False
        results.add(tensor.tensor, encoded)
    for tensor in planned:
        if tensor.alias_of is None:
            continue
        if records.get(tensor.tensor.name) != container.alias_record(tensor, results):
            return False
    return passes_check(container, file, dst, container.on_bytes)
