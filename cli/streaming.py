"""--stream and --push-to of neuzip compress: from the Hub, to the Hub, shard by shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from neuzip.cli.compression_result import PLAN_SPARE, alike, planned, result_of
from neuzip.cli.output import Output
from neuzip.cli.schemes import legend, scheme_text
from neuzip.cli.source import refuse_before_download, resolved
from neuzip.cli.text import bytes_text, count_text
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.compress import CompressionReport, Rule
    from neuzip.compress.hub_job import StreamPlan
    from neuzip.formats.hub.draft import Draft
    from neuzip.formats.hub.push import Pushed


class Report(Protocol):
    """What shows a report and gives the JSON object: compress.py's own."""

    def __call__(
        self, out: Output, report: CompressionReport, more: Mapping[str, object], *, where: str | None
    ) -> None: ...


@dataclass(frozen=True)
class Asked:
    """The options as they were given; `push_to` is a repository, perhaps with a branch."""

    stream: bool
    push_to: str | None
    private: bool
    allow_private_files: bool


def understand(
    stream: bool, push_to: str | None, private: bool, allow_private_files: bool, others: Mapping[str, bool]
) -> Asked | None:
    """What was asked for, or None if it was neither. `others` are options that exclude it, if given.

    Raises UsageError.
    """
    if not stream and push_to is None:
        return None
    option = "--stream" if stream else "--push-to"
    for other, given in others.items():
        if given:
            raise UsageError(
                f"{option} and {other} exclude each other",
                "compress first, then: neuzip push DST REPO_ID"
                if push_to is not None and not stream
                else "leave out --stream; the whole checkpoint is then downloaded first",
            )
    return Asked(stream, push_to, private, allow_private_files)


def run(
    out: Output,
    asked: Asked,
    src: str,
    dst: Path,
    rules: Sequence[Rule],
    report: Report,
    *,
    jobs: int | None,
    overwrite: bool,
    device: Literal["auto", "cpu", "cuda"],
    allow_destructive: bool,
    activations: str | None,
    dry_run: bool,
) -> None:
    """Do it, and report. Ctrl-C ends it at once: a run that was killed goes on. Raises NeuzipError."""
    from neuzip.cli.interrupt import leaving_at_once
    from neuzip.compress.hub_job import plan_stream
    from neuzip.formats.hub.draft import Draft, parse_target

    draft = None if asked.push_to is None else Draft(parse_target(asked.push_to), out.status)
    more: dict[str, Any] = {"jobs": jobs, "overwrite": overwrite, "allow_destructive": allow_destructive}
    more["activations"] = activations
    with leaving_at_once():
        if not asked.stream:
            assert draft is not None
            _push_as_ready(out, asked, draft, src, dst, rules, report, device, more)
            return
        if draft is None and not dry_run:
            refuse_before_download(src, dst, overwrite)
        plan = plan_stream(src, dst, rules, note=out.status)
        if dry_run:
            _show(out, plan, src, dst, asked)
            return
        _stream(out, asked, draft, plan, dst, rules, report, device, more)


def _stream(
    out: Output,
    asked: Asked,
    draft: Draft | None,
    plan: StreamPlan,
    dst: Path,
    rules: Sequence[Rule],
    report: Report,
    device: Literal["auto", "cpu", "cuda"],
    more: dict[str, Any],
) -> None:
    from neuzip.compress.device import choose
    from neuzip.compress.hub_job import compress_stream

    chosen = choose(device, plan.weight_bytes)
    with out.progress("compress", plan.weight_bytes) as advance:
        done = compress_stream(
            plan, dst, rules, draft=draft, private=asked.private,
            allow_private_files=asked.allow_private_files, device=chosen, on_bytes=advance,
            note=out.status, **more,
        )  # fmt: skip
    _finish(out, done.compression, report, plan, done.commit, done.pushed, kept=draft is None)


def _push_as_ready(
    out: Output,
    asked: Asked,
    draft: Draft,
    src: str,
    dst: Path,
    rules: Sequence[Rule],
    report: Report,
    device: Literal["auto", "cpu", "cuda"],
    more: dict[str, Any],
) -> None:
    from neuzip.compress.device import choose
    from neuzip.compress.draft_job import compress_and_push
    from neuzip.compress.source import weight_bytes
    from neuzip.formats.hub.connection import require_token

    require_token()
    refuse_before_download(src, dst, more["overwrite"])
    path = resolved(out, src)
    total = weight_bytes(path)
    with out.progress("compress", total) as advance:
        done, pushed = compress_and_push(
            path, dst, rules, draft=draft, private=asked.private,
            allow_private_files=asked.allow_private_files, note=out.status, device=choose(device, total),
            on_bytes=advance, **more,
        )  # fmt: skip
    _finish(out, done, report, None, None, pushed, kept=True)


def _finish(
    out: Output,
    done: CompressionReport,
    report: Report,
    plan: StreamPlan | None,
    commit: str | None,
    pushed: Pushed | None,
    *,
    kept: bool,
) -> None:
    for warning in done.warnings:
        out.warning(warning)
    more: dict[str, object] = {}
    if plan is not None:
        more["stream"] = {"commit": commit, "most_of_source": plan.most_of_source}
    if pushed is not None:
        more["pushed"] = pushed
        if pushed.deleted:
            out.status(f"removed files of the earlier checkpoint there: {', '.join(pushed.deleted)}")
    if kept:
        if pushed is not None:
            out.text(f"pushed: {pushed.url}")
        report(out, done, more, where=None)
    else:
        assert pushed is not None
        report(out, done, more | {"dst": None}, where=pushed.url)


def _show(out: Output, plan: StreamPlan, src: str, dst: Path, asked: Asked) -> None:
    """Print what --stream would do, which it knows from the headers alone."""
    from neuzip.compress.plan import rounds_nothing
    from neuzip.formats.hub.private_files import listed, private_files

    rows = [
        [name, f"{len(group):,}", shape, dtype, scheme, bytes_text(sum(t.tensor.info.nbytes for t in group))]
        for (name, shape, dtype, scheme), group in alike(plan.tensors).items()
    ]
    columns = ["name", "tensors", "shape", "dtype", "scheme", "bytes"]
    out.wider(out.table(columns, rows, right=["tensors", "bytes"], spare=PLAN_SPARE))
    for line in legend(str(t.scheme) for t in plan.tensors):
        out.text(line)
    for (scheme, note), count in Counter((str(t.scheme), t.note) for t in plan.tensors if t.note).items():
        out.text(f"{scheme_text(scheme)}: {count_text(count, 'tensor')}, {note}")
    private = private_files(plan.source.checkpoint)
    for line in listed(private):
        out.warning(f"looks private: {line}")
    most = plan.most_of_source
    result = dst if asked.push_to is None else f"one compressed file, uploaded to {asked.push_to}"
    out.text(
        f"all files: {bytes_text(plan.original_bytes)} at commit {plan.remote.commit}\n"
        f"on disk at a time: two weight files, at most {bytes_text(most)}, and {result}"
    )
    out.result(
        result_of(
            dry_run=True, src=src, dst=dst if asked.push_to is None else None,
            original_bytes=plan.original_bytes, stored_bytes=None, weight_bytes=plan.weight_file_bytes,
            stored_weight_bytes=None, weights=sum(t.tensor.info.numel for t in plan.tensors),
            lossless=rounds_nothing(plan.tensors), tensors=planned(plan.tensors), private_files=list(private),
            more={"stream": {"commit": plan.remote.commit, "most_of_source": most}},
        ),
        quiet=[most],
    )  # fmt: skip
