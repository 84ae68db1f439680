"""What all pages of results share: results by name, templates, links, machines, and labels of results.

The text of a page is in `templates/<topic>.md.j2`, a macro for each block. `templates/layout.md.j2` has what
several topics use. The module of the same name derives the numbers and calls `render`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Document = dict[str, Any]
"""A result as its file has it; most have a list `results` of dictionaries."""

MODELS_READ = {"demo": "The demo checkpoint", "wikilm-26m": "wikilm-26m", "smollm2-135m": "SmolLM2-135M",
               "smollm2-135m-dithered": "SmolLM2-135M, dithered",
               "smollm2-135m-auto": "SmolLM2-135M, bits chosen layer by layer",
               "wikilm-26m-auto": "wikilm-26m, bits chosen layer by layer",
               "wikilm-26m-ternary": "wikilm-26m with ternary weights"}  # fmt: skip
"""Names of models; docs/measurements.md says what they are."""


def is_measured(name: str) -> bool:
    """Whether there is such a result."""
    return (RESULTS / f"{name}.json").is_file()


def load(name: str) -> Document:
    """One result."""
    document: Document = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def measured(*tables: tuple[Sequence[str], Callable[..., str]]) -> list[str]:
    """The tables of which all results are there."""
    pages = [render(*map(load, names)) for names, render in tables if all(map(is_measured, names))]
    return [page for page in pages if page]


def render(block: str, *values: object, **named: object) -> str:
    """The Markdown of `topic.macro`, a macro of templates/topic.md.j2 that gets these values."""
    topic, _, macro = block.partition(".")
    module = TEMPLATES.get_template(f"{topic}.md.j2").module
    return unwrapped(str(getattr(module, macro)(*values, **named)))


def unwrapped(text: str) -> str:
    """Markdown with one line per paragraph, item or table row, and one blank line between blocks.

    Templates wrap long paragraphs: a line is joined to the line before, unless it begins with `|`, `*`, `#`
    or `![`.
    """
    lines: list[str] = []
    for line in text.splitlines():
        begins = re.match(r" *\* |\||#|!\[", line) or not lines or not lines[-1]
        if not line.strip() or begins:
            lines.append(line.rstrip())
        else:
            lines[-1] += f" {line.strip()}"
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def anchor(title: str) -> str:
    """The name that a heading has on the web."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def linked(what: str, title: str) -> str:
    """A cell that leads to a table of docs/measurements.md."""
    return f"[{what}](docs/measurements.md#{anchor(title)})"


def row(*cells: object) -> str:
    """A line of a Markdown table; a list stands for several cells."""
    texts = [str(one) for cell in cells for one in (cell if isinstance(cell, list) else [cell])]
    return f"| {' | '.join(texts)} |"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join(row(*cells) for cells in [heads, ["---"] * len(heads), *rows])


def machines(*documents: Document) -> str:
    """What results or their sections were measured on, each machine once with all of its commits."""
    return machine_list(text for document in documents for text in machines_of(document))


def machine_list(texts: Iterable[str]) -> str:
    """Descriptions of machines as a sentence has them, each machine once with all of its commits."""
    commits: dict[str, dict[str, None]] = {}
    for text in texts:
        name, _, commit = text.partition(", commit ")
        commits.setdefault(name, {}).update(dict.fromkeys(commit.split(", ")))
    return "; ".join(
        f"{name}, commit{'s' if len(each) > 1 else ''} {', '.join(each)}" for name, each in commits.items()
    )


def machines_of(document: Document) -> Iterator[str]:
    """A description of the machine of each section, or of a document without any."""
    for part in document.get("sections", {"": document}).values():
        yield machine(part["environment"])


GPU_PACKAGES = ("torch", "triton", "safetensors", "transformers")
"""Packages whose versions stand beside the results of a GPU."""


def machine(environment: Document) -> str:
    """The GPU and its driver, or the processor; versions; and the commit, in a few words."""
    gpu = environment.get("gpu")
    packages = ", ".join(
        f"{name} {version}" for name, version in environment["packages"].items()
        if (name in GPU_PACKAGES if gpu else "neuzip" not in name)
    )  # fmt: skip
    where = f"{environment['cores']} cores of an {environment['processor']}" if gpu is None else (
        f"{gpu['name']}, driver {gpu['driver']}"
    )  # fmt: skip
    return f"{where}, Python {environment['python']}, {packages}, commit {environment['commit']}"


def text_of(name: str) -> str:
    """A text as a reader knows it."""
    return {"demo": "the held-out text", "train": "its training text"}.get(name.partition(" (")[0], name)


def renamed(text: str, names: dict[str, str]) -> str:
    """A text of a result in a reader's words: `names` has regular expressions and what replaces them."""
    for pattern, name in names.items():
        text = re.sub(pattern, name, text)
    return text


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def slower(speedup: float) -> str:
    """The label of a result of ours that is slower than its baseline, in the two digits that are shown."""
    return ", **slower**" if round(speedup, 2) < 1 else ""


def slower_results(text: str) -> int:
    """Results of a page that are slower than their baseline: those with a label, and bold ratios below 1."""
    return text.count("**slower**") + len(re.findall(r"\*\*0\.\d\d\*\*", text))


def times(ratio: float) -> str:
    """How many times as fast as the baseline, and that it is slower if it is."""
    return f"{ratio:.2f}x{slower(ratio)}"


def judged(value: float, must: float, *, most: bool = False) -> str:
    """The label of a result that misses its target."""
    return ", **missed**" if (value > must if most else value < must) else ""


def with_aim(value: float, aims: tuple[float | None, float | None], *, most: bool) -> str:
    """The target and the stretch goal, in brackets, and whether one was missed or the other reached."""
    must, stretch = aims
    if must is None:
        return ""
    label = judged(value, must, most=most)
    if not label and stretch is not None and not judged(value, stretch, most=most):
        label = ", stretch reached"
    return f" (target {must:g}{'' if stretch is None else f' / {stretch:g}'}{label})"


WITHIN_95 = 1.96
"""Standard errors to either side of a 95 % interval."""


def within(estimate: dict[str, float | None], digits: int) -> str:
    """A figure and its 95 % interval."""
    value, error = estimate["value"], estimate["standard_error"]
    assert value is not None
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {WITHIN_95 * error:.{digits}f}")


def spread(values: Sequence[float], spec: str) -> str:
    """The least and the greatest value, each formatted by `spec`."""
    return f"{format(min(values), spec)} to {format(max(values), spec)}"


def speeds(ratios: Sequence[float]) -> str:
    """The least and the greatest ratio of speeds, and that some are slower."""
    return f"{spread(ratios, ',.2f')}{slower(min(ratios))}"


def plus_minus(value: float, error: float | None, *formats: str) -> str:
    """A figure and its error, if it has one; the second format is the error's, if it differs."""
    return format(value, formats[0]) + ("" if not error else f" ± {format(error, formats[-1])}")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = (
        judged, linked, machine_list, machines, plus_minus, row, slower, speeds, spread,
        table, text_of, times, with_aim, within,
    )  # fmt: skip
    environment.globals |= {function.__name__: function for function in shared}
    environment.globals |= {"MODELS_READ": MODELS_READ, "exp": math.exp, "max": max}
    environment.filters["fmt"] = format
    return environment


TEMPLATES = _environment()
"""The templates of all pages; `value | fmt(".2f")` formats a number as Python does."""
