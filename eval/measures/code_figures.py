"""The codes of a quantized tensor of a container: their bits, their step, and their entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from neuzip.compress.pieces import pieces
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.eval.measures.entropies import Histogram, entropy
from neuzip.formats.records import QuantizedRecord

if TYPE_CHECKING:
    from neuzip.compress.schemes.quantized_coding import QuantizedDecoder

EVERY_CODE = 1 << 16
"""Codes that 16 bits hold, from -32768 on."""


@dataclass(frozen=True)
class CodeFigures:
    """The codes of a tensor.

    `code_bits` is what the largest code needs. `entropy` is what an ideal entropy coder needs for a code, and
    `stored_bits` what the tensor takes in the file, factors included, both in bits a weight. `step` is
    without the factors of rows and columns.
    """

    code_bits: int
    step: float
    row_factors: bool
    column_factors: bool
    entropy: float
    stored_bits: float


def code_figures(source: FolderSource, tensor: SourceTensor, workers: Workers) -> CodeFigures | None:
    """Decode and count the codes of a tensor; None if it is not quantized. Raises FormatError."""
    record = tensor.record
    if not isinstance(record, QuantizedRecord):
        return None
    decoder: QuantizedDecoder = source.decoder(tensor)  # type: ignore[assignment]

    def count(piece: tuple[int, int]) -> Histogram:
        codes = decoder.codes(*piece).astype(np.int64)
        return np.bincount(codes + EVERY_CODE // 2, minlength=EVERY_CODE)

    counts = sum(workers.map(count, pieces(tensor.info.numel)), np.zeros(EVERY_CODE, np.int64))
    return CodeFigures(
        record.code_bits,
        decoder.grid.step,
        bool(record.row_factors),
        bool(record.column_factors),
        entropy(counts),
        8 * source.stored_bytes(tensor) / tensor.info.numel,
    )
