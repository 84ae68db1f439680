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
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.config_section import with_entry
from neuzip.formats.hub.ids import did_you_mean
from neuzip.formats.safetensors_file import MAX_HEADER, parse_json

from .manifest import VERSION, check_requirements
from .records import DELTA, QUANTIZED, Record, is_checksum, is_safe_path

OWN_FOLDER = "neuzip"
MANIFEST_PATH = f"{OWN_FOLDER}/manifest.json"
ORIGINAL_FOLDER = f"{OWN_FOLDER}/original"

WEIGHTS_KEY = "transformers_weights"
NOT_A_FILE = (
    "compressed by neuzip: it loads where neuzip-toolkit is installed, and `neuzip decompress` restores it"
)
"""What a compressed config.json has there: transformers' error ends with it where neuzip is not installed."""

SKIPPED_FOLDERS = (".git", ".cache/huggingface")
FOREIGN = {
    ".gguf": "GGUF, which neuzip writes but does not read",
    ".ggml": "GGML, which neuzip does not read",
    ".onnx": "ONNX, which neuzip does not read",
    ".h5": "HDF5, which neuzip does not read",
    ".keras": "a Keras archive, which neuzip does not read",
    ".msgpack": "a msgpack of Flax, which neuzip does not read",
    ".npz": "an archive of NumPy, which neuzip does not read",
    ".npy": "an array of NumPy, which neuzip does not read",
    ".tflite": "TFLite, which neuzip does not read",
    ".mlpackage": "Core ML, which neuzip does not read",
}
"""Formats of weights that people give by mistake, by suffix."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CHUNK = 1 << 24
MAX_DEPTH = 32
MAX_ENTRIES = 100_000
"""Folders below each other, and files and folders in all: links can make a small folder look endless."""


@dataclass(frozen=True)
class Checkpoint:
    """The files of a plain or compressed checkpoint: relative paths with forward slashes, in sorted order.

    `root` is the folder, or the folder of the single file. `unread` are indices among the others that name
    shards which are not here, beside weights that are taken without them.
    """

    path: Path
    root: Path
    weights: tuple[str, ...]
    others: tuple[str, ...]
    unread: tuple[str, ...] = ()

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
    try:
        exists, is_file = path.exists(), path.is_file()
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}") from error
    if not exists:
        raise NeuzipError(
            f"{path}: no such file or folder",
            did_you_mean(str(path)) or "give a folder, a .safetensors file or a Hub id",
        )
    if is_file:
        if path.suffix in PICKLES:
            raise FormatError(path, "is a pickle, which can run code when it is loaded", hint=_CONVERT)
        if path.suffix in FOREIGN:
            raise _refusal_of(path)
        if path.suffix != ".safetensors":
            raise FormatError(path, "is not a .safetensors file", hint=_FILES)
        return Checkpoint(path, path.parent, (path.name,), ())
    if not path.is_dir():
        raise FormatError(path, "is neither a file nor a folder")
    files = sorted(_walk(path))
    weights = tuple(f for f in files if f.endswith(".safetensors"))
    if not weights:
        pickles = [f for f in files if f.endswith(PICKLES)]
        if pickles:
            raise FormatError(
                path / pickles[0], "is a pickle, and there are no .safetensors files", hint=_CONVERT
            )
        if MANIFEST_PATH in files:
            raise NeuzipError(
                f"{path}: was compressed, but its .safetensors files are gone", "copy or pull all of it again"
            )
        if any(_INDEX.search(f) for f in files):
            raise NeuzipError(f"{path}: there are no .safetensors files, but an index of some", _INCOMPLETE)
        if foreign := [f for f in files if f.endswith(tuple(FOREIGN))]:
            raise _refusal_of(path / foreign[0])
        raise NeuzipError(f"{path}: there are no .safetensors files", "is this the right folder?")
    others = tuple(f for f in files if not f.endswith(".safetensors"))
    return with_indices(Checkpoint(path, path, weights, others))


def with_indices(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose indices were read: which are left `unread`. Raises FormatError for a shard missing.

    transformers takes `model.safetensors` where it is, and never opens an index beside it; diffusers takes
    the variant that it is asked for.
    """
    unread = []
    for index in index_files(checkpoint):
        shards = _shards(checkpoint, index)
        if not shards <= frozenset(checkpoint.weights) and _is_beside_weights(checkpoint, index, shards):
            unread.append(index)
        else:
            read_weight_map(checkpoint, index)
    return replace(checkpoint, unread=tuple(unread))


def _shards(checkpoint: Checkpoint, index: str) -> frozenset[str]:
    """The files that an index names. Raises FormatError for what is no index."""
    path = checkpoint.root / index
    document = parse_json(_read_limited(path), path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(path, "not an object", field="weight_map")
    return frozenset(_folder(index) + str(shard) for shard in weight_map.values())


def _is_beside_weights(checkpoint: Checkpoint, index: str, shards: frozenset[str]) -> bool:
    """Whether the weights of an index are there as one file, or in another variant and no shard of it."""
    match = _INDEX.search(index)
    assert match is not None
    stem, variant = index[: match.start()], match["variant"]
    dotted = "" if variant is None else f".{variant}"
    if f"{stem}{dotted}.safetensors" in checkpoint.weights:
        return True
    if shards & frozenset(checkpoint.weights):
        return False
    form = re.compile(rf"{re.escape(stem)}(\.[^./-]+)?(-\d+-of-\d+)?(\.[^./-]+)?\.safetensors")
    matches = [match for f in checkpoint.weights if (match := form.fullmatch(f))]
    return any((match[1] or match[3] or "") != dotted for match in matches)


def _refusal_of(path: Path) -> FormatError:
    return FormatError(path, f"is {FOREIGN[path.suffix]}", hint=_ORIGINAL)


_INCOMPLETE = "if it is a download, it is incomplete: neuzip pull REPO_ID brings all of it"
_FILES = "neuzip reads .safetensors files, and folders and Hub repositories that hold some"
_ORIGINAL = "give the original checkpoint, or convert it to safetensors"
_CONVERT = "load the model with transformers where you trust it: save_pretrained writes safetensors"


_INDEX = re.compile(r"\.safetensors\.index(\.(?P<variant>[^/]+))?\.json\Z")


def _walk(root: Path) -> Iterator[str]:
    seen = 0

    def visit(folder: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
        nonlocal seen
        try:
            status = folder.stat()
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError as error:
            raise FormatError(folder, f"cannot be listed: {error.strerror}") from error
        real = status.st_dev, status.st_ino
        if real in above:
            raise FormatError(folder, "is a symbolic link to a folder above it")
        if len(above) > MAX_DEPTH:
            raise FormatError(root, f"has folders more than {MAX_DEPTH} deep")
        for entry in entries:
            seen += 1
            if seen > MAX_ENTRIES:
                raise FormatError(root, f"has more than {MAX_ENTRIES} files and folders")
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


def linked_from_outside(checkpoint: Checkpoint) -> list[str]:
    """Files of a folder that links fetch from outside of it, but for those of huggingface_hub's cache.

    The cache is made of links from snapshots/COMMIT to blobs beside it.
    """
    if checkpoint.is_file:
        return []
    root = checkpoint.root.resolve()
    inside = {root, *(p.parent / "blobs" for p in root.parents if p.name == "snapshots")}
    files = sorted((*checkpoint.weights, *checkpoint.others))
    return [f for f in files if inside.isdisjoint((checkpoint.root / f).resolve().parents)]


def index_files(checkpoint: Checkpoint) -> list[str]:
    """The JSON files that map tensors to shards: *.safetensors.index.json, or with a variant before .json.

    Without those that are `unread`.
    """
    own = OWN_FOLDER + "/"
    unread = checkpoint.unread
    return [f for f in checkpoint.others if _INDEX.search(f) and not f.startswith(own) and f not in unread]


def read_weight_map(checkpoint: Checkpoint, index: str) -> dict[str, str]:
    """The weight_map of an index file: tensor -> shard, a path inside the index's folder."""
    path = checkpoint.root / index
    document = parse_json(_read_limited(path), path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(path, "not an object", field="weight_map")
    folder, weights = _folder(index), frozenset(checkpoint.weights)
    for tensor, shard in weight_map.items():
        if not is_safe_path(shard):
            raise FormatError(path, f"{shard!r} leaves the folder", tensor=tensor, field="weight_map")
        if folder + shard not in weights:
            raise FormatError(
                path, f"the shard {shard!r} is missing", tensor=tensor, field="weight_map", hint=_INCOMPLETE
            )
    return weight_map


def rewritten_index(checkpoint: Checkpoint, index: str, records: dict[str, dict[str, Record]]) -> bytes:
    """An index file for the compressed shards: streams in place of the tensors that have them.

    `records[file][tensor]` says how a tensor is stored.
    """
    path = checkpoint.root / index
    document = parse_json(_read_limited(path), path)
    weight_map: dict[str, str] = {}
    for tensor, shard in read_weight_map(checkpoint, index).items():
        record = records[_folder(index) + shard].get(tensor)
        entries = [tensor] if record is None else record.entries(tensor)
        weight_map |= dict.fromkeys(entries, shard)
    return to_json(document | {"weight_map": weight_map}, path)


def config_files(checkpoint: Checkpoint) -> list[str]:
    """Every config.json that lies beside weights."""
    folders = {_folder(w) for w in checkpoint.weights}
    return [
        f"{folder}config.json" for folder in sorted(folders) if f"{folder}config.json" in checkpoint.others
    ]


def adapter_files(checkpoint: Checkpoint) -> list[str]:
    """The weight files that peft reads: adapter_model.safetensors beside an adapter_config.json."""
    return [
        w
        for w in checkpoint.weights
        if w == f"{_folder(w)}adapter_model.safetensors"
        and f"{_folder(w)}adapter_config.json" in checkpoint.others
    ]


def rewritten_config(
    checkpoint: Checkpoint, config: str, lossless: bool, activations: str | None = None
) -> bytes:
    """A config.json that says how its weights are stored, in the words of transformers.

    transformers without neuzip warns of the `quant_method` and goes on; what is in `transformers_weights` it
    takes for the name of a file, and refuses one with this ending. And in ours the config.json says how
    `activations` are to be quantised where weights are ternary (runtime/activations.py).
    """
    path = checkpoint.root / config
    document = read_lenient(path)
    how: dict[str, Any] = {"quant_method": "neuzip", "version": VERSION, "lossless": lossless}
    if "quantization_config" in document:
        how["original"] = document["quantization_config"]
    if WEIGHTS_KEY in document:
        how[WEIGHTS_KEY] = document[WEIGHTS_KEY]
    if activations is not None:
        document = with_entry(document, "activations", activations, path)
    return to_json(document | {"quantization_config": how, WEIGHTS_KEY: NOT_A_FILE}, path)


def read_lenient(path: Path) -> dict[str, Any]:
    """The object in a JSON file, with what Python reads beyond JSON. Raises FormatError."""
    try:
        document = json.loads(_read_limited(path))
    except RecursionError as error:
        raise FormatError(path, "the JSON is nested too deeply") from error
    except ValueError as error:
        raise FormatError(path, f"the JSON is broken: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(path, "not a JSON object")
    return document


@dataclass(frozen=True)
class StoredFile:
    """How a file of the original is stored: as a `container`, `carried` unchanged, or `rewritten`.

    Size and xxh3-64 are the original's; a container has checksums of its own.
    """

    kind: str
    nbytes: int | None = None
    checksum: str | None = None

    @property
    def is_container(self) -> bool:
        """Whether the file is stored as a container."""
        return self.checksum is None

    @property
    def is_rewritten(self) -> bool:
        """Whether another file stands under the original's name, and the original below neuzip/original."""
        return self.kind == "rewritten"

    def place(self, path: str) -> str:
        """Where in a compressed folder the bytes of the file `path` stand, as they are or compressed."""
        return f"{ORIGINAL_FOLDER}/{path}" if self.is_rewritten else path


def stored_files_to_json(
    files: dict[str, StoredFile], base: str | None = None, features: Collection[str | None] = ()
) -> bytes:
    """The folder's manifest; of a delta if it has a `base`, which is what people call that checkpoint.

    `features` are what the records of its containers require of a reader. Only some of them concern folders.
    """
    entries: dict[str, dict[str, object]] = {}
    for path, file in sorted(files.items()):
        entries[path] = {"kind": file.kind}
        if not file.is_container:
            entries[path] |= {"bytes": file.nbytes, "checksum": file.checksum}
    required = [*([] if base is None else [DELTA]), *([QUANTIZED] if QUANTIZED in features else [])]
    requires = {"requires": required} if required else {}
    delta = {} if base is None else {"base": {"name": base}}
    return to_json({"version": VERSION, **requires, **delta, "files": entries}, MANIFEST_PATH)


def required_features(checkpoint: Checkpoint) -> list[str]:
    """What the manifest of a compressed folder requires of its reader. Raises FormatError."""
    path = checkpoint.root / MANIFEST_PATH
    return check_requirements(_folder_manifest(path, delta=True), path, delta=True)


def base_name(checkpoint: Checkpoint) -> str | None:
    """What the base of a delta folder was called; None for other checkpoints. Raises FormatError."""
    if not checkpoint.is_compressed_folder:
        return None
    path = checkpoint.root / MANIFEST_PATH
    if DELTA not in required_features(checkpoint):
        return None
    document = _folder_manifest(path, delta=True)
    base = document.get("base")
    name = base.get("name") if isinstance(base, dict) else None
    if not isinstance(name, str):
        raise FormatError(path, "a delta has an object with the name of its base here", field="base")
    return name


def read_stored_files(root: Path, *, delta: bool = False) -> dict[str, StoredFile]:
    """Read and check a compressed folder's manifest: a delta's only if `delta`. Raises FormatError."""
    path = root / MANIFEST_PATH
    document = _folder_manifest(path, delta=delta)
    files = {}
    for name, entry in document["files"].items():
        if not is_safe_path(name) or name.startswith(OWN_FOLDER + "/"):
            raise FormatError(path, f"{name!r} is not a path inside the folder", field="files")
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if kind not in ("container", "carried", "rewritten"):
            raise FormatError(path, f"{kind!r} is not a kind of file (of {name!r})", field="kind")
        if kind == "container":
            if not name.endswith(".safetensors"):
                raise FormatError(path, f"{name!r} cannot be a container", field="kind")
            files[name] = StoredFile(kind)
            continue
        nbytes, check = entry.get("bytes"), entry.get("checksum")
        if type(nbytes) is not int or nbytes < 0 or not isinstance(check, str) or not is_checksum(check):
            raise FormatError(path, f"the file {name!r} lacks a valid bytes or checksum", field="files")
        files[name] = StoredFile(kind, nbytes, check)
    return files


def _folder_manifest(path: Path, *, delta: bool) -> dict[str, Any]:
    document = parse_json(_read_limited(path), path)
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise FormatError(path, "not an object with files")
    version = document.get("version")
    if version != VERSION or type(version) is not int:
        raise FormatError(
            path, f"format version {version!r}; this neuzip reads version {VERSION}",
            field="version", hint="update neuzip to read it",
        )  # fmt: skip
    check_requirements(document, path, delta=delta)
    return document


def file_checksum(path: Path) -> str:
    """xxh3-64 of a file's content."""
    digest = xxhash.xxh3_64()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _read_limited(path: Path) -> bytes:
    """A JSON file's content, which may be as long as a safetensors header."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_HEADER + 1)
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from error
    if len(text) > MAX_HEADER:
        raise FormatError(path, f"has more than {MAX_HEADER} bytes, which is no sensible JSON")
    return text


def _folder(path: str) -> str:
    """The folder of a relative path, with its slash, or nothing."""
    return path[: path.rfind("/") + 1]


def to_json(document: object, file: str | os.PathLike[str]) -> bytes:
    """A JSON file as neuzip writes it in a folder; `file` is named where that is not possible."""
    try:
        return (json.dumps(document, indent=2) + "\n").encode()
    except RecursionError as error:
        raise FormatError(file, "the JSON is nested too deeply") from error
