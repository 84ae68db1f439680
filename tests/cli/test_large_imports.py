"""Large libraries are imported with the garbage collector off, and it is on again afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import NO_COLLECTOR

from neuzip import cli
from neuzip.cli.compressing import run
from neuzip.cli.large_imports import import_large
from neuzip.eval.demo import CHECKPOINT

NEW_MODULES = (
    NO_COLLECTOR
    + """
import sys
import neuzip.compress, tokenizers, torch, transformers.modeling_utils
before = {name.partition(".")[0] for name in sys.modules}
from neuzip.cli.large_imports import import_large
import_large()
import neuzip.eval.measures.comparison, neuzip.eval.plans.calibration_text, neuzip.eval.plans.deliver
print(*sorted({name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
"""
)

MODULE = """
import gc
was_on = gc.isenabled()
objects = [[] for _ in range(5000)]
{last}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; the modules in it can be imported until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_collector_is_off_during_the_import_and_skips_what_it_made(library: Path) -> None:
    (library / "large_library.py").write_text(MODULE.format(last=""))
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    import_large("large_library")
    assert not sys.modules["large_library"].was_on
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + 5000
    frozen = gc.get_freeze_count()
    kept = [[] for _ in range(100)]
    import_large("large_library")  # now it has nothing to do
    assert gc.get_freeze_count() == frozen and len(kept) == 100


def test_the_collector_is_on_again_after_an_import_that_fails(library: Path) -> None:
    (library / "broken_library.py").write_text(MODULE.format(last="raise ImportError('it is broken')"))
    with pytest.raises(ImportError, match="it is broken"):
        import_large("broken_library")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(library: Path) -> None:
    (library / "small_library.py").write_text(MODULE.format(last=""))
    gc.disable()
    try:
        import_large("small_library")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_every_command_that_runs_a_model_imports_it_so(root: Path) -> None:
    """export and doctor load no transformers, and compress only what its target needs, in cli/compressing."""
    files = [path for path in sorted((root / "cli").rglob("*.py")) if ".loading()" in path.read_text()]
    others = {path.stem for path in files if "import_large()" not in path.read_text()}
    assert len(files) >= 11 and others == {"compress", "doctor", "export"}


@pytest.mark.slow
def test_a_target_needs_no_package_but_those_of_models_and_files() -> None:
    """Whatever transformers' models and compression import: seconds that no work of ours can save."""
    command = [sys.executable, "-P", "-c", NEW_MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_a_target_imports_it_once_its_text_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A text that is missing is told at once."""
    imported = list[str]()
    monkeypatch.setattr(run, "import_large", lambda: imported.append("models"))
    words = ["compress", str(CHECKPOINT), str(tmp_path / "small"), "--max-kld", "0.1", "--dry-run", "--quiet"]
    assert cli.run([*words, "--text", str(tmp_path / "missing.txt")]) != 0 and not imported
    assert cli.run([*words, "--calibration", "none", "--text", "demo"]) != 0 and imported == ["models"]
