"""The tensors of weight files that an engine found: decoded a few at a time, in the order of the files.

Only the weight files are needed, as each container tells its own tensors: engines download files of a Hub
repository by patterns, and which ones of the folder neuzip/ come is up to them.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import safetensors
import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError
from neuzip.formats.checkpoint import Checkpoint
from neuzip.formats.container import is_container_metadata
from neuzip.formats.records import QuantizedRecord, TernaryRecord
from neuzip.kernels.grid import Grid
from neuzip.runtime.read import ReadAhead, read_grid
from neuzip.runtime.serving import STEPS

GROUP = 128 << 20
"""Bytes of tensors that are decoded at once. A larger tensor is a group of its own.

Two groups are in memory: the next one is read while one is in use.
"""

_SHARD = re.compile(r"(?P<before>.*)-\d{5}-of-(?P<count>\d{5})\.safetensors\Z")


def is_container_file(path: str | Path) -> bool:
    """Whether a .safetensors file is a container of neuzip. Raises FormatError for a truncated file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return is_container_metadata(file.metadata() or {})
    except safetensors.SafetensorError as error:
        raise FormatError(path, f"is no complete safetensors file: {error}", hint="copy it again") from error


def with_all_shards(files: Sequence[str]) -> list[Path]:
    """The weight files and the other shards of the same numbering, sorted.

    The index of a compressed folder does not name a shard whose tensors are all stored in other shards.
    """
    paths = {Path(file) for file in files}
    for path in list(paths):
        match = _SHARD.match(path.name)
        if match is not None:
            number = "[0-9]" * 5
            pattern = f"{glob.escape(match['before'])}-{number}-of-{match['count']}.safetensors"
            paths |= set(path.parent.glob(pattern))
    return sorted(paths)


def opened(files: Sequence[str]) -> FolderSource:
    """The source of some weight files of one folder, which the caller closes. Raises FormatError."""
    paths = with_all_shards(files)
    root = paths[0].parent
    return FolderSource(Checkpoint(root, root, tuple(path.name for path in paths), ()))


def decoded_tensors(
    source: FolderSource, device: torch.device, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each wanted tensor, decoded on `device`. Raises FormatError for damaged files.

    A matrix that is stored quantized has the steps of its rows as the attribute STEPS.
    """
    tensors = [tensor for tensor in source.tensors() if is_wanted(tensor.name)]
    with Workers() as workers, ReadAhead(source, workers) as reading:
        for group, values in reading.groups(_groups(tensors), device):
            values.reverse()
            for tensor in group:  # which are freed one by one
                value = values.pop()
                if (steps := row_steps(source, tensor)) is not None:
                    setattr(value, STEPS, steps)
                yield tensor.name, value


def head_of_its_own(source: FolderSource) -> str | None:
    """The name of an LM head whose values are not those of the embedding; None if there is none."""
    head, embedding = (
        next((t for t in source.tensors() if t.name.endswith(name)), None)
        for name in ("lm_head.weight", "embed_tokens.weight")
    )
    if head is None or embedding is None or head.record is None or embedding.record is None:
        return None
    return head.name if head.record.checksum != embedding.record.checksum else None


def _groups(tensors: Sequence[SourceTensor]) -> Iterator[list[SourceTensor]]:
    """Tensors in their order, as many as GROUP bytes have."""
    group: list[SourceTensor] = []
    left = GROUP
    for tensor in tensors:
        if group and tensor.info.nbytes > left:
            yield group
            group, left = [], GROUP
        group.append(tensor)
        left -= tensor.info.nbytes
    if group:
        yield group


def attach_steps(tensors: Mapping[str, torch.Tensor], file: str | Path) -> None:
    """Give matrices that a compressed file has quantized the steps of their rows as the attribute STEPS."""
    with FolderSource(file) as source:  # this file alone: a folder of many shards is loaded file by file
        for tensor in source.tensors():
            if (steps := row_steps(source, tensor)) is not None:
                setattr(tensors[tensor.name], STEPS, steps)


def row_steps(source: FolderSource, tensor: SourceTensor) -> torch.Tensor | None:
    """The step of each row of a matrix that is stored quantized, fp32 [rows].

    None for other tensors, and for a grid with factors of columns. Raises FormatError.
    """
    record, shape = source.resolve(tensor).record, tensor.info.shape
    if not isinstance(record, QuantizedRecord) or record.column_factors or len(shape) != 2:
        return None
    grid = read_grid(source, tensor)
    return Grid(grid.step, grid.rows).steps((shape[0], 1))[:, 0]


def ternary_count(source: FolderSource) -> int:
    """How many tensors are stored ternary."""
    return sum(isinstance(source.resolve(t).record, TernaryRecord) for t in source.tensors())


def tensor_names(files: Sequence[str]) -> set[str]:
    """The names of all tensors in weight files, plain or compressed. Raises FormatError."""
    if any(is_container_file(file) for file in files):
        with opened(files) as source:
            return {tensor.name for tensor in source.tensors()}
    names: set[str] = set()
    for path in files:
        with safetensors.safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names
