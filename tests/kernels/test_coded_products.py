"""Matrices are multiplied with vectors while they are decoded: sums of rows, split rows, and escapes."""

from __future__ import annotations

import math

import pytest
import torch
from ans_codes import resident

from neuzip.kernels.expert_pool.triton.vectors import gate_sums, sum_slots
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans.chosen import ChunkOf
from neuzip.kernels.rans.coded import ChosenLaunch, Kind
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.kernels.rans.products import (
    CodedMatrices,
    Corrections,
    can_multiply,
    coded_matrices,
    row_sums,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights(numel: int, seed: int) -> torch.Tensor:
    """With exponents that are rare: some are escapes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 0.05
    values[torch.randint(numel, (numel // 700,), generator=generator)] *= 2.0**-20
    values[torch.randint(numel, (5,), generator=generator)] = 3e4
    return values.to(DEVICE, torch.bfloat16)


def check(items: list[list[ChunkOf]], dense: torch.Tensor, chosen: list[int], together: int = 1) -> None:
    """dense: [items, rows, columns]."""
    _, rows, columns = dense.shape
    assert can_multiply(items, columns)
    matrices = coded_matrices(items, rows, columns)
    assert matrices.corrections.row_start[-1] > 0
    x = torch.randn(len(chosen), columns, generator=torch.Generator().manual_seed(9)).to(
        DEVICE, torch.bfloat16
    )
    ids = torch.tensor(chosen, device=DEVICE)
    sums = matrices.multiply(ids, x, together)
    there = [slot for slot, item in enumerate(chosen) if 0 <= item < len(dense)]
    own = x[[slot // together for slot in there]]
    products = row_sums(matrices, sums[there], ids[there], own)
    exact = torch.einsum("src,sc->sr", dense[ids[there]].double(), own.double())
    size = torch.einsum("src,sc->sr", dense[ids[there]].double().abs(), own.double().abs())
    assert ((products - exact).abs() <= 2.0**-19 * size).all()


@pytest.mark.slow
def test_rows_that_go_on_in_the_next_block() -> None:
    dense = weights(3 * BLOCK, 0)
    check([[(resident(dense, 0, 3 * BLOCK), 0)]], dense.view(1, 64, 768), [-1, 0])


def test_what_cannot_be_multiplied() -> None:
    whole = resident(weights(BLOCK, 0), 0, BLOCK)
    assert can_multiply([[(whole, 0)]], 256)
    assert not can_multiply([[(whole, 0)]], 128)  # a run is of two rows
    assert not can_multiply([[(whole, 0)]], 2 * BLOCK)  # a row is in three blocks
    assert not can_multiply([[(whole.offloaded(), 0)]], 256)
    assert not can_multiply([[(resident(weights(1024, 0), 0, 1024), 0)]], 256)
    halves = resident(weights(BLOCK, 0), 0, BLOCK // 2, BLOCK)
    assert not can_multiply([[(halves, 0)], [(halves, 1)]], 256)


ITEMS, WIDTH = 3, 768


def made_up(rows: int, seed: int) -> CodedMatrices:
    """Tables without codes: some rows have corrections, up to three."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(4, (ITEMS * rows,), generator=generator) * (torch.arange(ITEMS * rows) % 2)
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    total = int(row_start[-1])
    columns = torch.randint(WIDTH, (total,), generator=generator).int()
    numbers = torch.randn(2, total, generator=generator).bfloat16().view(torch.int16).int()
    values = numbers[0] << 16 | numbers[1] & 0xFFFF
    wrong = Corrections(*(t.to(DEVICE) for t in (row_start, columns, values)))
    table = torch.zeros(ITEMS, 1, 2, dtype=torch.int64, device=DEVICE)
    launch = ChosenLaunch(Kind(FORMATS["BF16"], 7, 2, 0), False, 8, table, table, table, table)
    return CodedMatrices(rows, WIDTH, launch, wrong, ())


def made_up_sums(matrices: CodedMatrices, slots: int) -> torch.Tensor:
    return torch.randn(slots, matrices.rows, 2, generator=torch.Generator().manual_seed(5)).to(DEVICE)


def vectors(count: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(6)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("gate", [Gate(), Gate(interleaved=True, limit=0.7, alpha=1.7)])
def test_gates_of_sums(gate: Gate) -> None:
    matrices, x, chosen = made_up(70, 0), vectors(2), torch.tensor([2, 0, 5, 1], device=DEVICE)
    sums, bias = made_up_sums(matrices, 4), vectors(ITEMS, 70)
    hidden = gate_sums(matrices, sums, chosen, x, 2, gate, bias)
    there = torch.tensor([0, 1, 3], device=DEVICE)
    rows = row_sums(matrices, sums[there], chosen[there], x[there // 2]) + bias[chosen[there]].float()
    expected = gated(rows.bfloat16(), gate)
    torch.testing.assert_close(hidden[there], expected, rtol=2**-6, atol=2**-9)
    assert not hidden[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weighted_sums_of_slots(dtype: torch.dtype) -> None:
    matrices, x, chosen = made_up(40, 1), vectors(6), torch.tensor([2, 0, 1, -1, 2, 2], device=DEVICE)
    sums, weights = made_up_sums(matrices, 6), vectors(2, 3).to(dtype)
    y = sum_slots(matrices, sums, chosen, x, weights, None)
    rows = row_sums(matrices, sums, chosen.clamp(min=0), x).bfloat16()
    rows[3] = 0
    products = (rows.view(2, 3, 40) * weights[..., None]).float()
    torch.testing.assert_close(y, products.sum(1).bfloat16(), rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [256, 768, 2048, 14336, 16384])
@pytest.mark.parametrize("together", [1, 2])
def test_items_of_several_tensors_and_parts(columns: int, together: int) -> None:
    part = BLOCK // math.gcd(columns, BLOCK)  # rows of whole blocks
    part *= -(-9 * BLOCK // (part * columns))
    rows, size = 2 * part, 2 * part * columns
    dense = [weights(size, seed) for seed in range(4)]
    edges = [number * part * columns for number in range(5)]
    tensors = [resident(torch.cat(dense[i : i + 2]), *edges) for i in (0, 2)]
    items = [[(tensors[i // 2], 2 * (i % 2) + part) for part in (0, 1)] for i in range(4)]
    check(items, torch.stack(dense).view(4, rows, columns), [3, 0, -1, 2, 2, 9], together)
