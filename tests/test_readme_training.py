"""What the README says of training and of layers: the figures, their aims, and what was missed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CARD = {
    "python": "3", "packages": {"torch": "2", "neuzip-toolkit": "0"}, "commit": "abc",
    "gpu": {"name": "a card", "driver": "1.2"},
}  # fmt: skip


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "readme.py"
    spec = importlib.util.spec_from_file_location("readme", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each line of a table, by those of its first column and, if that is repeated, the next."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[cells[0] if cells[0] not in found else " ".join(cells[:3])] = cells[1:]
    return found


def step(model: str, method: str, tokens: int, peak: float | None, speed: float) -> dict[str, Any]:
    return {
        "model": model, "method": method, "tokens": tokens, "peak_gib": peak, "tokens_per_second": speed
    }  # fmt: skip


def test_memory_and_speed_stand_beside_their_aims(readme: ModuleType) -> None:
    llama = [
        step("llama-3-8b", "ours", 1024, 14.0, 700.0), step("llama-3-8b", "ours", 8192, 30.0, 870.0),
        step("llama-3-8b", "lomo", 1024, 19.5, 1000.0), step("llama-3-8b", "lomo", 8192, 40.0, 1000.0),
        step("llama-3-8b", "vanilla", 1024, None, float("nan")),
    ]  # fmt: skip
    document = {
        "sections": {
            "llama-3-8b": {"rows": llama, "paper_gib": {"ours": 15.25}, "environment": CARD},
            "adamw": {
                "rows": [step("llama-3-8b", "ours, adamw8bit", 1024, 31.0, 500.0)], "paper_gib": None,
                "environment": CARD,
            },
            "bits": {
                "rows": [
                    {"optimizer": "sgd", "steps": 50, "losses_equal": True, "weights_equal": True},
                    {"optimizer": "adamw8bit", "steps": 50, "losses_equal": True, "weights_equal": False},
                ], "paper_gib": None, "environment": CARD,
            },
            "two-gpus": {
                "rows": [
                    {"processes": 2, "tokens": 16384, "tokens_per_second": 9e3, "equal_on_all": True}
                ], "paper_gib": None, "environment": CARD,
            },
        }
    }  # fmt: skip
    text = readme.train_memory(document)
    lines = [line for line in text.splitlines() if line.startswith("| Llama")]
    assert lines == [
        "| Llama-3-8B | 1,024 | ours | 14.00 (aim 15.25 / 12.5) | 15.25 | 700 | 0.70 (aim 0.65 / 0.8) |",
        "| Llama-3-8B | 8,192 | ours | 30.00 |  | 870 | 0.87 (aim 0.88 / 0.95, **missed**) |",
        "| Llama-3-8B | 1,024 | LOMO, our code | 19.50 |  | 1,000 |  |",
        "| Llama-3-8B | 8,192 | LOMO, our code | 40.00 |  | 1,000 |  |",
        "| Llama-3-8B | 1,024 | vanilla | does not fit |  |  |  |",
        "| Llama-3-8B | 1,024 | ours, AdamW in 8 bits | 31.00 (aim 48 / 32, stretch reached) |  | 500 |  |",
    ]
    assert "50 steps of sgd, compressed and not: losses and weights have the same bits." in text
    assert "50 steps of adamw8bit, compressed and not: losses and weights **differ**." in text
    assert "2 GPUs, 16,384 tokens a step together: 9,000 tokens/s, the same losses and weights" in text
    assert text.count("a card, driver 1.2") == 1
    assert "two" not in readme.train_memory({"sections": {"bits": document["sections"]["bits"]}})


def test_recovery_stage_by_stage(readme: ModuleType) -> None:
    after = {
        "original": 96.25, "perplexity": 110.0, "ratio": 1.143, "ratio_error": 0.004, "kld": 0.2, "top_1": 0.7
    }  # fmt: skip
    first = {
        "environment": CARD, "checkpoint": "wikilm-26m", "train": ["a.gz", "b.txt"], "test": "wiki.test.raw",
        "tokens_compared": 1000, "minutes": 20.0, "tokens": 5e7, "epochs": 3.2, "after": after,
        "before": {"perplexity": 12345.6},
    }  # fmt: skip
    second = first | {"minutes": 5.0, "ratio_to_b158": 1.031, "after": after | {"ratio_error": None}}
    text = readme.recovery({"sections": {"b158": first, "a48": second}})
    found = rows_of(text)
    assert found["b1.58, inputs in 8 bits"] == [
        "20", "50.0 M, 3.2 epochs", "12,345.60", "110.00", "1.143 ± 0.004 (aim 1.25 / 1.1)", "", "0.200",
        "70.0%",
    ]  # fmt: skip
    assert found["then a4.8, inputs in 4 bits"][4:6] == ["1.143", "1.031 (aim 1.03 / 1.015, **missed**)"]
    assert "recovery-a48.svg" in text
    assert "a4.8" not in readme.recovery({"sections": {"b158": first}})


def placement(name: str, text: str, against: dict[str, float | None] | None) -> dict[str, Any]:
    return {
        "placement": name, "text": text, "perplexities": [30.0, 31.0, 32.0], "mean": 31.0, "spread": 1.0,
        "against_pre": against,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-3.0, -1.0, "Mix-LN is better than Pre-LN, beyond the seeds' spread"),
        (-3.0, 1.0, "**Mix-LN and Pre-LN are not told apart**"),
        (1.0, 3.0, "**Mix-LN is worse than Pre-LN here**"),
        (None, None, "too few seeds to tell"),
    ],
)
def test_the_verdict_on_mix_ln(readme: ModuleType, low: float | None, high: float | None, said: str) -> None:
    against = {"percent": -2.0, "low": low, "high": high}
    rows = [
        row
        for text in ("held-out documents", "wiki.test.raw")
        for row in (placement("pre", text, None), placement("mix", text, against))
    ]
    text = readme.mix_ln(
        {
            "settings": {"size": "71M", "steps": 2000, "batch": 32, "text": "mix.gz"}, "parameters": 46e6,
            "environment": CARD, "results": rows,
            "failed": [{"placement": "post", "seed": 1, "failed": "x"}],
        }
    )  # fmt: skip
    assert said in text
    found = rows_of(text)
    change = "-2.00 %" + ("" if low is None else f" ({low:+.2f} to {high:+.2f})")
    assert found["Mix-LN"] == ["31.00 ± 1.00", change] * 2
    assert found["Pre-LN"] == ["31.00 ± 1.00", ""] * 2
    assert found["Post-LN"][0] == "diverged"


def test_a_layer_that_nothing_is_left_without(readme: ModuleType) -> None:
    def of(value: float, error: float | None = 0.1) -> dict[str, float | None]:
        return {"value": value, "standard_error": error}

    without = {
        "base_nll": of(1.0), "other_nll": of(2.0), "perplexity_ratio": of(2.71828), "kld": {"mean": of(0.5)}
    }  # fmt: skip
    layer = {"angular_distance": of(0.25), "block_influence": of(0.125), "gradient_norm": None}
    text = readme.layers(
        {
            "src": "/somewhere/a-model", "text": "/somewhere/wiki.test.raw", "tokens": 65536, "window": 1024,
            "blocks": "74 windows", "gradient_windows": 8, "device": "a card", "dtype": "bfloat16",
            "versions": {"python": "3", "torch": "2"}, "rank_correlations": {"depth": 0.5, "gradient": None},
            "layers": [
                {**layer, "number": 0, "without": without},
                {**layer, "number": 1, "without": None, "gradient_norm": of(3.0, None)},
            ],
        }
    )  # fmt: skip
    found = rows_of(text)
    assert {len(cells) for cells in found.values()} == {6}
    assert found["0"] == [
        "0.250 ± 0.196", "0.1250 ± 0.1960", "7.39", "2.72 ± 0.20", "0.500 ± 0.196", ""
    ]  # fmt: skip
    assert found["1"][2:] == ["not finite", "", "", "3.00"]
    assert "the whole model has perplexity 2.72" in text and "how early it comes 0.50" in text
    assert "somewhere" not in text
