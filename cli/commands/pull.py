"""neuzip pull: download a repository of the Hugging Face Hub to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.cli import options
from neuzip.cli.commands.verify import without_base_text
from neuzip.cli.output import Output
from neuzip.cli.text import bytes_text, count_text, seconds_text

EXAMPLES = [
    "neuzip pull me/my-model-nz",
    "neuzip pull me/my-model-nz@v2 my-model.nz",
    "neuzip decompress my-model.nz my-model",
]


def command(
    src: Annotated[
        str,
        typer.Argument(metavar="REPO_ID", help="Repository, as owner/name[@revision]", show_default=False),
    ],
    dst: Annotated[
        Path | None,
        typer.Argument(metavar="DST", help="Output folder (default: the repository's name)"),
    ] = None,
    overwrite: options.OverwriteOption = False,
    dry_run: options.DryRunOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Download a checkpoint from the Hub and check it

    The command writes the repository's files to DST, compressed or not. It compares each file with the Hub's
    checksum, and verifies a compressed checkpoint. DST appears only after these checks. To resume an
    interrupted download, repeat the command; it keeps complete files.

    To get the original files of a compressed checkpoint, pass its id to `neuzip decompress`. The download
    then stays in the cache of huggingface_hub.
    """
    out = Output(json=json, quiet=quiet)
    from neuzip.cli.interrupt import leaving_at_once
    from neuzip.compress.pull import pull
    from neuzip.formats.hub.ids import repository_name
    from neuzip.formats.hub.listing import find_repository

    target = dst if dst is not None else Path(repository_name(src))
    listing = find_repository(src, note=out.status)
    listing.tell_left_out(out.status)
    report = None
    if dry_run:
        files = [[file.path, file.nbytes] for file in listing.files]
        out.table(["file", "bytes"], files, right=["bytes"])
        out.text(f"{count_text(len(files), 'file')}, {bytes_text(listing.nbytes)}, would go to {target}")
    else:
        with leaving_at_once():
            report = pull(
                listing, target, stage=out.progress, note=out.status, overwrite=overwrite,
                progress=out.watched,
            )  # fmt: skip
        if report.was_there:
            out.status("all files are here already and match the checksums of the Hub")
        if report.without_base:
            out.status(f"a delta: {without_base_text(report.without_base)}")
        checked = "checked"
        if report.tensors is not None:
            checked += f", {count_text(report.tensors, 'tensor')} verified"
        out.text(
            f"{target}: {count_text(report.files, 'file')}, {bytes_text(report.nbytes)}, {checked}, "
            f"in {seconds_text(report.seconds)}"
        )
    out.result(
        {
            "dry_run": dry_run,
            "src": src,
            "dst": target,
            "commit": listing.commit,
            "compressed": listing.is_compressed,
            "bytes": listing.nbytes,
            "files": [{"path": f.path, "bytes": f.nbytes} for f in listing.files],
            "left_out": [f.path for f in listing.left_out],
            "tensors": report.tensors if report is not None else None,
            "was_there": report.was_there if report is not None else None,
            "seconds": report.seconds if report is not None else None,
        },
        quiet=[target],
    )
