"""The one table of dtypes: their names in safetensors and torch, their fields, and which operators take them.

Importing it needs no torch, as the codecs for the CPU work without. A new dtype is a line of DTYPES, and a
line of DTYPE_BITS in formats/safetensors_file.py, which knows the widths of the file format.

    operator       what takes the dtype
    lossless       the codec of exponents: float_fields, rans, delta
    ternary        quantisers of ternary weights, and their scales
    ans            the residency "ans": weights coded in GPU memory
    packed         the packed form and its products: packed_linear, the residency "packed"
    head           linear_cross_entropy
    attention      quantised attention on a GPU
    attention_cpu  quantised attention on a CPU
    step           norms, rotary embeddings and the argmax of a decoding step
    gate           gated units of a decoding step
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """A dtype of tensors. Floats that the codec takes have a sign bit, exponent and mantissa bits."""

    name: str
    """Name in safetensors."""
    torch_name: str
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    is_finite: bool = False
    """Whether no exponent is reserved for infinities."""
    operators: frozenset[str] = frozenset()


def _dtype(
    name: str, torch_name: str, bits: int, fields: tuple[int, int] = (0, 0), operators: str = "",
    is_finite: bool = False,
) -> DType:  # fmt: skip
    return DType(name, torch_name, bits, *fields, is_finite, frozenset(operators.split()))


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        _dtype("BF16", "bfloat16", 16, (8, 7),
               "lossless ternary ans packed head attention attention_cpu step gate"),
        _dtype("F16", "float16", 16, (5, 10),
               "lossless ternary ans packed head attention attention_cpu step gate"),
        _dtype("F32", "float32", 32, (8, 23), "lossless ternary ans head attention_cpu step"),
        _dtype("F64", "float64", 64, (11, 52), "lossless"),
        _dtype("F8_E4M3", "float8_e4m3fn", 8, (4, 3), "lossless", is_finite=True),
        _dtype("F8_E5M2", "float8_e5m2", 8, (5, 2), "lossless"),
        _dtype("F8_E4M3FNUZ", "float8_e4m3fnuz", 8, (4, 3), "lossless", is_finite=True),
        _dtype("F8_E5M2FNUZ", "float8_e5m2fnuz", 8, (5, 2), "lossless", is_finite=True),
        _dtype("F8_E8M0", "float8_e8m0fnu", 8),
        _dtype("BOOL", "bool", 8),
        _dtype("U8", "uint8", 8),
        _dtype("I8", "int8", 8),
        _dtype("U16", "uint16", 16),
        _dtype("I16", "int16", 16),
        _dtype("U32", "uint32", 32),
        _dtype("I32", "int32", 32),
        _dtype("U64", "uint64", 64),
        _dtype("I64", "int64", 64),
        _dtype("C64", "complex64", 64),
    )
}  # fmt: skip
"""By their names in safetensors. Types of less than 8 bits are not among them: torch has none."""


def names_for(operator: str) -> tuple[str, ...]:
    """The names in safetensors of the dtypes that an operator takes, in the order of the table."""
    return tuple(dtype.name for dtype in DTYPES.values() if operator in dtype.operators)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch for a name in safetensors. Raises KeyError for a name that DTYPES has not."""
    import torch

    return getattr(torch, DTYPES[name].torch_name)  # type: ignore[no-any-return]


@functools.cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """The dtypes of torch for all names in safetensors."""
    return {name: torch_dtype(name) for name in DTYPES}


@functools.cache
def torch_dtypes_for(operator: str) -> tuple[torch.dtype, ...]:
    """The dtypes of torch that an operator takes, in the order of the table."""
    return tuple(torch_dtype(name) for name in names_for(operator))


@functools.cache
def dtype_of(dtype: torch.dtype) -> DType:
    """The line of the table for a dtype of torch. Raises KeyError for one that safetensors has not."""
    by_name = {one.torch_name: one for one in DTYPES.values()}
    return by_name[dtype_name(dtype)]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch, without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def pattern_dtypes() -> dict[int, torch.dtype]:
    """By their bits, the dtypes in which bit patterns of floats are handled in torch."""
    import torch

    return {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
