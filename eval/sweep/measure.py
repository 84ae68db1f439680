"""One scheme or yardstick of a sweep: made, loaded, and compared with the original."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from neuzip.compress import CompressionReport, compress
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.compress.workspace import remove
from neuzip.eval.measures.comparison import BaselineComparison, ComparisonRun, Stage
from neuzip.eval.measures.estimates import exponential
from neuzip.eval.yardsticks.checkpoint import write_restored
from neuzip.eval.yardsticks.table import YARDSTICKS
from neuzip.runtime.decode.benchmark import synchronize
from neuzip.runtime.read import read_tensors

from .quantized import SweepQuantizer
from .rows import SweepRow
from .setting import SweepSetting
from .setup import SweepScheme, kind_of


class Measurer:
    """Measures schemes and yardsticks of one setting, in the folder `work`. Used as a context manager."""

    def __init__(self, setting: SweepSetting, work: Path, stage: Stage) -> None:
        self._setting, self._work, self._stage = setting, work, stage
        self._baseline = BaselineComparison(
            setting.src, setting.text, window=setting.window, max_tokens=setting.max_tokens,
            device=setting.device, dtype=setting.dtype, residency=setting.residency,
        )  # fmt: skip
        self._open = ExitStack()

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    @cached_property
    def _quantizer(self) -> SweepQuantizer:
        """Calibrates when it is first used."""
        return self._open.enter_context(SweepQuantizer.opened(self._setting, self._baseline, self._stage))

    def row(self, scheme: SweepScheme, depends_on: dict[str, Any]) -> SweepRow:
        """The row of one scheme or yardstick. Raises NeuzipError, NotFinite and TooFewBits.

        The folder of a scheme is removed, whatever happens.
        """
        dst = self._work / scheme.label
        try:
            return (self._compressed if scheme.yardstick is None else self._restored)(scheme, dst, depends_on)
        finally:
            if os.path.lexists(dst):
                remove(dst)

    def _compressed(self, scheme: SweepScheme, dst: Path, depends_on: dict[str, Any]) -> SweepRow:
        setting, baseline = self._setting, self._baseline
        report = self._compress(scheme, dst)
        run = self._run(dst)
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
            decode_bytes_per_second=_decode_speed(dst, baseline.device, setting.jobs),
            tokens_per_second=run.tokens_per_second,
            depends_on=depends_on,
        )

    def _compress(self, scheme: SweepScheme, dst: Path) -> CompressionReport:
        if scheme.bits is not None:
            return self._quantizer.compress(scheme.bits, dst, self._stage)
        setting = self._setting
        with self._stage(f"{scheme.label}: compress", weight_bytes(setting.src), "bytes") as advance:
            return compress(
                setting.src, dst, scheme.rules, jobs=setting.jobs, device=setting.coder, on_bytes=advance
            )

    def _restored(self, scheme: SweepScheme, dst: Path, depends_on: dict[str, Any]) -> SweepRow:
        assert scheme.yardstick is not None
        setting, baseline = self._setting, self._baseline
        with self._stage(f"{scheme.label}: round", weight_bytes(setting.src), "bytes") as advance:
            restored = write_restored(
                setting.src, dst, YARDSTICKS[scheme.yardstick], baseline.device,
                widen=baseline.dtype == torch.float32, jobs=setting.jobs, on_bytes=advance,
            )  # fmt: skip
        run = self._run(dst, residency="dense")
        return SweepRow(
            scheme=scheme.label,
            kind=kind_of(scheme.label),
            bytes=restored.bytes,
            original_bytes=restored.original_bytes,
            ratio=restored.bytes / restored.original_bytes,
            weights=restored.weights,
            bits_per_weight=8 * restored.bytes / restored.weights,
            largest_relative_error=restored.largest_relative_error,
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

    def _run(self, dst: Path, residency: str | None = None) -> ComparisonRun:
        with self._stage(f"{dst.name}: evaluate", self._baseline.tokens, "tokens") as advance:
            return self._baseline.run(dst, advance, residency=residency)


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
