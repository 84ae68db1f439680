"""Triton's interpreter without its needless work: the time of a kernel on the CPU is that of its bookkeeping.

`quicken()` changes nothing that kernels compute. It keeps what the interpreter finds out again for each
operation: the built-in names of triton.language, numpy's name of a dtype, the shape of a type of blocks, that
two operands are of one type, a block of one integer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@functools.cache
def quicken() -> None:
    """Do all of it, before the first kernel; a second call (conftest.py is imported twice) does nothing."""
    look_up_names_once()
    replace_names_once()
    leave_out_checks_of_overflow()
    remember_types()
    pass_over_like_operands()
    pass_over_like_integers()
    unwrap_only_constants()
    call_builtins_directly()
    leave_out_checks_of_sizes()


def look_up_names_once() -> None:
    """The interpreter looks for the built-ins among all names of triton.language, to replace them."""

    @functools.cache
    def builtin_names(place: object) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]

    def patch_builtin(place: object, builder: object, scope: object) -> None:
        for name in builtin_names(place):
            member = getattr(place, name)
            if tl.core.is_builtin(member):  # or else it has been replaced
                interpreter._patch_attr(place, name, member, builder, scope)

    for place in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        builtin_names(place)  # before any of them is replaced
    interpreter._patch_builtin = patch_builtin


def replace_names_once() -> None:
    """A function called by a kernel replaces the names anew, though the kernel has them replaced already.

    What a called function replaces stays so for ever, and what the kernel replaces until it ends.
    """
    patch = interpreter._patch_lang
    run = interpreter.GridExecutor.__call__
    by_kernel: set[ModuleType] = set()
    by_function: set[ModuleType] = set()

    def languages(function: Any) -> set[ModuleType]:
        return {value for value in (tl, tl.core) if any(v is value for v in function.__globals__.values())}

    languages = functools.cache(languages)

    def executed(self: Any, *args: Any, **kwargs: Any) -> None:
        before = set(by_kernel)
        by_kernel.update(languages(self.fn))
        try:
            run(self, *args, **kwargs)
        finally:
            by_kernel.clear()
            by_kernel.update(before)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        needed = languages(self.fn)
        if not needed <= by_kernel | by_function:
            patch(self.fn)
            by_function.update(needed)
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = executed
    interpreter.InterpretedFunction.__call__ = called


def leave_out_checks_of_overflow() -> None:
    """Sums and products of integers are done again in 64 bits, for an assertion left out unless debugging."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def remember_types() -> None:
    """Types of blocks are made for each operation, with a few objects for each dimension; few differ."""
    block_type, tensor, dtype = tl.core.block_type, tl.core.tensor, tl.core.dtype
    make_block, make_tensor, same = block_type.__init__, tensor.__init__, dtype.__eq__
    numpy_dtype = functools.cache(interpreter._get_np_dtype)
    pointer = np.dtype(np.uint64)
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(shape, "values", shape))
        key = element_ty.name, sizes
        if not all(type(size) is int for size in sizes):
            make_block(self, element_ty, shape)
        elif known := blocks.get(key):
            self.__dict__.update(known)
        else:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.name if type.is_block() else None
        if known := shapes.get(key):
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known
        else:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel

    def equal(self: Any, other: Any) -> bool:
        return self is other or same(self, other)

    def np_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, block_type) else kind
        return pointer if isinstance(element, tl.core.pointer_type) else numpy_dtype(element)

    block_type.__init__, tensor.__init__ = init_block, init_tensor
    dtype.__eq__ = equal
    interpreter._get_np_dtype = np_dtype


def pass_over_like_operands() -> None:
    """Two tensors of one type stay as they are, and an integer beside a type becomes one block each time."""
    make_alike = TritonSemantic.binary_op_type_checking_impl
    tensor = tl.core.tensor
    settled = {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)} | {"fp32", "fp64"}
    blocks: dict[Any, Any] = {}

    def alike(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if type(lhs) is not tensor:
            return make_alike(self, lhs, rhs, *flags, **named)
        if type(rhs) is tensor:
            if lhs.type.name == rhs.type.name and lhs.dtype.name in settled:
                return lhs, rhs
            return make_alike(self, lhs, rhs, *flags, **named)
        if type(rhs) is not int:
            return make_alike(self, lhs, rhs, *flags, **named)
        key = lhs.type.name, rhs, flags, *named.items()
        if (block := blocks.get(key)) is not None:
            return lhs, block
        left, right = make_alike(self, lhs, rhs, *flags, **named)
        if left is lhs:
            right.handle.data.flags.writeable = False  # nothing writes into what others share
            blocks[key] = right
        return left, right

    TritonSemantic.binary_op_type_checking_impl = alike


def pass_over_like_integers() -> None:
    """Two integers of one type stay as they are in bitwise operations."""
    make_alike = TritonSemantic.bitwise_op_type_checking_impl
    integers = {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        lhs, rhs = self.binary_op_type_checking_impl(lhs, rhs)
        if lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in integers:
            return lhs, rhs
        return make_alike(self, lhs, rhs)

    TritonSemantic.bitwise_op_type_checking_impl = alike


def unwrap_only_constants() -> None:
    """Each operand is looked at as a list, as two kinds of tuple and as a constant; most are none of them."""
    unwrap = tl.core._unwrap_if_constexpr
    plain = {tl.core.tensor, tl.core.dtype, tl.core.block_type, int, float, bool, str, type(None), slice}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    tl.core._unwrap_if_constexpr = unwrapped


def call_builtins_directly() -> None:
    """A built-in is called through functions that check for the argument which is passed here."""
    semantic = interpreter.interpreter_semantic

    def patch_attribute(place: object, name: str, member: Any, builder: object, scope: Any) -> None:
        function = inspect.unwrap(member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attribute


def leave_out_checks_of_sizes() -> None:
    """Whether the array of a new handle has the size of its dtype is checked for each operation."""
    del interpreter.TensorHandle.__post_init__
    make = interpreter.TensorHandle.__init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    assert list(inspect.signature(make).parameters) == ["self", "data", "dtype", "attr"]
    interpreter.TensorHandle.__init__ = init
