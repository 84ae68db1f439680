"""A model of BitNet a4.8's 3B shapes, made up: tokens a second and memory, beside a bf16 Llama of its shapes.

    python benchmarks/bitnet.py [--layers 26] [--new-tokens 256]

Weights are made up, as for speed it does not matter what they say: codes of -1, 0 and 1, each as likely, and
N(0, 0.02) for bf16. What a gate lets through is what such weights give, about half; a4.8's 7B model has 32 %.
All forms have a squared ReLU but the bf16 Llama, and the same embeddings and head in bf16. All decode one
text with the same `GreedyDecoder`, whose steps are one CUDA graph; a speed is that of the median step, in
turns. Speeds are compared with bf16 in the same graph, with the same fused norms and rotary embeddings; bf16
by the kernels that transformers' own code launches is a row by itself, and a4.8 with keys and values in 3
bits (section 3.1 of the paper) another. Rows called compiled are of steps that torch.compile compiled first,
those of bf16 as well, and have no target; --no-compile leaves them out. The result is
benchmarks/results/bitnet.json, of a whole run on a GPU.

Shapes: BitNet a4.8 (arXiv 2411.04965), tables 6 and 7.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from record import Environment, Measurement, save
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.runtime.bitlinear import bit_linears
from neuzip.runtime.decode.benchmark import prompts, run
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.ternary_layers import install

Row = dict[str, Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 26
PROMPT = 32
ROUNDS = 3
MUST = {
    "decode, batch 1, a4.8": (2.5, 4.0, False),
    "decode, batch 1, a4.8, 3-bit KV": (2.5, 4.0, False),
    "weights outside embeddings, a4.8": (0.16, None, True),
}
"""What is asked for: must and stretch, times bf16, and whether less is better."""

FORMS = ("bf16", "b1.58", "a4.8", "a4.8-fp4")
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{form: (form, {}) for form in FORMS},
    "bf16, kernels of transformers": ("bf16", {"fuse": False}),
    "a4.8, 3-bit KV": ("a4.8", {"kv_bits": 3, "kv_form": "a4.8"}),
}
"""Who decodes: a form, and how."""


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows of compiled steps")
    arguments = parser.parse_args()
    packages = ("neuzip-toolkit", "torch", "triton", "transformers")
    environment = Environment.here(*packages, gpu=DEVICE == "cuda", needs_commit=True)
    with torch.inference_mode():
        models = {form: made(form, arguments.layers) for form in FORMS}
        rows: list[Row] = []
        for compiled in (False,) if arguments.no_compile else (False, True):
            what = "decode, batch 1" + (", compiled" if compiled else "")
            for form, seconds in step_seconds(models, arguments.new_tokens, compiled).items():
                rows.append(row(what, form, 1 / seconds, "tokens/s", rows))
    for form in FORMS:
        rows.append(row("weights outside embeddings", form, layer_bytes(models[form]) / 1e9, "GB", rows))
    if DEVICE == "cuda" and arguments.layers == LAYERS:
        print(f"saved {save('bitnet', __doc__.splitlines()[0], Measurement(environment, rows))}")


def step_seconds(models: dict[str, PreTrainedModel], new_tokens: int, compiled: bool) -> dict[str, float]:
    """The median step of each decoder after a short prompt, taken in turns."""
    decoders = {
        name: GreedyDecoder(models[form], 1, PROMPT + new_tokens, compiled=compiled, **options)
        for name, (form, options) in DECODERS.items()
        if not (compiled and options)
    }
    for name, decoder in decoders.items():
        print(f"  {name}: fused: {decoder.fused}", flush=True)
    ids = prompts(models["bf16"].config.vocab_size, 1, PROMPT)
    steps: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(ROUNDS):
        for name, decoder in decoders.items():
            steps[name].append(statistics.median(run(decoder, ids, new_tokens).step_seconds))
    return {name: statistics.median(seconds) for name, seconds in steps.items()}


def row(what: str, by: str, value: float, unit: str, rows: list[Row]) -> Row:
    """A figure beside that of bf16, and what is asked for."""
    base = next((r["value"] for r in rows if (r["what"], r["by"]) == (what, "bf16")), value)
    found: Row = {"what": what, "by": by, "value": value, "unit": unit, "ratio": value / base}
    line = f"{what:28} {by:30} {value:10.4g} {unit:9} {value / base:6.3f}x"
    if (aim := MUST.get(f"{what}, {by}")) is not None:
        must, stretch, most = aim
        met = value / base <= must if most else value / base >= must
        found |= {"must": must, "stretch": stretch, "most": most, "met": met}
        line += f"  must {'<=' if most else '>='} {must}: {'met' if met else 'MISSED'}"
    print(line, flush=True)
    return found


def made(form: str, layers: int) -> PreTrainedModel:
    """A model of a form, on the GPU."""
    config = LlamaConfig(
        hidden_size=3200, intermediate_size=8640, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32_000, max_position_embeddings=2048, tie_word_embeddings=False,
        hidden_act="silu" if form == "bf16" else "relu2", dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    if form != "bf16":
        ternary = {
            name: random_ternary(*module.weight.shape)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name.endswith("_proj")
        }
        install(model, ternary, form)
    return model


def random_ternary(out: int, columns: int) -> TernaryWeight:
    """Codes at random, with a scale that keeps the size of activations."""
    codes = torch.randint(-1, 2, (out, columns), device=DEVICE, dtype=torch.int8)
    return TernaryWeight.of(Ternary(codes, torch.tensor((1.5 / columns) ** 0.5, device=DEVICE)))


def layer_bytes(model: PreTrainedModel) -> int:
    """What weights take in memory, but for embeddings and head."""
    packed = sum(layer.stored_bytes for layer in bit_linears(model).values())
    plain = sum(
        p.nbytes for name, p in model.named_parameters() if "embed" not in name and "head" not in name
    )
    return packed + plain


if __name__ == "__main__":
    main()
