"""What products with packed weights take the host, without a CUDA graph, beside dense ones, on one GPU.

    python benchmarks/host_time.py [--sections product prompt] [--layers 8] [--rows 1 16] [--profile packed]

`product`: microseconds until F.linear returns, of a bf16 weight and of the same weight packed, [1024, 1024],
so small that the GPU never makes the host wait; and functions in Python that each calls. The least median of
five runs of 200 products counts. Torch's own operations take what the first column says.

`prompt`: a prompt of 2,048 tokens with layers of Llama-3-8B's shapes: milliseconds until all is launched,
until it has ended, and of kernels alone, of each form. --profile shows the functions of one form by time.

It is for whoever tunes: nothing is saved.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import decode_step
import torch
import torch.nn.functional as F
import triton

from neuzip.runtime.decode.benchmark import free_memory, prompts
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.weights import PackedWeight

DEVICE = "cuda"
FORMS = ("bf16", "packed", "ans")
SIZE = 1024
TOKENS = 2048


def main() -> None:
    """Print the tables."""
    sections = {"product": product, "prompt": prompt}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 2048])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["bf16", "packed"], help="of the prompt")
    parser.add_argument("--profile", choices=FORMS, help="show the functions of this form's prompt")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "Triton", triton.__version__)
    for name in arguments.sections:
        print(f"\n{name}")
        sections[name](arguments)


@torch.no_grad()
def product(arguments: argparse.Namespace) -> None:
    """One product on its own, as a model's nn.Linear calls it."""
    dense = torch.randn(SIZE, SIZE, device=DEVICE).bfloat16() * 0.02
    weights = {"bf16": dense, "packed": PackedWeight.of(dense)}
    print(f"{'rows':>6} {'form':7} {'host us':>8} {'calls':>6}")
    for rows in arguments.rows:
        x = torch.randn(1, rows, SIZE, device=DEVICE).bfloat16()
        for form, weight in weights.items():
            call = partial(F.linear, x, weight)
            print(f"{rows:6} {form:7} {host_microseconds(call):8.1f} {python_calls(call):6}", flush=True)


def host_microseconds(call: Callable[[], Any], calls: int = 200, runs: int = 5) -> float:
    """Microseconds of the host for a call that launches kernels."""
    for _ in range(3):
        call()
    medians = []
    for _ in range(runs):
        seconds = []
        torch.cuda.synchronize()
        for _ in range(calls):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        medians.append(statistics.median(seconds))
    return 1e6 * min(medians)


def python_calls(call: Callable[[], Any]) -> int:
    """How many functions in Python a call calls."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def prompt(arguments: argparse.Namespace) -> None:
    """Whether the host or the GPU is what a prompt waits for."""
    print(f"{'form':7} {'launched':>9} {'ended':>9} {'kernels':>9}  ms")
    for form in arguments.forms:
        model = decode_step.made(form, arguments.layers)
        decoder = GreedyDecoder(model, 1, TOKENS + 1, graph=False)
        prefill = partial(decoder.prefill, prompts(model.config.vocab_size, 1, TOKENS))
        launched, ended = launched_and_ended(prefill)
        kernels = kernel_seconds(prefill)
        print(f"{form:7} {1e3 * launched:9.2f} {1e3 * ended:9.2f} {1e3 * kernels:9.2f}", flush=True)
        if form == arguments.profile:
            with cProfile.Profile() as profile:
                prefill()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        del decoder, model, prefill
        free_memory()


def launched_and_ended(call: Callable[[], object], runs: int = 15) -> tuple[float, float]:
    """Seconds until a call returns, and until its kernels have ended, in the run of median length."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        launched = time.perf_counter() - began
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began, launched))
    ended, launched = sorted(times)[runs // 2]
    return launched, ended


def kernel_seconds(call: Callable[[], object]) -> float:
    """Seconds in which kernels of a call run, those that run at the same time counted once."""
    busy = until = 0.0
    for event in decode_step.profiled(call):
        span = event.time_range
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return busy / 1e6


if __name__ == "__main__":
    main()
