"""What `kernels.step` lists, in Triton: one launch each, `largest` two. The bits are those of torch.

Nothing may be fused to more exact arithmetic: launch with enable_fp_fusion=False.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda, libdevice

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.step.reference import NORMS, VECTOR, Norm, threads
from neuzip.kernels.tuning import launch_for

_LLAMA, _GEMMA = tl.constexpr(NORMS.index("llama")), tl.constexpr(NORMS.index("gemma"))
_VECTOR = tl.constexpr(VECTOR)


def rms_norm(x: Tensor, weight: Tensor, eps: float, norm: Norm) -> Tensor:
    """An RMS norm of x [..., N], contiguous, where `can_norm` says so; weight [N], contiguous.

    x and weight are bf16, fp16 or fp32.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    dtype = torch.promote_types(x.dtype, weight.dtype) if norm == "llama" else x.dtype
    y = torch.empty_like(x, dtype=dtype)
    width = threads(rows, columns)
    turns = -(-columns // (VECTOR * width))
    most = launch_for("step.rms_norm", x.device)["register_turns"]
    launch(
        _rms_norm, (rows,),
        y, x, weight, columns, eps, 1 / columns, W=width, TURNS=turns, KEEP=turns <= most,
        NORM=NORMS.index(norm), COMPILED=is_compiled(_rms_norm),
        num_warps=max(1, width // 64), pdl=True, enable_fp_fusion=False, device=x.device,
    )  # fmt: skip
    return y


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, H, T, width], turned by cos and sin [B or 1, T, width]; see `can_rotate`."""
    batch, heads, tokens, width = q.shape
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    launch(
        _rotate, (tokens, heads + k.shape[1], batch),
        q_out, k_out, q, k, cos, sin, heads, *q_out.stride()[:3], *k_out.stride()[:3], *q.stride()[:3],
        *k.stride()[:3], cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        sin.stride(0) if sin.shape[0] > 1 else 0, sin.stride(1),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), COMPILED=is_compiled(_rotate),
        num_warps=1, pdl=True, enable_fp_fusion=False, device=q.device,
    )  # fmt: skip
    return q_out, k_out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of tensors of one shape where `can_gate` says so: of that shape and dtype."""
    y = torch.empty_like(gate)
    config = launch_for("step.gated", gate.device)
    launch(
        _gated, (triton.cdiv(gate.numel(), config["block"]),),
        y, gate, up, gate.numel(), BLOCK=config["block"], COMPILED=is_compiled(_gated),
        num_warps=config["num_warps"], pdl=True, enable_fp_fusion=False, device=gate.device,
    )  # fmt: skip
    return y


def largest(x: Tensor) -> Tensor:
    """Where the largest number of each row of x [B, N] is, int64 [B], where `can_find` says so.

    `Tensor.argmax`: of equal ones the first, and a NaN is larger than all.
    """
    rows, columns = x.shape
    config = launch_for("step.largest", x.device)
    parts = triton.cdiv(columns, config["block"])
    keys = torch.empty(rows, parts, dtype=torch.int64, device=x.device)
    places = torch.empty(rows, dtype=torch.int64, device=x.device)
    launch(
        _largest, (parts, rows),
        keys, x, x.stride(0), columns, BLOCK=config["block"], num_warps=config["num_warps"], pdl=True,
        device=x.device,
    )  # fmt: skip
    launch(
        _place_of_largest, (rows,),
        places, keys, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1, pdl=True, device=x.device,
    )  # fmt: skip
    return places


def store(rooms: tuple[Tensor, Tensor], states: tuple[Tensor, Tensor], places: Tensor) -> None:
    """Write keys and values [B, H, T, width] to rows `places`, int64 [T], of rooms [B, H, N, width or more].

    As two calls of `Tensor.index_copy_`, but that what is to go beyond a room is dropped. Widths of keys and
    of values may differ.
    """
    batch, heads, tokens, _ = states[0].shape
    widths = [state.shape[3] for state in states]
    launch(
        _store, (tokens, heads, batch),
        *rooms, *states, places, rooms[0].shape[2], *rooms[0].stride()[:3], *rooms[1].stride()[:3],
        *states[0].stride(), *states[1].stride(), K_WIDTH=widths[0], V_WIDTH=widths[1],
        BLOCK=triton.next_power_of_2(max(widths)), num_warps=1, pdl=True, device=places.device,
    )  # fmt: skip


@triton.jit(do_not_specialize=["eps", "share"])
def _rms_norm(
    y, x, weight, columns, eps, share,
    W: tl.constexpr, TURNS: tl.constexpr, KEEP: tl.constexpr, NORM: tl.constexpr, USE_PDL: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """The RMS norm of a row. Thread t has the vectors t, t + W and so on."""
    at = tl.arange(0, W)[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :]
    x += tl.program_id(0).to(tl.int64) * columns
    y += tl.program_id(0).to(tl.int64) * columns
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    wide, weights = (), ()
    apart = tl.zeros([W, _VECTOR], tl.float32)
    for turn in tl.static_range(TURNS):
        here = at + turn * (W * _VECTOR)
        loaded = widened(tl.load(x + here, mask=here < columns, other=0.0))
        apart += loaded * loaded
        if KEEP:
            wide += (loaded,)
            weights += (widened(tl.load(weight + here, mask=here < columns, other=0.0)),)
    even, odd = tl.split(tl.reshape(apart, [W, 2, 2]))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    factor = tl.rsqrt(_folded(s0 + s1 + s2 + s3, W) * share + eps)
    for turn in tl.static_range(TURNS):
        here = at + turn * (W * _VECTOR)
        if KEEP:
            normed, scale = wide[turn] * factor, weights[turn]
        else:
            normed = widened(tl.load(x + here, mask=here < columns, other=0.0)) * factor
            scale = widened(tl.load(weight + here, mask=here < columns, other=0.0))
        if NORM == _LLAMA:
            result = scale * widened(rounded(normed, x.dtype.element_ty, COMPILED))
        elif NORM == _GEMMA:
            result = normed * (1.0 + scale)
        else:
            result = scale * normed
        tl.store(y + here, rounded(result, y.dtype.element_ty, COMPILED), mask=here < columns)


@triton.jit
def _folded(sums, W: tl.constexpr):
    """The sum of W numbers, each time the second half added to the first."""
    for level in tl.static_range(10):
        if W >> level > 1:
            sums = tl.sum(tl.reshape(sums, [2, W >> (level + 1)]), 0)
    return tl.sum(sums, 0)


@triton.jit
def _place():
    """Token, head and text of a program."""
    return tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)


@triton.jit
def _rotate(
    q_out, k_out, q, k, cos, sin, heads, q_ob, q_oh, q_ot, k_ob, k_oh, k_ot, q_b, q_h, q_t, k_b, k_h, k_t,
    cos_b, cos_t, sin_b, sin_t,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One head of queries or of keys, of one token."""
    token, head, text = _place()
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if head < heads:
        x, y = q + text * q_b + head * q_h + token * q_t, q_out + text * q_ob + head * q_oh + token * q_ot
    else:
        head -= heads
        x, y = k + text * k_b + head * k_h + token * k_t, k_out + text * k_ob + head * k_oh + token * k_ot
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    first = at < WIDTH // 2
    c = widened(tl.load(cos + text * cos_b + token * cos_t + at, mask=there, other=0.0))
    s = widened(tl.load(sin + text * sin_b + token * sin_t + at, mask=there, other=0.0))
    own = widened(tl.load(x + at, mask=there, other=0.0))
    across = tl.where(first, at + WIDTH // 2, at - WIDTH // 2)
    other = widened(tl.load(x + across, mask=there, other=0.0))
    other = tl.where(first, other * -1.0, other)  # whose zeros change their sign, as in torch
    DTYPE: tl.constexpr = y.dtype.element_ty
    a = widened(rounded(own * c, DTYPE, COMPILED))
    b = widened(rounded(other * s, DTYPE, COMPILED))
    tl.store(y + at, rounded(a + b, DTYPE, COMPILED), mask=there)


@triton.jit
def _gated(
    y, gate, up, count, BLOCK: tl.constexpr, USE_PDL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of BLOCK numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    x = widened(tl.load(gate + at, mask=there, other=0.0))
    linear = widened(tl.load(up + at, mask=there, other=0.0))
    if COMPILED:
        power = libdevice.exp(-x)  # exact to the last bits, as CUDA's: tl.exp is not
    else:
        power = tl.exp(-x)
    DTYPE: tl.constexpr = y.dtype.element_ty
    opened = widened(rounded(tl.div_rn(x, 1.0 + power), DTYPE, COMPILED))
    tl.store(y + at, rounded(opened * linear, DTYPE, COMPILED), mask=there)


@triton.jit
def _largest(keys, x, row, columns, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """The largest key of a part of a row: order of the number in the upper half, place in the lower one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < columns
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    wide = widened(tl.load(x + tl.program_id(1).to(tl.int64) * row + at, mask=there, other=0.0))
    order = wide.to(tl.int32, bitcast=True)
    order = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    order = tl.where(wide == 0, 0, tl.where(wide != wide, 0x7FFFFFFF, order))
    key = (order.to(tl.int64) << 32) + (0xFFFFFFFF - at)
    key = tl.where(there, key, -0x8000000000000000)
    tl.store(keys + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0), tl.max(key, 0))


@triton.jit
def _place_of_largest(places, keys, parts, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """Where the largest number of a row is, from the largest key of each of its parts."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    key = tl.max(tl.load(keys + row * parts + at, mask=at < parts, other=-0x8000000000000000), 0)
    tl.store(places + row, 0xFFFFFFFF - (key & 0xFFFFFFFF))


@triton.jit(do_not_specialize=["length"])
def _store(
    k_room, v_room, k, v, places, length, kr_b, kr_h, kr_n, vr_b, vr_h, vr_n,
    k_b, k_h, k_t, k_w, v_b, v_h, v_t, v_w,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The key and the value of one token of a head, to row `places[token]` of its room."""
    token, head, text = _place()
    at = tl.arange(0, BLOCK)
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    place = tl.load(places + token)
    inside = (place >= 0) & (place < length)
    key = tl.load(k + text * k_b + head * k_h + token * k_t + at * k_w, mask=inside & (at < K_WIDTH))
    value = tl.load(v + text * v_b + head * v_h + token * v_t + at * v_w, mask=inside & (at < V_WIDTH))
    tl.store(k_room + text * kr_b + head * kr_h + place * kr_n + at, key, mask=inside & (at < K_WIDTH))
    tl.store(v_room + text * vr_b + head * vr_h + place * vr_n + at, value, mask=inside & (at < V_WIDTH))
