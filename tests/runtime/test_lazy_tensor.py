"""What is made of a stand-in has, in the end, the values that the same steps make of the weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from neuzip.runtime.hf import lazy_tensor
from neuzip.runtime.hf.lazy_tensor import LazyTensor, with_values

BF16 = torch.bfloat16


class Weight:
    """A weight that counts how often it is decoded."""

    def __init__(self, dense: torch.Tensor) -> None:
        self._dense, self.decoded = dense, 0
        self.shape, self.dtype = dense.shape, dense.dtype

    def dense(self) -> torch.Tensor:
        self.decoded += 1
        return self._dense


def weight(*shape: int) -> Weight:
    return Weight(torch.randn(*shape).to(BF16))


@pytest.mark.parametrize(
    "steps",
    [
        lambda w: w,
        lambda w: w.transpose(0, 1).contiguous(),
        lambda w: w.reshape(4, 3, -1)[1, :, 2:5],
        lambda w: torch.cat([w, torch.ones(2, 8, dtype=BF16), w], dim=0),
        lambda w: torch.stack(torch.chunk(w, 4, dim=1)[::2]),
        lambda w: w.to(torch.float32) * 2 + w.sum(),
    ],
)
def test_steps_are_taken_later(steps: Callable[[torch.Tensor], torch.Tensor]):
    w = weight(12, 8)
    later = steps(LazyTensor.of(w))  # type: ignore[arg-type]
    now = steps(w.dense())
    assert isinstance(later, LazyTensor) and later.device.type == "meta"
    assert (later.shape, later.dtype) == (now.shape, now.dtype)
    assert w.decoded == 1
    made = with_values({"w": later})["w"]
    assert type(made) is torch.Tensor
    assert torch.equal(made, now)
    assert w.decoded == 2


def test_a_weight_is_decoded_once_for_all_its_parts():
    experts, other = weight(8, 6, 4), weight(3, 3)
    tensors = {f"e{i}": part.squeeze(0) for i, part in enumerate(torch.chunk(LazyTensor.of(experts), 8))}  # type: ignore[arg-type]
    tensors = {"plain": torch.ones(2), "z": LazyTensor.of(other)} | tensors  # type: ignore[arg-type]
    made = with_values(tensors)
    assert list(made) == list(tensors)
    assert made["plain"] is tensors["plain"]
    assert torch.equal(made["z"], other.dense())
    assert all(torch.equal(made[f"e{i}"], experts.dense()[i]) for i in range(8))
    assert experts.decoded == 1 + 8 and other.decoded == 1 + 1


def test_what_a_weight_is_made_of_is_let_go_before_the_next(monkeypatch):
    sizes: list[int] = []
    result = lazy_tensor._Call.result

    def noted(call: lazy_tensor._Call, memo: lazy_tensor.Memo) -> object:
        value = result(call, memo)
        sizes.append(len(memo))
        return value

    monkeypatch.setattr(lazy_tensor._Call, "result", noted)
    with_values({str(i): LazyTensor.of(weight(3, 3)) + 1 for i in range(5)})  # type: ignore[arg-type]
    assert max(sizes) == 2
