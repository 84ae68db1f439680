"""Tables of quantised KV caches and of quantised attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pages.layout import (
    CACHE_TITLE,
    MODELS_READ,
    gpu_machine,
    machine,
    section,
    slower,
    table,
    text_of,
)


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
