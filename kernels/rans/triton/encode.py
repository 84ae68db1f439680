"""The lossless encoder on a GPU, in Triton: the bytes of `compress.schemes.lossless.encode`.

READ THIS FIRST. Only the way is another:

1. The *census* counts pairs of exponents in shared memory: those in a window of 64 exponents around the usual
   ones, and of 0. The few others are counted in device memory. It is the whole histogram all the same.
2. The table is built on the host, by the code that the CPU uses, while the GPU writes the planes.
3. A warp codes a block, a lane a thread, backwards: words grow downwards from the end of a *region* of
   scratch, which has room for the most that a block can take. Of escapes only *notes* are made, one a lane
   and run.
4. A last kernel brings the words of all blocks to their places, back to back, and writes out the escapes.

No kernel reads beyond the tensor: what is left after the last whole program of blocks is coded from a copy,
which is filled up to whole runs. Triton's interpreter runs all of this on CPU tensors.

Weights that have changed a little are coded anew by the table that they have: see `Recoder`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.float_fields import FloatFormat, plane_bytes, plane_widths
from neuzip.kernels.rans.model import Table, choose_table
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN
from neuzip.kernels.rans.triton.census import GpuCensus
from neuzip.kernels.rans.triton.encode_blocks import SCRATCH, BlockCoder, code_words, whole_programs
from neuzip.kernels.rans.triton.encode_planes import INTEGERS, plane_views, write_planes
from neuzip.kernels.rans.triton.encoder_table import EncoderTable, encoder_table
from neuzip.kernels.tuning import launch_for

__all__ = ["SCRATCH", "GpuEncoded", "Recoder", "encode"]

SHORT = 10
"""A mantissa of at most this many bits is taken to be used in full until the census says otherwise."""


@dataclass(frozen=True)
class GpuEncoded:
    """A coded tensor: the table on the host, the rest on the device.

    `index` and `words` are int16 with the bits of uint16: the number of words of every block, and the blocks
    back to back. `planes` are uint8, by width; their memory goes on, with zeros, to a multiple of 32 bytes.
    The memory of `words` goes on by what was asked for to spare.
    """

    kept_bits: int
    coding: EncoderTable
    index: torch.Tensor
    words: torch.Tensor
    planes: dict[int, torch.Tensor]

    @property
    def table(self) -> Table:
        """Palette and frequencies."""
        return self.coding.table


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
    """Code bit patterns: a contiguous one-dimensional tensor of integers of fmt.bits bits, at least one.

    Whether that pays is the caller's business: incompressible weights take more than they did. The words get
    memory for one in `spare` more. Options change the speed and not one byte; without them the table of the
    card decides: `warps` of a program code a block each, `programs` of `threads` take the census, and with
    less than `scratch` bytes of scratch fewer blocks are coded at a time.
    """
    bits = _checked(bits, fmt)
    numel, config = bits.numel(), launch_for("rans.encode", bits.device)
    warps = warps or config["num_warps"]
    programs = programs or config["census_programs"] * multiprocessors(bits.device)
    main = whole_programs(numel, warps)
    census = GpuCensus(bits, fmt, threads or config["census_threads"], programs)
    # Most tensors use all bits of a short mantissa. If this one does not, its planes are written again.
    assumed = fmt.mantissa_bits if fmt.mantissa_bits <= SHORT else None
    if assumed is not None:
        planes = _empty_planes(bits, assumed)
        write_planes(bits, main, plane_views(planes, 0), fmt, assumed)
    used = census.kept_bits()
    if used != assumed:
        planes = _empty_planes(bits, used)
        write_planes(bits, main, plane_views(planes, 0), fmt, used)
    counts = census.read()
    table = choose_table(counts.exponents, counts.among if fmt.exponent_bits <= 8 else None)
    coding = encoder_table(table, fmt, bits.device)
    rest = _rest(bits, main, table, fmt)
    index = torch.empty(-(-numel // BLOCK), dtype=torch.int16, device=bits.device)
    words = code_words(BlockCoder(bits, rest, fmt, coding, index, warps, scratch), spare)
    if rest is not None:
        write_planes(rest, rest.numel(), plane_views(planes, main), fmt, used)
    return GpuEncoded(used, coding, index, words, {w: p[: plane_bytes(w, numel)] for w, p in planes.items()})


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
        self.coding = encoded.coding
        self._warps = warps or launch_for("rans.encode", encoded.index.device)["num_warps"]
        self._fmt, self._numel, self._scratch = fmt, numel, scratch
        self._main = whole_programs(numel, self._warps)
        self._index, self._room = encoded.index, _whole_memory(encoded.words)
        planes = {width: _whole_memory(plane) for width, plane in encoded.planes.items()}
        self._views = plane_views(planes, 0), plane_views(planes, self._main)

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
        fmt, main = self._fmt, self._main
        rest = _rest(bits, main, self.coding.table, fmt)
        blocks = BlockCoder(bits, rest, fmt, self.coding, self._index, self._warps, self._scratch)
        write_planes(bits, main, self._views[0], fmt, fmt.mantissa_bits)
        if rest is not None:
            write_planes(rest, rest.numel(), self._views[1], fmt, fmt.mantissa_bits)
        for at in blocks.spans:
            blocks.code(at)
            blocks.gather(at, self._room)
        words = int(blocks.ends[-1])
        return self._room[:words] if words <= self._room.numel() else None


def _empty_planes(bits: torch.Tensor, mantissa_bits: int) -> dict[int, torch.Tensor]:
    """Planes for the fields of `bits`, with room for whole runs."""
    size = _whole_runs(bits.numel())
    return {
        width: torch.empty(size * width // 8, dtype=torch.uint8, device=bits.device)
        for width in plane_widths(1 + mantissa_bits)
    }


def _rest(bits: torch.Tensor, main: int, table: Table, fmt: FloatFormat) -> torch.Tensor | None:
    """The weights from `main` on, filled up to whole runs; None if there are none."""
    left = bits.numel() - main
    if not left:
        return None
    rest = bits.new_full((_whole_runs(left),), table.filler << fmt.mantissa_bits)
    rest[:left] = bits[main:]
    return rest


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


def _whole_runs(numel: int) -> int:
    """`numel` rounded up to whole runs of all lanes."""
    return -(-numel // (LANES * RUN)) * LANES * RUN
