"""neuzip ternarize, and what comes after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

DEMO = Path(__file__).parent.parent / "eval" / "demo" / "checkpoint"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--allow-destructive does it"),
        (["--allow-destructive"], "needs a text"),
        (["--allow-destructive", "--calibration", "demo", "--group", "0"], "is no group"),
        (["--allow-destructive", "--calibration", "demo", "--group", "column"], "is no group"),
        (["--allow-destructive", "--calibration", "demo", "--quantizer", "absmean"], "takes no text"),
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


def test_a_group_is_never_longer_than_a_row(neuzip, tmp_path: Path):
    options = ["--allow-destructive", "--quantizer", "absmean", "-q", "--group"]
    for group in ("row", "1000000000000"):
        assert neuzip("ternarize", DEMO, tmp_path / group, *options, group).exit_code == 0
    left, right = ((tmp_path / g / "model.safetensors").read_bytes() for g in ("row", "1000000000000"))
    assert left == right


def test_what_is_quantised_already_is_refused(neuzip, tmp_path: Path):
    (tmp_path / "m").mkdir()
    for file in DEMO.iterdir():
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    config = json.loads((DEMO / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "quantization_mode": "online"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    said = neuzip(
        "ternarize", tmp_path / "m", tmp_path / "t", "--allow-destructive", "--quantizer", "absmean"
    )
    assert "says that it is quantised" in said.stderr
    assert not (tmp_path / "t").exists()


def test_activations_that_would_say_nothing_are_refused(neuzip, tmp_path: Path):
    neuzip("ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--quantizer", "absmean")
    said = neuzip(
        "compress", tmp_path / "t" / "model.safetensors", tmp_path / "one", "--ternary",
        "--activations", "a4.8",
    )  # fmt: skip
    assert "has no config.json" in said.stderr
    (tmp_path / "p.toml").write_text('[[rule]]\nmatch = "*"\nscheme = "lossless"\n')
    said = neuzip(
        "compress", tmp_path / "t", tmp_path / "z", "--plan", tmp_path / "p.toml", "--activations", "a4.8"
    )  # fmt: skip
    assert 'need a rule with scheme = "ternary"' in said.stderr
    first = neuzip("compress", tmp_path / "t", tmp_path / "z", "--ternary", "--activations", "a4.8")
    assert first.exit_code == 0
    said = neuzip("compress", tmp_path / "t", tmp_path / "z", "--ternary", "--activations", "b1.58")
    assert "exists already" in said.stderr


def test_what_is_not_converted_is_said(neuzip, tmp_path: Path):
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=1,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "m")
    options = ["--allow-destructive", "--quantizer", "absmean"]
    said = neuzip("ternarize", tmp_path / "m", tmp_path / "t", *options)
    assert said.exit_code == 0
    assert "of the layers' weights stay as they are" in said.stderr
    assert "stay as they are" not in neuzip("ternarize", DEMO, tmp_path / "d", *options).stderr
