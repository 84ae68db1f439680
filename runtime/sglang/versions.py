"""The versions of SGLang that neuzip supports, and the error that SGLang shows.

This module imports nothing heavy: every process of SGLang imports it.
"""

from __future__ import annotations

import re
from importlib.metadata import version

from neuzip.errors import NeuzipError

OLDEST, NEWEST = (0, 5, 16), (0, 5, 23)
"""The first and the last release of SGLang that neuzip is tested with."""


class SglangRefusal(NeuzipError, ValueError):
    """Something that neuzip does not do in SGLang. SGLang prints its text, so that contains the hint."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def supported_versions() -> str:
    """The supported versions as pip takes them: ">=0.5.16,<=0.5.23"."""
    return f">={'.'.join(map(str, OLDEST))},<={'.'.join(map(str, NEWEST))}"


def require_supported() -> None:
    """Raise SglangRefusal if the SGLang that is installed is not supported."""
    installed = version("sglang")
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", installed)
    if match is None or not OLDEST <= tuple(map(int, match.groups())) <= NEWEST:
        wanted = supported_versions()
        raise SglangRefusal(
            f"neuzip supports SGLang {wanted}, and this is SGLang {installed}",
            f'run `pip install "sglang{wanted}"`, or restore the folder with `neuzip decompress`',
        )
