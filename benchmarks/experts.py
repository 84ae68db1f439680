"""Mixtures of experts with compressed weights beside transformers' bf16, on one GPU.

    python benchmarks/experts.py [--sections decode prefill memory layer greedy] [--models qwen3-30b-a3b]
        [--laws gaussian trained-like] [--batches 1 8] [--seconds 0.1]

Models have the shapes of Qwen3-30B-A3B (8 layers) and of Mixtral 8x7B (4 layers). Their weights are made up on
the GPU, by two laws: see weight_laws.py. Embeddings are multiplied by EMBEDDING_SCALE, a power of two, so that
tokens of a text differ and are routed to different experts, as in trained models; packed, they are as large.

Forms are bf16 with transformers' `grouped_mm` (for one text also with `batched_mm`: the faster of the two is
what ratios are to), `packed`, and `ans` with one text. All decode with the same `GreedyDecoder`, whose steps
are one CUDA graph, read the same random texts, and take turns. A row says how many experts have a token.

Nothing is timed before it is checked: weights decode bit for bit, and the logits of a form are at most 5 %
further from fp64 than those of bf16, on the same routes. See expert_checks.py.

`layer` is one layer of experts without its router, for numbers of tokens up to 4,096, for whoever tunes: the
calls of a case lie in one CUDA graph, each with the weights of another layer, so that none are in the L2.

`greedy` decodes 128 tokens with a trained mixture, wikilm-26m upcycled to experts, in the folder that
NEUZIP_DATA names. Each has to be bf16's own choice or tied with it.

Sections that ran whole on a GPU are saved in benchmarks/results/experts.json. A small run, on any machine:

    python benchmarks/experts.py --small
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from expert_cases import AIMS, BATCHES, LAYERS, MODEL_NAMES, PREFILL
from expert_checks import LogitsCheck, require_logits, require_same_weights
from expert_layer import layer_rows
from expert_models import CONFIGS, mixture, reduced, upcycled
from expert_routes import ExpertUse, experts_of, greedy_agreement, recorded, use_in_steps, use_of
from llama_model import DEVICE, timed
from packed_groups import LAW_NAMES
from packed_linear import verdict
from record import Environment, Measurement, save_sections, spread
from serving import prefill_times, step_times
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from weight_laws import LAWS

from neuzip.runtime.decode.benchmark import free_memory, prompts
from neuzip.runtime.decode.greedy import GreedyDecoder, NotGraphable
from neuzip.runtime.hf.residency import compress_parameters, memory

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
        count: int = experts_of(self.bf16)[0].gate_up_proj.shape[0]
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
    arguments.prefill, arguments.new_tokens, arguments.greedy_tokens = PREFILL, NEW_TOKENS, GREEDY_TOKENS
    if arguments.small:
        arguments.batches, arguments.prefill, arguments.new_tokens, arguments.greedy_tokens = [1, 2], 16, 3, 4
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
    print(f"\n{MODEL_NAMES[name]}, {LAW_NAMES[law]}", flush=True)
    case = made(arguments, name, law)
    with timed("checked"):
        checks = checked(arguments, case)
    results = {"logits": checks} | {section: sections[section](arguments, case) for section in selected}
    for form in list(case.forms):
        del case.forms[form]
    free_memory()
    return results


# Models


def made(arguments: argparse.Namespace, name: str, law: str) -> Case:
    """A model in every form."""
    config = CONFIGS[name](LAYERS[name])
    with timed("made, bf16"):
        bf16 = mixture(reduced(config) if arguments.small else config, law, DEVICE)
    forms = {}
    for form in arguments.forms:
        with timed(f"made, {form}"):
            forms[form] = compressed(bf16, form)
    return Case(name, law, bf16, forms)


def compressed(bf16: PreTrainedModel, residency: str) -> PreTrainedModel:
    """A copy of a model whose weights are compressed, with the experts implementation of `load_model`."""
    model = copy.deepcopy(bf16)
    compress_parameters(model, residency)
    model.set_experts_implementation("neuzip" if "neuzip" in ALL_EXPERTS_FUNCTIONS else "eager")
    free_memory()
    return model


def checked(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """Rows of the errors of logits; exits if a form fails a check."""
    for form, model in case.forms.items():
        require_same_weights(form, model, case.bf16)
    checks = require_logits(case.forms, case.bf16, arguments.batches, min(256, arguments.prefill))
    rows = [logits_row(case, form, check) for form, each in checks.items() for check in each]
    for row in rows:
        print(
            f"  {row['by']:8} error of logits, {row['tokens']:4} tokens at once: {row['error']:.2e}, "
            f"{row['error'] / row['bf16_error']:.3f} of bf16's; "
            f"likeliest of {row['judged']}: {row['same']} bf16's, {row['tied']} tied",
            flush=True,
        )
    return rows


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
        texts = prompts(case.bf16.config.vocab_size, batch, PROMPT + arguments.new_tokens)
        with timed(f"batch {batch}, captured"):
            decoders = [decoder_of(case, form, batch, texts.shape[1]) for form in forms]
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


def decoder_of(case: Case, form: str, batch: int, length: int) -> GreedyDecoder:
    """A decoder of a form, whose step is a CUDA graph if that is possible; says so if it is not."""
    if form in DENSE:
        case.bf16.set_experts_implementation(form)
    try:
        return GreedyDecoder(case.forms.get(form, case.bf16), batch, length)
    except NotGraphable as error:
        print(f"  {form}: no CUDA graph: {error.reason}")
        return GreedyDecoder(case.forms.get(form, case.bf16), batch, length, graph=False)
    finally:
        case.bf16.set_experts_implementation(DENSE[0])  # of prompts; a graph stays as it is


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
        form: arguments.prefill / statistics.median(mine)
        for form, mine in zip(models, seconds, strict=True)
    }
    return [
        row_of(case, "prefill", form, speeds, {
            "tokens": arguments.prefill, "tokens_s": speeds[form],
            **spread([1e3 * one for one in mine], "ms"), **use_facts(used),
        })
        for form, mine in zip(models, seconds, strict=True)
    ]  # fmt: skip


def use_facts(used: ExpertUse) -> Row:
    """How evenly tokens were routed, for a row."""
    return {"experts_in_use": round(used.experts, 1), "busiest": round(used.busiest, 2)}


def in_memory(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """GB of the weights of every form."""
    sizes = {
        form: memory(model).total.stored_bytes / 1e9
        for form, model in {DENSE[0]: case.bf16, **case.forms}.items()
    }
    return [row_of(case, "weights in memory", form, sizes, {"gb": size}) for form, size in sizes.items()]


def layer(arguments: argparse.Namespace, case: Case) -> list[Row]:
    """Microseconds of one layer of experts, for numbers of tokens."""
    with timed("layers of experts"):
        rows = layer_rows(case.bf16, case.forms, arguments.seconds, 8 if arguments.small else 4096)
    return [case.facts | row for row in rows]


def greedy(arguments: argparse.Namespace) -> list[Row]:
    """Greedy tokens of a trained mixture, in every form, as bf16 judges them."""
    data = os.environ.get("NEUZIP_DATA")
    if not data:
        print("greedy: left out, as NEUZIP_DATA is not set")
        return []
    folder = Path(data) / "wikilm-26m"
    sizes = {"experts": 2, "layers": 1} if arguments.small else {}
    bf16 = upcycled(folder, DEVICE, **sizes)
    ids = AutoTokenizer.from_pretrained(folder)("The history of the", return_tensors="pt")["input_ids"]
    rows = []
    for form in arguments.forms:
        model = compressed(bf16, form)
        require_same_weights(form, model, bf16)
        judged = greedy_agreement(bf16, model, ids.to(DEVICE), arguments.greedy_tokens)
        fitting = judged.routed.chosen + judged.routed.tied
        row = {
            "model": "wikilm-26m, upcycled", "what": "greedy tokens equal or tied", "by": form,
            "tokens": judged.routed.tokens, "same": judged.routed.chosen, "tied": judged.routed.tied,
            "same_on_own_routes": judged.own.chosen, "tied_on_own_routes": judged.own.tied,
            "same_routes": judged.same_routes, "routes": judged.routes,
            "ratio": fitting / judged.routed.tokens, "must": 1.0, "met": fitting == judged.routed.tokens,
        }  # fmt: skip
        print(
            f"{row['model']}, {form}: of {row['tokens']} tokens {row['same']} are bf16's, {row['tied']} tied "
            f"({verdict(row['met'])}); on bf16's own routes {row['same_on_own_routes']} and "
            f"{row['tied_on_own_routes']}; {row['same_routes']} of {row['routes']} routes are bf16's"
        )
        rows.append(row)
    return rows


def row_of(case: Case, what: str, form: str, values: dict[str, float], figures: Row) -> Row:
    """A row with its ratio to the largest value of bf16, and its target if it has one; prints it."""
    ratio = values[form] / max(values[peer] for peer in DENSE if peer in values)
    row = {**case.facts, "what": what, "by": form, **figures, "ratio": ratio}
    shown = f"{values[form]:12,.1f} {'GB' if 'gb' in figures else 'tokens/s'}"
    line = f"  {what:18}{form:11}{shown:22}{ratio:6.3f}x"
    if (aim := AIMS.get((case.model, what, form))) is not None:
        row |= {"must": aim.must, "stretch": aim.stretch, "most": aim.most, "met": aim.met(ratio)}
        sign = "<=" if aim.most else ">="
        line += f"  must {sign} {aim.must}: {verdict(row['met'])}"
        if aim.stretch is not None:
            line += f", stretch {aim.stretch}: {'reached' if aim.stretched(ratio) else 'not reached'}"
    if "experts_in_use" in figures:
        line += f"  {figures['experts_in_use']} of {case.experts} experts, busiest {figures['busiest']}x"
    print(line, flush=True)
    return row


if __name__ == "__main__":
    main()
