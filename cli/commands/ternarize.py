"""neuzip ternarize: make the weights of a model ternary without training it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from neuzip.cli import options
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.residency import require_device
from neuzip.cli.text import seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import NeuzipError, UsageError, shell

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip ternarize my-model tern --text my.txt --allow-destructive",
    "neuzip ternarize my-model t --ternary-quantizer absmean --allow-destructive",
    "",
    "Measure the loss, and compress the result to 1.6 bits per weight:",
    "neuzip eval tern --original my-model --text other.txt",
    "neuzip compress tern small --ternary",
]

NEEDS = {"--max-tokens": ("--text",)}

WINDOW = 512
"""Tokens of the calibration text that the model reads at once, at most."""


def command(
    src: options.ModelArgument,
    dst: options.DestinationArgument,
    ternary_quantizer: Annotated[
        Literal["error-feedback", "least-squares", "absmean"],
        typer.Option(
            help="Rounding: GPTQ-style with error feedback (needs --text), least squares, or as BitNet b1.58"
        ),
    ] = "error-feedback",
    ternary_group: Annotated[
        str, typer.Option(metavar="N|row|tensor", help="Weights per scale: N of a row, a row, or the tensor")
    ] = "row",
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEXT", help="Calibration text for error-feedback, as for eval"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=WINDOW, help="Use only the first N tokens of the text")
    ] = 131_072,
    allow_destructive: Annotated[
        bool,
        typer.Option(
            "--allow-destructive", help="Convert, although this degrades models not trained as ternary"
        ),
    ] = False,
    device: options.RunDeviceOption = "auto",
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Convert the weights of a model to ternary without training"""
    out = Output(json=json, quiet=quiet)
    require_device(device)
    if not allow_destructive:
        raise UsageError(
            "ternary weights degrade a model that was not trained with them; plain rounding can destroy it (a"
            " third party measured a perplexity rise from 13.9 to 3.8 million)",
            "--allow-destructive converts it anyway; then run: neuzip eval DST --original SRC --text TEXT",
        )
    if ternary_quantizer == "error-feedback" and text is None:
        raise UsageError("--ternary-quantizer error-feedback needs a text", "give --text FILE, or demo")
    if ternary_quantizer != "error-feedback" and text is not None:
        raise UsageError(
            f"--text {text} has no effect with --ternary-quantizer {ternary_quantizer}",
            "leave it out",
        )
    let_threads_sleep()
    out.loading()
    import time

    from neuzip.compress.overwrite_guard import refuse_existing, require_free
    from neuzip.compress.source import TensorSource
    from neuzip.eval.measures.texts import read_text

    if not overwrite:
        refuse_existing(dst, overwrite)
    document = None if text is None else read_text(text)
    path = resolved_model(out, src)
    require_free(path, dst, overwrite)
    import torch
    from torch import nn

    from neuzip.eval.measures.comparison import read_tokens
    from neuzip.runtime.devices import choose_device
    from neuzip.runtime.hf.config import load_config
    from neuzip.runtime.hf.decoder import decoder_layers
    from neuzip.runtime.hf.load import load_model
    from neuzip.train.recovery import ternary

    recipe = ternary.TernaryRecipe(ternary_quantizer, _group(ternary_group))
    with TensorSource(path) as source:
        if source.is_compressed:
            raise NeuzipError(f"{path}: is compressed", "decompress it first with neuzip decompress")
        config = load_config(source.checkpoint)
        if getattr(config, "quantization_config", None) is not None:
            raise NeuzipError(
                f"{path}: config.json says that it is quantised", "give a model with float weights"
            )
    began = time.monotonic()
    windows, special_tokens = None, "none"
    if ternary_quantizer == "error-feedback":
        assert document is not None
        reading = read_tokens(path, document)
        most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        window = min(WINDOW, most or WINDOW)
        special_tokens = reading.convention.special_tokens
        windows = reading.rows(window, max_tokens)
        if not len(windows):
            raise UsageError(
                f"--text {text}: has {len(reading.text)} tokens",
                f"give a text of at least {window}",
            )
    where = choose_device(device)
    model = load_model(path, None, where, attention=False)
    dtype = model.dtype
    if where.type == "cpu":
        nn.Module.to(model, dtype=torch.float32)  # bf16 products are slow on a CPU
    with out.progress("ternarize", len(decoder_layers(model)), unit="layers") as advance:
        found = ternary.convert(model, recipe, windows, on_layer=lambda: advance(1))
    nn.Module.to(model, dtype=dtype)
    with out.progress("write", None):
        ternary.save(model, path, dst, overwrite)
    weights = sum(one.codes.numel() for one in found.values())
    matrices = [p for layer in decoder_layers(model) for p in layer.parameters() if p.dim() > 1]
    if (all_of_them := sum(p.numel() for p in matrices)) > weights:
        out.warning(
            f"{1 - weights / all_of_them:.0%} of the layers' weights are not converted: only linear modules"
            " become ternary, not merged experts"
        )
    zeros = sum(int((one.codes == 0).sum()) for one in found.values()) / weights
    seconds = time.monotonic() - began
    out.text(f"{len(found)} tensors are ternary; {zeros:.0%} of their {weights:,} weights are 0")
    out.text(f"{dst} in {seconds_text(seconds)} on {where}")
    measure = shell("neuzip", "eval", dst, "--original", path, "--text", "TEXT")
    out.status(f"to measure the loss: {measure}")
    group = ("--ternary-group", ternary_group) if ternary_group.isdecimal() else ()  # others are found
    out.status(f"to compress it: {shell('neuzip', 'compress', dst, f'{dst}.nz', '--ternary', *group)}")
    out.result(
        {
            "src": path, "dst": dst, "recipe": recipe, "tensors": sorted(found), "weights": weights,
            "zeros": zeros, "tokens": 0 if windows is None else windows.numel(),
            "special_tokens": special_tokens, "device": str(where),
            "dtype": str(dtype).removeprefix("torch."), "seconds": seconds,
        },
        quiet=[dst],
    )  # fmt: skip


def _group(text: str) -> int | Literal["row"] | None:
    if text == "tensor":
        return None
    if text == "row":
        return "row"
    if text.isdecimal() and int(text):
        return int(text)
    raise UsageError(f"--ternary-group {text}: not a group", "give a number of weights, row or tensor")
