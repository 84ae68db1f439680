"""Measure what a size target costs that goes by the weights alone, in CPU seconds per GB of bf16 weights.

    python benchmarks/target_cost.py SMALL LARGE [--rounds 3]

Both are checkpoints; LARGE has more bytes. In one thread each runs through `compress --mantissa-bits 3`
and `compress --target-size 60% --scheme rounded --sensitivity weights`. The slope between both checkpoints is
the cost per GB, without the time to start. Writes benchmarks/results/target_cost.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import Environment, Measurement, save

NEUZIP = Path(sys.executable).parent / "neuzip"
COMMANDS = {
    "three_bits": ("--mantissa-bits", "3"),
    "target_by_weights": ("--target-size", "60%", "--scheme", "rounded", "--sensitivity", "weights"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = [measured(path, options.rounds) for path in (options.small, options.large)]
    grown = (rows[1]["bytes"] - rows[0]["bytes"]) / 1e9
    per_gb = {name: round((rows[1][name] - rows[0][name]) / grown, 1) for name in COMMANDS}
    print(*rows, per_gb, sep="\n")
    what = "CPU seconds of commands in one thread, with their start; per_gb is the slope between both"
    environment = Environment.here("neuzip-toolkit", "numba", "numpy")
    print(save("target_cost", what, Measurement(environment, rows, {"per_gb": per_gb})))


def measured(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """The size of a checkpoint's weights, and the median CPU seconds of each command on it."""
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    seconds = {
        name: round(statistics.median(cpu_seconds(checkpoint, words) for _ in range(rounds)), 2)
        for name, words in COMMANDS.items()
    }
    return {"checkpoint": checkpoint.name, "bytes": size, **seconds}


def cpu_seconds(checkpoint: Path, words: tuple[str, ...]) -> float:
    """CPU seconds, user and system, of one run of `neuzip compress`."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [NEUZIP, "compress", checkpoint, f"{folder}/small", *words, "--jobs", "1", "--device", "cpu"],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
