"""How a person has a loaded model attend: as its config.json records, or otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from neuzip.runtime.hf.attention import Policy, patch_attention, unpatch_attention
from neuzip.runtime.hf.attention_config import LAYERS_ENTRY, Layers
from neuzip.runtime.hf.attention_names import NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AttentionChoice = Literal["recorded", "none", "8bit", "4bit"]


def choose(model: PreTrainedModel, choice: AttentionChoice, *, policy: Policy = "auto") -> Layers | None:
    """Have a model attend with layers in the bits that are recorded, in 8 or 4 each, or with none quantised.

    The bits of its layers; None if nothing is quantised, or nothing was recorded. See `patch_attention` for
    `policy` and what is raised.
    """
    unpatch_attention(model)
    recorded = LAYERS_ENTRY.get(model.config)
    if choice == "none" or (choice == "recorded" and recorded is None):
        return None
    patch_attention(model, recorded if choice == "recorded" else int(choice[0]), policy=policy, warn=False)
    return bits_in_use(model)


def bits_in_use(model: PreTrainedModel) -> Layers | None:
    """The bits of a model's layers, None if its attention is not patched."""
    text = model.config.get_text_config(decoder=True)
    return LAYERS_ENTRY.get(model.config) if text._attn_implementation in NAMES else None
