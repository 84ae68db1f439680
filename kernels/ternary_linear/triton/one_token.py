"""Products and gated units of one token: from tensors to a launch.

The kernels are in `one_token_kernel` and `relu2_glu_kernels`; their launches are those of `launches`. Usually
one launch does all. A token of very long rows, and Top-K, are quantised by a launch of their own first
(`quantize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from neuzip.kernels.device.launch import is_compiled, launching, uses_pdl
from neuzip.kernels.device.properties import counts_bits
from neuzip.kernels.quantizers.activations import EPSILON
from neuzip.kernels.quantizers.magnitudes import first_unit
from neuzip.kernels.ternary_linear.triton import launches
from neuzip.kernels.ternary_linear.triton.launches import OneTokenLaunch
from neuzip.kernels.ternary_linear.triton.one_token_device import OneTokenConfig
from neuzip.kernels.ternary_linear.triton.one_token_kernel import one_token_kernel
from neuzip.kernels.ternary_linear.triton.quantize import in_words, quantize
from neuzip.kernels.ternary_linear.triton.quantize_device import KINDS
from neuzip.kernels.ternary_linear.triton.relu2_glu_kernels import skipping_glu_kernel, whole_glu_kernel
from neuzip.kernels.ternary_linear.weight import BLOCK_K, TernaryWeight


def one_token(
    x: torch.Tensor,
    weights: Sequence[TernaryWeight],
    biases: Sequence[torch.Tensor | None],
    activation: str,
    clamped: bool,
    top_k: int = 0,
    launch: OneTokenLaunch | None = None,
) -> list[torch.Tensor]:
    """The products of x [1, in] with some weights, in one launch for all of them: [1, out] each.

    All weights have one scale, or all have one a row; all have a bias, or none has. Further arguments are
    those of `ternary_linear`; all arrays are contiguous. Raises ValueError for words that do not begin at a
    multiple of 16 bytes, and for a launch that takes too much shared memory.
    """
    tiles, k_blocks = sum(weight.words.shape[0] for weight in weights), weights[0].words.shape[1]
    launch = launch or _fitted(launches.one_token_launch(tiles, k_blocks, x.device, activation == "int4"), x)
    request = _Request.of(x, weights, activation, clamped, top_k, launch)
    ys = [request.empty(weight) for weight in weights]
    programs = sum(triton.cdiv(weight.words.shape[0], launch.tiles) for weight in weights)
    with launching(x.device):
        one_token_kernel[(programs,)](
            tuple(ys), request.in_words, tuple(weight.words for weight in weights),
            tuple(weight.scale for weight in weights), tuple(biases), *request.codes(),
            tuple(weight.shape[0] for weight in weights), tuple(weight.words.shape[0] for weight in weights),
            *request.numbers, **request.options,
        )  # fmt: skip
    return [y.to(x.dtype) for y in ys]


def relu2_glu(
    x: torch.Tensor,
    gate: TernaryWeight,
    up: TernaryWeight,
    activation: str,
    clamped: bool,
    top_k: int = 0,
    launch: OneTokenLaunch | None = None,
) -> torch.Tensor:
    """squared_relu(gate product) * up product for x [1, in]: [1, out], in one launch.

    Rows of `up` whose squared ReLU is 0 are not read where that saves time: for small weights it does not.
    Each weight has one scale, or one a row. Raises ValueError as `one_token` does.
    """
    if launch and not launch.skips_closed_rows and launch.tiles % 2:
        raise ValueError(f"{launch} has as many tiles of the gate as of up: an even number")
    tiles, k_blocks = gate.words.shape[:2]
    same_scales = gate.scale.dim() == up.scale.dim()
    launch = launch or _fitted(launches.relu2_glu_launch(tiles, k_blocks, x.device, same_scales), x)
    request = _Request.of(x, (gate, up), activation, clamped, top_k, launch, gated=True)
    y = request.empty(gate)
    with launching(x.device):
        arguments = (
            y, request.in_words, gate.words, gate.scale, up.words, up.scale, *request.codes(), gate.shape[0],
            tiles, *request.numbers,
        )  # fmt: skip
        if launch.skips_closed_rows:
            programs = triton.cdiv(tiles, launch.tiles)
            skipping_glu_kernel[(programs,)](*arguments, UP_ROW_SCALES=up.scale.dim() > 0, **request.options)
        else:
            whole_glu_kernel[(triton.cdiv(2 * tiles, launch.tiles),)](*arguments, **request.options)
    return y.to(x.dtype)


def _fitted(launch: OneTokenLaunch, x: torch.Tensor) -> OneTokenLaunch:
    """The launch; its limit on registers, measured with bits and 16-bit activations, only for those."""
    return launch if counts_bits(x.device) and x.element_size() == 2 else replace(launch, registers=None)


@dataclass(frozen=True)
class _Request:
    """A token to multiply, and how its kernel is launched."""

    x: torch.Tensor
    in_words: torch.Tensor
    activation: str
    clamped: bool
    top_k: int
    launch: OneTokenLaunch
    config: OneTokenConfig
    numbers: tuple[Any, ...]
    options: dict[str, Any]

    @staticmethod
    def of(
        x: torch.Tensor,
        weights: Sequence[TernaryWeight],
        activation: str,
        clamped: bool,
        top_k: int,
        launch: OneTokenLaunch,
        gated: bool = False,
    ) -> _Request:
        """What both hosts need for a launch. Raises what `one_token` raises."""
        columns, k_blocks = x.shape[1], weights[0].words.shape[1]
        if not counts_bits(x.device):
            launch = replace(launch, bits=False)
        code_bytes = launches.code_bytes(launch, k_blocks, activation)
        stages, prologue = launches.stages_and_prologue(launch, k_blocks, code_bytes)
        steps, words = triton.cdiv(k_blocks, launch.warps), in_words(x)
        if gated and launch.skips_closed_rows:  # no ring; sums of the gate and of `up` are exchanged in turn
            stages, prologue = min(launch.stages, steps), 0
            both = replace(launch, tiles=2 * launch.tiles)
            launches.check_shared(launch, launches.shared_bytes(both, 0, code_bytes))
        else:
            launches.check_shared(launch, launches.shared_bytes(launch, stages, code_bytes))
        if any(weight.words.data_ptr() % 16 for weight in weights):
            raise ValueError("words of ternary weights begin at multiples of 16 bytes; clone() them")
        compiled, use_pdl = is_compiled(one_token_kernel), uses_pdl(one_token_kernel, x.device)
        config = OneTokenConfig(
            KIND=KINDS[activation], CLAMPED=clamped, ROW_SCALES=weights[0].scale.dim() > 0,
            NUM_WARPS=launch.warps, STEPS=steps, STAGES=stages, TILES=launch.tiles, PROLOGUE=prologue,
            EVEN_K=columns == steps * launch.warps * BLOCK_K, BITS=code_bytes > 0,
            TRIGGER_NEXT_EARLY=launch.trigger_next_early, USE_PDL=use_pdl, COMPILED=compiled,
        )  # fmt: skip
        numbers = words.shape[1], 1 / columns, first_unit(columns), k_blocks, EPSILON
        options = {
            "config": config, "num_warps": launch.warps, "launch_pdl": use_pdl, "enable_fp_fusion": False,
            **({"maxnreg": launch.registers} if launch.registers and compiled else {}),
        }  # fmt: skip
        return _Request(x, words, activation, clamped, top_k, launch, config, numbers, options)

    def empty(self, weight: TernaryWeight) -> torch.Tensor:
        """Memory for a product. The interpreter does not round to bf16 as torch does, so there it is fp32."""
        dtype = self.x.dtype if self.config.COMPILED else torch.float32
        return torch.empty(1, weight.shape[0], dtype=dtype, device=self.x.device)

    def codes(self) -> tuple[torch.Tensor | None, ...]:
        """Codes, scale and sum of codes, from a launch of their own; None where the kernel makes them."""
        fused = self.launch.fused and self.config.STEPS <= launches.FUSED_STEPS
        if fused and self.activation != "top_k_int8":
            return None, None, None
        codes, scale, total = quantize(
            self.x, self.activation, self.top_k, self.clamped, trigger_first=self.launch.quantizer_pdl
        )
        return codes.view(torch.int32), scale, total
