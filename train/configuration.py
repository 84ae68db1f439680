"""What `neuzip train` is told: a TOML file of flat keys, checked before anything is loaded.

docs/reference/config.md has a table of the keys, their defaults and what they mean.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuzip.errors import NeuzipError, UsageError, unknown_key

from .loop import SHAPES, Schedule
from .presets import BITNET, BitNetRecipe, int8_steps, preset_keys

if TYPE_CHECKING:
    from .optimizers import Optimizer
    from .ternary_training import TernaryStages
    from .text import TrainingWindows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FREE = (
    "steps", "output", "compress", "checkpoint_every", "budget_minutes", "device", "compressed",
    "optimizer_state", "eval_text",
)  # fmt: skip
"""Keys whose values may change when a run resumes. Learning rates depend on `steps`."""

LENGTH = 512
"""Tokens of a window, if the model has so many positions."""

KEPT = ("plain", "lossless")
OPTIMIZERS = ("sgd", "sgd-stochastic", "adamw", "adamw8bit")
"""Names of optimizers, as in `optimizers.OPTIMIZERS`, which imports torch."""

TERNARY = ("b1.58", "a4.8", "a4.8-fp4")
"""Activations of ternary models, as in `activations.MODES`, which imports torch."""

TOKENS = "tokens_xxh3"

OLD = {
    "texts": "text", "out": "output", "length": "window", "batch": "batch_size",
    "micro_batch": "micro_batch_size", "states": "optimizer_state", "warm_up": "warmup_steps",
    "least": "min_lr_ratio", "clip": "max_grad_norm",
}  # fmt: skip
"""Old names of keys: accepted in files until version 0.2, and in runs that began with them."""

BEFORE = {"filter_gradients": True}
"""What runs did that began before a key existed, where its default says something else."""


@dataclass(frozen=True)
class TrainingConfiguration:
    """The settings of a training run: the keys of its TOML file. Paths are relative to the current folder."""

    text: list[str]
    output: Path
    steps: int
    lr: float
    model: str | None = None
    scratch: str | None = None
    preset: str | None = None
    scale: float = 1.0
    tokenizer: str | None = None
    ternary: str | None = None
    int8_fraction: float = 0.95
    window: int | None = None
    batch_size: int = 8
    micro_batch_size: int | None = None
    optimizer: str = "adamw8bit"
    weight_decay: float | None = None
    schedule: str = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    cooldown_lr: float | None = None
    cooldown_start: float = 0.5
    max_grad_norm: float = 1.0
    clipping: str = "two-pass"
    compressed: bool = True
    optimizer_state: str = "plain"
    dtype: str = "bfloat16"
    compress: bool = False
    checkpoint_every: int = 0
    budget_minutes: float | None = None
    eval_text: str | None = None
    seed: int = 0
    device: str = "auto"
    filter_gradients: bool | None = None
    deterministic: bool = False

    def rates(self) -> Schedule:
        """The learning rates."""
        shape: Any = self.schedule  # it was checked
        return Schedule(
            self.lr, self.steps, self.warmup_steps, self.min_lr_ratio, shape, self.cooldown_lr,
            round(self.cooldown_start * self.steps),
        )  # fmt: skip

    def filters_gradients(self) -> bool:
        """Whether gradients of the head are filtered: as the file says, else only those of a trained model.

        Random weights predict all V tokens alike at first, and 1 / V is below the threshold of the filter for
        the vocabularies of most models: it would drop all gradients but those of tiles with a target.
        """
        return self.model is not None if self.filter_gradients is None else self.filter_gradients

    def recipe(self) -> BitNetRecipe | None:
        """The model of the preset, in the size of this run; None without a preset."""
        return None if self.preset is None else BITNET[self.preset].scaled(self.scale)

    def stages(self) -> TernaryStages | None:
        """The activations of all steps; None for a model that is not ternary."""
        from .ternary_training import TernaryStages

        return None if self.ternary is None else TernaryStages(self.ternary, self.steps, self.int8_fraction)

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
        own = {"output": str(self.output), "filter_gradients": self.filters_gradients()}
        return {**dataclasses.asdict(self), **own}

    def require_same_text(self, before: dict[str, Any], windows: TrainingWindows) -> None:
        """Raise UsageError where a run that goes on would read other tokens, from files of the same names."""
        if before.get(TOKENS) != windows.checksum():
            raise UsageError(
                f"{self.output}: was started with other tokens than {', '.join(self.text)} has now",
                "restore the texts and the tokenizer, or give another output",
            )

    def require_same(self, before: dict[str, Any]) -> None:
        """Raise UsageError where a run that goes on would become another one."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)} | BEFORE
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
    document = _with_preset(document, file)
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


def _with_preset(document: dict[str, Any], file: str) -> dict[str, Any]:
    """The entries of a file, with those of its preset that it does not have itself. Raises UsageError."""
    preset = document.get("preset")
    if not isinstance(preset, str):
        return document  # there is none, or `_typed` says what is wrong
    try:
        return {**preset_keys(preset), **document}
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", error.hint) from error


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
    _require_start(file, config)
    for name in ("steps", "window", "batch_size"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise UsageError(f"{file}: {name} is {getattr(config, name)}", "give at least 1")
    for name in ("seed", "weight_decay", "checkpoint_every", "cooldown_lr"):
        if (getattr(config, name) or 0) < 0:
            raise UsageError(f"{file}: {name} is {getattr(config, name)}", "give at least 0")
    if config.budget_minutes is not None and not config.budget_minutes > 0:
        raise UsageError(
            f"{file}: budget_minutes is {config.budget_minutes}", "give more than 0, or leave it out"
        )
    for name, choices in (
        ("schedule", SHAPES), ("clipping", ("two-pass", "running")), ("device", ("auto", "cpu", "cuda")),
        ("dtype", ("bfloat16", "float16", "float32")), ("optimizer_state", KEPT), ("optimizer", OPTIMIZERS),
        ("ternary", (None, *TERNARY)),
    ):  # fmt: skip
        if getattr(config, name) not in choices:
            raise UsageError(
                f"{file}: there is no {name} {getattr(config, name)!r}",
                f"choose from {', '.join(choice for choice in choices if choice is not None)}",
            )
    for name, ignored, instead in (
        ("dtype", config.model is not None, "with model, whose weights have their own"),
        ("scale", config.preset is None, "without preset"),
        ("int8_fraction", config.ternary in (None, "b1.58"), "unless ternary is a4.8 or a4.8-fp4"),
        ("cooldown_start", config.cooldown_lr is None, "without cooldown_lr"),
        ("min_lr_ratio", config.schedule == "constant", 'with schedule = "constant"'),
        ("clipping", not config.max_grad_norm, "with max_grad_norm = 0"),
    ):
        if ignored and getattr(config, name) != getattr(TrainingConfiguration, name):
            raise UsageError(f"{file}: {name} has no effect {instead}", f"leave out {name}")
    if (
        config.ternary not in (None, "b1.58")
        and int8_steps(config.int8_fraction, config.steps) >= config.steps
    ):
        raise UsageError(
            f"{file}: with int8_fraction {config.int8_fraction}, all of the {config.steps} steps have 8-bit "
            f"activations and none those of {config.ternary}",
            "lower int8_fraction, raise steps, or give b1.58 as ternary",
        )
    config.rates()


def _require_start(file: str, config: TrainingConfiguration) -> None:
    """Raise UsageError for keys that do not say what a run begins with, and how its weights are trained."""
    if [config.model, config.scratch, config.preset].count(None) != 2:
        raise UsageError(
            f"{file}: needs one of model, scratch and preset",
            "model trains a checkpoint further, scratch and preset start from random weights",
        )
    if (config.model is None) != (config.tokenizer is not None):
        raise UsageError(f"{file}: tokenizer belongs to scratch or preset", "give both, or only model")
    if config.ternary is not None and config.model is not None:
        raise UsageError(
            f"{file}: ternary starts from random weights, not from a model",
            "give scratch or preset; neuzip recover makes a trained model ternary",
        )
    for name in ("int8_fraction", "cooldown_start"):
        if not 0 <= getattr(config, name) <= 1:
            raise UsageError(f"{file}: {name} is {getattr(config, name)}", "it is a share, from 0 to 1")
    if not 0 < config.scale < math.inf:
        raise UsageError(f"{file}: scale is {config.scale}", "give a number above 0, such as 0.25")
