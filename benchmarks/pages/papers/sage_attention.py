"""Tables and figures of SageAttention2 (arXiv 2411.10958)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pages.layout import Document, linked, load, table
from pages.papers.items import Claim, PaperItem, PaperSection, falling
from pages.papers.sage_sums import figure_4, figure_6, table_6, table_7, tables_9_10

PAPER_GRANULARITY = {
    "token": ((99.45, 0.0649, 0.0335), (96.76, 0.1916, 0.0775)),
    "warp": ((99.45, 0.0648, 0.0334), (96.71, 0.1956, 0.0779)),
    "block": ((98.03, 0.1492, 0.0744), (90.68, 0.3615, 0.1490)),
    "tensor": ((97.15, 0.1800, 0.0865), (85.85, 0.4687, 0.2261)),
}
"""Tables 2 and 3 of the paper: cosine similarity in percent, relative L1, RMSE; mean and worst layer."""

PAPER_FORMATS = {
    "INT8": ((77.05, 0.5618, 0.5044), (19.52, 0.9579, 1.4483)),
    "E5M2": ((99.20, 0.0905, 0.0903), (94.94, 0.2327, 0.2361)),
    "E4M3": ((99.44, 0.0683, 0.0347), (96.70, 0.1956, 0.0779)),
    "FP16": ((99.45, 0.0649, 0.0335), (96.76, 0.1916, 0.0775)),
}
"""Tables 4 and 5 of the paper, in the same units; Q and K in INT4."""

UNITS = ("cosine", "relative_l1", "rmse")

HEADS = ("paper, cosine", "relative L1", "RMSE", "ours, cosine", "relative L1", "RMSE")

WIKILM, SMOLLM2 = "attention_accuracy-wikilm-26m", "attention_accuracy-smollm2-135m"

LAYERS = "attention_layers-smollm2-135m"

LAYOUTS = {
    "thread": "per thread, neuzip's kernels", "thread-hopper": "per thread, the paper's for Hopper",
    "thread-ada": "per thread, the paper's for Ada",
}  # fmt: skip

NOTHING = (None, None)
"""A granularity that the paper's tables do not have."""


def sage_attention() -> PaperSection:
    """All tables and figures of the paper."""
    return PaperSection(
        "SageAttention2", "2411.10958",
        (FIGURE_1, FIGURE_2, table_1(), FIGURE_3, figure_4(), granularity(False), granularity(True),
         figure_5(), formats(False), formats(True), figure_6(), table_6(), table_7(), TABLE_8, figure_7(),
         speed("Figure 8", 64), speed("Figure 9", 128), speed("Figure 10", 256), FIGURE_11, tables_9_10(),
         table_11()),
    )  # fmt: skip


FIGURE_1 = PaperItem(
    "Figure 1", "Speed of the kernel on an RTX 4090, and needle in a haystack with Llama 3.1",
    "3 to 5 times the speed of FlashAttention2 and xformers on the RTX 4090; the needle test has 100,000 "
    "tokens on an L20.",
    obstacle="RTX 4090 and L20 GPUs, weights of Llama 3.1",
    note="Figures 8 and 9 have our speeds, on an H200.",
)  # fmt: skip

FIGURE_2 = PaperItem(
    "Figure 2", "A video of CogVideoX with Q and K in plain INT4",
    "Plain INT4 destroys the picture.",
    obstacle="weights of CogVideoX",
)  # fmt: skip


def table_1() -> PaperItem:
    """Smoothing of queries and keys in 4 bits."""
    document = load(WIKILM)
    synthetic = load("attention_accuracy-synthetic")["synthetic"]
    smoothed = {name: perplexity(document, f"INT4, smoothed: {name}") for name in ("none", "Q+K")}
    outliers = {
        form: next(
            r["cosine"] for r in synthetic
            if r["numbers"] == "outlier channels" and r["head_dim"] == 64
            and (r["form"], r["by"]) == (form, "reference")
        )
        for form in ("4 bit, not smoothed", "4 bit")
    }  # fmt: skip
    trained = {form: closeness(load(SMOLLM2), form)["cosine"] for form in outliers}
    base = smoothed["none"]["base_perplexity"]
    rows = [
        ["full precision", "6.013", "", f"{base:.2f}", ""],
        ["INT4", "11.698", "+94.5 %", *after(smoothed["none"])],
        ["INT4, Q and K smoothed", "6.219", "+3.4 %", *after(smoothed["Q+K"])],
    ]
    heads = (
        "Q and K",
        "paper: Llama 3.1, WikiText perplexity",
        "rise",
        "ours: wikilm-26m, perplexity",
        "rise",
    )
    return PaperItem(
        "Table 1", "INT4 with and without smoothing of Q and K: quality of models",
        "WikiText perplexities are in the table. Lambada: 81.5 % (full precision), 72.6 %, 80.8 % "
        "(smoothed). "
        "CogVideoX loses two thirds of its quality score without smoothing.",
        table(heads, rows),
        (WIKILM, SMOLLM2, "attention_accuracy-synthetic"),
        [Claim("wikilm-26m: smoothing makes INT4 better",
               smoothed["Q+K"]["perplexity"] < smoothed["none"]["perplexity"]),
         Claim("SmolLM2-135M: smoothing brings INT4 attention closer", trained["4 bit"] >
               trained["4 bit, not smoothed"])],
        "Lambada, CogVideoX, and Llama 3.1",
        "The direction is the paper's. The effect is small on wikilm-26m, whose channels have small means, "
        "and larger "
        f"on SmolLM2-135M: the cosine similarity of its attention is {trained['4 bit, not smoothed']:.3f} "
        "without "
        f"smoothing and {trained['4 bit']:.3f} with it. On random numbers with outlier channels, they are "
        f"{outliers['4 bit, not smoothed']:.3f} and {outliers['4 bit']:.3f}. Our means of Q cover 64 tokens, "
        "the "
        "paper's 128.",
        on="wikilm-26m, SmolLM2-135M and random numbers",
    )  # fmt: skip


def perplexity(document: Document, form: str) -> Document:
    """A row of perplexities by the reference."""
    (row,) = (r for r in document["perplexity"] if r["form"] == form and r["by"] == "reference")
    found: Document = row
    return found


def after(row: Document) -> list[str]:
    """A perplexity and its rise."""
    return [f"{row['perplexity']:.2f}", f"{row['rise_percent']:+.2f} %"]


FIGURE_3 = PaperItem(
    "Figure 3", "Steps of the method",
    "A drawing: smooth, quantise, multiply, correct.",
    note="`kernels/attention/reference.py` has the same steps.",
    drawn=True,
)  # fmt: skip


def granularity(worst: bool) -> PaperItem:
    """How many queries and keys share a scale; the mean of layers, or the worst."""
    names = ("token", "thread", "thread-hopper", "thread-ada", "warp", "block", "tensor")
    found = {name: closeness(load(SMOLLM2), f"INT4, per {name}") for name in names}
    rows: list[Sequence[object]] = [
        [LAYOUTS.get(name, f"per {name}"), *shown(PAPER_GRANULARITY.get(name, NOTHING)[worst]),
         *measured(found[name], worst)]
        for name in names
    ]  # fmt: skip
    cosine = {name: r[("worst_" if worst else "") + "cosine"] for name, r in found.items()}
    return PaperItem(
        "Table 3" if worst else "Table 2",
        f"Granularity of Q and K in INT4: {'worst layer' if worst else 'mean of layers'}",
        "The paper's rows are in the table.",
        table(("granularity", *HEADS), rows),
        (SMOLLM2,),
        [Claim("per token, per block and per tensor rank in this order",
               falling([cosine[name] for name in ("token", "block", "tensor")])),
         Claim("per warp is better than per block", cosine["warp"] > cosine["block"]),
         Claim("per warp is as close as per token, to a tenth of a percent",
               cosine["token"] - cosine["warp"] < 1e-3)],
        note=f"{model(load(SMOLLM2))} The paper's warps have 32 queries and 64 keys, and its threads hold 2 "
        "(Hopper) or "
        "4 (Ada) queries. neuzip's kernels have one scale per query, and as many per key as the paper's for "
        "Hopper. "
        f"{linked('wikilm-26m', 'Accuracy of quantised attention')} was measured on a GPU, without per warp.",
        on="SmolLM2-135M",
    )  # fmt: skip


def formats(worst: bool) -> PaperItem:
    """Number formats of P and V; the mean of layers, or the worst."""
    found = {
        name: [closeness(load(result), f"Q, K INT4; P, V {name}") for result in (SMOLLM2, WIKILM)]
        for name in PAPER_FORMATS
    }
    rows: list[Sequence[object]] = [
        [name, *shown(paper[worst]), *measured(found[name][0], worst), measured(found[name][1], worst)[0]]
        for name, paper in PAPER_FORMATS.items()
    ]
    claims = [
        Claim(f"{title}: E4M3 is better than {other}", e4m3[key] > than[key])
        for key in [("worst_" if worst else "") + "cosine"]
        for other in ("E5M2", "INT8")
        for title, e4m3, than in zip(("SmolLM2-135M", "wikilm-26m"), found["E4M3"], found[other], strict=True)
    ]
    return PaperItem(
        "Table 5" if worst else "Table 4",
        f"Number formats of P and V, with Q and K in INT4: {'worst layer' if worst else 'mean of layers'}",
        "The paper's rows are in the table.",
        table(("P and V", *HEADS, "wikilm-26m, cosine"), rows),
        (SMOLLM2, WIKILM),
        claims,
        note=f"{model(load(SMOLLM2))} The order of formats is the paper's on SmolLM2-135M, but INT8 loses "
        "little. A "
        "likely cause, which we did not measure: these texts are short, and P has few rows with many small "
        "entries. "
        "neuzip's kernels use E4M3.",
        on="SmolLM2-135M and wikilm-26m",
    )  # fmt: skip


def model(document: Document) -> str:
    """What the similarities of a result are those of."""
    tokens = document["tokens"] // document["windows"] * document["similarity_windows"]
    return (
        f"SmolLM2-135M read {tokens:,} tokens of WikiText-2, causal; the paper has all layers of CogVideoX. "
        "`kernels/attention/reference.py` computes it."
    )


def closeness(document: Document, form: str) -> Document:
    """A row of similarities by the reference."""
    (row,) = (r for r in document["closeness"] if r["form"] == form and r["by"] == "reference")
    found: Document = row
    return found


def shown(paper: tuple[float, float, float] | None) -> list[str]:
    """The paper's three numbers, or empty cells for None."""
    return [f"{paper[0]:.2f} %", f"{paper[1]:.4f}", f"{paper[2]:.4f}"] if paper else ["", "", ""]


def measured(row: Document, worst: bool) -> list[str]:
    """Our three numbers."""
    cosine, distance, error = (row[("worst_" if worst else "") + unit] for unit in UNITS)
    return [f"{100 * cosine:.2f} %", f"{distance:.4f}", f"{error:.4f}"]


def figure_5() -> PaperItem:
    """The codes of queries, plain and smoothed."""
    document = load(LAYERS)
    rows = [
        [code, f"{100 * plain:.1f} %", f"{100 * smoothed:.1f} %"]
        for code, plain, smoothed in zip(range(-7, 8), document["plain"], document["smoothed"], strict=True)
    ]
    bits = {name: average(document, f"{name}_bits") for name in ("plain", "smoothed")}
    return PaperItem(
        "Figure 5", "Codes of Q before and after smoothing",
        "Smoothed queries use the range of INT4 more evenly than plain ones.",
        table(("INT4 code", "plain", "smoothed"), rows),
        (LAYERS,),
        [Claim(f"the codes of a layer have a higher entropy when smoothed ({bits['smoothed']:.3f} bits) than "
               f"when plain ({bits['plain']:.3f} bits), on average", bits["smoothed"] > bits["plain"])],
        "the paper's model",
        f"{windows(document)} Each query has a scale of its own, as in neuzip's kernels.",
        on="SmolLM2-135M",
    )  # fmt: skip


def windows(document: Document) -> str:
    """What a result by layer was measured on."""
    return f"The model read {document['windows']} windows of {document['window']} tokens of WikiText-2."


def average(document: Document, key: str) -> float:
    """The mean of a figure over the layers."""
    return statistics.fmean(r[key] for r in document["results"])


TABLE_8 = PaperItem(
    "Table 8", "The two kernels: 4 and 8 bits for Q and K",
    "Both have FP8 for P and V.",
    note="neuzip has both forms. Hopper GPUs multiply no 4-bit integers, so the form with 4 bits runs in "
    "INT8 and "
    "is for accuracy alone.",
    drawn=True,
)  # fmt: skip


def figure_7() -> PaperItem:
    """The closeness of the 4-bit form by layer."""
    document = load(LAYERS)
    scores = [r["score"] for r in document["results"]]
    rows = [[r["layer"], f"{r['score']:.3f}", f"{r['score_sd']:.3f}"] for r in document["results"]]
    between, within = statistics.stdev(scores), average(document, "score_sd")
    return PaperItem(
        "Figure 7", "Closeness of the 4-bit form by layer and timestep",
        "Mean and standard deviation of cosine * (1 - relative L1). Layers differ, and the worst ones get 8 "
        "bits.",
        table(("layer", "mean", "standard deviation over windows"), rows),
        (LAYERS,),
        (),
        "timesteps of a video model, CogVideoX and Llama 3.1",
        f"{windows(document)} The means of layers have a standard deviation of {between:.3f}, the windows of "
        "a layer "
        f"{within:.3f} on average. `neuzip patch-attention` prints this measure for any model, and chooses "
        "precisions "
        "by a limit on the KL divergence.",
        "weights of CogVideoX and Llama 3.1",
        on="SmolLM2-135M",
    )  # fmt: skip


def speed(name: str, width: int) -> PaperItem:
    """The speed of kernels with one head size, of all lengths where they were measured."""
    sections = load("attention")["sections"]
    section = "lengths" if "lengths" in sections else "kernels"
    results = [r for r in sections[section]["results"] if r["width"] == width]
    shows = f"TOPS by length of the text, head size {width}, RTX 4090"
    paper = (
        "Both forms are faster than FlashAttention2 and xformers, and 4 bits are faster than 8. The page "
        "that we read has the curves as pictures."
    )
    if not results:
        return PaperItem(
            name, shows, paper,
            note="The kernels support this head size. `python benchmarks/attention.py --sections lengths` "
            "times Figures 8 to 10 with all six lengths. It needs an H100 or H200, and has not run yet.",
        )  # fmt: skip
    sides = ("SDPA, flash", "SDPA, cuDNN", "sageattention", "ours, 8 bits", "ours, 4 bits")
    cases = list(dict.fromkeys((r["tokens"], r["causal"]) for r in results))
    tops = {(r["tokens"], r["causal"], r["side"]): r["tops"] for r in results}
    rows = [
        [
            f"{tokens:,}{', causal' if causal else ''}",
            *(f"{value:,.0f}" if (value := tops.get((tokens, causal, side))) else "" for side in sides),
        ]
        for tokens, causal in cases
    ]
    return PaperItem(
        name, shows, paper,
        table(("tokens", "FlashAttention2 in torch", "cuDNN", "SageAttention 1", "neuzip, 8 bits",
               "neuzip, 4 bits"), rows),
        ("attention",),
        [Claim("8 bits are faster than FlashAttention2",
               all(faster(tops, case, "ours, 8 bits", "SDPA, flash") for case in cases)),
         Claim("4 bits are faster than 8 bits",
               all(faster(tops, case, "ours, 4 bits", "ours, 8 bits") for case in cases))],
        "the RTX 4090" + (", and four of six lengths" if section == "kernels" else ""),
        "The GPU is a Hopper GPU, which multiplies no 4-bit integers; cuDNN is the strongest baseline there.",
        "an RTX 4090",
        on="random numbers", sections=(section,),
    )  # fmt: skip


def faster(tops: dict[tuple[int, bool, str], float], case: tuple[int, bool], side: str, than: str) -> bool:
    """Whether one side of a case is faster than another."""
    return tops[case[0], case[1], side] > tops[case[0], case[1], than]


FIGURE_11 = PaperItem(
    "Figure 11", "TOPS by length of the text, head size 64, L20",
    "As Figure 8.",
    obstacle="an L20 GPU",
)  # fmt: skip


def table_11() -> PaperItem:
    """Quality of whole models."""
    document = load(WIKILM)
    recipe = {form: perplexity(document, form) for form in ("8 bit", "4 bit")}
    rows = [[f"{form.partition(' ')[0]} bits", *after(r), f"{r['kld']:.5f}"] for form, r in recipe.items()]
    return PaperItem(
        "Table 11", "Quality of seven text, image and video models",
        "Losses are small with 4 bits and negligible with 8. The page that we read has no numbers.",
        table(("attention of wikilm-26m", "perplexity", "rise", "KLD, nats per token"), rows),
        (WIKILM,),
        missing="all seven models",
        obstacle="weights of the seven models",
        on="wikilm-26m",
    )  # fmt: skip
