"""The parameters of a live model that hold tensors of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import NeuzipError
from neuzip.eval.plans.candidates import read_bits
from neuzip.eval.plans.tensor_groups import TensorGroup
from neuzip.kernels.float_fields import Bits
from neuzip.runtime.dtypes import TORCH_DTYPES, shaped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ParametersByTensor = Mapping[str, torch.nn.Parameter]
"""The parameters that hold tensors of a checkpoint, by the tensors' names."""


def find_parameters(
    model: PreTrainedModel, source: FolderSource, groups: Sequence[TensorGroup]
) -> dict[str, torch.nn.Parameter]:
    """The parameters whose values are those of a tensor, by the tensor's name; some models merge tensors."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{model.base_model_prefix}."
    endings: dict[str, list[str]] = defaultdict(list)
    for name in parameters:
        endings[_ending(name)].append(name)
    places = {}
    for tensor in (t for group in groups for t in group.tensors):
        names = [tensor.name, prefix + tensor.name, tensor.name.removeprefix(prefix)]
        alike = endings[_ending(tensor.name)]  # models of several parts have stored them under other names
        for name in (*names, *(alike if len(alike) == 1 else ())):
            parameter = parameters.get(name)
            if parameter is not None and parameter.shape == torch.Size(tensor.info.shape):
                values = values_for(tensor, read_bits(source, tensor), parameter)
                if torch.equal(values, parameter.detach()):
                    places[tensor.name] = parameter
                    break
    return places


def _ending(name: str) -> str:
    """A name from its last list of modules on, which tells layers and what is in them; or its last two words.

    >>> _ending("language_model.model.layers.7.mlp.up_proj.weight"), _ending("model.lm_head.weight")
    ('layers.7.mlp.up_proj.weight', 'lm_head.weight')
    """
    words = name.split(".")
    last = max((at for at, word in enumerate(words) if word.isdecimal()), default=len(words) - 1)
    return ".".join(words[max(0, last - 1) :])


def values_for(tensor: SourceTensor, bits: Bits, like: torch.Tensor) -> torch.Tensor:
    """Bit patterns as a tensor of the dtype and on the device of another."""
    data = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8))
    plain = shaped(data, TORCH_DTYPES[tensor.info.dtype], tensor.info.shape)
    return plain.to(device=like.device, dtype=like.dtype, copy=True)


def require_some(places: ParametersByTensor, source: FolderSource) -> None:
    if not places:
        raise NeuzipError(
            f"{source.checkpoint.path}: none of its matrices is a parameter of the model as it is stored",
            "give `sensitivity='weights'`",
        )
