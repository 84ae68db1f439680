"""GPU kernels of a model, compiled while the libraries that run it are imported and its weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.errors import NeuzipError

if TYPE_CHECKING:
    import torch

BYTES_A_TOKEN = 4
"""Bytes of English text that make a token, about."""


def likely_tokens(prompt: str) -> int:
    """About how many tokens a text has, before there is a tokenizer."""
    return max(2, len(prompt.encode()) // BYTES_A_TOKEN)


def prefetch_kernels(out: Output, path: Path, device: torch.device, residency: str, tokens: int) -> None:
    """Compile in other threads what a model needs on `device` for a prompt of some tokens; nothing for a CPU.

    A line on stderr says so if the cache lacks a kernel. What is wrong with the checkpoint is left to its
    reader.
    """
    if device.type != "cuda":
        return
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.runtime import kernel_prefetch
    from neuzip.runtime.hf.model_files import model_tensors

    try:
        with FolderSource(path) as source:
            kernel_prefetch.prefetch_kernels(
                source, model_tensors(source), device, residency, rows=(1, tokens), note=out.status
            )
    except NeuzipError:
        return
