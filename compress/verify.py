"""Proof: every checksum, every tensor decoded, and against the original every byte."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from neuzip.errors import FormatError, NeuzipError, VerificationError, shell
from neuzip.formats.checkpoint import (
    ORIGINAL_FOLDER,
    WEIGHTS_KEY,
    Checkpoint,
    config_files,
    file_checksum,
    index_files,
    read_lenient,
    read_stored_files,
    rewritten_config,
    rewritten_index,
)
from neuzip.formats.config_section import SECTION, own_section, read_config
from neuzip.formats.container import Container
from neuzip.formats.manifest import TensorRecord
from neuzip.kernels.float_fields import FORMATS, non_finite

from .delta import Decoder
from .delta_base import check_base
from .device import CPU, Device
from .lossless import PIECE
from .scheme import DROPPED_LAYERS
from .source import Bytes, SourceTensor, TensorSource
from .truncated import Error
from .workers import Workers, default_jobs

OnBytes = Callable[[int], None]
Stage = Callable[[str, int], AbstractContextManager[OnBytes]]
"""stage(label, nbytes): shows how far a piece of work is; gives the function that moves it."""

Reader = Callable[[int, int], Bytes]
Keep = Callable[[SourceTensor, int, Bytes], None]
"""keep(tensor, start, data): the restored bytes of a tensor from `start` on."""
Piece = tuple[Bytes, bool, list[Error], Bytes | None]


def ignore(_: int) -> None:
    """Report no progress."""


def unseen(label: str, total: int, unit: str = "bytes") -> AbstractContextManager[OnBytes]:
    """A `Stage` that shows nothing."""
    return nullcontext(ignore)


@dataclass(frozen=True)
class TensorVerdict:
    """What was found out about one tensor.

    `lossless` is whether it is stored so that it restores to the original. `identical` is whether it equals
    the original, or None where no original was given; for one that does not, the largest relative error and
    the relative L2 error. `of_another` says that the original given is not the one that was rounded.
    `base_missing` says that it was looked at only as far as that goes without a base.
    """

    file: str
    name: str
    scheme: str
    nbytes: int
    identical: bool | None = None
    max_relative: float | None = None
    relative_l2: float | None = None
    lossless: bool = True
    of_another: bool = False
    base_missing: bool = False


@dataclass(frozen=True)
class VerifyReport:
    """The result for each tensor, the number of files, and the device that decoded them."""

    tensors: tuple[TensorVerdict, ...] = field(repr=False)
    files: int
    device: str

    @property
    def nbytes(self) -> int:
        """Size of all tensors, decoded, in bytes."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def different(self) -> list[TensorVerdict]:
        """The tensors that differ from the original."""
        return [t for t in self.tensors if t.identical is False]


def verify(
    src: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    jobs: int | None = None,
    device: Device = CPU,
    on_bytes: OnBytes = ignore,
    base: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Check a compressed checkpoint: all checksums, and all tensors by decoding them.

    With `against`, the original, also every byte of the lossless tensors, and the errors of the others. Of a
    delta without its `base` the streams are checked and decoded, but not what they are added to. Raises
    FormatError for a damaged file, VerificationError for a lossless tensor that is not the original's, and
    for one that was rounded from other weights.
    """
    with (
        nullcontext() if base is None else TensorSource(base, device) as of_base,
        TensorSource(src, device, base=of_base, allow_delta=True) as source,
        Workers(jobs or device.jobs(default_jobs())) as workers,
    ):
        if not source.is_compressed:
            raise NeuzipError(f"{src}: is not compressed", "to compare two checkpoints: neuzip diff A B")
        if of_base is not None and not source.is_delta:
            raise NeuzipError(f"{src}: is no delta, and needs no base", "leave out `base`")
        if of_base is None and against is not None and source.is_delta:
            raise NeuzipError(f"{src}: is a delta, and its base is not here", source.base_hint())
        if of_base is not None:
            check_base(source, workers)
        files, tensors = verify_files(source), list(source.tensors())
        check_rewritten(source)

        if against is None:
            stored = [t for t in tensors if _decoded_elsewhere(source, t) is None]
            apart = [t for t in stored if of_base is None and t.record is not None and t.record.needs_base]
            stored = [t for t in stored if t not in apart]
            verdicts = list(check_tensors(source, stored, workers, on_bytes=on_bytes))
            for tensor in apart:
                _check_difference(source, tensor)
                verdicts.append(_verdict_apart(tensor))
                on_bytes(tensor.info.nbytes)
            for tensor in tensors:
                target = _decoded_elsewhere(source, tensor)
                if target is not None:
                    verdicts.append(_alias_verdict(source, tensor, target))
                    on_bytes(tensor.info.nbytes)
            return VerifyReport(tuple(verdicts), files, device.name)
        with TensorSource(against, device) as original:
            _require_same_layers(source, original)
            require_same_tensors(source, original)
            others = {(_file(original, t), t.name): t for t in original.tensors()}

            def other(tensor: SourceTensor) -> Reader:
                return original.reader(others[_file(source, tensor), tensor.name])

            verdicts = list(check_tensors(source, tensors, workers, other, on_bytes))
    for verdict in verdicts:
        if verdict.identical is False and verdict.lossless:
            raise VerificationError(
                f"{src}: tensor {verdict.name!r} is stored {verdict.scheme}, but is not that of {against}",
                _is_it(src, against),
            )
        if verdict.of_another:
            raise VerificationError(
                f"{src}: tensor {verdict.name!r} was rounded from other weights than those of {against}",
                _is_it(src, against),
            )
    return VerifyReport(tuple(verdicts), files, device.name)


def _is_it(src: str | os.PathLike[str], against: str | os.PathLike[str]) -> str:
    return f"is {against} the checkpoint that was compressed? see: {shell('neuzip', 'diff', src, against)}"


def _check_difference(source: TensorSource, tensor: SourceTensor) -> None:
    """Check and decode the streams of a tensor of a delta, without its base. Raises FormatError."""
    assert tensor.record is not None
    if tensor.record.scheme == "base":
        return
    source.check_streams(tensor)
    decoder = source.decoder(tensor)
    assert isinstance(decoder, Decoder)
    try:
        decoder.check()
    except FormatError:
        raise
    except NeuzipError as error:
        path = source.checkpoint.root / tensor.file
        raise FormatError(path, error.message, tensor=tensor.name) from error


def _verdict_apart(tensor: SourceTensor) -> TensorVerdict:
    assert tensor.record is not None
    return TensorVerdict(
        tensor.file, tensor.name, tensor.record.scheme, tensor.info.nbytes, base_missing=True
    )


def _decoded_elsewhere(source: TensorSource, tensor: SourceTensor) -> SourceTensor | None:
    """The tensor of the same checkpoint that an alias stands for; None for a tensor with bytes of its own.

    However many aliases a tensor has, it need not be decoded again for them.
    """
    target = source.resolve(tensor)
    return target if target is not tensor and target.file in source.checkpoint.weights else None


def _alias_verdict(source: TensorSource, tensor: SourceTensor, target: SourceTensor) -> TensorVerdict:
    assert tensor.record is not None
    assert target.record is not None
    if tensor.record.checksum != target.record.checksum:
        raise FormatError(
            source.checkpoint.root / tensor.file, f"its checksum is not that of {target.name!r}",
            tensor=tensor.name,
        )  # fmt: skip
    return TensorVerdict(
        tensor.file, tensor.name, target.record.scheme, tensor.info.nbytes, lossless=target.record.lossless
    )


def verify_files(source: TensorSource) -> int:
    """Check the files of a compressed folder other than containers; how many there are."""
    if not source.checkpoint.is_compressed_folder:
        return len(source.checkpoint.weights)
    root = source.checkpoint.root
    stored = read_stored_files(root, delta=source.allow_delta)
    present = {*source.checkpoint.weights, *source.checkpoint.others}
    for name, file in stored.items():
        place = f"{ORIGINAL_FOLDER}/{name}" if file.kind == "rewritten" else name
        path = root / place
        if place not in present:
            raise FormatError(path, "is missing")
        if file.kind == "container":
            if not isinstance(source.opened(name), Container):
                raise FormatError(path, "is not the container that the folder's manifest says it is")
        elif path.stat().st_size != file.nbytes or file_checksum(path) != file.checksum:
            raise FormatError(path, "does not have the checksum of the folder's manifest: it is damaged")
    listed = {name for name, file in stored.items() if file.kind == "container"}
    for name in source.checkpoint.weights:
        if name not in listed:
            raise FormatError(root / name, "is not in the folder's manifest")
    return len(stored)


def check_rewritten(source: TensorSource) -> None:
    """Compare what was rewritten in a compressed folder with the originals and the records of all tensors.

    What config.json has under `neuzip` is not looked at: how a model runs may be changed. The sentence that
    stops a transformers without neuzip may be missing, as in older folders. Raises FormatError.
    """
    checkpoint = source.checkpoint
    if not checkpoint.is_compressed_folder:
        return
    root = checkpoint.root / ORIGINAL_FOLDER
    stored = read_stored_files(checkpoint.root, delta=source.allow_delta)
    records: dict[str, dict[str, TensorRecord]] = {file: {} for file in checkpoint.weights}
    for tensor in source.tensors():
        if tensor.record is not None:
            records[tensor.file][tensor.name] = tensor.record
    lossless = all(r.lossless for of_file in records.values() for r in of_file.values())
    rewritten = tuple(file for file, how in stored.items() if how.kind == "rewritten")
    originals = Checkpoint(root, root, checkpoint.weights, rewritten)
    wanted = {file: rewritten_index(originals, file, records) for file in index_files(originals)}
    wanted |= {file: rewritten_config(originals, file, lossless) for file in config_files(originals)}
    for file, content in wanted.items():
        _require_entries(checkpoint.root / file, json.loads(content))


def _require_entries(path: Path, wanted: dict[str, Any]) -> None:
    """Raise FormatError unless a JSON file has these keys and values, but for those that say how to run."""
    if not path.is_file():
        raise FormatError(path, "is missing")
    document = read_lenient(path)
    for key in wanted.keys() - {SECTION}:
        if key == WEIGHTS_KEY and key not in document:
            continue  # an older folder
        # As text: NaN, which Python's JSON may hold, differs from itself.
        a, b = (json.dumps(d.get(key), sort_keys=True) for d in (document, wanted))
        if key not in document or a != b:
            raise FormatError(
                path, f"is not what follows from {ORIGINAL_FOLDER}: it is damaged", field=key,
                hint="neuzip decompress restores the original without it; where that is at hand, move the"
                " file away and repeat neuzip compress, which makes it again",
            )  # fmt: skip


def _require_same_layers(source: TensorSource, original: TensorSource) -> None:
    """Raise VerificationError if layers were dropped from `source` that its original has."""
    if _dropped(source) != _dropped(original):
        src, against = source.checkpoint.path, original.checkpoint.path
        raise VerificationError(
            f"{src}: was made without some layers of {against}, and the others have new numbers:"
            " tensors cannot be compared",
            f"without `original` {src} itself is checked;"
            f" {shell('neuzip', 'eval', src, '--original', against, '--text', 'TEXT')}"
            " measures what is missing",
        )


def _dropped(source: TensorSource) -> object:
    """Which layers config.json says that a model was made without; None if it says nothing."""
    path = source.checkpoint.root / "config.json"
    if source.checkpoint.is_file or not path.is_file():
        return None
    return own_section(read_config(path), path).get(DROPPED_LAYERS)


def require_same_tensors(a: TensorSource, b: TensorSource) -> None:
    """Raise VerificationError unless two checkpoints have the same tensors, by file, dtype and shape."""
    kinds = [
        {(_file(s, t), t.name): (t.info.dtype, t.info.shape, t.info.nbytes) for t in s.tensors()}
        for s in (a, b)
    ]
    for key in sorted(set(kinds[0]) | set(kinds[1])):
        if kinds[0].get(key) != kinds[1].get(key):
            place = f"tensor {key[1]!r} of {key[0] or 'the file'}"
            for source, kind in ((a, kinds[0]), (b, kinds[1])):
                if key not in kind:
                    raise VerificationError(
                        f"{source.checkpoint.path}: has no {place}",
                        "compare a file with a file, or a folder with a folder of the same files",
                    )
            raise VerificationError(f"{place} is not the same kind in both: {kinds[0][key]}, {kinds[1][key]}")


def _file(source: TensorSource, tensor: SourceTensor) -> str:
    """A tensor's file; single files may have different names."""
    return "" if source.checkpoint.is_file else tensor.file


def check_tensors(
    source: TensorSource,
    tensors: list[SourceTensor],
    workers: Workers,
    original: Callable[[SourceTensor], Reader] | None = None,
    on_bytes: OnBytes = ignore,
    keep: Keep | None = None,
) -> Iterator[TensorVerdict]:
    """Check streams, decode, compare with checksum and original: a verdict a tensor. Raises FormatError.

    `original` gives a reader for the bytes to compare with. `keep` gets what was decoded, from several
    threads, before it is compared with anything.
    """

    def jobs() -> Iterator[Callable[[], Piece]]:
        for tensor in tensors:
            try:
                read = source.reader(tensor)
            except FormatError as error:  # to be told when it is this tensor's turn, after its checksums
                yield functools.partial(_check_streams, source, tensor, error)
                return
            yield functools.partial(_check_streams, source, tensor)
            other = original(tensor) if original is not None else None
            exact = tensor.record is None or tensor.record.lossless
            for piece in tensor.pieces(source.device):
                yield functools.partial(_check_piece, tensor, exact, read, other, keep, *piece)

    results = workers.map(lambda job: job(), jobs())
    for tensor in tensors:
        running, rounded, identical, error = xxhash.xxh3_64(), xxhash.xxh3_64(), True, Error()
        next(results)
        for _ in tensor.pieces(source.device):
            data, same, parts, expected = next(results)
            running.update(data.data)
            if expected is not None:
                rounded.update(expected.data)
            identical &= same
            for part in parts:
                error += part
            on_bytes(data.size)
        if tensor.record is not None and running.hexdigest() != tensor.record.checksum:
            raise FormatError(
                source.checkpoint.root / tensor.file, "does not decode to what its checksum says",
                tensor=tensor.name,
            )  # fmt: skip
        scheme = tensor.record.scheme if tensor.record is not None else "plain"
        stored = tensor.record
        if scheme == "alias":
            stored = source.resolve(tensor).record
            scheme = stored.scheme if stored is not None else scheme
        lossless = stored is None or stored.lossless
        verdict = TensorVerdict(tensor.file, tensor.name, scheme, tensor.info.nbytes, lossless=lossless)
        if original is not None and identical:
            verdict = replace(verdict, identical=True, max_relative=0.0, relative_l2=0.0)
        elif original is not None:
            recorded = tensor.record.original if tensor.record is not None else None
            verdict = replace(
                verdict, identical=False, max_relative=error.max_relative, relative_l2=error.relative_l2,
                of_another=recorded is not None and rounded.hexdigest() != recorded,
            )  # fmt: skip
        yield verdict


def _check_streams(source: TensorSource, tensor: SourceTensor, error: FormatError | None = None) -> Piece:
    """Compare the checksums of a tensor's streams. Raises FormatError, at last the `error` that is known."""
    source.check_streams(tensor)
    if error is not None:
        raise error
    return np.empty(0, np.uint8), True, [], None


def _check_piece(
    tensor: SourceTensor,
    exact: bool,
    read: Reader,
    other: Reader | None,
    keep: Keep | None,
    start: int,
    stop: int,
) -> Piece:
    """A piece of a tensor, whether it equals the other's, by how much it does not, and the other's if it was
    rounded.

    That are sums for every PIECE weights, however many a piece has: sums of other parts round otherwise.
    `exact` says that it should: then nothing is measured as long as it does.
    """
    data = read(start, stop)
    if keep is not None:
        keep(tensor, start, data)
    if other is None:
        return data, True, [], None
    expected = other(start, stop)
    rounded = expected if tensor.record is not None and tensor.record.original is not None else None
    fmt = FORMATS.get(tensor.info.dtype)
    same = bool(np.array_equal(data, expected))
    if fmt is None or (same and exact):
        return data, same, [], rounded
    a, b = expected.view(fmt.dtype), data.view(fmt.dtype)
    errors = []
    for at in range(0, a.size, PIECE):
        x, y = a[at : at + PIECE], b[at : at + PIECE]
        finite = ~(non_finite(x, fmt) | non_finite(y, fmt))
        errors.append(Error.between(x[finite], y[finite], fmt))
    return data, same, errors, rounded
