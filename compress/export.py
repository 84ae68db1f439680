"""Ternary models for other engines: read a tensor, repack its codes, write it.

A first pass over the tensors finds what is ternary and whether the engine can hold it, before anything is
written; a second one writes. Ternary are the tensors that a container stores so, and matrices whose values
are -s, 0 and s already; of a checkpoint that says `bitnet`, `online`, all matrices, as transformers rounds
them. Embeddings and head are written as they are: no engine here takes them ternary.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.checkpoint import (
    ORIGINAL_FOLDER,
    OWN_FOLDER,
    PICKLES,
    index_files,
    read_weight_map,
    to_json,
)
from neuzip.formats.config_section import own_section, read_config
from neuzip.formats.export import Layout, SafetensorsTarget, gguf, gguf_model
from neuzip.formats.export.compressed_tensors import PackQuantized
from neuzip.formats.export.tensor_writer import TensorWriter
from neuzip.formats.export.transformers_bitnet import TransformersBitnet
from neuzip.formats.safetensors_file import parse_json
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary

from .overwrite_guard import refuse_existing, refuse_folder, refuse_nesting, require_name
from .plan import bitnet_converts, is_online
from .source import Bytes, SourceTensor, TensorSource, digest
from .ternary import TORCH_DTYPES, find_exact, is_ternary, read_ternary
from .verify import OnBytes, ignore, verify_files
from .workspace import (
    clear,
    copy_file,
    files_in,
    make_folder,
    partial_name,
    permissions,
    publish,
    recover,
    remove,
    sync_folder,
    workspace,
    write_file,
    writing,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "lm_head", "embed_out", "output")
"""The last words of modules that embed tokens or tell their logits."""

GROUPS = (1024, 512, 256, 128, 64, 32)
"""Groups that are looked for in matrices that are ternary, but not with one scale a row."""


@dataclass(frozen=True)
class Gguf:
    """The export to one GGUF file; `kind` is tq1_0, tq2_0 or q2_0.

    With `mixed`, tensors whose rows are no whole blocks of it are q2_0, or else q4_0.
    """

    kind: str = "tq2_0"
    mixed: bool = False


Target = SafetensorsTarget | Gguf


def target_of(
    to: str,
    dst: str | os.PathLike[str],
    gguf_type: str | None = None,
    gguf_mixed: bool = False,
    linear_class: str | None = None,
    mode: str | None = None,
    activations: str | None = None,
) -> Target:
    """The target that parameters stand for. Raises UsageError for those that it does not have."""
    for name, given, engine in (
        ("gguf_type", gguf_type is not None, "gguf"),
        ("gguf_mixed", gguf_mixed, "gguf"),
        ("linear_class", linear_class is not None, "transformers-bitnet"),
        ("mode", mode is not None, "transformers-bitnet"),
        ("activations", activations is not None, "compressed-tensors"),
    ):
        if given and to != engine:
            raise UsageError(
                f"`{name}` has no effect without `to={engine!r}`",
                f"leave it out, or export with `to={engine!r}`",
            )
    if to == "gguf":
        if Path(dst).suffix != ".gguf":
            raise UsageError(f"{dst}: `to='gguf'` writes one file", "end `destination` in .gguf")
        return Gguf(gguf_type or "tq2_0", gguf_mixed)
    if to == "compressed-tensors":
        return PackQuantized(activations or "b1.58")
    if to != "transformers-bitnet":
        raise UsageError(
            f"`to={to!r}`: neuzip does not export to that",
            "give transformers-bitnet, compressed-tensors or gguf",
        )
    only = "autobitlinear" if mode == "online" else "bitlinear"
    return TransformersBitnet(linear_class or only, mode or "offline")


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor and what became of it.

    `kind` is ternary or dense, `packing` the engine's word for a type of its own; `group` is as in `Ternary`,
    and `scale_error` the largest relative difference between a scale and the one that the engine computes
    with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    group: int | None = None
    scale_error: float = 0.0
    packing: str | None = None


@dataclass(frozen=True)
class ExportReport:
    """What `export_checkpoint` wrote. `source_bytes` and `exported_bytes` are sizes of weight files."""

    src: Path
    dst: Path
    source_bytes: int
    exported_bytes: int
    tensors: tuple[ExportedTensor, ...]
    seconds: float
    warnings: tuple[str, ...] = field(default=())

    @property
    def ternary(self) -> int:
        """Number of ternary tensors in the result."""
        return sum(t.kind == "ternary" for t in self.tensors)

    @property
    def scale_error(self) -> float:
        """Largest relative error of a scale, over all tensors."""
        return max(t.scale_error for t in self.tensors)


def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    target: Target,
    *,
    overwrite: bool = False,
    on_bytes: OnBytes = ignore,
) -> ExportReport:
    """Write a ternary model, compressed or plain, as another engine reads it.

    `dst` is a folder, or for GGUF a file. `on_bytes` is told of half of each tensor's bytes when it was
    looked at, and of the rest when it was written. Raises NeuzipError for models that have nothing ternary,
    or that the engine cannot hold.
    """
    began, dst = time.monotonic(), Path(dst)
    with TensorSource(src) as source:
        model = _Model(source, on_bytes)
        refuse_nesting(source.checkpoint.path, dst)
        require_name(dst)
        if isinstance(target, Gguf):
            refuse_folder(dst)
            refuse_existing(dst, overwrite, file=True)
            exported = _write_gguf(model, target, dst, overwrite)
        else:
            recover(dst)
            refuse_existing(dst, overwrite, known=source.checkpoint.others)
            exported = _write_folder(model, target, dst, overwrite)
        written = files_in(dst)
        return ExportReport(
            source.checkpoint.path,
            dst,
            sum(p.stat().st_size for p in source.checkpoint.weight_paths()),
            sum(p.stat().st_size for p in written if p.suffix in (".safetensors", ".gguf")),
            tuple(exported),
            time.monotonic() - began,
            tuple(model.warnings),
        )


class _Model:
    """The model to export: its config, its other files, its tensors by name."""

    def __init__(self, source: TensorSource, on_bytes: OnBytes) -> None:
        self.source, self._on_bytes = source, on_bytes
        self.warnings: list[str] = []
        checkpoint = source.checkpoint
        if checkpoint.is_file or "config.json" not in checkpoint.others:
            raise NeuzipError(
                f"{checkpoint.path}: has no config.json", "export takes the folder of a whole model"
            )
        verify_files(source)
        self.config: dict[str, Any] = self.json("config.json")
        other = self.config.get("quantization_config")
        # Norms before every layer are what other engines lack.
        self.is_online = is_online(other) and not other.get("use_rms_norm")
        if other is not None and not self.is_online:
            method = other.get("quant_method") if isinstance(other, dict) else other
            raise NeuzipError(
                f"{checkpoint.path}: its config.json says that it is quantised as {method}",
                "export takes weights that are floats, ternary or not, or compressed by neuzip",
            )
        self.warn_of_activations()
        self.tensors = self._by_name()

    @property
    def name(self) -> str:
        """What the source is called."""
        return self.source.checkpoint.path.resolve().name

    def path(self, name: str) -> Path | None:
        """Where a file of the original is, or None if there is none."""
        others = self.source.checkpoint.others
        for place in (f"{ORIGINAL_FOLDER}/{name}", name):
            if place in others:
                return self.source.checkpoint.root / place
        return None

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the original; {} if there is none."""
        path = self.path(name)
        if path is None:
            return {}
        document = parse_json(path.read_bytes(), path)
        if not isinstance(document, dict):
            raise FormatError(path, "not a JSON object")
        return document

    def other_files(self) -> tuple[list[str], list[str]]:
        """The files to carry along, and those to leave: weights of other kinds."""
        indices = {*index_files(self.source.checkpoint), *self.source.checkpoint.unread}
        names = [
            f
            for f in self.source.checkpoint.others
            if f != "config.json" and f not in indices and f.split("/")[0] != OWN_FOLDER
        ]
        return [f for f in names if not f.endswith(PICKLES)], [f for f in names if f.endswith(PICKLES)]

    def warn_of_activations(self) -> None:
        """Warn if config.json asks for activations that other engines do not have."""
        path = self.source.checkpoint.root / "config.json"
        asked = own_section(read_config(path), path).get("activations")
        mode = asked.get("mode") if isinstance(asked, dict) else asked
        if asked is not None and mode != "b1.58":
            self.warnings.append(
                f"config.json asks for the activations {mode}, which other engines do not have"
            )

    def _by_name(self) -> dict[str, SourceTensor]:
        """Every tensor of the model: of the files that an index names, of the one there is, else of all."""
        checkpoint = self.source.checkpoint
        files: Sequence[str] = checkpoint.weights
        if INDEX in index_files(checkpoint):
            files = sorted(set(read_weight_map(checkpoint, INDEX).values()))
        elif SINGLE in files:
            files = [SINGLE]
        self.warnings += [f"{f}: is no part of the model" for f in checkpoint.weights if f not in files]
        tensors: dict[str, SourceTensor] = {}
        for file in files:
            for tensor in self.source.tensors(file):
                if tensor.name in tensors:
                    raise FormatError(checkpoint.root / file, "stands in two files", tensor=tensor.name)
                tensors[tensor.name] = tensor
        return tensors

    def ternary(self, tensor: SourceTensor) -> Ternary | None:
        """The ternary form of a matrix, or None if it has none or must not have one."""
        module, _, kind = tensor.name.rpartition(".")
        if kind != "weight" or len(tensor.info.shape) != 2 or module.rpartition(".")[2] in EMBEDDINGS:
            return None
        record = self.source.resolve(tensor).record
        # Online, codes stand for floats, of which transformers takes the absmean.
        if record is not None and record.scheme == "ternary" and not self.is_online:
            return _tidy(read_ternary(self.source, tensor))
        found = self._online(tensor) if self.is_online else self._exact(tensor)
        return None if found is None else _tidy(found)

    def _online(self, tensor: SourceTensor) -> Ternary | None:
        """What transformers makes of a float matrix in every forward pass."""
        how = self.config["quantization_config"]
        if tensor.info.dtype not in TORCH_DTYPES or not bitnet_converts(tensor.name, how):
            return None
        weight = self.dense(tensor)
        return quantizers.absmean(weight, clamped=True) if bool(weight.isfinite().all()) else None

    def _exact(self, tensor: SourceTensor) -> Ternary | None:
        """The ternary form that the values of a matrix have already."""
        rows, width = tensor.info.shape
        dtype = TORCH_DTYPES.get(tensor.info.dtype)
        if dtype is None or rows * width == 0:
            return None
        first = self.source.read(tensor, 0, width * dtype.itemsize)
        if len(set(_floats(first, dtype).abs().tolist())) > 2 + width // min(GROUPS):
            return None  # more magnitudes than groups
        weight = self.dense(tensor)
        unsigned = weight.masked_fill(weight == 0, 0)
        found = find_exact(weight)
        for group in GROUPS:
            if found is None and group < width:
                found = quantizers.exact(unsigned, group=group)
        return found

    def dense(self, tensor: SourceTensor) -> Tensor:
        """A tensor as restored. Raises NeuzipError for dtypes other than bf16, fp16 and fp32."""
        dtype = TORCH_DTYPES.get(tensor.info.dtype)
        if dtype is None:
            raise NeuzipError(f"tensor {tensor.name!r}: is {tensor.info.dtype}, which cannot be exported")
        return _floats(self.source.read(tensor), dtype).view(tensor.info.shape)

    def pieces(self, tensor: SourceTensor) -> Iterator[Bytes]:
        """The bytes of a tensor as restored."""
        read = self.source.reader(tensor)
        return (read(*piece) for piece in tensor.pieces())

    def look_at(self, tensor: SourceTensor) -> Ternary | None:
        """`ternary`, once what is stored of the tensor has been compared with its checksums."""
        self.source.check_streams(tensor)
        record, read = tensor.record, self.source.reader(tensor)
        is_raw = record is not None and record.scheme == "raw"
        if record is not None and is_raw and digest(read, tensor.info.nbytes) != record.checksum:
            path = self.source.checkpoint.root / tensor.file
            raise FormatError(path, "the file is damaged", tensor=tensor.name, field="checksum")
        found = self.ternary(tensor)
        if found is None and is_ternary(self.source.resolve(tensor)):
            self.warnings.append(f"tensor {tensor.name!r}: is ternary in `source`, and written dense")
        self._on_bytes(tensor.info.nbytes - tensor.info.nbytes // 2)
        return found

    def written(self, tensor: SourceTensor) -> None:
        """Tell that a tensor is done with."""
        self._on_bytes(tensor.info.nbytes // 2)

    def require_ternary(self, exported: Iterable[ExportedTensor]) -> None:
        """Raise NeuzipError if there is nothing to export."""
        if not any(t.kind == "ternary" for t in exported):
            raise NeuzipError(
                f"{self.source.checkpoint.path}: has no ternary weights",
                "export takes models with ternary weights: neuzip ternarize and neuzip recover make them",
            )


def _write_folder(
    model: _Model, target: SafetensorsTarget, dst: Path, overwrite: bool
) -> list[ExportedTensor]:
    """A folder of safetensors with the shards of the source; what became of the tensors."""
    exported: list[ExportedTensor] = []
    layouts: dict[str, Layout] = {}
    modules: dict[str, int | None] = {}
    others: list[str] = []
    for tensor in model.tensors.values():
        name, dtype, shape = tensor.name, tensor.info.dtype, tensor.info.shape
        found, module = model.look_at(tensor), name.removesuffix(".weight")
        layout = layouts.setdefault(tensor.file, {})
        if found is None:
            layout[name] = dtype, shape
            exported.append(ExportedTensor(name, shape, dtype, "dense"))
            if len(shape) == 2 and module != name:
                others.append(module)
            continue
        stored = target.stored_scale(name, dtype, found.codes, found.scale, found.group)
        error = _relative_error(found.scale, stored)
        layout |= target.layout(name, dtype, shape, found.group)
        modules[module] = None if found.group is None or found.group >= shape[1] else found.group
        exported.append(ExportedTensor(name, shape, dtype, "ternary", found.group, error))
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
    model: _Model,
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
            found = model.ternary(tensor) if tensor.name.removesuffix(".weight") in modules else None
            if found is None:
                writer.write(tensor.name, model.pieces(tensor))
            else:
                parts = target.tensors(tensor.name, tensor.info.dtype, found.codes, found.scale, found.group)
                for name, part in parts.items():
                    writer.write(name, [_bytes(part)])
            model.written(tensor)
    os.replace(temporary, path)


def _write_gguf(model: _Model, target: Gguf, dst: Path, overwrite: bool) -> list[ExportedTensor]:
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
        found = model.look_at(tensor)
        if called is None:
            model.written(tensor)
            continue
        if found is None:
            dense = gguf.DENSE.get(dtype if len(shape) > 1 else "F32")
            if dense is None or dtype not in gguf.DENSE:
                raise NeuzipError(f"tensor {name!r}: is {dtype}, GGUF export takes bf16, fp16 and fp32")
            infos.append((tensor, gguf.Info(called, shape, dense)))
            exported.append(ExportedTensor(name, shape, dtype, "dense"))
            continue
        packing = gguf.fitting(kind, shape[1], found.group) if target.mixed else kind
        stored = gguf.stored_scale(packing, name, found.codes, found.scale, found.group)
        error = _relative_error(found.scale, stored)
        infos.append((tensor, gguf.Info(called, shape, packing)))
        exported.append(ExportedTensor(name, shape, dtype, "ternary", found.group, error, packing.name))
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
                    writer.write(info.name, [_bytes(factors)])
            os.replace(work / dst.name, dst)
        finally:
            remove(work)
        sync_folder(dst.parent)
    return exported


def _require_rows(model: _Model, described: gguf_model.GgufModel) -> None:
    """Raise FormatError unless matrices have the rows that config.json lets expect."""
    for name, tensor in model.tensors.items():
        rows = described.rows(name)
        if rows is not None and tensor.info.shape[:1] != (rows,):
            path = model.source.checkpoint.root / tensor.file
            shape = list(tensor.info.shape)
            raise FormatError(path, f"has the shape {shape}, config.json says {rows} rows", tensor=name)


def _gguf_data(model: _Model, tensor: SourceTensor, info: gguf.Info, order: Tensor | None) -> Iterable[Bytes]:
    """A tensor's bytes in the type and with the order of rows that the file gives it."""
    if info.kind not in gguf.TERNARY.values():
        if order is None and info.kind.name == tensor.info.dtype:
            return model.pieces(tensor)
        dense = model.dense(tensor)
        dense = dense if order is None else dense[order]
        return [_bytes(dense.float() if info.kind.name == "F32" else dense)]
    found = model.ternary(tensor)
    assert found is not None
    codes, scale = found.codes, found.scale
    if order is not None:
        codes, scale = codes[order], scale[order] if scale.dim() else scale
    return [gguf.blocks(info.kind, codes, scale, found.group).reshape(-1)]


def _tokenizer(model: _Model, described: gguf_model.GgufModel) -> dict[str, gguf.Value]:
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


def _tidy(ternary: Ternary) -> Ternary:
    """The same weights, with the scale 0 exactly where all codes of a group are 0."""
    codes, scale, group = ternary.codes, ternary.scale, ternary.group
    codes = codes * (ternary.spread() != 0)
    if group is None:
        used = codes.any()
    else:
        rows, width = codes.shape
        whole = codes.new_zeros((rows, -(-width // group) * group))
        whole[:, :width] = codes
        used = whole.reshape(rows, -1, group).any(-1)
    return Ternary(codes, torch.where(used, scale, 0), group)


def _relative_error(scale: Tensor, stored: Tensor) -> float:
    """The largest |stored - scale| / scale; scales of 0 are exact."""
    error = (stored.double() - scale).abs() / scale.double()
    return float(torch.where(scale == 0, 0, error).max())


def _floats(data: Bytes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(data).view(dtype)


def _bytes(tensor: Tensor) -> Bytes:
    data: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _index(layouts: dict[str, Layout], work: Path) -> bytes:
    """Which shard has which tensor."""
    total = sum((work / file).stat().st_size for file in layouts)
    weight_map = {name: file for file, layout in layouts.items() for name in layout}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return to_json(document, work / INDEX)
