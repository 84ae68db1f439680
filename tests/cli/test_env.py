"""`neuzip env`: what a bug report needs, and nothing that must not be in one."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuzip import distribution
from neuzip.cli.commands import env
from neuzip.compress import machine
from neuzip.kernels import tuning
from neuzip.runtime.doctor import packages

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hf_nobodysTokenNobodysToken"


def test_all_modes(in_all_modes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(env, "VARIABLES", [name for name in env.VARIABLES if name != "COLUMNS"])
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("https_proxy", f"http://ann:{SECRET}@proxy")
    said = in_all_modes("env")
    for one in said.values():
        assert one.exit_code == 0
        assert SECRET not in one.stdout + one.stderr
    found = json.loads(said["json"].stdout)
    assert found["packages"]["numpy"] == version("numpy")
    assert found["packages"]["torch"] == version("torch")
    assert found["python"].endswith(platform.python_version())
    assert {name for name, is_set in found["variables"].items() if is_set} == {"HF_TOKEN", "HTTPS_PROXY"}
    shown = dict(line.split(maxsplit=1) for line in said["human"].stdout.splitlines())
    assert shown["numpy"] == version("numpy")
    assert said["human"].stdout.splitlines()[-1].split()[2:] == ["HF_TOKEN,", "HTTPS_PROXY"]


def test_a_package_that_is_not_there(neuzip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "LIBRARIES", ("numba", "no-such-package"))
    assert "no-such-package  not installed" in neuzip("env").stdout
    assert json.loads(neuzip("env", "--json").stdout)["packages"]["no-such-package"] is None


def test_the_variables_are_those_that_the_code_asks_for() -> None:
    code = "import sys, reference; print(*reference.variables_of_code())"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True, capture_output=True, text=True
    )
    assert set(ran.stdout.split()) <= set(env.VARIABLES)


class Nvml:
    """NVIDIA's management library on a machine with two GPUs; `broken` names a function that fails."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.broken:
                return 999
            for argument in arguments:
                place = getattr(argument, "_obj", argument)
                if isinstance(place, ctypes.Array):
                    place.value = b"595.10" if "Driver" in name else b"NVIDIA H100"
                elif isinstance(place, ctypes.Structure):
                    place.total = 80 << 30  # type: ignore[attr-defined]
                elif isinstance(place, ctypes.c_uint):
                    place.value = 2
                elif isinstance(place, ctypes.c_int):
                    place.value = 13020 if "Driver" in name else 9
            return 0

        return call


def test_gpus_are_told_without_torch(neuzip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = machine.InstalledGpu("NVIDIA H100", "9.9", 80 << 30)
    monkeypatch.setattr(machine, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: Nvml()}))
    assert machine.nvidia_driver() == machine.Driver("595.10", "13.2", (gpu, gpu))
    said = neuzip("env").stdout
    assert "595.10, for CUDA up to 13.2" in said
    assert said.count("NVIDIA H100, 85.9 GB, capability 9.9") == 2
    assert json.loads(neuzip("env", "--json").stdout)["gpus"][1]["compute_capability"] == "9.9"


def test_launch_tables_and_their_origin_are_told(neuzip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(machine.InstalledGpu("a", capability, 1) for capability in ("9.0", "9.0", "8.6"))
    monkeypatch.setattr(machine, "nvidia_driver", lambda: machine.Driver("595.10", "13.2", gpus))
    found = neuzip("env", "--json").json["launch_tables"]
    tables = {(table["compute_capability"], table["operation"]): table for table in found}
    assert {operation for _, operation in tables} == {path.stem for path in tuning.FOLDER.glob("*/*.toml")}
    for (capability, operation), table in tables.items():
        source = tuning.source_for(operation, int(capability.replace(".", "")))
        assert table["architecture"] == source.path.parent.name
        assert table["is_own"] is source.is_own
        assert {key: table[key] for key in ("card", "commit", "date")} == {
            key: str(value) for key, value in tuning.measured_on(source.path).items()
        }
    lines = [" ".join(line.split()) for line in neuzip("env").stdout.splitlines()]
    own = tables["9.0", "rans"]
    origin = f"measured on {own['card']}, {own['date']}, commit {own['commit']}"
    assert f"launch table rans: sm90, {origin}" in lines
    assert f"launch table rans: sm90 for capability 8.6, which has none, {origin}" in lines


def test_without_a_gpu_no_launch_table_is_in_use(neuzip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_driver", machine.Driver)
    lines = [" ".join(line.split()) for line in neuzip("env").stdout.splitlines()]
    assert "launch table none in use, as there is no GPU" in lines
    assert neuzip("env", "--json").json["launch_tables"] == []


def test_torch_is_not_needed_for_it() -> None:
    code = (
        "import sys; from neuzip.compress.machine import InstalledGpu, launch_tables; "
        "assert launch_tables([InstalledGpu('a', '9.0', 1)]) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ("nvmlInit_v2", machine.Driver()),
        ("nvmlDeviceGetCount_v2", machine.Driver("595.10", "13.2")),
        ("nvmlDeviceGetMemoryInfo", machine.Driver("595.10", "13.2")),
        ("nvmlSystemGetCudaDriverVersion_v2", None),
    ],
)
def test_a_driver_that_does_not_answer(
    broken: str, found: machine.Driver | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        machine, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: Nvml(broken)})
    )
    driver = machine.nvidia_driver()
    assert driver == found if found is not None else (driver.cuda is None and len(driver.gpus) == 2)


@pytest.mark.parametrize(
    ("record", "how"),
    [
        (None, ("from an index", None)),
        ({"url": "file:///clone", "dir_info": {"editable": True}}, ("as editable", None)),
        ({"url": "file:///clone", "dir_info": {}}, ("from a folder", None)),
        ({"url": "https://x/a.whl", "archive_info": {}}, ("from an archive", None)),
        ({"url": "https://x/a", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, ("from git", "abc")),
    ],
)
def test_how_it_was_installed(record: Any, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = None if record is None else json.dumps(record)
    monkeypatch.setattr(distribution, "distribution", lambda name: SimpleNamespace(read_text=lambda f: text))
    assert distribution.installed() == how


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'", "12.8"),
        ("cuda = '13.0'", "13.0"),
        ("cuda: Optional[str] = None", None),
    ],
)
def test_the_cuda_of_torch_is_read(
    line: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.8.0'\ndebug = False\n{line}\nhip = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(packages, "find_spec", lambda name: spec)
    assert packages.torch_cuda() == cuda
    (tmp_path / "version.py").unlink()  # a torch that was not installed to its end
    assert packages.torch_cuda() is None
