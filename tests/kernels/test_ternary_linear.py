"""Products with ternary weights: every implementation gives the bits of the reference.

With a CUDA device the kernels run there, else in Triton's interpreter. What a kernel reads outside its arrays
shows on a GPU, as for packed weights: see kernels/test_packed_ops.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from bits import same_numbers as same_bits
from conftest import RunAlone
from tensors import gaussian
from torch import Tensor
from torch.library import opcheck

from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.quantizers.magnitudes import quotient
from neuzip.kernels.ternary_linear import (
    TernaryWeight,
    reference,
    relu2_glu,
    ternary_linear,
    ternary_linears,
)
from neuzip.kernels.ternary_linear import ops as torch_ops
from neuzip.kernels.ternary_linear.triton import few_tokens as triton_few_tokens
from neuzip.kernels.ternary_linear.triton import launches, quantize_device, smem_ring
from neuzip.kernels.ternary_linear.triton import matrix as triton_matrix
from neuzip.kernels.ternary_linear.triton import one_token as triton_one_token
from neuzip.kernels.ternary_linear.triton import quantize as triton_quantize
from neuzip.kernels.ternary_linear.triton.launches import FewTokensLaunch, ManyTokensLaunch
from neuzip.kernels.ternary_linear.triton.launches import OneTokenLaunch as Launch

ACTIVATIONS = ["int8", "int4", "fp4", "top_k_int8"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    """Tokens of sizes that differ, with an activation that is far above the others."""
    x = gaussian(*shape, seed=seed)
    x *= torch.logspace(-2, 2, shape[0])[:, None] if len(shape) == 2 and shape[0] > 1 else 1
    x[..., shape[-1] // 3] *= 30
    return x.to(dtype)


def ternary(out: int, columns: int, group: int | None = None, seed: int = 0) -> Ternary:
    """Weights with a scale for all, one a row (group = columns) or one a group."""
    return quantizers.absmean(gaussian(out, columns, seed=seed) * 0.02, group=group)


def kept(columns: int, share: float = 0.5) -> int:
    return quantizers.top_k_count(columns, share)


# Weights


@pytest.mark.parametrize("group", [None, 600, 128, 100, 7], ids=str)
@pytest.mark.parametrize("out", [1, 16, 33])
def test_weights_come_back(out: int, group: int | None):
    weights = ternary(out, 600, group)
    weight = TernaryWeight.of(weights)
    assert weight.words.shape == (-(-out // 16), 3, 16, 16)
    assert weight.nbytes == weight.words.nbytes + 4 * weights.scale.numel()
    back = weight.ternary()
    assert torch.equal(back.codes, weights.codes)
    assert same_bits(back.scale, weights.scale)
    assert back.group == group


def test_words_are_those_of_pack_ternary_in_tiles():
    weights = ternary(16, 512)
    words = TernaryWeight.of(weights).words
    assert torch.equal(words[0].transpose(0, 1).reshape(16, 32), quantizers.pack_ternary(weights.codes))


@pytest.mark.parametrize("shape", [(0, 300), (5, 0), (0, 0)], ids=str)
def test_no_weights(shape: tuple[int, int]):
    weights = Ternary(torch.zeros(shape, dtype=torch.int8), torch.tensor(0.0))
    weight = TernaryWeight.of(weights)
    assert weight.codes().shape == shape
    assert weight.bits_per_weight == 0
    y = ternary_linear(torch.ones(2, shape[1]), weight, torch.arange(shape[0]).float())
    assert torch.equal(y, torch.arange(shape[0]).float().expand(2, -1))


def test_weights_in_other_places_are_noticed():
    """A code of 3, and weights where rows and columns only fill up."""
    weight = TernaryWeight.of(ternary(17, 300))
    weight.words[0, 0, 0, 0] |= 3
    with pytest.raises(ValueError, match="code of 3"):
        weight.codes()
    for place in ((1, 0, 5, 0), (0, 1, 0, 15)):
        weight = TernaryWeight.of(ternary(17, 300))
        weight.words[place] ^= 1
        with pytest.raises(ValueError, match="not filled up with zeros"):
            weight.codes()


def test_too_many_columns_and_axes_are_refused():
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match="at most 65536 columns, not 65537"):
        TernaryWeight.of(Ternary(torch.zeros(1, 65537, dtype=torch.int8), one))
    with pytest.raises(ValueError, match="have 2 axes, not 3"):
        TernaryWeight.of(Ternary(torch.zeros(1, 2, 3, dtype=torch.int8), one))


# The reference and what runs on a CPU


@activations
@pytest.mark.parametrize("group", [None, 70, 16, 9], ids=str)
def test_reference_is_the_product_of_the_dequantised(group: int | None, activation: str):
    x, weights = tokens(3, 70, dtype=torch.float32), ternary(20, 70, group)
    wanted = reference.quantize(x, activation).dequantize().double() @ weights.dequantize().double().T
    y = reference.ternary_linear(x, weights, activation=activation)
    assert (y.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@activations
@dtypes
@pytest.mark.parametrize(
    ("out", "columns", "group"),
    [(17, 256, None), (50, 600, 600), (50, 600, 128), (40, 300, 100), (3, 1, 1), (9, 40, 1000)],
)
def test_cpu_gives_the_bits_of_the_reference(
    out: int, columns: int, group: int | None, dtype: torch.dtype, activation: str, monkeypatch
):
    monkeypatch.setattr(torch_ops, "AT_A_TIME", 16 * columns)  # some rows at a time
    weights = ternary(out, columns, group)
    weight, bias = TernaryWeight.of(weights), gaussian(out, seed=2).bfloat16()
    for shape in ((columns,), (0, columns), (2, 3, columns)):
        x = tokens(*shape, dtype=dtype)
        for options in ({}, {"clamped": True}):
            y = ternary_linear(x, weight, bias, activation=activation, **options)
            assert same_bits(y, reference.ternary_linear(x, weights, bias, activation=activation, **options))
        y = relu2_glu(x, weight, weight, activation=activation)
        assert same_bits(y, reference.relu2_glu(x, weights, weights, activation=activation))


def test_share_of_activations():
    x, weights = tokens(4, 64), ternary(8, 64)
    for share in (0.01, 0.3, 1.0):
        y = ternary_linear(x, TernaryWeight.of(weights), activation="top_k_int8", share=share)
        assert same_bits(y, reference.ternary_linear(x, weights, activation="top_k_int8", share=share))


def test_autocast_changes_nothing():
    x, weight = tokens(4, 300, dtype=torch.float32), TernaryWeight.of(ternary(8, 300))
    plain = ternary_linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(ternary_linear(x, weight), plain)


def test_gated_unit_is_plus_zero_where_the_gate_is_closed():
    """Even where the other product is negative or infinite."""
    codes = torch.tensor([[1, 0], [1, 0]], dtype=torch.int8)
    gate = TernaryWeight.of(Ternary(codes, torch.tensor(-1.0)))
    up = TernaryWeight.of(Ternary(codes, torch.tensor([[-1.0], [3e38]]), 2))
    y = relu2_glu(torch.tensor([[2.0, 0.0]], dtype=torch.float16), gate, up)
    assert y.view(torch.int16).tolist() == [[0, 0]]


# What is refused


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(3, 5)}, ValueError, r"x has shape \(3, 5\), the weights \(4, 6\)"),
        ({"x": torch.zeros(())}, ValueError, "x has shape"),
        ({"x": torch.zeros(3, 6, dtype=torch.float64)}, TypeError, "not torch.float64"),
        ({"x": torch.zeros(3, 6, device="meta")}, ValueError, "x is on meta"),
        ({"bias": torch.zeros(6)}, ValueError, "the bias has shape"),
        ({"bias": torch.zeros(4, device="meta")}, ValueError, "on meta"),
        ({"bias": torch.zeros(4, dtype=torch.int8)}, TypeError, "a bias is bf16, fp16 or fp32"),
        ({"activation": "int2"}, ValueError, "top_k_int8, not 'int2'"),
        ({"share": 0.0}, ValueError, "the share of activations"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refused(change: dict[str, object], error: type[Exception], words: str):
    arguments = {"x": torch.zeros(3, 6), "weight": TernaryWeight.of(ternary(4, 6))} | change
    with pytest.raises(error, match=words):
        ternary_linear(**arguments)


def test_gate_and_up_of_two_shapes_are_refused():
    with pytest.raises(ValueError, match="gate and up"):
        relu2_glu(torch.zeros(6), TernaryWeight.of(ternary(4, 6)), TernaryWeight.of(ternary(5, 6)))


# The quantisers of the kernels


def odd_tokens(columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros, small and large numbers, denormals, ties, NaN, infinities, numbers far apart, a token each."""
    x = gaussian(12, columns, seed=3)
    x[1] = 0
    x[2] *= 1e-6
    x[3] *= 3e-8 if dtype == torch.float16 else 1e-38
    x[4] *= 1e4 if dtype == torch.float16 else 1e37
    x[5] = (x[5] * 2).round() / 2  # ties, and halves
    x[6, columns // 2] = torch.nan
    x[7, 0] = -torch.inf
    x[8] = -x[8].abs()
    x[9] = -0.0
    x[10] *= torch.exp2(-45 * torch.rand(columns, generator=torch.Generator().manual_seed(4)))
    x[11] = 0
    x[11, columns // 3] = 6e-8 if dtype == torch.float16 else 1e-40
    return x.to(dtype)


@activations
@dtypes
@pytest.mark.parametrize("clamped", [False, True], ids=["", "clamped"])
def test_kernel_quantises_to_the_bit(activation: str, dtype: torch.dtype, clamped: bool, device, poison):
    for columns in (1, 70, 257):
        x = odd_tokens(columns, dtype)
        wanted = reference.quantize(x, activation, clamped=clamped)
        codes, scale, total = triton_quantize.quantize(x.to(device), activation, kept(columns), clamped)
        assert torch.equal(codes[:, :columns].cpu(), wanted.codes)
        assert not codes[:, columns:].any()
        assert same_bits(scale, wanted.scale[:, 0])
        assert torch.equal(total.cpu(), wanted.codes.sum(-1, dtype=torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "activations", "dtype"),
    [(70, ACTIVATIONS, torch.bfloat16), (4200, ["int4"], torch.float32)],
    ids=["70", "4200-int4"],
)
def test_many_tokens_are_quantised_to_the_bit(
    columns: int, activations: list[str], dtype: torch.dtype, device
):
    """More than 64: threads have more activations. INT4 keeps them as fp32; of 4200 it spares registers."""
    x = odd_tokens(columns, dtype).repeat(6, 1)
    for activation in activations:
        wanted = reference.quantize(x, activation)
        codes, scale, total = triton_quantize.quantize(x.to(device), activation, kept(columns), False)
        assert torch.equal(codes[:, :columns].cpu(), wanted.codes)
        assert same_bits(scale, wanted.scale[:, 0])
        assert torch.equal(total.cpu(), wanted.codes.sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("size", [0.0, 2.0**-20, 7.96875, 8.0, 127.5, 1e28, 1e30])
@pytest.mark.parametrize("columns", [4, 100, 1 << 14, 1 << 17])
def test_sums_of_magnitudes_fit(columns: int, size: float, device):
    """Just below what the first unit does for, and where all that threads and warps have is too large."""
    x = torch.full((1, columns), size).bfloat16()
    wanted = reference.quantize(x, "int4")
    codes, scale, _ = triton_quantize.quantize(x.to(device), "int4", 0, False)
    assert torch.equal(codes[:, :columns].cpu(), wanted.codes)
    assert same_bits(scale, wanted.scale[:, 0])
    exact = columns & (columns - 1) == 0  # as 1 / columns is
    wanted_scale = x[0, 0].float().div(7**0.5).item()
    assert scale.item() == pytest.approx(wanted_scale, rel=0 if exact else 2**-22, abs=0)


@pytest.mark.parametrize("columns", [4, 1 << 14, 1 << 17])
def test_magnitudes_that_all_are_too_large(columns: int, device):
    x = torch.full((1, columns), 3e38).bfloat16()
    codes, scale, _ = triton_quantize.quantize(x.to(device), "int4", 0, False)
    assert not codes.any() and scale.isnan().all()


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("columns", [512, 1000])
def test_launches_of_the_quantiser_agree(warps: int, columns: int, device):
    x = tokens(2, columns)
    for activation in ("int8", "int4"):
        wanted = reference.quantize(x, activation)
        codes, scale, total = triton_quantize.quantize(x.to(device), activation, 0, False, warps=warps)
        assert torch.equal(codes[:, :columns].cpu(), wanted.codes)
        assert same_bits(scale, wanted.scale[:, 0])
        assert torch.equal(total.cpu(), wanted.codes.sum(-1, dtype=torch.int32))


@activations
@dtypes
@pytest.mark.parametrize("poison", [0xFF], indirect=True)
def test_kernel_interleaves_codes(activation: str, dtype: torch.dtype, device, poison):
    """In turns of 128, codes 4 j to 4 j + 3 of word 2 q + h are at [j, h, q]; the padding is zeros.

    More warps than there are codes for, as where there are many tokens, and as many.
    """
    for columns, warps in ((1, None), (70, 4), (257, None), (512, None), (1000, 4)):
        x = odd_tokens(columns, dtype)[[0, 6, 8, 10]]
        wanted = reference.quantize(x, activation)
        codes, scale, total = triton_quantize.quantize(
            x.to(device), activation, kept(columns), False, interleaved=True, warps=warps
        )
        assert codes.shape == (4, -(-columns // 256) * 256) and codes.is_contiguous()
        rows = codes.view(4, -1, 4, 2, 4, 4).permute(0, 1, 4, 3, 2, 5).flatten(1)
        assert torch.equal(rows[:, :columns].cpu(), wanted.codes)
        assert not rows[:, columns:].any()
        assert same_bits(scale, wanted.scale[:, 0])
        assert torch.equal(total.cpu(), wanted.codes.sum(-1, dtype=torch.int32))


def patterns(dtype: torch.dtype) -> Tensor:
    """All finite numbers of 16 bits."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    return x[x.isfinite()]


def rows_up_to(peak: float) -> Tensor:
    """All numbers of bf16 whose magnitude is not above a peak, for each significand that it can have."""
    peaks = (peak * (1 + torch.arange(128) / 128)).bfloat16()
    x = patterns(torch.bfloat16)
    return torch.where(x.abs() > peaks[:, None], peaks[:, None] * x.sign(), x)


@pytest.mark.slow
def test_constants_do_not_depend_on_defaults_of_torch(run_alone: RunAlone):
    """Kernels are imported at the first product, whatever has been set by then."""
    script = (
        "import torch; torch.set_default_dtype(torch.bfloat16); torch.set_default_device('meta');"
        "from neuzip.kernels.ternary_linear.triton import quantize_device as codes;"
        "print(codes.ZERO_OF_INT4.hex(), codes._PER_SQRT_7.value.hex(), codes._SMALLEST_BITS.value)"
    )
    said = run_alone(script)
    root = torch.tensor(7**0.5, dtype=torch.float32).item()
    zero = torch.tensor(8 / 15, dtype=torch.float32).item()
    assert said.split() == [zero.hex(), (1 / root).hex(), str((127 - 122) << 23)]


def cut_off_to_bf16(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -0x10000).view(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("off", [-2, 0, 2])
@pytest.mark.parametrize("peak", [1.0, 2.0**99, 2.0**100, 2.0**127, 2.0**-122])
def test_fp4_of_bf16_needs_eleven_bits(peak: float, off: int):
    """What the compiled kernel does: a product with a quotient, which may be 2 units of the last place off,
    in two bf16, rounded to fp16, then to halves of the grid, by the same steps. Huge tokens are lowered."""
    for x in rows_up_to(peak):
        near = x * 2.0**-64 if peak >= 2.0**100 else x
        factor = ((6 / near.float().abs().amax()).view(torch.int32) + off).view(torch.float32)
        upper = cut_off_to_bf16(factor)
        y = (near.double() * (upper.double() + cut_off_to_bf16(factor - upper).double())).float().half()
        power = (y.view(torch.int16) & 0x4400).view(torch.half).double()
        raised = (power * 768 + y.double()).half().double()
        rounded = (raised - power * 768).half() + 768
        codes = rounded.view(torch.int16).to(torch.int8)  # the lowest byte
        assert torch.equal(codes, quantizers.fp4_e2m1(x).codes)


@triton.jit
def _divisions(size_ptr, factor_ptr, factor4_ptr, by_127_ptr, by_12_ptr, by_sqrt_7_ptr, ASM: tl.constexpr):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    size = tl.load(size_ptr + at)
    tl.store(factor_ptr + at, quantize_device._over(127.0, size, ASM))
    tl.store(factor4_ptr + at, quantize_device._over(quantize_device._FACTOR_INT4, size, ASM))
    tl.store(by_127_ptr + at, quantize_device._divided(size, 127, ASM))
    tl.store(by_12_ptr + at, quantize_device._divided(size, 12, ASM))
    tl.store(by_sqrt_7_ptr + at, quantize_device._divided_by_sqrt_7(size))


def check_divisions(sizes: Tensor) -> None:
    """A multiple of 256 finite sizes, not negative. Each quotient is compared where it is to be right."""
    quotients = [torch.full_like(sizes, torch.nan) for _ in range(5)]
    _divisions[(len(sizes) // 256,)](sizes, *quotients, ASM=sizes.is_cuda, enable_fp_fusion=False)
    factor, factor4, by_127, by_12, by_sqrt_7 = quotients
    for result, over, by, least in (
        (factor, 127, sizes, 2.0**-120),
        (factor4, 7**0.5 / 15, sizes, 2.0**-120),
        (by_127, sizes, 127, 2.0**-122),
        (by_12, sizes, 12, 2.0**-122),
        (by_sqrt_7, sizes, 7**0.5, 0),
    ):
        wanted = quotient(over, by)
        assert torch.equal(result[sizes >= least], wanted[sizes >= least])


def test_divisions(device):
    bits = torch.randint(0, 0x7F800000, (4096,), generator=torch.Generator().manual_seed(3))
    check_divisions(bits.int().view(torch.float32).to(device))


@pytest.mark.gpu
def test_divisions_of_all_sizes():
    """Of all 2,139,095,040 floats that are neither negative nor infinite nor NaN."""
    each = 0x7F800000 // 64
    for i in range(64):
        bits = torch.arange(i * each, (i + 1) * each, dtype=torch.int32, device="cuda")
        check_divisions(bits.view(torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("peak", [1.0, 1e-5, 2.0**40])
def test_int4_of_all_numbers_on_a_gpu(dtype: torch.dtype, peak: float):
    """Up to a peak, beside so many zeros that a third of the peaks are clipped."""
    x = patterns(dtype).float()
    peaks = min(peak, torch.finfo(dtype).max / 2) * (1 + torch.arange(16)[:, None] / 16)
    rows = torch.where(x.abs() > peaks, peaks * x.sign(), x).to(dtype)
    rows = F.pad(rows, (0, 3 * rows.shape[1]))
    wanted = reference.quantize(rows, "int4")
    codes, scale, _ = triton_quantize.quantize(rows.cuda(), "int4", 0, False)
    assert set(wanted.codes.unique().tolist()) == set(range(-8, 8)) or peak == 1e-5
    assert torch.equal(codes[:, : rows.shape[1]].cpu(), wanted.codes)
    assert same_bits(scale, wanted.scale[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("peak", [1.0, 2.0**-107, 2.0**-122, 2.0**99, 2.0**100, 2.0**123, 2.0**127])
@pytest.mark.parametrize("activation", ["int8", "int4", "fp4"])
def test_kernel_quantises_all_of_bf16(activation: str, peak: float, device):
    x = rows_up_to(peak)
    wanted = reference.quantize(x.to(device), activation)
    codes, scale, total = triton_quantize.quantize(x.to(device), activation, 0, False)
    assert torch.equal(codes[:, : x.shape[1]], wanted.codes)
    assert same_bits(scale, wanted.scale[:, 0])
    assert torch.equal(total, wanted.codes.sum(-1, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("peak", [1.0, 2.0**-107, 2.0**-122, 2.0**-125, 2.0**99, 2.0**100, 2.0**127])
def test_product_quantises_all_of_bf16_to_fp4(peak: float, device):
    """From huge tokens to denormals. The weights have a diagonal of ones."""
    x = rows_up_to(peak)
    size = patterns(torch.bfloat16).float().abs()
    x = x[:, (size > peak / 64) & (size <= 2 * peak)]  # of what is smaller all codes are 0
    columns = x.shape[1]
    assert columns > 500
    weight = TernaryWeight.of(Ternary(torch.eye(columns, dtype=torch.int8), torch.tensor(1.0)), device)
    for row in (*x.split(1), torch.zeros_like(x[:1])):
        wanted = reference.quantize(row, "fp4").dequantize(row.dtype)
        assert same_bits(ternary_linear(row.to(device), weight, activation="fp4"), wanted)


@pytest.mark.parametrize("share", [0.001, 0.25, 1.0])
def test_kernel_keeps_the_first_of_equal_magnitudes(share: float, device):
    x = torch.tensor([1.0, -2.0, 3.0, -3.0, 0.0])[torch.arange(300) * 7 % 5].bfloat16()[None]
    codes, _, _ = triton_quantize.quantize(x.to(device), "top_k_int8", kept(300, share), False)
    assert torch.equal(codes[:, :300].cpu(), quantizers.top_k_int8(x, share).codes)


@dtypes
@pytest.mark.parametrize("fragments", [0, 1], ids=["rows", "fragments"])
def test_kernel_counts_all_of_a_long_token(dtype: torch.dtype, fragments: int, device):
    """As many as there can be in every field that they are counted in, and one less."""
    alike = torch.full((1, 2048), -0.7, dtype=dtype)
    larger = alike.clone()
    larger[0, ::2] = torch.nextafter(alike, 2 * alike)[0, ::2]
    for x, share in ((alike, 0.5), (alike, 1.0), (larger, 0.5), (larger, 0.4999), (larger, 0.5005)):
        codes, _, total = triton_quantize.quantize(
            x.to(device), "top_k_int8", kept(2048, share), False, blocks=fragments
        )
        wanted = quantizers.top_k_int8(x, share).codes
        assert int(total[0]) == int(wanted.sum())
        if not fragments:
            assert torch.equal(codes.cpu(), wanted)


# The kernels that multiply. Steps of 256 columns, tiles of 16 rows; neither is filled.

SHAPES = [(16, 256, None), (17, 300, 300), (40, 600, None), (5, 33, 64)]


def on_a_chessboard(*others: object) -> list[tuple[object, ...]]:
    """Every shape with all the others; the memory that is poisoned holds zeros and ones by turns."""
    return [
        (*shape, other, (0x00, 0xFF)[(i + j) % 2])
        for i, shape in enumerate(SHAPES)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(
    ("out", "columns", "group", "activation", "poison"),
    on_a_chessboard(*ACTIVATIONS),
    indirect=["poison"],
)
def test_one_token(out: int, columns: int, group: int | None, activation: str, device, poison):
    weights = ternary(out, columns, group)
    bias = gaussian(out, seed=2).bfloat16() if out % 2 else None
    x = tokens(1, columns)
    [y] = triton_one_token.one_token(
        x.to(device), [TernaryWeight.of(weights, device)], [None if bias is None else bias.to(device)],
        activation, False, kept(columns),
    )  # fmt: skip
    assert same_bits(y, reference.ternary_linear(x, weights, bias, activation=activation))


LAUNCHES = [
    Launch(1, 1), Launch(1, 3), Launch(2, 2), Launch(4, 1), Launch(2, 1, fused=False, quantizer_pdl=True),
    Launch(1, 3, stages=1), Launch(1, 4, stages=5), Launch(2, 4, stages=3), Launch(1, 2, stages=40),
    Launch(1, 2, stages=3, trigger_next_early=False), Launch(2, 1, trigger_next_early=False),
    Launch(1, 4, stages=2, prologue=1), Launch(1, 3, stages=2, prologue=5),
    Launch(2, 3, stages=3, prologue=40), Launch(2, 2, stages=1, prologue=2, fused=False),
    Launch(2, 4, stages=1, prologue=3, trigger_next_early=False),
    Launch(1, 3, bits=False), Launch(2, 2, stages=1, prologue=2, bits=False),
    Launch(2, 1, fused=False, bits=False),
]  # fmt: skip


@pytest.mark.parametrize(("launch", "dtype"), list(zip(LAUNCHES, itertools.cycle(DTYPES.values()))), ids=str)
def test_launches_of_one_token_agree(launch: Launch, dtype: torch.dtype, device):
    weights = ternary(50, 520)
    x = tokens(1, 520, dtype=dtype)
    [y] = triton_one_token.one_token(
        x.to(device), [TernaryWeight.of(weights, device)], [None], "int8", True, launch=launch
    )
    assert same_bits(y, reference.ternary_linear(x, weights, clamped=True))


@pytest.mark.parametrize("bits", [True, False], ids=["bits", "bytes"])
@pytest.mark.parametrize("columns", [512, 1000])
@activations
def test_words_that_are_taken_ahead_of_codes(activation: str, columns: int, bits: bool, device):
    several, x = [ternary(n, columns) for n in (50, 16, 70)], tokens(1, columns)
    ys = triton_one_token.one_token(
        x.to(device), [TernaryWeight.of(weights, device) for weights in several], [None] * 3, activation,
        False, kept(columns), Launch(2, 3, stages=2, prologue=3, bits=bits),
    )  # fmt: skip
    for y, weights in zip(ys, several, strict=True):
        assert same_bits(y, reference.ternary_linear(x, weights, activation=activation))


@dtypes
@pytest.mark.parametrize("peak", [0.0, 6e-5, 0.5, 128.0, 3e4, 1e20, 1e32])
def test_one_token_of_int4_of_any_size(peak: float, dtype: torch.dtype, device):
    """Also of those whose mean a kernel begins to add up with too small a unit."""
    peak = min(peak, torch.finfo(dtype).max)
    weights = ternary(16, 300)
    x = gaussian(1, 300, seed=5).clamp(-1, 1)
    x[0, 7] = -1
    x[0, 8:40] *= torch.exp2(-torch.arange(32))
    x = (x * peak).to(dtype)
    [y] = triton_one_token.one_token(
        x.to(device), [TernaryWeight.of(weights, device)], [None], "int4", False, launch=Launch(2, 1)
    )
    assert same_bits(y, reference.ternary_linear(x, weights, activation="int4"))


@triton.jit
def _places_of_words(out, STAGES: tl.constexpr, NUM_WARPS: tl.constexpr):
    t = tl.arange(0, 32 * NUM_WARPS)
    to, at, then = smem_ring.make(t // 32, t % 32 // 4, t % 4, STAGES, NUM_WARPS, False)
    tl.store(out + t, to)
    tl.store(out + 32 * NUM_WARPS + t, at)
    tl.store(out + 64 * NUM_WARPS + t, then)


def test_a_ring_gives_the_words_of_matrix_instructions(device):
    """What a warp copies and what `ldmatrix` loads, by address; no two pieces of a matrix share banks."""
    places = torch.zeros(3, 64, dtype=torch.int32, device=device)
    _places_of_words[(1,)](places, 3, 2, num_warps=2)
    for warp, (to, at, then) in enumerate(places.cpu().view(3, 2, 32).transpose(0, 1)):
        memory = torch.full((2 * 3 * 256,), -1)
        for thread in range(32):
            r, q = divmod(thread, 4)
            for behind, row in ((0, r), (512, r + 8)):
                first = (int(to[thread]) + behind) // 4
                memory[first : first + 4] = 16 * row + 4 * q + torch.arange(4)
        for first_word, addresses in ((0, at), (8, then)):
            matrices = addresses.view(4, 8)
            assert all(len(set((matrix // 16 % 8).tolist())) == 8 for matrix in matrices)
            for m, (row, word) in enumerate(((0, 0), (8, 0), (0, 4), (8, 4))):
                loaded = memory[matrices[m][:, None] // 4 + torch.arange(4)]  # thread (r, q) gets [r, q]
                wanted = 16 * (row + torch.arange(8)[:, None]) + first_word + word + torch.arange(4)
                assert torch.equal(loaded, wanted), (warp, m)


def test_one_token_by_what_it_cannot_be(device):
    weight, x = TernaryWeight.of(ternary(16, 256), device), tokens(1, 256).to(device)
    beside = replace(weight, words=weight.words.new_zeros(257)[1:].view(weight.words.shape))
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        triton_one_token.one_token(x, [beside], [None], "int8", False)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        triton_one_token.one_token(x, [weight], [None], "int8", False, launch=Launch(16, 48))


@pytest.mark.parametrize("limit", [4, 8])
def test_one_long_token(limit: int, device, monkeypatch):
    """More turns than words are loaded ahead, and than a program quantises itself."""
    monkeypatch.setattr(launches, "FUSED_STEPS", limit)
    columns = 2500 if limit == 4 else 2000
    weights, x = ternary(16, columns), tokens(1, columns)
    [y] = triton_one_token.one_token(
        x.to(device), [TernaryWeight.of(weights, device)], [None], "int4", False,
        launch=Launch(1, 1),
    )  # fmt: skip
    assert same_bits(y, reference.ternary_linear(x, weights, activation="int4"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("activation", ["int8", "int4", "fp4"])
def test_one_token_that_is_not_finite(bad: float, activation: str, device):
    x = tokens(1, 100)
    x[0, 7] = bad
    [y] = triton_one_token.one_token(
        x.to(device), [TernaryWeight.of(ternary(16, 100), device)], [None], activation, False
    )
    assert y.isnan().all()


@pytest.mark.parametrize(
    ("out", "columns", "group", "rows", "poison"),
    on_a_chessboard(2, 8, 19),
    indirect=["poison"],
)
def test_few_tokens(out: int, columns: int, group: int | None, rows: int, device, poison):
    weights = ternary(out, columns, group)
    bias = gaussian(out, seed=2).bfloat16() if out % 2 else None
    x = tokens(rows, columns)
    x[1, 3] = torch.nan
    activation = ACTIVATIONS[rows % 4]
    y = triton_few_tokens.few_tokens(
        x.to(device), TernaryWeight.of(weights, device), None if bias is None else bias.to(device),
        activation, False, kept(columns),
    )  # fmt: skip
    assert same_bits(y, reference.ternary_linear(x, weights, bias, activation=activation))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "columns", "rows", "dtype"),
    [
        (FewTokensLaunch(1, 1), 1024, 5, torch.float16), (FewTokensLaunch(2, 2), 520, 18, torch.float32),
        (FewTokensLaunch(4, 4), 520, 5, torch.float16),
        (FewTokensLaunch(1, 2, stages=3), 1024, 18, torch.float32),
        (FewTokensLaunch(1, 1, accumulator_sets=1), 520, 18, torch.float16),
        (FewTokensLaunch(2, 1, quantizer_pdl=True), 1024, 5, torch.float32),
        (FewTokensLaunch(1, 1, int4x2=False, trigger_next_early=False), 520, 18, torch.float32),
        (FewTokensLaunch(2, 2, stages=8, accumulator_sets=1), 520, 5, torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_launches_of_few_tokens_agree(
    launch: FewTokensLaunch, columns: int, rows: int, dtype: torch.dtype, device
):
    weights, x = ternary(50, columns), tokens(rows, columns, dtype=dtype)
    y = triton_few_tokens.few_tokens(
        x.to(device), TernaryWeight.of(weights, device), None, "int4", False, launch=launch
    )
    assert same_bits(y, reference.ternary_linear(x, weights, activation="int4"))


@pytest.mark.parametrize(
    ("out", "columns", "group"),
    [*SHAPES, (50, 600, 128), (33, 300, 100), (20, 96, 16), (17, 37, 5), (16, 520, 260)],
)
@pytest.mark.parametrize("rows", [1, 19])
def test_many_tokens(out: int, columns: int, group: int | None, rows: int, device, poison):
    weights = ternary(out, columns, group)
    bias = gaussian(out, seed=2).bfloat16() if out % 2 else None
    x = tokens(rows, columns)
    activation = ACTIVATIONS[(out + rows) % 4]
    weight = TernaryWeight.of(weights, device)
    y = triton_matrix.many_tokens(
        x.to(device), weight, None if bias is None else bias.to(device), activation, False, kept(columns),
        launch=ManyTokensLaunch(64, 64, 128, 4, 2), chunk=2 * 16 * 256 * weight.words.shape[1],
    )  # fmt: skip
    assert same_bits(y, reference.ternary_linear(x, weights, bias, activation=activation))


@dtypes
@pytest.mark.parametrize("groups", [(None, None), (300, 300), (300, None), (None, 300)], ids=str)
def test_gate_multiplies_and_skips(groups: tuple[int | None, int | None], dtype: torch.dtype, device, poison):
    """Weights of closed rows are not looked at: here they are spoilt."""
    gate, up = ternary(40, 300, groups[0]), ternary(40, 300, groups[1], seed=5)
    x = tokens(1, 300, dtype=dtype)
    gated = reference.ternary_linear(x, gate, activation="int4")
    wanted = reference.relu2_glu(x, gate, up)
    assert 5 < int((wanted == 0).sum()) < 35
    weight = TernaryWeight.of(up)
    closed = torch.zeros(48, dtype=torch.bool)
    closed[:40] = gated[0] <= 0
    weight.words.transpose(1, 2)[closed.view(3, 16)] = -1
    for tiles in (1, 2):
        y = triton_one_token.relu2_glu(
            x.to(device), TernaryWeight.of(gate, device), weight.to(device), "int4", False,
            launch=Launch(2, tiles),
        )  # fmt: skip
        assert same_bits(y, wanted)


@pytest.mark.parametrize(
    "launch",
    [
        Launch(2, 1), Launch(1, 2, stages=40), Launch(2, 2, bits=False),
        Launch(2, 2, skips_closed_rows=False), Launch(1, 4, stages=3, prologue=2, skips_closed_rows=False),
        Launch(2, 6, stages=1, skips_closed_rows=False, bits=False),
        Launch(2, 2, stages=1, prologue=1, trigger_next_early=False, skips_closed_rows=False),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("activation", "group"), [("int8", None), ("int4", 300), ("fp4", None), ("top_k_int8", 300)]
)
def test_a_gated_unit_of_any_activation(activation: str, group: int | None, launch: Launch, device, poison):
    gate, up, x = ternary(40, 300, group), ternary(40, 300, group, seed=5), tokens(1, 300)
    y = triton_one_token.relu2_glu(
        x.to(device),
        TernaryWeight.of(gate, device),
        TernaryWeight.of(up, device),
        activation,
        False,
        kept(300),
        launch,
    )
    wanted = reference.relu2_glu(x, gate, up, activation=activation)
    assert 5 < int((wanted == 0).sum()) < 35 and same_bits(y, wanted)


@pytest.mark.parametrize("limit", [1, 8], ids=["quantised before", "in the product"])
def test_a_gated_unit_of_many_turns(limit: int, device, monkeypatch):
    monkeypatch.setattr(launches, "FUSED_STEPS", limit)
    gate, up, x = ternary(16, 2500), ternary(16, 2500, seed=5), tokens(1, 2500)
    y = triton_one_token.relu2_glu(
        x.to(device), TernaryWeight.of(gate, device), TernaryWeight.of(up, device), "int8", False,
        launch=Launch(1, 1),
    )  # fmt: skip
    assert same_bits(y, reference.relu2_glu(x, gate, up, activation="int8"))


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("activation", ["int8", "int4", "fp4"])
def test_a_gate_that_is_not_finite(activation: str, skips: bool, device):
    x = tokens(1, 100)
    x[0, 7] = torch.inf
    weight, launch = TernaryWeight.of(ternary(16, 100), device), Launch(1, 2, skips_closed_rows=skips)
    assert (
        triton_one_token.relu2_glu(x.to(device), weight, weight, activation, False, launch=launch)
        .isnan()
        .all()
    )


def test_a_gated_unit_by_what_it_cannot_be(device):
    weight, x = TernaryWeight.of(ternary(16, 256), device), tokens(1, 256).to(device)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        triton_one_token.relu2_glu(x, weight, weight, "int8", False, launch=Launch(16, 24))
    with pytest.raises(ValueError, match="an even number"):
        triton_one_token.relu2_glu(
            x, weight, weight, "int8", False, launch=Launch(1, 3, skips_closed_rows=False)
        )


@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("kind", ["a tensor", "rows", "biases"])
def test_one_token_and_several_weights(tiles: int, kind: str, device, poison):
    """As queries, keys and values have them: fewer rows of the later ones, or more."""
    x = tokens(1, 300)
    outs = (70, 16, 33, 100)
    weights = [ternary(out, 300, 300 if kind == "rows" else None, seed=out) for out in outs]
    biases = [gaussian(out, seed=out) if kind == "biases" else None for out in outs]
    ys = triton_one_token.one_token(
        x.to(device), [TernaryWeight.of(weight, device) for weight in weights],
        [None if bias is None else bias.to(device) for bias in biases], "int4", False,
        launch=Launch(2, tiles),
    )  # fmt: skip
    for y, weight, bias in zip(ys, weights, biases, strict=True):
        assert same_bits(y, reference.ternary_linear(x, weight, bias, activation="int4"))


# The operators


def cases() -> list[tuple[object, ...]]:
    weight, groups = TernaryWeight.of(ternary(20, 70)), TernaryWeight.of(ternary(20, 70, 16))
    x, bias = tokens(2, 3, 70), torch.ones(20)
    return [
        (x, None, *torch_ops._arguments(weight), "int8", 0.5, False),
        (x[0, 0], bias, *torch_ops._arguments(groups), "top_k_int8", 0.3, True),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_opcheck(number: int):
    opcheck(torch.ops.neuzip.ternary_linear.default, cases()[number])


def test_opcheck_of_the_gated_unit():
    gate, up = TernaryWeight.of(ternary(20, 70)), TernaryWeight.of(ternary(20, 70, 70))
    arguments = *torch_ops._arguments(gate), up.words, up.scale, up.group, "int4", False
    opcheck(torch.ops.neuzip.ternary_relu2_glu.default, (tokens(2, 70), *arguments))


def test_torch_compile():
    weight, x = TernaryWeight.of(ternary(20, 70)), tokens(3, 70)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: ternary_linear(x, weight, activation="int4").square(), backend="aot_eager", fullgraph=True
    )
    assert same_bits(compiled(x), ternary_linear(x, weight, activation="int4").square())


# What needs a GPU


def exact_on_gpu(x: Tensor, weights: Ternary, activation: str) -> Tensor:
    """The reference for a scale a tensor or row, with exact sums in fp64."""
    quantized = reference.quantize(x, activation)
    sums = quantized.codes.double() @ weights.codes.double().T
    return (sums.float() * (quantized.scale * weights.scale.reshape(-1))).to(x.dtype)


@pytest.mark.gpu
@activations
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64, 65, 300, 2048])
@pytest.mark.parametrize(
    ("out", "columns"), [(4096, 4096), (2048, 14336), (14336, 1024), (1031, 3200), (515, 28672), (100, 65536)]
)
def test_large_products(out: int, columns: int, rows: int, activation: str, device):
    weights = ternary(out, columns, columns if out % 2 else None)
    weights = Ternary(weights.codes.to(device), weights.scale.to(device), weights.group)
    x = tokens(rows, columns).to(device)
    y = ternary_linear(x, TernaryWeight.of(weights), activation=activation)
    assert same_bits(y, exact_on_gpu(x, weights, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("group", [128, 100], ids=str)
def test_large_products_of_groups(group: int, rows: int, device):
    weights = ternary(700, 4096, group)
    x = tokens(rows, 4096)
    y = ternary_linear(x.to(device), TernaryWeight.of(weights, device))
    assert same_bits(y, reference.ternary_linear(x, weights))


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_the_cpu(device):
    """The operators, the gated unit and strided inputs included."""
    for group in (None, 600, 64):
        gate, up = (TernaryWeight.of(ternary(70, 600, group, seed)) for seed in (0, 1))
        bias = gaussian(70, 2, seed=4)
        for rows in (0, 1, 3, 70):
            x = tokens(rows, 1200)[:, ::2] if rows else torch.zeros(0, 600).bfloat16()
            there = ternary_linear(x.to(device), gate.to(device), bias.to(device)[:, 1])
            assert same_bits(there, ternary_linear(x, gate, bias[:, 1]))
            for activation in ACTIVATIONS:
                there = relu2_glu(x.to(device), gate.to(device), up.to(device), activation=activation)
                assert same_bits(there, relu2_glu(x, gate, up, activation=activation))
            both = ternary_linears(x.to(device), [gate.to(device), up.to(device)])
            assert all(same_bits(y, ternary_linear(x, w)) for y, w in zip(both, (gate, up), strict=True))
            unaligned = torch.zeros(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(x.shape).copy_(x)
            assert same_bits(ternary_linear(unaligned, gate.to(device)), ternary_linear(x, gate))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_kernels_that_start_early_wait_for_what_they_read(rows: int, device):
    """A chain of products, each the input of the next, in a graph that is replayed."""
    weights = [TernaryWeight.of(ternary(2048, 2048, seed=seed), device) for seed in range(4)]
    x = torch.zeros(rows, 2048, dtype=torch.bfloat16, device=device)

    def chain(wait: bool) -> Tensor:
        y = x
        for i in range(12):
            y = ternary_linear(y, weights[i % 4], activation=ACTIVATIONS[i % 4])
            if i % 3 == 2:
                y = relu2_glu(y, weights[0], weights[1])
                y = y / y.abs().amax()
            if wait:
                torch.cuda.synchronize()
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for seed in range(20):
        x.copy_(gaussian(rows, 2048, seed=seed))
        graph.replay()
        assert same_bits(captured, chain(True))
