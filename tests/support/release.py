"""Build sdist and wheel for an index, from a clean tree: python tests/support/release.py https://HOST/OWNER/NAME

The repository does not hold its own address. Here it becomes `[project.urls]`, by which model cards tell how
to install neuzip. The relative links of README.md become links to the tag of the version, because an index
shows that page far from the files. Both files go to dist/. `make release REPOSITORY=...` runs it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"https://[\w.-]+(:\d+)?(/(?!\.)[\w.-]+){2,}", re.ASCII)
LINK = r"(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^][`])*)\]\((?P<target>[^()\s]+)\)"
OTHER_LINK = re.compile(
    r"""\]\(\s*<?(?!https?://|mailto:|\#)[^)]|^ *\[[^]]+\]: *(?!https?://)|(?:src|href)="(?!https?://|\#)""",
    re.MULTILINE,
)
"""A relative link in another form than LINK: with a title, in a picture, by a reference, or in HTML."""

LINK_OR_CODE = re.compile(rf"^```.*?^```|{LINK}|`[^`]*`", re.DOTALL | re.MULTILINE)


def main() -> None:
    address = sys.argv[1].strip() if len(sys.argv) > 1 else ""
    if ADDRESS.fullmatch(address) is None or address.endswith(".git"):
        stop(f"REPOSITORY={address}: is no address of a repository, such as https://HOST/OWNER/NAME")
    if changed := said("git", "status", "--porcelain"):
        stop(f"commit these first, or remove them: a release is what the repository holds\n{changed}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        archive = Path(folder) / "tree.tar"
        said("git", "archive", "--output", str(archive), "HEAD")
        unpack(archive, tree)
        version = prepare(tree, address)
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in build(tree, ROOT / "dist"):
            print(f"wrote {file.relative_to(ROOT)}, {file.stat().st_size:,} bytes")
    print(f"then: git tag v{version} && git push {address} v{version}, and upload both files")


def prepare(tree: Path, address: str) -> str:
    """Write the address into a tree that is to be built: its version."""
    project, readme = tree / "pyproject.toml", tree / "README.md"
    settings = project.read_text(encoding="utf-8")
    match = re.search(r'^version = "(.+)"$', settings, re.MULTILINE)
    settings = re.sub(r"^\[project\.urls\]\n(.+\n)*\n", "", settings, flags=re.MULTILINE)  # an sdist has them
    if match is None or settings.count("\n[project.scripts]\n") != 1:
        stop("pyproject.toml: has not the form that this script expects")
    version = match[1]
    changes = (tree / "CHANGELOG.md").read_text(encoding="utf-8")
    if re.search(rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE) is None:
        stop(f"CHANGELOG.md: has no heading with version {version} and a date")
    urls = {
        "Repository": address,
        "Documentation": f"{address}/blob/v{version}/docs/README.md",
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    settings = settings.replace("\n[project.scripts]\n", f"\n[project.urls]\n{table}\n[project.scripts]\n")
    project.write_text(settings, encoding="utf-8")
    text = absolute_links(readme.read_text(encoding="utf-8"), tree, f"{address}/{{}}/v{version}")
    readme.write_text(text, encoding="utf-8")
    return version


def absolute_links(page: str, tree: Path, base: str) -> str:
    """A page of Markdown at the top of `tree` with absolute links to files; `base` has {} for blob or raw."""

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or re.match(r"https?://|mailto:|#", target):
            return match[0]
        path = target.partition("#")[0]
        if not (tree / path).exists():
            stop(f"README.md: links to {path}, which is not there")
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({base.format(kind)}/{target})"

    page = LINK_OR_CODE.sub(absolute, page)
    left = OTHER_LINK.search(re.sub(r"^```.*?^```|`[^`]*`", "", page, flags=re.DOTALL | re.MULTILINE))
    if left is not None:
        stop(f"README.md: a relative link is not in the form [text](path): {left[0]}")
    return page


def build(tree: Path, target: Path) -> tuple[Path, Path]:
    """Sdist and wheel of a tree, the wheel from the sdist, by the setuptools that is installed."""
    program = f"from setuptools import build_meta as b; print(b.build_sdist({str(target)!r}))"
    name = said(sys.executable, "-c", program, folder=tree).splitlines()[-1]
    with tempfile.TemporaryDirectory() as folder:
        unpack(target / name, Path(folder))
        (source,) = Path(folder).iterdir()
        program = f"from setuptools import build_meta as b; print(b.build_wheel({str(target)!r}))"
        wheel = said(sys.executable, "-c", program, folder=source).splitlines()[-1]
    return target / name, target / wheel


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(folder)


def said(*command: str, folder: Path = ROOT) -> str:
    """What a command says on stdout. Ends the script where the command fails."""
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ran.returncode:
        stop(f"{' '.join(command[:2])} failed\n{ran.stdout}{ran.stderr}")
    if "Warning" in ran.stderr:
        print(ran.stderr, file=sys.stderr)
    return ran.stdout.strip()


def stop(problem: str) -> None:
    sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
