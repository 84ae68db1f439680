"""The lossless encoder on a GPU, in Triton: the bytes of `compress.lossless.encode`.

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

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from neuzip.kernels.float_fields import FloatFormat, plane_bytes, plane_widths
from neuzip.kernels.rans.cpu import fill_symbols
from neuzip.kernels.rans.model import Table, choose_table
from neuzip.kernels.rans.numbers import BLOCK, HEADER_WORDS, LANES, LOWER, RAW_STEPS, RUN, RUNS, SCALE

WINDOW = 64
"""Exponents whose pairs are counted in shared memory, and 0 besides: 64 * 64 + 2 * 64 + 1 counters."""

COUNTERS = 5120
"""The counters, rounded up so that any number of threads clears them in whole turns: 20 KB."""

BELOW_MEAN = 40
"""The window begins this far below the mean exponent of a sample: small weights lie further from it."""

SHORT = 10
"""A mantissa of at most this many bits is taken to be used in full until the census says otherwise."""

SCRATCH = 64 << 20
"""Bytes of scratch that any tensor may have. A larger one may have 4/5 of its own size."""

ROW = 256 + 6
"""Entries from the facts of a pair to those of the pair with the next second exponent. Were it 256, all pairs
with the same first exponent would lie in one bank of the first-level cache, and wait for each other."""

NOTES = LANES * RUNS
"""The most notes of a block: one a lane and run."""

Ints = npt.NDArray[np.int64]
Lock = AbstractContextManager[object]


@dataclass(frozen=True)
class Coding:
    """A table as the encoder reads it, on the device.

    `facts`, int64, has those of the symbol of every key, with its escapes; `symbols`, int16, the symbols. A
    key is an exponent, or a pair first | second << 8. `addends`: whether any symbol has one.
    """

    table: Table
    facts: torch.Tensor
    symbols: torch.Tensor
    addends: bool

    @property
    def nbytes(self) -> int:
        """Bytes on the device: 0.67 MB for pairs, 7 KB for single exponents of 8 bits."""
        return sum(array.untyped_storage().nbytes() for array in (self.facts, self.symbols))


@dataclass(frozen=True)
class Encoded:
    """A coded tensor: the table on the host, the rest on the device.

    `index` and `words` are int16 with the bits of uint16: the number of words of every block, and the blocks
    back to back. `planes` are uint8, by width; their memory goes on, with zeros, to a multiple of 32 bytes.
    The memory of `words` goes on by what was asked for to spare.
    """

    kept: int
    coding: Coding
    index: torch.Tensor
    words: torch.Tensor
    planes: dict[int, torch.Tensor]

    @property
    def table(self) -> Table:
        """Palette and frequencies."""
        return self.coding.table


def encode(bits: torch.Tensor, fmt: FloatFormat) -> Encoded:
    """Code bit patterns: a contiguous one-dimensional tensor of integers of fmt.bits bits, at least one.

    Whether that pays is the caller's business: incompressible weights take more than they did. Where there
    are other threads, the caller holds `LAUNCHING`.
    """
    return encode_launched(bits, fmt)


def encode_launched(
    bits: torch.Tensor,
    fmt: FloatFormat,
    *,
    warps: int = 4,
    threads: int = 256,
    programs: int | None = None,
    scratch: int | None = None,
    lock: Lock | None = None,
    spare: int = 0,
) -> Encoded:
    """`encode`, with what changes its speed and not one byte.

    `warps` of a program code a block each. `programs` of `threads` take the census. `scratch` is in bytes:
    with less of it, fewer blocks are coded at a time. `lock` is held around each launch alone, so that other
    threads launch while this one waits for the device. The words get memory for one in `spare` more.
    """
    lock = nullcontext() if lock is None else lock
    bits = _checked(bits, fmt)
    numel = bits.numel()
    main = _whole_programs(numel, warps)
    census = _Census(bits, fmt, threads, programs, lock)
    # Most tensors use all bits of a short mantissa. If this one does not, its planes are written again.
    assumed = fmt.mantissa_bits if fmt.mantissa_bits <= SHORT else None
    if assumed is not None:
        planes = _empty_planes(bits, assumed)
        _write_planes(bits, main, _views(planes, 0), fmt, assumed, lock)
    kept = census.kept()
    if kept != assumed:
        planes = _empty_planes(bits, kept)
        _write_planes(bits, main, _views(planes, 0), fmt, kept, lock)
    counted = census.read()
    table = choose_table(counted.exponents, counted.among if fmt.exponent_bits <= 8 else None)
    coding = _coding(table, fmt, bits.device, lock)
    rest = _rest(bits, main, table, fmt)
    index = torch.empty(-(-numel // BLOCK), dtype=torch.int16, device=bits.device)
    words = _words(_Blocks(bits, rest, fmt, coding, index, warps, scratch, lock), spare)
    if rest is not None:
        _write_planes(rest, rest.numel(), _views(planes, main), fmt, kept, lock)
    return Encoded(kept, coding, index, words, {w: p[: plane_bytes(w, numel)] for w, p in planes.items()})


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
        encoded: Encoded,
        fmt: FloatFormat,
        numel: int,
        *,
        warps: int = 4,
        scratch: int | None = None,
        lock: Lock | None = None,
    ) -> None:
        if encoded.kept != fmt.mantissa_bits:
            raise ValueError(f"only {encoded.kept} of {fmt.mantissa_bits} mantissa bits were kept")
        if -(-numel // BLOCK) != encoded.index.numel():
            raise ValueError(f"{numel} weights are not those of {encoded.index.numel()} blocks")
        self.coding = encoded.coding
        self._fmt, self._numel, self._warps, self._scratch = fmt, numel, warps, scratch
        self._lock: Lock = nullcontext() if lock is None else lock
        self._main = _whole_programs(numel, warps)
        self._index, self._room = encoded.index, _whole_memory(encoded.words)
        planes = {width: _whole_memory(plane) for width, plane in encoded.planes.items()}
        self._views = _views(planes, 0), _views(planes, self._main)

    @property
    def nbytes(self) -> int:
        """Bytes on the device beside planes, index and words: its coding, and the room that words have."""
        return self.coding.nbytes + self._room.nbytes

    def code(self, bits: torch.Tensor) -> torch.Tensor | None:
        """Code as many bit patterns as there were; their words. None if they have no room.

        Waits for the device. Where there are other threads, `lock` is held around each launch alone.
        """
        bits = _checked(bits, self._fmt)
        if bits.numel() != self._numel:
            raise ValueError(f"{bits.numel()} weights in place of {self._numel}")
        fmt, main, lock = self._fmt, self._main, self._lock
        rest = _rest(bits, main, self.coding.table, fmt)
        blocks = _Blocks(bits, rest, fmt, self.coding, self._index, self._warps, self._scratch, lock)
        _write_planes(bits, main, self._views[0], fmt, fmt.mantissa_bits, lock)
        if rest is not None:
            _write_planes(rest, rest.numel(), self._views[1], fmt, fmt.mantissa_bits, lock)
        for at in blocks.spans:
            blocks.code(at)
            blocks.gather(at, self._room)
        words = int(blocks.ends[-1])
        return self._room[:words] if words <= self._room.numel() else None


def _empty_planes(bits: torch.Tensor, kept: int) -> dict[int, torch.Tensor]:
    """Planes for the fields of `bits`, with room for whole runs."""
    size = _whole_runs(bits.numel())
    return {
        width: torch.empty(size * width // 8, dtype=torch.uint8, device=bits.device)
        for width in plane_widths(1 + kept)
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


_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def _checked(bits: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """`bits` as signed integers that start at a multiple of 16 bytes."""
    if bits.dim() != 1 or not bits.is_contiguous() or bits.numel() == 0:
        raise ValueError(f"bits are one-dimensional, contiguous, and at least one: not {tuple(bits.shape)}")
    if bits.dtype.is_floating_point or bits.element_size() * 8 != fmt.bits:
        raise ValueError(f"{fmt.name} takes integers of {fmt.bits} bits, not {bits.dtype}")
    if bits.data_ptr() % 16:
        bits = bits.clone()
    return bits.view(_INTEGERS[fmt.bits])


def _whole_programs(numel: int, warps: int) -> int:
    """`numel` rounded down to whole programs, of as many blocks as warps."""
    return numel // (warps * BLOCK) * warps * BLOCK


def _whole_runs(numel: int) -> int:
    """`numel` rounded up to whole runs of all lanes."""
    return -(-numel // (LANES * RUN)) * LANES * RUN


# What Triton has no words for, in PTX, or in plain Triton for its interpreter.


@triton.jit
def _probe():
    pass


INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))


@triton.jit
def _ballot(which):
    """One bit a lane of the warp."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        "=r,r", [which.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ones(x):
    """How many bits are set."""
    if INTERPRETED:
        n = x & 1
        for i in tl.static_range(1, 32):
            n += (x >> i) & 1
        return n
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _lanes_below(ballot):
    """Those bits of a ballot that belong to lower lanes."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; mov.u32 m, %lanemask_lt; and.b32 $0, m, $1; }",
        "=r,r", [ballot], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _sum_of_warp(x):
    """The sum over the 32 lanes, in all of them. x: [lanes] int32."""
    if INTERPRETED:
        rows = tl.reshape(x, [x.shape[0] // 32, 32])
        return tl.reshape(tl.broadcast_to(tl.sum(rows, 1)[:, None], rows.shape), x.shape)
    return tl.inline_asm_elementwise(
        "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _rank(which):
    """For each lane, how many lower ones of its warp are chosen; and how many are at all. which: [lanes]."""
    if INTERPRETED:
        n = which.to(tl.int32)
        rows = tl.reshape(n, [n.shape[0] // 32, 32])
        return tl.reshape(tl.cumsum(rows, 1), n.shape) - n, _sum_of_warp(n)
    chosen = _ballot(which)
    return _ones(_lanes_below(chosen)), _ones(chosen)


@triton.jit
def _counters():
    """The address of 5,120 counters in the program's shared memory. To be called once in a kernel."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 counters[20480]; mov.u32 $0, counters; }",
        "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _clear_counter(address):
    tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.u32 z, 0; st.shared.u32 [$1], z; mov.u32 $0, z; }",
        "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _read_counter(address):
    return tl.inline_asm_elementwise(
        "ld.shared.u32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _count(address, which):
    """Add 1 to counters in shared memory."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,r,r", [address, which.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _count_pair(pair, which, base, counters, elsewhere):
    """Count pairs e0 | e1 << 16 of 8-bit exponents where `_slot` says, at once if both are in the window.

    counters, elsewhere: addresses in shared and in device memory.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred p, z0, z1, w0, w1, q;
        .reg .b32 d, i, e0, e1, s0, s1;
        .reg .b64 a, one;
        mov.u32 $0, 0;
        setp.ne.u32 p, $2, 0;
        @!p bra DONE;
        mul.lo.u32 i, $3, 0x10001;
        sub.u32 d, $1, i;
        and.b32 i, d, 0xFFC0FFC0;
        setp.ne.u32 p, i, 0;
        @p bra UNUSUAL;
        shr.u32 i, d, 10;
        and.b32 d, d, 63;
        or.b32 i, i, d;
        mad.lo.u32 i, i, 4, $4;
        red.shared.add.u32 [i], 1;
        bra DONE;
        UNUSUAL:
        and.b32 e0, $1, 0xFF;
        shr.u32 e1, $1, 16;
        setp.eq.u32 z0, e0, 0;
        setp.eq.u32 z1, e1, 0;
        sub.u32 s0, e0, $3;
        sub.u32 s1, e1, $3;
        setp.lt.u32 w0, s0, 64;
        setp.lt.u32 w1, s1, 64;
        mov.u32 i, 0;
        and.pred q, z0, w1;
        @q add.u32 i, s1, 4096;
        and.pred q, z1, w0;
        @q add.u32 i, s0, 4160;
        and.pred q, z0, z1;
        @q mov.u32 i, 4224;
        setp.ne.u32 q, i, 0;
        mad.lo.u32 i, i, 4, $4;
        @q red.shared.add.u32 [i], 1;
        @q bra DONE;
        mad.lo.u32 e0, e1, 256, e0;
        mov.u64 one, 1;
        mad.wide.u32 a, e0, 8, $5;
        red.relaxed.gpu.global.add.u64 [a], one;
        DONE:
        }""",
        "=r,r,r,r,r,l", [pair, which.to(tl.int32), base, counters, elsewhere],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# The census.


@dataclass(frozen=True)
class _Counted:
    """What a tensor is made of.

    `grid[i, j]` counts neighbours of which the second has exponent names[i], the first names[j]. `elsewhere`
    counts the other pairs by their exponents, [second, first], or is None where there are none.
    """

    exponents: Ints
    names: Ints
    grid: Ints
    elsewhere: Ints | None

    def among(self, palette: Ints) -> Ints:
        """The count of neighbours within a palette: [second, first]."""
        slot = np.full(256, -1)
        slot[self.names] = np.arange(self.names.size)
        known = np.flatnonzero(slot[palette] >= 0)
        at = slot[palette[known]]
        counts = np.zeros((palette.size, palette.size), np.int64)
        counts[np.ix_(known, known)] = self.grid[np.ix_(at, at)]
        return counts if self.elsewhere is None else counts + self.elsewhere[np.ix_(palette, palette)]


class _Census:
    """A census on its way: counted on the device, copied to the host, and read there."""

    def __init__(
        self, bits: torch.Tensor, fmt: FloatFormat, threads: int, programs: int | None, lock: Lock
    ) -> None:
        self._fmt, self._bits = fmt, bits
        wide, numel, device = fmt.exponent_bits > 8, bits.numel(), bits.device
        # An item is two neighbours; where there are too many exponents for pairs, one weight.
        items = bits if wide else bits[: numel // 2 * 2].view(_INTEGERS[2 * fmt.bits])
        self._items = items.numel()
        on_device = torch.zeros(COUNTERS + 2 + (1 << 16), dtype=torch.int64, device=device)
        counters, self._elsewhere = on_device[: COUNTERS + 2], on_device[COUNTERS + 2 :]
        tile = 16 * threads
        grid = (min(programs or _programs(device), max(self._items // tile, 1)),)
        with lock:
            _census_kernel[grid](
                items, counters, self._elsewhere, self._items,
                BITS=fmt.bits, EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits, COUNTERS=COUNTERS,
                WINDOW=WINDOW, BELOW_MEAN=BELOW_MEAN, SAMPLE=1024, THREADS=threads, TILE=tile,
                num_warps=threads // 32,
            )  # fmt: skip
        # The last weight of an odd number has no neighbour.
        self._single = bits[-1:].to("cpu", non_blocking=True) if numel % 2 and not wide else None
        self._counters = counters.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if bits.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def kept(self) -> int:
        """Mantissa bits that any weight uses. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        union = int(self._counters[COUNTERS])
        if self._single is not None:
            union |= int(self._single) & (1 << self._fmt.mantissa_bits) - 1
        return self._fmt.mantissa_bits - ((union & -union).bit_length() - 1) if union else 0

    def read(self) -> _Counted:
        """The counts, once `kept` has waited for them."""
        fmt, host = self._fmt, self._counters.numpy()
        if fmt.exponent_bits > 8:
            return _Counted(host[: 1 << fmt.exponent_bits], _NONE, _NONE, None)
        names, grid = _unfold(host, int(host[COUNTERS + 1]))
        first, second = grid.sum(0), grid.sum(1)
        exponents = np.zeros(256, np.int64)
        exponents[names] = first + second
        others = None
        if int(first.sum()) < self._items:
            others = self._elsewhere.cpu().numpy().reshape(256, 256)
            exponents += others.sum(0) + others.sum(1)
        if self._single is not None:
            exponents[int(self._single) >> fmt.mantissa_bits & ((1 << fmt.exponent_bits) - 1)] += 1
        return _Counted(exponents, names, grid, others)


_NONE = np.empty(0, np.int64)


def _unfold(counters: Ints, base: int) -> tuple[Ints, Ints]:
    """The exponents that the counters of pairs are about, and the counters as a grid: [second, first]."""
    pairs = counters[: WINDOW * WINDOW].reshape(WINDOW, WINDOW)
    # Slots without an exponent have counted nothing. Where the base is not above 0, the window has 0 itself.
    start, stop = max(-base, 0), min(256 - base, WINDOW)
    names, inside = np.arange(base + start, base + stop), slice(start, stop)
    if base <= 0:
        return names, pairs[inside, inside]
    n = stop - start
    second, first, both = (
        counters[at:] for at in (WINDOW * WINDOW, WINDOW * (WINDOW + 1), WINDOW * (WINDOW + 2))
    )
    grid = np.empty((n + 1, n + 1), np.int64)
    grid[:n, :n] = pairs[inside, inside]
    grid[:n, n], grid[n, :n], grid[n, n] = second[inside], first[inside], both[0]
    return np.append(names, 0), grid


def _programs(device: torch.device) -> int:
    """How many programs keep a device busy."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _slot(e0, e1, base, WINDOW: tl.constexpr):
    """The counter of a pair, or -1: both in the window, or the first 0, or the second, or both."""
    s0, s1 = e0 - base, e1 - base
    in0, in1 = (s0 >= 0) & (s0 < WINDOW), (s1 >= 0) & (s1 < WINDOW)
    slot = tl.where((e0 == 0) & (e1 == 0), WINDOW * (WINDOW + 2), -1)
    slot = tl.where((e0 == 0) & in1, WINDOW * WINDOW + s1, slot)
    slot = tl.where((e1 == 0) & in0, WINDOW * (WINDOW + 1) + s0, slot)
    return tl.where(in0 & in1, s0 | s1 * WINDOW, slot)


@triton.jit
def _count_items(
    item, which, base, shared, counters_ptr, elsewhere_ptr,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Count the pairs that are items, or the exponents of single weights."""
    LARGEST: tl.constexpr = (1 << EXPONENT) - 1
    e0 = (item >> MANTISSA).to(tl.int32) & LARGEST
    if EXPONENT == 8 and not INTERPRETED:
        pair = e0 | (item >> (BITS + MANTISSA - 16)).to(tl.int32) & (LARGEST << 16)
        _count_pair(pair, which, base, shared, elsewhere_ptr.to(tl.int64))
    else:
        slot = e0
        if EXPONENT <= 8:
            e1 = (item >> (BITS + MANTISSA)).to(tl.int32) & LARGEST
            slot = e0 | e1 * WINDOW
            if EXPONENT == 8:
                slot = _slot(e0, e1, base, WINDOW)
                tl.atomic_add(elsewhere_ptr + (e0 | e1 << 8), 1, mask=which & (slot < 0))
        if INTERPRETED:
            tl.atomic_add(counters_ptr + slot, 1, mask=which & (slot >= 0))
        else:
            _count(shared + 4 * slot, which)


@triton.jit
def _census_kernel(
    items_ptr, counters_ptr, elsewhere_ptr, n,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, COUNTERS: tl.constexpr,
    WINDOW: tl.constexpr, BELOW_MEAN: tl.constexpr, SAMPLE: tl.constexpr, THREADS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add to the counters; after them, unite the mantissas' lowest bits, and say where the window begins."""
    LARGEST: tl.constexpr = (1 << EXPONENT) - 1
    base = 0
    if EXPONENT == 8:
        # All programs look at the same weights, and so agree on a window.
        offs_s = tl.arange(0, SAMPLE).to(tl.int64) * tl.maximum(n // SAMPLE, 1)
        sample = tl.load(items_ptr + offs_s, mask=offs_s < n, other=0)
        sample = (sample >> MANTISSA).to(tl.int32) & LARGEST
        base = tl.sum(sample) // tl.maximum(tl.sum((sample != 0).to(tl.int32)), 1) - BELOW_MEAN
    shared = 0
    if not INTERPRETED:
        shared = _counters()
        for i in tl.static_range(0, COUNTERS, THREADS):
            _clear_counter(shared + 4 * (i + tl.arange(0, THREADS)))
        tl.debug_barrier()

    union = tl.zeros([TILE], items_ptr.dtype.element_ty)
    pid, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    whole = n // TILE * TILE
    for at in range(pid * TILE, whole, programs * TILE):
        item = tl.load(items_ptr + at + tl.arange(0, TILE))
        union |= item
        all_of_them = tl.full([TILE], True, tl.int1)
        _count_items(
            item, all_of_them, base, shared, counters_ptr, elsewhere_ptr, BITS, EXPONENT, MANTISSA, WINDOW
        )
    if whole + pid * TILE < n:
        offs = whole + tl.arange(0, TILE)
        item = tl.load(items_ptr + offs, mask=offs < n, other=0)
        union |= item
        _count_items(
            item, offs < n, base, shared, counters_ptr, elsewhere_ptr, BITS, EXPONENT, MANTISSA, WINDOW
        )

    if not INTERPRETED:
        tl.debug_barrier()
        for i in tl.static_range(0, COUNTERS, THREADS):
            offs_c = i + tl.arange(0, THREADS)
            count = _read_counter(shared + 4 * offs_c)
            tl.atomic_add(counters_ptr + offs_c, count.to(tl.int64), mask=count != 0, sem="relaxed")
    union = union.to(tl.int64)
    if EXPONENT <= 8:
        union |= union >> BITS
    union &= (1 << MANTISSA) - 1
    lowest = tl.min(tl.where(union != 0, union & -union, 1 << 62))
    tl.atomic_or(counters_ptr + COUNTERS, tl.where(lowest < 1 << 62, lowest, 0), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(counters_ptr + COUNTERS + 1, base)


# The planes.


def _views(planes: dict[int, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    """The kernel's arguments for planes from weight `first` on, a multiple of whole runs."""
    views = {f"p{width}_ptr": next(iter(planes.values())) for width in (32, 16, 8, 4, 2, 1)}
    for width, plane in planes.items():
        # Narrow planes are written by the run: `width` bytes at once.
        number = _INTEGERS[width if width >= 8 else 8 * width]
        views[f"p{width}_ptr"] = plane[first * width // 8 :].view(number)
    return views


def _write_planes(
    bits: torch.Tensor, numel: int, views: dict[str, torch.Tensor], fmt: FloatFormat, kept: int, lock: Lock
) -> None:
    """Write the fields of the first weights of `bits`, whole runs."""
    if not numel:
        return
    runs = numel // RUN
    with lock:
        _planes_kernel[(triton.cdiv(runs, 256),)](
            bits, runs=runs, **views,
            BITS=fmt.bits, MANTISSA=fmt.mantissa_bits, KEPT=kept, RUN=RUN, TILE=256, num_warps=4,
        )  # fmt: skip


@triton.jit
def _plane_part(mantissa, sign, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """The bits of every field that go to the plane of a width."""
    BELOW: tl.constexpr = (1 + KEPT) & (WIDTH - 1)  # bits in narrower planes
    if (1 + KEPT) < 2 * WIDTH:
        return (sign << (KEPT - BELOW)) | (mantissa >> BELOW)
    return (mantissa >> BELOW) & ((1 << WIDTH) - 1)


@triton.jit
def _packed(part, offs_in_run, WIDTH: tl.constexpr):
    """The bits of a run of weights side by side, the first the lowest. part: [tile, run]."""
    return tl.sum(part.to(tl.int32) << (offs_in_run * WIDTH), 1)


@triton.jit
def _planes_kernel(
    bits_ptr, p32_ptr, p16_ptr, p8_ptr, p4_ptr, p2_ptr, p1_ptr, runs,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, KEPT: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 1 + KEPT
    offs_r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    offs_in_run = tl.arange(0, RUN)[None, :]
    offs = offs_r[:, None] * RUN + offs_in_run  # [TILE, RUN]
    mask_r = offs_r < runs
    mask = mask_r[:, None]
    v = tl.load(bits_ptr + offs, mask=mask, other=0)
    if BITS < 64:
        v = v.to(tl.int32)
    sign = (v >> (BITS - 1)) & 1
    mantissa = (v >> (MANTISSA - KEPT)) & ((1 << KEPT) - 1)
    if WIDTH & 32:
        tl.store(p32_ptr + offs, _plane_part(mantissa, sign, 32, KEPT).to(tl.int32), mask=mask)
    if WIDTH & 16:
        tl.store(p16_ptr + offs, _plane_part(mantissa, sign, 16, KEPT).to(tl.int16), mask=mask)
    if WIDTH & 8:
        tl.store(p8_ptr + offs, _plane_part(mantissa, sign, 8, KEPT).to(tl.int8), mask=mask)
    if WIDTH & 4:
        part = _packed(_plane_part(mantissa, sign, 4, KEPT), offs_in_run, 4)
        tl.store(p4_ptr + offs_r, part, mask=mask_r)
    if WIDTH & 2:
        part = _packed(_plane_part(mantissa, sign, 2, KEPT), offs_in_run, 2)
        tl.store(p2_ptr + offs_r, part.to(tl.int16), mask=mask_r)
    if WIDTH & 1:
        part = _packed(_plane_part(mantissa, sign, 1, KEPT), offs_in_run, 1)
        tl.store(p1_ptr + offs_r, part.to(tl.int8), mask=mask_r)


# The words.

# What is known of a symbol, its facts, in 64 bits: a multiplier in the lower half; in the upper half its
# start from bit 19 on, a shift from 15, the escapes at 13 and 14, an addend at 12, and below that SCALE less
# its frequency.
_START, _SHIFT, _ESCAPES, _ADDEND = 19, 15, 13, 12


@cache
def _division() -> Ints:
    """The facts of every frequency from 0 to SCALE - 1, but for the start.

    x // f is (x + addend) * multiplier >> 32 + shift for every x below f << 20. Let 2^(shift + 1) be the
    least power of two from f on, N = 32 + shift, up = -2^N mod f and down = 2^N mod f. Without an addend the
    multiplier ceil(2^N / f) is exact if f * 2^20 * up <= 2^N; with an addend of 1, floor(2^N / f) is if
    0 < down and f * 2^20 * down <= 2^N. One of the two holds: where neither is 0, they add up to f, one
    is at most f / 2, and f * f / 2 * 2^20 <= 2^N because f <= 2^12.

    For f = 1 there is no such multiplier: 2^32 - 1 gives x - 1. A start larger by SCALE - 1 makes that good.
    """
    f = np.arange(SCALE)
    d = np.maximum(f, 2)
    shift = np.frexp(d - 1)[1].astype(np.int64) - 1
    power = np.int64(1) << 32 + shift
    addend = (-power % d * d << 20 > power) & (f > 1)
    multiplier = np.where(f < 2, (1 << 32) - 1, np.where(addend, power // d, -(-power // d)))
    upper = (
        np.where(f == 1, SCALE - 1, 0) << _START
        | shift << _SHIFT
        | addend.astype(np.int64) << _ADDEND
        | SCALE - f
    )
    return np.asarray(upper << 32 | multiplier)


def _facts(frequencies: Ints) -> tuple[Ints, bool]:
    """The facts of all 256 symbols, and whether any has an addend."""
    known = _division()[frequencies]
    start = np.cumsum(frequencies) - frequencies
    return known + (start << _START + 32), bool((known >> _ADDEND + 32 & 1).any())


def _coding(table: Table, fmt: FloatFormat, device: torch.device, lock: Lock) -> Coding:
    """Bring a table to the device."""
    frequencies = np.zeros(256, np.int64)
    frequencies[: table.frequencies.size] = table.frequencies
    known, addends = _facts(frequencies)
    keys = 1 << 16 if table.group == 2 else 1 << fmt.exponent_bits
    on_host = torch.empty(8 * 256 + 2 * (1 << 16), dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_host.numpy()[: 8 * 256].view(np.int64)[:] = known
    fill_symbols(
        table.group, table.palette.astype(np.int64), frequencies, on_host.numpy()[8 * 256 :].view(np.uint16)
    )
    uploaded = on_host[: 8 * 256 + 2 * keys].to(device, non_blocking=True)
    by_symbol, symbols = uploaded[: 8 * 256].view(torch.int64), uploaded[8 * 256 :].view(torch.int16)
    facts = torch.empty(keys // 256 * ROW + 256, dtype=torch.int64, device=device)
    with lock:
        _spread_kernel[(triton.cdiv(keys, 1024),)](
            by_symbol, symbols, facts, keys, ESCAPES=_ESCAPES, ROW=ROW, TILE=1024
        )
    return Coding(table, facts, symbols, addends)


def _words(blocks: _Blocks, spare: int) -> torch.Tensor:
    """All words, in memory for one in `spare` more. Waits for the device once a span."""
    parts, first = [], 0
    for at in blocks.spans:
        last = int(blocks.ends[blocks.code(at)])
        parts.append(torch.empty(last - first, dtype=torch.int16, device=blocks.index.device))
        blocks.gather(at, parts[-1], first)
        first = last
    if len(parts) == 1 and not spare:
        return parts[0]
    room = torch.empty(first + (first // spare if spare else 0), dtype=torch.int16, device=parts[0].device)
    return torch.cat(parts, out=room[:first])


class _Blocks:
    """The blocks of a tensor on their way: coded to scratch, a span of them at a time, and gathered from it.

    Its last blocks, too few for a program, are coded from `rest`. `ends[b]`, int64 on the device, says where
    block b begins among all words, for every block up to the end of the last span coded.
    """

    def __init__(
        self, bits: torch.Tensor, rest: torch.Tensor | None, fmt: FloatFormat, coding: Coding,
        index: torch.Tensor, warps: int, scratch: int | None, lock: Lock,
    ) -> None:  # fmt: skip
        device, self._numel = bits.device, bits.numel()
        self.index, self._bits, self._fmt, self._coding, self._lock = index, bits, fmt, coding, lock
        self._warps, self._blocks = warps, index.numel()
        main = _whole_programs(self._numel, warps)
        self._main, whole = main // BLOCK, bits if rest is None else bits[:main]
        self._sources = [part.view(torch.int64) for part in (whole, rest) if part is not None]
        self._region = HEADER_WORDS + BLOCK // coding.table.group - RAW_STEPS * LANES
        if scratch is None:
            scratch = max(SCRATCH, self._numel * fmt.bits // 8 * 4 // 5)
        # `rest` is no longer than a program, and begins where one would: it is never cut.
        together = max(scratch // (2 * self._region + 4 * NOTES) // warps, 1) * warps
        spans = triton.cdiv(self._blocks, together)
        self._span: int = min(triton.cdiv(triton.cdiv(self._blocks, spans), warps) * warps, self._blocks)
        self.spans = range(0, self._blocks, self._span)
        self._regions = torch.empty(self._span * self._region, dtype=torch.int16, device=device)
        self._notes = torch.empty(self._span * NOTES, dtype=torch.int32, device=device)
        self._counts = torch.empty(2, self._span, dtype=torch.int32, device=device)
        self.ends = torch.zeros(self._blocks + 1, dtype=torch.int64, device=device)

    def code(self, at: int) -> int:
        """Code the span that begins with block `at`; the block with which the next one begins."""
        end = min(at + self._span, self._blocks)
        for first, last, ragged in ((at, min(end, self._main), False), (max(at, self._main), end, True)):
            if first < last:
                self._launch(first, last, at, ragged)
        # The first of these is where the span begins; the others are still lengths.
        self.ends[at : end + 1].cumsum_(0)
        return end

    def _launch(self, first: int, last: int, first_region: int, ragged: bool) -> None:
        fmt, coding, warps = self._fmt, self._coding, 1 if ragged else self._warps
        with self._lock:
            _code_kernel[((last - first) // warps,)](
                self._sources[ragged], coding.facts, coding.symbols, self._regions, self._notes, self._counts,
                self.ends, self.index, first_block=first, first_source=self._main if ragged else 0,
                first_region=first_region, numel=self._numel, span=self._span,
                BITS=fmt.bits, EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits,
                GROUP=coding.table.group, RAGGED=ragged, ADDENDS=coding.addends, WARPS=warps,
                REGION=self._region, NOTES=NOTES, LANES=LANES, RUN=RUN, RUNS=RUNS, LOWER=LOWER,
                HEADER=HEADER_WORDS, ROW=ROW, num_warps=warps,
            )  # fmt: skip

    def gather(self, at: int, words: torch.Tensor, first_word: int = 0) -> None:
        """Bring the span coded last to `words`, which begin with word `first_word` of all. What has no room
        there is left out."""
        fmt = self._fmt
        with self._lock:
            _gather_kernel[(min(self._span, self._blocks - at),)](
                self._bits, self._regions, self._notes, self._counts, self.ends, words,
                first_block=at, first_word=first_word, room=words.numel(), span=self._span,
                EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits, BLOCK=BLOCK, REGION=self._region,
                NOTES=NOTES, RUN=RUN, TILE=1024, num_warps=2,
            )  # fmt: skip


@triton.jit
def _spread_kernel(
    facts_ptr, symbols_ptr, coding_ptr, n, ESCAPES: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The facts of the symbol of every key, with the escapes: one look-up in place of two."""
    offs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    symbol = tl.load(symbols_ptr + offs, mask=offs < n, other=0).to(tl.int64)
    fact = tl.load(facts_ptr + (symbol & 0xFF))
    tl.store(
        coding_ptr + (offs + (offs >> 8) * (ROW - 256)),
        fact | (symbol >> 8 & 3) << (32 + ESCAPES),
        mask=offs < n,
    )


@triton.jit
def _load_run(words_ptr, BITS: tl.constexpr):
    """The 8 weights of every lane as 64-bit words; where they are fewer than 8 words, some come again."""
    if BITS == 8:
        a = tl.load(words_ptr)
        return a, a, a, a, a, a, a, a
    if BITS == 16:
        a, b = tl.split(tl.load(words_ptr[:, None] + tl.arange(0, 2)[None, :]))
        return a, b, a, b, a, b, a, b
    a, b = tl.load(words_ptr), tl.load(words_ptr + 1)
    c, d = tl.load(words_ptr + 2), tl.load(words_ptr + 3)
    if BITS == 32:
        return a, b, c, d, a, b, c, d
    e, f = tl.load(words_ptr + 4), tl.load(words_ptr + 5)
    g, h = tl.load(words_ptr + 6), tl.load(words_ptr + 7)
    return a, b, c, d, e, f, g, h


@triton.jit
def _exponent(
    a, b, c, d, e, f, g, h,
    N: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """The exponent of weight N of a run."""
    WORD: tl.constexpr = N * BITS // 64
    if WORD < 4:
        v = a if WORD == 0 else b if WORD == 1 else c if WORD == 2 else d
    else:
        v = e if WORD == 4 else f if WORD == 5 else g if WORD == 6 else h
    return (v >> (N * BITS % 64 + MANTISSA)).to(tl.int32) & ((1 << EXPONENT) - 1)


@triton.jit
def _key(
    a, b, c, d, N: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr
):  # fmt: skip
    """The exponents of weights 2 N and 2 N + 1 of a run: first | second << 8."""
    FIRST: tl.constexpr = (1 << EXPONENT) - 1
    if BITS == 8:
        return (a >> (16 * N + MANTISSA)).to(tl.int32) & (FIRST | FIRST << 8)
    elif BITS == 32:
        v = a if N == 0 else b if N == 1 else c if N == 2 else d
        return (v >> MANTISSA).to(tl.int32) & 0xFF | (v >> (24 + MANTISSA)).to(tl.int32) & 0xFF00
    else:
        v = a if N < 2 else b
        HALF: tl.constexpr = N % 2
        if INTERPRETED:
            w = (v >> (32 * HALF + MANTISSA)).to(tl.int32)
            return w & FIRST | (w >> 8) & (FIRST << 8)
        else:
            # Shifted so, the two exponents of a 32-bit word begin in its second and in its fourth byte.
            key = tl.inline_asm_elementwise(
                "{ .reg .b32 w, other; mov.b64 " + ("{other, w}" if HALF else "{w, other}") + ", $1; "
                + ("shl.b32 w, w, 1;" if MANTISSA == 7 else "shr.u32 w, w, 2;")
                + " prmt.b32 $0, w, 0, 0x4431; }",
                "=r,l", [v], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            return key & (FIRST | FIRST << 8)


@triton.jit
def _look_up(coding_ptr, key, ROW: tl.constexpr):
    """The two halves of the facts of the symbol that codes a key."""
    fact = tl.load(coding_ptr + (key + (key >> 8) * (ROW - 256)))
    return fact.to(tl.uint32), (fact >> 32).to(tl.uint32)


@triton.jit
def _step(x, p, region_ptr, lower, upper, ADDENDS: tl.constexpr):
    """Code a symbol of each lane; p is where the word written last stands."""
    full = x >= upper * 0xFFF00000  # the frequency << 20
    rank, all = _rank(full)
    p -= all
    tl.store(region_ptr + (p + rank), x.to(tl.int16), mask=full)
    x = tl.where(full, x >> 16, x)
    dividend = x
    if ADDENDS:
        dividend += (upper >> 12) & 1
    quotient = tl.umulhi(dividend, lower) >> ((upper >> 15) & 15)
    return quotient * (upper & 0xFFF) + (x + (upper >> 19)), p


@triton.jit
def _escapes(upper, N: tl.constexpr, GROUP: tl.constexpr):
    """The escapes of symbol N of a run, a bit a weight."""
    return (upper >> 13 & (1 << GROUP) - 1) << N * GROUP


@triton.jit
def _code_run(
    x, p, q, escaped, run, valid, a, b, c, d, e, f, g, h, lane,
    coding_ptr, symbols_ptr, region_ptr, notes_ptr,
    LAST: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    GROUP: tl.constexpr, RAGGED: tl.constexpr, ADDENDS: tl.constexpr, LANES: tl.constexpr,
    RUN: tl.constexpr, LOWER: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Code the symbols of a run, the last first; of the last run, the last two are the initial state."""
    if GROUP == 2:
        k0 = _key(a, b, c, d, 0, BITS, EXPONENT, MANTISSA)
        k1 = _key(a, b, c, d, 1, BITS, EXPONENT, MANTISSA)
        k2 = _key(a, b, c, d, 2, BITS, EXPONENT, MANTISSA)
        k3 = _key(a, b, c, d, 3, BITS, EXPONENT, MANTISSA)
        l0, u0 = _look_up(coding_ptr, k0, ROW)
        l1, u1 = _look_up(coding_ptr, k1, ROW)
        l2, u2 = _look_up(coding_ptr, k2, ROW)
        l3, u3 = _look_up(coding_ptr, k3, ROW)
        if LAST:
            s = tl.load(symbols_ptr + k3).to(tl.uint32) & 0xFF
            x = LOWER | s << 8 | tl.load(symbols_ptr + k2).to(tl.uint32) & 0xFF
        else:
            x, p = _step(x, p, region_ptr, l3, u3, ADDENDS)
            x, p = _step(x, p, region_ptr, l2, u2, ADDENDS)
        x, p = _step(x, p, region_ptr, l1, u1, ADDENDS)
        x, p = _step(x, p, region_ptr, l0, u0, ADDENDS)
        mask = _escapes(u0, 0, 2) | _escapes(u1, 1, 2) | _escapes(u2, 2, 2) | _escapes(u3, 3, 2)
    else:
        e0 = _exponent(a, b, c, d, e, f, g, h, 0, BITS, EXPONENT, MANTISSA)
        e1 = _exponent(a, b, c, d, e, f, g, h, 1, BITS, EXPONENT, MANTISSA)
        e2 = _exponent(a, b, c, d, e, f, g, h, 2, BITS, EXPONENT, MANTISSA)
        e3 = _exponent(a, b, c, d, e, f, g, h, 3, BITS, EXPONENT, MANTISSA)
        e4 = _exponent(a, b, c, d, e, f, g, h, 4, BITS, EXPONENT, MANTISSA)
        e5 = _exponent(a, b, c, d, e, f, g, h, 5, BITS, EXPONENT, MANTISSA)
        e6 = _exponent(a, b, c, d, e, f, g, h, 6, BITS, EXPONENT, MANTISSA)
        e7 = _exponent(a, b, c, d, e, f, g, h, 7, BITS, EXPONENT, MANTISSA)
        l0, u0 = _look_up(coding_ptr, e0, ROW)
        l1, u1 = _look_up(coding_ptr, e1, ROW)
        l2, u2 = _look_up(coding_ptr, e2, ROW)
        l3, u3 = _look_up(coding_ptr, e3, ROW)
        l4, u4 = _look_up(coding_ptr, e4, ROW)
        l5, u5 = _look_up(coding_ptr, e5, ROW)
        l6, u6 = _look_up(coding_ptr, e6, ROW)
        l7, u7 = _look_up(coding_ptr, e7, ROW)
        if LAST:
            s = tl.load(symbols_ptr + e7).to(tl.uint32) & 0xFF
            x = LOWER | s << 8 | tl.load(symbols_ptr + e6).to(tl.uint32) & 0xFF
        else:
            x, p = _step(x, p, region_ptr, l7, u7, ADDENDS)
            x, p = _step(x, p, region_ptr, l6, u6, ADDENDS)
        x, p = _step(x, p, region_ptr, l5, u5, ADDENDS)
        x, p = _step(x, p, region_ptr, l4, u4, ADDENDS)
        x, p = _step(x, p, region_ptr, l3, u3, ADDENDS)
        x, p = _step(x, p, region_ptr, l2, u2, ADDENDS)
        x, p = _step(x, p, region_ptr, l1, u1, ADDENDS)
        x, p = _step(x, p, region_ptr, l0, u0, ADDENDS)
        mask = _escapes(u0, 0, 1) | _escapes(u1, 1, 1) | _escapes(u2, 2, 1) | _escapes(u3, 3, 1)
        mask |= _escapes(u4, 4, 1) | _escapes(u5, 5, 1) | _escapes(u6, 6, 1) | _escapes(u7, 7, 1)
    mask = mask.to(tl.int32)
    at = run * LANES + lane
    if RAGGED:  # what fills up the last run has no escapes
        mask &= (1 << tl.minimum(tl.maximum(valid - at * RUN, 0), RUN)) - 1
    rank, all = _rank(mask != 0)
    q -= all
    tl.store(notes_ptr + (q + rank), at << 8 | mask, mask=mask != 0)
    return x, p, q, escaped + _ones(mask)


@triton.jit(do_not_specialize=["first_block", "first_source", "first_region", "numel", "span"])
def _code_kernel(
    words_ptr, coding_ptr, symbols_ptr, regions_ptr, notes_ptr, counts_ptr, ends_ptr, index_ptr,
    first_block, first_source, first_region, numel, span,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, ADDENDS: tl.constexpr, WARPS: tl.constexpr, REGION: tl.constexpr,
    NOTES: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, LOWER: tl.constexpr,
    HEADER: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Code a block a warp, to the end of its region.

    The programs begin with block `first_block`, `words_ptr` with block `first_source`, the regions with block
    `first_region`. counts: words without escapes, and notes, each [span]; ends: from 1 on the words of all
    blocks. Only where RAGGED may a block be shorter than others; then a program has one.
    """
    STRIDE: tl.constexpr = LANES * RUN * BITS // 64  # of runs, in 64-bit words
    lanes = tl.arange(0, WARPS * LANES)
    block = first_block + tl.program_id(0).to(tl.int64) * WARPS + lanes // LANES  # [WARPS * LANES]
    lane = lanes % LANES
    valid, runs = LANES * RUN * RUNS, RUNS
    if RAGGED:
        before = (first_block + tl.program_id(0).to(tl.int64)) * (LANES * RUN * RUNS)
        valid = tl.minimum(numel - before, LANES * RUN * RUNS).to(tl.int32)
        runs = (valid + LANES * RUN - 1) // (LANES * RUN)
    words_ptr += (block - first_source) * (RUNS * STRIDE) + lane * (RUN * BITS // 64)
    region_ptr = regions_ptr + (block - first_region) * REGION
    notes_ptr += (block - first_region) * NOTES

    x = tl.full([WARPS * LANES], LOWER, tl.uint32)
    p = tl.full([WARPS * LANES], REGION, tl.int32)
    q = tl.full([WARPS * LANES], NOTES, tl.int32)
    escaped = tl.zeros([WARPS * LANES], tl.int32)
    a, b, c, d, e, f, g, h = _load_run(words_ptr + (runs - 1) * STRIDE, BITS)
    x, p, q, escaped = _code_run(
        x, p, q, escaped, runs - 1, valid, a, b, c, d, e, f, g, h, lane, coding_ptr, symbols_ptr, region_ptr,
        notes_ptr, True, BITS, EXPONENT, MANTISSA, GROUP, RAGGED, ADDENDS, LANES, RUN, LOWER, ROW,
    )  # fmt: skip
    # A run is loaded while the one after it is coded.
    a, b, c, d, e, f, g, h = _load_run(words_ptr + tl.maximum(runs - 2, 0) * STRIDE, BITS)
    for i in range(1, runs):
        run = runs - 1 - i
        na, nb, nc, nd, ne, nf, ng, nh = _load_run(words_ptr + tl.maximum(run - 1, 0) * STRIDE, BITS)
        x, p, q, escaped = _code_run(
            x, p, q, escaped, run, valid, a, b, c, d, e, f, g, h, lane, coding_ptr, symbols_ptr, region_ptr,
            notes_ptr, False, BITS, EXPONENT, MANTISSA, GROUP, RAGGED, ADDENDS, LANES, RUN, LOWER, ROW,
        )  # fmt: skip
        a, b, c, d, e, f, g, h = na, nb, nc, nd, ne, nf, ng, nh

    escaped = _sum_of_warp(escaped)
    p -= HEADER
    head_ptr = region_ptr + p
    tl.store(head_ptr, escaped.to(tl.int16), mask=lane == 0)
    tl.store(head_ptr + 1 + lane, x.to(tl.int16))
    tl.store(head_ptr + 1 + LANES + lane, (x >> 16).to(tl.int16))
    coded = REGION - p
    counts_ptr += block - first_region
    tl.store(counts_ptr, coded, mask=lane == 0)
    tl.store(counts_ptr + span, NOTES - q, mask=lane == 0)
    words = coded + 2 * escaped
    tl.store(ends_ptr + block + 1, words.to(tl.int64), mask=lane == 0)
    tl.store(index_ptr + block, words.to(tl.int16), mask=lane == 0)


@triton.jit(do_not_specialize=["first_block", "first_word", "room", "span"])
def _gather_kernel(
    bits_ptr, regions_ptr, notes_ptr, counts_ptr, ends_ptr, words_ptr, first_block, first_word, room, span,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr, REGION: tl.constexpr,
    NOTES: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Put a block's words in their place, and its escapes behind them, as far as there is room."""
    pid = tl.program_id(0).to(tl.int64)
    coded = tl.load(counts_ptr + pid)
    n_notes = tl.load(counts_ptr + span + pid)
    start = tl.load(ends_ptr + first_block + pid) - first_word
    # A block has less than 2^16 words.
    left = tl.maximum(tl.minimum(room - start, 1 << 16), 0).to(tl.int32)
    words_ptr += start
    region_ptr = regions_ptr + (pid + 1) * REGION - coded
    for at in range(0, coded, TILE):
        offs = at + tl.arange(0, TILE)
        mask = offs < tl.minimum(coded, left)
        tl.store(words_ptr + offs, tl.load(region_ptr + offs, mask=mask), mask=mask)

    words_ptr += coded
    notes_ptr += (pid + 1) * NOTES - n_notes
    bits_ptr += (first_block + pid) * BLOCK
    offs_in_run = tl.arange(0, RUN)[None, :]
    done = 0
    for at in range(0, n_notes, 32):
        offs_n = at + tl.arange(0, 32)
        note = tl.load(notes_ptr + offs_n, mask=offs_n < n_notes, other=0)
        chosen = tl.reshape((note[:, None] >> offs_in_run) & 1, [32 * RUN])
        position = tl.reshape((note[:, None] >> 8) * RUN + offs_in_run, [32 * RUN])
        rank = done + tl.cumsum(chosen, 0) - chosen
        exponent = tl.load(bits_ptr + position, mask=chosen != 0, other=0) >> MANTISSA & ((1 << EXPONENT) - 1)
        has_room = (chosen != 0) & (coded + 2 * rank + 1 < left)
        tl.store(words_ptr + 2 * rank, position.to(tl.int16), mask=has_room)
        tl.store(words_ptr + 2 * rank + 1, exponent.to(tl.int16), mask=has_room)
        done += tl.sum(chosen)
