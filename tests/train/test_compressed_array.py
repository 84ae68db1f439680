"""Arrays of training that are held compressed: the same bits, coded again with the table of before."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neuzip.errors import NeuzipError
from neuzip.kernels.rans.coded import PATTERNS
from neuzip.kernels.rans.triton import encode as triton_encode
from neuzip.train import compressed_array as holding
from neuzip.train.compressed_array import NumbaCompressedArray, TritonCompressedArray, store_array

pytestmark = pytest.mark.usefixtures("one_thread")

_BY_TRITON = [
    pytest.param(torch.bfloat16, True, id="bf16 by triton"),
    *(
        pytest.param(one, True, id=f"{one} by triton", marks=pytest.mark.slow)
        for one in (torch.float16, torch.float32)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "triton"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float32, False), *_BY_TRITON],
)
def test_what_is_held_is_what_was_given(dtype: torch.dtype, triton: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    flat = (torch.randn(17_000) * 0.02).to(dtype)
    flat[:6] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-30]).to(dtype)
    flat = flat.to(device if triton else "cpu")
    held = store_array(flat.clone(), True, triton=triton)
    assert isinstance(held, TritonCompressedArray if triton else NumbaCompressedArray)
    for fill in (0, 255):
        buffer = torch.full((flat.nbytes + 512,), fill, dtype=torch.uint8, device=flat.device)
        found = held.open(buffer)
        assert torch.equal(found.view(torch.uint8), flat.view(torch.uint8))
        found.mul_(1.5)  # what is read later is what was kept, not what lies in the buffer
    held.close(flat * 2)
    assert torch.equal(held.open(buffer).view(torch.uint8), (flat * 2).view(torch.uint8))
    if dtype == torch.bfloat16:
        assert held.nbytes < 0.70 * flat.nbytes


def as_bits(flat: Tensor) -> Tensor:
    return flat.view(PATTERNS[8 * flat.itemsize])


@pytest.mark.usefixtures("recodes")
def test_small_changes_are_coded_by_the_table_of_before(device: torch.device) -> None:
    """In the same memory, without a census, and decoded in either of two buffers."""
    numel = 2000
    flat = (torch.randn(numel) * 0.02).bfloat16().to(device)
    held = store_array(flat, True, triton=True)
    assert isinstance(held, TritonCompressedArray) and held._coded is not None
    table, words, nbytes = held._coded.table, held._coded.words.data_ptr(), held.nbytes
    buffers = [torch.empty(2 * numel + 100, dtype=torch.uint8, device=device) for _ in range(2)]
    for step in range(3):
        found = held.open(buffers[step % 2])
        assert torch.equal(as_bits(found), as_bits(flat))
        flat[step::100] *= 1 + 2**-7
        flat[step] = [math.nan, -0.0, -math.inf][step]
        found.copy_(flat)
        held.close(found)
        assert held._coded.table is table
        assert (held._coded.words.data_ptr(), held.nbytes) == (words, nbytes)
    for buffer in buffers:
        found = held.open(buffer)
        assert found.data_ptr() == buffer.data_ptr()
        assert torch.equal(as_bits(found), as_bits(flat))
    assert held.errors is not None and held.errors.tolist() == [0]


@pytest.mark.usefixtures("recodes")
def test_words_that_outgrow_their_room_get_a_new_table(device: torch.device) -> None:
    flat = (torch.randn(700) * 0.02).bfloat16().to(device)
    buffer = torch.empty(2000, dtype=torch.uint8, device=device)
    held = store_array(flat, True, triton=True)
    assert isinstance(held, TritonCompressedArray) and held._coded is not None
    held.open(buffer)
    before, flat = held._coded.table, flat * 2**40
    held.close(flat)
    assert held._coded.table is not before
    again = held._coded.table
    assert torch.equal(as_bits(held.open(buffer)), as_bits(flat))
    held.close(flat)
    assert held._coded.table is again


@pytest.mark.usefixtures("recodes")
def test_weights_that_use_less_bits_are_coded_from_scratch(device: torch.device) -> None:
    """States are zeros before the first step, and then numbers of many bits."""
    buffer = torch.empty(3000, dtype=torch.uint8, device=device)
    held = store_array(torch.zeros(600, device=device), True, triton=True)
    assert isinstance(held, TritonCompressedArray)
    zeros, some = torch.zeros(600), torch.randn(600)
    for flat in (torch.ones(600), some, some.roll(1), zeros, some):
        held.close(flat.to(device))
        assert torch.equal(as_bits(held.open(buffer)), as_bits(flat.to(device)))
        assert (held._recoder is not None) == (len(flat.unique()) > 1)


def test_a_small_array_has_no_table_at_hand(device: torch.device) -> None:
    """It would take more than it saves."""
    held = store_array((torch.randn(2000) * 0.02).bfloat16().to(device), True, triton=True)
    assert isinstance(held, TritonCompressedArray) and held._recoder is None


@pytest.mark.usefixtures("recodes")
def test_what_could_not_be_coded_again_is_not_decoded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.randn(300).bfloat16().to(device)
    held = store_array(flat, True, triton=True)
    buffer = torch.empty(1000, dtype=torch.uint8, device=device)
    held.open(buffer)

    def fail(self: triton_encode.Recoder, bits: Tensor) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(triton_encode.Recoder, "code", fail)
    with pytest.raises(torch.OutOfMemoryError):
        held.close(flat)
    with pytest.raises(AssertionError):
        held.open(buffer)
    monkeypatch.undo()
    monkeypatch.setattr(holding, "CODING_SHARE", 0)
    for _ in range(2):
        held.close(flat)
        assert torch.equal(as_bits(held.open(buffer)), as_bits(flat))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_large_array_is_coded_again_and_again(dtype: torch.dtype) -> None:
    """40 million weights and some, changed a little in each round; at last so much that the table is new."""
    torch.manual_seed(0)
    flat = (torch.randn(40_000_000 + 12_345, device="cuda") * 0.02).to(dtype)
    held = store_array(flat, True)
    assert isinstance(held, TritonCompressedArray) and held._coded is not None
    table, nbytes = held._coded.table, held.nbytes
    buffers = [torch.empty(flat.nbytes + 512, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for step in range(4):
        found = held.open(buffers[step % 2])
        assert torch.equal(as_bits(found), as_bits(flat))
        # In fp32: the sum of 40 million fp16 weights is infinite in fp16.
        flat += 1e-3 * torch.randn_like(flat) * flat.float().abs().nanmean().to(dtype)
        assert not flat.isinf().any()
        flat[step * 1000 : step * 1000 + 500] = math.nan
        found.copy_(flat)
        held.close(found)
        assert held._coded.table is table and held.nbytes == nbytes
    held.close(flat.fill_(1.0).mul_(torch.randn_like(flat)))
    assert torch.equal(as_bits(held.open(buffers[0])), as_bits(flat))
    assert held._coded.table is not table
    assert held.errors is not None and held.errors.tolist() == [0]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(NeuzipError, match=r"weights of torch\.float64 cannot be held compressed"):
        store_array(torch.zeros(10, dtype=torch.float64), True)
