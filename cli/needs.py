"""Options that have an effect only with another one. Without it they are refused, not ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from neuzip.errors import UsageError

Needs = Mapping[str, Sequence[str]]
"""By option, those of which one has to be given too, perhaps with a value: {"--gguf-type": ["--to gguf"]}."""


def refuse_without_effect(needs: Needs, options: Mapping[str, object]) -> None:
    """Raise UsageError for one of `options`, names and values, that lacks what it needs.

    >>> refuse_without_effect({"--overwrite": ["--plot", "--output"]}, {"--overwrite": True, "--plot": "a"})
    >>> refuse_without_effect({"--mode": ["--to a"]}, {"--mode": "x", "--to": "b"})
    Traceback (most recent call last):
      ...
    neuzip.errors.UsageError: --mode has no effect without --to a
    """
    for option, others in needs.items():
        if option not in options or any(_is_met(other, options) for other in others):
            continue
        *first, last = others
        named = f"{', '.join(first)} or {last}" if first else last
        raise UsageError(
            f"{option} has no effect without {named}",
            f"add {'one of these' if first else last}, or leave out {option}",
        )


def _is_met(other: str, options: Mapping[str, object]) -> bool:
    name, _, value = other.partition(" ")
    return name in options and value in ("", str(options[name]))
