"""A killed run goes on where it stopped, and ends with the bytes of an uninterrupted one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import forked
import pytest
from folders import Save, folder_bytes, partial, weights

from neuzip.compress import (
    Rule,
    Scheme,
    compress,
    container_job,
    decompress,
    verify,
)
from neuzip.compress.run_identity import RUN_ID_PATH
from neuzip.errors import FormatError, NeuzipError, WouldOverwrite
from neuzip.formats.checkpoint import read_stored_files
from neuzip.formats.config_section import write_entry

K3 = [Rule("*", Scheme("truncated", 3))]
LOSSLESS = Rule("*", Scheme("lossless"))


class TestResume:
    """A killed run goes on where it stopped, and ends with the bytes of an uninterrupted one."""

    @pytest.mark.slow
    def test_kill_at_any_moment(self, tmp_path: Path, save: Save, file_forks: forked.Server) -> None:
        root = tmp_path / "model"
        for shard in range(6):
            save(
                root / f"s{shard}.safetensors",
                {f"w{shard}": ("BF16", (200_000,), weights("BF16", 200_000, shard))},
            )
        (root / "config.json").write_text("{}")
        compress(root, tmp_path / "reference")
        expected = folder_bytes(tmp_path / "reference")
        script = tmp_path / "compress_once.py"
        script.write_text(
            "import sys; from neuzip.compress import compress\ncompress(sys.argv[1], sys.argv[2], jobs=2)\n"
        )
        killed = 0
        for attempt in range(6):
            target = tmp_path / f"killed-{attempt}"
            run = file_forks.start(script, root, target, cwd=tmp_path)
            # Wait for its first trace, and a bit more.
            deadline = time.monotonic() + 30
            while not partial(target).exists() and run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.01 * attempt)
            os.kill(run.pid, signal.SIGKILL)
            killed += run.wait(30) < 0
            assert not target.exists() or folder_bytes(target) == expected
            compress(root, target)
            assert folder_bytes(target) == expected
            assert not partial(target).exists()
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
        shard = partial(target) / "model-00001-of-00002.safetensors"
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
            assert not partial(target).exists()
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
