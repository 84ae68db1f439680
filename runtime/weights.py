"""Weights that stay compressed in memory and are tensors all the same: parameters of unchanged modules.

    weight = PackedWeight.of(dense)                   or AnsWeight.of(dense)
    linear.weight = nn.Parameter(weight, requires_grad=False)

They have the shape, dtype and device of the dense weight. What is done with them:

| operation                                       | PackedWeight            | exact, and AnsWeight          |
|-------------------------------------------------|-------------------------|-------------------------------|
| F.linear, x @ w.t(), addmm; x @ w `transposed`  | from the packed form    | decoded to a shared buffer    |
| x @ w                                           | decoded                 | the same, up to LARGEST bytes |
| F.embedding, w[indices]                         | only the rows looked up | AnsWeight: decoded            |
| w.t(), w.mT, w[i] and unbind of experts         | as compressed           | as compressed                 |
| detach, clone, deepcopy, to(device), state_dict | as compressed           | as compressed                 |
| all others: other products and views, to(dtype) | decoded, to a copy      | decoded, to a copy            |
| writing, pickle, to(dtype) of a module          | refused                 | refused                       |

So they cannot be trained, but gradients flow through them. `dense()` is the explicit way to decode.

What exact weights and AnsWeights yield is what the dense weight yields, bit for bit, up to LARGEST bytes; of
larger ones some rows are decoded and multiplied at a time, and a library may sum smaller products in another
order. Experts are matrices: each is decoded by itself.

What torch.compile traces decodes to fresh memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from neuzip.errors import NeuzipError
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.packed_linear import ops as packed_ops
from neuzip.kernels.packed_linear.form import TILE_ROWS
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor
from neuzip.kernels.rans.coded import ALIGNMENT, PATTERNS, CodedTensor, raise_if_corrupt
from neuzip.kernels.rans.ops import ResidentTensor, decode_together

from . import buffers
from .buffers import Unit

LARGEST = 128 << 20
"""Dense bytes that are decoded at a time, and coded together."""

AHEAD_ROWS = 256
"""Of x: up to so many, weights are decoded together with those that follow. Beside more the gain is small."""

TILE = 128
"""Rows of large weights are decoded in multiples of it: whole tiles of a matrix product."""

ANS_FORMATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

aten = torch.ops.aten
Self = TypeVar("Self", bound="CompressedWeight")


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a weight's matrix, decoded together."""

    start: int
    stop: int
    unit: Unit


class CompressedWeight(torch.Tensor):
    """What PackedWeight and AnsWeight share.

    `stored` is the shape of what is compressed, [out, in] or [experts, out, in]; if `flipped`, the tensor's
    last two dimensions are the other way round. `parts` cover the experts * out rows.

    Products ask these, and not the tensor for its `dim()` or `dtype`: that goes through `__torch_function__`.
    """

    stored: tuple[int, ...]
    stored_dtype: torch.dtype
    flipped: bool
    parts: tuple[Part, ...]

    def __new__(cls: type[Self], weight: Self, requires_grad: bool = False) -> Self:
        """A weight again, as `nn.Parameter` makes it: libraries call the class of a parameter so."""
        if not isinstance(weight, cls):
            raise TypeError(f"{cls.__name__}(...) takes one; {cls.__name__}.of(...) compresses a tensor")
        made: Any = weight.detach().requires_grad_(requires_grad)
        made._is_param = True
        return made  # type: ignore[no-any-return]

    def __init__(self, weight: object, requires_grad: bool = False) -> None:
        super().__init__()

    @classmethod
    def _wrapper(
        cls: type[Self], stored: tuple[int, ...], flipped: bool, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """A tensor of a shape without memory."""
        *outer, out, columns = stored
        shape = (*outer, columns, out) if flipped else stored
        lengths = (out * columns, 1, columns) if flipped else (out * columns, columns, 1)
        with torch.inference_mode(False):  # views of a tensor from outside that mode have to be from there
            made: Self = torch.Tensor._make_wrapper_subclass(
                cls,
                shape,
                strides=lengths[3 - len(stored) :],
                dtype=dtype,
                device=device,
                requires_grad=False,
            )
        made.stored, made.stored_dtype, made.flipped = stored, dtype, flipped
        return made

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes that it takes on its device; of an expert, those of all experts, which it shares."""

    @abstractmethod
    def _again(self: Self, stored: tuple[int, ...], flipped: bool, rows: slice) -> Self:
        """Some rows of the same weights in the same memory, with another shape."""

    @abstractmethod
    def _elsewhere(self: Self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same weights in other memory, which `move` makes."""

    @abstractmethod
    def _decode_all(self) -> torch.Tensor:
        """All rows, dense, [rows, in], in memory of their own."""

    @property
    @abstractmethod
    def _held(self) -> torch.Tensor:
        """The first of the tensors that hold it."""

    @property
    def _traced(self) -> bool:
        """Whether this is no real tensor but one of torch.compile."""
        return type(self._held) is not torch.Tensor

    def data_ptr(self) -> int:
        """The address of what holds it: libraries tell by it which weights are tied."""
        return self._held.data_ptr()

    def dense(self) -> torch.Tensor:
        """The weight as an ordinary tensor in memory of its own, bit for bit."""
        with torch.no_grad():
            dense = self._decode_all().view(self.stored)
        return dense.mT if self.flipped else dense

    def expert(self: Self, number: int) -> Self:
        """The matrix of an expert, as compressed: w[number]."""
        count, out, columns = self.stored
        if not -count <= number < count:
            raise IndexError(f"there is no expert {number} of {count}")
        start = number % count * out
        return self._again((out, columns), self.flipped, slice(start, start + out))

    @property
    def _rows(self) -> int:
        return math.prod(self.stored[:-1])

    def _transposed(self: Self) -> Self:
        return self._again(self.stored, not self.flipped, slice(0, self._rows))

    def _decoded(
        self, part: Part, product: Callable[[torch.Tensor], torch.Tensor], *, ahead: bool
    ) -> torch.Tensor:
        """What a product makes of the rows of a part, [rows, in], dense for that moment."""
        if self._traced:
            return product(part.unit.dense())
        return buffers.use(part.unit, product, ahead=ahead)

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ stored.T + bias, of a matrix."""
        ahead = _is_few(x)
        if len(self.parts) == 1:
            return self._decoded(self.parts[0], lambda rows: F.linear(x, rows, bias), ahead=ahead)
        y = x.new_empty(*x.shape[:-1], self._rows)
        for part in self.parts:
            share = None if bias is None else bias[part.start : part.stop]
            y[..., part.start : part.stop] = self._decoded(part, partial(_linear_of, x, share), ahead=ahead)
        return y

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [*ids.shape, in]."""
        return F.embedding(ids, self._decode_all())

    # What torch asks of tensors that hold others.

    @abstractmethod
    def __tensor_flatten__(self) -> tuple[list[str], Any]: ...

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Short cuts for the usual operations; the others, and what is traced, go to `__torch_dispatch__`."""
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            short_cut = _SHORT_CUTS.get(func)
            if short_cut is not None:
                result = short_cut(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func.decompose(*args, **kwargs)  # in inference mode composite operations arrive whole
        if result is not NotImplemented:
            return result
        _refuse_writing(func, args, kwargs)
        args, kwargs = tree_map_only(CompressedWeight, lambda w: w.dense(), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        bits = 8 * self.stored_bytes / max(1, self.numel())
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"{bits:.2f} bits a weight)"
        )

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = made = self._elsewhere(torch.clone).requires_grad_(self.requires_grad)
            made._is_param = getattr(self, "_is_param", False)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NeuzipError(
            f"parameters of the class {type(self).__name__} cannot be pickled",
            "save the model with save_pretrained, or what dense() returns",
        )


class PackedWeight(CompressedWeight):
    """Weights in the packed form, about 11.4 bits each in bf16, that products read as they lie.

    `exact` decodes for products instead, so that results are those of the dense weight bit for bit.
    """

    packed: PackedTensor
    first: int
    """The row of `packed` with which it begins."""

    exact: bool
    words: torch.Tensor
    far_index: torch.Tensor
    far_words: torch.Tensor
    row_start: torch.Tensor
    escapes: torch.Tensor
    turn_index: torch.Tensor
    turn_escapes: torch.Tensor

    @classmethod
    def of(cls, dense: torch.Tensor, transposed: bool = False, exact: bool = False) -> PackedWeight:
        """Pack a bf16 or fp16 weight [out, in] or [experts, out, in] on its device.

        `transposed` is for weights [in, out] and [experts, in, out] that are used as x @ w, such as Conv1D's.
        Raises ValueError for other shapes and for more than 65,536 columns, TypeError for other dtypes.
        """
        dense = _matrices(dense)
        stored = (dense.mT if transposed else dense).contiguous()
        packed = packed_ops.pack(stored.view(-1, stored.shape[-1]))
        return cls._of(packed, tuple(stored.shape), transposed, 0, exact)

    @classmethod
    def _of(
        cls, packed: PackedTensor, stored: tuple[int, ...], flipped: bool, first: int, exact: bool
    ) -> PackedWeight:
        made = cls._wrapper(stored, flipped, packed.dtype, packed.device)
        made.packed, made.first, made.exact = packed, first, exact
        for name in ARRAYS:  # for __tensor_flatten__
            setattr(made, name, getattr(packed, name))
        made.parts = _packed_parts(packed, stored, first) if exact else ()
        return made

    @property
    def stored_bytes(self) -> int:
        """See CompressedWeight."""
        return self.packed.nbytes

    @property
    def _held(self) -> torch.Tensor:
        return self.words

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> PackedWeight:
        made = self._of(self.packed, stored, flipped, self.first + rows.start, False)
        made.exact = self.exact
        made.parts = _among(self.parts, rows)
        return made

    def _elsewhere(self, move: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
        moved: dict[str, Any] = {name: move(getattr(self.packed, name)) for name in ARRAYS}
        packed = replace(self.packed, **moved)
        packed.wait()
        return self._of(packed, self.stored, self.flipped, self.first, self.exact)

    def _decode_all(self) -> torch.Tensor:
        return packed_ops.decode(self.packed, slice(self.first, self.first + self._rows))

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.exact:
            return super()._linear(x, bias)
        if self._rows == self.packed.shape[0]:
            return packed_ops.linear(x, self.packed, bias)
        if self.words.is_cuda and self.first % TILE_ROWS == 0:
            return packed_ops.linear(x, self._own(), bias)
        return F.linear(x, self._decode_all(), bias)

    def _own(self) -> PackedTensor:
        """An expert's own matrix, for kernels. Far words and escapes of all stay together."""
        end = self.first + self._rows
        tiles = slice(self.first // TILE_ROWS, -(-end // TILE_ROWS))
        return replace(
            self.packed,
            shape=(self._rows, self.stored[-1]),
            words=self.words[tiles],
            far_index=self.far_index[tiles],
            row_start=self.row_start[self.first : end + 1],
            turn_index=self.turn_index[tiles],
        )

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        if self._rows < self.packed.shape[0]:  # beyond an expert's rows are those of its neighbours
            ids = torch.where((ids >= 0) & (ids < self._rows), ids + self.first, -1)
        return packed_ops.rows(self.packed, ids)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        p = self.packed
        numbers = p.shape, p.dtype, p.low_bits, p.base, p.shift
        return [*ARRAYS], (numbers, self.stored, self.flipped, self.first, self.exact)

    @staticmethod
    def __tensor_unflatten__(
        arrays: dict[str, Any], context: Any, size: object, stride: object
    ) -> PackedWeight:
        numbers, *rest = context
        return PackedWeight._of(PackedTensor(*numbers, **arrays), *rest)


class AnsWeight(CompressedWeight):
    """Weights as rANS codes them, about 10.6 bits each in bf16, decoded for every product by a GPU."""

    residents: tuple[ResidentTensor, ...]
    chunks: tuple[tuple[int, int], ...]
    """For each part, where it is: resident tensor and chunk."""

    @classmethod
    def of(cls, dense: torch.Tensor) -> AnsWeight:
        """Code a bf16, fp16 or fp32 weight [out, in] or [experts, out, in] on its GPU.

        Mantissa bits that no weight uses take no memory. Raises ValueError for other shapes, TypeError for
        other dtypes. Beside the codes, the coder needs memory of about twice LARGEST.
        """
        dense = _matrices(dense).contiguous()
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
        parts = [Part(*where, unit) for where, unit in zip(rows, units, strict=True)]
        return cls._with_parts(residents, parts, chunks, stored, flipped, dtype)

    @classmethod
    def _with_parts(
        cls,
        residents: Sequence[ResidentTensor],
        parts: Sequence[Part],
        chunks: Sequence[tuple[int, int]],
        stored: tuple[int, ...],
        flipped: bool,
        dtype: torch.dtype,
    ) -> AnsWeight:
        made = cls._wrapper(stored, flipped, dtype, residents[0].memory.device)
        made.residents, made.parts, made.chunks = tuple(residents), tuple(parts), tuple(chunks)
        for name, resident in zip(made._names(), residents, strict=True):  # for __tensor_flatten__
            setattr(made, name, resident.memory)
        return made

    @property
    def stored_bytes(self) -> int:
        """See CompressedWeight."""
        return sum(resident.nbytes for resident in self.residents)

    @property
    def _held(self) -> torch.Tensor:
        return self.residents[0].memory

    def _names(self) -> list[str]:
        return [f"memory{i}" for i in range(len(self.residents))]

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> AnsWeight:
        kept = [i for i, part in enumerate(self.parts) if rows.start <= part.start < rows.stop]
        chunks = [self.chunks[i] for i in kept]
        used = sorted({resident for resident, _ in chunks})
        return self._with_parts(
            [self.residents[i] for i in used],
            _among(self.parts, rows),
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
        kept = tuple((resident.layout, resident.bounds) for resident in self.residents)
        return self._names(), (kept, rows, self.chunks, self.stored, self.flipped, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        arrays: dict[str, torch.Tensor], context: Any, size: object, stride: object
    ) -> AnsWeight:
        kept, *rest = context
        memories = [arrays[f"memory{i}"] for i in range(len(kept))]
        residents = [ResidentTensor(m, *k) for m, k in zip(memories, kept, strict=True)]
        return AnsWeight._of(residents, *rest)


def _matrices(dense: torch.Tensor) -> torch.Tensor:
    """A matrix or several, with at least one weight."""
    if dense.dim() not in (2, 3) or not dense.numel():
        raise ValueError(
            f"a weight to compress is a matrix, or one an expert, and not empty: not {tuple(dense.shape)}"
        )
    return dense.detach()


def _rows_at_a_time(stored: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Ranges of rows of at most LARGEST bytes, or of one row, each within one matrix."""
    *_, out, columns = stored
    step = max(1, min(out, LARGEST // (columns * itemsize)))
    if step > TILE and step < out:
        step = step // TILE * TILE
    return [
        (before + start, before + min(start + step, out))
        for before in range(0, math.prod(stored[:-1]), out)
        for start in range(0, out, step)
    ]


def _among(parts: Sequence[Part], rows: slice) -> tuple[Part, ...]:
    """The parts within some rows, counted from the first of these on."""
    return tuple(
        Part(part.start - rows.start, part.stop - rows.start, part.unit)
        for part in parts
        if rows.start <= part.start < rows.stop
    )


def _linear_of(x: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    return F.linear(x, rows, bias)


# The packed form, decoded.


def _packed_parts(packed: PackedTensor, stored: tuple[int, ...], first: int) -> tuple[Part, ...]:
    size = stored[-1] * packed.dtype.itemsize
    return tuple(
        Part(
            start,
            stop,
            Unit((stop - start) * size, packed.arrays, (packed, slice(first + start, first + stop)), _unpack),
        )
        for start, stop in _rows_at_a_time(stored, packed.dtype.itemsize)
    )


def _unpack(
    coded: Sequence[tuple[PackedTensor, slice]], memories: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    def one(packed: PackedTensor, rows: slice, memory: torch.Tensor | None) -> torch.Tensor:
        out = None if memory is None else memory.view(packed.dtype).view(-1, packed.shape[1])
        return packed_ops.decode(packed, rows, out)

    return [one(*where, memory) for where, memory in zip(coded, memories, strict=True)]


# The codes of rANS.


def _coded_together(dense: torch.Tensor) -> Iterator[list[tuple[int, int]]]:
    """Ranges of rows that are decoded one by one, as many together as have LARGEST bytes."""
    size = dense.shape[-1] * dense.dtype.itemsize
    together: list[tuple[int, int]] = []
    for start, stop in _rows_at_a_time(tuple(dense.shape), dense.dtype.itemsize):
        if together and (stop - together[0][0]) * size > LARGEST:
            yield together
            together = []
        together.append((start, stop))
    yield together


def _code(rows: torch.Tensor, bounds: list[int]) -> ResidentTensor:
    """Rows of a dense matrix, coded, with the bounds of their chunks. Looks whether they are restored."""
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
        for number, (start, stop) in enumerate(pairwise(chunks)):
            decoded, errors = resident.decode(number)
            raise_if_corrupt(errors, ["a weight coded just now"])
            if not torch.equal(decoded, bits[start:stop]):
                raise AssertionError("a weight coded just now is not what it was")
    return resident


def _filled_up(plane: torch.Tensor) -> torch.Tensor:
    """A plane of the encoder, with what fills its memory up."""
    return plane.as_strided((-(-plane.numel() // ALIGNMENT) * ALIGNMENT,), (1,))


def _ans_unit(resident: ResidentTensor, number: int, columns: int, dtype: torch.dtype) -> Unit:
    return Unit(resident.room(number), (resident.memory,), (resident, number, columns, dtype), _decode_chunks)


def _decode_chunks(
    coded: Sequence[tuple[ResidentTensor, int, int, torch.dtype]], memories: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    if coded[0][0].memory.device.type == "cpu":
        from neuzip.kernels.rans.triton.warp import INTERPRETED

        if not INTERPRETED.value:
            raise NeuzipError(
                "an AnsWeight on the CPU cannot be decoded",
                "move the model to a CUDA device before it is used",
            )
    chunks = [(resident, number) for resident, number, _, _ in coded]
    there = [memory for memory in memories if memory is not None]
    if there:
        bits = decode_together(chunks, there)
    else:
        bits = [resident.decode(number)[0] for resident, number in chunks]
    return [b.view(dtype).view(-1, columns) for b, (_, _, columns, dtype) in zip(bits, coded, strict=True)]


# Short cuts take what the functions of torch take, and return NotImplemented where gradients, autocast or
# other subclasses have a say.


def _direct(x: Any, *others: Any) -> bool:
    """Whether ordinary tensors meet a weight in an ordinary way."""
    for tensor in (x, *others):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and tensor is not None:
            return False
    return not torch.is_autocast_enabled(x.device.type)


def _is_plain(x: Any, weight: CompressedWeight, bias: Any) -> bool:
    """Whether a product is of tensors of one dtype, and nothing else has a say."""
    return (
        _direct(x, bias)
        and not weight._traced
        and not _needs_graph(weight, x, bias)
        and bool(x.dtype == weight.stored_dtype)
    )


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or len(weight.stored) != 2:
        return NotImplemented
    if not _is_plain(x, weight, bias):
        return NotImplemented
    return weight._linear(x, bias)


def _addmm(bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    if out is not None or beta != 1 or alpha != 1 or not isinstance(weight, CompressedWeight):
        return NotImplemented
    if not _is_plain(x, weight, bias):
        return NotImplemented
    return _addmm_of(aten.addmm.default, bias, x, weight)


def _embedding(
    ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or len(weight.stored) != 2:
        return NotImplemented
    if max_norm is not None or not _direct(ids) or weight._traced or _needs_graph(weight, ids, None):
        return NotImplemented
    return weight._look_up(ids)


def _needs_graph(weight: CompressedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether autograd must see the operation itself. The packed product has gradients for x and bias."""
    if not torch.is_grad_enabled():
        return False
    if weight.requires_grad:
        return True
    exact = not isinstance(weight, PackedWeight) or weight.exact
    return exact and (x.requires_grad or (bias is not None and bias.requires_grad))


def _set_data(weight: Any, value: torch.Tensor) -> Any:
    """Make it another tensor. Whatever shares it sees that too.

    Not one of another dtype: modules assign such when they, or peft, cast all weights, and the model would be
    a dense one, unseen.
    """
    if not isinstance(weight, CompressedWeight):
        return NotImplemented
    if value.dtype != weight.dtype:
        raise NeuzipError(
            f"a {type(weight).__name__} of {weight.dtype} cannot become {value.dtype} where it lies",
            "leave its dtype alone, or make the model dense first: model.dequantize()",
        )
    other = value.detach()
    if isinstance(weight, torch.nn.Parameter):
        other = torch.nn.Parameter(other, requires_grad=False)
    torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]
    return None


def _refuse_item(weight: Any, index: Any, value: Any) -> Any:
    if isinstance(weight, CompressedWeight):
        raise _frozen(weight, "assigning to elements")
    return NotImplemented


def _frozen(weight: Any, what: str) -> NeuzipError:
    return NeuzipError(
        f"{what} would change a frozen {type(weight).__name__}",
        "change what dense() returns, and put that in its place",
    )


_SHORT_CUTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.Tensor.__setitem__: _refuse_item,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}


# Operations below autograd. A handler is given the operation and its arguments.


def _linear_op(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or weight.dim() != 2 or _any(x, bias):
        return NotImplemented
    return weight._linear(x, bias)


def _mm_of(func: Any, x: Any, weight: Any) -> Any:
    if not isinstance(weight, CompressedWeight) or _any(x):
        return NotImplemented
    return weight._linear(x, None) if weight.flipped else _product(func, x, weight, ahead=_is_few(x))


def _addmm_of(func: Any, bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not isinstance(weight, CompressedWeight) or _any(x, bias):
        return NotImplemented
    if weight.flipped and bias.dim() == 1 and beta == 1 and alpha == 1:
        return weight._linear(x, bias)
    return _product(func, bias, x, weight, beta=beta, alpha=alpha, ahead=_is_few(x))


def _mv_of(func: Any, weight: Any, x: Any) -> Any:
    if not isinstance(weight, CompressedWeight) or _any(x) or weight.flipped:
        return NotImplemented
    return weight._linear(x, None)


def _product(func: Any, *args: Any, ahead: bool, **kwargs: Any) -> Any:
    """A product of one weight that is decoded as a whole, to a shared buffer."""
    weights = [w for w in tree_leaves((args, kwargs)) if isinstance(w, CompressedWeight)]
    weight = weights[0]
    if len(weights) > 1 or len(weight.parts) != 1 or weight.dim() != 2:
        return NotImplemented

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        dense = rows.t() if weight.flipped else rows
        own = tree_map_only(CompressedWeight, lambda _: dense, (args, kwargs))
        return func(*own[0], **own[1])  # type: ignore[no-any-return]

    return weight._decoded(weight.parts[0], multiply, ahead=ahead)


def _is_few(x: torch.Tensor) -> bool:
    """Whether x [..., in] has so few rows that weights are decoded together with those that follow."""
    return x.numel() <= AHEAD_ROWS * x.shape[-1]


def _any(*tensors: Any) -> bool:
    return any(isinstance(tensor, CompressedWeight) for tensor in tensors)


def _embedding_of(func: Any, weight: Any, ids: Any, *_: Any, **__: Any) -> Any:
    if not isinstance(weight, CompressedWeight) or weight.flipped or weight.dim() != 2:
        return NotImplemented
    return weight._look_up(ids)


def _index_of(func: Any, weight: Any, indices: Any) -> Any:
    """w[ids]: rows of a matrix, matrices of experts."""
    if not isinstance(weight, PackedWeight) or len(indices) != 1:
        return NotImplemented
    ids, count = indices[0], weight.stored[0]
    if ids.dtype not in (torch.int32, torch.int64) or (weight.flipped and weight.dim() == 2):
        return NotImplemented
    ids = torch.where(ids < 0, ids + count, ids)
    if weight.dim() == 2:
        return weight._look_up(ids)
    out = weight.stored[1]
    matrices = weight._look_up(ids[..., None] * out + torch.arange(out, device=ids.device))
    return matrices.mT if weight.flipped else matrices


def _transpose_of(func: Any, weight: Any, first: int = 0, second: int = 1) -> Any:
    dims = weight.dim()
    if {first % dims, second % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    return weight._transposed()


def _permute_of(func: Any, weight: Any, order: Sequence[int]) -> Any:
    dims = weight.dim()
    if [i % dims for i in order] != [*range(dims - 2), dims - 1, dims - 2]:
        return NotImplemented
    return weight._transposed()


def _select_of(func: Any, weight: Any, dim: int, index: int) -> Any:
    return weight.expert(index) if weight.dim() == 3 and dim % 3 == 0 else NotImplemented


def _unbind_of(func: Any, weight: Any, dim: int = 0) -> Any:
    if weight.dim() != 3 or dim % 3:
        return NotImplemented
    return [weight.expert(i) for i in range(weight.shape[0])]


def _same(func: Any, weight: Any) -> Any:
    return weight._again(weight.stored, weight.flipped, slice(0, weight._rows))


def _clone_of(func: Any, weight: Any, *, memory_format: Any = None) -> Any:
    if weight.flipped and memory_format is torch.contiguous_format:
        return NotImplemented
    return weight._elsewhere(torch.clone)


def _to_copy_of(
    func: Any, weight: Any, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> Any:
    device = weight.device if device is None else torch.device(device)
    if dtype not in (None, weight.dtype) or device.type == "meta":
        return NotImplemented
    return weight._elsewhere(lambda t: t.to(device, non_blocking=non_blocking, copy=True))


def _made_like(func: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """New tensors that take only shape, dtype and device from a weight."""
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    if kwargs.get("device") is None:
        kwargs["device"] = weight.device
    return func(like, *args, **kwargs)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.linear.default: _linear_op,
    aten.mm.default: _mm_of,
    aten.addmm.default: _addmm_of,
    aten.mv.default: _mv_of,
    aten.embedding.default: _embedding_of,
    aten.index.Tensor: _index_of,
    aten.t.default: _transpose_of,
    aten.transpose.int: _transpose_of,
    aten.permute.default: _permute_of,
    aten.select.int: _select_of,
    aten.unbind.int: _unbind_of,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _clone_of,
    aten._to_copy.default: _to_copy_of,
    aten.empty_like.default: _made_like,
    aten.zeros_like.default: _made_like,
    aten.ones_like.default: _made_like,
    aten.full_like.default: _made_like,
    aten.rand_like.default: _made_like,
    aten.randn_like.default: _made_like,
    aten.new_empty.default: _made_like,
    aten.new_zeros.default: _made_like,
    aten.new_ones.default: _made_like,
    aten.new_full.default: _made_like,
    aten.new_empty_strided.default: _made_like,
}


def _refuse_writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise NeuzipError where an operation would write to a compressed weight."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in tree_leaves(given.get(argument.name)):
            if isinstance(value, CompressedWeight):
                raise _frozen(value, func._schema.name.removeprefix("aten::"))
