"""Ternary weights for what comes in: codes and scales that keep products with typical inputs, not weights."""

from __future__ import annotations

import torch
from torch import Tensor

from . import magnitudes
from .feedback import Ahead, damped, feed_back, spread
from .ternary import Ternary, best_scale


def error_feedback(weight: Tensor, gram: Tensor, *, group: int | None = None) -> Ternary:
    """Ternary weights [out, in] whose products with inputs X are near to the weights' own.

    gram    [in, in], X^T X of the inputs
    group   weights of a row that share a scale, or None: one for the tensor

    Columns are rounded one after the other, each to the nearest of -s, 0 and s, and what that changes in the
    products is compensated by later columns, as well as they can: GPTQ (arXiv 2210.17323). With a scale
    a row or for the tensor columns come in the order of their inputs' energy. A group's scale is at first
    that of `least_squares` for what its columns are by then. In the end all scales are chosen once more, by
    least squares in the products, for the final codes; where one is below 0 its codes change signs.

    fp64. Raises ValueError for shapes that do not go together, and for what is not finite.
    """
    _check(weight, gram)
    columns = weight.shape[1]
    width = columns if group is None else group
    order = torch.arange(columns, device=weight.device)
    if width >= columns:
        order = gram.diagonal().argsort(descending=True, stable=True)
    target = weight.double()[:, order]
    energy = damped(gram.double()[order][:, order])
    scale = best_scale(weight.reshape(1, -1)).double()[0] if group is None else None
    codes = _round_columns(target, spread(energy), width, scale)
    if group is None:
        scale = _shared_scale(target, energy, codes)
        signs = scale.sign().expand_as(codes)
    else:
        scale = _scales(target, energy, codes, width)
        signs = scale.sign().repeat_interleave(width, 1)[:, :columns]
    signed = torch.empty_like(codes, dtype=torch.int8)
    signed[:, order] = (codes * signs).to(torch.int8)
    return Ternary(signed, scale.abs().float(), group)


def _check(weight: Tensor, gram: Tensor) -> None:
    magnitudes.check_floats(weight)
    if weight.dim() != 2 or gram.shape != (weight.shape[1], weight.shape[1]):
        raise ValueError(
            f"weights are [out, in] and the inputs' products [in, in], not {tuple(weight.shape)} and "
            f"{tuple(gram.shape)}"
        )
    if not bool(weight.isfinite().all()) or not bool(gram.isfinite().all()):
        raise ValueError("the weights or their inputs hold NaN or infinity")


def _round_columns(target: Tensor, spread: Tensor, width: int, scale: Tensor | None) -> Tensor:
    """Codes of fp64 weights [out, in], the errors of each column spread over those after it."""
    codes = torch.zeros_like(target.T, memory_format=torch.contiguous_format)
    of_group = scale

    def quantize(j: int, column: Tensor, ahead: Ahead) -> Tensor:
        nonlocal of_group
        if scale is None and j % width == 0:
            of_group = best_scale(ahead(width).T.float()).double()[:, 0]
        assert of_group is not None
        codes[j] = column.sign() * (column.abs() > of_group / 2)
        return of_group * codes[j]

    feed_back(target.T.contiguous(), spread, quantize)
    return codes.T


def _shared_scale(target: Tensor, gram: Tensor, codes: Tensor) -> Tensor:
    """The scale [] with which codes come nearest to the weights in the products; 0 for codes of 0."""
    energy = (codes @ gram * codes).sum()
    return torch.where(energy > 0, (target @ gram * codes).sum() / energy, 0)


def _scales(target: Tensor, gram: Tensor, codes: Tensor, width: int) -> Tensor:
    """The scales [out, groups] with which codes come nearest to the weights in the products."""
    groups = -(-codes.shape[1] // width)
    step = max(1, (1 << 24) // groups**2)
    return torch.cat([
        _solve(t @ gram, gram, c, width, groups)
        for t, c in zip(torch.split(target, step), torch.split(codes, step), strict=True)
    ])  # fmt: skip


def _solve(wanted: Tensor, gram: Tensor, codes: Tensor, width: int, groups: int) -> Tensor:
    """Scales of each row: a linear system of the energy of its groups, and of what two of them share."""
    system = codes.new_empty(len(codes), groups, groups)
    for group in range(groups):
        part = slice(group * width, (group + 1) * width)
        system[:, group] = _sums(codes * (codes[:, part] @ gram[part]), width, groups)
    empty = system.diagonal(dim1=1, dim2=2) == 0  # a group of zeros: any scale will do
    system += torch.diag_embed(empty.double())
    scales: Tensor = torch.linalg.solve(system, _sums(codes * wanted, width, groups)[..., None])
    return scales[..., 0]


def _sums(x: Tensor, width: int, groups: int) -> Tensor:
    """The sums of groups of a row: [out, groups] of [out, in]."""
    whole = torch.nn.functional.pad(x, (0, groups * width - x.shape[1]))
    return whole.view(len(x), groups, width).sum(-1)
