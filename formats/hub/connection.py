"""What all traffic with the Hugging Face Hub shares: the access token, patience, errors that say what to do.

The traffic itself is huggingface_hub's, with its environment variables. What it raises becomes a NeuzipError
that holds neither the token nor a password (hub_secrets).
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import TypeVar

from neuzip.errors import NeuzipError
from neuzip.formats.hub.secrets import scrubbed

Note = Callable[[str], None]
T = TypeVar("T")

TRIES = 5
"""How often something is tried before the Hub or the connection is given up."""

FIRST_WAIT = 1.0
"""Seconds before the second try, twice as many before each further one, where the Hub names no time."""

LONGEST_WAIT = 600.0
"""Seconds: a Hub that asks to wait longer is given up at once."""

PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP statuses that may be others a moment later."""

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def require_token() -> None:
    """Raise NeuzipError unless there is an access token, which pushing needs."""
    if access_token() is None:
        raise NeuzipError("there is no access token for the Hub", _LOG_IN)


def access_token() -> str | None:
    """The access token. One that cannot be sent is refused here: the HTTP library would print it."""
    from huggingface_hub import get_token

    token = get_token()
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise NeuzipError("the access token for the Hub has characters that no token has", _LOG_IN)
    return token


def transport_errors() -> tuple[type[BaseException], ...]:
    """What is raised when the Hub cannot be reached.

    The HTTP library is requests, httpx or httpx2, as the version of huggingface_hub has it; its errors are
    among the bases of huggingface_hub's.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *HfHubHTTPError.__bases__)


@contextmanager
def explaining(subject: str, repo_id: str, here: str = "", note: Note | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises into errors that say what to do.

    `here` begins those of a wrong id. `note` is told what huggingface_hub would log, such as that it waits.
    """
    access_token()
    try:
        with _logging_to(note):
            yield
    except Exception as error:
        if not isinstance(error, (ValueError, RuntimeError, *transport_errors())) and not _is_odd(error):
            raise
        _scrub(error)
        raise _explained(_reason(error), subject, repo_id, here) from error


def _scrub(error: BaseException | None, seen: frozenset[int] = frozenset()) -> None:
    """Take secrets out of an error and of those behind it: a traceback would print them."""
    if error is None or id(error) in seen:
        return
    error.args = tuple(scrubbed(a) if isinstance(a, str) else a for a in error.args)
    for behind in (error.__cause__, error.__context__):
        _scrub(behind, seen | {id(error)})


def _is_odd(error: BaseException) -> bool:
    """Whether huggingface_hub could make nothing of an answer: JSON that the Hub would not send.

    It is not asked what such JSON is, and lacks a key or meets a value of another type somewhere in it.
    """
    trace = error.__traceback__
    if trace is None or not isinstance(error, (LookupError, TypeError, AttributeError)):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] == "huggingface_hub"


def _reason(error: BaseException) -> BaseException:
    """What is behind an error: a failed upload is a RuntimeError, a file not had is one not in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if error.__cause__ is not None and (
        type(error) is RuntimeError or isinstance(error, LocalEntryNotFoundError)
    ):
        return error.__cause__
    return error


def patiently(action: Callable[[], T], note: Note, *, connected: bool = True) -> T:
    """Do what can be done twice, and do it again after the Hub was out of order or the connection broke.

    The Hub may name the seconds to wait (Retry-After). huggingface_hub repeats some requests itself, but
    not all: no listing, and no download after a reset. A first request, not yet `connected`, is not repeated
    where nobody answers. Raises what the last of TRIES raised.
    """
    for tries in range(1, TRIES + 1):
        try:
            return action()
        except Exception as error:
            reason = _reason(error)
            problem = _passing(reason, connected)
            seconds = _retry_after(reason)
            wait = FIRST_WAIT * 2 ** (tries - 1) if seconds is None else seconds
            if problem is None or tries == TRIES or wait > LONGEST_WAIT:
                raise
            note(f"{problem}; the next try is in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _passing(error: BaseException, connected: bool) -> str | None:
    """What has happened, if it may not happen again; None for what has to do with the disk or a right."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    # Older versions of huggingface_hub raise the HTTP library's own errors after their last try.
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"the Hub is overloaded or out of order ({status})" if status in PASSING else None
    if isinstance(error, JSONDecodeError):
        return "the Hub did not answer as the Hub does"
    if not connected or not isinstance(error, transport_errors()) or isinstance(error, OfflineModeIsEnabled):
        return None
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return None  # a full disk, a missing right
    return f"the connection to the Hub broke ({type(error).__name__})"


def _retry_after(error: BaseException) -> float | None:
    """The seconds that a response asks to wait, if it does so in seconds."""
    response = getattr(error, "response", None)
    value = response.headers.get("Retry-After", "") if response is not None else ""
    return float(value) if value.isascii() and value.isdigit() else None


@contextmanager
def _logging_to(note: Note | None) -> Iterator[None]:
    """Give the warnings of huggingface_hub to `note`, without secrets."""
    if note is None:
        yield
        return
    tell = note

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(_cleaned(record.getMessage()))

    logger = logging.getLogger("huggingface_hub")
    before, logger.handlers = logger.handlers, [Handler(logging.WARNING)]
    try:
        yield
    finally:
        logger.handlers = before


def _explained(error: BaseException, subject: str, repo_id: str, here: str) -> NeuzipError:
    from huggingface_hub import errors

    page = f"{endpoint()}/{repo_id}"
    if isinstance(error, errors.RevisionNotFoundError):
        message, hint = "the repository has no such revision", f"its branches and tags: {page}/tree/main"
    elif isinstance(error, errors.GatedRepoError):
        message = "the repository is gated, and this account has no access"
        hint = f"ask for it at {page}; {_LOG_IN}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        message = f"{here}the Hub has no such repository, or it is private"
        hint = f"check the spelling; {_LOG_IN}"
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        message, hint = _refused(error.response.status_code, _cleaned(error.server_message or ""))
        seconds = _retry_after(error)
        hint = hint if seconds is None else f"the Hub asks to try again in {seconds:.0f} s"
    elif (response := getattr(error, "response", None)) is not None:
        message, hint = _refused(response.status_code, "")
    elif isinstance(error, errors.OfflineModeIsEnabled):
        message = f"{here}HF_HUB_OFFLINE forbids to ask the Hub"
        hint = "unset it, or give a folder" if here else "unset it"
    elif isinstance(error, errors.HFValidationError):
        message, hint = "is no id that the Hub accepts", "an id has the form owner/name"
    elif isinstance(error, JSONDecodeError) or _is_odd(error):
        return odd_answer(subject)
    elif isinstance(error, ValueError | RuntimeError):
        message, hint = _cleaned(str(error)), ""
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        hint = "HF_HOME names the folder of huggingface_hub's cache"
    elif type(error) is OSError:  # huggingface_hub's own, of a download with another size than was said
        message, hint = "a file did not arrive whole", "repeat the command"
    else:  # The HTTP library's own words may quote the headers, and with them the token.
        message = f"{here}the Hub at {endpoint()} cannot be reached ({type(error).__name__})"
        hint = "check the connection, and HF_ENDPOINT if it is set"
    return NeuzipError(f"{subject}: {message}", hint)


def odd_answer(subject: str) -> NeuzipError:
    """What to say of an answer that is none of the Hub's, such as a captive portal's or another server's."""
    return NeuzipError(
        f"{subject}: the Hub at {endpoint()} does not answer as the Hub does",
        "try again later; check HF_ENDPOINT if it is set",
    )


def _refused(status: int, reason: str) -> tuple[str, str]:
    """What an HTTP status means, and what to do."""
    if status == 401:
        message, hint = "the Hub does not accept the access token", _LOG_IN
    elif status == 403:
        message = "the Hub forbids this"
        hint = "the access token needs the right to do it; `hf auth whoami` tells whose it is"
    elif status in (409, 412):
        message, hint = "the repository has changed meanwhile", "repeat the command"
    elif status == 429 or status >= 500:
        message, hint = f"the Hub is overloaded or out of order ({status})", "try again later"
    else:
        message, hint = f"the Hub refuses this ({status})", ""
    return f"{message}: {reason}" if reason else message, hint


def _cleaned(text: str) -> str:
    """What somebody else wrote, on one line, without secrets and what signs a link."""
    text = scrubbed(text)
    text = re.sub(r"(https?://[^\s?]+)\?[^\s'\"]+", r"\1", text)
    return " ".join(text.split())[:500]


def endpoint() -> str:
    """The Hub's address, without the user and password that it may hold."""
    from huggingface_hub import constants

    return re.sub(r"//[^/]*@", "//", constants.ENDPOINT)


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Let huggingface_hub draw progress bars on a terminal; some of its own would go anywhere."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if (shown and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
