"""The cache of a language model with keys and values in few bits, as transformers takes one.

    cache = KVCache(model.config, bits=3)
    with cache.attention(model):
        model.generate(ids, past_key_values=cache)

Keys, after the rotary embedding, and values are quantised as they come, each token on its own, and packed;
any causal language model of attention layers will do, and no calibration is needed. A token attends to
quantised keys and values of all tokens, its own included, in the prompt too. Which token is the first of a
text, an attention mask tells: of a text padded on the left the first that is no padding. Layers with a
sliding window keep what is in the window.

The form "rotated" is made for keys with outlier channels: see kernels/kv_cache. The form "a4.8" is that of
BitNet a4.8 (section 3.1): a scale a token and head, and with 3 bits the first token of each text has 4.

Within `attention(model)`, on a GPU, one new token a text attends by a kernel that reads the packed form.
Elsewhere, and for prompts, the numbers of a layer are made dense again and the model's own attention takes
them; `KVCache.how` says which.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from neuzip.choices import KvForm
from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.hf.attention_names import PACKED_CACHE
from neuzip.runtime.hf.kv_attention import not_readable
from neuzip.runtime.hf.kv_layers import (
    BY_A_KERNEL,
    DEQUANTISED,
    FORMS,
    CacheFormat,
    HeadForm,
    KVLayer,
    StaticKVLayer,
)
from neuzip.runtime.hf.rotary import CenterPaths
from neuzip.runtime.hf.static_cache import TokenPositions
from neuzip.runtime.kv_bits import WHAT_THERE_IS, BitsArgument, as_bits
from neuzip.runtime.residencies import in_words

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

STATELESS = ("LinearAttentionLayer", "DummyLayer")
"""Layers of transformers without keys and values of their own: they stay as they are."""


class KVCache(Cache):
    """A quantised KV cache for transformers, given as `past_key_values` to a model or its `generate`.

    config          the config of the model
    bits            bits per key or value: 1 to 8; "8/4" for keys/values; a pair of numbers for each layer,
                    None for one without keys and values; or a plan file, see `choose_kv_bits`
    max_length      number of tokens for which memory is allocated at once; None lets the cache grow. Further
                    tokens raise IndexError on a CPU. A GPU drops them silently, as a check costs time
    form            "rotated" suits models whose keys have outlier channels; "a4.8" stores one scale per token
                    and head, as BitNet a4.8 does; or a `HeadForm`
    attention_mask  mask [B, T] of padded prompts, nonzero from the first token of each prompt on; None means
                    that no prompt is padded. The batch may be a multiple of B, as in beam search
    places          positions of the new tokens in their sequences, only with `max_length`; None means that
                    the cache counts the tokens

    `bits` of the cache are those of each layer. No gradients flow through keys and values. Raises UsageError
    for parameters that are wrong and for a plan that was made for another form, and NeuzipError for a model
    whose layers cache anything but keys and values.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        bits: BitsArgument,
        *,
        max_length: int | None = None,
        form: KvForm | HeadForm = "rotated",
        attention_mask: Tensor | None = None,
        places: TokenPositions | None = None,
    ) -> None:
        _require_arguments(config, max_length, attention_mask, places)
        first = None if attention_mask is None else (attention_mask != 0).int().argmax(-1).long()
        if isinstance(form, str) and form not in FORMS:
            raise UsageError(f"`form={form!r}`: is no form of a KV cache", f"give {in_words(FORMS)}")
        heads = FORMS[form] if isinstance(form, str) else form
        name = next((name for name, known in FORMS.items() if known == heads), None)
        chosen = as_bits(bits, "bits").in_form(name, "bits", "form")
        self.form = CacheFormat(heads, first)  # a layer that knew its cache would keep it alive
        self._paths = CenterPaths(heads.still_wavelength, heads.center_block, heads.whole)
        self._places = places
        self._model: tuple[weakref.ref[PreTrainedModel], str | None] | None = None
        text_config = config.get_text_config(decoder=True)
        plain = DynamicCache(config=text_config).layers
        self.bits = tuple(
            None if type(layer).__name__ in STATELESS else pair
            for layer, pair in zip(plain, chosen.of(len(plain), "bits"), strict=True)
        )
        layers: list[Any] = [
            self._layer(layer, index, text_config, max_length) for index, layer in enumerate(plain)
        ]
        super().__init__(layers=layers)

    def _layer(self, layer: object, index: int, config: PreTrainedConfig, max_length: int | None) -> object:
        """What stands in the place of a layer that transformers would take."""
        bits = self.bits[index]
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            if bits is None:
                raise UsageError(f"`bits`: no bits for the keys and values of layer {index}", WHAT_THERE_IS)
            path_of = None
            if self.form.heads.still_wavelength < math.inf:
                path_of = partial(self._paths.path, config, index)
            if max_length is not None:
                return StaticKVLayer(self.form, bits, max_length, self._places, path_of)
            return KVLayer(self.form, bits, getattr(layer, "sliding_window", None), path_of)
        if type(layer).__name__ in STATELESS:
            return layer
        raise NeuzipError(
            f"{config.model_type}: layer {index} keeps a {type(layer).__name__}, not keys and values alone",
            "such a cache cannot be quantised: leave out `kv_bits`",
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, including memory that is allocated for later tokens."""
        layers = [layer for layer in self.layers if isinstance(layer, KVLayer)]
        paths = {id(heads.path and heads.path.table): heads.path for layer in layers for heads in layer.heads}
        shared = sum(path.nbytes for path in paths.values() if path is not None)
        return sum(layer.nbytes for layer in layers) + shared

    @property
    def how(self) -> str:
        """How attention reads the cache, in words."""
        return self.form.how

    def require_use(self, name: str) -> None:
        """Raise NeuzipError if a model that was given this cache stored nothing in it."""
        if not any(layer.is_initialized for layer in self.layers if isinstance(layer, KVLayer)):
            raise NeuzipError(
                f"{name}: keeps no keys and values in the cache that it is given", "leave out `kv_bits`"
            )

    @contextmanager
    def attention(self, model: PreTrainedModel) -> Iterator[None]:
        """Context in which the model's attention reads the packed cache directly, if a kernel supports the
        model. `how` says what happened.
        """
        if self._model is None or self._model[0]() is not model:
            self._model = weakref.ref(model), not_readable(model)
            refused = self._model[1]
            self.form.how = BY_A_KERNEL if refused is None else f"{DEQUANTISED}: {refused}"
        if self._model[1] is not None or self.form.reads_packed:
            yield
            return
        before = model.config._attn_implementation
        if before == "sdpa":  # quantised attention hands on what is packed by itself
            model.config._attn_implementation = PACKED_CACHE
        self.form.reads_packed = True
        try:
            yield
        finally:
            self.form.reads_packed = False
            model.config._attn_implementation = before


def _require_arguments(config: object, max_length: object, attention_mask: object, places: object) -> None:
    """Raise UsageError for arguments of `KVCache` that are wrong."""
    if not hasattr(config, "get_text_config"):
        raise UsageError(f"`config`: is a {type(config).__name__}, no config", "give model.config")
    if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
        raise UsageError(f"`max_length={max_length!r}`: is no number of tokens", "give 1 or more, or None")
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2):
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else None
        what = f"has the shape {shape}" if shape is not None else f"is a {type(attention_mask).__name__}"
        raise UsageError(f"`attention_mask`: {what}", "give a tensor [texts, tokens], as the tokenizer does")
    if places is not None and max_length is None:
        raise UsageError("`places` has no effect without `max_length`", "give both, or neither")
