"""Layers in plans by target: fewer bits where one is worth little, whole layers dropped where that pays."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuzip.compress.rules import choose
from neuzip.compress.rules_file import PlanFile, read_plan, read_plan_file
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.layers import drops as layer_drops
from neuzip.eval.layers import left_out
from neuzip.eval.layers.drops import Drop, weigh
from neuzip.eval.layers.removal import remove_layers, tensors_by_layer
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.texts import read_text
from neuzip.eval.plans import deliver, plan_file, plan_search, target_values
from neuzip.eval.plans.allocation import Allocation
from neuzip.eval.plans.plan_request import TargetRequest
from neuzip.eval.plans.search import search_budget
from neuzip.eval.plans.target_result import TargetResult
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, IDLE, TOKENS = 3, 1, 768


@contextmanager
def stage(label: str, total: int, unit: str) -> Iterator[Any]:
    yield lambda count: None


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the demo, with a layer that hands on nearly what it is given, of as many bits as others."""
    folder = tmp_path_factory.mktemp("idle") / "idle"
    remove_layers(CHECKPOINT, folder, [3, 4, 5])
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.{IDLE}.{name}.weight"] /= 64
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def baseline(idle: Path) -> BaselineComparison:
    return BaselineComparison(idle, read_text("demo"), max_tokens=TOKENS, device="cpu")


def delivered(
    src: Path, dst: Path, baseline: BaselineComparison, target: Any, **options: Any
) -> TargetResult:
    request = TargetRequest(src, dst, target, "fisher", **options)
    return deliver.compress_to_target(request, read_text("demo"), baseline, stage)


@pytest.fixture(scope="module")
def dropped(
    idle: Path, baseline: BaselineComparison, tmp_path_factory: pytest.TempPathFactory
) -> TargetResult:
    """With auto, at a divergence that rounding could reach too."""
    dst = tmp_path_factory.mktemp("dropped") / "small"
    return delivered(idle, dst, baseline, target_values.max_kld("0.03"), drop_layers="auto")


# Fewer bits


def test_a_layer_that_is_worth_little_gets_fewer_bits(
    idle: Path, baseline: BaselineComparison, tmp_path: Path
):
    """What single tensors bear tells of their layer: nothing else has to."""
    request = TargetRequest(idle, tmp_path / "x", target_values.max_kld("0.003"), "fisher")
    rules = plan_search.find_plan(request, baseline, stage, trials=False).rules
    bits = defaultdict(list)
    with FolderSource(idle) as source:
        layer_of = tensors_by_layer(source)
        for tensor in source.tensors():
            if len(tensor.info.shape) == 2 and tensor.name in layer_of:
                k = choose(rules, tensor.name, 2).mantissa_bits
                bits[layer_of[tensor.name]].append(7 if k is None else k)
    assert set(bits[IDLE]) == {0}
    assert all(statistics.fmean(of_layer) > 1 for n, of_layer in bits.items() if n != IDLE), bits
    without = left_out.measure_without(baseline, left_out.ModelWithout(baseline.model), [IDLE])
    assert without is not None and without.kld.mean.value < 0.03


# Dropped layers


@pytest.mark.slow
def test_a_layer_is_dropped_where_that_takes_less_than_rounding_alone(dropped: TargetResult, idle: Path):
    found = dropped.search
    assert found is not None and found.drops is not None and found.passed_over is not None
    assert dropped.dropped == found.dropped == (IDLE,)
    assert dropped.holds
    assert dropped.report.stored_weight_bytes < 0.95 * found.passed_over.bytes
    assert found.passed_over.comparison is not None
    assert found.passed_over.comparison.kld.mean.value <= 0.03
    config = json.loads((dropped.report.dst / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS - 1
    assert config["neuzip"]["dropped_layers"][-1:] == [{"layers": [IDLE], "of": LAYERS}]
    before = (idle / "model.safetensors").stat().st_size
    assert (dropped.report.src, dropped.report.weight_bytes) == (idle, before)
    assert not list(dropped.report.dst.parent.glob("*.neuzip-*"))


def test_what_is_reported_is_the_divergence_of_what_was_written(
    dropped: TargetResult, idle: Path, baseline: BaselineComparison
):
    assert dropped.search is not None and dropped.comparison is not None
    small, whole = load_model(dropped.report.dst, torch.float32), load_model(idle, torch.float32)
    assert len(small.model.layers) == LAYERS - 1
    sums = 0.0
    with torch.no_grad():
        for w in baseline.reading.windows:
            ids = baseline.ids[None, w.start : w.stop]
            p, q = (m(input_ids=ids).logits.double().log_softmax(-1) for m in (whole, small))
            sums += float((p.exp() * (p - q)).sum())
    kld = dropped.comparison.kld.mean.value
    assert kld == pytest.approx(sums / baseline.tokens, rel=1e-3)
    assert kld <= 0.03
    assert dropped.search.trials[-1].comparison == dropped.comparison


def test_what_dropping_costs_is_that_of_the_layer_report(dropped: TargetResult, baseline: BaselineComparison):
    assert dropped.search is not None and dropped.search.drops is not None
    singles = dropped.search.drops.singles
    assert [drop.layers for drop in singles] == [(n,) for n in range(LAYERS)]
    model = left_out.ModelWithout(baseline.model)
    for drop in (singles[IDLE], singles[0]):
        assert drop.comparison == left_out.measure_without(baseline, model, drop.layers)


@pytest.mark.slow
def test_where_dropping_does_not_pay_the_plan_is_that_of_rounding(
    baseline: BaselineComparison, idle: Path, tmp_path: Path
):
    """At a target below what the layer costs, and so with no layer that could go."""
    alone = left_out.measure_without(baseline, left_out.ModelWithout(baseline.model), [IDLE])
    assert alone is not None
    target = target_values.max_kld(f"{alone.kld.mean.value / 2}")
    found = [
        plan_search.find_plan(
            TargetRequest(idle, tmp_path / "x", target, "fisher", drop_layers=n), baseline, stage
        )
        for n in ("auto", 0)
    ]
    assert found[0].dropped == found[1].dropped == ()
    assert (found[0].rules, found[0].bytes) == (found[1].rules, found[1].bytes)
    assert found[0].pays_from is not None and found[0].drops is not None
    assert found[0].drops.rejected is not None
    assert found[0].drops.rejected.comparison == alone
    assert target.limit < alone.kld.mean.value < found[0].pays_from < 0.03


@pytest.mark.slow
def test_a_size_that_rounding_cannot_reach(baseline: BaselineComparison, idle: Path, tmp_path: Path):
    target = target_values.target_size("21%", (idle / "model.safetensors").stat().st_size)
    made = delivered(idle, tmp_path / "small", baseline, target, drop_layers="auto")
    assert made.holds and IDLE in made.dropped
    assert made.report.stored_weight_bytes <= target.limit
    assert made.search is not None and made.search.drops is not None
    assert math.isinf(made.search.drops.steps[0].predicted) and made.search.passed_over is None


@pytest.mark.slow
def test_of_two_plans_of_a_size_the_closer_is_taken(baseline: BaselineComparison, idle: Path, tmp_path: Path):
    target = target_values.target_size("27%", (idle / "model.safetensors").stat().st_size)
    request = TargetRequest(idle, tmp_path / "x", target, "fisher", drop_layers="auto")
    found = plan_search.find_plan(request, baseline, stage)
    assert found.dropped == (IDLE,) and found.passed_over is not None
    both = [found.trials[-1], found.passed_over]
    klds = [trial.comparison.kld.mean.value for trial in both if trial.comparison is not None]
    assert klds[0] < klds[1] and max(trial.bytes for trial in both) <= target.limit


@pytest.mark.slow
def test_as_many_layers_as_are_asked_for_go(baseline: BaselineComparison, idle: Path, tmp_path: Path):
    made = delivered(idle, tmp_path / "a", baseline, target_values.max_kld("8"), drop_layers=2)
    assert made.holds and len(made.dropped) == 2 and IDLE in made.dropped
    with pytest.raises(NeuzipError, match=r"`max_kld=0\.01`: without layers \d, \d.* before anything"):
        delivered(idle, tmp_path / "b", baseline, target_values.max_kld("0.01"), drop_layers=2)
    with pytest.raises(UsageError, match="`drop_layers=3`: the model has 3 layers, one has to stay"):
        delivered(idle, tmp_path / "b", baseline, target_values.max_kld("0.01"), drop_layers=LAYERS)
    assert not list(tmp_path.glob("b*"))


def test_an_interrupted_run_takes_its_plan_and_its_layers_again(
    dropped: TargetResult,
    idle: Path,
    baseline: BaselineComparison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    dst = tmp_path / dropped.report.dst.name
    shutil.copy(dropped.plan, plan_file.plan_path(dst))
    monkeypatch.setattr(deliver, "find_plan", None)
    again = delivered(idle, dst, baseline, target_values.max_kld("0.03"), drop_layers="auto")
    assert again.search is None and again.dropped == (IDLE,)
    assert again.report.tensors == dropped.report.tensors and again.comparison is not None


def test_its_plan_is_not_taken_for_one_of_the_whole_model(dropped: TargetResult):
    assert dropped.search is not None
    assert read_plan(dropped.plan) == PlanFile(dropped.search.rules, (IDLE,))
    with pytest.raises(NeuzipError, match=f"without its layers {IDLE}: what is left has other numbers"):
        read_plan_file(dropped.plan)


@pytest.mark.parametrize("value", ["3", "[-1]", '["a"]', "[true]"])
def test_numbers_of_layers_in_a_plan_are_checked(value: str, tmp_path: Path):
    path = tmp_path / "plan.toml"
    path.write_text(f'dropped_layers = {value}\n[[rule]]\nmatch = "*"\n')
    with pytest.raises(NeuzipError, match="dropped_layers is no list of numbers"):
        read_plan(path)


@pytest.mark.gpu
def test_on_a_gpu_the_same_layer_goes(idle: Path, tmp_path: Path):
    """There every tensor is measured, in the model without the layer too."""
    text = read_text("demo")
    on_gpu = BaselineComparison(idle, text, max_tokens=TOKENS, device="cuda")
    request = TargetRequest(
        idle, tmp_path / "a", target_values.max_kld("0.03"), "measured", drop_layers="auto"
    )
    made = deliver.compress_to_target(request, text, on_gpu, stage)
    assert made.dropped == (IDLE,) and made.holds
    assert made.search is not None and made.search.passed_over is not None
    assert made.report.stored_weight_bytes < made.search.passed_over.bytes


# How they are chosen


def chosen(
    baseline: BaselineComparison, count: int | None, predict: Callable[..., float]
) -> layer_drops.Drops:
    with FolderSource(baseline.model.config.name_or_path) as source:
        return weigh(baseline, source, [100] * LAYERS, count, predict, stage)


def test_layers_go_as_long_as_one_more_is_predicted_to_gain(
    baseline: BaselineComparison, monkeypatch: pytest.MonkeyPatch
):
    costs = {0: 9.0, 1: 0.1, 2: 0.5}
    monkeypatch.setattr(layer_drops, "measure_without", lambda y, m, one, told: _comparison(costs, one))
    drops = chosen(baseline, None, lambda one, comparison: [10.0, 8.0, 9.0][len(one)])
    assert [drop.layers for drop in drops.steps] == [(), (1,)]
    assert drops.rejected is not None and drops.rejected.layers == (1, 2)
    assert chosen(baseline, None, lambda one, comparison: [10.0, 8.0, 7.0][len(one)]).rejected is None
    assert chosen(baseline, 2, lambda one, comparison: [1.0, 2.0, 3.0][len(one)]).chosen.layers == (1, 2)
    never = chosen(baseline, None, lambda one, comparison: math.inf)
    assert never.chosen.layers == () and never.rejected is not None


def test_where_no_layer_fits_the_target_no_two_are_measured(
    baseline: BaselineComparison, monkeypatch: pytest.MonkeyPatch
):
    measured = []

    def measure(y: Any, m: Any, one: tuple[int, ...], told: Any) -> Any:
        measured.append(one)
        return _comparison(dict.fromkeys(range(LAYERS), 1.0), one)

    monkeypatch.setattr(layer_drops, "measure_without", measure)
    drops = chosen(baseline, None, lambda one, comparison: math.inf if one else 10.0)
    assert measured == [(n,) for n in range(LAYERS)]
    assert drops.chosen.layers == () and drops.rejected is drops.singles[0]


def _comparison(costs: dict[int, float], one: tuple[int, ...]) -> Any:
    kld = type("KLD", (), {"mean": Estimate(sum(costs[n] for n in one), None)})()
    return type("Comparison", (), {"kld": kld})()


def test_a_layer_is_chosen_by_what_it_costs_a_byte(monkeypatch: pytest.MonkeyPatch):
    figures = [(100, 0.1), (300, 0.2), (10, 0.05)]
    drops = [Drop((n,), nbytes, _comparison({n: kld}, (n,)), 0.0) for n, (nbytes, kld) in enumerate(figures)]
    monkeypatch.setattr(layer_drops, "require_removable", lambda source, dropped: None)
    with FolderSource(CHECKPOINT) as source:
        assert layer_drops._cheapest(source, drops, []) is drops[1]


def test_layers_that_cannot_be_written_are_passed_over(
    baseline: BaselineComparison, monkeypatch: pytest.MonkeyPatch
):
    def refuse(source: Any, dropped: Any) -> None:
        if IDLE in dropped:
            raise NeuzipError(f"layer {IDLE} cannot be dropped")

    monkeypatch.setattr(layer_drops, "require_removable", refuse)
    drops = chosen(baseline, 1, lambda one, comparison: 1.0)
    assert drops.chosen.layers != (IDLE,) and drops.refused == (f"layer {IDLE} cannot be dropped",)
    monkeypatch.setattr(layer_drops, "require_removable", lambda source, one: refuse(source, [IDLE]))
    with pytest.raises(NeuzipError, match=f"`drop_layers=1`: layer {IDLE} cannot be dropped"):
        chosen(baseline, 1, lambda one, comparison: 1.0)
    assert chosen(baseline, None, lambda one, comparison: 1.0).chosen.layers == ()


@pytest.mark.parametrize("factor", [0.2, 1.0, 6.0, 40.0])
def test_search_begins_at_what_dropping_costs(factor: float):
    def allocated(budget: float) -> Allocation:
        return Allocation((round(budget * 1e9),), budget, 1 / (1 + budget), 0.0)

    attempts = search_budget(
        allocated, lambda a: (Estimate(0.008 + factor * a.weight, None), None), 0.01, floor=0.008
    )
    assert 0.008 + 0.95 * 0.002 <= attempts[-1].value <= 0.01
    assert len(attempts) <= 4


# The command


@pytest.mark.slow
def test_command_drops_and_says_so(neuzip: Any, idle: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(read_text("demo").content[:2000])
    asked = ("--max-kld", "0.1", "--text", text, "--scheme", "rounded", "--drop-layers")
    said = neuzip("compress", idle, tmp_path / "a", *asked, "auto")
    assert said.exit_code == 0, said.stderr
    assert f"dropped layers: {IDLE}; the remaining layers are renumbered" in said.stdout
    assert "lossless" not in said.stdout and "KLD of that alone" in said.stdout
    told = neuzip("compress", idle, tmp_path / "b", *asked, "1", "--json").json
    assert told["target"]["dropped_layers"] == [IDLE] and told["target"]["met"] is True
    assert told["lossless"] is False and told["src"] == str(idle)
    assert told["target"]["delivered"]["kld"]["mean"]["value"] <= 0.1


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--max-kld", "0.1", "--scheme", "rounded", "--drop-layers", "0"], "not a number of layers"),
        (["--max-kld", "0.1", "--scheme", "rounded", "--drop-layers", "all"], "not a number of layers"),
        (
            ["--max-kld", "0.1", "--scheme", "rounded", "--drop-layers", "1", "--dry-run"],
            "excludes --dry-run",
        ),
        (
            ["--max-kld", "0.1", "--scheme", "rounded", "--drop-layers", "1", "--attention", "auto"],
            "excludes --attention",
        ),
        (
            [
                "--max-kld",
                "0.1",
                "--scheme",
                "rounded",
                "--drop-layers",
                "auto",
                "--scheme",
                "rounded",
                "--sensitivity",
                "weights",
            ],
            "excludes --sensitivity",
        ),
    ],
)
def test_wrong_use(neuzip: Any, tmp_path: Path, options: list[str], wrong: str):
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *options)
    assert (said.exit_code, wrong in said.stderr, "hint: " in said.stderr) == (2, True, True), said.stderr
    assert list(tmp_path.iterdir()) == []
