"""`from_pretrained` of transformers loads compressed folders where neuzip is installed, and else refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import neuzip_autoload
import pytest
import safetensors
import torch
from conftest import RunAlone
from forked import NO_COLLECTOR
from safetensors.torch import load_file, save_file
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
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

import neuzip
from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.delta_job import compress_delta
from neuzip.compress.plan import POOL_LEAST
from neuzip.compress.schemes.raw import CODED_MINIMUM
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.checkpoint import NOT_A_FILE
from neuzip.runtime.hf.patches import make_quantizer, register
from neuzip.runtime.hf.quantization_config import NeuzipConfig, PlacedConfig
from neuzip.runtime.residency import is_compressed, memory

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip

IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96


def llama(**more: Any) -> PreTrainedModel:
    return models.llama(**SIZES, **more)


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
    model = AutoModelForCausalLM.from_pretrained(
        small[kind], device_map=device_map, offload_folder=tmp_path / "offload"
    )
    ids = IDS.to(model.device)
    expected = AutoModelForCausalLM.from_pretrained(plain[kind]).to(model.device)
    torch.testing.assert_close(model(ids).logits.to(ids.device), expected(ids).logits)
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


# Compressed in memory


LARGER = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}  # fmt: skip


def larger_models() -> dict[str, tuple[PreTrainedModel, dict[str, Any]]]:
    """Models of which most weights are large enough, and how to save them."""
    gpt2_config = GPT2Config(vocab_size=512, n_embd=256, n_layer=2, n_head=4, n_positions=64)
    return {
        "llama": (LlamaForCausalLM(LlamaConfig(**LARGER)), {}),
        "tied": (LlamaForCausalLM(LlamaConfig(**LARGER, tie_word_embeddings=True)), {}),
        "sharded": (LlamaForCausalLM(LlamaConfig(**LARGER)), {"max_shard_size": "500KB"}),
        "gpt2": (GPT2LMHeadModel(gpt2_config), {}),
        "mixtral": (MixtralForCausalLM(MixtralConfig(**LARGER, num_local_experts=4)), {}),
    }


LARGER_KINDS = ["llama", "tied", "sharded", "gpt2", "mixtral"]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with plain/ and small/."""
    if not hasattr(HfQuantizer, "get_quantize_ops"):
        pytest.skip("transformers 4 has the residency 'dense' only")
    torch.manual_seed(2)
    made = {}
    for kind, (model, options) in larger_models().items():
        made[kind] = tmp_path_factory.mktemp("larger")
        model.to(torch.bfloat16).save_pretrained(made[kind] / "new")
        # Of a model that was loaded transformers splits the tensors in another order.
        loaded = AutoModelForCausalLM.from_pretrained(made[kind] / "new")
        loaded.save_pretrained(made[kind] / "plain", **options)
        compress(made[kind] / "plain", made[kind] / "small")
    return made


def packed(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=NeuzipConfig("packed"), **options)


def assert_packed(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Most weights are, and all are worth the same."""
    held = memory(model)
    assert held.of("packed").weights > 0.8 * held.total.weights
    theirs = dict(expected.named_parameters(remove_duplicate=False))
    mine = dict(model.named_parameters(remove_duplicate=False))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        dense = value.dense() if is_compressed(value) else value
        assert torch.equal(dense.view(torch.int16), theirs[name].view(torch.int16)), name
    assert len(list(model.parameters())) == len(list(expected.parameters())), "tied otherwise"


@torch.inference_mode()
def assert_about_the_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    mine, theirs = model(IDS.to(model.device)).logits, expected(IDS.to(expected.device)).logits
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


@pytest.mark.parametrize("form", ["plain", "small"])
@pytest.mark.parametrize("kind", LARGER_KINDS)
def test_packed_on_request(kind: str, form: str, larger, recwarn):
    model = packed(larger[kind] / form)
    assert not [w for w in recwarn if "quantization_config" in str(w.message)]
    expected = AutoModelForCausalLM.from_pretrained(larger[kind] / "plain")
    assert_packed(model, expected)
    assert_about_the_same(model, expected)
    assert repr(model.hf_quantizer.quantization_config) == "NeuzipConfig(residency='packed')"
    ours, theirs = model.config.to_dict(), expected.config.to_dict()
    for config in (ours, theirs):
        config.pop("_name_or_path", None)
    assert ours == theirs


def test_a_config_of_dense_changes_nothing(larger):
    expected = AutoModelForCausalLM.from_pretrained(larger["llama"] / "plain")
    for form in ("plain", "small"):
        model = AutoModelForCausalLM.from_pretrained(
            larger["llama"] / form, quantization_config=NeuzipConfig()
        )
        assert_same(model, expected)
        assert not [n for n in ("hf_quantizer", "quantization_method", "is_quantized") if n in vars(model)]


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_packed_by_a_device_map(device_map: Any, larger):
    pytest.importorskip("accelerate")
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("goes to the GPU")
    model = packed(larger["tied"] / "small", device_map=device_map)
    assert_packed(model, AutoModelForCausalLM.from_pretrained(larger["tied"] / "plain"))


@pytest.mark.parametrize("kind", LARGER_KINDS)
def test_accelerate_finds_every_weight_where_it_shall_be(kind: str, larger):
    """With its hooks, as for several GPUs. It tells tied weights by their addresses."""
    accelerate = pytest.importorskip("accelerate")
    model, expected = (
        packed(larger[kind] / "small"), AutoModelForCausalLM.from_pretrained(larger[kind] / "plain")
    )  # fmt: skip
    names = [name for name, _ in model.named_children()]
    model = accelerate.dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True)
    assert_packed(model, expected)
    assert_about_the_same(model, expected)


def test_packed_weights_are_not_offloaded(larger, tmp_path: Path):
    pytest.importorskip("accelerate")
    with pytest.raises(UsageError, match="cannot spread weights over cpu and disk"):
        packed(
            larger["llama"] / "small", device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path
        )


def test_ans_is_not_for_the_cpu(larger):
    with pytest.raises(UsageError, match="'ans' needs CUDA devices for all weights, not cpu"):
        AutoModelForCausalLM.from_pretrained(
            larger["llama"] / "small", quantization_config=NeuzipConfig("ans")
        )
    with pytest.raises(UsageError, match="`residency='small'`: there is no such"):
        NeuzipConfig("small")
    placed = PlacedConfig("ans")  # what load_model gives, which looks at the device itself
    make_quantizer(placed).validate_environment(device_map=None)


@pytest.mark.parametrize("residency", ["dense", "packed"])
def test_weights_of_another_shape_are_refused(residency: str, larger, tmp_path: Path):
    folder = Path(shutil.copytree(larger["llama"] / "small", tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    options = {"quantization_config": NeuzipConfig(residency)}
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, **options, ignore_mismatched_sizes=True)
    assert {p.shape[0] for name, p in model.named_parameters() if "layers" not in name} == {400, 256}


def test_weights_that_are_quantized_already_are_refused(larger, tmp_path: Path):
    folder = Path(shutil.copytree(larger["llama"] / "plain", tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(NeuzipError, match=r"quantized already \(fp8\)"):
        packed(folder)


def test_no_library_makes_it_dense_unseen(larger):
    """peft casts all weights of models that it does not know to be quantized."""
    peft = pytest.importorskip("peft")
    model = packed(larger["llama"] / "small")
    before = memory(model)
    for cast in (peft.prepare_model_for_kbit_training, lambda model: model.to(torch.float32)):
        with pytest.raises(NeuzipError, match=r"PackedWeight of torch.bfloat16 cannot become torch.float32"):
            cast(model)
        assert memory(model) == before


def test_dequantize_makes_a_plain_model(larger):
    model = packed(larger["tied"] / "small").dequantize()
    assert_same(model, AutoModelForCausalLM.from_pretrained(larger["tied"] / "plain"))
    assert not hasattr(model, "hf_quantizer")


def test_dequantize_after_saving(larger, tmp_path: Path):
    """transformers leaves a name in the config then."""
    model = packed(larger["llama"] / "small")
    model.save_pretrained(tmp_path / "saved")
    assert_same(model.dequantize(), AutoModelForCausalLM.from_pretrained(larger["llama"] / "plain"))


def test_dequantize_casts_only_on_request(larger):
    model = packed(larger["llama"] / "small")
    norm = model.model.norm.weight
    norm.data = norm.data.float() + 1e-4
    kept = norm.detach().clone()
    model.dequantize()
    assert torch.equal(model.model.norm.weight, kept)
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", torch.float16], ids=str)
def test_dequantize_to_another_dtype(dtype: str | torch.dtype, larger):
    model = packed(larger["llama"] / "small").dequantize(dtype)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize("dtype", ["float17", "int8", torch.int8], ids=str)
def test_dequantize_to_what_is_no_float(dtype: str | torch.dtype, larger):
    model = packed(larger["llama"] / "small")
    before = memory(model)
    with pytest.raises(UsageError, match="is no floating-point dtype"):
        model.dequantize(dtype)
    assert memory(model) == before


@pytest.mark.slow
def test_static_cache_and_compiled(larger):
    model = packed(larger["llama"] / "small")
    expected = AutoModelForCausalLM.from_pretrained(larger["llama"] / "plain")
    settings = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    with torch.inference_mode():
        text = model.generate(IDS[:1], **settings, cache_implementation="static")
        assert torch.equal(text, expected.generate(IDS[:1], **settings, cache_implementation="static"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits)
    assert model.hf_quantizer.is_compileable


# Saved again


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("form", ["plain", "small"])
@pytest.mark.parametrize("kind", LARGER_KINDS)
def test_saved_again_it_is_the_same_folder(kind: str, form: str, larger, tmp_path: Path):
    options = {"max_shard_size": "500KB"} if kind == "sharded" else {}
    packed(larger[kind] / form).save_pretrained(tmp_path / "again", **options)
    assert contents(tmp_path / "again") == contents(larger[kind] / "small")
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


def test_saved_over_an_older_one(larger, tmp_path: Path):
    """Its tokenizer stays, its shards go."""
    folder = Path(shutil.copytree(larger["sharded"] / "small", tmp_path / "again"))
    (folder / "tokenizer.json").write_text("{}")
    packed(larger["llama"] / "small").save_pretrained(folder)
    assert contents(folder) == contents(larger["llama"] / "small") | {"tokenizer.json": b"{}"}
    assert_packed(packed(folder), AutoModelForCausalLM.from_pretrained(larger["llama"] / "plain"))


def test_what_changed_is_saved_as_it_is(larger, tmp_path: Path):
    model = packed(larger["llama"] / "small")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        -model.model.layers[0].mlp.up_proj.weight.dense()
    )
    model.save_pretrained(tmp_path / "again")
    verify(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_a_save_that_fails_leaves_nothing_behind(larger, tmp_path: Path, monkeypatch):
    folder = Path(shutil.copytree(larger["tied"] / "small", tmp_path / "again"))
    model = packed(larger["llama"] / "small")
    before = contents(folder)

    def fails(*_: object, **__: object) -> None:
        raise NeuzipError("no")

    monkeypatch.setattr("neuzip.runtime.save.compress", fails)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(NeuzipError, match="no"):
            model.save_pretrained(target)
    assert [p.name for p in tmp_path.iterdir()] == ["again"]
    assert contents(folder) == before


def test_only_one_process_saves_and_only_to_folders(larger, tmp_path: Path):
    model = packed(larger["tied"] / "small")
    model.save_pretrained(tmp_path / "again", is_main_process=False)
    assert not (tmp_path / "again").exists()
    with pytest.raises(NeuzipError, match="is saved to a folder only") as caught:
        model.save_pretrained(tmp_path / "again", push_to_hub=True)
    assert "neuzip push" in caught.value.hint
    (tmp_path / "file").write_text("")
    with pytest.raises(NeuzipError, match="file: is a file"):
        model.save_pretrained(tmp_path / "file")


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["packed", "ans"])
@pytest.mark.parametrize("kind", LARGER_KINDS)
def test_compressed_on_a_gpu_and_saved_again(kind: str, residency: str, larger, tmp_path: Path):
    pytest.importorskip("accelerate")
    expected = AutoModelForCausalLM.from_pretrained(larger[kind] / "plain", device_map="cuda")
    model = AutoModelForCausalLM.from_pretrained(
        larger[kind] / "small", device_map="cuda", quantization_config=NeuzipConfig(residency)
    )
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cuda"}
    held = memory(model)
    assert held.of("packed").weights + held.of("ans").weights > 0.8 * held.total.weights
    assert_about_the_same(model, expected)
    if residency == "ans" and kind != "mixtral":  # a pool of experts adds in another order
        assert torch.equal(model(IDS.cuda()).logits, expected(IDS.cuda()).logits)
    model.save_pretrained(tmp_path / "again", **({"max_shard_size": "500KB"} if kind == "sharded" else {}))
    assert contents(tmp_path / "again") == contents(larger[kind] / "small")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "residency"), [("llama", "packed"), ("llama", "ans"), ("mixtral", "packed")]
)
def test_generate_compiles_on_a_gpu(kind: str, residency: str, larger):
    """As transformers does by itself for a static cache on a GPU, CUDA graphs included."""
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(
        larger[kind] / "small", device_map="cuda", quantization_config=NeuzipConfig(residency)
    )
    ids = IDS[:1].cuda()
    settings = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16, "pad_token_id": 0,
                "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    plain = model.generate(ids, **settings)
    for _ in range(2):
        compiled = model.generate(ids, **settings, cache_implementation="static")
        assert compiled.sequences.shape == plain.sequences.shape
        torch.testing.assert_close(compiled.logits[0], plain.logits[0], rtol=0.02, atol=0.02)
    torch._dynamo.reset()


# Adapters


def with_adapters(model: PreTrainedModel) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    targets = ["c_attn", "c_fc"] if model.config.model_type == "gpt2" else ["q_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0)
    return peft.get_peft_model(model, settings)


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_adapters_train_on_top_of_packed_weights(kind: str, larger):
    model = with_adapters(packed(larger[kind] / "small"))
    reference = with_adapters(AutoModelForCausalLM.from_pretrained(larger[kind] / "plain", dtype="auto"))
    frozen = [p for p in model.parameters() if is_compressed(p)]
    assert frozen and not any(p.requires_grad for p in frozen)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
        optimiser.zero_grad()
    assert losses[2] < losses[1] < losses[0]
    assert losses[0] == pytest.approx(reference(IDS, labels=IDS).loss.item(), rel=1e-3)


def test_gradients_of_adapters_are_those_on_dense_weights(larger):
    model = with_adapters(packed(larger["llama"] / "small"))
    reference = with_adapters(AutoModelForCausalLM.from_pretrained(larger["llama"] / "plain", dtype="auto"))
    for m in (model, reference):
        m(IDS, labels=IDS).loss.backward()
    theirs = dict(reference.named_parameters())
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and "lora_B" in name:  # lora_A gets none while lora_B is 0
            scale = theirs[name].grad.abs().max().item()
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=0.05, atol=0.05 * scale)
            compared += 1
    assert compared == 4


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["packed", "ans"])
def test_adapters_train_on_a_gpu(residency: str, larger):
    pytest.importorskip("accelerate")
    model = with_adapters(
        AutoModelForCausalLM.from_pretrained(
            larger["llama"] / "small", device_map="cuda", quantization_config=NeuzipConfig(residency)
        )
    )
    ids = IDS.cuda()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
        optimiser.zero_grad()
    assert losses[2] < losses[1] < losses[0]


def test_adapters_that_transformers_itself_adds_are_saved_alone(larger, tmp_path: Path):
    peft = pytest.importorskip("peft")
    model = packed(larger["llama"] / "small")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved and all("lora" in name for name in saved)
    again = packed(larger["llama"] / "small")
    again.load_adapter(str(tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_merging_adapters_is_refused(larger):
    """What is merged into has to change; a model that was made dense does."""
    model = with_adapters(packed(larger["llama"] / "small"))
    with pytest.raises(NeuzipError, match=r"frozen|in place|dense"):
        model.merge_and_unload()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import neuzip, importlib; importlib.reload(neuzip)\n",
        "from transformers import PreTrainedModel\nimport neuzip, neuzip",
    ],
    ids=["before", "after"],
)
def test_any_order_of_imports(program: str, small, run_alone: RunAlone):
    total = run_alone(NO_COLLECTOR + "import sys\n" + program + LOAD, small["gpt2"])
    expected = neuzip.load_model(small["gpt2"]).get_input_embeddings().weight
    assert float(total) == expected.float().sum().item()


def test_peft_itself_reads_a_compressed_adapter(larger, tmp_path: Path):
    """It warns of what a file lacks, and goes on without: so all tensors are there, under their names."""
    peft = pytest.importorskip("peft")

    def base() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(larger["llama"] / "plain")

    for name in ("before", "plain"):  # half of the matrices are 0, and equal
        adapter = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=16))
        adapter.save_pretrained(tmp_path / name)
    compress(tmp_path / "plain", tmp_path / "small")
    compress_delta(tmp_path / "plain", tmp_path / "before", tmp_path / "delta", "before")
    expected = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    assert max(tensor.nbytes for tensor in expected.values()) >= CODED_MINIMUM
    for name in ("small", "delta"):
        read = peft.PeftModel.from_pretrained(base(), tmp_path / name)
        found = peft.get_peft_model_state_dict(read)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[tensor], expected[tensor]) for tensor in expected)


@pytest.mark.slow
def test_an_adapter_of_many_small_tensors_is_not_pooled(tmp_path: Path):
    tensors = {
        f"base_model.model.{i}.lora_A.weight": torch.full((8, 2), i / 7) for i in range(2 * POOL_LEAST)
    }
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    compress(folder, tmp_path / "small")
    found = load_file(tmp_path / "small" / "adapter_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


# Where neuzip is not imported, or not there


@pytest.fixture(scope="module")
def benchmark(root: Path) -> ModuleType:
    """benchmarks/without_import.py, whose table says the same of other versions of transformers."""
    spec = importlib.util.spec_from_file_location("without_import", root / "benchmarks" / "without_import.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folders: plain and small."""
    made = tmp_path_factory.mktemp("folders")
    benchmark.make_folders(made)
    return made


WAYS = ["AutoModelForCausalLM", "LlamaForCausalLM, sharded", "AutoModelForSequenceClassification", "pipeline",
        "subfolder", "variant", "saved by a packed model", "3 mantissa bits"]  # fmt: skip


@pytest.mark.slow
def test_without_the_import_an_installed_neuzip_loads(benchmark: ModuleType, folders: Path):
    ways = [*WAYS, "config of the folder", *benchmark.UNSTOPPED]
    found = benchmark.run(sys.executable, folders, "installed", ways)
    assert {way: said["outcome"] for way, said in found["outcomes"].items()} == dict.fromkeys(ways, "right")


@pytest.mark.slow
def test_without_neuzip_transformers_refuses_and_names_it(benchmark: ModuleType, folders: Path):
    """As it does where the hook is switched off: both have transformers alone."""
    ways = [*WAYS, "ternary, with activations", "a delta", "of weights quantised before"]
    found = benchmark.run(sys.executable, folders, "switched off", ways)
    for way in ways:
        said = found["outcomes"][way]
        assert said["outcome"] == "refused", way
        assert NOT_A_FILE in said["error"], way


def test_a_container_does_not_call_itself_a_file_of_torch(small):
    """Version 4.57, accelerate and others ask for the format. Read by us it has the original's."""
    path = small["llama"] / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "neuzip"
    with neuzip.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("residency", ["dense", "packed"])
def test_transformers_weights_of_the_original_are_those_loaded(residency: str, larger, tmp_path: Path):
    """It names the file to load; in a compressed config.json it stops transformers where neuzip is not."""
    source, named = larger["llama"] / "plain", "consolidated.safetensors"
    folder = Path(shutil.copytree(source, tmp_path / "plain"))
    (folder / "model.safetensors").rename(folder / named)
    config = json.loads((folder / "config.json").read_text()) | {"transformers_weights": named}
    (folder / "config.json").write_text(json.dumps(config))
    compress(folder, tmp_path / "small")
    written = json.loads((tmp_path / "small" / "config.json").read_text())
    assert written["transformers_weights"] == NOT_A_FILE
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", dtype="auto", quantization_config=NeuzipConfig(residency)
    )
    assert model.config.transformers_weights == named
    expected = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    decompress(tmp_path / "small", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_import_torch_bears_a_neuzip_that_cannot_be_imported(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "neuzip", None)
    neuzip_autoload.autoload()
    assert "neuzip cannot be imported" in caplog.text
    caplog.clear()
    monkeypatch.setenv("NEUZIP_AUTOLOAD", "0")
    neuzip_autoload.autoload()
    assert not caplog.text


def test_where_registering_fails_folders_are_refused(small, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "neuzip.runtime.hf.patches", None)
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "neuzip", NeuzipConfig)  # put back afterwards
    neuzip._register("transformers.modeling_utils")
    assert "neuzip could not register with transformers.modeling_utils" in caplog.text
    with pytest.raises(NeuzipError, match=r"loads no compressed folder: import of neuzip\.runtime"):
        AutoModelForCausalLM.from_pretrained(small["llama"])


def test_a_module_that_imports_us_half_way_registers_at_its_end(tmp_path: Path, monkeypatch):
    """As modules of transformers 5 do: they import torch, which imports neuzip."""
    (tmp_path / "half_way.py").write_text(
        "import neuzip\nseen = []\nneuzip._REGISTER[__name__] = lambda: seen.append('end')\n"
        "neuzip._wait_for(__name__)\nat_once = list(seen)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(neuzip, "_REGISTER", {})
    module = importlib.import_module("half_way")
    assert module.at_once == []
    assert module.seen == module.seen == ["end"]
    assert type(module) is ModuleType
