"""Safetensors files, read with suspicion.

Nothing of the file is trusted before it was checked: the header's length, its JSON, every dtype, shape and
offset. Data is read by position, never mapped: a file cut short under us is an error then, and not a signal.
Source: the format section of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from neuzip.errors import FormatError

MAX_HEADER = 100_000_000
"""Safetensors' own limit on the header's length, in bytes."""

MAX_DIGITS = 20
"""No whole number in our JSON has more; Python takes quadratic time to read long ones."""

MAX_DIMENSIONS = 64
"""No tensor library has more; a bound keeps the product of a hostile shape small."""

NEW_FILE = 0o666
"""Permission bits of a file that nothing is said of, before the umask takes its own."""

DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a safetensors header. `start` and `stop` count bytes from the beginning of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    def same_kind(self, other: TensorInfo) -> bool:
        """Whether both have the same dtype, shape and size (which an unknown dtype leaves open)."""
        return (self.dtype, self.shape, self.nbytes) == (other.dtype, other.shape, other.nbytes)


@dataclass(frozen=True)
class Header:
    """A valid safetensors header. `raw` is the length field and the JSON, as they stand in the file."""

    raw: bytes
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]

    @property
    def in_file_order(self) -> list[TensorInfo]:
        """The tensors as their data lies in the file; empty ones first where offsets are equal."""
        return sorted(self.tensors.values(), key=lambda t: (t.start, t.stop))

    @property
    def data_bytes(self) -> int:
        """Length of the data that follows the header."""
        return max((t.stop for t in self.tensors.values()), default=0)


def parse_json(text: bytes, file: str | os.PathLike[str]) -> Any:
    """Parse strict JSON in UTF-8. Raises FormatError for duplicate keys, depth, and what is not JSON."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise FormatError(file, f"the key {key!r} stands twice in the JSON")
            result[key] = value
        return result

    def constant(name: str) -> Any:
        raise FormatError(file, f"{name} is not JSON")

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise FormatError(file, f"a number of {len(digits)} digits in the JSON is too long")
        return int(digits)

    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant, parse_int=whole
        )
    except UnicodeDecodeError as error:
        raise FormatError(file, f"the JSON is not UTF-8: {error}") from error
    except RecursionError as error:
        raise FormatError(file, "the JSON is nested too deeply") from error
    except ValueError as error:
        raise FormatError(file, f"the JSON is broken: {error}") from error


def parse_header(raw: bytes, file: str | os.PathLike[str], data_bytes: int | None = None) -> Header:
    """Parse and check a header: the 8-byte length and the JSON that follows.

    `data_bytes`, if given, is how much data there is; the tensors must cover it without holes or overlap.
    Raises FormatError.
    """
    parsed = parse_json(raw[8:], file)
    if not isinstance(parsed, dict) or raw[8:9] != b"{":
        raise FormatError(file, "the header is not a JSON object")
    metadata = parsed.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # safetensors reads null, too
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(file, "not an object of strings", field="__metadata__")
    tensors = {name: _tensor_info(name, entry, file) for name, entry in parsed.items()}
    header = Header(raw, tensors, metadata)
    end = 0
    for t in header.in_file_order:
        if t.start != end:
            kind = "overlaps the one before it" if t.start < end else "leaves a hole before it"
            raise FormatError(file, f"the data {kind}", tensor=t.name, field="data_offsets")
        end = t.stop
    if data_bytes is not None and end != data_bytes:
        short = "is truncated" if data_bytes < end else "has data that no tensor covers"
        raise FormatError(file, f"the file {short}: {data_bytes} bytes of data, the header says {end}")
    return header


def _tensor_info(name: str, entry: Any, file: str | os.PathLike[str]) -> TensorInfo:
    def bad(field: str, problem: str) -> FormatError:
        return FormatError(file, problem, tensor=name, field=field)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise FormatError(file, "an entry has dtype, shape and data_offsets", tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise bad("dtype", f"{dtype!r} is not a dtype")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_size(n) for n in shape):
        raise bad("shape", "not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise bad("data_offsets", "not two offsets")
    start, stop = offsets
    if start > stop:
        raise bad("data_offsets", f"ends at {stop}, before its start {start}")
    if dtype in DTYPE_BITS and math.prod(shape) * DTYPE_BITS[dtype] != (stop - start) * 8:
        raise bad("shape", f"{shape} of {dtype} does not fill {stop - start} bytes")
    return TensorInfo(name, dtype, tuple(shape), start, stop)


def _is_size(n: object) -> bool:
    return type(n) is int and 0 <= n < 1 << 62


_OTHER_FORMATS = {
    b"version https://git-lfs": (
        "is a Git LFS pointer, not the file that it stands for",
        "`git lfs pull` in its clone, or neuzip pull, brings the file itself",
    ),
    b"<": ("is a page in HTML or XML, not a safetensors file", "download the file again, from where it lies"),
    b"PK\x03\x04": (
        "is a zip archive, perhaps a pickle of torch.save, not a safetensors file",
        "load it with torch where you trust it, and save it with safetensors",
    ),
    b"\x80\x02": ("is a pickle, which can run code when it is loaded", "save the tensors with safetensors"),
    b"\x80\x03": ("is a pickle, which can run code when it is loaded", "save the tensors with safetensors"),
    b"\x80\x04": ("is a pickle, which can run code when it is loaded", "save the tensors with safetensors"),
    b"\x80\x05": ("is a pickle, which can run code when it is loaded", "save the tensors with safetensors"),
    b"GGUF": ("is a GGUF file, which neuzip writes but does not read", "give the original checkpoint"),
}
"""By the bytes with which a file begins, what it is in place of a safetensors file, and what to do."""

LONGEST_SIGN = max(map(len, _OTHER_FORMATS))
"""Bytes that tell what a file is."""


def other_format(file: str | os.PathLike[str], start: bytes) -> FormatError | None:
    """What is to be said of a file that begins so, if it is in a format that stands in for safetensors.

    A header of safetensors that began so would be longer than may be.
    """
    if int.from_bytes(start[:8], "little") <= MAX_HEADER:
        return None
    for sign, (problem, hint) in _OTHER_FORMATS.items():
        if start.startswith(sign):
            return FormatError(file, problem, hint=hint)
    return None


def opener(mode: int) -> Callable[[str, int], int]:
    """What `open` needs to make a file that has these permission bits, less the umask, from the beginning.

    A file of this name that a killed run has left is removed: its permission bits are not these.
    """

    def open_new(path: str, flags: int) -> int:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return os.open(path, flags, mode)

    return open_new


class TensorFile:
    """A safetensors file open for reading by several threads. Close it, or use it in a `with` statement."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # O_NONBLOCK: to open a named pipe would wait for its writer.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FormatError(path, f"cannot be read: {error.strerror}") from error
        try:
            self.header = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def _read_header(self) -> Header:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(self.path, "is not a regular file")
        size = self.size = status.st_size
        start = self._pread(0, min(size, LONGEST_SIGN))
        if (error := other_format(self.path, start)) is not None:
            raise error
        if size < 8:
            raise FormatError(self.path, f"{size} bytes are too few for a safetensors file")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER or 8 + length > size:
            raise FormatError(
                self.path,
                f"not a safetensors file, or truncated: its header would have {length} bytes",
                field="header length",
            )
        self.data_start = 8 + length
        return parse_header(self._pread(0, 8 + length), self.path, size - self.data_start)

    def _pread(self, offset: int, count: int) -> bytes:
        data = np.empty(count, np.uint8)
        self.read_at(offset, data)
        return data.tobytes()

    def read_at(self, offset: int, target: npt.NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `offset` on. Raises FormatError where the file ends early."""
        view = target.data
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise FormatError(self.path, f"cannot be read: {error.strerror}") from error
            if got == 0:
                raise FormatError(self.path, f"ends at byte {offset + done}: it was cut short while read")
            done += got

    def read(self, tensor: TensorInfo, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes `start` to `stop` of a tensor's data (all of them by default)."""
        stop = tensor.nbytes if stop is None else stop
        if not 0 <= start <= stop <= tensor.nbytes:
            raise ValueError(f"bytes {start} to {stop} of a tensor of {tensor.nbytes}")
        data = np.empty(stop - start, np.uint8)
        self.read_at(self.data_start + tensor.start + start, data)
        return data

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
