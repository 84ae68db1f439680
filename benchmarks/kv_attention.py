"""Attention of one new token over keys and values in few bits, beside torch's over bf16, on one GPU.

    python benchmarks/kv_attention.py [--rounds 30]

Each side is what a layer calls: `kv_cache.attend`, both of its kernels, and scaled_dot_product_attention of
torch with the queries of a head as its rows, as transformers calls it. `store` is what a step adds: keys and
values of one token quantised and packed. The calls of a case lie in one CUDA graph, each with keys and values
of its own, so many that nothing is found in the L2. The sides take turns; times are medians of CUDA events.
Whatever is further from fp64 on the same dequantised numbers than bf16 explains (0.5 %) is not timed: it ends
the run.

The result is benchmarks/results/kv_attention.json. The limit is the bytes read at the speed of a device copy.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from gpu_codec import L2, copy_speed, stream
from packed_linear import times
from record import Environment, Measurement, save

from neuzip.kernels import kv_cache
from neuzip.kernels.kv_cache import Heads, reference

Tensor = torch.Tensor
Row = dict[str, Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES = ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (16, 32768))
"""Texts, and tokens of each."""
QUERIES, HEADS, WIDTH = 32, 8, 128
BITS = (8, 4, 3)
FARTHEST = 5e-3


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=True, needs_commit=True)
    torch.manual_seed(0)
    results: list[Row] = []
    with torch.cuda.stream(stream()):
        for texts, tokens in CASES:
            for row in case(texts, tokens, arguments.rounds):
                results.append(row)
                print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
        copy = copy_speed()
    facts = {
        "queries": QUERIES, "heads": HEADS, "width": WIDTH, "rounds": arguments.rounds,
        "device_copy_gb_s": copy,
    }  # fmt: skip
    path = save("kv_attention", __doc__.splitlines()[0], Measurement(environment, results, facts))
    print(f"saved {path}")


def case(texts: int, tokens: int, rounds: int) -> list[Row]:
    """A row for each number of bits."""
    plain_bytes = 2 * 2 * texts * HEADS * tokens * WIDTH
    dense = [states(texts, tokens) for _ in range(copies(plain_bytes))]
    query = torch.randn(texts, QUERIES, WIDTH, device=DEVICE).bfloat16()
    rows = query.view(texts, HEADS, -1, WIDTH)
    first = torch.zeros(texts, dtype=torch.int64, device=DEVICE)
    length = torch.tensor(tokens, device=DEVICE)
    options: dict[str, Any] = {"scaling": WIDTH**-0.5, "length": length}
    found = []
    for bits in BITS:
        few_bytes = sum(h.nbytes for h in packed(states(texts, tokens), bits, first))
        few = [packed(states(texts, tokens), bits, first) for _ in range(copies(few_bytes))]
        error = distance(query, few[0], first, options)
        if not error <= FARTHEST:
            raise SystemExit(f"{texts} x {tokens} tokens, {bits} bits: relative error {error:.2e}, not timed")
        new, last = states(texts, 1), length - 1

        def store(heads: tuple[Heads, Heads], new: Any = new, last: Tensor = last) -> None:
            kv_cache.store(heads, new, last, first)

        sides = [
            [lambda h=h: kv_cache.attend(query, *h, first, **options) for h in few],
            [lambda kv=kv: F.scaled_dot_product_attention(rows, *kv) for kv in dense],
            [lambda h=h, store=store: store(h) for h in few],
        ]
        ours, theirs, stored = times(sides, rounds)
        found.append(
            {
                "texts": texts, "tokens": tokens, "bits": bits, "sdpa_us": theirs, "attend_us": ours,
                "store_us": stored, "speedup": theirs / ours, "error": error,
                "bytes": few_bytes, "bytes_bf16": plain_bytes, "gb_s_read": few_bytes / ours / 1e3,
                "sdpa_gb_s_read": plain_bytes / theirs / 1e3,
            }
        )  # fmt: skip
    return found


def copies(nbytes: int) -> int:
    """So many that together they do not fit into the L2."""
    return max(2, -(-4 * L2 // nbytes))


def states(texts: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values that are made up."""
    keys, values = torch.randn(2, texts, HEADS, tokens, WIDTH, device=DEVICE).bfloat16()
    return keys, values


def packed(dense: tuple[Tensor, Tensor], bits: int, first: Tensor) -> tuple[Heads, Heads]:
    """The same in few bits."""
    made = []
    for x in dense:
        texts, heads, tokens, width = x.shape
        room = kv_cache.empty((texts, heads, tokens, width), bits, device=x.device)
        kv_cache.store([room], [x], 0, first)
        made.append(room)
    return made[0], made[1]


def distance(query: Tensor, heads: tuple[Heads, Heads], first: Tensor, options: dict[str, Any]) -> float:
    """Of the first text's heads: the relative error in the 2-norm."""
    alone = [h.texts(lambda tensor: tensor[:1]) for h in heads]
    exact = reference.attend(query[:1].double(), *alone, first[:1], dtype=torch.float64, **options)
    result = kv_cache.attend(query, *heads, first, **options)[:1]
    return float((result.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
