"""Quantised attention in models of transformers: what it computes, what it leaves alone, and what it says."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GitConfig,
    GitForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    masking_utils,
)
from transformers import __version__ as transformers_version
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask

import neuzip
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.kernels.attention.reference import exact_attention, quantized_attention
from neuzip.runtime.hf import attention, attention_call, masks
from neuzip.runtime.hf.attention import patch_attention, unpatch_attention, uses
from neuzip.runtime.hf.attention_config import LAYERS_ENTRY, record_layers
from neuzip.runtime.hf.attention_names import NAMES
from neuzip.runtime.hf.kv_attention import not_readable
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import BY_A_KERNEL
from neuzip.runtime.hf.masks import DeferredMask

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is not quantised, but done by"),
]

needs_5 = pytest.mark.skipif(
    transformers_version.startswith("4."), reason="transformers 4 makes masks in another way"
)

WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 96, "max_position_embeddings": 128, "head_dim": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
OLD: dict[str, Any] = {
    k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim", "intermediate_size")
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "soft cap": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=30,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**OLD, intermediate_size=96)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**OLD)),
}  # fmt: skip


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(5)
    model = MODELS[name]().eval()
    if name == "soft cap":  # which SDPA lacks, and before transformers 5.18 nobody says so
        model.set_attn_implementation("eager")
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model of random weights in fp32."""
    return made(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    return made("llama")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 256, (2, 24), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    found: Tensor = model(ids, **options).logits
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, in the norm of all numbers."""
    return float((found - expected).norm() / expected.norm())


def padded_left(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The last tokens of texts, with what says so."""
    mask = torch.stack([torch.arange(ids.shape[1]) >= ids.shape[1] - n for n in lengths]).long()
    return ids * mask, mask


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel replaced by exact attention: what is left is masks, shapes, options."""
    import neuzip.kernels.attention as kernels

    def dense(q: Tensor, k: Tensor, v: Tensor, *, bits: int, **options: Any) -> Tensor:
        return exact_attention(q, k, v, **options)[0].to(q.dtype)

    def packed(
        q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, *,
        longest_q: int, longest_k: int, bits: int, **options: Any,
    ) -> Tensor:  # fmt: skip
        assert longest_q == int(q_starts.diff().max()) and longest_k == int(k_starts.diff().max())
        assert q_starts.dtype == k_starts.dtype == torch.int32
        out = torch.full_like(q, torch.nan)
        for i in range(len(q_starts) - 1):
            own = slice(int(q_starts[i]), int(q_starts[i + 1]))
            keys = slice(int(k_starts[i]), int(k_starts[i + 1]))
            parts = (x.transpose(0, 1)[None] for x in (q[own], k[keys], v[keys]))
            out[own] = exact_attention(*parts, **options)[0][0].transpose(0, 1).to(q.dtype)
        return out

    monkeypatch.setattr(kernels, "sage_attention", dense)
    monkeypatch.setattr(kernels, "sage_attention_packed", packed)


# Results


# P and V in E4M3 alone are off by some 4 %, and random texts average nothing out.
@pytest.mark.parametrize(("bits", "limit"), [(8, 0.08), (4, 0.3)])
def test_logits_are_close_to_the_exact_ones(model: PreTrainedModel, ids: Tensor, bits: int, limit: float):
    expected = logits(model, ids)
    patch_attention(model, bits, policy="always")
    found = logits(model, ids)
    assert uses(model) == {f"{bits} bits": 2}
    assert 1e-4 < distance(found, expected) < limit
    assert torch.equal(logits(model, ids), found)


@pytest.mark.usefixtures("exactly")
def test_all_that_the_kernel_is_told_is_right(model: PreTrainedModel, ids: Tensor):
    expected = logits(model, ids)
    patch_attention(model, 8, policy="always")
    assert distance(logits(model, ids), expected) < 1e-5
    assert uses(model) == {"8 bits": 2}


def test_layers_compute_what_the_reference_does(llama: PreTrainedModel, ids: Tensor):
    seen: list[tuple[Tensor, ...]] = []

    def look(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        found = attention._attend("neuzip_sage8", module, q, k, v, mask, **options)
        seen.append((q, k, v, found[0]))
        return found

    patch_attention(llama, 8, policy="always")
    name = "neuzip_test_look"
    AttentionInterface.register(name, look)
    llama.config._attn_implementation = name
    logits(llama, ids)
    assert len(seen) == 2
    for q, k, v, out in seen:
        expected = quantized_attention(q, k, v, bits=8, causal=True)[0].transpose(1, 2)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


# Masks


@pytest.mark.usefixtures("exactly")
def test_texts_of_a_batch_padded_on_the_left_are_as_alone(model: PreTrainedModel, ids: Tensor):
    lengths = [24, 11]
    padded, mask = padded_left(ids, lengths)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    patch_attention(model, 8, policy="always")
    found = logits(model, padded, attention_mask=mask, position_ids=positions)
    for i, length in enumerate(lengths):
        alone = logits(model, ids[i : i + 1, -length:])
        torch.testing.assert_close(found[i : i + 1, -length:], alone, atol=2e-5, rtol=1e-4)
    assert set(uses(model)) == {"8 bits"}


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("side", ["left", "right", "both", "within"])
def test_padding_anywhere_gives_what_sdpa_gives(model: PreTrainedModel, ids: Tensor, side: str):
    mask = torch.ones_like(ids)
    hidden = {"left": slice(0, 7), "right": slice(19, 24), "both": slice(0, 3), "within": slice(9, 12)}[side]
    mask[1, hidden] = 0
    if side == "both":
        mask[1, 20:] = 0
    expected = logits(model, ids, attention_mask=mask)
    patch_attention(model, 8, policy="always")
    found = logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=1e-4)
    windowed = getattr(model.config, "sliding_window", None) is not None
    assert ("8 bits" in uses(model)) or (windowed and side == "within")
    assert any("mask" in how for how in uses(model)) == (windowed and side == "within")


def test_a_text_has_its_own_scales(llama: PreTrainedModel, ids: Tensor):
    padded, mask = padded_left(ids, [24, 11])
    patch_attention(llama, 8, policy="always")
    found = logits(llama, padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    alone = logits(llama, ids[1:, -11:])
    torch.testing.assert_close(found[1:, -11:], alone, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_is_never_dropped(llama: PreTrainedModel, ids: Tensor, name: str):
    """transformers makes none for an implementation without a mask function of the same name."""
    assert ALL_MASK_ATTENTION_FUNCTIONS[name] is masks.mask
    padded, mask = padded_left(ids, [24, 11])
    expected = logits(llama, padded, attention_mask=mask)[1, -11:]
    llama.set_attn_implementation(name)
    for policy in ("auto", "always"):
        attention._state(llama.config).policy = policy  # type: ignore[assignment]
        assert distance(logits(llama, padded, attention_mask=mask)[1, -11:], expected) < 1e-5
        assert distance(logits(llama, padded)[1, -11:], expected) > 1e-3  # the padding would matter


def test_no_mask_is_made_that_the_kernel_does_not_need(ids: Tensor, monkeypatch: pytest.MonkeyPatch):
    model = made("sliding window")
    patch_attention(model, 8, policy="always")
    monkeypatch.setattr(DeferredMask, "dense", lambda self: pytest.fail("a mask was made"))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    logits(model, ids, attention_mask=mask)
    assert uses(model) == {"8 bits": 2}


@needs_5
def test_a_mask_that_somebody_looks_into_is_sdpas(llama: PreTrainedModel, ids: Tensor):
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    made = {}
    for name in ("sdpa", "neuzip_sage8"):
        llama.config._attn_implementation = name
        made[name] = create_causal_mask(llama.config, torch.zeros(2, 24, 128), mask, None)
    expected, deferred = made.values()
    assert isinstance(deferred, DeferredMask) and deferred.shape == expected.shape
    assert torch.equal(deferred | False, expected)
    assert torch.equal(deferred[:, :, 2:, :9], expected[:, :, 2:, :9])
    assert torch.equal(torch.where(deferred, 0.0, -1.0), torch.where(expected, 0.0, -1.0))
    assert isinstance(deferred.detach(), DeferredMask) and deferred.contiguous() is deferred
    assert deferred.dense() is deferred.detach().dense()
    assert isinstance(deferred.to("meta"), DeferredMask) and type(deferred.float()) is Tensor
    with pytest.raises(RuntimeError, match="in place"):
        deferred.logical_not_()


def test_an_arbitrary_mask_is_honoured(model: PreTrainedModel, ids: Tensor):
    if isinstance(model, GPT2LMHeadModel | GPTNeoXForCausalLM):
        pytest.skip("one of each kind")
    generator = torch.Generator().manual_seed(6)
    mask = torch.rand(2, 1, 24, 24, generator=generator) < 0.5
    mask |= torch.eye(24, dtype=torch.bool)
    if model.config._attn_implementation == "eager":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    given: Any = {"full_attention": mask, "sliding_attention": mask} if len(
        set(getattr(model.config, "layer_types", None) or [1])
    ) > 1 else mask  # fmt: skip
    expected = logits(model, ids, attention_mask=given)
    patch_attention(model, 8, policy="always")
    assert torch.equal(logits(model, ids, attention_mask=given), expected)
    assert all("mask" in how for how in uses(model))


def test_patterns_are_recognised_by_what_they_are():
    window = masking_utils.sliding_window_causal_mask_function(8)
    overlay, causal = masking_utils.sliding_window_overlay(8), masking_utils.causal_mask_function
    both = masking_utils.and_masks
    assert masks._pattern(causal) == (True, None)
    assert masks._pattern(window) == (True, 8)
    assert masks._pattern(both(overlay, causal)) == (True, 8)
    others = (both(causal, overlay), both(overlay), both(overlay, overlay), both(overlay, causal, causal))
    chunked = masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))
    others += (both(window, causal), overlay, chunked, masking_utils.or_masks(overlay, causal))
    for function in others:
        assert masks._pattern(function) is None


def test_masks_of_other_shapes_are_not_read():
    query, key = torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, 6, 8)
    for shape in ((2, 1, 1, 5), (1, 1, 1, 6), (2, 4, 1, 6), (2, 6)):
        assert masks.seen(torch.ones(shape, dtype=torch.bool), query, key, True) is None
    assert masks.seen(torch.zeros(2, 1, 1, 6), query, key, True) is None  # numbers that are added
    found = masks.seen(torch.ones(2, 1, 1, 6, dtype=torch.bool), query, key, True)
    assert found is not None and (found.keys, found.causal, found.tokens) == (6, False, None)
    assert masks.seen(None, torch.zeros(2, 4, 8, 8), key, True) is None  # more queries than keys


def test_a_pass_without_a_cache_is_quantised(model: PreTrainedModel, ids: Tensor):
    patch_attention(model, 8, policy="always")
    logits(model, ids, use_cache=False)
    assert uses(model) == {"8 bits": 2}


def test_texts_in_a_row_that_positions_tell_apart_stay_apart(llama: PreTrainedModel, ids: Tensor):
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    expected = logits(llama, ids, position_ids=positions, use_cache=False)
    patch_attention(llama, 8, policy="always")
    assert torch.equal(logits(llama, ids, position_ids=positions, use_cache=False), expected)
    assert not torch.equal(logits(llama, ids, use_cache=False), expected)
    assert uses(llama) == {"sdpa: its mask is none that the kernel knows": 2, "8 bits": 2}


@needs_5
@pytest.mark.usefixtures("exactly")
def test_an_encoder_sees_both_ways(ids: Tensor):
    torch.manual_seed(5)
    sizes = {**OLD, "intermediate_size": 96}
    model = BertForMaskedLM(BertConfig(**sizes)).eval()
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    for options in ({}, {"attention_mask": mask}):
        model.set_attn_implementation("sdpa")
        expected = logits(model, ids, **options)
        model.set_attn_implementation("neuzip_sage8")
        attention._state(model.config).policy = "always"
        found = logits(model, ids, **options)
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=1e-4)
    assert uses(model) == {"8 bits": 4}


# Caches


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_generation_goes_on_as_without(model: PreTrainedModel, ids: Tensor, cache: str, padded: bool):
    if cache == "static" and not model._can_compile_fullgraph:
        pytest.skip("takes no static cache")
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = padded_left(ids, [24, 11])
    options: dict[str, Any] = {
        "max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "cache_implementation": cache,
        "output_logits": True, "return_dict_in_generate": True, "disable_compile": True,
    }  # fmt: skip
    expected = model.generate(ids, **options)
    patch_attention(model, 8, policy="always")
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=1e-4)
    assert uses(model) == {"8 bits": 12}


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_prompt_may_come_in_parts(ids: Tensor, kind: str, padded: bool):
    for name in ("llama", "sliding window", "soft cap"):
        model = made(name)
        mask = torch.ones_like(ids)
        if padded:
            ids, mask = padded_left(ids, [24, 15])
        expected = logits(model, ids, attention_mask=mask)
        patch_attention(model, 8, policy="always")
        cache: Any = (
            StaticCache(config=model.config, max_cache_len=40)
            if kind == "static"
            else DynamicCache(config=model.config)
        )
        parts = [
            logits(model, part, attention_mask=mask[:, : start + part.shape[1]], past_key_values=cache)
            for start, part in zip((0, 10, 17), ids.split([10, 7, 7], 1), strict=True)
        ]
        found = torch.cat(parts, 1)
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=3e-5, rtol=1e-4)
        assert set(uses(model)) == {"8 bits"}, name


def test_with_a_quantised_cache_prompts_are_quantised_and_decoding_goes_on(
    llama: PreTrainedModel, ids: Tensor
):
    def generate() -> Any:
        cache = KVCache(llama.config, 8)
        with cache.attention(llama):
            return llama.generate(
                ids, past_key_values=cache, max_new_tokens=4, do_sample=False, output_logits=True,
                return_dict_in_generate=True, attention_mask=torch.ones_like(ids),
            )  # fmt: skip

    expected = generate()
    patch_attention(llama, 8, policy="always")
    found = generate()
    assert distance(found.logits[0], expected.logits[0]) < 0.04
    assert not torch.equal(found.logits[0], expected.logits[0])
    assert uses(llama) == {"8 bits": 8}


def test_packed_keys_and_values_go_to_the_caches_attention(llama: PreTrainedModel, ids: Tensor):
    def decode() -> Tensor:
        cache = KVCache(llama.config, 8)
        logits(llama, ids[:, :-1], past_key_values=cache)
        cache.form.reads_packed = True
        return logits(llama, ids[:, -1:], past_key_values=cache)

    llama.set_attn_implementation("neuzip_kv")
    expected = decode()
    llama.set_attn_implementation("neuzip_sage8")
    assert torch.equal(decode(), expected)
    assert uses(llama)[attention.BY_THE_CACHE] == 2


# What is left to a model's own attention


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_what_is_not_quantised_has_the_same_bits(model: PreTrainedModel, ids: Tensor, padded: bool):
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = padded_left(ids, [24, 11])

    def run() -> list[Tensor]:
        given: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
        given |= {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        found = [logits(m, ids, attention_mask=mask) for m in (model, copy.deepcopy(model).bfloat16())]
        for cache in ("dynamic", "static"):
            found += model.generate(ids, cache_implementation=cache, **given).logits
        return found

    expected = run()
    patch_attention(model, 8)  # on a CPU nothing is quantised by itself
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    own = "eager" if model.config.model_type == "gemma2" else "sdpa"
    assert uses(model) == {f"{own}: on a CPU quantised attention is only simulated": 14}


def test_gradients_dropout_and_what_is_unknown_are_left_alone(llama: PreTrainedModel, ids: Tensor):
    expected = llama(ids, labels=ids)
    expected.loss.backward()
    gradient = llama.lm_head.weight.grad.clone()
    llama.zero_grad()
    patch_attention(llama, 8, policy="always")
    found = llama(ids, labels=ids)
    found.loss.backward()
    assert torch.equal(found.logits, expected.logits) and torch.equal(llama.lm_head.weight.grad, gradient)
    assert all("gradients" in how for how in uses(llama))

    patch_attention(llama, 8, policy="always")
    assert torch.equal(logits(llama, ids, head_weights=torch.ones(2)), expected.logits)
    assert list(uses(llama)) == ["sdpa: it comes with head_weights"]

    patch_attention(llama, 8, policy="always")
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.5
    llama.train()
    logits(llama, ids)
    assert list(uses(llama)) == ["sdpa: it drops out weights"]


def test_sinks_are_honoured(ids: Tensor):
    torch.manual_seed(5)
    model = GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW)
    ).eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = logits(model, ids), logits(model, ids, attention_mask=mask)
    patch_attention(model, 8, policy="always")
    assert torch.equal(logits(model, ids), expected[0])
    assert torch.equal(logits(model, ids, attention_mask=mask), expected[1])
    assert list(uses(model)) == ["eager: it comes with s_aux"]


@pytest.mark.slow
@needs_5
def test_what_is_compiled_is_left_alone(ids: Tensor):
    model = made("sliding window")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = logits(model, ids, attention_mask=mask)
    patch_attention(model, 8, policy="always")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled, ids, attention_mask=mask), expected)
    assert uses(model) == {}
    torch._dynamo.reset()


def test_each_reason_is_told_once_a_model(llama: PreTrainedModel, ids: Tensor):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch_attention(llama, 8)
        logits(llama, ids)
        logits(llama, ids)
        patch_attention(llama, 8, warn=False)
        logits(llama, ids)
    how = "sdpa: on a CPU quantised attention is only simulated"
    assert [str(w.message) for w in said] == [f"llama: some attention is not quantised, but done by {how}"]


@pytest.mark.parametrize("width", [40, 512])
def test_head_widths_that_the_kernel_lacks_are_left_alone(ids: Tensor, width: int):
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "head_dim": width})).eval()
    expected = logits(model, ids)
    patch_attention(model, 8, policy="always")
    assert torch.equal(logits(model, ids), expected)
    assert all(how.startswith("sdpa: ") and str(width) in how for how in uses(model))


@pytest.mark.parametrize("tokens", [1, 24])
def test_decoding_and_short_texts_are_left_to_sdpa_on_a_gpu(tokens: int):
    call = attention_call.AttentionCall(
        torch.nn.Module(), _OnGpu(1, 2, tokens, 64), _OnGpu(1, 2, 24, 64), None, None, 0.0, None, None, {}
    )
    reason = attention_call.slower(call)
    assert reason is not None and "fewer than 2,048 queries" in reason


@pytest.mark.parametrize(
    ("shape", "faster"),
    [
        ((1, 32, 4096, 128), False), ((1, 32, 8192, 128), True), ((8, 32, 2048, 128), False),
        ((8, 32, 4096, 128), True), ((1, 32, 8192, 64), False), ((64, 32, 1024, 128), False),
    ],
)  # fmt: skip
def test_prompts_are_quantised_where_that_was_measured_to_be_faster(shape: Any, faster: bool):
    call = attention_call.AttentionCall(
        torch.nn.Module(), _OnGpu(*shape), _OnGpu(*shape), None, None, 0.0, None, None, {}
    )
    assert call.causal and (attention_call.slower(call) is None) == faster


class _OnGpu:
    """The shape of a tensor on a GPU."""

    is_cuda = True

    def __init__(self, *shape: int) -> None:
        self.shape = shape


# Patching


def test_layers_have_bits_of_their_own(llama: PreTrainedModel, ids: Tensor):
    expected = logits(llama, ids)
    patch_attention(llama, [None, 8], policy="always")
    first = logits(llama, ids)
    assert uses(llama) == {"8 bits": 1, "sdpa: the layer keeps full precision": 1}
    assert llama.config.neuzip == {"attention": {"layers": [None, 8]}}
    patch_attention(llama, [4, 8], policy="always")
    assert not torch.equal(logits(llama, ids), first)
    assert uses(llama) == {"8 bits": 1, "4 bits": 1}
    unpatch_attention(llama)
    assert torch.equal(logits(llama, ids), expected)
    assert llama.config._attn_implementation == "sdpa" and not hasattr(llama.config, "neuzip")


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _saved(model),
}


def _saved(model: object) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_attends_as_the_original(way: str, llama: PreTrainedModel, ids: Tensor):
    """With all that it was patched with, which is not in its config; what becomes of one leaves the other."""
    exact = logits(llama, ids)
    patch_attention(llama, [4, None], policy="always", warn=False)
    patched = logits(llama, ids)
    assert not torch.equal(patched, exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = COPIES[way](llama)
        assert twin.config is not llama.config
        again = COPIES[way](twin)
        assert uses(twin) == {}
        assert torch.equal(logits(twin, ids), patched)
        assert torch.equal(logits(twin, ids[:, :12]), logits(llama, ids[:, :12]))  # warns if it may
    assert uses(twin) == {"4 bits": 2, "sdpa: the layer keeps full precision": 2}
    unpatch_attention(twin)
    assert twin.config._attn_implementation == "sdpa" and not hasattr(twin.config, "neuzip")
    for other in (twin, COPIES[way](twin)):
        assert torch.equal(logits(other, ids), exact)
        assert not any(attention.CARRIED in vars(module) for module in other.modules())
    assert torch.equal(logits(llama, ids), patched)
    unpatch_attention(llama)
    assert torch.equal(logits(again, ids), patched)


def test_a_copy_of_a_part_attends_as_the_whole(llama: PreTrainedModel, ids: Tensor):
    patch_attention(llama, 4, policy="always")
    for part in (llama.model, llama.model.layers):
        twin = copy.deepcopy(part)
        config = (twin[1].self_attn if part is not llama.model else twin).config
        assert config is not llama.config
        assert attention._state(config).policy == "always"


def test_a_copy_warns_as_the_original_would(llama: PreTrainedModel, ids: Tensor):
    patch_attention(llama, 8)
    with pytest.warns(UserWarning, match="only simulated"):
        logits(llama, ids)
    with pytest.warns(UserWarning, match="only simulated"):
        logits(copy.deepcopy(llama), ids)


def test_a_name_without_a_record_changes_nothing(llama: PreTrainedModel, ids: Tensor):
    expected = logits(llama, ids)
    llama.set_attn_implementation("neuzip_sage")
    attention._state(llama.config).policy = "always"
    assert torch.equal(logits(llama, ids), expected)
    assert uses(llama) == {"sdpa: nothing is recorded for the layer": 2}
    with pytest.raises(UsageError, match="records no bits"):
        patch_attention(llama)
    unpatch_attention(llama)
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layers", [7, True, [8], [8, 8, 8], [8, 5], ["8", 8], [8.0, 8]], ids=str)
def test_bits_that_there_are_not_are_refused(llama: PreTrainedModel, layers: Any):
    with pytest.raises(UsageError):
        patch_attention(llama, layers)
    assert llama.config._attn_implementation == "sdpa"
    with pytest.raises(UsageError, match="policy"):
        patch_attention(llama, 8, policy="never")  # type: ignore[arg-type]


def test_models_that_attend_in_their_own_way_are_refused(tmp_path: Path):
    """They would ask for masks by our name, and read None as: everything may be seen."""
    model = BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_layer=1, n_head=2))
    with pytest.raises(UsageError, match="cannot be replaced"):
        patch_attention(model, 8)
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot be replaced"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="neuzip_sage8")
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    git = GitConfig(
        vision_config=vision | {"image_size": 32, "patch_size": 16}, vocab_size=256, hidden_size=64,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(UsageError, match="cannot be replaced"):  # it would add our mask of bools to logits
        patch_attention(GitForCausalLM(git), 8)
    sizes = {"vocab_size": 256, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
    with pytest.raises(UsageError, match="encoder"):
        patch_attention(BartForConditionalGeneration(BartConfig(**sizes)), 8)


@pytest.mark.parametrize("name", ["neuzip_sage8", "sdpa"])
def test_a_quantised_cache_is_not_read_packed_where_the_model_would_attend_eagerly(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """Its soft cap or sinks are more than what takes packed states does."""
    monkeypatch.setattr(torch.nn.Module, "parameters", lambda self, recurse=True: iter(()))  # none on the CPU
    llama, capped = made("llama"), made("soft cap")
    llama.set_attn_implementation(name)
    assert not_readable(llama) is None
    monkeypatch.setattr(type(capped), "_supports_sdpa", False)
    capped.set_attn_implementation("neuzip_sage8")
    assert not_readable(capped) == "its attention is eager, not sdpa"


def test_what_goes_away_is_not_remembered():
    gc.collect()
    before = len(attention._states)
    model = made("llama")
    patch_attention(model, 8)
    assert len(attention._states) == before + 1
    del model
    gc.collect()
    assert len(attention._states) == before


# The record


def test_a_record_is_kept_and_applied(llama: PreTrainedModel, ids: Tensor, tmp_path: Path):
    plain, container, again = tmp_path / "plain", tmp_path / "container", tmp_path / "again"
    exact = logits(llama, ids)
    llama.save_pretrained(plain)
    record_layers(plain, [8, None])
    assert LAYERS_ENTRY.read(plain) == (8, None)
    neuzip.compress_checkpoint(plain, container)
    assert LAYERS_ENTRY.read(container) == (8, None)

    with pytest.warns(
        UserWarning, match="of 2 layers the attention of 1 in 8 bits is quantised, as config.json"
    ):
        loaded = [neuzip.load_model(plain), neuzip.load_model(container)]
    with pytest.warns(UserWarning, match="1 in 8 bits"):
        loaded.append(AutoModelForCausalLM.from_pretrained(container))
    for model in loaded:
        assert model.config._attn_implementation == "neuzip_sage"
        patch_attention(model, policy="always")
        assert not torch.equal(logits(model, ids), exact)
        assert uses(model) == {"8 bits": 1, "sdpa: the layer keeps full precision": 1}
    loaded[-1].save_pretrained(again)
    assert LAYERS_ENTRY.read(again) == (8, None)


def test_a_record_may_be_passed_over(llama: PreTrainedModel, ids: Tensor, tmp_path: Path):
    plain, container = tmp_path / "plain", tmp_path / "container"
    exact = logits(llama, ids)
    llama.save_pretrained(plain)
    record_layers(plain, 4)
    neuzip.compress_checkpoint(plain, container)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models = [
            neuzip.load_model(container, attention=False),
            AutoModelForCausalLM.from_pretrained(container, attn_implementation="sdpa"),
            AutoModelForCausalLM.from_pretrained(plain),  # which is transformers' alone
        ]
    for model in models:
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(logits(model, ids), exact)
    by_name = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="neuzip_sage")
    attention._state(by_name.config).policy = "always"
    logits(by_name, ids)
    assert uses(by_name) == {"4 bits": 2}


@needs_5
def test_weights_in_memory_compressed_attend_as_recorded(tmp_path: Path, ids: Tensor):
    torch.manual_seed(5)
    model = MODELS["llama"]().bfloat16()
    model.save_pretrained(tmp_path / "plain")
    record_layers(tmp_path / "plain", 8)
    neuzip.compress_checkpoint(tmp_path / "plain", tmp_path / "container")
    with pytest.warns(UserWarning, match="2 in 8 bits"):
        found = AutoModelForCausalLM.from_pretrained(
            tmp_path / "container", quantization_config=neuzip.NeuzipConfig("packed")
        )
    assert found.config._attn_implementation == "neuzip_sage"


def test_what_is_recorded_wrongly_is_told(llama: PreTrainedModel, tmp_path: Path):
    llama.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    assert LAYERS_ENTRY.read(tmp_path) is None and LAYERS_ENTRY.read(tmp_path / "nothing") is None
    for wrong in (7, {"attention": 8}, {"attention": {"layers": 8}}, {"attention": {"layers": [8]}},
                  {"attention": {"layers": [8, 5]}}, {"attention": {"layers": [8, True]}}):  # fmt: skip
        path.write_text(json.dumps(document | {"neuzip": wrong}))
        with pytest.raises(FormatError, match=r"config\.json, field 'neuzip"):
            LAYERS_ENTRY.read(tmp_path)
        with pytest.raises(FormatError, match="neuzip"):
            neuzip.load_model(tmp_path)
    path.write_text(json.dumps(document | {"neuzip": {"activations": "a4.8"}}))
    assert LAYERS_ENTRY.read(tmp_path) is None
    record_layers(tmp_path, 8)
    assert json.loads(path.read_text())["neuzip"] == {"activations": "a4.8", "attention": {"layers": [8, 8]}}
    for layers in (7, [8], [8, 3]):
        with pytest.raises(UsageError):
            record_layers(tmp_path, layers)  # type: ignore[arg-type]
    with pytest.raises(NeuzipError, match="is not there"):
        record_layers(tmp_path / "nothing", 8)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_long_texts_are_quantised_and_decoding_is_not(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_call, "LEAST_PRODUCTS", 1)
    config = made(name).config
    config.max_position_embeddings = 4096
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).cuda().bfloat16().eval()
    if name == "soft cap":
        model.set_attn_implementation("eager")
    length = attention_call.LEAST_TOKENS + 57
    ids = torch.randint(1, 256, (2, length), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :500] = 0
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    expected = model.generate(ids, **options)
    patch_attention(model, 8)
    found = model.generate(ids, **options)
    assert distance(found.logits[0].float(), expected.logits[0].float()) < 0.1
    counted = uses(model)
    assert counted.pop("8 bits") == 2
    assert list(counted.values()) == [4] and "queries" in next(iter(counted))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_on_a_gpu_a_compiled_decoder_goes_on(name: str):
    model = made(name).cuda().bfloat16()
    ids = torch.randint(1, 256, (2, 24), device="cuda")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    patch_attention(model, 8)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **options), expected)


@pytest.mark.gpu
def test_on_a_gpu_a_quantised_cache_is_read_as_it_is_packed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_call, "LEAST_PRODUCTS", 1)
    config = made("llama").config
    config.max_position_embeddings = 4096
    torch.manual_seed(6)
    model = AutoModelForCausalLM.from_config(config).cuda().bfloat16().eval()
    ids = torch.randint(1, 256, (1, attention_call.LEAST_TOKENS + 57), device="cuda")
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip

    def generate() -> Any:
        cache = KVCache(model.config, 8)
        with cache.attention(model):
            assert cache.how == BY_A_KERNEL
            return model.generate(ids, past_key_values=cache, **options)

    expected = generate()
    patch_attention(model, 8)
    found = generate()
    assert distance(found.logits[0].float(), expected.logits[0].float()) < 0.1
    assert uses(model) == {"8 bits": 2, attention.BY_THE_CACHE: 6}
