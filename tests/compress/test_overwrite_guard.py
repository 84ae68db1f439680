"""What --overwrite replaces, and what it leaves alone: all that is no checkpoint, or holds something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuzip.compress import compress, decompress
from neuzip.compress.overwrite_guard import refusal_to_replace
from neuzip.errors import NeuzipError, WouldOverwrite

Speak = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path, save: Callable[..., Path]) -> Path:
    """A checkpoint with a file of its own that comes with no other."""
    weights = np.random.default_rng(0).normal(0, 0.02, 4096).astype(np.float32).view(np.uint32) >> 16
    save(tmp_path / "model" / "model.safetensors", {"w": ("BF16", (64, 64), weights.astype(np.uint16))})
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "notes.txt").write_text("of the model")
    return tmp_path / "model"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "dst").mkdir()
    return tmp_path / "dst"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


STRANGERS = {
    "no checkpoint": {"thesis.docx": "holds 'thesis.docx', and no checkpoint"},
    "hidden": {".bashrc": "holds '.bashrc', and no checkpoint"},
    "a checkpoint and more": {
        "model.safetensors": None, "thesis.docx": "holds 'thesis.docx', which is no part of a checkpoint",
    },
    "notes": {"model.safetensors": None, "plan.txt": "holds 'plan.txt', which is no part of a checkpoint"},
    "source code": {"model.safetensors": None, "src/main.py": "holds 'src/main.py', which is no part"},
    "a repository": {"model.safetensors": None, ".git/HEAD": "holds '.git/HEAD', which is no part"},
    "downloads deep below": {"cache/hub/model.safetensors": "holds 'cache', and no checkpoint"},
    "a clone of ours": {"neuzip/README.md": "holds 'neuzip', and no checkpoint"},
}  # fmt: skip


@pytest.mark.parametrize("files", STRANGERS.values(), ids=STRANGERS)
def test_a_folder_with_anything_else_is_left_alone(
    files: dict[str, str | None], model: Path, dst: Path, neuzip: Speak
) -> None:
    for name in files:
        (dst / name).parent.mkdir(parents=True, exist_ok=True)
        (dst / name).write_text("mine")
    before = contents(dst)
    reason = next(reason for reason in files.values() if reason is not None)
    for arguments in (["compress", model, dst], ["compress", model, dst, "--mantissa-bits", 3]):
        said = neuzip(*arguments, "--overwrite")
        assert said.exit_code == 1
        assert f"error: {dst}: {reason}" in said.stderr
        assert "hint: choose another DST, or remove what is there yourself" in said.stderr
    assert contents(dst) == before
    assert not list(dst.parent.glob("*.neuzip-*")), "nothing was begun"


def test_a_home_is_left_alone(model: Path, tmp_path: Path, neuzip: Speak) -> None:
    home = tmp_path / "home"
    for name in (".bashrc", "Documents/letter.odt", ".cache/huggingface/hub/x.safetensors", "m.safetensors"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    before = contents(home)
    said = neuzip("compress", model, home, "--overwrite")
    assert said.exit_code == 1 and "'.bashrc', which is no part of a checkpoint" in said.stderr
    assert contents(home) == before


def test_checkpoints_and_what_neuzip_made_are_replaced(model: Path, tmp_path: Path) -> None:
    """A plain copy, a container, a restored folder; each with the file that is the model's own."""
    small, back = tmp_path / "small", tmp_path / "back"
    for _ in range(2):
        compress(model, small, overwrite=True)
        decompress(small, back, overwrite=True)
        assert contents(back) == contents(model)
    (small / "report.json").write_text("{}")  # as eval --report writes it
    compress(model, small, overwrite=True)
    assert not (small / "report.json").exists()
    (small / "mine.txt").write_text("mine")
    with pytest.raises(WouldOverwrite, match=r"'mine\.txt', which is no part"):
        compress(model, small, overwrite=True)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["model.safetensors", "config.json", "tokenizer.model", "merges.txt", "README.md", "LICENSE"],
        ["model_index.json", "unet/model.safetensors", "vae/config.json"],
        ["model.gguf"],
        ["model.safetensors", ".cache/huggingface/download/model.safetensors.metadata", ".gitattributes"],
        ["model.safetensors", "modeling_mine.py", "recovery.svg", "recovery.jsonl"],
    ],
    ids=lambda names: "+".join(names) or "empty",
)
def test_what_is_taken_for_a_checkpoint(names: list[str], dst: Path) -> None:
    for name in names:
        (dst / name).parent.mkdir(parents=True, exist_ok=True)
        (dst / name).write_text("")
    assert refusal_to_replace(dst) is None


def test_a_manifest_that_cannot_be_read_vouches_for_nothing(model: Path, tmp_path: Path) -> None:
    compress(model, tmp_path / "small")
    manifest = tmp_path / "small" / "neuzip" / "manifest.json"
    assert refusal_to_replace(tmp_path / "small") is None
    for text in ("", "[]", '{"files": 3}', json.dumps({"files": []})):
        manifest.write_text(text)
        assert refusal_to_replace(tmp_path / "small") == "holds 'notes.txt', which is no part of a checkpoint"


def test_a_link_loses_its_name_and_nothing_behind_it(model: Path, dst: Path, tmp_path: Path) -> None:
    (dst / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(dst)
    compress(model, tmp_path / "link", overwrite=True)
    assert not (tmp_path / "link").is_symlink() and contents(dst) == {"mine": b"mine"}
    (tmp_path / "link" / "linked.json").symlink_to(dst / "mine")
    (tmp_path / "link" / "folder").symlink_to(dst)
    assert refusal_to_replace(tmp_path / "link") == "holds 'folder', which is no part of a checkpoint"
    (tmp_path / "link" / "folder").unlink()
    compress(model, tmp_path / "link", overwrite=True)
    assert contents(dst) == {"mine": b"mine"}


def test_the_source_and_what_holds_it_are_left_alone(model: Path, tmp_path: Path, neuzip: Speak) -> None:
    (tmp_path / "link").symlink_to(model)
    before = contents(tmp_path)
    places = {
        model: "is the same place as", tmp_path: "holds", model / "below": "lies within",
        tmp_path / "link": "is the same place as", tmp_path / "link" / "below": "lies within",
    }  # fmt: skip
    for place, how in places.items():
        said = neuzip("compress", model, place, "--overwrite")
        assert said.exit_code == 1 and f"{place}: {how} {model}\n" in said.stderr
    assert contents(tmp_path) == before


def test_a_folder_does_not_replace_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.docx").write_text("mine")
    with pytest.raises(WouldOverwrite, match="is a file, and a folder is to be written there"):
        compress(model, tmp_path / "thesis.docx", overwrite=True)
    assert (tmp_path / "thesis.docx").read_text() == "mine"
    compress(model / "model.safetensors", tmp_path / "w.safetensors")
    compress(model / "model.safetensors", tmp_path / "w.safetensors", overwrite=True)  # but a file does


def test_the_demo_removes_no_folder_of_yours(tmp_path: Path, neuzip: Speak) -> None:
    (tmp_path / "out" / "restored").mkdir(parents=True)
    (tmp_path / "out" / "restored" / "photo.jpg").write_text("mine")
    said = neuzip("demo", "--output", tmp_path / "out", "--overwrite")
    assert said.exit_code == 1 and "'photo.jpg', and no checkpoint" in said.stderr
    assert contents(tmp_path / "out") == {"restored/photo.jpg": b"mine"}


def test_recover_does_not_replace_the_original(tmp_path: Path, root: Path, neuzip: Speak) -> None:
    for name in ("tern", "original"):
        shutil.copytree(root / "eval/demo/checkpoint", tmp_path / name)
    before = contents(tmp_path)
    said = neuzip(
        "recover", tmp_path / "tern", "--original", tmp_path / "original", "--text", root / "LICENSE",
        "--steps", 1, "--output", tmp_path / "original", "--overwrite",
    )  # fmt: skip
    assert said.exit_code == 1 and "original: is the same place as" in said.stderr
    assert contents(tmp_path) == before


def test_a_trainer_saves_over_what_training_saved_and_over_nothing_else(tmp_path: Path, root: Path) -> None:
    import torch

    import neuzip
    from neuzip.runtime.hf.load import load_model

    model = load_model(root / "eval/demo/checkpoint", torch.bfloat16, attention=False)
    trainer = neuzip.train_compressed(model, "sgd")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.docx").write_text("mine")
    with pytest.raises(NeuzipError, match=r"thesis\.docx"):
        trainer.save(tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"thesis.docx": b"mine"}
    like = tmp_path / "like"
    shutil.copytree(root / "eval/demo/checkpoint", like)
    (like / "notes.txt").write_text("carried along")
    for resumable in (True, False):
        for _ in range(2):
            trainer.save(tmp_path / f"out-{resumable}", like=like, resumable=resumable)
            assert (tmp_path / f"out-{resumable}" / "notes.txt").exists()
