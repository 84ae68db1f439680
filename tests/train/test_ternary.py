"""Ternary weights for models that were not trained for them: error feedback, and whole models."""

from __future__ import annotations

import models
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
)

from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels import quantizers
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.train.recovery.rotation import orthogonal, rotate
from neuzip.train.recovery.ternary import TernaryRecipe, _Feed, convert


def correlated(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs [rows, columns] of which few directions hold most."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, generator=g) * torch.logspace(0, -2, columns)[:, None]
    return torch.randn(rows, columns, generator=g) @ mixed


def lost(weight: Tensor, found: quantizers.Ternary, x: Tensor) -> float:
    """How far the products are from those of the weights, relative."""
    wanted = x.double() @ weight.double().T
    return float((x.double() @ found.dequantize().double().T - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("group", [None, 16, 50, 96, 1000])
@pytest.mark.parametrize("columns", [96, 131, 300])
def test_error_feedback_keeps_products(group: int | None, columns: int):
    x = correlated(2000, columns)
    weight = torch.randn(40, columns, generator=torch.Generator().manual_seed(1))
    found = quantizers.error_feedback(weight, x.T @ x, group=group)
    plain = quantizers.least_squares(weight, group=group)
    assert lost(weight, found, x) < 0.7 * lost(weight, plain, x)
    assert found.codes.dtype == torch.int8
    assert found.codes.abs().max() <= 1
    assert found.scale.dtype == torch.float32
    assert found.scale.shape == plain.scale.shape
    assert (found.scale >= 0).all()


@pytest.mark.parametrize("group", [None, 8, 24])
def test_without_correlation_nothing_is_fed_back(group: int | None):
    """Then the nearest codes are best, and least squares of products are those of weights."""
    weight = torch.randn(30, 24, generator=torch.Generator().manual_seed(2))
    found = quantizers.error_feedback(weight, 7.0 * torch.eye(24), group=group)
    wanted = quantizers.least_squares(weight, group=group)
    assert torch.equal(found.codes, wanted.codes)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-6, atol=0)


def test_scales_are_the_best_for_the_codes():
    """No other scales of the same codes come nearer in the products, damping aside."""
    x = correlated(3000, 64)
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    found = quantizers.error_feedback(weight, x.T @ x, group=16)
    best = lost(weight, found, x)
    for change in (0.97, 1.03):
        for at in range(4):
            scale = found.scale.clone()
            scale[:, at] *= change
            other = quantizers.Ternary(found.codes, scale, 16)
            assert lost(weight, other, x) > best


def test_zeros_and_inputs_never_seen():
    gram = torch.zeros(20, 20)
    for weight in (torch.zeros(3, 20), torch.ones(3, 20)):
        for group in (None, 6, 20):
            found = quantizers.error_feedback(weight, gram, group=group)
            assert found.scale.isfinite().all()
            assert torch.equal(found.codes, weight.to(torch.int8))


def test_what_does_not_go_together_is_refused():
    weight = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"\[in, in\]"):
        quantizers.error_feedback(weight, torch.eye(3))
    with pytest.raises(ValueError, match="NaN"):
        quantizers.error_feedback(weight * torch.inf, torch.eye(4))
    with pytest.raises(ValueError, match="NaN"):
        quantizers.error_feedback(weight, torch.eye(4) * torch.nan)


@pytest.fixture
def model() -> LlamaForCausalLM:
    small = models.llama(
        0,
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return small.to(torch.bfloat16).eval()


WINDOWS = torch.randint(97, (12, 20), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("quantizer", ["absmean", "least-squares", "error-feedback"])
@pytest.mark.parametrize("group", [None, "row", 10])
def test_all_linear_weights_of_layers_become_ternary(model, quantizer, group):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = []
    found = convert(model, TernaryRecipe(quantizer, group), WINDOWS, on_layer=lambda: layers.append(1))
    assert len(layers) == 3
    assert len(found) == 3 * 7
    after = model.state_dict()
    for name, tensor in before.items():
        if name in found:
            width = None if group is None else tensor.shape[1] if group == "row" else group
            exact = quantizers.exact(after[name], group=width)
            assert exact is not None, name
            assert torch.equal(exact.codes, found[name].codes)
            assert torch.equal(exact.scale, found[name].scale)
        else:
            assert torch.equal(after[name], tensor), name


def test_each_layer_sees_what_the_changed_ones_give(model):
    """The inputs that feedback is told of are those of the model as far as it is converted."""
    layers = decoder_layers(model)
    linear = layers[1].mlp.down_proj
    feed = _Feed(model, layers, WINDOWS)
    layers[0].self_attn.q_proj.weight.data.mul_(-1)
    feed.advance(layers[0])
    gram = feed.grams(layers[1], [linear])[linear]
    seen = []
    hook = linear.register_forward_pre_hook(lambda _, a: seen.append(a[0].detach().float().flatten(0, 1)))
    with torch.no_grad():
        for window in WINDOWS:
            model(window[None])
    hook.remove()
    x = torch.cat(seen)
    torch.testing.assert_close(gram, x.T @ x)


def test_a_text_is_needed_for_feedback(model):
    with pytest.raises(UsageError, match="needs a text"):
        convert(model, TernaryRecipe("error-feedback"))


def test_a_model_without_layers_is_refused(model):
    model.config.num_hidden_layers = 5
    with pytest.raises(NeuzipError, match="no list of 5 layers"):
        convert(model, TernaryRecipe("absmean"))


def test_layers_are_those_of_the_decoder(model):
    assert decoder_layers(model) is model.model.layers
    assert isinstance(decoder_layers(model)[0].mlp.up_proj, nn.Linear)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 64, 96, 97])
def test_rotations_are_orthogonal(size: int):
    q = orthogonal(size)
    torch.testing.assert_close(q @ q.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(q, orthogonal(size))


@pytest.mark.parametrize("tied", [False, True])
def test_a_rotated_model_says_the_same(model, tied: bool):
    model = model.float()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for layer in model.model.layers:
        layer.input_layernorm.weight.data.uniform_(0.5, 2)
        layer.post_attention_layernorm.weight.data.uniform_(0.5, 2)
    model.model.norm.weight.data.uniform_(0.5, 2)
    ids = WINDOWS[:3]
    with torch.no_grad():
        before, weight = model(ids).logits, model.model.layers[0].mlp.up_proj.weight.clone()
        rotate(model)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.model.layers[0].mlp.up_proj.weight, weight)
    assert (model.model.norm.weight == 1).all()


def test_what_cannot_be_rotated_is_refused(model):
    with pytest.raises(NeuzipError, match="has no self_attn"):
        rotate(GPTNeoXForCausalLM(GPTNeoXConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            tie_word_embeddings=False,
        )))  # fmt: skip


def test_each_layer_gets_its_own_masks_and_rotary_embeddings():
    """Before anything is converted, what layers give is what they give in the model."""
    torch.manual_seed(1)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, vocab_size=97, sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ).eval()  # fmt: skip
    layers = decoder_layers(model)
    seen: dict[int, list[Tensor]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, a, out, i=i: seen.setdefault(i, []).append(out[0] if isinstance(out, tuple) else out)
        )
        for i, layer in enumerate(layers)
    ]
    with torch.no_grad():
        for window in WINDOWS:
            model(window[None])
        for hook in hooks:
            hook.remove()
        feed = _Feed(model, layers, WINDOWS)
        for i, layer in enumerate(layers):
            feed.advance(layer)
            torch.testing.assert_close(torch.cat(feed.states), torch.cat(seen[i]))
