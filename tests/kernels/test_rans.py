"""The exponent coder: bytes and sizes, and what it does with words that no encoder wrote."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans import cpu, reference, vector_form
from neuzip.kernels.rans.numbers import BLOCK, HEADER_WORDS, LANES, LOWER, SCALE

SIZES = [1, 2, 255, 256, 257, 4095, 16383, 16384, 16385, 40000]


def gaussian_exponents(size: int, seed: int = 0) -> rans.Exponents:
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 0.02
    return (values.view(np.uint32) >> 23 & 0xFF).astype(np.uint8)


def table_for(exponents: rans.Exponents, pairs: bool = True) -> rans.Table:
    counts = np.bincount(exponents, minlength=256).astype(np.int64)
    if not pairs:
        return rans.build_table(counts, None)
    even = exponents[: exponents.size // 2 * 2].astype(np.int64)
    return rans.build_table(counts, np.bincount(even[::2] | even[1::2] << 8, minlength=1 << 16))


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "singles"])
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(size: int, pairs: bool) -> None:
    exponents = gaussian_exponents(size)
    table = table_for(exponents, pairs)
    coded = rans.encode(exponents, table)
    assert coded.words.size == int(coded.index.astype(int).sum()) <= rans.max_words(size, table.group)
    assert rans.decode(coded.words, coded.index, table, size).tobytes() == exponents.tobytes()


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "singles"])
def test_the_fast_form_gives_the_words_of_the_reference(pairs: bool) -> None:
    exponents = gaussian_exponents(BLOCK + 700, seed=3)
    exponents[[5, 6000, BLOCK + 1]] = [1, 254, 3]  # escapes
    table = table_for(exponents, pairs)
    coded = rans.encode(exponents, table)
    cut = int(coded.index[0])
    first, second = exponents[:BLOCK].tolist(), exponents[BLOCK:].tolist()
    assert reference.encode_block(first, table) == coded.words[:cut].tolist()
    assert reference.encode_block(second, table) == coded.words[cut:].tolist()
    assert reference.decode_block(coded.words[:cut].tolist(), table, BLOCK) == first
    assert reference.decode_block(coded.words[cut:].tolist(), table, 700) == second


def test_blocks_stand_alone() -> None:
    """Any block decodes from its own words: ranges of a tensor need nothing before them."""
    exponents = gaussian_exponents(5 * BLOCK)
    table = table_for(exponents)
    coded = rans.encode(exponents, table)
    starts = np.concatenate([[0], np.cumsum(coded.index.astype(np.int64))])
    for b in range(5):
        words = coded.words[starts[b] : starts[b + 1]]
        part = rans.decode(words, coded.index[b : b + 1], table, BLOCK)
        assert (part == exponents[b * BLOCK : (b + 1) * BLOCK]).all()


def test_pieces_are_coded_like_the_whole() -> None:
    exponents = gaussian_exponents(3 * BLOCK + 99)
    table = table_for(exponents)
    whole = rans.encode(exponents, table)
    pieces = [rans.encode(exponents[at : at + BLOCK], table) for at in range(0, exponents.size, BLOCK)]
    assert np.concatenate([p.words for p in pieces]).tobytes() == whole.words.tobytes()
    assert np.concatenate([p.index for p in pieces]).tobytes() == whole.index.tobytes()


def test_gaussian_weights_cost_at_most_the_promised_bits() -> None:
    """At most 0.6 % over the bound, and 2.62 bits an exponent, table and index included."""
    exponents = gaussian_exponents(1 << 20)
    counts = np.bincount(exponents, minlength=256)
    p = counts[counts > 0] / exponents.size
    entropy = float(-(p * np.log2(p)).sum())
    table = table_for(exponents)
    coded = rans.encode(exponents, table)
    bits = 16 * (coded.words.size + coded.index.size + table.frequencies.size + 19) / exponents.size
    assert table.group == 2
    assert bits <= 2.62
    assert 8 + bits <= 1.006 * (8 + entropy)


def test_one_symbol_costs_almost_nothing() -> None:
    """A wrong bound on the state would cost a word a symbol, and still round-trip."""
    for value in (0, 127, 255):
        exponents = np.full(BLOCK, value, np.uint8)
        table = table_for(exponents)
        coded = rans.encode(exponents, table)
        assert coded.words.size == HEADER_WORDS + reference_refills(exponents, table)
        assert coded.words.size <= HEADER_WORDS + 32
        assert (rans.decode(coded.words, coded.index, table, BLOCK) == value).all()


def reference_refills(exponents: rans.Exponents, table: rans.Table) -> int:
    return len(reference.encode_block(exponents.tolist(), table)) - HEADER_WORDS


def test_many_exponents_take_single_symbols() -> None:
    exponents = np.random.default_rng(0).integers(0, 256, 3 * BLOCK).astype(np.uint8)
    table = table_for(exponents)
    assert table.group == 1
    coded = rans.encode(exponents, table)
    assert (rans.decode(coded.words, coded.index, table, exponents.size) == exponents).all()
    assert coded.words.size * 16 <= exponents.size * 8.1


def test_wide_exponents_with_more_than_a_palette() -> None:
    rng = np.random.default_rng(0)
    exponents = np.where(
        rng.random(2 * BLOCK) < 0.999, rng.integers(1000, 1020, 2 * BLOCK), rng.integers(0, 2048, 2 * BLOCK)
    )
    exponents = exponents.astype(np.uint16)
    table = rans.build_table(np.bincount(exponents, minlength=2048).astype(np.int64), None)
    coded = rans.encode(exponents, table)
    assert (rans.decode(coded.words, coded.index, table, exponents.size, 11) == exponents).all()


def test_pairs_outside_the_table_are_escapes() -> None:
    """Weights whose pair is unheard of: the table was made from others."""
    usual = gaussian_exponents(BLOCK)
    table = table_for(usual)
    strange = np.random.default_rng(1).integers(0, 256, BLOCK).astype(np.uint8)
    coded = rans.encode(strange, table)
    assert (rans.decode(coded.words, coded.index, table, BLOCK) == strange).all()
    assert coded.words.size <= rans.max_words(BLOCK, 2)


def alike_neighbours(size: int) -> rans.Exponents:
    """Weights in rows whose scales differ much: a pair says more than two weights."""
    values = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    values *= np.exp2(np.arange(size) // 64 % 7 - 3).astype(np.float32)
    return (values.view(np.uint32) >> 23 & 0xFF).astype(np.uint8)


def rare_exponents(size: int) -> rans.Exponents:
    """One in a thousand is none of the usual ones."""
    rng = np.random.default_rng(3)
    return np.where(rng.random(size) < 1e-3, rng.integers(0, 256, size), gaussian_exponents(size)).astype(
        np.uint8
    )


@pytest.mark.parametrize("size", [300, BLOCK, 5 * BLOCK + 77])
@pytest.mark.parametrize(
    "made",
    [
        gaussian_exponents, alike_neighbours, rare_exponents,
        lambda size: np.random.default_rng(0).integers(0, 256, size).astype(np.uint8),
        lambda size: np.full(size, 120, np.uint8),
    ],
    ids=["gaussian", "alike neighbours", "escapes", "many", "one"],
)  # fmt: skip
def test_words_are_expected_without_coding(made: Callable[[int], rans.Exponents], size: int) -> None:
    """Within 0.3 % and 8 words a block, from what a table is made of."""
    exponents = made(size)
    counts = np.bincount(exponents, minlength=256).astype(np.int64)
    even = exponents[: size // 2 * 2].astype(np.int64)
    pairs = np.bincount(even[::2] | even[1::2] << 8, minlength=1 << 16)
    table = rans.build_table(counts, pairs)
    coded = rans.encode(exponents, table).words.size
    blocks = -(-size // BLOCK)
    assert abs(rans.expected_words(table, counts, pairs, size) - coded) <= 0.003 * coded + 8 * blocks


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=8, unique=True),
    st.integers(1, 700),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_exponents_round_trip(alphabet: list[int], size: int, seed: int, pairs: bool) -> None:
    rng = np.random.default_rng(seed)
    skew = rng.random(len(alphabet)) ** 8 + 1e-9
    exponents = rng.choice(alphabet, size, p=skew / skew.sum()).astype(np.uint8)
    table = table_for(exponents, pairs)
    coded = rans.encode(exponents, table)
    assert (rans.decode(coded.words, coded.index, table, size) == exponents).all()
    assert reference.encode_block(exponents.tolist(), table) == coded.words.tolist()


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=256).filter(any))
@settings(max_examples=300, deadline=None)
def test_frequencies_add_up_for_any_histogram(counts: list[int]) -> None:
    table = rans.build_table(np.array(counts + [0] * (256 - len(counts)), np.int64), None)
    assert int(table.frequencies.astype(int).sum()) == SCALE
    assert int(table.frequencies.max()) < SCALE


def test_poisoned_buffers_do_not_show_through(monkeypatch: pytest.MonkeyPatch) -> None:
    exponents = gaussian_exponents(BLOCK + 300)
    table = table_for(exponents)
    results = []
    for poison in (0x00, 0xFF):

        def poisoned(shape: int, dtype: object = float, poison: int = poison) -> np.ndarray:  # type: ignore[type-arg]
            made = np.ndarray(shape, dtype)  # type: ignore[call-overload]
            made.view(np.uint8)[:] = poison
            return made  # type: ignore[no-any-return]

        monkeypatch.setattr("neuzip.kernels.rans.np.empty", poisoned)
        coded = rans.encode(exponents, table)
        restored = rans.decode(coded.words, coded.index, table, exponents.size)
        monkeypatch.undo()
        results.append((coded.words.tobytes(), restored.tobytes()))
    assert results[0] == results[1]


class TestCorruption:
    """Whatever the words hold, decoding ends with exponents or with CorruptStream."""

    def setup_method(self) -> None:
        self.exponents = gaussian_exponents(BLOCK + 900, seed=5)
        self.exponents[[3, 4000]] = [2, 250]
        self.table = table_for(self.exponents)
        self.coded = rans.encode(self.exponents, self.table)

    def decode(self, words: rans.Words) -> rans.Exponents:
        return rans.decode(words, self.coded.index, self.table, self.exponents.size)

    @pytest.mark.parametrize("where", [0, 1, 33, 64, HEADER_WORDS, 500, -1])
    def test_a_flipped_bit_is_an_error_or_stays_in_its_block(self, where: int) -> None:
        for bit in range(16):
            words = self.coded.words.copy()
            words[where] ^= 1 << bit
            try:
                decoded = self.decode(words)
            except rans.CorruptStream:
                continue
            assert decoded.size == self.exponents.size

    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=200, deadline=None)
    def test_random_words(self, seed: int) -> None:
        self.setup_method()
        words = np.random.default_rng(seed).integers(0, 1 << 16, self.coded.words.size).astype(np.uint16)
        with pytest.raises(rans.CorruptStream):
            self.decode(words)

    def test_an_index_that_does_not_add_up(self) -> None:
        with pytest.raises(rans.CorruptStream, match="words"):
            self.decode(self.coded.words[:-1])
        with pytest.raises(rans.CorruptStream, match="blocks"):
            rans.decode(self.coded.words, self.coded.index, self.table, 3 * BLOCK)

    def test_a_block_too_short_for_its_header(self) -> None:
        index = np.array([HEADER_WORDS - 1], np.uint16)
        with pytest.raises(rans.CorruptStream):
            rans.decode(np.zeros(HEADER_WORDS - 1, np.uint16), index, self.table, 5)

    def test_more_escapes_than_words(self) -> None:
        words = self.coded.words.copy()
        words[0] = 0xFFFF
        with pytest.raises(rans.CorruptStream):
            self.decode(words)


@pytest.mark.parametrize(
    ("group", "palette", "frequencies"),
    [
        (3, [1], [4095, 1]),
        (1, [], [4095, 1]),
        (1, [5, 5], [4095, 1]),
        (1, [5, 4], [4095, 1]),
        (2, [300], [4095, 1]),
        (2, list(range(17)), [4095, 1]),
        (1, [5], [4096]),
        (1, [5], [4095]),
        (1, [5], [1] * 257),
        (1, [5], []),
    ],
)
def test_a_table_that_breaks_a_rule(group: int, palette: list[int], frequencies: list[int]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        rans.Table(group, np.array(palette, np.uint16), np.array(frequencies, np.uint16))


@pytest.mark.parametrize("concentration", [0.02, 0.3, 5.0])
def test_vector_and_scalar_steps_are_equal(concentration: float) -> None:
    """Both are portable: the one that this processor does not use is compared too."""
    rng = np.random.default_rng(0)
    counts = np.floor(rng.dirichlet(np.full(256, concentration)) * 1e6).astype(np.int64)
    counts[0] += 1
    table = rans.build_table(counts, None)
    usable = np.flatnonzero(table.frequencies).astype(np.uint8)
    steps = 300
    coded = rng.choice(usable, steps * LANES)
    states = [np.full(LANES, LOWER, np.uint32) for _ in range(2)]
    written = [np.full(steps * LANES + 1, 0xDEAD, np.uint16) for _ in range(2)]
    p = [np.uint64(steps * LANES + 1)] * 2
    for step in reversed(range(steps)):
        for i, encode in enumerate((cpu.scalar_encode, cpu.vector_encode)):
            p[i] = encode(states[i], table.encoder, coded, np.uint64(step * LANES), written[i], p[i])
        assert p[0] == p[1]
        assert np.array_equal(*states)
    assert np.array_equal(written[0][int(p[0]) :], written[1][int(p[1]) :])
    assert (written[1][: int(p[1])] == 0xDEAD).all()  # it never writes what it does not keep

    words = np.concatenate([written[0][int(p[0]) :], np.zeros(LANES, np.uint16)])
    decoded = [np.full(steps * LANES, 0xDEAD, np.uint16) for _ in range(2)]
    for i, decode in enumerate((cpu.scalar_decode, cpu.vector_decode)):
        at = np.uint64(0)
        for step in range(steps):
            at = decode(states[i], table.decoder, words, at, decoded[i], np.uint64(step * LANES))
        assert int(at) == words.size - LANES
        assert (states[i] == LOWER).all()
        assert np.array_equal(decoded[i], table.exponents[coded])


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which no loop has been tried yet, on a processor where the vector form is fast."""
    loops = (vector_form.encodes, vector_form.decodes, vector_form.decodes_floats)
    monkeypatch.setattr(vector_form, "SUPPORTED", True)
    for loop in loops:
        loop.cache_clear()
    yield
    for loop in loops:
        loop.cache_clear()


def break_vector_form(loop: str, result: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the vector form of a loop give one wrong number, in argument `result`; the forms that then ran."""
    right, forms = getattr(cpu, loop), []

    def wrong(*arguments: Any) -> Any:
        forms.append(arguments[-1])
        returned = right(*arguments)
        if arguments[-1] is not None:
            arguments[result][70] ^= 1
        return returned

    monkeypatch.setattr(cpu, loop, wrong)
    return forms


def test_a_vector_encoder_that_is_wrong_is_not_used(unproven: None, monkeypatch: pytest.MonkeyPatch) -> None:
    exponents = gaussian_exponents(700)
    table = table_for(exponents)
    forms = break_vector_form("encode", 6, monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"numba \d.* with llvmlite \d.* the exponent encoder to wrong"):
        words = rans.encode(exponents, table).words
    assert words.tolist() == reference.encode_block(exponents.tolist(), table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        assert rans.encode(exponents, table).words.tobytes() == words.tobytes()
    assert forms == [True, None, None]


def test_a_vector_decoder_that_is_wrong_is_not_used(unproven: None, monkeypatch: pytest.MonkeyPatch) -> None:
    exponents = gaussian_exponents(700)
    table, fmt = table_for(exponents), FORMATS["BF16"]
    coded = rans.encode(exponents, table)
    with monkeypatch.context() as broken:
        forms = break_vector_form("decode", 9, broken)
        with pytest.warns(RuntimeWarning, match="the exponent decoder to wrong machine code"):
            assert rans.decode(coded.words, coded.index, table, 700).tobytes() == exponents.tobytes()
    assert forms == [True, None]
    fields, floats = np.zeros(700, np.uint8), np.empty(700, np.uint16)
    forms = break_vector_form("decode_floats", 12, monkeypatch)
    with pytest.warns(RuntimeWarning, match="the exponent decoder to wrong machine code"):
        rans.decode_floats(coded.words, coded.index, table, fields, fmt, 7, floats)
    assert forms == [True, None]
    assert (floats >> fmt.mantissa_bits).astype(np.uint8).tobytes() == exponents.tobytes()


@pytest.mark.parametrize(("group", "dtype"), [(1, np.uint8), (2, np.uint8), (1, np.uint16)])
def test_the_vector_form_is_used_where_it_is_right(group: int, dtype: type, unproven: None) -> None:
    assert vector_form.encodes(group, np.dtype(dtype)) is vector_form.VECTOR
    assert vector_form.decodes(group, np.dtype(dtype)) is vector_form.VECTOR
    if dtype is np.uint8:
        floats = vector_form.decodes_floats(group, FORMATS["BF16"], np.dtype(np.uint8))
        assert floats is vector_form.VECTOR


def test_a_processor_without_vectors_of_words_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_form, "SUPPORTED", False)
    assert vector_form.encodes.__wrapped__(2, np.dtype(np.uint8)) is vector_form.SCALAR
    assert vector_form.decodes.__wrapped__(2, np.dtype(np.uint8)) is vector_form.SCALAR
    floats = vector_form.decodes_floats.__wrapped__(2, FORMATS["BF16"], np.dtype(np.uint8))
    assert floats is vector_form.SCALAR
