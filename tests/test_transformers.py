"""`import neuzip` is all that `from_pretrained` of transformers needs to load compressed folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    modeling_utils,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import neuzip
from neuzip.compress import Rule, Scheme, compress
from neuzip.errors import FormatError, NeuzipError
from neuzip.runtime.quantizer import register

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip

IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96


def llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64))


KINDS = ["llama", "sharded", "gpt2", "mixtral", "no dtype", "shard of aliases"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small bf16 checkpoints with random weights."""
    torch.manual_seed(1)
    made = {kind: tmp_path_factory.mktemp("models") / "model" for kind in KINDS}

    def keep(kind: str, model: PreTrainedModel, **options: Any) -> None:
        model.to(torch.bfloat16).save_pretrained(made[kind], **options)

    keep("llama", llama())
    keep("sharded", llama(), max_shard_size="20KB")
    keep("gpt2", gpt2())
    keep("mixtral", MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)))
    keep("no dtype", llama())
    config = json.loads((made["no dtype"] / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (made["no dtype"] / "config.json").write_text(json.dumps(config))
    twins = llama()
    with torch.no_grad():
        twins.lm_head.weight.copy_(twins.model.embed_tokens.weight)
    keep("shard of aliases", twins, max_shard_size="6KB")  # every tensor of some size is alone
    return made


@pytest.fixture(scope="module")
def small(plain: dict[str, Path]) -> dict[str, Path]:
    """The same, compressed without loss."""
    for path in plain.values():
        compress(path, path.parent / "small")
    return {kind: path.parent / "small" for kind, path in plain.items()}


@torch.inference_mode()
def assert_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert type(model) is type(expected)
    assert not model.training
    mine = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value.cpu(), theirs[name].cpu()), name
    assert len(list(model.parameters())) == len(list(expected.parameters())), "tied otherwise"
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"dtype": "auto"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_model_is_the_original_s(kind: str, options: dict[str, Any], plain, small, capfd):
    expected = AutoModelForCausalLM.from_pretrained(plain[kind], **options)
    capfd.readouterr()
    model = AutoModelForCausalLM.from_pretrained(small[kind], **options)
    said = capfd.readouterr().err
    assert "MISSING" not in said and "Unknown quantization" not in said
    assert_same(model, expected)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    ours, theirs = model.config.to_dict(), expected.config.to_dict()
    for config in (ours, theirs):
        config.pop("_name_or_path", None)
    assert ours == theirs
    assert not [n for n in ("hf_quantizer", "quantization_method", "is_quantized") if n in vars(model)]


def test_a_class_of_its_own_and_loading_info(plain, small):
    model, found = LlamaForCausalLM.from_pretrained(small["llama"], output_loading_info=True)
    assert not any(found.values())
    assert_same(model, LlamaForCausalLM.from_pretrained(plain["llama"]))


def test_lossy_weights_are_those_of_load_model(plain, tmp_path: Path):
    compress(plain["gpt2"], tmp_path / "small", [Rule("*", Scheme("truncated", 3, 64))])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto")
    assert_same(model, neuzip.load_model(tmp_path / "small"))


def test_with_a_config_that_says_nothing_of_it(plain, small):
    config = AutoConfig.from_pretrained(plain["llama"])
    assert_same(
        AutoModelForCausalLM.from_pretrained(small["llama"], config=config),
        AutoModelForCausalLM.from_pretrained(plain["llama"], config=config),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, plain, small):
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(small[kind], device_map="cuda")
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert_same(model, AutoModelForCausalLM.from_pretrained(plain[kind], device_map="cuda"))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"model": "cpu", "lm_head": "disk"}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "sharded"])
def test_device_map(kind: str, device_map: Any, plain, small, tmp_path: Path):
    pytest.importorskip("accelerate")
    expected = AutoModelForCausalLM.from_pretrained(plain[kind])
    model = AutoModelForCausalLM.from_pretrained(
        small[kind], device_map=device_map, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(model(IDS.to(model.device)).logits.cpu(), expected(IDS).logits)
    if device_map == "cpu":
        assert_same(model, expected)


def test_saved_again_it_is_plain(plain, small, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(small["mixtral"], dtype="auto")
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config
    expected = load_file(plain["mixtral"] / "model.safetensors")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_plain_folders_load_as_before(plain):
    assert modeling_utils.safe_open(plain["gpt2"] / "model.safetensors", framework="pt").keys()
    assert AutoModelForCausalLM.from_pretrained(plain["gpt2"], dtype="auto").dtype == torch.bfloat16


def snapshot_of(folder: Path, root: Path) -> Path:
    """A snapshot as the Hub's cache has it, of the files that transformers would fetch."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, path in enumerate(p for p in folder.iterdir() if p.is_file()):
        if path.suffix != ".safetensors" or not names or path.name in names:
            shutil.copy(path, root / "blobs" / str(number))
            os.symlink(Path("..", "..", "blobs", str(number)), snapshot / path.name)
    return snapshot


@pytest.mark.parametrize("kind", ["llama", "sharded"])
def test_a_snapshot_of_the_hub(kind: str, plain, small, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(snapshot_of(small[kind], tmp_path))
    assert_same(model, AutoModelForCausalLM.from_pretrained(plain[kind]))


# What goes wrong


@pytest.mark.parametrize("kind", ["llama", "sharded"])
def test_damage_is_named(kind: str, small, tmp_path: Path):
    folder = Path(shutil.copytree(small[kind], tmp_path / "broken"))
    path = max(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert caught.value.file == str(path)
    assert caught.value.tensor is not None


def test_shards_that_transformers_did_not_fetch_are_missed(small, tmp_path: Path):
    snapshot = snapshot_of(small["shard of aliases"], tmp_path)
    with pytest.raises(FormatError, match=r"\d+ of \d+ shards were fetched") as caught:
        AutoModelForCausalLM.from_pretrained(snapshot)
    assert "hf download" in str(caught.value.hint)


def edit_quantization(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"format version 2; this neuzip reads version 1"),
        ({"original": {"quant_method": "fp8"}}, r"quantized before neuzip compressed them"),
    ],
)
def test_what_cannot_be_loaded_is_refused(changes: dict[str, object], message: str, small, tmp_path: Path):
    folder = Path(shutil.copytree(small["llama"], tmp_path / "other"))
    edit_quantization(folder, **changes)
    with pytest.raises(NeuzipError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


# Registering


def test_registering_twice_changes_nothing():
    before = AUTO_QUANTIZER_MAPPING["neuzip"], modeling_utils.PreTrainedModel._load_pretrained_model
    register()
    assert before == (AUTO_QUANTIZER_MAPPING["neuzip"], modeling_utils.PreTrainedModel._load_pretrained_model)


LOAD = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.get_input_embeddings().weight.float().sum().item())
"""
IMPORT = "import neuzip; print([m for m in ('numpy', 'torch', 'transformers') if m in sys.modules])\n"


@pytest.mark.parametrize(
    ("program", "cheap"),
    [
        (IMPORT + "import importlib; importlib.reload(neuzip)\n" + LOAD, "[]"),
        ("import transformers\nimport neuzip" + LOAD, None),
        ("from transformers import PreTrainedModel\nimport neuzip, neuzip" + LOAD, None),
    ],
    ids=["before", "between", "after"],
)
def test_any_order_of_imports(program: str, cheap: str | None, small, tmp_path: Path):
    result = subprocess.run(
        [sys.executable, "-c", "import sys\n" + program, str(small["gpt2"])],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *said, total = result.stdout.splitlines()
    assert said == ([cheap] if cheap else [])
    expected = neuzip.load_model(small["gpt2"]).get_input_embeddings().weight
    assert float(total) == expected.float().sum().item()


def test_without_the_import_transformers_warns(small, tmp_path: Path):
    """That is all it does: it skips quantizers it does not know. README.md says so."""
    result = subprocess.run(
        [sys.executable, "-c", "import sys\n" + LOAD, str(small["gpt2"])],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "Unknown quantization type, got neuzip" in result.stderr
