"""Weights that are packed as soon as all of their parts have come, so that no dense model exists as a whole.

SGLang makes a model with all of its parameters, and then calls the `weight_loader` of each for one tensor of
the checkpoint after the other. Here the parameter is on the meta device and takes no memory. Its loader makes
a dense one when the first tensor comes, has SGLang's own loader fill it, and packs it when each of its values
has been written: three tensors for qkv_proj. With tensor parallelism each rank packs the part that it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neuzip.kernels.packed_linear.held import hold
from neuzip.runtime.residency import pack_arrived
from neuzip.runtime.serving import STEPS, EngineRefusal
from neuzip.runtime.weights import GridWeight, PackedWeight


class ArrivingWeight:
    """The `weight_loader` of a parameter: it has `loader` fill a dense weight, and packs that when complete.

    `attributes` are those that SGLang sets on the parameter. The packed weight becomes `layer.weight`.
    """

    def __init__(
        self, layer: Any, loader: Callable[..., Any], attributes: dict[str, Any], exact: bool
    ) -> None:
        self._layer, self._loader, self._attributes, self._exact = layer, loader, attributes, exact
        self._device = torch.empty(0).device  # SGLang makes a model with its device as torch's default
        self._dense: torch.nn.Parameter | None = None
        self._steps: torch.nn.Parameter | None = None
        self._written = _WrittenRegions()
        self.packed: torch.nn.Parameter | None = None
        """The weight, from when all of it has come."""

        self.is_closed = False
        """Whether the model is loaded. CUDA graphs hold the weight's addresses from then on."""

    def __call__(self, parameter: torch.nn.Parameter, *args: Any, **options: Any) -> Any:
        """Take one tensor of the checkpoint, as SGLang's loader does. Raises EngineRefusal after loading."""
        if self.is_closed:
            raise EngineRefusal(
                "neuzip: packed weights cannot be replaced while SGLang serves them",
                "start SGLang again, or with the residency 'dense'",
            )
        if self._dense is None:
            self._dense = self._filled(parameter.shape, parameter.dtype, 0)
        with self._written.into(self._dense):
            result = self._loader(self._dense, *args, **options)
        steps = next((getattr(value, STEPS) for value in args if hasattr(value, STEPS)), None)
        if steps is not None:
            self._place(steps, *args, **options)
        if self._written.count == self._dense.numel():
            self._pack(self._dense.data)
            self._dense = self._steps = None
            self._written = _WrittenRegions()
        return result

    @property
    def missing(self) -> int:
        """How many values have not come."""
        if self.packed is not None and self._dense is None:
            return 0
        size = int(self._layer.weight.numel())
        return size - self._written.count

    def _filled(self, shape: Sequence[int], dtype: torch.dtype, value: float) -> torch.nn.Parameter:
        """A parameter of one value, with the attributes that SGLang's loader looks at."""
        filled = torch.full(tuple(shape), value, dtype=dtype, device=self._device)
        parameter = torch.nn.Parameter(filled, requires_grad=False)
        for name, attribute in self._attributes.items():
            setattr(parameter, name, attribute)
        return parameter

    def _place(self, steps: torch.Tensor, loaded: torch.Tensor, *args: Any, **options: Any) -> None:
        """Put the steps of a quantized tensor's rows where SGLang's loader puts the rows."""
        assert self._dense is not None
        if self._steps is None:
            self._steps = self._filled(self._dense.shape, torch.float32, math.nan)
        self._loader(self._steps, steps.to(self._device)[:, None].expand(loaded.shape), *args, **options)

    def _pack(self, dense: torch.Tensor) -> None:
        fill_padding(self._layer, dense)
        steps = None
        if self._steps is not None:
            fill_padding(self._layer, self._steps.data)
            steps = self._steps[:, 0]
        packed = torch.nn.Parameter(pack_arrived(dense, steps, self._exact), requires_grad=False)
        for name, value in self._attributes.items():
            setattr(packed, name, value)
        packed.weight_loader = self  # type: ignore[attr-defined]
        self.packed = packed
        self._layer.weight = packed


def finish(layer: Any) -> None:
    """Take a layer's weight for complete: nothing may come after this. Raises EngineRefusal if it is not.

    A layer that shares the parameter of another one gets the packed weight of that.
    """
    arriving = getattr(layer.weight, "weight_loader", None)
    if not isinstance(arriving, ArrivingWeight):  # tied to a dense weight
        return
    if arriving.missing:
        raise EngineRefusal(
            f"the checkpoint lacks {arriving.missing:,} of the {layer.weight.numel():,} weights of a "
            f"{type(layer).__name__} {tuple(layer.weight.shape)}",
            "check the folder with `neuzip verify`, and leave out `--load-format dummy`",
        )
    arriving.is_closed = True
    layer.weight = arriving.packed
    weights = (
        layer.weight.packed if isinstance(layer.weight, PackedWeight | GridWeight) else layer.weight.data
    )
    layer.neuzip_held = weights
    layer.register_buffer("neuzip_id", hold(weights), persistent=False)


def fill_padding(layer: Any, dense: torch.Tensor) -> None:
    """Make a vocabulary's rows of padding, which SGLang fills with zeros, copies of its last row.

    SGLang cuts the logits of such rows off. In rows of zeros each weight would be an escape, and Hopper's
    kernel for many rows does not take a matrix with so many.
    """
    indices = getattr(layer, "shard_indices", None)
    if indices is None or layer.num_added_embeddings:
        return
    rows = indices.num_org_elements
    if 0 < rows < dense.shape[0]:
        dense[rows:] = dense[rows - 1]


class _WrittenRegions:
    """The regions of a weight that have been written, each counted once."""

    def __init__(self) -> None:
        self._regions: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()

    @property
    def count(self) -> int:
        """How many values that is, as long as no regions overlap."""
        return sum(math.prod(shape) for _, shape, _ in self._regions)

    def into(self, weight: torch.Tensor) -> _WritesNoted:
        """A context in which writes to `weight` are noted."""
        return _WritesNoted(weight, self._regions)


class _WritesNoted(TorchDispatchMode):
    def __init__(
        self, weight: torch.Tensor, regions: set[tuple[int, tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        super().__init__()
        self._address, self._regions = weight.untyped_storage().data_ptr(), regions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _WRITES and args[0].numel() and args[0].untyped_storage().data_ptr() == self._address:
            self._regions.add((args[0].storage_offset(), tuple(args[0].shape), tuple(args[0].stride())))
        return result


_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""The operations by which SGLang's loaders write."""
