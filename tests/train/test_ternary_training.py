"""Ternary models from random weights: stages, what a trainer makes of latent weights, presets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import SIZES, batches, bits, llama, plain
from transformers import LlamaConfig

from neuzip.compress.schemes.ternary_coding import find_exact
from neuzip.errors import UsageError
from neuzip.kernels import quantizers
from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations
from neuzip.runtime.hf.load import load_model
from neuzip.train.loop import Schedule
from neuzip.train.optimizers import SGD
from neuzip.train.presets import BITNET, preset_keys
from neuzip.train.recovery.latent import runnable
from neuzip.train.recovery.straight_through import LatentLinear, quantize_tokens
from neuzip.train.scratch import random_model
from neuzip.train.ternary_training import TernaryStages, latent_layers, make_ternary, set_activations
from neuzip.train.trainer import train_compressed

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_last_steps_have_the_hybrid_activations():
    stages = TernaryStages("a4.8", 20, int8_fraction=0.9)
    assert [stages.activations_at(n).mode for n in (0, 17, 18, 19)] == ["b1.58", "b1.58", "a4.8", "a4.8"]
    assert TernaryStages("a4.8", 20, int8_fraction=0).activations_at(0).mode == "a4.8"
    assert TernaryStages("a4.8", 20, int8_fraction=1).activations_at(19).mode == "b1.58"


def test_the_cooldown_has_a_lower_rate_and_no_decay():
    whole, cooled = (Schedule(4.0, 10, 2, 0.5, "linear", peak, 5) for peak in (None, 1.0))
    assert [cooled(n) for n in range(5)] == [whole(n) for n in range(5)]
    assert [cooled(n) for n in range(5, 10)] == [whole(n) / 4 for n in range(5, 10)]
    assert [cooled.decays(n) for n in (0, 4, 5, 9)] == [True, True, False, False]
    assert all(whole.decays(n) for n in range(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_trainer_gives_latent_weights_the_bits_of_an_ordinary_loop(dtype: torch.dtype):
    models = [llama(dtype=dtype) for _ in range(2)]
    for model in models:
        make_ternary(model)
        set_activations(model, Activations("a4.8"))
    assert all(layer.weight.dtype == dtype for layer in latent_layers(models[0]).values())
    before = bits(models[0])
    trainer = train_compressed(models[0], SGD())
    losses = [trainer.step(batch, 0.05) for batch in batches(3)]
    ours = bits(trainer.release())
    assert (losses, ours) == plain(models[1], SGD(), 3)
    assert all(ours[f"{name}.weight"] != before[f"{name}.weight"] for name in latent_layers(models[1]))


def test_a_step_without_decay_is_one_of_an_optimizer_without():
    decayed, kept = (train_compressed(llama(), SGD(weight_decay=0.5)) for _ in range(2))
    decayed.step(batches(1)[0], 0.1)
    kept.step(batches(1)[0], 0.1, decay=False)
    assert bits(kept.release()) == plain(llama(), SGD(), 1, 0.1)[1] != bits(decayed.release())


def test_a_result_is_ternary_and_a_checkpoint_is_latent(tmp_path: Path):
    model = llama(dtype=torch.float32, hidden_act="relu2")
    make_ternary(model)
    trainer = train_compressed(model, "adamw")
    for number, batch in enumerate(batches(4)):
        set_activations(model, TernaryStages("a4.8", 4, 0.5).activations_at(number))
        trainer.step(batch, 1e-3)
    trainer.save(tmp_path / "state")
    trainer.save(tmp_path / "result", resumable=False)
    latent, stored = (
        dict(load_model(tmp_path / name, attention=False).named_parameters()) for name in ("state", "result")
    )
    names = [f"{name}.weight" for name in latent_layers(model)]
    assert len(names) == 7 * SIZES["num_hidden_layers"]
    for name, weight in stored.items():
        assert torch.equal(weight, latent[name]) == (name not in names)
        if name in names:
            assert find_exact(latent[name].detach()) is None
            layer = LatentLinear(latent[name], dtype=torch.float32)
            assert torch.equal(weight, layer.ternary().dequantize(torch.float32))
    assert ACTIVATIONS_ENTRY.read(tmp_path / "result") == Activations("a4.8")
    ids = batches(1)[0][:, :-1]
    with trainer.dense("cpu") as own, torch.no_grad():
        assert torch.equal(own(ids).logits, runnable(tmp_path / "result")(ids).logits)
    set_activations(model, Activations("b1.58"))  # what a second branch from the same state begins with
    again = train_compressed(llama(dtype=torch.float32, hidden_act="relu2"), "adamw")
    again.load(tmp_path / "state")
    assert bits(again.release()) == bits(trainer.release())


def test_a_quantiser_that_no_mode_has_can_be_trained_with():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer = LatentLinear(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
    layer.activation = quantizers.int4_absmax
    quantised = quantizers.int4_absmax(x.detach())
    assert torch.equal(quantize_tokens(x.detach(), layer.activation).codes, quantised.codes)
    wanted = quantised.dequantize().double() @ layer.ternary().dequantize().double().T
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-6, atol=1e-5)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.ternary().dequantize().sum(0).expand_as(x))


def test_presets_have_the_sizes_and_rates_of_the_paper():
    recipe = BITNET["bitnet-a4.8-7b"]
    model = recipe.config(1000, 2048)
    assert (model.hidden_size, model.intermediate_size, model.num_hidden_layers) == (4096, 11008, 32)
    assert (model.num_attention_heads, model.hidden_act) == (32, "relu2")
    keys = preset_keys("bitnet-a4.8-7b")
    assert (keys["lr"], keys["cooldown_lr"], keys["weight_decay"], keys["warmup_steps"]) == (
        1e-3,
        6e-4,
        0.1,
        375,
    )
    assert keys["batch_size"] * keys["window"] == 2**20
    small = recipe.scaled(0.001)
    assert (small.hidden_size, small.intermediate_size, small.heads, small.layers) == (64, 64, 1, 1)
    with pytest.raises(UsageError, match="there is no preset 'bitnet'"):
        preset_keys("bitnet")


def test_a_config_that_was_read_gives_the_weights_of_its_file(tmp_path: Path):
    config = LlamaConfig(**SIZES)
    config.save_pretrained(tmp_path)
    ours, other = (random_model(c, 300, torch.bfloat16, 3) for c in (config, tmp_path))
    assert bits(ours) == bits(other)
