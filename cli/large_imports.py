"""Imports of the largest libraries, during which the garbage collector is off."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

MODELS = "neuzip.runtime.hf.load"
"""The module that imports torch and those parts of transformers that every model needs."""


def import_large(module: str = MODELS) -> None:
    """Import a module with the garbage collector off, and exempt what exists then from later collections.

    torch and transformers make 400,000 objects that live as long as the process, and 2 % garbage. The
    collector would visit all of them again and again during the import, and once more at exit.
    `benchmarks/startup.py` measures what this saves. Does nothing if the module is imported already.
    """
    if module in sys.modules:
        return
    was_on = gc.isenabled()
    gc.disable()
    try:
        import_module(module)
        gc.freeze()
    finally:
        if was_on:
            gc.enable()
