"""Refuses versions of vLLM that neuzip does not support, in errors as vLLM shows them.

This module imports nothing heavy: every start of vLLM imports it.
"""

from __future__ import annotations

from neuzip.distribution import ENGINES, fits
from neuzip.errors import NeuzipError


class VllmRefusal(NeuzipError, ValueError):
    """Something that neuzip does not do in vLLM. vLLM prints its text, so that contains the hint."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def require_supported(version: str) -> None:
    """Raise VllmRefusal for a version of vLLM that is not supported."""
    versions = ENGINES["vllm"].versions
    if not fits(version, versions):
        raise VllmRefusal(
            f"neuzip supports vLLM {versions}, and this is vLLM {version}",
            f'run `pip install "vllm{versions}"`, or restore the folder with `neuzip decompress`',
        )
