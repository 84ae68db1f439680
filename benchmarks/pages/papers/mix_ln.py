"""Tables and figures of Mix-LN (arXiv 2412.13795)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pages.layout import MODELS_READ, Document, load, table
from pages.papers.items import Claim, PaperItem, PaperSection
from pages.papers.mix_ln_variants import (
    NAME,
    described,
    figure_5,
    figure_6b,
    scaled_changes,
    scaled_rows,
    table_5,
    table_6,
)
from pages.training import WINDOW

PAPER_PERPLEXITIES = {
    "Post-LN": (35.18, 26.95, 1409.09, 1411.54), "DeepNorm": (34.87, 27.17, 22.77, 1410.94),
    "Pre-LN": (34.77, 26.78, 21.92, 18.65), "Mix-LN": (33.12, 26.07, 21.39, 18.18),
}  # fmt: skip
"""Table 1 of the paper: 71M, 130M, 250M, 1B."""

KEYS = {"Post-LN": "post", "Pre-LN": "pre", "Mix-LN": "mix"}

TEXT = "held-out documents"

PAPER_TOKENS = 1.1e9
"""Training tokens of the paper's 71M model."""

PAPER_SCALED = {"no": (32.18, 29.95), "initialisation": (30.63, 29.77), "both": (31.28, 31.19)}
"""Table 8 of the paper, 130M: Pre-LN and Mix-LN, by what is scaled."""


def mix_ln() -> PaperSection:
    """All tables and figures of the paper."""
    return PaperSection(
        "Mix-LN", "2412.13795",
        (FIGURE_1, table_1(), figure_2(), figure_3(), FIGURE_4, TABLE_2, TABLE_3, TABLE_4, table_5(),
         table_6(), figure_5(), figure_6a(), figure_6b(), table_7(), table_8()),
    )  # fmt: skip


FIGURE_1 = PaperItem(
    "Figure 1", "Layers with Post-LN, Pre-LN and Mix-LN",
    "A drawing.",
    note="`runtime/hf/norm_placement.py` has these layers, and DeepNorm, Sandwich-LN, Peri-LN and LayerNorm "
    "scaling.",
    drawn=True,
)  # fmt: skip


def table_1() -> PaperItem:
    """Perplexity by norm placement and size."""
    once, repeated = load("mix_ln-once"), load("mix_ln")
    rows: list[Sequence[object]] = [
        [name, *(f"{perplexity:,.2f}" for perplexity in paper),
         *(shown(document, KEYS.get(name)) for document in (once, repeated))]
        for name, paper in PAPER_PERPLEXITIES.items()
    ]  # fmt: skip
    heads = ("placement", "paper: 71M", "130M", "250M", "1B", "ours: 71M recipe, 4 M tokens once",
             "ours: 71M recipe, 16 M tokens, 4 times each")  # fmt: skip
    claims = [
        Claim(f"{what}: Mix-LN is better than {other}",
              mean(document, "mix") < mean(document, KEYS[other]))
        for what, document in (("each text once", once), ("each text 4 times", repeated))
        for other in ("Pre-LN", "Post-LN")
    ]  # fmt: skip
    shares = [f"{100 * tokens_seen(document) / PAPER_TOKENS:.1f} %" for document in (once, repeated)]
    return PaperItem(
        "Table 1", "Perplexity by norm placement and size",
        "The paper trains on 1.1 to 5 billion tokens of C4.",
        table(heads, rows),
        ("mix_ln-once", "mix_ln"),
        claims,
        "DeepNorm, and the sizes 130M, 250M and 1B",
        "Our model has the 71M recipe with a smaller vocabulary. The runs see "
        f"{' and '.join(shares)} of the paper's tokens, in batches of 32 in place of 512. They use three "
        "seeds; ± is a standard deviation. The advantage over Pre-LN in the short run may come from the "
        "scale of the embedding (Table 8).",
        on=f"Llamas of {millions(once)} parameters after {' and '.join(map(seen, (once, repeated)))}, "
        "3 seeds",
    )  # fmt: skip


def tokens_seen(document: Document) -> int:
    """Tokens of all steps of a run."""
    settings = document["settings"]
    tokens: int = settings["steps"] * settings["batch"] * WINDOW
    return tokens


def millions(document: Document) -> str:
    """The parameters of a result's model, in millions."""
    return f"{document['parameters'] / 1e6:.0f} M"


def seen(document: Document) -> str:
    """The tokens of all steps of a run, in millions."""
    return f"{tokens_seen(document) / 1e6:.0f} M tokens"


def shown(document: Document, placement: str | None) -> str:
    """The mean and the spread of a placement's perplexity, empty without one."""
    row = next((r for r in document["results"] if (r["placement"], r["text"]) == (placement, TEXT)), None)
    return f"{row['mean']:.2f} ± {row['spread']:.2f}" if row else ""


def mean(document: Document, placement: str) -> float:
    """The mean perplexity of a placement."""
    (row,) = (r for r in document["results"] if (r["placement"], r["text"]) == (placement, TEXT))
    value: float = row["mean"]
    return value


def figure_2() -> PaperItem:
    """Distances and drops of models with Pre-LN."""
    documents = {name: load(f"layers-{name}") for name in ("wikilm-26m", "smollm2-135m")}
    parts, claims = [], []
    for name, document in documents.items():
        layers, title = document["layers"], MODELS_READ[name]
        distances = [layer["angular_distance_all_tokens"]["value"] for layer in layers]
        drops = [layer["without"]["nll_difference"]["value"] for layer in layers]
        rows = list(zip(range(len(layers)), map("{:.3f}".format, distances), map("{:+.3f}".format, drops),
                        strict=True))  # fmt: skip
        heads = (f"layer of {title}", "angular distance to the next, as a share of 180 degrees",
                 "loss without it, nats per token")  # fmt: skip
        parts.append(table(heads, rows))
        claims += [
            Claim(f"{title}: the {what} of the second half has a smaller median than that of the first",
                  falls(values))
            for what, values in (("distance", distances), ("drop", drops))
        ]  # fmt: skip
    tokens = " and ".join(f"{document['tokens']:,}" for document in documents.values())
    return PaperItem(
        "Figure 2", "Angular distances and drops by layer: BERT-large and Llama-2 7B",
        "Llama-2 7B, which has Pre-LN: deep layers are close to the layers after them, and MMLU hardly drops "
        "without one. BERT-large, which has Post-LN, is the other way round.",
        "\n\n".join(parts),
        tuple(f"layers-{name}" for name in documents),
        claims,
        "BERT-large, Llama-2 7B, SQuAD and MMLU",
        f"Both models have Pre-LN. They were measured on {tokens} tokens of WikiText-2, so the numbers of "
        "SmolLM2-135M "
        "are those of one window. Distances are means over all tokens, where the paper has the last one. The "
        "drop is "
        "that of the loss.",
        "weights of BERT-large and Llama-2 7B",
        on=" and ".join(map(MODELS_READ.__getitem__, documents)),
    )  # fmt: skip


def falls(values: Sequence[float]) -> bool:
    """Whether the second half has a smaller median than the first: one layer decides nothing."""
    half = len(values) // 2
    return statistics.median(values[half:]) < statistics.median(values[:half])


def gradients(document: Document) -> dict[str, list[float]]:
    """The mean over seeds of each layer's gradient norm at the first step, by placement."""
    found: dict[str, list[list[float]]] = {}
    for one in document["runs"]:
        found.setdefault(one["placement"], []).append(one["gradient_norms"]["first"])
    return {
        name: [statistics.fmean(layer) for layer in zip(*runs, strict=True)] for name, runs in found.items()
    }


def gradient_table(norms: dict[str, list[float]], placements: Sequence[str]) -> str:
    """A column for each placement, a line for each layer."""
    depth = len(norms[KEYS[placements[0]]])
    rows = [[i, *(f"{norms[KEYS[name]][i]:.4f}" for name in placements)] for i in range(depth)]
    return table(("layer", *placements), rows)


def figure_3() -> PaperItem:
    """What small models with Pre-LN and Post-LN look like inside."""
    document = load("mix_ln")
    norms = gradients(document)
    return PaperItem(
        "Figure 3", "A 130M model with Post-LN and with Pre-LN: distances, drops, gradient norms",
        "Gradient norms at the start of training: Pre-LN's fall with depth, Post-LN's early layers have the "
        "smallest. Distances and drops repeat Figure 2.",
        gradient_table(norms, ("Post-LN", "Pre-LN")),
        ("mix_ln",),
        [Claim("Pre-LN: gradient norms are smaller in the second half of the layers",
               late(norms["pre"]) < early(norms["pre"])),
         Claim("Post-LN: gradient norms are smaller in the first half of the layers",
               early(norms["post"]) < late(norms["post"]))],
        "the 130M model, and angular distances and drops by layer",
        "Figures 5 and 6b have distances and drops, of narrower models. The table has gradient norms at the "
        "first step of the 71M recipe, means of three seeds. Post-LN's are "
        "nearly equal there; they differ in the paper's direction at the end of training.",
        on=f"Llamas of {millions(document)} parameters, 3 seeds",
    )  # fmt: skip


def early(values: Sequence[float]) -> float:
    """The mean of the first half."""
    return statistics.fmean(values[: len(values) // 2])


def late(values: Sequence[float]) -> float:
    """The mean of the second half."""
    return statistics.fmean(values[len(values) // 2 :])


FIGURE_4 = PaperItem(
    "Figure 4", "Perplexity while a 7B model trains",
    "Mix-LN stays below Pre-LN.",
    obstacle="the GPUs to train 7 billion parameters on 1.7 billion tokens",
)  # fmt: skip

TABLE_2 = PaperItem(
    "Table 2", "Accuracy of tasks after fine-tuning, 250M and 1B",
    "Mean of seven tasks at 250M: 32.54 (Post-LN), 35.63 (DeepNorm), 36.93 (Pre-LN), 41.34 (Mix-LN).",
    obstacle="models of these sizes by placement, and the data of the tasks",
)  # fmt: skip

TABLE_3 = PaperItem(
    "Table 3", "Reward after reinforcement learning from human feedback, 1B",
    "0.75 (Pre-LN) and 1.32 (Mix-LN).",
    obstacle="such models and the preference data",
)  # fmt: skip

TABLE_4 = PaperItem(
    "Table 4", "Accuracy of vision transformers on ImageNet",
    "ViT-Tiny 67.30 (Pre-LN) and 67.34 (Mix-LN); ViT-Small 75.99 and 76.40.",
    obstacle="ImageNet",
)  # fmt: skip


def figure_6a() -> PaperItem:
    """Gradient norms by layer and placement."""
    document = load("mix_ln")
    norms = gradients(document)
    unevenness = {name: max(values) / min(values) for name, values in norms.items()}
    return PaperItem(
        "Figure 6a", "Gradient norms by layer with Pre-LN, Post-LN and Mix-LN, 250M",
        "Mix-LN's norms are the most even.",
        gradient_table(norms, ("Pre-LN", "Post-LN", "Mix-LN")),
        ("mix_ln",),
        [Claim("Mix-LN's norms are more even than Pre-LN's", unevenness["mix"] < unevenness["pre"]),
         Claim("Mix-LN's norms are more even than Post-LN's", unevenness["mix"] < unevenness["post"])],
        "the 250M model",
        "The model has the 71M recipe: 12 layers. Norms are those of the first step, means of three seeds. "
        "Largest "
        "norm over smallest: "
        + ", ".join(f"{unevenness[KEYS[name]]:.2f} ({name})" for name in ("Pre-LN", "Post-LN", "Mix-LN"))
        + ".",
        on=f"Llamas of {millions(document)} parameters, 3 seeds",
    )  # fmt: skip


def table_7() -> PaperItem:
    """The recipes."""
    return PaperItem(
        "Table 7", "Recipes of the models",
        "71M to 7B: shapes, steps, tokens, learning rates, alpha.",
        note="[mix_ln_recipes.py](benchmarks/mix_ln_recipes.py) has them as `RECIPES`. Its 71M model has "
        f"{millions(load('mix_ln'))} parameters, because the vocabulary is smaller.",
        drawn=True,
    )  # fmt: skip


def table_8() -> PaperItem:
    """Mix-LN against Pre-LN with a scaled embedding."""
    ours = {"no": load("mix_ln-small"), "embedding": load("mix_ln-small-scaled")}
    gains = {what: 100 * (mean(d, "mix") / mean(d, "pre") - 1) for what, d in ours.items()}
    rows: list[Sequence[object]] = [
        ["paper, 130M", what, f"{pre:.2f}", f"{mix:.2f}", f"{100 * (mix / pre - 1):+.1f} %"]
        for what, (pre, mix) in PAPER_SCALED.items()
    ]
    rows += [
        ["ours, 4 M parameters, seeds: 1", what, *(f"{mean(d, name):,.0f}" for name in ("pre", "mix")),
         f"{gains[what]:+.1f} %"]
        for what, d in ours.items()
    ]  # fmt: skip
    rows += scaled_rows()
    changes = scaled_changes()
    claims = []
    if {"no", "both"} <= changes.keys():
        claims = [Claim("with both, Mix-LN's gain is smaller than without",
                        abs(changes["both"]) < abs(changes["no"]))]  # fmt: skip
    return PaperItem(
        "Table 8", "Mix-LN and Pre-LN with scaled initialisation and scaled embedding",
        "With both, the gain of Mix-LN nearly vanishes.",
        table(("model", "scaled", "Pre-LN", "Mix-LN", "change"), rows),
        ("mix_ln-small", "mix_ln-small-scaled", NAME),
        claims,
        missing="the 130M model" if claims else "three seeds of each row, and the 130M model",
        note="Our models see few tokens: those of 4 M parameters 120 steps of 2 windows. The embedding is "
        "multiplied by 50. The first weights of the layers that write to the stream are divided by the "
        "square root of twice the number of layers. Figure 5 describes the other models.",
        on=f"Llamas of {millions(ours['no'])} parameters after {tokens_seen(ours['no']):,} tokens, 1 seed; "
        f"{described(load(NAME))}",
    )  # fmt: skip
