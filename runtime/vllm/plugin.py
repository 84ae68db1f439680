"""The entry point `vllm.general_plugins`, which vLLM calls in every process of every start.

It registers a quantization config and imports nothing that vLLM does not import anyway. All else, the check
of vLLM's version too, waits until a start asks for neuzip: see `config`.
"""

from __future__ import annotations

import logging

from neuzip.runtime.vllm.llvmlite_names import tolerate_llvmlite


def register() -> None:
    """Make "neuzip" a quantization method of vLLM. Raises nothing: what goes wrong is a line in the log."""
    try:
        from vllm.model_executor.layers.quantization import (
            QUANTIZATION_METHODS,
            register_quantization_config,
        )

        if "neuzip" not in QUANTIZATION_METHODS:
            from neuzip.runtime.vllm.config import VllmConfigOfNeuzip

            register_quantization_config("neuzip")(VllmConfigOfNeuzip)
        tolerate_llvmlite()  # a script that compresses a model has imported it before it starts vLLM
    except Exception as failure:
        logging.getLogger("vllm.neuzip").warning(
            "neuzip could not register with vLLM, which so serves no compressed folder: %s",
            failure,
        )
