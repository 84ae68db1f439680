"""Packed weights of the laws that the benchmarks use: Gaussian ones, and ones that look trained.

Weights that look trained have more far words and more escapes. A product with them is judged against fp64 as
the benchmark judges it: its error is at most 5 % above that of torch's product with the dense weights.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tensors import gaussian, weights_of_law
from weight_laws import LAWS

from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.triton import linear as triton_linear

SCATTER = 1.05

laws = pytest.mark.parametrize("law", LAWS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def assert_as_exact_as_torch(y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    exact = F.linear(x.double(), weights.double())
    assert y.shape == exact.shape
    assert error(y, exact) <= SCATTER * error(F.linear(x, weights), exact)


@pytest.mark.parametrize(("law", "bits"), [("gaussian", 11.41), ("trained-like", 11.68)])
def test_bits_of_a_law(law: str, bits: float) -> None:
    packed = torch_ops.pack(weights_of_law(law, 512, 4096))
    assert packed.bits_per_weight == pytest.approx(bits, abs=0.03)


def test_weights_that_look_trained_have_heavy_tails_and_outlier_columns() -> None:
    weights = weights_of_law("trained-like", 1024, 2048).float()
    columns, rows = weights.std(dim=0), weights.std(dim=1)
    large = columns > 3 * columns.median()
    assert int(large.sum()) == 20
    assert float(columns[large].mean() / columns.median()) == pytest.approx(6, rel=0.1)
    assert float(rows.log().std()) == pytest.approx(0.35, rel=0.15)
    inner = weights[:, ~large] / weights[:, ~large].std(dim=1, keepdim=True)
    assert 1.5 < float((inner**4).mean() - 3) < 6  # Student's t of 6 degrees has 3


@laws
def test_a_seed_gives_the_same_weights(law: str) -> None:
    first = weights_of_law(law, 40, 96, seed=3)
    assert torch.equal(first, weights_of_law(law, 40, 96, seed=3))
    assert not torch.equal(first, weights_of_law(law, 40, 96, seed=4))


@laws
@dtypes
def test_weights_of_a_law_come_back(law: str, dtype: torch.dtype) -> None:
    weights = weights_of_law(law, 200, 1500, dtype=dtype)
    decoded = torch_ops.decode(torch_ops.pack(weights))
    assert torch.equal(decoded.view(torch.int16), weights.view(torch.int16))


@laws
@pytest.mark.parametrize("rows", [1, 16, 70])
def test_product_of_the_reference(law: str, rows: int) -> None:
    weights = weights_of_law(law, 136, 1024)
    x = gaussian(rows, 1024, seed=1, dtype=torch.bfloat16)
    assert_as_exact_as_torch(torch_ops.linear(x, torch_ops.pack(weights)), x, weights)


@laws
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_product_of_the_kernels_for_few_rows(law: str, rows: int, device: torch.device) -> None:
    weights = weights_of_law(law, 72, 640).to(device)
    x = gaussian(rows, 640, seed=1, dtype=torch.bfloat16).to(device)
    assert_as_exact_as_torch(triton_linear.linear(x, torch_ops.pack(weights)), x, weights)


@pytest.mark.gpu
@laws
@dtypes
@pytest.mark.parametrize(("out", "columns"), [(264, 512), (1024, 2048), (2560, 2560)])
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64, 65, 128, 200, 256, 300, 1024, 2048])
def test_product_on_a_gpu(law: str, dtype: torch.dtype, out: int, columns: int, rows: int) -> None:
    weights = weights_of_law(law, out, columns, dtype=dtype).cuda()
    packed = torch_ops.pack(weights)
    decoded = torch_ops.decode(packed)
    assert torch.equal(decoded.view(torch.int16), weights.view(torch.int16))
    x = gaussian(rows, columns, seed=1, dtype=dtype).cuda()
    assert_as_exact_as_torch(torch_ops.linear(x, packed), x, weights)
