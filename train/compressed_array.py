"""Arrays of weights between their uses: as they are, or coded losslessly in memory.

    flat = held.open(buffer)     the weights, dense: in `buffer` if they are coded
    ...                          read them, or change them in place
    held.close(flat)             keep what they have become

A coded array takes 1 + kept mantissa bits and its exponents' entropy a weight, about 10.6 bits of bf16's 16.
It is coded as a whole, with one table, by Triton on a GPU and by numba on a CPU. What is decoded is what was
coded, bit for bit: NaNs and both zeros as well.
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
"""Bytes that the GPU's encoder may take beside what it writes: what is left is coded in the next turn."""

SPARE = 50
"""An array's words have memory for one in so many more, so that it can be coded again by the table it has."""

CODING_SHARE = 32
"""What the encoder reads of a table stays on the device if it takes at most one byte in so many of the dense
array: 0.67 MB where symbols are pairs, so this is for arrays of 21 MB and more."""

PATTERN_DTYPES = {16: (torch.int16, np.uint16), 32: (torch.int32, np.uint32)}


class StoredArray(Protocol):
    """An array of weights between its uses."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes between its uses."""
        ...

    def open(self, buffer: Tensor) -> Tensor:
        """The weights, [numel]; they may lie in `buffer`, uint8, of at least as many bytes."""
        ...

    def close(self, flat: Tensor) -> None:
        """Keep the weights that `open` gave, which may have changed."""
        ...


def store_array(flat: Tensor, coded: bool, *, triton: bool | None = None) -> StoredArray:
    """Hold a one-dimensional array. `triton` codes with it, which is the rule on a GPU and otherwise a test.

    Raises NeuzipError for a dtype that is not coded.
    """
    if not coded:
        return PlainArray(flat)
    if flat.dtype not in ANS_FORMATS:
        raise NeuzipError(
            f"weights of {flat.dtype} cannot be held compressed",
            "train in bfloat16, float16 or float32, or without compression",
        )
    made: StoredArray = (TritonCompressedArray if flat.is_cuda or triton else NumbaCompressedArray)(
        flat.numel(), flat.dtype
    )
    made.close(flat)
    return made


class PlainArray:
    """Weights as they are."""

    def __init__(self, flat: Tensor) -> None:
        self.numel, self.dtype, self._flat = flat.numel(), flat.dtype, flat

    @property
    def nbytes(self) -> int:
        """See Held."""
        return self._flat.nbytes

    def open(self, buffer: Tensor) -> Tensor:
        """See Held."""
        return self._flat

    def close(self, flat: Tensor) -> None:
        """See Held."""
        if flat.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(flat)


@dataclass(frozen=True, eq=False)
class _OnCpu:
    """What numba codes an array to."""

    kept: int
    table: rans.Table
    planes: CpuPlanes
    encoded: rans.RansEncoded


class NumbaCompressedArray:
    """Weights coded in the memory of the host."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self._fmt = FORMATS[ANS_FORMATS[dtype]]
        self._coded: _OnCpu | None = None

    @property
    def nbytes(self) -> int:
        """See Held."""
        assert self._coded is not None
        encoded, planes = self._coded.encoded, self._coded.planes.values()
        return encoded.words.nbytes + encoded.index.nbytes + sum(plane.nbytes for plane in planes)

    def open(self, buffer: Tensor) -> Tensor:
        """See Held."""
        assert self._coded is not None
        flat = buffer[: self.numel * self.dtype.itemsize].view(self.dtype)
        coded, bits = self._coded, _patterns(flat, self._fmt)
        fields = unpack_fields(coded.planes, self.numel, coded.kept)
        rans.decode_floats(
            coded.encoded.words, coded.encoded.index, coded.table, fields, self._fmt, coded.kept, bits
        )
        return flat

    def close(self, flat: Tensor) -> None:
        """See Held."""
        self._coded = None
        bits = _patterns(flat, self._fmt)
        counted = census(bits, self._fmt)
        kept = counted.kept_bits(self._fmt)
        table = rans.build_table(counted.exponents, counted.pairs)
        planes = empty_planes(self.numel, kept)
        exponents = np.empty(self.numel, self._fmt.exponent_dtype)
        split(bits, self._fmt, kept, exponents, planes)
        self._coded = _OnCpu(kept, table, planes, rans.encode(exponents, table))


def _patterns(flat: Tensor, fmt: FloatFormat) -> Bits:
    """The bit patterns of weights, in the same memory."""
    signed, unsigned = PATTERN_DTYPES[fmt.bits]
    patterns: Bits = flat.view(signed).numpy().view(unsigned)
    return patterns


class TritonCompressedArray:
    """Weights coded in the memory of a GPU; or of the host, by Triton's interpreter.

    A large array whose mantissas are used in full is coded again by the table that it has, to where it lies;
    by a new one if its words no longer fit there. What decodes it stays valid meanwhile.
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
        """See Held. Not among them are the decoder's own: 17 KB, and up to 24 bytes for 16,384 weights."""
        assert self._coded is not None
        coded = self._coded
        words = coded.words.nbytes if self._recoder is None else self._recoder.nbytes
        return words + coded.index.nbytes + sum(plane.nbytes for plane in coded.planes.values())

    def open(self, buffer: Tensor) -> Tensor:
        """See Held."""
        assert self._coded is not None
        if self._plan is None or self._open is None or self._open.data_ptr() != buffer.data_ptr():
            with torch.inference_mode(False):  # what is kept has to do for training too
                self._open = buffer[: self.numel * self.dtype.itemsize].view(self.dtype)
                self._plan = self._plan_for(self._open.view(PATTERNS[self._fmt.bits]))
        self._plan.launch()
        return self._open

    def _plan_for(self, out: Tensor) -> triton_decode.DecodePlan:
        if self._plan is not None:
            return self._plan.into(out)
        from neuzip.kernels.rans.triton import decode as triton_decode

        assert self._coded is not None  # as `open` has seen
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            plan = triton_decode.prepare([self._coded], [out], errors=self._errors)
        self._errors = plan.errors
        return plan

    def close(self, flat: Tensor) -> None:
        """See Held."""
        bits = flat.view(PATTERNS[self._fmt.bits])
        with torch.cuda.device_of(bits):  # type: ignore[no-untyped-call]
            coded, self._coded = self._coded, None  # not to be believed before all is done
            words = None if self._recoder is None else self._recoder.code(bits)
            if coded is not None and words is not None:
                self._coded = replace(coded, words=words)
                self._plan = None if self._plan is None else self._plan.recoded(self._coded)
            else:
                del coded
                self._from_scratch(bits)

    def _from_scratch(self, bits: Tensor) -> None:
        from neuzip.kernels.rans.triton import encode as triton_encode

        self._recoder = self._plan = self._open = None  # their memory may be used again
        fmt = self._fmt
        encoded = triton_encode.encode(bits, fmt, scratch=SCRATCH, spare=SPARE)
        self._coded = CodedTensor(
            fmt, encoded.kept_bits, self.numel, encoded.table, encoded.index, encoded.words,
            {width: _filled_up(plane) for width, plane in encoded.planes.items()},
        )  # fmt: skip
        if encoded.kept_bits == fmt.mantissa_bits and CODING_SHARE * encoded.coding.nbytes <= bits.nbytes:
            self._recoder = triton_encode.Recoder(encoded, fmt, self.numel, scratch=SCRATCH)

    @property
    def errors(self) -> Tensor | None:
        """Int32 [1], not 0 once corrupt words have been decoded; None before any were."""
        return self._errors


def aligned_bytes(nbytes: int) -> int:
    """Bytes of an array among others in a buffer: each begins at a multiple of 256."""
    return -(-nbytes // 256) * 256


def _filled_up(plane: Tensor) -> Tensor:
    """A plane of the encoder, with what fills its memory up."""
    return plane.as_strided((-(-plane.numel() // ALIGNMENT) * ALIGNMENT,), (1,))
