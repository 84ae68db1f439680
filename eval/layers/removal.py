"""A checkpoint without some of its layers: a plain one that transformers loads as any other.

What is left keeps its bytes; layers get new numbers, in the names of tensors and in config.json. Whether a
config can say what the layers left are is not known beforehand: which layer has experts, a sliding window or
no rotary embedding may follow from its number. So the model of the new config is laid out, without values,
and compared with the old one, module by module.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from neuzip.compress.folder_checks import verify_files
from neuzip.compress.overwrite_guard import require_free
from neuzip.compress.pieces import Bytes
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.tensor_checks import check_tensors
from neuzip.compress.workers import Workers, default_jobs
from neuzip.compress.workspace import (
    clear,
    copy_file,
    make_folder,
    partial_name,
    permissions,
    publish,
    recover,
    require_space,
    workspace,
    write_file,
    writing,
)
from neuzip.errors import NeuzipError
from neuzip.eval.layers.removal_config import (
    json_object,
    laid_out,
    new_config,
    refuse_named_layers,
    require_the_same,
)
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, OWN_FOLDER, PICKLES, Checkpoint, index_files
from neuzip.formats.safetensors_file import opener
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.model_files import INDEX, indexed_shards

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Pruned:
    """A checkpoint that was written without some layers.

    dropped, remaining    numbers of layers of the original
    source_bytes, bytes   of the weights of the original, and of those written
    """

    dst: Path
    dropped: tuple[int, ...]
    remaining: tuple[int, ...]
    source_bytes: int
    bytes: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `neuzip layers --json` prints."""
        fields = asdict(self)
        return {"kept" if key == "remaining" else key: value for key, value in fields.items()}


def kept_ranges(layers: int, dropped: Sequence[int]) -> list[tuple[int, int]]:
    """The layers that stay, as ranges [first, end).

    >>> kept_ranges(8, [2, 3, 6])
    [(0, 2), (4, 6), (7, 8)]
    """
    gone = set(dropped)
    runs = groupby(range(layers), key=lambda n: n in gone)
    ranges = [list(run) for is_gone, run in runs if not is_gone]
    return [(run[0], run[-1] + 1) for run in ranges]


def mergekit_yaml(model: str, layers: int, dropped: Sequence[int], dtype: str) -> str:
    """A recipe for mergekit that makes the same model of `model`, a path or Hub id."""
    name = json.dumps(model)  # a YAML string as well
    slices = "".join(
        f"  - sources:\n      - model: {name}\n        layer_range: [{first}, {end}]\n"
        for first, end in kept_ranges(layers, dropped)
    )
    return f"slices:\n{slices}merge_method: passthrough\ndtype: {dtype}\n"


def remove_layers(
    src: str | os.PathLike[str],
    dst: Path,
    dropped: Sequence[int],
    *,
    overwrite: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> Pruned:
    """Write a checkpoint folder, plain or compressed, without these layers, as a plain one.

    Shards stay as they are cut, but those of which nothing is left; all else that lies in the folder is
    copied. `on_bytes` is told of bytes of weights read. Raises NeuzipError, before anything is written, for a
    model that its config cannot describe without these layers.
    """
    with FolderSource(src) as source, Workers(default_jobs()) as workers:
        checkpoint = source.checkpoint
        require_free(checkpoint.path, dst, overwrite)
        verify_files(source)
        plan = _plan(source, sorted(set(dropped)))
        require_space(dst, sum(t.info.nbytes for tensors in plan.files.values() for t, _ in tensors))
        recover(dst)
        with workspace(dst, checkpoint.root) as work:
            clear(work, overwrite)
            with writing(work):
                for file, tensors in plan.files.items():
                    _write_weights(source, file, tensors, work / file, workers, on_bytes)
                for name, data in plan.documents.items():
                    like = checkpoint.root / name
                    write_file(work / name, data, like if like.is_file() else None)
                for name in plan.carried:
                    copy_file(checkpoint.root / name, work / name)
            publish(work, dst)
        return Pruned(
            dst,
            tuple(sorted(set(dropped))),
            plan.remaining,
            sum(t.info.nbytes for file in plan.read for t in source.tensors(file)),
            sum(t.info.nbytes for tensors in plan.files.values() for t, _ in tensors),
            tuple(plan.warnings),
        )


def require_removable(source: FolderSource, dropped: Sequence[int]) -> None:
    """Raise NeuzipError for layers that `remove_layers` cannot leave out."""
    _plan(source, sorted(set(dropped)))


def tensors_by_layer(source: FolderSource) -> dict[str, int]:
    """The number of the layer that a tensor is of, by its name; those of no layer are not in it."""
    checkpoint = source.checkpoint
    prefix = _prefix(source, laid_out(load_config(checkpoint), checkpoint.path))
    return {
        t.name: int(t.name[len(prefix) :].partition(".")[0])
        for t in source.tensors()
        if t.name.startswith(prefix)
    }


@dataclass(frozen=True)
class _Plan:
    """The files to write: tensors with their new names by file, rewritten documents, copied files."""

    remaining: tuple[int, ...]
    read: tuple[str, ...]
    files: dict[str, list[tuple[SourceTensor, str]]]
    documents: dict[str, bytes]
    carried: tuple[str, ...]
    warnings: list[str]


def _plan(source: FolderSource, dropped: Sequence[int]) -> _Plan:
    checkpoint = source.checkpoint
    warnings: list[str] = []
    config = load_config(checkpoint)
    old = laid_out(config, checkpoint.path)
    layers = len(decoder_layers(old))
    if not dropped or not set(dropped) < set(range(layers)):
        raise NeuzipError(
            f"{checkpoint.path}: layers {list(dropped)} cannot be dropped: it has layers 0 to {layers - 1}",
            "name some of them, and not all",
        )
    remaining = tuple(n for n in range(layers) if n not in dropped)
    document = new_config(checkpoint, config, remaining, warnings)
    require_the_same(checkpoint.path, old, config, document, remaining)
    read, index = _weight_files(checkpoint)
    prefix = _prefix(source, old)
    refuse_named_layers(checkpoint.path, document, prefix)
    files = {
        file: [(t, name) for t in source.tensors(file) if (name := _renamed(t.name, prefix, remaining))]
        for file in read
    }
    files = {file: tensors for file, tensors in files.items() if tensors}
    documents = {"config.json": _pretty(document)}
    if index is not None:
        documents[INDEX] = _pretty(_new_index(checkpoint.root / index, files))
    warnings += [f"{f}: is no part of the model, and left out" for f in checkpoint.weights if f not in read]
    if source.is_compressed:
        warnings.append("what is written is plain: neuzip compress makes it small again")
    indices = {*index_files(checkpoint), *checkpoint.unread}
    others = [f for f in checkpoint.others if f not in indices and f.split("/")[0] != OWN_FOLDER]
    warnings += [f"{f}: a pickle, not carried along" for f in others if f.endswith(PICKLES)]
    carried = [f for f in others if f != "config.json" and not f.endswith(PICKLES)]
    return _Plan(remaining, tuple(read), files, documents, tuple(carried), warnings)


def _weight_files(checkpoint: Checkpoint) -> tuple[list[str], str | None]:
    """The files that transformers would load, and the index that names them, if they are several."""
    if "model.safetensors" in checkpoint.weights:
        return ["model.safetensors"], None
    for index in (f"{ORIGINAL_FOLDER}/{INDEX}", INDEX):
        if index in checkpoint.others:
            return indexed_shards(checkpoint, index), index
    raise NeuzipError(f"{checkpoint.path}: has neither model.safetensors nor {INDEX}")


def _prefix(source: TensorSource, model: PreTrainedModel) -> str:
    """The prefix of a layer's number in names of tensors. Raises NeuzipError if it is ambiguous."""
    stack = decoder_layers(model)
    path = next(name for name, module in model.named_modules() if module is stack)
    return _stored_prefix(source, _weight_files(source.checkpoint)[0], path, len(stack))


def _stored_prefix(source: TensorSource, files: Sequence[str], path: str, layers: int) -> str:
    """The prefix of a layer's number in stored names, which may leave out a part of the path.

    Raises NeuzipError where it is not clear.
    """
    last = path.rpartition(".")[2]
    pattern = re.compile(rf"((?:\w+\.)*?{re.escape(last)}\.)(\d+)\.")
    numbers: dict[str, set[int]] = {}
    for file in files:
        for tensor in source.tensors(file):
            if match := pattern.match(tensor.name):
                numbers.setdefault(match[1], set()).add(int(match[2]))
    fitting = [prefix for prefix, known in numbers.items() if known == set(range(layers))]
    exact = [prefix for prefix in fitting if f"{path}.".endswith(prefix) or prefix.endswith(f"{path}.")]
    chosen = exact if len(fitting) > 1 else fitting
    if len(chosen) != 1:
        raise NeuzipError(
            f"{source.checkpoint.path}: it is not clear which tensors the {layers} layers of {path} have",
            "neuzip inspect shows their names",
        )
    return chosen[0]


def _renamed(name: str, prefix: str, remaining: Sequence[int]) -> str | None:
    """The name of a tensor in the new checkpoint; None where its layer is dropped.

    >>> _renamed("model.layers.3.experts.2.weight", "model.layers.", [0, 3])
    'model.layers.1.experts.2.weight'
    """
    if not name.startswith(prefix):
        return name
    number, _, rest = name[len(prefix) :].partition(".")
    return f"{prefix}{remaining.index(int(number))}.{rest}" if int(number) in remaining else None


def _write_weights(
    source: FolderSource,
    file: str,
    tensors: Sequence[tuple[SourceTensor, str]],
    target: Path,
    workers: Workers,
    on_bytes: OnBytes,
) -> None:
    """A safetensors file of these tensors under their new names, in the order in which they lay."""
    header: dict[str, Any] = {}
    if metadata := source.header(file).metadata:
        header["__metadata__"] = metadata
    places: dict[str, int] = {}
    at = 0
    for tensor, name in tensors:
        info = tensor.info
        header[name] = {
            "dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + info.nbytes],
        }  # fmt: skip
        places[info.name] = at
        at += info.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    original = source.checkpoint.root / file
    make_folder(target.parent, original.parent)
    temporary = partial_name(target)
    with open(temporary, "wb", opener=opener(permissions(original))) as out:
        out.write(raw)
        out.truncate(len(raw) + at)
        out.flush()

        def keep(tensor: SourceTensor, start: int, data: Bytes) -> None:
            _write_at(out.fileno(), len(raw) + places[tensor.name] + start, data)

        checked = check_tensors(source, [t for t, _ in tensors], workers, on_bytes=on_bytes, keep=keep)
        for _ in checked:
            pass
        os.fsync(out.fileno())
    os.replace(temporary, target)


def _write_at(descriptor: int, offset: int, data: Bytes) -> None:
    view, done = data.data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _new_index(path: Path, files: dict[str, list[tuple[SourceTensor, str]]]) -> dict[str, Any]:
    document = json_object(path)
    tensors = [(t, name, file) for file, of_file in files.items() for t, name in of_file]
    sizes: dict[str, int] = {"total_size": sum(t.info.nbytes for t, _, _ in tensors)}
    metadata = document.get("metadata")
    if isinstance(metadata, dict):
        if "total_parameters" in metadata:
            sizes["total_parameters"] = sum(t.info.numel for t, _, _ in tensors)
        sizes = metadata | sizes
    weight_map = {name: file for _, name, file in tensors}
    return document | {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))}


def _pretty(document: object) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
