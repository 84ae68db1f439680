"""The folder of a training run: what lies in it, and when a run may begin or resume there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuzip.errors import FormatError, NeuzipError, WouldOverwrite

if TYPE_CHECKING:
    from neuzip.train.configuration import TrainingConfiguration
    from neuzip.train.text import TrainingWindows

CHECKPOINT, MODEL, LOG, PICTURE, RUN = "checkpoint", "model", "log.jsonl", "loss.svg", "run.json"


def refuse_folder(settings: TrainingConfiguration, resume: bool, overwrite: bool) -> None:
    """Raise for a folder that holds something, something needed, or another run than this one."""
    from neuzip.compress.overwrite_guard import refuse_nesting, require_name

    require_name(settings.output)
    for source in (settings.model, settings.tokenizer, settings.scratch, *settings.text):
        if source is not None and Path(source).exists():
            refuse_nesting(Path(source), settings.output)
    if resume:
        _require_run(settings.output)
        settings.require_same(begun_settings(settings))
    elif not _is_free(settings.output):
        if not overwrite:
            is_run = (settings.output / RUN).is_file()
            raise WouldOverwrite(
                f"{settings.output}: exists already",
                "--resume resumes the run there; --overwrite deletes it and starts again"
                if is_run
                else "choose another output",
            )
        _refuse_other_files(settings.output)


def _is_free(out: Path) -> bool:
    """Whether a run can begin in a folder: it is not there, or holds at most the first file of one, begun."""
    from neuzip.compress.workspace import partial_name

    if not out.is_dir():
        return not os.path.lexists(out)
    return {path.name for path in out.iterdir()} <= {partial_name(out / RUN).name}


def _require_run(out: Path) -> None:
    """Raise NeuzipError unless a run can go on in a folder, from a checkpoint or from its first step.

    A run that was killed before its first checkpoint begins anew, and loses nothing. A model without a
    checkpoint stays as it is.
    """
    from neuzip.compress.workspace import recover

    if not (out / RUN).is_file():
        raise NeuzipError(
            f"{out}: has no run to resume",
            "leave out --resume" if _is_free(out) else "choose another output",
        )
    recover(out / CHECKPOINT)
    if (out / MODEL).exists() and not (out / CHECKPOINT).is_dir():
        raise NeuzipError(
            f"{out}: has a trained model but no checkpoint to resume from",
            "to train this model further, give it as `model` with another output; --overwrite starts again",
        )


def _refuse_other_files(folder: Path) -> None:
    """Raise WouldOverwrite for a folder that is not of a run, or that holds more than a run leaves there."""
    if not (folder / RUN).is_file():
        raise WouldOverwrite(
            f"{folder}: is not from neuzip train, so it is not removed", "choose another output"
        )
    left = {CHECKPOINT, MODEL, f"{MODEL}-plain", LOG, PICTURE, RUN}
    names = {path.name.partition(".neuzip-")[0]: path.name for path in folder.iterdir()}
    if others := sorted(names[name] for name in names.keys() - left):
        raise WouldOverwrite(
            f"{folder}: holds {others[0]!r}, which is not from neuzip train",
            "move it away, or choose another output",
        )


def begun_settings(settings: TrainingConfiguration) -> dict[str, Any]:
    """What the run in a folder was begun with."""
    from neuzip.formats.safetensors_file import parse_json

    path = settings.output / RUN
    record = parse_json(path.read_bytes(), path)
    if not isinstance(record, dict):
        raise FormatError(path, "is not from neuzip train")
    return record


def make_folder(settings: TrainingConfiguration, windows: TrainingWindows) -> None:
    """Remove what is overwritten, and say which run it is."""
    import json as json_module
    import shutil

    from neuzip.compress.workspace import write_file, writing

    with writing(settings.output):
        if settings.output.exists():
            shutil.rmtree(settings.output)
        write_file(settings.output / RUN, json_module.dumps(settings.to_json(windows), indent=2).encode())
