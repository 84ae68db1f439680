"""A cache of keys and values of fixed size: all that changes from step to step lies in tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from neuzip.kernels.step import triton_step

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass
class Places:
    """Where the tokens of a step are in their texts, for all layers of a cache: int64 on the device.

    tokens  [tokens], one behind the other
    end     [], behind the last; None where nobody asks
    """

    tokens: Tensor
    end: Tensor | None = None


class FixedLayer(StaticLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer, written where `places` says.

    transformers' own counts tokens in every layer, three small kernels each.
    """

    def __init__(self, max_length: int, places: Places) -> None:
        super().__init__(max_length)
        self.places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.max_cache_len, states.shape[3])
            for states in (key_states, value_states)
        )
        for states in (self.keys, self.values):
            torch._dynamo.mark_static_address(states)  # what is compiled writes to them where they lie
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens, [B, H, T, width]: all keys and values, of which a mask tells what counts."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        places = self.places.tokens.to(self.keys.device)
        usual = (*self.keys.shape[:2], places.numel())
        fits = key_states.shape[:3] == value_states.shape[:3] == usual
        if self.keys.is_cuda and fits and not torch.compiler.is_compiling():
            triton_step.store((self.keys, self.values), (key_states, value_states), places)
        else:
            self.keys.index_copy_(2, places, key_states)
            self.values.index_copy_(2, places, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens before those of this step: int64 [] on the device, or 0."""
        return self.places.tokens[0] if self.is_initialized else 0  # type: ignore[return-value]


def static_cache(config: PreTrainedConfig, max_length: int, places: Places) -> StaticCache:
    """A cache whose keys and values stay where they are, all layers as long as the text.

    One with a sliding window would count its tokens in Python, which a CUDA graph does not repeat. The window
    is in the mask as well, so that the result is the same: see `not_fixed`.
    """
    cache = StaticCache(config=config, max_cache_len=max_length)
    cache.layers = [
        FixedLayer(max_length, places) if type(layer) in (StaticLayer, StaticSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    return cache
