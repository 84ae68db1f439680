"""Values of Q, K, V and S by token and channel, as SageAttention2's Figure 4.

    python benchmarks/attention_values.py NAME CHECKPOINT TEXT [--window 512] [--layer N --head N]

The result is benchmarks/results/attention_values-NAME.json, and a picture of one head beside it. Queries,
keys and values are those of all layers on the first window of a text, after rotary embedding; S are the
logits. A row for each layer has for q, k and v:

    x_offset          share of the squares that the means of channels over tokens make up, over all heads
    x_largest         the largest mean of a channel, in standard deviations of that channel
    x_offset_channels share of channels whose mean is larger than their standard deviation

and for S, the logits of what a query sees, `s_largest`, the largest magnitude, and `s_spread`, the mean over
queries of the standard deviation over keys: a quantiser of S would have to serve both.

The picture has the head with the largest mean of a key's channel, unless options name another one.
SageAttention2 (arXiv 2411.10958); its Figure 4 shows models that it does not name in the caption.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention_accuracy import Call, called
from record import RESULTS, Environment, Measurement, save
from torch import Tensor

from neuzip.compress.workspace import write_file
from neuzip.eval.figure_files import svg
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import read_text

NAMES = ("q", "k", "v")

SHOWN = 96
"""Tokens of the picture: more would make its file large."""


def main() -> None:
    """Measure, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--layer", type=int, help="of the picture")
    parser.add_argument("--head", type=int, help="of keys, of the picture")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    baseline = BaselineComparison(
        arguments.checkpoint, read_text(arguments.text), window=arguments.window,
        max_tokens=arguments.window, device=arguments.device,
    )  # fmt: skip
    calls = called(baseline.model, baseline.reading, 0)
    rows = [layer(number, call) for number, call in enumerate(calls)]
    place = choose(calls) if arguments.layer is None else (arguments.layer, arguments.head or 0)
    picture = RESULTS / f"attention_values-{arguments.name}.svg"
    write_file(picture, svg(draw(calls[place[0]], *place)))
    gpu = baseline.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=gpu, needs_commit=True)
    facts = {
        "text": Path(arguments.text).name, "tokens": arguments.window, "device": str(baseline.device),
        "pictured": {"layer": place[0], "head": place[1]},
    }  # fmt: skip
    what = "values of queries, keys, values and logits by token and channel"
    path = save(f"attention_values-{arguments.name}", what, Measurement(environment, rows, facts))
    print(f"saved {path} and {picture}")


def layer(number: int, call: Call) -> dict[str, Any]:
    """The figures of a layer; printed."""
    figures: dict[str, float] = {}
    for name in NAMES:
        x = getattr(call, name).double()
        mean, deviation = x.mean(2), x.std(2, correction=0)
        ratio = mean.abs() / deviation.clamp_min(torch.finfo(torch.float64).tiny)
        figures |= {
            f"{name}_offset": float(mean.square().mean() / x.square().mean()),
            f"{name}_largest": float(ratio.max()),
            f"{name}_offset_channels": float((ratio > 1).double().mean()),
        }
    figures |= logit_figures(call)
    print(number, *(f"{key} {value:.3f}" for key, value in figures.items()), sep="  ", flush=True)
    return {"layer": number, **figures}


def logit_figures(call: Call) -> dict[str, float]:
    """The largest logit and the mean spread along a row, of the keys that a query sees."""
    heads = call.q.shape[1] // call.k.shape[1]
    logits = call.q.float() @ call.k.float().repeat_interleave(heads, 1).mT * call.scale
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    count = seen.sum(-1, keepdim=True)
    mean = logits.masked_fill(~seen, 0).sum(-1, keepdim=True) / count
    variance = (logits - mean).square().masked_fill(~seen, 0).sum(-1, keepdim=True) / count
    return {
        "s_largest": float(logits.masked_fill(~seen, 0).abs().max()),
        "s_spread": float(variance.sqrt().mean()),
    }


def choose(calls: Sequence[Call]) -> tuple[int, int]:
    """The layer and the head of keys that have the channel with the largest mean, in standard deviations."""
    found = []
    for number, call in enumerate(calls):
        ratio = call.k.double().mean(2).abs() / call.k.double().std(2)
        value, head = ratio[0].amax(-1).max(0)
        found.append((float(value), number, int(head)))
    _, number, head = max(found)
    return number, head


def draw(call: Call, layer: int, head: int) -> Any:
    """Q, K, V [tokens, channels] and S [queries, keys] of a head of keys and its first head of queries."""
    from matplotlib import style
    from matplotlib.figure import Figure

    first = head * (call.q.shape[1] // call.k.shape[1])
    q, k, v = (x.float()[:SHOWN] for x in (call.q[0, first], call.k[0, head], call.v[0, head]))
    logits = (q @ k.mT * call.scale).masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), torch.nan)
    tensors: dict[str, Tensor] = {"Q": q, "K": k, "V": v, "S": logits}
    with style.context(["default", {"svg.hashsalt": "neuzip"}]):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        figure.suptitle(f"layer {layer}, head {head} of keys, head {first} of queries", size=10)
        for axes, (name, x) in zip(figure.subplots(1, 4), tensors.items(), strict=True):
            most = float(x[x.isfinite()].abs().max())
            image = axes.imshow(
                x.cpu(), aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most, interpolation="none"
            )
            axes.set(title=name, xlabel="key" if name == "S" else "channel", ylabel="token")
            figure.colorbar(image, ax=axes)
    return figure


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
