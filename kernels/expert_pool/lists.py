"""The experts in use, numbered: what slots of a pool hold."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neuzip.kernels.experts.routing import Routing


class ExpertsInUse(NamedTuple):
    """Which experts a routing uses, on the device.

    chosen        int32 [slots]: the experts in use, in the order of their tiles, and -1 behind them
    slot_of_tile  int32 [tiles]: the place of each tile's expert in that list, -1 for tiles not in use
    """

    routing: Routing
    chosen: torch.Tensor
    slot_of_tile: torch.Tensor
