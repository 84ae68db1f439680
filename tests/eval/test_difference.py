"""`neuzip diff`: bytes decide what is identical, numbers say how far apart the rest is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuzip.compress import Rule, Scheme, compress
from neuzip.compress.pieces import PIECE
from neuzip.compress.sources.folder import FolderSource
from neuzip.eval.measures.difference import TensorDifference, comparable_bytes, compare, match

Save = Callable[..., Path]
Tensor = tuple[str, tuple[int, ...], Any]


def bf16(*values: float) -> Tensor:
    """A BF16 tensor of numbers that bf16 has."""
    return "BF16", (len(values),), (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f32(*values: float) -> Tensor:
    return "F32", (len(values),), np.array(values, np.float32)


def f64(*values: float) -> Tensor:
    return "F64", (len(values),), np.array(values, np.float64)


def compared(a: Path, b: Path) -> dict[str, TensorDifference]:
    told: list[int] = []
    with FolderSource(a) as first, FolderSource(b) as second:
        pairs = match(first, second)
        found = compare(first, second, pairs, on_bytes=told.append)
        assert sum(told) == comparable_bytes(pairs)
    assert len({t.label for t in found}) == len(found)
    return {t.label: t for t in found}


@pytest.fixture
def difference(tmp_path: Path, save: Save) -> Callable[[Tensor, Tensor], TensorDifference]:
    """Compare two tensors."""

    def between(a: Tensor, b: Tensor) -> TensorDifference:
        files = [save(tmp_path / f"{name}.safetensors", {"w": t}) for name, t in (("a", a), ("b", b))]
        return compared(*files)["w"]

    return between


@pytest.fixture
def model(tmp_path: Path, save: Save) -> Path:
    """Two shards with floats, integers, nothing, and a subfolder."""
    random = np.random.default_rng(0)
    weights = (random.standard_normal(9000) * 0.05).astype(np.float16).view(np.uint16)
    root = tmp_path / "model"
    save(root / "1.safetensors", {"w": ("F16", (90, 100), weights), "empty": ("F32", (0,), np.zeros(0))})
    save(root / "2.safetensors", {"ids": ("I64", (7,), np.arange(7))})
    save(root / "vae" / "1.safetensors", {"w": f32(1, 2, 3)})
    return root


# Numbers


def test_errors_are_relative_to_a(difference):
    found = difference(bf16(1, -2, 4, 0), bf16(1, -2.5, 5, 0))
    assert (found.status, found.elements, found.differing, found.not_finite) == ("different", 4, 2, 0)
    assert (found.max_absolute, found.max_relative) == (1.0, 0.25)
    assert found.relative_l2 == pytest.approx(math.sqrt((0.25 + 1) / 21))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_fp8_is_compared_as_numbers(dtype, difference):
    one = {"F8_E4M3": 0x38, "F8_E5M2": 0x3C, "F8_E4M3FNUZ": 0x40, "F8_E5M2FNUZ": 0x40}[dtype]
    a, b = np.array([one, one], np.uint8), np.array([one, one + 1], np.uint8)
    found = difference((dtype, (2,), a), (dtype, (2,), b))
    step = 1 / 8 if "E4" in dtype else 1 / 4
    assert (found.differing, found.max_absolute, found.max_relative) == (1, step, step)


def test_zeros_of_different_sign_differ_by_nothing(difference):
    found = difference(f32(0.0, 1), f32(-0.0, 1))
    assert (found.status, found.differing, found.not_finite) == ("different", 1, 0)
    assert (found.max_absolute, found.max_relative, found.relative_l2) == (0, 0, 0)


def test_nan_payloads_count_by_their_bytes(difference):
    nan = np.array([0x7FC00000, 0x7FC00000, 0x3F800000], np.uint32)
    other = np.array([0x7FC00000, 0x7FC00001, 0x3F800000], np.uint32)
    assert difference(("F32", (3,), nan), ("F32", (3,), nan)).status == "identical"
    found = difference(("F32", (3,), nan), ("F32", (3,), other))
    assert (found.status, found.differing, found.not_finite, found.max_absolute) == ("different", 1, 1, 0)


def test_the_nan_of_fnuz_is_no_number(difference):
    found = difference(
        ("F8_E4M3FNUZ", (2,), np.array([0x40, 0x40], np.uint8)),
        ("F8_E4M3FNUZ", (2,), np.array([0x40, 0x80], np.uint8)),
    )
    assert (found.differing, found.not_finite, found.max_absolute, found.relative_l2) == (1, 1, 0, 0)


def test_infinities_are_left_out_of_the_errors(difference):
    found = difference(f64(math.inf, 1, 2), f64(5, 1, 3))
    assert (found.differing, found.not_finite, found.max_absolute) == (2, 1, 1)


def test_differences_beyond_fp64_are_infinite(difference):
    found = difference(f64(1e308, 1), f64(-1e308, 1))
    assert found.max_absolute == math.inf


def test_compared_with_zeros_the_relative_norm_is_infinite(difference):
    found = difference(f32(0, 0), f32(0, 3))
    assert (found.max_absolute, found.max_relative, found.relative_l2) == (3, 0, math.inf)


def test_integers_are_counted(difference):
    a, b = np.arange(5), np.array([0, 1, 2, -3, 256 + 4])
    found = difference(("I64", (5,), a), ("I64", (5,), b))
    assert (found.status, found.differing, found.max_absolute) == ("different", 2, None)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "X7"])
def test_elements_that_are_no_whole_bytes_are_not_counted(dtype, difference):
    a = np.arange(6, dtype=np.uint8)
    shape = {"F4": (12,), "F6_E2M3": (8,), "X7": (6,)}[dtype]
    assert difference((dtype, shape, a), (dtype, shape, a)).status == "identical"
    found = difference((dtype, shape, a), (dtype, shape, a[::-1]))
    assert (found.status, found.differing, found.max_absolute) == ("different", None, None)


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE + 4])
def test_one_weight_of_many_is_found(at, difference):
    a = np.full(2 * PIECE + 5, 0x3F80, np.uint16)
    b = a.copy()
    b[at] = 0x4000
    found = difference(("BF16", a.shape, a), ("BF16", b.shape, b))
    assert (found.differing, found.max_absolute, found.max_relative) == (1, 1, 1)
    assert found.relative_l2 == pytest.approx(1 / math.sqrt(a.size))


def test_other_kinds_have_no_numbers(difference):
    for a, b, status in ((bf16(1), f32(1), "dtype"), (f32(1, 2), f32(1, 2, 3), "shape")):
        found = difference(a, b)
        assert (found.status, found.differing, found.max_absolute) == (status, None, None)
        assert found.a != found.b


# Matching


def test_shards_may_be_cut_elsewhere(model, tmp_path, save):
    with FolderSource(model) as source:
        tensors = {
            t.name: (t.info.dtype, t.info.shape, source.read(t))
            for t in source.tensors()
            if "/" not in t.file
        }
    other = tmp_path / "other"
    save(other / "all.safetensors", dict(reversed(tensors.items())))
    save(other / "vae" / "x.safetensors", {"w": f32(1, 2, 3)})
    found = compared(model, other)
    assert {label: t.status for label, t in found.items()} == dict.fromkeys(
        ("w", "empty", "ids", "vae/w"), "identical"
    )
    assert (found["ids"].a.file, found["ids"].b.file) == ("2.safetensors", "all.safetensors")


def test_missing_tensors_are_told_on_both_sides(model, tmp_path, save):
    other = save(tmp_path / "other.safetensors", {"ids": ("I64", (7,), np.arange(7)), "new": f32(1)})
    found = compared(model, other)
    assert {label: t.status for label, t in found.items()} == {
        "w": "only_a", "empty": "only_a", "ids": "identical", "vae/w": "only_a", "new": "only_b"
    }  # fmt: skip
    assert found["new"].a is None
    assert found["new"].b.file == "other.safetensors"


def test_a_name_twice_in_a_folder_is_matched_by_file(tmp_path, save):
    for folder, values in (("a", (1, 2)), ("b", (1, 3))):
        save(tmp_path / folder / "model.safetensors", {"w": f32(values[0])})
        save(tmp_path / folder / "model.fp16.safetensors", {"w": f32(values[1])})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert {label: t.status for label, t in found.items()} == {
        "model.safetensors/w": "identical", "model.fp16.safetensors/w": "different"
    }  # fmt: skip


# Compressed checkpoints


def test_compressed_is_identical_to_plain(model, tmp_path, in_all_modes):
    compress(model, tmp_path / "small")
    for a, b in ((model, tmp_path / "small"), (tmp_path / "small", model)):
        said = in_all_modes("diff", a, b)
        assert (said["human"].exit_code, said["human"].stdout) == (0, "identical: 4 tensors, 18.1 kB\n")
        data = said["json"].json
        assert (data["identical"], data["totals"]) == (True, {"tensors": 4, "identical": 4})
        assert said["quiet"].stdout == ""


def test_rounded_is_as_far_apart_as_the_manifest_says(model, tmp_path, in_all_modes):
    compress(model, tmp_path / "k3", [Rule("w", Scheme("truncated", 3))])
    said = in_all_modes("diff", model, tmp_path / "k3")
    assert said["human"].exit_code == 1
    assert said["human"].stdout.endswith("\n1 of 4 tensors differ\n")
    assert said["quiet"].stdout == "w\n"
    data = said["json"].json
    assert (data["identical"], data["totals"]) == (False, {"tensors": 4, "identical": 3, "different": 1})
    [found] = [t for t in data["tensors"] if t["status"] == "different"]
    with FolderSource(tmp_path / "k3") as source:
        [loss] = [t.record.loss for t in source.tensors() if t.record.loss is not None]
    assert found["max_relative"] == pytest.approx(loss.max_relative, rel=1e-5)
    assert 0 < found["relative_l2"] < found["max_relative"]


def test_every_kind_of_difference_in_all_modes(tmp_path, save, in_all_modes):
    hostile = "w\x1b[2J\n\u202e\udcff"
    a = save(tmp_path / "a.safetensors", {
        "same": f32(1), hostile: f32(1, math.nan, 3), "kind": f32(1), "form": f32(1, 2), "gone": f32(),
    })  # fmt: skip
    b = save(tmp_path / "b.safetensors", {
        "same": f32(1), hostile: f32(1, 2, 3.75), "kind": bf16(1), "form": f32(1), "new": f32(1),
    })  # fmt: skip
    said = in_all_modes("diff", a, b)
    escaped = "w\\x1b[2J\\n\\u202e\\udcff"
    assert [re.split("  +", line) for line in said["human"].stdout.splitlines() if "─" not in line] == [
        ["tensor", "what", "differ", "max abs", "max rel", "rel L2"],
        [escaped, "values, 1 not finite", "66.67 %", "0.75", "0.25", "0.237"],
        ["kind", "dtype F32 / BF16", *"----"],
        ["form", "shape 2 / 1", *"----"],
        ["gone", "only in A", *"----"],
        ["new", "only in B", *"----"],
        ["5 of 6 tensors differ"],
    ]
    assert said["quiet"].stdout.splitlines() == [escaped, "kind", "form", "gone", "new"]
    data = said["json"].json
    assert data["totals"] == {
        "tensors": 6, "identical": 1, "different": 1, "dtype": 1, "shape": 1, "only_a": 1, "only_b": 1
    }  # fmt: skip
    assert data["compared_bytes"] == 16
    assert data["tensors"][1]["a"] == {"file": "a.safetensors", "name": hostile, "dtype": "F32", "shape": [3]}


def test_what_is_no_checkpoint(model, tmp_path, neuzip):
    said = neuzip("diff", model, tmp_path / "nothing")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("error: ")


def test_the_real_checkpoint(neuzip_data, neuzip):
    said = neuzip("diff", neuzip_data / "wikilm-26m", neuzip_data / "wikilm-26m")
    assert (said.exit_code, said.stdout) == (0, "identical: 57 tensors, 51.6 MB\n")
