"""What changed in weights between two moments of a training, for engines that run the same model elsewhere.

    publisher = delta.Publisher(weights)               # trainer: bf16 weights as the engine has them
    message = publisher.make(weights_after_a_step)     # bytes on the GPU
    follower = delta.Follower(weights)                 # engine: tensors that change in place
    follower.apply(message)

A message holds only the weights that changed, and restores every bit of them. It names the state from which
it starts and the state that it gives. docs/how-to/weight-sync.md shows a trainer and an engine.
"""

from neuzip.runtime.delta.broadcast import broadcast
from neuzip.runtime.delta.chain import Follower, Publisher
from neuzip.runtime.delta.folder import DeltaFolder
from neuzip.runtime.delta.messages import AppliedDelta, BrokenChain, WeightState, apply, make

__all__ = [
    "AppliedDelta",
    "BrokenChain",
    "DeltaFolder",
    "Follower",
    "Publisher",
    "WeightState",
    "apply",
    "broadcast",
    "make",
]
