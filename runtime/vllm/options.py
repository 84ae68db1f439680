"""What a user of vLLM chooses: the residency of the weights, and whether products have vLLM's own bits.

    vllm serve MODEL --additional-config '{"neuzip": {"residency": "packed", "exact": true}}'
    config.json      "neuzip": {"vllm": {"residency": "packed"}}

The command line comes before config.json. Every start of vLLM imports this module, so it imports no torch.
"""

from __future__ import annotations

from neuzip.runtime.serving import SECTION, ServingOptions, checked, options_of

ENTRY = "vllm"
"""The entry for vLLM in neuzip's section of config.json, and vLLM's key in ENGINES."""


def serving_options(additional: object, entry: object, *, is_compressed: bool) -> ServingOptions:
    """The options of a start. Raises EngineRefusal for a wrong key or value.

    `additional` is what additional_config has for neuzip, and `entry` what config.json has; None is nothing.
    Without a residency the weights of a compressed folder are dense and those of a plain one packed.
    """
    from_config = checked(entry, f"config.json, {SECTION}.{ENTRY}", ENTRY)
    chosen = checked(additional, f"additional_config, {SECTION}", ENTRY)
    if chosen.get("residency", "packed") != "packed":
        from_config.pop("exact", None)  # which is for packed weights only
    return options_of(from_config | chosen, "dense" if is_compressed else "packed", ENTRY)
