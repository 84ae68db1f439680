"""Whether engines would find neuzip: its entry points, and what switches them off. Imports no engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from neuzip import distribution
from neuzip.distribution import ENGINES, ServingEngine, installed
from neuzip.runtime.doctor.finding import Finding

TORCH_GROUP = "torch.backends"
"""Entry points that `import torch` loads: neuzip registers with transformers and diffusers by it."""


def plugin_findings() -> Iterator[Finding]:
    """Registration with transformers and each installed engine, and folders that hide neuzip."""
    yield _by_torch("transformers")
    for name, engine in ENGINES.items():
        if find_spec(name) is not None:
            yield _by_torch(engine.title) if engine.group is None else _by_plugin(engine, engine.group)
    if (folder := hiding_folder(Path.cwd())) is not None:
        yield Finding(
            "engines", "import neuzip", "problem",
            f"the folder {folder} hides the package from programs that start here",
            "start them in another folder",
        )  # fmt: skip


def _by_torch(title: str) -> Finding:
    """Whether a library finds neuzip when it imports torch."""
    if not _has_entry_point(TORCH_GROUP):
        return Finding(
            "engines", title, "problem", f"finds no neuzip: its entry point {TORCH_GROUP} is not installed",
            "install neuzip again; until then programs have to import neuzip",
        )  # fmt: skip
    for variable in ("NEUZIP_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        if os.environ.get(variable) == "0":
            return Finding(
                "engines", title, "problem", f"finds no neuzip by itself, as {variable}=0 is set",
                f"unset {variable}, or import neuzip first",
            )  # fmt: skip
    return Finding("engines", title, "ok", "finds neuzip when it imports torch")


def _by_plugin(engine: ServingEngine, group: str) -> Finding:
    """Whether an engine finds neuzip among its plugins."""
    if not _has_entry_point(group):
        return Finding(
            "engines", engine.title, "problem", f"finds no neuzip: its entry point {group} is not installed",
            "install neuzip again, in the environment of the engine",
        )  # fmt: skip
    choices = {
        "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS"),
        "SGLANG_PLUGINS": os.environ.get("SGLANG_PLUGINS"),
    }
    chosen = None if engine.variable is None else choices[engine.variable]
    if chosen is not None and not _is_among(chosen, engine.title):
        return Finding(
            "engines", engine.title, "problem", f"leaves neuzip out, as {engine.variable}={chosen} is set",
            f"add neuzip to {engine.variable}, or unset it",
        )  # fmt: skip
    return Finding("engines", engine.title, "ok", f"finds neuzip by the entry point {group}")


def _is_among(chosen: str, title: str) -> bool:
    """Whether neuzip is among the plugins that a variable lists, as the engine reads it."""
    if title == ENGINES["vllm"].title:  # which keeps spaces
        return "neuzip" in chosen.split(",")
    names = [name.strip() for name in chosen.split(",")]
    return "neuzip" in names or not chosen  # SGLang takes nothing for all


def _has_entry_point(group: str) -> bool:
    return any(point.value.partition(":")[0].startswith("neuzip") for point in entry_points(group=group))


def hiding_folder(place: Path) -> Path | None:
    """A folder `neuzip` in `place` that Python would import in place of the package, if there is one.

    Without an __init__.py it hides an editable installation only.
    """
    folder = place / "neuzip"
    if not folder.is_dir() or folder.samefile(Path(distribution.__file__).parent):
        return None
    hides = (folder / "__init__.py").is_file() or installed()[0] == "as editable"
    return folder if hides else None
