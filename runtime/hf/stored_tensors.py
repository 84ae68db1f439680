"""Tensors of a checkpoint for transformers, decoded when it asks for their values, a few at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
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
from neuzip.runtime.read import ReadAhead, read_grid, read_tensor, read_tensors, read_ternary
from neuzip.runtime.residency import DTYPES, WORTH
from neuzip.runtime.weights import BitWeight, GridWeight
from neuzip.runtime.weights.base import SMALLEST
from neuzip.runtime.weights.packed import can_be_packed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GROUP = 256 << 20
"""Bytes of tensors, decoded, that are in memory at once while transformers asks for them one by one.

Half of them are being taken while the other half is read.
"""


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

    A `place` of None is wherever transformers asks for them: each device decodes the tensors that it is asked
    for, with some of those that will be asked for next. `in_groups` is for models that are compressed in
    memory: one GPU does the same then, and ternary matrices are a BitWeight. Quantized matrices are then a
    GridWeight if the `residency` is "packed", and an AnsWeight if it is "ans". What is found damaged
    meanwhile is raised as FormatError in the end, whatever transformers makes of it.
    """
    failures: list[NeuzipError] = []
    with Workers() as workers, ExitStack() as stack:
        ternary: dict[str, SourceTensor] = {}
        mode = ternary_mode(source, tensors) if in_groups else "none"
        if in_groups:
            matrices = [t for t in tensors if BitWeight.can_be(t.info.shape)]
            ternary = {t.name: t for t in matrices if is_ternary(source.resolve(t))}
            tensors = [t for t in tensors if t.name not in ternary]
        of_residency = _QUANTIZED.get(residency)
        quantized = [t for t in tensors if of_residency and of_residency.can_be(source, t)]
        if place is None or (in_groups and place.type == "cuda"):
            apart = {t.name for t in quantized if of_residency is _AnsTensor}  # which need no values
            together = [t for t in tensors if t.name not in apart]
            groups = _TensorGroups(source, together, place, workers, failures, verify)
            stack.callback(groups.close)
            stored: dict[str, Any] = {
                t.name: _PlacedTensor(source, t, partial(groups.take, t)) for t in tensors
            }
        elif place.type == "cuda":
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
    For several threads, as transformers fills models with four.
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

        self._failures, self._place = failures, place
        self._in_order = sorted(tensors, key=lambda t: dot_natural_key(t.name))
        self._numbers = {t.name: number for number, t in enumerate(self._in_order)}
        self._waiting = set(self._numbers)
        self._ready: dict[str, torch.Tensor] = {}
        self._reading = ReadAhead(source, workers, verify=verify)
        self._coming: tuple[list[SourceTensor], Future[list[torch.Tensor]]] | None = None
        self._lock = threading.Lock()

    def take(self, tensor: SourceTensor, device: torch.device) -> torch.Tensor:
        """A tensor on `device`, which is then the caller's alone. Raises FormatError."""
        with self._lock:
            return self._take(tensor, device if self._place is None else self._place)

    def close(self) -> None:
        """End the thread that reads."""
        self._reading.close()

    def _take(self, tensor: SourceTensor, device: torch.device) -> torch.Tensor:
        if tensor.name not in self._ready:
            if self._coming is None or all(t.name != tensor.name for t in self._coming[0]):
                if self._coming is not None:
                    self._arrive()
                room = GROUP // 2 - tensor.info.nbytes
                self._begin([tensor, *self._behind(tensor, room, 0)] if _is_gpu(device) else [tensor], device)
            last = self._arrive()
            if _is_gpu(device):
                self._begin(self._behind(last, GROUP // 2, 1), device)
        return self._ready.pop(tensor.name).to(device)

    def _behind(self, tensor: SourceTensor, nbytes: int, least: int) -> list[SourceTensor]:
        """Tensors that wait behind one: `least` of them, and more if they have at most `nbytes`."""
        group: list[SourceTensor] = []
        number = self._numbers.get(tensor.name)
        for behind in self._in_order[number + 1 :] if number is not None else []:
            if behind.name in self._waiting:
                nbytes -= behind.info.nbytes
                if nbytes < 0 and len(group) >= least:
                    break
                group.append(behind)
        return group

    def _begin(self, group: list[SourceTensor], device: torch.device) -> None:
        """Begin to read a group."""
        self._waiting -= {t.name for t in group}
        self._coming = (group, self._reading.begin(group, device)) if group else None

    def _arrive(self) -> SourceTensor:
        """Wait for the group that is coming; its last tensor. Raises FormatError."""
        assert self._coming is not None
        (group, values), self._coming = self._coming, None
        try:
            self._ready |= {t.name: data for t, data in zip(group, values.result(), strict=True)}
        except NeuzipError as failure:
            self._failures.append(failure)
            raise
        return group[-1]


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _hand_over(loaded: list[torch.Tensor], _: torch.device) -> torch.Tensor:
    return loaded.pop()


class _PlacedTensor:
    """A tensor that transformers gets where it shall stay, when it asks for the values.

    Version 5 does so once, with `tensor[...].to(device=..., dtype=...)`, and takes what it is given. `take`
    gives it up, so that another dtype takes the place of the first. A part of it is decoded on the CPU.
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
        return self if index is ... else self._take(torch.device("cpu"))[index]


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
