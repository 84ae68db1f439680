"""The GPU decoder as operators of torch, `neuzip::decode` and `neuzip::decode_into`: nodes of graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from neuzip.kernels.device.host_memory import host_memory
from neuzip.kernels.float_fields import FORMATS, FloatFormat
from neuzip.kernels.rans.coded import (
    ALIGNMENT,
    COUNTS,
    FIRST,
    LAST,
    OUT,
    PATTERNS,
    POSITIONS,
    ROW,
    STARTS,
    TABLES,
    TENSOR,
    CodedPart,
    CodedTensor,
    Kind,
    raise_if_corrupt,
)
from neuzip.kernels.rans.numbers import BLOCK, SCALE

if TYPE_CHECKING:
    from neuzip.kernels.rans.triton.decode import DecodeLaunch

APART = 256
"""Arrays, and descriptors of chunks, begin at multiples of so many bytes: Triton compiles a kernel once more
for addresses that are no multiples of 16."""


@dataclass(frozen=True)
class ResidentLayout:
    """What the memory of a `ResidentTensor` holds: `streams` bytes of streams, then the decoder's arrays."""

    fmt: str
    numel: int
    kept_bits: int
    group: int
    block_size: int
    grid: int
    streams: int

    @property
    def format(self) -> FloatFormat:
        """The format of the weights."""
        return FORMATS[self.fmt]

    @property
    def full(self) -> int:
        """Full blocks."""
        return self.numel // BLOCK

    def arrays(self) -> Iterator[tuple[str, torch.dtype, slice]]:
        """All arrays of fixed length: name, type, and the bytes they take. The descriptors follow."""
        blocks, end = -(-self.numel // BLOCK), self.streams
        for name, dtype, length in (
            ("starts", torch.int64, blocks),
            ("counts", torch.int32, blocks),
            ("tables", torch.int32, SCALE),
            ("exponents", torch.int32, 256),
            ("errors", torch.int32, 1),
        ):
            start = _apart(end)
            end = start + length * dtype.itemsize
            yield name, dtype, slice(start, end)

    @property
    def descriptors(self) -> int:
        """The byte with which the descriptors begin, one a chunk."""
        *_, (_, _, last) = self.arrays()
        return _apart(last.stop)


@dataclass(frozen=True)
class Chunk:
    """Weights `start` to `stop` of a tensor, the chunk of a number: decoded by itself, in whole blocks."""

    number: int
    start: int
    stop: int

    def blocks(self, layout: ResidentLayout) -> range:
        """The full blocks that are decoded for it."""
        first = min(self.start // BLOCK, layout.full)
        return range(first, max(first, min(-(-self.stop // BLOCK), layout.full)))

    def ragged(self, layout: ResidentLayout) -> bool:
        """Whether the ragged block is decoded too."""
        return self.stop > layout.full * BLOCK

    def capacity(self, layout: ResidentLayout) -> int:
        """Weights that are decoded."""
        blocks = self.blocks(layout)
        return (layout.numel if self.ragged(layout) else blocks.stop * BLOCK) - blocks.start * BLOCK

    def part(self, layout: ResidentLayout) -> slice:
        """Its weights among those that are decoded."""
        before = self.blocks(layout).start * BLOCK
        return slice(self.start - before, self.stop - before)


@dataclass(frozen=True)
class Prepared:
    """What is the same each time that a chunk is decoded: what is launched, and bytes of its output.

    It needs `capacity` of them, of which `own` are its weights.
    """

    part: CodedPart
    capacity: int
    own: slice


# Written out: the operators give their numbers on as they come.
_SCHEMA = (
    "Tensor memory, str fmt, SymInt numel, SymInt kept, SymInt group, SymInt block_size, SymInt grid, "
    "SymInt streams, SymInt number, SymInt start, SymInt stop"
)


@torch.library.custom_op("neuzip::decode", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def decode(memory, fmt, *numbers):  # type: ignore[no-untyped-def]
    """Decode the blocks of a chunk: bit patterns, and int32 `[1]`, not 0 if their words are corrupt.

    The arguments are those of a `ResidentTensor`, which is the way to call it.
    """
    from neuzip.kernels.rans.triton.decode import decode_parts

    layout, chunk = ResidentLayout(fmt, *numbers[:6]), Chunk(*numbers[6:])
    out = memory.new_empty(chunk.capacity(layout), dtype=PATTERNS[layout.format.bits])
    decode_parts([_part(memory, layout, chunk)], [out.view(torch.uint8)])
    return out, _arrays(memory, layout)["errors"].clone()


@decode.register_fake
def _(memory, fmt, *numbers):  # type: ignore[no-untyped-def]
    layout, chunk = ResidentLayout(fmt, *numbers[:6]), Chunk(*numbers[6:])
    out = memory.new_empty(chunk.capacity(layout), dtype=PATTERNS[layout.format.bits])
    return out, memory.new_empty(1, dtype=torch.int32)


@torch.library.custom_op(
    "neuzip::decode_into", mutates_args=("out",), schema=f"(Tensor(a!) out, {_SCHEMA}) -> ()"
)
def decode_into(out, memory, fmt, *numbers):  # type: ignore[no-untyped-def]
    """Decode the blocks of a chunk to where `out` begins; nothing is said of corrupt words."""
    from neuzip.kernels.rans.triton.decode import decode_parts

    layout, chunk = ResidentLayout(fmt, *numbers[:6]), Chunk(*numbers[6:])
    decode_parts([_part(memory, layout, chunk)], [out])


@decode_into.register_fake
def _(out, memory, fmt, *numbers):  # type: ignore[no-untyped-def]
    return None


def _arrays(memory: torch.Tensor, layout: ResidentLayout) -> dict[str, torch.Tensor]:
    return {name: memory[place].view(dtype) for name, dtype, place in layout.arrays()}


def _part(memory: torch.Tensor, layout: ResidentLayout, chunk: Chunk) -> CodedPart:
    row = memory[layout.descriptors + APART * chunk.number :][:APART].view(torch.int64)
    kind = Kind(layout.format, layout.kept_bits, layout.group, layout.block_size, layout.grid)
    return CodedPart(kind, row, len(chunk.blocks(layout)), chunk.ragged(layout))


@dataclass(frozen=True, eq=False)
class HostStreams:
    """The streams of a coded tensor in memory of the host that its device reads: uint8."""

    memory: torch.Tensor


@dataclass(frozen=True, eq=False)
class ResidentTensor:
    """A coded tensor that stays on its device, to be decoded again and again: all of it in one buffer.

    It is decoded chunk by chunk: one unless `of` is told otherwise. memory: uint8. With streams in `host`
    memory, the buffer has only tables, some bytes for each block.
    """

    memory: torch.Tensor
    layout: ResidentLayout
    bounds: tuple[int, ...]
    """The weights with which the chunks start, and the end of the last."""

    host: HostStreams | None = None

    _prepared: dict[int, Prepared] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, coded: CodedTensor, bounds: Sequence[int] | None = None) -> ResidentTensor:
        """Copy the streams of a tensor of at least one weight together. Raises CorruptStream."""
        from neuzip.kernels.rans.triton.decode import make_launches

        bounds = (0, coded.numel) if bounds is None else tuple(bounds)
        if not coded.numel or bounds[0] != 0 or bounds[-1] != coded.numel or sorted(set(bounds)) != [*bounds]:
            raise ValueError(f"{coded.numel} weights have no chunks with the bounds {bounds}")
        parts = [coded.words.view(torch.uint8), *coded.planes.values()]
        if coded.normaliser is not None:
            parts.append(coded.normaliser)
        if coded.grid is not None:
            factors = coded.grid.grid.rows, coded.grid.grid.columns
            parts += [factor_bytes for factor_bytes in factors if factor_bytes is not None]
        ends = torch.tensor([-(-part.numel() // ALIGNMENT) * ALIGNMENT for part in parts]).cumsum(0).tolist()
        fmt, kept_bits, group, block_size, grid = coded.kind
        layout = ResidentLayout(fmt.name, coded.numel, kept_bits, group, block_size, grid, ends[-1])
        nbytes = layout.descriptors + APART * (len(bounds) - 1)
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=coded.words.device)
        moved = []
        for part, start in zip(parts, [0, *ends], strict=False):
            moved.append(memory[start : start + -(-part.numel() // ALIGNMENT) * ALIGNMENT])
            moved[-1][: part.numel()].copy_(part)
        words, *others = moved
        there = replace(
            coded,
            words=words[: coded.words.nbytes].view(torch.int16),
            planes=dict(zip(coded.planes, others, strict=False)),
            normaliser=None if coded.normaliser is None else others[-1],
            grid=None if coded.grid is None else coded.grid.with_factors(others[len(coded.planes) :]),
        )
        errors = torch.zeros(1, dtype=torch.int32, device=memory.device)
        launches = make_launches([there], memory, [0], [0], errors)
        raise_if_corrupt(errors, ["the tensor"])
        result = cls(memory, layout, bounds)
        result._fill(launches[0])  # a ragged one has the same arrays
        return result

    def _fill(self, launch: DecodeLaunch) -> None:
        """Copy what a launch for the whole tensor needs to its place, and make the rows of chunks."""
        arrays = _arrays(self.memory, self.layout)
        for name in ("starts", "counts", "tables", "exponents"):
            arrays[name].copy_(getattr(launch.arrays, name))
        places = {name: place.start for name, _, place in self.layout.arrays()}
        descriptors = self._descriptors
        descriptors[:, : launch.arrays.descriptors.shape[1]] = launch.arrays.descriptors
        host = torch.zeros(self.chunks, descriptors.shape[1], dtype=torch.int64)
        size = BLOCK * self.layout.format.bits // 8
        for number, row in enumerate(host):
            blocks = self.chunk(number).blocks(self.layout)
            row[OUT], row[FIRST], row[LAST] = -blocks.start * size, blocks.start, blocks.stop - 1
            row[TENSOR], row[ROW] = places["errors"] // 4, self.layout.descriptors + APART * number
            row[STARTS], row[COUNTS] = places["starts"], places["counts"]
            row[TABLES] = places["tables"]
        own = [OUT, TENSOR, *range(ROW, LAST + 1)]
        descriptors[:, own] = host[:, own].to(self.memory.device)

    @property
    def _descriptors(self) -> torch.Tensor:
        """The rows of all chunks, int64."""
        return self.memory[self.layout.descriptors :].view(torch.int64).view(-1, APART // 8)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, tables included."""
        return self.memory.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes in memory of the host."""
        return 0 if self.host is None else self.host.memory.nbytes

    @property
    def memories(self) -> tuple[torch.Tensor, ...]:
        """All that is read when it is decoded; what is on the device comes first."""
        return (self.memory,) if self.host is None else (self.memory, self.host.memory)

    def offloaded(self) -> ResidentTensor:
        """This tensor with its streams in host memory: decoding reads them over the link, nothing else does.

        The device keeps 12 bytes for each block of 16,384 weights, and 18 KiB of tables.
        """
        if self.host is not None:
            return self
        cut = _apart(self.layout.streams)
        streams = host_memory(cut, self.memory.device)
        streams.copy_(self.memory[:cut])
        result = replace(
            self,
            memory=self.memory[cut:].clone(),
            layout=replace(self.layout, streams=0),
            host=HostStreams(streams),
        )
        result._descriptors[:, [ROW, STARTS, COUNTS, TABLES]] -= cut
        result._descriptors[:, TENSOR] -= cut // 4
        result._shift_streams(streams.data_ptr() - result.memory.data_ptr())
        return result

    def without_escapes(self) -> ResidentTensor:
        """A copy whose blocks have no escapes, but common exponents in their place: of one on a device."""
        assert self.host is None
        copied = self.on(self.memory.clone())
        arrays = _arrays(copied.memory, self.layout)
        words = copied.memory.view(torch.int16)
        headers = arrays["starts"] // 2
        arrays["counts"] -= 2 * (words[headers].int() & 0xFFFF)
        words[headers] = 0
        return copied

    def _shift_streams(self, nbytes: int) -> None:
        """Say that the streams are so many bytes further from the buffer."""
        self._descriptors[:, list(POSITIONS)] += nbytes
        _arrays(self.memory, self.layout)["starts"].add_(nbytes)

    @property
    def errors(self) -> torch.Tensor:
        """int32 [1] on the device: not 0 if words of a chunk that was decoded since are corrupt."""
        return _arrays(self.memory, self.layout)["errors"]

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    def chunk(self, number: int) -> Chunk:
        """The chunk of a number."""
        return Chunk(number, self.bounds[number], self.bounds[number + 1])

    def capacity(self, number: int = 0) -> int:
        """Bytes that `decode_into` needs for a chunk: blocks are decoded as a whole."""
        return self.chunk(number).capacity(self.layout) * self.layout.format.bits // 8

    def part(self, number: int = 0) -> CodedPart:
        """What a launch is given of a chunk."""
        return self._prepare(number).part

    def decode(self, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The bit patterns of a chunk, and whether the words are corrupt: see the operator."""
        chunk = self.chunk(number)
        out, errors = torch.ops.neuzip.decode(self.memory, *self._arguments(chunk))
        return out[chunk.part(self.layout)], errors

    def decode_into(self, out: torch.Tensor, number: int = 0) -> torch.Tensor:
        """Decode a chunk into `out`, uint8, of at least `capacity` bytes: the bit patterns, a view of it.

        `out` begins at a multiple of 16 bytes. Raises ValueError if it does not fit.
        """
        if torch.compiler.is_compiling() or type(self.memory) is not torch.Tensor:
            self._check(out, number)
            torch.ops.neuzip.decode_into(out, self.memory, *self._arguments(self.chunk(number)))
        else:  # without the dispatcher, and with what the last call prepared
            decode_together([(self, number)], [out])
        return self._patterns(out, number)

    def _check(self, out: torch.Tensor, number: int) -> None:
        capacity = self._prepare(number).capacity
        if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < capacity:
            raise ValueError(
                f"the chunk needs {capacity} bytes of torch.uint8, not {tuple(out.shape)} {out.dtype}"
            )
        if out.device != self.memory.device:
            raise ValueError(f"out is on {out.device}, the coded tensor on {self.memory.device}")

    def _patterns(self, out: torch.Tensor, number: int) -> torch.Tensor:
        """Those of a chunk among what was decoded to `out`."""
        return out[self._prepare(number).own].view(PATTERNS[self.layout.format.bits])

    def on(self, memory: torch.Tensor) -> ResidentTensor:
        """This tensor in other memory that has the same contents. Streams of the host stay where they are."""
        moved = replace(self, memory=memory)
        if self.host is not None:
            moved._shift_streams(self.memory.data_ptr() - memory.data_ptr())
        return moved

    def _arguments(self, chunk: Chunk) -> tuple[str | int, ...]:
        layout = self.layout
        return (
            layout.fmt, layout.numel, layout.kept_bits, layout.group, layout.block_size, layout.grid,
            layout.streams, chunk.number, chunk.start, chunk.stop,
        )  # fmt: skip

    def _prepare(self, number: int) -> Prepared:
        if number not in self._prepared:
            chunk, size = self.chunk(number), self.layout.format.bits // 8
            own = chunk.part(self.layout)
            self._prepared[number] = Prepared(
                _part(self.memory, self.layout, chunk),
                self.capacity(number),
                slice(own.start * size, own.stop * size),
            )
        return self._prepared[number]


def decode_together(
    chunks: Sequence[tuple[ResidentTensor, int]], outs: Sequence[torch.Tensor], warps: int | None = None
) -> list[torch.Tensor]:
    """What `decode_into` does, of several chunks on one device, which share launches."""
    from neuzip.kernels.rans.triton.decode import decode_parts

    if len(outs) > 1 and len({out.device for out in outs}) > 1:
        raise ValueError("chunks on several devices share no launch")
    for (tensor, number), out in zip(chunks, outs, strict=True):
        tensor._check(out, number)
    decode_parts([tensor.part(number) for tensor, number in chunks], outs, warps)
    return [tensor._patterns(out, number) for (tensor, number), out in zip(chunks, outs, strict=True)]


def _apart(nbytes: int) -> int:
    return -(-nbytes // APART) * APART
