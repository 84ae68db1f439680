"""The request for a target, and everything that the search for a plan needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.choices import Sensitivity as Sensitivity
from neuzip.choices import TargetScheme
from neuzip.compress.device import AnyDevice, choose
from neuzip.compress.entry_checks import require_plain
from neuzip.compress.expert_names import expert_name
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.experts.expert_use import ExpertUse, read_use
from neuzip.eval.measures.texts import read_text
from neuzip.eval.plans.target_values import RequestedTarget

if TYPE_CHECKING:
    from neuzip.compress import Rule
    from neuzip.eval.measures.comparison import BaselineComparison
    from neuzip.eval.measures.texts import Text
    from neuzip.eval.plans.calibration_text import CalibrationText
    from neuzip.eval.plans.plan_request import DropLayers, RequestedUse, TargetRequest
    from neuzip.eval.plans.reach import Reach
    from neuzip.eval.plans.sensitivity import Method

MOST_LAYERS = 10_000
"""Layers: more than any model has."""


@dataclass(frozen=True)
class PreparedSearch:
    """A target with everything that the search for a plan needs.

    `lossless` is what sizes the checkpoint can have, where the target is a size that lossless compression
    reaches by itself, so that nothing is lost or measured; else None.
    """

    request: TargetRequest
    text: Text | None
    baseline: BaselineComparison | None
    lossless: Reach | None


def require_droppable(
    drop_layers: DropLayers, goal: RequestedTarget | None, scheme: TargetScheme, sensitivity: Sensitivity
) -> None:
    """Raise UsageError for a number of layers that cannot be dropped, or whose importance is not measured.

    Only the search for mantissa bits drops layers.
    """
    if drop_layers == 0:
        return
    what = f"`drop_layers={drop_layers!r}`"
    if drop_layers != "auto" and not (type(drop_layers) is int and 0 < drop_layers < MOST_LAYERS):
        raise UsageError(f"{what}: is no number of layers", "give a number from 1 on, auto, or none")
    if goal is None:
        raise UsageError(
            f"{what}: needs a target that says what may be lost",
            "add `scheme='rounded'` and `max_kld`, `max_ppl_increase` or `target_size`; neuzip layers --drop"
            " does without",
        )
    if scheme == "quantized":
        raise UsageError(
            f"{what} has no effect without `scheme='rounded'`",
            "add `scheme='rounded'`, or drop layers before: neuzip layers SRC --drop N --output FOLDER",
        )
    if drop_layers == "auto" and sensitivity == "weights":
        raise UsageError(
            f"{what} excludes `sensitivity='weights'`: layer importance is measured", "leave one of them out"
        )


def measures_nothing(
    goal: RequestedTarget | None, scheme: TargetScheme, sensitivity: Sensitivity, calibration: str
) -> bool:
    """Whether a target is reached by the weights alone: a size, without calibration or sensitivities."""
    if goal is None or not goal.limits_size:
        return False
    return calibration == "none" if scheme == "quantized" else sensitivity == "weights"


def text_for(text: str | None, *, needed: bool) -> str | None:
    """The text to measure on, by default the built-in one; None if none is given or `needed`."""
    return "demo" if text is None and needed else text


def prepare_search(
    goal: RequestedTarget,
    src: Path,
    dst: Path,
    rules: Sequence[Rule],
    *,
    scheme: TargetScheme,
    calibration: str,
    block_size: int | None,
    text: str | None,
    sensitivity: Sensitivity,
    device: AnyDevice,
    jobs: int | None,
    overwrite: bool,
    dry_run: bool = False,
    drop_layers: DropLayers = 0,
    expert_use: str | os.PathLike[str] = "auto",
    import_models: Callable[[], None] = lambda: None,
) -> PreparedSearch:
    """Check a target, and load the original if plans are compared with it. Raises NeuzipError.

    `rules` say what may be rounded or quantised. Without a `text` nothing is measured. `calibration` is
    "auto", "none" or a text. `expert_use` is "auto", "none" or a file. `import_models` is called before the
    libraries of models are imported, if a text is given.
    """
    target = goal.target(0, 0)  # a slip of the pen is told before anything is read
    use = _requested_use(expert_use)
    document = None if text is None else read_text(text)
    if document is not None:
        import_models()
    from neuzip.eval.plans.plan_file import refuse_other_files
    from neuzip.eval.plans.plan_request import TargetRequest
    from neuzip.eval.plans.reach import predict_quantized_reach, predict_reach

    with FolderSource(src) as source:
        require_plain(source, dst)
        if not dry_run:
            refuse_other_files(dst, overwrite)
        if isinstance(use, ExpertUse):
            _require_experts(source, use, expert_use)
        target = goal.target(
            sum(p.stat().st_size for p in source.checkpoint.weight_paths()),
            sum(t.info.numel for t in source.tensors()),
        )
    lossless = None
    if goal.limits_size and drop_layers == 0:
        if scheme == "quantized":
            within = predict_quantized_reach(src, rules, jobs)
        else:
            within = predict_reach(src, rules, block_size, jobs)
        within.require(target)
        if within.is_lossless(target):
            lossless, document = within, None
    baseline, calibrating = None, None
    if document is not None:
        assert text is not None
        baseline, calibrating = _loaded(src, document, text, scheme, calibration, device)
    method = _method(sensitivity, baseline, scheme, calibrating)
    request = TargetRequest(
        src, dst, target, method, tuple(rules), block_size, choose(device, weight_bytes(src)), jobs,
        drop_layers, use, scheme, calibrating,
    )  # fmt: skip
    return PreparedSearch(request, document, baseline, lossless)


def _loaded(
    src: Path, document: Text, text: str, scheme: TargetScheme, calibration: str, device: AnyDevice
) -> tuple[BaselineComparison, CalibrationText | None]:
    """The original, loaded, beside a text or a part of it, and what calibrates. `text` names the document."""
    from neuzip.eval.measures.comparison import BaselineComparison
    from neuzip.eval.plans.calibration_text import COMPARED, TextParts, split_text
    from neuzip.runtime.devices import choose_device

    parts = TextParts(COMPARED, None)
    if scheme == "quantized":
        parts = split_text(src, document, text, calibration, choose_device(device))
    baseline = BaselineComparison(
        src, document, max_tokens=parts.compared, device=device, reading=parts.reading
    )
    return baseline, parts.calibration


def _requested_use(value: str | os.PathLike[str]) -> RequestedUse:
    """The use of experts that a file says, or the word in place of one. Raises NeuzipError."""
    words: dict[object, RequestedUse] = {"auto": "auto", "none": "none"}
    return words[value] if value in words else read_use(Path(value))


def _require_experts(source: FolderSource, use: ExpertUse, file: str | os.PathLike[str]) -> None:
    """Raise NeuzipError for a use of other experts than those of a checkpoint."""
    names = [name for name in (expert_name(t.name) for t in source.tensors()) if name is not None]
    if not names:
        raise NeuzipError(
            f"{source.checkpoint.path}: has no tensors of single experts",
            "leave out `expert_use`: experts that are stored as one tensor have one scheme",
        )
    experts = Counter((name.layer, name.kind) for name in names)
    fitting = {layer for (layer, _), count in experts.items() if use.of_layer(layer, count) is not None}
    if not fitting or fitting != {one.layer for one in use.layers}:
        raise NeuzipError(
            f"{file}: is of another model than {source.checkpoint.path}: its layers or experts differ",
            "run neuzip experts on this model",
        )


def _method(
    sensitivity: Sensitivity,
    baseline: BaselineComparison | None,
    scheme: TargetScheme,
    calibration: CalibrationText | None,
) -> Method:
    """How sensitivities are found. Steps of quantised weights follow their Fisher information, if any."""
    if scheme == "quantized":
        return "weights" if calibration is None else "fisher"
    if baseline is None:
        return "weights"
    if sensitivity == "auto":
        return "measured" if baseline.device.type == "cuda" else "fisher"
    return sensitivity
