"""The small tables of docs/kernels.md and docs/explanation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packed_groups import GROUPS, lossless

from pages.layout import MODELS_READ, Document, load, render
from pages.quoted import BLOCKS as QUOTED
from pages.quoted import DECODED, form_ratios
from pages.weights import blocks_worth

FIRST = "bf16 decode, lossless, 235 M weights"
SMALL = "bf16 decode, lossless, 16 Mi weights"
ENCODE = "bf16 encode, 235 M weights"

Row = dict[str, Any]

ATTENTION_SIDES = ("ours, 8 bits", "SDPA, cuDNN", "SDPA, flash", "sageattention")


def codec_rows() -> dict[tuple[str, str], Row]:
    """Results of the codec on a GPU by what was done and by whom."""
    return {(r["row"], r["by"]): r for r in load("gpu_codec")["results"] if "gb_s" in r}


def rans() -> str:
    """How near decoding and encoding come to their limit, and to nvCOMP."""
    results = codec_rows()
    rows = [
        (what, results[row, "neuzip"], results[row, "nvCOMP ANS 6.0.0.12"])
        for what, row in (
            ("decode 235 M weights", FIRST), ("decode one tensor of 16 Mi weights", SMALL),
            ("encode 235 M weights", ENCODE),
        )
    ]  # fmt: skip
    return render("kernels.rans", load("gpu_codec"), rows)


def ans() -> str:
    """A model whose weights stay coded in memory: its speed and memory."""
    section = load("generate")["sections"]["llama"]
    ratios = {r["what"]: r["ratio"] for r in section["results"] if r["by"] == "ans"}
    return render("kernels.ans", section, ratios)


def packed() -> str:
    """How near products with packed weights come to their limit."""
    sections = load("packed_linear")["sections"]
    section, bits = sections["products"], [r["bits"] for r in sections["bits"]["results"]]
    results = lossless(section["results"])
    groups = [(group, [r["speedup"] for r in results if r["rows"] in group.rows]) for group in GROUPS]
    read = [r["gb_s_read"] / section["device_copy_gb_s"] for r in results if r["rows"] == 1]
    return render("kernels.packed", section, sorted({f"{16 / one:.2f}" for one in bits}), groups, read)


def ternary() -> str:
    """How near products with ternary weights come to their limit."""
    section = load("ternary_linear")["sections"]["products"]
    results = [r for r in section["results"] if r["activation"] == "int8"]
    by_batch = [[r for r in results if r["tokens"] == batch] for batch in (1, 16, 2048)]
    return products("kernels.ternary", section, results[0]["bits"], by_batch)


def products(block: str, section: Document, bits: float, by_batch: list[list[Row]]) -> str:
    """Speedups of each group of batches, and the share of a device copy that the first group reaches."""
    speedups = [[r["speedup"] for r in rows] for rows in by_batch]
    read = [r["gb_s_read"] / section["device_copy_gb_s"] for r in by_batch[0]]
    return render(block, section, bits, speedups, read)


def attention() -> str:
    """Quantised attention and its peers."""
    section = load("attention")["sections"]["kernels"]
    tops: dict[tuple[str, int], list[float]] = {}
    for r in section["results"]:
        tops.setdefault((r["side"], r["width"]), []).append(r["tops"])
    sides = [(side, tops[side, 128], tops[side, 64]) for side in ATTENTION_SIDES]
    return render("kernels.attention", section, sides)


def kv() -> str:
    """How near attention over a quantised cache comes to its limit."""
    document = load("kv_attention")
    rows = []
    for batch in (1, 16):
        results = [r for r in document["results"] if r["texts"] == batch]
        reads = [r["gb_s_read"] for r in results]
        shares = [read / document["device_copy_gb_s"] for read in reads]
        rows.append((batch, reads, shares, [r["speedup"] for r in results]))
    return render("kernels.kv", document, rows)


def loss() -> str:
    """How near the loss of a head comes to its limit, and to its peers."""
    section = load("linear_cross_entropy")["sections"]["gemma"]
    rows = []
    for what in ("forward", "forward and backward"):
        results = {r["by"]: r for r in section["results"] if r["row"] == what}
        peers = [r for by, r in results.items() if not by.startswith("neuzip")]
        rows.append((results["neuzip"], min(peers, key=lambda r: float(r["ms"]))))
    return render("kernels.loss", section, rows)


def loss_tiles() -> str:
    """How many tiles the backward pass keeps with random and with trained heads."""
    sections = load("linear_cross_entropy")["sections"]
    trained = [
        {"name": name, "tiles": part["kept_tiles"], "compiled_memory": compiled_memory(part)}
        for name, part in sections.items() if part.get("trained")
    ]  # fmt: skip
    return render("kernels.loss_tiles", sections["gemma"]["kept_tiles"]["vocabulary"], trained)


def compiled_memory(section: Document) -> float:
    """How many times our memory torch.compile takes for a head, forward and backward."""
    mb = {r["by"]: r["mb"] for r in section["results"] if r["row"] == "forward and backward"}
    return float(mb["torch.compile"] / mb["neuzip, exact"])


def peers_lossless() -> str:
    """Size and speed of lossless forms of bf16, measured side by side."""
    results, cpu = codec_rows(), load("cpu_codec")
    gpu = [
        (by, results[FIRST, by], results[SMALL, by], results.get((ENCODE, by)))
        for by in ("neuzip", "DFloat11 0.5.0", "nvCOMP ANS 6.0.0.12")
    ]
    cases = {(r["codec"], r["case"]): r for r in cpu["results"]}
    rows = [(by, cases[by, "gaussian"], cases[by, "wikilm-26m"]) for by in ("neuzip", "zipnn", "zstd -3")]
    return render("kernels.peers_lossless", gpu, rows, cpu["environment"]["packages"], cpu["threads"])


def residencies() -> str:
    """A model of Llama-3-8B's shapes in every residency, in short."""
    sections, ratios = load("generate")["sections"], form_ratios()
    whats = ("weights in memory", *DECODED, "prefill")
    rows = [(what, [ratios[what, form] for form in ("packed", "ans")]) for what in whats]
    return render("kernels.residencies", sections["llama"], sections["serving"], rows)


def peers_attention() -> str:
    """Speed of quantised attention beside torch's and the released Triton kernel, in one case."""
    section = load("attention")["sections"]["kernels"]
    case = {"texts": 1, "tokens": 32768, "width": 128, "causal": True}
    results = {r["side"]: r for r in section["results"] if case.items() <= r.items()}
    return render("kernels.peers_attention", section, [results[side] for side in ATTENTION_SIDES])


YARDSTICKS = ("q4_0", "nf4", "q5_0", "q6_k", "q8_0")
"""Formats of which docs/explanation/comparison.md shows what quantised weights save."""


def yardsticks() -> str:
    """Some published formats and quantised weights of the same divergence, of the first model measured so."""
    swept = ((name, load(f"sweep-{name}")) for name in ("wikilm-26m", "demo"))
    model, document = next((name, document) for name, document in swept if document.get("savings"))
    savings = {saving["yardstick"]: saving for saving in document["savings"]}
    return render("kernels.yardsticks", MODELS_READ[model], [savings[name] for name in YARDSTICKS])


BLOCKS: dict[str, Callable[[], str]] = QUOTED | {
    "kernel-rans": rans, "kernel-ans": ans, "kernel-packed": packed, "kernel-ternary": ternary,
    "kernel-attention": attention, "kernel-kv": kv, "kernel-loss": loss, "loss-tiles": loss_tiles,
    "blocks": blocks_worth, "peers-lossless": peers_lossless, "residencies": residencies,
    "peers-attention": peers_attention, "yardsticks": yardsticks,
}  # fmt: skip
"""What a mark may name."""
