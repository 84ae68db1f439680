"""Products of many rows with packed weights: on a Hopper GPU, what they are; elsewhere, what is made of them.

Gluon has no interpreter. So without such a GPU the kernel is compiled, and its machine code looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from neuzip.kernels.packed_linear import gluon_linear, torch_ops
from neuzip.kernels.packed_linear.torch_ops import PackedTensor

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def weights_of(out: int, columns: int, dtype: torch.dtype = torch.bfloat16, drop: int = 0) -> torch.Tensor:
    weights = torch.randn(out, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    return (weights.to(dtype).view(torch.int16) >> drop << drop).view(dtype).cuda()


def x_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()


def packed_of(weights: torch.Tensor) -> PackedTensor:
    packed = torch_ops.pack(weights)
    assert packed.turn_index.numel()
    return packed


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def check(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    packed, wide = packed_of(weights), None if bias is None else bias.double()
    exact = F.linear(x.double(), weights.double(), wide)
    plain = error(F.linear(x, weights, bias), exact)
    for poison in (float("nan"), 6e4):
        torch.full((len(x) + 300, len(weights)), poison, dtype=x.dtype, device=x.device)  # what y is made of
        y = gluon_linear.linear(x, packed, bias)
        assert y.shape == exact.shape and y.dtype == x.dtype
        assert error(y, exact) <= 1.05 * plain


@hopper
@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    ("rows", "out", "columns"),
    [(1, 8, 128), (65, 128, 128), (256, 128, 256), (257, 136, 384), (300, 1000, 512), (2048, 4096, 1024)],
)
def test_product(dtype: torch.dtype, rows: int, out: int, columns: int):
    check(x_of(rows, columns, dtype), weights_of(out, columns, dtype))


@hopper
@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("drop", range(1, 8))
def test_fewer_bits(dtype: torch.dtype, drop: int):
    check(x_of(130, 512, dtype), weights_of(192, 512, dtype, drop))


@hopper
@pytest.mark.gpu
@dtypes
def test_bias(dtype: torch.dtype):
    check(x_of(300, 512, dtype), weights_of(200, 512, dtype), x_of(1, 200, dtype)[0] * 10)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("deviation", [1e-20, 0.011, 0.03, 5.0])
def test_whatever_the_shift(deviation: float):
    check(x_of(256, 1024), weights_of(256, 1024) * (deviation / 0.02))


@hopper
@pytest.mark.gpu
def test_every_column_meets_its_own_weight():
    """Times the identity, nothing rounds: y is the weights, bit for bit."""
    weights = weights_of(264, 1024)
    weights[:, 77] *= 2.0**-20  # escapes
    weights[5, :16] = 0  # several of each of four threads
    x = torch.eye(1024, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(gluon_linear.linear(x, packed_of(weights)), weights.T)


@hopper
@pytest.mark.gpu
def test_infinities_and_nans():
    weights = weights_of(128, 1024)
    weights[3, 7], weights[100, 900], weights[64, 1] = torch.inf, -torch.inf, torch.nan
    x = x_of(256, 1024)
    y, dense = gluon_linear.linear(x, packed_of(weights)), F.linear(x, weights)
    assert torch.equal(y.isnan(), dense.isnan()) and torch.equal(y.isinf(), dense.isinf())
    x[9, 5] = torch.inf  # spoils a row of y, as it does of dense weights
    y, dense = gluon_linear.linear(x, packed_of(weights)), F.linear(x, weights)
    assert torch.equal(y.isnan(), dense.isnan())


@hopper
@pytest.mark.gpu
def test_the_operator_takes_it_where_it_pays():
    weights, x = weights_of(14336, 4096), x_of(2048, 4096)
    packed = packed_of(weights)
    assert gluon_linear.pays(x, packed)
    assert not gluon_linear.pays(x[:65], packed_of(weights_of(128, 4096)))
    there = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = torch_ops.linear(x, packed)
    assert torch.cuda.max_memory_allocated() - there < 1.1 * y.nbytes  # no dense weights
    assert torch.equal(y, gluon_linear.linear(x, packed))


@hopper
@pytest.mark.gpu
def test_x_that_begins_anywhere():
    memory = x_of(1, 256 * 512 + 1).flatten()
    check(memory[1:].view(256, 512), weights_of(128, 512))


@hopper
@pytest.mark.gpu
def test_cuda_graph():
    weights, x = weights_of(512, 1024), x_of(700, 1024)
    packed = packed_of(weights)
    expected = gluon_linear.linear(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gluon_linear.linear(x, packed)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)


def test_seconds_are_those_of_an_h200():
    """Of the log: us measured there, packed and decoded first."""
    for rows, out, columns, packed, decoded in (
        (2048, 4096, 4096, 101, 118), (2048, 14336, 4096, 356, 407), (2048, 4096, 14336, 343, 404),
        (512, 4096, 4096, 51, 43), (128, 14336, 4096, 51, 96),
    ):  # fmt: skip
        assert gluon_linear.seconds(rows, out, columns, 132) == pytest.approx(packed * 1e-6, rel=0.2)
        assert gluon_linear.seconds_decoded(rows, out, columns) == pytest.approx(decoded * 1e-6, rel=0.2)


COMPILED = r"""
import re, subprocess, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Card())
run = JITFunction.run

def compile_only(self, *args, grid, warmup, **kwargs):
    code = run(self, *args, grid=grid, warmup=True, **kwargs)
    with open("kernel.cubin", "wb") as file:
        file.write(code.asm["cubin"])
    disassembler = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([disassembler, "--dump-sass", "kernel.cubin"], capture_output=True, text=True)
    names = re.findall(r"\b(HGMMA|WARPGROUP[.]DEPBAR|STL|LDL)\b", said.stdout)
    print(code.metadata.shared, *names)
    return code

JITFunction.run = compile_only

from neuzip.kernels.packed_linear import gluon_linear, torch_ops

gluon_linear.multiprocessors = lambda device: 132
for dtype, drop, columns, biased in (
    (torch.bfloat16, 0, 512, False), (torch.bfloat16, 4, 128, True), (torch.float16, 0, 256, True),
    (torch.bfloat16, 1, 512, False), (torch.float16, 3, 384, False),
):
    weights = (torch.randn(136, columns, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    weights = (weights.view(torch.int16) >> drop << drop).view(dtype)
    bias = torch.zeros(136, dtype=dtype) if biased else None
    gluon_linear.linear(torch.zeros(300, columns, dtype=dtype), torch_ops.pack(weights), bias)
"""


@pytest.mark.slow
def test_products_are_under_way_while_weights_are_unpacked(tmp_path):
    """Each warp group asks for the products of a turn, eight instructions, and waits once for all of them.

    The compiler says nothing where it cannot have that, but waits after every instruction.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    said = subprocess.run(
        [sys.executable, "-P", "-c", COMPILED],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-2000:]
    kernels = [line.split() for line in said.stdout.splitlines()]
    assert len(kernels) == 5
    for shared, *instructions in kernels:
        assert int(shared) <= 227 << 10
        assert instructions.count("HGMMA") == 16
        assert instructions.count("WARPGROUP.DEPBAR") <= 4
        assert not {"STL", "LDL"} & set(instructions), "registers in local memory"
