"""A safetensors file whose header is known before its data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from neuzip.formats.safetensors_file import DTYPE_BITS, NEW_FILE, opener

from . import Layout

Bytes = npt.NDArray[np.uint8]


class TensorWriter:
    """Writes the tensors of a layout in any order: `with TensorWriter(path, layout) as writer`.

    Wide elements lie first, so that all are aligned. The same layout gives the same header. `mode` are the
    permission bits of the file, less the umask.
    """

    def __init__(self, path: Path, layout: Layout, metadata: Mapping[str, str], mode: int = NEW_FILE) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        at = 0
        for name, (dtype, shape) in sorted(layout.items(), key=lambda e: -DTYPE_BITS[e[1][0]]):
            nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            self._places[name] = at, nbytes
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self._file = open(path, "wb", opener=opener(mode))
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Write the whole of one tensor."""
        start, nbytes = self._places.pop(name)
        self._file.seek(self._data_start + start)
        written = sum(self._file.write(piece.data) for piece in pieces)
        assert written == nbytes, (name, written, nbytes)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._places, f"never written: {list(self._places)}"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
