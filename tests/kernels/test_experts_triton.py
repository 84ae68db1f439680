"""The Triton kernels of mixtures of experts: on a GPU where there is one, else in Triton's interpreter.

Sums are judged by what they could lose in rounding, |x| @ |weights|.T times a rounding of the dtype, as those
of products with one packed weight are. All else has the bits of plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tensors import gaussian
from torch import Tensor

from neuzip.kernels.experts import ops, reference, steps
from neuzip.kernels.experts import routing as plain
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.kernels.experts.routing import Routing, cleaned
from neuzip.kernels.experts.triton import dense, grouped, rows
from neuzip.kernels.experts.triton import route as triton_route
from neuzip.kernels.packed_linear.ops import pack
from neuzip.kernels.packed_linear.tensor import PackedTensor

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
BF16, F16 = torch.bfloat16, torch.float16


def routed(ids: Tensor, x: Tensor, experts: int, tile: int, device: torch.device) -> tuple[Routing, Tensor]:
    """Plain torch's routing and rows on a device, NaNs where no pair fills them."""
    routing, filled = plain.route(ids, x, experts, tile)
    filled.masked_fill_(~plain.in_use(routing)[:, None], torch.nan)
    return Routing(tile, *(one.to(device) for one in routing[1:])), filled.to(device)


def ids_for(tokens: int, k: int, experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Ids among which are sentinels, and some experts that nobody wants."""
    ids = torch.randint(-1, experts + 2, (tokens, k), generator=torch.Generator().manual_seed(3))
    return ids.where(ids % 4 != 1, 0).to(dtype)


@pytest.mark.parametrize(
    ("experts", "tokens", "k", "columns", "tile", "dtype", "config"),
    [
        (128, 1, 8, 40, 16, torch.int64, (False, 512, 1)),
        (5, 45, 2, 270, 32, torch.int32, (False, 3, 8)),
        (300, 12, 6, 33, 16, torch.int64, (True, 2, 4)),
        (3, 70, 1, 16, 64, torch.int32, (True, 4, 8)),
    ],
)
def test_routing(
    experts, tokens, k, columns, tile, dtype, config, device, monkeypatch: pytest.MonkeyPatch, poison
) -> None:
    """Few pairs in one launch, and counted in chunks before; rows longer than what is copied at a time."""
    use = dict(zip(("counted", "programs", "rows"), config, strict=True)) | {"columns": 256, "num_warps": 4}
    monkeypatch.setattr(triton_route, "launch_for", lambda *_, **__: use)
    monkeypatch.setattr(triton_route, "CHUNK", 32)
    ids, x = ids_for(tokens, k, experts, dtype), gaussian(tokens, columns).bfloat16()
    exact, filled = plain.route(ids, x, experts, tile)
    routing, copied = triton_route.route(ids.to(device), x.to(device), experts, tile)
    count = int(exact.count)
    assert routing.count.tolist() == [count]
    assert torch.equal(routing.position.cpu(), exact.position)
    assert torch.equal(routing.tiles[:count].cpu(), exact.tiles[:count])
    there = plain.in_use(exact)
    assert torch.equal(copied.cpu()[there], filled[there])
    assert copied[~there.to(device)].isnan().all()


def laws(experts: int, out: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Weights with far ones, escapes, zeros, infinities and NaNs."""
    weights = gaussian(experts, out, columns) * 0.016
    weights[:, :, ::7] *= 2.0**-4
    weights[:, :, 3::29] *= 2.0**-16
    weights[:, ::3, ::11] *= 2.0**12
    weights[:, 5, : columns // 2] = 0.0
    weights[-1, 2, 1], weights[-1, 3, columns - 1] = torch.inf, torch.nan
    return weights.to(dtype)


def assert_product(
    y: Tensor, x: Tensor, ids: Tensor, weights: Tensor, bias: Tensor | None, position: Tensor
) -> None:
    """Rows of pairs are near fp64; where a weight is no number, only whether the result is one counts."""
    k, ids = ids.shape[1], ids.flatten()
    pairs = x.repeat_interleave(k, 0)
    exact = reference.grouped_linear(pairs, ids, weights, bias)
    most = reference.grouped_linear(pairs.abs(), ids, weights.abs(), None if bias is None else bias.abs())
    there = position >= 0
    y, exact, most = y[position[there].long()].double(), exact[there], most[there]
    finite = exact.isfinite()
    assert finite.any()
    assert (y.isfinite() == finite).all()
    assert ((y - exact).abs()[finite] <= (ROUNDING[x.dtype] * most + 1e-7)[finite]).all()


PRODUCTS = [
    # experts, out, columns, tokens, k, tile, dtype, bias
    (3, 32, 128, 2, 2, 16, BF16, False),
    (3, 24, 70, 2, 2, 16, F16, True),  # experts begin within a tile of the weights; columns are filled up
    (2, 80, 160, 20, 1, 128, BF16, True),  # two programs a tile, two blocks of the weights
]


class Case(NamedTuple):
    """What a product of PRODUCTS multiplies; `on_device` is the bias there."""

    weights: Tensor
    x: Tensor
    bias: Tensor | None
    ids: Tensor
    routing: Routing
    rows: Tensor
    packed: PackedTensor
    on_device: Tensor | None


def case_of(product: tuple, device: torch.device) -> Case:
    experts, out, columns, tokens, k, tile, dtype, has_bias = product
    weights, x = laws(experts, out, columns, dtype), gaussian(tokens, columns, seed=1).to(dtype)
    bias = gaussian(experts, out, seed=2).to(dtype) if has_bias else None
    ids = ids_for(tokens, k, experts)
    packed = pack(weights.view(-1, columns).to(device))
    on_device = None if bias is None else bias.to(device)
    return Case(weights, x, bias, ids, *routed(ids, x, experts, tile, device), packed, on_device)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # what the interpreter says of inf - inf
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_product_of_every_expert(product, device: torch.device, poison: None) -> None:
    case = case_of(product, device)
    y = grouped.grouped_linear(case.rows, case.packed, len(case.weights), case.routing, case.on_device)
    assert y.dtype == case.x.dtype
    assert_product(y.cpu(), case.x, case.ids, case.weights, case.bias, case.routing.position.cpu())
    assert y[~plain.in_use(case.routing)].isnan().all()  # as they were


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # what the interpreter says of inf - inf
@pytest.mark.parametrize("product", PRODUCTS[1:], ids=str)
def test_product_of_some_experts_decoded_at_a_time(product, device, monkeypatch, poison: None) -> None:
    experts, out, columns, tokens, _, tile, dtype, _ = product
    monkeypatch.setattr(dense, "DECODED", 2 * out * columns * 2)
    case = case_of(product, device)
    y = dense.grouped_linear(case.rows, case.packed, experts, case.routing, case.on_device)
    assert_product(y.cpu(), case.x, case.ids, case.weights, case.bias, case.routing.position.cpu())

    grad = gaussian(tokens, out, seed=3).to(dtype)
    _, filled = routed(case.ids, grad, experts, tile, device)
    grads = dense.gradients(filled, case.packed, experts, case.routing)
    transposed = case.weights.transpose(1, 2)
    assert_product(grads.cpu(), grad, case.ids, transposed, None, case.routing.position.cpu())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("gate", [Gate(), Gate(True, 7.0, 1.702), Gate(limit=0.3)], ids=str)
def test_gates_are_rounded_as_by_torch(gate: Gate, dtype: torch.dtype, device: torch.device) -> None:
    ids = torch.tensor([[0, 2], [2, 3]] + [[2, 1]] * 17)
    routing, filled = routed(ids, gaussian(19, 300, seed=1).to(dtype) * 4, 3, 32, device)
    y, exact = rows.apply_gate(filled, routing, gate), gated(filled, gate)
    off = (cleaned(y, routing).double() - cleaned(exact, routing).double()).abs()
    if device.type == "cuda":
        assert not off.any()
    else:  # the interpreter's exp is numpy's: now and then that rounds the other way
        assert (off <= 2 * ROUNDING[dtype] * exact.double().abs()).all()
        assert (off == 0).double().mean() > 0.99


@pytest.mark.parametrize("weights_dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_weighted_sums_have_the_bits_of_torch(weights_dtype: torch.dtype, device: torch.device) -> None:
    tokens, k, columns = 5, 3, 270
    ids = torch.tensor([[0, 1, 2], [3, 1, -1], [5, 5, 5], [2, 0, 5], [1, 0, 3]])
    routing, filled = routed(ids, gaussian(tokens, columns).bfloat16(), 4, 16, torch.device("cpu"))
    shares = gaussian(tokens, k, seed=2).to(weights_dtype)
    exact = steps.weighted_sum(filled, routing.position, shares)
    y = rows.weighted_sum(*(one.to(device) for one in (filled, routing.position, shares)))
    assert torch.equal(y.cpu(), exact)
    assert not exact[2].any()


# On a GPU: layers of real sizes.

CUDA = torch.device("cuda")
SHAPES = {"Qwen3-30B-A3B": (128, 768, 2048, 8, BF16), "gpt-oss-20b": (32, 2880, 2880, 4, F16)}


@pytest.fixture(scope="module", params=list(SHAPES))
def layer(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """Dense and packed weights of a layer on the GPU: experts, k, gate_up, down."""
    experts, inner, hidden, k, dtype = SHAPES[request.param]
    weights = []
    for out, columns in ((2 * inner, hidden), (hidden, inner)):
        one = torch.randn(
            experts, out, columns, generator=torch.Generator(CUDA).manual_seed(out), device=CUDA
        )
        one = (one * 0.02).to(dtype)
        weights.append((one, pack(one.view(-1, columns))))
    return experts, k, *weights


def inputs(
    tokens: int, k: int, experts: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator, device=CUDA).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator, device=CUDA).topk(k).indices
    ids[:, 1] = ids[:, 1].where(torch.arange(tokens, device=CUDA) % 3 > 0, 2)  # a crowd
    shares = torch.rand(tokens, k, generator=generator, device=CUDA)
    return x, ids, shares / shares.sum(1, keepdim=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 2048])
def test_steps_of_a_real_layer(layer, tokens: int) -> None:
    experts, k, (gate_up, packed_up), (down, packed_down) = layer
    x, ids, _ = inputs(tokens, k, experts, gate_up.shape[2], gate_up.dtype)
    for tile in (16, 64, 256):
        exact, _ = plain.route(ids.cpu(), x[:, :1].cpu(), experts, tile)
        routing, filled = triton_route.route(ids, x, experts, tile)
        assert torch.equal(routing.position.cpu(), exact.position)
        assert torch.equal(routing.tiles[: int(exact.count)].cpu(), exact.tiles[: int(exact.count)])
        there = plain.in_use(routing)
        filled.masked_fill_(~there[:, None], torch.nan)
        assert torch.equal(filled[routing.position.long()], x.repeat_interleave(k, 0))
        for weights, packed in ((gate_up, packed_up), (down, packed_down)):
            own = filled[:, : weights.shape[2]].contiguous()
            for multiply in (grouped.grouped_linear, dense.grouped_linear):
                y = multiply(own, packed, experts, routing)
                pairs = x.repeat_interleave(k, 0)[:, : weights.shape[2]]
                sample = slice(None, None, max(1, tokens * k // 512))
                wide, flat = pairs[sample], ids.flatten()[sample]
                fp64 = reference.grouped_linear(wide, flat, weights)
                most = reference.grouped_linear(wide.abs(), flat, weights.abs())
                off = (y[routing.position.long()][sample].double() - fp64).abs()
                assert (off <= ROUNDING[x.dtype] * most + 1e-7).all()
                assert torch.equal(y[there], multiply(own, packed, experts, routing)[there])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 2048])
def test_a_real_layer_in_a_graph(layer, tokens: int) -> None:
    """The graph follows what the router chooses at each replay, one expert for all tokens included."""
    experts, k, (gate_up, packed_up), (down, packed_down) = layer
    x, ids, shares = inputs(tokens, k, experts, gate_up.shape[2], gate_up.dtype)

    def multiply() -> Tensor:
        return ops.packed_experts(x, ids, shares, packed_up, packed_down, experts)

    with torch.no_grad():
        multiply()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = multiply()
        for other in (
            ids.clone(),
            (ids + 5) % experts,
            torch.full_like(ids, experts - 1),
            ids.fill_(experts),
        ):
            ids.copy_(other)
            graph.replay()
            assert torch.equal(y, multiply())
            some = slice(None, None, max(1, tokens // 64))
            exact = reference.experts(x[some], ids[some], shares[some], gate_up, down)
            assert (y[some].double() - exact).abs().max() <= 0.03 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.usefixtures("most_of_a_gpu")
def test_gradients_of_a_real_layer(layer) -> None:
    experts, k, (gate_up, packed_up), (down, packed_down) = layer
    x, ids, shares = inputs(40, k, experts, gate_up.shape[2], gate_up.dtype)
    own = [one.clone().requires_grad_() for one in (x, shares)]
    wide = [one.double().requires_grad_() for one in (x, shares)]
    ops.packed_experts(own[0], ids, own[1], packed_up, packed_down, experts).sum().backward()
    reference.experts(wide[0], ids, wide[1], gate_up, down).sum().backward()
    for one, other in zip(own, wide, strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad.double() - other.grad).abs().max() <= 0.05 * other.grad.abs().max()


@pytest.mark.gpu
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_words_than_31_bits_count() -> None:
    """Offsets of words that 31 bits do not hold: the last expert has the weights of the first."""
    experts, out, columns = 2000, 1536, 2048
    one = torch.randn(out, columns, generator=torch.Generator(CUDA).manual_seed(1), device=CUDA) * 0.02
    packed = pack(one.bfloat16().repeat(experts, 1))
    assert packed.words.numel() > 1 << 31
    x, ids = torch.randn(2, columns, device=CUDA).bfloat16(), torch.tensor([[0], [experts - 1]], device=CUDA)
    x[1] = x[0]
    for route, multiply in ((triton_route.route, grouped.grouped_linear), (ops.route, ops.grouped_linear)):
        routing, filled = route(ids, x, experts, 16)
        y = multiply(filled, packed, experts, routing)[routing.position.long()]
        assert torch.equal(y[0], y[1])
        assert (y[0] - x[0] @ one.bfloat16().T).abs().max() < 0.1
