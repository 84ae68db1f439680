"""Packed weights by number: one compiled graph serves weights of other windows, far words and escapes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tensors
import torch
from bits import same_bits

from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.held import HeldExperts, hold_experts
from neuzip.kernels.experts.ops import packed_experts
from neuzip.kernels.grid_linear import pack_rows
from neuzip.kernels.packed_linear import ops
from neuzip.kernels.packed_linear.held import held, hold
from neuzip.kernels.packed_linear.tensor import PackedTensor

OUT, COLUMNS = 48, 256


def packed_weights(deviation: float, *, drop: int = 0, dtype: torch.dtype = torch.bfloat16) -> PackedTensor:
    """Normal weights; without their lowest `drop` bits. The deviation decides the window."""
    dense = tensors.gaussian(OUT, COLUMNS, dtype=dtype, deviation=deviation)
    bits = dense.view(torch.int16) & ~((1 << drop) - 1)
    return ops.pack(bits.view(dtype))


def function(x: torch.Tensor, ids: torch.Tensor, weight_id: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.ops.neuzip.held_linear(x, None, weight_id, OUT)
    rows = torch.ops.neuzip.held_rows(ids, weight_id, COLUMNS, x.dtype)
    return y, rows, torch.ops.neuzip.held_decode(x, weight_id, OUT)


def test_one_graph_is_right_for_weights_of_other_windows() -> None:
    weights = [packed_weights(0.02), packed_weights(3.0), packed_weights(0.4, drop=4)]
    windows = {(p.low_bits, p.base, p.shift) for p in weights}
    shapes = {tuple(array.shape for array in p.arrays) for p in weights}
    assert len(windows) == len(shapes) == 3
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, backend=count, fullgraph=True)
    x = tensors.gaussian(5, COLUMNS, dtype=torch.bfloat16, deviation=1.0)
    ids = torch.tensor([[0, 47, 3]])
    for packed in weights:
        y, rows, dense = compiled(x, ids, hold(packed))
        assert same_bits(y, ops.linear(x, packed))
        assert same_bits(rows, ops.rows(packed, ids))
        assert same_bits(dense, ops.decode(packed))
    assert len(graphs) == 1


def test_a_graph_contains_nothing_of_the_values() -> None:
    packed = packed_weights(0.02)
    weight_id = hold(packed)
    graphs: list[Any] = []
    x = tensors.gaussian(2, COLUMNS, dtype=torch.bfloat16, deviation=1.0)
    torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph)(
        x, torch.tensor([1]), weight_id
    )
    arguments = [a for node in graphs[0].graph.nodes if "held" in str(node.target) for a in node.args]
    constants = {a for a in arguments if not isinstance(a, torch.fx.Node)}
    assert constants == {None, OUT, COLUMNS, torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_on_meta_give_the_shapes_of_real_ones(dtype: torch.dtype) -> None:
    packed = packed_weights(0.02, dtype=dtype)
    weight_id = hold(packed)
    x, ids = tensors.gaussian(2, COLUMNS, dtype=dtype, deviation=1.0), torch.tensor([1, 2])
    real = function(x, ids, weight_id)
    for got, shape in zip(real, function(x.to("meta"), ids.to("meta"), weight_id), strict=True):
        assert (got.shape, got.dtype) == (shape.shape, shape.dtype)


def test_weights_are_held_as_long_as_their_owner_keeps_them() -> None:
    packed = packed_weights(0.02)
    weight_id = hold(packed)
    assert held(weight_id) is packed
    del packed
    gc.collect()
    with pytest.raises(RuntimeError, match="holds no packed weights of number"):
        held(weight_id)


def test_one_graph_is_right_for_experts_of_other_windows() -> None:
    experts, inner, columns = 3, 16, 128
    graphs: list[Any] = []
    compiled = torch.compile(
        lambda *arguments: torch.ops.neuzip.held_experts(*arguments),
        backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True,
    )  # fmt: skip
    x = tensors.gaussian(4, columns, dtype=torch.bfloat16, deviation=1.0)
    index, shares = torch.tensor([[0, 2], [1, 0], [2, -1], [3, 1]]), torch.rand(4, 2)
    for deviation, gate in ((0.02, None), (3.0, Gate(limit=0.5))):
        gate_up, down = (
            ops.pack(tensors.gaussian(experts * out, k, dtype=torch.bfloat16, deviation=deviation))
            for out, k in ((2 * inner, columns), (columns, inner))
        )
        layer = HeldExperts(gate_up, down, experts, gate)
        y = compiled(x, index, shares, hold_experts(layer))
        assert same_bits(y, packed_experts(x, index, shares, gate_up, down, experts, gate))
    assert len(graphs) == 1
    assert not [a for node in graphs[0].graph.nodes for a in node.args if isinstance(a, int | float)]


@pytest.mark.gpu
def test_held_experts_in_a_cuda_graph() -> None:
    """A graph is recorded after one run, as vLLM does it, and computes anew for other x, ids and weights."""
    experts, inner, columns, tokens = 8, 256, 512, 6
    gate_up, down = (
        ops.pack(tensors.gaussian(experts * out, k, dtype=torch.bfloat16, deviation=0.05).cuda())
        for out, k in ((2 * inner, columns), (columns, inner))
    )
    experts_id = hold_experts(layer := HeldExperts(gate_up, down, experts))

    def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, columns, generator=generator).bfloat16()
        ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :2].to(torch.int32)
        return x.cuda(), ids.cuda(), torch.rand(tokens, 2, generator=generator).cuda()

    with torch.inference_mode():
        x, ids, shares = inputs(1)
        torch.ops.neuzip.held_experts(x, ids, shares, experts_id)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.ops.neuzip.held_experts(x, ids, shares, experts_id)
        for seed in (2, 3):
            for own, other in zip((x, ids, shares), inputs(seed), strict=True):
                own.copy_(other)
            graph.replay()
            assert same_bits(y, packed_experts(x, ids, shares, layer.gate_up, layer.down, experts))


@pytest.mark.parametrize("form", ["codes", "dense"])
def test_a_number_may_name_codes_or_a_dense_matrix(form: str) -> None:
    """Two grids in one matrix, as the parts of a fused layer have them."""
    generator = torch.Generator().manual_seed(4)
    steps = torch.tensor([0.004] * 30 + [0.0071] * 11)
    codes = torch.randint(-7, 8, (41, 96), generator=generator)
    weight = (codes * steps[:, None]).bfloat16()
    weights = pack_rows(weight, steps) if form == "codes" else weight
    number, x = hold(weights), torch.randn(3, 96, generator=generator).bfloat16()
    assert same_bits(torch.ops.neuzip.held_decode(x, number, 41), weight)
    ids = torch.tensor([40, 0])
    rows = torch.ops.neuzip.held_rows(ids, number, 96, torch.bfloat16)
    assert same_bits(rows, weight[ids])
    exact = x.double() @ weight.double().T
    error = (torch.ops.neuzip.held_linear(x, None, number, 41).double() - exact).abs()
    assert (error <= 2.0**-8 * exact.abs() + 2.0**-18 * (x.double().abs() @ weight.double().abs().T)).all()
