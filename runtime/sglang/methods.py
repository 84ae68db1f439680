"""SGLang's methods of layers whose weights are packed: linear layers, embeddings and the LM head.

They are no subclasses of SGLang's unquantized methods: SGLang gives the weights of those to kernels that read
their bytes. `layer.weight` is a PackedWeight, which is a tensor of the dense weight's shape and dtype: what
SGLang computes with it in other ways, it decodes. The methods themselves use the operators of
`neuzip.kernels.packed_linear.held`, so a compiled graph contains nothing of the weights' values.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.utils import set_weight_attrs

from neuzip.runtime.sglang.arrival import ArrivingWeight, finish
from neuzip.runtime.weights.packed import can_be_packed


def linear_method(layer: Any, exact: bool) -> QuantizeMethodBase:
    """The method of a linear layer of SGLang: packed if it is large enough to gain by that."""
    if can_be_packed(layer.output_size, layer.input_size):
        return PackedLinearMethod(exact)
    return UnquantizedLinearMethod()


def embedding_method(layer: Any, exact: bool) -> QuantizeMethodBase:
    """The method of an embedding or an LM head of SGLang: packed if it is large enough to gain by that."""
    if can_be_packed(layer.num_embeddings, layer.embedding_dim):
        return PackedEmbeddingMethod(exact)
    return UnquantizedEmbeddingMethod()


def create_packed(
    layer: Any, columns: int, rows: int, dtype: torch.dtype, exact: bool, attributes: dict[str, Any]
) -> None:
    """Give a layer a weight on the meta device, whose loader packs it when all of its parts have come."""
    weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype, device="meta"), requires_grad=False)
    attributes = {"input_dim": 1, "output_dim": 0, **attributes}
    loader = ArrivingWeight(layer, attributes.pop("weight_loader"), attributes, exact)
    set_weight_attrs(weight, {**attributes, "weight_loader": loader})
    layer.register_parameter("weight", weight)
    layer.neuzip_rows, layer.neuzip_columns, layer.neuzip_dtype = rows, columns, dtype


class PackedLinearMethod(LinearMethodBase):
    """The method of a linear layer with a packed weight. `exact` decodes it before each product."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give a layer the weight of this rank, [sum of the output partitions, input partition]."""
        rows = sum(output_partition_sizes)
        create_packed(layer, input_size_per_partition, rows, params_dtype, self.exact, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise EngineRefusal if a part of the weight has not come."""
        finish(layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight.T + bias, [..., in] to [..., out]."""
        if not self.exact:
            return torch.ops.neuzip.held_linear(x, bias, layer.neuzip_id, layer.neuzip_rows)
        return self._exact_product(x, self._decoded(layer, x), bias)

    def _decoded(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.neuzip.held_decode(x, layer.neuzip_id, layer.neuzip_rows)

    def _exact_product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product that SGLang computes with a dense weight."""
        dense: Any = SimpleNamespace(weight=weight)
        return UnquantizedLinearMethod().apply(dense, x, bias)


class PackedEmbeddingMethod(PackedLinearMethod):
    """The method of an embedding or an LM head with a packed weight."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """The rows of the weight that `input_` names, [*input_.shape, in]."""
        return torch.ops.neuzip.held_rows(input_, layer.neuzip_id, layer.neuzip_columns, layer.neuzip_dtype)

    def _exact_product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits that SGLang computes with a dense weight, to which it adds no bias."""
        return torch.matmul(x.to(weight.dtype), weight.T)
