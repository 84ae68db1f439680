"""neuzip bench: speed and memory of a checkpoint in each residency, compared with the dense model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.choices import Attention, KvForm
from neuzip.cli import options
from neuzip.cli.activations import warn_of_plain_inputs
from neuzip.cli.kv_bits import NEEDS as KV_NEEDS
from neuzip.cli.kv_bits import KvRequest, chosen_bits, requested
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.kv_cache import calibration_json
from neuzip.cli.show.speeds import show_speeds
from neuzip.cli.source import resolved_model
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError
from neuzip.runtime.requirements import require_device, require_expert_memory
from neuzip.runtime.residencies import RESIDENCIES, compressed_names

if TYPE_CHECKING:
    from pathlib import Path

    from torch import device as Device

    from neuzip.eval.kv_calibration import KVCalibration
    from neuzip.runtime.kv_bits import KVBits

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip bench my-model.nz",
    "neuzip bench my-model.nz --residency packed,ans --batch 1,8",
    "neuzip bench my-model.nz --kv-bits 4 --prompt-tokens 4096",
    "neuzip bench my-model --attention 8bit --prompt-tokens 16384 --batch 1",
    "neuzip bench my-model.nz --compile --batch 1",
    "neuzip bench my-model.nz --prompt-tokens 2048 --new-tokens 64 --json",
]

NEEDS = {**KV_NEEDS, "--overwrite": ("--kv-plan",)}

ResidencyOption = Annotated[
    str | None,
    typer.Option(
        metavar="R,...",
        help=f"Weight formats to compare with dense: {', '.join(compressed_names())} "
        "(default: packed on a GPU, none on a CPU)",
    ),
]
BatchOption = Annotated[str, typer.Option(metavar="N,...", help="Batch sizes")]
PromptTokensOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens per prompt (default: 512, or the model's maximum)"),
]
NewTokensOption = Annotated[int, typer.Option(metavar="N", min=2, help="New tokens per prompt")]
RoundsOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Runs per measurement; the table shows medians")
]
GraphOption = Annotated[
    bool, typer.Option("--graph/--no-graph", help="Run decoding steps as a CUDA graph (GPU only)")
]
CompiledOption = Annotated[
    bool,
    typer.Option("--compile", help="Compile all steps with torch.compile, those of the dense model too"),
]
KvBitsOption = Annotated[
    str | None,
    typer.Option(
        "--kv-bits", metavar="BITS", show_default=False,
        help="Also measure with a quantised KV cache: 4 bits; 8/4 for keys/values; auto:KLD, chosen by layer;"
        " or a plan FILE",
    ),
]  # fmt: skip
AttentionOption = Annotated[
    Attention,
    typer.Option(
        help="Quantised attention to measure too: as recorded in config.json, none, or 8- or 4-bit QK^T"
    ),
]


def command(
    src: options.ModelArgument,
    residency: ResidencyOption = None,
    expert_memory: options.ExpertMemoryOption = None,
    batch: BatchOption = "1,8,32",
    prompt_tokens: PromptTokensOption = None,
    new_tokens: NewTokensOption = 128,
    rounds: RoundsOption = 3,
    graph: GraphOption = True,
    compiled: CompiledOption = False,
    kv_bits: KvBitsOption = None,
    kv_text: options.KvTextOption = None,
    kv_plan: options.KvPlanOption = None,
    kv_form: options.KvFormOption = "rotated",
    attention: AttentionOption = "recorded",
    device: options.RunDeviceOption = "auto",
    overwrite: options.OverwriteFileOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure tokens/s and memory, compared with the dense model"""
    out = Output(json=json, quiet=quiet)
    residencies, batches = None if residency is None else _names(residency), _numbers(batch)
    experts = options.size(expert_memory)
    require_expert_memory(experts, *(residencies or compressed_names()), device=device)
    request = requested(kv_bits, kv_text, kv_plan, kv_form, overwrite)
    let_threads_sleep()
    out.loading()
    for name in residencies or ("dense",):
        require_device(device, name)
    path = resolved_model(out, src)
    import_large()
    from neuzip.runtime.decode.benchmark import make_plan, measure
    from neuzip.runtime.decode.greedy import not_compiled_together
    from neuzip.runtime.devices import choose_device

    place = choose_device(device)
    if compiled and request.quantises:
        raise not_compiled_together()
    bits, calibration = _bits(out, request, path, place, kv_form)
    plan = make_plan(
        path,
        residencies or (["dense"] if place.type == "cpu" else ["packed"]),
        batches=batches,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rounds=rounds,
        device=place,
        graph=graph,
        kv_bits=bits,
        kv_form=kv_form,
        attention=attention,
        compiled=compiled,
        expert_memory=experts,
    )
    if residencies is None and place.type == "cpu":
        out.status(
            "on a CPU bench measures dense only; --residency packed runs here too, by slow reference code"
        )
    warn_of_plain_inputs(out, path, plan.residencies)
    if compiled:
        out.status("--compile: compiling takes about a minute for each weight format and batch size")
    with out.progress("bench", plan.runs, unit="runs") as advance:
        speeds = measure(plan, on_run=advance)
    show_speeds(out, plan, speeds)
    out.result(
        {
            "src": plan.path,
            "prompt_tokens": plan.prompt_tokens,
            "new_tokens": plan.new_tokens,
            "rounds": plan.rounds,
            "compiled": plan.compiled,
            "expert_memory": plan.expert_memory,
            "kv_calibration": calibration_json(calibration, kv_plan),
            **vars(speeds),
        },
        quiet=[row.decode_tokens_per_second for row in speeds.rows],
    )


def _bits(
    out: Output, request: KvRequest, path: Path, device: Device, form: KvForm
) -> tuple[KVBits | None, KVCalibration | None]:
    """The bits of the KV cache; a model that chooses them is gone before others are measured."""
    if request.limit is None:
        return request.bits, None
    from neuzip.runtime.hf.load import load_model

    with out.progress("load", None):
        model = load_model(path, device=device, attention=False)
    return chosen_bits(out, request, path, model, form)


def _names(text: str) -> list[str]:
    """The residencies of `packed,ans`."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in RESIDENCIES:
            raise UsageError(
                f"--residency {text}: there is no {name!r}", f"choose from {', '.join(RESIDENCIES)}"
            )
    return names


def _numbers(text: str) -> list[int]:
    """The batches of `1,8,32`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--batch {text}: not a list of numbers of at least 1", "give them as 1,8,32")
    return [int(part) for part in parts]
