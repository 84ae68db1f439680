"""GGUF files, version 3, and their blocks of ternary weights.

    file    "GGUF", u32 3, u64 tensors, u64 entries; entries; infos; data, every tensor at a multiple of 32
    entry   key, u32 type, value
    info    name, u32 dimensions, u64 sizes (the innermost first), u32 type, u64 offset in the data
    string  u64 length, UTF-8

    type   weights  bytes  layout of a block
    TQ1_0  256      54     48 bytes of 5 trits, 4 bytes of 4, then fp16 d
    TQ2_0  256      66     64 bytes of 4 codes, then fp16 d
    Q2_0   64       18     fp16 d, then 16 bytes of 4 codes: neighbours
    Q4_0   32       18     fp16 d, then 16 bytes of 2 codes: weights m and m + 16

A weight is d times (code - 1), the codes being 0, 1 and 2; of Q4_0 d times (code - 8), 7, 8 and 9. The first
code is in the lowest bits. Byte m of a half of a TQ2_0 block holds the weights m, m + 32, m + 64 and m + 96
of its 128. TQ1_0 has in a byte the trits of the weights m, m + 32 ... m + 128 of the first 160, or m, m + 16
... m + 64 of the next 80, or m, m + 4, m + 8 and m + 12 of the last 16. They are the digits of a number n
below 243, the first the most significant, four being followed by a 0; stored is ceil(256 n / 243), and a
reader takes digit after digit as the high byte of 3 times the low one.

Source: ggml's docs/gguf.md, ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from torch import Tensor

from neuzip.errors import NeuzipError
from neuzip.formats.safetensors_file import NEW_FILE, opener

ALIGNMENT = 32
VERSION = 3

Bytes = npt.NDArray[np.uint8]
Value = tuple[str, object]
"""The type of a metadata entry, as in `VALUE_TYPES`, and its value; "[x]" is an array of x."""

VALUE_TYPES = {"u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "[": 9, "u64": 10}
FORMATS = {"u32": "<I", "i32": "<i", "f32": "<f", "bool": "<?", "u64": "<Q"}


@dataclass(frozen=True)
class BlockType:
    """A type of tensors: its number, the file type that says so, and its blocks."""

    name: str
    number: int
    file_type: int
    weights: int
    nbytes: int


TERNARY = {
    "tq1_0": BlockType("TQ1_0", 34, 36, 256, 54),
    "tq2_0": BlockType("TQ2_0", 35, 37, 256, 66),
    "q2_0": BlockType("Q2_0", 42, 41, 64, 18),
    "q4_0": BlockType("Q4_0", 2, 2, 32, 18),
}
"""Types that hold ternary weights exactly, apart from the rounding of their scale. Q4_0 is for odd rows."""

DENSE = {
    "F32": BlockType("F32", 0, 0, 1, 4),
    "F16": BlockType("F16", 1, 1, 1, 2),
    "BF16": BlockType("BF16", 30, 32, 1, 2),
}


def fits(kind: BlockType, width: int, group: int | None) -> bool:
    """Whether rows are whole blocks, each of one scale."""
    share = width if group is None or group >= width else group
    return width % kind.weights == 0 and share % kind.weights == 0


def fitting(kind: BlockType, width: int, group: int | None) -> BlockType:
    """`kind`, or if it does not fit the narrowest that does; `kind` again if there is none."""
    kinds = [kind, TERNARY["q2_0"], TERNARY["q4_0"]]
    return next((k for k in kinds if fits(k, width, group)), kind)


def stored_scale(kind: BlockType, name: str, codes: Tensor, scale: Tensor, group: int | None) -> Tensor:
    """The scales as fp16 holds them, fp32. Raises NeuzipError for blocks and scales that do not fit."""
    width = codes.shape[1]
    if not fits(kind, width, group):
        whole = width % kind.weights == 0
        raise NeuzipError(
            f"tensor {name!r}: {group} weights share a scale, {kind.name} has one for {kind.weights}"
            if whole
            else f"tensor {name!r}: rows of {width} weights are no whole blocks of {kind.weights}, "
            f"as {kind.name} wants them",
            "add `gguf_mixed=True` to let such tensors be Q2_0 or Q4_0"
            if fits(fitting(kind, width, group), width, group)
            else "export to compressed-tensors",
        )
    rounded = scale.half().float()
    tiny = 2.0**-14
    if bool(((scale != 0) & ~((rounded >= tiny) & rounded.isfinite())).any()):
        raise NeuzipError(
            f"tensor {name!r}: scales of {float(scale.min()):.3g} to {float(scale.max()):.3g} are out of the "
            "range of fp16, in which GGUF has them",
            "export to compressed-tensors",
        )
    return rounded


def blocks(kind: BlockType, codes: Tensor, scale: Tensor, group: int | None) -> Bytes:
    """The rows of a tensor as blocks: uint8 [out, in / weights * bytes]."""
    out, width = codes.shape
    count = width // kind.weights
    trits = (codes.numpy() + 1).astype(np.uint8).reshape(out * count, kind.weights)
    spread = scale.half()
    if group is not None:
        spread = spread.repeat_interleave(-(-min(group, width) // kind.weights), 1)[:, :count]
    d = spread.expand(out, count).contiguous().numpy().reshape(-1, 1).view(np.uint8)
    if kind.name in ("Q2_0", "Q4_0"):
        packed = [d, _neighbours(trits) if kind.name == "Q2_0" else _nibbles(trits)]
    else:
        packed = [_trits(trits) if kind.name == "TQ1_0" else _halves(trits), d]
    return np.concatenate(packed, 1).reshape(out, count * kind.nbytes)


def _nibbles(trits: Bytes) -> Bytes:
    """Two codes a byte: [n, 32] to [n, 16]."""
    codes = trits + 7
    return (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8, copy=False)


def _neighbours(trits: Bytes) -> Bytes:
    return _quarters(trits.reshape(len(trits), -1, 4).transpose(0, 2, 1))


def _halves(trits: Bytes) -> Bytes:
    return np.concatenate([_quarters(half) for half in trits.reshape(-1, 2, 4, 32).transpose(1, 0, 2, 3)], 1)


def _quarters(codes: Bytes) -> Bytes:
    """Four codes a byte: [n, 4, bytes] to [n, bytes]."""
    packed = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
    return packed.astype(np.uint8, copy=False)


def _trits(trits: Bytes) -> Bytes:
    """Five trits a byte, 52 bytes for 256: the first 160, the next 80, and 16 of four."""
    runs = [(0, 160, 32), (160, 240, 16), (240, 256, 4)]
    return np.concatenate([_fives(trits[:, a:b].reshape(len(trits), -1, n)) for a, b, n in runs], 1)


def _fives(trits: Bytes) -> Bytes:
    """[n, 4 or 5, bytes] to [n, bytes], the first trit the most significant."""
    number = np.zeros((len(trits), trits.shape[2]), np.uint16)
    for i in range(trits.shape[1]):
        number += trits[:, i] * np.uint16(3 ** (4 - i))
    up = (number.astype(np.int32) * 256 + 242) // 243
    return up.astype(np.uint8)


@dataclass(frozen=True)
class Info:
    """A tensor of the file to be; `shape` has the outermost size first."""

    name: str
    shape: tuple[int, ...]
    kind: BlockType

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) // self.kind.weights * self.kind.nbytes


class GgufWriter:
    """Writes tensors in the order of `infos`: `with GgufWriter(path, metadata, infos) as writer`.

    `mode` are the permission bits of the file, less the umask.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, Value], infos: Sequence[Info], mode: int = NEW_FILE
    ) -> None:
        self._waiting = list(infos)
        head = [b"GGUF", struct.pack("<IQQ", VERSION, len(infos), len(metadata))]
        head += [_string(key) + _value(value) for key, value in metadata.items()]
        at = 0
        for info in infos:
            sizes = info.shape[::-1]
            head.append(_string(info.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            head.append(struct.pack("<IQ", info.kind.number, at))
            at += _aligned(info.nbytes)
        text = b"".join(head)
        self._file = open(path, "wb", opener=opener(mode))
        self._file.write(text + bytes(_aligned(len(text)) - len(text)))

    def write(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Write the whole of the next tensor."""
        info = self._waiting.pop(0)
        assert info.name == name, (info.name, name)
        written = sum(self._file.write(piece.data) for piece in pieces)
        assert written == info.nbytes, (name, written, info.nbytes)
        self._file.write(bytes(_aligned(written) - written))

    def __enter__(self) -> GgufWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._waiting, f"never written: {self._waiting}"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:  # JSON and the names of files can hold halves of surrogate pairs
        raise NeuzipError(f"{text!r} cannot be written to a GGUF file: it is no Unicode text") from error
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    kind, content = value
    if not kind.startswith("["):
        return struct.pack("<I", VALUE_TYPES[kind]) + _bare(kind, content)
    assert isinstance(content, Sequence)
    of = kind[1:-1]
    parts = [struct.pack("<IIQ", VALUE_TYPES["["], VALUE_TYPES[of], len(content))]
    return b"".join(parts + [_bare(of, item) for item in content])


def _bare(kind: str, content: object) -> bytes:
    if kind == "str":
        assert isinstance(content, str)
        return _string(content)
    return struct.pack(FORMATS[kind], content)
