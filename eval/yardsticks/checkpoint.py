"""A checkpoint whose matrices are what a yardstick leaves of them, and the bytes that the yardstick takes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from neuzip.compress.entry_checks import require_plain
from neuzip.compress.plan import PlannedTensor, make_plan
from neuzip.compress.progress import OnBytes, ignore
from neuzip.compress.rules import rules_of_options
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.compress.workspace import writing
from neuzip.runtime.read import read_tensors

from .table import Yardstick


@dataclass(frozen=True)
class RestoredCheckpoint:
    """What was written: `bytes` that the yardstick would take, without headers of files.

    `original_bytes` are of the weight files, `weights` the elements of all tensors. `largest_relative_error`
    is of the weights that are not 0.
    """

    bytes: int
    original_bytes: int
    weights: int
    largest_relative_error: float


def write_restored(
    src: Path,
    dst: Path,
    yardstick: Yardstick,
    device: torch.device,
    *,
    widen: bool = False,
    jobs: int | None = None,
    on_bytes: OnBytes = ignore,
) -> RestoredCheckpoint:
    """Write the checkpoint `src` to the new folder `dst`, with the matrices that `compress` rounds restored.

    All other tensors stay as they are, and count in full; a tensor with the bytes of an earlier one counts
    once. Restored matrices keep their dtype, or are fp32 with `widen`, to which no format has to be rounded.
    `dst` links to the other files of `src`. Raises NeuzipError.
    """
    with FolderSource(src) as source, Workers(jobs) as workers, writing(dst):
        require_plain(source, dst)
        plan = make_plan(source, rules_of_options(0, "none"), workers)
        dst.mkdir()
        bits, largest = 0, 0.0
        for file in source.checkpoint.weights:
            tensors: dict[str, Tensor] = {}
            for planned in plan.of_file(file):
                tensor = planned.tensor
                (weight,) = read_tensors(source, [tensor], device, workers)
                if _is_rounded(planned):
                    restored = yardstick.restored(weight)
                    largest = max(largest, _largest_relative_error(weight, restored))
                    weight = restored if widen else restored.to(weight.dtype)
                tensors[tensor.name] = weight.cpu().contiguous()
                bits += _bits(planned, yardstick)
                on_bytes(tensor.info.nbytes)
            (dst / file).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, dst / file, {"format": "pt"})
        for file in source.checkpoint.others:
            (dst / file).parent.mkdir(parents=True, exist_ok=True)
            os.symlink((source.checkpoint.root / file).resolve(), dst / file)
        return RestoredCheckpoint(math.ceil(bits / 8), plan.weight_bytes, plan.weights, largest)


def _is_rounded(planned: PlannedTensor) -> bool:
    return planned.scheme.kind == "truncated" and len(planned.tensor.info.shape) > 1


def _bits(planned: PlannedTensor, yardstick: Yardstick) -> int:
    if planned.alias_of is not None:
        return 0
    info = planned.tensor.info
    return yardstick.bits(info.shape) if _is_rounded(planned) else 8 * info.nbytes


def _largest_relative_error(weight: Tensor, restored: Tensor) -> float:
    original = weight.float()
    errors = torch.where(original == 0, 0.0, (restored - original) / original).abs()
    return float(errors.max()) if errors.numel() else 0.0
