"""The GPU decoder: the CPU's bytes for every format and number of bits, and no step outside its arrays.

With a CUDA device it runs there. Without one Triton's interpreter runs the same kernel, on smaller tensors.

That nothing outside the tensors is read shows on a GPU, with a system's eyes on every access:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \\
        pytest tests/kernels/test_triton_decode.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuzip.compress.pieces import padded
from neuzip.compress.schemes import coded_blocks, lossless, truncated
from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat, census, plane_bytes, plane_widths, split
from neuzip.kernels.rans import coded
from neuzip.kernels.rans import ops as torch_ops
from neuzip.kernels.rans.coded import ALIGNMENT, PATTERNS, TOGETHER, CodedTensor
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN, RUNS
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.kernels.rans.triton import decode as triton_decode
from neuzip.kernels.rans.triton import decode_arrays, ring
from neuzip.kernels.rans.triton import stream as triton_stream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64


def weights(fmt: FloatFormat, numel: int, seed: int = 0) -> Bits:
    """Patterns like those of a trained tensor, with every special value among them."""
    rng = np.random.default_rng(seed)
    bias = (1 << (fmt.exponent_bits - 1)) - 1
    exponents = np.clip(bias - 3 - rng.geometric(0.6, numel), 0, (1 << fmt.exponent_bits) - 1)
    bits = rng.integers(0, 1 << fmt.mantissa_bits, numel).astype(np.uint64)
    bits |= exponents.astype(np.uint64) << np.uint64(fmt.mantissa_bits)
    bits |= rng.integers(0, 2, numel).astype(np.uint64) << np.uint64(fmt.bits - 1)
    top = (1 << fmt.bits) - 1
    special = [0, 1 << (fmt.bits - 1), top, top >> 1, 1, (1 << fmt.mantissa_bits) - 1, top ^ 1]
    where = rng.integers(0, numel, min(numel, len(special)))
    bits[where] = np.array(special[: where.size], np.uint64)
    return bits.astype(fmt.dtype)


def code(bits: Bits, fmt: FloatFormat, kept: int | None = None) -> CodedTensor:
    """Streams of all shapes straight from the CPU kernels: whether they pay is not asked here."""
    counted = census(bits, fmt)
    kept = counted.kept_bits(fmt) if kept is None else kept
    table = rans.build_table(counted.exponents, counted.pairs)
    exponents, planes = split(bits, fmt, kept)
    coded = rans.encode(exponents, table)
    return CodedTensor(
        fmt, kept, bits.size, table, on_device(coded.index), on_device(coded.words),
        {width: on_device(plane, ALIGNED) for width, plane in planes.items()},
    )  # fmt: skip


ALIGNED = ALIGNMENT


def on_device(array: np.ndarray[Any, Any], multiple: int = 1) -> torch.Tensor:
    """In memory of exactly its size, filled up with 0xEE to a multiple of bytes; torch aligns it."""
    raw = array.view(np.uint8)
    filled = np.full(-(-raw.size // multiple) * multiple, 0xEE, np.uint8)
    filled[: raw.size] = raw
    tensor = torch.empty(filled.size, dtype=torch.uint8, device=DEVICE)
    tensor.copy_(torch.from_numpy(filled))
    return tensor.view({1: torch.uint8, 2: torch.int16}[array.dtype.itemsize])


def outputs(tensors: list[CodedTensor], poison: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """An output for each tensor, and the whole memory around it, filled with `poison`."""
    rooms, outs = [], []
    for t in tensors:
        nbytes = t.numel * t.fmt.bits // 8
        room = torch.full((nbytes + 2 * GUARD,), poison, dtype=torch.uint8, device=DEVICE)
        start = GUARD + -(room.data_ptr() + GUARD) % ALIGNED
        rooms.append(room)
        outs.append(room[start : start + nbytes].view(PATTERNS[t.fmt.bits]))
    return outs, rooms


def decoded(tensors: list[CodedTensor], poison: int = 0, warps: int | None = None) -> list[bytes]:
    """All tensors, decoded into poisoned memory; nothing around the outputs may have changed."""
    outs, rooms = outputs(tensors, poison)
    plan = triton_decode.prepare(tensors, outs, warps)
    plan.launch()
    assert plan.errors.tolist() == [0] * len(tensors)
    results = [out.cpu().numpy().tobytes() for out in outs]
    for out, room in zip(outs, rooms, strict=True):
        out.view(torch.uint8).fill_(poison)
        assert (room == poison).all()
    return results


@pytest.mark.parametrize("poison", [0x00, 0xFF])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, poison: int) -> None:
    fmt = FORMATS[name]
    bits = weights(fmt, BLOCK + 1003)
    assert decoded([code(bits, fmt, fmt.mantissa_bits)], poison) == [bits.tobytes()]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *(("BF16", k) for k in range(8)),
        *(("F16", k) for k in (0, 1, 4, 6, 9)),
        *(("F32", k) for k in (0, 5, 7, 15, 16, 22)),
        *(("F64", k) for k in (0, 23, 31, 51)),
        *(("F8_E4M3", k) for k in (0, 1, 2)),
        *(("F8_E5M2", k) for k in (0, 1)),
    ],
)
def test_every_number_of_mantissa_bits(name: str, kept: int) -> None:
    """Every combination of planes."""
    fmt = FORMATS[name]
    bits = weights(fmt, 700, seed=kept)
    drop = fmt.dtype.type(fmt.mantissa_bits - kept)
    bits = bits >> drop << drop
    assert decoded([code(bits, fmt, kept)], 0xFF) == [bits.tobytes()]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 255, 256, 257, 2049, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
def test_ragged_sizes(numel: int, group: int) -> None:
    fmt = FORMATS["BF16"]
    bits = weights(fmt, numel)
    if group == 1:  # too many exponents for pairs
        bits = np.random.default_rng(0).integers(0, 1 << 16, numel).astype(np.uint16)
    coded = code(bits, fmt)
    assert numel < 1000 or coded.table.group == group
    assert decoded([coded], 0xFF) == [bits.tobytes()]


def exponents_of(kind: str) -> np.ndarray[Any, Any]:
    """Those of some blocks and a few weights more, with palettes of all sorts."""
    rng = np.random.default_rng(0)
    if kind == "rare":  # a block of symbols of 12 bits each: no run takes more words
        exponents = np.full(20 * BLOCK + 77, 120)
        exponents[7 * BLOCK : 8 * BLOCK] = rng.integers(112, 128, BLOCK)
        return exponents
    numel = BLOCK + 77
    choice = {
        "one": [120], "two": [0, 255], "a few": [118, 119, 120], "16 in a row": range(112, 128),
        "the lowest": range(16), "the highest": range(240, 256), "gaps": range(90, 122, 2),
        "zeros": [0, *range(111, 126)],
    }  # fmt: skip
    return rng.choice(list(choice[kind]), numel)


@pytest.mark.parametrize(
    "kind",
    ["one", "two", "a few", "16 in a row", "the lowest", "the highest", "gaps", "zeros", "rare"],
)
def test_every_palette(kind: str) -> None:
    exponents = exponents_of(kind)
    bits = np.random.default_rng(1).integers(0, 1 << 16, exponents.size)
    bits = ((bits & 0x807F) | exponents << 7).astype(np.uint16)
    coded = code(bits, FORMATS["BF16"])
    assert triton_decode.streams(coded.kind)
    for warps in (None, 4):
        assert decoded([coded], 0xFF, warps) == [bits.tobytes()]


def test_words_that_begin_anywhere() -> None:
    bits = weights(FORMATS["BF16"], BLOCK + 9)
    coded = code(bits, FORMATS["BF16"])
    moved = torch.empty(coded.words.numel() + 3, dtype=torch.int16, device=DEVICE)[3:]
    moved.copy_(coded.words)
    coded = replace(coded, words=moved)
    assert decoded([coded], 0xFF) == [bits.tobytes()]
    outs, _ = outputs([coded], 0)
    with pytest.raises(ValueError, match="8 warps a program take words that begin at multiples of 16"):
        triton_decode.prepare([coded], outs, 8)


MOST_WORDS = RUN // 2 * LANES
"""That a run takes: of each lane one a step."""


@given(st.lists(st.integers(0, MOST_WORDS), min_size=RUNS - 1, max_size=RUNS - 1), st.integers(65, 65 + 7))
def test_property_words_are_there_when_they_are_needed(taken: list[int], p: int) -> None:
    """The order of copies and waits in `triton_stream.runs`, however many words the runs take."""
    size, pieces, ahead = ring.PIECE, ring.PIECES, triton_stream.AHEAD
    assert f"wait_group {ahead - 1};" in ring._waiting(ahead)
    assert f"next, size, -{size * (pieces - 1)};" in ring._copying()
    groups = [list(range(pieces)), *([] for _ in range(ahead - 1))]
    for words in [*taken, 0]:
        there = [piece for group in groups[: len(groups) - (ahead - 1)] for piece in group]
        begun = [piece for group in groups for piece in group]
        begins = [len(begun)] if p >= (len(begun) - (pieces - 1)) * size else []
        groups.append(begins)
        for piece in {p // size, (p + MOST_WORDS - 1) // size}:
            assert piece in there
            assert piece == max(other for other in begun + begins if other % pieces == piece % pieces)
        p += words


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.slow
def test_many_tensors_in_one_call(warps: int) -> None:
    """Of several kinds and sizes, mixed: whatever the launch configuration, the same bytes."""
    tensors, originals = [], []
    for seed, (name, numel) in enumerate(
        [("BF16", 5 * BLOCK), ("F32", 300), ("BF16", 40), ("BF16", BLOCK + 8), ("F16", 999), ("BF16", 1)]
    ):
        originals.append(weights(FORMATS[name], numel, seed))
        tensors.append(code(originals[-1], FORMATS[name], FORMATS[name].mantissa_bits))
    assert decoded(tensors, 0xFF, warps) == [bits.tobytes() for bits in originals]


def test_a_list_is_decoded_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor, then two, and again two, of several kinds; whatever of them an error stops is refused."""
    monkeypatch.setattr(triton_decode, "FIRST", 1)
    monkeypatch.setattr(triton_decode, "MOST", 2)
    originals, tensors = [], []
    for seed, name in enumerate(["BF16", "F16", "BF16", "BF16", "F16", "BF16"]):
        originals.append(weights(FORMATS[name], 200 + seed, seed))
        tensors.append(code(originals[-1], FORMATS[name], FORMATS[name].mantissa_bits))
    assert decoded(tensors, 0xFF) == [bits.tobytes() for bits in originals]
    outs = [torch.empty(tensor.numel, dtype=torch.int16, device=DEVICE) for tensor in tensors]
    with pytest.raises(ValueError, match="tensor 5 does not fit"):
        triton_decode.decode(tensors, [*outs[:-1], outs[-1][:-1]])


def test_nothing_to_decode() -> None:
    assert triton_decode.decode([], []).tolist() == []


@pytest.mark.parametrize("block_size", [8, 64, 512])
@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F64"])
def test_block_normaliser(name: str, block_size: int) -> None:
    """Restored weights equal those of the CPU: products are rounded alike, denormals too."""
    fmt = FORMATS[name]
    values = np.random.default_rng(1).standard_normal(3000)
    values[:500] *= 2.0 ** np.random.default_rng(2).integers(-150, 0, 500)  # down to denormals
    if name == "BF16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = values.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[name]).view(fmt.dtype)
    rounding = truncated.Rounding(fmt, 2, block_size)
    stored, normaliser = rounding.apply(bits)
    coded = replace(code(stored, fmt, 2), normaliser=on_device(normaliser), block_size=block_size)
    assert decoded([coded], 0xFF) == [rounding.restore(stored, normaliser).tobytes()]


@settings(max_examples=60 if DEVICE.type == "cuda" else 12)
@given(
    numel=st.integers(1, 3 * BLOCK if DEVICE.type == "cuda" else 1200),
    name=st.sampled_from(sorted(FORMATS)),
    few=st.integers(1, 300),
    seed=st.integers(0, 1 << 30),
)
def test_property_any_patterns(numel: int, name: str, few: int, seed: int) -> None:
    """Patterns from a small or large set, in any order: one symbol, escapes, single symbols, pairs."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(seed)
    choice = (
        rng.integers(0, 1 << fmt.bits, few, dtype=np.uint64, endpoint=False)
        if fmt.bits < 64
        else (rng.integers(0, 1 << 63, few, dtype=np.uint64) * 2 + 1)
    )
    bits = rng.choice(choice, numel).astype(fmt.dtype)
    assert decoded([code(bits, fmt)], 0xFF) == [bits.tobytes()]


def test_corrupt_words_are_reported() -> None:
    """A flipped bit among the words is noticed, and in the right tensor."""
    fmt = FORMATS["BF16"]
    tensors = [code(weights(fmt, 600, seed), fmt) for seed in range(3)]
    tensors[1].words[70] ^= 0x40
    outs, _ = outputs(tensors, 0)
    errors = triton_decode.decode(tensors, outs)
    assert [e != 0 for e in errors.tolist()] == [False, True, False]
    with pytest.raises(rans.CorruptStream, match="'b'"):
        coded.raise_if_corrupt(errors, ["a", "b", "c"])


@pytest.mark.parametrize("change", [1, -1, 20, 0x4000])
def test_an_index_that_does_not_add_up_is_reported(change: int) -> None:
    fmt = FORMATS["BF16"]
    coded = code(weights(fmt, 600), fmt)
    coded.index[0] += change
    outs, _ = outputs([coded], 0)
    assert triton_decode.decode([coded], outs).tolist() != [0]


@settings(max_examples=200 if DEVICE.type == "cuda" else 12)
@given(seed=st.integers(0, 1 << 30))
def test_property_hostile_streams_stay_inside(seed: int) -> None:
    """Words, index and planes of any content: no byte around the outputs changes, and nothing crashes."""
    rng = np.random.default_rng(seed)
    fmt = FORMATS[str(rng.choice(sorted(FORMATS)))]
    numel = int(rng.integers(1, BLOCK + 600 if DEVICE.type == "cuda" else 600))
    coded = code(weights(fmt, numel, seed), fmt)
    for array in (coded.words, coded.index):
        if rng.random() < 0.7:
            at = torch.from_numpy(rng.integers(0, array.numel(), 1 + array.numel() // 50)).to(DEVICE)
            array[at] = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, at.numel()).astype(np.int16)).to(
                DEVICE
            )
    if rng.random() < 0.3:
        coded = replace(coded, words=coded.words[: int(rng.integers(1, coded.words.numel() + 1))])
    outs, rooms = outputs([coded], 0xA5)
    triton_decode.decode([coded], outs)
    outs[0].view(torch.uint8).fill_(0xA5)
    assert (rooms[0] == 0xA5).all()


def coded_anew(coded: CodedTensor, bits: Bits) -> CodedTensor:
    """Other weights by the table of `coded`, in its memory; its words must be followed by room."""
    exponents, planes = split(bits, coded.fmt, coded.kept_bits)
    other = rans.encode(exponents, coded.table)
    room = coded.words.as_strided((coded.words.untyped_storage().nbytes() // 2,), (1,))
    words = room[: other.words.size]
    words.copy_(on_device(other.words))
    coded.index.copy_(on_device(other.index))
    for width, plane in planes.items():
        coded.planes[width][: plane.size].copy_(on_device(plane))
    return replace(coded, words=words)


def with_room(coded: CodedTensor, words: int) -> CodedTensor:
    """The same with memory for so many words."""
    room = torch.full((words,), 0x6E6E, dtype=torch.int16, device=DEVICE)
    room[: coded.words.numel()] = coded.words
    return replace(coded, words=room[: coded.words.numel()])


@pytest.mark.parametrize(
    ("name", "numel"), [("BF16", 300), ("BF16", BLOCK + 200), ("F64", 700), ("F8_E4M3", BLOCK)]
)
def test_a_plan_is_brought_up_to_date(name: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other words, fewer or more than before, at other places; and an output elsewhere, in turn."""
    if DEVICE.type == "cpu":  # where the index of a small tensor would be one tile
        monkeypatch.setattr(decode_arrays, "TILE", 1)
    fmt = FORMATS[name]
    coded = with_room(code(weights(fmt, numel), fmt, fmt.mantissa_bits), 3 * numel + 300)
    (one, other), rooms = outputs([coded, coded], 0xA5)
    plan = triton_decode.prepare([coded], [one])
    for seed, (out, room) in enumerate([(one, rooms[0]), (other, rooms[1]), (one, rooms[0])], 1):
        bits = weights(fmt, numel, seed)
        bits[:: 7 * seed] = 0  # escapes, more and fewer of them
        if seed == 2:  # nothing else: a block has more than 2^15 words
            low = fmt.dtype.type((1 << fmt.mantissa_bits) - 1)
            bits = bits & low | fmt.dtype.type(3 << fmt.mantissa_bits)
        coded = coded_anew(coded, bits)
        plan = plan.recoded(coded).into(out)
        plan.launch()
        assert out.cpu().numpy().tobytes() == bits.tobytes()
        assert plan.errors.tolist() == [0]
        out.view(torch.uint8).fill_(0xA5)
        assert (room == 0xA5).all()


def test_corrupt_words_are_reported_after_they_were_coded_anew() -> None:
    """A flipped bit, and an index that does not add up; what is marked stays so."""
    fmt = FORMATS["BF16"]
    (out, *_), _ = outputs([code(weights(fmt, 600), fmt)], 0)
    for harm in ("words", "index", "too few words", "too many words"):
        coded = with_room(code(weights(fmt, 600), fmt), 2000)
        errors = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        plan = triton_decode.prepare([coded], [out], errors=errors)
        coded = coded_anew(coded, weights(fmt, 600, 1))
        if harm == "words":
            coded.words[70] ^= 0x40
        elif harm == "index":
            coded.index[0] -= 20
        else:
            change = -1 if harm == "too few words" else 8
            room = coded.words.as_strided((2000,), (1,))
            coded = replace(coded, words=room[: coded.words.numel() + change])
        plan = plan.recoded(coded)
        if harm == "words":
            plan.launch()
        assert errors.tolist() != [0], harm
        plan = plan.recoded(coded_anew(coded, weights(fmt, 600, 2)))
        plan.launch()
        assert plan.errors is errors and errors.tolist() != [0]


def test_a_plan_is_only_for_its_tensor() -> None:
    fmt = FORMATS["BF16"]
    coded, other = (code(weights(fmt, 600), fmt) for _ in range(2))
    (out, *_), _ = outputs([coded], 0)
    plan = triton_decode.prepare([coded], [out])
    for wrong in (other, replace(other, table=coded.table), replace(coded, table=other.table)):
        with pytest.raises(ValueError, match="another table, or lies elsewhere"):
            plan.recoded(wrong)
    with pytest.raises(ValueError, match="does not fit"):
        plan.into(out[:-1])
    with pytest.raises(ValueError, match="errors are int32"):
        triton_decode.prepare([coded], [out], errors=torch.zeros(2, dtype=torch.int32, device=DEVICE))


def test_what_does_not_fit_is_refused() -> None:
    fmt = FORMATS["BF16"]
    coded = code(weights(fmt, 600), fmt)
    good = torch.empty(600, dtype=torch.int16, device=DEVICE)
    for out in (good[:-1], good.view(torch.uint8), good[::2]):
        with pytest.raises(ValueError, match="does not fit"):
            triton_decode.decode([coded], [out])
    with pytest.raises(ValueError, match="not aligned"):
        triton_decode.decode([coded], [torch.empty(601, dtype=torch.int16, device=DEVICE)[1:]])
    for change in (
        {"index": coded.index[:0]},
        {"planes": {8: coded.planes[8][:-16]}},
        {"planes": {8: coded.planes[8][1:]}},
        {"block_size": 12},
        {"block_size": 8},
    ):
        with pytest.raises(rans.CorruptStream):
            replace(coded, **change)  # type: ignore[arg-type]


def resident(numel: int = BLOCK + 700, *between: int) -> tuple[ResidentTensor, bytes]:
    """A tensor of `numel` weights, with chunks that start with those named besides 0."""
    fmt = FORMATS["BF16"]
    bits = weights(fmt, numel)
    return ResidentTensor.of(code(bits, fmt), (0, *between, numel)), bits.tobytes()


def test_operator_decodes() -> None:
    tensor, original = resident()
    out, errors = tensor.decode()
    assert (out.cpu().numpy().tobytes(), errors.tolist()) == (original, [0])


def check_chunks(tensor: ResidentTensor, original: bytes, poison: int, warps: int | None = None) -> None:
    """Each is decoded into memory full of something else, and not a byte beyond what it says it needs."""
    for number in range(tensor.chunks):
        chunk, room = tensor.chunk(number), tensor.capacity(number)
        out = torch.full((room + GUARD,), poison, dtype=torch.uint8, device=DEVICE)
        (decoded,) = torch_ops.decode_together([(tensor, number)], [out], warps)
        assert decoded.cpu().numpy().tobytes() == original[2 * chunk.start : 2 * chunk.stop]
        assert (out[room:] == poison).all()


@pytest.mark.slow
def test_chunks_are_decoded_by_themselves() -> None:
    """One ends and the next starts within a full block, another within the ragged one."""
    tensor, original = resident(2 * BLOCK + 700, BLOCK + 7, 2 * BLOCK + 9)
    assert [tensor.capacity(i) for i in range(3)] == [4 * BLOCK, 2 * BLOCK + 1400, 1400]
    check_chunks(tensor, original, 0xFF)
    chunk = tensor.chunk(1)
    again, errors = tensor.decode(1)
    assert again.cpu().numpy().tobytes() == original[2 * chunk.start : 2 * chunk.stop]
    assert errors.tolist() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [0x00, 0xFF])
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "between",
    [
        (BLOCK,),
        (1, 5 * BLOCK),
        (5 * BLOCK + 7, 5 * BLOCK + 8),
        (4 * BLOCK, 96 * BLOCK + 1, 96 * BLOCK + 300, 98 * BLOCK + 200),
        tuple(range(777, 98 * BLOCK, 3 * BLOCK)),
    ],
)
def test_chunks_of_any_bounds(between: tuple[int, ...], warps: int, poison: int) -> None:
    check_chunks(*resident(98 * BLOCK + 700, *between), poison, warps)


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.slow
def test_chunks_are_decoded_together(warps: int) -> None:
    """Of several tensors and kinds, more than a launch takes, and each says by itself that it is corrupt."""
    tensors = [resident(700 * (number + 1), 300)[0] for number in range(5)]
    tensors.append(resident(2 * BLOCK + 700, BLOCK + 7)[0])
    fmt = FORMATS["F16"]
    tensors.append(ResidentTensor.of(code(weights(fmt, BLOCK + 5), fmt)))
    expected = [[tensor.decode(number)[0] for number in range(tensor.chunks)] for tensor in tensors]
    chunks = [(tensor, number) for tensor in tensors for number in range(tensor.chunks)]
    assert len(chunks) > TOGETHER
    outs = [
        torch.full((tensor.capacity(number) + GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)
        for tensor, number in chunks
    ]
    tensors[1].memory[: 2 * 70].fill_(0xFF)
    for (tensor, number), out, found in zip(
        chunks, outs, torch_ops.decode_together(chunks, outs, warps), strict=True
    ):
        if tensor is not tensors[1]:
            assert torch.equal(found, expected[tensors.index(tensor)][number])
        assert (out[tensor.capacity(number) :] == 0xFF).all()
    assert [bool(tensor.decode()[1]) for tensor in tensors] == [tensor is tensors[1] for tensor in tensors]


def test_no_parts_are_decoded() -> None:
    triton_decode.decode_parts([], [])
    assert torch_ops.decode_together([], []) == []


def test_chunks_on_several_devices_share_no_launch() -> None:
    tensor, _ = resident()
    outs = [torch.empty(tensor.capacity(), dtype=torch.uint8, device=device) for device in (DEVICE, "meta")]
    with pytest.raises(ValueError, match="several devices"):
        torch_ops.decode_together([(tensor, 0)] * 2, outs)


def test_a_moved_resident_tensor_decodes() -> None:
    """Nothing in the memory says where it is."""
    tensor, original = resident(700, 300)
    moved = tensor.on(tensor.memory.clone())
    tensor.memory.fill_(0)
    decoded = [moved.decode(number)[0].cpu().numpy().tobytes() for number in range(2)]
    assert b"".join(decoded) == original


def test_memory_or_chunks_that_do_not_fit_are_refused() -> None:
    tensor, _ = resident(600)
    good = torch.empty(tensor.capacity(), dtype=torch.uint8, device=DEVICE)
    for out in (good[:-1], good.view(torch.int16), good.view(2, -1)):
        with pytest.raises(ValueError, match="needs 1200 bytes"):
            tensor.decode_into(out)
    beside = torch.empty(tensor.capacity() + 1, dtype=torch.uint8, device=DEVICE)[1:]
    with pytest.raises(ValueError, match="not aligned"):
        tensor.decode_into(beside)
    with pytest.raises(ValueError, match="not aligned"):
        torch.ops.neuzip.decode_into(beside, tensor.memory, *tensor._arguments(tensor.chunk(0)))
    coded = code(weights(FORMATS["BF16"], 600), FORMATS["BF16"])
    for bounds in ((0, 599), (1, 600), (0, 300, 300, 600), (0, 400, 300, 600)):
        with pytest.raises(ValueError, match="no chunks"):
            ResidentTensor.of(coded, bounds=bounds)


def test_operators_pass_opcheck() -> None:
    tensor, _ = resident(600)
    arguments = tensor.memory, *tensor._arguments(tensor.chunk(0))
    torch.library.opcheck(torch.ops.neuzip.decode.default, arguments)
    out = torch.empty(tensor.capacity(), dtype=torch.uint8, device=DEVICE)
    torch.library.opcheck(torch.ops.neuzip.decode_into.default, (out, *arguments))


def test_operator_in_a_compiled_function() -> None:
    tensor, original = resident(600)

    @torch.compile(fullgraph=True, backend="inductor" if DEVICE.type == "cuda" else "aot_eager")
    def sums(x: torch.Tensor) -> torch.Tensor:
        out, _ = tensor.decode()
        return (out.view(torch.bfloat16).float() * x).sum()

    x = torch.ones(600, device=DEVICE)
    weights_of = torch.frombuffer(bytearray(original), dtype=torch.bfloat16).float()
    finite = torch.nan_to_num(weights_of, 0, 0, 0)
    assert torch.isfinite(finite).all()
    expected = weights_of.to(DEVICE).sum()
    torch.testing.assert_close(sums(x), expected, equal_nan=True)


@pytest.mark.gpu
def test_operator_in_a_cuda_graph() -> None:
    tensor, original = resident(40 * BLOCK + 5)
    tensor.decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, errors = tensor.decode()
    for _ in range(3):
        out.fill_(-1)
        graph.replay()
        assert (out.cpu().numpy().tobytes(), errors.tolist()) == (original, [0])


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "kept"), [("BF16", 7), ("BF16", 3), ("F16", 10), ("F32", 7), ("F8_E4M3", 3)]
)
def test_large_tensors(name: str, kept: int, warps: int) -> None:
    fmt = FORMATS[name]
    bits = weights(fmt, 600 * BLOCK + 12345)
    drop = fmt.dtype.type(fmt.mantissa_bits - kept)
    bits = bits >> drop << drop
    assert decoded([code(bits, fmt, kept)], 0xFF, warps) == [bits.tobytes()]


@pytest.mark.gpu
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_than_two_to_the_31_weights() -> None:
    """Positions have 64 bits. The same block over and over: only the last ones differ."""
    fmt, blocks = FORMATS["F8_E4M3"], (1 << 31) // BLOCK + 3
    bits = weights(fmt, BLOCK)
    tail = weights(fmt, BLOCK + 77, seed=5)
    one, rest = code(bits, fmt, 3), code(np.concatenate([bits, tail]), fmt, 3)
    table = rest.table
    exponents_of = lambda b: ((b >> 3) & 0xF).astype(np.uint8)  # noqa: E731
    first = rans.encode(exponents_of(bits), table)
    last = rans.encode(exponents_of(tail), table)
    repeat = lambda array, n: torch.from_numpy(array.view(np.int16)).to(DEVICE).repeat(n)  # noqa: E731
    coded = CodedTensor(
        fmt, 3, blocks * BLOCK + tail.size, table,
        torch.cat([repeat(first.index, blocks), repeat(last.index, 1)]),
        torch.cat([repeat(first.words, blocks), repeat(last.words, 1)]),
        {4: torch.cat([one.planes[4].repeat(blocks), code(tail, fmt, 3).planes[4]])},
    )  # fmt: skip
    out = torch.full((coded.numel,), 0xFF, dtype=torch.uint8, device=DEVICE)
    assert triton_decode.decode([coded], [out]).tolist() == [0]
    assert out[-tail.size :].cpu().numpy().tobytes() == tail.tobytes()
    head = out[: blocks * BLOCK].view(blocks, BLOCK)
    assert (head == head[0]).all()
    assert head[0].cpu().numpy().tobytes() == bits.tobytes()


def test_streams_of_a_container_fit() -> None:
    """What `compress` writes is what the decoder takes: planes padded, words filled up."""
    fmt = FORMATS["BF16"]
    bits = weights(fmt, 2000)
    kept, streams = lossless.encode(lambda a, b: bits[a:b], bits.size, fmt)
    raw = {n: np.concatenate([p.view(np.uint8) for p in s.parts]) for n, s in streams.items()}
    table = coded_blocks.parse_table(raw["table"].view("<u2"), fmt)
    planes, at = {}, 0
    for width in plane_widths(1 + kept):
        end = at + padded(plane_bytes(width, bits.size))
        planes[width], at = on_device(raw["sign_mantissa"][at:end], ALIGNED), end
    coded = CodedTensor(
        fmt, kept, bits.size, table, on_device(raw["index"].view(np.uint16)[:1]),
        on_device(raw["words"].view(np.uint16)), planes,
    )  # fmt: skip
    assert decoded([coded]) == [bits.tobytes()]


def test_an_index_that_runs_far_beyond_the_words_reads_nothing() -> None:
    """What is left of the words is then less than -2^31, and must not wrap to something positive."""
    fmt, blocks = FORMATS["BF16"], (1 << 31) // 0xFFFF + 10
    if DEVICE.type == "cpu":
        blocks = 3  # the interpreter would take an hour; the arithmetic is the same
    one = code(weights(fmt, BLOCK), fmt)
    table, plane = one.table, one.planes[8].repeat(blocks)
    index = torch.full((blocks,), -1, dtype=torch.int16, device=DEVICE)
    coded = CodedTensor(fmt, 7, blocks * BLOCK, table, index, one.words, {8: plane})
    outs, _ = outputs([coded], 0)
    assert triton_decode.decode([coded], outs).tolist() != [0]


def test_a_resident_tensor_of_corrupt_streams_is_refused() -> None:
    fmt = FORMATS["BF16"]
    coded = code(weights(fmt, 600), fmt)
    longer = torch.cat([coded.words, torch.zeros(4096, dtype=torch.int16, device=DEVICE)])
    with pytest.raises(rans.CorruptStream):
        ResidentTensor.of(replace(coded, words=longer))
