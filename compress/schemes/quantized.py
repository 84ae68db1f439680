"""Weights that are whole numbers times a step, rounded to nearest, or with codes from elsewhere.

The codes and values themselves are those of quantized_coding, which loads torch: nothing here does before a
tensor is coded or decoded. Codes are coded on the CPU, whatever the device is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from neuzip.compress.pieces import NotWorthwhile, is_worthwhile
from neuzip.compress.scheme import Scheme, require_own_keys
from neuzip.errors import NeuzipError, UsageError
from neuzip.formats.records import QuantizedRecord
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels.dtypes import names_for
from neuzip.kernels.float_fields import Bits, non_finite
from neuzip.kernels.float_fields.values import normal_fp32

from .code_tables import code_bits
from .codec import Codec, Declined, EncodedTensor, GridCoding, StoredTensor, TensorInput, checksums, register
from .lossless import CODEC as LOSSLESS_CODEC
from .lossless import on_gpu
from .raw import RAW, without_coding
from .truncated import NonFinite

if TYPE_CHECKING:
    from neuzip.compress.prepared import Codes
    from neuzip.kernels.grid import Grid

    from .quantized_coding import QuantizedDecoder


LARGE = 1 << 20
"""Weights of a tensor from which on the header leaves room for all forms that a tensor may get."""


class QuantizedCodec(Codec[QuantizedRecord]):
    """Codes through the coder of exponents, and one step, perhaps with factors of rows and columns."""

    record = QuantizedRecord
    kind = "quantized"
    keys = ("step", "row_factors", "column_factors")
    rounds = True
    coding_streams = ("grid", "index")

    def check(self, scheme: Scheme) -> None:
        """Raise UsageError for a step that is none, and for factors that are not true or false."""
        require_own_keys(scheme)
        step = scheme.step
        if step is None:
            raise UsageError("the scheme 'quantized' needs a step", "add `step`, such as 0.01")
        if type(step) not in (int, float) or normal_fp32(step) is None:
            raise UsageError(
                f"`step={step!r}`: is no positive number that fp32 has",
                "give the distance between neighbouring values, such as 0.01",
            )
        for name in ("row_factors", "column_factors"):
            if type(getattr(scheme, name)) is not bool:
                raise UsageError(f"`{name}={getattr(scheme, name)!r}` is not true or false")

    def words(self, scheme: Scheme) -> str:
        """The scheme in a few words."""
        rows, columns = scheme.row_factors, scheme.column_factors
        return f"step={scheme.step:g}" + (" row factors" if rows else "") + (" column factors" * columns)

    def applies(self, info: TensorInfo, scheme: Scheme) -> tuple[Scheme, str]:
        """The scheme, without row factors for a tensor of one row; RAW for tensors that are not coded."""
        note = without_coding(info)
        if note:
            return RAW, note
        return (scheme if len(info.shape) > 1 else replace(scheme, row_factors=False)), ""

    def forms(self, info: TensorInfo, scheme: Scheme) -> list[Sequence[str]]:
        """The streams that most tensors get: of a small tensor, room for others would show in the size."""
        if info.numel >= LARGE:
            return super().forms(info, scheme)
        return [[name for name in self.streams(scheme) if name != "low"]]

    def predict(self, tensor: TensorInput, scheme: Scheme) -> int:
        """The stored bytes of a tensor, extrapolated from a sample that is rounded with factors of 1."""
        from . import quantized_coding as coding  # loads torch

        exact = LOSSLESS_CODEC.predict_exact(tensor)
        codes = _sample_codes(tensor.sample, tensor, scheme)
        if codes is None:
            return exact
        bits = code_bits(int(codes.min()), int(codes.max()))
        counted = coding.count(coding.shifted(codes, bits), bits)
        rows, columns = scheme.row_factors, scheme.column_factors
        return min(exact, coding.expected_bytes(counted, tensor.info, rows=rows, columns=columns))

    def encode(self, tensor: TensorInput, scheme: Scheme) -> EncodedTensor:
        """Record and streams. Raises Declined for weights without codes, or that take no less."""
        from neuzip.kernels.grid import OutOfRange

        from . import quantized_coding as coding  # loads torch

        if tensor.numel == 0:
            raise NotWorthwhile
        codes, grid = _prepared(tensor) if tensor.prepared is not None else (None, _grid(tensor, scheme))
        try:
            quantized = coding.quantize(
                tensor.read, tensor.info, tensor.fmt, grid, codes, tensor.parallel
            )  # fmt: skip
        except NonFinite as error:
            raise Declined("holds infinities or NaNs: kept lossless") from error
        except OutOfRange as error:
            raise Declined(f"{error.message}: kept lossless") from error
        how = quantized.coding(tensor.parallel)
        streams = quantized.streams(how, tensor.parallel)
        nbytes = sum(stream.nbytes for stream in streams.values())
        exact = LOSSLESS_CODEC.predict_exact(tensor)
        if nbytes >= exact or not is_worthwhile(nbytes, tensor.info.nbytes):
            raise Declined("takes no less as codes: kept lossless")
        is_lossy = quantized.restored != quantized.original
        record = QuantizedRecord(
            quantized.restored, code_bits=quantized.bits, low_bits=how.low_bits or None,
            row_factors=grid.rows is not None or None, column_factors=grid.columns is not None or None,
            streams=checksums(streams),
            original=quantized.original if is_lossy else None, loss=quantized.loss if is_lossy else None,
        )  # fmt: skip
        return EncodedTensor(record, streams)

    def bound(self, record: QuantizedRecord) -> Literal["fields", "codes"] | None:
        """What entropy bounds the stored bytes: that of the codes."""
        return "codes"

    def decoder(self, stored: StoredTensor[QuantizedRecord]) -> QuantizedDecoder:
        """What decodes ranges of a tensor; fp8 and fp64 on the CPU whatever the device."""
        from .quantized_coding import QuantizedDecoder

        record = stored.record
        return QuantizedDecoder(
            stored.read_stream, stored.length, stored.info, stored.fmt, record.code_bits,
            record.low_bits or 0, rows=bool(record.row_factors), columns=bool(record.column_factors),
            on_gpu=on_gpu(stored) if stored.info.dtype in names_for("ans") else None,
        )  # fmt: skip

    def coding(self, stored: StoredTensor[QuantizedRecord]) -> GridCoding | None:
        """How the decoder on a GPU reads the streams; None for fp8 and fp64, which the CPU decodes."""
        from .quantized_coding import columns_of

        if stored.info.dtype not in names_for("ans"):
            return None
        decoder = self.decoder(stored)
        grid = decoder.grid
        rows, columns = (0 if factors is None else factors.numel() for factors in (grid.rows, grid.columns))
        low = stored.record.low_bits or 0
        return GridCoding(
            stored.fmt, stored.record.code_bits - low, low, columns_of(stored.info), grid.step, rows, columns,
            decoder.blocks.table,
        )  # fmt: skip


def _grid(tensor: TensorInput, scheme: Scheme) -> Grid:
    """The grid of a rule: its step, and factors by the spread of rows and columns."""
    from neuzip.kernels.grid import Grid

    from .quantized_coding import spread_of

    assert scheme.step is not None
    if not (scheme.row_factors or scheme.column_factors):
        return Grid(scheme.step)
    spread = spread_of(tensor.read, tensor.info, tensor.fmt)
    rows = spread.row_factors if scheme.row_factors else None
    return Grid(scheme.step, rows, spread.column_factors if scheme.column_factors else None)


def _prepared(tensor: TensorInput) -> tuple[Codes, Grid]:
    """The codes that a tensor comes with, flat, and their grid. Raises NeuzipError if they do not fit it."""
    assert tensor.prepared is not None
    codes, grid = tensor.prepared
    info = tensor.info
    if codes.dtype != np.int16 or codes.shape not in (info.shape, (info.numel,)):
        raise NeuzipError(
            f"{info.name}: the prepared codes are {codes.dtype} of shape {list(codes.shape)}, the tensor has "
            f"the shape {list(info.shape)}",
            "prepare them for this checkpoint, as int16",
        )
    try:
        grid.rows_and_columns(info.shape)
    except ValueError as error:
        raise NeuzipError(f"{info.name}: the prepared factors do not fit: {error}") from error
    return np.ascontiguousarray(codes).reshape(-1), grid


def _sample_codes(sample: Bits, tensor: TensorInput, scheme: Scheme) -> Codes | None:
    """The codes of some weights with factors of 1; None if the tensor has none."""
    from neuzip.kernels.dtypes import torch_dtype
    from neuzip.kernels.grid import Grid, OutOfRange

    from .quantized_coding import as_floats

    assert scheme.step is not None
    if non_finite(sample, tensor.fmt).any():
        return None
    try:
        codes = Grid(scheme.step).codes(as_floats(sample, torch_dtype(tensor.info.dtype)))
    except OutOfRange:
        return None
    return np.asarray(codes.numpy())


register(QuantizedCodec())
