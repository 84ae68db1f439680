"""Mixtures of experts coded by rANS: products with those in use, decoded into a pool of a stated size.

With a CUDA device it runs there. Without one Triton's interpreter runs the same kernels on small experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ans_codes import ans_experts

from neuzip.errors import NeuzipError
from neuzip.kernels import tuning
from neuzip.kernels.expert_pool import ops as pool_ops
from neuzip.kernels.expert_pool import reference as pool_reference
from neuzip.kernels.expert_pool.lists import ExpertsInUse
from neuzip.kernels.experts import reference
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.routing import route
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.runtime import buffers
from neuzip.runtime.weights import AnsWeight, PackedWeight
from neuzip.runtime.weights.expert_pool import can_pool, pooled_experts

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def random(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 0.3
) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DEVICE, dtype)


def on_device(*values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def slots_of(*sizes: int, count: int) -> int:
    """Bytes of so many slots with matrices of so many bf16 weights, which no block begins with."""
    return count * sum(2 * BLOCK * 2 + -(-2 * size // 512) * 512 for size in sizes)


@pytest.fixture(autouse=True)
def fresh_buffers() -> None:
    buffers.release()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_from_a_pool_in_rounds(dtype: torch.dtype) -> None:
    """An expert of two tiles, experts of none, weights of either order; other rows keep what they hold."""
    x, ids = random(33, 48, dtype=dtype), on_device(*[[1]] * 17, *[[3], [9], [5], [-1]], *[[3]] * 12)
    routing, rows = route(ids.cpu(), x.cpu(), 6, 16)
    routing, rows = type(routing)(16, *(t.to(DEVICE) for t in routing[1:])), rows.to(DEVICE)
    weights, bias = random(6, 40, 48, seed=1, dtype=dtype), random(6, 40, seed=2, dtype=dtype)
    used = pool_ops.experts_in_use(routing, 6)
    lists = pool_reference.slot_lists(routing, 6)
    assert torch.equal(used.chosen, lists[0]) and torch.equal(used.slot_of_tile, lists[1])
    assert used.chosen.tolist() == [1, 3, 5, -1, -1, -1]
    y = torch.full((len(rows), 40), 7.0, dtype=dtype, device=DEVICE)
    for first in (0, 2, 4):
        pool = weights[used.chosen[first : first + 2].clamp(min=0).long()]
        pool_ops.pool_linear(rows, pool.mT.contiguous().mT if first else pool, used, first, bias, y)
    expected = pool_reference.pool_linear(rows, weights, routing, bias)
    filled = ~expected.isnan()
    error = (y.double() - expected)[filled].abs() / expected[filled].abs().clamp(min=1)
    assert error.max() <= (2**-8 if dtype == torch.bfloat16 else 2**-11) and (y[~filled] == 7).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    routing, rows = route(
        torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 16, dtype=torch.bfloat16), 2, 16
    )
    used = ExpertsInUse(routing, *pool_reference.slot_lists(routing, 2))
    for pool in (torch.zeros(2, 8, 17, dtype=rows.dtype), torch.zeros(2, 8, 16)):
        with pytest.raises(ValueError, match=r"columns|both are bf16"):
            pool_ops.pool_linear(rows, pool, used)
    with pytest.raises(ValueError, match="out is contiguous"):
        pool_ops.pool_linear(rows, torch.zeros(2, 8, 16, dtype=rows.dtype), used, out=rows)


def layer(
    experts: int, width: int, inner: int, dtype: torch.dtype = torch.bfloat16, together: int = 3
) -> tuple[list[torch.Tensor], list[AnsWeight]]:
    """Dense and coded: gate and up, and down."""
    dense = [random(experts, 2 * inner, width, seed=1, dtype=dtype)]
    dense.append(random(experts, width, inner, seed=2, dtype=dtype))
    return dense, [ans_experts(matrix, together) for matrix in dense]


def close(y: torch.Tensor, expected: torch.Tensor, times: float = 4) -> None:
    """Within some roundings of bf16 of the largest."""
    assert (y.double() - expected).abs().max() <= times * 2**-9 * expected.abs().max()


def test_a_layer_is_that_of_dense_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and with a pool of one or two experts of a parameter; with ids of no expert."""
    dense, coded = layer(5, 16, 8)
    x, shares = random(3, 16), random(3, 2, seed=4, dtype=torch.float32)
    ids = on_device([0, 3], [3, 9], [4, 0])
    expected = reference.experts(x, ids, shares, *dense)
    lent: list[int] = []
    original = buffers.lend

    def spy(unit: Any, nbytes: int, product: Any) -> Any:
        lent.append(nbytes)
        return original(unit, nbytes, product)

    monkeypatch.setattr(buffers, "lend", spy)
    both, one = slots_of(256, 128, count=1), slots_of(256, count=1)
    for limit, count in ((5 * both, 1), (2 * one, 2)):
        lent.clear()
        with torch.no_grad():
            close(pooled_experts(x, ids, shares, *coded, limit=limit), expected)
        assert len(lent) == count and max(lent) <= limit
    with pytest.raises(NeuzipError, match=f"takes {one:,} bytes"):
        pooled_experts(x, ids, shares, *coded, limit=one - 1)
    empty = pooled_experts(x[:0], ids[:0], shares[:0], *coded)
    assert empty.shape == (0, 16)


def test_transposed_experts_with_biases_and_a_gate_of_their_own() -> None:
    """As gpt-oss has them."""
    dense, _ = layer(3, 16, 8)
    coded = [ans_experts(matrix.mT.contiguous(), 3) for matrix in dense]
    x, ids, shares = random(2, 16), on_device([2, 0], [0, 1]), random(2, 2, seed=4, dtype=torch.float32)
    biases = random(3, 16, seed=5), random(3, 16, seed=6)
    gate = Gate(interleaved=True, limit=0.5, alpha=1.702)
    y = pooled_experts(
        x, ids, shares, *coded, transposed=True, activation=gate, first_bias=biases[0], second_bias=biases[1],
        norm=lambda rows: 2 * rows,
    )  # fmt: skip
    close(y, 2 * reference.experts(x, ids, shares, *dense, gate, *biases))


@pytest.mark.slow
def test_gradients_flow_through_decoded_experts() -> None:
    dense, coded = layer(3, 16, 8)
    ids = on_device([0, 2], [2, 2])
    arguments = [random(2, 16), random(2, 2, seed=4, dtype=torch.float32), random(3, 16, seed=5)]
    leaves = [tensor.requires_grad_() for tensor in arguments]
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    down = random(2, 16, seed=6)
    pooled_experts(leaves[0], ids, leaves[1], *coded, first_bias=leaves[2]).backward(down)
    x, shares, bias = exact
    reference.experts(x, ids, shares, *(m.double() for m in dense), None, bias).backward(down.double())
    for leaf, one in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and one.grad is not None
        close(leaf.grad, one.grad, 8)


def test_what_a_pool_takes() -> None:
    _, coded = layer(3, 16, 8)
    assert can_pool(*coded) and can_pool(coded[0])
    assert not can_pool(coded[0], random(3, 16, 8))
    assert not can_pool(coded[0], ans_experts(random(2, 16, 8), 2))
    assert not can_pool(ans_experts(random(2, 3, 3), 2))
    assert not can_pool(coded[0][0]) and not can_pool(PackedWeight.of(random(3, 16, 8)))


# On a GPU.

SHAPES = [(16, 512, 256), (9, 288, 144), (8, 1024, 1536)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_any_number_of_tokens(shape: tuple[int, int, int], tokens: int, dtype: torch.dtype) -> None:
    """As near to fp64 as dense experts are; with a small pool the bits are the same."""
    experts, width, inner = shape
    dense = [random(experts, 2 * inner, width, seed=1, dtype=dtype, scale=0.03)]
    dense.append(random(experts, width, inner, seed=2, dtype=dtype, scale=0.03))
    coded = [AnsWeight.of(matrix) for matrix in dense]
    x = random(tokens, width, seed=3, dtype=dtype, scale=1)
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(4)).topk(4).indices.to(DEVICE)
    shares = torch.rand(tokens, 4, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    limit = 3 * (2 * 2 * BLOCK + 4 * inner * width + 512)
    with torch.no_grad(), tuning.replaced({"expert_pool.while_decoded": [{"use": {"pays": False}}]}):
        y, other = (pooled_experts(x, ids, shares, *coded, limit=nbytes) for nbytes in (1 << 30, limit))
    expected = reference.experts(x, ids, shares, *dense)
    assert (y.double() - expected).abs().max() <= 8 * 2**-9 * expected.abs().max()
    assert torch.equal(y, other)
    assert torch.equal(y, pooled_experts(x, ids, shares, *coded))  # for gradients


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_with_other_routing(shape: tuple[int, int, int]) -> None:
    """One expert, all, none, some twice; the decoded experts are those of the replay, not of the capture."""
    experts, width, inner = shape
    dense = [random(experts, 2 * inner, width, seed=1, scale=0.03)]
    dense.append(random(experts, width, inner, seed=2, scale=0.03))
    coded = [AnsWeight.of(matrix) for matrix in dense]
    tokens = experts
    x, shares = random(tokens, width, seed=3, scale=1), torch.rand(tokens, 2, device=DEVICE)
    ids = torch.zeros(tokens, 2, dtype=torch.int64, device=DEVICE)
    limit = 3 * (2 * 2 * BLOCK + 4 * inner * width + 512)
    for bytes_of_pool in (1 << 30, limit):
        with torch.no_grad():
            pooled_experts(x, ids, shares, *coded, limit=bytes_of_pool)
            torch.cuda.synchronize()
            buffers.make_way(DEVICE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = pooled_experts(x, ids, shares, *coded, limit=bytes_of_pool)
                memory = buffers.memory_of_capture(DEVICE)
        assert memory is not None and memory.memory.numel() <= bytes_of_pool
        every = torch.arange(tokens)[:, None]
        for listed in (every * 0, every, every * 0 + experts, every // 3, every * 0 - 1, every % 2 * 5):
            ids.copy_(torch.cat([listed, (listed + 1) % (experts + 2)], 1))
            memory.memory.fill_(0xFF)
            graph.replay()
            expected = reference.experts(x, ids, shares, *dense)
            assert (y.double() - expected).abs().max() <= 8 * 2**-9 * expected.abs().max() + 1e-12
