"""A residency in a class and an entry of the table: loaders, generation and reports find it there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import models
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

import neuzip
from neuzip.errors import UsageError
from neuzip.runtime.requirements import require_device
from neuzip.runtime.residencies import RESIDENCIES, Residency, ResidencyEntry
from neuzip.runtime.residency import compress_parameters, memory
from neuzip.runtime.weights import CompressedWeight, WeightUse

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(2 * 12).view(2, 12) * 7 % 512
FP8 = torch.float8_e5m2


class Fp8Weight(CompressedWeight):
    """Weights that fp8 holds without loss: 8 bits each."""

    residency = "fp8"
    parts = ()
    codes: torch.Tensor
    """[rows, in]."""

    @classmethod
    def for_use(cls, weight: torch.Tensor, use: WeightUse) -> Fp8Weight | None:
        dense = (weight.mT if use.transposed else weight).contiguous()
        codes = dense.view(-1, dense.shape[-1]).to(FP8)
        if not torch.equal(codes.to(weight.dtype).view(dense.shape), dense):
            return None
        return cls._of(codes, tuple(dense.shape), use.transposed, weight.dtype)

    @classmethod
    def _of(
        cls, codes: torch.Tensor, stored: tuple[int, ...], flipped: bool, dtype: torch.dtype
    ) -> Fp8Weight:
        weight = cls._wrapper(stored, flipped, dtype, codes.device)
        weight.codes = codes
        return weight

    @property
    def stored_bytes(self) -> int:
        return self.codes.nbytes

    @property
    def _storage(self) -> torch.Tensor:
        return self.codes

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> Fp8Weight:
        return self._of(self.codes[rows], stored, flipped, self.stored_dtype)

    def _elsewhere(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Fp8Weight:
        return self._of(move(self.codes), self.stored, self.flipped, self.stored_dtype)

    def _decode_all(self) -> torch.Tensor:
        return self.codes.to(self.stored_dtype)

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._decode_all(), bias)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"], (self.stored, self.flipped, self.stored_dtype)

    @staticmethod
    def __tensor_unflatten__(arrays: dict[str, Any], context: Any, size: object, stride: object) -> Fp8Weight:
        return Fp8Weight._of(arrays["codes"], *context)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ResidencyEntry("fp8", 1.0, gpu="yes", cpu="yes", weight=f"{__name__}:Fp8Weight")
    monkeypatch.setitem(RESIDENCIES, "fp8", entry)


def model_of_fp8_values() -> PreTrainedModel:
    """A bf16 model whose matrices fp8 holds without loss, all but the first."""
    torch.manual_seed(1)
    model = models.llama(
        vocab_size=512, hidden_size=256, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
    ).to(torch.bfloat16).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "layers.0.self_attn.q_proj" not in name:
            parameter.data = parameter.data.to(FP8).to(torch.bfloat16)
    return model


@torch.inference_mode()
def test_a_live_model_takes_it() -> None:
    model, expected = model_of_fp8_values(), model_of_fp8_values()
    report = compress_parameters(model, "fp8")
    assert report.of("fp8").weights > 0.8 * report.total.weights
    assert report.of("fp8").stored_bytes * 2 == report.of("fp8").dense_bytes
    assert not isinstance(model.get_parameter("model.layers.0.self_attn.q_proj.weight"), Fp8Weight)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


@torch.inference_mode()
def test_a_checkpoint_is_loaded_with_it_and_saved(tmp_path: Path) -> None:
    model_of_fp8_values().save_pretrained(tmp_path / "model")
    expected = neuzip.load_model(tmp_path / "model", device="cpu")
    model = neuzip.load_model(tmp_path / "model", device="cpu", residency="fp8")
    assert memory(model).of("fp8").weights > 0
    assert model.hf_quantizer.quantized_element_size == 1.0
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    model.save_pretrained(tmp_path / "again")
    again = neuzip.load_model(tmp_path / "again", device="cpu")
    assert torch.equal(again(IDS).logits, expected(IDS).logits)


def test_errors_name_it() -> None:
    with pytest.raises(UsageError, match="'nothing'") as refusal:
        neuzip.evaluate("model", text="x", residency="nothing")  # type: ignore[arg-type]
    assert "'fp8'" in str(refusal.value.hint)
    require_device("cpu", "fp8")


def test_each_name_has_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RESIDENCIES, "fp8")
    assert get_args(Residency) == tuple(RESIDENCIES)
    for name, entry in RESIDENCIES.items():
        assert not entry.weight or entry.weight_class.residency == name
