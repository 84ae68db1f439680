"""Models to train from the beginning."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from neuzip.errors import NeuzipError
from neuzip.runtime.load import quiet_transformers


def random_model(config: Path, vocabulary: int, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A causal language model with random weights, a function of `seed`.

    config      a config.json, or the folder of one
    vocabulary  tokens of its tokenizer, of which it must have as many or more

    Raises NeuzipError for what is no such configuration.
    """
    try:
        with quiet_transformers():
            found = AutoConfig.from_pretrained(config, trust_remote_code=False)
            if getattr(found, "vocab_size", vocabulary) < vocabulary:
                raise NeuzipError(
                    f"{config}: vocab_size is {found.vocab_size}, the tokenizer has {vocabulary} tokens",
                    "raise it in the file",
                )
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model: PreTrainedModel = AutoModelForCausalLM.from_config(found, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise NeuzipError(f"{config}: is no configuration of a causal language model: {reason}") from error
    return model
