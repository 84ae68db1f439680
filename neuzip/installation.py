"""The public function that checks an installation: packages, engines, GPUs, and whether results are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from neuzip.compress import machine
from neuzip.compress.device import AnyDevice, named
from neuzip.runtime.doctor.finding import TOPICS, Finding
from neuzip.runtime.doctor.folders import folder_findings
from neuzip.runtime.doctor.packages import first_line, import_findings, package_findings
from neuzip.runtime.doctor.plugins import plugin_findings

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

    Raises UsageError for a device that neuzip does not know. Everything else that is wrong is in the report.
    """
    findings = _findings(named(device), on_check)
    return InstallationReport(tuple(sorted(findings, key=lambda finding: TOPICS.index(finding.topic))))


def _findings(device: str, note: Callable[[str], None]) -> Iterator[Finding]:
    driver = machine.nvidia_driver()
    yield from package_findings()
    yield from plugin_findings()
    broken = [*import_findings()]
    yield from broken
    computes = not broken and find_spec("torch") is not None and find_spec("numba") is not None
    yield from folder_findings(has_gpu=bool(driver.gpus) and device != "cpu", has_numba=computes)
    if not computes:
        return  # which is a problem above
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
