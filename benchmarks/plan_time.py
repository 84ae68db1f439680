"""The time of `neuzip compress --max-kld` as a process, stage by stage.

    python benchmarks/plan_time.py CHECKPOINT TEXT [--max-kld 0.034] [--device cuda|cpu] [--rounds 2]

Each round is a new process; `cpu_s` are its CPU seconds, of all threads. `start_s` is from the start of the
process to its first stage, and `start_cpu_s` its CPU seconds. Its parts are `imports_s` (torch, transformers
and what measures), `text_s` (tokens) and `model_s` (loaded, onto its device). Each stage has its wall and its
CPU seconds, and the wall seconds until its first progress, which show what a first use costs; `between_s` is
the time between stages. The first round on a machine also compiles kernels and Python modules, which are
kept. `uncached_modules` counts modules of which Python could not keep the compiled form, so that each round
compiles them: that of all packages takes 15 CPU seconds. The section of the device in
benchmarks/results/plan_time.json has a row for each round.

torch is imported where the command imports it: after the command has chosen how OpenMP's threads wait, and
without the garbage collector. Earlier imports make threads spin, and add seconds to start and end.

Aims for SmolLM2-135M and a divergence of 0.034: 30 seconds on a Hopper card with 16 cores, better 15; 10
minutes on 2 cores, better 5.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import Environment, Measurement, save_sections

PARTS = ("imports_s", "text_s", "model_s")
"""Parts of the start, in wall seconds."""

STAGES = "--stages"
"""First argument of the process that is measured; then follow a file for its stages, and a command."""


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--max-kld", default="0.034")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for number in range(1, options.rounds + 1):
        rows.append({"round": number, **measured(options)})
        print(*lines(rows[-1]), sep="\n", flush=True)
    on_gpu = options.device == "cuda"
    packages = ("neuzip-toolkit", "torch", "transformers", *(("triton",) if on_gpu else ()))
    environment = Environment.here(*packages, gpu=on_gpu)
    facts = {"checkpoint": options.checkpoint.name, "text": options.text.name, "max_kld": options.max_kld}
    what = "seconds of `neuzip compress --max-kld` as a process, by stage"
    section = Measurement(environment, rows, facts)
    print(save_sections("plan_time", what, {options.device: section}))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one run, and what it delivered."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stages.json"
        command = [
            "compress", str(options.checkpoint), f"{folder}/small", "--max-kld", options.max_kld,
            "--text", str(options.text), "--device", options.device, "--json",
        ]  # fmt: skip
        began, cpu = time.time(), cpu_seconds(resource.RUSAGE_CHILDREN)
        run = subprocess.run(
            [sys.executable, __file__, STAGES, str(file), *command], capture_output=True, text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        )  # fmt: skip
        ended, cpu = time.time(), cpu_seconds(resource.RUSAGE_CHILDREN) - cpu
        if run.returncode:
            sys.exit(run.stderr[-3000:])
        parts, stages, uncached = json.loads(file.read_text(encoding="utf-8"))
    report = json.loads(run.stdout)
    target = report["target"]
    within = sum(stage["stop"] - stage["start"] for stage in stages)
    total = ended - began
    start, end = stages[0]["start"] - began, ended - stages[-1]["stop"]
    return {
        "total_s": round(total, 2), "cpu_s": round(cpu, 2), "start_s": round(start, 2),
        "start_cpu_s": round(stages[0]["cpu_before"], 2), **parts, "uncached_modules": uncached,
        "stages": [
            {
                "stage": stage["label"], "wall_s": round(stage["stop"] - stage["start"], 2),
                "cpu_s": round(stage["cpu"], 2), "first_s": stage["first"],
            }
            for stage in stages
        ],
        "between_s": round(total - start - end - within, 2), "end_s": round(end, 2),
        "trials": len(target["trials"]), "kld": target["delivered"]["kld"]["mean"]["value"],
        "stored_weight_bytes": report["stored_weight_bytes"],
    }  # fmt: skip


def lines(row: dict[str, Any]) -> Iterator[str]:
    """A round as lines."""
    yield f"round {row['round']}: {row['total_s']} s, {row['trials']} trials, divergence {row['kld']:.5f}"
    yield f"  {row['cpu_s']} CPU seconds"
    yield f"  {'start':40} {row['start_s']:8.2f} s   {row['start_cpu_s']:8.2f} CPU seconds"
    for part in PARTS:
        yield f"    {part:38} {row[part]:8.2f} s"
    yield f"    {'modules compiled in each run':38} {row['uncached_modules']:8}"
    for stage in row["stages"]:
        first = "" if stage["first_s"] is None else f", first progress after {stage['first_s']} s"
        yield f"  {stage['stage']:40} {stage['wall_s']:8.2f} s   {stage['cpu_s']:8.2f} CPU seconds{first}"
    yield f"  {'between stages':40} {row['between_s']:8.2f} s"
    yield f"  {'end':40} {row['end_s']:8.2f} s"


def run_with_stages(file: Path, command: list[str]) -> None:
    """Run a command of neuzip in this process, and write when its stages began and ended."""
    from neuzip.cli import run
    from neuzip.cli.compressing import run as compressing
    from neuzip.cli.output import Output

    stages: list[dict[str, Any]] = []
    parts = dict.fromkeys(PARTS, 0.0)
    import_large = compressing.import_large

    def import_and_count() -> None:
        began = time.time()
        import_large()
        from neuzip.eval.measures import comparison
        from neuzip.eval.plans import calibration_text

        parts["imports_s"] = round(time.time() - began, 2)
        for part, module, name in (
            ("text_s", calibration_text, "split_text"), ("text_s", comparison, "read_tokens"),
            ("model_s", comparison, "load_model"),
        ):  # fmt: skip
            setattr(module, name, counted(parts, part, getattr(module, name)))

    compressing.import_large = import_and_count  # type: ignore[assignment]
    show = Output.stage

    @contextmanager
    def timed(self: Output, label: str, total: int, unit: str) -> Iterator[Any]:
        start, cpu = time.time(), cpu_seconds()
        progress: list[float] = []

        def noted(count: int) -> None:
            progress.append(time.time())
            advance(count)

        with show(self, label, total, unit) as advance:
            yield noted
        first = round(progress[0] - start, 2) if progress else None
        stages.append(
            {
                "label": label, "start": start, "stop": time.time(), "cpu": cpu_seconds() - cpu,
                "cpu_before": cpu, "first": first,
            }
        )  # fmt: skip

    Output.stage = timed  # type: ignore[method-assign, assignment]
    sys.argv = ["neuzip", *command]
    try:
        sys.exit(run())
    finally:
        file.write_text(json.dumps([parts, stages, uncached_modules()]), encoding="utf-8")


def counted(parts: dict[str, float], part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose wall seconds are added to a part."""

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.time()
        try:
            return function(*arguments, **options)
        finally:
            parts[part] = round(parts[part] + time.time() - began, 2)

    return timed


def uncached_modules() -> int:
    """Number of imported modules without a file of their compiled form."""
    files = [getattr(module, "__cached__", None) for module in list(sys.modules.values())]
    return sum(1 for file in files if isinstance(file, str) and not Path(file).exists())


def cpu_seconds(whose: int = resource.RUSAGE_SELF) -> float:
    """CPU seconds so far, user and system, of this process or of those that it has waited for."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    if sys.argv[1:2] == [STAGES]:
        run_with_stages(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
