"""Weight files that an engine found give their tensors back, with those of shards that no index names."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from neuzip.compress import Rule, Scheme, compress
from neuzip.runtime import read, weight_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A compressed folder of two shards, [a] of whose names is a pattern to glob; the second is an alias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator).to(torch.bfloat16)
    source = tmp_path / "plain"
    source.mkdir()
    save_file({"a": weight, "b": weight[:3].clone()}, source / "model[a]-00001-of-00002.safetensors")
    save_file({"c": weight}, source / "model[a]-00002-of-00002.safetensors")
    compress(source, tmp_path / "compressed", [Rule("*", Scheme("lossless"))])
    return tmp_path


def test_tensors_of_all_shards_come_in_order_bit_for_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "GROUP", 64 * 96 * 2)  # one tensor and a part of the next
    first = folder / "compressed" / "model[a]-00001-of-00002.safetensors"
    with weight_files.opened([str(first)]) as source:
        tensors = list(weight_files.decoded_tensors(source, torch.device("cpu")))
        chosen = dict(weight_files.decoded_tensors(source, torch.device("cpu"), lambda name: name == "b"))
        assert weight_files.ternary_count(source) == 0
    assert [name for name, _ in tensors] == ["a", "b", "c"]
    a, b, c = (tensor for _, tensor in tensors)
    assert torch.equal(a, c) and torch.equal(a[:3], b) and torch.equal(chosen["b"], b) and len(chosen) == 1


def test_the_next_group_is_read_while_one_is_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "GROUP", 1)
    begun, read_tensors = threading.Semaphore(0), read.read_tensors

    def noted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        begun.release()
        return read_tensors(*arguments, **options)

    monkeypatch.setattr(read, "read_tensors", noted)
    first = folder / "compressed" / "model[a]-00001-of-00002.safetensors"
    with weight_files.opened([str(first)]) as source:
        tensors = weight_files.decoded_tensors(source, torch.device("cpu"))
        assert next(tensors)[0] == "a" and begun.acquire(timeout=60)
        assert begun.acquire(timeout=60)  # "b" is being read, and nobody has asked for it
        assert next(tensors)[0] == "b" and begun.acquire(timeout=60)
        assert not begun.acquire(blocking=False)  # no fourth group
        tensors.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("neuzip-ahead")]


def test_only_containers_are_container_files(folder: Path) -> None:
    name = "model[a]-00001-of-00002.safetensors"
    assert weight_files.is_container_file(folder / "compressed" / name)
    assert not weight_files.is_container_file(folder / "plain" / name)


def test_shards_of_other_numberings_are_left_out(tmp_path: Path) -> None:
    others = ("model-00002-of-00003", "model-fp32-00001-of-00002", "model", "other")
    for name in ("model-00001-of-00002", "model-00002-of-00002", *others):
        (tmp_path / f"{name}.safetensors").touch()
    names = [
        file.name
        for file in weight_files.with_all_shards([str(tmp_path / "model-00002-of-00002.safetensors")])
    ]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_tensors_are_decoded_where_another_device_is_the_default(folder: Path) -> None:
    """vLLM loads weights with the GPU as torch's default device; "meta" stands for it here."""
    first = folder / "compressed" / "model[a]-00001-of-00002.safetensors"
    with weight_files.opened([str(first)]) as source, torch.device("meta"):
        for _, tensor in weight_files.decoded_tensors(source, torch.device("cpu")):
            assert tensor.device.type == "cpu"
            assert torch.empty(1).is_meta  # the caller's default is back between tensors


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_lm_head_of_other_values_is_told_from_a_tied_one(tmp_path: Path, is_tied: bool) -> None:
    embedding = torch.arange(4096).view(64, 64).to(torch.bfloat16)
    head = embedding.clone() if is_tied else embedding.flip(0).contiguous()
    (tmp_path / "plain").mkdir()
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    compress(tmp_path / "plain", tmp_path / "small")
    with weight_files.opened([str(tmp_path / "small" / "model.safetensors")]) as source:
        assert weight_files.head_of_its_own(source) == (None if is_tied else "lm_head.weight")
