"""The checkpoint that a delta is made against, and is restored with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from neuzip.errors import NeuzipError
from neuzip.formats.container import Stream
from neuzip.formats.manifest import TensorRecord
from neuzip.kernels.float_fields import FORMATS, Bits, Census, plane_bytes

from . import delta
from .lossless import OVERHEAD, Map, Read
from .source import Bytes, SourceTensor, TensorSource, digest

if TYPE_CHECKING:
    from .workers import Workers

SMALLEST = 4096
"""Bytes of a changed tensor from which on its difference is coded; a smaller one is stored as it is."""

LARGEST_CONFIG = 1 << 20
"""Bytes of a config.json that is looked into for a name."""


@dataclass(frozen=True)
class Difference:
    """A tensor's record and streams; none if it is the base's. Coded alone it takes `least` bytes or more."""

    record: TensorRecord
    streams: dict[str, Stream]
    least: int = 0

    @property
    def nbytes(self) -> int:
        """What the streams take."""
        return sum(stream.nbytes for stream in self.streams.values())


class DeltaBase:
    """The tensors of a base beside those of `source`. `name` is what people call it; see `name_of`."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self.source = source
        self.name = name
        self._tensors: dict[tuple[str, str], list[SourceTensor]] = {}
        for tensor in source.tensors():
            self._tensors.setdefault((_folder(tensor.file), tensor.name), []).append(tensor)

    def sizes(self) -> dict[str, int]:
        """The sizes of its weight files as they are restored, to know it by."""
        headers = {file: self.source.header(file) for file in self.source.checkpoint.weights}
        return {file: len(header.raw) + header.data_bytes for file, header in headers.items()}

    def counterpart(self, tensor: SourceTensor) -> SourceTensor | None:
        """The tensor of the same name, dtype and shape, in the file of the same name or another beside it."""
        alike = [
            t
            for t in self._tensors.get((_folder(tensor.file), tensor.name), ())
            if t.info.same_kind(tensor.info)
        ]
        return next((t for t in alike if t.file == tensor.file), alike[0] if alike else None)

    def encode(
        self, source: TensorSource, tensor: SourceTensor, parallel: Map, *, code: bool
    ) -> Difference | None:
        """The difference of a tensor from its counterpart; None if there is none, or it saves nothing.

        Without `code` it is only found out whether the two are the same.
        """
        counterpart = self.counterpart(tensor)
        if counterpart is None:
            return None
        file = None if self.source.checkpoint.is_file else counterpart.file
        record = TensorRecord("base", "", alias_of=counterpart.name, alias_file=file)
        info, new, old = tensor.info, source.reader(tensor), self.source.reader(counterpart)
        fmt = FORMATS.get(info.dtype)
        if fmt is None or not code or info.nbytes < SMALLEST:
            if not all(np.array_equal(new(*piece), old(*piece)) for piece in tensor.pieces()):
                return None
            checksum = digest(new, info.nbytes)
            return Difference(replace(record, checksum=checksum, base=checksum), {})
        hashes = xxhash.xxh3_64(), xxhash.xxh3_64()

        def observe(*pair: Bits) -> None:
            for running, bits in zip(hashes, pair, strict=True):
                running.update(bits.data)

        size = fmt.bits // 8
        patterns, of_base = (_patterns(read, size, fmt.dtype) for read in (new, old))
        coded = delta.encode(patterns, of_base, info.numel, fmt, parallel, observe)
        checksum, base = (running.hexdigest() for running in hashes)
        record = replace(record, checksum=checksum, base=base)
        if coded is None:
            return Difference(record, {})
        if coded.nbytes + OVERHEAD >= info.nbytes:
            return None
        mantissas = Census(None, np.empty(0, np.int64), coded.union & ((1 << fmt.mantissa_bits) - 1))
        record = replace(
            record, scheme="delta", streams={name: stream.checksum for name, stream in coded.streams.items()},
            shift=coded.cut.shift, low_bits=coded.cut.low, digits=coded.digits,
        )  # fmt: skip
        return Difference(record, coded.streams, plane_bytes(1 + mantissas.kept_bits(fmt), info.numel))


def _folder(path: str) -> str:
    return path[: path.rfind("/") + 1]


def _patterns(read: Callable[[int, int], Bytes], size: int, dtype: np.dtype[np.unsignedinteger]) -> Read:
    return lambda start, stop: read(start * size, stop * size).view(dtype)


def name_of(path: str | os.PathLike[str], argument: str) -> str:
    """The name of a base: `argument` if that is a Hub id, or what config.json says, or its folder's name."""
    path = Path(path)
    if not Path(argument).exists():
        return argument
    config = path / "config.json"
    if config.is_file() and config.stat().st_size <= LARGEST_CONFIG:
        try:
            document = json.loads(config.read_bytes())
        except (ValueError, RecursionError):  # only a name was wanted
            document = None
        name = document.get("_name_or_path") if isinstance(document, dict) else None
        if isinstance(name, str) and name and not os.path.isabs(name):
            return name
    return path.resolve().name


def check_base(source: TensorSource, workers: Workers) -> None:
    """Compare the base's tensors with the checksums that a delta was made against. Raises NeuzipError.

    Before anything is added to anything, or written.
    """
    assert source.base is not None
    needing = [t for t in source.tensors() if t.record is not None and t.record.needs_base]
    counterparts = [source.base_tensor(t) for t in needing]

    def checksum(tensor: SourceTensor) -> str:
        assert source.base is not None
        return digest(source.base.reader(tensor), tensor.info.nbytes)

    for tensor, counterpart, actual in zip(
        needing, counterparts, workers.map(checksum, counterparts), strict=True
    ):
        assert tensor.record is not None
        if actual != tensor.record.base:
            raise NeuzipError(
                f"{source.base.checkpoint.root / counterpart.file}: tensor {counterpart.name!r} has the "
                f"checksum {actual}, and {source.checkpoint.root / tensor.file} was made against one with "
                f"{tensor.record.base}",
                source.base_hint(),
            )
