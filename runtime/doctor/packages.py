"""Versions of Python and of packages, against those that neuzip supports, and what cannot be imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from neuzip.distribution import ENGINES, NAME, fits, supported
from neuzip.runtime.doctor.finding import Finding

NEEDED = ("torch", "transformers", "safetensors", "numpy", "numba", "huggingface-hub")
"""Distributions without which most commands cannot run."""

OPTIONAL = ("triton", *ENGINES, "accelerate", "peft", "datasets", "lm-eval")
"""Distributions that add something."""


def package_findings() -> Iterator[Finding]:
    """Python, neuzip, and each distribution with its version. Imports none of them."""
    yield Finding("packages", "Python", "ok", platform.python_version())
    yield Finding("packages", "neuzip", "ok", version(NAME))
    if (namesake := _version("neuzip")) is not None:
        yield Finding(
            "packages", "neuzip of PyPI", "problem",
            f"{namesake} is installed: an unrelated package, which has files of the same names",
            f"pip uninstall neuzip, then install {NAME} again",
        )  # fmt: skip
    for name in (*NEEDED, *OPTIONAL):
        yield _package(name)


def import_findings() -> Iterator[Finding]:
    """The needed distributions that are installed and cannot be imported: a problem each."""
    for name in NEEDED:
        module = name.replace("-", "_")
        if find_spec(module) is None:
            continue
        try:
            import_module(module)
        except Exception as error:  # a shared library that is not there raises OSError, for example
            yield Finding(
                "packages", f"import {module}", "problem", first_line(error),
                f"install it again: pip uninstall {name}, then pip install \"{name}{supported(name)}\"",
            )  # fmt: skip


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _package(name: str) -> Finding:
    number, versions = _version(name), supported(name)
    line = f'pip install "{name}{versions}"'
    if number is None:
        if name in NEEDED:
            return Finding("packages", name, "problem", "not installed", line)
        return Finding("packages", name, "note", "not installed")
    cuda = torch_cuda() if name == "torch" else None
    text = f"{number}, built for CUDA {cuda}" if cuda else number
    if not fits(number, versions):
        return Finding("packages", name, "problem", f"{text}: neuzip supports {versions}", line)
    return Finding("packages", name, "ok", text)


def _version(name: str) -> str | None:
    """The version of a distribution, or of another build of it; None where none is installed."""
    for build in (name, *(ENGINES[name].builds if name in ENGINES else ())):
        try:
            return version(build)
        except PackageNotFoundError:
            continue
    return None


def torch_cuda() -> str | None:
    """The CUDA that torch was built for, without the seconds that torch takes to load; None for none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:  # what is left of a torch that was not removed or installed to its end
        return None
    match = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return None if match is None else match[1]
