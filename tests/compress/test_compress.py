"""Compress and restore whole checkpoints: nothing lost, nothing half-written, always the same bytes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import independent_decoder as decoder
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuzip.compress import (
    Rule,
    Scheme,
    checkpoint_job,
    compress,
    container_job,
    decompress,
    make_plan,
    verify,
)
from neuzip.compress.run_identity import RUN_ID_PATH
from neuzip.compress.source import TensorSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError, NeuzipError, VerificationError, WouldOverwrite
from neuzip.formats.checkpoint import read_stored_files
from neuzip.formats.config_section import write_entry
from neuzip.formats.container import Container
from neuzip.kernels.float_fields import FORMATS
from neuzip.runtime import load_file

Save = Callable[..., Path]
K3 = [Rule("*", Scheme("truncated", 3))]
LOSSLESS = Rule("*", Scheme("lossless"))


def weights(dtype: str, size: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """Trained-looking patterns of a float dtype."""
    values = np.random.default_rng(seed).standard_normal(size) * 0.05
    if dtype == "F64":
        return values.view(np.uint64)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    single = values.astype(np.float32).view(np.uint32)
    if dtype == "F32":
        return single
    rounded = single + 0x7FFF + (single >> 16 & 1)
    if dtype == "BF16":
        return (rounded >> 16).astype(np.uint16)
    fmt = FORMATS[dtype]  # fp8: sign, four or five exponent bits, three or two mantissa bits
    exponent = np.clip((single >> 23 & 0xFF).astype(int) - 120, 0, (1 << fmt.exponent_bits) - 2)
    mantissa = single >> (23 - fmt.mantissa_bits) & ((1 << fmt.mantissa_bits) - 1)
    return (single >> 31 << 7 | exponent.astype(np.uint32) << fmt.mantissa_bits | mantissa).astype(np.uint8)


@pytest.fixture
def checkpoint(tmp_path: Path, save: Save) -> Path:
    """A folder with two shards, an index, a tied tensor in the other shard, integers, and a subfolder."""
    root = tmp_path / "model"
    tied = weights("BF16", 128 * 96, 1)
    save(
        root / "model-00001-of-00002.safetensors",
        {
            "embed.weight": ("BF16", (128, 96), tied),
            "norm.weight": ("BF16", (96,), weights("BF16", 96)),
            "ids": ("I64", (300,), np.arange(300)),
            "empty": ("F32", (0, 4), np.zeros(0, np.uint32)),
        },
        {"format": "pt"},
        padding=3,
    )
    save(
        root / "model-00002-of-00002.safetensors",
        {
            "half.weight": ("F16", (100, 333), weights("F16", 33300)),
            "head.weight": ("BF16", (128, 96), tied),
            "scalar": ("F32", (), np.array([0x7FC00001], np.uint32)),
            "flags": ("BOOL", (7,), np.array([1, 0, 1, 1, 0, 0, 1], np.uint8)),
        },
    )
    weight_map = {
        name: f"model-0000{i}-of-00002.safetensors"
        for i, names in enumerate(
            (
                ["embed.weight", "norm.weight", "ids", "empty"],
                ["half.weight", "head.weight", "scalar", "flags"],
            ),
            1,
        )
        for name in names
    }
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text('{"model_type":   "llama"}\n')
    (root / "tokenizer.json").write_bytes(b"\x00not json\xff")
    save(root / "vae" / "diffusion.safetensors", {"w": ("F32", (9000,), weights("F32", 9000))})
    (root / "vae" / "config.json").write_text('{"quantization_config": {"quant_method": "other"}}')
    (root / "README.md").write_text("# A model\n")
    return root


def folder_bytes(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def modes(root: Path) -> dict[str, int]:
    return {p.relative_to(root).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in (root, *root.rglob("*"))}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permission_bits_are_kept(checkpoint: Path, tmp_path: Path, umask: int) -> None:
    """No file is more open than that of SRC, nor than the umask leaves new ones; setuid is never kept."""
    wanted = {
        ".": 0o700, "vae": 0o750, "model-00001-of-00002.safetensors": 0o600, "config.json": 0o640,
        "model.safetensors.index.json": 0o600, "tokenizer.json": 0o6755, "README.md": 0o444,
        "model-00002-of-00002.safetensors": 0o666, "vae/config.json": 0o600,
        "vae/diffusion.safetensors": 0o600,
    }  # fmt: skip
    for name, mode in wanted.items():
        (checkpoint / name).chmod(mode)
    before = os.umask(umask)
    try:
        compress(checkpoint, tmp_path / "small")
        decompress(tmp_path / "small", tmp_path / "back")
        (tmp_path / "small" / "config.json").unlink()
        compress(checkpoint, tmp_path / "small")  # what is made again has them, too
        shard = "model-00001-of-00002.safetensors"
        compress(checkpoint / shard, tmp_path / "one.safetensors")
        decompress(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    finally:
        os.umask(before)
    expected = {name: mode & 0o777 & ~umask for name, mode in wanted.items()}
    assert modes(tmp_path / "back") == expected
    small = modes(tmp_path / "small")
    assert {name: small[name] for name in expected} == expected
    assert small["neuzip/original/config.json"] == expected["config.json"]
    assert modes(tmp_path / "one.safetensors") == modes(tmp_path / "two.safetensors") == {".": 0o600}


def test_a_source_that_goes_away_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are open already are read to their end; one that is not can be read no more."""

    compress(checkpoint, tmp_path / "whole")
    shard, other = "model-00002-of-00002.safetensors", "tokenizer.json"
    gone = checkpoint / other
    with pytest.raises(FormatError, match=rf"{gone}: went away while it was read"):
        compress(checkpoint, tmp_path / "small", on_file=lambda *_: gone.unlink(missing_ok=True))
    shutil.copy(tmp_path / "whole" / other, checkpoint)
    published = checkpoint_job.publish
    monkeypatch.setattr(checkpoint_job, "publish", lambda *a: ((checkpoint / shard).unlink(), published(*a)))
    compress(checkpoint, tmp_path / "small")
    assert folder_bytes(tmp_path / "small") == folder_bytes(tmp_path / "whole")


def many(tensors: int) -> dict[str, Any]:
    """Small tensors of two widths, some of them empty."""
    dtypes = ["F32" if i < 7 else "BF16" for i in range(tensors)]
    return {
        f"dataset.sample.{i:07d}.embedding": (dtype, (i % 3,), weights(dtype, i % 3, i))
        for i, dtype in enumerate(dtypes)
    }


def test_a_result_that_is_larger_is_warned_of(save: Save, tmp_path: Path) -> None:
    """Each of so few small tensors has its name and record: about 190 bytes."""
    report = compress(save(tmp_path / "many.safetensors", many(100)), tmp_path / "small.safetensors")
    more = report.stored_weight_bytes - report.weight_bytes
    assert more < 200 * 100
    assert len([w for w in report.warnings if f"{more:,} bytes larger than `source`" in w]) == 1


def test_many_small_tensors_take_8_bytes_more_each(save: Save, tmp_path: Path) -> None:
    """With a coded one, and one that is equal to it, beside them."""
    large = ("BF16", (100, 333), weights("BF16", 33300))
    whole = {"a": large, **many(1500), "b": large}
    path = save(tmp_path / "model" / "many.safetensors", whole, {"format": "pt"}, padding=5)
    alone = save(tmp_path / "alone.safetensors", {"a": large, "b": large}, {"format": "pt"}, padding=5)
    report = compress(tmp_path / "model", tmp_path / "small")
    base = compress(alone, tmp_path / "alone.nz.safetensors")
    more = report.stored_weight_bytes - base.stored_weight_bytes
    assert more - (path.stat().st_size - alone.stat().st_size) < 8 * 1500 + 400
    assert not report.warnings
    assert verify(tmp_path / "small", tmp_path / "model").different == []
    decompress(tmp_path / "small", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "model")
    assert decoder.restore_folder(tmp_path / "small") == folder_bytes(tmp_path / "model")
    names = [t.tensor.name for t in make_plan_of(tmp_path / "model") if t.scheme.kind == "raw"]
    assert len(names) == 1500
    with load_file.safe_open(tmp_path / "small" / "many.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(whole)
        for name in (names[2], names[-1]):
            found = opened.get_tensor(name).view(-1).view(torch.uint8).numpy()
            assert found.size and found.tobytes() == whole[name][2].tobytes()
            part = opened.get_slice(name)[1:]  # of the pool, and no byte of the next tensor
            assert torch.equal(part, opened.get_tensor(name)[1:])
    path = tmp_path / "small" / "many.safetensors"
    with Container(path) as container:
        start = container.file.data_start + container.raw_start(names[2])
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xaa")
    with pytest.raises(FormatError, match=names[2]):
        verify(tmp_path / "small")
    assert f"{path}: missing, damaged" in compress(tmp_path / "model", tmp_path / "small").warnings[0]
    assert compress(tmp_path / "model", tmp_path / "small").resumed_files == 1


def make_plan_of(path: Path) -> Any:
    with TensorSource(path) as source, Workers(1) as workers:
        return make_plan(source, [LOSSLESS], workers).tensors


def test_a_full_cache_of_kernels_is_not_blamed_on_the_result(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuzip.compress.lossless.encode", _answer(errno.ENOSPC))
    with pytest.raises(NeuzipError, match=r"'?embed\.weight'?: cannot be coded") as told:
        compress(checkpoint, tmp_path / "small")
    assert "small" not in told.value.message
    assert "TRITON_CACHE_DIR" in told.value.hint


def test_a_folder_comes_back_byte_by_byte(checkpoint: Path, tmp_path: Path) -> None:
    report = compress(checkpoint, tmp_path / "small")
    restored = decompress(tmp_path / "small", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(checkpoint)
    assert restored.lossless
    assert report.stored_weight_bytes < report.weight_bytes
    assert report.stored_bytes == sum(map(len, folder_bytes(tmp_path / "small").values()))


@pytest.mark.parametrize("verify", [True, False])
def test_progress_counts_coding_and_verification_once_each(
    verify: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are told of in the end, aliases too, and half of them are left when a file is read back."""
    total = weight_bytes(checkpoint)
    told, before_checks = [0], []
    check = container_job.check_tensors

    def checked(*arguments: Any, **named: Any) -> Any:
        before_checks.append(sum(told))
        return check(*arguments, **named)

    monkeypatch.setattr(container_job, "check_tensors", checked)
    compress(checkpoint, tmp_path / "nz", verify=verify, on_bytes=told.append)
    assert sum(told) == total
    if verify:
        assert before_checks[-1] < total, "verification is a part of the work"
    again = [0]
    compress(checkpoint, tmp_path / "nz", verify=verify, on_bytes=again.append)
    assert sum(again) == total, "that of a run which finds everything done, too"
    for path in (tmp_path / "nz").glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    mended = [0]
    assert "made again" in str(
        compress(checkpoint, tmp_path / "nz", verify=verify, on_bytes=mended.append).warnings
    )
    assert sum(mended) == total, "and that of a run which makes damaged files again"


def test_progress_of_restoring_counts_what_is_there_already(checkpoint: Path, tmp_path: Path) -> None:
    compress(checkpoint, tmp_path / "nz")
    for _ in range(2):
        told = [0]
        report = decompress(tmp_path / "nz", tmp_path / "restored", on_bytes=told.append)
        assert sum(told) == weight_bytes(checkpoint)
    assert report.was_there


def test_what_other_tools_see(checkpoint: Path, tmp_path: Path) -> None:
    """Containers open with the safetensors library, the index names its tensors, the config says how."""
    safetensors = pytest.importorskip("safetensors")
    small = tmp_path / "small"
    compress(checkpoint, small)
    index = json.loads((small / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in sorted(set(index.values())):
        with safetensors.safe_open(small / shard, "np") as file:
            names = set(file.keys())
            assert file.metadata()["format"] == "neuzip"
        assert {name for name, where in index.items() if where == shard} == {
            name for name in names if not name.startswith("neuzip:")
        }
    assert json.loads((small / "config.json").read_text())["quantization_config"] == {
        "quant_method": "neuzip", "version": 1, "lossless": True,
    }  # fmt: skip
    inner = json.loads((small / "vae" / "config.json").read_text())["quantization_config"]
    assert inner["original"] == {"quant_method": "other"}


def test_a_tied_tensor_is_rounded_as_the_one_it_is_tied_to(tmp_path: Path, save: Save) -> None:
    """Both are counted: `compress` says how many tensors are rounded, and the copy is one of them."""
    random = np.random.default_rng(0)
    a, c = ((random.normal(0, 0.02, 4096).astype("<f4").view("<u4") >> 16).astype("<u2") for _ in range(2))
    tensors = {"a": ("BF16", (64, 64), a), "b": ("BF16", (64, 64), a), "c": ("BF16", (64, 64), c)}
    tensors["norm"] = ("BF16", (64,), c[:64])
    source = save(tmp_path / "a.safetensors", tensors)
    rules = (Rule("*", Scheme("truncated", 2), min_dimensions=2),)
    report = compress(source, tmp_path / "b.safetensors", rules)
    losses = {t.name: t.loss for t in report.tensors}
    assert sum(t.scheme.startswith("same as") for t in report.tensors) == 1
    assert losses["a"] is not None and losses["a"] == losses["b"]
    assert losses["c"] is not None and losses["norm"] is None


def test_a_tied_tensor_is_stored_once(checkpoint: Path, tmp_path: Path) -> None:
    compress(checkpoint, tmp_path / "small")
    with Container(tmp_path / "small" / "model-00002-of-00002.safetensors") as container:
        record = container.manifest.tensors["head.weight"]
        assert (record.scheme, record.alias_of) == ("alias", "embed.weight")
        assert record.alias_file == "model-00001-of-00002.safetensors"
        assert container.stored_bytes("head.weight") == 0


def test_many_tensors_that_look_alike_are_told_apart_in_time(tmp_path: Path, save: Save) -> None:
    """All have the same samples. Comparing each with each would take minutes."""
    tensors = {}
    for i in range(3000):
        data = np.zeros(4096, np.uint8)
        data[100:104] = np.frombuffer((i // 2).to_bytes(4, "little"), np.uint8)
        tensors[f"t{i}"] = ("U8", (4096,), data)
    source = save(tmp_path / "a.safetensors", tensors)
    report = compress(source, tmp_path / "b.safetensors")
    assert sum(t.scheme.startswith("same as") for t in report.tensors) == 1500
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()


def test_what_the_disk_cannot_take_is_refused_at_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(checkpoint, tmp_path / "small")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(NeuzipError, match="the disk has 1,000 left"):
        decompress(tmp_path / "small", tmp_path / "back")
    assert not _partial(tmp_path / "back").exists()


def test_what_is_restored_already_takes_no_more_space(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what a killed run has left in its workspace, nor a whole result."""
    compress(checkpoint, tmp_path / "small")
    decompress(tmp_path / "small", tmp_path / "back")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=30_000))
    assert decompress(tmp_path / "small", tmp_path / "back").was_there
    (tmp_path / "back").rename(_partial(tmp_path / "back"))
    (_partial(tmp_path / "back") / "model-00001-of-00002.safetensors").unlink()
    decompress(tmp_path / "small", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(checkpoint)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_dtype_shrinks_and_returns(dtype: str, tmp_path: Path, save: Save) -> None:
    data = weights(dtype, 200_003)
    source = save(tmp_path / "a.safetensors", {"w": (dtype, (200_003,), data)})
    report = compress(source, tmp_path / "b.safetensors")
    assert report.tensors[0].scheme == "lossless"
    assert report.ratio < 0.97
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_every_pattern_of_a_dtype_returns(dtype: str, tmp_path: Path, save: Save) -> None:
    """NaN payloads, both zeros, infinities and denormals among them."""
    fmt = FORMATS[dtype]
    data = np.concatenate([np.arange(1 << fmt.bits).astype(fmt.dtype), weights(dtype, 1 << 20)])
    source = save(tmp_path / "a.safetensors", {"w": (dtype, (data.size,), data)})
    assert compress(source, tmp_path / "b.safetensors").tensors[0].scheme == "lossless"
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()


def test_upcast_weights_take_their_true_size(tmp_path: Path, save: Save) -> None:
    """fp32 that was bf16 or fp16 once: a third of its size, byte-exact."""
    from_bf16 = weights("BF16", 300_000).astype(np.uint32) << 16
    from_fp16 = weights("F16", 300_000).view(np.float16).astype(np.float32).view(np.uint32)
    for data, kept, limit in ((from_bf16, 7, 0.345), (from_fp16, 10, 0.44)):
        source = save(tmp_path / "a.safetensors", {"w": ("F32", (300_000,), data)})
        report = compress(source, tmp_path / "b.safetensors", overwrite=True)
        assert report.tensors[0].scheme == f"lossless, {kept} of 23 mantissa bits"
        assert report.ratio < limit
        decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors", overwrite=True)
        assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()


def test_a_million_weights_cost_at_most_0_6_percent_over_the_entropy(tmp_path: Path, save: Save) -> None:
    data = weights("BF16", 1 << 20)
    compress(
        save(tmp_path / "a.safetensors", {"w": ("BF16", (1024, 1024), data)}), tmp_path / "b.safetensors"
    )
    counts = np.bincount(data >> 7 & 0xFF)
    p = counts[counts > 0] / data.size
    bound = (8 - float((p * np.log2(p)).sum())) / 8 * data.size
    assert (tmp_path / "b.safetensors").stat().st_size <= 1.006 * bound


def test_incompressible_tensors_grow_by_a_small_constant(tmp_path: Path, save: Save) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "noise16": ("BF16", (50_000,), rng.integers(0, 1 << 16, 50_000).astype(np.uint16)),
        "noise64": ("F64", (9_000,), rng.integers(0, 1 << 63, 9_000).astype(np.uint64)),
        "bytes": ("U8", (1001,), rng.integers(0, 256, 1001).astype(np.uint8)),
        "one": ("F32", (1,), np.array([1], np.uint32)),
    }
    source = save(tmp_path / "a.safetensors", tensors)
    report = compress(source, tmp_path / "b.safetensors")
    assert {t.scheme for t in report.tensors} == {"raw"}
    assert report.stored_bytes <= report.original_bytes + 700 * len(tensors) + 700
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()


def test_large_tensors_are_split_among_the_workers_with_the_same_bytes(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "a.safetensors", {"w": ("BF16", (1_300_001,), weights("BF16", 1_300_001))})
    compress(source, tmp_path / "whole.safetensors", jobs=1)
    for module in ("encode_tensor", "encode_ahead"):
        monkeypatch.setattr(f"neuzip.compress.{module}.SMALL", 1000)
    compress(source, tmp_path / "split.safetensors", jobs=3)
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "split.safetensors").read_bytes()


def test_the_same_input_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    for rules in ([Rule("*", Scheme())], [Rule("*", Scheme("truncated", 2, 64))]):
        for jobs, name in ((1, "a"), (2, "b")):
            compress(checkpoint, tmp_path / name, rules, jobs=jobs, overwrite=True)
        assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")


@pytest.mark.parametrize("block", [None, 32, 512])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E5M2"])
def test_truncated_tensors_state_their_loss(
    dtype: str, block: int | None, tmp_path: Path, save: Save
) -> None:
    data = weights(dtype, 70_001)
    source = save(tmp_path / "a.safetensors", {"w": (dtype, (70_001,), data)})
    kept = 1
    report = compress(source, tmp_path / "b.safetensors", [Rule("*", Scheme("truncated", kept, block))])
    assert report.tensors[0].scheme.startswith("k=1")
    checked = verify(tmp_path / "b.safetensors", source)
    loss = report.tensors[0].loss
    assert loss is not None
    assert loss.max_relative == pytest.approx(checked.tensors[0].max_relative, rel=1e-5)
    assert 0 < loss.rms_relative < loss.max_relative
    if block is None and dtype in ("BF16", "F32", "F64"):  # the others have denormals among these weights
        assert loss.max_relative <= 2.0 ** -(kept + 1)
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert verify(tmp_path / "b.safetensors", tmp_path / "c.safetensors").different == []


def test_a_block_normaliser_keeps_every_blocks_largest_weight(tmp_path: Path, save: Save) -> None:
    """The published reference divides by one number and multiplies by another: this would show it."""
    data = weights("BF16", 64 * 700)
    source = save(tmp_path / "a.safetensors", {"w": ("BF16", (data.size,), data)})
    compress(source, tmp_path / "b.safetensors", [Rule("*", Scheme("truncated", 0, 64))])
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    restored = np.frombuffer((tmp_path / "c.safetensors").read_bytes()[-data.nbytes :], np.uint16)
    blocks, rows = (data & 0x7FFF).reshape(-1, 64), np.arange(700)
    largest = blocks.argmax(1)
    assert (restored.reshape(-1, 64)[rows, largest] == data.reshape(-1, 64)[rows, largest]).all()


def test_rounding_never_makes_an_infinity(tmp_path: Path, save: Save) -> None:
    for dtype in ("BF16", "F16", "F32", "F64"):
        fmt = FORMATS[dtype]
        top = ((1 << fmt.exponent_bits) - 1 << fmt.mantissa_bits) - 1
        data = np.concatenate([weights(dtype, 5000), np.full(5000, top, np.uint64).astype(fmt.dtype)])
        data[5000:] -= np.arange(5000).astype(fmt.dtype) % (1 << min(fmt.mantissa_bits, 12))
        source = save(tmp_path / "a.safetensors", {"w": (dtype, (10_000,), data)})
        for scheme in (Scheme("truncated", 0), Scheme("truncated", 1, 8), Scheme("truncated", 3, 16)):
            compress(source, tmp_path / "b.safetensors", [Rule("*", scheme)], overwrite=True)
            decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors", overwrite=True)
            restored = np.frombuffer((tmp_path / "c.safetensors").read_bytes()[-data.nbytes :], fmt.dtype)
            assert (restored >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1).max() < (
                1 << fmt.exponent_bits
            ) - 1


def test_a_tensor_with_a_nan_is_kept_lossless_and_said_to_be(tmp_path: Path, save: Save) -> None:
    data = weights("BF16", 30_000)
    data[77] = 0x7FA1
    source = save(tmp_path / "a.safetensors", {"w": ("BF16", (30_000,), data)})
    report = compress(source, tmp_path / "b.safetensors", K3)
    assert report.tensors[0].scheme == "lossless"
    assert "NaN" in report.tensors[0].note
    assert verify(tmp_path / "b.safetensors", source).different == []


@pytest.mark.parametrize("scheme", [Scheme(), Scheme("truncated", 3), Scheme("truncated", 1, 128)], ids=str)
def test_any_range_decodes_alone(scheme: Scheme, tmp_path: Path, save: Save) -> None:
    """Row ranges for sharded loading, at any boundary."""
    data = weights("BF16", 50_000)
    source = save(tmp_path / "a.safetensors", {"w": ("BF16", (50_000,), data)})
    compress(source, tmp_path / "b.safetensors", [Rule("*", scheme)])
    with TensorSource(tmp_path / "b.safetensors") as opened:
        (tensor,) = opened.tensors()
        whole, read = opened.read(tensor), opened.reader(tensor)
        for start, stop in ((0, 0), (0, 1), (1, 3), (16383, 16385), (20_001, 49_999), (49_999, 50_000)):
            assert (read(2 * start, 2 * stop) == whole[2 * start : 2 * stop]).all()


@given(
    st.sampled_from(list(FORMATS)),
    st.integers(0, 3000),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["random", "normal", "few", "sorted"]),
)
@settings(max_examples=60)
def test_any_tensor_round_trips(
    tmp_path_factory: pytest.TempPathFactory, save: Save, dtype: str, size: int, seed: int, kind: str
) -> None:
    folder, fmt = tmp_path_factory.mktemp("any"), FORMATS[dtype]
    rng = np.random.default_rng(seed)
    data = weights(dtype, size, seed)
    if kind == "random":
        data = rng.integers(0, 1 << min(fmt.bits, 63), size, np.uint64).astype(fmt.dtype)
    elif kind == "few":
        data = rng.choice(rng.integers(0, 1 << min(fmt.bits, 63), 3, np.uint64), size).astype(fmt.dtype)
    elif kind == "sorted":
        data = np.sort(data)
    source = save(folder / "a.safetensors", {"w": (dtype, (size,), data)})
    compress(source, folder / "b.safetensors")
    decompress(folder / "b.safetensors", folder / "c.safetensors")
    assert (folder / "c.safetensors").read_bytes() == source.read_bytes()
    assert (folder / "b.safetensors").stat().st_size <= source.stat().st_size + 1500
    shutil.rmtree(folder)


def test_rules_decide_in_order(checkpoint: Path, tmp_path: Path) -> None:
    rules = [Rule("norm.*", Scheme("raw")), Rule("*embed*", Scheme()), Rule("*", Scheme("truncated", 1))]
    report = compress(checkpoint, tmp_path / "small", rules)
    schemes = {t.name: t.scheme for t in report.tensors}
    assert schemes["norm.weight"] == "raw"
    assert schemes["embed.weight"] == "lossless"
    assert schemes["half.weight"] == "k=1"
    assert schemes["head.weight"] == "k=1", "equal bytes under another scheme are no alias"
    assert schemes["ids"] == "raw"


def test_a_rule_that_matches_nothing_is_a_mistake(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(NeuzipError, match="nosuch"):
        compress(checkpoint, tmp_path / "small", [Rule("*nosuch*", Scheme("raw")), Rule("*", Scheme())])
    report = compress(checkpoint, tmp_path / "small", [Rule("norm.*", Scheme("raw"))])
    assert {t.name: t.scheme for t in report.tensors}["half.weight"] == "lossless", "what no rule matches"


@pytest.mark.parametrize("scheme", [Scheme(), Scheme("truncated", 3, 512), Scheme("truncated", 0)], ids=str)
def test_a_plan_predicts_the_size_within_one_percent(scheme: Scheme, tmp_path: Path, save: Save) -> None:
    root = tmp_path / "model"
    spread = np.exp(np.random.default_rng(3).standard_normal(900_000)) * 0.01
    uneven = (spread.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    save(
        root / "model.safetensors",
        {
            "a": ("BF16", (900, 1000), uneven),
            "b": ("F16", (400_000,), weights("F16", 400_000)),
            "c": ("F32", (300_000,), weights("F32", 300_000)),
            "small": ("BF16", (512,), weights("BF16", 512)),
        },
    )
    rules = [Rule("*", scheme)]
    with TensorSource(root) as source, Workers(2) as workers:
        plan = make_plan(source, rules, workers, predict=True)
    report = compress(root, tmp_path / "small", rules)
    assert plan.predicted_bytes == pytest.approx(report.stored_bytes, rel=0.01)
    assert plan.original_bytes == report.original_bytes


class TestRefusals:
    """Nothing is lost, nothing is overwritten, and the reason is named."""

    def test_an_existing_destination(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "config.json").write_text("mine")
        (tmp_path / "small" / "older.safetensors").write_text("mine")
        before = folder_bytes(tmp_path / "small")
        with pytest.raises(WouldOverwrite, match="exists already"):
            compress(checkpoint, tmp_path / "small")
        assert folder_bytes(tmp_path / "small") == before
        compress(checkpoint, tmp_path / "small", overwrite=True)
        assert "older.safetensors" not in folder_bytes(tmp_path / "small")

    def test_it_is_refused_before_tensors_are_read(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which of them are equal may take minutes to find out; a finished result is still known."""
        compress(checkpoint, tmp_path / "small")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "file.safetensors").write_text("mine")
        file = sorted(checkpoint.glob("*.safetensors"))[0]

        def no_plan(*_: object, **__: object) -> None:
            pytest.fail("a plan is made")

        with monkeypatch.context() as patch:
            patch.setattr("neuzip.compress.checkpoint_job.make_plan", no_plan)
            for src, dst, rules in (
                (checkpoint, "mine", [LOSSLESS]),
                (checkpoint, "small", K3),
                (file, "mine/file.safetensors", [LOSSLESS]),
            ):
                with pytest.raises(WouldOverwrite, match=f"{Path(dst).name}: exists already"):
                    compress(src, tmp_path / dst, rules)
        assert compress(checkpoint, tmp_path / "small").resumed_files > 0

    @pytest.mark.parametrize("where", [".", "inside", ".."])
    def test_a_destination_that_would_swallow_the_source(self, checkpoint: Path, where: str) -> None:
        before = folder_bytes(checkpoint)
        with pytest.raises(NeuzipError, match=r"within|is the same place as|holds"):
            compress(checkpoint, checkpoint / where, overwrite=True)
        assert folder_bytes(checkpoint) == before

    def test_compressing_twice(self, checkpoint: Path, tmp_path: Path) -> None:
        compress(checkpoint, tmp_path / "small")
        with pytest.raises(NeuzipError, match="compressed already"):
            compress(tmp_path / "small", tmp_path / "smaller")
        with pytest.raises(NeuzipError, match="not compressed"):
            decompress(checkpoint, tmp_path / "back")

    def test_a_pickle(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        for path in (tmp_path, tmp_path / "pytorch_model.bin"):
            with pytest.raises(FormatError, match=r"pytorch_model\.bin.*pickle"):
                compress(path, tmp_path / "small")

    def test_an_index_that_leaves_the_folder(self, checkpoint: Path, tmp_path: Path) -> None:
        index = checkpoint / "model.safetensors.index.json"
        for shard in ("../secret.safetensors", "/etc/passwd", "missing.safetensors"):
            index.write_text(json.dumps({"weight_map": {"w": shard}}))
            with pytest.raises(FormatError, match="weight_map"):
                compress(checkpoint, tmp_path / "small")

    def test_a_loop_of_links(self, checkpoint: Path, tmp_path: Path) -> None:
        (checkpoint / "loop").symlink_to(checkpoint, target_is_directory=True)
        with pytest.raises(FormatError, match="symbolic link"):
            compress(checkpoint, tmp_path / "small")

    def test_a_link_to_nowhere(self, checkpoint: Path, tmp_path: Path) -> None:
        (checkpoint / "gone.json").symlink_to(checkpoint / "nowhere")
        with pytest.raises(FormatError, match=r"gone\.json"):
            compress(checkpoint, tmp_path / "small")

    def test_the_original_is_another_one(self, checkpoint: Path, tmp_path: Path) -> None:
        compress(checkpoint, tmp_path / "small")
        shard = checkpoint / "vae" / "diffusion.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x11")
        with pytest.raises(VerificationError, match="tensor 'w'"):
            verify(tmp_path / "small", checkpoint)

    def test_a_damaged_file_is_named(self, checkpoint: Path, tmp_path: Path) -> None:
        small = tmp_path / "small"
        compress(checkpoint, small)
        tokenizer = small / "tokenizer.json"
        tokenizer.write_bytes(tokenizer.read_bytes() + b"x")
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            verify(small)
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            decompress(small, tmp_path / "back")
        assert not (tmp_path / "back").exists()

    def test_a_missing_shard_of_an_alias(self, checkpoint: Path, tmp_path: Path) -> None:
        compress(checkpoint, tmp_path / "small")
        alone = tmp_path / "model-00002-of-00002.safetensors"
        shutil.copy(tmp_path / "small" / alone.name, alone)
        with pytest.raises(FormatError, match="not here"):
            verify(alone)


class TestResume:
    """A killed run goes on where it stopped, and ends with the bytes of an uninterrupted one."""

    def test_kill_at_any_moment(self, tmp_path: Path, save: Save) -> None:
        root = tmp_path / "model"
        for shard in range(6):
            save(
                root / f"s{shard}.safetensors",
                {f"w{shard}": ("BF16", (400_000,), weights("BF16", 400_000, shard))},
            )
        (root / "config.json").write_text("{}")
        compress(root, tmp_path / "reference")
        expected = folder_bytes(tmp_path / "reference")
        script = (
            "import sys; from neuzip.compress import compress;"
            "compress(sys.argv[1], sys.argv[2], jobs=2); print('finished')"
        )
        command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", script, str(root)]
        killed = 0
        for attempt in range(8):
            target = tmp_path / f"killed-{attempt}"
            run = subprocess.Popen([*command, str(target)], cwd=tmp_path)
            # A run takes one to two seconds, most of it start-up: wait for its first trace, and a bit more.
            deadline = time.monotonic() + 30
            while not _partial(target).exists() and run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.04 * attempt)
            run.kill()
            killed += run.wait() < 0
            assert not target.exists() or folder_bytes(target) == expected
            compress(root, target)
            assert folder_bytes(target) == expected
            assert not _partial(target).exists()
        assert killed >= 3, "the test must kill some runs half-way"

    def test_finished_shards_are_not_done_again(self, checkpoint: Path, tmp_path: Path) -> None:
        target = tmp_path / "small"
        self._interrupt_after(1, checkpoint, target)
        report = compress(checkpoint, target)
        assert report.resumed_files == 1
        compress(checkpoint, tmp_path / "other")
        assert folder_bytes(target) == folder_bytes(tmp_path / "other")

    def test_a_finished_run_is_recognised(self, checkpoint: Path, tmp_path: Path) -> None:
        compress(checkpoint, tmp_path / "small")
        before = (tmp_path / "small" / "vae" / "diffusion.safetensors").stat()
        assert compress(checkpoint, tmp_path / "small").resumed_files == 3
        assert (tmp_path / "small" / "vae" / "diffusion.safetensors").stat().st_ino == before.st_ino

    def test_changed_options_are_refused(self, checkpoint: Path, tmp_path: Path) -> None:
        self._interrupt_after(1, checkpoint, tmp_path / "small")
        with pytest.raises(NeuzipError, match="other options"):
            compress(checkpoint, tmp_path / "small", K3)
        compress(checkpoint, tmp_path / "small", K3, overwrite=True)
        assert verify(tmp_path / "small", checkpoint).different

    def test_a_changed_source_is_refused(self, checkpoint: Path, tmp_path: Path) -> None:
        self._interrupt_after(1, checkpoint, tmp_path / "small")
        shard = checkpoint / "model-00001-of-00002.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        with pytest.raises(NeuzipError, match="made from another"):
            compress(checkpoint, tmp_path / "small")

    def test_a_changed_source_is_no_finished_run(self, checkpoint: Path, tmp_path: Path) -> None:
        """The same sizes, other bytes: in the weights, or in any other file."""
        target = tmp_path / "small"
        compress(checkpoint, target)
        for file in (checkpoint / "tokenizer.json", checkpoint / "vae" / "diffusion.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            with pytest.raises(WouldOverwrite):
                compress(checkpoint, target)
            compress(checkpoint, target, overwrite=True)
            decompress(target, tmp_path / "back", overwrite=True)
            assert folder_bytes(tmp_path / "back") == folder_bytes(checkpoint)

    def test_a_damaged_shard_is_not_believed(self, checkpoint: Path, tmp_path: Path) -> None:
        target = tmp_path / "small"
        self._interrupt_after(1, checkpoint, target)
        shard = _partial(target) / "model-00001-of-00002.safetensors"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        assert compress(checkpoint, target).resumed_files == 0
        assert verify(target, checkpoint).different == []

    @pytest.mark.parametrize("damage", ["delete", "append", "replace"])
    def test_a_damaged_result_is_not_believed(self, damage: str, checkpoint: Path, tmp_path: Path) -> None:
        """Each file of a result is damaged once: the same command makes it again, and says so.

        What may have been edited instead is left, and named.
        """
        target = tmp_path / "small"
        compress(checkpoint, target)
        (target / "of the user").write_bytes(b"stays")
        before = folder_bytes(target)
        stored = {name: file.kind for name, file in read_stored_files(target).items()}
        for name in sorted(before.keys() - {RUN_ID_PATH, "of the user"}):
            path = target / name
            if damage == "delete":
                path.unlink()
            else:
                path.write_bytes(before[name] + b" " if damage == "append" else b"{}")
            if damage != "delete" and stored.get(name) == "carried":
                with pytest.raises(WouldOverwrite, match=f"{re.escape(str(path))}: is not that of `source`"):
                    compress(checkpoint, target)
                path.unlink()
            report = compress(checkpoint, target)
            assert folder_bytes(target) == before, name
            assert report.resumed_files == 3 - name.endswith(".safetensors")
            assert f"{path}: missing, damaged or of an older version: made again" in report.warnings
            assert not _partial(target).exists()
        assert compress(checkpoint, target).resumed_files == 3
        (target / RUN_ID_PATH).write_bytes(b"{}")  # then nothing says what the folder is
        with pytest.raises(WouldOverwrite):
            compress(checkpoint, target)

    @pytest.mark.parametrize("file", ["config.json", "vae/config.json", "model.safetensors.index.json"])
    def test_what_was_rewritten_is_verified(self, file: str, checkpoint: Path, tmp_path: Path) -> None:
        compress(checkpoint, tmp_path / "small")
        path = tmp_path / "small" / file
        right = json.loads(path.read_bytes())
        path.write_text(json.dumps(dict(reversed(right.items())) | {"neuzip": {"attention": 8}}))
        verify(tmp_path / "small")  # how it runs may be changed
        wrong: list[dict[str, Any] | None] = [
            right | {key: {"other": 1} if value == {} else {}} for key, value in right.items()
        ]
        for document in [*wrong, *([] if "index" in file else [{}, None])]:
            path.unlink()
            if document is not None:
                path.write_text(json.dumps(document))
            with pytest.raises(FormatError, match=re.escape(str(path))):
                verify(tmp_path / "small")
            decompress(tmp_path / "small", tmp_path / "back", overwrite=True)  # nothing is lost

    def test_how_a_model_is_to_run_is_no_damage(self, checkpoint: Path, tmp_path: Path) -> None:
        """`compress` with calibrated attention, and people, write to the object `neuzip` of config.json."""
        compress(checkpoint, tmp_path / "small")
        write_entry(tmp_path / "small" / "config.json", "attention", {"bits": [8]})
        before = folder_bytes(tmp_path / "small")
        assert not compress(checkpoint, tmp_path / "small").warnings
        assert folder_bytes(tmp_path / "small") == before

    def test_what_people_wrote_into_a_config_outlives_a_mend(self, checkpoint: Path, tmp_path: Path) -> None:
        """A folder of an older version gets the sentence for transformers, and keeps all else."""
        target = tmp_path / "small"
        compress(checkpoint, target)
        path = target / "config.json"
        right = json.loads(path.read_bytes())
        assert right.pop("transformers_weights")
        more = {"_name_or_path": "mine", "neuzip": {"attention": {"layers": [8]}}}
        path.write_text(json.dumps(right | more, indent=2) + "\n")
        (target / "vae" / "diffusion.safetensors").write_bytes(b"damaged")
        compress(checkpoint, target)
        mended = json.loads(path.read_bytes())
        assert mended.pop("transformers_weights").startswith("compressed by neuzip")
        assert mended == right | more
        assert not compress(checkpoint, target).warnings
        assert verify(target, checkpoint).different == []

    def test_an_edited_config_is_left_and_named(self, checkpoint: Path, tmp_path: Path) -> None:
        target = tmp_path / "small"
        compress(checkpoint, target)
        path = target / "config.json"
        right = json.loads(path.read_bytes())
        key = next(iter(json.loads((checkpoint / "config.json").read_bytes())))
        path.write_text(json.dumps(right | {key: "edited"}))
        (target / "vae" / "diffusion.safetensors").write_bytes(b"damaged")
        before = folder_bytes(target)
        with pytest.raises(WouldOverwrite, match=r"config\.json: is not that of `source`"):
            compress(checkpoint, target)
        assert folder_bytes(target) == before

    def test_a_flipped_bit_of_weights_is_mended(self, checkpoint: Path, tmp_path: Path) -> None:
        target = tmp_path / "small"
        compress(checkpoint, target)
        before = folder_bytes(target)
        shard = target / "vae" / "diffusion.safetensors"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        assert compress(checkpoint, target).resumed_files == 2
        assert folder_bytes(target) == before

    def test_what_is_no_damage_is_not_replaced(self, checkpoint: Path, tmp_path: Path) -> None:
        """A whole safetensors file in place of a container is somebody's."""
        target = tmp_path / "small"
        compress(checkpoint, target)
        shutil.copy(checkpoint / "vae" / "diffusion.safetensors", target / "vae")
        before = folder_bytes(target)
        with pytest.raises(WouldOverwrite):
            compress(checkpoint, target)
        assert folder_bytes(target) == before

    def test_a_changed_source_can_be_begun_anew(self, checkpoint: Path, tmp_path: Path) -> None:
        self._interrupt_after(1, checkpoint, tmp_path / "small")
        shard = checkpoint / "model-00001-of-00002.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        compress(checkpoint, tmp_path / "small", overwrite=True)
        assert verify(tmp_path / "small", checkpoint).different == []

    def test_two_runs_at_once(self, checkpoint: Path, tmp_path: Path) -> None:
        from neuzip.compress.workspace import workspace

        with workspace(tmp_path / "small"), pytest.raises(NeuzipError, match="another run"):
            compress(checkpoint, tmp_path / "small")

    def test_an_overwrite_killed_between_its_two_renames(self, checkpoint: Path, tmp_path: Path) -> None:
        target = tmp_path / "small"
        compress(checkpoint, target, K3)
        target.rename(tmp_path / "small.neuzip-old")
        with pytest.raises(WouldOverwrite):
            compress(checkpoint, target)
        assert verify(target, checkpoint).different, "the older folder has its name again"

    @staticmethod
    def _interrupt_after(shards: int, src: Path, dst: Path) -> None:
        done, original = 0, container_job.ContainerJob.make

        def make(self: Any, *arguments: Any) -> None:
            nonlocal done
            if done == shards:
                raise KeyboardInterrupt
            done += 1
            original(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(container_job.ContainerJob, "make", make)
            with pytest.raises(KeyboardInterrupt):
                compress(src, dst)
        assert not dst.exists()


class TestSingleFiles:
    """They are made in a folder of their own, too: one run at a time, and a finished one is recognised."""

    @pytest.fixture
    def original(self, tmp_path: Path, save: Save) -> Path:
        """A file with large, small and tied tensors, and some that stay raw."""
        tied = weights("BF16", 30_000, 1)
        return save(
            tmp_path / "original.safetensors",
            {
                "a": ("BF16", (300, 100), tied),
                "b": ("F32", (200, 100), weights("F32", 20_000, 2)),
                "c": ("BF16", (300, 100), tied),
                "ids": ("I64", (300,), np.arange(300)),
            },
        )

    @pytest.fixture
    def one(self, original: Path, tmp_path: Path) -> Path:
        """What `compress` makes of it."""
        compress(original, tmp_path / "one.safetensors")
        return tmp_path / "one.safetensors"

    @pytest.mark.parametrize("act", [compress, decompress])
    def test_a_second_run_is_refused_and_disturbs_nothing(
        self, act: Any, original: Path, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        src, dst, refused = (original if act is compress else one), tmp_path / "dst.safetensors", []
        act(src, tmp_path / "alone.safetensors")

        def beside_another(*arguments: Any, **options: Any) -> Any:
            if not refused:
                refused.append(dst)
                for overwrite in (False, True):
                    with pytest.raises(NeuzipError, match=r"dst\.safetensors\.neuzip-partial: another"):
                        act(src, dst, overwrite=overwrite)
            return check(*arguments, **options)

        place = "neuzip.compress.container_job" if act is compress else "neuzip.compress.restore"
        check = sys.modules[place].check_tensors
        monkeypatch.setattr(f"{place}.check_tensors", beside_another)
        act(src, dst)
        assert refused
        assert dst.read_bytes() == (tmp_path / "alone.safetensors").read_bytes()
        assert not list(tmp_path.glob("*.neuzip-*"))

    @pytest.mark.parametrize("gone", ["renamed", "removed", "made again"])
    def test_the_lock_of_a_folder_that_is_gone_is_none(
        self, gone: str, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other run ends between this one's opening its folder and getting the lock."""
        dst, lock = tmp_path / "dst.safetensors", fcntl.flock

        def late(descriptor: int, how: int) -> None:
            _partial(dst).rename(tmp_path / "done") if gone == "renamed" else _partial(dst).rmdir()
            if gone == "made again":
                (tmp_path / "other").mkdir()  # takes the place that the file system has for the next folder
                _partial(dst).mkdir()
            lock(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(NeuzipError, match="another run is writing there"):
            compress(original, dst)
        assert not dst.exists()

    def test_a_lock_that_cannot_be_had_is_not_called_another_run(
        self, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(fcntl, "flock", broken)
        with pytest.raises(NeuzipError, match="cannot be written: Input/output error"):
            compress(original, tmp_path / "dst.safetensors")

    @pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP])
    def test_a_file_system_without_locks(
        self, code: int, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fcntl, "flock", _answer(code))
        with pytest.warns(RuntimeWarning, match=r"back\.safetensors\.neuzip-partial: cannot be locked"):
            decompress(one, tmp_path / "back.safetensors")

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
    def test_a_file_system_that_cannot_sync_folders(
        self, code: int, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sync = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda fd: (_answer(code) if stat.S_ISDIR(os.fstat(fd).st_mode) else sync)(fd)
        )
        with pytest.raises(NeuzipError) if code == errno.EIO else nullcontext():
            decompress(one, tmp_path / "back.safetensors")

    @pytest.mark.parametrize("act", [compress, decompress])
    def test_what_a_killed_run_left_is_cleared_away(
        self, act: Any, original: Path, one: Path, tmp_path: Path
    ) -> None:
        dst = tmp_path / "dst.safetensors"
        _partial(dst).mkdir()
        for name in (dst.name, _partial(dst).name):
            (_partial(dst) / name).write_bytes(b"half")
        act(original if act is compress else one, dst)
        assert dst.read_bytes() == (one if act is compress else original).read_bytes()
        assert not _partial(dst).exists()

    @pytest.mark.parametrize("act", [compress, decompress])
    def test_what_an_older_neuzip_left_is_named(
        self, act: Any, original: Path, one: Path, tmp_path: Path
    ) -> None:
        """Before it locked a folder it wrote to a file of this name. Whose it is cannot be known."""
        left = _partial(tmp_path / "dst.safetensors")
        left.write_bytes(b"half")
        with pytest.raises(NeuzipError, match=r"dst\.safetensors\.neuzip-partial: is a file"):
            act(original if act is compress else one, tmp_path / "dst.safetensors")
        assert left.read_bytes() == b"half"

    def test_a_run_that_fails_leaves_nothing(self, one: Path, tmp_path: Path) -> None:
        with Container(one) as container:
            at = container.file.data_start + container.file.header.tensors["b:words"].start
        data = bytearray(one.read_bytes())
        data[at + 1000] ^= 1
        one.write_bytes(data)
        with pytest.raises(FormatError, match="'b'"):
            decompress(one, tmp_path / "back.safetensors")
        assert {p.name for p in tmp_path.iterdir()} == {"original.safetensors", "one.safetensors"}

    def test_the_source_may_not_lie_where_runs_work(self, original: Path, tmp_path: Path) -> None:
        """Their folders are emptied, and older results removed."""
        before = original.read_bytes()
        for end in ("partial", "old"):
            place = tmp_path / f"dst.neuzip-{end}" / "m.safetensors"
            place.parent.mkdir()
            place.write_bytes(before)
            for src, dst in ((place, "dst"), (place.parent, "dst")):
                with pytest.raises(NeuzipError, match=rf"dst\.neuzip-{end}: (is the same place as|holds) "):
                    compress(src, tmp_path / dst, overwrite=True)
            assert place.read_bytes() == before

    @pytest.mark.parametrize("rules", [[LOSSLESS], K3, [Rule("b", Scheme("raw")), LOSSLESS]])
    def test_a_finished_run_is_recognised(self, rules: list[Rule], original: Path, tmp_path: Path) -> None:
        """Killed after it gave the file its name: what is left of the run goes, and the file stays."""
        one, back = tmp_path / "one.safetensors", tmp_path / "back.safetensors"
        assert compress(original, one, rules).resumed_files == 0
        assert not decompress(one, back).was_there
        for dst in (one, back):
            before = dst.stat()
            _partial(dst).mkdir()
            if dst == one:
                again = compress(original, one, rules)
                assert again.resumed_files == 1
                assert [t.name for t in again.tensors] == ["a", "b", "c", "ids"]
            else:
                assert decompress(one, back).was_there
            assert (dst.stat().st_ino, dst.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
            assert not _partial(dst).exists()

    @pytest.mark.parametrize(
        "rules", [K3, [Rule("b", Scheme("raw")), LOSSLESS], [Rule("a", Scheme("raw")), LOSSLESS]]
    )
    def test_other_options_are_no_finished_run(
        self, rules: list[Rule], original: Path, one: Path, tmp_path: Path
    ) -> None:
        compress(original, tmp_path / "other.safetensors", rules)
        for asked, dst in ((rules, one), ([LOSSLESS], tmp_path / "other.safetensors")):
            before = dst.read_bytes()
            with pytest.raises(WouldOverwrite, match="exists already"):
                compress(original, dst, asked)
            assert dst.read_bytes() == before
        assert not list(tmp_path.glob("*.neuzip-*"))

    @pytest.mark.parametrize("at", [100, -1])
    def test_a_changed_source_is_no_finished_run(
        self, at: int, original: Path, one: Path, tmp_path: Path
    ) -> None:
        """The same header, other weights: in a coded tensor or a raw one."""
        decompress(one, tmp_path / "back.safetensors")
        data = bytearray(original.read_bytes())
        data[at + (len(data) // 2 if at > 0 else 0)] ^= 1
        original.write_bytes(data)
        with pytest.raises(WouldOverwrite):
            compress(original, one)
        compress(original, one, overwrite=True)
        with pytest.raises(WouldOverwrite):
            decompress(one, tmp_path / "back.safetensors")
        decompress(one, tmp_path / "back.safetensors", overwrite=True)
        assert (tmp_path / "back.safetensors").read_bytes() == bytes(data)

    @pytest.mark.parametrize("stream", ["a:words", "b:sign_mantissa", "ids"])
    def test_a_damaged_result_is_no_finished_run(self, stream: str, original: Path, one: Path) -> None:
        with Container(one) as container:
            at = container.file.data_start + container.file.header.tensors[stream].start
        data = bytearray(one.read_bytes())
        data[at + 100] ^= 1
        one.write_bytes(data)
        with pytest.raises(WouldOverwrite):
            compress(original, one, verify=False)

    def test_what_is_said(self, original: Path, one: Path, tmp_path: Path, neuzip: Any) -> None:
        said = neuzip("compress", original, one)
        assert (said.exit_code, said.stderr) == (
            0, "1 file was finished already and matches the source\n"
        )  # fmt: skip
        back = tmp_path / "back.safetensors"
        assert neuzip("decompress", one, back).stderr == ""
        said = neuzip("decompress", one, back)
        assert said.exit_code == 0
        assert said.stderr == "the file was restored already and matches its checksums\n"
        assert neuzip("compress", original, back).exit_code == WouldOverwrite.exit_code


def _answer(code: int) -> Callable[..., None]:
    """What a file system does that refuses a call."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".neuzip-partial")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path, save: Save) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("no right to mount")
    try:
        root = tmp_path / "model"
        for i in range(3):
            save(root / f"{i}.safetensors", {f"w{i}": ("BF16", (200_000,), weights("BF16", 200_000, i))})
        with pytest.raises(NeuzipError, match="no space left"):
            compress(root, disk / "small")
        assert not (disk / "small").exists()
        for leftover in (disk / "small.neuzip-partial").glob("*.safetensors"):
            verify(leftover)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_real_checkpoint(neuzip_data: Path, tmp_path: Path) -> None:
    source = neuzip_data / "wikilm-26m"
    report = compress(source, tmp_path / "small")
    assert report.ratio <= 0.666
    decompress(tmp_path / "small", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(source)
