"""Coded weights whose patterns are known, as the decoder on a GPU takes them: what it is checked with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.float_fields import Bits, plane_widths

from .coded import ALIGNMENT, CodedTensor, Kind
from .sample import coded_exponents


def coded_weights(kind: Kind, runs: int, device: torch.device) -> tuple[CodedTensor, Bits]:
    """A block of weights of a kind, coded, on a device; and their patterns. Not for kinds with block sizes.

    64 `runs` make a full block. Signs and mantissas are random bits.
    """
    fmt, kept_bits, group, block_size = kind
    if block_size:
        raise ValueError("weights that share a scale have no sample")
    sample = coded_exponents(group, runs)
    numel, width = sample.exponents.size, 1 + kept_bits
    fields = np.random.default_rng(0).integers(0, 1 << width, numel, np.uint64)
    sign, mantissa = fields >> np.uint64(kept_bits), fields & np.uint64((1 << kept_bits) - 1)
    dropped = np.uint64(fmt.mantissa_bits - kept_bits)
    bits = sign << np.uint64(fmt.bits - 1) | mantissa << dropped
    bits |= sample.exponents.astype(np.uint64) << np.uint64(fmt.mantissa_bits)
    planes, left = {}, width
    for plane in plane_widths(width):
        left -= plane
        values = fields >> np.uint64(left) & np.uint64((1 << plane) - 1)
        planes[plane] = _on(_plane(values, plane), device)
    index = _on(np.array([sample.words.size], np.uint16), device, multiple=2).view(torch.int16)
    words = _on(sample.words, device).view(torch.int16)
    coded = CodedTensor(fmt, kept_bits, numel, sample.table, index, words, planes)
    return coded, bits.astype(fmt.dtype)


def _plane(values: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.unsignedinteger]:
    """Fields of a width side by side, the first one in the lowest bits."""
    if width >= 8:
        return values.astype(f"<u{width // 8}")
    each = 8 // width
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(width)
    return np.asarray(np.bitwise_or.reduce(values.reshape(-1, each) << shifts, axis=1), np.uint8)


def _on(
    array: npt.NDArray[np.unsignedinteger], device: torch.device, multiple: int = ALIGNMENT
) -> torch.Tensor:
    """The bytes of an array on a device, filled up to a multiple."""
    raw = array.view(np.uint8)
    filled = np.zeros(-(-raw.size // multiple) * multiple, np.uint8)
    filled[: raw.size] = raw
    return torch.from_numpy(filled).to(device)
