"""Weights as rANS codes them, decoded by a GPU for every product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from neuzip.errors import NeuzipError
from neuzip.kernels.dtypes import names_for, torch_dtype
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans.coded import ALIGNMENT, PATTERNS, TOGETHER, CodedTensor, raise_if_corrupt
from neuzip.kernels.rans.ops import ResidentTensor, decode_together
from neuzip.runtime.buffers import DecodeUnit
from neuzip.runtime.weights import base
from neuzip.runtime.weights.base import (
    CompressedWeight,
    RowRange,
    WeightUse,
    matrices,
    parts_within,
    rows_at_a_time,
)
from neuzip.runtime.weights.packed import PackedWeight

ANS_FORMATS = {torch_dtype(name): name for name in names_for("ans")}
"""Dtypes that are coded, and their names in safetensors."""


class AnsWeight(CompressedWeight):
    """Weights as rANS codes them, decoded for every product by a GPU.

    They take about 10.6 bits each in bf16, and quantized ones what the container takes.
    """

    residents: tuple[ResidentTensor, ...]
    chunks: tuple[tuple[int, int], ...]
    """For each part, where it is: resident tensor and chunk."""

    residency = "ans"

    @classmethod
    def for_use(cls, weight: torch.Tensor, use: WeightUse) -> AnsWeight | PackedWeight | None:
        """A weight coded by rANS; packed and exact if rows are looked up, as only these are decoded then."""
        return PackedWeight.for_use(weight, use, exact=True) if use.looked_up else cls.of(weight)

    @classmethod
    def of(cls, dense: torch.Tensor) -> AnsWeight:
        """Code a bf16, fp16 or fp32 weight [out, in] or [experts, out, in] on its GPU.

        Mantissa bits that no weight uses take no memory. Raises ValueError for other shapes, TypeError for
        other dtypes. Beside the codes, the coder needs memory of about twice LARGEST.
        """
        dense = matrices(dense).contiguous()
        if dense.dtype not in ANS_FORMATS:
            raise TypeError(f"rANS codes bfloat16, float16 or float32 weights here, not {dense.dtype}")
        residents, parts, chunks = [], [], []
        for rows in _coded_together(dense):
            bounds = [start for start, _ in rows] + [rows[-1][1]]
            residents.append(_code(dense.view(-1, dense.shape[-1]), bounds))
            for number, (start, stop) in enumerate(rows):
                parts.append((start, stop))
                chunks.append((len(residents) - 1, number))
        return cls._of(residents, parts, chunks, tuple(dense.shape), False, dense.dtype)

    @classmethod
    def of_coded(cls, coded: CodedTensor, shape: Sequence[int], dtype: torch.dtype) -> AnsWeight:
        """A weight [out, in] or [experts, out, in] that is coded already, whose streams are copied.

        It is decoded once, to see that its words are whole. Raises CorruptStream.
        """
        rows = rows_at_a_time(tuple(shape), dtype.itemsize)
        resident = ResidentTensor.of(coded, [0, *(stop * shape[-1] for _, stop in rows)])
        for number in range(resident.chunks):
            _, errors = resident.decode(number)
        raise_if_corrupt(errors, ["the tensor"])
        chunks = [(0, number) for number in range(resident.chunks)]
        return cls._of([resident], rows, chunks, tuple(shape), False, dtype)

    def suits(self, use: WeightUse) -> bool:
        """Whether it is read as it lies in a use: not where rows are looked up, as it is decoded whole."""
        return not use.looked_up

    @classmethod
    def _of(
        cls,
        residents: Sequence[ResidentTensor],
        rows: Sequence[tuple[int, int]],
        chunks: Sequence[tuple[int, int]],
        stored: tuple[int, ...],
        flipped: bool,
        dtype: torch.dtype,
    ) -> AnsWeight:
        units = [_ans_unit(residents[i], number, stored[-1], dtype) for i, number in chunks]
        parts = [RowRange(*bounds, unit) for bounds, unit in zip(rows, units, strict=True)]
        return cls._with_parts(residents, parts, chunks, stored, flipped, dtype)

    @classmethod
    def _with_parts(
        cls,
        residents: Sequence[ResidentTensor],
        parts: Sequence[RowRange],
        chunks: Sequence[tuple[int, int]],
        stored: tuple[int, ...],
        flipped: bool,
        dtype: torch.dtype,
    ) -> AnsWeight:
        weight = cls._wrapper(stored, flipped, dtype, residents[0].memory.device)
        weight.residents, weight.parts, weight.chunks = tuple(residents), tuple(parts), tuple(chunks)
        for name, resident in zip(weight._names(), residents, strict=True):  # for __tensor_flatten__
            setattr(weight, name, resident.memory)
        return weight

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes on their device; of an expert, those of all experts."""
        return sum(resident.nbytes for resident in self.residents)

    @property
    def host_bytes(self) -> int:
        """Bytes of the codes that lie in memory of the host."""
        return sum(resident.host_bytes for resident in self.residents)

    def chunks_of_experts(self) -> list[list[tuple[ResidentTensor, int]]]:
        """The coded tensors and chunks of each expert, in the order of its rows."""
        experts, out, _ = self.stored
        chunks: list[list[tuple[ResidentTensor, int]]] = [[] for _ in range(experts)]
        for (resident, number), part in zip(self.chunks, self.parts, strict=True):
            chunks[part.start // out].append((self.residents[resident], number))
        return chunks

    def offloaded(self, device_bytes: int = 0) -> AnsWeight:
        """This weight with its codes in memory of the host, from which its device decodes them.

        As many of the first ones as fit into `device_bytes` stay on the device.
        """
        residents = []
        for resident in self.residents:
            device_bytes -= resident.nbytes
            residents.append(resident if device_bytes >= 0 else resident.offloaded())
        rows = [(part.start, part.stop) for part in self.parts]
        return self._of(residents, rows, self.chunks, self.stored, self.flipped, self.dtype)

    @property
    def _storage(self) -> torch.Tensor:
        return self.residents[0].memory

    def _names(self) -> list[str]:
        return [f"memory{i}" for i in range(len(self.residents))]

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> AnsWeight:
        chunks = [
            chunk
            for chunk, part in zip(self.chunks, self.parts, strict=True)
            if rows.start <= part.start < rows.stop
        ]
        used = sorted({resident for resident, _ in chunks})
        return self._with_parts(
            [self.residents[i] for i in used],
            parts_within(self.parts, rows),
            [(used.index(resident), number) for resident, number in chunks],
            stored, flipped, self.dtype,
        )  # fmt: skip

    def _elsewhere(self, move: Callable[[torch.Tensor], torch.Tensor]) -> AnsWeight:
        residents = [resident.on(move(resident.memory)) for resident in self.residents]
        rows = [(part.start, part.stop) for part in self.parts]
        return self._of(residents, rows, self.chunks, self.stored, self.flipped, self.dtype)

    def _decode_all(self) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0].unit.dense()
        memory = self.residents[0].memory
        dense = memory.new_empty((self._rows, self.stored[-1]), dtype=self.dtype)
        for part in self.parts:
            dense[part.start : part.stop] = part.unit.dense()
        return dense

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        rows = tuple((part.start, part.stop) for part in self.parts)
        layouts = tuple((resident.layout, resident.bounds, resident.host) for resident in self.residents)
        return self._names(), (layouts, rows, self.chunks, self.stored, self.flipped, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        arrays: dict[str, torch.Tensor], context: Any, size: object, stride: object
    ) -> AnsWeight:
        layouts, *rest = context
        memories = [arrays[f"memory{i}"] for i in range(len(layouts))]
        residents = [ResidentTensor(m, *layout) for m, layout in zip(memories, layouts, strict=True)]
        return AnsWeight._of(residents, *rest)


def _coded_together(dense: torch.Tensor) -> Iterator[list[tuple[int, int]]]:
    """Ranges of rows that are decoded one by one, as many together as have LARGEST bytes."""
    size = dense.shape[-1] * dense.dtype.itemsize
    together: list[tuple[int, int]] = []
    for start, stop in rows_at_a_time(tuple(dense.shape), dense.dtype.itemsize):
        if together and (stop - together[0][0]) * size > base.LARGEST:
            yield together
            together = []
        together.append((start, stop))
    yield together


def _code(rows: torch.Tensor, bounds: list[int]) -> ResidentTensor:
    """Rows of a dense matrix, coded, with the bounds of their chunks. Checks that they are restored."""
    from neuzip.kernels.rans.triton import encode as triton_encode

    columns, fmt = rows.shape[1], FORMATS[ANS_FORMATS[rows.dtype]]
    bits = rows[bounds[0] : bounds[-1]].view(-1).view(PATTERNS[fmt.bits])
    with torch.cuda.device_of(bits):  # type: ignore[no-untyped-call]
        encoded = triton_encode.encode(bits, fmt)
        coded = CodedTensor(
            fmt, encoded.kept_bits, bits.numel(), encoded.table, encoded.index, encoded.words,
            {width: _filled_up(plane) for width, plane in encoded.planes.items()},
        )  # fmt: skip
        del encoded
        chunks = [(bound - bounds[0]) * columns for bound in bounds]
        resident = ResidentTensor.of(coded, bounds=chunks)
        del coded
        _require_restored(resident, bits)
    return resident


def _require_restored(resident: ResidentTensor, bits: torch.Tensor) -> None:
    """Raise AssertionError or CorruptStream unless all chunks are decoded to `bits`. Waits for the device.

    A launch decodes up to TOGETHER chunks: those of small experts take whole blocks each.
    """
    bounds, right = list(pairwise(resident.bounds)), []
    for first in range(0, len(bounds), TOGETHER):
        numbers = range(first, min(first + TOGETHER, len(bounds)))
        outs = [torch.empty(resident.capacity(n), dtype=torch.uint8, device=bits.device) for n in numbers]
        for number, own in zip(numbers, decode_together([(resident, n) for n in numbers], outs), strict=True):
            right.append((own == bits[slice(*bounds[number])]).all())
    all_right = torch.stack(right).all()
    raise_if_corrupt(resident.errors, ["a weight coded just now"])
    if not all_right:
        raise AssertionError("a weight coded just now is not what it was")


def _filled_up(plane: torch.Tensor) -> torch.Tensor:
    """A plane of the encoder, with what fills its memory up."""
    return plane.as_strided((-(-plane.numel() // ALIGNMENT) * ALIGNMENT,), (1,))


def _ans_unit(resident: ResidentTensor, number: int, columns: int, dtype: torch.dtype) -> DecodeUnit:
    return DecodeUnit(
        resident.capacity(number), resident.memories, (resident, number, columns, dtype), _decode_chunks
    )


def require_decoder(device: torch.device) -> None:
    """Raise NeuzipError for a device that decodes no AnsWeight: a CPU, but in Triton's interpreter."""
    if device.type == "cpu":
        from neuzip.kernels.rans.triton.warp import INTERPRETED

        if not INTERPRETED.value:
            raise NeuzipError(
                "an AnsWeight on the CPU cannot be decoded",
                "move the model to a CUDA device before it is used",
            )


def _decode_chunks(
    coded: Sequence[tuple[ResidentTensor, int, int, torch.dtype]], memories: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    require_decoder(coded[0][0].memory.device)
    chunks = [(resident, number) for resident, number, _, _ in coded]
    targets = [memory for memory in memories if memory is not None]
    if targets:
        bits = decode_together(chunks, targets)
    else:
        bits = [resident.decode(number)[0] for resident, number in chunks]
    return [b.view(dtype).view(-1, columns) for b, (_, _, columns, dtype) in zip(bits, coded, strict=True)]
