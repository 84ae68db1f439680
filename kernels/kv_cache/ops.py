"""Heads in few bits, in plain torch: what they are, how they are written and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neuzip.kernels.kv_cache.centers import CenterPath
from neuzip.kernels.quantizers import (
    GroupedHeads,
    group_count,
    hadamard,
    pack,
    quantize_groups,
    quantize_heads,
    unpack,
    words,
)

EXTRA_BIT = 3
"""The number of bits with which the first token has one more, in the plain form."""

BLOCK = 1 << 18
"""Numbers that are written or read at a time, so that intermediate arrays stay in the caches of a CPU."""

OF_TOKENS, OF_TEXTS = ("words", "scale", "zero"), ("first_bits", "first", "center")
"""The arrays of `Heads` that have an entry for each token, and those that have one for each text."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Memory for the keys or the values of N tokens of B texts, see the package for the shapes.

    path   which channels have a center and how it turns; heads of many layers may share it
    width  numbers of a head
    bits   of a code, 1 to 8
    group  numbers of a rotated head that share a scale and a zero point; None in the plain form
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    first_bits: Tensor | None
    first: Tensor | None
    center: Tensor | None
    path: CenterPath | None
    width: int
    bits: int
    group: int | None

    @property
    def capacity(self) -> int:
        """How many tokens fit in."""
        return self.words.shape[2]

    @property
    def whole(self) -> int:
        """How many tokens at the begin of each text are kept as they are."""
        return 0 if self.first is None else self.first.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, whether tokens are in them or not; `path` counts by itself."""
        held = (getattr(self, name) for name in (*OF_TOKENS, *OF_TEXTS))
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def tokens(self, start: int, stop: int) -> Heads:
        """The slice from one token to another: the same memory, what belongs to a whole text as it is."""
        return self.tokens_changed(lambda tensor: tensor[:, :, start:stop])

    def tokens_changed(self, change: Callable[[Tensor], Tensor]) -> Heads:
        """Other tokens in place of these: `change` is given what tokens have, [B, H, N, ...] each."""
        return self._with(change, OF_TOKENS)

    def texts(self, choose: Callable[[Tensor], Tensor]) -> Heads:
        """Other texts in place of these: `choose` is given each tensor, [B, ...]."""
        return self._with(choose, OF_TOKENS + OF_TEXTS)

    def copy_(self, other: Heads) -> None:
        """Take over all tokens of another, whose capacity is as large, and what belongs to its texts."""
        for name in OF_TOKENS + OF_TEXTS:
            mine, others = getattr(self, name), getattr(other, name)
            if mine is not None and others is not None:
                mine.copy_(others)

    def _with(self, choose: Callable[[Tensor], Tensor], names: tuple[str, ...]) -> Heads:
        held = ((name, getattr(self, name)) for name in names)
        chosen: dict[str, Any] = {name: choose(tensor) for name, tensor in held if tensor is not None}
        return replace(self, **chosen)


def empty(
    shape: tuple[int, int, int, int],
    bits: int,
    *,
    group: int | None = None,
    whole: int = 0,
    path: CenterPath | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> Heads:
    """Memory for [B, H, N, width] numbers, which are 0 so far.

    group        numbers of a rotated head that share a scale and a zero point; None is the plain form
    whole        tokens at the begin of each text that are kept as they are, in `dtype`; 0 in the plain form
    path         how the mean of those tokens, the very first left out, turns on; that is subtracted before
                 later tokens are rotated. None: nothing is subtracted
    scale_dtype  that of the scales of the plain form
    """
    batch, heads, tokens, width = shape

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    packed = zeros(batch, heads, tokens, words(width, bits), dtype=torch.int32)
    if group is None:
        scale = zeros(batch, heads, tokens, 1, dtype=scale_dtype)
        extra = zeros(batch, heads, words(width, 1), dtype=torch.int32) if bits == EXTRA_BIT else None
        return Heads(packed, scale, None, extra, None, None, None, width, bits, None)
    groups = batch, heads, tokens, group_count(width, group)
    return Heads(
        packed,
        zeros(*groups, dtype=torch.uint8),
        zeros(*groups, dtype=torch.int8),
        None,
        zeros(batch, heads, whole, width, dtype=dtype) if whole else None,
        zeros(batch, heads, width, dtype=torch.float32) if path is not None else None,
        None if path is None else path.to(device),
        width,
        bits,
        group,
    )


def store(heads: Heads, x: Tensor, at: int | Tensor, first: Tensor, *, with_first: bool = True) -> None:
    """Quantise x [B, H, T, width] and write it to tokens from `at` on: `kv_cache.store` for one `Heads`.

    Raises IndexError for tokens for which there is no memory.
    """
    at = int(at.flatten()[0]) if isinstance(at, Tensor) else at
    if at < 0 or at + x.shape[2] > heads.capacity:
        raise IndexError(
            f"a KV cache has memory for {heads.capacity} tokens, and is given tokens {at} to"
            f" {at + x.shape[2] - 1}: give it a larger `max_length`"
        )
    write = _store_plain if heads.group is None else _store_groups
    x, step = x.detach(), _tokens_at_a_time(x.shape)
    for start in range(0, x.shape[2], step):
        write(heads, x[:, :, start : start + step], at + start, first, with_first=with_first)


def _tokens_at_a_time(shape: torch.Size) -> int:
    """How many tokens of [B, H, T, width] numbers are a block."""
    return max(1, BLOCK // max(1, shape[0] * shape[1] * shape[3]))


def _store_groups(heads: Heads, x: Tensor, at: int, first: Tensor, *, with_first: bool) -> None:
    assert heads.group is not None
    if heads.first is not None and with_first:
        _keep_first(heads, x, first - at)
    x = x.to(torch.float32, copy=True)
    if heads.center is not None and heads.path is not None:
        heads.path.move(x, heads.center, first - at, heads.whole, -1)
    quantized = quantize_groups(hadamard(x), heads.bits, heads.group)
    _write(heads, at, quantized.codes, quantized.scale, quantized.zero)


def _keep_first(heads: Heads, x: Tensor, place: Tensor) -> None:
    """Keep those of the first tokens that are in x [B, H, T, width]; the very first is token `place` of x."""
    assert heads.first is not None
    places = place[:, None] + torch.arange(heads.whole, device=x.device)
    inside = ((places >= 0) & (places < x.shape[2]))[:, None, :, None]
    where = places.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, heads.width)
    heads.first.copy_(torch.where(inside, x.gather(2, where).to(heads.first.dtype), heads.first))
    if heads.center is not None and heads.path is not None:
        heads.center.copy_(torch.where(heads.path.still, _mean_of_later(heads.first), 0))


def _mean_of_later(first: Tensor) -> Tensor:
    """The mean of all whole tokens [B, H, whole, width] but the first: fp32, added in the order of tokens."""
    total = torch.zeros_like(first[:, :, 0], dtype=torch.float32)
    for token in first[:, :, 1:].float().unbind(2):
        total = total + token
    return total * (1 / max(1, first.shape[2] - 1))


def _store_plain(heads: Heads, x: Tensor, at: int, first: Tensor, *, with_first: bool) -> None:
    tokens = x.shape[2]
    quantized = quantize_heads(x, heads.bits, scale_dtype=heads.scale.dtype)
    codes, scale = quantized.codes, quantized.scale
    if heads.first_bits is not None and with_first:
        place = first - at
        inside = ((place >= 0) & (place < tokens))[:, None, None, None]
        where = place.clamp(0, tokens - 1)[:, None, None, None].expand(-1, x.shape[1], 1, -1)
        its = quantize_heads(
            x.gather(2, where.expand(-1, -1, -1, heads.width)),
            heads.bits + 1,
            scale_dtype=heads.scale.dtype,
        )
        upper = pack(its.codes[:, :, 0] >> heads.bits, 1, check=False)
        heads.first_bits.copy_(torch.where(inside[..., 0], upper, heads.first_bits))
        is_first = inside & (torch.arange(tokens, device=x.device)[:, None] == where[:, :, :1])
        codes = torch.where(is_first, its.codes & ((1 << heads.bits) - 1), codes)
        scale = torch.where(is_first, its.scale, scale)
    _write(heads, at, codes, scale, None)


def _write(heads: Heads, at: int, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    """Write what is stored of some tokens, from `at` on."""
    to = heads.tokens(at, at + codes.shape[2])
    to.words.copy_(pack(codes, heads.bits, check=False))
    to.scale.copy_(scale)
    if to.zero is not None and zero is not None:
        to.zero.copy_(zero)


def load(heads: Heads, first: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of all tokens in `dtype`, [B, H, N, width]: `kv_cache.load` in torch."""
    shape = (*heads.words.shape[:3], heads.width)
    x = torch.empty(shape, dtype=dtype, device=heads.words.device)
    read = _load_plain if heads.group is None else _load_groups
    step = _tokens_at_a_time(x.shape)
    for start in range(0, heads.capacity, step):
        stop = min(start + step, heads.capacity)
        x[:, :, start:stop] = read(heads.tokens(start, stop), first - start)
    if heads.first is not None:
        for text, place in enumerate(first.tolist()):
            begin, end = (min(max(place + count, 0), heads.capacity) for count in (0, heads.whole))
            x[text, :, begin:end] = heads.first[text, :, begin - place : end - place]
    return x


def _load_groups(heads: Heads, first: Tensor) -> Tensor:
    """fp32, as if no token were kept whole."""
    assert heads.group is not None and heads.zero is not None
    codes = unpack(heads.words, heads.bits, heads.width)
    x = hadamard(GroupedHeads(codes, heads.scale, heads.zero, heads.bits, heads.group).dequantize())
    if heads.center is not None and heads.path is not None:
        heads.path.move(x, heads.center, first, heads.whole, 1)
    return x


def _load_plain(heads: Heads, first: Tensor) -> Tensor:
    codes = unpack(heads.words, heads.bits, heads.width)
    half: float | Tensor = ((1 << heads.bits) - 1) / 2
    if heads.first_bits is not None:
        is_first = torch.arange(heads.capacity, device=first.device) == first[:, None]
        is_first = is_first[:, None, :, None]
        upper = unpack(heads.first_bits, 1, heads.width)[:, :, None] << heads.bits
        codes = torch.where(is_first, codes | upper, codes)
        half = torch.where(is_first, ((2 << heads.bits) - 1) / 2, half)
    return (codes - half) * heads.scale.float()
