"""Optimizer states in 8 bits, block by block, and the random numbers that they are rounded with.

A block of 256 elements shares its largest magnitude `top`, fp32: 8.125 bits an element. Between 0 and `top`
the codes lie by a power law, close together near 0, where most elements are:

    signed    x = top * sign(c) * (|c| / 127)^2      int8, first moments
    unsigned  x = top * (c / 255)^4                  uint8, second moments, which are squares

An element becomes one of the two codes around it by chance, so that its expectation is exact. Rounded to the
nearest, a second moment that decays by a thousandth a step would stay where it is for ever.

Random numbers are a function of a seed, a step, a tensor and an element, and not of what is computed where or
in which order. (8-bit states by blocks: Dettmers et al. 2022, arXiv 2110.02861, with another map.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class RngKey:
    """Where random numbers come from: `element` is that of the first one, in its tensor."""

    seed: int
    step: int
    tensor: int
    element: int = 0

    def keys(self, number: int) -> tuple[int, int]:
        """Two 32-bit keys for one of several uses."""
        key = 0x9E3779B9
        for part in (self.seed, self.step, self.tensor, number):
            for word in (part & _MASK, part >> 32 & _MASK):
                key = _mix_number(key ^ word)
        return key, _mix_number(~key & _MASK)

    def words(self, n: int, number: int, device: torch.device) -> Tensor:
        """Int64 [n], below 2^32, for the elements from `element` on."""
        at = torch.arange(self.element, self.element + n, device=device)
        key, other = self.keys(number)
        # The two halves of the position apart: tensors may have more than 2^32 elements.
        return _mix(_mix(at & _MASK ^ key) ^ (at >> 32) ^ other)

    def fractions(self, n: int, number: int, device: torch.device) -> Tensor:
        """Fp32 [n], in [0, 1)."""
        return (self.words(n, number, device) >> 8).to(torch.float32) * 2.0**-24


def _mix_number(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, int64, of which every bit depends on every other (hash-prospector)."""
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


def encode(x: Tensor, signed: bool, rng_key: RngKey, number: int) -> tuple[Tensor, Tensor]:
    """Codes [n], int8 or uint8, and the largest magnitudes of blocks [ceil(n / 256)], of fp32 x [n].

    Unsigned x are not negative. What is not finite becomes a block of NaN.
    """
    n = x.numel()
    blocks = torch.nn.functional.pad(x, (0, -n % BLOCK)).view(-1, BLOCK)
    top = blocks.abs().amax(1)
    top = torch.where(top.isfinite(), top, torch.nan)
    share = (
        (blocks.abs() / torch.where(top > 0, top, 1.0)[:, None]).view(-1)[:n].nan_to_num(0.0).clamp_(max=1.0)
    )
    most, power = (127, 2) if signed else (255, 4)
    root = share.sqrt() if signed else share.sqrt().sqrt()
    below = (root * most).floor().clamp_(max=most - 1)
    low, high = (below / most) ** power, ((below + 1) / most) ** power
    up = rng_key.fractions(n, number, x.device) < (share - low) / (high - low)
    code = below + up
    if signed:
        code = torch.copysign(code, x)
    return code.to(torch.int8 if signed else torch.uint8), top


def decode(code: Tensor, top: Tensor) -> Tensor:
    """Fp32 [n], the inverse of `encode`."""
    c = code.to(torch.float32)
    share = c.abs() * c / 127**2 if code.dtype == torch.int8 else (c / 255) ** 4
    return share * top.repeat_interleave(BLOCK)[: c.numel()]


def stochastic_round(x: Tensor, dtype: torch.dtype, rng_key: RngKey, number: int) -> Tensor:
    """Fp32 x [n] in bf16, one of its two neighbours by chance, so that its expectation is x.

    What is not finite is rounded to nearest. Raises TypeError for another dtype.
    """
    if dtype != torch.bfloat16:
        raise TypeError(f"weights are rounded by chance to torch.bfloat16, not to {dtype}")
    noise = (rng_key.words(x.numel(), number, x.device) & 0xFFFF).to(torch.int32)
    up = (x.view(torch.int32) + noise) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x).to(dtype)
