"""What callers of the public functions give, checked at the door: every error names the parameter."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from neuzip.errors import UsageError
from neuzip.formats.hub.download import resolve_source
from neuzip.formats.hub.notes import log

Source: TypeAlias = "str | os.PathLike[str]"
"""A checkpoint: a folder, a .safetensors file, or a Hub id, `owner/name` or `owner/name@revision`."""

Name = TypeVar("Name", bound=str)


def local(parameter: str, source: Source) -> Path:
    """The path of a checkpoint, which is downloaded first if `source` is a Hub id. Raises NeuzipError."""
    return resolve_source(source, parameter=parameter, note=log)


def require_one_of(choices: Sequence[object], **values: object) -> None:
    """Raise UsageError for a value, by its parameter, that is none of the choices.

    >>> require_one_of(("trits", "2bit"), ternary_packing="4bit")
    Traceback (most recent call last):
      ...
    neuzip.errors.UsageError: `ternary_packing='4bit'`: there is no such choice
    """
    for parameter, value in values.items():
        if not any(value is one or (value == one and type(value) is type(one)) for one in choices):
            named = ", ".join(map(repr, choices))
            raise UsageError(f"`{parameter}={value!r}`: there is no such choice", f"give one of {named}")


def require_counts(**values: object) -> None:
    """Raise UsageError for a number, by its parameter, that is not whole and 1 or more. None is no number.

    >>> require_counts(jobs=0)
    Traceback (most recent call last):
      ...
    neuzip.errors.UsageError: `jobs=0`: is no number from 1 on
    """
    for parameter, value in values.items():
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"`{parameter}={value!r}`: is no number from 1 on", "give 1 or more")


def require_divergence(**values: object) -> None:
    """Raise UsageError for a value, by its parameter, that is no number above 0.

    >>> require_divergence(max_kld="1%")
    Traceback (most recent call last):
      ...
    neuzip.errors.UsageError: `max_kld='1%'`: is no divergence above 0
    """
    for parameter, value in values.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
            raise UsageError(
                f"`{parameter}={value!r}`: is no divergence above 0", "give nats per token, for example 0.01"
            )


def require_paths(**values: object) -> None:
    """Raise UsageError for a value, by its parameter, that is no path.

    >>> require_paths(destination=5)
    Traceback (most recent call last):
      ...
    neuzip.errors.UsageError: `destination=5`: is no path
    """
    for parameter, value in values.items():
        if not isinstance(value, str | os.PathLike):
            raise UsageError(f"`{parameter}={value!r}`: is no path", "give a string or a pathlib.Path")


def require_texts(**values: object) -> None:
    """Raise UsageError for a value, by its parameter, that is no text.

    >>> require_texts(prompt=b"Hello")
    Traceback (most recent call last):
      ...
    neuzip.errors.UsageError: `prompt=b'Hello'`: is no text
    """
    for parameter, value in values.items():
        if not isinstance(value, str):
            raise UsageError(f"`{parameter}={value!r}`: is no text", "give a string")


def as_list(parameter: str, names: Name | Sequence[Name]) -> list[Name]:
    """One name, or several, as a list. Raises UsageError for what is neither.

    >>> as_list("stop", "END"), as_list("stop", ())
    (['END'], [])
    """
    if isinstance(names, str):
        return [names]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"`{parameter}={names!r}`: is neither a string nor a list of them", "give such a list"
        )
    return list(names)
