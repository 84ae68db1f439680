"""Peak memory and speed of full-parameter training: vanilla, layer by layer (LOMO), and held compressed.

    python benchmarks/train_memory.py llama-3-8b gpt-neo-2.7b llama-2-13b adamw bits resume activations
                                                         any of them
    torchrun --nproc-per-node 2 benchmarks/train_memory.py two-gpus
    python benchmarks/train_memory.py --tiny            all of it on a CPU, to see that it runs

Models have the published shapes and random weights; NeuZip's Table 1 has the same (1,024 tokens a step, SGD,
activation checkpointing, bf16). Vanilla is transformers' own forward pass, with checkpointing, and
torch.optim.SGD. LOMO is our trainer with plain arrays: the same code. "One buffer" decodes and codes in turn
with the work, not beside it. "Again" is the same run a second time, to see whether runs repeat;
"deterministic" is under torch's deterministic algorithms. All methods see the same batches, so that their
losses can be compared. The section "activations" has vanilla with and without checkpointing, on each model.
Every section is put into the place of its last run in benchmarks/results/train_memory.json.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # coded weights change in size
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for all, or cuBLAS would not be deterministic

import torch
from record import Environment, Measurement, save_sections
from transformers import AutoModelForCausalLM, GPTNeoConfig, LlamaConfig, PretrainedConfig

from neuzip.train.deterministic import deterministic_algorithms
from neuzip.train.trainer import train_compressed

SEQUENCE = 1024
ROWS = (1, 8)
WARM_UP, STEPS = 2, 6
LR = 1e-5
PAPER = {
    "gpt-neo-2.7b": {"vanilla": 11.22, "lomo": 6.97, "ours": 5.54},
    "llama-3-8b": {"vanilla": 30.97, "lomo": 19.47, "ours": 15.25},
    "llama-2-13b": {"lomo": 26.26, "ours": 18.58},
}
"""GiB, on an RTX A6000."""
METHODS = (
    "lomo", "lomo, again", "ours", "ours, one buffer", "vanilla", "vanilla, again", "lomo, deterministic",
    "ours, deterministic",
)  # fmt: skip
ALL_ACTIVATIONS = "vanilla, all activations"
"""Vanilla without checkpointing: Figure 2 of the paper."""


def shapes(tiny: bool) -> dict[str, PretrainedConfig]:
    """Configurations by name."""
    if tiny:
        small: dict[str, Any] = {
            "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": SEQUENCE,
        }  # fmt: skip
        neo = GPTNeoConfig(
            vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=SEQUENCE,
            attention_types=[[["global", "local"], 1]],
        )  # fmt: skip
        llama = LlamaConfig(**small)
        return {"gpt-neo-2.7b": neo, "llama-3-8b": llama, "llama-2-13b": llama, "llama-1b": llama}
    return {
        "gpt-neo-2.7b": GPTNeoConfig(
            vocab_size=50_257, hidden_size=2560, num_layers=32, num_heads=20, max_position_embeddings=2048,
            attention_types=[[["global", "local"], 16]], intermediate_size=10_240,
        ),
        "llama-3-8b": LlamaConfig(
            vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, rope_theta=500_000.0,
        ),
        "llama-2-13b": LlamaConfig(
            vocab_size=32_000, hidden_size=5120, intermediate_size=13_824, num_hidden_layers=40,
            num_attention_heads=40,
        ),
        "llama-1b": LlamaConfig(
            vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16,
            num_attention_heads=16, num_key_value_heads=8,
        ),
    }  # fmt: skip


def main() -> None:
    """Run the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help="models, activations, adamw, bits, resume, two-gpus")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on a CPU; nothing is saved")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if not arguments.tiny:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    configs = shapes(arguments.tiny)
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        **{name: lambda name=name: model_section(name, configs[name], device) for name in PAPER},
        "activations": lambda: activations_section(configs, device),
        "adamw": lambda: adamw_section(configs["llama-3-8b"], device),
        "bits": lambda: bits_section(configs["llama-1b"], device),
        "resume": lambda: resume_section(configs["llama-1b"], device),
        "two-gpus": lambda: ranks_section(configs["llama-1b"], device),
    }
    asked = arguments.sections or (list(sections)[:-1] if arguments.tiny else ["llama-3-8b"])
    for name in asked:
        rows = sections[name]()
        if arguments.tiny or int(os.environ.get("RANK", "0")):
            continue
        environment = Environment.here("neuzip-toolkit", "torch", "triton", "transformers", gpu=True)
        # A result without `filtered_head` is of a trainer whose default was to filter.
        facts = {"paper_gib": PAPER.get(name), "filtered_head": False}
        measured = {name: Measurement(environment, rows, facts)}
        print(f"saved {save_sections('train_memory', __doc__.splitlines()[0], measured)}", flush=True)


def made(config: PretrainedConfig, device: torch.device) -> Any:
    """A model of random weights in bf16."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def batches(
    config: PretrainedConfig, rows: int, count: int, device: torch.device, seed: int = 0
) -> list[Any]:
    """Windows [rows, SEQUENCE + 1] of random tokens."""
    chance = torch.Generator().manual_seed(seed)
    shape = (rows, SEQUENCE + 1)
    return [torch.randint(config.vocab_size, shape, generator=chance).to(device) for _ in range(count)]


def model_section(name: str, config: PretrainedConfig, device: torch.device) -> list[dict[str, Any]]:
    """All methods on one model, at all numbers of tokens."""
    found = []
    for method in METHODS:
        with deterministic_algorithms(method.endswith("deterministic")):
            model = made(config, device)
            step, facts = stepper(method, model, device)
            del model
            for rows in ROWS:
                row = {"model": name, "method": method, **facts, **timed(step, config, rows, device)}
                row["steps_as_the_peer"] = steps_as_the_peer(row, found)
                found.append(row)
                say(row)
            del step
        free(device)
    for rows in ROWS:
        speeds = {r["method"]: r["tokens_per_second"] for r in found if r["tokens"] == rows * SEQUENCE}
        for method in ("ours", "ours, one buffer"):
            ratio = speeds[method] / speeds["lomo"]
            print(f"{name}: {method} against LOMO at {rows * SEQUENCE:,} tokens: {ratio:.3f}", flush=True)
    return found


def activations_section(configs: dict[str, PretrainedConfig], device: torch.device) -> list[dict[str, Any]]:
    """Vanilla that keeps the activations of all layers, and that computes them again, on all models."""
    found: list[dict[str, Any]] = []
    for name in PAPER:
        for method in ("vanilla", ALL_ACTIVATIONS):
            step, facts = stepper(method, made(configs[name], device), device)
            for rows in ROWS:
                found.append(
                    {"model": name, "method": method, **facts, **timed(step, configs[name], rows, device)}
                )
                say(found[-1])
            del step
            free(device)
    return found


def steps_as_the_peer(row: dict[str, Any], before: list[dict[str, Any]]) -> int | None:
    """How many steps from the first on have the losses of the peer to the last bit; None without a peer.

    The peer is LOMO on the same batches: deterministic for a deterministic method, vanilla for vanilla.
    """
    method = row["method"]
    peer = "vanilla" if "vanilla" in method else "lomo"
    peer += ", deterministic" if method.endswith("deterministic") else ""
    losses = next(
        (r.get("losses") for r in before if (r["method"], r["tokens"]) == (peer, row["tokens"])), None
    )
    if losses is None or "losses" not in row:
        return None
    equal = [mine == other for mine, other in zip(row["losses"], losses, strict=True)]
    return equal.index(False) if False in equal else len(equal)


Step = Callable[[Any], float]


def stepper(
    method: str, model: Any, device: torch.device, optimizer: str = "sgd"
) -> tuple[Step, dict[str, Any]]:
    """A function that trains on a batch."""
    if method.startswith("vanilla"):
        if method != ALL_ACTIVATIONS:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        sgd = torch.optim.SGD(model.parameters(), lr=LR)

        def step(batch: Any) -> float:
            loss = model(input_ids=batch[:, :-1], labels=batch[:, :-1], use_cache=False).loss
            loss.backward()
            sgd.step()
            sgd.zero_grad(set_to_none=True)
            return float(loss.detach())

        return step, {}
    ahead = False if method.endswith("one buffer") else None
    trainer = train_compressed(model, optimizer, compressed=not method.startswith("lomo"), ahead=ahead)
    facts = {"weight_bytes": trainer.stored_bytes, "dense_weight_bytes": trainer.dense_bytes}
    return lambda batch: trainer.step(batch, LR), facts


def timed(step: Step, config: PretrainedConfig, rows: int, device: torch.device) -> dict[str, Any]:
    """Peak memory and the median time of a step, or that it does not fit."""
    free(device)
    given = batches(config, rows, WARM_UP + STEPS, device)
    seconds, losses = [], []
    try:
        for number, batch in enumerate(given):
            if number == WARM_UP and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            synchronize(device)
            began = time.perf_counter()
            losses.append(step(batch))
            synchronize(device)
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return {
            "tokens": rows * SEQUENCE,
            "seconds": None,
            "tokens_per_second": float("nan"),
            "peak_gib": None,
        }
    median = statistics.median(seconds[WARM_UP:])
    return {
        "tokens": rows * SEQUENCE,
        "seconds": median,
        "spread": [min(seconds[WARM_UP:]), max(seconds[WARM_UP:])],
        "tokens_per_second": rows * SEQUENCE / median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None,
        "losses": losses,
    }


def adamw_section(config: PretrainedConfig, device: torch.device) -> list[dict[str, Any]]:
    """AdamW with states in 8 bits on the 8B shapes."""
    step, facts = stepper("ours", made(config, device), device, "adamw8bit")
    row = {"model": "llama-3-8b", "method": "ours, adamw8bit", **facts, **timed(step, config, 1, device)}
    say(row)
    return [row]


def bits_section(config: PretrainedConfig, device: torch.device) -> list[dict[str, Any]]:
    """50 steps, compressed and not, deterministic: losses and a checksum of all weights."""
    with deterministic_algorithms():
        return [bits_row(optimizer, config, device) for optimizer in ("sgd", "adamw8bit")]


def bits_row(optimizer: str, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """One optimizer, compressed and not."""
    found = {}
    for compressed in (True, False):
        trainer = train_compressed(made(config, device), optimizer, compressed=compressed)
        given = batches(config, 1, 5, device)
        losses = [trainer.step(given[i % 5], 1e-2 if optimizer == "sgd" else 1e-4) for i in range(50)]
        found[compressed] = losses, checksum(trainer.release())
        del trainer
        free(device)
    row = {
        "optimizer": optimizer, "steps": 50, "deterministic": True,
        "losses_equal": found[True][0] == found[False][0], "weights_equal": found[True][1] == found[False][1],
        "first": found[True][0][0], "last": found[True][0][-1], "losses": found[True][0],
    }  # fmt: skip
    print({name: value for name, value in row.items() if name != "losses"}, flush=True)
    return row


def resume_section(config: PretrainedConfig, device: torch.device) -> list[dict[str, Any]]:
    """10 steps twice, and in two halves with a checkpoint between them: whether the bits are the same."""
    return [resume_row(wanted, config, device) for wanted in (False, True)]


def resume_row(wanted: bool, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """With deterministic algorithms, or without."""
    steps, optimizer, lr = 10, "adamw8bit", 1e-4
    given = batches(config, 2, steps, device)

    def finished(trainer: Any, rest: list[Any], losses: list[float]) -> tuple[list[float], str]:
        losses += [trainer.step(batch, lr) for batch in rest]
        return losses, checksum(trainer.release())

    with deterministic_algorithms(wanted), tempfile.TemporaryDirectory() as folder:
        runs = []
        for _ in range(2):
            runs.append(finished(train_compressed(made(config, device), optimizer), given, []))
            free(device)
        trainer = train_compressed(made(config, device), optimizer)
        begun = [trainer.step(batch, lr) for batch in given[: steps // 2]]
        trainer.save(folder)
        del trainer
        free(device)
        trainer = train_compressed(made(config, device), optimizer)
        trainer.load(folder)
        resumed = finished(trainer, given[steps // 2 :], begun)
        del trainer
        free(device)
    row = {
        "optimizer": optimizer, "steps": steps, "deterministic": wanted, "repeats": runs[0] == runs[1],
        "resumes": resumed == runs[0], "losses": [runs[0][0], runs[1][0], resumed[0]],
    }  # fmt: skip
    print({name: value for name, value in row.items() if name != "losses"}, flush=True)
    return row


def ranks_section(config: PretrainedConfig, device: torch.device) -> list[dict[str, Any]]:
    """Several GPUs, a batch each: speed, and that losses and weights are the same on all."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = train_compressed(made(config, device), "sgd")
    given = batches(config, 8, WARM_UP + STEPS, device, seed=rank)
    seconds, losses = [], []
    for batch in given:
        synchronize(device)
        began = time.perf_counter()
        losses.append(trainer.step(batch, LR))
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    all_of_them: list[Any] = [None] * world
    dist.all_gather_object(all_of_them, (losses, checksum(trainer.release())))
    median = statistics.median(seconds[WARM_UP:])
    row = {
        "processes": world, "tokens": world * 8 * SEQUENCE, "seconds": median,
        "tokens_per_second": world * 8 * SEQUENCE / median,
        "equal_on_all": all(one == all_of_them[0] for one in all_of_them),
    }  # fmt: skip
    if rank == 0:
        print(row, flush=True)
    dist.destroy_process_group()
    return [row]


def checksum(model: Any) -> str:
    """Of the bits of all weights."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def say(row: dict[str, Any]) -> None:
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    print(
        f"{row['model']:14}{row['method']:18}{row['tokens']:7,} tokens"
        f"{row['tokens_per_second']:12,.0f} tokens/s{peak:>8} GiB",
        flush=True,
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
