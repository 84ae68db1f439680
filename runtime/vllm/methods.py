"""vLLM's methods of layers whose weights are packed: linear layers, embeddings and the LM head.

A weight is made on the meta device. When all of its shards have come, vLLM fills it (its layerwise online
processing), has `process_weights_after_loading` pack it, and goes on with the next layer. So the dense model
never exists as a whole, fused weights such as qkv_proj are one packed matrix, and each rank of a tensor
parallel group packs only its own part.

Compiled graphs contain nothing of the weights' values: see `neuzip.kernels.packed_linear.held`. Each layer
keeps its PackedTensor, and with it what launches of a kernel have in common, so a launch allocates nothing on
the host that the launch before did not: vLLM runs every batch size once before it records a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm, dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from neuzip.kernels.grid_linear.tensor import ARRAYS as CODE_ARRAYS
from neuzip.kernels.grid_linear.tensor import GridTensor
from neuzip.kernels.packed_linear.held import HeldWeights, decoded, held, hold
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor
from neuzip.runtime.residency import pack_arrived
from neuzip.runtime.serving import STEPS
from neuzip.runtime.vllm.reloading import require_unpacked
from neuzip.runtime.weights import GridWeight, PackedWeight

Layer = Any
"""A module of vLLM, with the attributes that PackedWeightMethod describes."""


class PackedWeightMethod(LinearMethodBase):
    """The method of a layer with a packed weight. `exact` decodes it before each product.

    Attributes that the layer gets:

    neuzip_packed  the weight in a form of `pack_arrived`, None until all of it has come
    neuzip_steps   fp32 [out, in]: the steps of rows of quantized tensors while those come, NaN for others
    neuzip_id      its number in `held`, int64 [1] on the CPU: a buffer, so an input of compiled graphs
    neuzip_tied    the embedding that shares its weight with this LM head, in a tuple, or None
    """

    uses_meta_device = True

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        linear = UnquantizedLinearMethod()
        self._gemm = getattr(linear, "_gemm_impl", None) or dispatch_unquantized_gemm()

    def create_weights(
        self,
        layer: Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Give a layer its weight, on the meta device. A vocabulary has no rows of padding yet."""
        rows = sum(output_partition_sizes)
        layer.neuzip_rows = rows
        if isinstance(layer, VocabParallelEmbedding) and layer.num_added_embeddings == 0:
            # Without the padding, so that the layer is complete as soon as its tensor has come.
            rows = layer.shard_indices.num_org_elements or rows
        weight = ModelWeightParameter(
            data=torch.empty(rows, input_size_per_partition, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=with_steps(attributes.pop("weight_loader"), layer),
        )
        set_weight_attrs(weight, attributes)
        layer.register_parameter("weight", weight)
        layer.neuzip_columns, layer.neuzip_dtype = input_size_per_partition, params_dtype
        layer.neuzip_packed = layer.neuzip_tied = layer.neuzip_steps = None
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Pack the weight of a layer that has all of it, and free the dense one."""
        if layer.neuzip_packed is not None or layer.neuzip_tied is not None:
            if hasattr(layer, "weight"):  # which vLLM has loaded once more
                require_unpacked(layer)
            return
        dense = with_padding(layer.weight.data, layer.neuzip_rows)
        steps, layer.neuzip_steps = layer.neuzip_steps, None
        if steps is not None:
            steps = with_padding(steps[:, :1], layer.neuzip_rows)[:, 0]
        del layer.weight
        with torch.device("cpu"):  # vLLM loads weights where a GPU is the default device
            arrived = pack_arrived(dense.contiguous(), steps)
        packed = arrived.packed if isinstance(arrived, PackedWeight | GridWeight) else arrived
        layer.neuzip_packed = packed
        layer.register_buffer("neuzip_id", hold(packed), persistent=False)
        for name, array in arrays_of(packed):
            # vLLM's LoRA layers ask a layer without `weight` for the device of its `weight_packed`.
            parameter = "weight_packed" if name == "words" else f"weight_{name}"
            layer.register_parameter(parameter, torch.nn.Parameter(array, requires_grad=False))

    def is_complete(self, layer: Layer) -> bool:
        """Whether all of the weight has come. A rank may have no row of a small vocabulary."""
        if layer.neuzip_packed is not None or layer.neuzip_tied is not None:
            return True
        return isinstance(layer, VocabParallelEmbedding) and layer.shard_indices.num_org_elements == 0

    def tie_weights(self, layer: Layer, embed_tokens: Layer) -> Layer:
        """Have an LM head multiply with the weight of an embedding, which may be dense."""
        if not isinstance(embed_tokens.quant_method, PackedWeightMethod):
            layer.quant_method = UnquantizedEmbeddingMethod()
            return layer.quant_method.tie_weights(layer, embed_tokens)
        del layer.weight  # which would wait for a tensor that does not come
        layer.neuzip_tied = (embed_tokens,)
        return layer

    def apply(self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T + bias, [..., in] to [..., out]."""
        if layer.neuzip_tied is not None:
            (layer,) = layer.neuzip_tied
        if not self.exact:
            return torch.ops.neuzip.held_linear(x, bias, layer.neuzip_id, layer.neuzip_rows)
        if current_platform.is_cpu():
            return torch.ops.neuzip.vllm_cpu_linear(x, bias, layer.neuzip_id, layer.neuzip_rows)
        weight = torch.ops.neuzip.held_decode(x, layer.neuzip_id, layer.neuzip_rows)
        return self._gemm(layer, x, weight, bias)

    def embedding(self, layer: Layer, input_: torch.Tensor) -> torch.Tensor:
        """The rows of the weight that `input_` names."""
        return torch.ops.neuzip.held_rows(input_, layer.neuzip_id, layer.neuzip_columns, layer.neuzip_dtype)

    def dequantize_weight(self, layer: Layer) -> torch.Tensor:
        """The dense weight [out, in], for those of vLLM's layers that compute with it in other ways."""
        return decoded(layer.neuzip_packed)


def arrays_of(weights: HeldWeights) -> list[tuple[str, torch.Tensor]]:
    """The arrays of a weight with their names."""
    if isinstance(weights, PackedTensor):
        return [*zip(ARRAYS, weights.arrays, strict=True)]
    return (
        [*zip(CODE_ARRAYS, weights.arrays, strict=True)]
        if isinstance(weights, GridTensor)
        else [("words", weights)]
    )


def with_steps(loader: Callable[..., Any], layer: Layer) -> Callable[..., Any]:
    """vLLM's loader of a weight, which also puts the steps of quantized tensors where their rows go.

    The loader itself places them, in a matrix of steps: so they are cut and fused as the weights are.
    """

    @wraps(loader)
    def load(param: Any, loaded_weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = loader(param, loaded_weight, *args, **options)
        steps = getattr(loaded_weight, STEPS, None)
        if steps is None or param.device.type == "meta":  # where vLLM only counts values
            return result
        if layer.neuzip_steps is None:
            layer.neuzip_steps = torch.full(param.shape, torch.nan, dtype=torch.float32, device=param.device)
        places = ModelWeightParameter(
            data=layer.neuzip_steps, input_dim=1, output_dim=0, weight_loader=loader
        )
        loader(places, steps.to(param.device)[:, None].expand(loaded_weight.shape), *args, **options)
        return result

    return load


def with_padding(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A weight with so many rows: those that it lacks are copies of its last one.

    vLLM cuts the logits of such rows off. In rows of zeros, as vLLM has them, each weight would be an escape,
    and Hopper's kernel for many rows does not take a matrix with so many.
    """
    lacking = rows - weight.shape[0]
    return torch.cat([weight, weight[-1:].expand(lacking, -1)]) if lacking else weight


def _cpu_linear(
    x: torch.Tensor, bias: torch.Tensor | None, weight_id: torch.Tensor, out: int
) -> torch.Tensor:
    """The product that vLLM's unquantized method computes on a CPU, which prepares a weight for it first."""
    layer: Layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(decoded(held(weight_id)), requires_grad=False)
    layer.bias = None if bias is None else torch.nn.Parameter(bias.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    y: torch.Tensor = layer.cpu_linear(x, layer.weight, layer.bias)
    return y


_library = torch.library.Library("neuzip", "FRAGMENT")
_library.define("vllm_cpu_linear(Tensor x, Tensor? bias, Tensor weight_id, SymInt out) -> Tensor")
_library.impl("vllm_cpu_linear", _cpu_linear, "CPU")


@torch.library.register_fake("neuzip::vllm_cpu_linear", lib=_library)
def _(x: torch.Tensor, bias: torch.Tensor | None, weight_id: torch.Tensor, out: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out))
