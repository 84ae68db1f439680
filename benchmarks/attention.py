"""Quantised attention beside torch's SDPA and SageAttention 1, on one GPU.

    python benchmarks/attention.py [--sections kernels lengths crossover prefill] [--rounds 10]

`kernels`: forward of 4 x 32 heads, 8,192 tokens, and of 32 heads, 32,768 tokens. Ours is `sage_attention` as
a user calls it: smoothing and quantising of Q, K and V are in the time, and beside it stands the time without
that of K and V. Operations are 4 D a pair of a query and a key, half of the pairs with a causal mask.
`lengths`: the same for head sizes 64, 128 and 256 and texts of 1,024 to 32,768 tokens, 32,768 in all, as
Figures 8 to 10 of SageAttention2 have them. A peer that refuses a shape is left out there.
`crossover`: the least number of keys from which on ours is faster than what SDPA chooses, as a model calls
them; where `runtime.attention` draws the line.
`prefill`: a model of Llama-3-8B's shapes and made-up weights, 32,768 tokens, against cuDNN's attention.

Sides take turns; times are medians of CUDA events around calls that take at least 20 ms together. A side
whose cosine similarity with fp64, on rows of two heads, is below 0.999 (4 bits: 0.975) ends the run.
The result is benchmarks/results/attention.json. benchmarks/attention_accuracy.py says how accurate it is.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import Environment, Measurement, save_sections
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaModel

from neuzip.kernels.attention import sage_attention
from neuzip.kernels.attention.reference import exact_attention
from neuzip.kernels.attention.similarity import similarity
from neuzip.kernels.attention.triton.quantize import quantize
from neuzip.runtime.hf.attention import uses

Tensor = torch.Tensor
Row = dict[str, Any]
Side = Callable[[], Tensor]

DEVICE = "cuda"
HEADS = 32
CASES = ((4, 8192), (1, 32768))
"""Texts, and tokens of each."""
WIDTHS, LENGTHS = (64, 128, 256), (1024, 2048, 4096, 8192, 16384, 32768)
"""Head sizes and tokens of a text, as SageAttention2 plots them."""
AIMS = {  # head width, causal: what must be reached, and what would be good, in TOPS
    (128, False): (680, 850), (128, True): (600, 780), (64, False): (500, 600), (64, True): (None, None),
}  # fmt: skip
LEAST = {"ours, 4 bits": 0.975}
"""Cosine similarity with fp64 of what is timed, if not 0.999. 15 levels leave Gaussian numbers 0.979."""
LEAST_OF_LAYERS = 0.998
"""Cosine similarity of a layer's attention with cuDNN's: means of thousands of values, in FP8."""
PREFILL, PREFILL_MUST, PREFILL_STRETCH = 32768, 1.05, 1.2
CHECKED = 64
"""Rows of a head that are compared with fp64: its first and its last ones."""


def main() -> None:
    """Measure, print, save."""
    sections = {"kernels": kernels, "lengths": lengths, "crossover": crossover, "prefill": prefill}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    environment = Environment.here(
        "neuzip-toolkit", "torch", "triton", "transformers", "sageattention", gpu=True, needs_commit=True
    )
    for name in arguments.sections:
        torch.manual_seed(0)
        rows = sections[name](arguments.rounds)
        for row in rows:
            print("  ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
        what = "forward attention with quantised products"
        path = save_sections("attention", what, {name: Measurement(environment, rows)})
        print(f"saved {name} to {path}", flush=True)


def shown(value: object) -> str:
    """Of a row, for the terminal."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def kernels(rounds: int) -> list[Row]:
    """A row for each side of each case."""
    return [
        row
        for width in (128, 64)
        for texts, tokens in CASES
        for row in of_shape(texts, tokens, width, rounds)
    ]


def lengths(rounds: int) -> list[Row]:
    """A row for each side of each head size and length."""
    return [
        row
        for width in WIDTHS
        for tokens in LENGTHS
        for row in of_shape(LENGTHS[-1] // tokens, tokens, width, rounds, optional=True)
    ]


def of_shape(texts: int, tokens: int, width: int, rounds: int, optional: bool = False) -> list[Row]:
    """Rows of a shape with and without a causal mask; if `optional`, without peers that refuse it."""
    found = []
    q, k, v = (inputs(texts, HEADS, tokens, width) for _ in range(3))
    for causal in (False, True):
        sides = kernel_sides(q, k, v, causal)
        if optional:
            sides = {
                name: side for name, side in sides.items() if name.startswith("ours") or runs(name, side)
            }
        for name, side in sides.items():
            require_close(name, side(), q, k, v, causal)
        preparing = {"K and V": lambda k=k, v=v: quantize(k, v, 8, False).k}
        times = in_turns({**sides, **preparing}, rounds)
        operations = 4 * texts * HEADS * tokens**2 * width / (2 if causal else 1)
        must, stretch = AIMS.get((width, causal), (None, None))
        for name in sides:
            ms = times[name]
            row: Row = {
                "side": name, "texts": texts, "tokens": tokens, "width": width, "causal": causal,
                "ms": ms, "tops": operations / ms / 1e9,
            }  # fmt: skip
            if name == "ours, 8 bits":
                row |= {
                    "ms_quantising_k_v": times["K and V"],
                    "tops_without": operations / (ms - times["K and V"]) / 1e9,
                    "must": must, "stretch": stretch,
                }  # fmt: skip
            found.append(row)
    return found


def runs(name: str, side: Side) -> bool:
    """Whether a peer takes a shape; says why not."""
    try:
        side()
    except (RuntimeError, ValueError, AssertionError) as error:
        print(f"{name} is left out: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def kernel_sides(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Side]:
    """Everything that is compared, by its name."""
    sides: dict[str, Side] = {
        "ours, 8 bits": lambda: sage(q, k, v, causal, 8),
        "ours, 4 bits": lambda: sage(q, k, v, causal, 4),
        "SDPA, cuDNN": lambda: sdpa(q, k, v, causal, SDPBackend.CUDNN_ATTENTION),
        "SDPA, flash": lambda: sdpa(q, k, v, causal, SDPBackend.FLASH_ATTENTION),
    }
    try:
        from sageattention import sageattn
    except ImportError:
        print("sageattention is not installed: not measured", flush=True)
    else:
        sides["sageattention"] = lambda: sageattn(q, k, v, is_causal=causal)
    return sides


def sage(q: Tensor, k: Tensor, v: Tensor, causal: bool, bits: int) -> Tensor:
    """Ours, as it is called."""
    out = sage_attention(q, k, v, causal=causal, bits=bits)
    assert isinstance(out, Tensor)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, *backends: SDPBackend) -> Tensor:
    """Torch's, by one of some backends, or by the one that it chooses."""
    grouped = q.shape[1] != k.shape[1]
    if not backends:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    with sdpa_kernel(list(backends)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def inputs(texts: int, heads: int, tokens: int, width: int) -> Tensor:
    """Gaussian numbers in bf16."""
    return torch.randn(texts, heads, tokens, width, device=DEVICE).bfloat16()


def require_close(name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """End the run if the first and last rows of the first and last heads are far from fp64."""
    tokens = q.shape[2]
    for text, head in ((0, 0), (-1, -1)):
        keys, values = k[text, head, None, None], v[text, head, None, None]
        for end in (CHECKED, tokens):
            rows = slice(end - CHECKED, end)
            seen = end if causal else tokens
            exact, _ = exact_attention(
                q[text, head, None, None, rows], keys[:, :, :seen], values[:, :, :seen], causal=causal
            )
            cosine = similarity(out[text, head, None, None, rows], exact).cosine
            if not cosine >= LEAST.get(name, 0.999):
                raise SystemExit(f"{name}, {tokens} tokens, causal {causal}: cosine {cosine:.5f}, not timed")


def in_turns(sides: dict[str, Side], rounds: int, least_ms: float = 20.0) -> dict[str, float]:
    """Milliseconds of a call, the median over rounds in which each side has a turn of so many calls."""
    calls = {}
    for name, side in sides.items():
        side()
        calls[name] = max(1, round(least_ms / max(events(side, 2), 1e-3)))
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            events(side, max(1, calls[name] // 2))
            measured[name].append(events(side, calls[name]))
    return {name: statistics.median(values) for name, values in measured.items()}


def events(side: Side, calls: int) -> float:
    """Milliseconds of a call, of some one after the other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        side()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def crossover(rounds: int) -> list[Row]:
    """Causal attention of 32 heads that share 8 of keys, and of whole prompts, from few tokens to many."""
    found = []
    for texts in (1, 8):
        for tokens in (256, 512, 1024, 2048, 4096, 8192):
            q = inputs(texts, HEADS, tokens, 128)
            k, v = (inputs(texts, HEADS // 4, tokens, 128) for _ in range(2))
            require_close("ours", sage(q, k, v, True, 8), q, k, v, True)
            sides: dict[str, Side] = {
                "ours": lambda q=q, k=k, v=v: sage(q, k, v, True, 8),
                "sdpa": lambda q=q, k=k, v=v: sdpa(q, k, v, True),
            }
            times = in_turns(sides, rounds, 5.0)
            found.append(
                {
                    "texts": texts, "tokens": tokens, "ms": times["ours"], "sdpa_ms": times["sdpa"],
                    "speedup": times["sdpa"] / times["ours"],
                }
            )  # fmt: skip
    return found


def prefill(rounds: int) -> list[Row]:
    """Seconds of all layers for a prompt of 32,768 tokens, with each attention."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=PREFILL, dtype=torch.bfloat16,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = LlamaModel(config).eval()
    finally:
        torch.set_default_dtype(before)
    ids = torch.randint(0, config.vocab_size, (1, PREFILL), device=DEVICE)

    @torch.no_grad()
    def forward(name: str, *backends: SDPBackend) -> Tensor:
        model.set_attn_implementation(name)
        if not backends:
            return model(ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
        with sdpa_kernel(list(backends)):
            return model(ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    sides: dict[str, Side] = {
        "SDPA, cuDNN": lambda: forward("sdpa", SDPBackend.CUDNN_ATTENTION),
        "SDPA, flash": lambda: forward("sdpa", SDPBackend.FLASH_ATTENTION),
        "ours, 8 bits": lambda: forward("neuzip_sage8"),
    }
    by_layer = closeness_by_layer(model, ids)
    closeness = similarity(sides["ours, 8 bits"]()[0, -1024:], sides["SDPA, cuDNN"]()[0, -1024:]).cosine
    if set(uses(model)) != {"8 bits"} or not min(by_layer) >= LEAST_OF_LAYERS:
        raise SystemExit(f"prefill: cosine {min(by_layer):.5f}, attention by {uses(model)}: not timed")
    times = in_turns(sides, max(3, rounds // 3), 1.0)
    return [
        {
            "side": name, "tokens": PREFILL, "s": times[name] / 1e3,
            "speedup": times["SDPA, cuDNN"] / times[name],
            **(
                {
                    "must": PREFILL_MUST, "stretch": PREFILL_STRETCH,
                    "least_cosine_of_a_layer": min(by_layer), "cosine_of_states": closeness,
                }
                if name.startswith("ours") else {}
            ),
        }
        for name in sides
    ]  # fmt: skip


@torch.no_grad()
def closeness_by_layer(model: LlamaModel, ids: Tensor) -> list[float]:
    """Cosine similarity of each layer's attention, ours with cuDNN's, both given what cuDNN's layers give it.

    States after all layers say less: random weights damp nothing, so errors of 32 layers add up.
    """
    found: list[float] = []

    def compare(module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        if model.config._attn_implementation != "sdpa":
            return
        model.set_attn_implementation("neuzip_sage8")
        ours = module(*arguments, **keywords)[0]
        model.set_attn_implementation("sdpa")
        found.append(similarity(ours[0, -1024:], output[0][0, -1024:]).cosine)

    hooks = [layer.self_attn.register_forward_hook(compare, with_kwargs=True) for layer in model.layers]
    model.set_attn_implementation("sdpa")
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


if __name__ == "__main__":
    main()
