"""The command line. `run` is its one entry point and the one place that turns exceptions into exit codes.

    0    done
    1    expected failure: a check failed, or what can happen to anyone (`NeuzipError`, full disk)
    2    usage error
    3    internal error, a bug in neuzip
    130  interrupted

Errors go to stderr as `error:` and `hint:` lines in every mode. stdout holds a result or nothing. Under
`--json` it holds one object, which has the key `error` if there is no result.
`-v` or `NEUZIP_DEBUG=1` adds the traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from neuzip.cli import commands, tracebacks
from neuzip.distribution import broken_package, missing_package
from neuzip.errors import (
    FULL,
    REPORT_IT,
    DiskFull,
    FormatError,
    NeuzipError,
    UsageError,
    is_out_of_memory,
    memory_ran_out,
    system_error,
)

_NOT_OUR_FAULT = FULL | {
    errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.ENOTEMPTY, errno.EEXIST, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EBUSY, errno.ETXTBSY, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOTSUP,
    errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO,
}  # fmt: skip
"""What happens to anyone: to disks, rights, limits, and files that somebody else moves meanwhile."""

_WHAT_TO_DO = {
    errno.ENOENT: "was it moved or removed while neuzip ran? repeat the command",
    errno.ESTALE: "was it replaced on the file server while neuzip ran? repeat the command",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
    **dict.fromkeys(FULL, "free some space and repeat the command"),
}

GO_ON = "finished work is kept; repeat the command to resume"


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` excludes the program's name."""
    from neuzip.cli.command_run import begin
    from neuzip.cli.output import error, make_streams_forgiving, open_closed_streams

    argv = sys.argv[1:] if argv is None else argv
    begin(_verb(argv) or None, json=_asks_for_json(argv), translate=partial(_in_options, typed=argv))
    if not open_closed_streams():
        error("stdout is closed, and the result goes there", "redirect it to a file, or to /dev/null")
        return 1
    make_streams_forgiving()
    tracebacks.forget()
    try:
        refuse_the_other_neuzip()
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except NeuzipError as failure:
        if failure.exit_code == 130:
            _end_line()
        tracebacks.show()
        goes_on = isinstance(failure, DiskFull) and _verb(argv) in commands.RESUMABLE
        hint = f"free some space; {GO_ON}" if goes_on else failure.hint
        quotes = isinstance(failure, FormatError)  # what a file holds, and no parameter
        error(
            failure.message, hint,
            kind=type(failure).__name__, exit_code=failure.exit_code, verbatim=quotes,
        )  # fmt: skip
        return failure.exit_code
    except KeyboardInterrupt:
        _end_line()
        tracebacks.show()
        hint = GO_ON if _verb(argv) in commands.RESUMABLE else ""
        error("interrupted", hint, kind="Interrupted", exit_code=130)
        return 130
    except BrokenPipeError:
        # The reader has gone (`neuzip inspect x | head`), and Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as failure:
        system = system_error(failure)
        if system is not None and system.errno in _NOT_OUR_FAULT:
            tracebacks.show()
            place = f"{system.filename}: " if system.filename else ""
            hint = _WHAT_TO_DO.get(system.errno, "")
            error(f"{place}{os.strerror(system.errno)}", hint, kind="OSError", verbatim=True)
            return 1
        shown = tracebacks.show()
        if (missing := missing_package(failure, f"neuzip {_verb(argv)}")) is not None:
            error(missing.message, missing.hint, kind="MissingPackage", exit_code=missing.exit_code)
            return missing.exit_code
        if is_out_of_memory(failure):
            ran_out = memory_ran_out(f"neuzip {_verb(argv)}", failure)
            error(ran_out.message, ran_out.hint, kind="MemoryError")
            return ran_out.exit_code
        if (broken := broken_package(failure, f"neuzip {_verb(argv)}")) is not None:
            error(broken.message, broken.hint, kind=type(failure).__name__, exit_code=broken.exit_code)
            return broken.exit_code
        error(
            f"unexpected {type(failure).__name__}: {failure}",
            f"this is a bug in neuzip; {REPORT_IT}"
            + (" and the traceback above" if shown else "; -v shows the traceback"),
            kind=type(failure).__name__,
            exit_code=3,
            verbatim=True,
        )
        return 3


def _in_options(text: str, typed: Sequence[str]) -> str:
    """A text of the library in the words of the command line; the commands are imported if it needs them."""
    if "`" not in text:
        return text
    from neuzip.cli.flags import in_options

    return in_options(text, typed)


def _dispatch(argv: Sequence[str]) -> int:
    import typer

    from neuzip.cli.main import program
    from neuzip.cli.output import error

    _refuse_ranks(argv)
    try:
        answer = program().main(list(argv), prog_name="neuzip", standalone_mode=False)
    except typer.Abort as abort:
        # Typer aborts on Ctrl-C, and also on any EOFError, which inside a command can only be a bug.
        raise abort.__cause__ or KeyboardInterrupt from None
    except SystemExit as leave:  # typer's own way out when stdout is closed
        return leave.code if isinstance(leave.code, int) else 1
    except Exception as wrong:
        # Usage errors have no public base class that all supported versions of typer share.
        if not hasattr(wrong, "format_message"):
            raise
        if type(wrong).__name__ == "NoArgsIsHelpError":
            print(wrong.format_message(), file=sys.stderr)
            return 2
        context, verb = getattr(wrong, "ctx", None), _verb(argv)  # an option without its value has no context
        place = context.command_path if context else f"neuzip {verb}" if verb in commands.VERBS else "neuzip"
        message = wrong.format_message().rstrip(".")
        message = message.replace(": Value error, ", ": ", 1)  # pydantic's words, which newer typers pass on
        code = int(getattr(wrong, "exit_code", 2))
        error(
            message[:1].lower() + message[1:],
            f"try `{place} --help`",
            kind="UsageError",
            exit_code=code,
        )
        return code
    if answer == 130:  # newer versions of typer turn Ctrl-C into this exit code
        raise KeyboardInterrupt
    return answer if isinstance(answer, int) else 0


def _refuse_ranks(argv: Sequence[str]) -> None:
    """Let only commands that share their work run in several processes: others would do it several times."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ
    verb = _verb(argv)
    if several and verb in commands.VERBS and verb not in ("compress", "eval", "train"):
        raise UsageError(
            f"neuzip {verb} cannot run under torchrun: only compress, eval and train can",
            "start it without torchrun; or unset WORLD_SIZE",
        )


def _verb(argv: Sequence[str]) -> str:
    return next((argument for argument in argv if not argument.startswith("-")), "")


def _end_line() -> None:
    """End the line on which a terminal has written ^C."""
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _asks_for_json(argv: Sequence[str]) -> bool:
    """Whether `--json` is among the options, so that an error is told as JSON wherever it occurs."""
    options = argv[: list(argv).index("--")] if "--" in argv else argv
    return "--json" in options


def refuse_the_other_neuzip() -> None:
    """Stop when the unrelated PyPI package `neuzip` sits in the folder that `import neuzip` reads.

    The two overwrite each other's files there, and what then runs is a mixture. Stop too when `import neuzip`
    finds only the compiled loops that an installation left when it was replaced by an editable one, or a
    clone called neuzip.
    """
    from importlib.metadata import distributions

    import neuzip

    if getattr(neuzip, "__file__", None) is None:  # a folder without __init__.py
        folder = Path(next(iter(neuzip.__path__)))
        if folder.parent.name in ("site-packages", "dist-packages"):
            raise NeuzipError(
                f"{folder}: what is left of an earlier neuzip hides this one", f"rm -r {folder}"
            )
        raise NeuzipError(f"{folder}: this folder hides the package neuzip", "start Python in another folder")
    ours = Path(neuzip.__file__).resolve().parent
    for other in distributions(name="neuzip"):
        if Path(str(other.locate_file("neuzip"))).resolve() == ours:
            raise NeuzipError(
                f"another package called neuzip ({other.version}) is mixed with this one in {ours}",
                "pip uninstall neuzip neuzip-toolkit, then install neuzip-toolkit again",
            )
