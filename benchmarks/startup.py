"""Measure what starting takes: `neuzip --help`, `neuzip demo` with every kernel to be compiled first, and the
imports of a command that runs a model, with the garbage collector off (as neuzip does it) and on.

    python benchmarks/startup.py [--rounds 20] [--demos 3]

Writes benchmarks/results/startup.json. Aims: help in 0.3 seconds, the demo from nothing in two minutes.
Imports are measured in CPU seconds of the process, with its exit.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Environment, Measurement, save

NEUZIP = Path(sys.executable).parent / "neuzip"

IMPORTS = {
    "imports_collector_off": "from neuzip.cli.large_imports import import_large; import_large()",
    "imports_collector_on": "from neuzip.cli.large_imports import MODELS; __import__(MODELS)",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="of --help")
    parser.add_argument("--demos", type=int, default=3, help="with an empty cache each")
    asked = parser.parse_args()
    timed([NEUZIP, "--help"], {})  # reads the files into memory
    measured = {
        "help": figures([timed([NEUZIP, "--help"], {}) for _ in range(asked.rounds)]),
        "demo_from_nothing": figures([demo_from_nothing() for _ in range(asked.demos)]),
    }
    samples: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(asked.rounds):
        for name, program in IMPORTS.items():  # in turns, so that both meet the same load
            samples[name].append(cpu_seconds([sys.executable, "-P", "-c", program]))
    imports = {name: figures(seconds) for name, seconds in samples.items()}
    environment = Environment.here("numba", "numpy", "torch", "transformers", "typer")
    for name, row in {**measured, **imports}.items():
        print(name, *(f"{key} {value}" for key, value in row.items()))
    what = "seconds from the start of a command to its end"
    print(
        save("startup", what, Measurement(environment, facts={"seconds": measured, "cpu_seconds": imports}))
    )


def demo_from_nothing() -> float:
    """Seconds of a demo that finds no kernel compiled."""
    with tempfile.TemporaryDirectory() as folder:
        return timed([NEUZIP, "demo", "--output", f"{folder}/demo"], {"NUMBA_CACHE_DIR": f"{folder}/cache"})


def timed(command: list[object], environment: dict[str, str]) -> float:
    """Seconds that a command takes."""
    began = time.perf_counter()
    subprocess.run([*map(str, command)], env=os.environ | environment, check=True, capture_output=True)
    return time.perf_counter() - began


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(seconds: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {
        "median": round(statistics.median(seconds), 3),
        "fastest": round(min(seconds), 3),
        "slowest": round(max(seconds), 3),
        "rounds": len(seconds),
    }


if __name__ == "__main__":
    main()
