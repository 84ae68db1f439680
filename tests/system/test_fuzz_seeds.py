"""Every seed and every kept input of tests/fuzz passes its target, without a fuzzer."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz import mutate, targets

from neuzip.compress import decompress, verify
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import FormatError
from neuzip.formats.container import Container

ROOT = Path(__file__).resolve().parents[2]


FOUND = json.loads((targets.CORPUS / "found.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", targets.TARGETS)
def test_known_inputs_find_no_bug(name: str) -> None:
    target, inputs = targets.TARGETS[name], targets.all_inputs(name)
    assert inputs
    for entry, data in inputs.items():
        try:
            target.run(data)
        except BaseException as error:
            raise AssertionError(f"{name}, {entry}: {error!r}") from error


@pytest.mark.parametrize("name", targets.TARGETS)
def test_changed_inputs_find_no_bug(name: str) -> None:
    """The mutators themselves run, and make inputs that differ from what is kept and from each other."""
    target, kept = targets.TARGETS[name], list(targets.all_inputs(name).values())
    changed = list(itertools.islice(mutate.inputs(target, kept, random.Random(0)), 40))
    for data in changed:
        assert len(data) <= target.most
        target.run(data)
    assert len(set(changed) - set(kept)) > 25


def test_shares_of_the_time_are_percentages() -> None:
    assert sum(target.share for target in targets.TARGETS.values()) == 100


def test_a_bug_ends_a_run_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process was killed by must be on the disk before."""

    def refuse(data: bytes) -> None:
        assert not data

    bad = replace(targets.TARGETS["plan"], run=refuse)
    monkeypatch.setitem(targets.TARGETS, "header", bad)
    monkeypatch.setitem(sys.modules, "targets", targets)
    with pytest.raises(AssertionError):
        mutate.child(tmp_path, seed=0, end=time.monotonic() + 600)
    assert (tmp_path / "header").read_bytes()
    signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.mark.parametrize("bug", FOUND, ids=lambda bug: f"{bug['target']}-{bug['input']}")
def test_bugs_that_were_found_are_kept(bug: dict[str, str]) -> None:
    assert bug["input"].startswith("crash-")
    assert bug["input"] in dict(targets.kept_inputs(bug["target"]))


def test_a_coded_tensor_of_unknown_dtype_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """It may have no bytes, and then nothing would ever decode it."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(dict(targets.kept_inputs("container"))["crash-empty-tensor-of-unknown-dtype"])
    with pytest.raises(FormatError, match="unknown dtype 'BF32', so it cannot be ternary"):
        Container(path)


def test_an_alias_without_bytes_must_have_its_file(tmp_path: Path) -> None:
    """There are no pieces to read, in which to find out that there is no reader."""
    parts, path = targets.bad.raw("v"), tmp_path / "w.safetensors"
    parts.set_original(parts.original | {"v": {"dtype": "U8", "shape": [0], "data_offsets": [8, 8]}})
    parts.record("v").update(file="other.safetensors", checksum=targets.bad.checksum(b""))
    path.write_bytes(targets.bad.put_together(parts.seal()))
    with pytest.raises(FormatError, match=r"'other\.safetensors', which is not here"):
        decompress(path, tmp_path / "back.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_tensor_without_bytes_and_reader_is_no_intact_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: verification forgets no error for want of pieces."""
    parts, path = targets.bad.raw(), tmp_path / "w.safetensors"
    parts.set_original({"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    parts.record("w")["checksum"] = targets.bad.checksum(b"")
    parts.entries["w"] = ("U8", [0], b"")
    path.write_bytes(targets.bad.put_together(parts.seal()))
    verify(path)

    def no_reader(self: FolderSource, tensor: SourceTensor) -> None:
        raise FormatError(path, "no reader", tensor=tensor.name)

    monkeypatch.setattr(FolderSource, "reader", no_reader)
    with pytest.raises(FormatError, match="no reader"):
        verify(path)


def test_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in targets.CORPUS.iterdir()) < 300_000
    assert {path.stem for path in targets.CORPUS.glob("*.zip")} <= set(targets.TARGETS)


def test_targets_agree_only_because_both_decode() -> None:
    """A decoder that is wrong in one bit, or that accepts what the other refuses, is noticed."""
    container = targets.bad.put_together(targets.bad.lossless())
    targets.run_container(container)
    decode, must = targets.independent.decode_block, targets.independent.must
    try:
        targets.independent.decode_block = lambda *given: decode(*given) ^ 1
        with pytest.raises(AssertionError):
            targets.run_container(container)
        targets.independent.decode_block = lambda *given: must(False, "refused")
        with pytest.raises(AssertionError, match="refuses"):
            targets.run_container(container)
    finally:
        targets.independent.decode_block = decode


def test_a_saved_input_can_be_run_alone(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"{}")
    command = [sys.executable, "-P", ROOT / "tests" / "fuzz" / "targets.py", "header", tmp_path / "input"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ran.stdout.endswith("no bug\n")
