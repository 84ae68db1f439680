"""How the codes and scales of a ternary tensor are stored, and how many bytes they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from neuzip.compress.pieces import padded
from neuzip.compress.scheme import Scheme
from neuzip.formats.records import TernaryRecord

CODES_A_WORD = 16
"""Codes of a 32-bit word of the packing "2bit"."""

TRITS_A_BYTE = 5
"""Codes of a byte of the packing "trits"."""


class NoTernaryForm(Exception):
    """The tensor has none, for the reason given."""


@dataclass(frozen=True)
class TernaryLayout:
    """How the codes and scales of a tensor [..., columns] are stored.

    `group` is the number of weights of a row that share a scale, the last of a row perhaps fewer; None is
    one scale for the tensor. `packing` is "trits" or "2bit", `scale_dtype` "F32" or "F16".
    """

    shape: tuple[int, ...]
    group: int | None = None
    packing: str = "trits"
    scale_dtype: str = "F32"

    @classmethod
    def of_record(cls, shape: tuple[int, ...], record: TernaryRecord) -> TernaryLayout:
        """The layout of a stored tensor."""
        return cls(shape, record.group, record.packing, record.scale_dtype)

    @classmethod
    def of_scheme(cls, shape: tuple[int, ...], scheme: Scheme) -> TernaryLayout:
        """The layout that a scheme asks for; a group is never longer than a row. Raises NoTernaryForm."""
        if math.prod(shape) == 0 or not shape:
            raise NoTernaryForm("has no rows of weights")
        group = scheme.group
        if group is not None:
            group = max(1, min(group, shape[-1]) if isinstance(group, int) else shape[-1])
        return cls(shape, group, scheme.packing, scheme.scale_dtype)

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return self.shape[-1]

    @property
    def words_a_row(self) -> int:
        """32-bit words of a row of "2bit"."""
        return -(-self.columns // CODES_A_WORD)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales: [] or [..., groups]."""
        return () if self.group is None else (*self.shape[:-1], -(-self.columns // self.group))

    @property
    def stream_bytes(self) -> dict[str, int]:
        """Bytes of the streams, without their padding."""
        rows = math.prod(self.shape[:-1])
        trits = -(-self.numel // TRITS_A_BYTE)
        return {
            "codes": trits if self.packing == "trits" else 4 * rows * self.words_a_row,
            "scale": math.prod(self.scale_shape) * (2 if self.scale_dtype == "F16" else 4),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the streams in a container."""
        return sum(map(padded, self.stream_bytes.values()))
