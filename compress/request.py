"""What `compress` is asked for, as the rules it stands for: which parameters exclude or need each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from neuzip.errors import UsageError

from .scheme import RAW, Rule, Scheme, read_plan_file, rules_of_options

FOR_TERNARY = ("ternary_quantizer", "ternary_group", "ternary_packing")
"""Parameters that say how weights are made ternary."""


def given(**values: object) -> dict[str, object]:
    """The parameters that were given: those that are neither None nor empty nor False; but 0 is a number."""
    return {name: value for name, value in values.items() if value or (value == 0 and value is not False)}


def refuse_contradictions(given: Mapping[str, object], target: str | None = None) -> None:
    """Raise UsageError for parameters of `compress` that exclude each other, or lack one that they need.

    `given` are those that differ from their defaults, by name; `target` is the name of the target among them.
    """
    own = ("mantissa_bits", "bits_for", "block_size", "include", "ternary", "rules")
    if "plan" in given:
        _exclude(given, "plan", own, "write them into the plan")
    if "rules" in given:
        _exclude(given, "rules", (*own[:-1], "exclude"), "write them into the rules")
    if target is not None:
        others = ("plan", "rules", "mantissa_bits", "bits_for", "ternary")
        _exclude(given, target, others, "it chooses the mantissa bits itself")
    for name in FOR_TERNARY:
        if name in given and "ternary" not in given:
            raise UsageError(
                f"`{name}` has no effect without `ternary=True`", "add `ternary=True`, or leave it out"
            )
    for name in ("text", "sensitivity"):
        if name in given and target is None:
            raise UsageError(
                f"`{name}` has no effect without a target",
                "add `max_kld`, `max_ppl_increase` or `target_size`, or leave it out",
            )


def refuse_beside_base(given: Mapping[str, object], target: str | None = None) -> None:
    """Raise UsageError for parameters that a delta excludes."""
    others = ("mantissa_bits", "bits_for", "plan", "rules", "ternary", *([] if target is None else [target]))
    _exclude(given, "base", others, "a delta is always exact: leave them out")


def refuse_without_ternary(given: Mapping[str, object], rules: Iterable[Rule]) -> None:
    """Raise UsageError for parameters of ternary weights where no rule makes any, such as those of a plan."""
    if any(rule.scheme.kind == "ternary" for rule in rules):
        return
    why = "without `ternary=True`, or a plan with ternary rules"
    if "plan" in given:
        why = f"because {given['plan']} has no ternary rule"
    for name in ("activations", "allow_destructive"):
        if name in given:
            raise UsageError(
                f"`{name}` has no effect {why}", 'add a rule with scheme = "ternary", or leave it out'
            )


def _exclude(given: Mapping[str, object], name: str, others: Sequence[str], hint: str) -> None:
    excluded = [f"`{other}`" for other in others if other in given]
    if excluded:
        raise UsageError(f"`{name}` excludes {' and '.join(excluded)}", hint)


def rules_of(
    mantissa_bits: int | None = None,
    block_size: str = "none",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    ternary: Scheme | None = None,
    bits_for: Sequence[str] = (),
    plan: str | os.PathLike[str] | None = None,
) -> list[Rule]:
    """The rules that parameters stand for, those of a `plan` file among them. Raises NeuzipError."""
    if plan is not None:
        return [*(Rule(glob, RAW) for glob in exclude), *read_plan_file(plan)]
    return rules_of_options(mantissa_bits, block_size, include, exclude, ternary, bits_for)
