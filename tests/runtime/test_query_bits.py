"""Queries in few bits: what attention is given, and models that cannot have them."""

from __future__ import annotations

import pytest
import torch
from training import llama
from transformers import AttentionInterface

from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels.quantizers import quantize_heads
from neuzip.runtime.hf.query_bits import quantized_queries

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_attention_gets_queries_on_a_grid_and_other_heads_as_they_are(bits: int):
    generator = torch.Generator().manual_seed(bits)
    query, key, value = (torch.randn(2, 4, 5, 8, generator=generator) for _ in range(3))
    query[0, 0, 0] = 0
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 1, True
    found, _ = AttentionInterface()[f"neuzip_queries{bits}"](module, query, key, value, None)
    grid = quantize_heads(query, bits).dequantize()
    wanted = torch.nn.functional.scaled_dot_product_attention(grid, key, value, is_causal=True)
    assert torch.equal(found, wanted.transpose(1, 2))


def test_a_model_has_quantised_queries_inside_the_context_only():
    model, ids = llama(dtype=torch.float32).eval(), torch.arange(12)[None]
    with torch.no_grad():
        plain = model(ids).logits
        errors = []
        for bits in (2, 4, 8):
            with quantized_queries(model, bits):
                errors.append(float((model(ids).logits - plain).norm()))
        assert errors[0] > errors[1] > errors[2] > 0
        assert torch.equal(model(ids).logits, plain)


def test_what_cannot_be_is_refused():
    model = llama()
    with (
        pytest.raises(UsageError, match="`query_bits=9`: queries have 1 to 8 bits"),
        quantized_queries(model, 9),
    ):
        pass
    model.config._attn_implementation = "eager"
    with pytest.raises(NeuzipError, match="is eager, not sdpa"), quantized_queries(model, 4):
        pass
