"""The two ends of a chain of deltas: what makes them from a training, and what applies them elsewhere."""

from __future__ import annotations

import torch

from neuzip.errors import NeuzipError
from neuzip.formats.sparse_delta import SparseDeltaHeader
from neuzip.kernels import sparse_delta

from .messages import AppliedDelta, WeightState, encode, follow, require_next
from .named_weights import NamedWeights, Tensors


class Publisher:
    """The trainer's end of a chain of deltas: keeps a copy of the weights that it has published last.

    weights  tensors by their names as the engines have them now, such as bf16 weights; they are copied
    number   number of this state in the chain

    Raises UsageError for tensors of dtypes that a delta cannot take, or on several devices.

    >>> weights = {"weight": torch.zeros(5000, dtype=torch.bfloat16)}
    >>> publisher, follower = Publisher(weights), Follower(weights)
    >>> delta = publisher.make({"weight": torch.ones(5000, dtype=torch.bfloat16)})
    >>> follower.apply(delta).state.number, float(weights["weight"].sum())
    (1, 4992.0)
    """

    def __init__(self, weights: Tensors, *, number: int = 0) -> None:
        copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format)
                  for name, tensor in weights.items()}  # fmt: skip
        self._last = NamedWeights(copies, "weights")
        self._state = WeightState(number, self._last.digest())

    @property
    def state(self) -> WeightState:
        """The state that was published last."""
        return self._state

    def make(self, weights: Tensors) -> torch.Tensor:
        """Make the delta from the state that was published last to `weights`: uint8, on their device.

        weights  tensors of the same names, dtypes and shapes, on the same device

        Raises UsageError for other tensors.
        """
        new = NamedWeights({name: tensor.contiguous() for name, tensor in weights.items()}, "weights")
        encoded = encode(self._last, new, self._state)
        sparse_delta.apply(self._last.tensors, self._last.blocks, encoded.coded, encoded.checked)
        self._state = encoded.state
        return encoded.message


class Follower:
    """The other end of a chain of deltas: weights in place, and the state that they are in.

    weights  tensors by their names, which deltas change in place
    number   number of their state in the chain; None takes the number of the first delta that starts from it

    Raises UsageError for tensors that are not contiguous, share memory, or are on several devices.
    """

    def __init__(self, weights: Tensors, *, number: int | None = None) -> None:
        self._weights = NamedWeights(weights, "weights")
        self._weights.require_apart()
        self._state = WeightState(number, self._weights.digest())

    @property
    def state(self) -> WeightState:
        """The state that the weights are in."""
        return self._state

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._weights.device

    def apply(self, delta: torch.Tensor | bytes, name: str = "`delta`") -> AppliedDelta:
        """Apply the next delta. `name` is what errors call it, such as the path of its file.

        Raises FormatError for damaged bytes, and BrokenChain where a delta before it is missing, it was
        applied already, it is damaged, or something else has changed a weight that it changes. Then no
        weight was written.
        """
        applied = follow(self._weights, self._state, delta, name)
        self._state = applied.state
        return applied

    def require_next(self, header: SparseDeltaHeader, name: str) -> None:
        """Raise BrokenChain unless a delta called `name` follows the state of the weights, by its header."""
        require_next(header, self._weights, self._state, name)

    def check(self) -> None:
        """Read all weights and raise NeuzipError if something else than deltas has changed them."""
        digest = self._weights.digest()
        if digest != self._state.digest:
            raise NeuzipError(
                f"`weights`: have the digest {digest:016x}, and deltas have given {self._state}: "
                "something else has changed the weights",
                "load the weights again",
            )
