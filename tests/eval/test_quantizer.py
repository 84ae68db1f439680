"""Calibrated quantisation: steps by sensitivity, codes with error feedback, and predictions of both."""

from __future__ import annotations

import copy
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from neuzip.compress.schemes.code_tables import STREAM_BYTES
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import NeuzipError
from neuzip.eval.quantize import statistics
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import find_parameters
from neuzip.eval.quantize.gradients import drawn_gradients
from neuzip.eval.quantize.quantizer import Quantizer
from neuzip.eval.quantize.settings import CalibrationSettings
from neuzip.eval.quantize.statistics import gather, windows_of_pass

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 0.02
WINDOWS = CalibrationWindows.of(torch.randint(64, (1025,), generator=torch.Generator().manual_seed(1)), 32)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request, tmp_path_factory) -> tuple[LlamaForCausalLM, Path]:
    model = models.llama(
        0, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=request.param,
    ).to(torch.bfloat16)  # fmt: skip
    path = tmp_path_factory.mktemp("quantizer") / "model"
    model.save_pretrained(path)
    return model.float().eval(), path


def matrices(source: FolderSource) -> list[str]:
    return [t.name for t in source.tensors() if len(t.info.shape) == 2]


def divergence(model: LlamaForCausalLM, quantizer: Quantizer, names: list[str], step: float) -> float:
    other = copy.deepcopy(model)
    parameters = dict(other.named_parameters())
    with torch.no_grad():
        for name in names:
            codes, grid = quantizer.at(step).codes_of(name)
            parameters[name].copy_(grid.values(torch.from_numpy(codes), torch.bfloat16))
        p = model(WINDOWS.fed).logits.log_softmax(-1)
        return float((p.exp() * (p - other(WINDOWS.fed).logits.log_softmax(-1))).sum(-1).mean())


def test_divergence_is_as_predicted_and_less_than_without_feedback_or_calibration(checkpoint):
    model, path = checkpoint
    with FolderSource(path) as source:
        names = matrices(source)
        calibrated = Quantizer.prepare(model, source, names, WINDOWS)
        nearest = Quantizer.prepare(model, source, names, WINDOWS, CalibrationSettings(feedback=False))
        plain = Quantizer.prepare(None, source, names, None)
        of_feedback, of_nearest = (divergence(model, q, names, STEP) for q in (calibrated, nearest))
    assert of_feedback < of_nearest
    assert of_feedback == pytest.approx(calibrated.curvature * STEP**2, rel=0.4)
    assert of_nearest == pytest.approx(nearest.curvature * STEP**2, rel=0.4)
    assert plain.curvature is None


def test_the_mean_step_is_that_of_all_weights(checkpoint):
    model, path = checkpoint
    with FolderSource(path) as source:
        names = matrices(source)
        sizes = {t.name: t.info.numel for t in source.tensors()}
        quantizer = Quantizer.prepare(model, source, names, WINDOWS)
        logs = [np.log(quantizer.at(STEP).codes_of(n)[1].step) * sizes[n] for n in names]
    assert np.exp(sum(logs) / sum(sizes[n] for n in names)) == pytest.approx(STEP, rel=1e-5)


def test_codes_are_the_same_again_and_their_identity_tells_texts_and_steps_apart(checkpoint):
    model, path = checkpoint
    with FolderSource(path) as source:
        names = matrices(source)
        one, again = (Quantizer.prepare(model, source, names, WINDOWS) for _ in range(2))
        other = Quantizer.prepare(model, source, names, CalibrationWindows.of(torch.arange(64), 32))
        for name in names:
            codes, grid = one.at(STEP).codes_of(name)
            assert codes.dtype == np.int16
            assert np.array_equal(codes, again.at(STEP).codes_of(name)[0])
            assert grid.step == again.at(STEP).codes_of(name)[1].step
        assert one.at(STEP).codes_of("model.norm.weight") is None
    identities = {one.at(STEP).identity, one.at(STEP / 2).identity, other.at(STEP).identity}
    assert len(identities) == 3
    assert again.at(STEP).identity == one.at(STEP).identity


def test_predicted_bytes_fall_as_the_step_grows(checkpoint):
    """By the entropy of the codes, and by a larger table or raw low bits for each of the small matrices."""
    _, path = checkpoint
    with FolderSource(path) as source:
        quantizer = Quantizer.prepare(None, source, matrices(source), None)
        fine, coarse = (quantizer.expected_bytes(step) for step in (0.001, 0.01))
        empty = quantizer.expected_bytes(2 * quantizer.largest_step)
        sizes = [t.info.numel for t in source.tensors() if len(t.info.shape) == 2]
    beyond_entropy = fine - coarse - np.log2(10) * sum(sizes) / 8
    assert 0 < beyond_entropy < STREAM_BYTES * len(sizes)
    assert empty < coarse


def test_linear_modules_that_see_the_same_inputs_share_their_products(checkpoint):
    model, path = checkpoint
    with FolderSource(path) as source:
        tensors = [t for t in source.tensors() if len(t.info.shape) == 2]
        known = gather(model, find_parameters(model, source, tensors), WINDOWS, lambda count: None)
    keys = {name.removeprefix("model.layers.0."): one.gram for name, one in known.tensors.items()}
    assert (
        keys["self_attn.q_proj.weight"] == keys["self_attn.k_proj.weight"] == keys["self_attn.v_proj.weight"]
    )
    assert keys["mlp.gate_proj.weight"] == keys["mlp.up_proj.weight"] != keys["mlp.down_proj.weight"]
    seen: list[Tensor] = []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    with torch.no_grad():
        for fed in WINDOWS.fed:
            model(fed[None])
    hook.remove()
    x = torch.cat(seen, 1)[0]
    gram = known.grams[known.tensors["model.layers.1.mlp.down_proj.weight"].gram]
    torch.testing.assert_close(gram, x.T @ x, rtol=1e-3, atol=1e-3)


def test_inputs_are_those_of_all_windows_and_gradients_those_of_some(checkpoint, monkeypatch):
    model, path = checkpoint
    told: list[int] = []
    with FolderSource(path) as source:
        places = find_parameters(model, source, [t for t in source.tensors() if len(t.info.shape) == 2])
        whole = gather(model, places, WINDOWS, lambda count: None)
        monkeypatch.setattr(statistics, "GRADIENT_TOKENS", 64)
        fewer = gather(model, places, WINDOWS, told.append)
    assert sum(told) == WINDOWS.tokens and len(told) == 11 + 1, "forward only, windows run together"
    for name, one in fewer.tensors.items():
        of_all = whole.tensors[name]
        assert one.sensitivity != of_all.sensitivity
        assert one.sensitivity == pytest.approx(of_all.sensitivity, rel=0.5)
        if "embed" not in name:  # of whose gradients there are fewer
            torch.testing.assert_close(fewer.grams[one.gram], whole.grams[of_all.gram], rtol=1e-3, atol=1e-3)


def test_a_pass_over_several_windows_has_the_sum_of_their_gradients(checkpoint):
    model, _ = checkpoint
    weight = model.model.layers[0].mlp.up_proj.weight
    windows, told = CalibrationWindows(WINDOWS.fed[:5], WINDOWS.targets[:5]), list[int]()

    def gradients(batch: int) -> list[Tensor]:
        kept = list[Tensor]()
        drawn_gradients(model, [weight], windows, lambda _, g: kept.append(g), told.append, batch=batch)
        return kept

    a, b, c, d, e = gradients(1)
    for together, expected in zip(gradients(2), (a + b, c + d, e), strict=True):
        torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert told == [32] * 5 + [64, 64, 32]


@pytest.mark.parametrize(
    ("count", "width", "vocabulary", "expected"),
    [(1, 1024, 64, 1), (17, 1024, 64, 2), (32, 1024, 49152, 4), (96, 1024, 151936, 1), (96, 4096, 10**6, 1)],
)
def test_passes_are_eight_and_their_logits_few(count: int, width: int, vocabulary: int, expected: int):
    fed = torch.zeros(count, width, dtype=torch.int64)
    assert windows_of_pass(CalibrationWindows(fed, fed), vocabulary) == expected


@pytest.mark.parametrize(
    ("windows", "least", "share", "expected"),
    [
        (0, 1, 3, []),
        (1, 99, 3, [0]),
        (6, 1, 3, [0, 3]),
        (7, 1, 3, [0, 2, 4]),
        (5, 7, 9, [0, 2]),
        (3, 99, 3, [0, 1, 2]),
    ],
)
def test_windows_are_divided_evenly(windows: int, least: int, share: int, expected: list[int]):
    fed = torch.arange(4 * windows).view(windows, 4)
    chosen, others = CalibrationWindows(fed, fed + 1).divided(least, share)
    assert chosen.fed[:, 0].tolist() == [4 * n for n in expected]
    assert others.fed[:, 0].tolist() == [4 * n for n in range(windows) if n not in expected]
    assert torch.equal(chosen.targets, chosen.fed + 1) and torch.equal(others.targets, others.fed + 1)


def test_weights_that_have_no_codes_are_left_out(tmp_path):
    from safetensors.torch import save_file

    save_file(
        {
            "broken": torch.tensor([[torch.inf, 1.0]]),
            "zero": torch.zeros(4, 8),
            "half": torch.ones(3, 5).half(),
        },
        tmp_path / "model.safetensors",
    )
    with FolderSource(tmp_path) as source:
        quantizer = Quantizer.prepare(None, source, ["broken", "zero", "half"], None)
        assert quantizer.at(1.0).codes_of("broken") is None
        assert not quantizer.at(1.0).codes_of("zero")[0].any()
        codes, grid = quantizer.at(1e-9).codes_of("half")  # finer than 16 bits allow
        assert grid.values(torch.from_numpy(codes), torch.float16).eq(1).all()


@models.needs_version_5
def test_experts_of_a_layer_share_products_and_have_steps_near_each_other(tmp_path):
    model = models.MODELS["experts"]().eval()
    model.save_pretrained(tmp_path)
    windows = CalibrationWindows.of(torch.randint(model.config.vocab_size, (257,)), 16)
    with FolderSource(tmp_path) as source:
        tensors = [t for t in source.tensors() if len(t.info.shape) == 2]
        places = find_parameters(model, source, tensors)
        known = gather(model, places, windows, lambda count: None)
    experts = {n: one for n, one in known.tensors.items() if "layers.1" in n and n.endswith("w2.weight")}
    assert len(experts) == 4
    assert len({one.gram for one in experts.values()}) == 1
    of_all = [one.sensitivity for one in experts.values()]
    assert min(of_all) >= sum(of_all) / 4 / 2
    assert set(known.tensors) == {t.name for t in tensors}


def test_a_model_that_overflows_is_refused(checkpoint):
    model, path = checkpoint
    broken = copy.deepcopy(model)
    broken.model.norm.weight.data.fill_(torch.inf)
    with FolderSource(path) as source, pytest.raises(NeuzipError, match="NaN or infinity") as refusal:
        Quantizer.prepare(broken, source, matrices(source), WINDOWS)
    assert refusal.value.hint == "check the checkpoint's weights, or give `calibration='none'`"
