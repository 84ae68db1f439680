"""Quantised attention: closeness by granularity and format, and perplexity, as SageAttention2's tables.

    python benchmarks/attention_accuracy.py NAME CHECKPOINT TEXT [--windows N] [--window W] [--device D]
    python benchmarks/attention_accuracy.py NAME CHECKPOINT TEXT --closeness-only ...    # no perplexities
    python benchmarks/attention_accuracy.py synthetic [--device D]

    python benchmarks/attention_accuracy.py demo eval/demo/checkpoint demo
    cd $NEUZIP_DATA
    python .../attention_accuracy.py wikilm-26m wikilm-26m wikitext-2/wiki.test.raw --windows 16

The result is benchmarks/results/attention_accuracy-NAME.json. Queries, keys and values are those of all
layers, after rotary embedding; closeness is to attention in fp64, of the first windows. Perplexities are of
the model with all layers quantised, beside itself, over N windows; their differences are paired. The
arithmetic is that of kernels/attention/reference.py; on a GPU the kernels are measured too.

Tables 1 to 5: SageAttention2 (arXiv 2411.10958), there of Llama-3.1-8B and CogVideoX.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import Environment, Measurement, save
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.conventions import Reading
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import read_text
from neuzip.kernels.attention import sage_attention, supported
from neuzip.kernels.attention.reference import exact_attention, means, quantized_attention
from neuzip.kernels.attention.similarity import Similarity, similarity
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import positions

Row = dict[str, Any]
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q, k, v, scale) -> output; all of a window's tokens, causal."""

WINDOW = 2048
SIMILARITY_WINDOWS = 2
"""Windows whose queries, keys and values are looked at; perplexities are of more."""

FULL: Row = {"p_format": "fp32", "v_format": "fp32"}
SMOOTHING = {"none": (False, False), "K": (True, False), "Q": (False, True), "Q+K": (True, True)}
"""Of keys, of queries."""

GRANULARITIES = ("token", "thread", "thread-hopper", "thread-ada", "warp", "block", "tensor")
FORMATS = ("int8", "e5m2", "e4m3", "fp16")

MOST = {"8 bit": 0.1, "4 bit": 3.0}
"""Percent that a perplexity may rise by; asked for of wikilm-26m."""

LEAST = {"8 bit": 0.999, "4 bit": 0.99}
"""Cosine similarity that is asked for on made-up numbers."""

SEEDS = 4
TOKENS = 2048
OUTLIER = 8.0
"""Offset of an outlier channel, in standard deviations of the others."""


@dataclass(frozen=True, eq=False)
class Call:
    """What attention is given, and what it should answer: exact attention, fp64 [B, Hq, N, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    exact: Tensor

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Call:
        """With its answer."""
        return Call(q, k, v, scale, causal, exact_attention(q, k, v, scale=scale, causal=causal)[0])

    def similarity(self, form: Form) -> Similarity:
        """How close attention in a form comes."""
        return similarity(form(self.q, self.k, self.v, causal=self.causal, scale=self.scale), self.exact)


@dataclass(frozen=True)
class Form:
    """A way to compute attention: options of the reference, or those of the kernel."""

    table: str
    name: str
    options: Row
    by: str = "reference"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        if self.by == "reference":
            return quantized_attention(q, k, v, causal=causal, scale=scale, **self.options)[0]
        out = sage_attention(q, k, v, causal=causal, scale=scale, **self.options)
        assert isinstance(out, Tensor)
        return out

    def row(self, figures: Row) -> Row:
        """What a table says of it."""
        return {"table": self.table, "form": self.name, "by": self.by, **self.options, **figures}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, help=f"{WINDOW:,}, or as many tokens as the model was made for")
    parser.add_argument("--closeness-only", action="store_true", help="measure no perplexities")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.name == "synthetic":
        found = synthetic(choose_device(arguments.device))
    elif arguments.text is None:
        parser.error("name a checkpoint and a text, or: synthetic")
    else:
        found = of_checkpoint(arguments.checkpoint, arguments.text, arguments)
    on_gpu = torch.device(found["device"]).type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "triton", "transformers", gpu=on_gpu)
    seconds = time.monotonic() - began
    what = "how close quantised attention is to exact attention"
    measurement = Measurement(environment, facts={**found, "seconds": seconds})
    print(f"{seconds:.0f} s; saved {save(f'attention_accuracy-{arguments.name}', what, measurement)}")


# Queries, keys and values of a model


def of_checkpoint(checkpoint: Path, text: str, arguments: argparse.Namespace) -> Row:
    """All tables of a checkpoint on a text."""
    window = arguments.window or min(WINDOW, positions(load_config(checkpoint)) or WINDOW)
    baseline = BaselineComparison(
        checkpoint, read_text(text), window=window, max_tokens=arguments.windows * window,
        device=arguments.device,
    )  # fmt: skip
    reading, model = baseline.reading, baseline.model
    calls = [
        called(model, reading, number) for number in range(min(SIMILARITY_WINDOWS, len(reading.windows)))
    ]
    kernel = on_kernel(calls[0][0])
    layers = [offsets(number, [window[number] for window in calls]) for number in range(len(calls[0]))]
    show("size of the means of keys and queries, in standard deviations around them", layers)
    close = []
    for table, forms in itertools.groupby([*closeness_forms(), *recipes(kernel)], lambda form: form.table):
        rows = [form.row(closeness(form, itertools.chain(*calls))) for form in forms]
        show(f"{table}: average over {len(layers)} layers and {len(calls)} windows, and worst", rows)
        close += rows
    perplexities = []
    models = [] if arguments.closeness_only else [*smoothing_forms(), *recipes(kernel)]
    for table, forms in itertools.groupby(models, lambda form: form.table):
        rows = [form.row(perplexity(baseline, form)) for form in forms]
        for row in rows:
            row |= verdict(row)
        show(f"{table}: perplexity", rows)
        perplexities += rows
    return {
        "text": Path(text).name,
        "convention": reading.convention.rule,
        "windows": len(reading.windows),
        "tokens": baseline.tokens,
        "similarity_windows": len(calls),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(baseline.device),
        "layers": layers,
        "closeness": close,
        "perplexity": perplexities,
    }


def closeness_forms() -> Iterator[Form]:
    """Tables 2 to 5 of the paper, for 8 bits too."""
    for bits, name in itertools.product((4, 8), GRANULARITIES):
        options = {"bits": bits, "granularity": name, "smooth_q": True, **FULL}
        yield Form("Tables 2 and 3, granularity", f"INT{bits}, per {name}", options)
    for bits, name in itertools.product((4, 8), FORMATS):
        options = {"bits": bits, "smooth_q": True, "p_format": name, "v_format": name}
        yield Form("Tables 4 and 5, P and V", f"Q, K INT{bits}; P, V {name.upper()}", options)


def smoothing_forms() -> Iterator[Form]:
    """Table 1 of the paper."""
    for bits, (name, (smooth_k, smooth_q)) in itertools.product((4, 8), SMOOTHING.items()):
        options = {"bits": bits, "smooth_k": smooth_k, "smooth_q": smooth_q, **FULL}
        yield Form("Table 1, smoothing", f"INT{bits}, smoothed: {name}", options)


def recipes(kernel: bool) -> Iterator[Form]:
    """P and V in E4M3 as well: what the kernels do, and the same without smoothing."""
    table = "the whole recipe"
    for bits in (8, 4):
        yield Form(table, f"{bits} bit", {"bits": bits})
        if kernel:
            yield Form(table, f"{bits} bit", {"bits": bits}, "kernel")
    yield Form(table, "4 bit, smooth V", {"bits": 4, "smooth_v": True})
    yield Form(table, "4 bit, per token", {"bits": 4, "granularity": "token"})
    for bits in (8, 4):
        yield Form(table, f"{bits} bit, not smoothed", {"bits": bits, "smooth_k": False, "smooth_q": False})


def on_kernel(call: Call) -> bool:
    """Whether there is a kernel for such numbers where they are; says why not."""
    if not call.q.is_cuda:
        return False
    why = supported(call.q, call.k, call.v, causal=call.causal, scale=call.scale)
    if why is not None:
        print(f"without the kernel: {why}")
    return why is None


@contextmanager
def attending(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Have a model attend so. Its texts must be unpadded, its attention causal and no more."""
    name = model.config._attn_implementation

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        for option in ("sliding_window", "softcap", "s_aux"):
            if options.get(option) is not None:
                raise NotImplementedError(f"{type(module).__name__} has {option}")
        if mask is not None or not module.is_causal:
            raise NotImplementedError(f"{type(module).__name__} is given a mask, or is not causal")
        out = attend(module.layer_idx, query, key, value, options["scaling"])
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS[name] = forward  # of this instance, on top of what is registered
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@torch.inference_mode()
def called(model: PreTrainedModel, reading: Reading, number: int) -> list[Call]:
    """What each layer is given of a window when all layers attend exactly."""
    found: list[Call] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        assert layer == len(found)
        found.append(Call.of(q, k, v, scale=scale, causal=True))
        return found[-1].exact.to(q.dtype)

    window = reading.windows[number]
    with attending(model, attend):
        model(input_ids=reading.ids[None, window.start : window.stop].to(model.device), use_cache=False)
    return found


def offsets(number: int, calls: Sequence[Call]) -> Row:
    """How far the means over tokens are from 0, and the most in a channel: what smoothing takes away."""
    row: Row = {"layer": number}
    for name in ("k", "q"):
        sizes, peaks = [], []
        for call in calls:
            x = getattr(call, name).float()
            mean = means(x)
            spread = (x - mean).square().mean((2, 3), keepdim=True).sqrt()
            sizes.append(float((mean / spread).square().mean().sqrt()))
            peaks.append(float((mean / spread).abs().max()))
        row |= {f"{name}_mean": statistics.fmean(sizes), f"{name}_mean_largest": max(peaks)}
    return row


def closeness(form: Form, calls: Iterable[Call]) -> Row:
    """The figures of the paper's tables: average and worst over layers and windows, or sets of numbers."""
    found = [call.similarity(form) for call in calls]
    return {
        "cosine": statistics.fmean(s.cosine for s in found),
        "relative_l1": statistics.fmean(s.relative_l1 for s in found),
        "rmse": statistics.fmean(s.rmse for s in found),
        "worst_cosine": min(s.cosine for s in found),
        "worst_relative_l1": max(s.relative_l1 for s in found),
        "worst_rmse": max(s.rmse for s in found),
    }


class _Attending(HeadedModel):
    """A model that attends in some form while it predicts."""

    def __init__(self, model: PreTrainedModel, form: Form) -> None:
        self.form = form
        super().__init__(model)

    def _run(self, ids: Tensor) -> Tensor:
        with attending(self.model, self._attend):
            return super()._run(ids)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.form(q, k, v, causal=True, scale=scale)


def perplexity(baseline: BaselineComparison, form: Form) -> Row:
    """The model with attention in a form beside itself, on the same tokens."""
    found = baseline.compare(_Attending(baseline.model, form))
    difference, ratio = found.nll_difference, found.perplexity_ratio
    base = torch.tensor(found.base_nll.value).exp()
    return {
        "perplexity": float(base) * ratio.value,
        "base_perplexity": float(base),
        "rise_percent": 100 * (ratio.value - 1),
        "rise_percent_standard_error": None if ratio.standard_error is None else 100 * ratio.standard_error,
        "nll_difference": difference.value,
        "nll_difference_standard_error": difference.standard_error,
        "kld": found.kld.mean.value,
        "kld_standard_error": found.kld.mean.standard_error,
        "top_1": found.top_1.value,
    }


def verdict(row: Row) -> Row:
    """Whether the perplexity of a recipe rises by no more than is asked for."""
    if row["table"] != "the whole recipe" or (most := MOST.get(row["form"])) is None:
        return {}
    return {"most_percent": most, "met": row["rise_percent"] <= most}


# Made-up numbers


def synthetic(device: torch.device) -> Row:
    """Gaussian numbers, plain and with outlier channels."""
    rows = []
    for width, kind in itertools.product((64, 128), ("Gaussian", "outlier channels")):
        calls = [made_up(kind, width, seed, device) for seed in range(SEEDS)]
        of_kind = []
        for form in (*recipes(on_kernel(calls[0])), *alone()):
            row = form.row(closeness(form, calls))
            if (least := LEAST.get(form.name)) is not None:
                row |= {"least_cosine": least, "met": row["worst_cosine"] >= least}
            of_kind.append({"numbers": kind, "head_dim": width, **row})
        show(f"{kind}, head dim {width}, {SEEDS} seeds: average and worst", of_kind)
        rows += of_kind
    return {"device": str(device), "shape": [1, 4, TOKENS], "outlier": OUTLIER, "synthetic": rows}


def alone() -> Iterator[Form]:
    """What each of the roundings costs by itself."""
    yield Form("alone", "P, V E4M3", {"bits": None})
    for bits, name in itertools.product((8, 4), ("token", "thread")):
        options = {"bits": bits, "granularity": name, **FULL}
        yield Form("alone", f"Q, K INT{bits}, per {name}", options)


def made_up(kind: str, width: int, seed: int, device: torch.device) -> Call:
    """q, k, v in bf16, not causal. Outliers are channels of keys and queries with means far from 0."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 4, TOKENS, width, generator=generator) for _ in range(3))
    if kind == "outlier channels":
        k[..., [3, width // 2]] += torch.tensor([OUTLIER, -OUTLIER])
        q[..., [5, width - 3]] += torch.tensor([OUTLIER, -OUTLIER])
    q, k, v = (x.to(device, torch.bfloat16) for x in (q, k, v))
    return Call.of(q, k, v, scale=width**-0.5, causal=False)


# What is printed


def show(title: str, rows: Sequence[Row]) -> None:
    """A table of the figures that all rows have, and for some whether they are what is asked for."""
    print(f"\n{title}")
    names = [n for n, x in rows[0].items() if isinstance(x, float) and all(n in row for row in rows)]
    told = "layer" if "layer" in rows[0] else "form"
    heads = [name.replace("standard_error", "se").replace("relative_", "") for name in names]
    widths = [max(10, len(head)) for head in heads]
    print(f"{'':28}" + "  ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        label = f"{row[told]}" + (" (kernel)" if row.get("by") == "kernel" else "")
        figures = (f"{row[name]:{width}.5g}" for name, width in zip(names, widths, strict=True))
        asked = "" if "met" not in row else "  met" if row["met"] else "  MISSED"
        print(f"{label:28}" + "  ".join(figures) + asked, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
