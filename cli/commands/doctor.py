"""neuzip doctor: what is installed, what works and what does not, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from neuzip.cli import options
from neuzip.cli.output import Output
from neuzip.cli.show.installation import quiet_lines, show_installation

EXAMPLES = [
    "neuzip doctor",
    "neuzip doctor --device cuda --quiet && vllm serve my-model.nz",
    "neuzip doctor --json",
    "",
    "Exit code 0 if there is no problem, 1 if there is one.",
]

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="GPUs to check: auto is all that torch finds, cpu none; cuda and cuda:N have to be there",
    ),
]


def command(
    device: DeviceOption = "auto", json: options.JsonOption = False, quiet: options.QuietOption = False
) -> None:
    """Check the installation, the engines that find neuzip, and the GPUs

    The command decodes and multiplies self-made tensors and compares the results with those of the reference.
    The first run on a machine compiles the kernels.
    """
    out = Output(json=json, quiet=quiet)
    out.loading()
    from neuzip.installation import check_installation

    with out.progress("check", None, unit="checks") as advance:
        report = check_installation(device, lambda name: advance(1))
    show_installation(out, report)
    out.result(
        {"healthy": report.healthy, "findings": [asdict(finding) for finding in report.findings]},
        quiet=quiet_lines(report),
    )
    if not report.healthy:
        raise typer.Exit(1)
