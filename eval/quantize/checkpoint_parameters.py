"""The parameters of a live model that hold tensors of a checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from neuzip.compress.expert_names import expert_name
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import NeuzipError
from neuzip.kernels.float_fields import FORMATS, Bits
from neuzip.runtime.dtypes import TORCH_DTYPES, shaped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """Where a live model holds a tensor of a checkpoint: a whole parameter, or a part of a merged one.

    Parameters [experts, rows, columns] hold the matrices of all experts of a layer. Then `expert` is the
    matrix, `first` and `count` are the rows of it, and `transposed` says that a row there is a column here.
    """

    parameter: torch.nn.Parameter
    expert: int | None = None
    first: int = 0
    count: int = 0
    transposed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the parameter's shape, such as its Fisher information, as a view."""
        if self.expert is None:
            return tensor
        matrix = tensor[self.expert].mT if self.transposed else tensor[self.expert]
        return matrix[self.first : self.first + self.count]

    @property
    def values(self) -> torch.Tensor:
        """The weights, without gradients, as a view."""
        return self.of(self.parameter.detach())

    @property
    def place(self) -> tuple[int, int | None, int]:
        """A key that only tied tensors have in common."""
        return id(self.parameter), self.expert, self.first


PartsByTensor = Mapping[str, ParameterPart]
"""Where tensors of a checkpoint are, by the tensors' names."""


def find_parameters(
    model: PreTrainedModel, source: FolderSource, tensors: Iterable[SourceTensor]
) -> dict[str, ParameterPart]:
    """The parameters, or parts of merged ones, whose values are those of a tensor, by the tensor's name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{model.base_model_prefix}."
    endings: dict[str, list[str]] = defaultdict(list)
    layers: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        endings[_ending(name)].append(name)
        layers[_layer(name)].append(parameter)
    places = {}
    for tensor in tensors:
        names = [tensor.name, prefix + tensor.name, tensor.name.removeprefix(prefix)]
        alike = endings[_ending(tensor.name)]  # models of several parts have stored them under other names
        names += alike if len(alike) == 1 else ()
        parts = [ParameterPart(parameters[name]) for name in names if name in parameters]
        parts += _parts_of_layer(tensor, layers[_layer(tensor.name)])
        shape, bits = torch.Size(tensor.info.shape), None
        for part in parts:
            if part.values.shape == shape:
                bits = read_bits(source, tensor) if bits is None else bits
                if torch.equal(values_for(tensor, bits, part.values), part.values):
                    places[tensor.name] = part
                    break
    return places


def _parts_of_layer(tensor: SourceTensor, layer: Sequence[torch.nn.Parameter]) -> Iterator[ParameterPart]:
    """Places that a layer has for a tensor: transformers 5 gives some new names, and merges experts."""
    yield from (ParameterPart(parameter) for parameter in layer)
    name, shape = expert_name(tensor.name), tensor.info.shape
    if name is None or len(shape) != 2:
        return
    for parameter in layer:
        if parameter.dim() != 3 or name.expert >= len(parameter):
            continue
        for transposed in (False, True):
            rows = parameter.shape[2 if transposed else 1]
            for first in range(0, rows - shape[0] + 1, shape[0]):
                yield ParameterPart(parameter, name.expert, first, shape[0], transposed)


def _layer(name: str) -> str:
    """The number of a tensor's layer, and the list of layers, whatever stands before them; else nothing.

    >>> _layer("language_model.model.layers.7.mlp.experts.3.up_proj.weight"), _layer("lm_head.weight")
    ('layers.7', '')
    """
    match = re.search(r"(?:^|\.)(\w+\.\d+)\.", name)
    return "" if match is None else match[1]


def _ending(name: str) -> str:
    """A name from its last list of modules on, which tells layers and what is in them; or its last two words.

    >>> _ending("language_model.model.layers.7.mlp.up_proj.weight"), _ending("model.lm_head.weight")
    ('layers.7.mlp.up_proj.weight', 'lm_head.weight')
    """
    words = name.split(".")
    last = max((at for at, word in enumerate(words) if word.isdecimal()), default=len(words) - 1)
    return ".".join(words[max(0, last - 1) :])


def read_bits(source: FolderSource, tensor: SourceTensor) -> Bits:
    """The bit patterns of a whole tensor of floats."""
    return source.read(tensor).view(FORMATS[tensor.info.dtype].dtype)


def values_for(tensor: SourceTensor, bits: Bits, like: torch.Tensor) -> torch.Tensor:
    """Bit patterns as a tensor of the dtype and on the device of another."""
    data = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8))
    plain = shaped(data, TORCH_DTYPES[tensor.info.dtype], tensor.info.shape)
    return plain.to(device=like.device, dtype=like.dtype, copy=True)


def require_some(places: PartsByTensor, source: FolderSource) -> None:
    """Raise NeuzipError if no tensor has a place in the model."""
    if not places:
        raise NeuzipError(
            f"{source.checkpoint.path}: none of its matrices is a parameter of the model as it is stored",
            "give `sensitivity='weights'`",
        )
