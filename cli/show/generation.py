"""A generated text: how fast it came, what memory it took, and the JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.evaluation import attention_text
from neuzip.cli.text import bytes_text, count_text, seconds_text
from neuzip.runtime.kv_bits import in_words, single
from neuzip.runtime.residencies import Residency

if TYPE_CHECKING:
    from torch import device as Device

    from neuzip.runtime.activations import Activations
    from neuzip.runtime.decode.generate import Generation


@dataclass(frozen=True)
class GenerationRun:
    """A generated text, and what it was generated with.

    load_seconds     seconds to load the model
    peak             bytes of memory at most; None if not known
    activations      how activations of ternary weights were quantised
    attention_bits   bits of each layer's attention, None for full precision; None if no layer is quantised
    attention_calls  number of attention calls by how they ran
    host_bytes       bytes of experts in pinned host memory
    calibration      how the bits of the KV cache were chosen, None if they were given
    """

    generation: Generation
    prompt: str
    prompt_tokens: int
    load_seconds: float
    peak: int | None
    residency: Residency
    activations: Activations | None
    attention_bits: Sequence[int | None] | None
    attention_calls: Mapping[str, int]
    device: Device
    host_bytes: int
    calibration: Mapping[str, object] | None = None


def show_generation(out: Output, run: GenerationRun) -> None:
    """Say how fast the text came, and how."""
    generation, inputs = run.generation, run.activations
    weights = run.residency if inputs is None else f"{run.residency}, activations {inputs.text}"
    out.status(f"loaded in {seconds_text(run.load_seconds)}; {_summary(run, weights)}")
    if run.host_bytes:
        out.status(f"experts: {bytes_text(run.host_bytes)} in host memory")
    if run.device.type == "cuda":
        out.status(f"steps {_steps(generation)}")
    if generation.cache_bytes is not None and generation.kv_layers is not None:
        size = bytes_text(generation.cache_bytes)
        out.status(f"KV cache in {in_words(generation.kv_layers)}, {size}; attention: {generation.attention}")
    if run.attention_bits is not None:
        out.status(f"attention: {attention_text(run.attention_bits, run.attention_calls)}")


def generation_json(run: GenerationRun) -> dict[str, object]:
    """What `--json` says of a generated text."""
    generation = run.generation
    return {
        "prompt": run.prompt,
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": run.prompt_tokens,
        "load_seconds": run.load_seconds,
        "seconds": generation.seconds,
        "first_token_seconds": generation.first_token_seconds,
        "capture_seconds": generation.capture_seconds,
        "tokens_per_second": generation.tokens_per_second,
        "peak_bytes": run.peak,
        "host_bytes": run.host_bytes,
        "residency": run.residency,
        "activations": run.activations,
        "kv_bits": single(generation.kv_layers),
        "kv_layers": generation.kv_layers,
        "kv_calibration": run.calibration,
        "kv_bytes": generation.cache_bytes,
        "attention": generation.attention,
        "attention_bits": run.attention_bits,
        "attention_calls": run.attention_calls,
        "device": str(run.device),
        "graphed": generation.graphed,
        "not_graphed": generation.not_graphed,
    }


def _steps(generation: Generation) -> str:
    """Which loop ran, and if it was not the faster one, why."""
    if generation.graphed:
        return "as a CUDA graph"
    return f"without a CUDA graph: {generation.not_graphed}"


def _summary(run: GenerationRun, weights: str) -> str:
    generation = run.generation
    speed = generation.tokens_per_second
    where = "on the CPU" if run.device.type == "cpu" else "of the GPU"
    parts = [
        f"{count_text(len(generation.tokens), 'token')} in {seconds_text(generation.seconds)}",
        f"the first after {seconds_text(generation.first_token_seconds)}"
        + ("" if speed is None else f", then {speed:,.1f} tokens/s"),
        "" if run.peak is None else f"peak memory {bytes_text(run.peak)} {where}",
        f"residency {weights}",
    ]
    return "; ".join(filter(None, parts))
