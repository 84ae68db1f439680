"""neuzip recover: train a ternary model to match the original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import Activations, ScaleTraining, WholeGroup
from neuzip.cli import options
from neuzip.cli.output import Output

PACKAGES = ("torch", "transformers", "matplotlib")

EXAMPLES = [
    "neuzip recover my-model --text my.txt --budget 30m -o tern",
    "neuzip recover my-model --text a.txt --text b.jsonl --steps 999 -o t",
    "neuzip recover tern --original my-model --text my.txt --budget 2h -o t2",
    "neuzip compress tern small --ternary",
    "",
    "8-bit activations first, then 4-bit ones, with the same training state:",
    "neuzip recover my-model --text my.txt --budget 30m -o b --keep-state s",
    "neuzip recover b --original my-model --text my.txt --budget 5m \\",
    "  --from-state s --activations a4.8 --lr 1e-4 -o a",
]

GROUPS = {
    "Text and length of the training": ("text", "window", "batch", "budget", "steps"),
    "Ternary weights": ("activations", "ternary_group", "scales", "sub_norms", "strength"),
    "Losses and optimizer": (
        "original", "kld", "hidden", "cross_entropy", "temperature", "lr", "noise", "seed",
    ),
    "Comparison with the original": ("eval_text", "max_tokens"),
}  # fmt: skip

NEEDS = {"--max-tokens": ("--eval-text",)}


TextOption = Annotated[
    list[Path],
    typer.Option(
        "--text",
        metavar="FILE",
        help="Training text: UTF-8 file or .jsonl[.gz]; repeatable",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="DST", help="Output folder", show_default=False)
]
OriginalOption = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Original model that SRC was made from (default: SRC)"),
]
BudgetOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Training time, such as 90s, 30m or 2h")
]
StepsOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of training steps")]
ActivationsOption = Annotated[
    Activations,
    typer.Option(help="Activation quantisation in training, and recorded in config.json"),
]
TernaryGroupOption = Annotated[WholeGroup, typer.Option(help="Weights per scale, if SRC is not ternary yet")]
ScalesOption = Annotated[
    ScaleTraining,
    typer.Option(help="Train the scales, or use the mean magnitude of the weights (BitNet)"),
]
SubNormsOption = Annotated[
    bool, typer.Option("--sub-norms", help="Add norms before o_proj and down_proj (SubLN); Llama only")
]
StrengthOption = Annotated[
    float,
    typer.Option(
        metavar="FRACTION", min=0, max=1, help="Fraction of steps over which quantisation is ramped up"
    ),
]
LrOption = Annotated[float, typer.Option(metavar="RATE", min=0, help="Peak learning rate")]
WindowOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, help="Tokens per window (default: 512, or the model's maximum)"),
]
BatchOption = Annotated[int, typer.Option(metavar="N", min=1, help="Windows per step")]
KldOption = Annotated[
    float, typer.Option(metavar="W", min=0, help="Loss weight of the KL divergence from the original")
]
HiddenOption = Annotated[
    float, typer.Option(metavar="W", min=0, help="Loss weight of the distance between hidden states")
]
CrossEntropyOption = Annotated[
    float, typer.Option(metavar="W", min=0, help="Loss weight of the cross-entropy on the text")
]
TemperatureOption = Annotated[
    float, typer.Option(metavar="T", min=0, help="Softmax temperature for the KL divergence")
]
NoiseOption = Annotated[
    float,
    typer.Option(metavar="FRACTION", min=0, max=1, help="Fraction of input tokens to replace by random ones"),
]
SeedOption = Annotated[int, typer.Option(metavar="N", min=0, help="Random seed for window order and noise")]
FromStateOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Start from the training state in this folder")
]
KeepStateOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Save the training state (fp32 weights, moments) here"),
]
EvalTextOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Text to compare with the original on, before and after training"),
]
MaxTokensOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Use only the first N tokens of --eval-text")
]


def command(
    src: options.ModelArgument,
    text: TextOption,
    output: OutputOption,
    original: OriginalOption = None,
    budget: BudgetOption = None,
    steps: StepsOption = None,
    activations: ActivationsOption = "b1.58",
    ternary_group: TernaryGroupOption = "tensor",
    scales: ScalesOption = "learned",
    sub_norms: SubNormsOption = False,
    strength: StrengthOption = 0.0,
    lr: LrOption = 3e-4,
    window: WindowOption = None,
    batch: BatchOption = 16,
    kld: KldOption = 1.0,
    hidden: HiddenOption = 0.0,
    cross_entropy: CrossEntropyOption = 0.0,
    temperature: TemperatureOption = 1.0,
    noise: NoiseOption = 0.0,
    seed: SeedOption = 0,
    from_state: FromStateOption = None,
    keep_state: KeepStateOption = None,
    eval_text: EvalTextOption = None,
    max_tokens: MaxTokensOption = 16384,
    device: options.RunDeviceOption = "auto",
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Train a ternary model to match the original

    This is quantisation-aware training (QAT) with distillation from the original. If SRC is not ternary, the
    command converts it first. The result has exactly ternary weights; its config.json records the activation
    quantisation. The folder also has recovery.jsonl, one line per step, and recovery.svg. To resume a stopped
    run, repeat the command.
    """
    out = Output(json=json, quiet=quiet)
    from neuzip.cli.recovering import RecoverOptions, run

    chosen = RecoverOptions(
        src=src, text=text, output=output, original=original, budget=budget, steps=steps,
        activations=activations, ternary_group=ternary_group, scales=scales, sub_norms=sub_norms,
        strength=strength, lr=lr, window=window, batch=batch, kld=kld, hidden=hidden,
        cross_entropy=cross_entropy, temperature=temperature, noise=noise, seed=seed, from_state=from_state,
        keep_state=keep_state, eval_text=eval_text, max_tokens=max_tokens, device=device,
        overwrite=overwrite,
    )  # fmt: skip
    run(out, chosen)
