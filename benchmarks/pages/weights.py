"""Tables of sizes and losses of weights: sweeps, plans, formats, deltas, weight sync."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from neuzip.eval.sweep.savings import savings
from pages.layout import Document, is_measured, load, render, with_aim

IN_BLOCKS = re.compile(r"k\d+b(\d+)")
"""Names that sweeps give to mantissa bits in blocks; quantised rows and yardsticks have other ones."""

SWEPT = ("wikilm-26m", "smollm2-135m")
"""Models beside the demo of which there are sweeps of mantissa bits."""

COMPARED = ("demo", "wikilm-26m", "smollm2-135m-dithered")
"""Models on which formats are compared. SmolLM2-135M comes from 4-bit weights in groups of 32: formats are on
equal terms only if its weights are moved at random within their steps."""


def sweep(document: Document) -> str:
    """Size and quality for every number of mantissa bits: of the demo with blocks too, of others without."""
    results = {r["scheme"]: r for r in document["results"]}
    blocks = sorted({int(size[1]) for size in map(IN_BLOCKS.fullmatch, results) if size}, reverse=True)
    rows = [
        (k, [results.get(name) for name in (f"k{k}", *(f"k{k}b{size}" for size in blocks))])
        for k in range(7, -1, -1) if f"k{k}" in results
    ]  # fmt: skip
    others = {name: load(f"sweep-{name}") for name in SWEPT if is_measured(f"sweep-{name}")}
    worth = blocks_worth() if "wikilm-26m" in others else ""
    return render("weights.sweep", document, rows, [f"blocks of {n}" for n in blocks], others, worth)


def is_rounded(scheme: str) -> bool:
    """Whether a scheme keeps mantissa bits, in blocks or not: k3, k3b512."""
    return scheme.startswith("k")


def blocks_worth() -> str:
    """How often blocks with a scale diverge less than as many bytes without."""
    better = total = beyond = 0
    for name in ("demo", "wikilm-26m"):
        schemes = {r["scheme"]: r for r in load(f"sweep-{name}")["results"] if is_rounded(r["scheme"])}
        plain = [(r["ratio"], r["kld"]["mean"]["value"]) for r in (schemes[f"k{k}"] for k in range(7))]
        for scheme, r in schemes.items():
            if not IN_BLOCKS.fullmatch(scheme):
                continue
            if r["ratio"] > plain[-1][0]:  # nothing lies between 6 bits and no loss
                beyond += 1
                continue
            (x0, y0), (x1, y1) = next(
                pair for pair in itertools.pairwise(plain) if pair[0][0] <= r["ratio"] <= pair[1][0]
            )
            without = math.log(y0) + (r["ratio"] - x0) / (x1 - x0) * math.log(y1 / y0)
            better += math.log(r["kld"]["mean"]["value"]) < without
            total += 1
    return render("weights.blocks_worth", better, total, beyond)


def plans(document: Document) -> str:
    """Plans made for a target, and the same number of bits for all tensors."""
    return render("weights.plans", document, [(p, is_better(p)) for p in document["plans"]])


def is_better(plan: dict[str, Any]) -> bool:
    """Whether a plan diverges no more than the same bits everywhere, to the digits shown, and is smaller."""
    smaller: bool = plan["bytes"] <= plan["uniform_bytes"]
    return smaller and round(plan["kld"], 5) <= round(plan["uniform_kld"], 5)


def yardsticks() -> str:
    """Published formats of quantised weights and ours, of the models that were swept with both."""
    swept = {name: load(f"sweep-{name}") for name in COMPARED if is_measured(f"sweep-{name}")}
    models = {name: document for name, document in swept.items() if document.get("savings")}
    return render("weights.yardsticks", models) if models else ""


def quantisation(document: Document) -> str:
    """Bits a weight of quantised models at stated divergences, and what they should be."""
    rounded = {
        name: [rounded_bits(name, r["kld"]) for r in section["results"]]
        for name, section in document["sections"].items()
    }
    return render("weights.quantisation", document, rounded)


def rounded_bits(model: str, kld: float) -> float | None:
    """Bits a weight of rounded mantissas at a KLD, interpolated in the model's sweep; None without one."""
    name = f"sweep-{model.lower()}"
    if not is_measured(name):
        return None
    curve = [
        (r["scheme"], r["bits_per_weight"], r["kld"]["mean"]["value"])
        for r in load(name)["results"]
        if is_rounded(r["scheme"]) and not IN_BLOCKS.fullmatch(r["scheme"])
    ]
    (point,) = savings(curve, [("quantised", 1.0, kld)])
    return point.quantized_bits


def tied_embedding(document: Document) -> str:
    """What more bits for the embedding, or the head, buy beside the same bits everywhere."""
    rows = []
    for model, section in document["sections"].items():
        results = {(r["mantissa_bits"], r["more_for"], r["more_bits"]): r for r in section["results"]}
        for part in ("embedding",) if section["tied"] else ("embedding", "head"):
            name = "tied embedding" if section["tied"] else part
            for k in sorted({bits for bits, _, _ in results}, reverse=True):
                more = [results.get((k, part, bits)) for bits in (1, 2, "lossless")]
                rows.append((model, name, k, [results.get((k, "nothing", None)), *more]))
    return render("weights.tied_embedding", document, rows)


def expert_use(document: Document) -> str:
    """Plans for a mixture, with and without schemes by the use of experts, side by side."""
    rows = document["results"]
    pairs = [
        (a, b, b["ratio"] / a["ratio"], b["other_kld"] / a["other_kld"])
        for a, b in zip(rows[::2], rows[1::2], strict=True)
    ]
    return render("weights.expert_use", document, pairs)


def delta(document: Document) -> str:
    """Deltas beside the container alone and their peers."""
    rows = []
    for r in document["results"]:
        peers = [r["weight_bytes"] / peer["bytes"] for peer in r["peers"].values()]
        ratios = [r["weight_bytes"] / r["delta_bytes"], r["container_bytes"] / r["delta_bytes"], *peers]
        rows.append((r, [f"{ratio:.1f}x" for ratio in ratios]))
    return render("weights.delta", document, rows)


SYNC_AIMS = {"make": (200, 500), "apply": (300, 800), "ratio": (0.5, 0.35)}
"""Targets and stretch goals: GB/s of all weights, and bytes beside those of a raw patch."""


def weight_sync(document: Document) -> str:
    """Speed and size of deltas in memory, beside a patch of positions and values."""
    section = document["sections"]["speed"]
    rows = [
        (
            r,
            *(f"{r[f'{action}_gb_s']:,.0f}{with_aim(r[f'{action}_gb_s'], SYNC_AIMS[action], most=False)}"
              for action in ("make", "apply")),
            f"{r['ratio']:.2f}{with_aim(r['ratio'], SYNC_AIMS['ratio'], most=True)}",
        )
        for r in section["results"]
    ]  # fmt: skip
    return render("weights.weight_sync", section, rows)
