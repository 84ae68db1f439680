"""Kernels of a model are found in the headers of its checkpoint, and are those that are then launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.kernels.float_fields import FORMATS
from neuzip.runtime import kernel_prefetch
from neuzip.runtime.hf.model_files import model_tensors
from neuzip.runtime.kernel_prefetch import (
    MatrixShape,
    MixtureShape,
    StepShape,
    launches_on_meta,
    model_shapes,
    prefetch_kernels,
)

CONFIG = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A compressed model of random weights in bf16, tied."""
    from models import llama

    import neuzip

    model = llama(seed=0, **CONFIG).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    neuzip.compress_checkpoint(tmp_path / "plain", tmp_path / "model.nz")
    return tmp_path / "model.nz"


def test_shapes_of_a_checkpoint(checkpoint: Path):
    with FolderSource(checkpoint) as source:
        shapes = model_shapes(source, model_tensors(source))
    assert {kind[:3] for kind in shapes.decoders} == {(FORMATS["BF16"], 7, 2)}
    (embedding,) = (m for m in shapes.matrices if m.looked_up)
    assert embedding == MatrixShape(512, 256, torch.bfloat16, 8, False, True, True)
    others = {(m.out, m.columns, m.bias) for m in shapes.matrices if not m.looked_up}
    assert others == {(256, 256, True), (640, 256, False), (256, 640, False)}  # k and v are too small
    assert shapes.step == StepShape(256, 640, 4, 2, 64, 512, torch.bfloat16, True, True)


@pytest.mark.parametrize("text", ["[]", "{", '{"hidden_size": "many"}', '{"hidden_size": 0}'])
def test_a_config_that_says_no_sizes_has_no_step(checkpoint: Path, text: str):
    (checkpoint / "config.json").write_text(text)
    with FolderSource(checkpoint) as source:
        assert model_shapes(source, model_tensors(source)).step is None


def test_sizes_of_experts_are_those_of_the_config(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_prefetch, "EXPERTS", ".mlp.")  # as if these tensors were of experts
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_local_experts": 8}
    for more, inner in (({}, 0), ({"num_experts_per_tok": 2}, 640)):
        (checkpoint / "config.json").write_text(json.dumps(sizes | more))
        with FolderSource(checkpoint) as source:
            shapes = model_shapes(source, model_tensors(source))
        exact = MixtureShape(8, 2, 256, inner, torch.bfloat16, 8, False) if inner else None
        assert shapes.mixture == exact
    others = replace(shapes, mixture=None)
    for residency, more in (("packed", 2), ("ans", 0), ("dense", 0)):
        launches = [launches_on_meta(one, residency, (1, 16)) for one in (shapes, others)]
        assert len(launches[0]) == len(launches[1]) + more
    monkeypatch.undo()
    with FolderSource(checkpoint) as source:
        assert model_shapes(source, model_tensors(source)).mixture is None


def test_nothing_is_compiled_for_a_cpu(checkpoint: Path):
    with FolderSource(checkpoint) as source:
        tensors = model_tensors(source)
        assert prefetch_kernels(source, tensors, torch.device("cpu"), "packed") is None


LAUNCHED = """
import json, sys, threading
from pathlib import Path

import torch
from triton import knobs

compiled, remarks = {True: [], False: []}, []

def see(*, src, cache_hit, **_):
    ahead = threading.current_thread() is not threading.main_thread()
    compiled[ahead].append((src.name, cache_hit))

knobs.compilation.listener = see
from neuzip.compress.sources.folder import FolderSource
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.model_files import model_tensors
from neuzip.runtime.kernel_prefetch import prefetch_kernels

device, residency = torch.device("cuda", 0), sys.argv[2]
with FolderSource(Path(sys.argv[1])) as source:
    prefetch = prefetch_kernels(source, model_tensors(source), device, residency, note=remarks.append)
assert prefetch.wait(300) and prefetch.error is None, prefetch.error
model = load_model(sys.argv[1], device=device, residency=residency)
decoder = GreedyDecoder(model, 1, 20, later=True)
tokens = decoder.prefill(torch.tensor([[1, 2, 3, 4, 5, 6]])).tolist()
decoder.capture()
tokens += decoder.step().tolist()
print(json.dumps({"ahead": compiled[True], "launched": compiled[False], "remarks": remarks,
                  "compiled": prefetch.compiled, "tokens": tokens}))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["packed", "dense"])
def test_what_a_first_token_launches_was_compiled_ahead(checkpoint: Path, tmp_path: Path, residency: str):
    """With an empty cache no launch compiles, and with the cache of the first run nothing is compiled."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    runs = []
    for _ in range(2):
        command = [sys.executable, "-P", "-c", LAUNCHED, str(checkpoint), residency]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        runs.append(json.loads(run.stdout))
    cold, filled = runs
    assert cold["compiled"] == len(cold["ahead"]) > 4 and len(cold["remarks"]) == 1
    assert cold["launched"] == []
    assert filled["compiled"] == 0 and filled["remarks"] == []
    assert filled["tokens"] == cold["tokens"]
