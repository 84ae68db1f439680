"""Ternary models for other engines: read a tensor, repack its codes, write it.

A first pass over the tensors finds what is ternary and whether the engine can hold it, before anything is
written; a second one writes. Ternary are the tensors that a container stores so, and matrices whose values
are -s, 0 and s already; of a checkpoint that says `bitnet`, `online`, all matrices, as transformers rounds
them. Embeddings and head are written as they are: no engine here takes them ternary.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from neuzip.errors import UsageError
from neuzip.formats.export import SafetensorsTarget
from neuzip.formats.export.compressed_tensors import PackQuantized
from neuzip.formats.export.transformers_bitnet import TransformersBitnet

from .export_folder import write_folder
from .export_gguf import Gguf, write_gguf
from .export_model import ExportedTensor, ExportModel
from .overwrite_guard import refuse_existing, refuse_folder, refuse_nesting, require_name
from .progress import OnBytes, ignore
from .sources.folder import FolderSource
from .workspace import files_in, recover

ExportTarget = SafetensorsTarget | Gguf


def target_of(
    to: str,
    dst: str | os.PathLike[str],
    gguf_type: str | None = None,
    gguf_mixed: bool = False,
    linear_class: str | None = None,
    mode: str | None = None,
    activations: str | None = None,
) -> ExportTarget:
    """The target that parameters stand for. Raises UsageError for those that it does not have."""
    for name, is_set, engine in (
        ("gguf_type", gguf_type is not None, "gguf"),
        ("gguf_mixed", gguf_mixed, "gguf"),
        ("linear_class", linear_class is not None, "transformers-bitnet"),
        ("mode", mode is not None, "transformers-bitnet"),
        ("activations", activations is not None, "compressed-tensors"),
    ):
        if is_set and to != engine:
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
    target: ExportTarget,
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
    with FolderSource(src) as source:
        model = ExportModel(source, on_bytes)
        refuse_nesting(source.checkpoint.path, dst)
        require_name(dst)
        if isinstance(target, Gguf):
            refuse_folder(dst)
            refuse_existing(dst, overwrite, file=True)
            exported = write_gguf(model, target, dst, overwrite)
        else:
            recover(dst)
            refuse_existing(dst, overwrite, known=source.checkpoint.others)
            exported = write_folder(model, target, dst, overwrite)
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
