"""Routing in Triton: a stable counting sort of pairs by expert, and x copied to the rows in that order.

Every program has some pairs, and some columns of their rows. It counts the pairs of each expert, all of them
and those before its own, by which it knows the rows of its own pairs, writes what is to be known of them, and
copies their rows of x. With few pairs every program counts all ids. With many a launch before this one has
counted them in chunks.

A tile's entry is written by the program that has the first pair of the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.launch import launch
from neuzip.kernels.experts.routing import Routing, most_tiles
from neuzip.kernels.tuning import launch_for

FEW, CHUNK = 64, 1024
"""Pairs that a program counts at a time, where there are no more than that, and else."""


def route(index: Tensor, x: Tensor, experts: int, tile: int) -> tuple[Routing, Tensor]:
    """The routing of ids [tokens, k], and x [tokens, in] copied to rows [most_tiles * tile, in].

    index is int32 or int64; both are contiguous. One launch, or two.
    """
    pairs, columns, device = index.numel(), x.shape[1], x.device
    most = most_tiles(pairs, experts, tile)
    if (most + 1) * tile >= 1 << 31:
        raise ValueError(f"`index`: {pairs} pairs of a token and an expert are too many for one call")
    position = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(most, 4, dtype=torch.int32, device=device)
    rows = torch.empty(most * tile, columns, dtype=x.dtype, device=device)
    routing = Routing(tile, position, tiles, torch.empty(1, dtype=torch.int32, device=device))
    if pairs == 0:
        routing.count.zero_()
        return routing, rows
    config = launch_for("experts.route", device, pairs=pairs)
    bins = max(32, triton.next_power_of_2(experts))
    counts = None
    if config["counted"]:
        chunks = triton.cdiv(pairs, CHUNK)
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
        launch(
            _count, (chunks,), counts, index, pairs, experts, BINS=bins, CHUNK=CHUNK, num_warps=4, pdl=True,
            device=device,
        )  # fmt: skip
    together, wide = config["rows"], min(triton.next_power_of_2(max(1, columns)), config["columns"])
    own = max(together, min(CHUNK, triton.next_power_of_2(triton.cdiv(pairs, config["programs"]))))
    launch(
        _place, (triton.cdiv(pairs, own), max(1, triton.cdiv(columns, wide))),
        position, tiles, routing.count, rows, index, x, counts, pairs, index.shape[1], experts, columns, own,
        ROWS=together, COLUMNS=wide, BINS=bins, TILE=tile,
        CHUNK=FEW if counts is None and pairs <= FEW else CHUNK,
        num_warps=config["num_warps"], pdl=True, device=device,
    )  # fmt: skip
    return routing, rows


@triton.jit
def _load_ids(index, p, stop, experts):
    """Ids of pairs p below `stop`, and which of them name an expert."""
    ids = tl.load(index + p, mask=p < stop, other=-1)
    valid = (ids >= 0) & (ids < experts)
    return tl.where(valid, ids, 0).to(tl.int32), valid


@triton.jit(do_not_specialize=["pairs", "experts"])
def _count(counts, index, pairs, experts, BINS: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr):
    """The pairs of each expert in a chunk."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    ids, valid = _load_ids(index, chunk * CHUNK + tl.arange(0, CHUNK), pairs, experts)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS, valid))


@triton.jit
def _all_and_before(index, counts, begin, pairs, experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """The pairs of each expert, and those of them before pair `begin`."""
    every = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    p = tl.arange(0, CHUNK)
    if counts is None:
        for first in range(0, pairs, CHUNK):
            ids, valid = _load_ids(index, first + p, pairs, experts)
            every += tl.histogram(ids, BINS, valid)
            before += tl.histogram(ids, BINS, valid & (first + p < begin))
    else:
        TOGETHER: tl.constexpr = 16
        own = begin // CHUNK
        chunks = tl.cdiv(pairs, CHUNK)
        for first in range(0, chunks, TOGETHER):
            chunk = first + tl.arange(0, TOGETHER)[:, None]
            here = counts + chunk * BINS + tl.arange(0, BINS)[None, :]
            loaded = tl.load(here, mask=chunk < chunks, other=0)
            every += tl.sum(loaded, 0)
            before += tl.sum(tl.where(chunk < own, loaded, 0), 0)
        ids, valid = _load_ids(index, own * CHUNK + p, begin, experts)
        before += tl.histogram(ids, BINS, valid)
    return every, before


@triton.jit
def _of_each(numbers, chosen):
    """The number of the expert of each pair: numbers [BINS], chosen [ROWS, BINS]."""
    return tl.sum(tl.where(chosen, numbers[None, :], 0), 1)


@triton.jit(do_not_specialize=["pairs", "k", "experts", "own"])
def _place(
    position, tiles, count, rows, index, x, counts, pairs, k, experts, columns, own,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Where `own` pairs go, ROWS of them at a time, and COLUMNS columns of their rows."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    begin, is_first = tl.program_id(0) * own, tl.program_id(1) == 0
    i, bins = tl.arange(0, ROWS), tl.arange(0, BINS)
    c = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    token = ((begin + i) // k).to(tl.int64)[:, None]
    # Of x it is known where it lies before it is known where it goes.
    held = tl.load(x + token * columns + c, mask=(begin + i < pairs)[:, None] & (c < columns))
    every, before = _all_and_before(index, counts, begin, pairs, experts, BINS, CHUNK)
    tiles_of = (every + (TILE - 1)) // TILE
    first = tl.cumsum(tiles_of) - tiles_of
    if is_first & (begin == 0):
        tl.store(count, tl.sum(tiles_of))
    for p in range(begin, begin + own, ROWS):
        ids, valid = _load_ids(index, p + i, pairs, experts)
        chosen = (ids[:, None] == bins[None, :]) & valid[:, None]
        earlier = (ids[:, None] == ids[None, :]) & valid[None, :] & (i[None, :] < i[:, None])
        rank = _of_each(before, chosen) + tl.sum(earlier.to(tl.int32), 1)
        own_first, own_every = _of_each(first, chosen), _of_each(every, chosen)
        before += tl.sum(chosen.to(tl.int32), 0)
        row = own_first * TILE + rank
        tl.store(position + p + i, tl.where(valid, row, -1), mask=(p + i < pairs) & is_first)
        entry = tiles + (own_first + rank // TILE) * 4
        begins = valid & (rank % TILE == 0) & is_first
        tl.store(entry, ids, mask=begins)
        tl.store(entry + 1, own_first, mask=begins)
        tl.store(entry + 2, (own_every + (TILE - 1)) // TILE, mask=begins)
        tl.store(entry + 3, tl.minimum(own_every - rank, TILE), mask=begins)
        target = rows + row.to(tl.int64)[:, None] * columns + c
        tl.store(target, held, mask=valid[:, None] & (c < columns))
        token = ((p + ROWS + i) // k).to(tl.int64)[:, None]
        coming = (p + ROWS < begin + own) & (p + ROWS + i < pairs)
        held = tl.load(x + token * columns + c, mask=coming[:, None] & (c < columns))
