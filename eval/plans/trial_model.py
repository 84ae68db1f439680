"""A live copy of a model with the weights that codes stand for: a plan is tried without a file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuzip.compress.pieces import digest
from neuzip.compress.prepared import Codes, PreparedCodes
from neuzip.compress.sources.source import SourceTensor
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.quantize.checkpoint_parameters import PartsByTensor
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.formats.container import Container
from neuzip.kernels.grid import Grid
from neuzip.runtime.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MeasuredWeights:
    """A comparison of a live model, and the checksums of the restored tensors in it, by name."""

    checksums: dict[str, str]
    comparison: Comparison

    def holds_for(self, dst: Path) -> bool:
        """Whether a compressed checkpoint restores these tensors bit for bit, by its checked records."""
        checkpoint = find_checkpoint(dst)
        stored: dict[str, str] = {}
        for path in checkpoint.weight_paths():
            with Container(path) as container:
                stored |= {name: record.checksum for name, record in container.manifest.tensors.items()}
        return all(stored.get(name) == checksum for name, checksum in self.checksums.items())


class TrialModel:
    """A copy of a loaded model, to be given the weights of plans.

    `places` say where `model` holds the tensors. `unplaced` counts those that are no parameter of it: a trial
    says nothing of them.
    """

    def __init__(
        self, model: PreTrainedModel, tensors: Sequence[SourceTensor], places: PartsByTensor
    ) -> None:
        copies: dict[int, Any] = {}  # by the id of the object that was copied
        self.headed = HeadedModel(copy.deepcopy(model, copies))
        self._tensors = tensors
        self._places = {
            name: replace(part, parameter=copies[id(part.parameter)]) for name, part in places.items()
        }
        self.unplaced = len(tensors) - len(self._places)

    @torch.no_grad()
    def take(
        self, prepared: PreparedCodes, on_weights: Callable[[int], None] = lambda count: None
    ) -> dict[str, str]:
        """Compute with the weights that codes stand for; a tensor without codes stays as it is.

        Returns checksums of the restored tensors by name.
        """
        checksums = {}
        for tensor in self._tensors:
            chosen = prepared.codes_of(tensor.name)
            if chosen is not None:
                checksums[tensor.name] = self._restored(tensor, *chosen)
            on_weights(tensor.info.numel)
        return checksums

    def _restored(self, tensor: SourceTensor, codes: Codes, grid: Grid) -> str:
        """Give the model the weights of one tensor, if it has a place for them, and return their checksum."""
        place = self._places.get(tensor.name)
        device = torch.device("cpu") if place is None else place.values.device
        held = torch.from_numpy(codes).to(device)
        values = grid.to(device).values(held, TORCH_DTYPES[tensor.info.dtype]).view(tensor.info.shape)
        if place is not None:
            place.values.copy_(values)
        return _checksum(values.cpu())


def _checksum(values: torch.Tensor) -> str:
    """The checksum of a tensor's bytes, as records of a container have it."""
    data = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    return digest(lambda start, stop: data[start:stop], data.nbytes)
