"""A tokenizer for tests that need no training: its tokens are bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS = 0


def byte_tokenizer(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    """256 tokens; BOS is that of an exclamation mark, in front of each text if it `adds_bos`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="! $A", pair="! $A $B", special_tokens=[("!", BOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="!")
