"""Weights of -1, 0 and 1 times a scale, as in BitNet b1.58 (arXiv 2402.17764): packed codes, and scales.

    codes   trits   5 codes a byte, in the tensor's order (quantizers.pack_trits)
            2bit    16 codes a 32-bit word, rows of whole words, ready to multiply (quantizers.pack_ternary)
    scale   fp32 or fp16, little-endian: one for the tensor, or one for each group of a row; it multiplies

A weight comes back as scale * code, rounded once to the dtype of its tensor. Weights that were -s, +0 and s
come back bit for bit, whatever the quantiser: such a tensor is lossless. A tensor with an infinity or a NaN
has no ternary form.

This module loads torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import xxhash
from torch import Tensor

from neuzip.compress.pieces import NotWorthwhile, expect_length, is_worthwhile, padded, pieces
from neuzip.compress.scheme import Scheme
from neuzip.errors import NeuzipError
from neuzip.formats.container import Stream, padded_stream
from neuzip.formats.records import Loss, TernaryRecord
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels import quantizers
from neuzip.kernels.dtypes import names_for, torch_dtype
from neuzip.kernels.float_fields import Bits, FloatFormat
from neuzip.kernels.quantizers import Ternary

from .ternary_layout import CODES_A_WORD, TRITS_A_BYTE, NoTernaryForm, TernaryLayout
from .truncated import ErrorSums

ReadTensor = Callable[[str, int, int], Tensor]
"""read(name, start, stop): bytes start to stop of a stream, uint8 on any device."""

TORCH_DTYPES = {name: torch_dtype(name) for name in names_for("ternary")}
"""The dtypes of tensors that have a ternary form."""

QUANTIZERS: dict[str, Callable[..., Ternary]] = {
    "absmean": quantizers.absmean,
    "absmean-clamped": partial(quantizers.absmean, clamped=True),  # transformers' bitnet, online
    "least-squares": quantizers.least_squares,
}

GLANCE = 4096
"""Weights of a row that are looked at before all are."""


@dataclass(frozen=True)
class EncodedTernary:
    """A tensor's streams and their layout. `quantizer` made it: "exact" if its values stay what they were."""

    quantizer: str
    layout: TernaryLayout
    streams: dict[str, Stream]

    @property
    def is_zero(self) -> bool:
        """Whether all weights are 0."""
        return not any(part.any() for part in self.streams["scale"].parts)

    def decoder(self, dtype: torch.dtype) -> TernaryDecoder:
        """What reads these streams back."""
        data = {name: np.concatenate(stream.parts) for name, stream in self.streams.items()}
        return TernaryDecoder(
            lambda name, start, stop: torch.from_numpy(data[name][start:stop]),
            lambda name: data[name].nbytes,
            dtype,
            self.layout,
        )


def encode(weight: Tensor, scheme: Scheme, *, for_absmean: bool = False) -> EncodedTernary:
    """Quantise a tensor [..., in] of bf16, fp16 or fp32 by `scheme`, and pack it.

    `for_absmean`: whoever reads the floats takes their absmean again, as transformers does of an online
    bitnet checkpoint: one scale a tensor is stored as alpha / density, which gives alpha back.

    Weights that have a ternary form already keep it, exactly but for the sign of zeros. Raises NoTernaryForm,
    or NotWorthwhile when the streams would be no smaller than the tensor.
    """
    layout = TernaryLayout.of_scheme(tuple(weight.shape), scheme)
    quantizer, ternary = "exact", find_exact(weight, layout.group)
    if ternary is None:
        if not bool(weight.isfinite().all()):
            raise NoTernaryForm("holds infinities or NaNs")
        quantizer = scheme.quantizer
        ternary = QUANTIZERS[quantizer](weight, group=layout.group)
        if for_absmean and ternary.group is None:
            scale = quantizers.scale_for_absmean_reader(ternary, weight.dtype).float()
            ternary = replace(ternary, scale=scale)
    elif layout.scale_dtype == "F16" and not torch.equal(ternary.scale.half().float(), ternary.scale):
        layout = replace(layout, scale_dtype="F32")  # what is exact stays so
    return _encode(quantizer, ternary, layout, weight.nbytes)


def encode_exact(weight: Tensor) -> EncodedTernary:
    """Pack a tensor [..., in] whose values are ternary already, with a scale for all or for each row.

    Raises NoTernaryForm for any other, or NotWorthwhile.
    """
    ternary = find_exact(weight)
    if ternary is None:
        raise NoTernaryForm("has other values than -s, 0 and s")
    return _encode("exact", ternary, TernaryLayout(tuple(weight.shape)), weight.nbytes)


def _encode(quantizer: str, ternary: Ternary, layout: TernaryLayout, nbytes: int) -> EncodedTernary:
    layout = replace(layout, group=ternary.group)
    scale = ternary.scale.half() if layout.scale_dtype == "F16" else ternary.scale
    if not bool(scale.isfinite().all()) or not torch.equal(scale > 0, ternary.scale > 0):
        raise NoTernaryForm("has scales that fp16 cannot hold")
    if not is_worthwhile(layout.nbytes, nbytes):
        raise NotWorthwhile
    return EncodedTernary(quantizer, layout, {"codes": _pack(ternary.codes, layout), "scale": _bytes(scale)})


def restored(coded: EncodedTernary, bits: Bits, fmt: FloatFormat) -> tuple[str, Loss]:
    """The checksum of what the streams of a tensor decode to, and its loss against the original `bits`."""
    decoder = coded.decoder(TORCH_DTYPES[fmt.name])
    running, error = xxhash.xxh3_64(), ErrorSums()
    for start, stop in pieces(bits.size):
        part = decoder.read(start, stop)
        running.update(part.data)
        error += ErrorSums.between(bits[start:stop], part, fmt)
    return running.hexdigest(), error.ternary_loss


def find_exact(weight: Tensor, group: int | None = None) -> Ternary | None:
    """The ternary form that the values of a tensor [..., in] have already, or None.

    One scale for all is looked for first, then one a row, then one a `group`. Zeros may have signs, which the
    form has not.
    """
    if weight.dim() == 0 or weight.numel() == 0:
        return None
    unsigned, columns = weight.masked_fill(weight == 0, 0), weight.shape[-1]
    for size in dict.fromkeys([None, columns, group]):
        some = weight.reshape(-1)[: min(size or columns, GLANCE)].abs()
        if bool(((some == 0) | (some == some.max())).all()):  # so far; most tensors fail here already
            ternary = quantizers.exact(unsigned, group=size)
            if ternary is not None:
                return ternary
    return None


def _pack(codes: Tensor, layout: TernaryLayout) -> Stream:
    if layout.packing == "trits":  # in pieces of whole bytes: packing takes several times their memory
        flat, step = codes.reshape(-1), TRITS_A_BYTE << 20
        parts = [quantizers.pack_trits(flat[at : at + step]) for at in range(0, flat.numel(), step)]
        return padded_stream([part.numpy() for part in parts])
    return _bytes(quantizers.pack_ternary(codes))


def _bytes(tensor: Tensor) -> Stream:
    return padded_stream([tensor.contiguous().reshape(-1).view(torch.uint8).numpy()])


class TernaryDecoder:
    """Decodes ranges of one ternary tensor: the inverse of `encode`.

    `length` gives the length of a stream in bytes. Everything happens on the device of the streams. Raises
    NeuzipError when they contradict the layout, or hold what no encoder writes.
    """

    def __init__(
        self, read_stream: ReadTensor, length: Callable[[str], int], dtype: torch.dtype, layout: TernaryLayout
    ) -> None:
        self._read_stream, self._dtype, self.layout = read_stream, dtype, layout
        if not layout.shape:
            raise NeuzipError("a tensor without dimensions cannot be ternary")
        if layout.group is not None and layout.group > layout.columns:
            raise NeuzipError(f"a group of {layout.group} weights is longer than a row")
        for stream, nbytes in layout.stream_bytes.items():
            expect_length(stream, length(stream), padded(nbytes))
        stored = read_stream("scale", 0, layout.stream_bytes["scale"])
        self.scale = stored.view(torch.float16 if layout.scale_dtype == "F16" else torch.float32).float()
        if not bool((self.scale.isfinite() & ~self.scale.signbit()).all()):
            raise NeuzipError("the stream 'scale' has a scale that is negative, infinite or no number")

    def codes(self, start: int, stop: int) -> Tensor:
        """The codes of weights `start` to `stop`: int8."""
        if start == stop:
            return self.scale.new_empty(0, dtype=torch.int8)
        try:
            return self._trits(start, stop) if self.layout.packing == "trits" else self._words(start, stop)
        except ValueError as error:
            raise NeuzipError(f"the stream 'codes': {error}") from error

    def weights(self, start: int, stop: int) -> Tensor:
        """Weights `start` to `stop`, in the tensor's dtype."""
        return (self.codes(start, stop) * self._scales(start, stop)).to(self._dtype)

    def read(self, start: int, stop: int) -> Bits:
        """The bit patterns of weights `start` to `stop`."""
        patterns = self.weights(start, stop).cpu().view(torch.int8).numpy()
        bits: Bits = patterns.view(f"<u{self._dtype.itemsize}")
        return bits

    def ternary(self) -> Ternary:
        """The whole tensor as codes and scales."""
        parts = [self.codes(*piece) for piece in pieces(self.layout.numel)]
        codes = torch.cat(parts) if len(parts) > 1 else parts[0]
        layout = self.layout
        return Ternary(codes.view(layout.shape), self.scale.view(layout.scale_shape), layout.group)

    def _trits(self, start: int, stop: int) -> Tensor:
        first, last = start // TRITS_A_BYTE, -(-stop // TRITS_A_BYTE)
        begin, end = first * TRITS_A_BYTE, min(last * TRITS_A_BYTE, self.layout.numel)
        codes = quantizers.unpack_trits(self._read_stream("codes", first, last), end - begin)
        return codes[start - begin : stop - begin]

    def _words(self, start: int, stop: int) -> Tensor:
        columns, a_row = self.layout.columns, self.layout.words_a_row
        (row, column), (last_row, last_column) = divmod(start, columns), divmod(stop - 1, columns)
        first = row * a_row + column // CODES_A_WORD
        last = last_row * a_row + last_column // CODES_A_WORD + 1
        words = self._read_stream("codes", 4 * first, 4 * last).view(torch.int32)
        codes = quantizers.unpack_ternary(words, CODES_A_WORD * (last - first))
        if columns % CODES_A_WORD:
            place = torch.arange(codes.numel(), device=codes.device) + CODES_A_WORD * (first % a_row)
            filler = place % (CODES_A_WORD * a_row) >= columns
            if bool(codes[filler].any()):
                raise ValueError("rows are not filled up with zeros")
            codes = codes[~filler]
        begin = column % CODES_A_WORD
        return codes[begin : begin + stop - start]

    def _scales(self, start: int, stop: int) -> Tensor:
        """The scales of weights `start` to `stop`, or the one of all."""
        group, columns = self.layout.group, self.layout.columns
        if group is None:
            return self.scale
        if columns % group == 0 and group <= stop - start:
            first, last = start // group, -(-stop // group)
            begin = start - first * group
            return self.scale[first:last].repeat_interleave(group)[begin : begin + stop - start]
        place = torch.arange(start, stop, device=self.scale.device)
        return self.scale[place // columns * -(-columns // group) + place % columns // group]


def decoder_of(
    info: TensorInfo, record: TernaryRecord, read_stream: ReadTensor, length: Callable[[str], int]
) -> TernaryDecoder:
    """The decoder of a stored ternary tensor, whose streams may be anywhere. Raises NeuzipError."""
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise NeuzipError(f"{info.dtype} cannot be ternary")
    return TernaryDecoder(read_stream, length, dtype, TernaryLayout.of_record(info.shape, record))


def as_tensor(bits: Bits, fmt: FloatFormat, shape: tuple[int, ...]) -> Tensor:
    """Bit patterns seen as a tensor; read-only ones are copied."""
    patterns = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(patterns.view(np.uint8)).view(TORCH_DTYPES[fmt.name]).view(shape)
