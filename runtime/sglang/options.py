"""What a user of SGLang chooses: the residency of the weights, and whether products have SGLang's own bits.

    sglang serve --model-path MODEL --quantization neuzip                                           packed
    sglang serve --model-path MODEL --json-model-override-args '{"neuzip": {"sglang": {...}}}'
    config.json      "neuzip": {"sglang": {"residency": "packed", "exact": true}}

Every process of SGLang imports this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from neuzip.runtime.serving import SECTION, ServingOptions, checked, options_of

ENTRY = "sglang"
"""The entry for SGLang in neuzip's section of config.json, and SGLang's key in ENGINES."""


def sglang_options(section: object) -> ServingOptions:
    """The options that neuzip's section of a config.json has, None if there is none. Raises EngineRefusal."""
    entry = section.get(ENTRY) if isinstance(section, Mapping) else None
    return options_of(checked(entry, f"config.json, {SECTION}.{ENTRY}", ENTRY), "dense", ENTRY)
