"""Decode mutated streams of every form on a GPU under compute-sanitizer: python tests/fuzz/sanitize.py

    python tests/fuzz/sanitize.py [--rounds 8] [--seed 0] [--processes 8]
    python tests/fuzz/sanitize.py --here [FORM ...]    without compute-sanitizer, in this process

Words, index and factors of coded weights are changed at random, and words are cut off. Kernels must report
such streams or decode them to something, but never access memory outside the arrays. Every array has an
allocation of its own, so that compute-sanitizer (memcheck) sees any other access. Kernels read words in
pieces of 16 bytes, so the allocation of words ends with a whole piece. One more process writes beyond an
output on purpose, to show that the tool sees it. Where compute-sanitizer is not installed or does
not know the GPU, the script says so in a line that begins with "skipped", and exits with 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from neuzip.compress.gpu import Gpu
from neuzip.compress.schemes import delta_coding
from neuzip.errors import NeuzipError
from neuzip.kernels import sparse_delta
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans.chosen import coded_items
from neuzip.kernels.rans.coded import (
    ALIGNMENT,
    COLUMN_FACTORS,
    CROSSING_ROWS,
    ON_GRID,
    PATTERNS,
    CodedTensor,
    Kind,
)
from neuzip.kernels.rans.coded_sample import coded_weights
from neuzip.kernels.rans.numbers import RUNS
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.kernels.rans.products import coded_matrices
from neuzip.kernels.rans.triton import decode as triton_decode
from neuzip.kernels.sparse_delta import BlockMap, CodedDelta
from neuzip.kernels.sparse_delta import ops as sparse_ops

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LENGTHS = (RUNS, RUNS // 16) if ON_GPU else (RUNS // 16,)
"""Runs of a tensor: a full block, and a ragged one. The interpreter has time for the ragged one."""

TOOL = "compute-sanitizer"
FOUND = 9
"""Exit code of compute-sanitizer for a program in which it found an error."""

PLANTED = "planted"
"""The name of what writes beyond an output."""

BF16 = FORMATS["BF16"]
KINDS = {
    "bf16": Kind(BF16, 7, 2, 0),
    "bf16 k=3": Kind(BF16, 3, 2, 0),
    "bf16 single": Kind(BF16, 7, 1, 0),
    "fp16": Kind(FORMATS["F16"], 10, 2, 0),
    "fp32": Kind(FORMATS["F32"], 23, 2, 0),
    "fp64": Kind(FORMATS["F64"], 52, 1, 0),
    "fp8": Kind(FORMATS["F8_E4M3"], 3, 2, 0),
    "codes": Kind(BF16, 0, 2, 0, ON_GRID),
    "codes columns": Kind(BF16, 0, 1, 0, ON_GRID | COLUMN_FACTORS),
    "codes crossing": Kind(FORMATS["F16"], 4, 1, 0, ON_GRID | COLUMN_FACTORS | CROSSING_ROWS),
    "codes low": Kind(FORMATS["F32"], 8, 2, 0, ON_GRID),
}
Form = Callable[[np.random.Generator], int]
"""Decodes a few mutated streams, and returns how many."""


def change(array: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """A copy in which about one in fifty numbers is another one, on the CPU."""
    raw = array.clone()
    at = torch.from_numpy(rng.integers(0, raw.numel(), 1 + raw.numel() // 50))
    info = torch.iinfo(raw.dtype)
    raw[at] = torch.from_numpy(rng.integers(info.min, info.max, at.numel(), endpoint=True)).to(raw.dtype)
    return raw


def in_pieces(words: torch.Tensor) -> torch.Tensor:
    """Words on the device, in an allocation of whole pieces, as CodedTensor asks for."""
    each = ALIGNMENT // words.element_size()
    memory = torch.full((-(-words.numel() // each) * each,), -1, dtype=words.dtype, device=DEVICE)
    memory[: words.numel()] = words.to(DEVICE)
    return memory[: words.numel()]


def mutated(coded: CodedTensor, rng: np.random.Generator) -> CodedTensor:
    """A coded tensor of the CPU with other streams, on the device."""
    words, index = coded.words, coded.index
    if rng.random() < 0.8:
        words = change(words, rng)
    if rng.random() < 0.4:
        index = change(index, rng)
    if rng.random() < 0.3:
        words = words[: int(rng.integers(1, words.numel() + 1))].clone()
    grid = coded.grid
    if grid is not None:
        factor_bytes = [part for part in (grid.grid.rows, grid.grid.columns) if part is not None]
        grid = grid.with_factors([change(part, rng).to(DEVICE) for part in factor_bytes])
    return replace(
        coded,
        words=in_pieces(words),
        index=index.to(DEVICE),
        planes={width: change(plane, rng).to(DEVICE) for width, plane in coded.planes.items()},
        normaliser=None if coded.normaliser is None else change(coded.normaliser, rng).to(DEVICE),
        grid=grid,
    )


def empty(coded: CodedTensor) -> torch.Tensor:
    return torch.empty(coded.numel, dtype=PATTERNS[coded.fmt.bits], device=DEVICE)


def samples(kind: Kind, block_size: int | None = None) -> list[CodedTensor]:
    """Coded tensors of a kind on the CPU, a full block and a ragged one."""
    coded = [coded_weights(kind, runs, CPU)[0] for runs in LENGTHS]
    if block_size is None:
        return coded
    return [
        replace(
            one, normaliser=torch.zeros(-(-one.numel // block_size), dtype=torch.uint8), block_size=block_size
        )
        for one in coded
    ]


def in_a_list(kind: Kind, block_size: int | None, rng: np.random.Generator) -> int:
    """Tensors of a kind that share launches."""
    tensors = [mutated(one, rng) for one in samples(kind, block_size) for _ in range(2)]
    triton_decode.decode(tensors, [empty(one) for one in tensors])
    return len(tensors)


def resident(kind: Kind, rng: np.random.Generator) -> int:
    """Tensors that stay on a GPU, decoded one by one, together, and as items of a list."""
    tensors = []
    for one in samples(kind):
        coded = replace(mutated(one, rng), words=one.words.to(DEVICE), index=one.index.to(DEVICE))
        tensor = ResidentTensor.of(coded)
        size = one.words.nbytes
        tensor.memory[:size] = change(one.words, rng).view(torch.uint8).to(DEVICE)
        tensors.append(tensor)
    outs = [torch.empty(tensor.capacity(), dtype=torch.uint8, device=DEVICE) for tensor in tensors]
    for tensor, out in zip(tensors, outs, strict=True):
        tensor.decode_into(out)
        items = coded_items([[[(tensor, 0)], [(tensor, 0)]]])
        slots = torch.empty(2 * items.slot_bytes, dtype=torch.uint8, device=DEVICE)
        items.decode(torch.tensor([1, -1, 0], dtype=torch.int32, device=DEVICE), 0, slots)
    return len(tensors)


def multiplied(rng: np.random.Generator) -> int:
    """A block that is multiplied while it is decoded."""
    (one, *_) = samples(KINDS["bf16"])
    tensor = ResidentTensor.of(
        replace(mutated(one, rng), words=one.words.to(DEVICE), index=one.index.to(DEVICE))
    )
    matrices = coded_matrices([[(tensor, 0)]], one.numel // 256, 256)
    tensor.memory[: one.words.nbytes] = change(one.words, rng).view(torch.uint8).to(DEVICE)
    x = torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    matrices.multiply(torch.zeros(1, dtype=torch.int32, device=DEVICE), x, 1)
    return 1


def delta_of_checkpoint(rng: np.random.Generator) -> int:
    """The digits of a difference from a base, of bf16 and of fp64."""
    for name in ("BF16", "F64"):
        fmt, numel = FORMATS[name], 20_000 if ON_GPU else 700
        base = rng.integers(0, 1 << 12, numel).astype(fmt.dtype)
        new = base + rng.integers(0, 3, numel).astype(fmt.dtype)
        coded = delta_coding.encode(
            lambda a, b, new=new: new[a:b],
            lambda a, b, base=base: base[a:b],
            numel,
            fmt,
            map,
            lambda *_: None,
        )
        assert coded is not None
        streams = {
            stream: np.concatenate([np.asarray(p).view(np.uint8).reshape(-1) for p in parts.parts])
            for stream, parts in coded.streams.items()
        }
        words = torch.from_numpy(streams["words"].view(np.int16).copy())
        streams["words"] = change(words, rng).numpy().view(np.uint8)
        with suppress(NeuzipError):
            delta_coding.DeltaDecoder(
                lambda stream, a, b, streams=streams: streams[stream][a:b],
                lambda stream, streams=streams: streams[stream].nbytes,
                numel, fmt, coded.cut, coded.digits, Gpu(DEVICE),
            ).read(0, numel, lambda a, b, base=base: base[a:b])  # fmt: skip
    return 2


def sparse(rng: np.random.Generator) -> int:
    """Sparse deltas, in weights of 1, 2, 4 and 8 bytes."""
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        old = [torch.from_numpy(rng.integers(0, 100, numel)).to(dtype) for numel in (5000, 3)]
        new = [torch.where(torch.from_numpy(rng.random(t.numel()) < 0.1), t + 5, t) for t in old]
        blocks, interpreted = BlockMap.of(old), sparse_ops.INTERPRET
        sparse_ops.INTERPRET = False
        coded = sparse_delta.encode(old, new, blocks)
        sparse_ops.INTERPRET = interpreted or not ON_GPU
        try:
            descriptors = change(coded.descriptors, rng) if rng.random() < 0.5 else coded.descriptors
            damaged = CodedDelta(descriptors.to(DEVICE), change(coded.words, rng).to(DEVICE))
            sparse_delta.check([t.to(DEVICE) for t in old], blocks, damaged)
        finally:
            sparse_ops.INTERPRET = interpreted
    return 4


def forms() -> dict[str, Form]:
    """All forms by name."""
    lists = {name: partial(in_a_list, kind, None) for name, kind in KINDS.items()}
    lists |= {
        "bf16 blocks": partial(in_a_list, Kind(BF16, 3, 2, 0), 64),
        "fp32 blocks": partial(in_a_list, Kind(FORMATS["F32"], 7, 2, 0), 512),
    }
    residents = {
        f"resident {name}": partial(resident, KINDS[name]) for name in ("bf16", "fp16", "codes columns")
    }
    others: dict[str, Form] = {"delta": delta_of_checkpoint, "sparse delta": sparse}
    return {**lists, **residents, **others, **({"products": multiplied} if ON_GPU else {})}


def write_beyond() -> None:
    """Decode a tensor to an output that is too small for it, which no caller can ask for."""
    coded, _ = coded_weights(KINDS["bf16"], RUNS, DEVICE)
    plan = triton_decode.prepare([coded], [empty(coded)])
    small = torch.empty(16, dtype=torch.uint8, device=DEVICE)
    replace(plan, launches=[(part, inp, small) for part, inp, _ in plan.launches]).launch()
    torch.cuda.synchronize()


def here(names: Sequence[str], rounds: int, seed: int) -> int:
    """Decode mutated streams in this process: how many."""
    if PLANTED in names:
        write_beyond()
        return 1
    streams = 0
    for name, form in forms().items():
        if not names or name in names:
            rng = np.random.default_rng([seed, *name.encode()])
            streams += sum(form(rng) for _ in range(rounds))
    if ON_GPU:
        torch.cuda.synchronize()
    return streams


def checked(tool: str, names: Sequence[str], rounds: int, seed: int) -> subprocess.CompletedProcess[str]:
    """A process that compute-sanitizer watches, with its output."""
    own = [sys.executable, str(Path(__file__).resolve()), "--here", *names]
    return subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), "--print-limit", "5",
         *own, "--rounds", str(rounds), "--seed", str(seed)],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def main() -> int:
    """Check all forms in a few processes; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", nargs="*", metavar="FORM")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    arguments = parser.parse_args()
    if arguments.here is not None:
        print(f"{here(arguments.here, arguments.rounds, arguments.seed)} mutated streams")
        return 0
    tool = shutil.which(TOOL)
    if tool is None or not ON_GPU:
        print(f"skipped: {f'{TOOL} is not installed' if tool is None else 'torch finds no GPU'}")
        return 0
    names = list(forms())
    shares = [[PLANTED], *filter(None, (names[i :: arguments.processes] for i in range(arguments.processes)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        runs = list(pool.map(lambda own: checked(tool, own, arguments.rounds, arguments.seed), shares))
    if any("Device not supported" in run.stdout for run in runs):
        print(f"skipped: {TOOL} does not support this GPU or system")
        return 0
    planted, *others = runs
    if planted.returncode != FOUND:
        print(planted.stdout, f"error: {TOOL} did not see a write beyond an array", sep="\n")
        return 1
    for own, run in zip(shares[1:], others, strict=True):
        last = [line for line in run.stdout.splitlines() if "mutated streams" in line]
        print(f"{', '.join(own)}: {last[0] if last else 'failed'}, exit code {run.returncode}")
    broken = [run for run in others if run.returncode]
    for run in broken:
        print(run.stdout)
    print(f"{len(names)} forms: {'errors' if broken else 'no error'}; the planted write was seen")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
