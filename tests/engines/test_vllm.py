"""vLLM in this process takes the tokens of the original folder from every form of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_engine import (
    NEW,
    TEXTS,
    assert_chosen_or_tied,
    greedy,
    logits,
    packed_bytes,
    residency,
    start,
    started,
)
from vllm_models import DEMO, compressed, untied

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("caches")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models, each as it was, compressed, and compressed in files of 200 kB."""
    root = tmp_path_factory.mktemp("models")
    made = {"tied": DEMO, "untied": untied(root / "untied"), "files": untied(root / "files", shard="200KB")}
    assert len([*made["files"].glob("*.safetensors")]) > 2
    for name, folder in [*made.items()]:
        made[f"{name}.nz"] = compressed(folder, root / f"{name}.nz")
    return made


@pytest.fixture(scope="module")
def originals(folders: dict[str, Path], say: Any) -> Iterator[dict[str, Any]]:
    """vLLM on both models as they were: these judge the tokens of all others."""
    say("vLLM starts on the two originals")
    engines = {name: start(folders[name]) for name in ("untied", "tied")}
    yield engines
    engines.clear()


def test_the_originals_take_different_tokens(originals: dict[str, Any]):
    for engine in originals.values():
        first = greedy(engine)
        assert first == greedy(engine)
        assert len({*map(tuple, first)}) == len(TEXTS)
        assert max(len({*tokens}) for tokens in first) > NEW // 3  # not one token again and again


def test_a_wrong_token_is_no_tie(originals: dict[str, Any]):
    wrong = greedy(originals["untied"])
    wrong[1][3] = (wrong[1][3] + 1) % 250
    with pytest.raises(AssertionError, match="below"):
        assert_chosen_or_tied(originals["untied"], wrong)


# What a folder is, vLLM's options for it, and whether the bits of all logits are the original's.
DENSE: dict[str, Any] = {}
FORMS = {
    "dense": ("untied.nz", DENSE, True),
    "dense, tied": ("tied.nz", DENSE, True),
    "dense, several files": ("files.nz", DENSE, True),
    "packed": ("untied.nz", residency("packed"), False),
    "packed, tied": ("tied.nz", residency("packed"), False),
    "packed, several files": ("files.nz", residency("packed"), False),
    "packed on arrival": ("untied", {"quantization": "neuzip"}, False),
    "packed on arrival, tied": ("tied", {"quantization": "neuzip"}, False),
    "exact": ("untied.nz", residency("packed", exact=True), True),
    "exact, tied": ("tied.nz", residency("packed", exact=True), True),
}

PACKED = {"untied": 1.0, "tied": 0.548}
"""The share of weights that are packed: of matrices, fused as vLLM has them, with 65,536 or more."""


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_the_original(
    form: str, folders: dict[str, Path], originals: dict[str, Any], say: Any
):
    name, options, is_exact = FORMS[form]
    model = "tied" if name.startswith("tied") else "untied"
    original = originals[model]
    say(f"vLLM starts: {form}")
    with started(folders[name], **options) as engine:
        tokens = greedy(engine)
        share = packed_bytes(engine) / weight_bytes(folders[name.removesuffix(".nz")])
        values = logits(engine, tokens=NEW) if is_exact else None
    del engine  # before anything is asserted: a failure would keep it, and its end would disturb the next one
    if is_exact:
        assert values == logits(original, tokens=NEW)
        assert tokens == greedy(original)
    ties = assert_chosen_or_tied(original, tokens)
    say(f"{form}: {ties} of {len(TEXTS) * NEW} tokens tied, {share:.3f} of the bytes")
    if options:
        assert PACKED[model] * 11 / 16 < share < PACKED[model] * 13 / 16
    else:
        assert share == 0


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files of a plain folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
