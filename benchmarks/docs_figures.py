"""Writes the figures of docs/*.md from benchmarks/results, so that none is copied by hand.

python benchmarks/docs_figures.py            # rewrite what stands between the marks of every page
python benchmarks/docs_figures.py --check    # exit 1 if a page differs, and name it

A page has `<!-- figures: NAME -->` and `<!-- end of figures -->` around what BLOCKS[NAME] gives.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quoted
import readme

DOCS = readme.ROOT / "docs"
MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

FIRST = "bf16 decode, lossless, 235 M weights"
SMALL = "bf16 decode, lossless, 16 Mi weights"


def main() -> int:
    """Render every page, then write or compare."""
    differ = []
    for page in sorted(DOCS.rglob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = rendered(page, old)
        if new != old:
            differ.append((page, new))
    if "--check" in sys.argv:
        print(*(page.name for page, _ in differ), sep="\n", end="")
        return int(bool(differ))
    for page, new in differ:
        page.write_text(new, encoding="utf-8")
    return 0


def rendered(page: Path, text: str) -> str:
    """The text of a page with its figures filled in; paths of pictures as they are from the page."""
    up = "../" * len(page.relative_to(readme.ROOT).parent.parts)
    return MARKED.sub(
        lambda mark: (
            f"{mark[1]}{BLOCKS[mark[2]]().replace('](benchmarks/', f']({up}benchmarks/')}\n{mark[3]}"
        ),
        text,
    )


def whole(name: str, render: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """A table that README's script renders, once it has been measured."""
    return lambda: render(readme.load(name)) if readme.is_measured(name) else "Not measured yet."


def table(heads: str, rows: list[tuple[object, ...]]) -> str:
    """A Markdown table; `heads` are separated by bars."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return f"| {heads} |\n{'|---' * (heads.count('|') + 1)}|\n" + "\n".join(lines)


def spread(values: list[float], digits: int = 2) -> str:
    """The least and the greatest."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def limits() -> str:
    """For each kernel on a GPU: what bounds it, and how near it comes."""
    codec = {(r["row"], r["by"]): r for r in readme.load("gpu_codec")["results"] if "gb_s" in r}
    products = readme.load("packed_linear")["sections"]["products"]
    packed_bits = readme.load("packed_linear")["sections"]["bits"]["results"][0]["bits"]
    ternary = readme.load("ternary_linear")["sections"]["products"]
    loss = readme.load("linear_cross_entropy")["sections"]["gemma"]["results"]
    attended = readme.load("kv_attention")
    rows: list[tuple[object, ...]] = []
    for what, row in (
        ("rANS decode, 235 M weights", FIRST), ("rANS decode, one tensor of 16 Mi", SMALL),
        ("rANS encode, 235 M weights", "bf16 encode, 235 M weights"),
    ):  # fmt: skip
        r = codec[row, "neuzip"]
        rows.append((what, "bytes moved", f"{r['gb_s'] / r['share']:,.0f} GB/s", f"{r['gb_s']:,.0f} GB/s",
                     f"{r['share']:.0%}"))  # fmt: skip
    one = [r for r in products["results"] if (r["rows"], r["kept"]) == (1, 7)]
    read = [r["gb_s_read"] / products["device_copy_gb_s"] for r in one]
    rows.append(("packed product, 1 row", "bytes read", f"{16 / packed_bits:.2f} times cuBLAS",
                 f"{spread([r['speedup'] for r in one])} times",
                 f"{min(read):.0%} to {max(read):.0%}"))  # fmt: skip
    vector = [r for r in ternary["results"] if (r["tokens"], r["activation"]) == (1, "int8")]
    read = [r["gb_s_read"] / ternary["device_copy_gb_s"] for r in vector]
    rows.append(("ternary product, 1 token", "bytes read", f"{16 / vector[0]['bits']:.0f} times cuBLAS",
                 f"{spread([r['speedup'] for r in vector])} times",
                 f"{min(read):.0%} to {max(read):.0%}"))  # fmt: skip
    ours = next(r for r in loss if (r["row"], r["by"]) == ("forward", "neuzip"))
    rows.append(("loss of a head, 8,192 tokens, 256,000 x 2,304", "arithmetic",
                 f"{ours['ms'] * ours['share']:.1f} ms", f"{ours['ms']:.1f} ms",
                 f"{ours['share']:.0%}"))  # fmt: skip
    copied = attended["device_copy_gb_s"]
    read = [r["gb_s_read"] / copied for r in attended["results"]]
    rows.append(("attention over packed keys and values", "bytes read", f"{copied:,.0f} GB/s",
                 f"{spread([r['gb_s_read'] for r in attended['results']], 0)} GB/s",
                 f"{min(read):.0%} to {max(read):.0%}"))  # fmt: skip
    loaded = next(r for (row, by), r in codec.items() if row.startswith("load_file") and by == "neuzip")
    rows.append(("loading a checkpoint of 16 GB", "the PCIe link",
                 f"{loaded['gb_s'] / loaded['share']:.0f} GB/s", f"{loaded['gb_s']:.1f} GB/s",
                 f"{loaded['share']:.0%}"))  # fmt: skip
    machine = readme.gpu_machine(readme.load("gpu_codec")["environment"]).split(", commit")[0]
    return table("kernel | bound by | limit | reached | share", rows) + f"\n\n{machine}; commits as below"


def peers_lossless() -> str:
    """Size and speed of lossless forms of bf16, measured side by side."""
    gpu = {(r["row"], r["by"]): r for r in readme.load("gpu_codec")["results"] if "gb_s" in r}
    rows: list[tuple[object, ...]] = []
    for name in ("neuzip", "DFloat11 0.5.0", "nvCOMP ANS 6.0.0.12"):
        first, small = gpu[FIRST, name], gpu[SMALL, name]
        encode = gpu.get(("bf16 encode, 235 M weights", name))
        coded = "" if encode is None else f"{encode['gb_s']:,.0f}"
        rows.append((f"{name}, GPU", f"{first['ratio']:.2%}", "", f"{first['gb_s']:,.0f}",
                     f"{small['gb_s']:,.0f}", coded))  # fmt: skip
    cpu = readme.load("cpu_codec")
    versions = cpu["environment"]["packages"]
    for codec in ("neuzip", "zipnn", "zstd -3"):
        found = {r["case"]: r for r in cpu["results"] if r["codec"] == codec}
        large, real = found["gaussian"], found["wikilm-26m"]
        name = {"zipnn": f"ZipNN {versions['zipnn']}"}.get(codec, codec)
        rows.append((f"{name}, {cpu['threads']} CPU threads", f"{large['ratio']:.2%}",
                     f"{real['ratio']:.2%}", f"{large['decode_gb_s']:.2f}", f"{real['decode_gb_s']:.2f}",
                     f"{large['encode_gb_s']:.2f}"))  # fmt: skip
    machines = readme.gpu_machine(readme.load("gpu_codec")["environment"]), readme.machine(cpu)
    return (
        table("codec | size, large | size, wikilm-26m | decode, large | decode, small | encode, large", rows)
        + "\n\nSpeeds are GB/s of bf16 weights. GPU speeds are those of kernels in a CUDA graph, without the "
        "cost of a call. Except for wikilm-26m, which is also `small` on the CPU, all weights are synthetic. "
        f"{'; '.join(machines)}"
    )


def peers_lossy() -> str:
    """Mantissa bits and the group formats next to them in size, on the strongly trained model."""
    swept, formats = (readme.load(f"{kind}-smollm2-135m") for kind in ("sweep", "group_formats"))
    found: list[tuple[float, object, float, float]] = [
        (r["bits_per_weight"], f"neuzip, {r['scheme'][1:]} mantissa bits", r["kld"]["mean"]["value"],
         r["perplexity_ratio"]["value"])
        for r in swept["results"]
        if r["scheme"] in ("k3", "k5")
    ]  # fmt: skip
    found += [
        (r["bits_per_weight"], r["format"], r["kld"], r["perplexity_ratio"])
        for r in formats["results"]
        if r["format"].startswith(("6 bits, groups of 64", "8 bits, groups of 32"))
    ]
    rows: list[tuple[object, ...]] = [
        (what, f"{bits:.2f}", f"{kld:.2g}", f"{100 * (times - 1):+.2f} %")
        for bits, what, kld, times in sorted(found, key=lambda row: row[0])
    ]
    return (
        table("format | bits per weight | KLD, nats per token | perplexity", rows)
        + f"\n\nSmolLM2-135M, {formats['tokens']:,} tokens of {readme.text_of(formats['text'])}. The group "
        f"formats use plain rounding to nearest, without calibration. {readme.machine(formats)}"
    )


def mantissas() -> str:
    """Size and quality for every number of mantissa bits, of small checkpoints and a strongly trained one."""
    names = [n for n in ("demo", "wikilm-26m", "smollm2-135m") if readme.is_measured(f"sweep-{n}")]
    documents = {name: readme.load(f"sweep-{name}") for name in names}
    found = {name: {r["scheme"]: r for r in d["results"]} for name, d in documents.items()}
    rows: list[tuple[object, ...]] = []
    for bits in range(7, -1, -1):
        cells: list[object] = [bits]
        for schemes in found.values():
            r = schemes.get(f"k{bits}", schemes["lossless"] if bits == 7 else None)
            cells += ["", "", ""] if r is None else [
                f"{r['ratio']:.1%}", f"{r['perplexity']['value']:.2f}", f"{r['kld']['mean']['value']:.5f}",
            ]  # fmt: skip
        rows.append(tuple(cells))
    heads = " | ".join(f"{name}: size | perplexity | divergence" for name in names)
    texts = "; ".join(
        f"{readme.MODELS_READ[name]}, {d['results'][0]['tokens']:,} tokens of {readme.text_of(d['text'])}"
        for name, d in documents.items()
    )
    blocks = blocks_worth([found[name] for name in names if name != "smollm2-135m"])
    return (
        table(f"mantissa bits | {heads}", rows)
        + "\n\nPerplexity token by token; divergence is the mean KL divergence from the original in nats a "
        f"token. {texts}. Small tensors carry relatively more overhead than those of a large model. {blocks} "
        + "; ".join(dict.fromkeys(readme.machine(d) for d in documents.values()))
    )


def blocks_worth(found: list[dict[str, dict[str, Any]]]) -> str:
    """How often blocks with a normaliser diverge less than as many bytes without."""
    better = total = beyond = 0
    for schemes in found:
        plain = [(r["ratio"], r["kld"]["mean"]["value"]) for r in (schemes[f"k{k}"] for k in range(7))]
        for name, r in schemes.items():
            if "b" not in name:
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
        f"Of {total + beyond} schemes with blocks that were measured {total} are no larger than 6 bits "
        f"without blocks, and of these {better} diverged less than a mixture of two numbers of bits without "
        "blocks that takes as many bytes (by interpolation of the logarithm)."
    )


def peers_attention() -> str:
    """Speed of quantised attention, torch's and the released Triton kernel, for causal heads of 128."""
    section = readme.load("attention")["sections"]["kernels"]
    sides = {"ours, 8 bits": "neuzip, 8 bits"}
    sides |= {side: side for side in ("SDPA, cuDNN", "SDPA, flash", "sageattention")}
    found = {
        (r["texts"], r["tokens"], r["side"]): f"{r['tops']:,.0f}"
        for r in section["results"]
        if r["width"] == 128 and r["causal"]
    }
    cases = dict.fromkeys((texts, tokens) for texts, tokens, _ in found)
    rows: list[tuple[object, ...]] = [
        (f"batch {texts}, {tokens:,} tokens", *(found[texts, tokens, side] for side in sides))
        for texts, tokens in cases
    ]
    version = section["environment"]["packages"]["sageattention"]
    return (
        table(f"TOPS, forward | {' | '.join(sides.values())}", rows)
        + "\n\nCausal attention of 32 heads of size 128 over synthetic tokens. Times include smoothing and "
        f"quantisation. sageattention {version} is the release with Triton kernels. "
        f"{readme.gpu_machine(section['environment'])}"
    )


def accuracy() -> str:
    """Accuracy of quantised attention."""
    return readme.attention_accuracy(
        readme.load("attention_accuracy-wikilm-26m"), readme.load("attention_accuracy-synthetic")
    )


def conversion() -> str:
    """What models lose that become ternary without training."""
    return readme.ternary_conversion(
        {name: readme.load(f"ternary-conversion-{name}") for name in ("demo", "wikilm-26m")}
    )


BLOCKS: dict[str, Callable[[], str]] = quoted.BLOCKS | {
    "limits": limits, "peers-lossless": peers_lossless, "peers-lossy": peers_lossy, "mantissas": mantissas,
    "peers-attention": peers_attention, "attention-accuracy": accuracy, "ternary-conversion": conversion,
    "sweep": whole("sweep-demo", readme.sweep), "group-formats": readme.group_formats,
    "kv-cache": lambda: readme.kv_cache(readme.measured_of("kv_cache")),
    "cpu-codec": whole("cpu_codec", readme.codec), "gpu-codec": whole("gpu_codec", readme.gpu_codec),
    "packed-linear": whole("packed_linear", readme.packed_linear),
    "generate": whole("generate", readme.generate),
    "ternary-linear": whole("ternary_linear", readme.ternary_linear),
    "bitnet": whole("bitnet", readme.bitnet),
    "kv-attention": whole("kv_attention", readme.kv_attention),
    "attention": whole("attention", readme.attention),
    "linear-cross-entropy": whole("linear_cross_entropy", readme.linear_cross_entropy),
    "train-memory": whole("train_memory", readme.train_memory),
    "recovery": whole("recovery", readme.recovery), "mix-ln": whole("mix_ln", readme.mix_ln),
    "mix-ln-once": whole("mix_ln-once", readme.mix_ln),
    "delta": whole("delta", readme.delta), "faults": whole("faults", readme.faults),
    "layers": whole("layers-wikilm-26m", readme.layers), "memory": whole("memory", readme.memory),
}  # fmt: skip
"""What a mark may name."""


if __name__ == "__main__":
    sys.exit(main())
