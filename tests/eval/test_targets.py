"""Plans by target: the allocation, what tensors bear, the search, plan files, what the command delivers."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from neuzip.compress import CompressionReport, Rule, Scheme, compress, verify
from neuzip.compress.rules import LOSSLESS, RAW, choose
from neuzip.compress.rules_file import PlanFile, plan_bytes, read_plan_file
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.errors import DiskFull, NeuzipError, UsageError, WouldOverwrite
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.comparison import BaselineComparison, ComparisonRun, NotFinite
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import Document, Text, read_text
from neuzip.eval.plans import (
    candidates,
    deliver,
    plan_search,
    plan_trials,
    reach,
    search,
    sensitivity,
    target_values,
    tensor_groups,
)
from neuzip.eval.plans.allocation import Allocation, Option, OverBudget, allocate, pareto_front
from neuzip.eval.plans.candidates import GroupCandidates, SchemeChoice
from neuzip.eval.plans.plan_request import TargetRequest
from neuzip.eval.plans.search import search_budget
from neuzip.eval.plans.target_result import key_of
from neuzip.eval.plans.tensor_groups import TensorGroup
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.gradients import fisher_diagonal
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

Speak = Callable[..., Any]

EVERYTHING = (Rule("*", LOSSLESS),)


@contextmanager
def stage(label: str, total: int, unit: str) -> Iterator[object]:
    yield lambda count: None


# Allocation


def brute_force(items: list[list[Option]], budget: float) -> float:
    """The least cost of any choice within the budget; infinite if there is none."""
    return min(
        (
            math.fsum(o.cost for o in options)
            for options in itertools.product(*items)
            if math.fsum(o.weight for o in options) <= budget
        ),
        default=math.inf,
    )


def largest_move(items: list[list[Option]]) -> float:
    """The most that one step along a hull can save: what marginal analysis may be above the optimum."""
    return max(max(o.cost for o in options) - min(o.cost for o in options) for options in items)


numbers = st.integers(0, 40).map(float)
problems = st.lists(
    st.lists(st.builds(Option, numbers, numbers), min_size=1, max_size=5), min_size=1, max_size=5
)


@given(problems, st.integers(0, 150))
def test_allocation_is_within_its_bounds_of_the_optimum(items: list[list[Option]], budget: int):
    optimum = brute_force(items, budget)
    if math.isinf(optimum):
        with pytest.raises(OverBudget):
            allocate(items, budget)
        return
    found = allocate(items, budget)
    taken = [options[i] for options, i in zip(items, found.chosen, strict=True)]
    assert (found.weight, found.cost) == (sum(o.weight for o in taken), sum(o.cost for o in taken))
    assert found.weight <= budget
    assert found.bound <= optimum + 1e-9
    assert optimum <= found.cost <= optimum + largest_move(items)


def test_with_many_items_allocation_is_close_to_the_optimum():
    # Like tensors: bytes fall evenly with each bit, errors grow fourfold, sensitivities spread over decades.
    rng = random.Random(0)
    items = []
    for _ in range(60):
        size, weight = rng.choice([1, 1, 4]), 10 ** rng.uniform(-3, 0)
        items.append([Option(size * (k + 4), weight * 4.0**-k if k < 7 else 0.0) for k in range(8)])
    for budget in (600, 800, 1000):
        found = allocate(items, budget)
        assert budget - 1 < found.weight <= budget
        assert found.cost <= 1.01 * found.bound


def test_what_no_budget_can_hold_names_the_least():
    with pytest.raises(OverBudget) as refused:
        allocate([[Option(3, 1), Option(2, 9)], [Option(4, 0)]], 5)
    assert refused.value.least == 6


def test_pareto_front_leaves_out_what_another_beats():
    points = [Option(1, 5), Option(2, 5), Option(1, 5), Option(3, 1), Option(4, 2)]
    assert pareto_front(points) == [0, 3]


# The search


def ideal(budget: float) -> Allocation:
    """As if every budget could be used up: costs fall as the budget grows."""
    return Allocation((round(budget * 1e9),), budget, 1 / (1 + budget), 0.0)


def exactly(value: float) -> Estimate:
    return Estimate(value, None)


@pytest.mark.parametrize("factor", [0.01, 0.4, 0.99, 1.0, 1.1, 3.0, 70.0])
def test_search_corrects_a_wrong_prediction(factor):
    attempts = search_budget(ideal, lambda a: (exactly(factor * a.weight), None), 0.01)
    assert 0.95 * 0.01 <= attempts[-1].value <= 0.01
    assert len(attempts) <= 4


def test_search_does_so_where_the_whole_is_no_multiple_of_its_parts():
    attempts = search_budget(ideal, lambda a: (exactly(30 * a.weight**1.5), None), 0.01)
    assert 0.9 * 0.01 <= attempts[-1].value <= 0.01


def test_search_takes_what_loses_nothing_if_nothing_else_holds():
    attempts = search_budget(ideal, lambda a: (exactly(1.0 if a.weight else 0.0), None), 0.01)
    assert attempts[-1].choice.weight == 0
    assert len(attempts) == search.ATTEMPTS + 1


def test_search_for_nothing_tries_one_plan():
    assert [a.choice.weight for a in search_budget(ideal, lambda a: (exactly(a.weight), None), 0.0)] == [0]


def test_search_ends_where_a_larger_budget_changes_nothing():
    largest = Allocation((7,), 5.0, 0.0, 0.0)
    attempts = search_budget(lambda budget: largest, lambda a: (exactly(-0.1), None), 0.01)
    assert [a.choice for a in attempts] == [largest]


def test_search_adds_the_standard_error():
    attempts = search_budget(
        ideal, lambda a: (Estimate(a.weight, 0.3 * math.sqrt(0.01 * a.weight)), None), 0.01
    )
    best = attempts[-1].estimate
    assert best.standard_error is not None
    assert 0.95 * 0.01 <= best.value + best.standard_error <= 0.01


@pytest.mark.parametrize("value", [-0.0029, 0.0, 0.0015])
def test_search_does_not_leap_on_what_is_not_told_from_0(value):
    tried: list[float] = []

    def unclear_at_first(allocation: Allocation) -> tuple[Estimate, None]:
        tried.append(allocation.weight)
        return (Estimate(value, 0.0015) if len(tried) == 1 else exactly(allocation.weight)), None

    search_budget(ideal, unclear_at_first, 0.1)
    assert 0.1 < tried[1] <= 0.2


def test_search_ends_where_errors_are_larger_than_the_limit():
    def noisy(allocation: Allocation) -> tuple[Estimate, None]:
        return (Estimate(-0.02, 0.025) if allocation.weight < 0.5 else exactly(1.0)), None

    attempts = search_budget(lambda budget: ideal(min(budget, 1.0)), noisy, 0.01)
    assert attempts[-1].value <= 0.01
    assert all(a.choice.weight < math.inf for a in attempts)


def test_search_passes_over_a_plan_that_breaks_the_model():
    broken = lambda a: (exactly(math.inf if a.weight > 0.004 else a.weight), None)  # noqa: E731
    attempts = search_budget(ideal, broken, 0.01)
    assert 0 < attempts[-1].value <= 0.004


def test_search_keeps_the_cheapest_that_held():
    # A larger budget that gives a worse choice, as marginal analysis may.
    costs = {0.5: 1.0, 0.96: 2.0}
    values = iter(costs)

    def allocated(budget: float) -> Allocation:
        value = next(values)
        return Allocation((round(100 * value),), value, costs[value], 0.0)

    attempts = search_budget(allocated, lambda a: (exactly(a.weight), None), 1.0)
    assert [a.value for a in attempts] == [0.96, 0.5]


# What is asked for


@pytest.mark.parametrize(
    ("text", "limit"),
    [("60%", 600.0), ("6 GiB", 6 * 2**30), ("6GB", 6e9), ("1.5kB", 1500), ("12B", 12), (".5 MiB", 2**19)],
)
def test_sizes(text, limit):
    assert target_values.target_size(text, 1000).limit == limit


@pytest.mark.parametrize("text", ["60", "", "6 gib", "-5%", "6G", "nan%", "1e3B", "6GiB2"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="is no size"):
        target_values.target_size(text, 1000)


@pytest.mark.parametrize("text", ["", "x", "-0.1", "inf", "nan"])
def test_what_is_no_divergence_is_refused(text):
    with pytest.raises(UsageError, match="`max_kld="):
        target_values.max_kld(text)


@pytest.mark.parametrize("text", ["0.5", "", "-1%", "half%"])
def test_what_is_no_increase_is_refused(text):
    with pytest.raises(UsageError, match="`max_ppl_increase="):
        target_values.max_ppl_increase(text)


# What a tensor bears


@pytest.fixture(scope="module")
def text_ids() -> torch.Tensor:
    return BaselineComparison(CHECKPOINT, read_text("demo"), max_tokens=1024, device="cpu").ids


@pytest.fixture(scope="module")
def some() -> list[GroupCandidates]:
    """A few of the demo's tensors, of layers that differ much."""
    names = ("model.embed_tokens", "model.layers.0.mlp.down_proj", "model.layers.3.self_attn.q_proj")
    with FolderSource(CHECKPOINT) as source, Workers() as workers:
        groups = tensor_groups.find_groups(source, workers, EVERYTHING)
        chosen = [g for g in groups if g.globs[0].startswith(names)]
        return candidates.predict_candidates(source, chosen, None, workers)


def test_bytes_are_about_those_of_the_container(some: list[GroupCandidates], tmp_path: Path):
    """Within 0.1 %, and the alignment of a stream: nothing was coded to know them."""
    for number in (0, 1, 4, 7):  # lossless, 6, 3 and 0 bits
        schemes = [one.choices[number].scheme for one in some]
        rules = [*tensor_groups.rules_of([one.group for one in some], schemes), *EVERYTHING]
        report = compress(CHECKPOINT, tmp_path / str(number), rules, verify=False)
        stored = {t.name: t.stored_bytes for t in report.tensors}
        for one in some:
            coded = sum(stored[t.name] for t in one.group.tensors)
            assert one.choices[number].nbytes == pytest.approx(coded, rel=1e-3, abs=64)


def test_errors_are_those_of_verify(some: list[GroupCandidates], tmp_path: Path):
    rules = tensor_groups.rules_of([one.group for one in some], [Scheme("truncated", 1)] * len(some))
    compress(CHECKPOINT, tmp_path / "k1", rules, verify=False)
    found = {t.name: t for t in verify(tmp_path / "k1", CHECKPOINT).tensors}
    for one in some:
        (tensor,) = one.group.tensors
        expected = found[tensor.name].relative_l2
        assert expected is not None
        assert one.choices[-2].scheme == Scheme("truncated", 1)
        assert one.choices[-2].relative_error == pytest.approx(expected**2, rel=1e-9)


@pytest.mark.slow
def test_a_measured_divergence_is_that_of_the_checkpoint_with_this_tensor_rounded(
    some: list[GroupCandidates], text_ids: torch.Tensor, tmp_path: Path
):
    windows = CalibrationWindows.of(text_ids, 256)
    model = load_model(CHECKPOINT, torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with FolderSource(CHECKPOINT) as source:
        found = sensitivity.measure(HeadedModel(model), source, some, windows)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for one, divergences in zip(some, found.divergences, strict=True):
        assert one.choices[-1].scheme == Scheme("truncated", 0)
        compress(
            CHECKPOINT, tmp_path / one.group.globs[0], [Rule(one.group.globs[0], Scheme("truncated", 0))]
        )
        rounded = load_model(tmp_path / one.group.globs[0], torch.float32)
        assert divergences[-1] == pytest.approx(plain_divergence(model, rounded, windows), rel=2e-3)


def plain_divergence(base: PreTrainedModel, other: PreTrainedModel, windows: CalibrationWindows) -> float:
    with torch.no_grad():
        p, q = (m(input_ids=windows.fed).logits.double().log_softmax(-1) for m in (base, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.slow
def test_fisher_predicts_what_is_measured(some: list[GroupCandidates], text_ids: torch.Tensor):
    windows = CalibrationWindows.of(text_ids, 256)
    model = load_model(CHECKPOINT, torch.float32)
    with FolderSource(CHECKPOINT) as source:
        predicted = sensitivity.fisher(model, source, some, windows)
        measured = sensitivity.measure(HeadedModel(model), source, some, windows)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    for expected, found, one in zip(measured.divergences, predicted.divergences, some, strict=True):
        assert expected[0] == found[0] == 0
        assert one.choices[-3].scheme == Scheme("truncated", 2)
        assert found[-3] == pytest.approx(expected[-3], rel=0.3)
    orders = [sorted(range(3), key=lambda i: s.divergences[i][-3]) for s in (predicted, measured)]
    assert orders[0] == orders[1]


@pytest.mark.slow
def test_fisher_of_one_linear_layer_is_what_arithmetic_says():
    # A head alone: logits h W'. Of a token drawn from p the gradient is (p - one-hot) h', whose square has
    # the mean p (1 - p) h^2.
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=0, num_attention_heads=1,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    windows = CalibrationWindows.of(torch.randint(16, (4001,)), 1)  # windows of one token: nothing is summed
    weight = model.lm_head.weight
    diagonal = fisher_diagonal(model, [weight], windows, lambda count: None)
    with torch.no_grad():
        hidden = model.model(windows.fed).last_hidden_state[:, 0]
        p = (hidden @ weight.T).softmax(-1)
        expected = (p * (1 - p)).T @ hidden.square() / len(hidden)
    torch.testing.assert_close(diagonal[weight], expected, rtol=0.3, atol=0.03 * float(expected.max()))


def test_what_is_no_parameter_is_estimated_by_its_weights(
    some: list[GroupCandidates], text_ids: torch.Tensor
):
    strange = GroupCandidates(some[1].group, some[1].choices)
    model = load_model(CHECKPOINT, torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(2)  # not as in the checkpoint
    with FolderSource(CHECKPOINT) as source:
        found = sensitivity.fisher(model, source, [some[0], strange], CalibrationWindows.of(text_ids, 256))
    assert found.estimated == 1
    shares = [c.relative_error for c in some[1].choices]
    ratio = found.divergences[0][-1] / some[0].choices[-1].relative_error
    assert found.divergences[1] == pytest.approx([ratio * share for share in shares])


def test_a_scheme_that_breaks_the_model_is_left_out():
    choices = tuple(SchemeChoice(Scheme("truncated", k), 10 + k, 0.1 * 4.0**-k) for k in (2, 1, 0))
    one = GroupCandidates(TensorGroup(("x",), ()), (SchemeChoice(LOSSLESS, 20, 0.0), *choices))
    values = sensitivity._completed(one.choices, {1: 0.001, 2: 0.004, 3: math.inf})
    found = sensitivity._filled("measured", [one], [values])
    assert [c.nbytes for c in found.candidates[0].choices] == [20, 12, 11]
    assert found.divergences == ((0.0, 0.001, 0.004),)


def test_finer_schemes_follow_by_squared_error():
    choices = (
        SchemeChoice(LOSSLESS, 9, 0.0),
        *(SchemeChoice(Scheme("truncated", k), 9, 4.0**-k) for k in (4, 3, 2)),
    )
    assert sensitivity._completed(choices, {3: 0.5}) == pytest.approx((0.0, 0.5 / 16, 0.5 / 4, 0.5))


# Groups and plan files


@pytest.mark.parametrize(
    ("members", "others", "globs"),
    [
        (["h.0.w"], ["h.1.w"], ("h.0.w",)),
        (["l.0.experts.0.w", "l.0.experts.1.w"], ["l.1.experts.0.w"], ("l.0.experts.*.w",)),
        (["l.0.e.0.w", "l.0.e.1.w"], ["l.0.e.0.x.w"], ("l.0.e.0.w", "l.0.e.1.w")),
        (["odd[0]*?"], ["odd0"], ("odd[[]0][*][?]",)),
        (["embed", "head"], [], ("embed", "head")),
    ],
)
def test_globs_name_the_members_and_nothing_else(members, others, globs):
    found = tensor_groups._globs(members, [*members, *others])
    assert found == globs
    rules = [Rule(glob, RAW) for glob in found]
    assert all(choose(rules, name, 2) == RAW for name in members)
    assert all(choose(rules, name, 2) == LOSSLESS for name in others)


def test_a_plan_file_gives_the_rules_back(tmp_path: Path):
    rules = [
        Rule("ex[[]clude]*", RAW),
        Rule('a "quoted"\\name\t\x7fß\U0001f600', Scheme("truncated", 3, 512), min_dimensions=2),
        Rule("*", LOSSLESS),
    ]
    path = tmp_path / "made.plan.toml"
    path.write_bytes(plan_bytes(PlanFile(tuple(rules)), ["neuzip compress\na b", "search 00"]))
    assert read_plan_file(path) == rules
    assert path.read_text().startswith("# neuzip compress a b\n# search 00\n")


# The whole


@pytest.fixture(scope="module")
def baseline() -> BaselineComparison:
    return BaselineComparison(CHECKPOINT, read_text("demo"), max_tokens=2048, device="cpu")


@pytest.fixture(scope="module")
def uniform(
    baseline: BaselineComparison, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[int, float]]:
    """Bytes of the weights and mean divergence of every matrix rounded to k bits, for two ks."""
    found = {}
    for k in (1, 2):
        folder = tmp_path_factory.mktemp("uniform") / str(k)
        report = compress(CHECKPOINT, folder, [Rule("*", Scheme("truncated", k), 2), *EVERYTHING])
        found[k] = report.stored_weight_bytes, baseline.run(folder).comparison.kld.mean.value
    return found


@pytest.mark.slow
def test_a_plan_by_size_beats_the_same_number_of_bits_everywhere(uniform, baseline, tmp_path: Path):
    nbytes, divergence = uniform[2]
    request = TargetRequest(
        CHECKPOINT, tmp_path / "small", target_values.target_size(f"{nbytes}B", 0), "fisher"
    )
    made = deliver.compress_to_target(request, read_text("demo"), baseline, stage)
    assert made.holds
    assert 0.99 * nbytes < made.report.stored_weight_bytes <= nbytes
    assert made.comparison is not None
    assert made.comparison.kld.mean.value < 0.75 * divergence


WORKS = ("compress", "compare")


@pytest.mark.slow
def test_a_plan_by_divergence_is_smaller_than_the_same_number_of_bits_everywhere(
    uniform, baseline, tmp_path: Path
):
    nbytes, divergence = uniform[1]
    request = TargetRequest(CHECKPOINT, tmp_path / "close", target_values.max_kld(f"{divergence}"), "fisher")
    labels = []

    def told(label: str, total: int, unit: str) -> AbstractContextManager[object]:
        labels.append(label)
        return stage(label, total, unit)

    made = deliver.compress_to_target(request, read_text("demo"), baseline, told)
    assert made.holds and made.search is not None and made.comparison is not None
    works = [f"trial {n}: {work}" for n in range(1, 1 + len(made.search.trials)) for work in WORKS]
    assert labels == [
        "stage 1 of 4, sizes",
        "stage 2 of 4, gradients",
        *(f"stage 3 of 4, {work}" for work in works),
        "stage 4 of 4, compress",  # and not measured again: the last trial had the same files
    ]
    assert 0.8 * divergence < made.comparison.kld.mean.value <= divergence
    assert made.report.stored_weight_bytes < 0.98 * nbytes
    assert made.search.trials[-1].bytes == made.report.stored_weight_bytes
    assert made.search.trials[-1].comparison == made.comparison
    assert not list(tmp_path.glob("*trial*"))


def test_weights_alone_need_no_text(tmp_path: Path):
    request = TargetRequest(
        CHECKPOINT, tmp_path / "small", target_values.target_size("40%", 2_630_760), "weights"
    )
    made = deliver.compress_to_target(request, None, None, stage)
    assert made.holds and made.comparison is None
    assert 0.39 < made.report.ratio <= 0.4


def test_a_size_that_cannot_be_reached_is_told(tmp_path: Path):
    request = TargetRequest(
        CHECKPOINT, tmp_path / "small", target_values.target_size("20%", 2_630_760), "weights"
    )
    with pytest.raises(
        NeuzipError, match=r"`target_size='20%'`: the weight files take about 0\.66 MB \(24\.9 %\)"
    ):
        plan_search.find_plan(request, None, stage)


def test_samples_predict_what_sizes_there_can_be(tmp_path: Path):
    within = reach.predict_reach(CHECKPOINT, EVERYTHING, None, None)
    lossless = compress(CHECKPOINT, tmp_path / "lossless", EVERYTHING)
    rounded = compress(CHECKPOINT, tmp_path / "k0", [Rule("*", Scheme("truncated", 0), 2), *EVERYTHING])
    assert within.original == lossless.weight_bytes
    assert within.lossless == pytest.approx(lossless.stored_weight_bytes, rel=reach.UNCERTAIN / 2)
    assert within.least == pytest.approx(rounded.stored_weight_bytes, rel=reach.UNCERTAIN / 2)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("size", "scheme", "code", "words"),
    [
        ("20%", "rounded", 1, "take about 0.66 MB (24.9 %) at least"),
        ("100B", "quantized", 1, "take about 0.05 MB (1.7 %) at least"),
        ("6GiB", "quantized", 0, "lossless compression fits"),
    ],
)
def test_sizes_out_of_question_load_no_model(
    neuzip: Speak,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    scheme: str,
    code: int,
    words: str,
    dry_run: bool,
):
    monkeypatch.setattr("neuzip.eval.measures.comparison.BaselineComparison", None)
    monkeypatch.setattr(plan_search, "predict_candidates", None)
    options = ("--target-size", size, "--scheme", scheme, *["--dry-run"] * dry_run)
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *options)
    assert said.exit_code == code, said.stderr
    assert words in said.stderr
    assert "sensitivity" not in said.stderr and "tries plans" not in said.stderr
    if code == 0 and not dry_run:
        assert "plan.toml: 43 tensors lossless" in said.stdout
        assert neuzip("verify", tmp_path / "a", "--original", CHECKPOINT).exit_code == 0


def test_what_is_larger_than_predicted_is_allocated_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def heavier(*arguments: Any, **options: Any) -> CompressionReport:
        report = compress(*arguments, **options)
        return replace(report, stored_weight_bytes=report.stored_weight_bytes + 20_000)

    monkeypatch.setattr(plan_trials, "compress", heavier)
    request = TargetRequest(
        CHECKPOINT, tmp_path / "small", target_values.target_size("40%", 2_630_760), "weights"
    )
    found = plan_search.find_plan(request, None, stage)
    assert 0.98 * request.target.limit < found.trials[-1].bytes <= request.target.limit


def test_what_is_delivered_beyond_the_target_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    request = TargetRequest(
        CHECKPOINT, tmp_path / "small", target_values.target_size("40%", 2_630_760), "weights"
    )
    found = replace(plan_search.find_plan(request, None, stage, trials=False), rules=EVERYTHING)
    monkeypatch.setattr(deliver, "find_plan", lambda *_, **__: found)
    assert not deliver.compress_to_target(request, None, None, stage).holds


@pytest.mark.slow
def test_an_increase_is_delivered_with_its_standard_error(baseline, tmp_path: Path):
    request = TargetRequest(CHECKPOINT, tmp_path / "close", target_values.max_ppl_increase("1%"), "fisher")
    made = deliver.compress_to_target(request, read_text("demo"), baseline, stage)
    assert made.holds and made.comparison is not None
    difference = made.comparison.nll_difference
    assert difference.standard_error is not None
    assert difference.value + difference.standard_error <= request.target.limit


@pytest.mark.slow
def test_a_plan_that_breaks_the_model_does_not_hold(baseline, tmp_path: Path, monkeypatch):
    run, failed = baseline.run, []

    def breaks_at_first(*arguments: Any) -> ComparisonRun:
        if not failed:
            failed.append(arguments)
            raise NotFinite("the loss of 1 of 2 tokens is nan")
        return run(*arguments)

    monkeypatch.setattr(baseline, "run", breaks_at_first)
    request = TargetRequest(CHECKPOINT, tmp_path / "close", target_values.max_kld("0.02"), "fisher")
    found = plan_search.find_plan(request, baseline, stage)
    first, *_, last = found.trials
    assert first.comparison is None and last.comparison is not None
    assert 0 < last.comparison.kld.mean.value <= 0.02


def test_a_search_depends_on_its_text(baseline, tmp_path: Path):
    request = TargetRequest(CHECKPOINT, tmp_path / "close", target_values.max_kld("0.02"), "fisher")
    texts = [None, *(Text("text", (Document("", content),)) for content in ("one", "two"))]
    assert len({key_of(request, text, baseline) for text in texts}) == 3


def test_an_interrupted_run_takes_its_plan_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    request = TargetRequest(
        CHECKPOINT, tmp_path / "small", target_values.target_size("40%", 2_630_760), "weights"
    )
    first = deliver.compress_to_target(request, None, None, stage)
    shutil.rmtree(tmp_path / "small")
    monkeypatch.setattr(deliver, "find_plan", None)
    again = deliver.compress_to_target(request, None, None, stage)
    assert again.search is None
    assert again.report.tensors == first.report.tensors
    other = TargetRequest(
        CHECKPOINT, tmp_path / "small", target_values.target_size("45%", 2_630_760), "weights"
    )
    with pytest.raises(WouldOverwrite):
        deliver.compress_to_target(other, None, None, stage)


@pytest.mark.gpu
def test_on_a_gpu_each_tensor_is_measured(uniform, tmp_path: Path):
    text = read_text("demo")
    baseline = BaselineComparison(CHECKPOINT, text, max_tokens=4096, device="cuda")
    for k in (1, 2):
        folder = tmp_path / f"uniform-{k}"
        compress(CHECKPOINT, folder, [Rule("*", Scheme("truncated", k), 2), *EVERYTHING])
        divergence = baseline.run(folder).comparison.kld.mean.value
        target = target_values.target_size(f"{uniform[k][0]}B", 0)
        made = deliver.compress_to_target(
            TargetRequest(CHECKPOINT, tmp_path / f"measured-{k}", target, "measured"), text, baseline, stage
        )
        assert made.holds and made.comparison is not None
        assert made.comparison.kld.mean.value < 0.8 * divergence


@pytest.mark.gpu
def test_command_measures_on_a_gpu_if_there_is_one(neuzip: Speak, tmp_path: Path):
    options = ("--max-kld", "0.02", "--scheme", "rounded", "--json")
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *options)
    assert said.exit_code == 0, said.stderr
    target = said.json["target"]
    assert target["sensitivity"] == "measured" and target["met"] is True
    assert 0 < target["delivered"]["kld"]["mean"]["value"] <= 0.02


# The command


@pytest.mark.slow
def test_command_says_what_was_asked_for_and_what_was_delivered(neuzip: Speak, tmp_path: Path):
    said = neuzip(
        "compress",
        CHECKPOINT,
        tmp_path / "a",
        "--target-size",
        "38%",
        "--scheme",
        "rounded",
        "--sensitivity",
        "weights",
        "--json",
    )
    assert said.exit_code == 0, said.stderr
    target = said.json["target"]
    assert (target["option"], target["asked"], target["sensitivity"]) == ("--target-size", "38%", "weights")
    assert target["met"] is True and target["delivered"] is None
    assert said.json["ratio"] <= 0.38
    assert sum(target["schemes"].values()) == 43
    plan = Path(target["plan"])
    assert plan == tmp_path / "a.plan.toml"
    repeated = neuzip("compress", CHECKPOINT, tmp_path / "b", "--plan", plan, "--json")
    assert repeated.json["stored_weight_bytes"] == said.json["stored_weight_bytes"]
    assert neuzip("verify", tmp_path / "a").exit_code == 0


@pytest.mark.slow
def test_a_plan_that_was_edited_and_misses_its_target_is_told(
    neuzip: Speak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = (
        "compress",
        CHECKPOINT,
        tmp_path / "a",
        "--target-size",
        "40%",
        "--scheme",
        "rounded",
        "--sensitivity",
        "weights",
    )
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli/__main__.py", *map(str, arguments)])
    assert neuzip(*arguments).exit_code == 0
    plan = tmp_path / "a.plan.toml"
    command, search_key, *_ = plan.read_text().splitlines()
    assert command.startswith("# neuzip compress ") and "__main__" not in command
    plan.write_text(f'{command}\n{search_key}\n[[rule]]\nmatch = "*"\n')
    shutil.rmtree(tmp_path / "a")
    said = neuzip(*arguments)
    assert said.exit_code == 1
    assert "warning: --target-size 40%: the result misses it" in said.stderr
    assert "a.plan.toml is from an earlier run and may have been edited" in said.stderr
    assert neuzip(*arguments, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("broken_off", "options", "is_kept"),
    [
        ("find_plan", [], False),
        ("find_plan", ["--dry-run"], False),
        ("compressed", [], True),
        ("compressed", ["--overwrite"], False),
    ],
)
def test_an_interrupted_search_says_what_is_kept(
    neuzip: Speak,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken_off: str,
    options: list[str],
    is_kept: bool,
):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for module in (deliver, plan_search):
        monkeypatch.setattr(module, broken_off, interrupted, raising=False)
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *FROM_WEIGHTS, *options)
    assert said.exit_code == 130
    assert "error: interrupted\n" in said.stderr
    assert ("repeat the command to resume" in said.stderr) is is_kept
    assert (tmp_path / "a.plan.toml").exists() is (broken_off == "compressed")


@pytest.mark.parametrize(("broken_off", "is_kept"), [("find_plan", False), ("compressed", True)])
def test_a_full_disk_in_a_search_says_what_is_kept(
    neuzip: Speak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_off: str, is_kept: bool
):
    def full(*_: Any, **__: Any) -> None:
        raise DiskFull(tmp_path / "a")

    for module in (deliver, plan_search):
        monkeypatch.setattr(module, broken_off, full, raising=False)
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *FROM_WEIGHTS)
    assert said.exit_code == 1
    assert said.stderr.count("hint: free some space") == 1
    assert ("repeat the command to resume" in said.stderr) is is_kept


@pytest.mark.slow
def test_a_text_too_short_for_the_target_is_told(neuzip: Speak, tiny: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(read_text("demo").content[:6000])
    said = neuzip("compress", tiny, tmp_path / "a", "--max-ppl-increase", "0.05%", "--text", text)
    assert said.exit_code == 0, said.stderr
    assert "warning: --max-ppl-increase 0.05%: the standard error is up to " in said.stderr
    assert "hint: give a longer --text, of" in said.stderr


@pytest.mark.slow
def test_command_measures_the_result_on_the_text(neuzip: Speak, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(read_text("demo").content[:6000])
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", "--max-ppl-increase", "2%", "--text", text)
    assert said.exit_code == 0, said.stderr
    lines = {line.split("  ")[0]: line for line in said.stdout.splitlines()}
    assert " 2% " in lines["perplexity"]
    delivered = float(lines["perplexity"].split()[2])
    assert 0 < delivered <= 2
    assert f" tokens of {text}, in " in said.stdout and "a.plan.toml: " in said.stdout
    assert f" tokens of the rest of {text}\n" in said.stderr
    assert "the first half measures, the second half calibrates; --calibration takes" in said.stderr


def test_dry_run_writes_nothing(neuzip: Speak, tmp_path: Path):
    options = (
        "--target-size",
        "50%",
        "--scheme",
        "rounded",
        "--sensitivity",
        "weights",
        "--dry-run",
        "--json",
    )
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *options)
    assert said.exit_code == 0
    schemes = {t["scheme"] for t in said.json["tensors"]}
    assert any(scheme.startswith("k=") for scheme in schemes)
    assert said.json["ratio"] == pytest.approx(0.5, abs=0.02)
    assert said.json["target"]["asked"] == "50%" and said.json["target"]["met"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--max-kld", "0.1", "--target-size", "50%"], "exclude each other"),
        (["--max-kld", "0.1", "--mantissa-bits", "3"], "--max-kld excludes"),
        (["--target-size", "50%", "--plan", "plan.toml"], "--target-size excludes"),
        (["--max-kld", "much"], "--max-kld much"),
        (["--target-size", "half"], "--target-size half"),
    ],
)
def test_wrong_use(neuzip: Speak, tmp_path: Path, options: list[str], wrong: str):
    (tmp_path / "plan.toml").write_text('[[rule]]\nmatch = "*"\n')
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *options)
    assert said.exit_code == 2
    assert wrong in said.stderr
    assert "hint: " in said.stderr
    assert not (tmp_path / "a").exists()


def test_what_exists_is_not_searched_for(neuzip: Speak, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").touch()
    for plan in (False, True):
        if plan:
            (tmp_path / "a.plan.toml").touch()
        said = neuzip("compress", CHECKPOINT, tmp_path / "a", "--max-kld", "0.1")
        assert said.exit_code == 1
        assert "exists already" in said.stderr
        assert "sensitivity" not in said.stderr, "the model is loaded for nothing"
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *FROM_WEIGHTS, "--dry-run")
    assert said.exit_code == 0, "a dry run writes nothing"


FROM_WEIGHTS = ("--target-size", "50%", "--scheme", "rounded", "--sensitivity", "weights")


@pytest.mark.slow
def test_the_time_is_that_of_planning_too(
    neuzip: Speak, in_all_modes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from neuzip.eval.plans import target_request as command

    ask, waited = command.prepare_search, 0.4

    def ask_for_a_while(*arguments: Any, **options: Any) -> Any:
        time.sleep(waited)
        return ask(*arguments, **options)

    monkeypatch.setattr(command, "prepare_search", ask_for_a_while)
    said = in_all_modes("compress", CHECKPOINT, tmp_path / "a", *FROM_WEIGHTS, "--overwrite")
    last = said["human"].stdout.splitlines()[-1]
    found = re.fullmatch(rf"{tmp_path / 'a'} in ([0-9.]+) s, planning and measuring included", last)
    assert found is not None and float(found[1]) >= waited, last
    assert said["json"].json["seconds"] >= waited
    said = neuzip("compress", CHECKPOINT, tmp_path / "b")
    assert re.search(r" in [0-9.]+ s \([0-9.]+ [kM]B/s\)$", said.stdout.strip()), "a speed where it means one"


def test_excluded_tensors_stay_as_they_are(neuzip: Speak, tmp_path: Path):
    options = (
        "--target-size",
        "50%",
        "--scheme",
        "rounded",
        "--sensitivity",
        "weights",
        "--exclude",
        "*embed*",
        "--json",
    )
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *options)
    schemes = {t["name"]: t["scheme"] for t in said.json["tensors"]}
    assert schemes["model.embed_tokens.weight"] == "raw"
    assert json.dumps(said.json["target"]["schemes"]).count("k=") >= 1
