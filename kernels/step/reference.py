"""Norms, rotary embeddings and gated units in torch: as models write them, and as a GPU adds up."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from neuzip.kernels.dtypes import torch_dtypes_for

Norm = Literal["llama", "gemma", "olmo"]
"""What an RMS norm multiplies by, and when it rounds to the dtype of x: "llama" by the weight, after it has
rounded; "gemma" by 1 + weight and "olmo" by the weight, both in fp32, before it rounds."""

NORMS: tuple[Norm, ...] = get_args(Norm)

VECTOR = 4
"""Neighbours that a thread of torch's reductions loads at once, and adds up apart from each other."""

MOST_THREADS = 512
"""Threads of a block of torch's reductions, at most."""

MOST_COLUMNS = 1 << 14
MOST_WIDTH = 512
MOST_ROWS = 65_535  # programs of a launch in its second dimension


def rms_norm(x: Tensor, weight: Tensor, eps: float, norm: Norm, mean: Tensor | None = None) -> Tensor:
    """An RMS norm of x [..., N], weight [N]. `mean` of the squares [..., 1], fp32, if not torch's own."""
    wide = x.to(torch.float32)
    if mean is None:
        mean = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean + eps)
    if norm == "llama":
        return weight * normed.to(x.dtype)
    if norm == "gemma":
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (weight * normed).to(x.dtype)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, H, T, width], turned by cos and sin [B, T, width]."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q), turned(k)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of tensors of one shape."""
    wide = gate.to(torch.float32)
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def threads(rows: int, columns: int) -> int:
    """Threads that share a row in torch's sum over the last dimension of fp32 [rows, columns] on a GPU.

    That is `ReduceConfig::set_block_dimension` of torch 2.13 for rows that lie one behind the other.
    """
    along = min(MOST_THREADS, _power_of_two(columns // VECTOR))
    beside = min(_power_of_two(rows), MOST_THREADS // min(along, 32))
    return min(along, MOST_THREADS // beside)


def mean_of_squares(x: Tensor) -> Tensor:
    """Means of the squares of x, fp32 [rows, columns], as [rows, 1], added in torch's order on a GPU.

    A thread adds up every `threads`-th vector, the four places apart, then these from left to right. Then the
    threads' sums are folded: the second half on the first, until one is left.
    """
    rows, columns = x.shape
    count = threads(rows, columns)
    padded = torch.zeros(rows, -(-columns // (VECTOR * count)) * VECTOR * count)
    padded[:, :columns] = x * x
    apart = torch.zeros(rows, count, VECTOR)
    for turn in padded.view(rows, -1, count, VECTOR).unbind(1):
        apart = apart + turn
    sums = apart[..., 0]
    for place in range(1, VECTOR):
        sums = sums + apart[..., place]
    while sums.shape[1] > 1:
        first, second = sums.chunk(2, dim=1)
        sums = first + second
    return sums * (1 / torch.tensor(float(columns)))


def can_norm(rows: int, columns: int) -> bool:
    """Whether the fast form has rows of such a length, and adds up as torch does.

    Shorter rows torch does not load as vectors, and many long ones it shares out among more threads.
    """
    if columns < 128 or columns % VECTOR or columns > MOST_COLUMNS or rows < 1:
        return False
    count = threads(rows, columns)
    beside = min(_power_of_two(rows), MOST_THREADS // count)
    return beside == 1 or -(-columns // count) < min(16 * beside, 256)


def can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the fast form takes such tensors: [B, H, T, width] and [B or 1, T, width] of one dtype."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, _, tokens, width = q.shape
    return (
        k.shape == (batch, k.shape[1], tokens, width)
        and cos.shape[0] in (1, batch)
        and cos.shape[1:] == (tokens, width)
        and width % 2 == 0
        and 0 < width <= MOST_WIDTH
        and q.numel() > 0
        and k.numel() > 0
        and len({tensor.dtype for tensor in (q, k, cos, sin)}) == 1
        and len({tensor.device for tensor in (q, k, cos, sin)}) == 1
        and q.dtype in torch_dtypes_for("step")
        and all(tensor.stride(-1) == 1 for tensor in (q, k, cos, sin))
    )


def can_gate(gate: Tensor, up: Tensor) -> bool:
    """Whether the fast form takes such tensors: of one shape and dtype, bf16 or fp16, and contiguous."""
    return (
        gate.shape == up.shape
        and gate.dtype == up.dtype
        and gate.dtype in torch_dtypes_for("gate")
        and gate.device == up.device
        and gate.is_contiguous()
        and up.is_contiguous()
        and gate.numel() > 0
    )


def can_find(x: Tensor) -> bool:
    """Whether the fast form takes such a matrix: [B, N] of bf16, fp16 or fp32 in rows."""
    return (
        x.dim() == 2
        and x.numel() > 0
        and len(x) <= MOST_ROWS
        and x.stride(1) == 1
        and x.dtype in torch_dtypes_for("step")
    )


def _power_of_two(number: int) -> int:
    """The largest that is not greater."""
    return 1 << (max(1, number).bit_length() - 1)
