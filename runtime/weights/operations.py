"""What torch does with compressed weights: entries of the tables SHORT_CUTS and HANDLERS of `base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from neuzip.errors import NeuzipError
from neuzip.runtime.weights.base import HANDLERS, SHORT_CUTS, CompressedWeight, frozen, is_few

aten = torch.ops.aten

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Short cuts take what the functions of torch take, and return NotImplemented where gradients, autocast or
# other subclasses have a say.


def _direct(x: Any, *others: Any) -> bool:
    """Whether ordinary tensors meet a weight in an ordinary way."""
    for tensor in (x, *others):
        if type(tensor) not in _PLAIN and tensor is not None:
            return False
    return not torch.is_autocast_enabled(x.device.type)


def _is_plain(x: Any, weight: CompressedWeight, bias: Any) -> bool:
    """Whether a product is of tensors of one dtype, and nothing else has a say."""
    return (
        _direct(x, bias)
        and not weight._traced
        and not _needs_graph(weight, x, bias)
        and bool(x.dtype == weight.stored_dtype)
    )


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or len(weight.stored) != 2:
        return NotImplemented
    result = weight._usual_linear(x, bias)
    if result is not None:
        return result
    if not _is_plain(x, weight, bias):
        return NotImplemented
    return weight._linear(x, bias)


def _addmm(bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    if out is not None or beta != 1 or alpha != 1 or not isinstance(weight, CompressedWeight):
        return NotImplemented
    if not _is_plain(x, weight, bias):
        return NotImplemented
    return _addmm_of(aten.addmm.default, bias, x, weight)


def _embedding(
    ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or len(weight.stored) != 2:
        return NotImplemented
    if max_norm is not None or not _direct(ids) or weight._traced or _needs_graph(weight, ids, None):
        return NotImplemented
    return weight._look_up(ids)


def _needs_graph(weight: CompressedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether autograd must see the operation itself. The packed product has gradients for x and bias."""
    if not torch.is_grad_enabled():
        return False
    if weight.requires_grad:
        return True
    return weight.exact and (x.requires_grad or (bias is not None and bias.requires_grad))


def _set_data(weight: Any, value: torch.Tensor) -> Any:
    """Make it another tensor. Whatever shares it sees that too.

    Not one of another dtype: modules assign such when they, or peft, cast all weights, and the model would be
    a dense one, unseen.
    """
    if not isinstance(weight, CompressedWeight):
        return NotImplemented
    if value.dtype != weight.dtype:
        raise NeuzipError(
            f"a {type(weight).__name__} of {weight.dtype} cannot become {value.dtype} where it lies",
            "leave its dtype alone, or make the model dense first: model.dequantize()",
        )
    other = value.detach()
    if isinstance(weight, torch.nn.Parameter):
        other = torch.nn.Parameter(other, requires_grad=False)
    torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]
    return None


def _refuse_item(weight: Any, index: Any, value: Any) -> Any:
    if isinstance(weight, CompressedWeight):
        raise frozen(weight, "assigning to elements")
    return NotImplemented


SHORT_CUTS.update(
    {
        F.linear: _linear,
        F.embedding: _embedding,
        torch.addmm: _addmm,
        torch.Tensor.__setitem__: _refuse_item,
        torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    }
)

# Operations below autograd. A handler is given the operation and its arguments.


def _linear_op(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or weight.dim() != 2 or _any(x, bias):
        return NotImplemented
    return weight._linear(x, bias)


def _mm_of(func: Any, x: Any, weight: Any) -> Any:
    if not isinstance(weight, CompressedWeight) or _any(x):
        return NotImplemented
    return weight._linear(x, None) if weight.flipped else _product(func, x, weight, ahead=is_few(x))


def _addmm_of(func: Any, bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not isinstance(weight, CompressedWeight) or _any(x, bias):
        return NotImplemented
    if weight.flipped and bias.dim() == 1 and beta == 1 and alpha == 1:
        return weight._linear(x, bias)
    return _product(func, bias, x, weight, beta=beta, alpha=alpha, ahead=is_few(x))


def _mv_of(func: Any, weight: Any, x: Any) -> Any:
    if not isinstance(weight, CompressedWeight) or _any(x) or weight.flipped:
        return NotImplemented
    return weight._linear(x, None)


def _product(func: Any, *args: Any, ahead: bool, **kwargs: Any) -> Any:
    """A product of one weight that is decoded as a whole, to a shared buffer."""
    weights = [w for w in tree_leaves((args, kwargs)) if isinstance(w, CompressedWeight)]
    weight = weights[0]
    if len(weights) > 1 or len(weight.parts) != 1 or weight.dim() != 2:
        return NotImplemented

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        dense = rows.t() if weight.flipped else rows
        own = tree_map_only(CompressedWeight, lambda _: dense, (args, kwargs))
        return func(*own[0], **own[1])  # type: ignore[no-any-return]

    return weight._decoded(weight.parts[0], multiply, ahead=ahead)


def _any(*tensors: Any) -> bool:
    return any(isinstance(tensor, CompressedWeight) for tensor in tensors)


def _embedding_of(func: Any, weight: Any, ids: Any, *_: Any, **__: Any) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or weight.dim() != 2:
        return NotImplemented
    return weight._look_up(ids)


def _index_of(func: Any, weight: Any, indices: Any) -> Any:
    """w[ids]: rows of a matrix, matrices of experts."""
    if not isinstance(weight, CompressedWeight) or not weight.looks_up_rows or len(indices) != 1:
        return NotImplemented
    ids, count = indices[0], weight.stored[0]
    if ids.dtype not in (torch.int32, torch.int64) or (weight.flipped and weight.dim() == 2):
        return NotImplemented
    ids = torch.where(ids < 0, ids + count, ids)
    if weight.dim() == 2:
        return weight._look_up(ids)
    out = weight.stored[1]
    matrices = weight._look_up(ids[..., None] * out + torch.arange(out, device=ids.device))
    return matrices.mT if weight.flipped else matrices


def _transpose_of(func: Any, weight: Any, first: int = 0, second: int = 1) -> Any:
    dims = weight.dim()
    if {first % dims, second % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    return weight._transposed()


def _permute_of(func: Any, weight: Any, order: Sequence[int]) -> Any:
    dims = weight.dim()
    if [i % dims for i in order] != [*range(dims - 2), dims - 1, dims - 2]:
        return NotImplemented
    return weight._transposed()


def _select_of(func: Any, weight: Any, dim: int, index: int) -> Any:
    return weight.expert(index) if weight.dim() == 3 and dim % 3 == 0 else NotImplemented


def _unbind_of(func: Any, weight: Any, dim: int = 0) -> Any:
    if weight.dim() != 3 or dim % 3:
        return NotImplemented
    return [weight.expert(i) for i in range(weight.shape[0])]


def _same(func: Any, weight: Any) -> Any:
    return weight._again(weight.stored, weight.flipped, slice(0, weight._rows))


def _clone_of(func: Any, weight: Any, *, memory_format: Any = None) -> Any:
    if weight.flipped and memory_format is torch.contiguous_format:
        return NotImplemented
    return weight._elsewhere(torch.clone)


def _to_copy_of(
    func: Any, weight: Any, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> Any:
    device = weight.device if device is None else torch.device(device)
    if dtype not in (None, weight.dtype) or device.type == "meta":
        return NotImplemented
    return weight._elsewhere(lambda t: t.to(device, non_blocking=non_blocking, copy=True))


def _new_like(func: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """New tensors that take only shape, dtype and device from a weight."""
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    if kwargs.get("device") is None:
        kwargs["device"] = weight.device
    return func(like, *args, **kwargs)


HANDLERS.update(
    {
        aten.linear.default: _linear_op,
        aten.mm.default: _mm_of,
        aten.addmm.default: _addmm_of,
        aten.mv.default: _mv_of,
        aten.embedding.default: _embedding_of,
        aten.index.Tensor: _index_of,
        aten.t.default: _transpose_of,
        aten.transpose.int: _transpose_of,
        aten.permute.default: _permute_of,
        aten.select.int: _select_of,
        aten.unbind.int: _unbind_of,
        aten.detach.default: _same,
        aten.alias.default: _same,
        aten.clone.default: _clone_of,
        aten._to_copy.default: _to_copy_of,
        aten.empty_like.default: _new_like,
        aten.zeros_like.default: _new_like,
        aten.ones_like.default: _new_like,
        aten.full_like.default: _new_like,
        aten.rand_like.default: _new_like,
        aten.randn_like.default: _new_like,
        aten.new_empty.default: _new_like,
        aten.new_zeros.default: _new_like,
        aten.new_ones.default: _new_like,
        aten.new_full.default: _new_like,
        aten.new_empty_strided.default: _new_like,
    }
)
