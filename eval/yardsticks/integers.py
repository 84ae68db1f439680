"""Round-to-nearest integers with an fp16 scale, int8 by rows and int4 in groups; and fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import cut, inverse, joined


def int8_rows(weight: Tensor) -> Tensor:
    """An fp32 matrix in int8, symmetric: codes -127 to 127, scale = largest magnitude of the row / 127."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).half().float()
    return (weight * inverse(scale)).round().clamp(-127, 127) * scale


def int4_groups(weight: Tensor, group: int) -> Tensor:
    """An fp32 matrix in int4, asymmetric, as GPTQ and AWQ store it, rounded to nearest.

    Codes 0 to 15 cover the range of the group, which includes 0: scale = range / 15, and the code of 0 is
    the zero point.
    """
    blocks = cut(weight, group)
    least, most = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
    scale = ((most - least) / 15).half().float()
    zero = (-least * inverse(scale)).round().clamp(0, 15)
    codes = ((blocks * inverse(scale)).round() + zero).clamp(0, 15)
    return joined((codes - zero) * scale, weight.shape)


def fp8(weight: Tensor) -> Tensor:
    """An fp32 matrix in fp8 e4m3 with one scale: its largest magnitude becomes 448, the largest number."""
    scale = weight.abs().amax() / 448
    return (weight * inverse(scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
