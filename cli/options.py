"""The arguments and options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import Activations, Attention, DeviceName, KvForm
from neuzip.cli import tracebacks
from neuzip.errors import UsageError
from neuzip.runtime.kv_bits import FEWEST, MOST
from neuzip.runtime.residencies import RESIDENCIES, Residency, in_words

SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SRC", help="Folder, .safetensors file or Hub id", show_default=False),
]
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="SRC", help="Folder or Hub id of a model", show_default=False),
]
DestinationArgument = Annotated[
    Path,
    typer.Argument(metavar="DST", help="Output folder or file", show_default=False),
]

TextOption = Annotated[
    str,
    typer.Option("--text", metavar="TEXT", help="Text to measure on, as for eval", show_default=False),
]
WindowOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens per window (default: 1024, or the model's maximum)"),
]
MaxTokensOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Use only the first N tokens of the text")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, one value per line")]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Add the traceback to error messages", callback=tracebacks.ask, is_eager=True,
        expose_value=False,
    ),
]  # fmt: skip
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; write nothing")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace DST if it exists")]
OverwriteBothOption = Annotated[bool, typer.Option("--overwrite", help="Replace DST and FILE if they exist")]
OverwriteFileOption = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists")]
AllowPrivateFilesOption = Annotated[
    bool,
    typer.Option(
        "--allow-private-files", help="Also upload files that look private: keys, passwords, histories, logs"
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", metavar="N", min=1, help="Number of threads (default: all cores)"),
]
DeviceOption = Annotated[
    DeviceName,
    typer.Option(help="Device; auto uses a GPU only for 16 GiB of weights or more"),
]
RunDeviceOption = Annotated[
    DeviceName,
    typer.Option("--device", help="Device; auto is a GPU if there is one"),
]
ResidencyOption = Annotated[
    Residency,
    typer.Option(help=f"In-memory weight format: {in_words(e.summary for e in RESIDENCIES.values())}"),
]
ExpertMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--expert-memory",
        metavar="SIZE",
        help="Experts on the GPU: at most SIZE, as in 8GiB; the others stay in host memory",
        show_default=False,
    ),
]
ActivationsOption = Annotated[
    Activations | None,
    typer.Option(help="Activation quantisation for ternary weights (default: as in config.json)"),
]
KvBitsOption = Annotated[
    str | None,
    typer.Option(
        "--kv-bits", metavar="BITS", show_default=False,
        help="Quantise the KV cache: 4 bits; 8/4 for keys/values; auto:KLD, chosen by layer; or a plan FILE",
    ),
]  # fmt: skip
KvTextOption = Annotated[
    str | None,
    typer.Option(
        "--kv-text", metavar="TEXT", show_default=False,
        help="Calibration text of --kv-bits auto:KLD: file, folder, hf://datasets/..., or demo",
    ),
]  # fmt: skip
KvPlanOption = Annotated[
    Path | None,
    typer.Option(
        "--kv-plan", metavar="FILE", show_default=False,
        help="Also write the bits that --kv-bits auto:KLD chooses to a plan file",
    ),
]  # fmt: skip
KvFormOption = Annotated[
    KvForm,
    typer.Option("--kv-form", help="How --kv-bits quantises: rotated, in groups; a4.8, a scale per head"),
]
QueryBitsOption = Annotated[
    int | None,
    typer.Option(
        "--query-bits", metavar="N", min=FEWEST, max=MOST, show_default=False,
        help="Quantise queries too, to N bits with one scale per token and head",
    ),
]  # fmt: skip
AttentionOption = Annotated[
    Attention,
    typer.Option(
        "--attention",
        help="Attention precision: as recorded in config.json, not quantised (none), or 8- or 4-bit QK^T",
    ),
]
TensorOption = Annotated[
    list[str] | None,
    typer.Option("--tensor", metavar="GLOB", help="Only tensors with matching names; repeatable"),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Compress only tensors with matching names; repeatable"),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="GLOB", help="Store tensors with matching names uncompressed; repeatable"
    ),
]


def size(expert_memory: str | None) -> int | None:
    """The bytes that --expert-memory gives. Raises UsageError."""
    from neuzip.eval.plans.target_values import size_in_bytes

    nbytes = None if expert_memory is None else size_in_bytes(expert_memory)
    if expert_memory is not None and nbytes is None:
        raise UsageError(
            f"`expert_memory={expert_memory!r}`: is no size",
            "give a size with its unit: 8GiB, 500MB; 0 needs none",
        )
    return nbytes
