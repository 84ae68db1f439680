"""The Typer application: the options of `neuzip` itself, and every command in `neuzip.cli.commands`.

A command with many options has GROUPS, by title the names of those that stand together on its help page. One
that can do nothing without a package that may be missing has NEEDS, the modules of such packages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from neuzip.cli import commands, deprecated
from neuzip.cli.output import Output
from neuzip.distribution import require


def build_app() -> typer.Typer:
    """Make the application. `commands/<verb>.py` holds `command`, EXAMPLES, and perhaps GROUPS and NEEDS."""
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
        page = _page(verb, getattr(module, "GROUPS", {}), getattr(module, "NEEDS", ()))
        app.command(verb, cls=page, short_help=whole, epilog=_examples(module.EXAMPLES))(module.command)
    return app


def _page(verb: str, groups: Mapping[str, Sequence[str]], needs: Sequence[str]) -> type[TyperCommand]:
    """A command whose help page has its options in groups; those of none come last."""
    titles = {name: title for title, names in groups.items() for name in names}

    class Page(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            options: list[Any] = [one for one in self.get_params(ctx) if one.param_type_name == "option"]
            valued = {name for option in options if not option.is_flag for name in option.opts}
            new = deprecated.renamed(verb, args, valued.__contains__, Output().warning)
            return super().parse_args(ctx, new)

        def invoke(self, ctx: Any) -> Any:
            require(f"neuzip {verb}", *needs)
            return super().invoke(ctx)

        def format_options(self, ctx: Any, formatter: Any) -> None:
            found: dict[str, list[tuple[str, str]]] = defaultdict(list)
            for parameter in self.get_params(ctx):
                is_argument = parameter.param_type_name == "argument"
                title = "Arguments" if is_argument else titles.get(str(parameter.name), "Options")
                if (record := parameter.get_help_record(ctx)) is not None:
                    found[title].append(record)
            for title in ("Arguments", *groups, "Options"):
                if title in found:
                    with formatter.section(title):
                        formatter.write_dl(found[title])

    return Page


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
