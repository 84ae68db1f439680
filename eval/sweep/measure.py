"""One scheme or yardstick of a sweep: made, loaded, and compared with the original."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neuzip.compress import compress
from neuzip.compress.device import CPU, Device
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.compress.workspace import remove
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.measures.estimates import exponential
from neuzip.eval.measures.texts import Text
from neuzip.eval.yardsticks.checkpoint import write_restored
from neuzip.eval.yardsticks.table import YARDSTICKS
from neuzip.runtime.decode.benchmark import synchronize
from neuzip.runtime.read import read_tensors

from .rows import SweepRow
from .setup import SweepScheme, kind_of


@dataclass(frozen=True)
class SweepSetting:
    """The checkpoint and text of a sweep, and how it is measured."""

    src: Path
    text: Text
    window: int | None = None
    max_tokens: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    residency: str = "dense"
    coder: Device = CPU
    jobs: int | None = None


def baseline_of(setting: SweepSetting) -> BaselineComparison:
    return BaselineComparison(
        setting.src, setting.text, window=setting.window, max_tokens=setting.max_tokens,
        device=setting.device, dtype=setting.dtype, residency=setting.residency,
    )  # fmt: skip


def measured(
    setting: SweepSetting,
    scheme: SweepScheme,
    baseline: BaselineComparison,
    work: Path,
    stage: Stage,
    depends_on: dict[str, Any],
) -> SweepRow:
    """The row of one scheme or yardstick. Raises NeuzipError, and NotFinite if it breaks the model."""
    of_kind = _compressed if scheme.yardstick is None else _restored
    return of_kind(setting, scheme, baseline, work / scheme.label, stage, depends_on)


def _compressed(
    setting: SweepSetting,
    scheme: SweepScheme,
    baseline: BaselineComparison,
    dst: Path,
    stage: Stage,
    depends_on: dict[str, Any],
) -> SweepRow:
    with stage(f"{scheme.label}: compress", weight_bytes(setting.src), "bytes") as advance:
        report = compress(
            setting.src, dst, scheme.rules, jobs=setting.jobs, device=setting.coder, on_bytes=advance
        )
    with stage(f"{scheme.label}: evaluate", baseline.tokens, "tokens") as advance:
        run = baseline.run(dst, advance)
    speed = _decode_speed(dst, baseline.device, setting.jobs)
    remove(dst)
    losses = [t.loss.max_relative for t in report.tensors if t.loss is not None]
    return SweepRow(
        scheme=scheme.label,
        kind=kind_of(scheme.label),
        bytes=report.stored_weight_bytes,
        original_bytes=report.weight_bytes,
        ratio=report.ratio,
        weights=report.weights,
        bits_per_weight=report.bits_per_weight,
        largest_relative_error=max(losses, default=0.0),
        perplexity=exponential(run.comparison.other_nll),
        comparison=run.comparison,
        dtype=run.dtype,
        memory_bytes=run.weight_bytes,
        peak_bytes=None if baseline.device.type == "cpu" else run.peak_bytes,
        load_seconds=run.load_seconds,
        decode_bytes_per_second=speed,
        tokens_per_second=run.tokens_per_second,
        depends_on=depends_on,
    )


def _restored(
    setting: SweepSetting,
    scheme: SweepScheme,
    baseline: BaselineComparison,
    dst: Path,
    stage: Stage,
    depends_on: dict[str, Any],
) -> SweepRow:
    assert scheme.yardstick is not None
    with stage(f"{scheme.label}: round", weight_bytes(setting.src), "bytes") as advance:
        made = write_restored(
            setting.src, dst, YARDSTICKS[scheme.yardstick], baseline.device,
            widen=baseline.dtype == torch.float32, jobs=setting.jobs, on_bytes=advance,
        )  # fmt: skip
    with stage(f"{scheme.label}: evaluate", baseline.tokens, "tokens") as advance:
        run = baseline.run(dst, advance, residency="dense")
    remove(dst)
    return SweepRow(
        scheme=scheme.label,
        kind=kind_of(scheme.label),
        bytes=made.bytes,
        original_bytes=made.original_bytes,
        ratio=made.bytes / made.original_bytes,
        weights=made.weights,
        bits_per_weight=8 * made.bytes / made.weights,
        largest_relative_error=made.largest_relative_error,
        perplexity=exponential(run.comparison.other_nll),
        comparison=run.comparison,
        dtype=run.dtype,
        memory_bytes=None,
        peak_bytes=None,
        load_seconds=None,
        decode_bytes_per_second=None,
        tokens_per_second=None,
        depends_on=depends_on,
    )


def _decode_speed(path: Path, device: torch.device, jobs: int | None) -> float:
    """Bytes of weights that are decoded a second, read and decoded one tensor after the other."""
    times = []
    with FolderSource(path) as source, Workers(jobs) as workers:
        tensors = list(source.tensors())
        for _ in range(2):
            synchronize(device)
            began = time.perf_counter()
            for tensor in tensors:
                read_tensors(source, [tensor], device, workers, verify=False)
            synchronize(device)
            times.append(time.perf_counter() - began)
    return sum(t.info.nbytes for t in tensors) / min(times)
