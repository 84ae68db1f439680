"""A Llama-3-8B-shaped model in bf16 and in every residency: tokens a second, memory, logits.

    python benchmarks/generate.py [--sections llama two-gpus wikilm serving]
        [--forms bf16 dense packed ans rounded]

`bf16` is transformers' own `from_pretrained` of the plain folder, what it is measured against; the others are
`neuzip.load_model` of the compressed one; `rounded` has 3 mantissa bits and is packed. The weights are made
up: N(0, 0.02), norms 1. All forms decode with the same `GreedyDecoder`, whose steps are one CUDA graph, with
norms and the like fused in all of them alike; a speed is that of the median step. Where its weights happen to
lie makes a model up to 1.9 % faster or slower than its like. So `dense`, which should be just as fast as
bf16, is loaded ALIKE times, with as many bf16 models between, and all take turns: the medians are compared,
less what the bf16 models are apart, 1 % at most. Rows called compiled are of steps that torch.compile
compiled first, those of bf16 as well, whose ratios are to each other; --no-compile leaves them out. Peak
memory is that of torch's tensors while the model is loaded and adds 512 tokens to a text. The error of logits
is relative, in the 2-norm, to a forward pass in fp64 (norms in fp32, as the model's code has them); packed
may have 5 % more of it than bf16, the scatter of sums in another order. Where that makes packed take another
token, what counts is whether the original, reading the same text, takes it too or has it tied with its own:
at most TIE roundings of bf16 logits apart.

DFloat11 decodes all weights for each token. Its bound is what its decode kernel alone takes for that, by
benchmarks/results/gpu_codec.json: everything else would come on top.

`serving` measures what a server with many users does, with bf16 and packed alone: decoding of batches of 64
and 128 texts, and a prompt of 2,048 tokens, with weights of two laws (weight_laws.py). Both models take
turns. They may have fewer layers, which the rows name:

    python benchmarks/generate.py --sections serving --layers 8

A section that ran whole, on a GPU, takes its place in benchmarks/results/generate.json. `two-gpus` needs two,
`wikilm` the folder that NEUZIP_DATA names. Small, for a CPU:

    python benchmarks/generate.py --layers 2 --hidden 256 --words 1024 --new-tokens 8 --prefill 16 \\
        --forms bf16 dense packed
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from llama_model import DEVICE, FORMS, RESIDENCIES, from_pretrained, load, made, nbytes_of, timed
from model_results import (
    APART,
    COMPILED,
    DECODE,
    DFLOAT11,
    ERROR,
    GENERATED,
    GENERATED_TIES,
    GRAPHED,
    GRAPHED_TIES,
    LOSSLESS,
    PEAK,
    SAME,
    SPREAD,
    Results,
    Row,
)
from record import Environment, Measurement, save_sections
from serving import BATCH_TOKENS, PROMPT, serving, steps_in_turns
from transformers import AutoTokenizer, PreTrainedModel
from weight_laws import LAWS

from neuzip.compress import compress
from neuzip.runtime.decode.agreement import agreement
from neuzip.runtime.decode.benchmark import free_memory, peak_bytes, prompts, reset_peak, run
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.messages import quiet_transformers
from neuzip.runtime.residency import memory

Tensor = torch.Tensor

WHAT = "a Llama-3-8B-shaped model of made-up weights, and wikilm-26m, in every residency"
ALIKE, MOST_APART = 3, 0.01  # models that are compared; what they may be apart at most
LOGIT_ROWS = (1, 16)  # positions at a time, both few enough for the kernels of packed
WIKILM_TOKENS = 256


def main() -> None:
    """Measure all sections, print the figures, save each section."""
    sections = {"llama": llama, "two-gpus": two_gpus, "wikilm": wikilm, "serving": serving}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--words", type=int, default=128_256, help="of the vocabulary")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32], help="beside 1")
    parser.add_argument("--serving-batches", type=int, nargs="*", default=[64, 128], help="of serving")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS), help="of weights, of serving")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows of compiled steps")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="has 36 GB free")
    arguments = parser.parse_args()
    whole = {name: DEVICE.type == "cuda" and is_whole(name, arguments, parser) for name in arguments.sections}
    packages = ("neuzip-toolkit", "torch", "triton", "transformers")
    environment = Environment.here(*packages, gpu=DEVICE.type == "cuda", needs_commit=any(whole.values()))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, quiet_transformers():
        for name in arguments.sections:
            save = partial(save_section, name, environment)
            results = Results(save=save) if whole[name] else Results()
            sections[name](arguments, Path(folder), results)
            results.save(results.rows)
            rows += results.rows
    aimed = [row for row in rows if "met" in row]
    print(f"\n{sum(not row['met'] for row in aimed)} of {len(aimed)} targets missed")
    for name in arguments.sections:
        if not whole[name]:
            print(f"{name} is not saved: this was a small run")


def is_whole(section: str, arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether a section has its usual size, and is saved; the layers of `serving` are named in its rows."""
    names = {"hidden", "words", "prefill"}
    names |= {"serving_batches"} if section == "serving" else {"forms", "layers", "batches", "new_tokens"}
    return all(getattr(arguments, name) == parser.get_default(name) for name in names)


def save_section(name: str, environment: Environment, rows: list[Row]) -> None:
    """Put the rows of a section, if there are any, into the place of those that were saved before."""
    if rows:
        path = save_sections("generate", WHAT, {name: Measurement(environment, rows)})
        print(f"saved {name} in {path}")


# The 8B-shaped model


def llama(arguments: argparse.Namespace, folder: Path, results: Results) -> None:
    """Speed, memory and logits of every form."""
    folders = made(arguments, arguments.forms, folder)
    expected: dict[int, Tensor] = {}
    exact: dict[int, Tensor] = {}
    for form in arguments.forms:
        free_memory()
        reset_peak(DEVICE)
        if DEVICE.type == "cuda":
            print(f"  {torch.cuda.memory_allocated() / 1e6:.0f} MB in use", flush=True)
        with timed(f"{form}: loaded"):
            model = load(form, folders)
        results.against_bf16("weights in memory", form, memory(model).total.stored_bytes / 1e9, "GB")
        decode_one(arguments, form, model, results, folders)
        for batch in arguments.batches:
            seconds = decode_seconds(model, batch, BATCH_TOKENS)
            results.against_bf16(f"decode, batch {batch}", form, batch / seconds, "tokens/s")
        if not arguments.no_compile:
            decode_compiled(arguments, form, model, results)
        results.against_bf16("prefill", form, prefill_speed(model, arguments.prefill), "tokens/s")
        logits = {rows: logits_of(model, rows) for rows in LOGIT_ROWS}
        if form == "bf16":
            expected, exact = logits, {rows: exact_logits(model, rows) for rows in LOGIT_ROWS}
        if form != "rounded" and expected:
            compare_logits(form, logits, expected, exact, results)
        del model
    free_memory()


def decode_one(
    arguments: argparse.Namespace,
    form: str,
    model: PreTrainedModel,
    results: Results,
    folders: dict[str, Path],
) -> None:
    """One text: the speed, and the peak of all since the load began."""
    seconds = decode_seconds(model, 1, arguments.new_tokens)
    peak = peak_bytes(DEVICE) or 0
    results.against_bf16(PEAK, form, peak / 1e9, "GB")
    if form == "dense":
        compare_alike(arguments, model, results, folders)
    else:
        results.against_bf16(DECODE, form, 1 / seconds, "tokens/s")
    if form == "ans":
        bound = dfloat11_speed() / nbytes_of(folders["plain"])
        results.add(DFLOAT11, form, bound, "tokens/s", (1 / seconds) / bound)


def compare_alike(
    arguments: argparse.Namespace, model: PreTrainedModel, results: Results, folders: dict[str, Path]
) -> None:
    """The speed of some `dense` models, of which this is one, to that of as many bf16 ones."""
    models = [model]
    while len(models) < 2 * ALIKE:
        models.append(load("dense" if len(models) % 2 == 0 else "bf16", folders))
    steps = in_turns(arguments, models)
    dense, bf16 = steps[::2], steps[1::2]
    apart = max(bf16) / min(bf16) - 1
    results.add(APART, "bf16", 100 * apart, "%")
    results.add(APART, "dense", 100 * (max(dense) / min(dense) - 1), "%")
    seconds, base = statistics.median(dense), statistics.median(bf16)
    results.add(DECODE, "dense", 1 / seconds, "tokens/s", base / seconds, min(apart, MOST_APART))


def in_turns(arguments: argparse.Namespace, models: list[PreTrainedModel]) -> list[float]:
    """Median steps of models that should be equally fast: in turns, as runs minutes apart differ more.

    Each turn is in the other direction than the one before.
    """
    medians = steps_in_turns(models, 1, min(BATCH_TOKENS, arguments.new_tokens), arguments.new_tokens)
    print("  in turns: " + " ".join(f"{1e6 * step:.1f}" for step in medians) + " us", flush=True)
    return medians


def decode_compiled(
    arguments: argparse.Namespace, form: str, model: PreTrainedModel, results: Results
) -> None:
    """One text, by compiled steps: torch would compile again, most of a minute, for each other batch."""
    seconds = decode_seconds(model, 1, arguments.new_tokens, compiled=True)
    results.against_bf16(DECODE + COMPILED, form, 1 / seconds, "tokens/s")


def decode_seconds(model: PreTrainedModel, batch: int, new_tokens: int, compiled: bool = False) -> float:
    """The median step after a short prompt."""
    with timed(f"batch {batch}, {'compiled and ' if compiled else ''}captured"):
        decoder = GreedyDecoder(model, batch, PROMPT + new_tokens, compiled=compiled)
    print(f"  fused: {decoder.fused}", flush=True)
    ids = prompts(model.config.vocab_size, batch, PROMPT)
    return statistics.median(run(decoder, ids, new_tokens).step_seconds)


def prefill_speed(model: PreTrainedModel, tokens: int) -> float:
    """Tokens a second of one prompt, the median of five behind one that does not count."""
    free_memory()
    decoder = GreedyDecoder(model, 1, tokens + 1, graph=False)
    ids = prompts(model.config.vocab_size, 1, tokens)
    return tokens / statistics.median([run(decoder, ids, 1).prefill_seconds for _ in range(6)][1:])


def dfloat11_speed() -> float:
    """Bytes of weights a second out of DFloat11's kernel, as measured."""
    path = Path(__file__).parent / "results" / "gpu_codec.json"
    rows = json.loads(path.read_text())["results"]
    speeds = [float(r["gb_s"]) for r in rows if r["by"].startswith("DFloat11") and "gb_s" in r]
    return 1e9 * max(speeds)


# Logits


def logits_of(model: PreTrainedModel, rows: int) -> Tensor:
    """The logits of all positions of a made-up prompt, on the CPU."""
    with torch.no_grad():
        logits: Tensor = model(prompts(model.config.vocab_size, 1, rows).to(DEVICE), use_cache=False).logits
    return logits[0].cpu()


def exact_logits(model: PreTrainedModel, rows: int) -> Tensor:
    """The same in fp64, layer by layer, from the weights of a dense model."""
    ids = prompts(model.config.vocab_size, 1, rows).to(DEVICE)
    inner = model.model
    with torch.no_grad():
        hidden = inner.embed_tokens(ids).double()
        rotation = inner.rotary_emb(hidden, position_ids=torch.arange(rows, device=DEVICE)[None])
        for layer in inner.layers:
            hidden = copy.deepcopy(layer).double()(hidden, position_embeddings=rotation)
        hidden = inner.norm(hidden)
        parts = [hidden[0] @ part.double().T for part in model.lm_head.weight.split(1 << 14)]
    return torch.cat(parts, dim=1).cpu()


def compare_logits(
    form: str,
    logits: dict[int, Tensor],
    expected: dict[int, Tensor],
    exact: dict[int, Tensor],
    results: Results,
) -> None:
    """Whether the bits are those of bf16, and how far off both are."""
    if form in ("dense", "ans"):
        same = [torch.equal(logits[n].view(torch.int16), expected[n].view(torch.int16)) for n in LOGIT_ROWS]
        results.add(SAME, form, sum(same) / len(same), "of runs", sum(same) / len(same))
    error, base = (
        max(float((found[n].double() - exact[n]).norm() / exact[n].norm()) for n in LOGIT_ROWS)
        for found in (logits, expected)
    )
    results.add(ERROR, form, error, "", error / base)


# Several GPUs, and a real model


def two_gpus(arguments: argparse.Namespace, folder: Path, results: Results) -> None:
    """The same tokens with the layers spread over two GPUs as with all on one."""
    if torch.cuda.device_count() < 2:
        print("two-gpus: left out, as there is one at most")
        return
    forms = [form for form in arguments.forms if form in LOSSLESS]
    folders = made(arguments, forms, folder)
    for form in forms:
        found = []
        for device in (DEVICE, "auto"):
            free_memory()
            model = load_model(folders["small"], device=device, residency=RESIDENCIES[form])
            places = {parameter.device for parameter in model.parameters()}
            decoder = GreedyDecoder(model, 1, PROMPT + BATCH_TOKENS, graph=False)
            found.append(decoder.generate(prompts(arguments.words, 1, PROMPT), BATCH_TOKENS).cpu())
            del model, decoder
        if len(places) != 2:
            raise SystemExit(f"two-gpus: the model lies on {len(places)}")
        results.add(SPREAD, form, *share(found[1], found[0]))


def wikilm(arguments: argparse.Namespace, folder: Path, results: Results) -> None:
    """Greedy tokens of a real model, from the graph and from transformers, as the original's."""
    data = os.environ.get("NEUZIP_DATA")
    if not data:
        print("wikilm: left out, as NEUZIP_DATA is not set")
        return
    plain, small = Path(data) / "wikilm-26m", folder / "wikilm-26m.nz"
    compress(plain, small)
    ids = AutoTokenizer.from_pretrained(plain)("The history of the", return_tensors="pt")["input_ids"].to(
        DEVICE
    )
    original = from_pretrained(plain)
    expected = greedy(original, ids)
    for form in arguments.forms:
        if form not in LOSSLESS:
            continue
        model = load_model(small, device=DEVICE, residency=RESIDENCIES[form])
        decoder = GreedyDecoder(model, 1, ids.shape[1] + WIKILM_TOKENS)
        for same, ties, found in (
            (GENERATED, GENERATED_TIES, greedy(model, ids)),
            (GRAPHED, GRAPHED_TIES, decoder.generate(ids, WIKILM_TOKENS)),
        ):
            results.add(same, form, *share(found, expected))
            if form == "packed":
                judged = agreement(original, ids, found)
                fitting = judged.chosen + judged.tied
                unit = f"of {judged.tokens}, {judged.tied} tied"
                results.add(ties, form, fitting, unit, fitting / judged.tokens)
        del model, decoder


def greedy(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Tokens of transformers' generate; no token ends the text."""
    model.generation_config.eos_token_id = None
    whole: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=WIKILM_TOKENS, do_sample=False
    )
    return whole[:, ids.shape[1] :]


def share(found: Tensor, expected: Tensor) -> tuple[float, str, float]:
    """How many tokens are those expected, as a row wants it."""
    same = int((found.cpu() == expected.cpu()).sum())
    return same, f"of {expected.numel()}", same / expected.numel()


if __name__ == "__main__":
    main()
