"""The file tool without torch and its like: what works, and what a command says that needs more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_tool import FILE_TOOL, WITHOUT, packages
from packaging.requirements import Requirement
from project import RANGES

from neuzip import distribution
from neuzip.cli import commands
from neuzip.distribution import MissingPackage, broken_package, missing_package, require

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
for name in {blocked!r}:
    sys.modules[name] = None
import numpy as np
from safetensors.numpy import save_file
from pathlib import Path
rng = np.random.default_rng(0)
for folder, noise in (("model", 0), ("tuned", 1e-3)):
    Path(folder).mkdir()
    weights = rng.normal(0, 0.02, (64, 64)).astype(np.float16) if not noise else weights + np.float16(noise)
    save_file({{"w": weights}}, f"{{folder}}/model.safetensors")
    Path(folder, "config.json").write_text('{{"model_type": "llama"}}')
from neuzip.cli import run
said = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(command)
    said.append((code, out.getvalue(), err.getvalue()))
import neuzip
def told(error):
    return type(error).__name__, str(error), getattr(error, "hint", ""), isinstance(error, ImportError)
errors = {{}}
for name in neuzip.__all__:
    try:
        getattr(neuzip, name)
    except Exception as error:
        errors[name] = told(error)
for name, call in {{
    "max_kld": lambda: neuzip.compress_checkpoint("model", "x", max_kld=0.1),
    "export": lambda: neuzip.export_checkpoint("model", "x.gguf", to="gguf"),
}}.items():
    try:
        call()
    except Exception as error:
        errors[name] = told(error)
print(json.dumps([said, errors, sorted(set({blocked!r}) & {{n for n, m in sys.modules.items() if m}})]))
"""


def without(blocked: tuple[str, ...], lines: list[str], folder: Path) -> tuple[Any, Any]:
    """Exit code, stdout and stderr of commands in one process, and the errors of the public Python names."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=blocked), json.dumps([line.split() for line in lines])],
        cwd=folder, env=os.environ | {"NEUZIP_DEBUG": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said, errors, loaded = json.loads(ran.stdout)
    assert not loaded
    return dict(zip(lines, said, strict=True)), errors


WORKS = [
    "compress model model.nz", "verify model.nz --original model", "decompress model.nz restored",
    "inspect model.nz", "diff model restored", "compress model lossy.nz --mantissa-bits 3",
    "compress tuned tuned.delta --base model", "apply tuned.delta again --base model",
    "verify tuned.delta --base model", "push model.nz me/model --dry-run", "env", "pull --help",
]  # fmt: skip

REFUSED = {
    "eval model.nz --text demo": ("torch", "transformers"),
    "sweep model --text demo": ("torch", "transformers"),
    "generate model.nz The": ("torch", "transformers"),
    "bench model.nz": ("torch", "transformers"),
    "ternarize model t --text demo --allow-destructive": ("torch", "transformers"),
    "layers model --text demo": ("torch", "transformers"),
    "experts model --text demo": ("torch", "transformers"),
    "patch-attention model p --text demo": ("torch", "transformers"),
    "train config.toml": ("torch", "transformers", "matplotlib"),
    "recover model --original model --text demo --output r": ("torch", "transformers", "matplotlib"),
    "export model e --to compressed-tensors": ("torch",),
    "demo": ("torch", "transformers"),
    "compress model small.nz --max-kld 0.01": ("torch", "transformers"),
    "compress model small.nz --attention 8bit": ("torch", "transformers"),
    "compress model small.nz --device cuda": ("torch",),
    "inspect model.nz --plot w.png": ("matplotlib",),
    "inspect model.nz --plot w.html": ("matplotlib", "jinja2"),
}


@pytest.mark.slow
def test_files_are_worked_on_and_everything_else_names_what_it_needs(tmp_path: Path) -> None:
    said, errors = without((*WITHOUT, "triton"), [*WORKS, *REFUSED], tmp_path)
    for line in WORKS:
        assert said[line][0] == 0, said[line]
    for folder in ("restored", "again"):
        original = {"restored": "model", "again": "tuned"}[folder]
        for path in (tmp_path / original).iterdir():
            assert (tmp_path / folder / path.name).read_bytes() == path.read_bytes()
    ranges = {wanted.name: wanted for wanted in RANGES}
    for line, names in REFUSED.items():
        code, out, err = said[line]
        assert (code, out) == (1, ""), (line, said[line])
        error, hint = err.splitlines()
        assert all(name in error for name in names), error
        assert error.endswith("not installed"), error
        lines = hint.removeprefix('hint: pip install "').rstrip('"').split('" "')
        asked = [Requirement(one) for one in lines]
        assert asked == [ranges[name] for name in names], hint
    assert not {"t", "p", "r", "e", "small.nz", "neuzip-demo"} & {path.name for path in tmp_path.iterdir()}
    files_alone = {
        "NeuzipError", "Rule", "Scheme", "__version__", "compress_checkpoint", "decompress_checkpoint",
        "diff_checkpoints", "export_checkpoint", "inspect_checkpoint", "pull", "push", "verify_checkpoint",
    }  # fmt: skip
    assert not files_alone & errors.keys()
    assert {"load_model", "generate", "evaluate", "load_file", "max_kld", "export"} <= errors.keys()
    for name, (kind, message, hint, is_import_error) in errors.items():
        assert kind == "MissingPackage", (name, kind, message)
        assert is_import_error, "`except ImportError` is how Python asks for a package"
        assert message.endswith("not installed"), message
        assert hint.startswith('pip install "torch>='), hint


@pytest.mark.parametrize("verb", commands.VERBS)
def test_the_commands_that_need_packages_are_known(verb: str) -> None:
    refused = {line.split()[0] for line, names in REFUSED.items() if "torch" in names} - {"compress"}
    module = __import__(f"neuzip.cli.commands.{verb.replace('-', '_')}", fromlist=["command"])
    assert bool(getattr(module, "PACKAGES", ())) == (verb in refused)


def test_a_report_names_what_it_needs_before_anything_is_measured(
    neuzip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the checkpoint is looked for: what is given here is none."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name, needs in {"r.html": "jinja2 and matplotlib, which are", "r.md": "jinja2, which is"}.items():
        said = neuzip("eval", tmp_path, "--text", "demo", "--report", tmp_path / name)
        assert (said.exit_code, f"a report needs {needs} not installed" in said.stderr) == (1, True), said
    assert (
        "a report" not in neuzip("eval", tmp_path, "--text", "demo", "--report", tmp_path / "r.json").stderr
    )
    said = neuzip("sweep", tmp_path, "--text", "demo", "--output", tmp_path / "s")
    assert "the pictures of a sweep need" in said.stderr


# The line


def test_the_line_installs_all_but_what_is_left_out() -> None:
    listed = {wanted.name: wanted for wanted in map(Requirement, packages())}
    assert sorted([*listed, *WITHOUT]) == sorted(wanted.name for wanted in RANGES)
    for wanted in RANGES:
        if wanted.name in listed:
            assert str(listed[wanted.name].specifier) in ("", str(wanted.specifier))
    assert listed["numba"].specifier, "older ones compile the coder wrong"
    assert FILE_TOOL.endswith(" && pip install --no-deps .")


def test_the_readme_shows_the_line() -> None:
    assert FILE_TOOL in (ROOT / "README.md").read_text(encoding="utf-8")


# Errors


def test_only_what_neuzip_needs_is_told_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_package(ValueError("x"), "it") is None
    assert missing_package(ModuleNotFoundError("x", name="somebody_elses"), "it") is None
    assert missing_package(ModuleNotFoundError("x", name="torch.no_such_part"), "it") is None
    monkeypatch.setitem(sys.modules, "yaml", None)
    found = missing_package(ModuleNotFoundError("x", name="yaml.loader"), "it")
    assert found is not None
    assert (found.message, found.hint) == (
        "it needs pyyaml, which is not installed", 'pip install "pyyaml>=6"'
    )  # fmt: skip
    assert found.name == "yaml"


def test_a_package_that_is_missing_deep_down_is_no_bug(
    neuzip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    for name in [name for name in sys.modules if name.startswith("neuzip.compress")]:
        monkeypatch.delitem(sys.modules, name)
    said = neuzip("compress", tmp_path, tmp_path / "x")
    assert said.exit_code == 1
    assert said.stderr.startswith(
        "error: neuzip compress needs xxhash, which is not installed\nhint: pip install"
    )


@pytest.mark.parametrize(
    "line",
    [
        "raise ImportError('libtorch_cpu.so: cannot open shared object file')",
        "raise OSError('libtorch_cpu.so: cannot open shared object file')",
        "from .lib import no_such_name",
    ],
    ids=["a library of the package", "a library that it opens", "a name of the package"],
)
def test_a_package_that_cannot_be_imported_is_no_bug(
    line: str, neuzip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xxhash").mkdir()
    (tmp_path / "xxhash" / "lib.py").touch()
    (tmp_path / "xxhash" / "__init__.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("neuzip.compress", "xxhash"))]:
        monkeypatch.delitem(sys.modules, name)
    said = neuzip("compress", tmp_path, tmp_path / "x")
    assert said.exit_code == 1
    assert said.stderr.startswith(
        "error: neuzip compress needs xxhash, which is installed and cannot be imported: "
    )
    assert 'hint: install it again: pip uninstall xxhash, then pip install "xxhash' in said.stderr


def test_an_error_of_another_kind_is_not_blamed_on_a_package() -> None:
    with pytest.raises(FileNotFoundError) as of_a_file:
        np.load("/no/such/file")
    assert broken_package(of_a_file.value, "it") is None


def test_an_import_of_ours_that_fails_is_a_bug(neuzip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import neuzip.compress.machine as machine

    def processor() -> str:
        raise ImportError("cannot import name 'x' from 'neuzip.errors'", name="neuzip.errors")

    monkeypatch.setattr(machine, "processor", processor)
    assert neuzip("env").exit_code == 3  # though typer has called it, which is a package that we need


def test_what_is_there_is_not_asked_for() -> None:
    require("it", "torch", "yaml")
    with pytest.raises(MissingPackage, match="it needs no-such and nor-this, which are not installed"):
        require("it", "torch", "no_such", "nor_this")


def test_the_repository_is_that_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    class Release:
        def get_all(self, name: str) -> list[str]:
            return ["Issues, https://code.example/n/issues", "Repository, https://code.example/n"]

    monkeypatch.setattr(distribution, "metadata", lambda name: EmailMessage())
    assert distribution.repository() is None
    assert distribution.install_sentence() == "Run `pip install .` in a clone of its repository."
    monkeypatch.setattr(distribution, "metadata", lambda name: Release())
    assert distribution.repository() == "https://code.example/n"
    assert distribution.install_sentence() == "Run `pip install git+https://code.example/n`."
