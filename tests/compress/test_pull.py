"""A repository of the Hub as a folder: all of it, checked, under its name only when it is whole."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from loopback_hub import Handler, Hub, Refusal

from neuzip.compress import decompress
from neuzip.formats.hub.push import push
from neuzip.formats.hub.push_plan import plan_push

pytest_plugins = ["loopback_hub"]

PARTIAL = "copy.neuzip-partial"


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, save: Callable[..., Path]) -> Path:
    """Two shards, one of them large to the Hub, and small files."""
    root = tmp_path_factory.mktemp("pull") / "model"
    values = (np.random.default_rng(0).standard_normal(20_000) * 0.05).astype(np.float32)
    save(root / "model-1.safetensors", {"a": ("F32", (100, 200), values)})
    save(root / "sub" / "model-2.safetensors", {"b": ("F32", (50,), values[:50])})
    (root / "config.json").write_text("{}")
    (root / "README.md").write_text("# The original\n")
    return root


@pytest.fixture
def pushed(here: Hub, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    push(plan_push(compressed, "me/model"))
    here.requests.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return here


def test_what_is_pulled_is_the_repository_and_restores(pushed: Hub, original: Path, tmp_path: Path, neuzip):
    said = neuzip("pull", "me/model", "copy")
    assert (said.exit_code, said.stderr) == (0, "")
    tree = pushed.repositories["me/model"].tree()
    assert said.stdout.startswith(f"copy: {len(tree)} files, ")
    assert "checked, 2 tensors verified, in" in said.stdout
    assert contents(tmp_path / "copy") == tree
    assert not any(p.is_symlink() for p in (tmp_path / "copy").rglob("*"))
    assert {p.name for p in tmp_path.iterdir()} == {"copy"}, "neither a cache nor anything half-written"
    decompress("copy", "restored")
    assert contents(tmp_path / "restored") == contents(original)


def test_a_plain_repository_is_pulled_without_other_formats(
    pushed: Hub, original: Path, tmp_path: Path, neuzip
):
    files = contents(original)
    pushed.add("me/plain", files | {"onnx/model.onnx": b"x" * 20, "a[1].gguf": b"y" * 3})
    said = neuzip("pull", "me/plain")
    assert said.stderr == (
        "me/plain: left out 23 bytes of weights in other formats: onnx/model.onnx, a[1].gguf\n"
    )
    assert said.stdout.startswith("plain: 4 files, ")
    assert ", checked, in" in said.stdout
    assert contents(tmp_path / "plain") == files


def test_a_pointer_in_place_of_a_file_is_not_called_checked(
    pushed: Hub, original: Path, tmp_path: Path, neuzip
):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    pushed.add("me/plain", contents(original) | {"model-1.safetensors": pointer})
    said = neuzip("pull", "me/plain", "copy")
    assert said.exit_code == 1
    assert "as it is on the Hub, and model-1.safetensors: is a Git LFS pointer" in said.stderr
    assert not (tmp_path / "copy").exists()


def test_a_revision_is_pulled(pushed: Hub, original: Path, tmp_path: Path, neuzip):
    first = pushed.repositories["me/model"].branches["main"]
    pushed.repositories["me/model"].commit("v1/a", contents(original))
    neuzip("pull", "me/model@v1/a", "branch")
    assert contents(tmp_path / "branch") == contents(original)
    neuzip("pull", f"me/model@{first}", "commit")
    assert "neuzip/manifest.json" in contents(tmp_path / "commit")


def test_all_modes_and_a_second_run_that_has_nothing_to_do(pushed: Hub, tmp_path: Path, in_all_modes, neuzip):
    said = in_all_modes("pull", "me/model", "copy")
    assert said["quiet"].stdout == "copy\n"
    answer = said["json"].json
    assert (answer["was_there"], answer["tensors"], answer["compressed"]) == (True, None, True)
    assert answer["commit"] == pushed.repositories["me/model"].branches["main"]
    gets = [r for r in pushed.requests if r.startswith("GET") and "/resolve/" in r]
    assert len(gets) == len(answer["files"]), "only the first run downloads"
    again = neuzip("pull", "me/model", "copy")
    assert again.stderr == "all files are here already and match the checksums of the Hub\n"


def test_a_dry_run_lists_and_writes_nothing(pushed: Hub, tmp_path: Path, in_all_modes, neuzip):
    said = in_all_modes("pull", "me/model", "copy", "--dry-run")
    assert not list(tmp_path.iterdir())
    assert not any("/resolve/" in r for r in pushed.requests)
    assert "would go to copy" in said["human"].stdout
    done = neuzip("pull", "me/model", "copy", "--json").json
    assert list(done) == list(said["json"].json)
    assert done["files"] == said["json"].json["files"]


def test_what_is_there_is_replaced_only_when_asked_for(pushed: Hub, tmp_path: Path, neuzip):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").write_text("x")
    said = neuzip("pull", "me/model", "copy")
    assert said.exit_code == 1
    assert "error: copy: exists already\nhint: choose another DST, or give --overwrite\n" in said.stderr
    assert "copy: holds 'mine', and no checkpoint" in neuzip("pull", "me/model", "copy", "--overwrite").stderr
    assert contents(tmp_path / "copy") == {"mine": b"x"}
    (tmp_path / "copy" / "mine").rename(tmp_path / "copy" / "mine.safetensors")
    assert neuzip("pull", "me/model", "copy", "--overwrite").exit_code == 0
    assert contents(tmp_path / "copy") == pushed.repositories["me/model"].tree()


@pytest.mark.parametrize("changed", ["config.json", "sub/model-2.safetensors", "neuzip/extra"])
def test_a_folder_that_differs_is_no_earlier_pull(changed: str, pushed: Hub, tmp_path: Path, neuzip):
    neuzip("pull", "me/model", "copy")
    path = tmp_path / "copy" / changed
    data = path.read_bytes() if path.exists() else b"."
    path.write_bytes(data[:-1] + b"x")
    assert "copy: exists already" in neuzip("pull", "me/model", "copy").stderr


def spoiling(name: str) -> Callable[[Handler], None]:
    """A Hub that sends other bytes of one file, as many as it should."""

    def before(handler: Handler) -> None:
        if re.fullmatch(f"/me/[^/]+/resolve/[^/]+/{re.escape(name)}", handler.path):
            handler.spoil = lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]

    return before


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json"])
def test_other_bytes_of_the_right_length_are_found(name: str, pushed: Hub, tmp_path: Path, neuzip):
    """In a large file and in a small one: the Hub has checksums of two kinds."""
    pushed.before = spoiling(name)
    said = neuzip("pull", "me/model", "copy")
    assert said.exit_code == 1
    assert (
        f"1 of {len(pushed.repositories['me/model'].tree())} files did not arrive as they are" in said.stderr
    )
    assert f"Hub: {name}\nhint: repeat the command: it downloads them once more" in said.stderr
    assert {p.name for p in tmp_path.iterdir()} == {PARTIAL}
    pushed.heal()
    pushed.requests.clear()
    assert neuzip("pull", "me/model", "copy").exit_code == 0
    assert sum("GET" in r and "/resolve/" in r for r in pushed.requests) == 1
    assert contents(tmp_path / "copy") == pushed.repositories["me/model"].tree()


def test_a_repository_that_is_damaged_itself_gets_no_name(pushed: Hub, tmp_path: Path, neuzip):
    """The Hub's checksums are right then: only decoding finds it."""
    repository = pushed.repositories["me/model"]
    tree = dict(repository.tree())
    shard = bytearray(tree["model-1.safetensors"])
    shard[-5] ^= 1
    repository.commit("main", tree | {"model-1.safetensors": bytes(shard)})
    said = neuzip("pull", "me/model", "copy")
    assert said.exit_code == 1
    assert "error: me/model: arrived as it is on the Hub, and does not verify: copy.neuz" in said.stderr
    assert f"hint: tell its owner, or pull an older revision; {PARTIAL} can be removed\n" in said.stderr
    assert {p.name for p in tmp_path.iterdir()} == {PARTIAL}


def test_a_pull_goes_on_when_the_repository_has_changed(pushed: Hub, original: Path, tmp_path: Path, neuzip):
    """What is left of the older commit is neither kept nor mixed in."""
    pushed.before = spoiling("config.json")
    assert neuzip("pull", "me/model", "copy").exit_code == 1
    pushed.heal()
    pushed.repositories["me/model"].commit("main", contents(original) | {"new.txt": b"new"})
    assert neuzip("pull", "me/model", "copy").exit_code == 0
    assert contents(tmp_path / "copy") == contents(original) | {"new.txt": b"new"}


@pytest.mark.slow
def test_the_workspace_of_something_else_is_left_alone(pushed: Hub, tmp_path: Path, neuzip):
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "mine").write_text("x")
    said = neuzip("pull", "me/model", "copy")
    assert f"error: {PARTIAL}: was begun by something else\n" in said.stderr
    assert contents(tmp_path / PARTIAL) == {"mine": b"x"}
    pushed.add("me/other", pushed.repositories["me/model"].tree())
    assert neuzip("pull", "me/model", "copy", "--overwrite").exit_code == 0
    pushed.before = spoiling("config.json")
    neuzip("pull", "me/other", "two")
    assert "was begun by a pull of me/other" in neuzip("pull", "me/model", "two").stderr


@pytest.mark.parametrize("left", [(), (".cache/huggingface/x",)])
def test_a_pull_killed_in_its_last_moment_goes_on(
    left: tuple[str, ...], pushed: Hub, tmp_path: Path, neuzip, monkeypatch
):
    """What marks the workspace is removed then, and perhaps not all that huggingface_hub recorded."""
    from neuzip.compress import pull

    def die(work: Path, dst: Path) -> None:
        for name in left:
            (work / name).parent.mkdir(parents=True)
            (work / name).write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull, "publish", die)
        said = neuzip("pull", "me/model", "copy")
    assert (said.exit_code, said.stderr) == (
        130,
        "error: interrupted\nhint: finished work is kept; repeat the command to resume\n",
    )
    assert {p.name for p in tmp_path.iterdir()} == {PARTIAL}
    assert neuzip("pull", "me/model", "copy").exit_code == 0
    assert contents(tmp_path / "copy") == pushed.repositories["me/model"].tree()


def test_a_pull_killed_in_its_first_moment_goes_on(pushed: Hub, tmp_path: Path, neuzip):
    (tmp_path / PARTIAL / ".cache" / "huggingface").mkdir(parents=True)
    assert neuzip("pull", "me/model", "copy").exit_code == 0
    assert contents(tmp_path / "copy") == pushed.repositories["me/model"].tree()


def test_what_kills_left_half_written_is_removed(pushed: Hub, tmp_path: Path, neuzip):
    """huggingface_hub gives such files a name of their own in every run, and would leave them for ever."""
    pushed.before = spoiling("config.json")
    neuzip("pull", "me/model", "copy")
    left = tmp_path / PARTIAL / ".cache" / "huggingface" / "download" / "x.0123abcd.incomplete"
    left.write_bytes(b"x" * 1000)
    neuzip("pull", "me/model", "copy")
    assert not left.exists()


def test_a_repository_that_the_disk_cannot_take_is_refused_at_once(
    pushed: Hub, tmp_path: Path, neuzip, monkeypatch
):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 1000))  # type: ignore[attr-defined]
    said = neuzip("pull", "me/model", "copy")
    assert "the repository takes " in said.stderr
    assert "bytes more, the disk has 1,000 left\nhint: free some space, or choose a DST" in said.stderr
    assert not any("/resolve/" in r for r in pushed.requests)


@pytest.mark.parametrize("repo_id", ["model", "a/b/c", "a b/c", "./model"])
def test_what_is_no_id_is_refused(repo_id: str, here: Hub, neuzip):
    said = neuzip("pull", repo_id)
    assert said.exit_code == 2
    assert "has not the form owner/name or owner/name@revision" in said.stderr
    assert not here.requests


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("https://huggingface.co/org/m", "org/m"),
        ("huggingface.co/org/m/", "org/m"),
        ("https://hf.co/org/m/tree/v1.0", "org/m@v1.0"),
        ("https://user:pass@huggingface.co/org/m.git", "org/m"),
        ("http://huggingface.co/org/m/blob/main/config.json?download=true", "org/m"),
        ("https://mirror.example:8080/org/m", "org/m"),
        ("https://huggingface.co/datasets/org/d", None),
        ("https://github.com/org/m", None),
        ("./org/m", None),
    ],
)
def test_an_address_is_answered_with_the_id(address: str, meant: str | None, neuzip, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8080")
    for said in (neuzip("pull", address), neuzip("inspect", address)):
        hint = "" if meant is None else f"\nhint: did you mean {meant}?\n"
        assert said.stderr.endswith(hint)
        assert ("did you mean" in said.stderr) == (meant is not None)


def test_a_repository_that_cannot_be_had_is_refused(pushed: Hub, neuzip):
    said = neuzip("pull", "me/typo", "copy")
    assert "error: me/typo: the Hub has no such repository, or it is private\n" in said.stderr
    pushed.add("me/evil", {"model.safetensors": b"", "../../evil": b"x"})
    assert "'../../evil' is not a path inside the folder" in neuzip("pull", "me/evil", "copy").stderr


def test_a_hub_that_is_lost_on_the_way_is_said(pushed: Hub, tmp_path: Path, neuzip):
    """huggingface_hub would take a folder that is half there for the whole, when the Hub is out of order."""
    listed = json.loads(neuzip("pull", "me/model", "copy", "--dry-run", "--json").stdout)

    def before(handler: Handler) -> None:
        if "/resolve/" in handler.path and handler.path.endswith(".safetensors"):
            raise Refusal(503, message="Back soon")
        if "/tree/" in handler.path and (tmp_path / PARTIAL / "config.json").exists():
            raise Refusal(503, message="Back soon")

    pushed.before = before
    said = neuzip("pull", "me/model", "copy")
    assert said.exit_code == 1
    assert "Back soon" in said.stderr or "503" in said.stderr
    assert not (tmp_path / "copy").exists()
    pushed.heal()
    assert neuzip("pull", "me/model", "copy").exit_code == 0
    assert len(contents(tmp_path / "copy")) == len(listed["files"])
