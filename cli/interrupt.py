"""Ctrl-C while huggingface_hub moves files: its threads would first finish those that they have begun."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from neuzip.cli import GO_ON
from neuzip.cli.output import error

SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without waiting for threads. Only for what survives a kill as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        if sys.stderr.isatty():
            print(SHOW_CURSOR, file=sys.stderr)  # a progress bar may have hidden it
        error("interrupted", GO_ON)
        os._exit(130)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
