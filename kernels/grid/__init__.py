"""Uniform grids: weights as whole numbers times a step, with a factor a row and a factor a column.

    Grid           the step and the factors of a tensor: weights to codes, codes to weights
    factors        factor bytes to the numbers that they stand for
    factor_bytes   numbers to the nearest factor bytes
    Spread         factors of rows and columns by the spread of their weights

Plain torch, on the CPU and on a GPU with the same bits. SPEC.md, section "Quantized weights", has the rules.
"""

from .reference import MAX_CODE, MIN_CODE, ONE, Grid, OutOfRange, factor_bytes, factors
from .spread import Spread

__all__ = ["MAX_CODE", "MIN_CODE", "ONE", "Grid", "OutOfRange", "Spread", "factor_bytes", "factors"]
