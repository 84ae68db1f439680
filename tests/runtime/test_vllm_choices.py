"""What users of vLLM choose, which versions there are, and which files are read: all without vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import save_file

from neuzip.compress import compress
from neuzip.runtime.vllm.options import ServingOptions, serving_options
from neuzip.runtime.vllm.versions import VllmRefusal, require_supported, supported_versions
from neuzip.runtime.weight_files import decoded_tensors, head_of_its_own, opened, with_all_shards


def test_a_compressed_folder_is_dense_and_a_plain_one_packed() -> None:
    assert serving_options(None, None, is_compressed=True) == ServingOptions("dense")
    assert serving_options(None, None, is_compressed=False) == ServingOptions("packed")


def test_the_command_line_comes_before_config_json() -> None:
    entry = {"residency": "packed", "exact": True}
    assert serving_options(None, entry, is_compressed=True) == ServingOptions("packed", exact=True)
    assert serving_options({"exact": False}, entry, is_compressed=True) == ServingOptions("packed")


@pytest.mark.parametrize(
    ("additional", "entry", "words"),
    [
        ({"residence": "packed"}, None, ["additional_config, neuzip", "'residence'", "residency and exact"]),
        (None, {"exactly": True}, ["config.json, neuzip.vllm", "'exactly'"]),
        ({"residency": "ans"}, None, ["'residency'", "'ans'", "dense or packed"]),
        ({"residency": ["packed"]}, None, ["'residency'", "['packed']"]),
        ({"residency": "packed", "exact": 1}, None, ["'exact'", "1 is neither"]),
        ({"exact": True, "residency": "dense"}, None, ["`exact`", "'dense'"]),
        ("packed", None, ["'packed' is not an object"]),
    ],
)
def test_a_wrong_key_or_value_is_named(additional: Any, entry: Any, words: list[str]) -> None:
    with pytest.raises(VllmRefusal) as refusal:
        serving_options(additional, entry, is_compressed=False)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.1rc2.dev3+g1234+cpu", "0.29"])
def test_versions_between_the_bounds_are_supported(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "0.1.dev1+gabc", "dev", ""])
def test_other_versions_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(VllmRefusal) as refusal:
        require_supported(version)
    assert version in str(refusal.value) and f'pip install "vllm{supported_versions()}"' in str(refusal.value)


def test_registering_without_vllm_raises_nothing_and_imports_nothing_heavy() -> None:
    program = (
        "import logging, sys; from neuzip.runtime.vllm.plugin import register; register();"
        "print(*{'torch', 'numba', 'triton', 'numpy', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_all_shards_of_a_numbering_are_read(tmp_path: Path) -> None:
    names = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    for name in (*names, "model-00001-of-00002.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert [p.name for p in with_all_shards([str(tmp_path / names[0])])] == names
    alone = str(tmp_path / "consolidated.safetensors")
    assert with_all_shards([alone]) == [Path(alone)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A compressed folder of two shards: an embedding, an equal and another LM head by `shards`."""
    plain = tmp_path / "plain"
    plain.mkdir()
    torch.manual_seed(1)
    embedding = torch.randn(64, 64, dtype=torch.bfloat16)
    tensors = [
        {"model.embed_tokens.weight": embedding, "model.norm.weight": embedding[0].clone()},
        {"lm_head.weight": embedding.clone()},
    ]
    for number, part in enumerate(tensors, 1):
        save_file(part, plain / f"model-{number:05}-of-00002.safetensors", {"format": "pt"})
    (plain / "config.json").write_text("{}")
    compress(plain, tmp_path / "small")
    return tmp_path / "small"


def test_tensors_come_in_the_order_of_their_files(folder: Path) -> None:
    files = [str(folder / "model-00001-of-00002.safetensors")]
    with opened(files) as source:
        decoded = list(decoded_tensors(source, torch.device("cpu")))
        assert [name for name, _ in decoded] == [t.name for t in source.tensors()]
        assert {name for name, _ in decoded} == {
            "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        }  # fmt: skip
        tensors = dict(decoded)
        assert same_bits(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
        assert [n for n, _ in decoded_tensors(source, torch.device("cpu"), lambda n: "norm" in n)] == [
            "model.norm.weight"
        ]
        assert head_of_its_own(source) is None


def test_tensors_are_decoded_where_another_device_is_the_default(folder: Path) -> None:
    """vLLM loads weights with the GPU as torch's default device; "meta" stands for it here."""
    files = [str(folder / "model-00001-of-00002.safetensors")]
    with opened(files) as source, torch.device("meta"):
        for _, tensor in decoded_tensors(source, torch.device("cpu")):
            assert tensor.device.type == "cpu"
            assert torch.empty(1).is_meta  # the caller's default is back between tensors
