"""Ternary weights for what comes in: codes and scales that keep products with typical inputs, not weights."""

from __future__ import annotations

import torch
from torch import Tensor

from . import magnitudes
from .ternary import Ternary, best_scale

DAMPING = 0.01
"""Share of the mean of the diagonal that is added to it: X^T X of inputs never seen is singular."""

BLOCK = 128
"""Columns whose errors are spread over all later ones at once."""


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
    damped = _damped(gram.double()[order][:, order])
    scale = best_scale(weight.reshape(1, -1)).double()[0] if group is None else None
    codes = _round_columns(target, _spread(damped), width, scale)
    if group is None:
        scale = _shared_scale(target, damped, codes)
        signs = scale.sign().expand_as(codes)
    else:
        scale = _scales(target, damped, codes, width)
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


def _damped(gram: Tensor) -> Tensor:
    """X^T X of the inputs, damped so that it can be inverted."""
    mean = gram.diagonal().mean() if gram.numel() else gram.sum()
    return gram + (DAMPING * mean + torch.finfo(gram.dtype).tiny) * torch.eye(
        len(gram), dtype=gram.dtype, device=gram.device
    )


def _spread(damped: Tensor) -> Tensor:
    """How errors are spread: that of column j by row j of the upper Cholesky factor of the inverse."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    spread: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return spread


def _round_columns(target: Tensor, spread: Tensor, width: int, scale: Tensor | None) -> Tensor:
    """Codes of fp64 weights [out, in], the errors of each column spread over those after it."""
    w = target.T.contiguous()  # a column is a row here
    columns = len(w)
    codes = torch.zeros_like(w)
    of_group = scale
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.zeros_like(w[start:stop])
        for j in range(start, stop):
            if scale is None and j % width == 0:
                # Errors of this block have not reached the columns after it yet.
                group = w[j : j + width].clone()
                group[stop - j :] -= spread[start:stop, stop : j + width].T @ errors
                of_group = best_scale(group.T.float()).double()[:, 0]
            assert of_group is not None
            codes[j] = w[j].sign() * (w[j].abs() > of_group / 2)
            errors[j - start] = (w[j] - of_group * codes[j]) / spread[j, j]
            w[j:stop] -= torch.outer(spread[j, j:stop], errors[j - start])
        w[stop:] -= spread[start:stop, stop:].T @ errors
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
