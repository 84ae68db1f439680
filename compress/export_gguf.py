"""A ternary model as one GGUF file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.export import gguf, gguf_model

from .export_model import ExportedTensor, ExportModel, bytes_of, relative_error
from .pieces import Bytes
from .sources.source import SourceTensor
from .workspace import clear, permissions, remove, sync_folder, workspace, writing


@dataclass(frozen=True)
class Gguf:
    """The export to one GGUF file; `kind` is tq1_0, tq2_0 or q2_0.

    With `mixed`, tensors whose rows are no whole blocks of it are q2_0, or else q4_0.
    """

    kind: str = "tq2_0"
    mixed: bool = False


def write_gguf(model: ExportModel, target: Gguf, dst: Path, overwrite: bool) -> list[ExportedTensor]:
    """One GGUF file; what became of the tensors."""
    kind = gguf.TERNARY[target.kind]
    described = gguf_model.GgufModel.of(model.config)
    _require_rows(model, described)
    window = model.config.get("sliding_window")
    if isinstance(window, int) and model.config.get("use_sliding_window", True):
        model.warnings.append(f"config.json: sliding_window is {window}; llama.cpp attends to all tokens")
    tokenizer = _tokenizer(model, described)
    factors = described.rope_factors()
    exported: list[ExportedTensor] = []
    infos: list[tuple[SourceTensor, gguf.Info]] = []
    for tensor in model.tensors.values():
        name, dtype, shape = tensor.name, tensor.info.dtype, tensor.info.shape
        called = described.tensor_name(name)
        ternary = model.checked_ternary(tensor)
        if called is None:
            model.written(tensor)
            continue
        if ternary is None:
            dense = gguf.DENSE.get(dtype if len(shape) > 1 else "F32")
            if dense is None or dtype not in gguf.DENSE:
                raise NeuzipError(f"tensor {name!r}: is {dtype}, GGUF export takes bf16, fp16 and fp32")
            infos.append((tensor, gguf.Info(called, shape, dense)))
            exported.append(ExportedTensor(name, shape, dtype, "dense"))
            continue
        packing = gguf.fitting(kind, shape[1], ternary.group) if target.mixed else kind
        stored = gguf.stored_scale(packing, name, ternary.codes, ternary.scale, ternary.group)
        error = relative_error(ternary.scale, stored)
        infos.append((tensor, gguf.Info(called, shape, packing)))
        exported.append(ExportedTensor(name, shape, dtype, "ternary", ternary.group, error, packing.name))
    model.require_ternary(exported)
    most = Counter(info.kind for _, info in infos if info.kind in gguf.TERNARY.values()).most_common(1)[0][0]
    metadata = described.metadata(model.name, most) | tokenizer
    extra = (
        [] if factors is None else [gguf.Info("rope_freqs.weight", tuple(factors.shape), gguf.DENSE["F32"])]
    )
    with workspace(dst) as work, writing(dst):
        clear(work, overwrite)
        try:
            everything = [info for _, info in infos] + extra
            mode = permissions(*model.source.checkpoint.weight_paths())
            with gguf.GgufWriter(work / dst.name, metadata, everything, mode) as writer:
                for tensor, info in infos:
                    writer.write(info.name, _gguf_data(model, tensor, info, described.row_order(tensor.name)))
                    model.written(tensor)
                for info in extra:
                    assert factors is not None
                    writer.write(info.name, [bytes_of(factors)])
            os.replace(work / dst.name, dst)
        finally:
            remove(work)
        sync_folder(dst.parent)
    return exported


def _require_rows(model: ExportModel, described: gguf_model.GgufModel) -> None:
    """Raise FormatError unless matrices have the rows that config.json lets expect."""
    for name, tensor in model.tensors.items():
        rows = described.rows(name)
        if rows is not None and tensor.info.shape[:1] != (rows,):
            path = model.source.checkpoint.root / tensor.file
            shape = list(tensor.info.shape)
            raise FormatError(path, f"has the shape {shape}, config.json says {rows} rows", tensor=name)


def _gguf_data(
    model: ExportModel, tensor: SourceTensor, info: gguf.Info, order: Tensor | None
) -> Iterable[Bytes]:
    """A tensor's bytes in the type and with the order of rows that the file gives it."""
    if info.kind not in gguf.TERNARY.values():
        if order is None and info.kind.name == tensor.info.dtype:
            return model.pieces(tensor)
        dense = model.dense(tensor)
        dense = dense if order is None else dense[order]
        return [bytes_of(dense.float() if info.kind.name == "F32" else dense)]
    ternary = model.ternary(tensor)
    assert ternary is not None
    codes, scale = ternary.codes, ternary.scale
    if order is not None:
        codes, scale = codes[order], scale[order] if scale.dim() else scale
    return [gguf.blocks(info.kind, codes, scale, ternary.group).reshape(-1)]


def _tokenizer(model: ExportModel, described: gguf_model.GgufModel) -> dict[str, gguf.Value]:
    """The entries about the tokenizer."""
    if model.path("tokenizer.json") is None:
        model.warnings.append("there is no tokenizer.json: the GGUF file takes and gives token numbers only")
        return gguf_model.no_tokenizer()
    tokenizer, about = model.json("tokenizer.json"), model.json("tokenizer_config.json")
    template, path = about.get("chat_template"), model.path("chat_template.jinja")
    if path is not None:
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(path, f"cannot be read: {error}") from error
    return gguf_model.tokenizer_metadata(
        tokenizer, about, described, template if isinstance(template, str) else None
    )
