"""A small Llama, its batches, and what training makes of them: by the trainer, and by an ordinary loop."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from neuzip.kernels.linear_cross_entropy import linear_cross_entropy
from neuzip.kernels.quantizers.states import RngKey
from neuzip.train.optimizers import Optimizer, ParameterUpdate
from neuzip.train.trainer import train_compressed

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

FOR_A_GPU: dict[str, Any] = {
    "vocab_size": 5000, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
}  # fmt: skip


def llama(tied: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": tied, **changes})
    return transformers.LlamaForCausalLM(config).to(dtype)


def batches(steps: int, rows: int = 2, length: int = 12) -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (rows, length + 1), generator=chance) for _ in range(steps)]


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, p in model.named_parameters()
    }


def trained(model: Any, steps: int = 4, lr: float = 0.05, rows: int = 2, **options: Any) -> tuple[Any, ...]:
    """Losses and the bits of all weights."""
    trainer = train_compressed(model, **options)
    losses = [trainer.step(batch, lr) for batch in batches(steps, rows)]
    return losses, bits(trainer.release())


def plain(
    model: Any, optimizer: Optimizer, steps: int, lr: float = 0.05, rows: int = 2, clip: float | None = None,
    micro: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """What an ordinary loop makes of a Llama: one graph through all layers, all gradients at once."""
    model.train()
    parameters = list(model.named_parameters())
    states: dict[str, Any] = {name: optimizer.new_states(p.numel(), p.device) for name, p in parameters}
    losses = []
    for step, batch in enumerate(batches(steps, rows), 1):
        total, sums = 0.0, {}
        for part in batch.split(micro or rows):
            hidden = model.model(part[:, :-1]).last_hidden_state
            nll = linear_cross_entropy(
                hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight, part[:, 1:].reshape(-1),
                reduction="sum",
            )  # fmt: skip
            assert isinstance(nll, Tensor)
            loss = nll / batch[:, 1:].numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            for name, p in parameters:
                if micro:
                    assert p.grad is not None
                    sums[name] = sums.get(name, 0) + p.grad.float()
                    p.grad = None
        losses.append(total)
        gradients = {name: sums[name] if micro else p.grad for name, p in parameters}
        scale = None
        if clip is not None:
            norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()]
            squares = sum(norm.double().square() for norm in norms)
            norm = math.sqrt(float(squares))
            scale = torch.tensor(clip / norm) if norm > clip else None
        for number, (name, p) in enumerate(parameters):
            chance = RngKey(0, step, number)
            part = ParameterUpdate(
                p.detach().view(-1), gradients[name].view(-1), lr, chance, scale, p.dim() > 1
            )
            optimizer.update(part, states[name])
            p.grad = None
    return losses, bits(model)
