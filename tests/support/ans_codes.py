"""Weights coded by rANS on the CPU: Triton's interpreter would take seconds for what takes milliseconds."""

from __future__ import annotations

import numpy as np
import torch

from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, census, split
from neuzip.kernels.rans.coded import CodedTensor
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.runtime.weights import AnsWeight


def resident(values: torch.Tensor, *bounds: int) -> ResidentTensor:
    """bf16 or fp16 weights [numel] on their device, in chunks with these bounds."""
    fmt = FORMATS["BF16" if values.dtype == torch.bfloat16 else "F16"]
    bits = values.cpu().view(torch.int16).numpy().view(np.uint16)
    counted = census(bits, fmt)
    kept = counted.kept_bits(fmt)
    table = rans.build_table(counted.exponents, counted.pairs)
    exponents, planes = split(bits, fmt, kept)
    coded = rans.encode(exponents, table)
    padded = {width: np.resize(plane, -(-plane.size // 16) * 16) for width, plane in planes.items()}
    words, index = (torch.from_numpy(a.view(np.int16)).to(values.device) for a in (coded.words, coded.index))
    there = {width: torch.from_numpy(plane).to(values.device) for width, plane in padded.items()}
    return ResidentTensor.of(CodedTensor(fmt, kept, bits.size, table, index, words, there), bounds)


def ans_experts(dense: torch.Tensor, together: int) -> AnsWeight:
    """Weights [experts, out, in] as `AnsWeight.of` has them, so many experts in each coded tensor."""
    experts, out, columns = dense.shape
    residents, rows, chunks = [], [], []
    for start in range(0, experts, together):
        own = dense[start : start + together]
        bounds = [number * out * columns for number in range(len(own) + 1)]
        residents.append(resident(own.reshape(-1), *bounds))
        for number in range(len(own)):
            rows.append(((start + number) * out, (start + number + 1) * out))
            chunks.append((len(residents) - 1, number))
    return AnsWeight._of(residents, rows, chunks, tuple(dense.shape), False, dense.dtype)
