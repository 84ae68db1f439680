"""neuzip eval: perplexity of a checkpoint on a text by all conventions, before and after compression."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from neuzip.cli import options
from neuzip.cli.activations import require_quantisable, warn_of_plain_inputs
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.ranks import joined_ranks
from neuzip.cli.residency import require_device
from neuzip.cli.text import bytes_text, count_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError, shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from neuzip.eval.harness import TaskEvaluation
    from neuzip.eval.measures.convention_names import Name
    from neuzip.eval.measures.conventions import Convention
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.eval.measures.estimates import Estimate
    from neuzip.eval.measures.perplexity import ConventionScores, Evaluation, EvaluationTask, ModelDifference
    from neuzip.eval.report.evaluation import EvaluationReport
    from neuzip.runtime.hf.sparsity import Sparsity

COUNTED_TOKENS = 8192
"""Tokens that the inputs of layers are counted for."""

EVALUATED = (
    "text", "documents", "before", "after", "conventions", "skipped", "compared", "comparison", "device",
    "residency", "memory", "processes", "seconds", "versions",
)  # fmt: skip
"""The keys of `--json` that say what was measured on the text; null without one."""

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip eval my-model.nz --text demo",
    "neuzip eval small --original my-model --text wiki.test.raw",
    "neuzip eval s.nz --text hf://datasets/Salesforce/wikitext/wikitext-2-raw-v1",
    "neuzip eval small --text my-texts --conventions token --window 2048",
    "neuzip eval small --original my-model --text demo --report page.html",
    "neuzip eval my-model --original my-model --text demo --kv-bits 3",
    "neuzip eval my-model --original my-model --text demo --attention 8bit",
    "neuzip eval small --tasks arc_easy,hellaswag --limit 200",
    "torchrun --nproc-per-node 8 --no-python neuzip eval small --text demo",
]

GROUPS = {
    "Text and perplexity": ("text", "original", "conventions", "window", "stride", "max_tokens"),
    "How the model runs": (
        "residency", "activations", "kv_bits", "attention", "dtype", "device", "device_map",
    ),
    "Benchmark tasks": ("tasks", "limit"),
    "Report": ("page", "sweep", "sparsity", "overwrite"),
}  # fmt: skip

NEEDS = {
    **dict.fromkeys(
        ("--conventions", "--window", "--stride", "--max-tokens", "--activations", "--kv-bits",
         "--attention", "--sparsity", "--report"), ("--text",),
    ),
    "--sweep": ("--report",),
    "--overwrite": ("--report",),
    "--limit": ("--tasks",),
}  # fmt: skip


def command(
    src: options.ModelArgument,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",  # typer 0.27 takes a name like its metavar from that: --TEXT
            metavar="TEXT",
            help="Text to predict: UTF-8 file, folder of files, hf://datasets/..., or demo",
            show_default=False,
        ),
    ] = None,
    original: Annotated[
        str | None, typer.Option(metavar="ORIGINAL", help="Also evaluate this checkpoint, and compare")
    ] = None,
    conventions: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Perplexity conventions: token, strided, llama.cpp, lm-eval, bos (default: all)",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens per window (default: 1024, or the model's maximum)"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens between starts of strided windows (default: 512, or half a window)",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use only the first N tokens of the text")
    ] = None,
    device: options.RunDeviceOption = "auto",
    device_map: Annotated[
        Literal["auto", "balanced", "balanced_low_0", "sequential"] | None,
        typer.Option(
            metavar="auto|balanced|...",
            help="Spread each model over all GPUs, as accelerate does",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Compute dtype; auto is float32 for dense weights on a CPU, else the checkpoint's"),
    ] = "auto",
    residency: options.ResidencyOption = "dense",
    activations: options.ActivationsOption = None,
    kv_bits: Annotated[
        options.KvBits | None,
        typer.Option(
            "--kv-bits",
            help="Quantise the KV cache of SRC to N bits",
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        options.Attention,
        typer.Option(
            help="Attention precision of SRC: as recorded in config.json, not quantised (none), or 8- or"
            " 4-bit QK^T"
        ),
    ] = "recorded",
    sparsity: Annotated[
        bool,
        typer.Option(
            "--sparsity", help="Show the share of zero activations (sparsity) at the inputs of linear layers"
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Also write a report: .html, .md or .json"),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Add the results of `neuzip sweep -o DIR` to the report"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Tasks of lm-evaluation-harness: names, patterns or YAML files"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use only the first N documents of each task")
    ] = None,
    overwrite: options.OverwriteFileOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure perplexity on a text, before and after compression"""
    out = Output(json=json, quiet=quiet)
    refuse_contradictions(text, page, sweep, tasks, limit, kv_bits, attention)
    mode = require_quantisable(activations, residency)
    if mode is not None and tasks is not None:
        raise UsageError(
            f"--activations {mode} does not apply to --tasks, which follow config.json",
            "leave out --activations or --tasks",
        )
    names = chosen_conventions(conventions)
    if stride is not None and names is not None and "strided" not in names:
        raise UsageError(
            f"--stride {stride} has no effect with --conventions {conventions}",
            "add strided to --conventions, or leave out --stride",
        )
    let_threads_sleep()
    out.loading()
    if device_map is None:
        require_device(device, residency)
    if tasks is not None:
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the harness; tqdm reads it once
        from neuzip.eval import harness
    if page is not None:
        from neuzip.eval.report import page as report_page

        report_page.check_target(page, overwrite)
    from neuzip.eval.measures.texts import read_text

    evaluation = scores = None
    with joined_ranks() as ranks:
        out = Output(json=json, quiet=quiet, silent=not ranks.is_first)
        sources = [path for path in (original, src) if path is not None]
        paths, document = ranks.first_before_others(
            lambda: (
                [resolved_model(out, path) for path in sources],
                None if text is None else read_text(text),
            )
        )
        from neuzip.eval.measures.perplexity import evaluate, prepare

        for path, asked in zip(reversed(paths), (activations, None), strict=False):
            warn_of_plain_inputs(out, path, (residency,), asked)
        if sparsity and residency == "dense":
            out.status(
                "--sparsity: counted on unquantised activations, as --residency dense does not quantise them"
            )
        from neuzip.eval.report import evaluation as reports
        from neuzip.eval.report import sweep_results

        swept = None if sweep is None else sweep_results.read_sweep(sweep)
        if document is not None:
            task = prepare(
                paths, document, conventions=names, window=window, stride=stride, max_tokens=max_tokens,
                device=device, device_map=device_map, dtype=dtype, residency=residency,
                activations=mode, kv_bits=options.bits(kv_bits), attention=attention,
            )  # fmt: skip
            if names is None and place_is_slow(task):
                first = 100 * task.measured[0].convention.tokens * len(task.paths) / task.tokens
                name = task.measured[0].convention.name
                out.hint(
                    f"--conventions {name} takes about {first:.0f} % of the time, and measures that one alone"
                )
            with out.progress(work_text(task), task.tokens, unit="tokens") as advance:
                evaluation = evaluate(
                    task, divergence=original is not None, ranks=ranks, on_tokens=ranks.counting(advance)
                )
            report(out, evaluation)
        zeros = None
        if sparsity and document is not None and ranks.is_first:
            zeros = count_zeros(out, task)
        written = told = None
        try:
            if tasks is not None:
                with out.progress("tasks", None, unit="requests") as advance:
                    scores = harness.evaluate_tasks(
                        paths, tasks.split(","), limit=limit, device=device, device_map=device_map,
                        dtype=dtype, residency=residency, on_requests=advance,
                    )  # fmt: skip
                show_tasks(out, scores)
            if evaluation is not None and ranks.is_first and (page is not None or json):
                with out.progress("report", None) as advance:
                    told = reports.build_report(
                        evaluation, paths[-1], paths[0] if original is not None else None, title=name_of(src),
                        base_title=None if original is None else name_of(original),
                        command=shell("neuzip", *sys.argv[1:]), text=document, sweep=swept,
                        tasks=() if scores is None else harness.report_rows(scores),
                        versions=None if scores is None else {"lm-eval": scores.harness},
                        read_weights=page is not None, on_bytes=advance,
                    )  # fmt: skip
            if page is not None and told is not None:
                report_page.write(told, page)
                written = page
                out.status(f"wrote {page}")
        finally:  # what took hours is told, whatever becomes of the rest
            give_result(out, evaluation, scores, written, zeros, told)


LONG = 20_000
"""Tokens, of all conventions and models, that take a CPU so long that a shorter way is worth a word."""


def place_is_slow(task: EvaluationTask) -> bool:
    """Whether all conventions take long, on a CPU."""
    return str(task.device) == "cpu" and len(task.measured) > 1 and task.tokens >= LONG


def work_text(task: EvaluationTask) -> str:
    """What the tokens of the bar are of."""
    models, conventions = len(task.paths), len(task.measured)
    return (
        "eval"
        if models * conventions == 1
        else (f"eval, {count_text(models, 'model')} x {count_text(conventions, 'convention')}")
    )


def count_zeros(out: Output, task: EvaluationTask) -> Sparsity:
    """How sparse the inputs of layers are, of the last checkpoint on the first tokens of the text."""
    from neuzip.eval.measures.perplexity import load
    from neuzip.runtime.hf.sparsity import sparsity

    reading = task.compared
    model = load(task, len(task.paths) - 1)
    first = reading.windows[0]
    windows = reading.windows[: max(1, COUNTED_TOKENS // (first.stop - first.start))]
    with out.progress("sparsity", len(windows), unit="windows") as advance:

        def batches() -> Iterator[Tensor]:
            for window in windows:
                yield reading.ids[None, window.start : window.stop].to(model.device)
                advance(1)

        found = sparsity(model, batches())
    out.text()
    rows = [[site, f"{share:.1%}"] for site, share in found.sites.items()]
    out.table(["site", "activations that are 0"], [*rows, ["all, by weights", f"{found.overall:.1%}"]])
    out.text(
        f"{found.active:,} of {found.parameters:,} weights are active per token; {found.tokens:,} tokens"
    )
    return found


def give_result(
    out: Output,
    evaluation: Evaluation | None,
    scores: TaskEvaluation | None,
    page: Path | None,
    zeros: Sparsity | None = None,
    told: EvaluationReport | None = None,
) -> None:
    """What a machine reads: of the text and of the tasks, as far as they came; nothing if neither did."""
    if evaluation is None and scores is None:
        return
    found = dict.fromkeys(EVALUATED) if evaluation is None else result_of(evaluation)
    numbers = [] if scores is None else [score.after.value for score in scores.scores]
    if evaluation is not None:
        numbers = [quiet_number(evaluation)]
    out.result(
        {
            **found,
            "sparsity": zeros,
            "tasks": scores,
            "page": page,
            "report": None if told is None else told.to_json(),
        },
        quiet=numbers,
    )


def refuse_contradictions(
    text: str | None,
    page: Path | None,
    sweep: Path | None,
    tasks: str | None,
    limit: int | None,
    kv_bits: str | None = None,
    attention: options.Attention = "recorded",
) -> None:
    """Raise UsageError for options that do not go together."""
    if text is None and tasks is None:
        raise UsageError("neither --text nor --tasks is given", "give --text demo, or a file, or --tasks")
    if kv_bits is not None and tasks is not None:
        raise UsageError(
            f"--kv-bits {kv_bits} does not apply to --tasks, which do not quantise the KV cache",
            "leave out --kv-bits or --tasks",
        )
    if attention != "recorded" and tasks is not None:
        raise UsageError(
            f"--attention {attention} does not apply to --tasks, which follow config.json",
            "leave out --attention or --tasks",
        )
    if tasks is not None and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UsageError(
            "--tasks cannot run under torchrun",
            "leave it out, or run `accelerate launch -m neuzip.eval.harness run --model neuzip ...`",
        )


def name_of(src: str) -> str:
    """What a checkpoint is called on a page: a Hub id, or the name of its folder."""
    return Path(src).resolve().name if Path(src).exists() else src


def chosen_conventions(option: str | None) -> list[Name] | None:
    """The conventions that an option names, in the order in which there are; None for all."""
    if option is None:
        return None
    from neuzip.eval.measures.convention_names import BOS, NAMES

    names = (BOS, *NAMES)
    asked = {name.strip() for name in option.split(",")}
    if unknown := asked - set(names):
        raise UsageError(
            f"--conventions {option}: there is no convention {sorted(unknown)[0]!r}",
            f"choose from {', '.join(names)}",
        )
    return [name for name in names if name in asked]


def result_of(evaluation: Evaluation) -> dict[str, object]:
    """What a machine reads."""
    *before, after = evaluation.models
    return {
        "text": evaluation.text,
        "documents": evaluation.documents,
        "before": before[0] if before else None,
        "after": after,
        "conventions": [
            {
                **vars(m.convention),
                "blocks": m.blocks,
                "before": m.scores[0] if before else None,
                "after": m.scores[-1],
            }
            for m in evaluation.measured
        ],
        "skipped": evaluation.skipped,
        "compared": evaluation.compared,
        "comparison": evaluation.comparison,
        "device": evaluation.device,
        "residency": evaluation.residency,
        "memory": evaluation.memory,
        "processes": evaluation.processes,
        "seconds": evaluation.seconds,
        "versions": evaluation.versions,
    }


def quiet_number(evaluation: Evaluation) -> float:
    """The one number: the mean divergence from the base, or else the perplexity."""
    if evaluation.comparison is not None:
        return evaluation.comparison.kld.mean.value
    first = evaluation.measured[0]
    score = first.scores[-1]
    of_words = score.word_perplexity if first.convention.name == "lm-eval" else None
    return (of_words or score.token_perplexity).value


def report(out: Output, evaluation: Evaluation) -> None:
    """Say under which conventions, and show each figure with its standard error."""
    e = evaluation
    out.text(f"text    {e.text}: {count_text(e.documents, 'document')}")
    for name, model in zip(_names(e), e.models, strict=True):
        out.text(f"{name:7} {model.path}")
    kept = "" if e.residency == "dense" else f", residency {e.residency}"
    many = "" if e.processes == 1 else f", {e.processes} processes"
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items())
    out.text(f"in      {e.models[-1].dtype} on {e.device}{kept}{_inputs(e)}{many}; {versions}")
    if e.models[-1].kv_bits is not None:
        out.text(f"cache   {_names(e)[-1]} with a KV cache in {_kv_text(e.models[-1].kv_bits)}")
    for name, model in zip(_names(e), e.models, strict=True):
        if model.attention_bits is not None:
            out.text(f"attends {name}: {attention_text(model.attention_bits, model.attention_calls)}")
    out.text()
    _show_perplexities(out, e)
    if e.comparison is not None:
        out.text()
        _show_comparison(out, e.comparison, e.compared or "")
    out.text()
    _show_cost(out, e)


def _inputs(e: Evaluation) -> str:
    """How inputs of layers are quantised, if any are; of which model, if not of all alike."""
    modes = ["none" if model.activations is None else model.activations.text for model in e.models]
    if set(modes) == {"none"}:
        return ""
    if len(set(modes)) == 1:
        return f", activations {modes[0]}"
    return ", activations " + ", ".join(f"{mode} {name}" for name, mode in zip(_names(e), modes, strict=True))


def _kv_text(bits: int) -> str:
    first = "; the first token of a window keeps 4" if bits == 3 else ""
    return f"{bits} bits{first}"


def attention_text(bits: Sequence[int | None], calls: Mapping[str, int]) -> str:
    """How many layers attend in how many bits, and of the calls that should, how many did not, and why.

    >>> attention_text([8, 4, None], {"8 bits": 6, "4 bits": 6, "sdpa: the layer keeps full precision": 6})
    '2 of 3 layers quantised: 1 in 8 bits, 1 in 4 bits'
    >>> attention_text([8, 8], {"8 bits": 1, "sdpa: it drops out weights": 3})
    '2 of 2 layers quantised: 2 in 8 bits; but 3 of 4 calls were not: it drops out weights'
    """
    counts = ", ".join(f"{bits.count(n)} in {n} bits" for n in (8, 4) if n in bits)
    text = f"{len(bits) - bits.count(None)} of {len(bits)} layers quantised" + (counts and f": {counts}")
    asked = {how: count for how, count in calls.items() if not how.endswith("keeps full precision")}
    others = {how: count for how, count in asked.items() if not how.endswith(" bits")}
    if not others:
        return text
    reasons = ", ".join(how.partition(": ")[2] or how for how in others)
    left, all_calls = sum(others.values()), sum(asked.values())
    which = "none of their calls was" if left == all_calls else f"{left:,} of {all_calls:,} calls were not"
    return f"{text}; but {which}: {reasons}"


def _names(e: Evaluation) -> list[str]:
    return ["before", "after"] if len(e.models) == 2 else ["model"]


def _first_figure(measured: ConventionScores) -> Estimate:
    """A perplexity of a convention, for its standard error."""
    score = measured.scores[-1]
    return score.word_perplexity or score.token_perplexity


def _figures(measured: ConventionScores) -> list[Estimate]:
    """The perplexities that a convention is told in."""
    told = [s.word_perplexity if measured.convention.name == "lm-eval" else None for s in measured.scores]
    return [word or s.token_perplexity for word, s in zip(told, measured.scores, strict=True)]


def _show_perplexities(out: Output, e: Evaluation) -> None:
    from neuzip.eval.measures.estimates import errors_text, over, without_meaning

    names = _names(e)
    changes = ["change, nats"] if len(e.models) == 2 else []
    rows = [row for measured in e.measured for row in _perplexity_rows(measured)]
    out.table(["convention", "metric", *names, *changes], rows, right=[*names, *changes])
    errors = {m.blocks: _first_figure(m).standard_error for m in e.measured}
    for m in e.measured:
        own = f"; {over(m.blocks, errors[m.blocks])}" if len(errors) > 1 else ""
        out.text(f"{m.convention.name:9} {m.convention.rule}; {predicted_text(m.convention)}{own}")
    named = any(m.convention.special_tokens != "none" for m in e.measured)
    special = "no special tokens" + (" but those named" if named else "")
    if len(errors) == 1:
        special = f"{errors_text(*errors.popitem())}; {special}"
    out.text(special)
    for m in e.measured:
        if any(without_meaning(figure) for figure in _figures(m)):
            out.text(
                f"{m.convention.name:9} tells nothing: its error is more than half of it; use a longer text"
            )
    for name, reason in e.skipped.items():
        out.text(f"{name:9} left out: {reason}")
    for model in e.models:
        if model.formed is not None:
            out.text(
                f"{model.path}: the full logits were materialised, which takes memory and time: "
                f"{model.formed}"
            )


def _perplexity_rows(measured: ConventionScores) -> list[list[str]]:
    """The figures that a convention is told in, the change with the first of them."""
    scores = measured.scores
    figures = {"perplexity per token": [s.token_perplexity for s in scores]}
    if measured.convention.name == "lm-eval":
        figures = {
            "perplexity per word": [s.word_perplexity for s in scores if s.word_perplexity],
            "perplexity per byte": [s.byte_perplexity for s in scores if s.byte_perplexity],
            "bits per byte": [s.bits_per_byte for s in scores if s.bits_per_byte],
        }
    rows = [["", figure, *map(estimate_text, row)] for figure, row in figures.items()]
    rows[0][0] = measured.convention.name
    for difference in (s.difference for s in scores if s.difference is not None):
        for row in rows:
            row.append(difference_text(difference) if row is rows[0] else "")
    return rows


def _show_comparison(out: Output, c: Comparison, convention: str) -> None:
    from neuzip.eval.measures.estimates import over

    errors = over(c.blocks, c.kld.mean.standard_error)
    out.text(f"after compared with before, {c.tokens:,} tokens ({convention}), {errors}:")
    if c.identical:
        out.text("  identical: every loss has the same bits, and every KL divergence is 0")
        return
    k = c.kld
    ratio = c.perplexity_ratio
    rows = [
        ["NLL, nats per token", signed_text(c.nll_difference)],
        ["perplexity, after / before", precise_text(ratio)],
        ["KL divergence, nats: mean", precise_text(k.mean)],
        ["  median, 99.9 %, max", f"{k.median:.3g}, {k.p999:.3g}, {k.max:.3g}"],
        ["top-1 agreement", share_text(c.top_1)],
        [f"top-{c.k} overlap", share_text(c.top_k)],
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        out.text(f"  {name:{width}}  {value}")


def _show_cost(out: Output, e: Evaluation) -> None:
    rows = [
        [name, bytes_text(model.weight_bytes), rough_speed_text(model.tokens_per_second)]
        for name, model in zip(_names(e), e.models, strict=True)
    ]
    columns = ["", "weights in memory", "tokens/s, without the head"]
    out.table(columns, rows, right=columns[1:])
    if len(e.models) > 1:
        out.text("Speeds are of one pass, without an error: `neuzip bench` compares speeds.")
    if e.memory.bytes is not None:
        models = ", both models in it" if len(e.models) == 2 else ""
        out.text(
            f"peak {bytes_text(e.memory.bytes)} of {e.memory.of}{models}; {seconds_text(e.seconds)} in all"
        )


def show_tasks(out: Output, found: TaskEvaluation) -> None:
    """The scores of lm-evaluation-harness."""
    from neuzip.eval.harness import name_text, note_text

    both = any(score.before is not None for score in found.scores)
    names = ["before", "after"] if both else ["score"]
    rows = [
        [
            name_text(score),
            *map(estimate_text, [score.before, score.after] if both else [score.after]),
            note_text(score),
        ]
        for score in found.scores
    ]
    out.text()
    out.table([f"lm-eval {found.harness}", *names, "how"], rows, right=names)


def predicted_text(c: Convention) -> str:
    """How much was predicted, in what perplexities are told by."""
    if c.name == "lm-eval" and c.words is not None and c.bytes is not None:
        return f"{c.words:,} words, {c.bytes:,} bytes"
    return f"{c.tokens:,} tokens"


def estimate_text(estimate: Estimate | None) -> str:
    """A figure with its standard error, both to the same digit.

    >>> from neuzip.eval.measures.estimates import Estimate
    >>> [estimate_text(Estimate(value, error)) for value, error in ((984471.78, 428334.34), (9999.0, 1.0))]
    ['984,472 ± 428,334', '9,999.00 ± 1.00']
    """
    if estimate is None:
        return "-"
    error = estimate.standard_error
    if estimate.value >= 1e6:
        return f"{estimate.value:.3g}" + ("" if error is None else f" ± {error:.2g}")
    digits = 0 if estimate.value >= 1e4 else 2 if estimate.value >= 10 else 4
    return f"{estimate.value:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


def rough_speed_text(speed: float) -> str:
    """A speed that was measured once, to the two digits that a repetition may confirm.

    >>> [rough_speed_text(speed) for speed in (1393.6, 87.31, 0.42)]
    ['about 1,400', 'about 87', 'about 0.42']
    """
    return f"about {float(f'{speed:.2g}'):,.{0 if speed >= 10 else 2}f}"


def signed_text(estimate: Estimate) -> str:
    """A difference with its standard error, to five digits."""
    error = estimate.standard_error
    return f"{estimate.value:+.5f}" + ("" if error is None else f" ± {error:.5f}")


def precise_text(estimate: Estimate) -> str:
    """A figure to two digits of its standard error."""
    error = estimate.standard_error
    if not error or not math.isfinite(error):
        return f"{estimate.value:.6g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{estimate.value:.{digits}f} ± {error:.{digits}f}"


def share_text(estimate: Estimate) -> str:
    """A share with its standard error, in percent."""
    error = estimate.standard_error
    return f"{100 * estimate.value:.3f} %" + ("" if error is None else f" ± {100 * error:.3f} %")


def difference_text(difference: ModelDifference) -> str:
    """How far two models are apart under a convention, in nats a token."""
    return "0, to the last bit" if difference.identical else signed_text(difference.nll)
