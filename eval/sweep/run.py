"""Many schemes on one checkpoint: size, quality, memory and speed, as Table 3 of NeuZip (arXiv 2410.20650).

Each scheme is compressed for real, loaded, and compared with the original on a text; each yardstick is a
published format, rounded to and compared on the same text. The figures of each are one JSON file, written at
once: a sweep that was interrupted goes on with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import NeuzipError
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.comparison import NotFinite, Stage, read_tokens
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels.float_fields import FORMATS
from neuzip.runtime.decode.benchmark import device_name
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.messages import versions

from .folder import keep, keep_pictures, known_results, temporary_folder
from .measure import Measurer
from .quantized import TooFewBits
from .rows import Failure, Sweep, SweepRow
from .setting import SweepSetting
from .setup import KINDS, SweepScheme, kind_of, work_folder


def sweep(
    setting: SweepSetting,
    schemes: Sequence[SweepScheme],
    out: Path | None,
    stage: Stage,
    *,
    overwrite: bool = False,
) -> Sweep:
    """Measure all schemes, or those that are not in the folder `out` yet, and draw them there.

    A scheme that breaks the model, or cannot be as small as it should, is noted, and the sweep goes on.
    Raises NeuzipError, also if that is so of all schemes, and WouldOverwrite for a folder `out` of
    something else.
    """
    with temporary_folder() if out is None else work_folder(out) as work:
        schemes = _distinct(setting.src, schemes)
        conditions = _conditions(setting, device_name(choose_device(setting.device)))
        known = {} if out is None else known_results(out, [s.label for s in schemes], conditions, overwrite)
        by_label = dict(known)
        missing = [scheme for scheme in schemes if scheme.label not in by_label]
        for result in _measured(setting, missing, conditions, work, stage):
            by_label[result.scheme] = result
            if out is not None:
                keep(out, result)
        results = [by_label[scheme.label] for scheme in schemes]
        outcome = Sweep(
            setting.text.name,
            conditions["lossless"]["rule"],
            conditions["lossless"]["device"],
            tuple(result for result in results if isinstance(result, SweepRow)),
            len(known),
            tuple(result for result in results if isinstance(result, Failure)),
        )
        if not outcome.rows:
            raise NeuzipError(
                f"no scheme has results: {outcome.failed[0].scheme}: {outcome.failed[0].reason}",
                "try more bits, or `dtype='float32'`",
            )
        if out is not None:
            keep_pictures(out, outcome, setting.src.resolve().name)
    return outcome


def _measured(
    setting: SweepSetting,
    schemes: Sequence[SweepScheme],
    conditions: Mapping[str, dict[str, Any]],
    work: Path,
    stage: Stage,
) -> Iterator[SweepRow | Failure]:
    """The results of schemes and yardsticks, one after the other; without any the model is not loaded."""
    if not schemes:
        return
    with Measurer(setting, work, stage) as measurer:
        for scheme in schemes:
            depends_on = conditions[kind_of(scheme.label)]
            try:
                yield measurer.row(scheme, depends_on)
            except (NotFinite, TooFewBits) as failure:
                yield Failure(scheme.label, failure.message, depends_on)


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


def _conditions(setting: SweepSetting, device: str) -> dict[str, dict[str, Any]]:
    """What the figures of a row depend on, by the kind of the row."""
    calibration = setting.calibration
    common = _depends_on(setting, device)
    own = {"quantized": {"calibration": "none" if calibration is None else calibration.fingerprint}}
    return {kind: {**common, **own.get(kind, {})} for kind in KINDS}


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
