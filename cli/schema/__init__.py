"""What `--json` prints: the keys of every command, with types, units and meaning.

Every document begins with the keys of ENVELOPE. Then follow the keys of the command (COMMANDS), or, if the
command failed before it had a result, the one key `error` (FAILED). Every key of a command is always there.
It is null if there is nothing to say. OBJECTS describes the values of keys and the items of lists.

A type is boolean, integer, number, string, object (with keys that are not listed), the name of one of
OBJECTS, "list of T", or "map of T" (the keys are names). "or null" belongs to the whole type unless it stands
in brackets. A number that is infinite or not a number is null.
"""

from __future__ import annotations

from collections.abc import Mapping

from neuzip.cli.schema import files, measures, runs, targets
from neuzip.cli.schema.table import Keys, keys_of

ENVELOPE = keys_of("""
    schema  : integer - version of this description
    neuzip  : string - version of neuzip
    command : string or null - the command that ran, such as compress; null if none was named
""")

FAILED = keys_of("""
    error : Error - why there is no result
""")


OBJECTS: Mapping[str, Keys] = {
    "Error": keys_of("""
        kind      : string - class of the error, such as UsageError, FormatError, WouldOverwrite, OSError
        message   : string - what is wrong, as on stderr
        hint      : string or null - what to do about it, as on stderr
        exit_code : integer - exit code of the process: 1 expected failure, 2 usage error, 3 internal error,
        | 130 interrupted
    """),
    **measures.OBJECTS,
    **files.OBJECTS,
    **targets.OBJECTS,
    **runs.OBJECTS,
}
"""Values of keys and items of lists, by the names that types have for them."""

COMMANDS: Mapping[str, Keys] = {
    **files.COMMANDS,
    **measures.COMMANDS,
    **targets.COMMANDS,
    **runs.COMMANDS,
}
"""The keys of each command."""
