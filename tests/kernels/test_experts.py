"""Mixtures of experts with packed weights: layers and their steps as models call them, against fp64.

With a CUDA device all of this runs there, by the kernels; without one plain torch does it.
"""

from __future__ import annotations

import pytest
import torch
from tensors import gaussian
from torch import Tensor
from torch._subclasses import FakeTensorMode

from neuzip.kernels.experts import ops, reference
from neuzip.kernels.experts import routing as plain
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.kernels.experts.operators import gated_linear
from neuzip.kernels.packed_linear.ops import pack
from neuzip.kernels.packed_linear.tensor import PackedTensor

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of one rounding."""

ROUNDINGS = 8
"""Roundings between x and the result of a layer that may add up, of which each counts for the largest result:
gate, up, silu, their product, down, the weighted product, the result, and one of the sums of fp32."""

GPT_OSS = Gate(interleaved=True, limit=7.0, alpha=1.702)


def weights(experts: int, out: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return gaussian(experts, out, columns, seed=seed, dtype=dtype, deviation=0.1)


def packed(dense: Tensor, device: torch.device) -> PackedTensor:
    return pack(dense.flatten(0, 1).to(device))


def ids_of(case: str, tokens: int, k: int, experts: int) -> Tensor:
    if case == "one expert":
        return torch.full((tokens, k), experts - 2)
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :k]
    if case == "sentinels":
        ids[::2, 0], ids[1::3, -1] = experts, -1
    if case == "no expert":
        ids[:] = experts
    if case == "an expert without a token":
        ids[ids == 1] = 2
    return ids


def assert_near(y: Tensor, exact: Tensor) -> None:
    off = (y.double().cpu() - exact.cpu()).abs().max() if exact.numel() else torch.tensor(0.0)
    largest = exact.abs().max() if exact.numel() else torch.tensor(0.0)
    assert y.shape == exact.shape
    assert off <= ROUNDINGS * ROUNDING[y.dtype] * largest


@pytest.mark.parametrize(
    ("case", "tokens", "k", "gate", "dtype", "id_dtype", "share_dtype"),
    [
        ("any", 1, 2, Gate(), torch.bfloat16, torch.int64, torch.bfloat16),
        ("an expert without a token", 7, 3, Gate(), torch.float16, torch.int32, torch.float32),
        ("sentinels", 9, 2, GPT_OSS, torch.bfloat16, torch.int64, torch.float32),
        ("one expert", 40, 1, Gate(limit=0.5), torch.bfloat16, torch.int64, torch.bfloat16),
        ("no expert", 3, 2, Gate(), torch.bfloat16, torch.int64, torch.bfloat16),
        ("any", 0, 2, Gate(interleaved=True), torch.bfloat16, torch.int32, torch.bfloat16),
    ],
)
def test_a_layer(case, tokens, k, gate, dtype, id_dtype, share_dtype, device, poison) -> None:
    experts, columns, inner, out = 5, 70, 24, 33
    gate_up, down = (
        weights(experts, 2 * inner, columns, 0, dtype),
        weights(experts, out, inner, 1, dtype),
    )
    biases = gaussian(experts, 2 * inner, seed=2).to(dtype), gaussian(experts, out, seed=4).to(dtype)
    x, shares = gaussian(tokens, columns, seed=5).to(dtype), gaussian(tokens, k, seed=6).abs().to(share_dtype)
    ids = ids_of(case, tokens, k, experts).to(id_dtype)
    for added in ((None, None), biases):
        exact = reference.experts(x, ids, shares, gate_up, down, gate, *added)
        y = ops.packed_experts(
            x.to(device), ids.to(device), shares.to(device), packed(gate_up, device), packed(down, device),
            experts, gate, *(None if b is None else b.to(device) for b in added),
        )  # fmt: skip
        assert y.dtype == dtype
        assert_near(y, exact)


def test_functions_of_a_module_between_the_steps(device: torch.device) -> None:
    """An activation without a gate, and a norm before the sum."""
    experts, x = 4, gaussian(6, 32, seed=5).bfloat16()
    up, down = weights(experts, 24, 32, 0), weights(experts, 16, 24, 1)
    ids, shares = ids_of("any", 6, 2, experts), gaussian(6, 2, seed=6).abs()
    y = ops.packed_experts(
        x.to(device), ids.to(device), shares.to(device), packed(up, device), packed(down, device), experts,
        lambda rows: rows.relu().square(), norm=lambda rows: rows * 3,
    )  # fmt: skip
    pairs, flat = x.repeat_interleave(2, 0), ids.flatten()
    inner = reference.grouped_linear(pairs, flat, up).relu().square()
    rows = 3 * reference.grouped_linear(inner, flat, down).view(6, 2, 16)
    assert_near(y, (rows * shares.double()[..., None]).sum(1))


@pytest.mark.parametrize("tile", plain.TILES)
def test_tiles_and_rows_of_pairs(tile: int, device: torch.device) -> None:
    ids = torch.tensor([[2, 0], [2, -1], [9, 2]] + [[2, 5]] * 40, device=device)
    x = torch.arange(43.0, device=device)[:, None].bfloat16()
    routing, rows = ops.route(ids, x, 6, tile)
    pairs = {0: 1, 2: 43, 5: 40}
    tiles, first = [], 0
    for expert, count in pairs.items():
        number = -(-count // tile)
        tiles += [[expert, first, number, min(tile, count - tile * i)] for i in range(number)]
        first += number
    assert routing.tile == tile
    assert routing.count.tolist() == [len(tiles)]
    assert routing.tiles[: len(tiles)].tolist() == tiles
    assert len(tiles) <= len(routing.tiles) == plain.most_tiles(86, 6, tile)
    positions = {expert: iter(range(10**6)) for expert in pairs}
    starts = {t[0]: t[1] * tile for t in tiles}
    exact = [starts[e] + next(positions[e]) if e in pairs else -1 for e in ids.flatten().tolist()]
    assert routing.position.tolist() == exact
    for pair, row in enumerate(exact):
        assert row < 0 or rows[row].item() == pair // 2


@pytest.mark.parametrize("tile", plain.TILES)
def test_no_routing_needs_more_tiles(tile: int) -> None:
    for experts in (1, 3, 8):
        for pairs in (0, 1, 3, 8, 9, tile, 5 * tile + 3):
            most = plain.most_tiles(pairs, experts, tile)
            spread = max(0, pairs - experts) // tile * tile  # whole tiles of one expert
            worst = [spread, *[0] * (experts - 1)]
            for i in range(pairs - spread):
                worst[i % experts] += 1
            assert sum(-(-n // tile) for n in worst) == most


def test_gradients(device: torch.device) -> None:
    experts, tokens, k, columns, inner = 4, 6, 2, 32, 16
    gate_up, down = weights(experts, 2 * inner, columns, 0), weights(experts, columns, inner, 1)
    ids = ids_of("sentinels", tokens, k, experts)
    inputs = (
        gaussian(tokens, columns, seed=2).bfloat16(), gaussian(tokens, k, seed=3).abs(),
        gaussian(experts, 2 * inner, seed=4).bfloat16(), gaussian(experts, columns, seed=5).bfloat16(),
    )  # fmt: skip
    for gate in (Gate(), GPT_OSS):
        x, shares, *biases = (one.clone().to(device).requires_grad_() for one in inputs)
        wide = [one.double().requires_grad_() for one in inputs]
        y = ops.packed_experts(
            x, ids.to(device), shares, packed(gate_up, device), packed(down, device), experts, gate, *biases
        )
        exact = reference.experts(wide[0], ids, wide[1], gate_up, down, gate, *wide[2:])
        grad = gaussian(tokens, columns, seed=6).bfloat16()
        y.backward(grad.to(device))
        exact.backward(grad.double())
        for one, other in zip((x, shares, *biases), wide, strict=True):
            assert one.grad is not None and other.grad is not None
            off = (one.grad.double().cpu() - other.grad).abs().max()
            assert off <= 2 * ROUNDINGS * 2.0**-8 * other.grad.abs().max()


def test_gradients_of_a_layer_without_a_gate_to_fuse(device: torch.device) -> None:
    """Biases are absent, as where Hopper's kernels multiply gate and up in one launch."""
    experts, x = 2, gaussian(3, 128, seed=2).bfloat16()
    gate_up, down = weights(experts, 64, 128, 0), weights(experts, 32, 32, 1)
    ids, shares = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    own, wide = x.clone().to(device).requires_grad_(), x.double().requires_grad_()
    layer = packed(gate_up, device), packed(down, device), experts
    ops.packed_experts(own, ids.to(device), shares.to(device), *layer).sum().backward()
    reference.experts(wide, ids, shares, gate_up, down).sum().backward()
    assert own.grad is not None and wide.grad is not None
    assert (own.grad.double().cpu() - wide.grad).abs().max() <= 0.06 * wide.grad.abs().max()


def test_rows_without_a_pair_spoil_no_gradient_of_a_norm(device: torch.device, poison: None) -> None:
    experts, x = 3, gaussian(2, 32, seed=2).bfloat16().to(device)
    gate_up, down = (packed(weights(experts, 32, n, 0), device) for n in (32, 16))
    ids, shares = torch.tensor([[0, 2], [5, 2]], device=device), torch.ones(2, 2, device=device)
    for needs in (False, True):
        scale = torch.ones(32, dtype=torch.bfloat16, device=device, requires_grad=True)
        own = x.clone().requires_grad_(needs)
        ops.packed_experts(
            own, ids, shares, gate_up, down, experts, norm=lambda r, s=scale: r * s
        ).sum().backward()
        assert scale.grad is not None and scale.grad.isfinite().all()


@pytest.mark.slow
def test_compiled_with_any_number_of_tokens(device: torch.device) -> None:
    experts, columns = 3, 32
    gate_up, down = (packed(weights(experts, 32, n, 0), device) for n in (columns, 16))

    def layer(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return ops.packed_experts(x, ids, shares, gate_up, down, experts)

    traced = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (5, 300):
        arguments = (
            gaussian(tokens, columns).bfloat16(),
            ids_of("any", tokens, 2, experts),
            torch.ones(tokens, 2),
        )
        on_device = [one.to(device) for one in arguments]
        assert torch.equal(traced(*on_device), layer(*on_device))


def test_operators_say_what_they_return() -> None:
    """Shapes and dtypes of tensors without values are those of the results."""
    experts, tile = 3, 16
    weight = packed(weights(experts, 32, 48, 0), torch.device("cpu"))
    x, ids, shares = gaussian(4, 48).bfloat16(), ids_of("any", 4, 2, experts), torch.ones(4, 2)

    def steps(x: Tensor, ids: Tensor, shares: Tensor, packed: PackedTensor) -> list[Tensor]:
        routing, rows = ops.route(ids, x, experts, tile)
        y = ops.grouped_linear(rows, packed, experts, routing)
        return [*routing[1:], rows, y, inner := ops.apply_gate(y, routing, Gate()),
                ops.weighted_sum(inner, routing, shares)]  # fmt: skip

    real = steps(x, ids, shares, weight)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(one) for one in (x, ids, shares)]
        fake = steps(*fakes, weight)
        routing = plain.Routing(tile, *fake[:3])
        opened = gated_linear(fake[3], *routing[1:], tile, experts, *weight.arguments)
    for one, other in zip((*real, real[5]), (*fake, opened), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"index": torch.zeros(3, 2, dtype=torch.int16)}, TypeError, "`index`.*int16"),
        ({"index": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "have shapes"),
        ({"weights": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "`weights`.*int64"),
        ({"x": torch.zeros(3, 32)}, TypeError, "`gate_up` is of torch.bfloat16, x of torch.float32"),
        ({"x": torch.zeros(3, 31, dtype=torch.bfloat16)}, ValueError, "31 columns"),
        ({"experts": 5}, ValueError, "not those of 5 experts"),
        ({"gate_up_bias": torch.zeros(4, 16, dtype=torch.bfloat16)}, ValueError, "`gate_up_bias` is .*4, 32"),
        ({"down_bias": torch.zeros(4, 32)}, ValueError, "`down_bias`"),
        ({"activation": lambda rows: rows}, ValueError, "rows have 32 columns, the packed weights 16"),
        ({"activation": lambda rows: rows[:, :16].float()}, TypeError, "rows are of torch.float32"),
        ({"x": torch.zeros(3, 32, dtype=torch.bfloat16, device="meta")}, ValueError, "x is on meta"),
    ],
)
def test_what_does_not_go_together_is_refused(change, error, match) -> None:
    cpu = torch.device("cpu")
    arguments = {
        "x": torch.zeros(3, 32, dtype=torch.bfloat16), "index": torch.zeros(3, 2, dtype=torch.int64),
        "weights": torch.zeros(3, 2), "gate_up": packed(weights(4, 32, 32, 0), cpu),
        "down": packed(weights(4, 32, 16, 1), cpu), "experts": 4,
    }  # fmt: skip
    with pytest.raises(error, match=match):
        ops.packed_experts(**(arguments | change))


def test_plain_gates_are_those_of_the_models() -> None:
    rows = gaussian(3, 16, seed=1) * 8
    a, b = rows.chunk(2, 1)
    assert torch.equal(gated(rows, Gate()), torch.nn.functional.silu(a) * b)
    a, b = rows[:, ::2].clamp(max=7.0), rows[:, 1::2].clamp(-7.0, 7.0)
    assert torch.equal(gated(rows, GPT_OSS), (b + 1) * (a * torch.sigmoid(a * 1.702)))
