"""What a sweep is asked for, and the folder that it works in: known before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neuzip.choices import SWEEP_SCHEMES
from neuzip.compress.rules import Rule, rules_of_options
from neuzip.compress.schemes.truncated import BLOCK_SIZES
from neuzip.compress.workspace import locked, remove, writing
from neuzip.distribution import require
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.yardsticks.names import NAMES, parse_yardsticks
from neuzip.formats.records import is_block_size

BLOCKS = "512"

KINDS = ("lossless", "rounded", "quantized", "yardstick")
"""The kinds of rows."""

MOST_BITS = 16
"""Bits per weight of quantised weights, at most: codes have 16 bits."""

WORK = ".neuzip-sweep"
"""The folder in --output that holds a compressed checkpoint while it is measured."""


@dataclass(frozen=True)
class SweepScheme:
    """One row: lossless, matrices rounded to `mantissa_bits`, in blocks or not, or a `yardstick`.

    `bits` is about the bits per weight of quantised weights.
    """

    mantissa_bits: int | None = None
    block_size: int | None = None
    yardstick: str | None = None
    bits: float | None = None

    @property
    def label(self) -> str:
        """The name of the scheme, in options and in files.

        >>> SweepScheme().label, SweepScheme(3, 512).label, SweepScheme(bits=4.25).label
        ('lossless', 'k3b512', 'bits4.25')
        """
        if self.bits is not None:
            return f"bits{self.bits:g}"
        if self.yardstick is not None:
            return self.yardstick
        if self.mantissa_bits is None:
            return "lossless"
        return f"k{self.mantissa_bits}" + (f"b{self.block_size}" if self.block_size else "")

    @property
    def rules(self) -> list[Rule]:
        """The rules of `neuzip compress --mantissa-bits --block-size`."""
        return rules_of_options(self.mantissa_bits, str(self.block_size) if self.block_size else "none")


def kind_of(label: str) -> str:
    """What a row of this label is, one of KINDS.

    >>> kind_of("lossless"), kind_of("k3b512"), kind_of("bits4"), kind_of("q4_0")
    ('lossless', 'rounded', 'quantized', 'yardstick')
    """
    if label in NAMES:
        return "yardstick"
    return "lossless" if label == "lossless" else "rounded" if label.startswith("k") else "quantized"


def parse_schemes(schemes: str, blocks: str | None, yardsticks: str = "none") -> list[SweepScheme]:
    """The rows that --schemes, --blocks (None: BLOCKS) and --yardsticks ask for, each once.

    Raises UsageError.

    >>> [s.label for s in parse_schemes("lossless,k3,k0b64", "32,512", "q4_0")]
    ['lossless', 'k3', 'k3b32', 'k3b512', 'k0b64', 'q4_0']
    """
    sizes = [
        _block_size("blocks", size) for size in (BLOCKS if blocks is None else blocks).split(",") if size
    ]
    rows: list[SweepScheme] = []
    for name in filter(None, (part.strip() for part in schemes.split(","))):
        rows += _rows_of(name, sizes)
    if blocks and not any(one.mantissa_bits is not None for one in rows if one.block_size is None):
        raise UsageError(
            f"`blocks={blocks!r}` has no effect: no scheme of {schemes} has mantissa bits and no block size",
            "add one such as k3, or leave out `blocks`",
        )
    if not rows:
        raise UsageError("`schemes`: names none", f"for example `schemes={SWEEP_SCHEMES!r}`")
    for scheme in rows:
        _ = scheme.rules  # which says of a number of mantissa bits that there is none
    rows += [SweepScheme(yardstick=name) for name in parse_yardsticks(yardsticks)]
    return list(dict.fromkeys(rows))


def require_quantized(rows: list[SweepScheme], calibration: str) -> bool:
    """Whether any row is of quantised weights. Raises UsageError for a calibration without effect."""
    if any(row.bits is not None for row in rows):
        return True
    if calibration != "auto":
        raise UsageError(
            f"`calibration={calibration!r}` has no effect: no scheme has quantised weights",
            "add one such as bits4, or leave out `calibration`",
        )
    return False


def _rows_of(name: str, sizes: list[int]) -> list[SweepScheme]:
    """The rows of one scheme of --schemes: rounded ones also in blocks of `sizes`."""
    parts = re.fullmatch(r"lossless|k(\d{1,2})(?:b(\d+))?|bits(\d{1,2}(?:\.\d{1,6})?)", name)
    if parts is None or (parts[3] is not None and not 0 < float(parts[3]) <= MOST_BITS):
        hint = "write lossless, bits4.5 for quantised weights, k3 for 3 mantissa bits, or k3b512"
        if name in NAMES:
            hint = f"{name} is a yardstick: `yardsticks={name!r}`"
        raise UsageError(f"`schemes`: there is no scheme {name!r}", hint)
    if parts[1] is None:
        return [SweepScheme(bits=None if parts[3] is None else float(parts[3]))]
    if parts[2] is not None:
        return [SweepScheme(int(parts[1]), _block_size("schemes", parts[2]))]
    return [SweepScheme(int(parts[1]), size) for size in (None, *sizes)]


def _block_size(parameter: str, text: str) -> int:
    size = int(text) if text.strip().isdecimal() and len(text) < 10 else 0
    if not is_block_size(size):
        raise UsageError(f"`{parameter}`: the block size {text!r} is not {BLOCK_SIZES}")
    return size


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """A folder in `out` for what is measured, locked against other sweeps, and gone when this one ends.

    What a killed sweep left in it is removed. Raises UsageError and NeuzipError for what is no folder that
    can be written to, or that another sweep writes to, and MissingPackage.
    """
    require(f"{out}: the pictures of a sweep", "matplotlib")
    work = out / WORK
    with writing(out):
        if out.exists() and not out.is_dir():
            raise UsageError(f"`output={str(out)!r}`: is a file", "name a folder, or something new")
        out.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        try:
            lock = locked(work)
        except (BlockingIOError, FileNotFoundError) as error:
            raise NeuzipError(
                f"`output={str(out)!r}`: another sweep is writing there", "wait for it, or choose another"
            ) from error
    try:
        try:
            with writing(work):
                for left in work.iterdir():
                    remove(left)
            yield work
        finally:
            remove(work)
    finally:
        os.close(lock)
