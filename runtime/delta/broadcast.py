"""Deltas from one process to all others of a group of torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from neuzip.errors import UsageError
from neuzip.formats.sparse_delta import HEADER_BYTES, SparseDeltaHeader

from .messages import NAME, as_bytes, read_header

BUCKET = 64 << 20
"""Bytes that are sent at once."""


def broadcast(
    delta: torch.Tensor | bytes | None = None,
    *,
    source: int = 0,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Send a delta from one process of a group to all others, and return it in each: uint8.

    delta   the delta in the process `source`; None in all others
    source  global rank of the process that has it
    group   the processes; None means all
    device  where the delta is sent from and arrives: a GPU for NCCL, "cpu" for gloo

    All processes of the group call it. Raises UsageError for a delta at the wrong process, and FormatError
    for bytes that are none.
    """
    is_source = dist.get_rank() == source
    if is_source != (delta is not None):
        raise UsageError(
            f"`delta` is {'missing' if is_source else 'given'} in process {dist.get_rank()}",
            f"pass it in the process `source`={source}, and in no other",
        )
    if delta is not None:
        stored = as_bytes(delta).to(device)
        read_header(stored, NAME)
        head = stored[:HEADER_BYTES]
    else:
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
    dist.broadcast(head, source, group)
    if delta is None:
        header = SparseDeltaHeader.decode(head.cpu().numpy().tobytes(), NAME)
        stored = torch.empty(header.nbytes, dtype=torch.uint8, device=device)
        stored[:HEADER_BYTES] = head
    for begin in range(HEADER_BYTES, stored.numel(), BUCKET):
        dist.broadcast(stored[begin : begin + BUCKET], source, group)
    return stored
