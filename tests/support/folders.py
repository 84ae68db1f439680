"""Folders of checkpoints: patterns like those of trained weights, and what a folder holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from neuzip.kernels.float_fields import FORMATS

Save = Callable[..., Path]


def weights(dtype: str, size: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """Trained-looking patterns of a float dtype."""
    values = np.random.default_rng(seed).standard_normal(size) * 0.05
    if dtype == "F64":
        return values.view(np.uint64)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    single = values.astype(np.float32).view(np.uint32)
    if dtype == "F32":
        return single
    rounded = single + 0x7FFF + (single >> 16 & 1)
    if dtype == "BF16":
        return (rounded >> 16).astype(np.uint16)
    fmt = FORMATS[dtype]  # fp8: sign, four or five exponent bits, three or two mantissa bits
    exponent = np.clip((single >> 23 & 0xFF).astype(int) - 120, 0, (1 << fmt.exponent_bits) - 2)
    mantissa = single >> (23 - fmt.mantissa_bits) & ((1 << fmt.mantissa_bits) - 1)
    return (single >> 31 << 7 | exponent.astype(np.uint32) << fmt.mantissa_bits | mantissa).astype(np.uint8)


def folder_bytes(root: Path) -> dict[str, bytes]:
    """The bytes of every file of a folder, under its path."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def partial(target: Path) -> Path:
    """Where a run writes what has no name yet."""
    return target.with_name(target.name + ".neuzip-partial")


def refusing(code: int) -> Callable[..., None]:
    """What a file system does that refuses a call."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse
