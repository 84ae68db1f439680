"""The check at the first use of a GPU: right results pass, wrong ones are refused, and it runs once.

Triton's interpreter stands for the GPU, so the CPU is made a device that is checked. A card that computes
wrong results is one whose kernel has run and has one bit of its result changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from tensors import gaussian

from neuzip.kernels.device import first_use
from neuzip.kernels.device.first_use import WrongResults
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.packed_linear import first_use as packed_checks
from neuzip.kernels.packed_linear import ops, reference
from neuzip.kernels.packed_linear.triton import linear, pack
from neuzip.kernels.rans.coded import (
    COLUMN_FACTORS,
    CROSSING_ROWS,
    ON_GRID,
    PATTERNS,
    Kind,
)
from neuzip.kernels.rans.coded_sample import coded_weights
from neuzip.kernels.rans.triton import decode

CPU = torch.device("cpu")
GPU = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
BF16 = torch.bfloat16
KINDS = [
    Kind(FORMATS["BF16"], 7, 2, 0),
    Kind(FORMATS["F16"], 10, 1, 0),
    Kind(FORMATS["BF16"], 2, 2, 0),
    Kind(FORMATS["BF16"], 0, 1, 0, ON_GRID),
    Kind(FORMATS["F16"], 0, 2, 0, ON_GRID | COLUMN_FACTORS),
    Kind(FORMATS["F32"], 0, 1, 0, ON_GRID | CROSSING_ROWS),
    Kind(FORMATS["BF16"], 0, 2, 0, ON_GRID | COLUMN_FACTORS | CROSSING_ROWS),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing has been used, and whose CPU is checked as a GPU is."""
    monkeypatch.setattr(first_use, "_passed", set())
    monkeypatch.setattr(first_use, "DEVICE_TYPES", {"cpu", "cuda"})
    monkeypatch.setattr(ops, "on_gpu", lambda _: True)  # the interpreter takes CPU tensors


def wrong(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, result: Callable[..., Any]) -> None:
    """Have a function of a kernel run, and then change the lowest bit of its first result."""
    run = getattr(module, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        returned = run(*arguments, **options)
        tensor = result(returned, *arguments)
        tensor.view(-1)[:1].view(torch.uint8)[:1].bitwise_xor_(1)
        return returned

    monkeypatch.setattr(module, name, changed)


def decode_one(kind: Kind, runs: int = 4) -> None:
    tensor, bits = coded_weights(kind, runs, GPU)
    out = torch.empty(bits.size, dtype=PATTERNS[kind.fmt.bits], device=GPU)
    assert not decode.decode([tensor], [out]).any()
    assert (out.cpu().numpy().view(bits.dtype) == bits).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_decoder_that_is_right_passes_once(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_one(kind)
    operation = decode.OPERATION_ON_GRID if kind.grid else decode.OPERATION
    assert first_use.is_checked(operation, GPU)
    monkeypatch.setattr(decode, "decodes_sample", lambda *_: pytest.fail("checked twice"))
    decode_one(kind)


def test_a_wrong_decoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, decode, "launch", lambda _, kernel, grid, inp, out, *rest: out)
    for _ in range(2):  # until it is right
        with pytest.raises(WrongResults, match=r"decoding rANS codes gives other results") as refused:
            decode.decode(*two_arguments())
    assert "`neuzip doctor`" in refused.value.hint
    monkeypatch.setenv("NEUZIP_GPU_CHECK", "0")
    decode.decode(*two_arguments())


def two_arguments() -> tuple[list[Any], list[torch.Tensor]]:
    tensor, bits = coded_weights(KINDS[0], 4, GPU)
    return [tensor], [torch.empty(bits.size, dtype=torch.int16, device=GPU)]


@pytest.mark.parametrize("shape", [(5, 70), (20, 256)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_tile_of_packed_weights_is_decoded(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """With far words and escapes: every tile, from whatever row on."""
    weight = gaussian(*shape, dtype=dtype)
    weight[:, ::7] *= 1e-4
    weight[shape[0] // 2, :3] = float("inf")
    packed = pack.pack(weight.to(GPU))
    for start in range(0, shape[0], 3):
        assert packed_checks.is_same(weight[start:], packed, start)
        changed = weight[start:].clone()
        changed.view(torch.int16)[0, -1] ^= 1
        assert not packed_checks.is_same(changed, packed, start)


def test_wrong_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(16, 64, dtype=BF16).to(GPU)
    packed = ops.pack(weight)
    assert same_bits(ops.decode(packed), weight)
    assert first_use.is_checked(packed_checks.PACKING, GPU)
    assert first_use.is_checked(packed_checks.DECODING, GPU)
    monkeypatch.setattr(first_use, "_passed", set())
    wrong(monkeypatch, pack, "decode", lambda _, packed, start, stop, dense: dense)
    with pytest.raises(WrongResults, match="decoding packed weights gives other results"):
        ops.decode(packed)
    wrong(monkeypatch, pack, "pack", lambda packed, weight: packed.words)
    with pytest.raises(WrongResults, match="packing weights gives other results"):
        ops.pack(weight)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack.pack(gaussian(20, 128, dtype=BF16).to(GPU))
    x = gaussian(rows, 128, dtype=BF16).to(GPU)
    bias = gaussian(1, 20, dtype=BF16)[0].to(GPU) if has_bias else None
    assert packed_checks.multiplies(x, packed, bias, ops._multiply_packed)

    def with_wrong_words(x: Any, packed: Any, bias: Any) -> Any:
        packed.words[0, 0] ^= 0x40404040
        packed.wait()  # a GPU reads words before the kernel that changes them has ended
        try:
            return ops._multiply_packed(x, packed, bias)
        finally:
            packed.words[0, 0] ^= 0x40404040

    assert not packed_checks.multiplies(x, packed, bias, with_wrong_words)


@pytest.mark.filterwarnings(
    "error:invalid value:RuntimeWarning:neuzip", "ignore:invalid value:RuntimeWarning:numpy"
)
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 1e-5), (torch.float16, 1e-7), (BF16, 1e-39), (BF16, 0.02)], ids=str
)
def test_a_right_product_passes_with_weights_of_any_size(dtype: torch.dtype, size: float) -> None:
    """Results below a dtype's normal numbers have other roundings; three rows have no finite result."""
    weight = (gaussian(20, 256, dtype=torch.float32) * size).to(dtype)
    weight[1, 3], weight[2, 5], weight[3, :2] = torch.nan, torch.inf, torch.tensor([torch.inf, -torch.inf])
    ops.linear(gaussian(1, 256, dtype=dtype).to(GPU), ops.pack(weight.to(GPU)))
    assert first_use.is_checked(packed_checks.PRODUCTS, GPU)


@pytest.mark.parametrize("shape", [(0, 64), (16, 0)], ids=str)
def test_weights_without_values_have_nothing_to_check(shape: tuple[int, int]) -> None:
    packed = ops.pack(torch.empty(shape, dtype=BF16, device=GPU))
    assert ops.decode(packed).shape == shape
    assert ops.decode(ops.pack(torch.zeros(16, 64, dtype=BF16, device=GPU)), slice(16, 16)).shape == (0, 64)


def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack.pack(gaussian(20, 128, dtype=BF16).to(GPU))
    x = gaussian(1, 128, dtype=BF16).to(GPU)
    run = linear.linear
    monkeypatch.setattr(linear, "linear", lambda *arguments: run(*arguments) * 1.02)
    with pytest.raises(WrongResults, match="multiplying with packed weights gives other results"):
        ops.linear(x, packed)
    monkeypatch.setattr(linear, "linear", run)
    packed._derived.clear()  # as of weights that nothing has been multiplied with
    ops.linear(x, packed)
    assert first_use.is_checked(packed_checks.PRODUCTS, GPU)


def test_nothing_is_checked_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first_use.check_first_use("x", card, lambda: pytest.fail("waits for the device"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    calls: list[int] = []
    for _ in range(2):
        first_use.check_first_use("x", card, lambda: calls.append(1) is None)
    assert calls == [1]


def test_the_message_names_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    error = first_use.wrong_results("packing weights", torch.device("cuda", 1))
    assert error.message.startswith("NVIDIA H200 (cuda:1): packing weights gives other results than on the")


def test_a_cpu_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "DEVICE_TYPES", {"cuda"})
    first_use.check_first_use("x", CPU, lambda: pytest.fail("it is"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_a_real_card_passes(rows: int) -> None:
    """Shapes of a model, and each kernel for products. Without Hopper, 200 rows decode first."""
    decode_one(KINDS[0], runs=64)
    weight = gaussian(4096, 2048, dtype=BF16).to(GPU)
    packed = ops.pack(weight)
    assert same_bits(ops.decode(packed), weight)
    ops.linear(weight[:rows], packed)
    passed = {operation for operation, device in first_use._passed if device == GPU}
    assert passed >= {decode.OPERATION, packed_checks.PACKING, packed_checks.DECODING}


def test_the_reference_is_what_results_are_compared_with() -> None:
    packed = pack.pack(gaussian(33, 96, dtype=BF16).to(GPU))
    assert reference.decode(packed_checks.tile_of(packed, 2)).shape == (1, 96)
