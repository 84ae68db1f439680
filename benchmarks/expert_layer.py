"""Microseconds of one layer of experts without its router, packed and with transformers' bf16 kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from expert_checks import ExpertsCheck, in_fp64, made_up_states, require_experts
from expert_routes import use_of
from gpu_codec import captured, stream
from packed_linear import in_turns
from record import spread
from transformers import PreTrainedModel

from neuzip.runtime.decode.benchmark import synchronize
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.hf.experts import has_single_experts

Tensor = torch.Tensor
Row = dict[str, Any]
Run = Callable[[], object]

MOST_TOKENS = {"batched_mm": 8, "ans": 32}
"""Most tokens of forms that copy or decode the weights of every expert in use."""

WHAT = "layer of experts"
"""What is measured, as rows say it."""

HOST_ROUNDS = 3
"""Rounds on a machine without a GPU, where only that the code runs matters."""


def layer_rows(
    bf16: PreTrainedModel, forms: dict[str, PreTrainedModel], seconds: float, most_tokens: int
) -> list[Row]:
    """Rows for 1, 2, 4 and so on tokens of every form that a CUDA graph can hold.

    The calls of a form are one for each layer, so that its weights are not in the L2; a time is that of one.
    Exits if the error of a form is too large.
    """
    models = {name: model for name, model in forms.items() if not has_single_experts(model)}
    blocks = {name: [layer.mlp for layer in model.model.layers] for name, model in models.items()}
    dense = [layer.mlp for layer in bf16.model.layers]
    device, rows = input_device(bf16), []
    synchronize(device)  # of what was done on another stream
    with torch.cuda.stream(stream()) if device.type == "cuda" else nullcontext():
        exact = in_fp64(dense[0].experts)
        for tokens in (1 << n for n in range(most_tokens.bit_length())):
            timed = {name: each for name, each in blocks.items() if tokens <= MOST_TOKENS.get(name, tokens)}
            checks = {
                name: require_experts(name, each[0], dense[0], exact, tokens) for name, each in timed.items()
            }
            x = made_up_states(bf16, tokens)
            routes = [block.gate(x)[1:] for block in dense]
            calls = {name: calls_of(each, x, routes) for name, each in {"grouped_mm": dense, **timed}.items()}
            times = measured(bf16, calls, tokens, seconds)
            used = use_of([index for _, index in routes], len(exact.gate_up_proj))
            rows += rows_of(tokens, times, checks, round(used.experts, 1))
    return rows


def calls_of(blocks: Sequence[Any], x: Tensor, routes: Sequence[tuple[Tensor, Tensor]]) -> list[Run]:
    """A call of the experts of each layer on its route: weights and experts [tokens, k]."""
    return [
        lambda experts=block.experts, index=index, weights=weights: experts(x, index, weights)  # type: ignore[misc]
        for block, (weights, index) in zip(blocks, routes, strict=True)
    ]


def measured(
    bf16: PreTrainedModel, calls: dict[str, list[Run]], tokens: int, seconds: float
) -> dict[str, list[float]]:
    """Microseconds of a call of each form, which take turns; of few tokens also of `batched_mm`."""
    runs = {name: run_of(each) for name, each in calls.items()}
    if tokens <= MOST_TOKENS["batched_mm"] and torch.cuda.is_available():  # the graph has what is set here
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


def rows_of(
    tokens: int, times: dict[str, list[float]], checks: dict[str, ExpertsCheck], experts_in_use: float
) -> list[Row]:
    """A row for each form, with its speed in times of the fastest bf16; prints a line."""
    medians = {name: statistics.median(mine) for name, mine in times.items()}
    base = min(us for name, us in medians.items() if name not in checks)
    line = f"  layer, {tokens:4} tokens, {experts_in_use:5} experts:"
    rows = []
    for name, mine in times.items():
        row = {"what": WHAT, "tokens": tokens, "by": name, "experts_in_use": experts_in_use}
        row |= {**spread(mine, "us"), "ratio": base / medians[name]}
        line += f"  {name} {medians[name]:9.1f} us"
        if name in checks:
            row |= {"error": checks[name].error, "bf16_error": checks[name].bf16_error}
            line += f" {row['ratio']:.3f}x"
        rows.append(row)
    print(line, flush=True)
    return rows
