"""The public functions on checkpoint files: compress, restore, check, look at, compare, export, share.

Nothing here needs torch before a GPU, a target or an export does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from neuzip.arguments import (
    Source,
    as_list,
    local,
    require_counts,
    require_one_of,
    require_paths,
    require_texts,
)
from neuzip.choices import (
    Activations,
    BitnetMode,
    ExportActivations,
    ExportEngine,
    GgufType,
    LinearClass,
    Sensitivity,
    TargetScheme,
    TernaryPacking,
    TernaryQuantizer,
    WholeGroup,
)
from neuzip.compress import compress, decompress, verify
from neuzip.compress.delta_base import name_of
from neuzip.compress.delta_job import compress_delta
from neuzip.compress.device import AnyDevice, choose, named
from neuzip.compress.entry_checks import refuse_before_download
from neuzip.compress.progress import unseen
from neuzip.compress.pull import PullReport
from neuzip.compress.pull import pull as pull_listing
from neuzip.compress.reports import CompressionReport
from neuzip.compress.request import CompressRequest
from neuzip.compress.restore import DecompressionReport
from neuzip.compress.rules import Rule
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.verify import VerifyReport
from neuzip.distribution import require
from neuzip.errors import UsageError
from neuzip.formats.hub.connection import require_token
from neuzip.formats.hub.ids import repository_name
from neuzip.formats.hub.listing import find_repository
from neuzip.formats.hub.notes import log
from neuzip.formats.hub.private_files import refuse_private
from neuzip.formats.hub.push import Pushed
from neuzip.formats.hub.push import push as push_plan
from neuzip.formats.hub.push_plan import plan_push

if TYPE_CHECKING:
    from neuzip.compress.export import ExportReport
    from neuzip.eval.measures.difference import CheckpointDifference
    from neuzip.eval.measures.histograms import Inspection
    from neuzip.eval.plans.plan_request import DropLayers
    from neuzip.eval.plans.target_result import TargetResult
    from neuzip.eval.plans.target_values import RequestedTarget


@dataclass(frozen=True)
class CompressionResult(CompressionReport):
    """What `compress_checkpoint` did. All sizes are in bytes.

    `weight_bytes` and `stored_weight_bytes` are the sizes of the weight files before and after,
    `original_bytes` and `stored_bytes` those of all files. `ratio` is `stored_weight_bytes / weight_bytes`.
    `tensors` has one entry per tensor, with its scheme and, for a lossy one, its `loss`. `seconds` is wall
    time. With a quality or size target, `target` holds the plan and its measured result, and `target.holds`
    is False if the result misses the target. Otherwise `target` is None.
    """

    target: TargetResult | None = None


def compress_checkpoint(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    mantissa_bits: int | None = None,
    bits_for: Mapping[str, int] | None = None,
    block_size: int | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    plan: str | os.PathLike[str] | None = None,
    rules: Sequence[Rule] | None = None,
    ternary: bool = False,
    ternary_quantizer: TernaryQuantizer = "absmean",
    ternary_group: int | WholeGroup = "tensor",
    ternary_packing: TernaryPacking = "trits",
    activations: Activations | None = None,
    allow_destructive: bool = False,
    bits: float | None = None,
    max_kld: float | None = None,
    max_ppl_increase: str | None = None,
    target_size: int | str | None = None,
    text: str | os.PathLike[str] | None = None,
    calibration: str | os.PathLike[str] = "auto",
    scheme: TargetScheme = "quantized",
    sensitivity: Sensitivity = "auto",
    expert_use: str | os.PathLike[str] = "auto",
    drop_layers: int | Literal["auto"] = 0,
    base: Source | None = None,
    device: AnyDevice = "auto",
    jobs: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
) -> CompressionResult:
    """Compress a checkpoint, lossless by default, as `neuzip compress` does.

    `source` is a folder, a .safetensors file, or a Hub id, which is downloaded. `destination` is a folder, or
    a file if `source` is a file. To resume an interrupted call, repeat it.

    `mantissa_bits` rounds matrices to that many mantissa bits (bf16 has 7); None is lossless.
    `bits_for` maps globs of tensor names to other numbers of bits. `block_size` is how many weights share a
    per-block scale, a power of two from 8 to 16384. `include` and `exclude` are globs of tensor names to
    compress, or to store raw. `plan` is a TOML file of rules, and `rules` are such rules as `Rule` objects.
    The first rule that matches a tensor applies.

    `ternary` stores the linear weights of a ternary model as -1, 0 and 1 times a scale. `ternary_group` is
    how many weights of a row share a scale, and `ternary_packing` how the codes are stored.
    `ternary_quantizer` rounds weights that are not ternary yet; that needs `allow_destructive=True`. neuzip
    records `activations` in config.json, for inference.

    `bits`, `max_kld`, `max_ppl_increase` and `target_size` are targets; give one at most. neuzip then chooses
    the precision of each tensor, and needs torch and transformers. `bits` is the size of the weight files in
    bits per weight. `max_kld` is a mean KL divergence in nats per token, `max_ppl_increase` an increase of
    perplexity such as "0.5%", and `target_size` the size of the weight files in bytes or as "60%" or "6GiB".
    `text` is what to measure on: a UTF-8 file, a folder of them, a dataset of the Hub, or "demo", the
    default. `scheme` is how weights are stored: "quantized" as integers, "rounded" with fewer mantissa bits.
    `calibration` is the text that quantised weights are fitted to: "auto" takes the part of `text` that is
    not used to measure, and "none" rounds every weight to the nearest integer.

    The next three parameters need `scheme="rounded"`. `sensitivity` is how the loss due to each tensor is
    estimated: "measured", "fisher" or "weights". `expert_use` gives rarely chosen experts of a mixture fewer
    bits: "auto" counts how often each is chosen on the text, a file of `neuzip experts --output` says it, and
    "none" treats all experts of a layer alike. `drop_layers` is how many whole layers to drop. "auto" drops
    as many as make the result smaller, or closer to the original for `target_size`.

    `base` is the checkpoint that `source` was made from: the result is a delta, which stores the difference
    without loss. `decompress_checkpoint` restores `source` from the delta and the base.

    `device` is where weights are coded: "auto", "cpu", "cuda", the number of a GPU, or a torch.device. `jobs`
    is the number of threads, None for one per core. `verify` decodes and compares every tensor before the
    file gets its final name. `overwrite` replaces a checkpoint at the destination.

    Raises UsageError for parameters that are wrong or exclude each other, WouldOverwrite for a destination
    that exists, FormatError for a damaged source, and NeuzipError for everything else that can be expected.

    >>> import tempfile
    >>> from neuzip.eval.demo import CHECKPOINT
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = compress_checkpoint(CHECKPOINT, f"{folder}/demo.nz", mantissa_bits=3, jobs=1)
    >>> result.ratio < 0.5, result.target is None
    (True, True)
    """
    require_paths(
        source=source, destination=destination, plan=plan or "", text=text or "", expert_use=expert_use,
        calibration=calibration,
    )  # fmt: skip
    require_one_of((*get_args(Activations), None), activations=activations)
    require_one_of(get_args(Sensitivity), sensitivity=sensitivity)
    require_one_of(get_args(TargetScheme), scheme=scheme)
    goal = _goal(max_kld, max_ppl_increase, target_size, bits)
    request = CompressRequest(
        mantissa_bits=mantissa_bits, bits_for=_bits_for(bits_for),
        block_size="none" if block_size is None else str(block_size), include=as_list("include", include),
        exclude=as_list("exclude", exclude), plan=plan, rules=rules, ternary=ternary,
        ternary_quantizer=ternary_quantizer, ternary_group=str(ternary_group),
        ternary_packing=ternary_packing, activations=activations, allow_destructive=allow_destructive,
        target=None if goal is None else goal.parameter, text=text, scheme=scheme,
        calibration=calibration, sensitivity=sensitivity, expert_use=expert_use, base=base,
    )  # fmt: skip
    request.refuse_conflicts()
    if drop_layers:
        _require_droppable(drop_layers, goal, scheme, sensitivity)
    rules = request.to_rules()
    named(device)
    require_counts(jobs=jobs)
    dst = Path(destination)
    if goal is not None:
        require(f"`{goal.parameter}`", "torch", "transformers")
    refuse_before_download(source, dst, overwrite)
    path = local("source", source)
    if goal is not None:
        delivered = _reach(
            goal, path, dst, rules, request, block_size, drop_layers, device, jobs, verify, overwrite,
        )  # fmt: skip
        return CompressionResult(**vars(delivered.report), target=delivered)
    coder = choose(device, weight_bytes(path))
    if base is not None:
        old = local("base", base)
        report = compress_delta(
            path, old, dst, name_of(old, os.fspath(base)), rules,
            verify=verify, jobs=jobs, overwrite=overwrite, device=coder,
        )  # fmt: skip
    else:
        report = compress(
            path, dst, rules, verify=verify, jobs=jobs, overwrite=overwrite, device=coder,
            allow_destructive=allow_destructive, activations=activations,
        )  # fmt: skip
    return CompressionResult(**vars(report))


def decompress_checkpoint(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    base: Source | None = None,
    device: AnyDevice = "auto",
    jobs: int | None = None,
    overwrite: bool = False,
) -> DecompressionReport:
    """Restore a compressed checkpoint: byte for byte if it was compressed losslessly.

    `source` is a folder, a .safetensors file, or a Hub id. A delta needs the `base` that it was made from.
    `device` and `jobs` are as in `compress_checkpoint`. neuzip compares every tensor with its checksum before
    the file gets its final name.

    Raises FormatError for a damaged source, WouldOverwrite for a destination that exists, and NeuzipError.
    """
    require_paths(destination=destination)
    named(device)
    require_counts(jobs=jobs)
    path = local("source", source)
    of_base = None if base is None else local("base", base)
    coder = choose(device, weight_bytes(path, allow_delta=base is not None))
    return decompress(path, destination, jobs=jobs, overwrite=overwrite, device=coder, base=of_base)


def verify_checkpoint(
    source: Source,
    *,
    original: Source | None = None,
    base: Source | None = None,
    device: AnyDevice = "auto",
    jobs: int | None = None,
) -> VerifyReport:
    """Check every checksum of a compressed checkpoint, and decode every tensor.

    With the `original`, neuzip also compares every tensor: a lossless tensor bit for bit; for a lossy tensor,
    neuzip measures the errors. Without its `base`, neuzip checks what a delta stores, but not the tensors
    that it restores. `device` and `jobs` are as in `compress_checkpoint`.

    Raises FormatError for a damaged checkpoint, VerificationError for one that was not made from `original`,
    and NeuzipError for what is not compressed.
    """
    named(device)
    require_counts(jobs=jobs)
    path = local("source", source)
    of_original = None if original is None else local("original", original)
    of_base = None if base is None else local("base", base)
    coder = choose(device, weight_bytes(path, allow_delta=True))
    return verify(path, of_original, jobs=jobs, device=coder, base=of_base)


def inspect_checkpoint(
    source: Source,
    *,
    tensor: str | Sequence[str] = (),
    device: AnyDevice = "auto",
    jobs: int | None = None,
) -> Inspection:
    """Count the bits of a checkpoint, plain or compressed: entropies, sizes and histograms.

    `tensor` is a glob of tensor names to look at, or several. Entropies are in bits per weight, sizes in
    bytes; the stored sizes of a plain checkpoint are predicted, and `rates` predict what quantised files
    would take, with the step and the relative error of the weights. `device` and `jobs` are as in
    `compress_checkpoint`.

    Raises UsageError where no tensor matches, FormatError for a damaged checkpoint, and NeuzipError for a
    delta, because its weights are unknown without the base.
    """
    from neuzip.eval.measures import histograms

    globs = as_list("tensor", tensor)
    named(device)
    require_counts(jobs=jobs)
    path = local("source", source)
    with FolderSource(path, choose(device, weight_bytes(path))) as opened:
        return histograms.inspect(opened, histograms.select(opened, globs), jobs=jobs)


def diff_checkpoints(a: Source, b: Source, *, jobs: int | None = None) -> CheckpointDifference:
    """Compare two checkpoints tensor by tensor, plain or compressed.

    The result's `identical` says whether all tensors are identical. Its `tensors` hold the difference of each
    pair, as errors relative to `a`. `jobs` is the number of threads.

    Raises FormatError for a damaged checkpoint, and NeuzipError.
    """
    from neuzip.eval.measures.difference import compare_checkpoints

    require_counts(jobs=jobs)
    return compare_checkpoints(local("a", a), local("b", b), jobs=jobs)


def export_checkpoint(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    to: ExportEngine,
    gguf_type: GgufType | None = None,
    gguf_mixed: bool = False,
    linear_class: LinearClass | None = None,
    mode: BitnetMode | None = None,
    activations: ExportActivations | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write a ternary model, plain or compressed, in the format of another engine.

    `source` is the folder of a model, or a Hub id. `to` names the engine or library. `gguf_type` is the type
    of the weights in a GGUF file, "tq2_0" by default. `gguf_mixed` stores rows that do not fill whole blocks
    of the type as Q2_0 or Q4_0. `linear_class` and `mode` are for transformers. `activations` is for
    compressed-tensors: "b1.58", the default, quantises activations to 8 bits.

    Raises UsageError for parameters that do not apply to `to`, WouldOverwrite for a destination that exists,
    and NeuzipError for a model without ternary weights or that the engine does not support.
    """
    require("export_checkpoint", "torch")
    require_paths(destination=destination)
    require_one_of((*get_args(GgufType), None), gguf_type=gguf_type)
    require_one_of((*get_args(LinearClass), None), linear_class=linear_class)
    require_one_of((*get_args(BitnetMode), None), mode=mode)
    require_one_of((*get_args(ExportActivations), None), activations=activations)
    from neuzip.compress.export import export, target_of

    target = target_of(to, destination, gguf_type, gguf_mixed, linear_class, mode, activations)
    return export(local("source", source), destination, target, overwrite=overwrite)


def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    evaluation: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    allow_private_files: bool = False,
) -> Pushed:
    """Verify a compressed folder, and upload it to the Hugging Face Hub in one commit, with a model card.

    `repo_id` is `owner/name`. If the repository does not exist, neuzip creates it; `private` makes the new
    repository private. `revision` is a branch, and `message` describes the commit. `evaluation` is a JSON
    file that `neuzip eval` wrote about this folder. neuzip adds its results to the card. neuzip refuses files
    that look private by their names, such as .env, unless `allow_private_files` is set. The access token is
    that of huggingface_hub.

    Raises WouldOverwrite if the repository already holds a checkpoint, FormatError for a damaged folder, and
    NeuzipError for other failures.
    """
    require_paths(folder=folder, evaluation=evaluation or "")
    require_texts(repo_id=repo_id, revision=revision or "", message=message or "")
    report = None if evaluation is None else Path(evaluation)
    plan = plan_push(folder, repo_id, revision=revision, evaluation=report)
    refuse_private(plan.private, repo_id, allow_private_files)
    require_token()
    for warning in plan.warnings:
        log(warning)
    verify(folder)
    return push_plan(
        plan, private=private, message=message, overwrite=overwrite,
        allow_private_files=allow_private_files, note=log,
    )  # fmt: skip


def pull(
    repo_id: str, destination: str | os.PathLike[str] | None = None, *, overwrite: bool = False
) -> PullReport:
    """Download a checkpoint from the Hugging Face Hub as it is, and check every file.

    `repo_id` is `owner/name` or `owner/name@revision`. `destination` is the folder to write, by default the
    repository's name. neuzip also decodes and verifies a compressed checkpoint. To resume an interrupted
    call, repeat it.

    Raises UsageError if `repo_id` is no Hub id, WouldOverwrite for a destination that exists,
    VerificationError for files that differ from those on the Hub, and NeuzipError for other failures.
    """
    require_texts(repo_id=repo_id)
    require_paths(destination=destination or "")
    listing = find_repository(repo_id, note=log)
    listing.tell_left_out(log)
    folder = Path(repository_name(repo_id)) if destination is None else Path(destination)
    return pull_listing(listing, folder, stage=unseen, note=log, overwrite=overwrite)


def _goal(
    max_kld: float | None, max_ppl_increase: str | None, target_size: int | str | None, bits: float | None
) -> RequestedTarget | None:
    from neuzip.eval.plans.target_values import one_goal

    return one_goal(max_kld, max_ppl_increase, target_size, bits)


def _require_droppable(
    layers: DropLayers, goal: RequestedTarget | None, scheme: TargetScheme, sensitivity: Sensitivity
) -> None:
    from neuzip.eval.plans.target_request import require_droppable

    require_droppable(layers, goal, scheme, sensitivity)


def _reach(
    goal: RequestedTarget,
    path: Path,
    dst: Path,
    rules: Sequence[Rule],
    request: CompressRequest,
    block_size: int | None,
    drop_layers: DropLayers,
    device: AnyDevice,
    jobs: int | None,
    verify: bool,
    overwrite: bool,
) -> TargetResult:
    """Compress to a target."""
    from neuzip.eval.plans.deliver import compress_to_target
    from neuzip.eval.plans.target_request import measures_nothing, prepare_search, text_for

    calibration = os.fspath(request.calibration)
    by_weights = measures_nothing(goal, request.scheme, request.sensitivity, calibration)
    text = None if request.text is None else os.fspath(request.text)
    search = prepare_search(
        goal, path, dst, rules, scheme=request.scheme, calibration=calibration, block_size=block_size,
        text=text_for(text, needed=not by_weights or drop_layers != 0), sensitivity=request.sensitivity,
        device=device, jobs=jobs, overwrite=overwrite, drop_layers=drop_layers,
        expert_use=request.expert_use,
    )  # fmt: skip
    if search.request.calibration is not None and search.request.calibration.note:
        log(search.request.calibration.note)
    return compress_to_target(
        search.request, search.text, search.baseline, unseen,
        command="made by neuzip.compress_checkpoint", verify=verify, overwrite=overwrite,
    )  # fmt: skip


def _bits_for(bits_for: object) -> list[str]:
    """Mantissa bits by glob as the command line has them. Raises UsageError for what is no mapping."""
    if not isinstance(bits_for, Mapping | None):
        raise UsageError(
            f"`bits_for={bits_for!r}`: is no mapping", "give a dict: {'*embed_tokens.weight': 4}"
        )
    return [f"{glob}={bits}" for glob, bits in (bits_for or {}).items()]
