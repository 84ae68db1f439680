"""Whether the loops of `cpu` run in vector registers: where that is faster, and has given the right words.

Some versions of numba compile the vector form to wrong machine code: 0.60 and 0.61 do, for AVX-512. So each
loop has to code a sample as the reference does, once a process and for each combination of array types. Where
it does not, a warning says so, and the loop runs in its scalar form, which gives the same words.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import llvmlite
import numba
import numpy as np

from neuzip.kernels.device.compiled import read_only
from neuzip.kernels.float_fields import FloatFormat

from . import cpu
from .intrinsics import SUPPORTED
from .numbers import BLOCK, HEADER_WORDS
from .sample import coded_exponents

VECTOR, SCALAR = True, None
"""What the loops of `cpu` take."""

Form = bool | None


@cache
def encodes(group: int, dtype: np.dtype[Any]) -> Form:
    """The form in which `cpu.encode` runs for exponents of a dtype."""
    if not SUPPORTED:
        return SCALAR
    sample = coded_exponents(group)
    exponents = sample.exponents.astype(dtype)
    words, index = np.empty(HEADER_WORDS + 3 * exponents.size, np.uint16), np.empty(1, np.uint16)
    used = cpu.encode(
        sample.table.keys(exponents), exponents, exponents.size, group, sample.table.symbols,
        sample.table.encoder, words, index, VECTOR,
    )  # fmt: skip
    return _form("encoder", np.array_equal(words[:used], sample.words))


@cache
def decodes(group: int, dtype: np.dtype[Any]) -> Form:
    """The form in which `cpu.decode` runs for exponents of a dtype."""
    if not SUPPORTED:
        return SCALAR
    sample = coded_exponents(group)
    decoded = np.empty(sample.exponents.size, dtype)
    bad = cpu.decode(
        read_only(sample.words), np.array([0]), np.array([sample.words.size]), decoded.size,
        8 * decoded.itemsize, group, sample.table.decoder, sample.table.exponents, sample.table.keys(decoded),
        decoded, (decoded[:0], decoded[:0]), VECTOR,
    )  # fmt: skip
    return _form("decoder", bad < 0 and np.array_equal(decoded, sample.exponents))


@cache
def decodes_floats(group: int, fmt: FloatFormat, dtype: np.dtype[Any]) -> Form:
    """The form in which `cpu.decode_floats` runs for a format, and fields of a dtype."""
    if not SUPPORTED:
        return SCALAR
    sample = coded_exponents(group)
    floats, fields = np.empty(sample.exponents.size, fmt.dtype), np.zeros(sample.exponents.size, dtype)
    block = np.empty(BLOCK, fmt.exponent_dtype)
    bad = cpu.decode_floats(
        read_only(sample.words), np.array([0]), np.array([sample.words.size]), floats.size,
        (fmt.exponent_bits, fmt.mantissa_bits), group, sample.table.decoder, sample.table.exponents,
        sample.table.keys(block), block, read_only(fields), 0, floats, VECTOR,
    )  # fmt: skip
    exponents = sample.exponents.astype(fmt.dtype) << fmt.dtype.type(fmt.mantissa_bits)
    return _form("decoder", bad < 0 and np.array_equal(floats, exponents))


def _form(loop: str, right: bool) -> Form:
    if right:
        return VECTOR
    warnings.warn(
        f"numba {numba.__version__} with llvmlite {llvmlite.__version__} compiles the vector form of the "
        f"exponent {loop} to wrong machine code for this processor: the scalar form is used, which gives the "
        "right bytes and is slower; another version of numba may help",
        RuntimeWarning,
        stacklevel=3,
    )
    return SCALAR
