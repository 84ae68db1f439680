"""Proof: every checksum, every tensor decoded, and against the original every byte."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field

from neuzip.errors import FormatError, NeuzipError, VerificationError, shell
from neuzip.formats.config_section import own_section, read_config

from .delta_base import check_base
from .device import CPU, Device
from .folder_checks import check_rewritten, verify_files
from .progress import OnBytes, ignore
from .rules_file import DROPPED_LAYERS
from .sources.folder import FolderSource
from .sources.source import SourceTensor
from .tensor_checks import Reader, TensorVerdict, check_tensors
from .workers import Workers, default_jobs


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
        nullcontext() if base is None else FolderSource(base, device) as of_base,
        FolderSource(src, device, base=of_base, allow_delta=True) as source,
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
                source.check_without_base(tensor)
                verdicts.append(_verdict_apart(tensor))
                on_bytes(tensor.info.nbytes)
            for tensor in tensors:
                target = _decoded_elsewhere(source, tensor)
                if target is not None:
                    verdicts.append(_alias_verdict(source, tensor, target))
                    on_bytes(tensor.info.nbytes)
            return VerifyReport(tuple(verdicts), files, device.name)
        with FolderSource(against, device) as original:
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


def _verdict_apart(tensor: SourceTensor) -> TensorVerdict:
    assert tensor.record is not None
    return TensorVerdict(
        tensor.file, tensor.name, tensor.record.scheme, tensor.info.nbytes, base_missing=True
    )


def _decoded_elsewhere(source: FolderSource, tensor: SourceTensor) -> SourceTensor | None:
    """The tensor of the same checkpoint that an alias stands for; None for a tensor with bytes of its own.

    However many aliases a tensor has, it need not be decoded again for them.
    """
    target = source.resolve(tensor)
    return target if target is not tensor and target.file in source.checkpoint.weights else None


def _alias_verdict(source: FolderSource, tensor: SourceTensor, target: SourceTensor) -> TensorVerdict:
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


def _require_same_layers(source: FolderSource, original: FolderSource) -> None:
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


def _dropped(source: FolderSource) -> object:
    """Which layers config.json says that a model was made without; None if it says nothing."""
    path = source.checkpoint.root / "config.json"
    if source.checkpoint.is_file or not path.is_file():
        return None
    return own_section(read_config(path), path).get(DROPPED_LAYERS)


def require_same_tensors(a: FolderSource, b: FolderSource) -> None:
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


def _file(source: FolderSource, tensor: SourceTensor) -> str:
    """A tensor's file; single files may have different names."""
    return "" if source.checkpoint.is_file else tensor.file
