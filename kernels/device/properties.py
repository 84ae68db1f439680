"""What launches are fitted to: facts of a GPU, asked once.

The meta device stands for the current GPU, or for Triton's interpreter where there is none: what is launched
on it is compiled as for that GPU, see `compile_ahead`.
"""

from __future__ import annotations

import functools

import torch


def card_of(device: torch.device) -> torch.device:
    """The device whose facts count: for the meta device the current GPU, or the CPU where there is none."""
    if device.type != "meta":
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the card has; in the interpreter 1."""
    device = card_of(device)
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether the card has programmatic dependent launch: from compute capability 9.0 on."""
    device = card_of(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the card has warp groups' instructions: those of compute capability 9.x alone do."""
    device = card_of(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def counts_bits(device: torch.device) -> bool:
    """Whether there are matrix instructions on single bits: compute capabilities 8.0 to 9.x have them.

    For later ones ptxas makes some hundred instructions of one. The interpreter counts bits, too.
    """
    return device.type != "cuda" or (8, 0) <= torch.cuda.get_device_capability(device) < (10, 0)
