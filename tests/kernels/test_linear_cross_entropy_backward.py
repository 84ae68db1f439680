"""The cross-entropy of a linear head and its gradients, on the CPU and by the kernels.

Kernels run on a GPU where there is one, else in Triton's interpreter. What they give may be no further from
fp64 than what torch gives in the same dtype, with all logits in memory.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuzip.kernels.linear_cross_entropy import gradients as loss_of
from neuzip.kernels.linear_cross_entropy.gradients import linear_cross_entropy
from neuzip.kernels.linear_cross_entropy.triton import backward as triton_backward
from neuzip.kernels.linear_cross_entropy.triton import candidates, vocabulary
from neuzip.kernels.linear_cross_entropy.triton.vocabulary import Vocabulary
from neuzip.kernels.packed_linear import ops as packed_linear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = 1e-5
"""Beside what torch loses, of a probability of 1 or the largest gradient: fp32 in another order of sums."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> torch.device:
    """Have Triton do the work, in its interpreter if need be; returns the device of the tensors."""
    monkeypatch.setattr(loss_of, "_on_gpu", lambda hidden: True)
    if device.type == "cpu":  # programs share work in the interpreter too
        monkeypatch.setattr(triton_backward, "multiprocessors", lambda device: 2)
    return device


class Case:
    """Inputs of a loss, and what it has to give, in fp64."""

    def __init__(
        self, n: int, v: int, d: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        bias: bool = False, softcap: float | None = None, ignored: float = 0.2, spread: float = 2.0,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(n + v + d)
        self.dtype, self.device, self.softcap = dtype, device, softcap
        self.hidden = (torch.randn(n, d, generator=random)).to(device, dtype)
        self.weight = (torch.randn(v, d, generator=random) * spread / max(d, 1) ** 0.5).to(device, dtype)
        self.bias = torch.randn(v, generator=random).to(device, dtype) if bias else None
        target = torch.randint(0, v, (n,), generator=random)
        target[torch.rand(n, generator=random) < ignored] = -100
        self.target = target.to(device)

    def inputs(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Hidden states, weights and bias as leaves."""
        given = (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)
        return [one.detach().to(dtype or self.dtype).clone().requires_grad_() for one in given]

    def logits(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """All of them, in the dtype of the inputs."""
        z = F.linear(*inputs)
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def plain(self, dtype: torch.dtype, reduction: str = "sum") -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Loss and gradients as torch computes them from logits in memory, the softmax in fp32 or fp64."""
        inputs = self.inputs(dtype)
        z = self.logits(inputs).to(torch.promote_types(dtype, torch.float32))
        loss = F.cross_entropy(z, self.target, reduction=reduction)
        return loss.detach(), list(torch.autograd.grad(loss, inputs))

    def ours(self, reduction: str = "sum", **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Loss and gradients of `linear_cross_entropy`."""
        inputs = self.inputs()
        bias = inputs[2] if self.bias is not None else None
        loss = linear_cross_entropy(
            inputs[0], inputs[1], self.target, linear_bias=bias, softcap=self.softcap, reduction=reduction,
            **options,
        )  # fmt: skip
        assert isinstance(loss, torch.Tensor)
        return loss.detach(), list(torch.autograd.grad(loss, inputs))

    def assert_as_good_as_torch(self, reduction: str = "sum", **options: Any) -> None:
        """Compare both with fp64."""
        exact, plain, ours = (
            self.plain(torch.float64, reduction), self.plain(self.dtype, reduction),
            self.ours(reduction, **options),
        )  # fmt: skip
        for name, *results in zip(
            ["loss", "hidden", "weight", "bias"], *([loss, *grads] for loss, grads in (exact, plain, ours)),
            strict=False,
        ):  # fmt: skip
            want, theirs, found = (one.double() for one in results)
            share = 1.0 if reduction == "sum" else 1.0 / len(self.target)
            scale = want.abs().max().clamp(min=share)
            rounding = max(TOLERANCE, torch.finfo(self.dtype).eps / 2)
            for measure, tolerance in ((_rms, TOLERANCE), (_largest, rounding)):
                off, allowed = measure(found - want), measure(theirs - want) + tolerance * scale
                assert off <= allowed, f"{name}: {off:.3g} off, allowed {allowed:.3g}"


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.abs().max()


CASES = [
    ((252, 507, 128), True), ((252, 507, 123), True), ((1, 1, 1), True), ((3, 1000, 64), False),
    ((129, 257, 40), False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "bias_and_softcap"), CASES, ids=str)
def test_gradients_are_as_good_as_those_of_torch(
    kernels: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, bias_and_softcap: bool
) -> None:
    case = Case(*shape, dtype, kernels, bias_and_softcap, 20.0 if bias_and_softcap else None)
    case.assert_as_good_as_torch(filter_eps=None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(252, 507, 123), (1, 1, 1)], ids=str)
def test_on_a_cpu_too(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: torch.dtype, reduction: str
) -> None:
    monkeypatch.setattr(loss_of, "LOGITS", 100 * 100)
    monkeypatch.setattr(loss_of, "ROWS", 100)
    Case(*shape, dtype, "cpu", True, 20.0).assert_as_good_as_torch(reduction)


@pytest.mark.parametrize(
    ("where", "ignored", "reduction"),
    [("kernels", 0.4, "mean"), *itertools.product(["cpu"], [0.0, 0.4, 1.0], ["sum", "mean", "none"])],
)
def test_dropped_tokens_change_no_loss_and_no_gradient(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, ignored: float,
    reduction: str,
) -> None:  # fmt: skip
    """And the head sees no other tokens."""
    device = request.getfixturevalue("kernels") if where == "kernels" else torch.device("cpu")
    case = Case(130, 257, 40, torch.float32, device, bias=True, softcap=20.0, ignored=ignored)
    weights = torch.randn(130, generator=torch.Generator().manual_seed(0)).to(device)
    seen, forward = [], loss_of._forward_on_gpu if where == "kernels" else loss_of._forward_on_cpu
    monkeypatch.setattr(
        loss_of, forward.__name__, lambda loss, *rest: seen.append(len(loss.hidden)) or forward(loss, *rest)
    )

    def found(drop: bool) -> list[torch.Tensor]:
        inputs = case.inputs()
        nll, lse = linear_cross_entropy(
            inputs[0], inputs[1], case.target, linear_bias=inputs[2], softcap=case.softcap,
            reduction=reduction, filter_eps=None, return_lse=True, drop_ignored=drop,
        )  # fmt: skip
        counts = case.target != -100
        total = (nll * weights).sum() if reduction == "none" else nll
        grads = torch.autograd.grad(total + (lse * weights)[counts].sum(), inputs)
        assert not drop or not lse[~counts].any()
        return [nll.detach(), lse.detach()[counts], *grads]

    for dropped, kept in zip(found(True), found(False), strict=True):
        torch.testing.assert_close(dropped, kept, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert seen == [int((case.target != -100).sum()), 130]


def test_fp32_on_a_cpu_is_what_autograd_gives() -> None:
    case = Case(100, 300, 50, torch.float32, bias=True)
    for found, plain in zip(case.ours()[1], case.plain(torch.float32)[1], strict=True):
        assert torch.allclose(found, plain, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_loss_and_of_the_log_sum_exp() -> None:
    case = Case(7, 11, 5, torch.float64, bias=True, softcap=3.0)

    def both(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return linear_cross_entropy(
            hidden, weight, case.target, linear_bias=bias, softcap=3.0, reduction="none", return_lse=True
        )

    assert torch.autograd.gradcheck(both, case.inputs())


@pytest.mark.parametrize("eps", [None, 2.0**-6])
def test_the_log_sum_exp_has_gradients_even_where_the_target_is_ignored(
    kernels: torch.device, eps: float | None
) -> None:
    case = Case(140, 300, 32, torch.float32, kernels, ignored=0.5)
    case.target[:128] = -100
    inputs, exact = case.inputs(), case.inputs(torch.float64)
    loss, lse = linear_cross_entropy(*inputs, case.target, return_lse=True, filter_eps=eps)
    found = torch.autograd.grad(loss + (lse**2).mean(), inputs)
    z = case.logits(exact)
    want = torch.autograd.grad(
        F.cross_entropy(z, case.target) + (z.logsumexp(1) ** 2).mean(), exact
    )  # fmt: skip
    for one, other in zip(found, want, strict=True):
        error = (one.double() - other).abs().max()
        assert error <= (1e-5 if eps is None else 2 * eps) * other.abs().max()
    assert (lse.double() - z.logsumexp(1)).abs().max() < 1e-5


def test_every_token_has_a_gradient_of_its_own(kernels: torch.device) -> None:
    case = Case(140, 300, 32, torch.float16, kernels)
    inputs, exact = case.inputs(), case.inputs(torch.float64)
    weights = torch.rand(140, device=kernels) * 1e5  # as a loss that is scaled for fp16 has them
    losses = linear_cross_entropy(*inputs, case.target, reduction="none", filter_eps=None)
    assert isinstance(losses, torch.Tensor) and losses.dtype == torch.float32
    assert not losses[case.target == -100].any()
    want = F.cross_entropy(case.logits(exact), case.target, reduction="none")
    found = torch.autograd.grad((losses * weights * 1e-8).sum(), inputs)
    exact_grads = torch.autograd.grad((want * weights.double() * 1e-8).sum(), exact)
    for one, other in zip(found, exact_grads, strict=True):
        # fp16 holds multiples of 2**-24, of which gradients of 1e-5 are few
        assert (one.double() - other).abs().max() <= 2.0**-10 * other.abs().max() + 2.0**-25
    assert not found[0][case.target == -100].any()


def confident(
    n: int, v: int, d: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, sure: float = 15.0
) -> Case:
    """A model that is sure of what follows: most of its probabilities are nothing."""
    case = Case(n, v, d, dtype, device, ignored=0.1, spread=1.0)
    favourites = torch.arange(n, device=device) // 50 * 191 % v
    case.hidden += case.weight[favourites] * sure
    case.target = torch.where(case.target == -100, -100, favourites)
    return case


@pytest.mark.parametrize("eps", [2.0**-5, 2.0**-12])
@pytest.mark.parametrize("sort", [False, True], ids=["own order", "sorted"])
def test_no_tile_is_left_out_that_has_an_entry_above_the_threshold(
    kernels: torch.device, eps: float, sort: bool
) -> None:
    case = confident(200, 800, 48, kernels, sure=40.0)
    arguments = case.hidden, case.weight, [], [], None, case.target, -100, None
    _, _, flags, order = torch.ops.neuzip.linear_cross_entropy(
        *arguments, eps, sort, True, False, 64 << 20
    )  # fmt: skip
    counted = case.target != -100
    p = case.logits(case.inputs(torch.float64)).softmax(1).detach()
    p[counted, case.target[counted]] -= 1
    p[~counted] = 0
    if sort:
        assert torch.equal(order.sort().values.cpu(), torch.arange(800))
        p = p[:, order]
    padded = F.pad(p.abs(), (0, -800 % 128, 0, -200 % 128))
    kept = (padded.view(-1, 128, padded.shape[1] // 128, 128).amax((1, 3)) >= eps).T
    assert flags.shape == kept.shape
    assert flags.bool()[kept].all()
    assert kept.sum() <= flags.sum() < flags.numel()
    own = case.target[counted] if not sort else torch.argsort(order)[case.target[counted]]
    assert flags[own // 128, counted.nonzero()[:, 0] // 128].all(), "a tile with a target"


@pytest.mark.slow
@pytest.mark.parametrize("sort", [False, True], ids=["own order", "sorted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_the_filter_leaves_out_is_bounded(kernels: torch.device, sort: bool, dtype: torch.dtype) -> None:
    """Each softmax left out is below eps: a gradient lacks at most eps times a sum of |inputs|."""
    case, eps = confident(200, 800, 48, kernels, dtype), 2.0**-5
    _, exact = case.ours(filter_eps=None)
    _, found = case.ours(filter_eps=eps, sort_vocabulary=sort)
    slack = 1 + 2 * candidates.BOUND_SLACK
    rounding = {torch.bfloat16: 2.0**-6, torch.float32: 1e-4}[dtype]
    sums_of = [one.double().abs().sum(0) for one in (case.weight, case.hidden)]
    for one, other, sums in zip(found, exact, sums_of, strict=True):
        off = (one.double() - other.double()).abs()
        assert (off <= eps * slack * sums + rounding * other.double().abs().max()).all()
        assert off.max() > 0, "nothing was left out"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-12), (torch.float16, 2.0**-15)])
def test_the_automatic_filter_goes_by_the_dtype(
    kernels: torch.device, dtype: torch.dtype, eps: float
) -> None:
    case = confident(150, 600, 32, kernels, dtype)
    for one, other in zip(case.ours()[1], case.ours(filter_eps=eps)[1], strict=True):
        assert torch.equal(one, other)


def test_sorting_leaves_fewer_tiles(kernels: torch.device) -> None:
    case = Case(128, 1280, 32, torch.float32, kernels, ignored=1.0)
    bias = torch.full((1280,), -30.0, device=kernels)
    bias[::16] = 0
    arguments = case.hidden, case.weight, [], [], bias, case.target, -100, None
    tiles = [
        int(torch.ops.neuzip.linear_cross_entropy(*arguments, 2.0**-12, sort, True, True, 64 << 20)[2].sum())
        for sort in (False, True)
    ]
    assert tiles == [10, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.slow
def test_any_workspace_and_any_run_give_the_same_bits(
    kernels: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one round or in many: what earlier rounds left is kept to the last bit."""
    monkeypatch.setattr(triton_backward, "LEAST_COLUMNS", 1)
    case = Case(200, 400, 32, dtype, kernels, bias=True)
    head = case.hidden, case.weight, [], [], case.bias, case.target, -100, None
    nll, *kept = torch.ops.neuzip.linear_cross_entropy(*head, None, False, True, False, 64 << 20)
    rounds = []
    plan = candidates.plan_rounds
    monkeypatch.setattr(triton_backward, "plan_rounds", lambda *a: rounds.append(plan(*a)) or rounds[-1])
    runs = [
        torch.ops.neuzip.linear_cross_entropy_backward(
            *head, torch.ones_like(nll), None, *kept, True, True, True, workspace
        )
        for workspace in (64 << 20, 0, 1 << 18, 0)
    ]
    assert rounds[0].rounds == 1 < rounds[2].rounds < rounds[1].rounds
    for run in runs[1:]:
        for one, other in zip(run, runs[0], strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("workspace", [0, 64 << 20])
def test_all_that_is_read_has_been_written(
    kernels: torch.device, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backward, "LEAST_COLUMNS", 1)
    case = confident(200, 600, 48, kernels)
    case.assert_as_good_as_torch(filter_eps=2.0**-12, workspace=workspace)


@pytest.mark.parametrize("tokens", [1024, 8192, 100_000])
def test_a_round_is_not_one_tile_however_large_the_hidden_states(tokens: int) -> None:
    hidden, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (tokens, 128_256))
    slots = triton_backward._slots(hidden, Vocabulary(weight), 64 << 20)
    across, down = candidates.tiles(tokens, 128_256)
    rounds = candidates.plan_rounds(torch.ones(across, down, dtype=torch.int8), slots, across).rounds
    assert rounds <= across / 7 + 1


def test_plans_are_what_their_description_says() -> None:
    choose = random.Random(0)
    for _ in range(60):
        across, down = choose.randint(1, 12), choose.randint(1, 7)
        share, segment = choose.choice([0.0, 0.1, 0.5, 1.0]), choose.randint(1, across)
        slots = choose.randint(down, down * across)
        flags = torch.tensor([[choose.random() < share for _ in range(down)] for _ in range(across)])
        plan = candidates.plan_rounds(flags.to(torch.int8), slots, segment)
        seen = []
        assert plan.round_column[0] == 0 and plan.round_column[-1] == across
        for number in range(plan.rounds):
            begin, end = (int(plan.row_start[i * down]) for i in (number, number + 1))
            assert end - begin <= slots
            columns = range(int(plan.round_column[number]), int(plan.round_column[number + 1]))
            assert all(column // segment == number // plan.rounds_a_segment for column in columns)
            for row in range(down):
                at = number * down + row
                own = plan.entries[int(plan.row_start[at]) : int(plan.row_start[at + 1])].tolist()
                assert [entry % down for entry in own] == [row] * len(own)
                assert [entry // down for entry in own] == [c for c in columns if flags[c, row]]
                seen += own
            for column in columns:
                where = range(int(plan.column_start[column]), int(plan.column_start[column + 1]))
                rows = [int(plan.column_row[e]) for e in where]
                assert rows == [row for row in range(down) if flags[column, row]]
                slot_of = [begin + int(plan.column_slot[e]) for e in where]
                assert plan.entries[slot_of].tolist() == [column * down + row for row in rows]
        assert sorted(seen) == flags.view(-1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("shift", [True, 2])
def test_targets_can_be_those_of_later_inputs(kernels: torch.device, shift: bool | int) -> None:
    case = Case(60, 90, 16, torch.float32, kernels)
    hidden, weight, target = case.hidden.view(3, 20, 16), case.weight, case.target.view(3, 20)
    before = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    found, lse = linear_cross_entropy(
        before[0], weight, target, shift=shift, reduction="none", return_lse=True, filter_eps=None
    )
    z = before[1][:, :-shift] @ weight.double().T
    want = F.cross_entropy(z.flatten(0, 1), target[:, shift:].flatten(), reduction="none")
    assert found.shape == lse.shape == (3, 20 - shift)
    assert torch.allclose(found.flatten().double(), want, atol=1e-5)
    assert torch.allclose(lse.double(), z.logsumexp(2), atol=1e-5)
    grads = torch.autograd.grad(found.mean(), before[0])[0], torch.autograd.grad(want.mean(), before[1])[0]
    assert torch.allclose(grads[0].double(), grads[1], atol=1e-6)
    assert not grads[0][:, -shift:].any()
    mean = linear_cross_entropy(hidden, weight, target, shift=shift)
    assert torch.allclose(mean.double(), want.sum() / (target[:, shift:] != -100).sum())


@pytest.mark.parametrize("n", [0, 5])
def test_where_nothing_counts_there_are_no_gradients(kernels: torch.device, n: int) -> None:
    case = Case(n, 40, 8, torch.bfloat16, kernels, bias=True, ignored=2.0)
    for options in ({}, {"filter_eps": None}, {"sort_vocabulary": True}):
        loss, grads = case.ours(**options)
        assert loss == 0 and not any(grad.any() for grad in grads)
    assert linear_cross_entropy(case.hidden, case.weight, case.target).isnan(), "the mean of nothing"


def test_strides_do_not_matter(kernels: torch.device) -> None:
    case = Case(130, 260, 48, torch.bfloat16, kernels)
    plain = case.ours(filter_eps=None)[1]
    case.hidden, case.weight = case.hidden.T.contiguous().T, F.pad(case.weight, (3, 2))[:, 3:-2]
    inputs = [one.requires_grad_() for one in (case.hidden, case.weight)]
    loss = linear_cross_entropy(*inputs, case.target, reduction="sum", filter_eps=None)
    for found, other in zip(torch.autograd.grad(loss, inputs), plain, strict=True):
        assert torch.allclose(found, other, rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("where", ["cpu", "kernels"])
@pytest.mark.parametrize("sort", [False, True], ids=["own order", "sorted"])
def test_packed_weights_give_the_gradients_of_the_same_weights(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, sort: bool
) -> None:
    device = request.getfixturevalue("kernels") if where == "kernels" else torch.device("cpu")
    monkeypatch.setattr(vocabulary, "SEGMENT", 256 * 48 * 2)
    case = Case(70, 700, 48, torch.bfloat16, device, bias=True)
    packed = packed_linear.pack(case.weight)
    found = []
    for weight in (case.weight, packed):
        hidden, bias = case.hidden.clone().requires_grad_(), case.bias.clone().requires_grad_()
        loss = linear_cross_entropy(hidden, weight, case.target, linear_bias=bias, sort_vocabulary=sort)
        found.append([loss, *torch.autograd.grad(loss, (hidden, bias))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("where", ["cpu", "kernels"])
@pytest.mark.parametrize("eps", [None, 2.0**-12])
def test_what_is_not_a_number_is_not_hidden(
    request: pytest.FixtureRequest, where: str, eps: float | None
) -> None:
    device = request.getfixturevalue("kernels") if where == "kernels" else torch.device("cpu")
    case = Case(140, 300, 16, torch.float32, device, ignored=0.0)
    case.hidden[3, 5] = torch.nan
    loss, (hidden, weight) = case.ours(filter_eps=eps)
    assert loss.isnan()
    assert hidden[3].isnan().all() and hidden[4].isfinite().all() and weight.isnan().any()


def test_a_target_outside_the_vocabulary_is_not_hidden(kernels: torch.device) -> None:
    case = Case(20, 30, 16, torch.float32, kernels, ignored=0.0)
    case.target[7] = 30
    loss, grads = case.ours()
    assert loss.isnan() and all(grad.isnan().any() for grad in grads)


def test_only_what_is_asked_for_is_computed(kernels: torch.device) -> None:
    case = Case(130, 260, 32, torch.bfloat16, kernels, bias=True)
    every = case.ours()[1]
    for i in range(3):
        given = [case.hidden.clone(), case.weight.clone(), case.bias.clone()]
        given[i].requires_grad_()
        loss = linear_cross_entropy(*given[:2], case.target, linear_bias=given[2], reduction="sum")
        loss.backward()
        assert torch.equal(given[i].grad, every[i])


def test_the_operators_keep_what_operators_promise() -> None:
    case = Case(9, 20, 8, torch.float32, bias=True)
    inputs = case.inputs()
    arguments = *inputs[:2], [], [], inputs[2], case.target, -100, 5.0
    torch.library.opcheck(
        torch.ops.neuzip.linear_cross_entropy.default, (*arguments, 2.0**-12, False, True, True, 1 << 20)
    )
    nll = torch.rand(9)
    kept = torch.empty(0, 0, dtype=torch.int8), torch.empty(0, dtype=torch.int64)
    detached = [one.detach() if isinstance(one, torch.Tensor) else one for one in arguments]
    torch.library.opcheck(
        torch.ops.neuzip.linear_cross_entropy_backward.default,
        (*detached, nll, None, nll, *kept, True, False, True, 1 << 20),
    )


def test_it_can_be_compiled() -> None:
    case = Case(9, 20, 8, torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    inputs = case.inputs()
    loss = compiled(*inputs, case.target, shift=1)
    plain = linear_cross_entropy(*inputs, case.target, shift=1)
    assert torch.equal(loss, plain)
    for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(plain, inputs), strict=True):
        assert torch.equal(one, other)


def test_under_autocast_it_computes_in_the_dtype_of_a_linear_layer() -> None:
    case = Case(20, 30, 8, torch.float32)
    inputs = case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*inputs, case.target)
    halved = linear_cross_entropy(*(one.bfloat16() for one in inputs), case.target)
    assert loss.dtype == torch.float32 and torch.equal(loss, halved)
    assert torch.autograd.grad(loss, inputs)[0].dtype == torch.float32


BROKEN: dict[str, tuple[type[Exception], Callable[[Case], object]]] = {
    "other dtypes": (TypeError, lambda c: linear_cross_entropy(c.hidden, c.weight.half(), c.target)),
    "targets of floats": (TypeError, lambda c: linear_cross_entropy(c.hidden, c.weight, c.target.float())),
    "too few targets": (ValueError, lambda c: linear_cross_entropy(c.hidden, c.weight, c.target[1:])),
    "another D": (ValueError, lambda c: linear_cross_entropy(c.hidden, c.weight[:, 1:], c.target)),
    "reduction": (ValueError, lambda c: linear_cross_entropy(c.hidden, c.weight, c.target, reduction="max")),
    "softcap": (ValueError, lambda c: linear_cross_entropy(c.hidden, c.weight, c.target, softcap=0.0)),
    "filter": (ValueError, lambda c: linear_cross_entropy(c.hidden, c.weight, c.target, filter_eps=1.0)),
    "shift": (ValueError, lambda c: linear_cross_entropy(c.hidden, c.weight, c.target, shift=-1)),
    "target": (IndexError, lambda c: linear_cross_entropy(c.hidden, c.weight, c.target + 1000)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_wrong_arguments_are_refused(what: str) -> None:
    error, call = BROKEN[what]
    with pytest.raises(error):
        call(Case(6, 10, 4, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [None, "auto"])
def test_memory_is_what_was_asked_for(eps: str | None) -> None:
    case = Case(4096, 64000, 1024, torch.bfloat16, "cuda")
    inputs, workspace = case.inputs(), 32 << 20
    for one in inputs:
        one.grad = torch.empty_like(one)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(
        linear_cross_entropy(*inputs, case.target, filter_eps=eps, workspace=workspace), inputs
    )
    extra = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
    assert extra <= workspace + (4 << 20), f"{extra:,} bytes"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"filter_eps": None}, {"sort_vocabulary": True}], ids=str)
def test_a_graph_can_be_captured(options: dict[str, Any]) -> None:
    case = Case(1024, 20000, 256, torch.bfloat16, "cuda", bias=True)
    inputs = case.inputs()

    def step() -> list[torch.Tensor]:
        loss = linear_cross_entropy(*inputs[:2], case.target, linear_bias=inputs[2], **options)
        return [loss, *torch.autograd.grad(loss, inputs)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for one, other in zip(captured, eager, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [None, "auto"])
def test_more_logits_than_an_int32_counts(eps: str | None) -> None:
    case = Case(16384, 140000, 64, torch.bfloat16, "cuda")
    inputs, loss = case.inputs(), None
    loss = linear_cross_entropy(*inputs, case.target, reduction="sum", filter_eps=eps)
    found = torch.autograd.grad(loss, inputs)
    rows = slice(16000, 16384)
    part = [inputs[0][rows].detach().float().requires_grad_(), inputs[1].detach().float()]
    z = F.linear(*part)
    want = torch.autograd.grad(F.cross_entropy(z, case.target[rows], reduction="sum"), part[0])[0]
    off = (found[0][rows].float() - want).abs().max()
    assert off <= (2.0**-7 if eps is None else 2.0**-5) * want.abs().max()
