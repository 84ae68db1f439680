"""What a user of SGLang chooses: the residency of the weights, and whether products have SGLang's own bits.

    sglang serve --model-path MODEL --quantization neuzip                                           packed
    sglang serve --model-path MODEL --json-model-override-args '{"neuzip": {"sglang": {...}}}'
    config.json      "neuzip": {"sglang": {"residency": "packed", "exact": true}}

Every process of SGLang imports this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuzip.runtime.residencies import in_words
from neuzip.runtime.sglang.versions import SglangRefusal

SECTION = "neuzip"
"""The key of neuzip's section in config.json."""

ENTRY = "sglang"
"""The entry for SGLang in that section."""

KEYS = ("residency", "exact")
SERVED = ("dense", "packed")
"""The residencies that SGLang serves."""


@dataclass(frozen=True)
class SglangOptions:
    """How SGLang holds the weights. `exact` decodes a packed weight before each product."""

    residency: str = "dense"
    exact: bool = False


def sglang_options(section: object) -> SglangOptions:
    """The options that neuzip's section of a config.json has, None if there is none.

    Raises SglangRefusal for a wrong key or value.
    """
    place = f"config.json, {SECTION}.{ENTRY}"
    entry = section.get(ENTRY) if isinstance(section, Mapping) else None
    if entry is None:
        return SglangOptions()
    if not isinstance(entry, Mapping):
        raise SglangRefusal(f"{place}: {entry!r} is not an object", 'give {"residency": "packed"}')
    for key in entry:
        if key not in KEYS:
            raise SglangRefusal(f"{place}: there is no key {key!r}", f"there are {' and '.join(KEYS)}")
    residency, exact = entry.get("residency", "dense"), entry.get("exact", False)
    if residency not in SERVED:
        raise SglangRefusal(
            f"{place}, key 'residency': {residency!r} is no residency in SGLang", f"give {in_words(SERVED)}"
        )
    if not isinstance(exact, bool):
        raise SglangRefusal(
            f"{place}, key 'exact': {exact!r} is neither true nor false", "give true or false"
        )
    if exact and residency != "packed":
        raise SglangRefusal(
            f"{place}: `exact` has no effect with dense weights, whose products are SGLang's own",
            "leave `exact` out, or give the residency 'packed'",
        )
    return SglangOptions(residency, exact)
