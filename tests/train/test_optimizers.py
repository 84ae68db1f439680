"""The optimizers and their states in 8 bits, against torch's own and in expectation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from neuzip.kernels.quantizers import states as quantized
from neuzip.kernels.quantizers.states import BLOCK, RngKey
from neuzip.train.optimizers import OPTIMIZERS, SGD, AdamW, Optimizer, ParameterUpdate, optimizer_of

pytestmark = pytest.mark.usefixtures("one_thread")


def updated(optimizer: Optimizer, weight: Tensor, gradients: list[Tensor], lr: float = 1e-2) -> Tensor:
    weight = weight.clone()
    states = optimizer.new_states(weight.numel(), weight.device)
    for step, gradient in enumerate(gradients, 1):
        optimizer.update(ParameterUpdate(weight, gradient, lr, RngKey(0, step, 0)), states)
    return weight


@pytest.fixture
def problem() -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    return torch.randn(1000), [torch.randn(1000) * 10 ** torch.empty(1000).uniform_(-4, 0) for _ in range(20)]


def test_adamw_is_that_of_torch(problem: tuple[Tensor, list[Tensor]]) -> None:
    weight, gradients = problem
    parameter = nn.Parameter(weight.clone())
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient
        theirs.step()
    assert torch.allclose(updated(AdamW(), weight, gradients), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_adamw_in_8_bits_stays_close(problem: tuple[Tensor, list[Tensor]]) -> None:
    weight, gradients = problem
    exact, rough = (updated(AdamW(eight_bits=one), weight, gradients) for one in (False, True))
    assert (exact - rough).norm() < 0.1 * (exact - weight).norm()


def test_states_take_what_is_said() -> None:
    states = AdamW(eight_bits=True).new_states(10 * BLOCK, torch.device("cpu"))
    assert sum(state.nbytes for state in states.values()) == 10 * (2 * BLOCK + 8)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_update_does_not_depend_on_how_a_tensor_is_cut(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    torch.manual_seed(1)
    weight, gradient = torch.randn(5 * BLOCK + 7).bfloat16(), torch.randn(5 * BLOCK + 7).bfloat16()
    whole, cut = weight.clone(), weight.clone()
    states = optimizer.new_states(weight.numel(), weight.device)
    parts = [
        optimizer.new_states(2 * BLOCK, weight.device),
        optimizer.new_states(3 * BLOCK + 7, weight.device),
    ]
    for step in (1, 2):
        optimizer.update(ParameterUpdate(whole, gradient, 0.01, RngKey(4, step, 9)), states)
        for own, mine in zip((slice(0, 2 * BLOCK), slice(2 * BLOCK, None)), parts, strict=True):
            chance = RngKey(4, step, 9, own.start)
            optimizer.update(ParameterUpdate(cut[own], gradient[own], 0.01, chance), mine)
    assert torch.equal(whole, cut)
    assert not torch.equal(whole, weight)


def test_pieces_are_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuzip.train import optimizers

    weight, gradient = torch.randn(1000), torch.randn(1000)
    assert optimizers.PIECE % BLOCK == optimizers.CPU_PIECE % BLOCK == 0
    whole = updated(AdamW(eight_bits=True), weight, [gradient] * 3)
    monkeypatch.setattr(optimizers, "CPU_PIECE", 2 * BLOCK)
    assert torch.equal(updated(AdamW(eight_bits=True), weight, [gradient] * 3), whole)


@pytest.mark.parametrize("decays", [True, False])
def test_triton_takes_the_same_step_of_adamw(decays: bool, device: torch.device) -> None:
    torch.manual_seed(4)
    n = 9 * BLOCK + 13
    optimizer = AdamW(eight_bits=True, stochastic=True)
    one, scale = torch.randn(n).bfloat16(), torch.tensor(0.7)
    other = one.to(device, copy=True)
    states = optimizer.new_states(n, one.device)
    theirs = optimizer.new_states(n, device)
    for step in (1, 2, 3):
        gradient = (torch.randn(n) * 10 ** torch.empty(n).uniform_(-3, 0)).bfloat16()
        gradient[0], gradient[BLOCK] = 0.0, -0.0
        chance = RngKey(8, step, 5, 3 * BLOCK)
        optimizer.update(ParameterUpdate(one, gradient, 0.01, chance, scale, decays), states)
        there = ParameterUpdate(other, gradient.to(device), 0.01, chance, scale.to(device), decays)
        optimizer._update_by_triton(there, theirs)
        for name, state in states.items():
            a, b = state.float(), theirs[name].cpu().float()
            assert torch.allclose(a, b, rtol=1e-5, atol=1.0 if not name.endswith("_top") else 0.0), name
            assert (a - b).abs().gt(1e-5 * a.abs()).float().mean() < 0.01, name
        assert torch.allclose(one.float(), other.cpu().float(), rtol=2**-7)
        assert (one != other.cpu()).float().mean() < 0.01
        theirs = {name: state.to(device, copy=True) for name, state in states.items()}
        other.copy_(one)


def test_triton_makes_nan_of_blocks_that_are_not_finite(device: torch.device) -> None:
    optimizer = AdamW(eight_bits=True, stochastic=True)
    weight, gradient = torch.ones(2, 3 * BLOCK, device=device).bfloat16()
    gradient[BLOCK + 7], gradient[2 * BLOCK] = math.nan, math.inf
    states = optimizer.new_states(3 * BLOCK, weight.device)
    optimizer._update_by_triton(ParameterUpdate(weight, gradient, 0.01, RngKey(0, 1, 0)), states)
    assert states["first_top"].isfinite().tolist() == [True, False, False]
    assert weight[:BLOCK].isfinite().all() and weight[BLOCK + 7].isnan()


def test_decay_is_for_matrices() -> None:
    weight = torch.ones(300)
    for optimizer in (SGD(weight_decay=0.1), AdamW()):
        for decays in (True, False):
            own = weight.clone()
            states = optimizer.new_states(300, own.device)
            optimizer.update(
                ParameterUpdate(own, torch.zeros(300), 0.5, RngKey(0, 1, 0), decays=decays), states
            )
            assert torch.allclose(own, torch.full((300,), 0.95 if decays else 1.0))


# States in 8 bits, and chance.


def test_codes_are_right_in_expectation() -> None:
    torch.manual_seed(2)
    for signed in (True, False):
        x = torch.randn(4 * BLOCK) if signed else torch.randn(4 * BLOCK).square()
        decoded = [
            quantized.decode(*quantized.encode(x, signed, RngKey(0, step, 0), 0)) for step in range(400)
        ]
        one, mean = decoded[0], torch.stack(decoded).mean(0)
        top = x.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
        assert ((one - x).abs() / top).max() < 0.017
        assert (mean - x).norm() < 0.1 * (one - x).norm()


def test_a_moment_that_decays_slowly_does_decay() -> None:
    x = torch.full((BLOCK,), 0.5)
    x[0] = 1.0  # keeps the scale of the block
    for step in range(1000):
        x = quantized.decode(*quantized.encode(x * 0.999, False, RngKey(0, step, 0), 0))
        x[0] = 1.0
    assert float(x[1:].mean()) == pytest.approx(0.5 * 0.999**1000, rel=0.1)


def test_blocks_of_zeros_and_of_what_is_not_finite() -> None:
    x = torch.zeros(3 * BLOCK - 5)
    x[BLOCK + 3], x[2 * BLOCK] = math.inf, 2.0
    found = quantized.decode(*quantized.encode(x, True, RngKey(0, 1, 0), 0))
    assert torch.equal(found[:BLOCK], torch.zeros(BLOCK))
    assert found[BLOCK : 2 * BLOCK].isnan().all()
    assert found[2 * BLOCK] == 2.0 and torch.equal(found[2 * BLOCK + 1 :], torch.zeros(BLOCK - 6))


def test_weights_rounded_by_chance_are_neighbours_and_right_in_expectation() -> None:
    x = torch.tensor([1.0 + 2**-9, -1.0 - 2**-9, 1.0, 0.0, math.inf, math.nan, 3e38])
    found = torch.stack(
        [quantized.stochastic_round(x, torch.bfloat16, RngKey(0, step, 0), 2).float() for step in range(2000)]
    )
    assert set(found[:, 0].tolist()) == {1.0, 1.0 + 2**-7}
    assert found[:, 0].mean() == pytest.approx(1 + 2**-9, abs=3e-4)
    assert found[:, 1].mean() == pytest.approx(-1 - 2**-9, abs=3e-4)
    assert (found[:, 2] == 1).all() and (found[:, 3] == 0).all()
    assert (found[:, 4] == math.inf).all() and found[:, 5].isnan().all()
    with pytest.raises(TypeError):
        quantized.stochastic_round(x, torch.float16, RngKey(0, 1, 0), 2)


def test_small_updates_are_lost_only_when_rounded_to_nearest() -> None:
    weight = torch.ones(4096, dtype=torch.bfloat16)
    for name, expected in (("sgd", 1.0), ("sgd-stochastic", 0.9)):
        own = weight.clone()
        for step in range(1, 101):
            part = ParameterUpdate(own, torch.ones_like(own), 1e-3, RngKey(0, step, 0))
            optimizer_of(name).update(part, {})
        assert float(own.float().mean()) == pytest.approx(expected, abs=2e-3)


def test_chance_is_a_function_of_its_place() -> None:
    device = torch.device("cpu")
    words = RngKey(1, 2, 3).words(1 << 16, 0, device)
    assert torch.equal(words[5000:5010], RngKey(1, 2, 3, 5000).words(10, 0, device))
    assert words.unique().numel() == words.numel()
    for other in (RngKey(0, 2, 3), RngKey(1, 1, 3), RngKey(1, 2, 0)):
        assert (other.words(1000, 0, device) == words[:1000]).sum() < 3
    assert (RngKey(1, 2, 3).words(1000, 1, device) == words[:1000]).sum() < 3
    assert not torch.equal(RngKey(1, 2, 3, 1 << 32).words(10, 0, device), words[:10])
    ones = torch.stack([(words >> bit & 1).float().mean() for bit in range(32)])
    assert ((ones - 0.5).abs() < 0.01).all()
    neighbours = torch.corrcoef(torch.stack([words[:-1], words[1:]]).float())
    assert abs(float(neighbours[0, 1])) < 0.02
