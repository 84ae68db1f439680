"""Pieces and tensors to a GPU and back: beside ternary.py the one place of this room that loads torch.

    files --read--> pinned memory --copy, kernel, copy--> pinned memory --> checksums, files
          any thread              one of a few queues                   the caller

A thread that has read its piece takes a queue (a CUDA stream) and gives it back when all is done. So while
one piece is copied another is decoded and others are read and written, in bounded memory of the GPU. torch
keeps pinned memory that has become free for the next piece.

Preparing launches takes the host about a millisecond, for one tensor or for many. So threads whose tensors
or pieces are small hand them over together, as one list for the kernels: see `Gathering`. A list of pieces
has at most PIECE_BYTES, as a piece has, and one of tensors that are coded CODED_TOGETHER. What is coded
together has no influence on the bytes.

The same code runs on a CPU, where nothing is pinned and there are no queues: for tests, with Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from neuzip.errors import NeuzipError
from neuzip.kernels import rans
from neuzip.kernels.float_fields import Bits, FloatFormat
from neuzip.kernels.rans.coded import ALIGNMENT, PATTERNS, CodedGrid, CodedTensor
from neuzip.kernels.rans.triton import decode as triton_decode
from neuzip.kernels.rans.triton import encode as triton_encode

from .pieces import Bytes, Fill
from .workers import Gathering

PIECE_BYTES = 1 << 25
"""Bytes of decoded weights of a piece: enough that a launch, about a millisecond of Python, weighs little."""

QUEUES = 4
"""Pieces on the GPU at a time: one each way, one being decoded, one to spare."""

CODED_TOGETHER = 1 << 26
"""Bytes of the tensors that are coded together, at most. A larger tensor is coded alone."""

ENCODER_NEEDS = 5
"""Bytes of the GPU's memory that the encoder may take, for a byte of its tensor."""

SHARE = 0.4
"""The most that it may take of what is free: two large tensors are under way at a time."""


@dataclass(frozen=True)
class CodedOnGpu:
    """A coded tensor in pinned memory; words, index and planes (by width) in parts."""

    kept_bits: int
    table: rans.Table
    index: list[npt.NDArray[np.uint16]]
    words: list[npt.NDArray[np.uint16]]
    planes: dict[int, list[Bytes]]


@dataclass(frozen=True)
class _Piece:
    """Whole blocks of a coded tensor: their streams in pinned memory, and pinned memory for the weights.

    `tensor_in` gives the coded tensor whose streams lie in some memory, of the host or of the GPU.
    """

    streams: torch.Tensor
    weights: torch.Tensor
    tensor_in: Callable[[torch.Tensor], CodedTensor]


class Gpu:
    """A GPU at work for several threads. Raises NeuzipError when its memory does not suffice.

    Without `lists` every tensor and every piece is handed to the kernels alone, for comparison.
    """

    piece = PIECE_BYTES

    def __init__(self, device: torch.device, *, lists: bool = True) -> None:
        self.device = device
        self._on_card = device.type == "cuda"
        self._queues: SimpleQueue[torch.cuda.Stream | None] = SimpleQueue()
        for _ in range(QUEUES):
            self._queues.put(self._new_queue())
        self._coding = self._new_queue()
        self._decoded = Gathering(self._decode_list, PIECE_BYTES if lists else 0)
        self._coded = Gathering(self._code_list, CODED_TOGETHER if lists else 0)

    def _new_queue(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self._on_card else None  # type: ignore[no-untyped-call]

    def has_room_for(self, nbytes: int) -> bool:
        """Whether a tensor of `nbytes` can be encoded here."""
        if not self._on_card:
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return ENCODER_NEEDS * nbytes <= SHARE * free

    def decode(
        self,
        fmt: FloatFormat,
        kept_bits: int,
        table: rans.Table,
        index: npt.NDArray[np.uint16],
        numel: int,
        ranges: Mapping[str | int, tuple[str, int, int]],
        fill: Fill,
        block_size: int | None = None,
        grid: CodedGrid | None = None,
    ) -> Bits | None:
        """Decode the `numel` weights of whole blocks, in pinned memory; None where the words are corrupt.

        `ranges` are the streams' bytes for them: of "words", of "normaliser" if there is a `block_size`, and
        of the planes by width. Codes stand for weights on a `grid`, which may be on the CPU.
        """
        places, end = {}, 0
        for part, (_, start, stop) in ranges.items():
            places[part] = slice(end, end + stop - start)
            end += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
        if places["words"].start == places["words"].stop:
            return None
        host = self._pinned(end)
        for part, (stream, start, _) in ranges.items():
            fill(stream, start, host.numpy()[places[part]])

        def tensor_in(memory: torch.Tensor) -> CodedTensor:
            return CodedTensor(
                fmt, kept_bits, numel, table,
                torch.from_numpy(index.view(np.int16)).to(memory.device),
                memory[places["words"]].view(torch.int16),
                {part: memory[at.start :] for part, at in places.items() if isinstance(part, int)},
                memory[places["normaliser"]] if block_size is not None else None,
                block_size,
                None if grid is None else replace(grid, grid=grid.grid.to(memory.device)),
            )  # fmt: skip

        tensor_in(host)  # raises CorruptStream here, and not for others that are decoded together with it
        piece = _Piece(host, self._pinned(numel * fmt.bits // 8), tensor_in)
        is_whole = self._decoded.result_of(piece, None, piece.weights.nbytes)
        return piece.weights.numpy().view(fmt.dtype) if is_whole else None

    def _decode_list(self, pieces: Sequence[_Piece], started: Callable[[], None]) -> list[bool]:
        """Decode pieces to where their weights go; for each whether its words are not corrupt."""
        errors = self._pinned(4 * len(pieces)).view(torch.int32)
        with self._free_queue():
            memories = [torch.empty_like(piece.streams, device=self.device) for piece in pieces]
            tensors = [piece.tensor_in(memory) for piece, memory in zip(pieces, memories, strict=True)]
            outs = [torch.empty(t.numel, dtype=PATTERNS[t.fmt.bits], device=self.device) for t in tensors]
            # The large copies come last, so that the small ones need not wait for them.
            plan = triton_decode.prepare(tensors, outs)
            for piece, memory in zip(pieces, memories, strict=True):
                memory.copy_(piece.streams, non_blocking=True)
            plan.launch()
            for piece, out in zip(pieces, outs, strict=True):
                piece.weights.copy_(out.view(torch.uint8), non_blocking=True)
            errors.copy_(plan.errors, non_blocking=True)
            started()
        return [not mark for mark in errors.tolist()]

    def coder(self, numel: int, fmt: FloatFormat) -> GpuCoder:
        """Begin to code a tensor."""
        return GpuCoder(self, numel, fmt)

    def _code_list(
        self, tensors: Sequence[tuple[torch.Tensor, FloatFormat]], started: Callable[[], None]
    ) -> list[CodedOnGpu]:
        """Code bit patterns of one format."""
        _, fmt = tensors[0]
        with self._in(self._coding):
            encoded = triton_encode.encode_all([bits for bits, _ in tensors], fmt)
            coded = [self._fetched(one) for one in encoded]
            done = self._mark(self._coding)
            started()
            self._wait_for(done)
        return coded

    def _fetched(self, encoded: triton_encode.GpuEncoded) -> CodedOnGpu:
        """A coded tensor on its way to pinned memory."""
        return CodedOnGpu(
            encoded.kept_bits,
            encoded.table,
            [part.view("<u2") for part in self._fetch(encoded.index)],
            [part.view("<u2") for part in self._fetch(encoded.words)],
            {width: self._fetch(plane) for width, plane in encoded.planes.items()},
        )

    def _fetch(self, tensor: torch.Tensor) -> list[Bytes]:
        """Bytes on their way to pinned memory, in parts that pieces can use again."""
        parts = []
        for part in torch.split(tensor.view(torch.uint8), PIECE_BYTES):
            parts.append(self._pinned(part.numel()))
            parts[-1].copy_(part, non_blocking=True)
        return [part.numpy() for part in parts]

    def compute(self, bits: Bits, function: Callable[[torch.Tensor], torch.Tensor]) -> npt.NDArray[Any]:
        """What a function makes of bit patterns, which it gets as bytes on the GPU."""
        raw = torch.from_numpy(bits.view(np.uint8))
        with self._free_queue():
            computed = function(raw.to(self.device, non_blocking=True))
            result = self._pinned(computed.nbytes).view(computed.dtype)
            result.copy_(computed, non_blocking=True)
        return result.numpy()

    def _pinned(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_card)
        except RuntimeError as error:
            raise NeuzipError(
                f"the host has no {nbytes} bytes that {self.device} could use", "give `device='cpu'`"
            ) from error

    @contextmanager
    def _free_queue(self) -> Iterator[None]:
        """A queue that nobody else has, for what is started in here; in the end it has all been done."""
        queue = self._queues.get()
        try:
            with self._in(queue):
                try:
                    yield
                finally:  # whatever happened: nobody may free what a copy still reads or writes
                    self._wait_for(self._mark(queue))
        finally:
            self._queues.put(queue)

    @contextmanager
    def _in(self, queue: torch.cuda.Stream | None) -> Iterator[None]:
        """Begin in a queue what is begun in here."""
        try:
            with torch.cuda.stream(queue) if queue is not None else nullcontext():
                yield
        except torch.OutOfMemoryError as error:
            raise NeuzipError(
                f"{self.device} has too little free memory",
                "give `device='cpu'`, or end what else runs there",
            ) from error

    @staticmethod
    def _mark(queue: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """An event that is there when all has been done that a queue has by now."""
        if queue is None:
            return None
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(queue)
        return done

    @staticmethod
    def _wait_for(done: torch.cuda.Event | None) -> None:
        if done is not None:
            done.synchronize()


class GpuCoder:
    """A tensor on its way to a GPU, to be coded there when all of its pieces have been `put`.

    All coders share a queue. Nobody waits in it before the end: torch keeps pinned memory from being used
    again before it has been copied.
    """

    def __init__(self, gpu: Gpu, numel: int, fmt: FloatFormat) -> None:
        self._gpu = gpu
        self._fmt = fmt
        with gpu._in(gpu._coding):
            self._bits = torch.empty(numel, dtype=PATTERNS[fmt.bits], device=gpu.device)

    def put(self, start: int, bits: Bits) -> None:
        """Send the weights from `start` on. For several threads."""
        host = self._gpu._pinned(bits.nbytes)
        host.numpy()[:] = bits.view(np.uint8)
        target = self._bits[start : start + bits.size].view(torch.uint8)
        with self._gpu._in(self._gpu._coding):
            target.copy_(host, non_blocking=True)

    def finish(self) -> CodedOnGpu:
        """Code what was sent, together with tensors that other threads finish. To be called once."""
        bits = self._bits
        del self._bits
        return self._gpu._coded.result_of((bits, self._fmt), self._fmt, bits.nbytes)
