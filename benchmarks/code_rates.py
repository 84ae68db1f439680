"""What codes of a quantized tensor take beyond their entropy, part by part.

    python benchmarks/code_rates.py

Codes are whole numbers next to samples of a normal distribution, of deviations from 0.6 to 100, in tensors of
16 thousand to 16 million weights. All parts are in bits a weight:

    entropy     of order 0, of the codes themselves
    table       with the step and the padding
    index       the words of each block, a number a block
    lanes       the number of escapes and the states that a block begins with
    escapes     positions and codes
    coded       the other words and the raw low bits, less the entropy: below 0, as states hold symbols too
    excess      all streams, less the entropy

The result is benchmarks/results/code_rates.json. Nothing is timed.
"""

from __future__ import annotations

import argparse

import numpy as np
from record import Environment, Measurement, save

from neuzip.compress.schemes.quantized_coding import QuantizedCodes
from neuzip.formats.records import Loss
from neuzip.kernels import rans
from neuzip.kernels.grid import Grid
from neuzip.kernels.rans.numbers import HEADER_WORDS

DEVIATIONS = (0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0)
SIZES = (1 << 14, 1 << 17, 1 << 20, 1 << 24)


def main() -> None:
    """Code, count, print, save."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    environment = Environment.here("neuzip-toolkit", "numpy", gpu=False)
    rows = [parts(deviation, numel) for numel in SIZES for deviation in DEVIATIONS]
    path = save(
        "code_rates",
        "bits a weight of codes of quantized tensors beyond their entropy, by part",
        Measurement(environment, rows, {}),
    )
    print(f"saved {path}")


def parts(deviation: float, numel: int) -> dict[str, float | int | str]:
    """The parts of one tensor, in bits a weight; printed."""
    rng = np.random.default_rng(0)
    codes = np.rint(rng.standard_normal(numel) * deviation).astype(np.int16)
    quantized = QuantizedCodes(codes, Grid(0.1), "", "", Loss(0, 0))
    how = quantized.coding(map)
    streams = {
        name: np.concatenate([part.view(np.uint8).reshape(-1) for part in stream.parts])
        for name, stream in quantized.streams(how, map).items()
    }
    index = streams["index"].view("<u2")[: -(-numel // rans.BLOCK)].astype(np.int64)
    words = streams["words"].view("<u2")
    escapes = int(words[np.cumsum(index) - index].sum())
    _, counts = np.unique(codes, return_counts=True)
    entropy = float((counts * np.log2(numel / counts)).sum()) / numel
    bits = {name: 8 * stream.size / numel for name, stream in streams.items()}
    lanes, of_escapes = 16 * HEADER_WORDS * index.size / numel, 32 * escapes / numel
    row = {
        "weights": numel, "deviation": deviation, "low_bits": how.low_bits,
        "form": {1: "single codes", 2: "pairs", 3: "joint pairs"}[how.stored.form],
        "entropy": entropy, "table": bits["grid"], "index": bits["index"], "lanes": lanes,
        "escapes": of_escapes,
        "coded": bits["words"] - lanes - of_escapes + bits.get("low", 0.0) - entropy,
        "excess": sum(bits.values()) - entropy,
    }  # fmt: skip
    print(
        f"{numel:10,} {deviation:6.1f} {row['form']:12} {how.low_bits} raw, entropy {entropy:6.3f}: "
        + ", ".join(
            f"{key} {row[key]:.4f}" for key in ("table", "index", "lanes", "escapes", "coded", "excess")
        )
    )
    return row


if __name__ == "__main__":
    main()
