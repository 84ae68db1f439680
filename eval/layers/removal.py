"""A checkpoint without some of its layers: a plain one that transformers loads as any other.

What is left keeps its bytes; layers get new numbers, in the names of tensors and in config.json. Whether a
config can say what the layers left are is not known beforehand: which layer has experts, a sliding window or
no rotary embedding may follow from its number. So the model of the new config is laid out, without values,
and compared with the old one, module by module.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

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
from neuzip.errors import FormatError, NeuzipError, is_out_of_memory
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, OWN_FOLDER, PICKLES, Checkpoint, index_files
from neuzip.formats.config_section import SECTION, own_section, read_config
from neuzip.formats.safetensors_file import opener, parse_json
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.load import skeleton_of
from neuzip.runtime.hf.messages import quiet_transformers
from neuzip.runtime.hf.model_files import INDEX, indexed_shards

NOTE = "dropped_layers"
"""Key of the dropped layers in our section of config.json."""

BY_LAYER = (
    "activation_sparsity_pattern", "block_types", "indexer_types", "intermediate_size", "kv_sharing_modes",
    "layer_rope_theta", "layer_types", "layers_block_type", "layers_num_experts", "mlp_layer_types",
    "no_rope_layers", "num_attention_heads", "num_key_value_heads", "per_layer_config", "swiglu_limits",
    "swiglu_limits_shared",
)  # fmt: skip
"""Entries of a config that, if they are lists, have an element per layer."""

NUMBERS = ("mlp_only_layers", "moe_layers", "rope_scaling_layers")
"""Entries that list numbers of layers."""

FIRST_FEW = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
"""Entries that say up to which layer something holds."""

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
    prefix = _prefix(source, _laid_out(load_config(checkpoint), checkpoint.path))
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
    old = _laid_out(config, checkpoint.path)
    layers = len(decoder_layers(old))
    if not dropped or not set(dropped) < set(range(layers)):
        raise NeuzipError(
            f"{checkpoint.path}: layers {list(dropped)} cannot be dropped: it has layers 0 to {layers - 1}",
            "name some of them, and not all",
        )
    remaining = tuple(n for n in range(layers) if n not in dropped)
    document = _new_config(checkpoint, config, remaining, warnings)
    _require_the_same(checkpoint.path, old, config, document, remaining)
    read, index = _weight_files(checkpoint)
    prefix = _prefix(source, old)
    _refuse_named_layers(checkpoint.path, document, prefix)
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


# Tensors


def _weight_files(checkpoint: Checkpoint) -> tuple[list[str], str | None]:
    """The files that transformers would load, and the index that names them, if they are several."""
    if "model.safetensors" in checkpoint.weights:
        return ["model.safetensors"], None
    for index in (f"{ORIGINAL_FOLDER}/{INDEX}", INDEX):
        if index in checkpoint.others:
            return indexed_shards(checkpoint, index), index
    raise NeuzipError(f"{checkpoint.path}: has neither model.safetensors nor {INDEX}")


def _prefix(source: FolderSource, model: PreTrainedModel) -> str:
    """The prefix of a layer's number in names of tensors. Raises NeuzipError if it is ambiguous."""
    stack = decoder_layers(model)
    path = next(name for name, module in model.named_modules() if module is stack)
    return _stored_prefix(source, _weight_files(source.checkpoint)[0], path, len(stack))


def _stored_prefix(source: FolderSource, files: Sequence[str], path: str, layers: int) -> str:
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
    document = _object(path)
    tensors = [(t, name, file) for file, of_file in files.items() for t, name in of_file]
    sizes: dict[str, int] = {"total_size": sum(t.info.nbytes for t, _, _ in tensors)}
    metadata = document.get("metadata")
    if isinstance(metadata, dict):
        if "total_parameters" in metadata:
            sizes["total_parameters"] = sum(t.info.numel for t, _, _ in tensors)
        sizes = metadata | sizes
    weight_map = {name: file for _, name, file in tensors}
    return document | {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))}


# The config


def _new_config(
    checkpoint: Checkpoint, config: PreTrainedConfig, remaining: Sequence[int], warnings: list[str]
) -> dict[str, Any]:
    """config.json with the layers that stay, and a note of those that do not."""
    path = checkpoint.root / "config.json"
    root = read_config(path)
    document = root
    if f"{ORIGINAL_FOLDER}/config.json" in checkpoint.others:
        document = read_config(checkpoint.root / ORIGINAL_FOLDER / "config.json")
    document = copy.deepcopy(document)
    text = config.get_text_config(decoder=True)
    _take_out_layers(_section_of(document, config, text), text, remaining)
    layers = text.num_hidden_layers
    own = {**own_section(document, path), **own_section(root, path)}
    attention = own.get("attention")
    if isinstance(attention, dict) and isinstance(attention.get("layers"), list):
        own["attention"] = attention | {"layers": [attention["layers"][n] for n in remaining]}
    if own.pop("activations", None) is not None:
        warnings.append(
            "config.json says how activations of ternary layers are quantised: this is not carried along"
        )
    earlier = own.get(NOTE)
    gone = [n for n in range(layers) if n not in remaining]
    own[NOTE] = [*(earlier if isinstance(earlier, list) else []), {"layers": gone, "of": layers}]
    return document | {SECTION: own}


def _section_of(document: dict[str, Any], config: PreTrainedConfig, text: PreTrainedConfig) -> dict[str, Any]:
    """The part of a config.json that the decoder's config is of. Raises NeuzipError if it is not found."""
    if text is config:
        return document
    for name, part in vars(config).items():
        if part is text:
            section = document.setdefault(name, {})
            if isinstance(section, dict):
                return section
    raise NeuzipError(f"{config.name_or_path}: config.json does not say where its decoder is described")


def _take_out_layers(section: dict[str, Any], config: PreTrainedConfig, remaining: Sequence[int]) -> None:
    """Write what a config says of the layers that stay. What it derives from their number is written too."""
    layers = config.num_hidden_layers
    section[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(remaining)
    for name in BY_LAYER:
        values = getattr(config, name, None)
        if isinstance(values, list | tuple) and len(values) == layers:
            section[name] = [values[n] for n in remaining]
    for name in NUMBERS:
        numbers = getattr(config, name, None)
        if isinstance(numbers, list | tuple) and numbers:
            section[name] = [remaining.index(n) for n in numbers if n in remaining]
    for name in FIRST_FEW:
        bound = getattr(config, name, None)
        if isinstance(bound, int) and 0 < bound < layers:
            section[name] = sum(n < bound for n in remaining)
    if hasattr(config, "kept_layers") and hasattr(config, "trained_layers"):  # see runtime/norm_placement
        section["kept_layers"] = [(config.kept_layers or range(layers))[n] for n in remaining]
        section["trained_layers"] = config.trained_layers or layers


def _refuse_named_layers(path: Path, document: dict[str, Any], prefix: str) -> None:
    """Raise NeuzipError where a config says by name which layers are quantised."""
    named = json.dumps(document.get("quantization_config"))
    if re.search(rf"{re.escape(prefix)}\d", named):
        raise NeuzipError(
            f"{path}: quantization_config of its config.json names single layers",
            "drop layers of the model that it was made of, and quantise what comes out",
        )


def _laid_out(config: PreTrainedConfig, path: Path) -> PreTrainedModel:
    """The model of a config, without values. Raises NeuzipError where transformers cannot make it."""
    try:
        with quiet_transformers():
            return skeleton_of(config)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NeuzipError(f"{path}: transformers cannot make a model of its config: {reason}") from error


def _require_the_same(
    path: Path,
    old: PreTrainedModel,
    config: PreTrainedConfig,
    document: dict[str, Any],
    remaining: Sequence[int],
) -> None:
    """Raise NeuzipError unless the model of the new config is the old one without some layers."""
    try:
        with quiet_transformers():
            new_config = type(config).from_dict(document)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _not_without(path, f"transformers refuses its new config: {reason}") from error
    new = _laid_out(new_config, path)
    before, after = decoder_layers(old), decoder_layers(new)
    if len(after) != len(remaining):
        raise _not_without(path, f"it would have {len(after)} layers in place of {len(remaining)}")
    for number, (at, layer) in enumerate(zip(remaining, after, strict=True)):
        if difference := _difference(before[at], layer, at, number):
            raise _not_without(path, f"layer {at} would become another: {difference}")
    if _rest(old) != _rest(new):
        raise _not_without(path, "what is not in its layers would become another")
    types = [
        getattr(c.get_text_config(decoder=True), "layer_types", None) or [] for c in (config, new_config)
    ]
    if types[0] and [types[0][n] for n in remaining] != list(types[1]):
        raise _not_without(path, f"its layers would be {types[1]}")


def _not_without(path: Path, reason: str) -> NeuzipError:
    return NeuzipError(
        f"{path}: cannot do without these layers: {reason}", "choose others, with another `choice` or `drop`"
    )


def _difference(before: nn.Module, after: nn.Module, old: int, new: int) -> str | None:
    """The difference between a layer and the one with its new number, in words; None if there is none."""
    modules, others = dict(before.named_modules()), dict(after.named_modules())
    if modules.keys() != others.keys():
        return f"it has {sorted(modules.keys() ^ others.keys())[0]} or not"
    for name, module in modules.items():
        other = others[name]
        where = name or type(module).__name__
        if type(module) is not type(other):
            return f"{where} is a {type(other).__name__} in place of a {type(module).__name__}"
        shapes = [{n: p.shape for n, p in m.named_parameters(recurse=False)} for m in (module, other)]
        if shapes[0] != shapes[1]:
            return f"the parameters of {where} have other names or shapes"
        for key, value in _plain_attributes(module):
            now = getattr(other, key, None)
            is_number = type(value) is int and (value, now) == (old, new)
            if value != now and not is_number:
                return f"{where}.{key} is {now!r} in place of {value!r}"
    return None


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        values = value if isinstance(value, list | tuple) else [value]
        if not key.startswith("__") and all(isinstance(v, int | float | str | None) for v in values):
            yield key, value


def _rest(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Shapes of the parameters outside layers."""
    inside = {id(p) for p in decoder_layers(model).parameters()}
    return {name: p.shape for name, p in model.named_parameters() if id(p) not in inside}


def _object(path: Path) -> dict[str, Any]:
    document = parse_json(path.read_bytes(), path)
    if not isinstance(document, dict):
        raise FormatError(path, "not a JSON object")
    return document


def _pretty(document: object) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
