"""Facts of decoders of transformers: their layers, how many tokens they take, and on which device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuzip.errors import NeuzipError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The one list of as many modules as the configuration says, of the decoder before any other part.

    Raises NeuzipError if there is none.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    whole: Any = model
    for place in (whole.get_decoder(), whole):
        for module in place.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
    raise NeuzipError(
        f"{model.config.name_or_path}: {type(model).__name__} has no list of {count} layers",
        "only decoders that are one such list can be taken apart",
    )


def positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a model was made for, prompt and all; None if it does not say."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: the first of its devices if it has several."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.device
