"""A line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["ok", "note", "problem"]
"""A note is something that is not there or not as fast as it could be; a problem will not work."""

Topic = Literal["packages", "engines", "folders", "GPU", "results"]

TOPICS: tuple[Topic, ...] = get_args(Topic)
"""In the order of the report."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do about it.

    topic   part of the report
    name    what was looked at, such as a package or an operation
    status  ok, note or problem
    text    a version, or in one line why it does not work
    hint    what to do, or None
    """

    topic: Topic
    name: str
    status: Status
    text: str
    hint: str | None = None
