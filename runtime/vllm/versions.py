"""The versions of vLLM that neuzip supports, and the errors that vLLM shows.

This module imports nothing heavy: every start of vLLM imports it.
"""

from __future__ import annotations

import re

from neuzip.errors import NeuzipError

OLDEST, NEWEST = (0, 26), (0, 32)
"""The first and the last minor release of vLLM that neuzip is tested with."""


class VllmRefusal(NeuzipError, ValueError):
    """Something that neuzip does not do in vLLM. vLLM prints its text, so that contains the hint."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def supported_versions() -> str:
    """The supported versions as pip takes them: ">=0.26,<0.33"."""
    return f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def require_supported(version: str) -> None:
    """Raise VllmRefusal for a version of vLLM that is not supported."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        raise VllmRefusal(
            f"neuzip supports vLLM {supported_versions()}, and this is vLLM {version}",
            f'run `pip install "vllm{supported_versions()}"`, or restore the folder with `neuzip decompress`',
        )
