"""Floats to streams and back, exactly: exponents through rANS, sign and mantissa as they are.

Mantissa bits that are zero in every weight of a tensor are not stored. So fp32 that was bf16 once takes a
third of its size, and a tensor rounded to k bits (see `truncated`) takes 1 + k bits and its exponents.

`encode` reads its tensor twice, piece by piece: a histogram first, then the coding. `Decoder` reads any
range. Neither holds more than the streams.

Both work on a GPU too, if they are given one: there a tensor is read once, and coded as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from neuzip.compress.pieces import (
    PIECE,
    Fill,
    Map,
    NotWorthwhile,
    Observe,
    Read,
    ReadStream,
    expect_length,
    ignore,
    is_worthwhile,
    pieces,
    plane_starts,
)
from neuzip.compress.scheme import Scheme
from neuzip.errors import BUG_OR_MEMORY, NeuzipError
from neuzip.formats.container import Stream, padded_stream
from neuzip.formats.records import LosslessRecord
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels import rans
from neuzip.kernels.float_fields import (
    FORMATS,
    Bits,
    Census,
    FloatFormat,
    census,
    empty_planes,
    plane_bytes,
    split,
    unpack_fields,
)

from .codec import (
    Codec,
    EncodedTensor,
    FloatCoding,
    StoredTensor,
    TensorInput,
    checksums,
    register,
)
from .coded_blocks import (
    SCRATCH,
    CodedBlocks,
    block_streams,
    expected_block_bytes,
    naming_block,
    read_table,
    table_stream,
)
from .raw import RAW, without_coding

if TYPE_CHECKING:
    from neuzip.compress.gpu import Gpu, GpuCoder


def encode(
    read: Read,
    numel: int,
    fmt: FloatFormat,
    parallel: Map = map,
    observe: Observe = ignore,
    gpu: Gpu | None = None,
) -> tuple[int, dict[str, Stream]]:
    """Code a tensor of `numel` weights, on `gpu` if that is given: the mantissa bits kept, and the streams.

    `observe` is shown all pieces in order, once. Raises NotWorthwhile when the streams would be no smaller
    than the tensor.
    """
    if gpu is not None and numel:
        coder = gpu.coder(numel, fmt)

        def send(piece: tuple[int, int]) -> Bits:
            bits = read(*piece)
            coder.put(piece[0], bits)
            return bits

        for bits in parallel(send, pieces(numel)):
            observe(bits)
        return finish(coder, numel, fmt)

    def count(piece: tuple[int, int]) -> tuple[Census, Bits]:
        bits = read(*piece)
        return census(bits, fmt), bits

    counted = None
    for part, bits in parallel(count, pieces(numel)):
        counted = part if counted is None else counted + part
        observe(bits)
    if counted is None:
        raise NotWorthwhile
    kept_bits = counted.kept_bits(fmt)
    table = rans.build_table(counted.exponents, counted.pairs)

    planes = empty_planes(numel, kept_bits)

    def code(piece: tuple[int, int]) -> rans.RansEncoded:
        start, stop = piece
        exponents = SCRATCH.exponents_for(fmt, stop - start)
        part = {
            width: plane[start * width // 8 : start * width // 8 + plane_bytes(width, stop - start)]
            for width, plane in planes.items()
        }
        split(read(start, stop), fmt, kept_bits, exponents, part)
        return rans.encode(exponents, table, SCRATCH.words_for(stop - start, table.group))

    coded = list(parallel(code, pieces(numel)))
    return kept_bits, _streams(
        table, [part.index for part in coded], [part.words for part in coded],
        [[plane] for plane in planes.values()], numel, fmt,
    )  # fmt: skip


def finish(coder: GpuCoder, numel: int, fmt: FloatFormat) -> tuple[int, dict[str, Stream]]:
    """Code a tensor that was sent to a GPU: mantissa bits and streams as of `encode`, or NotWorthwhile."""
    coded = coder.finish()
    return coded.kept_bits, _streams(
        coded.table, coded.index, coded.words, list(coded.planes.values()), numel, fmt
    )


def _streams(
    table: rans.Table,
    index: list[npt.NDArray[np.uint16]],
    words: list[npt.NDArray[np.uint16]],
    planes: list[list[npt.NDArray[np.uint8]]],
    numel: int,
    fmt: FloatFormat,
) -> dict[str, Stream]:
    """The streams, from parts that follow each other; `planes` are the widest first."""
    streams = (
        {"table": table_stream(table)}
        | block_streams(index, words)
        | {
            "sign_mantissa": Stream([p for plane in planes for p in padded_stream(plane).parts]),
        }
    )
    if not is_worthwhile(sum(s.nbytes for s in streams.values()), numel * fmt.bits // 8):
        raise NotWorthwhile
    return streams


def expected_bytes(counted: Census, numel: int, fmt: FloatFormat) -> int:
    """About what the streams of `numel` weights take, or the tensor where they are no smaller.

    `counted` are the weights, or a sample of them. Nothing is coded.
    """
    plain = numel * fmt.bits // 8
    if numel == 0:
        return plain
    streams = expected_block_bytes(counted, numel) + plane_starts(1 + counted.kept_bits(fmt), numel)[1]
    return streams if is_worthwhile(streams, plain) else plain


class LosslessDecoder:
    """Decodes ranges of one tensor from its streams: the inverse of `encode`.

    `length` gives the length of a stream in bytes. With `on_gpu` ranges are decoded there, and multiplied by
    the normaliser of blocks of `block_size` weights. Raises NeuzipError when the streams contradict each
    other; whoever knows the file and the tensor says so.
    """

    def __init__(
        self,
        read_stream: ReadStream,
        length: Callable[[str], int],
        numel: int,
        fmt: FloatFormat,
        kept_bits: int,
        on_gpu: OnGpu | None = None,
        block_size: int | None = None,
    ) -> None:
        self._on_gpu = on_gpu
        self._block_size = block_size
        self._read_stream = read_stream
        self._numel = numel
        self._fmt = fmt
        self._kept_bits = kept_bits
        if not 0 <= kept_bits <= fmt.mantissa_bits:
            raise NeuzipError(f"{fmt.name} has no {kept_bits} mantissa bits")
        self.plane_starts, end = plane_starts(1 + kept_bits, numel)
        expect_length("sign_mantissa", length("sign_mantissa"), end)
        self._blocks = CodedBlocks(read_stream, length, numel, read_table(read_stream, length, fmt))

    @property
    def coding(self) -> FloatCoding:
        """How a decoder that gets the streams elsewhere reads them."""
        return FloatCoding(
            self._fmt, self._kept_bits, self._block_size, self._blocks.table, self.plane_starts
        )

    def read(self, start: int, stop: int, out: Bits | None = None) -> Bits:
        """The bit patterns of weights `start` to `stop`, in `out` if that is given."""
        if not 0 <= start <= stop <= self._numel:
            raise ValueError(f"weights {start} to {stop} of {self._numel}")
        first, last = start // rans.BLOCK, -(-stop // rans.BLOCK)
        begin, end = first * rans.BLOCK, min(last * rans.BLOCK, self._numel)
        if start == stop:
            return np.empty(0, self._fmt.dtype)
        if self._on_gpu is not None:
            decoded = self._decoded_on(self._on_gpu, first, last, end)
        else:
            whole = (start, stop) == (begin, end)
            decoded = out if whole and out is not None else np.empty(end - begin, self._fmt.dtype)
            self._decode_here(first, last, decoded)
        part = decoded[start - begin : stop - begin]
        if out is None or decoded is out:
            return part
        out[:] = part
        return out

    def _decode_here(self, first: int, last: int, out: Bits) -> None:
        """Decode the weights from block `first` on into `out`; the last is in block `last - 1`."""
        begin, numel = first * rans.BLOCK, out.size
        words, index = self._blocks.words_of(first, last)
        planes = {
            width: self._read_plane(at + begin * width // 8, plane_bytes(width, numel))
            for width, at in self.plane_starts.items()
        }
        fields = unpack_fields(planes, numel, self._kept_bits)
        with naming_block(first):
            rans.decode_floats(words, index, self._blocks.table, fields, self._fmt, self._kept_bits, out)

    def _decoded_on(self, on: OnGpu, first: int, last: int, end: int) -> Bits:
        """Weights from block `first` on up to `end`, in block `last - 1`."""
        begin, blocks = first * rans.BLOCK, self._blocks
        ranges: dict[str | int, tuple[str, int, int]] = {"words": ("words", *blocks.extent(first, last))}
        for width, start in self.plane_starts.items():
            start += begin * width // 8
            ranges[width] = "sign_mantissa", start, start + plane_bytes(width, end - begin)
        if self._block_size is not None:
            ranges["normaliser"] = "normaliser", begin // self._block_size, -(-end // self._block_size)
        decoded = on.gpu.decode(
            self._fmt, self._kept_bits, blocks.table, blocks.index[first:last], end - begin, ranges, on.fill,
            self._block_size,
        )  # fmt: skip
        if decoded is not None:
            return decoded
        # The GPU does not say where: the CPU does, as if it had been the one to find out.
        on_cpu = copy.copy(self)
        on_cpu._on_gpu = None
        for start in range(begin, end, PIECE):
            on_cpu.read(start, min(start + PIECE, end))
        raise NeuzipError(
            f"the words from block {first} on are corrupt on the GPU and not on the CPU",
            BUG_OR_MEMORY,
        )

    def _read_plane(self, at: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._read_stream("sign_mantissa", at, at + nbytes)


@dataclass(frozen=True)
class OnGpu:
    """A GPU to decode on, and what fills its memory with streams."""

    gpu: Gpu
    fill: Fill


def on_gpu(stored: StoredTensor[Any]) -> OnGpu | None:
    """The GPU that decodes a stored tensor, if there is one."""
    return None if stored.gpu is None or stored.fill is None else OnGpu(stored.gpu, stored.fill)


class LosslessCodec(Codec[LosslessRecord]):
    """Every bit kept: exponents through rANS, sign and mantissa as they are."""

    record = LosslessRecord
    kind = "lossless"
    coding_streams = ("table", "index")

    def applies(self, info: TensorInfo, scheme: Scheme) -> tuple[Scheme, str]:
        """The scheme, or RAW for tensors without floats and for small ones."""
        note = without_coding(info)
        return (RAW, note) if note else (scheme, "")

    def describe(self, record: LosslessRecord, dtype: str) -> str:
        """The scheme in a few words: with the mantissa bits, where not all of the dtype are stored."""
        fmt = FORMATS.get(dtype)
        if fmt is None or record.mantissa_bits >= fmt.mantissa_bits:
            return record.text
        return f"{record.text}, {record.mantissa_bits} of {fmt.mantissa_bits} mantissa bits"

    def predict_exact(self, tensor: TensorInput) -> int:
        """The stored bytes of a tensor, extrapolated from a sample."""
        return expected_bytes(census(tensor.sample, tensor.fmt), tensor.numel, tensor.fmt)

    def encode_exact(self, tensor: TensorInput) -> EncodedTensor:
        """Record and streams. Raises NotWorthwhile."""
        whole = xxhash.xxh3_64()
        mantissa_bits, streams = encode(
            tensor.read, tensor.numel, tensor.fmt, tensor.parallel,
            lambda bits: whole.update(bits.data), tensor.gpu,
        )  # fmt: skip
        record = LosslessRecord(whole.hexdigest(), mantissa_bits=mantissa_bits, streams=checksums(streams))
        return EncodedTensor(record, streams)

    def decoder(self, stored: StoredTensor[LosslessRecord]) -> LosslessDecoder:
        """What decodes ranges of a tensor."""
        record = stored.record
        return LosslessDecoder(
            stored.read_stream, stored.length, stored.info.numel, stored.fmt, record.mantissa_bits,
            on_gpu(stored),
        )  # fmt: skip

    def coding(self, stored: StoredTensor[LosslessRecord]) -> FloatCoding:
        """How the decoder of floats on a GPU reads the streams."""
        return self.decoder(stored).coding


CODEC = LosslessCodec()
register(CODEC)

LOSSLESS = Scheme("lossless")
