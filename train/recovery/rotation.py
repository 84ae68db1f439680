"""The residual stream in another basis: the same model, with weights in which no direction stands out.

With an orthogonal Q, embeddings become E Q, weights that read the stream W diag(g) Q and those that write it
Q^T W, where g is the gain of the RMS norm before, which becomes 1: an RMS norm without gain commutes with Q.
So QuaRot (arXiv 2404.00456), of which this is the part that costs nothing when the model runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuzip.errors import NeuzipError
from neuzip.runtime.hf.decoder import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Linear modules of a layer that read the stream, by the norm before them."""

WRITERS = ("self_attn.o_proj", "mlp.down_proj")
"""Linear modules of a layer that write the stream."""

TOLERANCE = 1e-3
"""Most relative change of logits by rounding: above it the model is another one."""


@torch.no_grad()
def rotate(model: PreTrainedModel, seed: int = 0) -> None:
    """Rotate the residual stream of an fp32 model of Llama's form, in place. A tied head becomes its own.

    Raises NeuzipError for a model of another form, and if logits come out otherwise.
    """
    probe = torch.arange(min(32, model.config.vocab_size), device=model.device)[None]
    before = model(probe).logits
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.clone())
        model.config.tie_word_embeddings = False
    q = orthogonal(embedding.weight.shape[1], seed).to(model.device)
    embedding.weight.copy_(embedding.weight.double() @ q)
    for layer in decoder_layers(model):
        for norm, readers in READERS.items():
            _read(_part(layer, norm), [_part(layer, reader) for reader in readers], q)
        for writer in WRITERS:
            linear = _part(layer, writer)
            linear.weight.copy_(q.T @ linear.weight.double())
            if linear.bias is not None:
                linear.bias.copy_(linear.bias.double() @ q)
    _read(_part(model.base_model, "norm"), [head], q)
    off = (model(probe).logits - before).norm() / before.norm()
    if not off <= TOLERANCE:
        raise NeuzipError(
            f"{type(model).__name__} is another model when it is rotated: logits differ by {off:.0%}",
            "only models of Llama's form can be rotated",
        )


def orthogonal(size: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix, fp64: a Hadamard matrix of random signs, times a random one for an odd factor."""
    generator = torch.Generator().manual_seed(seed)
    odd = size // (size & -size)
    q, r = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
    q = (q * r.diagonal().sign()).contiguous()
    for _ in range(int(math.log2(size // odd))):
        q = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), q) / math.sqrt(2)
    rotation: Tensor = q * (torch.randint(2, (size,), generator=generator) * 2.0 - 1)
    return rotation


def _part(module: nn.Module, name: str) -> Any:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise NeuzipError(
            f"{type(module).__name__} has no {name}", "only models of Llama's form can be rotated"
        ) from error


def _read(norm: Any, readers: list[Any], q: Tensor) -> None:
    """Move the gain of a norm into what reads it, and rotate that."""
    if getattr(norm, "bias", None) is not None:
        raise NeuzipError(f"{type(norm).__name__} has a bias", "only models of Llama's form can be rotated")
    gain: Tensor = norm.weight.double()
    for linear in readers:
        linear.weight.copy_(linear.weight.double() * gain @ q)
    norm.weight.fill_(1.0)
