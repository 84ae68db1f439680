"""A Llama-3-8B-shaped model of quantized weights, packed as codes, beside bf16: tokens a second and memory.

    python benchmarks/quantized_generation.py [--laws gaussian trained-like] [--bits 4]

Weights are random: N(0, 0.02), or like those of a trained model (weight_laws.py). Each matrix, embeddings and
the LM head too, is rounded to a uniform grid whose codes have an entropy of --bits. `bf16` holds the rounded
weights as ordinary tensors. `codes` holds the same weights as packed codes, as the residency `packed` has
them for a quantized folder; its products multiply the codes. Nothing is written to a disk.

Both models decode the same texts with `GreedyDecoder`, one CUDA graph a step, and take turns. A speed is that
of the median step. The row of memory is the bytes of all parameters. The error of logits is relative, in the
2-norm, to a forward pass in fp64, as in generate.py.

What is not right is not timed: the run ends if packed codes do not decode to the rounded weights bit for bit,
or if the logits of `codes` are further from fp64 than those of bf16 by more than 5 %.

Small, for a CPU:

    python benchmarks/quantized_generation.py --laws gaussian --layers 1 --hidden 256 --words 256 \\
        --batches 1 --new-tokens 2
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from generate import LOGIT_ROWS, exact_logits, logits_of
from grid_linear import GRIDS, on_grid
from llama_model import DEVICE, config_of, timed
from model_results import ERROR, TARGETS, Results, Row
from packed_groups import LAW_NAMES
from record import Environment, Measurement, save_sections
from serving import steps_in_turns
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from weight_laws import LAWS, generator_on

from neuzip.kernels.grid import Grid
from neuzip.runtime.decode.benchmark import free_memory
from neuzip.runtime.hf.messages import quiet_transformers
from neuzip.runtime.residency import memory
from neuzip.runtime.weights import GridWeight

WHAT = "a Llama-3-8B-shaped model of random weights in packed codes of about 4 bits, and in bf16"
FORMS = ("bf16", "codes")


def main() -> None:
    """Measure each law, print the figures, save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--grid", choices=GRIDS, default="rows", help="which factors the grids have")
    parser.add_argument("--bits", type=float, default=4.0, help="entropy of the codes")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--words", type=int, default=128_256, help="of the vocabulary")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=64, help="of a text in a turn")
    arguments = parser.parse_args()
    usual = all(vars(arguments)[name] == parser.get_default(name) for name in ("layers", "hidden", "words"))
    is_saved = usual and DEVICE.type == "cuda"
    packages = ("neuzip-toolkit", "torch", "triton", "transformers")
    environment = Environment.here(*packages, gpu=DEVICE.type == "cuda", needs_commit=is_saved)
    rows: list[Row] = []
    with quiet_transformers():
        for law in arguments.laws:
            results = Results()
            facts = measure(law, arguments, results)
            rows += results.rows
            if is_saved:
                section = f"{law}, {arguments.grid}, {arguments.bits:g} bits"
                measurement = Measurement(environment, results.rows, facts)
                path = save_sections("quantized_generation", WHAT, {section: measurement})
                print(f"saved {section} in {path}", flush=True)
    aimed = [row for row in rows if "met" in row]
    print(f"\n{sum(not row['met'] for row in aimed)} of {len(aimed)} targets missed")
    if not is_saved:
        print("nothing is saved: this was a small run, or had no GPU")


def measure(law: str, arguments: argparse.Namespace, results: Results) -> dict[str, float]:
    """Both forms of a model with weights of a law. Returns facts about the codes."""
    with timed(f"{law}: made and packed"):
        bf16, codes, facts = both_forms(law, arguments)
    models = bf16, codes
    print("  " + ", ".join(f"{name} {value:.4g}" for name, value in facts.items()), flush=True)
    for form, model in zip(FORMS, models, strict=True):
        results.against_bf16("weights in memory", form, memory(model).total.stored_bytes / 1e9, "GB")
    compare_logits(models, results)
    free_memory()
    for batch in arguments.batches:
        with timed(f"batch {batch}, captured and run"):
            steps = steps_in_turns(models, batch, arguments.new_tokens, arguments.new_tokens)
        for form, step in zip(FORMS, steps, strict=True):
            results.against_bf16(f"decode, batch {batch}", form, batch / step, "tokens/s")
        free_memory()
    print(f"  weights: {LAW_NAMES[law]}", flush=True)
    return facts


def both_forms(
    law: str, arguments: argparse.Namespace
) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, float]]:
    """A model of rounded weights in bf16, one of the same weights as codes, and facts about all codes."""
    with torch.device(DEVICE):
        bf16 = AutoModelForCausalLM.from_config(config_of(arguments), dtype=torch.bfloat16).eval()
    generator = generator_on(DEVICE)
    packed: dict[int, nn.Parameter] = {}
    weights, escapes, bits_of_codes = 0, 0, 0.0
    for parameter in bf16.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() != 2:
            parameter.fill_(1.0)
            continue
        rounded, entropy, grid = on_grid(
            LAWS[law](*parameter.shape, generator, torch.bfloat16), arguments.grid, arguments.bits
        )
        parameter.copy_(rounded)
        weight = code_weight(parameter.data, grid)
        packed[id(parameter)] = nn.Parameter(weight, requires_grad=False)
        weights += parameter.numel()
        bits_of_codes += entropy * parameter.numel()
        escapes += weight.packed.escapes.numel()
    codes = copy.deepcopy(bf16, packed)  # which takes the packed weights where the others would be copied
    nbytes = sum(p.stored_bytes for p in codes.parameters() if isinstance(p, GridWeight))
    facts = {"entropy": bits_of_codes / weights, "bits": 8 * nbytes / weights, "escapes": escapes / weights}
    return bf16, codes, facts


def code_weight(rounded: torch.Tensor, grid: Grid) -> GridWeight:
    """Rounded weights as packed codes; SystemExit if they do not decode to the same bits."""
    weight = GridWeight.of(rounded, grid)
    if not torch.equal(weight.dense().view(torch.int16), rounded.view(torch.int16)):
        raise SystemExit("packed codes do not decode to the rounded weights: not timed")
    return weight


def compare_logits(models: Sequence[PreTrainedModel], results: Results) -> None:
    """The errors of both models' logits; SystemExit if those of codes are too large."""
    exact = {rows: exact_logits(models[0], rows) for rows in LOGIT_ROWS}
    for form, model in zip(FORMS, models, strict=True):
        logits = {rows: logits_of(model, rows) for rows in LOGIT_ROWS}
        errors = [float((logits[n].double() - exact[n]).norm() / exact[n].norm()) for n in LOGIT_ROWS]
        results.against_bf16(ERROR, form, max(errors), "")
    if not results.rows[-1]["met"]:
        raise SystemExit(f"logits of codes: more than {TARGETS[ERROR, 'codes'].must} times the error of bf16")


if __name__ == "__main__":
    main()
