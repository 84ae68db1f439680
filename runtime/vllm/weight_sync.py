"""Deltas of a training in a running vLLM: the backend "neuzip_delta" of its weight transfer.

A worker keeps the weights of the checkpoint in host memory, and applies deltas to them there. vLLM's own
sparse patches carry what changed to its layers, which fuse matrices and cut them for tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from neuzip.runtime.delta.chain import Follower
from neuzip.runtime.delta.folder import DeltaFolder
from neuzip.runtime.load_file import load_file
from neuzip.runtime.serving import EngineRefusal
from neuzip.runtime.vllm.reloading import require_unpacked

PATCHED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of which vLLM can change single weights."""


@dataclass
class DeltaInitInfo(WeightTransferInitInfo):
    """Where a worker finds deltas, and the checkpoint from which the trainer started; plain or compressed."""

    deltas: str
    checkpoint: str


@dataclass
class DeltaUpdateInfo(WeightTransferUpdateInfo):
    """The number of the state that the weights are to be in."""

    state: int


class DeltaWeightTransferEngine(WeightTransferEngine[DeltaInitInfo, DeltaUpdateInfo]):
    """Follows a folder of deltas. Tensors have the names, dtypes and shapes that the checkpoint has."""

    init_info_cls = DeltaInitInfo
    update_info_cls = DeltaUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: DeltaInitInfo) -> None:
        """Read the checkpoint into host memory. Raises EngineRefusal for packed weights."""
        require_unpacked(self.model)
        files = sorted(Path(init_info.checkpoint).glob("*.safetensors"))
        if not files:
            raise EngineRefusal(
                f"neuzip: {init_info.checkpoint}: there are no safetensors files",
                "name the folder of the checkpoint from which the trainer started as `checkpoint`",
            )
        self._weights = {name: w for file in files for name, w in load_file(file).items()}
        self._follower = Follower(self._weights)
        self._deltas = DeltaFolder(init_info.deltas)

    def start_weight_update(self) -> None:
        """Nothing: weights change in place."""

    def finish_weight_update(self) -> None:
        """Nothing: weights change in place."""

    def receive_weights(self, update_info: DeltaUpdateInfo) -> None:
        """Apply all deltas up to a state, and patch the layers with what each changed."""
        for applied in self._deltas.steps(self._follower, update_info.state):
            patches = [self._patch(name, numbers) for name, numbers in applied.changed().items()]
            load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)

    def shutdown(self) -> None:
        """Forget the weights in host memory."""
        self._weights = {}

    def _patch(self, name: str, numbers: torch.Tensor) -> CheckpointWeightPatch:
        weight = self._weights[name]
        if weight.dtype not in PATCHED:
            raise EngineRefusal(
                f"neuzip: tensor {name!r} has the dtype {weight.dtype}, and vLLM cannot patch it",
                "publish weights in bfloat16, float16 or float32",
            )
        return CheckpointWeightPatch(
            name, tuple(weight.shape), weight.dtype,
            weight.view(-1)[numbers].to(self.device), numbers.to(self.device),
        )  # fmt: skip
