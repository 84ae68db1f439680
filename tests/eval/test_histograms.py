"""Entropies against closed forms, and what `neuzip inspect` shows of any checkpoint."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensors import weight_patterns

from neuzip.cli import run
from neuzip.compress import Rule, Scheme, compress
from neuzip.compress.pieces import PIECE
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import NeuzipError, UsageError, WouldOverwrite
from neuzip.eval import figure_files
from neuzip.eval.measures.histograms import Counts, Inspection, bias, entropy, inspect, labels, select
from neuzip.eval.measures.rates import RATES
from neuzip.eval.report import histogram_pictures as pictures
from neuzip.kernels.float_fields import FORMATS, census
from neuzip.kernels.float_fields.values import to_float64

Save = Callable[..., Path]

HOSTILE = '<script>alert("1")</script>\x1b[2J\n\u202e$x$\udcff'
EVERY = np.arange(1 << 16, dtype=np.uint64)


def exponent_entropy(deviation: float) -> float:
    """Of the power of two of a normal variable: the masses between powers are differences of erf."""
    edges = [math.erf(2.0**e / deviation / math.sqrt(2)) for e in range(-60, 10)]
    return -sum((b - a) * math.log2(b - a) for a, b in itertools.pairwise(edges) if b > a)


@pytest.fixture
def checkpoint(tmp_path: Path, save: Save) -> Path:
    """Two shards and a subfolder: all formats, a tied tensor, upcast fp32, integers, a hostile name."""
    root = tmp_path / "model"
    tied = weight_patterns("BF16", 96 * 128)
    random = np.random.default_rng(1)
    save(
        root / "a.safetensors",
        {"embed": ("BF16", (96, 128), tied), "ids": ("I64", (300,), np.arange(300)),
         "upcast": ("F32", (9000,), weight_patterns("BF16", 9000, seed=2).astype(np.uint32) << 16),
         "empty": ("F16", (0, 4), np.zeros(0, np.uint16)),
         "one": ("F64", (), weight_patterns("F64", 1))},
    )  # fmt: skip
    save(
        root / "b.safetensors",
        {"head": ("BF16", (96, 128), tied), HOSTILE: ("BF16", (2, 3), weight_patterns("BF16", 6, seed=3)),
         "scales": ("F8_E8M0", (16,), np.arange(16, dtype=np.uint8)),
         **{f"w.{name}": (name, (4000,), random.integers(0, 256, 4000 * fmt.bits // 8, dtype=np.uint8))
            for name, fmt in FORMATS.items()}},
    )  # fmt: skip
    save(root / "vae" / "a.safetensors", {"embed": ("F32", (5000,), weight_patterns("F32", 5000))})
    return root


def inspected(path: Path, *globs: str) -> Inspection:
    with FolderSource(path) as source:
        return inspect(source, select(source, globs))


# Entropies


def test_entropy_of_plain_histograms():
    assert entropy(np.zeros(8, np.int64)) == 0
    assert str(entropy(np.array([0, 5, 0]))) == "0.0"
    assert entropy(np.full(256, 7)) == 8
    assert entropy(np.array([1, 3])) == pytest.approx(0.25 * 2 + 0.75 * math.log2(4 / 3))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_a_constant_has_no_entropy(fmt):
    counts = Counts.of(np.full(1000, 1 << fmt.mantissa_bits, fmt.dtype), fmt)
    found = counts.entropies
    assert (found.sign, found.exponent, found.mantissa, found.joint or 0.0) == (0, 0, 0, 0)
    assert (counts.used_mantissa_bits, counts.bound_bits) == (0, 1)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_pattern_once_has_all_the_entropy(fmt):
    every = {8: EVERY[:256], 16: EVERY, 32: EVERY * 0x10001, 64: EVERY * 0x1000100010001}[fmt.bits]
    counts = Counts.of(every.astype(fmt.dtype), fmt)
    found = counts.entropies
    assert (found.sign, found.exponent, found.mantissa) == (1, fmt.exponent_bits, fmt.mantissa_bits)
    assert found.joint == (fmt.bits if fmt.bits <= 16 else None)
    assert (counts.used_mantissa_bits, counts.bound_bits) == (fmt.mantissa_bits, fmt.bits)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_normal_weights_have_the_entropy_of_the_closed_form(dtype):
    found = Counts.of(weight_patterns(dtype, 1 << 18), FORMATS[dtype]).entropies
    assert found.sign == pytest.approx(1, abs=1e-4)
    # Rounding to bf16 moves weights over a power of two.
    assert found.exponent == pytest.approx(exponent_entropy(0.02), abs=0.02)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_counts_agree_with_the_coder_and_add_up(fmt, shift):
    random = np.random.default_rng(shift)
    bits = random.integers(0, 1 << min(fmt.bits, 63), 5001, dtype=np.uint64).astype(fmt.dtype)
    bits = bits >> fmt.dtype.type(shift) << fmt.dtype.type(shift)
    whole, coder = Counts.of(bits, fmt), census(bits, fmt)
    assert np.array_equal(whole.exponents, coder.exponents)
    assert whole.used_mantissa_bits == coder.kept_bits(fmt)
    assert int(whole.signs[1]) == int((bits >> fmt.dtype.type(fmt.bits - 1)).sum())
    parts = Counts.none(fmt) + Counts.of(bits[:1000], fmt) + Counts.of(bits[1000:], fmt)
    assert np.array_equal(parts.top, whole.top)
    assert parts.entropies == whole.entropies


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_bias_makes_one_a_power_of_zero(fmt):
    one = np.array([bias(fmt) << fmt.mantissa_bits], fmt.dtype)
    assert to_float64(one, fmt).tolist() == [1.0]


# Checkpoints


def test_a_compressed_checkpoint_has_the_entropies_of_the_plain_one(checkpoint, tmp_path):
    compress(checkpoint, tmp_path / "small")
    plain, small = inspected(checkpoint), inspected(tmp_path / "small")
    assert (plain.compressed, small.compressed) == (False, True)
    for a, b in zip(plain.tensors, small.tensors, strict=True):
        assert (a.name, a.entropies, a.used_mantissa_bits, a.bound_bytes) == (
            b.name, b.entropies, b.used_mantissa_bits, b.bound_bytes
        )  # fmt: skip
        assert b.stored_bytes <= b.nbytes
        assert a.stored_bytes == pytest.approx(b.stored_bytes, rel=0.01)
    assert [c.top.tolist() for c in plain.counts] == [c.top.tolist() for c in small.counts]


def test_schemes_and_bounds(checkpoint):
    found = {t.label: t for t in inspected(checkpoint).tensors}
    assert found["embed"].scheme == "lossless"
    assert found["embed"].bound_bytes < found["embed"].stored_bytes < 1.05 * found["embed"].bound_bytes
    head = found["head"]
    assert (head.scheme, head.stored_bytes, head.bound_bytes) == ("same as embed", 0, 0)
    assert (found["upcast"].used_mantissa_bits, found["upcast"].entropies.joint) == (7, None)
    assert (found["ids"].scheme, found["ids"].entropies, found["ids"].bound_bytes) == ("raw", None, 2400)
    assert (found["empty"].entropies, found["empty"].bound_bytes) == (None, 0)
    assert found["one"].bound_bytes == 7  # a sign and 52 bits
    assert found["scales"].entropies is None
    assert found["vae/embed"].dtype == "F32"


def test_rounded_tensors_show_their_loss(checkpoint, tmp_path):
    compress(checkpoint, tmp_path / "k3", [Rule("embed", Scheme("truncated", 3)), Rule("*", Scheme())])
    found = {t.label: t for t in inspected(tmp_path / "k3").tensors}
    embed = found["embed"]
    assert (embed.scheme, embed.used_mantissa_bits) == ("k=3", 3)
    assert 0 < embed.loss.max_relative <= 1 / 16
    compress(checkpoint, tmp_path / "k3b", [Rule("embed", Scheme("truncated", 3, 64)), Rule("*", Scheme())])
    blocks = inspected(tmp_path / "k3b")
    assert (blocks.tensors[0].bound_bytes, blocks.bound_bytes) == (None, None)


def test_tensors_are_read_once_and_in_pieces(tmp_path, save, monkeypatch):
    size = PIECE + 1001
    path = save(tmp_path / "w.safetensors", {"w": ("F32", (size,), weight_patterns("F32", size))})
    ranges = []
    told = []

    def reader(self, tensor, real=FolderSource.reader):
        read = real(self, tensor)
        return lambda start, stop: ranges.append((start, stop)) or read(start, stop)

    monkeypatch.setattr(
        "neuzip.eval.measures.histograms._predicted_storage",
        lambda s, w: ({("w.safetensors", "w"): (1, "")}, (9, 1)),
    )
    monkeypatch.setattr(FolderSource, "reader", reader)
    with FolderSource(path) as source:
        found = inspect(source, select(source), on_bytes=told.append)
    assert sorted(ranges) == [(0, 4 * PIECE), (4 * PIECE, 4 * size)]
    assert (found.weights, sum(told)) == (size, 4 * size)


def test_globs_match_names_and_places(checkpoint):
    assert {t.label for t in inspected(checkpoint, "embed").tensors} == {"embed", "vae/embed"}
    assert {t.label for t in inspected(checkpoint, "vae/*", "ids").tensors} == {"vae/embed", "ids"}
    with pytest.raises(NeuzipError, match=r"no tensor matches x\* or y"):
        inspected(checkpoint, "x*", "y")


def test_a_name_twice_in_a_folder_is_told_with_its_file(tmp_path, save):
    for file in ("a", "b"):
        save(tmp_path / f"{file}.safetensors", {"w": ("BF16", (8,), weight_patterns("BF16", 8))})
    with FolderSource(tmp_path) as source:
        assert labels(source.tensors()) == ["a.safetensors/w", "b.safetensors/w"]


# The command


def test_three_modes(checkpoint, in_all_modes):
    said = in_all_modes("inspect", checkpoint)
    human, data = said["human"].stdout, said["json"].json
    assert human.splitlines()[0].split() == [
        "tensor", "dtype", "shape", "scheme", "sign", "exp", "mant", "joint", "bound", "predicted", "ratio"
    ]  # fmt: skip
    for part in ("vae/embed", "96x128", "sign: 1.00 of 1 bit", "2^-6", "mantissa: 6.", "inf, NaN", "at most"):
        assert part in human
    assert human.replace("\n", "").isprintable()
    assert max(len(line) for line in human.split("upper bounds.")[1].splitlines()) < 80
    totals, tensors = data["totals"], data["tensors"]
    for key in ("original_bytes", "stored_bytes", "bound_bytes"):
        assert totals[key] == sum(t[key] for t in tensors)
    assert totals["tensors"] == len(tensors) == 17
    assert data["weights"] >= sum(h["weights"] for h in data["histograms"])
    for h in data["histograms"]:
        assert h["weights"] == sum(h["signs"]) == sum(h["exponents"]) == sum(h["mantissas"])
        assert h["weights"] == sum(
            math.prod(t["shape"]) for t in tensors if t["dtype"] == h["dtype"] and t["entropies"]
        )
    assert HOSTILE in [t["name"] for t in tensors]
    assert said["quiet"].stdout == f"{data['stored_weight_bytes']}\n"
    assert not any(one.stderr for one in said.values())


def test_a_narrow_terminal_gets_fewer_columns(checkpoint, neuzip, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    said = neuzip("inspect", checkpoint, "--tensor", "embed")
    assert said.stdout.splitlines()[0].split() == [
        "tensor", "dtype", "shape", "scheme", "exp", "joint", "bound", "predicted", "ratio"
    ]  # fmt: skip
    assert said.stderr == "hint: a wider window shows sign, mant too, and a pipe shows everything\n"


def test_ternary_tensors_have_the_bound_of_their_codes(neuzip, tmp_path, save, monkeypatch):
    codes = np.random.default_rng(0).choice([0, 0x3F80, 0xBF80], (256, 512), p=[0.5, 0.25, 0.25])
    codes += (codes > 0) * (np.arange(256)[:, None] % 4 << 7)  # rows have scales of their own
    tensors = {"layers.0.q_proj.weight": ("BF16", (256, 512), codes.ravel().astype(np.uint16))}
    source = save(tmp_path / "a.safetensors", tensors)
    small = tmp_path / "b.safetensors"
    assert neuzip("compress", source, small, "--ternary", "--ternary-group", "row").exit_code == 0
    said = neuzip("inspect", small)
    (tensor,) = neuzip("inspect", small, "--json").json["tensors"]
    assert tensor["scheme"] == "ternary exact group=512, lossless"
    assert tensor["bound_bytes"] == pytest.approx(1.5 / 16 * tensor["original_bytes"], rel=0.01)
    assert tensor["bound_bytes"] < tensor["stored_bytes"]
    assert "Bound of ternary tensors" in said.stdout
    assert " 0 █" in said.stdout and "subnormal" not in said.stdout
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    said = neuzip("inspect", small)
    assert "ternary, groups of 512" in said.stdout
    assert "joint" in said.stderr and "scheme" not in said.stderr


def test_subnormals_are_not_called_zeros(tmp_path, save):
    words = np.array([0, 1, 0x8000, 0x3F80], np.uint16)
    counts = Counts.of(words, FORMATS["BF16"])
    assert counts.zeros == 2
    assert pictures.exponent_bars(counts, 24)[0].label == "0, subnormal"
    assert pictures.exponent_bars(Counts.of(words[[0, 2, 3]], FORMATS["BF16"]), 24)[0].label == "0"


def test_what_config_json_records_for_us_is_shown(neuzip, checkpoint):
    (checkpoint / "config.json").write_text('{"neuzip": {"attention": {"layers": [8, null]}}}')
    assert "records" not in neuzip("inspect", checkpoint / "a.safetensors").stdout
    assert 'config.json records attention: {"layers": [8, null]}' in neuzip("inspect", checkpoint).stdout
    assert neuzip("inspect", checkpoint, "--json").json["records"] == {"attention": {"layers": [8, None]}}
    (checkpoint / "config.json").write_text('{"neuzip": 3}')
    said = neuzip("inspect", checkpoint)
    assert (said.exit_code, "config.json, field 'neuzip': not an object" in said.stderr) == (1, True)


def test_an_encoding_without_blocks_gets_ascii(checkpoint, monkeypatch):
    page = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(page, encoding="ascii"))
    assert run(["inspect", str(checkpoint / "a.safetensors")]) == 0
    text = page.getvalue().decode("ascii")
    assert "####" in text
    assert "\\u" not in text


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("x.jpg", UsageError, ".jpg is no kind of picture"),
        ("x", UsageError, "a name without a suffix is no kind of picture"),
        ("nowhere/x.png", NeuzipError, "cannot be written: No such file"),
        ("file/x.png", NeuzipError, "cannot be written: Not a directory"),
        ("folder.svg", NeuzipError, "is a folder"),
        ("there.html", WouldOverwrite, "exists already"),
    ],
)
def test_a_bad_target_is_told_before_the_work(target, error, message, tmp_path, neuzip):
    (tmp_path / "file").write_text("")
    (tmp_path / "there.html").write_text("")
    (tmp_path / "folder.svg").mkdir()
    said = neuzip("inspect", tmp_path / "no checkpoint", "--plot", tmp_path / target)
    assert (said.exit_code, said.stdout) == (error.exit_code, "")
    assert message in said.stderr


def test_a_picture_on_a_full_disk_is_told_and_leaves_nothing(checkpoint: Path, tmp_path, neuzip, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    picture = tmp_path / "pictures" / "x.svg"
    picture.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        said = neuzip("inspect", checkpoint / "a.safetensors", "--plot", picture)
    assert (said.exit_code, said.stdout) == (1, "")
    hint = "free some space and repeat the command"
    assert said.stderr.endswith(f"error: {picture}: no space left on the disk\nhint: {hint}\n")
    assert list(picture.parent.iterdir()) == []


# Pictures


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
@pytest.mark.slow
def test_pictures_are_the_same_bytes_every_time(kind, checkpoint, tmp_path, neuzip, monkeypatch):
    from matplotlib import rcParams

    name = tmp_path / f"p.{kind}"
    command = ["inspect", checkpoint, "--tensor", "embed", "--plot", name]
    said = neuzip(*command, "--quiet")
    assert (said.exit_code, said.stdout, said.stderr) == (0, f"{name}\n", "")
    first = name.read_bytes()
    monkeypatch.setitem(rcParams, "axes.facecolor", "red")
    name.write_bytes(b"old")
    assert neuzip(*command, "--overwrite").stderr == f"wrote {name}\n"
    assert name.read_bytes() == first
    assert b"Matplotlib" not in first
    assert b"date" not in first.lower()
    assert list(tmp_path.glob("*partial*")) == []


@pytest.mark.slow
def test_png_has_a_row_for_each_format(checkpoint):
    from PIL import Image

    found = inspected(checkpoint, "embed", "w.F8_E4M3")
    assert [c.fmt.name for c in found.counts] == ["BF16", "F32", "F8_E4M3"]
    with Image.open(io.BytesIO(figure_files.png(pictures.draw(found, HOSTILE + "\u540d")))) as image:
        assert image.size[0] == 11 * figure_files.DPI
        assert image.size[1] == pytest.approx((0.8 + 3 * 3.3) * figure_files.DPI, abs=2)
        assert len(image.getcolors(1 << 24)) > 10


class References(HTMLParser):
    """Collects what a page refers to and which elements it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name.split(":")[-1] in ("src", "href", "srcset", "action", "data", "poster"):
                self.references.append(value)
            assert not name.startswith("on")

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_loads_nothing_and_runs_only_its_own_script(checkpoint, tmp_path, neuzip):
    name = tmp_path / "p.html"
    assert (
        neuzip("inspect", checkpoint, "--tensor", "embed", "--tensor", "<*", "--plot", name, "-q").exit_code
        == 0
    )
    page = name.read_text(encoding="utf-8")
    parsed = References(page)
    assert all(reference.startswith("#") for reference in parsed.references)
    assert not re.search(r"\w+://|url\((?!#)|@import", page)
    assert "default-src 'none'" in page
    assert parsed.tags.count("script") == 1
    assert '<script>alert("1")</script>\\x1b[2J\\n\\u202e$x$\\udcff' in parsed.text
    assert parsed.tags.count("tr") == 1 + 3 + 1 + 1 + len(RATES)  # tensors, and rates below the lossless one
    assert "prefers-color-scheme: dark" in page
    assert "#d55e00" not in page.split("</style>", 1)[1]


def test_a_hostile_title_is_only_text(checkpoint):
    found = inspected(checkpoint, "embed")
    for data in (
        pictures.page(found, "</title><script>x"),
        figure_files.svg(pictures.draw(found, "<script>$x$")),
    ):
        assert b"<script>x" not in data
        assert b"<script>$" not in data


@pytest.mark.slow
def test_pictures_of_extremes(tmp_path, save):
    tensors = {
        "zeros": ("BF16", (100,), np.zeros(100, np.uint16)),
        "nan": ("F16", (10,), np.full(10, 0x7E00, np.uint16)),
        "wide": ("F64", (4000,), np.arange(4000, dtype=np.uint64) << 51),
        "ids": ("I32", (3,), np.arange(3, dtype=np.int32)),
    }
    found = inspected(save(tmp_path / "w.safetensors", tensors))
    assert figure_files.png(pictures.draw(found, "extremes"))
    assert pictures.page(found, "extremes")
    for counts in found.counts:
        for limit in (1, 24):
            bars = pictures.exponent_bars(counts, limit)
            assert sum(bar.count for bar in bars) == counts.numel
            assert sum(bar.power is not None for bar in bars) <= limit
        assert all(line.isascii() for line in pictures.sketch(counts, ascii_only=True))
    only_ids = inspected(tmp_path / "w.safetensors", "ids")
    assert figure_files.png(pictures.draw(only_ids, "nothing to see"))
    assert json.dumps(only_ids.to_json())


def test_the_real_checkpoint(neuzip_data, neuzip):
    data = neuzip("inspect", neuzip_data / "wikilm-26m", "--json").json
    totals = data["totals"]
    assert totals["bound_bytes"] <= totals["stored_bytes"] <= 1.006 * totals["bound_bytes"]
    assert data["histograms"][0]["entropies"]["exponent"] == pytest.approx(2.595, abs=0.001)


def test_a_damaged_container_is_not_described(neuzip: Callable[..., Any], save: Save, tmp_path: Path) -> None:
    bits = np.arange(20_000).astype(np.uint16)
    source = save(tmp_path / "a.safetensors", {"w": ("BF16", (20_000,), bits >> 3)})
    assert neuzip("compress", source, tmp_path / "b.safetensors").exit_code == 0
    data = bytearray((tmp_path / "b.safetensors").read_bytes())
    data[-2000] ^= 1
    (tmp_path / "b.safetensors").write_bytes(data)
    said = neuzip("inspect", tmp_path / "b.safetensors")
    assert (said.exit_code, said.stdout) == (1, "")
    assert "damaged" in said.stderr
