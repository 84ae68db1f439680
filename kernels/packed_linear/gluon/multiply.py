"""The kernel of products of many rows with packed weights, on Hopper, in Gluon.

    word loader, 1 warp     words of 128 rows of the weights, 128 columns (a turn) --> shared memory
    x loader, 1 warp        x [ROWS, 64 columns] --> shared memory
    2 warp groups           words of 64 rows --> registers, unpacked --> warp-group instructions with x
                            [64, ROWS] sums --> shared memory --> y

A group unpacks the next 64 columns while those before are multiplied, and the other group does so beside it.
No dense weight is ever in memory.

A block of y has 128 columns and ROWS rows. A program has whole blocks, and part of the turns of blocks that
are cut. Who has the first turn of a cut block adds the sums of the others to its own, in the order of their
turns, and writes y. The others do not wait, and have lower numbers: see `device.counters`.

What is prefetched early enough costs nothing. Words come by way of shared memory, as loads to registers share
a few counters, on which whatever is used first waits for all. Far words and escapes are loaded two turns
ahead, where their records say, which are loaded one more turn before.

The compiler has to be held back in two places. Waiting is a branch, which nothing is moved across: it stands
where products are to be issued before anything is unpacked. And registers of a product in flight must not be
written: the last step of unpacking is made when the products before have ended.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from neuzip.kernels.device.barriers import arrive, await_, barriers, thread_barrier
from neuzip.kernels.packed_linear.gluon.unpack import (
    HIGH_PLANES_BF16,
    HIGH_PLANES_F16,
    THREADS,
    half_bytes,
    half_weights,
    load_escape,
    load_far,
)

_WORD_BYTES = gl.constexpr(8 * 64 * 4)  # of a turn and a plane


@gluon.jit
def _share(sharing):
    """What a program has of all blocks: whole ones first, and then a part of the blocks that are cut.

    Its rank, how many whole blocks it has, its first turn of the cut blocks and the one after its last, and
    how many segments that makes with the whole blocks.
    """
    _, _, blocks, cut, cutters, turns = sharing
    programs = gl.num_programs(0)
    rank = programs - 1 - gl.program_id(0)  # others' sums come from programs with a lower number
    whole = (blocks - cut + programs - 1 - rank) // programs
    begin = gl.minimum(rank, cutters) * (cut * turns) // gl.maximum(cutters, 1)
    end = gl.minimum(rank + 1, cutters) * (cut * turns) // gl.maximum(cutters, 1)
    return rank, whole, begin, end, whole + (end + turns - 1) // turns - begin // turns


@gluon.jit
def _segment(number, share, sharing):
    """A block, the first turn that a program has there, and the one after the last."""
    rank, whole, begin, end, _ = share
    _, _, blocks, cut, _, turns = sharing
    block = number * gl.num_programs(0) + rank
    first = begin * 0
    stop = turns
    if number >= whole:
        cut_block = begin // turns + number - whole
        first = gl.maximum(begin - cut_block * turns, 0)
        stop = gl.minimum(end - cut_block * turns, turns)
        block = blocks - cut + cut_block
    return block, first, stop


@gluon.jit
def _place(block, blocks, grouping, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Where a block is: its first tile of the weights, its first column of y, its first row of x and y."""
    rounds, table, expert_tiles, tile_blocks = grouping
    COLUMNS: gl.constexpr = 64 if GATED else 128
    if table is None:
        n = block // rounds
        m = block % rounds
        tile = n * (COLUMNS // 16)
    else:
        entry = table + 4 * (gl.maximum(gl.minimum(block, blocks - 1), 0) // tile_blocks)
        first = gl.load(entry + 1)
        expert_rounds = gl.maximum(gl.load(entry + 2), 1)  # no tile may be in use
        own = block - first * tile_blocks
        n = own // expert_rounds
        m = first + own % expert_rounds
        tile = gl.load(entry) * expert_tiles + n * (COLUMNS // 16)
    return tile, n * COLUMNS, m * ROWS


@gluon.jit
def _first_tile(tile, grouping, GROUP: gl.constexpr, GATED: gl.constexpr):
    """The first tile of a group: behind those of the other, or gates behind none and ups behind all gates."""
    if GATED:
        return tile + GROUP * (grouping[2] // 2)
    else:
        return tile + GROUP * 4


@gluon.jit
def _cut_of(used, tile_blocks, turns, split):
    """Blocks of the tiles in use, how many are cut, and how many programs share these.

    What no wave of all programs fills is cut into `split` parts a block at most; not with a split of 1. The
    compiler does not know it: with constants here it would have each product waited for.
    """
    blocks = gl.load(used) * tile_blocks
    cut = gl.where(split > 1, blocks % gl.num_programs(0), 0)
    return blocks, cut, gl.minimum(gl.num_programs(0), cut * gl.minimum(turns, split))


@gluon.jit
def _cutter(turn, sharing):
    """The rank of the program that has a turn of the cut blocks."""
    _, _, _, cut, cutters, turns = sharing
    return ((turn + 1) * cutters - 1) // (cut * turns)


@gluon.jit
def _by_thread(sums, ROWS: gl.constexpr):
    """Sums [64, ROWS] as [128, ROWS / 2]: a row is what a thread has. Nothing moves."""
    OF_THREADS: gl.constexpr = gl.BlockedLayout([1, ROWS // 2], [32, 1], [4, 1], [1, 0])
    # warp, half of a tile, r, eight rows of x, q, of a pair
    parts = gl.permute(gl.reshape(sums, [4, 2, 8, ROWS // 8, 4, 2]), (0, 2, 4, 3, 1, 5))
    return gl.convert_layout(gl.reshape(parts, [128, ROWS // 2]), OF_THREADS, assert_trivial=True)


@gluon.jit
def _by_row(sums, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """The inverse of `_by_thread`."""
    parts = gl.permute(gl.reshape(sums, [4, 8, 4, ROWS // 8, 2, 2]), (0, 4, 1, 3, 2, 5))
    return gl.convert_layout(gl.reshape(parts, [64, ROWS]), SUMS, assert_trivial=True)


@gluon.jit
def _places(parts, ROWS: gl.constexpr):
    """Where a thread's sums go: [128, ROWS / 2], four numbers of each thread beside each other."""
    OF_THREADS: gl.constexpr = gl.BlockedLayout([1, ROWS // 2], [32, 1], [4, 1], [1, 0])
    t = gl.arange(0, 128, layout=gl.SliceLayout(1, OF_THREADS))
    k = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(0, OF_THREADS))
    own = (parts + 4 * t)[:, None]
    return own + (k // 4 * 512 + k % 4)[None, :]  # constants last: they need no registers


@gluon.jit
def _add_others(
    sums, sharing, first_turn, rank, t, GROUP: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr
):
    """Add the sums of the programs that have the other turns of a block, in the order of the turns."""
    AT_ONCE: gl.constexpr = 1 if ROWS == 256 else (2 if ROWS == 128 else 4)
    parts, counters, _, _, _, turns = sharing
    places = _places(parts, ROWS)
    last = _cutter(first_turn + turns - 1, sharing)
    own = _by_thread(sums, ROWS)
    await_(counters + (2 * rank + GROUP) + t * 0, last - rank)
    for other in range(rank + 1, last + 1, AT_ONCE):
        loaded = ()
        for i in gl.static_range(AT_ONCE):
            place = gl.minimum(other + i, last)
            loaded += (gl.load(places + (2 * place + GROUP) * (64 * ROWS), cache_modifier=".cg"),)
        for i in gl.static_range(AT_ONCE):
            own += loaded[i] if i == 0 else gl.where(other + i <= last, loaded[i], 0.0)
    return _by_row(own, ROWS, SUMS)


@gluon.jit
def _write(sums, y, outs, row, column, GROUP: gl.constexpr):
    """Sums [64, rows] to y, by way of shared memory."""
    tma.store_wait(0)
    outs.index(GROUP).store(gl.permute(sums.to(y.dtype), (1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [row, column], outs.index(GROUP))


@gluon.jit
def _write_gated(sums, y, outs, up_there, up_free, number, row, column, GROUP: gl.constexpr):
    """silu(gate) * up to y: the second group has up, which it leaves in shared memory to the first.

    Rounded where a model's own code rounds: gate, up, silu(gate), and their product.
    """
    if GROUP == 1:
        mbarrier.wait(up_free.index(0), (number & 1) ^ 1)
        outs.index(1).store(gl.permute(sums.to(y.dtype), (1, 0)))
        thread_barrier()
        mbarrier.arrive(up_there.index(0), count=1)
    else:
        gate = sums.to(y.dtype).to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(y.dtype).to(gl.float32)
        mbarrier.wait(up_there.index(0), number & 1)
        up = outs.index(1).permute((1, 0)).load(sums.type.layout)
        thread_barrier()
        mbarrier.arrive(up_free.index(0), count=1)
        _write(silu * up.to(gl.float32), y, outs, row, column, GROUP)


@gluon.jit
def _records(weights, tile, q, tiles, turns):
    """Where the records of escapes and those of far words of a tile are; of the nearest that there is."""
    far_index, _, turn_index, _ = weights
    tile = gl.maximum(gl.minimum(tile, tiles - 1), 0).to(gl.int64)
    return turn_index + tile * turns, far_index + tile * (2 * turns) + q // 2


@gluon.jit
def _first_loads(weights, records, far_records, begin, stop, bit, lane):
    """Far words and escapes of the first two turns of a segment, and the records of the third."""
    _, far, _, escapes = weights
    last = gl.maximum(stop - 1, begin)  # a program may have no segment
    second, third = gl.minimum(begin + 1, last), gl.minimum(begin + 2, last)
    fars = load_far(far, gl.load(far_records + 2 * begin), bit)
    escape, others = load_escape(escapes, gl.load(records + begin), lane)
    next_fars = load_far(far, gl.load(far_records + 2 * second), bit)
    next_escape, next_others = load_escape(escapes, gl.load(records + second), lane)
    far_record, record = gl.load(far_records + 2 * third), gl.load(records + third)
    return fars, escape, others, next_fars, next_escape, next_others, far_record, record


@gluon.jit
def _sums(
    GROUP: gl.constexpr, shared, weights, records, far_records, coming, begin, stop, turn_number, thread,
    base4, LOW: gl.constexpr, HALF: gl.constexpr, FIRST_HALF: gl.constexpr, OTHER_HALF: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WORD_STAGES: gl.constexpr,
):  # fmt: skip
    """Sums [64, ROWS] of the products of a segment: of the turns begin to stop of a block."""
    P: gl.constexpr = LOW + (HIGH_PLANES_F16 if HALF else HIGH_PLANES_BF16)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    xs, words, _, x_there, x_free, words_there, words_free, started = shared[:8]
    far, escapes = weights[1], weights[3]
    bit, lane = thread
    fars, escape, others, next_fars, next_escape, next_others, far_record, record = coming
    x_number = 2 * turn_number
    stage = turn_number % WORD_STAGES
    mbarrier.wait(words_there.index(stage), (turn_number // WORD_STAGES) & 1)
    lows, highs = half_bytes(
        words, stage * P, fars, escape, others, escapes, lane, base4, P, LOW, HALF, 0, FIRST_HALF, GROUP
    )
    mbarrier.arrive(started.index(0), count=1, pred=turn_number == 0)
    sums = warpgroup_mma_init(gl.zeros([64, ROWS], gl.float32, SUMS))
    mbarrier.wait(x_there.index(x_number % STAGES), (x_number // STAGES) & 1)
    for turn in range(begin, stop):
        first = x_number % STAGES
        factors = half_weights(lows, highs, HALF, SUMS)
        sums = warpgroup_mma(factors, xs.index(first).permute((1, 0)), sums, is_async=True)
        x_number += 1

        # The other half of the turn.
        second = x_number % STAGES
        mbarrier.wait(x_there.index(second), (x_number // STAGES) & 1)
        lows, highs = half_bytes(
            words, stage * P, fars, escape, others, escapes, lane, base4, P, LOW, HALF, 1, OTHER_HALF, GROUP
        )
        mbarrier.arrive(words_free.index(stage), count=1)
        fars, escape, others = next_fars, next_escape, next_others
        next_fars = load_far(far, far_record, bit)
        next_escape, next_others = load_escape(escapes, record, lane)
        later = gl.minimum(turn + 3, stop - 1)
        far_record, record = gl.load(far_records + 2 * later), gl.load(records + later)
        factors = half_weights(lows, highs, HALF, SUMS)
        sums = warpgroup_mma(factors, xs.index(second).permute((1, 0)), sums, is_async=True)
        x_number += 1

        # The first half of the next turn; behind the last one, of whatever is there.
        turn_number += 1
        stage = turn_number % WORD_STAGES
        goes_on = turn + 1 < stop
        mbarrier.wait(x_there.index(x_number % STAGES), (x_number // STAGES) & 1, pred=goes_on)
        mbarrier.wait(words_there.index(stage), (turn_number // WORD_STAGES) & 1, pred=goes_on)
        lows, highs = half_bytes(
            words, stage * P, fars, escape, others, escapes, lane, base4, P, LOW, HALF, 0, FIRST_HALF, GROUP
        )
        sums = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[sums]))
        mbarrier.arrive(x_free.index(first), count=1)
        mbarrier.arrive(x_free.index(second), count=1)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, shared, weights, sharing, bias, y, base, scale, grouping, tiles, N,
    LOW: gl.constexpr, HALF: gl.constexpr, FIRST_HALF: gl.constexpr, OTHER_HALF: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WORD_STAGES: gl.constexpr, GATED: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """64 rows of the weights of every block of a program."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    outs = shared[2]
    turns = sharing[5]
    t = gl.arange(0, 128, layout=THREADS)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    bit = q % 2 * 16 + 2 * r
    base4 = base * 0x01010101
    share = _share(sharing)
    rank, segments = share[0], share[4]
    turn_number = 0
    block, begin, stop = _segment(0, share, sharing)
    place = _place(block, sharing[2], grouping, ROWS, GATED)
    tile = _first_tile(place[0], grouping, GROUP, GATED)
    records, far_records = _records(weights, tile + warp, q, tiles, turns)
    coming = _first_loads(weights, records, far_records, begin, stop, bit, lane)
    pieces_number = 0
    for number in range(segments):
        result = _sums(
            GROUP, shared, weights, records, far_records, coming, begin, stop, turn_number, (bit, lane),
            base4, LOW, HALF, FIRST_HALF, OTHER_HALF, ROWS, STAGES, WORD_STAGES,
        )  # fmt: skip
        turn_number += stop - begin
        next_block, next_begin, next_stop = _segment(gl.minimum(number + 1, segments - 1), share, sharing)
        next_place = _place(next_block, sharing[2], grouping, ROWS, GATED)
        next_tile = _first_tile(next_place[0], grouping, GROUP, GATED)
        records, far_records = _records(weights, next_tile + warp, q, tiles, turns)
        coming = _first_loads(weights, records, far_records, next_begin, next_stop, bit, lane)
        if USE_PDL:
            cuda.gdc_wait()  # what is written now may be read by the kernel ahead
        cut_turn = (block - sharing[2] + sharing[3]) * turns  # the block's first
        if begin > 0:
            gl.store(_places(sharing[0] + (2 * rank + GROUP) * (64 * ROWS), ROWS), _by_thread(result, ROWS))
            arrive(sharing[1] + (2 * _cutter(cut_turn, sharing) + GROUP) + t * 0)
        else:
            if stop < turns:
                result = _add_others(result, sharing, cut_turn, rank, t, GROUP, ROWS, SUMS)
            result *= scale
            place = _place(block, sharing[2], grouping, ROWS, GATED)  # again: registers are short meanwhile
            if bias is not None:
                tile = _first_tile(place[0], grouping, GROUP, GATED)
                at = tile * 16 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
                result += gl.load(bias + at, mask=at < N, other=0.0).to(gl.float32)[:, None]
            if ROWS == 256:
                pieces = gl.split(gl.permute(gl.reshape(result, [64, 2, 128]), (0, 2, 1)))
            else:
                pieces = (result,)
            for i in gl.static_range(len(pieces)):
                if GATED:
                    _write_gated(
                        pieces[i], y, outs, shared[8], shared[9], pieces_number, place[2] + i * 128, place[1],
                        GROUP,
                    )  # fmt: skip
                else:
                    _write(pieces[i], y, outs, place[2] + i * 128, place[1] + GROUP * 64, GROUP)
                pieces_number += 1
        block, begin, stop = next_block, next_begin, next_stop
    tma.store_wait(0)


@gluon.jit
def _load_words(
    shared, words, sharing, grouping, P: gl.constexpr, WORD_STAGES: gl.constexpr,
    FIRST_STAGES: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Words of every turn of a program, as soon as a stage is free, before the kernel ahead has ended.

    After FIRST_STAGES turns it waits until the groups have their first far words: these would come behind all
    the words that are in flight.
    """
    to_words, words_there, words_free, started = shared[1], shared[5], shared[6], shared[7]
    share = _share(sharing)
    turn_number = 0
    for number in range(share[4]):
        block, begin, stop = _segment(number, share, sharing)
        place = _place(block, sharing[2], grouping, ROWS, GATED)
        for turn in range(begin, stop):
            stage = turn_number % WORD_STAGES
            mbarrier.wait(started.index(0), 0, pred=turn_number == FIRST_STAGES)
            mbarrier.wait(words_free.index(stage), ((turn_number // WORD_STAGES) & 1) ^ 1)
            mbarrier.expect(words_there.index(stage), P * _WORD_BYTES)
            for plane in gl.static_range(P):
                to_plane = to_words.index(stage * P + plane)
                if GATED:
                    for group in gl.static_range(2):
                        tma.async_copy_global_to_shared(
                            words, [_first_tile(place[0], grouping, group, GATED), plane, turn * 64],
                            words_there.index(stage), to_plane.slice(4 * group, 4, dim=0),
                        )  # fmt: skip
                else:
                    tma.async_copy_global_to_shared(
                        words, [place[0], plane, turn * 64], words_there.index(stage), to_plane
                    )
            turn_number += 1


@gluon.jit
def _load_x(
    shared, x, sharing, grouping, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """x of every half of a turn, as soon as a stage is free."""
    to_x, x_there, x_free = shared[0], shared[3], shared[4]
    share = _share(sharing)
    if USE_PDL:
        cuda.gdc_wait()
    x_number = 0
    for number in range(share[4]):
        block, begin, stop = _segment(number, share, sharing)
        row = _place(block, sharing[2], grouping, ROWS, GATED)[2]
        for half in range(2 * begin, 2 * stop):
            stage = x_number % STAGES
            mbarrier.wait(x_free.index(stage), ((x_number // STAGES) & 1) ^ 1)
            mbarrier.expect(x_there.index(stage), x.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [row, half * 64], x_there.index(stage), to_x.index(stage))
            x_number += 1


@gluon.jit(
    do_not_specialize=[
        "base", "blocks", "cut", "cutters", "turns", "rounds", "tiles", "N", "expert_tiles", "tile_blocks",
        "split",
    ]
)  # fmt: skip
def many_rows(
    x, y, words, far_index, far, turn_index, escapes, bias, parts, counters, base, scale, blocks, cut,
    cutters, turns, rounds, tiles, N, table, used, expert_tiles, tile_blocks, split,
    LOW: gl.constexpr, HALF: gl.constexpr, FIRST_HALF: gl.constexpr, OTHER_HALF: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WORD_STAGES: gl.constexpr,
    FIRST_STAGES: gl.constexpr, REGISTERS: gl.constexpr, GATED: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """y = x @ weights.T + bias in blocks of ROWS rows and 128 columns of y.

    The last `cut` blocks are shared by `cutters` programs. Every `rounds` blocks share rows of the weights.

    With a `table` of tiles of rows, of which `used` are in use, the weights are those of experts: of
    `expert_tiles` tiles each, and a tile of rows has `tile_blocks` blocks. The kernel ahead may have made the
    table. GATED blocks have 64 columns of silu(gate) * up, of which an expert has the weights of all gates
    first.
    """
    if USE_PDL and table is not None:
        cuda.gdc_wait()
    if USE_PDL:
        cuda.gdc_launch_dependents()
    if used is not None:
        blocks, cut, cutters = _cut_of(used, tile_blocks, turns, split)
    P: gl.constexpr = LOW + (HIGH_PLANES_F16 if HALF else HIGH_PLANES_BF16)
    shared = (
        gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, 64], x.layout),
        gl.allocate_shared_memory(gl.int32, [WORD_STAGES * P, 8, 1, 64], words.layout),
        gl.allocate_shared_memory(y.dtype, [2, min(ROWS, 128), 64], y.layout),
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(WORD_STAGES, 1), barriers(WORD_STAGES, 2),
        barriers(1, 2),
    )  # fmt: skip
    if GATED:  # a barrier that no partition uses may overwrite what is passed to them: inline-ptx.md
        shared += barriers(1, 1), barriers(1, 1)
    fence_async_shared()
    weights = far_index, far, turn_index, escapes
    sharing = parts, counters, blocks, cut, cutters, turns
    grouping = rounds, table, expert_tiles, tile_blocks
    gl.warp_specialize(
        [
            (_multiply, (
                0, shared, weights, sharing, bias, y, base, scale, grouping, tiles, N, LOW, HALF, FIRST_HALF,
                OTHER_HALF, ROWS, STAGES, WORD_STAGES, GATED, USE_PDL,
            )),
            (_multiply, (
                1, shared, weights, sharing, bias, y, base, scale, grouping, tiles, N, LOW, HALF, FIRST_HALF,
                OTHER_HALF, ROWS, STAGES, WORD_STAGES, GATED, USE_PDL,
            )),
            (_load_words, (shared, words, sharing, grouping, P, WORD_STAGES, FIRST_STAGES, ROWS, GATED)),
            (_load_x, (shared, x, sharing, grouping, ROWS, STAGES, GATED, USE_PDL)),
        ],
        [4, 1, 1], [REGISTERS, 24, 24],
    )  # fmt: skip
