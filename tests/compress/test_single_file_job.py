"""Single files are compressed in a folder of their own: one run at a time, a finished one is recognised."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import Save, partial, refusing, weights

from neuzip.compress import (
    Rule,
    Scheme,
    compress,
    decompress,
)
from neuzip.errors import FormatError, NeuzipError, WouldOverwrite
from neuzip.formats.container import Container

K3 = [Rule("*", Scheme("truncated", 3))]
LOSSLESS = Rule("*", Scheme("lossless"))


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
            partial(dst).rename(tmp_path / "done") if gone == "renamed" else partial(dst).rmdir()
            if gone == "made again":
                (tmp_path / "other").mkdir()  # takes the place that the file system has for the next folder
                partial(dst).mkdir()
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
        monkeypatch.setattr(fcntl, "flock", refusing(code))
        with pytest.warns(RuntimeWarning, match=r"back\.safetensors\.neuzip-partial: cannot be locked"):
            decompress(one, tmp_path / "back.safetensors")

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
    def test_a_file_system_that_cannot_sync_folders(
        self, code: int, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sync = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda fd: (refusing(code) if stat.S_ISDIR(os.fstat(fd).st_mode) else sync)(fd)
        )
        with pytest.raises(NeuzipError) if code == errno.EIO else nullcontext():
            decompress(one, tmp_path / "back.safetensors")

    @pytest.mark.parametrize("act", [compress, decompress])
    def test_what_a_killed_run_left_is_cleared_away(
        self, act: Any, original: Path, one: Path, tmp_path: Path
    ) -> None:
        dst = tmp_path / "dst.safetensors"
        partial(dst).mkdir()
        for name in (dst.name, partial(dst).name):
            (partial(dst) / name).write_bytes(b"half")
        act(original if act is compress else one, dst)
        assert dst.read_bytes() == (one if act is compress else original).read_bytes()
        assert not partial(dst).exists()

    @pytest.mark.parametrize("act", [compress, decompress])
    def test_what_an_older_neuzip_left_is_named(
        self, act: Any, original: Path, one: Path, tmp_path: Path
    ) -> None:
        """Before it locked a folder it wrote to a file of this name. Whose it is cannot be known."""
        left = partial(tmp_path / "dst.safetensors")
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
            partial(dst).mkdir()
            if dst == one:
                again = compress(original, one, rules)
                assert again.resumed_files == 1
                assert [t.name for t in again.tensors] == ["a", "b", "c", "ids"]
            else:
                assert decompress(one, back).was_there
            assert (dst.stat().st_ino, dst.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
            assert not partial(dst).exists()

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
