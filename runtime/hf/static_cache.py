"""A cache of keys and values of fixed size: all that changes from step to step lies in tensors.

    cache = static_cache(model.config, max_length, places, padded=can_pad(model))
    with cache.attention():
        ...

Of heads whose width is no multiple of 8, torch's fused attention takes none in 16 bits that come with a mask,
as steps do: scores, mask, softmax and products become kernels by themselves, in fp32, for which keys and
values are copied in each step. So rows of a `padded` cache are wider, with zeros behind, and within
`attention()` so are queries of such keys: scores are the same but for the order of sums, and what the zeros
of values give is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neuzip.runtime.hf.registry import registered

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MULTIPLE = 8
"""Numbers of 16 bits in the 16 bytes that fused kernels load."""


@dataclass
class TokenPositions:
    """Where the tokens of a step are in their texts, for all layers of a cache: int64 on the device.

    tokens  [tokens], one behind the other
    end     [], behind the last; None where nobody asks
    """

    tokens: Tensor
    end: Tensor | None = None


class FixedLayer(StaticLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer, written where `places` says.

    transformers' own counts tokens in every layer, three small kernels each. `padded`: keys and values, if
    they are equally wide, become a multiple of 8 wide.
    """

    def __init__(self, max_length: int, places: TokenPositions, padded: bool = False) -> None:
        super().__init__(max_length)
        self.places, self.padded = places, padded

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all."""
        self.dtype, self.device = key_states.dtype, key_states.device
        widths = key_states.shape[3], value_states.shape[3]
        more = -widths[0] % MULTIPLE if self.padded and widths[0] == widths[1] else 0
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.max_cache_len, states.shape[3] + more)
            for states in (key_states, value_states)
        )
        for states in (self.keys, self.values):
            torch._dynamo.mark_static_address(states)  # what is compiled writes to them where they lie
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens, [B, H, T, width]: all keys and values, padded, of which a mask tells what counts."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        places = self.places.tokens.to(self.keys.device)
        usual = (*self.keys.shape[:2], places.numel())
        fits = key_states.shape[:3] == value_states.shape[:3] == usual
        if self.keys.is_cuda and fits and not torch.compiler.is_compiling():
            from neuzip.kernels.step.triton import step as triton_step

            triton_step.store((self.keys, self.values), (key_states, value_states), places)
        else:
            self.keys[..., : key_states.shape[3]].index_copy_(2, places, key_states)
            self.values[..., : value_states.shape[3]].index_copy_(2, places, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens before those of this step: int64 [] on the device, or 0."""
        return self.places.tokens[0] if self.is_initialized else 0  # type: ignore[return-value]


class FixedCache(StaticCache):
    """The layers of a model, most of them `FixedLayer`."""

    @property
    def padded(self) -> bool:
        """Whether keys and values may be wider than the heads of the model."""
        return any(isinstance(layer, FixedLayer) and layer.padded for layer in self.layers)

    def reset(self) -> None:
        """Write zeros to all keys and values, of fixed layers in one launch. Nothing counts their tokens."""
        states: list[Tensor] = []
        for layer in self.layers:
            if type(layer) is not FixedLayer:
                layer.reset()
            elif layer.is_initialized:
                assert layer.keys is not None and layer.values is not None
                states += layer.keys, layer.values
        if states:
            torch._foreach_zero_(states)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Let models attend to what is padded, if it is; under the name sdpa, which some look at.

        The masks of models that attend eagerly, as gpt-oss does, are made on the device.
        """
        with ExitStack() as stack:  # results are the same for whoever else attends meanwhile
            stack.enter_context(registered(ALL_MASK_ATTENTION_FUNCTIONS, "eager", _eager_mask))
            if self.padded:
                stack.enter_context(registered(ALL_ATTENTION_FUNCTIONS, "sdpa", _attend))
            yield


_sdpa_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def _eager_mask(*arguments: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor | None:
    """transformers' mask of numbers: 0 where a key is seen, else the lowest number of the dtype.

    transformers before 5.22 copied the 0 from the host, which cannot be captured in a CUDA graph.
    """
    mask: Tensor | None = _sdpa_mask(*arguments, **options | {"allow_is_causal_skip": False})
    if mask is None:
        return None
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)


def static_cache(
    config: PreTrainedConfig, max_length: int, places: TokenPositions, *, padded: bool = False
) -> FixedCache:
    """A cache whose keys and values stay where they are, all layers as long as the text.

    One with a sliding window would count its tokens in Python, which a CUDA graph does not repeat. The window
    is in the mask as well, so that the result is the same: see `not_fixed`.
    """
    cache = FixedCache(config=config, max_cache_len=max_length)
    cache.layers = [
        FixedLayer(max_length, places, padded)
        if type(layer) in (StaticLayer, StaticSlidingWindowLayer)
        else layer
        for layer in cache.layers
    ]
    return cache


def can_pad(model: PreTrainedModel) -> bool:
    """Whether padding the heads of a model lets fused attention take them, and it can be given that."""
    config = model.config
    if config.get_text_config(decoder=True) is not config or config._attn_implementation != "sdpa":
        return False
    if model.dtype not in (torch.bfloat16, torch.float16) or not all(p.is_cuda for p in model.parameters()):
        return False
    width = head_width(config)
    return bool(width and width % MULTIPLE and getattr(model, "_supports_attention_backend", False))


def head_width(config: PreTrainedConfig) -> int | None:
    """The width of a model's heads, None unless it says it and all are alike."""
    try:
        heads, size = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
        return getattr(config, "head_dim", None) or (heads and size and size // heads)
    except RuntimeError:  # of a config whose layers have other widths each
        return None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """SDPA as transformers calls it: query [B, H', T, width] to [B, T, H', width], and keys may be wider."""
    width, more = query.shape[-1], key.shape[-1] - query.shape[-1]
    if more:
        query, scaling = F.pad(query, (0, more)), width**-0.5 if scaling is None else scaling
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    return output[..., :width].contiguous() if more else output, None
