"""One command in several processes, as torchrun starts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from neuzip.compress.ranks import Ranks


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """This process, or those that torchrun started; the one that fails first says why, the others end."""
    from neuzip.compress.torchrun import AnotherRankFailed, joined

    try:
        with joined() as ranks:
            yield ranks
    except AnotherRankFailed as failure:
        raise typer.Exit(failure.exit_code) from None
