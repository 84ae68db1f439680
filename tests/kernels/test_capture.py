"""What the CUDA driver is asked."""

from __future__ import annotations

import torch

from neuzip.kernels.device import capture as driver


def test_nothing_is_captured_on_a_cpu() -> None:
    assert driver.capture_id(torch.device("cpu")) == 0
