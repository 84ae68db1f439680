"""Sparse deltas of blocks: loops and kernels agree with the reference, and refuse what no encoder writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from neuzip.kernels import sparse_delta
from neuzip.kernels.device import first_use as checks
from neuzip.kernels.device.first_use import WrongResults
from neuzip.kernels.sparse_delta import BlockMap, CodedDelta, first_use, ops, reference
from neuzip.kernels.sparse_delta.blocks import MOST_ROWS
from neuzip.kernels.sparse_delta.numbers import BLOCK
from neuzip.kernels.sparse_delta.triton import launches

SHAPES = (0, 1, 31, 4095, 4096, 4097, 8192)
SHARES = (1.0, 0.5, 0.01, 0.3, 0.0003, 1.0, 0.0)

DEVICES = ["loops", pytest.param("gpu", marks=pytest.mark.gpu)] + (
    [] if torch.cuda.is_available() else ["kernels"]
)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where deltas are made and applied: numba's loops, Triton's interpreter, or a GPU."""
    monkeypatch.setattr(ops, "INTERPRET", request.param == "kernels")
    return torch.device("cuda" if request.param == "gpu" else "cpu")


def states(bits: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Patterns before and after: small steps, large ones, and the largest both ways."""
    rng = np.random.default_rng(bits)
    old, new = [], []
    for numel, share in zip(SHAPES, SHARES, strict=True):
        a = rng.integers(0, (1 << bits) - 1, numel, dtype=np.uint64, endpoint=True).astype(f"u{bits // 8}")
        steps = np.array([1, -1, 1, 2, -3, 100, 1 << (bits - 1), (1 << (bits - 1)) - 1], object)
        chosen = [int(d) % (1 << bits) for d in rng.choice(steps, numel)]
        step = np.where(rng.random(numel) < share, np.array(chosen, np.uint64), np.uint64(0))
        old.append(a)
        new.append((a + step.astype(a.dtype)).astype(a.dtype))
    return old, new


def tensors(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    return [torch.from_numpy(a.view(f"i{a.itemsize}").copy()).to(device) for a in arrays]


def coded_by_reference(
    old: list[np.ndarray], new: list[np.ndarray], bits: int
) -> tuple[list[int], list[int]]:
    descriptors, words = [], []
    for a, b in zip(old, new, strict=True):
        for at in range(0, a.size, BLOCK):
            block = slice(at, at + BLOCK)
            descriptor, own = reference.encode_block(a[block].tolist(), b[block].tolist(), bits)
            places, differences = reference.decode_block(descriptor, own, a[block].size, bits)
            assert places == np.flatnonzero(a[block] != b[block]).tolist()
            restored = a[block].tolist()
            for place, difference in zip(places, differences, strict=True):
                restored[place] = (restored[place] + difference) % (1 << bits)
            assert restored == b[block].tolist()
            descriptors.append(descriptor)
            words += own
    return descriptors, words


@pytest.mark.parametrize("bits", [8, 16, pytest.param(32, marks=pytest.mark.slow), 64])
def test_all_agree_with_the_reference(bits: int, device: torch.device) -> None:
    old, new = states(bits)
    before, after = tensors(old, device), tensors(new, device)
    blocks = BlockMap.of(before)
    coded = sparse_delta.encode(before, after, blocks)
    descriptors, words = coded_by_reference(old, new, bits)
    assert coded.descriptors.cpu().numpy().view(np.uint32).tolist() == descriptors
    assert coded.words.cpu().numpy().view(np.uint32).tolist() == words
    digest = int(sparse_delta.digest(before, blocks))
    assert digest % (1 << 64) == reference.digest([a.tolist() for a in old])
    checked = sparse_delta.check(before, blocks, coded)
    assert not checked.broken
    numbers = sparse_delta.changed(blocks, coded, checked)
    for own, a, b in zip(numbers, old, new, strict=True):
        assert own.tolist() == np.flatnonzero(a != b).tolist()
    sparse_delta.apply(before, blocks, coded, checked)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (digest + int(checked.change) - int(sparse_delta.digest(after, blocks))) % (1 << 64) == 0


def test_tensors_of_several_dtypes_share_a_delta(device: torch.device) -> None:
    """Tensors of a dtype are not side by side, in the list nor in memory."""
    memory = torch.zeros(3 * BLOCK, dtype=torch.int16, device=device)
    before = [memory[BLOCK : BLOCK + 5], torch.zeros(9, device=device), memory[:BLOCK], memory[-1:]]
    after = [t + 1 for t in before]
    blocks = BlockMap.of(before)
    coded = sparse_delta.encode(before, after, blocks)
    checked = sparse_delta.check(before, blocks, coded)
    sparse_delta.apply(before, blocks, coded, checked)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert int(memory.sum()) == BLOCK + 6


def test_a_program_codes_blocks_in_turn(device: torch.device, monkeypatch) -> None:
    """With lists of places that are longer and shorter than those before, and empty ones."""
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 1)  # so that there are few programs
    counts = [200, 3, 0, 77, 1] * 10
    weights = np.arange(200, dtype=np.uint16)
    old = [weights] * len(counts)
    new = [np.where(weights >= 200 - count, weights * 5 + 1, weights).astype(np.uint16) for count in counts]
    before, after = tensors(old, device), tensors(new, device)
    coded = sparse_delta.encode(before, after, BlockMap.of(before))
    descriptors, words = coded_by_reference(old, new, 16)
    assert coded.descriptors.cpu().numpy().view(np.uint32).tolist() == descriptors
    assert coded.words.cpu().numpy().view(np.uint32).tolist() == words


@pytest.mark.parametrize("bits", [8, 16, 64])
def test_the_sample_of_the_first_use_passes(bits: int, device: torch.device) -> None:
    assert first_use.makes(ops.encode, bits, device)
    assert first_use.applies(ops.check_and_apply, ops.digest, bits, device)


@pytest.mark.parametrize("name", ["measure", "encode", "digest", "check", "apply"])
def test_a_device_with_wrong_results_is_refused_at_its_first_use(name: str, monkeypatch) -> None:
    """Triton's interpreter stands for a GPU, and one bit of a kernel's result is changed."""
    monkeypatch.setattr(ops, "INTERPRET", True)
    monkeypatch.setattr(checks, "_passed", set())
    monkeypatch.setattr(checks, "DEVICE_TYPES", {"cpu"})
    run = getattr(launches, name)

    def wrong(*arguments: Any) -> Any:
        result = run(*arguments)
        target = {"measure": 3, "encode": 5, "apply": 0}.get(name)
        if target is None:
            return result ^ 1 if name == "digest" else (result[0] ^ 1, result[1])
        target = arguments[target][0] if name == "apply" else arguments[target]
        target[:1] ^= 1
        return result

    monkeypatch.setattr(launches, name, wrong)
    weights = [torch.arange(9, dtype=torch.int8)]
    operation, use = first_use.APPLYING, partial(ops.digest, weights, BlockMap.of(weights))
    if name in ("measure", "encode"):
        operation, use = first_use.MAKING, partial(ops.encode, weights, weights, BlockMap.of(weights))
    with pytest.raises(WrongResults, match=f"{operation} of 8 bits gives other results than on the CPU"):
        use()
    assert weights[0].tolist() == [*range(9)]


def test_tables_of_the_same_memory_are_uploaded_once(device: torch.device) -> None:
    blocks = BlockMap((3, BLOCK + 1, 5), (2, 2, 4))
    rows = blocks.rows((0, 7, 0), device)
    assert rows.tolist() == [[0, 3, 0], [1, BLOCK + 1, 7], [3, 5, 0]]
    assert blocks.rows((0, 7, 0), device) is rows
    for offset in range(1000, 1000 + MOST_ROWS):
        blocks.rows((0, offset, 0), device)
    again = blocks.rows((0, 7, 0), device)
    assert again is not rows and torch.equal(again, rows)


def test_nothing_has_a_delta(device: torch.device) -> None:
    coded = sparse_delta.encode([], [], blocks := BlockMap((), ()))
    checked = sparse_delta.check([], blocks, coded)
    assert not checked.broken and int(checked.change) == 0 and coded.words.numel() == 0


def bits_of(words: torch.Tensor) -> list[int]:
    return [int(word) >> j & 1 for word in words.numpy().view(np.uint32) for j in range(32)]


def of_bits(bits: list[int]) -> torch.Tensor:
    whole = bits + [0] * (-len(bits) % 32)
    words = [sum(bit << j for j, bit in enumerate(whole[at : at + 32])) for at in range(0, len(whole), 32)]
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


def accepts(descriptor: int, words: torch.Tensor, numel: int, bits: int) -> bool:
    """Whether the reference takes a block, and so what `check` has to say of it."""
    try:
        reference.decode_block(descriptor, words.numpy().view(np.uint32).tolist(), numel, bits)
    except reference.BrokenBlock:
        return False
    return True


@pytest.mark.parametrize("bits", [8, 64])
def test_any_damage_is_judged_as_the_reference_does(bits: int, device: torch.device) -> None:
    """Every bit of a block flipped, words missing and too many, and descriptors of all kinds."""
    numel = 100
    before = torch.arange(numel).to({8: torch.uint8, 64: torch.int64}[bits])
    after = before.clone()
    after[[0, 1, 50, 98, 99]] += torch.tensor([1, 255 if bits == 8 else -1, 60, 3, 1]).to(before.dtype)
    weights, blocks = [before.to(device)], BlockMap.of([before])
    coded = sparse_delta.encode([before], [after], blocks) if device.type == "cpu" else None
    coded = coded or sparse_delta.encode(weights, [after.to(device)], blocks)
    right, words = int(coded.descriptors.cpu()), coded.words.cpu()
    stream = bits_of(words)
    damaged = [
        (right, of_bits([*stream[:at], 1 - stream[at], *stream[at + 1 :]])) for at in range(len(stream))
    ]
    damaged += [(right ^ 1 << at, words) for at in range(32)]
    damaged += [(right, words[:-1]), (right, torch.cat([words, words[:1] * 0])), (0, words[:0]), (0, words)]
    damaged += [(0xFFFFFFFF, words), (101, words), (0x1FFF, words), (5 | 6 << 13, words)]
    for descriptor, own in [(right, words), *damaged]:
        signed = torch.from_numpy(np.array([descriptor], np.uint32).view(np.int32))
        checked = sparse_delta.check(weights, blocks, CodedDelta(signed.to(device), own.to(device)))
        assert bool(checked.broken) != accepts(descriptor, own, numel, bits), (hex(descriptor), bits_of(own))
    assert torch.equal(weights[0].cpu(), before)


def test_magnitudes_beyond_the_dtype_are_refused(device: torch.device) -> None:
    """An encoder writes -128 for a byte and never +128, and no magnitude above."""
    for sign, rest, right in ((1, 126, True), (0, 126, False), (1, 127, False), (0, 125, True)):
        descriptor = 1 | 1 << 13 | 7 << 26
        stream = [1, *[0] * 12, sign, 1, *(rest >> j & 1 for j in range(7))]
        words = of_bits(stream)
        assert accepts(descriptor, words, 1, 8) == right
        signed = torch.from_numpy(np.array([descriptor], np.uint32).view(np.int32))
        weights = [torch.zeros(1, dtype=torch.uint8, device=device)]
        coded = CodedDelta(signed.to(device), words.to(device))
        assert bool(sparse_delta.check(weights, BlockMap.of(weights), coded).broken) != right
