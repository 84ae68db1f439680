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
NO_SIGNAL = 0


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without waiting for threads. Only for what survives a kill as well.

    Python runs a handler in the main thread, between two of its steps. A signal that comes when that thread
    is just about to wait, or that another thread receives, does not end the wait, which may take hours. So a
    thread of our own hears of signals by a pipe, which is written to whoever receives them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    hears, tells = os.pipe()
    os.set_blocking(tells, False)  # as set_wakeup_fd wants it
    listener = threading.Thread(target=_listen, args=(hears,), name="neuzip-ctrl-c", daemon=True)
    listener.start()
    told_before = signal.set_wakeup_fd(tells)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # only signals with a handler are told
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(told_before)
        os.write(tells, bytes([NO_SIGNAL]))
        listener.join()
        os.close(tells)
        os.close(hears)


def _listen(hears: int) -> None:
    """Leave when SIGINT is told; return when nothing more will be."""
    while (number := os.read(hears, 1)[0]) != NO_SIGNAL:
        if number == signal.SIGINT:
            _leave()


def _leave() -> None:
    if sys.stderr.isatty():
        print(SHOW_CURSOR, file=sys.stderr)  # a progress bar may have hidden it
    error("interrupted", GO_ON, kind="Interrupted", exit_code=130)
    os._exit(130)
