"""neuzip apply: restore a checkpoint from its difference to another."""

from __future__ import annotations

from typing import Annotated

import typer

from neuzip.cli import options
from neuzip.cli.commands.decompress import restore
from neuzip.cli.output import Output
from neuzip.cli.source import resolved

EXAMPLES = [
    "neuzip compress my-model-tuned tuned.delta --base my-model",
    "neuzip apply tuned.delta my-model-tuned --base my-model",
    "neuzip apply me/tuned-delta tuned --base org/model --device cuda",
]


def command(
    delta: Annotated[
        str,
        typer.Argument(
            metavar="DELTA", help="Delta made by compress --base: folder, file or Hub id", show_default=False
        ),
    ],
    dst: options.DestinationArgument,
    base: Annotated[
        str,
        typer.Option(metavar="SRC", help="Checkpoint that the delta was made from, plain or compressed"),
    ],
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Restore a checkpoint from a delta and its base"""
    out = Output(json=json, quiet=quiet)
    path, of_base = resolved(out, delta), resolved(out, base)
    restore(out, path, dst, verb="apply", base=of_base, device=device, jobs=jobs, overwrite=overwrite)
