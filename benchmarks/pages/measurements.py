"""The page docs/measurements.md: its topics and all of its tables."""

from __future__ import annotations

import re

from pages import quantised
from pages.attention import (
    attention,
    attention_accuracy,
    kv_attention,
    kv_cache,
    kv_forms,
    kv_positions,
)
from pages.codecs import codec, gpu_codec, memory
from pages.layout import Document, anchor, is_measured, load, measured, render
from pages.reliability import faults
from pages.running import cold_start, experts, generate, packed_linear, vllm
from pages.ternary import bitnet, recovery, recovery_curve, ternary_conversion, ternary_linear
from pages.training import layers, linear_cross_entropy, mix_ln, train_memory
from pages.weights import (
    delta,
    expert_use,
    plans,
    quantisation,
    sweep,
    tied_embedding,
    weight_sync,
    yardsticks,
)


def measurements() -> str:
    """All tables as docs/measurements.md has them: a list of contents, then a heading for each topic."""
    page = render("measurements.topics", **{topic: "\n\n".join(found) for topic, found in topics().items()})
    contents = [
        f"{'  ' * (level == '###')}* [{title}](#{anchor(title)})"
        for level, title in re.findall(r"^(###?) (.+)", page, re.MULTILINE)
    ]
    return "\n".join(contents) + "\n\n" + page


def figures() -> str:
    """All tables as Markdown."""
    return "\n\n".join(parts())


def parts() -> list[str]:
    """All tables that have been measured."""
    return [part for tables in topics().values() for part in tables]


def topics() -> dict[str, list[str]]:
    """The tables of each topic of templates/measurements.md.j2, as far as they have been measured."""
    conversion = [f"ternary-conversion-{name}" for name in CONVERTED]
    accuracy = ("attention_accuracy-wikilm-26m", "attention_accuracy-synthetic")
    return {
        "weights": measured(
            (("sweep-demo",), sweep), (("sweep-demo",), plans),
            (("sweep-demo",), lambda *_: yardsticks()), (("quantisation",), quantisation),
            (("max_kld",), quantised.limits), (("plan_time",), quantised.plan_time),
            (("code_rates",), quantised.code_rates),
            (("tied_embedding",), tied_embedding), (("expert_use",), expert_use),
            (("delta",), delta), (("weight_sync",), weight_sync),
        ),
        "codecs": measured(
            (("cpu_codec",), codec), (("gpu_codec",), gpu_codec), (("quantized_decode",), quantised.decode),
            (("memory",), memory),
        ),
        "running": measured(
            (("packed_linear",), packed_linear), (("grid_linear",), quantised.products),
            (("generate",), generate), (("quantized_generation",), quantised.generation),
            (("serve_vllm",), vllm),
            (("experts",), experts), (("cold_start",), cold_start),
        ),
        "ternary": measured(
            (conversion, lambda *found: ternary_conversion(dict(zip(CONVERTED, found, strict=True)))),
            (("recovery",), recovery), (("recovery-smollm2-135m",), recovery_curve),
            (("ternary_linear",), ternary_linear), (("bitnet",), bitnet),
        ),
        "attention": [
            *([kv_cache(models)] if (models := cached_models()) else []),
            *([kv_positions(long)] if (long := cached("-long")) else []),
            *([kv_forms(forms)] if (forms := cached("-forms")) else []),
            *measured(
                (("kv_attention",), kv_attention), (("attention",), attention),
                (accuracy, attention_accuracy),
            ),
        ],
        "training": measured(
            (("linear_cross_entropy",), linear_cross_entropy), (("train_memory",), train_memory),
            (("mix_ln-once",), mix_ln), (("mix_ln",), mix_ln), (("layers-wikilm-26m",), layers),
        ),
        "reliability": measured((("faults",), faults)),
    }  # fmt: skip


CONVERTED = ("demo", "wikilm-26m")
"""Models that were converted to ternary weights without training."""


def cached(ending: str) -> dict[str, Document]:
    """Results of quantised KV caches whose names have an ending, by model."""
    names = {name: f"kv_cache-{name}{ending}" for name in ("smollm2-135m", "wikilm-26m")}
    return {name: load(result) for name, result in names.items() if is_measured(result)}


def cached_models() -> dict[str, Document]:
    """Results of quantised KV caches by model, of those models that pages show."""
    models = ("smollm2-135m", "wikilm-26m")
    names = (*(name + kind for name in models for kind in ("", "-auto")), "wikilm-26m-ternary", "demo")
    return {name: load(f"kv_cache-{name}") for name in names if is_measured(f"kv_cache-{name}")}
