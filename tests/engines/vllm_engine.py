"""vLLM on a CPU, in this process and in others, and how its tokens are judged.

Run as a program, it starts vLLM in a process of its own, and prints the tokens as JSON:

    python tests/engines/vllm_engine.py '[{"folder": "my-model.nz", "options": {"tensor_parallel_size": 2}}]'
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

Tokens = list[list[int]]

TEXTS: Tokens = [[1, 2, 3], [7, 100, 200, 249, 5], [42]]
"""Prompts, as tokens that every model of the tests has."""

NEW = 24
"""Tokens that are generated after each prompt."""

TIE = 4
"""Roundings to bf16 that two logits may be apart to be a tie, as in neuzip.runtime.decode.agreement.

A rounding is at most 2**-8 of the logit. Sums in another order move a logit by two of them, about.
"""

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "logprobs_mode": "raw_logits",
    "kv_cache_memory_bytes": 64 << 20,
}


def start(folder: Path | str, **options: Any) -> LLM:
    """A running engine on a checkpoint."""
    from vllm import LLM

    return LLM(str(folder), **OPTIONS | options)


@contextmanager
def started(folder: Path | str, **options: Any) -> Iterator[LLM]:
    """An engine that ends with the block."""
    engine = start(folder, **options)
    yield engine
    del engine
    gc.collect()


def residency(name: str, **others: Any) -> dict[str, Any]:
    """The option of vLLM that chooses neuzip's residency."""
    return {"additional_config": {"neuzip": {"residency": name, **others}}}


def _generate(
    engine: LLM, texts: Sequence[Sequence[int]], tokens: int, logits: int | None = None
) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logits
    )
    prompts = [{"prompt_token_ids": list(text)} for text in texts]
    return [output.outputs[0] for output in engine.generate(prompts, sampling, use_tqdm=False)]


def greedy(engine: LLM, texts: Tokens = TEXTS) -> Tokens:
    """The NEW tokens that an engine takes after each text."""
    return [list(output.token_ids) for output in _generate(engine, texts, NEW)]


def logits(
    engine: LLM, texts: Sequence[Sequence[int]] = TEXTS, tokens: int = 1
) -> list[list[dict[int, float]]]:
    """The 20 largest logits of each of the next tokens after each text, in fp32."""
    outputs = _generate(engine, texts, tokens, logits=20)
    return [
        [{token: entry.logprob for token, entry in place.items()} for place in o.logprobs] for o in outputs
    ]


def assert_chosen_or_tied(original: LLM, tokens: Tokens, texts: Tokens = TEXTS) -> int:
    """Assert that each token is the original's own choice after the same text, or tied with it: see TIE.

    Returns how many are tied.
    """
    places = [
        (text + new[:i], new[i]) for text, new in zip(texts, tokens, strict=True) for i in range(len(new))
    ]
    assert len(places) == len(texts) * NEW
    tied = 0
    for (text, token), ((best,)) in zip(places, logits(original, [text for text, _ in places]), strict=True):
        largest = max(best.values())
        if token != max(best, key=lambda word: best[word]):
            gap = largest - best.get(token, float("-inf"))
            assert gap <= TIE * abs(largest) * 2**-8, (
                f"after {text}: {token} is {gap} below {largest}: {best}"
            )
            tied += 1
    return tied


def packed_bytes(engine: LLM) -> int:
    """Bytes of the parameters and buffers of all packed layers of an engine's model in this process.

    A dense weight that such a layer still had would be among them. Other layers are not counted: whether
    vLLM keeps their weights or copies in another layout depends on the CPU.
    """

    def of(model: Any) -> int:
        layers = [layer for layer in model.modules() if hasattr(layer, "neuzip_packed")]
        own = (t for layer in layers for t in (*layer.parameters(False), *layer.buffers(False)))
        tensors = {t.data_ptr(): t for t in own}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    (size,) = engine.apply_model(of)
    return int(size)


# Other processes


def in_other_process(
    *starts: dict[str, Any], timeout: float = 600, **environment: str
) -> tuple[list[dict[str, Any]], str]:
    """Start engines one after the other in a process of its own: what `result` says of each, and the log.

    A start is {"folder": path, "options": {...}, "reload": path}: options and reload may be left out.
    """
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(starts, default=str)],
        env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-8000:]
    return json.loads(done.stdout.rpartition("RESULTS ")[2].splitlines()[0]), log


def result(folder: str, options: dict[str, Any], reload: str | None) -> dict[str, Any]:
    """The tokens after TEXTS and the modules that were imported, or else the error of a start.

    "refused" is the error of loading the weights of `reload` into the engine, and "reloaded" the tokens then.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        with started(folder, **options) as engine:
            found: dict[str, Any] = {"tokens": greedy(engine), "modules": sorted(sys.modules)}
            if reload is not None:
                try:
                    engine.collective_rpc("reload_weights", kwargs={"weights_path": reload})
                except Exception as error:
                    found["refused"] = str(error)
                found["reloaded"] = greedy(engine)
            return found
    except Exception as error:
        return {"error": str(error)}
    finally:
        cleanup_dist_env_and_memory()


def main() -> None:
    """Start what the argument lists, and print the results as JSON."""
    starts = json.loads(sys.argv[1])
    results = [result(start["folder"], start.get("options", {}), start.get("reload")) for start in starts]
    print("RESULTS", json.dumps(results), flush=True)


if __name__ == "__main__":  # worker processes import this module again
    main()
