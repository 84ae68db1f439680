"""The few figures that README.md shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from expert_cases import MODEL_NAMES, QWEN
from packed_groups import group_figures

from pages.attention import cache_option, cache_rows, default_form
from pages.layout import (
    Document,
    is_measured,
    listed,
    load,
    measured,
    render,
    slower,
    slower_results,
)
from pages.measurements import figures, parts
from pages.running import mixture_rows, served, serving
from pages.ternary import RECOVERY_AIMS
from pages.training import MEMORY_AIMS, SPEED_AIMS
from pages.weights import rounded_bits

LATE = ("**missed**", "**slower**")
"""Labels of what README.md has under "Where it loses": nobody chooses what goes there."""


def short() -> dict[str, str]:
    """The tables of README.md, and a sentence about all others, by the names of their marks."""
    rows = lines(
        (("cpu_codec",), lossless_result),
        (("quantisation",), quantised_results),
        (("sweep-smollm2-135m",), lambda document: rounded_result("SmolLM2-135M", document)),
        (("sweep-demo",), lambda document: rounded_result("demo", document)),
        (("recovery", "ternary-conversion-wikilm-26m"), recovery_result),
        (("delta",), delta_result), (("gpu_codec",), codec_speeds), (("generate",), running_speeds),
        (("packed_linear",), matmul_speeds), (("serve_vllm",), served_speeds), (("experts",), mixture_speeds),
        (("bitnet",), bitnet_speed), (("attention",), attention_speed),
        (("linear_cross_entropy",), cross_entropy_speed), (("train_memory",), training_speed),
    )  # fmt: skip
    late = [row for row in rows if any(label in row for label in LATE)]
    return {
        "modes": render("summary.modes", modes(), cards()),
        "results": render("summary.results", [row for row in rows if row not in late]),
        "slower": f"{render('summary.results', late)}\n\n{counts()}",
    }


def lines(*tables: tuple[Sequence[str], Callable[..., str]]) -> list[str]:
    """The rows of which all results are there."""
    return "\n".join(measured(*tables)).splitlines()


def counts() -> str:
    """How many results of all tables miss their target or are slower than their baseline."""
    everything = figures()
    return render("summary.counts", len(parts()), everything.count(LATE[0]), slower_results(everything))


CARD_RESULTS = {
    "gpu_codec": "decompression", "packed_linear": "packed matmuls", "generate": "packed and ans models",
    "experts": "mixtures of experts", "bitnet": "ternary models",
    "kv_attention": "the KV cache", "attention": "attention", "linear_cross_entropy": "cross-entropy",
    "train_memory": "training",
}  # fmt: skip


def cards() -> str:
    """Which results are of which GPU; none is of several at once."""
    by_card: dict[str, list[str]] = {}
    for name in filter(is_measured, CARD_RESULTS):
        sections = load(name).get("sections", {"": load(name)})
        environments = [part["environment"] for what, part in sections.items() if what != "two-gpus"]
        for card in sorted({environment["gpu"]["name"] for environment in environments}):
            by_card.setdefault(card, []).append(CARD_RESULTS[name])
    each = [f"one {card} ({listed(results)})" for card, results in sorted(by_card.items())]
    return listed(each) if each else ""


def modes() -> list[str]:
    """What each mode saves and costs, and the weights that say so."""
    return lines(
        (("cpu_codec",), lambda document: render("summary.lossless_file", coded(document)["neuzip"])),
        (("quantisation",), quantised_mode),
        (("generate",), memory_modes),
        (("bitnet", "ternary-conversion-wikilm-26m"), ternary_mode),
        (("kv_cache-smollm2-135m", "kv_attention"), cache_modes),
    )  # fmt: skip


def coded(document: Document) -> Document:
    """Results of the codecs on a CPU with trained weights, by codec."""
    return {r["codec"]: r for r in document["results"] if r["case"] == "wikilm-26m"}


def scheme(document: Document, name: str) -> Document:
    """One scheme of a sweep."""
    (result,) = (r for r in document["results"] if r["scheme"] == name)
    return dict(result)


def quantised_mode(document: Document) -> str:
    """A file at the smallest divergence that was measured of a real language model; none without it."""
    section = document["sections"].get("SmolLM2-135M")
    return "" if section is None else render("summary.lossy_file", section["results"][0])


def memory_modes(document: Document) -> str:
    """Weights that stay compressed in GPU memory."""
    rows = document["sections"]["llama"]["results"]
    ratios = {(r["what"], r["by"]): r.get("ratio") for r in rows}
    return render("summary.in_memory", ratios, serving(document))


def ternary_mode(document: Document, conversion: Document) -> str:
    """Weights of -1, 0 and 1 in files and in GPU memory."""
    ratio = {r["what"]: r.get("ratio") for r in document["results"] if r["by"] == "b1.58"}
    bits = conversion["results"][0]["bits"]
    return render("summary.ternary", bits, ratio["weights outside embeddings"], ratio["decode, batch 1"])


CONTEXT = 32768
"""Tokens of a text over which the attention of README.md was timed."""


def cache_modes(document: Document, attention: Document) -> str:
    """A quantised KV cache: the speed of attention alone with the fewest and the most texts, if timed."""
    results = cache_rows(document)
    form = default_form(results)
    base, rows = results[16, None]["perplexity"], []
    for bits in (8, 4):
        wanted = bits, form, CONTEXT
        timed = [r for r in attention["results"] if (r["bits"], r.get("form", "a4.8"), r["tokens"]) == wanted]
        timed.sort(key=lambda r: int(r["texts"]))
        rows.append(
            render("summary.cache", cache_option(bits, form), results[bits, form], base, CONTEXT, timed)
        )
    return "\n".join(rows)


def lossless_result(document: Document) -> str:
    """Weights without loss."""
    return render("summary.lossless", coded(document)["neuzip"], coded(document)["zipnn"])


def quantised_results(document: Document) -> str:
    """Quantised models at a small divergence, next to rounded mantissas of the same divergence."""
    chosen = {
        name: next(r for r in section["results"] if r["divergence"] > 0.01)
        for name, section in document["sections"].items()
    }
    return render(
        "summary.quantised", chosen, {name: rounded_bits(name, r["kld"]) for name, r in chosen.items()}
    )


def rounded_result(model: str, document: Document) -> str:
    """Rounded weights of models that tolerate little and much."""
    return render("summary.rounded", model, scheme(document, "k3"))


def recovery_result(document: Document, conversion: Document) -> str:
    """Weights of -1, 0 and 1, trained to be so, judged as docs/measurements.md does."""
    bits, rows = conversion["results"][0]["bits"], []
    for name, activations in (("b158", 8), ("a48", 4)):
        if section := document["sections"].get(name):
            must, to_first = RECOVERY_AIMS[name][0], section.get("ratio_to_b158")
            rows.append(render("summary.recovered", activations, section, bits, must, to_first))
    return "\n".join(rows)


def delta_result(document: Document) -> str:
    """What some steps of training changed."""
    return render("summary.delta", next(
        r for r in document["results"] if (r["steps"], r["learning_rate"]) == (100, 1e-6)
    ))  # fmt: skip


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


def codec_speeds(document: Document) -> str:
    """Decoding, and loading a checkpoint."""
    rows = []
    for what, name in CODED.items():
        results = {r["by"]: r for r in document["results"] if r["row"] == name and "gb_s" in r}
        ours, peers = results["neuzip"], [(CODECS[by], r) for by, r in results.items() if by in CODECS]
        label = slower(ours["gb_s"] / max(r["gb_s"] for _, r in peers)) if peers else ""
        rows.append(render("summary.codec", what, ours, peers, label))
    return "\n".join(rows)


def running_speeds(document: Document) -> str:
    """A model of 8B shapes in both compressed formats: one text, many, their memory, and reading a prompt."""
    rows = document["sections"]["llama"]["results"]
    return render("summary.running", {(r["what"], r["by"]): r for r in rows}, serving(document))


def served_speeds(document: Document) -> str:
    """vLLM with packed weights: a row for each card."""
    return "\n".join(
        render(
            "summary.served", card.split(" ")[1],
            rows["served tokens/s, 1 sequence"], rows["served tokens/s, 128 sequences"],
            rows["served time to first token"], rows["served requests/s, scarce room"],
        )
        for card, rows in served(document).items()
    )  # fmt: skip


def mixture_speeds(document: Document) -> str:
    """A mixture of experts, whose weights look trained, beside the faster bf16 of transformers."""
    name = MODEL_NAMES[QWEN]  # it gains less than Mixtral does
    return render("summary.mixture", name, *mixture_rows(document, QWEN))


def matmul_speeds(document: Document) -> str:
    """Products of many rows with packed weights that look trained: means, and the slowest shapes."""
    figures = group_figures(document["sections"]["products"]["results"])
    many = [one for one in figures if one.law == "trained-like" and one.group.rows[0] >= 128]
    missed = any(not (one.least_met and one.mean_met) for one in many)
    return render("summary.matmuls", many, missed)


def bitnet_speed(document: Document) -> str:
    """Ternary weights."""
    by = {r["by"]: r for r in document["results"] if r["what"] == "decode, batch 1"}
    return render("summary.bitnet", by["a4.8"], by["a4.8, 3-bit KV"], by["bf16"])


def attention_speed(document: Document) -> str:
    """Quantised attention of one long text."""
    case = {"texts": 1, "tokens": 32768, "width": 128, "causal": True}
    results = document["sections"]["kernels"]["results"]
    sides = {r["side"]: r for r in results if case.items() <= r.items()}
    return render("summary.attention", sides["ours, 8 bits"], sides["SDPA, cuDNN"])


def cross_entropy_speed(document: Document) -> str:
    """The loss of a head."""
    by = {r["by"]: r for r in document["sections"]["gemma"]["results"] if r["row"] == "forward"}
    return render("summary.cross_entropy", by["neuzip"], by["torch"])


def training_speed(document: Document) -> str:
    """Training on compressed weights: its memory, and what that costs where steps are small."""
    rows = {(r["method"], r["tokens"]): r for r in document["sections"]["llama-3-8b"]["results"]}
    methods = [rows[method, 1024] for method in ("ours", "lomo", "vanilla")]
    return render("summary.training", *methods, MEMORY_AIMS["llama-3-8b"][0], SPEED_AIMS[1024][0])
