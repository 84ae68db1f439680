"""The small tables of docs/kernels.md and docs/explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pages import codecs, weights
from pages.attention import attention, attention_accuracy, kv_attention, of_side
from pages.layout import MODELS_READ, linked, load, slower, table, title_of
from pages.quoted import BLOCKS as QUOTED
from pages.running import generate, packed_linear
from pages.ternary import ternary_linear
from pages.training import linear_cross_entropy
from pages.weights import blocks_worth

FIRST = "bf16 decode, lossless, 235 M weights"
SMALL = "bf16 decode, lossless, 16 Mi weights"

Row = dict[str, Any]


def measured_in(*parts: str) -> str:
    """Links to tables of docs/measurements.md."""
    links = [linked(title_of(part), part) for part in parts]
    return f"All results: {', '.join(links)}."


def spread(values: Iterable[float], digits: int = 2) -> str:
    """The least and the greatest."""
    found = sorted(values)
    return f"{found[0]:,.{digits}f} to {found[-1]:,.{digits}f}"


def percent(values: Iterable[float]) -> str:
    """The least and the greatest share."""
    found = sorted(values)
    return f"{found[0]:.0%} to {found[-1]:.0%}"


def times(values: Sequence[float]) -> str:
    """The least and the greatest ratio of speeds, and that some are slower."""
    return f"{spread(values)}{slower(min(values))}"


def card(environment: Row) -> str:
    """The name of a GPU."""
    return f"Measured on one {environment['gpu']['name']}."


# docs/kernels.md


def kernel_rans() -> str:
    """How near decoding and encoding come to their limit, and to nvCOMP."""
    document = load("gpu_codec")
    found = {(r["row"], r["by"]): r for r in document["results"] if "gb_s" in r}
    rows = []
    for what, row in (
        ("decode 235 M weights", FIRST), ("decode one tensor of 16 Mi weights", SMALL),
        ("encode 235 M weights", "bf16 encode, 235 M weights"),
    ):  # fmt: skip
        ours, peer = found[row, "neuzip"], found[row, "nvCOMP ANS 6.0.0.12"]
        rows.append(
            (
                what, f"{ours['gb_s'] / ours['share']:,.0f} GB/s",
                f"{ours['gb_s']:,.0f} GB/s{slower(ours['gb_s'] / peer['gb_s'])}",
                f"{ours['share']:.0%}", f"{peer['gb_s']:,.0f} GB/s",
            )
        )  # fmt: skip
    return (
        table(("random bf16 weights", "limit", "neuzip", "share of the limit", "nvCOMP ANS"), rows)
        + f"\n\n{card(document['environment'])} {measured_in(codecs.gpu_codec(document))}"
    )


def kernel_ans() -> str:
    """A model whose weights stay coded in memory: its speed and memory."""
    document = load("generate")
    section = document["sections"]["llama"]
    ratio = {r["what"]: r["ratio"] for r in section["rows"] if r["by"] == "ans"}
    one, bound = ratio["decode, batch 1"], ratio["decode, batch 1, of DFloat11's bound"]
    return (
        "With random weights in Llama-3-8B's shapes, the decoding speed at batch 1 relative to bf16 is "
        f"{one:.2f}{slower(one)}. DFloat11's decoder alone would take {bound:.2f} times as long as a "
        "whole step of `ans`. The peak memory is "
        f"{ratio['peak memory, load and tokens']:.2f} times that of bf16. "
        f"{card(section['environment'])} {measured_in(generate(document))}"
    )


ABOVE = "A speed above the limit means that cuBLAS itself does not reach the speed of memory."


def kernel_packed() -> str:
    """How near products with packed weights come to their limit."""
    document = load("packed_linear")
    products = document["sections"]["products"]
    bits = document["sections"]["bits"]["results"][0]["bits"]
    lossless = [r for r in products["results"] if r["kept"] == 7]
    rows = [
        (what, limit, times([r["speedup"] for r in lossless if r["rows"] in batches]))
        for what, batches, limit in (
            ("1", (1,), f"{16 / bits:.2f}, by the bytes read"),
            ("8 to 32", (8, 16, 32), f"{16 / bits:.2f}, by the bytes read"),
            ("2,048", (2048,), "about 1, by the arithmetic"),
        )
    ]
    read = [r["gb_s_read"] / products["device_copy_gb_s"] for r in lossless if r["rows"] == 1]
    return (
        table(("batch", "limit", "speed relative to cuBLAS, five shapes"), rows)
        + f"\n\n{ABOVE} At batch 1 the kernel reads at {percent(read)} of the speed of a device copy. "
        f"{card(products['environment'])} {measured_in(packed_linear(document))}"
    )


def kernel_ternary() -> str:
    """How near products with ternary weights come to their limit."""
    document = load("ternary_linear")
    products = document["sections"]["products"]
    found = [r for r in products["results"] if r["activation"] == "int8"]
    limits = {
        1: f"{16 / found[0]['bits']:.0f}, by the bytes read",
        16: "between these two",
        2048: "1.7 to 2.0",
    }
    rows = [
        (f"{batch:,}", limit, times([r["speedup"] for r in found if r["tokens"] == batch]))
        for batch, limit in limits.items()
    ]
    read = [r["gb_s_read"] / products["device_copy_gb_s"] for r in found if r["tokens"] == 1]
    return (
        table(("batch", "limit", "speed relative to cuBLAS in bf16, INT8, four shapes"), rows)
        + f"\n\n{ABOVE} At batch 1 the kernel reads at {percent(read)} of the speed of a device copy. "
        f"{card(products['environment'])} {measured_in(ternary_linear(document))}"
    )


def kernel_attention() -> str:
    """Quantised attention and its peers."""
    document = load("attention")
    results = document["sections"]["kernels"]["results"]
    sides = ("ours, 8 bits", "SDPA, cuDNN", "SDPA, flash", "sageattention")
    rows = [
        (
            of_side(side),
            *(spread((r["tops"] for r in results if (r["side"], r["width"]) == (side, width)), 0)
              for width in (128, 64)),
        )
        for side in sides
    ]  # fmt: skip
    return (
        table(("TOPS, forward", "head size 128", "head size 64"), rows)
        + f"\n\n{card(document['sections']['kernels']['environment'])} "
        + measured_in(attention(document), accuracy())
    )


def kernel_kv() -> str:
    """How near attention over a quantised cache comes to its limit."""
    document = load("kv_attention")
    rows = []
    for batch in (1, 16):
        found = [r for r in document["results"] if r["texts"] == batch]
        rows.append(
            (
                str(batch), f"{spread((r['gb_s_read'] for r in found), 0)} GB/s",
                percent(r["gb_s_read"] / document["device_copy_gb_s"] for r in found),
                times([r["speedup"] for r in found]),
            )
        )  # fmt: skip
    heads = ("batch", "reads", "share of the limit", "speed relative to PyTorch in bf16")
    return (
        table(heads, rows) + f"\n\nThe limit is a device copy, {document['device_copy_gb_s']:,.0f} GB/s. "
        f"{card(document['environment'])} {measured_in(kv_attention(document))}"
    )


def kernel_loss() -> str:
    """How near the loss of a head comes to its limit, and to its peers."""
    document = load("linear_cross_entropy")
    section = document["sections"]["gemma"]
    found = {(r["row"], r["by"]): r for r in section["results"]}
    rows = []
    for what in ("forward", "forward and backward"):
        ours = found[what, "neuzip"]
        peers = {by: r for (row, by), r in found.items() if row == what and not by.startswith("neuzip")}
        best = min(peers, key=lambda by: peers[by]["ms"])
        rows.append(
            (what, f"{ours['ms']:.1f} ms, {ours['mb']:,.0f} MB",
             f"{best}: {peers[best]['ms']:.1f} ms, {peers[best]['mb']:,.0f} MB")
        )  # fmt: skip
    ours = found["forward", "neuzip"]
    return (
        table(("random values", "neuzip", "fastest baseline"), rows)
        + f"\n\nThe head has a vocabulary of {section['vocabulary']:,} and a width of {section['width']:,}; "
        f"the batch has {section['tokens']:,} tokens. The forward limit is {ours['ms'] * ours['share']:.1f} "
        f"ms, of which the kernel reaches {ours['share']:.0%}. {card(section['environment'])} "
        f"{measured_in(linear_cross_entropy(document))}"
    )


def loss_tiles() -> str:
    """How many tiles the backward pass keeps with random and with trained heads."""
    sections = load("linear_cross_entropy")["sections"]
    random = sections["gemma"]["kept_tiles"]["vocabulary"]
    trained = {name: part["kept_tiles"] for name, part in sections.items() if part.get("trained")}
    told = " and ".join(f"{kept['vocabulary']:.0%} ({name})" for name, kept in trained.items())
    ordered = " and ".join(f"{kept['sorted']:.0%}" for kept in trained.values())
    memory = " and ".join(f"{compiled_memory(sections[name]):.0f}" for name in trained)
    return (
        f"Random logits are almost uniform. With them, the backward pass computes {random:.0%} of the tiles "
        f"and is as fast as it can be. With two trained heads it computes {told} of the tiles. With those "
        f"heads the exact mode is faster, and `torch.compile` is faster still with {memory} times the "
        f"memory. Sorting the vocabulary reduces the tiles to {ordered}, and was slower in every measurement."
    )


def compiled_memory(section: Row) -> float:
    """How many times our memory torch.compile takes for a head, forward and backward."""
    found = {r["by"]: r["mb"] for r in section["results"] if r["row"] == "forward and backward"}
    return float(found["torch.compile"] / found["neuzip, exact"])


# docs/explanation


def peers_lossless() -> str:
    """Size and speed of lossless forms of bf16, measured side by side."""
    gpu = {(r["row"], r["by"]): r for r in load("gpu_codec")["results"] if "gb_s" in r}
    cpu = load("cpu_codec")
    rows = []
    for name in ("neuzip", "DFloat11 0.5.0", "nvCOMP ANS 6.0.0.12"):
        first, small = gpu[FIRST, name], gpu[SMALL, name]
        encode = gpu.get(("bf16 encode, 235 M weights", name))
        coded = "" if encode is None else f"{encode['gb_s']:,.0f}"
        rows.append((f"{name}, GPU", f"{first['ratio']:.2%}", f"{first['gb_s']:,.0f}",
                     f"{small['gb_s']:,.0f}", coded))  # fmt: skip
    versions = cpu["environment"]["packages"]
    for codec in ("neuzip", "zipnn", "zstd -3"):
        found = {r["case"]: r for r in cpu["results"] if r["codec"] == codec}
        large, real = found["gaussian"], found["wikilm-26m"]
        name = {"zipnn": f"ZipNN {versions['zipnn']}"}.get(codec, codec)
        rows.append((f"{name}, {cpu['threads']} CPU threads", f"{large['ratio']:.2%}",
                     f"{large['decode_gb_s']:.2f}", f"{real['decode_gb_s']:.2f}",
                     f"{large['encode_gb_s']:.2f}"))  # fmt: skip
    return (
        table(("codec", "size", "decode, large", "decode, small", "encode, large"), rows)
        + "\n\nSpeeds are GB/s of bf16 weights. `large` is 235 M random weights on the GPU and 67 M on the "
        "CPU; sizes are those of `large`. `small` is 16 Mi random weights on the GPU, and the trained "
        "checkpoint wikilm-26m on the CPU. GPU speeds are those of kernels alone. "
        + measured_in(codecs.gpu_codec(load("gpu_codec")), codecs.codec(cpu))
    )


def residencies() -> str:
    """A model of Llama-3-8B's shapes in every residency, in short."""
    document = load("generate")
    section = document["sections"]["llama"]
    found = {(r["what"], r["by"]): r for r in section["rows"]}
    rows = []
    for what in ("weights in memory", "decode, batch 1", "decode, batch 32", "prefill"):
        cells = []
        for form in ("packed", "ans"):
            ratio = found[what, form]["ratio"]
            cells.append(f"{ratio:.2f}{'' if what == 'weights in memory' else slower(ratio)}")
        rows.append((what, *cells))
    return (
        table(("relative to bf16", "packed", "ans"), rows)
        + f"\n\nRandom weights in Llama-3-8B's shapes. {card(section['environment'])} "
        + measured_in(generate(document))
    )


def peers_attention() -> str:
    """Speed of quantised attention beside torch's and the released Triton kernel, in one case."""
    document = load("attention")
    section = document["sections"]["kernels"]
    found = {
        r["side"]: r
        for r in section["results"]
        if (r["texts"], r["tokens"], r["width"], r["causal"]) == (1, 32768, 128, True)
    }
    sides = ("ours, 8 bits", "SDPA, cuDNN", "SDPA, flash", "sageattention")
    version = section["environment"]["packages"]["sageattention"]
    return (
        table(
            tuple(map(of_side, sides)), [tuple(f"{found[side]['tops']:,.0f} TOPS" for side in sides)]
        )
        + "\n\nForward pass, 32 heads, 32,768 tokens, head size 128, causal. The times of both quantised "
        f"kernels include smoothing and quantisation. sageattention {version} is its release for Triton. "
        f"{card(section['environment'])} {measured_in(attention(document))}"
    )  # fmt: skip


def group_formats() -> str:
    """A plain format and mantissa bits of nearly the same size, of a strongly trained model."""
    name = "smollm2-135m"
    formats = {r["format"]: r for r in load(f"group_formats-{name}")["results"]}
    plain = formats["6 bits, groups of 64, asymmetric"]
    r = next(r for r in load(f"sweep-{name}")["results"] if r["scheme"] == "k3")
    rows = [
        (
            "6-bit integers, groups of 64, asymmetric",
            f"{plain['bits_per_weight']:.2f}",
            f"{plain['kld']:.2g}",
        ),
        ("3 mantissa bits", f"{r['bits_per_weight']:.2f}", f"{r['kld']['mean']['value']:.2g}"),
    ]
    return (
        table((MODELS_READ[name], "bits per weight", "KLD, nats per token"), rows)
        + f"\n\n{measured_in(weights.group_formats())}"
    )


def accuracy() -> str:
    """Accuracy of quantised attention, as docs/measurements.md has it."""
    return attention_accuracy(load("attention_accuracy-wikilm-26m"), load("attention_accuracy-synthetic"))


BLOCKS: dict[str, Callable[[], str]] = QUOTED | {
    "kernel-rans": kernel_rans, "kernel-ans": kernel_ans, "kernel-packed": kernel_packed,
    "kernel-ternary": kernel_ternary, "kernel-attention": kernel_attention, "kernel-kv": kernel_kv,
    "kernel-loss": kernel_loss, "loss-tiles": loss_tiles, "blocks": blocks_worth,
    "peers-lossless": peers_lossless, "residencies": residencies, "peers-attention": peers_attention,
    "group-formats": group_formats,
}  # fmt: skip
"""What a mark may name."""
