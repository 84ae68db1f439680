"""The folders at the root are one package: what is listed and installed, who imports whom, which versions."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import neuzip_autoload
import pytest
import release
from lowest_versions import lowest_versions
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from project import PROJECT, RANGES, ROOT

import neuzip

SETUPTOOLS = PROJECT["tool"]["setuptools"]
BIN = Path(sys.executable).parent
ROOMS = {folder: name for name, folder in SETUPTOOLS["package-dir"].items() if (ROOT / folder).is_dir()}
PACKAGES = ("cli", "eval", "train", "runtime", "compress", "formats", "kernels")
NOT_PACKAGED = ("tests", "benchmarks")
ADDRESS = "https://code.example/neuzip/neuzip"
HOOK = "neuzip_autoload.py"
"""What `import torch` calls: outside the package, as it must not fail where that does."""


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def packaged_path(path: Path) -> str:
    """Where a file of a room lies below site-packages."""
    room, *rest = path.relative_to(ROOT).parts
    return "/".join([*ROOMS[room].split("."), *rest])


# The list of packages


def test_every_folder_with_code_is_a_room():
    folders = {path.parent.name for path in ROOT.glob("*/*.py") if not path.parent.name.startswith(".")}
    assert folders - {"build", "dist"} <= {*ROOMS, *NOT_PACKAGED}


def test_listed_packages_are_the_folders_with_code():
    folders = {packaged_path(path.parent).replace("/", ".") for path in sources(*ROOMS)}
    assert sorted(folders) == sorted(SETUPTOOLS["packages"])


def test_every_package_has_an_init():
    assert not [path.parent for path in sources(*ROOMS) if not (path.parent / "__init__.py").is_file()]


def test_installed_version_is_the_written_one():
    assert importlib.metadata.version("neuzip-toolkit") == PROJECT["project"]["version"]


# The wheel


@dataclass(frozen=True)
class Built:
    """What `make release` leaves in dist, built from a copy of the tree, without the network."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    hidden = shutil.ignore_patterns(
        ".venv*", ".typing", ".carry", ".fuzz", ".git", ".*_cache", ".hypothesis", "__pycache__", "build",
        "dist", "*.egg-info", "*.nb[ic]", "neuzip-demo",
    )  # fmt: skip
    tree = shutil.copytree(ROOT, tmp_path_factory.mktemp("built") / "tree", ignore=hidden)
    release.prepare(tree, ADDRESS)
    return Built(*release.build(tree, tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="session")
def wheel(built: Built) -> Path:
    return built.wheel


@pytest.fixture(scope="session")
def inside(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=Path(sys.executable).parent
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_adds_one_name_and_the_hook_to_site_packages(inside: set[str]):
    version = PROJECT["project"]["version"]
    assert {name.split("/")[0] for name in inside} == {"neuzip", HOOK, f"neuzip_toolkit-{version}.dist-info"}


def test_wheel_holds_every_source_file(inside: set[str]):
    assert {name for name in inside if name.endswith(".py")} == {
        HOOK, *(packaged_path(path) for path in sources(*ROOMS))
    }  # fmt: skip


def test_torch_finds_the_hook():
    (found,) = importlib.metadata.entry_points(group="torch.backends", name="neuzip")
    assert found.load() is neuzip_autoload.autoload
    imports = [
        node for node in ast.walk(ast.parse((ROOT / HOOK).read_text())) if isinstance(node, ast.Import)
    ]
    assert {alias.name for node in imports for alias in node.names} == {"os", "logging", "neuzip"}


def test_the_hook_names_a_folder_that_hides_neuzip(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(neuzip, "__file__", None)  # as in a folder without __init__.py
    monkeypatch.setattr(neuzip, "__path__", [str(tmp_path)])
    neuzip_autoload.autoload()
    (said,) = caplog.messages
    assert said.endswith(f"transformers loads no compressed folder: the folder {tmp_path} hides it")


def test_wheel_holds_the_data(inside: set[str]):
    wanted = [ROOT / "neuzip" / "py.typed", *(ROOT / "eval").rglob("*.j2")]
    wanted += [path for path in (ROOT / "eval" / "demo" / "checkpoint").glob("*") if path.is_file()]
    wanted += [ROOT / "formats" / "SPEC.md", *(ROOT / "kernels" / "tuning").rglob("*.toml")]
    missing = {packaged_path(path) for path in wanted} - inside
    assert not missing
    assert any(name.endswith("/LICENSE") for name in inside)


@pytest.mark.slow
def test_wheel_runs_where_it_is_installed(wheel: Path, tmp_path: Path):
    pip("install", "--no-deps", "--no-index", "--target", tmp_path, wheel)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import neuzip.cli as c; print(c.__file__); "
    )
    program += "sys.exit(c.run(['--version']))"

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", "-c", program], check=False, capture_output=True, text=True, cwd=tmp_path
        )

    first = start()
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines() == [
        str(tmp_path / "neuzip" / "cli" / "__init__.py"),
        f"neuzip {PROJECT['project']['version']}",
    ]

    # The other PyPI package called neuzip, unpacked over ours.
    info = tmp_path / "neuzip-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neuzip\nVersion: 1.2\n")
    (tmp_path / "neuzip" / "manager.py").write_text("")
    second = start()
    assert second.returncode == 1
    assert "another package called neuzip (1.2) is mixed with this one" in second.stderr


# The sdist, and what an index shows


@pytest.fixture(scope="session")
def about(built: Built) -> Message:
    """The wheel's metadata, which is what an index shows."""
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def targets(page: str) -> list[tuple[str, str]]:
    """Where the links and images of a page lead, as a renderer of Markdown sees them."""
    found = []
    for block in MarkdownIt("commonmark").enable("table").parse(page):
        for token in block.children or []:
            if token.type in ("link_open", "image"):
                found.append((token.type, str(token.attrs.get("href") or token.attrs.get("src"))))
    return found


def test_the_page_of_an_index_links_to_the_tag(about: Message) -> None:
    page = str(about.get_payload(decode=True), "utf-8")  # type: ignore[arg-type]
    there = targets(page)
    assert len(there) == len(targets((ROOT / "README.md").read_text(encoding="utf-8"))) > 20
    assert not [target for _, target in there if not target.startswith(("https://", "#"))]
    version = about["Version"]
    for kind, target in there:
        if target.startswith(ADDRESS):
            folder, path = ("raw" if kind == "image" else "blob"), target.partition("#")[0]
            assert path.startswith(f"{ADDRESS}/{folder}/v{version}/")
            assert (ROOT / path.removeprefix(f"{ADDRESS}/{folder}/v{version}/")).exists()


def test_the_metadata_name_the_repository(about: Message) -> None:
    urls = dict(line.split(", ", 1) for line in about.get_all("Project-URL", []))
    assert urls.keys() == {"Repository", "Documentation", "Issues", "Changelog"}
    assert urls["Repository"] == ADDRESS
    assert all(url.startswith(ADDRESS) for url in urls.values())
    assert about["Author"] == about["Maintainer"] == "The neuzip authors"
    assert "@" not in "".join(about.values()).replace("neuzip-toolkit@", "")


def test_the_sdist_holds_the_repository(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("no git repository, as in an unpacked sdist")
    assert {name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()} <= inside
    assert not [name for name in inside if "__pycache__" in name or name.startswith((".venv", ".git/"))]


# Who imports whom


def test_rooms_are_imported_by_their_full_names():
    bare = "|".join(set(ROOMS) - {"neuzip"})
    suspicious = re.compile(rf"^\s*(?:from|import)\s+(?:{bare})\b", re.MULTILINE)
    assert suspicious.search("    from compress.pipeline import x")
    wrong = []
    for path in sources(*ROOMS, *NOT_PACKAGED):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if suspicious.search(text) else ():  # or a sentence begins so
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            wrong += [f"{path}: say neuzip.{name}" for name in names if re.match(rf"({bare})\b", name)]
    assert not wrong


def lint_imports(rooms: dict[str, str], tmp_path: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Check contracts (all if none is named) on a package made of links or files, as `make lint` does."""
    tree = tmp_path / "typing" / "neuzip"
    tree.mkdir(parents=True)
    (tree / "__init__.py").write_text("")
    for front in (ROOT / "neuzip").glob("[a-z]*.py"):
        (tree / front.name).write_text("")
    for name, source in rooms.items():
        if source.startswith("/"):
            (tree / name).symlink_to(source)
        else:
            (tree / name).mkdir()
            (tree / name / "__init__.py").write_text(source)
    named = [word for contract in contracts for word in ("--contract", contract)]
    return subprocess.run(
        [BIN / "lint-imports", "--no-cache", "--config", ROOT / "pyproject.toml", *named],
        check=False,
        capture_output=True,
        text=True,
        cwd=tree.parent,
    )


def test_imports_between_rooms_point_down(tmp_path: Path):
    rooms = {folder: str(ROOT / folder) for folder in ROOMS if (ROOT / folder / "__init__.py").is_file()}
    done = lint_imports({name: place for name, place in rooms.items() if name != "neuzip"}, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("formats", "compress"),
        ("formats", "kernels"),
        ("kernels", "formats"),
        ("compress", "runtime"),
        ("runtime", "eval"),
        ("eval", "train"),
        ("train", "eval"),
        ("eval", "cli"),
        ("cli", "kernels"),
    ],
)
def test_the_contract_finds_an_import_against_the_arrows(importer: str, imported: str, tmp_path: Path):
    rooms = dict.fromkeys(PACKAGES, "")
    rooms[importer] = f"def later():\n    import neuzip.{imported}\n"
    done = lint_imports(rooms, tmp_path, "rooms", "cli")  # others name modules that are not here
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_the_contract_finds_a_new_room(tmp_path: Path):
    done = lint_imports(dict.fromkeys((*PACKAGES, "helpers"), ""), tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr


# Versions

PINS = [
    Requirement(line.split("#")[0])
    for line in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    if line.split("#")[0].strip()
]


def pins_for(python: str) -> dict[str, str]:
    """The pinned versions on Linux with this Python; each name once."""
    here = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "extra": "",
    }
    chosen: dict[str, str] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(here):
            (exact,) = pin.specifier
            name = canonicalize_name(pin.name)
            assert exact.operator == "==", pin
            assert "*" not in exact.version, pin
            assert name not in chosen, f"{name} is pinned twice for Python {python}"
            chosen[name] = exact.version
    return chosen


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_pins_lie_in_the_ranges(python: str):
    pins = pins_for(python)
    for wanted in RANGES:
        if wanted.marker is None or wanted.marker.evaluate(
            {"python_version": python, "sys_platform": "linux"}
        ):
            assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)], prereleases=True), wanted
    setuptools = Requirement(
        next(line for line in PROJECT["build-system"]["requires"] if "setuptools" in line)
    )
    assert setuptools.specifier.contains(pins["setuptools"])


def test_the_lowest_versions_are_those_of_the_ranges():
    """What `make lowest` installs: one exact version of each requirement, which its range allows."""
    exact = [Requirement(line) for line in lowest_versions()]
    assert [pin.name for pin in exact] == [wanted.name for wanted in RANGES]
    for pin, wanted in zip(exact, RANGES, strict=True):
        (version,) = pin.specifier
        assert version.operator == "=="
        assert wanted.specifier.contains(version.version)
        assert str(pin.marker) == str(wanted.marker)
        (lower_bound,) = (bound for bound in wanted.specifier if bound.operator == ">=")
        assert lower_bound.version == version.version


def test_numba_compiles_the_vector_form_of_the_coder_right():
    """0.61 does not where there is AVX-512; `vector_form` would notice, and be slow."""
    (numba,) = (wanted for wanted in RANGES if wanted.name == "numba")
    assert not numba.specifier.contains("0.61.2")


def test_pins_are_complete():
    pins = pins_for(f"{sys.version_info.major}.{sys.version_info.minor}")
    unpinned = {
        f"{name} needs {needed.name}"
        for name in pins
        for needed in map(Requirement, importlib.metadata.requires(name) or [])
        if (needed.marker is None or needed.marker.evaluate({"extra": ""}))
        and canonicalize_name(needed.name) not in pins
        # A CUDA build of torch pins what it needs itself, and a CPU build has none of it.
        and not re.match(r"nvidia-|cuda-", needed.name)
    }
    assert not unpinned


def test_pins_are_needed():
    pins = pins_for(f"{sys.version_info.major}.{sys.version_info.minor}")
    tools = {
        "hypothesis", "import-linter", "mypy", "pdoc", "pytest", "pytest-cov", "pytest-xdist", "ruff",
        "setuptools", "triton",
    }  # fmt: skip
    companions = {"accelerate", "peft"}
    readers = {"compressed-tensors", "gguf", "xllamacpp"}  # of what `neuzip export` writes
    needed = tools | companions | readers | {canonicalize_name(wanted.name) for wanted in RANGES}
    for name in pins:
        needed |= {
            canonicalize_name(Requirement(line).name) for line in importlib.metadata.requires(name) or []
        }
    assert set(pins) <= needed


# Files of the repository


def test_ci_runs_strictly():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 == 0o111
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_no_page_tells_to_install_the_other_package(path: Path):
    assert not re.search(r"pip install neuzip\b(?!-toolkit)", path.read_text(encoding="utf-8"))


def test_the_image_is_built_from_what_pip_needs():
    """No container is built here: what can go wrong is looked at line by line."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    files = {HOOK, "LICENSE", "README.md", "pyproject.toml", "requirements-dev.txt"}
    assert let_in == {*ROOMS, *files}
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line]
    assert {word for word, _ in words} == {
        "FROM", "ARG", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"
    }  # fmt: skip
    for word, rest in words:
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
    (base,) = {rest.partition(" AS ")[0] for word, rest in words if word == "FROM"}
    version = base.removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]
    assert len([pin for pin in PINS if pin.name == "torch"]) == 1
    assert [rest for word, rest in words if word == "USER"] == ["neuzip"]
    assert [rest for word, rest in words if word == "ENTRYPOINT"] == ['["neuzip"]']
