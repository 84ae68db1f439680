"""Kernels are compiled ahead of their launches: the ones that are launched, and no launch depends on it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compile_only
import pytest
import torch
from forked import NO_COLLECTOR

from neuzip.kernels.device.compile_ahead import _Compilers, compile_ahead

SAME_KERNELS = """
import json, torch
import compile_only

hashes = []
compile_only.watch(lambda function, code, kwargs: hashes.append((function.__name__, code.hash)), once=True)
empty = torch.empty  # zeros, but where there are no values
torch.empty = lambda *a, **k: (empty if str(k.get("device")) == "meta" else torch.zeros)(*a, **k)
from neuzip.kernels.experts import ops as experts
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.triton import launches
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.packed_linear import ops
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.packed_linear.triton import linear, pack
from neuzip.kernels.rans.coded import Kind
from neuzip.kernels.rans.coded_sample import coded_weights
from neuzip.kernels.rans.triton import decode
from neuzip.kernels.rans.triton.decode import compile_decoder
from neuzip.runtime.kernel_prefetch import StepShape, _launch_step
from neuzip.kernels.step.triton import step

def real(packed, base, shift):
    arrays = {name: torch.zeros(a.shape, dtype=a.dtype) for name, a in vars(packed).items()
              if isinstance(a, torch.Tensor)}
    return PackedTensor(packed.shape, packed.dtype, packed.low_bits, base, shift, **arrays)

for out, columns, dtype, base in ((64, 576, torch.bfloat16, 121), (48, 256, torch.float16, 16)):
    packed = PackedTensor.without_values(out, columns, dtype)
    for rows, bias in ((1, None), (6, None), (1, torch.zeros(out, dtype=dtype))):
        ops.compile_products(packed, rows, bias is not None)
        hashes.append(None)
        for shift in (0, 1, 4):
            x = torch.zeros(rows, columns, dtype=dtype)
            linear.linear(x, real(packed, base, shift), bias)
        hashes.append(None)
    pack.compile_rows(packed)
    hashes.append(None)
    pack.rows(real(packed, base, 1), torch.zeros(5, dtype=torch.int64), torch.zeros(5, columns, dtype=dtype))
    hashes.append(None)
    pack.compile_packing(out, columns, dtype, 8)
    hashes.append(None)
    pack.best_window = lambda exponents, fmt: window(fmt)
    def window(fmt):
        from neuzip.kernels.packed_linear.form import ExponentWindow
        return ExponentWindow(121 if fmt.exponent_bits == 8 else 16, 0, fmt)
    pack.low_bits = lambda mantissas: 8
    pack.pack(torch.zeros(out, columns, dtype=dtype))
    hashes.append(None)

weights = [PackedTensor.without_values(3 * out, 96, torch.bfloat16) for out in (192, 96)]
experts.compile_layer(*weights, 3, 1, 2)
hashes.append(None)
x, ids = torch.zeros(1, 96, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int64)
routing, rows = launches.route(ids, x, 3, experts.tile_rows(2, 3, x.device))
rows = launches.grouped_linear(rows, real(weights[0], 121, 4), 3, routing)
rows = launches.apply_gate(rows, routing, Gate())
rows = launches.grouped_linear(rows, real(weights[1], 121, 1), 3, routing)
launches.weighted_sum(rows, routing.position, x[:, :2].contiguous())
launches.weighted_sum(rows, routing.position, torch.zeros(1, 2))
hashes.append(None)

kind = Kind(FORMATS["BF16"], 7, 2, 0)
compile_decoder(kind, 10, True)
hashes.append(None)
samples = [coded_weights(kind, runs, torch.device("cpu"))[0] for runs in (64, 3)]
decode.decode(samples, [torch.zeros(one.numel, dtype=torch.int16) for one in samples])
hashes.append(None)

_launch_step(StepShape(576, 1536, 9, 3, 64, 4096, torch.bfloat16, True, True))
hashes.append(None)
bf16 = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
q, k = bf16(1, 1, 9, 64).transpose(1, 2), bf16(1, 1, 3, 64).transpose(1, 2)
for length in (32, 71):
    room = bf16(1, 3, length, 64)
    step.store((room, room), (k, k), torch.zeros(1, dtype=torch.int64))
for tokens in (6, 1):
    states = bf16(1, tokens, 3, 64).transpose(1, 2)
    step.store((room, room), (states, states), torch.zeros(tokens, dtype=torch.int64))
step.largest(bf16(1, 1, 4096)[:, -1])
step.rms_norm(bf16(1, 1, 576), bf16(576), 1e-6, "llama")
step.rotated(q, k, bf16(1, 1, 64), bf16(1, 1, 64))
step.gated(bf16(1, 1, 1536), bf16(1, 1, 1536))
hashes.append(None)

parts = [[]]
for one in hashes:
    parts.append([]) if one is None else parts[-1].append(one)
print(json.dumps([[sorted(set(map(tuple, part))) for part in pair] for pair in zip(parts[::2], parts[1::2])]))
"""


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_is_launched(tmp_path: Path, kernel_cache: Path):
    """Values such as a shift of 1 make no other kernel, nor does a KV cache of another length."""
    pairs = json.loads(compile_only.said_by(SAME_KERNELS, tmp_path, kernel_cache))
    assert len(pairs) == 13
    for ahead, launched in pairs:
        assert launched
        assert {tuple(one) for one in launched} <= {tuple(one) for one in ahead}


PREFETCH = """
import json, torch
import compile_only
from triton.runtime.driver import driver
driver.set_active(compile_only.Card())
from neuzip.kernels.device.compile_ahead import compile_ahead
from neuzip.kernels.step.triton import step

remarks = []
x = torch.empty(1, 256, dtype=torch.bfloat16, device="meta")
def fail():
    raise ValueError("made up")
launches = [lambda: step.largest(x), fail, lambda: step.gated(x, x), lambda: step.gated(x, x)]
prefetch = compile_ahead(launches, torch.device("cpu"), remarks.append)
assert prefetch.wait(300)
print(json.dumps([prefetch.launched, prefetch.compiled, str(prefetch.error), remarks]))
"""

ENDS = """
import time, torch
from neuzip.kernels.device.compile_ahead import _Compilers, ThreadPoolExecutor

later = _Compilers(ThreadPoolExecutor(1))
later.submit(lambda: time.sleep(0.5))
later.submit(lambda: print("compiled"))
print("ended")
"""


@pytest.mark.slow
def test_a_cold_cache_is_filled_once_and_said_to_be(tmp_path: Path):
    launched, compiled, error, remarks = json.loads(
        compile_only.said_by(PREFETCH, tmp_path, tmp_path / "cache")
    )
    assert (launched, compiled, error) == (3, 3, "made up")
    (remark,) = remarks
    assert remark.startswith("compiling 3 GPU kernels") and "once a machine" in remark
    launched, compiled, error, remarks = json.loads(
        compile_only.said_by(PREFETCH, tmp_path, tmp_path / "cache")
    )
    assert (launched, compiled, error, remarks) == (3, 0, "made up", [])


def test_an_error_is_kept_for_tests_and_breaks_nothing():
    def launch() -> None:
        raise ValueError("made up")

    prefetch = compile_ahead([launch], torch.device("cpu"))
    assert prefetch.wait(60)
    assert isinstance(prefetch.error, ValueError) and prefetch.launched == 0


def test_who_asks_for_a_kernel_that_a_thread_could_not_compile_compiles_it():
    threads = []

    def compile_kernel() -> str:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            raise MemoryError("made up")
        return "kernel"

    with ThreadPoolExecutor(1, thread_name_prefix="worker") as pool:
        later = _Compilers(pool).submit(compile_kernel)
        assert later.result() == "kernel"
    assert threads == ["worker_0", threading.current_thread().name]


@pytest.mark.slow
def test_a_process_that_ends_compiles_no_more():
    """A forked process would end without waiting for its threads in any case."""
    done = subprocess.run([sys.executable, "-P", "-c", NO_COLLECTOR + ENDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ended\n")


def test_nothing_is_compiled_in_the_interpreter():
    """A launch on the meta device runs nothing: it has no values."""
    from neuzip.kernels.device.launch import launch

    launch(object(), (1,), torch.empty(1, device="meta"), device=torch.device("meta"))
