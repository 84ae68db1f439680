"""A model from a compressed folder is the one that transformers makes of the original, bit for bit."""

from __future__ import annotations

import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import needs_version_5
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from neuzip.compress import Rule, Scheme, compress, decompress
from neuzip.compress.device import choose
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError, NeuzipError, UsageError, is_out_of_memory
from neuzip.formats.safetensors_file import DTYPE_BITS
from neuzip.kernels.rans.triton import encode as triton_encode
from neuzip.runtime import read, residency
from neuzip.runtime.decode.agreement import agreement
from neuzip.runtime.dtypes import TORCH_DTYPES
from neuzip.runtime.hf import config as config_module
from neuzip.runtime.hf import load, stored_tensors
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.runtime.read import load_state_dict, read_tensor, read_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 96
IDS = torch.arange(2 * 24).view(2, 24) * 7 % VOCABULARY


def llama(tied: bool, **more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            **more,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def bert() -> BertLMHeadModel:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        is_decoder=True,
    )
    return BertLMHeadModel(config)


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            max_position_embeddings=64,
        )
    )


def rename(folder: Path, change: dict[str, str]) -> None:
    """Replace a part of every tensor's name in model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    for old, new in change.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


KINDS = ["tied", "untied", "sharded", "gpt2", "base model's names", "old names", "experts"]
MADE_ANEW = ("old names", "experts")
"""Where transformers stacks tensors, or makes some that are not stored."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small bf16 checkpoint of every kind, with random weights."""
    torch.manual_seed(1)
    made: dict[str, Path] = {}

    def keep(kind: str, model: PreTrainedModel, **options: Any) -> Path:
        made[kind] = tmp_path_factory.mktemp(kind.replace(" ", "_").replace("'", "")) / "model"
        model.to(torch.bfloat16).save_pretrained(made[kind], **options)
        return made[kind]

    keep("tied", llama(tied=True))
    keep("untied", llama(tied=False, rope_theta=1000.0))
    keep("sharded", llama(tied=False), max_shard_size="40KB")
    keep("gpt2", gpt2())
    rename(keep("base model's names", gpt2()), {"transformer.": ""})
    rename(keep("old names", bert()), {"Norm.weight": "Norm.gamma", "Norm.bias": "Norm.beta"})
    keep("experts", mixtral())
    return made


@pytest.fixture(scope="module")
def compressed(checkpoints: dict[str, Path]) -> dict[str, Path]:
    """The same, compressed without loss."""
    for path in checkpoints.values():
        compress(path, path.parent / "small")
    return {kind: path.parent / "small" for kind, path in checkpoints.items()}


@pytest.fixture
def broken(compressed: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(compressed["untied"], tmp_path / "broken"))


@torch.inference_mode()
def assert_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert type(model) is type(expected)
    assert not model.training
    mine = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name
    assert len(list(model.parameters())) == len(list(expected.parameters())), "tied otherwise"
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    ids = IDS.to(model.device)
    logits = model(ids).logits, expected(ids).logits
    if ids.is_cuda:  # where sums may be taken in another order every time
        torch.testing.assert_close(*logits)
    else:
        assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["own dtype", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_is_the_one_that_transformers_makes_of_the_original(kind, dtype, checkpoints, compressed):
    expected = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=dtype or "auto")
    assert_same(load_model(compressed[kind], dtype), expected)
    assert_same(load_model(checkpoints[kind], dtype), expected)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["own dtype", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_in_their_place_stay_there(kind, dtype, checkpoints, compressed, monkeypatch):
    """As on a GPU, where transformers gets tensors that must not come back to the CPU."""
    places: dict[int, torch.Tensor] = {}

    def placed(source, tensor, workers, failures, verify):  # type: ignore[no-untyped-def]
        data = read_tensor(source, tensor, workers)
        places[data.data_ptr()] = data
        return stored_tensors._PlacedTensor(source, tensor, lambda _: data)

    monkeypatch.setattr(stored_tensors, "_EncodedTensor", placed)
    model = load_model(compressed[kind], dtype)
    expected = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=dtype or "auto")
    assert_same(model, expected)
    if dtype is None and kind not in MADE_ANEW:
        assert {p.data_ptr() for p in model.parameters()} <= places.keys()


def test_without_verification(compressed):
    load_model(compressed["tied"], residency="dense", verify=False)


def test_rounded_model_is_the_one_that_transformers_makes_of_the_restored_folder(checkpoints, tmp_path):
    compress(checkpoints["tied"], tmp_path / "small", [Rule("*", Scheme("truncated", 3, 64))])
    decompress(tmp_path / "small", tmp_path / "restored")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "restored", dtype="auto")
    assert_same(load_model(tmp_path / "small"), expected)


def test_large_tensors_arrive_whole(tmp_path: Path):
    model = llama(tied=True)
    model.resize_token_embeddings(6000)  # more than one piece
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    compress(tmp_path / "model", tmp_path / "small")
    loaded = load_model(tmp_path / "small")
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_other_forms_of_the_weights_in_the_folder_are_left_alone(broken: Path, checkpoints):
    shutil.copy(broken / "model.safetensors", broken / "consolidated.safetensors")
    assert_same(load_model(broken), AutoModelForCausalLM.from_pretrained(checkpoints["untied"], dtype="auto"))


def test_transformers_says_nothing_and_is_left_as_it_was(compressed, capfd):
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load_model(compressed["sharded"])
        assert capfd.readouterr() == ("", "")
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


# Residencies


COMPRESSED = ["llama, tied", "llama", "gpt2", "mixtral", "in shards"]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with weights that are large enough to be compressed in memory: plain/ and small/."""
    if not hasattr(HfQuantizer, "get_quantize_ops"):
        pytest.skip("transformers 4 has the residency 'dense' only")
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    llama_config = LlamaConfig(**(sizes | {"vocab_size": 512}), **heads, tie_word_embeddings=True)
    untied_config = LlamaConfig(**(sizes | {"vocab_size": 512}), **heads)
    models = {
        "llama, tied": LlamaForCausalLM(llama_config),
        "llama": LlamaForCausalLM(untied_config),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=256, n_layer=2, n_head=2, n_positions=64)),
        "mixtral": MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4)),
        "in shards": LlamaForCausalLM(untied_config),
    }
    made = {}
    for kind, model in models.items():
        made[kind] = tmp_path_factory.mktemp("larger")
        options = {"max_shard_size": "500KB"} if kind == "in shards" else {}
        model.to(torch.bfloat16).save_pretrained(made[kind] / "plain", **options)
        compress(made[kind] / "plain", made[kind] / "small")
    return made


def dense_copy(model: PreTrainedModel, like: Path, device: str | torch.device = "cpu") -> PreTrainedModel:
    """The plain model with the weights that a compressed one holds in fact."""
    plain = AutoModelForCausalLM.from_pretrained(like, dtype="auto")
    if any(p.dim() == 3 for p in plain.parameters()):
        plain.set_experts_implementation("eager")
    names = dict(plain.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            dense = parameter.dense() if residency.is_compressed(parameter) else parameter
            assert torch.equal(dense.cpu(), names[name]), name
    assert len(list(model.parameters())) == len(list(plain.parameters())), "tied otherwise"
    return plain.to(device)


@torch.inference_mode()
def assert_same_logits(model: PreTrainedModel, expected: PreTrainedModel, exact: bool) -> None:
    """To the last bit, or about."""
    ids = IDS.to(model.device)
    mine, theirs = model(ids).logits, expected(ids).logits
    if exact:
        assert torch.equal(mine, theirs)
    else:
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


@pytest.mark.parametrize("form", ["plain", "small"])
@pytest.mark.parametrize("kind", COMPRESSED)
def test_packed_weights_are_those_of_the_original(kind: str, form: str, larger):
    model = load_model(larger[kind] / form, residency="packed")
    assert not model.training
    held = residency.memory(model)
    assert held.total.stored_bytes < 0.76 * held.total.dense_bytes
    assert_same_logits(model, dense_copy(model, larger[kind] / "plain"), exact=False)


def test_never_more_than_a_weight_is_dense(larger, monkeypatch):
    """All that arrived before is compressed, and let go, when the next one is."""
    dense: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    original = residency.compress

    def noted(weight: torch.Tensor, *arguments: Any) -> torch.nn.Parameter:
        alive.append(sum(ref() is not None for ref in dense))
        dense.append(weakref.ref(weight))
        return original(weight, *arguments)

    monkeypatch.setattr(residency, "compress", noted)
    load_model(larger["llama"] / "small", residency="packed")
    assert len(dense) > 10
    assert max(alive) <= 1


def test_groups_are_read_in_the_order_in_which_they_are_wanted(larger, monkeypatch):
    """As on a GPU, of which the CPU takes the place."""
    groups: list[list[str]] = []

    def noted(source, tensors, device, workers, *, verify):  # type: ignore[no-untyped-def]
        assert device.type == "cuda"
        groups.append([t.name for t in tensors])
        return read_tensors(source, tensors, torch.device("cpu"), workers, verify=verify)

    monkeypatch.setattr(read, "read_tensors", noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(stored_tensors, "GROUP", 1_200_000)
    monkeypatch.setattr(torch.Tensor, "to", _stays)
    with FolderSource(larger["mixtral"] / "small") as source:
        tensors = list(source.tensors())
        with stored_tensors.stored_tensors(source, tensors, torch.device("cuda"), in_groups=True) as stored:
            for tensor in sorted(tensors, key=lambda t: t.name):
                data = stored[tensor.name][...].to(device="cpu", dtype=None)
                assert torch.equal(data, alone(source, tensor))
    assert sorted(name for group in groups for name in group) == sorted(t.name for t in tensors)
    assert 3 < len(groups) < len(tensors) / 2


def test_each_device_of_a_map_decodes_what_it_is_asked_for(larger, monkeypatch):
    """As on two GPUs, of which the CPU takes the place, and from four threads as in transformers 5."""
    groups: list[tuple[torch.device, list[str]]] = []

    def noted(source, tensors, device, workers, *, verify):  # type: ignore[no-untyped-def]
        groups.append((device, [t.name for t in tensors]))
        return read_tensors(source, tensors, torch.device("cpu"), workers, verify=verify)

    monkeypatch.setattr(read, "read_tensors", noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(stored_tensors, "GROUP", 1_200_000)
    monkeypatch.setattr(torch.Tensor, "to", _stays)
    with FolderSource(larger["llama"] / "small") as source, ThreadPoolExecutor(4) as pool:
        tensors = sorted(source.tensors(), key=lambda t: t.name)
        half = len(tensors) // 2
        with stored_tensors.stored_tensors(source, tensors, None) as stored:

            def taken(number: int) -> torch.Tensor:
                lazy = stored[tensors[number].name][...]
                result: torch.Tensor = lazy.to(device=f"cuda:{number // half}", dtype=None)
                return result

            for tensor, data in zip(tensors, pool.map(taken, range(len(tensors))), strict=True):
                assert torch.equal(data, alone(source, tensor))
            part = stored[tensors[0].name][:3]
        assert torch.equal(part, alone(source, tensors[0])[:3])
    *on_gpus, (last, _) = groups
    assert {device.type for device, _ in on_gpus} == {"cuda"} and last.type == "cpu"
    assert {device.index for device, _ in on_gpus} >= {0, 1}
    assert sorted(name for _, names in on_gpus for name in names) == [t.name for t in tensors]


def alone(source: FolderSource, tensor: SourceTensor) -> torch.Tensor:
    """A tensor that the CPU decodes, whatever a test has put in the place of `read_tensors`."""
    return read_tensors(source, [tensor], torch.device("cpu"), Workers(1))[0]


def _stays(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("device", ["auto", {"": "cpu"}], ids=str)
@pytest.mark.parametrize("kept", ["dense", "packed"])
def test_a_device_map(device: Any, kept: str, larger):
    pytest.importorskip("accelerate")
    model = load_model(larger["llama"] / "small", device=device, residency=kept)
    expected = dense_copy(model, larger["llama"] / "plain", model.device)
    assert_same_logits(model, expected, exact=kept == "dense")


def test_a_device_map_without_accelerate(larger, monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(NeuzipError, match="the device map 'auto' needs the package accelerate"):
        load_model(larger["llama"] / "small", device="auto")


def test_residencies_that_cannot_be(larger):
    folder = larger["llama"] / "small"
    with pytest.raises(UsageError, match="`residency='small'`: there is no such") as caught:
        load_model(folder, residency="small")
    assert caught.value.hint == "give one of 'dense', 'packed', 'ans'"
    with pytest.raises(UsageError, match="'ans' needs CUDA devices") as caught:
        load_model(folder, residency="ans")
    assert "device='cuda'" in caught.value.hint and "residency='packed'" in caught.value.hint
    with pytest.raises(UsageError, match=r"is for bf16 and fp16 weights, not torch.float32"):
        load_model(folder, torch.float32, residency="packed")


def test_fp32_checkpoints_are_packed_after_the_cast(larger, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(larger["llama"] / "plain", dtype=torch.float32)
    model.save_pretrained(tmp_path / "single")
    compress(tmp_path / "single", tmp_path / "small")
    model = load_model(tmp_path / "small", torch.bfloat16, residency="packed")
    assert residency.memory(model).of("packed").weights > 0
    dense_copy(model, larger["llama"] / "plain")


def test_without_transformers_5(larger, monkeypatch):
    monkeypatch.delattr(HfQuantizer, "get_quantize_ops")
    with pytest.raises(NeuzipError, match="the residency 'packed' needs transformers 5, not "):
        load_model(larger["llama"] / "small", residency="packed")


def test_what_does_not_fit_is_named_in_any_residency(larger, tmp_path: Path):
    folder = Path(shutil.copytree(larger["llama"] / "small", tmp_path / "broken"))
    edit_config(folder, vocab_size=400, num_hidden_layers=1)
    with pytest.raises(
        NeuzipError, match=r"has no place for: .*; tensors have another shape .*: lm_head.weight"
    ):
        load_model(folder, residency="packed")


def test_damage_is_found_in_any_residency(larger, tmp_path: Path):
    folder = Path(shutil.copytree(larger["mixtral"] / "small", tmp_path / "broken"))
    damage(folder / "model.safetensors")
    with pytest.raises(FormatError, match="damaged"):
        load_model(folder, residency="packed")


def test_a_failure_to_compress_is_not_lost(larger, monkeypatch):
    def fails(*_: object) -> torch.nn.Parameter:
        raise FileNotFoundError("the kernel")

    monkeypatch.setattr(residency, "compress", fails)
    with pytest.raises(NeuzipError, match="the kernel"):
        load_model(larger["llama"] / "small", residency="packed")


def greedy(model: PreTrainedModel, count: int) -> torch.Tensor:
    ids = torch.tensor([[5, 77, 1234, 8, 600]], device=model.device)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
    ).cpu()


def test_a_trained_model_says_the_same_packed(neuzip_data: Path):
    folder = neuzip_data / "wikilm-26m"
    model = load_model(folder, residency="packed")
    held = residency.memory(model)
    assert 8 * held.of("packed").stored_bytes / held.of("packed").weights < 11.5
    assert torch.equal(greedy(model, 8), greedy(load_model(folder), 8))


# What does not fit


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "neuzip" / "original" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 3},
            "tensors that LlamaForCausalLM needs are missing: model.layers.2.input_.*, .* and 4 more",
        ),
        (
            {"num_hidden_layers": 1},
            "LlamaForCausalLM has no place for: model.layers.1.input_layernorm.weight, .* and 4 more",
        ),
        (
            {"vocab_size": 95},
            "another shape than the config says: lm_head.weight, model.embed_tokens.weight",
        ),
        ({"model_type": "no-such-model"}, "transformers .* cannot read its config.json: .*no-such-model"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "cannot make a model of it: .*ViTConfig"),
        (
            {
                "model_type": "own",
                "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Own"},
            },
            "cannot read its config.json",
        ),
    ],
    ids=["missing", "left over", "shape", "unknown", "not a language model", "code of its own"],
)
def test_weights_that_do_not_fit_are_named(changes, message, broken: Path):
    edit_config(broken, **changes)
    with pytest.raises(NeuzipError, match=message):
        load_model(broken)


def test_memory_that_ran_out_is_not_the_fault_of_transformers(broken: Path, monkeypatch):
    monkeypatch.setattr(load, "skeleton_of", lambda config: torch.empty(1 << 62, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="allocate 4611686018427387904 bytes") as caught:
        load_model(broken)
    assert is_out_of_memory(caught.value)


@pytest.mark.slow
def test_the_hint_for_a_model_without_text_is_no_other_version(broken: Path):
    edit_config(broken, model_type="vit", architectures=["ViTModel"])
    with pytest.raises(NeuzipError) as caught:
        load_model(broken)
    assert (
        caught.value.hint
        == "models that do not predict text can be compressed and restored, but not run here"
    )


@pytest.mark.parametrize(
    "claim",
    [
        {"num_hidden_layers": 2_000_000},
        {"num_hidden_layers": 10**15},
        {"n_layer": 2_000_000},
        {"vision_config": {"depth": 2_000_000}},
    ],
    ids=str,
)
def test_more_layers_than_there_are_tensors_are_not_built(claim: dict[str, Any], broken: Path, monkeypatch):
    monkeypatch.setattr(load, "skeleton_of", lambda config: pytest.fail("it was built"))
    monkeypatch.setattr(
        config_module.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was made")
    )
    edit_config(broken, **claim)
    with pytest.raises(FormatError, match=r"[0,]+ layers, but the weights are \d+ tensors") as caught:
        load_model(broken)
    assert caught.value.file == str(broken / "neuzip" / "original" / "config.json")
    assert str(caught.value.field).rpartition(".")[2] in ("num_hidden_layers", "n_layer", "depth")


def test_layers_that_share_weights_may_be_more_than_tensors(broken: Path):
    edit_config(broken, num_nextn_layers=256, mtp_depth=80)
    load_model(broken)


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "target_modules": ["q_proj"]}


@pytest.mark.parametrize("kept", ["dense", pytest.param("packed", marks=needs_version_5)])
def test_an_adapter_beside_the_model_is_refused_by_name(kept: str, broken: Path):
    (broken / "adapter_config.json").write_text(json.dumps(ADAPTER))
    with pytest.raises(
        NeuzipError, match="a LoRA adapter lies beside the model, of the base model 'org/base'"
    ) as caught:
        load_model(broken, residency=kept)
    assert caught.value.message.startswith(str(broken / "adapter_config.json"))
    assert "merge_and_unload" in caught.value.hint


def test_a_folder_with_an_adapter_alone_says_of_which_model(tmp_path: Path, neuzip):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    said = neuzip("eval", tmp_path, "--text", "demo")
    assert said.exit_code == 1
    assert f"{tmp_path / 'adapter_config.json'}: the folder holds a LoRA adapter alone" in said.stderr
    assert "'org/base'" in said.stderr and "config.json, so it is not known" not in said.stderr


def test_code_in_the_folder_is_not_run(broken: Path):
    trap = broken / "trap"
    for folder in (broken, broken / "neuzip" / "original"):
        (folder / "code.py").write_text(f"open({str(trap)!r}, 'w')")
    edit_config(broken, auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Own"})
    load_model(broken)  # the model type is one that transformers has, so it needs no code
    assert not trap.exists()


def test_damaged_weights_are_found_while_loading(broken: Path):
    path = broken / "model.safetensors"
    damage(path)
    with pytest.raises(FormatError, match="damaged") as caught:
        load_model(broken)
    assert caught.value.file == str(path)
    assert caught.value.tensor is not None


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (["neuzip/original/config.json", "config.json"], "has no config.json"),
        (["model.safetensors"], "was compressed, but its .safetensors files are gone"),
    ],
)
def test_missing_files_are_named(remove: list[str], message: str, broken: Path):
    for name in remove:
        (broken / name).unlink()
    with pytest.raises(NeuzipError, match=message):
        load_model(broken)


def test_a_folder_whose_weights_have_another_name_is_refused(broken: Path):
    (broken / "model.safetensors").rename(broken / "weights.safetensors")
    with pytest.raises(NeuzipError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_model(broken)


def test_missing_shard_is_named(compressed, tmp_path: Path):
    folder = Path(shutil.copytree(compressed["sharded"], tmp_path / "broken"))
    index = folder / "neuzip" / "original" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(FormatError, match=r"the shard 'gone.safetensors' is missing"):
        load_model(folder)


def test_a_file_is_no_model(compressed):
    with pytest.raises(NeuzipError, match=r"model.safetensors: has no config.json"):
        load_model(compressed["tied"] / "model.safetensors")


@pytest.mark.parametrize("place", [".", "model.safetensors", "nowhere"])
def test_no_tokenizer(place: str, compressed):
    with pytest.raises(NeuzipError, match="there is no tokenizer"):
        load_tokenizer(compressed["tied"] / place)


# Tensors


def test_every_dtype_of_safetensors_that_torch_has(tmp_path: Path, save):
    random = np.random.default_rng(0)
    kinds = [dtype for dtype, bits in DTYPE_BITS.items() if bits >= 8]
    arrays = {
        dtype: random.integers(0, 2 if dtype == "BOOL" else 256, 24 * DTYPE_BITS[dtype] // 8, np.uint8)
        for dtype in kinds
    }
    save(tmp_path / "a.safetensors", {d: (d, (2, 3, 4), array) for d, array in arrays.items()})
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    expected = load_file(tmp_path / "a.safetensors")
    for name, tensor in load_state_dict(tmp_path / "b.safetensors"):
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == (2, 3, 4)
        assert tensor.view(torch.uint8).numpy().tobytes() == arrays.pop(name).tobytes()
    assert not arrays
    assert set(TORCH_DTYPES) == set(kinds)


def test_dtypes_that_torch_does_not_have_are_named(tmp_path: Path, save):
    save(tmp_path / "a.safetensors", {"w": ("F6_E2M3", (4,), np.zeros(3, np.uint8))})
    with pytest.raises(FormatError, match=r"tensor 'w', field 'dtype': torch .* has no dtype for F6_E2M3"):
        list(load_state_dict(tmp_path / "a.safetensors"))


def test_scalars_and_empty_tensors(tmp_path: Path, save):
    save(
        tmp_path / "a.safetensors",
        {"one": ("F32", (), np.float32([7])), "none": ("BF16", (0, 3), np.zeros(0, np.uint8))},
    )
    tensors = dict(load_state_dict(tmp_path / "a.safetensors"))
    assert torch.equal(tensors["one"], torch.tensor(7.0))
    assert tensors["none"].shape == (0, 3)


def test_state_dict_covers_all_files_and_refuses_two_of_a_name(compressed, tmp_path: Path, save):
    model = load_model(compressed["sharded"])
    tensors = dict(load_state_dict(compressed["sharded"]))
    assert tensors.keys() == dict(model.named_parameters()).keys()
    for folder in ("unet", "vae"):
        save(tmp_path / "pipe" / folder / "model.safetensors", {"w": ("U8", (1,), np.zeros(1, np.uint8))})
    with pytest.raises(NeuzipError, match=r"'w' is in unet/model.safetensors and in vae/model.safetensors"):
        list(load_state_dict(tmp_path / "pipe"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["own dtype", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_on_a_gpu(kind, dtype, checkpoints, compressed, monkeypatch):
    places: set[int] = set()

    def noted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        found = read_tensors(*arguments, **options)
        places.update(t.data_ptr() for t in found)
        return found

    monkeypatch.setattr(stored_tensors, "read_tensors", noted)
    for folder in (compressed[kind], checkpoints[kind]):
        expected = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=dtype or "auto").to("cuda")
        model = load_model(folder, dtype, "cuda")
        assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cuda"}
        if dtype is None and kind not in MADE_ANEW:
            assert {p.data_ptr() for p in model.parameters()} <= places, "went through the host"
        assert_same(model, expected)


@pytest.mark.gpu
def test_damaged_weights_are_found_on_a_gpu(broken: Path):
    path = broken / "model.safetensors"
    damage(path)
    with pytest.raises(FormatError, match="damaged") as caught:
        load_model(broken, device="cuda")
    assert caught.value.file == str(path)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["dense", "packed", "ans"])
@pytest.mark.parametrize("form", ["plain", "small"])
@pytest.mark.parametrize("kind", COMPRESSED)
def test_residencies_on_a_gpu(kind: str, form: str, kept: str, larger, monkeypatch):
    monkeypatch.setattr(stored_tensors, "GROUP", 600_000)  # so that there are some
    model = load_model(larger[kind] / form, device="cuda", residency=kept)
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cuda"}
    held = residency.memory(model)
    assert (held.of("ans").weights > 0) == (kept == "ans")
    if kept == "dense" and kind == "mixtral":
        model.set_experts_implementation("eager")
    # The products of a pool of experts add in another order than those of transformers.
    exact = kept == "dense" or (kept == "ans" and kind != "mixtral")
    assert_same_logits(model, dense_copy(model, larger[kind] / "plain", "cuda"), exact=exact)


@pytest.mark.gpu
@pytest.mark.parametrize(("kept", "share"), [("packed", 0.74), ("ans", 0.72)])
def test_memory_while_loading(kept: str, share: float, tmp_path: Path, monkeypatch):
    """Beside what is compressed: a group of dense weights, its codes, and what a weight's coder needs."""
    monkeypatch.setattr(stored_tensors, "GROUP", 64 << 20)  # a share of this model as of one of several GB
    sizes = {"vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 10}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=16)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    dense = residency.memory(model).total.dense_bytes
    del model
    compress(tmp_path / "plain", tmp_path / "small", device=choose("cuda", dense))
    load_model(tmp_path / "small", device="cuda", residency=kept)  # kernels are compiled
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(tmp_path / "small", device="cuda", residency=kept)
    peak = torch.cuda.max_memory_allocated() - before
    held = residency.memory(model).total
    assert held.stored_bytes < share * dense
    nbytes = [p.numel() * p.dtype.itemsize for p in model.parameters()]
    slack = sum(n > 1 << 20 for n in nbytes) << 20  # torch leaves up to 1 MiB of a block of memory unused
    coder = max(nbytes) if kept == "packed" else 3 * max(nbytes) + triton_encode.SCRATCH
    limit = held.stored_bytes + 2 * stored_tensors.GROUP + coder + slack
    assert peak < limit < dense


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["dense", "packed", "ans"])
def test_a_trained_model_says_the_same_on_a_gpu(kept: str, neuzip_data: Path, tmp_path: Path):
    compress(neuzip_data / "wikilm-26m", tmp_path / "small")
    original = AutoModelForCausalLM.from_pretrained(neuzip_data / "wikilm-26m", dtype="auto").to("cuda")
    model = load_model(tmp_path / "small", device="cuda", residency=kept)
    text = greedy(model, 256)
    if kept == "packed":  # sums in another order may decide ties otherwise
        judged = agreement(original, text[:, :5], text[:, 5:])
        assert judged.chosen + judged.tied == judged.tokens, judged
        assert judged.tied <= 8, judged
    else:
        assert torch.equal(text, greedy(original, 256))


LLAMA_MAP = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1,
             "model.norm": 1}  # fmt: skip
GPT2_MAP = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "transformer.h.0": 0,
            "transformer.h.1": 1, "transformer.ln_f": 1}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kept", ["dense", "packed", "ans"])
@pytest.mark.parametrize("kind", COMPRESSED)
def test_two_gpus(kind: str, kept: str, larger):
    pytest.importorskip("accelerate")
    head = 0 if kind in ("llama, tied", "gpt2") else 1
    device_map = (GPT2_MAP if kind == "gpt2" else LLAMA_MAP) | {"lm_head": head}
    model = load_model(larger[kind] / "small", device=device_map, residency=kept)
    assert {p.device.index for p in model.parameters()} == {0, 1}
    if kept == "dense" and kind == "mixtral":
        model.set_experts_implementation("eager")
    # The products of a pool of experts add in another order than those of transformers.
    exact = kept == "dense" or (kept == "ans" and kind != "mixtral")
    assert_same_logits(model, dense_copy(model, larger[kind] / "plain", "cuda"), exact=exact)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kept", ["packed", "ans"])
def test_accelerate_spreads_a_model_over_gpus(kept: str, larger):
    pytest.importorskip("accelerate")
    model = load_model(larger["llama"] / "small", device="auto", residency=kept)
    assert len({parameter.device for parameter in model.parameters()}) > 1
    assert_same_logits(model, dense_copy(model, larger["llama"] / "plain", "cuda"), exact=kept != "packed")
