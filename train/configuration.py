"""What `neuzip train` is told: a TOML file of flat keys, checked before anything is loaded.

docs/explanation/training.md has a table of the keys, their defaults and what they mean.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuzip.errors import NeuzipError, UsageError, unknown_key

from .loop import SHAPES, Schedule

if TYPE_CHECKING:
    from .optimizers import Optimizer
    from .text import Windows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FREE = ("steps", "out", "compress", "checkpoint_every", "budget_minutes", "device", "compressed", "states")
"""Keys that a run may go on with other values of; of `steps` rates depend, though."""

LENGTH = 512
"""Tokens of a window, if the model has so many positions."""

KEPT = ("plain", "lossless")
OPTIMIZERS = ("sgd", "sgd-stochastic", "adamw", "adamw8bit")
"""`states.HOW_KEPT` and the names of `optimizers.OPTIMIZERS`, which would import torch."""

TOKENS = "tokens_xxh3"


@dataclass(frozen=True)
class Configuration:
    """See the module. Relative paths begin in the current folder."""

    texts: list[str]
    out: Path
    steps: int
    lr: float
    model: str | None = None
    scratch: str | None = None
    tokenizer: str | None = None
    length: int | None = None
    batch: int = 8
    micro_batch: int | None = None
    optimizer: str = "adamw8bit"
    weight_decay: float | None = None
    schedule: str = "cosine"
    warm_up: int = 0
    least: float = 0.1
    clip: float = 1.0
    clipping: str = "two-pass"
    compressed: bool = True
    states: str = "plain"
    dtype: str = "bfloat16"
    compress: bool = False
    checkpoint_every: int = 0
    budget_minutes: float | None = None
    seed: int = 0
    device: str = "auto"
    filter_gradients: bool = True
    deterministic: bool = False

    def rates(self) -> Schedule:
        """The learning rates."""
        return Schedule(self.lr, self.steps, self.warm_up, self.least, self.schedule)  # type: ignore[arg-type]

    def method(self) -> Optimizer:
        """The optimizer."""
        from .optimizers import optimizer_of

        found = optimizer_of(self.optimizer)
        if self.weight_decay is None:
            return found
        return dataclasses.replace(found, weight_decay=self.weight_decay)  # type: ignore[type-var]

    def window(self, positions: int | None) -> int:
        """Tokens of a window for a model of so many positions. Raises UsageError for more than it has."""
        if self.length is None:
            return min(LENGTH, positions or LENGTH)
        if positions is not None and self.length > positions:
            raise UsageError(
                f"length is {self.length}, the model has {positions} positions", f"give up to {positions}"
            )
        return self.length

    def to_json(self, windows: Windows) -> dict[str, Any]:
        """What a run that goes on is compared with: what it is told, and the tokens that it reads."""
        return {**self._values(), "length": windows.length, TOKENS: windows.checksum()}

    def _values(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "out": str(self.out)}

    def require_same_text(self, before: dict[str, Any], windows: Windows) -> None:
        """Raise UsageError where a run that goes on would read other tokens, from files of the same names."""
        if before.get(TOKENS) != windows.checksum():
            raise UsageError(
                f"{self.out}: was begun with other tokens than {', '.join(self.texts)} has now",
                "put back the texts and the tokenizer, or give another out",
            )

    def require_same(self, before: dict[str, Any]) -> None:
        """Raise UsageError where a run that goes on would become another one."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, value in self._values().items():
            if name == "length" and value is None:
                continue  # it depends on the model, which is the same
            begun = before.get(name, defaults[name])  # a key that came later has its default
            if name not in FREE and begun != value:
                raise UsageError(
                    f"{self.out}: was begun with {name} = {begun!r}, now it is {value!r}",
                    "give the same, or another out",
                )


def read(path: Path) -> Configuration:
    """Read and check a file. Raises UsageError that names file and key."""
    try:
        given = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    return checked(given, str(path))


def checked(given: dict[str, Any], file: str) -> Configuration:
    """A configuration of what a file gives. Raises UsageError."""
    fields = {field.name: field for field in dataclasses.fields(Configuration)}
    for key in given:
        if key not in fields:
            raise unknown_key(file, key, fields)
    values = {key: _typed(file, key, fields[key].type, value) for key, value in given.items()}
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise UsageError(f"{file}: lacks {', '.join(missing)}", f"add a line such as {EXAMPLES[missing[0]]}")
    found = Configuration(**values)
    _require_sense(file, found)
    return found


EXAMPLES = {
    "texts": 'texts = ["my.txt"]',
    "out": 'out = "trained"',
    "steps": "steps = 1000",
    "lr": "lr = 1e-4",
}

_KINDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "str": ((str,), "a string"),
    "Path": ((str, Path), "a string"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}


def _typed(file: str, key: str, annotation: Any, value: Any) -> Any:
    kind = str(annotation).removesuffix(" | None")
    if kind == "list[str]":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{file}: {key} is {value!r}", 'give a list of names, such as ["my.txt"]')
        return texts
    types, words = _KINDS[kind]
    if type(value) not in types:  # true is an int to isinstance
        raise UsageError(f"{file}: {key} is {value!r}", f"give {words}")
    return types[-1](value)


def _require_sense(file: str, found: Configuration) -> None:
    if (found.model is None) == (found.scratch is None):
        raise UsageError(
            f"{file}: has to have one of model and scratch", "model trains on, scratch begins anew"
        )
    if (found.scratch is None) != (found.tokenizer is None):
        raise UsageError(f"{file}: tokenizer belongs to scratch", "give both, or model alone")
    for name in ("steps", "length", "batch"):
        if (value := getattr(found, name)) is not None and value < 1:
            raise UsageError(f"{file}: {name} is {getattr(found, name)}", "give 1 and more")
    for name in ("seed", "weight_decay", "checkpoint_every"):
        if (getattr(found, name) or 0) < 0:
            raise UsageError(f"{file}: {name} is {getattr(found, name)}", "give 0 and more")
    if found.budget_minutes is not None and not found.budget_minutes > 0:
        raise UsageError(f"{file}: budget_minutes is {found.budget_minutes}", "give more than 0, or none")
    for name, choices in (
        ("schedule", SHAPES), ("clipping", ("two-pass", "running")), ("device", ("auto", "cpu", "cuda")),
        ("dtype", ("bfloat16", "float16", "float32")), ("states", KEPT), ("optimizer", OPTIMIZERS),
    ):  # fmt: skip
        if getattr(found, name) not in choices:
            raise UsageError(
                f"{file}: there is no {name} {getattr(found, name)!r}", f"choose from {', '.join(choices)}"
            )
    found.rates()
