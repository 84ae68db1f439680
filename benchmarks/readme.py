"""Writes the figures of README.md and docs/measurements.md from benchmarks/results: none is copied by hand.

python benchmarks/readme.py            # rewrite what stands between the marks of each page
python benchmarks/readme.py --check    # exit 1 if a page differs, and name it

README.md has the few that matter most, docs/measurements.md all of them. What missed its aim says so in both.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """All tables as docs/measurements.md has them: a list of contents, then a heading for each topic."""
    contents, sections = [], []
    for topic, told, tables in topics():
        contents.append(f"* [{topic}](#{anchor(topic)})")
        contents += [f"  * [{title_of(part)}](#{anchor(title_of(part))})" for part in tables]
        sections += [f"## {topic}", told, *tables]
    return "\n".join(contents) + "\n\n" + "\n\n".join(sections).replace("](benchmarks/", "](../benchmarks/")


def title_of(part: str) -> str:
    """What a table is of: the heading that it begins with."""
    found = re.match(r"### (.+)", part)
    assert found is not None, part[:80]
    return found[1]


def anchor(title: str) -> str:
    """The name that a heading has on the web."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def figures() -> str:
    """All tables as Markdown."""
    return "\n\n".join(parts())


def parts() -> list[str]:
    """All tables that have been measured."""
    return [part for _, _, tables in topics() for part in tables]


def topics() -> list[tuple[str, str, list[str]]]:
    """The topics of the page, each with an introduction and its tables, as far as they have been measured."""
    conversion = ("ternary-conversion-demo", "ternary-conversion-wikilm-26m")
    accuracy = ("attention_accuracy-wikilm-26m", "attention_accuracy-synthetic")
    found = [
        (
            "Weights: size and quality",
            "Size is a percentage of the bf16 size, or bits per weight. The cost is the mean KL divergence "
            "(KLD) from the original model, in nats per token.",
            measured(
                (("sweep-demo",), sweep), (("sweep-demo",), plans),
                (("group_formats-wikilm-26m", "sweep-wikilm-26m"), lambda *_: group_formats()),
                (("tied_embedding",), tied_embedding), (("delta",), delta),
            ),
        ),
        (
            "Codecs and commands",
            "Speeds are GB of uncompressed weights per second. Each benchmark compares its output with the "
            "original bytes.",
            measured((("cpu_codec",), codec), (("gpu_codec",), gpu_codec), (("memory",), memory)),
        ),
        (
            "Running a compressed model",
            "All tables compare with bf16 weights on the same GPU. "
            "[How it works](explanation/how-it-works.md#in-memory) explains the in-memory formats.",
            measured((("packed_linear",), packed_linear), (("generate",), generate)),
        ),
        (
            "Ternary models",
            "Ternary weights are -1, 0 or 1 times a scale. BitNet b1.58 quantises activations to 8 bits. "
            "BitNet a4.8 quantises some activations to 4 bits and sparsifies the others.",
            measured(
                (conversion, lambda *found: ternary_conversion(dict(zip(CONVERTED, found, strict=True)))),
                (("recovery",), recovery), (("ternary_linear",), ternary_linear), (("bitnet",), bitnet),
            ),
        ),
        (
            "KV cache and attention",
            "`--kv-bits` quantises the KV cache. `--attention` quantises the matmuls of attention, "
            "as SageAttention2 does.",
            [
                *([kv_cache(measured_of("kv_cache"))] if measured_of("kv_cache") else []),
                *measured(
                    (("kv_attention",), kv_attention), (("attention",), attention),
                    (accuracy, attention_accuracy),
                ),
            ],
        ),
        (
            "Loss and training",
            "`neuzip train` and `neuzip eval` use these kernels and methods.",
            measured(
                (("linear_cross_entropy",), linear_cross_entropy), (("train_memory",), train_memory),
                (("mix_ln-once",), mix_ln), (("mix_ln",), mix_ln), (("layers-wikilm-26m",), layers),
            ),
        ),
        (
            "Reliability",
            "The repository also holds results of fuzzing and of long runs with `kill -9`: see "
            "[Security](SECURITY.md).",
            measured((("faults",), faults)),
        ),
    ]  # fmt: skip
    return [(topic, told, tables) for topic, told, tables in found if tables]


CONVERTED = ("demo", "wikilm-26m")
"""Models that were converted to ternary weights without training."""


def measured(*tables: tuple[Sequence[str], Callable[..., str]]) -> list[str]:
    """The tables of which all results are there."""
    return [render(*map(load, names)) for names, render in tables if all(map(is_measured, names))]


def section(title: str, told: str, shown: Iterable[str], command: str, machines: Iterable[str]) -> str:
    """A heading, what was measured, the tables, and how to measure it again."""
    by_machine: dict[str, dict[str, None]] = {}
    for text in machines:
        name, _, commit = text.partition(", commit ")
        by_machine.setdefault(name, {})[commit] = None
    where = "; ".join(
        f"{name}, commit{'s' if len(found) > 1 else ''} {', '.join(found)}"
        for name, found in by_machine.items()
    )
    return "\n\n".join([f"### {title}", told, *shown, f"Measured with {command} on {where}."])


def is_measured(name: str) -> bool:
    """Whether there is such a result."""
    return (RESULTS / f"{name}.json").is_file()


def load(name: str) -> dict[str, Any]:
    """One result."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def slower(speedup: float) -> str:
    """The label of a result of ours that is slower than its baseline, in the two digits that are shown."""
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


def of_conversion(row: dict[str, Any] | None) -> str:
    """Perplexity, divergence and bits of one step."""
    return " |  | " if row is None else f"{row['perplexity']:,.2f} | {row['kld']:.3f} | {row['bits']:.2f}"


def text_of(name: str) -> str:
    """A text as a reader knows it."""
    return {"demo": "the held-out text", "train": "its training text"}.get(name.partition(" (")[0], name)


def kv_cache(documents: dict[str, dict[str, Any]]) -> str:
    """What keys and values in few bits do to models, a table each."""
    return section(
        CACHE_TITLE,
        "The KLD compares the model with a quantised and with an unquantised cache. Bits per value include "
        "one 16-bit scale per token and head. That scale costs 0.5 bit per value at the demo's head size of "
        '32, 0.25 bit at SmolLM2\'s 64 and 0.125 bit at 128. `span="minmax"` stores an offset as well as the '
        "scale; it is available from Python only.",
        [block for name, document in documents.items() for block in kv_cache_table(name, document)],
        "`python benchmarks/kv_cache.py`",
        map(machine, documents.values()),
    )


def kv_cache_table(name: str, document: dict[str, Any]) -> tuple[str, str]:
    """A line for each number of bits and kind of scale."""
    lines: list[tuple[str, ...]] = []
    for r in document["results"]:
        if r["span"] is None:
            lines.append(("not quantised", "16", f"{r['perplexity']:.2f}", "0", "", ""))
            continue
        by = f"`--kv-bits {r['bits']}`" if r["span"] == "absmax" else f'{r["bits"]}, `span="{r["span"]}"`'
        lines.append(
            (
                by, f"{r['bits_per_number']:.2f}", f"{r['perplexity']:.2f}",
                f"{r['kld']:#.2g} ± {r['kld_standard_error']:.1g}", f"{r['kld_p999']:.2g}",
                f"{r['top_1']:.1%}",
            )
        )  # fmt: skip
    told = (
        f"**{MODELS_READ[name]}**, {document['tokens']:,} tokens of {text_of(document['text'])}, "
        f"{document['convention']}:"
    )
    heads = ("KV cache", "bits per value", "perplexity", "KLD, mean", "KLD, 99.9th percentile",
             "top-1 agreement")  # fmt: skip
    return told, table(heads, lines)


CACHE_TITLE = "Quality with a quantised KV cache"

MODELS_READ = {"demo": "The demo checkpoint", "wikilm-26m": "wikilm-26m", "smollm2-135m": "SmolLM2-135M"}
"""Names of models; docs/measurements.md says what they are."""


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
            (
                r["case"] if ours else "", {"zipnn": "ZipNN"}.get(r["codec"], r["codec"]),
                f"{r['ratio']:.2%}",
                f"{r['encode_gb_s']:.2f}{against(r, peer, 'encode_gb_s') if ours else ''}",
                f"{max(r['encode_range']):.2f}",
                f"{r['decode_gb_s']:.2f}{against(r, peer, 'decode_gb_s') if ours else ''}",
                f"{max(r['decode_range']):.2f}",
            )
        )  # fmt: skip
    heads = ("weights", "codec", "size", "encode, GB/s", "fastest round", "decode, GB/s", "fastest round")
    return section(
        "Lossless codec on the CPU",
        f"All codecs ran in memory with {document['threads']} threads. Speeds are medians of "
        f"{document['rounds']} rounds; the codecs take turns, each with a warm-up. The factor in brackets is "
        "the speed relative to ZipNN; the target is at least 1.0 in every row. `gaussian` is one tensor of "
        "67 M random weights, N(0, 0.02). `student-t4` is one of 17 M random weights with heavier tails. "
        "`wikilm-26m` is a trained checkpoint of 57 small tensors.",
        [table(heads, lines)],
        "`python benchmarks/cpu_codec.py`",
        [machine(document)],
    )


def against(row: dict[str, Any], peer: dict[str, Any], key: str) -> str:
    """Our speed as a multiple of the peer's; a target missed is said."""
    factor = row[key] / peer[key]
    return f" ({factor:.2f}x{'' if factor >= 1 else ', **missed**'}{slower(factor)})"


def gpu_codec(document: dict[str, Any]) -> str:
    """Our codec on a GPU, its targets, its peers, and how near the limit it is."""
    peers = codec_peers(document)
    groups: dict[str, list[str]] = {"peers": [], "formats": [], "loading": []}
    for r in document["results"]:
        kind = "formats" if FORMAT_ROW.fullmatch(r["row"]) else "peers"
        groups["loading" if r["row"].startswith("load_file") else kind].append(gpu_codec_line(r, peers))
    heads = "| what | tool | GB/s | target | stretch goal | of the limit | size |\n" + "|---" * 7 + "|\n"
    captions = {
        "peers": "**bf16, compared with other codecs:**",
        "formats": "**Other formats.** The target is the speed of lossless bf16, the first row:",
        "loading": "**Loading a checkpoint of 16 GB** from the page cache to the GPU:",
    }
    shown = [
        part
        for kind, lines in groups.items() if lines
        for part in (captions[kind], heads + "\n".join(lines))
    ]  # fmt: skip
    return section(
        "Lossless codec on a GPU",
        "Random weights, N(0, 0.02). Speeds are medians, in GB of uncompressed weights per second. "
        '"One call" is one function call on an idle GPU, launch overhead included. Loading is timed by the '
        "clock. All other rows are kernels in a CUDA graph on data that is not in the L2 cache. The "
        f"limit for bf16 decoders is {document['device_copy_gb_s'] * 2 / 3:,.0f} GB/s: two thirds of the "
        f"speed of a device copy ({document['device_copy_gb_s']:,.0f} GB/s). The limit of the other kernels "
        "is the time that a device copy of the same bytes takes. The limit of loading "
        f"follows from the PCIe link ({document['link_gb_s']:.1f} GB/s) and the compressed size. Bits are "
        "stored bits per exponent, overhead included.",
        shown,
        "`python benchmarks/gpu_codec.py`",
        [gpu_machine(document["environment"])],
    )


FORMAT_ROW = re.compile(r"(bf16|fp16|fp32|fp8 \w+) decode, (lossless|lossless, was bf16|k = \d.*)")
"""Rows of the codec's results that compare formats, not codecs."""


def gpu_codec_line(r: dict[str, Any], peers: dict[str, list[dict[str, Any]]]) -> str:
    """One row of the codec's tables."""
    what = of_codec_row(r["row"])
    if "status" in r:
        return f"| {what} | {r['by']} | {r['status']} | | | | |"
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
    return f"| {what} | {r['by']} | {r['gb_s']:,.{digits}f}{missed} | {must} | {stretch} | {share} | {size} |"


def of_codec_row(row: str) -> str:
    """What was done, as a reader calls it."""
    for old, new in (
        (", a call", ", one call"), (r"k = 1\b", "1 mantissa bit"), (r"k = (\d)", r"\1 mantissa bits"),
        ("8B-shaped model of 291 tensors", "291 tensors of Llama-3-8B's shapes"),
        ("was bf16", "all values fit bf16"),
        ("load_file of a checkpoint of 16 GB in the page cache", "`load_file`"),
    ):  # fmt: skip
        row = re.sub(old, new, row)
    return row


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


def machines_of(document: dict[str, Any]) -> list[str]:
    """The GPUs of all sections, or of a document without any."""
    sections = document.get("sections", {"": document}).values()
    return [gpu_machine(part["environment"]) for part in sections if "environment" in part]


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


def kv_attention(document: dict[str, Any]) -> str:
    """Attention over keys and values in few bits, beside torch's over bf16."""
    lines = [
        (
            f"{r['texts']} x {r['tokens']:,}", str(r["bits"]), f"{r['bytes'] / r['bytes_bf16']:.1%}",
            f"{r['sdpa_us']:,.1f} us, {r['sdpa_gb_s_read']:,.0f} GB/s",
            f"{r['attend_us']:,.1f} us, {r['gb_s_read']:,.0f} GB/s",
            f"{r['speedup']:.2f}{slower(r['speedup'])}", f"{r['store_us']:.1f} us",
        )
        for r in document["results"]
    ]  # fmt: skip
    heads = ("batch x tokens", "bits", "size", "PyTorch SDPA, bf16", "neuzip", "speedup", "store")
    return section(
        "Speed of attention over a quantised KV cache",
        f"The kernel computes attention of one new token per sequence, with {document['queries']} query "
        f"heads, {document['heads']} KV heads and a head size of {document['width']}. It reads the "
        "quantised cache directly. The cache holds random values and is not in the L2 cache; both sides run "
        "in CUDA graphs. GB/s count the bytes of keys and values. A device copy reaches "
        f"{document['device_copy_gb_s']:,.0f} GB/s. At batch 1, PyTorch's kernel is far below that speed, "
        "so most of the speedup there does not come from the smaller cache. `store` is the extra time to "
        "quantise and pack one token.",
        [table(heads, lines)],
        "`python benchmarks/kv_attention.py`",
        [gpu_machine(document["environment"])],
    )


def attention(document: dict[str, Any]) -> str:
    """Quantised attention: the kernel beside its peers, its accuracy, and what a whole prompt gains."""
    sections = document["sections"]
    renders = {"kernels": attention_kernels, "prefill": attention_prefill}
    environments = [part["environment"] for part in sections.values()]
    peer = environments[0]["packages"].get("sageattention")
    return section(
        "Speed of quantised attention",
        "The table shows the forward pass in TOPS, on random Gaussian values. neuzip's kernel follows "
        "SageAttention2: Q and K in INT8, P and V in FP8 (E4M3). Its times include smoothing and "
        "quantisation; numbers in brackets exclude that work for K and V. The 4-bit mode is not faster, "
        f"because Hopper has no INT4 tensor-core instruction. sageattention is release {peer}, written in "
        "Triton. The benchmark stops if a result is far from fp64.",
        [part for name, render in renders.items() if name in sections
         for part in render(sections[name]["results"])],
        "`python benchmarks/attention.py`",
        map(gpu_machine, environments),
    )  # fmt: skip


def attention_kernels(results: list[dict[str, Any]]) -> Iterator[str]:
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
            (
                f"{texts} x 32 heads, {tokens:,} tokens, head size {width}{', causal' if causal else ''}",
                aims,
                *(attention_side(found.get(side), found) for side in sides),
            )
        )  # fmt: skip
    yield table(("case", "target / stretch", *map(of_side, sides)), lines)


def of_side(side: str) -> str:
    """A side of the comparison, as a reader calls it."""
    return side.replace("ours, ", "neuzip, ").replace(" bits", " bit")


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


def attention_prefill(results: list[dict[str, Any]]) -> Iterator[str]:
    """Seconds of a prompt with each attention."""
    lines = []
    for r in results:
        aim = ""
        if "must" in r:
            missed = ", **missed**" if r["speedup"] < r["must"] else ""
            aim = f"{r['must']} / {r['stretch']}{missed}"
        speedup = f"{r['speedup']:.2f}{slower(r['speedup']) if aim else ''}"
        lines.append((of_side(r["side"]), f"{r['s']:.2f} s", speedup, aim))
    yield f"**Prefill of {results[0]['tokens']:,} tokens**, all layers of a model of Llama-3-8B's shapes:"
    yield table(("attention", "time", "speedup", "target / stretch"), lines)


def attention_accuracy(document: dict[str, Any], synthetic: dict[str, Any]) -> str:
    """What quantised attention does to a model, and how close it is: what SageAttention2's tables tell."""
    close = {(r["table"], r["form"]): r for r in document["closeness"] if r["by"] == "reference"}
    recipe = "the whole recipe"
    lines = []
    for r in document["perplexity"]:
        if r["table"] != recipe:
            continue
        aim = f"≤ {r['most_percent']} %{'' if r['met'] else ', **missed**'}" if "most_percent" in r else ""
        found = close.get((recipe, r["form"]), r)
        lines.append(
            (
                r["form"].replace(" bit", "-bit") + (", GPU kernel" if r["by"] == "kernel" else ""),
                f"{r['rise_percent']:+.3f} ± {r['rise_percent_standard_error']:.3f} %", aim,
                f"{r['kld']:.2g}", f"{found['cosine']:.4f}", f"{found['worst_cosine']:.4f}",
            )
        )  # fmt: skip
    heads = ("mode", "perplexity change", "target", "KLD", "cosine, mean", "cosine, worst layer")
    return section(
        "Accuracy of quantised attention",
        f"The model is wikilm-26m, on {document['tokens']:,} tokens of {document['text']}, "
        f"{document['convention']}. The cosine similarity compares the attention output with exact attention "
        f'on the model\'s own Q, K and V, over {len(document["layers"])} layers. Rows without "GPU kernel" '
        "use the reference implementation.",
        [
            table(heads, lines),
            "**Smoothing.** Perplexity change by what is smoothed, with P and V unquantised:",
            smoothing(document),
            "**Scale granularity.** Cosine similarity, mean and worst layer, with P and V unquantised. "
            "`per thread` differs slightly from the paper: each query has its own scale, while the paper's "
            "threads share one among 2 or 4 rows. As in the paper, each group of 32 keys shares a scale. "
            "neuzip does not offer the paper's per-warp granularity, so it was not measured.",
            cosines(close, "Tables 2 and 3, granularity"),
            "**Data type of P and V.** Cosine similarity, mean and worst layer. The paper's Table 4 reports "
            "only 77 % for INT8, which is its reason to use FP8. On this model, INT8 is as close as E4M3.",
            cosines(close, "Tables 4 and 5, P and V"),
            "**Random values.** Worst cosine similarity of four runs. The 15 levels of INT4 alone limit the "
            "similarity of Gaussian values to 0.98, or to 0.987 with one scale per token. Smoothing cannot "
            "improve that.",
            random_cosines(synthetic),
        ],
        "`python benchmarks/attention_accuracy.py`",
        [gpu_machine(document["environment"])],
    )


def smoothing(document: dict[str, Any]) -> str:
    """By how much perplexity changes with what is smoothed."""
    found = {r["form"]: r for r in document["perplexity"] if r["table"] == "Table 1, smoothing"}
    what = ("none", "K", "Q", "Q+K")
    rows = [
        (
            bits,
            *(
                f"{r['rise_percent']:+.2f} ± {r['rise_percent_standard_error']:.2f} %"
                for r in (found[f"{bits}, smoothed: {name}"] for name in what)
            ),
        )
        for bits in ("INT4", "INT8")
    ]
    return table(("Q and K", "none", "K", "Q", "Q and K"), rows)


def cosines(close: dict[tuple[str, str], dict[str, Any]], of: str) -> str:
    """Cosine similarities of one table of the paper."""
    rows = [
        (form, f"{r['cosine']:.4f}", f"{r['worst_cosine']:.4f}")
        for (name, form), r in close.items() if name == of
    ]  # fmt: skip
    return table(("mode", "mean", "worst layer"), rows)


def random_cosines(synthetic: dict[str, Any]) -> str:
    """Cosine similarities on random numbers, and their targets."""
    rows = [
        (
            r["numbers"], str(r["head_dim"]), r["form"].replace(" bit", "-bit"), f"{r['worst_cosine']:.4f}",
            f"≥ {r['least_cosine']}{'' if r['met'] else ', **missed**'}",
        )
        for r in synthetic["synthetic"] if "least_cosine" in r and r["by"] == "reference"
    ]  # fmt: skip
    return table(("values", "head size", "mode", "cosine", "target"), rows)


def linear_cross_entropy(document: dict[str, Any]) -> str:
    """The loss of a head without logits, and everything else that is had so, beside its peers."""
    shown = []
    for name, part in document["sections"].items():
        lines = []
        for r in part["results"]:
            late = slower_loss(r, part["results"])
            ms = f"{r['ms']:.{1 if r['ms'] >= 10 else 2}f}"
            cells = [of_loss(r["row"]), r["by"], f"{ms}{missed(r, 'ms')}{late}"]
            cells.append(f"{r['must_ms']:.1f}" if "must_ms" in r else "")
            cells.append(f"{r['mb']:,.1f}{missed(r, 'mb')}" if r["by"] != "cuBLAS" else "")
            cells += [f"{r['tflops']:,.0f}", tiles_kept(r, part)]
            lines.append(cells)
        data = f"the trained head of {name} on WikiText-2" if part.get("trained") else "random values"
        shown += [
            f"**Vocabulary {part['vocabulary']:,}, width {part['width']:,}**, {part['tokens']:,} tokens, "
            f"{data}:",
            table(("what", "tool", "ms", "target, ms", "MB", "TFLOP/s", "tiles computed"), lines),
        ]
    environments = [part["environment"] for part in document["sections"].values()]
    peers = ", ".join(
        f"{name} {v}"
        for name, v in environments[0]["packages"].items()
        if name.endswith(("entropy", "kernel"))
    )
    return section(
        "Linear cross-entropy",
        "This loss is the cross-entropy of an output head, computed in bf16 without storing the logits. "
        "Times are medians; all methods take turns. MB is the peak memory in addition to inputs, results and "
        f"gradients. Versions of the peers: {peers}. Results that are wrong against fp64 are not timed. The "
        "backward pass skips tiles of 128 tokens by 128 vocabulary entries in which no |softmax - onehot| "
        "reaches 2^-12; Cut Cross-Entropy skips tiles in the same way. `exact` skips none. The data decide "
        "how many tiles remain. TFLOP/s count all tiles. The rows "
        '"KL divergence" compare two heads.',
        shown,
        "`python benchmarks/linear_cross_entropy.py`",
        map(gpu_machine, environments),
    )


def of_loss(row: str) -> str:
    """What was computed, as a reader calls it."""
    return row.replace("product alone", "matmul alone").replace("divergence", "KL divergence")


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
    "ours": "neuzip", "ours, one buffer": "neuzip, one buffer", "lomo": "LOMO",
    "lomo, again": "LOMO, repeated", "vanilla": "vanilla", "vanilla, again": "vanilla, repeated",
    "lomo, deterministic": "LOMO, deterministic", "ours, deterministic": "neuzip, deterministic",
    "ours, adamw8bit": "neuzip, 8-bit AdamW",
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
    shown, said = [], []
    if lines:
        shown.append(
            "| model | tokens per step | method | peak GiB | NeuZip paper, A6000, GiB | tokens/s "
            "| speed relative to LOMO | steps with LOMO's losses |\n"
            "|---|---|---|---|---|---|---|---|\n" + "\n".join(lines)
        )
    for row in sections.get("bits", {}).get("rows", []):
        same = row["losses_equal"] and row["weights_equal"]
        said.append(
            f"{row['steps']} steps of {row['optimizer']} with deterministic algorithms, compressed and not: "
            f"losses and weights {'are bit-identical' if same else '**differ**'}."
        )
    said += [resumed_line(row) for row in sections.get("resume", {}).get("rows", [])]
    for row in sections.get("two-gpus", {}).get("rows", []):
        same = "losses and weights are equal on all" if row["equal_on_all"] else "**they differ**"
        said.append(
            f"{row['processes']} GPUs, {row['tokens']:,} tokens per step together: "
            f"{row['tokens_per_second']:,.0f} tokens/s, {same}."
        )
    if said:
        shown += ["**Repeatability:**", "\n".join(f"* {line}" for line in said)]
    return section(
        "Training with compressed weights",
        "All parameters are trained, in bf16 and with activation checkpointing. The models have published "
        "shapes and random weights. The optimizer is SGD unless a row says otherwise. `vanilla` is "
        "transformers with `torch.optim.SGD`. `LOMO` is neuzip's own trainer with uncompressed weights: it "
        "updates each layer during the backward pass, as LOMO does. `one buffer` does not overlap decoding "
        "with computation. Brackets hold the target and the stretch goal. The last column counts the steps, "
        "out of 8 on the same batches, before a loss differs from LOMO's in any bit. Repeated vanilla runs "
        "are compared with vanilla, and deterministic runs with deterministic LOMO.",
        shown,
        "`python benchmarks/train_memory.py`",
        machines_of(document),
    )


def resumed_line(row: dict[str, Any]) -> str:
    """Whether a run repeats, and resumes, bit by bit."""
    how = "with deterministic algorithms" if row["deterministic"] else "without deterministic algorithms"
    repeats = "is bit-identical" if row["repeats"] else "**differs**"
    resumes = "is bit-identical" if row["resumes"] else "**differs**"
    return (
        f"{row['steps']} steps of {row['optimizer']} {how}: a second run {repeats}, a run resumed "
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
    """The target and the stretch goal, in brackets, and whether one was missed or the other reached."""
    must, stretch = aims
    if must is None:
        return ""
    sign = 1 if most else -1
    told = f"{must:g}" + ("" if stretch is None else f" / {stretch:g}")
    if sign * value > sign * must:
        return f" (target {told}, **missed**)"
    reached = stretch is not None and sign * value <= sign * stretch
    return f" (target {told}{', stretch reached' if reached else ''})"


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
    heads = " | ".join(f"{text}: perplexity | change from Pre-LN" for text in texts)
    seeds = max(len(r["perplexities"]) for r in results)
    environment = document["environment"]
    where = gpu_machine(environment) if "gpu" in environment else machine(document)
    seen = settings["steps"] * settings["batch"] * WINDOW / settings["tokens"]
    once = seen <= 1
    often = "no window was used twice" if once else f"each window was used {seen:.0f} times"
    return section(
        f"Norm placement, {'each text seen once' if once else 'texts seen several times'}",
        f"Llama models of {document['parameters'] / 1e6:.1f} M parameters, trained with the "
        f"{settings['size']} recipe of the Mix-LN paper: {settings['steps']:,} steps of {settings['batch']} "
        f"windows of {settings['text']}; {often}. There are {seeds} seeds, and all placements share initial "
        "weights and batches. The table shows held-out perplexity as mean ± standard deviation over seeds. "
        "Changes compare runs of the same seed and have a 95 % interval. "
        f"{verdict(results, texts[0])} {training_losses(document['runs'])}".rstrip(),
        [
            f"| placement | {heads} |\n|---{'|---' * 2 * len(texts)}|\n" + "\n".join(lines),
            f"![Losses, perplexities, gradients](benchmarks/results/mix_ln{'-once' if once else ''}.svg)",
        ],
        "`python benchmarks/mix_ln.py`",
        [where],
    ) + "".join(f"\n\n{part}" for part in (scaled_embedding() if once else ()))


def scaled_embedding() -> Iterator[str]:
    """Mix-LN against Pre-LN with the embedding as it is and scaled: the control of the paper's Table 8."""
    names = ("mix_ln-small", "mix_ln-small-scaled")
    if not all(map(is_measured, names)):
        return
    lines, documents = [], [load(name) for name in names]
    for document in documents:
        rows = {r["placement"]: r for r in document["results"] if r["text"] == "held-out documents"}
        pre, mix = rows["pre"]["mean"], rows["mix"]["mean"]
        scale = document["settings"]["embed_scale"]
        how = "unscaled" if scale == 1 else f"times {scale:g}"
        lines.append((how, f"{pre:,.0f}", f"{mix:,.0f}", f"{100 * (mix / pre - 1):+.1f} %"))
    first = documents[0]
    settings, seeds = first["settings"], len(first["results"][0]["perplexities"])
    yield (
        "**Scaled embedding.** Pre-LN's residual stream starts with the embedding, whose initial weights "
        "have a standard deviation of 0.02. Mix-LN and Post-LN normalise that stream at once. With a scaled "
        "embedding, the paper's Table 8 reports 31.28 for Pre-LN and 31.19 for Mix-LN. The runs here use "
        f"tiny models ({first['parameters'] / 1e6:.1f} M parameters, 12 layers), {settings['steps']} steps "
        f"of {settings['batch']} windows and {seeds} seed{'s' if seeds > 1 else ''}. They point in the same "
        "direction as the paper, but prove nothing about the models above, which had no scaled embedding. "
        "Perplexity of the held-out documents:"
    )
    yield table(("embedding", "Pre-LN", "Mix-LN", "change"), lines)
    yield f"Measured with `python benchmarks/mix_ln.py --size small --embed-scale 50` on {machine(first)}."


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
    return f"The final training loss is {told}. " if told else ""


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
        return "Mix-LN is better than Pre-LN, by more than the spread of seeds."
    if found["low"] > 0:
        return "**Mix-LN is worse than Pre-LN here**, by more than the spread of seeds."
    return "**These seeds cannot tell Mix-LN from Pre-LN.**"


WITHIN_95 = 1.96
"""Standard errors to either side of a 95 % interval."""


def layers(document: dict[str, Any]) -> str:
    """What each layer of wikilm-26m is worth, as `neuzip layers --json` says."""
    found = document["layers"]
    heads = ("layer", "angular distance to the next", "block influence", "perplexity without it",
             "ratio to the whole model", "KLD without it", "gradient norm")  # fmt: skip
    whole = next((one["without"]["base_nll"]["value"] for one in found if one["without"]), None)
    ranks = {
        "angular_distance": "angular distance", "block_influence": "block influence",
        "gradient_norm": "gradient norm", "depth": "earlier position",
    }  # fmt: skip
    correlated = ", ".join(
        f"{name} {document['rank_correlations'][key]:.2f}"
        for key, name in ranks.items()
        if document["rank_correlations"].get(key) is not None
    )
    environment = document["environment"]
    where = gpu_machine(environment) if "gpu" in environment else machine(document)
    before = "" if whole is None else f" The whole model has a perplexity of {math.exp(whole):.2f}."
    return section(
        "Layer importance",
        f"The model is {Path(document['src']).name}, on {document['tokens']:,} tokens of "
        f"{Path(document['text']).name} in windows of {document['window']:,}, in {document['dtype']}."
        f"{before} ± is a 95 % interval over {document['blocks']}. The angular distance is taken at the last "
        "token of each window, as a fraction of 180 degrees. The gradient norm is that of "
        f"{document['gradient_windows']} windows.",
        [
            table(heads, [(str(one["number"]), *of_layer(one)) for one in found]),
            f"Spearman rank correlation with the KLD without the layer: {correlated}.",
            "![Angular distances between layers](benchmarks/results/layers-wikilm-26m.svg)",
        ],
        "`python benchmarks/layers.py`",
        [where],
    )


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


def faults(document: dict[str, Any]) -> str:
    """What became of pushes and pulls under faults."""
    lines = []
    for r in document["results"]:
        broken = "0" if not r["broken"] else f"**{r['broken']}**"
        twice = f"{r['twice_mean']:.0%}, {r['twice_most']:.0%}" if r.get("twice_mean") is not None else ""
        cells = (r["command"], r["fault"], r["runs"], r["untouched"] or "", r["went_on"] or "",
                 r["error"] or "", r["killed"] or "", twice, broken)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return section(
        "Push and pull under faults",
        f"A fault hits `push` or `pull` at a random moment. The checkpoint is {document['checkpoint']}. The "
        "server runs on loopback and implements the Hub's API. The command recovers by itself, ends with an "
        "error, or is killed. After an error or a kill, the benchmark repeats the command without the fault.",
        [
            "*Re-sent* is the data that was transferred a second time, because the fault interrupted the "
            "first transfer. Its mean and maximum are shares of the weights. Data that a killed push had "
            "already handed to the operating system still arrives. A run counts as *broken* in any of these "
            "cases:",
            "* A partial checkpoint is left on the Hub or on the disk.\n"
            "* The repeated command fails, or uploads a finished weight file again.\n"
            "* The bytes differ after pull and decompress.\n"
            "* The access token appears in any output or file.",
            "| command | fault | runs | finished before it | recovered | error | killed | re-sent | broken |"
            "\n|---|---|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines),
        ],
        "`python benchmarks/faults.py`",
        [machine(document)],
    )


def memory(document: dict[str, Any]) -> str:
    """Peak memory and time of whole commands."""
    rows = [
        (
            f"`neuzip {r['command']}`", f"{r['seconds']:.1f} s", f"{r['gb_s']:.2f} GB/s",
            f"{r['peak_gb']:.2f} GB", f"{r['limit_gb']:.2f} GB",
        )
        for r in document["results"]
    ]  # fmt: skip
    return section(
        "Time and peak memory of commands",
        f"The checkpoint is sharded, with {document['checkpoint_gb']:.1f} GB of random weights; its largest "
        f"tensor has {document['largest_tensor_gb']:.2f} GB. Times include reading, verification and writing "
        "to disk. The target is a peak of at most 1 GB plus three times the largest tensor.",
        [table(("command", "time", "speed", "peak memory", "target"), rows)],
        "`python benchmarks/memory.py`",
        [machine(document)],
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
    chosen = table(
        ("mode", "size (bf16: 100%)", "loss", "decode speed", "prefill speed", "needs", "measured on"),
        modes(),
    )
    return {
        "modes": "\n\n".join(filter(None, [chosen, cards()])),
        "results": table(heads, [row for row in rows if row not in late]),
        "slower": f"{table(heads, late)}\n\n{counts()}",
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
    """Which results are of which GPU; none is of several at once."""
    whats = {
        "gpu_codec": "decompression", "generate": "packed and ans models", "bitnet": "ternary models",
        "kv_attention": "the KV cache", "attention": "attention", "linear_cross_entropy": "cross-entropy",
        "train_memory": "training",
    }  # fmt: skip
    found: dict[str, list[str]] = {}
    for name in filter(is_measured, whats):
        document = load(name)
        parts = [document, *(s for n, s in document.get("sections", {}).items() if n != "two-gpus")]
        for card in sorted({part["environment"]["gpu"]["name"] for part in parts if "environment" in part}):
            found.setdefault(card, []).append(whats[name])
    each = [f"one {card} ({listed(of)})" for card, of in sorted(found.items())]
    return f"GPU results on this page are from {listed(each)}." if found else ""


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


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
    for by, loss in (("packed", "none in the weights; matmuls add in another order"), ("ans", "none")):
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
            "original: 1.000x",
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
    "decompress 235 M synthetic weights, GPU kernels only": "bf16 decode, lossless, 235 M weights",
    "decompress 16 Mi synthetic weights, GPU kernel only": "bf16 decode, lossless, 16 Mi weights",
    "decompress 291 synthetic tensors of Llama-3-8B's shapes, one call": (
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
        for by, r in (("our trainer with plain weights (method of LOMO)", plain), ("torch's SGD", vanilla))
    )
    yield (
        linked("train all synthetic weights, 8B shapes, 1,024 tokens per step", train_memory(document)),
        f"{ours['peak_gib']:.1f} GiB, {ours['tokens_per_second']:,.0f} tokens/s ({times(ratio)})",
        baseline, "; ".join(aims),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
