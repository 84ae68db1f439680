"""A Llama-shaped model with many texts at once, and with a long prompt: packed weights beside bf16."""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from llama_model import DEVICE, load, made, timed
from model_results import Results
from packed_groups import LAW_NAMES
from transformers import PreTrainedModel

from neuzip.runtime.decode.benchmark import free_memory, prompts, run
from neuzip.runtime.decode.greedy import GreedyDecoder

PROMPT = 32
"""Tokens of a text before those that are timed."""

BATCH_TOKENS = 128
"""Tokens that are added to every text of a batch in a turn."""

TURNS = 6
"""Turns of models that are compared."""

SERVED = ("bf16", "packed")


def serving(arguments: argparse.Namespace, folder: Path, results: Results) -> None:
    """Decoding of large batches, and a prompt: for weights of each law, saved after each."""
    for law in arguments.laws:
        folders = made(arguments, SERVED, folder, law)
        with timed("loaded, bf16 and packed"):
            models = [load(form, folders) for form in SERVED]
        for path in folders.values():
            shutil.rmtree(path, ignore_errors=True)
        model = f" ({arguments.layers} layers, {LAW_NAMES[law]})"
        new_tokens = min(BATCH_TOKENS, arguments.new_tokens)
        for batch in arguments.serving_batches:
            with timed(f"batch {batch}, captured and run"):
                steps = steps_in_turns(models, batch, new_tokens, new_tokens)
            for form, step in zip(SERVED, steps, strict=True):
                results.against_bf16(f"decode, batch {batch}{model}", form, batch / step, "tokens/s")
            free_memory()
        for form, seconds in zip(SERVED, prefill_in_turns(models, arguments.prefill), strict=True):
            results.against_bf16(f"prefill{model}", form, arguments.prefill / seconds, "tokens/s")
        del models
        free_memory()
        results.save(results.rows)


def steps_in_turns(
    models: Sequence[PreTrainedModel], batch: int, new_tokens: int, most_tokens: int
) -> list[float]:
    """Median steps of models that take turns, in seconds: the caches have room for `most_tokens`."""
    decoders = [GreedyDecoder(model, batch, PROMPT + most_tokens) for model in models]
    ids = prompts(models[0].config.vocab_size, batch, PROMPT)
    return [statistics.median(steps) for steps in step_times(decoders, ids, new_tokens)]


def step_times(
    decoders: Sequence[GreedyDecoder],
    ids: torch.Tensor,
    new_tokens: int,
    continuation: torch.Tensor | None = None,
) -> list[list[float]]:
    """Seconds of every step of decoders that take turns: runs minutes apart would differ more.

    Each turn is in the other direction than the one before. For `continuation` see `run`.
    """
    steps: list[list[float]] = [[] for _ in decoders]
    order = list(zip(decoders, steps, strict=True))
    for _ in range(TURNS):
        for decoder, mine in order:
            mine += run(decoder, ids, new_tokens, continuation).step_seconds
        order.reverse()
    return steps


def prefill_in_turns(models: Sequence[PreTrainedModel], tokens: int) -> list[float]:
    """Median seconds of one prompt of models that take turns."""
    return [statistics.median(mine) for mine in prefill_times(models, tokens)]


def prefill_times(models: Sequence[PreTrainedModel], tokens: int) -> list[list[float]]:
    """Seconds of one prompt, several times, of models that take turns, behind one that does not count."""
    free_memory()
    decoders = [GreedyDecoder(model, 1, tokens + 1, graph=False) for model in models]
    ids = prompts(models[0].config.vocab_size, 1, tokens)
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(1 + 2 * TURNS):
        for decoder, mine in zip(decoders, seconds, strict=True):
            mine.append(run(decoder, ids, 1).prefill_seconds)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return [mine[1:] for mine in seconds]
