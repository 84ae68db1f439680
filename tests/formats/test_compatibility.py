"""What was written once is read for ever: golden files that nobody changes unseen, versions, unknown keys.

`PYTHONPATH=tests:tests/support python -P tests/formats/test_compatibility.py` writes today's golden folder
anew, and says what tests/golden/SHA256SUMS and RESTORED below have to be: to write those down is a decision.
Whoever changes a sum of a released version breaks the promise; a new version gets folders of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import independent_decoder as decoder
import pytest
from golden import make as golden
from golden.bad import make as bad

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError
from neuzip.formats.checkpoint import read_stored_files
from neuzip.formats.manifest import KNOWN_REQUIREMENTS, VERSION
from neuzip.formats.records import AliasRecord

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
FOLDER, WRITTEN = GOLDEN / "folder_v1", GOLDEN / "folder_v1b"
"""The first folder; and what neuzip writes today: its config.json stops transformers where neuzip is not."""

SUMS = GOLDEN / "SHA256SUMS"
"""Of every golden file, as sha256sum writes it: none may change, and none may go."""

RESTORED = {
    "README.md": "67b246868db005aea6ffa0bb4653fd0875593c78c178bb6bd6e778e5108595a7",
    "config.json": "4bebf7dba2e37ce6166493cdcfb8f61810db88844139be2b932de7e0275babd0",
    "model-1.safetensors": "3c614c4f64d6b6f73ce1fd8f2e82a362c9e5a90043bf3606028f1d97d8a54d0b",
    "model-2.safetensors": "714a19d7e26c3ea0dfbe71c0313dbed1f0dd64604ee63f7395700262dfddbbea",
    "model.safetensors.index.json": "a02f9865aca50039ae684621576cdcb1ad54375e9a66fcdf858d7d6301230d5c",
    "tokenizer/vocab.txt": "06eb7d6a69ee19e5fbdf749018d3d2abfa04bcbd1365db312eb86dc7169389b8",
    "unet/config.json": "a1393379992179f9690d170f03053fe227463e17574a5ae0dae4cfc1d8553ee9",
    "unet/diffusion.safetensors": "ddb569b1536b252347595a8ec4dd9dea82c5dd75ab813db1dc73176d0d561837",
}
"""SHA-256 of what the golden folder restores to."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pins() -> dict[str, str]:
    """The pinned checksums, by path in tests/golden."""
    return {name: digest for digest, name in map(str.split, SUMS.read_text(encoding="utf-8").splitlines())}


def golden_files() -> dict[str, str]:
    """The pins that the files as they are would have."""
    paths = sorted(p for p in GOLDEN.glob("*v[0-9]*/**/*") if p.is_file())
    return {path.relative_to(GOLDEN).as_posix(): sha256(path.read_bytes()) for path in paths}


# Golden files


def test_no_golden_file_has_changed() -> None:
    pinned, found = pins(), golden_files()
    assert sorted(set(pinned) - set(found)) == [], "golden files are gone"
    assert sorted(set(found) - set(pinned)) == [], "golden files are not in tests/golden/SHA256SUMS"
    assert [name for name in pinned if pinned[name] != found[name]] == [], "golden files have changed"


def test_what_golden_containers_restore_to_is_pinned_too() -> None:
    """The expected checksums are in a golden file themselves, so they cannot follow a wrong decoder."""
    for folder in ("v1", "v1b", "v1c"):
        expected = json.loads((GOLDEN / folder / "expected.json").read_text(encoding="utf-8"))
        containers = [n for n in pins() if re.fullmatch(rf"{folder}/\w+\.safetensors", n)]
        assert f"{folder}/expected.json" in pins()
        assert set(expected) == {Path(name).stem for name in containers}


@pytest.mark.parametrize("folder", [FOLDER, WRITTEN], ids=lambda folder: folder.name)
def test_golden_folder_is_read_as_ever(folder: Path, tmp_path: Path) -> None:
    assert verify(folder).files == len(RESTORED)
    decompress(folder, tmp_path / "back")
    back = {p.relative_to(tmp_path / "back").as_posix(): p for p in (tmp_path / "back").rglob("*")}
    assert {name: sha256(p.read_bytes()) for name, p in back.items() if p.is_file()} == RESTORED
    restored = decoder.restore_folder(folder)
    assert {name: sha256(data) for name, data in restored.items()} == RESTORED


def test_golden_folder_has_every_kind_of_file() -> None:
    stored = read_stored_files(FOLDER)
    assert {file.kind for file in stored.values()} == {"container", "carried", "rewritten"}
    with FolderSource(FOLDER) as source:
        records = [t.record for t in source.tensors()]
    assert any(isinstance(record, AliasRecord) and record.file is not None for record in records)


# Versions and features


def changed(change: Callable[[Any], object], make: Callable[[], Any] = bad.lossless) -> bytes:
    """A good container after a change, with right checksums."""
    parts = make()
    change(parts)
    return bytes(bad.put_together(parts))


def refusal(path: Path) -> FormatError:
    """What both readers refuse: our error."""
    with pytest.raises(decoder.SpecViolation):
        decoder.restore_file(path) if path.is_file() else decoder.restore_folder(path)
    with pytest.raises(FormatError) as raised:
        verify(path)
    return raised.value


@pytest.mark.parametrize("version", ["2", "10", "1.0", "01", "", "1 "])
def test_a_container_of_another_version_is_refused_by_name(version: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(changed(lambda parts: parts.metadata.update(neuzip=version)))
    error = refusal(path)
    assert f"format version {version!r}; this neuzip reads version {VERSION}" in error.message
    assert error.field == "neuzip"
    assert error.hint == "update neuzip to read it"


@pytest.mark.parametrize("version", [2, 0, -1, 1.0, True, "1", None])
def test_a_manifest_of_another_version_is_refused_by_name(version: object, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(changed(lambda parts: parts.manifest.update(version=version)))
    error = refusal(path)
    assert f"format version {version!r}; this neuzip reads version {VERSION}" in error.message
    assert error.hint == "update neuzip to read it"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden folder."""
    return Path(shutil.copytree(FOLDER, tmp_path / "folder"))


def change_folder(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "neuzip" / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize("version", [2, 1.0, True, "1", None])
def test_a_folder_of_another_version_is_refused_by_name(version: object, folder: Path) -> None:
    change_folder(folder, lambda document: document.update(version=version))
    assert f"format version {version!r}; this neuzip reads version {VERSION}" in refusal(folder).message


FEATURES = [["x-feature"], ["x-feature", "y"], [""], ["Delta"], ["delta "]]


@pytest.mark.parametrize("requires", FEATURES)
def test_a_required_feature_that_is_unknown_is_refused_by_name(requires: list[str], folder: Path) -> None:
    path = folder / "w.safetensors"
    path.write_bytes(changed(lambda parts: parts.manifest.update(requires=requires)))
    assert f"requires {requires[0]!r}, which this neuzip does not know" in refusal(path).message
    path.unlink()
    change_folder(folder, lambda document: document.update(requires=requires))
    error = refusal(folder)
    assert f"requires {requires[0]!r}, which this neuzip does not know" in error.message
    assert (error.field, error.hint) == ("requires", "update neuzip to read it")


def test_an_unknown_feature_is_refused_beside_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    requires = [*sorted(KNOWN_REQUIREMENTS), "x-feature"]
    path.write_bytes(changed(lambda parts: parts.manifest.update(requires=requires)))
    with pytest.raises(FormatError, match="requires 'x-feature'"):
        verify(path)


def test_known_features_are_those_of_the_specification() -> None:
    specification = (ROOT / "formats" / "SPEC.md").read_text(encoding="utf-8")
    (row,) = [line for line in specification.splitlines() if line.startswith("| `requires` |")]
    assert all(f"`{name}`" in row or f'`"{name}"`' in row for name in KNOWN_REQUIREMENTS)
    assert KNOWN_REQUIREMENTS or "none" in row


@pytest.mark.parametrize("scheme", ["x-scheme", "Lossless", "", None, 1])
def test_an_unknown_scheme_is_refused_by_name(scheme: object, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(changed(lambda parts: parts.record("w").update(scheme=scheme)))
    error = refusal(path)
    assert f"unknown scheme {scheme!r}" in error.message
    assert (error.tensor, error.field) == ("w", "scheme")


# What a later writer may add

MORE = {"x-more": [1, {"y": None}], "zzz": "?"}


def with_more(parts: Any) -> None:
    """Unknown keys wherever an object takes them, and null for what may be absent."""
    parts.metadata["x-more"] = "?"
    parts.manifest.update(MORE, requires=parts.manifest.get("requires"))
    for record in parts.manifest["tensors"].values():
        record.update(MORE)
        if isinstance(record.get("loss"), dict):
            record["loss"].update(MORE)


GOOD = {
    "empty": bad.empty,
    "raw": lambda: bad.raw("v"),
    "lossless": bad.lossless,
    "truncated": bad.truncated,
    "normalised": lambda: bad.truncated("BF16", 8),
    "ternary": lambda: bad.ternary("2bit", 7),
    "quantized": bad.quantized,
}


@pytest.mark.parametrize("name", GOOD)
def test_unknown_keys_of_a_container_are_ignored(name: str, tmp_path: Path) -> None:
    path, back = tmp_path / "w.safetensors", tmp_path / "back.safetensors"
    path.write_bytes(bad.put_together(GOOD[name]()))
    plain = decoder.restore_file(path)
    path.write_bytes(changed(with_more, GOOD[name]))
    decompress(path, back)
    assert back.read_bytes() == plain == decoder.restore_file(path)


OPTIONAL = {
    "lossless": ["block_size", "original", "loss", "group"],
    "truncated": ["block_size"],
    "ternary": ["group", "block_size"],
    "raw": ["file", "original"],
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_is_the_absence_of_an_optional_key(name: str, tmp_path: Path) -> None:
    make = {"ternary": bad.ternary}.get(name, GOOD[name])
    path, back = tmp_path / "w.safetensors", tmp_path / "back.safetensors"
    path.write_bytes(bad.put_together(make()))
    plain = decoder.restore_file(path)

    def nullify(parts: Any) -> None:
        for record in parts.manifest["tensors"].values():
            record.update(dict.fromkeys(OPTIONAL[name]))

    path.write_bytes(changed(nullify, make))
    decompress(path, back)
    assert back.read_bytes() == plain == decoder.restore_file(path)


def test_an_unknown_stream_is_refused(tmp_path: Path) -> None:
    """A stream is no optional key: nobody knows what the tensor is without it."""
    path = tmp_path / "w.safetensors"

    def add(parts: Any) -> None:
        parts.entries["w:x-more"] = ("U8", [16], bytes(16))
        parts.record("w")["streams"]["x-more"] = bad.checksum(bytes(16))

    path.write_bytes(changed(add))
    assert refusal(path).field == "streams"


def test_unknown_keys_of_a_folder_are_ignored(folder: Path, tmp_path: Path) -> None:
    def add(document: dict[str, Any]) -> None:
        document.update(MORE, requires=None)
        for entry in document["files"].values():
            entry.update(MORE)

    change_folder(folder, add)
    (folder / "neuzip" / "x-more.json").write_text("{}", encoding="utf-8")
    decompress(folder, tmp_path / "back")
    assert {n: sha256((tmp_path / "back" / n).read_bytes()) for n in RESTORED} == RESTORED
    assert {n: sha256(data) for n, data in decoder.restore_folder(folder).items()} == RESTORED


# How the golden folder was made


def write_folder(target: Path) -> dict[str, str]:
    """A small compressed folder with everything that folders can have; what it restores to."""
    source = target.with_name("source")
    w, v = golden.normal("BF16", 2400, seed="folder"), golden.normal("F32", 1500, seed="folder")
    shards = {
        "model-1.safetensors": golden.Input({"w": w, "v": v, "norm": golden.normal("F32", 40)}),
        "model-2.safetensors": golden.Input({"tied": w, "rounded": golden.normal("F16", 2600)}),
        "unet/diffusion.safetensors": golden.Input({"w": w}, metadata={"format": "pt"}, padding=3),
    }
    weight_map = {name: file for file, shard in shards.items() if "/" not in file for name in shard.tensors}
    files = {name: shard.to_bytes() for name, shard in shards.items()} | {
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "config.json": b'{"model_type": "llama"}\n',
        "unet/config.json": b'{"quantization_config": {"bits": 4}}',
        "tokenizer/vocab.txt": b"\x00\xff",
        "README.md": b"# A model\n",
    }
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    compress(source, target, [Rule("rounded", Scheme("truncated", 3, 64)), Rule("*", Scheme())])
    decompress(target, target.with_name("back"))
    return {name: sha256((target.with_name("back") / name).read_bytes()) for name in sorted(files)}


def test_golden_folder_is_what_neuzip_would_write(tmp_path: Path) -> None:
    """Only the plan may say more than it did."""
    assert write_folder(tmp_path / "folder") == RESTORED
    for path in WRITTEN.rglob("*"):
        if path.is_file() and path.name != "plan.json":
            again = tmp_path / "folder" / path.relative_to(WRITTEN)
            assert again.read_bytes() == path.read_bytes(), path


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        restored = write_folder(Path(made) / "folder")
        shutil.rmtree(WRITTEN, ignore_errors=True)
        shutil.copytree(Path(made) / "folder", WRITTEN)
    print("".join(f"{digest}  {name}\n" for name, digest in golden_files().items()))
    print("".join(f'    "{name}": "{digest}",\n' for name, digest in restored.items()))
