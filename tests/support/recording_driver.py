"""A CUDA driver that runs nothing and records launches, under Triton's own code for launching on a GPU.

    recording_driver.activate(folder)           in a process of its own, for which Triton's interpreter is off
    recording_driver.recorded(signature, call)  the launch that a call makes, with the bytes of its parameters
    recording_driver.count()                    how many launches there were

`libcuda.so.1` is compiled from the C below, so a C compiler has to be there, as for every launch with Triton.
Tensors are on the CPU: the driver takes every address.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STREAM = 77

SOURCE = """
#include <stdint.h>
#include <string.h>
typedef int R;
static int context;
R cuDriverGetVersion(int *v) { *v = 12080; return 0; }
R cuGetErrorString(R e, const char **s) { *s = "an error"; return 0; }
R cuCtxGetCurrent(void **c) { *c = &context; return 0; }
R cuCtxSetCurrent(void *c) { return 0; }
R cuDeviceGet(int *d, int n) { *d = n; return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = 232448; return 0; }
R cuModuleLoadData(void **m, const void *image) { *m = (void *)image; return 0; }
R cuModuleGetFunction(void **f, void *m, const char *name) {
  static uintptr_t next = 1; *f = (void *)next++; return 0;
}
R cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : 0; return 0; }
R cuFuncSetCacheConfig(void *f, int c) { return 0; }
R cuFuncSetAttribute(void *f, int a, int v) { return 0; }
R cuCtxSetLimit(int l, size_t v) { return 0; }
R cuCtxGetLimit(size_t *v, int l) { *v = 0; return 0; }
R cuPointerGetAttribute(void *to, int a, uint64_t p) { *(uint64_t *)to = p; return 0; }
R cuOccupancyMaxActiveClusters() { return 1; }
R cuTensorMapEncodeIm2col() { return 1; }
R cuTensorMapEncodeTiled(
    uint64_t *map, int type, uint32_t rank, void *at, const uint64_t *shape, const uint64_t *strides,
    const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  uint64_t words[16] = {type, rank, (uint64_t)at, swizzle, fill};
  for (uint32_t i = 0; i < rank; i++) {
    words[5 + i] = shape[i] + ((uint64_t)box[i] << 40);
    if (i + 1 < rank) words[10 + i] = strides[i];
  }
  memcpy(map, words, 128); return 0;
}
typedef struct {
  uint32_t grid[3], block[3], shared; void *stream; uint8_t *attributes; uint32_t count;
} Config;
static Config config; static uint64_t function; static uint8_t attributes[4][8];
static uint8_t bytes[64][128]; static uint32_t sizes[64], known; static uint64_t launches;
R cuLaunchKernelEx(const Config *c, void *f, void **params, void **extra) {
  launches++; config = *c; function = (uint64_t)f;
  for (uint32_t i = 0; i < known; i++) memcpy(bytes[i], params[i], sizes[i]);
  for (uint32_t i = 0; i < c->count; i++) memcpy(attributes[i], c->attributes + 72 * i, 4);
  return 0;
}
void recorder_expect(uint32_t count, const uint32_t *of) { known = count; memcpy(sizes, of, 4 * count); }
uint64_t recorder_launches() { return launches; }
void recorder_read(uint32_t *numbers, uint64_t *names, uint8_t *to) {
  memcpy(numbers, &config, 28); numbers[7] = config.count;
  for (uint32_t i = 0; i < config.count; i++) memcpy(numbers + 8 + i, attributes[i], 4);
  names[0] = (uint64_t)config.stream; names[1] = function;
  for (uint32_t i = 0; i < known; i++) memcpy(to + 128 * i, bytes[i], sizes[i]);
  known = 0;  // other kernels have other parameters
}
"""

SIZES = {"i1": 1, "u1": 1, "i32": 4, "fp32": 4, "i64": 8, "u64": 8}
"""Bytes of a kernel's parameter."""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("gcc", "clang"))), reason="the driver is compiled from C"
)


@dataclass(frozen=True)
class Launch:
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    attributes: tuple[int, ...]
    """Numbers of CUlaunchAttributeID: 6 is programmatic dependent launch."""
    stream: int
    function: int
    parameters: tuple[bytes, ...]


_library: Any = None


def activate(folder: Path) -> None:
    """Compile the driver and let Triton launch with it, in this process."""
    global _library
    compiler = shutil.which("gcc") or shutil.which("clang")
    folder = folder.resolve()
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(SOURCE)
    options = ["-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([str(compiler), *options, "-o", str(library), str(source)], check=True)
    _library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    _library.recorder_launches.restype = ctypes.c_uint64
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    class RecordingDriver(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: STREAM
            self.get_device_capability = lambda device: (9, 0)

    driver.set_active(RecordingDriver())


def parameter_sizes(signature: Iterable[Any]) -> list[int]:
    """Bytes of each parameter of a compiled kernel, those of Triton's scratch memory at the end."""
    sizes = []
    for kind in signature:
        if kind.startswith("tensordesc"):
            rank = re.findall(r"\[([^]]*)\]", kind)[0].count(",") + 1
            sizes += [128, *[4] * rank, *[8] * rank]
        elif kind != "constexpr":
            sizes.append(8 if kind.startswith("*") else SIZES[kind])
    return [*sizes, 8, 8]


def count() -> int:
    return int(_library.recorder_launches())


def recorded(signature: Iterable[Any], call: Callable[[], object]) -> Launch:
    """The one launch of a call, of a compiled kernel's signature: `compiled.src.signature.values()`."""
    sizes = parameter_sizes(signature)
    before = count()
    _library.recorder_expect(len(sizes), (ctypes.c_uint32 * len(sizes))(*sizes))
    try:
        call()
    finally:
        numbers, names = (ctypes.c_uint32 * 16)(), (ctypes.c_uint64 * 2)()
        room = ctypes.create_string_buffer(128 * 64)
        _library.recorder_read(numbers, names, room)
    assert count() == before + 1
    parameters = tuple(room.raw[128 * i : 128 * i + size] for i, size in enumerate(sizes))
    grid, block = tuple(numbers[:3]), tuple(numbers[3:6])
    return Launch(grid, block, numbers[6], tuple(numbers[8 : 8 + numbers[7]]), *names, parameters)
