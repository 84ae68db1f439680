"""A step of AdamW with its states in 8 bits, on a GPU: everything about a weight is read and written once.

    read     weight 2, gradient 2, codes 1 + 1 bytes, and 8 a block of 256
    written  weight 2, codes 1 + 1 bytes, and 8 a block

states.py says in torch what is computed, with the same random numbers; products and sums may be contracted
here, so a result can differ in its last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.launch import launching
from neuzip.kernels.quantizers.states import BLOCK, RngKey

ROWS = 4
"""Blocks of 256 states for each program."""

RANDOM_USES = 3
"""Independent random numbers for each weight: for its first moment, its second moment, itself."""


@dataclass(frozen=True)
class Rates:
    """Factors of one AdamW step, computed for its number.

    size      lr / (1 - beta1^step)
    unbias    1 / (1 - beta2^step)
    keep      1 - lr * weight_decay
    """

    beta1: float
    beta2: float
    epsilon: float
    size: float
    unbias: float
    keep: float


def adamw(
    weight: Tensor, gradient: Tensor, states: dict[str, Tensor], rates: Rates, rng_key: RngKey,
    scale: Tensor | None = None, *, stochastic: bool,
) -> None:  # fmt: skip
    """Change a weight [n] and its states in place.

    gradient  [n], bf16, fp16 or fp32; multiplied with `scale`, an fp32 scalar on the device
    states    first int8, second uint8, [n]; first_top, second_top fp32, [ceil(n / 256)]
    stochastic  round a bf16 weight by chance

    Raises ValueError for what is not contiguous or does not fit together.
    """
    n, blocks = weight.numel(), triton.cdiv(weight.numel(), BLOCK)
    sizes = {"first": n, "second": n, "first_top": blocks, "second_top": blocks}
    arrays = {"weight": weight, "gradient": gradient, **states}
    for name, array in arrays.items():
        if array.dim() != 1 or not array.is_contiguous() or array.numel() != sizes.get(name, n):
            raise ValueError(f"{name} is {tuple(array.shape)}, for {n} weights in one dimension")
    if stochastic and weight.dtype != torch.bfloat16:
        raise ValueError(f"weights are rounded by chance to torch.bfloat16, not to {weight.dtype}")
    keys = [_signed(key) for use in range(RANDOM_USES) for key in rng_key.keys(use)]
    with launching(weight.device):
        _adamw_kernel[(triton.cdiv(n, ROWS * BLOCK),)](
            weight, gradient, states["first"], states["first_top"], states["second"], states["second_top"],
            weight if scale is None else scale, n, rng_key.element,
            rates.beta1, rates.beta2, rates.epsilon, rates.size, rates.unbias, rates.keep, *keys,
            SCALED=scale is not None, STOCHASTIC=stochastic, ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def _signed(key: int) -> int:
    """A 32-bit key as int32 of the same bits, so that all have one type."""
    return key - (1 << 32) if key >> 31 else key


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _word(low, high, key, other):
    """32 random bits for elements, of which `low` and `high` are the halves of their numbers."""
    key, other = key.to(tl.uint32, bitcast=True), other.to(tl.uint32, bitcast=True)
    return _mix(_mix(low ^ key) ^ high ^ other)


@triton.jit
def _top(x):
    """The largest magnitude of each row, NaN where any is not finite."""
    top = tl.max(tl.abs(x), 1)
    odd = tl.max((x != x).to(tl.int32), 1)
    return tl.where((odd == 0) & (top < float("inf")), top, float("nan"))


@triton.jit
def _code(x, top, word, SIGNED: tl.constexpr):
    """The codes of elements, fp32: stochastic rounding to one of the two nearest."""
    most = 127.0 if SIGNED else 255.0
    share = tl.abs(x) / tl.where(top > 0, top, 1.0)[:, None]
    share = tl.where(share == share, tl.minimum(share, 1.0), 0.0)
    root = tl.sqrt(share)
    if not SIGNED:
        root = tl.sqrt(root)
    below = tl.minimum(tl.floor(root * most), most - 1)
    low, high = below / most, (below + 1) / most
    low, high = low * low, high * high
    if not SIGNED:
        low, high = low * low, high * high
    fraction = (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    code = tl.where(fraction < (share - low) / (high - low), below + 1, below)
    return tl.where(x < 0, -code, code)


@triton.jit(do_not_specialize=["element", "k0", "k1", "k2", "k3", "k4", "k5"])
def _adamw_kernel(
    weight_ptr, gradient_ptr, first_ptr, first_top_ptr, second_ptr, second_top_ptr, scale_ptr, n, element,
    beta1, beta2, epsilon, size, unbias, keep, k0, k1, k2, k3, k4, k5,
    SCALED: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    offs = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [ROWS, BLOCK]
    mask, mask_row = offs < n, rows * BLOCK < n
    gradient = tl.load(gradient_ptr + offs, mask=mask, other=0).to(tl.float32)
    if SCALED:
        gradient *= tl.load(scale_ptr)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0).to(tl.float32)
    first_top = tl.load(first_top_ptr + rows, mask=mask_row, other=0)[:, None]
    second_top = tl.load(second_top_ptr + rows, mask=mask_row, other=0)[:, None]
    code = tl.load(first_ptr + offs, mask=mask, other=0).to(tl.float32)
    first = tl.abs(code) * code / 16129.0 * first_top
    root = tl.load(second_ptr + offs, mask=mask, other=0).to(tl.float32) / 255.0
    root = root * root
    second = root * root * second_top

    first = first * beta1 + gradient * (1 - beta1)
    second = second * beta2 + gradient * gradient * (1 - beta2)
    weight = weight * keep - size * first / (tl.sqrt(second * unbias) + epsilon)

    number = offs + element
    low, high = (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    top = _top(first)
    tl.store(first_top_ptr + rows, top, mask=mask_row)
    tl.store(first_ptr + offs, _code(first, top, _word(low, high, k0, k1), True).to(tl.int8), mask=mask)
    top = _top(second)
    tl.store(second_top_ptr + rows, top, mask=mask_row)
    tl.store(second_ptr + offs, _code(second, top, _word(low, high, k2, k3), False).to(tl.uint8), mask=mask)
    if STOCHASTIC:
        bits = weight.to(tl.int32, bitcast=True)
        noise = (_word(low, high, k4, k5) & 0xFFFF).to(tl.int32)
        rounded = ((bits + noise) & -65536).to(tl.float32, bitcast=True)
        weight = tl.where((bits & 0x7F800000) == 0x7F800000, weight, rounded)
    tl.store(weight_ptr + offs, weight.to(weight_ptr.dtype.element_ty), mask=mask)
