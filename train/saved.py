"""A training run on disk: a checkpoint of Hugging Face's form, and beside it a file with all else it takes.

`neuzip-training.safetensors` has the optimizer's states as STATE/PARAMETER, in flat order whatever chunks
they were kept in, and the states of random generators as chance/PROCESS/NUMBER. Its metadata are steps, norm,
seed and the optimizer with its numbers. Weights are those of the checkpoint itself, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from neuzip.compress.overwrite_guard import refuse_existing
from neuzip.compress.storing import storing
from neuzip.compress.workspace import clear, publish, recover, workspace
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.checkpoint import file_checksum, find_checkpoint
from neuzip.runtime.hf.load import load_model

from .plain import write_plain
from .state_file import read_state, write_state
from .states import StatePieces
from .units import ParameterSlot

if TYPE_CHECKING:
    from neuzip.train.trainer import Trainer

STATE_FILE = "neuzip-training.safetensors"


def save(trainer: Trainer, folder: Path, like: Path | None, resumable: bool) -> None:
    """See `Trainer.save`."""
    chances = _gathered_chances(trainer) if resumable else []
    if not dist.is_initialized() or dist.get_rank() == 0:
        recover(folder)
        if not (folder / STATE_FILE).is_file():
            refuse_existing(
                folder, overwrite=True, known=() if like is None else find_checkpoint(like).others
            )
        with workspace(folder, like) as work:
            clear(work, overwrite=True)
            with storing(work):
                _write_model(trainer, work, like)
                if resumable:
                    _write_state(trainer, work, chances)
            publish(work, folder)
    if dist.is_initialized():
        dist.barrier()


def _write_model(trainer: Trainer, work: Path, like: Path | None) -> None:
    with trainer.dense("cpu") as model:
        for name, weight in model.named_parameters():
            if not bool(weight.isfinite().all()):
                raise NeuzipError(
                    f"{name} has values that are no numbers after step {trainer.steps}: nothing is written",
                    "go on from the last checkpoint with a lower learning rate, or with clipping",
                )
        write_plain(model, work, like, without=STATE_FILE)


def _write_state(trainer: Trainer, work: Path, chances: list[list[Tensor]]) -> None:
    tensors = {
        f"{name}/{slot.name}": whole
        for slot, chunks, _ in _kept(trainer)
        for name, whole in trainer.keeper.whole(chunks).items()
    }
    for process, states in enumerate(chances):
        tensors |= {f"chance/{process}/{number}": state for number, state in enumerate(states)}
    facts = {"steps": trainer.steps, "norm": trainer.norm, "seed": trainer.seed, **_method(trainer)}
    write_state(work / STATE_FILE, "training", tensors, facts | {"weights": _weights(work)})


def _weights(folder: Path) -> dict[str, str]:
    """The checksums of the weight files that lie beside a state."""
    paths = sorted(folder.glob("*.safetensors"))
    return {path.name: file_checksum(path) for path in paths if path.name != STATE_FILE}


def _method(trainer: Trainer) -> dict[str, Any]:
    """What must be the same for a run to go on as if it had not been stopped."""
    return {
        "optimizer": repr(trainer.optimizer), "clip": trainer.clip,
        "clipping": trainer.clipping if trainer.clip is not None else None,
    }  # fmt: skip


def _kept(trainer: Trainer) -> Iterator[tuple[ParameterSlot, list[StatePieces], list[int]]]:
    """All parameters with their states, in chunks of so many elements."""
    tables = {table.slot: table for table in (trainer.embedding, trainer.head)}
    for slot in trainer._slots():
        if slot in tables:
            yield slot, tables[slot].states, [held.numel for _, held in tables[slot].chunks]
        else:
            yield slot, [slot.states], [slot.numel]


def load(trainer: Trainer, folder: Path) -> None:
    """See `Trainer.load`."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise NeuzipError(f"{folder}: has no {STATE_FILE}", "give a folder that training wrote")
    facts, tensors = read_state(path, "training")
    if not {"steps", "norm", "seed", "optimizer"} <= facts.keys():
        raise FormatError(path, "lacks facts", field="training")
    _require_same(path, facts, trainer)
    _require_weights(folder, facts)
    weights = dict(load_model(folder, attention=False).named_parameters())
    for slot in trainer._slots():
        if slot.name not in weights or weights[slot.name].shape != slot.shape:
            raise NeuzipError(
                f"{folder}: is of another model: {slot.name} does not fit", "load that model first"
            )
        if weights[slot.name].dtype != slot.dtype:
            raise NeuzipError(
                f"{folder}: {slot.name} is {weights[slot.name].dtype}, the model in training {slot.dtype}",
                "load the model in the dtype that it was trained in",
            )
    trainer._set_weights({name: weight.detach() for name, weight in weights.items()})
    for slot, chunks, sizes in _kept(trainer):
        _put_back(path, trainer, slot, chunks, sizes, _of_slot(slot, tensors), facts["steps"])
    trainer.steps, trainer.norm, trainer.seed = facts["steps"], facts["norm"], facts["seed"]
    _restore_chances(trainer, tensors)


def _require_weights(folder: Path, facts: dict[str, Any]) -> None:
    """Raise FormatError unless the weights are those written with the state. An older state names none."""
    found, written = _weights(folder), facts.get("weights", {})
    for name in sorted(found.keys() | written.keys()) if written else ():
        if found.get(name) != written.get(name):
            raise FormatError(
                folder / name, f"is not what training wrote with {STATE_FILE}: it is damaged",
                hint="go on from another checkpoint, or begin anew with `overwrite=True`",
            )  # fmt: skip


def _require_same(path: Path, facts: dict[str, Any], trainer: Trainer) -> None:
    for name, value in _method(trainer).items():
        if facts.get(name) != value:
            raise UsageError(
                f"{path}: was trained with {name} {facts.get(name)}, now it is {value}",
                "give the same, or begin a new run from these weights",
            )


def _of_slot(slot: ParameterSlot, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The states of a parameter by their own names."""
    ending = f"/{slot.name}"
    return {name.removesuffix(ending): state for name, state in tensors.items() if name.endswith(ending)}


def _put_back(
    path: Path,
    trainer: Trainer,
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
        trainer.keeper.restore(chunks, sizes, states)
    except KeyError as error:
        raise FormatError(path, "is not there", tensor=f"{error.args[0]}/{slot.name}") from error
    except ValueError as error:
        raise FormatError(path, "does not fit its weight", tensor=f"{error.args[0]}/{slot.name}") from error


def _gathered_chances(trainer: Trainer) -> list[list[Tensor]]:
    """The states of random generators of all processes, where there is dropout."""
    own = [state.cpu() for state in trainer._chances()]
    if not dist.is_initialized() or not own:
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _restore_chances(trainer: Trainer, tensors: dict[str, Tensor]) -> None:
    process = dist.get_rank() if dist.is_initialized() else 0
    if trainer._chances() and f"chance/{process}/0" in tensors:
        torch.set_rng_state(tensors[f"chance/{process}/0"])
        if f"chance/{process}/1" in tensors and trainer.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"chance/{process}/1"], trainer.device)
