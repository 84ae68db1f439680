"""A Gluon kernel on a CPU: its own functions, with torch in the place of the GPU. Gluon has no interpreter.

    kernel = OnACpu(multiply.many_rows)   # launched as the kernel is
    kernel[(programs,)](x, y, ..., num_warps=4)

Each function of `gl.warp_specialize` has a Python thread. One of them runs at a time, until it has to wait or
lets others go on, which it then leaves the place to. Whatever may be late is as late as can be: copies to
shared memory arrive when somebody waits for them, and until then there is rubbish; products, and copies from
shared memory, read it when they are waited for. So what is not waited for, or is written over too early,
spoils the result. Where all threads wait, the launch raises `Hang` at once. Loads have to stay within their
tensors, what products read has to be there when they are asked for, and what a descriptor writes it has to
write once.

What this does not show: layouts and what the compiler makes of them, races between the threads of a warp
group, fences, registers that are written while products read them, what is read before the kernel ahead has
ended, and the rounding of fp32 sums, which have 64 bits here. What inline assembly packs are elements that
follow each other in the array, whichever a thread has. What a kernel uses and is not here raises NameError,
AttributeError or KeyError.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import ptx_on_a_cpu
import torch
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from neuzip.kernels.device import barriers

NAMES = ("int8", "int32", "int64", "float16", "bfloat16", "float32", "uint16")
LAYOUTS = ("BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout")
RUBBISH = 0x5A5A5A5A
THREADS = barriers.THREADS.value
TRITON = JITFunction, InterpretedFunction


class Hang(Exception):
    """All threads wait."""


class Values(torch.Tensor):
    """A Gluon tensor."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> torch.Tensor:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


@dataclass(frozen=True)
class Pointer:
    """Into a tensor, or one for each thread."""

    values: torch.Tensor
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.at + torch.as_tensor(offset).long())

    def __getitem__(self, axes: Any) -> Pointer:
        return Pointer(self.values, self.at[axes])


def load(pointer: Pointer, mask: Any = True, other: float = 0, cache_modifier: str = "") -> Any:
    every = torch.as_tensor(pointer.at)
    mask = torch.as_tensor(mask).expand(every.shape)
    at = every[mask]
    assert ((at >= 0) & (at < len(pointer.values))).all(), "a load leaves its tensor"
    loaded = torch.full(every.shape, other, dtype=pointer.values.dtype)
    loaded[mask] = pointer.values[at]
    return loaded.as_subclass(Values) if loaded.dim() else loaded.item()


def store(pointer: Pointer, values: torch.Tensor) -> None:
    at = pointer.at
    assert at.shape == values.shape and len(at.unique()) == at.numel(), "stored twice"
    assert ((at >= 0) & (at < len(pointer.values))).all(), "a store leaves its tensor"
    pointer.values[at] = values.to(pointer.values.dtype)


def arrive(pointers: Pointer) -> None:
    """Of `device.barriers`, by all threads of a warp group at once."""
    pointer = one_counter(pointers)
    pointer.values[pointer.at] += THREADS
    ARRIVED.append(pointer)


def await_(pointers: Pointer, groups: int) -> None:
    """Of `device.barriers`. Programs run one after the other: who is waited for has to have ended."""
    pointer = one_counter(pointers)
    if pointer.values[pointer.at] != groups * THREADS:
        raise Hang
    pointer.values[pointer.at] = 0


ARRIVED: list[Pointer] = []
"""Counters at which somebody has arrived in this launch."""

COUNTERS = {barriers.arrive.fn: arrive, barriers.await_.fn: await_}
"""What takes the place of functions that end in inline assembly for all programs."""


def one_counter(pointers: Pointer) -> Pointer:
    (at,) = pointers.at.unique()
    assert pointers.at.shape == (THREADS,)
    return Pointer(pointers.values, at)


class Memory:
    """A part of shared memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def index(self, number: int) -> Memory:
        return Memory(self.slice(number, 1).values[0])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        assert start >= 0
        return Memory(self.values.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.values.permute(order))

    def load(self, layout: object) -> torch.Tensor:
        return self.values.clone().as_subclass(Values)

    def store(self, values: torch.Tensor) -> None:
        assert values.shape == self.values.shape and values.dtype == self.values.dtype
        self.values.copy_(values)

    def spoil(self) -> None:
        dtype = self.values.dtype
        self.values.fill_(math.nan if dtype.is_floating_point else RUBBISH & torch.iinfo(dtype).max)


class Descriptor:
    """Of a tensor, block by block: zeros lie around it, and what is written there is lost."""

    def __init__(self, described: TensorDescriptor) -> None:
        self.values, self.layout = described.base, described.layout
        self.dtype, self.shape = self.values.dtype, described.block_shape
        self.block_shape = self.shape
        self.block_type = SimpleNamespace(nbytes=math.prod(self.shape) * self.dtype.itemsize)
        self.times_written = torch.zeros(self.values.shape, dtype=torch.int32)

    def inside(self, at: Sequence[int]) -> tuple[slice, ...]:
        assert len(at) == len(self.shape) and min(at) >= 0
        return tuple(slice(start, start + length) for start, length in zip(at, self.shape, strict=True))

    def read(self, at: Sequence[int], memory: Memory) -> None:
        part, block = self.values[self.inside(at)], torch.zeros(self.shape, dtype=self.dtype)
        block[tuple(map(slice, part.shape))] = part
        memory.store(block)

    def write(self, at: Sequence[int], memory: Memory) -> None:
        part = self.values[self.inside(at)]
        assert list(memory.values.shape) == self.shape
        part.copy_(memory.values[tuple(map(slice, part.shape))])
        self.times_written[self.inside(at)] += 1


@dataclass
class Barrier:
    count: int
    arrivals: int = 0
    missing_bytes: int = 0
    phase: int = 0
    copies: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True)
class Products:
    """Sums, and factors of what is still to be added to them."""

    sums: torch.Tensor
    factors: tuple[tuple[torch.Tensor, Memory], ...] = ()

    def done(self) -> torch.Tensor:
        sums = self.sums.double().as_subclass(Values)
        for a, b in self.factors:
            sums = sums + a.double() @ b.values.double()
        return sums


class Program:
    """What a program's functions call."""

    def __init__(self, number: int, programs: int) -> None:
        self.lock = threading.Condition()
        self.threads = self.waiting = 0
        self.stepped_back: list[object] = []
        self.errors: list[BaseException] = []
        self.barriers: dict[int, Barrier] = {}
        self.on_the_way: set[int] = set()
        self.stores: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self.multiplied: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.number, self.programs = number, programs

    def names(self) -> dict[str, object]:
        """For the functions of a kernel, what they find in their module."""
        gl = SimpleNamespace(
            program_id=lambda axis: self.number, num_programs=lambda axis: self.programs,
            allocate_shared_memory=allocate_shared_memory, warp_specialize=self.warp_specialize,
            inline_asm_elementwise=inline_asm_elementwise, load=load, store=store, static_range=range,
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32).as_subclass(Values),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype).as_subclass(Values),
            zeros_like=torch.zeros_like, where=where, minimum=minimum, maximum=maximum, exp=torch.exp,
            join=lambda a, b: torch.stack([a, b], -1), split=lambda pairs: pairs.unbind(-1),
            reshape=torch.reshape, permute=torch.permute, expand_dims=torch.unsqueeze,
            broadcast=torch.broadcast_tensors,
            convert_layout=lambda values, layout, assert_trivial=False: values,
            **{name: getattr(language, name) for name in LAYOUTS},
            **{name: getattr(torch, name) for name in NAMES},
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=hopper.mbarrier.MBarrierLayout, init=self.init, wait=self.wait, arrive=self.arrive,
            expect=self.expect,
        )  # fmt: skip
        tma = SimpleNamespace(
            async_copy_global_to_shared=self.copy_in, async_copy_shared_to_global=self.copy_out,
            store_wait=self.store_wait,
        )  # fmt: skip
        return {
            "gl": gl, "mbarrier": mbarrier, "tma": tma, "fence_async_shared": lambda: None,
            "thread_barrier": lambda: None,
            "warpgroup_mma_init": Products, "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": finished,
            "cuda": SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None),
        }  # fmt: skip

    # Threads.

    def warp_specialize(self, calls: list[tuple[Any, tuple]], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(calls) - 1
        self.threads = len(calls)
        threads = [
            threading.Thread(target=self.work, args=call, name=str(i), daemon=True)
            for i, call in enumerate(calls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        assert not any(self.stores.values()), "not waited for"
        assert not any(b.copies or b.missing_bytes for b in self.barriers.values()), "not waited for"

    def work(self, function: Callable[..., None], arguments: tuple) -> None:
        with self.lock:
            try:
                function(*arguments)
            except BaseException as error:
                self.errors.append(error)
            self.threads -= 1
            self.wake_up()

    def wake_up(self) -> None:
        self.waiting = 0
        self.lock.notify_all()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.waiting += 1
            if self.waiting < self.threads:
                self.lock.wait()
            elif self.stepped_back:
                del self.stepped_back[0]
                self.wake_up()
            else:
                raise Hang

    def step_back(self) -> None:
        """Let all others run until they wait."""
        place = object()
        self.stepped_back.append(place)
        self.wait_for(lambda: place not in self.stepped_back)

    # Barriers.

    def at(self, memory: Memory) -> Barrier:
        return self.barriers[memory.values.data_ptr()]

    def init(self, memory: Memory, count: int) -> None:
        self.barriers[memory.values.data_ptr()] = Barrier(count)

    def arrive(self, memory: Memory, count: int = 1, pred: bool = True) -> None:
        if pred and self.arrived(self.at(memory), count, 0):
            self.step_back()

    def expect(self, memory: Memory, missing_bytes: int) -> None:
        self.arrived(self.at(memory), 1, missing_bytes)

    def arrived(self, barrier: Barrier, count: int, missing_bytes: int) -> bool:
        """Whether this ends a phase."""
        barrier.arrivals += count
        barrier.missing_bytes += missing_bytes
        assert barrier.arrivals <= barrier.count, "too many arrivals"
        ended = barrier.arrivals == barrier.count and barrier.missing_bytes == 0
        if ended:
            barrier.phase, barrier.arrivals = barrier.phase + 1, 0
            self.wake_up()
        return ended

    def wait(self, memory: Memory, phase: int, pred: bool = True) -> None:
        barrier = self.at(memory)

        def ended() -> bool:
            while barrier.copies:
                barrier.copies.pop(0)()
            return barrier.phase & 1 != phase

        if pred:
            self.wait_for(ended)

    # Copies and products.

    def copy_in(self, tensor: Descriptor, at: Sequence[int], barrier: Memory, memory: Memory) -> None:
        def copy() -> None:
            tensor.read(at, memory)
            self.on_the_way.remove(memory.values.data_ptr())
            self.arrived(self.at(barrier), 0, -tensor.block_type.nbytes)

        memory.spoil()
        self.on_the_way.add(memory.values.data_ptr())
        self.at(barrier).copies.append(copy)
        self.wake_up()

    def copy_out(self, tensor: Descriptor, at: Sequence[int], memory: Memory) -> None:
        self.stores[threading.current_thread().name].append(lambda: tensor.write(at, memory))

    def store_wait(self, pending: int) -> None:
        stores = self.stores[threading.current_thread().name]
        while len(stores) > pending:
            stores.pop(0)()

    def multiply(self, a: torch.Tensor, b: Memory, products: Products, is_async: bool) -> Products:
        assert b.values.data_ptr() not in self.on_the_way, "not there yet"
        self.multiplied[threading.current_thread().name].append(a.as_subclass(torch.Tensor))
        return Products(products.sums, (*products.factors, (a, b)))


def finished(pending: int, deps: list[Products]) -> torch.Tensor:
    assert pending == 0 and len(deps) == 1
    return deps[0].done()


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Memory:
    memory = Memory(torch.empty(shape, dtype=dtype))
    memory.spoil()
    return memory


def where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else (a if condition else b)


def minimum(a: Any, b: int) -> Any:
    return a.clamp(max=b) if isinstance(a, torch.Tensor) else min(a, b)


def maximum(a: Any, b: int) -> Any:
    return a.clamp(min=b) if isinstance(a, torch.Tensor) else max(a, b)


class OnACpu:
    """In the place of a kernel. After a launch `multiplied` has the left factors of products, by thread."""

    def __init__(self, kernel: GluonJITFunction) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return functools.partial(self.launch, grid[0])

    def run(self, *arguments: Any, grid: tuple[int], warmup: bool, **options: Any) -> None:
        assert not warmup
        self.launch(grid[0], *arguments, **options)

    def launch(
        self,
        programs: int,
        *arguments: Any,
        num_warps: int,
        launch_pdl: bool = False,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        given = [as_given(one) for one in arguments]
        self.multiplied: dict[str, list[torch.Tensor]] = defaultdict(list)
        ARRIVED.clear()
        for number in range(programs):
            program = Program(number, programs)
            functions = functions_of(self.kernel.fn.__globals__, program.names(), {})
            with_names(self.kernel.fn, functions)(*given, **constants)
            for thread, factors in program.multiplied.items():
                self.multiplied[thread] += factors
        assert not any(counter.values[counter.at] for counter in ARRIVED), "not waited for"
        for one in given:
            if isinstance(one, Descriptor):
                times = one.times_written.flatten(1)  # tiles of rows that no expert has are not written
                assert times.max() <= 1 and (times == times[:, :1]).all(), "not all written once"


def functions_of(module: dict[str, Any], operators: dict[str, Any], known: dict[int, Any]) -> dict[str, Any]:
    """The functions and constants of a module, each function with those of its own, and operators."""
    if id(module) in known:
        return known[id(module)]  # type: ignore[no-any-return]
    names = known[id(module)] = dict(operators)
    for name, value in module.items():
        if isinstance(value, GluonJITFunction) and value.fn in COUNTERS:
            names[name] = COUNTERS[value.fn]
        elif isinstance(value, GluonJITFunction):
            own = value.fn.__globals__
            names[name] = with_names(value.fn, functions_of(own, operators, known))
        elif isinstance(value, TRITON):
            names[name] = with_names(value.fn, operators_of(value.fn))
        elif isinstance(value, language.constexpr):
            names[name] = value.value
        elif isinstance(value, ConstexprFunction):
            names[name] = value
    return names


def operators_of(function: Any) -> dict[str, Any]:
    """What one of Triton's functions may use here, operators aside: others of its module that do the same."""
    names: dict[str, Any] = {}
    for name, value in function.__globals__.items():
        if isinstance(value, TRITON):
            names[name] = with_names(value.fn, names)
    return names


def with_names(function: Any, names: dict[str, Any]) -> FunctionType:
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def as_given(argument: Any) -> Any:
    if isinstance(argument, TensorDescriptor):
        return Descriptor(argument)
    return Pointer(argument.flatten()) if isinstance(argument, torch.Tensor) else argument


def inline_asm_elementwise(
    text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    kinds = constraints.split(",")
    outputs = [f"${i}" for i, kind in enumerate(kinds) if kind.startswith("=")]
    inputs = [one for arg in args for one in by_register(arg, pack)]
    registers = {}
    for number, (kind, one) in enumerate(zip(kinds[len(outputs) :], inputs, strict=True), len(outputs)):
        registers[f"${kind if kind.isdigit() else number}"] = bits(one)  # a digit: that output's register

    def load_at(addresses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        (memory,) = (arg.values for arg in args if isinstance(arg, Pointer))
        return bits(load(Pointer(memory, (addresses - memory.data_ptr()) // memory.itemsize), mask))

    ptx_on_a_cpu.run(text, registers, args[0].numel() // pack, load_at)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    results = [
        ptx_on_a_cpu.signed(registers[name]).int().view(own).view(args[0].shape).as_subclass(Values)
        for name, own in zip(outputs, dtypes, strict=True)
    ]
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def by_register(argument: Any, pack: int) -> Sequence[Any]:
    """Of a tensor the first, the second, ... of `pack` elements of each thread; anything else as it is."""
    if isinstance(argument, torch.Tensor):
        assert pack == 1 or argument.dtype.itemsize == 4, "smaller ones share a register"
        return argument.reshape(-1, pack).unbind(1)
    return [argument] * pack


def bits(argument: Any) -> Any:
    """As PTX has them: 32 without a sign, or an address."""
    if isinstance(argument, Pointer):
        return argument.values.data_ptr() + argument.values.itemsize * argument.at
    if isinstance(argument, torch.Tensor):
        return argument.as_subclass(torch.Tensor).long() & 0xFFFFFFFF
    return argument & 0xFFFFFFFF


def changed(module: ModuleType, changes: dict[str, str], folder: Path) -> ModuleType:
    """The module of a kernel with another text, which Triton wants to find in a file."""
    assert module.__file__
    text = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / "changed.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.changed", file)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
