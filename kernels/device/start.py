"""Launches of compiled kernels without Triton's own way from arguments to a kernel, which takes 50 us.

`JITFunction.run` binds arguments to names, specialises each of them, makes a string of all options, and looks
up the compiled kernel by that. Here a kernel is looked up by what Triton specialises on, and then given to
the same C function that Triton gives it to. `ArgumentKinds` says what that is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime._async_compile import FutureKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.device.memory_part import MemoryPart

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_INT32 = 1 << 31
_INT64 = 1 << 63

_MOST_MAPS = 4096
"""Tensor maps that are kept for a kernel, of some 500 bytes each."""


@dataclass(frozen=True)
class TensorBox:
    """What a TMA copy moves: a block of a tensor, and how it lies in shared memory."""

    shape: tuple[int, ...]
    layout: Any
    """A Gluon layout, `NVMMASharedLayout`."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.layout)))

    def __hash__(self) -> int:
        return self._hash


class BoxedTensor:
    """A TMA descriptor that is checked and encoded when a launch needs it, and encoded once if it is kept.

    `tensor` begins at a multiple of 16 bytes, its last dimension is contiguous, and its other strides are
    multiples of 16 bytes. `shape` and `strides` count elements.
    """

    __slots__ = ("_encoded", "_start", "base", "box", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self, tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: TensorBox
    ) -> None:
        self.base, self.shape, self.strides, self.box = tensor, shape, strides, box
        self._start: object = None
        self._encoded: list[Any] = []

    def descriptor(self) -> GluonDescriptor:
        """The descriptor that Triton takes. Raises AssertionError for what TMA cannot read."""
        return GluonDescriptor(
            self.base, list(self.shape), list(self.strides), list(self.box.shape), self.box.layout
        )

    def encoded(self, start: Start, at: int, meta: Any) -> list[Any]:
        """The arguments that a kernel takes in its place: a tensor map, shape and strides.

        They depend on nothing but the key below, so that a tensor at the address of an earlier one has its.
        """
        if self._start is not start:
            key = at, self.base.data_ptr(), self.shape, self.strides
            encoded = start.maps.get(key)
            if encoded is None:
                if len(start.maps) >= _MOST_MAPS:
                    start.maps.clear()
                encoded = start.maps[key] = nvidia.make_tensordesc_arg(self, meta)
            self._encoded, self._start = encoded, start
        return self._encoded


def triton_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a launch as Triton takes them."""
    return [
        one.descriptor() if type(one) is BoxedTensor else one.tensor() if type(one) is MemoryPart else one
        for one in arguments
    ]


_RUNTIME: dict[int, tuple[Any, list[str]]] = {}
"""Kernels by their number, each with the names of its parameters that are no constants."""


def with_named(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments and, behind them, those that a launch names in `options`, from which they go."""
    entry = _RUNTIME.get(id(kernel))
    if entry is None:
        names = [one.name for one in kernel.params if not one.is_constexpr]
        entry = _RUNTIME[id(kernel)] = kernel, names
    names = entry[1][len(arguments) :]
    if not names or not options.keys() >= set(names):
        return arguments
    return *arguments, *(options.pop(name) for name in names)


def argument_kinds(arguments: Sequence[Any], kinds: list[Any], values: list[Any]) -> bool:
    """Append what Triton specialises on to `kinds`, and what a launcher takes to `values`.

    Two lists of arguments with equal kinds have the same compiled kernel. Triton specialises on the dtype of
    a tensor and on whether it begins at a multiple of 16 bytes; on whether an int is 1, a multiple of 16, and
    of how many bits; on the type of other numbers; and on dtype, block and layout of a descriptor. False for
    arguments of other types, whose launch is left to Triton.

    Each argument appends one kind, a tensor two: its dtype, and then its alignment. A part of memory counts
    as a tensor. No kinds of one list are the beginning of others, so what follows them in a key is not
    mistaken for kinds.
    """
    for one in arguments:
        kind = type(one)
        if kind in _PLAIN:
            address = one.data_ptr()
            kinds += one.dtype, not address & 15
            # Memory of the host may have another address on the GPU, for which Triton asks the driver.
            values.append(address if one.is_cuda else one)
        elif kind is MemoryPart:
            kinds += one.kinds
            values.append(one.address)
        elif kind is int:
            if -_INT32 <= one < _INT32:
                kinds.append("1" if one == 1 else "int32" if one & 15 else "int32 aligned")
            else:
                kinds.append(_large_int_kind(one))
            values.append(one)
        elif one is None or kind is float or kind is bool:
            kinds.append(kind)
            values.append(one)
        elif kind is BoxedTensor:
            kinds.append((one.base.dtype, one.box))
            values.append(one)
        elif kind is GluonDescriptor or kind is TensorDescriptor:
            layout = repr(one.layout) if kind is GluonDescriptor else None
            kinds.append((kind, one.base.dtype, tuple(one.block_shape), layout))
            values.append(one)
        else:
            return False
    return True


def _large_int_kind(number: int) -> str:
    return ("int64" if -_INT64 <= number < _INT64 else "uint64") + ("" if number & 15 else " aligned")


class Start:
    """A compiled kernel that Triton has launched, with the C function that launches it.

    `tail` are values of the parameters behind the arguments, all of them constants.
    """

    def __init__(self, compiled: CompiledKernel, tail: Sequence[Any]) -> None:
        launcher = compiled.run
        signature = list(compiled.src.signature.values())
        places = [i for i, kind in enumerate(signature) if str(kind).startswith("tensordesc")]
        metas = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(places)
        self.maps: dict[Any, list[Any]] = {}
        self._encodings = [*zip(places, metas, strict=True)][::-1]  # from the last: one becomes several
        self._tail = tuple(tail)
        self._compiled = compiled  # keeps the function loaded
        # Triton wraps the function where it has descriptors to encode, which is done here.
        native = launcher.launch
        self._launch = inspect.getclosurevars(native).nonlocals["launcher"] if places else native
        function = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
        no_hooks = None, None, None
        no_scratch = None, None
        self._fixed: tuple[Any, ...]
        self._takes_tuple = hasattr(launcher, "kernel_signature")
        if self._takes_tuple:  # Triton 3.7
            how = launcher.arg_annotations, launcher.kernel_signature
            self._fixed = *function, compiled.packed_metadata, *no_hooks, *no_scratch, *how
        else:
            self._fixed = *function, *no_scratch, compiled.packed_metadata, *no_hooks

    def __call__(self, grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        """Launch it with `values` of `argument_kinds` on a stream's handle. It may write to `values`."""
        for at, meta in self._encodings:
            one = values[at]
            if type(one) is BoxedTensor:
                values[at : at + 1] = one.encoded(self, at, meta)
            else:
                values[at : at + 1] = nvidia.make_tensordesc_arg(one, meta)
        x, y, z = (*grid, 1, 1)[:3]
        if self._takes_tuple:
            self._launch(x, y, z, stream, *self._fixed, (*values, *self._tail))
        else:
            self._launch(x, y, z, stream, *self._fixed, *values, *self._tail)


_OF_KERNELS: dict[int, Start] = {}
"""Starts by the number of their compiled kernel, which lives as long as they."""


def start_of(kernel: Any, compiled: Any, arguments: int, options: dict[str, Any]) -> Start | None:
    """How a compiled kernel, which Triton has launched with so many arguments and options, starts again.

    None where Triton has to launch it each time: it needs memory of its own, an option is no constant of the
    kernel, an argument is one, or the launcher is of another kind than those of Triton 3.6 and 3.7.
    """
    if isinstance(compiled, FutureKernel):  # compiled by another thread
        compiled = compiled.result()
    if not isinstance(compiled, CompiledKernel) or compiled.module is None:
        return None  # interpreted, or compiled and not launched
    launcher = compiled.run
    if type(launcher) is not nvidia.CudaLauncher or not _is_known_driver():
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    first, behind = kernel.params[:arguments], kernel.params[arguments:]
    if any(one.is_constexpr for one in first) or not all(one.is_constexpr for one in behind):
        return None
    if id(compiled) not in _OF_KERNELS:
        _OF_KERNELS[id(compiled)] = Start(compiled, [options.get(one.name, one.default) for one in behind])
    return _OF_KERNELS[id(compiled)]


@functools.cache
def _is_known_driver() -> bool:
    """Whether Triton's launcher takes what `Start` gives it: the versions whose code that was read from."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) in ((3, 6), (3, 7))
