"""One process of serve_vllm.py: vLLM with one form of the weights, and what is measured of it.

    python benchmarks/vllm_run.py SETUP RESULT

SETUP is the JSON object of a `Setup`. RESULT is the file of JSON that is written.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMS = ("packed", "bf16")
"""In the order in which they run: bf16 reads what packed wrote."""

TIE = 4
"""Roundings that two logits may be apart to be a tie, as in neuzip.runtime.decode.agreement."""

ROUNDING = 2.0**-8
"""Relative error of rounding to bf16, at most."""

SHORT = 32
"""Tokens of the prompts whose decoding is timed."""

TEXTS, TEXT_TOKENS = 8, 64
"""Texts whose tokens are compared, and the tokens of each."""

ROUNDS, FIRST_ROUNDS = 3, 12
"""Times that a speed and a first token are measured: the median counts."""


@dataclass(frozen=True)
class Setup:
    """What a process measures: one form, with so much memory."""

    form: str
    folder: str
    texts: str
    compilation: str
    memory_share: float
    is_on_gpu: bool
    words: int
    most_sequences: int
    sequences: list[int]
    new_tokens: int
    prompt: int
    requests: int
    request_tokens: int

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest text."""
        texts = SHORT + max(TEXT_TOKENS, self.new_tokens + 1), 2 * self.request_tokens, self.prompt + 1
        return max(texts) + 16

    def settings(self) -> dict[str, Any]:
        """What vLLM is given, of which only quantization is of the form."""
        compilation: dict[str, Any] = {"mode": 0, "cudagraph_mode": "NONE"}
        if self.compilation == "none":
            compilation |= {"cudagraph_mode": "FULL"}
        elif self.compilation == "inductor":
            compilation = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}
        if self.compilation != "eager":
            compilation["cudagraph_capture_sizes"] = captured_sizes(self.most_sequences)
        return {
            "dtype": "bfloat16",
            "max_model_len": self.most_tokens,
            "max_num_seqs": self.most_sequences,
            "max_num_batched_tokens": max(4096, self.most_tokens),
            "gpu_memory_utilization": round(self.memory_share, 4),
            "enable_prefix_caching": False,
            "logprobs_mode": "raw_logits",
            "compilation_config": compilation,
        }


def served_tokens(sequences: int) -> str:
    """What the row of so many sequences is called."""
    return f"served tokens/s, {sequences} sequence{'s' if sequences > 1 else ''}"


def captured_sizes(most: int) -> list[int]:
    """Batches that CUDA graphs are recorded for: the powers of two and multiples of 32 up to `most`."""
    powers = [1 << bit for bit in range(most.bit_length())]
    return sorted({*(size for size in powers if size <= most), *range(32, most + 1, 32), most})


class Server:
    """vLLM with one form, which generates greedily and never ends a text early."""

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM

        self.setup = setup
        self._random = random.Random(0)
        self.llm = LLM(
            setup.folder,
            skip_tokenizer_init=True,
            quantization="neuzip" if setup.form == "packed" else None,
            seed=0,
            **setup.settings(),
        )

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Random tokens, of both forms the same."""
        return [[self._random.randrange(self.setup.words) for _ in range(tokens)] for _ in range(count)]

    def generate(self, prompts: Sequence[list[int]], new_tokens: int, **parameters: Any) -> list[Any]:
        """vLLM's outputs for prompts that are all submitted at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **parameters
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        for output in outputs:
            if len(output.outputs[0].token_ids) != new_tokens:
                sys.exit(f"vLLM made {len(output.outputs[0].token_ids)} tokens, not {new_tokens}")
        return outputs

    def seconds(self, prompts: Sequence[list[int]], new_tokens: int) -> float:
        """How long that takes."""
        began = time.perf_counter()
        self.generate(prompts, new_tokens)
        return time.perf_counter() - began

    def kv_tokens(self) -> int:
        """Tokens whose keys and values have room."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)


def measured(server: Server) -> dict[str, Any]:
    """All figures of a process."""
    setup = server.setup
    figures: dict[str, Any] = {
        "settings": setup.settings(),
        "attention": os.environ.get("VLLM_ATTENTION_BACKEND", "chosen by vLLM"),
        "kv_tokens": server.kv_tokens(),
    }
    say(f"{setup.form}: room for {figures['kv_tokens']:,} tokens")
    if setup.sequences:
        texts = Path(setup.texts)
        prompts = server.prompts(TEXTS, SHORT)
        if setup.form == "packed":
            texts.write_text(json.dumps(decoded_texts(server, prompts)))
        else:
            figures["agreement"] = agreement(server, json.loads(texts.read_text()))
            figures["own_agreement"] = agreement(server, decoded_texts(server, prompts))
            say(f"agreement: {figures['agreement']}, of bf16's own texts {figures['own_agreement']}")
        figures["tokens_s"] = {count: tokens_per_second(server, count) for count in setup.sequences}
    if setup.prompt:
        figures["first_token_s"] = first_token_seconds(server)
        say(f"{setup.form}: first token in {1e3 * figures['first_token_s']:.2f} ms")
    figures["requests_s"] = requests_per_second(server)
    say(f"{setup.form}: {figures['requests_s']:.3f} requests/s")
    return figures


def decoded_texts(server: Server, prompts: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    """Prompts with the tokens that the server chooses after them, decoded one by one."""
    outputs = server.generate(prompts, TEXT_TOKENS)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return [{"prompt": p, "tokens": t} for p, t in zip(prompts, tokens, strict=True)]


def agreement(server: Server, texts: Sequence[dict[str, list[int]]]) -> dict[str, int]:
    """How many tokens of `texts` are the server's own choice, and how many others are tied with it."""
    whole = [text["prompt"] + text["tokens"] for text in texts]
    found = {"tokens": 0, "chosen": 0, "tied": 0}
    for text, output in zip(texts, server.generate(whole, 1, prompt_logprobs=1), strict=True):
        for token, logits in zip(text["tokens"], output.prompt_logprobs[SHORT:], strict=True):
            best, own = max(entry.logprob for entry in logits.values()), logits[token].logprob
            found["tokens"] += 1
            if own == best:
                found["chosen"] += 1
            elif best - own <= TIE * ROUNDING * abs(best):
                found["tied"] += 1
    return found


def tokens_per_second(server: Server, count: int) -> float:
    """Decoded tokens a second of `count` sequences together, the prompts' time taken off."""
    prompts = server.prompts(count, SHORT)
    server.generate(prompts, 8)
    new = server.setup.new_tokens
    speeds = []
    for _ in range(ROUNDS):
        first = server.seconds(prompts, 1)
        speeds.append(count * new / (server.seconds(prompts, 1 + new) - first))
    say(f"{server.setup.form}: {count} sequences, tokens/s " + " ".join(f"{speed:.1f}" for speed in speeds))
    return statistics.median(speeds)


def first_token_seconds(server: Server) -> float:
    """Median time to the first token of one prompt, behind two that do not count."""
    times = [server.seconds(server.prompts(1, server.setup.prompt), 1) for _ in range(FIRST_ROUNDS + 2)]
    return statistics.median(times[2:])


def requests_per_second(server: Server) -> float:
    """Requests a second, all submitted at once, behind a few that do not count."""
    tokens = server.setup.request_tokens
    server.generate(server.prompts(2, tokens), 2)
    return server.setup.requests / server.seconds(server.prompts(server.setup.requests, tokens), tokens)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"  {line}", file=sys.stderr, flush=True)


def main(setup: str, result: str, measure: Callable[[Server], dict[str, Any]] = measured) -> None:
    """Start vLLM, measure, and write the figures."""
    began = time.perf_counter()
    server = Server(Setup(**json.loads(setup)))
    say(f"{server.setup.form}: started in {time.perf_counter() - began:.1f} s")
    Path(result).write_text(json.dumps(measure(server)))


if __name__ == "__main__":
    main(*sys.argv[1:])
