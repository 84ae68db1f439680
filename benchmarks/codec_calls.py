"""Operations of torch, kernel launches and waits for the device in calls of the lossless codec, counted.

    python benchmarks/codec_calls.py [--tensors 1 9]

No GPU is needed: Triton's interpreter runs the kernels, and what the host asks of a GPU is the same. Tensors
have 300 and 600 weights in turn. Views and empty tensors are not counted. Every result is compared with
what was coded.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans.coded import ALIGNMENT, CodedTensor
from neuzip.kernels.rans.triton.decode import decode
from neuzip.kernels.rans.triton.encode import GpuEncoded, encode_all

BF16 = FORMATS["BF16"]
FREE = ("view", "slice", "select", "detach", "empty", "as_strided", "split", "expand", "alias", "unsqueeze")
WAITS = ("_local_scalar_dense", "nonzero")
T = TypeVar("T")


class Calls(TorchDispatchMode):
    """Operations of torch within a `with` block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function.__name__.split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 9])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    launches = counted_launches()
    print(f"{'call':10}{'tensors':>8}{'operations':>12}{'launches':>10}{'values read':>13}")
    for count in arguments.tensors:
        weights = [
            (torch.randn(600 if i % 2 else 300) * 0.02).bfloat16().view(torch.int16) for i in range(count)
        ]
        coded = shown("encode", count, launches, lambda: encode_all(weights, BF16))  # noqa: B023
        tensors = [tensor_of(one, bits) for one, bits in zip(coded, weights, strict=True)]
        outs = [torch.empty_like(bits) for bits in weights]
        errors = shown("decode", count, launches, lambda: decode(tensors, outs))  # noqa: B023
        right = all(torch.equal(out, bits) for out, bits in zip(outs, weights, strict=True))
        if errors.any() or not right:
            raise SystemExit("what was coded is not decoded to what it was")


def tensor_of(coded: GpuEncoded, bits: torch.Tensor) -> CodedTensor:
    """A coded tensor as the decoder takes it."""
    planes = {
        width: plane.as_strided((-(-plane.numel() // ALIGNMENT) * ALIGNMENT,), (1,))
        for width, plane in coded.planes.items()
    }
    return CodedTensor(BF16, coded.kept_bits, bits.numel(), coded.table, coded.index, coded.words, planes)


def counted_launches() -> Counter[str]:
    """Launches from now on, by kernel."""
    names: Counter[str] = Counter()
    run = InterpretedFunction.run

    def count(self: Any, *arguments: Any, **options: Any) -> Any:
        names[self.fn.__name__] += 1
        with _disable_current_modes():  # the interpreter's own copies
            return run(self, *arguments, **options)

    InterpretedFunction.run = count
    return names


def shown(name: str, tensors: int, launches: Counter[str], call: Callable[[], T]) -> T:
    """The result of a call, whose counts are printed."""
    launches.clear()
    with Calls() as calls:
        result = call()
    paid = sum(n for op, n in calls.names.items() if not op.strip("_").startswith(FREE))
    read = sum(n for op, n in calls.names.items() if op in WAITS)
    print(f"{name:10}{tensors:8}{paid:12}{sum(launches.values()):10}{read:13}")
    return result


if __name__ == "__main__":
    main()
