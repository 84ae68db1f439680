"""What `neuzip compress --stream` would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuzip.cli.compressing.options import CompressOptions
from neuzip.cli.output import Output
from neuzip.cli.show.components import show_components
from neuzip.cli.show.compression import (
    PLAN_SPARE,
    alike,
    compression_json,
    planned_components,
    planned_json,
    show_notes,
)
from neuzip.cli.show.schemes import legend
from neuzip.cli.text import bytes_text

if TYPE_CHECKING:
    from neuzip.compress.hub_job import StreamPlan


def show_stream_plan(out: Output, plan: StreamPlan, options: CompressOptions) -> None:
    """Say what --stream would do, which it knows from the headers alone."""
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
    show_notes(out, plan.tensors)
    parts = planned_components(plan.tensors)
    show_components(out, parts)
    private = private_files(plan.source.checkpoint)
    for line in listed(private):
        out.warning(f"looks private: {line}")
    most, dst = plan.most_of_source, options.dst
    result = dst if options.push_to is None else f"one compressed file, uploaded to {options.push_to}"
    out.text(
        f"all files: {bytes_text(plan.original_bytes)} at commit {plan.remote.commit}\n"
        f"on disk at a time: two weight files, at most {bytes_text(most)}, and {result}"
    )
    out.result(
        compression_json(
            dry_run=True, src=options.src, dst=dst if options.push_to is None else None,
            original_bytes=plan.original_bytes, stored_bytes=None, weight_bytes=plan.weight_file_bytes,
            stored_weight_bytes=None, weights=sum(t.tensor.info.numel for t in plan.tensors),
            lossless=rounds_nothing(plan.tensors), tensors=planned_json(plan.tensors),
            components=parts, private_files=list(private),
            more={"stream": {"commit": plan.remote.commit, "most_of_source": most}},
        ),
        quiet=[most],
    )  # fmt: skip
