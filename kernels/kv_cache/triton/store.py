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

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.arguments import (
    center_strides,
    first_bit_strides,
    last_block,
    path_arrays,
    path_constants,
    plane_counts,
    scales_are_together,
    whole_strides,
)
from neuzip.kernels.kv_cache.triton.groups import (
    centers_of_rows,
    partner_of,
    scale_of_byte,
    turn_width,
    turned,
)
from neuzip.kernels.quantizers import plane_widths
from neuzip.kernels.quantizers.kv_groups import COVER, LEAST_SCALE, MOST_SCALE, SCALE_NAN, SCALE_OFFSET
from neuzip.kernels.tuning import launch_for

TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a number of up to 2**22 and subtracted again, it rounds it to an integer, halves to even."""

_LEAST, _MOST = tl.constexpr(LEAST_SCALE), tl.constexpr(MOST_SCALE)
_NAN, _OFFSET = tl.constexpr(SCALE_NAN), tl.constexpr(SCALE_OFFSET)

NUMBERS = 2048
"""Numbers that a program takes at most."""

NARROWEST = 32
"""A head is filled up to a power of two, and a plane of 1 bit has words for 32 codes."""


def padded(width: int) -> int:
    """To how many numbers a head is filled up in a kernel."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def store(heads: Sequence[Heads], states: Sequence[Tensor], at: int | Tensor, first: Tensor) -> None:
    """`kv_cache.store` on a GPU, in one launch if all `states` have one shape and all centers one path.

    Raises ValueError for shapes and strides that do not fit, and for groups that are no power of two.
    """
    for one, x in zip(heads, states, strict=True):
        _check(one, x)
    paths = {id(one.path.table) for one in heads if one.path is not None}
    forms = {(one.capacity, x.shape, x.dtype) for one, x in zip(heads, states, strict=True)}
    if len(forms) == 1 and len(paths) <= 1:
        _launch(heads, states, at, first)
    else:
        for one, x in zip(heads, states, strict=True):
            _launch([one], [x], at, first)


def _check(heads: Heads, x: Tensor) -> None:
    batch, count, tokens, width = x.shape
    if (*heads.words.shape[:2], heads.width) != (batch, count, width) or tokens > heads.capacity:
        raise ValueError(f"{tuple(x.shape)} does not fit into the room {tuple(heads.words.shape)}")
    if x.stride(3) != 1 or heads.words.stride(3) != 1 or not scales_are_together(heads):
        raise ValueError("the numbers of a head, its words and the scales of its tokens lie side by side")
    if heads.group is not None and heads.group & (heads.group - 1):
        raise ValueError(f"the kernel stores groups of a power of two of numbers, not of {heads.group}")


def _launch(heads: Sequence[Heads], states: Sequence[Tensor], at: int | Tensor, first: Tensor) -> None:
    """One launch for heads whose states have one shape, each in its own form."""
    batch, count, tokens, width = states[0].shape
    if not states[0].numel():
        return
    columns = padded(width)
    rows = min(1 << (tokens - 1).bit_length(), max(1, NUMBERS // columns))
    launch(
        _store_kernel, (triton.cdiv(tokens, rows), count * len(heads), batch),
        tuple(states), tuple(h.words for h in heads), tuple(h.scale for h in heads),
        tuple(h.zero for h in heads), tuple(h.first_bits for h in heads), tuple(h.first for h in heads),
        tuple(path_arrays(h) for h in heads), tuple(h.path and h.path.still for h in heads), first, at,
        tokens, heads[0].capacity, max(last_block(h) for h in heads), count,
        tuple(_strides(h, x) for h, x in zip(heads, states, strict=True)),
        AT_IS_POINTER=isinstance(at, Tensor), FORMS=tuple(_form(h, columns) for h in heads),
        WIDTHS=tuple(plane_widths(h.bits) for h in heads), COUNTS=tuple(plane_counts(h) for h in heads),
        WIDTH=width, ROWS=rows, COLUMNS=columns,
        **launch_for("kv_cache.store", first.device, numbers=rows * columns),
        COMPILED=is_compiled(_store_kernel), enable_fp_fusion=False, pdl=True, device=first.device,
    )  # fmt: skip


def _strides(heads: Heads, x: Tensor) -> tuple[int, ...]:
    """Those of all arrays of a head: of states and words three, of scales two, and of what may be missing."""
    held = *x.stride()[:3], *heads.words.stride()[:3], *heads.scale.stride()[:2]
    return *held, *first_bit_strides(heads), *whole_strides(heads), *center_strides(heads)


def _form(heads: Heads, columns: int) -> tuple[int | float | tuple[int, ...], ...]:
    """Bits, groups and their width, the range that codes cover, whole tokens, the width of the rotation, and
    what the path of centers is.
    """
    group = min(columns, heads.group or columns)
    rest = turn_width(heads), path_constants(heads)
    return heads.bits, heads.scale.shape[3], group, COVER[heads.bits], heads.whole, *rest


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


@triton.jit
def _plain_codes(x, real, steps, KIND: tl.constexpr):
    """Codes of rows of x and their scales [ROWS]: `quantizers.quantize_heads`."""
    nan = tl.max(tl.where(x != x, 1, 0), 1) > 0  # a maximum passes over NaN
    peak = tl.where(nan, float("nan"), tl.max(tl.abs(x), 1))
    scale = _stored_scale(tl.div_rn(peak, steps * 0.5), KIND)
    low = -scale * (steps * 0.5)
    y = tl.div_rn(x - low[:, None], tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(x))
    y = tl.where((scale == 0)[:, None] | (y != y), 0.0, y)
    y = tl.minimum(tl.maximum(y, 0.0), steps[:, None])
    codes = ((y + TO_INTEGER) - TO_INTEGER).to(tl.int32)
    return tl.where(real[None, :], codes, 0), scale


@triton.jit
def _group_codes(
    x, real, BITS: tl.constexpr, COVER: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes of rows of x, scale bytes and zero points [ROWS, groups]: `quantizers.quantize_groups`."""
    STEPS: tl.constexpr = (1 << BITS) - 1
    parts = tl.reshape(x, [ROWS, COLUMNS // GROUP, GROUP])
    there = tl.reshape(real[None, :] & (tl.zeros([ROWS, COLUMNS], tl.int32) == 0), parts.shape)
    nan = tl.max(tl.where(parts != parts, 1, 0), 2) > 0
    least = tl.min(tl.where(there, parts, float("inf")), 2)
    most = tl.max(tl.where(there, parts, float("-inf")), 2)
    middle = (least + most) * 0.5
    half = tl.maximum((most - least) * 0.5, tl.abs(middle) * 0.5)
    wanted = tl.where(nan, float("nan"), half * (2 * COVER / STEPS))
    byte = ((wanted.to(tl.int32, bitcast=True) + ((1 << 20) - 1)) >> 20) - _OFFSET
    usable = (tl.abs(wanted) < float("inf")) & (byte <= _MOST)
    byte = tl.where(wanted == 0, 0, tl.where(usable, tl.maximum(byte, _LEAST), _NAN))
    usable = (byte != 0) & (byte != _NAN)
    divisor = tl.where(usable, scale_of_byte(byte), 1.0)
    zero = tl.div_rn(middle, divisor) * 2.0 ** (7 - BITS)
    zero = tl.minimum(tl.maximum((zero + TO_INTEGER) - TO_INTEGER, -128.0), 127.0)
    zero = tl.where(usable, zero, 0.0)
    point = STEPS / 2 - zero * 2.0 ** (BITS - 7)
    y = tl.div_rn(parts, divisor[:, :, None] + tl.zeros_like(parts)) + point[:, :, None]
    y = tl.minimum(tl.maximum(y, 0.0), STEPS * 1.0)
    codes = ((y + TO_INTEGER) - TO_INTEGER).to(tl.int32)
    codes = tl.where(usable[:, :, None] & there, codes, 0)
    return tl.reshape(codes, [ROWS, COLUMNS]), byte, zero.to(tl.int32)


@triton.jit
def _center(
    x_ptr, stride_xt, whole_ptr, stride_kt, center_ptr, still_ptr, place, tokens, new_center, columns, real,
    WHOLE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The mean of all whole tokens but the first, fp32 as `columns`; 0 in channels that are not still.

    `place` is where in x [tokens, COLUMNS] the first of them lies, and `new_center` whether any of them does.
    Those that are in x are taken from there, for another program may write them at this time.
    """
    if new_center:
        total = tl.zeros(columns.shape, tl.float32)
        for i in tl.static_range(1, WHOLE):
            its = place + i
            inside = (its >= 0) & (its < tokens)
            new = tl.load(x_ptr + its * stride_xt + columns, mask=real & inside, other=0.0)
            new = widened(rounded(widened(new), whole_ptr.dtype.element_ty, COMPILED))
            old = tl.load(whole_ptr + i * stride_kt + columns, mask=real & (inside == 0), other=0.0)
            total += tl.where(inside, new, widened(old))
        still = tl.load(still_ptr + columns, mask=real, other=0) != 0
        center = tl.where(still, total * (1.0 / (WHOLE - 1 if WHOLE > 1 else 1)), 0.0)
    else:
        center = tl.load(center_ptr + columns, mask=real, other=0.0)
    return center


@triton.constexpr_function
def _entry(constants, i):
    """Entry i of a tuple of tuples, as a constant."""
    return constants[i]


@triton.jit(do_not_specialize=["at_ptr", "tokens", "capacity", "last_block"])
def _store_kernel(
    xs, words_ptrs, scale_ptrs, zero_ptrs, first_bits_ptrs, whole_ptrs, paths, still_ptrs, first_ptr, at_ptr,
    tokens, capacity, last_block, heads, strides,
    AT_IS_POINTER: tl.constexpr, FORMS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head, of the first `Heads` or of those after it."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    text = tl.program_id(2).to(tl.int64)
    at = (tl.load(at_ptr) if AT_IS_POINTER else at_ptr).to(tl.int64)
    first = tl.load(first_ptr + text)
    for i in tl.static_range(len(xs)):
        if tl.program_id(1) // heads == i:
            _store_rows(
                xs[i], words_ptrs[i], scale_ptrs[i], zero_ptrs[i], first_bits_ptrs[i], whole_ptrs[i],
                paths[i], still_ptrs[i], text, (tl.program_id(1) - i * heads).to(tl.int64), first, at, tokens,
                capacity, last_block, strides[i],
                _entry(FORMS, i), _entry(WIDTHS, i), _entry(COUNTS, i), WIDTH, ROWS, COLUMNS, COMPILED,
            )  # fmt: skip


@triton.jit
def _store_rows(
    x_ptr, words_ptr, scale_ptr, zero_ptr, first_bits_ptr, whole_ptr, path, still_ptr, text, head, first, at,
    tokens, capacity, last_block, strides,
    FORM: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head of one text."""
    BITS: tl.constexpr = FORM[0]
    GROUPS: tl.constexpr = FORM[1]
    GROUP: tl.constexpr = FORM[2]
    COVER: tl.constexpr = FORM[3]
    WHOLE: tl.constexpr = FORM[4]
    TURN: tl.constexpr = FORM[5]
    PATH: tl.constexpr = FORM[6]
    (
        stride_xb, stride_xh, stride_xt, stride_wb, stride_wh, stride_wt, stride_sb, stride_sh, stride_fb,
        stride_fh, stride_kb, stride_kh, stride_kt, stride_cb, stride_ch,
    ) = strides  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    there = (rows < tokens) & (at + rows >= 0) & (at + rows < capacity)  # what does not fit is dropped
    real = columns < WIDTH
    x_ptr += text * stride_xb + head * stride_xh
    x = tl.load(
        x_ptr + rows[:, None] * stride_xt + columns[None, :], mask=there[:, None] & real[None, :], other=0.0
    )
    x = widened(x)  # [ROWS, COLUMNS]
    to = at + rows
    place = to - first
    if WHOLE > 0:
        whole_ptr += text * stride_kb + head * stride_kh
        tl.store(
            whole_ptr + place[:, None] * stride_kt + columns[None, :],
            rounded(x, whole_ptr.dtype.element_ty, COMPILED),
            mask=(there & (place >= 0) & (place < WHOLE))[:, None] & real[None, :],
        )  # fmt: skip
    if still_ptr is not None:
        center_ptr, table_ptr = path
        center_ptr += text * stride_cb + head * stride_ch
        begin = first - at
        new_center = (begin < tokens) & (begin + WHOLE > 0)
        center = _center(
            x_ptr, stride_xt, whole_ptr, stride_kt, center_ptr, still_ptr, begin, tokens, new_center,
            columns, real, WHOLE, COMPILED,
        )  # fmt: skip
        partner = _center(
            x_ptr, stride_xt, whole_ptr, stride_kt, center_ptr, still_ptr, begin, tokens, new_center,
            partner_of(columns, PATH), real, WHOLE, COMPILED,
        )  # fmt: skip
        if new_center & (tl.program_id(0) == 0):
            tl.store(center_ptr + columns, center, mask=real)
        centers = centers_of_rows(
            center, partner, table_ptr, place, tl.program_id(0) * ROWS - begin, last_block, columns, real,
            WIDTH, PATH,
        )  # fmt: skip
        x = tl.where((place >= WHOLE)[:, None], x - centers, x)

    words = words_ptr + text * stride_wb + head * stride_wh + to[:, None] * stride_wt  # [ROWS, 1]
    scales = text * stride_sb + head * stride_sh + to * GROUPS
    if zero_ptr is None:
        KIND: tl.constexpr = scale_ptr.dtype.element_ty
        steps = tl.full([ROWS], (1 << BITS) - 1, tl.float32)
        is_first = (place == 0) & (first_bits_ptr is not None)
        if first_bits_ptr is not None:
            steps = tl.where(is_first, (2 << BITS) - 1.0, steps)
        codes, scale = _plain_codes(x, real, steps, KIND)
        tl.store(scale_ptr + scales, scale.to(KIND), mask=there)
        if first_bits_ptr is not None:
            bits = first_bits_ptr + text * stride_fb + head * stride_fh + rows[:, None] * 0
            _store_plane(bits, codes >> BITS, there & is_first, (WIDTH + 31) // 32, ROWS, COLUMNS, 1)
    else:
        x = turned(x, ROWS, COLUMNS, TURN)
        codes, byte, zero = _group_codes(x, real, BITS, COVER, GROUP, ROWS, COLUMNS)
        groups = tl.arange(0, COLUMNS // GROUP)
        inside = there[:, None] & (groups < GROUPS)[None, :]
        tl.store(scale_ptr + scales[:, None] + groups[None, :], byte.to(tl.uint8), mask=inside)
        tl.store(zero_ptr + scales[:, None] + groups[None, :], zero.to(tl.int8), mask=inside)
    begin = 0
    for i in tl.static_range(len(WIDTHS)):
        field = codes >> (BITS & (WIDTHS[i] - 1))  # the planes that follow have the lower bits
        _store_plane(words + begin, field, there, COUNTS[i], ROWS, COLUMNS, WIDTHS[i])
        begin += COUNTS[i]
