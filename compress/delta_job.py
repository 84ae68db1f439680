"""From two checkpoints of one family to a delta: what it takes to make one from the other, its base."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from neuzip.errors import NeuzipError

from .checkpoint_job import DEFAULT_RULES, compress
from .delta_base import DeltaBase
from .device import CPU, Device
from .entry_checks import refuse_other_file, refuse_unless_made
from .overwrite_guard import refuse_existing, refuse_nesting, require_name
from .progress import Stage, unseen
from .reports import CompressionReport
from .restore import decompress
from .rules import Rule
from .sources.folder import FolderSource, weight_bytes
from .workspace import recover, remove, writing


def compress_delta(
    new: str | os.PathLike[str],
    old: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    name: str,
    rules: Sequence[Rule] = DEFAULT_RULES,
    *,
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
    device: Device = CPU,
    stage: Stage = unseen,
) -> CompressionReport:
    """Store a checkpoint as a delta of `old`, its base, called `name`. Either may be compressed.

    A compressed `new` is restored beside `dst` first, and what was restored removed in the end. Raises
    NeuzipError.
    """
    dst = Path(dst)
    with FolderSource(old, device) as source:
        refuse_nesting(source.checkpoint.path, dst)
        refuse_nesting(source.checkpoint.path, Path(new))
        with (
            _uncompressed(Path(new), dst, overwrite, jobs, device, stage) as path,
            stage("compress", weight_bytes(path)) as advance,
        ):
            report = compress(
                path, dst, rules, verify=verify, jobs=jobs, overwrite=overwrite, device=device,
                on_bytes=advance, base=DeltaBase(source, name),
            )  # fmt: skip
    return replace(report, src=Path(new))


@contextmanager
def _uncompressed(
    new: Path, dst: Path, overwrite: bool, jobs: int | None, device: Device, stage: Stage
) -> Iterator[Path]:
    """The path of `new`, or of what it restores to if it is compressed.

    What was restored is removed when all went well; a run that fails or is killed leaves it to the next.
    """
    with FolderSource(new) as source:
        if not source.is_compressed:
            yield new
            return
        refuse_nesting(source.checkpoint.path, dst)
        require_name(dst)
        if source.checkpoint.is_file:
            refuse_other_file(source, dst, overwrite)
        else:
            recover(dst)
            if overwrite:
                refuse_existing(dst, overwrite)
            else:
                refuse_unless_made(dst, overwrite)
    restored = dst.with_name(f"{dst.name}.neuzip-new{new.suffix if new.is_file() else ''}")
    with writing(dst):
        dst.parent.mkdir(parents=True, exist_ok=True)
    with stage("restore source", weight_bytes(new)) as advance:
        report = decompress(
            new, restored, jobs=jobs, overwrite=restored.is_file(), device=device, on_bytes=advance
        )
    if not report.lossless:
        remove(restored)
        raise NeuzipError(
            f"{new}: is rounded, so what it restores to is not what was compressed", "give the original"
        )
    yield restored
    remove(restored)
