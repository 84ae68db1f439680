"""Groups of tensors that get one scheme.

The experts of a layer are one group, which `expert_groups` may split by how often they are chosen.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from neuzip.compress.globs import matches
from neuzip.compress.plan import Plan, PlannedTensor, make_plan
from neuzip.compress.rules import LOSSLESS, Rule
from neuzip.compress.scheme import Scheme
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.errors import NeuzipError
from neuzip.eval.experts.expert_use import UseClass


@dataclass(frozen=True)
class GroupUse:
    """Experts of a layer of one class of use, and the tokens that chose them."""

    name: UseClass
    tokens: int


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that get one scheme, and the globs that name them and no others.

    `aliases` are the names of those that are stored as another one, whose bytes they have. `use` says how
    often the experts were chosen of which they are, None for all experts of a layer and for other tensors.
    """

    globs: tuple[str, ...]
    tensors: tuple[SourceTensor, ...]
    aliases: frozenset[str] = frozenset()
    use: GroupUse | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as they are."""
        return sum(t.info.nbytes for t in self.tensors)


def find_groups(source: FolderSource, workers: Workers, rules: Sequence[Rule]) -> list[TensorGroup]:
    """The tensors that may be rounded: matrices of floats that `rules` leave lossless, by what they are.

    Tensors with equal bytes go together. Raises NeuzipError if there are none.
    """
    by_kind: dict[str, list[PlannedTensor]] = defaultdict(list)
    for t in find_matrices(source, make_plan(source, rules, workers)):
        by_kind[_kind((t.alias_of or t.tensor).name)].append(t)
    names = [t.name for t in source.tensors()]
    return [
        TensorGroup(
            _globs([t.tensor.name for t in members], names),
            tuple(t.tensor for t in members),
            frozenset(t.tensor.name for t in members if t.alias_of is not None),
        )
        for members in by_kind.values()
    ]


def find_matrices(source: FolderSource, plan: Plan) -> list[PlannedTensor]:
    """The tensors that a target may make lossy: matrices of floats that a plan leaves lossless.

    Raises NeuzipError if there are none.
    """
    matrices = [t for t in plan.tensors if t.scheme == LOSSLESS and len(t.tensor.info.shape) > 1]
    if not matrices:
        raise NeuzipError(
            f"{source.checkpoint.path}: there is no matrix of floats that could be rounded",
            "leave out `include` and `exclude`, or the target",
        )
    return matrices


def _kind(name: str) -> str:
    """A name with its numbers replaced, but not the first: so those of experts, not that of the layer.

    >>> _kind("model.layers.3.mlp.experts.17.w1.weight")
    'model.layers.3.mlp.experts.*.w1.weight'
    """
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    return ".".join("*" if at in numbers[1:] else part for at, part in enumerate(parts))


def _globs(members: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Globs that match the members and none of the other names: those of their kinds, or else each name."""
    kinds = tuple(dict.fromkeys(_kind(name) for name in members))
    if len(kinds) < len(members):
        named = [name for name in names if any(matches(name, kind) for kind in kinds)]
        if sorted(named) == sorted(members):
            return kinds
    return tuple(map(exact_glob, dict.fromkeys(members)))


def exact_glob(name: str) -> str:
    """A glob that matches one name.

    >>> exact_glob("layers.0.w[1]")
    'layers.0.w[[]1]'
    """
    return re.sub(r"([*?[{])", r"[\1]", name)


def glob_of_experts(kind: str, experts: Sequence[int]) -> str:
    """A glob for some experts, from the kind of their names.

    >>> glob_of_experts("model.layers.3.mlp.experts.*.w1.weight", [0, 17])
    'model.layers.3.mlp.experts.{0,17}.w1.weight'
    """
    numbers = ",".join(map(str, experts))
    return kind.replace("*", numbers if len(experts) == 1 else f"{{{numbers}}}")


def rules_of(groups: Sequence[TensorGroup], schemes: Sequence[Scheme]) -> list[Rule]:
    """The rules that give each group its scheme. What is lossless needs none."""
    return [
        Rule(glob, scheme, min_dimensions=2)
        for group, scheme in zip(groups, schemes, strict=True)
        if scheme != LOSSLESS
        for glob in group.globs
    ]
