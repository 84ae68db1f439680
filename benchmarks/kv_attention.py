"""Attention of one new token over keys and values in few bits, beside torch's over bf16, on one GPU.

    python benchmarks/kv_attention.py [--rounds 30] [--cases 1x32768,16x32768]

Each side is what a layer calls: `kv_cache.attend`, both of its kernels, and scaled_dot_product_attention of
torch with the queries of a head as its rows, as transformers calls it. `store` is what a step adds: keys
and values of one token quantised and packed. Forms are those of a cache: rotated heads in groups,
whose first tokens are kept whole, and the plain one of BitNet a4.8. The calls of a case lie in one
CUDA graph, each with keys and values of its own, so many that nothing is found in the L2. The sides take
turns; times are medians of CUDA events. Kernels are compiled side by side before.

What is not right is not timed: it ends the run. Keys and values must be stored with the bits of torch on a
CPU. The relative error of attention against fp64 on the same dequantised numbers must be at most 0.5 %, and
at most 1.5 times that of torch's attention over these numbers in bf16. Random values average out, to 1/100 of
their size over 32,768 tokens, so that an error which all of them have in common grows with a text's length.

The result is benchmarks/results/kv_attention.json; with `--cases` nothing is saved. The limit is the bytes
read at the speed of a device copy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compile_first import run_side_by_side
from gpu_codec import L2, copy_speed, stream
from packed_linear import times
from record import Environment, Measurement, save

from neuzip.kernels import kv_cache
from neuzip.kernels.kv_cache import CenterPath, Heads, reference
from neuzip.kernels.kv_cache import ops as torch_ops
from neuzip.runtime.hf import kv_layers
from neuzip.runtime.hf.rotary import ChannelRates

Tensor = torch.Tensor
Row = dict[str, Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES = ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (16, 32768), (16, 131072))
"""Texts, and tokens of each."""
QUERIES, HEADS, WIDTH = 32, 8, 128
FORMS = (
    ("rotated", 8), ("rotated", 4), ("rotated", 3), ("rotated", 2), ("a4.8", 8), ("a4.8", 4), ("a4.8", 3),
)  # fmt: skip
"""Forms of a cache, and bits of its codes."""
FARTHEST, FARTHER = 5e-3, 1.5
"""The largest relative error, and the largest in units of the error of torch's attention."""
AIMS = {(1, 32768): (3.0, 5.0), (16, 32768): (1.1, 2.0)}
"""By case the speedup that 4 bits must have, and the one that is better still."""


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cases", help="only these, TEXTSxTOKENS each, such as 1x32768,16x32768")
    parser.add_argument("--compile", help="compile the kernels of a form and bits only, such as rotated-4")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.compile:
        form, bits = arguments.compile.split("-")
        with torch.cuda.stream(stream()):
            for texts in (1, 16):
                case(texts, 4096, 1, ((form, int(bits)),))
        return
    cases = CASES if arguments.cases is None else chosen_cases(arguments.cases)
    environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=True, needs_commit=cases is CASES)
    run_side_by_side(str(Path(__file__)), [["--compile", f"{form}-{bits}"] for form, bits in FORMS])
    results: list[Row] = []
    with torch.cuda.stream(stream()):
        for form, bits in FORMS:
            check_stored(form, bits)
        for texts, tokens in cases:
            for row in case(texts, tokens, arguments.rounds, FORMS):
                results.append(row)
                print("  ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)
        copy = copy_speed()
    facts = {
        "queries": QUERIES, "heads": HEADS, "width": WIDTH, "rounds": arguments.rounds,
        "device_copy_gb_s": copy,
    }  # fmt: skip
    if cases is CASES:
        path = save("kv_attention", __doc__.splitlines()[0], Measurement(environment, results, facts))
        print(f"saved {path}")
    for row in results:
        if row["bits"] == 4 and (row["texts"], row["tokens"]) in AIMS:
            must, stretch = AIMS[row["texts"], row["tokens"]]
            met = (
                "stretch met" if row["speedup"] >= stretch else "met" if row["speedup"] >= must else "MISSED"
            )
            print(
                f"{row['form']}, {row['texts']} texts: {row['speedup']:.2f}x, must {must}, {stretch}: {met}"
            )


def chosen_cases(text: str) -> tuple[tuple[int, int], ...]:
    """Texts and tokens of `1x32768,16x32768`."""
    pairs = (case.split("x") for case in text.split(","))
    return tuple((int(texts), int(tokens)) for texts, tokens in pairs)


def shown(value: object) -> str:
    """A figure in few digits, or a word."""
    return value if isinstance(value, str) else f"{value:.4g}"


def case(texts: int, tokens: int, rounds: int, forms: tuple[tuple[str, int], ...]) -> list[Row]:
    """A row for each form and number of bits."""
    plain_bytes = 2 * 2 * texts * HEADS * tokens * WIDTH
    dense = [states(texts, tokens) for _ in range(copies(plain_bytes))]
    query = torch.randn(texts, QUERIES, WIDTH, device=DEVICE).bfloat16()
    rows = query.view(texts, HEADS, -1, WIDTH)
    first = torch.zeros(texts, dtype=torch.int64, device=DEVICE)
    length = torch.tensor(tokens, device=DEVICE)
    options: dict[str, Any] = {"scaling": WIDTH**-0.5, "length": length}
    found = []
    for form, bits in forms:
        few = [packed(dense[0], form, bits, first)]
        few_bytes = sum(h.nbytes for h in few[0])
        few += [packed(dense[0], form, bits, first) for _ in range(copies(few_bytes) - 1)]
        error, torch_error = distances(query, few[0], first, options)
        if not (error <= FARTHEST and error <= FARTHER * torch_error):
            raise SystemExit(
                f"{texts} x {tokens} tokens, {form}, {bits} bits: relative error {error:.2e}, not timed;"
                f" torch's in bf16 {torch_error:.2e}"
            )
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
                "texts": texts, "tokens": tokens, "form": form, "bits": bits, "sdpa_us": theirs,
                "attend_us": ours, "store_us": stored, "speedup": theirs / ours, "error": error,
                "sdpa_error": torch_error,
                "bytes": few_bytes, "bytes_bf16": plain_bytes, "gb_s_read": few_bytes / ours / 1e3,
                "sdpa_gb_s_read": plain_bytes / theirs / 1e3,
            }
        )  # fmt: skip
    return found


def copies(nbytes: int) -> int:
    """So many that together they do not fit into the L2."""
    return max(2, -(-4 * L2 // nbytes))


def states(texts: int, tokens: int, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    """Keys and values that are made up, with a channel of keys far larger than the others."""
    shape = texts, HEADS, tokens, WIDTH
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    keys[..., WIDTH // 2 + 3] += 6
    return keys, values


def empty(x: Tensor, form: str, bits: int, *, are_keys: bool) -> Heads:
    """Memory for the few bits of x [B, H, N, width], keys with a center that turns as those of Llama 3 do."""
    batch, heads, tokens, width = x.shape
    shape = batch, heads, tokens, width
    if form == "a4.8":
        return kv_cache.empty(shape, bits, device=x.device)
    heads = kv_layers.FORMS["rotated"]
    pairs = width // 2
    channels = ChannelRates(width, 5e5 ** (-torch.arange(pairs, dtype=torch.float64) / pairs), 0, pairs)
    path = CenterPath.of(
        channels.still(heads.still_wavelength), rates=channels.rates, block=heads.center_block, tokens=tokens,
    )  # fmt: skip
    group = heads.key_group if are_keys else heads.value_group
    return kv_cache.empty(
        shape, bits, group=group, whole=heads.whole, path=path if are_keys else None, dtype=x.dtype,
        device=x.device,
    )  # fmt: skip


def packed(dense: tuple[Tensor, Tensor], form: str, bits: int, first: Tensor) -> tuple[Heads, Heads]:
    """The same in few bits."""
    keys, values = (empty(x, form, bits, are_keys=n == 0) for n, x in enumerate(dense))
    kv_cache.store([keys, values], dense, 0, first)
    return keys, values


def check_stored(form: str, bits: int) -> None:
    """End the run unless tokens, many and the last alone, are stored with the bits of torch on a CPU."""
    x = states(2, 140, "cpu")
    first = torch.tensor([0, 9])
    heads = [empty(one, form, bits, are_keys=n == 0) for n, one in enumerate(x)]
    for one, numbers in zip(heads, x, strict=True):
        torch_ops.store(one, numbers, 0, first)
    given = [one.to(DEVICE) for one in x]
    cards = [empty(one, form, bits, are_keys=n == 0) for n, one in enumerate(given)]
    kv_cache.store(cards, [one[:, :, :139] for one in given], 0, first.to(DEVICE))
    at = torch.tensor(139, device=DEVICE)
    kv_cache.store(cards, [one[:, :, 139:] for one in given], at, first.to(DEVICE))
    for one, card in zip(heads, cards, strict=True):
        for name in torch_ops.OF_TOKENS + torch_ops.OF_TEXTS:
            expected, result = getattr(one, name), getattr(card, name)
            if expected is not None and not torch.equal(expected, result.cpu()):
                raise SystemExit(f"{form}, {bits} bits: {name} is not stored as on a CPU, nothing is timed")


def distances(
    query: Tensor, heads: tuple[Heads, Heads], first: Tensor, options: dict[str, Any]
) -> tuple[float, float]:
    """Relative errors in the 2-norm over the first text's heads: ours, and torch's over the same in bf16."""
    alone = [h.texts(lambda tensor: tensor[:1]) for h in heads]
    exact = reference.attend(query[:1].double(), *alone, first[:1], dtype=torch.float64, **options)
    result = kv_cache.attend(query, *heads, first, **options)[:1]
    dense = [kv_cache.load(h, first[:1], torch.bfloat16) for h in alone]
    by_torch = F.scaled_dot_product_attention(query[:1].view(1, HEADS, -1, WIDTH), *dense).view_as(result)
    ours, theirs = (float((x.double() - exact).norm() / exact.norm()) for x in (result, by_torch))
    return ours, theirs


if __name__ == "__main__":
    main()
