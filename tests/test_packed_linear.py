"""The packed form: every pattern comes back, words are where they are said to be, products are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from neuzip.compress.source import TensorSource
from neuzip.kernels import packed_linear as pl
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.float_fields.values import to_float64
from neuzip.kernels.packed_linear.form import FARTHEST
from neuzip.kernels.packed_linear.reference import AT_A_TIME, matmul_in_parts

BF16 = FORMATS["BF16"]
COLUMNS = [0, 1, 31, 32, 33, 64, 127, 128, 576]


def bf16(values) -> np.ndarray:
    """Patterns of numbers, cut rather than rounded."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def gaussian(shape: tuple[int, int], deviation: float = 0.02, seed: int = 0) -> np.ndarray:
    return bf16(np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(deviation))


def numbers(bits: np.ndarray) -> np.ndarray:
    return to_float64(bits.reshape(-1), BF16).reshape(bits.shape)


def same(packed: pl.Packed, bits: np.ndarray) -> bool:
    back = pl.decode(packed)
    return back.shape == bits.shape and back.dtype == bits.dtype and back.tobytes() == bits.tobytes()


def slot_code(packed: pl.Packed, row: int, column: int) -> tuple[int, int, int]:
    """Low byte, code and sign of one weight, looked up bit by bit."""
    slot, c = divmod(column, packed.lane_words)
    g, b = divmod(slot, 4)
    word = [int(w) for w in packed.words[row, :, c]]
    return word[g] >> 8 * b & 0xFF, word[8 + g // 4] >> 8 * b + 2 * (g % 4) & 3, word[10] >> 8 * b + g & 1


windows = st.one_of(
    st.none(),
    st.builds(pl.Window, st.integers(3, 127), st.just(0)),
    st.builds(pl.Window, st.integers(4, 126), st.just(1)),
)


# Bit for bit


@given(hnp.arrays(np.uint16, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=70)), windows)
def test_any_patterns_of_any_shape_come_back(bits, window):
    assert same(pl.pack(bits, window), bits)


@pytest.mark.parametrize("window", [None, *(pl.Window(b, p) for p in (0, 1) for b in (3 + p, 64, 127 - p))])
def test_every_pattern_comes_back(window):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(128, 512)
    assert same(pl.pack(bits, window), bits)


@pytest.mark.parametrize("columns", COLUMNS)
def test_ragged_rows_come_back(columns):
    bits = gaussian((5, columns))
    packed = pl.pack(bits)
    assert packed.words.shape == (5, 11, -(-columns // 32))
    assert same(packed, bits)


def test_more_than_is_packed_at_a_time():
    bits = gaussian((3, AT_A_TIME // 64 - 1), 1.0)[:, :65_000]
    bits = np.repeat(bits, 30, axis=0)
    bits[::7, ::1000] = 0
    assert bits.size > AT_A_TIME
    assert same(pl.pack(bits), bits)


def test_a_view_of_a_larger_array_comes_back():
    bits = gaussian((64, 96))
    assert same(pl.pack(bits.T[3:40]), bits.T[3:40])


@pytest.mark.parametrize(
    "bits", [np.zeros(4, np.uint16), np.zeros((4, 4), np.int16), np.zeros((1, 2, 3), np.uint16)], ids=str
)
def test_other_arrays_are_refused(bits):
    with pytest.raises(ValueError, match="two-dimensional uint16"):
        pl.pack(bits)


def test_too_long_a_row_is_refused():
    assert same(pl.pack(np.zeros((1, 1 << 16), np.uint16)), np.zeros((1, 1 << 16), np.uint16))
    with pytest.raises(ValueError, match="at most 65536"):
        pl.pack(np.zeros((1, (1 << 16) + 1), np.uint16))


# The layout


def test_words_written_out():
    # Slot q is column 2 q + c: lane_words is 2. Column 3 is slot 1 of word 1.
    bits = np.full((2, 64), 0x3F80, np.uint16)  # 1.0: upper exponent bits 0x3F, low byte 0x80
    bits[0, 0] = 0x3E11  # slot 0, word 0: code 1
    bits[0, 2] = 0xBD22  # slot 1, word 0: code 2, negative
    bits[0, 8] = 0x3C33  # slot 4, word 0: code 3
    bits[0, 62] = 0xBE44  # slot 31, word 0: code 1, negative
    bits[1, 3] = 0xC055  # slot 1, word 1: an escape
    packed = pl.pack(bits, pl.Window(0x3F, 0))
    assert packed.shape == (2, 64)
    plain = [0x80808080] * 8 + [0, 0, 0]
    assert packed.words[0, :, 0].tolist() == [
        0x80802211, 0x80808033, 0x80808080, 0x80808080, 0x80808080, 0x80808080, 0x80808080, 0x44808080,
        0x0000020D,  # byte 0: slot 0 in its bits 0-1, slot 4 in 2-3; byte 1: slot 1
        0x40000000,  # byte 3: slot 31 in its bits 6-7
        0x80000100,  # byte 1: slot 1 in bit 0; byte 3: slot 31 in bit 7
    ]  # fmt: skip
    assert packed.words[0, :, 1].tolist() == plain
    assert packed.words[1, :, 0].tolist() == plain
    assert packed.words[1, :, 1].tolist() == [0x80805580, *plain[1:8], 0x00000300, 0, 0x00000100]
    assert packed.row_start.tolist() == [0, 0, 1]
    assert packed.escape_columns.tolist() == [3]
    assert packed.escape_highs.tolist() == [0xC0]


def test_words_of_parity_1_hold_halves():
    bits = np.full((1, 1), 0x3F80, np.uint16)
    packed = pl.pack(bits, pl.Window(0x3F, 1))
    assert slot_code(packed, 0, 0) == (0x00, 0, 0)  # 0x3F00 is 0.5
    assert packed.escapes == 0


def test_slots_without_a_weight():
    packed = pl.pack(np.full((1, 33), 0xBF80, np.uint16), pl.Window(0x3F, 0))
    assert packed.lane_words == 2
    assert [slot_code(packed, 0, column) for column in (32, 33, 63)] == [(0x80, 0, 1), (0, 3, 0), (0, 3, 0)]


@given(hnp.arrays(np.uint16, (3, 41)), windows)
def test_a_weight_is_where_it_is_said_to_be(bits, window):
    packed = pl.pack(bits, window)
    escapes = []
    for (row, column), v in np.ndenumerate(bits):
        shifted = (int(v) - 0x80 * packed.window.parity) % (1 << 16)
        low, code, sign = slot_code(packed, row, column)
        assert (low, sign) == (shifted & 0xFF, shifted >> 15)
        distance = packed.window.base - (shifted >> 8 & 0x7F)
        if 0 <= distance <= 3:
            assert code == distance
        else:
            assert code == FARTHEST
            escapes.append((row, column, shifted >> 8))
    rows = np.repeat(np.arange(3), np.diff(packed.row_start)).tolist()
    listed = zip(rows, packed.escape_columns.tolist(), packed.escape_highs.tolist(), strict=True)
    assert list(listed) == escapes


# The window


@given(hnp.arrays(np.int64, 256, elements=st.integers(0, 3)))
def test_no_window_has_fewer_escapes(histogram):
    best = pl.best_window(histogram)
    bits = np.repeat(np.arange(256, dtype=np.uint16) << 7, histogram)[None]
    fewest = pl.pack(bits).escapes
    assert (
        fewest == pl.pack(bits, best).escapes == histogram.sum() - sum(histogram[e] for e in best.exponents)
    )
    for parity in (0, 1):
        for base in range(3 + parity, 128 - parity):
            inside = histogram[list(pl.Window(base, parity).exponents)].sum()
            assert fewest <= histogram.sum() - inside


@pytest.mark.parametrize(("base", "parity"), [(2, 0), (128, 0), (3, 1), (127, 1), (64, 2), (64, -1)])
def test_windows_that_codes_cannot_say(base, parity):
    with pytest.raises(ValueError, match="no window"):
        pl.Window(base, parity)


def test_window_of_zeros_and_of_one_exponent():
    assert pl.pack(np.zeros((4, 64), np.uint16)).escapes == 0
    assert pl.pack(np.full((4, 64), 0x8000, np.uint16)).escapes == 0
    assert pl.pack(np.full((4, 64), 0x7F80, np.uint16)).escapes == 0  # infinities


# The size


def test_size_is_what_the_arrays_take():
    packed = pl.pack(np.tile(np.array([0x3F80, 0], np.uint16), (10, 32)), pl.Window(0x3F, 0))
    assert packed.escapes == 10 * 32
    assert packed.nbytes == 10 * 11 * 2 * 4 + 11 * 4 + 3 * packed.escapes
    assert packed.bits_per_weight == 8 * packed.nbytes / 640
    assert pl.pack(np.zeros((0, 5), np.uint16)).bits_per_weight == 0


@pytest.mark.parametrize("deviation", [0.02, *(2 ** (-6 + i / 8) for i in range(8))])
def test_gaussian_weights_take_less_than_11_and_a_half_bits(deviation):
    packed = pl.pack(gaussian((256, 4096), deviation))
    assert packed.bits_per_weight <= 11.5
    assert packed.escapes / (256 * 4096) < 0.017


def test_a_real_model_takes_less_than_11_and_a_half_bits(neuzip_data: Path):
    nbytes = numel = 0
    with TensorSource(neuzip_data / "wikilm-26m") as source:
        for t in source.tensors():
            if t.info.dtype == "BF16" and len(t.info.shape) == 2:
                bits = np.frombuffer(source.read(t), "<u2").reshape(t.info.shape)
                packed = pl.pack(bits)
                assert same(packed, bits), t.info.name
                nbytes, numel = nbytes + packed.nbytes, numel + bits.size
    assert numel > 25_000_000
    assert 8 * nbytes / numel <= 11.5


# The product


@pytest.mark.parametrize("columns", COLUMNS)
def test_product_is_that_of_the_original_weights(columns):
    bits = gaussian((7, columns))
    bits[:, ::5] = bf16(np.float32(1e-30))
    bits[:, 1::17] = bf16(np.float32(-300.0))
    x = np.random.default_rng(1).standard_normal((3, columns))
    truth = x @ numbers(bits).T
    packed = pl.pack(bits)
    assert (pl.matmul(x, packed) == truth).all()
    np.testing.assert_allclose(matmul_in_parts(x, packed), truth, rtol=1e-13, atol=1e-13)
    assert (pl.matmul(x[0], packed) == x[0] @ numbers(bits).T).all()
    np.testing.assert_allclose(matmul_in_parts(x[0], packed), truth[0], rtol=1e-13, atol=1e-13)


finite = hnp.arrays(
    np.uint16, (3, 41), elements=st.integers(0, 0xFFFF).filter(lambda v: v & 0x7F80 != 0x7F80)
)


@given(finite, windows)
def test_slots_and_escapes_add_up_to_the_weights(bits, window):
    # One weight at a time: times the identity, nothing else rounds.
    packed, weights = pl.pack(bits, window), numbers(bits)
    stand_ins = 2.0 ** (2 * packed.window.base - 131 + packed.window.parity)
    difference = np.abs(matmul_in_parts(np.eye(41), packed) - weights.T)
    assert (difference <= 2.0**-52 * np.maximum(np.abs(weights.T), stand_ins)).all()
    assert (pl.matmul(np.eye(41), packed) == weights.T).all()


def test_infinities_and_nans_reach_the_product():
    bits = gaussian((4, 64))
    bits[0, 5], bits[1, 6], bits[2, 7] = 0x7F80, 0xFF80, 0x7F81
    y = pl.matmul(np.ones(64), pl.pack(bits))
    assert y[0] == np.inf and y[1] == -np.inf and np.isnan(y[2]) and np.isfinite(y[3])
    np.testing.assert_allclose(matmul_in_parts(np.ones(64), pl.pack(bits)), y, rtol=1e-13)
