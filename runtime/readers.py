"""Threads that bring bytes of weight files to a device: read, compared with their checksums, and copied.

    file --preadv--> chunk of pinned memory --PCIe--> memory of the device

A reader takes a whole stream, as a checksum goes from its first byte to its last, and many readers take many.
It reads and hashes a piece at a time, so that it hashes what is still in the cache of its core, and sends a
chunk at a time. It fills one of its two chunks while the other one leaves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import xxhash

from neuzip.compress.pieces import Bytes
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import Extent, SourceTensor
from neuzip.compress.workers import default_jobs
from neuzip.errors import FormatError, NeuzipError

PIECE = 1 << 20
"""Bytes that are read and hashed at once. They fit into the second-level cache of a core."""

CHUNK = 8 << 20
"""Bytes of a chunk of pinned memory. Each reader has CHUNKS of them."""

CHUNKS = 2

READERS = 8
"""Readers, at most, as they share the buses of the host. `benchmarks/load_stages.py --readers` compares."""


class DeviceQueues:
    """The order of copies and kernels on a GPU: a stream of its own, and the caller's. A CPU needs none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if self.on_gpu else None  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        """Copies that a thread starts in here go to the copy queue."""
        return torch.cuda.stream(self._copies) if self._copies is not None else nullcontext()

    def event(self) -> torch.cuda.Event | None:
        """A mark for a queue that the host can wait for."""
        return torch.cuda.Event(blocking=True) if self.on_gpu else None  # type: ignore[no-untyped-call]

    def kernels_so_far(self) -> torch.cuda.Event | None:
        """A mark behind all kernels so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.on_gpu else None

    def copies_wait(self, event: torch.cuda.Event | None) -> None:
        """Begin no more copies before a mark has been reached."""
        if self._copies is not None and event is not None:
            self._copies.wait_event(event)

    def kernels_wait(self) -> None:
        """Begin no more kernels before all copies so far have ended."""
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def wait(self) -> None:
        """Until both are empty."""
        if self._copies is not None:
            self._copies.synchronize()
            torch.cuda.current_stream(self.device).synchronize()


@dataclass(frozen=True)
class Arrival:
    """An extent of a tensor, the memory of the device that it goes to, and the first byte there.

    `copy` is an array of the host that gets the bytes too, or None.
    """

    tensor: SourceTensor
    extent: Extent
    memory: torch.Tensor
    place: int
    copy: Bytes | None = None


@dataclass(frozen=True)
class ReadJob:
    """Consecutive bytes of a file, for one reader, and the number of the part that needs them."""

    part: int
    arrivals: Sequence[Arrival]

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return self.arrivals[-1].extent.stop - self.arrivals[0].extent.start


def jobs_for(part: int, arrivals: Sequence[Arrival]) -> list[ReadJob]:
    """The jobs of a part, the longest first. Long streams are alone, and short ones share a chunk."""
    jobs: list[ReadJob] = []
    together: list[Arrival] = []
    nbytes = 0
    for a in sorted(arrivals, key=lambda a: (a.tensor.file, a.extent.start, a.extent.stop)):
        last = together[-1] if together else None
        if last and (
            last.tensor.file != a.tensor.file
            or last.extent.stop != a.extent.start
            or nbytes + a.extent.nbytes > CHUNK
        ):
            jobs.append(ReadJob(part, together))
            together, nbytes = [], 0
        together.append(a)
        nbytes += a.extent.nbytes
    if together:
        jobs.append(ReadJob(part, together))
    return sorted(jobs, key=lambda job: -job.nbytes)


@dataclass(frozen=True)
class _Move:
    """Bytes `start` to `stop` of a file, and where they go."""

    start: int
    stop: int
    memory: torch.Tensor
    place: int


def _moves(arrivals: Sequence[Arrival]) -> list[_Move]:
    """Where the bytes of a job go. Those that stay neighbours go together."""
    moves: list[_Move] = []
    for a in arrivals:
        last = moves[-1] if moves else None
        if last and last.memory is a.memory and last.place + last.stop - last.start == a.place:
            moves[-1] = _Move(last.start, a.extent.stop, last.memory, last.place)
        else:
            moves.append(_Move(a.extent.start, a.extent.stop, a.memory, a.place))
    return moves


@dataclass
class _Chunk:
    """Memory of the host that bytes pass through, the same as an array, and when the last copy has left."""

    memory: torch.Tensor
    array: Bytes
    left: torch.cuda.Event | None


class Readers:
    """The readers of a load of `nbytes` in all. `verify`: checksums are compared.

    They take at most CHUNKS * CHUNK * READERS bytes of the host's memory, pinned for a GPU.
    """

    def __init__(self, source: FolderSource, queues: DeviceQueues, nbytes: int, *, verify: bool) -> None:
        self._source, self._queues, self._verify = source, queues, verify
        self._chunk = min(CHUNK, nbytes)
        count = max(1, min(READERS, default_jobs(), -(-nbytes // CHUNK)))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="neuzip-read")
        self._done: SimpleQueue[ReadJob | BaseException] = SimpleQueue()
        self._free: SimpleQueue[deque[_Chunk]] = SimpleQueue()
        for _ in range(count):
            self._free.put(deque())
        self._stopped = threading.Event()

    def start(self, jobs: Sequence[ReadJob]) -> None:
        """Have jobs done, after those that were given before."""
        for job in jobs:
            self._pool.submit(self._do, job)

    def wait_for_one(self) -> ReadJob:
        """The next job that is done: its bytes are on the copy queue. Raises what a reader raised."""
        job = self._done.get()
        if isinstance(job, BaseException):
            raise job
        return job

    def close(self) -> None:
        """End all readers, also where jobs are left. Copies may still be under way."""
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def _do(self, job: ReadJob) -> None:
        """Do a job and report it."""
        try:
            chunks = self._free.get()
            try:
                with self._queues.copying():
                    self._send(job, chunks)
            finally:
                self._free.put(chunks)
            self._done.put(job)
        except BaseException as error:
            self._done.put(error)

    def _send(self, job: ReadJob, chunks: deque[_Chunk]) -> None:
        """Read bytes, hash them, and send them. Raises FormatError for a wrong checksum."""
        moves, file = _moves(job.arrivals), job.arrivals[0].tensor.file
        sums = [
            (a, xxhash.xxh3_64() if self._verify and a.extent.checksum is not None else None)
            for a in job.arrivals
        ]
        observed = [(a, running) for a, running in sums if running is not None or a.copy is not None]
        end = moves[-1].stop
        for start in range(moves[0].start, end, CHUNK):
            if self._stopped.is_set():
                return
            stop = min(start + CHUNK, end)
            chunk = self._empty_chunk(chunks)
            for first in range(start, stop, PIECE):
                piece = chunk.array[first - start : min(first + PIECE, stop) - start]
                self._source.read_into(file, first, piece)
                _observe(piece, first, observed)
            for move in moves:
                first, last = max(move.start, start), min(move.stop, stop)
                if first < last:
                    place = move.place + first - move.start
                    target = move.memory[place : place + last - first]
                    target.copy_(chunk.memory[first - start : last - start], non_blocking=True)
            if chunk.left is not None:
                chunk.left.record()
        for a, running in observed:
            if running is not None and running.hexdigest() != a.extent.checksum:
                raise FormatError(
                    self._source.checkpoint.root / file,
                    f"has the checksum {running.hexdigest()} instead of {a.extent.checksum}: "
                    "the file is damaged",
                    tensor=a.tensor.name, field=a.extent.stream,
                )  # fmt: skip

    def _empty_chunk(self, chunks: deque[_Chunk]) -> _Chunk:
        """A reader's chunk whose bytes have left it."""
        if len(chunks) < CHUNKS:
            try:
                memory = torch.empty(self._chunk, dtype=torch.uint8, pin_memory=self._queues.on_gpu)
            except RuntimeError as error:
                raise NeuzipError(
                    f"the host has no {self._chunk} bytes of memory for copies to {self._queues.device}",
                    "end what else runs there",
                ) from error
            chunks.append(_Chunk(memory, memory.numpy(), self._queues.event()))
            return chunks[-1]
        chunks.rotate(-1)
        chunk = chunks[-1]
        if chunk.left is not None:
            chunk.left.synchronize()
        return chunk


def _observe(piece: Bytes, start: int, observed: Sequence[tuple[Arrival, Any]]) -> None:
    """Hash the bytes of a file from `start` on, and copy those that the host keeps."""
    for a, running in observed:
        first, last = max(a.extent.start, start), min(a.extent.stop, start + piece.size)
        if first >= last:
            continue
        data = piece[first - start : last - start]
        if running is not None:
            running.update(data.data)
        if a.copy is not None:
            a.copy[first - a.extent.start : last - a.extent.start] = data
