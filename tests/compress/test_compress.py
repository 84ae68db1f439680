"""Compress and restore whole checkpoints: nothing lost, nothing half-written, always the same bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import independent_decoder as decoder
import numpy as np
import pytest
import torch
from folders import Save, folder_bytes, partial, refusing, weights
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
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError, NeuzipError, VerificationError, WouldOverwrite
from neuzip.formats.container import Container
from neuzip.kernels.float_fields import FORMATS
from neuzip.runtime import load_file

K3 = [Rule("*", Scheme("truncated", 3))]
LOSSLESS = Rule("*", Scheme("lossless"))


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


@pytest.mark.slow
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
    with FolderSource(path) as source, Workers(1) as workers:
        return make_plan(source, [LOSSLESS], workers).tensors


def test_a_full_cache_of_kernels_is_not_blamed_on_the_result(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuzip.compress.schemes.lossless.encode", refusing(errno.ENOSPC))
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
        assert record.holder == ("model-00001-of-00002.safetensors", "embed.weight")
        assert container.stored_bytes("head.weight") == 0


@pytest.mark.slow
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
    assert not partial(tmp_path / "back").exists()


def test_what_is_restored_already_takes_no_more_space(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what a killed run has left in its workspace, nor a whole result."""
    compress(checkpoint, tmp_path / "small")
    decompress(tmp_path / "small", tmp_path / "back")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=30_000))
    assert decompress(tmp_path / "small", tmp_path / "back").was_there
    (tmp_path / "back").rename(partial(tmp_path / "back"))
    (partial(tmp_path / "back") / "model-00001-of-00002.safetensors").unlink()
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


@pytest.mark.slow
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
    with FolderSource(tmp_path / "b.safetensors") as opened:
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
@pytest.mark.slow
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
    with FolderSource(root) as source, Workers(2) as workers:
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
