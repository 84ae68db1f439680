"""Softmax attention with quantised products: SageAttention2 (Zhang et al. 2024, arXiv 2411.10958).

q k^T is taken in INT8 (or with codes of 4 bits), p v in FP8 (E4M3), each block's product added up in fp32:

    sage_attention(q, k, v)             [B, H, N, D], batches of one length
    sage_attention_packed(q, k, v, ...) [T, H, D], sequences of different lengths, one after the other
    sageattn(q, k, v, tensor_layout)    the name and the arguments of the authors' package
    supported(q, k, v)                  why a call would be refused, or None

Keys are smoothed: the mean of a sequence is taken off, which softmax does not notice. With 4 bits the mean of
64 queries is taken off as well, and its products with the keys are added to the logits, in the kernel.
Quantising is part of every call. Hopper has no instruction for 4-bit products, and codes live only as long as
the call: with 4 bits they lie one in a byte, are multiplied as INT8, and save neither time nor memory.

reference.py says in plain torch what is computed, and does it on a CPU. On a GPU it is Triton, for compute
capability 9 (triton/quantize.py, triton/forward.py). The same inputs give the same bits. No gradients flow:
inputs that require them are refused.
"""

from __future__ import annotations

from torch import Tensor

from neuzip.kernels.attention import ops as torch_ops

from .options import SUPPORTED_HEAD_DIMS, Options, check_operands, check_starts

__all__ = ["SUPPORTED_HEAD_DIMS", "sage_attention", "sage_attention_packed", "sageattn", "supported"]

Output = Tensor | tuple[Tensor, Tensor]


def sage_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bits: int = 8,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool = False,
    return_lse: bool = False,
) -> Output:
    """softmax(scale q k^T) v with quantised products.

    q         [B, Hq, Nq, D], bf16 or fp16 (fp32 on a CPU), of any strides with numbers of a head side by side
    k, v      [B, Hkv, Nk, D]; query head h reads head h // (Hq // Hkv)
    bits      8 or 4, of a code of q and k
    causal    query i sees keys up to i + Nk - Nq
    scale     1/sqrt(D) by default
    window    a query sees that many keys, its own included; with `causal` only
    softcap   logits become softcap tanh(logits / softcap)
    smooth_q  take the mean of 64 queries off before they are quantised; by default with 4 bits
    smooth_v  take the mean of each channel of the values off before they are quantised

    Returns [B, Hq, Nq, D] in q's dtype, lying in memory as q does (heads before tokens, or after), and with
    `return_lse` the log-sum-exp of the logits, nats, fp32 [B, Hq, Nq]. A query that sees no key gives 0 and
    minus infinity. Inputs that are NaN or infinite spoil all that they are quantised with.
    Raises TypeError and ValueError for everything else.
    """
    check_operands(q, k, v)
    options = Options.of(q.shape[-1], bits, causal, scale, window, softcap, smooth_q, smooth_v)
    out, lse = torch_ops.attention(q, k, v, options, return_lse)
    return (out, lse) if return_lse else out


def sage_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    *,
    longest_q: int,
    longest_k: int,
    bits: int = 8,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool = False,
    return_lse: bool = False,
) -> Output:
    """`sage_attention` of S sequences of different lengths, which lie one after the other.

    q                     [Tq, Hq, D]
    k, v                  [Tk, Hkv, D]
    q_starts, k_starts    int32 [S + 1] on the same device: where sequences begin, and the last one ends
    longest_q, longest_k  tokens of the longest sequence, or more

    Each sequence has its own means and scales: the results are those of the sequences one by one.
    Returns [Tq, Hq, D] and, with `return_lse`, fp32 [Hq, Tq]. Wrong starts and a longest sequence that is not
    are errors on a CPU. Nobody waits for a GPU to know them: there they give wrong numbers, but nothing
    outside of the tensors is read or written.
    """
    check_operands(q, k, v, packed=True)
    check_starts("q_starts", q_starts, q.shape[0], q)
    check_starts("k_starts", k_starts, k.shape[0], q)
    if q_starts.shape != k_starts.shape:
        raise ValueError(f"q_starts are of {len(q_starts) - 1} sequences, k_starts of {len(k_starts) - 1}")
    for name, longest, starts in (("q", longest_q, q_starts), ("k", longest_k, k_starts)):
        if longest < 0:
            raise ValueError(f"longest_{name} is {longest}; a sequence has 0 tokens or more")
        if starts.device.type == "cpu" and len(starts) > 1 and int(starts.diff().max()) > longest:
            raise ValueError(
                f"longest_{name} is {longest}, but a sequence has {int(starts.diff().max())} tokens"
            )
    options = Options.of(q.shape[-1], bits, causal, scale, window, softcap, smooth_q, smooth_v)
    out, lse = torch_ops.attention_packed(
        q, k, v, q_starts, k_starts, longest_q, longest_k, options, return_lse
    )
    return (out, lse) if return_lse else out


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    bits: int = 8,
    window: int | None = None,
    softcap: float | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool = False,
) -> Output:
    """Attention with quantised queries and keys; the arguments are those of the package `sageattention`.

    tensor_layout  "HND": [B, H, N, D], or "NHD": [B, N, H, D], of q, k, v and the output

    There are two differences from `sageattention`. If there are more keys than queries, a causal mask is
    aligned to the last key. Unknown arguments raise TypeError. The log-sum-exp is fp32 [B, Hq, Nq] in both
    layouts. Raises ValueError and TypeError for tensors and options that are not supported.
    """
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f"tensor_layout is {tensor_layout!r}; it is 'HND' or 'NHD'")
    turned = tensor_layout == "NHD"
    if turned:
        for name, x in (("queries", q), ("keys", k), ("values", v)):
            if x.dim() != 4:
                raise ValueError(f"{name} have the shape {tuple(x.shape)}; it has to be [B, N, H, D]")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check_operands(q, k, v)
    options = Options.of(q.shape[-1], bits, is_causal, sm_scale, window, softcap, smooth_q, smooth_v)
    out, lse = torch_ops.attention(q, k, v, options, return_lse)
    out = out.transpose(1, 2) if turned else out
    return (out, lse) if return_lse else out


def supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    packed: bool = False,
    bits: int = 8,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool = False,
) -> str | None:
    """Why `sage_attention` (or with `packed` `sage_attention_packed`) would refuse a call, or None."""
    try:
        check_operands(q, k, v, packed)
        Options.of(q.shape[-1], bits, causal, scale, window, softcap, smooth_q, smooth_v)
    except (TypeError, ValueError) as error:
        return str(error)
    return None
