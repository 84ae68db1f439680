"""The few numbers that pages of docs/how-to and docs/explanation quote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pages.layout import load, table


def gpu(section: dict[str, Any]) -> str:
    """The name of the GPU that a section was measured on."""
    return str(section["environment"]["gpu"]["name"])


def one_more_bit() -> str:
    """A tied embedding at 3 bits and at 4, the rest at 3."""
    section = load("tied_embedding")["sections"]["smollm2-135m"]
    found = {(r["mantissa_bits"], r["more_bits"]): r for r in section["results"]}
    before, after = found[3, None], found[3, 1]
    return (
        f"On SmolLM2-135M, whose tied embedding is {section['embedding_share']:.0%} of the weights, the "
        f"extra bit lowers the mean KL divergence from {before['kld']:.3f} to {after['kld']:.3f} nats per "
        f"token. The weight files grow from {before['ratio']:.1%} to {after['ratio']:.1%} of the bf16 size."
    )


def whole_commands() -> str:
    """Time and peak memory of whole commands."""
    document = load("memory")
    compress, decompress = document["results"]
    return (
        f"On {document['environment']['cores']} CPU cores, `compress` took {compress['seconds']:.0f} s and "
        f"{compress['peak_gb']:.2f} GB of memory for a checkpoint of {document['checkpoint_gb']:.1f} GB, "
        f"verification included. The largest tensor had {document['largest_tensor_gb']:.2f} GB. `decompress` "
        f"took {decompress['seconds']:.0f} s and {decompress['peak_gb']:.2f} GB of memory."
    )


def durations() -> str:
    """How long lossless compression takes, from the speed that was measured."""
    document = load("memory")
    speed = document["results"][0]["gb_s"]
    rows = []
    for billions in (1, 8, 70):
        seconds = 2 * billions / speed
        told = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
        rows.append((f"{billions} B weights in bf16, {2 * billions} GB", told))
    return (
        table(("model", f"`compress` without loss, {document['environment']['cores']} CPU cores"), rows)
        + f"\n\nThe times are estimates from {speed:.2f} GB/s, which was measured with verification. "
        "They assume a disk that is fast enough."
    )


def delta_sizes() -> str:
    """Deltas after few and many steps."""
    found = {(r["name"], r["steps"]): r for r in load("delta")["results"]}
    rows = []
    for name, steps in (("adamw-master-1e-6", 1), ("adamw-master-1e-6", 100), ("adamw-master-1e-5", 100)):
        r = found[name, steps]
        whole = r["weight_bytes"]
        rows.append((
            f"{steps} step{'s' * (steps > 1)} of AdamW, learning rate {r['learning_rate']:g}",
            f"{r['changed_share']:.0%}", f"{r['delta_bytes'] / whole:.1%}",
            f"{r['container_bytes'] / whole:.1%}",
        ))  # fmt: skip
    heads = (
        "wikilm-26m, fine-tuned for",
        "weights changed",
        "size as a delta",
        "size compressed without a base",
    )
    return table(heads, rows)


def in_memory() -> str:
    """Memory and speed of the lossless in-memory formats, as ratios to bf16."""
    section = load("generate")["sections"]["llama"]
    ratio = {(r["what"], r["by"]): r.get("ratio", 1) for r in section["rows"]}
    columns = ("weights in memory", "decode, batch 1", "decode, batch 32", "prefill")
    rows = [(f"`{form}`", *(f"{ratio[what, form]:.2f}" for what in columns)) for form in ("packed", "ans")]
    heads = ("format", "weight memory", "decoding speed, batch 1", "decoding speed, batch 32", "prompt speed")
    return (
        "This table compares both formats with bf16 in transformers (1.00). The model has Llama-3-8B's "
        f"shapes and random weights, and the GPU is an {gpu(section)}:\n\n" + table(heads, rows)
    )


def gpu_memory() -> str:
    """What the weights of a model of 8 billion take on a GPU, and one of 70 billion would."""
    section = load("generate")["sections"]["llama"]
    found = {r["by"]: r["value"] for r in section["rows"] if r["what"] == "weights in memory"}
    rows = []
    for what, factor, digits in (
        ("Llama-3-8B's shapes, measured", 1, 1),
        ("70 B weights, estimated from these", 140 / found["bf16"], 0),
    ):
        sizes = (found[by] * factor for by in ("bf16", "packed", "ans", "rounded"))
        rows.append((what, *(f"{size:.{digits}f} GB" for size in sizes)))
    return table(("weights", "`dense`", "`packed`", "`ans`", "3 mantissa bits, `packed`"), rows)


def ternary_loss() -> str:
    """What ternary weights cost without training."""
    found = {r["step"]: r for r in load("ternary-conversion-demo")["results"] if not r["rotated"]}
    plain, best = found["absmean, a scale a tensor"], found["error-feedback, a scale a row"]
    rounded = next(r for r in load("sweep-demo")["results"] if r["scheme"] == "k0")
    return (
        f"On the demo, plain rounding raises the perplexity from {plain['original']:.1f} to "
        f"{plain['perplexity']:,.0f}. `ternarize` reaches {best['perplexity']:.1f}, with a mean KL "
        f"divergence of {best['kld']:.2f} nats per token at {best['bits']:.2f} bits per ternary weight. For "
        f"comparison, `--mantissa-bits 0` costs {rounded['kld']['mean']['value']:.2f} nats per token at "
        f"{rounded['ratio']:.0%} of the bf16 size."
    )


def ternary_speed() -> str:
    """Decoding of a ternary model."""
    document = load("bitnet")
    ratio = {r["by"]: r["ratio"] for r in document["rows"] if r["what"] == "decode, batch 1"}
    return (
        "A model of BitNet a4.8's 3B shapes with random weights was measured at batch 1 on an "
        f"{gpu(document)}. With `b1.58` it decodes {ratio['b1.58']:.1f} times as fast as a bf16 model of the "
        f"same shapes. With `a4.8` and `--kv-bits 3` it decodes {ratio['a4.8, 3-bit KV']:.1f} times as fast."
    )


def recovered() -> str:
    """How near minutes of training bring a ternary model to its original."""
    stages = load("recovery")["sections"]
    first, second = stages["b158"], stages["a48"]
    return (
        f"On wikilm-26m (26 M weights), {first['minutes']:.0f} minutes on an {gpu(first)} lowered the "
        f"perplexity from {first['before']['ratio']:.2f} to {first['after']['ratio']:.3f} times the "
        f"original's. {second['minutes']:.0f} more minutes with 4-bit activations gave "
        f"{second['after']['ratio']:.3f} times the original's. The test text was not in the training data."
    )


def kv_loss() -> str:
    """What a quantised KV cache costs two models."""
    demo, strong = (
        {(r["bits"], r["span"]): r for r in load(f"kv_cache-{name}")["results"]}
        for name in ("demo", "smollm2-135m")
    )
    base = strong[16, None]["perplexity"]
    rows = [
        (
            f"`--kv-bits {bits}`", f"{demo[bits, 'absmax']['kld']:.2g}",
            f"{strong[bits, 'absmax']['kld']:.2g}",
            f"{strong[bits, 'absmax']['perplexity'] / base - 1:+.1%}",
        )
        for bits in (8, 4, 3)
    ]  # fmt: skip
    heads = ("KV cache", "KLD, demo", "KLD, SmolLM2-135M", "perplexity, SmolLM2-135M")
    return (
        "This table shows the mean KL divergence (KLD) in nats per token for two models. SmolLM2-135M was "
        "trained on far more text than the demo:\n\n" + table(heads, rows)
    )


def training_costs() -> str:
    """Memory and speed of training on compressed weights."""
    section = load("train_memory")["sections"]["llama-3-8b"]
    found = {(r["method"], r["tokens"]): r for r in section["rows"]}
    ours, plain, vanilla = (found[method, 1024]["peak_gib"] for method in ("ours", "lomo", "vanilla"))
    few, many = (
        found["ours", tokens]["tokens_per_second"] / found["lomo", tokens]["tokens_per_second"]
        for tokens in (1024, 8192)
    )
    return (
        f"For Llama-3-8B's shapes with random weights and SGD, peak memory is {ours:.1f} GiB on an "
        f"{gpu(section)}. The same trainer with plain weights needs {plain:.1f} GiB, and an ordinary "
        f"training loop {vanilla:.1f} GiB. The speed is {few:.2f} times that of plain weights with 1,024 "
        f"tokens per step, and {many:.2f} times with 8,192."
    )


def nats() -> str:
    """What a mean KL divergence meant for a strongly trained model."""
    found = {r["scheme"]: r for r in load("sweep-smollm2-135m")["results"]}
    rows = []
    for bits in (5, 4, 3, 2):
        r = found[f"k{bits}"]
        kld, ratio, same = r["kld"]["mean"]["value"], r["perplexity_ratio"]["value"], r["top_1"]["value"]
        rows.append((f"{bits} mantissa bits", f"{kld:.2g}", f"{ratio - 1:+.1%}", f"{same:.0%}"))
    heads = ("SmolLM2-135M with", "mean KL divergence, nats per token", "perplexity", "top-1 agreement")
    return table(heads, rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "one-more-bit": one_more_bit, "whole-commands": whole_commands, "durations": durations,
    "delta-sizes": delta_sizes, "in-memory": in_memory, "gpu-memory": gpu_memory,
    "ternary-loss": ternary_loss, "ternary-speed": ternary_speed, "recovered": recovered, "kv-loss": kv_loss,
    "training-costs": training_costs, "nats": nats,
}  # fmt: skip
"""What a mark may name."""
