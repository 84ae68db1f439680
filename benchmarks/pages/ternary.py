"""Tables of ternary weights: conversion, recovery, products, whole models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pages.layout import machine, machines_of, section, slower, table, text_of, with_aim
from pages.running import by_form, compiled_rows


def ternary_conversion(documents: dict[str, dict[str, Any]]) -> str:
    """What models lose that become ternary without training, step by step."""
    found = {name: {r["step"]: r for r in d["results"]} for name, d in documents.items()}
    steps = [r["step"] for r in next(iter(documents.values()))["results"] if not r["rotated"]]
    lines = [
        f"| {of_step(step)} | {' | '.join(of_conversion(rows.get(step)) for rows in found.values())} |"
        for step in steps
    ]
    start = " | ".join(f"{float(d['original']['perplexity']):,.2f} | 0 | 16" for d in documents.values())
    rotated = [
        (of_step(step), *rotation(step, found.values()))
        for step in steps
        if all(f"rotated, {step}" in rows for rows in found.values())
    ]
    texts = "\n".join(
        f"* {name}: calibrated on {d['calibration_tokens']:,} tokens of {text_of(d['calibration'])}, "
        f"measured on {d['tokens']:,} tokens of {text_of(d['text'])}"
        for name, d in documents.items()
    )
    heads = " | ".join(f"{name}: perplexity | {name}: KLD | {name}: bits" for name in documents)
    return section(
        "Ternary weights without training",
        "`ternarize` rounds the linear weights of a model that was not trained with ternary weights. All "
        "other weights stay as they are. `absmean` is the rounding that BitNet b1.58 trains with. "
        "`least-squares` minimises the error of the weights. `error-feedback` minimises the error of the "
        "outputs on a calibration text. Bits are those of a rounded weight: five weights per byte, plus "
        "scales in fp32.",
        [
            f"| rounding | {heads} |\n|---{'|---' * 3 * len(documents)}|\n| none | {start} |\n"
            + "\n".join(lines),
            "The texts were:",
            texts,
            "Rotating the weights first was measured too. It helps little or hurts, so `ternarize` does not "
            "offer it:",
            table(
                ("rounding", *(f"{name}: perplexity {how}" for name in documents
                               for how in ("rotated", "not rotated"))), rotated,
            ),
        ],
        "`python benchmarks/ternary_conversion.py`",
        map(machine, documents.values()),
    )  # fmt: skip


def of_step(step: str) -> str:
    """A way to round, as a reader calls it."""
    return re.sub(
        r"a scale for (\d+)", r"one scale per \1 weights", step.replace("a scale a ", "one scale per ")
    )


def rotation(step: str, models: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Perplexity of a step with and without rotation, model by model."""
    for rows in models:
        yield f"{rows[f'rotated, {step}']['perplexity']:,.2f}"
        yield f"{rows[step]['perplexity']:,.2f}"


def of_conversion(row: dict[str, Any] | None) -> str:
    """Perplexity, divergence and bits of one step."""
    return " |  | " if row is None else f"{row['perplexity']:,.2f} | {row['kld']:.3f} | {row['bits']:.2f}"


def ternary_linear(document: dict[str, Any]) -> str:
    """Products with ternary weights against cuBLAS in bf16, and what a4.8 leaves out."""
    sections = document["sections"]
    shown = []
    if "products" in sections:
        shown.append(ternary_products(sections["products"]["results"]))
    if "sparse" in sections:
        shown += [
            "**Operations that leave out a part of the work**, as BitNet a4.8 does:",
            ternary_sparse(sections["sparse"]["results"]),
        ]
    return section(
        "Matmul with ternary weights",
        "The table shows the speed relative to cuBLAS with bf16 weights of the same shape, by the format of "
        "the activations. The weights are random. Times include the quantisation of activations. Both sides "
        "run in CUDA graphs with weights outside the L2 cache. The benchmark stops if any bit differs from "
        "exact integer sums. Targets and stretch goals apply to `int8`. The target of `int4` and `fp4` is "
        f"the speed of `int8`; a cell that misses it is marked slower.{of_twins(sections)}",
        shown,
        "`python benchmarks/ternary_linear.py`",
        machines_of(document),
    )


def of_twins(sections: dict[str, Any]) -> str:
    """Beside what others are compared, and how far int8 is from int8 measured once more, where it was."""
    results = sections["products"]["results"] if "products" in sections else []
    off = [
        abs(r["times_int8_again"] - 1)
        for r in results
        if r["activation"] == "int8" and "times_int8_again" in r
    ]
    if not off:
        return ""
    return (
        f" All kernels take turns, and `int8` is timed twice per round: its two times differ by up to "
        f"{100 * max(off):.1f} %. A 4-bit cell counts as slower if its time exceeds one of these "
        "two times by more than 0.5 %, in the median of the rounds."
    )


def ternary_products(results: list[dict[str, Any]]) -> str:
    """A line for each shape and number of tokens, a column for each kind of activation."""
    kinds = list(dict.fromkeys(r["activation"] for r in results))
    lines = []
    for out, columns, tokens in dict.fromkeys((r["out"], r["in"], r["tokens"]) for r in results):
        found = {
            r["activation"]: r for r in results if (r["out"], r["in"], r["tokens"]) == (out, columns, tokens)
        }
        first = next(iter(found.values()))
        lines.append(
            (
                f"{out} x {columns}", f"{tokens:,}", f"{first['must']} / {first['stretch']}",
                f"{first['cublas_us']:.1f} us",
                *(ternary_product(found[kind]) if kind in found else "" for kind in kinds),
            )
        )  # fmt: skip
    return table(("weights, out x in", "batch", "target / stretch", "cuBLAS, bf16", *kinds), lines)


def ternary_product(row: dict[str, Any]) -> str:
    """How many times as fast as cuBLAS; of 8 bits what was missed or reached, of 4 whether 8 are faster."""
    if row["activation"] == "int8":
        said = ", **missed**" if row["speedup"] < row["must"] else ""
        said += ", stretch reached" if row["speedup"] >= row["stretch"] else ""
        said += slower(row["speedup"])
    else:
        slowest = max(row["times_int8"], row.get("times_int8_again", 0))
        said = slower(min(1 / slowest, row["speedup"]))
    return f"{row['speedup']:.2f}{said} ({row['us']:.1f} us)"


def ternary_sparse(results: list[dict[str, Any]]) -> str:
    """Top-K inputs and closed gates, beside what leaves nothing out."""
    lines = []
    for r in results:
        ratio = r["beside_us"] / r["us"]
        what, _, baseline = r["what"].partition(" beside ")
        lines.append(
            (
                of_sparse(what), SPARSE_BASELINES.get(baseline, baseline), f"{r['out']} x {r['in']}",
                f"{r['tokens']:,}", f"{r['us']:.1f} us", f"{r['beside_us']:.1f} us",
                f"{ratio:.2f}{slower(ratio)}",
            )
        )  # fmt: skip
    heads = ("operation", "baseline", "weights, out x in", "batch", "time", "baseline's time", "speedup")
    return table(heads, lines)


SPARSE_BASELINES = {"INT8": "all activations, INT8", "2 products": "two ternary matmuls"}


def of_sparse(what: str) -> str:
    """An operation that leaves a part out, as a reader calls it."""
    found = re.fullmatch(r"gated unit, (\d+)% closed,", what)
    if found:
        return f"gated unit, {found[1]} % of gates zero"
    return what.replace("Top-50 % and INT8", "largest 50 % of activations, INT8")


def bitnet(document: dict[str, Any]) -> str:
    """A whole model of ternary weights beside one of the same shapes in bf16."""
    return section(
        "Generation with BitNet a4.8's 3B shapes",
        "The models have random weights. The baseline is a bf16 Llama of the same shapes, decoded with the "
        "same loop and fused kernels, one CUDA graph per step. One column shows that Llama with "
        "transformers' kernels. Embeddings and head are bf16 in all models. Brackets hold the ratio to bf16 "
        f"and its target.{compiled_rows(document)}",
        [by_form(document)],
        "`python benchmarks/bitnet.py`",
        machines_of(document),
    )


def recovery(document: dict[str, Any]) -> str:
    """How near ternary models come to their original, stage by stage."""
    sections = document["sections"]
    lines = []
    for name, what in (("b158", "b1.58, 8-bit activations"), ("a48", "then a4.8, 4-bit activations")):
        if name not in sections:
            continue
        s, after = sections[name], sections[name]["after"]
        aim = with_aim(after["ratio"], (1.25, 1.10), most=True) if name == "b158" else ""
        to_first = ""
        if "ratio_to_b158" in s:
            to_first = f"{s['ratio_to_b158']:.3f}{with_aim(s['ratio_to_b158'], (1.03, 1.015), most=True)}"
        error = after["ratio_error"]
        spread = "" if error is None else f" ± {error:.3f}"
        lines.append(
            (
                what, f"{s['minutes']:g}", f"{s['tokens'] / 1e6:,.1f} M, {s['epochs']:.1f} epochs",
                f"{s['before']['perplexity']:,.2f}", f"{after['perplexity']:.2f}",
                f"{after['ratio']:.3f}{spread}{aim}", to_first, f"{after['kld']:.3f}",
                f"{after['top_1']:.1%}",
            )
        )  # fmt: skip
    first = next(iter(sections.values()))
    heads = ("stage", "minutes", "training tokens", "perplexity before", "perplexity after",
             "ratio to the original", "ratio to b1.58", "KLD", "top-1 agreement")  # fmt: skip
    return section(
        "Recovery of a ternary model",
        f"`recover` trains {first['checkpoint']} with ternary linear weights to match its original, on "
        f"{' and '.join(first['train'])}. The quality is measured on {first['tokens_compared']:,} tokens of "
        f"{first['test']} that training never saw. The original's perplexity there is "
        f"{first['after']['original']:.2f}. Ratios compare perplexities. A ratio below 1 means that the "
        "ternary model has the lower perplexity on this text. Brackets hold the target and the stretch goal.",
        [
            table(heads, lines),
            *(f"![Training losses of {name}](benchmarks/results/recovery-{name}.svg)" for name in sections),
        ],
        "`python benchmarks/recovery.py b158 a48`",
        machines_of(document),
    )
