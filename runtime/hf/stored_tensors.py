"""Tensors of a checkpoint for transformers, decoded when it asks for their values, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.ternary_weights import is_ternary
from neuzip.compress.workers import Workers
from neuzip.errors import NeuzipError
from neuzip.formats.records import QuantizedRecord, TernaryRecord
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.runtime.activations import ACTIVATIONS_ENTRY
from neuzip.runtime.dtypes import torch_dtype
from neuzip.runtime.read import read_grid, read_tensor, read_tensors, read_ternary
from neuzip.runtime.residency import DTYPES, WORTH
from neuzip.runtime.weights import BitWeight, GridWeight
from neuzip.runtime.weights.base import SMALLEST
from neuzip.runtime.weights.packed import can_be_packed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GROUP = 256 << 20
"""Bytes of tensors, decoded, that a GPU decodes at once while it compresses a model in memory."""


class StoredTensors(dict[str, Any]):
    """Tensors by name, each read when its values are asked for.

    `ternary_mode` is the activation mode of ternary layers where neither a caller nor config.json says one.
    """

    def __init__(self, tensors: Mapping[str, Any], ternary_mode: str) -> None:
        super().__init__(tensors)
        self.ternary_mode = ternary_mode


def ternary_mode(source: FolderSource, tensors: Iterable[SourceTensor]) -> str:
    """The mode for ternary tensors where nothing says one: "none" if they were ternary before compression."""
    records = [target.record for target in map(source.resolve, tensors)]
    by_compression = any(
        isinstance(record, TernaryRecord) and record.quantizer != "exact" for record in records
    )
    return "b1.58" if by_compression else "none"


def record_activations(
    config: PreTrainedConfig, source: FolderSource, tensors: Iterable[SourceTensor]
) -> None:
    """Have a config say what the config.json beside ternary weights says of activations. Raises FormatError.

    The config may have been made of the original's config.json, which does not.
    """
    if any(is_ternary(target) for target in map(source.resolve, tensors)):
        activations = ACTIVATIONS_ENTRY.read(source.checkpoint.root)
        if activations is not None:
            ACTIVATIONS_ENTRY.set(config, activations)


@contextmanager
def stored_tensors(
    source: FolderSource,
    tensors: list[SourceTensor],
    place: torch.device | None,
    *,
    verify: bool = True,
    in_groups: bool = False,
    residency: str = "dense",
) -> Iterator[StoredTensors]:
    """Tensors by name, for `state_dict` of `from_pretrained`: on a GPU decoded at once, else when asked for.

    A `place` of None is wherever transformers asks for them. `in_groups` is for models that are compressed in
    memory: tensors are decoded when asked for on GPUs too, with some of those that will be asked for next,
    and ternary matrices are a BitWeight. Quantized matrices are then a GridWeight if the `residency` is
    "packed", and an AnsWeight if it is "ans". What is found damaged meanwhile is raised as FormatError in the
    end, whatever transformers makes of it.
    """
    failures: list[NeuzipError] = []
    with Workers() as workers:
        ternary: dict[str, SourceTensor] = {}
        mode = ternary_mode(source, tensors) if in_groups else "none"
        if in_groups:
            matrices = [t for t in tensors if BitWeight.can_be(t.info.shape)]
            ternary = {t.name: t for t in matrices if is_ternary(source.resolve(t))}
            tensors = [t for t in tensors if t.name not in ternary]
        of_residency = _QUANTIZED.get(residency)
        quantized = [t for t in tensors if of_residency and of_residency.can_be(source, t)]
        if in_groups and (place is None or place.type == "cuda"):
            apart = {t.name for t in quantized if of_residency is _AnsTensor}  # which need no values
            together = [t for t in tensors if t.name not in apart]
            groups = _TensorGroups(source, together, place, workers, failures, verify)
            stored: dict[str, Any] = {
                t.name: _PlacedTensor(source, t, partial(groups.take, t)) for t in tensors
            }
        elif place is not None and place.type == "cuda":
            read = read_tensors(source, tensors, place, workers, verify=verify)
            loaded = {t.name: [data] for t, data in zip(tensors, read, strict=True)}
            del read
            stored = {t.name: _PlacedTensor(source, t, partial(_hand_over, loaded[t.name])) for t in tensors}
        else:
            stored = {t.name: _EncodedTensor(source, t, workers, failures, verify) for t in tensors}
        if of_residency:
            stored |= {
                t.name: of_residency(source, t, stored[t.name], place, failures, verify) for t in quantized
            }
        stored |= {
            name: _TernaryTensor(source, tensor, place, failures, verify) for name, tensor in ternary.items()
        }
        try:
            yield StoredTensors(stored, mode)
        except Exception as error:
            if failures:
                raise failures[0] from error
            raise
        if failures:
            raise failures[0]


class _EncodedTensor:
    """A tensor of which transformers knows the kind, and that is decoded when it asks for the values.

    Version 5 does so with `tensor[...]`, as it does with the slices of safetensors, 4.57 with
    `tensor.to(device)`. What goes wrong then is noted in `failures`, as transformers would wrap it up.
    """

    def __init__(
        self,
        source: FolderSource,
        tensor: SourceTensor,
        workers: Workers,
        failures: list[NeuzipError],
        verify: bool,
    ) -> None:
        self._source, self._tensor, self._workers, self._failures = source, tensor, workers, failures
        self._verify = verify
        self.dtype = torch_dtype(source, tensor)
        self.shape = torch.Size(tensor.info.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, *target: Any, **options: Any) -> torch.Tensor:
        return self._read().to(*target, **options)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read()[index]

    def _read(self) -> torch.Tensor:
        try:
            return read_tensor(self._source, self._tensor, self._workers, verify=self._verify)
        except NeuzipError as failure:
            self._failures.append(failure)
            raise


class _TensorGroups:
    """Tensors on the GPUs that ask for them, decoded a few at a time: those that will be wanted next, too.

    On `place`, if that is not None, whatever device is asked for: without accelerate transformers knows none.
    """

    def __init__(
        self,
        source: FolderSource,
        tensors: list[SourceTensor],
        place: torch.device | None,
        workers: Workers,
        failures: list[NeuzipError],
        verify: bool,
    ) -> None:
        from transformers.core_model_loading import dot_natural_key

        self._source, self._workers, self._failures = source, workers, failures
        self._place, self._verify = place, verify
        in_order = sorted(tensors, key=lambda t: dot_natural_key(t.name))
        self._waiting = {t.name: t for t in in_order}
        self._ready: dict[str, torch.Tensor] = {}

    def take(self, tensor: SourceTensor, device: torch.device) -> torch.Tensor:
        """A tensor on `device`, which is then the caller's alone. Raises FormatError."""
        device = device if self._place is None else self._place
        if tensor.name not in self._ready:
            group = [tensor, *self._next(tensor)] if device.type == "cuda" else [tensor]
            try:
                read = read_tensors(self._source, group, device, self._workers, verify=self._verify)
            except NeuzipError as failure:
                self._failures.append(failure)
                raise
            for t in group:
                self._waiting.pop(t.name, None)
            self._ready |= {t.name: data for t, data in zip(group, read, strict=True)}
        return self._ready.pop(tensor.name).to(device)

    def _next(self, tensor: SourceTensor) -> Iterator[SourceTensor]:
        """Tensors that wait behind one, as many as fit into a group with it."""
        left = GROUP - tensor.info.nbytes
        names = iter(self._waiting)
        if tensor.name in self._waiting:
            for name in names:
                if name == tensor.name:
                    break
        for name in names:
            left -= self._waiting[name].info.nbytes
            if left < 0:
                return
            yield self._waiting[name]


def _hand_over(loaded: list[torch.Tensor], _: torch.device) -> torch.Tensor:
    return loaded.pop()


class _PlacedTensor:
    """A tensor that transformers gets where it shall stay, when it asks for the values.

    Version 5 does so once, with `tensor[...].to(device=..., dtype=...)`, and takes what it is given. `take`
    gives it up, so that another dtype takes the place of the first.
    """

    def __init__(
        self, source: FolderSource, tensor: SourceTensor, take: Callable[[torch.device], torch.Tensor]
    ) -> None:
        self.dtype, self.shape = torch_dtype(source, tensor), torch.Size(tensor.info.shape)
        self._take = take

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(
        self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None, **_: object
    ) -> torch.Tensor:
        return self._take(torch.device("cpu" if device is None else device)).to(dtype=dtype)

    def __getitem__(self, index: Any) -> Any:
        assert index is ...
        return self


class _CompressedTensor:
    """A tensor that transformers gets as a compressed weight, as `_PlacedTensor` gives others."""

    def __init__(
        self,
        source: FolderSource,
        tensor: SourceTensor,
        place: torch.device | None,
        failures: list[NeuzipError],
        verify: bool,
    ) -> None:
        self._source, self._tensor, self._place, self._failures = source, tensor, place, failures
        self._verify = verify
        self.dtype, self.shape = torch_dtype(source, tensor), torch.Size(tensor.info.shape)

    def is_floating_point(self) -> bool:
        return True

    def to(
        self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None, **_: object
    ) -> torch.Tensor:
        place = self._place or torch.device("cpu" if device is None else device)
        try:
            return self._compressed(place, dtype or self.dtype)
        except NeuzipError as failure:
            self._failures.append(failure)
            raise

    def __getitem__(self, index: Any) -> Any:
        assert index is ...
        return self

    def _compressed(self, place: torch.device, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError


class _TernaryTensor(_CompressedTensor):
    """A ternary matrix that transformers gets as a BitWeight."""

    def _compressed(self, place: torch.device, dtype: torch.dtype) -> torch.Tensor:
        ternary = read_ternary(self._source, self._tensor, place, verify=self._verify)
        return BitWeight.of(TernaryWeight.of(ternary), dtype)


class _QuantizedTensor(_CompressedTensor):
    """A quantized tensor. `stored` gives its values, where they stay dense: for dtypes, and for size."""

    def __init__(
        self,
        source: FolderSource,
        tensor: SourceTensor,
        stored: _EncodedTensor | _PlacedTensor,
        place: torch.device | None,
        failures: list[NeuzipError],
        verify: bool,
    ) -> None:
        super().__init__(source, tensor, place, failures, verify)
        self._stored = stored


class _GridTensor(_QuantizedTensor):
    """A quantized matrix that transformers gets as a GridWeight."""

    @staticmethod
    def can_be(source: FolderSource, tensor: SourceTensor) -> bool:
        """Whether a tensor is stored quantized, and can be packed in memory as it is."""
        shape = tensor.info.shape
        return len(shape) == 2 and can_be_packed(*shape) and _is_quantized(source, tensor)

    def _compressed(self, place: torch.device, dtype: torch.dtype) -> torch.Tensor:
        dense = self._stored.to(device=place, dtype=dtype)
        if dense.dtype not in DTYPES:
            return dense
        grid = read_grid(self._source, self._tensor, verify=self._verify)
        weight = GridWeight.if_worthwhile(dense, grid)
        return dense if weight is None else weight


class _AnsTensor(_QuantizedTensor):
    """Quantized matrices that transformers gets as an AnsWeight: as the container has them."""

    @staticmethod
    def can_be(source: FolderSource, tensor: SourceTensor) -> bool:
        """Whether a tensor is stored quantized, and can stay in memory as it is coded."""
        info = tensor.info
        return len(info.shape) in (2, 3) and info.numel >= SMALLEST and _is_quantized(source, tensor)

    def _compressed(self, place: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if dtype != self.dtype or dtype not in DTYPES:
            return self._stored.to(device=place, dtype=dtype)
        from neuzip.runtime.read_coded import read_ans  # needs Triton

        weight = read_ans(self._source, self._tensor, place, verify=self._verify)
        if weight.stored_bytes > WORTH * self._tensor.info.nbytes:
            return weight.dense()
        return weight


def _is_quantized(source: FolderSource, tensor: SourceTensor) -> bool:
    return isinstance(source.resolve(tensor).record, QuantizedRecord)


_QUANTIZED: dict[str, type[_GridTensor] | type[_AnsTensor]] = {"packed": _GridTensor, "ans": _AnsTensor}
"""What quantized tensors are in each residency that has a form for them."""
