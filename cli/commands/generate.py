"""neuzip generate: go on with a prompt."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.activations import require_quantisable, warn_of_plain_inputs
from neuzip.cli.commands.eval import attention_text
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output, bytes_text, count_text, seconds_text
from neuzip.cli.residency import require_device
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.runtime.generate import Generation

EXAMPLES = [
    'neuzip generate my-model.nz --prompt "The history of"',
    "neuzip generate my-model.nz --prompt - --residency packed < question.txt",
    'neuzip generate my-model.nz --prompt "The history of" --kv-bits 4',
    'neuzip generate me/chat-model --prompt "Who are you?" --chat --temperature 1',
]


def command(
    src: options.ModelArgument,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT|-", help="Go on with this; - reads it from stdin", show_default=False)
    ],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="End after N tokens")] = 128,
    residency: options.ResidencyOption = "dense",
    activations: options.ActivationsOption = None,
    kv_bits: options.KvBitsOption = None,
    attention: options.AttentionOption = "recorded",
    device: options.RunDeviceOption = "auto",
    temperature: Annotated[
        float,
        typer.Option(metavar="T", min=0.0, help="Draw tokens, the less likely the higher; 0 draws none"),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(metavar="P", min=0.0, max=1.0, help="Draw from the likeliest that reach this together"),
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Draw the same tokens each time")] = None,
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="Replay steps as a CUDA graph, on one GPU")
    ] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the chat template")] = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Let a model go on with a text"""
    out = Output(json=json, quiet=quiet)
    for option, given in (("--top-p", top_p < 1), ("--seed", seed is not None)):
        if temperature == 0 and given:
            raise UsageError(f"{option}: nothing is drawn at temperature 0", "give a --temperature")
    if top_p == 0:
        raise UsageError("--top-p 0: leaves no token to draw", "for the likeliest one give --temperature 0")
    mode = require_quantisable(activations, residency)
    let_threads_sleep()
    require_device(device, residency)
    text = _read_stdin() if prompt == "-" else prompt
    path = resolved_model(out, src)
    from neuzip.runtime.attention import uses
    from neuzip.runtime.attention_choice import choose
    from neuzip.runtime.bitlinear import in_use
    from neuzip.runtime.generate import choose_device, generate, prepare
    from neuzip.runtime.load import load_model
    from neuzip.runtime.speed import peak_bytes, reset_peak

    place = choose_device(device)
    task = prepare(path, text, max_new_tokens=max_new_tokens, chat=chat)
    warn_of_plain_inputs(out, path, (residency,), activations)
    reset_peak(place)
    began = time.monotonic()
    with out.progress("load", None):
        model = load_model(path, device=place, residency=residency, activations=mode, attention=False)
    load_seconds = time.monotonic() - began
    attends = choose(model, attention)
    with out.stream() as write:
        made = generate(
            model, task, temperature=temperature, top_p=top_p, seed=seed,
            kv_bits=options.bits(kv_bits), on_text=write, loop="auto" if graph else "transformers",
        )  # fmt: skip
    peak = peak_bytes(place)
    inputs = in_use(model)
    kept = residency if inputs is None else f"{residency}, activations {inputs.text}"
    out.status(f"loaded in {seconds_text(load_seconds)}; {_summary(made, peak, kept, place.type)}")
    if place.type == "cuda":
        out.status(f"steps {_steps(made)}")
    if made.cache_bytes is not None:
        out.status(
            f"keys and values in {kv_bits} bits, {bytes_text(made.cache_bytes)}; attention: {made.attention}"
        )
    if attends is not None:
        out.status(f"attention: {attention_text(attends, uses(model))}")
    out.result(
        {
            "prompt": text,
            "text": made.text,
            "tokens": made.tokens,
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


def _read_stdin() -> str:
    """The prompt, less the line end that `echo` and editors put behind it."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--prompt -: not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}",
            "convert it first, for example with iconv",
        ) from error


def _steps(made: Generation) -> str:
    """Which loop ran, and if it was not the faster one, why."""
    return "as a CUDA graph" if made.graphed else f"launched one by one: {made.not_graphed}"


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
