"""Whether an error is shown with its traceback: with `-v`, or with NEUZIP_DEBUG=1 in the environment."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar

_wanted: ContextVar[bool] = ContextVar("wanted", default=False)


def forget() -> None:
    """Begin a command that has not been asked for them."""
    _wanted.set(False)


def ask(verbose: bool) -> None:
    """Take in whether `-v` is given, before or after the verb."""
    if verbose:
        _wanted.set(True)


def show() -> bool:
    """Print the traceback of the exception that is handled, if it is wanted; whether it was."""
    if not _wanted.get() and os.environ.get("NEUZIP_DEBUG", "") in ("", "0"):
        return False
    import traceback

    from neuzip.cli.text import printable
    from neuzip.formats.hub.secrets import scrubbed

    print(printable(scrubbed(traceback.format_exc())), end="", file=sys.stderr)
    return True
