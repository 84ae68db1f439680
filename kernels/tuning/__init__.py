"""Launch tables: which launch parameters a kernel has on which card, as data that a card's owner can add to.

    kernels/tuning/sm90/packed_linear.toml      a folder an architecture, a file an operator

    measured = { card = "NVIDIA H200", commit = "0f2e7c1", date = 2026-11-20 }

    [[one_row]]
    when = { planes = { max = 7 }, dtype = ["bfloat16", "float16"] }
    use = { warps = 8, registers = 72 }

    [[one_row]]
    use = { warps = 4, registers = 96 }

`launch_for("packed_linear.one_row", device, planes=11, dtype="bfloat16")` gives the `use` of the first entry
whose conditions all hold. The operator's code says what its variables mean. A condition is a value, a list of
values, or bounds: `min` and `max` include their number, `above` and `below` do not. An entry with `cards`,
parts of names of cards, counts on these cards only. The last entry of a kernel has no conditions.

An architecture without a file for an operator gets the file of the nearest one: the newest that is older,
else the oldest. The first launch on such a card gives an UntunedGpuWarning, once a process and card. Triton's
interpreter gets the file of Hopper. `source` says which file it is. benchmarks/tune.py measures a card and
writes its file; docs/contributing/tune-a-gpu.md says how.

Launch parameters decide speed. Some also decide in which order a product adds fp32 sums, and so its last
bits. Lossless operations give the same bits with all of them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import torch  # at run time where a device is given: `neuzip env` describes tables without it

FOLDER = Path(__file__).parent

INTERPRETED = 90
"""Architecture whose tables Triton's interpreter gets: the one that the kernels are written for."""

BOUNDS = ("min", "max", "above", "below")

Value = bool | int | float | str

Entry = Mapping[str, Any]
"""An entry of a table: `use`, and perhaps `when`, `cards` and `measured`."""

_replaced: dict[str, Sequence[Entry]] = {}
"""Entries that `replaced` has in force, by "operator.kernel"."""

_warned: set[torch.device] = set()
"""Cards for which UntunedGpuWarning was given."""


class UntunedGpuWarning(UserWarning):
    """A GPU runs with the launches of another architecture: results are as accurate, speed may be lower."""


@dataclass(frozen=True)
class TuningSource:
    """The file that an operator's launches come from: its architecture, and that of the card."""

    path: Path
    architecture: int
    card_architecture: int

    @property
    def is_own(self) -> bool:
        """Whether the file was measured on the architecture of the card."""
        return self.architecture == self.card_architecture


@functools.lru_cache(maxsize=4096)
def launch_for(name: str, device: torch.device, **shape: Value) -> Mapping[str, Any]:
    """The launch parameters of a kernel, "operator.kernel", for a shape on a device.

    Results are cached. The first launch on a card whose architecture has no file of the operator gives an
    UntunedGpuWarning. Raises KeyError for a kernel that has no table, and for a variable of a condition that
    `shape` lacks.
    """
    import torch

    from neuzip.kernels.device.properties import card_of

    operator, _, kernel = name.partition(".")
    device = card_of(device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    file = source(operator, device)
    if not file.is_own and device not in _warned:
        _warned.add(device)
        warnings.warn(_untuned(operator, card, file), UntunedGpuWarning, stacklevel=2)
    entries = _replaced[name] if name in _replaced else read(file.path)[kernel]
    for entry in entries:
        if holds(entry, shape, card):
            return MappingProxyType(entry["use"])
    raise KeyError(f"no entry of {name} has conditions that hold for {shape}")


@contextmanager
def replaced(tables: Mapping[str, Sequence[Entry]]) -> Iterator[None]:
    """Context in which kernels, by "operator.kernel", have these entries and not those of the files.

    It is for measuring candidates. Functions that cache what `launch_for` gives have to be cleared by the
    caller, within the context and after it.
    """
    before = dict(_replaced)
    _replaced.update(tables)
    launch_for.cache_clear()
    try:
        yield
    finally:
        _replaced.clear()
        _replaced.update(before)
        launch_for.cache_clear()


def _untuned(operator: str, card: str, file: TuningSource) -> str:
    """What UntunedGpuWarning says."""
    own, other = (f"{number // 10}.{number % 10}" for number in (file.card_architecture, file.architecture))
    return (
        f"{operator} has no launch parameters for {card} (compute capability {own}) and uses those for "
        f"{other}; results are as accurate, but it may be slower; "
        "benchmarks/tune.py in neuzip's repository tunes a GPU"
    )


def holds(entry: Mapping[str, Any], shape: Mapping[str, Value], card: str) -> bool:
    """Whether an entry of a table counts for a shape on a card of this name."""
    if "cards" in entry and not any(part in card for part in entry["cards"]):
        return False
    return all(_agrees(shape[variable], wanted) for variable, wanted in entry.get("when", {}).items())


def _agrees(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return value in wanted
    if not isinstance(wanted, dict):
        return bool(value == wanted)
    return (
        value >= wanted.get("min", value)
        and value <= wanted.get("max", value)
        and ("above" not in wanted or value > wanted["above"])
        and ("below" not in wanted or value < wanted["below"])
    )


def source(operator: str, device: torch.device) -> TuningSource:
    """Which file has the launches of an operator on a device."""
    return source_for(operator, architecture_of(device))


@functools.cache
def architecture_of(device: torch.device) -> int:
    """Compute capability as in "sm90"; for Triton's interpreter that of Hopper."""
    import torch

    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def source_for(operator: str, architecture: int) -> TuningSource:
    """The file of an architecture, or else of the nearest: the newest that is older, or the oldest of all."""
    files = {int(path.parent.name[2:]): path for path in FOLDER.glob(f"sm*/{operator}.toml")}
    if not files:
        raise KeyError(f"no architecture has a table of {operator}")
    older = [one for one in files if one <= architecture]
    nearest = max(older) if older else min(files)
    return TuningSource(files[nearest], nearest, architecture)


def operators() -> list[str]:
    """All operators that have a table, in order."""
    return sorted({path.stem for path in FOLDER.glob("sm*/*.toml")})


def measured_on(path: Path) -> Mapping[str, Any]:
    """What a file as a whole was measured on: `card`, `commit` and `date`; single entries may have others."""
    with open(path, "rb") as file:
        measured: dict[str, Any] = tomllib.load(file).get("measured", {})
    return measured


@functools.cache
def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Entries of each kernel in a file, those with `cards` first. Raises ValueError for what is no table."""
    with open(path, "rb") as file:
        kernels: dict[str, Any] = tomllib.load(file)
    measured = kernels.pop("measured", {})
    for name, entries in kernels.items():
        for entry in entries:
            _check(f"{path.parent.name}/{path.name}: {name}", {"measured": measured, **entry})
        if entries[-1].get("when") or "cards" in entries[-1]:
            raise ValueError(f"{path}: the last entry of {name} has conditions")
        entries.sort(key=lambda entry: "cards" not in entry)
    return kernels


def _check(where: str, entry: Mapping[str, Any]) -> None:
    if unknown := entry.keys() - {"when", "use", "cards", "measured"}:
        raise ValueError(f"{where}: unknown keys {sorted(unknown)}")
    if "use" not in entry:
        raise ValueError(f"{where}: an entry without `use`")
    if missing := {"card", "commit", "date"} - entry["measured"].keys():
        raise ValueError(f"{where}: `measured` lacks {sorted(missing)}")
    for variable, wanted in entry.get("when", {}).items():
        if isinstance(wanted, dict) and not (wanted and wanted.keys() <= {*BOUNDS}):
            raise ValueError(f"{where}: {variable} has other bounds than {', '.join(BOUNDS)}")
