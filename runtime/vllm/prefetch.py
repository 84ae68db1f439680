"""Kernels of a model's packed layers, compiled ahead by threads while vLLM loads the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.runtime.vllm.experts import PackedExpertsMethod
from neuzip.runtime.vllm.methods import Layer, PackedWeightMethod

logger = init_logger("vllm.neuzip")

ROWS = (1, 16, 32, 64, 128, 256, 512)
"""Rows of x that products are compiled for: with others they use the same kernels."""

LOW_BITS = 8
"""Low bits of weights that nobody rounded. Kernels for fewer are compiled when they are first launched."""


def prefetch_kernels_of(model: nn.Module, device: torch.device) -> None:
    """Compile what the packed layers of `model` launch, in other threads; nothing if `device` is no GPU."""
    if device.type != "cuda" or torch.version.cuda is None:
        return
    from neuzip.kernels.device.compile_ahead import compile_ahead
    from neuzip.kernels.device.release import require_triton
    from neuzip.kernels.device.triton_cache import make_optional

    require_triton()
    make_optional()
    compile_ahead(launches_of(model), device, logger.info)


def launches_of(model: nn.Module) -> list[Callable[[], object]]:
    """What packing and multiplying the layers of a model launch, on the meta device; each shape once."""
    from neuzip.kernels.packed_linear.ops import compile_products
    from neuzip.kernels.packed_linear.triton import pack

    products: set[tuple[int, int, torch.dtype, bool]] = set()
    looked_up: set[tuple[int, int, torch.dtype]] = set()
    experts: set[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]] = set()
    layers: Iterable[Layer] = model.modules()
    for layer in layers:
        if isinstance(getattr(layer, "quant_method", None), PackedExpertsMethod):
            experts.add((*layer.neuzip_shapes, layer.neuzip_dtype, layer.top_k))
        if not isinstance(getattr(layer, "quant_method", None), PackedWeightMethod):
            continue
        shape = layer.neuzip_rows, layer.neuzip_columns, layer.neuzip_dtype
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            looked_up.add(shape)
        else:
            products.add((*shape, getattr(layer, "bias", None) is not None))
    launches: list[Callable[[], object]] = []
    for out, columns, dtype in looked_up | {shape[:3] for shape in products}:
        launches.append(partial(pack.compile_packing, out, columns, dtype, LOW_BITS))
    for out, columns, dtype in looked_up:
        packed = PackedTensor.without_values(out, columns, dtype, LOW_BITS)
        launches.append(partial(pack.compile_rows, packed))
    for out, columns, dtype, bias in products:
        packed = PackedTensor.without_values(out, columns, dtype, LOW_BITS)
        launches += [partial(compile_products, packed, rows, bias) for rows in ROWS]
    for first, second, dtype, k in experts:
        launches += _launches_of_experts(first, second, dtype, k)
    return launches


def _launches_of_experts(
    first: tuple[int, ...], second: tuple[int, ...], dtype: torch.dtype, k: int
) -> list[Callable[[], object]]:
    """What experts of a layer launch: the shapes [experts, out, in] of both weights, k experts a token."""
    from neuzip.kernels.experts.ops import compile_layer
    from neuzip.kernels.packed_linear.triton import pack

    launches: list[Callable[[], object]] = []
    weights = []
    for experts, out, columns in (first, second):
        launches.append(partial(pack.compile_packing, experts * out, columns, dtype, LOW_BITS))
        weights.append(PackedTensor.without_values(experts * out, columns, dtype, LOW_BITS))
    gate_up, down = weights
    launches += [partial(compile_layer, gate_up, down, first[0], tokens, k) for tokens in ROWS]
    return launches
