"""Checkpoints as Hugging Face keeps them: a folder with .safetensors files, or one such file.

Subfolders are part of a checkpoint (diffusers pipelines have them); `.git` and the download cache of
huggingface_hub are not. A compressed checkpoint is the same folder with every .safetensors file replaced by a
container of the same name, a few JSON files rewritten, and the folder `neuzip/`:

    neuzip/manifest.json            every file, how it is stored, and its checksum
    neuzip/original/config.json     what was rewritten, as it was
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from neuzip.errors import FormatError, NeuzipError

from .container import stream_name
from .manifest import VERSION, TensorRecord, check_requirements, is_safe_path
from .tensor_file import parse_json

OWN_FOLDER = "neuzip"
MANIFEST_PATH = f"{OWN_FOLDER}/manifest.json"
ORIGINAL_FOLDER = f"{OWN_FOLDER}/original"

SKIPPED_FOLDERS = (".git", ".cache/huggingface")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CHUNK = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """The files of a plain or compressed checkpoint: relative paths with forward slashes, in sorted order.

    `root` is the folder, or the folder of the single file.
    """

    path: Path
    root: Path
    weights: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def is_file(self) -> bool:
        """Whether it is a single .safetensors file."""
        return self.path != self.root

    @property
    def is_compressed_folder(self) -> bool:
        """Whether it is a folder that neuzip wrote."""
        return not self.is_file and MANIFEST_PATH in self.others

    def weight_paths(self) -> list[Path]:
        """The .safetensors files."""
        return [self.root / w for w in self.weights]


def find_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """List the files of a checkpoint. Raises NeuzipError when there are no safetensors to be found."""
    path = Path(path)
    if not path.exists():
        raise NeuzipError(f"{path}: no such file or folder", "give a folder, a .safetensors file or a Hub id")
    if path.is_file():
        if path.suffix in PICKLES:
            raise FormatError(path, "is a pickle, which can run code when it is loaded", hint=_CONVERT)
        if path.suffix != ".safetensors":
            raise FormatError(path, "is not a .safetensors file")
        return Checkpoint(path, path.parent, (path.name,), ())
    files = sorted(_walk(path))
    weights = tuple(f for f in files if f.endswith(".safetensors"))
    if not weights:
        pickles = [f for f in files if f.endswith(PICKLES)]
        if pickles:
            raise FormatError(
                path / pickles[0], "is a pickle, and there are no .safetensors files", hint=_CONVERT
            )
        raise NeuzipError(f"{path}: there are no .safetensors files", "is this the right folder?")
    checkpoint = Checkpoint(path, path, weights, tuple(f for f in files if f not in weights))
    for index in index_files(checkpoint):
        read_weight_map(checkpoint, index)
    return checkpoint


_CONVERT = "load the model with transformers where you trust it: save_pretrained writes safetensors"


def _walk(root: Path) -> Iterator[str]:
    def visit(folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[str]:
        try:
            real = folder.resolve(strict=True)
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except (OSError, RuntimeError) as error:
            raise FormatError(folder, f"cannot be listed: {error}") from error
        if real in above:
            raise FormatError(folder, "is a symbolic link to a folder above it")
        for entry in entries:
            name = prefix + entry.name
            if name in SKIPPED_FOLDERS or entry.name == ".git":
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError as error:
                raise FormatError(folder / entry.name, f"cannot be read: {error.strerror}") from error
            if is_folder:
                yield from visit(folder / entry.name, name + "/", (*above, real))
            elif is_file:
                if not is_safe_path(name):
                    raise FormatError(folder / entry.name, "has a name that other systems cannot hold")
                yield name
            else:
                raise FormatError(
                    folder / entry.name, "is neither a file nor a folder (a broken or looping link?)"
                )

    return visit(root, "", ())


def index_files(checkpoint: Checkpoint) -> list[str]:
    """The JSON files that map tensors to shards, such as model.safetensors.index.json."""
    return [
        f
        for f in checkpoint.others
        if f.endswith(".json") and ".safetensors.index." in f and not f.startswith(OWN_FOLDER + "/")
    ]


def read_weight_map(checkpoint: Checkpoint, index: str) -> dict[str, str]:
    """The weight_map of an index file: tensor -> shard, a path inside the index's folder."""
    path = checkpoint.root / index
    document = parse_json(path.read_bytes(), path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(path, "not an object", field="weight_map")
    folder = _folder(index)
    for tensor, shard in weight_map.items():
        if not is_safe_path(shard):
            raise FormatError(path, f"{shard!r} leaves the folder", tensor=tensor, field="weight_map")
        if folder + shard not in checkpoint.weights:
            raise FormatError(path, f"the shard {shard!r} is missing", tensor=tensor, field="weight_map")
    return weight_map


def rewritten_index(checkpoint: Checkpoint, index: str, records: dict[str, dict[str, TensorRecord]]) -> bytes:
    """An index file for the compressed shards: streams in place of the tensors that have them.

    `records[file][tensor]` says how a tensor is stored.
    """
    document = parse_json((checkpoint.root / index).read_bytes(), index)
    weight_map: dict[str, str] = {}
    for tensor, shard in document["weight_map"].items():
        record = records[_folder(index) + shard].get(tensor)
        if record is not None and record.scheme == "alias":
            continue
        streams = record.streams if record is not None else {}
        weight_map |= {stream_name(tensor, s): shard for s in streams} or {tensor: shard}
    return _pretty(document | {"weight_map": weight_map})


def config_files(checkpoint: Checkpoint) -> list[str]:
    """Every config.json that lies beside weights."""
    folders = {_folder(w) for w in checkpoint.weights}
    return [
        f"{folder}config.json" for folder in sorted(folders) if f"{folder}config.json" in checkpoint.others
    ]


def rewritten_config(checkpoint: Checkpoint, config: str, lossless: bool) -> bytes:
    """A config.json that says how its weights are stored, in the words of transformers."""
    path = checkpoint.root / config
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(path, f"the JSON is broken: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(path, "not a JSON object")
    how: dict[str, Any] = {"quant_method": "neuzip", "version": VERSION, "lossless": lossless}
    if "quantization_config" in document:
        how["original"] = document["quantization_config"]
    return _pretty(document | {"quantization_config": how})


@dataclass(frozen=True)
class StoredFile:
    """How a file of the original is stored: as a `container`, `carried` unchanged, or `rewritten`.

    Size and xxh3-64 are the original's; a container has checksums of its own.
    """

    kind: str
    nbytes: int | None = None
    checksum: str | None = None


def stored_files_to_json(files: dict[str, StoredFile]) -> bytes:
    """The folder's manifest."""
    entries: dict[str, dict[str, object]] = {}
    for path, file in sorted(files.items()):
        entries[path] = {"kind": file.kind}
        if file.kind != "container":
            entries[path] |= {"bytes": file.nbytes, "checksum": file.checksum}
    return _pretty({"version": VERSION, "files": entries})


def read_stored_files(root: Path) -> dict[str, StoredFile]:
    """Read and check a compressed folder's manifest. Raises FormatError."""
    path = root / MANIFEST_PATH
    try:
        document = parse_json(path.read_bytes(), path)
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from error
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise FormatError(path, "not an object with files")
    if document.get("version") != VERSION:
        raise FormatError(
            path, f"format version {document.get('version')!r}; this neuzip reads version {VERSION}",
            field="version", hint="update neuzip to read it",
        )  # fmt: skip
    check_requirements(document, path)
    files = {}
    for name, entry in document["files"].items():
        if not is_safe_path(name) or name.startswith(OWN_FOLDER + "/"):
            raise FormatError(path, f"{name!r} is not a path inside the folder", field="files")
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if kind not in ("container", "carried", "rewritten"):
            raise FormatError(path, f"{kind!r} is not a kind of file", tensor=name, field="kind")
        if kind == "container":
            files[name] = StoredFile(kind)
            continue
        nbytes, check = entry.get("bytes"), entry.get("checksum")
        if type(nbytes) is not int or not isinstance(check, str):
            raise FormatError(path, f"the file {name!r} lacks bytes or checksum", field="files")
        files[name] = StoredFile(kind, nbytes, check)
    return files


def file_checksum(path: Path) -> str:
    """xxh3-64 of a file's content."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _folder(path: str) -> str:
    """The folder of a relative path, with its slash, or nothing."""
    return path[: path.rfind("/") + 1]


def _pretty(document: object) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
