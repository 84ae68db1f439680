"""Random tensors of fixed seeds: normal numbers, weights by law, and weights as stored patterns in numpy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from weight_laws import LAWS, generator_on

DEVIATION = 0.02
"""Standard deviation of the weights of a language model, roughly."""

FLOAT8 = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


def gaussian(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, deviation: float = 1.0
) -> Tensor:
    """Normal numbers on the CPU, drawn in float32."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x if deviation == 1.0 else x * deviation).to(dtype)


def weights_of_law(
    law: str, out: int, columns: int, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Weights [out, columns] on the CPU by a law that the benchmarks use: "gaussian" or "trained-like"."""
    return LAWS[law](out, columns, generator_on("cpu", seed), dtype)


def bf16_patterns(values: object) -> np.ndarray:  # type: ignore[type-arg]
    """The uint16 patterns of numbers in bfloat16, cut rather than rounded."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def weight_patterns(
    dtype: str, shape: int | tuple[int, ...], *, deviation: float = DEVIATION, seed: int = 0
) -> np.ndarray:  # type: ignore[type-arg]
    """The patterns of normal weights in a dtype of safetensors ("BF16"), as unsigned integers."""
    if dtype in FLOAT8:
        values = np.random.default_rng(seed).standard_normal(shape) * deviation * 50
        return torch.from_numpy(values).to(FLOAT8[dtype]).view(torch.uint8).numpy()
    values = np.random.default_rng(seed).standard_normal(shape) * deviation
    if dtype == "BF16":
        return bf16_patterns(values.astype(np.float32))
    size = {"F16": 2, "F32": 4, "F64": 8}[dtype]
    return values.astype(f"f{size}").view(f"u{size}")
