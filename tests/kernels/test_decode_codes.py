"""The GPU decoder of weights on a grid: the CPU's values to the bit, and no step outside its arrays.

With a CUDA device it runs there. Without one Triton's interpreter runs the same kernels, on smaller tensors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from grid_codes import CodedSample, bits_of, code_grid, gaussian_codes, grid_of, table_of

from neuzip.kernels import rans
from neuzip.kernels.grid import Grid
from neuzip.kernels.rans.chosen import coded_items
from neuzip.kernels.rans.coded import (
    COLUMN_FACTORS,
    CROSSING_ROWS,
    ON_GRID,
    PATTERNS,
    CodedGrid,
)
from neuzip.kernels.rans.model import Table
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.kernels.rans.products import can_multiply
from neuzip.kernels.rans.triton import decode as triton_decode
from neuzip.kernels.rans.triton import stream_codes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64


def sample(
    shape: tuple[int, ...], deviation: float = 1.5, dtype: str = "BF16", rows: bool = True,
    columns: bool = False,
) -> CodedSample:  # fmt: skip
    """Codes of a normal distribution; with a deviation of 1.5 pairs of them are coded, of 4 one by one.

    Some are far away, and no table knows them.
    """
    codes = gaussian_codes(int(np.prod(shape)), deviation)
    rng = np.random.default_rng(1)
    where = rng.integers(0, codes.size, min(codes.size // 50, 3))
    far = codes.copy()
    far[where] = (
        rng.choice([-100, 100, 90, -77], where.size) if deviation < 3 else [-900, 899, 500][: where.size]
    )
    table = table_of(codes + (1 << (bits_of(far) - 1)), bits_of(far))
    grid = grid_of(shape, 0.0173, rows, columns, DEVICE)
    return code_grid(far.reshape(shape), grid, dtype, DEVICE, table)


def check(one: CodedSample, poison: int = 0xFF, warps: int | None = None) -> None:
    """Decode into poisoned memory: the values, and nothing around them changed."""
    nbytes = one.patterns.nbytes
    room = torch.full((nbytes + 2 * GUARD,), poison, dtype=torch.uint8, device=DEVICE)
    start = GUARD + -(room.data_ptr() + GUARD) % 16
    out = room[start : start + nbytes].view(one.patterns.dtype)
    plan = triton_decode.prepare([one.coded], [out], warps)
    plan.launch()
    assert plan.errors.tolist() == [0]
    assert torch.equal(out.cpu(), one.patterns)
    out.view(torch.uint8).fill_(poison)
    assert (room == poison).all()


@pytest.mark.parametrize("poison", [0x00, 0xFF])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_formats_and_groups(dtype: str, group: int, poison: int) -> None:
    """Two full blocks and a shorter one, in rows that end anywhere in a block."""
    one = sample((37, 904), {1: 5.0, 2: 1.5}[group], dtype)
    assert (one.coded.table.group, one.coded.kind.grid) == (group, ON_GRID)
    assert triton_decode.streams_codes(one.coded.kind)
    check(one, poison)


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "grid"),
    [
        ((3, 8), True, True, ON_GRID | COLUMN_FACTORS),
        ((700,), False, True, ON_GRID | COLUMN_FACTORS | CROSSING_ROWS),
        ((97, 3), True, True, ON_GRID | COLUMN_FACTORS | CROSSING_ROWS),
        ((300, 1), True, False, ON_GRID | CROSSING_ROWS),
        ((1,), False, False, ON_GRID | CROSSING_ROWS),
        ((2, 5, 24), True, True, ON_GRID | COLUMN_FACTORS),
        ((2, 8264), False, False, ON_GRID),
        ((2, 8264), True, True, ON_GRID | COLUMN_FACTORS),
        ((2060, 8), True, True, ON_GRID | COLUMN_FACTORS),
    ],
)
def test_rows_and_columns(shape: tuple[int, ...], rows: bool, columns: bool, grid: int) -> None:
    one = sample(shape, 3.0, rows=rows, columns=columns)
    assert one.coded.kind.grid == grid
    check(one)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 255, 257, 2049, BLOCK - 8])
def test_ragged_sizes(numel: int) -> None:
    check(sample((1, numel), 3.0, columns=numel % 8 == 0))


@pytest.mark.parametrize(
    ("choice", "group"),
    [
        ([0], 2),
        ([-1, 0], 2),
        ([-9, 5, 6], 2),
        ([-60, 0, 195], 1),
        ([-600, 0, 9], 1),
        ([-32768, 32767], 1),
        ([20000, 20100, 20255], 1),
    ],
)
def test_tables_of_codes_that_lie_apart(choice: list[int], group: int) -> None:
    codes = np.random.default_rng(0).choice(choice, (9, 72))
    if group == 1 and max(map(abs, choice)) < 128:  # a rare code makes more than 8 bits of them
        codes[0, 0] = 130
    one = code_grid(codes, grid_of(codes.shape, 0.01, True, False, DEVICE), "BF16", DEVICE)
    assert one.coded.table.group == group
    check(one)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("low", [1, 2, 4, 8])
def test_low_bits_beside_the_coded_ones(low: int, columns: bool) -> None:
    """Full blocks and a shorter one, with escapes, whose low bits are raw as well."""
    for deviation, width in ((1.3, 904), (5.0, 33)):
        codes = gaussian_codes(37 * width, deviation * 2**low)
        upper = codes >> low
        code_bits = bits_of(upper) + 1
        table = table_of(upper + (1 << (code_bits - 1)), code_bits)
        half = 1 << (code_bits + low - 1)
        codes[[3, 700, -1]] = half - 1, -half, half - 2
        assert bits_of(codes >> low) == code_bits
        grid = grid_of((37, width), 0.0173, True, columns, DEVICE)
        one = code_grid(codes.reshape(37, width), grid, "BF16", DEVICE, table, low)
        assert one.coded.kept_bits == low and one.coded.table.group == (2 if deviation < 3 else 1)
        assert int(one.coded.words[0]) > 0
        check(one)


def test_escapes_of_all_codes() -> None:
    """A table that knows two codes: every other is an escape, and has its own step."""
    codes = np.arange(-300, 300).reshape(25, 24)
    table = table_of(np.full(600, 512), 10)
    for columns in (False, True):
        grid = grid_of(codes.shape, 3.1e-3, True, columns, DEVICE)
        one = code_grid(codes, grid, "BF16", DEVICE, table)
        assert int(one.coded.words[0]) == 598
        check(one)


def test_values_are_rounded_as_the_cpu_rounds() -> None:
    """Products down to denormals and up to the largest numbers, halves, and a zero without a sign."""
    codes = np.tile(np.arange(-32, 32), (256, 1))
    for step, dtype in ((2.0**-126, "BF16"), (2.0**-126, "F32"), (1e34, "BF16"), (3e-8, "F16")):
        rows = torch.arange(256).flip(0).clamp(max=0xA0).to(torch.uint8)
        one = code_grid(codes, Grid(step, rows).to(DEVICE), dtype, DEVICE)
        assert not one.patterns.view(256, 64)[:, 32].any()
        check(one)


@pytest.mark.parametrize(("group", "low"), [(1, 0), (2, 0), (2, 4)])
def test_chunks_of_a_tensor_that_stays(group: int, low: int) -> None:
    """Ranges of rows decoded by themselves, after the memory has moved."""
    one = sample((50, 400), {1: 4.0, 2: 1.2}[group], columns=True)
    if low:
        codes, grid = (
            gaussian_codes(20000, 30.0).reshape(50, 400),
            grid_of((50, 400), 0.01, True, True, DEVICE),
        )
        one = code_grid(codes, grid, "BF16", DEVICE, low_bits=low)
    bounds = (0, 400 * 3, 400 * 44, 20000)
    resident = ResidentTensor.of(one.coded, bounds)
    resident = resident.on(resident.memory.clone())
    for number in range(3):
        out, errors = resident.decode(number)
        assert errors.tolist() == [0]
        assert torch.equal(out.cpu(), one.patterns[bounds[number] : bounds[number + 1]])
    room = torch.full((resident.capacity(1),), 0xFF, dtype=torch.uint8, device=DEVICE)
    assert torch.equal(resident.decode_into(room, 1).cpu(), one.patterns[bounds[1] : bounds[2]])


def test_blocks_that_begin_within_a_tensor() -> None:
    """The second block of a tensor, given alone, knows its rows and columns."""
    one = sample((31, 600), 4.0, columns=True)
    coded = one.coded
    assert coded.grid is not None
    taken = int(coded.index[0]) & 0xFFFF
    second = replace(
        coded, numel=18600 - BLOCK, index=coded.index[1:], words=coded.words[taken:].clone(),
        grid=replace(coded.grid, begin=BLOCK),
    )  # fmt: skip
    check(CodedSample(second, one.patterns[BLOCK:]))


def test_tensors_share_a_launch() -> None:
    """Of one kind, with other steps, rows and tables; a corrupt one is named, and others are right."""
    samples = [sample((n, 32), 3.0 + n / 9, rows=n % 2 == 0) for n in (9, 12, 14, 15)]
    assert len({one.coded.kind for one in samples}) == 1
    samples[1].coded.words[70] ^= 0x40
    outs = [torch.empty_like(one.patterns, device=DEVICE) for one in samples]
    errors = triton_decode.decode([one.coded for one in samples], outs)
    assert [bool(e) for e in errors.tolist()] == [False, True, False, False]
    for number in (0, 2, 3):
        assert torch.equal(outs[number].cpu(), samples[number].patterns)


def test_codes_of_too_many_bits_are_reported() -> None:
    codes = np.arange(-300, 300).reshape(25, 24)
    one = code_grid(codes, Grid(0.1).to(DEVICE), "BF16", DEVICE, table_of(np.full(600, 512), 10))
    coded = replace(one.coded, grid=CodedGrid(Grid(0.1), 24, 9))
    assert triton_decode.decode([coded], [torch.empty_like(one.patterns, device=DEVICE)]).tolist() != [0]


def test_grids_that_do_not_fit_are_refused() -> None:
    coded = sample((9, 24), 3.0, columns=True).coded
    assert coded.grid is not None
    grid = coded.grid.grid
    assert grid.rows is not None and grid.columns is not None
    for change in (
        {"rows": grid.rows[1:]},
        {"rows": grid.rows.int()},
        {"columns": grid.columns[:-1]},
        {"columns": torch.cat([grid.columns, grid.columns])[1:]},
    ):
        with pytest.raises(rans.CorruptStream, match="factors"):
            replace(coded, grid=replace(coded.grid, grid=replace(grid, **change)))
    with pytest.raises(rans.CorruptStream, match="codes of 17 bits"):
        CodedGrid(Grid(0.1), 24, 17)
    with pytest.raises(rans.CorruptStream, match="rows of 0 weights"):
        CodedGrid(Grid(0.1), 0, 4)
    with pytest.raises(rans.CorruptStream, match="weights of F64 on a grid"):
        replace(coded, fmt=rans_format("F64"))


def rans_format(name: str) -> object:
    from neuzip.kernels.float_fields import FORMATS

    return FORMATS[name]


def test_a_table_whose_codes_do_not_follow_each_other_is_refused() -> None:
    frequencies = np.zeros(256, np.uint16)
    frequencies[[0, 1, 7]] = [2000, 2000, 96]
    coded = sample((9, 24), 3.0).coded
    for table in (
        Table(1, np.array([3, 4], np.uint16), frequencies),  # a symbol without meaning
        Table(1, np.array([0, 1, 2, 3, 4, 5, 6, 8], np.uint16), frequencies),
        Table(2, np.array([0, 1, 2, 3, 4, 5, 6, 8], np.uint16), frequencies),
    ):
        with pytest.raises(rans.CorruptStream, match="do not follow each other"):
            replace(coded, table=table)


def test_words_are_there_when_they_are_needed() -> None:
    """The order of copies and waits in `stream_codes`, whatever the runs take: see the test of floats."""
    from neuzip.kernels.rans.triton import ring

    rng = np.random.default_rng(0)
    for most in (256, 256, 90, 1):
        for p in (65, 72):
            groups: list[list[int]] = [list(range(ring.PIECES))]
            groups += [[] for _ in range(stream_codes.AHEAD - 1)]
            taken = [256] * 63 if most == 256 else rng.integers(0, most + 1, 63).tolist()
            for words in [*taken, 0]:
                there = [n for group in groups[: len(groups) - (stream_codes.AHEAD - 1)] for n in group]
                begun = [n for group in groups for n in group]
                begins = [len(begun)] if p >= (len(begun) - (ring.PIECES - 1)) * ring.PIECE else []
                groups.append(begins)
                for piece in {p // ring.PIECE, (p + 255) // ring.PIECE}:
                    assert piece in there
                    same_place = [n for n in begun + begins if n % ring.PIECES == piece % ring.PIECES]
                    assert piece == max(same_place)
                p += words


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [None, 1, 4])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("deviation", [0.6, 1.5, 4.0, 12.0, 60.0])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_real_shapes(dtype: str, deviation: float, columns: bool, warps: int | None) -> None:
    check(sample((2048 + 3, 5632), deviation, dtype, columns=columns), warps=warps)


@pytest.mark.gpu
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_than_two_to_the_31_weights() -> None:
    """Positions, rows and columns have 64 bits. The same block over and over: rows of it have own factors."""
    columns, blocks = 8192, (1 << 31) // BLOCK + 3
    codes = gaussian_codes(BLOCK, 4.0).reshape(2, columns)
    one = code_grid(codes, Grid(0.01, torch.full((2,), 0x80, dtype=torch.uint8)).to(DEVICE), "BF16", DEVICE)
    rows = torch.arange(2 * blocks, device=DEVICE).remainder(7).to(torch.uint8) + 0x7C
    coded = replace(
        one.coded, numel=blocks * BLOCK, index=one.coded.index.repeat(blocks),
        words=one.coded.words.repeat(blocks), grid=replace(one.coded.grid, grid=Grid(0.01, rows)),
    )  # fmt: skip
    out = torch.full((coded.numel,), -1, dtype=PATTERNS[16], device=DEVICE)
    assert triton_decode.decode([coded], [out]).tolist() == [0]
    on_device = torch.from_numpy(codes.astype(np.int16)).to(DEVICE)
    for first in (0, 2 * blocks - 2):
        values = Grid(0.01, rows[first : first + 2]).values(on_device, torch.bfloat16)
        assert torch.equal(out.view(-1, columns)[first : first + 2], values.view(torch.int16))


def test_items_are_chosen_and_may_be_in_host_memory() -> None:
    """Matrices of two experts, coded together: of a list, into slots, from the device or from the host."""
    one = sample((2, 12, 40), 3.0, columns=True)
    resident = ResidentTensor.of(one.coded, (0, 480, 960))
    for there in (resident, resident.offloaded()):
        items = coded_items([[[(there, 0)], [(there, 1)]]])
        out = torch.full((2 * items.slot_bytes,), 0xA5, dtype=torch.uint8, device=DEVICE)
        items.decode(torch.tensor([1, 0], dtype=torch.int32, device=DEVICE), 0, out)
        for slot, item in enumerate((1, 0)):
            first = slot * items.slot_bytes + items.regions[0].start
            values = out[first : first + 960].view(torch.int16).cpu()
            assert torch.equal(values, one.patterns[item * 480 : (item + 1) * 480])
    assert not can_multiply([[(resident, 0)], [(resident, 1)]], 40)
