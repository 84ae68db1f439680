"""neuzip compress: make a checkpoint smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import (
    Activations,
    AttentionMode,
    Sensitivity,
    TargetScheme,
    TernaryPacking,
    TernaryQuantizer,
)
from neuzip.cli import options
from neuzip.cli.compressing.options import TARGETS, CompressOptions
from neuzip.cli.output import Output
from neuzip.cli.ranks import joined_ranks
from neuzip.cli.threads import let_threads_sleep
from neuzip.distribution import require

EXAMPLES = [
    "neuzip compress my-model my-model.nz",
    "neuzip compress meta-llama/Llama-3.2-1B llama.nz --dry-run",
    "neuzip compress my-model small -k 3 --block-size 512",
    "neuzip compress my-model small -k 3 --bits-for '*embed*=4'",
    "neuzip compress my-model mixed --plan plan.toml",
    "neuzip compress my-model small --bits 4.25",
    "neuzip compress my-model close --max-kld 0.01",
    "neuzip compress my-model fits --target-size 6GiB --text held-out.txt",
    "neuzip compress my-model thin --max-kld 1 --scheme rounded --drop-layers 2",
    "neuzip compress my-model fast --attention auto --text held-out.txt",
    "neuzip compress my-bitnet small --ternary",
    "neuzip compress my-model-tuned tuned.delta --base my-model",
    "torchrun --nproc-per-node 8 --no-python neuzip compress my-model my-model.nz",
    "neuzip compress meta-llama/Llama-3.1-70B 70b.nz --stream --push-to me/70b-nz",
    "",
    "A plan file lists rules; the first one whose glob matches a name applies:",
    "",
    "[[rule]]                      [[rule]]",
    'match = "*embed_tokens*"      match = "*"',
    'scheme = "lossless"           mantissa_bits = 3',
    "",
    'A rule with scheme = "ternary" may also set quantizer, group and packing.',
    "A target writes such a plan to DST.plan.toml.",
]

GROUPS = {
    "Lossy compression (default: lossless)": (
        "mantissa_bits", "bits_for", "block_size", "plan", "include", "exclude",
    ),
    "Choose precision automatically": (
        "bits", "max_kld", "max_ppl_increase", "target_size", "text", "calibration", "scheme", "attention",
    ),
    "Only with --scheme rounded": ("sensitivity", "expert_use", "drop_layers"),
    "Ternary weights": (
        "ternary", "ternary_quantizer", "ternary_group", "ternary_packing", "activations",
        "allow_destructive",
    ),
    "Hub and deltas": (
        "stream", "push_to", "private", "allow_private_files", "base",
    ),
}  # fmt: skip

NEEDS = {
    "--text": (*TARGETS, "--attention"),
    "--calibration": TARGETS,
    "--scheme": TARGETS,
    "--sensitivity": ("--scheme rounded",),
    "--expert-use": ("--scheme rounded",),
    "--drop-layers": ("--scheme rounded",),
    "--block-size": ("--mantissa-bits", "--bits-for", "--scheme rounded"),
    "--ternary-quantizer": ("--ternary",),
    "--ternary-group": ("--ternary",),
    "--ternary-packing": ("--ternary",),
    "--activations": ("--ternary", "--plan"),
    "--allow-destructive": ("--ternary", "--plan"),
    "--private": ("--push-to",),
    "--allow-private-files": ("--push-to",),
}

MantissaBitsOption = Annotated[
    int | None,
    typer.Option(
        "--mantissa-bits", "-k", metavar="K", min=0, help="Round matrices to K mantissa bits (bf16 has 7)"
    ),
]
BitsForOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB=K",
        help="Use K mantissa bits for matrices with matching names, for example one bit more for a tied"
        " embedding; repeatable",
    ),
]
BlockSizeOption = Annotated[
    str,
    typer.Option(
        metavar="N|none",
        help="Scale blocks of N weights (8, 16, ... 16384) so the largest is nearly exact; slightly larger"
        " file, often lower error",
    ),
]

TernaryOption = Annotated[
    bool,
    typer.Option(
        "--ternary",
        help="Store linear weights (*layers.*_proj.weight) as -1, 0, 1 times a scale; exact for ternary"
        " models",
    ),
]
QuantizerOption = Annotated[
    TernaryQuantizer,
    typer.Option(
        "--ternary-quantizer",
        help="How to round weights that are not ternary yet. Use absmean-clamped for transformers' online"
        " bitnet checkpoints",
    ),
]
GroupOption = Annotated[
    str,
    typer.Option(
        "--ternary-group",
        metavar="N|row|tensor",
        help="Weights per scale: N of a row, a row, or the tensor. Weights that are ternary already keep one"
        " scale per row or tensor",
    ),
]
PackingOption = Annotated[
    TernaryPacking,
    typer.Option(
        "--ternary-packing", help="Base-3 packing (5 weights per byte) or 2-bit packing (4 per byte)"
    ),
]
ActivationsOption = Annotated[
    Activations | None,
    typer.Option(help="Activation quantisation to record in config.json, for inference"),
]
AttentionOption = Annotated[
    AttentionMode | None,
    typer.Option(
        "--attention",
        help="Also choose the attention precision of each layer, as `neuzip patch-attention` does",
    ),
]
DropLayersOption = Annotated[
    str,
    typer.Option(
        metavar="auto|N|none",
        help="Also drop the N least important layers. auto: drop layers as long as the result shrinks or,"
        " with --target-size, comes closer to the original",
    ),
]
ExpertUseOption = Annotated[
    str,
    typer.Option(
        metavar="auto|none|FILE",
        help="Give rarely chosen experts of a mixture fewer bits. auto: count on the text how often each is"
        " chosen. FILE: as neuzip experts counted. none: treat all alike",
    ),
]
StreamOption = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Download, compress and delete a Hub id shard by shard, with at most two shards on disk",
    ),
]
PushToOption = Annotated[
    str | None,
    typer.Option(
        "--push-to",
        metavar="REPO_ID[@BRANCH]",
        help="Upload each file once it is compressed. All files become visible together. With --stream, no"
        " copy remains on this machine",
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="BASE",
        help="Store only the difference from BASE (folder, file or Hub id); `neuzip apply` restores SRC",
        show_default=False,
    ),
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="Create the repository of --push-to as private")
]
DestructiveOption = Annotated[
    bool,
    typer.Option("--allow-destructive", help="Round weights that are not ternary; ruins most models"),
]
PlanOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Use the per-tensor rules of a TOML file, see below")
]
BitsOption = Annotated[
    str | None,
    typer.Option(
        metavar="B",
        help="Best quality with at most B bits per weight, such as 4.25: the whole weight files divided"
        " by the number of weights",
    ),
]
CalibrationOption = Annotated[
    str,
    typer.Option(
        metavar="auto|none|TEXT",
        help="Text that the quantisation is fitted to. auto: the part of --text that is not used to measure."
        " none: round every weight to the nearest code",
    ),
]
SchemeOption = Annotated[
    TargetScheme,
    typer.Option(
        help="How to store weights. quantized: entropy-coded integers. rounded: fewer mantissa bits, chosen"
        " for each tensor; larger at the same quality"
    ),
]
MaxKldOption = Annotated[
    str | None,
    typer.Option(metavar="NATS", help="Smallest result with a mean KL divergence of at most NATS per token"),
]
MaxPplIncreaseOption = Annotated[
    str | None,
    typer.Option(metavar="P%", help="Smallest result with a perplexity increase of at most P %"),
]
TargetSizeOption = Annotated[
    str | None,
    typer.Option(metavar="P%|SIZE", help="Best quality with weight files of at most this size: 60%, 6GiB"),
]
TextOption = Annotated[
    str | None,
    typer.Option("--text", metavar="TEXT", help="Text to measure on, as for eval (default: demo)"),
]
SensitivityOption = Annotated[
    Sensitivity,
    typer.Option(
        help="How to estimate per-tensor sensitivity. measured: one run per tensor. fisher: Fisher"
        " information. weights: rounding errors of the weights (with --target-size, no text is needed)."
        " auto: measured on a GPU, fisher on a CPU"
    ),
]
VerifyOption = Annotated[bool, typer.Option(help="Decode every tensor and compare it with the original")]


def command(
    src: options.SourceArgument,
    dst: options.DestinationArgument,
    mantissa_bits: MantissaBitsOption = None,
    bits_for: BitsForOption = None,
    block_size: BlockSizeOption = "none",
    plan: PlanOption = None,
    bits: BitsOption = None,
    max_kld: MaxKldOption = None,
    max_ppl_increase: MaxPplIncreaseOption = None,
    target_size: TargetSizeOption = None,
    text: TextOption = None,
    calibration: CalibrationOption = "auto",
    scheme: SchemeOption = "quantized",
    sensitivity: SensitivityOption = "auto",
    expert_use: ExpertUseOption = "auto",
    drop_layers: DropLayersOption = "none",
    ternary: TernaryOption = False,
    ternary_quantizer: QuantizerOption = "absmean",
    ternary_group: GroupOption = "tensor",
    ternary_packing: PackingOption = "trits",
    activations: ActivationsOption = None,
    attention: AttentionOption = None,
    allow_destructive: DestructiveOption = False,
    include: options.IncludeOption = None,
    exclude: options.ExcludeOption = None,
    base: BaseOption = None,
    stream: StreamOption = False,
    push_to: PushToOption = None,
    private: PrivateOption = False,
    allow_private_files: options.AllowPrivateFilesOption = False,
    dry_run: options.DryRunOption = False,
    verify: VerifyOption = True,
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Compress a checkpoint, lossless by default"""
    out = Output(json=json, quiet=quiet)
    from neuzip.eval.plans.target_values import one_goal

    goal = one_goal(max_kld, max_ppl_increase, target_size, bits)
    if goal is not None or attention is not None:
        require(f"`{goal.parameter}`" if goal is not None else "--attention", "torch", "transformers")
        let_threads_sleep()
        out.loading()
    from neuzip.cli.compressing.run import run
    from neuzip.compress.request import CompressRequest

    request = CompressRequest(
        mantissa_bits=mantissa_bits, bits_for=bits_for or (), block_size=block_size, include=include or (),
        exclude=exclude or (), plan=plan, ternary=ternary, ternary_quantizer=ternary_quantizer,
        ternary_group=ternary_group, ternary_packing=ternary_packing, activations=activations,
        allow_destructive=allow_destructive, target=None if goal is None else goal.parameter,
        text=text if attention is None else None, scheme=scheme, calibration=calibration,
        sensitivity=sensitivity, expert_use=expert_use,
    )  # fmt: skip
    with joined_ranks() as ranks:
        run(
            Output(json=json, quiet=quiet, silent=not ranks.is_first), ranks,
            CompressOptions(
                src=src, dst=dst, request=request, goal=goal, text=text, drop_layers=drop_layers,
                attention=attention, base=base, stream=stream, push_to=push_to, private=private,
                allow_private_files=allow_private_files, dry_run=dry_run, verify=verify, device=device,
                jobs=jobs, overwrite=overwrite,
            ),
        )  # fmt: skip
