"""Variants of Mix-LN and Pre-LN, as Tables 5, 6 and 8 and Figures 3, 5 and 6b of the Mix-LN paper have them.

    python benchmarks/mix_ln_variants.py RUNS --name NAME [--size narrow] [--seeds 0,1,2] [--variants mix,pre]
    python benchmarks/mix_ln_variants.py RUNS --name NAME --report       # train nothing

    python benchmarks/mix_ln_variants.py RUNS --name narrow --tokenizer eval/demo/checkpoint      # on a CPU
    python benchmarks/mix_ln_variants.py RUNS --name 71M --size 71M --steps 480 --batch 32

Each variant of VARIANTS and each seed is a training run of mix_ln.py: the same text, order of windows, first
weights and learning rates. RUNS keeps the runs, and a run that it has is not repeated.
An interrupted command continues with the run at which it stopped.

The result is benchmarks/results/mix_ln_variants-NAME.json. It has a row for each variant and held-out text:
perplexities by seed, and the change against Pre-LN with the same scaling and seed, as in mix_ln.py. `layers`
has the examined variants: `angular_distances[l]` is the distance, as a share of 180 degrees, between the
inputs of layers l and l + 1 at the last token of each window (the last l: between input and output of the
last layer), `blocks[n - 1][l]` the same over n layers, and `drops[l]` what the loss rises by, in nats per
token, if layer l passes its input on. All of these are means over seeds, and by_seed has the drops of each.

Paper: Li et al. 2024, arXiv 2412.13795. Its Table 6 also has Admin and Group-LN, which neuzip has not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mix_ln import OWN, Settings, add_places, interval, mean_of, one_run, read, require_settings
from mix_ln_recipes import LENGTH, RECIPES
from record import Environment, Measurement, save

from neuzip.compress.workspace import write_file
from neuzip.eval.layers.distances import compare_states
from neuzip.eval.layers.left_out import ModelWithout, measure_without
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import Text, read_text
from neuzip.runtime.hf.norm_placement import Initialization, NormPlacementForCausalLM, Placement
from neuzip.runtime.hf.tokenizer import load_tokenizer

EMBED_SCALE = 50.0
"""1 / 0.02: the embedding then has a standard deviation of 1 at first."""

EXAMINED_TOKENS = 2048
"""Tokens of the second held-out text that distances and drops are measured on."""

EXAMINED_DOCUMENTS = 4
"""Documents of that text that are read for them, so that the rest is not tokenised again for each model."""

SOURCES = ("train", "runtime/hf/norm_placement.py", "benchmarks/mix_ln.py", "benchmarks/mix_ln_recipes.py")
"""What makes the runs: runs of several commits are of one result if these are the same in all of them."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A placement of norms, the share of Post-LN layers in Mix-LN, and what is scaled at first."""

    placement: Placement
    alpha: float = 0.25
    embed_scale: float = 1.0
    initialization: Initialization = "plain"

    @property
    def baseline(self) -> Variant:
        """Pre-LN with the same scaling."""
        return replace(self, placement="pre", alpha=0.25)


VARIANTS = {
    "pre": Variant("pre"),
    "mix": Variant("mix"),
    "post": Variant("post"),
    "sandwich": Variant("sandwich"),
    "deepnorm": Variant("deepnorm"),
    "mix-0.167": Variant("mix", 1 / 6),
    "mix-0.333": Variant("mix", 1 / 3),
    "mix-0.417": Variant("mix", 5 / 12),
    "mix-0.5": Variant("mix", 1 / 2),
    "pre-init": Variant("pre", initialization="scaled"),
    "mix-init": Variant("mix", initialization="scaled"),
    "pre-both": Variant("pre", embed_scale=EMBED_SCALE, initialization="scaled"),
    "mix-both": Variant("mix", embed_scale=EMBED_SCALE, initialization="scaled"),
    "pre-embedding": Variant("pre", embed_scale=EMBED_SCALE),
    "mix-embedding": Variant("mix", embed_scale=EMBED_SCALE),
}
"""By name, in the order of training. Shares are twelfths, so that 12 layers have whole numbers of Post-LN."""

EXAMINED = ("pre", "post", "mix")
"""Variants whose layers are measured: Figures 3, 5 and 6b."""


def main() -> None:
    """Train the runs that are missing, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--name", required=True, help="of the result")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--size", default="narrow", choices=[*RECIPES, *OWN])
    parser.add_argument("--steps", type=int, help="the size's own otherwise")
    parser.add_argument("--batch", type=int, default=2, help=f"windows of {LENGTH} tokens a step")
    parser.add_argument("--held-tokens", type=int, default=8192, help="of a held-out text, at most")
    add_places(parser)
    arguments = parser.parse_args()
    if not arguments.report:
        train(arguments)
    runs = {
        name: found
        for name in VARIANTS
        if (found := [json.loads(path.read_text()) for path in sorted(arguments.runs.glob(f"{name}-?.json"))])
    }
    if not runs:
        raise SystemExit(f"{arguments.runs} has no runs")
    report(runs, arguments.name)


def train(arguments: argparse.Namespace) -> None:
    """The runs that are missing, seed by seed, so that variants can be compared at any time."""
    recipe = (RECIPES | OWN)[arguments.size]
    texts = read(
        arguments.text, arguments.held_out, load_tokenizer(arguments.tokenizer), arguments.held_tokens
    )
    settings = Settings(
        arguments.size, arguments.steps or recipe.steps, arguments.batch, recipe.peak, texts.name,
        texts.train.numel(), {name: ids.numel() for name, ids in texts.held_out.items()},
        bf16=arguments.device != "cpu", compiled=arguments.compile, embed_scale=1.0, alpha=0.25,
        initialization="plain",
    )  # fmt: skip
    arguments.runs.mkdir(parents=True, exist_ok=True)
    examine = examiner(arguments.tokenizer, read_text(str(arguments.held_out)))
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.variants.split(","):
            variant, path = VARIANTS[name], arguments.runs / f"{name}-{seed}.json"
            own = replace(
                settings, alpha=variant.alpha, embed_scale=variant.embed_scale,
                initialization=variant.initialization,
            )  # fmt: skip
            if path.exists():
                require_settings(path, own)
                continue
            began = time.monotonic()
            found = one_run(
                recipe, variant.placement, seed, own, texts, path, arguments.device,
                examine if name in EXAMINED else lambda model: {},
            )  # fmt: skip
            write_file(path, (json.dumps(found) + "\n").encode())
            print(f"{name:14} seed {seed}  {ends(found)}  {time.monotonic() - began:.0f} s", flush=True)


def ends(run: Row) -> str:
    """The perplexities of a run at the end, or why it failed."""
    if "failed" in run:
        return str(run["failed"])
    return ", ".join(f"{text} {math.exp(loss):.2f}" for text, loss in run["held_out"].items())


def examiner(tokenizer: Path, text: Text) -> Callable[[NormPlacementForCausalLM], Row]:
    """A function that measures the layers of a model on a text, which the tokenizer of a folder reads."""
    text = replace(text, documents=text.documents[:EXAMINED_DOCUMENTS])

    def examine(model: NormPlacementForCausalLM) -> Row:
        model.eval()
        whole = BaselineComparison(
            tokenizer, text, window=LENGTH - 1, max_tokens=EXAMINED_TOKENS, model=model
        )
        without = ModelWithout(model)
        blocks = compare_states(model, whole.reading).last_token.mean
        drops = [measure_without(whole, without, [layer]) for layer in range(len(blocks))]
        return {
            "blocks": blocks,
            "drops": [None if one is None else one.nll_difference.value for one in drops],
            "examined_tokens": whole.tokens,
        }

    return examine


def report(runs: dict[str, list[Row]], name: str) -> None:
    """Print and save the rows of all variants."""
    finished = {variant: [one for one in found if "failed" not in one] for variant, found in runs.items()}
    first = next(one for found in finished.values() for one in found)
    rows = [
        row(variant, finished, text)
        for text in first["held_out"]
        for variant, found in finished.items()
        if found
    ]  # fmt: skip
    for one in rows:
        change = one["against_pre"]
        percent = "" if change is None else f"{change['percent']:+.1f} %"
        print(f"{one['variant']:14} {one['text']:20} {one['mean']:10.2f}  {percent}")
    shared = ("size", "steps", "batch", "peak", "text", "tokens", "held_out", "bf16", "compiled")
    facts = {
        "settings": {key: first["settings"][key] for key in shared},
        "parameters": first["parameters"],
        "seeds": sorted({one["seed"] for found in finished.values() for one in found}),
        "failed": [
            {"variant": variant, "seed": one["seed"], "failed": one["failed"]}
            for variant, found in runs.items() for one in found if "failed" in one
        ],
        "layers": [layers(variant, finished[variant]) for variant in EXAMINED if finished.get(variant)],
        "gradient_norms": {
            variant: {when: mean_of([one["gradient_norms"][when] for one in found])
                      for when in ("first", "last")}
            for variant, found in finished.items() if found
        },
    }  # fmt: skip
    what = "variants of Mix-LN and Pre-LN at equal tokens: perplexity, and what each layer is worth"
    # The runs may come from several commands; this one would make all of them.
    again = Environment.here().command.replace(" --report", "")
    every = [one for found in runs.values() for one in found]
    environment = replace(Environment.of_runs(every, SOURCES), command=again)
    measurement = Measurement(environment, rows, facts)
    print(f"saved {save(f'mix_ln_variants-{name}', what, measurement)}")


def row(variant: str, runs: dict[str, list[Row]], text: str) -> Row:
    """Perplexities of a variant, and its change against Pre-LN with the same scaling."""
    by_seed = {one["seed"]: one["held_out"][text] for one in runs[variant]}
    own = VARIANTS[variant]
    peer = next(name for name, other in VARIANTS.items() if other == own.baseline)
    peers = {one["seed"]: one["held_out"][text] for one in runs.get(peer, ())} if peer != variant else {}
    perplexities = [math.exp(loss) for _, loss in sorted(by_seed.items())]
    return {
        "variant": variant, **asdict(own), "text": text, "perplexities": perplexities,
        "mean": statistics.fmean(perplexities),
        "spread": statistics.stdev(perplexities) if len(perplexities) > 1 else None,
        "against_pre": interval([by_seed[seed] - peers[seed] for seed in sorted(by_seed.keys() & peers)]),
    }  # fmt: skip


def layers(variant: str, runs: Sequence[Row]) -> Row:
    """Distances and drops of a variant, means over seeds; no drops if a prediction was not finite."""
    depth = len(runs[0]["blocks"])
    blocks = [mean_of([one["blocks"][n] for one in runs]) for n in range(depth)]
    drops = [one["drops"] for one in runs]
    return {
        "variant": variant, "tokens": runs[0]["examined_tokens"], "angular_distances": blocks[0],
        "blocks": blocks, "drops": None if any(None in one for one in drops) else mean_of(drops),
        "by_seed": drops,
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
