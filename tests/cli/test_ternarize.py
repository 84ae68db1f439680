"""neuzip ternarize, and what comes after it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from models import HAS_VERSION_5
from safetensors import SafetensorError
from transformers import MixtralConfig, MixtralForCausalLM

from neuzip.cli import run
from neuzip.errors import NeuzipError
from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations

DEMO = Path(__file__).parents[2] / "eval" / "demo" / "checkpoint"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--allow-destructive converts it anyway"),
        (["--allow-destructive"], "needs a text"),
        (["--allow-destructive", "--text", "demo", "--ternary-group", "0"], "not a group"),
        (["--allow-destructive", "--text", "demo", "--ternary-group", "column"], "not a group"),
        (
            ["--allow-destructive", "--text", "demo", "--ternary-quantizer", "absmean"],
            "has no effect with --ternary-quantizer absmean",
        ),
    ],
)
def test_what_is_refused(options, said: str, neuzip, tmp_path: Path):
    found = neuzip("ternarize", DEMO, tmp_path / "t", *options)
    assert found.exit_code == 2
    assert said in found.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ternarize_then_compress(neuzip, tmp_path: Path):
    """It leaves a plain checkpoint, which is stored without loss, and is far better than blind rounding."""
    said = neuzip(
        "ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--text", "demo",
        "--max-tokens", 2048, "--json",
    )  # fmt: skip
    assert said.exit_code == 0, said.stderr
    report = json.loads(said.stdout)
    assert len(report["tensors"]) == 42
    assert 0.2 < report["zeros"] < 0.6
    assert report["tokens"] == 2048
    assert {p.name for p in (tmp_path / "t").iterdir()} == {p.name for p in DEMO.iterdir()}
    blind = neuzip(
        "ternarize", DEMO, tmp_path / "blind", "--allow-destructive", "--ternary-quantizer", "absmean", "-q"
    )  # fmt: skip
    assert blind.stdout.strip() == str(tmp_path / "blind")
    divergences = {}
    for name in ("t", "blind"):
        small = tmp_path / f"{name}.nz"
        said = neuzip("compress", tmp_path / name, small, "--ternary", "--json")
        assert said.exit_code == 0, said.stderr
        stored = json.loads(said.stdout)
        for tensor in stored["tensors"]:
            assert tensor["scheme"].startswith("ternary exact") == (tensor["name"] in report["tensors"])
        assert all(t["loss"] is None for t in stored["tensors"])
        said = neuzip(
            "eval", small, "--original", DEMO, "--text", "demo", "--conventions", "token",
            "--max-tokens", 1024, "--device", "cpu", "--json",
        )  # fmt: skip
        divergences[name] = json.loads(said.stdout)["comparison"]["kld"]["mean"]["value"]
    assert divergences["t"] < 0.2 * divergences["blind"]


@pytest.mark.parametrize("group", ["tensor", "64"])
def test_the_command_that_it_names_compresses_without_loss(group: str, neuzip, tmp_path: Path):
    dst = tmp_path / "t"
    options = ("--ternary-quantizer", "absmean", "--ternary-group", group, "--allow-destructive")
    said = neuzip("ternarize", DEMO, dst, *options)
    (command,) = re.findall(r"^to compress it: neuzip (.*)$", said.stderr, re.MULTILINE)
    stored = neuzip(*shlex.split(command), "--json").json
    assert stored["lossless"] and stored["dst"] == f"{dst}.nz"
    assert sum(tensor["scheme"].startswith("ternary exact") for tensor in stored["tensors"]) == 42


def test_a_full_disk_is_told_as_everywhere(neuzip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights are written by safetensors, which has an error of its own for it."""
    out = tmp_path / "out"

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    command = ["ternarize", DEMO, out, "--ternary-quantizer", "absmean", "--allow-destructive"]
    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full)
        said = neuzip(*command)
    assert (said.exit_code, out.exists()) == (1, False)
    hint = "free some space and repeat the command"
    assert said.stderr.endswith(f"error: {out}.neuzip-partial: no space left on the disk\nhint: {hint}\n")
    assert neuzip(*command).exit_code == 0

    config = (out / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "gone"))
        with pytest.raises(NeuzipError, match=r"config\.json: cannot be written: No such file"):
            ACTIVATIONS_ENTRY.write(out, Activations("b1.58"))
    assert (out / "config.json").read_bytes() == config
    assert not list(out.glob("*.new"))


def test_what_exists_stays(neuzip, tmp_path: Path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine").touch()
    found = neuzip("ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--ternary-quantizer", "absmean")
    assert "exists already" in found.stderr
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["mine"]


@pytest.fixture(scope="module")
def with_a4_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with ternary weights by least squares, compressed; config.json records a4.8."""
    plain = tmp_path_factory.mktemp("a4.8") / "t"
    small = plain.with_name("t.nz")
    options = ["--allow-destructive", "--ternary-quantizer", "least-squares"]
    assert run(["ternarize", str(DEMO), str(plain), *options]) == 0
    assert run(["compress", str(plain), str(small), "--ternary", "--activations", "a4.8"]) == 0
    return small


@pytest.mark.slow
def test_activations_are_recorded_and_can_be_others(neuzip, with_a4_8: Path):
    """a4.8 as config.json says it, b1.58 as the option does, none as dense weights have it: three figures."""
    assert json.loads((with_a4_8 / "config.json").read_text())["neuzip"] == {"activations": "a4.8"}
    losses = []
    for options in (
        ["--residency", "packed"],
        ["--residency", "packed", "--activations", "a4.8"],
        ["--residency", "packed", "--activations", "b1.58"],
        [],
    ):
        said = neuzip(
            "eval", with_a4_8, "--text", "demo", "--conventions", "token", "--max-tokens", 512,
            "--device", "cpu", "--json", *options,
        )  # fmt: skip
        assert said.exit_code == 0, said.stderr
        losses.append(said.json["conventions"][0]["after"]["nll"]["value"])
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3
    refused = neuzip("eval", with_a4_8, "--text", "demo", "--activations", "a4.8", "--device", "cpu")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: --activations a4.8 has no effect with --residency dense\n")
    assert "--residency packed" in refused.stderr
    asked = ["--residency", "packed", "--activations", "a4.8"]
    tasks = neuzip("eval", with_a4_8, "--text", "demo", "--tasks", "x", *asked)
    assert tasks.stderr.startswith("error: --activations a4.8 does not apply to --tasks")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ternary weights, t, and what was made of them, t.nz; both record b1.58."""
    folder = tmp_path_factory.mktemp("recorded")
    plain, small = str(folder / "t"), str(folder / "t.nz")
    assert run(["ternarize", str(DEMO), plain, "--allow-destructive", "--ternary-quantizer", "absmean"]) == 0
    assert run(["compress", plain, small, "--ternary", "--activations", "b1.58"]) == 0
    ACTIVATIONS_ENTRY.write(folder / "t", Activations("b1.58"))
    return folder


ON_DENSE = (
    "config.json records b1.58, but --residency dense does not quantise activations\n"
    "hint: use --residency packed\n"
)
COMMANDS = {
    "eval": ("--text", "demo", "--conventions", "token", "--max-tokens", 64, "--device", "cpu"),
    "generate": ("--prompt", "The", "--max-new-tokens", 2, "--device", "cpu"),
    "bench": ("--prompt-tokens", 4, "--new-tokens", 2, "--rounds", 1, "--batch", 1, "--device", "cpu"),
}


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.slow
def test_activations_that_a_residency_does_not_have_are_told(verb: str, recorded: Path, neuzip):
    """What config.json records is done, and said; or it is not, and that is said."""
    dense = neuzip(verb, recorded / "t.nz", *COMMANDS[verb])
    assert dense.exit_code == 0, dense.stderr
    assert f"warning: {recorded / 't.nz'}/{ON_DENSE}" in dense.stderr
    assert "b1.58" not in dense.stdout
    packed = neuzip(verb, recorded / "t.nz", *COMMANDS[verb], "--residency", "packed")
    assert packed.exit_code == 0, packed.stderr
    assert "warning" not in packed.stderr
    told = {
        "eval": "bfloat16 on cpu, residency packed, activations b1.58; python",
        "generate": "; residency packed, activations b1.58\n",
        "bench": "\nactivations  dense not quantised, packed b1.58\n",
    }
    assert told[verb] in packed.stdout + packed.stderr
    plain = neuzip(verb, recorded / "t", *COMMANDS[verb], "--residency", "packed")
    assert (
        "records b1.58, but no weights are stored as ternary, so activations are not quantised\n"
        in plain.stderr
    )
    if verb != "bench":
        none = neuzip(verb, recorded / "t.nz", *COMMANDS[verb], "--activations", "none")
        assert none.exit_code == 0 and "warning" not in none.stderr
        assert dense.stdout.splitlines()[:3] == none.stdout.splitlines()[:3]
        asked = neuzip(
            verb, recorded / "t", *COMMANDS[verb], "--residency", "packed", "--activations", "a4.8"
        )
        assert "warning: --activations a4.8, but no weights are stored as ternary" in asked.stderr


@pytest.mark.slow
def test_each_model_of_an_evaluation_has_its_activations(recorded: Path, neuzip, tmp_path: Path):
    asked = ("eval", recorded / "t.nz", "--original", recorded / "t", *COMMANDS["eval"])
    assert ", activations none before, b1.58 after; python" in neuzip(*asked, "--residency", "packed").stdout
    page = tmp_path / "page.md"
    found = neuzip(*asked, "--residency", "packed", "--json", "--report", page).json
    assert "residency packed, activations b1.58" in page.read_text(encoding="utf-8")
    assert found["before"]["activations"] is None
    assert found["after"]["activations"] == {"mode": "b1.58", "sites": {}}


@pytest.mark.slow
def test_what_options_contradict_is_refused_before_torch_is_loaded():
    code = """
        import sys
        from neuzip.cli import run
        for line in (
            "eval m --text demo --activations a4.8", "generate m --prompt x --activations b1.58",
            "eval m --text demo --residency ans --device cpu",
            "generate m --prompt x --residency ans --device cpu", "bench m --residency ans --device cpu",
        ):
            assert run(line.split()) == 2, line
            assert "torch" not in sys.modules, line
    """
    done = subprocess.run([sys.executable, "-P", "-c", dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: --activations") == 2
    assert done.stderr.count("error: --residency ans: is decoded on a GPU, not with --device cpu\n") == 3


@pytest.mark.slow
def test_sparsity_is_counted(neuzip, with_a4_8: Path):
    asked = ["--text", "demo", "--conventions", "token", "--max-tokens", 512, "--device", "cpu", "--sparsity"]
    said = neuzip("eval", with_a4_8, "--residency", "packed", "--json", *asked)
    zeros = said.json["sparsity"]
    assert zeros["sites"]["out"] == pytest.approx(0.5, abs=0.01)
    assert 0.05 < zeros["sites"]["qkv"] < 0.3
    assert zeros["parameters"] == 1_179_648
    assert zeros["active"] == pytest.approx((1 - zeros["overall"]) * zeros["parameters"], abs=1)
    dense = neuzip("eval", with_a4_8, *asked)
    assert "activations that are 0" in dense.stdout
    assert (
        "--sparsity: counted on unquantised activations, as --residency dense does not quantise them\n"
        in dense.stderr
    )


def test_a_group_is_never_longer_than_a_row(neuzip, tmp_path: Path):
    options = ["--allow-destructive", "--ternary-quantizer", "absmean", "-q", "--ternary-group"]
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
        "ternarize", tmp_path / "m", tmp_path / "t", "--allow-destructive", "--ternary-quantizer", "absmean"
    )
    assert "says that it is quantised" in said.stderr
    assert not (tmp_path / "t").exists()


def test_activations_that_would_say_nothing_are_refused(neuzip, tmp_path: Path):
    neuzip("ternarize", DEMO, tmp_path / "t", "--allow-destructive", "--ternary-quantizer", "absmean")
    said = neuzip(
        "compress", tmp_path / "t" / "model.safetensors", tmp_path / "one", "--ternary",
        "--activations", "a4.8",
    )  # fmt: skip
    assert "has no config.json" in said.stderr
    (tmp_path / "p.toml").write_text('[[rule]]\nmatch = "*"\nscheme = "lossless"\n')
    said = neuzip(
        "compress", tmp_path / "t", tmp_path / "z", "--plan", tmp_path / "p.toml", "--activations", "a4.8"
    )  # fmt: skip
    assert 'p.toml has no ternary rule\nhint: add a rule with scheme = "ternary"' in said.stderr
    first = neuzip("compress", tmp_path / "t", tmp_path / "z", "--ternary", "--activations", "a4.8")
    assert first.exit_code == 0
    said = neuzip("compress", tmp_path / "t", tmp_path / "z", "--ternary", "--activations", "b1.58")
    assert "exists already" in said.stderr


@pytest.mark.skipif(not HAS_VERSION_5, reason="transformers 4 has a linear layer for each expert")
def test_what_is_not_converted_is_said(neuzip, tmp_path: Path):
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=1,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "m")
    options = ["--allow-destructive", "--ternary-quantizer", "absmean"]
    said = neuzip("ternarize", tmp_path / "m", tmp_path / "t", *options)
    assert said.exit_code == 0
    assert "of the layers' weights are not converted" in said.stderr
    assert "are not converted" not in neuzip("ternarize", DEMO, tmp_path / "d", *options).stderr
