"""One container: the tensors of a weight file are coded, written, read back and compared with the source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neuzip.errors import BUG_OR_MEMORY, VerificationError
from neuzip.formats.checkpoint import Checkpoint
from neuzip.formats.container import ContainerWriter
from neuzip.formats.records import AliasRecord, Record
from neuzip.formats.safetensors_file import DTYPE_BITS

from .delta_base import DeltaBase
from .device import CPU, Device
from .encode_ahead import PlannedAndEncoded, encode_in_order, explaining_compiler
from .encode_tensor import TensorEncoder
from .plan import PlannedTensor, coded_streams, pooled_tensors
from .progress import OnBytes, ignore
from .results import TensorResults
from .sources.folder import FolderSource
from .sources.source import SourceTensor, TensorSource
from .tensor_checks import check_tensors
from .workers import Workers, ahead
from .workspace import permissions


@dataclass(frozen=True)
class ContainerJob:
    """Makes containers of the weight files of `source`, as deltas if there is a `base`, one at a time.

    With `verify` every container is checked. `on_bytes` is told of weights done, as bytes of the original:
    with `verify` of half of a tensor when it is coded, and of the rest when it was compared.
    """

    source: TensorSource
    encoder: TensorEncoder
    workers: Workers
    device: Device = CPU
    base: DeltaBase | None = None
    verify: bool = True
    on_bytes: OnBytes = ignore

    @property
    def is_delta(self) -> bool:
        """Whether the containers are deltas."""
        return self.base is not None

    def make(self, file: str, planned: Sequence[PlannedTensor], path: Path, results: TensorResults) -> None:
        """Write the container of a weight file to `path`, and check it. Its records go into `results`.

        The records of tensors in other files that this file's are equal to have to be there, or are found
        out by coding.
        """
        self.write(file, planned, path, self.encode(planned), results)
        if self.verify:
            try:
                with explaining_compiler(file):
                    self.check(file, path, self.on_bytes)
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def encode(self, planned: Iterable[PlannedTensor]) -> Iterator[PlannedAndEncoded]:
        """Code the tensors that are no aliases, one ahead of where the result is used."""
        own = [t for t in planned if t.alias_of is None]
        on_gpu = self.device.gpu is not None
        for tensor, encoded in ahead(encode_in_order(self.encoder, own, self.workers, on_gpu=on_gpu)):
            yield tensor, encoded
            self.on_bytes(self.coded_part(tensor.tensor))

    def write(
        self,
        file: str,
        planned: Sequence[PlannedTensor],
        path: Path,
        encoded: Iterable[PlannedAndEncoded],
        results: TensorResults,
    ) -> None:
        """Write the container of a weight file, from its tensors in order, `encoded` but for the aliases."""
        mode = permissions(self.source.checkpoint.root / file)
        pooled = pooled_tensors(planned, delta=self.is_delta)
        writer = ContainerWriter(path, self.source.header(file), coded_streams(planned), mode, pooled)
        try:
            raw: list[tuple[SourceTensor, Record]] = []
            for planned_tensor, coded in encoded:
                tensor = planned_tensor.tensor
                results.add(tensor, coded)
                if coded.streams:
                    writer.add(tensor.name, coded.record, coded.streams)
                elif coded.record.needs_base:
                    writer.add_alias(tensor.name, coded.record)
                else:
                    raw.append((tensor, coded.record))
            for alias in planned:
                if alias.alias_of is not None:
                    record = self.alias_record(alias, results)
                    results.records[file, alias.tensor.name] = record
                    writer.add_alias(alias.tensor.name, record)
                    self.on_bytes(self.coded_part(alias.tensor))
            self._write_raw(writer, file, raw, pooled)
            writer.close()
        except BaseException:
            writer.abandon()
            raise

    def _write_raw(
        self,
        writer: ContainerWriter,
        file: str,
        raw: Sequence[tuple[SourceTensor, Record]],
        pooled: Collection[str],
    ) -> None:
        """Copy the tensors that are stored as they are: one by one, and the `pooled` ones as one entry."""
        # The widest first, so that every raw tensor is aligned to its own elements.
        for tensor, record in sorted(raw, key=lambda r: -DTYPE_BITS.get(r[0].info.dtype, 0)):
            if tensor.name not in pooled:
                writer.begin_raw(tensor.name, record)
                self._copy(writer, tensor)
        if pooled:
            writer.begin_pool({tensor.name: record for tensor, record in raw})
            for tensor in self.source.tensors(file):  # in the order of the file, as the pool is
                if tensor.name in pooled:
                    self._copy(writer, tensor)

    def _copy(self, writer: ContainerWriter, tensor: SourceTensor) -> None:
        read = self.source.reader(tensor)
        for piece in tensor.pieces():
            writer.write(read(*piece))

    def alias_record(self, alias: PlannedTensor, results: TensorResults) -> AliasRecord:
        """The record of a tensor that is stored as equal to another one."""
        tensor, target = alias.tensor, alias.alias_of
        assert target is not None
        record = results.records.get((target.file, target.name))
        if record is None:  # another rank codes it; its record is needed now, and is the same here
            own = replace(alias, tensor=target, alias_of=None)
            record = self.encoder.encode(own, self.workers.map).record
            results.records[target.file, target.name] = record
        folder = target.file[: target.file.rfind("/") + 1]
        file = None if target.file == tensor.file else target.file[len(folder) :]
        return AliasRecord(record.checksum, of=target.name, file=file, original=record.original)

    def check(self, file: str, path: Path, on_bytes: OnBytes, names: Collection[str] | None = None) -> None:
        """Read a container back and compare every tensor with the source, or only those called `names`.

        Raises VerificationError or FormatError. `on_bytes` is told of what was compared.
        """
        originals = {t.name: t for t in self.source.tensors(file)}
        container = Checkpoint(path, path.parent, (path.name,), ())
        base = self.base.source if self.base is not None else None
        with FolderSource(container, self.device, base=base) as written:
            tensors = [t for t in written.tensors() if names is None or t.name in names]
            # Tensors that live in another file were compared byte by byte when the plan was made.
            here = [t for t in tensors if t.record is not None and not t.record.in_other_file]
            on_bytes(sum(map(self.checked_part, tensors)) - sum(map(self.checked_part, here)))
            verdicts = check_tensors(
                written, here, self.workers, original=lambda t: self.source.reader(originals[t.name])
            )
            for tensor, verdict in zip(here, verdicts, strict=True):
                on_bytes(self.checked_part(tensor))
                if not verdict.identical and verdict.lossless:
                    raise VerificationError(
                        f"{path}: tensor {verdict.name!r} does not decode to the original", BUG_OR_MEMORY
                    )

    def checked_part(self, tensor: SourceTensor) -> int:
        """The bytes of a tensor that `on_bytes` is told of when it was read back and compared."""
        return tensor.info.nbytes // 2 if self.verify else 0

    def coded_part(self, tensor: SourceTensor) -> int:
        """The bytes of a tensor that `on_bytes` is told of when it is coded."""
        return tensor.info.nbytes - self.checked_part(tensor)
