"""What tests/support does to Triton's interpreter changes nothing that kernels compute."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def kernel(whole, small, real, out, n, WIDTH: tl.constexpr):
    program = tl.program_id(0)
    row, column = program * 4 + tl.arange(0, 4)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (row < n) & (column < WIDTH - 1)
    at = row * WIDTH + column
    a = tl.load(whole + at, mask=inside, other=-7)
    b = tl.load(small + at, mask=inside, other=3).to(tl.uint16)
    c = tl.load(real + at, mask=inside, other=-0.0)
    mixed = (a >> 3) + b * 5 - (a ^ 0x55) // 3
    mixed += tl.where((b > 7) | (a == -7), a.to(tl.uint32, bitcast=True) >> 28, 1 << program).to(tl.int32)
    c = tl.exp2(c.to(tl.float32)) / 3 - (-0.0) * c + tl.maximum(c, 0.25).to(tl.bfloat16)
    total = tl.sum(c, axis=1)[:, None] + tl.cumsum(c, axis=1)
    tl.store(out + at, mixed.to(tl.float32) + total, mask=inside)


def run(seed: int) -> torch.Tensor:
    """What the kernel makes of random numbers, with 7 of 8 rows in use."""
    rng = torch.Generator().manual_seed(seed)
    whole = torch.randint(-(1 << 31), (1 << 31) - 1, (8, 8), generator=rng, dtype=torch.int32)
    small = torch.randint(-128, 128, (8, 8), generator=rng, dtype=torch.int8)
    real = torch.randn(8, 8, generator=rng).to(torch.float16)
    out = torch.full((8, 8), -1.0)
    kernel[(2,)](whole, small, real, out, 7, 8)
    return out


def test_replayed_operations_are_those_of_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    """Each operation runs plainly, is recorded and is replayed, on other data each time."""
    import recorded_operations

    results = [run(seed) for seed in range(4)]
    with monkeypatch.context() as patch:
        plain = recorded_operations.recorded
        patch.setattr(recorded_operations, "recorded", lambda member: unrecorded(inspect.unwrap(member)))
        expected = [run(seed) for seed in range(4)]
    assert recorded_operations.recorded is plain
    for one, other in zip(results, expected, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert not np.isnan(results[0].numpy()).any() and (results[0] == -1).sum() == 8 + 7


def unrecorded(function):
    """A built-in as Triton's interpreter calls it."""
    import recorded_operations

    def call(*args, **kwargs):
        return function(*args, **kwargs | {"_semantic": recorded_operations.SEMANTIC})

    return call


def test_a_recording_that_gives_other_bytes_is_refused():
    import recorded_operations

    one, other = (
        tl.tensor(recorded_operations.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        for value in (0.0, -0.0)
    )
    recorded_operations.check(one, one)
    with pytest.raises(AssertionError):
        recorded_operations.check(other, one)
