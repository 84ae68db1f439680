"""Warnings of the library on the command line."""

from __future__ import annotations

import warnings

import pytest
import typer

from neuzip.cli.library_warnings import as_lines
from neuzip.cli.page import page
from neuzip.kernels.tuning import UntunedGpuWarning


def test_a_warning_of_the_library_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command(cls=page("run", {}, {}, ()))
    def run() -> None:
        warnings.warn("no launches for this GPU", UntunedGpuWarning, stacklevel=1)
        print("done")

    app([], standalone_mode=False)
    said = capsys.readouterr()
    assert said.out == "done\n"
    assert said.err == "warning: no launches for this GPU\n"


def test_other_warnings_are_shown_as_python_shows_them() -> None:
    lines: list[str] = []
    with pytest.warns(RuntimeWarning, match="of another library"), as_lines(lines.append):
        warnings.warn("of another library", RuntimeWarning, stacklevel=1)
    assert not lines


def test_the_context_ends(capsys: pytest.CaptureFixture[str]) -> None:
    shown = warnings.showwarning
    with as_lines(print):
        assert warnings.showwarning is not shown
    assert warnings.showwarning is shown
