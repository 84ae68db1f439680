"""Presets of `neuzip train`: the models and the training of a paper, of which a run may scale the sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuzip.errors import UsageError

if TYPE_CHECKING:
    from transformers import BitNetConfig

HEAD_WIDTH = 64
"""Numbers of a head. Scaled models have heads of this width, so their width is a multiple of it."""

GLU_STEP = 64
"""Scaled feed-forward layers are a multiple of this wide."""


@dataclass(frozen=True)
class BitNetRecipe:
    """A model of BitNet a4.8 and its training (arXiv 2411.04965, Tables 6 and 7).

    lr, cooldown_lr  peak learning rates before and in the cooldown. The paper does not print where this
                     begins; `neuzip train` has it in the middle, as BitNet's training advice does
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    layers: int
    lr: float
    cooldown_lr: float

    def scaled(self, scale: float) -> BitNetRecipe:
        """Width, feed-forward width, heads and layers times `scale`, rounded, and at least one of each.

        >>> BITNET["bitnet-a4.8-700m"].scaled(1 / 3)
        BitNetRecipe(hidden_size=512, intermediate_size=1344, heads=8, layers=8, lr=0.0015, cooldown_lr=0.001)
        """
        if scale == 1:
            return self
        heads = max(1, round(scale * self.hidden_size / HEAD_WIDTH))
        glu = GLU_STEP * max(1, round(scale * self.intermediate_size / GLU_STEP))
        layers = max(1, round(scale * self.layers))
        return BitNetRecipe(heads * HEAD_WIDTH, glu, heads, layers, self.lr, self.cooldown_lr)

    def config(self, vocabulary: int, window: int, **more: Any) -> BitNetConfig:
        """The config of a model that has norms before o_proj and down_proj, and squared ReLU."""
        from transformers import BitNetConfig

        sizes = {
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads, "vocab_size": vocabulary, "max_position_embeddings": window,
        }  # fmt: skip
        return BitNetConfig(**(sizes | more))


BITNET = {
    "bitnet-a4.8-700m": BitNetRecipe(1536, 4096, 24, 24, 1.5e-3, 1e-3),
    "bitnet-a4.8-1.3b": BitNetRecipe(2048, 5460, 32, 24, 1.2e-3, 8e-4),
    "bitnet-a4.8-3b": BitNetRecipe(3200, 8640, 32, 26, 1.2e-3, 6.4e-4),
    "bitnet-a4.8-7b": BitNetRecipe(4096, 11008, 32, 32, 1e-3, 6e-4),
}
"""By the names of presets."""

COMMON: dict[str, Any] = {
    "ternary": "a4.8", "window": 2048, "batch_size": 512, "warmup_steps": 375, "weight_decay": 0.1,
}  # fmt: skip
"""Keys that all presets have in common: batches of 1 M tokens, and the activations of the paper."""


def int8_steps(fraction: float, steps: int) -> int:
    """How many of all steps have 8-bit activations, before those of the second stage.

    >>> int8_steps(0.95, 200)
    190
    """
    return round(fraction * steps)


def preset_keys(name: str) -> dict[str, Any]:
    """The keys of a training run that a preset gives. Raises UsageError."""
    if name not in BITNET:
        raise UsageError(f"there is no preset {name!r}", f"choose from {', '.join(BITNET)}")
    recipe = BITNET[name]
    return {**COMMON, "lr": recipe.lr, "cooldown_lr": recipe.cooldown_lr}
