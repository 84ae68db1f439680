"""The few figures that README.md shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pages.attention import attention, kv_cache
from pages.codecs import codec, gpu_codec
from pages.layout import aimed, is_measured, linked, listed, load, slower, table, times
from pages.measurements import figures, measured_of, parts
from pages.running import generate
from pages.ternary import bitnet, recovery
from pages.training import MEMORY_AIMS, SPEED_AIMS, linear_cross_entropy, train_memory
from pages.weights import delta, sweep

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
