"""Speed and memory: what is measured, how it is compared, what `neuzip bench` and the benchmark say of it."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from models import needs_version_5
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.activations import Activations
from neuzip.runtime.decode import benchmark as speed
from neuzip.runtime.decode.benchmark import (
    BenchmarkPlan,
    Speed,
    Speeds,
    make_plan,
    measure,
    peak_bytes,
    prompts,
    reset_peak,
    run,
)
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(small: Path) -> PreTrainedModel:
    return load_model(small)


def test_a_run_times_the_prompt_and_every_step(model: PreTrainedModel, device: torch.device):
    model = model.to(device)
    decoder, ids = GreedyDecoder(model, 2, 30), prompts(1024, 2, 20)
    began = time.perf_counter()
    timed = run(decoder, ids, 10)
    elapsed = time.perf_counter() - began
    assert torch.equal(timed.tokens, decoder.generate(ids, 10).cpu())
    assert len(timed.step_seconds) == 9
    assert min(timed.prefill_seconds, *timed.step_seconds) > 0
    assert timed.prefill_seconds + sum(timed.step_seconds) <= elapsed
    assert run(decoder, ids, 1).step_seconds == ()


def test_texts_go_on_with_a_continuation(model: PreTrainedModel):
    """What is chosen after each of its tokens is what the model chooses after the whole text so far."""
    ids, continuation = prompts(1024, 2, 24).split([20, 4], dim=1)
    chosen = run(GreedyDecoder(model, 2, 24), ids, 4, continuation).tokens
    with torch.no_grad():
        logits = model(torch.cat([ids, continuation[:, :-1]], dim=1)).logits[:, 19:]
    assert torch.equal(chosen, logits.argmax(dim=-1))
    assert not torch.equal(chosen, continuation)


def test_prompts_are_the_same_each_time_and_no_two_alike():
    assert torch.equal(prompts(1024, 8, 16), prompts(1024, 8, 16))
    assert len({tuple(row) for row in prompts(1024, 8, 16).tolist()}) == 8


# The plan


def test_plan_puts_dense_first_and_names_nothing_twice(small: Path):
    plan = make_plan(small, ["packed", "dense", "packed"], batches=[8, 1, 8], device=CPU)
    assert plan.residencies == ("dense", "packed")
    assert plan.batches == (8, 1)
    assert (plan.prompt_tokens, plan.new_tokens) == (128, 128)  # of 256 positions
    assert plan.runs == 2 * 2 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": 256}, "`new_tokens=256`: the model was made for 256 tokens"),
        (
            {"new_tokens": 100, "prompt_tokens": 157},
            "`new_tokens=100` behind `prompt_tokens=157`: the model was made for 256 tokens",
        ),
        ({"new_tokens": 1}, "`new_tokens`: at least 2 are needed"),
    ],
    ids=["new tokens", "both", "one"],
)
def test_plan_refuses_more_than_the_model_can(options: dict[str, int], message: str, small: Path):
    with pytest.raises(UsageError, match=message):
        make_plan(small, [], device=CPU, **options)


@needs_version_5
def test_experts_are_refused_before_anything_is_measured(small: Path, model: PreTrainedModel):
    """Coded ones of odd sizes are computed one by one, which no graph holds; a graph holds all others."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=8, num_hidden_layers=1, hidden_size=36, intermediate_size=33, **sizes)
    experts, cuda = MixtralForCausalLM(config).bfloat16(), torch.device("cuda")
    plan = replace(make_plan(small, ["packed"], device=CPU), device=cuda, residencies=("dense", "ans"))
    with pytest.raises(NeuzipError, match="MixtralForCausalLM: its steps cannot be captured") as refusal:
        speed._require_graphs(plan, experts)
    assert refusal.value.hint == "decode without one (`graph=False`)"
    speed._require_graphs(plan, model)
    for other in ({"graph": False}, {"device": CPU}, {"residencies": ("dense", "packed")}):
        speed._require_graphs(replace(plan, **other), experts)


# Measuring


@pytest.mark.slow
def test_measuring_the_dense_model(small: Path):
    told: list[int] = []
    plan = make_plan(small, [], batches=[1, 3], prompt_tokens=12, new_tokens=5, rounds=2, device=CPU)
    speeds = measure(plan, on_run=told.append)
    assert sum(told) == plan.runs == 4
    assert [(row.residency, row.batch) for row in speeds.rows] == [("dense", 1), ("dense", 3)]
    assert (speeds.dtype, speeds.device) == ("bfloat16", "cpu")
    for row in speeds.rows:
        assert (row.prefill_ratio, row.decode_ratio, row.peak_ratio) == (1, 1, 1)
        assert (row.tokens, row.differing_tokens, row.same_tokens) == (5 * row.batch, 0, None)
        assert not row.graphed
        assert min(row.load_seconds, row.prefill_tokens_per_second, row.decode_tokens_per_second) > 0


def test_rows_are_compared_with_the_dense_one_of_their_batch():
    base = Speed("dense", 2, True, 1.0, 900, 100.0, 40.0, 1000, 6)
    row = Speed("packed", 2, True, 1.0, 600, 90.0, 50.0, 700, 6)
    expected = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = torch.tensor([[1, 2, 3], [4, 9, 9]])
    compared = speed._compared(row, found, base, expected)
    assert (compared.prefill_ratio, compared.decode_ratio, compared.peak_ratio) == (0.9, 1.25, 0.7)
    assert (compared.differing_tokens, compared.same_tokens) == (2, 1)
    unknown = speed._compared(replace(row, peak_bytes=None), expected, base, expected)
    assert (unknown.peak_ratio, unknown.differing_tokens, unknown.same_tokens) == (None, 0, None)


def test_a_batch_too_large_for_the_card_is_named(small: Path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "run", full)
    plan = make_plan(small, [], batches=[64], prompt_tokens=4, new_tokens=2, device=CPU)
    with pytest.raises(NeuzipError, match="dense: the memory of the GPU does not suffice for `batch=64`"):
        measure(plan)


def test_peak_memory_is_that_since_the_reset(device: torch.device):
    def peak_of(nbytes: int) -> int:
        reset_peak(device)
        data = torch.ones(nbytes, dtype=torch.uint8, device=device)
        del data
        peak = peak_bytes(device)
        assert peak is not None
        return peak

    large, little = peak_of(300_000_000), peak_of(1_000_000)
    assert 250_000_000 < large - little < 350_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["packed", "ans"])
def test_residencies_on_a_gpu(residency: str, small: Path, device: torch.device):
    plan = make_plan(small, [residency], batches=[1, 4], prompt_tokens=80, new_tokens=20, device=device)
    speeds = measure(plan)
    assert [row.residency for row in speeds.rows] == ["dense", "dense", residency, residency]
    assert all(row.graphed for row in speeds.rows)
    if residency == "ans":  # sums of packed are in another order, which may decide ties otherwise
        assert [row.differing_tokens for row in speeds.rows] == [0, 0, 0, 0]


@pytest.mark.gpu
def test_a_model_leaves_no_memory_behind(small: Path, device: torch.device):
    plan = make_plan(small, ["packed", "ans"], batches=[1, 4], prompt_tokens=80, new_tokens=20, device=device)
    measure(plan)
    before = torch.cuda.memory_allocated()
    measure(plan)
    assert torch.cuda.memory_allocated() <= before


# The command


SHORT = ("--prompt-tokens", 8, "--new-tokens", 4, "--rounds", 1, "--device", "cpu")


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured for a plan is measured by the first command and shown by all."""
    original, kept = speed.measure, {}

    def measured(plan: BenchmarkPlan, **options: Any) -> Speeds:
        if plan not in kept:
            kept[plan] = original(plan, **options)
        return kept[plan]

    monkeypatch.setattr(speed, "measure", measured)


@needs_version_5
@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_command_in_all_modes(small: Path, in_all_modes):
    said = in_all_modes("bench", small, "--residency", "packed", "--batch", "1,2", *SHORT)
    human = said["human"].stdout
    assert f"path         {small}\n" in human
    assert "model        bfloat16 on cpu; python " in human
    assert "run          8 prompt tokens, 4 new tokens, greedy\n" in human
    assert re.search(
        r"^weights      dense 2\.62 MB, packed [12]\.\d\d MB \(0\.[789]\d\)$", human, re.MULTILINE
    )
    table = human.splitlines()[6:]
    assert table[0].split("  ")[0] == "residency"
    assert [line.split()[:2] for line in table[2:]] == [
        ["dense", "1"], ["dense", "2"], ["packed", "1"], ["packed", "2"],
    ]  # fmt: skip
    assert max(map(len, table)) <= 80
    answer = said["json"].json
    rows = answer["rows"]
    assert [(row["residency"], row["batch"]) for row in rows] == [
        ("dense", 1), ("dense", 2), ("packed", 1), ("packed", 2),
    ]  # fmt: skip
    assert (answer["prompt_tokens"], answer["new_tokens"], answer["rounds"]) == (8, 4, 1)
    assert (answer["compiled"], {row["compiled"] for row in rows}) == (False, {False})
    assert [row["differing_tokens"] for row in rows] == [0, 0, 0, 0]
    assert all(row["decode_ratio"] > 0 for row in rows)
    assert rows[0]["weight_bytes"] == 2_624_768 > 1.02 * rows[2]["weight_bytes"]
    assert {"python", "torch", "transformers"} == set(answer["versions"])
    assert len([float(line) for line in said["quiet"].stdout.splitlines()]) == 4
    assert "nearly tied" not in human


@pytest.mark.slow
def test_how_far_runs_are_apart_is_told(small: Path, neuzip, monkeypatch: pytest.MonkeyPatch):
    seconds = itertools.cycle([1.0, 0.010, 0.012])  # the first run warms up
    original = speed.run

    def run(*given):
        made = original(*given)
        return replace(made, step_seconds=(next(seconds),) * len(made.step_seconds))

    monkeypatch.setattr(speed, "run", run)
    command = ("bench", small, "--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "4", "--rounds", "2")
    human = neuzip(*command).stdout
    assert (
        "medians      of 2 runs, decode times up to 18.2 % apart; in brackets the ratio to dense\n" in human
    )
    rows = neuzip(*command, "--json").json["rows"]
    assert [row["decode_spread"] for row in rows] == pytest.approx([2 / 11] * 2)


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_compiled_steps_are_told(tiny: Path, neuzip):
    said = neuzip("bench", tiny, "--compile", "--batch", "1", *SHORT)
    assert said.exit_code == 0, said.stderr
    assert "run          8 prompt tokens, 4 new tokens, greedy; steps compiled\n" in said.stdout
    answer = neuzip("bench", tiny, "--compile", "--batch", "1", *SHORT, "--json").json
    assert answer["compiled"] is True
    assert [row["compiled"] for row in answer["rows"]] == [True]
    assert answer["rows"][0]["decode_ratio"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["packed", "ans"])
def test_compiled_residencies_on_a_gpu(residency: str, small: Path, device: torch.device):
    plan = make_plan(
        small, [residency], batches=[1, 4], prompt_tokens=80, new_tokens=20, device=device, compiled=True
    )
    measure(plan)
    before = torch.cuda.memory_allocated()
    rows = measure(plan).rows
    assert all(row.graphed and row.compiled for row in rows)
    assert torch.cuda.memory_allocated() <= before


def test_tokens_that_differ_are_explained(small: Path, neuzip, monkeypatch):
    def differing(plan: BenchmarkPlan, **_: Any) -> Speeds:
        dense = Speed("dense", 1, True, 1.0, 900, 100.0, 40.0, 1000, 4)
        return Speeds((dense, replace(dense, residency="packed", differing_tokens=1)), "bfloat16", "cpu", {})

    monkeypatch.setattr(speed, "measure", differing)
    lines = neuzip("bench", small, *SHORT).stdout.splitlines()
    assert lines[-4].split()[0] == "packed" and lines[-4].endswith("75.00 %")
    assert lines[-2].endswith("Where two tokens are nearly tied,")
    assert max(map(len, lines[-4:])) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1,x"], "--batch 1,x: not a list of numbers of at least 1"),
        (["--batch", "0"], "--batch 0: not a list of numbers of at least 1"),
        (["--residency", "packed,tiny"], "--residency packed,tiny: there is no 'tiny'"),
        (["--new-tokens", "300"], "--new-tokens 300: the model was made for 256 tokens"),
        (["--compile", "--kv-bits", "4"], "--compile: steps are not compiled with keys and values in few"),
    ],
    ids=["no number", "zero", "residency", "too long", "compile and few bits"],
)
def test_wrong_use(options: list[str], message: str, small: Path, neuzip):
    said = neuzip("bench", small, *options)
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith(f"error: {message}")


def test_ans_is_for_gpus(small: Path, neuzip):
    said = neuzip("bench", small, "--residency", "ans", "--batch", "1", *SHORT)
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith("error: --residency ans: is decoded on a GPU, not with --device cpu\n")


@pytest.mark.slow
def test_on_a_cpu_the_dense_model_is_measured_alone(small: Path, neuzip):
    said = neuzip("bench", small, "--batch", "1", *SHORT)
    assert said.exit_code == 0, said.stderr
    assert [line.split()[0] for line in said.stdout.splitlines()[8:]] == ["dense"]
    assert said.stderr.startswith("on a CPU bench measures dense only")


def test_tokens_of_quantised_inputs_are_no_fault(small: Path, neuzip, monkeypatch):
    def differing(plan: BenchmarkPlan, **_: Any) -> Speeds:
        dense = Speed("dense", 1, True, 1.0, 900, 100.0, 40.0, 1000, 4)
        packed = replace(dense, residency="packed", differing_tokens=1, activations=Activations("b1.58"))
        return Speeds((dense, packed), "bfloat16", "cpu", {})

    monkeypatch.setattr(speed, "measure", differing)
    said = neuzip("bench", small, *SHORT).stdout
    assert "\nQuantised activations change the numbers, so different tokens are expected.\n" in said
    assert "nearly tied" not in said


# The benchmark


@pytest.mark.weekly
@needs_version_5
def test_the_benchmark_runs_small_on_a_cpu(root: Path, tmp_path: Path, forks: forked.Server):
    results = root / "benchmarks" / "results" / "generate.json"
    before = results.read_bytes() if results.is_file() else None
    process = forks.start(
        root / "benchmarks" / "generate.py", "--layers", "1", "--hidden", "256", "--words", "1024",
        "--new-tokens", "3", "--prefill", "16", "--batches", "2", "--sections", "llama",
        "--forms", "bf16", "dense", "--folder", tmp_path,
        cwd=tmp_path, environment={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert "logits of the same bits" in stdout
    compiled = [line for line in stdout.splitlines() if line.startswith("decode, batch 1, compiled")]
    assert [line.split()[4] for line in compiled] == ["bf16", "dense"]
    assert "not saved: this was a small run" in stdout
    same = next(line for line in stdout.splitlines() if line.startswith("logits of the same bits"))
    assert same.endswith("met")
    assert (results.read_bytes() if results.is_file() else None) == before
    assert not list(tmp_path.iterdir())


def test_dfloat11s_speed_is_in_the_results(root: Path):
    rows = json.loads((root / "benchmarks" / "results" / "gpu_codec.json").read_text())["results"]
    assert any(row["by"].startswith("DFloat11") and row.get("gb_s", 0) > 100 for row in rows)
