"""Products with ternary weights beside cuBLAS with bf16 weights of the same shapes, on one GPU.

    python benchmarks/ternary_linear.py [--sections products sparse launches] [--rounds 100]

Each side is what a user calls: `ternary_linear`, quantisation of the activations included, and torch's
`linear`. The calls of a case lie in one CUDA graph, each with weights of its own, so many that nothing is
found in the L2. Both sides take turns; times are medians of CUDA events. Codes are drawn from -1, 0 and 1.

`products` are W1.58A8 and W1.58A4 (INT4 and FP4) for 1, 16 and 2,048 tokens. `sparse` are the two places
where BitNet a4.8 leaves work out: Top-50 % and INT8 at o_proj beside dense INT8, and the squared-ReLU gated
unit, in which the rows of `up` with a closed gate are not read, beside two products. `launches`, only if
asked for and not saved, are one token and 16, launched in other ways: for whoever tunes.

A result that has not the bits of exact sums, scaled and rounded as `reference` says, is not timed: it ends
the run. The limit is the bytes of the words at the speed of a device copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_codec import L2, captured, copy_speed, milliseconds, stream
from record import Environment, Measurement, save_sections

from neuzip.kernels.quantizers import Ternary, squared_relu
from neuzip.kernels.ternary_linear import Activation, TernaryWeight, reference, relu2_glu, ternary_linear
from neuzip.kernels.ternary_linear.triton.few_tokens import few_tokens
from neuzip.kernels.ternary_linear.triton.launches import FewTokensLaunch, OneTokenLaunch
from neuzip.kernels.ternary_linear.triton.one_token import one_token
from neuzip.kernels.ternary_linear.triton.quantize import quantize

Tensor = torch.Tensor
Row = dict[str, Any]
Call = Callable[[], object]
AnyLaunch = OneTokenLaunch | FewTokensLaunch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
TOKENS = (1, 16, 2048)
ACTIVATIONS: tuple[Activation, ...] = ("int8", "int4", "fp4")
GATED_SHAPES = ((8640, 3200), (11008, 4096), (14336, 4096))
CLOSED = (0.5, 0.675)
"""Shares of gates that are 0: what chance gives, and that of a4.8's 7B model."""

LAUNCHES = {
    (4096, 4096): [(8, 1, 2, 1), (8, 2, 2, 1), (4, 1, 4, 2), (16, 1, 1, 2)],
    (14336, 4096): [(4, 2, 2, 1), (4, 1, 4, 2), (8, 2, 2, 1)],
    (4096, 14336): [(8, 2, 7, 1), (8, 1, 7, 2), (16, 2, 4, 1)],
    (28672, 8192): [(4, 2, 2, 1), (4, 1, 4, 2), (8, 2, 2, 1)],
}
"""Launches tried for 16 tokens, for each shape: warps, tiles of a warp, stages, sets of accumulators."""

LAUNCHES_OF_ONE = {
    (4096, 4096): [
        OneTokenLaunch(4, 2, stages=8),
        OneTokenLaunch(4, 2, stages=7, prologue=1),
        OneTokenLaunch(8, 2, stages=3, prologue=1, registers=80),
    ],
    (3200, 8640): [
        OneTokenLaunch(8, 2, stages=5, registers=112, trigger_next_early=False),
        OneTokenLaunch(8, 1, stages=4, prologue=1),
    ],
    (9600, 3200): [
        OneTokenLaunch(4, 3, stages=8, prologue=4, registers=96),
        OneTokenLaunch(8, 3, stages=4, prologue=2, registers=80),
    ],
    (14336, 4096): [
        OneTokenLaunch(4, 3, stages=8, prologue=4),
        OneTokenLaunch(4, 3, stages=9, prologue=3, registers=96),
        OneTokenLaunch(8, 3, stages=4, prologue=2, registers=64),
        OneTokenLaunch(8, 3, stages=4, prologue=2, bits=False),
    ],
    (4096, 14336): [
        OneTokenLaunch(8, 1, stages=4, prologue=3, registers=128),
        OneTokenLaunch(8, 1, stages=4, prologue=3, registers=96),
        OneTokenLaunch(8, 2, stages=4, prologue=4, registers=128, trigger_next_early=False),
        OneTokenLaunch(8, 1, stages=4, prologue=3, registers=128, bits=False),
    ],
    (28672, 8192): [
        OneTokenLaunch(4, 2, stages=8, prologue=4),
        OneTokenLaunch(8, 2, stages=4, prologue=4, registers=96),
        OneTokenLaunch(4, 1, stages=8, fused=False, quantizer_pdl=True),
    ],
}  # fmt: skip
"""Launches tried last for one token, for each shape, and the one before them if it was another."""


def aim(out: int, columns: int, tokens: int) -> tuple[float, float]:
    """What is asked for: times cuBLAS, and what would be better still."""
    if tokens == 1:
        return (4.0, 5.0) if (out, columns) == (4096, 4096) else (5.0, 7.0)
    return (3.0, 5.0) if tokens == 16 else (1.2, 1.6)


def main() -> None:
    """Measure, print the table, save it: each section takes its own place in the file."""
    sections = {"products": products, "sparse": sparse}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=[*sections, "launches"], default=list(sections))
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these products are compared with cuBLAS")
    environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=True, needs_commit=True)
    torch.manual_seed(0)
    for name in arguments.sections:
        with torch.cuda.stream(stream()):
            if name == "launches":
                launches(arguments.rounds)
                continue
            facts = sections[name](arguments.rounds)
        measured = {name: Measurement(environment, facts.pop("results"), facts)}
        print(f"saved {save_sections('ternary_linear', __doc__.splitlines()[0], measured)}")


def products(rounds: int) -> Row:
    """All shapes with all numbers of tokens and all activations."""
    results: list[Row] = []
    for out, columns in SHAPES:
        weights = rotated(out, columns)
        dense = [
            torch.randn(out, columns, device=DEVICE).bfloat16()
            for _ in range(max(2, -(-4 * L2 // (2 * out * columns))))
        ]
        for tokens in TOKENS:
            x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
            few = weights if tokens < 100 else weights[:8]
            sides: list[list[Call]] = [[partial(F.linear, x, w) for w in dense]]
            for activation in ACTIVATIONS:
                check(x, few[0], activation)
                sides.append(calls(x, few, activation))
            sides.append(calls(x, few, "int8"))  # once more: how far two that are alike are apart
            cublas, *ours, again = in_turns(sides, rounds)
            for activation, us in zip(ACTIVATIONS, ours, strict=True):
                row = product_row(weights[0], tokens, activation, statistics.median(us), cublas)
                row["times_int8"], row["times_int8_again"] = beside(us, ours[0]), beside(us, again)
                results.append(row)
        del weights, dense
        torch.cuda.empty_cache()
    copy = copy_speed()
    print(f"device copy {copy:.0f} GB/s read and written")
    return {"rounds": rounds, "device_copy_gb_s": copy, "results": results}


def launches(rounds: int) -> None:
    """One token and 16, launched in other ways: warps that share tiles, tiles of a warp, and what else."""
    for shape, of_one in LAUNCHES_OF_ONE.items():
        weights = rotated(*shape)
        ways: list[AnyLaunch | None] = [None, *of_one]
        x = torch.randn(1, shape[1], device=DEVICE).bfloat16()
        for activation in ACTIVATIONS:
            tried(x, weights, activation, ways, rounds)
        ways = [None]
        for warps, tiles, stages, sets in LAUNCHES.get(shape, ()):
            ways.append(FewTokensLaunch(warps, tiles, stages=stages, accumulator_sets=sets))
        x = torch.randn(16, shape[1], device=DEVICE).bfloat16()
        tried(x, weights, "int8", ways, rounds)
        quantised: list[Call] = [partial(quantize, x, "int8", 0, False, 2) for _ in weights]
        print(f"{shape[1]:6} {16:3} tokens quantised {times([quantised], rounds)[0]:8.2f} us", flush=True)
        del weights
        torch.cuda.empty_cache()


def tried(
    x: Tensor,
    weights: Sequence[TernaryWeight],
    activation: Activation,
    ways: Sequence[AnyLaunch | None],
    rounds: int,
) -> None:
    """A line for each way, of which all have to give the same bits; None is the usual one."""
    check(x, weights[0], activation)
    expected = ternary_linear(x, weights[0], activation=activation)
    sides: list[list[Call]] = []
    for way in ways:
        if not torch.equal(launched(x, weights[0], activation, way), expected):
            raise SystemExit(f"{way}: other bits than the usual launch gives")
        sides.append([partial(launched, x, weight, activation, way) for weight in weights])
    for way, us in zip(ways, times(sides, rounds), strict=True):
        out, columns = weights[0].shape
        print(
            f"{out:6} x {columns:6} {len(x):3} tokens {activation:5} {us:8.2f} us  {way or 'usual'}",
            flush=True,
        )


def launched(x: Tensor, weight: TernaryWeight, activation: Activation, way: AnyLaunch | None) -> Tensor:
    """A product of one token or few, launched in a way."""
    if len(x) == 1:
        assert not isinstance(way, FewTokensLaunch)
        return one_token(x, [weight], [None], activation, False, launch=way)[0]
    assert not isinstance(way, OneTokenLaunch)
    return few_tokens(x, weight, None, activation, False, launch=way)


def product_row(
    weight: TernaryWeight, tokens: int, activation: str, us: float, cublas_turns: Sequence[float]
) -> Row:
    """A line of the table, printed."""
    out, columns = weight.shape
    cublas = statistics.median(cublas_turns)
    must, stretch = aim(out, columns, tokens)
    row = {
        "out": out, "in": columns, "tokens": tokens, "activation": activation, "cublas_us": cublas, "us": us,
        "speedup": cublas / us, "must": must, "stretch": stretch,
        "gb_s_read": weight.words.nbytes / us / 1e3, "bits": weight.bits_per_weight,
    }  # fmt: skip
    print(
        f"{out:6} x {columns:6} {tokens:5} tokens  {activation:5} {cublas:9.1f} us cuBLAS {us:9.2f} us  "
        f"{row['speedup']:.2f} (must {must}, {'met' if row['speedup'] >= must else 'MISSED'}; "
        f"stretch {stretch})  {row['gb_s_read']:.0f} GB/s of words",
        flush=True,
    )
    return row


def sparse(rounds: int) -> Row:
    """Top-K beside dense INT8, and the gated unit beside two products."""
    results: list[Row] = []
    for out, columns in SHAPES[:1]:
        weights = rotated(out, columns)
        for tokens in (1, 16):
            x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
            check(x, weights[0], "top_k_int8")
            sides = [calls(x, weights, "int8"), calls(x, weights, "top_k_int8")]
            dense, top_k = times(sides, rounds)
            results.append({"what": "Top-50 % and INT8 beside INT8", "out": out, "in": columns,
                            "tokens": tokens, "us": top_k, "beside_us": dense})  # fmt: skip
    for out, columns in GATED_SHAPES:
        results += [gated(out, columns, closed, rounds) for closed in CLOSED]
    for row in results:
        print(
            f"{row['what']:38} {row['out']:6} x {row['in']:6} {row['tokens']:3} tokens {row['us']:8.2f} us "
            f"beside {row['beside_us']:8.2f} us: {row['beside_us'] / row['us']:.2f} times as fast",
            flush=True,
        )
    return {"rounds": rounds, "results": results}


def gated(out: int, columns: int, closed: float, rounds: int) -> Row:
    """The gated unit for one token, of whose gates a share is closed."""
    x = torch.randn(1, columns, device=DEVICE).bfloat16()
    weights = rotated(out, columns)
    gates, ups = weights[::2], weights[1::2]
    # Scales of rows open and close gates without another word: a negative one turns a gate around.
    gate = ternary_linear(x, gates[0], activation="int4")[0]
    wanted = torch.rand(out, device=DEVICE) < closed
    scale = torch.where((gate > 0) == wanted, -0.02, 0.02)[:, None]
    gates = [
        replace(gates[0], words=g.words.copy_(gates[0].words), scale=scale, group=columns) for g in gates
    ]
    ups = [replace(u, scale=torch.full_like(scale, 0.02), group=columns) for u in ups]
    torch.cuda.synchronize()
    linear = ternary_linear(x, ups[0], activation="int4")
    squared = squared_relu(ternary_linear(x, gates[0], activation="int4"))
    if not torch.equal(relu2_glu(x, gates[0], ups[0]), torch.where(squared == 0, 0, squared * linear)):
        raise SystemExit("the gated unit has not the bits of two products: not timed")
    pairs = list(zip(gates, ups, strict=False))
    two_products = [both for g, u in pairs for both in calls(x, [g, u], "int4")]
    unit, one = times([[partial(relu2_glu, x, g, u) for g, u in pairs], two_products], rounds)
    share = float((squared == 0).float().mean())
    return {
        "what": f"gated unit, {share:.0%} closed, beside 2 products", "out": out, "in": columns, "tokens": 1,
        "closed": share, "us": unit, "beside_us": 2 * one,
    }  # fmt: skip


def rotated(out: int, columns: int) -> list[TernaryWeight]:
    """Weights, so many that the L2 has forgotten one when it is used again."""
    codes = torch.randint(-1, 2, (out, columns), device=DEVICE, dtype=torch.int8)
    weight = TernaryWeight.of(Ternary(codes, torch.tensor(0.02, device=DEVICE)))
    copies = max(4, -(-4 * L2 // weight.words.nbytes))
    return [weight, *(replace(weight, words=weight.words.clone()) for _ in range(copies - 1))]


def calls(x: Tensor, weights: Sequence[TernaryWeight], activation: Activation) -> list[Call]:
    """A product with each of the weights."""
    return [partial(ternary_linear, x, weight, activation=activation) for weight in weights]


def check(x: Tensor, weight: TernaryWeight, activation: Activation) -> None:
    """Exit unless a product has the bits of exact sums, scaled and rounded in the order of the reference."""
    tokens = reference.quantize(x, activation)
    parts = [tokens.codes.double() @ part.double().T for part in weight.codes().split(4096)]
    exact = (torch.cat(parts, 1).float() * (tokens.scale * weight.scale)).to(x.dtype)
    if not torch.equal(ternary_linear(x, weight, activation=activation), exact):
        raise SystemExit(f"{weight.shape}, {len(x)} tokens, {activation}: other bits than exact sums give")


def times(sides: Sequence[Sequence[Call]], rounds: int) -> list[float]:
    """Microseconds of a call of each side, which take turns: medians."""
    return [statistics.median(mine) for mine in in_turns(sides, rounds)]


def beside(ours: Sequence[float], others: Sequence[float]) -> float:
    """How many times as long one side takes as another: the median of the ratios of all turns."""
    return statistics.median(our / other for our, other in zip(ours, others, strict=True))


def in_turns(sides: Sequence[Sequence[Call]], rounds: int) -> list[list[float]]:
    """Microseconds of a call of each side, in each turn. The order is another each time.

    What always came behind cuBLAS took up to 6 % longer than the same behind something else.
    """
    runs = [captured(side) for side in sides]
    measured: list[list[float]] = [[] for _ in sides]
    order = random.Random(0)
    for _ in range(rounds):
        for i in order.sample(range(len(sides)), len(sides)):
            measured[i].append(1e3 * milliseconds(runs[i], warm=True) / len(sides[i]))
    return measured


if __name__ == "__main__":
    main()
