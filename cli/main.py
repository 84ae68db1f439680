"""The Typer application: the options of `neuzip` itself, and every command in `neuzip.cli.commands`.

A command with many options has GROUPS, by title the names of those that are together on its help page. One
with options that depend on others has NEEDS, see `neuzip.cli.needs`. One that can do nothing without packages
that may be missing has PACKAGES, their modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

from neuzip.cli import commands, options
from neuzip.cli.page import page

EPILOG = """`neuzip COMMAND --help` shows the options and examples of a command.

\b
Environment variables:
  NEUZIP_DEBUG=1        add the traceback to an error, as -v does
  NEUZIP_NO_PROGRESS=1  show no progress
  NEUZIP_AUTOLOAD=0     stop `import torch` from importing neuzip
  NEUZIP_GPU_CHECK=0    skip the check of a GPU at its first use
  HF_TOKEN, HF_HOME     access token and cache of the Hub; neuzip also follows
                        the other variables of huggingface_hub"""


def build_app() -> typer.Typer:
    """Make the application. `commands/<verb>.py` has `command`, EXAMPLES, and perhaps the above."""
    app = typer.Typer(
        name="neuzip",
        rich_markup_mode=None,  # plain help, the same in a pipe and on a terminal
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=EPILOG)(front)
    for verb in commands.VERBS:
        module = import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}")
        whole = str(module.command.__doc__).partition("\n")[0]  # typer's own short help is cut off
        groups, needs, packages = (getattr(module, name, ()) for name in ("GROUPS", "NEEDS", "PACKAGES"))
        kind = page(verb, dict(groups), dict(needs), packages)
        app.command(verb, cls=kind, short_help=whole, epilog=_examples(module.EXAMPLES))(module.command)
    return app


@cache
def program() -> Any:
    """The commands as typer runs them. They are made once, because that takes tens of milliseconds."""
    return typer.main.get_command(build_app())


def _print_version(wanted: bool) -> None:
    if wanted:
        import neuzip

        print(f"neuzip {neuzip.__version__}")
        raise typer.Exit


def front(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version", callback=_print_version, is_eager=True),
    ] = False,
    verbose: options.VerboseOption = False,
) -> None:
    """Make Hugging Face checkpoints smaller and prove that nothing was lost"""


def _examples(lines: Sequence[str]) -> str:
    # \b keeps the lines apart: without it they would be filled into one paragraph.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
