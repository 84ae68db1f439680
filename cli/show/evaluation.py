"""What `neuzip eval` measured: perplexities, the comparison with the original, tasks, and the JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.figures import (
    difference_text,
    estimate_text,
    precise_text,
    rough_speed_text,
    share_text,
    signed_text,
)
from neuzip.cli.text import bytes_text, count_text, seconds_text
from neuzip.runtime.kv_bits import in_words

if TYPE_CHECKING:
    from neuzip.eval.harness import TaskEvaluation
    from neuzip.eval.measures.conventions import Convention
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.eval.measures.estimates import Estimate
    from neuzip.eval.measures.perplexity import ConventionScores, Evaluation, MeasuredModel
    from neuzip.eval.report.evaluation import EvaluationReport
    from neuzip.runtime.hf.sparsity import Sparsity

EVALUATED = (
    "text", "documents", "before", "after", "conventions", "skipped", "compared", "comparison", "device",
    "residency", "memory", "processes", "seconds", "versions",
)  # fmt: skip
"""The keys of `--json` that say what was measured on the text; null without one."""


def give_result(
    out: Output,
    evaluation: Evaluation | None,
    scores: TaskEvaluation | None,
    page: Path | None,
    zeros: Sparsity | None = None,
    report: EvaluationReport | None = None,
    calibration: Mapping[str, object] | None = None,
) -> None:
    """What a machine reads: of the text and of the tasks, as far as they came; nothing if neither did."""
    if evaluation is None and scores is None:
        return
    measured = dict.fromkeys(EVALUATED) if evaluation is None else evaluation_json(evaluation)
    numbers = [] if scores is None else [score.after.value for score in scores.scores]
    if evaluation is not None:
        numbers = [quiet_number(evaluation)]
    out.result(
        {
            **measured,
            "kv_calibration": calibration,
            "sparsity": zeros,
            "tasks": scores,
            "page": page,
            "report": None if report is None else report.to_json(),
        },
        quiet=numbers,
    )


def evaluation_json(evaluation: Evaluation) -> dict[str, object]:
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


def show_evaluation(out: Output, evaluation: Evaluation) -> None:
    """Say under which conventions, and show each figure with its standard error."""
    e = evaluation
    out.text(f"text    {e.text}: {count_text(e.documents, 'document')}")
    for name, model in zip(_names(e), e.models, strict=True):
        out.text(f"{name:7} {model.path}")
    residency = "" if e.residency == "dense" else f", residency {e.residency}"
    many = "" if e.processes == 1 else f", {e.processes} processes"
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items())
    out.text(f"in      {e.models[-1].dtype} on {e.device}{residency}{_inputs(e)}{many}; {versions}")
    if e.models[-1].kv_layers is not None:
        out.text(f"cache   {_names(e)[-1]} with a KV cache in {_kv_text(e.models[-1])}")
    if e.models[-1].query_bits is not None:
        out.text(f"queries {_names(e)[-1]} with queries in {e.models[-1].query_bits} bits")
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


def _kv_text(model: MeasuredModel) -> str:
    from neuzip.runtime.hf.kv_layers import FORMS  # loads torch

    assert model.kv_layers is not None and model.kv_form is not None
    bits = in_words(model.kv_layers)
    if whole := FORMS[model.kv_form].whole:
        return f"{bits}; the first {whole} tokens of a window are not quantised"
    first = "; the first token of a window keeps 4" if model.kv_bits == 3 else ""
    return f"{bits}, in the form a4.8{first}"


def attention_text(bits: Sequence[int | None], calls: Mapping[str, int]) -> str:
    """How many layers attend in how many bits, and of the calls that should, how many did not, and why.

    >>> attention_text([8, 4, None], {"8 bits": 6, "4 bits": 6, "sdpa: the layer keeps full precision": 6})
    '2 of 3 layers quantised: 1 in 8 bits, 1 in 4 bits'
    >>> attention_text([8, 8], {"8 bits": 1, "sdpa: it drops out weights": 3})
    '2 of 2 layers quantised: 2 in 8 bits; but 3 of 4 calls were not: it drops out weights'
    """
    counts = ", ".join(f"{bits.count(n)} in {n} bits" for n in (8, 4) if n in bits)
    text = f"{len(bits) - bits.count(None)} of {len(bits)} layers quantised" + (counts and f": {counts}")
    wanted = {how: count for how, count in calls.items() if not how.endswith("keeps full precision")}
    others = {how: count for how, count in wanted.items() if not how.endswith(" bits")}
    if not others:
        return text
    reasons = ", ".join(how.partition(": ")[2] or how for how in others)
    left, all_calls = sum(others.values()), sum(wanted.values())
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
    words = [s.word_perplexity if measured.convention.name == "lm-eval" else None for s in measured.scores]
    return [word or s.token_perplexity for word, s in zip(words, measured.scores, strict=True)]


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


def show_tasks(out: Output, evaluation: TaskEvaluation) -> None:
    """The scores of lm-evaluation-harness."""
    from neuzip.eval.harness import name_text, note_text

    both = any(score.before is not None for score in evaluation.scores)
    names = ["before", "after"] if both else ["score"]
    rows = [
        [
            name_text(score),
            *map(estimate_text, [score.before, score.after] if both else [score.after]),
            note_text(score),
        ]
        for score in evaluation.scores
    ]
    out.text()
    out.table([f"lm-eval {evaluation.harness}", *names, "how"], rows, right=names)


def predicted_text(c: Convention) -> str:
    """How much was predicted, in what perplexities are told by."""
    if c.name == "lm-eval" and c.words is not None and c.bytes is not None:
        return f"{c.words:,} words, {c.bytes:,} bytes"
    return f"{c.tokens:,} tokens"


def show_sparsity(out: Output, sparsity: Sparsity) -> None:
    """Say how many activations are 0, site by site."""
    out.text()
    rows = [[site, f"{share:.1%}"] for site, share in sparsity.sites.items()]
    out.table(["site", "activations that are 0"], [*rows, ["all, by weights", f"{sparsity.overall:.1%}"]])
    out.text(
        f"{sparsity.active:,} of {sparsity.parameters:,} weights are active per token; "
        f"{sparsity.tokens:,} tokens"
    )
