"""What kernels are told of `Heads`: words of planes, strides of what may be missing, how scales lie."""

from __future__ import annotations

from torch import Tensor

from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.quantizers import plane_widths, words


def plane_counts(heads: Heads) -> tuple[int, ...]:
    """Words of each plane of a token's codes."""
    return tuple(words(heads.width, width) for width in plane_widths(heads.bits))


def scales_are_together(heads: Heads) -> bool:
    """Whether the scales of a head's tokens lie side by side, those of a token first."""
    return heads.scale.stride()[2:] == (heads.scale.shape[3], 1)


def first_bit_strides(heads: Heads) -> tuple[int, ...]:
    """Strides of texts and heads of `first_bits`, or zeros where there are none."""
    return (0, 0) if heads.first_bits is None else heads.first_bits.stride()[:2]


def whole_strides(heads: Heads) -> tuple[int, ...]:
    """Strides of texts, heads and tokens of those that are kept whole, or zeros where there are none."""
    return (0, 0, 0) if heads.first is None else heads.first.stride()[:3]


def center_strides(heads: Heads) -> tuple[int, ...]:
    """Strides of texts and heads of the center, or zeros where there is none."""
    return (0, 0) if heads.center is None else heads.center.stride()[:2]


def path_arrays(heads: Heads) -> tuple[Tensor | None, Tensor | None]:
    """The center and the table of its angles; None where there is none."""
    return heads.center, None if heads.path is None else heads.path.table


def last_block(heads: Heads) -> int:
    """The number of the last block of tokens in the table of angles."""
    return 0 if heads.path is None else len(heads.path.table) - 1


def path_constants(heads: Heads) -> tuple[int, int, int, int]:
    """Tokens of a block with a center of its own, and which channels turn: the first, the number of pairs,
    and how far the two of a pair lie apart.
    """
    path = heads.path
    return (1, 0, 0, 1) if path is None else (path.block, path.begin, path.pairs, path.apart)
