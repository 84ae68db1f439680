"""Tables and figures of Cut Cross-Entropy (arXiv 2411.09009)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pages.layout import MODELS_READ, Document, is_measured, linked, load, table
from pages.papers.items import Claim, PaperItem, PaperSection, at

PAPER_LOSS = {
    "CCE": (1, 43, 1164, 135), "Liger": (1474, 302, 1474, 303), "torchtune": (8000, 55, 9631, 170),
    "torch.compile": (4000, 49, 16000, 143), "torch": (24000, 82, 28000, 207),
    "CCE, not sorted": (0.09, 42, 1162, 143), "CCE, no filter": (0.09, 42, 1162, 362),
}  # fmt: skip
"""Table 1 of the paper: MB and ms of the loss, MB and ms of loss and gradients."""

ROWS = {
    "CCE": ("neuzip", "neuzip, vocabulary sorted"), "CCE, not sorted": ("neuzip", "neuzip"),
    "CCE, no filter": ("neuzip", "neuzip, exact"), "Liger": ("liger-kernel", "liger-kernel"),
    "torch.compile": ("torch.compile", "torch.compile"), "torch": ("torch", "torch"),
}  # fmt: skip
"""Our rows, of the loss and of loss and gradients, by those of the paper."""

BOTH = "forward and backward"
"""Rows of the loss and its gradients."""

OUTPUT_MB = 1161
"""Memory of the gradients themselves in the paper's figures; ours leave it out."""

PAPER_GAINS = {"GPT-2": "10", "Gemma 2 2B": "10", "Llama 2 13B": "1.5"}
"""How many times as large batches become, of the models that the caption of Figure 1 names."""

PEERS = ("torch", "torch.compile", "liger-kernel")

HEADS = {"gemma": "random, Gemma 2's shape", "smollm2-135m": "SmolLM2-135M", "wikilm-26m": "wikilm-26m"}
"""Sections of our results."""


def cut_cross_entropy() -> PaperSection:
    """All tables and figures of the paper."""
    return PaperSection(
        "Cut Cross-Entropy", "2411.09009",
        (figure_1("Figure 1"), table_1(), FIGURE_2, figure_3(), figure_4(), table_a1(), table_a2(),
         figure_1("Table A3")),
    )  # fmt: skip


def figure_1(name: str) -> PaperItem:
    """The largest batch with and without logits; Table A3 has the numbers of the picture."""
    rows = {r["model"]: r for r in load("largest_batch")["results"]}
    lines = [
        [model, f"{r['parameters'] / 1e9:.2f}", f"{r['state_bytes_per_token'] / 1e3:,.0f}",
         f"{r['logit_bytes_per_token'] / 1e3:,.0f}", f"{r['tokens_with_logits'] / 1e6:.1f}",
         f"{r['tokens_without'] / 1e6:.1f}", PAPER_GAINS.get(model, ""), f"{r['ratio']:.1f}"]
        for model, r in rows.items()
    ]  # fmt: skip
    heads = ("model", "parameters, billions", "activations, kB per token", "log-probabilities, kB per token",
             "largest batch with them, M tokens", "without, M tokens", "paper, gain",
             "ours, gain")  # fmt: skip
    gains = {model: r["ratio"] for model, r in rows.items()}
    return PaperItem(
        name, "Memory and largest batch of frontier models on 16 GPUs"
        + (": the numbers of Figure 1" if name == "Table A3" else ""),
        "Without logits, batches are 1.5 times (Llama 2 13B) to 10 times (GPT-2, Gemma 2 2B) as large."
        + (" The page that we read has no numbers of this table." if name == "Table A3" else ""),
        table(heads, lines),
        ("largest_batch",),
        [Claim("GPT-2 and Gemma 2 2B gain 9 times or more", min(gains["GPT-2"], gains["Gemma 2 2B"]) >= 9),
         Claim("Llama 2 13B gains least", min(gains, key=lambda model: gains[model]) == "Llama 2 13B")],
        "the other models of the paper",
        "This is arithmetic on published shapes, and nothing was trained. It assumes 75 GiB on each GPU, 8 "
        "bytes per "
        "parameter, 16-bit activations at each layer and fp32 log-probabilities.",
        on="published shapes, without training",
    )  # fmt: skip


def table_1() -> PaperItem:
    """Memory and time of the loss and its gradients."""
    sections = load("linear_cross_entropy")["sections"]
    rows: list[Sequence[object]] = []
    for name, (loss_mb, loss_ms, both_mb, both_ms) in PAPER_LOSS.items():
        rows.append([
            name, f"{loss_mb:,g}", loss_ms, f"{max(0, both_mb - OUTPUT_MB):,}", both_ms,
            *cells(sections["gemma"], name, "forward", 0), *cells(sections["gemma"], name, BOTH, 1),
            *cells(sections["smollm2-135m"], name, BOTH, 1),
        ])  # fmt: skip
    rows.append(["neuzip, 1 MB form", "", "", "", "", *forward_1_mb(sections["gemma"]), "", "", "", ""])
    heads = ("method", "paper: loss, MB", "ms", "with gradients, MB", "ms", "ours, random values: loss, MB",
             "ms", "with gradients, MB", "ms", "ours, SmolLM2-135M's head: with gradients, MB",
             "ms")  # fmt: skip
    return PaperItem(
        "Table 1", "Memory and time of the loss and its gradients, Gemma 2 2B",
        "8,192 tokens, a vocabulary of 256,000 and width 2,304, on an A100. The paper's memory with "
        "gradients is "
        f"shown without the {OUTPUT_MB:,} MB of the gradients themselves.",
        table(heads, rows),
        ("linear_cross_entropy",),
        claims(sections),
        "torchtune, the gradients alone, and tensors of Gemma 2 during training",
        "The GPU is an H100. Rows named CCE are neuzip's kernels here; the published package is in "
        f"{linked('the full table', 'Linear cross-entropy')}. `benchmarks/trained_head.py` writes the files "
        f"of trained heads. {tiles(sections)}",
        on="random values in Gemma 2 2B's shape, and the heads of SmolLM2-135M and wikilm-26m",
        sections=tuple(HEADS),
    )  # fmt: skip


def cells(section: Document, name: str, row: str, which: int) -> list[str]:
    """MB and ms of our row for a row of the paper; empty where there is none."""
    if name not in ROWS:
        return ["", ""]
    r = at(section, row=row, by=ROWS[name][which])
    return [f"{r['mb']:,.0f}", f"{r['ms']:.1f}"]


def forward_1_mb(section: Document) -> list[str]:
    """MB and ms of the loss in the form with the least memory."""
    r = at(section, row="forward", by="neuzip, 1 MB")
    return [f"{r['mb']:,.0f}", f"{r['ms']:.1f}"]


def claims(sections: dict[str, Document]) -> list[Claim]:
    """What the paper concludes of its table, for each head."""
    found = []
    for key, title in HEADS.items():
        section = sections[key]
        others = [at(section, row="forward", by=peer)["mb"] for peer in PEERS]
        plain, ordered, exact = (
            at(section, row=BOTH, by=f"neuzip{form}")["ms"] for form in ("", ", vocabulary sorted", ", exact")
        )
        least = at(section, row="forward", by="neuzip, 1 MB")["mb"]
        found += [
            Claim(f"{title}: the loss in its 1 MB form takes less memory than torch, torch.compile and Liger",
                  least < min(others)),
            Claim(f"{title}: the filter of gradients saves time", plain < exact),
            Claim(f"{title}: sorting the vocabulary saves time", ordered < plain),
        ]  # fmt: skip
    return found


def tiles(sections: dict[str, Document]) -> str:
    """How many tiles the filter leaves."""
    shares = ", ".join(
        f"{100 * sections[key]['kept_tiles']['vocabulary']:.0f} % ({title})" for key, title in HEADS.items()
    )
    return (
        f"The filter keeps these shares of all tiles: {shares}. The random head has nearly even "
        "probabilities, so "
        "nearly all tiles without a target are skipped. The trained heads here have small vocabularies and "
        "nearly "
        "no tile is skipped, so the filter and the order cost time."
    )


FIGURE_2 = PaperItem(
    "Figure 2", "Access patterns of the three kernels",
    "A drawing of the blocks that each kernel reads and writes.",
    note="neuzip has two kernels without locks in place of three: one forward, one backward.",
    drawn=True,
)  # fmt: skip


def figure_3() -> PaperItem:
    """The mean probability of the most likely tokens by rank."""
    sections = load("probability_by_rank")["sections"]
    names = list(sections)
    found = {name: {r["rank"]: r["probability"] for r in sections[name]["results"]} for name in names}
    ranks = sorted({rank for rows in found.values() for rank in rows})
    lines = [
        [f"{rank:,}", *(f"{found[name][rank]:.1e}" if rank in found[name] else "" for name in names)]
        for rank in ranks
    ]
    first = {name: sections[name]["below"]["2^-12"] for name in names}
    tokens = sections[names[0]]["tokens"]
    return PaperItem(
        "Figure 3", "Mean probability of the i-th most likely token",
        "Probabilities fall fast with the rank, and soon below numerical precision.",
        table(("rank", *(MODELS_READ[name] for name in names)), lines),
        ("probability_by_rank",),
        [Claim(f"{MODELS_READ[name]}: the mean is below 2^-12, the threshold of the filter, from rank "
               f"{first[name]:,} of {sections[name]['vocabulary']:,} on",
               first[name] < sections[name]["vocabulary"] / 10) for name in names],
        "the paper's model",
        f"Means of {tokens:,} tokens of WikiText-2. Table 1 filters tiles of 128 tokens by 128 entries. A "
        "tile is "
        "skipped only if all of its probabilities are small, which is rare with these vocabularies.",
        on=" and ".join(MODELS_READ[name] for name in names),
    )  # fmt: skip


FILTERED, IGNORED = "filtered_training", "ignored_tokens"

TRAINED_CASES = {"scratch": "2 layers of width 64 from scratch, 8,192 tokens in the vocabulary",
                 "demo": "the demo checkpoint, 1,024 tokens in the vocabulary"}  # fmt: skip
"""Models of filtered_training.py."""


def figure_4() -> PaperItem:
    """Losses of training with the filter and without."""
    document = load(FILTERED)
    groups: dict[tuple[str, float], list[Document]] = {}
    for r in document["results"]:
        groups.setdefault((r["case"], r["filter_eps"]), []).append(r)
    lines = [
        [TRAINED_CASES[case], f"2^{round(math.log2(eps))}",
         *(f"{100 * average(runs, key):.1f} %" for key in ("kept_first", "kept_last")),
         *(f"{average(runs, key):.4f}" for key in ("first_loss", "last_loss", "last_loss_filtered")),
         f"{max(r['largest_difference'] for r in runs):.1e}"]
        for (case, eps), runs in groups.items()
    ]  # fmt: skip
    heads = ("model", "threshold of the filter", "tiles kept at the first step", "at the last step",
             "first loss", "last loss without the filter", "with it",
             "largest difference of a step")  # fmt: skip
    apart = [
        r["largest_difference"] for r in document["results"]
        if (r["case"], r["filter_eps"]) == ("scratch", 2**-12)
    ]  # fmt: skip
    seeds = len({r["seed"] for r in document["results"]})
    return PaperItem(
        "Figure 4", "Training losses with and without CCE, Gemma 2 2B and Phi 3.5 Mini",
        "The curves of both losses are the same, over five seeds.",
        table(heads, lines),
        (FILTERED,),
        (),
        "trained models of which the filter skips tiles, such as Gemma 2 2B and Phi 3.5 Mini, the kernels "
        f"of a GPU, and {5 - seeds} of five seeds",
        f"{document['steps']} steps of {document['tokens_a_step']} tokens of WikiText-2 in fp32, on a CPU; "
        f"seeds: {seeds}. neuzip filters gradients on GPUs alone, so the filter is plain torch with the rule "
        "of the kernels. The threshold of the paper, and of neuzip for bf16, is 2^-12. The paper fine-tunes "
        "trained models, and neither of these models tests its conclusion. Of the demo checkpoint, which is "
        "trained, all tiles are kept, so the filter does nothing. The other model starts from random "
        "weights: nearly all probabilities are below 2^-12 at first, and nearly all tiles without a target "
        f"are skipped. The losses differ by up to {max(apart):.2f} nats. So `neuzip train` filters only "
        "models that were trained before, unless told otherwise.",
        on="the demo checkpoint, 1.3 M weights, and 2 layers of width 64 from scratch",
    )  # fmt: skip


def average(runs: Sequence[Document], key: str) -> float:
    """The mean of a figure over seeds."""
    return statistics.fmean(r[key] for r in runs)


def table_a1() -> PaperItem:
    """Table 1 without ignored tokens."""
    name, shows = "Table A1", "Table 1 after ignored tokens have been dropped"
    paper = "All methods gain. The page that we read has no numbers."
    if not is_measured(IGNORED):
        return PaperItem(
            name, shows, paper,
            note="`linear_cross_entropy(..., drop_ignored=True)` drops them, and a test compares losses and "
            "gradients with those of all tokens. Without this option, neuzip's backward pass skips ignored "
            "tokens, and its forward pass multiplies them. `python benchmarks/ignored_tokens.py` measures "
            "memory and time. It needs a GPU, and has not run yet.",
        )  # fmt: skip
    document = load(IGNORED)
    of = {(r["row"], r["by"], r["dropped"]): r for r in document["results"]}
    methods = list(dict.fromkeys((r["row"], r["by"]) for r in document["results"]))
    lines = [
        [row, by, *(cell for dropped in (False, True) for cell in
                    (f"{of[row, by, dropped]['mb']:,.0f}", f"{of[row, by, dropped]['ms']:.1f}"))]
        for row, by in methods
    ]  # fmt: skip
    gains = {by: of[row, by, True]["ms"] < of[row, by, False]["ms"] for row, by in methods if row == BOTH}
    return PaperItem(
        name, shows, paper,
        table(("pass", "method", "all tokens, MB", "ms", "ignored tokens dropped, MB", "ms"), lines),
        (IGNORED,),
        [Claim(f"{by} takes less time for loss and gradients", faster) for by, faster in gains.items()],
        "torchtune, and the tokens of Alpaca",
        f"{document['counted']:,} of {document['tokens']:,} tokens count.",
        on="random values in Gemma 2 2B's shape",
    )  # fmt: skip


def table_a2() -> PaperItem:
    """Other heads."""
    section = load("linear_cross_entropy")["sections"]["llama"]
    rows = [
        [r["by"], f"{r['mb']:,.1f}", f"{r['ms']:.1f}"] for r in section["results"] if r["row"] == "forward"
    ]
    return PaperItem(
        "Table A2", "Table 1 for Gemma 2 9B and 27B, Llama 3 8B, Mistral NeMo and Phi 3.5 Mini",
        "CCE has the least memory for every model, at a competitive time. The page that we read has no "
        "numbers.",
        table(("Llama 3 8B's shape, random values: method", "loss, MB", "ms"), rows),
        ("linear_cross_entropy",),
        [Claim("neuzip's 1 MB form takes less memory than torch, torch.compile and Liger",
               at(section, row="forward", by="neuzip, 1 MB")["mb"]
               < min(at(section, row="forward", by=peer)["mb"] for peer in PEERS))],
        "gradients, torchtune, and four of five models",
        "The GPU is an H100 (paper: A100).",
        on="random values in Llama 3 8B's shape", sections=("llama",),
    )  # fmt: skip
