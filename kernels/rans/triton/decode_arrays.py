"""What the decoder's kernels read beside the streams, made on the device for a list of tensors at once.

The host uploads a few numbers of each tensor, and its frequencies and palette. From these and the indexes, a
kernel finds where each block starts, one fills the tables of all tensors, and one says for each program of a
launch which blocks it decodes. Nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import launch
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.coded import (
    ALIGNMENT,
    COLUMNS,
    OUT,
    POSITIONS,
    TENSOR,
    WORDS_END,
    CodedTensor,
    Kind,
)
from neuzip.kernels.rans.numbers import SCALE
from neuzip.kernels.rans.triton.lists import ENTRIES, Ints

TILE = 2048
"""Entries of an index that are summed up at a time."""

# Columns of a list: bytes of the words and where these and the index begin, in bytes after the base of the
# launch; where each tensor is marked; its blocks, and those of the tensors before; its full blocks. Then
# starts of the programs that decode full blocks, and ragged ones.
WORDS_AT, NBYTES, INDEX_AT, NUMBER, BLOCKS, FIRST_BLOCK, FULL, STARTS_AT = range(8)
_EXTENT = (WORDS_AT, NBYTES, INDEX_AT, BLOCKS, FULL)


@dataclass(frozen=True)
class DecodeArrays:
    """The arrays of a list of tensors of one kind, and the columns that they were made of."""

    descriptors: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    tables: torch.Tensor
    exponents: torch.Tensor
    columns: torch.Tensor


def extents_of(tensors: Sequence[CodedTensor]) -> Ints:
    """`CodedTensor.extent` of each, int64 [tensors, 5]."""
    return np.concatenate([tensor.extent for tensor in tensors]).reshape(len(tensors), -1)


def make_arrays(
    kind: Kind,
    tensors: Sequence[CodedTensor],
    inp: torch.Tensor,
    out_offsets: Sequence[int],
    numbers: Sequence[int],
    errors: torch.Tensor,
    has_places: bool,
    shares: Ints,
) -> DecodeArrays:
    """The arrays for at most `lists.MOST` tensors of a kind. `has_places`: slots hold places in a palette.

    Output `i` begins `out_offsets[i]` bytes after the one that the launch will be given, and `numbers[i]` is
    where it is marked in `errors`: at once if its index does not add up to its words. `shares`, [2, tensors],
    are programs for its full blocks, and for a ragged one.
    """
    n, device, base = len(tensors), inp.device, inp.data_ptr()
    columns = _columns(tensors, base, numbers, shares)
    blocks = int(columns[BLOCKS].sum())
    # In this order all three begin at multiples of 16 bytes, whatever n is: no kernel is compiled twice.
    ends = columns.size, columns.size + n * 3 * 128
    host = torch.empty(ends[1] + n * COLUMNS, dtype=torch.int64, pin_memory=device.type == "cuda")
    array = host.numpy()
    array[: ends[0]] = columns.reshape(-1)
    np.concatenate([t.table.symbol_rows for t in tensors], out=array[ends[0] : ends[1]].view(np.int32))
    np.concatenate([t.descriptor for t in tensors], out=array[ends[1] :])
    descriptors = array[ends[1] :].reshape(n, COLUMNS)
    places = descriptors[:, list(POSITIONS)]
    descriptors[:, list(POSITIONS)] = np.where(places, places - base, 0)
    descriptors[:, OUT], descriptors[:, TENSOR] = out_offsets, numbers
    uploaded = host.to(device, non_blocking=True)
    arrays = DecodeArrays(
        uploaded[ends[1] :].view(n, COLUMNS),
        torch.empty(blocks, dtype=torch.int64, device=device),
        torch.empty(blocks, dtype=torch.int32, device=device),
        torch.empty(n * SCALE, dtype=torch.int32, device=device),
        torch.empty(n * 256, dtype=torch.int32, device=device),
        uploaded[: ends[0]],
    )
    _find_extents(arrays, inp, errors)
    _fill_tables(kind, arrays, uploaded[ends[0] : ends[1]].view(torch.int32), has_places)
    return arrays


def update_extents(
    arrays: DecodeArrays, tensor: CodedTensor, inp: torch.Tensor, errors: torch.Tensor
) -> None:
    """Find the blocks of the only tensor anew, which has been coded again in the same memory."""
    arrays.columns[NBYTES * ENTRIES].fill_(2 * tensor.words.numel())
    _find_extents(arrays, inp, errors)


def compile_arrays(kind: Kind, has_places: bool) -> DecodeArrays:
    """Compile what makes arrays for tensors of a kind on the current GPU; arrays without numbers."""
    with torch.device("meta"):
        wide, narrow = torch.empty(1, 1, dtype=torch.int64), torch.empty(1, 1, dtype=torch.int32)
        memory = torch.empty(ALIGNMENT, dtype=torch.uint8)
    arrays = DecodeArrays(wide, wide, narrow, narrow, narrow, wide)
    _find_extents(arrays, memory, narrow)
    _fill_tables(kind, arrays, narrow, has_places)
    return arrays


def compile_programs(arrays: DecodeArrays, warps: int, ragged: bool) -> torch.Tensor:
    """Compile what makes programs; some without numbers."""
    programs = torch.empty_like(arrays.exponents)
    _start_programs(arrays, arrays.columns, programs, warps, ragged)
    return programs


def make_programs(arrays: DecodeArrays, warps: int, ragged: bool, count: int) -> torch.Tensor:
    """What the `count` programs of a launch decode, int32 [programs, 3]: see `DecodeLaunch`."""
    programs = torch.empty(count, 3, dtype=torch.int32, device=arrays.columns.device)
    starts = arrays.columns[(STARTS_AT + ragged) * ENTRIES :]
    _start_programs(arrays, starts, programs, warps, ragged)
    return programs


def _start_programs(
    arrays: DecodeArrays, starts: torch.Tensor, programs: torch.Tensor, warps: int, ragged: bool
) -> None:
    launch(
        _programs_kernel, (-(-len(programs) // 128),),
        arrays.columns, starts, programs, len(programs),
        WARPS=warps, RAGGED=ragged, FIRST_BLOCK=FIRST_BLOCK, FULL=FULL, TILE=128, ENTRIES=ENTRIES,
        device=programs.device,
    )  # fmt: skip


def _columns(tensors: Sequence[CodedTensor], base: int, numbers: Sequence[int], shares: Ints) -> Ints:
    n = len(tensors)
    columns = np.zeros((STARTS_AT + 2, ENTRIES), np.int64)
    columns[list(_EXTENT), :n] = extents_of(tensors).T
    columns[[WORDS_AT, INDEX_AT], :n] -= base
    columns[NUMBER, :n] = numbers
    columns[FIRST_BLOCK] = np.cumsum(columns[BLOCKS]) - columns[BLOCKS]
    ends = np.cumsum(shares, 1)
    columns[STARTS_AT:, 1 : 1 + n], columns[STARTS_AT:, 1 + n :] = ends, ends[:, -1:]
    return columns


def _find_extents(arrays: DecodeArrays, inp: torch.Tensor, errors: torch.Tensor) -> None:
    launch(
        extents_kernel, (len(arrays.descriptors),),
        inp, arrays.columns, arrays.starts, arrays.counts, arrays.descriptors, errors,
        WORDS_AT=WORDS_AT, NBYTES=NBYTES, INDEX_AT=INDEX_AT, NUMBER=NUMBER, BLOCKS=BLOCKS,
        FIRST_BLOCK=FIRST_BLOCK, COLUMNS=COLUMNS, WORDS_END=WORDS_END, ALIGNMENT=ALIGNMENT, TILE=TILE,
        ENTRIES=ENTRIES, num_warps=8, device=inp.device,
    )  # fmt: skip


def _fill_tables(kind: Kind, arrays: DecodeArrays, symbols: torch.Tensor, has_places: bool) -> None:
    # Codes are not shifted, and the second of a pair stands in the upper half.
    shift, stride = (0, 16) if kind.grid else exponent_layout(kind.fmt)
    launch(
        tables_kernel, (len(arrays.descriptors), SCALE // 1024),
        symbols, arrays.tables, arrays.exponents,
        HAS_PLACES=has_places, GROUP=kind.group, SHIFT=shift, STRIDE=stride, SCALE=SCALE, TILE=1024,
        device=arrays.tables.device,
    )  # fmt: skip


def exponent_layout(fmt: FloatFormat) -> tuple[int, int]:
    """By how much the exponents of two neighbours are shifted: within a word if two weights share one."""
    return (fmt.mantissa_bits, fmt.bits) if fmt.bits <= 16 else (0, fmt.bits // 4)


@triton.jit
def extents_kernel(
    inp, columns_ptr, starts_ptr, counts_ptr, descriptors_ptr, errors_ptr,
    WORDS_AT: tl.constexpr, NBYTES: tl.constexpr, INDEX_AT: tl.constexpr, NUMBER: tl.constexpr,
    BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, WORDS_END: tl.constexpr,
    ALIGNMENT: tl.constexpr, TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Where the blocks of a tensor start, and how many words they have, from its index."""
    row = tl.program_id(0)
    columns_ptr += row
    first, nbytes = tl.load(columns_ptr + WORDS_AT * ENTRIES), tl.load(columns_ptr + NBYTES * ENTRIES)
    blocks = tl.load(columns_ptr + BLOCKS * ENTRIES)
    before = tl.load(columns_ptr + FIRST_BLOCK * ENTRIES)
    index_ptr = (inp + tl.load(columns_ptr + INDEX_AT * ENTRIES)).to(tl.pointer_type(tl.int16))
    start = first
    for at in range(0, blocks, TILE):
        offs = at + tl.arange(0, TILE)
        mask = offs < blocks
        count = tl.load(index_ptr + offs, mask=mask, other=0).to(tl.int32) & 0xFFFF
        tl.store(counts_ptr + before + offs, count, mask=mask)
        # Lengths of a tile add up in 32 bits.
        tl.store(starts_ptr + before + offs, start + 2 * (tl.cumsum(count, 0) - count), mask=mask)
        start += 2 * tl.sum(count)
    unused = nbytes - (start - first)
    tl.store(descriptors_ptr + row * COLUMNS + WORDS_END, first + nbytes)
    number = tl.load(columns_ptr + NUMBER * ENTRIES)
    tl.atomic_or(errors_ptr + number, ((unused < 0) | (unused >= ALIGNMENT)).to(tl.int32))


@triton.jit
def tables_kernel(
    symbols_ptr, tables_ptr, exponents_ptr,
    HAS_PLACES: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr,
    SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fill a tile of the SCALE slots of a tensor, and the exponents of its 256 symbols.

    symbols: int32 [tensors, 3, 256], frequencies, starts and palettes. A slot is the first of these, and with
    HAS_PLACES the second, as streamed blocks and pairs of codes take it:

        symbol | frequency << 8 | offset << 20
        first place in the palette | frequency << 4 | second place << 16 | offset << 20

    Exponents are shifted to where they stand in a weight or a pair.
    """
    row = tl.program_id(0)
    symbols_ptr += row * 768
    palette_ptr = symbols_ptr + 512
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    # The last symbol that starts at the slot or before: those that never occur start where the next one does.
    symbol = tl.zeros([TILE], tl.int32)
    for i in tl.static_range(8):
        later = symbol + (128 >> i)
        symbol = tl.where(tl.load(symbols_ptr + 256 + later) <= slot, later, symbol)
    frequency = tl.load(symbols_ptr + symbol)
    offset = slot - tl.load(symbols_ptr + 256 + symbol)
    if HAS_PLACES:
        entry = (symbol & 15) | (frequency << 4) | ((symbol >> 4) << 16)
    else:
        entry = symbol | (frequency << 8)
    tl.store(tables_ptr + row * SCALE + slot, entry | (offset << 20))
    if tl.program_id(1) == 0:
        s = tl.arange(0, 256)
        if GROUP == 1:
            exponent = tl.load(palette_ptr + s) << SHIFT
        else:
            first, second = tl.load(palette_ptr + (s & 15)), tl.load(palette_ptr + (s >> 4))
            exponent = (first << SHIFT) | (second << (SHIFT + STRIDE))
        tl.store(exponents_ptr + row * 256 + s, exponent)


@triton.jit(do_not_specialize=["n"])
def _programs_kernel(
    columns_ptr, starts_ptr, programs_ptr, n,
    WARPS: tl.constexpr, RAGGED: tl.constexpr, FIRST_BLOCK: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """For each program of a launch: its tensor, its first block, and the number of that among all blocks."""
    program = tl.program_id(0) * TILE + tl.arange(0, TILE)
    starts = tl.load(starts_ptr + tl.arange(0, ENTRIES))
    row = tl.sum((starts[None, :] <= program[:, None]).to(tl.int32), 1) - 1
    mask = program < n
    if RAGGED:
        first = tl.load(columns_ptr + FULL * ENTRIES + row, mask=mask, other=0).to(tl.int32)
    else:
        first = (program - tl.load(starts_ptr + row, mask=mask, other=0).to(tl.int32)) * WARPS
    before = tl.load(columns_ptr + FIRST_BLOCK * ENTRIES + row, mask=mask, other=0).to(tl.int32)
    tl.store(programs_ptr + 3 * program, row, mask=mask)
    tl.store(programs_ptr + 3 * program + 1, first, mask=mask)
    tl.store(programs_ptr + 3 * program + 2, before + first, mask=mask)
