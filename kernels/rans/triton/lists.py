"""Lists of tensors that share launches: a table on the device says where each is, and who works on it.

A column of a table has a number for each tensor. *Starts* are columns too: the first of all programs of a
launch, or of all blocks, that belong to a tensor. So a program finds its tensor on the device, and the host
does nothing but arithmetic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

ENTRIES = 64
"""Entries of a column. The last of starts says where the last tensor ends."""

MOST = ENTRIES - 1
"""Tensors of a list, at most."""

Ints = npt.NDArray[np.int64]


def starts_of(shares: Ints) -> Ints:
    """The column of starts for tensors that have so many programs each, or none.

    >>> starts_of(np.array([3, 0, 2]))[:5].tolist()
    [0, 3, 3, 5, 5]
    """
    starts = np.zeros(ENTRIES, np.int64)
    ends = np.cumsum(shares)
    starts[1 : 1 + ends.size] = ends
    starts[1 + ends.size :] = ends[-1]
    return starts


def on_device(columns: Ints, device: torch.device) -> torch.Tensor:
    """Columns, int64 [columns, ENTRIES], on a device. Nobody waits for it."""
    host = torch.empty(columns.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    host.numpy()[...] = columns
    return host.to(device, non_blocking=True)


@triton.jit
def row_of(starts_ptr, at, ENTRIES: tl.constexpr):
    """The tensor that has program or block `at`: the last one that starts there or before."""
    starts = tl.load(starts_ptr + tl.arange(0, ENTRIES))
    return tl.sum((starts <= at).to(tl.int32), 0) - 1
