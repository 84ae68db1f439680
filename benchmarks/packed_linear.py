"""Products with packed weights beside cuBLAS with the same weights in bf16, on one GPU.

    python benchmarks/packed_linear.py [--sections products bits] [--shapes 4096x4096 5120x13824]
        [--rows 1 8 64] [--laws gaussian trained-like] [--seconds 0.2]

Each side is what a user calls: `neuzip.kernels.packed_linear.ops.linear`, escapes included, and torch's
`linear`. The calls of a case lie in one CUDA graph, each with weights of its own, so many that nothing is
found in the L2. Both sides take turns; times are medians of CUDA events, with their
20th and 80th percentile. A case takes about --seconds.

Weights are N(0, 0.02), or look like those of a trained model: see weight_laws.py. `k = 3` has its mantissas
rounded to 3 bits beforehand; both sides then multiply with these.

What does not decode to the original weights bit for bit, or whose product is further from fp64 than that of
cuBLAS by more than 5 % (the scatter of sums in another order), is not timed: it ends the run. The error is
that of a sample of the columns of the result. Of all columns, our result and that of cuBLAS may differ by no
more than both errors together.

Results are saved after every shape. Only the selected cases are measured; the others stay as they are in the
file if they were measured on a card of this name. Kernels are compiled first, in a process for each shape.

The limit is the bytes read, 2 for bf16, at the speed of a device copy, which is measured in the same run.
The bits of wikilm-26m are those of all its matrices together; they need the folder that NEUZIP_DATA names.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compile_first import run_side_by_side
from gpu_codec import L2, captured, copy_speed, milliseconds, stream
from packed_groups import LAW_NAMES, ROWS, SHAPES, Shape, group_figures, group_of
from record import Environment, Measurement, read, save_sections, spread
from weight_laws import LAWS, gaussian, generator_on

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.runtime.read import read_tensor

Tensor = torch.Tensor
Row = dict[str, Any]
Multiply = Callable[[Tensor, PackedTensor], Tensor]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHAT = __doc__.splitlines()[0]

ROUNDED_AIM = (1.6, 2.0)
"""One row of x, 3 mantissa bits: times cuBLAS, and what would be better still."""

BITS_AIMS = {"gaussian": (11.5, 11.3), "trained-like": (0.76 * 16, None), "wikilm-26m": (11.5, 11.3)}
"""Bits a weight at most, and what would be better still."""

SCATTER = 1.05
"""How many times the error of cuBLAS ours may be."""

SAMPLE_COLUMNS, SAMPLE_RESULTS = 256, 1 << 16
"""Columns of a result, and results, whose error is measured: at least, or all that there are."""

SECONDS = 0.2
"""Time of a case, if not given."""

LEAST_ROUNDS, MOST_ROUNDS = 5, 40


def main() -> None:
    """Measure, print the tables, save them: each section takes its own place in the file."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("--sections", nargs="+", choices=["products", "bits"], default=["products", "bits"])
    names = [name_of(shape) for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS))
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a case")
    parser.add_argument("--compile-only", action="store_true", help="compile, and measure nothing")
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if name_of(shape) in arguments.shapes]
    if arguments.compile_only:
        compile_kernels(shapes, arguments.rows)
        return
    packages = ("neuzip-toolkit", "torch", "triton")
    environment = Environment.here(*packages, gpu=torch.cuda.is_available(), needs_commit=True)
    if "bits" in arguments.sections:
        save_sections("packed_linear", WHAT, {"bits": Measurement(environment, bits(arguments.laws))})
    if "products" in arguments.sections:
        rows = list(map(str, arguments.rows))
        run_side_by_side(
            __file__, [["--compile-only", "--shapes", n, "--rows", *rows] for n in arguments.shapes]
        )
        products(shapes, arguments, environment)


def name_of(shape: Shape) -> str:
    """A shape as --shapes takes it."""
    return f"{shape[0]}x{shape[1]}"


def products(shapes: Sequence[Shape], arguments: argparse.Namespace, environment: Environment) -> None:
    """The selected cases, saved after every shape and law; then the figures of groups of rows."""
    results: list[Row] = []
    with torch.cuda.stream(stream()):
        copy = copy_speed()
        print(f"device copy {copy:.0f} GB/s read and written", flush=True)
        torch.cuda.empty_cache()
        for shape in shapes:
            for law in arguments.laws:
                for row in of_shape(shape, law, arguments.rows, arguments.seconds):
                    results.append({**row, "commit": environment.commit})
                    show(row)
                torch.cuda.empty_cache()
                facts = {"seconds_a_case": arguments.seconds, "device_copy_gb_s": copy}
                measurement = Measurement(environment, completed(results, environment), facts)
                path = save_sections("packed_linear", WHAT, {"products": measurement})
    show_groups(measurement.results)
    print(f"saved {path}")


def completed(results: Sequence[Row], environment: Environment) -> list[Row]:
    """These results and those of the file for other cases, if a card of this name made them, in order."""
    before = read("packed_linear")["products"]
    rows = [*(before.results if card_of(before.environment) == card_of(environment) else []), *results]
    by_case = {case_of(row): row for row in rows}
    cases = [
        (shape, law, *case)
        for shape in SHAPES for law in LAWS for case in (*((rows, 7) for rows in ROWS), (1, 3))
    ]  # fmt: skip
    return [by_case[case] for case in cases if case in by_case]


def card_of(environment: Environment) -> str:
    """The name of the GPU."""
    return "" if environment.gpu is None else environment.gpu.name


def case_of(row: Row) -> tuple[object, ...]:
    """What was multiplied: the shape, the law of the weights, rows of x, mantissa bits."""
    return (row["out"], row["in"]), row["law"], row["rows"], row["kept"]


def of_shape(shape: Shape, law: str, rows: Sequence[int], seconds: float) -> list[Row]:
    """Products with weights of one shape and law: all numbers of rows, and one row with 3 mantissa bits."""
    weights, packed = rotated(shape, law)
    facts = {"out": shape[0], "in": shape[1], "law": law}
    results = []
    for number in rows:
        group = group_of(number)
        aim = {"must": group.least, "stretch": group.stretch}
        results.append(
            {**facts, "rows": number, "kept": 7, **aim, **product(weights, packed, number, seconds)}
        )
    if 1 in rows:
        weights = [rounded(weight) for weight in weights]
        packed = [pack(weight) for weight in weights]
        aim = {"must": ROUNDED_AIM[0], "stretch": ROUNDED_AIM[1]}
        results.append({**facts, "rows": 1, "kept": 3, **aim, **product(weights, packed, 1, seconds)})
    return results


def rotated(
    shape: Shape, law: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], list[PackedTensor]]:
    """Different weights of one shape, dense and packed, so many that nothing of the first stays in the L2."""
    count = max(2, -(-4 * L2 // (shape[0] * shape[1])))
    generator = generator_on(DEVICE)
    weights = [LAWS[law](*shape, generator, dtype) for _ in range(count)]
    return weights, [pack(weight) for weight in weights]


def compile_kernels(shapes: Sequence[Shape], rows: Sequence[int]) -> None:
    """Launch everything that is measured once, so that Triton's cache has the kernels."""
    for shape in shapes:
        weight = gaussian(*shape, generator_on(DEVICE))
        for kept, one in ((7, weight), (3, rounded(weight))):
            packed = pack(one)
            for number in rows if kept == 7 else (1,):
                torch_ops.linear(torch.zeros(number, shape[1], dtype=torch.bfloat16, device=DEVICE), packed)
    torch.cuda.synchronize()


def show(row: Row) -> None:
    """Print a line of the table."""
    print(
        f"{row['out']:6} x {row['in']:6}  {LAW_NAMES[row['law']]:12}  k = {row['kept']}  "
        f"{row['rows']:5} rows of x {row['cublas_us']:9.1f} us cuBLAS {row['packed_us']:9.1f} us packed  "
        f"{row['speedup']:.2f} (must {row['must']}, {verdict(row['speedup'] >= row['must'])})  "
        f"error {row['error'] / row['cublas_error']:.3f} of cuBLAS's",
        flush=True,
    )


def show_groups(results: Sequence[Row]) -> None:
    """Print the figures of every group of rows against its targets."""
    print(f"\n{'rows':14}{'weights':14}{'least':>7}{'must':>6}  {'':7}{'mean':>6}{'must':>6}{'stretch':>8}")
    for figures in group_figures(results):
        group = figures.group
        incomplete = f"  {figures.missing} cases not measured" if figures.missing else ""
        print(
            f"{group.name:14}{LAW_NAMES[figures.law]:14}{figures.least:7.2f}{group.least:6.2f}  "
            f"{verdict(figures.least_met):7}{figures.mean:6.2f}{group.mean:6.2f}{group.stretch:8.2f}  "
            f"{verdict(figures.mean_met):7}{'stretch reached' if figures.stretched else '':16}"
            f"least: {figures.least_case}{incomplete}"
        )


def verdict(met: bool) -> str:
    """In a word."""
    return "met" if met else "MISSED"


def rounded(weight: Tensor) -> Tensor:
    """Weights with 3 mantissa bits, the others cut off: how they are rounded does not matter here."""
    return (weight.view(torch.int16) & -16).view(torch.bfloat16)


def pack(weight: Tensor) -> PackedTensor:
    """Pack, and exit unless the weights come back bit for bit."""
    packed = torch_ops.pack(weight)
    out = torch.full_like(weight, torch.nan)
    torch_ops.decode(packed, out=out)
    if not torch.equal(out.view(torch.int16), weight.view(torch.int16)):
        raise SystemExit("packed weights do not decode to the original ones: not timed")
    return packed


def product(weights: Sequence[Tensor], packed: Sequence[PackedTensor], rows: int, seconds: float) -> Row:
    """Times and errors of both sides with so many rows of x."""
    x = torch.randn(rows, weights[0].shape[1], device=DEVICE).bfloat16()
    error, plain = require_exact(x, weights[0], packed[0])
    runs = [
        captured([lambda p=p: torch_ops.linear(x, p) for p in packed]),  # type: ignore[misc]
        captured([lambda w=w: F.linear(x, w) for w in weights]),  # type: ignore[misc]
    ]
    ours, theirs = in_turns(runs, [len(packed), len(weights)], None, seconds)
    row = {f"cublas_{key}": us for key, us in spread(theirs, "us").items()}
    row |= {f"packed_{key}": us for key, us in spread(ours, "us").items()}
    gb_s = packed[0].nbytes / row["packed_us"] / 1e3
    return {
        **row, "speedup": row["cublas_us"] / row["packed_us"], "error": error, "cublas_error": plain,
        "bits": packed[0].bits_per_weight, "gb_s_read": gb_s, "share": gb_s / copy_speed(),
    }  # fmt: skip


def require_exact(
    x: Tensor, weight: Tensor, packed: PackedTensor, multiply: Multiply = torch_ops.linear
) -> tuple[float, float]:
    """The errors of our product and of cuBLAS's against fp64; exits if ours is too large."""
    out, columns = weight.shape
    ours, theirs = multiply(x, packed), F.linear(x, weight)
    count = min(out, max(SAMPLE_COLUMNS, SAMPLE_RESULTS // len(x)))
    sample = torch.randperm(out, generator=generator_on(DEVICE), device=DEVICE)[:count]
    exact = x.double() @ weight[sample].double().T
    error, plain = distance(ours[:, sample], exact), distance(theirs[:, sample], exact)
    apart = distance(ours, theirs)
    if not (error <= SCATTER * plain and apart <= (1 + SCATTER) * plain):
        raise SystemExit(
            f"{out} x {columns}, {len(x)} rows: error {error:.2e}, that of cuBLAS {plain:.2e}; "
            f"they differ by {apart:.2e}: not timed"
        )
    return error, plain


def distance(result: Tensor, exact: Tensor) -> float:
    """The relative error in the 2-norm: in the precision of `exact`, in fp32 at least."""
    exact = exact if exact.dtype == torch.float64 else exact.float()
    return float((result.to(exact.dtype) - exact).norm() / exact.norm())


def times(
    sides: Sequence[Sequence[Callable[[], object]]], rounds: int | None = None, seconds: float = SECONDS
) -> list[float]:
    """Median microseconds of a call of each side: so many rounds, or as many as take `seconds`."""
    runs = [captured(calls) for calls in sides]
    measured = in_turns(runs, [len(calls) for calls in sides], rounds, seconds)
    return [statistics.median(mine) for mine in measured]


def in_turns(
    runs: Sequence[Callable[[], object]], calls: Sequence[int], rounds: int | None, seconds: float
) -> list[list[float]]:
    """Microseconds of a call of each run, which has so many, in every round; runs take turns."""
    if rounds is None:
        once = 2 * sum(milliseconds(run, warm=True) for run in runs)  # a warm run is two
        rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(1e3 * seconds / once)))
    measured: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, number, mine in zip(runs, calls, measured, strict=True):
            mine.append(1e3 * milliseconds(run, warm=True) / number)
    return measured


def bits(laws: Sequence[str]) -> list[Row]:
    """Bits a weight in memory, everything included: the same on a CPU."""
    rows: list[Row] = [
        {"weights": f"{LAW_NAMES[law]}, {out} x {columns}", "law": law,
         "bits": pack(LAWS[law](out, columns, generator_on(DEVICE), torch.bfloat16)).bits_per_weight}
        for law in laws
        for out, columns in SHAPES[:2]
    ]  # fmt: skip
    if "NEUZIP_DATA" in os.environ:
        held = [pack(matrix) for matrix in matrices(Path(os.environ["NEUZIP_DATA"]) / "wikilm-26m")]
        nbytes, numel = sum(p.nbytes for p in held), sum(p.shape[0] * p.shape[1] for p in held)
        rows.append({"weights": "wikilm-26m", "law": "wikilm-26m", "bits": 8 * nbytes / numel})
    for row in rows:
        row["must"], row["stretch"] = BITS_AIMS[row["law"]]
        print(f"{row['weights']:30}{row['bits']:8.4f} bits a weight  {verdict(row['bits'] <= row['must'])}")
    return rows


def matrices(folder: Path) -> list[Tensor]:
    """The bf16 matrices of a checkpoint."""
    with FolderSource(folder) as source, Workers() as workers:
        return [
            read_tensor(source, tensor, workers).to(DEVICE)
            for tensor in source.tensors()
            if tensor.info.dtype == "BF16" and len(tensor.info.shape) == 2
        ]


if __name__ == "__main__":
    main()
