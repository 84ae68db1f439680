"""Equal tensors of a checkpoint whose files come one by one: equal to one of the same file or an earlier one.

What is left of an earlier file is the digests of its tensors. Where a digest is the same, the bytes are asked
for once more and compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from neuzip.formats.records import Record

from .pieces import digest
from .plan import ALIAS_MINIMUM, PlannedTensor
from .results import TensorKey
from .sources.source import SourceTensor, TensorSource
from .workers import Workers

COMPARED_BYTES = 1 << 25
"""Bytes that are asked for at a time where tensors are compared."""

_Kind = tuple[object, ...]
"""What two tensors must have in common for one to be stored as equal to the other."""


class EqualTensors:
    """The tensors of the files that have come, by kind and digest. `planned` are those of all files."""

    def __init__(self, source: TensorSource, planned: Iterable[PlannedTensor], workers: Workers) -> None:
        self._source = source
        self._workers = workers
        self._alike = Counter(map(_kind, planned))
        self._firsts: dict[tuple[_Kind, str], SourceTensor] = {}

    def with_aliases(self, planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
        """The tensors of a file that is here, each with the earlier tensor that it equals, if any."""
        candidates = [t for t in planned if _can_be_alias(t) and self._alike[_kind(t)] > 1]
        firsts = dict(self._firsts)
        aliases: dict[str, SourceTensor] = {}
        for tensor, checksum in zip(candidates, self._workers.map(self._digest, candidates), strict=True):
            first = firsts.setdefault((_kind(tensor), checksum), tensor.tensor)
            if first is not tensor.tensor and self._equal(tensor.tensor, first):
                aliases[tensor.tensor.name] = first
        return [replace(t, alias_of=aliases.get(t.tensor.name)) for t in planned]

    def remember(self, planned: Iterable[PlannedTensor], records: Mapping[TensorKey, Record]) -> None:
        """Remember the digests of a file's tensors, to which later ones may be equal."""
        for tensor in planned:
            record = records[tensor.tensor.file, tensor.tensor.name]
            if record.holder is None and _can_be_alias(tensor):
                checksum = record.original or record.checksum
                self._firsts.setdefault((_kind(tensor), checksum), tensor.tensor)

    def _digest(self, planned: PlannedTensor) -> str:
        return digest(self._source.reader(planned.tensor), planned.tensor.info.nbytes)

    def _equal(self, a: SourceTensor, b: SourceTensor) -> bool:
        read_a, read_b, total = self._source.reader(a), self._source.reader(b), a.info.nbytes
        return all(
            np.array_equal(read_a(start, stop), read_b(start, stop))
            for start in range(0, total, COMPARED_BYTES)
            for stop in [min(start + COMPARED_BYTES, total)]
        )


def _can_be_alias(planned: PlannedTensor) -> bool:
    return planned.tensor.info.nbytes >= ALIAS_MINIMUM and not planned.is_adapter


def _kind(planned: PlannedTensor) -> _Kind:
    file, info = planned.tensor.file, planned.tensor.info
    return file[: file.rfind("/") + 1], info.dtype, info.shape, planned.scheme
