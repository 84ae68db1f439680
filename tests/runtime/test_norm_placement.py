"""Norms in other places than a Llama's: each formula, and that the models are used as any others."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunAlone
from forked import NO_COLLECTOR
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    __version__,
)

import neuzip
from neuzip.compress import compress
from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.hf.norm_placement import (
    PLACEMENTS,
    NormPlacementConfig,
    NormPlacementForCausalLM,
    NormPlacementModel,
    deepnorm_scales,
)
from neuzip.runtime.residency import is_compressed
from neuzip.train.text import TrainingWindows

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from mix_ln_recipes import (
    RECIPES,
    Recipe,
    gradient_norms,
    held_out_loss,
    new_model,
    stepper,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip

IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96

RESIDENT = int(__version__.partition(".")[0]) >= 5
"""Whether this transformers keeps weights compressed in memory."""


def model(placement: str, seed: int = 1, **more: Any) -> NormPlacementForCausalLM:
    torch.manual_seed(seed)
    return NormPlacementForCausalLM(NormPlacementConfig(norm_placement=placement, **SIZES | more)).eval()


def with_gains(made: NormPlacementForCausalLM) -> NormPlacementForCausalLM:
    """Other gains than ones, so that a norm in the place of another is seen, and larger weights."""
    factor = 1 if made.config.norm_placement == "deepnorm" else 5
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
            elif "layers" in name:
                parameter.mul_(factor)
    return made


# The formulas, once more


def rms(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def stated(made: NormPlacementForCausalLM, placement: str, first_pre: int = 0) -> Tensor:
    """The logits of IDS by the formulas of the papers, from weights and transformers' sublayers alone."""
    weights = dict(made.model.named_parameters())
    x = weights["embed_tokens.weight"][IDS]
    if placement == "peri":
        x = rms(x, weights["embed_layernorm.weight"])
    count = len(made.model.layers)
    positions = made.model.rotary_emb(x, torch.arange(IDS.shape[1])[None])
    mask = torch.full((IDS.shape[1],) * 2, -math.inf).triu(1)[None, None]
    for number, layer in enumerate(made.model.layers, 1):
        gain = {
            name: weights[f"layers.{number - 1}.{name}.weight"]
            for name in ("input_layernorm", "post_attention_layernorm",
                         "pre_feedforward_layernorm", "post_feedforward_layernorm")
            if f"layers.{number - 1}.{name}.weight" in weights
        }  # fmt: skip

        def attend(h: Tensor, layer: Any = layer) -> Tensor:
            out: Tensor = layer.self_attn(h, position_embeddings=positions, attention_mask=mask)[0]
            return out

        here = placement if placement != "mix" else "post" if number <= first_pre else "pre"
        if here == "pre":
            x = x + attend(rms(x, gain["input_layernorm"]))
            x = x + layer.mlp(rms(x, gain["post_attention_layernorm"]))
        elif here == "post":
            x = rms(x + attend(x), gain["post_attention_layernorm"])
            x = rms(x + layer.mlp(x), gain["post_feedforward_layernorm"])
        elif here == "layernorm-scaling":
            x = x + attend(rms(x, gain["input_layernorm"]) / number**0.5)
            x = x + layer.mlp(rms(x, gain["post_attention_layernorm"]) / number**0.5)
        elif here == "deepnorm":
            alpha = (2 * count) ** (1 / 4)
            x = rms(alpha * x + attend(x), gain["post_attention_layernorm"])
            x = rms(alpha * x + layer.mlp(x), gain["post_feedforward_layernorm"])
        else:
            assert here in ("sandwich", "peri")
            x = x + rms(attend(rms(x, gain["input_layernorm"])), gain["post_attention_layernorm"])
            x = x + rms(
                layer.mlp(rms(x, gain["pre_feedforward_layernorm"])), gain["post_feedforward_layernorm"]
            )
    return rms(x, weights["norm.weight"]) @ made.lm_head.weight.T


TWINS = {"pre": "layernorm-scaling", "layernorm-scaling": "pre", "post": "deepnorm", "deepnorm": "post",
         "peri": "sandwich"}  # fmt: skip
"""Placements with the same parameters, or fewer, and another formula."""


@pytest.mark.parametrize("placement", PLACEMENTS)
@torch.no_grad()
def test_logits_are_those_of_the_formula(placement: str):
    made = with_gains(model(placement, post_norm_ratio=0.5, attn_implementation="eager"))
    logits = made(IDS).logits
    torch.testing.assert_close(logits, stated(made, placement, first_pre=2), rtol=1e-4, atol=1e-5)
    if placement in TWINS:
        assert not torch.allclose(logits, stated(made, TWINS[placement]), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_pre_is_transformers_llama_bit_for_bit():
    torch.manual_seed(1)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ours = model("pre")
    for (name, mine), (other, theirs) in zip(
        sorted(ours.state_dict().items()), sorted(llama.state_dict().items()), strict=True
    ):
        assert name == other and torch.equal(mine, theirs), "the same seed gives the same weights"
    assert torch.equal(ours(IDS).logits, llama(IDS).logits)


def test_pre_learns_as_transformers_llama_bit_for_bit():
    gradients = []
    for kind, config in ((NormPlacementForCausalLM, NormPlacementConfig), (LlamaForCausalLM, LlamaConfig)):
        torch.manual_seed(1)
        made = kind(config(**SIZES))
        made(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in made.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())


@pytest.mark.parametrize(("ratio", "same"), [(0.0, "pre"), (0.24, "pre"), (1.0, "post")])
@torch.no_grad()
def test_the_ends_of_mix(ratio: float, same: str):
    mixed, other = model("mix", post_norm_ratio=ratio), model(same)
    other.load_state_dict(mixed.state_dict())
    assert torch.equal(mixed(IDS).logits, other(IDS).logits)


@pytest.mark.parametrize(
    ("layers", "ratio", "post"),
    [(12, 0.25, 3), (24, 0.25, 6), (32, 0.0625, 2), (24, 0.167, 4), (24, 0.417, 10), (24, 1 / 3, 8),
     (100, 0.29, 29), (7, 0.5, 3), (4, 0.99, 3)],
)  # fmt: skip
def test_how_many_layers_of_mix_are_post(layers: int, ratio: float, post: int):
    config = NormPlacementConfig("mix", ratio, num_hidden_layers=layers)
    assert [config.placement_of(layer) for layer in range(layers)] == ["post"] * post + ["pre"] * (
        layers - post
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_are_finite_and_reach_every_parameter(placement: str):
    made = model(placement).train()
    # 4.57 knows the older name alone.
    getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)()
    made(IDS, labels=IDS).loss.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero(), name


# What a model begins with


def test_first_weights_of_deepnorm():
    made = model("deepnorm", hidden_size=256, intermediate_size=512, num_attention_heads=4)
    alpha, beta = deepnorm_scales(4)
    assert alpha == pytest.approx(8**0.25) and beta == pytest.approx(32**-0.25)
    for layer in made.model.layers:
        for name, out, read, gain in (
            ("self_attn.q_proj", 256, 256, 1), ("self_attn.k_proj", 64, 256, 1),
            ("self_attn.v_proj", 64, 256, beta), ("self_attn.o_proj", 256, 256, beta),
            ("mlp.gate_proj", 512, 256, beta), ("mlp.up_proj", 512, 256, beta),
            ("mlp.down_proj", 256, 512, beta),
        ):  # fmt: skip
            weight = layer.get_submodule(name).weight
            assert weight.std().item() == pytest.approx(gain * (2 / (out + read)) ** 0.5, rel=0.03), name
    assert made.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert made.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("placement", [p for p in PLACEMENTS if p != "deepnorm"])
def test_first_weights_of_the_others_are_llama_s(placement: str):
    torch.manual_seed(1)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).state_dict()
    for name, weight in model(placement).state_dict().items():
        expected = llama[name] if name in llama else torch.ones(SIZES["hidden_size"])
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("placement", ["pre", "mix"])
def test_scaled_first_weights_are_those_of_the_seed_divided(placement: str):
    plain, scaled = model(placement).state_dict(), model(placement, initialization="scaled").state_dict()
    writers = {name for name in plain if "o_proj" in name or "down_proj" in name}
    assert len(writers) == 2 * SIZES["num_hidden_layers"]
    for name, weight in scaled.items():
        factor = (2 * SIZES["num_hidden_layers"]) ** -0.5 if name in writers else 1
        torch.testing.assert_close(weight, plain[name] * factor, rtol=1e-6, atol=0)


def test_scaled_first_weights_have_biases_of_zero():
    made = model("mix", initialization="scaled", attention_bias=True)
    assert not made.model.layers[0].self_attn.o_proj.bias.any()


@pytest.mark.parametrize("placement", PLACEMENTS)
@torch.no_grad()
def test_a_scaled_embedding_is_an_embedding_of_larger_weights(placement: str):
    """With a head of its own; twice the numbers, so that no rounding differs."""
    plain, scaled = with_gains(model(placement)), with_gains(model(placement, embedding_scale=2.0))
    before = plain(IDS).logits
    assert torch.equal(scaled.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    plain.model.embed_tokens.weight.mul_(2)
    logits = scaled(IDS).logits
    assert torch.equal(logits, plain(IDS).logits)
    assert not torch.equal(logits, before)
    assert torch.equal(scaled(inputs_embeds=scaled.model.embed_tokens(IDS)).logits, logits)


# Saving, loading, generating


@pytest.mark.parametrize("placement", PLACEMENTS)
@torch.no_grad()
def test_saved_and_loaded(placement: str, tmp_path: Path):
    made = with_gains(model(placement, post_norm_ratio=0.5))
    made.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.norm_placement, config.post_norm_ratio) == (placement, 0.5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is NormPlacementForCausalLM
    assert torch.equal(again(IDS).logits, made(IDS).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is NormPlacementModel


@torch.no_grad()
def test_scales_are_saved_and_loaded_weights_are_not_scaled_again(tmp_path: Path):
    made = with_gains(model("mix", embedding_scale=50.0, initialization="scaled"))
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.config.embedding_scale, again.config.initialization) == (50.0, "scaled")
    assert torch.equal(again(IDS).logits, made(IDS).logits)


@pytest.mark.parametrize("placement", PLACEMENTS)
@torch.no_grad()
def test_a_cache_changes_no_token(placement: str):
    made = with_gains(model(placement))
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = made.generate(IDS, use_cache=False, **asked)
    assert torch.equal(made.generate(IDS, **asked), expected)
    cache = StaticCache(config=made.config, max_cache_len=32)
    assert torch.equal(made.generate(IDS, past_key_values=cache, **asked), expected)


@torch.no_grad()
def test_hidden_states_are_those_between_layers():
    made = model("mix", post_norm_ratio=0.5)
    found = made(IDS, output_hidden_states=True).hidden_states
    assert len(found) == SIZES["num_hidden_layers"] + 1
    assert torch.equal(found[0], made.model.embed_tokens(IDS))
    torch.testing.assert_close(found[2].pow(2).mean(-1), torch.ones(IDS.shape), rtol=1e-2, atol=0)  # Post-LN


@torch.no_grad()
def test_embeddings_that_are_given_are_normed_too():
    made = with_gains(model("peri"))
    given = made(inputs_embeds=made.model.embed_tokens(IDS)).logits
    assert torch.equal(given, made(IDS).logits)
    with pytest.raises(ValueError, match="exactly one"):
        made()


@pytest.mark.parametrize(
    "first",
    [
        "",
        pytest.param("import transformers.models.auto.modeling_auto", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_program_that_imports_neuzip_alone(first: str, tmp_path: Path, run_alone: RunAlone):
    """Whatever of transformers it imports next: each imports the others in another order."""
    model("mix").save_pretrained(tmp_path / "model")
    program = f"""
import neuzip, sys
{first}
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""
    said = run_alone(NO_COLLECTOR + program, tmp_path / "model")
    assert said.strip() == "NormPlacementForCausalLM"


# Compressed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain bf16 checkpoints, each with the compressed one in "small" beside it."""
    made = {}
    for placement in ("mix", "peri", "deepnorm"):
        made[placement] = tmp_path_factory.mktemp(placement) / "plain"
        bf16 = with_gains(
            model(placement, hidden_size=256, intermediate_size=320, num_hidden_layers=2, post_norm_ratio=0.5)
        ).to(torch.bfloat16)
        bf16.save_pretrained(made[placement])
        compress(made[placement], made[placement].parent / "small")
    return made


PLACES = [
    pytest.param("dense", "cpu"),
    pytest.param("packed", "cpu", marks=pytest.mark.skipif(not RESIDENT, reason="needs transformers 5")),
    *(pytest.param(residency, "cuda", marks=pytest.mark.gpu) for residency in ("dense", "packed", "ans")),
]


@pytest.mark.parametrize(("residency", "device"), PLACES)
@pytest.mark.parametrize("placement", ["mix", "peri", "deepnorm"])
@torch.no_grad()
def test_compressed_and_loaded(placement: str, residency: str, device: str, folders: dict[str, Path]):
    expected = AutoModelForCausalLM.from_pretrained(folders[placement], dtype="auto").to(device)
    found = neuzip.load_model(folders[placement].parent / "small", device=device, residency=residency)
    assert type(found) is NormPlacementForCausalLM
    assert any(is_compressed(p) for p in found.parameters()) == (residency != "dense")
    ids = IDS.to(device)
    logits, wanted = found(ids).logits, expected(ids).logits
    if residency == "packed":  # multiplied in another order
        assert (logits - wanted).float().norm() < 0.03 * wanted.float().norm()
    else:
        assert torch.equal(logits, wanted)
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert found.generate(ids, **asked).shape == (2, IDS.shape[1] + 4)


# What is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm_placement": "prae"}, "no norm_placement 'prae'"),
        ({"norm_placement": "mix", "post_norm_ratio": 1.5}, "post_norm_ratio 1.5"),
        ({"embedding_scale": 0.0}, "embedding_scale is 0.0"),
        ({"embedding_scale": math.nan}, "embedding_scale is nan"),
        ({"embedding_scale": math.inf}, "embedding_scale is inf"),
        ({"initialization": "small"}, "no initialization 'small'"),
        ({"initialization": "scaled", "norm_placement": "deepnorm"}, "first weights of its own"),
        ({"kept_layers": [0, 2]}, "kept_layers"),
        ({"kept_layers": [0, 2, 1, 3], "trained_layers": 5}, "in order"),
        ({"kept_layers": [0, 1, 2, 5], "trained_layers": 5}, "4 of 5 layers"),
        ({"trained_layers": 5}, "both kept_layers and trained_layers"),
    ],
)
def test_configs_without_sense(options: dict[str, Any], said: str):
    with pytest.raises(UsageError) as caught:
        NormPlacementConfig(**SIZES | options)
    assert said in f"{caught.value} {caught.value.hint}"


def test_a_folder_with_such_a_config(tmp_path: Path):
    model("mix").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_placement": "prae"}))
    with pytest.raises(NeuzipError, match="prae"):
        neuzip.load_model(tmp_path)


# Without some of its layers


@pytest.mark.parametrize("placement", ["mix", "layernorm-scaling", "deepnorm"])
@torch.no_grad()
def test_layers_that_stay_do_as_before(placement: str):
    """A model of which one layer writes nothing, and the same without it."""
    made = with_gains(model(placement, post_norm_ratio=0.5))
    dropped = 2  # Pre-LN in "mix": a layer that writes nothing changes nothing
    kept = [layer for layer in range(SIZES["num_hidden_layers"]) if layer != dropped]
    less = model(placement, post_norm_ratio=0.5, num_hidden_layers=3, kept_layers=kept, trained_layers=4)
    for new, old in enumerate(kept):
        less.model.layers[new].load_state_dict(made.model.layers[old].state_dict())
    for part in ("model.embed_tokens", "model.norm", "lm_head"):
        less.get_submodule(part).load_state_dict(made.get_submodule(part).state_dict())
    made.model.layers[dropped].forward = lambda x, *_, **__: x
    assert torch.equal(less(IDS).logits, made(IDS).logits)


# Training


def test_recipes_are_those_of_table_7():
    """With a vocabulary of 32,000 and a head of its own they have what their names say, but for 250M."""
    for name, recipe in RECIPES.items():
        config = recipe.config("mix", 32_000)
        with torch.device("meta"):
            made = NormPlacementForCausalLM(config)
        millions = sum(p.numel() for p in made.parameters()) / 1e6
        told = {"71M": 71, "130M": 134, "250M": 355, "1B": 1340, "7B": 6738}[name]
        assert millions == pytest.approx(told, rel=0.01), name
        post = sum(config.placement_of(layer) == "post" for layer in range(recipe.layers))
        assert post == {"71M": 3, "130M": 3, "250M": 6, "1B": 6, "7B": 2}[name]  # the authors' POST_NUM


def test_schedule_of_a_recipe():
    schedule = RECIPES["71M"].schedule(2000)
    assert schedule(199) == pytest.approx(1e-3) and schedule(0) == pytest.approx(1e-3 / 200)
    assert schedule(1999) == pytest.approx(1e-4)
    assert RECIPES["1B"].schedule()(9_999) == pytest.approx(5e-4)


TINY = Recipe(32, 48, 2, 3, steps=30, tokens=0, peak=3e-3)


def trained(
    placement: str, seed: int, steps: int = TINY.steps
) -> tuple[list[float], NormPlacementForCausalLM]:
    made = new_model(TINY.config(placement, 96), seed, torch.device("cpu"))
    windows = TrainingWindows.of(torch.arange(4096) % 13, length=16, batch=4, seed=seed)
    step = stepper(made, windows, bf16=False)
    schedule = TINY.schedule()
    return [step(number, schedule(number))["loss"] for number in range(steps)], made


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_learns_and_can_be_repeated(placement: str):
    losses, made = trained(placement, 1)
    assert losses[0] == pytest.approx(math.log(96), rel=0.1)
    assert losses[-1] < 0.6 * losses[0]
    assert trained(placement, 1, 10)[0] == losses[:10]
    assert trained(placement, 2, 1)[0] != losses[:1]
    text = torch.arange(1000) % 13
    found = held_out_loss(made, text, length=16, batch=7)
    assert made.training, "as it was before"
    with torch.no_grad():
        rows = text[: 62 * 16].view(62, 16)
        logits = made.eval()(rows).logits.flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, text[1 : 62 * 16 + 1])
    assert found == pytest.approx(expected.item(), rel=1e-5)


def test_a_held_out_text_that_is_too_short():
    with pytest.raises(NeuzipError, match="too short"):
        held_out_loss(model("pre"), torch.arange(16), length=16)


def test_gradient_norms_of_layers():
    made = model("mix").train()
    batches = [torch.cat([IDS, IDS[:, :1]], 1), torch.cat([IDS, IDS[:, 1:2]], 1)]
    found = gradient_norms(made, batches, bf16=False)
    assert all(p.grad is None for p in made.parameters())
    loss = torch.stack([
        torch.nn.functional.cross_entropy(made(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        for ids in batches
    ]).mean()  # fmt: skip
    loss.backward()
    for layer, norm in zip(made.model.layers, found, strict=True):
        gradient = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
        assert norm == pytest.approx(gradient.norm().item(), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_on_a_gpu_in_bf16(placement: str):
    device = torch.device("cuda")
    made = new_model(TINY.config(placement, 96), 1, device)
    windows = TrainingWindows.of(torch.arange(4096) % 13, length=16, batch=4, seed=1)
    step = stepper(made, windows)
    losses = [step(number, TINY.schedule()(number))["loss"] for number in range(TINY.steps)]
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.6 * losses[0]
    assert losses[0] == pytest.approx(trained(placement, 1)[0][0], rel=0.02), "as on the CPU"
    assert {p.dtype for p in made.parameters()} == {torch.float32}


# The benchmark


@pytest.fixture(scope="module")
def benchmark(root: Path) -> Any:
    """benchmarks/mix_ln.py as a module."""
    folder = str(root / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("mix_ln")
    finally:
        sys.path.remove(folder)


@pytest.mark.weekly
def test_benchmark_makes_what_is_missing_and_reports(
    benchmark: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    words = [" ".join(f"word{i * j % 7}" for j in range(1200)) for i in range(41)]
    rows = [json.dumps({"source": "c4", "text": text}) for text in words]
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (tmp_path / "other.txt").write_text(words[3])

    def call(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [
            "mix_ln.py", str(tmp_path / "runs"), "--size", "tiny", "--steps", "5", "--batch", "2",
            "--device", "cpu", "--text", str(tmp_path / "text.jsonl.gz"), "--results", str(tmp_path),
            "--held-out", str(tmp_path / "other.txt"), "--tokenizer", str(root / "eval/demo/checkpoint"),
            *more,
        ])  # fmt: skip
        benchmark.main()
        said: str = capsys.readouterr().out
        return said

    assert call("--placements", "pre,mix", "--seeds", "0").count("seed 0") == 2
    again = call("--placements", "pre,mix", "--seeds", "0,1")
    assert "seed 0" not in again and again.count("seed 1") == 2
    for other in (("--steps", "6"), ("--embed-scale", "50"), ("--alpha", "0.5"), ("--init", "scaled")):
        with pytest.raises(SystemExit, match="other settings"):
            call(*other)
    call("--report")
    found = json.loads((tmp_path / "mix_ln.json").read_text())
    assert [row["placement"] for row in found["results"]] == ["pre", "mix"] * 2
    assert found["settings"]["held_out"].keys() == {"held-out documents", "other.txt"}
    drawn = (tmp_path / "mix_ln.svg").read_bytes()
    call("--report")
    assert (tmp_path / "mix_ln.svg").read_bytes() == drawn


def test_intervals_of_the_benchmark(benchmark: Any):
    """Two-sided, Student's t of two degrees of freedom, on log perplexities."""
    found = benchmark.interval([-0.02, -0.03, -0.04])
    half = 4.303 * 0.01 / math.sqrt(3)
    assert found["percent"] == pytest.approx(100 * math.expm1(-0.03))
    assert found["low"] == pytest.approx(100 * math.expm1(-0.03 - half))
    assert found["high"] == pytest.approx(100 * math.expm1(-0.03 + half))
    assert benchmark.interval([]) is None
    assert benchmark.interval([0.1])["low"] is None


def test_a_run_that_diverges_is_told(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def diverge(*_: object, **__: object) -> Any:
        return lambda number, lr: {"loss": math.nan, "gradient_norm": 0.0}

    monkeypatch.setattr(benchmark, "stepper", diverge)
    ids = torch.arange(2000) % 13
    settings = benchmark.Settings(
        "tiny", 3, 2, 1e-3, "text", 2000, {"held": 600}, False, False, 1.0, 0.25, "plain"
    )
    texts = benchmark.Texts(ids, {"held": ids[:600]}, "text", 96)
    found = benchmark.one_run(TINY, "post", 0, settings, texts, tmp_path / "post-0.json", "cpu")
    assert "the loss is nan" in found["failed"]
