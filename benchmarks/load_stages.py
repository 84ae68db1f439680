"""Where the time of `load_file` to a GPU goes: the stages of a load alone, the whole, and other loaders.

    python benchmarks/load_stages.py [--folder /dev/shm] [--rounds 7]
    python benchmarks/load_stages.py --readers 8 12 16 --chunks 2 4 8 16 --pieces 512 1024 2048

The checkpoint has the shapes of Llama 3.1 8B and Gaussian bf16 weights, and lies in the page cache. Each
stage runs the code of the loader, alone: files are opened; threads read all stored bytes into pinned memory;
they hash them as well; they also copy them to the GPU; memory is allocated for all tensors; all tensors are
decoded from streams that lie on the GPU. Times are medians of the clock, speeds are of the plain weights, and
cases take turns. A load that does not give back the original bits ends the run. `--readers`, `--chunks` (MiB)
and `--pieces` (KiB) time the whole load with other numbers than those in `runtime/readers.py`.

A run with all layers on a GPU is saved as benchmarks/results/load_stages.json. `--device cpu` tries the
script out on narrow tensors, in Triton's interpreter (TRITON_INTERPRET=1), and says nothing of speed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from gpu_codec import llama_8b, write_model
from record import Environment, Measurement, save, spread

from neuzip.compress import compress
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.kernels.rans.coded import raise_if_corrupt
from neuzip.kernels.rans.triton.decode import decode
from neuzip.runtime import load_file as loading
from neuzip.runtime import read_gpu, readers

Tensors = Mapping[str, torch.Tensor]
Row = dict[str, Any]

LAYERS = 32
MUST, STRETCH = 50.0, 70.0
"""GB/s of plain weights that the whole load must and should reach."""


def main() -> None:
    """Time stages, loads and other numbers of readers; print and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="has 27 GB free")
    parser.add_argument("--readers", type=int, nargs="+", default=[readers.READERS])
    parser.add_argument("--chunks", type=int, nargs="+", default=[readers.CHUNK >> 20], help="MiB")
    parser.add_argument("--pieces", type=int, nargs="+", default=[readers.PIECE >> 10], help="KiB")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    packages = ("neuzip-toolkit", "torch", "triton", "safetensors")
    environment = Environment.here(*packages, gpu=on_gpu, needs_commit=on_gpu and arguments.layers == LAYERS)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        plain, small = Path(folder) / "plain.safetensors", Path(folder) / "small.safetensors"
        original = write_model(plain, llama_8b(arguments.layers, narrow=not on_gpu), device)
        compress(plain, small, verify=False)
        loads = {
            "load_file": partial(load, small, device),
            "verify=False": partial(load, small, device, False),
        }
        seconds = {by: first_load(by, one, original) for by, one in loads.items()}
        del original
        rows = timed(stages(small, device) | loads | peers(plain, device), plain, arguments.rounds, device)
        for row in rows:
            if row["case"] in seconds:
                row["first_ms"] = 1e3 * seconds[row["case"]]
        numbers = product(arguments.readers, arguments.chunks, arguments.pieces)
        others = {
            f"load_file, {r} readers, chunks of {c} MiB, pieces of {p} KiB": partial(
                load_with, r, c << 20, p << 10, small, device
            )
            for r, c, p in numbers
        }
        if len(others) > 1:
            rows += timed(others, plain, arguments.rounds, device)
        nbytes = {"plain_bytes": plain.stat().st_size, "stored_bytes": small.stat().st_size}
    show(rows, measured=on_gpu and arguments.layers == LAYERS)
    if on_gpu and arguments.layers == LAYERS:
        facts = {"rounds": arguments.rounds, **nbytes}
        print(
            "saved", save("load_stages", "stages of a load to a GPU", Measurement(environment, rows, facts))
        )


def show(rows: Sequence[Row], *, measured: bool) -> None:
    """Print the table, and whether the whole load reaches its target."""
    for row in rows:
        first = f"  first {row['first_ms']:.0f} ms" if "first_ms" in row else ""
        print(f"{row['case']:66}{row['ms']:9.1f} ms{row['gb_s']:8.1f} GB/s{first}")
    speed = next(row["gb_s"] for row in rows if row["case"] == "load_file")
    verdict = "stretch met" if speed >= STRETCH else "met" if speed >= MUST else "missed"
    print(
        f"load_file: must {MUST:.0f} GB/s, stretch {STRETCH:.0f}: {verdict if measured else 'not measured'}"
    )


def stages(path: Path, device: torch.device) -> dict[str, Callable[[], object]]:
    """The stages of a load, each alone."""
    source = FolderSource(path)
    tensors = list(source.tensors())
    coded, outs = arrived(source, tensors, device)

    def decoded() -> None:
        raise_if_corrupt(decode(coded, outs), [t.name for t in tensors])

    return {
        "open": lambda: FolderSource(path).close(),
        "read": partial(read_all, source, tensors, device, hashed=False),
        "read and hash": partial(read_all, source, tensors, device, hashed=True),
        "read and copy": partial(copy_all, source, tensors, device, verify=False),
        "read, hash and copy": partial(copy_all, source, tensors, device, verify=True),
        "allocate": lambda: [torch.empty(t.info.nbytes, dtype=torch.uint8, device=device) for t in tensors],
        "decode": decoded,
    }


def peers(path: Path, device: torch.device) -> dict[str, Callable[[], object]]:
    """Other ways to the plain weights: safetensors, and a copy from memory that is pinned already."""
    pinned = torch.ones(
        min(1 << 30, path.stat().st_size), dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    target = torch.empty_like(pinned, device=device)

    def copied() -> None:
        left = path.stat().st_size
        while left:
            part = min(left, pinned.numel())
            target[:part].copy_(pinned[:part], non_blocking=True)
            left -= part

    return {
        "safetensors load_file": partial(safetensors.torch.load_file, path, device=str(device)),
        "copy of the plain weights from pinned memory": copied,
    }


def load(path: Path, device: torch.device, verify: bool = True) -> Tensors:
    """What `load_file` does on a GPU; on a CPU by the same code and not by the CPU's decoder."""
    with loading.safe_open(path, "pt", device, verify=verify) as file:
        if device.type == "cuda":
            return dict(file.get_tensors())
        source = file._opened.source
        tensors = list(source.tensors())
        values = read_gpu.read_on(device, source, tensors, verify=verify)
        return {t.name: value for t, value in zip(tensors, values, strict=True)}


def load_with(count: int, chunk: int, piece: int, path: Path, device: torch.device) -> Tensors:
    """A load with other numbers of readers and bytes."""
    before = readers.READERS, readers.CHUNK, readers.PIECE
    readers.READERS, readers.CHUNK, readers.PIECE = count, chunk, piece
    try:
        return load(path, device)
    finally:
        readers.READERS, readers.CHUNK, readers.PIECE = before


def first_load(by: str, one: Callable[[], Tensors], original: Tensors) -> float:
    """The seconds of a first load. Ends the run if it does not give back the original bits."""
    began = time.perf_counter()
    loaded = one()
    seconds = time.perf_counter() - began
    same = loaded.keys() == original.keys() and all(
        torch.equal(loaded[name].view(torch.int16), original[name]) for name in original
    )
    if not same:
        raise SystemExit(f"{by} does not give back the original bits: not timed")
    return seconds


def arrived(
    source: FolderSource, tensors: Sequence[SourceTensor], device: torch.device
) -> tuple[list[Any], list[torch.Tensor]]:
    """All tensors, coded, with their streams on the device, and memory for their values."""
    coded, outs = [], []
    for tensor in tensors:
        coding = source.coding(tensor)
        if coding is None:
            raise SystemExit(f"{tensor.name} is not coded")
        streams = {}
        for extent in source.extents(tensor):
            stream = torch.empty(extent.nbytes, dtype=torch.uint8)
            source.read_into(tensor.file, extent.start, stream.numpy())
            streams[extent.stream or ""] = stream.to(device)
        coded.append(read_gpu.coded_tensor(coding, tensor.info.numel, streams))
        outs.append(torch.empty(tensor.info.numel, dtype=torch.int16, device=device))
    return coded, outs


def read_all(
    source: FolderSource, tensors: Sequence[SourceTensor], device: torch.device, *, hashed: bool
) -> None:
    """Read all stored bytes as the readers do, and send them nowhere."""
    extents = sorted(
        ((tensor.file, extent) for tensor in tensors for extent in source.extents(tensor)),
        key=lambda item: -item[1].nbytes,
    )
    count = min(readers.READERS, readers.default_jobs())
    chunks = [
        torch.empty(readers.CHUNK, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(count)
    ]

    def read(item: tuple[str, Any]) -> None:
        file, extent = item
        chunk = chunks.pop()
        array, running = chunk.numpy(), xxhash.xxh3_64()
        for at in range(extent.start, extent.stop, readers.PIECE):
            place = (at - extent.start) % readers.CHUNK  # a multiple of PIECE, which divides CHUNK
            piece = array[place : place + min(readers.PIECE, extent.stop - at)]
            source.read_into(file, at, piece)
            if hashed:
                running.update(piece.data)
        chunks.append(chunk)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(read, extents))


def copy_all(
    source: FolderSource, tensors: Sequence[SourceTensor], device: torch.device, *, verify: bool
) -> None:
    """Read all stored bytes and copy them to the same memory of the device, with the loader's readers."""
    extents = [(tensor, extent) for tensor in tensors for extent in source.extents(tensor)]
    memory = torch.empty(max(e.nbytes for _, e in extents), dtype=torch.uint8, device=device)
    queues = readers.DeviceQueues(device)
    pool = readers.Readers(source, queues, sum(e.nbytes for _, e in extents), verify=verify)
    try:
        jobs = readers.jobs_for(0, [readers.Arrival(tensor, extent, memory, 0) for tensor, extent in extents])
        pool.start(jobs)
        for _ in jobs:
            pool.wait_for_one()
    finally:
        pool.close()
        queues.wait()


def timed(
    cases: Mapping[str, Callable[[], object]], plain: Path, rounds: int, device: torch.device
) -> list[Row]:
    """A row for each case. Memory of the GPU is given back before each call."""
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, run in cases.items():
            settle(device, give_back=True)
            began = time.perf_counter()
            result = run()
            settle(device)
            times[case].append(1e3 * (time.perf_counter() - began))
            del result
    nbytes = plain.stat().st_size
    return [
        {"case": case, **spread(of_case, "ms"), **spread([nbytes / ms / 1e6 for ms in of_case], "gb_s")}
        for case, of_case in times.items()
    ]


def settle(device: torch.device, *, give_back: bool = False) -> None:
    """Wait for the GPU, and give back memory that torch keeps."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if give_back:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
