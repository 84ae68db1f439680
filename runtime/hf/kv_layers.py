"""Keys and values of one layer in few bits, as layers of transformers' caches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from neuzip.choices import KvForm
from neuzip.errors import UsageError
from neuzip.kernels import kv_cache as kernels
from neuzip.kernels.kv_cache import CenterPath, Heads
from neuzip.kernels.kv_cache.centers import LEAST_BLOCK
from neuzip.runtime.hf.static_cache import TokenPositions
from neuzip.runtime.kv_bits import LayerBits

GROWTH = 256
"""Tokens by which a layer grows."""

BY_A_KERNEL = "by a kernel that reads the packed form"
DEQUANTISED = "dequantised, then the model's own attention"

PathOf = Callable[[int, int, torch.device], CenterPath]
"""Gives the path of the center of keys, from the width of a key, the tokens of a text, and a device."""


@dataclass(frozen=True)
class HeadForm:
    """How the numbers of heads are made codes: see kernels/kv_cache.

    key_group, value_group  numbers of a rotated head that share a scale; None: the plain form of BitNet a4.8
    whole                   tokens at the begin of each text that are kept as they are
    still_wavelength        tokens in which a channel of keys turns once, from which on the mean of the whole
                            tokens is subtracted from it; infinity: from none
    center_block            tokens from which the same center is subtracted: that mean, turned as the rotary
                            embedding turns keys; None: it does not turn
    """

    key_group: int | None
    value_group: int | None
    whole: int = 0
    still_wavelength: float = math.inf
    center_block: int | None = 128

    def __post_init__(self) -> None:
        groups = [group for group in (self.key_group, self.value_group) if group is not None]
        if self.whole < 0 or any(group < 1 for group in groups) or not self.still_wavelength >= 0:
            raise UsageError(f"`form={self!r}`: groups have 1 or more numbers, and no number is below 0")
        if self.center_block is not None and self.center_block < LEAST_BLOCK:
            raise UsageError(f"`form={self!r}`: `center_block` is {LEAST_BLOCK} tokens or more")


FORMS: dict[KvForm, HeadForm] = {
    "rotated": HeadForm(key_group=32, value_group=64, whole=6, still_wavelength=512.0),
    "a4.8": HeadForm(key_group=None, value_group=None),
}
"""The forms by their names."""


@dataclass(eq=False)
class CacheFormat:
    """How keys and values are kept and read: what a cache and its layers have in common.

    heads         how numbers are made codes
    first         int64 [B], the first token of each prompt; None: token 0
    reads_packed  whether attention now takes what is packed, and `how` it is read, in words
    """

    heads: HeadForm
    first: Tensor | None
    reads_packed: bool = False
    how: str = DEQUANTISED

    def first_tokens(self, batch: int) -> Tensor:
        """Which token of each text is its first, int64 [batch]. Raises UsageError for another batch."""
        if self.first is None:
            return torch.zeros(batch, dtype=torch.int64)
        if batch % self.first.shape[0]:
            raise UsageError(
                f"`attention_mask`: is of {self.first.shape[0]} texts, and the model is given {batch}",
                "give the mask of the prompts, or make a new KVCache for another batch",
            )
        return self.first.repeat_interleave(batch // self.first.shape[0])

    def allocate(
        self, states: Tensor, tokens: int, bits: int, group: int | None, path: CenterPath | None
    ) -> Heads:
        """Memory for so many tokens like `states` [B, H, T, width]; for the others see `kernels.empty`."""
        batch, heads, _, width = states.shape
        return kernels.empty(
            (batch, heads, tokens, width), bits,
            group=group, whole=self.heads.whole, path=path, dtype=states.dtype, device=states.device,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PackedStates:
    """What a layer hands to attention in place of dense keys or values [B, H, N, width]."""

    heads: Heads
    first: Tensor
    length: int | Tensor
    dtype: torch.dtype
    form: CacheFormat

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
    """Keys and values of one layer, [B, H, tokens, width], in few bits; it grows by GROWTH tokens.

    With a `window` it lets go of tokens that no later one sees, as transformers' sliding layers do. `path_of`
    says which channels of keys have a center and how it turns: `rotary.CenterPaths`.
    """

    is_compileable = False
    is_croppable = True
    max_length = -1

    def __init__(
        self,
        form: CacheFormat,
        bits: LayerBits,
        window: int | None = None,
        path_of: PathOf | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.form, self.bits, self.window, self.path_of = form, bits, window, path_of
        self.is_sliding = window is not None
        self.record_past = False
        self.key_heads: Heads | None = None
        self.value_heads: Heads | None = None
        self._forget()

    def _forget(self) -> None:
        self.start, self.end = 0, 0  # in memory
        self.gone = 0  # tokens that are no longer in it

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, with memory for later tokens; the path of centers counts by itself."""
        return sum(heads.nbytes for heads in self.heads)

    @property
    def heads(self) -> tuple[Heads, ...]:
        """Keys and values as they are stored; none before the first token."""
        return tuple(heads for heads in (self.key_heads, self.value_heads) if heads is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Know shapes, dtype and device from the first states, [B, H, T, width]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.first = self.form.first_tokens(self.batch_size).to(self.device)
        self.last_first = int(self.first.max()) if self.first.numel() else 0
        tokens = max(self.max_length, 0)
        form = self.form.heads
        path = self._path(key_states.shape[3], tokens)
        self.key_heads = self.form.allocate(key_states, tokens, self.bits.keys, form.key_group, path)
        self.value_heads = self.form.allocate(value_states, tokens, self.bits.values, form.value_group, None)
        self.is_initialized = True

    def _path(self, width: int, tokens: int) -> CenterPath | None:
        """The path of the center of keys for texts of so many tokens; None without a center."""
        return None if self.path_of is None else self.path_of(width, tokens, self.device)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | PackedStates, Tensor | PackedStates]:
        """Add tokens, [B, H, T, width]; what they attend to: dense, or packed for T = 1 in `attention`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        self._reserve(key_states, value_states)
        begin = self.end
        with_first = self.gone + begin < self.last_first + max(1, self.form.heads.whole)
        self._store(key_states, value_states, begin, with_first)
        self.end += tokens
        visible = self.start if self.window is None else max(self.start, begin - self.window + 1)
        shown = self._shown(visible, self.end, self.end - visible, packed=tokens == 1)
        self._let_go()
        return shown

    def _store(self, keys: Tensor, values: Tensor, at: int | Tensor, with_first: bool) -> None:
        """Write tokens. Those after the first of every text spare the search for it."""
        assert self.key_heads is not None and self.value_heads is not None
        if keys.shape[0] != self.batch_size:
            raise UsageError(
                f"a KV cache of {self.batch_size} texts is given tokens of {keys.shape[0]}",
                "make a new KVCache for another batch",
            )
        both = self.key_heads, self.value_heads
        kernels.store(both, (keys, values), at, self.first, with_first=with_first)

    def _shown(
        self, start: int, stop: int, length: int | Tensor, *, packed: bool
    ) -> tuple[Tensor | PackedStates, Tensor | PackedStates]:
        assert self.key_heads is not None and self.value_heads is not None
        first = self.first - start if start else self.first
        states = [
            PackedStates(heads.tokens(start, stop), first, length, self.dtype, self.form)
            for heads in (self.key_heads, self.value_heads)
        ]
        keys, values = states
        return (keys, values) if packed and self.form.reads_packed else (keys.dense(), values.dense())

    def _reserve(self, keys: Tensor, values: Tensor) -> None:
        """Move what is still there to larger memory, if the new tokens do not fit into this one."""
        assert self.key_heads is not None and self.value_heads is not None
        tokens = keys.shape[2]
        if self.end + tokens <= self.key_heads.capacity:
            return
        live = self.end - self.start
        wanted = -(-(live + tokens) // GROWTH) * GROWTH
        moved = []
        path = self._path(keys.shape[3], self.gone + self.start + wanted)
        for heads, states in ((self.key_heads, keys), (self.value_heads, values)):
            path_of_these = None if heads.path is None else path
            larger = self.form.allocate(states, wanted, heads.bits, heads.group, path_of_these)
            larger.tokens(0, live).copy_(heads.tokens(self.start, self.end))
            moved.append(larger)
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
        """The window, the capacity of a static layer, or -1."""
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
    """Keys and values of one layer in memory of fixed size, their number on the device: for CUDA graphs.

    A sliding window is in the mask alone. `places` says where tokens are; without, each layer counts them.
    """

    is_compileable = True  # or a mask would be left out that hides the rest of the memory
    is_croppable = False

    def __init__(
        self,
        form: CacheFormat,
        bits: LayerBits,
        max_length: int,
        places: TokenPositions | None = None,
        path_of: PathOf | None = None,
    ) -> None:
        super().__init__(form, bits, path_of=path_of)
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
        """Add tokens, [B, H, T, width]; all of the memory: a mask, or the length, tells what counts."""
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
        """All of the memory."""
        return self.max_length, 0

    def reset(self) -> None:
        """Begin anew in the same memory."""
        if self.length is not None:
            self.length.zero_()

    def crop(self, tokens: int) -> None:
        """Not possible: the host does not know the length."""
        raise RuntimeError("a static cache cannot be cropped: use one that grows")
