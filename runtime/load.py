"""A checkpoint, plain or compressed, as a live model with dense weights.

transformers builds the module, renames, merges and ties tensors, and computes what is not stored, exactly as
its `from_pretrained` does. It is handed tensors that are decoded when it asks for their values, one at a time,
so the weights exist once: in the model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from neuzip.compress.source import SourceTensor, TensorSource, digest
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint
from neuzip.formats.tensor_file import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

INDEX = "model.safetensors.index.json"
SHOWN_NAMES = 5

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""What safetensors' dtypes are in torch."""

if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    TORCH_DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
