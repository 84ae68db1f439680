"""vLLM with packed weights against the same vLLM with bf16: speed, time to first token, requests a second.

    pip install "vllm>=0.26,<0.33"
    python benchmarks/serve_vllm.py [--sections ample scarce] [--compilation inductor|none]

The model has the shapes of Llama-3-8B and random weights, N(0, 0.02). Both forms read the same folder of
bf16 weights: `packed` is that folder with quantization="neuzip", which packs each layer as it arrives. Each
form runs in a process of its own, with the same settings of vLLM, which the result names. Prompts are random
tokens.

`ample` gives vLLM 85 % of the GPU's memory. It measures

* greedy tokens: bf16 reads the texts that packed wrote, and says for each token whether it is its own choice
  or tied with it, at most TIE roundings of bf16 logits apart (as in benchmarks/generate.py). It judges texts
  that it wrote itself, too: prompts and single tokens go through other kernels, with other roundings;
* tokens a second of 1, 32 and 128 sequences: the time of prompts and many new tokens, less that of the same
  prompts and one new token;
* time to first token of one prompt of 1,024 tokens on an idle server;
* requests a second: REQUESTS at once, 512 tokens of prompt and 512 new ones each, at most 128 run together.

`scarce` repeats the requests on a smaller card: both forms get 92 % (vLLM's own default) of 24 GiB, weights
included. What packed weights leave free, vLLM uses for keys and values.

Packed runs first, so that bf16 can read its texts. Small, for a CPU:

    python benchmarks/serve_vllm.py --layers 2 --hidden 512 --words 2048 --requests 4 --sequences 1 2 \\
        --new-tokens 8 --prompt 64 --request-tokens 16
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from llama_model import DEVICE, timed, write_model
from model_results import SERVED_AGREE, SERVED_FIRST, SERVED_REQUESTS, Results, Row
from record import Environment, Measurement, save_sections
from vllm_run import FORMS, Setup, served_tokens

from neuzip.runtime.decode.benchmark import free_memory

WHAT = "vLLM serves a Llama-3-8B-shaped model of random weights, packed and in bf16"
SECTIONS = ("ample", "scarce")
AMPLE, SCARCE = 0.85, 0.92
"""Shares of the memory that vLLM may use: of the GPU, and of the smaller card."""


def main() -> None:
    """Measure all sections, print the figures, save each section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--compilation", choices=("inductor", "none"), default="inductor")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, and no compilation")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--words", type=int, default=128_256, help="of the vocabulary")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens, for the time to first token")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--request-tokens", type=int, default=512, help="of a prompt, and new ones")
    parser.add_argument("--card-gib", type=float, default=24.0, help="memory of the card of `scarce`")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="has 20 GB free")
    arguments = parser.parse_args()
    is_whole = DEVICE.type == "cuda" and is_usual(arguments, parser)
    packages = ("neuzip-toolkit", "vllm", "torch", "triton", "transformers")
    environment = Environment.here(*packages, gpu=DEVICE.type == "cuda", needs_commit=is_whole)
    print(f"{environment.gpu or environment.processor}, {dict(environment.packages)}, {environment.commit}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        with timed("written, plain"):
            write_model(folder / "model", arguments, "gaussian")
        free_memory()
        for section in arguments.sections:
            results = Results()
            facts = measure(section, arguments, folder, results)
            rows += results.rows
            if is_whole:
                name = f"{section}, {environment.gpu.name}" if environment.gpu else section
                path = save_sections(
                    "serve_vllm", WHAT, {name: Measurement(environment, results.rows, facts)}
                )
                print(f"saved {section} in {path}", flush=True)
    aimed = [row for row in rows if "met" in row]
    print(f"\n{sum(not row['met'] for row in aimed)} of {len(aimed)} targets missed")
    if not is_whole:
        print("nothing is saved: this was a small run, or had no GPU")


def is_usual(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether a run has its usual size, and is saved. The compilation is a fact of the result."""
    free = {"sections", "compilation", "folder"}
    return all(getattr(arguments, name) == parser.get_default(name) for name in set(vars(arguments)) - free)


def measure(section: str, arguments: argparse.Namespace, folder: Path, results: Results) -> dict[str, Any]:
    """Both forms of a section, each in its own process. Returns the settings of vLLM."""
    measured: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        setup = setup_of(section, form, arguments, folder)
        measured[form] = run(setup, folder / f"{section}-{form}.json")
    bf16, packed = measured["bf16"], measured["packed"]
    for form in ("bf16", "packed"):
        results.against_bf16(
            f"room for keys and values, {section}", form, measured[form]["kv_tokens"], "tokens"
        )
    if section == "ample":
        for form, agreed in (("bf16", bf16["own_agreement"]), ("packed", bf16["agreement"])):
            fitting = agreed["chosen"] + agreed["tied"]
            unit = f"of {agreed['tokens']}, {agreed['tied']} tied"
            results.add(SERVED_AGREE, form, fitting, unit, fitting / agreed["tokens"])
        for count in arguments.sequences:
            for form, of in (("bf16", bf16), ("packed", packed)):
                what = served_tokens(count)
                results.against_bf16(what, form, of["tokens_s"][str(count)], "tokens/s")
        for form, of in (("bf16", bf16), ("packed", packed)):
            results.against_bf16(SERVED_FIRST, form, 1e3 * of["first_token_s"], "ms")
    for form, of in (("bf16", bf16), ("packed", packed)):
        results.against_bf16(f"{SERVED_REQUESTS}, {section} room", form, of["requests_s"], "requests/s")
    return {"vllm": packed["settings"], "attention": packed["attention"]}


def setup_of(section: str, form: str, arguments: argparse.Namespace, folder: Path) -> Setup:
    """What a process measures."""
    share = AMPLE
    if section == "scarce":
        total = torch.cuda.get_device_properties(0).total_memory if DEVICE.type == "cuda" else 1 << 35
        share = SCARCE * arguments.card_gib * 2**30 / total
    return Setup(
        form=form,
        folder=str(folder / "model"),
        texts=str(folder / "texts.json"),
        compilation="eager" if arguments.eager else arguments.compilation,
        memory_share=share,
        is_on_gpu=DEVICE.type == "cuda",
        words=arguments.words,
        most_sequences=max(arguments.sequences),
        sequences=arguments.sequences if section == "ample" else [],
        new_tokens=arguments.new_tokens,
        prompt=arguments.prompt if section == "ample" else 0,
        requests=arguments.requests,
        request_tokens=arguments.request_tokens,
    )


def run(setup: Setup, path: Path) -> dict[str, Any]:
    """What one process measured. SystemExit if it failed."""
    began = time.perf_counter()
    command = [
        sys.executable,
        str(Path(__file__).with_name("vllm_run.py")),
        json.dumps(vars(setup)),
        str(path),
    ]
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    if subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode:
        sys.exit(f"vLLM failed with {setup.form} weights: its messages are above")
    print(f"  {path.stem}: {time.perf_counter() - began:.0f} s", flush=True)
    measured: dict[str, Any] = json.loads(path.read_text())
    return measured


if __name__ == "__main__":
    main()
