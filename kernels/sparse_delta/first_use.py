"""Whether a GPU makes and applies sparse deltas right, by a sample that the reference on the CPU has coded.

`ops` asks at the first use of a GPU, for each number of bits of a weight, and `neuzip doctor` for some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from neuzip.kernels.dtypes import pattern_dtypes
from neuzip.kernels.sparse_delta import reference
from neuzip.kernels.sparse_delta.blocks import BlockMap, CodedDelta
from neuzip.kernels.sparse_delta.numbers import BLOCK

MAKING, APPLYING = "making sparse deltas", "applying sparse deltas"
"""The operations that are checked."""

NUMEL = BLOCK + 77
"""Weights of the sample: a whole block and a short one."""

Tensors = list[torch.Tensor]
Encode = Callable[[Tensors, Tensors, BlockMap], CodedDelta]


@dataclass(frozen=True)
class DeltaSample:
    """Patterns of weights before and after, and what the reference makes of them. All on the CPU."""

    old: torch.Tensor
    new: torch.Tensor
    coded: CodedDelta
    digests: tuple[int, int]
    """The digests before and after, modulo 2^64."""

    @property
    def blocks(self) -> BlockMap:
        """Where the blocks are."""
        return BlockMap.of([self.old])


@functools.cache
def sample(bits: int) -> DeltaSample:
    """A sample of weights of `bits` bits: small changes, large ones, and none."""
    modulus, half = 1 << bits, 1 << (bits - 1)
    steps = (1, -1, 1, 2, -3, half, half - 1, 1 - half)
    old = [(40503 * i + 12345 + i // 7 * half) % modulus for i in range(NUMEL)]
    new = [(a + (steps[i // 19 % 8] if i % 19 == 0 else 0)) % modulus for i, a in enumerate(old)]
    descriptors, words = [], []
    for at in range(0, NUMEL, BLOCK):
        descriptor, own = reference.encode_block(old[at : at + BLOCK], new[at : at + BLOCK], bits)
        descriptors.append(descriptor)
        words += own
    coded = CodedDelta(_integers(descriptors, 32), _integers(words, 32))
    digests = reference.digest([old]), reference.digest([new])
    return DeltaSample(_integers(old, bits), _integers(new, bits), coded, digests)


def makes(encode: Encode, bits: int, device: torch.device) -> bool:
    """Whether `encode` codes the sample on a device as the reference does. Waits for the device."""
    own = sample(bits)
    coded = encode([own.old.to(device)], [own.new.to(device)], own.blocks)
    same = torch.equal(coded.descriptors.cpu(), own.coded.descriptors)
    return same and torch.equal(coded.words.cpu(), own.coded.words)


def applies(
    check_and_apply: Callable[[Tensors, BlockMap, CodedDelta], torch.Tensor],
    digest: Callable[[Tensors, BlockMap], torch.Tensor],
    bits: int,
    device: torch.device,
) -> bool:
    """Whether a device applies the sample right. Waits for it.

    check_and_apply  changes weights in place, and returns what their digest gains
    digest           the digest of weights
    """
    own = sample(bits)
    weights = [own.old.to(device, copy=True)]
    coded = CodedDelta(own.coded.descriptors.to(device), own.coded.words.to(device))
    before = int(digest(weights, own.blocks))
    gain = int(check_and_apply(weights, own.blocks, coded))
    after = int(digest(weights, own.blocks))
    old, new = own.digests
    differences = (before - old, after - new, before + gain - new)
    right = all(difference % reference.MODULUS == 0 for difference in differences)
    return right and torch.equal(weights[0].cpu(), own.new)


def _integers(numbers: list[int], bits: int) -> torch.Tensor:
    """Unsigned numbers as signed integers of the same bits."""
    unsigned = np.array(numbers, np.uint64).astype(f"u{bits // 8}")
    return torch.from_numpy(unsigned.view(f"i{bits // 8}")).view(pattern_dtypes()[bits])
