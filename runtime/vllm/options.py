"""What a user of vLLM chooses: the residency of the weights, and whether products have vLLM's own bits.

    vllm serve MODEL --additional-config '{"neuzip": {"residency": "packed", "exact": true}}'
    config.json      "neuzip": {"vllm": {"residency": "packed"}}

The command line comes before config.json. Every start of vLLM imports this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuzip.runtime.residencies import in_words
from neuzip.runtime.vllm.versions import VllmRefusal

SECTION = "neuzip"
"""The key in vLLM's additional_config, and of neuzip's section in config.json."""

ENTRY = "vllm"
"""The entry for vLLM in that section of config.json."""

KEYS = ("residency", "exact")
SERVED = ("dense", "packed")
"""The residencies that vLLM serves."""


@dataclass(frozen=True)
class ServingOptions:
    """How vLLM holds the weights. `exact` decodes a packed weight before each product."""

    residency: str
    exact: bool = False


def serving_options(additional: object, entry: object, *, is_compressed: bool) -> ServingOptions:
    """The options of a start. Raises VllmRefusal for a wrong key or value.

    `additional` is what additional_config has for neuzip, and `entry` what config.json has; None is nothing.
    Without a residency the weights of a compressed folder are dense and those of a plain one packed.
    """
    from_config = checked(entry, f"config.json, {SECTION}.{ENTRY}")
    chosen = checked(additional, f"additional_config, {SECTION}")
    if chosen.get("residency", "packed") != "packed":
        from_config.pop("exact", None)  # which is for packed weights only
    values = from_config | chosen
    residency = values.get("residency", "dense" if is_compressed else "packed")
    exact = values.get("exact", False)
    if exact and residency != "packed":
        raise VllmRefusal(
            f"neuzip: `exact` has no effect with the residency {residency!r}, whose products are vLLM's own",
            "leave `exact` out, or give the residency 'packed'",
        )
    return ServingOptions(residency, exact)


def checked(values: object, place: str) -> dict[str, Any]:
    """The options that `place` gives, each of the right type. Raises VllmRefusal."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise VllmRefusal(f"{place}: {values!r} is not an object", 'give {"residency": "packed"}')
    for key in values:
        if key not in KEYS:
            raise VllmRefusal(f"{place}: there is no key {key!r}", f"there are {' and '.join(KEYS)}")
    residency, exact = values.get("residency", "dense"), values.get("exact", False)
    if residency not in SERVED:
        raise VllmRefusal(
            f"{place}, key 'residency': {residency!r} is no residency in vLLM", f"give {in_words(SERVED)}"
        )
    if not isinstance(exact, bool):
        raise VllmRefusal(f"{place}, key 'exact': {exact!r} is neither true nor false", "give true or false")
    return dict(values)
