"""neuzip push: upload a compressed checkpoint to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.cli import options
from neuzip.cli.output import Output
from neuzip.cli.text import bytes_text, count_text

EXAMPLES = [
    "neuzip push my-model.nz me/my-model-nz --dry-run",
    "neuzip push my-model.nz me/my-model-nz --private",
    "neuzip eval my-model.nz --original my-model --text demo --report eval.json",
    "neuzip push my-model.nz me/my-model-nz --evaluation eval.json --overwrite",
    "neuzip decompress me/my-model-nz my-model",
    "neuzip push tuned.delta me/tuned-delta",
]

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder with a compressed checkpoint", show_default=False)
]
RepoIdArgument = Annotated[
    str, typer.Argument(metavar="REPO_ID", help="Repository, as owner/name", show_default=False)
]
PrivateOption = Annotated[bool, typer.Option("--private", help="Create the repository as private")]
RevisionOption = Annotated[
    str | None, typer.Option(metavar="R", help="Branch to upload to; created if missing")
]
MessageOption = Annotated[str | None, typer.Option(metavar="M", help="Commit message")]
EvaluationOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Add the results in FILE.json to the model card",
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint in the repository")
]


def command(
    folder: FolderArgument,
    repo_id: RepoIdArgument,
    private: PrivateOption = False,
    revision: RevisionOption = None,
    message: MessageOption = None,
    evaluation: EvaluationOption = None,
    overwrite: OverwriteOption = False,
    allow_private_files: options.AllowPrivateFilesOption = False,
    dry_run: options.DryRunOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Upload a compressed checkpoint to the Hub with a model card

    The command verifies DIR first, and creates the repository if there is none. All files become visible in
    one commit; readers see the earlier files until then. To resume an interrupted upload, repeat the command;
    weight files that the Hub already has are skipped. The command refuses files that look private by their
    names, such as .env or id_rsa, unless you pass --allow-private-files.

    To make FILE.json for --evaluation, run `neuzip eval DIR --report FILE.json`, or save its --json output.
    """
    out = Output(json=json, quiet=quiet)
    from neuzip.cli.interrupt import leaving_at_once
    from neuzip.compress import verify
    from neuzip.compress.sources.folder import weight_bytes
    from neuzip.formats.hub.connection import require_token
    from neuzip.formats.hub.private_files import listed, refuse_private
    from neuzip.formats.hub.push import push
    from neuzip.formats.hub.push_plan import plan_push

    plan = plan_push(folder, repo_id, revision=revision, evaluation=evaluation)
    if dry_run and plan.private and not allow_private_files:
        out.warning(
            f"looks private, so push would refuse: {'; '.join(listed(plan.private))}",
            "remove them from the folder, or give --allow-private-files if they may be seen",
        )
    if not dry_run:
        refuse_private(plan.private, repo_id, allow_private_files)
        require_token()
    for warning in plan.warnings:
        out.warning(warning)
    with out.progress("verify", weight_bytes(folder, allow_delta=True)) as advance:
        verify(folder, on_bytes=advance)
    pushed = None
    if dry_run:
        out.table(["file", "bytes"], [[f.path, f.nbytes] for f in plan.files], right=["bytes"])
        out.text(f"\nREADME.md:\n\n{plan.card}")
        out.text(f"{count_text(len(plan.files), 'file')}, {bytes_text(plan.nbytes)}, would go to {plan.url}")
    else:
        out.status(f"uploading to {repo_id}: {', '.join(plan.paths)}")
        with leaving_at_once():
            pushed = push(
                plan, private=private, message=message, overwrite=overwrite,
                allow_private_files=allow_private_files, note=out.status, progress=out.watched,
            )  # fmt: skip
        if pushed.was_there:
            out.status("all files are on the Hub already")
        if pushed.deleted:
            out.status(f"removed files of the earlier checkpoint there: {', '.join(pushed.deleted)}")
        out.text(f"{count_text(len(plan.files), 'file')}, {bytes_text(plan.nbytes)}: {plan.url}")
    out.result(
        {
            "dry_run": dry_run,
            "src": folder,
            "repo_id": repo_id,
            "revision": revision,
            "url": plan.url,
            "commit": pushed.commit if pushed is not None else None,
            "was_there": pushed.was_there if pushed is not None else None,
            "deleted": pushed.deleted if pushed is not None else None,
            "bytes": plan.nbytes,
            "files": [{"path": f.path, "bytes": f.nbytes} for f in plan.files],
            "private_files": list(plan.private),
            "card": plan.card,
        },
        quiet=[plan.url],
    )
