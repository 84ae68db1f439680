"""Products of many rows with packed weights: on a Hopper GPU, what they are; elsewhere, what is made of them.

Gluon has no interpreter. So without such a GPU the kernel's functions run in gluon_on_a_cpu, and the kernel
is compiled, and its machine code looked at.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import compile_only
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gluon_on_a_cpu import Hang, OnACpu, changed

from neuzip.kernels.packed_linear import ExponentWindow
from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.gluon import linear as gluon_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor, format_of
from neuzip.runtime.weights import PackedWeight

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def weights_of(
    out: int, columns: int, dtype: torch.dtype = torch.bfloat16, drop: int = 0, device: str = "cuda"
) -> torch.Tensor:
    weights = torch.randn(out, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    return (weights.to(dtype).view(torch.int16) >> drop << drop).view(dtype).to(device)


def x_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


def packed_of(weights: torch.Tensor) -> PackedTensor:
    packed = torch_ops.pack(weights)
    assert packed.turn_index.numel()
    return packed


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def check(
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    module: ModuleType = gluon_linear,
) -> None:
    packed, wide = packed_of(weights), None if bias is None else bias.double()
    exact = F.linear(x.double(), weights.double(), wide)
    plain = error(F.linear(x, weights, bias), exact)
    for poison in (float("nan"), 6e4):
        torch.full((len(x) + 300, len(weights)), poison, dtype=x.dtype, device=x.device)  # what y is made of
        y = module.linear(x, packed, bias)
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
    weights[5, 128:144] = 0  # several of each of four threads
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


def test_seconds_are_those_of_an_h200(monkeypatch: pytest.MonkeyPatch):
    """Of the log: us measured there, packed and decoded first."""
    monkeypatch.setattr(gluon_linear, "multiprocessors", lambda _: 132)
    cpu = torch.device("cpu")
    for rows, out, columns, packed, decoded in (
        (2048, 4096, 4096, 101, 118), (2048, 14336, 4096, 356, 407), (2048, 4096, 14336, 343, 404),
        (512, 4096, 4096, 51, 43), (128, 14336, 4096, 51, 96),
    ):  # fmt: skip
        assert gluon_linear.seconds(rows, out, columns, cpu) == pytest.approx(packed * 1e-6, rel=0.2)
        assert gluon_linear.seconds_decoded(rows, out, columns, cpu) == pytest.approx(decoded * 1e-6, rel=0.2)


def on_a_cpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch, programs: int = 1) -> OnACpu:
    kernel = OnACpu(module._many_rows)
    monkeypatch.setattr(module, "_many_rows", kernel)
    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    return kernel


def check_patterns(packed: PackedTensor, weights: torch.Tensor) -> None:
    """The weights that products are asked for with, bit for bit, but for the shift."""
    identity = torch.eye(weights.shape[1], dtype=weights.dtype)
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernel = on_a_cpu(gluon_linear, monkeypatch)
        y = gluon_linear.linear(identity, packed)
    exact = F.linear(identity.double(), weights.double())  # infinities make NaNs of the others in their rows
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.nan_to_num(), exact.to(y).nan_to_num())
    assert (given(kernel, *weights.shape) == settled(packed, weights)).all()


def given(kernel: OnACpu, out: int, columns: int) -> np.ndarray:
    """The patterns of weights that the two groups gave to the tensor cores, [out, columns]."""
    parts = torch.stack([torch.stack(kernel.multiplied[group]) for group in "01"]).view(torch.int16)
    rounds = -(-columns // gluon_linear.ROWS)  # of the identity: all are given the same weights
    parts = parts.view(2, -1, rounds, columns // 64, 64, 64)
    assert (parts == parts[:, :, :1]).all()
    return parts[:, :, 0].permute(1, 0, 3, 2, 4).reshape(-1, columns)[:out].numpy().view(np.uint16)


def settled(packed: PackedTensor, weights: torch.Tensor) -> np.ndarray:
    """The patterns of weights 2**shift times smaller."""
    bits, fmt = weights.view(torch.int16).numpy().view(np.uint16), format_of(weights.dtype)
    window = ExponentWindow(packed.base, packed.shift, fmt)
    escapes = window.kinds[bits >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1] == 0
    return np.where(escapes, window.settled(bits), bits - np.uint16(window.shifted))


@dtypes
@pytest.mark.parametrize(
    ("rows", "out", "columns", "programs"),
    [(1, 8, 128, 1), (257, 136, 256, 1), (20, 264, 128, 2), (300, 136, 128, 3), (60, 72, 896, 1)],
)
def test_product_on_a_cpu(
    dtype: torch.dtype, rows: int, out: int, columns: int, programs: int, monkeypatch: pytest.MonkeyPatch
):
    on_a_cpu(gluon_linear, monkeypatch, programs)
    x, weights = x_of(rows, columns, dtype, "cpu"), weights_of(out, columns, dtype, 0, "cpu")
    check(x, weights, x_of(1, out, dtype, "cpu")[0] * 10 if out % 16 else None)


@dtypes
@pytest.mark.parametrize("drop", range(1, 8))
def test_fewer_bits_on_a_cpu(dtype: torch.dtype, drop: int):
    weights = weights_of(72, 256, dtype, drop, "cpu")
    packed = packed_of(weights)
    assert packed.low_bits == 8 - drop
    check_patterns(packed, weights)


@pytest.mark.parametrize("deviation", [1e-20, 0.011, 0.03, 5.0])
def test_whatever_the_shift_on_a_cpu(deviation: float, monkeypatch: pytest.MonkeyPatch):
    on_a_cpu(gluon_linear, monkeypatch)
    check(x_of(20, 512, device="cpu"), weights_of(64, 512, device="cpu") * (deviation / 0.02))


@dtypes
@pytest.mark.slow
def test_escapes_on_a_cpu(dtype: torch.dtype):
    weights = weights_of(144, 512, dtype, device="cpu")
    weights[0, :16] = 0  # four of each of four threads
    weights[8, 0:128:32] = -0.0  # of the first of them
    weights[17, 128:144] = 0
    weights[40, 300], weights[41, 301], weights[140, 511] = torch.inf, -torch.inf, torch.nan
    check_patterns(packed_of(weights), weights)


@dtypes
def test_escapes_in_any_places_on_a_cpu(dtype: torch.dtype):
    weights, some = weights_of(128, 512, dtype, device="cpu"), np.random.default_rng(0)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 60000.0, -60000.0]
    for row, column in zip(some.integers(0, 128, 90), some.integers(0, 512, 90), strict=True):
        weights[row, column] = special[some.integers(len(special))]
    check_patterns(packed_of(weights), weights)


@dtypes
@pytest.mark.parametrize(("rows", "number"), [(40, 0), (40, 2), (48, 1)])
def test_an_experts_own_rows_on_a_cpu(dtype: torch.dtype, rows: int, number: int):
    """Those of 40 rows share a tile with a neighbour."""
    weights = weights_of(4 * rows, 256, dtype, device="cpu").view(4, rows, 256)
    weights[:, 3, :9] = 0
    weights[:, -1, 250:] = -0.0
    check_patterns(PackedWeight.of(weights).expert(number)._own(), weights[number])


FREE_X, FREE_WORDS = (
    f"mbarrier.arrive({name}, count=1)" for name in ("x_free.index(second)", "words_free.index(stage)")
)
SECOND_HALF = "second = x_number % STAGES"
WRONG = AssertionError
CHANGES = {
    "none": ({}, None),
    "x is never free": ({FREE_X: "pass"}, Hang),
    "words are never free": ({FREE_WORDS: "pass"}, Hang),
    "free in the other phase": ({"& 1) ^ 1)": "& 1))"}, Hang),
    "waits for more bytes": ({"P * _WORD_BYTES": "P * _WORD_BYTES + 4"}, Hang),
    "free for one group": ({"barriers(STAGES, 2)": "barriers(STAGES, 1)"}, WRONG),
    "words free too early": ({FREE_WORDS: "pass", SECOND_HALF: f"{FREE_WORDS}; {SECOND_HALF}"}, WRONG),
    "x free too early": ({"warpgroup_mma_init(warpgroup_mma_wait(0, deps=[sums]))": "sums"}, WRONG),
    "x not waited for": ({"mbarrier.wait(x_there.index(second)": "pass; (x_there.index(second)"}, WRONG),
    "y not waited for": ({"tma.store_wait(0)\n            outs": "outs"}, WRONG),
    "y written twice": ({"half * 128, n": "0, n"}, WRONG),
    "no such tile": ({"+ warp, tiles - 1)": "+ warp, tiles)"}, WRONG),
    "wrong shift": ({"fars[row], base4": "fars[row] >> 1, base4"}, WRONG),
    "no other escapes": ({"bits, e, 0x8000": "bits, e, 0x4000"}, WRONG),
    "an unknown name": ({"gl.minimum(turn": "gl.maximum(turn"}, AttributeError),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error"), CHANGES.values(), ids=CHANGES)
@pytest.mark.slow
def test_a_wrong_kernel_is_found_on_a_cpu(
    changes: dict[str, str],
    error: type[Exception] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    module = changed(gluon_linear, changes, tmp_path)
    on_a_cpu(module, monkeypatch)
    weights = weights_of(136, 640, device="cpu")
    weights[0, :16] = 4.0
    x, bias = x_of(300, 640, device="cpu"), x_of(1, 136, device="cpu")[0]
    with pytest.raises(error) if error else nullcontext():
        check(x, weights, bias, module)


COMPILED = r"""
import re, subprocess, torch, triton
import compile_only

def see(function, code, kwargs):
    with open("kernel.cubin", "wb") as file:
        file.write(code.asm["cubin"])
    disassembler = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([disassembler, "--dump-sass", "kernel.cubin"], capture_output=True, text=True)
    names = re.findall(r"\b(HGMMA|WARPGROUP[.]DEPBAR|STL|LDL)\b", said.stdout)
    print(code.metadata.shared, *names)

compile_only.watch(see)

from neuzip.kernels.packed_linear.gluon import linear as gluon_linear
from neuzip.kernels.packed_linear import ops as torch_ops

gluon_linear.multiprocessors = lambda device: 132
for dtype, drop, columns, biased in (
    (torch.bfloat16, 0, 512, False), (torch.bfloat16, 4, 128, True), (torch.float16, 3, 384, False),
):
    weights = (torch.randn(136, columns, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    weights = (weights.view(torch.int16) >> drop << drop).view(dtype)
    bias = torch.zeros(136, dtype=dtype) if biased else None
    gluon_linear.linear(torch.zeros(300, columns, dtype=dtype), torch_ops.pack(weights), bias)
"""


@pytest.mark.slow
def test_products_are_under_way_while_weights_are_unpacked(tmp_path, kernel_cache):
    """Each warp group asks for the products of a turn, eight instructions, and waits once for all of them.

    The compiler says nothing where it cannot have that, but waits after every instruction.
    """
    kernels = [line.split() for line in compile_only.said_by(COMPILED, tmp_path, kernel_cache).splitlines()]
    assert len(kernels) == 3
    for shared, *instructions in kernels:
        assert int(shared) <= 227 << 10
        assert instructions.count("HGMMA") == 16
        assert instructions.count("WARPGROUP.DEPBAR") <= 4
        assert not {"STL", "LDL"} & set(instructions), "registers in local memory"
