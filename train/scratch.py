"""Models to train from the beginning."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from neuzip.errors import NeuzipError, is_out_of_memory
from neuzip.runtime.hf.messages import quiet_transformers

LONGEST = 300
"""Most characters of a reason in a message."""


def random_model(
    config: Path | PreTrainedConfig, vocabulary: int, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """A causal language model with random weights, a function of `seed`.

    config      a config.json, the folder of one, or a config that was read
    vocabulary  tokens of its tokenizer, of which it must have as many or more

    Raises NeuzipError for what is no such configuration.
    """
    if isinstance(config, PreTrainedConfig):
        return _of_config(config, dtype, seed)
    try:
        with quiet_transformers(), torch.random.fork_rng():
            parsed = AutoConfig.from_pretrained(config, trust_remote_code=False)
            _require_room(config, getattr(parsed, "vocab_size", vocabulary), vocabulary)
            model = _of_config(parsed, dtype, seed)
            _require_weights(config, model)
            with torch.no_grad():
                model(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except NeuzipError:
        raise
    except Exception as error:  # all that runs here is what the file says, and fails in many ways
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:LONGEST]
        raise NeuzipError(
            f"{config}: is no configuration of a causal language model: {reason}", "correct it in the file"
        ) from error
    return model


def _of_config(config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=False
        )
    return model


def _require_room(config: Path, own: int, vocabulary: int) -> None:
    if own < vocabulary:
        raise NeuzipError(
            f"{config}: vocab_size is {own}, the tokenizer has {vocabulary} tokens", "raise it in the file"
        )


def _require_weights(config: Path, model: PreTrainedModel) -> None:
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    if layers < 1:
        raise NeuzipError(f"{config}: num_hidden_layers is {layers}", "give 1 and more")
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise NeuzipError(
                f"{config}: {name} would have the shape {tuple(parameter.shape)}, which holds no weight",
                "give sizes above 0",
            )
