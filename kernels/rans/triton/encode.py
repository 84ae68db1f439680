"""The lossless encoder on a GPU, in Triton: the bytes of `compress.schemes.lossless.encode`.

READ THIS FIRST. Only the way is another. Tensors of a *batch* share all launches, and waits of the host:

1. The *census* counts pairs of exponents in shared memory: those in a window of 64 exponents around the usual
   ones, and of 0. The few others are counted in device memory. It is the whole histogram all the same.
2. A program for each tensor makes its table on the device, by the arithmetic of the CPU.
3. A warp codes a block, a lane a thread, backwards: words grow downwards from the end of a *region* of
   scratch, which has room for the most that a block can take. Of escapes only *notes* are made, one a lane
   and run. The plane of bf16 is written in passing.
4. The host gets the tables while blocks are coded, then the numbers of words, and allocates these. Meanwhile
   the GPU writes planes of other formats, and counts the next batch. A last kernel brings the words of all
   blocks to their places, back to back, and writes out the escapes.

What is launched before the host knows the tables is for tensors that are coded in pairs, without addends, and
use all bits of a short mantissa. Nearly all do. The others are done again as they are.

No kernel reads beyond a tensor: see batch.py. Triton's interpreter runs all of this on CPU tensors.

Weights that have changed a little are coded anew by the table that they have: see `Recoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.float_fields import FloatFormat, plane_bytes
from neuzip.kernels.rans.model import Table
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.kernels.rans.triton import census
from neuzip.kernels.rans.triton.batch import INTEGERS, Batch, Planes, empty_planes
from neuzip.kernels.rans.triton.encode_blocks import SCRATCH, BlockCoder, fill_tails, scratch_bytes
from neuzip.kernels.rans.triton.encode_planes import write_planes, writes_planes
from neuzip.kernels.rans.triton.encoder_table import EncoderTables, HostTables, make_tables
from neuzip.kernels.rans.triton.lists import ENTRIES, MOST, Ints
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
    The memory of `words` goes on by what was asked for to spare. Tensors that were coded together share the
    memory of `index` and `coding`, the table on the device.
    """

    kept_bits: int
    table: Table
    coding: EncoderTables
    index: torch.Tensor
    words: torch.Tensor
    planes: Planes


@dataclass(frozen=True)
class _Options:
    """How tensors are coded, beside their bits."""

    fmt: FloatFormat
    warps: int
    threads: int
    programs: int
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
    checked = [_checked(bits, fmt) for bits in tensors]
    device = checked[0].device
    if any(bits.device != device for bits in checked):
        raise ValueError("the tensors are on several devices")
    config = launch_for("rans.encode", device)
    if scratch is None:
        sizes = [bits.nbytes for bits in checked]
        scratch = max(SCRATCH, max(sizes) * 4 // 5, sum(sizes) // SHARE)
    options = _Options(
        fmt, warps or config["num_warps"], threads or config["census_threads"],
        programs or config["census_programs"] * multiprocessors(device), scratch, spare,
    )  # fmt: skip
    results: list[GpuEncoded] = []
    before: _BatchEncoder | None = None
    for together in _batches(checked, options):
        batch = _BatchEncoder(together, options)
        if before is not None:  # the GPU counts the next batch while the host learns of this one
            before.finish()
        batch.code()
        if before is not None:
            results += before.results()
        before = batch
    assert before is not None
    before.finish()
    return results + before.results()


def _batches(tensors: Sequence[torch.Tensor], options: _Options) -> Iterator[list[torch.Tensor]]:
    """Tensors in their order, as many together as have scratch for it."""
    together: list[torch.Tensor] = []
    left, each = options.scratch, scratch_bytes(_usual_group(options.fmt))
    for bits in tensors:
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

    `code` launches all that needs no table on the host, `finish` the rest.
    """

    def __init__(self, bits: Sequence[torch.Tensor], options: _Options) -> None:
        self._options, fmt, device = options, options.fmt, bits[0].device
        self._assumed = fmt.mantissa_bits if fmt.mantissa_bits <= SHORT else None
        self._planes: list[Planes] = [{}] * len(bits)
        if self._assumed is not None:
            self._planes = [empty_planes(one.numel(), self._assumed, device) for one in bits]
        self._batch = Batch(bits, fmt, options.warps, self._planes)
        self._tables = make_tables(self._batch, *census.count(self._batch, options.threads, options.programs))
        self._tables_there = _Answer(self._tables.tables)
        self._totals = torch.empty(ENTRIES, dtype=torch.int64, device=device)
        self._group = _usual_group(fmt)
        self._blocks: BlockCoder | None = None
        self._words: list[torch.Tensor | None] = [None] * len(bits)

    def code(self) -> None:
        """Launch the coding of all tensors."""
        batch, fmt = self._batch, self._options.fmt
        fill_tails(batch, self._tables.tables)
        self._index = torch.empty(batch.sizes.shares.blocks, dtype=torch.int16, device=batch.device)
        self._blocks = self._code(None, self._group, addends=False)
        self._totals_there = _Answer(self._totals)
        if self._assumed is not None and not writes_planes(fmt):
            write_planes(batch, self._planes, self._assumed)

    def finish(self) -> None:
        """Launch the rest. Waits for the device."""
        self._host = host = HostTables(self._tables_there.wait())
        codings: dict[tuple[int, bool], list[int]] = {}
        mantissas: dict[int, list[int]] = {}
        for row, (group, addends, kept_bits) in enumerate(
            zip(host.groups, host.addends, host.kept_bits, strict=True)
        ):
            codings.setdefault((group, addends), []).append(row)
            mantissas.setdefault(kept_bits, []).append(row)
        blocks, self._blocks = self._blocks, None
        assert blocks is not None
        totals = self._totals_there.wait()
        if rows := codings.pop((self._group, False), None):
            self._gather(blocks, rows, totals)
        del blocks  # its scratch is there for the next
        for (group, addends), rows in codings.items():
            others = self._code(rows, group, addends)
            self._gather(others, rows, self._totals.cpu().numpy())
        for kept_bits, rows in mantissas.items():
            if kept_bits != self._assumed:
                self._write_planes(rows, kept_bits)

    def results(self) -> list[GpuEncoded]:
        """The coded tensors, of which kernels may still be writing."""
        sizes, host = self._batch.sizes, self._host
        indexes = self._index.split(sizes.blocks.tolist())
        results = []
        for row, (numel, coding, index, words) in enumerate(
            zip(sizes.numels.tolist(), self._tables.rows(), indexes, self._words, strict=True)
        ):
            assert words is not None
            planes = {w: _cut(plane, plane_bytes(w, numel)) for w, plane in self._planes[row].items()}
            results.append(GpuEncoded(host.kept_bits[row], host.table(row), coding, index, words, planes))
        return results

    def _code(self, rows: Sequence[int] | None, group: int, addends: bool) -> BlockCoder:
        """Code the first span of some tensors, or of all."""
        blocks = BlockCoder(
            self._batch, self._tables, self._index, rows, group, addends, self._options.scratch, self._totals
        )
        blocks.code(0)
        return blocks

    def _gather(self, blocks: BlockCoder, rows: Sequence[int], totals: Ints) -> None:
        """Gather the words of some tensors. Waits for the device where there are several spans."""
        if len(blocks.spans) > 1:
            self._words[rows[0]] = self._words_of_spans(blocks)
            return
        chosen: list[torch.Tensor | None] = [None] * len(self._words)
        for row in rows:
            chosen[row] = self._words[row] = self._empty_words(int(totals[row + 1] - totals[row]))
        blocks.gather(0, chosen)

    def _words_of_spans(self, blocks: BlockCoder) -> torch.Tensor:
        """The words of the only tensor, whose first span has been coded."""
        parts, first = [], 0
        for at in blocks.spans:
            end = blocks.spans.step if at == 0 else blocks.code(at)
            last = int(blocks.ends[end])
            parts.append(torch.empty(last - first, dtype=torch.int16, device=blocks.ends.device))
            blocks.gather(at, [parts[-1]], first)
            first = last
        return torch.cat(parts, out=self._empty_words(first))

    def _empty_words(self, length: int) -> torch.Tensor:
        spare = self._options.spare
        capacity = length + (length // spare if spare else 0)
        return _cut(torch.empty(capacity, dtype=torch.int16, device=self._batch.device), length)

    def _write_planes(self, rows: Sequence[int], mantissa_bits: int) -> None:
        written: list[Planes | None] = [None] * len(self._planes)
        for row in rows:
            numel = self._batch.bits[row].numel()
            written[row] = self._planes[row] = empty_planes(numel, mantissa_bits, self._batch.device)
        write_planes(self._batch, written, mantissa_bits)


def _cut(array: torch.Tensor, length: int) -> torch.Tensor:
    """The beginning of an array, or all of it."""
    return array if array.numel() == length else array[:length]


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
        self._planes = {width: _whole_memory(plane) for width, plane in encoded.planes.items()}

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
        batch = Batch([bits], self._fmt, self._warps, [self._planes])
        fill_tails(batch, self.coding.tables)
        totals = torch.empty(ENTRIES, dtype=torch.int64, device=bits.device)
        blocks = BlockCoder(
            batch, self.coding, self._index, None, self._group, self._addends, self._scratch, totals
        )
        if not writes_planes(self._fmt):
            write_planes(batch, [self._planes], self._fmt.mantissa_bits)
        for at in blocks.spans:
            blocks.code(at)
            blocks.gather(at, [self._room])
        words = int(blocks.ends[-1])
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
    return bits.view(INTEGERS[fmt.bits])
