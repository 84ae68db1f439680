"""A cache of fixed size whose heads are wider than the model's."""

from __future__ import annotations

from types import SimpleNamespace

import models
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neuzip.runtime.decode import greedy
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.static_cache import TokenPositions, can_pad, head_width, static_cache

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def llama(width: int, **options: object) -> LlamaForCausalLM:
    return models.llama(
        3,
        hidden_size=4 * width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width, vocab_size=99, max_position_embeddings=64, **options,
    ).eval()  # fmt: skip


def texts() -> torch.Tensor:
    return torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(5))


def test_padded_heads_give_the_same():
    model, ids = llama(12), texts()
    with torch.no_grad():
        expected = model(ids).logits
        places = TokenPositions(torch.arange(6))
        cache = static_cache(model.config, 9, places, padded=True)
        with cache.attention():
            prompt = model(ids[:, :6], past_key_values=cache, position_ids=places.tokens[None]).logits
            places.tokens = torch.tensor([6])
            step = model(ids[:, 6:], past_key_values=cache, position_ids=places.tokens[None]).logits
    torch.testing.assert_close(torch.cat([prompt, step], 1), expected)
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            assert states.shape == (2, 2, 9, 16)
            assert states[:, :, :7, :12].any(-1).all() and not states[..., 12:].any()


def test_a_decoder_with_padded_heads(monkeypatch: pytest.MonkeyPatch):
    model, ids = llama(12), texts()
    plain = GreedyDecoder(model, 2, 20)
    monkeypatch.setattr(greedy, "can_pad", lambda model: True)
    padded = GreedyDecoder(model, 2, 20)
    assert torch.equal(padded.generate(ids, 8), plain.generate(ids, 8))
    torch.testing.assert_close(padded.logits, plain.logits)
    assert padded.cache_bytes == plain.cache_bytes * 16 // 12
    assert GreedyDecoder(model, 2, 20, fuse=False)._cache.padded is False


def test_attention_is_what_it_was_after_a_failure():
    model = llama(12)
    for padded in (True, False):
        cache = static_cache(model.config, 9, TokenPositions(torch.arange(1)), padded=padded)
        with pytest.raises(IndexError), cache.attention():
            model(torch.tensor([[1000]]), past_key_values=cache)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_others_attend_as_ever_meanwhile():
    model, other, ids = llama(12), llama(10), texts()
    with torch.no_grad():
        expected = other(ids).logits
        with static_cache(model.config, 9, TokenPositions(torch.arange(6)), padded=True).attention():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
            assert torch.equal(other(ids).logits, expected)


def test_keys_and_values_of_other_widths_stay_as_they_are():
    cache = static_cache(llama(12).config, 9, TokenPositions(torch.arange(3)), padded=True)
    keys, values = cache.layers[0].update(torch.ones(1, 2, 3, 12), torch.ones(1, 2, 3, 10))
    assert keys.shape[-1] == 12 and values.shape[-1] == 10


class Unlike(SimpleNamespace):
    """A config whose layers have heads of several widths, as transformers has them: it raises if asked."""

    @property
    def head_dim(self) -> int:
        raise RuntimeError("ambiguous")


@pytest.mark.parametrize("change", ["", "width", "dtype", "device", "attention", "config", "fixed", "unlike"])
def test_which_models_are_padded(change: str):
    """By what they say of themselves; the weights of one that is on a GPU are not needed."""
    config = llama(16 if change == "width" else 12).config
    config._attn_implementation = "eager" if change == "attention" else "sdpa"
    assert head_width(config) == (16 if change == "width" else 12)
    if change == "unlike":
        config = Unlike(get_text_config=lambda decoder: config, _attn_implementation="sdpa")
        assert head_width(config) is None
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: None) if change == "config" else config,
        dtype=torch.float32 if change == "dtype" else torch.bfloat16,
        parameters=lambda: [SimpleNamespace(is_cuda=change != "device")],
        _supports_attention_backend=change != "fixed",
    )
    assert can_pad(model) == (change == "")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [100, 12])
def test_fused_attention_takes_padded_heads(width: int):
    model, ids = llama(width).bfloat16().cuda(), texts().cuda()
    assert can_pad(model)
    plain = GreedyDecoder(model, 2, 20, fuse=False)
    expected = plain.generate(ids, 8)
    with sdpa_kernel(FUSED):
        padded = GreedyDecoder(model, 2, 20)
        assert padded.graphed
        padded.prefill(ids)
        for token in expected[:, :-1].T:
            padded.take(token)
            padded.step()
    torch.testing.assert_close(padded.logits.float(), plain.logits.float(), rtol=0.02, atol=0.02)
    unpadded = GreedyDecoder(model, 2, 20, fuse=False, graph=False)
    unpadded.prefill(ids)  # without a mask, flash attention pads by itself
    with sdpa_kernel(FUSED), pytest.raises(RuntimeError):
        unpadded.step()
