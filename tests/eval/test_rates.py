"""What inspect predicts of quantised checkpoints, and what it shows of the codes of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensors import FLOAT8, weight_patterns

from neuzip.compress import Rule, Scheme, compress
from neuzip.compress.sources.folder import FolderSource
from neuzip.eval.measures import rates
from neuzip.eval.measures.code_figures import CodeFigures
from neuzip.eval.measures.entropies import entropy
from neuzip.eval.measures.histograms import Inspection, inspect, select
from neuzip.eval.measures.rates import STEPS, RateCurve, predict_rates
from neuzip.eval.report import histogram_pictures as pictures
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.float_fields.values import to_float64

Save = Callable[..., Path]

SIZE = 1 << 17
DEVIATIONS = {"wide": 0.05, "narrow": 0.01}


def normal(deviation: float, seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Normal bf16 weights of a standard deviation."""
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * deviation
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, save: Save) -> Path:
    """Two matrices of normal weights, a vector and integers."""
    matrices = {
        name: ("BF16", (256, SIZE // 256), normal(deviation, seed))
        for seed, (name, deviation) in enumerate(DEVIATIONS.items())
    }
    others = {"bias": ("BF16", (4096,), normal(0.05, 2)[:4096]), "ids": ("I64", (300,), np.arange(300))}
    return save(tmp_path_factory.mktemp("rates") / "model.safetensors", {**matrices, **others})


def inspected(path: Path, *globs: str) -> Inspection:
    with FolderSource(path) as source:
        return inspect(source, select(source, globs))


def test_normal_weights_take_the_entropy_of_normal_codes(model):
    """At fine steps h - log2(step), and what coding adds; the error is step / sqrt(12)."""
    (found,) = (r for r in inspected(model, "wide").rates if r.bits_per_weight == 5)
    assert 0.01 < 5 - math.log2(math.sqrt(2 * math.pi * math.e) / found.step) < 0.08
    assert found.relative_l2 == pytest.approx(found.step / math.sqrt(12), rel=0.01)


@pytest.mark.parametrize("rate", [6.0, 3.0])
def test_a_compressed_checkpoint_has_the_size_and_error_that_were_predicted(model, tmp_path, rate):
    (found,) = (r for r in inspected(model).rates if r.bits_per_weight == rate)
    rules = [
        Rule(name, Scheme("quantized", step=found.step * deviation)) for name, deviation in DEVIATIONS.items()
    ]
    report = compress(model, tmp_path / "small.safetensors", [*rules, Rule("*", Scheme())], verify=False)
    assert report.stored_weight_bytes == pytest.approx(found.nbytes, rel=0.01)
    errors = [t.loss.relative_l2 for t in report.tensors if t.loss is not None]
    assert len(errors) == 2
    assert found.relative_l2 == pytest.approx(sum(errors) / 2, rel=0.02)


def test_rates_are_below_the_lossless_size_and_say_what_is_out_of_reach(model, neuzip):
    few = inspected(model, "bias", "ids", "narrow")
    assert few.rates[0].bits_per_weight == 8
    assert all(a.nbytes > b.nbytes for a, b in zip(few.rates, few.rates[1:], strict=False))
    assert inspected(model, "ids").rates == ()
    curve = RateCurve(np.linspace(900, 200, len(STEPS)), np.array(STEPS) ** 2, 1.0)
    found = predict_rates(curve, lossless_bytes=1000, whole_bytes=1500, weights=1000, rates=(13, 8, 6, 5))
    assert [(r.bits_per_weight, r.nbytes, r.step is None) for r in found] == [
        (8, 1000, False), (6, 750, False), (5, 625, True),
    ]  # fmt: skip


def test_more_bytes_than_the_finest_step_takes_get_the_finest_step():
    curve = RateCurve(np.linspace(900, 200, len(STEPS)), np.array(STEPS) ** 2, 4.0)
    assert curve.at(950) == (STEPS[0], STEPS[0] / 2)
    assert curve.at(199) is None


def test_infinities_and_small_matrices_stay_lossless(tmp_path, save):
    infinite = normal(0.05, 0).copy()
    infinite[7] = 0x7F80
    tensors = {
        "infinite": ("BF16", (256, SIZE // 256), infinite),
        "small": ("BF16", (8, 8), weight_patterns("BF16", 64)),
        "zeros": ("BF16", (64, 64), np.zeros(4096, np.uint16)),
    }
    found = inspected(save(tmp_path / "w.safetensors", tensors))
    assert all(rate.step is None for rate in found.rates)


@pytest.mark.parametrize("dtype", ["BF16", "F16", *FLOAT8])
def test_levels_are_rounded_as_torch_rounds(dtype):
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, **FLOAT8}[dtype]
    levels = np.arange(-40, 41) * 0.0371
    expected = torch.from_numpy(levels).float().to(kind).double().numpy()
    assert rates.rounded(levels, FORMATS[dtype]).tolist() == expected.tolist()
    assert rates.rounded(levels, FORMATS["F32"]) is levels


def test_human_json_and_page_show_the_rates(model, neuzip):
    said = neuzip("inspect", model)
    lines = said.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("bits per weight"))
    assert lines[head + 2].split()[-2:] == ["lossless", "none"]
    assert [line.split()[0] for line in lines[head + 3 : head + 10]] == [
        f"{rate:.2f}" for rate in rates.RATES
    ]
    assert "follow from the weights alone" in said.stdout and "--max-kld" in said.stdout
    data = neuzip("inspect", model, "--json").json
    four = next(rate for rate in data["rates"] if rate["bits_per_weight"] == 4)
    assert four["stored_bytes"] == math.floor(4 * data["weights"] / 8)
    assert four["ratio"] == pytest.approx(four["stored_bytes"] / data["weight_bytes"])
    page = pictures.page(inspected(model), "model").decode()
    assert "Predicted cost of each rate" in page and f"<td>{four['step']:.3f}</td>" in page


def test_codes_of_a_compressed_tensor_are_shown_in_words(model, tmp_path, neuzip):
    rule = Rule("wide", Scheme("quantized", step=0.025, row_factors=True))
    compress(model, tmp_path / "small.safetensors", [rule, Rule("*", Scheme())], verify=False)
    found = inspected(tmp_path / "small.safetensors")
    tensor = next(t for t in found.tensors if t.name == "wide")
    values = to_float64(normal(0.05, 0), FORMATS["BF16"])
    codes = np.rint(values / 0.025).astype(int)  # rows are alike: nearly all factors are 1
    right = entropy(np.bincount(codes - codes.min()))
    assert tensor.codes == CodeFigures(
        code_bits=5, step=pytest.approx(0.025), row_factors=True, column_factors=False,
        entropy=pytest.approx(right, abs=0.01), stored_bits=8 * tensor.stored_bytes / SIZE,
    )  # fmt: skip
    assert tensor.bound_bytes == math.ceil(tensor.codes.entropy * SIZE / 8)
    assert right < tensor.codes.stored_bits < right + 0.1
    assert found.rates == ()
    said = neuzip("inspect", tmp_path / "small.safetensors")
    assert "quantized 5-bit codes, row factors" in said.stdout
    row = next(line for line in said.stdout.splitlines() if line.startswith("wide"))
    assert row.split()[-3:] == ["0.025", f"{tensor.codes.entropy:.2f}", f"{tensor.codes.stored_bits:.2f}"]
    assert "bits per weight  " not in said.stdout
    data = neuzip("inspect", tmp_path / "small.safetensors", "--json").json
    assert next(t for t in data["tensors"] if t["name"] == "wide")["codes"]["code_bits"] == 5
    assert "code entropy" in pictures.page(found, "small").decode()
