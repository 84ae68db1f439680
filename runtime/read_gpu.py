"""Compressed bytes to a GPU, decoded there: one pass over the files, and never a whole tensor on the host.

    files --read--> pinned buffers --PCIe--> buffers of parts --decode--> tensors
            reader threads         copy queue              kernel queue

A reader takes a whole stream, as a checksum goes from its first byte to its last, and many readers take many.
The largest tensors come first, so that nobody waits for one long stream in the end. A part is a few hundred
megabytes of stored tensors, or one tensor that is larger. A few parts are in flight at a time, which bounds
the memory for what is compressed, and each is decoded when it has arrived. Tensors that are stored as they
are go straight to their place.

The same code runs on a CPU, where nothing is pinned and nothing overlaps but the readers: for tests, with
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
import xxhash

from neuzip.compress.pieces import padded
from neuzip.compress.schemes import codec_of
from neuzip.compress.schemes.codec import FloatCoding, GridCoding
from neuzip.compress.schemes.quantized_coding import STEP_BYTES
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import Extent, SourceTensor
from neuzip.compress.workers import default_jobs
from neuzip.errors import FormatError, NeuzipError
from neuzip.kernels import rans
from neuzip.kernels.float_fields import plane_bytes
from neuzip.kernels.grid import Grid
from neuzip.kernels.rans.coded import PATTERNS, CodedGrid, CodedTensor
from neuzip.kernels.rans.triton.decode import decode
from neuzip.runtime.dtypes import shaped, torch_dtype

CHUNK = 16 << 20
"""Bytes that are read, hashed and sent at once, and of a pinned buffer."""

PART = 256 << 20
"""Stored bytes of a part, if it has more than one tensor."""

IN_FLIGHT = 4
"""Parts that may be read at a time."""

READERS = 12
"""Threads that read, at most: more of them wait for memory and for each other."""


def read_on(
    device: torch.device, source: FolderSource, tensors: Sequence[SourceTensor], *, verify: bool = True
) -> list[torch.Tensor]:
    """Tensors of a checkpoint, no aliases, decoded on `device`; complete when this returns.

    `verify` compares all that is stored with its checksums before it is decoded. Raises FormatError.
    """
    queues = _Queues(device)
    # Other threads write to that memory too, and they are not in a mode that the caller may be in.
    with torch.inference_mode(False), torch.cuda.device(device) if queues.on_gpu else nullcontext():
        try:
            memory = _Load(source, tensors, verify, queues).run()
        except torch.OutOfMemoryError as error:
            raise NeuzipError(
                f"{device} has too little free memory for the weights", "end what else runs there"
            ) from error
        finally:
            queues.wait()  # whatever happened: nobody may free what a copy still reads or writes
    return [shaped(m, torch_dtype(source, t), t.info.shape) for m, t in zip(memory, tensors, strict=True)]


class _Queues:
    """The order of copies and kernels on a GPU: a stream of its own, and the caller's. A CPU needs none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if self.on_gpu else None  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        """Copies that a thread starts in here go to the copy queue."""
        return torch.cuda.stream(self._copies) if self._copies is not None else nullcontext()

    def event(self) -> torch.cuda.Event | None:
        """A mark for the copy queue that the host can wait for."""
        return torch.cuda.Event(blocking=True) if self.on_gpu else None  # type: ignore[no-untyped-call]

    def copies_wait(self) -> None:
        """Begin no more copies before all kernels so far have ended: they may read memory freed since."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))

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
class _Move:
    """Bytes `start` to `stop` of a file, and where they go."""

    start: int
    stop: int
    memory: torch.Tensor
    place: int


@dataclass(frozen=True)
class _Stored:
    """An extent of the tensor of a number, and its place in the memory it goes to."""

    number: int
    file: str
    extent: Extent
    memory: torch.Tensor
    place: int


@dataclass
class _Job:
    """Consecutive bytes of a file, for one reader: long streams are alone, short ones go together."""

    part: _Part
    stored: list[_Stored]

    def moves(self) -> list[_Move]:
        """Where the bytes go. Those that stay neighbours go together."""
        moves: list[_Move] = []
        for s in self.stored:
            last = moves[-1] if moves else None
            if last and last.memory is s.memory and last.place + last.stop - last.start == s.place:
                moves[-1] = _Move(last.start, s.extent.stop, last.memory, last.place)
            else:
                moves.append(_Move(s.extent.start, s.extent.stop, s.memory, s.place))
        return moves


@dataclass
class _Part:
    """Tensors in flight, by their numbers: where their streams arrive, and the jobs that are not done."""

    numbers: list[int]
    streams: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    jobs: int = 0


@dataclass
class _Staging:
    """Memory of the host that chunks pass through, and when the last one has left it."""

    memory: torch.Tensor
    left: torch.cuda.Event | None


class _Load:
    """One call of `read_on`."""

    def __init__(
        self, source: FolderSource, tensors: Sequence[SourceTensor], verify: bool, queues: _Queues
    ) -> None:
        self._source, self._tensors, self._verify, self._queues = source, tensors, verify, queues
        self._extents = [sorted(source.extents(t), key=lambda e: e.start) for t in tensors]
        self._sizes = [sum(e.nbytes for e in extents) for extents in self._extents]
        self._memory: dict[int, torch.Tensor] = {}
        self._chunk = min(CHUNK, sum(self._sizes))
        self._readers = max(1, min(READERS, default_jobs(), -(-sum(self._sizes) // CHUNK)))
        self._done: SimpleQueue[_Job | BaseException] = SimpleQueue()
        self._free: SimpleQueue[_Staging | None] = SimpleQueue()
        for _ in range(2 * self._readers):  # each reader fills one while another leaves
            self._free.put(None)

    def run(self) -> list[torch.Tensor]:
        """The bytes of all tensors, as they come: kernels may still be writing."""
        in_flight = 0
        decoded: list[tuple[list[int], torch.Tensor]] = []
        pool = ThreadPoolExecutor(self._readers, thread_name_prefix="neuzip-read")
        try:
            parts = self._parts()
            for part in parts:
                self._start(part, pool)
                in_flight += 1
                while in_flight == IN_FLIGHT:
                    in_flight -= self._take(decoded)
            while in_flight:
                in_flight -= self._take(decoded)
        finally:
            pool.shutdown(cancel_futures=True)
        for numbers, errors in decoded:
            for number, wrong in zip(numbers, errors.tolist(), strict=True):
                if wrong:
                    raise self._refusal(number, "the words are corrupt", "words")
        return [self._memory[number] for number in range(len(self._tensors))]

    def _parts(self) -> Iterator[_Part]:
        """All tensors, large ones first, neighbours together."""
        order = sorted(range(len(self._tensors)), key=self._rank)
        numbers: list[int] = []
        left = PART
        for number in order:
            if numbers and self._sizes[number] > left:
                yield _Part(numbers)
                numbers, left = [], PART
            numbers.append(number)
            left -= self._sizes[number]
        if numbers:
            yield _Part(numbers)

    def _rank(self, number: int) -> tuple[int, str, int]:
        return -self._sizes[number], self._tensors[number].file, self._extents[number][0].start

    def _start(self, part: _Part, pool: ThreadPoolExecutor) -> None:
        """Allocate what a part needs, and set the readers on it."""
        coded = sum(padded(e.nbytes) for n in part.numbers for e in self._extents[n] if e.stream is not None)
        buffer = torch.empty(coded, dtype=torch.uint8, device=self._queues.device)
        stored: list[_Stored] = []
        end = 0
        for number in part.numbers:
            tensor = self._tensors[number]
            for extent in self._extents[number]:
                if extent.stream is None:
                    self._memory[number] = memory = self._empty(tensor.info.nbytes)
                    place = 0
                else:
                    memory, place = buffer, end
                    end += padded(extent.nbytes)
                    part.streams.setdefault(number, {})[extent.stream] = buffer[place : place + extent.nbytes]
                stored.append(_Stored(number, tensor.file, extent, memory, place))
        self._queues.copies_wait()
        jobs = list(_jobs(part, stored))
        part.jobs = len(jobs)
        for job in sorted(jobs, key=lambda j: j.stored[0].extent.start - j.stored[-1].extent.stop):
            pool.submit(self._do, job)

    def _do(self, job: _Job) -> None:
        """Let a reader do a job, and report it."""
        try:
            with self._queues.copying():
                self._send(job)
            self._done.put(job)
        except BaseException as error:
            self._done.put(error)

    def _send(self, job: _Job) -> None:
        """Read bytes, hash them, and send them to the GPU. Raises FormatError for a wrong checksum."""
        file, moves = job.stored[0].file, job.moves()
        sums = [(s, xxhash.xxh3_64()) for s in job.stored if self._verify and s.extent.checksum is not None]
        end = moves[-1].stop
        for start in range(moves[0].start, end, CHUNK):
            stop = min(start + CHUNK, end)
            staging = self._free.get()
            try:
                if staging is None:
                    memory = torch.empty(self._chunk, dtype=torch.uint8, pin_memory=self._queues.on_gpu)
                    staging = _Staging(memory, self._queues.event())
                elif staging.left is not None:
                    staging.left.synchronize()
                data = staging.memory.numpy()[: stop - start]
                self._source.read_into(file, start, data)
                for move in moves:
                    first, last = max(move.start, start), min(move.stop, stop)
                    if first < last:
                        place = move.place + first - move.start
                        target = move.memory[place : place + last - first]
                        target.copy_(staging.memory[first - start : last - start], non_blocking=True)
                if staging.left is not None:
                    staging.left.record()
                for s, running in sums:
                    first, last = max(s.extent.start, start), min(s.extent.stop, stop)
                    if first < last:
                        running.update(data[first - start : last - start].data)
            finally:
                self._free.put(staging)
        for s, running in sums:
            if running.hexdigest() != s.extent.checksum:
                raise self._refusal(
                    s.number,
                    f"has the checksum {running.hexdigest()} instead of {s.extent.checksum}: "
                    "the file is damaged",
                    s.extent.stream,
                )

    def _take(self, decoded: list[tuple[list[int], torch.Tensor]]) -> int:
        """Wait for a reader; if that completes a part, decode it. How many parts are no longer in flight."""
        job = self._done.get()
        if isinstance(job, BaseException):
            raise job
        job.part.jobs -= 1
        if job.part.jobs:
            return 0
        decoded.append(self._decode(job.part))
        return 1

    def _decode(self, part: _Part) -> tuple[list[int], torch.Tensor]:
        """Decode a part that has arrived: the numbers of what was coded, and the decoder's errors."""
        coded: list[CodedTensor] = []
        outs: list[torch.Tensor] = []
        apart: list[int] = []
        for number, streams in part.streams.items():
            tensor = self._tensors[number]
            coding = self._source.coding(tensor)  # before there is memory for what a hostile header may claim
            if coding is None:
                apart.append(number)
                continue
            self._memory[number] = self._empty(tensor.info.nbytes)
            coded.append(coded_tensor(coding, tensor.info.numel, streams))
            outs.append(self._memory[number].view(PATTERNS[coding.fmt.bits]))
        self._queues.kernels_wait()
        for number in apart:
            self._memory[number] = self._decode_apart(number, part.streams.pop(number))
        numbers = list(part.streams)
        part.streams.clear()
        return numbers, decode(coded, outs)

    def _decode_apart(self, number: int, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The bytes of a tensor whose streams have arrived, and which is not coded as floats are."""
        tensor = self._tensors[number]
        assert tensor.record is not None
        codec = codec_of(tensor.record)
        try:
            return codec.decode_on(tensor.info, tensor.record, streams, self._queues.device)
        except NeuzipError as error:
            raise self._refusal(number, error.message, None) from error

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._queues.device)

    def _refusal(self, number: int, problem: str, stream: str | None) -> FormatError:
        tensor = self._tensors[number]
        path = self._source.checkpoint.root / tensor.file
        return FormatError(path, problem, tensor=tensor.name, field=stream)


def _jobs(part: _Part, stored: list[_Stored]) -> Iterator[_Job]:
    """Every extent is in one job; those of a job follow each other in a file, and several share a chunk."""
    together: list[_Stored] = []
    nbytes = 0
    for s in sorted(stored, key=lambda s: (s.file, s.extent.start, s.extent.stop)):
        last = together[-1] if together else None
        if last and (
            last.file != s.file or last.extent.stop != s.extent.start or nbytes + s.extent.nbytes > CHUNK
        ):
            yield _Job(part, together)
            together, nbytes = [], 0
        together.append(s)
        nbytes += s.extent.nbytes
    if together:
        yield _Job(part, together)


def coded_tensor(
    coding: FloatCoding | GridCoding, numel: int, streams: Mapping[str, torch.Tensor]
) -> CodedTensor:
    """A tensor whose streams (uint8) have arrived on a device, for the decoder there."""
    if isinstance(coding, GridCoding):
        return _coded_codes(coding, numel, streams)
    fields = streams["sign_mantissa"]
    return CodedTensor(
        fmt=coding.fmt,
        kept_bits=coding.mantissa_bits,
        numel=numel,
        table=coding.table,
        index=streams["index"].view(torch.int16)[: -(-numel // rans.BLOCK)],
        words=streams["words"].view(torch.int16),
        planes={
            width: fields[start : start + padded(plane_bytes(width, numel))]
            for width, start in coding.planes.items()
        },
        normaliser=streams.get("normaliser"),
        block_size=coding.block_size,
    )


def _coded_codes(coding: GridCoding, numel: int, streams: Mapping[str, torch.Tensor]) -> CodedTensor:
    """Weights on a grid whose streams have arrived. Column factors are copied, as the decoder aligns them."""
    factors = streams["grid"][STEP_BYTES:]
    rows = factors[: coding.rows] if coding.rows else None
    columns = factors[coding.rows : coding.rows + coding.columns].clone() if coding.columns else None
    return CodedTensor(
        fmt=coding.fmt,
        kept_bits=coding.low_bits,
        numel=numel,
        table=coding.table,
        index=streams["index"].view(torch.int16)[: -(-numel // rans.BLOCK)],
        words=streams["words"].view(torch.int16),
        planes={coding.low_bits: streams["low"]} if coding.low_bits else {},
        grid=CodedGrid(Grid(coding.step, rows, columns), coding.row_weights, coding.code_bits),
    )
