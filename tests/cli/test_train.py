"""neuzip train: a TOML file in, a model, a checkpoint, a log and a picture out."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels.linear_cross_entropy import linear_cross_entropy
from neuzip.train import configuration
from neuzip.train.scratch import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

Speak = Callable[..., Any]


@pytest.fixture
def write(tmp_path: Path, tiny: Path) -> Callable[..., Path]:
    """Write a run.toml for the tiny checkpoint, with some values changed and others left out (None)."""

    def make(**changes: Any) -> Path:
        values = {
            "model": str(tiny), "text": "demo", "output": str(tmp_path / "out"),
            "steps": 4, "lr": 1e-3, "window": 16, "batch_size": 2, "device": "cpu", **changes,
        }  # fmt: skip
        path = tmp_path / "run.toml"
        path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items() if v is not None))
        return path

    return make


@pytest.mark.slow
def test_a_run_leaves_model_log_and_picture(
    in_all_modes: Callable[..., dict[str, Any]], write: Callable[..., Path], tmp_path: Path, root: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, run = tmp_path / "out", write(model=str(root / "eval/demo/checkpoint"), steps=2)
    said = in_all_modes("train", run, prepare=lambda: shutil.rmtree(out, ignore_errors=True))
    assert said["human"].exit_code == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert {"model", "checkpoint", "log.jsonl", "loss.svg", "run.json"} == {p.name for p in out.iterdir()}
    found = said["json"].json
    assert found["steps"] == 2 and 2 < found["loss"] < 6
    assert found["weight_bytes"] < 0.7 * found["dense_weight_bytes"]
    assert said["quiet"].stdout.strip() == str(out / "model")
    assert len((out / "log.jsonl").read_text().splitlines()) == 2
    assert "loss" in said["human"].stdout and "step 2" in said["human"].stderr
    AutoModelForCausalLM.from_pretrained(out / "model")
    AutoTokenizer.from_pretrained(out / "model")
    assert not list((out / "model").glob("neuzip-training*"))


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_model(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert neuzip("train", write(output=str(tmp_path / "whole"))).exit_code == 0

    from neuzip.train.trainer import Trainer

    step = Trainer.step

    def interrupted(self: Trainer, batch: Any, lr: float, **options: Any) -> float:
        found = step(self, batch, lr, **options)
        if self.steps == 2:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(Trainer, "step", interrupted)
    said = neuzip("train", write())
    assert said.exit_code == 130
    assert said.stderr.endswith("error: interrupted\nhint: stopped after step 2; resume with --resume\n")
    monkeypatch.undo()
    out, whole = tmp_path / "out", tmp_path / "whole"
    said = neuzip("train", write(), "--resume")
    assert said.exit_code == 0, said.stderr
    assert "resuming after step 2" in said.stderr
    name = "model/model.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes()
    logs = [
        [json.loads(line)["loss"] for line in (p / "log.jsonl").read_text().splitlines()]
        for p in (out, whole)
    ]
    assert logs[0] == logs[1]
    assert neuzip("train", write(lr=1e-4), "--resume").exit_code == 2  # another run


@pytest.mark.slow
def test_a_run_goes_on_only_with_the_tokens_that_it_began_with(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text of some words. " * 200)
    given = {"text": str(text), "optimizer_state": "plain", "optimizer": "adamw"}
    assert neuzip("train", write(**given)).exit_code == 0
    text.write_text("A text of other words. " * 200)
    said = neuzip("train", write(**given, steps=6), "--resume")
    assert said.exit_code == 2
    assert f"was started with other tokens than {text} has now" in said.stderr
    text.write_text("A text of some words. " * 200)
    said = neuzip(
        "train", write(**{**given, "optimizer_state": "lossless", "steps": 6}), "--resume", "--json"
    )
    assert said.exit_code == 0, said.stderr  # states are kept in another way, with the same bits
    assert (said.json["steps"], said.json["processes"]) == (6, 1)
    assert said.json["state_bytes"] > 0


def test_an_out_below_a_file_is_refused(neuzip: Speak, write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        said = neuzip("train", write(output=str(out)))
        assert said.exit_code == 1
        assert f"{out}: cannot be written" in said.stderr
    said = neuzip("train", write(output=str(tmp_path / "file")), "--overwrite")
    assert said.exit_code == 1 and "is not from neuzip train" in said.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 0}, "model.embed_tokens.weight would have the shape (1024, 0)"),
        ({"hidden_size": -4}, "Trying to create tensor with negative dimension"),
        ({"hidden_size": "x"}, "'hidden_size' expected int, got str"),
        ({"num_attention_heads": 0}, "modulo by zero"),
        ({"num_key_value_heads": 3}, "must match the size of tensor"),
        ({"vocab_size": 10}, "vocab_size is 10, the tokenizer has 1024 tokens"),
        ({"dtype": "nope"}, "has no attribute 'nope'"),
        ({"model_type": "nope"}, "does not recognize this architecture"),
    ],
    ids=str,
)
def test_configurations_of_no_model_are_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path, root: Path
) -> None:
    given = json.loads((root / "eval/demo/checkpoint/config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**given, **changes}))
    with pytest.raises(NeuzipError) as caught:
        random_model(path, 1024, torch.float32, 0)
    assert str(path) in caught.value.message and problem in caught.value.message and caught.value.hint


@pytest.mark.parametrize("ternary", [None, "b1.58"])
def test_a_model_is_trained_from_scratch_to_a_container(
    neuzip: Speak,
    write: Callable[..., Path],
    tmp_path: Path,
    tiny: Path,
    ternary: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filters = []
    monkeypatch.setattr(
        "neuzip.train.head_loss.linear_cross_entropy",
        lambda *given, **more: filters.append(more["filter_eps"]) or linear_cross_entropy(*given, **more),
    )
    path = write(
        model=None, scratch=str(tiny / "config.json"), tokenizer=str(tiny), compress=True, ternary=ternary
    )  # fmt: skip
    said = neuzip("train", path, "--json")
    assert said.exit_code == 0, said.stderr
    assert said.json["loss"] == pytest.approx(6.93, abs=0.3)  # ln 1024: it knows nothing yet
    assert set(filters) == {None}
    model = tmp_path / "out" / "model"
    assert (
        sorted(p.name for p in model.iterdir() if "neuzip" in p.name)
        and not (tmp_path / "out/model-plain").exists()
    )
    from neuzip.runtime.bitlinear import bit_linears
    from neuzip.runtime.hf.load import load_model

    loaded = load_model(model, residency="packed")
    assert loaded.config.hidden_size == 32
    assert bool(bit_linears(loaded)) == bool(ternary)


def test_what_is_there_is_not_overwritten(neuzip: Speak, write: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    said = neuzip("train", write())
    assert said.exit_code == 1 and "exists already\nhint: choose another output\n" in said.stderr
    said = neuzip("train", write(), "--overwrite")
    assert said.exit_code == 1 and "is not from neuzip train" in said.stderr
    assert (out / "mine.txt").read_text() == "mine"
    said = neuzip("train", write(), "--resume")
    assert said.exit_code == 1 and "has no run to resume\nhint: choose another output\n" in said.stderr


@pytest.mark.slow
def test_a_run_without_a_checkpoint_begins_anew(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its first moment, or before its first checkpoint: each hint leads on."""
    out = tmp_path / "out"
    said = neuzip("train", write(), "--resume")
    assert said.exit_code == 1 and said.stderr.endswith("has no run to resume\nhint: leave out --resume\n")
    out.mkdir()
    (out / "run.json.neuzip-partial").write_text("{")

    from neuzip.train.trainer import Trainer

    def fails(*_: Any, **__: Any) -> float:
        raise NeuzipError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", fails)
        assert neuzip("train", write()).stderr.endswith("error: killed\n")
    assert {path.name for path in out.iterdir()} == {"run.json", "log.jsonl"}
    said = neuzip("train", write())
    assert said.exit_code == 1
    assert said.stderr.endswith(
        "hint: --resume resumes the run there; --overwrite deletes it and starts again\n"
    )
    assert neuzip("train", write(lr=1e-4), "--resume").exit_code == 2  # another run
    said = neuzip("train", write(), "--resume")
    assert said.exit_code == 0, said.stderr
    assert "the run stopped before its first checkpoint, so it starts with step 1" in said.stderr
    assert len((out / "log.jsonl").read_text().splitlines()) == 4

    (out / "checkpoint").rename(tmp_path / "elsewhere")
    model = (out / "model/model.safetensors").read_bytes()
    said = neuzip("train", write(), "--resume")
    assert said.exit_code == 1 and "has a trained model but no checkpoint to resume from" in said.stderr
    assert (out / "model/model.safetensors").read_bytes() == model


@pytest.mark.parametrize("where", ["log.jsonl", "neuzip-training", "model.safetensors"])
@pytest.mark.slow
def test_a_full_disk_is_told_with_what_goes_on(
    where: str, neuzip: Speak, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log, in the state of training, which safetensors writes, and in the weights."""
    from safetensors import SafetensorError

    from neuzip.train import loop, state_file

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        if where == "log.jsonl":
            patch.setattr(loop, "open", lambda *_, **__: Full(), raising=False)
        elif where == "neuzip-training":
            patch.setattr(state_file, "save_file", full)
        else:
            patch.setattr("transformers.modeling_utils.safe_save_file", full)
        said = neuzip("train", write())
    assert (said.exit_code, said.stdout) == (1, "")
    assert (
        "no space left on the disk\nhint: free some space, then resume from the last checkpoint with --resume"
        in said.stderr
    )
    assert neuzip("train", write(), "--resume").exit_code == 0


@pytest.mark.slow
def test_a_disk_that_is_full_before_a_run_begins_is_told_with_the_same_command(
    neuzip: Speak, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no run.json yet, without which --resume refuses."""
    from neuzip.compress import workspace

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "write_file", full)
        said = neuzip("train", write())
    assert said.exit_code == 1
    assert said.stderr.endswith("no space left on the disk\nhint: free some space and repeat the command\n")
    assert neuzip("train", write()).exit_code == 0


def test_what_cannot_begin_removes_nothing(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path, root: Path
) -> None:
    out = tmp_path / "out"
    assert neuzip("train", write(steps=1)).exit_code == 0
    there = sorted(p.name for p in out.rglob("*"))
    said = neuzip("train", write(text="no-such-text.txt"), "--overwrite")
    assert said.exit_code == 1 and sorted(p.name for p in out.rglob("*")) == there
    said = neuzip("train", write(model=str(out / "model")), "--overwrite")
    assert said.exit_code == 1 and "holds" in said.stderr
    assert sorted(p.name for p in out.rglob("*")) == there
    said = neuzip("train", write(model="no-such-model", output=str(tmp_path / "other")))
    assert said.exit_code != 0 and not (tmp_path / "other").exists()


def test_windows_longer_than_the_model_are_refused(neuzip: Speak, write: Callable[..., Path]) -> None:
    said = neuzip("train", write(window=512))
    assert said.exit_code == 2
    assert "window is 512, the model has 256 positions" in said.stderr


GIVEN: dict[str, Any] = {"model": "m", "text": ["a"], "output": "o", "steps": 1, "lr": 1}


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        ({"stpes": 3}, "there is no key 'stpes'", "did you mean steps?"),
        ({"steps": None}, "lacks steps", "steps = 1000"),
        ({"steps": "3"}, "steps is '3'", "a whole number"),
        ({"steps": True}, "steps is True", "a whole number"),
        ({"steps": 0}, "steps is 0", "at least 1"),
        ({"seed": -1}, "seed is -1", "at least 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1", "at least 0"),
        ({"budget_minutes": 0}, "budget_minutes is 0", "more than 0"),
        ({"text": []}, "text is []", "a list of names"),
        ({"optimizer": "adam"}, "no optimizer 'adam'", "adamw8bit"),
        ({"optimizer_state": "zipped"}, "no optimizer_state 'zipped'", "plain, lossless"),
        ({"schedule": "cosin"}, "no schedule 'cosin'", "cosine"),
        ({"lr": -1}, "lr -1.0", "at least 0"),
        ({"model": None}, "needs one of model, scratch and preset", "random weights"),
        ({"scratch": "c"}, "needs one of model, scratch and preset", "random weights"),
        ({"model": None, "preset": "bitnet"}, "there is no preset 'bitnet'", "bitnet-a4.8-3b"),
        ({"model": None, "preset": "bitnet-a4.8-3b"}, "tokenizer belongs to scratch or preset", "both"),
        ({"ternary": "a4.8"}, "ternary starts from random weights", "neuzip recover"),
        (
            {"model": None, "scratch": "c", "tokenizer": "t", "ternary": "none"},
            "no ternary 'none'",
            "a4.8-fp4",
        ),
        ({"scale": 0.5}, "scale has no effect without preset", "leave out scale"),
        ({"scale": -1}, "scale is -1.0", "above 0"),
        ({"int8_fraction": 0.5}, "int8_fraction has no effect", "leave out int8_fraction"),
        ({"int8_fraction": 2}, "int8_fraction is 2.0", "from 0 to 1"),
        (
            {"model": None, "preset": "bitnet-a4.8-700m", "tokenizer": "t", "steps": 9},
            "all of the 9 steps have 8-bit activations and none those of a4.8",
            "lower int8_fraction, raise steps",
        ),
        ({"cooldown_start": 0.2}, "cooldown_start has no effect without cooldown_lr", "leave out"),
        ({"cooldown_lr": -1}, "cooldown_lr is -1", "at least 0"),
        ({"tokenizer": "t"}, "tokenizer belongs to scratch", "both"),
        ({"dtype": "float32"}, "dtype has no effect with model", "leave out dtype"),
        ({"schedule": "constant", "min_lr_ratio": 0}, "min_lr_ratio has no effect", "leave out min_lr_ratio"),
        ({"max_grad_norm": 0, "clipping": "running"}, "clipping has no effect", "leave out clipping"),
    ],
)
def test_configurations_without_sense_are_refused(changes: dict[str, Any], problem: str, hint: str) -> None:
    given = {k: v for k, v in {**GIVEN, **changes}.items() if v is not None}
    with pytest.raises(UsageError) as caught:
        configuration.checked(given, "run.toml")
    assert problem in caught.value.message and hint in caught.value.hint


def test_old_keys_are_accepted_with_a_warning(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path
) -> None:
    values = {
        "text": "a.txt", "output": "o", "window": 8, "batch_size": 3, "micro_batch_size": 1,
        "optimizer_state": "lossless", "warmup_steps": 2, "min_lr_ratio": 0.5, "max_grad_norm": 2.0,
    }  # fmt: skip
    file = write(**values)
    heard: list[str] = []
    found = configuration.read(file, heard.append)
    assert not heard
    for old, new in configuration.OLD.items():
        file.write_text(file.read_text().replace(f"{new} = ", f"{old} = "))
    assert configuration.read(file, heard.append) == found
    assert heard == [
        f"{file}: {old} is now called {new}; version 0.2 removes the old name"
        for old, new in configuration.OLD.items()
    ]
    assert set(configuration.OLD.values()) == set(values)
    file.write_text(file.read_text() + "window = 9\n")
    said = neuzip("train", file)
    assert said.exit_code == 2 and f"error: {file}: length and window are one key" in said.stderr


@pytest.mark.parametrize(
    ("start", "filtered"),
    [
        ({}, True),
        ({"model": None, "scratch": "c", "tokenizer": "t"}, False),
        ({"model": None, "preset": "bitnet-a4.8-700m", "tokenizer": "t", "steps": 20}, False),
    ],
)
def test_gradients_are_filtered_of_trained_models_unless_the_file_decides(
    start: dict[str, Any], filtered: bool
) -> None:
    given = {key: value for key, value in {**GIVEN, **start}.items() if value is not None}
    assert configuration.checked(given, "run.toml").filters_gradients() is filtered
    for choice in (True, False):
        said = configuration.checked({**given, "filter_gradients": choice}, "run.toml")
        assert said.filters_gradients() is choice


def test_values_get_their_types(tmp_path: Path) -> None:
    found = configuration.checked({**GIVEN, "text": "one.txt", "weight_decay": 0}, "run.toml")
    assert (found.text, found.output, found.lr) == (["one.txt"], Path("o"), 1.0)
    assert found.method().weight_decay == 0.0  # type: ignore[attr-defined]
    assert found.rates()(0) == 1.0
    (tmp_path / "bad.toml").write_text("steps =")
    with pytest.raises(UsageError, match="is not TOML"):
        configuration.read(tmp_path / "bad.toml", print)
    with pytest.raises(NeuzipError, match="cannot be read"):
        configuration.read(tmp_path / "none.toml", print)


@pytest.mark.slow
def test_without_a_length_windows_are_what_the_model_can(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path
) -> None:
    said = neuzip("train", write(window=None, steps=1, batch_size=1))
    assert said.exit_code == 0, said.stderr
    assert "256 per window" in said.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["window"] == 256
    assert neuzip("train", write(window=None, steps=2, batch_size=1), "--resume").exit_code == 0
    said = neuzip("train", write(window=16, steps=2, batch_size=1), "--resume")
    assert said.exit_code == 2 and "was started with window = 256, now it is 16" in said.stderr
    run = tmp_path / "out" / "run.json"
    begun = {key: value for key, value in json.loads(run.read_text()).items() if key != "filter_gradients"}
    run.write_text(json.dumps(begun))  # as a version without that key left it
    old = {new: name for name, new in configuration.OLD.items()}
    run.write_text(json.dumps({old.get(key, key): value for key, value in begun.items()}))
    assert neuzip("train", write(window=256, steps=2, batch_size=1), "--resume").exit_code == 0
    said = neuzip("train", write(window=256, steps=2, batch_size=1, filter_gradients=False), "--resume")
    assert said.exit_code == 2
    assert "was started with filter_gradients = True, now it is False" in said.stderr
    given = configuration.checked(GIVEN, "run.toml")
    assert [given.window_for(n) for n in (None, 100, 512, 4096)] == [512, 100, 512, 512]


@pytest.mark.slow
def test_steps_are_counted_alike_in_log_and_output(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path
) -> None:
    said = neuzip("train", write())
    told = re.findall(r"^step (\d+): loss ([\d.]+)", said.stderr, re.MULTILINE)
    logged = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert told == [(str(one["step"]), f"{one['loss']:.4f}") for one in logged]
    assert [one["step"] for one in logged] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_says_so(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path
) -> None:
    neuzip("train", write())
    model = tmp_path / "out" / "model" / "model.safetensors"
    before = model.read_bytes()
    said = neuzip("train", write(), "--resume")
    assert said.exit_code == 0
    assert "finished already: 4 of 4 steps are done" in said.stderr
    assert "resuming" not in said.stderr and model.read_bytes() == before
    (tmp_path / "out" / "log.jsonl").write_text("")
    said = neuzip("train", write(), "--resume")
    assert said.exit_code == 1 and "log.jsonl: has no steps" in said.stderr


@pytest.mark.slow
def test_overwrite_replaces_a_run_and_nothing_beside_it(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert neuzip("train", write(steps=1)).exit_code == 0
    assert neuzip("train", write(steps=1), "--overwrite").exit_code == 0
    (out / "notes.txt").write_text("mine")
    said = neuzip("train", write(steps=1), "--overwrite")
    assert said.exit_code == 1 and "holds 'notes.txt', which is not from neuzip train" in said.stderr
    assert (out / "notes.txt").read_text() == "mine" and (out / "model").is_dir()


def test_help_names_every_key(neuzip: Speak) -> None:
    said = neuzip("train", "--help").stdout
    words = set(re.findall(r"\w+", said[said.index("A run.toml:") :]))
    keys = {field.name for field in dataclasses.fields(configuration.TrainingConfiguration)}
    assert keys <= words, keys - words


@pytest.mark.slow
def test_a_ternary_model_has_the_loss_that_training_printed(
    neuzip: Speak, write: Callable[..., Path], tmp_path: Path, root: Path
) -> None:
    changes = {
        "model": None, "preset": "bitnet-a4.8-700m", "scale": 0.05, "window": 64, "warmup_steps": 1,
        "tokenizer": str(root / "eval/demo/checkpoint"), "eval_text": "demo", "int8_fraction": 0.5,
        "lr": 1e-2, "cooldown_lr": 5e-3,
    }  # fmt: skip
    said = neuzip("train", write(**changes), "--json")
    assert said.exit_code == 0, said.stderr
    model, small = tmp_path / "out" / "model", tmp_path / "small"
    again = neuzip("train", write(**changes), "--resume", "--json")
    assert (again.json["steps"], again.json["eval_loss"]) == (4, said.json["eval_loss"])
    config = json.loads((model / "config.json").read_text())
    assert (config["model_type"], config["hidden_act"], config["hidden_size"]) == ("bitnet", "relu2", 64)
    assert config["neuzip"]["activations"] == "a4.8"
    assert neuzip("compress", model, small, "--ternary").exit_code == 0
    packed = ("--text", "demo", "--residency", "packed", "--conventions", "token", "--json")
    measured = neuzip("eval", small, *packed)
    assert measured.exit_code == 0, measured.stderr
    found = measured.json["conventions"][0]["after"]["nll"]["value"]
    assert found == pytest.approx(said.json["eval_loss"], rel=1e-9)
    fewer = neuzip("eval", small, *packed, "--query-bits", "2").json
    assert fewer["after"]["query_bits"] == 2
    assert fewer["conventions"][0]["after"]["nll"]["value"] != found
