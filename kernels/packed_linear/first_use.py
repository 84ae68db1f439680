"""The check of packing, of decoding and of products at their first use on a device, against the reference.

Each takes what its caller has at hand: the first weight that is packed, decoded or multiplied with. Its first
tile, 16 rows, goes to the CPU, where the reference decodes it. So a check takes a few milliseconds and no
kernel beyond the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.device.first_use import check_first_use
from neuzip.kernels.float_fields.values import to_float64
from neuzip.kernels.packed_linear import reference
from neuzip.kernels.packed_linear.form import FEW_ESCAPES, TILE_ROWS, ExponentWindow, Packed
from neuzip.kernels.packed_linear.tensor import PackedTensor, format_of

PACKING = "packing weights"
DECODING = "decoding packed weights"
PRODUCTS = "multiplying with packed weights"

SUM_ERROR = 2.0**-16
"""The most that a product may be off, as a share of the sum of the absolute values of its terms.

The rounding of the result to its dtype comes on top: half a unit in the last place, which below the normal
numbers of a dtype is no share of the result. A GPU may also take numbers below fp32's normal ones for 0.
"""

Multiply = Callable[[torch.Tensor, PackedTensor, torch.Tensor | None], torch.Tensor | None]


def check_packing(weight: torch.Tensor, packed: PackedTensor) -> None:
    """Raise WrongResults if this is the first weight packed on its device, and its first rows differ."""
    if weight.numel():
        check_first_use(PACKING, packed.device, partial(is_same, weight, packed, 0))


def check_decoding(dense: torch.Tensor, packed: PackedTensor, start: int) -> None:
    """Raise WrongResults if `dense`, rows from `start` on, is the first that was decoded, and is wrong."""
    if dense.numel():
        check_first_use(DECODING, packed.device, partial(is_same, dense, packed, start))


def check_product(
    x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, multiply: Multiply
) -> None:
    """Raise WrongResults if this is the first product on its device, and is wrong for an x of that shape."""
    check_first_use(PRODUCTS, packed.device, partial(multiplies, x, packed, bias, multiply))


def is_same(dense: torch.Tensor, packed: PackedTensor, start: int) -> bool:
    """Whether rows from `start` on are those packed, bit for bit, as far as the tile of the first goes."""
    tile = start // TILE_ROWS
    bits = reference.decode(tile_of(packed, tile))[start - tile * TILE_ROWS :]
    rows = min(len(bits), dense.shape[0])
    there = dense[:rows].detach().cpu().view(torch.int16).numpy().view(np.uint16)
    return np.array_equal(there, bits[:rows])


def multiplies(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, multiply: Multiply) -> bool:
    """Whether the first values of a product with a known x, of the shape of `x`, are within the error bound.

    `multiply` computes products from the packed form for that shape.
    """
    columns = packed.shape[1]
    row = (torch.arange(columns) * 7919 % 12 - 5.5) / 8  # exact in both dtypes, and never 0
    y = multiply(row.to(packed.device, packed.dtype).expand(x.shape).contiguous(), packed, bias)
    assert y is not None
    tile = tile_of(packed, 0)
    bits = reference.decode(tile)
    values = y.view(-1, packed.shape[0])[[0, -1], : len(bits)].double().cpu().numpy()
    with np.errstate(invalid="ignore"):  # of weights that are infinite or no numbers
        terms = to_float64(bits.reshape(-1), tile.window.fmt).reshape(bits.shape) * row.double().numpy()
        exact = terms.sum(1)
        if bias is not None:
            exact = exact + bias[: len(exact)].double().cpu().numpy()
        bound = np.abs(terms).sum(1) * SUM_ERROR + _rounding(exact, packed.dtype)
        bound += columns * torch.finfo(torch.float32).tiny
        known = np.isfinite(exact) & (np.abs(exact) < torch.finfo(packed.dtype).max / 2)
        return bool((np.abs(values - exact) <= bound)[:, known].all())


def _rounding(exact: npt.NDArray[np.float64], dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """The most that rounding to a dtype changes each number: half the distance to the next."""
    numbers = torch.finfo(dtype)
    return np.maximum(np.abs(exact), numbers.tiny) * numbers.eps / 2


def tile_of(packed: PackedTensor, number: int) -> Packed:
    """A tile of packed weights by itself, on the CPU: up to 16 rows."""
    first = number * TILE_ROWS
    stop = min(first + TILE_ROWS, packed.shape[0])
    starts = _numbers(packed.row_start[first : stop + 1])
    far_index = _numbers(packed.far_index[number : number + 1])
    far_start, far_count = int(far_index[0, 0, 1]), _bits_set(far_index[..., 0])
    escapes = packed.escapes[int(starts[0]) : int(starts[-1])]
    far_index[..., 1] -= np.uint32(far_start)
    starts = (starts - starts[0]).astype(np.uint16 if escapes.numel() <= FEW_ESCAPES else np.int32)
    return Packed(
        (stop - first, packed.shape[1]), packed.low_bits,
        ExponentWindow(packed.base, packed.shift, format_of(packed.dtype)),
        _numbers(packed.words[number : number + 1]), far_index,
        _numbers(packed.far_words[far_start : far_start + far_count]), starts, _numbers(escapes),
    )  # fmt: skip


def _bits_set(numbers: npt.NDArray[np.unsignedinteger]) -> int:
    return int(np.unpackbits(np.ascontiguousarray(numbers).view(np.uint8)).sum())


def _numbers(array: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """A copy of an array on the CPU, as the unsigned numbers that it holds."""
    numbers = array.cpu().numpy()
    return np.array(numbers.view(f"u{numbers.itemsize}"))
