"""Which expert each slot holds, and the slot of each tile: one program, as there are few tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import launch

AT_A_TIME = 1024
"""Tiles, and slots, that are looked at together."""


def slot_lists(tiles: torch.Tensor, count: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`chosen` and `slot_of_tile` of `ops.ExpertsInUse`, for a list of so many slots."""
    most = tiles.shape[0]
    chosen = torch.empty(slots, dtype=torch.int32, device=tiles.device)
    slot_of_tile = torch.empty(most, dtype=torch.int32, device=tiles.device)
    size = min(AT_A_TIME, triton.next_power_of_2(max(most, slots, 16)))
    launch(
        slot_lists_kernel, (1,),
        tiles, count, chosen, slot_of_tile, most, slots, SIZE=size, num_warps=4, pdl=True,
        device=tiles.device,
    )  # fmt: skip
    return chosen, slot_of_tile


@triton.jit(do_not_specialize=["most", "slots"])
def slot_lists_kernel(
    tiles, count, chosen, slot_of_tile, most, slots, SIZE: tl.constexpr, USE_PDL: tl.constexpr
):
    """Number the experts that have tiles. A tile that is the first of its expert begins the next slot."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    used = tl.load(count)
    before = used * 0
    for start in range(0, most, SIZE):
        tile = start + tl.arange(0, SIZE)
        is_used = tile < tl.minimum(used, most)
        expert = tl.load(tiles + 4 * tile, mask=is_used, other=-1)
        begins = is_used & (tl.load(tiles + 4 * tile + 1, mask=is_used, other=-1) == tile)
        slot = before + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(slot_of_tile + tile, tl.where(is_used, slot, -1), mask=tile < most)
        tl.store(chosen + slot, expert, mask=begins & (slot < slots))
        before += tl.sum(begins.to(tl.int32))
    for start in range(0, slots, SIZE):
        slot = start + tl.arange(0, SIZE)
        tl.store(chosen + slot, tl.full([SIZE], -1, tl.int32), mask=(slot >= before) & (slot < slots))
