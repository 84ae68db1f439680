"""What the plugins for serving engines share: the options of a user, the versions supported, and refusals.

    "neuzip": {ENGINE: {"residency": "packed", "exact": true}}      in config.json, ENGINE such as "vllm"

Every process of an engine imports this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuzip.distribution import ENGINES, fits
from neuzip.errors import NeuzipError
from neuzip.runtime.residencies import in_words

SECTION = "neuzip"
"""The key of neuzip's section in config.json."""

KEYS = ("residency", "exact")
SERVED = ("dense", "packed")
"""The residencies that engines serve."""


STEPS = "neuzip_steps"
"""The attribute of a decoded tensor with the steps of its rows, fp32 [rows], if it is stored quantized."""


class EngineRefusal(NeuzipError, ValueError):
    """Something that neuzip does not do in an engine. Engines print the text, so it contains the hint."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


@dataclass(frozen=True)
class ServingOptions:
    """How an engine holds the weights. `exact` decodes a packed weight before each product."""

    residency: str = "dense"
    exact: bool = False


def require_supported(engine: str, version: str) -> None:
    """Raise EngineRefusal for a version of an engine that is not supported. `engine` is a key of ENGINES."""
    title, versions = ENGINES[engine].title, ENGINES[engine].versions
    if not fits(version, versions):
        raise EngineRefusal(
            f"neuzip supports {title} {versions}, and this is {title} {version}",
            f'run `pip install "{engine}{versions}"`, or restore the folder with `neuzip decompress`',
        )


def require_readable(section: Mapping[str, Any]) -> None:
    """Raise EngineRefusal if the quantization_config of a compressed folder is of another format version."""
    from neuzip.formats.manifest import VERSION

    version = section.get("version")
    if version != VERSION or type(version) is not int:
        raise EngineRefusal(
            f"config.json, quantization_config: format version {version!r}; this neuzip reads {VERSION}",
            "update neuzip to read it",
        )


def options_of(values: Mapping[str, Any], residency: str, engine: str) -> ServingOptions:
    """The options of checked values, with a `residency` where these have none. Raises EngineRefusal."""
    residency, exact = values.get("residency", residency), values.get("exact", False)
    if exact and residency != "packed":
        raise EngineRefusal(
            f"neuzip: `exact` has no effect with the residency {residency!r}, whose products are "
            f"{ENGINES[engine].title}'s own",
            "leave `exact` out, or give the residency 'packed'",
        )
    return ServingOptions(residency, exact)


def checked(values: object, place: str, engine: str) -> dict[str, Any]:
    """The options that `place` gives, each of the right type; None gives none. Raises EngineRefusal."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise EngineRefusal(f"{place}: {values!r} is not an object", 'give {"residency": "packed"}')
    for key in values:
        if key not in KEYS:
            raise EngineRefusal(f"{place}: there is no key {key!r}", f"there are {' and '.join(KEYS)}")
    residency, exact = values.get("residency", "dense"), values.get("exact", False)
    if residency not in SERVED:
        raise EngineRefusal(
            f"{place}, key 'residency': {residency!r} is no residency in {ENGINES[engine].title}",
            f"give {in_words(SERVED)}",
        )
    if not isinstance(exact, bool):
        raise EngineRefusal(
            f"{place}, key 'exact': {exact!r} is neither true nor false", "give true or false"
        )
    return dict(values)
