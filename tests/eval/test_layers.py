"""What layers are worth: metrics against naive ones, layers left out, and the checkpoint without them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2MoeConfig,
)

from neuzip.compress import compress
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.layers import analyse as layers
from neuzip.eval.layers import distances, gradient_norms, layer_report, left_out
from neuzip.eval.layers import removal as layer_removal
from neuzip.eval.layers.analyse import LayerAnalysis
from neuzip.eval.layers.distances import Distances
from neuzip.eval.layers.layer_report import spearman
from neuzip.eval.layers.left_out import ModelWithout
from neuzip.eval.measures.comparison import NotFinite
from neuzip.eval.measures.texts import read_text
from neuzip.eval.measures.windows import TokenWindow
from neuzip.eval.report import layer_pictures
from neuzip.runtime.hf.attention_config import LAYERS_ENTRY, record_layers
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.norm_placement import NormPlacementConfig
from neuzip.runtime.hf.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # 4.57 has another name


pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, WINDOW, TOKENS = 5, 48, 192

TINY = {
    "vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.1, "dtype": "bfloat16",
}  # fmt: skip
GATED: dict[str, Any] = {**TINY, "intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16}

KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GATED),
    "gemma3": lambda: Gemma3TextConfig(
        **GATED, sliding_window=8, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                     "full_attention"],
    ),
    "gpt2": lambda: GPT2Config(**TINY, n_inner=48),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **GATED, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, mlp_only_layers=[1, 4],
    ),
    "mix_ln": lambda: NormPlacementConfig("mix", 0.5, **GATED),
    "layernorm_scaling": lambda: NormPlacementConfig("layernorm-scaling", **GATED),
}  # fmt: skip
"""Layers all alike, of alternating attention, with names of their own, some with experts, by their number."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small model of random weights of a kind, in several shards."""
    known: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in known:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(KINDS[kind]()).to(torch.bfloat16)
            folder = known[kind] = tmp_path_factory.mktemp(kind) / "tiny"
            model.save_pretrained(folder, max_shard_size="60KB")
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(CHECKPOINT / name, folder)
        return known[kind]

    return make


@pytest.fixture(scope="module")
def llama(made: Callable[[str], Path]) -> Path:
    return made("llama")


@contextmanager
def no_stage(label: str, total: int, unit: str) -> Iterator[Any]:
    yield lambda count: None


def analysed(path: Path, **options: Any) -> LayerAnalysis:
    asked = {"window": WINDOW, "max_tokens": TOKENS, "device": "cpu"} | options
    return layers.analyse(path, read_text("demo"), no_stage, **asked)


@pytest.fixture(scope="module")
def found(llama: Path) -> LayerAnalysis:
    return analysed(llama, drop=2)


def windows() -> torch.Tensor:
    ids = load_tokenizer(CHECKPOINT)(read_text("demo").content, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: TOKENS + 1])


def pruned_by_hand(path: Path, dropped: list[int]) -> Any:
    """The live model, its list of layers and config cut as in transformers' own issues: no code of ours."""
    model = load_model(path, torch.float32)
    kept = [n for n in range(LAYERS) if n not in dropped]
    for stack in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS]:
        for n in sorted(dropped, reverse=True):
            del stack[n]
        for new, layer in enumerate(stack):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = new
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[n] for n in kept]
    model.config.num_hidden_layers = len(kept)
    return model


# What is measured


def test_distances_are_those_of_a_naive_computation(llama: Path, found: LayerAnalysis):
    """fp64 by numpy, of the states that transformers gives itself but the last, which it normalises."""
    model = load_model(llama, torch.float32)
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda m, a, out: last.append(out))
    per_window, tokens, influence = [], [], []
    for start in range(0, TOKENS, WINDOW):
        ids = windows()[None, start : start + WINDOW]
        with torch.no_grad():
            states = model.model(ids, output_hidden_states=True).hidden_states[:-1]
        x = np.stack([s[0].double().numpy() for s in (*states, last.pop())])
        unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
        cosine = np.einsum("ltd,mtd->tlm", unit, unit)
        angle = np.arccos(np.clip(cosine, -1, 1)) / np.pi
        per_window.append(angle[-1])
        tokens.append(angle.mean(0))
        influence.append(1 - np.stack([cosine[:, n, n + 1] for n in range(LAYERS)], 1))
    hook.remove()
    for n in range(1, LAYERS + 1):
        for at in range(LAYERS + 1 - n):
            of_windows = [angle[at, at + n] for angle in per_window]
            assert found.last_token.mean[n - 1][at] == pytest.approx(np.mean(of_windows), abs=1e-6)
            error = np.std(of_windows, ddof=1) / math.sqrt(len(of_windows))
            assert found.last_token.standard_error[n - 1][at] == pytest.approx(error, rel=1e-3)
            every = np.mean([angle[at, at + n] for angle in tokens])
            assert found.all_tokens.mean[n - 1][at] == pytest.approx(every, abs=1e-6)
        assert len(found.last_token.mean[n - 1]) == LAYERS + 1 - n
    for layer in found.layers:
        mean = np.concatenate(influence)[:, layer.number].mean()
        assert layer.block_influence.value == pytest.approx(mean, abs=1e-6)
        assert layer.angular_distance.value == found.last_token.mean[0][layer.number]


def test_states_that_are_the_same_are_at_no_distance_and_never_nan():
    x = torch.randn(7, 33)
    angles, cosines = distances._compared([x, x * 3, -x, torch.zeros_like(x)], "it")
    assert np.isfinite(angles.last).all()
    assert angles.last[0, 1] < 1e-7
    assert angles.last[0, 2] == pytest.approx(1, abs=1e-7)
    assert angles.last[0, 3] == 0.5
    assert angles.sum[0, 2] == pytest.approx(7)
    assert cosines.shape == (7, 3)
    with pytest.raises(NeuzipError, match="not finite"):
        distances._compared([x, x * torch.nan], "it")


def test_distances_do_not_depend_on_how_many_tokens_are_compared_at_once(llama, found, monkeypatch):
    monkeypatch.setattr(distances, "STATE_BYTES", 1)
    small = analysed(llama, max_tokens=2 * WINDOW, gradient_windows=0)
    monkeypatch.setattr(distances, "STATE_BYTES", 1 << 30)
    large = analysed(llama, max_tokens=2 * WINDOW, gradient_windows=0)
    assert np.allclose(small.all_tokens.mean[0], large.all_tokens.mean[0], rtol=1e-9, atol=1e-9)
    assert small.all_tokens.standard_error[0][0] is None, "two windows give no standard error"


@pytest.mark.parametrize("number", [0, 2, LAYERS - 1])
def test_a_divergence_is_that_of_the_model_built_without_the_layer(number: int, llama, found):
    ids = windows()[:TOKENS].view(-1, WINDOW)
    targets = windows()[1:].view(-1, WINDOW)
    with torch.no_grad():
        base = load_model(llama, torch.float32)(ids).logits.double().log_softmax(-1)
        other = pruned_by_hand(llama, [number])(ids, use_cache=False).logits.double().log_softmax(-1)
    kld = (base.exp() * (base - other)).sum(-1).mean()
    change = (base - other).gather(-1, targets[..., None]).mean()
    comparison = found.layers[number].without
    assert comparison.kld.mean.value == pytest.approx(float(kld), rel=1e-3)
    assert comparison.nll_difference.value == pytest.approx(float(change), rel=1e-3, abs=1e-6)
    assert comparison.nll_difference.standard_error is not None


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_layers_out_is_what_the_model_without_them_does(kind: str, made):
    """Bit by bit, and afterwards the model is whole."""
    model = load_model(made(kind), torch.float32)
    ids = windows()[None, :WINDOW]
    whole, without = ModelWithout(model), ModelWithout(model)
    before = layers_logits(whole, ids)
    without.left_out = [1, 3]
    other = pruned_by_hand(made(kind), [1, 3])
    with torch.no_grad():
        expected = other(ids, use_cache=False).logits
    assert torch.equal(layers_logits(without, ids), expected)
    assert not torch.equal(before, expected)
    assert torch.equal(layers_logits(whole, ids), before)


@torch.no_grad()
def layers_logits(model: ModelWithout, ids: torch.Tensor) -> torch.Tensor:
    return model._run(ids)


def test_gradient_norms_are_those_of_autograd(llama: Path, found: LayerAnalysis):
    model = load_model(llama, torch.float32)
    norms = []
    for start in range(0, TOKENS, WINDOW):
        model.zero_grad()
        ids = windows()[start : start + WINDOW + 1]
        logits = model(ids[None, :-1]).logits[0]
        torch.nn.functional.cross_entropy(logits, ids[1:]).backward()
        norms.append(
            [
                math.sqrt(sum(float(p.grad.double().square().sum()) for p in layer.parameters()))
                for layer in model.model.layers
            ]
        )
    expected = np.mean(norms, 0)
    assert [layer.gradient_norm.value for layer in found.layers] == pytest.approx(expected, rel=1e-4)
    assert found.gradient_windows == TOKENS // WINDOW
    live = load_model(llama, torch.float32)
    needed = [p.requires_grad for p in live.parameters()]
    gradient_norms.gradient_norms(live, windows(), [TokenWindow(0, 8, 8)])
    assert [p.requires_grad for p in live.parameters()] == needed
    assert all(p.grad is None for p in live.parameters())


def test_without_gradients(llama: Path):
    found = analysed(llama, gradient_windows=0)
    assert {layer.gradient_norm for layer in found.layers} == {None}
    assert "gradient_norm" not in found.rank_correlations
    assert found.removal is None


def test_spearman():
    assert spearman([1, 2, 3, 4], [10, 20, 30, math.inf]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    # Ties share the mean of their ranks: 1, 2.5, 2.5, 4 against 1, 2, 4, 3.
    expected = np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 4, 3])[0, 1]
    assert spearman([0, 5, 5, 9], [0, 1, 3, 2]) == pytest.approx(expected)


def test_rank_correlations_are_with_the_divergence(found: LayerAnalysis):
    klds = [layer.kld for layer in found.layers]
    influence = [layer.block_influence.value for layer in found.layers]
    assert found.rank_correlations["block_influence"] == spearman(influence, klds)
    assert found.rank_correlations["depth"] == spearman([4, 3, 2, 1, 0], klds)


# What is chosen


def test_greedy_measures_again_after_each_drop(llama: Path, found: LayerAnalysis):
    removal = found.removal
    klds = [layer.kld for layer in found.layers]
    assert removal.order[0] == klds.index(min(klds))
    assert removal.klds[0] == min(klds)
    first = removal.order[0]
    ids = windows()[:TOKENS].view(-1, WINDOW)
    with torch.no_grad():
        base = load_model(llama, torch.float32)(ids).logits.double().log_softmax(-1)
        both = {}
        for n in set(range(LAYERS)) - {first}:
            model = pruned_by_hand(llama, [first, n])
            other = model(ids, use_cache=False).logits.double().log_softmax(-1)
            both[n] = float((base.exp() * (base - other)).sum(-1).mean())
    assert removal.order[1] == min(both, key=both.__getitem__)
    assert removal.klds[1] == pytest.approx(min(both.values()), rel=1e-3)
    assert removal.comparison.kld.mean.value == removal.klds[1]
    assert removal.layers == tuple(sorted(removal.order))
    assert removal.parameters == 2 * found.layers[0].parameters


@pytest.mark.slow
def test_blocks_are_neighbours(llama: Path, found: LayerAnalysis):
    block = analysed(llama, drop=2, choice="block", gradient_windows=0).removal
    angular = analysed(llama, drop=2, choice="angular", gradient_windows=0).removal
    for removal in (block, angular):
        assert removal.layers[1] == removal.layers[0] + 1
    pairs = found.last_token.mean[1]
    assert angular.layers[0] == min(range(LAYERS - 1), key=lambda at: pairs[at])
    assert block.klds[0] <= angular.klds[0]
    assert found.removal.klds[0] <= block.klds[0]


def test_layers_without_which_nothing_is_finite_are_not_chosen(found: LayerAnalysis):
    """Their divergence counts as infinite; where that goes for all, nothing is chosen."""
    broken = [replace(found.layers[0], without=None), *found.layers[1:]]
    assert broken[0].kld == math.inf
    assert layer_report.rank_correlations(broken)["depth"] is not None

    class Broken:
        tokens, base = 1, type("Base", (), {"name": "it"})

        def compare(self, model: Any, on_tokens: Any) -> Any:
            raise NotFinite("it is not finite")

    live: Any = type("Live", (), {"left_out": ()})()
    assert left_out.measure_without(Broken(), live, [1]) is None
    assert live.left_out == ()
    removal = left_out.choose(Broken(), live, broken, found.last_token, 1, "greedy", no_stage)
    assert removal.layers != (0,)
    with pytest.raises(NeuzipError, match="without 2 of its layers no prediction is finite"):
        left_out.choose(Broken(), live, broken, found.last_token, 2, "block", no_stage)


# What is written


@pytest.mark.parametrize("kind", KINDS)
def test_a_pruned_checkpoint_is_the_model_without_the_layers(kind: str, made, tmp_path: Path):
    """transformers itself loads it, and predicts and generates as the live model that was cut by hand."""
    dst = tmp_path / "pruned"
    written = layer_removal.remove_layers(made(kind), dst, [1, 3])
    assert written.remaining == (0, 2, 4)
    model, told = AutoModelForCausalLM.from_pretrained(dst, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    expected = pruned_by_hand(made(kind), [1, 3])
    ids = windows()[None, :WINDOW]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids, use_cache=False).logits)
    said = model.generate(ids[:, :8], max_new_tokens=6, do_sample=False)
    again = model.generate(ids[:, :8], max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(said, again), "the cache has the numbers of the layers"
    assert said.shape == (1, 14)


def test_what_is_left_keeps_its_bytes(llama: Path, tmp_path: Path):
    layer_removal.remove_layers(llama, tmp_path / "pruned", [0, 3])
    before, after = _tensors(llama), _tensors(tmp_path / "pruned")
    numbers = {"1": "0", "2": "1", "4": "2"}
    renamed = {}
    for name, data in before.items():
        parts = name.split(".")
        if parts[1] == "layers":
            if parts[2] not in numbers:
                continue
            parts[2] = numbers[parts[2]]
        renamed[".".join(parts)] = data
    assert after == renamed
    index = json.loads((tmp_path / "pruned" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in after.values())
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "pruned" / file).read_bytes() == (llama / file).read_bytes()
    old, new = (json.loads((p / "config.json").read_text()) for p in (llama, tmp_path / "pruned"))
    assert new.pop("neuzip") == {"dropped_layers": [{"layers": [0, 3], "of": LAYERS}]}
    assert new == old | {"num_hidden_layers": 3}


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of all tensors, read by safetensors; each file has a valid header of its own."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[name] = str(tensor.dtype), tuple(tensor.shape), data
    return found


def test_a_container_gives_the_same(llama: Path, tmp_path: Path):
    compress(llama, tmp_path / "small")
    plain = layer_removal.remove_layers(llama, tmp_path / "a", [2])
    decoded = layer_removal.remove_layers(tmp_path / "small", tmp_path / "b", [2])
    assert plain.warnings == ()
    assert "neuzip compress" in decoded.warnings[0]
    files = [{p.name: p.read_bytes() for p in (tmp_path / one).iterdir()} for one in "ab"]
    assert files[0] == files[1]
    # And what comes out can be compressed, and loaded, and pruned again.
    compress(tmp_path / "b", tmp_path / "c")
    assert load_model(tmp_path / "c").config.num_hidden_layers == LAYERS - 1
    layer_removal.remove_layers(tmp_path / "c", tmp_path / "d", [0])
    note = json.loads((tmp_path / "d" / "config.json").read_text())["neuzip"]["dropped_layers"]
    assert note == [{"layers": [2], "of": LAYERS}, {"layers": [0], "of": LAYERS - 1}]


def test_lists_of_a_config_are_cut(made, tmp_path: Path):
    layer_removal.remove_layers(made("gemma3"), tmp_path / "g", [0, 3])
    config = AutoConfig.from_pretrained(tmp_path / "g")
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    layer_removal.remove_layers(made("qwen2_moe"), tmp_path / "q", [0, 1])
    assert AutoConfig.from_pretrained(tmp_path / "q").mlp_only_layers == [2]
    layer_removal.remove_layers(made("mix_ln"), tmp_path / "m", [0])
    layer_removal.remove_layers(tmp_path / "m", tmp_path / "mm", [0, 2])
    config = AutoConfig.from_pretrained(tmp_path / "mm")
    assert (config.kept_layers, config.trained_layers) == ([2, 4], LAYERS)
    layer_removal.remove_layers(made("gpt2"), tmp_path / "n", [4])
    assert json.loads((tmp_path / "n" / "config.json").read_text())["n_layer"] == LAYERS - 1


def test_recorded_attention_goes_with_its_layers(llama: Path, tmp_path: Path):
    shutil.copytree(llama, tmp_path / "patched")
    record_layers(tmp_path / "patched", [8, 4, None, 8, 4])
    layer_removal.remove_layers(tmp_path / "patched", tmp_path / "pruned", [1, 3])
    assert LAYERS_ENTRY.read(tmp_path / "pruned") == (8, None, 4)


def test_a_model_that_depends_on_numbers_is_refused(made, tmp_path: Path):
    """GPT-2 may scale attention by the number of the layer: no config can say that of what is left."""
    odd = tmp_path / "odd"
    shutil.copytree(made("gpt2"), odd)
    config = json.loads((odd / "config.json").read_text()) | {"scale_attn_by_inverse_layer_idx": True}
    (odd / "config.json").write_text(json.dumps(config))
    with pytest.raises(NeuzipError, match=r"layer 2 would become another: attn\.scaling"):
        layer_removal.remove_layers(odd, tmp_path / "x", [1])
    assert layer_removal.remove_layers(odd, tmp_path / "y", [4]).remaining == (0, 1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["odd", "y"]


@pytest.mark.parametrize("dropped", [[], [5], list(range(LAYERS))], ids=["none", "unknown", "all"])
def test_layers_that_cannot_be_dropped(dropped: list[int], llama: Path, tmp_path: Path):
    with pytest.raises(NeuzipError, match="cannot be dropped"):
        layer_removal.remove_layers(llama, tmp_path / "x", dropped)
    assert not list(tmp_path.iterdir())


def test_a_damaged_container_leaves_nothing_behind_but_a_workspace(llama: Path, tmp_path: Path):
    compress(llama, tmp_path / "small")
    file = sorted((tmp_path / "small").glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(NeuzipError, match=file.name):
        layer_removal.remove_layers(tmp_path / "small", tmp_path / "x", [4])
    assert not (tmp_path / "x").exists()


def test_mergekit():
    assert layer_removal.kept_ranges(4, [0, 3]) == [(1, 3)]
    assert layer_removal.mergekit_yaml("a/b", 6, [1, 3], "bfloat16") == (
        'slices:\n  - sources:\n      - model: "a/b"\n        layer_range: [0, 1]\n'
        '  - sources:\n      - model: "a/b"\n        layer_range: [2, 3]\n'
        '  - sources:\n      - model: "a/b"\n        layer_range: [4, 6]\n'
        "merge_method: passthrough\ndtype: bfloat16\n"
    )


# The command

ASKED = ("--text", "demo", "--window", WINDOW, "--max-tokens", TOKENS, "--device", "cpu")


@pytest.mark.slow
def test_the_command_in_all_modes(in_all_modes, llama: Path, found: LayerAnalysis):
    said = in_all_modes("layers", llama, *ASKED)
    assert said["human"].stdout.count(" ± ") >= 5 * LAYERS
    assert "Spearman" in said["human"].stdout
    told = said["json"].json
    assert [one["number"] for one in told["layers"]] == list(range(LAYERS))
    assert told["layers"][0]["without"]["kld"]["mean"]["value"] == found.layers[0].kld
    assert told["layers"][0]["block_influence"]["standard_error"] > 0
    assert [len(row) for row in told["last_token"]["mean"]] == [5, 4, 3, 2, 1]
    assert told["rank_correlations"].keys() == found.rank_correlations.keys()
    assert (told["tokens"], told["windows"], told["removal"]) == (TOKENS, TOKENS // WINDOW, None)
    assert [float(line) for line in said["quiet"].stdout.split()] == [one.kld for one in found.layers]


@pytest.mark.slow
def test_drop_then_eval(neuzip, llama: Path, found: LayerAnalysis, tmp_path: Path):
    """What is written is as far from the original as was promised, to the last bit."""
    dst = tmp_path / "pruned"
    told = neuzip("layers", llama, *ASKED, "--drop", 2, "--output", dst, "--gradients", 0, "--json").json
    assert tuple(told["removal"]["layers"]) == found.removal.layers
    assert told["written"]["dst"] == str(dst)
    assert told["mergekit"].startswith("slices:\n")
    asked = ("--text", "demo", "--conventions", "token", "--window", WINDOW, "--max-tokens", TOKENS)
    after = neuzip("eval", dst, "--original", llama, *asked, "--device", "cpu", "--json").json["comparison"]
    assert after["kld"]["mean"] == told["removal"]["comparison"]["kld"]["mean"]
    said = neuzip("generate", dst, "--prompt", "The", "--max-new-tokens", 4, "--device", "cpu")
    assert said.exit_code == 0, said.stderr


def test_what_a_person_is_told_of_a_drop(neuzip, llama: Path, tmp_path: Path):
    said = neuzip("layers", llama, *ASKED, "--drop", 2, "--output", tmp_path / "p", "--gradients", 0)
    assert said.exit_code == 0, said.stderr
    for words in ("drop ", "order ", "on the text used to choose them", "merge_method: passthrough"):
        assert words in said.stdout
    assert "neuzip eval" in said.stderr
    said = neuzip("layers", llama, *ASKED, "--drop", 1, "--gradients", 0)
    assert "--output DST writes this model" in said.stderr


def test_what_is_refused(neuzip, llama: Path, tmp_path: Path):
    short = tmp_path / "short.txt"
    short.write_text("a")
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").touch()
    for arguments, code, said in (
        ((llama, "--text", "demo", "--drop", LAYERS), 2, "has 5 layers, one has to stay"),
        ((llama, "--text", "demo", "--drop", 0), 2, "one has to stay"),
        ((llama, "--text", "demo", "--drop", 1, "--output", there), 1, "exists already"),
        ((llama, "--text", "demo", "--drop", 1, "--output", llama), 1, "is the same place as"),
        ((llama, "--text", short), 1, "is too short"),
        ((llama, "--text", "demo", "--window", 999), 2, "the model was made for 64 tokens"),
        ((llama, "--text", "demo", "--plot", tmp_path / "x.html"), 2, "is no kind of picture"),
    ):
        found = neuzip("layers", *arguments, "-q", "--device", "cpu")
        assert (found.exit_code, said in found.stderr) == (code, True), found.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["short.txt", "there"]
    assert [p.name for p in there.iterdir()] == ["mine"]


def test_what_is_no_decoder_is_refused(llama: Path):
    model = load_model(llama, torch.float32)
    model.config.num_hidden_layers = 7
    with pytest.raises(NeuzipError, match="has no list of 7 layers"):
        decoder_layers(model)
    with pytest.raises(UsageError, match="has 1 layer, one has to stay"):
        layers.require_some_left(1, 1)


# The picture


@pytest.mark.slow
def test_the_picture(llama: Path, found: LayerAnalysis, tmp_path: Path):
    figure = layer_pictures.draw(found, "tiny")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == LAYERS * (LAYERS + 1) // 2
    assert f"{found.last_token.mean[-1][0]:.2f}" in texts
    assert layer_pictures.svg(figure) == layer_pictures.svg(layer_pictures.draw(found, "tiny"))
    layer_pictures.write(found, "tiny", tmp_path / "layers.png")
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [1, 2, 33, 81])
def test_a_picture_of_few_and_of_many_layers(count: int, found: LayerAnalysis):
    many = tuple(replace(found.layers[0], number=n, gradient_norm=None) for n in range(count))
    broken = replace(many[0], without=None)
    rows = tuple(tuple(0.01 * n for _ in range(count - n)) for n in range(count))
    distances = Distances(rows, rows)
    figure = layer_pictures.draw(
        replace(found, layers=(broken, *many[1:]), last_token=distances, removal=None), "many"
    )
    assert len(figure.axes[0].get_xticks()) <= layer_pictures.TICKS + 1
    assert layer_pictures.png(figure)


# With real weights, and on a GPU


@pytest.mark.weekly
def test_a_trained_model(neuzip_data: Path, tmp_path: Path):
    """The first layer of wikilm-26m is worth most by far, and all metrics know it."""
    model, text = neuzip_data / "wikilm-26m", tmp_path / "text.txt"
    text.write_bytes((neuzip_data / "wikitext-2" / "wiki.valid.raw").read_bytes()[:8000])
    asked = {"window": 128, "max_tokens": 512, "gradient_windows": 1}
    found = layers.analyse(model, read_text(str(text)), no_stage, drop=1, device="cpu", **asked)
    assert max(found.layers, key=lambda layer: layer.kld).number == 0
    assert found.rank_correlations["block_influence"] > 0
    dst = tmp_path / "pruned"
    layer_removal.remove_layers(model, dst, found.removal.layers)
    assert load_model(dst).config.num_hidden_layers == 5


@pytest.mark.gpu
def test_on_a_gpu(llama: Path, found: LayerAnalysis):
    on_gpu = analysed(llama, device="cuda", dtype="float32", drop=2)
    for one, other in zip(on_gpu.layers, found.layers, strict=True):
        assert one.kld == pytest.approx(other.kld, rel=1e-2)
        assert one.block_influence.value == pytest.approx(other.block_influence.value, rel=1e-3, abs=1e-5)
        assert one.gradient_norm.value == pytest.approx(other.gradient_norm.value, rel=1e-2)
    own = analysed(llama, device="cuda")
    assert own.dtype == own.stored_dtype == "bfloat16"
