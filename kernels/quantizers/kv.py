"""Keys and values of a cache in few bits, a scale a token and head, without calibration.

BitNet a4.8 quantises the heads after the rotary embedding "to unsigned integers using the absmax function"
(section 3.1) and prints no formula. "absmax" here is the grid of 2^b points from -peak to peak, both ends
included: value = scale * (code - (2^b - 1) / 2). "minmax" spans the least to the largest number of a head
instead, at the price of a second number: value = low + scale * code.

On wikilm-26m the KL divergence from the model's own cache is 0.029 nats with "minmax" and 0.041 with
"absmax" at 3 bits, 0.0062 and 0.0089 at 4 (10,000 tokens of WikiText-2, scales in bf16, the first token of a
window at 4 bits: benchmarks/results/kv_cache-wikilm-26m.json). In a trial in which "absmax" had 0.0395, other
readings of the sentence, signed integers with an offset, had 0.0439 (a range of 2^b - 1/2 steps) and 0.0541
(peak = 2^(b-1) - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import magnitudes
from .magnitudes import quotient

Range = Literal["absmax", "minmax"]


@dataclass(frozen=True, eq=False)
class QuantizedHeads:
    """Keys or values as unsigned integers.

    codes  uint8 [..., width], 0 to 2**bits - 1
    scale  [..., 1], the step between two codes
    low    [..., 1], what code 0 stands for; None where that is -(2**bits - 1) / 2 steps
    bits   of each code: a number, or one a head, integers that broadcast to [...]
    """

    codes: Tensor
    scale: Tensor
    low: Tensor | None
    bits: int | Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of the codes, [..., width], in fp32 and then rounded to `dtype`."""
        scale = self.scale.float()
        if self.low is None:
            return ((self.codes - _steps(self.bits) / 2) * scale).to(dtype)
        return (self.codes * scale + self.low.float()).to(dtype)


def quantize_heads(
    x: Tensor,
    bits: int | Tensor,
    *,
    span: Range = "absmax",
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedHeads:
    """Quantise each head [..., width] of bf16, fp16 or fp32 to unsigned integers of 1 to 8 bits.

    bits may differ between tokens and heads: a tensor of integers that broadcasts to [...], which is looked
    at, so that the device is waited for. a4.8 keeps the first token (bos) at 4 bits where others have 3.
    Scale and low are rounded to `scale_dtype` first, so that what is stored is what codes were made for.

    In fp32, with n = 2**bits - 1: scale = peak / (n / 2), low = -(n / 2) * scale, or low = min(x) and
    scale = (max(x) - low) / n; codes = round((x - low) / scale), clipped to 0 to n. A head with NaN or
    infinity has codes 0 and the scale NaN; where the scale is 0, so are the codes.
    """
    magnitudes.check_floats(x)
    steps = _steps(bits)
    x = x.float()
    if span == "absmax":
        scale = _scale(quotient(magnitudes.largest(x), steps / 2), scale_dtype)
        low = -scale * (steps / 2)
    elif span == "minmax":
        least, most = _ends(x)
        low = least.to(scale_dtype).float()
        scale = (most - low).clamp(min=0)  # low may have been rounded up
        scale = _scale(quotient(scale, steps), scale_dtype)
    else:
        raise ValueError(f"the span of a head's codes is 'absmax' or 'minmax', not {span!r}")
    y = torch.where(scale == 0, 0, (x - low) / scale)
    codes = y.nan_to_num(0).round().clamp(min=0)
    codes = codes.minimum(torch.as_tensor(steps, dtype=codes.dtype, device=codes.device)).to(torch.uint8)
    stored = low.to(scale_dtype) if span == "minmax" else None
    return QuantizedHeads(codes, scale.to(scale_dtype), stored, bits)


def _steps(bits: int | Tensor) -> float | Tensor:
    """2**bits - 1, for a tensor fp32 [..., 1]. Raises ValueError outside 1 to 8."""
    if isinstance(bits, int):
        least = most = bits
    elif bits.dtype.is_floating_point or bits.dtype == torch.bool:
        raise TypeError(f"bits are integers, not {bits.dtype}")
    elif bits.numel():
        least, most = int(bits.min()), int(bits.max())
    else:
        least = most = 1
    if least < 1 or most > 8:
        raise ValueError(f"heads are quantised to 1 to 8 bits, not {least if least < 1 else most}")
    return float((1 << bits) - 1) if isinstance(bits, int) else ((1 << bits.long()) - 1).float()[..., None]


def _scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is stored, in fp32; NaN if it is not finite."""
    scale = scale.to(dtype).float()
    return torch.where(scale.isfinite(), scale, torch.nan)


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each row."""
    if x.shape[-1] == 0:
        return magnitudes.largest(x), magnitudes.largest(x)
    return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
