"""Vision-language models, which are no causal language models to transformers: what neuzip does with text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from models import HAS_VERSION_5
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from neuzip.compress import compress
from neuzip.compress.rules_file import read_plan_file
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
IDS = torch.arange(3, 40)[None]
PACKED = [("small", "packed")] if HAS_VERSION_5 else []  # transformers 4 has the residency "dense" only


def llava() -> PreTrainedModel:
    vision = CLIPVisionConfig(**VISION, projection_dim=32).to_dict()
    text = LlamaConfig(**TEXT).to_dict()
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=255)
    )


def mistral3() -> PreTrainedModel:
    vision = PixtralVisionConfig(**VISION, head_dim=16).to_dict()
    text = MistralConfig(**TEXT, head_dim=32).to_dict()
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, image_token_index=255)
    )


def qwen2_5_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters" if HAS_VERSION_5 else "rope_scaling": rope},
            vision_config=vision,
            image_token_id=255,
            video_token_id=254,
            vision_start_token_id=253,
            vision_end_token_id=252,
        )
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llava": llava, "mistral3": mistral3, "qwen2_5_vl": qwen2_5_vl
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one of random weights in `plain`, the same compressed in `small`."""
    torch.manual_seed(0)
    found = tmp_path_factory.mktemp(request.param)
    MODELS[request.param]().bfloat16().save_pretrained(found / "plain")
    byte_tokenizer(adds_bos=False).save_pretrained(found / "plain")
    compress(found / "plain", found / "small")
    (found / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    return found


def test_logits_of_text_are_those_of_transformers(folder: Path):
    own = AutoModelForImageTextToText.from_pretrained(folder / "plain", dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        right = own(input_ids=IDS).logits
        for name, kept in (("plain", "dense"), ("small", "dense"), *PACKED):
            model = load_model(folder / name, residency=kept)
            assert torch.equal(model(input_ids=IDS).logits, right), (name, kept)
            assert len(decoder_layers(model)) == 3


@pytest.mark.slow
def test_commands_measure_and_go_on_with_text(folder: Path, tmp_path: Path, neuzip):
    text = folder / "text.txt"
    said = neuzip(
        *("eval", folder / "small", "--original", folder / "plain", "--text", text, "--conventions", "token"),
        "--json",
    )
    assert said.exit_code == 0, said.stderr
    assert said.json["comparison"]["identical"] is True
    assert said.json["after"]["formed"] is None
    for kept in ("dense", *(kept for _, kept in PACKED)):
        said = neuzip(
            "generate", folder / "small", "--prompt", "fox", "--max-new-tokens", 3, "--residency", kept
        )
        assert said.exit_code == 0, said.stderr
    said = neuzip("layers", folder / "plain", "--text", text, "--drop", 1, "--output", tmp_path / "fewer")
    assert said.exit_code == 0, said.stderr
    assert len(decoder_layers(load_model(tmp_path / "fewer"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "method"), [*((name, "fisher") for name in MODELS), ("llava", "measured")], indirect=["folder"]
)
def test_parts_that_no_text_goes_through_are_not_rounded_for_nothing(
    method: str, folder: Path, tmp_path: Path, neuzip
):
    options = (
        "--target-size",
        "70%",
        "--text",
        folder / "text.txt",
        "--scheme",
        "rounded",
        "--sensitivity",
        method,
    )
    said = neuzip("compress", folder / "plain", tmp_path / "out", *options, "--json")
    assert said.exit_code == 0, said.stderr
    rules = read_plan_file(tmp_path / "out.plan.toml")
    bits = {rule.match: 7 if (k := rule.scheme.mantissa_bits) is None else k for rule in rules}
    unseen = {name: k for name, k in bits.items() if "vis" in name or "projector" in name}
    of_text = [k for name, k in bits.items() if "layers" in name and name not in unseen]
    assert of_text
    assert said.json["target"]["estimated_groups"] >= len(unseen)
    assert min(unseen.values(), default=7) >= 3
