"""Flash decoding of one query a text: what both kernels for it share, and the kernel that joins the shares.

The tokens of a head are cut into shares, one a program. A share leaves, for each query, its sums of values,
its largest logit in base 2 and its sum of weights; `join` puts these together in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.store import padded
from neuzip.kernels.quantizers import plane_widths, words
from neuzip.kernels.tuning import launch_for

WIDEST = 256
"""Numbers of a head that a program has registers for."""

QUERIES = 16
"""Rows of a matrix instruction: queries that share a head at most."""

LOG2_E = 1.4426950408889634


def fits(width: int, queries: int) -> bool:
    """Whether attention over packed heads of `width` numbers, with so many queries each, is possible."""
    return width <= WIDEST and queries <= QUERIES


@dataclass(frozen=True)
class ShareSums:
    """What all shares leave, fp32: sums [rows, width], largest logits and weights [rows].

    A row is a share of a query of a text: rows = B * H' * shares.
    """

    shares: int
    group: int
    sums: Tensor
    largest: Tensor
    weights: Tensor

    @classmethod
    def empty(cls, query: Tensor, group: int, shares: int, width: int) -> ShareSums:
        """Memory for `shares` of each query [B, H', D], for values of `width` numbers."""
        rows = query.shape[0] * query.shape[1] * shares
        sums = torch.empty(rows, width, dtype=torch.float32, device=query.device)
        marks = torch.empty(2, rows, dtype=torch.float32, device=query.device)
        return cls(shares, group, sums, marks[0], marks[1])

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first arguments of a kernel that writes shares."""
        return self.sums, self.largest, self.weights


def queries_of_a_head(query: Tensor, keys: Heads, values: Heads, first: Tensor, mask: Tensor | None) -> int:
    """How many queries share a head. Raises ValueError for shapes that do not agree or that `fits` denies."""
    batch, queries, width = query.shape
    heads = keys.words.shape[1]
    group = queries // heads
    if queries % heads or width != keys.width or keys.words.shape[:3] != values.words.shape[:3]:
        raise ValueError(f"queries {tuple(query.shape)} for {heads} heads of {keys.width} numbers")
    if not fits(max(width, values.width), group):
        raise ValueError(f"{group} queries a head of {width} numbers; {QUERIES} of {WIDEST} are possible")
    if keys.words.shape[0] != batch or first.shape != (batch,):
        raise ValueError(f"{batch} queries for {keys.words.shape[0]} texts and {len(first)} first tokens")
    if mask is not None and (mask.shape[0] not in (1, batch) or mask.shape[1] < keys.capacity):
        raise ValueError(f"a mask {tuple(mask.shape)} for {batch} texts of {keys.capacity} tokens")
    rows = [query.stride(2), *(heads.words.stride(3) for heads in (keys, values))]
    rows += [heads.scale.stride(2) for heads in (keys, values)] + ([] if mask is None else [mask.stride(1)])
    if any(stride != 1 for stride in rows):
        raise ValueError("numbers of a query, words of a token, scales of a head, a mask lie side by side")
    return group


@functools.lru_cache(maxsize=4096)
def share_count(kernel: str, tokens: int, programs: int, step: int, device: torch.device) -> int:
    """Into how many shares the tokens of each of `programs` heads are cut.

    As many programs a multiprocessor as the table of `kernel` says, but none with less than `step` tokens.
    """
    table = launch_for(kernel, device)
    wanted = -(-table["programs"] * multiprocessors(device) // max(programs, 1))
    return int(max(1, min(wanted, -(-tokens // step), table["most_shares"])))


def plane_counts(heads: Heads) -> tuple[int, ...]:
    """Words of each plane of a token's codes."""
    return tuple(words(heads.width, width) for width in plane_widths(heads.bits))


def mask_stride(mask: Tensor | None) -> int:
    """From the mask of a text to that of the next: 0 where all texts share one."""
    return 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)


def is_bool(mask: Tensor | None) -> bool:
    """Whether a mask says which tokens count; else it is added to logits."""
    return mask is not None and mask.dtype == torch.bool


def first_bit_strides(heads: Heads) -> tuple[int, ...]:
    """Strides of texts and heads of `first_bits`, or zeros where there are none."""
    return (0, 0) if heads.first_bits is None else heads.first_bits.stride()[:2]


def join(query: Tensor, parts: ShareSums) -> Tensor:
    """The results of all shares put together: [B, H', width] in the query's dtype."""
    # The interpreter would cut off what bf16 cannot hold instead of rounding.
    dtype = query.dtype if is_compiled(_join_kernel) else torch.float32
    width, shares = parts.sums.shape[1], parts.shares
    out = torch.empty(*query.shape[:2], width, dtype=dtype, device=query.device)
    launch(
        _join_kernel, (query.shape[0] * query.shape[1],),
        out, *parts.arrays, shares, width, SHARES=1 << (shares - 1).bit_length(),
        COLUMNS=padded(width), num_warps=4, pdl=True, device=query.device,
    )  # fmt: skip
    return out.to(query.dtype)


@triton.jit
def in_base_2(added):
    """What a mask adds to logits. The lowest number stays one: a text with no other is not one with none."""
    wide = added.to(tl.float32)
    return tl.where(wide == float("-inf"), wide, tl.maximum(wide * 1.4426950408889634, -3e38))


@triton.jit
def _join_kernel(
    out_ptr, sums_ptr, largest_ptr, weight_ptr, shares, width,
    SHARES: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The shares of one query, weighted by how far their largest logits are below the largest of all."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    offs_s, offs_c = tl.arange(0, SHARES), tl.arange(0, COLUMNS)
    largest = tl.load(largest_ptr + row * shares + offs_s, mask=offs_s < shares, other=float("-inf"))
    weight = tl.load(weight_ptr + row * shares + offs_s, mask=offs_s < shares, other=0.0)
    sums = tl.load(
        sums_ptr + (row * shares + offs_s[:, None]) * width + offs_c[None, :],
        mask=(offs_s < shares)[:, None] & (offs_c < width)[None, :], other=0.0,
    )  # fmt: skip
    factor = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(sums * factor[:, None], 0) / tl.sum(weight * factor, 0)
    tl.store(out_ptr + row * width + offs_c, total.to(out_ptr.dtype.element_ty), mask=offs_c < width)
