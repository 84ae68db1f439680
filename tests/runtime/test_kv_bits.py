"""Bits of a KV cache: what callers may give, plan files, and caches whose layers have different bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import neuzip
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import FORMS, HeadForm
from neuzip.runtime.kv_bits import (
    KVBits,
    LayerBits,
    as_bits,
    auto_limit,
    in_words,
    plan_bytes,
    read_plan,
    single,
)

LAYERS = (LayerBits(8, 3), LayerBits(2, 6), LayerBits(4, 4))


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def written(folder: Path, document: Any) -> Path:
    path = folder / "plan.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_plan_file_keeps_the_bits_of_each_layer(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_bytes(plan_bytes((*LAYERS, None), {"max_kld": 0.01}))
    for given in (path, str(path)):
        assert as_bits(given) == KVBits((*LAYERS, None), source=str(path))
    assert json.loads(path.read_text())["max_kld"] == 0.01
    with pytest.raises(UsageError, match=r"`kv_bits`: .*plan.json is for 4 layers, and the model has 3"):
        read_plan(path).of(3)


def test_a_plan_is_for_one_form(model: PreTrainedModel, tmp_path: Path):
    path = tmp_path / "plan.json"
    for form, other in (("rotated", "a4.8"), ("a4.8", "rotated")):
        path.write_bytes(plan_bytes(LAYERS, {"form": form}))
        words = rf"plan.json was made for the form {form} of a KV cache, not for {other}"
        assert KVCache(model.config, path, form=form).bits == LAYERS
        assert KVCache(model.config, path, form=FORMS[form]).bits == LAYERS
        for wrong in (other, FORMS[other]):
            with pytest.raises(UsageError, match=f"`bits`: .*{words}") as refusal:
                KVCache(model.config, path, form=wrong)
            assert f"`form='{form}'`" in refusal.value.hint
        with pytest.raises(UsageError, match=f"`kv_bits`: .*{words}") as refusal:
            neuzip.generate("nothing-here", "a", kv_bits=path, kv_form=other)
        assert f"`kv_form='{form}'`" in refusal.value.hint
        with pytest.raises(UsageError, match=words):
            neuzip.evaluate("nothing-here", text="demo", kv_bits=str(path), kv_form=other)
        with pytest.raises(UsageError, match=f"made for the form {form} .* not for this one"):
            KVCache(model.config, as_bits(path), form=HeadForm(key_group=32, value_group=32))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "not JSON"),
        ([1], "is no plan"),
        ({"layers": []}, "is no plan"),
        ({"neuzip_kv_plan": 2, "layers": []}, "version 2 is not known"),
        ({"neuzip_kv_plan": 1}, "no list of layers"),
        ({"neuzip_kv_plan": 1, "layers": []}, "no list of layers"),
        ({"neuzip_kv_plan": 1, "layers": [4]}, "no object of keys and values"),
        ({"neuzip_kv_plan": 1, "layers": [None], "form": "b5"}, "form 'b5' of a KV cache is not known"),
        ({"neuzip_kv_plan": 1, "layers": [None], "form": [4]}, r"form \[4\] of a KV cache is not known"),
        ({"neuzip_kv_plan": 1, "layers": [{"keys": 4}]}, "no object of keys and values"),
        ({"neuzip_kv_plan": 1, "layers": [{"keys": 4, "values": 9}]}, "1 to 8 bits, not 9"),
        ({"neuzip_kv_plan": 1, "layers": [{"keys": True, "values": 4}]}, "1 to 8 bits, not True"),
    ],
    ids=str,
)
def test_a_broken_plan_is_refused(document: Any, words: str, tmp_path: Path):
    with pytest.raises(FormatError, match=words) as refusal:
        read_plan(written(tmp_path, document))
    assert "plan.json" in str(refusal.value)


def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(NeuzipError, match="none: cannot be read"):
        read_plan(tmp_path / "none")


@pytest.mark.parametrize(
    "value",
    [0, 9, -4, True, 4.0, "", "9", "4/", "4/0", "8/4/2", "2 bits", "no-such-file.json", b"4", [], [4],
     [(4, 9)], ["84"], [(4,)], {}],
)  # fmt: skip
def test_what_is_no_number_of_bits_is_refused(value: Any):
    with pytest.raises(UsageError, match="`bits") as refusal:
        as_bits(value, "bits")
    assert refusal.value.hint


@pytest.mark.parametrize("text", ["auto", "auto:", "auto:x", "auto:0", "auto:-1", "auto:nan", "auto:inf"])
def test_auto_needs_a_divergence(text: str):
    with pytest.raises(UsageError, match=f"`kv_bits='{text}'`") as refusal:
        auto_limit(text)
    assert "auto:0.01" in refusal.value.hint


def test_the_library_says_who_chooses_bits():
    with pytest.raises(UsageError) as refusal:
        as_bits("auto:0.01")
    assert "choose_kv_bits" in refusal.value.hint


def test_one_number_is_told_only_where_all_have_it():
    assert single((LayerBits(4, 4), None)) == 4
    assert single((LayerBits(4, 3),)) is single(LAYERS) is single(None) is None
    assert in_words((LayerBits(4, 4), None)) == "4 bits"


def test_each_layer_of_a_cache_has_its_bits(model: PreTrainedModel):
    cache = KVCache(model.config, LAYERS)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, past_key_values=cache)
    heads = [(layer.key_heads, layer.value_heads) for layer in cache.layers]
    assert [(keys.bits, values.bits) for keys, values in heads] == [(8, 3), (2, 6), (4, 4)]
    widths = [bits for pair in LAYERS for bits in (pair.keys, pair.values)]
    codes = sum(one.words.nbytes for pair in heads for one in pair)
    assert codes == 2 * 32 * sum(widths) * heads[0][0].capacity // 8 and cache.bits == LAYERS
    own = sum(one.nbytes for pair in heads for one in pair)
    assert cache.nbytes == own + heads[0][0].path.nbytes


def test_a_cache_that_grows_keeps_the_bits_of_keys_and_values(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("neuzip.runtime.hf.kv_layers.GROWTH", 4)
    ids = torch.randint(64, (1, 11), generator=torch.Generator().manual_seed(1))
    whole, grown = KVCache(model.config, LAYERS), KVCache(model.config, LAYERS)
    expected = model(input_ids=ids, past_key_values=whole).logits[:, -1]
    for token in ids.unbind(1):
        logits = model(input_ids=token[:, None], past_key_values=grown).logits[:, -1]
    assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-4)
    for one, other in zip(whole.layers, grown.layers, strict=True):
        assert (one.key_heads.bits, one.value_heads.bits) == (other.key_heads.bits, other.value_heads.bits)


def test_a_static_cache_gives_the_tokens_of_one_that_grows(model: PreTrainedModel):
    ids = torch.randint(1, 64, (1, 7), generator=torch.Generator().manual_seed(2))
    decoder = GreedyDecoder(model, 1, 16, kv_bits=LAYERS)
    tokens = [decoder.prefill(ids).item()] + [decoder.step().item() for _ in range(5)]
    text = model.generate(  # type: ignore[operator]
        ids, max_new_tokens=6, do_sample=False, past_key_values=KVCache(model.config, LAYERS)
    )
    assert tokens == text[0, 7:].tolist() and decoder.kv_layers == LAYERS


def test_a_cache_refuses_bits_of_another_model(model: PreTrainedModel):
    with pytest.raises(UsageError, match="`bits`: the plan is for 2 layers, and the model has 3"):
        KVCache(model.config, LAYERS[:2])
    with pytest.raises(UsageError, match="no bits for the keys and values of layer 1"):
        KVCache(model.config, (LAYERS[0], None, LAYERS[2]))


def test_bits_are_bits_although_a_file_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("4").write_text("no plan")
    assert as_bits("4").layers == (LayerBits(4, 4),)
