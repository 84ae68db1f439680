"""`compress`, `verify` and deltas on a GPU: tensors handed to the codec in lists, alone, and on the CPU.

    python benchmarks/compress_gpu.py [--rounds 2] [--folder /dev/shm] [--gigabytes 0.5] [--jobs 16]

Checkpoints have Gaussian bf16 weights in tensors of one size: 64 Ki weights, 1.5 Mi (a matrix of an expert of
Qwen3-30B-A3B), 8 Mi and 64 Mi. `compress` verifies what it wrote, as it does by default. A delta is taken
against a checkpoint in which one weight of 20 differs by a unit of the last place. Seconds are medians of the
clock, cases take turns, and the first round warms up. The files of all cases must be the same, to the byte.

The cases `lists` and `alone` differ only in `Gpu(lists=...)`. Calls of the codec are counted, too. A run on a
GPU is saved as benchmarks/results/compress_gpu.json. `--device cpu` tries the script out in the interpreter
(TRITON_INTERPRET=1), on tensors of a few thousand weights, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_codec import write_model
from record import Environment, Measurement, save, spread

from neuzip.compress import compress, verify
from neuzip.compress.delta_job import compress_delta
from neuzip.compress.device import CPU, Device
from neuzip.compress.gpu import Gpu
from neuzip.kernels.rans.triton import decode, encode

Row = dict[str, Any]

SIZES = {"64 Ki": 1 << 16, "1.5 Mi": 768 * 2048, "8 Mi": 1 << 23, "64 Mi": 1 << 26}
"""Weights of a tensor."""

SMALL_SIZES = {"5,000": 5000}
"""Those for the interpreter."""

CHANGED = 20
"""One weight of so many differs from the base's."""


def main() -> None:
    """Time all cases of all checkpoints; print and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of a checkpoint")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    on_gpu = arguments.device != "cpu"
    environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=on_gpu, needs_commit=on_gpu)
    torch.manual_seed(0)
    rows: list[Row] = []
    for label, numel in (SIZES if on_gpu else SMALL_SIZES).items():
        count = max(2, round(arguments.gigabytes * 1e9 / 2 / numel)) if on_gpu else 3
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            of_size = measured(Path(folder), numel, count, arguments)
        for row in of_size:
            rows.append({"weights": label, "tensors": count, **row})
            show(rows[-1])
    if on_gpu:
        facts = {"rounds": arguments.rounds, "gigabytes": arguments.gigabytes, "jobs": arguments.jobs}
        print("saved", save("compress_gpu", "commands on a GPU", Measurement(environment, rows, facts)))


def show(row: Row) -> None:
    """Print a line."""
    lists = "".join(f"{row[key]:7} {key}" for key in ("encode_calls", "decode_calls"))
    print(
        f"{row['tensors']:6} tensors of {row['weights']:7}{row['command']:10}{row['by']:8}"
        f"{row['seconds']:9.3f} s{row['gb_s']:8.2f} GB/s{lists}",
        flush=True,
    )


def measured(folder: Path, numel: int, count: int, arguments: argparse.Namespace) -> list[Row]:
    """The rows of a checkpoint of `count` tensors of `numel` weights."""
    place = torch.device(arguments.device)
    plain, base = folder / "plain.safetensors", folder / "base.safetensors"
    weights = write_model(plain, {f"layers.{i}.weight": numel for i in range(count)}, place)
    changed(plain, base, numel, count)
    nbytes = sum(w.nbytes for w in weights.values())
    weights.clear()
    devices = {
        "lists": Device(str(place), Gpu(place)),
        "alone": Device(str(place), Gpu(place, lists=False)),
        "cpu": CPU,
    }
    times: dict[tuple[str, str], list[float]] = {}
    calls: dict[tuple[str, str], Counter[str]] = {}
    for turn in range(arguments.rounds + 1):
        for by, device in devices.items():
            out, delta = folder / f"{by}.nz.safetensors", folder / f"{by}.delta.safetensors"
            commands: dict[str, Callable[[], object]] = {
                "compress": partial(compress, plain, out, jobs=arguments.jobs, device=device),
                "verify": partial(verify, out, plain, jobs=arguments.jobs, device=device),
                "delta": partial(
                    compress_delta, plain, base, delta, "base", jobs=arguments.jobs, device=device
                ),
            }
            out.unlink(missing_ok=True)
            delta.unlink(missing_ok=True)
            for command, run in commands.items():
                with counted() as counts:
                    began = time.perf_counter()
                    run()
                    seconds = time.perf_counter() - began
                if turn:
                    times.setdefault((command, by), []).append(seconds)
                    calls[command, by] = counts
    for kind in ("nz", "delta"):
        for by in devices:
            if not filecmp.cmp(
                folder / f"cpu.{kind}.safetensors", folder / f"{by}.{kind}.safetensors", False
            ):
                raise SystemExit(f"{by} writes another {kind} than the CPU")
    return [
        {
            "command": command, "by": by, "bytes": nbytes, **spread(own, "seconds"),
            **spread([nbytes / s / 1e9 for s in own], "gb_s"),
            "encode_calls": calls[command, by]["encode"], "decode_calls": calls[command, by]["decode"],
        }
        for (command, by), own in times.items()
    ]  # fmt: skip


def changed(plain: Path, base: Path, numel: int, count: int) -> None:
    """Write the base of a delta: the checkpoint with other weights here and there."""
    shutil.copyfile(plain, base)
    header = plain.stat().st_size - 2 * numel * count
    memory = torch.from_file(str(base), shared=True, size=base.stat().st_size, dtype=torch.uint8)
    memory[header :: 2 * CHANGED] ^= 1


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of the codec within a `with` block; a call has the same launches for any list."""
    counts: Counter[str] = Counter()
    encode_all, prepare = encode.encode_all, decode.prepare

    def encode_counted(*arguments: Any, **options: Any) -> Any:
        counts["encode"] += 1
        return encode_all(*arguments, **options)

    def decode_counted(*arguments: Any, **options: Any) -> Any:
        counts["decode"] += 1
        return prepare(*arguments, **options)

    encode.encode_all, decode.prepare = encode_counted, decode_counted
    try:
        yield counts
    finally:
        encode.encode_all, decode.prepare = encode_all, prepare


if __name__ == "__main__":
    main()
