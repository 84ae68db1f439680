"""The weights that a delta is about: tensors with names, in the order of the format."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from neuzip.errors import UsageError
from neuzip.formats.sparse_delta import layout_digest
from neuzip.kernels import sparse_delta
from neuzip.kernels.dtypes import dtype_name, dtype_of
from neuzip.kernels.sparse_delta import BlockMap

Tensors = Mapping[str, torch.Tensor]
"""Tensors by their names, such as `dict(model.named_parameters())`."""

MODULUS = 1 << 64


class NamedWeights:
    """Contiguous tensors on one device, sorted by their names. `argument` is what errors call them.

    Raises UsageError for tensors on several devices, dtypes that safetensors has not, and tensors that are
    not contiguous.
    """

    def __init__(self, tensors: Tensors, argument: str) -> None:
        self.names = sorted(tensors, key=lambda name: name.encode("utf-8", "surrogatepass"))
        self.tensors = [tensors[name].detach() for name in self.names]
        self.argument = argument
        rows = []
        for name, tensor in zip(self.names, self.tensors, strict=True):
            self._require(tensor.is_contiguous(), name, "is not contiguous", "pass `tensor.contiguous()`")
            same = tensor.device == self.tensors[0].device
            self._require(same, name, f"is on {tensor.device}", f"others are on {self.tensors[0].device}")
            rows.append((name, self._dtype(name, tensor), tuple(tensor.shape)))
        self.layout = layout_digest(rows)
        self.rows = rows
        self.blocks = BlockMap.of(self.tensors)

    @property
    def device(self) -> torch.device:
        """Where the tensors are; the CPU if there are none."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def digest(self) -> int:
        """The digest of their state: reads all weights."""
        return (self.layout + int(sparse_delta.digest(self.tensors, self.blocks))) % MODULUS

    def require_apart(self) -> None:
        """Raise UsageError if two tensors share memory: a delta would be added to it twice."""
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes, name)
            for name, t in zip(self.names, self.tensors, strict=True)
            if t.numel()
        )
        for (_, end, name), (begin, _, other) in pairwise(spans):
            self._require(
                end <= begin, other, f"shares memory with {name!r}",
                "pass each tensor once, as `named_parameters` does",
            )  # fmt: skip

    def require_layout(self, other: NamedWeights) -> None:
        """Raise UsageError unless others have the same names, dtypes and shapes, on the same device."""
        if self.layout != other.layout:
            ours, theirs = (
                {name: (dtype, list(shape)) for name, dtype, shape in x.rows} for x in (self, other)
            )
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise UsageError(
                f"`{self.argument}`: tensor {name!r} is {ours.get(name, 'missing')}, and in "
                f"`{other.argument}` it is {theirs.get(name, 'missing')}",
                "both need tensors of the same names, dtypes and shapes",
            )
        if self.device != other.device:
            raise UsageError(
                f"`{self.argument}` is on {self.device}, and `{other.argument}` on {other.device}",
                "move one of them",
            )

    def _dtype(self, name: str, tensor: torch.Tensor) -> str:
        try:
            dtype = dtype_of(tensor.dtype)
        except KeyError:
            dtype = None
        name_in_torch, hint = dtype_name(tensor.dtype), "a delta takes the dtypes of safetensors"
        self._require(dtype is not None, name, f"has the dtype {name_in_torch}", hint)
        assert dtype is not None
        return dtype.name

    def _require(self, right: bool, name: str, problem: str, hint: str) -> None:
        if not right:
            raise UsageError(f"`{self.argument}`: tensor {name!r} {problem}", hint)
