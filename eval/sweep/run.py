"""Many schemes on one checkpoint: size, quality, memory and speed, as Table 3 of NeuZip (arXiv 2410.20650).

Each scheme is compressed for real, loaded, and compared with the original on a text; each yardstick is a
published format, rounded to and compared on the same text. The figures of each are one JSON file, written at
once: a sweep that was interrupted goes on with what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workspace import remove
from neuzip.errors import NeuzipError
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.comparison import NotFinite, Stage, read_tokens
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels.float_fields import FORMATS
from neuzip.runtime.decode.benchmark import device_name
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.messages import versions

from .folder import keep, keep_pictures, known_results, temporary_folder
from .measure import SweepSetting, baseline_of, measured
from .rows import Failure, Sweep, SweepRow
from .setup import SweepScheme, work_folder


def sweep(
    setting: SweepSetting,
    schemes: Sequence[SweepScheme],
    out: Path | None,
    stage: Stage,
    *,
    overwrite: bool = False,
) -> Sweep:
    """Measure all schemes, or those that are not in the folder `out` yet, and draw them there.

    A scheme that breaks the model is noted, and the sweep goes on. Raises NeuzipError, also if every scheme
    does, and WouldOverwrite if `out` holds results of something else.
    """
    with temporary_folder() if out is None else work_folder(out) as work:
        schemes = _distinct(setting.src, schemes)
        device = choose_device(setting.device)
        depends_on = _depends_on(setting, device_name(device))
        known = {} if out is None else known_results(out, [s.label for s in schemes], depends_on, overwrite)
        by_label = dict(known)
        missing = [scheme for scheme in schemes if scheme.label not in by_label]
        baseline = baseline_of(setting) if missing else None
        for scheme in missing:
            assert baseline is not None
            result: SweepRow | Failure
            try:
                result = measured(setting, scheme, baseline, work, stage, depends_on)
            except NotFinite as failure:
                result = Failure(scheme.label, failure.message, depends_on)
                remove(work / scheme.label)
            by_label[scheme.label] = result
            if out is not None:
                keep(out, result)
        results = [by_label[scheme.label] for scheme in schemes]
        outcome = Sweep(
            setting.text.name,
            depends_on["rule"],
            depends_on["device"],
            tuple(result for result in results if isinstance(result, SweepRow)),
            len(known),
            tuple(result for result in results if isinstance(result, Failure)),
        )
        if not outcome.rows:
            raise NeuzipError(
                f"every scheme breaks the model: {outcome.failed[0].scheme}: {outcome.failed[0].reason}",
                "try more mantissa bits, or `dtype='float32'`",
            )
        if out is not None:
            keep_pictures(out, outcome, setting.src.resolve().name)
    return outcome


def _distinct(src: Path, schemes: Sequence[SweepScheme]) -> list[SweepScheme]:
    """Each scheme once: one that keeps all mantissa bits is lossless, and has no use for blocks."""
    with FolderSource(src) as source:
        formats = [FORMATS[t.info.dtype] for t in source.tensors() if t.info.dtype in FORMATS]
    most = max((fmt.mantissa_bits for fmt in formats), default=0)
    return list(
        dict.fromkeys(
            SweepScheme(s.mantissa_bits) if s.mantissa_bits is not None and s.mantissa_bits >= most else s
            for s in schemes
        )
    )


def _depends_on(setting: SweepSetting, device: str) -> dict[str, Any]:
    checkpoint = find_checkpoint(setting.src)
    reading = read_tokens(setting.src, setting.text, setting.window, setting.max_tokens)
    return {
        "checkpoint": fingerprint.of_checkpoint(checkpoint),
        "text": fingerprint.of_text(setting.text.content),
        "rule": reading.convention.rule,
        "tokens": reading.convention.tokens,
        "dtype": setting.dtype,
        "residency": setting.residency,
        "device": device,
        "versions": {"neuzip": version("neuzip-toolkit"), **versions()},
    }
