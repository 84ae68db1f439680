"""A trainer and an engine, two processes of torch.distributed: the script of a test in tests/runtime.

    torchrun --nproc-per-node 2 weight_sync.py CHECKPOINT

Process 0 trains with a master copy in fp32 and sends what changed in bf16, and in fp8 of one matrix.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from neuzip import delta

STEPS = 15
FP8 = "model.layers.0.mlp.up_proj.weight"


def published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights as the engine has them."""
    weights = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    return weights | {"fp8": weights[FP8].to(torch.float8_e4m3fn)}


def train(model: torch.nn.Module) -> None:
    """Send the deltas of STEPS steps, then leave out one, send it late, and send one twice."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    publisher = delta.Publisher(published(model))

    def step() -> torch.Tensor:
        tokens = torch.randint(0, 256, (1, 16))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return publisher.make(published(model))

    for _ in range(STEPS):
        delta.broadcast(step())
    compare(published(model))
    late, last = step(), step()
    for message in (last, late, last, last):
        delta.broadcast(message)
    compare(published(model))


def follow(model: torch.nn.Module) -> None:
    """Apply the deltas, and say what happens."""
    weights = published(model)
    follower = delta.Follower(weights)
    for _ in range(STEPS):
        follower.apply(delta.broadcast())
    print(f"engine: {follower.state.number} deltas, equal {compare(weights)}")
    refused(weights, follower, "lost")
    for _ in range(2):
        follower.apply(delta.broadcast())
    refused(weights, follower, "repeated")
    follower.check()
    print(f"engine: state {follower.state.number}, equal {compare(weights)}", flush=True)


def refused(weights: dict[str, torch.Tensor], follower: delta.Follower, word: str) -> None:
    """Receive a delta that is not the next one."""
    before = {name: w.clone() for name, w in weights.items()}
    try:
        follower.apply(delta.broadcast())
    except delta.BrokenChain as error:
        print(f"engine: {word}, unchanged {same(weights, before)}: {error.message.rpartition(': ')[2]}")


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(w.view(torch.uint8), others[name].view(torch.uint8)) for name, w in some.items())


def compare(weights: dict[str, torch.Tensor]) -> bool:
    """Whether both processes have the same bits."""
    theirs = {name: w.clone() for name, w in weights.items()}
    for name in sorted(theirs):
        dist.broadcast(theirs[name].view(torch.uint8), 0)
    return same(weights, theirs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    train(shared) if dist.get_rank() == 0 else follow(shared)
    dist.destroy_process_group()
