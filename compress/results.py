"""What a run has found out of tensors so far: records and notes. Jobs get it, add to it and pass it on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from neuzip.formats.records import Record

from .schemes import EncodedTensor
from .sources.source import SourceTensor

TensorKey = tuple[str, str]
"""File and name of a tensor."""


@dataclass(frozen=True)
class TensorResults:
    """Records of tensors, and notes on those that were stored otherwise than planned."""

    records: dict[TensorKey, Record] = field(default_factory=dict)
    notes: dict[TensorKey, str] = field(default_factory=dict)

    def add(self, tensor: SourceTensor, encoded: EncodedTensor) -> None:
        """Add a tensor that was coded."""
        self.records[tensor.file, tensor.name] = encoded.record
        if encoded.note:
            self.notes[tensor.file, tensor.name] = encoded.note

    def update(self, other: TensorResults) -> None:
        """Add what another rank has found out."""
        self.records.update(other.records)
        self.notes.update(other.notes)

    def by_file(self, files: Iterable[str]) -> dict[str, dict[str, Record]]:
        """The records by file and name, for all of some `files`."""
        records: dict[str, dict[str, Record]] = {file: {} for file in files}
        for (file, name), record in self.records.items():
            records[file][name] = record
        return records


@dataclass(frozen=True)
class RunOutcome:
    """What a run found done and did: files that an earlier run had finished, and files it made again."""

    results: TensorResults
    resumed_files: int = 0
    made_again: tuple[str, ...] = ()
