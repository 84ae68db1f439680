"""Deltas as files of a folder that trainer and engines share, one for each state."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from neuzip.compress.workspace import reading, write_file
from neuzip.errors import FormatError, WouldOverwrite
from neuzip.formats.sparse_delta import HEADER_BYTES, SparseDeltaHeader, delta_name

from .chain import Follower
from .messages import NAME, AppliedDelta, BrokenChain, as_bytes, read_header

_FILE = re.compile(r"(\d{8,})\.delta")


class DeltaFolder:
    """A folder of deltas, `00000001.delta` and so on. A file has its name only when it is complete.

    path  the folder; the first delta makes it
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, delta: torch.Tensor | bytes) -> Path:
        """Write a delta and return its path.

        Raises FormatError for bytes that are no delta, WouldOverwrite if there is one for this state
        already, and NeuzipError if the disk is full or cannot be written.
        """
        stored = as_bytes(delta)
        path = self.path / delta_name(read_header(stored, NAME).number)
        if path.exists():
            raise WouldOverwrite(f"{path}: exists already", "use an empty folder for a new chain")
        write_file(path, stored.cpu().numpy().tobytes())
        return path

    def numbers(self) -> list[int]:
        """The numbers of the states for which there is a delta, rising."""
        if not self.path.is_dir():
            return []
        matches = (_FILE.fullmatch(name) for name in os.listdir(self.path))
        return sorted(n for n in (int(m[1]) for m in matches if m) if n)

    def header(self, number: int) -> SparseDeltaHeader:
        """The first bytes of a delta. Raises FormatError, and NeuzipError for a file that cannot be read."""
        path = self.path / delta_name(number)
        with reading(path), open(path, "rb") as file:
            header = SparseDeltaHeader.decode(file.read(HEADER_BYTES), str(path))
            size = os.fstat(file.fileno()).st_size
        if header.number != number:
            raise FormatError(path, f"gives state {header.number}: the file has a wrong name", field="number")
        if size != header.nbytes:
            raise FormatError(path, f"has {size} bytes, and its header says {header.nbytes}")
        return header

    def read(self, number: int) -> torch.Tensor:
        """The delta that gives a state, on the CPU. Raises FormatError and NeuzipError."""
        self.header(number)
        path = self.path / delta_name(number)
        with reading(path):
            return as_bytes(path.read_bytes())

    def follow(self, follower: Follower, last: int | None = None) -> int:
        """Apply to `follower` all deltas that follow its state, up to state `last`. Returns how many.

        A follower whose number is unknown begins with the delta that starts from its state. Raises
        BrokenChain where a delta is missing between, and what `Follower.apply` raises.
        """
        return sum(1 for _ in self.steps(follower, last))

    def steps(self, follower: Follower, last: int | None = None) -> Iterator[AppliedDelta]:
        """What `follow` does, delta by delta."""
        numbers = [n for n in self.numbers() if last is None or n <= last]
        state = self._number(follower, numbers)
        for number in (n for n in numbers if n > state):
            name = str(self.path / delta_name(number))
            follower.require_next(self.header(number), name)  # before a file of any size is read
            yield follower.apply(self.read(number), name)
            state = number
        if last is not None and state < last:
            raise BrokenChain(
                f"{self.path}: has no deltas from {follower.state} to state {last}",
                "wait until the trainer has written them",
            )

    def _number(self, follower: Follower, numbers: list[int]) -> int:
        """The number of the state of a follower, by its digest if need be. Raises BrokenChain."""
        number, digest = follower.state.number, follower.state.digest
        if number is not None or not numbers:
            return number or 0
        for n in reversed(numbers):
            header = self.header(n)
            if digest in (header.end, header.start):
                return n if digest == header.end else n - 1
        raise BrokenChain(
            f"{self.path}: no delta starts from the weights, which are in {follower.state}",
            "load the weights from which the trainer started, or those of a later state",
        )
