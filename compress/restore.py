"""From compressed checkpoint back to the original, file by file and piece by piece."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import (
    MANIFEST_PATH,
    StoredFile,
    file_checksum,
    read_stored_files,
)
from neuzip.formats.safetensors_file import TensorFile, opener

from .delta_base import check_base
from .device import CPU, Device
from .folder_checks import verify_files
from .overwrite_guard import refuse_existing, refuse_folder, refuse_nesting, require_name
from .pieces import Bytes, digest
from .progress import OnBytes, ignore
from .sources.folder import FolderSource
from .sources.source import SourceTensor
from .tensor_checks import check_tensors
from .workers import Workers, default_jobs
from .workspace import (
    copy_file,
    file_workspace,
    files_in,
    make_folder,
    partial_name,
    permissions,
    publish,
    publish_file,
    recover,
    refuse_strangers,
    require_space,
    workspace,
    writing,
)


@dataclass(frozen=True)
class DecompressionReport:
    """What `decompress_checkpoint` wrote. `lossless` says whether the result is the original, byte for byte.

    `device` is where neuzip decoded the tensors. If `was_there` is True, an earlier run had written
    everything, and this run only compared it.
    """

    src: Path
    dst: Path
    stored_bytes: int
    restored_bytes: int
    files: int
    lossless: bool
    seconds: float
    device: str
    was_there: bool = False


def decompress(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    device: Device = CPU,
    on_bytes: OnBytes = ignore,
    base: str | os.PathLike[str] | None = None,
) -> DecompressionReport:
    """Restore a compressed checkpoint: for a lossless one every file, byte by byte, with its permission bits.

    A delta needs the `base` that it was made against, whose tensors are compared with their checksums first.
    Every tensor is compared with its checksum before its file gets its final name. Raises NeuzipError.
    """
    began = time.monotonic()
    dst = Path(dst)
    with (
        nullcontext() if base is None else FolderSource(base, device) as of_base,
        FolderSource(src, device, base=of_base) as source,
        Workers(jobs or device.jobs(default_jobs())) as workers,
    ):
        checkpoint = source.checkpoint
        if not source.is_compressed:
            raise NeuzipError(f"{src}: is not compressed", "there is nothing to restore")
        if of_base is not None and not source.is_delta:
            raise NeuzipError(f"{src}: is no delta, and needs no base", "neuzip decompress restores it")
        refuse_nesting(checkpoint.path, dst)
        require_name(dst)
        if of_base is not None:
            refuse_nesting(of_base.checkpoint.path, dst)
            check_base(source, workers)
        restore = _restore_single if checkpoint.is_file else _restore_folder
        files, was_there = restore(source, dst, overwrite, workers, on_bytes)
        records = [t.record for t in source.tensors()]
        stored = sum(p.stat().st_size for p in files_in(checkpoint.path))
        restored = sum(p.stat().st_size for p in files_in(dst))
        lossless_only = all(r is None or r.lossless for r in records)
        seconds = time.monotonic() - began
        return DecompressionReport(
            checkpoint.path, dst, stored, restored, files, lossless_only, seconds, device.name, was_there
        )


def _restore_single(
    source: FolderSource, dst: Path, overwrite: bool, workers: Workers, on_bytes: OnBytes
) -> tuple[int, bool]:
    """Restore a single file: the number of files, 1, and whether it was there before."""
    (file,) = source.checkpoint.weights
    refuse_folder(dst)
    with file_workspace(dst, overwrite) as work:
        if dst.exists() and not overwrite and _is_restored_file(source, file, dst, on_bytes):
            return 1, True
        refuse_existing(dst, overwrite, file=True)
        require_space(dst, sum(t.info.nbytes for t in source.tensors()))
        with writing(work):
            _restore(source, file, work / dst.name, workers, on_bytes)
        publish_file(work, dst)
    return 1, False


def _restore_folder(
    source: FolderSource, dst: Path, overwrite: bool, workers: Workers, on_bytes: OnBytes
) -> tuple[int, bool]:
    """Restore a folder: the number of files, and whether they were there before."""
    checkpoint = source.checkpoint
    if not checkpoint.is_compressed_folder:
        raise NeuzipError(
            f"{checkpoint.root}: has containers but no {MANIFEST_PATH}",
            "restore its files one by one: neuzip decompress FILE.safetensors DST",
        )
    verify_files(source)
    stored = read_stored_files(checkpoint.root, delta=source.allow_delta)
    recover(dst)
    if dst.exists() and not overwrite and _is_restored(source, stored, dst, on_bytes):
        return len(stored), True
    refuse_existing(dst, overwrite, known=stored)
    missing = {file for file in checkpoint.weights if not (partial_name(dst) / file).is_file()}
    require_space(dst, sum(t.info.nbytes for t in source.tensors() if t.file in missing))
    with workspace(dst, checkpoint.root) as work:
        for name, file in stored.items():
            target = work / name
            with writing(target):
                if file.is_container:
                    if target.exists() and _is_restored_file(source, name, target, on_bytes):
                        continue
                    make_folder(target.parent, (checkpoint.root / name).parent)
                    _restore(source, name, target, workers, on_bytes)
                else:
                    copy_file(checkpoint.root / file.place(name), target)
        refuse_strangers(work, set(stored))
        publish(work, dst)
    return len(stored), False


def _restore(source: FolderSource, file: str, target: Path, workers: Workers, on_bytes: OnBytes) -> None:
    """Write one original weight file: its header as it was, and every tensor decoded and checked.

    The threads that decode write too: so the file is all that anybody waits for.
    """
    temporary = partial_name(target)
    mode = permissions(source.checkpoint.root / file)
    try:
        with open(temporary, "wb", opener=opener(mode)) as out:
            raw = source.header(file).raw
            out.write(raw)
            out.flush()

            def keep(tensor: SourceTensor, start: int, data: Bytes) -> None:
                _write_at(out.fileno(), len(raw) + tensor.info.start + start, data)

            for _ in check_tensors(source, list(source.tensors(file)), workers, on_bytes=on_bytes, keep=keep):
                pass
            os.fsync(out.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_at(descriptor: int, offset: int, data: Bytes) -> None:
    view, done = data.data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _is_restored(
    source: FolderSource, stored: dict[str, StoredFile], folder: Path, on_bytes: OnBytes
) -> bool:
    """Whether a folder holds all that `source` restores to, and nothing else."""
    if {p.relative_to(folder).as_posix() for p in files_in(folder)} != set(stored):
        return False
    return all(
        _is_restored_file(source, name, folder / name, on_bytes)
        if file.is_container
        else file_checksum(folder / name) == file.checksum
        for name, file in stored.items()
    )


def _is_restored_file(source: FolderSource, name: str, path: Path, on_bytes: OnBytes) -> bool:
    """Whether a weight file holds what its container says; then `on_bytes` is told of its tensors."""
    tensors = list(source.tensors(name))
    try:
        with TensorFile(path) as file:
            if file.header.raw != source.header(name).raw or not all(
                t.record is not None
                and digest(lambda a, b, i=t.info: file.read(i, a, b), t.info.nbytes) == t.record.checksum  # type: ignore[misc]
                for t in tensors
            ):
                return False
    except FormatError:
        return False
    on_bytes(sum(t.info.nbytes for t in tensors))
    return True
