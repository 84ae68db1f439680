"""The GPU encoder: the CPU's bytes for every format and number of mantissa bits, however it is launched.

Where there is no CUDA device, Triton's interpreter runs the same kernels on small tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import weight_patterns

from neuzip.compress.schemes import lossless
from neuzip.kernels import rans
from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat, census, split
from neuzip.kernels.rans.numbers import BLOCK, SCALE
from neuzip.kernels.rans.triton import census as triton_census
from neuzip.kernels.rans.triton import device_table, encode_blocks, encode_planes, encoder_table, lists
from neuzip.kernels.rans.triton import encode as triton_encode
from neuzip.kernels.rans.triton.encode import GpuEncoded, Recoder, encode, encode_all

BF16 = FORMATS["BF16"]
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


def gaussian(fmt: FloatFormat, numel: int, seed: int = 0) -> Bits:
    """Weights as they are in models, with escapes."""
    return weight_patterns(fmt.name, numel, seed=seed)


def anything(fmt: FloatFormat, numel: int, seed: int = 0) -> Bits:
    """Every pattern there is: NaNs with payloads, infinities, denormals, zeros."""
    raw = np.random.default_rng(seed).integers(0, 256, numel * fmt.bits // 8).astype(np.uint8)
    return raw.view(fmt.dtype)


def truncated(bits: Bits, fmt: FloatFormat, kept: int) -> Bits:
    drop = fmt.dtype.type(fmt.mantissa_bits - kept)
    return bits >> drop << drop


def same_as_on_the_cpu(bits: Bits, fmt: FloatFormat, device: torch.device, **launch: Any) -> rans.Table:
    """Code `bits` in both ways and compare all that comes out; the table."""
    tensor = torch.from_numpy(bits.view(SIGNED[bits.itemsize])).to(device)
    got = encode(tensor, fmt, **launch)
    counted = census(bits, fmt)
    kept = counted.kept_bits(fmt)
    table = rans.build_table(counted.exponents, counted.pairs)
    exponents, planes = split(bits, fmt, kept)
    coded = rans.encode(exponents, table)
    assert got.kept_bits == kept
    assert got.table.group == table.group
    assert got.table.palette.tobytes() == table.palette.tobytes()
    assert got.table.frequencies.tobytes() == table.frequencies.tobytes()
    assert list(got.planes) == list(planes)
    for width, plane in planes.items():
        assert got.planes[width].cpu().numpy().tobytes() == plane.tobytes(), f"plane {width}"
    assert got.index.cpu().numpy().tobytes() == coded.index.tobytes()
    assert got.words.cpu().numpy().tobytes() == coded.words.tobytes()
    return table


@formats
@pytest.mark.parametrize("numel", [1, 2, 255, 257, 1300])
def test_ragged_sizes(fmt: FloatFormat, numel: int, device: torch.device) -> None:
    same_as_on_the_cpu(gaussian(fmt, numel), fmt, device)


@formats
def test_all_patterns(fmt: FloatFormat, device: torch.device, poison: None) -> None:
    same_as_on_the_cpu(anything(fmt, 1021), fmt, device)


@formats
def test_all_numbers_of_mantissa_bits(fmt: FloatFormat, device: torch.device) -> None:
    bits = anything(fmt, 300)
    for kept in range(fmt.mantissa_bits + 1):
        same_as_on_the_cpu(truncated(bits, fmt, kept), fmt, device)


@pytest.mark.parametrize("value", [0x0000, 0x8000, 0x0001, 0x3F80, 0x7F80, 0xFFFF])
def test_one_symbol(value: int, device: torch.device) -> None:
    for numel in (1, 3, 800):
        same_as_on_the_cpu(np.full(numel, value, np.uint16), BF16, device)


def test_blocks(device: torch.device, poison: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole blocks in a program and what is left, with escapes in both; their lengths in two tiles."""
    monkeypatch.setattr(encode_blocks, "_ENDS_TILE", 2)
    bits = gaussian(BF16, 2 * BLOCK + 300)
    bits[:: BLOCK // 3] = 0x0123
    table = same_as_on_the_cpu(bits, BF16, device, warps=2)
    assert table.group == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [{}, {"warps": 1, "scratch": 0}, {"warps": 2, "threads": 32, "programs": 3, "scratch": 0}, {"warps": 8}],
)
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "singles"])
def test_launches_give_the_same_bytes(launch: dict[str, Any], pairs: bool, device: torch.device) -> None:
    bits = gaussian(BF16, 4 * BLOCK + 1) if pairs else anything(BF16, 4 * BLOCK + 1)
    table = same_as_on_the_cpu(bits, BF16, device, **launch)
    assert table.group == (2 if pairs else 1)


@pytest.mark.parametrize("name", ["BF16", "F32"])
def test_exponents_outside_the_window(name: str, device: torch.device) -> None:
    """Many zeros, and a few weights far from all others on both sides."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(1)
    bits = gaussian(fmt, 5001)
    bits[rng.random(bits.size) < 0.3] = 0
    for exponent in (1, 3, 200, 255):
        bits[rng.integers(0, bits.size, 3)] = exponent << fmt.mantissa_bits
    same_as_on_the_cpu(bits, fmt, device)


def test_more_exponents_than_a_palette(device: torch.device) -> None:
    fmt = FORMATS["F64"]
    rng = np.random.default_rng(0)
    exponents = np.where(rng.random(2000) < 0.8, rng.integers(1000, 1020, 2000), rng.integers(0, 2048, 2000))
    bits = exponents.astype(np.uint64) << np.uint64(52) | rng.integers(0, 1 << 52, 2000).astype(np.uint64)
    table = same_as_on_the_cpu(bits, fmt, device)
    assert table.palette.size == 256


def test_one_exponent_in_nearly_all_weights(device: torch.device) -> None:
    """Frequencies near SCALE, and one that is divided with an addend."""
    bits = np.full(6000, 0x3F80, np.uint16)
    bits[::40] = 0x3F00
    same_as_on_the_cpu(bits, BF16, device)
    with_addend = np.flatnonzero(encoder_table.division_facts() >> 44 & 1)
    share = int(with_addend[0]) * 3000 // SCALE
    for pairs in range(share, 3000):  # that many of one exponent twice
        bits = np.full(6000, 0x3F80, np.uint16)
        bits[2 * pairs :] = 0x3F00
        counted = census(bits, BF16)
        if np.isin(rans.build_table(counted.exponents, counted.pairs).frequencies, with_addend).any():
            break
    table = same_as_on_the_cpu(bits, BF16, device)
    assert np.isin(table.frequencies, with_addend).any()


@given(
    st.sampled_from(list(FORMATS.values())),
    st.integers(1, 900),
    st.integers(1, 40),
    st.integers(0, 52),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
@pytest.mark.slow
def test_any_weights(fmt: FloatFormat, numel: int, alphabet: int, kept: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    letters = rng.integers(0, 1 << fmt.exponent_bits, alphabet)
    skew = rng.random(alphabet) ** 8 + 1e-9
    exponents = rng.choice(letters, numel, p=skew / skew.sum()).astype(fmt.dtype)
    mantissas = truncated(anything(fmt, numel, seed), fmt, min(kept, fmt.mantissa_bits))
    mask = fmt.dtype.type(((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits)
    bits = exponents << fmt.dtype.type(fmt.mantissa_bits) | mantissas & ~mask
    same_as_on_the_cpu(bits, fmt, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.parametrize("name", ["BF16", "F32", "F64"])
def test_tensors_of_a_list(name: str, device: torch.device, poison: None) -> None:
    """Of all sizes, coded in pairs and singly, with addends, with fewer mantissa bits; in batches or not."""
    fmt = FORMATS[name]
    skewed = np.full(3000, 1 << (fmt.bits - 3), fmt.dtype)
    skewed[::40] = 1
    originals = [
        gaussian(fmt, 700), anything(fmt, 900), gaussian(fmt, 1), gaussian(fmt, BLOCK + 5, 1), skewed,
        truncated(gaussian(fmt, 600, 2), fmt, 2), truncated(anything(fmt, 257), fmt, 0), gaussian(fmt, 256),
    ]  # fmt: skip
    tensors = [on(device, bits) for bits in originals]
    one_by_one = [encode(bits, fmt, warps=1) for bits in tensors]
    for scratch in (None, 0, 3 * encode_blocks.scratch_bytes(2)):
        together = encode_all(tensors, fmt, warps=1, scratch=scratch, spare=9)
        for bits, alone, one in zip(originals, one_by_one, together, strict=True):
            assert one.kept_bits == alone.kept_bits == census(bits, fmt).kept_bits(fmt)
            assert one.table.palette.tolist() == alone.table.palette.tolist()
            assert one.table.frequencies.tolist() == alone.table.frequencies.tolist()
            exponents, planes = split(bits, fmt, one.kept_bits)
            coded = rans.encode(exponents, one.table)
            assert one.index.cpu().numpy().tobytes() == coded.index.tobytes()
            assert one.words.cpu().numpy().tobytes() == coded.words.tobytes()
            assert one.words.data_ptr() % 16 == 0
            assert [*one.planes] == [*planes]
            for width, plane in planes.items():
                assert one.planes[width].cpu().numpy().tobytes() == plane.tobytes()


def test_more_tensors_than_a_list_takes(device: torch.device) -> None:
    originals = [gaussian(BF16, 1 + seed % 5, seed) for seed in range(lists.MOST + 2)]
    coded = encode_all([on(device, bits) for bits in originals], BF16)
    for bits, one in zip(originals, coded, strict=True):
        exponents, _ = split(bits, BF16, one.kept_bits)
        assert one.words.cpu().numpy().tobytes() == rans.encode(exponents, one.table).words.tobytes()
    assert encode_all([], BF16) == []


def test_usual_tensors_are_coded_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched before the host knows the tables is right for them, and the host waits once."""
    groups = []
    monkeypatch.setattr(
        triton_encode, "BlockCoder", lambda *a: groups.append(a[4:6]) or encode_blocks.BlockCoder(*a)
    )
    tensors = [on(device, gaussian(BF16, numel)) for numel in (600, 1200)]
    assert [one.table.group for one in encode_all(tensors, BF16)] == [2, 2]
    assert groups == [(2, False)]
    assert not (encoder_table.division_facts()[:2048] >> 44 & 1).any()


def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Words that there is memory for, of every gathering from now on."""
    rooms: list[int] = []
    gather = encode_blocks.BlockCoder.gather

    def recorded(self: Any, at: int, words: torch.Tensor, first_word: int = 0) -> None:
        rooms.append(words.numel())
        gather(self, at, words, first_word)

    monkeypatch.setattr(encode_blocks.BlockCoder, "gather", recorded)
    return rooms


@pytest.mark.parametrize("name", ["BF16", "F16", "F64"])
def test_memory_for_words_is_estimated(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little more than is needed, whether weights have many escapes, or all one symbol, or fill a run."""
    fmt, rooms = FORMATS[name], gathered(monkeypatch)
    for bits in (
        gaussian(fmt, BLOCK + 77), np.full(9000, 1, fmt.dtype), gaussian(fmt, 1), gaussian(fmt, 6000, 3),
    ):  # fmt: skip
        encoded = encode(on(device, bits), fmt)
        needed = encoded.words.numel()
        assert needed <= rooms[-1] <= needed * 1.04 + 4 * 64
    assert len(rooms) == 4


@pytest.mark.parametrize("spare", [0, 50])
def test_an_estimate_that_is_too_small(
    spare: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, poison: None
) -> None:
    """For all tensors together: the words of some, or of none, had room. They are gathered again."""
    originals = [gaussian(BF16, 700), anything(BF16, 300), gaussian(BF16, 5000, 1), gaussian(BF16, 40, 2)]
    for unit in (1, 30):
        with monkeypatch.context() as patch:
            patch.setattr(encoder_table, "WORDS_UNIT", unit)
            rooms = gathered(patch)
            coded = encode_all([on(device, bits) for bits in originals], BF16, spare=spare)
        assert len(rooms) == 3 and rooms[0] < rooms[1]
        for bits, one in zip(originals, coded, strict=True):
            exponents, _ = split(bits, BF16, one.kept_bits)
            assert one.words.cpu().numpy().tobytes() == rans.encode(exponents, one.table).words.tobytes()


def test_streams_are_those_of_the_codec(device: torch.device) -> None:
    bits = gaussian(BF16, 9000)
    kept, streams = lossless.encode(lambda start, stop: bits[start:stop], bits.size, BF16)
    got = encode(torch.from_numpy(bits.view(np.int16)).to(device), BF16)
    assert got.kept_bits == kept
    for name, part in {"index": got.index, "words": got.words, "sign_mantissa": got.planes[8]}.items():
        stream = b"".join(np.ascontiguousarray(p).tobytes() for p in streams[name].parts)
        raw = part.cpu().numpy().tobytes()
        assert stream == raw + bytes(-len(raw) % 16)


def test_the_lock_is_held_around_launches_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the host waits: meanwhile other threads launch what the GPU does beside."""
    launches = []

    class Kernel:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def run(self, *arguments: Any, **options: Any) -> None:
            assert LAUNCHING.locked(), self.name
            launches.append(self.name)
            self.kernel.run(*arguments, **options)

    def unlocked(function: Any) -> Any:
        def called(*arguments: Any, **keywords: Any) -> Any:
            assert not LAUNCHING.locked(), function
            return function(*arguments, **keywords)

        return called

    kernels = {
        "_census_kernel": triton_census, "table_kernel": device_table, "spread_kernel": device_table,
        "_tails_kernel": encode_blocks, "code_kernel": encode_blocks, "_ends_kernel": encode_blocks,
        "_planes_kernel": encode_planes, "_gather_kernel": encode_blocks,
    }  # fmt: skip
    for name, module in kernels.items():
        monkeypatch.setattr(module, name, Kernel(name, getattr(module, name)))
    monkeypatch.setattr(encoder_table.HostTables, "tables", unlocked(encoder_table.HostTables.tables))
    bits = torch.from_numpy(gaussian(BF16, 5000).view(np.int16)).to(device)
    encoded = encode(bits, BF16, warps=1)
    assert set(launches) == set(kernels) - {"_planes_kernel"}
    launches.clear()
    Recoder(encoded, BF16, bits.numel(), warps=1).code(bits)
    assert set(launches) == {"_tails_kernel", "code_kernel", "_ends_kernel", "_gather_kernel"}
    launches.clear()
    encode(bits & -4, BF16, warps=1)
    assert set(launches) == set(kernels)
    monkeypatch.undo()
    assert torch.equal(encoded.words, encode(bits, BF16, warps=1).words)


def test_memory_that_is_not_aligned(device: torch.device) -> None:
    bits = gaussian(BF16, 1001)
    whole = torch.from_numpy(bits.view(np.int16)).to(device)
    aligned = torch.from_numpy(bits[1:].view(np.int16)).to(device)
    here, there = encode(whole[1:], BF16), encode(aligned.clone(), BF16)
    assert here.words.tolist() == there.words.tolist()
    assert here.planes[8].tolist() == there.planes[8].tolist()


def test_what_is_no_bit_pattern_is_refused(device: torch.device) -> None:
    for wrong in (
        torch.zeros(4, dtype=torch.bfloat16, device=device),
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int16, device=device),
        torch.zeros(2, 2, dtype=torch.int16, device=device),
        torch.zeros(8, dtype=torch.int16, device=device)[::2],
    ):
        with pytest.raises(ValueError, match="bits"):
            encode(wrong, BF16)


def test_products_replace_divisions_exactly() -> None:
    """At the ends of every interval on which the quotient is constant, the first and the last among them."""
    facts = encoder_table.division_facts().view(np.uint64)
    f = np.arange(2, SCALE, dtype=np.uint64)
    multiplier, shift, addend = facts & 0xFFFFFFFF, facts >> 47 & 15, facts >> 44 & 1
    rng = np.random.default_rng(0)
    last = (1 << 20) - 1
    for q in [0, 1, 2, last - 1, last, *rng.integers(0, last, 300).tolist()]:
        for x in (np.uint64(q) * f, np.uint64(q) * f + f - np.uint64(1)):
            quotient = ((x + addend[2:]) * multiplier[2:] >> np.uint64(32)) >> shift[2:]
            assert (quotient == np.uint64(q)).all()


# Coding again by the table of before.


def on(device: torch.device, bits: Bits) -> torch.Tensor:
    """Bit patterns as a tensor."""
    return torch.from_numpy(bits.view(SIGNED[bits.itemsize]).copy()).to(device)


def coded_again(recoder: Recoder, encoded: GpuEncoded, bits: Bits, fmt: FloatFormat) -> torch.Tensor:
    """Code other weights; the words. All must be what the CPU makes of them by the same table."""
    words = recoder.code(on(encoded.index.device, bits))
    assert words is not None
    exponents, planes = split(bits, fmt, fmt.mantissa_bits)
    coded = rans.encode(exponents, encoded.table)
    assert words.cpu().numpy().tobytes() == coded.words.tobytes()
    assert encoded.index.cpu().numpy().tobytes() == coded.index.tobytes()
    for width, plane in planes.items():
        assert encoded.planes[width].cpu().numpy().tobytes() == plane.tobytes(), f"plane {width}"
    return words


def room_for(recoder: Recoder, words: int, poison: int) -> torch.Tensor:
    """Give the words memory of just this length; it, and 64 words of poison on each side."""
    memory = torch.full((words + 128,), poison, dtype=torch.int16, device=recoder._room.device)
    recoder._room = memory[64 : 64 + words]
    return memory


def drifted(fmt: FloatFormat, numel: int, seed: int = 1) -> Bits:
    """Other weights, some with exponents that a table made of `gaussian` weights does not have."""
    bits = gaussian(fmt, numel, seed)
    rare = np.random.default_rng(seed).random(numel) < 0.01
    bits[rare] = anything(fmt, numel, seed)[rare]
    return bits


@formats
@pytest.mark.parametrize("numel", [1, 700])
def test_other_weights_are_coded_by_the_same_table(
    fmt: FloatFormat, numel: int, device: torch.device, poison: None
) -> None:
    """Small changes, escapes, and NaNs, infinities and zeros of both signs; of whole runs and ragged ones."""
    bits = gaussian(fmt, numel)
    bits[0] |= fmt.dtype.type(1)  # so that all mantissa bits are kept
    encoded = encode(on(device, bits), fmt, spare=1)
    recoder = Recoder(encoded, fmt, numel)
    for changed in (drifted(fmt, numel), anything(fmt, numel), bits):
        room_for(recoder, numel * 3 + 200, 0x5A5A)
        coded_again(recoder, encoded, changed, fmt)


@pytest.mark.parametrize(
    "pairs", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["pairs", "singles"]
)
@pytest.mark.slow
def test_several_spans_share_the_room(pairs: bool, device: torch.device) -> None:
    """Of whole blocks, and of what is left. Where the last word just has room, nothing is written behind."""
    numel = 2 * BLOCK + 300
    bits, changed = (gaussian(BF16, numel), drifted(BF16, numel)) if pairs else (anything(BF16, numel),) * 2
    encoded = encode(on(device, bits), BF16, warps=1, scratch=0, spare=50)
    assert encoded.table.group == (2 if pairs else 1)
    assert encoded.words.untyped_storage().nbytes() // 2 == encoded.words.numel() * 51 // 50
    recoder = Recoder(encoded, BF16, numel, warps=1, scratch=0)
    words = rans.encode(split(changed, BF16, 7)[0], encoded.table).words.size
    memory = room_for(recoder, words, 0x5A5A)
    coded_again(recoder, encoded, changed, BF16)
    assert (memory[:64] == 0x5A5A).all() and (memory[-64:] == 0x5A5A).all()


@pytest.mark.slow
def test_words_without_room_are_not_written(device: torch.device) -> None:
    """Whether it ends within an escape, between escapes, among words, or before the second block begins."""
    numel = BLOCK + 200
    encoded = encode(on(device, gaussian(BF16, numel)), BF16, warps=1, scratch=0)
    changed = gaussian(BF16, numel, 1)
    changed[::40] ^= 0x4000
    recoder = Recoder(encoded, BF16, numel, warps=1, scratch=0)
    whole = rans.encode(split(changed, BF16, 7)[0], encoded.table).words
    for short in (1, 2, 60, 1000):
        room = whole.size - short
        memory = room_for(recoder, room, 0x5A5A)
        assert recoder.code(on(device, changed)) is None
        assert (memory[:64] == 0x5A5A).all() and (memory[-64:] == 0x5A5A).all()
        # An escape is written as a whole or not at all.
        there = memory[64 : 64 + room - 1].cpu().numpy()
        assert there.tobytes() == whole[: room - 1].tobytes()


def test_the_room_is_for_one_word_in_so_many(device: torch.device) -> None:
    bits = on(device, gaussian(BF16, 2000))
    encoded = encode(bits, BF16, spare=50)
    room = 2 * (encoded.words.numel() * 51 // 50)
    assert encoded.words.untyped_storage().nbytes() == room
    assert Recoder(encoded, BF16, 2000).nbytes == encoded.coding.nbytes + room
    assert torch.equal(encoded.words, encode(bits, BF16).words)


def test_what_cannot_be_coded_again_is_refused(device: torch.device) -> None:
    """Weights that use less than all mantissa bits: others might need them. And other numbers of weights."""
    encoded = encode(on(device, truncated(gaussian(BF16, 500), BF16, 5)), BF16)
    with pytest.raises(ValueError, match="5 of 7 mantissa bits"):
        Recoder(encoded, BF16, 500)
    encoded = encode(on(device, gaussian(BF16, 500)), BF16)
    with pytest.raises(ValueError, match="not those of 1 blocks"):
        Recoder(encoded, BF16, 20_000)
    with pytest.raises(ValueError, match="501 weights in place of 500"):
        Recoder(encoded, BF16, 500).code(on(device, gaussian(BF16, 501)))


LARGE = 37 * BLOCK + 777


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("scratch", [0, None], ids=["many spans", "one span"])
def test_large_tensors_are_coded_again(
    fmt: FloatFormat, scratch: int | None, device: torch.device, poison: None
) -> None:
    for bits in (gaussian(fmt, LARGE), anything(fmt, LARGE)):
        bits[0] |= fmt.dtype.type(1)
        encoded = encode(on(device, bits), fmt, scratch=scratch, spare=50)
        recoder = Recoder(encoded, fmt, LARGE, scratch=scratch)
        words = rans.encode(split(drifted(fmt, LARGE), fmt, fmt.mantissa_bits)[0], encoded.table).words.size
        memory = room_for(recoder, words, -1)
        coded_again(recoder, encoded, drifted(fmt, LARGE), fmt)
        memory = room_for(recoder, words - 1, -1)
        assert recoder.code(on(device, drifted(fmt, LARGE))) is None
        assert (memory[-64:] == -1).all()


@pytest.mark.gpu
@formats
def test_large_tensors(fmt: FloatFormat, device: torch.device, poison: None) -> None:
    for bits in (gaussian(fmt, LARGE), anything(fmt, LARGE)):
        same_as_on_the_cpu(bits, fmt, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launch",
    [
        {"warps": 1, "threads": 128, "programs": 1, "scratch": 0},
        {"warps": 2, "threads": 256, "programs": 7, "scratch": 1 << 20},
        {"warps": 4, "threads": 512, "programs": 2000},
        {"warps": 8, "threads": 1024, "scratch": 0},
        {"warps": 16, "threads": 32, "programs": 64},
    ],
)
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "singles"])
def test_launches_on_large_tensors(launch: dict[str, Any], pairs: bool, device: torch.device) -> None:
    same_as_on_the_cpu(gaussian(BF16, LARGE) if pairs else anything(BF16, LARGE), BF16, device, **launch)


@pytest.mark.gpu
def test_far_exponents_in_large_tensors(device: torch.device) -> None:
    """Counters in shared and in device memory, for all kinds of pairs."""
    for name in ("BF16", "F32"):
        fmt = FORMATS[name]
        rng = np.random.default_rng(2)
        bits = gaussian(fmt, LARGE)
        bits[rng.random(LARGE) < 0.3] = 0
        far = rng.random(LARGE) < 0.01
        bits[far] = anything(fmt, LARGE)[far]
        same_as_on_the_cpu(bits, fmt, device)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_than_two_to_the_31_weights(device: torch.device) -> None:
    """A block over and over: every block has the same words, and the last lie where 32 bits do not reach."""
    fmt = FORMATS["F8_E5M2"]
    block = gaussian(fmt, BLOCK)
    copies = (1 << 31) // BLOCK + 3
    got = encode(torch.from_numpy(block.view(np.int8)).to(device).repeat(copies), fmt)
    words: npt.NDArray[np.uint16] = rans.encode(split(block, fmt, got.kept_bits)[0], got.table).words
    assert got.index.unique().tolist() == [words.size]
    assert got.words.numel() == copies * words.size
    for copy in (0, copies // 2, copies - 1):
        part = got.words[copy * words.size : (copy + 1) * words.size]
        assert part.cpu().numpy().tobytes() == words.tobytes()
    plane = split(block, fmt, got.kept_bits)[1]
    for width, whole in got.planes.items():
        assert whole[-plane[width].size :].cpu().numpy().tobytes() == plane[width].tobytes()
