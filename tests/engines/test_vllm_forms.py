"""vLLM on folders of unusual forms: from the Hub, tied, quantized before, with a head of its own.

All starts of a process are in one program: most of a start is the import of vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_models import SIZES, compressed, quantized, untied, with_config, with_tensors

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

pytestmark = pytest.mark.engines

PACKED = {"additional_config": {"neuzip": {"residency": "packed"}}}

PROGRAM = """
import gc, json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

def layers(model):
    found = {}
    for name, layer in model.named_modules():
        packed = getattr(layer, "neuzip_packed", None)
        if packed is not None:
            found[name] = {"shape": list(packed.shape), "width": getattr(packed, "width", None)}
            if hasattr(packed, "turn_index"):
                found[name] |= {"escapes": packed.escapes.numel(), "turns": packed.turn_index.numel()}
    return found

for folder, options in json.loads(sys.argv[1]):
    try:
        engine = LLM(folder, **{
            "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 4, "enforce_eager": True,
            "skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, **options})
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3], [7, 100, 5], [42])]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        result = {"tokens": [list(output.outputs[0].token_ids) for output in outputs],
                  "layers": engine.apply_model(layers)[0]}
        del engine, outputs
    except Exception as error:
        result = {"error": str(error)}
    cleanup_dist_env_and_memory()
    gc.collect()
    print("RESULT", json.dumps(result), flush=True)
"""


def run(*starts: tuple[str | Path, dict[str, Any]], **environment: str) -> tuple[list[dict[str, Any]], str]:
    """Start vLLM with folders and options, one after the other in one process: the results, and the log."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(str(folder), options) for folder, options in starts])],
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        | environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    assert len(results) == len(starts), done.stdout[-3000:] + done.stderr[-3000:]
    return results, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": True}, intermediate_size=512)
    folder = tmp_path_factory.mktemp("models") / "tied"
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def with_own_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a tied model, and an LM head of other values, which its config.json denies."""
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}


def test_tied_embeddings_and_what_config_json_says(tied: Path, tmp_path: Path) -> None:
    small = compressed(tied)
    packed = with_config(
        small, tmp_path / "packed.nz", lambda config: config.update(neuzip={"vllm": {"residency": "packed"}})
    )
    wrong = with_config(
        small, tmp_path / "wrong.nz", lambda config: config.update(neuzip={"vllm": {"exactly": True}})
    )
    before = with_config(
        small,
        tmp_path / "fp8.nz",
        lambda config: config["quantization_config"].update(original={"quant_method": "fp8"}),
    )
    own_head = compressed(with_tensors(tied, tmp_path / "own", with_own_head))
    results, _ = run(
        (tied, {}), (small, {}), (packed, {}), (wrong, {}), (before, {}), (own_head, {}),
        (small, PACKED | {"dtype": "float32"}), (small, PACKED | {"cpu_offload_gb": 1}),
    )  # fmt: skip
    original, dense, by_file, *refused = results
    assert dense["tokens"] == by_file["tokens"] == original["tokens"], results
    assert dense["layers"] == {}
    # 1,000 rows and 24 copies of the last one; the LM head has none of its own.
    embedding = by_file["layers"]["model.embed_tokens"]
    assert embedding["shape"] == [1024, 256] and embedding["escapes"] < 100 and embedding["turns"]
    assert "lm_head" not in by_file["layers"]
    assert by_file["layers"]["model.layers.0.self_attn.qkv_proj"]["shape"] == [512, 256]
    words = ["exactly", "fp8", "lm_head.weight", "dtype", "offload"]
    for word, result in zip(words, refused, strict=True):
        assert word in result.get("error", "no error"), results


def test_a_compressed_repository_of_the_hub_is_served(tied: Path, tmp_path: Path) -> None:
    from loopback_hub import hub_environment, running_hub

    model = untied(tmp_path / "shards", shard="500KB")
    small = compressed(model)
    files = {str(p.relative_to(small)): p.read_bytes() for p in small.rglob("*") if p.is_file()}
    assert sum(name.endswith(".safetensors") for name in files) > 2 and "neuzip/manifest.json" in files
    with running_hub() as hub:
        hub.add("org/small", files)
        environment = hub_environment(hub.url, tmp_path / "home") | {"HF_HUB_OFFLINE": "0"}
        (original, served, packed), _ = run(
            (model, {}), ("org/small", {}), ("org/small", PACKED), **environment
        )
    assert served.get("tokens") == packed.get("tokens") == original["tokens"], (served, packed)


def test_quantized_folders_have_the_tokens_of_their_decoded_weights(tmp_path: Path) -> None:
    """Packed weights are the codes, also of fused layers, whose parts have steps of their own."""
    small, decoded = quantized(untied(tmp_path / "model"))
    results, log = run(
        (decoded, {}), (small, {}), (small, PACKED), (decoded, PACKED | {"quantization": "neuzip"}),
        VLLM_LOGGING_LEVEL="INFO",
    )  # fmt: skip
    original, dense, packed, of_floats = results
    assert dense["tokens"] == original["tokens"] and dense["layers"] == {}, results
    assert packed.get("tokens") == of_floats.get("tokens") == original["tokens"], results
    widths = {name: layer["width"] for name, layer in packed["layers"].items()}
    assert set(widths) >= {"model.embed_tokens", "lm_head", "model.layers.1.self_attn.qkv_proj"}
    assert all(width is not None and width <= 6 for width in widths.values()), widths
    assert "as the codes of quantized weights" in log
    assert all(layer["width"] is None for layer in of_floats["layers"].values())
