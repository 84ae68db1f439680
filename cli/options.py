"""The arguments and options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from neuzip.cli import tracebacks

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
    typer.Argument(metavar="DST", help="Folder or file to write", show_default=False),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print one path or number a line")]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Add the traceback to an error", callback=tracebacks.ask, is_eager=True,
        expose_value=False,
    ),
]  # fmt: skip
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, write nothing")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace a checkpoint that is at the destination")
]
AllowPrivateFilesOption = Annotated[
    bool,
    typer.Option(
        "--allow-private-files", help="Upload files too that look private: keys, passwords, histories, logs"
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", metavar="N", min=1, help="Use N threads; all cores if not given"),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Work on the CPU or on a GPU; auto takes a GPU for 16 GiB of weights and more"),
]
RunDeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option("--device", help="Run on the CPU or on a GPU"),
]
Residency = Literal["dense", "packed", "ans"]
ResidencyOption = Annotated[
    Residency,
    typer.Option(help="Keep the weights in memory plain, packed, or coded (ans, on a GPU)"),
]
ActivationsOption = Annotated[
    Literal["b1.58", "a4.8", "a4.8-fp4", "none"] | None,
    typer.Option(
        help="Quantise what goes into ternary weights so, not as config.json says; not for dense weights"
    ),
]
KvBits = Literal["8", "4", "3"]
KvBitsOption = Annotated[
    KvBits | None,
    typer.Option("--kv-bits", help="Keep keys and values in so few bits", show_default=False),
]
AttentionMode = Literal["auto", "8bit", "4bit"]
Attention = Literal["recorded", "none", "8bit", "4bit"]
AttentionOption = Annotated[
    Attention,
    typer.Option(
        "--attention",
        help="Attend with keys and queries in 8 or 4 bits where that is faster, or with none quantised; else"
        " as config.json says",
    ),
]
TensorOption = Annotated[
    list[str] | None,
    typer.Option("--tensor", metavar="GLOB", help="Only tensors whose name matches; repeatable"),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Compress only matching tensors; repeatable"),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Store matching tensors raw; repeatable"),
]


def bits(kv_bits: KvBits | None) -> int | None:
    """The number that --kv-bits gives."""
    return None if kv_bits is None else int(kv_bits)
