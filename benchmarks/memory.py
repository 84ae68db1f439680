"""Peak memory and time of `neuzip compress` and `decompress` on a made-up sharded checkpoint.

    python benchmarks/memory.py [--gigabytes 6] [--folder /tmp]

The limit is 1.0 GB and three times the largest tensor, whatever the checkpoint's size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from record import Environment, Measurement, save

EMBEDDING = (128_256, 4096)  # Llama-3-8B's: 1.05 GB of bf16, the largest tensor
MATRIX = (14_336, 4096)
SHARD = 10  # matrices


def main() -> None:
    """Make the checkpoint, run both commands, compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        total = make_checkpoint(work / "model", arguments.gigabytes)
        largest = 2 * EMBEDDING[0] * EMBEDDING[1]
        limit = 1.0e9 + 3 * largest
        rows = [
            run("compress", work / "model", work / "small", total),
            run("decompress", work / "small", work / "back", total),
        ]
        subprocess.run(["diff", "-r", work / "model", work / "back"], check=True)
    finally:
        shutil.rmtree(work)
    for row in rows:
        row["limit_gb"] = limit / 1e9
        print(
            f"{row['command']:11}{row['seconds']:8.1f} s {row['gb_s']:6.2f} GB/s   peak "
            f"{row['peak_gb']:.2f} GB of {limit / 1e9:.2f} GB allowed"
        )
    path = save(
        "memory",
        "peak resident memory of whole commands, verification included",
        Measurement(
            Environment.here("neuzip-toolkit", "numba", "numpy"),
            rows,
            {"checkpoint_gb": total / 1e9, "largest_tensor_gb": largest / 1e9},
        ),
    )
    print(f"saved {path}")


def make_checkpoint(root: Path, gigabytes: float) -> int:
    """Write shards of Gaussian bf16 weights: one embedding, and matrices up to `gigabytes`."""
    root.mkdir()
    rng = np.random.default_rng(0)
    matrices = round((gigabytes * 1e9 - 2 * EMBEDDING[0] * EMBEDDING[1]) / (2 * MATRIX[0] * MATRIX[1]))
    shards = [{"model.embed_tokens.weight": EMBEDDING}]
    for first in range(0, matrices, SHARD):
        shards.append(
            {f"model.layers.{i}.weight": MATRIX for i in range(first, min(first + SHARD, matrices))}
        )
    total = 0
    for number, shard in enumerate(shards, 1):
        header, at = {}, 0
        for name, shape in shard.items():
            size = 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        with open(root / f"model-{number:05}-of-{len(shards):05}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for shape in shard.values():
                for _ in range(0, shape[0], 128):
                    rows = rng.standard_normal((128, shape[1]), np.float32) * np.float32(0.02)
                    file.write((rows.view(np.uint32) >> 16).astype(np.uint16).data)
        total += at
    return total


def run(command: str, src: Path, dst: Path, total: int) -> dict[str, object]:
    """Run one command in a process of its own; its time and peak resident memory."""
    script = (
        "import resource, sys; from neuzip.cli import run; code = run(sys.argv[1:]);"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, command, src, dst, "--quiet"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    peak = 1024 * int(done.stderr.split("peak")[1])
    return {"command": command, "seconds": seconds, "gb_s": total / seconds / 1e9, "peak_gb": peak / 1e9}


if __name__ == "__main__":
    main()
