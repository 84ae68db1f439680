"""Pieces and tensors to a GPU and back: beside ternary.py the one place of this room that loads torch.

    files --read--> pinned memory --copy, kernel, copy--> pinned memory --> checksums, files
          any thread              one of a few queues                   the caller

A thread that has read its piece takes a queue (a CUDA stream) and gives it back when all is done. So while
one piece is copied another is decoded and others are read and written, in bounded memory of the GPU. torch
keeps pinned memory that has become free for the next piece.

The same code runs on a CPU, where nothing is pinned and there are no queues: for tests, with Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

PIECE_BYTES = 1 << 25
"""Bytes of decoded weights of a piece: enough that a launch, about a millisecond of Python, weighs little."""

QUEUES = 4
"""Pieces on the GPU at a time: one each way, one being decoded, one to spare."""

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


class Gpu:
    """A GPU at work for several threads. Raises NeuzipError when its memory does not suffice."""

    piece = PIECE_BYTES

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_card = device.type == "cuda"
        self._queues: SimpleQueue[torch.cuda.Stream | None] = SimpleQueue()
        for _ in range(QUEUES):
            self._queues.put(self._new_queue())
        self._coding = self._new_queue()

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
        result, errors = self._pinned(numel * fmt.bits // 8), self._pinned(4)
        with self._free_queue():
            buffer = torch.empty(end, dtype=torch.uint8, device=self.device)
            out = torch.empty(numel, dtype=PATTERNS[fmt.bits], device=self.device)
            tensor = CodedTensor(
                fmt, kept_bits, numel, table,
                torch.from_numpy(index.view(np.int16)).to(self.device),
                buffer[places["words"]].view(torch.int16),
                {part: buffer[at.start :] for part, at in places.items() if isinstance(part, int)},
                buffer[places["normaliser"]] if block_size is not None else None,
                block_size,
                None if grid is None else replace(grid, grid=grid.grid.to(self.device)),
            )  # fmt: skip
            # The large copy comes last, so that the small ones need not wait for it.
            plan = triton_decode.prepare([tensor], [out])
            buffer.copy_(host, non_blocking=True)
            plan.launch()
            result.copy_(out.view(torch.uint8), non_blocking=True)
            errors.view(torch.int32).copy_(plan.errors, non_blocking=True)
        return None if errors.numpy().any() else result.numpy().view(fmt.dtype)

    def coder(self, numel: int, fmt: FloatFormat) -> GpuCoder:
        """Begin to code a tensor."""
        return GpuCoder(self, numel, fmt)

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
                    self._wait_for(queue)
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
    def _wait_for(queue: torch.cuda.Stream | None) -> None:
        if queue is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(queue)
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
        """Code what was sent. To be called once."""
        with self._gpu._in(self._gpu._coding):
            encoded = triton_encode.encode(self._bits, self._fmt)
            del self._bits
            index, words = self._fetch(encoded.index), self._fetch(encoded.words)
            planes = {width: self._fetch(plane) for width, plane in encoded.planes.items()}
            self._gpu._wait_for(self._gpu._coding)
        return CodedOnGpu(
            encoded.kept_bits,
            encoded.table,
            [part.view("<u2") for part in index],
            [part.view("<u2") for part in words],
            planes,
        )

    def _fetch(self, tensor: torch.Tensor) -> list[Bytes]:
        """Bytes on their way to pinned memory, in parts that pieces can use again."""
        parts = []
        for part in torch.split(tensor.view(torch.uint8), PIECE_BYTES):
            parts.append(self._gpu._pinned(part.numel()))
            parts[-1].copy_(part, non_blocking=True)
        return [part.numpy() for part in parts]
