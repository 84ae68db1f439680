"""From checkpoint to compressed checkpoint, file by file, never more than a tensor in memory.

A killed run resumes with the files that are not finished. What was finished is compared with the source
again before it is believed, and so is a result that is there already: weights decoded, all other files by
their bytes. What is damaged or missing in it is made again; what people may have edited is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from neuzip.errors import NeuzipError, UsageError

from .bitnet import online_config
from .container_job import ContainerJob
from .delta_base import DeltaBase
from .device import CPU, Device
from .encode_tensor import TensorEncoder
from .entry_checks import refuse_other, require_config, require_plain
from .overwrite_guard import refuse_existing
from .plan import make_plan
from .prepared import PreparedCodes
from .progress import OnBytes, ignore
from .rank_job import SHARED_FILES, OnFile, RankJob
from .ranks import ALONE, Ranks
from .reports import CompressionReport, compression_report
from .results import RunOutcome, TensorResults
from .resume import SCRATCH_PATH, claim_workspace
from .rules import LOSSLESS, Rule
from .run_identity import is_of_run, run_identity
from .side_files import SideFiles
from .single_file_job import compress_file
from .sources.folder import FolderSource
from .sources.source import TensorSource
from .workers import Workers
from .workspace import partial_name, publish, recover, remove_scratch, sync_folder, workspace, writing

DEFAULT_RULES = (Rule("*", LOSSLESS),)


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
    prepared: PreparedCodes | None = None,
) -> CompressionReport:
    """Compress a checkpoint: a folder, or a single .safetensors file.

    Files and folders get the permission bits of those of `src`, as far as the umask leaves them. With
    `verify` every file is read back, decoded and compared before it gets its final name. `on_bytes` is
    told of weights done, as bytes of the original; with `verify` of half of a tensor when it is coded, and of
    the rest when it was compared. All `ranks` of a `ranks.joined()` make the same call; rank 0's `on_bytes`
    is told for all, `jobs` are the threads of each. The bytes are the same on any `device`.
    `allow_destructive` lets ternary schemes round weights that are not ternary; `activations` is the mode
    that config.json says for ternary weights (runtime/activations.py). `on_file` is told of each container
    that gets its final name; it needs one process. With a `base` what is stored is a delta: of every tensor
    the lesser of its difference from the base's and of what it takes alone. `prepared` has codes of tensors
    that rules quantize; it needs one process, and no `base`. Raises NeuzipError.
    """
    assert on_file is None or ranks.world == 1
    if prepared is not None:
        _require_one_process(ranks, base)
    began = time.monotonic()
    dst = Path(dst)
    with FolderSource(src) as source, Workers(jobs or device.jobs(ranks.jobs)) as workers:
        require_plain(source, dst)
        require_config(source, activations)
        base_sizes = base.sizes() if base is not None else None
        identity = run_identity(
            rules, source.checkpoint, source.file_bytes, activations, base_sizes,
            None if prepared is None else prepared.identity,
        )  # fmt: skip
        ranks.on_first(lambda: refuse_other(source, dst, overwrite, identity))
        plan = ranks.on_first(lambda: make_plan(source, rules, workers, allow_destructive=allow_destructive))
        _require_shared_source(source, identity, ranks)
        encoder = TensorEncoder(source, device, base, online_config(source), prepared)
        container = ContainerJob(source, encoder, workers, device, base, verify, ranks.counting(on_bytes))
        job = RankJob(container, plan, ranks, on_file)
        if source.checkpoint.is_file:
            outcome = compress_file(job, dst, overwrite)
        else:
            outcome = FolderJob(job, identity, activations).run(dst, overwrite)
        return ranks.on_first(
            lambda: compression_report(
                source, plan, dst, outcome, device.name, time.monotonic() - began, is_delta=base is not None
            )
        )


def _require_one_process(ranks: Ranks, base: DeltaBase | None) -> None:
    """Raise UsageError for prepared codes where several processes share the work, or a delta is made."""
    if ranks.world > 1:
        raise UsageError(
            f"prepared codes are in the memory of one process, and there are {ranks.world}",
            "run it without torchrun",
        )
    if base is not None:
        raise UsageError("`base` excludes prepared codes: a delta is always exact", "leave one of them out")


def _require_shared_source(source: TensorSource, identity: bytes, ranks: Ranks) -> None:
    """Raise NeuzipError if rank 0 has another source than this one."""
    if ranks.on_first(lambda: identity) != identity:
        raise NeuzipError(
            f"{source.checkpoint.path}: rank {ranks.rank} has not the same files as rank 0", SHARED_FILES
        )


@dataclass(frozen=True)
class FolderJob:
    """The compression of a folder: weights, then everything else, then the name."""

    job: RankJob
    identity: bytes
    activations: str | None = None

    def run(self, dst: Path, overwrite: bool) -> RunOutcome:
        """Make the result, or mend one that is there. Raises NeuzipError."""
        ranks = self.job.ranks

        def is_begun() -> bool:
            recover(dst)
            return dst.exists() and not overwrite and is_of_run(dst, self.identity)

        if ranks.on_first(is_begun):
            outcome = self._mended(dst)
            if outcome is not None:
                return outcome
        ranks.on_first(lambda: refuse_existing(dst, overwrite))
        # Rank 0 holds the lock for all.
        root = self.job.container.source.checkpoint.root
        with workspace(dst, root) if ranks.is_first else nullcontext(partial_name(dst)) as work:
            outcome = self._make(work, overwrite)
            if ranks.is_first:
                with writing(work):
                    remove_scratch(work / SCRATCH_PATH)
                    self._side_files(outcome.results).write(work)
                publish(work, dst)
        return outcome

    def _make(self, work: Path, overwrite: bool) -> RunOutcome:
        """Make the containers that are missing in a workspace."""
        ranks, checkpoint = self.job.ranks, self.job.container.source.checkpoint
        results = TensorResults()

        def begin() -> tuple[Path, list[str]]:
            present = claim_workspace(work, self.identity, checkpoint.weights, overwrite)
            with writing(work):
                return self.job.scratch(work / SCRATCH_PATH), present

        scratch, present = ranks.on_first(begin)
        if not is_of_run(work, self.identity):
            raise NeuzipError(
                f"{work}: rank {ranks.rank} does not find there what rank 0 wrote", SHARED_FILES
            )
        states = self.job.states(present, work, results)
        for file, state in states.items():
            if state == "other" and not overwrite:
                raise NeuzipError(
                    f"{work / file}: was made from another {checkpoint.root / file}",
                    "if the source has changed, give `overwrite=True` to begin anew",
                )
        finished = {file for file, state in states.items() if state == "whole"}
        missing = {file: work / file for file in checkpoint.weights if file not in finished}
        self.job.make(missing, scratch, results)
        self.job.share(results)
        return RunOutcome(results, resumed_files=len(finished))

    def _mended(self, dst: Path) -> RunOutcome | None:
        """Make a result what this run would make: whatever of it is damaged or missing is made again.

        None if it was made from a source with other contents; then nothing in it is touched. Raises
        WouldOverwrite, and touches nothing either, if people may have edited files beside the containers.
        """
        ranks, files = self.job.ranks, self.job.container.source.checkpoint.weights
        results = TensorResults()
        states = self.job.states(files, dst, results)
        if "other" in states.values() or not ranks.on_first(
            lambda: self._side_files(results).are_of_source(dst)
        ):
            return None
        self.job.share(results)
        ranks.on_first(lambda: self._side_files(results).refuse_edited(dst))
        broken = [file for file in files if states[file] == "damaged"]
        made_again: tuple[str, ...] = ()
        if broken or ranks.on_first(lambda: sorted(self._side_files(results).amiss(dst))):
            made_again = self._mend(dst, broken, results)
        return RunOutcome(results, len(files) - len(broken), made_again)

    def _mend(self, dst: Path, broken: Sequence[str], results: TensorResults) -> tuple[str, ...]:
        """Make some containers of a result again, and all that is amiss beside them, each in one step.

        The paths of what was made again; on ranks other than the first, none.
        """
        ranks = self.job.ranks

        def begin() -> Path:
            with writing(dst):
                remove_scratch(dst / SCRATCH_PATH)
                return self.job.scratch(dst / SCRATCH_PATH)

        # The workspace is there for its lock alone.
        with workspace(dst) if ranks.is_first else nullcontext(partial_name(dst)) as work:
            scratch = ranks.on_first(begin)
            self.job.make({file: dst / file for file in broken}, scratch, results)
            self.job.share(results)
            if not ranks.is_first:
                return ()
            with writing(dst):
                remove_scratch(dst / SCRATCH_PATH)
                amiss = self._side_files(results).amiss(dst)
                for place, file in amiss.items():
                    file.put(dst / place)
                for folder in {(dst / place).parent for place in (*broken, *amiss)}:
                    sync_folder(folder)
            with suppress(OSError):  # it is not empty where a run with --overwrite was killed
                work.rmdir()
            return tuple(sorted({*broken, *amiss}))

    def _side_files(self, results: TensorResults) -> SideFiles:
        container = self.job.container
        checkpoint = container.source.checkpoint
        base_name = container.base.name if container.base is not None else None
        return SideFiles(checkpoint, results.by_file(checkpoint.weights), self.activations, base_name)
