"""The time of `neuzip compress --max-kld` as a process, stage by stage.

    python benchmarks/plan_time.py CHECKPOINT TEXT [--max-kld 0.034] [--device cuda|cpu] [--rounds 2]

Each round is a new process. `start_s` is from the start of the process to its first stage: imports, the
text, the model. Each stage has its wall and its CPU seconds, of all threads; `between_s` is the time between
stages. The first round on a machine also compiles kernels, which are kept. The section of the device in
benchmarks/results/plan_time.json has a row for each round. Aims for SmolLM2-135M and a divergence of 0.034:
30 seconds on a Hopper card with 16 cores, better 15; 10 minutes on 2 cores, better 5.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import Environment, Measurement, save_sections

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
        began = time.time()
        run = subprocess.run(
            [sys.executable, __file__, STAGES, str(file), *command], capture_output=True, text=True
        )
        ended = time.time()
        if run.returncode:
            sys.exit(run.stderr[-3000:])
        stages = json.loads(file.read_text(encoding="utf-8"))
    report = json.loads(run.stdout)
    target = report["target"]
    within = sum(stage["stop"] - stage["start"] for stage in stages)
    total = ended - began
    start, end = stages[0]["start"] - began, ended - stages[-1]["stop"]
    return {
        "total_s": round(total, 2), "start_s": round(start, 2),
        "stages": [
            {
                "stage": stage["label"], "wall_s": round(stage["stop"] - stage["start"], 2),
                "cpu_s": round(stage["cpu"], 2),
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
    yield f"  {'start':40} {row['start_s']:8.2f} s"
    for stage in row["stages"]:
        yield f"  {stage['stage']:40} {stage['wall_s']:8.2f} s   {stage['cpu_s']:8.2f} CPU seconds"
    yield f"  {'between stages':40} {row['between_s']:8.2f} s"
    yield f"  {'end':40} {row['end_s']:8.2f} s"


def run_with_stages(file: Path, command: list[str]) -> None:
    """Run a command of neuzip in this process, and write when its stages began and ended."""
    from neuzip.cli import run
    from neuzip.cli.output import Output

    stages: list[dict[str, Any]] = []
    show = Output.stage

    @contextmanager
    def timed(self: Output, label: str, total: int, unit: str) -> Iterator[Any]:
        start, cpu = time.time(), cpu_seconds()
        with show(self, label, total, unit) as advance:
            yield advance
        stages.append({"label": label, "start": start, "stop": time.time(), "cpu": cpu_seconds() - cpu})

    Output.stage = timed  # type: ignore[method-assign, assignment]
    sys.argv = ["neuzip", *command]
    try:
        sys.exit(run())
    finally:
        file.write_text(json.dumps(stages), encoding="utf-8")


def cpu_seconds() -> float:
    """CPU seconds of this process so far, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    if sys.argv[1:2] == [STAGES]:
        run_with_stages(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
