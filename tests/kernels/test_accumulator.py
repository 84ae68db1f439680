"""Sums in the 22 bits of the FP8 matrix instruction: against fractions, and in attention."""

from __future__ import annotations

import importlib
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import compile_only
import pytest
import torch
from torch import Tensor

from neuzip.kernels.attention.accumulator import accumulate, cut
from neuzip.kernels.attention.reference import exact_attention, quantized_attention
from neuzip.kernels.attention.similarity import similarity


def cut_fraction(x: Fraction, unit: Fraction | None = None) -> Fraction:
    """A fraction cut to 13 bits after its first, or to multiples of a unit."""
    if x == 0:
        return x
    if unit is None:
        unit = Fraction(2) ** (exponent(x) - 13)
    return math.copysign(1, x) * (abs(x) // unit) * unit if x > 0 else -((-x) // unit) * unit


def exponent(x: Fraction) -> int:
    return math.frexp(abs(float(x)))[1] - 1


def summed(p: list[float], v: list[float], start: float, alignment: str) -> float:
    """The definition, one product at a time, in fractions."""
    total = cut_fraction(Fraction(start))
    for first in range(0, len(p), 32):
        products = [Fraction(a) * Fraction(b) for a, b in zip(p[first:][:32], v[first:][:32], strict=True)]
        if alignment == "aligned" and any([total, *products]):
            unit = Fraction(2) ** (max(exponent(x) for x in (total, *products) if x) - 13)
            total, *products = (cut_fraction(x, unit) for x in (total, *products))
        total = cut_fraction(total + sum(products))
    return float(total)


def e4m3(*shape: int, seed: int) -> Tensor:
    """Numbers of E4M3 of all magnitudes, with zeros of both signs, denormals and the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-10, 8, shape, generator=generator)
    )
    x.view(-1)[:5] = torch.tensor([0.0, -0.0, 2.0**-9, -448.0, 448.0])[: x.numel()]
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("alignment", ["whole", "aligned"])
@pytest.mark.parametrize("keys", [0, 1, 31, 32, 33, 100])
def test_sums_are_those_of_fractions(keys: int, alignment: Any):
    p, v = e4m3(5, keys, seed=keys), e4m3(keys, 7, seed=keys + 1)
    start = torch.randn(5, 7, generator=torch.Generator().manual_seed(3)) * 300
    for first in (None, start):
        given = accumulate(p, v, first, alignment)
        assert given.dtype == torch.float32 and given.shape == (5, 7)
        for row in range(5):
            for column in range(7):
                begin = 0.0 if first is None else float(first[row, column])
                wanted = summed(p[row].tolist(), v[:, column].tolist(), begin, alignment)
                assert float(given[row, column]) == wanted, (row, column)


def test_models_of_the_instruction_differ_where_products_are_small():
    """128 and 32 products of 2^-7: their sum survives beside 128 only if products are not cut first."""
    p, v = torch.full((1, 32), 2.0**-3), torch.full((32, 1), 2.0**-4)
    start = torch.full((1, 1), 128.0)
    assert accumulate(p, v, start).item() == 128.25
    assert accumulate(p, v, start, "aligned").item() == 128.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cutting(dtype: torch.dtype):
    x = torch.tensor(
        [1 + 2**-13, 1 + 2**-13 + 2**-20, -(1 + 2**-14), 0.0, -0.0, math.inf, -math.inf], dtype=dtype
    )
    wanted = [1 + 2**-13, 1 + 2**-13, -1.0, 0.0, -0.0, math.inf, -math.inf]
    assert cut(x).tolist() == wanted and torch.equal(cut(x).signbit(), x.signbit())
    assert cut(x.expand(3, 7).T).tolist() == cut(x).expand(3, 7).T.tolist()
    quiet = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert cut(quiet).isnan().all() and cut(x[:0]).shape == (0,)
    with pytest.raises(TypeError, match="bfloat16"):
        cut(x.bfloat16())


def test_attention_in_22_bits():
    """Two levels are nearer to fp32, and so are values that smoothing brought near 0."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 1024, 32, generator=generator) for _ in range(3))
    v, q = v + 20, q[:, :, -64:]

    def error(accumulator: Any, smooth_v: bool) -> float:
        out, wanted = (
            quantized_attention(q, k, v, bits=None, smooth_v=smooth_v, accumulator=name)[0]
            for name in (accumulator, "fp32")
        )
        return float((out - wanted).square().mean().sqrt())

    assert error("22 bits", True) < 0.2 * error("22 bits", False)
    assert 0 < error("two levels", False) < 0.5 * error("22 bits", False)
    assert 0 < error("two levels", True) < error("22 bits", True)
    q = torch.randn(1, 2, 1024, 32, generator=generator)
    out = quantized_attention(q, k, v, accumulator="two levels", causal=True)[0]
    assert similarity(out, exact_attention(q, k, v, causal=True)[0]).cosine > 0.999
    with pytest.raises(ValueError, match="products of E4M3"):
        quantized_attention(q, k, v, accumulator="22 bits", p_format="fp16", v_format="fp16")


# The benchmark of the instruction


@pytest.fixture(scope="module")
def instruction(root: Path) -> Any:
    """benchmarks/fp8_instruction.py as a module."""
    folder = str(root / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("fp8_instruction")
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("promote", [False, True])
def test_the_benchmark_multiplies(instruction: Any, promote: bool):
    """In the interpreter, which sums in fp32: the layout of the operands is right."""
    a, b = (e4m3(64, 128, seed=seed).to(torch.float8_e4m3fn) for seed in (1, 2))
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    wanted = start.double() + a.double() @ b.double().T
    out = instruction.product(a, b, start, promote=promote)
    size = start.abs().double() + a.double().abs() @ b.double().T.abs()
    assert bool(((out - wanted).abs() <= 1e-5 * size).all())


COMPILED = """
import re, sys

import compile_only

found = []
compile_only.watch(lambda function, code, kwargs: found.append(code.asm["ptx"]))

import torch

sys.path.append(BENCHMARKS)
from fp8_instruction import DEPTHS, product

for depth in DEPTHS:
    a = torch.zeros(64, depth, dtype=torch.float8_e4m3fn)
    for promote in (False, True):
        product(a, a, torch.zeros(64, 64), promote=promote)
for ptx in found:
    products = re.findall(r"wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", ptx)
    print(len(products), len(re.findall(r"add[.\\w]*.f32", ptx)))
"""


@pytest.mark.slow
def test_the_compiled_instruction_adds_by_itself(root: Path, tmp_path: Path, kernel_cache: Path):
    """Not promoted: the FP8 instruction, and no other addition. Promoted: one for each sum of a thread."""
    script = COMPILED.replace("BENCHMARKS", repr(str(root / "benchmarks")))
    lines = compile_only.said_by(script, tmp_path, kernel_cache).split("\n")[:-1]
    assert lines == ["1 0", "1 32", "4 0", "4 128", "4 0", "4 128"]
