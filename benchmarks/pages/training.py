"""Tables of losses of heads, training memory, norm placements and layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages.layout import (
    gpu_machine,
    is_measured,
    load,
    machine,
    machines_of,
    missed,
    section,
    slower,
    table,
    with_aim,
    within,
)


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
