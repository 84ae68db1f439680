"""Throughput of NeuZip, of quantisation and of offloading by the size of a matrix, as Figure 4 of NeuZip.

    python benchmarks/matrix_throughput.py [--sizes 20 22 24 26 28] [--rounds 20]        # needs a GPU

The result is benchmarks/results/matrix_throughput.json: a row for each size, method and direction. Sizes are
powers of two of bf16 weights drawn from N(0, 0.02), as matrices of 1,024 columns. Every figure is that of a
user's call on an idle GPU, Python and launches included: median of CUDA events over the rounds, in which all
methods take turns. GB/s are bytes of bf16 over time, so a method that stores less gains nothing by it.

offload         copy to pinned memory of the CPU, and back
INT8            a scale for each row of 1,024 weights, plain torch
NF4             bitsandbytes, blocks of 64, where it is installed
NeuZip          neuzip's lossless codec
NeuZip, 3 bits  3 bits of mantissa: rounded to nearest even by torch on the GPU, then coded. The command
                `compress` rounds on the CPU

Checked first, or the run ends: offloading and NeuZip give back the bytes that they should, INT8 is off by at
most half a step, and NF4 by less than a fifth of the weights' standard deviation.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_codec import encode, gaussian, milliseconds
from record import Environment, Measurement, save, spread
from torch import Tensor

from neuzip.kernels.rans.coded import raise_if_corrupt
from neuzip.kernels.rans.triton.decode import decode

COLUMNS = 1024
"""Weights of a row: those that share a scale in INT8."""

MANTISSA_BITS = 7
"""Bits of bf16's mantissa."""

KEPT_BITS = 3
"""Bits of mantissa of the lossy form: the paper's row with the least loss."""

WORST_NF4 = 0.2
"""Root of the mean square error of NF4 in standard deviations, at most."""


@dataclass(frozen=True)
class Method:
    """A name, how weights are stored, how they come back, and a check of what came back."""

    name: str
    store: Callable[[], object]
    restore: Callable[[], object]
    check: Callable[[], bool]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 22, 24, 26, 28], help="log2 of weights")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    packages = ("neuzip-toolkit", "torch", "triton", "bitsandbytes")
    environment = Environment.here(*packages, gpu=True, needs_commit=True)
    torch.manual_seed(0)
    rows = [row for size in arguments.sizes for row in measure(1 << size, arguments.rounds)]
    what = "throughput of storing and restoring a bf16 matrix by size and method, in GB/s of bf16"
    measurement = Measurement(environment, rows, {"rounds": arguments.rounds})
    print(f"saved {save('matrix_throughput', what, measurement)}")


def measure(numel: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of a size."""
    found = list(methods(gaussian(numel)))
    for method in found:
        if not method.check():
            raise SystemExit(f"{method.name} of {numel:,} weights gives back something else: not timed")
    calls = {
        (method.name, direction): call
        for method in found
        for direction, call in (("store", method.store), ("restore", method.restore))
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(milliseconds(call))
    rows = []
    for (name, direction), mine in times.items():
        speeds = [2 * numel / ms / 1e6 for ms in mine]
        rows.append({
            "weights": numel, "by": name, "direction": direction, **spread(mine, "ms"),
            **spread(speeds, "gb_s"),
        })  # fmt: skip
        print(f"{numel:12,} {name:16} {direction:8} {rows[-1]['gb_s']:9.1f} GB/s", flush=True)
    return rows


def methods(bits: Tensor) -> Iterator[Method]:
    """All methods on some weights, the bit patterns of bf16 as int16 [n]."""
    yield offload(bits)
    yield int8(bits)
    if importlib.util.find_spec("bitsandbytes") is None:
        print("bitsandbytes is not installed: NF4 is left out")
    else:
        yield nf4(bits)
    yield coded("NeuZip", bits, lambda: bits)
    yield coded(f"NeuZip, {KEPT_BITS} bits", rounded(bits, KEPT_BITS), partial(rounded, bits, KEPT_BITS))


def offload(bits: Tensor) -> Method:
    """Pinned memory of the CPU, and back."""
    host = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=True)
    back = torch.zeros_like(bits)
    store = partial(host.copy_, bits, non_blocking=True)
    restore = partial(back.copy_, host, non_blocking=True)

    def check() -> bool:
        store()
        restore()
        return torch.equal(back, bits)

    return Method("offload", store, restore, check)


def int8(bits: Tensor) -> Method:
    """Whole numbers of 8 bits with a scale a row."""
    weights = bits.view(torch.bfloat16).view(-1, COLUMNS)
    codes, scale = quantized(weights)

    def check() -> bool:
        error = (restored(codes, scale).float() - weights.float()).abs()
        # Half a step, and the rounding of the result to bf16.
        return bool((error <= 0.5 * scale + weights.float().abs() * 2**-8).all())

    return Method("INT8", partial(quantized, weights), partial(restored, codes, scale), check)


def quantized(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, columns] and a scale fp32 [rows, 1] of bf16 weights, by the largest of a row."""
    scale = weights.abs().amax(1, keepdim=True).float() / 127
    return (weights / scale.clamp_min(1e-30)).round_().to(torch.int8), scale


def restored(codes: Tensor, scale: Tensor) -> Tensor:
    """The bf16 weights of codes."""
    return (codes * scale).to(torch.bfloat16)


def nf4(bits: Tensor) -> Method:
    """bitsandbytes' NF4."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = bits.view(torch.bfloat16).view(-1, COLUMNS)
    store = partial(quantize_4bit, weights, blocksize=64, quant_type="nf4")
    codes, state = store()
    restore = partial(dequantize_4bit, codes, state)

    def check() -> bool:
        error = restore().float() - weights.float()
        return bool(error.square().mean().sqrt() < WORST_NF4 * weights.float().std())

    return Method("NF4", store, restore, check)


def coded(name: str, stored: Tensor, source: Callable[[], Tensor]) -> Method:
    """neuzip's codec of what `source` computes, which is `stored`."""
    tensor = encode(stored)
    out = torch.empty_like(stored)

    def restore() -> None:
        raise_if_corrupt(decode([tensor], [out]), [name])

    def check() -> bool:
        out.fill_(-1)
        restore()
        again = torch.empty_like(stored)
        raise_if_corrupt(decode([encode(source())], [again]), [name])
        return torch.equal(out, stored) and torch.equal(again, stored)

    return Method(name, lambda: encode(source()), restore, check)


def rounded(bits: Tensor, kept: int) -> Tensor:
    """bf16 patterns with `kept` bits of mantissa, nearest even; of finite weights that stay finite."""
    dropped, word = MANTISSA_BITS - kept, bits.to(torch.int32) & 0xFFFF
    word += (1 << (dropped - 1)) - 1 + (word >> dropped & 1)
    return (word >> dropped << dropped).to(torch.int16)


if __name__ == "__main__":
    main()
