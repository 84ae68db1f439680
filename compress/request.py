"""What `compress` is to do, as its callers gave it: parameters that exclude or need each other, and rules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from neuzip.choices import Activations, Sensitivity, TargetScheme, TernaryPacking, TernaryQuantizer
from neuzip.errors import UsageError
from neuzip.formats.records import TernaryRecord

from .rules import RAW, Rule, rules_of_options, ternary_of_options
from .rules_file import read_plan_file
from .schemes import codec_for

TARGET = "target"
"""The name in the tables below of whichever parameter sets a target: `max_kld`, for example."""

OWN_RULES = ("mantissa_bits", "bits_for", "block_size", "include", "ternary")
"""Parameters that stand for rules, which a list of rules has to hold itself."""


@dataclass(frozen=True)
class Conflict:
    """A parameter that excludes others. `hint` says what to do instead."""

    parameter: str
    others: tuple[str, ...]
    hint: str

    def problem(self, parameters: Mapping[str, object], target: str | None) -> UsageError | None:
        """The error if the parameter and some of the others are among `parameters`, those that were given."""
        if self.parameter not in parameters:
            return None
        others = [f"`{_name(other, target)}`" for other in self.others if other in parameters]
        if not others:
            return None
        return UsageError(f"`{_name(self.parameter, target)}` excludes {' and '.join(others)}", self.hint)


@dataclass(frozen=True)
class Requirement:
    """A parameter without effect unless `other` is given too. `other_text` is what a message calls that.

    With `beside`, the check applies only where that parameter is given.
    """

    parameter: str
    other: str
    other_text: str
    hint: str
    beside: str | None = None

    def problem(self, parameters: Mapping[str, object], target: str | None) -> UsageError | None:
        """The error if the parameter is among `parameters`, those that were given, and the other is not."""
        if self.parameter not in parameters or self.other in parameters:
            return None
        if self.beside is not None and self.beside not in parameters:
            return None
        return UsageError(f"`{self.parameter}` has no effect without {self.other_text}", self.hint)


_WITH_TERNARY = "add `ternary=True`, or leave it out"
_WITH_TARGET = "add `bits`, `max_kld`, `max_ppl_increase` or `target_size`, or leave it out"

ROUNDED = "scheme='rounded'"
"""What messages call the parameter `scheme`, which differs from its default only so."""


def _of_rounding(parameter: str, why: str) -> Requirement:
    """A parameter that says how mantissas are rounded, so that it has no effect on quantised weights."""
    return Requirement(
        parameter, "scheme", f"`{ROUNDED}`: {why}", f"add `{ROUNDED}`, or leave it out", beside=TARGET
    )


CHECKS: tuple[Conflict | Requirement, ...] = (
    Conflict("plan", (*OWN_RULES, "rules"), "write them into the plan"),
    Conflict("rules", (*OWN_RULES, "exclude"), "write them into the rules"),
    Conflict(
        TARGET, ("plan", "rules", "mantissa_bits", "bits_for", "ternary"),
        "it chooses the precision of each tensor itself",
    ),
    Requirement("ternary_quantizer", "ternary", "`ternary=True`", _WITH_TERNARY),
    Requirement("ternary_group", "ternary", "`ternary=True`", _WITH_TERNARY),
    Requirement("ternary_packing", "ternary", "`ternary=True`", _WITH_TERNARY),
    Requirement("text", TARGET, "a target", _WITH_TARGET),
    Requirement("sensitivity", TARGET, "a target", _WITH_TARGET),
    Requirement("expert_use", TARGET, "a target", _WITH_TARGET),
    Requirement("scheme", TARGET, "a target", _WITH_TARGET),
    Requirement("calibration", TARGET, "a target", _WITH_TARGET),
    Conflict("scheme", ("calibration",), "only quantised weights are calibrated: leave one of them out"),
    _of_rounding("sensitivity", "the steps of quantised weights follow their Fisher information"),
    _of_rounding("expert_use", "the step of an expert follows its Fisher information, which counts its use"),
    _of_rounding("block_size", "quantised weights have no blocks"),
    Conflict(
        "base", ("mantissa_bits", "bits_for", "plan", "rules", "ternary", TARGET),
        "a delta is always exact: leave them out",
    ),
)  # fmt: skip
"""What is looked at in this order before anything is read; the first problem is raised."""


@dataclass(frozen=True)
class CompressRequest:
    """The parameters of `compress` that say how tensors are stored; the defaults are those of its callers.

    bits_for       mantissa bits by glob, as "GLOB=K"
    block_size     weights that share a per-block scale, in decimal digits, or "none"
    ternary_group  weights that share a scale, in decimal digits, or "row" or "tensor"
    target         name of the parameter that sets a target, such as "max_kld"; None without one
    scheme         how weights are stored for a target
    calibration    text whose error feedback chooses the codes of quantised weights, or "auto" or "none"
    expert_use     file of how often experts are chosen, or "auto" or "none"
    """

    mantissa_bits: int | None = None
    bits_for: Sequence[str] = ()
    block_size: str = "none"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    plan: str | os.PathLike[str] | None = None
    rules: Sequence[Rule] | None = None
    ternary: bool = False
    ternary_quantizer: TernaryQuantizer = "absmean"
    ternary_group: str = "tensor"
    ternary_packing: TernaryPacking = "trits"
    activations: Activations | None = None
    allow_destructive: bool = False
    target: str | None = None
    text: str | os.PathLike[str] | None = None
    scheme: TargetScheme = "quantized"
    calibration: str | os.PathLike[str] = "auto"
    sensitivity: Sensitivity = "auto"
    expert_use: str | os.PathLike[str] = "auto"
    base: str | os.PathLike[str] | None = None

    def parameters(self) -> dict[str, object]:
        """The parameters that were given, by name: those that differ from their defaults.

        >>> CompressRequest(mantissa_bits=0, ternary_group="row").parameters()
        {'mantissa_bits': 0, 'ternary_group': 'row'}
        """
        defaults = type(self).__dataclass_fields__
        return {
            name: value
            for name, value in vars(self).items()
            if value != defaults[name].default and (value or type(value) is int or name == "rules")
        }

    def refuse_conflicts(self) -> None:
        """Raise UsageError for parameters that exclude each other, or lack one that they need."""
        parameters = self.parameters()
        for check in CHECKS:
            if (problem := check.problem(parameters, self.target)) is not None:
                raise problem

    def to_rules(self) -> Sequence[Rule]:
        """The rules that the parameters stand for, those of a `plan` file among them.

        Raises NeuzipError for a plan that cannot be read, and UsageError for `rules` that are none and for
        parameters of ternary weights where no rule makes any.
        """
        if self.rules is None:
            rules: Sequence[Rule] = self._rules()
        elif isinstance(self.rules, list | tuple) and all(isinstance(rule, Rule) for rule in self.rules):
            rules = self.rules
        else:
            raise UsageError(
                f"`rules={self.rules!r}`: is no list of neuzip.Rule", 'give rules: [Rule("*.weight", ...)]'
            )
        self._require_ternary(rules)
        return rules

    def _rules(self) -> list[Rule]:
        ternary = ternary_of_options(self.ternary_quantizer, self.ternary_group, self.ternary_packing)
        if self.plan is not None:
            return [*(Rule(glob, RAW) for glob in self.exclude), *read_plan_file(self.plan)]
        block_size = "none" if self.target is not None else self.block_size  # a target has it try both
        return rules_of_options(
            self.mantissa_bits, block_size, self.include, self.exclude, ternary if self.ternary else None,
            self.bits_for,
        )  # fmt: skip

    def _require_ternary(self, rules: Iterable[Rule]) -> None:
        """Raise UsageError for parameters of ternary weights without a ternary rule."""
        if any(codec_for(rule.scheme).record is TernaryRecord for rule in rules):
            return
        why = "without `ternary=True`, or a plan with ternary rules"
        if self.plan is not None:
            why = f"because {self.plan} has no ternary rule"
        for name in ("activations", "allow_destructive"):
            if name in self.parameters():
                raise UsageError(
                    f"`{name}` has no effect {why}", 'add a rule with scheme = "ternary", or leave it out'
                )


def _name(parameter: str, target: str | None) -> str:
    """A parameter as messages call it: a target by the one that sets it."""
    if parameter == "scheme":
        return ROUNDED
    return parameter if parameter != TARGET or target is None else target
