"""Sparse deltas of weights in memory, beside a raw sparse patch: int32 indices and the new values.

    NEUZIP_DATA=... python benchmarks/weight_sync.py --sections bytes          # on a CPU
    python benchmarks/weight_sync.py --sections speed [--rounds 10] [--layers 32]  # on a GPU

bytes  wikilm-26m (bf16, with a master copy in fp32) takes steps of AdamW on 4 x 128 tokens of WikiText-2, and
       the weights before and after a step make a delta.
speed  Weights have the sizes of Llama 3.1 8B and are Gaussian, in bf16. 1 and 5 percent of them change by
       1, 2, 3 or 40 units of the last place, as often as in the first step of section `bytes`. A delta and a
       patch there and back are applied in turns. Nothing is timed before both have restored all bits.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from gpu_codec import llama_8b
from record import Environment, Measurement, save_sections, spread

from neuzip import delta
from neuzip.runtime.delta.messages import WeightState, follow
from neuzip.runtime.delta.named_weights import NamedWeights

Weights = dict[str, torch.Tensor]
Patch = dict[str, tuple[torch.Tensor, torch.Tensor]]

STEPS = (1, 5)
LEARNING_RATES = (1e-6, 5e-6)
SHARES = (0.01, 0.05)

UNITS, CHANCES = (1, 2, 3, 40), (0.75, 0.13, 0.06, 0.06)
"""By how many units of the last place weights change, and how often."""

LAYERS = 32


def main() -> None:
    """Measure the sections and write them down."""
    sections: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
        "bytes": real_steps,
        "speed": speeds,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--device", default="cuda", help="cpu tries the script out on narrow tensors and saves nothing"
    )
    arguments = parser.parse_args()
    for name in arguments.sections:
        on_gpu = name == "speed" and arguments.device != "cpu"
        environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=on_gpu, needs_commit=True)
        rows = sections[name](arguments)
        for row in rows:
            print(row, flush=True)
        if name == "bytes" or on_gpu:
            facts = {"rounds": arguments.rounds, "layers": arguments.layers} if on_gpu else {}
            what = "sparse deltas of weights, and raw patches of int32 indices and bf16 values"
            print(save_sections("weight_sync", what, {name: Measurement(environment, rows, facts)}))


def real_steps(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes of the deltas of steps of a real training."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = Path(os.environ["NEUZIP_DATA"])
    text = (data / "wikitext-2" / "wiki.valid.raw").read_text()[:400_000]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(data / "wikilm-26m")(text).input_ids)
    rows = []
    for rate in LEARNING_RATES:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(data / "wikilm-26m", dtype=torch.float32).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        last = published(model)
        publisher = delta.Publisher(last)
        for step in range(1, max(STEPS) + 1):
            starts = torch.randint(0, len(tokens) - 129, (4,)).tolist()
            batch = torch.stack([tokens[at : at + 128] for at in starts])
            model(batch, labels=batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            old, last = last, published(model)
            message = publisher.make(last)
            if step in STEPS:
                rows.append({"learning_rate": rate, "step": step, **sizes(old, last, message)})
    return rows


def published(model: torch.nn.Module) -> Weights:
    """The weights in bf16."""
    return {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}


def sizes(old: Weights, new: Weights, message: torch.Tensor) -> dict[str, Any]:
    """Bytes of a delta and of the patch. SystemExit unless both give the new weights."""
    patch, weights = raw_patch(old, new), {name: w.clone() for name, w in old.items()}
    delta.apply(weights, message)
    require_equal(weights, new)
    apply_patch(old, patch)
    require_equal(old, new)
    count = sum(w.numel() for w in new.values())
    patch_bytes = sum(i.nbytes + v.nbytes for i, v in patch.values())
    return {
        "weights": count,
        "changed_share": sum(i.numel() for i, _ in patch.values()) / count,
        "delta_bytes": message.numel(),
        "patch_bytes": patch_bytes,
        "ratio": message.numel() / patch_bytes,
    }


def raw_patch(old: Weights, new: Weights) -> Patch:
    """Indices of the changed weights, int32, and their new values, for each tensor."""
    patch = {}
    for name, a in old.items():
        b = new[name].view(-1)
        indices = (a.view(-1).view(torch.int16) != b.view(torch.int16)).nonzero().view(-1)
        patch[name] = indices.to(torch.int32), b[indices]
    return patch


def apply_patch(weights: Weights, patch: Patch) -> None:
    """Write the values of a patch."""
    for name, (indices, values) in patch.items():
        weights[name].view(-1).index_copy_(0, indices.long(), values)


def require_equal(weights: Weights, new: Weights) -> None:
    """SystemExit unless all bits are the same."""
    for name, w in weights.items():
        if not torch.equal(w.view(torch.int16), new[name].view(torch.int16)):
            raise SystemExit(f"{name}: is not restored")


def stepped(weights: Weights, share: float) -> Weights:
    """Weights of which a share has changed."""
    chances = torch.tensor(CHANCES, device=next(iter(weights.values())).device)
    units = torch.tensor(UNITS, dtype=torch.int16, device=chances.device)
    new = {}
    for name, w in weights.items():
        bits = w.view(-1).view(torch.int16).clone()
        at = (torch.rand(bits.shape, device=w.device) < share).nonzero().view(-1)
        if at.numel():
            drawn = torch.bucketize(torch.rand(at.shape, device=w.device), chances.cumsum(0))
            step = units[drawn.clamp(max=len(UNITS) - 1)]
            bits[at] += step * (1 - 2 * torch.randint(0, 2, at.shape, dtype=torch.int16, device=w.device))
        new[name] = bits.view(torch.bfloat16).view(w.shape)
    return new


def speeds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Times to make and apply deltas and patches there and back."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    old = {
        name: torch.empty(numel, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        for name, numel in llama_8b(arguments.layers, narrow=device.type == "cpu").items()
    }
    return [{"share": share, **speed(old, stepped(old, share), 2 * arguments.rounds)} for share in SHARES]


def speed(old: Weights, new: Weights, rounds: int) -> dict[str, Any]:
    """Bytes and speeds of deltas and patches between two states, in GB/s of weights."""
    row = sizes({name: w.clone() for name, w in old.items()}, new, delta.make(old, new))
    nbytes = 2 * row["weights"]
    weights = NamedWeights({name: w.clone() for name, w in old.items()}, "weights")
    tensors = dict(zip(weights.names, weights.tensors, strict=True))
    first = WeightState(0, weights.digest())
    there, back = delta.make(old, new), delta.make(new, old, number=2)
    publisher, next_weights = delta.Publisher(old), cycle((new, old))
    patches = raw_patch(old, new), raw_patch(new, old)
    actions: dict[str, Callable[[], object]] = {
        "make": lambda: publisher.make(next(next_weights)),
        "apply": followed(weights, first, there, back).__next__,
        "patch_make": partial(raw_patch, old, new),
        "patch_apply": patched(tensors, patches).__next__,
        "digest": weights.digest,
    }
    for name, action in actions.items():
        speeds_of_action = [nbytes / 1e9 / seconds for seconds in timed(action, weights.device, rounds)]
        row |= spread(speeds_of_action, f"{name}_gb_s")
    require_equal(tensors, old)
    return row


def followed(
    weights: NamedWeights, first: WeightState, there: torch.Tensor, back: torch.Tensor
) -> Iterator[None]:
    """Apply a delta, and the one that undoes it, and so on."""
    while True:
        state = follow(weights, first, there).state
        yield
        follow(weights, state, back)
        yield


def patched(weights: Weights, patches: tuple[Patch, Patch]) -> Iterator[None]:
    """Apply a patch, and the one that undoes it, and so on."""
    while True:
        for patch in patches:
            apply_patch(weights, patch)
            yield


def timed(action: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Seconds of an action, after two that warm up."""
    times = []
    for _ in range(rounds + 2):
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times[2:]


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
