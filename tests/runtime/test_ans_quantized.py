"""Quantized matrices stay as the container codes them in the residency "ans", and are still tensors."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from safetensors.torch import save_file

from neuzip.compress import Rule, Scheme, compress
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.runtime import load_file as compressed_file
from neuzip.runtime import residency
from neuzip.runtime.hf import stored_tensors as stored_tensors_module
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.stored_tensors import stored_tensors
from neuzip.runtime.read_coded import read_ans
from neuzip.runtime.weights import AnsWeight, WeightUse

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(2 * 12).view(2, 12) * 7 % 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix with factors, the matrices of two experts, and a line."""
    path = tmp_path_factory.mktemp("ans")
    generator = torch.Generator().manual_seed(0)
    weights = {
        "matrix": torch.randn(40, 72, generator=generator) * torch.linspace(0.5, 2, 40)[:, None],
        "experts": torch.randn(2, 32, 64, generator=generator),
        "line": torch.randn(2000, generator=generator),
    }
    (path / "plain").mkdir()
    save_file({n: w.bfloat16() for n, w in weights.items()}, path / "plain" / "model.safetensors")
    rules = [
        Rule("matrix", Scheme("quantized", step=0.25, row_factors=True, column_factors=True)),
        Rule("*", Scheme("quantized", step=0.5)),
    ]
    compress(path / "plain", path / "small", rules=rules)
    return path / "small"


def arrived(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """What a model gets, by name."""
    with FolderSource(find_checkpoint(folder)) as source:
        tensors = list(source.tensors())
        with stored_tensors(source, tensors, device, in_groups=True, residency="ans") as stored:
            return {name: tensor[...].to(device=device, dtype=dtype) for name, tensor in stored.items()}


def values(folder: Path) -> dict[str, torch.Tensor]:
    return dict(compressed_file.load_file(folder / "model.safetensors"))


def test_matrices_arrive_as_they_are_coded(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors_module, "SMALLEST", 2000)
    monkeypatch.setattr(stored_tensors_module, "WORTH", 9)  # tables are larger than what is so small
    weights, expected = arrived(folder, device), values(folder)
    assert {name: type(w) for name, w in weights.items()} == {
        "matrix": AnsWeight, "experts": AnsWeight, "line": torch.Tensor,
    }  # fmt: skip
    for name, weight in weights.items():
        dense = weight.dense() if isinstance(weight, AnsWeight) else weight
        assert same_bits(dense.cpu(), expected[name]), name
    matrix, experts = weights["matrix"], weights["experts"]
    assert not matrix.suits(WeightUse(looked_up=True))
    kept = residency.keep_arrived(matrix)
    x = torch.randn(3, 72, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    assert same_bits(F.linear(x, kept), F.linear(x, expected["matrix"].to(device)))
    assert same_bits(experts.expert(1).dense().cpu(), expected["experts"][1])
    for again in (copy.deepcopy(kept), matrix.to(device)):
        assert type(again.data) is AnsWeight and same_bits(again.dense().cpu(), expected["matrix"])
    names, context = matrix.__tensor_flatten__()
    inner = {name: getattr(matrix, name) for name in names}
    assert same_bits(
        AnsWeight.__tensor_unflatten__(inner, context, None, None).dense().cpu(), expected["matrix"]
    )
    with pytest.raises(NeuzipError, match="cannot be pickled"):
        matrix.__reduce_ex__(2)


def test_other_dtypes_and_small_tensors_are_dense(folder: Path, device: torch.device) -> None:
    for dtype in (None, torch.float32):
        for name, weight in arrived(folder, device, dtype).items():
            assert type(weight) is torch.Tensor
            assert torch.equal(weight.cpu().float(), values(folder)[name].float())


def test_corrupt_words_are_refused(folder: Path, device: torch.device, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bad")
    file = tmp_path / "bad" / "model.safetensors"
    with FolderSource(find_checkpoint(folder)) as source:
        tensor = next(t for t in source.tensors() if t.name == "matrix")
        extent = next(e for e in source.extents(tensor) if e.stream == "words")
    data = bytearray(file.read_bytes())
    data[extent.start + 2] ^= 1
    file.write_bytes(data)
    with FolderSource(find_checkpoint(tmp_path / "bad")) as source:
        tensor = next(t for t in source.tensors() if t.name == "matrix")
        with pytest.raises(FormatError, match="the file is damaged"):
            read_ans(source, tensor, device)
        with pytest.raises(FormatError, match="corrupt"):
            read_ans(source, tensor, device, verify=False)


@pytest.mark.gpu
def test_a_model_computes_with_what_the_container_has(tmp_path: Path, device: torch.device) -> None:
    """Logits are those of the dense model bit for bit, and linear layers take less than half."""
    model = models.llama(
        seed=1, vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    rules = [Rule("*norm*", Scheme("lossless")), Rule("*", Scheme("quantized", step=0.005, row_factors=True))]
    compress(tmp_path / "model", tmp_path / "small", rules=rules)
    ours, dense = (load_model(tmp_path / "small", device=device, residency=r) for r in ("ans", "dense"))
    weight = ours.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, AnsWeight) and weight.stored_bytes < 0.5 * 2 * weight.numel()
    ours.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert same_bits(ours(IDS.to(device)).logits, dense(IDS.to(device)).logits)
    for name, parameter in load_model(tmp_path / "saved", device=device).named_parameters():
        assert same_bits(parameter.data, dense.get_parameter(name).data), name
