"""Tensors of a checkpoint as they are coded, for weights that stay so on a GPU."""

from __future__ import annotations

import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import FormatError, NeuzipError
from neuzip.runtime.dtypes import torch_dtype
from neuzip.runtime.read import read_streams
from neuzip.runtime.read_gpu import coded_tensor
from neuzip.runtime.weights import AnsWeight


def read_ans(
    source: FolderSource, tensor: SourceTensor, device: torch.device, *, verify: bool = True
) -> AnsWeight:
    """A matrix, or one an expert, that stays on `device` as the container codes it. It is decoded once.

    `verify` compares what is stored with its checksums. Raises FormatError.
    """
    target = source.resolve(tensor)
    coding = source.coding(target)
    assert coding is not None
    streams = read_streams(source, target, device, verify=verify)
    try:
        coded = coded_tensor(coding, target.info.numel, streams)
        return AnsWeight.of_coded(coded, target.info.shape, torch_dtype(source, tensor))
    except NeuzipError as error:
        path = source.checkpoint.root / target.file
        raise FormatError(path, error.message, tensor=target.name, field="words") from error
