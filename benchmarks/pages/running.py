"""Tables of running models: products with packed weights, decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cold_start import AIMS
from expert_cases import MODEL_NAMES
from packed_groups import LAW_NAMES, GroupFigures, group_figures, lossless

from pages.layout import Document, judged, machine, renamed, render, slower, table, with_aim

Row = dict[str, Any]


def packed_linear(document: Document) -> str:
    """Products with packed weights against cuBLAS: groups of batches, and every shape."""
    products, bits = document["sections"]["products"], document["sections"]["bits"]
    results = products["results"]
    groups = [group_row(figures) for figures in group_figures(results)]
    laws = [
        (LAW_NAMES[law], speed_table([r for r in results if r["law"] == law]))
        for law in dict.fromkeys(r["law"] for r in lossless(results))
    ]
    measured = products["environment"] | {"commit": commits(results)}
    where = [machine(measured), machine(bits["environment"])]
    return render("running.packed_linear", document, groups, laws, where)


def group_row(figures: GroupFigures) -> list[str]:
    """The least speed and the mean of a group of batches, with their targets."""
    group = figures.group
    incomplete = f", cases not measured: {figures.missing}" if figures.missing else ""
    return [
        group.name, LAW_NAMES[figures.law],
        f"{figures.least:.2f}{judged(figures.least, group.least)} ({figures.least_case}){incomplete}",
        f"{group.least:g}", f"{figures.mean:.2f}{judged(figures.mean, group.mean)}{incomplete}",
        f"{group.mean:g} / {group.stretch:g}{', stretch reached' if figures.stretched else ''}",
    ]  # fmt: skip


def speed_table(results: Sequence[Row]) -> str:
    """The speed of every shape, a line each, and batch, a column each."""
    columns = sorted({(-r["kept"], r["rows"]) for r in results})
    shapes: dict[tuple[int, int], dict[tuple[int, int], Row]] = {}
    for r in results:
        shapes.setdefault((r["out"], r["in"]), {})[-r["kept"], r["rows"]] = r
    lines = [
        [f"{shape[0]} x {shape[1]}", *(speed(cases[column]) if column in cases else "" for column in columns)]
        for shape, cases in shapes.items()
    ]
    heads = [f"{rows:,}{'' if kept == -7 else f', {-kept} bits'}" for kept, rows in columns]
    return table(["out x in", *heads], lines)


def speed(row: Row) -> str:
    """A speed relative to cuBLAS, in bold if it is slower in the two digits shown."""
    figure = f"{row['speedup']:.2f}"
    return f"**{figure}**" if slower(row["speedup"]) else figure


def commits(results: list[Row]) -> str:
    """Of products with packed weights which were measured when."""
    rows: dict[str, list[str]] = {}
    for r in results:
        rows.setdefault(r["commit"], []).append(f"{r['rows']:,}")
    if len(rows) == 1:
        return next(iter(rows))
    return ", ".join(f"{commit} (batch {', '.join(dict.fromkeys(which))})" for commit, which in rows.items())


def generate(document: Document) -> str:
    """A whole model in every residency: a column each."""
    return render("running.generate", document, has_compiled(document), by_form(document))


SERVING = " (8 layers, trained-like)"
"""What ends the names of rows of a model with few layers, whose weights look trained."""


def serving(document: Document) -> dict[tuple[str, str], Row]:
    """Rows of decoding many texts and of a prompt, by what was measured and by form, without their ending."""
    rows = document["sections"]["serving"]["results"]
    return {(r["what"].removesuffix(SERVING), r["by"]): r for r in rows if r["what"].endswith(SERVING)}


def experts(document: Document) -> str:
    """Mixtures of experts: a table for each model, one of a layer of experts, and one of greedy tokens."""
    rows = rows_of(document)
    cases = list(dict.fromkeys((r["model"], r["law"]) for r in rows if "law" in r))
    models = [
        (MODEL_NAMES[model], next(r["layers"] for r in rows if r["model"] == model),
         experts_table([r for r in rows if r["model"] == model and "layers" in r]))
        for model in dict.fromkeys(model for model, _ in cases)
    ]  # fmt: skip
    errors = [r["error"] / r["bf16_error"] for r in rows if "bf16_error" in r]
    greedy = [r for r in rows if "same_routes" in r]
    return render("running.experts", document, models, layer_table(rows, cases), errors, greedy)


def served(document: Document) -> dict[str, dict[str, dict[str, Row]]]:
    """Rows of vLLM by card, by what was measured, and by form."""
    cards: dict[str, dict[str, dict[str, Row]]] = {}
    for name, part in document["sections"].items():
        rows = cards.setdefault(name.split(", ", 1)[1], {})
        for row in part["results"]:
            rows.setdefault(row["what"], {})[row["by"]] = row
    return cards


def vllm(document: Document) -> str:
    """vLLM with packed weights beside the same vLLM with bf16: two columns for each card."""
    cards = served(document)
    lines = [
        [
            what,
            *(
                served_figure(rows.get(what, {}).get(by))
                for rows in cards.values()
                for by in ("bf16", "packed")
            ),
        ]
        for what in dict.fromkeys(what for rows in cards.values() for what in rows)
    ]
    heads = [f"{card}, {form}" for card in cards for form in ("bf16", "packed")]
    return render("running.vllm", document, table(["what", *heads], lines))


def served_figure(row: Row | None) -> str:
    """A figure of vLLM; with packed weights its ratio to bf16 comes first, and its target last."""
    if row is None:
        return ""
    digits = 0 if isinstance(row["value"], int) or row["value"] >= 1000 else 1
    figure = f"{row['value']:,.{digits}f} {row['unit']}"
    if row["by"] != "packed":
        return figure
    late = slower(row["ratio"]) if row["unit"].endswith("/s") else ""
    aim = with_aim(row["ratio"], (row.get("must"), None), most=row.get("most", False))
    return f"{row['ratio']:.3f}{late}, {figure}{aim}"


DENSE_EXPERTS = ("grouped_mm", "batched_mm")
"""How transformers computes experts with bf16 weights: the faster one is what others are compared with."""


def mixture_rows(
    document: Document, model: str
) -> tuple[int, dict[str, Row], dict[str, Row], dict[str, Row]]:
    """Layers of a model of trained-like weights, and speeds at batch 1 and 128 and of a prompt, by form."""
    rows = [r for r in rows_of(document) if r.get("model") == model and r.get("law") == "trained-like"]
    one, many, prompt = (
        {r["by"]: r for r in rows if r["what"] == what and (r["by"] == "packed" or r["ratio"] == 1.0)}
        for what in ("decode, batch 1", "decode, batch 128", "prefill")
    )
    for forms in (one, many, prompt):
        forms["bf16"] = next(row for form, row in forms.items() if form in DENSE_EXPERTS)
    return next(r["layers"] for r in rows if "layers" in r), one, many, prompt


def experts_table(rows: Sequence[Row]) -> str:
    """Figures of one model: a line for each law of weights and figure, a column for each form."""
    lines = []
    for law in dict.fromkeys(r["law"] for r in rows):
        cases: dict[str, dict[str, Row]] = {}
        for r in rows:
            if r["law"] == law and ("tokens_s" in r or "gb" in r):
                cases.setdefault(r["what"], {})[r["by"]] = r
        for what, forms in cases.items():
            peers = [forms[by] for by in DENSE_EXPERTS if by in forms]
            fastest = max(peers, key=lambda r: float(r["ratio"]))
            name = " (`batched_mm`)" if fastest["by"] == "batched_mm" else ""
            lines.append([
                what, LAW_NAMES[law], fastest.get("experts_in_use", ""), figure_of(fastest) + name,
                *(compared(forms[form]) if form in forms else "" for form in ("packed", "ans")),
            ])  # fmt: skip
    return table(["what", "weights", "experts in use", "bf16", "packed", "ans"], lines)


def figure_of(row: Row) -> str:
    """A speed or a size with its unit."""
    if "gb" in row:
        return f"{row['gb']:.2f} GB, and {row['beside_gb']:.2f} GB for the rest"
    return f"{row['tokens_s']:,.0f} tokens/s"


def compared(row: Row) -> str:
    """A ratio to bf16 with its figure and its target."""
    late = slower(row["ratio"]) if "tokens_s" in row else ""
    graph = "" if row.get("graph", True) else ", no CUDA graph"
    aims = row.get("must"), row.get("stretch")
    most = row.get("most", False)
    return f"{row['ratio']:.2f}{late}, {figure_of(row)}{graph}{with_aim(row['ratio'], aims, most=most)}"


LAYER = ("layer of experts", "packed")
"""What was measured, and by whom, in the rows of the table of one layer."""


def layer_table(rows: Sequence[Row], cases: Sequence[tuple[str, str]]) -> str:
    """Speeds of one layer of packed experts relative to bf16, a line for each number of tokens, or none."""
    layers = {(r["tokens"], r["model"], r["law"]): r for r in rows if (r["what"], r["by"]) == LAYER}
    if not layers:
        return ""
    lines = [
        [f"{tokens:,}", *(layer_cell(layers.get((tokens, *case))) for case in cases)]
        for tokens in sorted({key[0] for key in layers})
    ]
    return table(["tokens", *(f"{MODEL_NAMES[model]}, {LAW_NAMES[law]}" for model, law in cases)], lines)


def layer_cell(row: Row | None) -> str:
    """A speed relative to bf16, in bold if it is slower in the two digits shown, and its time."""
    return "" if row is None else f"{speed({'speedup': row['ratio']})} ({row['us']:,.0f} us)"


def cold_start(document: Document) -> str:
    """The first token of a command, with an empty and with a filled cache of kernels."""
    results = [
        (r, AIMS[r["cache"]] if r["residency"] == "packed" else (None, None)) for r in document["results"]
    ]
    return render("running.cold_start", document, results)


def rows_of(document: Document) -> list[Row]:
    """Those of all sections, or of a document without any."""
    sections = document.get("sections", {"": document}).values()
    return [row for section in sections for row in section["results"]]


def has_compiled(document: Document) -> bool:
    """Whether there are rows of compiled steps."""
    return any(row["what"].endswith(", compiled") for row in rows_of(document))


def by_form(document: Document) -> str:
    """Figures of sections, or of a document without any: a column for each form of a model."""
    rows = rows_of(document)
    forms = list(dict.fromkeys(row["by"] for row in rows))
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        by = {row["by"]: row for row in rows if row["what"] == what}
        lines.append((renamed(what, ROWS), *(generated(by[form]) if form in by else "" for form in forms)))
    heads = (form.replace("kernels of transformers", "transformers' kernels") for form in forms)
    return table(["what", *heads], lines)


ROWS = {
    ": models apart": ": spread between copies of a model", "logits of the same bits": "bit-identical logits",
    ", of DFloat11's bound": ", against DFloat11's bound", "load and tokens": "loading and generating",
    "as on one": "equal to those on one", "original's tokens": "tokens equal to bf16's",
    "same or tied": "tokens equal to bf16's, or tied", ", generate:": ", `model.generate()`:",
    ", graph:": ", CUDA graph:",
}  # fmt: skip
"""What was measured of a model, as a reader calls it."""


def generated(row: Row) -> str:
    """A figure with its unit, its ratio and its target."""
    digits = 0 if row["value"] >= 1000 or float(row["value"]).is_integer() else 3 if row["value"] < 1 else 1
    cell = f"{row['value']:,.{digits}f} {row['unit']}".rstrip()
    if row["unit"] == "of runs":
        cell = f"{row['value']:.0%} {row['unit']}"
    if row["by"] == "bf16" or "ratio" not in row:
        return cell
    late = slower(row["ratio"]) if row["unit"] == "tokens/s" and "kernels of" not in row["by"] else ""
    if "must" not in row:
        return f"{cell} ({row['ratio']:.2f}{late})"
    aim = f"target {'≤' if row['most'] else '≥'} {row['must']}"
    if "apart" in row:
        aim += f" less {100 * row['apart']:.2g} %"
    stretch = f", stretch {row['stretch']}" if row.get("stretch") else ""
    return f"{cell} ({row['ratio']:.3f}{'' if row['met'] else ', **missed**'}{late}, {aim}{stretch})"
