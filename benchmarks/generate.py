"""A Llama-3-8B-shaped model in bf16 and in every residency: tokens a second, memory, logits.

    python benchmarks/generate.py [--sections llama two-gpus wikilm] [--forms bf16 dense packed ans rounded]

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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from record import Environment, Measurement, save_sections
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from neuzip.compress import compress
from neuzip.compress.device import CPU, choose
from neuzip.compress.rules import rules_of_options
from neuzip.runtime.decode.agreement import agreement
from neuzip.runtime.decode.benchmark import free_memory, peak_bytes, prompts, reset_peak, run, synchronize
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.messages import quiet_transformers
from neuzip.runtime.hf.residency import memory

Row = dict[str, Any]
Tensor = torch.Tensor

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
RESIDENCIES = {"dense": "dense", "packed": "packed", "ans": "ans", "rounded": "packed"}
FORMS = ("bf16", *RESIDENCIES)
LOSSLESS = ("dense", "packed", "ans")
KEPT = 3  # mantissa bits of `rounded`
PROMPT = 32  # tokens before those that are timed
BATCH_TOKENS = 128
ALIKE, MOST_APART = 3, 0.01  # models that are compared; what they may be apart at most
TURNS = 6
LOGIT_ROWS = (1, 16)  # positions at a time, both few enough for the kernels of packed
WIKILM_TOKENS = 256
SHARD = 4 << 30


@dataclass(frozen=True)
class Target:
    """What a ratio must be, and should be: at least, or (`most`) at most."""

    must: float
    stretch: float | None = None
    most: bool = False

    def met(self, ratio: float, by: float | None = None, apart: float = 0.0) -> bool:
        """Whether a ratio is as it must be, of runs that are so far apart where nothing differs."""
        aim = self.must if by is None else by
        return ratio <= aim + apart if self.most else ratio >= aim - apart


DECODE, PEAK = "decode, batch 1", "peak memory, load and tokens"
APART = "decode, batch 1: models apart"
COMPILED = ", compiled"
DFLOAT11, ERROR, SAME = "decode, batch 1, of DFloat11's bound", "error of logits", "logits of the same bits"
SPREAD = "tokens on two GPUs as on one"
GENERATED, GRAPHED = "wikilm-26m, generate: original's tokens", "wikilm-26m, graph: original's tokens"
GENERATED_TIES, GRAPHED_TIES = "wikilm-26m, generate: same or tied", "wikilm-26m, graph: same or tied"
TARGETS = {
    (DECODE, "dense"): Target(1.0),
    **{(what, "packed"): Target(1.15, 1.3) for what in (DECODE, DECODE + COMPILED)},
    (DECODE, "rounded"): Target(1.6, 2.0),
    (PEAK, "packed"): Target(0.74, most=True),
    (PEAK, "ans"): Target(0.70, most=True),
    (DFLOAT11, "ans"): Target(2.0),
    (SAME, "dense"): Target(1.0),
    (SAME, "ans"): Target(1.0),
    (ERROR, "packed"): Target(1.05, 1.0, most=True),
    **{(SPREAD, form): Target(1.0) for form in LOSSLESS},
    **{(what, form): Target(1.0) for what in (GENERATED, GRAPHED) for form in ("dense", "ans")},
    **{(what, "packed"): Target(1.0) for what in (GENERATED_TIES, GRAPHED_TIES)},
}


@dataclass
class Results:
    """The rows so far, each printed as it comes."""

    rows: list[Row] = field(default_factory=list)

    def add(
        self, what: str, by: str, value: float, unit: str, ratio: float | None = None, apart: float = 0.0
    ) -> None:
        """A figure, and its ratio to what its target is about; for `apart` see `Target.met`."""
        row: Row = {"what": what, "by": by, "value": value, "unit": unit}
        line = f"{what:42}{by:8}{value:12,.6g} {unit:10}"
        if ratio is not None:
            row["ratio"] = ratio
            line += f"{ratio:7.3f}x"
        target = TARGETS.get((what, by))
        if target is not None and ratio is not None:
            row |= {"must": target.must, "most": target.most, "met": target.met(ratio, apart=apart)}
            line += (
                f"  must {'<=' if target.most else '>='} {target.must}: {'met' if row['met'] else 'MISSED'}"
            )
            if apart:
                row["apart"] = apart
                line += f" (runs of the same are {100 * apart:.2f} % apart)"
            if target.stretch is not None:
                row |= {"stretch": target.stretch, "stretched": target.met(ratio, target.stretch)}
                line += f", stretch {target.stretch}: {'reached' if row['stretched'] else 'not reached'}"
        print(line, flush=True)
        self.rows.append(row)

    def value(self, what: str, by: str) -> float | None:
        """A figure that was added."""
        return next((float(r["value"]) for r in self.rows if (r["what"], r["by"]) == (what, by)), None)

    def against_bf16(self, what: str, by: str, value: float, unit: str) -> None:
        """A figure with its ratio to that of bf16, which comes first."""
        base = self.value(what, "bf16")
        self.add(what, by, value, unit, None if base is None else value / base)


def main() -> None:
    """Measure all sections, print the figures, save them."""
    sections = {"llama": llama, "two-gpus": two_gpus, "wikilm": wikilm}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--words", type=int, default=128_256, help="of the vocabulary")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32], help="beside 1")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows of compiled steps")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="has 36 GB free")
    arguments = parser.parse_args()
    names = ("forms", "layers", "hidden", "words", "batches", "new_tokens", "prefill")
    whole = DEVICE.type == "cuda" and all(getattr(arguments, n) == parser.get_default(n) for n in names)
    packages = ("neuzip-toolkit", "torch", "triton", "transformers")
    environment = Environment.here(*packages, gpu=DEVICE.type == "cuda", needs_commit=whole)
    of_sections: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, quiet_transformers():
        for name in arguments.sections:
            results = Results()
            sections[name](arguments, Path(folder), results)
            if results.rows:
                of_sections[name] = results.rows
    rows = [row for of_section in of_sections.values() for row in of_section]
    aimed = [row for row in rows if "met" in row]
    print(f"\n{sum(not row['met'] for row in aimed)} of {len(aimed)} targets missed")
    if whole:
        what = "a Llama-3-8B-shaped model of made-up weights, and wikilm-26m, in every residency"
        measured = {name: Measurement(environment, rows) for name, rows in of_sections.items()}
        print(f"saved {save_sections('generate', what, measured)}")
    else:
        print("not saved: this was a small run")


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


def made(arguments: argparse.Namespace, forms: Sequence[str], folder: Path) -> dict[str, Path]:
    """The checkpoint, plain and compressed, as far as the forms need it and it is not there yet."""
    paths = {name: folder / name for name in ("plain", "small", "rounded")}
    if not paths["plain"].exists():
        with timed("written, plain"):
            write_model(paths["plain"], arguments)
    device = choose("cuda", nbytes_of(paths["plain"])) if DEVICE.type == "cuda" else CPU
    if set(forms) & set(LOSSLESS) and not paths["small"].exists():
        with timed("compressed, lossless"):
            compress(paths["plain"], paths["small"], verify=False, device=device)
    if "rounded" in forms and not paths["rounded"].exists():
        with timed(f"compressed, {KEPT} mantissa bits"):
            rules = rules_of_options(KEPT, "none")
            compress(paths["plain"], paths["rounded"], rules, verify=False, device=device)
    return paths


def nbytes_of(folder: Path) -> int:
    """Of the weights of a checkpoint."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def write_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a checkpoint of shards as `save_pretrained` would."""
    config = LlamaConfig(
        vocab_size=arguments.words,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 7 // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=max(1, arguments.hidden // 512),
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        dtype=torch.bfloat16,
        bos_token_id=0,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        if len(shape) == 1:
            values = torch.ones(shape, dtype=torch.bfloat16)
        else:
            values = torch.empty(shape, device=DEVICE).normal_(0, 0.02, generator=generator)
            values = values.to(torch.bfloat16).cpu()
        if shard and sum(t.nbytes for t in shard.values()) + values.nbytes > SHARD:
            flush()
        shard[name] = values
        total += values.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load(form: str, folders: dict[str, Path]) -> PreTrainedModel:
    """A form of the model."""
    if form == "bf16":
        return from_pretrained(folders["plain"])
    path = folders["rounded" if form == "rounded" else "small"]
    return load_model(path, device=DEVICE, residency=RESIDENCIES[form])


def from_pretrained(path: Path) -> PreTrainedModel:
    """As transformers loads a plain folder; on a GPU by way of accelerate, straight onto it."""
    placed = {"device_map": {"": DEVICE}} if DEVICE.type == "cuda" else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **placed)
    return model.eval()


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
    decoders = [GreedyDecoder(model, 1, PROMPT + arguments.new_tokens) for model in models]
    ids = prompts(models[0].config.vocab_size, 1, PROMPT)
    steps: list[list[float]] = [[] for _ in models]
    order = list(zip(decoders, steps, strict=True))
    for _ in range(TURNS):
        for decoder, mine in order:
            mine += run(decoder, ids, min(BATCH_TOKENS, arguments.new_tokens)).step_seconds
        order.reverse()
    medians = [statistics.median(mine) for mine in steps]
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


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long something took."""
    synchronize(DEVICE)
    began = time.perf_counter()
    yield
    synchronize(DEVICE)
    print(f"  {what} in {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
