"""Packed experts in pinned host memory: what a model and its products lose, and how fast the link is read.

    python benchmarks/expert_offload.py [--sections products model] [--layers 4] [--law trained-like]

`model`: Qwen3-30B-A3B shapes of some layers and made-up weights, greedy steps in a CUDA graph and a prompt,
with all packed experts on the GPU, half of them, and none. Tokens and the logits of the last step have to be
those of the model with all on the GPU, bit for bit, or nothing is timed.

`products`: the experts of all layers one after the other, in a CUDA graph, for some numbers of tokens. Words
are read over the link by the products themselves, or copied to the GPU first, or as neuzip chooses by how
full tiles are: `host_words` in kernels/tuning/sm90/experts.toml. GB/s count the words of experts in use once;
beside them is the speed of a copy of all words by the GPU's copy engine. Results have to be the bits of
experts on the GPU, or nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from record import Environment, Measurement, Row, save_sections
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from weight_laws import LAWS, generator_on

from neuzip.kernels import tuning
from neuzip.kernels.experts import ops
from neuzip.kernels.packed_linear.ops import pack
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.runtime.decode.benchmark import free_memory, prompts, run
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.residency import compress_parameters, memory

Tensor = torch.Tensor
Layer = tuple[PackedTensor, PackedTensor]

WHAT = "packed experts in pinned host memory, Qwen3-30B-A3B shapes with made-up weights"
EXPERTS, SLOTS, HIDDEN, INNER = 128, 8, 2048, 768
PLACES = {"none": 1.0, "half": 0.5, "all": 0.0}
"""Which experts are in host memory, and the share that stays on the GPU."""

WAYS = {"read by the product": False, "copied first": True, "as chosen": None}
TOKENS = (1, 8, 32, 64, 128, 512, 2048)
BATCHES = (1, 8, 32)
PROMPT, LONG_PROMPT, NEW = 64, 2048, 48
SECONDS = 0.5
"""Of each measurement of a product, about."""


def main() -> None:
    """Measure, print and save the sections."""
    sections = {"products": products, "model": model_speeds}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--law", choices=LAWS, default="trained-like")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    environment = Environment.here("torch", "triton", "transformers", gpu=True)
    facts = {"layers": arguments.layers, "law": arguments.law}
    with torch.inference_mode():
        for name in arguments.sections:
            measurement = Measurement(environment, sections[name](arguments), facts)
            free_memory()
            print(f"saved {save_sections('expert_offload', WHAT, {name: measurement})}", flush=True)


# Products


def products(arguments: argparse.Namespace) -> list[Row]:
    """A row for each number of tokens and way."""
    generator = generator_on("cuda")

    def packed(out: int, columns: int) -> PackedTensor:
        return pack(LAWS[arguments.law](EXPERTS * out, columns, generator, torch.bfloat16))

    near = [(packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER)) for _ in range(arguments.layers)]
    far = [(gate_up.in_host_memory(), down.in_host_memory()) for gate_up, down in near]
    words = sum(matrix.host_bytes for layer in far for matrix in layer)
    copying = milliseconds(lambda: [matrix.fetched() for layer in far for matrix in layer], words)
    print(f"copy engine: {words / copying / 1e6:.1f} GB/s")
    rows: list[Row] = []
    for tokens in TOKENS:
        inputs = [inputs_of(tokens, layer) for layer in range(arguments.layers)]
        read = sum(
            index.unique().numel() * matrix.host_bytes // EXPERTS
            for (_, index, _), layer in zip(inputs, far, strict=True)
            for matrix in layer
        )
        expected = multiply(near, inputs)
        on_gpu = milliseconds(partial(multiply, near, inputs), read)
        for way, copied in WAYS.items():
            table = {} if copied is None else {"experts.host_words": [{"use": {"copied": copied}}]}
            with tuning.replaced(table):
                if not all(map(torch.equal, multiply(far, inputs), expected)):
                    raise SystemExit(f"{tokens} tokens, {way}: other bits than with experts on the GPU")
                in_host = milliseconds(partial(multiply, far, inputs), read)
            rows.append(
                {
                    "tokens": tokens, "way": way, "experts_in_use": read / words * EXPERTS,
                    "gpu_ms": on_gpu, "host_ms": in_host, "link_gb_s": read / in_host / 1e6,
                    "copy_engine_gb_s": words / copying / 1e6,
                }
            )  # fmt: skip
            print(
                f"{tokens:5} tokens, {way:20} {in_host:8.3f} ms, {read / in_host / 1e6:5.1f} GB/s; "
                f"on the GPU {on_gpu:8.3f} ms",
                flush=True,
            )
    return rows


def inputs_of(tokens: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of a layer."""
    generator = generator_on("cuda", layer)
    x = torch.randn(tokens, HIDDEN, generator=generator, device="cuda").bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=generator, device="cuda")
    shares, index = scores.topk(SLOTS)
    return x, index, shares / shares.sum(-1, keepdim=True)


def multiply(layers: list[Layer], inputs: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """The result of each layer."""
    return [
        ops.packed_experts(x, index, shares, *layer, EXPERTS)
        for layer, (x, index, shares) in zip(layers, inputs, strict=True)
    ]


def milliseconds(work: Callable[[], object], nbytes: int) -> float:
    """The median time of some work in a CUDA graph, that reads so many bytes."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(max(5, min(50, int(SECONDS * 50e9 / nbytes)))):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


# A model


def model_speeds(arguments: argparse.Namespace) -> list[Row]:
    """A row for each place of experts and batch, and for each place a long prompt."""
    rows: list[Row] = []
    expected: dict[int, tuple[Tensor, Tensor]] = {}
    limit = None
    for place, share in PLACES.items():
        model = made(arguments)
        compress_parameters(model, "packed", expert_memory=None if limit is None else int(share * limit))
        model.set_experts_implementation("neuzip")
        if limit is None:
            limit = sum(p.stored_bytes for p in model.parameters() if p.dim() == 3)
        use = memory(model).total
        sizes = {"gpu_gib": use.stored_bytes / 2**30, "host_gib": use.host_bytes / 2**30}
        for batch in BATCHES:
            row = {"host": place, "batch": batch, "prompt": PROMPT, **sizes}
            rows.append(row | decode(model, batch, place, expected))
            print(rows[-1], flush=True)
        rows.append({"host": place, "batch": 1, "prompt": LONG_PROMPT, **sizes, **prefill(model)})
        print(rows[-1], flush=True)
        del model
        free_memory()
    return rows


def made(arguments: argparse.Namespace) -> PreTrainedModel:
    """The model with dense weights, the same each time."""
    config = Qwen3MoeConfig(
        vocab_size=32768, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_hidden_layers=arguments.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=EXPERTS,
        num_experts_per_tok=SLOTS, norm_topk_prob=True, max_position_embeddings=4096, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    model = model.to_empty(device="cuda").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).cuda()
    generator = generator_on("cuda")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            flat = parameter.view(-1, parameter.shape[-1])
            flat.copy_(LAWS[arguments.law](*flat.shape, generator, torch.bfloat16))
    return model


def decode(
    model: PreTrainedModel, batch: int, place: str, expected: dict[int, tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Tokens a second of steps in a CUDA graph, if they are the tokens of the first model."""
    ids = prompts(32768, batch, PROMPT)
    decoder = GreedyDecoder(model, batch, PROMPT + NEW)
    first = run(decoder, ids, NEW)
    result = first.tokens, decoder.logits.clone()
    if not all(map(torch.equal, result, expected.setdefault(batch, result))):
        raise SystemExit(f"{place} in host memory, batch {batch}: other tokens or logits than on the GPU")
    steps = [seconds for _ in range(3) for seconds in run(decoder, ids, NEW).step_seconds]
    return {"tokens_per_second": batch / statistics.median(steps)}


def prefill(model: PreTrainedModel) -> dict[str, float]:
    """Tokens a second of a long prompt."""
    ids = prompts(32768, 1, LONG_PROMPT)
    decoder = GreedyDecoder(model, 1, LONG_PROMPT + 2, graph=False)
    run(decoder, ids, 2)
    seconds = statistics.median(run(decoder, ids, 2).prefill_seconds for _ in range(5))
    return {"prefill_tokens_per_second": LONG_PROMPT / seconds}


if __name__ == "__main__":
    main()
