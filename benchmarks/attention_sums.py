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
the largest mean in standard deviations, and the last query. It has the error of the running sum after each 32
keys, as a share of the last sum, plain and smoothed. The mean of V, which smoothing adds in the end, is left
out of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention_accuracy import Call, Form, called
from record import Environment, Measurement, save
from torch import Tensor

from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import read_text
from neuzip.kernels.attention.accumulator import STEP, accumulate
from neuzip.kernels.attention.reference import FLOAT8, LARGEST, means, quantize_values
from neuzip.kernels.attention.similarity import similarity

ACCUMULATORS = ("fp32", "two levels", "22 bits")
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
    rows = [measure(calls, name, smooth) for smooth in (False, True) for name in ACCUMULATORS]
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


def measure(calls: Sequence[Call], accumulator: str, smooth: bool) -> dict[str, Any]:
    """The figures of an accumulator over all layers; printed."""
    options = {"bits": None, "smooth_v": smooth}
    peer = Form("sums", "fp32", options)
    form = dataclasses.replace(peer, name=accumulator, options=options | {"accumulator": accumulator})
    found: list[dict[str, float]] = []
    for call in calls:
        # In fp32, so that rounding of the output to bf16 hides nothing.
        q, k, v = (x.float() for x in (call.q, call.k, call.v))
        out, wanted = (one(q, k, v, causal=call.causal, scale=call.scale) for one in (form, peer))
        close = similarity(out, call.exact)
        found.append({
            "cosine": close.cosine, "relative_l1": close.relative_l1, "rmse": close.rmse,
            "error": float((out - wanted).abs().sum() / wanted.abs().sum()),
        })  # fmt: skip
    figures = {name: statistics.fmean(one[name] for one in found) for name in FIGURES}
    worst = {
        f"worst_{name}": (min if name == "cosine" else max)(one[name] for one in found) for name in FIGURES
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
    codes = ((logits - logits.max()).exp() * LARGEST["e4m3"]).to(FLOAT8["e4m3"]).double()[None]
    sums = {}
    for name, x in (("plain", call.v.float()), ("smoothed", call.v.float() - means(call.v))):
        column = quantize_values(x, "e4m3")[0][0, head, :, channel].double()[:, None]
        sums[name] = errors(codes, column)
    return {
        "layer": number, "head": head, "channel": channel, "mean_in_deviations": ratio,
        "keys": codes.shape[1], **sums,
    }  # fmt: skip


def errors(row: Tensor, column: Tensor) -> dict[str, Any]:
    """The last sum, exact and in 22 bits, and the error of the running sum after each instruction."""
    ends = list(itertools.chain(range(STEP, row.shape[1], STEP), [row.shape[1]]))
    exact = [float(row[:, :end] @ column[:end]) for end in ends]
    short = [float(accumulate(row[:, :end], column[:end])) for end in ends]
    return {
        "exact": exact[-1], "in_22_bits": short[-1],
        "largest_sum": max(map(abs, exact)),
        "errors": [one - other for one, other in zip(short, exact, strict=True)],
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
