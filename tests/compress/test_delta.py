"""A delta restores the newer checkpoint byte by byte, with its base and with nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import independent_decoder as decoder
import numpy as np
import pytest
import torch
from conftest import RunAlone
from golden import make as recipes
from golden.bad import make as bad
from hypothesis import given
from hypothesis import strategies as st
from loopback_hub import Hub
from safetensors.torch import save_file

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.delta_base import name_of
from neuzip.compress.delta_job import compress_delta
from neuzip.compress.device import Device
from neuzip.compress.gpu import Gpu
from neuzip.compress.pieces import PIECE
from neuzip.compress.schemes import delta_coding
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError, VerificationError, WouldOverwrite
from neuzip.formats.card.model_card import split_card
from neuzip.formats.container import Container, Stream, padded_stream
from neuzip.formats.hub.push_plan import plan_push
from neuzip.formats.records import OfBaseRecord
from neuzip.kernels import rans
from neuzip.kernels.delta import Digits, lengths, reference, restore, subtract
from neuzip.kernels.delta import ops as torch_ops
from neuzip.kernels.float_fields import FORMATS, FloatFormat
from neuzip.kernels.rans import BLOCK

pytest_plugins = ["loopback_hub"]

ROOT = Path(__file__).resolve().parents[2]
ON_CARD = torch.cuda.is_available()
Array = np.ndarray[Any, Any]
Speak = Callable[..., Any]
WIDTHS = {8: FORMATS["F8_E4M3"], 16: FORMATS["BF16"], 32: FORMATS["F32"], 64: FORMATS["F64"]}
TORCH = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


# The kernels


def edges(bits: int) -> list[int]:
    """Patterns around both zeros and both ends."""
    half = 1 << (bits - 1)
    return [0, 1, 2, half - 2, half - 1, half, half + 1, half + 2, 2 * half - 2, 2 * half - 1]


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_differences_are_those_of_the_reference(bits: int, shift: int) -> None:
    kind = np.dtype(f"<u{bits // 8}")
    random = np.random.default_rng(bits).integers(0, 256, (2, 200 * bits // 8), np.uint8).view(kind)
    zeros = kind.type(shift)
    pairs = [a for a in edges(bits) for _ in edges(bits)], edges(bits) * len(edges(bits))
    new, base = (
        np.concatenate([np.array(own, kind), part]) >> zeros << zeros
        for own, part in zip(pairs, random, strict=True)
    )
    fmt = WIDTHS[bits]
    expected = reference.differences(new.tolist(), base.tolist(), fmt, shift)
    assert reference.restore(base.tolist(), expected, fmt, shift) == new.tolist()

    found = subtract(new, base, fmt)
    cut = Digits(bits, shift)
    digits = [cut.take(found.differences, j) for j in range(-(-(bits - shift) // 16))]
    zigzagged = sum(digit.astype(object) << 16 * j for j, digit in enumerate(digits))
    assert list(zigzagged) == expected
    assert lengths(found.differences, shift).tolist() == [
        sum(z.bit_length() == n for z in expected) for n in range(65)
    ]
    assert (found.union, found.new_union) == (
        np.bitwise_or.reduce(found.differences), np.bitwise_or.reduce(new),
    )  # fmt: skip
    assert np.array_equal(restore(base, np.array(expected, kind), shift, fmt), new)


@pytest.mark.parametrize("low", [0, 1, 3])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_torch_restores_what_the_reference_does(bits: int, low: int) -> None:
    kind = np.dtype(f"<u{bits // 8}")
    new = np.array([a for a in edges(bits) for _ in edges(bits)], kind)
    base = np.array(edges(bits) * len(edges(bits)), kind)
    cut = Digits(bits, low=low)
    region = 33
    found = np.concatenate(
        [
            subtract(new[at : at + region], base[at : at + region], WIDTHS[bits]).differences
            for at in range(0, new.size, region)
        ]
    )
    digits = [torch.from_numpy(cut.take(found, j).astype(np.int32)) for j in range(-(-(bits - low) // 16))]
    fields = None
    if low:
        planes = {width: torch.from_numpy(plane) for width, plane in cut.take_low(found).items()}
        fields = torch_ops.unpack_fields(planes, new.size)
    patterns = torch.from_numpy(base.view(f"<i{bits // 8}")).view(TORCH[bits])
    restored = torch_ops.restore(patterns, digits, fields, cut, WIDTHS[bits], region)
    assert restored.numpy().tobytes() == new.tobytes()


@pytest.mark.parametrize("low", [7, 11, 16, 33])
def test_torch_unpacks_planes_of_all_widths(low: int) -> None:
    differences = np.random.default_rng(low).integers(0, 1 << 63, 77, np.uint64)
    planes = Digits(64, low=low).take_low(differences)
    fields = torch_ops.unpack_fields({w: torch.from_numpy(p) for w, p in planes.items()}, 77)
    z = [reference.zigzag(int(d)) for d in differences.view(np.int64)]
    assert fields.tolist() == [n & ((1 << low) - 1) for n in z]


# The codec


def joined(stream: Stream) -> Array:
    return np.concatenate([part.view(np.uint8) for part in stream.parts])


def coded(new: Array, base: Array, fmt: FloatFormat) -> delta_coding.EncodedDelta:
    found = delta_coding.encode(
        lambda a, b: new[a:b], lambda a, b: base[a:b], new.size, fmt, map, lambda *_: None
    )
    assert found is not None
    return found


def decoder_of(
    found: delta_coding.EncodedDelta, numel: int, fmt: FloatFormat, gpu: Gpu | None = None
) -> delta_coding.DeltaDecoder:
    streams = {name: joined(stream) for name, stream in found.streams.items()}
    return delta_coding.DeltaDecoder(
        lambda name, start, stop: streams[name][start:stop], lambda name: streams[name].size,
        numel, fmt, found.cut, found.digits, gpu,
    )  # fmt: skip


def floats(fmt: FloatFormat, numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, numel * fmt.bits // 8, np.uint8).view(fmt.dtype)


def moved(base: Array, share: float, most: int, seed: int = 1) -> Array:
    """Some of the patterns, a few steps away."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-most, most + 1, base.size).astype(base.dtype)
    return np.where(rng.random(base.size) < share, base + steps, base)


KINDS: dict[str, Callable[[Array], Array]] = {
    "a list": lambda base: moved(base, 10 / base.size, 100),
    "coded": lambda base: moved(base, 0.2, 3),
    "one part": lambda base: np.concatenate([moved(base[: base.size // 3], 0.2, 3), base[base.size // 3 :]]),
    "noise": lambda base: np.random.default_rng(2).permutation(base),
    "the last": lambda base: np.concatenate([base[:-1], base[-1:] + base.dtype.type(1)]),
}


@pytest.mark.parametrize("numel", [1, 2, BLOCK, BLOCK + 1, 3 * BLOCK + 777])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_any_range_is_restored(dtype: str, kind: str, numel: int) -> None:
    fmt = FORMATS[dtype]
    base = floats(fmt, numel)
    new = KINDS[kind](base)
    if np.array_equal(new, base):
        new[0] ^= 1
    found = coded(new, base, fmt)
    stored = decoder_of(found, numel, fmt)
    for start, stop in ((0, numel), (numel // 3, numel // 2), (numel - 1, numel), (0, 0)):
        restored = stored.read(start, stop, lambda a, b: base[a:b])
        assert restored.tobytes() == new[start:stop].tobytes()
    assert found.nbytes <= new.nbytes * 1.1 + 2000


def test_what_is_its_base_takes_nothing() -> None:
    base = floats(FORMATS["BF16"], 1000)
    seen: list[Array] = []
    read = lambda a, b: base[a:b]  # noqa: E731
    assert (
        delta_coding.encode(read, read, 1000, FORMATS["BF16"], map, lambda *pair: seen.extend(pair)) is None
    )
    assert np.array_equal(seen, [base, base])


def test_what_changes_cost() -> None:
    """An unchanged block takes its entries in index and choice, a listed digit two words."""
    fmt = FORMATS["BF16"]
    base = floats(fmt, 100 * BLOCK) & np.uint16(0x807F) | np.uint16(0x3C00)  # sorted: as it is
    new = base.copy()
    new[5 * BLOCK : 5 * BLOCK + 32 * 50 : 50] += np.uint16(1)
    streams = coded(new, base, fmt).streams
    assert {name: stream.nbytes for name, stream in streams.items()} == {
        "table": 16, "index": 208, "words": 128, "choice": 112,
    }  # fmt: skip
    new[5 * BLOCK + 1] += np.uint16(1)  # one more than a list takes
    found = coded(new, base, fmt)
    index = joined(found.streams["index"]).view("<u2")
    assert index[5] >= 65
    assert index.sum() == index[5]
    sparse = moved(base, 0.01, 1)
    assert coded(sparse, base, fmt).nbytes < base.nbytes / 80


def test_weights_of_equal_exponents_stand_together() -> None:
    """If only small weights have moved, the blocks of the large ones are empty."""
    fmt, rng = FORMATS["BF16"], np.random.default_rng(0)
    base = (rng.standard_normal(20 * BLOCK, np.float32).view("<u4") >> 16).astype("<u2")
    small = (base >> 7 & 0xFF) < 124  # below 1/8: a tenth of them
    new = base + small * rng.integers(0, 2, base.size, np.uint16)
    found = coded(new, base, fmt)
    index = joined(found.streams["index"]).view("<u2")[:20]
    assert (index[:2] > 1000).all()
    assert not index[3:].any()
    assert 8 * found.nbytes < 1.7 * small.sum()  # whether it moved, and which way
    restored = decoder_of(found, base.size, fmt).read(0, base.size, lambda a, b: base[a:b])
    assert restored.tobytes() == new.tobytes()


def test_blocks_of_different_kinds_have_tables_of_their_own() -> None:
    fmt, rng = FORMATS["BF16"], np.random.default_rng(0)
    base = (rng.standard_normal(20 * BLOCK, np.float32).view("<u4") >> 16).astype("<u2")
    reach = np.uint64(1) << np.minimum(np.maximum(128 - (base >> 7 & 0xFF).astype(int), 0), 9).astype(
        np.uint64
    )
    new = (base + rng.integers(0, reach)).astype("<u2")
    found = coded(new, base, fmt)
    count = int(joined(found.streams["table"]).view("<u2")[0])
    assert 3 <= count <= 12
    assert set(joined(found.streams["choice"])[:20].tolist()) == set(range(count))
    restored = decoder_of(found, base.size, fmt).read(0, base.size, lambda a, b: base[a:b])
    assert restored.tobytes() == new.tobytes()


def test_a_tensor_of_several_regions() -> None:
    """Each is sorted by itself; a range may begin in one and end in another."""
    fmt, numel = FORMATS["F8_E4M3"], PIECE + 20000
    base = floats(fmt, numel)
    new = moved(base, 0.05, 1)
    stored = decoder_of(coded(new, base, fmt), numel, fmt)
    for start, stop in ((0, numel), (PIECE - 9, PIECE + 9), (PIECE, PIECE + 1)):
        assert stored.read(start, stop, lambda a, b: base[a:b]).tobytes() == new[start:stop].tobytes()


def test_zeros_that_end_all_differences_are_not_stored() -> None:
    """fp32 that was bf16 costs what bf16 does, whatever signs change."""
    narrow = floats(FORMATS["BF16"], 20000)
    changed = moved(narrow, 0.3, 2)
    changed[:40:2] ^= 0x8000
    wide = [(part.astype("<u4") << np.uint32(16)) for part in (changed, narrow)]
    bf16, fp32 = coded(changed, narrow, FORMATS["BF16"]), coded(*wide, FORMATS["F32"])
    assert fp32.cut == Digits(32, shift=16)
    assert {name: joined(s).tobytes() for name, s in fp32.streams.items()} == {
        name: joined(s).tobytes() for name, s in bf16.streams.items()
    }


def test_large_differences_of_all_weights_have_raw_bits() -> None:
    """Of about 14 bits each, as fp32 has after a step of training: no more than 1 bit above what there is."""
    fmt = FORMATS["F32"]
    rng = np.random.default_rng(0)
    base = (rng.standard_normal(60000, np.float32) * np.float32(0.02)).view("<u4")
    new = (base.astype(np.int64) + (rng.standard_normal(60000) * 3000).round().astype(np.int64)).astype("<u4")
    found = coded(new, base, fmt)
    entropy = np.log2(3000 * np.sqrt(2 * np.pi * np.e))
    assert found.cut.low > 0
    assert 8 * found.nbytes / base.size < entropy + 1
    restored = decoder_of(found, base.size, fmt).read(0, base.size, lambda a, b: base[a:b])
    assert restored.tobytes() == new.tobytes()


@given(
    st.sampled_from(["BF16", "F8_E4M3", "F32"]),
    st.integers(1, 400), st.integers(0, 2**31), st.floats(0, 1), st.integers(1, 2**15),
)  # fmt: skip
def test_what_is_coded_is_restored(dtype: str, numel: int, seed: int, share: float, most: int) -> None:
    fmt = FORMATS[dtype]
    base = floats(fmt, numel, seed)
    new = moved(base, share, most, seed)
    if not np.array_equal(new, base):
        stored = decoder_of(coded(new, base, fmt), numel, fmt)
        assert stored.read(0, numel, lambda a, b: base[a:b]).tobytes() == new.tobytes()


@pytest.fixture(scope="module")
def card() -> Gpu:
    """The card; or the CPU in its place, with the kernels interpreted."""
    return Gpu(torch.device("cuda", 0) if ON_CARD else torch.device("cpu"))


@pytest.mark.parametrize(
    ("dtype", "kind", "numel"),
    [
        ("BF16", "coded", BLOCK + 300), ("BF16", "one part", 900), ("F8_E4M3", "coded", 900),
        ("F32", "noise", 900), ("F64", "a list", 2 * BLOCK + 300),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_gpu_restores_the_same(dtype: str, kind: str, numel: int, card: Gpu) -> None:
    fmt = FORMATS[dtype]
    base = floats(fmt, numel)
    new = KINDS[kind](base)
    new[-3:] = base[-3:] ^ base.dtype.type(1 << fmt.bits - 1)  # escapes, in the last block
    stored = decoder_of(coded(new, base, fmt), numel, fmt, card)
    assert stored.read(0, numel, lambda a, b: base[a:b]).tobytes() == new.tobytes()
    assert stored.read(numel - 7, numel - 2, lambda a, b: base[a:b]).tobytes() == new[-7:-2].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_card_restores_large_tensors(dtype: str, kind: str, card: Gpu) -> None:
    fmt, numel = FORMATS[dtype], 300 * BLOCK + 301
    base = floats(fmt, numel)
    new = KINDS[kind](base)
    stored = decoder_of(coded(new, base, fmt), numel, fmt, card)
    assert stored.read(0, numel, lambda a, b: base[a:b]).tobytes() == new.tobytes()


def test_a_gpu_tells_of_corrupt_words_as_the_cpu_does(card: Gpu) -> None:
    fmt, numel = FORMATS["BF16"], 5000
    base = floats(fmt, numel)
    found = coded(moved(base, 0.3, 3), base, fmt)
    words = joined(found.streams["words"]).view("<u2").copy()
    words[40] = 0
    found.streams["words"] = Stream([words])
    told = []
    for gpu in (None, card):
        with pytest.raises(NeuzipError) as caught:
            decoder_of(found, numel, fmt, gpu).read(0, numel, lambda a, b: base[a:b])
        told.append(caught.value.message)
    assert told[0] == told[1]
    assert "words" in told[0]


def test_an_escape_with_more_bits_than_the_dtype_has_is_corrupt_on_both(card: Gpu) -> None:
    fmt, numel = FORMATS["F8_E4M3"], 700
    symbols = (np.arange(numel) % 3 == 0).astype(np.uint16)
    table = rans.build_table(np.bincount(symbols, minlength=1 << 16), None)
    symbols[9] = 300
    words = rans.encode(symbols, table)
    head = [1, 1, table.palette.size, table.frequencies.size, *table.palette, *table.frequencies]
    parts = {"table": np.array(head, np.uint16), "index": words.index, "words": words.words}
    streams = {name: padded_stream([part]) for name, part in parts.items()}
    streams["choice"] = padded_stream([np.zeros(1, np.uint8)])
    for gpu in (None, card):
        stored = decoder_of(delta_coding.EncodedDelta(Digits(8), 1, streams, 0), numel, fmt, gpu)
        with pytest.raises(NeuzipError, match="block 0 is corrupt"):
            stored.read(0, numel, lambda a, b: np.zeros(b - a, np.uint8))


# Checkpoints

SHAPES = {"model.embed.weight": [50, 400], "model.up.weight": [120, 100], "model.norm.weight": [60]}


def bell(name: str, shape: list[int]) -> Any:
    tensor = recipes.normal("BF16", int(np.prod(shape)), seed=name)
    return tensor._replace(shape=shape)


def write(folder: Path, files: dict[str, dict[str, Any]], *others: tuple[str, str]) -> Path:
    """A checkpoint: weight files, and other files with their text."""
    for file, tensors in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(recipes.Input(tensors, metadata={"format": "pt"}).to_bytes())
    for name, text in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def family(tmp_path: Path) -> tuple[Path, Path]:
    """A base in two shards, and what grew out of it, in one, with another tensor and other files."""
    old = {name: bell(name, shape) for name, shape in SHAPES.items()}
    old["ids"] = recipes.Tensor("I64", [40], bytes(range(80)) * 4)
    names = list(old)
    base = write(
        tmp_path / "base",
        {"a.safetensors": {n: old[n] for n in names[:2]}, "b.safetensors": {n: old[n] for n in names[2:]}},
        ("config.json", '{"_name_or_path": "family/base", "model_type": "llama"}'), ("tokenizer.json", "{}"),
    )  # fmt: skip
    new = dict(old)
    new["model.up.weight"] = recipes.changed(old["model.up.weight"], "tuned", 100, 2)
    new["model.norm.weight"] = recipes.changed(old["model.norm.weight"], "tuned", 2, 2)
    new["model.added.weight"] = bell("added", [70, 80])
    new["model.tied.weight"] = new["model.embed.weight"]
    index = json.dumps({"weight_map": dict.fromkeys(new, "model.safetensors")})
    tuned = write(
        tmp_path / "tuned", {"model.safetensors": new},
        ("config.json", '{"model_type": "llama", "tuned": true}'), ("sub/notes.txt", "of step 10"),
        ("model.safetensors.index.json", index),
    )  # fmt: skip
    return base, tuned


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_restored_byte_by_byte(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    report = compress_delta(tuned, base, tmp_path / "delta", "family/base")
    schemes = {t.name: t.scheme for t in report.tensors}
    assert schemes == {
        "model.embed.weight": "as in the base", "model.up.weight": "delta", "model.norm.weight": "raw",
        "ids": "as in the base", "model.added.weight": "lossless",
        "model.tied.weight": "same as model.embed.weight",
    }  # fmt: skip
    restored = decompress(tmp_path / "delta", tmp_path / "restored", base=base)
    assert restored.lossless
    assert contents(tmp_path / "restored") == contents(tuned)
    assert decoder.restore_folder(tmp_path / "delta", base) == contents(tuned)
    again = decompress(tmp_path / "delta", tmp_path / "restored", base=base)
    assert again.was_there
    manifest = json.loads((tmp_path / "delta/neuzip/manifest.json").read_text())
    assert (manifest["requires"], manifest["base"]) == (["delta"], {"name": "family/base"})
    index = json.loads((tmp_path / "delta/model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == {
        *(f"model.up.weight:{s}" for s in ("table", "index", "words", "choice")), "model.norm.weight",
        *(f"model.added.weight:{s}" for s in ("table", "index", "words", "sign_mantissa")),
    }  # fmt: skip


@pytest.mark.parametrize("old_is_compressed", [False, True])
def test_either_may_be_compressed(old_is_compressed: bool, family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    compress(base, tmp_path / "base.nz")
    compress(tuned, tmp_path / "tuned.nz")
    compress_delta(tuned, base, tmp_path / "plain", "b")
    against = tmp_path / "base.nz" if old_is_compressed else base
    stages: dict[str, list[int]] = {}

    @contextmanager
    def stage(label: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        stages[label] = [-nbytes]
        yield stages[label].append

    compress_delta(tmp_path / "tuned.nz", against, tmp_path / "delta", "b", stage=stage)
    assert {label: sum(told) for label, told in stages.items()} == {"restore source": 0, "compress": 0}
    assert contents(tmp_path / "delta") == contents(tmp_path / "plain")
    for number, with_base in enumerate((base, tmp_path / "base.nz")):
        decompress(tmp_path / "delta", tmp_path / f"restored{number}", base=with_base)
        assert contents(tmp_path / f"restored{number}") == contents(tuned)
    assert not list(tmp_path.glob("*.neuzip-*"))


def test_a_rounded_checkpoint_has_no_delta(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    compress(tuned, tmp_path / "rounded", [Rule("*", Scheme("truncated", 1), min_dimensions=2)])
    with pytest.raises(NeuzipError, match="is rounded"):
        compress_delta(tmp_path / "rounded", base, tmp_path / "delta", "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "rounded", "tuned"]


def test_single_files(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    old, new = tmp_path / "old.safetensors", tuned / "model.safetensors"
    tensors = {name: bell(name, shape) for name, shape in SHAPES.items()}
    old.write_bytes(recipes.Input(tensors).to_bytes())
    for number, against in enumerate((old, base)):
        packed, restored = (tmp_path / f"{step}{number}.safetensors" for step in ("packed", "restored"))
        compress_delta(new, against, packed, "b")
        decompress(packed, restored, base=against)
        assert restored.read_bytes() == new.read_bytes()
        assert decoder.restore_file(packed, against) == new.read_bytes()
        assert verify(packed, new, base=against).different == []
    compress(new, tmp_path / "new.safetensors")
    compress_delta(tmp_path / "new.safetensors", old, tmp_path / "again.safetensors", "b")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "packed0.safetensors").read_bytes()
    for src in (new, tmp_path / "new.safetensors"):  # a run that is repeated
        assert compress_delta(src, old, tmp_path / "again.safetensors", "b").resumed_files == 1
        with pytest.raises(WouldOverwrite):
            compress_delta(src, base, tmp_path / "again.safetensors", "b")
    assert decompress(tmp_path / "packed0.safetensors", restored, base=old).was_there


def test_a_base_in_other_shards_will_do(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    compress_delta(tuned, base, tmp_path / "delta", "b")
    with FolderSource(base) as source:
        tensors = {
            t.name: recipes.Tensor(t.info.dtype, list(t.info.shape), source.read(t).tobytes())
            for t in source.tensors()
        }
    write(tmp_path / "one", {"whole.safetensors": tensors})
    decompress(tmp_path / "delta", tmp_path / "restored", base=tmp_path / "one")
    assert contents(tmp_path / "restored") == contents(tuned)


def test_tensors_belong_to_those_of_the_same_folder(tmp_path: Path) -> None:
    """As in pipelines of diffusers, whose parts have tensors of the same names."""
    first, second = (recipes.normal("BF16", 9000, seed=seed) for seed in ("unet", "vae"))
    old = {"unet/m.safetensors": {"w": first}, "vae/m.safetensors": {"w": second}}
    base = write(tmp_path / "base", old)
    new = write(tmp_path / "new", {"unet/x.safetensors": {"w": first}, "vae/m.safetensors": {"w": first}})
    report = compress_delta(new, base, tmp_path / "delta", "b")
    assert [t.scheme for t in report.tensors] == ["as in the base", "lossless"]
    decompress(tmp_path / "delta", tmp_path / "restored", base=base)
    assert contents(tmp_path / "restored") == contents(new)


def test_of_two_tensors_of_a_name_that_of_the_same_file_counts(tmp_path: Path) -> None:
    first, second = (recipes.normal("BF16", 9000, seed=seed) for seed in ("a", "b"))
    base = write(tmp_path / "base", {"a.safetensors": {"w": first}, "b.safetensors": {"w": second}})
    new = write(tmp_path / "new", {"b.safetensors": {"w": second}})
    (t,) = compress_delta(new, base, tmp_path / "delta", "b").tensors
    assert t.scheme == "as in the base"
    decompress(tmp_path / "delta", tmp_path / "restored", base=base)
    assert contents(tmp_path / "restored") == contents(new)


def test_tensors_of_a_base_are_looked_up_and_not_searched_for(
    family: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for each of many thousands would take longer than restoring them."""
    base, tuned = family
    compress_delta(tuned, base, tmp_path / "delta", "b")
    compress(base, tmp_path / "base.nz")
    for path in (base, tmp_path / "base.nz"):
        with FolderSource(path) as source, FolderSource(tmp_path / "delta", base=source) as changed:
            expected = {t.name: t for t in source.tensors()}
            needing = [t for t in changed.tensors() if t.record is not None and t.record.needs_base]
            with monkeypatch.context() as patch:
                patch.delattr(FolderSource, "tensors")
                found = [changed.base_tensor(t) for t in needing]
            assert found == [expected[t.record.of] for t in needing if isinstance(t.record, OfBaseRecord)]


def test_the_lesser_of_the_two_is_stored(tmp_path: Path) -> None:
    """Where weights have little in common with those of the base, a delta is what `compress` makes."""
    base = write(tmp_path / "base", {"m.safetensors": {"w": recipes.normal("BF16", 40000, seed="a")}})
    new = write(tmp_path / "new", {"m.safetensors": {"w": recipes.normal("BF16", 40000, seed="b")}})
    (t,) = compress_delta(new, base, tmp_path / "delta", "b").tensors
    (alone,) = compress(new, tmp_path / "alone").tensors
    assert (t.scheme, t.stored_bytes) == (alone.scheme, alone.stored_bytes) == ("lossless", t.stored_bytes)


def test_bytes_do_not_depend_on_threads(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    for jobs in (1, 3):
        compress_delta(tuned, base, tmp_path / f"of {jobs}", "b", jobs=jobs)
    assert contents(tmp_path / "of 1") == contents(tmp_path / "of 3")


def test_a_killed_run_is_resumed(
    family: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = family

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("neuzip.compress.checkpoint_job.publish", stop)
    with pytest.raises(KeyboardInterrupt):
        compress_delta(tuned, base, tmp_path / "delta", "b")
    monkeypatch.undo()
    assert not (tmp_path / "delta").exists()
    assert compress_delta(tuned, base, tmp_path / "delta", "b").resumed_files == 1
    decompress(tmp_path / "delta", tmp_path / "restored", base=base)
    assert contents(tmp_path / "restored") == contents(tuned)
    assert compress_delta(tuned, base, tmp_path / "delta", "b").resumed_files == 1
    with pytest.raises(WouldOverwrite):
        compress(tuned, tmp_path / "delta")


# What has to be refused


@pytest.fixture
def made(family: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path, Path]:
    """A delta, its base, and what it restores to."""
    base, tuned = family
    compress_delta(tuned, base, tmp_path / "delta", "family/base")
    return tmp_path / "delta", base, tuned


def test_another_base_is_refused_before_anything_is_written(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    packed, base, _ = made
    weights = bytearray((base / "a.safetensors").read_bytes())
    weights[-1] ^= 1
    (base / "a.safetensors").write_bytes(weights)
    with pytest.raises(NeuzipError, match=r"a\.safetensors: tensor 'model\.up\.weight' has the") as caught:
        decompress(packed, tmp_path / "out", base=base)
    assert caught.value.hint == "give `base='family/base'`"
    with pytest.raises(NeuzipError, match="has the checksum"):
        verify(packed, base=base)
    (base / "a.safetensors").unlink()
    with pytest.raises(NeuzipError, match=r"has no tensor 'model\.(embed|up)\.weight' of BF16"):
        decompress(packed, tmp_path / "out", base=base)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "delta", "tuned"]


def test_whoever_has_no_base_refuses_a_delta_by_name(
    made: tuple[Path, Path, Path], tmp_path: Path, neuzip: Speak
) -> None:
    from neuzip.runtime.hf.load import load_model

    packed, base, tuned = made
    readers: list[Callable[[], object]] = [
        lambda: decompress(packed, tmp_path / "out"),
        lambda: FolderSource(packed),
        lambda: Container(packed / "model.safetensors"),
        lambda: compress(packed, tmp_path / "out"),
        lambda: compress_delta(packed, base, tmp_path / "out", "b"),
        lambda: compress_delta(tuned, packed, tmp_path / "out", "b"),
        lambda: load_model(packed),
    ]
    for read in readers:
        with pytest.raises(FormatError, match="it requires 'delta'") as caught:
            read()
        assert caught.value.hint == "restore it first: neuzip apply DELTA --base BASE DST"
    for command in (
        ["decompress", packed, tmp_path / "out"], ["diff", packed, tuned],
        ["export", packed, tmp_path / "out", "--to", "compressed-tensors"],
    ):  # fmt: skip
        said = neuzip(*command)
        assert said.exit_code == 1, command
        assert "is a delta" in said.stderr, command
        assert "neuzip apply" in said.stderr, command
    assert not (tmp_path / "out").exists()


def test_what_is_no_delta_needs_no_base(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    compress(tuned, tmp_path / "nz")
    with pytest.raises(NeuzipError, match="is no delta"):
        decompress(tmp_path / "nz", tmp_path / "out", base=base)
    with pytest.raises(NeuzipError, match="is no delta"):
        verify(tmp_path / "nz", base=base)


def test_no_place_lies_within_the_base(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    packed, base, tuned = made
    with pytest.raises(NeuzipError, match="lies within"):
        decompress(packed, base / "out", base=base)
    with pytest.raises(NeuzipError, match="lies within"):
        compress_delta(tuned, base, base / "out", "b")
    with pytest.raises(NeuzipError, match="is the same place as"):
        compress_delta(base, base, tmp_path / "out", "b")


def test_verify_checks_a_delta_with_and_without_its_base(made: tuple[Path, Path, Path]) -> None:
    packed, base, tuned = made
    alone = verify(packed)
    assert {t.name for t in alone.tensors if t.base_missing} == {
        "model.embed.weight", "model.up.weight", "ids",
    }  # fmt: skip
    assert not any(t.base_missing for t in verify(packed, base=base).tensors)
    assert all(t.identical for t in verify(packed, tuned, base=base).tensors)
    with pytest.raises(NeuzipError, match="its base is not here"):
        verify(packed, tuned)
    other = bytearray((tuned / "model.safetensors").read_bytes())
    other[-9] ^= 1
    (tuned / "model.safetensors").write_bytes(other)
    with pytest.raises(VerificationError):
        verify(packed, tuned, base=base)
    damaged = packed / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    with Container(damaged, delta=True) as container:
        info = container.file.header.tensors["model.up.weight:words"]
        at = container.file.data_start + info.start
    data[at] ^= 1
    damaged.write_bytes(data)
    for given_base in (None, base):
        with pytest.raises(FormatError, match="the file is damaged"):
            verify(packed, base=given_base)


def test_what_the_bad_deltas_were_made_of_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    for parts in (bad.delta(), bad.delta("F8_E4M3"), bad.the_base()):
        path.write_bytes(bad.put_together(parts))
        assert [t.base_missing for t in verify(path).tensors] == [True]


def test_bases_have_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "some-model", {"m.safetensors": {}}, ("config.json", "{}"))
    assert name_of(folder, str(folder)) == "some-model"
    assert name_of(folder, "org/name@main") == "org/name@main"
    for said, name in (("org/other", "org/other"), ("/home/me/model", "some-model"), (3, "some-model")):
        (folder / "config.json").write_text(json.dumps({"_name_or_path": said}))
        assert name_of(folder, str(folder)) == name
    (folder / "config.json").write_text("broken")
    assert name_of(folder, str(folder)) == "some-model"


# The command line


def test_the_commands(
    family: tuple[Path, Path], tmp_path: Path, neuzip: Speak, in_all_modes: Callable[..., dict[str, Any]]
) -> None:
    base, tuned = family
    packed, restored = tmp_path / "delta", tmp_path / "restored"
    said = in_all_modes("compress", tuned, packed, "--base", base, "--overwrite")
    assert "base family/base: 2 tensors unchanged, 1 as differences, 3 in full" in said["human"].stdout
    assert (said["json"].json["base"], said["json"].json["base_name"]) == (str(base), "family/base")
    assert said["json"].json["lossless"] is True
    said = in_all_modes("apply", packed, restored, "--base", base, "--overwrite")
    assert said["json"].json["restored_bytes"] == sum(map(len, contents(tuned).values()))
    assert contents(restored) == contents(tuned)
    said = in_all_modes("inspect", packed)
    assert {t["name"]: t["scheme"] for t in said["json"].json["tensors"]}["ids"] == "base"
    assert "A delta; its base is family/base." in said["human"].stdout
    assert "--base BASE" in in_all_modes("verify", packed)["human"].stderr
    assert neuzip("verify", packed, "--base", base, "--original", tuned).exit_code == 0


@pytest.mark.parametrize(
    "option",
    [["--mantissa-bits", "3"], ["--ternary"], ["--dry-run"], ["--push-to", "a/b"], ["--target-size", "50%"]],
)
def test_a_delta_is_always_exact(option: list[str], tmp_path: Path, neuzip: Speak) -> None:
    said = neuzip("compress", tmp_path, tmp_path / "out", "--base", tmp_path, *option)
    assert said.exit_code == 2
    assert f"--base and {option[0]} exclude each other" in said.stderr
    hint = {"--push-to": "neuzip push DST", "--dry-run": "when it is made"}.get(option[0], "always exact")
    assert hint in said.stderr


@pytest.mark.slow
def test_apply_needs_no_torch(
    made: tuple[Path, Path, Path], tmp_path: Path, run_without_torch: RunAlone
) -> None:
    """Nor does anything else that works on the CPU: it takes seconds to load."""
    packed, base, _ = made
    code = (
        "import sys; from neuzip.cli import run; "
        f"arguments = [{str(packed)!r}, {str(tmp_path / 'out')!r}, '--base', {str(base)!r}]; "
        "assert run(['apply', *arguments, '-q']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    run_without_torch(code)


# The Hub


@pytest.mark.parametrize("name", ["family/base", "family/base@v2", "my base"])
@pytest.mark.slow
def test_a_delta_goes_over_the_hub(
    name: str, family: tuple[Path, Path], tmp_path: Path, here: Hub, neuzip: Speak
) -> None:
    """Pushed, it says what it is; pulled or not, it restores the original with its base, which is there."""
    base, tuned = family
    (tuned / "README.md").write_text("---\nlicense: mit\n---\nTuned.\n")
    packed, restored = tmp_path / "delta", tmp_path / "restored"
    compress_delta(tuned, base, packed, name)
    here.add("family/base", {p.name: p.read_bytes() for p in base.iterdir()})
    dry = neuzip("push", packed, "me/tuned-delta", "--dry-run", "--json").json
    said = neuzip("push", packed, "me/tuned-delta")
    on_hub = "/" in name
    assert said.exit_code == 0 and ("its base is called 'my base', not a Hub id" in said.stderr) != on_hub
    tree = here.repositories["me/tuned-delta"].tree()
    card = tree["README.md"].decode()
    assert card == dry["card"]
    metadata, text = split_card(card)
    assert metadata.get("base_model") == ("family/base" if on_hub else None)
    assert metadata["tags"] == ["neuzip", "lossless", "delta"] and metadata["license"] == "mit"
    assert (
        f"This repository is a delta. Together with its base, `{name}`, it restores another checkpoint"
        in text
    )
    assert f"\n    neuzip apply me/tuned-delta DST --base {name if on_hub else 'BASE'}\n" in text
    assert ("Ask the author of the delta" in text) != on_hub
    assert "from_pretrained" not in text and "neuzip decompress" not in text
    for row in (
        "BF16, same as in the base: 1 tensor",
        "I64, same as in the base: 1",
        "BF16, difference from the base: 1",
    ):
        assert f"\n| {row}" in text
    assert text.endswith("Tuned.\n")

    for src in ("me/tuned-delta", tmp_path / "pulled"):
        said = neuzip("apply", src, restored, "--base", "family/base", "--overwrite")
        assert (said.exit_code, said.stderr) == (0, "")
        assert contents(restored) == contents(tuned)
        if src == "me/tuned-delta":
            assert neuzip("verify", src, "--base", "family/base", "--original", tuned).exit_code == 0
            said = neuzip("pull", src, tmp_path / "pulled")
            assert (said.exit_code, said.stderr) == (
                0, "a delta: 3 tensors not restored: they need the base; only their stored data was checked\n"
            )  # fmt: skip
    assert neuzip("push", tmp_path / "pulled", "me/again").exit_code == 0
    again = here.repositories["me/again"].tree()
    assert {f for f in tree if tree[f] != again[f]} == {"README.md"}
    said = neuzip("decompress", "me/tuned-delta", tmp_path / "out")
    assert said.exit_code == 1 and "neuzip apply DELTA --base BASE DST" in said.stderr


def test_what_a_base_is_called_is_only_text_in_a_card(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = family
    name = "org/x`<script>\n    rm -rf ~\n\x1b[2J"
    compress_delta(tuned, base, tmp_path / "delta", name)
    card = plan_push(tmp_path / "delta", "me/delta").card
    assert "\x1b" not in card and "\n    rm" not in card
    assert "``org/x`<script>     rm -rf ~ \\x1b[2J``" in card
    assert "--base BASE" in card


def test_a_delta_that_is_damaged_is_not_pushed(
    made: tuple[Path, Path, Path], here: Hub, neuzip: Speak
) -> None:
    packed, _, _ = made
    with Container(packed / "model.safetensors", delta=True) as container:
        at = container.file.data_start + container.file.header.tensors["model.up.weight:words"].start
    data = bytearray((packed / "model.safetensors").read_bytes())
    data[at] ^= 1
    (packed / "model.safetensors").write_bytes(data)
    said = neuzip("push", packed, "me/delta")
    assert said.exit_code == 1 and "the file is damaged" in said.stderr
    assert not here.repositories


def test_a_delta_has_no_evaluation(made: tuple[Path, Path, Path], tmp_path: Path, neuzip: Speak) -> None:
    (tmp_path / "eval.json").write_text("{}")
    said = neuzip("push", made[0], "me/delta", "--evaluation", tmp_path / "eval.json")
    assert said.exit_code == 2
    assert "--evaluation: " in said.stderr and "is a delta" in said.stderr


# Real weights


def test_a_step_of_training_takes_an_order_of_magnitude_less(neuzip_data: Path, tmp_path: Path) -> None:
    """A hundredth of the weights one float further, as after a step of reinforcement learning."""
    base = neuzip_data / "wikilm-26m"
    file = sorted(base.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    weights = np.frombuffer(data, "<u2", offset=start).copy()
    data[start:] = moved(weights, 0.015, 1).tobytes()
    new = tmp_path / "new.safetensors"
    new.write_bytes(data)
    report = compress_delta(new, file, tmp_path / "delta.safetensors", "wikilm-26m")
    alone = compress(new, tmp_path / "alone.safetensors")
    assert report.stored_weight_bytes * 10 < alone.stored_weight_bytes
    decompress(tmp_path / "delta.safetensors", tmp_path / "back.safetensors", base=file)
    assert (tmp_path / "back.safetensors").read_bytes() == new.read_bytes()


def test_restoring_on_a_gpu(made: tuple[Path, Path, Path], tmp_path: Path, card: Gpu) -> None:
    packed, base, tuned = made
    report = decompress(packed, tmp_path / "restored", base=base, device=Device("card", card))
    assert report.device == "card"
    assert contents(tmp_path / "restored") == contents(tuned)


def test_verify_says_of_a_delta_what_it_checked(made: tuple[Path, Path, Path], neuzip: Speak) -> None:
    packed, base, _ = made
    alone, whole = neuzip("verify", packed), neuzip("verify", packed, "--base", base)
    (first, second) = alone.stdout.splitlines()
    assert first.startswith("intact without the base: ") and first.endswith("every checksum right")
    assert "everything decoded" not in alone.stdout
    count = sum(t["base_missing"] for t in neuzip("verify", packed, "--json").json["tensors"])
    need = "it needs" if count == 1 else "they need"
    assert second.startswith(f"{count} tensor") and f"not restored: {need} the base" in second
    assert whole.stdout.endswith(f"everything decoded with the base {base}\n")


def test_headers_of_deltas_have_room_for_all_their_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F32 has five streams a tensor, one more than a tensor that is coded alone, and names may be long."""
    monkeypatch.setattr("neuzip.formats.container.MOVED", 1000)
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.some_rather_long_name_of_a_module.attention.weight" for i in range(50)]
    old = {name: torch.randn(64, 64, generator=generator) for name in names}
    new = {name: weight + 0.01 * torch.randn(64, 64, generator=generator) for name, weight in old.items()}
    base, tuned, delta, back = (
        tmp_path / f"{name}.safetensors" for name in ("base", "tuned", "delta", "back")
    )
    save_file(old, base)
    save_file(new, tuned)
    compress_delta(tuned, base, delta, "base")
    with Container(delta, delta=True) as container:
        assert {record.scheme for record in container.manifest.tensors.values()} == {"delta"}
        assert container.file.data_start % 16 == 0
    decompress(delta, back, base=base)
    assert back.read_bytes() == tuned.read_bytes()
