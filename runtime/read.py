"""Tensors of a checkpoint as torch tensors: decoded on the CPU by all its cores, or on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import xxhash

from neuzip.compress.pieces import Bytes
from neuzip.compress.schemes import quantized_coding, ternary_coding
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.records import QuantizedRecord, TernaryRecord
from neuzip.kernels.grid import Grid
from neuzip.kernels.quantizers import Ternary
from neuzip.runtime.dtypes import shaped, torch_dtype


def read_tensors(
    source: FolderSource,
    tensors: Sequence[SourceTensor],
    device: torch.device,
    workers: Workers,
    *,
    verify: bool = True,
) -> list[torch.Tensor]:
    """Tensors of a checkpoint on `device`, decoded there if it is a CUDA device, and otherwise on the CPU.

    Each has memory of its own; what aliases stand for is decoded once, and copied. `verify` compares what is
    stored with its checksums, and what the CPU decodes too. Raises FormatError.
    """
    for tensor in tensors:
        torch_dtype(source, tensor)
    targets = [source.resolve(tensor) for tensor in tensors]
    for tensor, target in zip(tensors, targets, strict=True):
        if verify and tensor.record and target.record and tensor.record.checksum != target.record.checksum:
            raise FormatError(
                source.checkpoint.root / tensor.file, f"its checksum is not that of {target.name!r}",
                tensor=tensor.name,
            )  # fmt: skip
    stored = list({(t.file, t.name): t for t in targets}.values())
    if device.type == "cuda" and torch.version.cuda is not None:  # AMD's cards are called cuda as well
        from neuzip.runtime.read_gpu import read_on  # needs Triton

        loaded = read_on(device, source, stored, verify=verify)
    else:
        loaded = [t.to(device) for t in _read_on_cpu(source, stored, workers, verify)]
    by_place = {(t.file, t.name): data for t, data in zip(stored, loaded, strict=True)}
    result: list[torch.Tensor] = []
    taken: set[tuple[str, str]] = set()
    for place in ((t.file, t.name) for t in targets):
        result.append(by_place[place].clone() if place in taken else by_place[place])
        taken.add(place)
    return result


class ReadAhead:
    """A thread that reads groups of tensors while its caller uses others."""

    def __init__(self, source: FolderSource, workers: Workers, *, verify: bool = True) -> None:
        self._source, self._workers, self._verify = source, workers, verify
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="neuzip-ahead")

    def begin(self, tensors: Sequence[SourceTensor], device: torch.device) -> Future[list[torch.Tensor]]:
        """Begin to read tensors as `read_tensors` does; on a GPU for the caller's current stream."""
        queue = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return self._pool.submit(self._read, tensors, device, queue)

    def groups(
        self, groups: Iterator[list[SourceTensor]], device: torch.device
    ) -> Iterator[tuple[list[SourceTensor], list[torch.Tensor]]]:
        """Each group and its values on `device`: two groups are in memory, as the next one is being read."""
        begun = ((group, self.begin(group, device)) for group in groups)
        coming = next(begun, None)
        while coming is not None:
            group, values = coming[0], coming[1].result()
            coming = next(begun, None)
            yield group, values

    def _read(
        self, tensors: Sequence[SourceTensor], device: torch.device, queue: torch.cuda.Stream | None
    ) -> list[torch.Tensor]:
        with torch.cuda.stream(queue) if queue is not None else nullcontext():
            return read_tensors(self._source, tensors, device, self._workers, verify=self._verify)

    def close(self) -> None:
        """End the thread when it has read what it is reading."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_tensor(
    source: FolderSource, tensor: SourceTensor, workers: Workers, *, verify: bool = True
) -> torch.Tensor:
    """One tensor, decoded on the CPU. Raises FormatError."""
    return read_tensors(source, [tensor], torch.device("cpu"), workers, verify=verify)[0]


def read_streams(
    source: FolderSource, tensor: SourceTensor, device: torch.device, *, verify: bool = True
) -> dict[str, torch.Tensor]:
    """The streams (uint8) of a tensor that is no alias, on `device`.

    `verify` compares them with their checksums. Raises FormatError.
    """
    streams: dict[str, torch.Tensor] = {}
    for extent in source.extents(tensor):
        stored = torch.empty(extent.nbytes, dtype=torch.uint8)
        source.read_into(tensor.file, extent.start, stored.numpy())
        checksum = xxhash.xxh3_64(stored.numpy().data).hexdigest() if verify else extent.checksum
        if checksum != extent.checksum:
            raise FormatError(
                source.checkpoint.root / tensor.file,
                f"has the checksum {checksum} instead of {extent.checksum}: the file is damaged",
                tensor=tensor.name, field=extent.stream,
            )  # fmt: skip
        streams[extent.stream or ""] = stored.to(device)
    return streams


def read_ternary(
    source: FolderSource, tensor: SourceTensor, device: torch.device, *, verify: bool = True
) -> Ternary:
    """Codes and scales of a tensor that is stored ternary, unpacked on `device`, and no dense tensor.

    `verify` compares what is stored with its checksums. Raises FormatError.
    """
    target = source.resolve(tensor)
    path, record = source.checkpoint.root / target.file, target.record
    assert isinstance(record, TernaryRecord)
    streams = read_streams(source, target, device, verify=verify)
    try:
        return ternary_coding.decoder_of(
            target.info,
            record,
            lambda name, start, stop: streams[name][start:stop],
            lambda name: streams[name].numel(),
        ).ternary()
    except FormatError:
        raise
    except NeuzipError as error:
        raise FormatError(path, error.message, tensor=target.name) from error


def read_grid(source: FolderSource, tensor: SourceTensor, *, verify: bool = True) -> Grid:
    """The step and the factors of a tensor that is stored quantized, without its codes.

    `verify` compares what is read with its checksum. Raises FormatError.
    """
    target = source.resolve(tensor)
    path, record = source.checkpoint.root / target.file, target.record
    assert isinstance(record, QuantizedRecord)
    extent = next(extent for extent in source.extents(target) if extent.stream == "grid")
    stored = np.empty(extent.nbytes, np.uint8)
    source.read_into(target.file, extent.start, stored)
    checksum = xxhash.xxh3_64(stored.data).hexdigest() if verify else extent.checksum
    if checksum != extent.checksum:
        raise FormatError(
            path, f"has the checksum {checksum} instead of {extent.checksum}: the file is damaged",
            tensor=target.name, field="grid",
        )  # fmt: skip
    rows, columns = bool(record.row_factors), bool(record.column_factors)
    try:
        bits = record.code_bits - (record.low_bits or 0)
        return quantized_coding.parse_grid(stored, target.info, bits, rows=rows, columns=columns)[0]
    except FormatError:
        raise
    except NeuzipError as error:
        raise FormatError(path, error.message, tensor=target.name) from error


def load_state_dict(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint by name, one at a time, with their own dtypes, on the CPU.

    A folder's subfolders are part of it. Raises NeuzipError for a name that is in two files, and FormatError
    for damaged files and for dtypes that torch does not have.
    """
    with FolderSource(path) as source, Workers() as workers:
        files: dict[str, str] = {}
        for tensor in source.tensors():
            if tensor.name in files:
                raise NeuzipError(
                    f"{path}: the tensor {tensor.name!r} is in {files[tensor.name]} and in {tensor.file}",
                    "give one of these files, or the subfolder",
                )
            files[tensor.name] = tensor.file
        for tensor in source.tensors():
            yield tensor.name, read_tensor(source, tensor, workers)


def read_range(
    read: Callable[[int, int], Bytes], tensor: SourceTensor, start: int, stop: int, workers: Workers
) -> torch.Tensor:
    """Bytes `start` to `stop` of a tensor, uint8 on the CPU. Only the blocks they touch are decoded."""
    data = torch.empty(stop - start, dtype=torch.uint8)
    target = data.numpy()

    def fill(piece: tuple[int, int]) -> None:
        begin, end = max(piece[0], start), min(piece[1], stop)
        target[begin - start : end - start] = read(begin, end)

    pieces = tensor.pieces()
    if stop > start:
        width = pieces[0][1]
        for _ in workers.map(fill, (pieces[i] for i in range(start // width, -(-stop // width)))):
            pass
    return data


def _read_on_cpu(
    source: FolderSource, tensors: list[SourceTensor], workers: Workers, verify: bool
) -> list[torch.Tensor]:
    """All pieces of all tensors are one row of jobs, so that small tensors keep the cores busy too."""
    memory: list[torch.Tensor] = []

    def fill(read: Callable[[int, int], Bytes], target: Bytes, start: int, stop: int) -> None:
        target[start:stop] = read(start, stop)

    def jobs() -> Iterator[Callable[[], None]]:
        for tensor in tensors:
            if verify:
                yield partial(source.check_streams, tensor)
            read = source.reader(tensor)  # before there is memory for what a hostile header may claim
            # torch's memory is better aligned than numpy's, which kernels like.
            memory.append(torch.empty(tensor.info.nbytes, dtype=torch.uint8))
            target = memory[-1].numpy()
            for piece in tensor.pieces():
                yield partial(fill, read, target, *piece)

    results = workers.map(lambda job: job(), jobs())
    for number, tensor in enumerate(tensors):
        running = xxhash.xxh3_64()
        if verify:
            next(results)
        for start, stop in tensor.pieces():
            next(results)
            if verify:
                running.update(memory[number].numpy()[start:stop].data)
        if verify and tensor.record is not None and running.hexdigest() != tensor.record.checksum:
            raise FormatError(
                source.checkpoint.root / tensor.file, "does not decode to what its checksum says",
                tensor=tensor.name,
            )  # fmt: skip
    for _ in results:  # there are none, but memory for the last tensors, if they are empty
        pass
    return [
        shaped(data, torch_dtype(source, t), t.info.shape) for data, t in zip(memory, tensors, strict=True)
    ]
