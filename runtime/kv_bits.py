"""Bits of the numbers in a KV cache: the same in all layers, or chosen layer by layer, as in a plan file.

A plan file is JSON: `neuzip_kv_plan`, its version, and `layers`, one entry for each layer of the model, such
as `{"keys": 4, "values": 3}`, or null for a layer without keys and values. `form` is the form of the cache
that the bits were chosen for; a plan without it is for any form. The other keys say how the bits were chosen;
no reader needs them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias, get_args

from neuzip.choices import KvForm
from neuzip.errors import FormatError, NeuzipError, UsageError

WIDTHS = (8, 6, 5, 4, 3, 2)
"""Bits from which `auto` chooses, the most first."""

FEWEST, MOST = 1, 8
"""The least and the largest number of bits that a key or value may have."""

VERSION_KEY, VERSION = "neuzip_kv_plan", 1
"""The key of a plan file by which it is recognised, and the version that this neuzip writes and reads."""

AUTO = "auto"
"""The word with which a request to choose the bits begins."""

WHAT_THERE_IS = "give 4, 8/4 for keys/values, auto:0.01, or a plan file"


@dataclass(frozen=True)
class LayerBits:
    """Bits of a number in the keys and in the values of a layer."""

    keys: int
    values: int


Layers: TypeAlias = tuple[LayerBits | None, ...]
"""Bits of each layer; None: a layer without keys and values."""


@dataclass(frozen=True)
class KVBits:
    """Bits of a KV cache. `layers` are those of each layer; with `same` the only entry is for all layers.

    `source` is the plan file that they were read from, None if there is none. `form` is the form of the cache
    that they were chosen for, None if they were not chosen for one.
    """

    layers: Layers
    same: bool = False
    source: str | None = None
    form: KvForm | None = None

    def of(self, count: int, parameter: str = "kv_bits") -> Layers:
        """The bits of each layer of a model with `count` layers. Raises UsageError for a plan of another."""
        if self.same:
            return self.layers * count
        if len(self.layers) != count:
            raise UsageError(
                f"`{parameter}`: {self.source or 'the plan'} is for {len(self.layers)} layers, and the model"
                f" has {count}",
                "make a plan for this model",
            )
        return self.layers

    def in_form(
        self, form: str | None, parameter: str = "kv_bits", form_parameter: str = "kv_form"
    ) -> KVBits:
        """These bits, for a cache of a form; None is a form without a name.

        Raises UsageError for bits that were chosen for another form.
        """
        if self.form not in (None, form):
            raise UsageError(
                f"`{parameter}`: {self.source or 'the plan'} was made for the form {self.form} of a KV cache,"
                f" not for {form or 'this one'}",
                f"give `{form_parameter}={self.form!r}`, or make a plan for the other form",
            )
        return self


_PLAIN = re.compile(r"(\d{1,3})(?:/(\d{1,3}))?")
"""Bits as a user writes them: 4, or 8/4 for keys/values."""

BitsArgument: TypeAlias = (
    "int | str | os.PathLike[str] | KVBits | Sequence[LayerBits | tuple[int, int] | None]"
)
"""What callers give for bits: 4, "8/4" for keys/values, a plan file, `KVBits`, or a pair for each layer."""


def as_bits(value: BitsArgument, parameter: str = "kv_bits") -> KVBits:
    """The bits that a caller gives as `parameter`. Raises UsageError, NeuzipError and FormatError.

    >>> as_bits("8/4").of(2)
    (LayerBits(keys=8, values=4), LayerBits(keys=8, values=4))
    >>> as_bits([(4, 3), None]).layers
    (LayerBits(keys=4, values=3), None)
    """
    if isinstance(value, os.PathLike) or (
        isinstance(value, str) and not _PLAIN.fullmatch(value.strip()) and Path(value).is_file()
    ):
        return read_plan(value)
    match value:
        case KVBits():
            bits = value
        case int():
            bits = KVBits((LayerBits(value, value),), same=True)
        case str():
            bits = KVBits((_pair(value, parameter),), same=True)
        case list() | tuple() if value:
            bits = KVBits(tuple(_layer(one, parameter) for one in value))
        case _:
            raise UsageError(f"`{parameter}={value!r}`: is no number of bits", WHAT_THERE_IS)
    for pair in bits.layers:
        if pair is not None and (wrong := _wrong(pair)) is not None:
            raise UsageError(f"`{parameter}={value!r}`: {wrong}", WHAT_THERE_IS)
    return bits


def _pair(text: str, parameter: str) -> LayerBits:
    """The bits of `4` or of `8/4`."""
    if match := _PLAIN.fullmatch(text.strip()):
        return LayerBits(int(match[1]), int(match[2] or match[1]))
    if text.partition(":")[0] == AUTO:
        raise UsageError(
            f"`{parameter}={text!r}`: bits are not chosen here", "choose them first: neuzip.choose_kv_bits"
        )
    raise UsageError(f"`{parameter}={text!r}`: is no number of bits, and no file", WHAT_THERE_IS)


def _layer(value: object, parameter: str) -> LayerBits | None:
    if value is None or isinstance(value, LayerBits):
        return value
    if isinstance(value, list | tuple) and len(value) == 2:
        return LayerBits(*value)
    raise UsageError(f"`{parameter}`: {value!r} is no pair of bits", "give (keys, values) for each layer")


def _wrong(pair: LayerBits) -> str | None:
    """What is wrong with the bits of a layer, in words; None if nothing is."""
    for bits in (pair.keys, pair.values):
        if type(bits) is not int or not FEWEST <= bits <= MOST:
            return f"keys and values have {FEWEST} to {MOST} bits, not {bits!r}"
    return None


def auto_limit(text: str) -> float | None:
    """The divergence, in nats per token, of `auto:0.01`; None for a text that does not begin with auto.

    Raises UsageError for a text without a divergence.

    >>> auto_limit("auto:0.01"), auto_limit("8/4")
    (0.01, None)
    """
    word, _, number = text.strip().partition(":")
    if word != AUTO:
        return None
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise UsageError(
            f"`kv_bits={text!r}`: auto needs a KL divergence above 0",
            "give the most that the model may lose, in nats per token: auto:0.01",
        )
    return limit


def read_plan(path: str | os.PathLike[str]) -> KVBits:
    """The bits of a plan file. Raises NeuzipError if it cannot be read, FormatError if it is no plan."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise NeuzipError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"is no plan of a KV cache: not JSON: {error}") from error
    if not isinstance(document, Mapping) or VERSION_KEY not in document:
        raise FormatError(
            path, "is no plan of a KV cache", hint="`kv_bits='auto:0.01'` with `kv_plan` writes one"
        )
    if document[VERSION_KEY] != VERSION:
        raise FormatError(
            path, f"version {document[VERSION_KEY]!r} is not known", field=VERSION_KEY,
            hint="install a newer neuzip",
        )  # fmt: skip
    layers = document.get("layers")
    if not isinstance(layers, list) or not layers:
        raise FormatError(path, "is no list of layers", field="layers")
    form = document.get("form")
    if form not in (None, *get_args(KvForm)):
        raise FormatError(
            path, f"form {form!r} of a KV cache is not known", field="form",
            hint=f"known forms: {', '.join(get_args(KvForm))}",
        )  # fmt: skip
    entries = enumerate(layers)
    return KVBits(
        tuple(_entry(path, number, entry) for number, entry in entries), source=os.fspath(path), form=form
    )


def _entry(path: str | os.PathLike[str], number: int, entry: Any) -> LayerBits | None:
    if entry is None:
        return None
    field = f"layers[{number}]"
    if not isinstance(entry, Mapping) or set(entry) != {"keys", "values"}:
        raise FormatError(path, "is no object of keys and values", field=field)
    pair = LayerBits(entry["keys"], entry["values"])
    if (wrong := _wrong(pair)) is not None:
        raise FormatError(path, wrong, field=field)
    return pair


def plan_bytes(layers: Layers, facts: Mapping[str, object]) -> bytes:
    """A plan file with these layers, and with facts about the choice, which JSON has to know."""
    entries = [None if bits is None else asdict(bits) for bits in layers]
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    rows = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    parts = [f'  "{VERSION_KEY}": {VERSION}', *lines, f'  "layers": [\n{rows}\n  ]']
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def single(layers: Layers | None) -> int | None:
    """The number of bits that all keys and values have; None if they differ, or if nothing is quantised."""
    widths = {bits for layer in layers or () if layer is not None for bits in (layer.keys, layer.values)}
    return widths.pop() if len(widths) == 1 else None


def in_words(layers: Layers) -> str:
    """Bits of layers, in words.

    >>> in_words((LayerBits(4, 4),) * 2), in_words((LayerBits(8, 4),) * 2)
    ('4 bits', '8 bits for keys and 4 for values')
    >>> in_words((LayerBits(4, 3), LayerBits(8, 3), None))
    '4.50 bits on average: 6.00 for keys and 3.00 for values'
    """
    if single(layers) is not None:
        return f"{single(layers)} bits"
    keys, values = _by_part(layers)
    if len(set(keys)) == len(set(values)) == 1:
        return f"{keys[0]} bits for keys and {values[0]} for values"
    k, v = fmean(keys), fmean(values)
    return f"{(k + v) / 2:.2f} bits on average: {k:.2f} for keys and {v:.2f} for values"


def in_short(layers: Layers) -> str:
    """Bits of layers as a user may write them, or else their mean.

    >>> in_short((LayerBits(8, 4),) * 2), in_short((LayerBits(4, 3), LayerBits(8, 3)))
    ('8/4', 'mean 4.50')
    """
    keys, values = _by_part(layers)
    if len(set(keys)) == len(set(values)) == 1:
        return str(keys[0]) if keys[0] == values[0] else f"{keys[0]}/{values[0]}"
    return f"mean {fmean(keys + values):.2f}"


def _by_part(layers: Layers) -> tuple[list[int], list[int]]:
    """Bits of all keys, and of all values."""
    pairs = [layer for layer in layers if layer is not None]
    return [pair.keys for pair in pairs], [pair.values for pair in pairs]
