"""Small ternary models trained from random weights: the ablations of BitNet a4.8 (arXiv 2411.04965).

    python benchmarks/bitnet_training.py RUNS --size tiny --seeds 0,1            on a CPU
    python benchmarks/bitnet_training.py RUNS --size 30M --seeds 0 --budget 440  on a GPU
    python benchmarks/bitnet_training.py RUNS --size tiny --seeds 0,1 --report   saves a section of the result

A run is one variant and one seed, which decides the first weights and the order of windows for all variants.
A run that RUNS has is not made again, and none is begun that would end after the budget. Text is documents of
$NEUZIP_DATA/train-mix.jsonl.gz in an order drawn once; every 20th of them is held out.

variant       what it is                                                                      for
b1.58         all steps with int8                                                             Tables 1, 2
              second stages: the last 5 % of the steps with a4.8, a4.8-fp4, or a4.8 with      Tables 1 to 4
              all inputs of o_proj in int8; the inputs of b1.58's projections                 Figures 2, 3
dense         a Llama of these sizes, SiLU, with the same learning rates                      Table 1
hybrid        a4.8 in all steps, as in the following, without a cooldown                      Figures 4 to 6
int4, fp4     one of them everywhere; at down_proj int4 with twice the mean, as in the paper  Figure 4
down-...      another quantiser for down_proj; swish in place of squared ReLU                 Figure 5
inputs-...    another quantiser for qkv, gate and up                                          Figure 6

The paper trains its ablations for 25 to 50 billion tokens, at 700M to 3B.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitnet_inputs import input_statistics
from record import ROOT, Environment, Measurement, save_sections
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from neuzip.compress.workspace import write_file
from neuzip.errors import NeuzipError
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.perplexity import token_losses
from neuzip.eval.measures.windows import cut
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import QuantizedTokens
from neuzip.runtime.activations import CLAMPED, FOUR_BITS, Activations, site_of
from neuzip.runtime.hf.sparsity import sparsity
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.train.loop import Schedule, run
from neuzip.train.optimizers import AdamW
from neuzip.train.presets import BITNET, BitNetRecipe
from neuzip.train.recovery.latent import runnable
from neuzip.train.scratch import random_model
from neuzip.train.ternary_training import TernaryStages, latent_layers, make_ternary, set_activations
from neuzip.train.text import TrainingWindows, read_documents, tokenise
from neuzip.train.trainer import Trainer, train_compressed

CHECKPOINT = ROOT / "eval" / "demo" / "checkpoint"
"""The demo, whose tokenizer has 1,024 tokens."""

WHAT = "ternary models trained from random weights by the recipes of BitNet a4.8: losses by quantiser"


@dataclass(frozen=True)
class Size:
    """A model, and how long it is trained."""

    recipe: BitNetRecipe
    steps: int
    batch: int
    window: int
    held_out_tokens: int
    tokenizer: str


SIZES = {
    "test": Size(BitNetRecipe(64, 64, 1, 1, 1.5e-3, 1e-3), 20, 2, 16, 64, "demo"),
    "tiny": Size(BitNetRecipe(128, 384, 2, 4, 1.5e-3, 1e-3), 100, 4, 128, 8_192, "demo"),
    "30M": Size(BITNET["bitnet-a4.8-700m"].scaled(1 / 3), 600, 32, 256, 131_072, "wikilm-26m"),
}
"""By name; "test" is for a test of this script, in which nothing can be seen."""

SOURCES = ("train", "kernels/quantizers", "runtime/activations.py", "runtime/bitlinear.py", "eval/measures")
"""What makes the runs: runs of several commits are of one result if these are the same in all of them."""

WARM_UP = 0.1
"""Share of the steps in which the learning rate rises. The paper has 375 steps, of about 100,000."""

WEIGHT_DECAY = 0.1
EVERY = 20
MOST_TOKENS = 4_000_000
"""Tokens of training text, at most: longer runs read it again."""

LAST = 0.1
"""Share of the steps whose mean loss is the training loss at the end."""

QUERY_KEY_BITS = {
    "none": (None, None),
    "4-bit KV": (None, 4),
    "4-bit QKV": (4, 4),
    "4-bit Q, 3-bit KV": (4, 3),
}
"""Rows of Table 3: bits of queries, and of keys and values."""

SECOND_STAGES: dict[str, str | dict[str, Any]] = {
    "b1.58": "b1.58", "a4.8": "a4.8", "a4.8-fp4": "a4.8-fp4",
    "a4.8, out int8": {"mode": "a4.8", "sites": {"out": "int8"}},
}  # fmt: skip
"""What follows the first stage of b1.58."""


def int4_twice_the_mean(x: Tensor) -> QuantizedTokens:
    """INT4 absmean with beta = 2 mean(|X|): the inputs of down_proj in the paper's full INT4 model."""
    beta = (2 * x.float().abs().mean(-1, keepdim=True)).clamp(min=quantizers.EPSILON)
    scale = beta / math.sqrt(7)
    return QuantizedTokens((x.float() / scale).round().clamp(-8, 7).to(torch.int8), scale)


Quantizer = Callable[[Tensor], QuantizedTokens]


@dataclass(frozen=True)
class Variant:
    """A model of an ablation: activations, quantisers of sites that no mode has, and the gate's function."""

    activations: Activations
    quantizers: Mapping[str, Quantizer] = field(default_factory=dict)
    gate: str = "relu2"

    def install(self, model: PreTrainedModel) -> None:
        """Quantise the inputs of the latent layers so."""
        set_activations(model, self.activations)
        for name, layer in latent_layers(model).items():
            layer.activation = self.quantizers.get(site_of(name) or "", layer.activation)


VARIANTS = {
    "hybrid": Variant(Activations("a4.8")),
    "int4": Variant(Activations("a4.8", {"out": "int4"}), {"down": int4_twice_the_mean}),
    "fp4": Variant(Activations("a4.8-fp4", {"down": "fp4"})),
    "down-int4": Variant(Activations("a4.8"), {"down": int4_twice_the_mean}),
    "down-fp4": Variant(Activations("a4.8", {"down": "fp4"})),
    "swish": Variant(Activations("a4.8"), gate="silu"),
    "inputs-e2m1": Variant(Activations("a4.8", dict.fromkeys(FOUR_BITS, "fp4"))),
    "inputs-e1m2": Variant(Activations("a4.8"), dict.fromkeys(FOUR_BITS, quantizers.fp4_e1m2)),
    "inputs-absmax": Variant(
        Activations("a4.8"), dict.fromkeys(FOUR_BITS, partial(quantizers.int4_absmax, clamped=CLAMPED))
    ),
}
"""Models of the ablations, all steps of one kind."""

NAMES = ("b1.58", *VARIANTS, "dense")
"""All variants, in the order in which they are run: the budget may end before the last ones."""


@dataclass(frozen=True)
class Texts:
    """Tokens to train on and tokens held out, int64 [n], and how many tokens the tokenizer has."""

    train: Tensor
    held_out: Tensor
    vocabulary: int


@dataclass(frozen=True)
class Task:
    """A size, a seed and the texts: all that the runs of a seed have in common."""

    size: Size
    seed: int
    texts: Texts
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations: bf16, rounded stochastically, on a GPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def windows(self) -> TrainingWindows:
        """The batches of the seed."""
        size = self.size
        return TrainingWindows.of(self.texts.train, length=size.window, batch=size.batch, seed=self.seed)

    def schedule(self, cooldown: bool) -> Schedule:
        """The learning rates, with or without the paper's cooldown in the second half of the steps."""
        recipe, steps = self.size.recipe, self.size.steps
        peak = recipe.cooldown_lr if cooldown else None
        return Schedule(
            recipe.lr, steps, math.ceil(WARM_UP * steps), cooldown_peak=peak, cooldown_start=steps // 2
        )

    def trainer(self, gate: str = "relu2", ternary: bool = True) -> Trainer:
        """A new model, with the first weights of the seed."""
        config: Any = self.size.recipe.config(
            self.texts.vocabulary, self.size.window, hidden_act=gate, bos_token_id=0, eos_token_id=0
        )
        if not ternary:
            kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act",
                    "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
                    "bos_token_id", "eos_token_id")  # fmt: skip
            config = LlamaConfig(**{name: getattr(config, name) for name in kept}, tie_word_embeddings=False)
        model = random_model(config, self.texts.vocabulary, self.dtype, self.seed)
        if ternary:
            make_ternary(model)
        optimizer = AdamW(weight_decay=WEIGHT_DECAY, stochastic=self.dtype == torch.bfloat16)
        return train_compressed(
            model, optimizer, compressed=False, max_grad_norm=1.0, clipping="running", seed=self.seed,
            device=self.device,
        )  # fmt: skip

    def train(
        self,
        trainer: Trainer,
        schedule: Schedule,
        stop: int,
        activate: Callable[[int], None] = lambda n: None,
    ) -> list[float]:
        """Take the steps up to `stop`; their losses. Raises NeuzipError for one that is not finite."""
        windows = self.windows()

        def step(number: int, lr: float) -> dict[str, float]:
            activate(number)
            return {"loss": trainer.step(windows.batch(number), lr, decay=schedule.decays(number))}

        return [one["loss"] for one in run(step, steps=stop, schedule=schedule, start=trainer.steps)]

    def held_out_loss(self, model: PreTrainedModel, **options: Any) -> float:
        """The mean loss of held-out tokens, in nats; `options` as `HeadedModel` has them."""
        ids = self.texts.held_out
        windows = cut(len(ids), self.size.window)
        return float(token_losses(HeadedModel(model, **options), ids, windows).mean(dtype="float64"))

    def trained_loss(self, trainer: Trainer) -> float:
        """The held-out loss of a model in training."""
        with trainer.dense(self.device) as model:
            return self.held_out_loss(model)

    def batches(self, tokens: int = 8192) -> list[Tensor]:
        """The first held-out tokens in batches of windows."""
        rows = self.texts.held_out[:tokens]
        rows = rows[: len(rows) // self.size.window * self.size.window].view(-1, self.size.window)
        return list(rows.to(self.device).split(self.size.batch))


def ablation(task: Task, variant: Variant) -> dict[str, Any]:
    """A variant trained from random weights, all steps alike."""
    trainer = task.trainer(variant.gate)
    variant.install(trainer.model)
    losses = task.train(trainer, task.schedule(cooldown=False), task.size.steps)
    return {**summary(losses), "held_out": task.trained_loss(trainer), "parameters": parameters(trainer)}


def dense(task: Task) -> dict[str, Any]:
    """The Llama of Table 1."""
    trainer = task.trainer("silu", ternary=False)
    losses = task.train(trainer, task.schedule(cooldown=True), task.size.steps)
    return {**summary(losses), "held_out": task.trained_loss(trainer), "parameters": parameters(trainer)}


def two_stages(task: Task) -> dict[str, Any]:
    """b1.58, and each second stage from the weights and moments of the first: losses and other figures."""
    trainer, schedule = task.trainer(), task.schedule(cooldown=True)
    first = TernaryStages("b1.58", task.size.steps).first_hybrid_step
    losses = task.train(trainer, schedule, first)
    stages: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        state, model = Path(folder) / "state", Path(folder) / "model"
        trainer.save(state)
        for name, activations in SECOND_STAGES.items():
            trainer.load(state)
            set_activations(trainer.model, Activations.of(activations))
            ends = task.train(trainer, schedule, task.size.steps)
            trainer.save(model / name, resumable=False)
            stages[name] = {
                **summary([*losses, *ends]), "held_out": task.trained_loss(trainer),
                **measured(task, name, runnable(model / name, None, task.device)),
            }  # fmt: skip
            difference = abs(stages[name]["held_out"] - stages[name]["stored_held_out"])
            if difference > 1e-3:
                raise SystemExit(f"{name}: the stored model's loss differs by {difference}")
    return {"stages": stages, "parameters": parameters(trainer)}


def measured(task: Task, stage: str, model: PreTrainedModel) -> dict[str, Any]:
    """What is told of a stored model: loss, sparsity, bits of queries, keys and values, and its inputs."""
    found: dict[str, Any] = {"stored_held_out": task.held_out_loss(model)}
    if stage in ("b1.58", "a4.8"):
        zeros = sparsity(model, task.batches())
        found["sparsity"] = {**zeros.sites, "overall": zeros.overall}
    if stage == "a4.8":
        found["query_key_bits"] = {
            name: task.held_out_loss(model, query_bits=q, kv_bits=kv, kv_form="a4.8")
            for name, (q, kv) in QUERY_KEY_BITS.items()
        }
    if stage == "b1.58":
        found |= input_statistics(model, task.batches())
    return found


def summary(losses: list[float]) -> dict[str, Any]:
    """The training loss at the end, and about 50 smoothed losses on the way."""
    last = max(1, round(LAST * len(losses)))
    every = max(1, len(losses) // 50)
    curve = [statistics.fmean(losses[i : i + every]) for i in range(0, len(losses) - every + 1, every)]
    return {"training": statistics.fmean(losses[-last:]), "losses": curve}


def parameters(trainer: Trainer) -> int:
    """Weights of a model."""
    return sum(slot.numel for slot in trainer.weights.slots())


def read_texts(size: Size, data: Path) -> Texts:
    """As many documents as the steps need, in an order that is always the same, and held-out ones."""
    folder = CHECKPOINT if size.tokenizer == "demo" else data / size.tokenizer
    tokenizer = load_tokenizer(folder)
    documents = list(read_documents(data / "train-mix.jsonl.gz"))
    random.Random(0).shuffle(documents)
    needed = min(size.steps * size.batch * size.window, MOST_TOKENS)
    training = (document for number, document in enumerate(documents) if number % EVERY)
    return Texts(
        first_tokens(tokenizer, training, needed),
        first_tokens(tokenizer, documents[::EVERY], size.held_out_tokens),
        len(tokenizer),
    )


def first_tokens(tokenizer: Any, documents: Iterable[str], count: int) -> Tensor:
    """The first `count` tokens and one more, or all."""
    parts: list[Tensor] = []
    for document in documents:
        parts.append(tokenise(tokenizer, ["", document]))  # with the end token in front
        if sum(map(len, parts)) > count:
            break
    return torch.cat(parts)[: count + 1]


def make(arguments: argparse.Namespace, size: Size) -> None:
    """The runs that are missing, seed by seed, within the budget."""
    began, longest = time.monotonic(), 0.0
    texts = read_texts(size, arguments.data)
    device = torch.device(arguments.device)
    environment = Environment.here(
        "neuzip-toolkit", "torch", "transformers", gpu=device.type == "cuda", needs_commit=True
    )
    for seed in arguments.seeds:
        for name in arguments.variants:
            path = arguments.runs / f"{arguments.size}-{name}-{seed}.json"
            if path.exists():
                continue
            if time.monotonic() - began + longest > arguments.budget:
                print(f"not begun in {arguments.budget:.0f} s: {name}, seed {seed}, and what follows")
                return
            started, cpu = time.monotonic(), time.process_time()
            outcome = outcome_of(Task(size, seed, texts, device), name)
            longest = max(longest, time.monotonic() - started)
            document = {
                "variant": name, "seed": seed, "size": plain_size(arguments.size, size), **outcome,
                "seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu,
                "environment": environment.plain(),
            }  # fmt: skip
            write_file(path, (json.dumps(document) + "\n").encode())
            print(
                f"{name:14} seed {seed}  {in_short(outcome)}  {time.monotonic() - started:.0f} s", flush=True
            )


def outcome_of(task: Task, name: str) -> dict[str, Any]:
    """What a run gives; a loss that is not finite is a result too."""
    torch.manual_seed(task.seed)
    try:
        if name == "b1.58":
            return two_stages(task)
        return dense(task) if name == "dense" else ablation(task, VARIANTS[name])
    except NeuzipError as failure:
        return {"failed": failure.message}


def in_short(outcome: dict[str, Any]) -> str:
    """The losses of a run, for a terminal."""
    if "failed" in outcome:
        return str(outcome["failed"])
    stages = outcome.get("stages", {"": outcome})
    return ", ".join(f"{name} {one['held_out']:.4f}".strip() for name, one in stages.items())


def plain_size(name: str, size: Size) -> dict[str, Any]:
    """A size as a result records it."""
    return {"name": name, **asdict(size)}


def report(arguments: argparse.Namespace, size: Size) -> None:
    """Save the runs of a size as a section of the result: rows by variant, all other figures by seed."""
    runs = [
        json.loads(path.read_text())
        for seed in arguments.seeds
        for path in sorted(arguments.runs.glob(f"{arguments.size}-*-{seed}.json"))
    ]
    if not runs:
        raise SystemExit(f"{arguments.runs} has no runs of {arguments.size}")
    if any(one["size"] != plain_size(arguments.size, size) for one in runs):
        raise SystemExit(f"{arguments.runs} has runs of another size or other steps: name another folder")
    environment = replace(Environment.of_runs(runs, SOURCES), command=command(arguments))
    rows: dict[str, dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    for one in runs:
        stages = one.get("stages", {one["variant"]: one})
        for name, stage in stages.items():
            row = rows.setdefault(
                name, {"variant": name, "seeds": [], "held_out": [], "training": [], "curves": []}
            )
            row["seeds"].append(one["seed"])
            for key, own in (("held_out", "held_out"), ("training", "training"), ("curves", "losses")):
                row[key].append(stage.get(own))
            others += [
                {"figure": key, "variant": name, "seed": one["seed"], "value": stage[key]}
                for key in ("sparsity", "query_key_bits", "inputs", "out_inputs")
                if key in stage
            ]
    facts = {
        "size": plain_size(arguments.size, size),
        "parameters": {one["variant"]: one["parameters"] for one in runs if "parameters" in one},
        "figures": others,
        "failed": [
            {key: one[key] for key in ("variant", "seed", "failed")} for one in runs if "failed" in one
        ],
        "cpu_seconds": sum(one["cpu_seconds"] for one in runs),
    }  # fmt: skip
    path = save_sections(
        "bitnet_training", WHAT, {arguments.size: Measurement(environment, list(rows.values()), facts)}
    )
    print(f"saved {path}")


def command(arguments: argparse.Namespace) -> str:
    """The command that makes these runs."""
    seeds = ",".join(map(str, arguments.seeds))
    return f"python benchmarks/bitnet_training.py RUNS --size {arguments.size} --seeds {seeds}"


def main() -> None:
    """Make the runs that are missing, or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--steps", type=int, help="in place of those of the size")
    parser.add_argument("--seeds", default="0,1", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--variants", default=",".join(NAMES), type=lambda text: text.split(","))
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--report", action="store_true", help="make no runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    data = Path(os.environ.get("NEUZIP_DATA", "NEUZIP_DATA-is-not-set"))
    parser.add_argument("--data", type=Path, default=data)
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    size = replace(size, steps=arguments.steps or size.steps)
    if arguments.report:
        report(arguments, size)
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    make(arguments, size)


if __name__ == "__main__":
    main()
