r"""Packed weights in torch: the kernels give the reference's bytes, the operators are fit for torch.compile.

With a CUDA device all of this runs there. Without one Triton's interpreter runs the kernels, and the
operators use the reference. That nothing outside the arrays is read shows on a GPU:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \
        pytest -k "not cuda_graph" tests/kernels/test_packed_ops.py tests/kernels/test_triton_linear.py

(Graphs are captured with torch's own allocator alone.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensors
import torch
import torch.nn.functional as F
from bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from neuzip.kernels import packed_linear as pl
from neuzip.kernels.device import products
from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.form import F16
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor, format_of
from neuzip.kernels.packed_linear.triton import pack as triton_pack
from neuzip.kernels.packed_linear.turns import by_turn

DTYPES = [torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
# Words of a plane of a row: 1, 3, 4, 18, 32, 96 and 63; a program has 8 of them, or of one row 32. Rows of
# less than a tile and of three.
shapes = pytest.mark.parametrize(
    "shape", [(1, 1), (5, 70), (3, 128), (37, 576), (6, 1024), (2, 3072), (3, 2000)], ids=str
)
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0x7C00, 0xFC01, 0x0001, 0x8001, 0xFFFF, 0x007F, 0x0080]


def gaussian(shape: tuple[int, int], dtype: torch.dtype, deviation: float = 0.02) -> torch.Tensor:
    return tensors.gaussian(*shape, dtype=dtype, deviation=deviation)


def with_specials(weights: torch.Tensor) -> torch.Tensor:
    """The weights with every kind of pattern among them, at places that repeat in no row."""
    bits = weights.view(torch.int16).flatten()
    for i, pattern in enumerate(SPECIAL):
        bits[i * 97 % bits.numel() :: 1009] = pattern - (pattern >> 15 << 16)
    return bits.view(weights.dtype).view(weights.shape)


def without_lowest_bits(weights: torch.Tensor, drop: int) -> torch.Tensor:
    return (weights.view(torch.int16) >> drop << drop).view(weights.dtype)


def on(packed: PackedTensor, device: torch.device) -> PackedTensor:
    return replace(packed, **{name: getattr(packed, name).to(device) for name in ARRAYS})


def by_reference(weights: torch.Tensor, window: pl.ExponentWindow | None = None) -> PackedTensor:
    """What the reference makes of weights, on the device."""
    bits = weights.cpu().view(torch.int16).numpy().view(np.uint16)
    p = pl.pack(bits, window, format_of(weights.dtype))
    arrays = [p.words, p.far_index, p.far_words, p.row_start, p.escapes]
    tensors = [torch.from_numpy(array.view(f"i{array.itemsize}")) for array in arrays]
    row_start, escapes = tensors[3:]
    return PackedTensor(
        p.shape, weights.dtype, p.low_bits, p.window.base, p.window.shift,
        *(t.to(DEVICE) for t in (*tensors, *by_turn(escapes, row_start, p.shape[1], p.window))),
    )  # fmt: skip


def assert_same(a: PackedTensor, b: PackedTensor) -> None:
    for name in ("shape", "dtype", "low_bits", "base", "shift"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ARRAYS:
        mine, other = getattr(a, name).cpu(), getattr(b, name).cpu()
        assert mine.dtype == other.dtype and torch.equal(mine, other), name


def guarded(shape: tuple[int, ...], dtype: torch.dtype, fill: int, offset: int = 0) -> Any:
    """A tensor within filled memory, `offset` elements after a multiple of 16 bytes; the memory around it."""
    numel = int(np.prod(shape))
    room = torch.full((2 * numel + 2 * GUARD + 2 * offset,), fill, dtype=torch.uint8, device=DEVICE)
    start = GUARD + 2 * offset
    inside = room[start : start + 2 * numel]
    return inside.view(dtype).view(
        shape
    ), lambda: bool((room[:start] == fill).all()) and bool((room[start + 2 * numel :] == fill).all())


# Packing


@dtypes
@shapes
def test_kernels_pack_as_the_reference_does(dtype: torch.dtype, shape: tuple[int, int], poison: None) -> None:
    weights = with_specials(gaussian(shape, dtype))
    assert_same(triton_pack.pack(weights.to(DEVICE)), by_reference(weights))


@pytest.mark.parametrize("words", range(1, 9))
def test_the_last_program_of_a_row_has_any_number_of_words(words: int, poison: None) -> None:
    """It has room for 8."""
    for columns in (32 * words, 32 * words + 253):
        weights = with_specials(gaussian((3, columns), torch.bfloat16))
        packed = triton_pack.pack(weights.to(DEVICE))
        assert_same(packed, by_reference(weights))
        dense, untouched = guarded((3, columns), torch.bfloat16, 0xFF)
        triton_pack.decode(packed, 0, 3, dense)
        assert same_bits(dense, weights)
        assert untouched()


@dtypes
@pytest.mark.parametrize("drop", range(1, 11))
def test_kernels_hold_as_few_bits(dtype: torch.dtype, drop: int, poison: None) -> None:
    weights = without_lowest_bits(with_specials(gaussian((5, 130), dtype)), drop)
    packed = triton_pack.pack(weights.to(DEVICE))
    assert_same(packed, by_reference(weights))
    assert packed.low_bits == max(1, 8 - drop)


@dtypes
@pytest.mark.slow
def test_kernels_hold_the_lowest_bit_of_any_weight(dtype: torch.dtype) -> None:
    """Of mantissas that end in 101, 100 and 1000000 the least has not the lowest bit."""
    weights = torch.full((3, 5000), 0x2340, dtype=torch.int16)
    weights[1, 7:9] = torch.tensor([0x2345, 0x2344])
    packed = triton_pack.pack(weights.view(dtype).to(DEVICE))
    assert packed.low_bits == 8
    assert_same(packed, by_reference(weights.view(dtype)))


DEVIATIONS = [0.011, 0.016, 0.02, 1.0, 1e-20]


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_kernels_choose_the_same_window(deviation: float) -> None:
    weights = gaussian((16, 256), torch.bfloat16, deviation)
    assert_same(triton_pack.pack(weights.to(DEVICE)), by_reference(weights))


def test_windows_of_several_shifts_are_among_these_tests() -> None:
    shifts = {by_reference(gaussian((16, 256), torch.bfloat16, d)).shift for d in DEVIATIONS}
    assert len(shifts) >= 4


@pytest.mark.slow
@given(
    st.integers(1, 40), st.integers(1, 70), st.sampled_from(DTYPES), st.integers(0, 10), st.integers(0, 99)
)
@settings(max_examples=8)
def test_any_patterns_are_packed_as_by_the_reference(
    out: int, columns: int, dtype: torch.dtype, drop: int, seed: int
) -> None:
    bits = torch.randint(-(1 << 15), 1 << 15, (out, columns), generator=torch.Generator().manual_seed(seed))
    weights = without_lowest_bits(bits.to(torch.int16).view(dtype), drop)
    packed = triton_pack.pack(weights.to(DEVICE))
    assert_same(packed, by_reference(weights))
    assert same_bits(torch_ops.decode(packed), weights)


@dtypes
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_to_pack(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weights = torch.empty(shape, dtype=dtype, device=DEVICE)
    packed = triton_pack.pack(weights)
    assert_same(packed, by_reference(weights))
    assert torch_ops.decode(packed).shape == shape
    triton_pack.decode(packed, 0, shape[0], weights)
    y = torch_ops.linear(torch.ones(3, shape[1], dtype=dtype, device=DEVICE), packed)
    assert same_bits(y, torch.zeros(3, shape[0], dtype=dtype))


def test_a_slice_of_a_larger_tensor_is_packed() -> None:
    """Its first weight need not lie at a multiple of 16 bytes."""
    weights = gaussian((1, 5 * 33 + 7), torch.bfloat16).flatten()[7:].view(5, 33)
    everything = gaussian((1, 5 * 33 + 7), torch.bfloat16).to(DEVICE).flatten()
    assert_same(triton_pack.pack(everything[7:].view(5, 33)), by_reference(weights))


def test_pack_says_what_it_packed() -> None:
    weights = gaussian((256, 512), torch.bfloat16).to(DEVICE)
    packed = torch_ops.pack(weights)
    assert (packed.shape, packed.dtype, packed.device.type) == ((256, 512), torch.bfloat16, DEVICE.type)
    assert packed.layout.planes == 11
    lists = 4 * (packed.far_words.numel() + 2 * packed.escapes.numel())
    indices = 256 * 512 // 1024 * 8 + 256 * 512 // 2048 * 8
    assert packed.nbytes == 256 * 512 * 11 // 8 + indices + 2 * 257 + lists
    assert packed.bits_per_weight == 8 * packed.nbytes / weights.numel() < 11.5
    assert torch_ops.pack(weights[:0]).bits_per_weight == 0


@pytest.mark.parametrize(("escapes", "poison"), [(65_535, 0x00), (65_536, 0xFF)], indirect=["poison"])
@pytest.mark.slow
def test_row_starts_of_16_and_of_32_bits(escapes: int, poison: None) -> None:
    weights = torch.full((10, 13_200), 0x3F80, dtype=torch.int16)
    bits = weights.flatten()  # the window holds those that are more
    bits[-escapes:] = torch.arange(escapes).to(torch.int16) & 0x03FF
    weights = bits.view(torch.bfloat16).view(weights.shape)
    packed = triton_pack.pack(weights.to(DEVICE))
    assert packed.escapes.numel() == escapes
    assert packed.row_start.dtype == (torch.int16 if escapes == 65_535 else torch.int32)
    assert_same(packed, by_reference(weights))
    assert_same(torch_ops.pack(weights), on(packed, torch.device("cpu")))
    dense, untouched = guarded((10, 13_200), torch.bfloat16, 0xFF)
    triton_pack.decode(packed, 0, 10, dense)
    assert same_bits(dense, weights)
    assert untouched()
    assert same_bits(torch_ops.decode(packed, slice(6, 9)), weights[6:9])
    assert same_bits(torch_ops.decode(on(packed, torch.device("cpu"))), weights)
    ids = torch.tensor([9, 6, 0])
    dense, _ = guarded((3, 13_200), torch.bfloat16, 0xFF)
    triton_pack.rows(packed, ids.to(DEVICE), dense)
    assert same_bits(dense, weights[ids])


def test_a_parameter_is_packed() -> None:
    weights = gaussian((4, 32), torch.bfloat16).to(DEVICE)
    assert same_bits(torch_ops.decode(torch_ops.pack(torch.nn.Parameter(weights))), weights)


@pytest.mark.parametrize(
    ("weights", "error", "match"),
    [
        (torch.zeros(4, 4), TypeError, "bfloat16 or float16, not torch.float32"),
        (torch.zeros(4, dtype=torch.bfloat16), ValueError, "contiguous matrix"),
        (torch.zeros(4, 8, dtype=torch.bfloat16).t(), ValueError, "contiguous matrix"),
        (torch.zeros(1, (1 << 16) + 1, dtype=torch.bfloat16), ValueError, "at most 65536"),
        (torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"), ValueError, "not on meta"),
    ],
)
def test_other_tensors_are_refused(weights: torch.Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        torch_ops.pack(weights)
    if match == "at most 65536":
        with pytest.raises(error, match=match):
            triton_pack.pack(weights.to(DEVICE))


# Decoding


@dtypes
@shapes
@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_kernel_decodes_bit_for_bit(dtype: torch.dtype, shape: tuple[int, int], fill: int) -> None:
    weights = with_specials(gaussian(shape, dtype))
    dense, untouched = guarded(shape, dtype, fill)
    triton_pack.decode(by_reference(weights), 0, shape[0], dense)
    assert same_bits(dense, weights)
    assert untouched()


@dtypes
@pytest.mark.parametrize("drop", range(1, 11))
def test_kernel_decodes_fewer_bits(dtype: torch.dtype, drop: int) -> None:
    weights = without_lowest_bits(with_specials(gaussian((13, 130), dtype)), drop)
    dense, untouched = guarded((13, 130), dtype, 0xFF)
    triton_pack.decode(by_reference(weights), 0, 13, dense)
    assert same_bits(dense, weights)
    assert untouched()


@pytest.mark.parametrize(
    ("base", "shift"), [(3, 0), (64, 0), (127, 0), (4, 1), (64, 1), (126, 1), (4, 15), (62, 13), (119, 15)]
)
def test_kernel_decodes_every_pattern_in_every_kind_of_window(base: int, shift: int) -> None:
    weights = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(16, 4096)
    dense, untouched = guarded((16, 4096), torch.bfloat16, 0xFF)
    triton_pack.decode(by_reference(weights, pl.ExponentWindow(base, shift)), 0, 16, dense)
    assert same_bits(dense, weights)
    assert untouched()


@pytest.mark.parametrize("base", [7, 15, 30])
def test_kernel_decodes_every_fp16_pattern_in_every_kind_of_window(base: int) -> None:
    weights = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(16, 4096)
    dense, untouched = guarded((16, 4096), torch.float16, 0xFF)
    triton_pack.decode(by_reference(weights, pl.ExponentWindow(base, 0, F16)), 0, 16, dense)
    assert same_bits(dense, weights)
    assert untouched()


@dtypes
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("columns", [70, 128])
def test_some_rows_are_decoded_to_anywhere(dtype: torch.dtype, offset: int, columns: int) -> None:
    weights = with_specials(gaussian((41, columns), dtype))
    packed = by_reference(weights)
    for start, stop in ((0, 41), (3, 4), (9, 41), (6, 6), (15, 17), (16, 32), (24, 40)):
        dense, untouched = guarded((stop - start, columns), dtype, 0xFF, offset)
        triton_pack.decode(packed, start, stop, dense)
        assert same_bits(dense, weights[start:stop])
        assert untouched()


@dtypes
@pytest.mark.parametrize("columns", [4096, 5000])
@pytest.mark.slow
def test_escapes_are_found_wherever_they_are(dtype: torch.dtype, columns: int) -> None:
    """Programs look for the part of a list that is theirs: here lists have every length and every place."""
    weights = torch.full((80, columns), 0x2345, dtype=torch.int16)
    column, beyond = torch.arange(columns), columns
    picks = [
        (1, 0, beyond), (1, 0, 2048), (1, 2048, beyond), (1, 2016, 2080), (1, 0, 1), (1, beyond - 1, beyond),
        (1, 2047, 2048), (1, 2048, 2049), (2, 0, beyond), (33, 0, beyond), (1, 2048 - 64, 2048 + 64),
        *((2048 // n, 0, beyond) for n in (15, 31, 32, 33, 63)), *((1, 0, n) for n in (63, 64, 65, 127)),
        *((1, 2048 - n, 2048) for n in (63, 64, 65, 129)), *((1, 2048, 2048 + n) for n in (64, 65, 129)),
    ]  # fmt: skip
    for row, (step, start, stop) in enumerate(picks):
        escapes = (column >= start) & (column < stop) & (column % step == 0)
        weights[3 * row % 80, escapes] = (0x4000 | column[escapes] & 0xFFF).to(torch.int16)
    weights = weights.view(dtype)
    packed = by_reference(
        weights, pl.ExponentWindow(0x23 if dtype == torch.bfloat16 else 8, 0, format_of(dtype))
    )
    assert packed.escapes.numel() > columns
    dense, untouched = guarded((80, columns), dtype, 0xFF)
    triton_pack.decode(packed, 0, 80, dense)
    assert same_bits(dense, weights)
    assert untouched()


def test_decode_operator() -> None:
    weights = with_specials(gaussian((11, 70), torch.bfloat16))
    packed = by_reference(weights)
    assert same_bits(torch_ops.decode(packed), weights)
    assert same_bits(torch_ops.decode(packed, slice(3, -2)), weights[3:-2])
    assert torch_ops.decode(packed, slice(8, 3)).shape == (0, 70)
    out, untouched = guarded((4, 70), torch.bfloat16, 0xFF)
    assert torch_ops.decode(packed, slice(2, 6), out) is out
    assert same_bits(out, weights[2:6])
    assert untouched()


def test_one_row_is_decoded_into_a_part_of_a_wider_one() -> None:
    """It is contiguous for torch, whatever the distance to a next row would be."""
    weights = gaussian((1, 128), torch.bfloat16)
    out = torch.empty(8, 129, dtype=torch.bfloat16, device=DEVICE)[0:1, :128]
    triton_pack.decode(by_reference(weights), 0, 1, out)
    assert same_bits(out, weights)


def test_decode_operator_refuses_what_does_not_fit() -> None:
    packed = by_reference(gaussian((11, 70), torch.bfloat16))
    with pytest.raises(ValueError, match="not every 2th"):
        torch_ops.decode(packed, slice(0, 4, 2))
    for out in (
        torch.empty(4, 70, dtype=torch.float16, device=DEVICE),
        torch.empty(3, 70, dtype=torch.bfloat16, device=DEVICE),
        torch.empty(70, 4, dtype=torch.bfloat16, device=DEVICE).t(),
    ):
        with pytest.raises(ValueError, match="it has to be"):
            torch_ops.decode(packed, slice(0, 4), out)
    with pytest.raises(ValueError, match="out is on meta"):
        torch_ops.decode(packed, None, torch.empty(11, 70, dtype=torch.bfloat16, device="meta"))


# Looking rows up


@dtypes
@shapes
def test_kernel_looks_rows_up(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weights = with_specials(gaussian(shape, dtype))
    ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2, 0, shape[0] - 1])
    dense, untouched = guarded((5, shape[1]), dtype, 0xFF)
    triton_pack.rows(by_reference(weights), ids.to(DEVICE), dense)
    assert same_bits(dense, weights[ids])
    assert untouched()


def test_kernel_takes_short_ids() -> None:
    weights = with_specials(gaussian((7, 70), torch.bfloat16))
    dense, _ = guarded((3, 70), torch.bfloat16, 0xFF)
    triton_pack.rows(by_reference(weights), torch.tensor([6, -1, 2], dtype=torch.int32, device=DEVICE), dense)
    assert same_bits(dense[::2], weights[[6, 2]])
    assert dense[1].isnan().all()


@dtypes
def test_kernel_gives_nans_for_rows_that_there_are_not(dtype: torch.dtype) -> None:
    weights = with_specials(gaussian((7, 70), dtype))
    ids = torch.tensor([2, -1, 7, 1 << 40, -(1 << 62), 6], device=DEVICE)
    dense, untouched = guarded((6, 70), dtype, 0x00)
    triton_pack.rows(by_reference(weights), ids, dense)
    assert same_bits(dense[[0, 5]], weights[[2, 6]])
    assert dense[1:5].isnan().all()
    assert untouched()


def test_rows_operator() -> None:
    weights = with_specials(gaussian((11, 70), torch.bfloat16))
    packed = by_reference(weights)
    ids = torch.tensor([[3, 0, 10], [10, 3, 7]])
    for chosen in (ids, ids.t(), ids[0, 0], ids[:0], ids.to(torch.int32)):
        assert same_bits(torch_ops.rows(packed, chosen.to(DEVICE)), weights[chosen.long()])
    with pytest.raises(TypeError, match="int32 or int64"):
        torch_ops.rows(packed, torch.ones(2, device=DEVICE))


def test_rows_operator_refuses_ids_on_a_cpu() -> None:
    packed = on(by_reference(gaussian((11, 70), torch.bfloat16)), torch.device("cpu"))
    for wrong in (-1, 11):
        with pytest.raises(IndexError, match="that have 11"):
            torch_ops.rows(packed, torch.tensor([0, wrong]))


# The product


def relative_error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


def assert_as_good_as_dense(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The error against fp64 is no larger than that of torch's own product in the same dtype."""
    packed = by_reference(weights)
    weights = weights.to(DEVICE)
    y = torch_ops.linear(x, packed, bias)
    dense = F.linear(x, weights, bias)
    assert (y.shape, y.dtype, y.device) == (dense.shape, dense.dtype, dense.device)
    if y.numel():
        truth = F.linear(x.double(), weights.double(), None if bias is None else bias.double())
        assert relative_error(y, truth) <= 1.05 * relative_error(dense, truth)


@dtypes
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("columns", [1, 33, 70, 576])
@pytest.mark.parametrize("rows", [0, 1, 3, 17, torch_ops.FEW_ROWS, torch_ops.FEW_ROWS + 1])
def test_product(dtype: torch.dtype, rows: int, columns: int, biased: bool) -> None:
    weights = gaussian((40, columns), dtype)
    weights[:, ::7] *= 2.0**-9  # escapes
    x = gaussian((rows, columns), dtype, 1.0).to(DEVICE)
    bias = gaussian((1, 40), dtype)[0].to(DEVICE) if biased else None
    assert_as_good_as_dense(x, weights, bias)


@pytest.mark.parametrize("lead", [(), (2, 3), (2, 0, 3), (1, 1, 1)], ids=str)
def test_any_leading_shape(lead: tuple[int, ...]) -> None:
    x = gaussian((max(1, int(np.prod(lead))), 70), torch.bfloat16, 1.0).to(DEVICE)
    x = x[: int(np.prod(lead))].view(*lead, 70)
    assert_as_good_as_dense(x, gaussian((40, 70), torch.bfloat16), None)


def test_x_that_is_not_contiguous() -> None:
    x = gaussian((70, 12), torch.bfloat16, 1.0).to(DEVICE)
    weights = gaussian((40, 70), torch.bfloat16)
    assert_as_good_as_dense(x.t(), weights, None)
    assert_as_good_as_dense(x.view(70, 3, 4).transpose(0, 2), weights, None)
    assert_as_good_as_dense(x.t()[0].expand(5, 70), weights, None)
    assert_as_good_as_dense(gaussian((6, 140), torch.bfloat16).to(DEVICE)[:, ::2], weights, None)


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_weights_decoded_in_parts(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the weights are decoded to one buffer, some at a time; the last part is shorter."""
    monkeypatch.setattr(products, "CHUNK", 16 * 70 * 2)
    monkeypatch.setattr(products, "RESULTS", 0)
    bias = gaussian((1, 40), torch.bfloat16)[0].to(DEVICE) if biased else None
    x = gaussian((torch_ops.FEW_ROWS + 6, 70), torch.bfloat16, 1.0).to(DEVICE)
    assert_as_good_as_dense(x, gaussian((40, 70), torch.bfloat16), bias)


def test_product_with_a_lossy_tensor() -> None:
    weights = without_lowest_bits(gaussian((40, 96), torch.bfloat16), 4)
    assert_as_good_as_dense(gaussian((3, 96), torch.bfloat16, 1.0).to(DEVICE), weights, None)


@dtypes
def test_gradients_are_those_of_the_dense_product(dtype: torch.dtype) -> None:
    weights = gaussian((40, 70), dtype)
    packed, dense = by_reference(weights), weights.to(DEVICE)
    x = gaussian((6, 70), dtype, 1.0).to(DEVICE).view(2, 3, 70).requires_grad_()
    bias = gaussian((1, 40), dtype)[0].to(DEVICE).requires_grad_()
    upstream = gaussian((6, 40), dtype, 1.0).to(DEVICE).view(2, 3, 40)
    got = torch.autograd.grad(torch_ops.linear(x, packed, bias), (x, bias), upstream)
    want = torch.autograd.grad(F.linear(x, dense, bias), (x, bias), upstream)
    truth = (
        upstream.double() @ dense.double(),
        upstream.double().sum((0, 1)),
    )
    for mine, other, exact in zip(got, want, truth, strict=True):
        assert mine.shape == other.shape and mine.dtype == dtype
        assert relative_error(mine, exact) <= 1.05 * relative_error(other, exact) + 1e-6


def test_only_the_gradients_that_are_asked_for() -> None:
    packed = by_reference(gaussian((40, 70), torch.bfloat16))
    x, bias = gaussian((3, 70), torch.bfloat16).to(DEVICE), gaussian((1, 40), torch.bfloat16)[0].to(DEVICE)
    assert not torch_ops.linear(x, packed, bias).requires_grad
    torch_ops.linear(x, packed, bias.requires_grad_()).sum().backward()
    assert x.grad is None and bias.grad is not None
    torch_ops.linear(x.requires_grad_(), packed).sum().backward()
    assert x.grad is not None


def test_autocast_casts_to_the_dtype_of_the_weights() -> None:
    packed = by_reference(gaussian((40, 70), torch.bfloat16))
    x, bias = torch.randn(3, 70, device=DEVICE), torch.randn(40, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = torch_ops.linear(x, packed, bias)
    assert same_bits(y, torch_ops.linear(x.bfloat16(), packed, bias.bfloat16()))


def test_operands_that_do_not_go_together_are_refused() -> None:
    packed = by_reference(gaussian((40, 70), torch.bfloat16))
    x = torch.ones(3, 70, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(TypeError, match=r"torch.bfloat16 are not multiplied with torch.float32"):
        torch_ops.linear(x.float(), packed)
    with pytest.raises(TypeError, match=r"torch.bfloat16 are not multiplied with torch.float16"):
        torch_ops.linear(x, packed, torch.ones(40, dtype=torch.float16, device=DEVICE))
    for wrong in (x[:, :69], x[0, 0]):
        with pytest.raises(ValueError, match="x and bias have shapes"):
            torch_ops.linear(wrong, packed)
    with pytest.raises(ValueError, match="x and bias have shapes"):
        torch_ops.linear(x, packed, x[0])
    with pytest.raises(ValueError, match="x is on meta"):
        torch_ops.linear(x.to("meta"), packed)


# Operators


@dtypes
@pytest.mark.slow
def test_operators_keep_the_rules_of_torch(dtype: torch.dtype) -> None:
    packed = by_reference(gaussian((40, 70), dtype))
    x = gaussian((3, 70), dtype, 1.0).to(DEVICE).requires_grad_()
    bias = gaussian((1, 40), dtype)[0].to(DEVICE).requires_grad_()
    ids = torch.tensor([[3, 9]], device=DEVICE)
    out = torch.empty(6, 70, dtype=dtype, device=DEVICE)
    ops = torch.ops.neuzip
    opcheck(ops.packed_linear.default, (x, bias, *packed.arguments))
    opcheck(ops.packed_linear.default, (x.detach(), None, *packed.arguments))
    opcheck(ops.packed_decode.default, (3, 9, *packed.arguments))
    opcheck(ops.packed_decode_into.default, (out, 3, *packed.arguments))
    opcheck(ops.packed_rows.default, (ids, *packed.arguments))


def test_a_mode_sees_products_as_operators() -> None:
    """What is not seen is the same, bit for bit, without an operator."""
    packed, seen = by_reference(gaussian((40, 70), torch.bfloat16)), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    operator = torch.ops.neuzip.packed_linear
    for shape in ((70,), (3, 70), (2, 100, 70), (2, 0, 70)):
        x = torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
        y = torch_ops.linear(x, packed)
        assert same_bits(y, operator(x, None, *packed.arguments)) and y.is_contiguous()
        seen.clear()
        with Watch():
            assert same_bits(torch_ops.linear(x, packed), y)
        assert operator.default in seen
        if x.dim() > 1:
            rows = torch.vmap(lambda row: torch_ops.linear(row, packed))(x)
            assert same_bits(rows, torch.stack([torch_ops.linear(row, packed) for row in x]))


def test_what_is_made_without_gradients_can_be_written_to_with_them() -> None:
    packed, trained = by_reference(gaussian((40, 70), torch.bfloat16)), torch.ones(40, requires_grad=True)
    for rows in (3, 300):
        with torch.no_grad():
            y = torch_ops.linear(torch.ones(1, rows, 70, dtype=torch.bfloat16, device=DEVICE), packed)
        y += trained.to(y)
        y.sum().backward()
    assert trained.grad is not None and trained.grad.tolist() == [303] * 40


@pytest.mark.slow
def test_operators_are_compiled_in_one_graph() -> None:
    """Weights of several windows, and several numbers of rows, with one graph for each kind."""
    packed = [by_reference(gaussian((40, 70), torch.bfloat16, 0.02 * 4**i)) for i in range(4)]
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def product(x: torch.Tensor, weights: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
        return torch_ops.linear(x, weights) + torch_ops.linear(torch_ops.rows(weights, ids), weights)

    torch._dynamo.reset()
    compiled = torch.compile(product, backend=count, fullgraph=True)
    for weights in packed:
        for rows in (2, 3, 5):
            x = gaussian((rows, 70), torch.bfloat16, 1.0).to(DEVICE)
            ids = torch.arange(rows, device=DEVICE)
            assert same_bits(compiled(x, weights, ids), product(x, weights, ids))
    assert len(graphs) <= 4


def test_shapes_without_memory() -> None:
    """On the meta device, where models are laid out before they are loaded."""
    packed = on(by_reference(gaussian((40, 70), torch.bfloat16)), torch.device("meta"))
    assert torch_ops.decode(packed, slice(2, 5)).shape == (3, 70)
    assert torch_ops.rows(packed, torch.zeros(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, 70)
    x = torch.empty(2, 3, 70, dtype=torch.bfloat16, device="meta")
    assert torch_ops.linear(x, packed).shape == (2, 3, 40)


def test_gradients_through_a_compiled_product() -> None:
    packed = by_reference(gaussian((40, 70), torch.bfloat16))
    x = gaussian((3, 70), torch.bfloat16, 1.0).to(DEVICE).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch_ops.linear(x, packed).square(), backend="aot_eager", fullgraph=True
    )
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    (want,) = torch.autograd.grad(torch_ops.linear(x, packed).square().sum(), x)
    assert same_bits(got, want)


# What needs a GPU


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    "shape", [(1031, 4096), (515, 14_336), (300, 28_672), (4100, 577), (3, 65_536)], ids=str
)
@pytest.mark.parametrize("deviation", [0.02, 0.011])
def test_large_tensors(dtype: torch.dtype, shape: tuple[int, int], deviation: float, poison: None) -> None:
    weights = with_specials(gaussian(shape, dtype, deviation))
    packed = torch_ops.pack(weights.to(DEVICE))
    assert_same(packed, by_reference(weights))
    assert same_bits(torch_ops.decode(packed), weights)
    ids = torch.randint(shape[0], (77,), device=DEVICE)
    assert same_bits(torch_ops.rows(packed, ids), weights[ids.cpu()])
    some = slice(shape[0] // 3, shape[0] // 2 + 1)
    assert same_bits(torch_ops.decode(packed, some), weights[some])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 33, 65, 300, 2048])
def test_large_product(rows: int) -> None:
    x = gaussian((rows, 4096), torch.bfloat16, 1.0).to(DEVICE)
    assert_as_good_as_dense(x, gaussian((9000, 4096), torch.bfloat16), None)
    assert_as_good_as_dense(x, gaussian((9000, 4096), torch.bfloat16), torch.ones(9000).bfloat16().to(DEVICE))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    packed = by_reference(gaussian((512, 256), torch.bfloat16))
    few = torch.zeros(2, 256, dtype=torch.bfloat16, device=DEVICE)
    many, ids = few.repeat(50, 1), torch.zeros(5, dtype=torch.int64, device=DEVICE)

    def step() -> list[torch.Tensor]:
        return [
            torch_ops.linear(few, packed),
            torch_ops.linear(many, packed),
            torch_ops.rows(packed, ids),
            torch_ops.decode(packed),
        ]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    few.normal_()
    many.normal_()
    ids.copy_(torch.tensor([5, 511, 0, 3, 3]))
    graph.replay()
    for mine, other in zip(captured, step(), strict=True):
        assert same_bits(mine, other)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_than_two_to_the_31_weights() -> None:
    """The last rows lie where 32 bits do not reach."""
    some = with_specials(gaussian((64, 16_384), torch.bfloat16)).to(DEVICE)
    copies = (1 << 31) // some.numel() + 2
    packed = torch_ops.pack(some.repeat(copies, 1))
    once = by_reference(some)
    assert torch.equal(packed.words[-4:], once.words)
    assert torch.equal(packed.far_index[-4:, :, 0], once.far_index[..., 0])
    assert torch.equal(packed.far_words[-once.far_words.numel() :], once.far_words)
    assert torch.equal(packed.escapes[-once.escapes.numel() :], once.escapes)
    out = 64 * copies
    assert same_bits(torch_ops.decode(packed, slice(out - 64, out)), some)
    assert same_bits(torch_ops.rows(packed, torch.arange(out - 64, out, device=DEVICE)), some)
    dense = torch_ops.decode(packed)
    assert all(torch.equal(part.view(torch.int16), some.view(torch.int16)) for part in dense.split(64))
