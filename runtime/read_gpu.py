"""Compressed bytes to a GPU, decoded there: one pass over the files, and never a whole tensor on the host.

    files --read--> pinned chunks --PCIe--> buffers of parts --decode--> tensors
            reader threads        copy queue               kernel queue

The largest tensors come first, so that nobody waits for one long stream in the end. A part is a few hundred
megabytes of stored tensors, or one tensor that is larger. A few parts are read at a time, and each is decoded
when it has arrived. There is one buffer more than parts are read, and the one that has been free for the
longest time is filled next: so copies go on while a part is decoded. Tensors that are stored as they are go
straight to their place.

Memory beside the tensors: on the GPU IN_FLIGHT + 1 buffers of PART bytes, or of a tensor that is larger; on
the host the chunks of `readers.Readers`, 96 MiB with 12 readers.

The same code runs on a CPU, where nothing is pinned and nothing overlaps but the readers: for tests, with
Triton's interpreter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from neuzip.compress.pieces import Bytes, padded
from neuzip.compress.schemes import codec_of
from neuzip.compress.schemes.codec import FloatCoding, GridCoding
from neuzip.compress.schemes.quantized_coding import STEP_BYTES
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import FormatError, NeuzipError
from neuzip.kernels import rans
from neuzip.kernels.float_fields import plane_bytes
from neuzip.kernels.grid import Grid
from neuzip.kernels.rans.coded import PATTERNS, CodedGrid, CodedTensor
from neuzip.kernels.rans.triton.decode import decode
from neuzip.runtime.dtypes import shaped, torch_dtype
from neuzip.runtime.readers import Arrival, DeviceQueues, Readers, jobs_for

PART = 256 << 20
"""Stored bytes of a part, if it has more than one tensor."""

TENSORS = 32
"""Tensors of a part, at most: the host prepares those of the last part when all have arrived."""

IN_FLIGHT = 4
"""Parts that are read at a time. Each has a buffer, and there is one more."""


def read_on(
    device: torch.device, source: FolderSource, tensors: Sequence[SourceTensor], *, verify: bool = True
) -> list[torch.Tensor]:
    """Tensors of a checkpoint, no aliases, decoded on `device`; complete when this returns.

    `verify` compares all that is stored with its checksums before it is decoded. Raises FormatError.
    """
    queues = DeviceQueues(device)
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


@dataclass
class _Buffer:
    """Memory for the streams of a part, and a mark behind the kernels that last read it."""

    memory: torch.Tensor
    decoded: torch.cuda.Event | None = None


@dataclass
class _Part:
    """Tensors by their numbers, and the bytes of their streams. In flight: where these arrive.

    `arrays` are copies of short streams on the host. `jobs` counts those that are not done.
    """

    numbers: list[int]
    nbytes: int
    buffer: _Buffer | None = None
    streams: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    arrays: dict[int, dict[str, Bytes]] = field(default_factory=dict)
    jobs: int = 0


class _Load:
    """One call of `read_on`."""

    def __init__(
        self, source: FolderSource, tensors: Sequence[SourceTensor], verify: bool, queues: DeviceQueues
    ) -> None:
        self._source, self._tensors, self._verify, self._queues = source, tensors, verify, queues
        self._extents = [sorted(source.extents(t), key=lambda e: e.start) for t in tensors]
        self._sizes = [sum(e.nbytes for e in extents) for extents in self._extents]
        self._memory: dict[int, torch.Tensor] = {}
        self._parts = list(self._all_parts())
        self._buffers: deque[_Buffer] = deque()
        self._buffers_made = 0
        self._decoded: list[tuple[list[int], torch.Tensor]] = []

    def run(self) -> list[torch.Tensor]:
        """The bytes of all tensors, as they come: kernels may still be writing."""
        in_flight = 0
        readers = Readers(self._source, self._queues, sum(self._sizes), verify=self._verify)
        try:
            for number in range(len(self._parts)):
                while in_flight == IN_FLIGHT:
                    in_flight -= self._take(readers)
                self._start(number, readers)
                in_flight += 1
            while in_flight:
                in_flight -= self._take(readers)
        finally:
            readers.close()
        numbers = [number for numbers, _ in self._decoded for number in numbers]
        if numbers:
            errors = torch.cat([errors for _, errors in self._decoded]).tolist()
            for number, wrong in zip(numbers, errors, strict=True):
                if wrong:
                    raise self._refusal(number, "the words are corrupt", "words")
        return [self._memory[number] for number in range(len(self._tensors))]

    def _all_parts(self) -> Iterator[_Part]:
        """All tensors, large ones first, neighbours together."""
        order = sorted(range(len(self._tensors)), key=self._rank)
        numbers: list[int] = []
        left = PART
        for number in order:
            if numbers and (self._sizes[number] > left or len(numbers) == TENSORS):
                yield self._part(numbers)
                numbers, left = [], PART
            numbers.append(number)
            left -= self._sizes[number]
        if numbers:
            yield self._part(numbers)

    def _rank(self, number: int) -> tuple[int, str, int]:
        return -self._sizes[number], self._tensors[number].file, self._extents[number][0].start

    def _part(self, numbers: list[int]) -> _Part:
        streams = (e for n in numbers for e in self._extents[n] if e.stream is not None)
        return _Part(numbers, sum(padded(e.nbytes) for e in streams))

    def _start(self, number: int, readers: Readers) -> None:
        """Allocate what a part needs, and set the readers on it."""
        part, arrivals, end = self._parts[number], [], 0
        part.buffer = self._buffer_for(number)
        for n in part.numbers:
            tensor = self._tensors[n]
            if tensor.record is not None and tensor.record.streams:
                part.streams[n], part.arrays[n] = {}, {}
            for extent in self._extents[n]:
                if extent.stream is None:
                    self._memory[n] = self._empty(tensor.info.nbytes)
                    arrivals.append(Arrival(tensor, extent, self._memory[n], 0))
                    continue
                assert tensor.record is not None
                memory, copy = part.buffer.memory, None
                if extent.stream in codec_of(tensor.record).coding_streams:
                    copy = part.arrays[n][extent.stream] = np.empty(extent.nbytes, np.uint8)
                part.streams[n][extent.stream] = memory[end : end + extent.nbytes]
                arrivals.append(Arrival(tensor, extent, memory, end, copy))
                end += padded(extent.nbytes)
        if any(a.extent.stream is None for a in arrivals):  # kernels may have had that memory just before
            self._queues.copies_wait(self._queues.kernels_so_far())
        jobs = jobs_for(number, arrivals)
        part.jobs = len(jobs)
        readers.start(jobs)

    def _buffer_for(self, number: int) -> _Buffer:
        """A buffer for a part: new, or the one that has been free for the longest time."""
        if self._buffers_made <= IN_FLIGHT:
            self._buffers_made += 1
            # Any later part may get it, and has room in it.
            memory = self._empty(max(part.nbytes for part in self._parts[number:]))
            buffer = _Buffer(memory, self._queues.kernels_so_far())
        else:
            buffer = self._buffers.popleft()
        self._queues.copies_wait(buffer.decoded)
        return buffer

    def _take(self, readers: Readers) -> int:
        """Wait for a reader; if that completes a part, decode it. How many parts are no longer in flight."""
        part = self._parts[readers.wait_for_one().part]
        part.jobs -= 1
        if part.jobs:
            return 0
        self._decode(part)
        return 1

    def _decode(self, part: _Part) -> None:
        """Decode a part that has arrived, and set its buffer free."""
        coded: list[CodedTensor] = []
        outs: list[torch.Tensor] = []
        numbers: list[int] = []
        apart: list[int] = []
        for number, streams in part.streams.items():
            tensor = self._tensors[number]
            # Before there is memory for what a hostile header may claim.
            coding = self._source.coding(tensor, part.arrays[number])
            if coding is None:
                apart.append(number)
                continue
            numbers.append(number)
            self._memory[number] = self._empty(tensor.info.nbytes)
            coded.append(coded_tensor(coding, tensor.info.numel, streams))
            outs.append(self._memory[number].view(PATTERNS[coding.fmt.bits]))
        self._queues.kernels_wait()
        for number in apart:
            self._memory[number] = self._decode_apart(number, part.streams[number])
        if coded:
            self._decoded.append((numbers, decode(coded, outs)))
        assert part.buffer is not None
        part.buffer.decoded = self._queues.kernels_so_far()
        self._buffers.append(part.buffer)
        part.streams.clear()
        part.arrays.clear()
        part.buffer = None

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
