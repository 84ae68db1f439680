"""Quantized weights decoded on one GPU: codes to values of bf16, fp16 and fp32, beside the decoder of floats.

    python benchmarks/quantized_decode.py [--rounds 50] [--registers 40 48 56]

Codes are those of a normal distribution that is divided by a step, coded as in a file: one by one or in
pairs, perhaps with low bits raw. Times are medians of CUDA events. Cases
take turns. The launches of a case lie in one CUDA graph, each with data of its own, so much of it that
nothing is found in the L2. Speeds are of the output. What does not give the values that torch computes on
the CPU, whether its outputs held 0x00 or 0xFF before, is not timed: it ends the run.

The limit is the bytes read and written at the speed of a device copy, measured in the same run. "through the
first-level cache" is the kernel that decodes without shared memory, as ragged blocks are decoded.

`--registers` measures other numbers of registers a thread too, and saves nothing. Otherwise the result is
benchmarks/results/quantized_decode.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpu_codec import (
    LARGE,
    SMALL,
    Case,
    Decoder,
    Row,
    Tensor,
    copy_speed,
    decoding,
    encode,
    gaussian,
    measure,
    moving,
    prepared,
    sets,
    show,
    stream,
)
from record import Environment, Measurement, save

from neuzip.compress.schemes.code_tables import choose_coding
from neuzip.compress.schemes.quantized_coding import count, grid_bytes
from neuzip.kernels import rans
from neuzip.kernels.dtypes import torch_dtypes
from neuzip.kernels.float_fields import FORMATS, pack_low_bits
from neuzip.kernels.grid import Grid
from neuzip.kernels.rans.coded import PATTERNS, CodedGrid, CodedTensor
from neuzip.kernels.rans.triton import decode as triton_decode
from neuzip.kernels.rans.triton import stream_codes

COLUMNS = 4096
NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True)
class Weights:
    """Weights to be coded: how many, the standard deviation of their codes, their factors and their dtype."""

    numel: int
    deviation: float
    rows: bool = False
    columns: bool = False
    dtype: str = "BF16"

    @property
    def name(self) -> str:
        """The case in words, without its bits, which only coding tells."""
        count = "235 M" if self.numel == LARGE else "16 Mi"
        factors = " and ".join(["row"] * self.rows + ["column"] * self.columns)
        factors = f", {factors} factors" if factors else ""
        return f"quantized to {NAMES[self.dtype]}, {count} weights, deviation {self.deviation:g}{factors}"


@dataclass(frozen=True)
class Coded:
    """A coded tensor, the bit patterns that it stands for, and its bytes in a container."""

    tensor: CodedTensor
    values: Tensor
    nbytes: int


def main() -> None:
    """Measure all cases, print the table, save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--registers", type=int, nargs="+", help="of a thread: nothing is saved then")
    arguments = parser.parse_args()
    packages = ("neuzip-toolkit", "torch", "triton")
    environment = Environment.here(*packages, gpu=True, needs_commit=not arguments.registers)
    torch.manual_seed(0)
    rows: list[Row] = []
    with torch.cuda.stream(stream()):
        for weights in (*all_weights(), None):
            cases = floats() if weights is None else cases_of(code(weights), weights, arguments.registers)
            rows += measure(cases, arguments.rounds)
            del cases
            torch.cuda.empty_cache()
        speed = copy_speed()
    show(rows)
    print(f"\ndevice copy {speed:.0f} GB/s read and written")
    missed = [row["row"] for row in rows if row["gb_s"] < row.get("must_gb_s", 0)]
    print("".join(f"missed: {name}\n" for name in missed), end="")
    if arguments.registers:
        print("not saved: other registers were measured")
        return
    what = "quantized weights decoded on one GPU; GB/s of the output, medians"
    facts = {"rounds": arguments.rounds, "device_copy_gb_s": speed}
    print(f"saved {save('quantized_decode', what, Measurement(environment, rows, facts))}")


def all_weights() -> Iterator[Weights]:
    """What is measured: 4 bits a weight first, which have a target."""
    yield Weights(LARGE, 4.0)
    yield Weights(LARGE, 4.0, rows=True)
    yield Weights(LARGE, 4.0, rows=True, columns=True)
    for deviation in (0.6, 1.0, 2.0, 8.0, 16.0, 60.0):  # about 1.4, 2, 3, 5, 6 and 8 bits
        yield Weights(LARGE, deviation, rows=True)
    yield Weights(SMALL, 4.0, rows=True)
    yield Weights(LARGE, 4.0, rows=True, dtype="F16")
    yield Weights(LARGE, 4.0, rows=True, dtype="F32")


def code(weights: Weights) -> Coded:
    """Code 16 Mi weights on the CPU, and repeat them on the GPU. Exits where CPU and GPU differ in values."""
    rng = np.random.default_rng(0)
    codes = np.rint(rng.standard_normal(SMALL, np.float32) * weights.deviation).astype(np.int16)
    bits = max(2, int(max(codes.max(), -1 - codes.min())).bit_length() + 1)
    u = (codes.astype(np.int32) + (1 << (bits - 1))).astype(np.uint8 if bits <= 8 else np.uint16)
    how = choose_coding(count(u, bits), weights.numel)
    low, table = how.low_bits, how.stored.table
    encoded = rans.encode((u >> low).astype(np.uint8 if bits - low <= 8 else np.uint16), table)
    times = weights.numel // SMALL
    planes = {low: torch.from_numpy(pack_low_bits(u, low)).cuda().repeat(times)} if low else {}
    index, words = (
        torch.from_numpy(array.view(np.int16)).cuda().repeat(times)
        for array in (encoded.index, encoded.words)
    )
    words = torch.nn.functional.pad(words, (0, -words.numel() % 8))
    shape = weights.numel // COLUMNS, COLUMNS
    factors = [
        torch.randint(116, 140, (n,), dtype=torch.uint8) if has else None
        for n, has in zip(shape, (weights.rows, weights.columns), strict=True)
    ]
    on_cpu = Grid(0.005, *factors)
    grid = on_cpu.to("cuda")
    dtype = torch_dtypes()[weights.dtype]
    values = grid.values(torch.from_numpy(codes).cuda().repeat(times).view(shape), dtype).flatten()
    patterns = PATTERNS[FORMATS[weights.dtype].bits]
    here = on_cpu.values_between(torch.from_numpy(codes), 0, shape, dtype)
    if not torch.equal(values[:SMALL].cpu().view(patterns), here.view(patterns)):
        raise SystemExit(f"{weights.name}: torch computes other values on the GPU than on the CPU: not timed")
    tensor = CodedTensor(
        FORMATS[weights.dtype], low, weights.numel, table, index, words, planes,
        grid=CodedGrid(grid, COLUMNS, bits - low),
    )  # fmt: skip
    of_grid = grid_bytes(on_cpu, how.stored).nbytes
    nbytes = index.nbytes + words.nbytes + sum(plane.nbytes for plane in planes.values()) + of_grid
    return Coded(tensor, values.view(patterns), nbytes)


def cases_of(coded: Coded, weights: Weights, registers: Sequence[int] | None) -> list[Case]:
    """The decoder on data of its own for each launch, and what it is compared with."""
    plain = coded.values.nbytes
    facts: Row = {
        "bits": 8 * coded.nbytes / weights.numel,
        "group": coded.tensor.table.group,
        "low_bits": coded.tensor.kept_bits,
        **moving(plain, read=coded.nbytes, written=plain),
    }
    aims: Row = {}
    if (weights.numel, weights.deviation, weights.dtype) == (LARGE, 4.0, "BF16") and not weights.columns:
        aims = {"must_gb_s": 1300, "stretch_gb_s": 1900}
    name = f"{weights.name}, {facts['bits']:.2f} bits"
    count = sets(plain)
    if registers:
        return [
            decoding(name, f"neuzip, {number} registers", decoders(coded, count, registers=number), facts)
            for number in registers
        ]
    return [
        decoding(name, "neuzip", decoders(coded, count), {**facts, **aims}),
        decoding(name, "neuzip, through the first-level cache", decoders(coded, count, warps=4), facts),
    ]


def decoders(
    coded: Coded, count: int, warps: int | None = None, registers: int | None = None
) -> list[Decoder]:
    """Launches that are ready, each with inputs and outputs of its own."""
    if registers is not None:
        stream_codes.REGISTERS = stream_codes.COLUMN_REGISTERS = registers
        triton_decode._options.cache_clear()
    ready = []
    for _ in range(count):
        tensor = CodedTensor(
            coded.tensor.fmt, coded.tensor.kept_bits, coded.tensor.numel, coded.tensor.table,
            coded.tensor.index.clone(), coded.tensor.words.clone(),
            {width: plane.clone() for width, plane in coded.tensor.planes.items()}, grid=coded.tensor.grid,
        )  # fmt: skip
        out = torch.empty_like(coded.values)
        plan = triton_decode.prepare([tensor], [out], warps)
        launch = partial(launch_with, plan, registers)
        ready.append(Decoder(launch, [out], [coded.values], coded.nbytes, inputs=[tensor]))
    return ready


def launch_with(plan: triton_decode.DecodePlan, registers: int | None) -> None:
    """Launch a plan, compiled for a number of registers."""
    if registers is not None and registers != stream_codes.REGISTERS:
        stream_codes.REGISTERS = stream_codes.COLUMN_REGISTERS = registers
        triton_decode._options.cache_clear()
    plan.launch()


def floats() -> list[Case]:
    """The decoder of lossless bf16 in the same run."""
    weights = [gaussian(LARGE) for _ in range(sets(3 * LARGE))]
    ours = [prepared([encode(bits)], [bits]) for bits in weights]
    limit = moving(2 * LARGE, read=ours[0].nbytes, written=2 * LARGE)
    return [decoding("bf16 decode, lossless, 235 M weights", "neuzip", ours, limit)]


if __name__ == "__main__":
    main()
