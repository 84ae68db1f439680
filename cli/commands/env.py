"""neuzip env: what a report of a bug needs to say of neuzip, its libraries and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from neuzip.cli import options
from neuzip.cli.output import Output
from neuzip.cli.text import bytes_text
from neuzip.distribution import NAME

if TYPE_CHECKING:
    from neuzip.compress.machine import Driver, LaunchTable

EXAMPLES = [
    "neuzip env",
    "neuzip env --json",
]

LIBRARIES = (
    "torch", "triton", "transformers", "tokenizers", "accelerate", "peft", "numba", "llvmlite", "numpy",
    "safetensors", "xxhash", "huggingface_hub", "hf-xet", "typer", "rich", "matplotlib", "jinja2", "lm-eval",
    "datasets",
)  # fmt: skip
"""Distributions whose versions matter."""

VARIABLES = (
    "NEUZIP_AUTOLOAD", "NEUZIP_DEBUG", "NEUZIP_GPU_CHECK", "NEUZIP_NO_PROGRESS",
    "CC", "SGLANG_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TRITON_HOME", "VLLM_PLUGINS",
    "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_INFERENCE_ENDPOINT", "HF_TOKEN",
    "HF_XET_CHUNK_CACHE_SIZE_BYTES", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "COLUMNS", "TERM",
    "TQDM_DISABLE", "NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "TRITON_CACHE_DIR", "TRITON_INTERPRET",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCH_CPP_LOG_LEVEL",
)  # fmt: skip
"""Variables that neuzip or a library reads. Only whether they are set is told: some hold passwords."""


def command(json: options.JsonOption = False, quiet: options.QuietOption = False) -> None:
    """Print versions, hardware and settings, for a bug report

    No path, no name of a user or a machine and no value of an environment variable is printed.
    """
    out = Output(json=json, quiet=quiet)
    from neuzip.compress import machine
    from neuzip.distribution import installed
    from neuzip.runtime.doctor.packages import torch_cuda

    how, commit = installed()
    there = {name.upper() for name in os.environ}  # proxies are named in small letters too
    packages = {name: _version(name) for name in LIBRARIES}
    driver = machine.nvidia_driver()
    tables = machine.launch_tables(driver.gpus)
    environment: dict[str, object] = {
        "installed": how,
        "commit": commit,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "distribution": _distribution(),
        "packages": packages,
        "torch_cuda": torch_cuda(),
        "cpu": machine.processor(),
        "cores": machine.cores(),
        "vector_codec": machine.codes_in_vectors() if packages["numba"] else None,
        "memory_bytes": machine.memory_bytes(),
        "driver": driver.version,
        "driver_cuda": driver.cuda,
        "gpus": driver.gpus,
        "launch_tables": tables,
        "variables": {name: name in there for name in VARIABLES},
    }
    lines = _lines(environment, packages, driver, tables)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        out.text(f"{name:<{width}}  {value}")
    out.result(environment, quiet=[f"{name} {value}" for name, value in lines])


def _lines(
    environment: Mapping[str, object],
    packages: Mapping[str, str | None],
    driver: Driver,
    tables: Sequence[LaunchTable],
) -> list[tuple[str, str]]:
    """What a person reads: a name and a value a line."""
    commit = f", commit {environment['commit']}" if environment["commit"] else ""
    forms = {True: "in vector registers (AVX-512)", False: "scalar", None: "not known without numba"}
    lines = [
        ("neuzip", f"{version(NAME)}, installed {environment['installed']}{commit}"),
        ("Python", str(environment["python"])),
        (
            "system",
            ", ".join(filter(None, (str(environment["distribution"] or ""), str(environment["system"])))),
        ),
        ("CPU", f"{environment['cpu']}, {environment['cores']} cores"),
        ("CPU codec", forms[environment["vector_codec"]]),  # type: ignore[index]
        ("memory", bytes_text(int(str(environment["memory_bytes"])))),
    ]
    if driver.version is None:
        lines.append(("GPU", "no NVIDIA driver found"))
    else:
        lines.append(("driver", f"{driver.version}, for CUDA up to {driver.cuda}"))
        lines += [
            (
                "GPU",
                f"{gpu.name}, {bytes_text(gpu.memory_bytes)}, capability {gpu.compute_capability}",
            )
            for gpu in driver.gpus
        ] or [("GPU", "the driver finds none")]
    lines += _launch_lines(tables)
    for name, there in packages.items():
        cuda = (
            f", built for CUDA {environment['torch_cuda']}"
            if name == "torch" and environment["torch_cuda"]
            else ""
        )
        lines.append((name, f"{there}{cuda}" if there else "not installed"))
    variables = environment["variables"]
    assert isinstance(variables, dict)
    lines.append(("variables set", ", ".join(name for name, is_set in variables.items() if is_set) or "none"))
    return lines


def _launch_lines(tables: Sequence[LaunchTable]) -> list[tuple[str, str]]:
    """Which launch tables serve the GPUs, and what these were measured on."""
    if not tables:
        return [("launch table", "none in use, as there is no GPU")]
    lines = []
    for table in tables:
        place = table.architecture
        if not table.is_own:
            place += f" for capability {table.compute_capability}, which has none"
        origin = f"measured on {table.card}, {table.date}, commit {table.commit}"
        lines.append(("launch table", f"{table.operation}: {place}, {origin}"))
    return lines


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _distribution() -> str | None:
    """The name of the Linux distribution."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None
