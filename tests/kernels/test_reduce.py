"""Sums over warps: integers exactly, floats within what fp32 allows, and the same in every thread."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.reduce import each_of, first_of, of_program, share_sums, sum_rows


@triton.jit
def _sum_rows_kernel(out, values, COUNT: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    t = tl.arange(0, 32 * W)
    loaded = ()
    for i in tl.static_range(COUNT):
        loaded += (tl.load(values + i * (32 * W) + t),)
    sums = sum_rows(loaded, W, ASM)
    sums = sum_rows(sums, W, ASM)  # once more: the memory of one exchange is not that of the other
    for i in tl.static_range(COUNT):
        tl.store(out + i * (32 * W) + t, sums[i])


@triton.jit
def _share_sums_kernel(out, firsts, values, COUNT: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    ALL: tl.constexpr = 32 * W
    t = tl.arange(0, ALL)
    loaded = ()
    for i in tl.static_range(COUNT):
        loaded += (tl.load(values + i * ALL + t),)
    first = first_of(COUNT, W) + tl.zeros([ALL], tl.int32)
    sums = share_sums(loaded, first, W, ASM)
    for i in tl.static_range(each_of(COUNT, W)):
        tl.store(out + i * ALL + t, sums[i])
    tl.store(firsts + t, first)


@triton.jit
def _of_program_kernel(
    out, values, COUNT: tl.constexpr, LARGEST: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):
    t = tl.arange(0, 32 * W)
    loaded = ()
    for i in tl.static_range(COUNT):
        loaded += (tl.load(values + i * (32 * W) + t),)
    results = of_program(loaded, LARGEST, W, ASM)
    for i in tl.static_range(COUNT):
        tl.store(out + i * (32 * W) + t, t * 0 + results[i])


@pytest.mark.parametrize(("count", "largest"), [(1, 0), (1, 1), (2, 0), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("warps", [1, 2, 8, 32])
def test_of_all_threads(warps: int, count: int, largest: int, device: torch.device) -> None:
    """Of unsigned numbers, whose sums are below 2**32."""
    wide = torch.randint(2**32 // (32 * warps), (count, 32 * warps))
    wide[:largest] = torch.randint(2**32, (largest, 32 * warps))
    values = torch.where(wide < 2**31, wide, wide - 2**32).int()
    out = torch.full_like(values, -1).to(device)
    compiled = isinstance(_of_program_kernel, triton.JITFunction)
    _of_program_kernel[(3,)](
        out, values.to(device), count, LARGEST=largest, W=warps, ASM=compiled, num_warps=warps
    )
    wanted = wide.sum(1, keepdim=True)
    wanted[:largest] = wide[:largest].amax(1, keepdim=True)
    assert torch.equal(out.cpu().long() % 2**32, wanted.expand(-1, 32 * warps))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
def test_rows(warps: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    values = (torch.randn(count, 32 * warps) * 2**20).to(dtype)
    out = torch.full_like(values, -1).to(device)
    compiled = isinstance(_sum_rows_kernel, triton.JITFunction)
    _sum_rows_kernel[(5,)](out, values.to(device), count, W=warps, ASM=compiled, num_warps=warps)
    found, exact = out.cpu().double().view(count, warps, 8, 4), values.double().view(count, warps, 8, 4)
    assert (found == found[:, :1, :, :1]).all()
    off = found[:, 0, :, 0] - 4 * warps * exact.sum((1, 3))
    if dtype == torch.int32:
        assert (off % 2**32 == 0).all()
    else:
        assert (off.abs() <= 2.0**-20 * 4 * warps * exact.abs().sum((1, 3))).all()


def test_rows_that_are_not_finite_spoil_no_other(device: torch.device) -> None:
    values = torch.zeros(1, 64)
    values[0, 4], values[0, 40] = torch.inf, torch.nan
    out = torch.empty_like(values).to(device)
    compiled = isinstance(_sum_rows_kernel, triton.JITFunction)
    _sum_rows_kernel[(1,)](out, values.to(device), 1, W=2, ASM=compiled, num_warps=2)
    found = out.cpu().view(2, 8, 4)
    assert (found[:, 1] == torch.inf).all()
    assert found[:, 2].isnan().all()
    assert (found[:, [0, 3, 4, 5, 6, 7]] == 0).all()


@pytest.mark.parametrize(("warps", "count"), [(1, 4), (2, 8), (4, 4), (8, 4), (8, 8), (4, 16)])
def test_shares(warps: int, count: int, device: torch.device) -> None:
    values = torch.randint(-(2**31), 2**31, (count, 32 * warps), dtype=torch.int32)
    each = each_of(count, warps)
    out = torch.full((each, 32 * warps), -1, dtype=torch.int32, device=device)
    firsts = torch.full((32 * warps,), -1, dtype=torch.int32, device=device)
    compiled = isinstance(_share_sums_kernel, triton.JITFunction)
    _share_sums_kernel[(3,)](out, firsts, values.to(device), count, W=warps, ASM=compiled, num_warps=warps)
    sums = values.view(count, warps, 32).sum(1, dtype=torch.int64)
    sums = ((sums + 2**31) % 2**32 - 2**31).repeat(1, warps)  # for each thread, by its lane
    where = firsts.cpu().long() + torch.arange(each)[:, None]
    assert torch.equal(out.cpu().long(), sums.gather(0, where))
    # Together they have all of them.
    assert set(where.view(-1, 32)[:, 0].tolist()) == set(range(count))
