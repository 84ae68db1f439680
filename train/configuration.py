"""What `neuzip train` is told: a TOML file of flat keys, checked before anything is loaded.

docs/reference/config.md has a table of the keys, their defaults and what they mean.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuzip.errors import NeuzipError, UsageError, unknown_key

from .loop import SHAPES, Schedule

if TYPE_CHECKING:
    from .optimizers import Optimizer
    from .text import TrainingWindows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FREE = (
    "steps", "output", "compress", "checkpoint_every", "budget_minutes", "device", "compressed",
    "optimizer_state",
)  # fmt: skip
"""Keys whose values may change when a run resumes. Learning rates depend on `steps`."""

LENGTH = 512
"""Tokens of a window, if the model has so many positions."""

KEPT = ("plain", "lossless")
OPTIMIZERS = ("sgd", "sgd-stochastic", "adamw", "adamw8bit")
"""Names of optimizers, as in `optimizers.OPTIMIZERS`, which imports torch."""

TOKENS = "tokens_xxh3"

OLD = {
    "texts": "text", "out": "output", "length": "window", "batch": "batch_size",
    "micro_batch": "micro_batch_size", "states": "optimizer_state", "warm_up": "warmup_steps",
    "least": "min_lr_ratio", "clip": "max_grad_norm",
}  # fmt: skip
"""Old names of keys: accepted in files until version 0.2, and in runs that began with them."""


@dataclass(frozen=True)
class TrainingConfiguration:
    """The settings of a training run: the keys of its TOML file. Paths are relative to the current folder."""

    text: list[str]
    output: Path
    steps: int
    lr: float
    model: str | None = None
    scratch: str | None = None
    tokenizer: str | None = None
    window: int | None = None
    batch_size: int = 8
    micro_batch_size: int | None = None
    optimizer: str = "adamw8bit"
    weight_decay: float | None = None
    schedule: str = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    max_grad_norm: float = 1.0
    clipping: str = "two-pass"
    compressed: bool = True
    optimizer_state: str = "plain"
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
        shape: Any = self.schedule  # it was checked
        return Schedule(self.lr, self.steps, self.warmup_steps, self.min_lr_ratio, shape)

    def method(self) -> Optimizer:
        """The optimizer."""
        from .optimizers import optimizer_of

        optimizer = optimizer_of(self.optimizer)
        if self.weight_decay is None:
            return optimizer
        return dataclasses.replace(optimizer, weight_decay=self.weight_decay)  # type: ignore[type-var]

    def window_for(self, positions: int | None) -> int:
        """Tokens of a window for a model of `positions`. Raises UsageError for more."""
        if self.window is None:
            return min(LENGTH, positions or LENGTH)
        if positions is not None and self.window > positions:
            raise UsageError(
                f"window is {self.window}, the model has {positions} positions", f"give at most {positions}"
            )
        return self.window

    def to_json(self, windows: TrainingWindows) -> dict[str, Any]:
        """The facts that must be equal for a run to resume: its settings, and the tokens that it reads."""
        return {**self._values(), "window": windows.length, TOKENS: windows.checksum()}

    def _values(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "output": str(self.output)}

    def require_same_text(self, before: dict[str, Any], windows: TrainingWindows) -> None:
        """Raise UsageError where a run that goes on would read other tokens, from files of the same names."""
        if before.get(TOKENS) != windows.checksum():
            raise UsageError(
                f"{self.output}: was started with other tokens than {', '.join(self.text)} has now",
                "restore the texts and the tokenizer, or give another output",
            )

    def require_same(self, before: dict[str, Any]) -> None:
        """Raise UsageError where a run that goes on would become another one."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        before = {OLD.get(name, name): value for name, value in before.items()}
        for name, value in self._values().items():
            if name == "window" and value is None:
                continue  # it depends on the model, which is the same
            begun = before.get(name, defaults[name])  # a key that came later has its default
            if name not in FREE and begun != value:
                raise UsageError(
                    f"{self.output}: was started with {name} = {begun!r}, now it is {value!r}",
                    "give the same, or another output",
                )


def read(path: Path, warn: Callable[[str], None]) -> TrainingConfiguration:
    """Read and check a file; `warn` hears of old keys. Raises UsageError that names file and key."""
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    return checked(renamed(document, str(path), warn), str(path))


def renamed(document: dict[str, Any], file: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """The entries of a file under the present keys. Raises UsageError for a key under both its names."""
    for old, new in OLD.items():
        if old in document:
            if new in document:
                raise UsageError(f"{file}: {old} and {new} are one key", f"leave out {old}")
            warn(f"{file}: {old} is now called {new}; version 0.2 removes the old name")
    return {OLD.get(key, key): value for key, value in document.items()}


def checked(document: dict[str, Any], file: str) -> TrainingConfiguration:
    """A configuration of what a file gives. Raises UsageError."""
    fields = {field.name: field for field in dataclasses.fields(TrainingConfiguration)}
    for key in document:
        if key not in fields:
            raise unknown_key(file, key, fields)
    values = {key: _typed(file, key, fields[key].type, value) for key, value in document.items()}
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise UsageError(f"{file}: lacks {', '.join(missing)}", f"add a line such as {EXAMPLES[missing[0]]}")
    config = TrainingConfiguration(**values)
    _require_sense(file, config)
    return config


EXAMPLES = {
    "text": 'text = ["my.txt"]',
    "output": 'output = "trained"',
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


def _require_sense(file: str, config: TrainingConfiguration) -> None:
    if (config.model is None) == (config.scratch is None):
        raise UsageError(
            f"{file}: needs either model or scratch",
            "model trains a checkpoint further, scratch starts from random weights",
        )
    if (config.scratch is None) != (config.tokenizer is None):
        raise UsageError(f"{file}: tokenizer belongs to scratch", "give both, or only model")
    for name in ("steps", "window", "batch_size"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise UsageError(f"{file}: {name} is {getattr(config, name)}", "give at least 1")
    for name in ("seed", "weight_decay", "checkpoint_every"):
        if (getattr(config, name) or 0) < 0:
            raise UsageError(f"{file}: {name} is {getattr(config, name)}", "give at least 0")
    if config.budget_minutes is not None and not config.budget_minutes > 0:
        raise UsageError(
            f"{file}: budget_minutes is {config.budget_minutes}", "give more than 0, or leave it out"
        )
    for name, choices in (
        ("schedule", SHAPES), ("clipping", ("two-pass", "running")), ("device", ("auto", "cpu", "cuda")),
        ("dtype", ("bfloat16", "float16", "float32")), ("optimizer_state", KEPT), ("optimizer", OPTIMIZERS),
    ):  # fmt: skip
        if getattr(config, name) not in choices:
            raise UsageError(
                f"{file}: there is no {name} {getattr(config, name)!r}", f"choose from {', '.join(choices)}"
            )
    for name, ignored, instead in (
        ("dtype", config.scratch is None, "with model, whose weights have their own"),
        ("min_lr_ratio", config.schedule == "constant", 'with schedule = "constant"'),
        ("clipping", not config.max_grad_norm, "with max_grad_norm = 0"),
    ):
        if ignored and getattr(config, name) != getattr(TrainingConfiguration, name):
            raise UsageError(f"{file}: {name} has no effect {instead}", f"leave out {name}")
    config.rates()
