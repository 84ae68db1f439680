"""neuzip compress: make a checkpoint smaller."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from neuzip.cli import deltas, options, streaming, targets
from neuzip.cli.commands.patch_attention import result_of as attention_result
from neuzip.cli.commands.patch_attention import show
from neuzip.cli.compression_result import PLAN_SPARE, alike, planned, result_of
from neuzip.cli.output import Output
from neuzip.cli.ranks import joined_ranks
from neuzip.cli.schemes import legend, scheme_text
from neuzip.cli.source import refuse_before_download, resolved
from neuzip.cli.text import bytes_text, count_text, percent_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.distribution import require
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.compress import CompressionReport, Rule
    from neuzip.eval.attention import AttentionCalibration

EXAMPLES = [
    "neuzip compress my-model my-model.nz",
    "neuzip compress meta-llama/Llama-3.2-1B llama.nz --dry-run",
    "neuzip compress my-model small -k 3 --block-size 512",
    "neuzip compress my-model small -k 3 --bits-for '*embed*=4'",
    "neuzip compress my-model mixed --plan plan.toml",
    "neuzip compress my-model close --max-kld 0.01",
    "neuzip compress my-model fits --target-size 6GiB --text held-out.txt",
    "neuzip compress my-model shallow --max-kld 0.5 --drop-layers auto",
    "neuzip compress my-model fast --attention auto --text held-out.txt",
    "neuzip compress my-bitnet small --ternary",
    "neuzip compress my-model-tuned tuned.delta --base my-model",
    "torchrun --nproc-per-node 8 --no-python neuzip compress my-model my-model.nz",
    "neuzip compress meta-llama/Llama-3.1-70B 70b.nz --stream --push-to me/70b-nz",
    "",
    "A plan file lists rules; the first one whose glob matches a name applies:",
    "",
    "[[rule]]                      [[rule]]",
    'match = "*embed_tokens*"      match = "*"',
    'scheme = "lossless"           mantissa_bits = 3',
    "",
    'A rule with scheme = "ternary" may also set quantizer, group and packing.',
    "A target writes such a plan to DST.plan.toml.",
]

GROUPS = {
    "Lossy compression (default: lossless)": (
        "mantissa_bits", "bits_for", "block_size", "plan", "include", "exclude",
    ),
    "Choose precision automatically": (
        "max_kld", "max_ppl_increase", "target_size", "text", "sensitivity", "drop_layers",
        "attention",
    ),
    "Ternary weights": (
        "ternary", "ternary_quantizer", "ternary_group", "ternary_packing", "activations",
        "allow_destructive",
    ),
    "Hub and deltas": (
        "stream", "push_to", "private", "allow_private_files", "base",
    ),
}  # fmt: skip

TARGETS = ("--max-kld", "--max-ppl-increase", "--target-size")

NEEDS = {
    "--text": (*TARGETS, "--attention"),
    "--sensitivity": TARGETS,
    "--drop-layers": TARGETS,
    "--block-size": ("--mantissa-bits", "--bits-for", *TARGETS),
    "--ternary-quantizer": ("--ternary",),
    "--ternary-group": ("--ternary",),
    "--ternary-packing": ("--ternary",),
    "--activations": ("--ternary", "--plan"),
    "--allow-destructive": ("--ternary", "--plan"),
    "--private": ("--push-to",),
    "--allow-private-files": ("--push-to",),
}

WORTH_A_WORD = 1 << 16
"""Bytes of a tensor whose unexpected scheme is mentioned; norms and biases are raw as a rule."""

TIED_MEASURED = range(1, 5)
"""Mantissa bits K for which benchmarks/tied_embedding.py has measured what K + 1 for a tied embedding do."""

TIED_WORTH = "weight files of SmolLM2-135M 3 to 5 % larger and its KL divergence 27 to 38 % smaller"
"""What they do, by these K."""

BitsForOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB=K",
        help="Use K mantissa bits for matrices with matching names, for example one bit more for a tied"
        " embedding; repeatable",
    ),
]
BlockSize = Annotated[
    str,
    typer.Option(
        metavar="N|none",
        help="Scale blocks of N weights (8, 16, ... 16384) so the largest is nearly exact; slightly larger"
        " file, often lower error",
    ),
]

TernaryOption = Annotated[
    bool,
    typer.Option(
        "--ternary",
        help="Store linear weights (*layers.*_proj.weight) as -1, 0, 1 times a scale; exact for ternary"
        " models",
    ),
]
QuantizerOption = Annotated[
    Literal["absmean", "absmean-clamped", "least-squares"],
    typer.Option(
        "--ternary-quantizer",
        help="How to round weights that are not ternary yet. Use absmean-clamped for transformers' online"
        " bitnet checkpoints",
    ),
]
GroupOption = Annotated[
    str,
    typer.Option(
        "--ternary-group",
        metavar="N|row|tensor",
        help="Weights per scale: N of a row, a row, or the tensor. Weights that are ternary already keep one"
        " scale per row or tensor",
    ),
]
PackingOption = Annotated[
    Literal["trits", "2bit"],
    typer.Option(
        "--ternary-packing", help="Base-3 packing (5 weights per byte) or 2-bit packing (4 per byte)"
    ),
]
ActivationsOption = Annotated[
    Literal["b1.58", "a4.8", "a4.8-fp4", "none"] | None,
    typer.Option(help="Activation quantisation to record in config.json, for inference"),
]
AttentionOption = Annotated[
    options.AttentionMode | None,
    typer.Option(
        "--attention",
        help="Also choose the attention precision of each layer, as `neuzip patch-attention` does",
    ),
]
DropLayersOption = Annotated[
    str,
    typer.Option(
        metavar="auto|N|none",
        help="Also drop the N least important layers. auto: drop layers as long as the result shrinks or,"
        " with --target-size, comes closer to the original",
    ),
]
StreamOption = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Download, compress and delete a Hub id shard by shard, with at most two shards on disk",
    ),
]
PushToOption = Annotated[
    str | None,
    typer.Option(
        "--push-to",
        metavar="REPO_ID[@BRANCH]",
        help="Upload each file once it is compressed. All files become visible together. With --stream, no"
        " copy remains on this machine",
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="BASE",
        help="Store only the difference from BASE (folder, file or Hub id); `neuzip apply` restores SRC",
        show_default=False,
    ),
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="Create the repository of --push-to as private")
]
DestructiveOption = Annotated[
    bool,
    typer.Option("--allow-destructive", help="Round weights that are not ternary; ruins most models"),
]


def command(
    src: options.SourceArgument,
    dst: options.DestinationArgument,
    mantissa_bits: Annotated[
        int | None,
        typer.Option(
            "--mantissa-bits",
            "-k",
            metavar="K",
            min=0,
            help="Round matrices to K mantissa bits (bf16 has 7)",
        ),
    ] = None,
    bits_for: BitsForOption = None,
    block_size: BlockSize = "none",
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use the per-tensor rules of a TOML file, see below")
    ] = None,
    max_kld: Annotated[
        str | None,
        typer.Option(
            metavar="NATS", help="Smallest result with a mean KL divergence of at most NATS per token"
        ),
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(metavar="P%", help="Smallest result with a perplexity increase of at most P %"),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option(
            metavar="P%|SIZE", help="Best quality with weight files of at most this size: 60%, 6GiB"
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="TEXT",
            help="Text to measure on, as for eval (default: demo)",
        ),
    ] = None,
    sensitivity: Annotated[
        Literal["auto", "measured", "fisher", "weights"],
        typer.Option(
            help="How to estimate per-tensor sensitivity. measured: one run per tensor. fisher: Fisher"
            " information. weights: rounding errors of the weights (with --target-size, no text is needed)."
            " auto: measured on a GPU, fisher on a CPU"
        ),
    ] = "auto",
    drop_layers: DropLayersOption = "none",
    ternary: TernaryOption = False,
    ternary_quantizer: QuantizerOption = "absmean",
    ternary_group: GroupOption = "tensor",
    ternary_packing: PackingOption = "trits",
    activations: ActivationsOption = None,
    attention: AttentionOption = None,
    allow_destructive: DestructiveOption = False,
    include: options.IncludeOption = None,
    exclude: options.ExcludeOption = None,
    base: BaseOption = None,
    stream: StreamOption = False,
    push_to: PushToOption = None,
    private: PrivateOption = False,
    allow_private_files: options.AllowPrivateFilesOption = False,
    dry_run: options.DryRunOption = False,
    verify: Annotated[bool, typer.Option(help="Decode every tensor and compare it with the original")] = True,
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Compress a checkpoint, lossless by default"""
    out = Output(json=json, quiet=quiet)
    from neuzip.eval.plans.target_values import one_goal

    goal = one_goal(max_kld, max_ppl_increase, target_size)
    if goal is not None or attention is not None:
        require(f"`{goal.parameter}`" if goal is not None else "--attention", "torch", "transformers")
        let_threads_sleep()
        out.loading()
    from neuzip.compress import compress, request, scheme
    from neuzip.compress.device import choose
    from neuzip.compress.source import weight_bytes
    from neuzip.eval.plans.target_request import prepare_search, text_for

    with joined_ranks() as ranks:
        out = Output(json=json, quiet=quiet, silent=not ranks.is_first)
        given = request.given(
            mantissa_bits=mantissa_bits, bits_for=bits_for, block_size=block_size != "none", include=include,
            plan=plan, ternary=ternary, activations=activations, allow_destructive=allow_destructive,
            ternary_quantizer=ternary_quantizer != "absmean", ternary_group=ternary_group != "tensor",
            ternary_packing=ternary_packing != "trits", sensitivity=sensitivity != "auto",
            text=text if attention is None else None,
        )  # fmt: skip
        target = None if goal is None else goal.parameter
        request.refuse_contradictions(given, target)
        fewer = targets.layers_to_drop(
            drop_layers, goal, sensitivity=sensitivity,
            excluded="--dry-run" if dry_run else "--attention" if attention is not None else None,
        )  # fmt: skip
        if goal is not None and ranks.world > 1:
            raise UsageError(
                f"`{target}` does not run under torchrun", "run it alone, and pass its plan to --plan here"
            )
        if attention is not None and ranks.world > 1:
            raise UsageError(
                f"--attention {attention} does not run under torchrun",
                "run neuzip patch-attention on the result",
            )
        measured_on = text_for(goal, sensitivity, text, needed=attention is not None or fewer != 0)
        weights = scheme.ternary_of_options(ternary_quantizer, ternary_group, ternary_packing)
        rules = request.rules_of(
            mantissa_bits, "none" if goal is not None else block_size, include or [], exclude or [],
            weights if ternary else None, bits_for or [], plan,
        )  # fmt: skip
        request.refuse_without_ternary(given, rules)
        asked_stream = streaming.understand(
            stream, push_to, private, allow_private_files,
            {
                f"--{goal.kind}" if goal is not None else "a target": goal is not None,
                "--attention": attention is not None, "--no-verify": not verify, "torchrun": ranks.world > 1,
            },
        )  # fmt: skip
        if base is not None:
            deltas.refuse_others(
                {
                    "--mantissa-bits": mantissa_bits is not None, "--bits-for": bool(bits_for),
                    "--plan": plan is not None,
                    "--ternary": ternary,
                    f"--{goal.kind}" if goal is not None else "a target": goal is not None,
                    "--attention": attention is not None, "--stream": stream, "--dry-run": dry_run,
                    "--push-to": push_to is not None, "torchrun": ranks.world > 1,
                }
            )  # fmt: skip
            deltas.run(
                out, src, base, dst, rules, partial(_report, verified=verify),
                verify=verify, jobs=jobs, overwrite=overwrite, device=device,
            )  # fmt: skip
            return
        if asked_stream is not None and (stream or not dry_run):
            streaming.run(
                out, asked_stream, src, dst, rules, _report, jobs=jobs, overwrite=overwrite, device=device,
                allow_destructive=allow_destructive, activations=activations, dry_run=dry_run,
            )  # fmt: skip
            return
        if not dry_run:
            ranks.on_first(lambda: refuse_before_download(src, dst, overwrite))
        path = ranks.first_before_others(lambda: resolved(out, src))
        began = time.monotonic()
        calibrated, more = None, {}
        if attention is not None:
            assert measured_on is not None
            with targets.nothing_kept():
                calibrated = _calibrate(
                    out, path, dst, attention, measured_on, device, overwrite, dry_run,
                    for_target=goal is not None,
                )  # fmt: skip
            more = {"attention": attention_result(calibrated)}
        if goal is not None:
            with targets.nothing_kept():
                asked = prepare_search(
                    goal, path, dst, rules, block_size=scheme.block_size_of(block_size), text=measured_on,
                    sensitivity=sensitivity, device=device, jobs=jobs, overwrite=overwrite,
                    dry_run=dry_run, drop_layers=fewer,
                )  # fmt: skip
                targets.tell(out, asked)
            if dry_run:
                with targets.nothing_kept():
                    found = targets.find(out, asked)
                said = {"target": targets.result_of(asked, found)}
                _show_plan(out, path, dst, found.rules, jobs, said | more)
                return
            delivered = targets.deliver(out, asked, verify=verify, overwrite=overwrite)
            _record(out, dst, calibrated)
            said = {"target": targets.result_of(asked, delivered.search, delivered)}
            report = replace(delivered.report, seconds=time.monotonic() - began)
            _report(out, report, said | more, dropped=bool(delivered.dropped), measured=True, verified=verify)
            raise typer.Exit(0 if delivered.holds else 1)
        if dry_run:
            if ranks.is_first:
                _show_plan(out, path, dst, rules, jobs, more, allow_destructive=allow_destructive)
                _hint_of_tied(out, path, rules, mantissa_bits)
            return
        total = weight_bytes(path)
        chosen = choose(device, total)
        with out.progress("compress", total) as advance:
            report = compress(
                path, dst, rules, verify=verify, jobs=jobs, overwrite=overwrite, device=chosen,
                on_bytes=advance, ranks=ranks, allow_destructive=allow_destructive, activations=activations,
            )  # fmt: skip
        for warning in report.warnings:
            out.warning(warning)
        _record(out, dst, calibrated)
        if calibrated is not None:
            report = replace(report, seconds=time.monotonic() - began)
        _report(out, report, more, measured=calibrated is not None, verified=verify)
        _hint_of_tied(out, path, rules, mantissa_bits)


def _calibrate(
    out: Output,
    path: Path,
    dst: Path,
    mode: options.AttentionMode,
    text: str,
    device: Literal["auto", "cpu", "cuda"],
    overwrite: bool,
    dry_run: bool,
    *,
    for_target: bool,
) -> AttentionCalibration:
    """Measure the attention of the original, if it can be compressed to DST at all, and show the choice."""
    from neuzip.compress.entry_checks import require_plain
    from neuzip.compress.overwrite_guard import refuse_existing
    from neuzip.compress.source import TensorSource
    from neuzip.eval import attention
    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.plans.plan_file import refuse_other_files

    with TensorSource(path) as source:
        require_plain(source, dst)
    if not dry_run:
        (refuse_other_files if for_target else refuse_existing)(dst, overwrite)
    found = attention.calibrate(path, read_text(text), mode, out.stage, device=device)
    show(out, found)
    out.text()
    return found


def _hint_of_tied(out: Output, path: Path, rules: Sequence[Rule], mantissa_bits: int | None) -> None:
    """Say what one bit more for a tied embedding does, if it was given as few bits as all else."""
    from neuzip.compress.scheme import choose
    from neuzip.compress.tied import tied_embedding

    if mantissa_bits is None or mantissa_bits not in TIED_MEASURED:
        return
    name = tied_embedding(path)
    if name is None or choose(rules, name, 2).mantissa_bits != mantissa_bits:
        return
    asked = shlex.quote(f"{name}={mantissa_bits + 1}")
    out.hint(
        f"{name} is a tied embedding, used as output head too: --bits-for {asked} keeps one more bit of it. "
        f"That made {TIED_WORTH}; measure yours with neuzip eval"
    )


def _record(out: Output, dst: Path, calibrated: AttentionCalibration | None) -> None:
    """Write the choice of bits to the config.json of what was compressed."""
    if calibrated is None:
        return
    from neuzip.runtime.hf.attention_config import record_layers

    record_layers(dst, calibrated.bits)
    out.status(f"{dst}: config.json records the attention precision of the layers")


def _report(
    out: Output,
    report: CompressionReport,
    more: Mapping[str, object] | None = None,
    *,
    dropped: bool = False,
    measured: bool = False,
    verified: bool = True,
    where: str | None = None,
) -> None:
    """Show a report, and give it to machines; `where` is the page of what was pushed.

    `verified` says whether every tensor was decoded and compared.

    With `measured` its seconds are those of trials and comparisons too, which say nothing of a speed.
    """
    if report.resumed_files:
        one = report.resumed_files == 1
        how = "was finished already and matches" if one else "were finished already and match"
        out.status(f"{count_text(report.resumed_files, 'file')} {how} the source")
    notes = Counter((t.scheme, t.note) for t in report.tensors if t.note)
    large = {(t.scheme, t.note) for t in report.tensors if t.original_bytes >= WORTH_A_WORD}
    for (scheme, note), count in notes.items():
        if (scheme, note) not in large or any(note in warning for warning in report.warnings):
            continue
        out.status(
            f"stored {scheme_text(scheme)}: {count_text(count, 'tensor')}, {note}; --json has their names"
        )
    lossy = [t.loss for t in report.tensors if t.loss is not None]
    out.table(
        ["", "before", "after", "ratio", "bits/weight"],
        [
            ["weights", bytes_text(report.weight_bytes), bytes_text(report.stored_weight_bytes),
             percent_text(report.stored_weight_bytes, report.weight_bytes), f"{report.bits_per_weight:.2f}"],
            ["all files", bytes_text(report.original_bytes), bytes_text(report.stored_bytes),
             percent_text(report.stored_bytes, report.original_bytes), ""],
        ],
        right=["before", "after", "ratio", "bits/weight"],
    )  # fmt: skip
    if lossy:
        out.text(
            f"{len(lossy)} of {count_text(len(report.tensors), 'tensor')} rounded: "
            f"largest relative error {max(x.max_relative for x in lossy):.3g}, "
            f"largest RMS error {max(x.rms_relative for x in lossy):.3g}"
        )
        norms = [x.relative_l2 for x in lossy if x.relative_l2 is not None]
        if norms:
            out.text(
                f"{len(norms)} of them rounded to ternary: they differ from the original by "
                f"{min(norms):.0%} to {max(norms):.0%} in the L2 norm"
            )
    elif not dropped:
        how = "bit for bit" if verified else "by their schemes; nothing was decoded to verify it"
        out.text(f"lossless: all {count_text(len(report.tensors), 'tensor')}, {how}")
    speed = f" ({bytes_text(report.weight_bytes / report.seconds)}/s)"
    if measured:
        speed = ", planning and measuring included"
    elif report.resumed_files:
        speed = ""
    on = "" if report.device == "cpu" else f" on {report.device}"
    out.text(f"{where or report.dst} in {seconds_text(report.seconds)}{on}{speed}")
    out.result(
        result_of(
            dry_run=False, src=report.src, dst=report.dst, original_bytes=report.original_bytes,
            stored_bytes=report.stored_bytes, weight_bytes=report.weight_bytes,
            stored_weight_bytes=report.stored_weight_bytes, weights=report.weights,
            lossless=not lossy and not dropped, tensors=report.tensors, private_files=report.private_files,
            seconds=report.seconds, device=report.device, resumed_files=report.resumed_files,
            warnings=report.warnings, more=more or {},
        ),
        quiet=[where or report.dst],
    )  # fmt: skip


def _show_plan(
    out: Output,
    path: Path,
    dst: Path,
    rules: Sequence[Rule],
    jobs: int | None,
    more: Mapping[str, object] | None = None,
    *,
    allow_destructive: bool = False,
) -> None:
    from neuzip.compress import make_plan
    from neuzip.compress.entry_checks import require_plain
    from neuzip.compress.plan import rounds_nothing
    from neuzip.compress.source import TensorSource
    from neuzip.compress.workers import Workers
    from neuzip.formats.hub.private_files import listed, private_files

    with TensorSource(path) as source, Workers(jobs) as workers:
        require_plain(source, dst)
        plan = make_plan(source, rules, workers, predict=True, allow_destructive=allow_destructive)
        private = private_files(source.checkpoint)
    for line in listed(private):
        out.warning(f"looks private, and would be copied: {line}")
    predicted = plan.predicted_bytes or 0
    rows = [
        [name, f"{len(group):,}", shape, dtype, scheme, bytes_text(sum(t.tensor.info.nbytes for t in group)),
         percent_text(sum(t.predicted or 0 for t in group), sum(t.tensor.info.nbytes for t in group))]
        for (name, shape, dtype, scheme), group in alike(plan.tensors).items()
    ]  # fmt: skip
    columns = ["name", "tensors", "shape", "dtype", "scheme", "bytes", "predicted"]
    left_out = out.table(columns, rows, right=["tensors", "bytes", "predicted"], spare=PLAN_SPARE)
    out.wider(left_out)
    for line in legend(str(t.scheme) for t in plan.tensors):
        out.text(line)
    if len(rows) < len(plan.tensors):
        out.text("* is any number: tensors of one kind share a row, and --json lists every tensor")
    for (stored, note), count in Counter((str(t.scheme), t.note) for t in plan.tensors if t.note).items():
        out.text(f"{scheme_text(stored)}: {count_text(count, 'tensor')}, {note}")
    predicted_weights = plan.predicted_weight_bytes or 0
    for name, before, after in (
        ("weights", plan.weight_bytes, predicted_weights), ("all files", plan.original_bytes, predicted),
    ):  # fmt: skip
        share = percent_text(after, before)
        out.text(f"{name}: {bytes_text(before)}, predicted {bytes_text(after)} ({share})")
    out.result(
        result_of(
            dry_run=True, src=path, dst=dst, original_bytes=plan.original_bytes, stored_bytes=predicted,
            weight_bytes=plan.weight_bytes, stored_weight_bytes=predicted_weights, weights=plan.weights,
            lossless=rounds_nothing(plan.tensors), tensors=planned(plan.tensors), private_files=list(private),
            more=more or {},
        ),
        quiet=[predicted],
    )  # fmt: skip
