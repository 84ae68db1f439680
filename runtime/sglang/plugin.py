"""The entry point `sglang.srt.plugins`, which SGLang calls in every process of every start.

It imports nothing that SGLang does not import anyway. All else, the check of SGLang's version too, waits
until a start asks for neuzip: see `hooks` and `quantization`.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Have SGLang read compressed folders, and make "neuzip" a quantization method of it.

    Raises nothing: what goes wrong is a line in the log.
    """
    try:
        from sglang.srt.layers.quantization import CPU_QUANTIZATION_METHODS, QUANTIZATION_METHODS
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import QUANTIZATION_CHOICES, add_quantization_method_choices

        from neuzip.runtime.sglang import hooks
        from neuzip.runtime.sglang.quantization import SglangConfigOfNeuzip

        for methods in (QUANTIZATION_METHODS, CPU_QUANTIZATION_METHODS):
            methods["neuzip"] = SglangConfigOfNeuzip
        if "neuzip" not in QUANTIZATION_CHOICES:
            add_quantization_method_choices(["neuzip"])
        HookRegistry.register(hooks.CONFIG, hooks.served_config, HookType.AFTER)
        for target in hooks.weight_iterators():
            HookRegistry.register(target, hooks.decoded_weights, HookType.AROUND)
    except Exception as failure:
        logging.getLogger("sglang.neuzip").warning(
            "neuzip could not register with SGLang, which so serves no compressed folder: %s", failure
        )
