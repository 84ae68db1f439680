"""Plans of quantised weights: texts that calibrate, steps for sizes and divergences, what is delivered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuzip.compress import verify
from neuzip.compress.rules import Rule, Scheme, choose
from neuzip.compress.rules_file import PlanFile, plan_bytes, read_plan, read_plan_file
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.layers.removal import remove_layers
from neuzip.eval.measures import conventions
from neuzip.eval.measures.comparison import BaselineComparison, read_tokens
from neuzip.eval.measures.texts import Document, Text, read_text
from neuzip.eval.plans import calibration_text, deliver, quantized_search, target_values
from neuzip.eval.plans.calibration_text import split_text
from neuzip.eval.plans.plan_request import TargetRequest
from neuzip.eval.plans.target_result import TargetResult
from neuzip.eval.quantize import checkpoint_parameters, quantizer

pytestmark = pytest.mark.usefixtures("one_thread")

Speak = Callable[..., Any]

CPU = torch.device("cpu")
TOKENS = 512


@contextmanager
def stage(label: str, total: int, unit: str) -> Iterator[Any]:
    yield lambda count: None


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of the demo checkpoint, and its tied head once more as a tensor of its own."""
    folder = tmp_path_factory.mktemp("small") / "small"
    remove_layers(CHECKPOINT, folder, [1, 2, 3, 4, 5])
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def baseline(small: Path) -> BaselineComparison:
    return BaselineComparison(small, read_text("demo"), max_tokens=TOKENS, device="cpu")


def bits(value: float, model: Path) -> target_values.CompressionTarget:
    weights = sum(t.numel() for t in load_file(model / "model.safetensors").values())
    return target_values.bits_per_weight(str(value), weights)


def delivered(
    request: TargetRequest, baseline: BaselineComparison | None, show: Any = stage, **options: Any
) -> TargetResult:
    return deliver.compress_to_target(
        replace(request, scheme="quantized"), read_text("demo"), baseline, show, **options
    )


# Bits


@pytest.mark.parametrize("text", ["0", "-1", "four", "", "nan", "inf"])
def test_what_is_no_number_of_bits_is_refused(text: str):
    with pytest.raises(UsageError, match=r"`bits='.*'`: is no number of bits"):
        target_values.bits_per_weight(text, 8)


def test_bits_are_those_of_whole_files():
    goal = target_values.one_goal(None, None, None, 4.25)
    assert goal is not None and goal.limits_size
    assert goal.target(1000, 80).limit == 42
    with pytest.raises(UsageError, match="`target_size` and `bits` exclude each other"):
        target_values.one_goal(None, None, "50%", 4.25)


# Texts


def long_text(tokens: int) -> Text:
    return Text("made up", (Document("made up", " ".join(f"word{n}" for n in range(tokens))),))


def test_a_text_is_divided_between_comparison_and_calibration():
    text = long_text(1000)
    parts = split_text(CHECKPOINT, text, "made-up.txt", "auto", CPU)
    assert parts.calibration is not None and "`calibration` takes another text" in parts.calibration.note
    compared = BaselineComparison(CHECKPOINT, text, max_tokens=parts.compared, device="cpu").ids
    together = torch.cat([compared, parts.calibration.ids])
    whole = BaselineComparison(CHECKPOINT, text, device="cpu").ids
    assert abs(len(compared) - len(parts.calibration.ids)) <= 2
    assert torch.equal(together, whole[: len(together)])


def test_a_text_that_is_divided_is_tokenised_once(monkeypatch: pytest.MonkeyPatch):
    text, encoded = long_text(1000), list[Text]()
    tokenise = conventions.Tokenised.__init__

    def counted(self: Any, text: Text, *options: Any) -> None:
        encoded.append(text)
        tokenise(self, text, *options)

    monkeypatch.setattr(conventions.Tokenised, "__init__", counted)
    parts = split_text(CHECKPOINT, text, "made-up.txt", "auto", CPU)
    assert encoded == [text] and parts.reading is not None
    read = read_tokens(CHECKPOINT, text, max_tokens=parts.compared)
    assert parts.reading.convention == read.convention and torch.equal(parts.reading.ids, read.ids)
    assert parts.reading.windows == read.windows
    for a, b in ((parts.reading.words, read.words), (parts.reading.bytes, read.bytes)):
        assert (a is None) == (b is None) and (a is None or (a == b).all())


def test_of_a_long_text_the_comparison_takes_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration_text, "COMPARED_ON_CPU", 600)
    monkeypatch.setitem(calibration_text.CALIBRATING, "cpu", 700)
    parts = split_text(CHECKPOINT, long_text(1000), "made-up.txt", "auto", CPU)
    assert parts.compared == 600 and parts.calibration is not None
    assert len(parts.calibration.ids) == 701 and not parts.calibration.note


def test_the_demo_is_calibrated_on_its_other_topics():
    parts = split_text(CHECKPOINT, read_text("demo"), "demo", "auto", CPU)
    assert parts.calibration is not None and parts.calibration.name.startswith("the other topics of demo")
    assert split_text(CHECKPOINT, read_text("demo"), "demo", "none", CPU).calibration is None


def test_texts_that_cannot_calibrate_are_refused(tmp_path: Path):
    for name, content in (("short.txt", "too short"), ("same.txt", long_text(500).content)):
        (tmp_path / name).write_text(content)
    with pytest.raises(NeuzipError, match=r"made up: has \d+ tokens, too few to calibrate on one half"):
        split_text(CHECKPOINT, long_text(20), "made-up.txt", "auto", CPU)
    with pytest.raises(NeuzipError, match=r"short.txt: has \d+ tokens, too few to calibrate") as refused:
        split_text(CHECKPOINT, long_text(500), "made-up.txt", str(tmp_path / "short.txt"), CPU)
    assert "`calibration`" in refused.value.hint
    with pytest.raises(UsageError, match="is the text on which the result is measured, made up"):
        split_text(CHECKPOINT, long_text(500), "made-up.txt", str(tmp_path / "same.txt"), CPU)


# Plans


def test_a_plan_file_holds_the_mean_step(tmp_path: Path):
    rule = Rule("a", Scheme("quantized", step=0.1, row_factors=True), 2)
    plan = PlanFile((rule,), mean_step=0.1 + 2**-40)
    path = tmp_path / "plan.toml"
    path.write_bytes(plan_bytes(plan, ["codes: error feedback"]))
    assert read_plan(path) == plan and read_plan_file(path) == [rule]
    path.write_text('mean_step = "x"\n[[rule]]\nmatch = "*"\n')
    with pytest.raises(NeuzipError, match="mean_step is no positive number"):
        read_plan(path)


@pytest.mark.parametrize("value", [2.7, 4.6])
def test_a_size_is_filled_and_not_exceeded(value: float, small: Path, tmp_path: Path):
    target = bits(value, small)
    made = delivered(TargetRequest(small, tmp_path / "a", target, "weights"), None)
    assert made.holds and made.comparison is None
    assert 0.99 * target.limit <= made.report.stored_weight_bytes <= target.limit
    assert made.search is not None and len(made.search.trials) <= 4
    assert made.search.bytes == made.report.stored_weight_bytes
    assert dict(made.search.schemes) == {"quantized": 9}, "the head, which is stored as the embedding, too"
    assert choose(made.search.rules, "lm_head.weight", 2) == choose(
        made.search.rules, "model.embed_tokens.weight", 2
    )


def test_a_prediction_that_is_off_is_corrected(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = quantized_search.Quantizer.expected_bytes
    halved = "expected_bytes", lambda self, step: right(self, step) // 2
    monkeypatch.setattr(quantized_search.Quantizer, *halved)
    target = bits(4.0, small)
    made = delivered(TargetRequest(small, tmp_path / "a", target, "weights"), None)
    assert made.search is not None and len(made.search.trials) > 1
    assert 0.99 * target.limit <= made.report.stored_weight_bytes <= target.limit


WORKS = ("quantise", "restore", "compare")


def test_a_divergence_is_reached_by_trials_without_a_file(
    small: Path, baseline: BaselineComparison, tmp_path: Path
):
    labels = []

    def told(label: str, total: int, unit: str) -> AbstractContextManager[object]:
        labels.append(label)
        return stage(label, total, unit)

    request = TargetRequest(small, tmp_path / "a", target_values.max_kld("0.02"), "weights")
    made = delivered(request, baseline, told)
    assert made.search is not None and made.comparison is not None and made.holds
    assert 0.95 * 0.02 <= made.comparison.kld.mean.value <= 0.02
    trials = len(made.search.trials)
    assert trials <= 5
    assert labels == [
        "stage 1 of 3, steps",
        *(f"stage 2 of 3, trial {n}: {work}" for n in range(1, trials + 1) for work in WORKS),
        "stage 3 of 3, compress",  # and not measured again: the weights are those of the last trial
    ]
    assert made.comparison == baseline.run(tmp_path / "a").comparison
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.plan.toml"]


def test_the_parameters_that_hold_the_matrices_are_found_once(
    small: Path, baseline: BaselineComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For calibration and for trials: it reads all matrices, and compares them with the model."""
    calls, right = [], checkpoint_parameters.find_parameters

    def counted(*arguments: Any) -> checkpoint_parameters.PartsByTensor:
        calls.append(right(*arguments))
        return calls[-1]

    for module in (quantized_search, quantizer):
        monkeypatch.setattr(module, "find_parameters", counted)
    text = split_text(small, read_text("demo"), "demo", "auto", CPU).calibration
    assert text is not None
    request = TargetRequest(
        small, tmp_path / "a", target_values.max_kld("0.02"), "fisher",
        calibration=replace(text, ids=text.ids[: TOKENS + 1]),
    )  # fmt: skip
    before = {name: value.clone() for name, value in baseline.model.named_parameters()}
    made = delivered(request, baseline)
    assert made.holds and made.search is not None and len(made.search.trials) > 0
    assert [len(places) for places in calls] == [8]
    assert all(torch.equal(value, before[name]) for name, value in baseline.model.named_parameters())


def test_a_divergence_holds_on_another_text_of_its_kind(small: Path, tmp_path: Path):
    """Two halves of the demo's text: with a margin on one, and within the limit on the other."""
    whole, limit = read_text("demo"), 0.02
    halves = [replace(whole, documents=whole.documents[start::2]) for start in (0, 1)]
    measured, other = (BaselineComparison(small, half, max_tokens=2048, device="cpu") for half in halves)
    request = TargetRequest(small, tmp_path / "a", target_values.max_kld(str(limit)), "weights")
    made = deliver.compress_to_target(replace(request, scheme="quantized"), halves[0], measured, stage)
    assert made.comparison is not None and made.holds
    kld = made.comparison.kld.mean
    assert kld.standard_error is not None
    assert 0.95 * limit <= kld.value + 2 * kld.standard_error <= limit
    unseen = other.run(tmp_path / "a").comparison.kld.mean
    assert unseen.standard_error is not None
    assert unseen.value <= limit + 2 * unseen.standard_error  # not shown to be above it


def test_a_divergence_of_0_is_lossless(small: Path, baseline: BaselineComparison, tmp_path: Path):
    request = TargetRequest(small, tmp_path / "a", target_values.max_kld("0"), "weights")
    made = delivered(request, baseline)
    assert made.holds and made.search is not None and made.search.mean_step is None
    assert dict(made.search.schemes) == {"lossless": 9}
    assert not verify(tmp_path / "a", small).different


def test_an_interrupted_run_takes_its_step_again(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    request = TargetRequest(small, tmp_path / "a", bits(4.0, small), "weights")
    first = delivered(request, None)
    shutil.rmtree(tmp_path / "a")
    monkeypatch.setattr(quantized_search.QuantizedPlanner, "best", None)
    again = delivered(request, None)
    assert again.search is None and again.holds
    assert again.report.tensors == first.report.tensors


@pytest.mark.gpu
def test_on_a_gpu_a_calibrated_plan_is_smaller_than_one_rounded_to_nearest(neuzip: Speak, tmp_path: Path):
    sizes = {}
    for calibration in ("auto", "none"):
        options = ("--max-kld", "0.02", "--calibration", calibration, "--device", "cuda", "--json")
        said = neuzip("compress", CHECKPOINT, tmp_path / calibration, *options)
        assert said.exit_code == 0, said.stderr
        assert 0.9 * 0.02 <= said.json["target"]["delivered"]["kld"]["mean"]["value"] <= 0.02
        assert len(said.json["target"]["trials"]) <= 5
        sizes[calibration] = said.json["stored_weight_bytes"]
    assert sizes["auto"] < 0.97 * sizes["none"]


# The command


def test_tensors_that_the_text_does_not_reach_are_counted(neuzip: Speak, small: Path, tmp_path: Path):
    shutil.copytree(small, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.input_layernorm.weight"].zero_()  # queries, keys, values and outputs see zeros
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text(long_text(400).content)
    options = ("--bits", "4.5", "--text", tmp_path / "text.txt")
    said = neuzip("compress", tmp_path / "model", tmp_path / "a", *options)
    assert said.exit_code == 0, said.stderr
    assert "4 tensors rounded to nearest: the calibration text says nothing of their inputs" in said.stderr
    target = neuzip("compress", tmp_path / "model", tmp_path / "b", *options, "--json").json["target"]
    assert target["nearest_tensors"] == 4


def test_command_says_what_was_asked_for_and_what_was_delivered(neuzip: Speak, small: Path, tmp_path: Path):
    options = ("--bits", "4.5", "--calibration", "none")
    said = neuzip("compress", small, tmp_path / "a", *options)
    assert said.exit_code == 0, said.stderr
    row = next(line for line in said.stdout.splitlines() if line.startswith("bits per weight"))
    asked, result = map(float, row.split()[3:])
    assert asked == 4.5 and 4.455 <= result <= 4.5
    assert "calibration: none (every weight is rounded to the nearest code)" in said.stderr
    told = neuzip("compress", small, tmp_path / "b", *options, "--json").json
    target = told["target"]
    assert (target["option"], target["asked"], target["scheme"]) == ("--bits", "4.5", "quantized")
    assert target["calibration"] is None and target["delivered"] is None and target["met"] is True
    assert target["trials"][-1]["mean_step"] == target["mean_step"] > 0
    assert target["trials"][-1]["bytes"] == told["stored_weight_bytes"]
    repeated = neuzip("compress", small, tmp_path / "c", "--plan", target["plan"], "--json").json
    assert repeated["stored_weight_bytes"] == told["stored_weight_bytes"]
    by_target, by_plan = (tmp_path / name / "model.safetensors" for name in "bc")
    assert by_plan.read_bytes() == by_target.read_bytes()


def test_dry_run_writes_nothing(neuzip: Speak, small: Path, tmp_path: Path):
    options = ("--calibration", "none", "--dry-run")
    said = neuzip("compress", small, tmp_path / "a", "--bits", "4.5", *options, "--json")
    assert said.exit_code == 0, said.stderr
    assert said.json["target"]["mean_step"] > 0 and said.json["target"]["met"] is None
    said = neuzip("compress", small, tmp_path / "a", "--max-kld", "0.1", *options)
    assert said.exit_code == 1
    assert "--max-kld 0.1: without calibration nothing predicts it but trials" in said.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bits", "4", "--max-kld", "1"], "--max-kld and --bits exclude each other"),
        (["--bits", "none"], "--bits none: is no number of bits"),
        (["--bits", "4", "--sensitivity", "fisher"], "--sensitivity has no effect without --scheme rounded"),
        (["--bits", "4", "--expert-use", "none"], "--expert-use has no effect without --scheme rounded"),
        (["--bits", "4", "--drop-layers", "1"], "--drop-layers has no effect without --scheme rounded"),
        (["--bits", "4", "--block-size", "64"], "--block-size has no effect without --mantissa-bits"),
        (["--bits", "4", "-k", "3"], "--bits excludes --mantissa-bits"),
        (
            ["--bits", "4", "--scheme", "rounded", "--calibration", "none"],
            "--scheme rounded excludes --calibration",
        ),
        (["--calibration", "none"], "--calibration has no effect without --bits"),
        (["--bits", "4", "--base", "b"], "--base and --bits exclude each other"),
    ],
)
def test_wrong_use(neuzip: Speak, tmp_path: Path, options: list[str], words: str):
    said = neuzip("compress", CHECKPOINT, tmp_path / "a", *options)
    assert (said.exit_code, words in said.stderr, "hint: " in said.stderr) == (2, True, True), said.stderr
    assert list(tmp_path.iterdir()) == []
