"""Parameters of the library as options of the command line: `mantissa_bits=3` is --mantissa-bits 3.

The library speaks of parameters, in backquotes, because its callers may be programs. Everything that the
command line tells of an error, a warning or a hint goes through `in_options`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache

from neuzip.cli.main import program
from neuzip.errors import shell

ARGUMENTS = {"source": "SRC", "destination": "DST", "repo_id": "REPO_ID"}
"""Parameters that are arguments on the command line, by the words of the help pages."""

PARAMETER = re.compile(r"""`([a-z][a-z0-9_]*)(?:=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^`]*))?`""")
"""A name, and a value as `repr` writes it: a string may hold backquotes itself."""


def in_options(text: str) -> str:
    """A text of the library in the words of the command line. What is no option there stays as it is.

    >>> in_options("`mantissa_bits=9`: too many; leave out `plan`, or give `overwrite=True`")
    '--mantissa-bits 9: too many; leave out --plan, or give --overwrite'
    >>> in_options("`verify=False` and `device='cuda'`; choose another `destination`, as in `config`")
    '--no-verify and --device cuda; choose another DST, as in `config`'
    """
    if "`" not in text:
        return text
    return PARAMETER.sub(lambda match: _option(match[0], match[1], match[2]), text)


def _option(whole: str, name: str, value: str | None) -> str:
    if name in ARGUMENTS:
        return ARGUMENTS[name] if value is None else f"{ARGUMENTS[name]} {_word(value)}"
    option = options().get(name)
    if option is None:
        return whole
    if value is None or value == "True":
        return option
    if value == "False":
        return f"--no-{option.removeprefix('--')}"
    return f"{option} {_word(value)}"


def _word(value: str) -> str:
    """A value as it is typed: without the quotes of Python, with those of a shell if it needs them."""
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return shell(literal) if isinstance(literal, str) else value


@cache
def options() -> Mapping[str, str]:
    """The long options of all commands, by the names that their parameters have in the library."""
    names = (
        name
        for command in program().commands.values()
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in parameter.opts
    )
    return {name.removeprefix("--").replace("-", "_"): name for name in names if name.startswith("--")}
