"""What machine this is, as far as that shows without torch: for a report of a bug."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU, as NVIDIA's management library (NVML) describes it."""

    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, the newest CUDA that it runs, and its GPUs; None and none without a driver."""

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[InstalledGpu, ...] = ()


@dataclass(frozen=True)
class LaunchTable:
    """The file of launch parameters that serves an operation on GPUs of one compute capability.

    `is_own` is false if the capability has no file, and another's serves it. `card`, `commit` and `date` say
    what the file was measured on.
    """

    operation: str
    compute_capability: str
    architecture: str
    is_own: bool
    card: str | None
    commit: str | None
    date: str | None


def launch_tables(gpus: Iterable[InstalledGpu]) -> list[LaunchTable]:
    """The launch tables of all operations, for each compute capability among the GPUs."""
    from neuzip.kernels import tuning

    tables = []
    for capability in sorted({gpu.compute_capability for gpu in gpus}):
        for operation in tuning.operators():
            source = tuning.source_for(operation, int(capability.replace(".", "")))
            measured = {key: str(value) for key, value in tuning.measured_on(source.path).items()}
            tables.append(
                LaunchTable(
                    operation, capability, f"sm{source.architecture}", source.is_own,
                    measured.get("card"), measured.get("commit"), measured.get("date"),
                )
            )  # fmt: skip
    return tables


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, whatever a container may use of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def codes_in_vectors() -> bool:
    """Whether the CPU codes in vector registers: it has them, and what numba made of the loops is right."""
    import numpy as np

    from neuzip.kernels.rans import vector_form

    return vector_form.encodes(2, np.dtype(np.uint8)) is vector_form.VECTOR


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def nvidia_driver() -> Driver:
    """The driver and its GPUs. A question that NVML does not answer ends the list."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Driver()
    if nvml.nvmlInit_v2():
        return Driver()
    try:
        text, number = ctypes.create_string_buffer(96), ctypes.c_int(0)
        version = None if nvml.nvmlSystemGetDriverVersion(text, 96) else text.value.decode()
        cuda = None
        if not nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)):
            cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
        count = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        gpus = [gpu for index in range(count.value) if (gpu := _gpu(nvml, index)) is not None]
        return Driver(version, cuda, tuple(gpus))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> InstalledGpu | None:
    handle, text, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    failed = (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        or nvml.nvmlDeviceGetName(handle, text, 96)
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    )
    return None if failed else InstalledGpu(text.value.decode(), f"{major.value}.{minor.value}", memory.total)
