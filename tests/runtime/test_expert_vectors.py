"""Mixtures of experts coded by rANS whose experts are multiplied while they are decoded, without a pool."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from ans_codes import ans_experts

from neuzip.kernels import tuning
from neuzip.kernels.expert_pool.ops import pays_while_decoded
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.runtime import buffers
from neuzip.runtime.weights import AnsWeight
from neuzip.runtime.weights.expert_pool import pooled_experts
from neuzip.runtime.weights.expert_vectors import vector_experts

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

MEASURED = {  # experts, hidden size, inner size, experts of a token: us by tokens, with a pool and without
    (128, 2048, 768, 8): {
        1: (85.5, 98.8), 2: (144.6, 115.6), 3: (189.8, 150.8), 4: (233.5, 178.2), 8: (384.9, 293.3)
    },
    (8, 4096, 14_336, 2): {1: (534, 351), 2: (884, 660), 3: (1073, 946), 4: (1325, 1240), 8: (1832, 2373)},
}  # fmt: skip
"""Times on an H200 at commit 3723ee8, of benchmarks/expert_pool.py."""


def random(*shape: int, seed: int, scale: float) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DEVICE, torch.bfloat16)


def while_decoded(always: bool) -> AbstractContextManager[None]:
    """Within which experts are always, or never, multiplied while they are decoded."""
    return tuning.replaced({"expert_pool.while_decoded": [{"use": {"pays": always}}]})


def dense_layer(experts: int, width: int, inner: int) -> list[torch.Tensor]:
    """Gate and up, and down: some weights of some rows are too small for the coder's table, which is 16
    exponents, and one row of down is larger than all others."""
    dense = [random(experts, 2 * inner, width, seed=1, scale=0.03)]
    dense.append(random(experts, width, inner, seed=2, scale=0.03))
    dense[0][:, ::7, ::300] *= 2.0**-30
    dense[1][:, 5] *= 2.0**20
    return dense


def rounded_layer(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, dense: list[torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A layer with fp64 sums, rounded to bf16 where the kernels round: [tokens, out], and what is allowed.

    The kernels' fp32 sums may be rounded to the neighbour, one unit in the last place away: 2^-7 of a number.
    So 2^-7 of what each expert adds to a number is allowed, of the largest of its products (their root of the
    sum of squares is no smaller), and of the number itself. Experts may cancel each other out, and rows have
    very different sizes: an error relative to the result, or to its largest number, says nothing.
    """
    y = torch.zeros(len(x), dense[1].shape[1], dtype=torch.float64, device=x.device)
    allowed = torch.zeros_like(y)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if not 0 <= expert < len(dense[0]):
                continue
            first, second = (0.0 if bias is None else bias[expert].double() for bias in biases)
            sums = dense[0][expert].double() @ x[token].double() + first
            products = dense[1][expert].double() * gated(sums.bfloat16()[None], Gate()).double()
            rounded = (products.sum(1) + second).bfloat16().double()
            share = shares[token, slot].double()
            y[token] += share * rounded
            allowed[token] += share * (rounded.abs() + products.square().sum(1).sqrt())
    return y, 2.0**-7 * (allowed + y.abs())


def within(y: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether every number of y differs from its own by no more than what is allowed."""
    return bool(((y.double() - expected[0]).abs() <= expected[1]).all())


@pytest.mark.parametrize("shape", MEASURED)
def test_experts_are_multiplied_while_decoded_where_that_was_faster(shape: tuple[int, ...]) -> None:
    experts, width, inner, of_token = shape
    for tokens, (pool, vectors) in MEASURED[shape].items():  # type: ignore[index]
        pays = pays_while_decoded(tokens * of_token, experts, 3 * width * inner, torch.device("cpu"))
        assert pays == (vectors < pool), tokens


def test_two_tokens_need_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share an expert, and one of them has an id of no expert. Weights are escapes of the coder."""
    dense = [random(2, 512, 256, seed=1, scale=0.03), random(2, 64, 256, seed=2, scale=0.03)]
    common = dense[0].clone()
    dense[0][:, ::7, ::100] *= 2.0**-30
    coded = [ans_experts(matrix, 2) for matrix in dense]
    x, ids = random(2, 256, seed=3, scale=1), torch.tensor([[1, 0], [1, 2]], device=DEVICE)
    shares = torch.rand(2, 2, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    with torch.no_grad():
        assert vector_experts(x, ids, shares, *coded, Gate()) is None  # the table's answer for so few weights
        monkeypatch.setattr(buffers, "lend", refuse)
        with while_decoded(True):
            y = pooled_experts(x, ids, shares, *coded)
    assert within(y, rounded_layer(x, ids, shares, dense))
    assert not within(y, rounded_layer(x, ids, shares, [common, dense[1]]))


def refuse(*arguments: Any) -> Any:
    raise AssertionError("memory for a pool was lent")


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", [(16, 512, 256), (8, 1024, 1536)])
def test_a_graph_with_other_experts_each_time(shape: tuple[int, int, int], tokens: int) -> None:
    """One of them twice, some, or none."""
    experts, width, inner = shape
    dense = dense_layer(*shape)
    coded = [AnsWeight.of(matrix) for matrix in dense]
    x = random(tokens, width, seed=3, scale=1)
    shares = torch.rand(tokens, 4, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    biases = random(experts, 2 * inner, seed=5, scale=1), random(experts, width, seed=6, scale=1)
    ids = torch.tensor([[0, 1, 2, 3]] * tokens, device=DEVICE)
    with torch.no_grad(), while_decoded(True):
        assert vector_experts(x, ids, shares, *coded, Gate()) is not None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plain = vector_experts(x, ids, shares, *coded, Gate())
            biased = vector_experts(x, ids, shares, *coded, Gate(), *biases)
    assert plain is not None and biased is not None
    for listed in ([7, 0, 3, 5], [2, 2, 1, 7], [experts, -1, 6, 4], [experts] * 4):
        ids.copy_(torch.stack([torch.tensor(listed).roll(token) for token in range(tokens)]))
        graph.replay()
        assert within(plain, rounded_layer(x, ids, shares, dense))
        assert within(biased, rounded_layer(x, ids, shares, dense, biases))
