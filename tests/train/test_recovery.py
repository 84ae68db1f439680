"""Training of models with ternary weights: straight-through layers, distillation, whole courses."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BitNetForCausalLM, LlamaConfig, LlamaForCausalLM

from neuzip.compress.schemes.ternary_coding import encode_exact, find_exact
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.eval.demo import split_topics
from neuzip.kernels import quantizers
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.runtime.activations import ACTIVATIONS, ACTIVATIONS_ENTRY, Activations
from neuzip.runtime.bitlinear import BitLinear
from neuzip.runtime.hf.load import load_model
from neuzip.train.loop import Schedule, read_log
from neuzip.train.recovery.course import STATE_FILE, Recovery
from neuzip.train.recovery.distill import LossWeights, head_loss, hidden_loss
from neuzip.train.recovery.latent import require_plain_head, runnable
from neuzip.train.recovery.run import recover, thinned, within
from neuzip.train.recovery.settings import RecoverySettings
from neuzip.train.recovery.straight_through import LatentLinear, inside, integer_product
from neuzip.train.recovery.ternary import TernaryRecipe, convert, save
from neuzip.train.text import TrainingWindows

DEMO = Path(__file__).parents[2] / "eval" / "demo" / "checkpoint"
GPU = pytest.param("cuda", marks=pytest.mark.gpu)

pytestmark = pytest.mark.usefixtures("one_thread")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The layer


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["int8", "int4", "fp4", "top_k_int8", "none"])
@pytest.mark.parametrize("group", [None, "row"], ids=["tensor", "row"])
@pytest.mark.parametrize("shape", [(40, 24, 304), (3, 21, 50)], ids=str)
def test_it_computes_the_bits_of_inference(group, activation, dtype, shape, device):
    tokens, out, columns = shape
    layer = LatentLinear(
        0.02 * numbers(out, columns), numbers(out, seed=1), learned=group is None, group=group,
        activation=activation,
    ).to(device)  # fmt: skip
    x = numbers(2, tokens, columns, seed=2).to(device, dtype)
    weight = TernaryWeight.of(layer.ternary())
    assert layer.bias is not None
    bias = layer.bias.detach().to(dtype)
    with torch.no_grad():
        layer.bias.copy_(bias)
        wanted = BitLinear(weight, nn.Parameter(bias), activation)(x)
        found = layer(x)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("activation", ["int8", "int4", "top_k_int8"])
def test_gradients_pass_the_quantisers_as_if_they_were_not_there(activation: str, strength: float):
    """The weight's are those of a dense layer whose input is the quantised one, the input's likewise."""
    layer = LatentLinear(0.02 * numbers(24, 64), learned=True, activation=activation)
    layer.strength = strength
    x = numbers(10, 64, seed=1).requires_grad_()
    weights = numbers(10, 24, seed=2)
    (layer(x) * weights).sum().backward()
    ternary = layer.ternary()
    quantised = ACTIVATIONS[activation](x.detach()).dequantize()  # type: ignore[misc]
    seen = (x + strength * (quantised - x)).detach().requires_grad_()
    dense = layer.weight.detach() + strength * (ternary.dequantize() - layer.weight.detach())
    dense.requires_grad_()
    (F.linear(seen, dense) * weights).sum().backward()
    assert layer.weight.grad is not None and layer.log_scale is not None
    torch.testing.assert_close(layer.weight.grad, dense.grad)
    torch.testing.assert_close(x.grad, seen.grad)
    of_scale = strength * (dense.grad * ternary.codes).sum() * ternary.scale  # type: ignore[operator]
    torch.testing.assert_close(layer.log_scale.grad, of_scale, rtol=5e-3, atol=1e-4)


def test_absmean_is_that_of_bitnet():
    weight = 0.02 * numbers(64, 128)
    found = LatentLinear(weight, dtype=torch.float32).ternary()
    wanted = quantizers.absmean(weight, epsilon=1e-12)
    assert torch.equal(found.codes, wanted.codes)
    torch.testing.assert_close(found.scale, wanted.scale)


@pytest.mark.parametrize("group", [None, 96], ids=["tensor", "row"])
def test_it_begins_with_the_codes_and_scales_of_a_conversion(group: int | None):
    weight, seen = 0.02 * numbers(48, 96), numbers(500, 96, seed=3)
    start = quantizers.error_feedback(weight, seen.T @ seen, group=group)
    start = replace(start, scale=start.scale.bfloat16().float())
    layer = LatentLinear(weight, start=start, learned=True, group=None if group is None else "row")
    found = layer.ternary()
    assert torch.equal(found.codes, start.codes)
    assert torch.equal(found.scale, start.scale)
    kept = layer.weight == weight
    assert 0.5 < float(kept.float().mean()) < 1  # where the nearest code was taken nothing was moved


def test_latent_weights_are_moved_no_further_than_needed():
    weight = torch.tensor([-3.0, -0.6, 0.1, 0.4, 0.6, 3.0])
    codes = torch.tensor([-1, 0, 1, 0, 0, 1], dtype=torch.int8)
    expected = torch.tensor([-3.0, -0.45, 0.55, 0.4, 0.45, 3.0])
    torch.testing.assert_close(inside(weight, codes, torch.tensor(1.0)), expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("shape", [(5, 16, 64), (40, 17, 64), (40, 16, 256), (64, 24, 304)], ids=str)
def test_sums_are_exact(shape, device):
    tokens, out, columns = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (tokens, columns), generator=g, dtype=torch.int8)
    w = torch.randint(-1, 2, (out, columns), generator=g, dtype=torch.int8)
    found = integer_product(x.to(device), w.to(device)).cpu()
    assert torch.equal(found, (x.long() @ w.long().T).float())


# The loss


@pytest.mark.parametrize(
    "weights",
    [LossWeights(), LossWeights(0.7, 0.3, temperature=2.5), LossWeights(0.0, 1.0)],
    ids=["kl", "both", "ce"],
)
@pytest.mark.parametrize("rows", [7, 100])
def test_head_loss_is_what_autograd_says(weights: LossWeights, rows: int):
    hidden, head = numbers(30, 16).requires_grad_(), numbers(50, 16, seed=1).requires_grad_()
    teacher, its = numbers(30, 12, seed=2), numbers(50, 12, seed=3)
    targets = torch.arange(30)
    found = head_loss(hidden, head, teacher, its, targets, weights, rows)
    (2 * found.total).backward()
    own = [x.detach().double().requires_grad_() for x in (hidden, head)]
    t, logits, base = weights.temperature, own[0] @ own[1].T, (teacher @ its.T).double()
    kld = F.kl_div((logits / t).log_softmax(-1), (base / t).softmax(-1), reduction="batchmean")
    nll = F.cross_entropy(logits, targets)
    (2 * (weights.divergence * t * t * kld + weights.cross_entropy * nll)).backward()
    torch.testing.assert_close(found.divergence.double(), kld.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.cross_entropy.double(), nll.detach(), rtol=1e-4, atol=1e-5)
    for one, other in zip((hidden, head), own, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, check_dtype=False)


def test_hidden_loss_is_relative():
    states = [numbers(2, 5, 8, seed=n) for n in range(3)]
    assert float(hidden_loss(states, states)) == 0
    assert float(hidden_loss([1.1 * s for s in states], states)) == pytest.approx(0.01, rel=1e-4)


# Courses


def corpus() -> Tensor:
    """Tokens whose successors are far from evenly spread, so that there is something to know."""
    g = torch.Generator().manual_seed(0)
    likely = torch.randint(64, (64, 4), generator=g)
    ids = [0]
    for choice in torch.randint(4, (6000,), generator=g).tolist():
        ids.append(int(likely[ids[-1], choice]))
    return torch.tensor(ids)


def windows(batch: int = 8, length: int = 32) -> TrainingWindows:
    return TrainingWindows.of(corpus(), length=length, batch=batch, seed=1)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that has learnt the corpus."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, attention_dropout=0.1,
        dtype="bfloat16",
    )  # fmt: skip
    model, text = LlamaForCausalLM(config), windows(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for number in range(150):
        batch = text.batch(number)
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1.8  # the text has log 4 = 1.39, no knowledge is log 64 = 4.16
    path = tmp_path_factory.mktemp("recovery") / "original"
    nn.Module.to(model, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


def begin(original: Path, src: Path | None = None, **settings) -> Recovery:
    base = load_model(original, torch.float32)
    return Recovery.begin(src or original, base, windows(), RecoverySettings(**{"lr": 2e-3, **settings}))


def kld(original: Path, model: nn.Module) -> float:
    """The divergence on windows that are the last of their epoch."""
    ids = torch.cat([windows().batch(n) for n in (20, 21, 22)])[:, :-1]
    base = load_model(original, torch.float32)
    with torch.no_grad():
        ours, theirs = (m(ids).logits.float().log_softmax(-1).flatten(0, 1) for m in (model, base))
    return float(F.kl_div(ours, theirs, log_target=True, reduction="batchmean"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scales": "absmean", "strength": 0.3},
        {"sub_norms": True},
        {"activations": "a4.8"},
        {"group": "row", "loss": LossWeights(1.0, 0.2, 0.5, 2.0), "noise": 0.05},
    ],
    ids=["learned", "absmean", "sub-norms", "a4.8", "rows-all-losses"],
)
def test_a_course_recovers(settings, original: Path, tmp_path: Path):
    """After it the model, as it runs, is much nearer to the original; what is stored is exactly ternary."""
    course = begin(original, **settings)
    for layer in course.latent.values():
        layer.strength = 1.0
    before = kld(original, course.student)
    found = recover(course, original, tmp_path / "r", steps=100)
    model = runnable(tmp_path / "r", None, "cpu", torch.float32)
    assert kld(original, model) < 0.5 * before
    assert len(found.figures) == found.steps == 100
    assert found.is_complete
    assert ACTIVATIONS_ENTRY.read(tmp_path / "r") == Activations(settings.get("activations", "b1.58"))
    plain = load_model(tmp_path / "r")
    assert isinstance(plain, BitNetForCausalLM) == ("sub_norms" in settings)
    assert len(found.ternary) == 14
    for name, ternary in found.ternary.items():
        weight = plain.get_submodule(name).weight
        stored = find_exact(weight.detach())
        assert stored is not None
        assert torch.equal(stored.codes, ternary.codes)
        assert torch.equal(stored.scale.flatten(), ternary.scale.flatten())
        assert encode_exact(weight.detach()).quantizer == "exact"
    assert {p.name for p in (tmp_path / "r").iterdir()} >= {"recovery.jsonl", "recovery.svg", "recovery.json"}
    assert not (tmp_path / "r" / "state").exists()
    assert len(read_log(tmp_path / "r" / "recovery.jsonl")) == 100


@pytest.mark.slow
def test_what_runs_is_what_was_trained(original: Path, tmp_path: Path):
    """The stored checkpoint, its layers in integers, gives the logits of a student with its weights."""
    course = begin(original)
    recover(course, original, tmp_path / "r", steps=5)
    again = begin(original, tmp_path / "r")
    ids = windows().batch(3)[:, :-1]
    with torch.no_grad():
        wanted = again.student(ids).logits
        found = runnable(tmp_path / "r", None, "cpu", torch.float32)(ids).logits
    assert torch.equal(found, wanted)


def test_it_goes_on_from_a_converted_checkpoint(original: Path, tmp_path: Path):
    model = load_model(original, torch.float32)
    found = convert(model, TernaryRecipe("error-feedback", "row"), windows().ids[:2048].view(-1, 32))
    nn.Module.to(model, dtype=torch.bfloat16)
    save(model, original, tmp_path / "converted")
    course = begin(original, tmp_path / "converted", group="tensor")
    for name, ternary in course.ternary().items():
        assert torch.equal(ternary.codes, found[f"{name}.weight"].codes)
        assert torch.equal(ternary.scale, found[f"{name}.weight"].scale.bfloat16().float())


def test_another_model_that_is_not_ternary_is_refused(original: Path, tmp_path: Path):
    model = load_model(original, torch.float32)
    convert(model, TernaryRecipe("least-squares", 8))  # a scale for a part of a row
    nn.Module.to(model, dtype=torch.bfloat16)
    save(model, original, tmp_path / "converted")
    with pytest.raises(NeuzipError, match="a scale a tensor or a row"):
        begin(original, tmp_path / "converted")


def test_thinned_logs_keep_the_last_step():
    figures = [{"step": float(n), "loss": 1.0} for n in range(11)]
    assert [one["step"] for one in thinned(figures, 4)] == [1, 4, 7, 10]
    assert thinned(figures, 11) == figures
    assert thinned([], 3) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, {"activations": "a4.8", "loss": LossWeights(1.0, 0.1, 0.1)}], ids=str
)
def test_a_course_on_a_gpu(settings, original: Path, tmp_path: Path):
    """In bf16, by the kernels of inference, with a fused optimizer whose moments come back as they were."""
    base = load_model(original, None, "cuda")
    course = Recovery.begin(original, base, windows(), RecoverySettings(lr=2e-3, **settings))
    before = kld(original, course.student.cpu())
    course = Recovery.begin(original, base, windows(), RecoverySettings(lr=2e-3, **settings))
    course.fit(1.0)  # compiles the kernels, which takes as long as it takes
    assert course.fit(10.0) > 40
    recover(course, original, tmp_path / "r", steps=100, keep_state=tmp_path / "state")
    assert kld(original, runnable(tmp_path / "r", None, "cpu", torch.float32)) < 0.5 * before
    again = Recovery.begin(original, base, windows(), RecoverySettings(lr=2e-3, **settings))
    assert again.load_state(tmp_path / "state") == 100
    moments = again.optimizer.state[again.latent["model.layers.0.mlp.up_proj"].weight]
    assert all(value.is_cuda for value in moments.values())
    assert float(moments["step"]) == 100
    again.step(0, 1e-4)


@pytest.mark.gpu
def test_head_loss_on_a_gpu_is_that_of_a_cpu():
    arrays = numbers(300, 64), numbers(1000, 64, seed=1), numbers(300, 64, seed=2), numbers(1000, 64, seed=3)
    results = []
    for device in ("cpu", "cuda"):
        own = [x.to(device, copy=True).requires_grad_(n < 2) for n, x in enumerate(arrays)]
        found = head_loss(*own, torch.arange(300, device=device), LossWeights(1.0, 0.5), 128)
        found.total.backward()
        results.append([x.cpu() for x in (found.total.detach(), own[0].grad, own[1].grad)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-4)  # TF32


def same(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_stopped_course_goes_on_as_if_it_had_not_been(original: Path, tmp_path: Path):
    """Latent weights, moments, order of windows, noise and learning rates: the results are the same bytes."""

    class Killed(Exception):
        pass

    def stop(number: int, figures: dict[str, float]) -> None:
        if number == 12:
            raise Killed

    settings = {"noise": 0.1, "strength": 0.5}
    recover(begin(original, **settings), original, tmp_path / "whole", steps=20)
    with pytest.raises(Killed):
        recover(begin(original, **settings), original, tmp_path / "r", steps=20, on_step=stop)
    assert not (tmp_path / "r").exists()
    with pytest.raises(UsageError, match="begun with another seed"):
        recover(begin(original, **settings, seed=3), original, tmp_path / "r", steps=20)
    with pytest.raises(UsageError, match="for 20 steps"):
        recover(begin(original, **settings), original, tmp_path / "r", steps=30)
    other = begin(original, **settings)
    other.windows = TrainingWindows.of(corpus()[:3000], length=32, batch=8, seed=1)
    with pytest.raises(UsageError, match="begun with another text"):
        recover(other, original, tmp_path / "r", steps=20)
    found = recover(begin(original, **settings), original, tmp_path / "r", steps=20)
    assert found.resumed_at == 12
    assert same(tmp_path / "r", tmp_path / "whole")
    logs = [read_log(tmp_path / name / "recovery.jsonl") for name in ("r", "whole")]
    assert [one["loss"] for one in logs[0]] == [one["loss"] for one in logs[1]]
    assert [one["step"] for one in logs[0]] == list(range(1, 21))


@pytest.mark.slow
def test_a_course_goes_on_only_with_the_models_that_it_began_with(original: Path, tmp_path: Path):
    """Under other paths they may be the same, under the same path others."""
    course = begin(original)
    course.save_state(tmp_path / "state", 3)
    assert begin(original).load_state(tmp_path / "state") == 3
    other = load_model(original, torch.float32)
    with torch.no_grad():
        other.model.norm.weight[0] += 0.5
    nn.Module.to(other, dtype=torch.bfloat16).save_pretrained(tmp_path / "other")
    base = load_model(original, torch.float32)
    model = load_model(original, torch.float32)
    convert(model, TernaryRecipe("absmean"))
    save(nn.Module.to(model, dtype=torch.bfloat16), original, tmp_path / "converted")
    settings = RecoverySettings(lr=2e-3)
    for src, teacher, changed in (
        (original, load_model(tmp_path / "other", torch.float32), "original"),
        (tmp_path / "converted", base, "source"),
    ):
        teacher.config.name_or_path = str(original)
        again = Recovery.begin(src, teacher, windows(), settings)
        with pytest.raises(UsageError, match=f"begun with another {changed}$"):
            again.load_state(tmp_path / "state")
    half = Recovery.begin(original, load_model(original, torch.bfloat16), windows(), settings)
    assert half.load_state(tmp_path / "state") == 3  # the same values, as on a GPU


def test_what_is_no_number_changes_no_weight(original: Path, monkeypatch: pytest.MonkeyPatch):
    course = begin(original)
    course.step(0, 1e-3)
    before = {name: p.detach().clone() for name, p in course.student.named_parameters()}
    moments = course._moments()
    losses = Recovery._losses
    monkeypatch.setattr(Recovery, "_losses", lambda self, n: {**losses(self, n), "loss": float("nan")})
    with pytest.raises(NeuzipError, match="step 8: the loss is nan, and no weight was changed"):
        course.step(7, 1e-3)
    monkeypatch.undo()
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("inf")))
    with pytest.raises(NeuzipError, match="step 9: the norm of the gradients is inf"):
        course.step(8, 1e-3)
    assert all(torch.equal(p, before[name]) for name, p in course.student.named_parameters())
    assert all(torch.equal(value, moments[name]) for name, value in course._moments().items())


@pytest.mark.parametrize(("strength", "timed"), [(0.0, {1.0}), (1.0, {0.5}), (0.25, {0.5, 1.0})])
def test_steps_in_which_quantisation_is_warmed_up_are_timed_apart(
    strength: float, timed: set[float], original: Path, monkeypatch: pytest.MonkeyPatch
):
    """At half strength a step takes 3 ms here, in full 1 ms."""
    course, seen, now = begin(original, strength=strength), set(), [0.0]

    def trained(number: int, lr: float, given: float) -> dict[str, float]:
        seen.add(given)
        now[0] += 3e-3 if given < 1 else 1e-3
        return {}

    monkeypatch.setattr(course, "_trained", trained)
    monkeypatch.setattr("neuzip.train.recovery.course.time.perf_counter", lambda: now[0])
    steps = course.fit(10.0)
    assert seen == timed
    assert steps == pytest.approx(0.97 * 10 / (1e-3 * (1 + 2 * strength)), rel=0.05)


@pytest.mark.slow
def test_a_state_that_cannot_be_kept_is_told_before_anything_is_trained(original: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for keep, said in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "is a file"),
        (tmp_path / "r" / "state", "lies within"),
    ):
        with pytest.raises(NeuzipError, match=said):
            recover(begin(original), original, tmp_path / "r", steps=1, keep_state=keep)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told(original: Path, tmp_path: Path):
    course = begin(original)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(NeuzipError, match="state: cannot be written: File too large"):
            course.save_state(tmp_path / "state", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "state" / STATE_FILE).exists()


@pytest.mark.slow
def test_the_second_stage_keeps_latent_weights_and_moments(original: Path, tmp_path: Path):
    first = begin(original)
    recover(first, original, tmp_path / "b158", steps=15, keep_state=tmp_path / "state")
    second = begin(original, tmp_path / "b158", activations="a4.8")
    assert second.load_state(tmp_path / "state", resume=False) == 0
    layer = second.latent["model.layers.1.mlp.gate_proj"]
    assert layer.activation == "int4"
    assert not torch.equal(layer.weight, layer.ternary().dequantize())
    assert torch.equal(
        second.ternary()["model.layers.1.mlp.gate_proj"].codes,
        find_exact(load_model(tmp_path / "b158").get_submodule("model.layers.1.mlp.gate_proj").weight).codes,
    )
    moments = second.optimizer.state[layer.weight]
    assert moments["step"] == 15
    assert float(moments["exp_avg_sq"].sum()) > 0
    recover(second, tmp_path / "b158", tmp_path / "a48", steps=5, from_state=tmp_path / "state")
    assert second.optimizer.state[layer.weight]["step"] == 20
    assert ACTIVATIONS_ENTRY.read(tmp_path / "a48") == Activations("a4.8")


@pytest.mark.slow
def test_a_budget_of_time_decides_how_many_steps_there_are(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a clock on which a step takes 50 ms, and nothing else any time."""
    course, now = begin(original), [0.0]
    trained = course._trained

    def slowly(number: int, lr: float, strength: float) -> dict[str, float]:
        now[0] += 0.05
        return trained(number, lr, strength)

    monkeypatch.setattr(course, "_trained", slowly)
    monkeypatch.setattr("neuzip.train.recovery.course.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("neuzip.train.loop.time.monotonic", lambda: now[0])
    before = {name: p.detach().clone() for name, p in course.student.named_parameters()}
    assert course.fit(5.0) > 1
    assert not course.optimizer.state
    for name, parameter in course.student.named_parameters():
        assert torch.equal(parameter, before[name])
    found = recover(course, original, tmp_path / "r", seconds=1.0)
    assert len(found.figures) == course.steps > 1
    assert sum(one["seconds"] for one in found.figures) == pytest.approx(0.05 * course.steps)
    assert 0.05 * course.steps <= 1.0


def test_the_rate_has_fallen_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch):
    """Steps that take longer than was planned are fewer, and the last one still has the least rate."""
    now = [100.0]
    monkeypatch.setattr("neuzip.train.recovery.run.time.monotonic", lambda: now[0])
    schedule = Schedule(1.0, 100, 0, 0.1, "linear")
    rate = within(schedule, 100, 10.0, 8.0)  # 2 of 10 seconds were used before a stop
    assert rate(5) == schedule(20)
    assert rate(30) == schedule(30)  # faster than planned: step by step
    now[0] += 4.0
    assert rate(30) == schedule(60)
    now[0] += 8.0
    assert rate(60) == schedule(99) == 0.1


@pytest.mark.slow
def test_damaged_and_foreign_states_are_refused(original: Path, tmp_path: Path):
    course = begin(original)
    with pytest.raises(FormatError, match="no state"):
        course.load_state(tmp_path)
    (tmp_path / STATE_FILE).write_bytes(b"12345678" * 4)
    with pytest.raises(FormatError, match="not a safetensors file"):
        course.load_state(tmp_path)
    course.save_state(tmp_path, 3)
    whole = (tmp_path / STATE_FILE).read_bytes()
    (tmp_path / STATE_FILE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FormatError, match="it is damaged"):
        course.load_state(tmp_path)
    begin(original, scales="absmean").save_state(tmp_path, 3)
    with pytest.raises(FormatError, match="another model, or of other scales"):
        course.load_state(tmp_path, resume=False)


def test_another_base_is_refused(original: Path):
    other = load_model(DEMO, torch.float32)
    other.config.name_or_path = str(original)
    with pytest.raises(NeuzipError, match="has another shape there"):
        Recovery.begin(original, other, windows(), RecoverySettings())


def test_heads_that_are_more_than_a_matrix_are_refused(original: Path):
    model = load_model(original, torch.float32)
    require_plain_head(model)
    head = model.lm_head
    model.lm_head = nn.Linear(32, 64)
    model.lm_head.weight = head.weight
    with pytest.raises(NeuzipError, match="not hidden states times"):
        require_plain_head(model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise": 1.5}, "noise is 1.5"),
        ({"loss": LossWeights(0.0)}, "nothing is to be learned"),
        ({"loss": LossWeights(temperature=0.0)}, "temperature"),
        ({"activations": "a2"}, "no activation mode"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said: str):
    with pytest.raises(UsageError, match=said):
        RecoverySettings(**settings)


# The command


@pytest.mark.slow
def test_the_command(neuzip, tmp_path: Path):
    text, out = tmp_path / "text.txt", tmp_path / "r"
    text.write_text("\n\n".join(split_topics()[0][:4]))
    said = neuzip(
        "recover", DEMO, "--text", text, "--steps", 8, "--batch", 2, "--window", 32, "--output", out,
        "--eval-text", "demo", "--max-tokens", 512, "--device", "cpu", "--json",
    )  # fmt: skip
    assert said.exit_code == 0, said.stderr
    report = json.loads(said.stdout)
    assert report["steps"] == 8
    assert report["tokens"] == 8 * 2 * 32
    assert len(report["tensors"]) == 42
    divergences = [report[when]["kld"]["mean"]["value"] for when in ("before", "after")]
    assert 0.2 < divergences[1] < divergences[0]
    assert "farther" not in said.stderr
    said = neuzip("compress", out, tmp_path / "r.nz", "--ternary", "--json")
    assert said.exit_code == 0, said.stderr
    stored = {t["name"]: t["scheme"] for t in json.loads(said.stdout)["tensors"]}
    assert all(stored[f"{name}.weight"].startswith("ternary exact") for name in report["tensors"])
    said = neuzip("recover", DEMO, "--text", text, "--steps", 4, "--output", out)
    assert said.exit_code == 1
    assert "exists already" in said.stderr


@pytest.mark.slow
def test_a_result_that_is_farther_from_the_original_is_told(neuzip, tmp_path: Path):
    (tmp_path / "text.txt").write_text("A text of some words. " * 60)
    said = neuzip(
        "recover", DEMO, "--text", tmp_path / "text.txt", "--steps", 2, "--batch", 1, "--window", 32,
        "--lr", 1, "--output", tmp_path / "r", "--eval-text", "demo", "--max-tokens", 256, "--device", "cpu",
    )  # fmt: skip
    assert said.exit_code == 0, said.stderr
    assert (
        "warning: training moved the model away from the original\nhint: train for more steps" in said.stderr
    )


def test_a_state_that_is_not_there_is_told_at_once(neuzip, tmp_path: Path):
    (tmp_path / "text.txt").write_text("A text of some words. " * 500)
    said = neuzip(
        "recover", DEMO, "--text", tmp_path / "text.txt", "--steps", 2, "--output", tmp_path / "r",
        "--from-state", tmp_path / "none",
    )  # fmt: skip
    assert said.exit_code == 1
    assert said.stderr == (
        f"error: {tmp_path / 'none'}: holds no state of a recovery, {STATE_FILE}\n"
        "hint: give the folder that --keep-state named\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.slow
def test_a_state_of_another_model_leaves_no_workspace(original: Path, tmp_path: Path):
    begin(original, scales="absmean").save_state(tmp_path / "state", 3)
    with pytest.raises(FormatError, match="another model, or of other scales"):
        recover(begin(original), original, tmp_path / "r", steps=2, from_state=tmp_path / "state")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give --budget TIME or --steps N"),
        (["--steps", 3, "--budget", "3m"], "give --budget TIME or --steps N"),
        (["--budget", "3"], "not a time"),
        (["--steps", 3, "--window", 512], "has 256 positions"),
        (["--steps", 3, "--kld", 0], "nothing is to be learned"),
        (["--steps", 3, "--kld", 0, "--hidden", 1, "--temperature", 2], "--temperature 2 has no effect"),
        (["--steps", 3, "--original", DEMO, "--ternary-group", "row"], "--ternary-group row has no effect"),
    ],
)
def test_what_the_command_refuses(options, said: str, neuzip, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("A text of some words. " * 500)
    found = neuzip("recover", DEMO, "--text", text, "--output", tmp_path / "r", *options)
    assert found.exit_code == 2
    assert said in found.stderr
    assert not (tmp_path / "r").exists()
