"""`make release`: what it refuses, and how links become absolute (test_packaging.py has what it builds)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://code.example/neuzip/neuzip"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("[a](docs/README.md)", "[a](https://h/o/n/blob/v1/docs/README.md)"),
        ("[`-k`](docs/README.md#x-y) b", "[`-k`](https://h/o/n/blob/v1/docs/README.md#x-y) b"),
        ("![p](LICENSE)", "![p](https://h/o/n/raw/v1/LICENSE)"),
        ("[a](https://x/y) [b](#c)", "[a](https://x/y) [b](#c)"),
        ("`[a](LICENSE)`", "`[a](LICENSE)`"),
        (
            "```\n[a](LICENSE)\n```\n[b](LICENSE)",
            "```\n[a](LICENSE)\n```\n[b](https://h/o/n/blob/v1/LICENSE)",
        ),
    ],
)
def test_links_become_absolute(page: str, expected: str) -> None:
    assert release.absolute_links(page, ROOT, "https://h/o/n/{}/v1") == expected


def test_a_link_that_leads_nowhere_stops_the_release() -> None:
    with pytest.raises(SystemExit, match=r"README\.md: links to no/such\.md, which is not there"):
        release.absolute_links("[a](no/such.md#b)", ROOT, "https://h/{}")


@pytest.mark.parametrize(
    "page",
    ['[a](LICENSE "title")', "[![p](LICENSE)](docs)", "[a][b]\n\n[b]: LICENSE", '<img src="LICENSE">'],
    ids=["title", "picture", "reference", "HTML"],
)
def test_a_relative_link_in_another_form_stops_the_release(page: str) -> None:
    with pytest.raises(SystemExit, match="a relative link is not in the form"):
        release.absolute_links(page, ROOT, "https://h/{}")


@pytest.mark.parametrize(
    "address",
    ["", "http://h/o/n", "https://h", "https://u:p@h/o/n", "https://h/o/n.git", "https://h/../n"],
)
def test_no_address_no_release(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["release.py", address])
    with pytest.raises(SystemExit, match="is no address of a repository, such as https://HOST/OWNER/NAME"):
        release.main()


def test_a_changed_tree_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*command: str, folder: Path = ROOT) -> str:
        assert command == ("git", "status", "--porcelain")
        return " M README.md"

    monkeypatch.setattr(release, "said", said)
    monkeypatch.setattr(sys, "argv", ["release.py", ADDRESS])
    with pytest.raises(SystemExit, match=r"(?s)commit these first, or remove them.*README\.md"):
        release.main()


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("CHANGELOG.md", "] - 20", "] - soon 20", "has no heading with version .* and a date"),
        ("pyproject.toml", "[project.scripts]", "[project.gui-scripts]", "has not the form"),
    ],
)
def test_what_is_not_ready_is_not_released(
    file: str, old: str, new: str, problem: str, tmp_path: Path
) -> None:
    for name in ("CHANGELOG.md", "pyproject.toml", "README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace(old, new) if name == file else text, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"{file}: {problem}"):
        release.prepare(tmp_path, ADDRESS)
