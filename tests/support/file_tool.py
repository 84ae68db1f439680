"""Use the file tool alone, by the line that the documentation shows: python tests/support/file_tool.py FOLDER

FOLDER gets a virtual environment of this Python, without torch and the others of WITHOUT. In it the built-in
checkpoint is compressed, verified, restored, inspected and compared, a delta is made and applied, and what
needs torch is refused. `make file-tool` runs it.
"""

from __future__ import annotations

import filecmp
import os
import re
import subprocess
import sys
from pathlib import Path

from lowest_versions import DEMO, copy_sources, run

FILE_TOOL = (
    'pip install huggingface-hub msgspec "numba>=0.62" numpy pyyaml rich safetensors typer xxhash'
    " && pip install --no-deps ."
)
"""What README and docs tell to type, in a clone."""

WITHOUT = ("jinja2", "matplotlib", "tomli", "torch", "transformers")
"""What the line leaves out of the dependencies. tomli, for Python 3.10, reads plans."""

WORKS = (
    ("compress", DEMO, "model.nz"),
    ("verify", "model.nz", "--original", DEMO),
    ("decompress", "model.nz", "restored"),
    ("inspect", "model.nz"),
    ("diff", DEMO, "model.nz"),
    ("compress", DEMO, "lossy.nz", "--mantissa-bits", "3"),
    ("compress", "restored", "same.delta", "--base", DEMO),
    ("apply", "same.delta", "applied", "--base", DEMO),
    ("push", "model.nz", "me/model", "--dry-run"),
    ("env",),
)
REFUSED = (
    ("pull", "no-hub-id"),
    ("generate", "model.nz", "The"),
    ("inspect", "model.nz", "--plot", "weights.png"),
    ("compress", DEMO, "small.nz", "--max-kld", "0.01"),
)


def packages() -> list[str]:
    """What the line asks the index for."""
    words = FILE_TOOL.partition(" && ")[0].removeprefix("pip install ").split()
    return [word.strip('"') for word in words]


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    source = copy_sources(folder)
    run([sys.executable, "-m", "venv", folder / "venv"], folder)
    programs = folder / "venv" / "bin"
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    print("file tool:", FILE_TOOL, flush=True)
    subprocess.run(
        FILE_TOOL, shell=True, check=True, cwd=source, env=os.environ | {"PATH": path, "PIP_QUIET": "1"}
    )
    there = subprocess.check_output([programs / "pip", "list", "--format=freeze"], text=True)
    if found := [name for name in WITHOUT if re.search(rf"(?mi)^{name}==", there)]:
        sys.exit(f"error: {', '.join(found)} came along")
    for command in WORKS:
        run([programs / "neuzip", *command], folder)
    for restored in ("restored", "applied"):
        names = [path.name for path in DEMO.iterdir()]
        if filecmp.cmpfiles(DEMO, folder / restored, names, shallow=False)[0] != names:
            sys.exit(f"error: {restored} is not the original, byte by byte")
    for command in REFUSED:
        run([programs / "neuzip", *command], folder, fails=True)
    size = sum(path.lstat().st_size for path in (folder / "venv").rglob("*") if path.is_file())
    print(f"file tool: all commands ran, in an environment of {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
