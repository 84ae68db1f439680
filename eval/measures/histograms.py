"""What weights are made of: histograms of sign, exponent and mantissa, and their entropies.

Everything is counted, nothing sampled. The leading 16 bits of a weight are counted whole (65,536 counters; an
fp8 has 8 and 256), so for formats of up to 16 bits every figure is exact. Of a wider format that leaves
mantissa bits over, which are counted byte by byte:

    F32    s eeeeeeee mmmmmmm | mmmmmmmm mmmmmmmm
    F64    s eeeeeeeeeee mmmm | mmmmmmmm mmmmmmmm mmmmmmmm mmmmmmmm mmmmmmmm mmmmmmmm

Their mantissa entropy is the sum over these parts, an upper bound: it would be exact were the parts
independent. The entropy of a whole F32 or F64 weight is not given.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from neuzip.compress import Rule, make_plan
from neuzip.compress.globs import matches
from neuzip.compress.rules import LOSSLESS, RAW
from neuzip.compress.schemes import codec_of, describe
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers, default_jobs
from neuzip.errors import NeuzipError
from neuzip.eval.measures.code_figures import CodeFigures, code_figures
from neuzip.eval.measures.entropies import Histogram, entropy
from neuzip.eval.measures.rates import RatePrediction, rates_of
from neuzip.formats.records import Loss
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat

if TYPE_CHECKING:
    from neuzip.compress.gpu import Gpu

TOP_BITS = 16
"""Leading bits of a weight that are counted together."""


def bias(fmt: FloatFormat) -> int:
    """The bias that is subtracted from a stored exponent.

    >>> bias(FORMATS["BF16"]), bias(FORMATS["F8_E4M3FNUZ"])
    (127, 8)
    """
    return (1 << (fmt.exponent_bits - 1)) - (0 if fmt.name.endswith("FNUZ") else 1)


@dataclass(frozen=True)
class Entropies:
    """Bits a weight of the fields, and of the whole weight (`joint`, None for more than 16 bits).

    `mantissa` is an upper bound for formats of more than 16 bits.
    """

    sign: float
    exponent: float
    mantissa: float
    joint: float | None


@dataclass(frozen=True)
class Counts:
    """Counts of the bit patterns of weights.

    `top` counts the leading 16 (or all 8) bits, int64 [65536] or [256]; `rest` the bytes after them, int64
    [bytes, 256]. Counts of the parts of a tensor add up.
    """

    fmt: FloatFormat
    top: Histogram
    rest: Histogram

    @classmethod
    def of(cls, bits: Bits, fmt: FloatFormat) -> Counts:
        """Count patterns: one-dimensional, little-endian, of the format's dtype."""
        rows = bits.view(np.uint8).reshape(bits.size, fmt.bits // 8)
        step = fmt.bits // TOP_BITS
        top = bits if step <= 1 else bits.view("<u2")[step - 1 :: step]
        rest = [np.bincount(rows[:, i], minlength=256) for i in reversed(range(fmt.bits // 8 - 2))]
        return cls(
            fmt,
            np.bincount(top, minlength=1 << min(fmt.bits, TOP_BITS)),
            np.array(rest, np.int64).reshape(-1, 256),
        )

    @classmethod
    def on(cls, gpu: Gpu, bits: Bits, fmt: FloatFormat) -> Counts:
        """Counts of the bit patterns of weights, counted on a GPU."""
        import torch

        def count(data: torch.Tensor) -> torch.Tensor:
            rows = data.view(bits.size, -1)
            top = rows[:, -1].int()
            if fmt.bits > 8:
                top = (top << 8) + rows[:, -2]
            rest = [torch.bincount(rows[:, i], minlength=256) for i in reversed(range(fmt.bits // 8 - 2))]
            return torch.cat([torch.bincount(top, minlength=1 << min(fmt.bits, TOP_BITS)), *rest])

        counts = gpu.compute(bits, count)
        size = 1 << min(fmt.bits, TOP_BITS)
        return cls(fmt, counts[:size].copy(), counts[size:].reshape(-1, 256).copy())

    @classmethod
    def none(cls, fmt: FloatFormat) -> Counts:
        """The counts of no weights."""
        return cls.of(np.empty(0, fmt.dtype), fmt)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.fmt, self.top + other.top, self.rest + other.rest)

    @property
    def numel(self) -> int:
        """The number of weights."""
        return int(self.top.sum())

    @property
    def signs(self) -> Histogram:
        """Weights without and with the sign bit: [2]."""
        return self._margin(1, 2)

    @property
    def exponents(self) -> Histogram:
        """Weights by stored exponent: [2 ** exponent bits]."""
        return self._margin(0, 2)

    @property
    def mantissas(self) -> Histogram:
        """Weights by the leading mantissa bits, all of them in formats of up to 16 bits."""
        return self._margin(0, 1)

    def _margin(self, *axes: int) -> Histogram:
        return np.asarray(self.top.reshape(2, 1 << self.fmt.exponent_bits, -1).sum(axes))

    @property
    def used_mantissa_bits(self) -> int:
        """Leading mantissa bits that any weight uses: 7 of 23 for fp32 that was bf16 once."""
        used = before = 0
        for part in (self.mantissas, *self.rest):
            width = part.size.bit_length() - 1
            union = int(np.bitwise_or.reduce(np.flatnonzero(part), initial=0))
            if union:
                used = before + width - ((union & -union).bit_length() - 1)
            before += width
        return used

    @functools.cached_property
    def entropies(self) -> Entropies:
        """The entropies of the fields and of the whole weight."""
        return Entropies(
            entropy(self.signs),
            entropy(self.exponents),
            sum(map(entropy, self.rest), entropy(self.mantissas)),
            entropy(self.top) if self.fmt.bits <= TOP_BITS else None,
        )

    @property
    def zeros(self) -> int | None:
        """The number of zeros of either sign; None for weights of more than 16 bits."""
        return int(self.top.reshape(2, -1)[:, 0].sum()) if self.fmt.bits <= TOP_BITS else None

    @property
    def ternary_bits(self) -> float:
        """Bits a weight of ternary codes that are coded perfectly: weights are negative, 0, or positive."""
        zeros = self.top.reshape(2, -1)[:, 0]
        return entropy(np.array([zeros.sum(), *(self.signs - zeros)]))

    @property
    def bound_bits(self) -> float:
        """Bits a weight when exponents are coded perfectly, sign and used mantissa bits as they are."""
        return self.entropies.exponent + 1 + self.used_mantissa_bits


@dataclass(frozen=True)
class TensorFigures:
    """One tensor. `label` is its name for people: with its folder, and nothing that steers a terminal.

    `stored_bytes` is what it takes in a container, predicted for a plain checkpoint. Without entropies: a
    tensor that is empty or no float. `bound_bytes` is the Shannon bound of the exponent split, the whole size
    of a tensor that is no float, 0 where another tensor holds the bytes, that of the codes where they are
    ternary or quantized, and None behind a block normaliser: there the weights are not what is coded.
    `codes` are those of a quantized tensor.
    """

    label: str
    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored_bytes: int
    scheme: str
    loss: Loss | None
    entropies: Entropies | None
    used_mantissa_bits: int | None
    bound_bytes: int | None
    codes: CodeFigures | None

    def to_json(self) -> dict[str, Any]:
        """The fields, the label excepted; sizes are called as `compress` calls them."""
        values = {key: value for key, value in asdict(self).items() if key != "label"}
        fields = {"original_bytes" if key == "nbytes" else key: value for key, value in values.items()}
        return {**fields, "base": None}

    @property
    def max_error(self) -> float | None:
        """The largest error of a weight, relative to it; None where small weights become 0."""
        return None if self.loss is None or self.l2_error is not None else self.loss.max_relative

    @property
    def l2_error(self) -> float | None:
        """The error of the whole tensor in the L2 norm, relative to it; of quantized and ternary ones."""
        return None if self.loss is None else self.loss.relative_l2

    @property
    def before_bytes(self) -> int:
        """The bytes that the ratio compares."""
        return self.nbytes

    @property
    def after_bytes(self) -> int:
        """The bytes into which `before_bytes` are compressed."""
        return self.stored_bytes

    @property
    def short_scheme(self) -> str:
        """The scheme for a column of a table: of ternary tensors what shares a scale, not its quantizer."""
        match = re.fullmatch(r"ternary \S+?(?: group=(\d+))?(?:, lossless)?", self.scheme)
        if match is None:
            return self.scheme
        return "ternary, one scale" if match[1] is None else f"ternary, groups of {match[1]}"


@dataclass(frozen=True)
class Inspection:
    """The inspected tensors, and their histograms (`counts`) by dtype, the most frequent dtype first.

    `weight_bytes` and `stored_weight_bytes` are the sizes of the weight files before and after compression,
    headers included. For a plain checkpoint, `stored_weight_bytes` is predicted. If only some tensors were
    inspected, both are None. `rates` are predictions of what a plain checkpoint, or the inspected tensors of
    it, would take and lose if matrices were quantised; a compressed one has none.
    """

    compressed: bool
    tensors: tuple[TensorFigures, ...]
    counts: tuple[Counts, ...]
    weight_bytes: int | None = None
    stored_weight_bytes: int | None = None
    rates: tuple[RatePrediction, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements of all tensors, of any dtype."""
        return sum(math.prod(t.shape) for t in self.tensors)

    @property
    def before_bytes(self) -> int:
        """Size before compression: of the weight files, or of the tensors if only some were inspected."""
        return self.nbytes if self.weight_bytes is None else self.weight_bytes

    @property
    def after_bytes(self) -> int:
        """Size after compression of what `before_bytes` counts."""
        return self.stored_bytes if self.stored_weight_bytes is None else self.stored_weight_bytes

    @property
    def weights(self) -> int:
        """Number of elements of all float tensors."""
        return sum(c.numel for c in self.counts)

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Stored size of all tensors, predicted for a plain checkpoint."""
        return sum(t.stored_bytes for t in self.tensors)

    @property
    def bound_bytes(self) -> int | None:
        """Sum of the entropy bounds of all tensors; None if a tensor has no bound."""
        bounds = [t.bound_bytes for t in self.tensors]
        return sum(b for b in bounds if b is not None) if None not in bounds else None

    @property
    def lossy(self) -> bool:
        """Whether any tensor was rounded."""
        return any(t.loss is not None for t in self.tensors)

    @property
    def rounded(self) -> bool:
        """Whether any tensor has a largest relative error."""
        return any(t.max_error is not None for t in self.tensors)

    @property
    def has_norms(self) -> bool:
        """Whether any tensor has an error in the L2 norm."""
        return any(t.l2_error is not None for t in self.tensors)

    @property
    def quantized(self) -> bool:
        """Whether any tensor is stored as codes of a grid."""
        return any(t.codes is not None for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, histograms included."""
        stored, weights = self.stored_weight_bytes, self.elements
        return {
            "compressed": self.compressed,
            "weight_bytes": self.weight_bytes,
            "stored_weight_bytes": stored,
            "weights": weights,
            "ratio": stored / self.weight_bytes if stored is not None and self.weight_bytes else None,
            "bits_per_weight": 8 * stored / weights if stored is not None and weights else None,
            "tensors": [t.to_json() for t in self.tensors],
            "totals": {
                "tensors": len(self.tensors),
                "original_bytes": self.nbytes,
                "stored_bytes": self.stored_bytes,
                "bound_bytes": self.bound_bytes,
            },
            "rates": [rate.to_json(self.before_bytes) for rate in self.rates],
            "histograms": [
                {
                    "dtype": c.fmt.name,
                    "weights": c.numel,
                    "entropies": asdict(c.entropies),
                    "used_mantissa_bits": c.used_mantissa_bits,
                    "exponent_bias": bias(c.fmt),
                    "signs": c.signs.tolist(),
                    "exponents": c.exponents.tolist(),
                    "leading_mantissa_bits": c.mantissas.size.bit_length() - 1,
                    "mantissas": c.mantissas.tolist(),
                }
                for c in self.counts
            ],
        }


def select(source: FolderSource, globs: Sequence[str] = ()) -> list[SourceTensor]:
    """The tensors whose name matches any of `globs`; without globs, all. Raises NeuzipError for no match."""
    tensors = list(source.tensors())
    if not globs:
        return tensors
    chosen = [t for t in tensors if any(matches(n, g) for g in globs for n in (t.name, _place(t)))]
    if not chosen:
        raise NeuzipError(
            f"{source.checkpoint.path}: no tensor matches {' or '.join(globs)}",
            "leave out `tensor` to see all names",
        )
    return chosen


def inspect(
    source: FolderSource,
    tensors: Sequence[SourceTensor],
    *,
    jobs: int | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Inspection:
    """Count the weights of some tensors of a checkpoint, piece by piece, on its device. Raises FormatError.

    `on_bytes` is told of every byte of the tensors once.
    """
    totals: dict[str, Counts] = {}
    with Workers(jobs or source.device.jobs(default_jobs())) as workers:
        storage, sizes = (
            _actual_storage(source) if source.is_compressed else _predicted_storage(source, workers)
        )
        stored = {key: storage[key][0] for key in ((t.file, t.name) for t in tensors)}
        total = sizes[1] if len(stored) == len(storage) else sum(stored.values())
        rates = () if source.is_compressed else rates_of(source, tensors, stored, total, workers)
        figures = []
        for tensor, label in zip(tensors, labels(tensors), strict=True):
            counts = _count(source, tensor, workers, on_bytes)
            if counts is not None:
                dtype = tensor.info.dtype
                totals[dtype] = totals[dtype] + counts if dtype in totals else counts
            codes = code_figures(source, tensor, workers)
            figures.append(_figures(source, tensor, label, counts, codes, *storage[tensor.file, tensor.name]))
    by_weight = sorted(totals.values(), key=lambda c: (-c.numel, c.fmt.name))
    before, after = sizes if len(figures) == len(storage) else (None, None)
    return Inspection(source.is_compressed, tuple(figures), tuple(by_weight), before, after, rates)


def labels(tensors: Iterable[SourceTensor]) -> list[str]:
    """Names for people: with the folder, or the file where a folder has two of a name, and escaped."""
    tensors = list(tensors)
    seen = Counter(_place(t) for t in tensors)
    return [visible(_place(t) if seen[_place(t)] == 1 else f"{t.file}/{t.name}") for t in tensors]


def visible(text: str) -> str:
    r"""Escape everything that is not a printable character, line breaks and lone surrogates included.

    >>> visible("a\nb")
    'a\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _place(tensor: SourceTensor) -> str:
    """A tensor's name within the checkpoint: that of its folder, and its own."""
    return tensor.file[: tensor.file.rfind("/") + 1] + tensor.name


def _count(
    source: FolderSource, tensor: SourceTensor, workers: Workers, on_bytes: Callable[[int], None]
) -> Counts | None:
    """The counts of a tensor; None for one without floats."""
    fmt = FORMATS.get(tensor.info.dtype)
    if fmt is None or tensor.info.numel == 0:
        on_bytes(tensor.info.nbytes)
        return None
    source.check_streams(source.resolve(tensor))
    read = source.reader(tensor)
    total = Counts.none(fmt)
    gpu = source.device.gpu_for(tensor.info.numel)

    def count(piece: tuple[int, int]) -> Counts:
        bits = read(*piece).view(fmt.dtype)
        return Counts.of(bits, fmt) if gpu is None else Counts.on(gpu, bits, fmt)

    for part in workers.map(count, tensor.pieces(source.device)):
        total += part
        on_bytes(part.numel * fmt.bits // 8)
    return total


def _figures(
    source: FolderSource,
    tensor: SourceTensor,
    label: str,
    counts: Counts | None,
    codes: CodeFigures | None,
    stored_bytes: int,
    scheme: str,
) -> TensorFigures:
    info, record = tensor.info, source.resolve(tensor).record
    kind = "fields" if record is None else codec_of(record).bound(record)
    if stored_bytes == 0:
        bound: int | None = 0
    elif kind is None:
        bound = None
    elif counts is None:
        bound = info.nbytes
    else:
        of_codes = counts.ternary_bits if codes is None else codes.entropy
        bits = {"fields": counts.bound_bits, "codes": of_codes}[kind]
        bound = math.ceil(bits * counts.numel / 8)
    return TensorFigures(
        label, tensor.file, tensor.name, info.dtype, info.shape, info.nbytes, stored_bytes, scheme,
        record.loss if record is not None else None,
        counts.entropies if counts is not None else None,
        counts.used_mantissa_bits if counts is not None else None,
        bound, codes,
    )  # fmt: skip


Storage = dict[tuple[str, str], tuple[int, str]]
"""Stored bytes and scheme of each tensor, by file and name."""


def _actual_storage(source: FolderSource) -> tuple[Storage, tuple[int, int]]:
    """The storage of each tensor of a compressed checkpoint, and bytes of weight files before and after."""
    storage: Storage = {}
    for t in source.tensors():
        scheme = "plain" if t.record is None else describe(t.record, t.info.dtype)
        storage[t.file, t.name] = source.stored_bytes(t), scheme
    headers = map(source.header, source.checkpoint.weights)
    before = sum(len(header.raw) + header.data_bytes for header in headers)
    return storage, (before, sum(path.stat().st_size for path in source.checkpoint.weight_paths()))


def _predicted_storage(source: FolderSource, workers: Workers) -> tuple[Storage, tuple[int, int]]:
    """The predicted storage of each tensor of a plain checkpoint, and bytes before and after."""
    storage: Storage = {}
    plan = make_plan(source, [Rule("*", LOSSLESS)], workers, predict=True)
    for planned in plan.tensors:
        t, size = planned.tensor, planned.predicted or 0
        if planned.alias_of is not None:
            scheme = f"same as {planned.alias_of.name}"
        else:
            scheme = str(RAW if size == t.info.nbytes else planned.scheme)
        storage[t.file, t.name] = size, scheme
    return storage, (plan.weight_bytes, plan.predicted_weight_bytes or 0)
