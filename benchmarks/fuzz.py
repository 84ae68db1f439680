"""Fuzz all targets of tests/fuzz, one after the other, and write benchmarks/results/fuzz.json.

    nice -n 19 python benchmarks/fuzz.py /tmp/fuzz --seconds 3600

The folder holds the corpora, the logs and the inputs of bugs; the same command goes on where it was stopped.
What the corpora add to the seeds is kept in tests/fuzz/corpus, with --keep, as few inputs as reach the same
code. Needs `pip install atheris==3.0.0`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from record import ROOT, Environment, Measurement, save

CHUNK = 180
"""Seconds of one process: atheris takes more and more memory."""

STATISTICS = re.compile(r"^stat::(\w+):\s+(\d+)$", re.MULTILINE)
COVERAGE = re.compile(
    r"^#\d+\s+(?:INITED|DONE|pulse|NEW|REDUCE)\s+cov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=3600, help="of fuzzing, all targets together")
    parser.add_argument("--check", action="store_true", help="only say whether there are bugs: for make fuzz")
    parser.add_argument("--keep", action="store_true", help="write tests/fuzz/corpus at the end")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    targets = _targets().TARGETS
    if asked.check:
        sys.exit(check(targets, asked.folder, asked.seconds))
    log = asked.folder / "log.json"
    done: dict[str, Any] = json.loads(log.read_text()) if log.is_file() else {}
    for name, target in targets.items():
        seconds = asked.seconds * target.share / 100
        while (left := seconds - done.get(name, {}).get("seconds", 0)) >= 1:
            fuzz(name, asked.folder, min(left, CHUNK), done.setdefault(name, {}))
            log.write_text(json.dumps(done, indent=1) + "\n")
            print(json.dumps({name: done[name]}), flush=True)
    kept = {name: keep(name, asked.folder) for name in targets} if asked.keep else None
    facts = {
        "command": f"nice -n 19 python benchmarks/fuzz.py FOLDER --seconds {asked.seconds}",
        "options": f"-timeout=20, RLIMIT_AS 1 GiB above what is imported, {CHUNK} s a process, numba's "
        "bounds checks on",
        "totals": {
            key: round(sum(part[key] for part in done.values()), 1)
            for key in ("seconds", "cpu_seconds", "executions", "crashes")
        },
        "targets": done,
        "kept": kept,
        "found_and_fixed": json.loads((ROOT / "tests/fuzz/corpus/found.json").read_text(encoding="utf-8")),
    }
    what = "coverage-guided fuzzing of every reader of files, by atheris (libFuzzer)"
    environment = Environment.here("atheris", "numba", "numpy", "torch", "xxhash")
    print(save("fuzz", what, Measurement(environment, facts=facts)))


def check(targets: dict[str, Any], folder: Path, seconds: int) -> int:
    """Fuzz all targets, each with the corpus that is there; how many inputs found a bug, each by its path."""
    found = []
    for name, target in targets.items():
        for old in _bugs(folder / name):
            old.unlink()
        done: dict[str, Any] = {}
        fuzz(name, folder, seconds * target.share / 100, done)
        found += _bugs(folder / name)
        print(f"fuzz: {name}: {done['executions']:,} inputs, {done['crashes']} bugs", flush=True)
    for path in found:
        print(f"error: {path}: python tests/fuzz/targets.py {path.parent.name} {path}", file=sys.stderr)
    return len(found)


def _bugs(place: Path) -> list[Path]:
    """The inputs that found a bug, took too long or took too much memory."""
    return sorted(path for kind in ("crash", "timeout", "oom") for path in place.glob(f"{kind}-*"))


def fuzz(name: str, folder: Path, seconds: float, done: dict[str, Any]) -> None:
    """Run one target for some seconds, and add what happened to what was `done`."""
    place = folder / name
    place.mkdir(exist_ok=True, parents=True)
    before, began = _cpu(), time.monotonic()
    command = [ROOT / "tests" / "fuzz" / "run.py", name, place / "corpus", f"-max_total_time={int(seconds)}"]
    ran = subprocess.run(
        [sys.executable, "-P", *command],
        # A cache of its own: numba would find there what was compiled without these checks.
        env=os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder.resolve() / "numba")},
        capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    text = ran.stderr + ran.stdout
    (place / "log.txt").write_text(text)
    figures = {key: int(value) for key, value in STATISTICS.findall(text)}
    crashes = [path.name for path in _bugs(place)]
    if ran.returncode and not crashes:
        sys.exit(f"{name} did not run:\n{text[-3000:]}")
    seen = COVERAGE.findall(text)
    edges, features, corpus = (int(n) for n in seen[-1]) if seen else (0, 0, 0)
    done["seconds"] = round(done.get("seconds", 0) + time.monotonic() - began, 1)
    done["cpu_seconds"] = round(done.get("cpu_seconds", 0) + _cpu() - before, 1)
    done["executions"] = done.get("executions", 0) + figures.get("number_of_executed_units", 0)
    done["edges"], done["features"], done["corpus"] = edges, features, corpus
    done["slowest_seconds"] = max(done.get("slowest_seconds", 0), figures.get("slowest_unit_time_sec", 0))
    done["peak_mib"] = max(done.get("peak_mib", 0), figures.get("peak_rss_mb", 0))
    done["crashes"], done["crash_files"] = len(crashes), crashes


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def keep(name: str, folder: Path) -> dict[str, int]:
    """Keep as few inputs as reach what the corpus reaches, but the seeds; their number and bytes."""
    corpus, least = folder / name / "corpus", folder / name / "least"
    shutil.rmtree(least, ignore_errors=True)
    least.mkdir()
    targets = _targets()
    for seed in targets.TARGETS[name].seeds():  # what is in the folder before is not added to it
        (least / targets.seed_name(seed)).write_bytes(seed)
    command = [ROOT / "tests" / "fuzz" / "run.py", name, corpus, "-merge=1", least]
    subprocess.run([sys.executable, "-P", *command], capture_output=True, check=True)
    inputs = {path.name[:16]: path.read_bytes() for path in least.iterdir() if "-" not in path.name}
    inputs |= {key: data for key, data in targets.kept_inputs(name) if key.startswith("crash")}
    targets.write_kept(name, inputs)
    return {"inputs": len(inputs), "bytes": sum(len(data) for data in inputs.values())}


def _targets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("targets", ROOT / "tests" / "fuzz" / "targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["targets"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
