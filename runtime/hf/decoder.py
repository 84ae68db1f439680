"""The layers of a decoder of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from neuzip.errors import NeuzipError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
