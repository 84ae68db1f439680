"""Mixtures of experts with compressed weights beside transformers' bf16, on one GPU.

    python benchmarks/experts.py [--sections decode prefill memory layer greedy] [--models qwen3-30b-a3b]
        [--laws gaussian trained-like] [--batches 1 8] [--seconds 0.1]

Models have the shapes of Qwen3-30B-A3B (8 layers) and of Mixtral 8x7B (4 layers). Their weights are made up
on the GPU, by two laws: see weight_laws.py. Embeddings are larger, so that the tokens of a text go to
different experts, as in trained models: see EMBEDDING_SCALE in expert_models.py. A row says how many have a
token.

Forms are bf16 with transformers' `grouped_mm` (for one text also with `batched_mm`: the faster of the two is
what ratios are to), `packed`, and `ans` with one text. All decode with the same `GreedyDecoder`, whose steps
are one CUDA graph, read the same random texts, and take turns.

Nothing is timed before it is checked: weights decode bit for bit; on the same routes, results of a layer of
experts and logits are at most 5 % further from fp64 than those of bf16. See expert_checks.py.

`layer` is one layer of experts without its router, for numbers of tokens up to 4,096, for whoever tunes: the
calls of a case lie in one CUDA graph, each with the weights of another layer, so that none are in the L2.

`greedy` decodes 128 tokens with a trained mixture (wikilm-26m, in the folder that NEUZIP_DATA names, upcycled
to experts) and with random ones of each layout. Every token has to be bf16's own choice or tied with it, on
the same routes.

Sections that ran whole on a GPU are saved in benchmarks/results/experts.json. A small run, on any machine:

    python benchmarks/experts.py --small
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from expert_cases import AIMS, BATCHES, LAYERS, MODEL_NAMES, PREFILL
from expert_checks import PROMPT as PROMPT_CHECKED
from expert_checks import (
    ExpertsCheck,
    LogitsCheck,
    in_fp64,
    require_experts,
    require_logits,
    require_same_weights,
)
from expert_layer import layer_rows
from expert_models import CONFIGS, made_up, reduced, upcycled
from expert_routes import (
    GreedyAgreement,
    RouteSpread,
    decoder_of,
    greedy_agreement,
    recorded,
    use_in_steps,
    use_of,
)
from llama_model import DEVICE, timed
from packed_groups import LAW_NAMES
from packed_linear import verdict
from record import ROOT, Environment, Measurement, save_sections, spread
from serving import prefill_times, step_times
from transformers import AutoTokenizer, PreTrainedModel
from weight_laws import LAWS

from neuzip.runtime.decode.benchmark import free_memory, peak_bytes, prompts, reset_peak
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.experts import has_single_experts
from neuzip.runtime.residency import compress_parameters, memory

Tensor = torch.Tensor
Row = dict[str, Any]

WHAT = __doc__.splitlines()[0]

DENSE = ("grouped_mm", "batched_mm")
"""How transformers computes experts with bf16 weights."""

COMPRESSED = ("packed", "ans")
"""Forms of weights in memory that are compared with bf16."""

SECTIONS = ("decode", "prefill", "memory", "layer", "greedy")

PROMPT, NEW_TOKENS = 32, 64
"""Tokens of a text before those that are timed, and tokens that are timed in a turn."""

GREEDY_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """A model with weights of a law, in bf16 and in every form that is compared."""

    model: str
    """Its name in CONFIGS; that of small shapes has no targets."""

    law: str
    bf16: PreTrainedModel
    forms: dict[str, PreTrainedModel]

    @property
    def facts(self) -> Row:
        """What a row names first."""
        return {"model": self.model, "law": self.law, "layers": self.bf16.config.num_hidden_layers}

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        count: int = self.bf16.config.num_local_experts
        return count


def main(words: Sequence[str] | None = None) -> None:
    """Check and measure every selected case, print its rows, save its sections."""
    began = time.perf_counter()
    arguments = parsed(words)
    packages = ("neuzip-toolkit", "torch", "triton", "transformers")
    is_whole = whole(arguments)
    environment = Environment.here(*packages, gpu=DEVICE.type == "cuda", needs_commit=is_whole)
    rows: list[Row] = []
    with torch.no_grad():
        for name, law in [(name, law) for name in arguments.models for law in arguments.laws]:
            for section, results in measured(arguments, name, law).items():
                rows += results
                save(f"{section}, {name}, {law}", environment, results, is_whole)
        if "greedy" in arguments.sections and (results := greedy(arguments)):
            rows += results
            save("greedy", environment, results, is_whole)
    aimed = [row for row in rows if "met" in row]
    print(f"\n{sum(not row['met'] for row in aimed)} of {len(aimed)} targets missed")
    print(f"{time.perf_counter() - began:.0f} s in all")
    if not is_whole:
        print("nothing is saved: this was a small run, or on no GPU")


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; of a small run, with small sizes."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--models", nargs="+", choices=MODEL_NAMES, default=list(MODEL_NAMES))
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--forms", nargs="+", choices=COMPRESSED, default=list(COMPRESSED))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=0.1, help="of a case of `layer`")
    parser.add_argument("--small", action="store_true", help="tiny shapes, and nothing is saved")
    arguments = parser.parse_args(words)
    sizes = (PREFILL, NEW_TOKENS, GREEDY_TOKENS)
    if arguments.small:
        arguments.batches, sizes = [1], (16, 3, 4)
    arguments.prefill, arguments.new_tokens, arguments.greedy_tokens = sizes
    if "ans" in arguments.forms and DEVICE.type != "cuda":
        print("ans: left out, as it needs a GPU")
        arguments.forms.remove("ans")
    return arguments


def whole(arguments: argparse.Namespace) -> bool:
    """Whether the sections are measured as they are published: on a GPU, with all forms and batches."""
    usual = arguments.batches == list(BATCHES) and arguments.forms == list(COMPRESSED)
    return usual and DEVICE.type == "cuda" and not arguments.small


def save(section: str, environment: Environment, rows: list[Row], is_whole: bool) -> None:
    """Put the rows of a section into the place of those that were saved before."""
    if is_whole:
        path = save_sections("experts", WHAT, {section: Measurement(environment, rows)})
        print(f"saved {section} in {path}", flush=True)


def measured(arguments: argparse.Namespace, name: str, law: str) -> dict[str, list[Row]]:
    """The rows of every section of a model with weights of a law, behind its checks."""
    sections: dict[str, Callable[[argparse.Namespace, Case], list[Row]]] = {
        "decode": decode, "prefill": prefill, "memory": in_memory, "layer": layer,
    }  # fmt: skip
    selected = [section for section in sections if section in arguments.sections]
    if not selected:
        return {}
    free_memory()  # of the case before
    print(f"\n{MODEL_NAMES[name]}, {LAW_NAMES[law]}", flush=True)
    case = made(arguments, name, law)
    with timed("checked"):
        checks = checked(arguments, case)
    results = {"checks": checks} | {section: sections[section](arguments, case) for section in selected}
    return results


# Models


def made(arguments: argparse.Namespace, name: str, law: str) -> Case:
    """A model in every form."""
    config = CONFIGS[name](LAYERS[name])
    with timed("made, bf16"):
        bf16 = made_up(reduced(config) if arguments.small else config, law, DEVICE)
    forms = {}
    for form in arguments.forms:
        with timed(f"made, {form}"):
            forms[form] = compressed(bf16, form)
    return Case(f"{name}, small" if arguments.small else name, law, bf16, forms)


def compressed(bf16: PreTrainedModel, residency: str) -> PreTrainedModel:
    """A copy of a model whose weights are compressed, with the experts implementation of `load_model`."""
    model = copy.deepcopy(bf16)
    compress_parameters(model, residency)
    model.set_experts_implementation("neuzip")
    free_memory()
    return model


def checked(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """Rows of the errors of one layer of experts and of logits; exits if a form fails a check."""
    for form, model in case.forms.items():
        require_same_weights(form, model, case.bf16)
    rows = [
        {**case.facts, "what": "error of experts", "by": form, **vars(check)}
        for form, check in layer_checks(case, (*arguments.batches, arguments.prefill))
    ]
    checks = require_logits(case.forms, case.bf16, arguments.batches, min(PROMPT_CHECKED, arguments.prefill))
    rows += [logits_row(case, form, check) for form, each in checks.items() for check in each]
    for row in rows:
        line = f"  {row['by']:8} {row['what']:16} {row['tokens']:5} tokens: {row['error']:.2e}, "
        line += f"{row['error'] / row['bf16_error']:.3f} of bf16's"
        if "judged" in row:
            line += f"; likeliest of {row['judged']}: {row['same']} the same, {row['tied']} tied"
        print(line, flush=True)
    return rows


def layer_checks(case: Case, sizes: Sequence[int]) -> Iterator[tuple[str, ExpertsCheck]]:
    """Errors of the first layer of experts; not of forms that run the model's own code, which rounds more."""
    forms = {form: model for form, model in case.forms.items() if not has_single_experts(model)}
    bf16 = case.bf16.model.layers[0].mlp
    exact = in_fp64(bf16.experts)
    for form, model in forms.items():
        for tokens in sizes:
            yield form, require_experts(form, model.model.layers[0].mlp, bf16, exact, tokens)


def logits_row(case: Case, form: str, check: LogitsCheck) -> Row:
    """A row of the errors of logits."""
    return {
        **case.facts, "what": "error of logits", "tokens": check.tokens, "by": form, "error": check.error,
        "bf16_error": check.bf16_error, "judged": check.agreement.tokens, "same": check.agreement.chosen,
        "tied": check.agreement.tied,
    }  # fmt: skip


# Sections


def decode(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """Tokens a second of every form with every number of texts."""
    rows: list[Row] = []
    for batch in arguments.batches:
        forms = [form for form in (*DENSE, *case.forms) if batch == 1 or form in ("grouped_mm", "packed")]
        if DEVICE.type != "cuda":  # only a graph goes on with what was set when it was captured
            forms = [form for form in forms if form != "batched_mm"]
        texts = prompts(case.bf16.config.vocab_size, batch, PROMPT + arguments.new_tokens)
        with timed(f"batch {batch}, captured"):
            decoders = [captured(case, form, batch, texts.shape[1]) for form in forms]
        with timed(f"batch {batch}, run"):
            steps = step_times(decoders, texts[:, :PROMPT], arguments.new_tokens, texts[:, PROMPT:])
        used = use_in_steps(case.bf16, texts.to(DEVICE), arguments.new_tokens)
        speeds = {form: batch / statistics.median(mine) for form, mine in zip(forms, steps, strict=True)}
        for form, decoder, mine in zip(forms, decoders, steps, strict=True):
            figures = {"tokens_s": speeds[form], **spread([1e6 * step for step in mine], "us")}
            how = {"batch": batch, "graph": decoder.graphed, **use_facts(used)}
            rows.append(row_of(case, f"decode, batch {batch}", form, speeds, figures | how))
        del decoders, decoder
        free_memory()
    return rows


def captured(case: Case, form: str, batch: int, length: int) -> GreedyDecoder:
    """A decoder of a form, whose step is a CUDA graph if that is possible; says so if it is not."""
    if form in DENSE:
        case.bf16.set_experts_implementation(form)
    decoder = decoder_of(case.forms.get(form, case.bf16), batch, length)
    case.bf16.set_experts_implementation(DENSE[0])  # for prompts; a graph stays as it is
    if DEVICE.type == "cuda" and not decoder.graphed:
        print(f"  {form}: steps are no CUDA graph")
    return decoder


def prefill(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """Tokens a second of one prompt."""
    models = {DENSE[0]: case.bf16} | {form: m for form, m in case.forms.items() if form == "packed"}
    with timed("prompts"):
        seconds = prefill_times(list(models.values()), arguments.prefill)
    ids = prompts(case.bf16.config.vocab_size, 1, arguments.prefill).to(DEVICE)
    with recorded(case.bf16) as calls:
        case.bf16(ids, use_cache=False, logits_to_keep=1)
    used = use_of([route.index for layers in calls for route in layers], case.experts)
    speeds = {
        form: arguments.prefill / statistics.median(mine) for form, mine in zip(models, seconds, strict=True)
    }
    return [
        row_of(case, "prefill", form, speeds, {
            "tokens": arguments.prefill, "tokens_s": speeds[form],
            **spread([1e3 * one for one in mine], "ms"), **use_facts(used),
        })
        for form, mine in zip(models, seconds, strict=True)
    ]  # fmt: skip


def use_facts(used: RouteSpread) -> Row:
    """How evenly tokens were routed, for a row."""
    return {"experts_in_use": round(used.experts, 1), "busiest": round(used.busiest, 2)}


def in_memory(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """GB of the weights of every form, and what a decoder of one text takes at most beside them."""
    models = {DENSE[0]: case.bf16, **case.forms}
    sizes = {form: memory(model).total.stored_bytes / 1e9 for form, model in models.items()}
    return [
        row_of(case, "weights in memory", form, sizes, {"gb": sizes[form], "beside_gb": beside(model)})
        for form, model in models.items()
    ]


def beside(model: PreTrainedModel) -> float:
    """GB of the cache, of buffers and of results while a decoder of one text is captured and reads a prompt.

    0 on a machine without a GPU, where nobody counts.
    """
    if DEVICE.type != "cuda":
        return 0.0
    free_memory()
    reset_peak(DEVICE)
    before = torch.cuda.memory_allocated()
    decoder_of(model, 1, PROMPT + NEW_TOKENS).generate(prompts(model.config.vocab_size, 1, PROMPT), 2)
    return ((peak_bytes(DEVICE) or 0) - before) / 1e9


def layer(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """Microseconds of one layer of experts, for numbers of tokens."""
    with timed("layers of experts"):
        rows = layer_rows(case.bf16, case.forms, arguments.seconds, 2 if arguments.small else 4096)
    return [case.facts | row for row in rows]


def greedy(arguments: argparse.Namespace) -> list[Row]:
    """Greedy tokens of a trained mixture, and of random ones of each layout, as bf16 judges them."""
    rows = []
    for name, bf16, ids in greedy_models(arguments):
        for form in arguments.forms:
            model = compressed(bf16, form)
            require_same_weights(form, model, bf16)
            rows.append(greedy_row(name, form, greedy_agreement(bf16, model, ids, arguments.greedy_tokens)))
    return rows


def greedy_models(arguments: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel, Tensor]]:
    """Names, bf16 models and prompts [1, tokens]: of wikilm-26m if it is there, and of tests/support."""
    if data := os.environ.get("NEUZIP_DATA"):
        folder = Path(data) / "wikilm-26m"
        ids = AutoTokenizer.from_pretrained(folder)("The history of the", return_tensors="pt")["input_ids"]
        sizes = {"experts": 2, "layers": 1} if arguments.small else {}
        yield "wikilm-26m, upcycled", upcycled(folder, DEVICE, **sizes), ids.to(DEVICE)
    else:
        print("greedy: wikilm-26m is left out, as NEUZIP_DATA is not set")
    sys.path.append(str(ROOT / "tests" / "support"))
    from models import LAYOUTS, mixture

    ids = prompts(256, 1, PROMPT).to(DEVICE)
    for layout in LAYOUTS:
        sizes = {} if arguments.small else {"hidden": 256, "inner": 256}
        yield f"random, {layout}", mixture(layout, **sizes).to(DEVICE), ids


def greedy_row(name: str, form: str, judged: GreedyAgreement) -> Row:
    """A row of greedy tokens; prints it."""
    row = {
        "model": name, "what": "greedy tokens equal or tied", "by": form, "tokens": judged.routed.tokens,
        "same": judged.routed.chosen, "tied": judged.routed.tied, "same_on_own_routes": judged.own.chosen,
        "tied_on_own_routes": judged.own.tied, "same_routes": judged.same_routes, "routes": judged.routes,
        "graph": judged.graphed, "ratio": (judged.routed.chosen + judged.routed.tied) / judged.routed.tokens,
        "must": 1.0, "most": False, "met": judged.fits,
    }  # fmt: skip
    print(
        f"{name}, {form}{'' if judged.graphed else ', no CUDA graph'}: of {row['tokens']} greedy tokens "
        f"{row['same']} are bf16's and {row['tied']} tied: {verdict(judged.fits)}; with bf16's own routes "
        f"{row['same_on_own_routes']} and {row['tied_on_own_routes']}; "
        f"{row['same_routes']} of {row['routes']} routes are bf16's",
        flush=True,
    )
    return row


def row_of(case: Case, what: str, form: str, values: dict[str, float], figures: Row) -> Row:
    """A row with its ratio to the largest value of bf16, and its target if it has one; prints it."""
    ratio = values[form] / max(values[peer] for peer in DENSE if peer in values)
    row = {**case.facts, "what": what, "by": form, **figures, "ratio": ratio}
    shown = f"{values[form]:12,.2f} {'GB' if 'gb' in figures else 'tokens/s'}"
    line = f"  {what:18}{form:11}{shown:22}{ratio:6.3f}x"
    if (aim := AIMS.get((case.model, what, form))) is not None:
        row |= {"must": aim.must, "stretch": aim.stretch, "most": aim.most, "met": aim.met(ratio)}
        sign = "<=" if aim.most else ">="
        line += f"  must {sign} {aim.must}: {verdict(row['met'])}"
        if aim.stretch is not None:
            line += f", stretch {aim.stretch}: {'reached' if aim.stretched(ratio) else 'not reached'}"
    if "experts_in_use" in figures:
        line += f"  {figures['experts_in_use']} of {case.experts} experts, busiest {figures['busiest']}x"
    if "beside_gb" in figures:
        line += f"  {figures['beside_gb']:.2f} GB beside them"
    print(line, flush=True)
    return row


if __name__ == "__main__":
    main()
