"""neuzip recover: train a ternary model to match the original."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from neuzip.cli import options
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.residency import require_device
from neuzip.cli.text import count_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import NeuzipError, UsageError, shell

if TYPE_CHECKING:
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.train.recovery.run import Recovered

PACKAGES = ("torch", "transformers", "matplotlib")

EXAMPLES = [
    "neuzip recover my-model --text my.txt --budget 30m -o tern",
    "neuzip recover my-model --text a.txt --text b.jsonl --steps 999 -o t",
    "neuzip recover tern --original my-model --text my.txt --budget 2h -o t2",
    "neuzip compress tern small --ternary",
    "",
    "8-bit activations first, then 4-bit ones, with the same training state:",
    "neuzip recover my-model --text my.txt --budget 30m -o b --keep-state s",
    "neuzip recover b --original my-model --text my.txt --budget 5m \\",
    "  --from-state s --activations a4.8 --lr 1e-4 -o a",
]

GROUPS = {
    "Text and length of the training": ("text", "window", "batch", "budget", "steps"),
    "Ternary weights": ("activations", "ternary_group", "scales", "sub_norms", "strength"),
    "Losses and optimizer": (
        "original", "kld", "hidden", "cross_entropy", "temperature", "lr", "noise", "seed",
    ),
    "Comparison with the original": ("eval_text", "max_tokens"),
}  # fmt: skip

NEEDS = {"--max-tokens": ("--eval-text",)}

WINDOW = 512
"""Tokens of a window, if the model has so many positions."""

LAST = 20
"""Steps, at most, whose mean loss is told."""

UNITS = {"s": 1, "m": 60, "h": 3600}


def command(
    src: options.ModelArgument,
    text: Annotated[
        list[Path],
        typer.Option(
            "--text",
            metavar="FILE",
            help="Training text: UTF-8 file or .jsonl[.gz]; repeatable",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DST", help="Output folder", show_default=False)
    ],
    original: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Original model that SRC was made from (default: SRC)"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Training time, such as 90s, 30m or 2h")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of training steps")] = None,
    activations: Annotated[
        Literal["b1.58", "a4.8", "a4.8-fp4", "none"],
        typer.Option(help="Activation quantisation in training, and recorded in config.json"),
    ] = "b1.58",
    ternary_group: Annotated[
        Literal["tensor", "row"], typer.Option(help="Weights per scale, if SRC is not ternary yet")
    ] = "tensor",
    scales: Annotated[
        Literal["learned", "absmean"],
        typer.Option(help="Train the scales, or use the mean magnitude of the weights (BitNet)"),
    ] = "learned",
    sub_norms: Annotated[
        bool, typer.Option("--sub-norms", help="Add norms before o_proj and down_proj (SubLN); Llama only")
    ] = False,
    strength: Annotated[
        float,
        typer.Option(
            metavar="FRACTION", min=0, max=1, help="Fraction of steps over which quantisation is ramped up"
        ),
    ] = 0.0,
    lr: Annotated[float, typer.Option(metavar="RATE", min=0, help="Peak learning rate")] = 3e-4,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Tokens per window (default: 512, or the model's maximum)"),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Windows per step")] = 16,
    kld: Annotated[
        float, typer.Option(metavar="W", min=0, help="Loss weight of the KL divergence from the original")
    ] = 1.0,
    hidden: Annotated[
        float, typer.Option(metavar="W", min=0, help="Loss weight of the distance between hidden states")
    ] = 0.0,
    cross_entropy: Annotated[
        float, typer.Option(metavar="W", min=0, help="Loss weight of the cross-entropy on the text")
    ] = 0.0,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0, help="Softmax temperature for the KL divergence")
    ] = 1.0,
    noise: Annotated[
        float,
        typer.Option(
            metavar="FRACTION", min=0, max=1, help="Fraction of input tokens to replace by random ones"
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed for window order and noise")] = 0,
    from_state: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Start from the training state in this folder")
    ] = None,
    keep_state: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Save the training state (fp32 weights, moments) here"),
    ] = None,
    eval_text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text to compare with the original on, before and after training"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Use only the first N tokens of --eval-text")
    ] = 16384,
    device: options.RunDeviceOption = "auto",
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Train a ternary model to match the original

    This is quantisation-aware training (QAT) with distillation from the original. If SRC is not ternary, the
    command converts it first. The result has exactly ternary weights; its config.json records the activation
    quantisation. The folder also has recovery.jsonl, one line per step, and recovery.svg. To resume a stopped
    run, repeat the command.
    """
    out = Output(json=json, quiet=quiet)
    require_device(device)
    if (budget is None) == (steps is None):
        raise UsageError("recover needs either --budget or --steps", "give --budget TIME or --steps N")
    if original is not None and ternary_group != "tensor":
        raise UsageError(
            f"--ternary-group {ternary_group} has no effect with --original: {src} is ternary already",
            "leave out --ternary-group",
        )
    if kld == 0 and temperature != 1:
        raise UsageError(f"--temperature {temperature:g} has no effect with --kld 0", "leave one of them out")
    seconds = None if budget is None else seconds_of(budget)
    let_threads_sleep()
    out.loading()
    from neuzip.compress.overwrite_guard import refuse_existing, refuse_nesting, require_free
    from neuzip.eval.measures.texts import read_text

    for file in text:
        if not file.exists():
            raise NeuzipError(f"--text {file}: no such file", "give a UTF-8 text, a .jsonl or a .jsonl.gz")
    if not overwrite:
        refuse_existing(output, overwrite)
    judged = None if eval_text is None else read_text(eval_text)
    path = resolved_model(out, src)
    of_original = path if original is None else resolved_model(out, original)
    require_free(path, output, overwrite)
    refuse_nesting(of_original, output)
    import torch

    from neuzip.eval.measures.comparison import BaselineComparison
    from neuzip.eval.measures.head import HeadedModel
    from neuzip.runtime.devices import choose_device
    from neuzip.runtime.hf.config import load_config
    from neuzip.runtime.hf.decoder import positions
    from neuzip.runtime.hf.load import load_model
    from neuzip.runtime.hf.tokenizer import load_tokenizer
    from neuzip.train.recovery import run
    from neuzip.train.recovery.course import Recovery
    from neuzip.train.recovery.distill import LossWeights
    from neuzip.train.recovery.latent import runnable
    from neuzip.train.recovery.settings import RecoverySettings
    from neuzip.train.text import TrainingWindows

    run.require_room(path, output, overwrite, keep_state, from_state)
    most = positions(load_config(of_original))
    if window is not None and most is not None and window > most:
        raise UsageError(f"--window {window}: {of_original} has {most} positions", f"give at most {most}")
    length = window or min(WINDOW, most or WINDOW)
    settings = RecoverySettings(
        activations=activations, group=ternary_group, scales=scales, sub_norms=sub_norms, lr=lr,
        strength=strength, loss=LossWeights(kld, cross_entropy, hidden, temperature), noise=noise,
        length=length, batch=batch, seed=seed,
    )  # fmt: skip
    where = choose_device(device)
    tokenizer = load_tokenizer(of_original)
    windows = TrainingWindows.of(tokenizer, text, length=length, batch=batch, seed=seed)
    judge = None
    if judged is not None:
        judge = BaselineComparison(of_original, judged, max_tokens=max_tokens, device=device)
        teacher = judge.model
    else:
        teacher = load_model(
            of_original, torch.float32 if where.type == "cpu" else None, where, attention=False
        )
    course = Recovery.begin(path, teacher, windows, settings)
    found: dict[str, Comparison] = {}

    def compare(when: str, model: Any) -> None:
        if judge is not None:
            with out.progress(f"evaluate {when}", judge.tokens, unit="tokens") as advance:
                found[when] = judge.compare(HeadedModel(model), advance)
            show(out, when, found[when])

    def start(course: Recovery, taken: int) -> None:
        going_on = f", {taken} of them done already" if taken else ""
        out.status(
            f"{count_text(course.steps, 'step')} of {windows.per_batch * windows.length} tokens{going_on}"
        )
        for layer in course.latent.values():
            layer.strength = 1.0
        compare("before", course.student)

    with out.progress("recover", steps, unit="steps") as advance:
        result = run.recover(
            course, path, output, steps=steps, seconds=seconds, from_state=from_state,
            keep_state=keep_state, overwrite=overwrite, on_start=start, on_step=lambda *_: advance(1),
        )  # fmt: skip
    if judge is not None:
        compare("after", runnable(output, None, where, judge.dtype))
        warn_if_worse(out, found["before"], found["after"])
    figures = finish(out, output, result, windows)
    out.result(
        {
            "src": path, "original": of_original, "dst": output, "settings": settings, **figures,
            "before": found.get("before"), "after": found.get("after"),
            "special_tokens": windows.special_tokens, "device": str(where),
        },
        quiet=[output],
    )  # fmt: skip


def seconds_of(text: str) -> float:
    """A time such as 90s, 30m or 1.5h in seconds. Raises UsageError.

    >>> seconds_of("90s"), seconds_of("1.5h")
    (90.0, 5400.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or not float(found[1]):
        raise UsageError(f"--budget {text}: not a time", "give a number and s, m or h, such as 30m")
    return float(found[1]) * UNITS[found[2]]


def show(out: Output, when: str, found: Comparison) -> None:
    """A line of how far a model is from the original."""
    ratio, kld = found.perplexity_ratio, found.kld.mean
    out.text(
        f"{when:6}  perplexity {ratio.value:.4f} times the original's, KLD {kld.value:.4f} nats per token,"
        f" top-1 agreement {found.top_1.value:.1%}"
    )


def warn_if_worse(out: Output, before: Comparison, after: Comparison) -> None:
    """Say so if training has moved a model away from the original."""
    if after.kld.mean.value > before.kld.mean.value:
        out.warning(
            "training moved the model away from the original", "train for more steps, or with a lower --lr"
        )


def losses_text(losses: list[float]) -> str:
    """What training began and ended with, each a mean of some steps: single ones differ by their windows.

    >>> losses_text([3.0, 2.0, 1.5, 1.0])
    'training loss 2.5000 at the start, 1.2500 at the end (means of 2 steps)'
    """
    count = max(1, min(LAST, len(losses) // 2))
    first, last = fmean(losses[:count]), fmean(losses[-count:])
    of = "" if count == 1 else f" (means of {count} steps)"
    return f"training loss {first:.4f} at the start, {last:.4f} at the end{of}"


def finish(out: Output, dst: Path, result: Recovered, windows: Any) -> dict[str, Any]:
    """Say what was done, and give it as figures."""
    from neuzip.train.recovery.run import LOG, PICTURE

    figures = result.figures
    if not figures:
        raise NeuzipError("the budget was too short for a single step", "give more time")
    seconds = sum(one["seconds"] for one in figures)
    tokens = int(sum(one["tokens"] for one in figures))
    weights = sum(one.codes.numel() for one in result.ternary.values())
    if not result.is_complete:
        out.warning(f"the budget ended after {len(figures)} of {result.steps} steps")
    out.text(
        f"{count_text(len(figures), 'step')}, {tokens:,} tokens"
        f" ({tokens / windows.tokens:.1f} times the text)"
        f" in {seconds_text(seconds)}, {tokens / seconds:,.0f} tokens/s"
    )
    out.text(losses_text([one["loss"] for one in figures]))
    out.text(f"{dst}: {len(result.ternary)} tensors with {weights:,} weights are ternary")
    out.text(f"losses: {dst / PICTURE}, and by step in {dst / LOG}")
    out.status(f"to compress it: {shell('neuzip', 'compress', dst, f'{dst}.nz', '--ternary')}")
    return {
        "steps": len(figures), "planned_steps": result.steps, "resumed_at": result.resumed_at,
        "tokens": tokens, "text_tokens": windows.tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds, "tensors": sorted(result.ternary), "weights": weights,
        "last": figures[-1],
    }  # fmt: skip
