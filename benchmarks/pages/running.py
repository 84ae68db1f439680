"""Tables of running models: products with packed weights, decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pages.layout import gpu_machine, machines_of, section, slower, table


def packed_linear(document: dict[str, Any]) -> str:
    """Products with packed weights, for every shape and number of rows, against cuBLAS."""
    products, bits = document["sections"]["products"], document["sections"]["bits"]
    results = products["results"]
    columns = list(dict.fromkeys((r["rows"], r["kept"]) for r in results))
    lines = []
    for shape in dict.fromkeys((r["out"], r["in"]) for r in results):
        cells = [f"{shape[0]} x {shape[1]}"]
        for column in columns:
            r = next(r for r in results if ((r["out"], r["in"]), (r["rows"], r["kept"])) == (shape, column))
            missed = ", **missed**" if r["speedup"] < r["must"] else ""
            cells.append(f"{r['speedup']:.2f}{missed}{slower(r['speedup'])} ({r['packed_us']:.1f} us)")
        lines.append(cells)
    aims = [next(r for r in results if (r["rows"], r["kept"]) == column) for column in columns]
    heads = [f"batch {rows:,}{'' if kept == 7 else f', {kept} mantissa bits'}" for rows, kept in columns]
    sizes = " and ".join(
        f"{r['bits']:.2f} for {r['weights'].removeprefix('N(0, 0.02), ')}"
        f"{', **missed**' if r['bits'] > r['must'] else ''}"
        for r in bits["results"]
    )
    return section(
        "Matmul with packed weights",
        "The table shows the speed relative to cuBLAS with bf16 weights, by the number of tokens in the "
        "batch. The weights are random, N(0, 0.02), and lossless unless the column says otherwise. Times "
        "include all unpacking. Both sides run in CUDA graphs with weights outside the L2 cache. The "
        "benchmark stops if the error against fp64 exceeds that of cuBLAS. Bits per weight, with all "
        f"overhead: {sizes} (target: at most {bits['results'][0]['must']}).",
        [
            table(
                ("weights, out x in", *heads), [("target", *(str(r["must"]) for r in aims)), *lines]
            )
        ],
        "`python benchmarks/packed_linear.py`",
        [
            gpu_machine({**products["environment"], "commit": commits(results)}),
            gpu_machine(bits["environment"]) + " (bits per weight)",
        ],
    )  # fmt: skip


def commits(results: Sequence[dict[str, Any]]) -> str:
    """Of products with packed weights which were measured when."""
    rows: dict[str, list[str]] = {}
    for r in results:
        rows.setdefault(r["commit"], []).append(f"{r['rows']:,}")
    if len(rows) == 1:
        return next(iter(rows))
    return ", ".join(f"{commit} (batch {', '.join(dict.fromkeys(which))})" for commit, which in rows.items())


def generate(document: dict[str, Any]) -> str:
    """A whole model in every residency: a column each."""
    return section(
        "Generation with Llama-3-8B's shapes",
        "The model has Llama-3-8B's shapes and random weights; rows that name wikilm-26m use that trained "
        "model. `bf16` is the model as transformers loads it. The other columns are values of `--residency`, "
        "except `rounded`, which is `packed` with 3 mantissa bits. All models decode with the same loop, "
        "one CUDA graph per step. Brackets hold the ratio to bf16 and its target. Loaded copies of one model "
        'differ slightly in speed (row "spread"), so the target of `dense` allows for 1 %. A token is *tied* '
        "if its logit equals the highest one, up to a rounding of bf16. The error of logits is relative to "
        f"fp64. DFloat11's bound is the speed that its decoder alone would allow.{compiled_rows(document)}",
        [by_form(document)],
        "`python benchmarks/generate.py`",
        machines_of(document),
    )


def rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of all sections, or of a document without any."""
    sections = document.get("sections", {"": document}).values()
    return [row for section in sections for row in section["rows"]]


def compiled_rows(document: dict[str, Any]) -> str:
    """What is meant by rows of compiled steps, if there are any."""
    if not any(row["what"].endswith(", compiled") for row in rows_of(document)):
        return ""
    return " In rows that say compiled, torch.compile compiled the steps of all columns."


def by_form(document: dict[str, Any]) -> str:
    """Figures of sections, or of a document without any: a column for each form of a model."""
    rows = rows_of(document)
    forms = list(dict.fromkeys(row["by"] for row in rows))
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        found = {row["by"]: row for row in rows if row["what"] == what}
        lines.append((of_row(what), *(generated(found.get(form)) for form in forms)))
    heads = (form.replace("kernels of transformers", "transformers' kernels") for form in forms)
    return table(("what", *heads), lines)


def of_row(what: str) -> str:
    """What was measured of a model, as a reader calls it."""
    for old, new in (
        (": models apart", ": spread between copies of a model"),
        ("logits of the same bits", "bit-identical logits"),
        (", of DFloat11's bound", ", against DFloat11's bound"),
        ("load and tokens", "loading and generating"), ("as on one", "equal to those on one"),
        ("original's tokens", "tokens equal to bf16's"), ("same or tied", "tokens equal to bf16's, or tied"),
        (", generate:", ", `model.generate()`:"), (", graph:", ", CUDA graph:"),
    ):  # fmt: skip
        what = what.replace(old, new)
    return what


def generated(row: dict[str, Any] | None) -> str:
    """A figure with its unit, its ratio and its target."""
    if row is None:
        return ""
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
