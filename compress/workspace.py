"""Files that appear whole or not at all.

A run works in `DST.neuzip-partial`, a folder beside its destination, and renames it when everything is there.
A file in it with its final name is complete. A DST that is a file is prepared in such a folder, too.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from neuzip.errors import FULL, DiskFull, FormatError, NeuzipError
from neuzip.formats.checkpoint import CHUNK
from neuzip.formats.safetensors_file import NEW_FILE, opener

from .run_identity import RUN_ID_PATH

UNSUPPORTED = frozenset(
    {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF}
)
"""What file systems answer that have no locks, or cannot sync a folder. The descriptor is a good one."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a failed write into an error that says what to do.

    What is read meanwhile stands in a `reading`, so that no source is told of as what was written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(error.filename or path) from error
        raise NeuzipError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a failed read into a FormatError that names what was read."""
    try:
        yield
    except FileNotFoundError as error:
        raise FormatError(
            path, "went away while it was read", hint="put it back and repeat the command"
        ) from error
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror or error}") from error


@contextmanager
def workspace(dst: Path, like: Path | None = None) -> Iterator[Path]:
    """The folder in which `dst` is prepared, locked against other runs. It stays when the run fails.

    It has the permission bits of the folder `like`, if one is given, as far as the umask leaves them.
    """
    work = partial_name(dst)
    refuse_link(work)
    if work.is_file():
        raise NeuzipError(
            f"{work}: is a file, and neuzip needs a folder of this name to work in",
            "remove it if a run that was killed has left it, or choose another `destination`",
        )
    with writing(work):
        if like is not None:
            work.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir(folder_mode(like), exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        try:
            lock = locked(work)
        except (BlockingIOError, FileNotFoundError) as error:
            raise NeuzipError(
                f"{work}: another run is writing there", "wait for it, or choose another `destination`"
            ) from error
    try:
        yield work
    finally:
        os.close(lock)


def locked(folder: Path) -> int:
    """A descriptor that holds the lock of a folder, to be closed.

    Raises BlockingIOError if another run has it, FileNotFoundError if the folder is there no more, and
    OSError for what is none: a link may lead to a user's files. A run that has just ended has renamed or
    removed its folder: the lock of that one would protect nothing. Where the file system has no locks, there
    is a warning, and nothing keeps other runs out.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(
                f"{folder}: cannot be locked on this file system ({error.strerror}):"
                " take care that no other run writes there",
                RuntimeWarning,
                stacklevel=2,
            )
        if not os.path.samestat(os.fstat(lock), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextmanager
def file_workspace(dst: Path, overwrite: bool) -> Iterator[Path]:
    """The folder in which a file `dst` is prepared, locked against other runs. It does not stay."""
    with workspace(dst) as work:
        clear(work, overwrite)
        try:
            yield work
        finally:
            with writing(work):
                remove(work)


def clear(work: Path, overwrite: bool) -> None:
    """Empty the workspace of a run that was killed; not that of a compression, which can go on."""
    if (work / RUN_ID_PATH).exists() and not overwrite:
        raise NeuzipError(
            f"{work}: was begun by neuzip compress",
            "choose another `destination`, or give `overwrite=True` to remove it",
        )
    for entry in work.iterdir():
        remove(entry)


def publish(work: Path, dst: Path) -> None:
    """Give a complete folder its final name, in place of an older one if there is one."""
    with writing(dst):
        for folder in (work, *(p for p in work.rglob("*") if p.is_dir())):
            sync_folder(folder)
        old = old_name(dst)
        if os.path.lexists(dst):
            os.replace(dst, old)
        os.replace(work, dst)
        sync_folder(dst.parent)
        if os.path.lexists(old):
            remove(old)


def recover(dst: Path) -> None:
    """Undo a `publish` that was killed half-way: the older folder gets its name back."""
    old = old_name(dst)
    if os.path.lexists(old):
        with writing(dst):
            if os.path.lexists(dst):
                remove(old)
            else:
                os.replace(old, dst)


def publish_file(work: Path, dst: Path) -> None:
    """Give a complete file its final name; in its workspace it has the name of `dst`."""
    with writing(dst):
        os.replace(work / dst.name, dst)
        sync_folder(dst.parent)


def permissions(file: Path, *others: Path) -> int:
    """The permission bits that all of some files or folders have, without setuid, setgid and sticky bit."""
    mode = 0o777
    for path in (file, *others):
        with reading(path):
            mode &= stat.S_IMODE(path.stat().st_mode)
    return mode


def folder_mode(like: Path) -> int:
    """The permission bits of a folder that holds what another does; its owner may write there."""
    return permissions(like) | 0o700


def make_folder(folder: Path, like: Path) -> None:
    """Make a folder, and those above it, with the permission bits of another and those above that."""
    if not folder.is_dir():
        make_folder(folder.parent, like.parent)
        folder.mkdir(folder_mode(like), exist_ok=True)


def write_file(path: Path, data: bytes, like: Path | None = None) -> None:
    """Write a small file under its final name in one step, or nothing. Raises NeuzipError.

    It has the permission bits of the file that it replaces, or of the file `like`, less the umask.
    """
    temporary = partial_name(path)
    known = path if path.is_file() else like
    mode = NEW_FILE if known is None else permissions(known)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb", opener=opener(mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content and permission bits, less the umask, under its final name in one step."""
    with reading(source):
        content = open(source, "rb")
    with content:
        make_folder(target.parent, source.parent)
        temporary = partial_name(target)
        with open(temporary, "wb", opener=opener(permissions(source))) as file:
            while chunk := _read(content, source):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)


def _read(content: BinaryIO, path: Path) -> bytes:
    with reading(path):
        return content.read(CHUNK)


def remove(path: Path) -> None:
    """Delete a file, a folder, or a link but not what it leads to."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def scratch_folder(path: Path) -> Path:
    """Make a folder called like `path` and something that no other run uses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))


def remove_scratch(path: Path) -> None:
    """Delete the scratch folders of this run, and of those that were killed."""
    for left in path.parent.glob(f"{glob.escape(path.name)}-*"):
        remove(left)


def refuse_link(path: Path) -> None:
    """Raise NeuzipError for a link where neuzip works: what it leads to would be written over."""
    if path.is_symlink():
        raise NeuzipError(
            f"{path}: is a link, which neuzip did not make", "remove it, or choose another `destination`"
        )


def refuse_strangers(work: Path, expected: set[str]) -> None:
    """Raise NeuzipError unless a finished workspace holds exactly the files that it should."""
    present = {p.relative_to(work).as_posix() for p in files_in(work)}
    for name in sorted(present ^ expected):
        problem = (
            "is left from something else"
            if name in present
            else "was lost: are there names that differ in case?"
        )
        raise NeuzipError(f"{work / name}: {problem}", f"remove {work} and repeat the command")


def require_space(dst: Path, nbytes: int) -> None:
    """Refuse to restore more than the disk can take: aliases let a small file stand for a very large one."""
    folder = next(p for p in (dst, *dst.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise NeuzipError(
            f"{dst}: the restored weights take {nbytes:,} bytes, the disk has {free:,} left",
            "free some space, or choose a `destination` on another disk",
        )


def partial_name(path: Path) -> Path:
    """What a file or folder is called until it is complete."""
    return path.with_name(path.name + ".neuzip-partial")


def old_name(path: Path) -> Path:
    """What an older folder is called while a new one takes its place."""
    return path.with_name(path.name + ".neuzip-old")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot, and have no other way either
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def files_in(path: Path) -> list[Path]:
    """All files below a folder; a file is its own only one."""
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
