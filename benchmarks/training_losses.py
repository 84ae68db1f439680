"""Losses of pre-training by vanilla, LOMO and NeuZip on one text, as in Table 1 of NeuZip, in small.

    python benchmarks/training_losses.py [--steps 400] [--seeds 0,1,2] [--lr 0.03] [--device cuda]

The result is benchmarks/results/training_losses.json. A Llama of the shapes of wikilm-26m is trained from
random weights in bf16 with SGD, under torch's deterministic algorithms. The methods have the same first
weights and the same windows of train-mix.jsonl.gz in the same order:

vanilla  transformers' forward pass, torch's gradients of all weights at once, torch.optim.SGD
lomo     neuzip's trainer with plain arrays: a layer is updated before the gradients of the next are there
ours     neuzip's trainer with losslessly compressed arrays

A row has the loss of every step and the validation loss after the last, on windows of wiki.valid.raw. With
--device cuda it also has the peak memory of a step: weights, gradients and activations.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS would not be deterministic

import torch
import torch.nn.functional as F
from record import Environment, Measurement, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.train.deterministic import deterministic_algorithms
from neuzip.train.text import TrainingWindows, read_documents, tokenise
from neuzip.train.trainer import train_compressed

METHODS = ("vanilla", "lomo", "ours")

LENGTH, BATCH = 512, 8

VALIDATION_WINDOWS = 64

Step = Callable[[Tensor], float]


def main() -> None:
    """Train, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--device", default="cuda")
    data = Path(os.environ.get("NEUZIP_DATA", "NEUZIP_DATA-is-not-set"))
    parser.add_argument("--text", type=Path, default=data / "train-mix.jsonl.gz")
    parser.add_argument("--validation", type=Path, default=data / "wikitext-2" / "wiki.valid.raw")
    parser.add_argument("--shapes", type=Path, default=data / "wikilm-26m", help="config and tokenizer")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    environment = Environment.here(
        "neuzip-toolkit", "torch", "transformers", gpu=device.type == "cuda", needs_commit=True
    )
    tokenizer = load_tokenizer(arguments.shapes)
    ids, held_out = (
        tokenise(tokenizer, read_documents(text)) for text in (arguments.text, arguments.validation)
    )
    validation = TrainingWindows.of(held_out, length=LENGTH, batch=VALIDATION_WINDOWS).batch(0)
    rows = []
    for seed in map(int, arguments.seeds.split(",")):
        windows = TrainingWindows.of(ids, length=LENGTH, batch=BATCH, seed=seed)
        for method in METHODS:
            model = made(arguments.shapes, seed, device)
            with deterministic_algorithms():
                row = trained(method, model, windows, arguments.steps, arguments.lr, validation)
            rows.append({"seed": seed, "method": method, **row})
            print({key: value for key, value in rows[-1].items() if key != "losses"}, flush=True)
    facts = {
        "text": arguments.text.name, "validation_text": arguments.validation.name,
        "validation_tokens": validation[:, 1:].numel(), "steps": arguments.steps,
        "tokens_a_step": LENGTH * BATCH, "lr": arguments.lr, "optimizer": "sgd",
    }  # fmt: skip
    what = "losses of pre-training by vanilla, LOMO and NeuZip"
    print(f"saved {save('training_losses', what, Measurement(environment, rows, facts))}")


def made(shapes: Path, seed: int, device: torch.device) -> PreTrainedModel:
    """A model of these shapes with random weights, without dropout."""
    config = LlamaConfig.from_pretrained(shapes)
    config.attention_dropout = 0.0
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(torch.bfloat16).to(device)


def trained(
    method: str, model: PreTrainedModel, windows: TrainingWindows, steps: int, lr: float, validation: Tensor
) -> dict[str, Any]:
    """Losses of the steps of a training, of the trained model on windows [N, length + 1], and peak memory."""
    device = model.device
    step, model_after = stepper(method, model, lr)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses = [step(windows.batch(number).to(device)) for number in range(steps)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {"validation_loss": validation_loss(model_after(), validation), "peak_gib": peak, "losses": losses}


def stepper(method: str, model: PreTrainedModel, lr: float) -> tuple[Step, Callable[[], PreTrainedModel]]:
    """A function that trains on windows [N, length + 1], and one that gives the trained model."""
    if method == "vanilla":
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        model.train()

        def step(batch: Tensor) -> float:
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
            sgd.zero_grad(set_to_none=True)
            return float(loss.detach())

        return step, lambda: model
    trainer = train_compressed(model, "sgd", compressed=method == "ours")
    return lambda batch: trainer.step(batch, lr), trainer.release


def loss_of(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """The mean loss of the tokens of windows [N, length + 1], behind the first of each."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def validation_loss(model: PreTrainedModel, windows: Tensor) -> float:
    """The mean loss of a model on windows [N, length + 1], in nats per token."""
    model.eval()  # type: ignore[no-untyped-call]
    losses = []
    with torch.inference_mode():
        for number in range(len(windows)):
            losses.append(float(loss_of(model, windows[number : number + 1].to(model.device))))
    return statistics.fmean(losses)


if __name__ == "__main__":
    main()
