"""Microseconds of one layer of experts without its router, packed and with transformers' bf16 kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from expert_checks import in_fp64
from expert_routes import use_of
from gpu_codec import captured, stream
from packed_linear import SCATTER, distance, in_turns
from record import spread
from transformers import PreTrainedModel

from neuzip.runtime.hf.decoder import input_device

Tensor = torch.Tensor
Row = dict[str, Any]
Run = Callable[[], object]

BATCHED_TOKENS = 8
"""Most tokens of `batched_mm`, which copies the weights of every expert of every token."""

SAMPLE = 64
"""Tokens whose error against fp64 is measured."""

HOST_ROUNDS = 3
"""Rounds on a machine without a GPU, where only that the code runs matters."""


def layer_rows(
    bf16: PreTrainedModel, forms: dict[str, PreTrainedModel], seconds: float, most_tokens: int
) -> list[Row]:
    """Rows for 1, 2, 4 and so on tokens, of bf16 and `packed`. Exits if the error of `packed` is too large.

    The calls of a form are one for each layer, so that its weights are not in the L2; a time is that of one.
    """
    blocks = {name: [layer.mlp for layer in model.model.layers] for name, model in forms.items()}
    blocks = {"grouped_mm": [layer.mlp for layer in bf16.model.layers]} | {"packed": blocks["packed"]}
    exact = in_fp64(blocks["grouped_mm"][0].experts)
    device, rows = input_device(bf16), []
    with torch.cuda.stream(stream()) if device.type == "cuda" else nullcontext():
        for tokens in (1 << n for n in range(most_tokens.bit_length())):
            x = torch.randn(tokens, bf16.config.hidden_size, device=device).to(bf16.dtype)
            routes = [block.gate(x)[1:] for block in blocks["grouped_mm"]]
            errors = require_exact(x, routes[0], exact, *(each[0].experts for each in blocks.values()))
            calls = {
                name: [experts_call(block.experts, x, *route) for block, route in zip(each, routes, strict=True)]
                for name, each in blocks.items()
            }
            times = measured(bf16, calls, tokens, seconds)
            used = use_of([index for _, index in routes], len(exact.gate_up_proj))
            rows += rows_of(tokens, times, {"experts_in_use": round(used.experts, 1)} | errors)
    return rows


def experts_call(experts: Any, x: Tensor, weights: Tensor, index: Tensor) -> Run:
    """A call of a layer of experts on routes."""
    return lambda: experts(x, index, weights)


def measured(
    bf16: PreTrainedModel, calls: dict[str, list[Run]], tokens: int, seconds: float
) -> dict[str, list[float]]:
    """Microseconds of a call of each form, which take turns; of few tokens also of `batched_mm`."""
    runs = {name: run_of(each) for name, each in calls.items()}
    if tokens <= BATCHED_TOKENS:
        bf16.set_experts_implementation("batched_mm")
        runs["batched_mm"] = run_of(calls["grouped_mm"])
        bf16.set_experts_implementation("grouped_mm")
    count = len(calls["grouped_mm"])
    if input_device(bf16).type == "cuda":
        times = in_turns(list(runs.values()), [count] * len(runs), None, seconds)
    else:
        times = [[host_microseconds(run) / count for _ in range(HOST_ROUNDS)] for run in runs.values()]
    return dict(zip(runs, times, strict=True))


def run_of(calls: Sequence[Run]) -> Run:
    """All calls as one CUDA graph, or one after the other on a machine without a GPU."""
    return captured(calls) if torch.cuda.is_available() else lambda: [call() for call in calls]


def host_microseconds(run: Run) -> float:
    """How long a run takes, by the host's clock."""
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began)


def rows_of(tokens: int, times: dict[str, list[float]], facts: Row) -> list[Row]:
    """A row for each form, with its speed in times of the fastest bf16."""
    medians = {name: statistics.median(mine) for name, mine in times.items()}
    base = min(us for name, us in medians.items() if name != "packed")
    rows = []
    for name, mine in times.items():
        ratio = base / medians[name]
        rows.append({"tokens": tokens, "by": name, **facts, **spread(mine, "us"), "ratio": ratio})
    shown = "  ".join(f"{name} {us:9.1f} us" for name, us in medians.items())
    print(
        f"  layer, {tokens:4} tokens, {facts['experts_in_use']:5} experts: {shown}  "
        f"packed {base / medians['packed']:.3f}x, error {facts['error'] / facts['bf16_error']:.3f} of bf16's",
        flush=True,
    )
    return rows


def require_exact(x: Tensor, route: tuple[Tensor, Tensor], exact: Any, bf16: Any, packed: Any) -> Row:
    """The errors of a layer of bf16 and of packed experts against fp64; exits if that of packed is too large."""
    weights, index = route
    sample = slice(0, SAMPLE)
    expected = exact(x[sample].double(), index[sample], weights[sample].double())
    base, error = (distance(e(x, index, weights)[sample], expected) for e in (bf16, packed))
    if not error <= SCATTER * base:
        raise SystemExit(
            f"experts, {len(x)} tokens: the error of packed is {error:.2e}, that of bf16 {base:.2e}: not timed"
        )
    return {"error": error, "bf16_error": base}
