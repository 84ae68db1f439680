"""Products of P and V summed in 22 bits, with V plain and smoothed: SageAttention2's Table 6 and Figure 6.

    python benchmarks/attention_sums.py NAME CHECKPOINT TEXT [--window 512] [--offset X] [--device D]

The result is benchmarks/results/attention_sums-NAME.json. Queries, keys and values are those of all layers
of a model on the first window of a text. Queries and keys are not quantised; P and V are E4M3. The sums are
those of kernels/attention/accumulator.py: what the paper says of the FP8 matrix instruction, computed on any
device. Nothing here runs on that instruction; fp8_instruction.py does, on a GPU.

Rows: mean and worst over layers of the closeness to attention in fp64, by accumulator ("fp32"; "two levels",
as the kernels have it; "22 bits") and smoothing of V; `error` is the mean of |O - O'| / |O| where O' has the
same rounding of P and V and sums in fp32: what the accumulator alone costs. With --offset X, X standard
deviations of its layer are added to every channel of V: values as CogVideoX has them, of which we have none.

`example` is one product of a row of P and a column of V, as Figure 6: the layer, head and channel of V with
the largest mean in standard deviations, and the last query. It has the errors of the running sum after each
32 keys, with V plain and smoothed, in the unit of the output: sums are multiplied by the scales of P and V
and divided by the sum of P. The mean of V, which smoothing adds in the end, is not in the sum.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention_accuracy import Call, called
from record import Environment, Measurement, save
from torch import Tensor

from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import read_text
from neuzip.kernels.attention.accumulator import STEP, accumulate
from neuzip.kernels.attention.reference import (
    FLOAT8,
    LARGEST,
    Accumulator,
    means,
    quantize_values,
    quantized_attention,
)
from neuzip.kernels.attention.similarity import similarity

ACCUMULATORS: tuple[Accumulator, ...] = ("fp32", "two levels", "22 bits")
FIGURES = ("cosine", "relative_l1", "rmse", "error")


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--offset", type=float, default=0.0, help="added to V, in standard deviations")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    baseline = BaselineComparison(
        arguments.checkpoint, read_text(arguments.text), window=arguments.window,
        max_tokens=arguments.window, device=arguments.device,
    )  # fmt: skip
    calls = [moved(call, arguments.offset) for call in called(baseline.model, baseline.reading, 0)]
    rows = [row for smooth in (False, True) for row in measure(calls, smooth)]
    gpu = baseline.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=gpu, needs_commit=True)
    facts = {
        "text": Path(arguments.text).name, "tokens": arguments.window, "layers": len(calls),
        "offset": arguments.offset, "device": str(baseline.device), "example": example(calls),
    }  # fmt: skip
    what = "products of P and V summed in 22 bits, with and without smoothing of V"
    print(f"saved {save(f'attention_sums-{arguments.name}', what, Measurement(environment, rows, facts))}")


def moved(call: Call, offset: float) -> Call:
    """The call with an offset added to all channels of V, and its answer."""
    if not offset:
        return call
    v = call.v + offset * call.v.float().std().to(call.v.dtype)
    return Call.of(call.q, call.k, v, scale=call.scale, causal=call.causal)


def measure(calls: Sequence[Call], smooth: bool) -> list[dict[str, Any]]:
    """A row for each accumulator over all layers, with V plain or smoothed; printed."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ACCUMULATORS}
    for call in calls:
        # In fp32, so that rounding of the output to bf16 hides nothing.
        q, k, v = (x.float() for x in (call.q, call.k, call.v))
        outs = {
            name: quantized_attention(
                q, k, v, bits=None, causal=call.causal, scale=call.scale, smooth_v=smooth, accumulator=name
            )[0]
            for name in ACCUMULATORS
        }  # fmt: skip
        for name, out in outs.items():
            close, off = similarity(out, call.exact), (out - outs["fp32"]).abs().sum()
            found[name].append({
                "cosine": close.cosine, "relative_l1": close.relative_l1, "rmse": close.rmse,
                "error": float(off / outs["fp32"].abs().sum()),
            })  # fmt: skip
    return [row(name, smooth, layers) for name, layers in found.items()]


def row(accumulator: str, smooth: bool, layers: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Means and worst figures of an accumulator."""
    figures = {name: statistics.fmean(one[name] for one in layers) for name in FIGURES}
    worst = {
        f"worst_{name}": (min if name == "cosine" else max)(one[name] for one in layers) for name in FIGURES
    }
    print(
        f"{accumulator:12} {'smoothed' if smooth else 'plain':9}",
        *(f"{key} {x:.3g}" for key, x in figures.items()), sep="  ", flush=True,
    )  # fmt: skip
    return {"accumulator": accumulator, "smooth_v": smooth, **figures, **worst}


def example(calls: Sequence[Call]) -> dict[str, Any]:
    """One row of P times one column of V in 22 bits."""
    places = []
    for number, call in enumerate(calls):
        ratio = call.v.double().mean(2).abs() / call.v.double().std(2)
        value, place = ratio[0].flatten().max(0)
        places.append((float(value), number, *divmod(int(place), ratio.shape[-1])))
    ratio, number, head, channel = max(places)
    call = calls[number]
    query = call.q[0, head * (call.q.shape[1] // call.k.shape[1]), -1].float()
    logits = (call.k[0, head].float() @ query) * call.scale
    p = (logits - logits.max()).exp()
    codes = (p * LARGEST["e4m3"]).to(FLOAT8["e4m3"]).double()[None]
    sums = {}
    for name, x in (("plain", call.v.float()), ("smoothed", call.v.float() - means(call.v))):
        column, scale = quantize_values(x, "e4m3")
        unit = float(scale[0, head, 0, channel]) / LARGEST["e4m3"] / float(p.sum())
        sums[name] = errors(codes, column[0, head, :, channel].double()[:, None], unit)
    return {
        "layer": number, "head": head, "channel": channel, "mean_in_deviations": ratio,
        "mean": float(means(call.v)[0, head, 0, channel]), "keys": codes.shape[1], **sums,
    }  # fmt: skip


def errors(codes: Tensor, column: Tensor, unit: float) -> dict[str, Any]:
    """The last sum, exact and in 22 bits, and the error of the running sum after each instruction."""
    ends = list(itertools.chain(range(STEP, codes.shape[1], STEP), [codes.shape[1]]))
    exact = [unit * float(codes[:, :end] @ column[:end]) for end in ends]
    short = [unit * float(accumulate(codes[:, :end], column[:end])) for end in ends]
    return {
        "exact": exact[-1], "in_22_bits": short[-1],
        "errors": [one - other for one, other in zip(short, exact, strict=True)],
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
