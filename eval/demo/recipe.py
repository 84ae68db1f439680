"""Train the demo checkpoint from nothing, in some minutes: `python -m neuzip.eval.demo.recipe OUT_DIR`.

The seeds are fixed, but PyTorch's sums differ in the last bits between machines, and the text differs between
Python versions: a second run gives an equally good model, not the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from neuzip.eval.demo import split_topics

VOCABULARY = 1024  # Small: with about 100,000 tokens of text, rarer pieces would hardly be seen.
END_OF_TEXT = "<|endoftext|>"  # Stands between documents; also where generation starts and stops.
END_OF_TEXT_ID = 0  # The tokenizer's trainer numbers special tokens first.

HIDDEN = 128  # Six layers of real matrices within 1.4 M parameters and 3 MB.
INTERMEDIATE = 384  # Three times the width; not a power of two, as in most real models.
LAYERS = 6
HEADS = 4
KEY_VALUE_HEADS = 2  # Grouped queries, so that the demo has the shapes of today's checkpoints.
CONTEXT = 256  # Tokens; longer than most paragraphs of the text.

SEED = 2024
THREADS = 2  # What any machine can spare.
BATCH = 16  # Windows of CONTEXT tokens: one step sees about 4 % of the text.
STEPS = 700  # Validation perplexity is flat by then.
WARMUP = 50  # Steps of rising learning rate; AdamW's second moments need about that many.
LEARNING_RATE = 2e-3  # Tried: 1e-3 is too slow for so few steps, 4e-3 no better.
WEIGHT_DECAY = 1.0  # Strong, against overfitting; on matrices only, as norms are scales that must not shrink.
BETAS = (0.9, 0.98)  # A shorter memory than the default 0.999, for a run this short.
NOISE = 0.15  # Share of input tokens replaced by random ones: the text is seen 27 times, never twice alike.
CLIP = 1.0  # Gradient norm; a guard for the first steps.
VALIDATION_EVERY = 50  # Steps between looks at the validation documents.
VALIDATION_SHARE = 12  # One training document in this many is kept back to choose the best step.


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer: every text can be encoded, and decoding gives it back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokens(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """Encode the documents as one row of token ids with the end-of-text token after each."""
    row: list[int] = []
    for document in documents:
        row += tokenizer.encode(document + END_OF_TEXT).ids
    return torch.tensor(row)


def new_model() -> LlamaForCausalLM:
    """Return the untrained model in float32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_VALUE_HEADS,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
        )
    )


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, row: torch.Tensor) -> float:
    """Return the token-level perplexity over windows of CONTEXT tokens that do not overlap.

    The first token of a window is given, not predicted; a last window that is not full is dropped.
    """
    windows = row[: row.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for batch in torch.split(windows, BATCH):
        logits = model(input_ids=batch).logits[:, :-1].float()
        losses = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        total += losses.item()
    return math.exp(total / (windows.shape[0] * (CONTEXT - 1)))


def with_noise(inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Replace some tokens by random ones.

    Unlike dropout inside the model, this regularises without making the weights indifferent to rounding.
    """
    replaced = torch.rand(inputs.shape, generator=generator) < NOISE
    return torch.where(replaced, torch.randint(VOCABULARY, inputs.shape, generator=generator), inputs)


def learning_rate(step: int) -> float:
    """Return the rate for a step: a linear rise, then half a cosine down to zero."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def train(model: LlamaForCausalLM, row: torch.Tensor, validation: torch.Tensor) -> None:
    """Train on random windows of `row`, and leave the model at the step that was best on `validation`."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=BETAS,
    )
    generator = torch.Generator().manual_seed(SEED)
    best, best_weights = math.inf, dict[str, torch.Tensor]()
    for step in range(STEPS):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(row.numel() - CONTEXT, (BATCH,), generator=generator)
        windows = row[starts[:, None] + torch.arange(CONTEXT + 1)]
        logits = model(input_ids=with_noise(windows[:, :-1], generator)).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if (step + 1) % VALIDATION_EVERY == 0:
            model.train(mode=False)
            now = perplexity(model, validation)
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  validation perplexity {now:.2f}", flush=True)
            if now < best:
                best, best_weights = now, {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best_weights)
    model.train(mode=False)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint in bfloat16, readable by transformers 4.57 and 5."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written here because transformers 5 would name a class that 4.57 does not know; both know this one.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    parser.add_argument("out_dir", type=Path, help="a folder that is empty or does not exist yet")
    folder: Path = parser.parse_args().out_dir
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty: name a new folder")

    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    started = time.perf_counter()
    documents, held_out = split_topics()
    tokenizer = train_tokenizer(documents)
    fitted = [text for index, text in enumerate(documents) if index % VALIDATION_SHARE]
    row, validation = tokens(tokenizer, fitted), tokens(tokenizer, documents[::VALIDATION_SHARE])
    model = new_model()
    print(f"{model.num_parameters():,} parameters, {row.numel():,} tokens, {validation.numel():,} kept back")
    train(model, row, validation)
    save(model, tokenizer, folder)
    print(f"trained and saved in {time.perf_counter() - started:.0f} s")

    saved = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    print(f"train perplexity {perplexity(saved, row):.2f}")
    print(f"held-out perplexity {perplexity(saved, tokens(tokenizer, held_out)):.2f}")


if __name__ == "__main__":
    main()
