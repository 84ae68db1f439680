"""Escapes by tile and turn: what a thread finds there are the weights of its own slots, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuzip.kernels import packed_linear as pl
from neuzip.kernels.float_fields import FORMATS, FloatFormat
from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.ops import _as_numpy
from neuzip.kernels.packed_linear.reference import _slots
from neuzip.kernels.packed_linear.tensor import PackedTensor

BF16, F16 = FORMATS["BF16"], FORMATS["F16"]
DTYPES = {BF16: torch.bfloat16, F16: torch.float16}
formats = pytest.mark.parametrize("fmt", [BF16, F16], ids=lambda fmt: fmt.name)


def gaussian(rows: int, columns: int, fmt: FloatFormat = BF16, deviation: float = 0.02) -> np.ndarray:
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * deviation
    return weights.to(DTYPES[fmt]).view(torch.int16).numpy().view(np.uint16)


def packed_of(bits: np.ndarray, fmt: FloatFormat = BF16) -> PackedTensor:
    return torch_ops.pack(torch.from_numpy(bits.view(np.int16)).view(DTYPES[fmt]))


def multiplied(packed: PackedTensor) -> np.ndarray:
    """The patterns that a warp group multiplies with: its threads' slots, turned where they find escapes."""
    patterns = _slots(_as_numpy(packed), np.arange(packed.shape[0]))
    entries = packed.turn_escapes.tolist()
    for tile, turn in np.ndindex(*packed.turn_index.shape[:2]):
        mask, start = (int(v) & 0xFFFFFFFF for v in packed.turn_index[tile, turn])
        first = [lane for lane in range(32) if mask >> lane & 1]
        for number, lane in enumerate(first):
            mine = [entries[start + number]]
            at = start + len(first)
            followed = mine[0] >> 15 & 1
            while followed:
                mine += [entries[at]] if entries[at] >> 16 & 31 == lane else []
                followed, at = entries[at] >> 15 & 1, at + 1
            for entry in mine:
                turned, byte, where = entry & 0x7F, entry >> 7 & 3, entry >> 9 & 31
                assert turned, "an escape that is what stands in its slot"
                g, row = where // 2, tile * 16 + lane // 4 + 8 * (where % 2)
                column = turn * 128 + 16 * g + 8 * (byte // 2) + 2 * (lane % 4) + byte % 2
                patterns[row, column] ^= np.uint16(turned << 8)
    return patterns


def check(bits: np.ndarray, fmt: FloatFormat = BF16) -> None:
    packed = packed_of(bits, fmt)
    assert packed.turn_index.shape == (-(-bits.shape[0] // 16), bits.shape[1] // 128, 2)
    assert packed.turn_escapes.shape == packed.escapes.shape
    window = pl.ExponentWindow(packed.base, packed.shift, fmt)
    kinds = window.kinds[bits >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1]
    expected = np.where(kinds != 0, bits - np.uint16(window.shifted), window.settled(bits))
    assert (multiplied(packed) == expected).all()


@formats
@pytest.mark.parametrize(("rows", "columns"), [(1, 2048), (16, 128), (17, 640), (40, 1024)])
def test_threads_find_the_weights_of_their_slots(fmt: FloatFormat, rows: int, columns: int):
    check(gaussian(rows, columns, fmt), fmt)


@pytest.mark.parametrize("deviation", [0.011, 0.02, 0.03, 0.5, 1e-20])
def test_whatever_the_shift(deviation: float):
    check(gaussian(48, 512, BF16, deviation))


@formats
def test_zeros_infinities_and_nans_are_what_they_are(fmt: FloatFormat):
    bits = gaussian(32, 2048, fmt)
    bits[3, 5::511] = 0
    bits[4, 6::511] = 0x8000
    top = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    bits[5, 7], bits[5, 9], bits[20, 130] = top, 0x8000 | top, top | 1
    check(bits, fmt)


def test_several_escapes_of_a_thread_and_of_its_neighbours():
    bits = gaussian(64, 4096)
    bits[0, :16] = 0  # each of four threads has four in its first words
    bits[8, 0:128:32] = 0  # the first thread's other row
    bits[17, 128:144] = 0x8000
    check(bits)


@settings(max_examples=30)
@given(st.data())
def test_any_places(data: st.DataObject):
    rows, columns = data.draw(st.sampled_from([(16, 2048), (33, 1024), (5, 4096)]))
    bits = np.full((rows, columns), 0x3C12, np.uint16)
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))
    for row, column in data.draw(st.lists(places, max_size=rows * columns // 512)):
        bits[row, column] = data.draw(st.sampled_from([0, 0x8000, 0x7F80, 0x7FC1, 0x4512, 0xC7FF, 0x2081]))
    packed = packed_of(bits)
    if packed.turn_index.numel():
        check(bits)
    else:  # a shift, and a weight that is too small for it
        assert packed.shift


@pytest.mark.parametrize("columns", [0, 1, 96, 127, 129, 200])
def test_rows_that_are_no_turns_have_none(columns: int):
    packed = packed_of(gaussian(16, columns))
    assert packed.turn_index.shape == (0, 0, 2) and packed.turn_escapes.shape == (0,)


def test_many_escapes_have_none():
    bits = gaussian(16, 1024)
    bits[:, ::64] = 0
    assert packed_of(bits).turn_index.numel() == 0


def test_rows_of_zeros_have_none():
    """Few of all weights; but who multiplies with them would look through hundreds."""
    bits = gaussian(8192, 256)
    bits[700:708] = 0
    packed = packed_of(bits)
    assert 512 * packed.escapes.numel() < bits.size and packed.turn_index.numel() == 0


def test_a_weight_that_cannot_be_made_smaller():
    bits = gaussian(16, 4096, BF16, 0.02)
    assert packed_of(bits).shift > 1
    bits[7, 77] = 0x0001  # a denormal, half of which there is not
    assert packed_of(bits).turn_index.numel() == 0


def test_a_weight_that_need_not_be_made_smaller():
    bits = np.full((16, 1024), 0x3C12, np.uint16)
    bits[7, 77] = 0x0001
    assert packed_of(bits).shift == 0
    check(bits)
