"""--stream and --push-to of neuzip compress: from the Hub, to the Hub, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from neuzip.cli.compressing.options import CompressOptions
from neuzip.cli.output import Output
from neuzip.cli.show.compression import show_report
from neuzip.cli.show.stream import show_stream_plan
from neuzip.cli.source import refuse_before_download, resolved

if TYPE_CHECKING:
    from neuzip.compress import CompressionReport, Rule
    from neuzip.compress.hub_job import StreamPlan
    from neuzip.formats.hub.draft import Draft
    from neuzip.formats.hub.push import Pushed


def compress_on_hub(out: Output, options: CompressOptions, rules: Sequence[Rule]) -> None:
    """Compress from the Hub, to the Hub or both, and report. Raises NeuzipError.

    Ctrl-C ends it at once, because a run that was killed goes on.
    """
    from neuzip.cli.interrupt import leaving_at_once
    from neuzip.compress.hub_job import plan_stream
    from neuzip.formats.hub.draft import Draft, parse_target

    draft = None if options.push_to is None else Draft(parse_target(options.push_to), out.status)
    with leaving_at_once():
        if not options.stream:
            assert draft is not None
            _push_as_ready(out, options, draft, rules)
            return
        if draft is None and not options.dry_run:
            refuse_before_download(options.src, options.dst, options.overwrite)
        plan = plan_stream(options.src, options.dst, rules, note=out.status)
        if options.dry_run:
            show_stream_plan(out, plan, options)
            return
        _stream(out, options, draft, plan, rules)


def _stream(
    out: Output, options: CompressOptions, draft: Draft | None, plan: StreamPlan, rules: Sequence[Rule]
) -> None:
    from neuzip.compress.device import choose
    from neuzip.compress.hub_job import compress_stream

    coder = choose(options.device, plan.weight_bytes)
    with out.progress("compress", plan.weight_bytes) as advance:
        streamed = compress_stream(
            plan, options.dst, rules, draft=draft, private=options.private,
            allow_private_files=options.allow_private_files, device=coder, on_bytes=advance,
            note=out.status, jobs=options.jobs, overwrite=options.overwrite,
            allow_destructive=options.request.allow_destructive, activations=options.request.activations,
        )  # fmt: skip
    stream = {"commit": streamed.commit, "most_of_source": plan.most_of_source}
    _report(out, streamed.compression, streamed.pushed, {"stream": stream}, stays_here=draft is None)


def _push_as_ready(out: Output, options: CompressOptions, draft: Draft, rules: Sequence[Rule]) -> None:
    from neuzip.compress.device import choose
    from neuzip.compress.draft_job import compress_and_push
    from neuzip.compress.sources.folder import weight_bytes
    from neuzip.formats.hub.connection import require_token

    require_token()
    refuse_before_download(options.src, options.dst, options.overwrite)
    path = resolved(out, options.src)
    total = weight_bytes(path)
    with out.progress("compress", total) as advance:
        report, pushed = compress_and_push(
            path, options.dst, rules, draft=draft, private=options.private,
            allow_private_files=options.allow_private_files, note=out.status,
            device=choose(options.device, total), on_bytes=advance, jobs=options.jobs,
            overwrite=options.overwrite, allow_destructive=options.request.allow_destructive,
            activations=options.request.activations,
        )  # fmt: skip
    _report(out, report, pushed, {}, stays_here=True)


def _report(
    out: Output,
    report: CompressionReport,
    pushed: Pushed | None,
    more: Mapping[str, object],
    *,
    stays_here: bool,
) -> None:
    """Say what was compressed and pushed; `stays_here` tells whether DST holds the result."""
    for warning in report.warnings:
        out.warning(warning)
    if pushed is not None:
        more = {**more, "pushed": pushed}
        if pushed.deleted:
            out.status(f"removed files of the earlier checkpoint there: {', '.join(pushed.deleted)}")
    if not stays_here:
        assert pushed is not None
        show_report(out, report, {**more, "dst": None}, page=pushed.url)
        return
    if pushed is not None:
        out.text(f"pushed: {pushed.url}")
    show_report(out, report, more)
