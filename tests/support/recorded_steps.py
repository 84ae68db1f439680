"""A step of a decoder as a CUDA graph has it: the same operations on the same memory."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from neuzip.runtime.decode.greedy import GreedyDecoder


def replayed_tokens(decoder: GreedyDecoder, ids: torch.Tensor, new: int) -> torch.Tensor:
    """The `new` tokens after each prompt, [batch, new], by one step that is recorded and replayed.

    Recording fails where the host reads a value.
    """

    def step() -> torch.Tensor:
        with torch.no_grad():
            decoder._advance()
        return decoder._token

    decoder._reset()
    recorded = make_fx(step)()
    tokens = [decoder.prefill(ids).clone()]
    tokens += [recorded()[:, 0].clone() for _ in range(new - 1)]
    return torch.stack(tokens, dim=1)
