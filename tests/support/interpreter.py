"""Triton's interpreter without its needless work: the time of a kernel on the CPU is that of its bookkeeping.

`quicken()` changes nothing that kernels compute. It keeps what the interpreter finds out again for each
operation: the built-in names of triton.language, numpy's name of a dtype, the shape of a type of blocks, and
what an operation does with operands of some types (see recorded_operations.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import recorded_operations
import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def quicken() -> None:
    """Do all of it, before the first kernel; a second call (conftest.py is imported twice) does nothing."""
    look_up_names_once()
    replace_names_once()
    leave_out_checks_of_overflow()
    remember_types()
    leave_out_checks_of_sizes()
    interpreter._patch_attr = recorded_operations.patch_attribute


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


def leave_out_checks_of_sizes() -> None:
    """Whether the array of a new handle has the size of its dtype is checked for each operation."""
    del interpreter.TensorHandle.__post_init__
    make = interpreter.TensorHandle.__init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    assert list(inspect.signature(make).parameters) == ["self", "data", "dtype", "attr"]
    interpreter.TensorHandle.__init__ = init
