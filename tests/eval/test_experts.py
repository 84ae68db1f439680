"""Experts as units: how often each is chosen, schemes by use, what is shown of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from models import EXPERTS, LAYOUTS, llama, mixture, needs_version_5
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from neuzip.compress import Rule, compress
from neuzip.compress.rules import LOSSLESS, choose
from neuzip.compress.rules_file import read_plan_file
from neuzip.compress.scheme import Scheme
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.errors import NeuzipError
from neuzip.eval.experts.counting import NotCounted, count_use
from neuzip.eval.experts.expert_use import LEAST, ExpertUse, LayerUse, read_use, use_bytes
from neuzip.eval.measures.expert_figures import ExpertFigures, sum_up_experts
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.histograms import inspect, select
from neuzip.eval.plans import plan_search, sensitivity
from neuzip.eval.plans.candidates import GroupCandidates, predict_candidates
from neuzip.eval.plans.expert_groups import split_by_use
from neuzip.eval.plans.plan_request import TargetRequest
from neuzip.eval.plans.sensitivity import Sensitivity
from neuzip.eval.plans.target_values import target_size
from neuzip.eval.plans.tensor_groups import find_groups
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import find_parameters, values_for
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

Speak = Callable[..., Any]

SIZES = {"hidden": 64, "inner": 32}
"""The smallest that leave experts large enough to be coded."""

EVERYTHING = (Rule("*", LOSSLESS),)


@contextmanager
def no_stage(label: str, total: int, unit: str) -> Iterator[Any]:
    yield lambda count: None


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Tokens of which low numbers, and so their experts, are more frequent."""
    drawn = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(3))
    return torch.where(drawn % 3 > 0, drawn % 16, drawn)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small mixture of a layout as a checkpoint."""
    known: dict[str, Path] = {}

    def save(layout: str) -> Path:
        if layout not in known:
            folder = known[layout] = tmp_path_factory.mktemp(layout) / "tiny"
            mixture(layout, **SIZES).save_pretrained(folder)
            byte_tokenizer(adds_bos=False).save_pretrained(folder)
        return known[layout]

    return save


# How often experts are chosen


@needs_version_5
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_are_those_of_the_router(layout: str, ids: Tensor):
    model = mixture(layout, **SIZES).float()
    uses = count_use(model, [ids[:3], ids[3:]])
    assert [one.layer for one in uses] == ([1] if layout == "deepseek" else [0, 1])
    for one in uses:
        assert one.name == f"model.layers.{one.layer}.mlp.experts"
        assert sum(one.tokens) == 2 * ids.numel()
        assert one.weights is not None
    if layout in ("mixtral", "qwen3"):
        logits = model(input_ids=ids, output_router_logits=True).router_logits
        for one, of_layer in zip(uses, logits, strict=True):
            weights, index = of_layer.view(-1, EXPERTS).softmax(-1).topk(2)
            weights = (weights / weights.sum(-1, keepdim=True)).double().flatten()
            assert list(one.tokens) == torch.bincount(index.flatten(), minlength=EXPERTS).tolist()
            sums = torch.bincount(index.flatten(), weights, minlength=EXPERTS)
            torch.testing.assert_close(torch.tensor(one.weights), sums.float(), rtol=1e-4, atol=1e-5)
    assert not any(m._forward_pre_hooks for m in model.modules())


class ListOfExperts(nn.Module):
    """A layer of Mixtral as transformers 4 has it: a module for each expert, called with its tokens."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, merged = block.gate, block.experts
        self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(EXPERTS))
        for number, expert in enumerate(self.experts):
            expert.forward = lambda x, n=number: (
                functional.silu(x @ merged.gate_up_proj[n].chunk(2)[0].T)
                * (x @ merged.gate_up_proj[n].chunk(2)[1].T)
            ) @ merged.down_proj[n].T  # fmt: skip

    def forward(self, states: Tensor) -> Tensor:
        x = states.view(-1, states.shape[-1])
        _, weights, index = self.gate(x)
        y = torch.zeros_like(x)
        for number in index.unique().tolist():
            token, slot = torch.where(index == number)
            y.index_add_(0, token, self.experts[number](x[token]) * weights[token, slot, None])
        return y.view_as(states)


@needs_version_5
def test_a_list_of_modules_is_counted_as_well(ids: Tensor):
    model = mixture("mixtral", **SIZES).float()
    merged = count_use(model, [ids])
    for layer in decoder_layers(model):
        layer.mlp = ListOfExperts(layer.mlp)
    single = count_use(model, [ids])
    assert [one.tokens for one in single] == [one.tokens for one in merged]
    assert [one.weights for one in single] == [None, None]


def test_shared_experts_are_not_counted(ids: Tensor):
    """A list of modules that every token goes through, beside the list that the router chooses from."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1}
    model = llama(0, vocab_size=256, **sizes)
    block = decoder_layers(model)[0].mlp
    for name in ("shared_experts", "experts"):
        setattr(block, name, nn.ModuleList(nn.Linear(16, 16) for _ in range(2)))
    block.forward = lambda x: sum(expert(x) for expert in (*block.shared_experts, *block.experts))
    (layer,) = count_use(model, [ids])
    assert layer.name == "model.layers.0.mlp.experts"
    assert layer.tokens == (ids.numel(), ids.numel())


@needs_version_5
def test_experts_of_other_processes_and_of_no_token_count_nothing():
    model = mixture("mixtral", **SIZES).float()
    block = decoder_layers(model)[0].mlp
    x, weights = torch.randn(3, 64), torch.full((3, 2), 0.5)
    index = torch.tensor([[0, EXPERTS], [0, 5], [EXPERTS, EXPERTS]])
    block.forward = lambda states: block.experts(x, index, weights).sum() * states
    first, _ = count_use(model, [torch.zeros(1, 3, dtype=torch.int64)])
    assert first.tokens == (2, 0, 0, 0, 0, 1, 0, 0)
    assert first.weights == (1.0, 0, 0, 0, 0, 0.5, 0, 0)
    assert first.classes == ("hot", *["unused"] * 4, "hot", *["unused"] * 2)


class SomeTokens:
    """The tokens of a baseline, without a model."""

    ids = torch.arange(600) % 256
    front = None


@needs_version_5
def test_a_choice_that_is_not_seen_is_told(saved: Callable[[str], Path], ids: Tensor):
    model = mixture("mixtral", **SIZES).float()
    for layer in decoder_layers(model):
        layer.mlp.forward = lambda states: states
    with pytest.raises(NotCounted, match="does not tell its experts which of them are chosen"):
        count_use(model, [ids])
    with FolderSource(saved("mixtral")) as source, Workers(1) as workers:
        groups = find_groups(source, workers, EVERYTHING)
    with pytest.raises(NotCounted) as refused:
        plan_search._expert_use("auto", groups, model, SomeTokens, no_stage)  # type: ignore[arg-type]
    assert "expert_use='none'" in (refused.value.hint or "")


def test_a_model_without_experts_has_no_use(ids: Tensor):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1}
    assert count_use(llama(0, vocab_size=256, **sizes), [ids]) == ()


# The file


USE = ExpertUse("a \u201cbook\u201d", 100, (LayerUse(1, "l.1.experts", (80, 19, 1, 0), (40.0, 9.5, 0.25, 0)),
                                            LayerUse(4, "l.4.experts", (50, 50), None)))  # fmt: skip


def test_a_file_gives_the_use_back(tmp_path: Path):
    (tmp_path / "use.json").write_bytes(use_bytes(USE))
    assert read_use(tmp_path / "use.json") == USE


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("layers"), lambda d: d.update(tokens=-1), lambda d: d.update(layers=3),
        lambda d: d["layers"][0].update(tokens=[]), lambda d: d["layers"][0].update(weights=[1.0]),
        lambda d: d["layers"][0].update(tokens=[1, 2, 3, "4"]), lambda d: d["layers"][0].pop("layer"),
        lambda d: d["layers"][1].update(weights=[1.0, -1.0]), lambda d: d["layers"].append(7),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_told(change: Callable[[Any], object], tmp_path: Path):
    document = json.loads(use_bytes(USE))
    change(document)
    (tmp_path / "use.json").write_text(json.dumps(document))
    with pytest.raises(NeuzipError, match=r"use\.json: does not say how often experts are chosen"):
        read_use(tmp_path / "use.json")


def test_layers_that_are_dropped_leave_the_others_with_new_numbers():
    assert [one.layer for one in USE.without([0, 2]).layers] == [0, 2]
    assert [one.layer for one in USE.without([1]).layers] == [3]


def test_what_no_token_chose_counts_for_a_few():
    layer = USE.layers[0]
    mean = sum(layer.weights or ()) / 100
    assert layer.importance() == pytest.approx([80 / 4, 19 / 4, 1 / 16, 0])
    assert layer.importance(LEAST) == pytest.approx([80 / 4, 19 / 4, LEAST / 16, LEAST * mean**2])


# The weights of experts in a live model


@needs_version_5
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_of_every_matrix_are_found_in_the_model(layout: str, saved: Callable[[str], Path]):
    model = load_model(saved(layout), torch.float32)
    with FolderSource(saved(layout)) as source, Workers(1) as workers:
        groups = find_groups(source, workers, EVERYTHING)
        parts = find_parameters(model, source, (t for group in groups for t in group.tensors))
        tensors = [t for group in groups for t in group.tensors]
        for t in tensors:
            bits = source.read(t).view("<u2")
            assert torch.equal(parts[t.name].values, values_for(t, bits, parts[t.name].values)), t.name
    assert len({part.place for part in parts.values()}) == len(tensors)


@pytest.fixture(scope="module")
def of_experts(saved: Callable[[str], Path]) -> list[GroupCandidates]:
    """The candidates of the experts of the last layer."""
    with FolderSource(saved("qwen3")) as source, Workers(1) as workers:
        groups = [g for g in find_groups(source, workers, EVERYTHING) if "1.mlp.experts" in g.globs[0]]
        return predict_candidates(source, groups, None, workers)


@needs_version_5
def test_experts_of_a_layer_are_measured_as_they_would_be_loaded(
    saved: Callable[[str], Path], of_experts: list[GroupCandidates], ids: Tensor, tmp_path: Path
):
    windows = CalibrationWindows.of(ids.flatten(), 32)
    model = load_model(saved("qwen3"), torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    one = of_experts[0]
    with FolderSource(saved("qwen3")) as source:
        measured = sensitivity.measure(HeadedModel(model), source, [one], windows)
        fisher = sensitivity.fisher(model, source, of_experts, windows)
    assert measured.estimated == fisher.estimated == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert one.choices[-1].scheme == Scheme("truncated", 0)
    compress(saved("qwen3"), tmp_path / "k0", [Rule(one.group.globs[0], Scheme("truncated", 0))])
    rounded = load_model(tmp_path / "k0", torch.float32)
    assert measured.divergences[0][-1] == pytest.approx(divergence(model, rounded, windows), rel=1e-3)


def divergence(base: PreTrainedModel, other: PreTrainedModel, windows: CalibrationWindows) -> float:
    with torch.no_grad():
        p, q = (m(input_ids=windows.fed).logits.double().log_softmax(-1) for m in (base, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


# Schemes by use


def test_classes_share_the_divergence_of_the_layer(of_experts: list[GroupCandidates]):
    one = of_experts[0]
    tokens = (300, 50, 0, 60, 40, 10, 40, 100)
    use = ExpertUse("text", 300, (LayerUse(1, "x", tokens, tuple(0.5 * n for n in tokens)),))
    values = tuple(8.0 * c.relative_error for c in one.choices)
    whole = Sensitivity("measured", (one,), (values,))
    split = split_by_use(whole, use)
    assert [c.group.use and c.group.use.name for c in split.candidates] == ["hot", "usual", "cold", "unused"]
    assert [c.group.globs[0].split(".")[5] for c in split.candidates] == ["0", "{1,3,4,6,7}", "5", "2"]
    assert sum(c.choices[-1].nbytes for c in split.candidates) == one.choices[-1].nbytes
    shares = [d[-1] / values[-1] for d in split.divergences]
    per_expert = [share / len(c.group.tensors) for share, c in zip(shares, split.candidates, strict=True)]
    assert per_expert[0] == pytest.approx(300 / 600, rel=0.3)  # errors of random experts are nearly equal
    assert per_expert[2] == pytest.approx(10 / 600, rel=0.3)
    assert per_expert[3] == pytest.approx(LEAST / 600, rel=0.3)
    assert sum(shares[:3]) == pytest.approx(1)
    names = [t.name for t in one.group.tensors]
    for c in split.candidates:
        rules = [Rule(glob, Scheme("truncated", 1), 2) for glob in c.group.globs]
        named = [name for name in names if choose(rules, name, 2) != LOSSLESS]
        assert sorted(named) == sorted(t.name for t in c.group.tensors)


def test_without_a_use_that_fits_experts_stay_one_group(of_experts: list[GroupCandidates]):
    whole = sensitivity.weights_only(of_experts)
    other_layer = ExpertUse("text", 9, (LayerUse(0, "x", (1,) * EXPERTS, None),))
    other_number = ExpertUse("text", 9, (LayerUse(1, "x", (1, 2), None),))
    assert split_by_use(whole, other_layer) == split_by_use(whole, other_number) == whole


def skewed(folder: Path) -> Path:
    """A use of the last layer's experts, as `neuzip experts` writes it."""
    tokens = (600, 200, 90, 50, 30, 20, 10, 0)
    path = folder / "use.json"
    path.write_bytes(use_bytes(ExpertUse("text", 500, (LayerUse(1, "x", tokens, None),))))
    return path


def test_a_plan_by_weights_follows_a_use_that_was_counted_before(
    saved: Callable[[str], Path], tmp_path: Path, neuzip: Speak
):
    options = ["--target-size", "62%", "--scheme", "rounded", "--sensitivity", "weights", "--device", "cpu"]
    said = neuzip(
        "compress", saved("qwen3"), tmp_path / "small", *options, "--expert-use", skewed(tmp_path), "--json"
    )
    assert said.exit_code == 0, said.stderr
    rules = read_plan_file(tmp_path / "small.plan.toml")
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    bits = [choose(rules, name.format(n), 2).mantissa_bits for n in (0, 2, 7)]
    assert bits == sorted(bits, reverse=True) and bits[0] > bits[-1]
    experts = {row["use"]: row for row in said.json["target"]["experts"]}
    assert [row["experts"] for row in experts.values()] == [1, 2, 4, 1]
    assert experts["hot"]["token_share"] == 0.6
    assert experts["hot"]["bits_per_weight"] > experts["unused"]["bits_per_weight"]
    alike = neuzip("compress", saved("qwen3"), tmp_path / "alike", *options, "--expert-use", "none", "--json")
    assert alike.json["target"]["experts"] == []


@needs_version_5
def test_a_search_counts_on_its_text(saved: Callable[[str], Path], ids: Tensor):
    model = load_model(saved("qwen3"), torch.float32)

    with FolderSource(saved("qwen3")) as source, Workers(1) as workers:
        groups = find_groups(source, workers, EVERYTHING)
    use = plan_search._expert_use("auto", groups, model, SomeTokens, no_stage)  # type: ignore[arg-type]
    assert use is not None and [one.layer for one in use.layers] == [0, 1]
    assert sum(use.layers[0].tokens) == 2 * use.tokens == 2 * 512
    assert plan_search._expert_use("none", groups, model, SomeTokens, no_stage) is None  # type: ignore[arg-type]
    single = [g for g in groups if "experts" not in g.globs[0]]
    assert plan_search._expert_use("auto", single, model, SomeTokens, no_stage) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "words"),
    [("qwen3", "use.json: is of another model than"), ("gpt-oss", "has no tensors of single experts")],
)
def test_a_use_of_other_experts_is_refused(
    layout: str, words: str, saved: Callable[[str], Path], tmp_path: Path, neuzip: Speak
):
    path = tmp_path / "use.json"
    path.write_bytes(use_bytes(USE))
    said = neuzip(
        "compress", saved(layout), tmp_path / "small", "--target-size", "50%", "--scheme", "rounded",
        "--sensitivity", "weights", "--expert-use", path,
    )  # fmt: skip
    assert said.exit_code == 1 and words in said.stderr
    assert not (tmp_path / "small").exists()


def test_a_use_with_layers_that_the_model_has_not_is_refused(
    saved: Callable[[str], Path], tmp_path: Path, neuzip: Speak
):
    """One layer that happens to fit does not make it that of the model."""
    layers = tuple(LayerUse(layer, "experts", (1,) * 8, None) for layer in range(3))
    (tmp_path / "use.json").write_bytes(use_bytes(ExpertUse("text", 4, layers)))
    said = neuzip(
        "compress", saved("qwen3"), tmp_path / "small", "--target-size", "50%", "--scheme", "rounded",
        "--sensitivity", "weights", "--expert-use", tmp_path / "use.json",
    )  # fmt: skip
    assert said.exit_code == 1 and "use.json: is of another model than" in said.stderr


def test_what_is_no_json_is_told_with_what_writes_such_files(tmp_path: Path):
    (tmp_path / "use.json").write_text("hello")
    with pytest.raises(NeuzipError, match=r"use\.json: the JSON is broken") as error:
        read_use(tmp_path / "use.json")
    assert "neuzip experts --output" in str(error.value.hint)


def test_another_use_is_another_search(tmp_path: Path, saved: Callable[[str], Path]):
    from neuzip.eval.plans.target_result import key_of

    target = target_size("50%", 1000)
    requests = [
        TargetRequest(saved("qwen3"), tmp_path / "x", target, "weights", expert_use=use)
        for use in ("auto", "none", USE, USE.without([0]))
    ]
    assert len({key_of(request, None, None) for request in requests}) == 4


# What is shown


def test_the_command_counts_shows_and_writes(saved: Callable[[str], Path], tmp_path: Path, neuzip: Speak):
    text = tmp_path / "text.txt"
    text.write_text("An expert is chosen for a token. " * 8)
    options = ["--text", text, "--device", "cpu", "--max-tokens", 200]
    said = neuzip(
        "experts", saved("mixtral"), *options, "-o", tmp_path / "use.json", "--plot", tmp_path / "use.svg",
        "--json",
    )  # fmt: skip
    assert said.exit_code == 0, said.stderr
    use = read_use(tmp_path / "use.json")
    assert use.tokens == said.json["tokens"] == 200
    assert [list(one.tokens) for one in use.layers] == [one["tokens"] for one in said.json["layers"]]
    assert (tmp_path / "use.svg").read_bytes().startswith(b"<?xml")
    (tmp_path / "said.json").write_text(said.stdout)
    assert read_use(tmp_path / "said.json") == use
    plain = neuzip("experts", saved("mixtral"), *options)
    header, _, *rows = plain.stdout.splitlines()
    assert header.split()[:3] == ["layer", "experts", "per"]
    assert [row.split()[:3] for row in rows[:2]] == [["0", "8", "2"], ["1", "8", "2"]]
    again = neuzip("experts", saved("mixtral"), *options, "-o", tmp_path / "use.json")
    assert again.exit_code == 1 and "use.json" in again.stderr
    quiet = neuzip("experts", saved("mixtral"), *options, "--quiet").stdout.split("\n")
    assert quiet[0] == f"0 0 {use.layers[0].tokens[0]}" and len(quiet) == 2 * EXPERTS + 1


def test_a_model_without_experts_is_told(tmp_path: Path, neuzip: Speak):
    from neuzip.eval.demo import CHECKPOINT

    said = neuzip("experts", CHECKPOINT, "--text", "demo", "--max-tokens", 64, "--device", "cpu")
    assert said.exit_code == 1 and "LlamaForCausalLM has no experts" in said.stderr


def test_inspect_has_a_row_for_the_experts_of_a_layer(
    saved: Callable[[str], Path], tmp_path: Path, neuzip: Speak
):
    said = neuzip(
        "compress", saved("qwen3"), tmp_path / "mixed", "-k", 3, "--bits-for", "*.1.mlp.experts.{0,5}.up*=1"
    )
    assert said.exit_code == 0, said.stderr
    with FolderSource(tmp_path / "mixed") as source:
        tensors = inspect(source, select(source), jobs=1).tensors
    rows = sum_up_experts(tensors)
    assert sum(row.nbytes for row in rows) == sum(t.nbytes for t in tensors)
    assert sum(row.stored_bytes for row in rows) == sum(t.stored_bytes for t in tensors)
    row = next(row for row in rows if row.name == "model.layers.1.mlp.experts.*.up_proj.weight")
    assert isinstance(row, ExpertFigures)
    members = [t for t in tensors if ".1.mlp.experts." in t.name and "up_proj" in t.name]
    assert row.shape == (EXPERTS, 32, 64) and row.scheme == "6 k=3, 2 k=1"
    assert row.entropies is not None and row.loss is not None
    exponents = [t.entropies.exponent for t in members if t.entropies is not None]
    assert row.entropies.exponent == pytest.approx(np.mean(exponents))
    assert row.loss.max_relative == max(t.loss.max_relative for t in members if t.loss is not None)
    ratios = [t.stored_bytes / t.nbytes for t in members]
    assert (row.least_ratio, row.largest_ratio) == (min(ratios), max(ratios))
    shown = neuzip("inspect", tmp_path / "mixed").stdout
    assert shown.count(".mlp.experts.") == 2 * 3 and "6 k=3, 2 k=1" in shown
    assert f"weight files: {len(tensors)} tensors" in shown
    assert len(neuzip("inspect", tmp_path / "mixed", "--json").json["tensors"]) == len(tensors)
    single = neuzip("inspect", tmp_path / "mixed", "--tensor", "*.1.mlp.experts.{0,5}.up*", "--json").json
    assert [t["scheme"] for t in single["tensors"]] == ["k=1", "k=1"]


def test_layers_with_experts_can_be_left_out_and_dropped(
    saved: Callable[[str], Path], tmp_path: Path, neuzip: Speak
):
    text = tmp_path / "text.txt"
    shutil.copy(__file__, text)
    said = neuzip(
        "layers", saved("qwen3"), "--text", text, "--max-tokens", 200, "--gradients", 0, "--drop", 1,
        "-o", tmp_path / "fewer", "--device", "cpu", "--json",
    )  # fmt: skip
    assert said.exit_code == 0, said.stderr
    model = load_model(tmp_path / "fewer", torch.float32)
    assert len(count_use(model, [torch.arange(8)[None]])) == 1
