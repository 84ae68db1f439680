"""Quantized tensors on the CPU: bits a weight beside the entropy of their codes, and rates of coding.

    python benchmarks/quantized_codec.py [--threads 2] [--rounds 5] [--weights 33554432]

Weights are Gaussian bf16; a case is a step, as a share of their standard deviation, alone or with factors of
rows and columns. `encode` rounds to nearest, compares with the original and codes; `prepared` is given the
codes. What is decoded has to be what the grid says of the codes; otherwise nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from record import Environment, Measurement, save

from neuzip.compress.pieces import pieces
from neuzip.compress.scheme import Scheme
from neuzip.compress.schemes import codec_for
from neuzip.compress.schemes.codec import StoredTensor, TensorInput
from neuzip.compress.schemes.quantized_coding import QuantizedDecoder
from neuzip.compress.workers import Workers
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels.float_fields import FORMATS

SIGMA, COLUMNS = 0.02, 1024
SHARES = (0.0625, 0.125, 0.25, 0.5)
"""Steps divided by the standard deviation of the weights."""


def main() -> None:
    """Measure all cases, print the table, save the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", type=int, default=1 << 25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the pieces of a tensor are what the threads share
    rows = max(1, arguments.weights // COLUMNS)
    weight = (torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0)) * SIGMA).bfloat16()
    results = []
    with Workers(arguments.threads) as workers:
        for share in SHARES:
            for has_factors in (False, True):
                scheme = Scheme(
                    "quantized", step=share * SIGMA, row_factors=has_factors, column_factors=has_factors
                )
                results.append(measure(weight, scheme, workers, arguments.rounds) | {"step_sigma": share})
                print(results[-1])
    what = "quantized bf16 on a CPU, in memory; millions of weights a second, medians"
    environment = Environment.here("neuzip-toolkit", "numba", "numpy", "torch")
    path = save("quantized_codec", what, Measurement(environment, results, vars(arguments)))
    print(f"saved {path}")


def measure(weight: torch.Tensor, scheme: Scheme, workers: Workers, rounds: int) -> dict[str, object]:
    """Bits and rates of one scheme."""
    data = weight.view(torch.uint8).numpy().reshape(-1)
    info = TensorInfo("w", "BF16", tuple(weight.shape), 0, data.size)
    tensor = TensorInput(info, lambda start, stop: data[start:stop], workers.map)
    codec = codec_for(scheme)
    encoded = codec.encode(tensor, scheme)
    streams = {
        name: np.concatenate([p.view(np.uint8) for p in s.parts]) for name, s in encoded.streams.items()
    }
    record = encoded.record

    def decoder() -> QuantizedDecoder:
        stored = StoredTensor(
            info, record, lambda name, a, b: streams[name][a:b], lambda name: streams[name].size,
            tensor.read_bytes, lambda: tensor.read_bytes, lambda: tensor.read_bytes,
        )  # fmt: skip
        result = codec.decoder(stored)
        assert isinstance(result, QuantizedDecoder)
        return result

    restored = np.empty(info.numel, FORMATS["BF16"].dtype)

    def decode() -> None:
        read = decoder().read
        for (start, stop), part in zip(
            pieces(info.numel), workers.map(lambda piece: read(*piece), pieces(info.numel)), strict=True
        ):
            restored[start:stop] = part

    decode()
    codes, grid = decoder().codes(0, info.numel), decoder().grid
    expected = grid.values(torch.from_numpy(codes).view(weight.shape), weight.dtype)
    if not np.array_equal(expected.view(torch.int16).numpy().reshape(-1), restored.view(np.int16)):
        raise SystemExit(f"{scheme} does not decode to its values: not timed")
    prepared = TensorInput(info, tensor.read_bytes, workers.map, prepared=(codes, grid))
    frequencies = np.unique(codes, return_counts=True)[1] / codes.size
    return {
        "scheme": str(scheme),
        "entropy_bits": float(-(frequencies * np.log2(frequencies)).sum()),
        "stored_bits": 8 * encoded.nbytes / info.numel,
        "encode": rate(lambda: codec.encode(tensor, scheme), info.numel, rounds),
        "prepared": rate(lambda: codec.encode(prepared, scheme), info.numel, rounds),
        "decode": rate(decode, info.numel, rounds),
    }


def rate(work: Callable[[], object], numel: int, rounds: int) -> float:
    """Millions of weights a second, the median of some rounds."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return numel / statistics.median(seconds) / 1e6


if __name__ == "__main__":
    main()
