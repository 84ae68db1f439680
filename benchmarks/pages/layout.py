"""What every page of results is made of: sections, tables, links, machines, and results by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "benchmarks" / "results"


def title_of(part: str) -> str:
    """What a table is of: the heading that it begins with."""
    found = re.match(r"### (.+)", part)
    assert found is not None, part[:80]
    return found[1]


def anchor(title: str) -> str:
    """The name that a heading has on the web."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def measured(*tables: tuple[Sequence[str], Callable[..., str]]) -> list[str]:
    """The tables of which all results are there."""
    return [render(*map(load, names)) for names, render in tables if all(map(is_measured, names))]


def section(title: str, told: str, shown: Iterable[str], command: str, machines: Iterable[str]) -> str:
    """A heading, what was measured, the tables, and how to measure it again."""
    by_machine: dict[str, dict[str, None]] = {}
    for text in machines:
        name, _, commit = text.partition(", commit ")
        by_machine.setdefault(name, {})[commit] = None
    where = "; ".join(
        f"{name}, commit{'s' if len(found) > 1 else ''} {', '.join(found)}"
        for name, found in by_machine.items()
    )
    return "\n\n".join([f"### {title}", told, *shown, f"Measured with {command} on {where}."])


def is_measured(name: str) -> bool:
    """Whether there is such a result."""
    return (RESULTS / f"{name}.json").is_file()


def load(name: str) -> dict[str, Any]:
    """One result."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def slower(speedup: float) -> str:
    """The label of a result of ours that is slower than its baseline, in the two digits that are shown."""
    return ", **slower**" if round(speedup, 2) < 1 else ""


def machine(document: dict[str, Any]) -> str:
    """What it ran on, in a few words."""
    e = document["environment"]
    packages = ", ".join(
        f"{name} {version}" for name, version in e["packages"].items() if "neuzip" not in name
    )
    return (
        f"{e['cores']} cores of an {e['processor']}, Python {e['python']}, {packages}, commit {e['commit']}"
    )


def text_of(name: str) -> str:
    """A text as a reader knows it."""
    return {"demo": "the held-out text", "train": "its training text"}.get(name.partition(" (")[0], name)


CACHE_TITLE = "Quality with a quantised KV cache"

MODELS_READ = {"demo": "The demo checkpoint", "wikilm-26m": "wikilm-26m", "smollm2-135m": "SmolLM2-135M"}
"""Names of models; docs/measurements.md says what they are."""


def machines_of(document: dict[str, Any]) -> list[str]:
    """The GPUs of all sections, or of a document without any."""
    sections = document.get("sections", {"": document}).values()
    return [gpu_machine(part["environment"]) for part in sections if "environment" in part]


def missed(row: dict[str, Any], key: str) -> str:
    """That a target was missed, where it was."""
    return ", **missed**" if row[key] > row.get(f"must_{key}", row[key]) else ""


def gpu_machine(environment: dict[str, Any]) -> str:
    """The card and what drove it, in a few words."""
    gpu = environment["gpu"]
    packages = ", ".join(
        f"{name} {v}"
        for name, v in environment["packages"].items()
        if name in ("torch", "triton", "safetensors", "transformers")
    )
    note = f" ({environment['note']})" if "note" in environment else ""
    return (
        f"{gpu['name']}, driver {gpu['driver']}, Python {environment['python']}, {packages}, "
        f"commit {environment['commit']}{note}"
    )


def with_aim(value: float, aims: tuple[float | None, float | None], *, most: bool) -> str:
    """The target and the stretch goal, in brackets, and whether one was missed or the other reached."""
    must, stretch = aims
    if must is None:
        return ""
    sign = 1 if most else -1
    told = f"{must:g}" + ("" if stretch is None else f" / {stretch:g}")
    if sign * value > sign * must:
        return f" (target {told}, **missed**)"
    reached = stretch is not None and sign * value <= sign * stretch
    return f" (target {told}{', stretch reached' if reached else ''})"


WITHIN_95 = 1.96
"""Standard errors to either side of a 95 % interval."""


def within(estimate: dict[str, float | None], digits: int) -> str:
    """A figure and its 95 % interval."""
    value, error = estimate["value"], estimate["standard_error"]
    assert value is not None
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {WITHIN_95 * error:.{digits}f}")


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def linked(what: str, part: str) -> str:
    """A cell that leads to a table of docs/measurements.md."""
    return f"[{what}](docs/measurements.md#{anchor(title_of(part))})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]
    return "\n".join(lines)


def aimed(value: float, must: float, text: str, *, most: bool = False) -> str:
    """A target, and that it was missed if it was."""
    return text + (", **missed**" if (value > must if most else value < must) else "")


def times(ratio: float) -> str:
    """How many times as fast as the baseline, and that it is slower if it is."""
    return f"{ratio:.2f}x{slower(ratio)}"
