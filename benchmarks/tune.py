"""Measure launches of products with packed weights on this GPU, and write its table of launches.

    python benchmarks/tune.py [--quick] [--kernels one_row_warps many_rows] [--out FILE] [--overwrite]

The table is kernels/tuning/smNN/packed_linear.toml, NN the GPU's compute capability, or FILE. It is written
after every kernel: what is not measured yet, or not selected, has the entries that this GPU uses now.

Every kernel has a list of candidates (KERNELS). Each candidate is timed in CUDA graphs, with weights rotated
past the L2, on all shapes and both laws of weights; all candidates of a case take turns. A candidate that
cannot be launched, for instance for want of registers, is named and left out. One whose product is wrong ends
the run. `launch_choice.choose` makes ranges of the times. Kernels are tuned in the order of KERNELS, each
with the launches that were chosen for those before it. `many_rows_time`, a model of times that plans are made
with, has no candidates: it keeps its entries.

--quick takes four shapes, weights that look trained, and less time for a case.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compile_first import processes, run_side_by_side
from gpu_codec import captured, stream
from launch_choice import Entry, KernelTable, Launch, Measured, Timing, choose, table_text
from packed_groups import SHAPES, Shape
from packed_linear import DEVICE, in_turns, name_of, require_exact, rotated, rounded
from record import Environment
from weight_laws import LAWS, generator_on

from neuzip.kernels import tuning
from neuzip.kernels.device.properties import is_hopper, multiprocessors
from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.form import TURN
from neuzip.kernels.packed_linear.gluon import linear as gluon_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor, format_of
from neuzip.kernels.packed_linear.triton import linear as triton_linear
from neuzip.kernels.packed_linear.triton import pack as triton_pack

Tensor = torch.Tensor

OPERATOR = "packed_linear"
TITLE = "Products with packed weights (kernels/packed_linear), tuned by benchmarks/tune.py."
QUICK_SHAPES: tuple[Shape, ...] = ((4096, 4096), (14336, 4096), (4096, 14336), (2560, 2560))
SECONDS, QUICK_SECONDS = 0.2, 0.05
"""Time of a case with all candidates."""


@dataclass(frozen=True)
class Case:
    """A product, or packing, to be timed: weights of a shape and law that use `kept` mantissa bits."""

    shape: Shape
    law: str
    rows: int
    kept: int = 7
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Kernel:
    """A kernel of the table, its candidates, and where its variables come from.

    `place` gives the conditions that the cases of a group have in common, and the value of `variable`.
    `call` runs the kernel and gives its product, or None if there is none to be checked. `graph` says that
    calls can lie in a CUDA graph, `by_shape` that every shape has its own compiled kernel. `comment`
    stands above the entries.
    """

    name: str
    candidates: Sequence[Launch]
    variable: str | None
    rows: Sequence[int]
    place: Callable[[Case, PackedTensor], tuple[Mapping[str, Any], float]]
    call: Callable[[Tensor, Tensor, PackedTensor], Tensor | None]
    comment: str
    forms: Sequence[tuple[int, torch.dtype]] = ((7, torch.bfloat16),)
    hopper: bool = False
    graph: bool = True
    by_shape: bool = True

    def is_usable(self, table: Mapping[str, object], device: torch.device) -> bool:
        """Whether a GPU has the kernel, and its table says so."""
        return self.name in table and (is_hopper(device) or not self.hopper)


def grid(**values: Sequence[Any]) -> list[Launch]:
    """All combinations of the values of parameters."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def by_planes(packed: PackedTensor, most: int) -> Mapping[str, Any]:
    """The condition of weights with so few planes; none for those with more."""
    return {"planes": {"max": most}} if packed.words.shape[1] <= most else {}


def tiles_a_processor(packed: PackedTensor) -> float:
    """Tiles of 16 rows of the weights for each multiprocessor."""
    return packed.words.shape[0] / multiprocessors(packed.device)


def warps_a_processor(packed: PackedTensor) -> float:
    """Warps of a multiprocessor in a product of one row, by the launch that is in force."""
    tiles, planes, lanes = packed.words.shape[:3]
    return tiles_a_processor(packed) * triton_linear.one_row_launch(tiles, planes, lanes, packed.device).warps


def tile_of(case: Case, packed: PackedTensor) -> float:
    """Rows of x that a program of the kernel for many rows has at once, by the plan that is in force."""
    out, columns = packed.shape
    return float(gluon_linear.plan(case.rows, out, columns // TURN, packed.device).tile)


def by_rows(case: Case) -> Mapping[str, Any]:
    """The condition of so few rows, filled up to 16, 32 or 64; none for more."""
    return next(({"rows": {"max": most}} for most in (16, 32, 64) if case.rows <= most), {})


def by_triton(x: Tensor, weight: Tensor, packed: PackedTensor) -> Tensor:
    """A product of few rows."""
    return triton_linear.linear(x, packed)


def by_gluon(x: Tensor, weight: Tensor, packed: PackedTensor) -> Tensor:
    """A product by the kernel for Hopper."""
    return gluon_linear.linear(x, packed)


def by_operator(x: Tensor, weight: Tensor, packed: PackedTensor) -> Tensor:
    """A product by the kernel that the table chooses."""
    return torch_ops.linear(x, packed)


def count(x: Tensor, weight: Tensor, packed: PackedTensor) -> None:
    """What packing counts first."""
    triton_pack._census(weight.view(torch.int16), format_of(weight.dtype))


BF16, ROUNDED, FP16 = (7, torch.bfloat16), (3, torch.bfloat16), (7, torch.float16)

KERNELS = (
    Kernel(
        "one_row_warps", grid(warps=(2, 4, 8, 16)), "tiles", (1,),
        lambda case, packed: (by_planes(packed, 7), tiles_a_processor(packed)), by_triton,
        "One row of x: warps that share a tile of 16 rows. tiles: of a multiprocessor.\n"
        "planes: 7 are bf16 with 3 mantissa bits, 11 all of bf16.",
        forms=(ROUNDED, BF16),
    ),
    Kernel(
        "one_row", grid(ahead=(1, 2), unrolled=(1, 2), registers=(72, 96, 128)), "warps", (1,),
        lambda case, packed: (by_planes(packed, 7), warps_a_processor(packed)), by_triton,
        "warps: of a multiprocessor. ahead: turns by which words are prefetched.",
        forms=(ROUNDED, BF16),
    ),
    Kernel(
        "some_rows", grid(programs=(2, 3, 4, 5)), "rows", (16, 32, 64),
        lambda case, packed: ({}, case.rows), by_triton,
        "2 to 64 rows of x, filled up to 16, 32 or 64: programs of a multiprocessor.",
    ),
    Kernel(
        "many_rows",
        grid(x_stages=(4, 6), word_stages=(2, 4, 6), first_stages=(1, 2), registers=(240,)),
        "tile", (16, 32, 64, 128, 256, 1024),
        lambda case, packed: (by_planes(packed, 11), tile_of(case, packed)), by_gluon,
        "Many rows, on Hopper: blocks of 64 columns of x and turns of words in shared memory,\n"
        "turns of words that are loaded before the first is used, registers of a thread.",
        forms=(BF16, FP16), hopper=True, by_shape=False,
    ),
    Kernel(
        "many_rows_pay", grid(pay=(False, True)), "weights", (2, 8, 16, 24, 32, 48, 64, 128, 1024),
        lambda case, packed: (by_rows(case), case.shape[0] * case.shape[1]), by_operator,
        "2 or more rows, on Hopper: whether the kernel for many rows takes them. weights: out times in.",
        hopper=True, by_shape=False,
    ),
    Kernel(
        "census", grid(programs=(4, 8, 16), tile=(2048, 4096, 8192), num_warps=(4, 8)), None, (1,),
        lambda case, packed: ({}, 0), count,
        "Packing: programs of a multiprocessor, weights that a program counts at a time.",
        graph=False, by_shape=False,
    ),
)  # fmt: skip
"""Kernels in the order in which they are tuned. One that the table in use lacks is left out."""


def main() -> None:
    """Tune the selected kernels, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [kernel.name for kernel in KERNELS]
    parser.add_argument("--kernels", nargs="+", choices=names, default=names)
    parser.add_argument("--shapes", nargs="+", choices=list(map(name_of, SHAPES)), metavar="OUTxIN")
    parser.add_argument("--laws", nargs="+", choices=LAWS)
    parser.add_argument("--quick", action="store_true", help="four shapes, one law, less time for a case")
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default the place in kernels/tuning")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument(
        "--compile-part",
        nargs=2,
        type=int,
        metavar=("PART", "PARTS"),
        help="compile a part, and measure nothing",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to tune")
    usual = QUICK_SHAPES if arguments.quick else SHAPES
    shapes = [s for s in SHAPES if (name_of(s) in arguments.shapes if arguments.shapes else s in usual)]
    laws = arguments.laws or (["trained-like"] if arguments.quick else list(LAWS))
    device = torch.device(DEVICE, 0)
    table = entries_in_use(device)
    kernels = [kernel for kernel in KERNELS if kernel.name in arguments.kernels]
    usable = [kernel for kernel in kernels if kernel.is_usable(table, device)]
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    with torch.cuda.stream(stream()):
        if arguments.compile_part:
            compile_part(usable, shapes, *arguments.compile_part)
            return
        out = arguments.out or own_file(device)
        if out.exists() and not arguments.overwrite:
            parser.error(f"{out} exists: name another file with --out, or add --overwrite")
        for kernel in kernels:
            if kernel not in usable:
                print(f"{kernel.name}: left out, as this GPU has no such kernel", file=sys.stderr)
        commit = Environment.here(needs_commit=True).commit
        measured = Measured(torch.cuda.get_device_name(device), commit, datetime.date.today())
        options = ["--kernels", *(kernel.name for kernel in usable), "--shapes", *map(name_of, shapes)]
        parts = processes()
        run_side_by_side(
            __file__, [[*options, "--compile-part", str(part), str(parts)] for part in range(parts)]
        )
        tune(usable, table, shapes, laws, seconds, measured, out)


def tune(
    kernels: Sequence[Kernel], table: dict[str, KernelTable], shapes: Sequence[Shape], laws: Sequence[str],
    seconds: float, measured: Measured, out: Path,
) -> None:  # fmt: skip
    """Put what is measured into a table, kernel by kernel, and write the table after each."""
    for kernel in kernels:
        with in_force({name: kernel.entries for name, kernel in table.items()}):
            entries = choose(kernel.candidates, timings(kernel, shapes, laws, seconds), kernel.variable)
        table[kernel.name] = KernelTable([entry.as_dict() for entry in entries], kernel.comment)
        show(kernel, entries)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(table_text(TITLE, measured, table), encoding="utf-8")
    tuning.read.cache_clear()
    tuning.read(out)  # raises ValueError for what is no table
    print(f"wrote {out}; run .venv/bin/pytest -m gpu tests/kernels, and benchmarks/packed_linear.py")


def own_file(device: torch.device) -> Path:
    """Where the table of a GPU belongs."""
    return tuning.FOLDER / f"sm{tuning.architecture_of(device)}" / f"{OPERATOR}.toml"


def entries_in_use(device: torch.device) -> dict[str, KernelTable]:
    """The table that a GPU has now, perhaps that of another: each entry says where it was measured."""
    with open(tuning.source(OPERATOR, device).path, "rb") as file:
        kernels: dict[str, Any] = tuning.tomllib.load(file)
    measured = kernels.pop("measured")
    comments = {kernel.name: kernel.comment for kernel in KERNELS}
    return {
        name: KernelTable([{"measured": measured, **entry} for entry in entries], comments.get(name, ""))
        for name, entries in kernels.items()
    }


def compile_part(kernels: Sequence[Kernel], shapes: Sequence[Shape], part: int, parts: int) -> None:
    """Launch every candidate of this part once in every case, so that Triton's cache has it."""
    jobs = [
        (shape, form, kernel, use)
        for kernel in kernels
        for shape in (shapes if kernel.by_shape else shapes[:1])
        for form in kernel.forms
        for use in kernel.candidates
    ]
    for (kept, dtype), shape in {(job[1], job[0]): None for job in jobs}:
        weight = LAWS["trained-like"](*shape, generator_on(DEVICE), dtype)
        weight = rounded(weight) if kept < 7 else weight
        packed = torch_ops.pack(weight)
        for number, (of_shape, form, kernel, use) in enumerate(jobs):
            if number % parts != part or (of_shape, form) != (shape, (kept, dtype)):
                continue
            for rows in kernel.rows:
                x = torch.zeros(rows, shape[1], dtype=dtype, device=DEVICE)
                with in_force({kernel.name: [{"use": use}]}), suppress(Exception):
                    kernel.call(x, weight, replace(packed))  # what fails is named when it is measured


def timings(kernel: Kernel, shapes: Sequence[Shape], laws: Sequence[str], seconds: float) -> list[Timing]:
    """Times of all candidates of a kernel in all cases."""
    results = []
    for shape, law, (kept, dtype) in itertools.product(shapes, laws, kernel.forms):
        weights, packed = rotated(shape, law, dtype)
        if kept < 7:
            weights = [rounded(weight) for weight in weights]
            packed = [torch_ops.pack(weight) for weight in weights]
        if kernel.hopper and not packed[0].turn_index.numel():
            continue
        for rows in kernel.rows:
            case = Case(shape, law, rows, kept, dtype)
            group, value = kernel.place(case, packed[0])
            times = candidate_times(kernel, case, weights, packed, seconds)
            results.append(Timing(value, times, group))
            print(line_of(kernel, case, value, times), flush=True)
        torch.cuda.empty_cache()
    return results


def candidate_times(
    kernel: Kernel, case: Case, weights: Sequence[Tensor], packed: Sequence[PackedTensor], seconds: float
) -> tuple[float | None, ...]:
    """Microseconds of a call of each candidate, which take turns; None for one that cannot be launched."""
    x = torch.randn(case.rows, case.shape[1], device=DEVICE).to(case.dtype)
    runs: dict[int, Callable[[], object]] = {}
    for number, use in enumerate(kernel.candidates):
        fresh = [replace(one) for one in packed]  # without what a launch has cached
        calls = [partial(kernel.call, x, weight, one) for weight, one in zip(weights, fresh, strict=True)]
        with in_force({kernel.name: [{"use": use}]}):
            try:
                product = calls[0]()
            except Exception as error:  # whatever the compiler or the driver says of too many resources
                print(f"{kernel.name} {dict(use)}: {type(error).__name__}, left out", file=sys.stderr)
                continue
            if product is not None:
                require_exact(x, weights[0], packed[0], lambda x, _, product=product: product)  # type: ignore[misc]
            runs[number] = captured(calls) if kernel.graph else partial(all_under, kernel.name, use, calls)
    if not runs:
        return (None,) * len(kernel.candidates)
    times = in_turns(list(runs.values()), [len(packed)] * len(runs), None, seconds)
    medians = dict(zip(runs, map(statistics.median, times), strict=True))
    return tuple(medians.get(number) for number in range(len(kernel.candidates)))


def all_under(name: str, use: Launch, calls: Sequence[Callable[[], object]]) -> None:
    """Make calls with a launch in force."""
    with in_force({name: [{"use": use}]}):
        for call in calls:
            call()


@contextmanager
def in_force(entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[None]:
    """Context in which kernels have these entries; what the operator's modules have cached is cleared."""
    try:
        with tuning.replaced({f"{OPERATOR}.{name}": kernel for name, kernel in entries.items()}):
            forget()
            yield
    finally:
        forget()


def forget() -> None:
    """Clear the caches of functions of the operator's modules, some of which hold launches."""
    prefix = triton_linear.__name__.rpartition(".triton.")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix):
            for value in vars(module).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def line_of(kernel: Kernel, case: Case, value: float, times: Sequence[float | None]) -> str:
    """What was measured, in a line: the best candidate first."""
    timed = [(time, i) for i, time in enumerate(times) if time is not None]
    best = ", ".join(f"{time:.1f} us {dict(kernel.candidates[i])}" for time, i in sorted(timed)[:2])
    return (
        f"{kernel.name:15} {name_of(case.shape):12} {case.law:13} k = {case.kept} {case.rows:5} rows  "
        f"{kernel.variable or ''} {value:g}: {best}"
    )


def show(kernel: Kernel, entries: Sequence[Entry]) -> None:
    """Print what was chosen."""
    for entry in entries:
        print(f"{kernel.name}: {dict(entry.use)} when {dict(entry.when)}", flush=True)


if __name__ == "__main__":
    main()
