"""The decoder on a GPU, in Triton: exponents decoded and merged with sign and mantissa in one pass.

A warp decodes a block, a thread a lane. In each step every thread looks up its symbol in a table of 4,096
entries, and those whose state has become small take the next words of the block: their ranks come from a
ballot. Eight weights later the thread has 16 bytes of bf16 to store.

A step waits for two loads, one after the other, so both must be found in the first-level cache, and nothing
else may wait: the words of the next run are touched a run ahead, the planes are loaded two runs ahead.
Full blocks of bf16 of which nothing was dropped go another way: see `triton_stream`.

Tensors of one kind (format, mantissa bits, group, block size) share a launch, however many they are. Their
last blocks, if shorter than the others, have a launch of their own, in which every store is masked. Parts
that lie in memory with all that is known of them share one as well, and need nothing but their addresses.

Nothing is read or written outside the tensors given: words are masked by the end of their block and of their
tensor, planes by the number of weights. A block whose words do not add up is reported, not believed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.float_fields import FloatFormat, plane_widths
from neuzip.kernels.rans.coded import (
    ALIGNMENT,
    COLUMNS,
    COUNTS,
    FIRST,
    LAST,
    NORMALISER,
    NUMEL,
    OUT,
    PLANES,
    ROW,
    STARTS,
    TABLES,
    TENSOR,
    TOGETHER,
    WIDTHS,
    WORDS_END,
    CodedTensor,
    Kind,
    Part,
)
from neuzip.kernels.rans.numbers import BLOCK, HEADER_WORDS, LANES, LOWER, RUN, RUNS, SCALE, SCALE_BITS
from neuzip.kernels.rans.triton import stream as triton_stream
from neuzip.kernels.rans.triton.stream import joined, refilled

TILE = 2048
"""Entries of an index that are summed up at a time."""

FEW_BLOCKS = 4096
"""Up to so many blocks a program has one warp, with more registers; beyond, four, to fill the card. What is
streamed has other programs: see `triton_stream`."""


def decode(tensors: Sequence[CodedTensor], outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode all `tensors` into `outs`, in one launch or two for each kind of them.

    `outs[i]` is contiguous, with elements of as many bits as the format has, as many as there are weights.
    Returns int32 `[len(tensors)]` on the device: not 0 for a tensor whose words are corrupt, of which any
    weight may be wrong then. Whoever waits for the device should call `coded.raise_if_corrupt`.
    """
    plan = prepare(tensors, outs)
    plan.launch()
    return plan.errors


def streams(kind: Kind) -> bool:
    """Whether full blocks are decoded as `triton_stream` does: bf16, nothing dropped, coded in pairs."""
    fmt, kept, group, block_size = kind
    return (fmt.bits, fmt.mantissa_bits, kept, group, block_size) == (16, 7, 7, 2, 0)


@dataclass(frozen=True)
class Launch:
    """All blocks of tensors of one kind: either the full ones, or the ragged last ones.

    The arrays are on the device and hold no addresses, only positions after those that `start` is given.
    `programs` is [grid, 3]: row of the descriptor, first block, its number among those of all tensors.
    """

    kind: Kind
    ragged: bool
    warps: int
    descriptors: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    tables: torch.Tensor
    exponents: torch.Tensor
    programs: torch.Tensor

    def start(self, inp: torch.Tensor, out: torch.Tensor, errors: torch.Tensor) -> None:
        """Decode what lies around `inp` to where `out` begins. Marks corrupt tensors in `errors`."""
        with torch.cuda.device_of(inp), LAUNCHING:  # Triton launches on the current device
            _decode_blocks[(self.programs.shape[0],)](
                inp, out, self.starts, self.counts, self.descriptors, self.programs, self.tables,
                self.exponents, errors, **_options(self.kind, self.ragged, self.warps),
            )  # fmt: skip


@functools.cache
def _options(kind: Kind, ragged: bool, warps: int) -> dict[str, Any]:
    """What the kernels are compiled for. Programs with the warps of `triton_stream` decode as that does."""
    fmt, kept, group, block_size = kind
    stream = streams(kind) and not ragged and warps == triton_stream.WARPS
    compiled = isinstance(_decode_blocks, triton.JITFunction)
    return {
        "L": LANES * warps, "RAGGED": ragged, "GROUP": group, "BITS": fmt.bits, "E": fmt.exponent_bits,
        "M": fmt.mantissa_bits, "KEPT": kept, "NORM": block_size, "ELEMENT": _ELEMENTS[fmt.bits],
        "SPLIT": streams(kind), "STREAM": stream, "ASM": compiled, "num_warps": warps,
        **({"maxnreg": triton_stream.REGISTERS} if stream and compiled else {}),
    }  # fmt: skip


def _warps(kind: Kind, blocks: int, aligned: bool = True) -> int:
    """Of a program, for so many full blocks, of words that begin at multiples of 16 bytes or not."""
    if streams(kind) and aligned:
        return triton_stream.WARPS
    return 1 if blocks <= FEW_BLOCKS else 4


def decode_parts(parts: Sequence[Part], outs: Sequence[torch.Tensor], warps: int | None = None) -> None:
    """Decode parts to where outputs, uint8, begin: up to TOGETHER of a kind in a launch, and in one more.

    The latter is for ragged blocks. Corrupt tensors are marked where they lie. `warps` a program are chosen
    by their size if not given. Raises ValueError for outputs that begin at no multiple of 16 bytes.
    """
    if any(out.data_ptr() % ALIGNMENT for out in outs):
        raise ValueError(f"out is not aligned to {ALIGNMENT} bytes")
    launches: dict[tuple[Kind, bool], list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
    for part, out in zip(parts, outs, strict=True):
        for ragged, blocks in (False, part.full), (True, int(part.ragged)):
            if blocks:
                launches.setdefault((part.kind, ragged), []).append((part.row, out, blocks))
    for (kind, ragged), found in launches.items():
        for start in range(0, len(found), TOGETHER):
            _start(kind, ragged, found[start : start + TOGETHER], warps)


def _start(
    kind: Kind, ragged: bool, parts: Sequence[tuple[torch.Tensor, torch.Tensor, int]], warps: int | None
) -> None:
    if ragged:
        warps = 1
    elif warps is None:
        warps = _warps(kind, sum(blocks for _, _, blocks in parts))
    *firsts, programs = accumulate(-(-blocks // warps) for _, _, blocks in parts)
    none = TOGETHER - len(parts)
    rows, outs = [row for row, _, _ in parts], [out for _, out, _ in parts]
    with torch.cuda.device_of(rows[0]), LAUNCHING:  # Triton launches on the current device
        _decode_parts[(programs,)](
            *rows, *rows[:1] * none, *outs, *outs[:1] * none, *firsts, *[programs] * none,
            **_options(kind, ragged, warps),
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """All launches and what they need, on the device: `launch` can be captured in a CUDA graph."""

    launches: list[tuple[Launch, torch.Tensor, torch.Tensor]]
    errors: torch.Tensor
    tensors: Sequence[CodedTensor]
    outs: Sequence[torch.Tensor]
    """Kept, as the launches know only where they are."""

    def launch(self) -> None:
        """Decode once more. Marks in `errors` are never taken back."""
        for launch, inp, out in self.launches:
            launch.start(inp, out, self.errors)

    def into(self, out: torch.Tensor) -> Plan:
        """The plan of one tensor, with another output."""
        (tensor,) = self.tensors
        _check_output(0, tensor, out)
        raw = out.flatten().view(torch.uint8)
        return replace(self, launches=[(launch, inp, raw) for launch, inp, _ in self.launches], outs=[out])

    def recoded(self, tensor: CodedTensor) -> Plan:
        """The plan of one tensor after that was coded anew, by the same table and in the same memory.

        Its words may be another number. An index that does not add up to it is marked in `errors`. The plan
        from before shares all arrays, and is of no use afterwards.
        """
        (before,) = self.tensors
        if _memory_of(tensor) != _memory_of(before) or tensor.table is not before.table:
            raise ValueError("a tensor coded anew has another table, or lies elsewhere")
        if self.launches:
            launch, _, _ = self.launches[0]  # the ragged launch has the same arrays
            with torch.cuda.device_of(tensor.index), LAUNCHING:
                _extents_kernel[(1,)](
                    tensor.index, launch.starts, launch.counts, launch.descriptors, self.errors,
                    blocks=tensor.index.numel(), nbytes=2 * tensor.words.numel(), ALIGNMENT=ALIGNMENT,
                    TILE=TILE, num_warps=8,
                )  # fmt: skip
        return replace(self, tensors=[tensor])


def _memory_of(tensor: CodedTensor) -> tuple[Any, ...]:
    """What a plan knows of a tensor beside its words."""
    arrays = tensor.index, tensor.words, *tensor.planes.values()
    return tensor.kind, tensor.numel, [array.data_ptr() for array in arrays]


def _check_output(number: int, tensor: CodedTensor, out: torch.Tensor) -> None:
    """Raise ValueError where `tensor` cannot be decoded to `out`."""
    if not out.is_contiguous() or out.element_size() * 8 != tensor.fmt.bits or out.numel() != tensor.numel:
        raise ValueError(f"tensor {number} does not fit its output")
    if out.data_ptr() % ALIGNMENT or out.device != tensor.words.device:
        raise ValueError(f"output {number} is not aligned to {ALIGNMENT} bytes, or on another device")


def prepare(
    tensors: Sequence[CodedTensor],
    outs: Sequence[torch.Tensor],
    warps: int | None = None,
    errors: torch.Tensor | None = None,
) -> Plan:
    """Lay out the launches for `tensors`. `warps` a program are chosen by their size if not given.

    `errors`, int32 [len(tensors)], is new if not given.
    """
    if not tensors:
        return Plan([], torch.zeros(0, dtype=torch.int32), [], [])
    device = tensors[0].words.device
    if errors is None:
        errors = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    if errors.shape != (len(tensors),) or errors.dtype != torch.int32 or errors.device != device:
        raise ValueError(f"errors are int32, one a tensor, where the tensors are: not {tuple(errors.shape)}")
    kinds: dict[Kind, list[int]] = {}
    for number, (tensor, out) in enumerate(zip(tensors, outs, strict=True)):
        _check_output(number, tensor, out)
        if tensor.words.device != device:
            raise ValueError(f"tensor {number} is on another device than the first")
        if tensor.numel:
            kinds.setdefault(tensor.kind, []).append(number)
    launches = []
    for numbers in kinds.values():
        inp = next(iter(tensors[numbers[0]].planes.values()))
        out = outs[numbers[0]].flatten().view(torch.uint8)
        for launch in make_launches(
            [tensors[i] for i in numbers], inp, [outs[i].data_ptr() - out.data_ptr() for i in numbers],
            numbers, errors, warps,
        ):  # fmt: skip
            launches.append((launch, inp, out))
    return Plan(launches, errors, list(tensors), list(outs))


def make_launches(
    tensors: Sequence[CodedTensor],
    inp: torch.Tensor,
    out_offsets: Sequence[int],
    numbers: Sequence[int],
    errors: torch.Tensor,
    warps: int | None = None,
) -> list[Launch]:
    """The launches for tensors of one kind: the full blocks, and the ragged ones.

    Output `i` begins `out_offsets[i]` bytes after the one that the launch will be given, and `numbers[i]` is
    where it is marked in `errors`. Tensors whose index does not add up to their words are marked at once.
    """
    fmt, kept, group, _ = kind = tensors[0].kind
    host = np.zeros((len(tensors), _FACTS), np.int64)
    descriptors, words_at, n_words, blocks, first_block, frequencies, palettes = _columns(host)
    widths, base = plane_widths(1 + kept), inp.data_ptr()
    for row, t in enumerate(tensors):
        words = t.words.data_ptr() - base
        normaliser = 0 if t.normaliser is None else t.normaliser.data_ptr() - base
        descriptors[row, :PLANES] = (
            out_offsets[row], words + 2 * t.words.numel(), t.numel, normaliser, numbers[row]
        )  # fmt: skip
        for width in widths:
            descriptors[row, PLANES + WIDTHS.index(width)] = t.planes[width].data_ptr() - base
        words_at[row], n_words[row], blocks[row] = words, t.words.numel(), t.index.numel()
        frequencies[row, : t.table.frequencies.size] = t.table.frequencies
        palettes[row, : t.table.palette.size] = t.table.palette
    first_block[:] = np.cumsum(blocks) - blocks
    full, n_blocks = descriptors[:, NUMEL] // BLOCK, int(blocks.sum())
    is_ragged = blocks > full
    aligned = all(t.words.data_ptr() % ALIGNMENT == 0 for t in tensors)
    warps = warps or _warps(kind, int(full.sum()), aligned)
    if warps == triton_stream.WARPS and streams(kind) and not aligned:
        raise ValueError(f"{warps} warps a program take words that begin at multiples of {ALIGNMENT} bytes")
    shares = ((full + warps - 1) // warps, warps, False), (is_ragged.astype(np.int64), 1, True)
    sizes = [int(programs.sum()) for programs, _, _ in shares]

    # From here on the device works, and nobody waits for it: one copy, and whatever follows from it.
    facts = torch.from_numpy(host).to(inp.device, non_blocking=True)
    descriptors, words_at, n_words, blocks, first_block, frequencies, palettes = _columns(facts)
    counts = torch.cat([t.index for t in tensors]).to(torch.int32) & 0xFFFF
    ends = torch.cumsum(counts, 0, dtype=torch.int64)
    # The words of a tensor are counted from its first block on, not from that of the launch.
    words_before = (ends - counts)[first_block]
    owner = _repeat(blocks, n_blocks)
    starts = 2 * (ends - counts - words_before[owner]) + words_at[owner]
    unused = n_words - (ends[first_block + blocks - 1] - words_before)
    errors[descriptors[:, TENSOR]] |= ((unused < 0) | (unused >= ALIGNMENT // 2)).int()
    own = (
        descriptors.contiguous(),
        starts,
        counts,
        _slots(frequencies, streams(kind)),
        _exponents_of(palettes, fmt, group),
    )
    launches = []
    for (_, width, ragged), size in zip(shares, sizes, strict=True):
        if size:
            numel = descriptors[:, NUMEL]
            per_row = (numel % BLOCK != 0).long() if ragged else (numel // BLOCK + width - 1) // width
            owner = _repeat(per_row, size)
            before = torch.arange(size, device=inp.device) - (torch.cumsum(per_row, 0) - per_row)[owner]
            first = numel[owner] // BLOCK if ragged else before * width
            programs = torch.stack([owner, first, first_block[owner] + first], 1).to(torch.int32)
            launches.append(Launch(kind, ragged, width, *own, programs))
    return launches


_FACTS = PLANES + len(WIDTHS) + 4 + 256 + 256


def _columns(facts: Any) -> tuple[Any, ...]:
    """What is known of every tensor: its descriptor, four numbers, frequencies and palette."""
    n = PLANES + len(WIDTHS)
    return (
        facts[:, :n],
        *(facts[:, n + i] for i in range(4)),
        facts[:, n + 4 : n + 260],
        facts[:, n + 260 :],
    )


def _repeat(times: torch.Tensor, total: int) -> torch.Tensor:
    """Each row's number as often as `times` says, `total` numbers."""
    rows = torch.arange(times.numel(), device=times.device)
    return torch.repeat_interleave(rows, times, output_size=total)


def _slots(frequencies: torch.Tensor, split: bool) -> torch.Tensor:
    """For every tensor 4,096 slots: symbol | frequency << 8 | offset << 20.

    `split`: first place in the palette | frequency << 4 | second place << 16 | offset << 20.
    """
    f = frequencies.reshape(-1)
    symbol = _repeat(f, frequencies.shape[0] * SCALE)
    offset = torch.arange(symbol.numel(), device=f.device) - (torch.cumsum(f, 0) - f)[symbol]
    if split:
        return _as_int32(symbol & 15 | f[symbol] << 4 | (symbol >> 4 & 15) << 16 | offset << 20)
    return _as_int32((symbol & 0xFF) | f[symbol] << 8 | offset << 20)


def _exponents_of(palettes: torch.Tensor, fmt: FloatFormat, group: int) -> torch.Tensor:
    """For every tensor the exponents of 256 symbols, shifted to where they stand in a weight or a pair."""
    shift, stride = _exponent_layout(fmt)
    if group == 1:
        return _as_int32(palettes << shift).reshape(-1)
    symbol = torch.arange(256, device=palettes.device)
    first, second = palettes[:, symbol & 15], palettes[:, symbol >> 4]
    return _as_int32(first << shift | second << (shift + stride)).reshape(-1)


def _exponent_layout(fmt: FloatFormat) -> tuple[int, int]:
    """By how much the exponents of two neighbours are shifted: within a word if two weights share one."""
    return (fmt.mantissa_bits, fmt.bits) if fmt.bits <= 16 else (0, fmt.bits // 4)


def _as_int32(values: torch.Tensor) -> torch.Tensor:
    """Numbers below 2^32 as int32 of the same bits."""
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


_ELEMENTS = {8: tl.uint8, 16: tl.uint16, 32: tl.uint32, 64: tl.uint64}

# Kernels. L: threads of a program. All states are uint32; GROUP, E, M, KEPT as in SPEC.md; W = 1 + KEPT.

_LANES, _RUN, _RUNS, _BLOCK = (tl.constexpr(v) for v in (LANES, RUN, RUNS, BLOCK))
_HEADER, _SLOTS, _SCALE_BITS = (tl.constexpr(v) for v in (HEADER_WORDS, SCALE - 1, SCALE_BITS))
_LOWER = tl.constexpr(LOWER)
_C_OUT, _C_WORDS_END, _C_NUMEL, _C_NORMALISER, _C_TENSOR, _C_PLANES = (
    tl.constexpr(v) for v in (OUT, WORDS_END, NUMEL, NORMALISER, TENSOR, PLANES)
)
_COLUMNS = tl.constexpr(COLUMNS)
_C_ROW, _C_STARTS, _C_COUNTS, _C_TABLES, _C_FIRST, _C_LAST = (
    tl.constexpr(v) for v in (ROW, STARTS, COUNTS, TABLES, FIRST, LAST)
)

# How far ahead of the next word 64 words are touched in every run. A run of Gaussian bf16 takes 41.
_AHEAD = tl.constexpr(64)


@triton.jit(do_not_specialize=["blocks", "nbytes"])
def _extents_kernel(
    index_ptr, starts_ptr, counts_ptr, descriptors_ptr, errors_ptr, blocks, nbytes,
    ALIGNMENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Where the blocks of a launch's only tensor start, and how many words they have, from its index.

    The first goes on to start where it did. nbytes: of all words. One program does it all.
    """
    first = tl.load(starts_ptr)
    start = first
    for at in range(0, blocks, TILE):
        offs = at + tl.arange(0, TILE)
        mask = offs < blocks
        count = tl.load(index_ptr + offs, mask=mask, other=0).to(tl.int32) & 0xFFFF
        tl.store(counts_ptr + offs, count, mask=mask)
        # Lengths of a tile add up in 32 bits.
        tl.store(starts_ptr + offs, start + 2 * (tl.cumsum(count, 0) - count), mask=mask)
        start += 2 * tl.sum(count)
    unused = nbytes - (start - first)
    tl.store(descriptors_ptr + _C_WORDS_END, first + nbytes)
    number = tl.load(descriptors_ptr + _C_TENSOR)
    tl.atomic_or(errors_ptr + number, ((unused < 0) | (unused >= ALIGNMENT)).to(tl.int32))


@triton.jit
def _u16(pointers, mask):
    return tl.load(pointers, mask=mask, other=0).to(tl.uint32)


@triton.jit
def _refill(x, p, words, limit, L: tl.constexpr, ASM: tl.constexpr):
    """Lanes whose state is small take the next words of the block, in the order of the lanes: state and `p`.

    In PTX for what Triton has no words for: which lanes of the warp need a word, and how many lower ones do.
    """
    if ASM:
        x, p = tl.inline_asm_elementwise(
            """{
            .reg .pred need, there;
            .reg .b32 ballot, lower, at, word, filled, all;
            .reg .b64 address;
            setp.lo.u32 need, $2, 65536;
            vote.sync.ballot.b32 ballot, need, 0xffffffff;
            mov.u32 lower, %lanemask_lt;
            and.b32 lower, lower, ballot;
            popc.b32 at, lower;
            add.s32 at, at, $3;
            setp.lt.and.s32 there, at, $5, need;
            mad.wide.s32 address, at, 2, $4;
            mov.b32 word, 0;
            @there ld.global.u16 word, [address];
            prmt.b32 filled, $2, word, 0x1054;
            selp.b32 $0, filled, $2, need;
            popc.b32 all, ballot;
            add.s32 $1, $3, all;
            }""",
            "=r,=r,r,r,l,r", [x, p, words.to(tl.int64), limit],
            dtype=(tl.uint32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        x, p = refilled(x, p, words, limit, L)
    return x, p


@triton.jit
def _step(
    x, p, words, limit, tables, exponents, SPLIT: tl.constexpr, L: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Decode a symbol of every lane: its exponents. `p` counts the words of the block taken so far."""
    entry = tl.load(tables + (x & _SLOTS)).to(tl.uint32, bitcast=True)
    x = ((entry >> (4 if SPLIT else 8)) & 0xFFF) * (x >> _SCALE_BITS) + (entry >> 20)
    x, p = _refill(x, p, words, limit, L, ASM)
    symbol = (entry & 15) | ((entry >> 12) & 0xF0) if SPLIT else entry & 0xFF
    return x, p, _exponents(symbol, exponents)


@triton.jit
def _exponents(symbol, exponents):
    return tl.load(exponents + symbol).to(tl.uint32, bitcast=True)


@triton.jit
def _run(
    x, p, words, limit, tables, exponents,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr, LAST: tl.constexpr, L: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Decode a run: the exponents of four pairs of weights. The last two symbols lie in the state."""
    if GROUP == 2:
        x, p, e0 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        x, p, e1 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        if LAST:
            e2 = _exponents(x & 0xFF, exponents)
            e3 = _exponents((x >> 8) & 0xFF, exponents)
        else:
            x, p, e2 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
            x, p, e3 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
    else:
        x, p, a0 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        x, p, a1 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        x, p, a2 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        x, p, a3 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        x, p, a4 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        x, p, a5 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        if LAST:
            a6 = _exponents(x & 0xFF, exponents)
            a7 = _exponents((x >> 8) & 0xFF, exponents)
        else:
            x, p, a6 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
            x, p, a7 = _step(x, p, words, limit, tables, exponents, SPLIT, L, ASM)
        e0, e1, e2, e3 = a0 | a1 << STRIDE, a2 | a3 << STRIDE, a4 | a5 << STRIDE, a6 | a7 << STRIDE
    return x, p, e0, e1, e2, e3


@triton.jit
def _load_run(
    planes32, planes16, planes8, planes4, planes2, planes1, at, left, W: tl.constexpr, RAGGED: tl.constexpr
):
    """The planes of a lane's 8 weights, run `at` from the pointers on: w bytes of the plane of width w.

    Of a ragged block only what belongs to its `left` weights, to 16 bytes rounded up, is read. Nothing is
    widened here: that would be a use, and would wait.
    """
    none = tl.full([], 0, tl.uint64)
    q0, q1, q2, q3, d0, d1, b8, b4 = none, none, none, none, none, none, none, none.to(tl.uint32)
    b2, b1 = none.to(tl.uint16), none.to(tl.uint8)
    if RAGGED:
        if W & 32:
            q0 = tl.load(planes32 + 4 * at, mask=left > 0, other=0)
            q1 = tl.load(planes32 + 4 * at + 1, mask=left > 2, other=0)
            q2 = tl.load(planes32 + 4 * at + 2, mask=left > 4, other=0)
            q3 = tl.load(planes32 + 4 * at + 3, mask=left > 6, other=0)
        if W & 16:
            d0 = tl.load(planes16 + 2 * at, mask=left > 0, other=0)
            d1 = tl.load(planes16 + 2 * at + 1, mask=left > 0, other=0)
        if W & 8:
            b8 = tl.load(planes8 + at, mask=left > 0, other=0)
        if W & 4:
            b4 = tl.load(planes4 + at, mask=left > 0, other=0)
        if W & 2:
            b2 = tl.load(planes2 + at, mask=left > 0, other=0)
        if W & 1:
            b1 = tl.load(planes1 + at, mask=left > 0, other=0)
    else:
        if W & 32:
            q0 = tl.load(planes32 + 4 * at)
            q1 = tl.load(planes32 + 4 * at + 1)
            q2 = tl.load(planes32 + 4 * at + 2)
            q3 = tl.load(planes32 + 4 * at + 3)
        if W & 16:
            d0 = tl.load(planes16 + 2 * at)
            d1 = tl.load(planes16 + 2 * at + 1)
        if W & 8:
            b8 = tl.load(planes8 + at)
        if W & 4:
            b4 = tl.load(planes4 + at)
        if W & 2:
            b2 = tl.load(planes2 + at)
        if W & 1:
            b1 = tl.load(planes1 + at)
    return q0, q1, q2, q3, d0, d1, b8, b4, b2, b1


@triton.jit
def _spread(plane, j: tl.constexpr, w: tl.constexpr, STRIDE: tl.constexpr):
    """The fields of w bits of weights 2j and 2j + 1, STRIDE bits apart."""
    if w == 8:
        two = (plane >> (16 * j)).to(tl.uint32)
    else:
        two = plane.to(tl.uint32) >> (2 * w * j)
    ones: tl.constexpr = (1 << w) - 1
    return (two & ones) | ((two & (ones << w)) << (STRIDE - w))


@triton.jit
def _pair(e, b8, b4, b2, b1, j: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr):
    """Weights 2j and 2j + 1 of a format of at most 16 bits, in one word. `e` has their exponents in place."""
    W: tl.constexpr = KEPT + 1
    twice: tl.constexpr = 1 + (1 << BITS)
    fields = tl.zeros_like(e)
    if W & 8:
        fields = _spread(b8, j, 8, BITS)
    if W & 4:
        fields = (fields << 4) | _spread(b4, j, 4, BITS)
    if W & 2:
        fields = (fields << 2) | _spread(b2, j, 2, BITS)
    if W & 1:
        fields = (fields << 1) | _spread(b1, j, 1, BITS)
    signs: tl.constexpr = twice << KEPT
    mantissas: tl.constexpr = twice * ((1 << KEPT) - 1)
    return e | ((fields & signs) << (BITS - 1 - KEPT)) | ((fields & mantissas) << (M - KEPT))


@triton.jit
def _field(q, d, b8, b4, b2, b1, j: tl.constexpr, W: tl.constexpr):
    """The field of weight j, of a format of 32 or 64 bits; q and d are the words that it is in."""
    field = tl.zeros_like(d + b8 + b4 + b2 + b1 + q)
    if W & 32:
        field = (q >> (32 * (j % 2))) & 0xFFFFFFFF
    if W & 16:
        field = (field << 16) | ((d >> (16 * (j % 4))) & 0xFFFF)
    if W & 8:
        field = (field << 8) | ((b8 >> (8 * j)) & 0xFF)
    if W & 4:
        field = (field << 4) | ((b4 >> (4 * j)) & 0xF).to(tl.uint64)
    if W & 2:
        field = (field << 2) | ((b2.to(tl.uint32) >> (2 * j)) & 0x3).to(tl.uint64)
    if W & 1:
        field = (field << 1) | ((b1.to(tl.uint32) >> j) & 0x1).to(tl.uint64)
    return field


@triton.jit
def _assemble(e, field, BITS: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr):
    """A weight's pattern from its exponent and its field."""
    sign = (field >> KEPT) << (BITS - 1)
    mantissa = (field & ((1 << KEPT) - 1)) << (M - KEPT)
    return sign | (e.to(tl.uint64) << M) | mantissa


@triton.jit
def _times(pattern, factor, BITS: tl.constexpr, E: tl.constexpr):
    """A weight, in the low bits of a word, times the normaliser: formed in fp32, or fp64 for F64."""
    if BITS == 64:
        product = pattern.to(tl.float64, bitcast=True) * factor.to(tl.float64)
        result = product.to(tl.uint64, bitcast=True)
    elif BITS == 32:
        product = pattern.to(tl.uint32).to(tl.float32, bitcast=True) * factor
        result = product.to(tl.uint32, bitcast=True)
    elif E == 8:
        product = (pattern << 16).to(tl.uint32).to(tl.float32, bitcast=True) * factor
        bits = product.to(tl.uint32, bitcast=True)
        result = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        product = pattern.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * factor
        result = product.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return result


@triton.jit
def _pair_times(pair, factor, BITS: tl.constexpr, E: tl.constexpr):
    return _times(pair & 0xFFFF, factor, BITS, E) | (_times(pair >> 16, factor, BITS, E) << 16)


@triton.jit
def _merge(
    e0, e1, e2, e3, q0, q1, q2, q3, d0, d1, b8, b4, b2, b1, factor,
    BITS: tl.constexpr, E: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A lane's 8 weights as BITS / 8 words of 64 bits; the others are without meaning."""
    W: tl.constexpr = KEPT + 1
    none = tl.zeros_like(joined(e0, e0))
    w0, w1, w2, w3, w4, w5, w6, w7 = none, none, none, none, none, none, none, none
    if BITS <= 16:
        p0 = _pair(e0, b8, b4, b2, b1, 0, BITS, M, KEPT)
        p1 = _pair(e1, b8, b4, b2, b1, 1, BITS, M, KEPT)
        p2 = _pair(e2, b8, b4, b2, b1, 2, BITS, M, KEPT)
        p3 = _pair(e3, b8, b4, b2, b1, 3, BITS, M, KEPT)
        if BITS == 16:
            if NORM:
                p0, p1 = _pair_times(p0, factor, BITS, E), _pair_times(p1, factor, BITS, E)
                p2, p3 = _pair_times(p2, factor, BITS, E), _pair_times(p3, factor, BITS, E)
            w0, w1 = joined(p0, p1), joined(p2, p3)
        else:
            w0 = joined(p0 | p1 << 16, p2 | p3 << 16)
    else:
        low: tl.constexpr = (1 << (BITS // 4)) - 1
        v0 = _assemble(e0 & low, _field(q0, d0, b8, b4, b2, b1, 0, W), BITS, M, KEPT)
        v1 = _assemble(e0 >> (BITS // 4), _field(q0, d0, b8, b4, b2, b1, 1, W), BITS, M, KEPT)
        v2 = _assemble(e1 & low, _field(q1, d0, b8, b4, b2, b1, 2, W), BITS, M, KEPT)
        v3 = _assemble(e1 >> (BITS // 4), _field(q1, d0, b8, b4, b2, b1, 3, W), BITS, M, KEPT)
        v4 = _assemble(e2 & low, _field(q2, d1, b8, b4, b2, b1, 4, W), BITS, M, KEPT)
        v5 = _assemble(e2 >> (BITS // 4), _field(q2, d1, b8, b4, b2, b1, 5, W), BITS, M, KEPT)
        v6 = _assemble(e3 & low, _field(q3, d1, b8, b4, b2, b1, 6, W), BITS, M, KEPT)
        v7 = _assemble(e3 >> (BITS // 4), _field(q3, d1, b8, b4, b2, b1, 7, W), BITS, M, KEPT)
        if NORM:
            v0, v1 = _times(v0, factor, BITS, E), _times(v1, factor, BITS, E)
            v2, v3 = _times(v2, factor, BITS, E), _times(v3, factor, BITS, E)
            v4, v5 = _times(v4, factor, BITS, E), _times(v5, factor, BITS, E)
            v6, v7 = _times(v6, factor, BITS, E), _times(v7, factor, BITS, E)
        if BITS == 32:
            w0, w1, w2, w3 = joined(v0, v1), joined(v2, v3), joined(v4, v5), joined(v6, v7)
        else:
            w0, w1, w2, w3, w4, w5, w6, w7 = v0, v1, v2, v3, v4, v5, v6, v7
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _store_run(target, w0, w1, w2, w3, w4, w5, w6, w7, BITS: tl.constexpr):
    """Store the 8 weights of every lane, 16 bytes at a time: more would be moved between threads first."""
    if BITS == 8:
        tl.store(target, w0[:, None])
    else:
        tl.store(target, tl.join(w0, w1))
    if BITS >= 32:
        tl.store(target + 2, tl.join(w2, w3))
    if BITS == 64:
        tl.store(target + 4, tl.join(w4, w5))
        tl.store(target + 6, tl.join(w6, w7))


@triton.jit
def _store_word(target, left, word, number: tl.constexpr, BITS: tl.constexpr, ELEMENT: tl.constexpr):
    """Store the weights of a lane's word `number`, one by one, if they are among its first `left`."""
    for i in tl.static_range(64 // BITS):
        at = number * (64 // BITS) + i
        tl.store(target + at, (word >> (i * BITS)).to(ELEMENT), mask=at < left)


@triton.jit
def _store_ragged(
    target, left, w0, w1, w2, w3, w4, w5, w6, w7, BITS: tl.constexpr, ELEMENT: tl.constexpr
):  # fmt: skip
    """Store the first `left` of a lane's 8 weights."""
    _store_word(target, left, w0, 0, BITS, ELEMENT)
    if BITS >= 16:
        _store_word(target, left, w1, 1, BITS, ELEMENT)
    if BITS >= 32:
        _store_word(target, left, w2, 2, BITS, ELEMENT)
        _store_word(target, left, w3, 3, BITS, ELEMENT)
    if BITS == 64:
        _store_word(target, left, w4, 4, BITS, ELEMENT)
        _store_word(target, left, w5, 5, BITS, ELEMENT)
        _store_word(target, left, w6, 6, BITS, ELEMENT)
        _store_word(target, left, w7, 7, BITS, ELEMENT)


@triton.jit
def _decode_blocks(
    inp, out, starts, counts, descriptors, programs, tables, exponents, errors,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of one tensor of a launch: full ones, or, RAGGED, its last."""
    programs += 3 * tl.program_id(0)
    row, first, first_number = tl.load(programs), tl.load(programs + 1), tl.load(programs + 2)
    own, before = descriptors + row * _COLUMNS, first_number - first
    last = tl.load(own + _C_NUMEL) // _BLOCK - 1
    _decode(
        inp, out, starts + before, counts + before, own, tables + row * (_SLOTS + 1), exponents + row * 256,
        errors, first, last, L, RAGGED, GROUP, BITS, E, M, KEPT, NORM, ELEMENT, SPLIT, STREAM, ASM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["p1", "p2", "p3", "p4", "p5", "p6", "p7"])
def _decode_parts(
    r0, r1, r2, r3, r4, r5, r6, r7, o0, o1, o2, o3, o4, o5, o6, o7, p1, p2, p3, p4, p5, p6, p7,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The same of parts that lie anywhere: rows, outputs, first programs. That of the first part is 0."""
    program = tl.program_id(0)
    own, out, before = r0, o0, program * 0
    own, out, before = _from(program, p1, r1, o1, own, out, before)
    own, out, before = _from(program, p2, r2, o2, own, out, before)
    own, out, before = _from(program, p3, r3, o3, own, out, before)
    own, out, before = _from(program, p4, r4, o4, own, out, before)
    own, out, before = _from(program, p5, r5, o5, own, out, before)
    own, out, before = _from(program, p6, r6, o6, own, out, before)
    own, out, before = _from(program, p7, r7, o7, own, out, before)
    inp = own.to(tl.pointer_type(tl.uint8)) - tl.multiple_of(tl.load(own + _C_ROW), 16)
    starts = (inp + tl.load(own + _C_STARTS)).to(tl.pointer_type(tl.int64))
    counts = (inp + tl.load(own + _C_COUNTS)).to(tl.pointer_type(tl.int32))
    tables = (inp + tl.load(own + _C_TABLES)).to(tl.pointer_type(tl.int32))
    last = tl.load(own + _C_LAST)
    first = tl.load(own + _C_NUMEL) // _BLOCK if RAGGED else tl.load(own + _C_FIRST)
    first += (program - before) * (L // _LANES)
    _decode(
        inp, out, starts, counts, own, tables, tables + (_SLOTS + 1), inp.to(tl.pointer_type(tl.int32)),
        first, last, L, RAGGED, GROUP, BITS, E, M, KEPT, NORM, ELEMENT, SPLIT, STREAM, ASM,
    )  # fmt: skip


@triton.jit
def _from(program, first, row, output, own, out, before):
    """A part and its first program, where it begins with that or an earlier one; else what was before."""
    begun = program >= first
    return tl.where(begun, row, own), tl.where(begun, output, out), tl.where(begun, first, before)


@triton.jit
def _decode(
    inp, out, starts, counts, own, tables, exponents, errors, first, last,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of a tensor from the `first` on, none beyond the `last` full one."""
    W: tl.constexpr = KEPT + 1
    N: tl.constexpr = BITS // 8
    STRIDE: tl.constexpr = BITS if BITS <= 16 else BITS // 4
    numel = tl.load(own + _C_NUMEL)
    lane = tl.arange(0, L) % _LANES
    block = first.to(tl.int64) + tl.arange(0, L) // _LANES
    if not RAGGED:
        # Where blocks are left over, the last is decoded by several warps: all write the same.
        block = tl.minimum(block, last)
    start = tl.load(starts + block)
    count = tl.load(counts + block)
    # Where the index has run far beyond the words, what is left is very negative, and must not wrap.
    count = tl.maximum(tl.minimum(count, (tl.load(own + _C_WORDS_END) - start) // 2), 0).to(tl.int32)
    words = (inp + start).to(tl.pointer_type(tl.uint16))
    whole = count >= _HEADER
    escapes = tl.load(words, mask=whole, other=0).to(tl.int32)
    limit = count - 2 * escapes
    whole = whole & (limit >= _HEADER)
    limit = tl.where(whole, limit, 0)
    x = _u16(words + 1 + lane, whole) | (_u16(words + 1 + _LANES + lane, whole) << 16)
    p = tl.full([L], _HEADER, tl.int32)
    if L == _LANES:
        # A line of the table each, and three more: the look-ups of the first runs find them in the cache.
        line = tables + tl.arange(0, L) * 128
        warm = tl.load(line) | tl.load(line + 32) | tl.load(line + 64) | tl.load(line + 96)

    run = block * (_BLOCK // _RUN) + lane
    planes32 = (inp + tl.multiple_of(tl.load(own + _C_PLANES), 16)).to(tl.pointer_type(tl.uint64)) + 4 * run
    planes16 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 1), 16)).to(
        tl.pointer_type(tl.uint64)
    ) + 2 * run
    planes8 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 2), 16)).to(tl.pointer_type(tl.uint64)) + run
    planes4 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 3), 16)).to(tl.pointer_type(tl.uint32)) + run
    planes2 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 4), 16)).to(tl.pointer_type(tl.uint16)) + run
    planes1 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 5), 16)).to(tl.pointer_type(tl.uint8)) + run
    normaliser = inp + tl.load(own + _C_NORMALISER)
    out += tl.multiple_of(tl.load(own + _C_OUT), 16)
    elements = out.to(tl.pointer_type(ELEMENT))
    target = out.to(tl.pointer_type(tl.uint64)) + (
        run[:, None] * N + tl.arange(0, 1 if BITS == 8 else 2)[None, :]
    )

    runs = (
        ((numel - numel // _BLOCK * _BLOCK + _LANES * _RUN - 1) // (_LANES * _RUN)).to(tl.int32)
        if RAGGED
        else _RUNS
    )
    # Weights from this lane's part of run 0 to the end of the tensor; only a ragged block asks.
    left = (numel - run * _RUN).to(tl.int32) if RAGGED else p

    touched = tl.zeros([L], tl.uint16)
    if STREAM:
        shared = triton_stream.to_shared(tables, L, ASM)
        lowest = tl.load(exponents).to(tl.uint32, bitcast=True)
        highest = tl.load(exponents + 255).to(tl.uint32, bitcast=True)
        if highest - lowest == (15 << M) * 0x10001:  # a palette of 16 exponents in a row
            x, p = triton_stream.runs(
                x, p, words, limit, tables, exponents, lowest, planes8, target, lane, shared, True, M, L, ASM
            )
        else:
            x, p = triton_stream.runs(
                x, p, words, limit, tables, exponents, lowest, planes8, target, lane, shared, False, M, L, ASM
            )
    else:
        q0, q1, q2, q3, d0, d1, b8, b4, b2, b1 = _load_run(
            planes32, planes16, planes8, planes4, planes2, planes1, 0, left, W, RAGGED
        )
        r0, r1, r2, r3, f0, f1, c8, c4, c2, c1 = _load_run(
            planes32, planes16, planes8, planes4, planes2, planes1,
            _LANES, left - _LANES * _RUN, W, RAGGED,
        )  # fmt: skip
        # Never widened in the loop: that would be a use, and would wait.
        if L == _LANES:
            touched |= warm.to(tl.uint16)
        touching = tl.zeros([L], tl.uint16)
        factor = tl.zeros([L], tl.float32)
        for i in range(runs - 1):
            touched |= touching
            ahead = p + _AHEAD + 2 * lane
            touching = tl.load(words + ahead, mask=ahead < limit, other=0)
            after = tl.minimum(i + 2, runs - 1) * _LANES
            s0, s1, s2, s3, g0, g1, t8, t4, t2, t1 = _load_run(
                planes32, planes16, planes8, planes4, planes2, planes1, after, left - after * _RUN, W, RAGGED
            )
            if NORM:
                factor = 1 + tl.load(normaliser + (run + i * _LANES) * _RUN // NORM).to(tl.float32) * (
                    1 / 256
                )
            x, p, e0, e1, e2, e3 = _run(
                x, p, words, limit, tables, exponents, SPLIT, GROUP, STRIDE, False, L, ASM
            )
            w0, w1, w2, w3, w4, w5, w6, w7 = _merge(
                e0, e1, e2, e3, q0, q1, q2, q3, d0, d1, b8, b4, b2, b1, factor, BITS, E, M, KEPT, NORM
            )
            if RAGGED:
                at = i * _LANES * _RUN
                _store_ragged(
                    elements + run * _RUN + at, left - at, w0, w1, w2, w3, w4, w5, w6, w7, BITS, ELEMENT
                )
            else:
                _store_run(target + i * _LANES * N, w0, w1, w2, w3, w4, w5, w6, w7, BITS)
            q0, q1, q2, q3, d0, d1, b8, b4, b2, b1 = r0, r1, r2, r3, f0, f1, c8, c4, c2, c1
            r0, r1, r2, r3, f0, f1, c8, c4, c2, c1 = s0, s1, s2, s3, g0, g1, t8, t4, t2, t1

        last = runs - 1
        if NORM:
            at = (run + last * _LANES) * _RUN
            factor = 1 + tl.load(normaliser + at // NORM, mask=at < numel, other=0).to(tl.float32) * (1 / 256)
        x, p, e0, e1, e2, e3 = _run(x, p, words, limit, tables, exponents, SPLIT, GROUP, STRIDE, True, L, ASM)
        w0, w1, w2, w3, w4, w5, w6, w7 = _merge(
            e0, e1, e2, e3, q0, q1, q2, q3, d0, d1, b8, b4, b2, b1, factor, BITS, E, M, KEPT, NORM
        )
        if RAGGED:
            at = last * _LANES * _RUN
            _store_ragged(
                elements + run * _RUN + at, left - at, w0, w1, w2, w3, w4, w5, w6, w7, BITS, ELEMENT
            )
        else:
            _store_run(target + last * _LANES * N, w0, w1, w2, w3, w4, w5, w6, w7, BITS)

    tl.debug_barrier()  # an escape is another lane's weight
    bad = (whole == 0) | ((x >> 16) != 1) | (p != limit)
    first = block * _BLOCK
    in_block = tl.minimum(numel - first, _BLOCK).to(tl.int32)
    escapes = tl.where(whole, escapes, 0)
    for k in range(0, tl.max(escapes), _LANES):
        mine = k + lane < escapes
        entry = limit + 2 * (k + lane)
        where = _u16(words + entry, mine).to(tl.int32)
        before = _u16(words + entry - 2, mine & (k + lane > 0)).to(tl.int32)
        exponent = _u16(words + entry + 1, mine)
        wrong = (where >= in_block) | ((k + lane > 0) & (where <= before)) | ((exponent >> E) != 0)
        bad |= mine & wrong
        mine &= where < in_block
        weight = first + where
        field = _one_field(inp, own, weight, mine, W)
        value = _assemble(exponent & ((1 << E) - 1), field, BITS, M, KEPT)
        if NORM:
            q = tl.load(normaliser + weight // NORM, mask=mine, other=0)
            value = _times(value, 1 + q.to(tl.float32) * (1 / 256), BITS, E)
        tl.store(elements + weight, value.to(ELEMENT), mask=mine)
    # That they are reported keeps the words that were touched from being optimised away.
    tensor = tl.load(own + _C_TENSOR)
    tl.atomic_or(errors + tensor + tl.zeros([L], tl.int32), 1 | touched.to(tl.int32) << 1, mask=bad)


@triton.jit
def _one_field(inp, own, weight, mask, W: tl.constexpr):
    """The field of any one weight of the tensor."""
    field = tl.zeros_like(weight).to(tl.uint64)
    if W & 32:
        plane = (inp + tl.load(own + _C_PLANES)).to(tl.pointer_type(tl.uint32))
        field = tl.load(plane + weight, mask=mask, other=0).to(tl.uint64)
    if W & 16:
        plane = (inp + tl.load(own + _C_PLANES + 1)).to(tl.pointer_type(tl.uint16))
        field = (field << 16) | tl.load(plane + weight, mask=mask, other=0)
    if W & 8:
        field = (field << 8) | tl.load(inp + tl.load(own + _C_PLANES + 2) + weight, mask=mask, other=0)
    if W & 4:
        byte = tl.load(inp + tl.load(own + _C_PLANES + 3) + weight // 2, mask=mask, other=0)
        field = (field << 4) | ((byte >> (weight % 2 * 4).to(tl.uint8)) & 0xF)
    if W & 2:
        byte = tl.load(inp + tl.load(own + _C_PLANES + 4) + weight // 4, mask=mask, other=0)
        field = (field << 2) | ((byte >> (weight % 4 * 2).to(tl.uint8)) & 0x3)
    if W & 1:
        byte = tl.load(inp + tl.load(own + _C_PLANES + 5) + weight // 8, mask=mask, other=0)
        field = (field << 1) | ((byte >> (weight % 8).to(tl.uint8)) & 0x1)
    return field
