"""neuzip ternarize: make the weights of a model ternary without training it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from neuzip.choices import ConversionQuantizer
from neuzip.cli import options
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.conversion import TernaryConversion, show_conversion
from neuzip.cli.source import resolved_model
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.requirements import require_device

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from transformers import PretrainedConfig

    from neuzip.eval.measures.texts import Text
    from neuzip.train.recovery.ternary import TernaryRecipe

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

TernaryQuantizerOption = Annotated[
    ConversionQuantizer,
    typer.Option(
        help="Rounding: GPTQ-style with error feedback (needs --text), least squares, or as BitNet b1.58"
    ),
]
TernaryGroupOption = Annotated[
    str, typer.Option(metavar="N|row|tensor", help="Weights per scale: N of a row, a row, or the tensor")
]
TextOption = Annotated[
    str | None,
    typer.Option("--text", metavar="TEXT", help="Calibration text for error-feedback, as for eval"),
]
MaxTokensOption = Annotated[
    int, typer.Option(metavar="N", min=WINDOW, help="Use only the first N tokens of the text")
]
AllowDestructiveOption = Annotated[
    bool,
    typer.Option("--allow-destructive", help="Convert, although this degrades models not trained as ternary"),
]


def command(
    src: options.ModelArgument,
    dst: options.DestinationArgument,
    ternary_quantizer: TernaryQuantizerOption = "error-feedback",
    ternary_group: TernaryGroupOption = "row",
    text: TextOption = None,
    max_tokens: MaxTokensOption = 131_072,
    allow_destructive: AllowDestructiveOption = False,
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
    from neuzip.eval.measures.texts import read_text

    if not overwrite:
        refuse_existing(dst, overwrite)
    document = None if text is None else read_text(text)
    path = resolved_model(out, src)
    require_free(path, dst, overwrite)
    import_large()
    from neuzip.runtime.devices import choose_device
    from neuzip.train.recovery.ternary import TernaryRecipe

    recipe = TernaryRecipe(ternary_quantizer, _group(ternary_group))
    config = _config(path)
    began = time.monotonic()
    windows, special_tokens = None, "none"
    if document is not None:
        windows, special_tokens = _windows(path, document, config, max_tokens, text or "")
    place = choose_device(device)
    conversion = _convert(out, path, dst, recipe, windows, place, overwrite)
    seconds = time.monotonic() - began
    show_conversion(out, conversion, path, dst, place, seconds, ternary_group)
    out.result(
        {
            "src": path, "dst": dst, "recipe": recipe, "tensors": conversion.tensors,
            "weights": conversion.weights, "zeros": conversion.zeros,
            "tokens": 0 if windows is None else windows.numel(), "special_tokens": special_tokens,
            "device": str(place), "dtype": conversion.dtype, "seconds": seconds,
        },
        quiet=[dst],
    )  # fmt: skip


def _config(path: Path) -> PretrainedConfig:
    """The configuration of a model with float weights. Raises NeuzipError for others."""
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.runtime.hf.config import load_config

    with FolderSource(path) as source:
        if source.is_compressed:
            raise NeuzipError(f"{path}: is compressed", "decompress it first with neuzip decompress")
        config = load_config(source.checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        raise NeuzipError(f"{path}: config.json says that it is quantised", "give a model with float weights")
    return config


def _windows(
    path: Path, document: Text, config: PretrainedConfig, max_tokens: int, text: str
) -> tuple[Tensor, str]:
    """Windows of a text, int64 [n, T], and the special tokens in front of each; `text` is its name."""
    from neuzip.eval.measures.comparison import read_tokens

    reading = read_tokens(path, document)
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    window = min(WINDOW, most or WINDOW)
    windows = reading.rows(window, max_tokens)
    if not len(windows):
        raise UsageError(
            f"--text {text}: has {len(reading.text)} tokens", f"give a text of at least {window}"
        )
    return windows, reading.convention.special_tokens


def _convert(
    out: Output,
    path: Path,
    dst: Path,
    recipe: TernaryRecipe,
    windows: Tensor | None,
    place: Device,
    overwrite: bool,
) -> TernaryConversion:
    """Load a model, make its linear weights ternary, and write it."""
    import torch
    from torch import nn

    from neuzip.runtime.hf.decoder import decoder_layers
    from neuzip.runtime.hf.load import load_model
    from neuzip.train.recovery.ternary import convert, save

    model = load_model(path, None, place, attention=False)
    dtype = model.dtype
    if place.type == "cpu":
        nn.Module.to(model, dtype=torch.float32)  # bf16 products are slow on a CPU
    with out.progress("ternarize", len(decoder_layers(model)), unit="layers") as advance:
        ternary = convert(model, recipe, windows, on_layer=lambda: advance(1))
    nn.Module.to(model, dtype=dtype)
    with out.progress("write", None):
        save(model, path, dst, overwrite)
    weights = sum(tensor.codes.numel() for tensor in ternary.values())
    zeros = sum(int((tensor.codes == 0).sum()) for tensor in ternary.values()) / weights
    matrices = [p for layer in decoder_layers(model) for p in layer.parameters() if p.dim() > 1]
    return TernaryConversion(
        sorted(ternary), weights, zeros, sum(p.numel() for p in matrices), str(dtype).removeprefix("torch.")
    )


def _group(text: str) -> int | Literal["row"] | None:
    if text == "tensor":
        return None
    if text == "row":
        return "row"
    if text.isdecimal() and int(text):
        return int(text)
    raise UsageError(f"--ternary-group {text}: not a group", "give a number of weights, row or tensor")
