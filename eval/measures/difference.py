"""How far apart two checkpoints are, tensor by tensor.

Tensors are the same when their bytes are: a NaN with another payload or a zero with another sign is a
difference. Errors are measured in fp64 over the weights that are finite on both sides, relative to A.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from neuzip.compress.pieces import Bytes
from neuzip.compress.progress import Stage, unseen
from neuzip.compress.schemes.truncated import ErrorSums
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.eval.measures.histograms import labels
from neuzip.formats.safetensors_file import DTYPE_BITS
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.float_fields.values import error_sums, to_float64

Pair = tuple[SourceTensor | None, SourceTensor | None]
Reader = Callable[[int, int], Bytes]


@dataclass(frozen=True)
class TensorSide:
    """A tensor as one checkpoint has it."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor between two checkpoints. `label` is its name for people.

    `status` is `identical`, `different`, `dtype`, `shape`, `only_a` or `only_b`, and only `different` has
    numbers: how many elements differ (None where elements are no whole bytes), in how many of these either
    side is an infinity or a NaN, and, for floats, the errors of the others. `max_relative` is over those that
    are not zero in A.
    """

    label: str
    status: str
    a: TensorSide | None
    b: TensorSide | None
    elements: int = 0
    differing: int | None = None
    not_finite: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None
    relative_l2: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields, the label excepted."""
        return {key: value for key, value in asdict(self).items() if key != "label"}


@dataclass(frozen=True)
class _Gap:
    """The difference of two pieces of a tensor; differences of pieces add up."""

    differing: int = 0
    not_finite: int = 0
    max_absolute: float = 0.0
    error: ErrorSums = field(default_factory=ErrorSums)

    def __add__(self, other: _Gap) -> _Gap:
        return _Gap(
            self.differing + other.differing,
            self.not_finite + other.not_finite,
            max(self.max_absolute, other.max_absolute),
            self.error + other.error,
        )


@dataclass(frozen=True)
class CheckpointDifference:
    """The difference of two checkpoints: all tensors of both, and how many bytes of `a` were compared."""

    a: Path
    b: Path
    compared_bytes: int
    tensors: tuple[TensorDifference, ...]

    @property
    def different(self) -> list[TensorDifference]:
        """The tensors that are not the same in both."""
        return [tensor for tensor in self.tensors if tensor.status != "identical"]

    @property
    def identical(self) -> bool:
        """Whether all tensors are identical, bit for bit."""
        return not self.different


def compare_checkpoints(
    a: Path, b: Path, *, jobs: int | None = None, stage: Stage = unseen
) -> CheckpointDifference:
    """Compare two checkpoints tensor by tensor. Raises NeuzipError, and FormatError for a damaged one."""
    with FolderSource(a) as first, FolderSource(b) as second:
        pairs = match(first, second)
        compared = comparable_bytes(pairs)
        with stage("diff", compared) as advance:
            tensors = compare(first, second, pairs, jobs=jobs, on_bytes=advance)
    return CheckpointDifference(a, b, compared, tuple(tensors))


def match(a: FolderSource, b: FolderSource) -> list[Pair]:
    """Pairs of tensors with the same name in the same folder, whatever their files, in the order of A.

    A name that a folder has in several files is matched file by file.
    """
    places: dict[tuple[str, str], tuple[list[SourceTensor], list[SourceTensor]]] = defaultdict(
        lambda: ([], [])
    )
    for side, source in enumerate((a, b)):
        for tensor in source.tensors():
            folder = tensor.file[: tensor.file.rfind("/") + 1]
            places[folder, tensor.name][side].append(tensor)
    pairs: list[Pair] = []
    for left, right in places.values():
        if len(left) == len(right) == 1:
            pairs.append((left[0], right[0]))
            continue
        files = {t.file: t for t in right}
        pairs += [(t, files.pop(t.file, None)) for t in left]
        pairs += [(None, t) for t in files.values()]
    return pairs


def comparable_bytes(pairs: Sequence[Pair]) -> int:
    """Bytes that `compare` will look at."""
    return sum(x.info.nbytes for x, y in pairs if x is not None and y is not None and _kind(x, y) is None)


def compare(
    a: FolderSource,
    b: FolderSource,
    pairs: Sequence[Pair],
    *,
    jobs: int | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[TensorDifference]:
    """Compare the pairs that `match` found, piece by piece. Raises FormatError.

    `on_bytes` is told of every byte of A that is compared, once.
    """
    names = labels([x or y for x, y in pairs])  # type: ignore[misc]
    differences = []
    with Workers(jobs) as workers:
        for label, (x, y) in zip(names, pairs, strict=True):
            difference = TensorDifference(label, "", _side(x), _side(y))
            if x is None or y is None:
                difference = replace(difference, status="only_a" if y is None else "only_b")
            elif (kind := _kind(x, y)) is not None:
                difference = replace(difference, status=kind)
            else:
                readers = a.reader(x), b.reader(y)
                equal = _equal_pieces(x, *readers, workers, on_bytes)
                difference = replace(difference, status="identical", elements=x.info.numel)
                if equal < len(x.pieces()):
                    difference = _measured(
                        difference, _gap(x, *readers, workers, on_bytes, equal), x.info.dtype
                    )
            differences.append(difference)
    return differences


def _side(tensor: SourceTensor | None) -> TensorSide | None:
    return (
        None if tensor is None else TensorSide(tensor.file, tensor.name, tensor.info.dtype, tensor.info.shape)
    )


def _equal_pieces(
    x: SourceTensor, read_a: Reader, read_b: Reader, workers: Workers, on_bytes: Callable[[int], None]
) -> int:
    """The number of equal pieces before the first different one: quick, and often all of them."""
    pieces = x.pieces()
    results = workers.map(lambda piece: np.array_equal(read_a(*piece), read_b(*piece)), pieces)
    for number, ((start, stop), same) in enumerate(zip(pieces, results, strict=True)):
        if not same:
            return number
        on_bytes(stop - start)
    return len(pieces)


def _gap(
    x: SourceTensor,
    read_a: Reader,
    read_b: Reader,
    workers: Workers,
    on_bytes: Callable[[int], None],
    equal: int,
) -> _Gap:
    """The difference of two tensors. Progress of the first `equal` pieces was reported already."""
    total, pieces = _Gap(), x.pieces()
    results = workers.map(lambda piece: _gap_of(x.info.dtype, read_a(*piece), read_b(*piece)), pieces)
    for number, ((start, stop), part) in enumerate(zip(pieces, results, strict=True)):
        total += part
        if number >= equal:
            on_bytes(stop - start)
    return total


def _gap_of(dtype: str, a: Bytes, b: Bytes) -> _Gap:
    """The difference of two pieces."""
    fmt = FORMATS.get(dtype)
    if fmt is None:
        width = DTYPE_BITS.get(dtype, 8) // 8 or 1
        return _Gap(int((a != b).reshape(-1, width).any(1).sum()))
    x, y = a.view(fmt.dtype), b.view(fmt.dtype)
    differ = x != y
    values_x, values_y = to_float64(x, fmt), to_float64(y, fmt)
    finite = np.isfinite(values_x) & np.isfinite(values_y)
    not_finite = 0
    if not finite.all():
        not_finite = int((differ & ~finite).sum())
        values_x, values_y = values_x[finite], values_y[finite]
    with np.errstate(over="ignore"):
        max_absolute = float(np.abs(values_y - values_x).max(initial=0.0))
    return _Gap(int(differ.sum()), not_finite, max_absolute, ErrorSums(*error_sums(values_x, values_y)))


def _measured(difference: TensorDifference, gap: _Gap, dtype: str) -> TensorDifference:
    """A difference with its numbers, as far as they mean something for a dtype."""
    whole = DTYPE_BITS.get(dtype, 1) % 8 == 0
    difference = replace(difference, status="different", differing=gap.differing if whole else None)
    if dtype not in FORMATS:
        return difference
    error = gap.error
    return replace(
        difference,
        not_finite=gap.not_finite,
        max_absolute=gap.max_absolute,
        max_relative=error.max_relative,
        # Compared with nothing at all, any difference is infinite.
        relative_l2=error.relative_l2 if error.original_squares or not error.squares else math.inf,
    )


def _kind(x: SourceTensor, y: SourceTensor) -> str | None:
    """The reason why two tensors cannot be compared, None if they can."""
    if x.info.dtype != y.info.dtype:
        return "dtype"
    return "shape" if x.info.shape != y.info.shape else None
