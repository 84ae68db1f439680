"""Comparisons of a model's own code with kernels on made-up inputs: which kernel gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from neuzip.kernels.step import NORMS, Norm, can_norm

PROBES = 6
"""Made-up inputs in the dtype of a step that have to give the same bits."""

STRICT_PROBES = 24
"""Made-up inputs in fp32, with one large number a row: half of them show another order of sums of squares."""

LARGE = 4096.0

EVERY = 1 << 16
"""Numbers of 16 bits."""


def norm_like(
    module: nn.Module, norm_weight: Tensor, eps: float, shape: torch.Size, dtype: torch.dtype
) -> Norm | None:
    """The kind of norm that gives the bits of a module, with weights that tell the kinds apart."""
    from neuzip.kernels.step.triton import step as triton_step

    rows, columns = shape[:-1].numel(), shape[-1]
    if norm_weight.shape != (columns,) or not can_norm(rows, columns):
        return None
    generator = torch.Generator(norm_weight.device).manual_seed(0)
    weight = _random(generator, norm_weight.shape, norm_weight.dtype)
    inputs = [_random(generator, shape, dtype) for _ in range(PROBES)]
    for _ in range(STRICT_PROBES):
        strict = _random(generator, shape, torch.float32)
        places = torch.randint(columns, (rows, 1), generator=generator, device=generator.device)
        inputs.append(strict.view(rows, columns).scatter_(1, places, LARGE).view(shape))

    def unlike(norm: Norm, inputs: Iterable[Tensor]) -> bool:
        """Whether bits differ somewhere; the device is asked once."""
        wrong = torch.zeros((), dtype=torch.bool, device=weight.device)
        for x in inputs:
            w = weight.to(x.dtype) if x.dtype != dtype else weight
            expected = functional_call(module, {"weight": w}, (x,))
            output = triton_step.rms_norm(x, w, eps, norm)
            if output.dtype != expected.dtype or output.shape != expected.shape:
                return True
            wrong |= (_bits(output) != _bits(expected)).any()
        return bool(wrong)

    for norm in NORMS:
        if not unlike(norm, inputs[:PROBES]) and not unlike(norm, inputs[PROBES:]):
            return norm
    return None


def same_rotation(
    original: Callable[..., Any],
    of_q: torch.Size,
    of_k: torch.Size,
    of_cos: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether a function turns queries and keys of these shapes to the bits of the kernel."""
    from neuzip.kernels.step.triton import step as triton_step

    generator = torch.Generator(device).manual_seed(0)
    for _ in range(PROBES):
        arguments = [_random(generator, shape, dtype) for shape in (of_q, of_k, of_cos, of_cos)]
        if not all(
            same_bits(*pair)
            for pair in zip(triton_step.rotated(*arguments), original(*arguments), strict=True)
        ):
            return False
    return True


def is_silu(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a module makes of every number of 16 bits what the gated unit makes of it: NaNs any."""
    from neuzip.kernels.step.triton import step as triton_step

    gate = torch.arange(-EVERY // 2, EVERY // 2, device=device).to(torch.int16).view(dtype)
    opened = type(module).forward(module, gate)
    if not isinstance(opened, Tensor) or opened.dtype != dtype or opened.shape != gate.shape:
        return False
    generator = torch.Generator(device).manual_seed(0)
    for up in (torch.ones_like(gate), _random(generator, gate.shape, dtype)):
        output, expected = triton_step.gated(gate, up), opened * up
        if not ((_bits(output) == _bits(expected)) | (output.isnan() & expected.isnan())).all():
            return False
    return True


def _random(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Made-up numbers, zeros of both signs among them."""
    numbers = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    flat = numbers.view(-1)
    flat[3::11], flat[5::17] = 0.0, -0.0
    return numbers


def same_bits(x: Tensor, y: Any) -> bool:
    """Whether two tensors of floats have the same bits."""
    if not isinstance(y, Tensor) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
