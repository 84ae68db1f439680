"""Bits of a KV cache that are chosen layer by layer: what was measured, what holds, and the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import neuzip as library
from neuzip.compress.progress import unseen
from neuzip.errors import NeuzipError, UsageError, WouldOverwrite
from neuzip.eval import kv_calibration
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.kv_calibration import KVCalibration, calibrate
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import Text, of_content, read_text
from neuzip.eval.plans.calibration_text import _other_topics
from neuzip.eval.plans.search import upper
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.kv_bits import WIDTHS, LayerBits, as_bits, plan_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT, WINDOW, TOKENS = 0.01, 128, 640


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(CHECKPOINT, torch.float32, attention=False)


@pytest.fixture(scope="module")
def text() -> Text:
    """Topics that `demo` leaves out."""
    return _other_topics()


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel, text: Text) -> KVCalibration:
    return calibrate(CHECKPOINT, model, text, LIMIT, unseen, window=WINDOW, max_tokens=TOKENS)


@pytest.mark.slow
def test_a_plan_has_the_figures_of_a_fresh_measurement(
    calibration: KVCalibration, model: PreTrainedModel, text: Text, tmp_path: Path
):
    calibration.save(tmp_path / "kv.json")
    bits = as_bits(tmp_path / "kv.json")
    baseline = BaselineComparison(CHECKPOINT, text, window=WINDOW, max_tokens=TOKENS, model=model)
    assert baseline.compare(HeadedModel(model, kv_bits=bits)) == calibration.comparison
    facts = json.loads((tmp_path / "kv.json").read_text())
    assert facts["kld"]["value"] == calibration.kld.value == calibration.trials[-1]
    with pytest.raises(WouldOverwrite, match=r"kv\.json"):
        calibration.save(tmp_path / "kv.json")


@pytest.mark.slow
def test_the_choice_is_within_the_limit_and_smaller_than_equal_bits(
    calibration: KVCalibration, model: PreTrainedModel, text: Text
):
    assert LIMIT / 2 < upper(calibration.kld) <= LIMIT
    baseline = BaselineComparison(CHECKPOINT, text, window=WINDOW, max_tokens=TOKENS, model=model)
    sizes = [equal_bits(calibration, width) for width in WIDTHS]
    within = [
        size
        for width, size in zip(WIDTHS, sizes, strict=True)
        if upper(baseline.compare(HeadedModel(model, kv_bits=width)).kld.mean) <= LIMIT
    ]
    assert calibration.stored_bits < min(within) - 0.2


def equal_bits(calibration: KVCalibration, width: int) -> float:
    """Stored bits of a number where all have one width."""
    place = WIDTHS.index(width)
    nbytes = sum(part.nbytes[place] for part in calibration.parts)
    return 8 * nbytes / sum(part.numbers for part in calibration.parts)


@pytest.mark.slow
def test_layers_get_different_bits_and_the_stored_bits_are_those_of_the_cache(
    calibration: KVCalibration, model: PreTrainedModel
):
    layers = calibration.bits.layers
    assert len(layers) == 6 and len(set(layers)) > 2
    assert any(layer is not None and layer.keys != layer.values for layer in layers)
    sizes = []
    for length in (256, 512):
        cache = library.KVCache(model.config, calibration.bits, max_length=length)
        model(input_ids=torch.arange(8)[None], past_key_values=cache)
        sizes.append(sum(layer.nbytes for layer in cache.layers))  # the path of centers is of all layers
    numbers = 6 * 2 * 2 * 32 * 256  # layers, keys and values, heads, width, tokens
    assert calibration.stored_bits == pytest.approx(8 * (sizes[1] - sizes[0]) / numbers)


@pytest.mark.slow
def test_the_limit_holds_on_another_text_within_its_error(calibration: KVCalibration, model: PreTrainedModel):
    baseline = BaselineComparison(CHECKPOINT, read_text("demo"), window=WINDOW, max_tokens=4096, model=model)
    kld = baseline.compare(HeadedModel(model, kv_bits=calibration.bits)).kld.mean
    assert kld.standard_error is not None and kld.value <= LIMIT + kld.standard_error


@pytest.mark.slow
def test_single_divergences_are_of_one_part_alone(
    calibration: KVCalibration, model: PreTrainedModel, text: Text
):
    """All else stays as it is, so single divergences add up to about that of the whole."""
    keys, values = calibration.parts[4], calibration.parts[5]
    assert (keys.layer, keys.name, values.layer, values.name) == (2, "keys", 2, "values")
    for part in calibration.parts:
        klds = [kld for kld in part.klds if kld is not None]
        assert len(klds) == len(WIDTHS) and klds == sorted(klds) and klds[0] > 0
    whole = BaselineComparison(CHECKPOINT, text, window=WINDOW, max_tokens=TOKENS, model=model).compare(
        HeadedModel(model, kv_bits=4)
    )
    place = WIDTHS.index(4)
    total = sum(part.klds[place] or 0.0 for part in calibration.parts)
    assert total == pytest.approx(whole.kld.mean.value, rel=0.2)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (
            {4: 1e-3, 2: 2.5e-2},
            {8: 1e-3 * (15 / 255) ** 2, 6: 1e-3 * (15 / 63) ** 2, 3: 1e-3 * (15 / 7) ** 2},
        ),
        ({4: 0.0, 2: 0.1}, {8: 0.0, 6: 0.0, 4: 0.0, 3: 0.0, 2: 0.1}),
        ({4: 1e-3}, {3: 1e-3 * (15 / 7) ** 2, 2: None}),
        ({2: 0.1}, {8: 0.0, 6: None, 4: None, 3: None, 2: 0.1}),
        ({}, {8: 0.0, 6: None, 4: None, 3: None, 2: None}),
    ],
)
def test_divergences_that_were_not_measured_follow_from_the_step(
    measured: dict[int, float], expected: dict[int, float | None]
):
    for bits, kld in expected.items():
        found = kv_calibration._kld_of(measured, bits)
        assert found == (None if kld is None else pytest.approx(kld, rel=1e-9))


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A text of about 250 tokens."""
    path = tmp_path / "short.txt"
    path.write_text(read_text("demo").content[:700])
    return path


def test_the_same_input_gives_the_same_plan(model: PreTrainedModel, short: Path):
    chosen = [
        library.choose_kv_bits(model, text=short, max_kld=0.03, window=64, max_tokens=192) for _ in range(2)
    ]
    assert chosen[0].bits == chosen[1].bits and chosen[0].trials == chosen[1].trials
    assert [part.klds for part in chosen[0].parts] == [part.klds for part in chosen[1].parts]


def test_a_limit_that_8_bits_do_not_reach_is_refused_before_layers_are_measured(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kv_calibration, "single_divergences", None)
    content = of_content("a text", read_text("demo").content[:2000])
    with pytest.raises(NeuzipError, match="1e-07 nats per token is out of reach: with 8 bits") as refusal:
        calibrate(CHECKPOINT, model, content, 1e-7, unseen, window=64, max_tokens=256)
    least = float(refusal.value.hint.split()[1])
    assert 1e-6 < least < 1e-3


def test_wrong_parameters_are_named(short: Path):
    for value in (0, -1, float("nan"), "0.01", True):
        with pytest.raises(UsageError, match="`max_kld="):
            library.choose_kv_bits(CHECKPOINT, text=short, max_kld=value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`text=5`"):
        library.choose_kv_bits(CHECKPOINT, text=5, max_kld=0.01)  # type: ignore[arg-type]


@pytest.mark.slow
def test_commands_choose_bits_and_use_the_plan(neuzip: Any, short: Path, tmp_path: Path):
    plan, held_out = tmp_path / "kv.json", tmp_path / "held-out.txt"
    held_out.write_text(read_text("demo").content[4000:6000])
    auto = ["--kv-bits", "auto:0.05", "--kv-text", short, "--kv-plan", plan]
    measured = ["--text", held_out, "--original", CHECKPOINT, "--conventions", "token"]
    said = neuzip("eval", CHECKPOINT, *measured, *auto, "--json")
    assert said.exit_code == 0, said.stderr
    document = json.loads(said.stdout)
    chosen = document["kv_calibration"]
    assert chosen["plan"] == str(plan) and chosen["kld"]["value"] <= chosen["max_kld"] == 0.05
    layers = document["after"]["kv_layers"]
    assert layers == json.loads(plan.read_text())["layers"] and document["after"]["kv_bits"] is None
    assert document["before"]["kv_layers"] is None
    again = json.loads(neuzip("eval", CHECKPOINT, *measured, "--kv-bits", plan, "--json").stdout)
    assert again["comparison"] == document["comparison"] and again["kv_calibration"] is None
    text = json.loads(
        neuzip("generate", CHECKPOINT, "import", "--max-new-tokens", 2, "--kv-bits", plan, "--json").stdout
    )
    assert text["kv_layers"] == layers and text["kv_bytes"] > 0
    few = ["--batch", 1, "--prompt-tokens", 8, "--new-tokens", 2, "--rounds", 1]
    rows = json.loads(neuzip("bench", CHECKPOINT, *few, "--kv-bits", plan, "--json").stdout)["rows"]
    assert [row["kv_layers"] for row in rows] == [None, layers]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_generate_and_bench_choose_bits_by_themselves(verb: str, neuzip: Any, short: Path, tiny: Path):
    few = {
        "generate": ["import", "--max-new-tokens", 2],
        "bench": ["--batch", 1, "--prompt-tokens", 8, "--new-tokens", 2, "--rounds", 1],
    }[verb]
    said = neuzip(verb, tiny, *few, "--kv-bits", "auto:0.05", "--kv-text", short)
    assert said.exit_code == 0, said.stderr
    assert "KV cache: " in said.stderr and "limit 0.05" in said.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-bits", "auto:", "--kv-text", "TEXT"], "--kv-bits auto:: auto needs a KL divergence above 0"),
        (["--kv-bits", "auto:0.01"], "--kv-bits auto:0.01: needs a calibration text"),
        (["--kv-bits", "4", "--kv-text", "TEXT"], "--kv-text TEXT has no effect without --kv-bits auto:KLD"),
        (["--kv-bits", "4", "--kv-plan", "p"], "--kv-plan p has no effect without --kv-bits auto:KLD"),
        (["--kv-bits", "9"], "--kv-bits 9: keys and values have 1 to 8 bits, not 9"),
        (["--kv-bits", "auto:0.01", "--kv-text", "nowhere.txt"], "nowhere.txt"),
        (["--kv-bits", "auto:1", "--kv-text", "TEXT", "--kv-plan", "TEXT"], "exists already"),
        (["--kv-bits", "PLAN"], "--kv-bits: PLAN was made for the form a4.8 of a KV cache, not for rotated"),
        (["--kv-bits", "PLAN"], "give --kv-form a4.8"),
    ],
)
@pytest.mark.parametrize("verb", ["eval", "generate", "bench"])
def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(
    verb: str, options: list[str], words: str, neuzip: Any, short: Path, tmp_path: Path
):
    rest = {"eval": ["--text", "demo"], "generate": ["import"], "bench": []}[verb]
    plan = tmp_path / "kv.json"
    plan.write_bytes(plan_bytes((LayerBits(4, 4),), {"form": "a4.8"}))
    files = {"TEXT": str(short), "PLAN": str(plan)}
    said = neuzip(verb, "nothing-here", *rest, *(files.get(word, word) for word in options))
    for word, file in files.items():
        words = words.replace(word, file)
    assert said.exit_code in (1, 2) and words in said.stderr


def test_eval_refuses_to_measure_on_the_calibration_text(neuzip: Any, short: Path):
    said = neuzip("eval", CHECKPOINT, "--text", short, "--kv-bits", "auto:1", "--kv-text", short)
    assert said.exit_code == 2 and "is the text on which the result is measured" in said.stderr
