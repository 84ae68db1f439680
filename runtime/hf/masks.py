"""Which keys queries see, in the words of the attention kernel, as transformers' mask functions say it.

transformers asks for a mask once a forward pass, by `mask`, and hands it to every layer. The kernel wants no
mask but a pattern, where the keys end, and which tokens are padding. `DeferredMask` is a tensor that says so
and becomes SDPA's mask when anything else looks into it: it may cost time, but is never lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

aten = torch.ops.aten
_sdpa_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Those of a batch that are no padding.

    index    int64 [T], of the batch's B * N tokens
    starts   int32 [B + 1], where each text begins among these T
    longest  how many a text has at most
    """

    index: Tensor
    starts: Tensor
    longest: int

    @staticmethod
    def of(valid: Tensor) -> RealTokens:
        """`valid` bool [B, N]."""
        lengths = valid.sum(1)
        starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        return RealTokens(valid.flatten().nonzero()[:, 0], starts, int(lengths.max()))

    def to(self, device: torch.device) -> RealTokens:
        """The tokens with their indices on a device."""
        return RealTokens(self.index.to(device), self.starts.to(device), self.longest)

    def take(self, x: Tensor) -> Tensor:
        """Theirs of [B, H, N, D], as [T, H, D]."""
        return x.transpose(1, 2).flatten(0, 1)[self.index]

    def put(self, x: Tensor, tokens: int) -> Tensor:
        """[T, H, D] as [B, N, H, D], 0 for padding."""
        batch = self.starts.shape[0] - 1
        out = x.new_zeros(batch * tokens, *x.shape[1:])
        out[self.index] = x
        return out.view(batch, tokens, *x.shape[1:])


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """What queries see of the first `keys` keys.

    causal   the last query sees all of them, the one before it all but the last ...
    window   ... and of these this many, the latest
    tokens   queries and keys that are no padding; None: all
    """

    keys: int
    causal: bool = False
    window: int | None = None
    tokens: tuple[RealTokens, RealTokens] | None = None

    def to(self, device: torch.device) -> VisibleKeys:
        """The keys with their tokens on a device."""
        tokens = None if self.tokens is None else (self.tokens[0].to(device), self.tokens[1].to(device))
        return VisibleKeys(self.keys, self.causal, self.window, tokens)


class DeferredMask(torch.Tensor):
    """A mask, bool [B, 1, Nq, Nk], that is made when something other than our attention asks for it.

    arguments  those of transformers' mask functions
    seen       what it says
    cache      the mask by device, once there is one; copies share it
    """

    arguments: dict[str, Any]
    seen: VisibleKeys
    cache: dict[torch.device, Tensor]

    @staticmethod
    def of(
        shape: Sequence[int],
        device: torch.device,
        arguments: dict[str, Any],
        seen: VisibleKeys,
        cache: dict[torch.device, Tensor],
    ) -> DeferredMask:
        """A mask without memory."""
        mask: DeferredMask = torch.Tensor._make_wrapper_subclass(
            DeferredMask, shape, dtype=torch.bool, device=device
        )
        mask.arguments, mask.seen, mask.cache = arguments, seen, cache
        return mask

    def on(self, device: torch.device) -> DeferredMask:
        """The mask on a device."""
        return DeferredMask.of(self.shape, device, self.arguments, self.seen.to(device), self.cache)

    def dense(self) -> Tensor:
        """The mask; all layers get the same."""
        if self.device not in self.cache:
            never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self.cache[self.device] = _sdpa_mask(**{**self.arguments, **never}).to(self.device)
        return self.cache[self.device]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.seen})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return args[0].on(args[0].device)
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            return args[0].on(torch.device(kwargs.get("device") or args[0].device))
        if func._schema.is_mutable:
            raise RuntimeError("a mask that is not made yet cannot be changed in place: clone it first")
        args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs))
        return func(*args, **kwargs)


def mask(**arguments: Any) -> Tensor | None:
    """What transformers calls for a mask, as it calls SDPA's function: None where that makes none."""
    new, offset = arguments.get("q_length"), arguments.get("q_offset")
    if "cache_position" in arguments:  # transformers 4.57
        new, offset = arguments["cache_position"].shape[0], arguments["cache_position"][0]
    if torch.compiler.is_compiling() or type(new) is not int or new == 1 or offset is None:
        return _sdpa_mask(**arguments)  # type: ignore[no-any-return]
    pattern = _pattern(_without_packing(arguments["mask_function"]))
    if pattern is None:
        return _sdpa_mask(**arguments)  # type: ignore[no-any-return]
    # With a pattern that hides nothing it is cheap, and says whether there is a mask and what is padding.
    rows = _sdpa_mask(**{**arguments, "mask_function": _all_keys, "use_vmap": False})
    if rows is None:
        return None
    causal, window = pattern
    length = arguments["kv_length"]
    keys = int(offset) + new - arguments["kv_offset"] if causal else length
    seen = _seen(rows[:, 0, 0], new, keys, causal, window) if keys <= length else None
    if seen is None:
        return _sdpa_mask(**arguments)  # type: ignore[no-any-return]
    return DeferredMask.of(rows.shape, rows.device, arguments, seen, {})


def _all_keys(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key >= 0


_SLIDING: Any = masking_utils.sliding_window_causal_mask_function(1)
_OVERLAY: Any = masking_utils.sliding_window_overlay(1)
_PACKED: Any = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1))
_BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", masking_utils)  # 4.57 has none


def _pattern(function: Any) -> tuple[bool, int | None] | None:
    """Whether a mask function is causal, and its window. None for what the kernel has no word for.

    Functions are recognised by their code: what another version of transformers may write otherwise, or what
    is composed of more, is none of these.
    """
    if function is masking_utils.causal_mask_function:
        return True, None
    if function is _BIDIRECTIONAL:
        return False, None
    overlay, *others = _intersected(function) or (None,)
    is_overlay = getattr(overlay, "__code__", None) is _OVERLAY.__code__
    if not is_overlay or others != [masking_utils.causal_mask_function]:
        return None
    return True, inspect.getclosurevars(overlay).nonlocals["sliding_window"]


def _without_packing(function: Any) -> Any:
    """A mask function less its part that keeps packed texts apart, if each row of the batch is one text.

    Version 4.57 adds that part to every mask without a cache, version 5 to those of packed texts only.
    """
    parts = _intersected(function)
    if len(parts) != 2 or getattr(parts[1], "__code__", None) is not _PACKED.__code__:
        return function
    texts = inspect.getclosurevars(parts[1]).nonlocals["packed_sequence_mask"]
    return parts[0] if bool((texts == texts[:, :1]).all()) else function


def _intersected(function: Any) -> tuple[Any, ...]:
    """The mask functions of which one is the intersection; none if it is no intersection."""
    if getattr(function, "__code__", None) is not _SLIDING.__code__:
        return ()
    parts: tuple[Any, ...] = inspect.getclosurevars(function).nonlocals["mask_functions"]
    return parts


def _seen(valid: Tensor, queries: int, keys: int, causal: bool, window: int | None) -> VisibleKeys | None:
    """What is seen of keys; `valid`, bool [B, Nk], are no padding. None for what the kernel cannot do.

    With a causal mask the queries are the last of `keys`, and padding as they are.
    """
    if causal and keys < queries:
        return None
    valid = valid[:, :keys]
    if bool(valid.all()):
        return VisibleKeys(keys, causal, window)
    if window is not None:  # it counts padding between two tokens, which the kernel does not see
        runs = valid[:, 0].long() + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
        if bool((runs > 1).any()):
            return None
    asking = valid[:, keys - queries :] if causal else valid.new_ones(valid.shape[0], queries)
    return VisibleKeys(keys, causal, window, (RealTokens.of(asking), RealTokens.of(valid)))


def seen(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> VisibleKeys | None:
    """What a mask says to queries [B, H, Nq, D], as SDPA reads it. None for what the kernel cannot do."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        if queries == 1 or not is_causal:
            return VisibleKeys(keys)
        # SDPA's triangle begins at the top left: further keys are memory of an empty cache.
        return VisibleKeys(queries, causal=True) if keys >= queries else None
    if mask.shape != (query.shape[0], 1, queries, keys):
        return None
    if isinstance(mask, DeferredMask):
        return mask.seen
    if queries > 1 or mask.dtype != torch.bool or _is_captured(mask):
        return None
    return _seen(mask[:, 0, 0], 1, keys, False, None)


def _is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being made, in which nobody may look at values."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
