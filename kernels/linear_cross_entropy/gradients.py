"""The cross-entropy of a linear head, with gradients: `linear_cross_entropy` and its operators.

Neither the forward nor the backward pass has all logits in memory. On a GPU Triton computes them tile by tile
(triton/forward.py, triton/backward.py); on a CPU torch does, block by block, in fp32, or in fp64 for fp64
inputs, and then gradients are exact, whatever `filter_eps` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.kernels.linear_cross_entropy.ops import WORKSPACE
from neuzip.kernels.packed_linear import ops as packed_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor

from .head import DTYPES, Head

ROWS = 2048
"""Tokens of a block of logits on a CPU."""

LOGITS = 16 << 20
"""Logits of a block on a CPU, at most: 64 MB in fp32."""


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | PackedTensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    sort_vocabulary: bool = False,
    drop_ignored: bool = False,
    workspace: int = WORKSPACE,
) -> Tensor | tuple[Tensor, Tensor]:
    """F.cross_entropy(input @ linear_weight.T + linear_bias, target), without the logits in memory.

    input          [..., T, D], bf16, fp16 or fp32; on a CPU also fp64
    linear_weight  [V, D], of the same dtype; or packed, and then without gradients
    target         [..., T], int64 or int32
    softcap        logits z become softcap * tanh(z / softcap)
    reduction      "mean" over the tokens that count (NaN if none does, as in torch), "sum" or "none"
    shift          target t + shift belongs to input t: the last inputs have none; True is 1
    return_lse     also the log-sum-exp of each token, [..., T - shift], through which gradients flow too
    filter_eps     tiles of logits in which |softmax - onehot| is nowhere so large add nothing to gradients.
                   "auto" is a 32nd of the dtype's resolution: 2**-12 for bf16, 2**-15 for fp16. None: exact.
                   On a head whose softmax is spread out most tiles stay, and None is then the faster one.
                   Give None to train from random weights: all probabilities are near 1 / V at first, which
                   is below 2**-12 for more than 4,096 tokens
    sort_vocabulary  put the vocabulary in the order of mean logits first, so that fewer tiles are left; this
                   takes time of its own
    drop_ignored   copy the tokens that count first, so that the forward pass multiplies no others. This waits
                   for the GPU, to learn how many they are, and takes memory for the copy (Wijmans et al.
                   2024, Table A1). The log-sum-exp of a token that is ignored is then 0
    workspace      bytes on a GPU beside inputs and gradients; more if N and D need it (see `gradients`)

    Loss and log-sum-exp are fp32 (fp64 for fp64), [..., T - shift] for "none", and 0 where ignored. The same
    inputs give the same bits. Raises TypeError, ValueError and, on a CPU, IndexError for a target outside
    the vocabulary; on a GPU its loss is NaN.
    """
    shift = int(shift)
    input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    _check(input, linear_weight, linear_bias, target, reduction, shift, softcap)
    tokens = target.shape[-1] if target.dim() else 1
    if shift:
        moved = torch.full_like(target, ignore_index)
        moved[..., : tokens - shift] = target[..., shift:]
        target = moved
    flat = target.reshape(-1)
    hidden, counted = input.reshape(flat.shape[0], input.shape[-1]), flat
    places = (flat != ignore_index).nonzero()[:, 0] if drop_ignored else None
    if places is not None:
        hidden, counted = hidden.index_select(0, places), flat.index_select(0, places)
    tracked = [one for one in (input, linear_weight, linear_bias) if isinstance(one, Tensor)]
    nll, lse, _, _ = torch.ops.neuzip.linear_cross_entropy(
        hidden, *_weight_arguments(linear_weight), linear_bias, counted, ignore_index, softcap,
        _filter(filter_eps, input.dtype), sort_vocabulary,
        torch.is_grad_enabled() and any(one.requires_grad for one in tracked), return_lse, workspace,
    )  # fmt: skip
    if places is not None:
        nll, lse = (torch.zeros_like(flat, dtype=x.dtype).index_copy(0, places, x) for x in (nll, lse))
    nll, lse = nll.view(target.shape), lse.view(target.shape)
    if shift:
        nll, lse = nll[..., : tokens - shift], lse[..., : tokens - shift]
    if reduction != "none":
        nll = nll.sum()
    if reduction == "mean":
        nll = nll / (flat != ignore_index).sum()
    return (nll, lse) if return_lse else nll


def _autocast(
    x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | PackedTensor, Tensor | None]:
    """Under autocast the dtype that a linear layer would have, or that of packed weights."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    packed = isinstance(weight, PackedTensor)
    dtype = weight.dtype if packed else torch.get_autocast_dtype(x.device.type)
    if isinstance(weight, Tensor):
        weight = weight.to(dtype)
    return x.to(dtype), weight, None if bias is None else bias.to(dtype)


def _check(
    x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None, target: Tensor,
    reduction: str, shift: int, softcap: float | None,
) -> None:  # fmt: skip
    dtypes = (*DTYPES, *([] if x.is_cuda else [torch.float64]))
    if x.dtype not in dtypes or weight.dtype != x.dtype:
        raise TypeError(
            f"input and weights are both one of {dtypes}, not {x.dtype} and {weight.dtype}; cast them first"
        )
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"the bias is {bias.dtype}; it has to be {x.dtype} or torch.float32")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets are int64 or int32, not {target.dtype}")
    if x.dim() == 0 or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"input is [..., D] and weights are [V, D], not {(*x.shape,)} and {(*weight.shape,)}"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(f"targets are {(*target.shape,)}, for an input of {(*x.shape,)}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"the bias has shape {(*bias.shape,)}, for {weight.shape[0]} rows of weights")
    for name, one in (("weights", weight), ("bias", bias), ("targets", target)):
        if one is not None and one.device != x.device:
            raise ValueError(f"the {name} are on {one.device}, the input is on {x.device}")
    if x.device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"the input is on a CUDA device or on the CPU, not on {x.device}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is {reduction!r}; it has to be "mean", "sum" or "none"')
    if shift < 0 or (shift and (target.dim() == 0 or shift > target.shape[-1])):
        raise ValueError(f"shift is {shift}, for targets {(*target.shape,)}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it has to be above 0, or None")


def _filter(filter_eps: float | str | None, dtype: torch.dtype) -> float | None:
    if filter_eps == "auto":
        return torch.finfo(dtype).eps / 32
    if filter_eps is None or (not isinstance(filter_eps, str) and 0 < filter_eps < 1):
        return filter_eps
    raise ValueError(f'filter_eps is {filter_eps!r}; it has to be "auto", None or between 0 and 1')


# The operators. A matrix of weights is one argument; packed ones are that of words, more arrays, and numbers.

_HEAD = (
    "Tensor hidden, Tensor weight, Tensor[] others, SymInt[] packed, Tensor? bias, "
    "Tensor target, SymInt ignore_index, float? softcap"
)
_N_HEAD = 8


@dataclass(frozen=True, eq=False)
class _Loss:
    """The arguments that both operators take, [N, D], [V, D], [V] and [N]."""

    hidden: Tensor
    weight: Tensor | PackedTensor
    bias: Tensor | None
    target: Tensor
    ignore_index: int
    softcap: float | None

    @classmethod
    def of(cls, hidden, weight, others, packed, bias, *rest) -> _Loss:  # type: ignore[no-untyped-def]
        """From the arguments of an operator."""
        if packed:
            columns, *numbers = packed
            weight = PackedTensor.of_arguments(weight, *others, columns, hidden.dtype, *numbers)
        return cls(hidden, weight, bias, *rest)

    @property
    def ignored(self) -> Tensor:
        """Bool [N]."""
        return self.target == self.ignore_index


def _weight_arguments(weight: Tensor | PackedTensor) -> tuple[Tensor, list[Tensor], list[int]]:
    """Weights as the operators take them."""
    if isinstance(weight, Tensor):
        return weight, [], []
    words, *others = weight.arrays
    return words, others, [weight.shape[1], weight.low_bits, weight.base, weight.shift]


@torch.library.custom_op(
    "neuzip::linear_cross_entropy",
    mutates_args=(),
    schema=f"({_HEAD}, float? filter_eps, bool sort, bool tracked, bool all_lse, SymInt workspace) "
    "-> (Tensor nll, Tensor lse, Tensor flags, Tensor order)",
)
def _forward(*arguments):  # type: ignore[no-untyped-def]
    loss = _Loss.of(*arguments[:_N_HEAD])
    filter_eps, sort, tracked, all_lse, workspace = arguments[_N_HEAD:]
    with torch.autocast(loss.hidden.device.type, enabled=False):
        if _on_gpu(loss.hidden):
            return _forward_on_gpu(loss, filter_eps if tracked else None, sort, all_lse, workspace)
        return *_forward_on_cpu(loss), *_nothing_kept(loss.hidden)


@_forward.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    loss = _Loss.of(*arguments[:_N_HEAD])
    filter_eps, sort, tracked, _, _ = arguments[_N_HEAD:]
    hidden, n, v = loss.hidden, loss.hidden.shape[0], loss.weight.shape[0]
    flags, order = _nothing_kept(hidden)
    if _on_gpu(hidden) and tracked and filter_eps is not None:
        from neuzip.kernels.linear_cross_entropy.triton.candidates import tiles

        flags = flags.new_empty(tiles(n, v))
        order = order.new_empty(v if sort else 0)
    return *(hidden.new_empty(n, dtype=_accumulated(hidden)) for _ in range(2)), flags, order


def _on_gpu(hidden: Tensor) -> bool:
    """Whether Triton does the work."""
    return hidden.is_cuda


def _nothing_kept(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """In place of flags of tiles and of the vocabulary's order, where there are none."""
    return hidden.new_empty((0, 0), dtype=torch.int8), hidden.new_empty(0, dtype=torch.int64)


def _accumulated(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


@torch.library.custom_op(
    "neuzip::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor grad_nll, Tensor? grad_lse, Tensor lse, Tensor flags, Tensor order, "
    "bool for_hidden, bool for_weight, bool for_bias, SymInt workspace) -> (Tensor, Tensor, Tensor)",
)
def _backward(*arguments):  # type: ignore[no-untyped-def]
    loss = _Loss.of(*arguments[:_N_HEAD])
    grad_nll, grad_lse, lse, flags, order, *wanted, workspace = arguments[_N_HEAD:]
    with torch.autocast(loss.hidden.device.type, enabled=False):
        if _on_gpu(loss.hidden):
            grads = _backward_on_gpu(loss, grad_nll, grad_lse, lse, flags, order, tuple(wanted), workspace)
        else:
            grads = _backward_on_cpu(loss, grad_nll, grad_lse, lse, tuple(wanted))
    return tuple(loss.hidden.new_empty(0) if grad is None else grad for grad in grads)


@_backward.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    hidden, weight, bias = arguments[0], arguments[1], arguments[4]
    wanted = arguments[-4:-1]
    inputs = zip((hidden, weight, bias), wanted, strict=True)
    return tuple(
        one.new_empty(one.shape) if want and one is not None else hidden.new_empty(0) for one, want in inputs
    )


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    hidden, weight, others, packed, bias, target, ignore_index, softcap = inputs[:_N_HEAD]
    _, lse, flags, order = output
    ctx.mark_non_differentiable(flags, order)
    ctx.save_for_backward(hidden, weight, bias, target, lse, flags, order, *others)
    ctx.packed, ctx.ignore_index, ctx.softcap = packed, ignore_index, softcap
    ctx.all_lse, ctx.workspace = inputs[-2:]


def _gradients(ctx, grad_nll, grad_lse, *_):  # type: ignore[no-untyped-def]
    hidden, weight, bias, target, lse, flags, order, *others = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4]
    grads = torch.ops.neuzip.linear_cross_entropy_backward(
        hidden, weight, others, ctx.packed, bias, target, ctx.ignore_index, ctx.softcap,
        grad_nll, grad_lse if ctx.all_lse else None, lse, flags, order, *wanted, ctx.workspace,
    )  # fmt: skip
    for_hidden, for_weight, for_bias = (
        grad if want else None for grad, want in zip(grads, wanted, strict=True)
    )
    # Autograd wants lists in the place of lists of tensors, to which it counts empty ones.
    lists = [None] * len(others), None if ctx.packed else [None] * 0
    return for_hidden, for_weight, *lists, for_bias, *[None] * (_N_HEAD - 5 + 5)


_forward.register_autograd(_gradients, setup_context=_keep)


# On a GPU.


def _forward_on_gpu(
    loss: _Loss, filter_eps: float | None, sort: bool, all_lse: bool, workspace: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Negative log-likelihood, 0 where ignored, and log-sum-exp, [N]; for a filter candidates and order.

    Tokens that are ignored make no candidates, but where gradients flow through `all_lse`.
    """
    from neuzip.kernels.linear_cross_entropy.triton import forward as triton_forward
    from neuzip.kernels.linear_cross_entropy.triton.candidates import candidates
    from neuzip.kernels.linear_cross_entropy.triton.vocabulary import mean_logit_order

    flags, order = _nothing_kept(loss.hidden)
    ignored = loss.ignored
    if filter_eps is not None and sort:
        order = mean_logit_order(loss.hidden, loss.weight, loss.bias)
        lse, logit, flags = _forward_in_order(loss, order, filter_eps, all_lse, workspace)
        return (lse - logit).masked_fill(ignored, 0.0), lse, flags, order
    head = Head(loss.hidden, loss.weight, loss.bias, loss.softcap)
    width = triton_forward.tile_columns(head)
    if filter_eps is not None:
        workspace = max(0, workspace - 2 * head.tokens * -(-head.vocabulary // width))
    lse, logit, maxima = triton_forward.forward(
        head, loss.target, ignore_index=loss.ignore_index, workspace=workspace,
        tile_maxima=filter_eps is not None,
    )  # fmt: skip
    if filter_eps is not None and maxima is not None:
        flags = candidates(
            maxima, width, lse, loss.target.int(), head.vocabulary, filter_eps, None if all_lse else ignored
        )  # fmt: skip
    return (lse - logit).masked_fill(ignored, 0.0), lse, flags, order


def _forward_in_order(
    loss: _Loss, order: Tensor, filter_eps: float, all_lse: bool, workspace: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, the targets' logits and candidates: weights are put in their order part by part."""
    from neuzip.kernels.linear_cross_entropy.triton import forward as triton_forward
    from neuzip.kernels.linear_cross_entropy.triton.candidates import candidates
    from neuzip.kernels.linear_cross_entropy.triton.vocabulary import Vocabulary

    vocabulary = Vocabulary(loss.weight, loss.bias, order)
    position = vocabulary.positions(loss.target)
    n, segment = loss.hidden.shape[0], vocabulary.segment * loss.hidden.shape[1] * loss.hidden.element_size()
    lse, logit = (
        torch.full((n,), value, device=loss.hidden.device) for value in (-torch.inf, torch.nan)
    )  # fmt: skip
    segments = []
    for start, weight, bias in vocabulary.segments():
        head = Head(loss.hidden, weight, bias, loss.softcap)
        own = position - start
        inside = (own >= 0) & (own < head.vocabulary) & ~loss.ignored
        width = triton_forward.tile_columns(head)
        maxima_bytes = 2 * n * -(-vocabulary.size // width)
        its_lse, chosen, maxima = triton_forward.forward(
            head, own.masked_fill(~inside, -1), ignore_index=-1, tile_maxima=True,
            workspace=max(0, workspace - segment - maxima_bytes),
        )  # fmt: skip
        assert maxima is not None
        impossible = (maxima == -torch.inf).all(0)  # all of this segment, not all of the vocabulary
        lse = torch.logaddexp(lse, its_lse.masked_fill(impossible, -torch.inf))
        logit = torch.where(inside, chosen, logit)
        segments.append((maxima, width, own, head.vocabulary))
    lse = lse.masked_fill(lse.isinf(), torch.nan)
    ignored = None if all_lse else loss.ignored
    flags = [
        candidates(maxima, width, lse, own, rows, filter_eps, ignored)
        for maxima, width, own, rows in segments
    ]
    return lse, logit, torch.cat(flags)


def _backward_on_gpu(
    loss: _Loss, grad_nll: Tensor, grad_lse: Tensor | None, lse: Tensor, flags: Tensor, order: Tensor,
    wanted: tuple[bool, bool, bool], workspace: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of hidden states, weights and bias that are `wanted`."""
    from neuzip.kernels.linear_cross_entropy.triton import backward as triton_backward
    from neuzip.kernels.linear_cross_entropy.triton.vocabulary import Vocabulary

    vocabulary = Vocabulary(loss.weight, loss.bias, order if order.numel() else None)
    tokens = triton_backward.TokenGradients.of(
        lse, loss.target, loss.ignored, vocabulary, grad_nll, grad_lse, loss.hidden.dtype
    )
    grads = triton_backward.gradients(
        loss.hidden, vocabulary, tokens, flags if flags.numel() else None,
        softcap=loss.softcap, wanted=wanted, workspace=workspace,
    )  # fmt: skip
    return grads.hidden, grads.weight, grads.bias


# On a CPU.


def _forward_on_cpu(loss: _Loss) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood, 0 where ignored, and log-sum-exp, [N]."""
    n, ignored = loss.hidden.shape[0], loss.ignored
    target = loss.target.masked_fill(ignored, 0).long()
    if n and not 0 <= int(target.min()) <= int(target.max()) < loss.weight.shape[0]:
        raise IndexError(
            f"targets go from {int(target.min())} to {int(target.max())}, "
            f"in a vocabulary of {loss.weight.shape[0]}"
        )
    lse, chosen = torch.full((2, n), -torch.inf, dtype=_accumulated(loss.hidden))
    for block in _blocks(loss):
        z = block.logits(loss)
        lse[block.rows] = torch.logaddexp(lse[block.rows], z.logsumexp(1))
        at = target[block.rows] - block.columns.start
        inside = (at >= 0) & (at < z.shape[1])
        own = z.gather(1, at.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        chosen[block.rows] = torch.where(inside, own, chosen[block.rows])
    lse = lse.masked_fill(lse.isinf(), torch.nan)  # as on a GPU: no logit may be plus infinity, one be finite
    return (lse - chosen).masked_fill(ignored, 0.0), lse


def _backward_on_cpu(
    loss: _Loss, grad_nll: Tensor, grad_lse: Tensor | None, lse: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden states, weights and bias that are `wanted`."""
    dtype, ignored = _accumulated(loss.hidden), loss.ignored
    on_target = grad_nll.to(dtype).masked_fill(ignored, 0.0)
    on_softmax = on_target if grad_lse is None else on_target + grad_lse.to(dtype)
    inputs = loss.hidden, loss.weight, loss.bias
    for_hidden, for_weight, for_bias = (
        torch.zeros(one.shape, dtype=dtype) if want and one is not None else None
        for one, want in zip(inputs, wanted, strict=True)
    )
    for block in _blocks(loss):
        rows, columns = block.rows, block.columns
        z = block.logits(loss)
        slope = None if loss.softcap is None else 1 - (z / loss.softcap) ** 2
        dz = z.sub_(lse[rows, None]).exp_().mul_(on_softmax[rows, None])
        at = loss.target[rows].long() - columns.start
        inside = (at >= 0) & (at < dz.shape[1])
        subtracted = torch.where(inside, on_target[rows], 0.0)
        dz.scatter_add_(1, at.clamp(0, dz.shape[1] - 1)[:, None], -subtracted[:, None])
        if slope is not None:
            dz *= slope
        dz.masked_fill_(((on_softmax == 0) & (on_target == 0))[rows, None], 0.0)
        if for_hidden is not None:
            for_hidden[rows].addmm_(dz, block.weight)
        if for_weight is not None:
            for_weight[columns].addmm_(dz.T, block.hidden)
        if for_bias is not None:
            for_bias[columns] += dz.sum(0)
    grads = zip((for_hidden, for_weight, for_bias), inputs, strict=True)
    first, second, third = (
        None if grad is None or one is None else grad.to(one.dtype) for grad, one in grads
    )
    return first, second, third


@dataclass(frozen=True, eq=False)
class _Block:
    """Some tokens and some of the vocabulary, in the dtype that is computed in."""

    rows: slice
    columns: slice
    hidden: Tensor
    weight: Tensor

    def logits(self, loss: _Loss) -> Tensor:
        """[rows, columns]."""
        z = self.hidden @ self.weight.T
        if loss.bias is not None:
            z += loss.bias[self.columns]
        return z if loss.softcap is None else z.div_(loss.softcap).tanh_().mul_(loss.softcap)


def _blocks(loss: _Loss) -> Iterator[_Block]:
    """All logits in blocks; weights are decoded and cast once."""
    n, v, dtype = loss.hidden.shape[0], loss.weight.shape[0], _accumulated(loss.hidden)
    hidden = loss.hidden.to(dtype)
    step = max(1, LOGITS // max(1, min(n, ROWS)))
    for first in range(0, v, step):
        columns = slice(first, min(first + step, v))
        if isinstance(loss.weight, PackedTensor):
            weight = packed_linear.decode(loss.weight, columns).to(dtype)
        else:
            weight = loss.weight[columns].to(dtype)
        for top in range(0, n, ROWS):
            rows = slice(top, min(top + ROWS, n))
            yield _Block(rows, columns, hidden[rows], weight)
