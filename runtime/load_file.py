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

import numpy as np
import safetensors
import torch
from safetensors import SafetensorError

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.errors import UsageError
from neuzip.formats.checkpoint import Checkpoint
from neuzip.formats.container import is_container_metadata
from neuzip.runtime.devices import require_place
from neuzip.runtime.dtypes import shaped, torch_dtype
from neuzip.runtime.read import read_range, read_tensor, read_tensors

TORCH = ("pt", "torch", "pytorch")


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device | None = "cpu",
    *,
    backend: str = "mmap",
    verify: bool = True,
) -> dict[str, torch.Tensor]:
    """All tensors of a .safetensors file, plain or compressed, by name, like `safetensors.torch.load_file`.

    `device` is a value that safetensors accepts, or a torch.device. neuzip decodes a compressed file on that
    device. `verify` compares tensors with their checksums. Raises FormatError for a damaged compressed file,
    and the errors of safetensors for a plain one.
    """
    with safe_open(filename, "pt", device, backend=backend, verify=verify) as file:
        if isinstance(file, CompressedFile):
            return file.get_tensors()
    from safetensors.torch import load_file as load_plain_file

    return load_plain_file(filename, _for_safetensors(device), **_options(backend))


def _for_safetensors(device: str | int | torch.device | None) -> str | int:
    """A device as safetensors takes it."""
    if device is None:
        return "cpu"
    return str(device) if isinstance(device, torch.device) else device


def safe_open(
    filename: str | os.PathLike[str],
    framework: str,
    device: str | int | torch.device | None = "cpu",
    *,
    backend: str = "mmap",
    verify: bool = True,
) -> Any:
    """Open a .safetensors file, plain or compressed, to read tensors and slices; as `safetensors.safe_open`.

    For a plain file, the result is the object of safetensors. For a compressed file, `verify` compares
    tensors with their checksums. For a slice, neuzip compares only streams that it reads whole. Damage in
    another stream either makes decoding fail or gives wrong numbers without an error. `backend` applies to
    plain files only. Raises FormatError for a damaged compressed file, UsageError if `framework` is not torch
    or the GPU does not exist, and the errors of safetensors for a plain file.
    """
    # A container is a safetensors file: safetensors judges the arguments, and says which kind of file it is.
    device = _for_safetensors(device)
    plain: Any = safetensors.safe_open(filename, framework=framework, device=device, **_options(backend))
    if not is_container_metadata(plain.metadata() or {}):
        return plain
    plain.__exit__(None, None, None)
    if framework not in TORCH:
        raise UsageError(f"{filename}: is compressed, and can only be opened with the framework 'pt'")
    # A number is a GPU's, which torch.device() only says where there is one.
    require_place(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
    return CompressedFile(Path(filename), device, verify)


def _options(backend: str) -> dict[str, Any]:
    """Keywords that older versions of safetensors do not know, where they are needed."""
    return {} if backend == "mmap" else {"backend": backend}


class _Opened:
    """A file, open for as long as somebody holds it: a slice may outlive what it is of."""

    def __init__(self, path: Path) -> None:
        self.source = FolderSource(Checkpoint(path, path.parent, (path.name,), ()))
        self.workers = Workers()

    def __del__(self) -> None:
        if hasattr(self, "source"):
            self.source.close()


class CompressedFile:
    """What `safe_open` gives for a compressed file."""

    def __init__(self, path: Path, device: str | int, verify: bool) -> None:
        self._opened: _Opened | None = _Opened(path)
        self._header = self._opened.source.header(path.name)
        self._tensors = {t.name: t for t in self._opened.source.tensors(path.name)}
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
        return CompressedSlice(self._open(), self._find(name), self._device, self._verify)

    def _read(self, tensors: Sequence[SourceTensor]) -> list[torch.Tensor]:
        opened = self._open()
        return read_tensors(
            opened.source, tensors, torch.device(self._device), opened.workers, verify=self._verify
        )

    def _find(self, name: str) -> SourceTensor:
        self._open()
        if name not in self._tensors:
            raise SafetensorError(f"File does not contain tensor {name}")
        return self._tensors[name]

    def _open(self) -> _Opened:
        if self._opened is None:
            raise SafetensorError("File is closed")
        return self._opened

    def __enter__(self) -> CompressedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._opened = None


class CompressedSlice:
    """A tensor that is read when it is indexed, as torch does; what leading indices leave out is not.

    `verify` compares with checksums what is read whole: the tensor, or streams of it. A stream of which only
    some blocks are read has no checksum of its own for them.
    """

    def __init__(self, opened: _Opened, tensor: SourceTensor, device: str | int, verify: bool) -> None:
        self._opened, self._tensor, self._device, self._verify = opened, tensor, device, verify

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self._tensor.info.shape)

    def get_dtype(self) -> str:
        """Its dtype as safetensors writes it: "BF16"."""
        return self._tensor.info.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        source = self._opened.source
        info, dtype = self._tensor.info, torch_dtype(source, self._tensor)
        indices = index if isinstance(index, tuple) else (index,)
        if all(_is_plain(i) for i in indices):
            torch.empty(info.shape, dtype=dtype, device="meta")[index]  # raises what torch raises
            first, shape, indices = _leading(indices, info.shape)
        else:
            first, shape = 0, list(info.shape)
        start, size = first * dtype.itemsize, math.prod(shape) * dtype.itemsize
        part = self._rows(start, start + size, dtype, tuple(shape))[indices].contiguous()
        return part.to(torch.device(self._device))

    def _rows(self, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Bytes `start` to `stop` of the tensor, as `dtype` and `shape`, on the CPU. Raises FormatError."""
        source, workers = self._opened.source, self._opened.workers
        if stop - start == self._tensor.info.nbytes:
            return read_tensor(source, self._tensor, workers, verify=self._verify).view(shape)
        target = source.resolve(self._tensor)
        data = read_range(source.reader(target, check=self._verify), target, start, stop, workers)
        return shaped(data, dtype, shape)


def _is_plain(index: object) -> bool:
    """Whether an index is a number, a slice, an ellipsis or None, and no mask or list of numbers."""
    if isinstance(index, bool | torch.Tensor):
        return False
    return index is None or index is ... or isinstance(index, slice | int | np.integer)


def _leading(indices: Sequence[Any], shape: Sequence[int]) -> tuple[int, list[int], tuple[Any, ...]]:
    """The contiguous part of a tensor in which all that is indexed lies, and the indices within it.

    The part is given by its first element and its shape. Indices must be valid.

    >>> _leading((2, slice(3, 5), slice(0, 1)), (4, 8, 10))
    (190, [2, 10], (slice(None, None, 1), slice(0, 1, None)))
    """
    left, rest, first = list(shape), list(indices), 0
    while rest and left and isinstance(rest[0], int | np.integer):
        row = range(left.pop(0))[operator.index(rest.pop(0))]
        first += row * math.prod(left)
    if rest and left and isinstance(rest[0], slice):
        start, stop, step = rest[0].indices(left[0])
        first += start * math.prod(left[1:])
        left[0] = max(stop - start, 0)
        rest[0] = slice(None, None, step)
    return first, left, tuple(rest)
