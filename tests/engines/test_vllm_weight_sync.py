"""A running vLLM follows deltas of a training: its logits are those of vLLM started on the new weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from vllm_engine import logits, residency, start
from vllm_models import compressed, untied

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("caches")]

BACKEND = {"weight_transfer_config": {"backend": "neuzip_delta"}}


def stepped(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Weights after a step that changes one of seven."""
    new = {name: w.clone() for name, w in weights.items()}
    for w in new.values():
        w.view(-1)[step::7] *= 1.5
    return new


def test_vllm_follows_a_training(tmp_path: Path) -> None:
    from neuzip import delta

    old = untied(tmp_path / "old")
    weights = load_file(old / "model.safetensors")
    publisher, folder = delta.Publisher(weights), delta.DeltaFolder(tmp_path / "deltas")
    for step in (1, 2):
        weights = stepped(weights, step)
        folder.write(publisher.make(weights))
    shutil.copytree(old, tmp_path / "new")
    save_file(weights, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    engine = start(compressed(old, tmp_path / "old.nz"), **BACKEND)
    other = start(tmp_path / "new")  # both live to the end: an engine that ends takes vLLM's groups with it
    before, right = logits(engine), logits(other)
    places = {"deltas": str(folder.path), "checkpoint": str(tmp_path / "old.nz")}
    engine.init_weight_transfer_engine({"init_info": places})
    engine.start_weight_update()
    engine.update_weights({"update_info": {"state": 2}})
    engine.finish_weight_update()
    assert logits(engine) == right != before
    engine.start_weight_update()
    with pytest.raises(delta.BrokenChain, match="has no deltas from state 2"):
        engine.update_weights({"update_info": {"state": 3}})
    assert logits(engine) == right


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    from neuzip.runtime.serving import EngineRefusal

    folder = compressed(untied(tmp_path / "old"), tmp_path / "old.nz")
    engine = start(folder, **BACKEND, **residency("packed"))
    with pytest.raises(EngineRefusal, match="packed weights"):
        engine.init_weight_transfer_engine({"init_info": {"deltas": "deltas", "checkpoint": str(folder)}})
