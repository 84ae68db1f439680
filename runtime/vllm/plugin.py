"""The entry point `vllm.general_plugins`, which vLLM calls in every process of every start.

It registers a quantization config and a backend of weight transfer. It imports nothing that vLLM does not
import anyway. All else, the check of vLLM's version too, waits until a start asks for neuzip: see `config`.
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
        _register_weight_transfer()
        tolerate_llvmlite()  # a script that compresses a model has imported it before it starts vLLM
    except Exception as failure:
        logging.getLogger("vllm.neuzip").warning(
            "neuzip could not register with vLLM, which so serves no compressed folder: %s",
            failure,
        )


def _register_weight_transfer() -> None:
    """Make "neuzip_delta" a backend of weight transfer, if this vLLM has sparse patches."""
    from importlib.util import find_spec

    if find_spec("vllm.model_executor.model_loader.checkpoint_weight_patch") is None:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "neuzip_delta" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "neuzip_delta", "neuzip.runtime.vllm.weight_sync", "DeltaWeightTransferEngine"
        )
