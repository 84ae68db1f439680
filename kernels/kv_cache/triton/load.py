"""Heads in few bits made dense again, in Triton: bit for bit what `ops.load` gives.

A program takes some tokens of one head of one text: nothing larger than the result is ever in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.arguments import (
    center_strides,
    first_bit_strides,
    last_block,
    path_arrays,
    path_constants,
    scales_are_together,
    whole_strides,
)
from neuzip.kernels.kv_cache.triton.attend import numbers_of, rows_of
from neuzip.kernels.kv_cache.triton.groups import centers_of_rows, group_width, partner_of, turn_width, turned
from neuzip.kernels.kv_cache.triton.store import NUMBERS, padded
from neuzip.kernels.quantizers import plane_widths, words


def load(heads: Heads, first: Tensor, dtype: torch.dtype) -> Tensor:
    """`kv_cache.load` on a GPU: [B, H, N, width] in `dtype`.

    Raises ValueError for words or scales that do not lie side by side.
    """
    batch, count, tokens, _ = heads.words.shape
    if heads.words.stride(3) != 1 or not scales_are_together(heads):
        raise ValueError("the words of a head and the scales of its tokens lie side by side")
    out = torch.empty(batch, count, tokens, heads.width, dtype=dtype, device=heads.words.device)
    if not out.numel():
        return out
    columns = padded(heads.width)
    rows = max(1, NUMBERS // columns)
    widths = plane_widths(heads.bits)
    launch(
        _load_kernel, (triton.cdiv(tokens, rows), count, batch),
        out, *rows_of(heads), heads.first, *path_arrays(heads), first, tokens, last_block(heads),
        *out.stride()[:2], *heads.words.stride()[:3], *heads.scale.stride()[:2], *first_bit_strides(heads),
        *whole_strides(heads), *center_strides(heads),
        BITS=heads.bits, WIDTHS=widths, COUNTS=tuple(words(heads.width, w) for w in widths),
        FIRST_COUNT=words(heads.width, 1), GROUPS=heads.scale.shape[3], GROUP=group_width(heads),
        WHOLE=heads.whole, PATH=path_constants(heads), TURN=turn_width(heads), WIDTH=heads.width,
        ROWS=rows, COLUMNS=columns,
        COMPILED=is_compiled(_load_kernel), num_warps=4, enable_fp_fusion=False, device=out.device,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "last_block"])
def _load_kernel(
    out_ptr, words_ptr, scale_ptr, zero_ptr, first_bits_ptr, whole_ptr, center_ptr, table_ptr,
    first_ptr, tokens, last_block,
    stride_ob, stride_oh, stride_wb, stride_wh, stride_wt, stride_sb, stride_sh, stride_fb, stride_fh,
    stride_kb, stride_kh, stride_kt, stride_cb, stride_ch,
    BITS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr, FIRST_COUNT: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, PATH: tl.constexpr,
    TURN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    head, text = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * ROWS
    rows = begin + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    there = rows < tokens
    real = columns < WIDTH
    inside = there[:, None] & real[None, :]
    if first_bits_ptr is not None:
        first_bits_ptr += text * stride_fb + head * stride_fh
    first = tl.load(first_ptr + text)
    scales = text * stride_sb + head * stride_sh + rows * GROUPS
    numbers = numbers_of(
        words_ptr + text * stride_wb + head * stride_wh + rows * stride_wt, scale_ptr, zero_ptr, scales,
        there, first_bits_ptr, (first - begin).to(tl.int32),
        BITS, WIDTHS, COUNTS, FIRST_COUNT, GROUPS, GROUP, ROWS, COLUMNS,
    )  # fmt: skip
    numbers = turned(numbers, ROWS, COLUMNS, TURN)
    if center_ptr is not None:
        center_ptr += text * stride_cb + head * stride_ch
        center = tl.load(center_ptr + columns, mask=real, other=0.0)
        partner = tl.load(center_ptr + partner_of(columns, PATH), mask=real, other=0.0)
        place = rows - first
        centers = centers_of_rows(
            center, partner, table_ptr, place, begin - first, last_block, columns, real, WIDTH, PATH
        )
        numbers = tl.where((place >= WHOLE)[:, None], numbers + centers, numbers)
    result = rounded(numbers, KIND, COMPILED)
    if WHOLE > 0:
        place = rows - first
        is_whole = ((place >= 0) & (place < WHOLE))[:, None]
        whole = tl.load(
            whole_ptr + text * stride_kb + head * stride_kh + place[:, None] * stride_kt + columns[None, :],
            mask=inside & is_whole, other=0.0,
        )  # fmt: skip
        result = tl.where(is_whole, rounded(widened(whole), KIND, COMPILED), result)
    tl.store(
        out_ptr + text * stride_ob + head * stride_oh + rows[:, None] * WIDTH + columns[None, :],
        result,
        mask=inside,
    )
