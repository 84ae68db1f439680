"""What quantised attention is asked for, and what it refuses: each refusal a sentence, nothing is ignored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.kernels.dtypes import torch_dtypes_for

SUPPORTED_HEAD_DIMS = tuple(range(16, 257, 16))
"""Numbers of a head: tiles are copied in rows of 16 bytes."""

GPU_DTYPES, CPU_DTYPES = torch_dtypes_for("attention"), torch_dtypes_for("attention_cpu")

LARGEST_SCALE, LARGEST_SOFTCAP = 1e6, 1e4
"""Beyond them the kernels' fp32 has no digits left."""

HOPPER = 9
"""Major compute capability: the kernels multiply with its instructions for INT8 and FP8."""


@dataclass(frozen=True)
class Options:
    """How softmax(scale q k^T) v is to be taken, see `sage_attention`.

    Raises TypeError and ValueError for what makes no sense.
    """

    bits: int = 8
    causal: bool = False
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    smooth_q: bool = False
    smooth_v: bool = False

    def __post_init__(self) -> None:
        for name in ("bits", "window"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "window" and value is None):
                raise TypeError(f"{name} is {value!r}; it has to be an int")
        for name in ("causal", "smooth_q", "smooth_v"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it has to be True or False")
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}; queries and keys are quantised to 4 or 8 bits")
        if not 0 < self.scale <= LARGEST_SCALE:
            raise ValueError(f"scale is {self.scale}; it has to be above 0 and at most {LARGEST_SCALE:g}")
        if self.softcap is not None and not 0 < self.softcap <= LARGEST_SOFTCAP:
            raise ValueError(
                f"softcap is {self.softcap}; it has to be above 0 and at most {LARGEST_SOFTCAP:g}, or None: "
                "a larger one does nothing"
            )
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"window is {self.window} and causal {self.causal}; "
                "a window is of at least one key and looks back, with causal=True only"
            )

    @classmethod
    def of(
        cls,
        head_dim: int,
        bits: int,
        causal: bool,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        smooth_q: bool | None,
        smooth_v: bool,
    ) -> Options:
        """Options as a caller gives them: the scale 1/sqrt(D) and smoothing of 4-bit queries by default."""
        return cls(
            bits=bits,
            causal=causal,
            scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
            window=window,
            softcap=softcap,
            smooth_q=bits == 4 if smooth_q is None else smooth_q,
            smooth_v=smooth_v,
        )


def check_operands(q: Tensor, k: Tensor, v: Tensor, packed: bool = False) -> None:
    """Raise TypeError or ValueError for queries, keys and values that are not what the kernels take.

    q [B, Hq, Nq, D], k v [B, Hkv, Nk, D]; packed q [Tq, Hq, D], k v [Tk, Hkv, D].
    """
    on_gpu = q.device.type == "cuda"
    dtypes = GPU_DTYPES if on_gpu else CPU_DTYPES
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"queries are on {q.device}; they have to be on a CUDA device or on the CPU")
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"queries are on {q.device}, keys on {k.device} and values on {v.device}")
    if q.dtype not in dtypes or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}; "
            "they have to be the same, bf16 or fp16, on the CPU also fp32"
        )
    shape = "[tokens, heads, D]" if packed else "[batch, heads, tokens, D]"
    dims = 3 if packed else 4
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if x.dim() != dims:
            raise ValueError(f"{name} have the shape {tuple(x.shape)}; it has to be {shape}")
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
            raise ValueError(
                f"the numbers of a head of the {name} do not lie side by side; use .contiguous()"
            )
    if k.shape != v.shape:
        raise ValueError(f"keys have the shape {tuple(k.shape)}, values {tuple(v.shape)}; they have to agree")
    if q.shape[-1] != k.shape[-1] or (not packed and q.shape[0] != k.shape[0]):
        raise ValueError(f"queries {tuple(q.shape)} do not go with keys {tuple(k.shape)}, both {shape}")
    heads, kv_heads = (q.shape[1], k.shape[1])
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if q.shape[-1] not in SUPPORTED_HEAD_DIMS:
        raise ValueError(
            f"a head of {q.shape[-1]} numbers is not supported; "
            f"multiples of {SUPPORTED_HEAD_DIMS[0]} up to {SUPPORTED_HEAD_DIMS[-1]} are"
        )
    if on_gpu and torch.cuda.get_device_capability(q.device)[0] != HOPPER:
        raise ValueError(f"{q.device} is not of the Hopper generation, which the kernels are made for")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "quantised attention has no gradients, but an input requires one; "
            "call it under torch.no_grad(), or use exact attention"
        )


def check_starts(name: str, starts: Tensor, tokens: int, q: Tensor) -> None:
    """Raise TypeError or ValueError unless `starts` can be where the sequences of a pack begin.

    Their values are looked at on a CPU only: nobody waits for a GPU.
    """
    if starts.dtype != torch.int32:
        raise TypeError(f"{name} is {starts.dtype}; it has to be torch.int32")
    if starts.dim() != 1 or starts.shape[0] < 1 or not starts.is_contiguous():
        raise ValueError(f"{name} has the shape {tuple(starts.shape)}; it has to be [sequences + 1], dense")
    if starts.device != q.device:
        raise ValueError(f"{name} is on {starts.device}, the queries on {q.device}")
    if starts.device.type == "cpu":
        numbers = starts.tolist()
        if numbers != sorted(numbers) or numbers[0] != 0 or numbers[-1] != tokens:
            raise ValueError(f"{name} has to rise from 0 to the number of tokens, {tokens}; it is {numbers}")


def empty_like_queries(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the output [B, H, N, D], lying as q does: heads before tokens, or after."""
    batch, heads, tokens, width = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty(batch, tokens, heads, width, dtype=dtype, device=q.device).transpose(1, 2)
    return torch.empty(q.shape, dtype=dtype, device=q.device)
