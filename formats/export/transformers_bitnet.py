"""Checkpoints for transformers' `bitnet` quantizer, version 5.

    linear class   mode      weight                            weight_scale
    bitlinear      offline   uint8 [out / 4, in]               [1] = 1 / alpha: its output is divided by it
    autobitlinear  offline   uint8 [out / 4, in]               [1] = alpha: its output is multiplied by it
    autobitlinear  online    floats [out, in]                  none: it takes the absmean in every forward

Byte [k, j] holds the codes + 1 of the rows k, k + out/4, k + 2 out/4 and k + 3 out/4 in column j, the first
in its lowest two bits. The absmean of alpha * T is alpha * density, so for the online mode the floats are
alpha / density * T. Inputs are quantised to INT8, absmax, in all of them.

Source: transformers, integrations/bitnet.py and quantizers/quantizer_bitnet.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.errors import NeuzipError, UsageError

from . import Layout, single_scale

ENGINE = "transformers' bitnet"
CODES_A_BYTE = 4
SMALLEST_ABSMEAN = 1e-5
"""What transformers raises a smaller absmean to."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TransformersBitnet:
    """The export, for one of the two linear classes. Raises UsageError for `bitlinear` with `online`."""

    linear_class: str = "bitlinear"
    mode: str = "offline"

    def __post_init__(self) -> None:
        if self.linear_class not in ("bitlinear", "autobitlinear") or self.mode not in ("offline", "online"):
            raise UsageError(f"no linear class {self.linear_class!r} with the mode {self.mode!r}")
        if self.mode == "online" and self.linear_class != "autobitlinear":
            raise UsageError(
                "`mode='online'` needs autobitlinear: bitlinear holds packed weights only",
                "add `linear_class='autobitlinear'`",
            )

    def stored_scale(self, name: str, dtype: str, codes: Tensor, scale: Tensor, group: int | None) -> Tensor:
        """The reader's alpha, fp32 [], before it rounds it to the dtype in which it runs."""
        alpha = single_scale(name, scale, ENGINE)
        if dtype not in DTYPES:
            raise NeuzipError(f"tensor {name!r}: is {dtype}, {ENGINE} holds bf16, fp16 and fp32")
        if self.mode == "offline":
            if codes.shape[0] % CODES_A_BYTE:
                raise NeuzipError(
                    f"tensor {name!r}: has {codes.shape[0]} rows, {ENGINE} packs {CODES_A_BYTE} into a byte",
                    "export with `linear_class='autobitlinear'` and `mode='online'`",
                )
            written = self._scale(alpha)
            if not self._holds(written, dtype):
                raise NeuzipError(
                    f"tensor {name!r}: its scale {float(alpha):.3g} is out of the range of {dtype}",
                    "export to compressed-tensors, which multiplies by the scale",
                )
            return _inverse(written) if self.linear_class == "bitlinear" else written
        stored = _absmean_scale(codes, alpha).to(DTYPES[dtype])
        restored_scale = (stored.double() * _density(codes)).float()
        if float(alpha) != 0 and not SMALLEST_ABSMEAN <= float(restored_scale) < float("inf"):
            raise NeuzipError(
                f"tensor {name!r}: its scale {float(alpha):.3g} does not survive an absmean in {dtype}, "
                f"which is at least {SMALLEST_ABSMEAN}",
                "export with `mode='offline'`",
            )
        return restored_scale

    def layout(self, name: str, dtype: str, shape: tuple[int, ...], group: int | None) -> Layout:
        """A weight, packed and with its scale unless the reader finds it."""
        if self.mode == "online":
            return {name: (dtype, shape)}
        return {name: ("U8", (shape[0] // CODES_A_BYTE, shape[1])), f"{name}_scale": ("F32", (1,))}

    def tensors(
        self, name: str, dtype: str, codes: Tensor, scale: Tensor, group: int | None
    ) -> dict[str, Tensor]:
        """Codes times alpha / density, or packed codes and the scale as the linear class wants it."""
        alpha = single_scale(name, scale, ENGINE)
        if self.mode == "online":
            return {name: codes.to(DTYPES[dtype]) * _absmean_scale(codes, alpha).to(DTYPES[dtype])}
        return {name: pack(codes), f"{name}_scale": self._scale(alpha).reshape(1)}

    def quantization_config(self, groups: dict[str, int | None], others: list[str]) -> dict[str, object]:
        """What transformers' BitNetQuantConfig reads."""
        return {
            "quant_method": "bitnet",
            "linear_class": self.linear_class,
            "quantization_mode": self.mode,
            "modules_to_not_convert": others,
            "use_rms_norm": False,
        }

    def _scale(self, alpha: Tensor) -> Tensor:
        return _inverse(alpha) if self.linear_class == "bitlinear" else alpha

    @staticmethod
    def _holds(written: Tensor, dtype: str) -> bool:
        """Whether the scale stays a normal number in the model's dtype, or is exactly 0."""
        rounded, tiny = written.to(DTYPES[dtype]), torch.finfo(DTYPES[dtype]).tiny
        return bool(written == 0) or (bool(rounded.isfinite()) and float(rounded) >= tiny)


def pack(codes: Tensor) -> Tensor:
    """Four rows a byte: int8 [out, in] to uint8 [out / 4, in]."""
    quarters = (codes + 1).to(torch.uint8).reshape(CODES_A_BYTE, -1, codes.shape[1])
    return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6


def _inverse(alpha: Tensor) -> Tensor:
    """1 / alpha, and 1 for 0: weights of zeros give zeros under any scale but infinity."""
    return torch.where(alpha == 0, 1.0, 1 / alpha)


def _density(codes: Tensor) -> float:
    return int(codes.count_nonzero()) / max(1, codes.numel())


def _absmean_scale(codes: Tensor, alpha: Tensor) -> Tensor:
    """alpha / density, fp64 []: what to multiply the codes with for the absmean to be alpha."""
    density = _density(codes)
    return alpha.double() / density if density else torch.zeros((), dtype=torch.float64)
