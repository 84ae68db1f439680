"""The accumulator of a GPU's FP8 matrix instruction, as SageAttention2's Table 7.

    python benchmarks/fp8_instruction.py                 # needs a GPU of compute capability 9.0 (H100, H200)

The result is benchmarks/results/fp8_instruction.json. One program multiplies E4M3 numbers [64, K] and
[K, 64] and adds fp32 numbers [64, 64], with Triton's `tl.dot`: each 32 of K are one wgmma instruction. If
`promote` is false, the instruction's own register has the sum. If it is true, each 32 products are summed
from 0 and added in fp32; neuzip's attention does this for each block of keys.

copied   all products are 0, and the accumulator starts with random numbers whose mantissas have so many bits:
         the mean and the largest relative error of what comes back. The paper's Table 7 has these errors.
summed   random products, by K and by what the accumulator starts with: relative error to the exact sum, and
         the share of results that both models of kernels/attention/accumulator.py have bit for bit

SageAttention2 (arXiv 2411.10958), section 3.4, for the mma instruction of Ada GPUs. Not yet run on a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from record import Environment, Measurement, save
from torch import Tensor

from neuzip.kernels.attention.accumulator import accumulate, cut

SIDE = 64
"""Rows and columns of a product: the smallest of wgmma."""

DEPTHS = (32, 128, 1024)
"""K: one instruction, a block of keys, and 1,024 keys."""

MANTISSAS = (8, 12, 13, 14, 16, 23)
"""Bits of what the accumulator starts with."""

STARTS = ("zero", "small", "large")
"""What sums start with: 0, numbers as large as a product, and numbers as large as 1,024 products."""


@triton.jit
def fp8_product(
    a_pointer, b_pointer, start_pointer, out_pointer,
    DEPTH: tl.constexpr, STEP: tl.constexpr, PROMOTE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """out = start + a @ b^T for a and b [SIDE, DEPTH] of E4M3, STEP of DEPTH at a time."""
    rows, inner = tl.arange(0, SIDE), tl.arange(0, STEP)
    place = rows[:, None] * SIDE + rows[None, :]
    total = tl.load(start_pointer + place)
    for first in range(0, DEPTH, STEP):
        at = rows[:, None] * DEPTH + first + inner[None, :]
        a, b = tl.load(a_pointer + at), tl.load(b_pointer + at)
        if PROMOTE:
            total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=32)
        else:
            total = tl.dot(a, tl.trans(b), total)
    tl.store(out_pointer + place, total)


def product(a: Tensor, b: Tensor, start: Tensor, *, promote: bool) -> Tensor:
    """start + a @ b^T by the instruction: a and b [64, K] of E4M3, K in DEPTHS, and start fp32 [64, 64]."""
    out = torch.full_like(start, torch.nan)
    depth = a.shape[1]
    fp8_product[(1,)](
        a, b, start, out, DEPTH=depth, STEP=min(128, depth), PROMOTE=promote, SIDE=SIDE,
        num_warps=4,
    )  # fmt: skip
    return out


def main() -> None:
    """Measure, print, save."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this needs a GPU of compute capability 9.0, whose FP8 instruction it measures")
    device = torch.device("cuda")
    rows = [copied(bits, device) for bits in MANTISSAS]
    rows += [
        summed(depth, start, promote, device)
        for depth, start, promote in itertools.product(DEPTHS, STARTS, (False, True))
    ]
    for row in rows:
        print(*(f"{key} {value:.6g}" if isinstance(value, float) else value for key, value in row.items()))
    environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=True, needs_commit=True)
    what = "the accumulator of the FP8 matrix instruction: what it keeps of fp32"
    print(f"saved {save('fp8_instruction', what, Measurement(environment, rows))}")


def copied(bits: int, device: torch.device) -> dict[str, Any]:
    """What comes back of random numbers with so many bits of mantissa when all products are 0."""
    start = cut(torch.randn(SIDE, SIDE, generator=generator(bits)), bits).to(device)
    zeros = torch.zeros(SIDE, 32, device=device, dtype=torch.float8_e4m3fn)
    out = product(zeros, zeros, start, promote=False)
    error = ((out.double() - start) / start).abs()
    return {
        "row": "copied", "mantissa_bits": bits, "mean_error": float(error.mean()),
        "largest_error": float(error.max()),
        "as_cut_to_13_bits": float((out == cut(start)).double().mean()),
    }  # fmt: skip


def summed(depth: int, kind: str, promote: bool, device: torch.device) -> dict[str, Any]:
    """Sums of random products, beside the exact ones and beside both models."""
    draw = generator(depth)
    a, b = (torch.randn(SIDE, depth, generator=draw).to(torch.float8_e4m3fn) for _ in range(2))
    scale = {"zero": 0.0, "small": 1.0, "large": 1024.0}[kind]
    start = scale * torch.randn(SIDE, SIDE, generator=draw)
    exact = start.double() + a.double() @ b.double().T
    out = product(a.to(device), b.to(device), start.to(device), promote=promote).cpu()
    models = {
        f"as_{name}": float((out == accumulate(a, b.T, start, name)).double().mean())
        for name in ("whole", "aligned")
    }
    return {
        "row": "summed", "depth": depth, "start": kind, "promote": promote,
        "error": float((out - exact).abs().sum() / exact.abs().sum()), **models,
    }  # fmt: skip


def generator(seed: int) -> torch.Generator:
    """Random numbers that are the same on every device."""
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    main()
