"""Arrays of weights between their uses: dense, or losslessly compressed in memory.

    flat = array.open(buffer)    the dense weights: in `buffer` if they are compressed
    ...                          read them, or change them in place
    array.close(flat)            store their present values

A compressed weight takes 1 + kept mantissa bits and the entropy of its exponent: about 10.6 bits, instead of
the 16 of bf16. An array is encoded as a whole, with one table, by Triton on a GPU and by numba on a CPU.
Decoding gives the bits that were encoded, those of NaNs and of both zeros too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from neuzip.errors import NeuzipError
from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat, census, empty_planes, split, unpack_fields
from neuzip.kernels.float_fields import Planes as CpuPlanes
from neuzip.kernels.rans.coded import ALIGNMENT, PATTERNS, CodedTensor
from neuzip.runtime.weights.ans import ANS_FORMATS

if TYPE_CHECKING:
    from neuzip.kernels.rans.triton import decode as triton_decode
    from neuzip.kernels.rans.triton import encode as triton_encode

SCRATCH = 96 << 20
"""Bytes of temporary memory of the GPU's encoder. It encodes an array in parts if they do not suffice."""

SPARE = 50
"""Divisor: an array has memory for 1 / SPARE more words, so that it can be encoded again with its table."""

CODING_SHARE = 32
"""Divisor: the encoder's table stays on the device if it takes at most 1 / CODING_SHARE of the dense array.

The table takes 0.68 MB if symbols are pairs of exponents, so it stays for arrays of 22 MB and more.
"""


class StoredArray(Protocol):
    """An array of weights between its uses."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array as stored."""
        ...

    def open(self, buffer: Tensor) -> Tensor:
        """The dense weights, [numel]. They may lie in `buffer`, uint8, which has at least as many bytes."""
        ...

    def close(self, flat: Tensor) -> None:
        """Store the present values of the weights that `open` returned."""
        ...


def store_array(flat: Tensor, compressed: bool, *, triton: bool | None = None) -> StoredArray:
    """Store a dense array, [n]. `triton` encodes with Triton on a CPU too, for tests.

    Raises NeuzipError for a dtype that cannot be compressed.
    """
    if not compressed:
        return PlainArray(flat)
    if flat.dtype not in ANS_FORMATS:
        raise NeuzipError(
            f"weights of {flat.dtype} cannot be held compressed",
            "train in bfloat16, float16 or float32, or without compression",
        )
    array: StoredArray = (TritonCompressedArray if flat.is_cuda or triton else NumbaCompressedArray)(
        flat.numel(), flat.dtype
    )
    array.close(flat)
    return array


class PlainArray:
    """A dense array."""

    def __init__(self, flat: Tensor) -> None:
        self.numel, self.dtype, self._flat = flat.numel(), flat.dtype, flat

    @property
    def nbytes(self) -> int:
        """Bytes of the array as stored."""
        return self._flat.nbytes

    def open(self, buffer: Tensor) -> Tensor:
        """The dense weights, [numel], where they lie."""
        return self._flat

    def close(self, flat: Tensor) -> None:
        """Store the present values of the weights that `open` returned."""
        if flat.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(flat)


@dataclass(frozen=True, eq=False)
class _OnCpu:
    """An array as numba encodes it. `mantissa_bits` counts the mantissa bits that are stored."""

    mantissa_bits: int
    table: rans.Table
    planes: CpuPlanes
    encoded: rans.RansEncoded


class NumbaCompressedArray:
    """An array that numba compresses, in the memory of the host."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self._fmt = FORMATS[ANS_FORMATS[dtype]]
        self._coded: _OnCpu | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the array as stored."""
        assert self._coded is not None
        encoded, planes = self._coded.encoded, self._coded.planes.values()
        return encoded.words.nbytes + encoded.index.nbytes + sum(plane.nbytes for plane in planes)

    def open(self, buffer: Tensor) -> Tensor:
        """The dense weights, [numel], in `buffer`."""
        assert self._coded is not None
        flat = buffer[: self.numel * self.dtype.itemsize].view(self.dtype)
        coded, bits = self._coded, _patterns(flat, self._fmt)
        fields = unpack_fields(coded.planes, self.numel, coded.mantissa_bits)
        rans.decode_floats(
            coded.encoded.words,
            coded.encoded.index,
            coded.table,
            fields,
            self._fmt,
            coded.mantissa_bits,
            bits,
        )
        return flat

    def close(self, flat: Tensor) -> None:
        """Store the present values of the weights that `open` returned."""
        self._coded = None
        bits = _patterns(flat, self._fmt)
        counted = census(bits, self._fmt)
        mantissa_bits = counted.kept_bits(self._fmt)
        table = rans.build_table(counted.exponents, counted.pairs)
        planes = empty_planes(self.numel, mantissa_bits)
        exponents = np.empty(self.numel, self._fmt.exponent_dtype)
        split(bits, self._fmt, mantissa_bits, exponents, planes)
        self._coded = _OnCpu(mantissa_bits, table, planes, rans.encode(exponents, table))


def _patterns(flat: Tensor, fmt: FloatFormat) -> Bits:
    """The bit patterns of weights, in the same memory."""
    patterns: Bits = flat.view(PATTERNS[fmt.bits]).numpy().view(fmt.dtype)
    return patterns


class TritonCompressedArray:
    """An array that Triton compresses, in the memory of a GPU, or of the host by Triton's interpreter.

    A large array with full mantissas is encoded again in place, with the table that it has, and prepared
    decoder launches stay valid. If its words no longer fit, a new table and new memory are taken.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self._fmt = FORMATS[ANS_FORMATS[dtype]]
        self._coded: CodedTensor | None = None
        self._recoder: triton_encode.Recoder | None = None
        self._plan: triton_decode.DecodePlan | None = None
        self._open: Tensor | None = None
        self._errors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the array as stored. The decoder takes 17 KB more, and 24 bytes per 16,384 weights."""
        assert self._coded is not None
        coded = self._coded
        words = coded.words.nbytes if self._recoder is None else self._recoder.nbytes
        return words + coded.index.nbytes + sum(plane.nbytes for plane in coded.planes.values())

    def open(self, buffer: Tensor) -> Tensor:
        """The dense weights, [numel], in `buffer`."""
        assert self._coded is not None
        if self._plan is None or self._open is None or self._open.data_ptr() != buffer.data_ptr():
            with torch.inference_mode(False):  # the launch is reused in training
                self._open = buffer[: self.numel * self.dtype.itemsize].view(self.dtype)
                self._plan = self._plan_for(self._open.view(PATTERNS[self._fmt.bits]))
        self._plan.launch()
        return self._open

    def _plan_for(self, out: Tensor) -> triton_decode.DecodePlan:
        if self._plan is not None:
            return self._plan.into(out)
        from neuzip.kernels.rans.triton import decode as triton_decode

        assert self._coded is not None  # `open` has checked it
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            plan = triton_decode.prepare([self._coded], [out], errors=self._errors)
        self._errors = plan.errors
        return plan

    def close(self, flat: Tensor) -> None:
        """Store the present values of the weights that `open` returned."""
        bits = flat.view(PATTERNS[self._fmt.bits])
        with torch.cuda.device_of(bits):  # type: ignore[no-untyped-call]
            coded, self._coded = self._coded, None  # stays None if encoding fails
            words = None if self._recoder is None else self._recoder.code(bits)
            if coded is not None and words is not None:
                self._coded = replace(coded, words=words)
                self._plan = None if self._plan is None else self._plan.recoded(self._coded)
            else:
                del coded
                self._encode_anew(bits)

    def _encode_anew(self, bits: Tensor) -> None:
        from neuzip.kernels.rans.triton import encode as triton_encode

        self._recoder = self._plan = self._open = None  # frees their memory for the encoder
        fmt = self._fmt
        encoded = triton_encode.encode(bits, fmt, scratch=SCRATCH, spare=SPARE)
        self._coded = CodedTensor(
            fmt, encoded.kept_bits, self.numel, encoded.table, encoded.index, encoded.words,
            {width: _padded(plane) for width, plane in encoded.planes.items()},
        )  # fmt: skip
        if encoded.kept_bits == fmt.mantissa_bits and CODING_SHARE * encoded.coding.nbytes <= bits.nbytes:
            self._recoder = triton_encode.Recoder(encoded, fmt, self.numel, scratch=SCRATCH)

    @property
    def errors(self) -> Tensor | None:
        """Int32 [1], not 0 once corrupt words were decoded; None before the first decoding."""
        return self._errors


def aligned_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 256, the alignment of arrays in a buffer."""
    return -(-nbytes // 256) * 256


def _padded(plane: Tensor) -> Tensor:
    """A plane of the encoder, extended to a multiple of ALIGNMENT elements of its memory."""
    return plane.as_strided((-(-plane.numel() // ALIGNMENT) * ALIGNMENT,), (1,))
