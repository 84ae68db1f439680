"""The lossless encoder on a GPU, in Triton: the bytes of `compress.schemes.lossless.encode`.

READ THIS FIRST. Only the way is another. Tensors of a *batch* share all launches, and waits of the host:

1. The *census* counts pairs of exponents in shared memory: those in a window of 64 exponents around the usual
   ones, and of 0. The few others are counted in device memory. It is the whole histogram all the same.
2. A program for each tensor makes its table on the device, by the arithmetic of the CPU.
3. A warp codes a block, a lane a thread, backwards: words grow downwards from the end of a *region* of
   scratch, which has room for the most that a block can take. Of escapes only *notes* are made, one a lane
   and run. The plane of bf16 is written in passing.
4. The host gets the tables while blocks are coded, and with them an estimate of all words, for which it
   allocates memory. A last kernel brings the words of all blocks to their places, back to back, and writes
   out the escapes. Then the host learns how many words there are. If they are more than estimated, they are
   brought to more memory. Meanwhile the GPU counts the next batch.

What is launched before the host knows the tables is for tensors that are coded in pairs, without addends, and
use all bits of a short mantissa. Nearly all do. The others are done again as they are.

No kernel reads beyond a tensor: see batch.py. Triton's interpreter runs all of this on CPU tensors.

Weights that have changed a little are coded anew by the table that they have: see `Recoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.device.memory_part import MemoryPart
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.model import Table
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.kernels.rans.triton import census
from neuzip.kernels.rans.triton.batch import (
    INTEGERS,
    PLANE_WIDTHS,
    Batch,
    CensusShares,
    PlaneLayout,
    Planes,
    cut,
    sizes_of,
)
from neuzip.kernels.rans.triton.encode_blocks import SCRATCH, BlockCoder, fill_tails, scratch_bytes
from neuzip.kernels.rans.triton.encode_planes import write_planes, writes_planes
from neuzip.kernels.rans.triton.encoder_table import EncoderTables, HostTables, make_tables
from neuzip.kernels.rans.triton.lists import MOST, Ints
from neuzip.kernels.tuning import launch_for

__all__ = ["SCRATCH", "GpuEncoded", "Recoder", "encode", "encode_all"]

SHORT = 10
"""A mantissa of at most this many bits is taken to be used in full until the table says otherwise."""

SHARE = 16
"""Divisor: a batch may have 1 / SHARE of the bytes of all tensors as scratch."""


@dataclass(frozen=True)
class GpuEncoded:
    """A coded tensor: the table on the host, the rest on the device.

    `index` and `words` are int16 with the bits of uint16: the number of words of every block, and the blocks
    back to back. `planes` are uint8, by width; their memory goes on, with zeros, to a multiple of 32 bytes.
    Tensors that were coded together share memory: it becomes free when none of them is used any more, and
    the part for words is 1 to 2 % larger than these. If words are to spare, those of each tensor have memory
    of their own, which goes on by as many. `tables` are of all that were coded together, on the device;
    `row` says which is this one's.
    """

    kept_bits: int
    table: Table
    tables: EncoderTables
    row: int
    index: torch.Tensor
    words: torch.Tensor
    planes: Planes

    @property
    def coding(self) -> EncoderTables:
        """The table on the device."""
        return self.tables.row(self.row)


@dataclass(frozen=True)
class _Options:
    """How tensors are coded, beside their bits."""

    fmt: FloatFormat
    warps: int
    threads: int
    shares: CensusShares
    scratch: int
    spare: int


def encode(
    bits: torch.Tensor,
    fmt: FloatFormat,
    *,
    warps: int | None = None,
    threads: int | None = None,
    programs: int | None = None,
    scratch: int | None = None,
    spare: int = 0,
) -> GpuEncoded:
    """Code one tensor: see `encode_all`."""
    (encoded,) = encode_all(
        [bits], fmt, warps=warps, threads=threads, programs=programs, scratch=scratch, spare=spare
    )
    return encoded


def encode_all(
    tensors: Sequence[torch.Tensor],
    fmt: FloatFormat,
    *,
    warps: int | None = None,
    threads: int | None = None,
    programs: int | None = None,
    scratch: int | None = None,
    spare: int = 0,
) -> list[GpuEncoded]:
    """Code bit patterns: contiguous one-dimensional tensors of integers of fmt.bits bits, at least one each.

    All are on one device. Many small ones share launches, and the host waits once for them. Whether coding
    pays is the caller's business: incompressible weights take more than they did. The words of each tensor
    get memory for one in `spare` more. Options change the speed and not one byte; without them the table of
    the card decides: `warps` of a program code a block each, about `programs` of `threads` take the census,
    and with less than `scratch` bytes of scratch fewer blocks are coded at a time. Raises ValueError for what
    is no bit pattern.
    """
    if not tensors:
        return []
    device = tensors[0].device
    if any(bits.device != device for bits in tensors):
        raise ValueError("the tensors are on several devices")
    config = launch_for("rans.encode", device)
    if scratch is None:
        sizes = [bits.nbytes for bits in tensors]
        scratch = max(SCRATCH, max(sizes) * 4 // 5, sum(sizes) // SHARE)
    threads = threads or config["census_threads"]
    programs = programs or config["census_programs"] * multiprocessors(device)
    options = _Options(
        fmt, warps or config["num_warps"], threads, census.shares(fmt, threads, programs), scratch, spare
    )
    results: list[GpuEncoded] = []
    before: _BatchEncoder | None = None
    for together in _batches(tensors, options):
        batch = _BatchEncoder(together, options)
        if before is not None:  # the GPU counts the next batch while the host learns of this one
            before.finish()
        batch.code()
        if before is not None:
            before.describe()
            results += before.results()
        batch.gather()
        before = batch
    assert before is not None
    before.describe()  # while the GPU codes
    before.finish()
    return results + before.results()


def _batches(tensors: Sequence[torch.Tensor], options: _Options) -> Iterator[list[torch.Tensor]]:
    """Tensors in their order, checked, as many together as have scratch for it."""
    together: list[torch.Tensor] = []
    left, each = options.scratch, scratch_bytes(_usual_group(options.fmt))
    for tensor in tensors:
        bits = _checked(tensor, options.fmt)
        needed = -(-bits.numel() // BLOCK) * each
        if together and (needed > left or len(together) == MOST):
            yield together
            together, left = [], options.scratch
        together.append(bits)
        left -= needed
    yield together


def _usual_group(fmt: FloatFormat) -> int:
    """Weights of a symbol in nearly all tensors."""
    return 2 if fmt.exponent_bits <= 8 else 1


class _BatchEncoder:
    """Tensors that are coded together. When this is made, they are counted, and their tables made.

    `code` launches what needs no table on the host, `gather` what needs no numbers of words, and `finish` the
    rest. `describe` makes what results need beside words.
    """

    def __init__(self, bits: Sequence[torch.Tensor], options: _Options) -> None:
        self._options, fmt = options, options.fmt
        self._assumed = fmt.mantissa_bits if fmt.mantissa_bits <= SHORT else None
        sizes = sizes_of(tuple([one.numel() for one in bits]), options.warps, self._assumed, options.shares)
        self._batch = batch = Batch(bits, fmt, options.warps, sizes)
        counters, elsewhere, self._ends = census.count(batch, options.threads)
        self._tables = make_tables(batch, counters, elsewhere)
        self._tables_there = _Answer(self._tables.tables)
        self._group = _usual_group(fmt)
        self._words: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._other_planes: dict[int, Planes] = {}

    def code(self) -> None:
        """Launch the coding of all tensors."""
        batch, fmt = self._batch, self._options.fmt
        fill_tails(batch, self._tables.tables)
        self._index = torch.empty(batch.sizes.shares.blocks, dtype=torch.int16, device=batch.device)
        self._blocks: BlockCoder | None = self._code(None, self._group, False, self._ends)
        self._lengths_there = _Answer(self._blocks.lengths)
        if self._assumed is not None and not writes_planes(fmt):
            everyone = np.ones(len(batch.bits), bool)
            write_planes(batch, batch.planes, batch.columns, everyone, self._assumed)

    def gather(self) -> None:
        """Launch the gathering of words, to as much memory as they are likely to need. Waits for tables."""
        self._host = host = HostTables(self._tables_there.wait())
        self._other_rows: dict[tuple[int, bool], list[int]] = {}
        for row, kind in enumerate(zip(host.groups, host.addends, strict=True)):
            self._other_rows.setdefault(kind, []).append(row)
        self._usual_rows = self._other_rows.pop((self._group, False), [])
        assert self._blocks is not None
        self._slab: torch.Tensor | None = None
        if self._usual_rows and len(self._blocks.spans) == 1:
            self._slab = self._empty_words(sum([host.rooms[row] for row in self._usual_rows]))
            self._blocks.gather(0, self._slab)

    def describe(self) -> None:
        """Tables, indexes and planes of all tensors. Waits for nothing."""
        batch = self._batch
        self._host_tables = self._host.tables()
        self._indexes = self._index.split(batch.sizes.blocks.tolist())
        layout = batch.sizes.layout
        self._planes = [{}] * len(batch.bits) if layout is None else layout.planes(batch.planes)

    def finish(self) -> None:
        """Launch the rest. Waits for the device."""
        blocks, self._blocks = self._blocks, None
        assert blocks is not None
        lengths = self._lengths_there.wait()
        if self._usual_rows:
            self._take_words(blocks, self._usual_rows, lengths, self._slab)
        del blocks  # its scratch is there for the next
        for (group, addends), rows in self._other_rows.items():
            others = self._code(rows, group, addends)
            self._take_words(others, rows, others.lengths.cpu().numpy())
        for kept_bits in {*self._host.kept_bits} - {self._assumed}:
            self._write_planes(kept_bits)

    def results(self) -> list[GpuEncoded]:
        """The coded tensors, of which kernels may still be writing."""
        columns = self._host.kept_bits, self._host_tables, self._indexes, self._planes
        results = []
        for row, (kept_bits, table, index, planes) in enumerate(zip(*columns, strict=True)):
            words = self._with_room(cut(*self._words[row]))
            planes = self._other_planes.get(row, planes)
            results.append(GpuEncoded(kept_bits, table, self._tables, row, index, words, planes))
        return results

    def _code(
        self, rows: Sequence[int] | None, group: int, addends: bool, ends: MemoryPart | None = None
    ) -> BlockCoder:
        """Code the first span of some tensors, or of all."""
        blocks = BlockCoder(
            self._batch, self._tables, self._index, rows, group, addends, self._options.scratch, ends
        )
        blocks.code(0)
        return blocks

    def _take_words(
        self, blocks: BlockCoder, rows: Sequence[int], lengths: Ints, slab: torch.Tensor | None = None
    ) -> None:
        """Take the words of some tensors from where they were gathered, if there was room, or gather them.

        Waits for the device where there are several spans.
        """
        if len(blocks.spans) > 1:
            words = self._words_of_spans(blocks)
            self._words[rows[0]] = words, 0, words.numel()
            return
        (begins, places), last = lengths.tolist(), rows[-1]
        needed = places[last] + begins[last + 1] - begins[last]
        if slab is None or slab.numel() < needed:
            slab = self._empty_words(needed)
            blocks.gather(0, slab)
        for row in rows:
            self._words[row] = slab, places[row], begins[row + 1] - begins[row]

    def _words_of_spans(self, blocks: BlockCoder) -> torch.Tensor:
        """The words of the only tensor, whose first span has been coded."""
        parts, first = [], 0
        for at in blocks.spans:
            end = blocks.spans.step if at == 0 else blocks.code(at)
            last = int(blocks.ends.tensor()[end])
            parts.append(self._empty_words(last - first))
            blocks.gather(at, parts[-1], first)
            first = last
        return torch.cat(parts)

    def _empty_words(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.int16, device=self._batch.device)

    def _with_room(self, words: torch.Tensor) -> torch.Tensor:
        """Words, or a copy with memory for what is to be spared."""
        if not self._options.spare:
            return words
        length = words.numel()
        return self._empty_words(length + length // self._options.spare)[:length].copy_(words)

    def _write_planes(self, kept_bits: int) -> None:
        """Write the planes of tensors that keep other mantissa bits than was assumed."""
        batch, numels = self._batch, self._batch.sizes.numels
        chosen = np.array(self._host.kept_bits) == kept_bits
        layout = PlaneLayout.of(np.where(chosen, numels, 0).tolist(), kept_bits)
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=batch.device)
        write_planes(batch, memory, batch.columns_with(layout.places), chosen, kept_bits)
        for row, planes in enumerate(layout.planes(memory)):
            if chosen[row]:
                self._other_planes[row] = planes


class _Answer:
    """An array on its way from the device to the host, copied when all before it has been done."""

    def __init__(self, array: torch.Tensor) -> None:
        self._host = array.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if array.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> npt.NDArray[Any]:
        """The array, once it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()


class Recoder:
    """Codes other weights by the table that some were coded by, to where those lie: planes, index and words.

    Nothing is counted, no table is made, only scratch is allocated, and the host waits for the device once.
    It is lossless whatever the weights are, because all mantissa bits are kept, and exponents that the table
    does not have are escapes. The words are those that the CPU's encoder writes by this table.

    Words for which there is no room are not written, and weights are then to be coded from scratch. With one
    in 50 to spare, words take at most 2 % more than when their table was made: 0.5 % of all bytes of bf16.
    Whether weights have come to need fewer words than that, with another table, nobody looks.
    """

    def __init__(
        self,
        encoded: GpuEncoded,
        fmt: FloatFormat,
        numel: int,
        *,
        warps: int | None = None,
        scratch: int | None = None,
    ) -> None:
        if encoded.kept_bits != fmt.mantissa_bits:
            raise ValueError(f"only {encoded.kept_bits} of {fmt.mantissa_bits} mantissa bits were kept")
        if -(-numel // BLOCK) != encoded.index.numel():
            raise ValueError(f"{numel} weights are not those of {encoded.index.numel()} blocks")
        self.coding, self._group = encoded.coding, encoded.table.group
        # The slower form of the division, where one of 4,096 frequencies of the table needs it.
        (self._addends,) = HostTables(encoded.coding.tables.cpu().numpy()).addends
        self._warps = warps or launch_for("rans.encode", encoded.index.device)["num_warps"]
        self._fmt, self._numel = fmt, numel
        self._scratch = max(SCRATCH, numel * fmt.bits // 8 * 4 // 5) if scratch is None else scratch
        self._index, self._room = encoded.index, _whole_memory(encoded.words)
        self._planes = next(iter(encoded.planes.values()))
        self._places = np.zeros((len(PLANE_WIDTHS), 1), np.int64)
        for width, plane in encoded.planes.items():
            self._places[PLANE_WIDTHS.index(width)] = plane.data_ptr() - self._planes.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes on the device beside planes, index and words: its coding, and the room that words have."""
        return self.coding.nbytes + self._room.nbytes

    def code(self, bits: torch.Tensor) -> torch.Tensor | None:
        """Code as many bit patterns as there were; their words. None if they have no room.

        Waits for the device.
        """
        bits = _checked(bits, self._fmt)
        if bits.numel() != self._numel:
            raise ValueError(f"{bits.numel()} weights in place of {self._numel}")
        sizes = sizes_of((self._numel,), self._warps, None)
        batch = Batch([bits], self._fmt, self._warps, sizes, self._planes, self._places)
        fill_tails(batch, self.coding.tables)
        blocks = BlockCoder(batch, self.coding, self._index, None, self._group, self._addends, self._scratch)
        if not writes_planes(self._fmt):
            write_planes(batch, batch.planes, batch.columns, np.ones(1, bool), self._fmt.mantissa_bits)
        for at in blocks.spans:
            blocks.code(at)
            blocks.gather(at, self._room)
        words = int(blocks.ends.tensor()[-1])
        return self._room[:words] if words <= self._room.numel() else None


def _whole_memory(array: torch.Tensor) -> torch.Tensor:
    """An array at the beginning of its memory, with what follows it there."""
    return array.as_strided((array.untyped_storage().nbytes() // array.element_size(),), (1,), 0)


def _checked(bits: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """`bits` as signed integers that start at a multiple of 16 bytes."""
    if bits.dim() != 1 or not bits.is_contiguous() or bits.numel() == 0:
        raise ValueError(f"bits are one-dimensional, contiguous, and at least one: not {tuple(bits.shape)}")
    if bits.dtype.is_floating_point or bits.element_size() * 8 != fmt.bits:
        raise ValueError(f"{fmt.name} takes integers of {fmt.bits} bits, not {bits.dtype}")
    if bits.data_ptr() % 16:
        bits = bits.clone()
    dtype = INTEGERS[fmt.bits]
    return bits if bits.dtype == dtype else bits.view(dtype)
