"""Checkpoints of compressed-tensors, format `pack-quantized` at 2 bits, for that package and vLLM.

    weight_packed   int32 [out, ceil(in / 16)]   codes + 2, 2 bits each, the first of 16 in the lowest bits
    weight_scale    fp32 [out, 1] or [out, groups]; it multiplies. One scale a tensor is repeated
    weight_shape    int64 [2]

The fourth code, -2, is never used. Weights of one kind of scale make a config group. INT8 activations are
quantised as they come, a scale a token, which is absmax / 127.5 in that package and absmax / 127 in b1.58.

Source: the compressed-tensors package, compressors/pack_quantized and quantization/quant_args.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.errors import NeuzipError, UsageError

from . import Layout

FORMAT = "pack-quantized"
"""Said of every config group too: readers take 2-bit weights with 8-bit activations for plain int8 else."""

CODES_A_WORD = 16
OFFSET = 2
INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class PackQuantized:
    """The export, with 8-bit activations (`b1.58`) or plain ones (`none`). Raises UsageError for others."""

    activations: str = "b1.58"

    def __post_init__(self) -> None:
        if self.activations not in ("b1.58", "none"):
            raise UsageError(
                f"`activations={self.activations!r}`: there is no such mode", "give b1.58 or none"
            )

    def stored_scale(self, name: str, dtype: str, codes: Tensor, scale: Tensor, group: int | None) -> Tensor:
        """The scale itself. Raises NeuzipError for groups that do not fill their rows."""
        width = codes.shape[1]
        if group is not None and group < width and width % group:
            raise NeuzipError(
                f"tensor {name!r}: rows of {width} weights are no whole groups of {group}, "
                "as compressed-tensors wants them",
                "compress with a group that divides them, or with one scale a tensor",
            )
        return scale

    def layout(self, name: str, dtype: str, shape: tuple[int, ...], group: int | None) -> Layout:
        """Packed codes, scales and shape of the tensor `name`, which ends in `weight`."""
        out, width = shape
        groups = 1 if group is None else -(-width // group)
        return {
            f"{name}_packed": ("I32", (out, -(-width // CODES_A_WORD))),
            f"{name}_scale": ("F32", (out, groups)),
            f"{name}_shape": ("I64", (2,)),
        }

    def tensors(
        self, name: str, dtype: str, codes: Tensor, scale: Tensor, group: int | None
    ) -> dict[str, Tensor]:
        """The three of them."""
        if group is None:
            scale = scale.expand(codes.shape[0], 1)
        return {
            f"{name}_packed": pack(codes),
            f"{name}_scale": scale.contiguous(),
            f"{name}_shape": torch.tensor(codes.shape),
        }

    def quantization_config(self, groups: dict[str, int | None], others: list[str]) -> dict[str, object]:
        """A config group for each kind of scale: of all linear layers if there is one, else by name."""
        kinds = sorted({group or 0 for group in groups.values()})

        def targets(kind: int) -> list[str]:
            if len(kinds) == 1:
                return ["Linear"]
            return [module for module, group in groups.items() if (group or 0) == kind]

        entries = {
            f"group_{i}": {
                "targets": targets(kind),
                "format": FORMAT,
                "weights": self._weights(kind),
                "input_activations": INT8_TOKENS if self.activations == "b1.58" else None,
                "output_activations": None,
            }
            for i, kind in enumerate(kinds)
        }
        return {
            "quant_method": "compressed-tensors",
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": entries,
            "ignore": others,
        }

    @staticmethod
    def _weights(group: int) -> dict[str, object]:
        strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        return {"num_bits": 2, "type": "int", "symmetric": True, "dynamic": False, **strategy}


def pack(codes: Tensor) -> Tensor:
    """Sixteen neighbours of a row a word: int8 [out, in] to int32 [out, ceil(in / 16)]."""
    out, width = codes.shape
    padded = codes.new_zeros((out, -(-width // CODES_A_WORD) * CODES_A_WORD), dtype=torch.int32)
    padded[:, :width] = codes + OFFSET
    shifts = torch.arange(0, 2 * CODES_A_WORD, 2, dtype=torch.int32)
    # Distinct bits: the sum is their union. Its 32nd bit is the sign.
    return torch.sum(padded.reshape(out, -1, CODES_A_WORD) << shifts, -1, dtype=torch.int32)
