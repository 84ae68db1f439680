"""Heads in few bits made dense again, in Triton: bit for bit what `ops.load` gives.

A program takes some tokens of one head of one text: nothing larger than the result is ever in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.launch import launch
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.attend import codes_of
from neuzip.kernels.kv_cache.triton.store import NUMBERS, as_stored, padded
from neuzip.kernels.quantizers import plane_widths, words


def load(heads: Heads, first: Tensor, dtype: torch.dtype) -> Tensor:
    """`kv_cache.load` on a GPU: [B, H, N, width] in `dtype`.

    Raises ValueError for words or scales that do not lie side by side.
    """
    batch, count, tokens, _ = heads.words.shape
    if heads.words.stride(3) != 1 or heads.scale.stride(2) != 1:
        raise ValueError("the words of a head and the scales of its tokens lie side by side")
    out = torch.empty(batch, count, tokens, heads.width, dtype=dtype, device=heads.words.device)
    if not out.numel():
        return out
    columns = padded(heads.width)
    rows = max(1, NUMBERS // columns)
    widths = plane_widths(heads.bits)
    launch(
        _load_kernel, (triton.cdiv(tokens, rows), count, batch),
        out, heads.words, heads.scale, None, heads.first_bits, first, tokens, heads.width,
        *out.stride()[:2], *heads.words.stride()[:3], *heads.scale.stride()[:2],
        *(heads.first_bits.stride()[:2] if heads.first_bits is not None else (0, 0)),
        BITS=heads.bits, WIDTHS=widths, COUNTS=tuple(words(heads.width, w) for w in widths),
        FIRST_COUNT=words(heads.width, 1), ROWS=rows, COLUMNS=columns,
        num_warps=4, enable_fp_fusion=False, device=out.device,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _load_kernel(
    out_ptr, words_ptr, scale_ptr, low_ptr, first_bits_ptr, first_ptr, tokens, width,
    stride_ob, stride_oh, stride_wb, stride_wh, stride_wt, stride_sb, stride_sh, stride_fb, stride_fh,
    BITS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr, FIRST_COUNT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    head, text = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * ROWS
    rows = begin + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    there = rows < tokens
    if first_bits_ptr is not None:
        first_bits_ptr += text * stride_fb + head * stride_fh
    codes, half = codes_of(
        words_ptr + text * stride_wb + head * stride_wh + rows * stride_wt, there, first_bits_ptr,
        (tl.load(first_ptr + text) - begin).to(tl.int32),
        BITS, WIDTHS, COUNTS, FIRST_COUNT, ROWS, COLUMNS,
    )  # fmt: skip
    scales = text * stride_sb + head * stride_sh + rows
    scale = tl.load(scale_ptr + scales, mask=there, other=0.0).to(tl.float32)
    if low_ptr is None:
        numbers = (codes.to(tl.float32) - half[:, None]) * scale[:, None]
    else:
        low = tl.load(low_ptr + scales, mask=there, other=0.0).to(tl.float32)
        numbers = codes.to(tl.float32) * scale[:, None] + low[:, None]
    tl.store(
        out_ptr + text * stride_ob + head * stride_oh + rows[:, None] * width + columns[None, :],
        as_stored(numbers, KIND).to(KIND), mask=there[:, None] & (columns < width)[None, :],
    )  # fmt: skip
