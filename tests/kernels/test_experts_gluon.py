"""Products of tiles of rows with the packed weights of their experts, by the kernel for Hopper.

Without such a GPU the kernel's functions run in gluon_on_a_cpu, and the kernel is compiled.
"""

from __future__ import annotations

import compile_only
import pytest
import torch
import torch.nn.functional as F
from gluon_on_a_cpu import OnACpu

from neuzip.kernels.experts import ops as expert_ops
from neuzip.kernels.experts import routing as plain
from neuzip.kernels.experts.gluon import grouped
from neuzip.kernels.experts.routing import Routing
from neuzip.kernels.packed_linear import ops as packed_ops
from neuzip.kernels.packed_linear.gluon import linear as gluon_linear
from neuzip.kernels.packed_linear.gluon import multiply

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def random(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype, device: str) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(dtype).to(device)


def ids_of(tokens: int, k: int, experts: int, without: int = 0) -> torch.Tensor:
    """Experts of tokens, none of them below `without`, and no expert twice."""
    some = torch.Generator().manual_seed(2)
    rows = [torch.randperm(experts - without, generator=some)[:k] + without for _ in range(tokens)]
    return torch.stack(rows) if rows else torch.zeros(0, k, dtype=torch.int64)


def routed(index: torch.Tensor, x: torch.Tensor, experts: int, tile: int) -> tuple[Routing, torch.Tensor]:
    """The routing, and rows of which those that no pair fills are NaN."""
    routing, rows = plain.route(index.cpu(), x.cpu(), experts, tile)
    filled = torch.full_like(rows, torch.nan)
    there = routing.position[routing.position >= 0].long()
    filled[there] = rows[there]
    arrays = (array.to(x.device) for array in routing[1:])
    return Routing(tile, *arrays), filled.to(x.device)


def check(
    index: torch.Tensor, weights: torch.Tensor, tile: int, biased: bool = False, special: bool = False
) -> None:
    """Both products against fp64, and against torch's own in the dtype of the weights."""
    experts, out, columns = weights.shape
    dtype, device = weights.dtype, str(weights.device)
    packed = packed_ops.pack(weights.view(-1, columns))
    assert grouped.can_multiply(packed, experts)
    bias = random(experts, out, seed=3, dtype=dtype, device=device) * 10 if biased else None
    x = random(len(index), columns, seed=1, dtype=dtype, device=device)
    routing, rows = routed(index, x, experts, tile)
    torch.full((len(rows) + 300, out), torch.nan, dtype=dtype, device=device)  # what y is made of
    y = grouped.grouped_linear(rows, packed, experts, routing, bias)
    h = grouped.gated_linear(rows, packed, experts, routing)
    assert y.shape == (len(rows), out) and h.shape == (len(rows), out // 2)
    runs = plain.runs(routing)
    assert runs or not index.numel() or bool((index >= experts).all())
    for expert, own in runs:
        added = None if bias is None else bias[expert]
        exact = F.linear(
            rows[own].double(), weights[expert].double(), None if added is None else added.double()
        )
        plain_y = F.linear(rows[own], weights[expert], added)
        if special:
            assert torch.equal(y[own].isnan(), exact.isnan()) and torch.equal(y[own].isinf(), exact.isinf())
            continue
        assert error(y[own], exact) <= 1.05 * error(plain_y, exact) + 1e-5
        gate, up = F.linear(rows[own], weights[expert]).chunk(2, -1)
        wide_gate, wide_up = F.linear(rows[own].double(), weights[expert].double()).chunk(2, -1)
        exact = F.silu(wide_gate) * wide_up
        assert error(h[own], exact) <= 1.05 * error(F.silu(gate) * up, exact) + 1e-5


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


CASES = [
    (1, 2, 8, 256, 256, 16),  # one token
    (9, 2, 5, 160, 256, 16),  # experts without one, and blocks that reach into the next expert
    (40, 2, 4, 128, 128, 32),
    (70, 1, 3, 96, 384, 64),
]
"""Tokens, experts of each, experts, out, columns, rows of a tile."""


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_linear, "many_rows", OnACpu(multiply.many_rows))
    monkeypatch.setattr(grouped, "multiprocessors", lambda device: 3)


@pytest.mark.parametrize(
    ("dtype", "tokens", "k", "experts", "out", "columns", "tile"),
    [(dtype, *case) for dtype, case in zip([torch.float16, torch.bfloat16] * 2, CASES, strict=True)],
)
def test_products_on_a_cpu(
    on_a_cpu: None, dtype: torch.dtype, tokens: int, k: int, experts: int, out: int, columns: int, tile: int
):
    weights = random(experts, out, columns, seed=0, scale=0.02, dtype=dtype, device="cpu")
    check(ids_of(tokens, k, experts, without=1), weights, tile, biased=tokens == 9)


def test_a_large_tile_on_a_cpu(on_a_cpu: None):
    """All tokens go to one expert, which has two tiles of 256 rows."""
    weights = random(2, 96, 128, seed=0, scale=0.02, dtype=torch.bfloat16, device="cpu")
    check(torch.ones(300, 1, dtype=torch.int64), weights, 256)


def test_ids_of_other_devices_on_a_cpu(on_a_cpu: None):
    """Tokens whose expert is not here have no row, and where there is no other, no tile is in use."""
    weights = random(2, 96, 128, seed=0, scale=0.02, dtype=torch.bfloat16, device="cpu")
    check(torch.tensor([[0, 2], [2, 2], [1, 0]]), weights, 16)
    check(torch.tensor([[2, 2], [3, 2]]), weights, 16)


def test_infinities_nans_and_zeros_on_a_cpu(on_a_cpu: None):
    weights = random(3, 96, 256, seed=0, scale=0.02, dtype=torch.bfloat16, device="cpu")
    weights[0, 3, 7], weights[1, 90, 200], weights[2, 64, 1] = torch.inf, -torch.inf, torch.nan
    weights[1, 5, :16] = 0
    check(ids_of(6, 2, 3), weights, 16, special=True)


COMPILED = r"""
import torch
import compile_only

def see(function, code, kwargs):
    assert not compile_only.unused_memory(code)
    print(code.metadata.shared, *compile_only.instructions(code, "HGMMA|WARPGROUP[.]DEPBAR|STL|LDL"))

compile_only.watch(see)

from neuzip.kernels.experts.gluon import grouped
from neuzip.kernels.experts.routing import Routing
from neuzip.kernels.packed_linear import ops

grouped.multiprocessors = lambda device: 132
packed = ops.pack((torch.randn(4 * 128, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16())
routing = Routing(128, *(torch.zeros(shape, dtype=torch.int32) for shape in ((4,), (4, 4), (1,))))
rows = torch.zeros(4 * 128, 256).bfloat16()
grouped.gated_linear(rows, packed, 4, routing)
"""


@pytest.mark.slow
def test_products_are_under_way_while_weights_are_unpacked(tmp_path, kernel_cache):
    """The compiler says nothing where it cannot have that, but waits after every instruction."""
    kernels = [line.split() for line in compile_only.said_by(COMPILED, tmp_path, kernel_cache).splitlines()]
    assert len(kernels) == 1
    for shared, *instructions in kernels:
        assert int(shared) <= 227 << 10
        assert instructions.count("HGMMA") == 16
        assert instructions.count("WARPGROUP.DEPBAR") <= 4
        assert not {"STL", "LDL"} & set(instructions), "registers in local memory"


@hopper
@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "out", "columns", "tile"),
    [
        *CASES, (1, 8, 128, 1536, 2048, 16), (8, 8, 128, 2048, 768, 16), (32, 8, 128, 1536, 2048, 16),
        (300, 8, 64, 1536, 2048, 32), (512, 8, 128, 1536, 2048, 64), (500, 8, 60, 2048, 768, 128),
        (2048, 8, 128, 1536, 2048, 256), (2048, 2, 8, 4096, 1792, 256), (3, 2, 8, 28672, 4096, 16),
    ],
)  # fmt: skip
def test_products(dtype: torch.dtype, tokens: int, k: int, experts: int, out: int, columns: int, tile: int):
    weights = random(experts, out, columns, seed=0, scale=0.02, dtype=dtype, device="cuda")
    check(ids_of(tokens, k, experts, without=1), weights, tile, biased=tokens % 2 == 0)


@hopper
@pytest.mark.gpu
def test_a_graph_follows_the_routing():
    """What is captured once multiplies with the experts of any later routing, and with none."""
    weights = random(16, 256, 512, seed=0, scale=0.02, dtype=torch.bfloat16, device="cuda")
    packed = packed_ops.pack(weights.view(-1, 512))
    x = random(12, 512, seed=1, dtype=torch.bfloat16, device="cuda")
    routing, rows = routed(ids_of(12, 2, 16), x, 16, 16)
    grouped.gated_linear(rows, packed, 16, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped.grouped_linear(rows, packed, 16, routing)
    for seed in range(5):
        index = torch.randint(0, 16 if seed else 1, (12, 2), generator=torch.Generator().manual_seed(seed))
        later, later_rows = routed(index + (0 if seed < 4 else 16), x, 16, 16)
        for array, other in zip((*routing[1:], rows), (*later[1:], later_rows), strict=True):
            array.copy_(other)
        y.fill_(torch.nan)
        graph.replay()
        for expert, own in plain.runs(later):
            assert error(y[own], F.linear(rows[own].double(), weights[expert].double())) < 4e-3


@hopper
@pytest.mark.gpu
def test_a_layer_is_the_same_each_time():
    """Sums of blocks that several programs share are added in the same order, on any stream."""
    gate_up = packed_ops.pack(random(64 * 512, 1024, seed=0, scale=0.02, dtype=torch.bfloat16, device="cuda"))
    down = packed_ops.pack(random(64 * 1024, 256, seed=4, scale=0.02, dtype=torch.bfloat16, device="cuda"))
    x = random(4, 1024, seed=1, dtype=torch.bfloat16, device="cuda")
    index = ids_of(4, 8, 64).cuda()
    shares = torch.full((4, 8), 0.125, device="cuda")
    expected = expert_ops.packed_experts(x, index, shares, gate_up, down, 64)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            results.append(expert_ops.packed_experts(x, index, shares, gate_up, down, 64))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in results)
