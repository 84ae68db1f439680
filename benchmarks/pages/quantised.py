"""Tables of quantised weights: how plans are found, how codes are stored and decoded, products with codes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pages.codecs import gpu_codec_line
from pages.layout import Document, judged, plus_minus, renamed, render, row, table, with_aim
from pages.running import by_form, speed

Row = dict[str, Any]

PLAN_SECONDS = {"cuda": (30, 15), "cpu": (600, 300)}
"""Seconds of `neuzip compress --max-kld` on SmolLM2-135M, at most and hoped for: on one GPU, on 2 cores."""

START = {"imports_s": "imports", "text_s": "tokens of the text", "model_s": "the model, loaded"}
"""Parts of the start, as a reader calls them."""

PLACES = {"cuda": "one GPU", "cpu": "CPU"}

LARGEST, SMALLEST = 1 << 24, 1 << 14
"""Weights of the tensors whose codes are shown."""


def plan_time(document: Document) -> str:
    """The time of a plan by a divergence and of its files, stage by stage, by device."""
    devices = {
        PLACES[name]: (section, PLAN_SECONDS[name], stage_table(section["results"]))
        for name, section in document["sections"].items()
    }
    return render("quantised.plan_time", document, devices)


def stage_table(rounds: Sequence[Row]) -> str:
    """Seconds of each stage: a column for each round."""
    stages = list(dict.fromkeys(stage["stage"] for one in rounds for stage in one["stages"]))
    lines: list[list[str]] = [["start, to the first stage", *(f"{r['start_s']:.1f} s" for r in rounds)]]
    for part, name in START.items():
        if any(part in r for r in rounds):
            lines.append([f"of the start: {name}", *(f"{r[part]:.1f} s" for r in rounds)])
    for name in stages:
        seconds = [
            next((f"{s['wall_s']:.1f} s" for s in r["stages"] if s["stage"] == name), "") for r in rounds
        ]
        lines.append([name, *seconds])
    lines.append(["between stages", *(f"{r['between_s']:.1f} s" for r in rounds)])
    lines.append(["end", *(f"{r['end_s']:.1f} s" for r in rounds)])
    return table(["stage", *(f"round {r['round']}" for r in rounds)], lines)


def code_rates(document: Document) -> str:
    """What codes take beyond their entropy, part by part, of a large and of a small tensor."""
    tables = {size: [r for r in document["results"] if r["weights"] == size] for size in (LARGEST, SMALLEST)}
    return render("quantised.code_rates", document, tables)


def decode(document: Document) -> str:
    """The decoder of codes on a GPU, with its targets, beside the decoder of lossless weights."""
    rows = [{**r, "row": renamed(r["row"], {"^quantized": "codes"})} for r in document["results"]]
    return render("quantised.decode", document, [gpu_codec_line(r, {}) for r in rows])


def products(document: Document) -> str:
    """Products with packed codes against cuBLAS: by rows of x, and every shape."""
    section = document["sections"]["products"]
    results = section["results"]
    batches = [batch_row(rows, results) for rows in dict.fromkeys(r["rows"] for r in results)]
    kinds = [grid_row(grid, results) for grid in dict.fromkeys(r["grid"] for r in results)]
    shapes: dict[tuple[int, int], dict[tuple[str, int], Row]] = {}
    for r in results:
        shapes.setdefault((r["out"], r["in"]), {})[r["grid"], r["rows"]] = r
    columns = list(dict.fromkeys((r["grid"], r["rows"]) for r in results))
    lines = [
        [f"{out} x {columns_in}", *(speed(cases[c]) if c in cases else "" for c in columns)]
        for (out, columns_in), cases in shapes.items()
    ]
    heads = [f"{rows}, {GRIDS[grid]}" for grid, rows in columns]
    return render("quantised.products", section, batches, kinds, table(["out x in", *heads], lines))


GRIDS = {"step": "one step", "rows": "row factors", "both": "row and column factors"}
"""Kinds of grids, as a reader knows them."""


def batch_row(rows: int, results: Sequence[Row]) -> list[str]:
    """The least speed and the mean with some rows of x, and the target of the mean."""
    of_batch = [r for r in results if r["rows"] == rows]
    speeds = [r["speedup"] for r in of_batch]
    mean = statistics.mean(speeds)
    must, stretch = of_batch[0]["must"], of_batch[0]["stretch"]
    return [f"{rows}", f"{min(speeds):.2f}", f"{mean:.2f}{with_aim(mean, (must, stretch), most=False)}"]


def grid_row(grid: str, results: Sequence[Row]) -> list[str]:
    """What weights on a kind of grid take in memory."""
    of_grid = [r for r in results if r["grid"] == grid]
    bits, escapes = (max(r[key] for r in of_grid) for key in ("bits", "escapes"))
    share = bits / 16
    return [
        GRIDS[grid], f"{bits:.2f}", f"{share:.3f}{with_aim(share, (0.34, 0.31), most=True)}",
        f"{escapes:.2%}",
    ]  # fmt: skip


def generation(document: Document) -> str:
    """A model of Llama-3-8B's shapes in packed codes, and in bf16: a table for each kind of weights."""
    return render("quantised.generation", document, {n: by_form(s) for n, s in document["sections"].items()})


def limits(document: Document) -> str:
    """What `--max-kld` delivers on the text of its search and on others."""
    lines = [
        row(
            name, r["text"], f"{r['tokens']:,}", plus_minus(r["kld"], r["standard_error"], ".5f"),
            f"{r['of_limit']:.1%}{judged(r['of_limit'], 1, most=True)}",
        )
        for name, section in document["sections"].items()
        for r in section["results"]
    ]  # fmt: skip
    return render("quantised.limits", document, lines)
