"""neuzip ternarize, and what comes after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "eval" / "demo" / "checkpoint"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--allow-destructive does it"),
        (["--allow-destructive"], "needs a text"),
        (["--allow-destructive", "--calibration", "demo", "--group", "0"], "is no group"),
        (["--allow-destructive", "--calibration", "demo", "--group", "column"], "is no group"),
    ],
)
def test_what_is_refused(options, said: str, neuzip, tmp_path: Path):
    found = neuzip("ternarize", DEMO, tmp_path / "t", *options)
    assert found.exit_code == 2
    assert said in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_ternarize_then_compress(neuzip, tmp_path: Path):
    """It leaves a plain checkpoint, which is stored without loss, and is far better than blind rounding."""
    said = neuzip(
        "ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--calibration", "demo",
        "--calibration-tokens", 4096, "--json",
    )  # fmt: skip
    assert said.exit_code == 0, said.stderr
    report = json.loads(said.stdout)
    assert len(report["tensors"]) == 42
    assert 0.2 < report["zeros"] < 0.6
    assert report["tokens"] == 4096
    assert {p.name for p in (tmp_path / "t").iterdir()} == {p.name for p in DEMO.iterdir()}
    blind = neuzip(
        "ternarize", DEMO, tmp_path / "blind", "--allow-destructive", "--quantizer", "absmean", "-q"
    )  # fmt: skip
    assert blind.stdout.strip() == str(tmp_path / "blind")
    divergences = {}
    for name in ("t", "blind"):
        small = tmp_path / f"{name}.nz"
        said = neuzip("compress", tmp_path / name, small, "--ternary", "--ternary-group", "row", "--json")
        assert said.exit_code == 0, said.stderr
        stored = json.loads(said.stdout)
        for tensor in stored["tensors"]:
            assert tensor["scheme"].startswith("ternary exact") == (tensor["name"] in report["tensors"])
        assert all(t["loss"] is None for t in stored["tensors"])
        said = neuzip(
            "eval", small, "--base", DEMO, "--text", "demo", "--conventions", "token", "--max-tokens", 2048,
            "--device", "cpu", "--json",
        )  # fmt: skip
        divergences[name] = json.loads(said.stdout)["comparison"]["kld"]["mean"]["value"]
    assert divergences["t"] < 0.2 * divergences["blind"]


def test_what_exists_stays(neuzip, tmp_path: Path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine").touch()
    found = neuzip("ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--quantizer", "absmean")
    assert "exists already" in found.stderr
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["mine"]
