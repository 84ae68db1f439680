"""A plan: for every tensor of a checkpoint how it will be stored, before anything is written."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

import numpy as np

from neuzip.errors import NeuzipError
from neuzip.formats.checkpoint import adapter_files, config_files, index_files
from neuzip.formats.container import header_room, streams_of
from neuzip.formats.manifest import Manifest, TensorRecord
from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, Bits, census, non_finite

from . import lossless, truncated
from .lossless import Read
from .scheme import LINEAR_WEIGHTS, LOSSLESS, RAW, TERNARY_DTYPES, Rule, Scheme, choose
from .source import SourceTensor, TensorSource, digest
from .workers import Workers

CODED_MINIMUM = 4096
"""Bytes from which on coding can pay."""

POOL_LEAST = 1024
POOL_SHARE = 100
RECORD_BYTES = 180
"""Small tensors are pooled from so many on, where what is recorded of them is 1 % of the file or more."""

ALIAS_MINIMUM = 4096
"""Bytes from which on equal tensors are stored once."""

LARGEST_CONFIG = 1 << 20
"""Bytes of a config.json that is read."""

TERNARY_SAMPLE = 4096
"""Weights of a row that a first look for ternary values takes in."""

KEEP_ALL = "keep them all"
"""How a note ends that says why a tensor is not rounded although a rule rounds it."""

SAMPLED_BLOCKS = 12
"""Blocks of a tensor that a prediction looks at."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor and its scheme. `note` says why it is another than the rules asked for.

    `alias_of` is the earlier tensor with the same bytes, if there is one; `predicted` its stored size in
    bytes, if that was asked for. `is_adapter` is true of what peft reads under its name, with its bytes.
    """

    tensor: SourceTensor
    scheme: Scheme
    note: str = ""
    alias_of: SourceTensor | None = None
    predicted: int | None = None
    is_adapter: bool = False


@dataclass(frozen=True)
class Plan:
    """The rules and what they come to.

    Byte counts are of all files, or of the weight files alone; predicted ones are of the result.
    """

    rules: tuple[Rule, ...]
    tensors: tuple[PlannedTensor, ...]
    original_bytes: int
    weight_bytes: int
    predicted_bytes: int | None = None
    predicted_weight_bytes: int | None = None

    @property
    def weights(self) -> int:
        """Number of elements of all tensors."""
        return sum(t.tensor.info.numel for t in self.tensors)

    def of_file(self, file: str) -> list[PlannedTensor]:
        """The tensors of one weight file, in file order."""
        return [t for t in self.tensors if t.tensor.file == file]


def rounds_nothing(planned: Iterable[PlannedTensor]) -> bool | None:
    """Whether no scheme rounds; None where only the run tells, as of ternary ones."""
    schemes = [t.scheme for t in planned if t.alias_of is None]
    if any(scheme.mantissa_bits is not None for scheme in schemes):
        return False
    return None if any(scheme.kind == "ternary" for scheme in schemes) else True


def coded_streams(planned: Iterable[PlannedTensor]) -> dict[str, list[str]]:
    """The streams that tensors of one file may get."""
    return {
        t.tensor.name: streams_of("lossless", t.scheme.block_size)  # their names are the longest
        for t in planned
        if t.scheme.kind != "raw" and t.alias_of is None
    }


def pooled_tensors(planned: Sequence[PlannedTensor], *, delta: bool = False) -> frozenset[str]:
    """The tensors of one file whose entries and records would take more than they are worth.

    They are small ones that are stored as they are, where there are so many that it shows in the file's size.
    In a delta there are none, and none of an adapter.
    """
    small = [
        t.tensor for t in planned
        if t.scheme.kind == "raw" and t.alias_of is None and t.tensor.info.nbytes < CODED_MINIMUM
        and not t.is_adapter
    ]  # fmt: skip
    total = sum(t.tensor.info.nbytes for t in planned)
    worthwhile = len(small) >= POOL_LEAST and POOL_SHARE * len(small) * RECORD_BYTES >= total
    return frozenset(t.name for t in small) if worthwhile and not delta else frozenset()


def make_plan(
    source: TensorSource,
    rules: Sequence[Rule],
    workers: Workers,
    predict: bool = False,
    allow_destructive: bool = False,
) -> Plan:
    """Choose a scheme for every tensor, find equal ones, and perhaps predict sizes from samples.

    Raises NeuzipError for ternary schemes of weights that are not ternary, unless `allow_destructive`.
    """
    planned = choose_schemes(source, rules)
    if not allow_destructive:
        refuse_destruction(source, planned, workers)
    planned = _find_aliases(source, planned)
    checkpoint = source.checkpoint
    sizes = {f: source.file_bytes(f) for f in (*checkpoint.weights, *checkpoint.others)}
    whole, weights = sum(sizes.values()), sum(sizes[f] for f in checkpoint.weights)
    if not predict:
        return Plan(tuple(rules), tuple(planned), whole, weights)
    planned = list(workers.map(lambda t: _predict(source, t), planned))
    rewritten = sum(sizes[f] for f in (*index_files(checkpoint), *config_files(checkpoint)))
    others = sum(sizes[f] for f in checkpoint.others) + 2 * rewritten
    stored = sum(
        _predict_file(source, file, [t for t in planned if t.tensor.file == file])
        for file in checkpoint.weights
    )
    return Plan(tuple(rules), tuple(planned), whole, weights, others + stored, stored)


def choose_schemes(source: TensorSource, rules: Sequence[Rule]) -> list[PlannedTensor]:
    """The schemes that follow from names, dtypes and shapes alone. Raises NeuzipError."""
    require_matches(rules, [tensor.name for tensor in source.tensors()])
    chosen = [(t, choose(rules, t.name, len(t.info.shape))) for t in source.tensors()]
    _refuse_packed(source, [t for t, scheme in chosen if scheme.kind == "ternary"])
    adapters = frozenset(adapter_files(source.checkpoint))
    return [_kept(t) if t.file in adapters else _apply(t, scheme) for t, scheme in chosen]


def require_matches(rules: Sequence[Rule], names: Sequence[str]) -> None:
    """Raise NeuzipError for a rule that no tensor's name matches: most likely a slip of the pen."""
    for rule in rules:
        if rule.match != "*" and not any(fnmatchcase(name, rule.match) for name in names):
            hint = "neuzip inspect SRC lists the names; correct the glob or leave it out"
            if rule.match == LINEAR_WEIGHTS and rule.scheme.kind == "ternary":
                hint = 'name the linear layers in a `plan`, in rules with scheme = "ternary"'
            raise NeuzipError(f"no tensor is called anything like {rule.match!r}", hint)


def _kept(tensor: SourceTensor) -> PlannedTensor:
    """An adapter's tensor as it is: peft, which opens the file itself, would go on without one it misses."""
    return PlannedTensor(tensor, RAW, "peft reads adapters itself", is_adapter=True)


def _apply(tensor: SourceTensor, scheme: Scheme) -> PlannedTensor:
    """What a scheme comes to for a tensor's dtype."""
    fmt = FORMATS.get(tensor.info.dtype)
    if scheme.kind == "raw":
        return PlannedTensor(tensor, scheme)
    if fmt is None:
        return PlannedTensor(tensor, RAW, f"{tensor.info.dtype} has no exponent to code")
    if tensor.info.nbytes < CODED_MINIMUM:
        return PlannedTensor(tensor, RAW, "too small to shrink")
    if scheme.kind == "ternary" and (tensor.info.dtype not in TERNARY_DTYPES or not tensor.info.shape):
        return PlannedTensor(tensor, LOSSLESS, f"{tensor.info.dtype} has no ternary form")
    if scheme.mantissa_bits is not None and scheme.mantissa_bits >= fmt.mantissa_bits:
        note = f"{fmt.name} has {fmt.mantissa_bits} mantissa bits, and {scheme.mantissa_bits} {KEEP_ALL}"
        return PlannedTensor(tensor, LOSSLESS, note)
    if scheme.block_size is not None and not truncated.normalisable(fmt):
        return PlannedTensor(tensor, replace(scheme, block_size=None), f"{fmt.name} takes no normaliser")
    return PlannedTensor(tensor, scheme)


def may_be_ternary(read: Read, shape: Sequence[int], group: int | None = None) -> bool:
    """Whether weights of one group in three rows of a tensor are all -s, 0 and s: then it may be ternary.

    `read` gives bit patterns, of a dtype of TERNARY_DTYPES. Without a `group` a row has one scale.
    """
    columns = shape[-1] if shape else 0
    numel = math.prod(shape)
    if numel == 0:
        return False
    rows = numel // columns
    for row in {0, rows // 2, rows - 1}:
        bits = read(row * columns, row * columns + min(columns, group or columns, TERNARY_SAMPLE))
        magnitudes = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
        if np.unique(magnitudes[magnitudes > 0]).size > 1:
            return False
    return True


def try_ternary(tensor: SourceTensor, scheme: Scheme, read: Read) -> bool:
    """Whether a matrix that is to be lossless may take less as codes and scales."""
    return (
        scheme.kind == "lossless"
        and tensor.info.dtype in TERNARY_DTYPES
        and len(tensor.info.shape) > 1
        and may_be_ternary(read, tensor.info.shape)
    )


def refuse_destruction(source: TensorSource, planned: Iterable[PlannedTensor], workers: Workers) -> None:
    """Raise NeuzipError if a tensor that is to be ternary has other values than -s, 0 and s."""
    online = online_config(source)
    fitting = Scheme("ternary", quantizer="absmean-clamped")
    asked = [
        t
        for t in planned
        if t.scheme.kind == "ternary"
        and not (
            online is not None
            and (t.scheme.quantizer, t.scheme.group) == (fitting.quantizer, fitting.group)
            and bitnet_converts(t.tensor.name, online)
        )
    ]
    promising = list(workers.map(lambda t: _may_be_ternary(source, t), asked))
    # One at a time: now whole tensors are read.
    names = [
        t.tensor.name
        for t, may_be in zip(asked, promising, strict=True)
        if not (may_be and _is_ternary(source, t))
    ]
    if names:
        if online is not None and all(bitnet_converts(name, online) for name in names):
            raise NeuzipError(
                f"{source.checkpoint.path}: config.json says bitnet, online: it was trained for one scale a "
                "tensor, the clamped absmean",
                "give `ternary_quantizer='absmean-clamped'`, and no group",
            )
        raise NeuzipError(
            f"{source.checkpoint.path}: {len(names)} of {len(asked)} tensors that are to be ternary have "
            f"other values than -s, 0 and s, {names[0]!r} first; rounding them destroys a model that was not "
            "trained for it: in a third-party audit perplexity on WikiText went from 13.9 to 3.8e6",
            "leave them lossless, or give `allow_destructive=True` to do it all the same",
        )


def bitnet_converts(name: str, how: Mapping[str, Any]) -> bool:
    """Whether transformers' bitnet makes a tensor ternary, as its should_convert_module says.

    `how` is the quantization_config. Raises NeuzipError for what is no regular expression.
    """
    module, _, kind = name.rpartition(".")
    kept = how.get("modules_to_not_convert")
    kept = [k for k in kept if isinstance(k, str)] if isinstance(kept, list) else ["lm_head"]
    try:
        return kind == "weight" and not any(
            module.endswith(k) or re.match(rf"(?:{k})(?:(?<=\.)|(?=\.|$))", module) for k in kept
        )
    except re.error as error:
        raise NeuzipError(f"config.json: modules_to_not_convert: {error}", "correct it") from error


def _refuse_packed(source: TensorSource, asked: Iterable[SourceTensor]) -> None:
    """Raise NeuzipError for a tensor that is to be ternary and holds packed codes already."""
    names = {t.name for t in source.tensors()}
    for tensor in asked:
        if tensor.info.dtype == "U8" and f"{tensor.name}_scale" in names:
            raise NeuzipError(
                f"{source.checkpoint.path}: {tensor.name!r} holds ternary weights packed for transformers' "
                f"bitnet (U8, beside {tensor.name}_scale) already, 2 bits each",
                "leave out `ternary`: then they stay as they are, and everything else is compressed",
            )


def online_config(source: TensorSource) -> dict[str, Any] | None:
    """The quantization_config that has transformers make weights ternary in every forward pass, or None."""
    how = config_of(source).get("quantization_config")
    return how if is_online(how) else None


def config_of(source: TensorSource) -> dict[str, Any]:
    """The config.json of a checkpoint; {} where there is none to read, of which whoever needs it says so."""
    path = source.checkpoint.root / "config.json"
    if "config.json" not in source.checkpoint.others or path.stat().st_size > LARGEST_CONFIG:
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_online(how: object) -> TypeGuard[dict[str, Any]]:
    """Whether a quantization_config says that transformers' bitnet rounds floats in every forward pass."""
    wanted = {"quant_method": "bitnet", "quantization_mode": "online"}
    return isinstance(how, dict) and wanted.items() <= how.items()


def _patterns(source: TensorSource, tensor: SourceTensor) -> Read:
    fmt, reader = FORMATS[tensor.info.dtype], source.reader(tensor)
    size = fmt.bits // 8
    return lambda start, stop: reader(start * size, stop * size).view(fmt.dtype)


def _may_be_ternary(source: TensorSource, planned: PlannedTensor) -> bool:
    group = planned.scheme.group
    read = _patterns(source, planned.tensor)
    return may_be_ternary(read, planned.tensor.info.shape, group if isinstance(group, int) else None)


def _is_ternary(source: TensorSource, planned: PlannedTensor) -> bool:
    """Whether all values of a tensor are -s, 0 and s already, s being the tensor's, a row's or a group's."""
    from . import ternary  # loads torch

    info = planned.tensor.info
    bits = _patterns(source, planned.tensor)(0, info.numel)
    weight = ternary.as_tensor(bits, FORMATS[info.dtype], info.shape)
    return ternary.find_exact(weight, ternary.Layout.of_scheme(info.shape, planned.scheme).group) is not None


def _find_aliases(source: TensorSource, planned: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """Mark tensors with the same bytes as an earlier one of the same folder, dtype, shape and scheme.

    Only tensors whose samples agree are read whole, each of them once or twice however many they are.
    """
    planned = list(planned)
    alike: dict[object, list[int]] = defaultdict(list)
    for i, t in enumerate(planned):
        info = t.tensor.info
        if info.nbytes >= ALIAS_MINIMUM and not t.is_adapter:
            folder = t.tensor.file[: t.tensor.file.rfind("/") + 1]
            middle = info.nbytes // 2 // 64 * 64
            read = source.reader(t.tensor)
            sample = b"".join(read(at, at + 64).tobytes() for at in (0, middle, info.nbytes - 64))
            alike[folder, info.dtype, info.shape, t.scheme, sample].append(i)
    for group in (g for g in alike.values() if len(g) > 1):
        firsts: dict[str, SourceTensor] = {}
        for i in group:
            tensor = planned[i].tensor
            first = firsts.setdefault(digest(source.reader(tensor), tensor.info.nbytes), tensor)
            if first is not tensor and _equal(source, tensor, first):
                planned[i] = replace(planned[i], alias_of=first)
    return planned


def _equal(source: TensorSource, a: SourceTensor, b: SourceTensor) -> bool:
    read_a, read_b = source.reader(a), source.reader(b)
    return all(np.array_equal(read_a(*piece), read_b(*piece)) for piece in a.pieces())


def _predict(source: TensorSource, planned: PlannedTensor) -> PlannedTensor:
    """Add the stored size, extrapolated from a few blocks spread over the tensor."""
    info = planned.tensor.info
    if planned.alias_of is not None or planned.scheme.kind == "raw" or info.numel == 0:
        return replace(planned, predicted=0 if planned.alias_of is not None else info.nbytes)
    if planned.scheme.kind == "ternary":
        return replace(planned, predicted=min(_ternary_bytes(planned), info.nbytes))
    fmt = FORMATS[info.dtype]
    blocks = -(-info.numel // rans.BLOCK)
    chosen = np.unique(np.linspace(0, blocks - 1, min(SAMPLED_BLOCKS, blocks)).astype(int))
    size = fmt.bits // 8
    sample: Bits = np.concatenate(
        [
            source.read(planned.tensor, b * rans.BLOCK * size, min((b + 1) * rans.BLOCK, info.numel) * size)
            for b in map(int, chosen)
        ]
    ).view(fmt.dtype)
    normalisers = 0
    if planned.scheme.mantissa_bits is not None and not non_finite(sample, fmt).any():
        block_size = planned.scheme.block_size
        rounding = truncated.Rounding(fmt, planned.scheme.mantissa_bits, block_size)
        sample, _ = rounding.apply(sample)
        normalisers = truncated.normaliser_bytes(info.numel, block_size)
    predicted = lossless.expected_bytes(census(sample, fmt), info.numel, fmt) + normalisers
    if try_ternary(planned.tensor, planned.scheme, _patterns(source, planned.tensor)):
        predicted = min(predicted, _ternary_bytes(planned))
    return replace(planned, predicted=min(predicted, info.nbytes))


def _ternary_bytes(planned: PlannedTensor) -> int:
    """What codes and scales take."""
    from . import ternary  # loads torch

    layout = ternary.Layout.of_scheme(planned.tensor.info.shape, planned.scheme)
    return sum(map(lossless.padded, layout.stream_bytes.values()))


def _predict_file(source: TensorSource, file: str, planned: list[PlannedTensor]) -> int:
    """The size of a container: tensors, names and records."""
    header = source.header(file)
    zeros = "0" * 16
    streams = dict.fromkeys(streams_of("lossless"), zeros)
    pooled = pooled_tensors(planned)
    records = {
        t.tensor.name: TensorRecord("raw", zeros)
        if t.scheme.kind == "raw"
        else TensorRecord("lossless", zeros, streams=streams)
        for t in planned
        if t.tensor.name not in pooled
    }
    manifest = Manifest(zeros, records, bool(pooled)).to_bytes()
    return (
        header_room(header, coded_streams(planned), pooled)
        + len(header.raw)
        + len(manifest)
        + 8 * len(pooled)
        + sum(t.predicted or 0 for t in planned)
    )
