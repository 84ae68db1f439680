"""Every example in a docstring of the package does what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("neuzip", "cli", "compress", "eval", "formats", "kernels", "runtime", "train")


def modules() -> list[str]:
    names = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            names.append(".".join(parts if room == "neuzip" else ("neuzip", *parts)))
    return names


@pytest.mark.parametrize("name", modules())
def test_examples(name: str):
    if name.endswith(".triton"):
        pytest.importorskip("triton")
    if name == "neuzip.eval.harness":
        pytest.importorskip("lm_eval")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
