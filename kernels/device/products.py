"""What products of all packed weights have in common: checks of operands, products that decode first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

CHUNK = 48 << 20
"""Bytes of dense weights that a product decodes at a time, or more: most stay in the second-level cache."""

RESULTS = 1 << 23
"""Results of a product with them, or more: for fewer, cuBLAS may split K and add sums rounded to bf16."""

LARGEST = 256 << 20
"""Bytes of dense weights of which a product never decodes twice as many at a time, however few rows x has.

A gradient decodes all of them at once."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled


class PackedWeights(Protocol):
    """Weights [out, in] in a packed form."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def words(self) -> torch.Tensor: ...

    @property
    def device(self) -> torch.device: ...


def is_usual(x: torch.Tensor, packed: PackedWeights, bias: torch.Tensor | None) -> bool:
    """Whether x and bias fit the weights and nothing else has a say, so that a product needs no operator.

    Not with words in host memory, which are fetched first. Every product asks this, so it asks torch for as
    little as possible.
    """
    words = packed.words
    return (
        type(x) in _PLAIN
        and x.dtype == packed.dtype
        and x.device == words.device
        and x.dim() > 0
        and x.size(-1) == packed.shape[1]
        and (bias is None or _is_usual_bias(bias, packed))
        and not _any_autocast()
        and not needs_operator(x, words, bias)
    )


def _is_usual_bias(bias: torch.Tensor, packed: PackedWeights) -> bool:
    return bias.dtype == packed.dtype and bias.device == packed.device and bias.shape == packed.shape[:1]


def needs_operator(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether autograd, a compiler, a mode or a class of tensors has to see a product as an operator.

    To call that takes the host about as long as the launch of a kernel.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or type(words) not in _PLAIN
        or (bias is not None and type(bias) not in _PLAIN)
        or words.is_meta
        or x.is_meta
        or _dispatch_modes() > 0
        or _functorch_level() is not None
        or _tracing() is not None
        or (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
    )


def fitting(
    x: torch.Tensor, packed: PackedWeights, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and bias as a product takes them: under autocast cast to the dtype of the weights.

    Raises TypeError for other dtypes, ValueError for shapes and devices that do not go together.
    """
    for name, one in (("x", x), ("bias", bias)):
        if one is not None and one.device != packed.device:
            raise ValueError(f"{name} is on {one.device}, the packed weights are on {packed.device}")
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        x = x.to(packed.dtype)
        bias = bias if bias is None else bias.to(packed.dtype)
    if x.dtype != packed.dtype or (bias is not None and bias.dtype != packed.dtype):
        other = x.dtype if x.dtype != packed.dtype or bias is None else bias.dtype
        raise TypeError(f"packed weights of {packed.dtype} are not multiplied with {other}; cast it first")
    out, columns = packed.shape
    if x.dim() == 0 or x.shape[-1] != columns or (bias is not None and bias.shape != (out,)):
        shapes = tuple(x.shape), None if bias is None else tuple(bias.shape)
        raise ValueError(f"x and bias have shapes {shapes[0]} and {shapes[1]}, the weights {packed.shape}")
    return x, bias


def rows_of(start: int | None, stop: int | None, step: int | None, count: int) -> tuple[int, int]:
    """First and last of the rows of a slice. Raises ValueError for a slice with a step."""
    first, last, every = slice(start, stop, step).indices(count)
    if every != 1:
        raise ValueError(f"decode takes rows that follow each other, not every {every}th")
    return first, max(first, last)


def require_room(out: torch.Tensor, rows: int, packed: PackedWeights) -> None:
    """Raise ValueError for an `out` that cannot take so many decoded rows."""
    shape = (rows, packed.shape[1])
    if out.shape != shape or out.dtype != packed.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; "
            f"it has to be {packed.dtype} {shape}, contiguous"
        )
    if out.device != packed.device:
        raise ValueError(f"out is on {out.device}, the packed weights are on {packed.device}")


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether Triton does the work; the reference does it on a CPU. Raises ValueError for other devices."""
    if tensor.is_cuda:
        return True
    if tensor.device.type != "cpu":
        raise ValueError(f"packed weights are on a CUDA device or on the CPU, not on {tensor.device}")
    return False


def multiply_decoded(
    x: torch.Tensor,
    out: int,
    bias: torch.Tensor | None,
    decode_to: Callable[[torch.Tensor, int], None],
    tile_rows: int,
) -> torch.Tensor:
    """x @ weights.T + bias for x [rows, in], decoding some rows of the weights [out, in] at a time.

    `decode_to(dense, start)` fills `dense` with rows from `start` on, a multiple of `tile_rows`.
    """
    columns = x.shape[1]
    row_bytes = max(1, columns * x.element_size())
    least = min(max(CHUNK // row_bytes, RESULTS // max(1, x.shape[0])), LARGEST // row_bytes)
    parts = max(1, out // max(1, least))
    step = -(-out // (parts * tile_rows)) * tile_rows
    buffer = torch.empty(min(step, out), columns, dtype=x.dtype, device=x.device)
    if parts == 1:
        decode_to(buffer, 0)
        return F.linear(x, buffer, bias)
    y = torch.empty(x.shape[0], out, dtype=x.dtype, device=x.device)
    for start in range(0, out, step):
        stop = min(start + step, out)
        weight, part = buffer[: stop - start], y[:, start:stop]
        decode_to(weight, start)
        if bias is None:
            torch.mm(x, weight.t(), out=part)
        else:  # addmm into a part would round before it adds the bias
            part.copy_(F.linear(x, weight, bias[start:stop]))
    return y
