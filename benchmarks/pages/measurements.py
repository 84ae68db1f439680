"""The page docs/measurements.md: its topics and all of its tables."""

from __future__ import annotations

from typing import Any

from pages.attention import attention, attention_accuracy, kv_attention, kv_cache
from pages.codecs import codec, gpu_codec, memory
from pages.layout import anchor, is_measured, load, measured, title_of
from pages.reliability import faults
from pages.running import generate, packed_linear
from pages.ternary import bitnet, recovery, ternary_conversion, ternary_linear
from pages.training import layers, linear_cross_entropy, mix_ln, train_memory
from pages.weights import delta, group_formats, plans, sweep, tied_embedding


def measurements() -> str:
    """All tables as docs/measurements.md has them: a list of contents, then a heading for each topic."""
    contents, sections = [], []
    for topic, told, tables in topics():
        contents.append(f"* [{topic}](#{anchor(topic)})")
        contents += [f"  * [{title_of(part)}](#{anchor(title_of(part))})" for part in tables]
        sections += [f"## {topic}", told, *tables]
    return "\n".join(contents) + "\n\n" + "\n\n".join(sections)


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


def measured_of(kind: str) -> dict[str, dict[str, Any]]:
    """Results of one script by model, of those models that it was run on and pages show."""
    names = ("demo", "smollm2-135m")
    return {name: load(f"{kind}-{name}") for name in names if is_measured(f"{kind}-{name}")}
