"""The public function that checks an installation: packages, engines, GPUs, and whether results are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from neuzip.runtime.doctor.finding import TOPICS, Finding
from neuzip.runtime.doctor.folders import folder_findings
from neuzip.runtime.doctor.packages import first_line, import_findings, package_findings
from neuzip.runtime.doctor.plugins import plugin_findings

if TYPE_CHECKING:
    from neuzip.compress.device import AnyDevice
    from neuzip.compress.machine import Driver

__all__ = ["InstallationReport", "check_installation"]


@dataclass(frozen=True)
class InstallationReport:
    """What `check_installation` returns.

    findings  what was looked at, in the order of the report: topic, name, status, text and hint each
    """

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem. Notes, such as of a machine without a GPU, are none."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that will not work."""
        return tuple(finding for finding in self.findings if finding.status == "problem")


def check_installation(
    device: AnyDevice = "auto", on_check: Callable[[str], None] = lambda name: None
) -> InstallationReport:
    """Find out what is installed, which engines find neuzip, and whether CPU and GPU compute right results.

    `device` is "auto" for all GPUs that torch finds, "cpu" for none, or one GPU, such as "cuda" or "cuda:1",
    which is a problem if it is not there. Self-made tensors are decoded and multiplied, and compared with the
    reference. `on_check` gets the name of each of these checks before it runs: the first run on a machine
    compiles kernels, which takes up to a minute.

    Raises UsageError for a device that neuzip does not know. Everything else that is wrong is in the report:
    without torch or numba it has the packages and engines alone.
    """
    findings = _findings(device, on_check)
    return InstallationReport(tuple(sorted(findings, key=lambda finding: TOPICS.index(finding.topic))))


def _findings(device: AnyDevice, note: Callable[[str], None]) -> Iterator[Finding]:
    yield from package_findings()
    yield from plugin_findings()
    broken = [*import_findings()]
    yield from broken
    if broken or any(find_spec(module) is None for module in ("torch", "numba")):
        return  # which is a problem above, and nothing below can be imported
    from neuzip.compress import machine
    from neuzip.compress.device import named

    yield from _computing(named(device), machine.nvidia_driver(), note)


def _computing(device: str, driver: Driver, note: Callable[[str], None]) -> Iterator[Finding]:
    """Folders, GPUs, and whether results are right."""
    yield from folder_findings(has_gpu=bool(driver.gpus) and device != "cpu")
    try:
        from neuzip.runtime.doctor import gpus, results
    except Exception as error:  # a package that is installed and cannot be imported
        yield Finding("packages", "import", "problem", first_line(error), "install that package again")
        return
    yield from results.cpu_findings(note)
    if device == "cpu":
        return
    places = gpus.torch_gpus()
    if device.startswith("cuda:"):
        places = [place for place in places if str(place) == device]
    if not places:
        yield gpus.why_no_gpu(driver, device, is_required=device != "auto")
    for place in places:
        cards = gpus.found(place, driver)
        yield from cards
        if all(finding.status != "problem" for finding in cards):
            yield from results.gpu_findings(place, note)
