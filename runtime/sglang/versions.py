"""Refuses versions of SGLang that neuzip does not support, in errors as SGLang shows them.

This module imports nothing heavy: every process of SGLang imports it.
"""

from __future__ import annotations

from importlib.metadata import version

from neuzip.distribution import ENGINES, fits
from neuzip.errors import NeuzipError


class SglangRefusal(NeuzipError, ValueError):
    """Something that neuzip does not do in SGLang. SGLang prints its text, so that contains the hint."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def require_supported() -> None:
    """Raise SglangRefusal if the SGLang that is installed is not supported."""
    installed, versions = version("sglang"), ENGINES["sglang"].versions
    if not fits(installed, versions):
        raise SglangRefusal(
            f"neuzip supports SGLang {versions}, and this is SGLang {installed}",
            f'run `pip install "sglang{versions}"`, or restore the folder with `neuzip decompress`',
        )
