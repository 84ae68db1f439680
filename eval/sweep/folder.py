"""The folder of a sweep's results: one JSON file per scheme, and pictures of all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuzip.compress.workspace import remove, write_file, writing
from neuzip.errors import FormatError, WouldOverwrite
from neuzip.eval.figure_files import png, svg
from neuzip.eval.measures import fingerprint
from neuzip.formats.safetensors_file import parse_json

from .picture import draw
from .rows import Failure, Sweep, SweepRow
from .setup import kind_of

PICTURES = ("sweep.svg", "sweep.png")

IN_WORDS = {"rule": "rule for windows", "tokens": "number of tokens"}
"""Words for conditions of a row whose names are not clear."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="neuzip-sweep-") as folder:
        yield Path(folder)


def known_results(
    out: Path, labels: Sequence[str], conditions: Mapping[str, Mapping[str, Any]], overwrite: bool
) -> dict[str, SweepRow | Failure]:
    """The results in a folder for these schemes; `conditions` are those of each kind of row.

    Raises WouldOverwrite if it holds results of something else, or pictures and no results. With
    `overwrite` there is nothing known, and such results are removed: they would stand beside ours.
    """
    known: dict[str, SweepRow | Failure] = {}
    for path in sorted(p for p in out.iterdir() if p.suffix in (".json", ".failed")):
        try:
            result = _read(path)
        except FormatError:
            if path.stem in labels and not overwrite:
                raise
            continue  # a file that has nothing to do with sweeps, and stays as it is
        depends_on = conditions[kind_of(result.scheme)]
        others = [IN_WORDS.get(n, n) for n in fingerprint.differing(result.depends_on, depends_on)]
        if others and overwrite:
            with writing(path):
                remove(path)
        elif others:
            raise WouldOverwrite(
                f"{path}: was measured with another {' and another '.join(others)}",
                "choose another `output`, or give `overwrite=True`",
            )
        known[result.scheme] = result
    if not known and not overwrite:
        for name in PICTURES:
            if os.path.lexists(out / name):
                raise WouldOverwrite(
                    f"{out / name}: exists already, and no results of a sweep beside it",
                    "choose another `output`, or give `overwrite=True`",
                )
    return {} if overwrite else {label: known[label] for label in labels if label in known}


def _read(path: Path) -> SweepRow | Failure:
    """The result of a scheme in one file. Raises FormatError if it is none."""
    try:
        values = parse_json(path.read_bytes(), path)
        result = (Failure if path.suffix == ".failed" else SweepRow).from_json(values)
        if result.scheme == path.stem and isinstance(result.depends_on, dict):
            return result
    except (FormatError, KeyError, TypeError, AttributeError, OSError) as error:
        raise FormatError(path, "is no result of neuzip sweep", hint="choose another `output`") from error
    raise FormatError(path, f"is no result of neuzip sweep for {path.stem}", hint="choose another `output`")


def keep(out: Path, result: SweepRow | Failure) -> None:
    """Write what came of a scheme, in place of what was there."""
    names = [f"{result.scheme}.json", f"{result.scheme}.failed"]
    name, stale = names if isinstance(result, SweepRow) else reversed(names)
    with writing(out / name):
        text = json.dumps(result.to_json(), indent=2, allow_nan=False)
        write_file(out / name, f"{text}\n".encode())
        (out / stale).unlink(missing_ok=True)


def keep_pictures(out: Path, results: Sweep, title: str) -> None:
    figure = draw(results, title)
    for name, data in zip(PICTURES, (svg(figure), png(figure)), strict=True):
        with writing(out / name):
            write_file(out / name, data)
