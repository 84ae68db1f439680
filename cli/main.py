"""The Typer application: the options of `neuzip` itself, and every command in `neuzip.cli.commands`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from neuzip.cli import commands


def build_app() -> typer.Typer:
    """Make the application. `commands/<verb>.py` holds a function `command` and a list `EXAMPLES`."""
    app = typer.Typer(
        name="neuzip",
        rich_markup_mode=None,  # plain help, the same in a pipe and on a terminal
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog="`neuzip COMMAND --help` shows a command's options and examples")(front)
    for verb in commands.VERBS:
        module = import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}")
        whole = str(module.command.__doc__).partition("\n")[0]  # typer's own short help is cut off
        app.command(verb, short_help=whole, epilog=_examples(module.EXAMPLES))(module.command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        import neuzip

        print(f"neuzip {neuzip.__version__}")
        raise typer.Exit


def front(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Make Hugging Face checkpoints smaller and prove that nothing was lost"""


def _examples(lines: Sequence[str]) -> str:
    # \b keeps the lines apart: without it they would be filled into one paragraph.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
