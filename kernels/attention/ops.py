"""Operators `neuzip::sage_attention` and `sage_attention_packed`, for torch.compile and CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from neuzip.kernels.attention.options import Options, empty_like_queries


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (empty unless asked for) of batches; operands are checked already."""
    return torch.ops.neuzip.sage_attention(q, k, v, *_numbers(options), return_lse)  # type: ignore[no-any-return]


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    longest_q: int,
    longest_k: int,
    options: Options,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (empty unless asked for) of packed sequences; operands are checked already."""
    return torch.ops.neuzip.sage_attention_packed(  # type: ignore[no-any-return]
        q, k, v, q_starts, k_starts, longest_q, longest_k, *_numbers(options), return_lse
    )


def _numbers(options: Options) -> tuple[int, bool, float, int | None, float | None, bool, bool]:
    """Options as the operators take them."""
    o = options
    return o.bits, o.causal, o.scale, o.window, o.softcap, o.smooth_q, o.smooth_v


_OPTIONS = (
    "SymInt bits, bool causal, float scale, SymInt? window, float? softcap, bool smooth_q, bool smooth_v, "
    "bool return_lse"
)


@torch.library.custom_op(
    "neuzip::sage_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _sage_attention(q, k, v, *numbers):  # type: ignore[no-untyped-def]
    options, return_lse = Options(*numbers[:-1]), numbers[-1]
    if q.device.type == "cuda":
        from neuzip.kernels.attention.triton import forward as triton_forward

        return triton_forward.attention(q, k, v, options, return_lse)
    out, lse = _on_cpu(q, k, v, options)
    laid = empty_like_queries(q, q.dtype).copy_(out)
    return laid, lse if return_lse else lse.new_empty(0)


@_sage_attention.register_fake
def _(q, k, v, *numbers):  # type: ignore[no-untyped-def]
    shape = q.shape[:3] if numbers[-1] else (0,)
    return empty_like_queries(q, q.dtype), torch.empty(shape, dtype=torch.float32, device=q.device)


@torch.library.custom_op(
    "neuzip::sage_attention_packed",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor q_starts, Tensor k_starts, SymInt longest_q, "
        f"SymInt longest_k, {_OPTIONS}) -> (Tensor, Tensor)"
    ),
)
def _sage_attention_packed(q, k, v, q_starts, k_starts, longest_q, longest_k, *numbers):  # type: ignore[no-untyped-def]
    options, return_lse = Options(*numbers[:-1]), numbers[-1]
    if q.device.type == "cuda":
        from neuzip.kernels.attention.triton import forward as triton_forward

        return triton_forward.attention_packed(
            q, k, v, q_starts, k_starts, longest_q, longest_k, options, return_lse
        )
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    q_edges, k_edges = q_starts.tolist(), k_starts.tolist()
    for i in range(len(q_edges) - 1):
        mine, its = slice(q_edges[i], q_edges[i + 1]), slice(k_edges[i], k_edges[i + 1])
        alone = [x.transpose(0, 1)[None] for x in (q[mine], k[its], v[its])]
        one, its_lse = _on_cpu(alone[0], alone[1], alone[2], options)
        out[mine] = one[0].transpose(0, 1)
        lse[:, mine] = its_lse[0]
    return out, lse if return_lse else lse.new_empty(0)


@_sage_attention_packed.register_fake
def _(q, k, v, q_starts, k_starts, longest_q, longest_k, *numbers):  # type: ignore[no-untyped-def]
    shape = (q.shape[1], q.shape[0]) if numbers[-1] else (0,)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(shape, dtype=torch.float32, device=q.device)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The reference, in q's dtype; without queries or keys there is nothing to quantise."""
    from neuzip.kernels.attention import reference

    if not q.numel() or not k.shape[2]:
        lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32)
        return torch.zeros(q.shape, dtype=q.dtype), lse
    out, lse = reference.quantized_attention(
        q, k, v, bits=options.bits, causal=options.causal, scale=options.scale, window=options.window,
        softcap=options.softcap, smooth_q=options.smooth_q, smooth_v=options.smooth_v,
    )  # fmt: skip
    return out.to(q.dtype), lse.float()
