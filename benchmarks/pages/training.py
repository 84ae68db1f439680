"""Tables of losses of heads, training memory, norm placements and layers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from pages.layout import Document, is_measured, load, render, row, slower, with_aim

Row = dict[str, Any]


def linear_cross_entropy(document: Document) -> str:
    """The loss of a head without logits, and everything else that is had so, beside its peers."""
    sections = document["sections"]
    packages = next(iter(sections.values()))["environment"]["packages"]
    peers = (f"{name} {v}" for name, v in packages.items() if name.endswith(("entropy", "kernel")))
    no_targets = {"must_ms": None, "must_mb": None}
    rows = [
        (name, part, [(no_targets | r, slower_loss(r, part["results"]), tiles_kept(r, part))
                      for r in part["results"]])
        for name, part in sections.items()
    ]  # fmt: skip
    return render("training.linear_cross_entropy", document, ", ".join(peers), rows)


def tiles_kept(row: Row, section: Document) -> float | None:
    """The share of the tiles that our backward pass computes; None where there is none."""
    if "backward" not in row["row"] or not row["by"].startswith("neuzip"):
        return None
    if row["by"].endswith("exact"):
        return 1.0
    share: float = section["kept_tiles"]["sorted" if row["by"].endswith("sorted") else "vocabulary"]
    return share


def slower_loss(row: Row, results: list[Row]) -> str:
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


def train_memory(document: Document) -> str:
    """Peak memory and speed of training on compressed weights, beside LOMO and vanilla."""
    sections = document["sections"]
    rows = [
        training_line(name, r, sections[name])
        for name in (*MODELS, "adamw") if name in sections
        for r in sections[name]["results"]
    ]  # fmt: skip
    repeated = [sections.get(name, {"results": []})["results"] for name in ("bits", "resume", "two-gpus")]
    return render("training.train_memory", document, rows, *repeated)


def training_line(name: str, r: Row, section: Document) -> str:
    """A method at a number of tokens, with its aims."""
    method, tokens = r["method"], r["tokens"]
    paper = (section["paper_gib"] or {}).get(method) if tokens == 1024 else None
    peak, speed, against_lomo = "does not fit", "", ""
    if r["peak_gib"] is not None:
        has_aim = method in ("ours", "ours, adamw8bit") and tokens == 1024
        aim = with_aim(r["peak_gib"], MEMORY_AIMS[name], most=True) if has_aim else ""
        peak, speed = f"{r['peak_gib']:.2f}{aim}", f"{r['tokens_per_second']:,.0f}"
        against_lomo = speed_against_lomo(name, r, section["results"])
    same = r.get("steps_as_the_peer")
    return row(
        MODELS.get(r["model"], r["model"]), f"{tokens:,}", METHODS.get(method, method), peak,
        "" if paper is None else f"{paper:.2f}", speed, against_lomo,
        "" if same is None else f"{same} of {len(r['losses'])}",
    )  # fmt: skip


def speed_against_lomo(name: str, r: Row, rows: list[Row]) -> str:
    """Our speed as a multiple of LOMO's with as many tokens; empty if LOMO did not run."""
    lomo = "lomo, deterministic" if r["method"].endswith("deterministic") else "lomo"
    peer = next((p for p in rows if (p["method"], p["tokens"]) == (lomo, r["tokens"])), None)
    if peer is None or peer["peak_gib"] is None or not r["method"].startswith("ours"):
        return ""
    ratio = r["tokens_per_second"] / peer["tokens_per_second"]
    has_aim = name == "llama-3-8b" and r["method"] == "ours"
    aim = with_aim(ratio, SPEED_AIMS[r["tokens"]], most=False) if has_aim else ""
    return f"{ratio:.2f}{aim}{slower(ratio)}"


PLACEMENTS = {"pre": "Pre-LN", "post": "Post-LN", "mix": "Mix-LN", "layernorm-scaling": "LayerNorm scaling",
              "sandwich": "Sandwich-LN", "peri": "Peri-LN", "deepnorm": "DeepNorm"}  # fmt: skip

WINDOW = 256
"""Tokens of a window of benchmarks/mix_ln.py."""


def mix_ln(document: Document) -> str:
    """Norm placements at equal tokens, and whether Mix-LN is better than Pre-LN beyond the seeds' spread."""
    settings, results, failed = document["settings"], document["results"], document["failed"]
    texts = list(dict.fromkeys(r["text"] for r in results))
    by_placement: dict[str, dict[str, Row]] = {}
    for r in results:
        by_placement.setdefault(r["placement"], {})[r["text"]] = r
    rows = [
        (PLACEMENTS[name], sum(f["placement"] == name for f in failed), [by_text.get(text) for text in texts])
        for name, by_text in by_placement.items()
    ]
    return render(
        "training.mix_ln",
        document,
        texts=texts,
        rows=rows,
        diverged=[PLACEMENTS[name] for name in sorted({f["placement"] for f in failed} - set(by_placement))],
        seen=settings["steps"] * settings["batch"] * WINDOW / settings["tokens"],
        seeds=max(len(r["perplexities"]) for r in results),
        mix=by_placement.get("mix", {}).get(texts[0], {}).get("against_pre"),
        losses=training_losses(document["runs"]),
        scaled=scaled_embedding(),
    )


def training_losses(runs: list[Row]) -> dict[str, float]:
    """By placement the mean of the losses at the end of training, of what was trained on."""
    return {
        title: statistics.fmean(losses)
        for name, title in PLACEMENTS.items()
        if (losses := [one["loss"][-1][1] for one in runs if one["placement"] == name])
    }


def scaled_embedding() -> list[Row]:
    """Mix-LN against Pre-LN with the embedding as it is and scaled: the control of the paper's Table 8."""
    names = ("mix_ln-small", "mix_ln-small-scaled")
    models = []
    for document in map(load, names) if all(map(is_measured, names)) else ():
        means = {r["placement"]: r["mean"] for r in document["results"] if r["text"] == "held-out documents"}
        models.append({"document": document, "pre": means["pre"], "mix": means["mix"]})
    return models


RANKS = {
    "angular_distance": "angular distance", "block_influence": "block influence",
    "gradient_norm": "gradient norm", "depth": "earlier position",
}  # fmt: skip


def layers(document: Document) -> str:
    """What each layer of wikilm-26m is worth, as `neuzip layers --json` says."""
    model, text = Path(document["src"]).name, Path(document["text"]).name
    nll = next((r["without"]["base_nll"]["value"] for r in document["layers"] if r["without"]), None)
    ranks = {name: document["rank_correlations"].get(key) for key, name in RANKS.items()}
    correlations = {name: rank for name, rank in ranks.items() if rank is not None}
    return render("training.layers", document, model, text, nll, correlations)
