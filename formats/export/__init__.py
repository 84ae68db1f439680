"""Ternary models in the files of other engines.

    transformers_bitnet   safetensors, read by transformers' `bitnet` quantizer
    compressed_tensors    safetensors, `pack-quantized` at 2 bits: vLLM, compressed-tensors
    gguf, gguf_model      one file for llama.cpp: TQ1_0, TQ2_0 or Q2_0
    tensor_writer         safetensors files, a tensor at a time

A ternary weight is given as codes, int8 [out, in] of -1, 0 and 1; a scale that multiplies, fp32 [] or
[out, groups]; and `group`, the neighbours of a row that share a scale, None for one scale. Scales are 0 only
where all codes are 0.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from neuzip.errors import NeuzipError

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Names of tensors, with their dtype in the words of safetensors, and shape."""


class SafetensorsTarget(Protocol):
    """What an engine that reads safetensors wants of ternary weights."""

    def stored_scale(self, name: str, dtype: str, codes: Tensor, scale: Tensor, group: int | None) -> Tensor:
        """The scale that the engine will compute with, in a shape that broadcasts with `scale`.

        `dtype` is the tensor's before it was ternary. Raises NeuzipError for what the engine cannot hold.
        """

    def layout(self, name: str, dtype: str, shape: tuple[int, ...], group: int | None) -> Layout:
        """What is written for the tensor `name`, known before its data."""

    def tensors(
        self, name: str, dtype: str, codes: Tensor, scale: Tensor, group: int | None
    ) -> dict[str, Tensor]:
        """The data for that layout."""

    def quantization_config(self, groups: dict[str, int | None], others: list[str]) -> dict[str, object]:
        """The entry of config.json: ternary modules with their `group`, and the `others` that have matrices.

        A group that is as wide as its rows is one scale a row, 0 here.
        """


def single_scale(name: str, scale: Tensor, engine: str) -> Tensor:
    """The one scale of a tensor, fp32 []; groups may have it too if all do. Raises NeuzipError."""
    used = scale[scale != 0]
    if not len(used):
        return scale.new_zeros(())
    if bool(used.min() != used.max()):
        raise NeuzipError(
            f"tensor {name!r}: has {scale.numel()} scales, {engine} holds one a tensor",
            "export to compressed-tensors or gguf, or make one scale a tensor:"
            " `neuzip ternarize --ternary-group tensor`",
        )
    return used[0]
