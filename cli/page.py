"""What every command has in common as typer sees it: its help page, -v, old names of options, and needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from neuzip.cli import deprecated, options
from neuzip.cli.library_warnings import as_lines
from neuzip.cli.needs import Needs, refuse_without_effect
from neuzip.cli.output import Output
from neuzip.distribution import require


def page(
    verb: str, groups: Mapping[str, Sequence[str]], needs: Needs, packages: Sequence[str]
) -> type[TyperCommand]:
    """A command that requires `packages`. Its help page has options in groups; those of none come last."""
    titles = {name: title for title, names in groups.items() for name in names}

    class Page(TyperCommand):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.params.append(_verbose())

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            known: list[Any] = [one for one in self.get_params(ctx) if one.param_type_name == "option"]
            valued = {name for option in known if not option.is_flag for name in option.opts}
            if ctx.resilient_parsing:  # which completion is, and that says nothing
                return super().parse_args(ctx, args)
            # First the warnings: an error would speak of a new name that nobody has typed.
            left = super().parse_args(
                ctx, deprecated.renamed(verb, args, valued.__contains__, Output().warning)
            )
            refuse_without_effect(needs, _given(ctx, known))
            return left

        def invoke(self, ctx: Any) -> Any:
            require(f"neuzip {verb}", *packages)
            with as_lines(Output().warning):
                return super().invoke(ctx)

        def format_options(self, ctx: Any, formatter: Any) -> None:
            records: dict[str, list[tuple[str, str]]] = defaultdict(list)
            for parameter in self.get_params(ctx):
                is_argument = parameter.param_type_name == "argument"
                title = "Arguments" if is_argument else titles.get(str(parameter.name), "Options")
                if (record := parameter.get_help_record(ctx)) is not None:
                    records[title].append(record)
            for title in ("Arguments", *groups, "Options"):
                if title in records:
                    with formatter.section(title):
                        formatter.write_dl(records[title])

    return Page


def _given(ctx: Any, known: Sequence[Any]) -> dict[str, object]:
    """The values of options on the command line that are not the default anyway, by every name of theirs."""
    return {
        name: ctx.params[option.name]
        for option in known
        if option.name in ctx.params
        and ctx.get_parameter_source(option.name).name == "COMMANDLINE"
        and ctx.params[option.name] != option.default
        for name in option.opts
    }


def _verbose() -> Any:
    """The option -v, made by typer: how its own classes are called differs between versions."""

    def command(verbose: options.VerboseOption = False) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app).params[0]
