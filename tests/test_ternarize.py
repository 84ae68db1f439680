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


def test_activations_are_recorded_and_can_be_others(neuzip, tmp_path: Path):
    """a4.8 as config.json says it, b1.58 as the option does, none as dense weights have it: three figures."""
    neuzip("ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--quantizer", "least-squares")
    said = neuzip("compress", tmp_path / "t", tmp_path / "t.nz", "--ternary", "--activations", "a4.8")
    assert said.exit_code == 0, said.stderr
    assert json.loads((tmp_path / "t.nz" / "config.json").read_text())["neuzip"] == {"activations": "a4.8"}
    losses = []
    for options in (
        ["--residency", "packed"],
        ["--residency", "packed", "--activations", "a4.8"],
        ["--residency", "packed", "--activations", "b1.58"],
        [],
    ):
        said = neuzip(
            "eval", tmp_path / "t.nz", "--text", "demo", "--conventions", "token", "--max-tokens", 512,
            "--device", "cpu", "--json", *options,
        )  # fmt: skip
        assert said.exit_code == 0, said.stderr
        losses.append(said.json["conventions"][0]["after"]["nll"]["value"])
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3
    refused = neuzip("eval", tmp_path / "t.nz", "--text", "demo", "--activations", "a4.8", "--device", "cpu")
    assert "residency 'packed'" in refused.stderr


def test_sparsity_is_counted(neuzip, tmp_path: Path):
    neuzip("ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--quantizer", "least-squares")
    neuzip("compress", tmp_path / "t", tmp_path / "t.nz", "--ternary", "--activations", "a4.8")
    asked = ["--text", "demo", "--conventions", "token", "--max-tokens", 512, "--device", "cpu", "--sparsity"]
    said = neuzip("eval", tmp_path / "t.nz", "--residency", "packed", "--json", *asked)
    zeros = said.json["sparsity"]
    assert zeros["sites"]["out"] == pytest.approx(0.5, abs=0.01)
    assert 0.05 < zeros["sites"]["qkv"] < 0.3
    assert zeros["parameters"] == 1_179_648
    assert zeros["active"] == pytest.approx((1 - zeros["overall"]) * zeros["parameters"], abs=1)
    assert "inputs that are 0" in neuzip("eval", tmp_path / "t.nz", *asked).stdout
    assert "needs --text" in neuzip("eval", tmp_path / "t.nz", "--tasks", "x", "--sparsity").stderr
