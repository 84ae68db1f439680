"""The tensors of a checkpoint in a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from neuzip.compress.schemes import describe
from neuzip.compress.sources.folder import FolderSource
from neuzip.eval.measures.difference import TensorDifference, compare, match
from neuzip.eval.measures.histograms import Inspection, TensorFigures, inspect, labels, select
from neuzip.formats.checkpoint import find_checkpoint


@dataclass(frozen=True)
class TensorRow:
    """One tensor: what it takes, and how far it is from the original.

    `identical` is whether its bytes are the original's, None where that is not known. `relative_l2` is
    |restored - original| / |original| over all weights, where both checkpoints were read; `rms_relative` and
    `max_relative` are of the errors relative to each weight, as the container tells them.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    scheme: str
    nbytes: int
    stored_bytes: int
    identical: bool | None = None
    relative_l2: float | None = None
    rms_relative: float | None = None
    max_relative: float | None = None

    @property
    def error(self) -> float | None:
        """The error that is drawn: of the whole tensor where it is known."""
        return self.relative_l2 if self.relative_l2 is not None else self.rms_relative


def weight_file_bytes(path: Path) -> int:
    """Bytes of the weight files of a checkpoint."""
    return sum(file.stat().st_size for file in find_checkpoint(path).weight_paths())


def read_tensors(
    path: Path,
    base: Path | None,
    *,
    jobs: int | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> tuple[Inspection, tuple[TensorRow, ...], tuple[str, ...]]:
    """The figures of a checkpoint's tensors and, with `base`, their distances from the original's.

    The last are the names of tensors that only the original has. Reads both whole. `on_bytes` is told of
    bytes read, twice those of the tensors with `base`. Raises FormatError.
    """
    gaps: dict[tuple[str, str], TensorDifference] = {}
    missing: tuple[str, ...] = ()
    with FolderSource(path) as source:
        tensors = select(source)
        inspection = inspect(source, tensors, jobs=jobs, on_bytes=on_bytes)
        if base is not None:
            with FolderSource(base) as original:
                pairs = match(original, source)
                differences = compare(original, source, pairs, jobs=jobs, on_bytes=on_bytes)
            gaps = {(gap.b.file, gap.b.name): gap for gap in differences if gap.b is not None}
            missing = tuple(gap.label for gap in differences if gap.b is None)
    rows = [_tensor_row(inspection, t, gaps.get((t.file, t.name))) for t in inspection.tensors]
    return inspection, tuple(rows), missing


def tensors_of_headers(path: Path) -> tuple[TensorRow, ...]:
    """The tensors of a checkpoint without reading any weight. Raises FormatError."""
    rows = []
    with FolderSource(path) as source:
        tensors = select(source)
        for t, label in zip(tensors, labels(tensors), strict=True):
            info = t.info
            if t.record is None:
                rows.append(TensorRow(label, info.dtype, info.shape, "plain", info.nbytes, info.nbytes))
                continue
            stored, scheme, loss = source.stored_bytes(t), describe(t.record, info.dtype), t.record.loss
            row = TensorRow(label, info.dtype, info.shape, scheme, info.nbytes, stored, loss is None)
            if loss is not None:
                row = replace(row, rms_relative=loss.rms_relative, max_relative=loss.max_relative)
            rows.append(row)
    return tuple(rows)


def _tensor_row(inspection: Inspection, t: TensorFigures, gap: TensorDifference | None) -> TensorRow:
    row = TensorRow(t.label, t.dtype, t.shape, t.scheme, t.nbytes, t.stored_bytes)
    if t.loss is not None:
        row = replace(
            row, identical=False, rms_relative=t.loss.rms_relative, max_relative=t.loss.max_relative
        )
    elif inspection.compressed:  # what a container does not say it rounded is the original's
        row = replace(row, identical=True, rms_relative=0.0, max_relative=0.0)
    if gap is None:
        return row
    if gap.status == "identical":
        return replace(row, identical=True, relative_l2=0.0, max_relative=0.0)
    return replace(
        row,
        identical=False,
        relative_l2=gap.relative_l2,
        max_relative=row.max_relative if gap.max_relative is None else gap.max_relative,
    )
