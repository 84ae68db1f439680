"""Ternary weights in the form that products take: two bits a weight, in tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuzip.kernels.quantizers import Ternary, pack_ternary, unpack_ternary

TILE = 16
"""Rows of a tile, and words of each row in a K block."""

BLOCK_K = 16 * TILE
"""Columns of a K block: with the 16 rows of a tile, 1 KiB of consecutive words."""

MOST_COLUMNS = 1 << 16
"""Most columns of weights: a kernel holds a whole token in its registers."""


@dataclass(frozen=True, eq=False)
class TernaryWeight:
    """Weights [out, in] of -1, 0 and 1 times a scale, ready to be multiplied.

    words  int32 [tiles, K blocks, 16, 16]: words[t, s, r] are words 16 s to 16 s + 15 of `pack_ternary` of
           row 16 t + r. Rows and columns of padding are zero weights
    scale  fp32, [] for the whole tensor, else [out, groups]: [out, 1] is one a row. A weight is code * scale
    group  columns that share a scale, or None
    shape  (out, in)
    """

    words: Tensor
    scale: Tensor
    group: int | None
    shape: tuple[int, int]

    @classmethod
    def of(cls, ternary: Ternary, device: torch.device | str | None = None) -> TernaryWeight:
        """Weights from their codes and scales, on `device` if it is not None.

        Raises ValueError for other than two axes and for more than 65,536 columns.
        """
        if ternary.codes.dim() != 2:
            raise ValueError(f"ternary weights to multiply with have 2 axes, not {ternary.codes.dim()}")
        if ternary.codes.shape[1] > MOST_COLUMNS:
            raise ValueError(
                f"rows of ternary weights to multiply with have at most {MOST_COLUMNS} columns, "
                f"not {ternary.codes.shape[1]}"
            )
        codes = ternary.codes if device is None else ternary.codes.to(device)
        out, columns = codes.shape
        padded = codes.new_zeros(TILE * tiles_of(out), BLOCK_K * k_blocks_of(columns))
        padded[:out, :columns] = codes
        words = pack_ternary(padded).view(tiles_of(out), TILE, k_blocks_of(columns), TILE)
        words = words.transpose(1, 2).contiguous()
        return cls(words, ternary.scale, ternary.group, (out, columns)).to(words.device)

    def ternary(self) -> Ternary:
        """The codes and scales that `of` packed. Raises ValueError for words that `of` does not write."""
        return Ternary(self.codes(), self.scale, self.group)

    def codes(self) -> Tensor:
        """The codes, int8 [out, in]. Raises ValueError for words that `of` does not write."""
        out, columns = self.shape
        tiles, k_blocks = self.words.shape[:2]
        rows = self.words.transpose(1, 2).reshape(TILE * tiles, TILE * k_blocks)
        codes = unpack_ternary(rows, BLOCK_K * k_blocks)
        if bool((codes[out:] != 0).any()) or bool((codes[:, columns:] != 0).any()):
            raise ValueError("the words of ternary weights are not filled up with zeros")
        return codes[:out, :columns]

    def to(self, device: torch.device | str) -> TernaryWeight:
        """A copy on a device. On a GPU this waits until all work of the current stream has ended.

        Kernels read weights before their predecessor in the stream has ended, so words must be complete
        earlier.
        """
        weight = replace(self, words=self.words.to(device), scale=self.scale.to(device))
        if weight.words.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()
        return weight

    @property
    def device(self) -> torch.device:
        """The device of the arrays."""
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return self.words.nbytes + self.scale.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory for each weight; 0 for a tensor without weights."""
        numel = self.shape[0] * self.shape[1]
        return 8 * self.nbytes / numel if numel else 0.0

    @property
    def grouped(self) -> bool:
        """Whether a row has more than one scale."""
        return self.scale.dim() == 2 and self.scale.shape[1] > 1


def tiles_of(out: int) -> int:
    """Tiles of 16 rows for `out` rows."""
    return -(-out // TILE)


def k_blocks_of(columns: int) -> int:
    """K blocks of 256 columns for `columns` columns."""
    return -(-columns // BLOCK_K)
