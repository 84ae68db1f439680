"""Ternary tensors of a checkpoint as codes and scales, for whoever multiplies by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.records import TernaryRecord

from .sources.folder import FolderSource
from .sources.source import SourceTensor

if TYPE_CHECKING:
    from neuzip.kernels.quantizers import Ternary


def is_ternary(tensor: SourceTensor) -> bool:
    """Whether a tensor, which is no alias, is stored ternary."""
    return isinstance(tensor.record, TernaryRecord)


def read_ternary(source: FolderSource, name: str | SourceTensor) -> Ternary:
    """Codes (int8 [..., in]) and scales (fp32 [] or [..., groups]) of a stored ternary tensor, on the CPU.

    No dense tensor is made; an alias gives the tensor it stands for. The streams' checksums are compared.
    Raises FormatError for damaged streams, NeuzipError for a tensor that is not there or not ternary.
    """
    from .schemes.ternary_coding import TernaryDecoder  # loads torch

    named = [t for t in source.tensors() if t.name == name] if isinstance(name, str) else [name]
    if not named:
        raise NeuzipError(f"{source.checkpoint.path}: has no tensor {name!r}", "neuzip inspect lists them")
    tensor = source.resolve(named[0])
    if not is_ternary(tensor):
        raise NeuzipError(
            f"{source.checkpoint.path}: {tensor.name!r} is not stored ternary",
            "neuzip inspect shows how tensors are stored",
        )
    source.check_streams(tensor)
    decoder = source.decoder(tensor)
    assert isinstance(decoder, TernaryDecoder)
    try:
        return decoder.ternary()
    except NeuzipError as error:
        path = source.checkpoint.root / tensor.file
        raise FormatError(path, error.message, tensor=tensor.name) from error
