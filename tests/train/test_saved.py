"""Checkpoints of training: a resumed run goes on, and what is damaged or missing is refused."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from training import batches, bits, llama

from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.train.trainer import Trainer, train_compressed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw8bit", "max_grad_norm": 0.5, "clipping": "running"},
        {"optimizer": "adamw", "micro_batch_size": 1},
        {"optimizer": "adamw", "optimizer_state": "lossless"},
        {"optimizer": "sgd-stochastic"},
    ],
    ids=lambda options: f"{options['optimizer']}, {options.get('states', 'plain')}",
)
@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_been_stopped(options: dict[str, Any], tmp_path: Path) -> None:
    given = batches(6)
    whole = train_compressed(llama(True, attention_dropout=0.1), seed=3, **options)
    torch.manual_seed(5)
    losses = [whole.step(batch, 1e-2) for batch in given]
    first = train_compressed(llama(True, attention_dropout=0.1), seed=3, **options)
    torch.manual_seed(5)
    begun = [first.step(batch, 1e-2) for batch in given[:3]]
    first.save(tmp_path / "at3")
    torch.manual_seed(99)
    config = transformers.LlamaConfig.from_pretrained(tmp_path / "at3")
    again = train_compressed(transformers.LlamaForCausalLM(config).bfloat16(), **options)
    again.load(tmp_path / "at3")
    assert again.steps == 3
    assert begun + [again.step(batch, 1e-2) for batch in given[3:]] == losses
    assert bits(again.release()) == bits(whole.release())


def test_a_checkpoint_is_one_of_transformers_and_training_goes_on_after_it(tmp_path: Path) -> None:
    trainer = train_compressed(llama(), "adamw8bit")
    other = train_compressed(llama(), "adamw8bit")
    for batch in batches(2):
        trainer.step(batch, 1e-2)
        other.step(batch, 1e-2)
        trainer.save(tmp_path / "out")  # replaces the one before
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    (batch,) = batches(1)
    assert trainer.step(batch, 1e-2) == other.step(batch, 1e-2)
    assert loaded.dtype == torch.bfloat16
    assert not list(tmp_path.glob("*.neuzip-*"))
    again = train_compressed(llama(), "adamw8bit")
    again.load(tmp_path / "out")
    assert bits(loaded) == bits(again.release())


def test_checkpoints_of_something_else_are_refused(tmp_path: Path) -> None:
    trainer = train_compressed(llama(), "adamw8bit")
    trainer.step(batches(1)[0], 1e-2)
    trainer.save(tmp_path / "out")
    with pytest.raises(UsageError, match="was trained with optimizer AdamW"):
        train_compressed(llama()).load(tmp_path / "out")
    with pytest.raises(NeuzipError, match="is of another model"):
        train_compressed(llama(hidden_size=64), "adamw8bit").load(tmp_path / "out")
    with pytest.raises(NeuzipError, match=r"has no neuzip-training\.safetensors"):
        trainer.load(tmp_path)
    (tmp_path / "out" / "neuzip-training.safetensors").write_bytes(b"nothing")
    with pytest.raises(NeuzipError, match="is not a safetensors file"):
        trainer.load(tmp_path / "out")


@pytest.mark.parametrize("lost", ["second_top/model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_state_that_is_missing_is_not_replaced_by_zeros(lost: str, tmp_path: Path) -> None:
    trainer = train_compressed(llama(), "adamw8bit")
    trainer.step(batches(1)[0], 1e-2)
    trainer.save(tmp_path / "out")
    path = tmp_path / "out" / "neuzip-training.safetensors"
    with safe_open(path, "pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    older = {k: v for k, v in json.loads(facts["training"]).items() if k not in ("version", "checksum")}
    facts = {"version": "1", "training": json.dumps(older)}
    save_file({name: one for name, one in tensors.items() if not name.endswith(lost)}, path, facts)
    with pytest.raises(FormatError, match="is not there") as caught:
        trainer.load(tmp_path / "out")
    assert lost in str(caught.value)
    whole = tensors["first/model.norm.weight"]
    save_file({**tensors, "first/model.norm.weight": torch.cat([whole, whole])}, path, facts)
    with pytest.raises(FormatError, match="does not fit its weight"):
        trainer.load(tmp_path / "out")


@pytest.mark.parametrize("file", ["neuzip-training.safetensors", "model.safetensors"])
def test_a_run_does_not_go_on_from_damaged_tensors(file: str, tmp_path: Path) -> None:
    trainer = train_compressed(llama(), "adamw8bit")
    trainer.step(batches(1)[0], 1e-2)
    trainer.save(tmp_path / "out")
    before = (tmp_path / "out" / file).read_bytes()
    trainer.save(tmp_path / "out")
    assert (tmp_path / "out" / file).read_bytes() == before, "the same state is the same bytes"
    (tmp_path / "out" / file).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(FormatError, match=f"{file}.*it is damaged"):
        trainer.load(tmp_path / "out")


def test_frozen_parameters_have_no_states_to_miss(tmp_path: Path) -> None:
    def partly() -> Any:
        model = llama()
        model.model.layers[0].requires_grad_(False)
        return train_compressed(model, "adamw8bit")

    trainer = partly()
    losses = [trainer.step(batch, 1e-2) for batch in batches(3)[:2]]
    trainer.save(tmp_path / "out")
    again = partly()
    again.load(tmp_path / "out")
    assert losses and again.step(batches(3)[2], 1e-2) == trainer.step(batches(3)[2], 1e-2)


def test_weights_that_are_no_numbers_do_not_replace_a_checkpoint(tmp_path: Path) -> None:
    trainer = train_compressed(llama(dtype=torch.float32), compressed=False)
    trainer.save(tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    trainer.step(batches(1)[0], math.inf)
    with pytest.raises(NeuzipError, match="has values that are no numbers after step 1: nothing is written"):
        trainer.save(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_running_norm_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Trainer._backward

    def overflowing(*arguments: Any, **options: Any) -> Any:
        loss, squares = backward(*arguments, **options)
        return loss, squares * math.inf

    monkeypatch.setattr(Trainer, "_backward", overflowing)
    trainer = train_compressed(llama(), max_grad_norm=1.0, clipping="running")
    with pytest.raises(NeuzipError, match="weights were changed with them"):
        trainer.step(batches(1)[0], 0.01)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: safetensors has an error of its own for both."""
    trainer = train_compressed(llama(), compressed=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(NeuzipError, match=r"out.*: cannot be written: File too large"):
            trainer.save(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()
