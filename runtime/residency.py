"""Which weights of a live model are compressed in memory, and how.

They are found by what modules do with their parameters, so no list of models is needed:

    nn.Linear, Conv1D of transformers    a product reads the whole matrix
    nn.Embedding                         rows are looked up
    3-D parameters                       a matrix an expert, of which products read some

of bf16 or fp16, of some size. Everything else stays dense: norms, biases, convolutions, fp32, and what would
hardly become smaller.

The class of a residency decides what a weight becomes, see `runtime/residencies.py`. Layers of weights that
are stored ternary are BitLinear in all compressed residencies, see `bitlinear`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from neuzip.compress.device import unfit
from neuzip.errors import UsageError
from neuzip.kernels.dtypes import torch_dtypes_for
from neuzip.runtime.bitlinear import bit_linears, to_dense
from neuzip.runtime.expert_memory import ExpertMemory
from neuzip.runtime.requirements import require_expert_memory
from neuzip.runtime.residencies import RESIDENCIES, compressed_on_cpu
from neuzip.runtime.weights import AnsWeight, CompressedWeight, GridWeight, PackedWeight, WeightUse
from neuzip.runtime.weights.base import SMALLEST

DTYPES = torch_dtypes_for("packed")
"""Dtypes of weights that can be compressed in memory."""

NARROWEST = 32
"""Rows and columns that the matrices of a 3-D parameter have at least; positions and tokens are 1 x n x m."""

WORTH = 0.9
"""The share of its dense bytes that a weight may take at most, compressed."""


@dataclass(frozen=True)
class MemoryUse:
    """Parameters of one residency: how many weights, their bytes if they were dense, and in memory.

    `host_bytes` are those of experts in pinned host memory, beside the stored ones on the devices.
    """

    weights: int = 0
    dense_bytes: int = 0
    stored_bytes: int = 0
    host_bytes: int = 0

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(
            self.weights + other.weights,
            self.dense_bytes + other.dense_bytes,
            self.stored_bytes + other.stored_bytes,
            self.host_bytes + other.host_bytes,
        )


@dataclass(frozen=True)
class ModelMemory:
    """What the parameters of a model take, by the residency that each has in fact.

    Weights of BitLinear layers, 2 bits each and their scales, are `ternary` in any residency.
    """

    by_residency: Mapping[str, MemoryUse]
    ternary: MemoryUse

    def of(self, residency: str) -> MemoryUse:
        """The parameters of one residency; of none, zeros."""
        return self.by_residency.get(residency, MemoryUse())

    @property
    def total(self) -> MemoryUse:
        """All parameters."""
        return sum(self.by_residency.values(), self.ternary)


def require_residency(residency: str) -> None:
    """Raise UsageError for a residency that does not exist."""
    if residency not in RESIDENCIES:
        raise UsageError(
            f"`residency={residency!r}`: there is no such format of weights in memory",
            f"give one of {', '.join(map(repr, RESIDENCIES))}",
        )


def require_places(residency: str, places: Iterable[torch.device | str | int]) -> None:
    """Raise UsageError where weights of a residency cannot lie. A place is a torch device or "disk"."""
    if residency == "dense":
        return
    places = list(places)
    kinds = {_kind(place) for place in places}
    if not RESIDENCIES[residency].cpu and kinds - {"cuda"}:
        raise UsageError(
            f"the residency {residency!r} needs CUDA devices for all weights, not "
            + " or ".join(sorted(kinds)),
            "give `device='cuda'` (device_map in transformers), or "
            f"`residency={compressed_on_cpu()!r}`, which runs on a CPU too",
        )
    if kinds - {"cuda", "cpu"} or len(kinds) > 1:
        raise UsageError(
            f"the residency {residency!r} cannot spread weights over {' and '.join(sorted(kinds))}",
            "give a device map without offloading, or `residency='dense'`",
        )
    if "cuda" in kinds and torch.cuda.is_available():
        reasons = {unfit(_number(place)) for place in places} - {None}
        if reasons:
            raise UsageError(f"the residency {residency!r}: {reasons.pop()}", "give `residency='dense'`")


def require_expert_places(expert_memory: int | None, places: Iterable[torch.device | str | int]) -> None:
    """Raise UsageError where experts beyond some bytes are to be in host memory, and not all is on GPUs."""
    kinds = {_kind(place) for place in places}
    if expert_memory is not None and kinds != {"cuda"}:
        raise UsageError(
            f"`expert_memory={expert_memory}`: limits what experts take of a GPU, and the model is on "
            + " and ".join(sorted(kinds)),
            "give `device='cuda'` (device_map in transformers), or leave out `expert_memory`",
        )


def require_experts(model: nn.Module, uses: Iterable[str], expert_memory: int | None) -> None:
    """Raise UsageError for a limit on the memory of experts where none of the parameters `uses` has any."""
    if expert_memory is not None and all(model.get_parameter(name).dim() != 3 for name in uses):
        raise UsageError(
            f"`expert_memory={expert_memory}`: {type(model).__name__} has no parameters of several experts, "
            "which alone can be in host memory",
            "leave out `expert_memory`",
        )


def compress_parameters(model: nn.Module, residency: str, expert_memory: int | None = None) -> ModelMemory:
    """Compress the parameters of a live model where they lie, one after the other. Ties stay.

    Of experts `expert_memory` bytes stay on a GPU, and the others go to pinned host memory. Raises
    UsageError for a residency that does not exist or cannot be where the model is, and for a limit on experts
    where that makes no sense; NeuzipError where host memory runs out.
    """
    require_residency(residency)
    require_expert_memory(expert_memory, residency)
    devices = {p.device for p in model.parameters()}
    require_places(residency, devices)
    require_expert_places(expert_memory, devices)
    if residency != "dense":
        places, uses = _places(model), compressible(model)
        require_experts(model, uses, expert_memory)
        experts = None if expert_memory is None else ExpertMemory(expert_memory)
        for name, use in uses.items():
            parameter = model.get_parameter(name)
            if not is_compressed(parameter):
                replace(places, parameter, compress(parameter, use, residency, experts, name))
    return memory(model)


def keep_arrived(
    weight: GridWeight | AnsWeight, experts: ExpertMemory | None = None, name: str = ""
) -> nn.Parameter:
    """A weight that has arrived compressed as a frozen parameter; `experts` places those of `name`."""
    placed: CompressedWeight = weight
    if experts is not None and len(weight.stored) == 3:
        placed = experts.placed(weight, name)
    return nn.Parameter(placed, requires_grad=False)


def pack_arrived(
    dense: torch.Tensor, steps: torch.Tensor | None, exact: bool = False
) -> GridWeight | PackedWeight | torch.Tensor:
    """A weight [out, in] as packed codes if all rows have steps, fp32 [out], else as packed floats, or dense.

    It is dense where no packed form pays: quantized weights have many zeros, and each is an escape of floats.
    """
    if steps is not None and not bool(steps.isnan().any()):
        codes = GridWeight.of_rows(dense, steps)
        if codes is not None:
            return codes
    packed = PackedWeight.of(dense, exact=exact)
    return packed if packed.stored_bytes <= WORTH * dense.nbytes else dense


def settle_arrived(model: nn.Module, compressed: Collection[str]) -> None:
    """Make weights dense that arrived compressed for other parameters than `compressed`, by their names."""
    places = _places(model)
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, GridWeight | AnsWeight) and name not in compressed:
            replace(places, parameter, nn.Parameter(parameter.dense()))


def decompress_parameters(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make all parameters dense again where they lie, one after the other. They train again."""
    to_dense(model)
    places = _places(model)
    for parameter in list(model.parameters()):
        if is_compressed(parameter):
            replace(places, parameter, nn.Parameter(parameter.dense().to(dtype=dtype)))
        elif dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def compress(
    weight: torch.Tensor, use: WeightUse, residency: str, experts: ExpertMemory | None = None, name: str = ""
) -> nn.Parameter:
    """A dense weight compressed where it lies, as a frozen parameter; as it is if that would not pay.

    `experts`, if given, places those of the parameter `name`.
    """
    compressed = _compressed(weight.detach(), use, residency)
    if compressed is None or compressed.stored_bytes > WORTH * weight.nbytes:
        return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    if experts is not None and len(compressed.stored) == 3:
        compressed = experts.placed(compressed, name)
    return nn.Parameter(compressed, requires_grad=False)


def _compressed(weight: torch.Tensor, use: WeightUse, residency: str) -> CompressedWeight | None:
    if residency == "dense" or weight.dtype not in DTYPES:
        return None
    return RESIDENCIES[residency].weight_class.for_use(weight.contiguous(), use)


def is_compressed(weight: torch.Tensor) -> TypeGuard[CompressedWeight]:
    """Whether a parameter is kept in another residency than dense."""
    return isinstance(weight, CompressedWeight) and weight.residency != ""


def memory(model: nn.Module) -> ModelMemory:
    """What the parameters of a live model take; tied ones count once."""
    used: dict[str, MemoryUse] = defaultdict(MemoryUse)
    ternary = MemoryUse()
    for parameter in model.parameters():
        nbytes = parameter.numel() * parameter.dtype.itemsize
        if is_compressed(parameter):
            used[parameter.residency] += MemoryUse(
                parameter.numel(), nbytes, parameter.stored_bytes, parameter.host_bytes
            )
        else:
            used["dense"] += MemoryUse(parameter.numel(), nbytes, nbytes)
    for layer in set(bit_linears(model).values()):
        ternary += MemoryUse(layer.numel, layer.numel * layer.dtype.itemsize, layer.stored_bytes)
    return ModelMemory(dict(used), ternary)


def compressible(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, WeightUse]:
    """The parameters that may be compressed, by all their names, tied ones included, on any device.

    `dtype` is the one that they will have, where those of the model are not filled in yet and have another.
    A weight of several names must be usable under each of them; it is looked up if it is under one.
    """
    groups: dict[int, dict[str, WeightUse | None]] = defaultdict(dict)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = {
        f"{path}.{name}" if path else name: _use(module, name, parameter, dtype or parameter.dtype)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    for name, parameter in parameters.items():
        source = parameters.get(_tied_to(model, name), parameter)
        groups[id(source)][name] = uses.get(name)
    uses_by_name: dict[str, WeightUse] = {}
    for group in groups.values():
        known = [use for use in group.values() if use is not None]
        if len(known) == len(group) and len({use.transposed for use in known}) == 1:
            use = WeightUse(any(use.looked_up for use in known), known[0].transposed)
            uses_by_name |= dict.fromkeys(group, use)
    return uses_by_name


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of which a parameter holds the matrices of several experts."""
    for module in model.modules():
        if any(_is_of_experts(module, parameter) for parameter in module.parameters(recurse=False)):
            yield module


def _tied_to(model: nn.Module, name: str) -> str:
    """The name of the parameter whose place another will share once transformers has tied them."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    seen = {name}
    while (source := ties.get(name)) is not None and source not in seen:
        seen.add(source)
        name = source
    return name


def _use(module: nn.Module, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> WeightUse | None:
    """What a module does with a parameter of its own; None if that is no use for a compressed one."""
    if dtype not in DTYPES or parameter.numel() < SMALLEST:
        return None
    if name == "weight" and parameter.dim() == 2:
        if isinstance(module, nn.Linear):
            return WeightUse()
        if _is_conv1d(module):
            return WeightUse(transposed=True)
        if isinstance(module, nn.Embedding) and module.max_norm is None:
            return WeightUse(looked_up=True)
    if not _is_of_experts(module, parameter):
        return None
    return WeightUse(transposed=getattr(module, "is_transposed", False))  # transformers 5 says so


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a Conv1D of transformers: known by its name, as the core imports no engine."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


def _is_of_experts(module: nn.Module, parameter: nn.Parameter) -> bool:
    several = parameter.dim() == 3 and parameter.shape[0] > 1 and min(parameter.shape[1:]) >= NARROWEST
    return several and not isinstance(module, _ConvNd)


ParameterPlaces = dict[int, list[tuple[nn.Module, str]]]


def _places(model: nn.Module) -> ParameterPlaces:
    """Where parameters are, by their ids."""
    places: ParameterPlaces = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((module, name))
    return places


def replace(places: ParameterPlaces, old: torch.Tensor, new: nn.Parameter) -> None:
    """Put a parameter in all places of another."""
    if new is old:
        return
    for module, name in places[id(old)]:
        module._parameters[name] = new
    places[id(new)] = places.pop(id(old))


def _kind(place: torch.device | str | int) -> str:
    if isinstance(place, int):
        return "cuda"
    return place if place == "disk" else torch.device(place).type


def _number(place: torch.device | str | int) -> int:
    """Which card a place is."""
    number: int | None = place if isinstance(place, int) else torch.device(place).index
    return torch.cuda.current_device() if number is None else number


def expanded(device_map: object) -> Iterator[torch.device | str | int]:
    """The places that a device map names; none for None and for words such as "auto"."""
    if isinstance(device_map, dict):
        yield from device_map.values()
    elif isinstance(device_map, torch.device | int):
        yield device_map
