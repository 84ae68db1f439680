"""Tables that the encoder's kernel makes of a histogram: those of the CPU, to the last number.

Nothing is coded here. Without a CUDA device Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat, census
from neuzip.kernels.rans.triton import census as triton_census
from neuzip.kernels.rans.triton import device_table
from neuzip.kernels.rans.triton.batch import INTEGERS, Batch, sizes_of
from neuzip.kernels.rans.triton.encoder_table import EncoderTables, HostTables, division_facts, make_tables

BF16 = FORMATS["BF16"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def of_exponents(exponents: object, fmt: FloatFormat = BF16, seed: int = 0) -> Bits:
    """Weights with these exponents, and signs and mantissas at random."""
    chosen = np.asarray(exponents).astype(np.uint64)
    fields = np.random.default_rng(seed).integers(0, 1 << fmt.mantissa_bits, chosen.size, np.uint64)
    sign = np.random.default_rng(seed + 1).integers(0, 2, chosen.size).astype(np.uint64)
    bits = sign << np.uint64(fmt.bits - 1) | chosen << np.uint64(fmt.mantissa_bits) | fields
    return bits.astype(fmt.dtype)


def equal_tables(originals: list[Bits], fmt: FloatFormat = BF16, programs: int = 4) -> list[rans.Table]:
    """Tables of tensors that are counted in one launch, compared with the CPU's; these."""
    tensors = [torch.from_numpy(bits.view(f"i{bits.itemsize}")).to(DEVICE) for bits in originals]
    assert tensors[0].dtype == INTEGERS[fmt.bits]
    sizes = sizes_of(tuple(bits.size for bits in originals), 1, None, triton_census.shares(fmt, 32, programs))
    batch = Batch(tensors, fmt, 1, sizes)
    counted = triton_census.count(batch, 32)
    made = make_tables(batch, counted.counters, counted.elsewhere)
    tables = []
    for row, bits in enumerate(originals):
        counted = census(bits, fmt)
        table = rans.build_table(counted.exponents, counted.pairs)
        own = HostTables(made.tables.cpu().numpy())
        got = own.tables()[row]
        assert own.kept_bits[row] == counted.kept_bits(fmt)
        rans.Table(got.group, got.palette, got.frequencies)  # checks that it obeys the rules
        assert got.group == table.group
        assert got.palette.tolist() == table.palette.tolist()
        assert got.frequencies.tolist() == table.frequencies.tolist()
        assert int(made.tables[row, device_table.FILLER]) == table.filler
        assert compare_keys(made, row, table, fmt) == own.addends[row]
        tables.append(table)
    return tables


def compare_keys(made: EncoderTables, row: int, table: rans.Table, fmt: FloatFormat) -> bool:
    """Symbols, escapes and facts of every key. Whether a symbol has an addend."""
    keys = 1 << 16 if table.group == 2 else 1 << fmt.exponent_bits
    symbols = table.symbols[:keys].astype(np.int64)
    own = made.row(row)
    assert own.symbols.tensor()[:keys].cpu().numpy().astype(np.int64).tolist() == symbols.tolist()
    frequencies = np.zeros(256, np.int64)
    frequencies[: table.frequencies.size] = table.frequencies
    divisions, start = division_facts()[frequencies], np.cumsum(frequencies) - frequencies
    facts = divisions + (start << 51)
    key = np.arange(keys)
    got = own.facts.tensor().cpu().numpy()[key + (key >> 8) * (device_table.ROW - 256)]
    assert np.array_equal(got, facts[symbols & 0xFF] | symbols >> 8 << 45)
    return bool((divisions >> 44 & 1).any())


def repeated(counts: list[int], seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Each number as often as the counts say, in any order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def test_degenerate_histograms() -> None:
    """One weight, one exponent, few, all as frequent, and all there are, in one launch."""
    tables = equal_tables(
        [
            of_exponents([120]),
            of_exponents([0]),
            of_exponents([255, 0]),
            of_exponents([7] * 2001),
            of_exponents(repeated([40] * 16) + 100),
            of_exponents(repeated([40] * 17) + 100),
            of_exponents(repeated([3] * 256)),
            of_exponents(repeated([1] * 256)),
            of_exponents([1, 2] * 600),
        ]
    )
    assert [table.group for table in tables] == [1, 1, 2, 2, 2, 1, 1, 1, 2]
    assert [table.palette.size for table in tables] == [1, 1, 2, 1, 16, 17, 256, 256, 2]
    assert tables[0].frequencies.tolist() == [4095, 1]
    assert tables[6].frequencies.tolist() == [16] * 256


def test_rare_symbols_take_from_the_frequent() -> None:
    """Each has a frequency of 1 although its share is less; with ties among those that give."""
    singles = repeated([1] * 200 + [4000, 4000, 2000, 31])
    pairs = np.full(30_000, 99)
    where = np.random.default_rng(0).permutation(15_000)[:180]
    pairs[2 * where], pairs[2 * where + 1] = np.arange(180) % 13 + 90, np.arange(180) // 13 + 90
    tables = equal_tables([of_exponents(singles), of_exponents(pairs)])
    for table, group in zip(tables, (1, 2), strict=True):
        assert table.group == group
        assert int((table.frequencies == 1).sum()) > 100


def test_symbols_too_rare_for_a_table() -> None:
    """Below 2^-16 of all: they and what they share with others are escapes."""
    exponents = np.full(140_002, 120)
    exponents[:40_000] = 121
    exponents[[70_000, 70_003, 139_998]] = [130, 131, 131]
    (table,) = equal_tables([of_exponents(exponents)])
    assert table.palette.tolist() == [120, 121, 130, 131]
    assert int((table.frequencies > 0).sum()) == 2
    # 17 exponents of which the last, of as many as another, is outside of the palette
    assert equal_tables([of_exponents(repeated([3000] * 15 + [9, 9]))])[0].palette.tolist() == [*range(16)]


@pytest.mark.parametrize("base", [0, 1, 30, 41, 190, 239])
def test_exponents_at_both_ends(base: int) -> None:
    """Windows of the census that begin below 0 or end above 255, with zeros and pairs far from the window."""
    rng = np.random.default_rng(base)
    exponents = base + rng.integers(0, 12, 1201)
    exponents[rng.random(1201) < 0.2] = 0
    far = exponents.copy()
    far[rng.integers(0, 1201, 2)] = [255, 254]
    many = np.where(rng.random(1201) < 0.1, rng.integers(0, 256, 1201), exponents)
    equal_tables([of_exponents(one) for one in (exponents, far, many)])


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("BF16", "F64")])
def test_other_formats(name: str) -> None:
    fmt = FORMATS[name]
    rng = np.random.default_rng(0)
    most = 1 << fmt.exponent_bits
    shapes = [rng.integers(0, most, 999), np.minimum(rng.geometric(0.5, 1000), most - 1), [0] * 7]
    equal_tables([of_exponents(one, fmt) for one in shapes], fmt)


def test_exponents_of_eleven_bits() -> None:
    """The 256 most frequent of 2,048, with many that are as frequent."""
    rng = np.random.default_rng(0)
    equal_tables([of_exponents(rng.integers(0, 2048, 3001), FORMATS["F64"])], FORMATS["F64"])


def test_mantissa_bits_of_a_last_weight() -> None:
    """The last one of an odd number has no neighbour, and alone uses the lowest bit."""
    bits = of_exponents([120] * 501) & np.uint16(0xFFF0)
    bits[-1] |= 1
    equal_tables([bits, bits[:-1].copy(), bits & np.uint16(0xFF80)])


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 255), st.integers(1, 400)), min_size=1, max_size=30),
    st.integers(0, 1 << 30),
)
def test_property_any_histogram(runs: list[tuple[int, int]], seed: int) -> None:
    exponents = np.concatenate([np.full(times, exponent) for exponent, times in runs])
    equal_tables([of_exponents(np.random.default_rng(seed).permutation(exponents), seed=seed)])
