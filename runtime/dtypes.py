"""Dtypes of safetensors in torch."""

from __future__ import annotations

import torch

from neuzip.compress.source import SourceTensor, TensorSource
from neuzip.errors import FormatError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Dtypes of torch by the names that safetensors has for them."""


def torch_dtype(source: TensorSource, tensor: SourceTensor) -> torch.dtype:
    """A tensor's dtype in torch. Raises FormatError where torch has none."""
    dtype = TORCH_DTYPES.get(tensor.info.dtype)
    if dtype is None:
        raise FormatError(
            source.checkpoint.root / tensor.file,
            f"torch {torch.__version__} has no dtype for {tensor.info.dtype}",
            tensor=tensor.name,
            field="dtype",
        )
    return dtype


def shaped(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes seen as a tensor of a dtype and shape."""
    return data.view(dtype).view(shape)
