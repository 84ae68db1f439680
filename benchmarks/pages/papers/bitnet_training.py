"""Rows of BitNet a4.8 that need a model trained from random weights: results of bitnet_training.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pages.layout import Document, is_measured, load, table
from pages.papers.items import Claim, PaperItem

RESULT = "bitnet_training"

SIZES = ("30M", "tiny")
"""Sections of the result: a table shows the first that has all of its variants."""

TO_RUN = (
    "It needs ternary models that were trained from random weights: "
    "`python benchmarks/bitnet_training.py RUNS --size 30M --seeds 0,1,2` trains them."
)

LARGER = (
    "On a GPU, `python benchmarks/bitnet_training.py RUNS --size 30M --seeds 0,1,2` trains larger models for "
    "longer."
)

LEAST_SEEDS = 3
"""Seeds that a conclusion needs, as for Mix-LN."""

SMALLER = "models of the paper's sizes and its tokens of training"

SITES = {"qkv": "QKV", "out": "output", "up": "up", "gate": "gate", "down": "down"}
"""Projections, in the order of Table 2."""

PAPER_SPARSITIES = {
    "paper, 700M, b1.58": (1.2, 5.9, 1.2, 1.2, 21.8, 6.2),
    "paper, 700M, a4.8": (12.1, 50.0, 66.2, 12.1, 80.9, 42.5),
    "paper, 7B, b1.58": (1.7, 11.2, 1.4, 1.4, 24.2, 7.3),
    "paper, 7B, a4.8": (12.1, 50.0, 71.4, 12.0, 84.2, 44.5),
}
"""Table 2 of the paper, in percent: by site, and overall."""


@dataclass(frozen=True)
class TrainedModels:
    """The losses and figures of one size: those of a variant by seed."""

    document: Document

    @classmethod
    def largest(cls, *variants: str) -> TrainedModels | None:
        """Those of the first of SIZES of which all these variants were trained, if there is one."""
        sections = load(RESULT)["sections"] if is_measured(RESULT) else {}
        sizes = (cls(sections[size]) for size in SIZES if size in sections)
        return next((models for models in sizes if all(map(models.losses, variants))), None)

    def losses(self, variant: str) -> dict[int, float]:
        """Held-out losses by seed, in nats per token; infinity where training failed, empty without a run."""
        for row in self.document["results"]:
            if row["variant"] == variant:
                pairs = zip(row["seeds"], row["held_out"], strict=True)
                return {seed: math.inf if loss is None else loss for seed, loss in pairs}
        return {}

    def rises(self, variant: str, base: str) -> list[float]:
        """By how much the loss of a variant is above that of another, for each seed of both."""
        ours, theirs = self.losses(variant), self.losses(base)
        return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]

    def figures(self, figure: str, variant: str) -> list[Document]:
        """Other figures of a variant, one of each seed."""
        return [
            one["value"]
            for one in self.document["figures"]
            if (one["figure"], one["variant"]) == (figure, variant)
        ]

    @property
    def name(self) -> str:
        """The size that was measured: one of SIZES."""
        name: str = self.document["size"]["name"]
        return name

    @property
    def separation(self) -> str:
        """By how much the losses of ternary models differ, in words."""
        rows = [r for r in self.document["results"] if r["variant"] != "dense"]
        means = [fmean(r["held_out"]) for r in rows if None not in r["held_out"]]
        return (
            f"Mean held-out losses of the ternary variants differ by at most {max(means) - min(means):.3f} "
            "nats: so short a training hardly separates them."
        )

    def described(self, seeds: int) -> str:
        """Size of the models and of the training, and how many seeds, in words."""
        size, parameters = self.document["size"], max(self.document["parameters"].values())
        tokens = size["batch"] * size["window"]
        return (
            f"models of {parameters / 1e6:.1f} M parameters after {size['steps']:,} steps of {tokens:,} "
            f"tokens, {seeds} {'seed' if seeds == 1 else 'seeds'}"
        )


def measured(
    item: PaperItem, models: TrainedModels, ours: str, claims: Sequence[Claim], seeds: int
) -> PaperItem:
    """An item with our result, what it was measured on, and conclusions if there are seeds enough."""
    larger = "" if models.name == SIZES[0] else f"{models.separation} {LARGER}"
    lacks = [*([item.missing] if item.missing else []), *(["three seeds"] if seeds < LEAST_SEEDS else [])]
    return replace(
        item, ours=ours, results=(RESULT,), claims=claims if seeds >= LEAST_SEEDS else (),
        missing=", and ".join([*lacks, SMALLER]), on=models.described(seeds), sections=(models.name,),
        note=" ".join(f"{item.note.replace(TO_RUN, '')} {larger}".split()),
    )  # fmt: skip


def compared(
    item: PaperItem, base: str, names: dict[str, str], claims: Sequence[tuple[str, str, str]]
) -> PaperItem:
    """A figure of losses: a row for each variant of `names`, beside those of `base`.

    claims  text, and the variants of which the first has the higher loss, with every seed
    """
    models = TrainedModels.largest(base, *names)
    if models is None:
        return item
    seeds = min(len(models.rises(name, base)) for name in names)
    rows: list[list[object]] = []
    for name, words in names.items():
        losses, rises = list(models.losses(name).values()), models.rises(name, base)
        difference = "" if name == base else ", ".join(f"{rise:+.4f}" for rise in rises)
        rows.append([words, f"{fmean(losses):.4f}", difference])
    heads = ("model", "held-out loss, nats per token", f"difference from {names[base]}, by seed")
    held = [Claim(text, all(rise > 0 for rise in models.rises(*pair))) for text, *pair in claims]
    return measured(item, models, table(heads, rows), held, seeds)


def table_2(item: PaperItem) -> PaperItem:
    """Sparsity of each projection's inputs."""
    models = TrainedModels.largest("b1.58", "a4.8")
    if models is None:
        return item
    rows: list[list[object]] = [
        [name, *(f"{x:.1f} %" for x in own)] for name, own in PAPER_SPARSITIES.items()
    ]
    for mode in ("b1.58", "a4.8"):
        own = models.figures("sparsity", mode)
        rows.append(
            [f"ours, {mode}", *(f"{100 * fmean(o[s] for o in own):.1f} %" for s in (*SITES, "overall"))]
        )
    hybrid, first = models.figures("sparsity", "a4.8"), models.figures("sparsity", "b1.58")
    claims = [
        Claim("a4.8 has more zeros than b1.58, over all layers, with every seed",
              all(a["overall"] > b["overall"] for a, b in zip(hybrid, first, strict=True))),
        Claim("in a4.8 inputs of down have most zeros, then those of up, then those of the output projection",
              all(a["down"] > a["up"] > a["out"] for a in hybrid)),
    ]  # fmt: skip
    heads = ("model", *SITES.values(), "overall")
    return measured(item, models, table(heads, rows), claims, len(hybrid))


def table_3(item: PaperItem) -> PaperItem:
    """Bits of queries, keys and values."""
    models = TrainedModels.largest()
    if models is None or not (own := models.figures("query_key_bits", "a4.8")):
        return item
    rows = [
        [name, f"{math.exp(fmean(o[name] for o in own)):.2f}",
         ", ".join(f"{100 * math.expm1(o[name] - o['none']):+.2f} %" for o in own)]
        for name in own[0]
    ]  # fmt: skip
    return measured(item, models, table(("a4.8 with", "perplexity", "change, by seed"), rows), [], len(own))


def table_4(item: PaperItem) -> PaperItem:
    """The output projection with all inputs and with the largest half."""
    names = {"a4.8, out int8": "INT8", "a4.8": "INT8, the largest 50 %"}
    models = TrainedModels.largest(*names)
    if models is None:
        return item
    rows = [[words, f"{math.exp(fmean(models.losses(name).values())):.2f}"] for name, words in names.items()]
    rises = models.rises("a4.8", "a4.8, out int8")
    claim = Claim("the largest half costs at most 0.2 % of perplexity, as in the paper, with every seed",
                  all(round(100 * math.expm1(rise), 1) <= 0.2 for rise in rises))  # fmt: skip
    return measured(item, models, table(("output projection", "perplexity"), rows), [claim], len(rises))


def figure_2(item: PaperItem) -> PaperItem:
    """Distribution of inputs."""
    models = TrainedModels.largest()
    if models is None or not (own := models.figures("inputs", "b1.58")):
        return item
    rows = [
        [SITES[site], *(f"{fmean(o[site][key] for o in own):.{digits}f}" for key, digits in
                        (("excess_kurtosis", 2), ("small", 3), ("largest", 2)))]
        for site in SITES
    ]  # fmt: skip
    kurtosis = [{site: o[site]["excess_kurtosis"] for site in SITES} for o in own]
    claims = [
        Claim("inputs of the output and down projections have the highest kurtosis, with every seed",
              all(min(k["out"], k["down"]) > max(k["qkv"], k["gate"], k["up"]) for k in kurtosis)),
        Claim("inputs of attention and of gate and up are near Gaussian: an excess kurtosis below 1",
              all(abs(k[site]) < 1 for k in kurtosis for site in ("qkv", "gate", "up"))),
    ]  # fmt: skip
    heads = (
        "inputs of",
        "excess kurtosis (Gaussian: 0)",
        "share below 0.1 RMS (Gaussian: 0.080)",
        "largest / RMS",
    )
    return measured(item, models, table(heads, rows), claims, len(own))


def figure_3(item: PaperItem) -> PaperItem:
    """Inputs of the output projection by quantiser."""
    models = TrainedModels.largest()
    if models is None or not (own := models.figures("out_inputs", "b1.58")):
        return item
    names = {"int8": "INT8", "int4": "INT4, absmean", "top_k_int8": "INT8, the largest 50 %"}
    rows = [
        [words, *(f"{fmean(o[name][key] for o in own):.4f}" for key in ("zeros", "relative_error"))]
        for name, words in names.items()
    ]
    heads = ("inputs", "share of zeros", "squared error / squares")
    return measured(item, models, table(heads, rows), [], len(own))


def perplexities() -> tuple[str, list[float | None], list[float]] | None:
    """Table 1 in small: size; perplexities of dense, b1.58, a4.8 with FP4, and a4.8; a4.8 / b1.58 by seed."""
    models = TrainedModels.largest("b1.58", "a4.8", "a4.8-fp4")
    if models is None:
        return None
    own = [list(models.losses(name).values()) for name in ("dense", "b1.58", "a4.8-fp4", "a4.8")]
    means = [math.exp(fmean(losses)) if losses else None for losses in own]
    ratios = [math.exp(rise) for rise in models.rises("a4.8", "b1.58")]
    return models.described(len(ratios)), means, ratios
