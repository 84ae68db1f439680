"""neuzip generate: text from a prompt."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.activations import require_quantisable, warn_of_plain_inputs
from neuzip.cli.commands.eval import attention_text
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.residency import require_device
from neuzip.cli.text import bytes_text, count_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError
from neuzip.runtime.decode.sampling import Sampling
from neuzip.runtime.requirements import require_seed, require_stop

if TYPE_CHECKING:
    from neuzip.runtime.decode.generate import Generation

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    'neuzip generate my-model.nz "The history of"',
    "neuzip generate my-model.nz --residency packed < question.txt",
    'neuzip generate my-model.nz "The history of" --kv-bits 4 --stop "\\n\\n"',
    'neuzip generate me/chat-model "Hello" --chat --temperature 0.7 --top-k 40',
    'neuzip generate me/chat-model "Why?" --system "Answer in one sentence."',
]

GROUPS = {
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "seed"),
    "The prompt and the end of the text": ("prompt_option", "chat", "system", "max_new_tokens", "stop"),
    "How the model runs": ("residency", "activations", "kv_bits", "attention", "device", "graph"),
}


def command(
    src: options.ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="Text to continue; - or nothing reads stdin", show_default=False
        ),
    ] = None,
    prompt_option: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The same as PROMPT", show_default=False),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the chat template")] = False,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System prompt; implies --chat", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of new tokens")
    ] = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STRING",
            help="End the text before STRING; \\n is a line end; repeatable",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="Sampling temperature; 0 is greedy")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(metavar="N", min=0, help="Sample from the N most likely tokens; 0 is all")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", min=0.0, max=1.0, help="Nucleus sampling threshold; 1 is all tokens")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            min=0.0,
            max=1.0,
            help="Drop tokens less than P times as likely as the most likely one",
        ),
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed for sampling")] = None,
    residency: options.ResidencyOption = "dense",
    activations: options.ActivationsOption = None,
    kv_bits: options.KvBitsOption = None,
    attention: options.AttentionOption = "recorded",
    device: options.RunDeviceOption = "auto",
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="Run decoding steps as a CUDA graph (one GPU only)")
    ] = True,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Generate text from a prompt"""
    out = Output(json=json, quiet=quiet)
    if temperature == 0 and seed is not None:
        raise UsageError("--seed: has no effect at temperature 0, which is greedy", "give a --temperature")
    sampling, ends = Sampling(temperature, top_k, top_p, min_p), [_unescaped(one) for one in stop or ()]
    require_seed(seed)
    require_stop(ends)
    mode = require_quantisable(activations, residency)
    let_threads_sleep()
    out.loading()
    require_device(device, residency)
    text = _prompt(prompt, prompt_option)
    path = resolved_model(out, src)
    from neuzip.runtime.decode.benchmark import peak_bytes, reset_peak
    from neuzip.runtime.decode.generate import generate
    from neuzip.runtime.decode.prompt import prepare
    from neuzip.runtime.devices import choose_device
    from neuzip.runtime.hf.attention import uses
    from neuzip.runtime.hf.attention_choice import choose
    from neuzip.runtime.hf.load import load_model
    from neuzip.runtime.hf.ternary_layers import activations_in_use

    place = choose_device(device)
    task = prepare(path, text, max_new_tokens=max_new_tokens, chat=chat, system=system)
    warn_of_plain_inputs(out, path, (residency,), activations)
    if residency == "packed" and place.type == "cpu":
        out.hint("on a CPU packed weights run by slow reference code; --residency dense is faster")
    reset_peak(place)
    began = time.monotonic()
    with out.progress("load", None):
        model = load_model(path, device=place, residency=residency, activations=mode, attention=False)
    load_seconds = time.monotonic() - began
    attends = choose(model, attention)
    with out.stream() as write:
        made = generate(
            model, task, sampling=sampling, seed=seed, stop=ends, kv_bits=options.bits(kv_bits),
            on_text=write, loop="auto" if graph else "transformers",
        )  # fmt: skip
    peak = peak_bytes(place)
    inputs = activations_in_use(model)
    kept = residency if inputs is None else f"{residency}, activations {inputs.text}"
    out.status(f"loaded in {seconds_text(load_seconds)}; {_summary(made, peak, kept, place.type)}")
    if place.type == "cuda":
        out.status(f"steps {_steps(made)}")
    if made.cache_bytes is not None:
        out.status(f"KV cache in {kv_bits} bits, {bytes_text(made.cache_bytes)}; attention: {made.attention}")
    if attends is not None:
        out.status(f"attention: {attention_text(attends, uses(model))}")
    out.result(
        {
            "prompt": text,
            "text": made.text,
            "tokens": made.tokens,
            "finish_reason": made.finish_reason,
            "prompt_tokens": task.ids.numel(),
            "load_seconds": load_seconds,
            "seconds": made.seconds,
            "first_token_seconds": made.first_token_seconds,
            "tokens_per_second": made.tokens_per_second,
            "peak_bytes": peak,
            "residency": residency,
            "activations": inputs,
            "kv_bits": options.bits(kv_bits),
            "kv_bytes": made.cache_bytes,
            "attention": made.attention,
            "attention_bits": attends,
            "attention_calls": {} if attends is None else uses(model),
            "device": str(place),
            "graphed": made.graphed,
            "not_graphed": made.not_graphed,
        },
        quiet=made.text.splitlines(),
    )


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
    return re.sub(r"\\([nt\\])", lambda found: {"n": "\n", "t": "\t", "\\": "\\"}[found[1]], string)


def _steps(made: Generation) -> str:
    """Which loop ran, and if it was not the faster one, why."""
    return "as a CUDA graph" if made.graphed else f"without a CUDA graph: {made.not_graphed}"


def _summary(made: Generation, peak: int | None, residency: str, place: str) -> str:
    speed = made.tokens_per_second
    where = "on the CPU" if place == "cpu" else "of the GPU"
    parts = [
        f"{count_text(len(made.tokens), 'token')} in {seconds_text(made.seconds)}",
        f"the first after {seconds_text(made.first_token_seconds)}"
        + ("" if speed is None else f", then {speed:,.1f} tokens/s"),
        "" if peak is None else f"peak memory {bytes_text(peak)} {where}",
        f"residency {residency}",
    ]
    return "; ".join(filter(None, parts))
