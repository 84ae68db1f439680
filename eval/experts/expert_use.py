"""How often each expert of a mixture was chosen on a text, and the file that says so. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.safetensors_file import parse_json

UseClass = Literal["hot", "usual", "cold", "unused"]
"""How often an expert was chosen, in a word."""

CLASSES: tuple[UseClass, ...] = get_args(UseClass)

HOT, COLD = 2.0, 0.5
"""Multiples of the layer's mean from which an expert is hot, and below which it is cold.

At equal rounding errors, an expert that is chosen four times as often deserves one bit more per weight: the
divergence grows with the tokens, and falls fourfold with each bit. So a class spans a factor of four.
"""

LEAST = 3
"""Tokens that a rarely chosen expert counts for at least.

An expert that n tokens did not choose is chosen by less than 3 / n of all tokens, with a confidence of 95 %.
"""


@dataclass(frozen=True)
class LayerUse:
    """How often the router of one layer chose each expert.

    layer    number of the layer
    name     name of the module
    tokens   tokens that chose each expert
    weights  sum of the routing weights of each expert, None where they are not seen
    """

    layer: int
    name: str
    tokens: tuple[int, ...]
    weights: tuple[float, ...] | None

    @property
    def classes(self) -> tuple[UseClass, ...]:
        """The class of each expert.

        >>> LayerUse(0, "mlp.experts", (70, 20, 10, 0), None).classes
        ('hot', 'usual', 'cold', 'unused')
        """
        mean = sum(self.tokens) / len(self.tokens)
        return tuple(
            "unused" if n == 0 else "hot" if n >= HOT * mean else "cold" if n < COLD * mean else "usual"
            for n in self.tokens
        )

    def importance(self, least: int = 0) -> list[float]:
        """What the divergence due to equal errors is in proportion to: tokens times squared mean weight.

        An expert counts for at least `least` tokens, of the layer's mean weight if none chose it.
        """
        if self.weights is None:
            return [float(max(n, least)) for n in self.tokens]
        mean = sum(self.weights) / max(1, sum(self.tokens))
        return [
            max(n, least) * (weight / n if n else mean) ** 2
            for n, weight in zip(self.tokens, self.weights, strict=True)
        ]


@dataclass(frozen=True)
class ExpertUse:
    """How often the routers of a model chose each expert on `tokens` tokens of a text."""

    text: str
    tokens: int
    layers: tuple[LayerUse, ...]

    def of_layer(self, layer: int, experts: int) -> LayerUse | None:
        """The use of a layer's experts; None if it is not known for this number of them."""
        fitting = [one for one in self.layers if one.layer == layer and len(one.tokens) == experts]
        return fitting[0] if len(fitting) == 1 else None

    def without(self, dropped: Collection[int]) -> ExpertUse:
        """The use in the model that has lost some layers, whose remaining layers have new numbers."""
        left = [
            LayerUse(one.layer - sum(n < one.layer for n in dropped), one.name, one.tokens, one.weights)
            for one in self.layers
            if one.layer not in dropped
        ]
        return ExpertUse(self.text, self.tokens, tuple(left))

    def to_json(self) -> dict[str, Any]:
        """The keys of the file."""
        return asdict(self)


def use_bytes(use: ExpertUse) -> bytes:
    """The use as a file that `read_use` reads: one line per layer."""
    lines = ",\n".join(f"    {json.dumps(asdict(layer))}" for layer in use.layers)
    head = json.dumps({"text": use.text, "tokens": use.tokens}, indent=2).rstrip("\n}")
    return f'{head},\n  "layers": [\n{lines}\n  ]\n}}\n'.encode()


def read_use(path: Path) -> ExpertUse:
    """Read what `neuzip experts` wrote with --output or --json. Raises NeuzipError."""
    hint = "neuzip experts --output writes such files"
    try:
        document = parse_json(path.read_bytes(), path)
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}", hint) from error
    except FormatError as error:
        raise FormatError(path, error.problem, hint=hint) from error
    try:
        layers = tuple(_layer_of(entry) for entry in document["layers"])
        use = ExpertUse(str(document["text"]), _count(document["tokens"]), layers)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            path,
            "does not say how often experts are chosen",
            hint=hint,
        ) from error
    return use


def _layer_of(entry: dict[str, Any]) -> LayerUse:
    """One layer of the file. Raises KeyError, TypeError or ValueError for what is none."""
    tokens, weights = [_count(n) for n in _list(entry["tokens"])], entry["weights"]
    if weights is not None:
        weights = tuple(_weight(value) for value in _list(weights))
    if not tokens or (weights is not None and len(weights) != len(tokens)):
        raise ValueError("not one value for each expert")
    return LayerUse(_count(entry["layer"]), str(entry["name"]), tuple(tokens), weights)


def _list(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a count")
    return value


def _weight(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise ValueError("not a sum of weights")
    return float(value)  # type: ignore[arg-type]
