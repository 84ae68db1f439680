"""neuzip generate: text from a prompt."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.activations import warn_of_plain_inputs
from neuzip.cli.kernels import likely_tokens, prefetch_kernels
from neuzip.cli.kv_bits import NEEDS as KV_NEEDS
from neuzip.cli.kv_bits import chosen_bits, requested
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.generation import GenerationRun, generation_json, show_generation
from neuzip.cli.show.kv_cache import calibration_json
from neuzip.cli.source import resolved_model
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError
from neuzip.runtime.decode.sampling import Sampling
from neuzip.runtime.requirements import (
    require_device,
    require_expert_memory,
    require_quantisable,
    require_seed,
    require_stop,
)
from neuzip.runtime.residencies import RESIDENCIES, Residency

if TYPE_CHECKING:
    from torch import device as Device

    from neuzip.choices import Activations

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    'neuzip generate my-model.nz "The history of"',
    "neuzip generate my-model.nz --residency packed < question.txt",
    'neuzip generate my-model.nz "The history of" --kv-bits 4 --stop "\\n\\n"',
    'neuzip generate my-model "Hello" --kv-bits auto:0.01 --kv-text my.txt',
    'neuzip generate me/chat-model "Hello" --chat --temperature 0.7 --top-k 40',
    'neuzip generate me/chat-model "Why?" --system "Answer in one sentence."',
]

NEEDS = {**KV_NEEDS, "--overwrite": ("--kv-plan",)}

GROUPS = {
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "seed"),
    "The prompt and the end of the text": ("prompt_option", "chat", "system", "max_new_tokens", "stop"),
    "How the model runs": (
        "residency",
        "expert_memory",
        "activations",
        "kv_bits",
        "kv_text",
        "kv_plan",
        "kv_form",
        "attention",
        "device",
        "graph",
    ),
}

PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Text to continue; - or nothing reads stdin", show_default=False),
]
PromptOption = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT", help="The same as PROMPT", show_default=False),
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put the prompt into the chat template")]
SystemOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="System prompt; implies --chat", show_default=False),
]
MaxNewTokensOption = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of new tokens")]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STRING",
        help="End the text before STRING; \\n is a line end; repeatable",
        show_default=False,
    ),
]
TemperatureOption = Annotated[
    float, typer.Option(metavar="T", min=0.0, help="Sampling temperature; 0 is greedy")
]
TopKOption = Annotated[
    int, typer.Option(metavar="N", min=0, help="Sample from the N most likely tokens; 0 is all")
]
TopPOption = Annotated[
    float, typer.Option(metavar="P", min=0.0, max=1.0, help="Nucleus sampling threshold; 1 is all tokens")
]
MinPOption = Annotated[
    float,
    typer.Option(
        metavar="P",
        min=0.0,
        max=1.0,
        help="Drop tokens less than P times as likely as the most likely one",
    ),
]
SeedOption = Annotated[int | None, typer.Option(metavar="N", help="Random seed for sampling")]
GraphOption = Annotated[
    bool, typer.Option("--graph/--no-graph", help="Run decoding steps as a CUDA graph (one GPU only)")
]


def command(
    src: options.ModelArgument,
    prompt: PromptArgument = None,
    prompt_option: PromptOption = None,
    chat: ChatOption = False,
    system: SystemOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    stop: StopOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    residency: options.ResidencyOption = "dense",
    expert_memory: options.ExpertMemoryOption = None,
    activations: options.ActivationsOption = None,
    kv_bits: options.KvBitsOption = None,
    kv_text: options.KvTextOption = None,
    kv_plan: options.KvPlanOption = None,
    kv_form: options.KvFormOption = "rotated",
    attention: options.AttentionOption = "recorded",
    device: options.RunDeviceOption = "auto",
    graph: GraphOption = True,
    overwrite: options.OverwriteFileOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Generate text from a prompt"""
    out = Output(json=json, quiet=quiet)
    _require_seed(seed, temperature)
    sampling, ends = Sampling(temperature, top_k, top_p, min_p), [_unescaped(one) for one in stop or ()]
    require_stop(ends)
    mode, experts = require_quantisable(activations, residency), options.size(expert_memory)
    require_expert_memory(experts, residency, device=device)
    request = requested(kv_bits, kv_text, kv_plan, kv_form, overwrite)
    let_threads_sleep()
    out.loading()
    require_device(device, residency)
    text = _prompt(prompt, prompt_option)
    path = resolved_model(out, src)
    import_large("neuzip.runtime.devices")  # which imports torch
    from neuzip.runtime.devices import choose_device

    place = choose_device(device)
    likely = likely_tokens(text)
    prefetch_kernels(out, path, place, residency, likely)  # before transformers, which takes long to import
    import_large()
    from neuzip.runtime.decode.benchmark import peak_bytes, reset_peak
    from neuzip.runtime.decode.generate import generate
    from neuzip.runtime.decode.prompt import prepare
    from neuzip.runtime.hf.attention import uses
    from neuzip.runtime.hf.attention_choice import choose
    from neuzip.runtime.hf.load import load_model
    from neuzip.runtime.hf.ternary_layers import activations_in_use
    from neuzip.runtime.residency import memory

    task = prepare(path, text, max_new_tokens=max_new_tokens, chat=chat, system=system)
    if task.ids.numel() != likely:  # the kernels that products take depend on it
        prefetch_kernels(out, path, place, residency, task.ids.numel())
    _warn(out, path, residency, activations, place)
    reset_peak(place)
    began = time.monotonic()
    with out.progress("load", None):
        model = load_model(
            path, device=place, residency=residency, expert_memory=experts, activations=mode, attention=False
        )
    load_seconds = time.monotonic() - began
    bits, calibration = chosen_bits(out, request, path, model, kv_form)
    layer_bits = choose(model, attention)
    with out.stream() as write:
        generation = generate(
            model, task, sampling=sampling, seed=seed, stop=ends, kv_bits=bits, kv_form=kv_form,
            on_text=write, loop="auto" if graph else "transformers",
        )  # fmt: skip
    run = GenerationRun(
        generation, text, task.ids.numel(), load_seconds, peak_bytes(place), residency,
        activations_in_use(model),
        layer_bits, {} if layer_bits is None else uses(model), place,
        memory(model).total.host_bytes, calibration_json(calibration, kv_plan),
    )  # fmt: skip
    _give(out, run)


def _require_seed(seed: int | None, temperature: float) -> None:
    """Raise UsageError for a seed that nothing draws with, or that is out of range."""
    require_seed(seed)
    if temperature == 0 and seed is not None:
        raise UsageError("--seed: has no effect at temperature 0, which is greedy", "give a --temperature")


def _give(out: Output, run: GenerationRun) -> None:
    """Say how the text came, and give what a machine reads."""
    show_generation(out, run)
    out.result(generation_json(run), quiet=run.generation.text.splitlines())


def _warn(
    out: Output, path: Path, residency: Residency, activations: Activations | None, place: Device
) -> None:
    """Say what may surprise: activations that are not quantised, and slow code on a CPU."""
    warn_of_plain_inputs(out, path, (residency,), activations)
    if place.type == "cpu" and RESIDENCIES[residency].is_slow_on_cpu:
        out.hint(f"on a CPU {residency} weights run by slow reference code; --residency dense is faster")


def _prompt(argument: str | None, option: str | None) -> str:
    """The prompt from wherever it was given."""
    if argument is not None and option is not None:
        raise UsageError("--prompt and PROMPT: both give a prompt", "leave one of them out")
    prompt = argument if option is None else option
    if prompt is None and sys.stdin.isatty():
        raise UsageError(
            "PROMPT: is missing", 'give it as an argument or on stdin: neuzip generate SRC "Hello"'
        )
    return _read_stdin() if prompt in (None, "-") else prompt


def _read_stdin() -> str:
    """The prompt, less the line end that `echo` and editors put behind it."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"PROMPT from stdin: not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}",
            "convert it first, for example with iconv",
        ) from error


def _unescaped(string: str) -> str:
    """A stop string with its escapes read: a shell does not let one type a line end easily."""
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t", "\\": "\\"}[match[1]], string)
