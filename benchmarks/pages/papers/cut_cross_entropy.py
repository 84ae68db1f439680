"""Tables and figures of Cut Cross-Entropy (arXiv 2411.09009)."""

from __future__ import annotations

from collections.abc import Sequence

from pages.layout import Document, linked, load, table
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

PEERS = ("torch", "torch.compile", "liger-kernel")

HEADS = {"gemma": "random, Gemma 2's shape", "smollm2-135m": "SmolLM2-135M", "wikilm-26m": "wikilm-26m"}
"""Sections of our results."""


def cut_cross_entropy() -> PaperSection:
    """All tables and figures of the paper."""
    return PaperSection(
        "Cut Cross-Entropy", "2411.09009",
        (FIGURE_1, table_1(), FIGURE_2, figure_3(), FIGURE_4, TABLE_A1, table_a2(), TABLE_A3),
    )  # fmt: skip


FIGURE_1 = PaperItem(
    "Figure 1", "Memory and largest batch of frontier models on 16 GPUs",
    "Without logits, batches are between 1.5 times (Llama 2 13B) and 10 times (GPT-2, Gemma 2 2B) as large.",
    note="It is arithmetic on published shapes, and no script does it yet.",
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
        f"{linked('the full table', 'Linear cross-entropy')}. {tiles(sections)}",
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
    return PaperItem(
        "Figure 3", "Mean probability of the i-th most likely token",
        "Probabilities fall fast with the rank, and soon below numerical precision.",
        note="It would run on a CPU.",
    )  # fmt: skip


FIGURE_4 = PaperItem(
    "Figure 4", "Training losses with and without CCE, Gemma 2 2B and Phi 3.5 Mini",
    "The curves of both losses are the same, over five seeds.",
    note="It needs a GPU: on a CPU `neuzip train` filters no gradients.",
)  # fmt: skip

TABLE_A1 = PaperItem(
    "Table A1", "Table 1 after ignored tokens have been dropped",
    "All methods gain. The page that we read has no numbers.",
    note="neuzip's backward pass skips ignored tokens; its forward pass still multiplies them. Nothing was "
    "measured.",
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
    )  # fmt: skip


TABLE_A3 = PaperItem(
    "Table A3", "The numbers of Figure 1",
    "The page that we read has no numbers.",
    note="See Figure 1.",
)  # fmt: skip
