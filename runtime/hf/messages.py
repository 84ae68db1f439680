"""What transformers says: kept off the terminal, or told in an error of ours."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import __version__ as transformers_version
from transformers.utils import logging

from neuzip.errors import NeuzipError, is_out_of_memory

OTHER_VERSION = "another version of transformers may; code that comes with a checkpoint is never run"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the warnings and bars of transformers off the terminal."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, without a full stop, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def refusal(folder: Path, what: str, error: BaseException, hint: str = OTHER_VERSION) -> NeuzipError:
    """What transformers would not do, with the first line of its reason. Raises `error` if memory ran out."""
    if is_out_of_memory(error):
        raise error
    return NeuzipError(
        f"{folder}: transformers {transformers_version} cannot {what}: {reason_of(error)}",
        hint,
    )


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up, which is no Exception and has no class to import."""
    return type(error).__name__ == "PanicException"


def versions() -> dict[str, str]:
    """What a figure of a model must be told with."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers_version,
    }
