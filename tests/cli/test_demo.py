"""`neuzip demo`: what it writes, what it says, and that a second run finds a way or says why not."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Said

from neuzip.compress import verify
from neuzip.eval import demo as eval_demo


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second one, and loses much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


FOLDERS = [Path("neuzip-demo") / name for name in ("lossless", "quantized", "restored")]


@pytest.mark.slow
def test_demo_tells_its_steps_and_rows(here: Path, neuzip, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a model that has learnt nothing; docs/getting-started shows the figures of the built-in one."""
    monkeypatch.setattr(eval_demo, "CHECKPOINT", tiny)
    kept = here / "neuzip-demo" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    human = neuzip("demo", "--overwrite")
    assert human.exit_code == 0, human.stderr
    assert kept.read_text() == "mine"
    steps = [line.split(":")[0] for line in human.stderr.splitlines() if line[:1].isdigit()]
    assert steps == ["1 inspect", "2 compress", "3 verify", "4 decompress", "5 evaluate"]
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    assert re.search(r"\n  lossless: (\d+) of \1 tensors identical, bit for bit\n", human.stderr)
    assert f"  all {len(files)} files identical, byte by byte\n" in human.stderr
    rows = [line for line in human.stdout.splitlines() if " kB " in line]
    assert [row.split("  ")[0] for row in rows] == ["original", "lossless", "quantized"]
    assert rows[0].split()[-3:] == rows[1].split()[-3:]  # perplexity, ±, its standard error
    assert f"text: demo (Python {platform.python_version()})\n" in human.stdout
    assert "lossless: bit-identical losses in every window\n" in human.stdout
    assert "\nquantized: " in human.stdout
    assert all(f"  {folder}: " in human.stdout for folder in FOLDERS)
    assert max(map(len, (human.stdout + human.stderr).splitlines())) <= 80
    assert verify(FOLDERS[0], tiny).different == []
    assert {p.name: p.read_bytes() for p in FOLDERS[2].iterdir()} == files


def test_demo_does_not_overwrite_unless_told(here: Path, neuzip):
    kept = here / "neuzip-demo" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    said = neuzip("demo")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr == (
        "error: neuzip-demo: exists already\nhint: choose another --output, or give --overwrite\n"
    )
    assert [p.name for p in kept.parent.iterdir()] == ["notes.txt"]


def test_a_quiet_demo_prints_its_folders(here: Path, neuzip, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eval_demo, "CHECKPOINT", tiny)
    said = neuzip("demo", "--quiet")
    assert (said.exit_code, said.stderr) == (0, "")
    assert said.stdout.splitlines() == [str(folder) for folder in FOLDERS]


@pytest.mark.slow
def test_demo_in_a_process_of_its_own_says_nothing_on_stderr(here: Path):
    """How long it takes with every kernel to be compiled first, benchmarks/startup.py says."""
    neuzip = Path(sys.executable).parent / "neuzip"
    done = subprocess.run([neuzip, "demo", "--json"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    answer = Said(0, done.stdout, "").json
    assert answer["seconds"] > 0
    assert answer["paths"] == [str(folder) for folder in FOLDERS]
    lossless, quantized = answer["compressed"]
    assert answer["bound_ratio"] < lossless["ratio"] < 0.7
    assert 4.95 <= quantized["bits_per_weight"] <= 5
    before, same, after = answer["scores"]
    assert same["difference"]["identical"]
    assert 0 < abs(after["difference"]["nll"]["value"]) < 0.03
    assert before["token_perplexity"]["value"] < 60
    assert answer["convention"]["windows"] > 30
    assert answer["versions"]["python"] == platform.python_version()
