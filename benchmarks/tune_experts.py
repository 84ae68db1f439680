"""Measure launches of mixtures of experts on this GPU, and print entries for their table of launches.

    python benchmarks/tune_experts.py [--steps route gate sum tile decoded] [--seconds 0.05]

Every step of `kernels/experts` has candidates. All candidates of a case take turns in CUDA graphs, each of
which has several routings, so that experts come from memory. `launch_choice.choose` makes ranges of the
times. What is printed on stdout goes into kernels/tuning/smNN/experts.toml, NN the GPU's compute capability;
the best candidates of each case go to stderr.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_codec import captured, stream
from launch_choice import KernelTable, Launch, Measured, Timing, choose, table_text
from packed_linear import DEVICE, in_turns
from record import Environment
from weight_laws import LAWS, generator_on

from neuzip.kernels import tuning
from neuzip.kernels.experts import ops, steps
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.routing import TILES, Routing
from neuzip.kernels.experts.triton import launches
from neuzip.kernels.packed_linear.ops import pack
from neuzip.kernels.packed_linear.tensor import PackedTensor

Tensor = torch.Tensor
Call = Callable[[], object]

ROUTINGS = 4
"""Different routings that take turns in a graph."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

SHARE_OF_CROWD = 0.25
"""Of all pairs, those that go to one of the first eighth of the experts: routers are not fair."""


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of a layer: of the first product rows have `hidden` columns, of the second `inner`."""

    name: str
    experts: int
    inner: int
    hidden: int
    k: int


SHAPES = (
    ExpertsShape("Qwen3-30B-A3B", 128, 768, 2048, 8),
    ExpertsShape("Mixtral-8x7B", 8, 14336, 4096, 2),
    ExpertsShape("gpt-oss-20b", 32, 2880, 2880, 4),
)


@dataclass(frozen=True)
class StepTuning:
    """A step, what it can be launched with, and the variable that ranges of its table are about."""

    candidates: Sequence[Launch]
    variable: str | None
    calls: Callable[[ExpertsShape, int], tuple[float, Mapping[str, Any], list[Call]] | None]
    """For a shape and tokens the variable's value, other conditions, and calls; None for no case."""


def grid(**values: Sequence[Any]) -> list[Launch]:
    """All combinations of parameters."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def routes(shape: ExpertsShape, tokens: int) -> Iterator[Tensor]:
    """Ids of experts, of which some are wanted more often."""
    generator = generator_on(DEVICE, tokens)
    for _ in range(ROUTINGS):
        scores = torch.rand(tokens, shape.experts, generator=generator, device=DEVICE)
        scores[:, : max(1, shape.experts // 8)] += SHARE_OF_CROWD
        yield scores.topk(shape.k).indices


def hidden_states(shape: ExpertsShape, tokens: int) -> Tensor:
    return torch.randn(tokens, shape.hidden, device=DEVICE).bfloat16()


def routed(shape: ExpertsShape, tokens: int, columns: int) -> list[tuple[Routing, Tensor]]:
    """Routings, and rows of so many columns."""
    tile = ops.tile_rows(tokens * shape.k, shape.experts, torch.device(DEVICE))
    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    return [launches.route(ids, x, shape.experts, tile) for ids in routes(shape, tokens)]


def route_calls(shape: ExpertsShape, tokens: int) -> tuple[float, Mapping[str, Any], list[Call]]:
    """Routing and the copy of x; the table counts pairs."""
    tile = ops.tile_rows(tokens * shape.k, shape.experts, torch.device(DEVICE))
    x = hidden_states(shape, tokens)
    calls = [partial(launches.route, ids, x, shape.experts, tile) for ids in routes(shape, tokens)]
    return tokens * shape.k, {}, list(calls)


def gate_calls(shape: ExpertsShape, tokens: int) -> tuple[float, Mapping[str, Any], list[Call]]:
    """The activation where it is a launch of its own."""
    cases = routed(shape, tokens, 2 * shape.inner)
    return 0, {}, [partial(launches.apply_gate, rows, routing, Gate()) for routing, rows in cases]


def sum_calls(shape: ExpertsShape, tokens: int) -> tuple[float, Mapping[str, Any], list[Call]]:
    """The weighted sum."""
    shares = torch.rand(tokens, shape.k, device=DEVICE)
    cases = routed(shape, tokens, shape.hidden)
    return tokens, {}, [partial(launches.weighted_sum, rows, r.position, shares) for r, rows in cases]


_weights: dict[tuple[int, ...], PackedTensor] = {}


def weights_of(shape: ExpertsShape) -> tuple[PackedTensor, PackedTensor]:
    """Packed weights of both products, kept for one shape at a time."""
    sizes = [(shape.experts, 2 * shape.inner, shape.hidden), (shape.experts, shape.hidden, shape.inner)]
    for key in [*_weights]:
        if key not in sizes:
            del _weights[key]
    for experts, out, columns in sizes:
        if (experts, out, columns) not in _weights:
            dense = LAWS["trained-like"](experts * out, columns, generator_on(DEVICE), torch.bfloat16)
            _weights[experts, out, columns] = pack(dense)
            del dense
    first, second = (_weights[size] for size in sizes)
    return first, second


def tile_calls(shape: ExpertsShape, tokens: int) -> tuple[float, Mapping[str, Any], list[Call]]:
    """A whole layer; the table counts pairs of an expert."""
    weights, x = weights_of(shape), hidden_states(shape, tokens)
    shares = torch.rand(tokens, shape.k, device=DEVICE)
    hopper = all(steps.multiplies_on_hopper(one, shape.experts) for one in weights)
    layer = partial(ops.packed_experts, x)
    calls = [partial(layer, ids, shares, *weights, shape.experts) for ids in routes(shape, tokens)]
    return tokens * shape.k / shape.experts, {"hopper": hopper}, list(calls)


def decoded_calls(shape: ExpertsShape, tokens: int) -> tuple[float, Mapping[str, Any], list[Call]] | None:
    """The first product, where the kernels for Hopper do not take its weights."""
    weights = weights_of(shape)[0]
    if steps.multiplies_on_hopper(weights, shape.experts):
        return None
    cases = routed(shape, tokens, shape.hidden)
    return (
        tokens * shape.k / shape.experts, {},
        [partial(steps.grouped_linear, rows, weights, shape.experts, r, None) for r, rows in cases],
    )  # fmt: skip


STEPS: dict[str, StepTuning] = {
    "route": StepTuning(
        grid(
            counted=(False, True), programs=(264, 528), rows=(1, 4), columns=(512, 2048), num_warps=(1, 4)
        ),
        "pairs", route_calls,
    ),
    "gate": StepTuning(grid(block=(64, 128, 256, 512), num_warps=(1, 2, 4, 8)), None, gate_calls),
    "sum": StepTuning(grid(block=(128, 256, 512, 1024, 2048), num_warps=(1, 2, 4)), "tokens", sum_calls),
    "tile": StepTuning([{f"rows_{rows}": 0} for rows in TILES], "mean", tile_calls),
    "decoded": StepTuning(grid(pays=(False, True)), "mean", decoded_calls),
}  # fmt: skip


def main() -> None:
    """Tune the selected steps, and print their entries."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument(
        "--shapes", nargs="+", choices=[s.name for s in SHAPES], default=[s.name for s in SHAPES]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--seconds", type=float, default=0.05, help="time of a case with all candidates")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to tune")
    commit = Environment.here(needs_commit=True).commit
    measured = Measured(torch.cuda.get_device_name(), commit, datetime.date.today())
    shapes = [shape for shape in SHAPES if shape.name in arguments.shapes]
    with torch.cuda.stream(stream()), torch.no_grad():
        for name in arguments.steps:
            timings = tune(name, shapes, arguments.tokens, arguments.seconds)
            if timings:
                print(text_of(name, timings, measured), flush=True)


def tune(name: str, shapes: Sequence[ExpertsShape], tokens: Sequence[int], seconds: float) -> list[Timing]:
    """Times of all candidates of a step in all cases."""
    timings = []
    for shape, count in itertools.product(shapes, tokens):
        if case := STEPS[name].calls(shape, count):
            value, group, calls = case
            times = candidate_times(name, calls, seconds)
            timings.append(Timing(value, times, group))
            timed = sorted((time, i) for i, time in enumerate(times) if time is not None)[:3]
            best = ", ".join(f"{time:.1f} us {dict(STEPS[name].candidates[i])}" for time, i in timed)
            print(f"{name} {shape.name} {count} tokens, {value:g}: {best}", file=sys.stderr, flush=True)
    return timings


def candidate_times(name: str, calls: Sequence[Call], seconds: float) -> tuple[float | None, ...]:
    """Microseconds of a call of each candidate, which take turns; None for one that cannot be launched."""
    runs: dict[int, Call] = {}
    for number, use in enumerate(STEPS[name].candidates):
        with tuning.replaced({f"experts.{name}": [{"use": use}]}):
            try:
                runs[number] = captured(calls)
            except Exception as error:  # whatever the compiler or the driver says of too many resources
                print(f"{name} {dict(use)}: {type(error).__name__}, left out", file=sys.stderr)
    times = in_turns(list(runs.values()), [len(calls)] * len(runs), None, seconds)
    medians = dict(zip(runs, map(statistics.median, times), strict=True))
    return tuple(medians.get(number) for number in range(len(STEPS[name].candidates)))


def text_of(name: str, timings: Sequence[Timing], measured: Measured) -> str:
    """Entries as the table has them."""
    if name == "tile":
        rows = tile_entries(timings)
    else:
        rows = [entry.as_dict() for entry in choose(STEPS[name].candidates, timings, STEPS[name].variable)]
    return table_text(f"{name}, by benchmarks/tune_experts.py", measured, {name: KernelTable(rows)})


def tile_entries(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """An entry for each kind of product: tiles, ascending, with the mean up to which each is best."""
    entries = []
    for group in ({"hopper": True}, {"hopper": False}):
        alike = [replace(timing, group={}) for timing in timings if timing.group == group]
        if not alike:
            continue
        use: dict[str, float] = {}
        for entry in choose(STEPS["tile"].candidates, alike, "mean"):
            (rows,) = entry.use
            use[rows] = entry.when.get("mean", {}).get("max", 0)
        ascending = dict(sorted(use.items(), key=lambda pair: int(pair[0].removeprefix("rows_"))))
        entries.append({"use": ascending, **({"when": group} if group["hopper"] else {})})
    return entries


if __name__ == "__main__":
    main()
