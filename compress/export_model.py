"""The model to export: its config, its other files, and the ternary form of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, OWN_FOLDER, PICKLES, index_files, read_weight_map
from neuzip.formats.config_section import own_section, read_config
from neuzip.formats.records import RawRecord, TernaryRecord
from neuzip.formats.safetensors_file import parse_json
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary

from .bitnet import bitnet_converts, is_online
from .folder_checks import verify_files
from .pieces import Bytes, digest
from .progress import OnBytes
from .schemes.ternary_coding import TORCH_DTYPES, find_exact
from .sources.folder import FolderSource
from .sources.source import SourceTensor
from .ternary_weights import is_ternary, read_ternary

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "lm_head", "embed_out", "output")
"""The last words of modules that embed tokens or tell their logits."""

GROUPS = (1024, 512, 256, 128, 64, 32)
"""Groups that are looked for in matrices that are ternary, but not with one scale a row."""


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


class ExportModel:
    """The model to export: its config, its other files, its tensors by name."""

    def __init__(self, source: FolderSource, on_bytes: OnBytes) -> None:
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
        activations = own_section(read_config(path), path).get("activations")
        mode = activations.get("mode") if isinstance(activations, dict) else activations
        if activations is not None and mode != "b1.58":
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
        if isinstance(record, TernaryRecord) and not self.is_online:
            return _tidy(read_ternary(self.source, tensor))
        ternary = self._online(tensor) if self.is_online else self._exact(tensor)
        return None if ternary is None else _tidy(ternary)

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
        ternary = find_exact(weight)
        for group in GROUPS:
            if ternary is None and group < width:
                ternary = quantizers.exact(unsigned, group=group)
        return ternary

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

    def checked_ternary(self, tensor: SourceTensor) -> Ternary | None:
        """The ternary form of a matrix, once what is stored of it has been compared with its checksums."""
        self.source.check_streams(tensor)
        record, read = tensor.record, self.source.reader(tensor)
        is_raw = isinstance(record, RawRecord)
        if record is not None and is_raw and digest(read, tensor.info.nbytes) != record.checksum:
            path = self.source.checkpoint.root / tensor.file
            raise FormatError(path, "the file is damaged", tensor=tensor.name, field="checksum")
        ternary = self.ternary(tensor)
        if ternary is None and is_ternary(self.source.resolve(tensor)):
            self.warnings.append(f"tensor {tensor.name!r}: is ternary in `source`, and written dense")
        self._on_bytes(tensor.info.nbytes - tensor.info.nbytes // 2)
        return ternary

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


def _tidy(ternary: Ternary) -> Ternary:
    """Ternary weights with the scale 0 exactly where all codes of a group are 0; no value changes."""
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


def relative_error(scale: Tensor, stored: Tensor) -> float:
    """The largest |stored - scale| / scale; scales of 0 are exact."""
    error = (stored.double() - scale).abs() / scale.double()
    return float(torch.where(scale == 0, 0, error).max())


def _floats(data: Bytes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(data).view(dtype)


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, in row-major order."""
    data: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data
