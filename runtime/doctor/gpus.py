"""Which GPUs torch finds, why it finds none, and which kernels each of them has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from neuzip.compress import machine
from neuzip.compress.device import unfit
from neuzip.kernels.device.release import HINT, unfit_triton
from neuzip.runtime.doctor.finding import Finding, Status
from neuzip.runtime.doctor.packages import first_line

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def torch_gpus() -> list[torch.device]:
    """The GPUs that torch finds. Raises ImportError and OSError where torch cannot be imported."""
    import torch

    count = torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0
    return [torch.device("cuda", number) for number in range(count)]


def why_no_gpu(driver: machine.Driver, device: str, is_required: bool) -> Finding:
    """Why torch finds no GPU, as far as that can be known: a problem if one is there, or is required."""
    import torch

    if (count := len(torch_gpus())) > 0:
        return Finding(
            "GPU", device, "problem", f"torch finds {count} GPUs, numbered from 0, and not this one",
            "name another, or none for all",
        )  # fmt: skip
    status: Status = "problem" if is_required else "note"
    there = ", ".join(dict.fromkeys(gpu.name for gpu in driver.gpus))
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None and there:
        return Finding(
            "GPU", "torch", "problem", f"{there} is there, but {build} is a build without CUDA",
            "install a CUDA build: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    if driver.version is None:
        also = f", and {build} is a build without CUDA" if torch.version.cuda is None else ""
        return Finding(
            "GPU", "driver", status, f"no GPU: there is no NVIDIA driver{also}",
            "install the driver, or give the container the GPUs of its host" if is_required else None,
        )  # fmt: skip
    if torch.version.cuda is None:
        return Finding("GPU", "torch", status, f"no GPU, and {build} is a build without CUDA")
    visible = os.environ.get(VISIBLE)
    if there and visible is not None:
        return Finding(
            "GPU", "torch", "problem", f"{there} is there, but {VISIBLE}={visible} hides it from torch",
            f"unset {VISIBLE}, or name a GPU: {VISIBLE}=0",
        )  # fmt: skip
    if there and driver.cuda is not None and _major(driver.cuda) < _major(torch.version.cuda):
        return Finding(
            "GPU", "driver", "problem",
            f"driver {driver.version} runs CUDA up to {driver.cuda}, and {build} needs {torch.version.cuda}",
            f"update the driver, or install a build of torch for CUDA {driver.cuda}",
        )  # fmt: skip
    if there:
        return Finding(
            "GPU", "torch", "problem", f"{there} is there, but torch cannot use it: {_reason()}",
            "look at `nvidia-smi`",
        )  # fmt: skip
    return Finding("GPU", "driver", status, f"no GPU: driver {driver.version} finds none")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _reason() -> str:
    """What torch says when it starts CUDA."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it does not say why"


def found(place: torch.device, driver: machine.Driver) -> list[Finding]:
    """The findings of a card, or one problem if torch cannot use it, whatever the other cards are like."""
    try:
        return [*card_findings(place, driver)]
    except Exception as error:  # torch raises several classes
        return [Finding("GPU", str(place), "problem", first_line(error), "look at `nvidia-smi`")]


def card_findings(place: torch.device, driver: machine.Driver) -> Iterator[Finding]:
    """A card: what it is, whether it runs the kernels, and which of them it has."""
    import torch

    from neuzip.kernels.device.properties import counts_bits, is_hopper

    facts = torch.cuda.get_device_properties(place)
    capability = f"{facts.major}.{facts.minor}"
    name = str(place)
    assert place.index is not None
    if (problem := unfit(place.index)) is not None:
        yield Finding("GPU", name, "problem", problem, "use another GPU, or the CPU")
        return
    text = f"{facts.name}, capability {capability}, {facts.total_memory / 1e9:.0f} GB"
    yield Finding("GPU", name, "ok", f"{text}, driver {driver.version or 'unknown'}")
    if (problem := unfit_triton()) is not None:
        yield Finding("GPU", f"{name} Triton", "problem", problem, HINT)
    hopper = f"{name} Hopper kernels"
    if is_hopper(place):
        yield Finding("GPU", hopper, "ok", "yes: products of many rows read packed and ternary weights")
    else:
        yield Finding(
            "GPU", hopper, "note", f"no: capability {capability} is not 9.x; products of many rows decode "
            "packed weights first, which is slower",
        )  # fmt: skip
    if not counts_bits(place):
        yield Finding(
            "GPU", f"{name} bit kernels", "note",
            f"no: capability {capability} lacks fast matrix instructions on single bits; other kernels serve",
        )  # fmt: skip
    yield _tables(name, capability)


def _tables(name: str, capability: str) -> Finding:
    """Whether the launch tables are those of the card."""
    tables = machine.launch_tables([machine.InstalledGpu("", capability, 0)])
    others = [table for table in tables if not table.is_own]
    if not others:
        return Finding("GPU", f"{name} launch tables", "ok", f"{len(tables)} measured for {capability}")
    return Finding(
        "GPU", f"{name} launch tables", "note",
        f"{len(others)} of {len(tables)} are those of {others[0].architecture}: right but perhaps slower",
        "benchmarks/tune.py in neuzip's repository measures this GPU",
    )  # fmt: skip
