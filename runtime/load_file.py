"""`load_file` and `safe_open` of safetensors, for compressed files too: change the import, and nothing else.

A plain file is left to safetensors itself. A compressed one shows its tensors as they were before it was
compressed, under their old names, and the old metadata.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError

from neuzip.compress.source import SourceTensor, TensorSource
from neuzip.compress.workers import Workers
from neuzip.errors import UsageError
from neuzip.formats.checkpoint import Checkpoint
from neuzip.formats.container import is_container_metadata

from .tensors import read_range, read_tensors, shaped, torch_dtype

TORCH = ("pt", "torch", "pytorch")


def load_file(
    filename: str | os.PathLike[str], device: str | int = "cpu", *, backend: str = "mmap", verify: bool = True
) -> dict[str, torch.Tensor]:
    """All tensors of a .safetensors file, plain or compressed, by name; as `safetensors.torch.load_file`.

    For a CUDA `device` a compressed file is decoded there. `verify` compares with its checksums. Raises
    FormatError for a damaged one, and what safetensors raises.
    """
    with safe_open(filename, "pt", device, backend=backend, verify=verify) as file:
        if isinstance(file, CompressedFile):
            return file.get_tensors()
    from safetensors.torch import load_file as load_plain_file

    return load_plain_file(filename, device, **_options(backend))


def safe_open(
    filename: str | os.PathLike[str],
    framework: str,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    verify: bool = True,
) -> Any:
    """Open a .safetensors file, plain or compressed, to read tensors and slices; as `safetensors.safe_open`.

    A plain file is safetensors' own object. `verify` compares whole tensors of a compressed one with their
    checksums; slices are not compared. `backend` is for plain files. Raises what safetensors raises,
    FormatError for a damaged compressed file, and UsageError for one with another framework than torch.
    """
    # A container is a safetensors file: safetensors judges the arguments, and says which kind of file it is.
    plain: Any = safetensors.safe_open(filename, framework=framework, device=device, **_options(backend))
    if not is_container_metadata(plain.metadata() or {}):
        return plain
    plain.__exit__(None, None, None)
    if framework not in TORCH:
        raise UsageError(f"{filename}: is compressed, and can only be opened with the framework 'pt'")
    return CompressedFile(Path(filename), device, verify)


def _options(backend: str) -> dict[str, Any]:
    """Keywords that older versions of safetensors do not know, where they are needed."""
    return {} if backend == "mmap" else {"backend": backend}


class CompressedFile:
    """What `safe_open` gives for a compressed file."""

    def __init__(self, path: Path, device: str | int, verify: bool) -> None:
        self._source: TensorSource | None = TensorSource(Checkpoint(path, path.parent, (path.name,), ()))
        self._header = self._source.header(path.name)
        self._tensors = {t.name: t for t in self._source.tensors(path.name)}
        self._workers = Workers()
        self._device = device
        self._verify = verify

    def keys(self) -> list[str]:
        """The tensors' names in alphabetical order."""
        self._open()
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """The tensors' names in the order of the original file."""
        self._open()
        return list(self._tensors)

    def metadata(self) -> dict[str, str] | None:
        """The metadata of the original file, or None."""
        self._open()
        return dict(self._header.metadata) or None

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, on the device. Raises FormatError if it is damaged."""
        return self._read([self._find(name)])[0]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, on the device. Raises FormatError if one is damaged."""
        return dict(zip(self._tensors, self._read(list(self._tensors.values())), strict=True))

    def get_slice(self, name: str) -> CompressedSlice:
        """A tensor of which parts can be read: `get_slice("embed.weight")[10:20]`."""
        return CompressedSlice(self._open(), self._find(name), self._workers, self._device)

    def _read(self, tensors: Sequence[SourceTensor]) -> list[torch.Tensor]:
        device = torch.device(self._device)
        return read_tensors(self._open(), tensors, device, self._workers, verify=self._verify)

    def _find(self, name: str) -> SourceTensor:
        self._open()
        if name not in self._tensors:
            raise SafetensorError(f"File does not contain tensor {name}")
        return self._tensors[name]

    def _open(self) -> TensorSource:
        if self._source is None:
            raise SafetensorError("File is closed")
        return self._source

    def __enter__(self) -> CompressedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._source is not None:
            self._workers.__exit__(kind, error, trace)
            self._source.close()
            self._source = None

    def __del__(self) -> None:  # safetensors' own is often used without `with`
        source = getattr(self, "_source", None)
        if source is not None:
            source.close()


class CompressedSlice:
    """A tensor that is read when it is indexed, as torch does; what leading indices leave out is not."""

    def __init__(
        self, source: TensorSource, tensor: SourceTensor, workers: Workers, device: str | int
    ) -> None:
        self._source, self._tensor, self._workers, self._device = source, tensor, workers, device

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self._tensor.info.shape)

    def get_dtype(self) -> str:
        """Its dtype as safetensors writes it: "BF16"."""
        return self._tensor.info.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        info, dtype = self._tensor.info, torch_dtype(self._source, self._tensor)
        indices = index if isinstance(index, tuple) else (index,)
        if all(_is_plain(i) for i in indices):
            torch.empty(info.shape, dtype=dtype, device="meta")[index]  # raises what torch raises
            first, shape, indices = _leading(indices, info.shape)
        else:
            first, shape = 0, list(info.shape)
        start, size = first * dtype.itemsize, math.prod(shape) * dtype.itemsize
        target = self._source.resolve(self._tensor)
        data = read_range(self._source.reader(target), target, start, start + size, self._workers)
        part = shaped(data, dtype, tuple(shape))[indices].contiguous()
        return part.to(torch.device(self._device))


def _is_plain(index: object) -> bool:
    """Whether an index is a number, a slice, an ellipsis or None, and no mask or list of numbers."""
    if isinstance(index, bool | torch.Tensor):
        return False
    return index is None or isinstance(index, slice) or index is ... or hasattr(index, "__index__")


def _leading(indices: Sequence[Any], shape: Sequence[int]) -> tuple[int, list[int], tuple[Any, ...]]:
    """The contiguous part of a tensor in which all that is indexed lies, and the indices within it.

    The part is given by its first element and its shape. Indices must be valid.

    >>> _leading((2, slice(3, 5), slice(0, 1)), (4, 8, 10))
    (190, [2, 10], (slice(None, None, 1), slice(0, 1, None)))
    """
    left, rest, first = list(shape), list(indices), 0
    while rest and left and hasattr(rest[0], "__index__"):
        row = range(left.pop(0))[operator.index(rest.pop(0))]
        first += row * math.prod(left)
    if rest and left and isinstance(rest[0], slice):
        start, stop, step = rest[0].indices(left[0])
        first += start * math.prod(left[1:])
        left[0] = max(stop - start, 0)
        rest[0] = slice(None, None, step)
    return first, left, tuple(rest)
