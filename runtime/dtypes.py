"""Dtypes of safetensors in torch."""

from __future__ import annotations

import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import FormatError
from neuzip.kernels.dtypes import torch_dtypes

TORCH_DTYPES = torch_dtypes()
"""Dtypes of torch by the names that safetensors has for them."""


def torch_dtype(source: FolderSource, tensor: SourceTensor) -> torch.dtype:
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
