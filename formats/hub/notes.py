"""What to do with remarks that a person may want to read."""

from __future__ import annotations

import logging


def pass_over(_: str) -> None:
    """Pass over a remark."""


def log(remark: str) -> None:
    """Pass a remark to Python's logging, where a program and no person at a terminal is to be told."""
    logging.getLogger("neuzip").warning("%s", remark)
