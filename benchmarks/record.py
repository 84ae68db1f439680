"""The record of a measurement: where it was taken, and its results. Every benchmark writes it with `save`.

A result is a file `benchmarks/results/<name>.json`:

    {"what": "...", "threads": 2, "environment": {...}, "results": [{"case": "gaussian", "gb_s": 2.5}, ...]}

`results` has a row for each case. The keys of a row that name the case come first. A figure's key ends in its
unit (`_us`, `_gb_s`, `_gib`), unless it is a ratio or a count. A benchmark whose parts run on different days
or machines writes `{"what": "...", "sections": {"part": {"environment": {...}, "results": [...]}}}`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
UNKNOWN = "unknown"

Row = dict[str, Any]


@dataclass(frozen=True)
class GpuCard:
    """A GPU and its driver."""

    name: str
    memory_gib: float
    driver: str
    cuda: str | None

    @classmethod
    def first(cls) -> GpuCard:
        """The first GPU of this machine."""
        import torch

        query = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
        return cls(
            name=torch.cuda.get_device_name(0),
            memory_gib=round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
            driver=subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
            cuda=torch.version.cuda,
        )


@dataclass(frozen=True)
class Environment:
    """Hardware, versions, commit and command of a measurement; results before 2026-11-27 have no command."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    packages: Mapping[str, str]
    commit: str
    gpu: GpuCard | None = None
    gpus: int | None = None
    command: str | None = None

    @classmethod
    def here(cls, *packages: str, gpu: bool = False, needs_commit: bool = False) -> Environment:
        """This machine and process; with `needs_commit`, SystemExit if nobody knows the commit."""
        commit = _commit()
        if needs_commit and commit == UNKNOWN:
            sys.exit("git does not say the commit: name it in NEUZIP_COMMIT")
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            packages={name: _version(name) for name in packages},
            commit=commit,
            gpu=GpuCard.first() if gpu else None,
            gpus=_gpus() if gpu else None,
            command=_command(),
        )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Environment:
        """The environment that a file holds; a key that is missing or unknown raises TypeError."""
        gpu = values.get("gpu")
        return cls(**{**values, "gpu": None if gpu is None else GpuCard(**gpu)})

    @classmethod
    def of_runs(cls, runs: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> Environment:
        """That of runs made one by one, on cards and with packages alike, with all of their commits.

        SystemExit if `sources`, paths of the repository, differ between these commits.
        """
        environments = [cls.read(run["environment"]) for run in runs]
        first, commits = environments[0], list(dict.fromkeys(one.commit for one in environments))
        for one in environments:
            if (one.gpu and one.gpu.name, one.packages) != (first.gpu and first.gpu.name, first.packages):
                sys.exit(f"runs of commits {first.commit} and {one.commit} have other cards or packages")
        for commit in commits[1:]:
            same = ["git", "-C", str(ROOT), "diff", "--quiet", commits[0], commit, "--", *sources]
            if subprocess.run(same).returncode:
                sys.exit(f"commits {commits[0]} and {commit} have other files of {', '.join(sources)}")
        return replace(first, commit=", ".join(commits), command=None)

    def plain(self) -> dict[str, Any]:
        """The JSON object of a file, without what is not known."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Measurement:
    """What one run of a benchmark measured.

    `results` has a row for each case. `facts` hold for all rows, such as the text or the number of rounds, or
    are figures that are no rows.
    """

    environment: Environment
    results: Sequence[Row] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The JSON object of a file or of its section."""
        results = {"results": list(self.results)} if self.results else {}
        return {**self.facts, "environment": self.environment.plain(), **results}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Measurement:
        """The measurement of a file's JSON object or of its section."""
        facts = {key: values[key] for key in values if key not in ("what", "environment", "results")}
        return cls(Environment.read(values["environment"]), values.get("results", ()), facts)


def spread(values: Sequence[float], unit: str) -> dict[str, float]:
    """Median, 20th and 80th percentile of repeated times or speeds, by keys that end in their unit."""
    fifths = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else [*values] * 4
    return {unit: statistics.median(values), f"p20_{unit}": fifths[0], f"p80_{unit}": fifths[3]}


def save(name: str, what: str, measurement: Measurement) -> Path:
    """Write a result of one measurement."""
    return _write(name, {"what": what, **measurement.plain()})


def save_sections(name: str, what: str, measured: Mapping[str, Measurement]) -> Path:
    """Write sections of a result; its other sections stay as they are."""
    path = RESULTS / f"{name}.json"
    sections = json.loads(path.read_text())["sections"] if path.is_file() else {}
    new = {section: measurement.plain() for section, measurement in measured.items()}
    return _write(name, {"what": what, "sections": {**sections, **new}})


def read(name: str) -> dict[str, Measurement]:
    """The measurements of a result by section, or one by the empty name if it has no sections."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    sections = document.get("sections", {"": document})
    return {section: Measurement.read(part) for section, part in sections.items()}


def _write(name: str, document: dict[str, Any]) -> Path:
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _command() -> str:
    """The command of this process, without the folders of files that it names."""
    words = [re.sub(r"(^|=)/.*/", r"\1", word.rstrip("/")) for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


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
