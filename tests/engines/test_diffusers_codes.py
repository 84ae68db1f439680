"""diffusers on a model that neuzip quantized: the values of its codes, and the codes themselves in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from test_diffusers import assert_same_tensors, flux, prediction, save_shards, transformer

import neuzip
from neuzip.runtime.weights import GridWeight

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("name", ["one", "shards"])
def test_a_quantized_model_keeps_its_codes(tmp_path: Path, name: str) -> None:
    flux().save_pretrained(tmp_path / "one")
    save_shards(tmp_path / "one", tmp_path / "shards")
    small, plain = tmp_path / "small.nz", tmp_path / "plain"
    neuzip.compress_checkpoint(tmp_path / name, small, bits=4.5, calibration="none")
    neuzip.decompress_checkpoint(small, plain)
    decoded, dense = transformer(plain), transformer(small)
    packed = transformer(small, quantization_config=neuzip.NeuzipConfig("packed"))
    assert_same_tensors(dense, decoded)
    assert_same_tensors(packed, decoded)
    codes = [weight for weight in packed.parameters() if isinstance(weight, GridWeight)]
    dense_bytes = sum(weight.numel() * weight.element_size() for weight in dense.parameters())
    assert sum(weight.numel() for weight in codes) * 2 > 0.8 * dense_bytes
    assert sum(weight.stored_bytes for weight in codes) < 0.4 * dense_bytes
    # Sums in another order: outputs of bf16 differ by some roundings.
    expected = prediction(decoded)
    assert (prediction(packed) - expected).abs().max() <= expected.abs().max() / 32
