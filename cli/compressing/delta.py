"""--base of neuzip compress: only the difference to another checkpoint is stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.compressing.options import CompressOptions
from neuzip.cli.output import Output
from neuzip.cli.show.compression import show_report
from neuzip.cli.show.delta import show_stored
from neuzip.cli.source import refuse_before_download, resolved
from neuzip.errors import shell

if TYPE_CHECKING:
    from neuzip.compress import Rule


def make_delta(out: Output, options: CompressOptions, base: str, rules: Sequence[Rule]) -> None:
    """Make a delta, and report it. Raises NeuzipError."""
    from neuzip.compress.delta_base import name_of
    from neuzip.compress.delta_job import compress_delta
    from neuzip.compress.device import choose
    from neuzip.compress.sources.folder import weight_bytes

    dst = options.dst
    refuse_before_download(options.src, dst, options.overwrite)
    path = resolved(out, options.src)
    of_base = resolved(out, base)
    name = name_of(of_base, base)
    report = compress_delta(
        path, of_base, dst, name, rules, verify=options.verify, jobs=options.jobs,
        overwrite=options.overwrite, device=choose(options.device, weight_bytes(path)), stage=out.progress,
    )  # fmt: skip
    for warning in report.warnings:
        out.warning(warning)
    show_stored(out, report, name)
    show_report(out, report, {"base": of_base, "base_name": name}, verified=options.verify)
    out.hint(f"to restore it: {shell('neuzip', 'apply', dst, '--base', base, 'DST')}")


def is_delta(path: str | Path) -> bool:
    """Whether a checkpoint is a delta, as `compress --base` makes them."""
    from neuzip.compress.sources.folder import FolderSource

    with FolderSource(path, allow_delta=True) as source:
        return source.is_delta
