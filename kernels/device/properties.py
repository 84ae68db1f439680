"""What launches are fitted to: facts of a GPU, asked once."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the card has; in the interpreter 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether the card has programmatic dependent launch: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the card has warp groups' instructions: those of compute capability 9.x alone do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def counts_bits(device: torch.device) -> bool:
    """Whether there are matrix instructions on single bits: compute capabilities 8.0 to 9.x have them.

    For later ones ptxas makes some hundred instructions of one. The interpreter counts bits, too.
    """
    return device.type != "cuda" or (8, 0) <= torch.cuda.get_device_capability(device) < (10, 0)
