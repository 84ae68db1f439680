"""Parameters of the library as options of the command line: `mantissa_bits=3` is --mantissa-bits 3.

The library speaks of parameters, in backquotes, because its callers may be programs. What the command line
tells of an error, a warning or a hint goes through `in_options`, except for messages that quote a file or
another library. A name in backquotes is a parameter if it is a whole word of the sentence and was not typed
by the user: the name of a file may have backquotes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import PurePath

from neuzip.cli.main import program
from neuzip.errors import shell

ARGUMENTS = {"source": "SRC", "destination": "DST", "repo_id": "REPO_ID"}
"""Parameters that are arguments on the command line, by the words of the help pages."""

VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^`]*"""
"""A value as `repr` writes it: a string may hold backquotes itself."""

PARAMETER = rf"(?<![^\s(])`([a-z][a-z0-9_]*)(?:=({VALUE}))?`(?![^\s,;:.)])"
"""A name, with or without a value, between spaces or punctuation."""


def in_options(text: str, typed: Iterable[str] = ()) -> str:
    """A text of the library in the words of the command line. What is no option there stays as it is.

    >>> in_options("`mantissa_bits=9`: too many; leave out `plan`, or give `overwrite=True`")
    '--mantissa-bits 9: too many; leave out --plan, or give --overwrite'
    >>> in_options("`verify=False` and `device='cuda'`; choose another `destination`, as in `config`")
    '--no-verify and --device cuda; choose another DST, as in `config`'
    >>> in_options("`jobs`/`plan`: there is no such folder; give fewer `jobs`", typed=["./`jobs`/`plan`"])
    '`jobs`/`plan`: there is no such folder; give fewer --jobs'
    """
    if "`" not in text:
        return text
    own = sorted({form for word in typed for form in _forms(word)}, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, own), PARAMETER])
    return re.sub(pattern, lambda m: m[0] if m[1] is None else _option(m[0], m[1], m[2]), text)


def _forms(word: str) -> Iterator[str]:
    """A word of the command line with backquotes, in the forms in which a message may quote it."""
    for form in (word, word.partition("=")[2]):
        path = PurePath(form)
        yield from (text for text in (form, str(path), path.name) if "`" in text)


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
