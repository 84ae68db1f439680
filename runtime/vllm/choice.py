"""Which method each layer of a model gets: packed weights, or vLLM's own."""

from __future__ import annotations

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from neuzip.kernels.dtypes import torch_dtypes_for
from neuzip.runtime.serving import EngineRefusal, ServingOptions
from neuzip.runtime.vllm.experts import PackedExpertsMethod, activation_of, reason_to_stay_dense
from neuzip.runtime.vllm.methods import Layer, PackedWeightMethod
from neuzip.runtime.weights.packed import can_be_packed

logger = init_logger("vllm.neuzip")


def method_of(layer: Layer, prefix: str, options: ServingOptions) -> QuantizeMethodBase | None:
    """The method of a layer of a model; None for what vLLM chooses itself. Raises EngineRefusal.

    A layer stays dense if it is small, or has a dtype that is not packed.
    """
    is_packed = options.residency == "packed"
    if is_packed:
        require_packable(get_current_vllm_config(), torch.get_default_dtype())
    if isinstance(layer, LinearBase):
        is_packed = is_packed and layer.params_dtype in torch_dtypes_for("packed")
        is_packed = is_packed and can_be_packed(layer.output_size, layer.input_size)
        return PackedWeightMethod(options.exact) if is_packed else UnquantizedLinearMethod()
    if isinstance(layer, VocabParallelEmbedding):  # whose params_dtype is set later
        is_packed = is_packed and can_be_packed(layer.num_embeddings, layer.embedding_dim)
        return PackedWeightMethod(options.exact) if is_packed else UnquantizedEmbeddingMethod()
    if isinstance(layer, RoutedExperts) and is_packed:
        return _experts_method(layer, options)
    return None


def _experts_method(layer: Layer, options: ServingOptions) -> QuantizeMethodBase | None:
    """The method of all experts of a layer; None, said once in the log, where they stay dense."""
    reason = reason_to_stay_dense(layer, options)
    if reason is None:
        return PackedExpertsMethod(layer.moe_config, activation_of(layer))
    logger.warning_once("neuzip: experts stay dense in vLLM: %s; other layers are packed", reason)
    return None


def require_packable(config: VllmConfig, dtype: torch.dtype) -> None:
    """Raise EngineRefusal for a start in which weights cannot be packed, `dtype` being that of the model."""
    if dtype not in torch_dtypes_for("packed"):
        raise EngineRefusal(
            f"neuzip: packed weights are bfloat16 or float16, and the model's dtype is {dtype}",
            "serve the model in bfloat16, or the residency 'dense'",
        )
    if not current_platform.is_cuda() and not current_platform.is_cpu():
        raise EngineRefusal(
            f"neuzip: packed weights need an NVIDIA GPU or a CPU, not {current_platform.device_name}",
            "give the residency 'dense'",
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise EngineRefusal(
            "neuzip: products with packed weights are not batch invariant, as VLLM_BATCH_INVARIANT asks",
            "unset it, or give the residency 'dense'",
        )
    offload = config.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        raise EngineRefusal(
            "neuzip: vLLM cannot offload packed weights to the CPU",
            "leave out `--cpu-offload-gb` and `--offload-group-size`, or give the residency 'dense'",
        )
