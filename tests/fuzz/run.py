"""Fuzz one target with atheris: python -P tests/fuzz/run.py TARGET CORPUS [libFuzzer's options]

Seeds and kept inputs are put into the folder CORPUS first. It ends at the first bug, with the input in a file
crash-... beside CORPUS. Needs `pip install atheris==3.0.0`: Python 3.11 to 3.13 on Linux or macOS.
benchmarks/fuzz.py runs all targets one after the other.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from types import FunctionType

import atheris

ROOT = Path(__file__).resolve().parents[2]
COMPILED = [f"neuzip.kernels.{path.parent.name}.cpu" for path in ROOT.glob("kernels/*/cpu.py")]
COMPILED += ["neuzip.kernels.device.compiled", "neuzip.kernels.rans.intrinsics"]
"""Modules whose functions numba compiles: it understands no bytecode but Python's."""

MEMORY = 1 << 30
"""Bytes that all inputs together may take beyond what is there once everything is imported."""


def main() -> None:
    name, corpus = sys.argv[1], Path(sys.argv[2])
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    with atheris.instrument_imports(include=["neuzip"], exclude=COMPILED):
        import targets
    for thing in vars(targets.independent).values():
        if isinstance(thing, FunctionType):
            atheris.instrument_func(thing)
    target = targets.TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for left in corpus.parent.glob(
        f"{targets.SCRATCH}*"
    ):  # libFuzzer leaves by a door where nobody tidies up
        shutil.rmtree(left)
    tempfile.tempdir = str(corpus.parent)
    for entry, data in targets.all_inputs(name).items():
        (corpus / entry).write_bytes(data)
        target.run(data)  # compiles kernels, imports what is imported late
    if not any(argument.startswith("-merge") for argument in sys.argv):  # which starts processes of its own
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        changed = target.mutate(
            data, most, random.Random(seed), lambda d, m: atheris.Mutate(d, m) if m else d
        )
        return changed[:most]

    # libFuzzer runs the first of these again in a shell, to merge.
    command = f"{sys.executable} -P {Path(__file__).resolve()} {name} {corpus}"
    options = [f"-max_len={target.most}", "-timeout=20", "-print_final_stats=1"]
    options += [f"-artifact_prefix={corpus.parent}/", *sys.argv[3:]]
    atheris.Setup([command, *options, str(corpus)], target.run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
    main()
