"""A ternary model as a folder of safetensors, with the shards of the source."""

from __future__ import annotations

import os
from pathlib import Path

from neuzip.errors import NeuzipError
from neuzip.formats.checkpoint import to_json
from neuzip.formats.export import Layout, SafetensorsTarget
from neuzip.formats.export.tensor_writer import TensorWriter

from .export_model import INDEX, ExportedTensor, ExportModel, bytes_of, relative_error
from .workspace import (
    clear,
    copy_file,
    make_folder,
    partial_name,
    permissions,
    publish,
    workspace,
    write_file,
    writing,
)


def write_folder(
    model: ExportModel, target: SafetensorsTarget, dst: Path, overwrite: bool
) -> list[ExportedTensor]:
    """A folder of safetensors with the shards of the source; what became of the tensors."""
    exported: list[ExportedTensor] = []
    layouts: dict[str, Layout] = {}
    modules: dict[str, int | None] = {}
    others: list[str] = []
    for tensor in model.tensors.values():
        name, dtype, shape = tensor.name, tensor.info.dtype, tensor.info.shape
        ternary, module = model.checked_ternary(tensor), name.removesuffix(".weight")
        layout = layouts.setdefault(tensor.file, {})
        if ternary is None:
            layout[name] = dtype, shape
            exported.append(ExportedTensor(name, shape, dtype, "dense"))
            if len(shape) == 2 and module != name:
                others.append(module)
            continue
        stored = target.stored_scale(name, dtype, ternary.codes, ternary.scale, ternary.group)
        error = relative_error(ternary.scale, stored)
        layout |= target.layout(name, dtype, shape, ternary.group)
        modules[module] = None if ternary.group is None or ternary.group >= shape[1] else ternary.group
        exported.append(ExportedTensor(name, shape, dtype, "ternary", ternary.group, error))
    model.require_ternary(exported)
    names = [name for layout in layouts.values() for name in layout]
    for name in {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else ():
        raise NeuzipError(f"tensor {name!r}: the export would write two of this name")
    others = list(dict.fromkeys([*others, "lm_head"]))  # tied heads have no tensor
    config = model.config | {"quantization_config": target.quantization_config(modules, others)}
    carried, left = model.other_files()
    model.warnings += [f"{f}: a pickle, not carried along" for f in left]
    with workspace(dst, model.source.checkpoint.root) as work, writing(work):
        clear(work, overwrite)
        for file, layout in layouts.items():
            _write_shard(model, target, work / file, file, layout, modules)
        if len(layouts) > 1:
            write_file(work / INDEX, _index(layouts, work), model.path(INDEX))
        for name in carried:
            original = model.path(name)
            assert original is not None
            copy_file(original, work / name)
        write_file(work / "config.json", to_json(config, dst / "config.json"), model.path("config.json"))
        publish(work, dst)
    return exported


def _write_shard(
    model: ExportModel,
    target: SafetensorsTarget,
    path: Path,
    file: str,
    layout: Layout,
    modules: dict[str, int | None],
) -> None:
    original = model.source.checkpoint.root / file
    make_folder(path.parent, original.parent)
    temporary = partial_name(path)
    with TensorWriter(temporary, layout, {"format": "pt"}, permissions(original)) as writer:
        for tensor in model.tensors.values():
            if tensor.file != file:
                continue
            ternary = model.ternary(tensor) if tensor.name.removesuffix(".weight") in modules else None
            if ternary is None:
                writer.write(tensor.name, model.pieces(tensor))
            else:
                parts = target.tensors(
                    tensor.name, tensor.info.dtype, ternary.codes, ternary.scale, ternary.group
                )
                for name, part in parts.items():
                    writer.write(name, [bytes_of(part)])
            model.written(tensor)
    os.replace(temporary, path)


def _index(layouts: dict[str, Layout], work: Path) -> bytes:
    """Which shard has which tensor."""
    total = sum((work / file).stat().st_size for file in layouts)
    weight_map = {name: file for file, layout in layouts.items() for name in layout}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return to_json(document, work / INDEX)
