"""Kernels that a command compiles while it imports libraries and reads weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neuzip.cli.kernels import likely_tokens, prefetch_kernels
from neuzip.cli.output import Output


@pytest.mark.parametrize(("prompt", "tokens"), [("", 2), ("The world is", 3), ("word " * 100, 125)])
def test_tokens_before_there_is_a_tokenizer(prompt: str, tokens: int):
    assert likely_tokens(prompt) == tokens


def test_a_cpu_needs_none_and_no_folder_is_read():
    prefetch_kernels(Output(), Path("nowhere"), torch.device("cpu"), "packed", 3)


def test_what_is_wrong_with_a_folder_is_left_to_its_reader(tmp_path: Path, capsys: pytest.CaptureFixture):
    prefetch_kernels(Output(), tmp_path, torch.device("cuda", 0), "packed", 3)
    assert capsys.readouterr() == ("", "")
