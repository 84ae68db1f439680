"""Measure what the check of a GPU at its first use costs: decoding, packing and the first product.

    python benchmarks/first_use.py [--rounds 7]

Each round is a process of its own per setting, with Triton's cache filled. Writes
benchmarks/results/first_use.json. Aim: the check adds at most 0.1 s to a load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from record import Environment, Measurement, save

TARGET = 0.1
"""Seconds that the check may add."""

PROGRAM = """
import time
import torch
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.packed_linear import ops
from neuzip.kernels.rans.coded import Kind
from neuzip.kernels.rans.coded_sample import coded_weights
from neuzip.kernels.rans.triton.decode import decode

place = torch.device("cuda", 0)
tensor, bits = coded_weights(Kind(FORMATS["BF16"], 7, 2, 0), 64, place)
out = torch.empty(bits.size, dtype=torch.int16, device=place)
weight = (torch.randn(4096, 4096, device=place) * 0.02).bfloat16()
torch.cuda.synchronize()
began = time.perf_counter()
decode([tensor], [out])
ops.linear(weight[:1], ops.pack(weight))
torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds_with("1")  # fills the caches
    samples: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(rounds):
        for setting in samples:  # in turns, so that both meet the same load
            samples[setting].append(seconds_with(setting))
    medians = {setting: statistics.median(values) for setting, values in samples.items()}
    added = medians["1"] - medians["0"]
    verdict = "met" if added <= TARGET else "MISSED"
    print(f"first use without the check {medians['0']:.4f} s, with it {medians['1']:.4f} s")
    print(f"added {added:.4f} s, target {TARGET} s: {verdict}")
    facts = {"seconds_without": samples["0"], "seconds_with": samples["1"], "added_seconds": added}
    what = "seconds of the first decoding, packing and product of a process"
    print(
        save(
            "first_use",
            what,
            Measurement(Environment.here("numpy", "torch", "triton", gpu=True), facts=facts),
        )
    )


def seconds_with(setting: str) -> float:
    """Seconds of a first use in a new process, with NEUZIP_GPU_CHECK set."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env={**os.environ, "NEUZIP_GPU_CHECK": setting}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return float(ran.stdout)


if __name__ == "__main__":
    main()
