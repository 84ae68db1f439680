"""The cache of a language model with keys and values in few bits, as transformers takes one.

    cache = KVCache(model.config, bits=3)
    with cache.attention(model):
        model.generate(ids, past_key_values=cache)

Keys, after the rotary embedding, and values are quantised as they come, a scale a token and head, and packed;
any causal language model of attention layers will do, and no calibration is needed (BitNet a4.8, section
3.1). A token attends to quantised keys and values of all tokens, its own included, in the prompt too. Under 3
bits the first token of each text has 4. Which that is, an attention mask tells: of a text padded on the left
the first that is no padding. Layers with a sliding window keep what is in the window.

Within `attention(model)`, on a GPU, one new token a text attends by a kernel that reads the packed form.
Elsewhere, and for prompts, the numbers of a layer are made dense again and the model's own attention takes
them; `KVCache.how` says which.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels import kv_cache as kernels
from neuzip.kernels.kv_cache import Heads
from neuzip.kernels.quantizers.kv import Range
from neuzip.runtime.hf.static_cache import Places, head_width

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "neuzip_kv"
"""The name under which transformers knows the attention that reads packed keys and values."""

ROOM = 256
"""Tokens by which a layer grows."""

BY_A_KERNEL = "by a kernel that reads the packed form"
DEQUANTISED = "dequantised, then the model's own attention"

STATELESS = ("LinearAttentionLayer", "DummyLayer")
"""Layers of transformers without keys and values of their own: they stay as they are."""


@dataclass(eq=False)
class Form:
    """How keys and values are kept and read: what a cache and its layers have in common.

    first         int64 [B], the first token of each prompt; None: token 0
    reads_packed  whether attention now takes what is packed, and `how` it is read, in words
    """

    bits: int
    span: Range
    scale_dtype: torch.dtype
    first: Tensor | None
    reads_packed: bool = False
    how: str = DEQUANTISED

    def first_tokens(self, batch: int) -> Tensor:
        """Which token of each text is its first, int64 [batch]. Raises ValueError for another batch."""
        if self.first is None:
            return torch.zeros(batch, dtype=torch.int64)
        if batch % self.first.shape[0]:
            raise ValueError(f"{batch} texts, and a mask of {self.first.shape[0]}")
        return self.first.repeat_interleave(batch // self.first.shape[0])


@dataclass(frozen=True, eq=False)
class PackedStates:
    """What a layer hands to attention in place of dense keys or values [B, H, N, width]."""

    heads: Heads
    first: Tensor
    length: int | Tensor
    dtype: torch.dtype
    form: Form

    @property
    def shape(self) -> torch.Size:
        """That of the dense numbers."""
        return torch.Size((*self.heads.words.shape[:3], self.heads.width))

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.heads.words.device

    def dense(self) -> Tensor:
        """[B, H, N, width]."""
        return kernels.load(self.heads, self.first, self.dtype)


class KVLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, [B, H, tokens, width], in few bits; it grows by ROOM tokens.

    With a `window` it lets go of tokens that no later one sees, as transformers' sliding layers do.
    """

    is_compileable = False
    is_croppable = True
    max_length = -1

    def __init__(self, form: Form, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.form, self.window = form, window
        self.is_sliding = window is not None
        self.record_past = False
        self.key_heads: Heads | None = None
        self.value_heads: Heads | None = None
        self._forget()

    def _forget(self) -> None:
        self.start, self.end = 0, 0  # in the room
        self.gone = 0  # tokens that are no longer in it

    @property
    def nbytes(self) -> int:
        """What the room takes."""
        return sum(heads.nbytes for heads in (self.key_heads, self.value_heads) if heads is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Know shapes, dtype and device from the first states, [B, H, T, width]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.first = self.form.first_tokens(self.batch_size).to(self.device)
        self.last_first = int(self.first.max()) if self.first.numel() else 0
        tokens = max(self.max_length, 0)
        self.key_heads, self.value_heads = (
            self._room(states, tokens) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | PackedStates, Tensor | PackedStates]:
        """Add tokens, [B, H, T, width]; what they attend to: dense, or packed for T = 1 in `attention`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        self._make_room(key_states, value_states)
        begin = self.end
        self._store(key_states, value_states, begin, self.gone + begin <= self.last_first)
        self.end += tokens
        visible = self.start if self.window is None else max(self.start, begin - self.window + 1)
        shown = self._shown(visible, self.end, self.end - visible, packed=tokens == 1)
        self._let_go()
        return shown

    def _store(self, keys: Tensor, values: Tensor, at: int | Tensor, with_first: bool) -> None:
        """Write tokens. Those after the first of every text spare the search for it."""
        assert self.key_heads is not None and self.value_heads is not None
        rooms = self.key_heads, self.value_heads
        kernels.store(rooms, (keys, values), at, self.first, with_first=with_first)

    def _shown(
        self, start: int, stop: int, length: int | Tensor, *, packed: bool
    ) -> tuple[Tensor | PackedStates, Tensor | PackedStates]:
        assert self.key_heads is not None and self.value_heads is not None
        first = self.first - start if start else self.first
        found = [
            PackedStates(heads.tokens(start, stop), first, length, self.dtype, self.form)
            for heads in (self.key_heads, self.value_heads)
        ]
        keys, values = found
        return (keys, values) if packed and self.form.reads_packed else (keys.dense(), values.dense())

    def _room(self, states: Tensor, tokens: int) -> Heads:
        batch, heads, _, width = states.shape
        form = self.form
        return kernels.empty(
            (batch, heads, tokens, width), form.bits,
            span=form.span, scale_dtype=form.scale_dtype, device=states.device,
        )  # fmt: skip

    def _make_room(self, keys: Tensor, values: Tensor) -> None:
        """Move what is still there to a larger room, if the new tokens do not fit into this one."""
        assert self.key_heads is not None and self.value_heads is not None
        tokens = keys.shape[2]
        if self.end + tokens <= self.key_heads.room:
            return
        live = self.end - self.start
        wanted = -(-(live + tokens) // ROOM) * ROOM
        moved = []
        for heads, states in ((self.key_heads, keys), (self.value_heads, values)):
            room = self._room(states, wanted)
            room.tokens(0, live).copy_(heads.tokens(self.start, self.end))
            moved.append(room)
        self.key_heads, self.value_heads = moved
        self.first = self.first - self.start
        self.gone += self.start
        self.start, self.end = 0, live

    def _let_go(self) -> None:
        if self.window is not None and not self.record_past:
            self.start = max(self.start, self.end - self.window + 1)

    def activate_past_recording(self) -> None:
        """Keep tokens behind the window until `crop`."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """Tokens so far, those let go included."""
        return self.gone + self.end

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """How many tokens a mask for so many new ones has, and which is its first. (4.57 gives positions.)"""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        seen = self.gone + self.end
        offset = 0 if self.window is None else max(seen - self.window + 1, 0)
        return seen - offset + new, offset

    def get_max_length(self) -> int:
        """The window, the room of a static layer, or -1."""
        return self.max_length if self.window is None else self.window

    get_max_cache_shape = get_max_length  # transformers 4.57

    def reset(self) -> None:
        """Begin anew."""
        self.is_initialized, self.key_heads, self.value_heads = False, None, None
        self._forget()

    def crop(self, tokens: int) -> None:
        """Take off the last -`tokens`; a number above 0 is how many are to remain (transformers 4.57)."""
        seen = self.gone + self.end
        removed = -tokens if tokens <= 0 else max(seen - tokens, 0)
        if self.window is not None and removed and seen >= self.window and not self.record_past:
            raise RuntimeError(
                "a sliding window has let go of the tokens before it: call activate_past_recording first"
            )
        if self.gone + self.start and self.end - removed < self.start:
            raise RuntimeError(f"the last {removed} of {seen} tokens cannot be taken off: not all are kept")
        self.end = max(self.end - removed, self.start)
        if self.window is not None:
            self.start = max(self.start, self.end - self.window + 1)

    def _choose(self, choose: Any) -> None:
        if not self.is_initialized:
            return
        assert self.key_heads is not None and self.value_heads is not None
        self.key_heads, self.value_heads = self.key_heads.texts(choose), self.value_heads.texts(choose)
        self.first = choose(self.first)
        self.batch_size = self.first.shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Texts in another order, for beam search."""
        self._choose(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each text several times."""
        self._choose(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only some texts."""
        self._choose(lambda tensor: tensor[indices])


class StaticKVLayer(KVLayer):  # type: ignore[no-untyped-call]
    """The same in a room of fixed size that stays where it is, its length on the device: for CUDA graphs.

    A sliding window is in the mask alone. `places` says where tokens are; without, each layer counts them.
    """

    is_compileable = True  # or a mask would be left out that hides the rest of the room
    is_croppable = False

    def __init__(self, form: Form, max_length: int, places: Places | None = None) -> None:
        super().__init__(form)
        self.max_length, self.places = max_length, places
        self.length: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all."""
        super().lazy_initialization(key_states, value_states)
        if self.places is None:
            self.length = torch.zeros((), dtype=torch.int64, device=self.device)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | PackedStates, Tensor | PackedStates]:
        """See KVLayer: the whole room, of which a mask, or the length, tells what counts."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        if self.length is not None:
            self._store(key_states, value_states, self.length, with_first=True)
            end = self.length.add_(tokens)
        else:
            assert self.places is not None and self.places.end is not None
            self._store(key_states, value_states, self.places.tokens.to(self.device), with_first=True)
            end = self.places.end.to(self.device)
        return self._shown(0, self.max_length, end, packed=tokens == 1)

    def get_seq_length(self) -> int:
        """Tokens so far: int64 [] on the device, or 0."""
        if self.places is not None and self.is_initialized:
            return self.places.tokens[0]  # type: ignore[return-value]
        return self.length if self.length is not None else 0  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """All of the room."""
        return self.max_length, 0

    def reset(self) -> None:
        """Begin anew in the same memory."""
        if self.length is not None:
            self.length.zero_()

    def crop(self, tokens: int) -> None:
        """Not possible: the host does not know the length."""
        raise RuntimeError("a static cache cannot be cropped: use one that grows")


class KVCache(Cache):
    """A quantised KV cache for transformers, given as `past_key_values` to a model or its `generate`.

    config          the config of the model
    bits            bits per key or value, 1 to 8
    max_length      number of tokens for which memory is allocated at once; None lets the cache grow. Further
                    tokens raise IndexError on a CPU. A GPU drops them silently, as a check costs time
    span            "absmax" stores one scale per token and head, as a4.8 does; "minmax" also stores an
                    offset, which lowers the error
    scale_dtype     dtype of the scales
    attention_mask  mask [B, T] of padded prompts, nonzero from the first token of each prompt on; None means
                    that no prompt is padded. The batch may be a multiple of B, as in beam search
    places          positions of the new tokens in their sequences, only with `max_length`; None means that
                    the cache counts the tokens

    Raises UsageError for other bits, and NeuzipError for a model whose layers cache anything but keys and
    values.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        bits: int,
        *,
        max_length: int | None = None,
        span: Range = "absmax",
        scale_dtype: torch.dtype = torch.bfloat16,
        attention_mask: Tensor | None = None,
        places: Places | None = None,
    ) -> None:
        if not 1 <= bits <= 8:
            raise UsageError(f"`bits={bits!r}`: keys and values have 1 to 8 bits", "give 3, 4 or 8")
        first = None if attention_mask is None else (attention_mask != 0).int().argmax(-1).long()
        self.form = Form(bits, span, scale_dtype, first)  # a layer that knew its cache would keep it alive
        self._places = places
        self._asked: tuple[weakref.ref[PreTrainedModel], str | None] | None = None
        text_config = config.get_text_config(decoder=True)
        layers: list[Any] = [
            self._layer(layer, index, text_config, max_length)
            for index, layer in enumerate(DynamicCache(config=text_config).layers)
        ]
        super().__init__(layers=layers)

    def _layer(self, layer: object, index: int, config: PreTrainedConfig, max_length: int | None) -> object:
        """What stands in the place of a layer that transformers would take."""
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            if max_length is not None:
                return StaticKVLayer(self.form, max_length, self._places)
            return KVLayer(self.form, getattr(layer, "sliding_window", None))
        if type(layer).__name__ in STATELESS:
            return layer
        raise NeuzipError(
            f"{config.model_type}: layer {index} keeps a {type(layer).__name__}, not keys and values alone",
            "such a cache cannot be quantised: leave out `kv_bits`",
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, including memory that is allocated for later tokens."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, KVLayer))

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
        if self._asked is None or self._asked[0]() is not model:
            self._asked = weakref.ref(model), not_readable(model)
            refused = self._asked[1]
            self.form.how = BY_A_KERNEL if refused is None else f"{DEQUANTISED}: {refused}"
        if self._asked[1] is not None or self.form.reads_packed:
            yield
            return
        before = model.config._attn_implementation
        if before == "sdpa":  # quantised attention hands on what is packed by itself
            model.config._attn_implementation = ATTENTION
        self.form.reads_packed = True
        try:
            yield
        finally:
            self.form.reads_packed = False
            model.config._attn_implementation = before


def not_readable(model: PreTrainedModel) -> str | None:
    """Why a model's attention cannot read packed keys and values, in words; None if it can."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if any(parameter.device.type != "cuda" for parameter in model.parameters()):
        return "the kernel is for GPUs"
    if text is not config:
        return "its text model has a config of its own"
    from neuzip.runtime.hf.attention import NAMES

    name = config._attn_implementation
    if name in NAMES:  # they leave one token to what the model has by itself
        name = model.get_correct_attn_implementation(None)
    if name not in ("sdpa", ATTENTION):
        return f"its attention is {name}, not sdpa"
    if not getattr(model, "_supports_attention_backend", False):
        return "it does not let its attention be chosen"
    if getattr(text, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    width = head_width(text)
    if width is None:
        return "its config does not say one width of heads for all layers"
    group = text.num_attention_heads // (
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    )
    from neuzip.kernels.kv_cache.triton.shares import fits

    return None if fits(width, group) else f"its heads are {group} queries of {width} numbers"


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | PackedStates,
    value: Tensor | PackedStates,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, H', T, width] to [B, T, H', width']."""
    if isinstance(key, PackedStates) and isinstance(value, PackedStates):
        reason = _asks_for_more(attention_mask, dropout, options)
        if reason is None:
            found = kernels.attend(
                query[:, :, 0], key.heads, value.heads, key.first,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                length=key.length, mask=None if attention_mask is None else attention_mask[:, 0, 0],
            )  # fmt: skip
            return found[:, None], None
        key.form.how = f"{DEQUANTISED}: {reason}"
    keys, values = (x.dense() if isinstance(x, PackedStates) else x for x in (key, value))
    return sdpa_attention_forward(
        module, query, keys, values, attention_mask, dropout=dropout, scaling=scaling, **options
    )


def _asks_for_more(mask: Tensor | None, dropout: float, options: dict[str, Any]) -> str | None:
    """What a call wants that the kernel does not do, in words."""
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1):
        return "its heads have masks of their own"
    given = [name for name in ("softcap", "position_bias", "s_aux") if options.get(name) is not None]
    return f"it has a {given[0]}" if given else "it drops out weights" if dropout else None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
