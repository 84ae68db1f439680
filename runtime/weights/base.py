"""The tensor class that all compressed weights share, and the tables of what is done with them.

`operations` fills the tables: which functions of torch have a short cut, and which operations a handler.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from neuzip.errors import NeuzipError
from neuzip.runtime import buffers
from neuzip.runtime.buffers import DecodeUnit

SMALLEST = 1 << 16
"""Weights from which on a parameter is compressed: below, a kernel's launch costs more than memory's."""

LARGEST = 128 << 20
"""Dense bytes that are decoded at a time, and coded together."""

AHEAD_ROWS = 256
"""Rows of x up to which weights are decoded together with those that follow. With more the gain is small."""

TILE = 128
"""Rows of large weights are decoded in multiples of it: whole tiles of a matrix product."""

SHORT_CUTS: dict[Any, Callable[..., Any]] = {}
"""Functions of torch, and what takes their arguments in their place, or returns NotImplemented."""

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Operations below autograd, and what takes the operation and its arguments, or returns NotImplemented."""

Self = TypeVar("Self", bound="CompressedWeight")


@dataclass(frozen=True)
class WeightUse:
    """What modules do with a weight: whether they look rows up, and whether it is stored [in, out]."""

    looked_up: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of a weight's matrix, decoded together."""

    start: int
    stop: int
    unit: DecodeUnit


class CompressedWeight(torch.Tensor):
    """A frozen matrix, or one matrix an expert, that is compressed in memory and is a tensor all the same.

    `stored` is the shape of what is compressed, [out, in] or [experts, out, in]; if `flipped`, the tensor's
    last two dimensions are the other way round. `parts` cover the experts * out rows. Products of `exact`
    weights decode; others read what is compressed.

    Products ask these, and not the tensor for its `dim()` or `dtype`: that goes through `__torch_function__`.
    """

    stored: tuple[int, ...]
    stored_dtype: torch.dtype
    flipped: bool
    parts: tuple[RowRange, ...]
    exact: bool = True
    residency: ClassVar[str] = ""
    """The residency that such parameters count as; "" for weights that are on their way into a model."""

    looks_up_rows: ClassVar[bool] = False
    """Whether `w[indices]` decodes the rows it names and no others."""

    def __new__(cls: type[Self], weight: torch.Tensor, requires_grad: bool = False) -> Self:
        """A weight again, as `nn.Parameter` makes it: libraries call the class of a parameter so.

        accelerate does for the meta tensor that marks where a weight of host memory belongs: it gets an
        ordinary parameter.
        """
        if not isinstance(weight, cls):
            if getattr(weight, "is_meta", False):
                return torch.nn.Parameter(weight, requires_grad)  # type: ignore[return-value]
            raise TypeError(f"{cls.__name__}(...) takes one; {cls.__name__}.of(...) compresses a tensor")
        parameter: Any = weight.detach().requires_grad_(requires_grad)
        parameter._is_param = True
        return parameter  # type: ignore[no-any-return]

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
            wrapper: Self = torch.Tensor._make_wrapper_subclass(
                cls,
                shape,
                strides=lengths[3 - len(stored) :],
                dtype=dtype,
                device=device,
                requires_grad=False,
            )
        wrapper.stored, wrapper.stored_dtype, wrapper.flipped = stored, dtype, flipped
        return wrapper

    @classmethod
    def for_use(cls, weight: torch.Tensor, use: WeightUse) -> CompressedWeight | None:
        """A contiguous dense weight, compressed where it lies; None if it has to stay dense.

        May give a weight of another class, where that suits the use better.
        """
        raise NotImplementedError(f"{cls.__name__} is no residency")

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes that it takes on its device; of an expert, those of all experts, which it shares."""

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes in pinned host memory, beside those on its GPU."""
        return 0

    def offloaded(self: Self, device_bytes: int = 0) -> Self:
        """The weight with what exceeds so many bytes on its GPU in pinned host memory, if it can be there.

        Results are the same bits. Raises NeuzipError where there is no such memory.
        """
        return self

    @abstractmethod
    def _again(self: Self, stored: tuple[int, ...], flipped: bool, rows: slice) -> Self:
        """Some rows of the same weights in the same memory, with another shape."""

    @abstractmethod
    def _elsewhere(self: Self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A copy of the weights in other memory, which `move` makes."""

    @abstractmethod
    def _decode_all(self) -> torch.Tensor:
        """All rows, dense, [rows, in], in memory of their own."""

    @property
    @abstractmethod
    def _storage(self) -> torch.Tensor:
        """The first of the ordinary tensors that hold the compressed weights."""

    @property
    def _traced(self) -> bool:
        """Whether this is no real tensor but one of torch.compile."""
        return type(self._storage) is not torch.Tensor

    def data_ptr(self) -> int:
        """The address of what holds it: libraries tell by it which weights are tied."""
        return self._storage.data_ptr()

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
        self, part: RowRange, product: Callable[[torch.Tensor], torch.Tensor], *, ahead: bool
    ) -> torch.Tensor:
        """The result of `product` with the rows of a part, [rows, in], dense for that moment."""
        if self._traced:
            return product(part.unit.dense())
        return buffers.use(part.unit, product, ahead=ahead)

    def _usual_linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """`_linear` of a matrix where few questions show that nothing else has a say, else None."""
        return None

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ stored.T + bias, of a matrix."""
        ahead = is_few(x)
        if len(self.parts) == 1:
            return self._decoded(self.parts[0], lambda rows: F.linear(x, rows, bias), ahead=ahead)
        y = x.new_empty(*x.shape[:-1], self._rows)
        for part in self.parts:
            share = None if bias is None else bias[part.start : part.stop]
            y[..., part.start : part.stop] = self._decoded(part, partial(_linear_rows, x, share), ahead=ahead)
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
            short_cut = SHORT_CUTS.get(func)
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
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func.decompose(*args, **kwargs)  # in inference mode composite operations arrive whole
        if result is not NotImplemented:
            return result
        refuse_writing(func, args, kwargs)
        args, kwargs = tree_map_only(CompressedWeight, lambda w: w.dense(), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        bits = 8 * (self.stored_bytes + self.host_bytes) / max(1, self.numel())
        host = ", in host memory" if self.host_bytes else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"{bits:.2f} bits a weight{host})"
        )

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = copy = self._elsewhere(torch.clone).requires_grad_(self.requires_grad)
            copy._is_param = getattr(self, "_is_param", False)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NeuzipError(
            f"parameters of the class {type(self).__name__} cannot be pickled",
            "save the model with save_pretrained, or what dense() returns",
        )


def matrices(dense: torch.Tensor) -> torch.Tensor:
    """A weight that can be compressed: a matrix or several, not empty. Raises ValueError for others."""
    if dense.dim() not in (2, 3) or not dense.numel():
        raise ValueError(
            f"a weight to compress is a matrix, or one an expert, and not empty: not {tuple(dense.shape)}"
        )
    return dense.detach()


def rows_at_a_time(stored: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
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


def parts_within(parts: Sequence[RowRange], rows: slice) -> tuple[RowRange, ...]:
    """The parts within some rows, counted from the first of these on."""
    return tuple(
        RowRange(part.start - rows.start, part.stop - rows.start, part.unit)
        for part in parts
        if rows.start <= part.start < rows.stop
    )


def _linear_rows(x: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    return F.linear(x, rows, bias)


def is_few(x: torch.Tensor) -> bool:
    """Whether x [..., in] has so few rows that weights are decoded together with those that follow."""
    return x.numel() <= AHEAD_ROWS * x.shape[-1]


def frozen(weight: Any, what: str) -> NeuzipError:
    """The error of an operation, `what`, that would change a compressed weight."""
    return NeuzipError(
        f"{what} would change a frozen {type(weight).__name__}",
        "change what dense() returns, and put that in its place",
    )


def refuse_writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise NeuzipError where an operation would write to a compressed weight."""
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in tree_leaves(arguments.get(argument.name)):
            if isinstance(value, CompressedWeight):
                raise frozen(value, func._schema.name.removeprefix("aten::"))
