"""What a run of `compress` did, tensor by tensor and as a whole, and what it warns of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from neuzip.formats.checkpoint import PICKLES, Checkpoint, linked_from_outside
from neuzip.formats.container import Container
from neuzip.formats.hub.private_files import listed, private_files
from neuzip.formats.records import Loss, RawRecord, Record
from neuzip.formats.safetensors_file import DTYPE_BITS

from .plan import Plan, PlannedTensor
from .results import RunOutcome, TensorKey
from .schemes import describe
from .schemes.truncated import KEEP_ALL
from .sources.source import TensorSource


@dataclass(frozen=True)
class TensorReport:
    """A tensor before and after. `scheme` is what became of it, `note` why, where that may surprise.

    `loss` is None where nothing was lost; a tied tensor has that of the one whose data it shares.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    scheme: str
    original_bytes: int
    stored_bytes: int
    loss: Loss | None = None
    note: str = ""


@dataclass(frozen=True)
class CompressionReport:
    """What a run did. Byte counts are of whole checkpoints, all files included; `seconds` is wall time.

    `device` is where this rank coded. `private_files` were carried along and look private by their names.
    """

    src: Path
    dst: Path
    original_bytes: int
    stored_bytes: int
    weight_bytes: int
    stored_weight_bytes: int
    weights: int
    tensors: tuple[TensorReport, ...] = field(repr=False)
    seconds: float
    device: str
    resumed_files: int = 0
    warnings: tuple[str, ...] = field(default=())
    private_files: tuple[str, ...] = field(default=())

    @property
    def ratio(self) -> float:
        """Size of the weight files after, as a share of before."""
        return self.stored_weight_bytes / self.weight_bytes if self.weight_bytes else 1.0

    @property
    def bits_per_weight(self) -> float:
        """Bits of the stored weight files a weight."""
        return 8 * self.stored_weight_bytes / self.weights if self.weights else 0.0


def compression_report(
    source: TensorSource,
    plan: Plan,
    dst: Path,
    outcome: RunOutcome,
    device: str,
    seconds: float,
    *,
    is_delta: bool = False,
) -> CompressionReport:
    """Read the result at `dst`, and sum up the run that made it. `device` is the name of where it coded."""
    checkpoint = source.checkpoint
    tensors = tensor_reports(plan, checkpoint, dst, outcome.results.notes, is_delta=is_delta)
    weight_paths = [dst] if checkpoint.is_file else [dst / file for file in checkpoint.weights]
    weight_bytes = sum(map(source.file_bytes, checkpoint.weights))
    stored_weight_bytes = sum(p.stat().st_size for p in weight_paths)
    others = (
        [] if checkpoint.is_file else [p for p in dst.rglob("*") if p.is_file() and p not in weight_paths]
    )
    private = private_files(checkpoint)
    return CompressionReport(
        src=checkpoint.path,
        dst=dst,
        original_bytes=plan.original_bytes,
        stored_bytes=stored_weight_bytes + sum(p.stat().st_size for p in others),
        weight_bytes=weight_bytes,
        stored_weight_bytes=stored_weight_bytes,
        weights=sum(t.info.numel for t in source.tensors()),
        tensors=tuple(tensors),
        seconds=seconds,
        device=device,
        resumed_files=outcome.resumed_files,
        warnings=(
            *(f"{dst / f}: missing, damaged or of an older version: made again" for f in outcome.made_again),
            *_file_warnings(checkpoint, private),
            *_unrounded(tensors),
            *_unknown(tensors),
            *_larger(weight_bytes, stored_weight_bytes, len(tensors)),
        ),
        private_files=tuple(private),
    )


def tensor_reports(
    plan: Plan, checkpoint: Checkpoint, dst: Path, notes: Mapping[TensorKey, str], *, is_delta: bool
) -> list[TensorReport]:
    """What became of every tensor, by the records of the containers at `dst`."""
    reports: list[TensorReport] = []
    losses: dict[TensorKey, Loss | None] = {}
    tied: dict[int, TensorKey] = {}
    for file in checkpoint.weights:
        path = dst if checkpoint.is_file else dst / file
        with Container(path, delta=is_delta) as container:
            for planned in plan.of_file(file):
                info = planned.tensor.info
                record = container.manifest.tensors[info.name]
                losses[file, info.name] = record.loss
                if record.holder is not None:
                    beside, name = record.holder
                    folder = file[: file.rfind("/") + 1]
                    tied[len(reports)] = file if beside is None else folder + beside, name
                reports.append(
                    TensorReport(
                        file=file,
                        name=info.name,
                        dtype=info.dtype,
                        shape=info.shape,
                        scheme=describe(record, info.dtype),
                        original_bytes=info.nbytes,
                        stored_bytes=container.stored_bytes(info.name),
                        loss=record.loss,
                        note=_note(planned, record, notes.get((file, info.name), planned.note)),
                    )
                )
    for number, target_key in tied.items():  # a tensor that shares a rounded one's data is rounded as well
        reports[number] = replace(reports[number], loss=losses.get(target_key))
    return reports


def _note(planned: PlannedTensor, record: Record, note: str) -> str:
    """The note of a tensor, where its record makes that of the plan or of the coder obsolete."""
    if record.needs_base:
        return ""  # whatever was in the way of coding it alone
    if isinstance(record, RawRecord) and not planned.is_raw:
        return "does not shrink"
    return note


def _file_warnings(checkpoint: Checkpoint, private: Mapping[str, str]) -> Iterator[str]:
    """Warnings of files that are carried along."""
    yield from (f"{f}: names shards that are not here, carried along unread" for f in checkpoint.unread)
    yield from (f"{f}: a pickle, carried along unopened" for f in checkpoint.others if f.endswith(PICKLES))
    yield from (f"{f}: a link out of the folder, copied" for f in linked_from_outside(checkpoint))
    yield from (f"looks private, and is carried along: {line}" for line in listed(private))


def _unrounded(tensors: Sequence[TensorReport]) -> list[str]:
    """A warning if rules round, and nothing has so many mantissa bits that it was."""
    why = sorted({t.note for t in tensors if t.note.endswith(KEEP_ALL)})
    rounded = any(t.loss is not None for t in tensors)
    return [] if rounded or not why else [f"nothing is rounded: {'; '.join(why)}"]


def _larger(before: int, after: int, tensors: int) -> list[str]:
    """A warning if weight files take more than before: names and records of small tensors outweigh them."""
    more = after - before
    if more <= before // 100:
        return []
    return [
        f"the result is {more:,} bytes larger than `source`: names and records of its {tensors:,} tensors"
        " take more than is saved"
    ]


def _unknown(tensors: Sequence[TensorReport]) -> list[str]:
    """A warning if tensors have dtypes that are none of safetensors: they are stored as they are."""
    counts = Counter(t.dtype for t in tensors if t.dtype not in DTYPE_BITS)
    return [
        f"neuzip does not know dtype {dtype}: {count:,} tensor{'' if count == 1 else 's'} stored unchanged"
        for dtype, count in counts.items()
    ]
