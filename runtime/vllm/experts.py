"""vLLM's method of mixtures of experts whose weights are packed.

vLLM has one layer for all experts, with two parameters: w13_weight [experts, 2 * inner, in], gates before
ups, and w2_weight [experts, out, inner]. They are made on the meta device and packed when all of a layer has
come, as `methods` does it with other weights. With tensor parallelism each rank packs its own part of
`inner`, and with expert parallelism its own experts: the ids of others name no expert here and add nothing.

vLLM's own code routes, computes shared experts and adds up what ranks computed.

A layer stays dense where `reason_to_stay_dense` has a reason, and then vLLM's own method computes it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from neuzip.kernels.dtypes import torch_dtypes_for
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.held import HeldExperts, hold_experts
from neuzip.kernels.experts.ops import Activation
from neuzip.kernels.packed_linear import ops
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor
from neuzip.runtime.serving import ServingOptions
from neuzip.runtime.vllm.methods import Layer
from neuzip.runtime.vllm.reloading import require_unpacked
from neuzip.runtime.weights.packed import can_be_packed

WEIGHTS = ("w13_weight", "w2_weight")
"""vLLM's names of the two parameters of a layer: gate and up of all experts, and down."""

CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"
"""What routes on a CPU. Versions without it route inside the product of dense experts, so on CPUs only."""


def reason_to_stay_dense(layer: Layer, options: ServingOptions) -> str | None:
    """Why the experts of a layer cannot be packed, as a phrase for the log; None if they can be."""
    return next((reason for applies, reason in _reasons(layer, options) if applies), None)


def _reasons(layer: Layer, options: ServingOptions) -> Iterator[tuple[bool, str]]:
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    inner = moe.intermediate_size_per_partition
    shapes = (
        (layer.local_num_experts * 2 * inner, moe.hidden_dim),
        (layer.local_num_experts * moe.hidden_dim, inner),
    )
    name = getattr(layer.activation, "value", layer.activation)
    yield options.exact, "with `exact`, products of experts are vLLM's own"
    yield layer.params_dtype not in torch_dtypes_for("packed"), f"their dtype is {layer.params_dtype}"
    yield activation_of(layer) is None, f"there is no product with the activation {name!r}"
    yield moe.has_bias, "they have biases"
    yield layer.apply_router_weight_on_input, "this model multiplies their inputs by the router's weights"
    yield (
        type(layer).weight_loader is not RoutedExperts.weight_loader,
        (f"{type(layer).__name__} loads weights in a way of its own"),
    )
    yield not all(can_be_packed(*shape) for shape in shapes), "they are too small, or too wide"
    yield moe.is_lora_enabled, "LoRA is enabled"
    yield parallel.enable_eplb, "expert parallelism is load balanced (EPLB)"
    yield (
        parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel,
        ("ranks exchange tokens between attention and experts, as with data parallelism"),
    )
    yield moe.moe_backend != "auto", f"`--moe-backend {moe.moe_backend}` asks for products of vLLM"
    yield (
        current_platform.is_cpu() and importlib.util.find_spec(CPU_ROUTER) is None,
        ("this version of vLLM has no router of its own on a CPU"),
    )


def activation_of(layer: Layer) -> Activation | None:
    """What is between the two products of an expert, for `packed_experts`; None if that is not supported."""
    if layer.activation is MoEActivation.SILU:
        return Gate(limit=layer.swiglu_limit)
    return {MoEActivation.GELU: gelu_and_mul, MoEActivation.GELU_TANH: gelu_tanh_and_mul}.get(
        layer.activation
    )


def gelu_and_mul(rows: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up: [rows, 2 * inner] to [rows, inner]."""
    gate, up = rows.chunk(2, -1)
    return F.gelu(gate) * up


def gelu_tanh_and_mul(rows: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with the approximation of gelu by tanh: [rows, 2 * inner] to [rows, inner]."""
    gate, up = rows.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class PackedExpertsMethod(FusedMoEMethodBase):
    """The method of a layer whose experts are packed.

    Attributes that the layer gets:

    neuzip_experts  the HeldExperts, None until all of both weights has come
    neuzip_id       its number, int64 [1] on the CPU: a buffer, so an input of compiled graphs
    neuzip_map      int32 [all experts + 1]: the number here of each expert, -1 for those of other ranks and,
                    as the last, for slots without an expert; None if this rank has all experts
    """

    uses_meta_device = True

    def __init__(self, moe: Any, activation: Activation | None) -> None:
        super().__init__(moe)
        self.activation = activation

    def create_weights(
        self,
        layer: Layer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Give a layer its two weights, on the meta device."""
        inner = intermediate_size_per_partition
        shapes = (num_experts, 2 * inner, hidden_size), (num_experts, hidden_size, inner)
        for name, shape in zip(WEIGHTS, shapes, strict=True):
            empty = torch.empty(shape, dtype=params_dtype, device="meta")
            weight = torch.nn.Parameter(empty, requires_grad=False)
            set_weight_attrs(weight, attributes)
            layer.register_parameter(name, weight)
        layer.neuzip_shapes, layer.neuzip_dtype, layer.neuzip_experts = shapes, params_dtype, None
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Pack the weights of a layer that has all of both, one after the other, and free the dense ones."""
        if layer.neuzip_experts is not None:
            if getattr(layer, WEIGHTS[0]).is_floating_point():  # loaded once more: no packed words
                require_unpacked(layer)
            return
        gate_up, down = (_packed(layer, name) for name in WEIGHTS)
        layer.neuzip_experts = HeldExperts(gate_up, down, layer.neuzip_shapes[0][0], self.activation)
        layer.register_buffer("neuzip_id", hold_experts(layer.neuzip_experts), persistent=False)
        numbers = layer.expert_map
        if numbers is not None:
            numbers = torch.cat([numbers, numbers.new_full((1,), -1)])
        layer.register_buffer("neuzip_map", numbers, persistent=False)

    def incomplete(self, layer: Layer) -> list[str]:
        """The weights of a layer that wait for values: both if some of one came, and all of the other."""
        if layer.neuzip_experts is not None:
            return []
        came = {name for name, _ in get_layerwise_info(layer).loaded_weights}
        return [name for name in WEIGHTS if name not in came] or [*WEIGHTS]

    def get_fused_moe_quant_config(self, layer: Layer) -> None:
        """vLLM's description of quantized weights, for products of its own: none."""
        return

    def apply(
        self,
        layer: Layer,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What this rank's experts add for x [tokens, in]: [tokens, in], without shared experts.

        topk_weights, topk_ids [tokens, k]: the weights and the numbers of experts, over all ranks.
        """
        if layer.neuzip_map is not None:
            topk_ids = layer.neuzip_map[topk_ids]
        y: torch.Tensor = torch.ops.neuzip.held_experts(x, topk_ids, topk_weights, layer.neuzip_id)
        return y


def _packed(layer: Layer, name: str) -> PackedTensor:
    """A weight [experts, out, in] of a layer, packed as [experts * out, in].

    Its arrays are the layer's parameters instead of it. The words have its name: with expert parallelism vLLM
    looks for it when tensors of other ranks' experts come late.
    """
    dense = getattr(layer, name).data
    delattr(layer, name)
    with torch.device("cpu"):  # vLLM loads weights where a GPU is the default device
        packed = ops.pack(dense.reshape(-1, dense.shape[-1]).contiguous())
    for array_name, array in zip(ARRAYS, packed.arrays, strict=True):
        parameter = torch.nn.Parameter(array, requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": _load_nothing})
        own_name = name if array_name == "words" else name.replace("weight", array_name)
        layer.register_parameter(own_name, parameter)
    return packed


def _load_nothing(*_: object, **__: object) -> bool:
    """vLLM's loader of a parameter whose weights have all come: it takes nothing, and says so."""
    return False
