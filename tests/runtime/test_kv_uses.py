"""Uses of a quantised KV cache: wrong arguments, copies of a prompt, gradients, guesses taken back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from neuzip.errors import UsageError
from neuzip.runtime.hf import kv_layers
from neuzip.runtime.hf.kv_cache import KVCache

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS: tuple[Any, ...] = ("rotated", "a4.8")


@pytest.fixture
def llama() -> PreTrainedModel:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 256, (2, 20), generator=torch.Generator().manual_seed(4))


def logits(model: PreTrainedModel, ids: Tensor, cache: KVCache, parts: list[int]) -> Tensor:
    """Of `ids`, fed in parts of these lengths."""
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(parts, 1)], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "`max_length=0`: is no number of tokens"),
        ({"max_length": 2.5}, "`max_length=2.5`: is no number of tokens"),
        ({"attention_mask": torch.ones(20)}, r"`attention_mask`: has the shape \[20\]"),
        ({"attention_mask": [[1, 1]]}, "`attention_mask`: is a list"),
        ({"places": object()}, "`places` has no effect without `max_length`"),
        ({"bits": [(4, 4), None]}, "`bits`: no bits for the keys and values of layer 1"),
        ({"config": "llama"}, "`config`: is a str, no config"),
    ],
    ids=["no room", "half a token", "flat mask", "list", "places", "layer", "config"],
)
def test_wrong_arguments_are_named(llama: PreTrainedModel, options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        KVCache(**{"config": llama.config, "bits": 4, **options})


def test_wrong_forms_are_refused():
    for wrong in ({"key_group": 0}, {"value_group": -1}, {"whole": -1}, {"still_wavelength": float("nan")}):
        with pytest.raises(UsageError, match="groups have 1 or more numbers, and no number is below 0"):
            kv_layers.HeadForm(**{"key_group": 32, "value_group": 64, **wrong})
    with pytest.raises(UsageError, match="`center_block` is 64 tokens or more"):
        kv_layers.HeadForm(32, 64, center_block=63)


def test_a_full_cache_and_another_batch_are_refused(llama: PreTrainedModel, ids: Tensor):
    with pytest.raises(IndexError, match=r"memory for 9 tokens, and is given tokens 0 to 19: .*`max_length`"):
        logits(llama, ids, KVCache(llama.config, 4, max_length=9), [20])
    for length in (None, 40):
        cache = KVCache(llama.config, 4, max_length=length)
        logits(llama, ids, cache, [20])
        with pytest.raises(UsageError, match="a KV cache of 2 texts is given tokens of 1"):
            logits(llama, ids[:1], cache, [20])


def test_a_prompt_is_continued_from_a_copy(llama: PreTrainedModel, ids: Tensor):
    """As transformers' pages copy the cache of a prompt that many texts begin with."""
    cache = KVCache(llama.config, 4)
    with cache.attention(llama):
        logits(llama, ids[:, :12], cache, [12])
    copied = copy.deepcopy(cache)
    found = [logits(llama, ids[:, 12:], one, [8]) for one in (cache, copied)]
    assert torch.equal(*found)
    assert copied.layers[0].form is copied.layers[1].form is copied.form


def test_a_cache_keeps_no_graph_of_gradients(llama: PreTrainedModel, ids: Tensor):
    for form in FORMS:
        cache = KVCache(llama.config, 4, form=form)
        llama(ids, past_key_values=cache, labels=ids).loss.backward()
        assert llama.model.layers[0].self_attn.q_proj.weight.grad is not None
        held = [
            getattr(heads, name) for heads in cache.layers[0].heads for name in ("scale", "first", "center")
        ]
        assert not any(tensor.requires_grad for tensor in held if tensor is not None)


def test_prompt_lookup_gives_the_greedy_tokens(llama: PreTrainedModel, ids: Tensor):
    """It writes guesses into the cache, and takes the wrong ones off again."""
    text = torch.cat([ids[:1], ids[:1, :6]], 1)
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(text)}
    expected, found = (
        llama.generate(text, past_key_values=KVCache(llama.config, 8), **options, **more)
        for more in ({}, {"prompt_lookup_num_tokens": 3})
    )
    assert torch.equal(found, expected)
