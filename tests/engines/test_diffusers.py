"""diffusers: compressed pipelines load as the original ones, dense and packed, with adapters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    FluxTransformer2DModel,
    PipelineQuantizationConfig,
    StableDiffusionPipeline,
    TensorParallelConfig,
    UNet2DConditionModel,
)
from diffusers.utils import logging
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file as load_plain_file
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BitsAndBytesConfig, CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

import neuzip
from neuzip.distribution import ENGINES
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.runtime.diffusers import patches
from neuzip.runtime.diffusers.reading import original_config, refusing
from neuzip.runtime.residency import is_compressed, memory

logging.set_verbosity_error()
logging.disable_progress_bar()

BF16 = torch.bfloat16
COMPONENTS = ("unet", "vae", "text_encoder")
PACKED = PipelineQuantizationConfig(quant_backend="neuzip", quant_kwargs={"residency": "packed"})
WEIGHTS = "diffusion_pytorch_model.safetensors"


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", "<s>", "</s>", "a", "cat"]
    vocabulary = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    words_of = Tokenizer(vocabulary)
    words_of.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words_of, model_max_length=8,
        pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip


def stable_diffusion() -> StableDiffusionPipeline:
    """A pipeline of two libraries, with some weights of 65,536 elements and more, which are packed."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8)
    text = CLIPTextConfig(
        vocab_size=1100, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return StableDiffusionPipeline(
        unet=unet, vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer(),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    ).to(dtype=BF16)  # fmt: skip


def flux() -> FluxTransformer2DModel:
    """A transformer without convolutions, in which two weights are equal."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32,
        num_attention_heads=8, joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 12, 12),
    ).to(BF16)  # fmt: skip
    attention = model.transformer_blocks[0].attn
    attention.to_k.weight.data.copy_(attention.to_q.weight)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: `sd` is a pipeline, `flux` a model, `shards` the model in two files; .nz, compressed."""
    folder = tmp_path_factory.mktemp("diffusers")
    stable_diffusion().save_pretrained(folder / "sd")
    flux().save_pretrained(folder / "flux")
    save_shards(folder / "flux", folder / "shards")
    for name in ("sd", "flux", "shards"):
        neuzip.compress_checkpoint(folder / name, folder / f"{name}.nz")
    return folder


def save_shards(model: Path, folder: Path) -> None:
    """The same model with one weight, equal to another, in a shard of its own."""
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    tensors = load_plain_file(model / WEIGHTS)
    alone = "transformer_blocks.0.attn.to_k.weight"
    weight_map = {}
    for number, names in enumerate((tensors.keys() - {alone}, {alone}), 1):
        shard = f"diffusion_pytorch_model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def lora(folder: Path) -> Path:
    """An adapter for linear layers, convolutions and the text encoder."""
    pipeline = load(folder / "sd")
    torch.manual_seed(1)
    targets = {"unet": ["to_q", "proj_in", "ff.net.0.proj"], "text_encoder": ["q_proj"]}
    for name, modules in targets.items():
        config = LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
        getattr(pipeline, name).add_adapter(config)
    StableDiffusionPipeline.save_lora_weights(
        folder / "lora",
        unet_lora_layers=get_peft_model_state_dict(pipeline.unet),
        text_encoder_lora_layers=get_peft_model_state_dict(pipeline.text_encoder),
    )
    return folder / "lora"


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """The image of the original pipeline."""
    return image(load(folder / "sd"))


def load(source: Path, **options: Any) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(source, **{"dtype": BF16, **options})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipeline: Any) -> torch.Tensor:
    noise = torch.Generator().manual_seed(2)
    made: torch.Tensor = pipeline(
        "a cat", num_inference_steps=1, guidance_scale=2.0, height=8, width=8, output_type="pt",
        generator=noise,
    ).images  # fmt: skip
    return made


def transformer(source: Path, **options: Any) -> Any:
    return FluxTransformer2DModel.from_pretrained(source, **{"dtype": BF16, **options})


def prediction(model: Any) -> torch.Tensor:
    noise = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise).to(BF16)

    with torch.no_grad():
        predicted: torch.Tensor = model(
            hidden_states=normal(1, 4, 4), encoder_hidden_states=normal(1, 2, 64),
            pooled_projections=normal(1, 64), timestep=torch.tensor([0.5], dtype=BF16),
            img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(2, 3), guidance=None,
        ).sample  # fmt: skip
    return predicted


def packed_weights(model: torch.nn.Module) -> int:
    return memory(model).of("packed").weights


def assert_same_tensors(model: torch.nn.Module, original: torch.nn.Module) -> None:
    tensors, originals = model.state_dict(), original.state_dict()
    assert tensors.keys() == originals.keys()
    for name, tensor in tensors.items():
        value = tensor.dense() if is_compressed(tensor) else tensor
        assert value.dtype == originals[name].dtype and torch.equal(value, originals[name]), name


LOAD_WITHOUT_IMPORT = """
import sys
{first}
from pathlib import Path
import torch
from diffusers import DiffusionPipeline

torch.manual_seed(9)  # random weights would be others than those of the test
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
for name in ("unet", "vae", "text_encoder"):
    torch.save(getattr(pipeline, name).state_dict(), Path(sys.argv[2]) / name)
{last}
"""


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("", "import sys; assert 'neuzip.runtime.diffusers.patches' in sys.modules"),
        ("import transformers.modeling_utils", ""),
        # neuzip comes when both libraries are there, and functions have been imported from module to module
        ("import diffusers.loaders.lora_base, transformers.modeling_utils, neuzip", ""),
    ],
    ids=["diffusers first", "transformers first", "neuzip last"],
)
def test_a_pipeline_loads_whichever_library_is_imported_first(
    folder: Path, tmp_path: Path, first: str, last: str
) -> None:
    code = LOAD_WITHOUT_IMPORT.format(first=first, last=last)
    autoload = {"NEUZIP_AUTOLOAD": "0"} if "neuzip" in first else {}
    subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder / "sd.nz"), str(tmp_path)],
        check=True, timeout=600, env=os.environ | autoload,
    )  # fmt: skip
    original = load(folder / "sd")
    for name in COMPONENTS:
        tensors = torch.load(tmp_path / name)
        originals = getattr(original, name).state_dict()
        assert tensors.keys() == originals.keys()
        assert all(torch.equal(tensors[key], originals[key]) for key in tensors)


def test_a_compressed_pipeline_is_a_plain_one_in_memory(folder: Path, expected: torch.Tensor) -> None:
    pipeline, original = load(folder / "sd.nz"), load(folder / "sd")
    for name in COMPONENTS:
        model = getattr(pipeline, name)
        assert_same_tensors(model, getattr(original, name))
        assert not hasattr(model, "hf_quantizer") and not getattr(model, "is_quantized", False)
    for name in ("unet", "vae"):
        configs = [dict(getattr(p, name).config) for p in (pipeline, original)]
        for config in configs:
            del config["_name_or_path"]
        assert configs[0] == configs[1]
    assert torch.equal(image(pipeline), expected)


@pytest.mark.parametrize("name", ["sd", "sd.nz"])
@pytest.mark.parametrize("by", ["backend", "mapping"])
def test_packed_on_arrival(folder: Path, expected: torch.Tensor, name: str, by: str) -> None:
    config = neuzip.NeuzipConfig("packed")
    by_component = PipelineQuantizationConfig(quant_mapping={"unet": config, "text_encoder": config})
    pipeline = load(folder / name, quantization_config=PACKED if by == "backend" else by_component)
    original = load(folder / "sd")
    for component in COMPONENTS:
        assert_same_tensors(getattr(pipeline, component), getattr(original, component))
    assert packed_weights(pipeline.unet) == 6 * 65536 * 2 and packed_weights(pipeline.text_encoder) == 70400
    assert packed_weights(pipeline.vae) == 0
    assert not is_compressed(pipeline.unet.conv_in.weight)
    used = memory(pipeline.unet).of("packed")
    assert used.stored_bytes < 0.75 * used.dense_bytes
    assert torch.equal(image(pipeline), expected)


@pytest.mark.parametrize("options", [{}, {"quantization_config": PACKED}], ids=["dense", "packed"])
def test_an_adapter_gives_the_images_of_the_original(
    folder: Path, lora: Path, expected: torch.Tensor, options: dict[str, Any]
) -> None:
    original, pipeline = load(folder / "sd"), load(folder / "sd.nz", **options)
    for one in (original, pipeline):
        one.load_lora_weights(lora)
    adapted = image(original)
    assert not torch.equal(adapted, expected)
    assert torch.equal(image(pipeline), adapted)
    if options:
        with pytest.raises(NeuzipError, match=r"fuse_lora would change compressed weights of UNet2D.*frozen"):
            pipeline.fuse_lora()
        assert torch.equal(image(pipeline), adapted), "nothing may be fused by half"
    else:
        for one in (original, pipeline):
            one.fuse_lora()
        assert torch.equal(image(pipeline), image(original))
        return
    pipeline.unload_lora_weights()
    assert torch.equal(image(pipeline), expected)


@pytest.mark.parametrize("name", ["flux.nz", "shards", "shards.nz"])
@pytest.mark.parametrize("residency", ["dense", "packed"])
def test_a_sharded_model_is_complete(folder: Path, name: str, residency: str) -> None:
    options = {} if residency == "dense" else {"quantization_config": neuzip.NeuzipConfig(residency)}
    model, info = transformer(folder / name, output_loading_info=True, **options)
    assert not any(info.values()), info
    original = transformer(folder / "flux")
    assert_same_tensors(model, original)
    assert torch.equal(prediction(model), prediction(original))
    assert (packed_weights(model) > 3_600_000) == (residency == "packed")


def test_the_second_shard_has_no_stream(folder: Path) -> None:
    """Or the test above does not show that shards of aliases are opened, which the index does not name."""
    index = json.loads((folder / "shards.nz" / f"{WEIGHTS}.index.json").read_text())
    assert set(index["weight_map"].values()) == {"diffusion_pytorch_model-00001-of-00002.safetensors"}


def test_a_dense_pipeline_is_saved_as_the_original(folder: Path, tmp_path: Path) -> None:
    load(folder / "sd.nz").save_pretrained(tmp_path)
    for path in (folder / "sd").rglob("*.safetensors"):
        assert (tmp_path / path.relative_to(folder / "sd")).read_bytes() == path.read_bytes()
    assert "neuzip" not in (tmp_path / "unet" / "config.json").read_text().replace("sd.nz", "")


def test_a_packed_pipeline_is_saved_compressed(folder: Path, tmp_path: Path, expected: torch.Tensor) -> None:
    load(folder / "sd", quantization_config=PACKED).save_pretrained(tmp_path / "saved")
    for name in ("unet", "text_encoder"):
        neuzip.decompress_checkpoint(tmp_path / "saved" / name, tmp_path / name)
        (weights,) = (tmp_path / name).glob("*.safetensors")
        assert weights.read_bytes() == (folder / "sd" / name / weights.name).read_bytes()
    assert torch.equal(image(load(tmp_path / "saved")), expected)


def test_a_packed_model_is_saved_in_shards_again(folder: Path, tmp_path: Path) -> None:
    model = transformer(folder / "flux", quantization_config=neuzip.NeuzipConfig("packed"))
    model.save_pretrained(tmp_path / "saved", max_shard_size="4MB")
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) > 1
    assert_same_tensors(transformer(tmp_path / "saved"), transformer(folder / "flux"))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"push_to_hub": True}, "saved to a folder only"), ({"safe_serialization": False}, "safetensors only")],
)
def test_other_forms_of_a_packed_model_are_not_saved(
    folder: Path, tmp_path: Path, options: dict[str, bool], message: str
) -> None:
    model = transformer(folder / "flux", quantization_config=neuzip.NeuzipConfig("packed"))
    with pytest.raises(NeuzipError, match=message):
        model.save_pretrained(tmp_path / "saved", **options)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
def test_dtypes(folder: Path, dtype: torch.dtype | None) -> None:
    """Without a dtype diffusers loads fp32."""
    original = transformer(folder / "flux", dtype=dtype)
    assert_same_tensors(transformer(folder / "flux.nz", dtype=dtype), original)
    config = neuzip.NeuzipConfig("packed")
    if dtype is torch.float16:
        model = transformer(folder / "flux.nz", dtype=dtype, quantization_config=config)
        assert_same_tensors(model, original)
        return
    with pytest.raises(UsageError, match=r"'packed' is for bf16 and fp16 weights, (not|and diffusers loads)"):
        transformer(folder / "flux.nz", dtype=dtype, quantization_config=config)


def test_a_dense_config_leaves_a_plain_model(folder: Path) -> None:
    model = transformer(folder / "flux.nz", quantization_config=neuzip.NeuzipConfig("dense"))
    assert_same_tensors(model, transformer(folder / "flux"))
    assert model.to(torch.float16).dtype == torch.float16


def test_dequantize(folder: Path) -> None:
    model = transformer(folder / "flux.nz", quantization_config=neuzip.NeuzipConfig("packed"))
    model.dequantize()
    assert packed_weights(model) == 0
    assert_same_tensors(model, transformer(folder / "flux"))


@pytest.mark.parametrize("residency", ["dense", "packed"])
def test_a_single_file(folder: Path, tmp_path: Path, residency: str) -> None:
    file = tmp_path / "flux.nz.safetensors"
    neuzip.compress_checkpoint(folder / "flux" / WEIGHTS, file)
    options = {} if residency == "dense" else {"quantization_config": neuzip.NeuzipConfig(residency)}
    model = FluxTransformer2DModel.from_single_file(
        str(file), config=str(folder / "flux"), dtype=BF16, **options
    )
    assert_same_tensors(model, transformer(folder / "flux"))
    assert (packed_weights(model) > 0) == (residency == "packed")


def offload_modules(model: torch.nn.Module) -> None:
    """As enable_model_cpu_offload."""
    cpu_offload_with_hook(model, torch.device("cpu"))


def offload_layers(model: torch.nn.Module) -> None:
    """As enable_sequential_cpu_offload."""
    cpu_offload(model, torch.device("cpu"))
    assert model.x_embedder.weight.is_meta


def offload_groups(model: Any) -> None:
    device = torch.device("cpu")
    model.enable_group_offload(onload_device=device, offload_device=device, offload_type="leaf_level")


@pytest.mark.parametrize("offload", [offload_modules, offload_layers, offload_groups])
@pytest.mark.parametrize("residency", ["dense", "packed"])
def test_offloading(folder: Path, offload: Callable[[Any], None], residency: str) -> None:
    model = transformer(folder / "flux.nz", quantization_config=neuzip.NeuzipConfig(residency))
    expected = prediction(transformer(folder / "flux"))
    offload(model)
    assert torch.equal(prediction(model), expected)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_maps(folder: Path, device_map: Any) -> None:
    config = neuzip.NeuzipConfig("packed")
    model = transformer(folder / "flux.nz", quantization_config=config, device_map=device_map)
    assert packed_weights(model) and torch.equal(prediction(model), prediction(transformer(folder / "flux")))


def test_places_where_packed_weights_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'packed' cannot spread weights over disk"):
        transformer(
            folder / "flux.nz", quantization_config=neuzip.NeuzipConfig("packed"),
            device_map={"": "disk"}, offload_folder=tmp_path,
        )  # fmt: skip


def test_settings_of_language_models_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="`expert_memory=1`: has no effect on a model of diffusers"):
        transformer(folder / "flux", quantization_config=neuzip.NeuzipConfig("packed", expert_memory=1))


def test_a_packed_transformer_compiles_into_one_graph(folder: Path) -> None:
    model = transformer(folder / "flux.nz", quantization_config=neuzip.NeuzipConfig("packed"))
    expected = prediction(model)
    assert torch.equal(prediction(torch.compile(model, backend="aot_eager", fullgraph=True)), expected)


@pytest.fixture
def compressed_copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "flux.nz", tmp_path / "flux.nz"))


def test_a_damaged_file_is_named(compressed_copy: Path) -> None:
    path = compressed_copy / WEIGHTS
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(FormatError, match=f"{WEIGHTS}, tensor '.*': has the checksum .*damaged"):
        transformer(compressed_copy)


def test_a_later_format_is_refused(compressed_copy: Path) -> None:
    config = json.loads((compressed_copy / "config.json").read_text())
    config["quantization_config"]["version"] += 1
    (compressed_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="format version 2; this neuzip reads version 1"):
        transformer(compressed_copy)


def test_the_original_s_own_quantization_is_found_again() -> None:
    original = {"_class_name": "X", "quantization_config": {"quant_method": "torchao"}}
    section = {"quant_method": "neuzip", "version": 1, "lossless": True}
    section["original"] = original["quantization_config"]
    compressed = original | {"quantization_config": section, "transformers_weights": "a sentence"}
    assert original_config(compressed) == original
    assert original_config(original) is original


def test_another_quantizer_takes_a_compressed_folder_for_a_plain_one(folder: Path) -> None:
    """It fails for want of bitsandbytes or a GPU, as with the original."""
    reasons = []
    for name in ("flux", "flux.nz"):
        with pytest.raises((ImportError, RuntimeError, ValueError)) as failure:
            transformer(folder / name, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
        reasons.append(str(failure.value))
    assert reasons[0] == reasons[1] and "neuzip" not in reasons[0]


def test_tensor_parallel_loads_are_refused(folder: Path) -> None:
    with pytest.raises(NeuzipError, match=f"{WEIGHTS}: is compressed, and diffusers reads slices of plain"):
        transformer(folder / "flux.nz", parallel_config=TensorParallelConfig(tp_degree=2))


def test_an_unsupported_version_refuses_compressed_folders_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that lacks a name that neuzip needs."""
    assert patches.missing_names() == []
    monkeypatch.setitem(patches.NEEDED, "diffusers.models.modeling_utils", ("ModelMixin.gone",))
    missing = patches.missing_names()
    assert missing == ["diffusers.models.modeling_utils.ModelMixin.gone"]
    load_config = refusing(
        lambda _cls, path: json.loads((path / "config.json").read_text()), *patches.unsupported(missing)
    )
    assert load_config(object, folder / "flux")["_class_name"] == "FluxTransformer2DModel"
    with pytest.raises(NeuzipError, match=r"does not know how diffusers [0-9.]+ reads files") as refusal:
        load_config(object, folder / "flux.nz")
    assert ENGINES["diffusers"].versions in str(refusal.value.hint)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("place", ["device_map", "to", "model", "sequential", "group"])
def test_packed_on_a_gpu(folder: Path, place: str) -> None:
    """Within 2 % of the largest value of the dense model's image, of values between 0 and 1."""
    dense = load(folder / "sd").to("cuda")
    options = {"device_map": "cuda"} if place == "device_map" else {}
    packed = load(folder / "sd.nz", quantization_config=PACKED, **options)
    if place == "to":
        packed.to("cuda")
    elif place == "model":
        packed.enable_model_cpu_offload()
    elif place == "sequential":
        packed.enable_sequential_cpu_offload()
    elif place == "group":
        packed.to("cuda")
        packed.unet.enable_group_offload(onload_device=torch.device("cuda"), offload_type="leaf_level")
    torch.testing.assert_close(image(packed).float(), image(dense).float(), rtol=0, atol=0.02)
