"""Quantising and packing new tokens, in Triton: bit for bit what `ops.store` writes.

A program takes some tokens of one head of one text. All arithmetic is fp32 with one rounding an operation, in
the order of quantizers.quantize_heads; the launch forbids the compiler to fuse any of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.launch import launch
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.quantizers import plane_widths, words
from neuzip.kernels.tuning import launch_for

TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a number of up to 2**22 and subtracted again, it rounds it to an integer, halves to even."""

NUMBERS = 2048
"""Numbers that a program takes at most."""

NARROWEST = 32
"""A head is filled up to a power of two, and a plane of 1 bit has words for 32 codes."""


def padded(width: int) -> int:
    """To how many numbers a head is filled up in a kernel."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def store(heads: Sequence[Heads], states: Sequence[Tensor], at: int | Tensor, first: Tensor) -> None:
    """`kv_cache.store` on a GPU, in one launch if all `heads` have one layout.

    Raises ValueError for shapes and strides that do not fit.
    """
    for one, x in zip(heads, states, strict=True):
        _check(one, x)
    alike = len({(_layout(one), x.shape, x.dtype) for one, x in zip(heads, states, strict=True)}) == 1
    if alike:
        _launch(heads, states, at, first)
    else:
        for one, x in zip(heads, states, strict=True):
            _launch([one], [x], at, first)


def _check(heads: Heads, x: Tensor) -> None:
    batch, count, tokens, width = x.shape
    if (*heads.words.shape[:2], heads.width) != (batch, count, width) or tokens > heads.capacity:
        raise ValueError(f"{tuple(x.shape)} does not fit into the room {tuple(heads.words.shape)}")
    if x.stride(3) != 1 or heads.words.stride(3) != 1 or heads.scale.stride(2) != 1:
        raise ValueError("the numbers of a head, its words and the scales of its tokens lie side by side")


def _layout(heads: Heads) -> tuple[object, ...]:
    """What has to be the same for heads that a launch takes together."""
    tensors = heads.words, heads.scale, heads.first_bits
    return heads.width, heads.bits, *((t.shape, t.stride(), t.dtype) for t in tensors if t is not None)


def _launch(heads: Sequence[Heads], states: Sequence[Tensor], at: int | Tensor, first: Tensor) -> None:
    """One launch for heads of one layout."""
    one, (batch, count, tokens, width) = heads[0], states[0].shape
    if not states[0].numel():
        return
    columns = padded(width)
    rows = min(1 << (tokens - 1).bit_length(), max(1, NUMBERS // columns))
    launch(
        _store_kernel, (triton.cdiv(tokens, rows), count * len(heads), batch),
        tuple(states), tuple(h.words for h in heads), tuple(h.scale for h in heads),
        tuple(None for _ in heads), tuple(h.first_bits for h in heads), first, at,
        tokens, one.capacity, width, count, tuple(x.stride()[:3] for x in states),
        *one.words.stride()[:3], *one.scale.stride()[:2],
        *(one.first_bits.stride()[:2] if one.first_bits is not None else (0, 0)),
        AT_IS_POINTER=isinstance(at, Tensor), BITS=one.bits, WIDTHS=plane_widths(one.bits),
        COUNTS=tuple(words(width, w) for w in plane_widths(one.bits)), FIRST_COUNT=words(width, 1),
        ROWS=rows, COLUMNS=columns, **launch_for("kv_cache.store", first.device, numbers=rows * columns),
        enable_fp_fusion=False, pdl=True, device=first.device,
    )  # fmt: skip


@triton.jit
def _nearest_even_bf16(x):
    """x, fp32, rounded to a number that bf16 has: the interpreter would cut bits off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def as_stored(x, KIND: tl.constexpr):
    """x, fp32, as it will be read from memory of a dtype."""
    if KIND.is_bf16():
        x = _nearest_even_bf16(x)
    else:
        x = x.to(KIND).to(tl.float32)
    return x


@triton.jit
def _stored_scale(x, KIND: tl.constexpr):
    scale = as_stored(x, KIND)
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


@triton.jit
def shifts(WIDTH: tl.constexpr):
    """Where in a word the code e of a plane lies."""
    e = tl.arange(0, 32 // WIDTH)
    return 8 * (e % 4) + WIDTH * (e // 4)


@triton.jit
def _store_plane(
    rows, fields, mask, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):
    """Write the words of the lower WIDTH bits of int32 [ROWS, COLUMNS] to `rows` [ROWS, 1]."""
    parts = tl.reshape(fields & ((1 << WIDTH) - 1), [ROWS, COLUMNS * WIDTH // 32, 32 // WIDTH])
    words = tl.sum(parts << shifts(WIDTH)[None, None, :], 2)
    offs = tl.arange(0, COLUMNS * WIDTH // 32)
    tl.store(rows + offs[None, :], words, mask=mask[:, None] & (offs < COUNT)[None, :])


@triton.jit(do_not_specialize=["at_ptr", "tokens", "capacity"])
def _store_kernel(
    xs, words_ptrs, scale_ptrs, low_ptrs, first_bits_ptrs, first_ptr, at_ptr,
    tokens, capacity, width, heads, x_strides, stride_wb, stride_wh, stride_wt,
    stride_sb, stride_sh, stride_fb, stride_fh,
    AT_IS_POINTER: tl.constexpr, BITS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr,
    FIRST_COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head, of the first `Heads` or of those after it."""
    KIND: tl.constexpr = scale_ptrs[0].dtype.element_ty
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    head, text = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x_ptr, words_ptr, scale_ptr = xs[0], words_ptrs[0], scale_ptrs[0]
    low_ptr, first_bits_ptr = low_ptrs[0], first_bits_ptrs[0]
    stride_xb, stride_xh, stride_xt = x_strides[0]
    for i in tl.static_range(1, len(xs)):
        if tl.program_id(1) >= i * heads:
            head = (tl.program_id(1) - i * heads).to(tl.int64)
            x_ptr, words_ptr, scale_ptr = xs[i], words_ptrs[i], scale_ptrs[i]
            stride_xb, stride_xh, stride_xt = x_strides[i]
            if low_ptr is not None:
                low_ptr = low_ptrs[i]
            if first_bits_ptr is not None:
                first_bits_ptr = first_bits_ptrs[i]
    at = (tl.load(at_ptr) if AT_IS_POINTER else at_ptr).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    there = (rows < tokens) & (at + rows >= 0) & (at + rows < capacity)  # what does not fit is dropped
    real = columns < width
    x = x_ptr + text * stride_xb + head * stride_xh + rows[:, None] * stride_xt + columns[None, :]
    x = tl.load(x, mask=there[:, None] & real[None, :], other=0.0).to(tl.float32)  # [ROWS, COLUMNS]

    steps = tl.full([ROWS], (1 << BITS) - 1, tl.float32)
    is_first = rows < 0
    if first_bits_ptr is not None:
        is_first = rows == tl.load(first_ptr + text) - at
        steps = tl.where(is_first, (2 << BITS) - 1.0, steps)

    nan = tl.max(tl.where(x != x, 1, 0), 1) > 0  # a maximum passes over NaN
    if low_ptr is None:
        peak = tl.where(nan, float("nan"), tl.max(tl.abs(x), 1))
        scale = _stored_scale(tl.div_rn(peak, steps * 0.5), KIND)
        low = -scale * (steps * 0.5)
    else:
        least = tl.min(tl.where(real[None, :], x, float("inf")), 1)
        most = tl.max(tl.where(real[None, :], x, float("-inf")), 1)
        low = as_stored(tl.where(nan, float("nan"), least), KIND)
        scale = tl.div_rn(tl.where(nan, low, tl.maximum(most - low, 0.0)), steps)
        scale = _stored_scale(scale, KIND)
    y = tl.div_rn(x - low[:, None], tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(x))
    y = tl.where((scale == 0)[:, None] | (y != y), 0.0, y)
    y = tl.minimum(tl.maximum(y, 0.0), steps[:, None])
    codes = ((y + TO_INTEGER) - TO_INTEGER).to(tl.int32)
    codes = tl.where(real[None, :], codes, 0)

    to = at + rows
    words = words_ptr + text * stride_wb + head * stride_wh + to[:, None] * stride_wt  # [ROWS, 1]
    begin = 0
    for i in tl.static_range(len(WIDTHS)):
        field = codes >> (BITS & (WIDTHS[i] - 1))  # the planes that follow have the lower bits
        _store_plane(words + begin, field, there, COUNTS[i], ROWS, COLUMNS, WIDTHS[i])
        begin += COUNTS[i]
    scales = text * stride_sb + head * stride_sh + to
    tl.store(scale_ptr + scales, scale.to(KIND), mask=there)
    if low_ptr is not None:
        tl.store(low_ptr + scales, low.to(KIND), mask=there)
    if first_bits_ptr is not None:
        place = first_bits_ptr + text * stride_fb + head * stride_fh + rows[:, None] * 0
        _store_plane(place, codes >> BITS, there & is_first, FIRST_COUNT, ROWS, COLUMNS, 1)
