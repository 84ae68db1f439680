"""Exponents and pairs of exponents counted on a GPU, in Triton, in shared memory that PTX declares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import launch
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.triton.encode_planes import INTEGERS
from neuzip.kernels.rans.triton.warp import INTERPRETED

WINDOW = 64
"""Exponents whose pairs are counted in shared memory, and 0 besides: 64 * 64 + 2 * 64 + 1 counters."""

COUNTERS = 5120
"""The counters, rounded up so that any number of threads clears them in whole turns: 20 KB."""

BELOW_MEAN = 40
"""The window begins this far below the mean exponent of a sample: small weights lie further from it."""

Ints = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class ExponentCounts:
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


class GpuCensus:
    """A census on its way: counted on the device, copied to the host, and read there."""

    def __init__(self, bits: torch.Tensor, fmt: FloatFormat, threads: int, programs: int) -> None:
        self._fmt, self._bits = fmt, bits
        wide, numel, device = fmt.exponent_bits > 8, bits.numel(), bits.device
        # An item is two neighbours; where there are too many exponents for pairs, one weight.
        items = bits if wide else bits[: numel // 2 * 2].view(INTEGERS[2 * fmt.bits])
        self._items = items.numel()
        on_device = torch.zeros(COUNTERS + 2 + (1 << 16), dtype=torch.int64, device=device)
        counters, self._elsewhere = on_device[: COUNTERS + 2], on_device[COUNTERS + 2 :]
        tile = 16 * threads
        grid = (min(programs, max(self._items // tile, 1)),)
        launch(
            _census_kernel, grid,
            items, counters, self._elsewhere, self._items,
            BITS=fmt.bits, EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits, COUNTERS=COUNTERS,
            WINDOW=WINDOW, BELOW_MEAN=BELOW_MEAN, SAMPLE=1024, THREADS=threads, TILE=tile,
            num_warps=threads // 32, device=device,
        )  # fmt: skip
        # The last weight of an odd number has no neighbour.
        self._single = bits[-1:].to("cpu", non_blocking=True) if numel % 2 and not wide else None
        self._counters = counters.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if bits.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def kept_bits(self) -> int:
        """Mantissa bits that any weight uses. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        union = int(self._counters[COUNTERS])
        if self._single is not None:
            union |= int(self._single) & (1 << self._fmt.mantissa_bits) - 1
        return self._fmt.mantissa_bits - ((union & -union).bit_length() - 1) if union else 0

    def read(self) -> ExponentCounts:
        """The counts, once `kept_bits` has waited for them."""
        fmt, host = self._fmt, self._counters.numpy()
        if fmt.exponent_bits > 8:
            return ExponentCounts(host[: 1 << fmt.exponent_bits], _NONE, _NONE, None)
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
        return ExponentCounts(exponents, names, grid, others)


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
