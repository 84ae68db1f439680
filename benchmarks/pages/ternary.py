"""Tables of ternary weights: conversion, recovery, products, whole models."""

from __future__ import annotations

from typing import Any

from pages.layout import Document, judged, renamed, render, slower
from pages.running import by_form, has_compiled

Row = dict[str, Any]

STEPS = {"a scale a ": "one scale per ", r"a scale for (\d+)": r"one scale per \1 weights"}
"""Ways to round, as a reader calls them."""


def ternary_conversion(documents: dict[str, Document]) -> str:
    """What models lose that become ternary without training, step by step."""
    models = [{r["step"]: r for r in document["results"]} for document in documents.values()]
    steps = [step for step, r in models[0].items() if not r["rotated"]]
    rotated = [
        (renamed(step, STEPS), [rows[how]["perplexity"] for rows in models for how in (turned, step)])
        for step in steps if all((turned := f"rotated, {step}") in rows for rows in models)
    ]  # fmt: skip
    rows = [(renamed(step, STEPS), [rows.get(step) for rows in models]) for step in steps]
    return render("ternary.conversion", documents, rows, rotated)


def ternary_linear(document: Document) -> str:
    """Products with ternary weights against cuBLAS in bf16, and what a4.8 leaves out."""
    sections = document["sections"]
    products = sections["products"]["results"]
    again = [r["times_int8_again"] for r in products if r["activation"] == "int8" and "times_int8_again" in r]
    kinds = list(dict.fromkeys(r["activation"] for r in products))
    return render(
        "ternary.linear",
        document,
        [abs(factor - 1) for factor in again],
        kinds,
        ternary_products(products, kinds),
        list(map(ternary_sparse, sections.get("sparse", {"results": []})["results"])),
    )


def ternary_products(results: list[Row], kinds: list[str]) -> list[tuple[str, ...]]:
    """A line for each shape and number of tokens, a column for each kind of activation."""
    shapes: dict[tuple[int, int, int], dict[str, Row]] = {}
    for r in results:
        shapes.setdefault((r["out"], r["in"], r["tokens"]), {})[r["activation"]] = r
    lines = []
    for (out, columns, tokens), by_kind in shapes.items():
        first = next(iter(by_kind.values()))
        lines.append(
            (
                f"{out} x {columns}", f"{tokens:,}", f"{first['must']} / {first['stretch']}",
                f"{first['cublas_us']:.1f} us",
                *(ternary_product(by_kind[kind]) if kind in by_kind else "" for kind in kinds),
            )
        )  # fmt: skip
    return lines


def ternary_product(row: Row) -> str:
    """How many times as fast as cuBLAS; of 8 bits what was missed or reached, of 4 whether 8 are faster."""
    speedup = row["speedup"]
    if row["activation"] == "int8":
        label = judged(speedup, row["must"])
        label += ", stretch reached" if speedup >= row["stretch"] else ""
        label += slower(speedup)
    else:
        slowest = max(row["times_int8"], row.get("times_int8_again", 0))
        label = slower(min(1 / slowest, speedup))
    return f"{speedup:.2f}{label} ({row['us']:.1f} us)"


OPERATIONS = {
    r"gated unit, (\d+)% closed,": r"gated unit, \1 % of gates zero",
    "Top-50 % and INT8": "largest 50 % of activations, INT8",
}
SPARSE_BASELINES = {"INT8": "all activations, INT8", "2 products": "two ternary matmuls"}


def ternary_sparse(row: Row) -> tuple[str, str, Row]:
    """An operation that leaves a part out and its baseline, as a reader calls them, and its result."""
    what, _, baseline = row["what"].partition(" beside ")
    return renamed(what, OPERATIONS), SPARSE_BASELINES.get(baseline, baseline), row


def bitnet(document: Document) -> str:
    """A whole model of ternary weights beside one of the same shapes in bf16."""
    return render("ternary.bitnet", document, has_compiled(document), by_form(document))


STAGES = {"b158": "b1.58, 8-bit activations", "a48": "then a4.8, 4-bit activations"}

RECOVERY_AIMS = {"b158": (1.25, 1.10), "a48": (1.03, 1.015)}
"""Target and stretch goal: b158's perplexity over the original's, a48's over b158's."""


def recovery(document: Document) -> str:
    """How near ternary models come to their original, stage by stage."""
    sections = document["sections"]
    stages = [
        (name, what, {"ratio_to_b158": None} | sections[name])
        for name, what in STAGES.items() if name in sections
    ]  # fmt: skip
    return render("ternary.recovery", document, stages, RECOVERY_AIMS)


def recovery_curve(document: Document) -> str:
    """How near minutes of training bring a ternary SmolLM2-135M to its original."""
    return render("ternary.recovery_curve", document, document["sections"]["b158"])
