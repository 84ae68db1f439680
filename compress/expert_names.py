"""Names of tensors that hold one expert of a mixture, as checkpoints of transformers write them."""

from __future__ import annotations

import re
from typing import NamedTuple

_EXPERT = re.compile(r"((?:.*?\.)?)(\d+)(\..*?\bexperts\.)(\d+)(\..+)")


class ExpertName(NamedTuple):
    """A tensor of one expert: what stands before the number of its layer, both numbers, and `kind`.

    The kind is the name with `*` for the expert: it stands for the same tensor of all experts of the layer.
    """

    stack: str
    layer: int
    expert: int
    kind: str


def expert_name(name: str) -> ExpertName | None:
    """The parts of a tensor's name; None if the tensor is not that of a single expert.

    >>> expert_name("model.layers.3.mlp.experts.17.w1.weight")
    ExpertName(stack='model.layers.', layer=3, expert=17, kind='model.layers.3.mlp.experts.*.w1.weight')
    >>> expert_name("model.layers.3.mlp.shared_experts.w1.weight") is None
    True
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    stack, layer, between, expert, rest = match.groups()
    return ExpertName(stack, int(layer), int(expert), f"{stack}{layer}{between}*{rest}")
