"""Mix-LN against Pre-LN, Post-LN and their neighbours: small Llamas, equal tokens, several seeds.

    python benchmarks/mix_ln.py RUNS                                # pre, post and mix, seeds 0 to 2
    python benchmarks/mix_ln.py RUNS --placements all --budget 500
    python benchmarks/mix_ln.py RUNS --report                       # and benchmarks/results/mix_ln.{json,svg}
    python benchmarks/mix_ln.py ONCE --steps 480                    # no window comes twice
    python benchmarks/mix_ln.py ONCE --report --name mix_ln-once
    python benchmarks/mix_ln.py SMALL --size small --placements pre,mix --seeds 0 --steps 120 --batch 2 \\
        --held-tokens 16384                                         # --report --name mix_ln-small
    python benchmarks/mix_ln.py SCALED ... --embed-scale 50         # the control: mix_ln-small-scaled
    python benchmarks/mix_ln.py INIT ... --init scaled              # and Table 8's other control
    python benchmarks/mix_ln.py HALF ... --alpha 0.5                # half of Mix-LN is Post-LN

mix_ln_variants.py trains the rows of Tables 5, 6 and 8 together.

A run is one placement and one seed: the 71M recipe of the paper (mix_ln_recipes.py) with its learning rates,
but fewer tokens, of $NEUZIP_DATA/train-mix.jsonl.gz, and the tokenizer of wikilm-26m, which has 8,192. What a
seed decides, the first weights and the order of windows, is the same for all placements (DeepNorm's weights
are its own). A run that RUNS has is not made again, and none is begun that would end after the budget; a run
that was stopped begins anew.

The verdict is on the perplexity at the end, of documents that were held out: every 20th of c4 and of
movie_reviews (the plays are in the mix twice); and of another source, wiki.test. Differences to Pre-LN are
those of the same seed, as percent of perplexity, with a 95 % interval of Student's t.

Predicted before the first run, 46 M parameters, 16 M tokens, each seen 4 times: Mix-LN 1 to 4 % below Pre-LN,
beyond the seeds' spread; Post-LN within 3 % of Pre-LN, since 12 layers are few and a tenth of the steps is
warm-up; LayerNorm scaling below Mix-LN. At 71 M and 1.1 G tokens of C4 the paper has 33.12 (Mix-LN), 34.77
(Pre-LN), 35.18 (Post-LN). Against it speaks arXiv 2502.05795, Table 1: Mix-LN diverges there at 350 M and 1 B
(perplexities 1,363 and 1,415), and LayerNorm scaling is better at every size. Found: Mix-LN is a third below
Pre-LN after 400 steps and 2 % above it in the end, when it knows the repeated text by heart: its loss while
training is half a nat lower. So ONCE: predicted there, Mix-LN a quarter below Pre-LN, like Post-LN.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mix_ln_recipes import (
    LENGTH,
    RECIPES,
    Recipe,
    gradient_norms,
    held_out_loss,
    new_model,
    stepper,
)
from record import ROOT, Environment, Measurement
from torch import Tensor, nn

from neuzip.compress.workspace import write_file
from neuzip.errors import NeuzipError
from neuzip.runtime.hf.norm_placement import (
    INITIALIZATIONS,
    PLACEMENTS,
    Initialization,
    NormPlacementForCausalLM,
    Placement,
)
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.train.loop import read_log, run, smoothed
from neuzip.train.text import TrainingWindows, read_documents, tokenise

TINY = Recipe(32, 48, 2, 4, steps=12, tokens=0, peak=3e-3)
"""For a test of this script: nothing can be seen by it."""

SMALL = Recipe(128, 344, 4, 12, steps=120, tokens=0, peak=1e-3)
"""As deep as the 71M recipe and a quarter as wide: minutes on a CPU."""

NARROW = Recipe(64, 172, 2, 12, steps=120, tokens=0, peak=3e-3)
"""As deep as the 71M recipe and an eighth as wide: half a minute on a CPU with a vocabulary of 1,024."""

OWN = {"tiny": TINY, "small": SMALL, "narrow": NARROW}
"""Sizes that are not the paper's."""

MAIN: tuple[Placement, ...] = ("pre", "post", "mix")
NAMES = {"pre": "Pre-LN", "post": "Post-LN", "mix": "Mix-LN", "layernorm-scaling": "LayerNorm scaling",
         "sandwich": "Sandwich-LN", "peri": "Peri-LN", "deepnorm": "DeepNorm"}  # fmt: skip
COLOURS = {"pre": "#333333", "post": "#c1666b", "mix": "#2a6f97", "layernorm-scaling": "#e0a458",
           "sandwich": "#7a9e7e", "peri": "#8d6a9f", "deepnorm": "#9c9c9c"}  # fmt: skip

HELD_SOURCES, EVERY = ("c4", "movie_reviews"), 20
MOST_HELD = 400_000
"""Tokens of a held-out text, at most; a quarter of them while training goes on."""

PROBES, PROBE_SEED = 8, 10_000
"""Batches that gradient norms are measured with, at the first and the last step: the same for all runs."""

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a 95 % interval of the mean of so many."""


@dataclass(frozen=True)
class Settings:
    """What all runs that are compared have in common."""

    size: str
    steps: int
    batch: int
    peak: float
    text: str
    tokens: int
    held_out: dict[str, int]
    bf16: bool
    compiled: bool
    embed_scale: float
    alpha: float
    initialization: Initialization


@dataclass(frozen=True)
class Texts:
    """Tokens to train on, and those held out, by name."""

    train: Tensor
    held_out: dict[str, Tensor]
    name: str
    vocab_size: int


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where a model trains, on which text, and with which tokenizer."""
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    data = Path(os.environ.get("NEUZIP_DATA", "NEUZIP_DATA-is-not-set"))
    parser.add_argument("--text", type=Path, default=data / "train-mix.jsonl.gz")
    parser.add_argument("--held-out", type=Path, default=data / "wikitext-2" / "wiki.test.raw")
    parser.add_argument("--tokenizer", type=Path, default=data / "wikilm-26m")


def main() -> None:
    """Make the runs that are missing, or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--report", action="store_true", help="make no runs")
    parser.add_argument("--name", default="mix_ln", help="of the report's files")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--placements", default=",".join(MAIN), help=f"all, or of {', '.join(PLACEMENTS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--size", default="71M", choices=[*RECIPES, *OWN])
    parser.add_argument("--embed-scale", type=float, default=1.0, help="multiply what the embedding gives")
    parser.add_argument("--alpha", type=float, help="part of Mix-LN that is Post-LN; the recipe's otherwise")
    parser.add_argument("--init", default="plain", choices=INITIALIZATIONS, help="first weights of writers")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help=f"windows of {LENGTH} tokens a step")
    parser.add_argument("--peak", type=float, help="the highest learning rate; the recipe's otherwise")
    parser.add_argument("--held-tokens", type=int, default=MOST_HELD, help="of a held-out text, at most")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    add_places(parser)
    arguments = parser.parse_args()
    if not arguments.report:
        make(arguments)
    report(arguments.runs, arguments.results / arguments.name if arguments.report else None)


def make(arguments: argparse.Namespace) -> None:
    """The runs that are missing, seed by seed, so that what is there can always be compared."""
    began, longest = time.monotonic(), 0.0
    texts = read(
        arguments.text, arguments.held_out, load_tokenizer(arguments.tokenizer), arguments.held_tokens
    )
    recipe = (RECIPES | OWN)[arguments.size]
    settings = Settings(
        arguments.size, arguments.steps, arguments.batch, arguments.peak or recipe.peak, texts.name,
        texts.train.numel(), {name: ids.numel() for name, ids in texts.held_out.items()},
        bf16=arguments.device != "cpu", compiled=arguments.compile, embed_scale=arguments.embed_scale,
        alpha=recipe.post_norm_ratio if arguments.alpha is None else arguments.alpha,
        initialization=arguments.init,
    )  # fmt: skip
    names = PLACEMENTS if arguments.placements == "all" else arguments.placements.split(",")
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for seed in map(int, arguments.seeds.split(",")):
        for placement in names:
            path = arguments.runs / f"{placement}-{seed}.json"
            if path.exists():
                require_settings(path, settings)
                continue
            if time.monotonic() - began + longest > arguments.budget:
                print(f"not begun in {arguments.budget:.0f} s: {placement}, seed {seed}, and what follows")
                return
            started = time.monotonic()
            found = one_run(recipe, placement, seed, settings, texts, path, arguments.device)
            longest = max(longest, time.monotonic() - started)
            write_file(path, (json.dumps(found) + "\n").encode())
            ends = found.get("failed") or ", ".join(
                f"{name} {math.exp(loss):.2f}" for name, loss in found["held_out"].items()
            )
            print(f"{placement:18} seed {seed}  {ends}  {time.monotonic() - started:.0f} s", flush=True)


def require_settings(path: Path, settings: Settings) -> None:
    """Stop where a run was made otherwise."""
    before = json.loads(path.read_text())["settings"]
    if before != json.loads(json.dumps(asdict(settings))):
        raise SystemExit(f"{path} was made with other settings: {before}; name another folder")


def read(text: Path, held_out: Path, tokenizer: Any, most_held: int) -> Texts:
    """The text in two parts, if it has sources, and another one that is held out; tokens of each at most."""
    documents = list(read_documents(text))
    sources = [None] * len(documents)
    if text.name.endswith(".jsonl.gz"):
        with gzip.open(text, "rt", encoding="utf-8") as lines:
            sources = [json.loads(line).get("source") for line in lines if line.strip()]
    held = [index % EVERY == EVERY - 1 and source in HELD_SOURCES for index, source in enumerate(sources)]
    parts = {
        part: tokenise(tokenizer, [d for d, is_held in zip(documents, held, strict=True) if is_held is part])
        for part in (False, True)
    }
    others = tokenise(tokenizer, read_documents(held_out))[:most_held]
    own = {"held-out documents": parts[True][:most_held]} if any(held) else {}
    return Texts(parts[False], own | {held_out.name: others}, text.name, len(tokenizer))


def one_run(
    recipe: Recipe, placement: Placement, seed: int, settings: Settings, texts: Texts, path: Path,
    device: str, examine: Callable[[NormPlacementForCausalLM], dict[str, Any]] = lambda model: {},
) -> dict[str, Any]:  # fmt: skip
    """Train one model, and what is found; `examine` adds figures of the trained model."""
    config = replace(recipe, post_norm_ratio=settings.alpha).config(
        placement, texts.vocab_size, embedding_scale=settings.embed_scale,
        initialization="plain" if placement == "deepnorm" else settings.initialization,
    )  # fmt: skip
    model = new_model(config, seed, torch.device(device))
    windows = TrainingWindows.of(texts.train, length=LENGTH, batch=settings.batch, seed=seed)
    others = TrainingWindows.of(texts.train, length=LENGTH, batch=settings.batch, seed=PROBE_SEED)
    probes = [others.batch(number) for number in range(PROBES)]
    first = gradient_norms(model, probes, bf16=settings.bf16)
    trained: nn.Module = torch.compile(model) if settings.compiled else model
    take = stepper(trained, windows, bf16=settings.bf16)
    while_training: list[tuple[int, float]] = []
    text = next(iter(texts.held_out.values()))
    text = text[: max(LENGTH + 1, text.numel() // 4)]

    def step(number: int, lr: float) -> dict[str, float]:
        if number and number % max(1, settings.steps // 5) == 0:
            while_training.append((number, held_out_loss(model, text)))
        return take(number, lr)

    began = time.perf_counter()
    log = path.with_suffix(".jsonl")
    schedule = recipe.schedule(settings.steps, settings.peak)
    made = {"placement": placement, "seed": seed, "settings": asdict(settings)}
    try:
        run(step, steps=settings.steps, schedule=schedule, log=log)
    except NeuzipError as failure:  # a loss that is not finite: a result too, told in the report
        return {**made, "failed": str(failure)}
    seconds = time.perf_counter() - began
    losses = [figures["loss"] for figures in read_log(log)]
    norms = [figures["gradient_norm"] for figures in read_log(log)]
    every = max(1, settings.steps // 100)
    on_gpu = device.startswith("cuda")
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    return {
        **made,
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out": {name: held_out_loss(model, ids) for name, ids in texts.held_out.items()},
        "held_out_while_training": while_training,
        "loss": [(n + 1, smoothed(losses, every)[n]) for n in range(every - 1, len(losses), every)],
        "largest_gradient_norm": max(norms),
        "steps_clipped": sum(norm > 1 for norm in norms),
        "gradient_norms": {"first": first, "last": gradient_norms(model, probes, bf16=settings.bf16)},
        "seconds": seconds,
        "environment": environment.plain(),
        **examine(model),
    }  # fmt: skip


def report(folder: Path, kept: Path | None) -> None:
    """Print the table; keep it and the picture, as `kept` with .json and .svg."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))]
    if not runs:
        raise SystemExit(f"{folder} has no runs")
    if any(one["settings"] != runs[0]["settings"] for one in runs):
        raise SystemExit(f"{folder} has runs of different settings")
    failed = [one for one in runs if "failed" in one]
    for one in failed:
        print(f"{NAMES[one['placement']]:18} seed {one['seed']} {one['failed']}")
    runs = [one for one in runs if "failed" not in one]
    if not runs:
        return
    rows = [row for text in runs[0]["held_out"] for row in table(runs, text)]
    for row in rows:
        print(line(row))
    if kept is not None:
        facts = {
            "settings": runs[0]["settings"],
            "parameters": runs[0]["parameters"],
            "failed": [{key: one[key] for key in ("placement", "seed", "failed")} for one in failed],
            "runs": [
                {key: one[key] for key in one if key not in ("settings", "environment")} for one in runs
            ],
        }
        what = "norm placements at equal tokens: perplexity at the end, and against Pre-LN by seed"
        measurement = Measurement(Environment.read(runs[0]["environment"]), rows, facts)
        target = kept.with_suffix(".json")
        write_file(target, (json.dumps({"what": what, **measurement.plain()}, indent=1) + "\n").encode())
        print(f"saved {target} and {picture(runs, kept.with_suffix('.svg'))}")


def table(runs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """A row a placement: perplexities by seed, their mean and spread, and the difference to Pre-LN."""
    losses: dict[str, dict[int, float]] = {name: {} for name in PLACEMENTS}
    for one in runs:
        losses[one["placement"]][one["seed"]] = one["held_out"][text]
    rows = []
    for placement, by_seed in losses.items():
        if not by_seed:
            continue
        perplexities = [math.exp(loss) for _, loss in sorted(by_seed.items())]
        both = sorted(by_seed.keys() & losses["pre"].keys())
        changes = [by_seed[seed] - losses["pre"][seed] for seed in both] if placement != "pre" else []
        rows.append({
            "placement": placement, "text": text, "perplexities": perplexities,
            "mean": statistics.fmean(perplexities),
            "spread": statistics.stdev(perplexities) if len(perplexities) > 1 else None,
            "against_pre": interval(changes),
        })  # fmt: skip
    return rows


def interval(changes: list[float]) -> dict[str, float | None] | None:
    """The mean change of the loss as percent of perplexity, and its 95 % interval."""
    if not changes:
        return None
    mean = statistics.fmean(changes)
    if len(changes) not in T95:
        return {"percent": 100 * math.expm1(mean), "low": None, "high": None}
    half = T95[len(changes)] * statistics.stdev(changes) / math.sqrt(len(changes))
    low, high = (100 * math.expm1(mean + sign * half) for sign in (-1, 1))
    return {"percent": 100 * math.expm1(mean), "low": low, "high": high}


def line(row: dict[str, Any]) -> str:
    """A row for a terminal."""
    spread = "" if row["spread"] is None else f" +- {row['spread']:.2f}"
    against = row["against_pre"]
    said = "" if against is None else f"  {against['percent']:+.2f} %"
    if against is not None and against["low"] is not None:
        told = against["high"] < 0 or against["low"] > 0
        said += f" ({against['low']:+.2f} to {against['high']:+.2f}{', beyond the spread' if told else ''})"
    return f"{NAMES[row['placement']]:18} {row['text']:20} perplexity {row['mean']:.2f}{spread}{said}"


def picture(runs: list[dict[str, Any]], path: Path) -> Path:
    """Loss while training, perplexity of each run, gradient norm by layer, as SVG."""
    from matplotlib import style
    from matplotlib.figure import Figure

    text = next(iter(runs[0]["held_out"]))
    present = [placement for placement in PLACEMENTS if any(one["placement"] == placement for one in runs)]
    with style.context(["default", {"svg.hashsalt": "neuzip"}]):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        loss, final, norms = figure.subplots(1, 3)
        tops = []
        for place, placement in enumerate(present):
            own = [one for one in runs if one["placement"] == placement]
            look = {"color": COLOURS[placement], "linewidth": 1.4}
            curve = mean_of([[y for _, y in one["loss"]] for one in own])
            tops.append(curve[len(curve) // 5])
            loss.plot([x for x, _ in own[0]["loss"]], curve, label=NAMES[placement], **look)
            ends = [math.exp(one["held_out"][text]) for one in own]
            final.plot([place] * len(ends), ends, "o", color=COLOURS[placement], alpha=0.6)
            final.plot([place - 0.3, place + 0.3], [statistics.fmean(ends)] * 2, **look)
            layers = mean_of([one["gradient_norms"]["last"] for one in own])
            norms.plot(range(1, len(layers) + 1), layers, marker=".", **look)
        loss.set(xlabel="step", ylabel="training loss (nats per token)")
        loss.set_ylim(top=max(tops))  # what comes before is steep
        loss.legend(frameon=False, fontsize=8)
        final.set(ylabel=f"perplexity, {text}")
        final.set_xticks(
            range(len(present)), [NAMES[p] for p in present], rotation=30, ha="right", fontsize=8
        )
        norms.set(xlabel="layer", ylabel="gradient norm at the end", yscale="log")
        for axes in (loss, final, norms):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return path


def mean_of(rows: list[list[float]]) -> list[float]:
    """The means of columns."""
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


if __name__ == "__main__":
    main()
