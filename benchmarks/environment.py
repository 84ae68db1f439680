"""What a benchmark ran on: written beside every figure."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"


def describe(*packages: str) -> dict[str, object]:
    """Processor, cores this process may use, memory, Python, package versions, and the commit."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "commit": _commit(),
    }


def describe_gpu() -> dict[str, object]:
    """The first GPU, its memory and its driver."""
    import torch

    query = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "name": torch.cuda.get_device_name(0),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "cuda": torch.version.cuda,
    }


def save(name: str, document: dict[str, object]) -> Path:
    """Write a result under benchmarks/results."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def save_sections(name: str, what: str, measured: dict[str, object]) -> Path:
    """Put sections, each with its own environment, into the place of those of a result that were there."""
    return save(name, {"what": what, "sections": {**saved_sections(name), **measured}})


def saved_sections(name: str) -> dict[str, Any]:
    """The sections of a result, none if there is no such file."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return dict(json.loads(path.read_text())["sections"]) if path.is_file() else {}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """NEUZIP_COMMIT, for a machine that has only a copy of the files, or what git says."""
    if os.environ.get("NEUZIP_COMMIT"):
        return os.environ["NEUZIP_COMMIT"]
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if not commit:
        return UNKNOWN
    # Results and the README that quotes them follow a measurement: they do not count as changes.
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README.md"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return commit + (" with uncommitted changes" if changed else "")
