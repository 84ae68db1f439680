"""Error feedback on a GPU: the kernel beside the plain form in torch, and the launches that it may have.

    python benchmarks/error_feedback.py [--rounds 5]

Matrices have the shapes of SmolLM2-135M and of Llama-3-8B, and inputs that go together. The codes of the
kernel have to be those of the plain form on the same GPU, for each launch; otherwise nothing is timed. Times
are those of the host around the whole of a matrix, medians. Writes benchmarks/results/error_feedback.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from record import Environment, Measurement, save
from torch import Tensor

from neuzip.kernels import tuning
from neuzip.kernels.grid import Grid
from neuzip.kernels.quantizers import ErrorSpread
from neuzip.kernels.quantizers.grid_feedback import codes_by_column, codes_of_all_rows

SHAPES = [(192, 576), (576, 1536), (1536, 576), (49152, 576), (4096, 4096), (14336, 4096)]
"""Rows and columns."""

LAUNCHES = [(2, 1), (4, 1), (8, 1), (16, 1), (16, 2), (32, 4)]
"""Rows of a program, and its warps."""

GRID = Grid(0.3)


def main() -> None:
    """Check, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = [measured(rows, columns, options.rounds) for rows, columns in SHAPES]
    environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=True)
    facts = {"rounds": options.rounds, "own_launch": dict(own_launch())}
    what = "milliseconds of error feedback of a matrix on a GPU"
    print(save("error_feedback", what, Measurement(environment, results, facts)))


def own_launch() -> dict[str, int]:
    """The launch that the table has for this GPU."""
    return dict(tuning.launch_for("quantizers.feedback", torch.device("cuda", 0)))


def measured(rows: int, columns: int, rounds: int) -> dict[str, object]:
    """Times of one shape; SystemExit for codes that differ."""
    rng = torch.Generator("cuda").manual_seed(columns)
    mixed = torch.randn(columns, columns, generator=rng, device="cuda")
    x = torch.randn(4 * columns, columns, generator=rng, device="cuda") @ mixed
    errors = ErrorSpread.of(x.T @ x)
    weight = torch.randn(rows, columns, generator=rng, device="cuda")

    def torch_codes() -> Tensor:
        return codes_by_column(weight, GRID, errors, torch.bfloat16)

    def kernel_codes() -> Tensor:
        return codes_of_all_rows(weight, GRID, errors, torch.bfloat16)

    expected = torch_codes()
    result: dict[str, object] = {"rows": rows, "columns": columns, "torch_ms": milliseconds(torch_codes, 1)}
    for of_program, warps in LAUNCHES:
        table = [{"use": {"rows": of_program, "num_warps": warps}}]
        with tuning.replaced({"quantizers.feedback": table}):
            if not torch.equal(kernel_codes(), expected):
                sys.exit(f"{rows} x {columns}, {of_program} rows, {warps} warps: the codes are not torch's")
            result[f"rows_{of_program}_warps_{warps}_ms"] = milliseconds(kernel_codes, rounds)
    print(result, flush=True)
    return result


def milliseconds(function: Callable[[], Tensor], rounds: int) -> float:
    """Median milliseconds of the host until the GPU is done."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times), 3)


if __name__ == "__main__":
    main()
