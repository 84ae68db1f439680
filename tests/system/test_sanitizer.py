"""Mutated streams of every form are decoded, and compute-sanitizer sees no access outside their arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import sanitize

SCRIPT = Path(sanitize.__file__)


@pytest.mark.parametrize("form", ["bf16", "codes crossing", "sparse delta"])
def test_mutated_streams_are_decoded(form: str) -> None:
    assert sanitize.here([form], rounds=1, seed=1) > 0


@pytest.mark.skipif(sanitize.ON_GPU, reason="a CUDA device")
def test_without_a_gpu_or_the_tool_the_script_says_what_is_missing() -> None:
    said = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0
    assert said.stdout.startswith("skipped: ")


@pytest.mark.gpu
def test_compute_sanitizer_sees_no_access_outside_the_arrays() -> None:
    said = subprocess.run(
        [sys.executable, SCRIPT, "--rounds", "2"], capture_output=True, text=True, timeout=300
    )
    if said.stdout.startswith("skipped: "):
        pytest.skip(said.stdout.strip())
    assert said.returncode == 0, said.stdout
