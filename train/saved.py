"""A training run on disk: a checkpoint in Hugging Face's form, and beside it a file with the training state.

`neuzip-training.safetensors` has the optimizer's states as STATE/PARAMETER, in flat order whatever chunks
they were stored in, and the states of random generators as chance/PROCESS/NUMBER. Its metadata are steps,
norm, seed and the optimizer with its numbers. The weights are those of the checkpoint itself, which is exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from neuzip.compress.overwrite_guard import refuse_existing
from neuzip.compress.storing import storing
from neuzip.compress.workspace import clear, publish, recover, workspace
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.checkpoint import file_checksum, find_checkpoint
from neuzip.runtime.hf.load import load_model

from .model_weights import ModelWeights
from .optimizers import Optimizer
from .plain import write_plain
from .rng_states import KEY, RngStates
from .state_file import read_state, write_state
from .states import StatePieces, StateStore
from .ternary_training import round_to_ternary
from .units import ParameterSlot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_FILE = "neuzip-training.safetensors"


class TrainingRun(Protocol):
    """What is saved of a run, and restored: a `Trainer` has it."""

    model: PreTrainedModel
    weights: ModelWeights
    store: StateStore
    rng: RngStates
    optimizer: Optimizer
    clip: float | None
    clipping: Any
    steps: int
    norm: float | None
    seed: int


def save(run: TrainingRun, folder: Path, like: Path | None, resumable: bool) -> None:
    """Write the checkpoint of a run into `folder`, replacing an older one.

    like       checkpoint folder whose other files, such as the tokenizer, are copied
    resumable  False leaves out the training state
    """
    rng_states = run.rng.of_all_processes() if resumable else []
    if not dist.is_initialized() or dist.get_rank() == 0:
        recover(folder)
        if not (folder / STATE_FILE).is_file():
            refuse_existing(
                folder, overwrite=True, known=() if like is None else find_checkpoint(like).others
            )
        with workspace(folder, like) as work:
            clear(work, overwrite=True)
            with storing(work):
                _write_model(run, work, like, latent=resumable)
                if resumable:
                    _write_state(run, work, rng_states)
            publish(work, folder)
    if dist.is_initialized():
        dist.barrier()


def _write_model(run: TrainingRun, work: Path, like: Path | None, *, latent: bool) -> None:
    """Write all weights; those of ternary layers as they are trained, or, unless `latent`, rounded."""
    with run.weights.dense("cpu"):
        for name, weight in run.model.named_parameters():
            if not bool(weight.isfinite().all()):
                raise NeuzipError(
                    f"{name} has values that are no numbers after step {run.steps}: nothing is written",
                    "go on from the last checkpoint with a lower learning rate, or with clipping",
                )
        if not latent:
            round_to_ternary(run.model)
        write_plain(run.model, work, like, without=STATE_FILE)


def _write_state(run: TrainingRun, work: Path, rng_states: list[list[Tensor]]) -> None:
    tensors = {
        f"{name}/{slot.name}": whole
        for slot, chunks, _ in run.weights.states()
        for name, whole in run.store.whole(chunks).items()
    }
    for process, states in enumerate(rng_states):
        tensors |= {f"{KEY}/{process}/{number}": state for number, state in enumerate(states)}
    facts = {"steps": run.steps, "norm": run.norm, "seed": run.seed, **_method(run)}
    write_state(work / STATE_FILE, "training", tensors, facts | {"weights": _weights(work)})


def _weights(folder: Path) -> dict[str, str]:
    """The checksums of the weight files that lie beside a state."""
    paths = sorted(folder.glob("*.safetensors"))
    return {path.name: file_checksum(path) for path in paths if path.name != STATE_FILE}


def _method(run: TrainingRun) -> dict[str, Any]:
    """Facts that must be equal for a run to resume with the same result."""
    return {
        "optimizer": repr(run.optimizer), "clip": run.clip,
        "clipping": run.clipping if run.clip is not None else None,
    }  # fmt: skip


def load(run: TrainingRun, folder: Path) -> None:
    """Restore a run from the checkpoint in `folder`.

    Raises NeuzipError if its model or optimizer differs, FormatError if it is damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise NeuzipError(f"{folder}: has no {STATE_FILE}", "give a folder that training wrote")
    facts, tensors = read_state(path, "training")
    if not {"steps", "norm", "seed", "optimizer"} <= facts.keys():
        raise FormatError(path, "lacks facts", field="training")
    _require_same(path, facts, run)
    _require_weights(folder, facts)
    weights = dict(load_model(folder, attention=False).named_parameters())
    for slot in run.weights.slots():
        if slot.name not in weights or weights[slot.name].shape != slot.shape:
            raise NeuzipError(
                f"{folder}: is of another model: {slot.name} does not fit", "load that model first"
            )
        if weights[slot.name].dtype != slot.dtype:
            raise NeuzipError(
                f"{folder}: {slot.name} is {weights[slot.name].dtype}, the model in training {slot.dtype}",
                "load the model in the dtype that it was trained in",
            )
    run.weights.set({name: weight.detach() for name, weight in weights.items()})
    for slot, chunks, sizes in run.weights.states():
        _restore_states(path, run, slot, chunks, sizes, _of_slot(slot, tensors), facts["steps"])
    run.steps, run.norm, run.seed = facts["steps"], facts["norm"], facts["seed"]
    run.rng.restore(tensors)


def _require_weights(folder: Path, facts: dict[str, Any]) -> None:
    """Raise FormatError unless the weights are those written with the state. An older state names none."""
    present, written = _weights(folder), facts.get("weights", {})
    for name in sorted(present.keys() | written.keys()) if written else ():
        if present.get(name) != written.get(name):
            raise FormatError(
                folder / name, f"is not what training wrote with {STATE_FILE}: it is damaged",
                hint="go on from another checkpoint, or begin anew with `overwrite=True`",
            )  # fmt: skip


def _require_same(path: Path, facts: dict[str, Any], run: TrainingRun) -> None:
    """Raise UsageError for a run with another optimizer or other clipping."""
    for name, value in _method(run).items():
        if facts.get(name) != value:
            raise UsageError(
                f"{path}: was trained with {name} {facts.get(name)}, now it is {value}",
                "give the same, or begin a new run from these weights",
            )


def _of_slot(slot: ParameterSlot, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The states of a parameter by their own names."""
    ending = f"/{slot.name}"
    return {name.removesuffix(ending): state for name, state in tensors.items() if name.endswith(ending)}


def _restore_states(
    path: Path,
    run: TrainingRun,
    slot: ParameterSlot,
    chunks: list[StatePieces],
    sizes: list[int],
    states: dict[str, Tensor],
    steps: int,
) -> None:
    if not states and not (steps and slot.trainable):  # frozen, or before the first step
        for pieces in chunks:
            pieces.clear()
        return
    try:
        run.store.restore(chunks, sizes, states)
    except KeyError as error:
        raise FormatError(path, "is not there", tensor=f"{error.args[0]}/{slot.name}") from error
    except ValueError as error:
        raise FormatError(path, "does not fit its weight", tensor=f"{error.args[0]}/{slot.name}") from error
