"""Launches that go past Triton: a compiled kernel is used only for arguments that it was compiled for."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import compile_only
import pytest
import recording_driver
import torch
import torch.nn.functional as F
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.device.memory_part import MemoryPart
from neuzip.kernels.device.start import BoxedTensor, TensorBox, argument_kinds, triton_arguments
from neuzip.runtime.weights import PackedWeight

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
WAYS = [*product((False, True), repeat=3)]
"""How a parameter may be declared: const, specialised, specialised on alignment."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int16, torch.int32, torch.int64, torch.uint8)
INTS = [
    *range(-33, 70),
    *(sign * (1 << bits) + near for bits in (31, 32, 62) for sign in (-1, 1) for near in range(-17, 18)),
    *((1 << 63) + near for near in range(-17, 18)),
    (1 << 64) - 1, (1 << 64) - 16,
]  # fmt: skip
LAYOUTS = NVMMASharedLayout(128, 16, 2), NVMMASharedLayout(64, 16, 2)


def tensors() -> Iterator[torch.Tensor]:
    for dtype in DTYPES:
        memory = torch.zeros(256, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 16 :]
        for offset in (0, 8, 16, 24, 32, 56, 64):
            yield memory[offset : offset + 64].view(dtype)
        yield torch.empty(0, dtype=dtype)
    yield torch.nn.Parameter(torch.zeros(64))


def parts() -> Iterator[MemoryPart]:
    memory = torch.zeros(2, 256)
    for dtype, offset in product(DTYPES, (0, 8, 16, 24, 256)):
        yield MemoryPart(memory, dtype, offset, 5)


def descriptors() -> Iterator[Any]:
    for dtype in (torch.bfloat16, torch.float16):
        matrix = torch.zeros(64, 128, dtype=dtype)
        for rows, layout in product((16, 32), LAYOUTS):
            yield BoxedTensor(matrix, (64, 128), (128, 1), TensorBox((rows, 64), layout))
            yield BoxedTensor(matrix[8:], (56, 128), (128, 1), TensorBox((rows, 64), layout))
            yield GluonDescriptor.from_tensor(matrix, [rows, 64], layout)
        yield TensorDescriptor.from_tensor(matrix, [16, 64])


def arguments() -> list[Any]:
    return [
        *tensors(),
        *parts(),
        *descriptors(),
        *INTS,
        None,
        True,
        False,
        0.0,
        1.0,
        -0.0,
        16.0,
        float("nan"),
    ]


def kinds_of(*some: Any) -> tuple[Any, ...]:
    kinds: list[Any] = []
    assert argument_kinds(some, kinds, [])
    return tuple(kinds)


def specialised(argument: Any) -> list[Any]:
    """What Triton specialises on, in each way that a parameter may be declared."""
    (argument,) = triton_arguments([argument])
    return [native_specialize_impl(BACKEND, argument, *way) for way in WAYS]


def test_arguments_of_one_kind_are_specialised_alike():
    by_kind: dict[Any, Any] = {}
    for one in arguments():
        kinds, own = kinds_of(one), specialised(one)
        # A constexpr None compares with nothing else; a bool is no int.
        assert by_kind.setdefault(kinds, own) == own, (one, kinds)
    assert len(by_kind) > 2 * len(DTYPES) + 10


def test_a_part_of_memory_is_launched_as_its_tensor_is():
    for part in parts():
        tensor = part.tensor()
        assert (tensor.dtype, tensor.numel(), tensor.data_ptr()) == (part.dtype, 5, part.address)
        assert kinds_of(part) == kinds_of(tensor)
        values: list[Any] = []
        assert argument_kinds([part], [], values) and values == [part.address]


def test_lists_of_one_kind_are_specialised_alike():
    """Kinds of several arguments are told apart, too, wherever one argument's kinds end."""
    draw, every = random.Random(36), arguments()
    chosen = [one for one in every if not isinstance(one, int) or abs(one) < 40]
    by_kinds = defaultdict(list)
    for _ in range(20_000):
        some = draw.choices(chosen, k=draw.randint(1, 3))
        by_kinds[kinds_of(*some)].append(some)
    several = [lists for lists in by_kinds.values() if len(lists) > 1]
    assert len(several) > 1000
    for first, *others in several:
        expected = [*map(specialised, first)]
        for other in others[:3]:
            assert [*map(specialised, other)] == expected, (first, other)


class OwnTensor(torch.Tensor):
    """A tensor that may do as it likes with what Triton asks it for."""


@pytest.mark.parametrize("one", [(1, 2), "text", object(), torch.zeros(2).as_subclass(OwnTensor)])
def test_other_arguments_are_left_to_triton(one: object):
    assert not argument_kinds([one], [], [])


KERNEL = """
import triton
import triton.language as tl

@triton.jit(do_not_specialize=["count"])
def kernel(y, x, bias, number, wide, scale, flag, count, BLOCK: tl.constexpr, BIAS: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count) * scale + number + wide
    if BIAS:
        value += tl.load(bias + at, mask=at < count)
    if flag:
        value += 1
    tl.store(y + at, value, mask=at < count)
"""

GLUON_KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from neuzip.kernels.device.start import TensorBox

BOX = TensorBox((16, 64), gl.NVMMASharedLayout(128, 16, 2))

@gluon.jit(do_not_specialize=["rows"])
def copy(x, y, rows, plain):
    memory = gl.allocate_shared_memory(x.dtype, [16, 64], x.layout)
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=1)
    fence_async_shared()
    mbarrier.expect(there, x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [gl.minimum(gl.program_id(0) * 16, rows), 0], there, memory)
    mbarrier.wait(there, 0)
    tma.async_copy_shared_to_global(y, [gl.program_id(0) * 16, 0], memory)
    tma.store_wait(0)
"""

LAUNCHES = """
import sys, torch, triton
from pathlib import Path
import recording_driver
recording_driver.activate(Path("."))
from neuzip.kernels.device import launch as device_launch
from neuzip.kernels.device.launch import FREE, PreparedLaunch, launch
from triton.runtime.jit import JITFunction
sys.path.insert(0, ".")
from own_kernel import kernel

runs = []
own_run = JITFunction.run

def run(self, *args, **options):
    runs.append(self)
    return own_run(self, *args, **options)

JITFunction.run = run
DEVICE = torch.device("cpu")

def triton_launch(*args, **options):
    return own_run(kernel, *args, grid=(3, 2), warmup=False, BLOCK=64, **options)

def recorded(function, *args):
    # What a function launches, which has to be what Triton launches.
    signature = list(triton_launch(*args).src.signature.values())
    by_triton = recording_driver.recorded(signature, lambda: triton_launch(*args))
    assert recording_driver.recorded(signature, lambda: function(*args)) == by_triton
    return by_triton

def memory(offset, dtype=torch.float32):
    room = torch.zeros(1024, dtype=torch.uint8)
    return room[-room.data_ptr() % 16 :][offset : offset + 512].view(dtype)
"""


def run_script(script: str, folder: Path, cache: Path) -> str:
    (folder / "own_kernel.py").write_text(KERNEL)
    return compile_only.said_by(LAUNCHES + script, folder, cache)


@recording_driver.needs_compiler
@pytest.mark.slow
def test_launches_past_triton_are_those_of_triton(tmp_path: Path, kernel_cache: Path):
    script = """
def direct(*args):
    launch(kernel, (3, 2), *args, device=DEVICE, BLOCK=64)

def named(y, x, bias, number, wide, *others):
    scale, flag, count = others
    rest = dict(count=count, flag=flag, scale=scale, BLOCK=64)
    launch(kernel, (3, 2), y, x, bias, number, wide, device=DEVICE, **rest)

prepared = {}

def ready(y, x, bias, number, wide, scale, flag, count):
    key = bias is None, wide, scale, flag  # those are fixed
    if key not in prepared:
        prepared[key] = PreparedLaunch(
            kernel, FREE, FREE, bias, FREE, wide, scale, flag, FREE, device=DEVICE, BLOCK=64
        )
    prepared[key]((3, 2), y, x, number, count)

functions = set()
for function in (direct, named, ready):
    for turn in range(2):
        runs.clear()
        for offset in (0, 4):
            for number in (1, 2, 16, 1 << 40):
                for others in ((5, 0.5, True, 100), (32, 1.0, False, 1), (1, 2.5, True, 64)):
                    args = memory(0), memory(offset), None, number, *others
                    functions.add(recorded(function, *args).function)
        # The first of each kind goes by way of Triton; those with names are of kinds that there were before.
        assert bool(runs) == (turn == 0 and function is not named), (function, turn, len(runs))
print(len(functions))
"""
    assert (
        int(run_script(script, tmp_path, kernel_cache)) == 2 * 4 * 3
    )  # bool and float are no constants, nor is count


@recording_driver.needs_compiler
@pytest.mark.slow
def test_hooks_see_every_launch(tmp_path: Path, kernel_cache: Path):
    script = """
seen = []
args = memory(0), memory(0), None, 3, 5, 0.5, True, 100
prepared = PreparedLaunch(kernel, FREE, *args[1:], device=DEVICE, BLOCK=64)

def both():
    launch(kernel, (3, 2), *args, device=DEVICE, BLOCK=64)
    prepared((3, 2), args[0])

both()
both()
triton.knobs.runtime.launch_enter_hook.add(lambda metadata: seen.append(("enter", metadata.get()["name"])))
triton.knobs.runtime.launch_exit_hook.add(lambda metadata: seen.append(("exit", metadata.get()["name"])))
both()
assert seen == [("enter", "kernel"), ("exit", "kernel")] * 2, seen
triton.knobs.runtime.launch_enter_hook.calls.clear()
triton.knobs.runtime.launch_exit_hook.calls.clear()
runs.clear()
both()
assert len(seen) == 4 and not runs
kernel.add_pre_run_hook(lambda *args, **options: seen.append("before"))
both()
print(*seen[4:])
"""
    assert run_script(script, tmp_path, kernel_cache).split() == ["before"] * 2


@recording_driver.needs_compiler
@pytest.mark.slow
def test_descriptors_are_those_of_triton(tmp_path: Path, kernel_cache: Path):
    """Also those of a tensor at the address of an earlier one, and of one that has no descriptor yet."""
    script = """
from own_gluon import BOX, copy
from neuzip.kernels.device.memory_part import MemoryPart
from neuzip.kernels.device.start import BoxedTensor

def descriptor(tensor):
    return BoxedTensor(tensor, tuple(tensor.shape), tensor.stride(), BOX)

signature = None
memory = [torch.zeros(64 * 64, dtype=torch.bfloat16) for _ in range(3)]
fixed = descriptor(torch.zeros(128, 64, dtype=torch.bfloat16))
prepared = PreparedLaunch(copy, FREE, fixed, FREE, FREE, device=DEVICE, num_warps=4)
for turn, room in enumerate(memory + memory):
    for shape in ((64, 64), (16, 256), (20, 64)):
        x = room[: shape[0] * shape[1]].view(shape)
        boxed, own = descriptor(x), descriptor(x).descriptor()
        def triton_launch():
            other = own, fixed.descriptor(), shape[0], x
            return own_run(copy, *other, grid=(4,), warmup=False, num_warps=4)
        signature = list(triton_launch().src.signature.values())
        by_triton = recording_driver.recorded(signature, triton_launch)
        runs.clear()
        for way in (
            lambda: launch(copy, (4,), boxed, fixed, shape[0], x, device=DEVICE, num_warps=4),
            lambda: launch(copy, (4,), own, fixed.descriptor(), shape[0], x, device=DEVICE, num_warps=4),
            lambda: prepared((4,), boxed, shape[0], x),
        ):
            assert recording_driver.recorded(signature, way) == by_triton
        assert not turn or not runs
print(*signature, sep="\\\\n")
"""
    (tmp_path / "own_gluon.py").write_text(GLUON_KERNEL)
    assert run_script(script, tmp_path, kernel_cache).count("tensordesc") == 2


PRODUCTS = """
import torch.nn.functional as F
from neuzip.kernels.packed_linear import ops
from neuzip.kernels.packed_linear.gluon import linear as many_rows
from neuzip.kernels.packed_linear.triton import linear as few_rows
from neuzip.runtime.weights.packed import PackedWeight
from neuzip.runtime.weights import operations

weight = PackedWeight.of(torch.randn(1024, 256).bfloat16())  # by the reference, on the CPU
for module in (many_rows, few_rows):
    module.multiprocessors = lambda device: 132
ops.on_gpu = ops.is_hopper = lambda device: True
many_rows.pays = lambda rows, packed: rows > 64

def calls_of(product):
    called = []
    def see(frame, event, argument):
        if event == "call":
            called.append(frame.f_code.co_name)
    sys.setprofile(see)
    product()
    sys.setprofile(None)
    return called

for rows in (1, 16, 300):
    with torch.no_grad():
        x = torch.zeros(1, rows, 256, dtype=torch.bfloat16)
        F.linear(x, weight)
        F.linear(x, weight)
        before = recording_driver.count()
        called = calls_of(lambda: F.linear(x, weight))
        print(rows, len(called), recording_driver.count() - before, *called)
"""

MOST_CALLS = {1: 30, 16: 80, 300: 42}
"""Functions in Python that a product calls, at most, by the rows of x: instead of its time on the host."""


@recording_driver.needs_compiler
@pytest.mark.slow
def test_a_product_calls_few_functions(tmp_path: Path, kernel_cache: Path):
    for line in run_script(PRODUCTS, tmp_path, kernel_cache).splitlines():
        rows, calls, launches, *called = line.split()
        assert int(calls) <= MOST_CALLS[int(rows)], called
        assert int(launches) == (2 if rows == "16" else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 300, 2048])
def test_products_past_triton_are_the_same_bits(rows: int):
    """Of the same kernel, whoever launches it, wherever x lies, and on whichever stream."""
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(1024, 512, device="cuda", generator=generator).bfloat16() * 0.02
    memory = torch.randn(rows * 512 + 8, device="cuda", generator=generator).bfloat16()
    packed = PackedWeight.of(weight)
    aligned, other = memory[: rows * 512].view(rows, 512), memory[4 : 4 + rows * 512].view(rows, 512)
    with torch.no_grad():
        first = [F.linear(x, packed) for x in (aligned, other)]  # launched by Triton
        for _ in range(3):
            torch.full((rows, 1024), torch.nan, dtype=torch.bfloat16, device="cuda")  # what y is made of
            for x, expected in zip((aligned, other), first, strict=True):
                assert torch.equal(F.linear(x, packed), expected)
                assert torch.equal(F.linear(x.clone(), packed), expected)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = F.linear(aligned, packed)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(late, first[0])
    exact = F.linear(aligned.double(), weight.double())
    assert (first[0].double() - exact).norm() <= 1.05 * (F.linear(aligned, weight).double() - exact).norm()


@pytest.mark.gpu
def test_a_profiler_sees_launches_past_triton():
    packed, x = PackedWeight.of(torch.ones(64, 128, device="cuda").bfloat16()), torch.ones(1, 128).bfloat16()
    names: list[str] = []

    def see(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    with torch.no_grad():
        x = x.cuda()
        y = [F.linear(x, packed) for _ in range(3)][-1]
        triton.knobs.runtime.launch_enter_hook.add(see)
        try:
            assert torch.equal(F.linear(x, packed), y)
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(see)
    assert names == ["_one_row"]
