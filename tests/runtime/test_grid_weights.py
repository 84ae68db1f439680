"""Matrices that are stored quantized are packed in memory as codes, and are tensors all the same."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from transformers import AutoModelForCausalLM

from neuzip.compress import Rule, Scheme, compress
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels.grid import Grid
from neuzip.runtime import residency
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.model_files import model_tensors
from neuzip.runtime.hf.quantization_config import NeuzipConfig
from neuzip.runtime.kernel_prefetch import model_shapes
from neuzip.runtime.read import load_state_dict, read_grid
from neuzip.runtime.residency import WeightUse
from neuzip.runtime.weights import GridWeight

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(2 * 12).view(2, 12) * 7 % 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, its head tied to the embedding: matrices with factors and without, one of 8 bits."""
    path = tmp_path_factory.mktemp("grid")
    model = models.llama(
        seed=1, vocab_size=512, hidden_size=256, intermediate_size=320, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(path / "model")
    rules = [
        Rule("*norm*", Scheme("lossless")),
        Rule("*gate_proj*", Scheme("quantized", step=0.005, row_factors=True, column_factors=True)),
        Rule("*up_proj*", Scheme("quantized", step=0.0004)),
        Rule("*", Scheme("quantized", step=0.005)),
    ]
    compress(path / "model", path / "small", rules=rules)
    return path / "small"


def test_a_model_keeps_its_codes_packed(folder: Path, device: torch.device, tmp_path: Path):
    """The container's weights bit for bit, a third of their size, saved and loaded again."""
    packed, dense = load_model(folder, device=device, residency="packed"), load_model(folder, device=device)
    kinds = {name: type(p) for name, p in packed.named_parameters()}
    assert kinds["model.embed_tokens.weight"] is kinds["model.layers.0.self_attn.q_proj.weight"] is GridWeight
    assert kinds["model.layers.0.mlp.gate_proj.weight"] is GridWeight
    assert packed.model.layers[0].mlp.up_proj.weight.packed.width == 8
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    for name, parameter in packed.named_parameters():
        values = parameter.dense() if residency.is_compressed(parameter) else parameter
        assert same_bits(values, dense.get_parameter(name).data), name
    gate = packed.model.layers[0].mlp.gate_proj.weight
    assert gate.packed.has_columns and gate.stored_bytes < 0.45 * gate.numel() * 2
    use = residency.memory(packed).of("packed")
    assert use.stored_bytes < 0.5 * use.dense_bytes
    with torch.no_grad():
        expected, logits = dense(IDS.to(device)).logits, packed(IDS.to(device)).logits
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2)
    packed.save_pretrained(tmp_path / "saved")
    stored = dict(load_state_dict(folder))
    saved = dict(load_state_dict(tmp_path / "saved"))
    assert saved.keys() == stored.keys()
    assert all(same_bits(saved[name], stored[name]) for name in stored)


def test_kernels_to_compile_ahead(folder: Path):
    """Codes of 5 bits, as packing chooses for them, and no other packed form of these matrices."""
    with FolderSource(find_checkpoint(folder)) as source:
        shapes = model_shapes(source, model_tensors(source))
    grids = {(g.out, g.columns, g.has_columns, g.looked_up): g.width for g in shapes.grids}
    assert grids == {
        (512, 256, False, True): 5, (256, 256, False, False): 5, (256, 320, False, False): 5,
        (320, 256, True, False): 5, (320, 256, False, False): 8,
    }  # fmt: skip
    assert not shapes.matrices
    assert shapes.step is not None


def test_from_pretrained(folder: Path, device: torch.device):
    """transformers makes the same of it, and makes it dense again."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=NeuzipConfig("packed"), device_map=str(device)
    )
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert type(weight) is GridWeight
    model.dequantize()
    assert type(model.model.layers[0].self_attn.q_proj.weight) is torch.nn.Parameter


def weight_of(out: int, columns: int, device: torch.device) -> tuple[GridWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    codes = (torch.randn(out, columns, generator=generator) * 4).round().to(torch.int16)
    grid = Grid(0.01, torch.full((out,), 0x7C, dtype=torch.uint8))
    dense = grid.values(codes, torch.bfloat16).to(device)
    return GridWeight.of(dense, grid), dense


def test_operations(device: torch.device):
    weight, dense = weight_of(33, 70, device)
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    other = torch.randn(3, 33, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)

    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)

    assert same_bits(weight.dense(), dense) and same_bits(weight.t().dense(), dense.t())
    close(F.linear(x, weight), F.linear(x, dense))
    close(x @ weight.t(), x @ dense.t())
    close(other @ weight, other @ dense)
    close(weight.sum(0), dense.sum(0))
    ids = torch.tensor([[3, 32], [0, 3]], device=device)
    assert same_bits(F.embedding(ids, weight), F.embedding(ids, dense))
    assert same_bits(weight[ids[0]], dense[ids[0]])
    for again in (copy.deepcopy(weight), weight.clone(), weight.detach(), weight.to("cpu")):
        assert type(again) is GridWeight and same_bits(again.dense().to(device), dense)
    arrays, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in arrays}
    assert same_bits(GridWeight.__tensor_unflatten__(inner, context, None, None).dense(), dense)
    x.requires_grad_()
    F.linear(x, weight).sum().backward()
    close(x.grad, dense.sum(0, keepdim=True).expand(3, -1))
    assert weight.suits(WeightUse(looked_up=True)) and not weight.suits(WeightUse(transposed=True))
    with pytest.raises(NeuzipError, match="frozen GridWeight"):
        weight.mul_(2)


def test_weights_of_large_codes_stay_dense(device: torch.device):
    dense = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    assert GridWeight.if_worthwhile(dense, Grid(1e-4)) is None


def test_a_damaged_grid_is_refused(folder: Path, tmp_path: Path):
    with FolderSource(find_checkpoint(folder)) as source:
        tensor = next(t for t in source.tensors() if "gate_proj" in t.name)
        extent = next(e for e in source.extents(source.resolve(tensor)) if e.stream == "grid")
        assert read_grid(source, tensor).rows is not None
        root = source.checkpoint.root / tensor.file
    data = bytearray(root.read_bytes())
    data[extent.start + 3] ^= 0x80  # the sign of the step
    shutil.copytree(folder, tmp_path / "bad")
    (tmp_path / "bad" / root.relative_to(folder)).write_bytes(data)
    with FolderSource(find_checkpoint(tmp_path / "bad")) as source:
        tensor = next(t for t in source.tensors() if "gate_proj" in t.name)
        with pytest.raises(FormatError, match="checksum"):
            read_grid(source, tensor)
        with pytest.raises(FormatError, match="step"):
            read_grid(source, tensor, verify=False)
