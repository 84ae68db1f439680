"""Products with packed codes of quantized weights beside cuBLAS with the same weights in bf16, on one GPU.

    python benchmarks/grid_linear.py [--shapes 4096x4096 14336x4096] [--rows 1 4 16 64] [--laws trained-like]
        [--grids step rows both] [--bits 4] [--seconds 0.2] [--launches]

Each side is what a user calls: `neuzip.kernels.grid_linear.ops.linear`, escapes included, and torch's
`linear`. The calls of a case lie in one CUDA graph, each with weights of its own, so many that nothing is
found in the L2. Both sides take turns; times are medians of CUDA events, with their 20th and 80th percentile.

Weights are N(0, 0.02), or look like those of a trained model: see weight_laws.py. They are rounded to a grid
whose codes have an entropy of --bits: with one step, with row factors (the square root of the spread of a
row), or with row and column factors. Both sides multiply with these. "packed bits" are what a weight takes in
memory, everything included.

What does not decode to the rounded weights bit for bit, or whose product is further from fp64 than that of
cuBLAS by more than 5 %, is not timed: it ends the run. See packed_linear.py.

Kernels are compiled side by side first. With --launches, candidate launches of the kernels stand beside the
one of the table, cuBLAS is left out, and what is saved are their times.

Results are saved in the end, those that were selected. The limit is the bytes read at the speed of a device
copy, which is measured in the same run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from compile_first import processes, run_side_by_side
from gpu_codec import L2, captured, copy_speed, stream
from packed_groups import LAW_NAMES, SHAPES, Shape
from packed_linear import DEVICE, SECONDS, in_turns, name_of, require_exact, verdict
from record import Environment, Measurement, save_sections, spread
from weight_laws import LAWS, generator_on

from neuzip.kernels.grid import Grid, factor_bytes
from neuzip.kernels.grid_linear import GridTensor, ops, pack
from neuzip.kernels.grid_linear.triton.linear import linear
from neuzip.kernels.grid_linear.triton.one_row import GridRowLaunch
from neuzip.kernels.grid_linear.triton.some_rows import GridRowsLaunch

Tensor = torch.Tensor
Row = dict[str, Any]

WHAT = __doc__.splitlines()[0]

ROWS = (1, 4, 16, 64)

AIMS = {1: (2.0, 2.8), 16: (1.6, 2.2), 64: (1.1, 1.4)}
"""Times cuBLAS by rows of x: what it must be, and what would be better still."""

MEMORY_AIM = (0.34, 0.31)
"""The share of bf16 that 4-bit codes may take, and what would be better still."""

GRIDS = {"step": (False, False), "rows": (True, False), "both": (True, True)}
"""Kinds of grids: whether rows, and whether columns have factors."""

Launch = GridRowLaunch | GridRowsLaunch | None

ONE_ROW = [
    GridRowLaunch(*of)
    for of in (
        (8, 2, 112), (8, 1, 80), (4, 3, 168), (4, 3, 128), (4, 2, 112), (4, 2, 96), (4, 1, 80), (4, 1, 72),
        (2, 4, 168), (2, 3, 168), (2, 3, 128), (2, 2, 112), (2, 2, 96), (2, 1, 80), (1, 3, 168), (1, 2, 112),
    )
]  # fmt: skip
"""Candidates for one row."""

SOME_ROWS = {
    16: [
        GridRowsLaunch(*of)
        for of in (
            (8, 1, 3), (8, 2, 1), (8, 2, 2), (8, 3, 1), (4, 2, 3), (4, 3, 2), (4, 3, 3), (4, 4, 1), (4, 4, 2),
            (4, 5, 1), (4, 6, 1),
        )
    ],
    64: [
        GridRowsLaunch(*of)
        for of in ((8, 1, 1), (8, 1, 2), (8, 2, 1), (4, 2, 1), (4, 2, 2), (4, 3, 1), (4, 3, 2), (4, 4, 1))
    ],
}  # fmt: skip
"""Candidates for up to 16, and up to 64 rows."""

SAMPLE = 1 << 20
"""Weights whose codes decide the step, at most."""


def main() -> None:
    """Measure, print the table, save it."""
    parser = argparse.ArgumentParser(description=WHAT)
    names = [name_of(shape) for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names[:7], metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--bits", type=float, default=4.0, help="entropy of the codes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a case")
    parser.add_argument("--launches", action="store_true", help="compare candidate launches")
    parser.add_argument(
        "--compile-part", nargs=2, type=int, metavar=("PART", "PARTS"), help="compile a part, measure nothing"
    )
    arguments = parser.parse_args()
    if arguments.compile_part:
        compile_part(arguments)
        return
    packages = ("neuzip-toolkit", "torch", "triton")
    environment = Environment.here(*packages, gpu=torch.cuda.is_available(), needs_commit=True)
    results: list[Row] = []
    parts = processes()
    run_side_by_side(__file__, [[*sys.argv[1:], "--compile-part", str(p), str(parts)] for p in range(parts)])
    with torch.cuda.stream(stream()):
        copy = copy_speed()
        print(f"device copy {copy:.0f} GB/s read and written", flush=True)
        torch.cuda.empty_cache()
        for shape in (shape for shape in SHAPES if name_of(shape) in arguments.shapes):
            for law in arguments.laws:
                for kind in arguments.grids:
                    results += of_case(shape, law, kind, arguments)
                    torch.cuda.empty_cache()
    if not arguments.launches:
        summarize(results)
    section = "launches" if arguments.launches else "products"
    facts = {"seconds_a_case": arguments.seconds, "device_copy_gb_s": copy}
    path = save_sections("grid_linear", WHAT, {section: Measurement(environment, results, facts)})
    print(f"saved {path}")


def of_case(shape: Shape, law: str, kind: str, arguments: argparse.Namespace) -> list[Row]:
    """Products with weights of one shape, law and kind of grid, for all numbers of rows."""
    count = max(2, math.ceil(8 * L2 / (shape[0] * shape[1])))
    generator = generator_on(DEVICE)
    weights, packed = [], []
    for _ in range(count):
        weight, entropy, grid = on_grid(LAWS[law](*shape, generator, torch.bfloat16), kind, arguments.bits)
        weights.append(weight)
        packed.append(checked(weight, grid))
    facts = {
        "out": shape[0], "in": shape[1], "law": law, "grid": kind, "entropy": entropy,
        "width": packed[0].width, "bits": packed[0].bits_per_weight,
        "escapes": packed[0].escapes.numel() / weights[0].numel(),
    }  # fmt: skip
    rows = []
    for number in arguments.rows:
        if arguments.launches:
            for row in launch_times(weights[0], packed, number, arguments.seconds):
                rows.append({**facts, **row})
                show_launch(rows[-1])
        else:
            rows.append({**facts, **product(weights, packed, number, arguments.seconds)})
            show(rows[-1])
    return rows


def launches_of(rows: int) -> Sequence[Launch]:
    """The launch of the table, None, and candidates."""
    return (None, *(ONE_ROW if rows == 1 else SOME_ROWS[16 if rows <= 16 else 64]))


def multiplied(x: Tensor, packed: GridTensor, launch: Launch) -> Tensor:
    """The product from the packed form by a launch."""
    one, some = (launch, None) if isinstance(launch, GridRowLaunch) else (None, launch)
    return linear(x, packed, None, one, some)


def launch_times(weight: Tensor, packed: Sequence[GridTensor], rows: int, seconds: float) -> list[Row]:
    """Times of all launches of a product, which take turns; without those that a GPU cannot launch."""
    x = torch.randn(rows, weight.shape[1], device=DEVICE).bfloat16()
    runs, launches = [], []
    for launch in launches_of(rows):
        try:
            require_exact(x, weight, packed[0], lambda x, p, launch=launch: multiplied(x, p, launch))  # type: ignore[misc]
            runs.append(captured([lambda p=p, launch=launch: multiplied(x, p, launch) for p in packed]))  # type: ignore[misc]
        except Exception as error:  # whatever the compiler or the driver says of too many resources
            print(f"{launch}: {type(error).__name__}, left out", flush=True)
            continue
        launches.append(launch)
    times = in_turns(runs, [len(packed)] * len(runs), None, seconds)
    return [
        {"rows": rows, "launch": None if launch is None else launch._asdict(), **spread(own, "us")}
        for launch, own in zip(launches, times, strict=True)
    ]


def show_launch(row: Row) -> None:
    """Print the time of a launch."""
    values = (
        "of the table" if row["launch"] is None else " ".join(f"{k} {v}" for k, v in row["launch"].items())
    )
    print(
        f"{row['out']:6} x {row['in']:6}  {row['grid']:5} "
        f"{row['rows']:3} rows of x {row['us']:8.1f} us  {values}",
        flush=True,
    )


def compile_part(arguments: argparse.Namespace) -> None:
    """Compile a part of the products, for codes of 5 bits and weights without values, into Triton's cache."""
    part, parts = arguments.compile_part
    has_columns = [GRIDS[kind][1] for kind in arguments.grids]
    jobs = [
        (shape, columns, rows, launch)
        for shape in SHAPES
        if name_of(shape) in arguments.shapes
        for columns in sorted(set(has_columns))
        for rows in arguments.rows
        for launch in (launches_of(rows) if arguments.launches else (None,))
    ]
    for (out, inputs), columns, rows, launch in jobs[part::parts]:
        packed = GridTensor.without_values(out, inputs, torch.bfloat16, 5, columns)
        x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
        with suppress(Exception):  # what fails is named when it is measured
            multiplied(x, packed, launch)


def on_grid(weight: Tensor, kind: str, bits: float) -> tuple[Tensor, float, Grid]:
    """Weights rounded to a grid whose codes have an entropy of so many bits; the entropy, and the grid."""
    rms = weight.float().square().mean().sqrt()
    has_rows, has_columns = GRIDS[kind]

    def factors(dim: int) -> Tensor:
        return factor_bytes((weight.float().square().mean(dim).sqrt() / rms).sqrt())

    rows, columns = factors(1) if has_rows else None, factors(0) if has_columns else None
    few = slice(0, max(1, SAMPLE // weight.shape[1]))
    low, high = 1e-3, 10.0
    for _ in range(24):
        middle = math.sqrt(low * high)
        grid = Grid(middle * float(rms), None if rows is None else rows[few], columns)
        low, high = (middle, high) if entropy_of(grid.codes(weight[few])) > bits else (low, middle)
    grid = Grid(low * float(rms), rows, columns)
    codes = grid.codes(weight)
    return grid.values(codes, weight.dtype), entropy_of(codes), grid


def entropy_of(codes: Tensor) -> float:
    """Bits of a code."""
    share = torch.bincount(codes.flatten().int() - int(codes.min())).double() / codes.numel()
    return float(-(share * share.clamp_min(1e-300).log2()).sum())


def checked(weight: Tensor, grid: Grid) -> GridTensor:
    """Pack, and exit unless the weights come back bit for bit."""
    packed = pack(weight, grid)
    out = torch.full_like(weight, torch.nan)
    ops.decode(packed, out=out)
    if not torch.equal(out.view(torch.int16), weight.view(torch.int16)):
        raise SystemExit("packed codes do not decode to the rounded weights: not timed")
    return packed


def product(weights: Sequence[Tensor], packed: Sequence[GridTensor], rows: int, seconds: float) -> Row:
    """Times and errors of both sides with so many rows of x."""
    x = torch.randn(rows, weights[0].shape[1], device=DEVICE).bfloat16()
    error, plain = require_exact(x, weights[0], packed[0], ops.linear)
    runs = [
        captured([lambda p=p: ops.linear(x, p) for p in packed]),  # type: ignore[misc]
        captured([lambda w=w: F.linear(x, w) for w in weights]),  # type: ignore[misc]
    ]
    ours, theirs = in_turns(runs, [len(packed), len(weights)], None, seconds)
    row = {f"cublas_{key}": us for key, us in spread(theirs, "us").items()}
    row |= {f"packed_{key}": us for key, us in spread(ours, "us").items()}
    must, stretch = AIMS.get(rows, (None, None))
    gb_s = packed[0].nbytes / row["packed_us"] / 1e3
    return {
        "rows": rows, "must": must, "stretch": stretch, **row,
        "speedup": row["cublas_us"] / row["packed_us"], "error": error, "cublas_error": plain,
        "gb_s_read": gb_s, "share": gb_s / copy_speed(),
    }  # fmt: skip


def show(row: Row) -> None:
    """Print a line of the table."""
    must = "" if row["must"] is None else f"(must {row['must']}, {verdict(row['speedup'] >= row['must'])})"
    print(
        f"{row['out']:6} x {row['in']:6}  {LAW_NAMES[row['law']]:12}  {row['grid']:5} "
        f"{row['bits']:.2f} packed bits ({row['width']}, {100 * row['escapes']:.3f} % escapes)  "
        f"{row['rows']:3} rows of x {row['cublas_us']:8.1f} us cuBLAS {row['packed_us']:8.1f} us packed  "
        f"{row['speedup']:.2f} {must}  {100 * row['share']:.0f} % of a copy's speed",
        flush=True,
    )


def summarize(results: Sequence[Row]) -> None:
    """Print the least and the mean speed of each number of rows against its targets, and the memory."""
    for number, (must, stretch) in AIMS.items():
        speeds = [row["speedup"] for row in results if row["rows"] == number]
        if speeds:
            mean = sum(speeds) / len(speeds)
            print(
                f"{number:3} rows of x: least {min(speeds):.2f}, mean {mean:.2f}, must {must}: "
                f"{verdict(mean >= must)}, stretch {stretch}: {verdict(mean >= stretch)}"
            )
    shares = [row["bits"] / 16 for row in results]
    must, stretch = MEMORY_AIM
    print(
        f"memory: at most {max(shares):.3f} of bf16, must {must}: {verdict(max(shares) <= must)}, "
        f"stretch {stretch}: {verdict(max(shares) <= stretch)}"
    )


if __name__ == "__main__":
    main()
