"""neuzip eval: perplexity of a checkpoint on a text, before and after compression."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from neuzip.cli import options
from neuzip.cli.output import Output

if TYPE_CHECKING:
    from neuzip.eval.perplexity import Convention, Difference, Estimate, Evaluation

EXAMPLES = [
    "neuzip eval my-model.nz --text demo",
    "neuzip eval small --base my-model --text wiki.test.raw",
    "neuzip eval small --text wiki.test.raw --window 2048 --max-tokens 100000",
]


def command(
    src: options.ModelArgument,
    text: Annotated[
        str,
        typer.Option(metavar="FILE|demo", help="UTF-8 text to predict, or the demo's", show_default=False),
    ],
    base: Annotated[
        str | None, typer.Option(metavar="ORIGINAL", help="Evaluate this checkpoint too, and compare")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Predict N tokens a window; 1024, or what the model can, if not given"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Begin a window every N tokens; by default without overlap"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Predict only the first N tokens of the text")
    ] = None,
    device: options.RunDeviceOption = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Compute in this; auto is float32 for dense weights on a CPU, else their own"),
    ] = "auto",
    residency: options.ResidencyOption = "dense",
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure perplexity on a text, before and after compression"""
    out = Output(json=json, quiet=quiet)
    let_threads_sleep()
    from neuzip.eval.perplexity import evaluate, prepare, read_text
    from neuzip.formats.hub import resolve_source

    task = prepare(
        [resolve_source(path) for path in (base, src) if path is not None],
        read_text(text),
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        device=device,
        dtype=dtype,
        residency=residency,
    )
    with out.progress("eval", task.tokens, unit="tokens") as advance:
        evaluation = evaluate(task, on_tokens=advance)
    report(out, evaluation)
    out.result(
        {
            "convention": evaluation.convention,
            "before": evaluation.scores[0] if base is not None else None,
            "after": evaluation.scores[-1],
            "versions": evaluation.versions,
        },
        quiet=[score.token_perplexity.value for score in evaluation.scores],
    )


def let_threads_sleep() -> None:
    """Call before torch is loaded: spinning threads take three times as long where cores are busy."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def report(out: Output, evaluation: Evaluation) -> None:
    """Say under which convention, and show each figure with its standard error."""
    c, after = evaluation.convention, evaluation.scores[-1]
    counts = [(c.tokens, "tokens predicted"), (c.words, "words"), (c.bytes, "bytes")]
    out.text(f"text     {c.text}: " + ", ".join(f"{n:,} {what}" for n, what in counts if n is not None))
    out.text(f"windows  {windows_text(c)}; no special tokens")
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.versions.items())
    kept = "" if c.residency == "dense" else f", residency {c.residency}"
    out.text(f"model    {after.dtype} on {c.device}{kept}; {versions}")
    out.text()
    names = ["before", "after"] if after.difference is not None else [after.path]
    figures: dict[str, list[Estimate | None]] = {
        "token-level perplexity": [s.token_perplexity for s in evaluation.scores],
        "word-level perplexity": [s.word_perplexity for s in evaluation.scores],
        "byte-level perplexity": [s.byte_perplexity for s in evaluation.scores],
        "bits a byte": [s.bits_per_byte for s in evaluation.scores],
        "NLL, nats a token": [s.nll for s in evaluation.scores],
    }
    rows = [[figure, *map(estimate_text, row)] for figure, row in figures.items()]
    out.table(["", *names], rows, right=names)
    if c.windows > 1:
        out.text(f"± standard error over the {c.windows:,} windows")
    if after.difference is not None:
        out.text(f"after - before: {difference_text(after.difference)}")


def windows_text(c: Convention) -> str:
    """The windows of a text in words."""
    overlap = "no overlap" if c.stride == c.window else f"each overlaps the last by {c.window - c.stride:,}"
    return f"{c.windows:,} of up to {c.window:,} predictions, stride {c.stride:,}: {overlap}"


def estimate_text(estimate: Estimate | None) -> str:
    """A figure with its standard error, both to the same digit."""
    if estimate is None:
        return "-"
    digits = 2 if estimate.value >= 10 else 4
    error = estimate.standard_error
    return f"{estimate.value:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


def difference_text(difference: Difference) -> str:
    """How far two models are apart, in nats and in percent of perplexity."""
    if difference.identical:
        return "the same to the last bit in every window"
    nll, error = difference.nll.value, difference.nll.standard_error
    nats = f"{nll:+.5f}" + ("" if error is None else f" ± {error:.5f}")
    return f"{nats} nats a token, perplexity {100 * math.expm1(nll):+.3f} % (paired)"
