"""Every example in a docstring of the package does what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from neuzip.distribution import ENGINES

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


def engine_of(name: str) -> str | None:
    """The engine whose folder a module lies in: "vllm" for neuzip.runtime.vllm.loader."""
    parts = name.split(".")
    return parts[2] if parts[1:2] == ["runtime"] and parts[2:] and parts[2] in ENGINES else None


@pytest.mark.parametrize("name", modules())
def test_examples(name: str):
    if name.endswith(".triton"):
        pytest.importorskip("triton")
    if name == "neuzip.eval.harness":
        pytest.importorskip("lm_eval")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (engine := engine_of(name)) is None or error.name != engine:
            raise
        pytest.skip(f"imports {engine}, which is not installed")
    # To find that there are none takes doctest a while.
    if ">>> " in Path(module.__file__ or "").read_text(encoding="utf-8"):
        failed, _ = doctest.testmod(module)
        assert failed == 0
