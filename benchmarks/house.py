"""The structure of the code in figures: sizes, circles of imports, and tests of schemes.

    python benchmarks/house.py [--json] [FOLDER]

FOLDER is a checkout of neuzip, this one by default. Files are read as text and nothing is imported, so
another commit is measured with `git worktree add ../other COMMIT; python benchmarks/house.py ../other`.

A circle is a set of files that import each other; imports inside functions and for type checkers count.
A test of a scheme is a comparison, or a membership, with an attribute `scheme` or `kind` on the left.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("neuzip", "cli", "compress", "formats", "kernels", "runtime", "eval", "train")


@dataclass(frozen=True)
class Room:
    """Figures of one folder: files, lines, and its longest file and function with their lines."""

    files: int
    lines: int
    longest_file: tuple[str, int]
    longest_function: tuple[str, int]


@dataclass(frozen=True)
class House:
    """Figures of a whole checkout. `circles` lists the files of each circle."""

    rooms: dict[str, Room]
    circles: list[list[str]]
    scheme_tests: int
    scheme_files: int
    test_functions: int
    test_lines: int


def sources(root: Path, room: str) -> list[Path]:
    """The Python files of a room, in order."""
    return sorted((root / room).rglob("*.py"))


def measure(root: Path = ROOT) -> House:
    """All figures of a checkout."""
    rooms = {room: measure_room(root, room) for room in ROOMS}
    by_file = {file: tests_of_schemes(file) for room in ROOMS for file in sources(root, room)}
    tests = sources(root, "tests")
    return House(
        rooms, circles(root), sum(by_file.values()), sum(count > 0 for count in by_file.values()),
        sum(_test_functions(file) for file in tests), sum(_lines(file) for file in tests),
    )  # fmt: skip


def measure_room(root: Path, room: str) -> Room:
    """Files, lines and extremes of one room."""
    files = sources(root, room)
    lengths = {str(file.relative_to(root)): _lines(file) for file in files}
    longest = max(lengths, key=lambda name: lengths[name])
    functions = [
        (f"{file.relative_to(root)}:{name}", lines) for file in files for name, lines in functions_of(file)
    ]
    return Room(
        len(files), sum(lengths.values()), (longest, lengths[longest]), max(functions, key=lambda f: f[1])
    )


def functions_of(file: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function of a file, from its signature to its end, without its docstring."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.name, lines


def tests_of_schemes(file: Path) -> int:
    """How many comparisons of a file have an attribute `scheme` or `kind` on the left."""
    return sum(
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Attribute)
        and node.left.attr in ("scheme", "kind")
        for node in ast.walk(_tree(file))
    )


def circles(root: Path = ROOT) -> list[list[str]]:
    """The circles of imports between files of the package: strongly connected sets of more than one file."""
    modules = {_module(root, file): file for room in ROOMS for file in sources(root, room)}
    arrows = {name: _imports(name, file, modules) for name, file in modules.items()}
    return sorted(
        sorted(str(modules[name].relative_to(root)) for name in part)
        for part in _components(arrows)
        if len(part) > 1
    )


def _module(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(p for p in (*([] if parts[0] == "neuzip" else ["neuzip"]), *parts) if p != "__init__")


def _imports(name: str, file: Path, modules: dict[str, Path]) -> set[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return {target for target in found if target in modules and target != name}


def _components(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected sets of a graph (Tarjan 1972), with a stack of its own: no depth of recursion."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    parts: list[list[str]] = []
    for start in arrows:
        if start in number:
            continue
        calls = [(start, iter(sorted(arrows[start])))]
        number[start] = lowest[start] = len(number)
        stack.append(start)
        while calls:
            node, targets = calls[-1]
            for target in targets:
                if target not in number:
                    number[target] = lowest[target] = len(number)
                    stack.append(target)
                    calls.append((target, iter(sorted(arrows[target]))))
                    break
                if target in stack:
                    lowest[node] = min(lowest[node], number[target])
            else:
                calls.pop()
                if calls:
                    lowest[calls[-1][0]] = min(lowest[calls[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    at = stack.index(node)
                    parts.append(stack[at:])
                    del stack[at:]
    return parts


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _test_functions(file: Path) -> int:
    if not file.name.startswith("test_"):
        return 0
    return sum(name.startswith("test_") for name, _ in functions_of(file))


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    house = measure(options.folder.resolve())
    if options.json:
        print(json.dumps(asdict(house), indent=2))
        return
    print(f"{'room':<10} {'files':>5} {'lines':>6}  longest file, longest function (lines)")
    for name, room in house.rooms.items():
        (file, lines), (function, length) = room.longest_file, room.longest_function
        print(f"{name:<10} {room.files:>5} {room.lines:>6}  {file} ({lines}), {function} ({length})")
    print(f"circles of imports: {len(house.circles)}")
    for circle in house.circles:
        print(f"  {' <-> '.join(circle)}")
    print(f"tests of .scheme or .kind: {house.scheme_tests} in {house.scheme_files} files")
    print(f"test functions: {house.test_functions}, lines of tests: {house.test_lines}")


if __name__ == "__main__":
    main()
