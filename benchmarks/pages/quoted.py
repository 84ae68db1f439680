"""The few numbers that pages of docs/how-to and docs/explanation quote."""

from __future__ import annotations

from collections.abc import Callable

from neuzip.eval.sweep.savings import savings
from pages.attention import cache_option, cache_rows, default_form
from pages.layout import MODELS_READ, is_measured, load, render
from pages.running import serving


def one_more_bit() -> str:
    """A tied embedding at 3 bits and at 4, the rest at 3."""
    section = load("tied_embedding")["sections"]["smollm2-135m"]
    results = {(r["mantissa_bits"], r["more_bits"]): r for r in section["results"]}
    return render("quoted.one_more_bit", section, results[3, None], results[3, 1])


def whole_commands() -> str:
    """Time and peak memory of whole commands."""
    document = load("memory")
    return render("quoted.whole_commands", document, *document["results"])


def durations() -> str:
    """How long lossless compression takes, from the speed that was measured."""
    document = load("memory")
    return render("quoted.durations", document, document["results"][0]["gb_s"])


def delta_sizes() -> str:
    """Deltas after few and many steps."""
    results = {(r["name"], r["steps"]): r for r in load("delta")["results"]}
    shown = (("adamw-master-1e-6", 1), ("adamw-master-1e-6", 100), ("adamw-master-1e-5", 100))
    return render("quoted.delta_sizes", [results[case] for case in shown])


def weight_sync_sizes() -> str:
    """Sizes of sparse deltas after steps of a real training."""
    section = load("weight_sync")["sections"]["bytes"]
    return render("quoted.weight_sync_sizes", section, section["results"])


def in_memory() -> str:
    """Memory and speed of the lossless in-memory formats, as ratios to bf16."""
    sections = load("generate")["sections"]
    whats = ("weights in memory", *DECODED, "prefill")
    rows = [(form, [form_ratios()[what, form] for what in whats]) for form in ("packed", "ans")]
    return render("quoted.in_memory", sections["llama"], sections["serving"], rows)


DECODED = tuple(f"decode, batch {texts}" for texts in (1, 32, 64, 128))
"""Numbers of texts of which pages quote the speed."""


def form_ratios() -> dict[tuple[str, str], float | None]:
    """Memory and speeds of `packed` and `ans` as ratios to bf16; None for what was not measured.

    A prompt and many texts with `packed` were measured with fewer layers, the rest with a whole model.
    """
    document = load("generate")
    rows = {(r["what"], r["by"]): r for r in document["sections"]["llama"]["results"]} | serving(document)
    whats = ("weights in memory", *DECODED, "prefill")
    return {
        (what, form): rows[what, form]["ratio"] if (what, form) in rows else None
        for what in whats for form in ("packed", "ans")
    }  # fmt: skip


def gpu_memory() -> str:
    """What the weights of a model of 8 billion take on a GPU, and one of 70 billion would."""
    section = load("generate")["sections"]["llama"]
    sizes = {r["by"]: r["value"] for r in section["results"] if r["what"] == "weights in memory"}
    return render("quoted.gpu_memory", [sizes[by] for by in ("bf16", "packed", "ans", "rounded")])


def ternary_loss() -> str:
    """What ternary weights cost without training."""
    steps = {r["step"]: r for r in load("ternary-conversion-demo")["results"] if not r["rotated"]}
    rounded = next(r for r in load("sweep-demo")["results"] if r["scheme"] == "k0")
    plain, best = steps["absmean, a scale a tensor"], steps["error-feedback, a scale a row"]
    return render("quoted.ternary_loss", plain, best, rounded)


def ternary_speed() -> str:
    """Decoding of a ternary model."""
    document = load("bitnet")
    ratio = {r["by"]: r["ratio"] for r in document["results"] if r["what"] == "decode, batch 1"}
    return render("quoted.ternary_speed", document, ratio)


def recovered() -> str:
    """How near minutes of training bring a ternary model to its original."""
    stages = load("recovery")["sections"]
    return render("quoted.recovered", stages["b158"], stages["a48"])


def kv_loss() -> str:
    """What a quantised KV cache costs two models."""
    demo, strong = (cache_rows(load(f"kv_cache-{name}")) for name in ("demo", "smollm2-135m"))
    form = default_form(strong)
    rows = [
        (cache_option(bits, form), demo.get((bits, form), demo[bits, "a4.8"]), strong[bits, form])
        for bits in (8, 4, 3)
    ]
    return render("quoted.kv_loss", rows, strong[16, None])


def training_costs() -> str:
    """Memory and speed of training on compressed weights."""
    section = load("train_memory")["sections"]["llama-3-8b"]
    rows = {(r["method"], r["tokens"]): r for r in section["results"]}
    ratios = [
        rows["ours", tokens]["tokens_per_second"] / rows["lomo", tokens]["tokens_per_second"]
        for tokens in (1024, 8192)
    ]
    methods = [rows[method, 1024] for method in ("ours", "lomo", "vanilla")]
    return render("quoted.training_costs", section, *methods, *ratios)


def rounded_or_quantised() -> str:
    """What quantised weights take at the divergence of rounded mantissas, for each model swept with both."""
    rows = []
    for name, model in MODELS_READ.items():
        if not is_measured(f"sweep-{name}"):
            continue
        results = load(f"sweep-{name}")["results"]
        points = [(r["scheme"], r["bits_per_weight"], r["kld"]["mean"]["value"]) for r in results]
        curve = [point for point, r in zip(points, results, strict=True) if r.get("kind") == "quantized"]
        rounded = [point for point in points if point[0] in ("k3", "k2", "k1")]
        rows += [
            (model, one.yardstick[1:], one.kld, one.bits, one.quantized_bits)
            for one in savings(curve, rounded) if one.quantized_bits is not None
        ]  # fmt: skip
    return render("quoted.rounded_or_quantised", rows)


def nats() -> str:
    """What a mean KL divergence meant for a strongly trained model."""
    results = {r["scheme"]: r for r in load("sweep-smollm2-135m")["results"]}
    return render("quoted.nats", [(bits, results[f"k{bits}"]) for bits in (5, 4, 3, 2)])


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__.replace("_", "-"): block
    for block in (
        one_more_bit, whole_commands, durations, delta_sizes, weight_sync_sizes, in_memory, gpu_memory,
        ternary_loss, ternary_speed, recovered, kv_loss, training_costs, rounded_or_quantised, nats,
    )
}  # fmt: skip
"""What a mark may name."""
