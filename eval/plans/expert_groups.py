"""Splits the experts of a layer by how often they are chosen, so that rarely chosen ones get fewer bits.

    measured    the divergence with all experts of a layer rounded: one measurement per layer, matrix and
                scheme, however many experts there are
    shared out  among the classes hot, usual, cold and unused: to second order, what an expert adds is in
                proportion to its squared errors, to the tokens that choose it, and to its squared weight

Experts that are stored as one 3-D tensor have one scheme, and are not split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from neuzip.compress.expert_names import ExpertName, expert_name
from neuzip.eval.experts.expert_use import CLASSES, LEAST, ExpertUse, LayerUse
from neuzip.eval.plans.candidates import GroupCandidates
from neuzip.eval.plans.sensitivity import Sensitivity
from neuzip.eval.plans.tensor_groups import GroupUse, TensorGroup, glob_of_experts


def split_by_use(sensitivity: Sensitivity, use: ExpertUse) -> Sensitivity:
    """The sensitivity with a group for each class of experts of a layer in place of one for all of them."""
    groups: list[GroupCandidates] = []
    divergences: list[tuple[float, ...]] = []
    uses = uses_of_groups([one.group for one in sensitivity.candidates], use)
    for one, values, layer in zip(sensitivity.candidates, sensitivity.divergences, uses, strict=True):
        if layer is None:
            groups.append(one)
            divergences.append(values)
            continue
        for part, shares in _parts(one, layer):
            groups.append(part)
            divergences.append(tuple(d * share for d, share in zip(values, shares, strict=True)))
    return Sensitivity(sensitivity.method, tuple(groups), tuple(divergences), sensitivity.estimated)


def uses_of_groups(groups: Sequence[TensorGroup], use: ExpertUse) -> list[LayerUse | None]:
    """The use of the experts of each group; None for a group that is not one tensor of each expert."""
    names = [_experts_of(group) for group in groups]
    stacks = Counter(of_group[0].stack for of_group in names if of_group)
    main = stacks.most_common(1)[0][0] if stacks else ""  # not layers for predicting several tokens, say
    return [
        use.of_layer(of_group[0].layer, len(of_group)) if of_group and of_group[0].stack == main else None
        for of_group in names
    ]


def _experts_of(group: TensorGroup) -> list[ExpertName]:
    """The names of a group of one tensor for each expert of a layer; else nothing."""
    names = [name for name in (expert_name(t.name) for t in group.tensors) if name is not None]
    complete = len({name.kind for name in names}) == 1 and len(names) == len(group.tensors)
    each = complete and sorted(name.expert for name in names) == list(range(len(names)))
    return names if each and not group.aliases else []


def _parts(one: GroupCandidates, layer: LayerUse) -> list[tuple[GroupCandidates, list[float]]]:
    """The experts of each class, and their share of the divergence of all in each scheme.

    The shares of rarely chosen experts are upper bounds, so the sum of all shares may be more than 1.
    """
    names = _experts_of(one.group)
    classes, bound, seen = layer.classes, layer.importance(LEAST), layer.importance()
    schemes = [choice.scheme for choice in one.choices]
    squares = [{c.scheme: c.squares for c in choices} for choices in one.of_tensors]
    whole = [
        sum(seen[name.expert] * of_tensor[scheme] for name, of_tensor in zip(names, squares, strict=True))
        for scheme in schemes
    ]
    parts = []
    for use_class in CLASSES:
        members = [at for at, name in enumerate(names) if classes[name.expert] == use_class]
        if not members:
            continue
        experts = sorted(names[at].expert for at in members)
        group = TensorGroup(
            (glob_of_experts(names[0].kind, experts),) if len(members) < len(names) else one.group.globs,
            tuple(one.group.tensors[at] for at in members),
            use=GroupUse(use_class, sum(layer.tokens[expert] for expert in experts)),
        )
        of_tensors = [tuple(c for c in one.of_tensors[at] if c.scheme in schemes) for at in members]
        shares = [
            sum(bound[names[at].expert] * squares[at][scheme] for at in members) / (total or 1.0)
            for scheme, total in zip(schemes, whole, strict=True)
        ]
        parts.append((GroupCandidates.of(group, of_tensors), shares))
    return parts
