"""A delta as bytes: made of two states, checked, and applied to weights in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.sparse_delta import HEADER_BYTES, SparseDeltaHeader
from neuzip.kernels import sparse_delta
from neuzip.kernels.sparse_delta import CheckedDelta, CodedDelta

from .named_weights import MODULUS, NamedWeights, Tensors

NAME = "`delta`"
"""What errors call a delta that is in no file."""


class BrokenChain(NeuzipError):
    """A delta that does not follow the state of the weights. No weight was written."""


@dataclass(frozen=True)
class WeightState:
    """A state of weights: its number in a chain, None as long as it is unknown, and its digest."""

    number: int | None
    digest: int

    def __str__(self) -> str:
        return f"state {'?' if self.number is None else self.number} with the digest {self.digest:016x}"


@dataclass(frozen=True)
class AppliedDelta:
    """What a delta did: the state that it gave, and which weights it changed."""

    state: WeightState
    _weights: NamedWeights
    _coded: CodedDelta
    _checked: CheckedDelta

    def changed(self) -> dict[str, torch.Tensor]:
        """The numbers of the changed weights in C order, int64, by the names of tensors that changed."""
        numbers = sparse_delta.changed(self._weights.blocks, self._coded, self._checked)
        return {name: n for name, n in zip(self._weights.names, numbers, strict=True) if n.numel()}


def make(old: Tensors, new: Tensors, *, number: int = 1) -> torch.Tensor:
    """Make the delta that turns the weights `old` into `new`: its bytes, uint8, on their device.

    old, new  tensors by their names, of the same dtypes and shapes, contiguous, on one device
    number    number of the state `new` in its chain

    Any dtype is restored bit for bit. Reads both states twice, and `old` once more for its digest, which
    `Publisher` knows. Raises UsageError.

    >>> old = {"weight": torch.zeros(5000, dtype=torch.bfloat16)}
    >>> new = {"weight": old["weight"].index_fill(0, torch.tensor([7, 4999]), 1.0)}
    >>> len(make(old, new))
    80
    """
    start = NamedWeights(old, "old")
    return encode(start, NamedWeights(new, "new"), WeightState(number - 1, start.digest())).message


def apply(weights: Tensors, delta: torch.Tensor | bytes) -> AppliedDelta:
    """Apply a delta to `weights` in place, after a check of the delta and of all weights.

    `delta` may be on another device. Reads all weights for their digest, which `Follower` knows. Raises
    FormatError for bytes that are no delta, and BrokenChain where the delta starts from another state; then
    no weight was written.

    >>> old = {"weight": torch.zeros(5000, dtype=torch.bfloat16)}
    >>> new = {"weight": torch.ones(5000, dtype=torch.bfloat16)}
    >>> apply(old, make(old, new)).state.number
    1
    >>> torch.equal(old["weight"], new["weight"])
    True
    """
    named = NamedWeights(weights, "weights")
    named.require_apart()
    return follow(named, WeightState(None, named.digest()), delta)


@dataclass(frozen=True)
class EncodedMessage:
    """A delta as bytes, uint8, and as what was coded and checked; and the state that it gives."""

    message: torch.Tensor
    state: WeightState
    coded: CodedDelta
    checked: CheckedDelta


def encode(old: NamedWeights, new: NamedWeights, state: WeightState) -> EncodedMessage:
    """Make the delta from `old`, which are in a state that is known, to `new`. Raises UsageError."""
    assert state.number is not None
    new.require_layout(old)
    coded = sparse_delta.encode(old.tensors, new.tensors, old.blocks)
    checked = sparse_delta.check(old.tensors, old.blocks, coded)
    change, broken = _on_host(checked)
    assert not broken, "the encoder wrote a block that breaks a rule"
    header = SparseDeltaHeader(
        state.number + 1, state.digest, (state.digest + change) % MODULUS, old.layout,
        old.blocks.count, coded.words.numel(),
    )  # fmt: skip
    head = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8).to(old.device)
    message = torch.cat([head, coded.descriptors.view(torch.uint8), coded.words.view(torch.uint8)])
    return EncodedMessage(message, WeightState(header.number, header.end), coded, checked)


def follow(
    weights: NamedWeights, state: WeightState, delta: torch.Tensor | bytes, name: str = NAME
) -> AppliedDelta:
    """Apply the delta called `name` to weights whose state is known. Raises FormatError and BrokenChain.

    The host waits for a GPU once, between the check and the first write.
    """
    stored = as_bytes(delta)
    header = read_header(stored, name)
    require_next(header, weights, state, name)
    on_device = stored.to(weights.device)
    if on_device.data_ptr() % 4:  # a slice of somebody's buffer
        on_device = on_device.clone()
    parts = on_device[HEADER_BYTES:].view(torch.int32)
    coded = CodedDelta(parts[: header.blocks], parts[header.blocks :])
    checked = sparse_delta.check(weights.tensors, weights.blocks, coded)
    change, broken = _on_host(checked)
    if broken:
        raise FormatError(name, "a block breaks the rules of the format: the delta is damaged")
    if (state.digest + change) % MODULUS != header.end:
        raise BrokenChain(
            f"{name}: would not give the state with the digest {header.end:016x}: it is damaged, or "
            "something else has changed the weights",
            "send the delta again; if it fails again, load the weights again",
        )
    sparse_delta.apply(weights.tensors, weights.blocks, coded, checked)
    return AppliedDelta(WeightState(header.number, header.end), weights, coded, checked)


def as_bytes(delta: torch.Tensor | bytes) -> torch.Tensor:
    """The bytes of a delta as a contiguous tensor."""
    if isinstance(delta, torch.Tensor):
        if delta.dtype != torch.uint8 or delta.ndim != 1:
            raise FormatError(NAME, f"is {delta.dtype} {tuple(delta.shape)}, and not uint8 of one dimension")
        return delta.contiguous()
    return (
        torch.frombuffer(bytearray(delta), dtype=torch.uint8) if delta else torch.empty(0, dtype=torch.uint8)
    )


def read_header(delta: torch.Tensor, name: str) -> SparseDeltaHeader:
    """What the first bytes of a whole delta say. Raises FormatError, also for one that is cut short."""
    header = SparseDeltaHeader.decode(delta[:HEADER_BYTES].cpu().numpy().tobytes(), name)
    if delta.numel() != header.nbytes:
        raise FormatError(name, f"has {delta.numel()} bytes, and its header says {header.nbytes}")
    return header


def require_next(header: SparseDeltaHeader, weights: NamedWeights, state: WeightState, name: str) -> None:
    """Raise BrokenChain unless a delta is for these weights and follows their state."""
    if header.layout != weights.layout or header.blocks != weights.blocks.count:
        raise BrokenChain(
            f"{name}: is for tensors of other names, dtypes or shapes",
            "trainer and engine need the same names, dtypes and shapes",
        )
    number = header.number if state.number is None else state.number + 1
    if header.number > number:
        raise BrokenChain(
            f"{name}: gives state {header.number}, and the weights are in {state}: "
            f"{header.number - number} deltas between are missing",
            "apply the missing deltas first, or load the weights of a later state",
        )
    if header.number < number:
        raise BrokenChain(
            f"{name}: gives state {header.number}, and the weights are already in {state}: "
            "it was repeated or comes too late",
            "leave it out",
        )
    if header.start != state.digest:
        raise BrokenChain(
            f"{name}: starts from the digest {header.start:016x}, and the weights are in {state}",
            "load the weights from which the trainer started",
        )


def _on_host(checked: CheckedDelta) -> tuple[int, bool]:
    """What a check has found, when it has ended."""
    change, broken = torch.stack([checked.change, checked.broken.to(torch.int64)]).tolist()
    return change, bool(broken)
