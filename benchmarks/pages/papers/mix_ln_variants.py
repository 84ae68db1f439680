"""Tables 5, 6 and 8 and Figures 5 and 6b of Mix-LN, which benchmarks/mix_ln_variants.py measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pages.layout import Document, is_measured, load, table
from pages.papers.items import Claim, PaperItem
from pages.training import WINDOW

LARGE, NARROW = "mix_ln_variants-71M", "mix_ln_variants-narrow"

NAME = LARGE if is_measured(LARGE) else NARROW
"""The result of the paper's smallest model, from a GPU, or that of the form for a CPU."""

SHAPES = {"narrow": ("64", "1,024"), "71M": ("512", "8,192")}
"""Width and vocabulary of models of 12 layers by size."""

TEXT = "held-out documents"

SEEDS = 3
"""Seeds that a conclusion needs."""

PAPER_SHARES = {
    "pre": ("0 %", 18.65), "mix-0.167": ("16.7 %", 18.34), "mix": ("25 %", 18.18),
    "mix-0.333": ("33 %", 18.41), "mix-0.417": ("41.7 %", 18.55), "mix-0.5": ("50 %", 18.86),
    "post": ("100 %", 1434.0),
}  # fmt: skip
"""Table 5 of the paper, 1B, by our names."""

PAPER_PLACEMENTS = {
    "pre": ("Pre-LN", 23.39), "admin": ("Admin", 24.82), "group": ("Group-LN", 23.10),
    "sandwich": ("Sandwich-LN", 23.26), "mix": ("Mix-LN", 22.33),
}  # fmt: skip
"""Table 6 of the paper, 250M."""

ABSENT = ("admin", "group")
"""Placements that neuzip does not have."""

EXAMINED = {"pre": "Pre-LN", "post": "Post-LN", "mix": "Mix-LN"}

SCALED = {"no": "", "initialisation": "-init", "both": "-both", "embedding": "-embedding"}
"""Endings of our variants by what is scaled."""


def rows_of(document: Document) -> dict[str, Document]:
    """Rows of the text that the paper's would be, by variant."""
    return {r["variant"]: r for r in document["results"] if r["text"] == TEXT}


def cells(row: Document | None) -> list[str]:
    """Perplexity with its spread, and the change against Pre-LN; empty without a run."""
    if row is None:
        return ["", ""]
    spread = "" if row["spread"] is None else f" ± {row['spread']:.1f}"
    change = row["against_pre"]
    return [f"{row['mean']:.1f}{spread}", "" if change is None else f"{change['percent']:+.1f} %"]


def seeds_of(row: Document) -> int:
    """How many seeds were run."""
    return len(row["perplexities"])


def tested(rows: dict[str, Document], names: Sequence[str]) -> bool:
    """Whether all of these variants have enough seeds for a conclusion."""
    return all(name in rows and seeds_of(rows[name]) >= SEEDS for name in names)


def missing(rows: dict[str, Document], titles: dict[str, str], more: str) -> str:
    """What a table lacks: variants that were not run, seeds, and more."""
    parts = [title for name, title in titles.items() if name not in rows]
    if not tested(rows, [name for name in titles if name in rows]):
        parts.append("three seeds of each row")
    return ", ".join([*parts, more])


def described(document: Document) -> str:
    """Size of the models and of their training, in words."""
    settings = document["settings"]
    tokens = settings["steps"] * settings["batch"] * WINDOW
    seeds = len(document["seeds"])
    return (
        f"Llamas of {document['parameters'] / 1e6:.1f} M parameters after {tokens:,} tokens, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}"
    )


def recipe(document: Document) -> str:
    """What was trained, in a sentence or two."""
    settings = document["settings"]
    width, vocabulary = SHAPES[settings["size"]]
    larger = (
        " `python benchmarks/mix_ln_variants.py RUNS --name 71M --size 71M --steps 480 --batch 32` trains "
        "the paper's smallest model on a GPU."
    )
    return (
        f"Our models have 12 layers of width {width} and a vocabulary of {vocabulary}, and see "
        f"{settings['steps']} steps of {settings['batch']} windows. Perplexities are those of held-out "
        "documents." + (larger if settings["size"] == "narrow" else "")
    )


def table_5() -> PaperItem:
    """The share of Post-LN layers."""
    document = load(NAME)
    rows = rows_of(document)
    lines = [
        [share, f"{perplexity:,.2f}", *cells(rows.get(name))]
        for name, (share, perplexity) in PAPER_SHARES.items()
    ]
    claims = []
    if tested(rows, list(PAPER_SHARES)):
        means = {name: rows[name]["mean"] for name in PAPER_SHARES}
        claims = [
            Claim("25 % is better than 0 %", means["mix"] < means["pre"]),
            Claim("25 % is the best share", min(means, key=lambda name: means[name]) == "mix"),
            Claim("100 % is the worst share", max(means, key=lambda name: means[name]) == "post"),
        ]
    return PaperItem(
        "Table 5", "Perplexity by the share of Post-LN layers, 1B",
        "The paper's perplexities are in the table.",
        table(("Post-LN layers", "paper, 1B", "ours", "against 0 %, same seeds"), lines),
        (NAME,),
        claims,
        missing(
            rows, {name: f"a share of {share}" for name, (share, _) in PAPER_SHARES.items()},
            "the 1B model",
        ),
        recipe(document),
        on=described(document),
    )  # fmt: skip


def table_6() -> PaperItem:
    """Other placements."""
    document = load(NAME)
    rows = rows_of(document)
    lines = [
        [title, f"{perplexity:.2f}", *cells(rows.get(name))]
        for name, (title, perplexity) in PAPER_PLACEMENTS.items()
    ]
    claims = []
    if tested(rows, ["pre", "sandwich", "mix"]):
        means = {name: rows[name]["mean"] for name in ("pre", "sandwich", "mix")}
        claims = [
            Claim("Mix-LN is better than Sandwich-LN", means["mix"] < means["sandwich"]),
            Claim("Sandwich-LN is better than Pre-LN", means["sandwich"] < means["pre"]),
        ]
    return PaperItem(
        "Table 6", "Perplexity of other norm placements, 250M",
        "The paper's perplexities are in the table.",
        table(("placement", "paper, 250M", "ours", "against Pre-LN, same seeds"), lines),
        (NAME,),
        claims,
        missing(
            rows, {name: title for name, (title, _) in PAPER_PLACEMENTS.items() if name not in ABSENT},
            "Admin, Group-LN, and the 250M model",
        ),
        f"{recipe(document)} Admin and Group-LN are not implemented.",
        on=described(document),
    )  # fmt: skip


def figure_5() -> PaperItem:
    """Distances between layers."""
    document = load(NAME)
    found = {one["variant"]: one for one in document["layers"]}
    names = [name for name in EXAMINED if name in found]
    depth = len(found[names[0]]["angular_distances"])
    lines = [[i, *(f"{found[name]['angular_distances'][i]:.3f}" for name in names)] for i in range(depth)]
    claims = []
    if enough(found):
        late = {name: statistics.fmean(found[name]["angular_distances"][depth // 2 :]) for name in names}
        claims = [
            Claim(
                f"in the second half of the layers, Mix-LN's distances are larger than {title}'s",
                late["mix"] > late[name],
            )
            for name, title in EXAMINED.items()
            if name != "mix"
        ]
    return PaperItem(
        "Figure 5", "Angular distances by layer with Pre-LN, Post-LN and Mix-LN, 130M",
        "Mix-LN's deep layers differ most from one another.",
        table(("layer", *(EXAMINED[name] for name in names)), lines),
        (NAME,),
        claims,
        examined(found, "the 130M model, and distances over several layers (they are in the result)"),
        f"Distance to the input of the next layer at the last token, as a share of 180 degrees, on "
        f"{found[names[0]]['tokens']:,} tokens of WikiText-2. {recipe(document)}",
        on=described(document),
    )  # fmt: skip


def figure_6b() -> PaperItem:
    """What a model loses without one layer."""
    document = load(NAME)
    found = {one["variant"]: one for one in document["layers"] if one["drops"] is not None}
    names = [name for name in EXAMINED if name in found]
    depth = len(found[names[0]]["drops"])
    lines = [[i, *(f"{found[name]['drops'][i]:+.3f}" for name in names)] for i in range(depth)]
    claims = []
    some = sum(abs(drop) < 0.01 for name in names for drop in found[name]["drops"]) > depth * len(names) / 2
    unused = "So short a training leaves most layers nearly unused. " if some else ""
    if enough(found):
        late = {name: statistics.fmean(found[name]["drops"][depth // 2 :]) for name in names}
        claims = [
            Claim(
                "without one of the layers of the second half, Mix-LN loses more than Pre-LN on average",
                late["mix"] > late["pre"],
            )
        ]
    return PaperItem(
        "Figure 6b", "Drop of accuracy without one layer, 130M after fine-tuning",
        "Mix-LN loses more than Pre-LN without one of its deep layers.",
        table(("layer left out", *(EXAMINED[name] for name in names)), lines),
        (NAME,),
        claims,
        examined(found, "the 130M model, fine-tuning, and the accuracy of ARC-easy"),
        f"The loss in nats per token rises by so much on {found[names[0]]['tokens']:,} tokens of WikiText-2; "
        f"the paper has the accuracy of ARC-easy. {unused}{recipe(document)}",
        on=described(document),
    )  # fmt: skip


def enough(found: dict[str, Document]) -> bool:
    """Whether all examined variants have enough seeds for a conclusion."""
    return all(name in found and len(found[name]["by_seed"]) >= SEEDS for name in EXAMINED)


def examined(found: dict[str, Document], more: str) -> str:
    """What a figure by layer lacks."""
    return more if enough(found) else f"three seeds; {more}"


def scaled_rows() -> list[Sequence[object]]:
    """Rows of Table 8 of the variants that were run."""
    document = load(NAME)
    rows = rows_of(document)
    lines: list[Sequence[object]] = []
    for what, ending in SCALED.items():
        pre, mix = rows.get(f"pre{ending}"), rows.get(f"mix{ending}")
        if pre and mix:
            size, seeds = document["parameters"] / 1e6, min(map(seeds_of, (pre, mix)))
            lines.append([
                f"ours, {size:.1f} M parameters, seeds: {seeds}",
                what, cells(pre)[0], cells(mix)[0], cells(mix)[1],
            ])  # fmt: skip
    return lines


def scaled_changes() -> dict[str, float]:
    """Mix-LN against Pre-LN in percent by what is scaled, of variants with enough seeds."""
    rows = rows_of(load(NAME))
    return {
        what: 100 * math.expm1(math.log(rows[f"mix{ending}"]["mean"] / rows[f"pre{ending}"]["mean"]))
        for what, ending in SCALED.items()
        if tested(rows, [f"pre{ending}", f"mix{ending}"])
    }
