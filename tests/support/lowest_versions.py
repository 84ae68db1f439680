"""Use neuzip with the lowest versions that pyproject.toml allows.

    python tests/support/lowest_versions.py FOLDER

FOLDER gets a virtual environment of this Python (3.10 for the lowest of all), in which the built-in
checkpoint is compressed, verified, restored, evaluated, continued and drawn. `make lowest` runs it. With an
index that offers the CUDA build of torch only, it downloads some gigabytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ImportError:  # a bare Python 3.10 has only pip's own
        from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "eval" / "demo" / "checkpoint"


def lowest(requirement: str) -> str:
    """`name==version; marker` of a requirement `name>=version,...; marker`."""
    wanted, _, marker = requirement.partition(";")
    name, _, versions = wanted.partition(">=")
    exact = f"{name.strip()}=={versions.split(',')[0].strip()}"
    return f"{exact}; {marker.strip()}" if marker else exact


def lowest_versions() -> list[str]:
    """A constraint for every dependency of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [lowest(requirement) for requirement in project["project"]["dependencies"]]


def install(folder: Path) -> Path:
    """The folder of programs of a new virtual environment with neuzip and the lowest versions."""
    (folder / "lowest.txt").write_text("\n".join(lowest_versions()) + "\n", encoding="utf-8")
    source = copy_sources(folder)
    run([sys.executable, "-m", "venv", folder / "venv"], folder)
    programs = folder / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    run([*pip, "install", "--constraint", folder / "lowest.txt", source], folder)
    run([*pip, "check"], folder)
    return programs


def copy_sources(folder: Path) -> Path:
    """A copy of the repository in the folder: setuptools writes beside the sources."""
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "results", "*.nz")
    return Path(shutil.copytree(ROOT, folder / "source", ignore=hidden))


def use(programs: Path, folder: Path) -> None:
    """Every command that a first user gives, with an exit code of 0, and the same bytes at the end."""
    commands = (
        ("compress", DEMO, "model.nz"),
        ("verify", "model.nz", "--original", DEMO),
        ("decompress", "model.nz", "restored"),
        ("eval", "model.nz", "--original", DEMO, "--text", "demo", "--max-tokens", "500"),
        ("generate", "model.nz", "--prompt", "The", "--max-new-tokens", "4"),
        ("inspect", "model.nz", "--plot", "weights.png"),
        ("diff", DEMO, "restored"),
    )
    for command in commands:
        run([programs / "neuzip", *command], folder)
    for path in DEMO.iterdir():
        if (folder / "restored" / path.name).read_bytes() != path.read_bytes():
            sys.exit(f"error: {path.name} was not restored byte by byte")


def run(command: Sequence[Any], folder: Path, *, fails: bool = False) -> None:
    """Run a command in the folder, and end with its output unless it succeeds, or `fails` with an error."""
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    own = {"NUMBA_CACHE_DIR": str(folder / "numba"), "PYTHONPATH": ""}
    ran = subprocess.run(words, cwd=folder, env=os.environ | own, capture_output=True, text=True)
    if fails:
        print(ran.stderr, end="")
    if ran.returncode not in ((1, 2) if fails else (0,)):
        sys.exit(f"{ran.stdout}{ran.stderr}\nerror: exit code {ran.returncode}")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    programs = install(folder)
    use(programs, folder)
    print("lowest: all commands ran with", f"Python {sys.version.split()[0]}", *lowest_versions(), sep="\n  ")


if __name__ == "__main__":
    main()
