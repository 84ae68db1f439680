"""Tables of sizes and losses of weights: sweeps, plans, formats, deltas."""

from __future__ import annotations

import itertools
import math
from typing import Any

from pages.layout import MODELS_READ, is_measured, load, machine, section, table, text_of


def sweep(document: dict[str, Any]) -> str:
    """Size and quality for every number of mantissa bits: of the demo with blocks too, of others without."""
    results = {r["scheme"]: r for r in document["results"]}
    lossless = results["lossless"]
    kept = [f"k{k}" for k in range(7, -1, -1) if f"k{k}" in results]
    blocks = sorted({int(name.partition("b")[2]) for name in results if "b" in name}, reverse=True)
    rows = []
    for k in kept:
        cells = [of_scheme(results.get(name)) for name in (k, *(f"{k}b{size}" for size in blocks))]
        rows.append((k[1:], f"{results[k]['perplexity']['value']:.2f}", *cells))
    heads = ("mantissa bits", "perplexity", "no blocks", *(f"blocks of {n}" for n in blocks))
    others = {name: load(f"sweep-{name}") for name in SWEPT if is_measured(f"sweep-{name}")}
    return section(
        "Size and quality by mantissa bits",
        "`--mantissa-bits` rounds the weight matrices. bf16 has 7 mantissa bits, so 7 bits are lossless. "
        "`--block-size` lets a block of weights share a scale. Small models have relatively more overhead: a "
        "large bf16 model takes about 66 % without loss.",
        [
            f"**The demo checkpoint**, {lossless['tokens']:,} tokens of {text_of(document['text'])}, "
            f"{document['convention']}. Each cell holds the size and the KLD in thousandths of a nat. "
            "The perplexity is that of the column without blocks. In the picture, `k3` means 3 mantissa "
            "bits.",
            table(heads, rows),
            "![Size against KL divergence](benchmarks/results/sweep-demo.svg)",
            *(block for name, other in others.items() for block in swept_model(name, other)),
            *([f"**Blocks.** {blocks_worth()}"] if "wikilm-26m" in others else []),
        ],
        "`python benchmarks/sweep.py NAME`",
        [machine(document), *map(machine, others.values())],
    )


SWEPT = ("wikilm-26m", "smollm2-135m")
"""Models beside the demo of which there are sweeps."""


def swept_model(name: str, document: dict[str, Any]) -> tuple[str, str]:
    """Size and quality of a model by mantissa bits, without blocks: what it is, and a table."""
    plain = [r for r in document["results"] if "b" not in r["scheme"] and r["scheme"] != "k7"]
    rows = [
        (
            r["scheme"].removeprefix("k"), f"{r['ratio']:.1%}", f"{r['perplexity']['value']:.2f}",
            f"{100 * (r['perplexity_ratio']['value'] - 1):+.2f} %", of_kld(r), f"{r['kld']['p999']:.2g}",
            f"{r['top_1']['value']:.1%}",
        )
        for r in plain
    ]  # fmt: skip
    heads = ("mantissa bits", "size", "perplexity", "change", "KLD, mean", "KLD, 99.9th percentile",
             "top-1 agreement")  # fmt: skip
    told = (
        f"**{MODELS_READ[name]}**, {plain[0]['tokens']:,} tokens of {text_of(document['text'])}, "
        f"{document['convention']}:"
    )
    return told, table(heads, rows)


def blocks_worth() -> str:
    """How often blocks with a scale diverge less than as many bytes without."""
    better = total = beyond = 0
    for name in ("demo", "wikilm-26m"):
        schemes = {r["scheme"]: r for r in load(f"sweep-{name}")["results"]}
        plain = [(r["ratio"], r["kld"]["mean"]["value"]) for r in (schemes[f"k{k}"] for k in range(7))]
        for scheme, r in schemes.items():
            if "b" not in scheme:
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
    return (
        f"{total + beyond} schemes with blocks were measured. {total} of them are at most as large as 6 "
        f"mantissa bits without blocks. Only {better} of these {total} had a lower KLD than plain "
        "rounding at the same size. Between two numbers of mantissa bits, the KLD of plain rounding is "
        "interpolated on a log scale."
    )


def of_kld(row: dict[str, Any]) -> str:
    """A mean divergence with its standard error, if it has one."""
    mean = row["kld"]["mean"]
    error = mean["standard_error"]
    return f"{mean['value']:.2g}" + ("" if not error else f" ± {error:.1g}")


def plans(document: dict[str, Any]) -> str:
    """Plans made for a target, and the same number of bits for all tensors."""
    rows = [
        (
            f"`{p['target']}`", f"`{p['method']}`", f"{p['bytes']:,}", of_plan(p, ""), p["of"][1:],
            f"{p['uniform_bytes']:,}",
            f"{of_plan(p, 'uniform_')}{'' if better(p) else ', **not beaten**'}",
        )
        for p in document["plans"]
    ]  # fmt: skip
    heads = ("target", "sensitivity", "plan: bytes", "KLD", "uniform: bits", "bytes", "KLD")
    return section(
        "Plans for a quality or size target",
        "A plan gives each tensor its own number of mantissa bits. The baseline, on the right, gives all "
        "tensors the same number. Plans of the demo checkpoint were made on one text and measured on "
        f"another; ± is a standard error over {document['results'][0]['blocks']}. `--sensitivity` "
        "decides how `compress` estimates the sensitivity of a tensor.",
        [table(heads, rows)],
        "`python benchmarks/sweep.py demo`",
        [machine(document)],
    )


def group_formats() -> str:
    """Plain round-to-nearest formats and mantissa bits on the same tokens, by size."""
    models = [name for name in SWEPT if is_measured(f"group_formats-{name}")]
    return section(
        "Mantissa bits compared with integer formats",
        "The integer formats round each weight to the nearest integer of 4 to 8 bits. Each group of weights "
        "has an fp16 scale, and in asymmetric formats an fp16 offset; both count towards the size. The "
        "integer formats use neither calibration nor entropy coding, and their sizes are computed. The sizes "
        "of mantissa bits are those of real files. All tensors of two or more dimensions are rounded. "
        "SmolLM2-135M once had 4-bit weights in groups of 32, so its table omits formats of that kind.",
        [block for name in models for block in group_formats_table(name)],
        "`python benchmarks/group_formats.py` and `python benchmarks/sweep.py`",
        [machine(load(f"{kind}-{name}")) for name in models for kind in ("group_formats", "sweep")],
    )


def group_formats_table(name: str) -> tuple[str, str]:
    """A line for each form of one model, the smallest first."""
    document, swept = load(f"group_formats-{name}"), load(f"sweep-{name}")
    kept = {f"k{k}": f"{k} mantissa bit{'' if k == 1 else 's'}" for k in range(6)}
    of_mantissas = [r for r in swept["results"] if r["scheme"] in kept]
    assert {r["tokens"] for r in of_mantissas} == {document["tokens"]}, "measured on other tokens"
    rows = [
        (
            r["bits_per_weight"],
            r["ratio"],
            kept[r["scheme"]],
            r["perplexity_ratio"]["value"],
            r["kld"]["mean"]["value"],
            r["kld"]["mean"]["standard_error"],
        )
        for r in of_mantissas
    ]
    # A model whose weights had 4 bits in groups of 32 is not shown in formats of that kind.
    formats = [r for r in document["results"] if name != "smollm2-135m" or r["bits_per_weight"] > 6]
    rows += [
        (
            r["bits_per_weight"],
            r["ratio"],
            r["format"].replace("a scale a row", "one scale per row"),
            r["perplexity_ratio"],
            r["kld"],
            r["kld_standard_error"],
        )
        for r in formats
    ]
    lines = [
        (
            form, f"{bits:.2f}", f"{ratio:.1%}", f"{100 * (times - 1):+.2f} %",
            f"{kld:#.2g}{'' if error is None else f' ± {error:.1g}'}",
        )
        for bits, ratio, form, times, kld, error in sorted(rows)
    ]  # fmt: skip
    told = (
        f"**{MODELS_READ[name]}**, {document['tokens']:,} tokens of {text_of(document['text'])}, "
        f"{document['convention']}:"
    )
    return told, table(("format", "bits per weight", "size", "perplexity change", "KLD"), lines)


def better(plan: dict[str, Any]) -> bool:
    """Whether a plan diverges no more than the same bits everywhere, to the digits shown, and is smaller."""
    return round(plan["kld"], 5) <= round(plan["uniform_kld"], 5) and plan["bytes"] <= plan["uniform_bytes"]


def of_plan(plan: dict[str, Any], whose: str) -> str:
    """A divergence with its standard error."""
    return f"{plan[f'{whose}kld']:.5f} ± {plan[f'{whose}kld_standard_error']:.5f}"


def of_scheme(row: dict[str, Any] | None) -> str:
    """Size and divergence of one scheme."""
    return "" if row is None else f"{row['ratio']:.1%}, {1e3 * row['kld']['mean']['value']:.3g}"


def tied_embedding(document: dict[str, Any]) -> str:
    """What more bits for the embedding, or the head, buy beside the same bits everywhere."""
    lines, texts = [], []
    for model, section_of in document["sections"].items():
        found = {(r["mantissa_bits"], r["more_for"], r["more_bits"]): r for r in section_of["results"]}
        for part in ("embedding",) if section_of["tied"] else ("embedding", "head"):
            name = "tied embedding" if section_of["tied"] else part
            for k in sorted({bits for bits, _, _ in found}, reverse=True):
                cells = [found.get((k, "nothing", None))]
                cells += [found.get((k, part, more)) for more in (1, 2, "lossless")]
                lines.append((model, name, str(k), *map(of_more_bits, cells)))
        texts.append(
            f"{model}: {section_of['tokens']:,} tokens of {text_of(section_of['text'])}, in windows of "
            f"{section_of['window']}"
        )
    heads = ("model", "part", "K", "K bits for all", "K + 1 for the part", "K + 2", "lossless part")
    return section(
        "Extra bits for the embedding",
        "All matrices keep K mantissa bits, except for the part in the second column. That part keeps one or "
        "two bits more, or is lossless. Each cell holds the bits per weight of the files and the KLD.",
        [table(heads, lines), "The texts were:", "\n".join(f"* {text}" for text in texts)],
        "`python benchmarks/tied_embedding.py`",
        map(machine, document["sections"].values()),
    )


def of_more_bits(row: dict[str, Any] | None) -> str:
    """Bits and divergence of one form."""
    return "" if row is None else f"{row['bits_per_weight']:.2f}, {row['kld']:.3g}"


def delta(document: dict[str, Any]) -> str:
    """Deltas beside the container alone and their peers."""
    lines = []
    for r in document["results"]:
        training = f"{r['optimizer']}, {r['learning_rate']:g}, {'fp32 master' if r['master'] else 'bf16'}"
        peers = (f"{r['weight_bytes'] / peer['bytes']:.1f}x" for peer in r["peers"].values())
        lines.append(
            f"| {training} | {r['steps']} | {r['changed_share']:.1%} "
            f"| {r['delta_bytes'] / 1e6:.2f} MB | {r['weight_bytes'] / r['delta_bytes']:.1f}x "
            f"| {r['container_bytes'] / r['delta_bytes']:.1f}x | {' | '.join(peers)} "
            f"| {r['encode_seconds']:.2f} s | {r['apply_seconds']:.2f} s |"
        )
    first = document["results"][0]
    names = " | ".join(name.replace("zipnn", "ZipNN") for name in first["peers"])
    return section(
        "Deltas",
        f"wikilm-26m has {first['weight_bytes'] / 1e6:.1f} MB of bf16 weights, or "
        f"{first['container_bytes'] / 1e6:.1f} MB compressed without loss. It was trained for some steps on "
        f"batches of {document['batch']} x {document['tokens']} tokens and saved in bf16. The delta is taken "
        "against the checkpoint before training; applying it restores the same files. In the "
        'column "vs. bf16", 10x means that the delta is 10 times smaller than the bf16 weights. "vs. '
        'compressed" compares the delta with the compressed checkpoint. The columns of other tools compare '
        "with bf16. Other tools read the weights from memory. Times are "
        f"medians of {document['rounds']} runs of `neuzip compress --base` (without verification) and of "
        f"`neuzip apply`, with {document['threads']} threads. They include reading and writing the files.",
        [
            "| training: optimizer, learning rate, weights | steps | weights changed | delta | vs. bf16 "
            f"| vs. compressed | {names} | compress | apply |\n"
            f"|---|---:|---:|---:|---:|---:|{'---:|' * len(first['peers'])}---:|---:|\n" + "\n".join(lines)
        ],
        "`python benchmarks/delta.py`",
        [machine(document)],
    )
