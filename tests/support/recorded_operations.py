"""Operations of Triton's interpreter, recorded for the types of their operands and replayed.

Between `a + b` in a kernel and numpy lie the checks and promotions of triton.language, at twenty times the
cost of numpy. All that they decide follows from the types of the operands, and from operands that are plain
Python values. So the calls of the builder in which an operation ends are recorded when such operands come for
the second time, and made at once from then on. Before anything uses a recording, it is replayed on the
operands that it was made of, and has to give the same bytes.

    interpreter._patch_attr = patch_attribute
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

tensor = tl.core.tensor
SEMANTIC = interpreter.interpreter_semantic
BUILDER = interpreter.interpreter_builder

UNRECORDED = object()
"""In the place of a recording: operands of these types cannot be recorded."""

IMPURE = ("load", "store", "atomic", "program", "barrier", "assert", "print")
"""Words in the names of the builder's methods that depend on more than their operands."""

WRITING = ("store", "atomic")
"""Words in the names of the builder's methods that write to memory."""


def patch_attribute(place: object, name: str, member: Any, _: object, scope: Any) -> None:
    """Replace a built-in of triton.language by one that records, as interpreter._patch_attr replaces it."""
    scope.set_attr(place, name, recorded(member))


@functools.cache
def recorded(member: Any) -> Callable[..., Any]:
    """A built-in that finds out once what it has to do for operands of some types."""
    function = inspect.unwrap(member)
    recordings: dict[Any, Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        operands = args
        if kwargs:
            kwargs.pop("_semantic", None)
            operands = *args, *kwargs.values()
        try:
            key: Any = tuple(
                [
                    o.type.name if type(o) is tensor else o if type(o) is int else signature(o)
                    for o in operands
                ]
            )
        except TypeError:
            return function(*args, _semantic=SEMANTIC, **kwargs)
        if kwargs:
            key = key, tuple(kwargs)
        recording = recordings.get(key)
        if recording is UNRECORDED or SEMANTIC.builder is not BUILDER:  # within what is being recorded
            return function(*args, _semantic=SEMANTIC, **kwargs)
        if recording is not None:
            return recording(operands)
        if key not in recordings:
            recordings[key] = None  # many integers come only once
            return function(*args, _semantic=SEMANTIC, **kwargs)
        result, recordings[key] = record(functools.partial(function, *args, **kwargs), operands)
        return result

    return call


def signature(operand: Any) -> Any:
    """What an operation can know of an operand that is no tensor. Raises TypeError if that is not known."""
    kind = type(operand)
    if kind in (bool, str, NoneType):
        return kind, operand
    if kind is float:
        return kind, repr(operand)  # 0.0 is not -0.0, and NaN is NaN
    if kind is tl.constexpr:
        return kind, operand.value if type(operand.value) is int else signature(operand.value)
    if isinstance(operand, tl.dtype):
        return kind, operand.name
    if kind in (tuple, list, tl.tuple):
        return kind, *(one if type(one) is int else signature(one) for one in operand)
    if kind is slice:
        return kind, *map(signature, (operand.start, operand.stop, operand.step))
    raise TypeError(kind)


# A recording: values have slots, first those of the operands, then constants, then those of the calls


class Replay:
    """The source of a function that makes the calls of a recording, and the objects that it names.

    Functions of one shape have one source, so that few are compiled.
    """

    def __init__(self, operands: Sequence[Any], constants: Sequence[TensorHandle]) -> None:
        self.names: dict[str, Any] = {"new": object.__new__, "Handle": TensorHandle, "Tensor": tensor}
        positions = [position for position, o in enumerate(operands) if type(o) is tensor]
        self.slots = len(positions)
        self.lines = [f"v{slot} = operands[{position}].handle" for slot, position in enumerate(positions)]
        for handle in constants:
            self.names[self.slot()] = handle

    def slot(self) -> str:
        """The name of the next slot."""
        self.slots += 1
        return f"v{self.slots - 1}"

    def name(self, value: Any) -> str:
        """A name for an object that the function needs."""
        self.names[f"n{len(self.names)}"] = value
        return f"n{len(self.names) - 1}"

    def call(self, method: Callable[..., Any], arguments: Sequence[str], results: int) -> None:
        """Call a method of the builder."""
        targets = ", ".join(self.slot() for _ in range(results))
        self.lines.append(f"{targets} = {self.name(method)}({', '.join(arguments)})")

    def shortcut(
        self,
        function: Callable[..., Any],
        method: Callable[..., Any],
        arguments: Sequence[str],
        like: TensorHandle,
    ) -> None:
        """Call a function of numpy's arrays, or else the builder where numpy makes something else."""
        arrays = ", ".join(f"{a}.data" for a in arguments if a.startswith("v"))
        dtype, shape = self.name(like.data.dtype), self.name(like.data.shape)
        target = self.slot()
        self.lines += [
            f"data = {self.name(function)}({arrays})",
            f"if data.dtype is {dtype} and data.shape == {shape}:",
            f"    {target} = new(Handle)",
            f"    {target}.data, {target}.dtype, {target}.attr = data, {self.name(like.dtype)}, {{}}",
            "else:",
            f"    {target} = {self.name(method)}({', '.join(arguments)})",
        ]

    def tensor(self, handle: str, like: Any) -> str:
        """Make a tensor of the type and the shape of another."""
        self.names["results"] = self.names.get("results", 0) + 1
        target = f"t{self.names['results']}"
        self.lines += [f"{target} = new(Tensor)", f"{target}.handle = {handle}"]
        self.lines += [f"{target}.{a} = {self.name(v)}" for a, v in vars(like).items() if a != "handle"]
        return target

    def function(self, result: str) -> Callable[[Sequence[Any]], Any]:
        """The function from operands to the result."""
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return {result}"))
        exec(compiled(f"def replay(operands):\n{body}\n"), self.names)
        return self.names["replay"]  # type: ignore[no-any-return]


@functools.cache
def compiled(source: str) -> Any:
    """The source, compiled."""
    return compile(source, "<replay>", "exec")


# How it is made


@dataclass
class Note:
    """What was seen of a call: the method's name, what it was given and what it gave."""

    name: str
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]

    def handles(self) -> Iterator[TensorHandle]:
        """The handles among the arguments."""
        return (value for value in self.arguments if type(value) is TensorHandle)

    def has(self, words: tuple[str, ...]) -> bool:
        """Whether one of some words is in the name."""
        return any(word in self.name for word in words)


class Recorder:
    """In the place of the builder: makes the calls and notes them."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(BUILDER, name)
        if not callable(member):
            return member

        def call(*arguments: Any) -> Any:
            result = member(*arguments)
            results = result if type(result) is tuple else (result,)
            if not all(is_value(one) for one in (*arguments, *results)):
                self.notes.append(Note(name, arguments, results))
            return result

        return call


def is_value(argument: Any) -> bool:
    """Whether an argument or a result of the builder has no handle in it."""
    if isinstance(argument, (list, tuple)):
        return all(map(is_value, argument))
    handles = TensorHandle, interpreter.BlockPointerHandle, interpreter.TensorDescHandle
    return not isinstance(argument, (tensor, *handles))


def record(operation: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, Any]:
    """The result of an operation, and its recording, or UNRECORDED."""
    recorder = Recorder()
    SEMANTIC.builder = recorder
    try:
        result = operation(_semantic=SEMANTIC)
    finally:
        SEMANTIC.builder = BUILDER
    recording = recording_of(recorder.notes, operands, result)
    if recording is None:
        return result, UNRECORDED
    if not any(note.has(WRITING) for note in recorder.notes):
        check(recording(operands), result)
    return result, recording


def recording_of(
    notes: list[Note], operands: Sequence[Any], result: Any
) -> Callable[[Sequence[Any]], Any] | None:
    """The recording of what was noted. None if it has handles that slots cannot hold."""
    given = [o.handle for o in operands if type(o) is tensor]
    results = result if type(result) is tuple else () if result is None else (result,)
    if not all(type(one) is tensor for one in results):
        return None
    returned = [one.handle for one in results if one.handle is not None]  # stores have none
    seen = [*given, *returned, *(v for note in notes for v in (*note.arguments, *note.results))]
    if any(type(value) is not TensorHandle and not is_value(value) for value in seen):
        return None
    if len({id(handle) for handle in given}) < len(given):  # which of them is meant cannot be told
        return None

    notes = without_needless([without_broadcasts(note, notes) for note in notes], returned)
    variable = {id(handle) for handle in given}
    for note in notes:
        if note.has(IMPURE) or any(id(handle) in variable for handle in note.handles()):
            variable.update(map(id, note.results))
    notes = [note for note in notes if id(note.results[0]) in variable]
    needed = [*(handle for note in notes for handle in note.handles()), *returned]
    constants = list({id(handle): handle for handle in needed if id(handle) not in variable}.values())
    for handle in constants:
        handle.data.flags.writeable = False  # nothing writes into what others share

    replay = Replay(operands, constants)
    slots = {id(handle): f"v{slot}" for slot, handle in enumerate([*given, *constants])}
    for note in notes:
        add_call(replay, note, slots)
        slots.update(
            {id(value): f"v{replay.slots - len(note.results) + i}" for i, value in enumerate(note.results)}
        )
    made = [replay.tensor(slots.get(id(one.handle), "None"), one) for one in results]
    return replay.function(f"({', '.join(made)},)" if type(result) is tuple else made[0] if made else "None")


def without_broadcasts(note: Note, notes: list[Note]) -> Note:
    """A call of arithmetic on operands as they were before they got the shape of the result."""
    if not isinstance(shortcut(note), np.ufunc) or len(note.arguments) != 2:
        return note
    sources = {id(other.results[0]): other for other in notes if other.name in BROADCASTS}
    arguments = list(note.arguments)
    for index in range(2):
        while (source := sources.get(id(arguments[index]))) is not None:
            smaller = source.arguments[BROADCASTS[source.name]]
            if smaller.data.dtype != arguments[index].data.dtype:
                break
            other = arguments[1 - index].data.shape
            if not fits(smaller.data.shape, other, note.results[0].data.shape):
                break
            arguments[index] = smaller
    return Note(note.name, tuple(arguments), note.results)


BROADCASTS = {"create_splat": 1, "create_broadcast": 0}
"""Methods of the builder that repeat values, and the position of what they repeat."""


def fits(shape: tuple[int, ...], other: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether arrays of two shapes are broadcast to that of the result."""
    try:
        return np.broadcast_shapes(shape, other) == result
    except ValueError:
        return False


def without_needless(notes: list[Note], returned: list[TensorHandle]) -> list[Note]:
    """The calls on which results depend, or something in memory."""
    needed = {id(handle) for handle in returned}
    kept = []
    for note in reversed(notes):
        if note.has(IMPURE) or any(id(value) in needed for value in note.results):
            kept.append(note)
            needed.update(id(handle) for handle in note.handles())
    return kept[::-1]


def add_call(replay: Replay, note: Note, slots: dict[int, str]) -> None:
    """Add a call that was noted, with slots in the places of handles."""
    method, function = getattr(BUILDER, note.name), shortcut(note)
    arguments = [slots[id(a)] if type(a) is TensorHandle else replay.name(a) for a in note.arguments]
    if function is not None:
        (result,) = note.results
        with np.errstate(all="ignore"):
            data = function(*(handle.data for handle in note.handles()))
        if (data.dtype, data.shape) == (result.data.dtype, result.data.shape):
            replay.shortcut(function, method, arguments, result)
            return
    replay.call(method, arguments, len(note.results))


def shortcut(note: Note) -> Callable[..., Any] | None:
    """The function of numpy's arrays that a method of the builder comes down to, if it is that simple."""
    inner, function = inner_call(note.name)
    (first, *_) = note.arguments
    if inner == "cast_impl" and tl.bfloat16 not in (first.dtype.scalar, note.arguments[1].scalar):
        return operator.methodcaller("astype", note.results[0].data.dtype)
    if note.name in ("create_bitcast", "create_int_to_ptr", "create_ptr_to_int"):
        return operator.methodcaller("view", note.results[0].data.dtype)
    if note.name == "create_ashr" and first.data.dtype.kind == "i":
        return np.right_shift
    return function


@functools.cache
def inner_call(name: str) -> tuple[str, np.ufunc | None]:
    """The inner method that is all that a method of the builder calls, and with which function."""
    outer = vars(InterpreterBuilder)[name]
    if outer.__name__ != "<lambda>":
        return "", None
    probe = SimpleNamespace(
        unary_op=lambda operand, function: ("unary_op", function),
        binary_op=lambda left, right, function: ("binary_op", function),
        cast_impl=lambda source, dtype: ("cast_impl", None),
    )
    try:
        inner, function = outer(probe, *[None] * (len(inspect.signature(outer).parameters) - 1))
    except AttributeError:  # it does more
        return "", None
    return inner, function if isinstance(function, np.ufunc) else None


def check(replayed: Any, result: Any) -> None:
    """Raise AssertionError if a replay does not return what the operation did."""
    pairs = zip(replayed, result, strict=True) if type(result) is tuple else [(replayed, result)]
    for one, other in pairs:
        if other is None or other.handle is None:
            assert one is other or (one.handle, one.type) == (None, other.type)
            continue
        assert (one.type, one.handle.dtype) == (other.type, other.handle.dtype)
        assert (one.handle.data.dtype, one.handle.data.shape) == (
            other.handle.data.dtype,
            other.handle.data.shape,
        )
        assert one.handle.data.tobytes() == other.handle.data.tobytes()
