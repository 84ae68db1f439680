"""Yardsticks: what each format leaves of weights, the bits it takes, and their checkpoints."""

from __future__ import annotations

import ctypes
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.sweep.savings import savings
from neuzip.eval.yardsticks import floats, table
from neuzip.eval.yardsticks.checkpoint import write_restored
from neuzip.eval.yardsticks.names import NAMES, parse_yardsticks
from neuzip.eval.yardsticks.table import YARDSTICKS
from neuzip.formats.checkpoint import find_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(rows: int, width: int) -> torch.Tensor:
    """Weights like those of a trained matrix: bell-shaped, rows of different spread, some outliers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, width, generator=generator)
    return 0.02 * values * torch.exp(0.5 * torch.randn(rows, 1, generator=generator) + 0.1 * values)


# Next to other implementations


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0"])
def test_ggml_formats_are_those_of_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    matrix = weights(8, 256)
    expected = gguf.quants.dequantize(gguf.quants.quantize(matrix.numpy(), kind), kind)
    assert torch.equal(YARDSTICKS[name].restored(matrix), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("name", "function", "size"),
    [("q4_0", "q4_0", 18), ("q5_0", "q5_0", 22), ("q6_k", "q6_K", 210), ("q8_0", "q8_0", 34),
     ("mxfp4", "mxfp4", 17)],
)  # fmt: skip
def test_formats_are_those_of_llama_cpp(name: str, function: str, size: int) -> None:
    """xllamacpp exports GGML's reference functions; `size` is the bytes of a block."""
    xllamacpp = pytest.importorskip("xllamacpp.xllamacpp")
    library = ctypes.CDLL(xllamacpp.__file__)
    matrix = weights(8, 512)
    blocks = matrix.numel() // (256 if name == "q6_k" else 32)
    assert YARDSTICKS[name].bits(matrix.shape) == 8 * size * blocks
    packed, expected = np.zeros(blocks * size, np.uint8), np.zeros((8, 512), np.float32)
    count = ctypes.c_int64(matrix.numel())
    values, result = (ctypes.c_void_p(array.ctypes.data) for array in (matrix.numpy(), expected))
    code = ctypes.c_void_p(packed.ctypes.data)
    getattr(library, f"quantize_row_{function}_ref")(values, code, count)
    getattr(library, f"dequantize_row_{function}")(code, result, count)
    assert torch.equal(YARDSTICKS[name].restored(matrix), torch.from_numpy(expected))


# By hand


def test_levels_of_nf4_are_quantiles_of_the_normal_distribution() -> None:
    """The paper: quantiles of each side on its own, from an offset at the end to 1/2; both share the 0."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    ppf = NormalDist().inv_cdf
    positive = [ppf(offset + (0.5 - offset) * i / 8) for i in range(8)]
    negative = [-ppf(offset + (0.5 - offset) * i / 7) for i in range(7)]
    levels = np.sort([*negative, 0.0, *positive]) / max(positive)
    assert np.allclose(floats.NF4, levels, rtol=0, atol=1e-6)


def test_nf4_rounds_to_its_levels_and_its_scales_twice() -> None:
    matrix = weights(3, 100)  # 300 weights: 5 blocks that run on from row to row, the last of 44
    flat = np.append(matrix.numpy().ravel(), np.zeros(20)).reshape(5, 64).astype(np.float64)
    scales = np.abs(flat).max(1)
    levels = floats.dynamic_levels().double().numpy()
    mean, span = scales.mean(), np.abs(scales - scales.mean()).max()
    stored = mean + span * levels[np.abs((scales - mean)[:, None] / span - levels).argmin(1)]
    nearest = np.abs((flat / scales[:, None])[..., None] - np.array(floats.NF4)).argmin(-1)
    expected = (np.array(floats.NF4)[nearest] * stored[:, None]).ravel()[:300].reshape(3, 100)
    assert np.allclose(YARDSTICKS["nf4"].restored(matrix).numpy(), expected, rtol=1e-5, atol=0)


def test_dynamic_levels_have_twice_as_many_in_each_decade() -> None:
    levels = floats.dynamic_levels().numpy()
    assert len(set(levels)) == 256 and levels[-1] == 1 and 0 in levels
    decades = [((levels < -(10.0 ** (i - 7))) & (levels > -(10.0 ** (i - 6)))).sum() for i in range(7)]
    assert decades == [2**i for i in range(7)]


def test_e2m1_is_the_nearest_level() -> None:
    x = torch.linspace(-7, 7, 1121)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.abs(x.numpy())[:, None] - levels)
    nearest = [row == row.min() for row in distance]
    for value, tied in zip(floats.e2m1(x).abs().tolist(), nearest, strict=True):
        codes = np.flatnonzero(tied)
        assert value == levels[codes[0] if len(codes) == 1 else codes[codes % 2 == 0][0]]


def test_fp4_and_fp8_scales() -> None:
    matrix = weights(2, 32)
    largest = matrix.abs().amax().item()
    per_16 = matrix.reshape(4, 16).abs().amax(1)
    of_tensor = largest / (6 * 448)
    scales = (per_16 / 6 / of_tensor).to(torch.float8_e4m3fn).float() * of_tensor
    expected = floats.e2m1(matrix.reshape(4, 16) / scales[:, None]) * scales[:, None]
    assert torch.allclose(YARDSTICKS["nvfp4"].restored(matrix), expected.reshape(2, 32), rtol=1e-5)
    eight = YARDSTICKS["fp8"].restored(matrix)
    assert eight.abs().amax().item() == pytest.approx(largest, rel=1e-6)
    spacing = torch.ldexp(torch.full_like(matrix, 2.0**-4), torch.frexp(matrix * (448 / largest)).exponent)
    assert ((eight - matrix).abs() <= spacing.clamp(min=2.0**-9) * largest / 448 / 2 * (1 + 1e-5)).all()


def test_integers_round_to_the_nearest_code() -> None:
    matrix = weights(3, 64)
    scale = np.float16(matrix.abs().amax(1).numpy() / 127).astype(np.float64)[:, None]
    expected = np.rint(matrix.numpy() / scale).clip(-127, 127) * scale
    assert np.allclose(YARDSTICKS["int8"].restored(matrix).numpy(), expected, rtol=1e-6)
    restored = YARDSTICKS["int4g32"].restored(matrix).reshape(6, 32)
    for left, group in zip(restored, matrix.reshape(6, 32), strict=True):
        step = (group.max().clamp(min=0) - group.min().clamp(max=0)).item() / 15
        codes = (left / step).round()
        assert len(set(codes.tolist())) <= 16 and 0 <= codes.max() <= 15 and codes.max() - codes.min() <= 15
        assert (left - group).abs().max() <= step * 1.01  # the ends of the range may be half a step off


# All of them


@pytest.mark.parametrize(
    ("name", "whole", "ragged"),
    [("int8", 8 + 16 / 512, 8 * 99 + 3 * 16), ("fp8", 8 + 32 / 2048, 8 * 99 + 32),
     ("int4g32", 4.625, 4 * 99 + 6 * 20), ("int4g128", 4.15625, 4 * 99 + 3 * 20),
     ("nf4", 4.125 + 2 * 32 / 2048, 4 * 99 + 2 * 8 + 2 * 32), ("mxfp4", 4.25, 4 * 99 + 6 * 8),
     ("nvfp4", 4.5 + 32 / 2048, 4 * 99 + 9 * 8 + 32), ("q4_0", 4.5, 4 * 99 + 6 * 16),
     ("q5_0", 5.5, 5 * 99 + 6 * 16), ("q6_k", 6.5625, 6 * 99 + 9 * 8 + 3 * 16),
     ("q8_0", 8.5, 8 * 99 + 6 * 16)],
)  # fmt: skip
def test_bits_are_counted_exactly(name: str, whole: float, ragged: int) -> None:
    """Of 4 rows of 512 weights, per weight; and of 3 rows of 33: short blocks pay for whole scales."""
    assert YARDSTICKS[name].bits((4, 512)) == whole * 2048
    assert YARDSTICKS[name].bits((2, 2, 512)) == whole * 2048
    assert YARDSTICKS[name].bits((3, 33)) == ragged
    assert YARDSTICKS[name].bits((0, 33)) == YARDSTICKS[name].bits((3, 0)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_edges(name: str) -> None:
    yardstick = YARDSTICKS[name]
    for shape in ((1, 1), (3, 31), (2, 2, 33), (2, 257)):
        matrix = weights(shape[0] * (shape[1] if len(shape) == 3 else 1), shape[-1]).reshape(shape)
        left = yardstick.restored(matrix)
        assert left.shape == shape and left.dtype == torch.float32
        error = ((left - matrix).square().mean() / matrix.square().mean()).sqrt().item()
        assert error < 0.25  # of MXFP4, in which a lone weight may saturate
        assert torch.equal(yardstick.restored(matrix.to(torch.float64)), left)
    assert torch.equal(yardstick.restored(torch.zeros(2, 40)), torch.zeros(2, 40))
    assert yardstick.restored(torch.zeros(0, 40)).shape == (0, 40)
    tiny = torch.zeros(2, 40)
    tiny[0, 0] = 1e-42
    assert yardstick.restored(tiny).isfinite().all()
    with pytest.raises(ValueError, match="takes matrices"):
        yardstick.restored(torch.zeros(3))


@pytest.mark.parametrize("name", NAMES)
def test_large_tensors_are_restored_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weights(7, 40)
    whole = YARDSTICKS[name].restored(matrix)
    monkeypatch.setattr(table, "PIECE", 90)
    assert torch.equal(YARDSTICKS[name].restored(matrix), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_restores_what_a_cpu_does(name: str) -> None:
    """But for rounding of products: a quotient next to the middle of two codes, or a scale of Q6_K."""
    matrix = weights(64, 512)
    ours, expected = YARDSTICKS[name].restored(matrix.cuda()).cpu(), YARDSTICKS[name].restored(matrix)
    close = torch.isclose(ours, expected, rtol=1e-5, atol=0)
    assert close.float().mean().item() > 0.99


@pytest.mark.parametrize("text", ["", "q3", "all,q4_0"])
def test_what_is_no_yardstick_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="`yardsticks`"):
        parse_yardsticks(text)


# A checkpoint


def name_of(tensor: SourceTensor) -> str:
    return tensor.name


def test_a_checkpoint_of_what_is_left(tmp_path: Path) -> None:
    yardstick = YARDSTICKS["q4_0"]
    made = write_restored(CHECKPOINT, tmp_path / "q4_0", yardstick, torch.device("cpu"), widen=True)
    bits = 0
    with FolderSource(CHECKPOINT) as source, FolderSource(tmp_path / "q4_0") as restored:
        before_and_after = zip(
            *(sorted(one.tensors(), key=name_of) for one in (source, restored)), strict=True
        )
        for before, after in before_and_after:
            is_matrix = len(before.info.shape) > 1
            assert (before.name, before.info.shape) == (after.name, after.info.shape)
            assert after.info.dtype == ("F32" if is_matrix else "BF16")
            bits += yardstick.bits(before.info.shape) if is_matrix else 16 * before.info.numel
        assert made.bytes == -(-bits // 8)
        assert made.weights == sum(tensor.info.numel for tensor in source.tensors())
    assert made.largest_relative_error == 1
    assert find_checkpoint(tmp_path / "q4_0").others == find_checkpoint(CHECKPOINT).others


def test_a_compressed_checkpoint_is_no_source(tmp_path: Path) -> None:
    from neuzip.compress import compress

    compress(CHECKPOINT, tmp_path / "small")
    with pytest.raises(NeuzipError, match="is compressed already"):
        write_restored(tmp_path / "small", tmp_path / "q4_0", YARDSTICKS["q4_0"], torch.device("cpu"))
    assert not (tmp_path / "q4_0").exists()


# Next to quantisation


def test_savings_are_interpolated_between_measured_points() -> None:
    curve = [("a", 3.0, 1e-1), ("b", 5.0, 1e-3), ("c", 4.0, 1e-2)]
    (inside, below, none) = savings(curve, [("x", 5.0, 1e-1**1.5), ("y", 8.0, 1e-4), ("z", 4.5, 0.0)])
    assert inside.quantized_bits == pytest.approx(3.5) and inside.saved == pytest.approx(0.3)
    assert inside.quantized_kld == pytest.approx(1e-3)
    assert below.quantized_bits is below.saved is below.quantized_kld is None, "nothing is extrapolated"
    assert none.quantized_bits is None and none.quantized_kld == pytest.approx(1e-1**2.5)
    assert savings([], [("x", 5.0, 0.1)])[0].saved is None
