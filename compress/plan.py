"""A plan: for every tensor of a checkpoint how it will be stored, before anything is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from neuzip.errors import NeuzipError
from neuzip.formats.checkpoint import adapter_files, config_files, index_files
from neuzip.formats.container import header_room
from neuzip.formats.manifest import Manifest
from neuzip.formats.records import LosslessRecord, RawRecord

from .globs import matches
from .pieces import digest
from .rules import Rule, choose
from .scheme import Scheme
from .schemes import CODECS, Codec, codec_for
from .schemes.codec import TensorInput
from .schemes.raw import CODED_MINIMUM, RAW
from .sources.source import SourceTensor, TensorSource
from .workers import Workers

POOL_LEAST = 1024
POOL_SHARE = 100
RECORD_BYTES = 180
"""Small tensors are pooled from so many on, where what is recorded of them is 1 % of the file or more."""

ALIAS_MINIMUM = 4096
"""Bytes from which on equal tensors are stored once."""

OF_ADAPTERS = "peft reads adapters itself"
"""Why an adapter's tensors stay as they are: peft opens the file, and would go on without one it misses."""


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

    @property
    def is_raw(self) -> bool:
        """Whether the tensor is stored as it is."""
        return not codec_for(self.scheme).record.STREAMS


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
    rounds = {codec_for(t.scheme).rounds for t in planned if t.alias_of is None}
    if True in rounds:
        return False
    return None if None in rounds else True


def coded_streams(planned: Iterable[PlannedTensor]) -> dict[str, list[Sequence[str]]]:
    """The streams that tensors of one file may get, for the room that the container's header needs."""
    return {
        t.tensor.name: codec_for(t.scheme).forms(t.tensor.info, t.scheme)
        for t in planned
        if not t.is_raw and t.alias_of is None
    }


def pooled_tensors(planned: Sequence[PlannedTensor], *, delta: bool = False) -> frozenset[str]:
    """The tensors of one file whose entries and records would take more than they are worth.

    They are small ones that are stored as they are, where there are so many that it shows in the file's size.
    In a delta there are none, and none of an adapter.
    """
    small = [
        t.tensor for t in planned
        if t.is_raw and t.alias_of is None and t.tensor.info.nbytes < CODED_MINIMUM
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
    for codec in CODECS.values():
        codec.require_possible(source, [t for t, scheme in chosen if codec_for(scheme) is codec])
    adapters = frozenset(adapter_files(source.checkpoint))
    return [
        PlannedTensor(t, RAW, OF_ADAPTERS, is_adapter=True)
        if t.file in adapters
        else PlannedTensor(t, *codec_for(scheme).applies(t.info, scheme))
        for t, scheme in chosen
    ]


def require_matches(rules: Sequence[Rule], names: Sequence[str]) -> None:
    """Raise NeuzipError for a rule that no tensor's name matches: most likely a slip of the pen."""
    for rule in rules:
        if rule.match != "*" and not any(matches(name, rule.match) for name in names):
            usual = "neuzip inspect SRC lists the names; correct the glob or leave it out"
            hint = codec_for(rule.scheme).hint_without_match(rule.match) or usual
            raise NeuzipError(f"no tensor is called anything like {rule.match!r}", hint)


def refuse_destruction(source: TensorSource, planned: Iterable[PlannedTensor], workers: Workers) -> None:
    """Raise NeuzipError if a scheme would destroy the model: rounding to -s, 0 and s does."""
    by_codec: dict[Codec[Any], list[tuple[SourceTensor, Scheme]]] = defaultdict(list)
    for t in planned:
        by_codec[codec_for(t.scheme)].append((t.tensor, t.scheme))
    for codec, tensors in by_codec.items():
        codec.refuse_destruction(source, tensors, workers)


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
    if planned.alias_of is not None or info.numel == 0:
        return replace(planned, predicted=0 if planned.alias_of is not None else info.nbytes)
    tensor = TensorInput(info, source.reader(planned.tensor))
    predicted = codec_for(planned.scheme).predict(tensor, planned.scheme)
    return replace(planned, predicted=min(predicted, info.nbytes))


def _predict_file(source: TensorSource, file: str, planned: list[PlannedTensor]) -> int:
    """The size of a container: tensors, names and records."""
    header = source.header(file)
    zeros = "0" * 16
    streams = dict.fromkeys(LosslessRecord.STREAMS, zeros)
    pooled = pooled_tensors(planned)
    records = {
        t.tensor.name: RawRecord(zeros)
        if t.is_raw
        else LosslessRecord(zeros, mantissa_bits=0, streams=streams)
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
