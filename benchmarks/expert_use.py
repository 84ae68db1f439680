"""Plans for a mixture of experts: schemes by how often experts are chosen, and one scheme for all of a layer.

    python benchmarks/expert_use.py $NEUZIP_DATA [--steps N]

The mixture is made here. Each layer of the demo becomes a layer of 16 experts, 2 per token, each of a third
of the neurons that the layer had. It is trained for some steps on train-mix.jsonl.gz, without a loss that
balances the experts. Plans are searched on wiki.valid.raw of WikiText-2, and measured there and on
wiki.test.raw.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from record import Environment, Measurement, save
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from neuzip.checkpoints import compress_checkpoint
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import Text, read_text
from neuzip.runtime.hf.tokenizer import load_tokenizer

WHAT = "plans for a trained mixture of experts, with and without schemes by the use of experts"
EXPERTS, CHOSEN, NEURONS = 16, 2, 128
WINDOW, BATCH, RATE = 128, 8, 1e-3
DOCUMENTS = 400
TOKENS = 16384
TARGETS: tuple[dict[str, Any], ...] = ({"max_kld": 0.01}, {"target_size": "35%"}, {"target_size": "45%"})


def upcycled() -> PreTrainedModel:
    """The demo with experts in place of its MLPs, in fp32: each has some neurons of the whole layer."""
    dense: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    old = dense.config
    config = Qwen3MoeConfig(
        vocab_size=old.vocab_size, hidden_size=old.hidden_size, num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads, num_key_value_heads=old.num_key_value_heads,
        head_dim=old.head_dim, intermediate_size=old.intermediate_size, moe_intermediate_size=NEURONS,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True, rms_norm_eps=old.rms_norm_eps,
        max_position_embeddings=old.max_position_embeddings, rope_parameters=old.rope_parameters,
        tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("eager")
    shared = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    model.load_state_dict(shared, strict=False)
    with torch.no_grad():
        for whole, layer in zip(dense.model.layers, model.model.layers, strict=True):
            mlp, experts = whole.mlp, layer.mlp.experts
            for number in range(EXPERTS):
                picked = torch.randperm(old.intermediate_size)[:NEURONS]
                gate_up = torch.cat([mlp.gate_proj.weight[picked], mlp.up_proj.weight[picked]])
                experts.gate_up_proj[number] = gate_up
                experts.down_proj[number] = mlp.down_proj.weight[:, picked] * old.intermediate_size / NEURONS
            layer.mlp.gate.weight.normal_(std=0.05)
    return model  # type: ignore[no-any-return]


def train(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> float:
    """Train a model on random windows of a text, and give the loss of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    loss = torch.zeros(())
    for step in range(steps):
        starts = torch.randint(len(ids) - WINDOW, (BATCH,))
        batch = torch.stack([ids[start : start + WINDOW] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps) + RATE / 100
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return loss.item()


def training_ids(path: Path) -> torch.Tensor:
    """The tokens of the first documents of a text, int64 [n]."""
    tokenizer = load_tokenizer(CHECKPOINT)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(DOCUMENTS), strict=False)]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([number for of_text in ids for number in of_text])


def named(path: Path) -> Text:
    """A text called by its file, not by where it lies on this machine."""
    return replace(read_text(str(path)), name=path.name)


def main() -> None:
    """Train, compress, compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    environment = Environment.here("neuzip-toolkit", "torch", "transformers")
    torch.manual_seed(0)
    valid, test = (arguments.data / "wikitext-2" / f"wiki.{part}.raw" for part in ("valid", "test"))
    with tempfile.TemporaryDirectory() as folder:
        mixture = Path(folder) / "mixture"
        model = upcycled()
        loss = train(model, training_ids(arguments.data / "train-mix.jsonl.gz"), arguments.steps)
        model.to(torch.bfloat16).save_pretrained(mixture)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(CHECKPOINT / name, mixture)
        rows, classes = compared(mixture, valid, test)
    facts = {
        "steps": arguments.steps, "training_loss": loss, "tokens": TOKENS, "experts": EXPERTS,
        "experts_per_token": CHOSEN, "classes": classes,
    }  # fmt: skip
    print(f"saved {save('expert_use', WHAT, Measurement(environment, rows, facts))}")


def compared(mixture: Path, valid: Path, test: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each target, with schemes by use and without; and the classes of the first target."""
    other = BaselineComparison(mixture, named(test), max_tokens=TOKENS, device="cpu")
    rows, classes = [], []
    for target in TARGETS:
        for use in ("none", "auto"):
            result = compress_checkpoint(
                mixture, mixture.with_name("small"), **target, text=valid, scheme="rounded", expert_use=use,
                device="cpu",
                overwrite=True,
            )  # fmt: skip
            delivered = result.target
            assert delivered is not None and delivered.comparison is not None and delivered.search is not None
            classes = classes or [asdict(one) for one in delivered.search.experts]
            kld, elsewhere = delivered.comparison.kld.mean, other.run(result.dst).comparison.kld.mean
            rows.append(
                {
                    "target": " ".join(f"{name}={value}" for name, value in target.items()),
                    "expert_use": use,
                    "ratio": result.ratio,
                    "bits_per_weight": result.bits_per_weight,
                    "kld": kld.value,
                    "kld_standard_error": kld.standard_error,
                    "other_kld": elsewhere.value,
                    "other_kld_standard_error": elsewhere.standard_error,
                }
            )
            print(rows[-1], flush=True)
    return rows, classes


if __name__ == "__main__":
    main()
