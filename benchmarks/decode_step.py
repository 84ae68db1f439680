"""What a step of decoding is made of: kernels and microseconds, with and without what is fused, on one GPU.

    python benchmarks/decode_step.py [--sections steps ring places] [--layers 4] [--list a4.8]

`steps`: models of made-up weights, of some layers of Llama-3-8B's shapes (bf16, packed, ans) and of BitNet
a4.8's 3B (bf16 3b, a4.8, and a4.8 with keys and values in 3 bits). Each is a CUDA graph with the kernels of
the model's own code, with fused ones, and compiled by torch.compile. Logits of the first two have to be the
same bits. --list shows the kernels of one form by name, each with what it takes.

`ring`: how many weights `ans` decodes in one launch, in how much memory.

`places`: bf16 weights that lie elsewhere: in one piece of memory, as transformers loads them, in many, and
where buffers have come and gone, as `load_model` does. All take turns.

It is for whoever tunes: nothing is saved, and what was learnt belongs in benchmarks/notes/step.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import bitnet
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from neuzip.runtime import buffers
from neuzip.runtime.decode.benchmark import free_memory, prompts, run
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.residency import compress_parameters

DEVICE = "cuda"
FORMS = ("bf16", "packed", "ans", "bf16 3b", "a4.8", "a4.8 kv 3")
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {"fuse": False}, "fused": {}, "compiled": {"compiled": True}
}  # fmt: skip
PROMPT, NEW = 32, 64


def main() -> None:
    """Print the tables."""
    sections = {"steps": steps, "ring": ring, "places": places}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--list", choices=FORMS, help="show the kernels of this form")
    arguments = parser.parse_args()
    with torch.inference_mode():
        for name in arguments.sections:
            sections[name](arguments)


def steps(arguments: argparse.Namespace) -> None:
    """Kernels and time of every form in every way."""
    print(f"{'form':9} {'way':9} {'kernels':>8} {'us a step':>10}  fused")
    for form in arguments.forms:
        model = made(form, arguments.layers)
        expected: torch.Tensor | None = None
        for way, options in WAYS.items():
            kv_bits = 3 if form.endswith("kv 3") else None
            if way == "compiled" and (arguments.no_compile or kv_bits):
                continue
            decoder = GreedyDecoder(model, 1, PROMPT + NEW, kv_bits=kv_bits, kv_form="a4.8", **options)
            kernels = kernels_of(decoder, model)
            print(f"{form:9} {way:9} {len(kernels):8} {1e6 * seconds(decoder, model):10.1f}  {decoder.fused}")
            if arguments.list == form:
                show(kernels)
            logits = decoder.logits.clone()
            if expected is not None and way == "fused" and not torch.equal(logits, expected):
                raise SystemExit(f"{form}: logits of fused steps are others")
            expected = logits if expected is None else expected
            del decoder
        del model
        free_memory()


def ring(arguments: argparse.Namespace) -> None:
    """Steps of `ans` with other amounts of memory and numbers of weights in a launch."""
    model = made("ans", 2 * arguments.layers)
    print(f"{'room':>5} {'ahead':>6} {'us a step':>10}")
    usual = buffers.CAPACITY, buffers.AHEAD
    for room, ahead in (usual, (1.0, 8), (2.0, 8), (3.0, 8), (3.25, 8), (3.25, 1)):
        buffers.CAPACITY, buffers.AHEAD = room, ahead
        free_memory()
        decoder = GreedyDecoder(model, 1, PROMPT + NEW)
        us = 1e6 * seconds(decoder, model)
        print(f"{room:5} {ahead:6} {us:10.1f}", flush=True)
        del decoder
    buffers.CAPACITY, buffers.AHEAD = usual


PLACES = ("as made", "one piece", "one piece, 512 bytes beside", "many pieces", "where buffers were")
HUGE_PAGE = 2 << 20


def places(arguments: argparse.Namespace) -> None:
    """The median step of the same model with its weights in other places."""
    steps: dict[str, list[float]] = {place: [] for place in PLACES}
    models = [moved(made("bf16", arguments.layers), place) for place in PLACES]
    decoders = {place: GreedyDecoder(m, 1, 256) for place, m in zip(PLACES, models, strict=True)}
    ids = prompts(models[0].config.vocab_size, 1, PROMPT)
    order = list(PLACES)
    for _ in range(8):
        for place in order:
            steps[place] += run(decoders[place], ids, 128).step_seconds
        order.reverse()
    for place, mine in steps.items():
        print(f"{place:30} {1e6 * statistics.median(mine):10.1f} us")


def moved(model: PreTrainedModel, place: str) -> PreTrainedModel:
    """A model whose parameters were moved."""
    parameters = list(model.parameters())
    torch.cuda.empty_cache()
    beside = 512 if place.endswith("beside") else 0
    sizes = [-(-p.nbytes // HUGE_PAGE) * HUGE_PAGE + beside for p in parameters]
    if place.startswith("one piece"):
        piece = torch.empty(sum(sizes) + beside, dtype=torch.uint8, device=DEVICE)
        for parameter, part in zip(parameters, piece[beside:].split(sizes), strict=True):
            there = part[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            parameter.data = there.copy_(parameter.data)
    elif place != "as made":
        buffer = None
        for number, parameter in enumerate(parameters):
            if place == "many pieces":
                torch.cuda.empty_cache()
            elif number % 8 == 0:
                buffer = torch.empty(128 * HUGE_PAGE, dtype=torch.uint8, device=DEVICE)
            parameter.data = parameter.data.clone()
        del buffer
    return model


def made(form: str, layers: int) -> PreTrainedModel:
    """A model of a form, on the GPU."""
    if form not in ("bf16", "packed", "ans"):
        return bitnet.made(form.split()[0], layers)
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    if form != "bf16":
        compress_parameters(model, form)
    return model


def seconds(decoder: GreedyDecoder, model: PreTrainedModel) -> float:
    """The median step, in the best of three runs."""
    ids = prompts(model.config.vocab_size, 1, PROMPT)
    return min(statistics.median(run(decoder, ids, NEW).step_seconds) for _ in range(3))


def kernels_of(decoder: GreedyDecoder, model: PreTrainedModel) -> list[tuple[str, float]]:
    """The kernels of a step, in their order: name, and microseconds."""
    decoder.prefill(prompts(model.config.vocab_size, 1, PROMPT))
    decoder.step()
    return [(event.name, event.time_range.elapsed_us()) for event in profiled(decoder.step)]


def profiled(call: Callable[[], object]) -> list[Any]:
    """What runs on the GPU in a call, in the order in which it begins."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    return sorted(events, key=lambda event: event.time_range.start)


def show(kernels: list[tuple[str, float]]) -> None:
    """How often each kernel runs, and what it takes altogether."""
    count = Counter(name for name, _ in kernels)
    total: Counter[str] = Counter()
    for name, us in kernels:
        total[name] += us  # type: ignore[assignment]
    for name, us in total.most_common():
        print(f"    {count[name]:4} x {us / count[name]:7.2f} us = {us:8.1f}  {name[:90]}")


if __name__ == "__main__":
    main()
