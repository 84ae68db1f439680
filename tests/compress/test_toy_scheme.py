"""A scheme in one file: int8 with one fp32 scale a tensor, registered here and known nowhere in the package.

It goes through all commands and the loaders. What a scheme needs is above the line; the rest are tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
import xxhash
from conftest import Speak
from msgspec import Meta
from safetensors.torch import load_file, save_file

from neuzip.compress import schemes
from neuzip.compress.pieces import NotWorthwhile, expect_length, is_worthwhile, padded
from neuzip.compress.scheme import KINDS, Scheme
from neuzip.compress.schemes.codec import Declined, StoredTensor, TensorInput, checksums
from neuzip.compress.schemes.raw import RAW, without_coding
from neuzip.compress.schemes.truncated import ErrorSums
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats import records
from neuzip.formats.container import Container, padded_stream
from neuzip.formats.records import Checksum, Loss
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels.float_fields import Bits


class Int8Record(records.Record, frozen=True, kw_only=True):
    """Whole numbers of `levels` steps each way, and a scale."""

    scheme = "toy"
    STREAMS: ClassVar[Mapping[str, str]] = {"numbers": "U8", "step": "U8"}

    levels: Annotated[int, Meta(ge=1, le=127)]
    streams: dict[str, Checksum]
    original: Checksum
    loss: Loss

    @property
    def text(self) -> str:
        """The scheme in a few words."""
        return f"toy with {self.levels} levels"


@dataclass(frozen=True)
class Int8Scheme(Scheme):
    """The scheme as rules name it."""

    levels: int = 127


class Int8Codec(schemes.Codec[Int8Record]):
    """F32 tensors as whole numbers times a scale."""

    record = Int8Record
    kind = "toy"
    keys = ("levels",)
    scheme_type = Int8Scheme
    rounds = True

    def check(self, scheme: Scheme) -> None:
        """Raise UsageError for levels that do not fit a byte."""
        if type(_levels(scheme)) is not int or not 1 <= _levels(scheme) <= 127:
            raise UsageError(f"{_levels(scheme)!r} levels are not 1 to 127")

    def words(self, scheme: Scheme) -> str:
        """The scheme in a few words."""
        return f"toy with {_levels(scheme)} levels"

    def applies(self, info: TensorInfo, scheme: Scheme) -> tuple[Scheme, str]:
        """The scheme, for matrices of F32 that are large enough."""
        note = without_coding(info) or ("" if info.dtype == "F32" else f"{info.dtype} is not F32")
        return (RAW, note) if note else (scheme, "")

    def predict(self, tensor: TensorInput, scheme: Scheme) -> int:
        """One byte a weight."""
        return padded(tensor.numel) + padded(4)

    def encode(self, tensor: TensorInput, scheme: Scheme) -> schemes.EncodedTensor:
        """Record and streams; finite weights only."""
        bits = tensor.read(0, tensor.numel)
        weights = bits.view("<f4")
        if not np.isfinite(weights).all():
            raise Declined("holds infinities or NaNs: kept lossless")
        if not is_worthwhile(padded(tensor.numel) + padded(4), tensor.info.nbytes):
            raise NotWorthwhile
        step = np.float32(np.abs(weights).max() / _levels(scheme))
        numbers = np.rint(weights / step if step else weights).astype(np.int8)
        restored = _restored(numbers, step)
        streams = {
            "numbers": padded_stream([numbers.view(np.uint8)]),
            "step": padded_stream([np.array([step], "<f4").view(np.uint8)]),
        }
        record = Int8Record(
            xxhash.xxh3_64_hexdigest(restored.data), levels=_levels(scheme), streams=checksums(streams),
            original=xxhash.xxh3_64_hexdigest(bits.data),
            loss=ErrorSums.between(bits, restored, tensor.fmt).loss,
        )  # fmt: skip
        return schemes.EncodedTensor(record, streams)

    def decoder(self, stored: StoredTensor[Int8Record]) -> Int8Decoder:
        """What decodes ranges of a tensor."""
        return Int8Decoder(stored)


class Int8Decoder:
    """Ranges of numbers times the scale."""

    def __init__(self, stored: StoredTensor[Int8Record]) -> None:
        expect_length("numbers", stored.length("numbers"), padded(stored.info.numel))
        expect_length("step", stored.length("step"), padded(4))
        self._read, self._levels = stored.read_stream, stored.record.levels
        self._step = np.float32(self._read("step", 0, 4).view("<f4")[0])

    def read(self, start: int, stop: int, /) -> Bits:
        """The bit patterns of weights `start` to `stop`."""
        numbers = self._read("numbers", start, stop).view(np.int8)
        if (np.abs(numbers.astype(np.int16)) > self._levels).any():
            raise NeuzipError("the stream 'numbers' has numbers beyond its levels")
        return _restored(numbers, self._step)


def _levels(scheme: Scheme) -> int:
    assert isinstance(scheme, Int8Scheme)
    return scheme.levels


def _restored(numbers: np.ndarray, step: np.float32) -> Bits:
    return (numbers.astype(np.float32) * step).astype("<f4").view("<u4")


# ----------------------------------------------------------------------------------------------------------


CODEC = Int8Codec()

PLAN = """
[[rule]]
match = "*proj.weight"
scheme = "toy"
levels = 100
"""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    schemes.register(CODEC)
    yield
    del schemes.CODECS[Int8Record], KINDS["toy"], records.RECORDS["toy"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "q_proj.weight": torch.randn(128, 96, generator=generator),
        "infinite_proj.weight": torch.full((64, 64), float("inf")),
        "half_proj.weight": torch.randn(64, 64, generator=generator).half(),
        "norm.weight": torch.randn(4096, generator=generator),
    }
    tensors["tied_proj.weight"] = tensors["q_proj.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "plan.toml").write_text(PLAN)
    return folder


def expected(folder: Path, levels: int = 100) -> torch.Tensor:
    weight = load_file(folder / "model.safetensors")["q_proj.weight"]
    step = weight.abs().max() / levels
    return torch.round(weight / step) * step


def run(neuzip: Speak, *arguments: object) -> dict[str, Any]:
    """The JSON of a command that has to succeed."""
    said = neuzip(*arguments, "--json")
    assert said.exit_code == 0, said.stderr
    return said.json


def test_it_goes_through_all_commands(checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    plan, small, back = (tmp_path / name for name in ("plan.toml", "small", "back"))
    report = run(neuzip, "compress", checkpoint, small, "--plan", plan)
    kinds = {t["name"]: t["scheme"] for t in report["tensors"]}
    assert kinds == {
        "q_proj.weight": "toy with 100 levels",
        "tied_proj.weight": "same as q_proj.weight",
        "infinite_proj.weight": "lossless, 0 of 23 mantissa bits",
        "half_proj.weight": "raw",
        "norm.weight": "lossless",
    }
    run(neuzip, "verify", small)
    run(neuzip, "verify", small, "--original", checkpoint)
    inspected = run(neuzip, "inspect", small)
    assert "toy with 100 levels" in str(inspected)
    run(neuzip, "decompress", small, back)
    restored = load_file(back / "model.safetensors")
    assert torch.equal(restored["q_proj.weight"], expected(checkpoint))
    assert torch.equal(restored["tied_proj.weight"], expected(checkpoint))
    assert torch.equal(restored["norm.weight"], load_file(checkpoint / "model.safetensors")["norm.weight"])


def test_the_loaders_read_it(checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    import neuzip as library

    run(neuzip, "compress", checkpoint, tmp_path / "small", "--plan", tmp_path / "plan.toml")
    loaded = library.load_file(tmp_path / "small" / "model.safetensors")
    assert torch.equal(loaded["q_proj.weight"], expected(checkpoint))
    with library.safe_open(tmp_path / "small" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_slice("q_proj.weight")[3:5], expected(checkpoint)[3:5])


def test_a_model_with_it_is_loaded_and_described(tmp_path: Path, neuzip: Speak) -> None:
    from models import GROUPED, llama

    from neuzip import load_model

    model = llama(0, **{**GROUPED, "hidden_size": 64})
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "plan.toml").write_text(PLAN)
    report = run(neuzip, "compress", tmp_path / "model", tmp_path / "small", "--plan", tmp_path / "plan.toml")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert {t["name"]: t["scheme"] for t in report["tensors"]}[name] == "toy with 100 levels"
    loaded = load_model(tmp_path / "small", residency="dense")
    weight = model.get_parameter(name)
    step = weight.abs().max() / 100
    assert torch.equal(loaded.get_parameter(name), torch.round(weight / step) * step)
    from neuzip.formats.card.model_card import model_card
    from neuzip.formats.checkpoint import find_checkpoint

    assert "toy with 100 levels" in model_card(find_checkpoint(tmp_path / "small"), "", "me/small", "small")


def test_a_gpu_reads_it_too(checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    """The path of a GPU, on a CPU: what has no decoder there is decoded on the host."""
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.runtime.read_gpu import read_on

    run(neuzip, "compress", checkpoint, tmp_path / "small", "--plan", tmp_path / "plan.toml")
    with FolderSource(tmp_path / "small") as source:
        tensors = [t for t in source.tensors() if t.name == "q_proj.weight"]
        (weight,) = read_on(torch.device("cpu"), source, tensors)
    assert torch.equal(weight, expected(checkpoint))


def test_its_sizes_are_predicted_and_its_header_has_room(
    checkpoint: Path, tmp_path: Path, neuzip: Speak
) -> None:
    words = ("compress", checkpoint, tmp_path / "small", "--plan", tmp_path / "plan.toml")
    planned = {t["name"]: t for t in run(neuzip, *words, "--dry-run")["tensors"]}
    made = {t["name"]: t for t in run(neuzip, *words)["tensors"]}
    assert planned["q_proj.weight"]["stored_bytes"] == made["q_proj.weight"]["stored_bytes"]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ('scheme = "toy"\nlevels = 200', "200 levels are not 1 to 127"),
        ('scheme = "toy"\nlevel = 3', "there is no key 'level'"),
        ('scheme = "lossless"\nlevels = 3', "the scheme 'lossless' has no levels"),
        ('scheme = "int9"', "unknown scheme 'int9'"),
    ],
)
def test_rules_are_checked(rule: str, problem: str, checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    (tmp_path / "plan.toml").write_text(f'[[rule]]\nmatch = "*"\n{rule}\n')
    said = neuzip("compress", checkpoint, tmp_path / "small", "--plan", tmp_path / "plan.toml")
    assert said.exit_code != 0
    assert problem in said.stderr


def test_records_are_checked(checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    good = {
        "scheme": "toy", "checksum": "0" * 16, "levels": 3, "streams": {"numbers": "0" * 16},
        "original": "1" * 16, "loss": {"max_relative": 0.5, "rms_relative": 0.25},
    }  # fmt: skip
    record = records.parse_record("w", good, "file")
    assert record.to_json() == good
    for key, value in (
        ("levels", 128),
        ("levels", True),
        ("streams", None),
        ("loss", {}),
        ("original", None),
    ):
        with pytest.raises(FormatError, match=re.escape(f"field {key!r}: {value!r} is not valid here")):
            records.parse_record("w", good | {key: value}, "file")


def test_what_is_damaged_is_found(checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    run(neuzip, "compress", checkpoint, tmp_path / "small", "--plan", tmp_path / "plan.toml")
    path = tmp_path / "small" / "model.safetensors"
    with Container(path) as container:
        file = container.file
        start = file.data_start + file.header.tensors["q_proj.weight:numbers"].start
    with open(path, "r+b") as data:
        data.seek(start)
        data.write(b"\x7f")
    said = neuzip("verify", tmp_path / "small")
    assert said.exit_code != 0
    assert "numbers" in said.stderr


def test_a_scheme_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'toy' is known already"):
        schemes.register(CODEC)


def test_without_it_the_container_is_refused(checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    run(neuzip, "compress", checkpoint, tmp_path / "small", "--plan", tmp_path / "plan.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(records.RECORDS, "toy")
        said = neuzip("verify", tmp_path / "small")
    assert said.exit_code != 0
    assert "unknown scheme 'toy'" in said.stderr
