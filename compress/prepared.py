"""Codes of quantized tensors that come from elsewhere: from calibration, which no rule can state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from neuzip.kernels.grid import Grid

Codes = npt.NDArray[np.int16]


class PreparedCodes(Protocol):
    """Codes and grids by the names of tensors."""

    @property
    def identity(self) -> str:
        """What the codes depend on beside the source: with another identity no earlier run is resumed."""

    def codes_of(self, name: str, /) -> tuple[Codes, Grid] | None:
        """The codes of a tensor, of its shape or flat, and their grid on the CPU; None for no codes.

        Several threads may call it at once, and more than once for a tensor. Only tensors that a rule
        quantizes are looked up; those without codes are rounded to nearest, as their rules say.
        """
